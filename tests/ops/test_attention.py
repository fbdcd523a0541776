"""Attention in plain torch: the emulation against exact mathematics, and exact against torch.

Floor: int8 q (a scale per row) and k (a scale per 128 tokens) cost 0.011 in relative L2 at N(0,
    1),
whatever 16-bit type P has; e4m3 P and v raise it to 0.034; 15 levels instead of 255 to about 0.2.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.attention_processor import Attention, CogVideoXAttnProcessor2_0
from diffusers.models.transformers.transformer_wan import (
    WanAttention,
    WanAttnProcessor,
)

from tests.measures import relative_l2
from turbo_rcm_patch.ops import AttentionSpec, attention_lse, attention_skip
from turbo_rcm_patch.ops.reference import exact_attention, norm_rope, split_heads

pytestmark = pytest.mark.usefixtures("poisoned")

FLOOR = {"bf16": 0.015, "fp16": 0.015, "fp8": 0.045}


def inputs(batch: int, n_q: int, n_kv: int, channels: int) -> tuple[torch.Tensor, ...]:
    q, k, v = (torch.randn(batch, n, channels) for n in (n_q, n_kv, n_kv))
    return q, k + torch.randn(channels), v


def truth(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, **more) -> torch.Tensor:
    scale = (q.shape[-1] // heads) ** -0.5
    qh, kh, vh = (split_heads(x, heads).double() for x in (q, k, v))
    return exact_attention(qh, kh, vh, sm_scale=scale, **more)[0].transpose(1, 2).flatten(2)


@pytest.mark.parametrize("pv", ["bf16", "fp16", "fp8"])
@pytest.mark.parametrize(
    ("batch", "heads", "n_q", "n_kv", "dim"),
    [(1, 4, 1280, 1280, 64), (2, 3, 257, 257, 40), (2, 5, 100, 333, 128), (1, 2, 1, 1, 96),
     (1, 3, 65, 129, 256), (1, 1, 130, 127, 7)],
)  # fmt: skip
def test_emulation_stays_above_its_floor(
    batch: int, heads: int, n_q: int, n_kv: int, dim: int, pv: str
) -> None:
    q, k, v = inputs(batch, n_q, n_kv, heads * dim)
    out = attention_skip(q, k, v, AttentionSpec(heads=heads, pv=pv))
    assert relative_l2(out, truth(q, k, v, heads)) < FLOOR[pv]


def test_int4_is_visibly_worse() -> None:
    q, k, v = inputs(1, 300, 300, 128)
    spec = AttentionSpec(heads=2)
    errors = [
        relative_l2(attention_skip(q, k, v, replace(spec, attention=a)), truth(q, k, v, 2))
        for a in ("int8", "int4")
    ]
    assert errors[1] > 10 * errors[0]


@pytest.mark.parametrize("attention", ["int8", "exact"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [None, (0, 40, 129), (77, 200, 1)])
def test_masks_are_exact(attention: str, causal: bool, lengths: tuple | None) -> None:
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
@pytest.mark.parametrize("smooth", [True, False])
def test_logsumexp_is_of_unsmoothed_logits(attention: str, smooth: bool) -> None:
    q, k, v = inputs(2, 70, 150, 128)
    limits = torch.tensor([0, 100])
    spec = AttentionSpec(heads=2, attention=attention, smooth_k=smooth)
    _, lse = attention_lse(q, k, v, spec, kv_lengths=limits)
    qh, kh, vh = (split_heads(x, 2).double() for x in (q, k, v))
    _, expected = exact_attention(qh, kh, vh, sm_scale=64**-0.5, kv_lengths=limits)
    assert torch.equal(lse.isfinite(), expected.isfinite())
    torch.testing.assert_close(lse[1].double(), expected[1], atol=0.05, rtol=0)


def test_channels_that_stick_out_cost_little() -> None:
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


#: Relative L1 at N(0, 1), heads of 128. Without the mean of v's rounding errors fp8 has 0.0380.
RELATIVE_L1 = {"fp8": 0.0352, "bf16": 0.0119}


def relative_l1(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).abs().sum() / b.double().abs().sum())


@pytest.mark.parametrize("pv", RELATIVE_L1)
def test_relative_l1(pv: str) -> None:
    q, k, v = (torch.randn(1, 1024, 128).bfloat16() for _ in range(3))
    spec = AttentionSpec(heads=1, pv=pv)
    out = attention_skip(q, k, v, spec, out_dtype=torch.float32)
    assert relative_l1(out, truth(q, k, v, 1)) < RELATIVE_L1[pv]


def test_what_e4m3_loses_of_all_of_v_is_added_back() -> None:
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
def test_constant_v_of_any_size(size: float) -> None:
    """Its range is 0 and its mean is all there is."""
    q, k = (torch.randn(1, 70, 64) for _ in range(2))
    v = torch.full((1, 70, 64), size)
    out = attention_skip(q, k, v, AttentionSpec(heads=1, pv="fp8"))
    torch.testing.assert_close(out, v, rtol=1e-5, atol=0)


def test_smoothing_removes_a_common_part_of_k() -> None:
    q, k, v = inputs(1, 256, 256, 64)
    k = k + 20 * torch.randn(64)
    spec = AttentionSpec(heads=1)
    smooth, rough = (
        relative_l2(attention_skip(q, k, v, replace(spec, smooth_k=s)), truth(q, k, v, 1))
        for s in (True, False)
    )
    assert smooth < FLOOR["bf16"]
    assert rough > 3 * smooth


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_norm_and_rotary_are_those_of_wan(dtype: torch.dtype) -> None:
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


def test_norm_per_head() -> None:
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


def test_layer_norm_per_head() -> None:
    x, weight, bias = 2 + torch.randn(2, 9, 3 * 8), torch.rand(8) + 0.5, torch.randn(8)
    y = norm_rope(x, 3, weight=weight, bias=bias, cos=None, sin=None, eps=1e-6)
    expected = F.layer_norm(split_heads(x, 3), (8,), weight, bias, eps=1e-6)
    torch.testing.assert_close(y, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heads", [1, 3])
def test_norm_and_rotary_are_those_of_cogvideox(heads: int, dtype: torch.dtype) -> None:
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


@pytest.mark.parametrize("attention", ["int8", "exact"])
def test_strided_inputs_change_nothing(attention: str) -> None:
    spec = AttentionSpec(heads=2, attention=attention)
    fused = torch.randn(2, 70, 3 * 64)
    views = fused.chunk(3, -1)
    expected = attention_skip(*(x.contiguous() for x in views), spec)
    torch.testing.assert_close(attention_skip(*views, spec), expected)
    turned = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in views)
    torch.testing.assert_close(attention_skip(*turned, spec), expected)


@pytest.mark.parametrize("attention", ["int8", "exact"])
@pytest.mark.parametrize("form", ["float", "batch", "channel", "element"])
def test_skip_is_closed_in_fp32(form: str, attention: str) -> None:
    """The fusion alone: at most 3e-6 between fused and unfused over the same attention."""
    shape = {"batch": (2,), "channel": (2, 1, 64), "element": (2, 50, 64)}
    c_skip, c_out = (0.4, -2.0) if form == "float" else torch.randn(2, *shape[form])
    q, k, v = inputs(2, 50, 60, 64)
    residual = torch.randn(2, 50, 64)
    spec = AttentionSpec(heads=2, attention=attention)
    out = attention_skip(q, k, v, spec, residual=residual, c_skip=c_skip, c_out=c_out)
    if form == "batch":
        c_skip, c_out = c_skip.view(2, 1, 1), c_out.view(2, 1, 1)
    branch = attention_skip(q, k, v, spec).double()
    assert relative_l2(out, c_skip * residual.double() + c_out * branch) < 3e-6


def test_output_dtype() -> None:
    q, k, v = (x.bfloat16() for x in inputs(1, 20, 20, 64))
    spec = AttentionSpec(heads=1)
    assert attention_skip(q, k, v, spec).dtype == torch.bfloat16
    wide = attention_skip(q, k, v, spec, out_dtype=torch.float32)
    assert wide.dtype == torch.float32
    assert torch.equal(wide.bfloat16(), attention_skip(q, k, v, spec))
