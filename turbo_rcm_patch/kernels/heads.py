"""Pieces of the prologues' kernels: one head of some tokens, normalised and rotated in fp32."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["SPREAD", "head_tile", "kv_limit", "load_mean", "nearest", "row_rms", "spread"]

#: Channels that one Hadamard matrix mixes: as many as every padded head has at least.
SPREAD = tl.constexpr(32)

_MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding it rounds to an integer, half to even


@triton.jit
def spread(x, BLOCK_T: tl.constexpr, HEAD_PAD: tl.constexpr):
    """Every 32 channels of x [BLOCK_T, HEAD_PAD] fp32 times a Hadamard matrix, not normalised.

    Done to both q and k it leaves their products alone but for a factor, and spreads what single
    channels stick out by over 32, so that the int8 steps get finer (as in FlashAttention-3, arXiv
    2407.08608). Five stages of sums and differences, one per bit of the channel's number.
    """
    x = tl.reshape(x, [BLOCK_T, HEAD_PAD // SPREAD, 2, 2, 2, 2, 2])
    for _ in tl.static_range(5):
        one, other = tl.split(x)
        x = tl.permute(tl.join(one + other, one - other), [0, 1, 6, 2, 3, 4, 5])
    return tl.reshape(x, [BLOCK_T, HEAD_PAD])


@triton.jit
def row_rms(
    rows, mask_t, eps, CHANNELS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr
):
    """1 / rms of whole rows; rows: [BLOCK_T] pointers to their first channel."""
    total = tl.zeros([BLOCK_T], tl.float32)
    for start in range(0, CHANNELS, BLOCK_C):
        offs_c = start + tl.arange(0, BLOCK_C)
        x = tl.load(
            rows[:, None] + offs_c[None, :],
            mask=mask_t[:, None] & (offs_c < CHANNELS)[None, :],
            other=0.0,
        ).to(tl.float32)
        total += tl.sum(x * x, axis=1)
    return 1.0 / tl.sqrt(total / CHANNELS + eps)


@triton.jit
def head_tile(
    rows, offs_t, mask_t, rms, h, weight_ptr, cos_ptr, sin_ptr, eps,
    HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, BLOCK_T: tl.constexpr,
    NORM: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    """[BLOCK_T, HEAD_PAD] fp32: one head, normalised and rotated; 0 where masked."""
    offs_d = tl.arange(0, HEAD_PAD)
    mask = mask_t[:, None] & (offs_d < HEAD_DIM)[None, :]
    x = tl.load(rows[:, None] + (h * HEAD_DIM + offs_d)[None, :], mask=mask, other=0.0).to(
        tl.float32
    )
    if NORM == 2:  # per head
        rms = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / HEAD_DIM + eps)
        w = tl.load(weight_ptr + offs_d, mask=offs_d < HEAD_DIM, other=0.0).to(tl.float32)
        x = x * rms[:, None] * w[None, :]
    if NORM == 1:  # across heads
        w = tl.load(weight_ptr + h * HEAD_DIM + offs_d, mask=offs_d < HEAD_DIM, other=0.0).to(
            tl.float32
        )
        x = x * rms[:, None] * w[None, :]
    if ROPE:
        table = offs_t[:, None] * HEAD_DIM + offs_d[None, :]
        cos = tl.load(cos_ptr + table, mask=mask, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + table, mask=mask, other=0.0).to(tl.float32)
        even, odd = tl.split(tl.reshape(x, [BLOCK_T, HEAD_PAD // 2, 2]))
        c, _ = tl.split(tl.reshape(cos, [BLOCK_T, HEAD_PAD // 2, 2]))
        _, s = tl.split(tl.reshape(sin, [BLOCK_T, HEAD_PAD // 2, 2]))
        x = tl.reshape(tl.join(even * c - odd * s, even * s + odd * c), [BLOCK_T, HEAD_PAD])
    return x


@triton.jit
def kv_limit(lengths_ptr, b, n_tokens, HAS_LENGTHS: tl.constexpr):
    """Keys that batch entry b sees."""
    limit = n_tokens
    if HAS_LENGTHS:
        limit = tl.maximum(0, tl.minimum(tl.load(lengths_ptr + b).to(tl.int32), n_tokens))
    return limit


@triton.jit
def load_mean(
    partial_ptr, bh, limit, step, chunks,
    HEAD_PAD: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """[HEAD_PAD] mean of k from the partial sums of the sample."""
    offs_c = tl.arange(0, CHUNKS)
    offs_d = tl.arange(0, HEAD_PAD)
    partial = tl.load(
        partial_ptr + (bh * chunks + offs_c[:, None]) * HEAD_PAD + offs_d[None, :],
        mask=(offs_c < chunks)[:, None],
        other=0.0,
    )
    count = tl.maximum(1, (limit + step - 1) // step)
    return tl.sum(partial, axis=0) / count


@triton.jit
def nearest(x):
    """int8 of x fp32, |x| <= 127, half to even."""
    return ((x + _MAGIC) - _MAGIC).to(tl.int8)
