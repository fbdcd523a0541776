"""Attention whose epilogue closes a skip: `c_skip * residual + c_out * softmax(q k^T) v`."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from turbo_rcm_patch.errors import MaskError, OpError
from turbo_rcm_patch.kernels.operands import AttentionInputs
from turbo_rcm_patch.ops import batches
from turbo_rcm_patch.ops.checks import (
    check_attention,
    check_lengths,
    check_mask,
    check_norm,
    check_out_dtype,
    check_same_device,
    check_spec,
    refuse_exact_heads,
    rotary_parts,
    skip_parts,
)
from turbo_rcm_patch.ops.modes import transformed, without_autocast
from turbo_rcm_patch.ops.reference import aligned, apart, norm_rope, split_heads
from turbo_rcm_patch.ops.registry import attention_forward, heads_forward, plain_attention
from turbo_rcm_patch.ops.spec import AttentionSpec
from turbo_rcm_patch.skip import Coefficient

#: norm_q, norm_k, norm_q_bias and norm_k_bias.
Norms = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]

#: fp32 numbers below are 32 or more apart, which is more than logits are.
_LOSES_LOGITS = -(2.0**28)


def attention_skip(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    spec: AttentionSpec,
    *,
    residual: torch.Tensor | None = None,
    c_skip: Coefficient = 1.0,
    c_out: Coefficient = 1.0,
    norm_q: torch.Tensor | None = None,
    norm_k: torch.Tensor | None = None,
    norm_q_bias: torch.Tensor | None = None,
    norm_k_bias: torch.Tensor | None = None,
    rotary: tuple[torch.Tensor, torch.Tensor] | None = None,
    kv_lengths: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Compute c_skip * residual + c_out * softmax(sm_scale * q k^T) v.

    Norms, rotary embedding, smoothing and quantisation are computed in fp32 without intermediate
    rounding. The epilogue is fp32 and rounds once. Arguments with a contiguous last dimension are
    read in place, whatever their other strides (e.g. views of a fused QKV tensor). Others are
    copied.

    Args:
        q: [B, Nq, H*D], bf16, fp16 or fp32.
        k: [B, Nk, H*D], dtype of q.
        v: [B, Nk, H*D], dtype of q.
        spec: How the attention is computed.
        residual: [B, Nq, H*D], any float dtype, or None for c_out * attention.
        c_skip: Float or tensor [B], [B, 1, H*D] or [B, Nq, H*D], read as fp32.
        c_out: Likewise.
        norm_q: RMSNorm weight of q: [H*D] normalises across all heads, [D] per head.
        norm_k: Likewise for k.
        norm_q_bias: Makes the norm of q a layer norm of each head: bias [D], beside norm_q [D].
        norm_k_bias: Likewise for k.
        rotary: (cos, sin), each [N, D] or [1, N, 1, D], applied to interleaved pairs of q and k:
            cos at even and sin at odd channels, as diffusers' Wan does.
        kv_lengths: int32 [B]; keys at or past the length are masked exactly, whatever they hold. A
            query that sees no key gives 0.
        out_dtype: dtype of the result; q's by default.

    Returns:
        [B, Nq, H*D], contiguous.

    Raises:
        OpError: The arguments do not fit together (`ShapeError`, `DTypeError`, `MaskError`), or a
            gradient is requested that is not computed (`GradientError`).
    """
    skip, norms = (residual, c_skip, c_out), (norm_q, norm_k, norm_q_bias, norm_k_bias)
    inputs = describe(q, k, v, spec, skip, norms, rotary, kv_lengths, out_dtype)
    return _run(inputs, spec.exact_heads)[0]


def attention_lse(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    spec: AttentionSpec,
    *,
    norm_q: torch.Tensor | None = None,
    norm_k: torch.Tensor | None = None,
    norm_q_bias: torch.Tensor | None = None,
    norm_k_bias: torch.Tensor | None = None,
    rotary: tuple[torch.Tensor, torch.Tensor] | None = None,
    kv_lengths: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute softmax(sm_scale * q k^T) v and the logsumexp of its logits.

    The arguments are those of `attention_skip`. Smoothing k shifts every logit of a row by
    sm_scale * q · mean(k). The shift is computed in fp32 and added back, so the logsumexp is that
    of the unsmoothed logits.

    Returns:
        Output [B, Nq, H*D] and natural-log logsumexp fp32 [B, H, Nq], -inf where a query sees no
        key.
    """
    check_spec(spec)
    refuse_exact_heads(spec, "attention_lse")
    if spec.attention == "sage":
        raise OpError(
            'attention="sage"', expected="no logsumexp", remedy='Use attention="int8" or "exact"'
        )
    norms = (norm_q, norm_k, norm_q_bias, norm_k_bias)
    none = (None, 1.0, 1.0)
    inputs = describe(q, k, v, spec, none, norms, rotary, kv_lengths, out_dtype, want_lse=True)
    return _run(inputs)


def masked_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    spec: AttentionSpec,
    *,
    rotary: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Compute softmax(sm_scale * q k^T + mask) v with torch's scaled_dot_product_attention.

    Our kernels take no mask. So this is exact attention, whatever `spec.attention` says, in plain
    torch, which can be differentiated and compiled. The rotary embedding is fp32; q and k are
    rounded once after it, to v's dtype.

    Args:
        q: [B, Nq, H*D], bf16, fp16 or fp32.
        k: [B, Nk, H*D], dtype of q.
        v: [B, Nk, H*D], dtype of q.
        mask: Broadcasts to [B, H, Nq, Nk]. Boolean: true where a query sees a key. Float: added to
            the logits.
        spec: Number of heads and sm_scale.
        rotary: (cos, sin), each [N, D] or [1, N, 1, D].

    Returns:
        [B, Nq, H*D], dtype of q.

    Raises:
        MaskError: The mask has another shape or dtype, or `spec.causal` asks for a second one.
    """
    check_attention(q, k, v, spec)
    batch, n_q, channels = q.shape
    head_dim = channels // spec.heads
    cos, sin = rotary_parts(rotary, n_q, k.shape[1], head_dim)
    check_mask(mask, (batch, spec.heads, n_q, k.shape[1]), spec)
    check_same_device(q.device, cos=cos, sin=sin, mask=mask)
    q, _, _, sm_scale = with_positive_scale(q, None, None, spec.scale_of(head_dim))
    with without_autocast(q.device):
        qh, kh = (
            norm_rope(x, spec.heads, weight=None, cos=cos, sin=sin, eps=spec.eps).to(v.dtype)
            for x in (q, k)
        )
        qh, mask = _in_dtype(qh, mask)
        if mask.shape[-1] != k.shape[1]:
            # torch's backends on a GPU refuse a row of one value, or read past it.
            mask = mask.expand(*mask.shape[:-1], k.shape[1]).contiguous()
        # No fused backend has a forward derivative.
        with sdpa_kernel(SDPBackend.MATH) if transformed() else nullcontext():
            out = F.scaled_dot_product_attention(
                aligned(apart(qh)),
                aligned(apart(kh)),
                aligned(apart(split_heads(v, spec.heads))),
                attn_mask=aligned(mask),
                scale=sm_scale,
            )
    return out.transpose(1, 2).flatten(2)


def _in_dtype(q: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """q [B, H, Nq, D] and an added mask in q's dtype, which torch's backends on a GPU need (memory
    efficient refuses another, cuDNN misreads it).

    A row whose values are finite and all below that dtype's range would become -inf throughout,
    which says that it sees no key. Its largest value is subtracted instead: a softmax does not
    change by that. Where fp32 loses the logits beside the mask, q is 0, so that the row is the
    average which it is in fp32.
    """
    if mask.dtype in (torch.bool, q.dtype):
        return q, mask
    top = mask.detach().amax(-1, keepdim=True)
    lost = top.isfinite() & (top.to(q.dtype) == -torch.inf)
    q = q.masked_fill(lost & (top < _LOSES_LOGITS), 0.0)
    return q, (mask - top.where(lost, 0.0)).to(q.dtype)


def with_positive_scale(
    q: torch.Tensor,
    norm_q: torch.Tensor | None,
    norm_q_bias: torch.Tensor | None,
    sm_scale: float,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, float]:
    """The same logits with sm_scale > 0: int8's scales have to be, and torch's own attention
    makes NaN of a masked logit times 0. The sign goes into q, or into what its norm multiplies
    it with."""
    if sm_scale > 0.0:
        return q, norm_q, norm_q_bias, sm_scale
    sign, sm_scale = (-1.0, -sm_scale) if sm_scale < 0.0 else (0.0, 1.0)
    if norm_q is None:
        return q * sign, None, None, sm_scale
    return q, norm_q * sign, None if norm_q_bias is None else norm_q_bias * sign, sm_scale


def describe(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    spec: AttentionSpec,
    skip: tuple[torch.Tensor | None, Coefficient, Coefficient],
    norms: Norms,
    rotary: tuple[torch.Tensor, torch.Tensor] | None,
    kv_lengths: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    *,
    want_lse: bool = False,
    features: int | None = None,
) -> AttentionInputs:
    """Check what an attention was given, and put it together.

    Args:
        q: As in `attention_skip`, as all that follows.
        k: Likewise.
        v: Likewise.
        spec: Likewise.
        skip: residual, c_skip and c_out.
        norms: norm_q, norm_k, norm_q_bias and norm_k_bias.
        rotary: Likewise.
        kv_lengths: Likewise.
        out_dtype: Likewise.
        want_lse: Whether the logsumexp is wanted.
        features: Channels of the residual, where a projection follows; those of q else.
    """
    check_attention(q, k, v, spec)
    batch, n_q, channels = q.shape
    shape = (batch, n_q, channels if features is None else features)
    residual, c_skip, c_out = skip
    norm_q, norm_k, norm_q_bias, norm_k_bias = norms
    check_norm("norm_q", norm_q, norm_q_bias, channels, spec.heads)
    check_norm("norm_k", norm_k, norm_k_bias, channels, spec.heads)
    cos, sin = rotary_parts(rotary, n_q, k.shape[1], channels // spec.heads)
    check_lengths(kv_lengths, batch)
    if spec.attention == "sage" and kv_lengths is not None:
        raise MaskError(
            'kv_lengths with attention="sage"',
            expected="no key padding (the package ignores masks)",
            remedy='Use attention="int8"',
        )
    check_out_dtype(out_dtype)
    factors = skip_parts(residual, c_skip, c_out, shape)
    check_same_device(
        q.device, residual=residual, c_skip=factors[0], c_out=factors[1], norm_q=norm_q,
        norm_k=norm_k, norm_q_bias=norm_q_bias, norm_k_bias=norm_k_bias, cos=cos, sin=sin,
        kv_lengths=kv_lengths,
    )  # fmt: skip
    q, norm_q, norm_q_bias, sm_scale = with_positive_scale(
        q, norm_q, norm_q_bias, spec.scale_of(channels // spec.heads)
    )
    return AttentionInputs(
        q, k, v, residual, *factors[:2], norm_q, norm_k, norm_q_bias, norm_k_bias, cos, sin,
        kv_lengths, *factors[2:], spec.heads, spec.attention, spec.pv, spec.smooth_k, spec.causal,
        sm_scale, spec.eps, spec.impl, q.dtype if out_dtype is None else out_dtype, want_lse,
    )  # fmt: skip


def _run(
    a: AttentionInputs, exact_heads: tuple[int, ...] = ()
) -> tuple[torch.Tensor, torch.Tensor]:
    batch = a.q.shape[0]
    if batch > batches.MAX_BATCH:
        of_samples = ("q", "k", "v", "residual", "c_skip", "c_out", "kv_lengths")

        def run(part: slice) -> tuple[torch.Tensor, torch.Tensor]:
            own = {name: batches.of_batch(getattr(a, name), part, batch) for name in of_samples}
            return _run(a._replace(**own), exact_heads)

        out, lse = batches.in_parts(batch, run)
    elif transformed() or not batch:  # no kernel has to know of an empty batch
        out, lse = plain_attention(a)
    elif exact_heads and a.attention != "sage":
        out, lse = heads_forward(*a, list(exact_heads)), a.q.new_empty(0)
    else:
        out, lse = attention_forward(*a)
    return out, lse
