"""Attention kernels in Triton's interpreter; run by test_interpreter.py in a process of its own.

fp32 and fp16 only: the interpreter's bf16 arithmetic and fp8 casts are wrong, so their accuracy is
tested on a GPU.

Tolerance, kernels against the emulation: both round q, k, P and v alike. What differs is the order
of fp32 sums and the last bit of exp2, which moves single values of P by one fp16 rounding (2^-11
relative_l2); averaged over a row that is a few 1e-4 in relative L2. 1e-3 holds them apart from any
real fault (one wrong scale, one unmasked key), which costs 1e-2 and more.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.inputs import attention_inputs
from tests.measures import relative_l2
from turbo_rcm_patch.kernels.portable.prologue import quantize
from turbo_rcm_patch.ops import AttentionSpec, attention_lse, attention_skip
from turbo_rcm_patch.ops.emulation import sample_sum_of_v, scaled_v, value_errors, value_levels
from turbo_rcm_patch.ops.reference import norm_rope

TIGHT = 1e-3
FLOOR = 2e-2  # int8 with fp16 P against exact mathematics, N(0, 1)

pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    # numpy computes both sides of a `where`
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


def angles(n: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    angle = torch.randn(n, dim // 2).repeat_interleave(2, -1)
    return angle.cos(), angle.sin()


@pytest.mark.parametrize(
    ("batch", "heads", "n_q", "n_kv", "dim", "options"),
    [
        pytest.param(1, 2, 130, 300, 64, {}, id="cross-odd-lengths"),
        pytest.param(1, 1, 1, 1, 64, {}, id="one-token"),
        pytest.param(2, 2, 100, 129, 64, {"causal": True}, id="causal"),
        pytest.param(2, 1, 65, 257, 128, {"lengths": (0, 200)}, id="key-padding-none-seen"),
        pytest.param(
            2, 1, 140, 140, 64, {"causal": True, "lengths": (70, 140)}, id="causal-padding"
        ),
        pytest.param(2, 1, 65, 257, 64, {"lengths": (2**33, 200)}, id="lengths-of-64-bits"),
        pytest.param(1, 2, 66, 130, 64, {"scale": -0.2}, id="negative-scale"),
        pytest.param(1, 2, 66, 130, 64, {"scale": 0.0, "causal": True}, id="scale-of-zero"),
        pytest.param(1, 2, 300, 300, 128, {"norm": "across", "rope": True}, id="as-in-wan"),
        pytest.param(2, 1, 150, 150, 128, {"norm": "head", "rope": True}, id="d128-per-head"),
        pytest.param(2, 3, 129, 129, 40, {"norm": "across", "rope": True}, id="d40-across-heads"),
        pytest.param(1, 2, 70, 70, 72, {"norm": "head", "rope": True}, id="d72-per-head"),
        pytest.param(1, 1, 70, 70, 80, {"rope": True}, id="d80-rope"),
        pytest.param(1, 2, 66, 66, 96, {"norm": "across"}, id="d96"),
        pytest.param(
            1,
            2,
            150,
            150,
            64,
            {"norm": "layer", "rope": True, "dtype": torch.float16},
            id="as-in-cogvideox",
        ),
        pytest.param(
            2,
            3,
            70,
            129,
            40,
            {"norm": "layer", "smooth": False, "lengths": (60, 129)},
            id="d40-layer-norm-unsmoothed-padding",
        ),
        pytest.param(
            2,
            1,
            70,
            600,
            64,
            {"norm": "layer", "lengths": (0, 330)},
            id="layer-norm-mean-over-a-sample-padding",
        ),
        pytest.param(1, 1, 66, 66, 160, {}, id="d160"),
        pytest.param(1, 1, 66, 66, 256, {"norm": "head"}, id="d256"),
        pytest.param(1, 2, 66, 66, 64, {"smooth": False}, id="unsmoothed"),
        pytest.param(1, 5, 66, 66, 32, {"dtype": torch.float16}, id="fp16-inputs-h5"),
        pytest.param(1, 2, 66, 66, 64, {"attention": "int4"}, id="int4"),
        pytest.param(1, 1, 64, 600, 64, {}, id="mean-over-a-sample"),
    ],
)
def test_kernels_equal_the_emulation(
    batch: int, heads: int, n_q: int, n_kv: int, dim: int, options: dict
) -> None:
    dtype = options.get("dtype", torch.float32)
    channels = heads * dim
    q = torch.randn(batch, n_q, channels).to(dtype)
    k = (torch.randn(batch, n_kv, channels) + torch.randn(channels)).to(dtype)
    v = torch.randn(batch, n_kv, channels).to(dtype)
    if n_q == n_kv:  # views of a fused projection, read in place
        q, k, v = torch.cat([q, k, v], -1).chunk(3, -1)
    lengths = None
    if "lengths" in options:
        wide = max(options["lengths"]) >= 2**31
        lengths = torch.tensor(options["lengths"], dtype=torch.int64 if wide else torch.int32)
        k, v = k.clone(), v.clone()
        for b, n in enumerate(options["lengths"]):
            k[b, n:], v[b, n:] = float("nan"), float("nan")
    per_head = (torch.rand(dim) + 0.5).to(dtype)
    weight = {None: None, "across": torch.rand(channels) + 0.5, "head": per_head}
    weight["layer"] = per_head
    arguments = {
        "norm_q": weight[options.get("norm")],
        "norm_k": weight[options.get("norm")],
        "norm_q_bias": torch.randn(dim).to(dtype) if options.get("norm") == "layer" else None,
        "norm_k_bias": torch.randn(dim).to(dtype) if options.get("norm") == "layer" else None,
        "rotary": angles(n_q, dim) if options.get("rope") else None,
        "kv_lengths": lengths,
        "out_dtype": torch.float32,
    }
    kernels = AttentionSpec(
        heads=heads,
        pv="fp16",
        impl="triton",
        causal=options.get("causal", False),
        smooth_k=options.get("smooth", True),
        sm_scale=options.get("scale"),
        attention=options.get("attention", "int8"),
    )
    out, lse = attention_lse(q, k, v, kernels, **arguments)
    emulated, emulated_lse = attention_lse(
        q, k, v, replace(kernels, impl="reference"), **arguments
    )
    exact, _ = attention_lse(
        q, k, v, replace(kernels, impl="reference", attention="exact"), **arguments
    )
    assert relative_l2(out, emulated) < TIGHT
    torch.testing.assert_close(lse, emulated_lse, atol=1e-3, rtol=0)
    if options.get("attention") != "int4":
        assert relative_l2(out, exact) < FLOOR
    if lengths is not None and lengths[0] == 0:
        assert not out[0].any()


@pytest.mark.parametrize("rope", [False, True], ids=["no-rope", "rope"])
@pytest.mark.parametrize("smooth", [False, True], ids=["as-is", "smoothed"])
def test_the_bias_of_a_layer_norm_is_for_tokens_that_are_there(smooth: bool, rope: bool) -> None:
    """Keys that are not seen are 0, and neither scales nor means know of them."""
    k, weight, bias = torch.randn(1, 300, 64), torch.rand(64) + 0.5, 50 * torch.randn(64)
    cos, sin = angles(300, 64) if rope else (None, None)
    normed = norm_rope(k, 1, weight=weight, bias=bias, cos=cos, sin=sin, eps=1e-6)
    for seen in (0, 200):
        inputs = attention_inputs(
            k, k, k, heads=1, norm_q=weight, norm_k=weight, norm_q_bias=bias, norm_k_bias=bias,
            cos=cos, sin=sin, kv_lengths=torch.tensor([seen], dtype=torch.int32), pv="fp16",
            smooth_k=smooth, sm_scale=0.125, want_lse=True,
        )  # fmt: skip
        operands = quantize(inputs)
        assert not operands.keys.int8[:, :, seen:].any()
        assert torch.isfinite(operands.keys.scale).all()
        assert (operands.keys.scale[:, :, -(-seen // 128) :] == 1 / 127).all()
        assert not operands.queries.int8[:, :, 300:].any()
        shift = operands.queries.shift
        assert (shift is not None) == smooth
        if shift is not None and seen:
            mean = normed[:, :, :seen:2].mean(2, keepdim=True)  # every other token: 256 at most
            expected = 0.125 * (normed * mean).sum(-1)
            torch.testing.assert_close(shift[:, :, :300], expected, rtol=1e-4, atol=0.02)


@pytest.mark.parametrize("rope", [False, True], ids=["no-rope", "rope"])
@pytest.mark.parametrize(
    ("heads", "dim", "norm"),
    [(3, 40, "across"), (3, 32, "head"), (3, 64, "layer"), (1, 64, "layer"), (1, 40, "layer")],
)
def test_exact_attention_over_normalised_rows(heads: int, dim: int, norm: str, rope: bool) -> None:
    q, k, v = torch.randn(2, 20, 3 * heads * dim).chunk(3, -1)
    weight = torch.rand(heads * dim if norm == "across" else dim) + 0.5
    bias = torch.randn(dim) if norm == "layer" else None
    spec = AttentionSpec(heads=heads, attention="exact", impl="triton")
    arguments = {
        "norm_q": weight,
        "norm_k": weight,
        "norm_q_bias": bias,
        "norm_k_bias": bias,
        "rotary": angles(20, dim) if rope else None,
    }
    out = attention_skip(q, k, v, spec, **arguments)
    expected = attention_skip(q, k, v, replace(spec, impl="reference"), **arguments)
    assert relative_l2(out, expected) < 3e-6


@pytest.mark.parametrize("form", ["float", "batch", "channel", "element"])
def test_skip_in_the_epilogue(form: str) -> None:
    """The fusion alone: fp32, the same quantised attention, fused against unfused."""
    shape = {"batch": (2,), "channel": (2, 1, 80), "element": (2, 70, 80)}
    c_skip, c_out = (
        (0.7, -1.3) if form == "float" else (torch.randn(shape[form]), torch.randn(shape[form]))
    )
    q, k, v, residual = (torch.randn(2, 70, 80) for _ in range(4))
    spec = AttentionSpec(heads=2, pv="fp16", impl="triton")
    fused = attention_skip(q, k, v, spec, residual=residual, c_skip=c_skip, c_out=c_out)
    branch = attention_skip(q, k, v, spec).double()
    if form == "batch":
        c_skip, c_out = c_skip.view(2, 1, 1), c_out.view(2, 1, 1)
    assert relative_l2(fused, c_skip * residual.double() + c_out * branch) < 3e-6


def test_fp8_layout() -> None:
    """Keys of v are permuted as P is: a wrong order would leave nothing of the output.

    The interpreter's e4m3 casts are wrong for a few values in a hundred, so only coarsely.
    """
    q, k, v = (torch.randn(1, 200, 64) for _ in range(3))
    spec = AttentionSpec(heads=1, pv="fp8", impl="triton")
    out = attention_skip(q, k, v, spec)
    assert (
        relative_l2(out, attention_skip(q, k, v, replace(spec, attention="exact", impl="auto")))
        < 0.15
    )


@pytest.mark.parametrize(("n", "dim"), [(70, 40), (600, 64), (333, 128)])
def test_levels_of_v_are_those_of_the_emulation(n: int, dim: int) -> None:
    """Scale and mean bit for bit, because the order of the sum is part of the contract; the sum of
    errors against the e4m3 values that were written, whatever the interpreter's cast is."""
    heads, lengths = 2, torch.tensor([n, n // 3, 0], dtype=torch.int32)
    q, k = (torch.randn(3, n, heads * dim) for _ in range(2))
    v = torch.randn(3, n, heads * dim) + 2 * torch.randn(heads * dim)
    v[1, n // 3 :], v[2] = float("nan"), float("nan")
    inputs = attention_inputs(q, k, v, heads=heads, kv_lengths=lengths, pv="fp8")
    values = quantize(inputs).values
    assert values is not None
    scale, mean, errors = values.levels[..., :dim].unbind(2)
    step = -(-n // 256)
    v = torch.unflatten(v, 2, (heads, dim)).transpose(1, 2)
    v[1, :, n // 3 :], v[2] = 0.0, 0.0
    count = torch.tensor([n, n // 3, 0]).div(step).ceil().clamp_min(1).view(3, 1, 1)
    sampled = sample_sum_of_v(v[:, :, ::step]) / count
    expected_mean, amax = value_levels(sampled, v.abs().amax(2))
    assert torch.equal(mean, expected_mean)
    assert torch.equal(scale, amax / 448)
    assert not mean[2].any()
    # Position (h, t, f, e) of a group of 32 holds token (h, f, t, e).
    p = torch.arange(values.e4m3.shape[3])
    token = (p & ~31) + (p & 16) + ((p >> 1) & 1) * 8 + ((p >> 2) & 3) * 2 + (p & 1)
    written = torch.empty(3, heads, len(p), dim)
    written[:, :, token] = values.e4m3[:, :, :dim].float().transpose(2, 3)
    assert not written[0, :, n:].any() and not written[1, :, n // 3 :].any()
    exact = scaled_v(v, mean, amax)
    exact[1, :, n // 3 :], exact[2] = 0.0, 0.0
    far = (exact - written[:, :, :n]).abs() > 2.0**-3 * exact.abs() + 1e-2
    assert far.float().mean() < 0.05  # half a step, but for the cast's faults
    counted = errors.contiguous().view(torch.int32)
    assert torch.equal(counted, value_errors(exact, written[:, :, :n]).int())
    assert not counted[2].any() and counted[:2].any()


def test_nan_in_the_input_stays_visible() -> None:
    q, k, v = (torch.randn(1, 70, 64) for _ in range(3))
    q[0, 3, 5] = float("nan")
    out = attention_skip(q, k, v, AttentionSpec(heads=1, pv="fp16", impl="triton"))
    assert out[0, 3].isnan().all()
    assert out[0, 4:].isfinite().all()


@pytest.mark.parametrize("size", [1e-38, 1e-36, 1e-20])
def test_tiny_inputs_are_finite_and_equal_the_emulation(size: float) -> None:
    q, k = (size * torch.randn(1, 66, 32) for _ in range(2))
    v = torch.randn(1, 66, 32)
    spec = AttentionSpec(heads=1, pv="fp16", sm_scale=1.0)
    ours = attention_skip(q, k, v, replace(spec, impl="triton"))
    emulated = attention_skip(q, k, v, replace(spec, impl="reference"))
    assert torch.isfinite(ours).all() and torch.isfinite(emulated).all()
    assert relative_l2(ours, emulated) < TIGHT
