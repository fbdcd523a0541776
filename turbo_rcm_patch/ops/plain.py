"""Attention with its skip in plain torch, for where a transform looks (see `modes`)."""

from __future__ import annotations

import torch
from torch import Tensor

from turbo_rcm_patch.ops.gradients import prepare
from turbo_rcm_patch.ops.reference import close_skip, exact_attention, split_heads

__all__ = ["plain_attention"]


def plain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    residual: Tensor | None,
    c_skip: float | Tensor,
    c_out: float | Tensor,
    norms: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None],
    cos: Tensor | None,
    sin: Tensor | None,
    kv_lengths: Tensor | None,
    *,
    heads: int,
    causal: bool,
    sm_scale: float,
    eps: float,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Exact attention in fp32, closed by a skip: what int8 and int4 approximate.

    Its forward derivative takes the memory of a few chunks of logits. A gradient that torch.func
    takes keeps all of them; the registered operation's own, outside torch.func, keeps none.

    Args:
        q: [B, Nq, H*D], any float dtype.
        k: [B, Nk, H*D].
        v: [B, Nk, H*D].
        residual: [B, Nq, H*D] or None.
        c_skip: Float or tensor that broadcasts to [B, Nq, H*D].
        c_out: Likewise.
        norms: norm_q, norm_k and their biases, as in `attention_skip`.
        cos: [N, D] or None.
        sin: [N, D] or None.
        kv_lengths: int [B] or None.
        heads: H.
        causal: Query i sees keys 0..i.
        sm_scale: Factor on the logits.
        eps: Of the norms.
        out_dtype: dtype of the result.

    Returns:
        [B, Nq, H*D] and the logsumexp fp32 [B, H, Nq].
    """
    norm_q, norm_k, norm_q_bias, norm_k_bias = norms
    branch, lse = exact_attention(
        prepare(q, heads, norm_q, norm_q_bias, cos, sin, eps),
        prepare(k, heads, norm_k, norm_k_bias, cos, sin, eps),
        split_heads(v, heads).float(),
        sm_scale=sm_scale,
        causal=causal,
        kv_lengths=kv_lengths,
    )
    branch = branch.transpose(1, 2).flatten(2)
    out = close_skip(residual, branch, c_skip, c_out, cast="fp32", out_dtype=out_dtype)
    return out, lse
