"""What the prologues read: rows of tokens, one head of them normalised and rotated in fp32."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

__all__ = ["SPREAD", "head_tile", "kv_limit", "row_rms", "signs", "spread"]

#: Channels that one Hadamard matrix mixes. On the shipped model 32 do as much as 64; a matrix for
#: 128 channels does not fit into registers beside the tile.
SPREAD = tl.constexpr(32)


@cache
def signs(device: torch.device, backend: str) -> torch.Tensor:
    """Sylvester's Hadamard matrix [32, 32].

    In bf16, for matrix instructions; Triton's interpreter multiplies bf16 wrongly and gets fp32.
    """
    i = torch.arange(SPREAD.value, device=device)
    common = i[:, None] & i[None, :]
    bits = sum((common >> n) & 1 for n in range(SPREAD.value.bit_length() - 1))
    dtype = torch.float32 if backend == "interpreter" else torch.bfloat16
    return (1 - 2 * (bits % 2)).to(dtype)


@triton.jit
def spread(x, signs_ptr, BLOCK_T: tl.constexpr, HEAD_PAD: tl.constexpr):
    """Every 32 channels of x [BLOCK_T, HEAD_PAD] fp32 times a Hadamard matrix, not normalised.

    Done to both q and k it leaves their products alone but for a factor, and spreads what single
    channels stick out by over 32, so that the int8 steps are half as wide (as in
    FlashAttention-3, arXiv 2407.08608). The product is exact to 2^-17 of x: signs are exact in
    bf16, and x is the sum of two bf16.
    """
    i = tl.arange(0, SPREAD)
    matrix = tl.load(signs_ptr + i[:, None] * SPREAD + i[None, :])
    x = tl.reshape(x, [BLOCK_T * HEAD_PAD // SPREAD, SPREAD])
    high = x.to(matrix.dtype)
    y = tl.dot(high, matrix, input_precision="ieee")
    if matrix.dtype != tl.float32:
        y = tl.dot((x - high.to(tl.float32)).to(matrix.dtype), matrix, y)
    return tl.reshape(y, [BLOCK_T, HEAD_PAD])


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
