"""q and k as the four readers of sparse-linear attention share them: normalised, rotated, rounded
once; and in the same pass the means that need whole columns of tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from turbo_rcm_patch.kernels.launch import dense_rows, launch, pad_head, target_of
from turbo_rcm_patch.kernels.norm import normed_rotated
from turbo_rcm_patch.kernels.operands import norm_form

__all__ = ["Tokens", "prepare_tokens", "prepare_tokens_kernel"]

#: Tokens of k whose sum a program writes.
_K_TOKENS = 64
#: Channels that a program holds at a time, at most.
_VALUES = 8192


class Tokens(NamedTuple):
    """q [B, Nq, H*D] and k [B, Nk, H*D]; q_pooled [B, H, q_blocks, HEAD_PAD], means of blocks of
    q; k_mean [B, H, HEAD_PAD], the mean of k over all tokens; all in their dtype."""

    q: torch.Tensor
    k: torch.Tensor
    q_pooled: torch.Tensor
    k_mean: torch.Tensor


@triton.jit
def _block(
    out_ptr, x_ptr, weight_ptr, cos_ptr, sin_ptr, start, b, stride_b, stride_n, n_tokens, eps,
    CHANNELS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_C: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, NORM: tl.constexpr, ROPE: tl.constexpr,
    STORE: tl.constexpr,
):  # fmt: skip
    """TOKENS tokens from `start` on, ROWS at a time; the sum of what they are rounded to."""
    offs_c = tl.arange(0, BLOCK_C)[None, :]
    mask_c = offs_c < CHANNELS
    total = tl.zeros([BLOCK_C], tl.float32)
    for first in tl.range(start, tl.minimum(start + TOKENS, n_tokens), ROWS):
        rows = first + tl.arange(0, ROWS)[:, None]
        mask = (rows < n_tokens) & mask_c
        wide = rows.to(tl.int64)
        x = tl.load(x_ptr + b.to(tl.int64) * stride_b + wide * stride_n + offs_c, mask=mask,
                    other=0.0).to(tl.float32)  # fmt: skip
        x = normed_rotated(
            x, rows, offs_c, mask, weight_ptr, None, cos_ptr, sin_ptr, eps,
            CHANNELS, HEAD_DIM, BLOCK_C, ROWS, NORM, ROPE,
        )  # fmt: skip
        y = x.to(x_ptr.dtype.element_ty)
        if STORE:
            tl.store(
                out_ptr + (b.to(tl.int64) * n_tokens + wide) * CHANNELS + offs_c, y, mask=mask
            )
        total += tl.sum(y.to(tl.float32), axis=0)
    return total


@triton.jit
def prepare_tokens_kernel(
    q_out_ptr, k_out_ptr, q_pooled_ptr, k_sums_ptr,
    q_ptr, k_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr,
    q_stride_b, q_stride_n, k_stride_b, k_stride_n, n_q, n_kv, q_blocks, k_parts, eps,
    CHANNELS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_Q: tl.constexpr, K_TOKENS: tl.constexpr, ROWS: tl.constexpr,
    Q_NORM: tl.constexpr, K_NORM: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    """The norms of q and k (as in `operands`) and their rotary embedding (ROPE), the means of
    blocks of q and sums of parts of k.

    Grid: (blocks of q, then parts of k; batch). q [B, Nq, H*D], k [B, Nk, H*D] with contiguous
    channels, what is written dense; weights [H*D], or [D] per head, for which D is a power of two;
    cos, sin [N, D]; q_pooled [B, H, q_blocks, HEAD_PAD]; k_sums [B, k_parts, H*D] fp32. Without a
    norm and ROPE q or k is not written again.
    """
    at, b = tl.program_id(0), tl.program_id(1)
    offs_c = tl.arange(0, BLOCK_C)
    mask_c = offs_c < CHANNELS
    if at < q_blocks:
        total = _block(
            q_out_ptr, q_ptr, q_weight_ptr, cos_ptr, sin_ptr, at * BLOCK_Q, b,
            q_stride_b, q_stride_n, n_q, eps,
            CHANNELS, HEAD_DIM, BLOCK_C, BLOCK_Q, ROWS, Q_NORM, ROPE, Q_NORM > 0 or ROPE,
        )  # fmt: skip
        mean = (total / tl.minimum(BLOCK_Q, n_q - at * BLOCK_Q)).to(q_ptr.dtype.element_ty)
        bh = b.to(tl.int64) * (CHANNELS // HEAD_DIM) + offs_c // HEAD_DIM
        out = q_pooled_ptr + (bh * q_blocks + at) * HEAD_PAD + offs_c % HEAD_DIM
        tl.store(out, mean, mask=mask_c)
    else:
        at -= q_blocks
        total = _block(
            k_out_ptr, k_ptr, k_weight_ptr, cos_ptr, sin_ptr, at * K_TOKENS, b,
            k_stride_b, k_stride_n, n_kv, eps,
            CHANNELS, HEAD_DIM, BLOCK_C, K_TOKENS, ROWS, K_NORM, ROPE, K_NORM > 0 or ROPE,
        )  # fmt: skip
        tl.store(
            k_sums_ptr + (b.to(tl.int64) * k_parts + at) * CHANNELS + offs_c, total, mask=mask_c
        )


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

    norm_q and norm_k are RMSNorm weights: [H*D], or [D] where D is a power of two, or None.
    """
    target_of(q.device)
    q, k = dense_rows(q), dense_rows(k)
    (batch, n_q, channels), n_kv = q.shape, k.shape[1]
    head_dim = channels // heads
    head_pad, block_c = pad_head(head_dim), triton.next_power_of_2(channels)
    q_blocks, k_parts = triton.cdiv(n_q, block_q), triton.cdiv(n_kv, _K_TOKENS)
    q_norm, k_norm = (norm_form(weight, None, channels) for weight in (norm_q, norm_k))
    rope = cos is not None
    # Padded channels are read as zeros.
    empty = torch.empty if head_pad == head_dim else torch.zeros
    q_pooled = empty(batch, heads, q_blocks, head_pad, dtype=q.dtype, device=q.device)
    k_sums = torch.empty(batch, k_parts, channels, dtype=torch.float32, device=q.device)
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if q_norm or rope else q
    k_out = torch.empty(k.shape, dtype=k.dtype, device=k.device) if k_norm or rope else k
    warps = 4 if block_c <= 1024 else 8
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
        BLOCK_C=block_c,
        BLOCK_Q=block_q,
        K_TOKENS=_K_TOKENS,
        ROWS=max(1, min(4, _VALUES // block_c)),
        Q_NORM=q_norm,
        K_NORM=k_norm,
        ROPE=rope,
        num_warps=warps,
        num_stages=1,
    )
    mean = (k_sums.sum(1) / n_kv).view(batch, heads, head_dim)
    if head_pad > head_dim:
        mean = torch.nn.functional.pad(mean, (0, head_pad - head_dim))
    return Tokens(q_out, k_out, q_pooled, mean.to(k.dtype))
