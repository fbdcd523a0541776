"""The prologue of the attention kernel: q and k to int8 and v to e4m3, in two launches.

`statistics_kernel` averages k and v over a sample of tokens, and finds the largest magnitude of
each channel of v. The averages are subtracted later; any constant can be subtracted exactly.
`prologue_kernel` then normalises, rotates, mixes and quantises q and k, and transposes and rounds
v, in one pass over memory. A program takes a block of tokens of q, k or v. If the norm spans all
heads, it first sums the squares of the rows. Then it goes from head to head while the rows are in
cache. The rounding errors of v are summed over all tokens, and the attention adds their mean back.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from turbo_rcm_patch.ops import formats
from turbo_rcm_patch.ops.formats import LOG2_E, QMAX, Prologue, hadamard_width, scale_block
from turbo_rcm_patch.ops.launch import (
    AMAX_CHUNKS,
    LENGTHS,
    Tile,
    cdiv,
    launch,
    pad_head,
    strides,
    target_of,
    tile_for,
)

TINY = tl.constexpr(formats.TINY)
_ROUNDER = tl.constexpr(formats.ROUNDER)
_ROUNDER_BITS = tl.constexpr(formats.ROUNDER_BITS)
_E4M3_MAX = tl.constexpr(formats.E4M3_MAX)
LEAST_V = tl.constexpr(formats.LEAST_V)
LARGEST_CENTRED = tl.constexpr(formats.LARGEST_CENTRED)
MEAN_ROWS = tl.constexpr(formats.MEAN_ROWS)
_ERROR_STEPS = tl.constexpr(float(formats.ERROR_STEPS))


# `_load_8`, `_load_16` and `_load_32` read 8, 16 and 32 values: ptr[START], ptr[START + STEP], and
# so on. Each value is a tile [T, G], and the values become new dimensions of two. ptr and mask are
# [T, G]. With PADDED, values from `n_left` [T, G] on are 0. These are three functions because
# Triton 3.4 cannot compile one that calls itself.


@triton.jit
def _load_1(ptr, mask, n_left, START: tl.constexpr, STEP: tl.constexpr, PADDED: tl.constexpr):
    if PADDED:
        x = tl.load(ptr + START, mask=mask & (n_left > START), other=0)
    else:
        x = tl.load(ptr + START, mask=mask, other=0)
    return x


@triton.jit
def _load_2(ptr, mask, n_left, START: tl.constexpr, STEP: tl.constexpr, PADDED: tl.constexpr):
    even = _load_1(ptr, mask, n_left, START, 2 * STEP, PADDED)
    odd = _load_1(ptr, mask, n_left, START + STEP, 2 * STEP, PADDED)
    return tl.join(even, odd)


@triton.jit
def _load_4(ptr, mask, n_left, START: tl.constexpr, STEP: tl.constexpr, PADDED: tl.constexpr):
    even = _load_2(ptr, mask, n_left, START, 2 * STEP, PADDED)
    odd = _load_2(ptr, mask, n_left, START + STEP, 2 * STEP, PADDED)
    return tl.join(even, odd)


@triton.jit
def _load_8(ptr, mask, n_left, START: tl.constexpr, STEP: tl.constexpr, PADDED: tl.constexpr):
    even = _load_4(ptr, mask, n_left, START, 2 * STEP, PADDED)
    odd = _load_4(ptr, mask, n_left, START + STEP, 2 * STEP, PADDED)
    return tl.join(even, odd)


@triton.jit
def _load_16(ptr, mask, n_left, START: tl.constexpr, STEP: tl.constexpr, PADDED: tl.constexpr):
    even = _load_8(ptr, mask, n_left, START, 2 * STEP, PADDED)
    odd = _load_8(ptr, mask, n_left, START + STEP, 2 * STEP, PADDED)
    return tl.join(even, odd)


@triton.jit
def _load_32(ptr, mask, n_left, START: tl.constexpr, STEP: tl.constexpr, PADDED: tl.constexpr):
    even = _load_16(ptr, mask, n_left, START, 2 * STEP, PADDED)
    odd = _load_16(ptr, mask, n_left, START + STEP, 2 * STEP, PADDED)
    return tl.join(even, odd)


@triton.jit
def _unpack(words, SHIFT: tl.constexpr, DTYPE: tl.constexpr):
    return (words >> SHIFT).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def read_channels(
    ptr, words_ptr, offs, mask, n_left, WORDS: tl.constexpr, PADDED: tl.constexpr
):  # fmt: skip
    """Load 32 channels from ptr + offs [T, G] on, in their dtype, for `unpack_channels`.

    words_ptr is the same memory as int64 (WORDS: 16-bit channels, all offsets divisible by 4).
    Before they are unpacked the values take half the registers, and the load may still run.
    """
    if WORDS:
        x = _load_8(words_ptr + (offs >> 2), mask, n_left >> 2, 0, 1, PADDED)
    else:
        x = _load_32(ptr + offs, mask, n_left, 0, 1, PADDED)
    return x


@triton.jit
def unpack_channels(
    x, dtype: tl.constexpr, BLOCK_T: tl.constexpr, HEAD_PAD: tl.constexpr, WORDS: tl.constexpr
):
    """Convert the result of `read_channels` from `dtype` to fp32 [BLOCK_T, HEAD_PAD]."""
    if WORDS:
        even = tl.join(_unpack(x, 0, dtype), _unpack(x, 32, dtype))
        odd = tl.join(_unpack(x, 16, dtype), _unpack(x, 48, dtype))
        x = tl.join(even, odd)
    return tl.reshape(x.to(tl.float32), [BLOCK_T, HEAD_PAD])


@triton.jit
def group_offsets(offs_t, mask_t, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr):
    """Return tokens, first channels, mask and numbers of channels left, [T, G] each."""
    channel = tl.arange(0, HEAD_PAD // 32)[None, :] * 32
    tokens = offs_t[:, None] + 0 * channel
    first = 0 * offs_t[:, None] + channel
    return tokens, first, mask_t[:, None] & (first < HEAD_DIM), HEAD_DIM - first


@triton.jit
def rotary_tables(
    cos_ptr, sin_ptr, tokens, first, mask, n_left,
    BLOCK_T: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr,
):  # fmt: skip
    """Load cos of even and sin of odd channels, [BLOCK_T, HEAD_PAD / 2] fp32 each."""
    offs = tokens * HEAD_DIM + first
    padded: tl.constexpr = HEAD_DIM % 32 != 0
    cos = _load_16(cos_ptr + offs, mask, n_left, 0, 2, padded).to(tl.float32)
    sin = _load_16(sin_ptr + offs, mask, n_left, 1, 2, padded).to(tl.float32)
    cos = tl.reshape(cos, [BLOCK_T, HEAD_PAD // 2])
    return cos, tl.reshape(sin, [BLOCK_T, HEAD_PAD // 2])


@triton.jit
def row_rms(
    rows, mask_t, eps, CHANNELS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr
):
    """Compute 1 / rms of whole rows; rows: [BLOCK_T] pointers to their first channel."""
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
    x, first, mask, n_left, rms, h, weight_ptr, weight_words_ptr, bias_ptr, bias_words_ptr,
    cos, sin, eps, dtype: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, BLOCK_T: tl.constexpr,
    NORM: tl.constexpr, ROPE: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Normalise and rotate one head: [BLOCK_T, HEAD_PAD] fp32, 0 where masked.

    x: the head as `read_channels` loaded it; rms [BLOCK_T] (NORM 1). NORM as in `operands`.
    """
    x = unpack_channels(x, dtype, BLOCK_T, HEAD_PAD, WORDS)
    if NORM == 3:  # layer norm
        x = x - (tl.sum(x, axis=1) / HEAD_DIM)[:, None]
        if HEAD_DIM != HEAD_PAD:
            x = tl.where((tl.arange(0, HEAD_PAD) < HEAD_DIM)[None, :], x, 0.0)
    if NORM >= 2:  # per head
        rms = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / HEAD_DIM + eps)
    if NORM != 0:
        own = first + h * HEAD_DIM if NORM == 1 else first
        padded: tl.constexpr = HEAD_DIM % 32 != 0
        w = read_channels(weight_ptr, weight_words_ptr, own, mask, n_left, WORDS, padded)
        kind: tl.constexpr = weight_ptr.dtype.element_ty
        x = x * rms[:, None] * unpack_channels(w, kind, BLOCK_T, HEAD_PAD, WORDS)
        if NORM == 3:
            # Masked like x, so that a token past the end stays 0.
            w = read_channels(bias_ptr, bias_words_ptr, own, mask, n_left, WORDS, padded)
            bias_kind: tl.constexpr = bias_ptr.dtype.element_ty
            x += unpack_channels(w, bias_kind, BLOCK_T, HEAD_PAD, WORDS)
    if ROPE:
        even, odd = tl.split(tl.reshape(x, [BLOCK_T, HEAD_PAD // 2, 2]))
        x = tl.join(even * cos - odd * sin, even * sin + odd * cos)
        x = tl.reshape(x, [BLOCK_T, HEAD_PAD])
    return x


@triton.jit
def hadamard(x, BLOCK_T: tl.constexpr, HEAD_PAD: tl.constexpr):
    """Multiply every `hadamard_width` channels of x [BLOCK_T, HEAD_PAD] fp32 by a Hadamard matrix.

    The matrix is not normalised. Applied to both q and k it only multiplies their products by a
    factor. It spreads the outliers of single channels over the others, so that the int8 steps get
    finer (as in FlashAttention-3, arXiv 2407.08608). There is one stage of sums and differences
    per bit of the channel's index: five within a thread, the sixth between neighbouring threads.
    """
    x = tl.reshape(x, [BLOCK_T, HEAD_PAD // 32, 2, 2, 2, 2, 2])
    for _ in tl.static_range(5):
        one, other = tl.split(x)
        x = tl.permute(tl.join(one + other, one - other), [0, 1, 6, 2, 3, 4, 5])
    if HEAD_PAD == 64:
        # The sum comes from the neighbour; the difference is the sum less twice the own value.
        x = tl.reshape(x, [BLOCK_T, 2, 32])
        total = tl.sum(x, axis=1)[:, None, :]
        second = tl.arange(0, 2)[None, :, None] == 1
        x = tl.where(second, total - 2.0 * x, total + 0.0 * x)
    return tl.reshape(x, [BLOCK_T, HEAD_PAD])


@triton.jit
def store_int8(words_ptr, x, mask, BLOCK_T: tl.constexpr, HEAD_PAD: tl.constexpr):
    """Store x [BLOCK_T, HEAD_PAD] fp32, |x| <= 127, as int8, rounded half to even.

    words_ptr: [T, G] pointers to the first of each group's four int64.
    """
    x = (x + _ROUNDER).to(tl.int32, bitcast=True) & 0xFF
    low, high = tl.split(tl.reshape(x, [BLOCK_T, HEAD_PAD // 2, 2]))
    low, high = tl.split(tl.reshape(low | (high << 8), [BLOCK_T, HEAD_PAD // 4, 2]))
    low, high = tl.split(tl.reshape(low | (high << 16), [BLOCK_T, HEAD_PAD // 8, 2]))
    words = (low.to(tl.int64) & 0xFFFFFFFF) | (high.to(tl.int64) << 32)
    even, odd = tl.split(tl.reshape(words, [BLOCK_T, HEAD_PAD // 32, 2, 2]))
    word_0, word_2 = tl.split(even)
    word_1, word_3 = tl.split(odd)
    tl.store(words_ptr, word_0, mask=mask)
    tl.store(words_ptr + 1, word_1, mask=mask)
    tl.store(words_ptr + 2, word_2, mask=mask)
    tl.store(words_ptr + 3, word_3, mask=mask)


@triton.jit
def kv_limit(lengths_ptr, b, n_tokens, HAS_LENGTHS: tl.constexpr):
    """Return the number of keys that batch entry b sees."""
    limit = n_tokens
    if HAS_LENGTHS:
        limit = tl.maximum(0, tl.minimum(tl.load(lengths_ptr + b), n_tokens)).to(tl.int32)
    return limit


@triton.jit
def load_mean(mean_words_ptr, bh, first, mask, BLOCK_T: tl.constexpr, HEAD_PAD: tl.constexpr):
    """Load the mean of k, [BLOCK_T, HEAD_PAD] fp32 with equal rows.

    mean [B, H, HEAD_PAD] fp32, read as int64.
    """
    words = _load_16(mean_words_ptr + (bh * HEAD_PAD + first) // 2, mask, first, 0, 1, False)
    low = words.to(tl.int32).to(tl.float32, bitcast=True)
    high = (words >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    return tl.reshape(tl.join(low, high), [BLOCK_T, HEAD_PAD])


@triton.jit
def channel_amax(
    chunk, h, b, limit,
    v_ptr, v_stats_ptr, strides, chunk_tokens, chunks, heads,
    HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Store the largest magnitude of each channel of a head of v over a chunk of tokens.

    v [B, N, H*D]; v_stats [B, H, 1 + chunks, HEAD_PAD] fp32: the mean, then the magnitudes.
    """
    offs_d = tl.arange(0, HEAD_PAD)
    base = v_ptr + b.to(tl.int64) * strides[0] + h * HEAD_DIM
    amax = tl.zeros([BLOCK_T, HEAD_PAD], tl.float32)
    for start in range(0, chunk_tokens, BLOCK_T):
        offs_t = chunk * chunk_tokens + start + tl.arange(0, BLOCK_T)
        x = tl.load(
            base + offs_t.to(tl.int64)[:, None] * strides[1] + offs_d[None, :],
            mask=(offs_t < limit)[:, None] & (offs_d < HEAD_DIM)[None, :],
            other=0.0,
        ).to(tl.float32)
        amax = tl.maximum(amax, tl.abs(x))
    bh = b.to(tl.int64) * heads + h
    row = bh * (1 + chunks) + 1 + chunk
    tl.store(v_stats_ptr + row * HEAD_PAD + offs_d, tl.max(amax, axis=0))


@triton.jit
def value_mean(
    h, b, limit,
    v_ptr, v_stats_ptr, error_ptr, strides, samples, step, chunks, heads,
    HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr,
):  # fmt: skip
    """Store the mean of each channel of a head of v over tokens 0, step, 2 * step, ... < limit.

    There are at most `samples` of these. v [B, N, H*D]; v_stats as in `channel_amax`. The sums of
    errors, the last row of [B, H, 3, HEAD_PAD] int32, are zeroed for `value_block`.
    """
    offs_d = tl.arange(0, HEAD_PAD)
    base = v_ptr + b.to(tl.int64) * strides[0] + h * HEAD_DIM
    total = tl.zeros([MEAN_ROWS, HEAD_PAD], tl.float32)
    for start in range(0, samples, MEAN_ROWS):
        offs_t = (start + tl.arange(0, MEAN_ROWS)) * step
        total += tl.load(
            base + offs_t.to(tl.int64)[:, None] * strides[1] + offs_d[None, :],
            mask=(offs_t < limit)[:, None] & (offs_d < HEAD_DIM)[None, :],
            other=0.0,
        ).to(tl.float32)
    # Add pairwise, so that all kernels add in the same order, whatever their layouts are.
    for i in tl.static_range(5):
        total = tl.sum(tl.reshape(total, [2, MEAN_ROWS >> (i + 1), HEAD_PAD]), axis=0)
    total = tl.reshape(total, [HEAD_PAD])
    count = tl.maximum(1, (limit + step - 1) // step).to(tl.float32)
    bh = b.to(tl.int64) * heads + h
    tl.store(v_stats_ptr + bh * (1 + chunks) * HEAD_PAD + offs_d, tl.div_rn(total, count))
    tl.store(error_ptr + (3 * bh + 2) * HEAD_PAD + offs_d, tl.zeros([HEAD_PAD], tl.int32))


@triton.jit
def value_block(
    block, h, b, limit,
    v_ptr, v_stats_ptr, out_ptr, levels_ptr, error_ptr, strides, n_padded, chunks,
    heads,
    HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, BLOCK_T: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Store BLOCK_T tokens of a head of v, less their mean, transposed in e4m3.

    There is one scale per channel. Tokens are permuted within groups of 32. Tokens from `limit` on
    are masked. v [B, N, H*D]; v_stats [B, H, 1 + chunks, HEAD_PAD] fp32 as in `channel_amax`;
    out [B, H, HEAD_PAD, n_padded] e4m3; levels [B, H, 3, HEAD_PAD] as in `operands.Values`; error
    is the same memory as int32, to whose last row the rounding errors are added.
    """
    offs_d = tl.arange(0, HEAD_PAD)
    bh = b.to(tl.int64) * heads + h
    offs_c = tl.arange(0, CHUNKS)
    stats = v_stats_ptr + bh * (1 + chunks) * HEAD_PAD + offs_d
    partial = tl.load(
        stats[None, :] + (1 + offs_c[:, None]) * HEAD_PAD,
        mask=(offs_c < chunks)[:, None],
        other=0.0,
    )
    amax = tl.max(partial, axis=0)
    mean = tl.where(amax < LARGEST_CENTRED, tl.load(stats), 0.0)
    amax = tl.maximum(amax + tl.abs(mean), LEAST_V)
    levels = 3 * bh * HEAD_PAD + offs_d
    if block == 0:
        tl.store(levels_ptr + levels, amax / _E4M3_MAX)
        tl.store(levels_ptr + levels + HEAD_PAD, mean)
    # Position (h, t, f, e) of a group of 32 holds token (h, f, t, e), sizes (2, 4, 2, 2): with
    # keys in this order the accumulator of q k^T is, register by register, the operand of p v.
    p = tl.arange(0, BLOCK_T)
    token = (p & ~31) + (p & 16) + ((p >> 1) & 1) * 8 + ((p >> 2) & 3) * 2 + (p & 1)
    offs_t = block * BLOCK_T + token
    mask = (offs_t < limit)[:, None] & (offs_d < HEAD_DIM)[None, :]
    x = tl.load(
        v_ptr + b.to(tl.int64) * strides[0] + offs_t.to(tl.int64)[:, None] * strides[1]
        + (h * HEAD_DIM + offs_d)[None, :],
        mask=mask,
        other=0.0,
    ).to(tl.float32)  # fmt: skip
    inverse = tl.div_rn(tl.full([HEAD_PAD], _E4M3_MAX, tl.float32), amax)
    x = tl.where(mask, (x - mean[None, :]) * inverse[None, :], 0.0)
    y = x.to(tl.float8e4nv)
    tl.store(
        out_ptr + (bh * HEAD_PAD + offs_d[:, None]) * n_padded + block * BLOCK_T + p[None, :],
        tl.trans(y),
    )
    error = (x - y.to(tl.float32)) * _ERROR_STEPS
    error = (error + _ROUNDER).to(tl.int32, bitcast=True) - _ROUNDER_BITS
    # The errors are integers, so their sum does not depend on the order.
    tl.atomic_add(error_ptr + levels + 2 * HEAD_PAD, tl.sum(error, axis=0), sem="relaxed")


@triton.jit
def sample_mean(
    h, b, limit,
    x_ptr, words_ptr, mean_ptr, weight_ptr, weight_words_ptr,
    bias_ptr, bias_words_ptr, cos_ptr, sin_ptr,
    strides, samples, step, heads, eps,
    CHANNELS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
    NORM: tl.constexpr, ROPE: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Store the mean of a normalised, rotated head of x over tokens 0, step, ... < limit.

    There are at most `samples` of these. x [B, N, H*D], words the same as int64 (WORDS);
    mean [B, H, HEAD_PAD] fp32; weight [H*D] or [D]; bias [D]; cos, sin [N, D].
    """
    total = tl.zeros([HEAD_PAD], tl.float32)
    for start in range(0, samples, BLOCK_T):
        offs_t = (start + tl.arange(0, BLOCK_T)) * step
        mask_t = offs_t < limit
        rms = tl.zeros([BLOCK_T], tl.float32)
        row = b.to(tl.int64) * strides[0] + offs_t.to(tl.int64) * strides[1]
        if NORM == 1:
            rms = row_rms(x_ptr + row, mask_t, eps, CHANNELS, BLOCK_T, BLOCK_C)
        tokens, first, mask, n_left = group_offsets(offs_t, mask_t, HEAD_DIM, HEAD_PAD)
        cos, sin = None, None
        if ROPE:
            cos, sin = rotary_tables(
                cos_ptr, sin_ptr, tokens, first, mask, n_left, BLOCK_T, HEAD_DIM, HEAD_PAD
            )
        offs = row[:, None] + first + h * HEAD_DIM
        x = read_channels(x_ptr, words_ptr, offs, mask, n_left, WORDS, HEAD_DIM % 32 != 0)
        x = head_tile(
            x, first, mask, n_left, rms, h, weight_ptr, weight_words_ptr,
            bias_ptr, bias_words_ptr, cos, sin, eps, x_ptr.dtype.element_ty,
            HEAD_DIM, HEAD_PAD, BLOCK_T, NORM, ROPE, WORDS,
        )  # fmt: skip
        total += tl.sum(x, axis=0)
    count = tl.maximum(1, (limit + step - 1) // step)
    tl.store(mean_ptr + (b * heads + h) * HEAD_PAD + tl.arange(0, HEAD_PAD), total / count)


@triton.jit
def key_block(
    block, group, b, limit,
    x_ptr, words_ptr, int8_ptr, scale_ptr, weight_ptr, weight_words_ptr,
    bias_ptr, bias_words_ptr, cos_ptr, sin_ptr, mean_ptr,
    strides, n_padded, n_scales, heads, eps,
    CHANNELS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_C: tl.constexpr, GROUP: tl.constexpr, QMAX: tl.constexpr,
    NORM: tl.constexpr, ROPE: tl.constexpr, WORDS: tl.constexpr,
    SUBTRACT: tl.constexpr,
):  # fmt: skip
    """Store ROWS tokens of GROUP heads of k as int8 with their scales.

    Before that, norm, rotary embedding, smoothing and `hadamard` are applied. Tokens from `limit`
    on are masked. x [B, N, H*D], words the same as int64 (WORDS); int8 [B, H, n_padded, HEAD_PAD]
    as int64, 0 for masked keys; scale [B, H, n_scales] fp32; weight [H*D] or [D]; bias [D]; cos,
    sin [N, D]; mean [B, H, HEAD_PAD], subtracted (SUBTRACT).
    """
    offs_t = block * ROWS + tl.arange(0, ROWS)
    mask_t = offs_t < limit
    row = b.to(tl.int64) * strides[0] + offs_t.to(tl.int64) * strides[1]
    rms = tl.zeros([ROWS], tl.float32)
    if NORM == 1:
        rms = row_rms(x_ptr + row, mask_t, eps, CHANNELS, ROWS, BLOCK_C)
    tokens, first, mask, n_left = group_offsets(offs_t, mask_t, HEAD_DIM, HEAD_PAD)
    cos, sin = None, None
    if ROPE:
        cos, sin = rotary_tables(
            cos_ptr, sin_ptr, tokens, first, mask, n_left, ROWS, HEAD_DIM, HEAD_PAD
        )
    # Load each head while the one before it is computed.
    padded: tl.constexpr = HEAD_DIM % 32 != 0
    offs = row[:, None] + first
    last = tl.minimum((group + 1) * GROUP, heads) - 1
    following = read_channels(
        x_ptr, words_ptr, offs + group * GROUP * HEAD_DIM, mask, n_left, WORDS, padded
    )
    for h in range(group * GROUP, last + 1):
        here = following
        at = offs + tl.minimum(h + 1, last) * HEAD_DIM
        following = read_channels(x_ptr, words_ptr, at, mask, n_left, WORDS, padded)
        bh = b.to(tl.int64) * heads + h
        x = head_tile(
            here, first, mask, n_left, rms, h, weight_ptr, weight_words_ptr,
            bias_ptr, bias_words_ptr, cos, sin, eps, x_ptr.dtype.element_ty,
            HEAD_DIM, HEAD_PAD, ROWS, NORM, ROPE, WORDS,
        )  # fmt: skip
        if SUBTRACT:
            mean = load_mean(mean_ptr, bh, first, mask, ROWS, HEAD_PAD)
            x = tl.where(mask_t[:, None], x - mean, 0.0)
        x = hadamard(x, ROWS, HEAD_PAD)
        amax = tl.max(tl.abs(x))
        total = tl.sum(x)
        amax = tl.where(amax > TINY, amax, 1.0)
        inverse = tl.div_rn(QMAX * 1.0, amax)
        # A maximum drops NaN but a sum keeps it, so a NaN in x makes the scale NaN.
        tl.store(scale_ptr + bh * n_scales + block, tl.where(total == total, amax / QMAX, total))
        out = int8_ptr + ((bh * n_padded + tokens) * HEAD_PAD + first) // 8
        store_int8(out, x * inverse, tokens < n_padded, ROWS, HEAD_PAD)


@triton.jit
def query_block(
    block, group, b,
    x_ptr, words_ptr, int8_ptr, scale_ptr, weight_ptr, weight_words_ptr,
    bias_ptr, bias_words_ptr, cos_ptr, sin_ptr, mean_ptr, shift_ptr, counter_ptr,
    strides, n_tokens, n_padded, heads, n_counters,
    eps, factor, shift_factor,
    CHANNELS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, GROUP: tl.constexpr,
    COUNTER_ROWS: tl.constexpr, QMAX: tl.constexpr,
    NORM: tl.constexpr, ROPE: tl.constexpr, WORDS: tl.constexpr,
    SHIFT: tl.constexpr, COUNTERS: tl.constexpr,
):  # fmt: skip
    """Store BLOCK_T tokens of GROUP heads of q as int8 with their scales.

    Before that, norm, rotary embedding and `hadamard` are applied. x [B, N, H*D], words the same
    as int64 (WORDS); int8 [B, H, n_padded, HEAD_PAD] as int64;
    scale [B, H, n_padded] fp32, times `factor`; weight [H*D] or [D]; bias [D]; cos, sin [N, D];
    mean [B, H, HEAD_PAD] of k, for shift [B, H, n_padded] fp32 = q · mean * shift_factor (SHIFT);
    counter [B, n_counters] int32, zeroed for the one-launch kernel.
    """
    offs_t = block * BLOCK_T + tl.arange(0, BLOCK_T)
    if COUNTERS:
        counters: tl.constexpr = 1 if BLOCK_T < COUNTER_ROWS else BLOCK_T // COUNTER_ROWS
        counter = block * BLOCK_T // COUNTER_ROWS + tl.arange(0, counters)
        if group == 0:
            tl.store(counter_ptr + b * n_counters + counter, 0, mask=counter < n_counters)
    mask_t = offs_t < n_tokens
    row = b.to(tl.int64) * strides[0] + offs_t.to(tl.int64) * strides[1]
    rms = tl.zeros([BLOCK_T], tl.float32)
    if NORM == 1:
        rms = row_rms(x_ptr + row, mask_t, eps, CHANNELS, BLOCK_T, BLOCK_C)
    tokens, first, mask, n_left = group_offsets(offs_t, mask_t, HEAD_DIM, HEAD_PAD)
    cos, sin = None, None
    if ROPE:
        cos, sin = rotary_tables(
            cos_ptr, sin_ptr, tokens, first, mask, n_left, BLOCK_T, HEAD_DIM, HEAD_PAD
        )
    inside = offs_t < n_padded
    # Load each head while the one before it is computed.
    padded: tl.constexpr = HEAD_DIM % 32 != 0
    offs = row[:, None] + first
    last = tl.minimum((group + 1) * GROUP, heads) - 1
    following = read_channels(
        x_ptr, words_ptr, offs + group * GROUP * HEAD_DIM, mask, n_left, WORDS, padded
    )
    for h in range(group * GROUP, last + 1):
        here = following
        at = offs + tl.minimum(h + 1, last) * HEAD_DIM
        following = read_channels(x_ptr, words_ptr, at, mask, n_left, WORDS, padded)
        x = head_tile(
            here, first, mask, n_left, rms, h, weight_ptr, weight_words_ptr,
            bias_ptr, bias_words_ptr, cos, sin, eps, x_ptr.dtype.element_ty,
            HEAD_DIM, HEAD_PAD, BLOCK_T, NORM, ROPE, WORDS,
        )  # fmt: skip
        bh = b.to(tl.int64) * heads + h
        if SHIFT:
            mean = load_mean(mean_ptr, bh, first, mask, BLOCK_T, HEAD_PAD)
            shift = tl.sum(x * mean, axis=1) * shift_factor
            tl.store(shift_ptr + bh * n_padded + offs_t, shift, mask=inside)
        x = hadamard(x, BLOCK_T, HEAD_PAD)
        amax = tl.max(tl.abs(x), axis=1)
        total = tl.sum(x, axis=1)
        amax = tl.where(amax > TINY, amax, 1.0)
        inverse = tl.div_rn(tl.full([BLOCK_T], QMAX, tl.float32), amax)
        # A maximum drops NaN but a sum keeps it, so a NaN in x makes the scale NaN.
        scale = tl.where(total == total, amax / QMAX * factor, total)
        # The threads of the first channels store it, because a vector would be exchanged first.
        tl.store(
            scale_ptr + bh * n_padded + tokens,
            scale[:, None] + 0.0 * first,
            mask=inside[:, None] & (first == 0),
        )
        out = int8_ptr + ((bh * n_padded + tokens) * HEAD_PAD + first) // 8
        store_int8(out, x * inverse[:, None], inside[:, None], BLOCK_T, HEAD_PAD)


@triton.jit(do_not_specialize=LENGTHS)
def statistics_kernel(
    k_ptr, k_words_ptr, mean_ptr, weight_ptr, weight_words_ptr, bias_ptr, bias_words_ptr,
    cos_ptr, sin_ptr, v_ptr, v_stats_ptr, v_error_ptr, lengths_ptr,
    k_strides, v_strides, n_kv, step, chunk_tokens, chunks, heads, eps,
    CHANNELS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
    NORM: tl.constexpr, ROPE: tl.constexpr, WORDS: tl.constexpr, HAS_LENGTHS: tl.constexpr,
    SMOOTH: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Store the mean of a sample of k (SMOOTH), and the mean of a sample and maxima of v (FP8).

    Grid: (heads with SMOOTH + heads * chunks + heads with FP8, batch). Arguments as in
    `sample_mean`, `channel_amax` and `value_mean`; lengths [B].
    """
    at, b = tl.program_id(0), tl.program_id(1)
    limit = kv_limit(lengths_ptr, b, n_kv, HAS_LENGTHS)
    means = 0
    if SMOOTH:
        means = heads
        if at < means:
            sample_mean(
                at, b, limit, k_ptr, k_words_ptr, mean_ptr, weight_ptr, weight_words_ptr,
                bias_ptr, bias_words_ptr, cos_ptr, sin_ptr,
                k_strides, tl.cdiv(n_kv, step), step, heads, eps,
                CHANNELS, HEAD_DIM, HEAD_PAD, BLOCK_T, BLOCK_C, NORM, ROPE, WORDS,
            )  # fmt: skip
    if FP8:  # noqa: SIM102 (a compile-time branch: without FP8 there is no v to read)
        if at >= means:
            chunk, h = (at - means) // heads, (at - means) % heads
            if chunk < chunks:
                channel_amax(
                    chunk, h, b, limit,
                    v_ptr, v_stats_ptr, v_strides, chunk_tokens, chunks, heads,
                    HEAD_DIM, HEAD_PAD, BLOCK_T,
                )  # fmt: skip
            else:
                value_mean(
                    h, b, limit,
                    v_ptr, v_stats_ptr, v_error_ptr, v_strides,
                    tl.cdiv(n_kv, step), step, chunks, heads, HEAD_DIM, HEAD_PAD,
                )  # fmt: skip


@triton.jit(do_not_specialize=LENGTHS)
def prologue_kernel(
    q_ptr, q_words_ptr, q_int8_ptr, q_scale_ptr, q_weight_ptr, q_weight_words_ptr,
    q_bias_ptr, q_bias_words_ptr, shift_ptr, counter_ptr,
    k_ptr, k_words_ptr, k_int8_ptr, k_scale_ptr, k_weight_ptr, k_weight_words_ptr,
    k_bias_ptr, k_bias_words_ptr, mean_ptr,
    v_ptr, v_stats_ptr, v_out_ptr, v_levels_ptr, v_error_ptr, cos_ptr, sin_ptr, lengths_ptr,
    q_strides, k_strides, v_strides,
    n_q, n_kv, n_q_padded, n_kv_padded, heads, n_counters, chunks, q_blocks, kv_blocks,
    eps, factor, shift_factor,
    CHANNELS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_C: tl.constexpr, GROUP: tl.constexpr, QMAX: tl.constexpr,
    COUNTER_ROWS: tl.constexpr, CHUNKS: tl.constexpr,
    Q_NORM: tl.constexpr, K_NORM: tl.constexpr, ROPE: tl.constexpr,
    Q_WORDS: tl.constexpr, K_WORDS: tl.constexpr, HAS_LENGTHS: tl.constexpr,
    SUBTRACT: tl.constexpr, SHIFT: tl.constexpr, COUNTERS: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Store q and k as int8 and, with FP8, v as transposed e4m3.

    Grid: (blocks of ROWS tokens of k, then of q, then of v; groups of GROUP heads; batch).
    Arguments as in `key_block`, `query_block` and `value_block`.
    """
    block, group, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    limit = kv_limit(lengths_ptr, b, n_kv, HAS_LENGTHS)
    if block < kv_blocks:
        key_block(
            block, group, b, limit,
            k_ptr, k_words_ptr, k_int8_ptr, k_scale_ptr, k_weight_ptr, k_weight_words_ptr,
            k_bias_ptr, k_bias_words_ptr, cos_ptr, sin_ptr, mean_ptr,
            k_strides, n_kv_padded, kv_blocks, heads, eps,
            CHANNELS, HEAD_DIM, HEAD_PAD, ROWS, BLOCK_C, GROUP, QMAX,
            K_NORM, ROPE, K_WORDS, SUBTRACT,
        )  # fmt: skip
    elif block < kv_blocks + q_blocks:
        query_block(
            block - kv_blocks, group, b,
            q_ptr, q_words_ptr, q_int8_ptr, q_scale_ptr, q_weight_ptr, q_weight_words_ptr,
            q_bias_ptr, q_bias_words_ptr, cos_ptr, sin_ptr, mean_ptr, shift_ptr, counter_ptr,
            q_strides, n_q, n_q_padded, heads, n_counters, eps, factor, shift_factor,
            CHANNELS, HEAD_DIM, HEAD_PAD, ROWS, BLOCK_C, GROUP, COUNTER_ROWS, QMAX,
            Q_NORM, ROPE, Q_WORDS, SHIFT, COUNTERS,
        )  # fmt: skip
    elif FP8:
        for h in range(group * GROUP, tl.minimum((group + 1) * GROUP, heads)):
            value_block(
                block - kv_blocks - q_blocks, h, b, limit,
                v_ptr, v_stats_ptr, v_out_ptr, v_levels_ptr, v_error_ptr, v_strides,
                n_kv_padded, chunks, heads, HEAD_DIM, HEAD_PAD, ROWS, CHUNKS,
            )  # fmt: skip


def _as_words(x: torch.Tensor | None) -> torch.Tensor | None:
    """View x as int64, four 16-bit elements each, or return None if that is impossible."""
    if x is None:
        return None
    strides = (*x.stride()[:-1], x.storage_offset(), x.shape[-1])
    if x.element_size() != 2 or any(stride % 4 for stride in strides):
        return None
    # Memory of another library may have any address.
    if x.device.type != "meta" and x.data_ptr() % 8:
        return None
    return x.view(torch.int64)


class _Rows(NamedTuple):
    """The rows of q or k with weight and bias of their norm, as words if all can be viewed so."""

    words: torch.Tensor | None = None
    weight_words: torch.Tensor | None = None
    bias_words: torch.Tensor | None = None


def _rows(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, head_dim: int
) -> _Rows:
    """Describe x [B, N, H*D] (dense rows), weight [H*D] or [D] or None, bias [D] or None."""
    words = _Rows(*map(_as_words, (x, weight, bias)))
    given = (True, weight is not None, bias is not None)
    readable = all(w is not None for w, there in zip(words, given, strict=True) if there)
    return words if head_dim % 4 == 0 and readable else _Rows()


def _heads_a_program(heads: int, programs: int) -> int:
    """Return the heads per program: all, unless that leaves a large GPU idle."""
    return max(1, min(heads, heads * programs // 512))


def run_prologue(job: Prologue, *, tile: Tile | None = None) -> None:
    """Compute the operands of a job into its memory; `tile` replaces the table's."""
    a, queries, keys, values, counters, counter_rows = job
    q, k, v, heads, head_dim, norms = a.q, a.k, a.v, a.spec.heads, a.head_dim, a.norms
    cos, sin = a.rotary or (None, None)
    (batch, _, channels), n_kv, device = q.shape, k.shape[1], q.device
    fp8, smooth = values is not None, a.spec.smooth_k
    head_pad, rows = pad_head(head_dim), scale_block(head_dim)
    if tile is None:
        tile = tile_for("prologue", str(head_pad), target_of(device))
    # A thread takes 32 channels of a token, so a block of few tokens has work for few warps.
    warps = min(tile.warps, max(1, rows * head_pad // 1024))
    q_rows = _rows(q, norms.q, norms.q_bias, head_dim)
    k_rows = _rows(k, norms.k, norms.k_bias, head_dim)
    common = {
        "cos_ptr": cos,
        "sin_ptr": sin,
        "lengths_ptr": a.kv_lengths,
        **strides(k=k, v=v),
        "n_kv": n_kv,
        "heads": heads,
        "eps": norms.eps,
        "CHANNELS": channels,
        "HEAD_DIM": head_dim,
        "HEAD_PAD": head_pad,
        "BLOCK_C": min(tile.block_n, 2048 * warps // rows, triton.next_power_of_2(channels)),
        "ROPE": cos is not None,
        "HAS_LENGTHS": a.kv_lengths is not None,
        "FP8": fp8,
        "num_stages": tile.stages,
    }

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(batch, heads, *shape, head_pad, dtype=torch.float32, device=device)

    mean = empty() if smooth else None
    chunk_tokens = cdiv(cdiv(n_kv, AMAX_CHUNKS), rows) * rows
    chunks = cdiv(n_kv, chunk_tokens)
    stats = empty(1 + chunks) if fp8 else None
    errors = None if values is None else values.levels.view(torch.int32)
    # With half the tokens and half the warps of the prologue a thread may use twice the registers.
    block_t = max(16, rows // 2)
    if smooth or fp8:
        launch(
            statistics_kernel,
            (heads * (smooth + (chunks + 1) * fp8), batch),
            device,
            k_ptr=k,
            k_words_ptr=k_rows.words,
            mean_ptr=mean,
            weight_ptr=norms.k,
            weight_words_ptr=k_rows.weight_words,
            bias_ptr=norms.k_bias,
            bias_words_ptr=k_rows.bias_words,
            v_ptr=v,
            v_stats_ptr=stats,
            v_error_ptr=errors,
            step=job.step,
            chunk_tokens=chunk_tokens,
            chunks=chunks,
            BLOCK_T=block_t,
            NORM=job.k_norm,
            WORDS=k_rows.words is not None,
            SMOOTH=smooth,
            num_warps=max(4, warps // 2),
            **common,
        )
    n_q_padded, n_kv_padded = queries.int8.shape[2], keys.int8.shape[2]
    q_blocks, kv_blocks = n_q_padded // rows, n_kv_padded // rows
    blocks = q_blocks + kv_blocks * (1 + fp8)
    group = _heads_a_program(heads, blocks * batch)
    launch(
        prologue_kernel,
        (blocks, cdiv(heads, group), batch),
        device,
        q_ptr=q,
        q_words_ptr=q_rows.words,
        q_int8_ptr=queries.int8.view(torch.int64),
        q_scale_ptr=queries.scale,
        q_weight_ptr=norms.q,
        q_weight_words_ptr=q_rows.weight_words,
        q_bias_ptr=norms.q_bias,
        q_bias_words_ptr=q_rows.bias_words,
        shift_ptr=queries.shift,
        counter_ptr=counters,
        k_ptr=k,
        k_words_ptr=k_rows.words,
        k_int8_ptr=keys.int8.view(torch.int64),
        k_scale_ptr=keys.scale,
        k_weight_ptr=norms.k,
        k_weight_words_ptr=k_rows.weight_words,
        k_bias_ptr=norms.k_bias,
        k_bias_words_ptr=k_rows.bias_words,
        mean_ptr=None if mean is None else mean.view(torch.int64),
        v_ptr=v,
        v_stats_ptr=stats,
        v_out_ptr=None if values is None else values.e4m3,
        v_levels_ptr=None if values is None else values.levels,
        v_error_ptr=errors,
        **strides(q=q),
        n_q=q.shape[1],
        n_q_padded=n_q_padded,
        n_kv_padded=n_kv_padded,
        n_counters=0 if counters is None else counters.shape[1],
        chunks=chunks,
        q_blocks=q_blocks,
        kv_blocks=kv_blocks,
        factor=a.sm_scale * LOG2_E / hadamard_width(head_dim),
        shift_factor=a.sm_scale,
        ROWS=rows,
        GROUP=group,
        QMAX=QMAX[a.spec.attention],
        COUNTER_ROWS=counter_rows,
        CHUNKS=AMAX_CHUNKS,
        Q_NORM=job.q_norm,
        K_NORM=job.k_norm,
        Q_WORDS=q_rows.words is not None,
        K_WORDS=k_rows.words is not None,
        SUBTRACT=smooth,
        SHIFT=queries.shift is not None,
        COUNTERS=counters is not None,
        num_warps=warps,
        **common,
    )
