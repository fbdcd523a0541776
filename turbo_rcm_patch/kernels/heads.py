"""Pieces of the prologues' kernels: one head of some tokens, normalised and rotated in fp32.

A thread owns 32 neighbouring channels of a token. That holds what a rotary pair needs and all or
half of what the Hadamard matrix mixes, so that little moves between threads. Triton gives threads
such a share when a tile [tokens, groups of 32 channels] is loaded once per channel (`_fan_5`), and
16-bit channels come four to a 64-bit word.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "TINY",
    "head_tile",
    "kv_limit",
    "load_mean",
    "places",
    "read_channels",
    "rotary_tables",
    "row_rms",
    "spread",
    "spread_width",
    "store_int8",
]

#: What is smaller than this everywhere is 0: the inverse of its scale would overflow.
TINY = tl.constexpr(2.0**-100)

_MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding it rounds to an integer, half to even


# `_fan_3`, `_fan_4` and `_fan_5` read 8, 16 and 32 values: ptr[START], ptr[START + STEP], and so
# on. Each is a tile [T, G], and they become new dimensions of two. ptr and mask: [T, G]. With
# PADDED, values from `room` [T, G] on are 0. A single function would have to call itself, which
# Triton 3.4 cannot compile.


@triton.jit
def _fan_0(ptr, mask, room, START: tl.constexpr, STEP: tl.constexpr, PADDED: tl.constexpr):
    if PADDED:
        x = tl.load(ptr + START, mask=mask & (room > START), other=0)
    else:
        x = tl.load(ptr + START, mask=mask, other=0)
    return x


@triton.jit
def _fan_1(ptr, mask, room, START: tl.constexpr, STEP: tl.constexpr, PADDED: tl.constexpr):
    even = _fan_0(ptr, mask, room, START, 2 * STEP, PADDED)
    odd = _fan_0(ptr, mask, room, START + STEP, 2 * STEP, PADDED)
    return tl.join(even, odd)


@triton.jit
def _fan_2(ptr, mask, room, START: tl.constexpr, STEP: tl.constexpr, PADDED: tl.constexpr):
    even = _fan_1(ptr, mask, room, START, 2 * STEP, PADDED)
    odd = _fan_1(ptr, mask, room, START + STEP, 2 * STEP, PADDED)
    return tl.join(even, odd)


@triton.jit
def _fan_3(ptr, mask, room, START: tl.constexpr, STEP: tl.constexpr, PADDED: tl.constexpr):
    even = _fan_2(ptr, mask, room, START, 2 * STEP, PADDED)
    odd = _fan_2(ptr, mask, room, START + STEP, 2 * STEP, PADDED)
    return tl.join(even, odd)


@triton.jit
def _fan_4(ptr, mask, room, START: tl.constexpr, STEP: tl.constexpr, PADDED: tl.constexpr):
    even = _fan_3(ptr, mask, room, START, 2 * STEP, PADDED)
    odd = _fan_3(ptr, mask, room, START + STEP, 2 * STEP, PADDED)
    return tl.join(even, odd)


@triton.jit
def _fan_5(ptr, mask, room, START: tl.constexpr, STEP: tl.constexpr, PADDED: tl.constexpr):
    even = _fan_4(ptr, mask, room, START, 2 * STEP, PADDED)
    odd = _fan_4(ptr, mask, room, START + STEP, 2 * STEP, PADDED)
    return tl.join(even, odd)


@triton.jit
def _unpack(words, SHIFT: tl.constexpr, DTYPE: tl.constexpr):
    return (words >> SHIFT).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def read_channels(
    ptr, words_ptr, offs, mask, room, WORDS: tl.constexpr, PADDED: tl.constexpr
):  # fmt: skip
    """32 channels from ptr + offs [T, G] on, as they lie in memory; words_ptr is the same memory
    as int64 (WORDS: 16-bit channels, everything divisible by 4). For `unpack_channels`: in
    between, what was read takes half the registers and need not have arrived."""
    if WORDS:
        x = _fan_3(words_ptr + (offs >> 2), mask, room >> 2, 0, 1, PADDED)
    else:
        x = _fan_5(ptr + offs, mask, room, 0, 1, PADDED)
    return x


@triton.jit
def unpack_channels(
    x, dtype: tl.constexpr, BLOCK_T: tl.constexpr, HEAD_PAD: tl.constexpr, WORDS: tl.constexpr
):
    """[BLOCK_T, HEAD_PAD] fp32 of what `read_channels` read of elements of `dtype`."""
    if WORDS:
        even = tl.join(_unpack(x, 0, dtype), _unpack(x, 32, dtype))
        odd = tl.join(_unpack(x, 16, dtype), _unpack(x, 48, dtype))
        x = tl.join(even, odd)
    return tl.reshape(x.to(tl.float32), [BLOCK_T, HEAD_PAD])


@triton.jit
def places(offs_t, mask_t, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr):
    """Tokens, first channels, mask and channels left, each [T, G]."""
    channel = tl.arange(0, HEAD_PAD // 32)[None, :] * 32
    tokens = offs_t[:, None] + 0 * channel
    first = 0 * offs_t[:, None] + channel
    return tokens, first, mask_t[:, None] & (first < HEAD_DIM), HEAD_DIM - first


@triton.jit
def rotary_tables(
    cos_ptr, sin_ptr, tokens, first, mask, room,
    BLOCK_T: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr,
):  # fmt: skip
    """cos of even and sin of odd channels, [BLOCK_T, HEAD_PAD / 2] fp32 each."""
    offs = tokens * HEAD_DIM + first
    padded: tl.constexpr = HEAD_DIM % 32 != 0
    cos = _fan_4(cos_ptr + offs, mask, room, 0, 2, padded).to(tl.float32)
    sin = _fan_4(sin_ptr + offs, mask, room, 1, 2, padded).to(tl.float32)
    cos = tl.reshape(cos, [BLOCK_T, HEAD_PAD // 2])
    return cos, tl.reshape(sin, [BLOCK_T, HEAD_PAD // 2])


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
    x, first, mask, room, rms, h, weight_ptr, weight_words_ptr, bias_ptr, bias_words_ptr,
    cos, sin, eps, dtype: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, BLOCK_T: tl.constexpr,
    NORM: tl.constexpr, ROPE: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """[BLOCK_T, HEAD_PAD] fp32: one head, normalised and rotated; 0 where masked.

    x: what `read_channels` read of the head; rms [BLOCK_T] (NORM 1). NORM as in `operands`.
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
        w = read_channels(weight_ptr, weight_words_ptr, own, mask, room, WORDS, padded)
        kind: tl.constexpr = weight_ptr.dtype.element_ty
        x = x * rms[:, None] * unpack_channels(w, kind, BLOCK_T, HEAD_PAD, WORDS)
        if NORM == 3:
            # Masked like x: a token that is not there has no bias either.
            w = read_channels(bias_ptr, bias_words_ptr, own, mask, room, WORDS, padded)
            bias_kind: tl.constexpr = bias_ptr.dtype.element_ty
            x += unpack_channels(w, bias_kind, BLOCK_T, HEAD_PAD, WORDS)
    if ROPE:
        even, odd = tl.split(tl.reshape(x, [BLOCK_T, HEAD_PAD // 2, 2]))
        x = tl.join(even * cos - odd * sin, even * sin + odd * cos)
        x = tl.reshape(x, [BLOCK_T, HEAD_PAD])
    return x


def spread_width(head_pad: int) -> int:
    """Channels that `spread` mixes: the whole head up to 64, else 32, which a thread has."""
    return head_pad if head_pad <= 64 else 32


@triton.jit
def spread(x, BLOCK_T: tl.constexpr, HEAD_PAD: tl.constexpr):
    """Every `spread_width` channels of x [BLOCK_T, HEAD_PAD] fp32 times a Hadamard matrix, not
    normalised.

    Done to both q and k it leaves their products alone but for a factor, and spreads what single
    channels stick out by over the others, so that the int8 steps get finer (as in
    FlashAttention-3, arXiv 2407.08608). Sums and differences, a stage per bit of the channel's
    number: five within a thread, a sixth with its neighbour.
    """
    x = tl.reshape(x, [BLOCK_T, HEAD_PAD // 32, 2, 2, 2, 2, 2])
    for _ in tl.static_range(5):
        one, other = tl.split(x)
        x = tl.permute(tl.join(one + other, one - other), [0, 1, 6, 2, 3, 4, 5])
    if HEAD_PAD == 64:
        # A thread gets the sum from its neighbour; the difference is that less twice its own.
        x = tl.reshape(x, [BLOCK_T, 2, 32])
        total = tl.sum(x, axis=1)[:, None, :]
        second = tl.arange(0, 2)[None, :, None] == 1
        x = tl.where(second, total - 2.0 * x, total + 0.0 * x)
    return tl.reshape(x, [BLOCK_T, HEAD_PAD])


@triton.jit
def store_int8(words_ptr, x, mask, BLOCK_T: tl.constexpr, HEAD_PAD: tl.constexpr):
    """x [BLOCK_T, HEAD_PAD] fp32, |x| <= 127, rounded half to even, as int8.

    words_ptr: [T, G] pointers to the first of each group's four int64.
    """
    x = (x + _MAGIC).to(tl.int32, bitcast=True) & 0xFF
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
    """Keys that batch entry b sees."""
    limit = n_tokens
    if HAS_LENGTHS:
        limit = tl.maximum(0, tl.minimum(tl.load(lengths_ptr + b), n_tokens)).to(tl.int32)
    return limit


@triton.jit
def load_mean(mean_words_ptr, bh, first, mask, BLOCK_T: tl.constexpr, HEAD_PAD: tl.constexpr):
    """The mean of k, [BLOCK_T, HEAD_PAD] fp32 with equal rows; mean: [B, H, HEAD_PAD] fp32, read
    as int64."""
    words = _fan_4(mean_words_ptr + (bh * HEAD_PAD + first) // 2, mask, first, 0, 1, False)
    low = words.to(tl.int32).to(tl.float32, bitcast=True)
    high = (words >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    return tl.reshape(tl.join(low, high), [BLOCK_T, HEAD_PAD])
