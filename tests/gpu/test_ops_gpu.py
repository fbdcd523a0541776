"""The operations on a real GPU: `pytest -m gpu tests/gpu/test_ops_gpu.py`, under two minutes.

Tolerance, kernels against the emulation: as under the interpreter, single values of P land on the
other side of a rounding boundary. An e4m3 rounding is 2^-4 relative, a bf16 one 2^-9, and Hopper
adds e4m3 products with fewer bits than fp32: 8e-3 for fp8, 2e-3 for 16-bit P. Faults cost far
more.

Tolerance, kernels against fp64: see `floor`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tests.measures import relative_l2
from turbo_rcm_patch.kernels.launch import Tile
from turbo_rcm_patch.kernels.portable.project import project_skip as project_skip_kernel
from turbo_rcm_patch.ops import (
    AttentionSpec,
    attention_lse,
    attention_project_skip,
    attention_skip,
    denoise_step,
    linear_gelu,
    norm_modulate,
    project_skip,
    resolve_pv,
    skip,
)
from turbo_rcm_patch.ops.elementwise import norm_forward, rows_forward, skip_norm
from turbo_rcm_patch.ops.emulation import hadamard
from turbo_rcm_patch.ops.projection import skip_forward
from turbo_rcm_patch.ops.reference import exact_attention, norm_rope, split_heads
from turbo_rcm_patch.ops.spec import hadamard_width

pytestmark = pytest.mark.gpu

TIGHT = {"fp8": 8e-3, "bf16": 2e-3, "fp16": 2e-3}
#: What rounding P and v costs: relative rms error, where v is N(0, 1).
ROUNDING = {"fp8": 0.037, "bf16": 2e-3, "fp16": 2e-3}
#: Against fp64 where q and k are N(0, 1) too: int8 alone costs 0.011, e4m3 raises it to 0.037.
FLOOR = {"fp8": 0.05, "bf16": 0.02, "fp16": 0.02}
PVS = ["fp8", "bf16", "fp16"]


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def skip_without(pv: str) -> None:
    if pv == "fp8" and resolve_pv("auto", torch.device("cuda", 0)) != "fp8":
        pytest.skip("this GPU has no e4m3 matrix units")


def floor(
    q: torch.Tensor, k: torch.Tensor, smooth: bool, lengths: torch.Tensor | None, pv: str
) -> float:
    """Error against fp64 that the number formats cause by themselves.

    With v of independent N(0, 1), an error of standard deviation s in every logit is a relative
    error of s in the output. A symmetric int8 value is off by its step over sqrt(12), its step is
    the largest magnitude over 127, and the products of D of them add up. RMSNorm weights away from
    1 and unsmoothed means make logits louder, and s with them: a constant would hold for one kind
    of input. A third more than that is allowed, because a head differs from the mean of all heads.

    Args:
        q: [B, H, Nq, D] fp64, normalised and rotated.
        k: [B, H, Nk, D] fp64, likewise.
        smooth: Whether k loses its mean.
        lengths: int [B] or None.
        pv: Element type of P and v.
    """
    seen = torch.ones(k.shape[0], 1, k.shape[2], 1, dtype=torch.bool, device=k.device)
    if lengths is not None:
        seen = (torch.arange(k.shape[2], device=k.device) < lengths.view(-1, 1)).view(seen.shape)
        seen, q, k = (x[lengths > 0] for x in (seen, q, k))  # the others are zero, without error
    count = seen.sum((1, 2, 3))
    k = k.masked_fill(~seen, 0.0)
    if smooth:
        mean = k.sum(2, keepdim=True) / count.view(-1, 1, 1, 1)
        k = (k - mean).masked_fill(~seen, 0.0)
    q, k = (hadamard(x) / hadamard_width(x.shape[-1]) ** 0.5 for x in (q, k))
    q_step = q.abs().amax(-1) / 127  # a scale per row
    k_step = k.abs().amax((-1, -2)) / 127  # a scale per block of keys, at most this
    k_square = k.square().sum((1, 2, 3)) / (count * k.shape[1] * k.shape[3])
    of_q = q_step.square().mean((1, 2)) * k_square / 12
    of_k = k_step.square().mean(1) * q.square().mean((1, 2, 3)) / 12
    logit_error = float((of_q + of_k).mean().sqrt())  # D products, scaled by D ** -0.5
    return 4 / 3 * (logit_error**2 + ROUNDING[pv] ** 2) ** 0.5


def exact(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, **more: object
) -> torch.Tensor:
    """fp64 attention of [B, N, H*D] tensors without norm and rotary."""
    scale = (q.shape[-1] // heads) ** -0.5
    qh, kh, vh = (split_heads(x, heads).double() for x in (q, k, v))
    return exact_attention(qh, kh, vh, sm_scale=scale, **more)[0].transpose(1, 2).flatten(2)


@pytest.mark.parametrize("pv", PVS)
@pytest.mark.parametrize(
    ("batch", "heads", "n_q", "n_kv", "dim", "options"),
    [
        pytest.param(1, 4, 512, 512, 64, {}, id="d64"),
        pytest.param(2, 3, 1023, 1023, 128, {"norm": "across", "rope": True}, id="d128-fused-qkv"),
        pytest.param(1, 2, 1, 1, 64, {}, id="one-token"),
        pytest.param(2, 3, 130, 517, 128, {"lengths": (0, 300)}, id="key-padding"),
        pytest.param(2, 5, 777, 777, 64, {"causal": True}, id="causal"),
        pytest.param(2, 5, 700, 900, 64, {"causal": True, "lengths": (650, 900)}, id="both-masks"),
        *(
            pytest.param(1, 3, 333, 333, d, {"norm": "head", "rope": True}, id=f"d{d}-per-head")
            for d in (40, 72, 80, 96, 160, 256)
        ),
        pytest.param(1, 2, 300, 400, 64, {"dtype": torch.float32}, id="fp32-inputs"),
        pytest.param(
            1, 2, 300, 400, 64, {"dtype": torch.float16, "smooth": False}, id="unsmoothed"
        ),
    ],
)
def test_kernels_equal_the_emulation(
    batch: int, heads: int, n_q: int, n_kv: int, dim: int, options: dict, pv: str
) -> None:
    skip_without(pv)
    dtype, channels = options.get("dtype", torch.bfloat16), heads * dim
    if n_q == n_kv:
        q, k, v = random(batch, n_q, 3 * channels, dtype=dtype).chunk(3, -1)
    else:
        q, k, v = (random(batch, n, channels, dtype=dtype) for n in (n_q, n_kv, n_kv))
    weight = {None: None, "across": random(channels), "head": random(dim)}[options.get("norm")]
    weight = None if weight is None else weight.abs() + 0.5
    cos = sin = lengths = None
    if options.get("rope"):
        angle = torch.rand(n_q, dim // 2, device="cuda").repeat_interleave(2, -1)
        cos, sin = angle.cos(), angle.sin()
    if "lengths" in options:
        lengths = torch.tensor(options["lengths"], dtype=torch.int32, device="cuda")
        k, v = k.clone(), v.clone()
        for b, n in enumerate(options["lengths"]):
            k[b, n:], v[b, n:] = float("nan"), float("nan")
    arguments = {
        "norm_q": weight,
        "norm_k": weight,
        "rotary": None if cos is None else (cos, sin),
        "kv_lengths": lengths,
        "out_dtype": torch.float32,
    }
    causal = options.get("causal", False)
    kernels = AttentionSpec(
        heads=heads, pv=pv, causal=causal, smooth_k=options.get("smooth", True), impl="triton"
    )
    out, lse = attention_lse(q, k, v, kernels, **arguments)
    emulated, _ = attention_lse(q, k, v, replace(kernels, impl="reference"), **arguments)
    assert relative_l2(out, emulated) < TIGHT[pv]
    qh, kh = (
        norm_rope(x, heads, weight=weight, cos=cos, sin=sin, eps=1e-6, dtype=torch.float64)
        for x in (q, k)
    )
    truth, true_lse = exact_attention(
        qh,
        kh,
        split_heads(v, heads).double(),
        sm_scale=dim**-0.5,
        causal=causal,
        kv_lengths=lengths,
    )
    truth = truth.transpose(1, 2).flatten(2)
    assert relative_l2(out, truth) < floor(qh, kh, kernels.smooth_k, lengths, pv)
    seen = true_lse.isfinite()
    assert torch.equal(lse.isfinite(), seen)
    torch.testing.assert_close(lse[seen].double(), true_lse[seen], atol=0.15, rtol=0)


@pytest.mark.parametrize("pv", PVS)
def test_outliers(pv: str) -> None:
    """A k far from zero in some channels, a q with outlying channels."""
    skip_without(pv)
    q = random(1, 2048, 256) * (1 + 4 * (torch.rand(256, device="cuda") > 0.95)).bfloat16()
    k = random(1, 2048, 256) + 8 * random(256)
    v = random(1, 2048, 256)
    spec = AttentionSpec(heads=2, pv=pv)
    error = relative_l2(attention_skip(q, k, v, spec), exact(q, k, v, 2))
    assert error < 0.1
    assert error < 0.5 * relative_l2(
        attention_skip(q, k, v, replace(spec, smooth_k=False)), exact(q, k, v, 2)
    )


@pytest.mark.parametrize("pv", ["fp8", "bf16"])
def test_long_sequences(pv: str) -> None:
    """More keys than any video: e4m3 stays as accurate as at short lengths."""
    skip_without(pv)
    q, k, v = random(1, 64, 128), random(1, 200_003, 128), random(1, 200_003, 128)
    q = q * 4  # attention worth having at this length
    assert (
        relative_l2(attention_skip(q, k, v, AttentionSpec(heads=1, pv=pv)), exact(q, k, v, 1))
        < 0.12
    )


@pytest.mark.parametrize("pv", ["fp8", "bf16"])
def test_offsets_past_two_to_the_31(pv: str) -> None:
    skip_without(pv)
    tokens, channels = 210_000, 5120
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GiB")
    fused = torch.empty(1, tokens, 3 * channels, dtype=torch.bfloat16, device="cuda").normal_()
    q, k, v = fused.chunk(3, -1)
    spec = AttentionSpec(heads=40, pv=pv)
    out = attention_skip(q, k[:, :512], v[:, :512], spec, residual=q, c_skip=0.5)[:, -200:]
    truth = 0.5 * q[:, -200:].double() + exact(q[:, -200:], k[:, :512], v[:, :512], 40)
    assert relative_l2(out, truth) < FLOOR[pv]
    first, last = slice(0, 128), slice(channels - 128, channels)
    out = attention_skip(q[:, :64], k, v, spec)
    for head in (first, last):
        truth = exact(q[:, :64, head], k[..., head], v[..., head], 1)
        assert relative_l2(out[..., head], truth) < 0.08


@pytest.mark.parametrize("cast", ["fp32", "model"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("form", ["float", "batch", "channel", "element"])
def test_projection_and_skip(form: str, dtype: torch.dtype, cast: str) -> None:
    shape = {"batch": (2, 1, 1), "channel": (2, 1, 700), "element": (2, 1023, 700)}
    c = 0.5 if form == "float" else torch.randn(shape[form], device="cuda")
    x = random(2, 1023, 3 * 520, dtype=dtype)[..., 520:1040]
    weight, bias = random(700, 520, dtype=dtype) * 520**-0.5, random(700, dtype=dtype)
    residual = random(2, 1023, 700, dtype=dtype)
    out = project_skip(x, weight, bias, residual=residual, c_skip=c, c_out=c, cast=cast)
    truth = c * (residual.double() + F.linear(x.double(), weight.double(), bias.double()))
    budget = {torch.bfloat16: 2e-3, torch.float16: 3e-4, torch.float32: 3e-6}[dtype]
    steps = 3 if cast == "model" else 1  # every step rounds
    if dtype != torch.float32:  # The library's product, rounded as the author's is, and the skip.
        assert torch.equal(out, skip(residual, F.linear(x, weight, bias), c, c, cast=cast))
        own = {"cast": cast, "out_dtype": dtype, "tile": Tile(64, 64, 4, 2)}
        out = project_skip_kernel(x, weight, bias, residual, c, c, **own)
    assert relative_l2(out, truth) < steps * budget
    plain = skip(residual, residual.flip(1), c, c, cast=cast)
    assert torch.equal(plain, skip(residual, residual.flip(1), c, c, cast=cast, impl="reference"))


@pytest.mark.parametrize(
    ("heads", "dim", "tokens", "dtype", "pv"),
    [
        pytest.param(12, 128, 1023, torch.bfloat16, "fp8", id="bf16-h12-d128-fp8"),
        pytest.param(12, 128, 1023, torch.bfloat16, "bf16", id="bf16-h12-d128"),
        pytest.param(5, 64, 777, torch.float32, "fp8", id="fp32-h5-d64-fp8"),
        pytest.param(3, 128, 4100, torch.bfloat16, "auto", id="bf16-d128-long"),
        pytest.param(3, 80, 500, torch.bfloat16, "bf16", id="bf16-d80"),
        pytest.param(2, 256, 300, torch.float16, "fp16", id="fp16-d256"),
    ],
)
def test_one_launch(heads: int, dim: int, tokens: int, dtype: torch.dtype, pv: str) -> None:
    skip_without(pv)
    channels = heads * dim
    q, k, v, residual = (random(2, tokens, channels, dtype=dtype) for _ in range(4))
    weight, bias = random(channels, channels, dtype=dtype) * channels**-0.5, random(channels)
    bias, gate = bias.to(dtype), torch.randn(2, 1, channels, device="cuda")
    spec = AttentionSpec(heads=heads, pv=pv)

    def run(form: str) -> torch.Tensor:
        return attention_project_skip(
            q, k, v, weight, bias, spec, residual=residual, c_out=gate, form=form
        )

    branch = attention_skip(q, k, v, spec).double()
    truth = residual.double() + gate * F.linear(branch, weight.double(), bias.double())
    budget = {torch.float32: 3e-6, torch.bfloat16: 2e-3, torch.float16: 4e-4}[dtype]
    if dtype == torch.float32:
        assert relative_l2(run("two-launch"), truth) < budget
    else:  # Its product is the library's, rounded as the author's is.
        projected = F.linear(branch.to(dtype), weight, bias)
        assert torch.equal(run("two-launch"), skip(residual, projected, 1.0, gate))
    first = run("one-launch")
    assert relative_l2(first, truth) < budget
    for _ in range(100):  # scratch memory is reused from call to call, in whatever state
        assert torch.equal(run("one-launch"), first)


@pytest.mark.parametrize("pv", ["fp8", "bf16"])
def test_a_graph_replays(pv: str) -> None:
    """Nothing depends on state from outside the call."""
    skip_without(pv)
    q, k, v, residual = (random(1, 500, 384) for _ in range(4))
    weight, spec = random(384, 384) * 0.05, AttentionSpec(heads=3, pv=pv)

    def run() -> torch.Tensor:
        return attention_project_skip(
            q, k, v, weight, None, spec, residual=residual, form="one-launch"
        )

    expected = run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, expected)


@pytest.mark.parametrize("form", ["auto", "one-launch", "two-launch"])
def test_compiles_without_a_break(form: str) -> None:
    q, k, v, residual = (random(1, 300, 256) for _ in range(4))
    weight, bias, spec = random(256, 256) * 0.06, random(256), AttentionSpec(heads=2)

    def block(x: torch.Tensor) -> torch.Tensor:
        return attention_project_skip(
            x * 2, k, v, weight, bias, spec, residual=residual, form=form
        )

    torch.testing.assert_close(torch.compile(block, fullgraph=True)(q), block(q))


@pytest.mark.parametrize("channels", [1536, 3072, 100])
@pytest.mark.parametrize("form", ["modulation", "affine", "per token"])
def test_norm_modulate(channels: int, form: str) -> None:
    x = random(2, 333, 3 * channels)[..., channels : 2 * channels]
    shape = {"modulation": (2, 1, channels), "affine": (channels,)}.get(form, (2, 333, channels))
    scale = torch.randn(shape, device="cuda")
    shift = torch.randn(shape, device="cuda")
    kind = "affine" if form == "affine" else "modulation"
    got = norm_modulate(x, scale=scale, shift=shift, form=kind)
    exact = F.layer_norm(x.double(), (channels,), eps=1e-6)
    exact = exact * (scale.double() + (kind == "modulation")) + shift.double()
    # One rounding to bf16, 2^-9 at most, 2^-9 / sqrt(3) in the mean.
    assert relative_l2(got, exact) < 2e-3


@pytest.mark.parametrize("stream", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("channels", [128, 1536, 1920, 5120])
@pytest.mark.parametrize("form", ["modulation", "affine", "per token", "neither"])
def test_a_skip_with_its_norm_is_both_bit_for_bit(
    form: str, channels: int, stream: torch.dtype
) -> None:
    """From a stream in bf16 as from one in fp32; as a tensor and as int8 rows."""
    shape = {"per token": (2, 333, channels), "affine": (1, 1, channels)}.get(
        form, (2, 1, channels)
    )
    gate, factor, offset = (torch.randn(shape, device="cuda") for _ in range(3))
    if form == "affine":
        gate, factor, offset = None, factor.bfloat16(), offset.bfloat16()
    elif form == "neither":
        factor = offset = None
    one = float(form != "affine")
    branch, cast = random(2, 333, channels), "fp32" if stream == torch.float32 else "model"
    for residual in (random(2, 333, channels), 3 * random(2, 333, channels).to(stream)):
        y = skip_forward.body(residual, branch, None, gate, 1.0, 1.0, cast, "triton", stream)
        how = (residual, branch, gate, factor, offset, one, 1e-6, cast, "triton", stream)
        normed = norm_forward.body(y, factor, offset, one, 1e-6, "triton", torch.bfloat16)
        got = skip_norm(*how, torch.bfloat16)
        assert torch.equal(got[0], y) and torch.equal(got[1], normed)
        rows = rows_forward.body(y, factor, offset, one, 1e-6, "triton")
        got = skip_norm(*how, torch.int8)
        assert torch.equal(got[0], y) and all(map(torch.equal, got[1], rows))


@pytest.mark.parametrize("rope", [True, False])
@pytest.mark.parametrize("norm", ["across", "per head", "layer norm per head"])
def test_exact_attention_over_normalised_rotated_rows(norm: str, rope: bool) -> None:
    """q and k leave one kernel in bf16; what is left is torch's own attention."""
    heads, dim, n = 3, 128, 500
    q, k, v = random(2, n, 3 * heads * dim).chunk(3, -1)
    size = heads * dim if norm == "across" else dim
    weight = torch.rand(size, device="cuda").to(torch.bfloat16) + 0.5
    bias = random(dim) if norm == "layer norm per head" else None
    rotary = None
    if rope:
        angle = torch.randn(n, dim // 2, device="cuda").repeat_interleave(2, -1)
        rotary = (angle.cos(), angle.sin())
    spec = AttentionSpec(heads=heads, attention="exact")
    got = attention_skip(
        q, k, v, spec, norm_q=weight, norm_k=weight, norm_q_bias=bias, norm_k_bias=bias,
        rotary=rotary,
    )  # fmt: skip
    cos, sin = (None, None) if rotary is None else rotary
    qh, kh = (
        norm_rope(
            x, heads, weight=weight, bias=bias, cos=cos, sin=sin, eps=1e-6, dtype=torch.float64
        )
        for x in (q, k)
    )
    exact, _ = exact_attention(qh, kh, split_heads(v, heads).double(), sm_scale=dim**-0.5)
    # What rounding exact q and k to bf16 and torch's own attention leave. A bias makes logits
    # larger, and the error with them, so the bound is measured and no number.
    rounded = (x.to(torch.bfloat16) for x in (qh, kh))
    own = F.scaled_dot_product_attention(*rounded, split_heads(v, heads))
    least = relative_l2(own, exact)
    assert least < 1e-2
    assert relative_l2(got, exact.transpose(1, 2).flatten(2)) < 1.2 * least + 1e-3


def test_a_large_projection_is_the_librarys() -> None:
    """Rounded to bf16 before the skip, as eager code does; equal to it bit for bit."""
    x, residual = random(1, 32760, 1536), random(1, 32760, 1536)
    weight, bias = random(1536, 1536) / 40, random(1536)
    gate = torch.randn(1, 1, 1536, device="cuda")
    got = project_skip(x, weight, bias, residual=residual, c_out=gate)
    eager = (residual.float() + F.linear(x, weight, bias) * gate).to(torch.bfloat16)
    assert torch.equal(got, eager)


def test_linear_gelu_sees_the_sum_before_it_is_rounded() -> None:
    x, weight, bias = random(2, 300, 512), random(700, 512) / 22, random(700)
    exact = F.gelu(F.linear(x.double(), weight.double(), bias.double()), approximate="tanh")
    assert relative_l2(linear_gelu(x, weight, bias), exact) < 2.2e-3


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("noisy", [False, True], ids=["last-step", "re-noising"])
def test_a_sampler_s_step_is_fp64_throughout(noisy: bool, dtype: torch.dtype) -> None:
    x = torch.randn(2, 16, 5, 30, 52, device="cuda", dtype=torch.float64)
    v, eps = random(*x.shape, dtype=dtype), random(*x.shape, dtype=torch.float32)
    c = torch.tensor([0.06622, -0.06540, 0.93378], device="cuda", dtype=torch.float64)
    noise = eps if noisy else None
    got = denoise_step(x, v, noise, c)
    assert got.dtype == torch.float64
    expected = denoise_step(x, v, noise, c, impl="reference")
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-14)
