"""q and k as the four readers of sparse-linear attention share them: normalised, rotated, rounded
once; and in the same pass the means that need whole columns of tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from turbo_rcm_patch.kernels.launch import LENGTHS, cdiv, dense_rows, launch, pad_head, target_of
from turbo_rcm_patch.kernels.operands import norm_form

__all__ = ["Tokens", "prepare_tokens", "prepare_tokens_kernel"]

#: Tokens of k whose sum a program writes.
_K_TOKENS = 32
#: Tokens under way or computed at a time, at most, and the shared memory they may take.
_STAGES = 6
_SHARED = 48 * 1024
_WARPS = 4


class Tokens(NamedTuple):
    """q [B, Nq, H*D] and k [B, Nk, H*D]; q_pooled [B, H, q_blocks, HEAD_PAD], means of blocks of
    q; k_mean [B, H, HEAD_PAD], the mean of k over all tokens; all in their dtype."""

    q: torch.Tensor
    k: torch.Tensor
    q_pooled: torch.Tensor
    k_mean: torch.Tensor


@triton.jit
def _block(
    out_ptr, x_ptr, weight_ptr, cos_ptr, sin_ptr, start, stride_n, n_tokens, eps,
    CHANNELS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr,
    HEADS_PAD: tl.constexpr, TOKENS: tl.constexpr, NORM: tl.constexpr, ROPE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """TOKENS tokens from `start` on; the sum [HEADS_PAD, HEAD_PAD] of what they are rounded to."""
    offs_h = tl.arange(0, HEADS_PAD)[:, None]
    offs_d = tl.arange(0, HEAD_PAD)
    mask_d = offs_d < HEAD_DIM
    offs_c = offs_h * HEAD_DIM + offs_d[None, :]
    mask = (offs_h < CHANNELS // HEAD_DIM) & mask_d[None, :]
    weight = 1.0
    if NORM == 1:  # across all heads
        weight = tl.load(weight_ptr + offs_c, mask=mask, other=0.0).to(tl.float32)
    elif NORM == 2:  # per head
        weight = tl.load(weight_ptr + offs_d, mask=mask_d, other=0.0).to(tl.float32)[None, :]
    total = tl.zeros([HEADS_PAD, HEAD_PAD], tl.float32)
    # Tokens are on their way while others are computed.
    for i in tl.range(0, tl.minimum(TOKENS, n_tokens - start), num_stages=STAGES):
        n = (start + i).to(tl.int64)
        x = tl.load(x_ptr + n * stride_n + offs_c, mask=mask, other=0.0).to(tl.float32)
        if NORM == 1:
            squares = tl.sum(tl.sum(x * x, axis=1), axis=0)
            x = x * (1.0 / tl.sqrt(squares / CHANNELS + eps)) * weight
        elif NORM == 2:
            x = x * (1.0 / tl.sqrt(tl.sum(x * x, axis=1) / HEAD_DIM + eps))[:, None] * weight
        if ROPE:
            even, odd = tl.split(tl.reshape(x, [HEADS_PAD, HEAD_PAD // 2, 2]))
            cos = tl.load(cos_ptr + n * HEAD_DIM + offs_d, mask=mask_d, other=0.0)
            sin = tl.load(sin_ptr + n * HEAD_DIM + offs_d, mask=mask_d, other=0.0)
            c, _ = tl.split(tl.reshape(cos, [HEAD_PAD // 2, 2]))
            _, s = tl.split(tl.reshape(sin, [HEAD_PAD // 2, 2]))
            c, s = c.to(tl.float32)[None, :], s.to(tl.float32)[None, :]
            x = tl.join(even * c - odd * s, even * s + odd * c)
            x = tl.reshape(x, [HEADS_PAD, HEAD_PAD])
        y = x.to(x_ptr.dtype.element_ty)
        if NORM > 0 or ROPE:
            tl.store(out_ptr + n * CHANNELS + offs_c, y, mask=mask)
        total += y.to(tl.float32)
    return total


@triton.jit(do_not_specialize=LENGTHS)
def prepare_tokens_kernel(
    q_out_ptr, k_out_ptr, q_pooled_ptr, k_sums_ptr,
    q_ptr, k_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr,
    q_stride_b, q_stride_n, k_stride_b, k_stride_n, n_q, n_kv, q_blocks, k_parts, eps,
    CHANNELS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr,
    HEADS_PAD: tl.constexpr, BLOCK_Q: tl.constexpr, K_TOKENS: tl.constexpr,
    Q_NORM: tl.constexpr, K_NORM: tl.constexpr, ROPE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The norms of q and k (as in `operands`) and their rotary embedding (ROPE), the means of
    blocks of q and sums of parts of k.

    Grid: (blocks of q, then parts of k; batch). q [B, Nq, H*D], k [B, Nk, H*D] with contiguous
    channels, what is written dense; weights [H*D], or [D] per head; cos, sin [N, D]; q_pooled
    [B, H, q_blocks, HEAD_PAD]; k_sums [B, k_parts, H, HEAD_PAD] fp32. Without a norm and ROPE q or
    k is not written again.
    """
    at, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    heads: tl.constexpr = CHANNELS // HEAD_DIM
    offs_h = tl.arange(0, HEADS_PAD)[:, None]
    offs_d = tl.arange(0, HEAD_PAD)[None, :]
    mask = (offs_h < heads) & (offs_d < HEAD_PAD)
    if at < q_blocks:
        total = _block(
            q_out_ptr + b * n_q * CHANNELS, q_ptr + b * q_stride_b, q_weight_ptr,
            cos_ptr, sin_ptr, at * BLOCK_Q, q_stride_n, n_q, eps,
            CHANNELS, HEAD_DIM, HEAD_PAD, HEADS_PAD, BLOCK_Q, Q_NORM, ROPE, STAGES,
        )  # fmt: skip
        mean = (total / tl.minimum(BLOCK_Q, n_q - at * BLOCK_Q)).to(q_ptr.dtype.element_ty)
        pooled = q_pooled_ptr + ((b * heads + offs_h) * q_blocks + at) * HEAD_PAD + offs_d
        tl.store(pooled, mean, mask=mask)
    else:
        at -= q_blocks
        total = _block(
            k_out_ptr + b * n_kv * CHANNELS, k_ptr + b * k_stride_b, k_weight_ptr,
            cos_ptr, sin_ptr, at * K_TOKENS, k_stride_n, n_kv, eps,
            CHANNELS, HEAD_DIM, HEAD_PAD, HEADS_PAD, K_TOKENS, K_NORM, ROPE, STAGES,
        )  # fmt: skip
        sums = k_sums_ptr + ((b * k_parts + at) * heads + offs_h) * HEAD_PAD + offs_d
        tl.store(sums, total, mask=mask)


def prepare_tokens(
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    heads: int,
    norm_q: torch.Tensor | None,
    norm_k: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    eps: float,
    block_q: int,
) -> Tokens:
    """q [B, Nq, H*D] and k [B, Nk, H*D] once more, with their means; cos and sin [N, D] or None.

    norm_q and norm_k are RMSNorm weights: [H*D], or [D] per head, or None.
    """
    target_of(q.device)
    q, k = dense_rows(q), dense_rows(k)
    (batch, n_q, channels), n_kv = q.shape, k.shape[1]
    head_dim = channels // heads
    head_pad, heads_pad = pad_head(head_dim), triton.next_power_of_2(heads)
    token_bytes = heads_pad * head_pad * q.element_size()
    q_blocks, k_parts = cdiv(n_q, block_q), cdiv(n_kv, _K_TOKENS)
    q_norm, k_norm = (norm_form(weight, None, channels) for weight in (norm_q, norm_k))
    rope = cos is not None
    q_pooled = torch.empty(batch, heads, q_blocks, head_pad, dtype=q.dtype, device=q.device)
    k_sums = torch.empty(batch, k_parts, heads, head_pad, dtype=torch.float32, device=q.device)
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if q_norm or rope else q
    k_out = torch.empty(k.shape, dtype=k.dtype, device=k.device) if k_norm or rope else k
    launch(
        prepare_tokens_kernel,
        (q_blocks + k_parts, batch),
        q.device,
        q_out_ptr=q_out,
        k_out_ptr=k_out,
        q_pooled_ptr=q_pooled,
        k_sums_ptr=k_sums,
        q_ptr=q,
        k_ptr=k,
        q_weight_ptr=None if norm_q is None else norm_q.contiguous(),
        k_weight_ptr=None if norm_k is None else norm_k.contiguous(),
        cos_ptr=None if cos is None else cos.contiguous(),
        sin_ptr=None if sin is None else sin.contiguous(),
        q_stride_b=q.stride(0),
        q_stride_n=q.stride(1),
        k_stride_b=k.stride(0),
        k_stride_n=k.stride(1),
        n_q=n_q,
        n_kv=n_kv,
        q_blocks=q_blocks,
        k_parts=k_parts,
        eps=eps,
        CHANNELS=channels,
        HEAD_DIM=head_dim,
        HEAD_PAD=head_pad,
        HEADS_PAD=heads_pad,
        BLOCK_Q=block_q,
        K_TOKENS=_K_TOKENS,
        Q_NORM=q_norm,
        K_NORM=k_norm,
        ROPE=rope,
        STAGES=min(_STAGES, 1 + _SHARED // token_bytes),
        num_warps=_WARPS,
        num_stages=1,
    )
    return Tokens(q_out, k_out, q_pooled, (k_sums.sum(1) / n_kv).to(k.dtype))
