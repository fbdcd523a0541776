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

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from tests.implementations import Implementation, coefficient, over
from tests.inputs import attention_inputs, attention_lse
from tests.measures import relative_l2, truth
from turbo_rcm_patch.ops import AttentionSpec, attention_skip
from turbo_rcm_patch.ops.attention.api import (
    attend,
    attend_to,
    norm_rotate,
    norm_rotate_to,
    quantize,
)
from turbo_rcm_patch.ops.attention.emulation import (
    hadamard,
    sample_sum_of_v,
    value_levels,
)
from turbo_rcm_patch.ops.attention.reference import exact_attention, norm_rope, split_heads
from turbo_rcm_patch.ops.formats import hadamard_width

pytestmark = pytest.mark.usefixtures("poisoned")

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
PVS = ["fp8", "bf16", "fp16"]
FLOOR = {"bf16": 0.015, "fp16": 0.015, "fp8": 0.045}
#: Kernels against the emulation.
TIGHT = {"interpreter": {"fp16": 1e-3}, "gpu": {"fp8": 8e-3, "bf16": 2e-3, "fp16": 2e-3}}
#: What rounding P and v costs: relative rms error, where v is N(0, 1).
ROUNDING = {"fp8": 0.037, "bf16": 2e-3, "fp16": 2e-3}


def inputs(batch: int, n_q: int, n_kv: int, channels: int) -> list[Tensor]:
    q, k, v = (torch.randn(batch, n, channels) for n in (n_q, n_kv, n_kv))
    return [q, k + torch.randn(channels), v]


def rotary(on: Implementation, n: int, dim: int) -> tuple[Tensor, Tensor]:
    angle = on.randn(n, dim // 2).repeat_interleave(2, -1)
    return angle.cos(), angle.sin()


# --- against fp64, and a kernel against the emulation --------------------------------------------


@dataclass(frozen=True)
class Case:
    """Sizes and options of an attention. Where n_q is n_kv, q, k and v are views of one tensor.
    The dtype is fp32, on a GPU bf16, if none is given."""

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
    dtype: torch.dtype | None = None


#: In plain torch, also of widths that a kernel would pad.
IN_TORCH = [
    Case("d64-long", 1, 4, 1280, 1280, 64),
    Case("d40-per-head-rope", 2, 3, 257, 257, 40, norm="head", rope=True),
    Case("d128-cross", 2, 5, 100, 333, 128),
    Case("one-token", 1, 2, 1, 1, 96),
    Case("d256-cross", 1, 3, 65, 129, 256),
    Case("d7", 1, 1, 130, 127, 7),
    Case("across-heads-rope", 1, 3, 100, 100, 64, norm="across", rope=True),
    Case("layer-norm-unsmoothed", 2, 2, 70, 129, 64, norm="layer", smooth=False),
    Case("causal", 2, 2, 100, 129, 64, causal=True),
    Case("key-padding-none-seen", 3, 2, 65, 257, 64, lengths=(0, 200, 257)),
    Case("causal-padding-fp16", 2, 1, 140, 140, 64, causal=True, lengths=(70, 140), dtype=FP16),
    Case("lengths-of-64-bits", 2, 1, 65, 257, 64, lengths=(2**33, 200)),
    Case("bf16", 1, 2, 66, 130, 64, dtype=BF16),
]
INTERPRETED = [
    Case("cross-odd-lengths", 1, 2, 66, 300, 64),
    Case("one-token", 1, 1, 1, 1, 64),
    Case("causal", 1, 2, 100, 129, 64, causal=True),
    Case("key-padding-none-seen", 2, 1, 65, 257, 128, lengths=(0, 200)),
    Case("causal-padding", 2, 1, 140, 140, 64, causal=True, lengths=(70, 140)),
    Case("as-in-wan", 1, 2, 140, 140, 128, norm="across", rope=True),
    Case("d40-across-heads", 2, 3, 70, 70, 40, norm="across", rope=True),
    Case("d72-per-head", 1, 2, 70, 70, 72, norm="head", rope=True),
    Case("as-in-cogvideox", 1, 2, 100, 100, 64, norm="layer", rope=True, dtype=FP16),
    Case("layer-norm-mean-over-a-sample-padding", 2, 1, 40, 300, 64, norm="layer",
         lengths=(0, 270)),
    Case("d256", 1, 1, 66, 66, 256, norm="head"),
    Case("unsmoothed", 1, 2, 66, 66, 64, smooth=False),
    Case("fp16-inputs-h5", 1, 5, 66, 66, 32, dtype=FP16),
    Case("int4", 1, 2, 66, 66, 64, attention="int4"),
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
    *(
        Case(f"d{dim}-lengths-of-64-bits", 2, 2, 333, 333, dim, lengths=(2**31, 2**40 + 3))
        for dim in (64, 40)
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
    """Keys that are not seen are NaN."""
    on.skip_without(pv)
    q, k, v, arguments = made(on, case)
    spec = spec_of(case, pv=pv, impl=on.impl)
    out, lse = attention_lse(q, k, v, spec, **arguments)
    if on.impl == "triton":
        emulated, emulated_lse = attention_lse(
            q, k, v, replace(spec, impl="reference"), **arguments
        )
        assert relative_l2(out, emulated) < TIGHT[on.name][pv]
        if on.name == "interpreter":
            torch.testing.assert_close(lse, emulated_lse, atol=1e-3, rtol=0)
    qh, kh = prepared(q, k, case, arguments)
    exact, exact_lse = exact_of(qh, kh, v, case, arguments)
    if case.attention != "int4":
        limit = error_of_the_formats(qh, kh, case, arguments["kv_lengths"], pv)
        assert relative_l2(out, exact) < (limit if on.name == "gpu" else max(limit, FLOOR[pv]))
        seen = exact_lse.isfinite()
        assert torch.equal(lse.isfinite(), seen)
        torch.testing.assert_close(lse[seen].double(), exact_lse[seen], atol=0.15, rtol=0)
    if case.lengths is not None and case.lengths[0] == 0:
        assert not out[0].any()


@pytest.mark.parametrize("case", IN_TORCH, ids=lambda case: case.name)
def test_exact_attention_and_its_logsumexp_are_those_of_fp64(case: Case) -> None:
    q, k, v, arguments = made(Implementation("reference", "cpu", "reference"), case)
    spec = replace(spec_of(case), attention="exact")
    exact, exact_lse = exact_of(*prepared(q, k, case, arguments), v, case, arguments)
    out, lse = attention_lse(q, k, v, spec, **arguments)
    assert relative_l2(out, exact) < 3e-6
    torch.testing.assert_close(lse.double(), exact_lse, atol=1e-4, rtol=1e-5)
    # Without a logsumexp torch's own attention runs, on q and k in the dtype of v.
    rounded = 3e-6 if v.dtype == FP32 else 1e-2
    out, _ = attention_lse(q, k, v, spec, want_lse=False, **arguments)
    assert relative_l2(out, exact) < rounded


def spec_of(case: Case, **more: Any) -> AttentionSpec:
    return AttentionSpec(
        heads=case.heads, causal=case.causal, smooth_k=case.smooth, sm_scale=case.scale,
        attention=case.attention, **more,
    )  # fmt: skip


def made(on: Implementation, case: Case) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
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
    weight, biases = None, [None, None]
    if case.norm is not None:
        size = channels if case.norm == "across" else case.dim
        weight = (torch.rand(size, device=on.device) + 0.5).to(dtype)
    if case.norm == "layer":
        biases = [on.randn(case.dim, dtype=dtype) for _ in range(2)]
    return q, k, v, {
        "norm_q": weight, "norm_k": weight, "norm_q_bias": biases[0], "norm_k_bias": biases[1],
        "rotary": rotary(on, case.n_q, case.dim) if case.rope else None, "kv_lengths": lengths,
        "out_dtype": FP32,
    }  # fmt: skip


def prepared(q: Tensor, k: Tensor, case: Case, arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """q and k in fp64, normalised and rotated."""
    cos, sin = arguments["rotary"] or (None, None)
    qh, kh = (
        norm_rope(
            x, case.heads, weight=arguments[name], bias=arguments[f"{name}_bias"], cos=cos,
            sin=sin, eps=1e-6, dtype=torch.float64,
        )
        for x, name in ((q, "norm_q"), (k, "norm_k"))
    )  # fmt: skip
    return qh, kh


def exact_of(
    qh: Tensor, kh: Tensor, v: Tensor, case: Case, arguments: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Attention and logsumexp in fp64."""
    out, lse = exact_attention(
        qh, kh, split_heads(v, case.heads).double(), causal=case.causal,
        sm_scale=case.dim**-0.5 if case.scale is None else case.scale,
        kv_lengths=arguments["kv_lengths"],
    )  # fmt: skip
    return out.transpose(1, 2).flatten(2), lse


def error_of_the_formats(
    q: Tensor, k: Tensor, case: Case, lengths: Tensor | None, pv: str
) -> float:
    """Error against fp64 that the number formats cause by themselves.

    With v of independent N(0, 1), an error of standard deviation s in every logit is a relative
    error of s in the output. A symmetric int8 value is off by its step over sqrt(12), its step is
    the largest magnitude over 127, and the products of D of them add up. RMSNorm weights away from
    1 and unsmoothed means make logits louder, and s with them: a constant would hold for one kind
    of input. A third more than that is allowed, because a head differs from the mean of all heads.

    Args:
        q: [B, H, Nq, D] fp64, normalised and rotated.
        k: [B, H, Nk, D] fp64, normalised and rotated.
        case: Whether k loses its mean, and the factor on the logits.
        lengths: int [B] or None.
        pv: Element type of P.
    """
    seen = torch.ones(k.shape[0], 1, k.shape[2], 1, dtype=torch.bool, device=k.device)
    if lengths is not None:
        seen = (torch.arange(k.shape[2], device=k.device) < lengths.view(-1, 1)).view(seen.shape)
        seen, q, k = (x[lengths > 0] for x in (seen, q, k))  # the others are zero, without error
    count = seen.sum((1, 2, 3))
    k = k.masked_fill(~seen, 0.0)
    if case.smooth:
        mean = k.sum(2, keepdim=True) / count.view(-1, 1, 1, 1)
        k = (k - mean).masked_fill(~seen, 0.0)
    q, k = (hadamard(x) / hadamard_width(x.shape[-1]) ** 0.5 for x in (q, k))
    q_step = q.abs().amax(-1) / 127  # a scale per row
    k_step = k.abs().amax((-1, -2)) / 127  # a scale per block of keys, at most this
    k_square = k.square().sum((1, 2, 3)) / (count * k.shape[1] * k.shape[3])
    of_q = q_step.square().mean((1, 2)) * k_square / 12
    of_k = k_step.square().mean(1) * q.square().mean((1, 2, 3)) / 12
    # As many products as a head has channels, those of the padding included.
    scale = case.dim**-0.5 if case.scale is None else case.scale
    logit_error = float((of_q + of_k).mean().sqrt()) * scale * q.shape[-1] ** 0.5
    return 4 / 3 * (logit_error**2 + ROUNDING[pv] ** 2) ** 0.5


# --- what costs accuracy -------------------------------------------------------------------------


def test_channels_that_stick_out_of_q_and_k_cost_little() -> None:
    """A few channels of q and k ten times as loud: without mixing the error is twice as large."""
    q, k, v = inputs(1, 512, 512, 64)
    loud = torch.ones(64)
    loud[::29] = 10.0
    q, k = q * loud, k * loud / 8
    mixed = relative_l2(attention_skip(q, k, v, AttentionSpec(heads=1)), truth(q, k, v, 1))
    centred = k - k.mean(1, keepdim=True)
    steps = [(q, q.abs().amax(-1, keepdim=True)), (centred, centred.abs().max())]
    coarse = [(x * 127 / amax).round() * amax / 127 for x, amax in steps]
    assert mixed < relative_l2(truth(*coarse, v, 1), truth(q, k, v, 1)) / 2


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
@pytest.mark.parametrize(("pv", "limit"), [("fp8", 0.0352), ("bf16", 0.0119)])
def test_the_relative_l1_error_is_as_small_as_said(pv: str, limit: float) -> None:
    """And that of int4 is more than three times as large."""
    q, k, v = (torch.randn(1, 1024, 128).bfloat16() for _ in range(3))
    exact, spec = truth(q, k, v, 1), AttentionSpec(heads=1, pv=pv)
    errors = []
    for one in (spec, replace(spec, attention="int4")):
        out = attention_skip(q, k, v, one, out_dtype=FP32)
        errors.append((out.double() - exact).abs().sum() / exact.abs().sum())
    assert errors[0] < limit and errors[1] > 3 * errors[0]


# --- values in e4m3 ------------------------------------------------------------------------------


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


@pytest.mark.parametrize("size", [0.0, 1e-43, 1e-38, 1e-36, 1e-30, 1.0, 1e30])
def test_e4m3_values_of_any_size(size: float) -> None:
    """As exact as fp8 is while its scale is a normal number, and finite below; a constant comes
    out as it is, because its mean is all there is."""
    q, k, v = inputs(1, 70, 70, 64)
    spec = AttentionSpec(heads=1, pv="fp8")
    if size == 0.0 or size > 1e-36:
        constant = torch.full_like(v, size)
        torch.testing.assert_close(
            attention_skip(q, k, constant, spec), constant, rtol=1e-5, atol=0
        )
    out, exact = attention_skip(q, k, v * size, spec), truth(q, k, v * size, 1)
    assert (out.double() - exact).abs().max() <= max(0.2 * size, 2.0**-117 / 448)


@over("interpreter")
def test_v_in_e4m3_lies_in_the_order_of_p(on: Implementation) -> None:
    """Keys of v are permuted as P is: a wrong order would leave nothing of the output.

    The interpreter's e4m3 casts are wrong for a few values in a hundred, so only coarsely.
    """
    q, k, v = inputs(1, 200, 200, 64)
    out = attention_skip(q, k, v, AttentionSpec(heads=1, pv="fp8", impl=on.impl))
    assert relative_l2(out, truth(q, k, v, 1)) < 0.15


@over(interpreter={"n, dim": [(70, 40), (300, 64)]})
def test_the_levels_of_v_in_e4m3_are_those_of_the_emulation(
    on: Implementation, n: int, dim: int
) -> None:
    """Bit for bit, because the order of the sum is part of the contract."""
    heads, lengths = 2, torch.tensor([n, n // 3, 0], dtype=torch.int32)
    q, k = (torch.randn(3, n, heads * dim) for _ in range(2))
    v = torch.randn(3, n, heads * dim) + 2 * torch.randn(heads * dim)
    v[1, n // 3 :], v[2] = float("nan"), float("nan")
    values = quantize(attention_inputs(q, k, v, heads=heads, kv_lengths=lengths)).values
    assert values is not None
    scale, mean, _ = values.levels[..., :dim].unbind(2)
    step = -(-n // 256)
    v = torch.unflatten(v, 2, (heads, dim)).transpose(1, 2)
    v[1, :, n // 3 :], v[2] = 0.0, 0.0
    count = torch.tensor([n, n // 3, 0]).div(step).ceil().clamp_min(1).view(3, 1, 1)
    sampled = sample_sum_of_v(v[:, :, ::step]) / count
    expected_mean, amax = value_levels(sampled, v.abs().amax(2))
    assert torch.equal(mean, expected_mean)
    assert torch.equal(scale, amax / 448)
    assert not mean[2].any()


# --- values at the edge of a format --------------------------------------------------------------


@over("reference", "interpreter", "gpu")
def test_nan_in_a_query_stays_visible_in_its_own_row(on: Implementation) -> None:
    q, k, v = (on.randn(1, 70, 64, dtype=FP16) for _ in range(3))
    q[0, 3, 5] = float("nan")
    out = attention_skip(q, k, v, AttentionSpec(heads=1, pv="fp16", impl=on.impl))
    assert out[0, 3].isnan().all()
    assert out[0, 4:].isfinite().all()


@over(interpreter={"size": [1e-38, 1e-20]})
def test_tiny_inputs_are_finite_and_equal_the_emulation(on: Implementation, size: float) -> None:
    q, k = (size * torch.randn(1, 66, 32) for _ in range(2))
    v = torch.randn(1, 66, 32)
    spec = AttentionSpec(heads=1, pv="fp16", sm_scale=1.0)
    made = attention_skip(q, k, v, replace(spec, impl=on.impl))
    emulated = attention_skip(q, k, v, replace(spec, impl="reference"))
    assert torch.isfinite(made).all() and torch.isfinite(emulated).all()
    assert relative_l2(made, emulated) < TIGHT[on.name]["fp16"]


def test_where_scales_underflow_logits_are_zero_and_padded_keys_stay_unseen() -> None:
    q, k, v = (torch.randn(2, 9, 32) for _ in range(3))
    lengths = torch.tensor([4, 9])
    out = attention_skip(q * 1e-25, k * 1e-25, v, AttentionSpec(heads=2), kv_lengths=lengths)
    assert relative_l2(out[0], v[0, :4].mean(0).expand_as(out[0])) < 0.01


@pytest.mark.parametrize(("pv", "size"), [("fp8", 1e4), ("bf16", 1e4), ("fp16", 1e3)])
def test_large_logits_have_an_attention(pv: str, size: float) -> None:
    """Up to 1e7 with p in fp16 and 1e9 in other types."""
    q, k, v = (torch.randn(1, 64, 64) for _ in range(3))
    out = attention_skip(q * size, k * size, v, AttentionSpec(heads=1, pv=pv, impl="reference"))
    assert out.isfinite().all()


# --- norm and rotary embedding of q and k --------------------------------------------------------


@pytest.mark.parametrize("kind", ["across", "head", "layer"])
@pytest.mark.parametrize("eps", [1e-6, 0.25])
def test_norms_are_torch_s_and_add_eps_before_the_root(kind: str, eps: float) -> None:
    """With rows so small that eps is most of what they are divided by, and with a row of zeros."""
    size = 24 if kind == "across" else 8
    x, weight = (1e-2 if eps > 0.1 else 1.0) * torch.randn(2, 9, 24), torch.rand(size) + 0.5
    x[0, 4] = 0
    bias = torch.randn(8) if kind == "layer" else None
    y = norm_rope(x, 3, weight=weight, bias=bias, cos=None, sin=None, eps=eps)
    if kind == "across":
        expected = split_heads(F.rms_norm(x, (24,), weight, eps), 3)
    elif kind == "head":
        expected = F.rms_norm(split_heads(x, 3), (8,), weight, eps)
    else:
        expected = F.layer_norm(split_heads(x, 3), (8,), weight, bias, eps)
    torch.testing.assert_close(y, expected)


_NORMS = {
    "heads, dim, norm": [
        pytest.param(3, 40, "across", id="h3-d40-across"),
        pytest.param(3, 32, "head", id="h3-d32-per-head"),
        pytest.param(3, 64, "layer", id="h3-d64-layer-norm"),
        pytest.param(1, 40, "layer", id="h1-d40-layer-norm"),
        pytest.param(2, 32, "none", id="h2-d32-rotary-alone"),
    ],
    "rope": [True, False],
}


@over(reference=_NORMS, interpreter=_NORMS, gpu=_NORMS)
def test_normalised_and_rotated_rows_are_rounded_once(
    on: Implementation, heads: int, dim: int, norm: str, rope: bool
) -> None:
    """The operation `norm_rotate`, from a view; and exact attention over such rows, with a weight
    for q and one for k."""
    dtype, n = (BF16, 500) if on.name == "gpu" else (FP32, 20)
    q, k, v = on.randn(2, n, 3 * heads * dim, dtype=dtype).chunk(3, -1)
    weights, bias = [None, None], None
    if norm != "none":
        size = heads * dim if norm == "across" else dim
        weights = [torch.rand(size, device=on.device).to(dtype) + 0.5 for _ in range(2)]
    if norm == "layer":
        bias = on.randn(dim, dtype=dtype)
    table = rotary(on, n, dim) if rope else None
    cos, sin = table or (None, None)
    how: Any = {"rotary": table, "heads": heads, "impl": on.impl}
    made = norm_rotate(q, weight=weights[0], bias=bias, **how)
    assert made.is_contiguous() and made.dtype == dtype
    wide = {"bias": bias, "cos": cos, "sin": sin, "eps": 1e-6, "dtype": torch.float64}
    qh, kh = (norm_rope(x, heads, weight=w, **wide) for x, w in zip((q, k), weights, strict=True))
    assert relative_l2(split_heads(made, heads), qh) < (3e-6 if dtype == FP32 else 2e-3)
    spec = AttentionSpec(heads=heads, attention="exact", impl=on.impl)
    out, _ = attention_lse(
        q, k, v, spec, norm_q=weights[0], norm_k=weights[1], norm_q_bias=bias, norm_k_bias=bias,
        rotary=table, want_lse=False,
    )  # fmt: skip
    exact, _ = exact_attention(qh, kh, split_heads(v, heads).double(), sm_scale=dim**-0.5)
    # What rounding exact q and k and torch's own attention leave. A bias makes logits larger, and
    # the error with them, so the bound is measured and no number.
    own = F.scaled_dot_product_attention(qh.to(dtype), kh.to(dtype), split_heads(v, heads))
    limit = 1.2 * relative_l2(own, exact) + (3e-6 if dtype == FP32 else 1e-3)
    assert relative_l2(out, exact.transpose(1, 2).flatten(2)) < limit


@over(reference={"ranks": [2]}, interpreter={"ranks": [2, 3]}, gpu={"ranks": [2, 4, 8]})
def test_each_rank_gets_its_part_and_nothing_else_is_written(
    on: Implementation, ranks: int
) -> None:
    """Same bits as in one tensor, into a rank's tokens of all or its channels of all."""
    on_gpu = on.name == "gpu"
    dim, n, dtype = (128, 1004, BF16) if on_gpu else (32, 20, FP32)  # tiles reach over two ranks
    x = on.randn(2, n, ranks * 2 * dim, dtype=dtype)
    weight, table = torch.rand(x.shape[2], device=on.device) + 0.5, rotary(on, n, dim)
    width = 2 * dim
    for normed in ({"weight": weight, "rotary": table}, {"weight": None, "rotary": None}):
        how: Any = normed | {"heads": 2 * ranks, "impl": on.impl}
        whole = [x.new_full((2, 3 * n, width), math.nan) for _ in range(ranks)]
        norm_rotate_to(tuple(one[:, n : 2 * n] for one in whole), x, **how)
        for one, part in zip(whole, norm_rotate(x, **how).chunk(ranks, 2), strict=True):
            assert torch.equal(one[:, n : 2 * n], part)
            assert one.isnan().sum() == 2 * one[:, :n].numel()
    if on.impl != "triton":
        return
    q, k, v = on.randn(3, 2, ranks * n, width, dtype=dtype)
    spec = AttentionSpec(heads=2, pv="auto" if on_gpu else "fp16", impl=on.impl)
    whole = [x.new_full((2, n, ranks * width), math.nan) for _ in range(ranks)]
    assert attend_to(tuple(one[..., width : 2 * width] for one in whole), q, k, v, spec=spec)
    for one, part in zip(whole, attend(q, k, v, spec=spec).chunk(ranks, 1), strict=True):
        assert torch.equal(one[..., width : 2 * width], part)
        assert one.isnan().sum() == (ranks - 1) * part.numel()


# --- layout, skip, dtype -------------------------------------------------------------------------


def _turned(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _spread(x: Tensor) -> Tensor:
    return x.repeat_interleave(2, -1)[..., ::2]


def _moved(x: Tensor) -> Tensor:
    """At an address that 16 bytes do not divide."""
    return torch.cat([x.new_zeros(3), x.flatten()])[3:].view(x.shape)


def _windows(step: int) -> Any:
    """Rows that overlap in memory; torch's own attention on a CPU makes noise of them."""
    return lambda x: x.flatten().as_strided(x.shape, (4096, step, 1))


_VIEWS = {"turned": _turned, "spread": _spread, "moved": _moved} | {
    f"windows-{step}": _windows(step) for step in (0, 1, 3)
}


@pytest.mark.parametrize("attention", ["int8", "exact"])
@pytest.mark.parametrize("view", _VIEWS)
def test_strides_and_addresses_of_the_inputs_change_nothing(attention: str, view: str) -> None:
    spec = AttentionSpec(heads=2, attention=attention)
    views = [_VIEWS[view](torch.randn(2, 70, 64)) for _ in range(4)]
    dense = [x.clone(memory_format=torch.contiguous_format) for x in views]
    made, expected = (attention_skip(*x[:3], spec, residual=x[3]) for x in (views, dense))
    torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-5)


@cache
def unfused(spec: AttentionSpec, tokens: int, dim: int) -> tuple[list[Tensor], Tensor]:
    """q, k and v of two samples and heads, and their attention alone."""
    given = inputs(2, tokens, tokens + 10, 2 * dim)
    return given, attention_skip(*given, spec).double()


_FORMS = ["none", "float", "batch", "channel", "element", "token", "half"]


@over(
    reference={"attention": ["int8", "exact"], "form": _FORMS, "tokens, dim": [(50, 32)]},
    interpreter={"attention": ["int8"], "form": _FORMS, "tokens, dim": [(40, 40)]},
)
def test_a_skip_in_the_epilogue_is_closed_in_fp32(
    on: Implementation, attention: str, form: str, tokens: int, dim: int
) -> None:
    """The fusion alone: at most 3e-6 between fused and unfused over the same attention."""
    spec = AttentionSpec(heads=2, attention=attention, pv="fp16", impl=on.impl)
    (q, k, v), branch = unfused(spec, tokens, dim)
    channels = 2 * dim
    c_skip, c_out = (coefficient(on, form, (2, tokens, channels)) for _ in range(2))
    residual = None if form == "none" else on.randn(2, tokens, channels)
    c_skip, c_out = (1.0 if c is None else c for c in (c_skip, c_out))
    out = attention_skip(q, k, v, spec, residual=residual, c_skip=c_skip, c_out=c_out)
    if form == "batch":
        c_skip, c_out = c_skip.view(2, 1, 1), c_out.view(2, 1, 1)
    kept = 0.0 if residual is None else c_skip * residual.double()
    assert relative_l2(out, kept + c_out * branch) < 3e-6


def test_the_output_has_the_dtype_that_was_asked_for() -> None:
    q, k, v = (x.bfloat16() for x in inputs(1, 20, 20, 64))
    spec = AttentionSpec(heads=1)
    for dtype in (FP32, torch.float64):
        wide = attention_skip(q, k, v, spec, out_dtype=dtype)
        assert wide.dtype == dtype
        assert torch.equal(wide.bfloat16(), attention_skip(q, k, v, spec))


@over("reference", "interpreter", "gpu")
def test_keys_that_still_travel_between_ranks_are_waited_for(on: Implementation) -> None:
    """A ring's keys and values are such tensors, which hold no memory themselves."""
    q, k, v = (on.randn(1, 64, 64, dtype=torch.float16) for _ in range(3))
    spec = AttentionSpec(heads=2, attention="int8", pv="fp16", impl=on.impl)
    travelling = [AsyncCollectiveTensor(x) for x in (k, v)]
    assert torch.equal(attention_skip(q, *travelling, spec), attention_skip(q, k, v, spec))
