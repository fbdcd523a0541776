"""Attention: the emulation against exact mathematics, the kernels against the emulation and
against exact mathematics, exact attention against torch.

Floor: int8 q (a scale per row) and k (a scale per 128 tokens) cost 0.011 in relative L2 at
N(0, 1), whatever 16-bit type P has; e4m3 P and v raise it to 0.034; 15 levels instead of 255 to
about 0.2.

Tolerance, kernels against the emulation: both round q, k, P and v alike. What differs is the order
of fp32 sums and the last bit of exp2, which moves single values of P by one rounding: 2^-11 in
fp16, 2^-9 in bf16, 2^-4 in e4m3, whose products Hopper adds with fewer bits than fp32. Averaged
over a row that is a few 1e-4 in fp16. Real faults (one wrong scale, one unmasked key) cost 1e-2
and more.

In the interpreter inputs are fp32 and fp16: its bf16 arithmetic and its fp8 casts are wrong.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.attention_processor import Attention, CogVideoXAttnProcessor2_0
from diffusers.models.transformers.transformer_wan import (
    WanAttention,
    WanAttnProcessor,
)

from tests.implementations import Implementation, coefficient, over
from tests.inputs import attention_inputs
from tests.measures import relative_l2
from turbo_rcm_patch.kernels.portable.prologue import quantize
from turbo_rcm_patch.ops import AttentionSpec, attention_lse, attention_skip
from turbo_rcm_patch.ops.emulation import (
    hadamard,
    rounded_v,
    sample_sum_of_v,
    scaled_v,
    value_errors,
    value_levels,
)
from turbo_rcm_patch.ops.reference import exact_attention, norm_rope, split_heads
from turbo_rcm_patch.ops.registry import rotated_heads
from turbo_rcm_patch.ops.spec import hadamard_width, key_block

pytestmark = pytest.mark.usefixtures("poisoned")

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
PVS = ["fp8", "bf16", "fp16"]
FLOOR = {"bf16": 0.015, "fp16": 0.015, "fp8": 0.045}
#: Kernels against the emulation.
TIGHT = {"interpreter": {"fp16": 1e-3}, "gpu": {"fp8": 8e-3, "bf16": 2e-3, "fp16": 2e-3}}
#: What rounding P and v costs: relative rms error, where v is N(0, 1).
ROUNDING = {"fp8": 0.037, "bf16": 2e-3, "fp16": 2e-3}


def inputs(
    batch: int, n_q: int, n_kv: int, channels: int, device: str = "cpu"
) -> tuple[torch.Tensor, ...]:
    q, k, v = (torch.randn(batch, n, channels, device=device) for n in (n_q, n_kv, n_kv))
    return q, k + torch.randn(channels, device=device), v


def truth(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, **more) -> torch.Tensor:
    scale = (q.shape[-1] // heads) ** -0.5
    qh, kh, vh = (split_heads(x, heads).double() for x in (q, k, v))
    return exact_attention(qh, kh, vh, sm_scale=scale, **more)[0].transpose(1, 2).flatten(2)


def rotary(on: Implementation, n: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    angle = on.randn(n, dim // 2).repeat_interleave(2, -1)
    return angle.cos(), angle.sin()


# --- int8 attention against fp64, a kernel against the emulation ---------------------------------


def test_keys_that_share_a_scale_are_those_that_a_kernel_takes_at_once() -> None:
    """Powers of two, as many as fit beside a head of so many channels."""
    found = {dim: key_block(dim) for dim in (32, 64, 72, 96, 128, 136, 160, 256)}
    assert found == {32: 128, 64: 128, 72: 64, 96: 64, 128: 128, 136: 32, 160: 32, 256: 32}


@dataclass(frozen=True)
class Case:
    """Sizes, and what is asked of an attention. Where n_q is n_kv, q, k and v are views of one
    tensor."""

    name: str
    batch: int
    heads: int
    n_q: int
    n_kv: int
    dim: int
    norm: str | None = None
    rope: bool = False
    causal: bool = False
    lengths: tuple[int, ...] | None = None
    scale: float | None = None
    smooth: bool = True
    attention: str = "int8"
    dtype: torch.dtype | None = None  # fp32, on a GPU bf16


#: The emulation: of widths that a kernel would pad, too.
IN_TORCH = [
    Case("d64-long", 1, 4, 1280, 1280, 64),
    Case("d40", 2, 3, 257, 257, 40),
    Case("d128-cross", 2, 5, 100, 333, 128),
    Case("one-token", 1, 2, 1, 1, 96),
    Case("d256-cross", 1, 3, 65, 129, 256),
    Case("d7", 1, 1, 130, 127, 7),
]
INTERPRETED = [
    Case("cross-odd-lengths", 1, 2, 130, 300, 64),
    Case("one-token", 1, 1, 1, 1, 64),
    Case("causal", 2, 2, 100, 129, 64, causal=True),
    Case("key-padding-none-seen", 2, 1, 65, 257, 128, lengths=(0, 200)),
    Case("causal-padding", 2, 1, 140, 140, 64, causal=True, lengths=(70, 140)),
    Case("lengths-of-64-bits", 2, 1, 65, 257, 64, lengths=(2**33, 200)),
    Case("negative-scale", 1, 2, 66, 130, 64, scale=-0.2),
    Case("scale-of-zero", 1, 2, 66, 130, 64, scale=0.0, causal=True),
    Case("as-in-wan", 1, 2, 300, 300, 128, norm="across", rope=True),
    Case("d128-per-head", 2, 1, 150, 150, 128, norm="head", rope=True),
    Case("d40-across-heads", 2, 3, 129, 129, 40, norm="across", rope=True),
    Case("d72-per-head", 1, 2, 70, 70, 72, norm="head", rope=True),
    Case("d80-rope", 1, 1, 70, 70, 80, rope=True),
    Case("d96", 1, 2, 66, 66, 96, norm="across"),
    Case("as-in-cogvideox", 1, 2, 150, 150, 64, norm="layer", rope=True, dtype=FP16),
    Case("d40-layer-norm-unsmoothed-padding", 2, 3, 70, 129, 40, norm="layer", smooth=False,
         lengths=(60, 129)),
    Case("layer-norm-mean-over-a-sample-padding", 2, 1, 70, 600, 64, norm="layer",
         lengths=(0, 330)),
    Case("d160", 1, 1, 66, 66, 160),
    Case("d256", 1, 1, 66, 66, 256, norm="head"),
    Case("unsmoothed", 1, 2, 66, 66, 64, smooth=False),
    Case("fp16-inputs-h5", 1, 5, 66, 66, 32, dtype=FP16),
    Case("int4", 1, 2, 66, 66, 64, attention="int4"),
    Case("mean-over-a-sample", 1, 1, 64, 600, 64),
]  # fmt: skip
ON_A_GPU = [
    Case("d64", 1, 4, 512, 512, 64),
    Case("as-in-wan", 2, 3, 1023, 1023, 128, norm="across", rope=True),
    Case("one-token", 1, 2, 1, 1, 64),
    Case("key-padding-none-seen", 2, 3, 130, 517, 128, lengths=(0, 300)),
    Case("causal", 2, 5, 777, 777, 64, causal=True),
    Case("causal-padding", 2, 5, 700, 900, 64, causal=True, lengths=(650, 900)),
    *(
        Case(f"d{dim}-per-head", 1, 3, 333, 333, dim, norm="head", rope=True)
        for dim in (40, 72, 80, 96, 160, 256)
    ),
    Case("fp32-inputs", 1, 2, 300, 400, 64, dtype=FP32),
    Case("fp16-inputs-unsmoothed", 1, 2, 300, 400, 64, smooth=False, dtype=FP16),
]


@over(
    reference={"pv": PVS, "case": IN_TORCH},
    interpreter={"pv": ["fp16"], "case": INTERPRETED},
    gpu={"pv": PVS, "case": ON_A_GPU},
)
def test_int8_attention_is_near_fp64_and_a_kernel_equals_its_emulation(
    on: Implementation, pv: str, case: Case
) -> None:
    on.skip_without(pv)
    q, k, v, arguments = made(on, case)
    spec = AttentionSpec(
        heads=case.heads, pv=pv, causal=case.causal, smooth_k=case.smooth, sm_scale=case.scale,
        attention=case.attention, impl=on.impl,
    )  # fmt: skip
    out, lse = attention_lse(q, k, v, spec, **arguments)
    if on.impl == "triton":
        emulated, emulated_lse = attention_lse(
            q, k, v, replace(spec, impl="reference"), **arguments
        )
        assert relative_l2(out, emulated) < TIGHT[on.name][pv]
        if on.name == "interpreter":
            torch.testing.assert_close(lse, emulated_lse, atol=1e-3, rtol=0)
    cos, sin = arguments["rotary"] or (None, None)
    qh, kh = (
        norm_rope(
            x, case.heads, weight=arguments[name], bias=arguments[f"{name}_bias"], cos=cos,
            sin=sin, eps=1e-6, dtype=torch.float64,
        )
        for x, name in ((q, "norm_q"), (k, "norm_k"))
    )  # fmt: skip
    lengths = arguments["kv_lengths"]
    scale = case.dim**-0.5 if case.scale is None else case.scale
    exact, exact_lse = exact_attention(
        qh, kh, split_heads(v, case.heads).double(), sm_scale=scale, causal=case.causal,
        kv_lengths=lengths,
    )  # fmt: skip
    exact = exact.transpose(1, 2).flatten(2)
    if on.name == "gpu":
        assert relative_l2(out, exact) < error_of_the_formats(qh, kh, case.smooth, lengths, pv)
    elif case.attention != "int4":
        assert relative_l2(out, exact) < (FLOOR[pv] if on.name == "reference" else 2e-2)
    if case.attention != "int4":
        seen = exact_lse.isfinite()
        assert torch.equal(lse.isfinite(), seen)
        torch.testing.assert_close(lse[seen].double(), exact_lse[seen], atol=0.15, rtol=0)
    if case.lengths is not None and case.lengths[0] == 0:
        assert not out[0].any()


def made(
    on: Implementation, case: Case
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]:
    """q, k and v, NaN where a key is not seen, and the other arguments of `attention_lse`."""
    dtype = case.dtype or (BF16 if on.name == "gpu" else FP32)
    channels = case.heads * case.dim
    q, k = (on.randn(case.batch, n, channels) for n in (case.n_q, case.n_kv))
    if on.name != "gpu":
        k = k + on.randn(channels)
    v = on.randn(case.batch, case.n_kv, channels)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    if case.n_q == case.n_kv:
        q, k, v = torch.cat([q, k, v], -1).chunk(3, -1)
    lengths = None
    if case.lengths is not None:
        wide = torch.int64 if max(case.lengths) >= 2**31 else torch.int32
        lengths = torch.tensor(case.lengths, dtype=wide, device=on.device)
        k, v = k.clone(), v.clone()
        for b, n in enumerate(case.lengths):
            k[b, n:], v[b, n:] = float("nan"), float("nan")
    of_a_head, across = (
        on.randn(size).abs() if on.name == "gpu" else torch.rand(size)
        for size in (case.dim, channels)
    )
    weight, biases = None, [None, None]
    if case.norm is not None:
        weight = ((across if case.norm == "across" else of_a_head) + 0.5).to(dtype)
    if case.norm == "layer":
        biases = [on.randn(case.dim, dtype=dtype) for _ in range(2)]
    arguments = {
        "norm_q": weight,
        "norm_k": weight,
        "norm_q_bias": biases[0],
        "norm_k_bias": biases[1],
        "rotary": rotary(on, case.n_q, case.dim) if case.rope else None,
        "kv_lengths": lengths,
        "out_dtype": FP32,
    }
    return q, k, v, arguments


def error_of_the_formats(
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


# --- masks, logsumexp, what costs accuracy -------------------------------------------------------


def test_int4_attention_is_visibly_worse_than_int8() -> None:
    q, k, v = inputs(1, 300, 300, 128)
    spec = AttentionSpec(heads=2)
    errors = [
        relative_l2(attention_skip(q, k, v, replace(spec, attention=a)), truth(q, k, v, 2))
        for a in ("int8", "int4")
    ]
    assert errors[1] > 10 * errors[0]


@pytest.mark.parametrize("attention", ["int8", "exact"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("lengths", [None, (0, 40, 129), (77, 200, 1)], ids=str)
def test_keys_behind_a_mask_have_no_influence(
    attention: str, causal: bool, lengths: tuple | None
) -> None:
    """What is not seen has no influence, even if it is NaN; who sees nothing gives 0."""
    q, k, v = inputs(3, 90, 129, 64)
    spec = AttentionSpec(heads=2, attention=attention, causal=causal)
    limits = None if lengths is None else torch.tensor(lengths, dtype=torch.int32)
    clean = attention_skip(q, k, v, spec, kv_lengths=limits)
    expected = truth(q, k, v, 2, causal=causal, kv_lengths=limits)
    assert relative_l2(clean, expected) < (1e-5 if attention == "exact" else FLOOR["bf16"])
    if limits is None:
        return
    for b, n in enumerate(lengths):
        k[b, n:], v[b, n:] = float("nan"), float("nan")
    assert torch.equal(attention_skip(q, k, v, spec, kv_lengths=limits), clean)
    if lengths[0] == 0:
        assert not clean[0].any()


@pytest.mark.parametrize("attention", ["int8", "exact"])
@pytest.mark.parametrize("smooth", [True, False], ids=["smoothed", "as-is"])
def test_the_logsumexp_is_of_unsmoothed_logits(attention: str, smooth: bool) -> None:
    q, k, v = inputs(2, 70, 150, 128)
    limits = torch.tensor([0, 100])
    spec = AttentionSpec(heads=2, attention=attention, smooth_k=smooth)
    _, lse = attention_lse(q, k, v, spec, kv_lengths=limits)
    qh, kh, vh = (split_heads(x, 2).double() for x in (q, k, v))
    _, expected = exact_attention(qh, kh, vh, sm_scale=64**-0.5, kv_lengths=limits)
    assert torch.equal(lse.isfinite(), expected.isfinite())
    torch.testing.assert_close(lse[1].double(), expected[1], atol=0.05, rtol=0)


def test_channels_that_stick_out_of_q_and_k_cost_little() -> None:
    """A few channels of q and k ten times as loud: without mixing the error is twice as large."""
    q, k, v = inputs(1, 512, 512, 64)
    loud = torch.ones(64)
    loud[::29] = 10.0
    q, k = q * loud, k * loud / 8
    mixed = relative_l2(attention_skip(q, k, v, AttentionSpec(heads=1)), truth(q, k, v, 1))
    qh, kh = (x - x.mean(1, keepdim=True) if x is k else x for x in (q, k))
    steps = [(qh, qh.abs().amax(-1, keepdim=True)), (kh, kh.abs().max())]
    coarse = [(x * 127 / amax).round() * amax / 127 for x, amax in steps]
    unmixed = relative_l2(truth(*coarse, v, 1), truth(q, k, v, 1))
    assert mixed < unmixed / 2


@over(reference={"pv": PVS, "tokens": [512]}, gpu={"pv": PVS, "tokens": [2048]})
def test_smoothing_and_mixing_halve_the_error_of_outlying_channels(
    on: Implementation, pv: str, tokens: int
) -> None:
    """A k far from zero in some channels, a q with outlying channels."""
    on.skip_without(pv)
    q, k, v = (on.randn(1, tokens, 256, dtype=BF16) for _ in range(3))
    q = q * (1 + 4 * (torch.rand(256, device=on.device) > 0.95)).to(BF16)
    k = k + 8 * on.randn(256, dtype=BF16)
    spec = AttentionSpec(heads=2, pv=pv, impl=on.impl)
    error, rough = (
        relative_l2(attention_skip(q, k, v, replace(spec, smooth_k=s)), truth(q, k, v, 2))
        for s in (True, False)
    )
    assert error < 0.1
    assert error < 0.5 * rough


#: Relative L1 at N(0, 1), heads of 128. Without the mean of v's rounding errors fp8 has 0.0380.
RELATIVE_L1 = {"fp8": 0.0352, "bf16": 0.0119}


def relative_l1(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).abs().sum() / b.double().abs().sum())


@pytest.mark.parametrize("pv", RELATIVE_L1)
def test_the_relative_l1_error_is_as_small_as_said(pv: str) -> None:
    q, k, v = (torch.randn(1, 1024, 128).bfloat16() for _ in range(3))
    spec = AttentionSpec(heads=1, pv=pv)
    out = attention_skip(q, k, v, spec, out_dtype=torch.float32)
    assert relative_l1(out, truth(q, k, v, 1)) < RELATIVE_L1[pv]


def test_the_mean_that_e4m3_loses_of_v_is_added_back() -> None:
    """v with a mean: a row sees the mean exactly, and what is left is as near as without one. A
    row that weighs all keys alike gets the mean of v however e4m3 rounds."""
    q, k, v = (torch.randn(2, 300, 128) for _ in range(3))
    mean = 3 * torch.randn(128)
    spec = AttentionSpec(heads=2, pv="fp8")
    errors = [
        (attention_skip(q, k, x, spec).double() - truth(q, k, x, 2)).norm() for x in (v, v + mean)
    ]
    assert errors[1] < 1.1 * errors[0]
    limits = torch.tensor([300, 100])
    alike = attention_skip(0 * q, k, v + mean, spec, kv_lengths=limits)
    for n, rows, x in zip(limits, alike, v + mean, strict=True):
        # An error is counted in 256ths of a step, and a mean of so many is nearer than that.
        torch.testing.assert_close(rows, x[:n].mean(0).expand(300, -1), rtol=0, atol=1e-4)


@pytest.mark.parametrize("size", [0.0, 1e-37, 1e-30, 1.0, 1e30])
def test_a_constant_v_of_any_size_comes_out_as_it_is(size: float) -> None:
    """Its range is 0 and its mean is all there is."""
    q, k = (torch.randn(1, 70, 64) for _ in range(2))
    v = torch.full((1, 70, 64), size)
    out = attention_skip(q, k, v, AttentionSpec(heads=1, pv="fp8"))
    torch.testing.assert_close(out, v, rtol=1e-5, atol=0)


@over("interpreter")
def test_v_in_e4m3_lies_in_the_order_of_p(on: Implementation) -> None:
    """Keys of v are permuted as P is: a wrong order would leave nothing of the output.

    The interpreter's e4m3 casts are wrong for a few values in a hundred, so only coarsely.
    """
    q, k, v = (torch.randn(1, 200, 64) for _ in range(3))
    spec = AttentionSpec(heads=1, pv="fp8", impl=on.impl)
    out = attention_skip(q, k, v, spec)
    assert (
        relative_l2(out, attention_skip(q, k, v, replace(spec, attention="exact", impl="auto")))
        < 0.15
    )


@over(interpreter={"n, dim": [(70, 40), (600, 64), (333, 128)]})
def test_the_levels_of_v_in_e4m3_are_those_of_the_emulation(
    on: Implementation, n: int, dim: int
) -> None:
    """Scale and mean bit for bit, because the order of the sum is part of the contract; the sum of
    errors against the e4m3 values that were written, whatever the interpreter's cast is."""
    heads, lengths = 2, torch.tensor([n, n // 3, 0], dtype=torch.int32)
    q, k = (torch.randn(3, n, heads * dim) for _ in range(2))
    v = torch.randn(3, n, heads * dim) + 2 * torch.randn(heads * dim)
    v[1, n // 3 :], v[2] = float("nan"), float("nan")
    given = attention_inputs(q, k, v, heads=heads, kv_lengths=lengths, pv="fp8")
    values = quantize(given).values
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


def test_smoothing_removes_what_all_keys_share() -> None:
    q, k, v = inputs(1, 256, 256, 64)
    k = k + 20 * torch.randn(64)
    spec = AttentionSpec(heads=1)
    smooth, rough = (
        relative_l2(attention_skip(q, k, v, replace(spec, smooth_k=s)), truth(q, k, v, 1))
        for s in (True, False)
    )
    assert smooth < FLOOR["bf16"]
    assert rough > 3 * smooth


@over("reference", "interpreter")
def test_nan_in_a_query_stays_visible_in_its_own_row(on: Implementation) -> None:
    q, k, v = (torch.randn(1, 70, 64) for _ in range(3))
    q[0, 3, 5] = float("nan")
    out = attention_skip(q, k, v, AttentionSpec(heads=1, pv="fp16", impl=on.impl))
    assert out[0, 3].isnan().all()
    assert out[0, 4:].isfinite().all()


@over(interpreter={"size": [1e-38, 1e-36, 1e-20]})
def test_tiny_inputs_are_finite_and_equal_the_emulation(on: Implementation, size: float) -> None:
    q, k = (size * torch.randn(1, 66, 32) for _ in range(2))
    v = torch.randn(1, 66, 32)
    spec = AttentionSpec(heads=1, pv="fp16", sm_scale=1.0)
    ours = attention_skip(q, k, v, replace(spec, impl=on.impl))
    emulated = attention_skip(q, k, v, replace(spec, impl="reference"))
    assert torch.isfinite(ours).all() and torch.isfinite(emulated).all()
    assert relative_l2(ours, emulated) < TIGHT[on.name]["fp16"]


# --- norm and rotary embedding of q and k --------------------------------------------------------

ROPE = [pytest.param(False, id="no-rope"), pytest.param(True, id="rope")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_norm_and_rotary_embedding_are_those_of_wan(dtype: torch.dtype) -> None:
    """Against diffusers' own processor, across heads and interleaved."""
    attn = (
        WanAttention(dim=96, heads=3, dim_head=32, eps=1e-6, processor=WanAttnProcessor())
        .to(dtype)
        .eval()
    )
    torch.nn.init.uniform_(attn.norm_q.weight, 0.5, 1.5)
    torch.nn.init.uniform_(attn.norm_k.weight, 0.5, 1.5)
    attn.to_out = torch.nn.ModuleList([torch.nn.Identity(), torch.nn.Identity()])
    hidden = torch.randn(2, 50, 96).to(dtype)
    angle = torch.randn(1, 50, 1, 16).repeat_interleave(2, -1)
    rotary = angle.cos(), angle.sin()
    with torch.no_grad():
        expected = attn(hidden, rotary_emb=rotary)
        out = attention_skip(
            attn.to_q(hidden),
            attn.to_k(hidden),
            attn.to_v(hidden),
            AttentionSpec(heads=3, attention="exact"),
            norm_q=attn.norm_q.weight,
            norm_k=attn.norm_k.weight,
            rotary=rotary,
        )
    assert relative_l2(out, expected) < {torch.float32: 1e-6}.get(dtype, 1e-2)


def test_an_rms_norm_of_a_head_is_torch_s() -> None:
    x, weight = torch.randn(2, 9, 3 * 8), torch.rand(8) + 0.5
    y = norm_rope(x, 3, weight=weight, cos=None, sin=None, eps=1e-6)
    expected = F.rms_norm(split_heads(x, 3), (8,), weight, eps=1e-6)
    torch.testing.assert_close(y, expected)


@pytest.mark.parametrize("across", [True, False], ids=["all-heads", "each-head"])
def test_eps_is_added_to_the_mean_square_before_the_root(across: bool) -> None:
    """With rows so small that it is most of what they are divided by, and with a row of zeros."""
    x, weight = 1e-2 * torch.randn(2, 9, 3 * 8), torch.rand(24 if across else 8) + 0.5
    x[0, 4] = 0
    y = norm_rope(x, 3, weight=weight, cos=None, sin=None, eps=0.25)
    if across:
        expected = split_heads(F.rms_norm(x, (24,), weight, eps=0.25), 3)
    else:
        expected = F.rms_norm(split_heads(x, 3), (8,), weight, eps=0.25)
    torch.testing.assert_close(y, expected)
    assert relative_l2(y, split_heads(2 * x * weight.repeat(1 if across else 3), 3)) < 1e-3
    assert not y[0, :, 4].any()


def test_a_layer_norm_of_a_head_is_torch_s() -> None:
    x, weight, bias = 2 + torch.randn(2, 9, 3 * 8), torch.rand(8) + 0.5, torch.randn(8)
    y = norm_rope(x, 3, weight=weight, bias=bias, cos=None, sin=None, eps=1e-6)
    expected = F.layer_norm(split_heads(x, 3), (8,), weight, bias, eps=1e-6)
    torch.testing.assert_close(y, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heads", [1, 3])
def test_the_norm_and_rotary_embedding_are_those_of_cogvideox(
    heads: int, dtype: torch.dtype
) -> None:
    """Against diffusers' own processor, over a text of no tokens."""
    attn = (
        Attention(
            query_dim=32 * heads, heads=heads, dim_head=32, qk_norm="layer_norm", eps=1e-6,
            bias=True, processor=CogVideoXAttnProcessor2_0(),
        )
        .to(dtype)
        .eval()
    )  # fmt: skip
    norms = {}
    for name in ("norm_q", "norm_k"):
        norm = getattr(attn, name)
        torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
        torch.nn.init.normal_(norm.bias)
        norms |= {name: norm.weight, f"{name}_bias": norm.bias}
    attn.to_out = torch.nn.ModuleList([torch.nn.Identity(), torch.nn.Identity()])
    hidden = torch.randn(2, 50, 32 * heads).to(dtype)
    angle = torch.randn(50, 16).repeat_interleave(2, -1)
    rotary = angle.cos(), angle.sin()
    with torch.no_grad():
        expected, _ = attn(hidden, hidden[:, :0], image_rotary_emb=rotary)
        out = attention_skip(
            attn.to_q(hidden),
            attn.to_k(hidden),
            attn.to_v(hidden),
            AttentionSpec(heads=heads, attention="exact"),
            rotary=rotary,
            **norms,
        )
    assert relative_l2(out, expected) < {torch.float32: 1e-6}.get(dtype, 1e-2)


@over(
    interpreter={
        "norm": ["none", "rows", "heads"],
        "tokens": [pytest.param((5, 5), id="self"), pytest.param((6, 1), id="one-key")],
    }
)
def test_normalised_and_rotated_q_and_k_are_those_of_the_reference(
    on: Implementation, norm: str, tokens: tuple[int, int]
) -> None:
    """Dense in memory as [B, N, H * D], whatever they are seen as."""
    batch, heads, dim = 2, 3, 16
    qkv = [torch.randn(batch, n, 2 * heads * dim)[..., : heads * dim] for n in tokens]
    width = {"none": 0, "rows": heads * dim, "heads": dim}[norm]
    weights: list[torch.Tensor | None] = [torch.randn(width) if width else None for _ in qkv]
    cos = sin = None
    if tokens[0] == tokens[1]:
        cos, sin = rotary(on, tokens[0], dim)
    made = rotated_heads(*qkv, heads, *weights, None, None, cos, sin, 1e-6)
    for x, y, weight in zip(qkv, made, weights, strict=True):
        expected = norm_rope(x, heads, weight=weight, cos=cos, sin=sin, eps=1e-6)
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
        if weight is not None or cos is not None:
            assert y.transpose(1, 2).is_contiguous()


@over(
    interpreter={
        "heads, dim, norm": [
            pytest.param(3, 40, "across", id="h3-d40-across"),
            pytest.param(3, 32, "head", id="h3-d32-per-head"),
            pytest.param(3, 64, "layer", id="h3-d64-layer-norm"),
            pytest.param(1, 64, "layer", id="h1-d64-layer-norm"),
            pytest.param(1, 40, "layer", id="h1-d40-layer-norm"),
        ],
        "rope": ROPE,
    },
    gpu={
        "heads, dim, norm": [
            pytest.param(3, 128, "across", id="h3-d128-across"),
            pytest.param(3, 128, "head", id="h3-d128-per-head"),
            pytest.param(3, 128, "layer", id="h3-d128-layer-norm"),
        ],
        "rope": ROPE,
    },
)
def test_exact_attention_is_torch_s_over_normalised_and_rotated_rows(
    on: Implementation, heads: int, dim: int, norm: str, rope: bool
) -> None:
    """q and k leave one kernel; what is left is torch's own attention."""
    dtype, n = (BF16, 500) if on.name == "gpu" else (FP32, 20)
    q, k, v = on.randn(2, n, 3 * heads * dim, dtype=dtype).chunk(3, -1)
    size = heads * dim if norm == "across" else dim
    weight = torch.rand(size, device=on.device).to(dtype) + 0.5
    bias = on.randn(dim, dtype=dtype) if norm == "layer" else None
    turn = rotary(on, n, dim) if rope else None
    spec = AttentionSpec(heads=heads, attention="exact", impl=on.impl)
    given = {
        "norm_q": weight, "norm_k": weight, "norm_q_bias": bias, "norm_k_bias": bias,
        "rotary": turn,
    }  # fmt: skip
    out = attention_skip(q, k, v, spec, **given)
    if dtype == FP32:
        expected = attention_skip(q, k, v, replace(spec, impl="reference"), **given)
        assert relative_l2(out, expected) < 3e-6
        return
    cos, sin = turn or (None, None)
    qh, kh = (
        norm_rope(
            x, heads, weight=weight, bias=bias, cos=cos, sin=sin, eps=1e-6, dtype=torch.float64
        )
        for x in (q, k)
    )
    exact, _ = exact_attention(qh, kh, split_heads(v, heads).double(), sm_scale=dim**-0.5)
    # What rounding exact q and k to bf16 and torch's own attention leave. A bias makes logits
    # larger, and the error with them, so the bound is measured and no number.
    own = F.scaled_dot_product_attention(qh.to(dtype), kh.to(dtype), split_heads(v, heads))
    least = relative_l2(own, exact)
    assert least < 1e-2
    assert relative_l2(out, exact.transpose(1, 2).flatten(2)) < 1.2 * least + 1e-3


@over(
    interpreter={
        "smooth": [pytest.param(False, id="as-is"), pytest.param(True, id="smoothed")],
        "rope": ROPE,
    }
)
def test_the_bias_of_a_layer_norm_is_for_tokens_that_are_there(
    on: Implementation, smooth: bool, rope: bool
) -> None:
    """Keys that are not seen are 0, and neither scales nor means know of them."""
    k, weight, bias = torch.randn(1, 300, 64), torch.rand(64) + 0.5, 50 * torch.randn(64)
    cos, sin = rotary(on, 300, 64) if rope else (None, None)
    normed = norm_rope(k, 1, weight=weight, bias=bias, cos=cos, sin=sin, eps=1e-6)
    for seen in (0, 200):
        given = attention_inputs(
            k, k, k, heads=1, norm_q=weight, norm_k=weight, norm_q_bias=bias, norm_k_bias=bias,
            cos=cos, sin=sin, kv_lengths=torch.tensor([seen], dtype=torch.int32), pv="fp16",
            smooth_k=smooth, sm_scale=0.125, want_lse=True,
        )  # fmt: skip
        operands = quantize(given)
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


# --- layout, skip, dtype -------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["int8", "exact"])
def test_strides_of_the_inputs_change_nothing(attention: str) -> None:
    spec = AttentionSpec(heads=2, attention=attention)
    fused = torch.randn(2, 70, 3 * 64)
    views = fused.chunk(3, -1)
    expected = attention_skip(*(x.contiguous() for x in views), spec)
    torch.testing.assert_close(attention_skip(*views, spec), expected)
    turned = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in views)
    torch.testing.assert_close(attention_skip(*turned, spec), expected)


_FORMS = ["float", "batch", "channel", "element"]


@over(
    reference={"attention": ["int8", "exact"], "form": _FORMS, "tokens, dim": [(50, 32)]},
    interpreter={"attention": ["int8"], "form": _FORMS, "tokens, dim": [(70, 40)]},
)
def test_a_skip_in_the_epilogue_is_closed_in_fp32(
    on: Implementation, attention: str, form: str, tokens: int, dim: int
) -> None:
    """The fusion alone: at most 3e-6 between fused and unfused over the same attention."""
    channels = 2 * dim
    c_skip, c_out = (coefficient(on, form, (2, tokens, channels)) for _ in range(2))
    if form == "float":
        c_skip, c_out = 0.7, -1.3
    q, k, v = inputs(2, tokens, tokens + 10, channels)
    residual = on.randn(2, tokens, channels)
    spec = AttentionSpec(heads=2, attention=attention, pv="fp16", impl=on.impl)
    out = attention_skip(q, k, v, spec, residual=residual, c_skip=c_skip, c_out=c_out)
    if form == "batch":
        c_skip, c_out = c_skip.view(2, 1, 1), c_out.view(2, 1, 1)
    branch = attention_skip(q, k, v, spec).double()
    assert relative_l2(out, c_skip * residual.double() + c_out * branch) < 3e-6


def test_the_output_has_the_dtype_that_was_asked_for() -> None:
    q, k, v = (x.bfloat16() for x in inputs(1, 20, 20, 64))
    spec = AttentionSpec(heads=1)
    assert attention_skip(q, k, v, spec).dtype == torch.bfloat16
    wide = attention_skip(q, k, v, spec, out_dtype=torch.float32)
    assert wide.dtype == torch.float32
    assert torch.equal(wide.bfloat16(), attention_skip(q, k, v, spec))


def test_one_key_gets_back_what_its_values_lost() -> None:
    """With a mean that is that of other keys too, as where ranks share a sequence."""
    v = torch.rand(2, 3, 1, 16) + 0.5
    mean, largest = torch.zeros(2, 3, 16), torch.full((2, 3, 16), 1.5)
    rounded, scale, offset = rounded_v(v, "fp8", of_v=(mean, largest))
    assert scale is not None and offset is not None
    assert relative_l2(rounded * scale, v) > 1e-2
    assert relative_l2(rounded * scale + offset, v) < 1e-3
