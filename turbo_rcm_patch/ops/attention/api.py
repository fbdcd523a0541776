"""Attention whose epilogue closes a skip: `c_skip * residual + c_out * softmax(q k^T) v`."""

from __future__ import annotations

from typing import Any, Final, cast

import torch
from torch import Tensor

from turbo_rcm_patch.errors import MaskError, OpError
from turbo_rcm_patch.ops.attention.emulation import emulated_attention
from turbo_rcm_patch.ops.attention.reference import (
    aligned,
    exact_attention,
    norm_rope,
    sdpa_attention,
    split_heads,
)
from turbo_rcm_patch.ops.attention.sage import sage_attention
from turbo_rcm_patch.ops.attention.spec import AttentionSpec
from turbo_rcm_patch.ops.checks import (
    check_attention,
    check_lengths,
    check_norm,
    check_out_dtype,
    check_same_device,
    check_spec,
    rotary_parts,
    skip_parts,
)
from turbo_rcm_patch.ops.dispatch import choose_inputs, resolve_impl
from turbo_rcm_patch.ops.formats import QMAX, AttentionInputs
from turbo_rcm_patch.ops.register import Operation, flattened, refuse_gradient
from turbo_rcm_patch.ops.residual.skip import closed
from turbo_rcm_patch.skip import Coefficient

#: norm_q, norm_k, norm_q_bias and norm_k_bias.
Norms = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
_FIELDS: Final = AttentionInputs._fields


@flattened(_FIELDS, tuple[Tensor, Tensor], AttentionInputs)
def _attention(*args: Any) -> tuple[Tensor, Tensor]:
    a = choose_inputs(AttentionInputs(*args))
    no_lse = a.q.new_empty(0, dtype=torch.float32)
    if a.attention in QMAX and a.impl == "triton":
        from turbo_rcm_patch.ops.attention.triton import attention as launch

        out, lse = launch(a)
        return out, no_lse if lse is None else lse
    branch, lse = _branch(a)
    if not a.closes_skip:
        out = branch if branch.dtype == a.out_dtype else branch.to(a.out_dtype)
    else:
        out = closed(
            a.residual, branch, a.skip_factor, a.out_factor,
            cast_policy="fp32", impl=a.impl, out_dtype=a.out_dtype,
        )  # fmt: skip
    return out.contiguous(), no_lse if lse is None else lse


def _branch(a: AttentionInputs) -> tuple[Tensor, Tensor | None]:
    """Compute the attention without its skip in torch: [B, Nq, H*D], and the logsumexp or None."""
    vh = split_heads(a.v, a.heads)
    of_q, of_k = (a.norm_q, a.norm_q_bias), (a.norm_k, a.norm_k_bias)
    one_pass = in_one_pass(a.q, *of_q, a.heads) and in_one_pass(a.k, *of_k, a.heads)
    if a.impl != "triton" or not one_pass or a.want_lse:
        qh, kh = prepared(a)
    elif a.cos is None and (a.norm_q is None or a.norm_k is None):
        qh = _rotated(a.q, *of_q, None, None, a.heads, a.eps)
        kh = _rotated(a.k, *of_k, None, None, a.heads, a.eps)
    else:
        # Exact attention takes q and k in their own dtype, so one kernel makes each in one pass.
        from turbo_rcm_patch.ops.residual.norm_triton import norm_rotate_both

        qh, kh = norm_rotate_both(a.q, a.k, a.heads, of_q, of_k, a.cos, a.sin, a.eps)
    if a.attention in QMAX:
        return emulated_attention(
            qh, kh, vh, sm_scale=a.sm_scale, pv=cast("Any", a.pv), qmax=QMAX[a.attention],
            smooth_k=a.smooth_k, causal=a.causal, kv_lengths=a.kv_lengths, want_lse=a.want_lse,
        )  # fmt: skip
    lse = None
    qh, kh, vh = aligned(qh), aligned(kh), aligned(vh)
    masks: Any = {"sm_scale": a.sm_scale, "causal": a.causal, "kv_lengths": a.kv_lengths}
    if a.want_lse:
        branch, lse = exact_attention(qh, kh, vh.float(), **masks)
    elif a.attention == "sage":
        branch = sage_attention(
            qh.to(a.v.dtype), kh.to(a.v.dtype), vh,
            sm_scale=a.sm_scale, causal=a.causal, smooth_k=a.smooth_k,
        )  # fmt: skip
    else:
        branch = sdpa_attention(qh.to(a.v.dtype), kh.to(a.v.dtype), vh, **masks)
    return branch.transpose(1, 2).flatten(2), lse


def prepared(a: AttentionInputs) -> tuple[Tensor, Tensor]:
    """Return q and k [B, H, N, D] fp32, normalised and rotated."""
    rest: Any = {"cos": a.cos, "sin": a.sin, "eps": a.eps}
    return (
        norm_rope(a.q, a.heads, weight=a.norm_q, bias=a.norm_q_bias, **rest),
        norm_rope(a.k, a.heads, weight=a.norm_k, bias=a.norm_k_bias, **rest),
    )


def _rotated(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    heads: int,
    eps: float,
    *,
    by_head: bool = True,
) -> Tensor:
    """Apply norm and rotary embedding to x [B, N, H*D] in one kernel, in the dtype of x.

    The result is [B, H, N, D] with `by_head`, else [B, N, H*D].
    """
    if weight is None and cos is None:
        return split_heads(x, heads) if by_head else x
    from turbo_rcm_patch.ops.residual.norm_triton import norm_rotate as launch

    return launch(x, heads, weight=weight, bias=bias, cos=cos, sin=sin, eps=eps, by_head=by_head)


def in_one_pass(x: Tensor, weight: Tensor | None, bias: Tensor | None, heads: int) -> bool:
    """Return True if the kernel `norm_rotate` supports the norm of x [B, N, H*D].

    It supports norms over whole rows, and norms over heads with a power of two of channels.
    """
    dim = x.shape[-1] // heads
    across = weight is None or (bias is None and weight.numel() == x.shape[-1])
    return across or dim & (dim - 1) == 0


def _attention_fake(*args: Any) -> tuple[Tensor, Tensor]:
    a = AttentionInputs(*args)
    # With dynamic=True a compiler turns even the number of heads into a symbol.
    lse_shape = (a.q.shape[0], a.heads, a.q.shape[1]) if a.want_lse else (0,)
    return (
        a.q.new_empty(a.q.shape, dtype=a.out_dtype),
        a.q.new_empty(lse_shape, dtype=torch.float32),
    )


attention = Operation("attention", _attention, _attention_fake)


def _norm_rotate(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    heads: int,
    eps: float,
    impl: str,
) -> Tensor:
    """Apply norm and rotary embedding to x [B, N, H*D] in fp32, rounded once to its dtype."""
    if resolve_impl(cast("Any", impl), x.device) == "triton" and in_one_pass(
        x, weight, bias, heads
    ):
        made = _rotated(x, weight, bias, cos, sin, heads, eps, by_head=False)
        return made.clone() if made is x else made
    made = norm_rope(x, heads, weight=weight, bias=bias, cos=cos, sin=sin, eps=eps)
    return made.transpose(1, 2).flatten(2).to(x.dtype)


norm_rotate = Operation("norm_rotate", _norm_rotate, lambda x, *_: x.new_empty(x.shape))


# --- public functions ----------------------------------------------------------------------------


def attention_skip(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    *,
    residual: Tensor | None = None,
    c_skip: Coefficient = 1.0,
    c_out: Coefficient = 1.0,
    norm_q: Tensor | None = None,
    norm_k: Tensor | None = None,
    norm_q_bias: Tensor | None = None,
    norm_k_bias: Tensor | None = None,
    rotary: tuple[Tensor, Tensor] | None = None,
    kv_lengths: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
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
        c_out: Float or tensor, as c_skip.
        norm_q: RMSNorm weight of q: [H*D] normalises across all heads, [D] per head.
        norm_k: RMSNorm weight of k, as norm_q.
        norm_q_bias: Makes the norm of q a layer norm of each head: bias [D], beside norm_q [D].
        norm_k_bias: Makes the norm of k a layer norm of each head, as norm_q_bias.
        rotary: (cos, sin), each [N, D] or [1, N, 1, D], applied to interleaved pairs of q and k:
            cos at even and sin at odd channels, as diffusers' Wan does.
        kv_lengths: int32 [B]; keys at or past the length are masked exactly, even if they hold
            NaN. A query that sees no key gives 0.
        out_dtype: dtype of the result; q's by default.

    Returns:
        [B, Nq, H*D], contiguous.

    Raises:
        OpError: The arguments do not fit together (`ShapeError`, `DTypeError`, `MaskError`), or a
            gradient is wanted (`GradientError`).
    """
    inputs = describe(
        q, k, v, spec, (residual, c_skip, c_out), (norm_q, norm_k, norm_q_bias, norm_k_bias),
        rotary, kv_lengths, out_dtype,
    )  # fmt: skip
    if not q.shape[0]:  # the kernels do not take an empty batch
        return q.new_empty(q.shape, dtype=inputs.out_dtype)
    out: Tensor = attention(*inputs)[0]
    return out


def attention_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    *,
    norm_q: Tensor | None = None,
    norm_k: Tensor | None = None,
    norm_q_bias: Tensor | None = None,
    norm_k_bias: Tensor | None = None,
    rotary: tuple[Tensor, Tensor] | None = None,
    kv_lengths: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute softmax(sm_scale * q k^T) v and the logsumexp of its logits.

    The arguments are those of `attention_skip`. Smoothing k shifts every logit of a row by
    sm_scale * q · mean(k). The shift is computed in fp32 and added back, so the logsumexp is that
    of the unsmoothed logits.

    Returns:
        Output [B, Nq, H*D] and natural-log logsumexp fp32 [B, H, Nq], -inf where a query sees no
        key.
    """
    check_spec(spec)
    if spec.attention == "sage":
        raise OpError(
            'attention="sage"', expected="no logsumexp", remedy='Use attention="int8" or "exact"'
        )
    inputs = describe(
        q, k, v, spec, (None, 1.0, 1.0), (norm_q, norm_k, norm_q_bias, norm_k_bias), rotary,
        kv_lengths, out_dtype, want_lse=True,
    )  # fmt: skip
    if not q.shape[0]:
        out, lse = _attention_fake(*inputs)
        return out, lse
    made: tuple[Tensor, Tensor] = attention(*inputs)
    return made


def with_positive_scale(
    q: Tensor, norm_q: Tensor | None, norm_q_bias: Tensor | None, sm_scale: float
) -> tuple[Tensor, Tensor | None, Tensor | None, float]:
    """Rewrite an attention so that sm_scale > 0, with equal logits.

    The scales of int8 have to be positive, and torch's own attention computes NaN from a masked
    logit times 0. The sign moves into q, or into weight and bias of its norm.

    Returns:
        q, norm_q, norm_q_bias and sm_scale.
    """
    if sm_scale > 0.0:
        return q, norm_q, norm_q_bias, sm_scale
    sign, sm_scale = (-1.0, -sm_scale) if sm_scale < 0.0 else (0.0, 1.0)
    if norm_q is None:
        return q * sign, None, None, sm_scale
    return q, norm_q * sign, None if norm_q_bias is None else norm_q_bias * sign, sm_scale


def describe(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    skip: tuple[Tensor | None, Coefficient, Coefficient],
    norms: Norms,
    rotary: tuple[Tensor, Tensor] | None,
    kv_lengths: Tensor | None,
    out_dtype: torch.dtype | None,
    *,
    want_lse: bool = False,
    features: int | None = None,
) -> AttentionInputs:
    """Check the arguments of an attention, and collect them in an `AttentionInputs`.

    Args:
        q: [B, Nq, H*D]. All arguments are described at `attention_skip`.
        k: [B, Nk, H*D].
        v: [B, Nk, H*D].
        spec: How the attention is computed.
        skip: residual, c_skip and c_out.
        norms: norm_q, norm_k, norm_q_bias and norm_k_bias.
        rotary: (cos, sin), or None.
        kv_lengths: int32 [B], or None.
        out_dtype: dtype of the result; q's by default.
        want_lse: Compute the logsumexp, too.
        features: Channels of the residual if a projection comes between; those of q by default.
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
    refuse_gradient("attention", (q, k, v, residual, *factors[:2], *norms, cos, sin))
    q, norm_q, norm_q_bias, sm_scale = with_positive_scale(
        q, norm_q, norm_q_bias, spec.scale_of(channels // spec.heads)
    )
    return AttentionInputs(
        q, k, v, residual, *factors[:2], norm_q, norm_k, norm_q_bias, norm_k_bias, cos, sin,
        kv_lengths, *factors[2:], spec.heads, spec.attention, spec.pv, spec.smooth_k, spec.causal,
        sm_scale, spec.eps, spec.impl, q.dtype if out_dtype is None else out_dtype, want_lse,
    )  # fmt: skip
