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
from turbo_rcm_patch.ops.formats import QMAX, Prologue, QuantizedRows, scale_block
from turbo_rcm_patch.ops.launch import (
    AMAX_CHUNKS,
    LENGTHS,
    cdiv,
    launch,
    pad_head,
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


class Rows(NamedTuple):
    """q or k [B, N, H*D] with weight and bias of its norm, as a kernel reads them.

    Attributes:
        ptr: The rows.
        weight_ptr: [H*D], or [D] per head, or None.
        bias_ptr: [D] or None.
        words_ptr: The rows as int64, four 16-bit channels each, or None if any of the three cannot
            be read so.
        weight_words_ptr: The weight as int64.
        bias_words_ptr: The bias as int64.
        strides: Strides of batch and tokens of the rows.
    """

    ptr: torch.Tensor
    weight_ptr: torch.Tensor | None
    bias_ptr: torch.Tensor | None
    words_ptr: torch.Tensor | None
    weight_words_ptr: torch.Tensor | None
    bias_words_ptr: torch.Tensor | None
    strides: tuple[int, int]


class Shape(NamedTuple):
    """Channels of all heads, of one head, of one in a kernel, and the tiles of a program.

    Attributes:
        CHANNELS: H*D.
        HEAD_DIM: D.
        HEAD_PAD: D up to a power of two.
        BLOCK_T: Tokens of a program.
        BLOCK_C: Channels that a norm across all heads reads at a time.
    """

    CHANNELS: int
    HEAD_DIM: int
    HEAD_PAD: int
    BLOCK_T: int
    BLOCK_C: int


class Options(NamedTuple):
    """What a prologue is compiled for.

    Attributes:
        GROUP: Heads of a program.
        QMAX: Largest magnitude of quantised q and k.
        Q_NORM: Kind of the norm of q, see `formats.norm_kind`.
        K_NORM: Kind of the norm of k.
        COUNTER_ROWS: Rows of q that share a counter.
        CHUNKS: Most partial maxima of a channel of v.
    """

    GROUP: int
    QMAX: int
    Q_NORM: int
    K_NORM: int
    COUNTER_ROWS: int
    CHUNKS: int = AMAX_CHUNKS


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
    x, first, mask, n_left, rms, h, rows, cos, sin, eps,
    HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, BLOCK_T: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Normalise and rotate one head: [BLOCK_T, HEAD_PAD] fp32, 0 where masked.

    x: the head as `read_channels` loaded it; rms [BLOCK_T] (NORM 1); cos, sin as of
    `rotary_tables`, or None. NORM as in `formats.norm_kind`.
    """
    WORDS: tl.constexpr = rows.words_ptr is not None
    x = unpack_channels(x, rows.ptr.dtype.element_ty, BLOCK_T, HEAD_PAD, WORDS)
    if NORM == 3:  # layer norm
        x = x - (tl.sum(x, axis=1) / HEAD_DIM)[:, None]
        if HEAD_DIM != HEAD_PAD:
            x = tl.where((tl.arange(0, HEAD_PAD) < HEAD_DIM)[None, :], x, 0.0)
    if NORM >= 2:  # per head
        rms = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / HEAD_DIM + eps)
    if NORM != 0:
        own = first + h * HEAD_DIM if NORM == 1 else first
        padded: tl.constexpr = HEAD_DIM % 32 != 0
        w = read_channels(rows.weight_ptr, rows.weight_words_ptr, own, mask, n_left, WORDS, padded)
        kind: tl.constexpr = rows.weight_ptr.dtype.element_ty
        x = x * rms[:, None] * unpack_channels(w, kind, BLOCK_T, HEAD_PAD, WORDS)
        if NORM == 3:
            # Masked like x, so that a token past the end stays 0.
            w = read_channels(rows.bias_ptr, rows.bias_words_ptr, own, mask, n_left, WORDS, padded)
            bias_kind: tl.constexpr = rows.bias_ptr.dtype.element_ty
            x += unpack_channels(w, bias_kind, BLOCK_T, HEAD_PAD, WORDS)
    if cos is not None:
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
def kv_limit(lengths_ptr, b, n_tokens):
    """Return the number of keys that batch entry b sees."""
    limit = n_tokens
    if lengths_ptr is not None:
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
    chunk, h, b, limit, v, chunk_tokens, chunks, heads,
    HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Store the largest magnitude of each channel of a head of v over a chunk of tokens.

    v: `ValueRows`.
    """
    offs_d = tl.arange(0, HEAD_PAD)
    base = v.ptr + b.to(tl.int64) * v.strides[0] + h * HEAD_DIM
    amax = tl.zeros([BLOCK_T, HEAD_PAD], tl.float32)
    for start in range(0, chunk_tokens, BLOCK_T):
        offs_t = chunk * chunk_tokens + start + tl.arange(0, BLOCK_T)
        x = tl.load(
            base + offs_t.to(tl.int64)[:, None] * v.strides[1] + offs_d[None, :],
            mask=(offs_t < limit)[:, None] & (offs_d < HEAD_DIM)[None, :],
            other=0.0,
        ).to(tl.float32)
        amax = tl.maximum(amax, tl.abs(x))
    bh = b.to(tl.int64) * heads + h
    row = bh * (1 + chunks) + 1 + chunk
    tl.store(v.stats_ptr + row * HEAD_PAD + offs_d, tl.max(amax, axis=0))


@triton.jit
def value_mean(
    h, b, limit, v, samples, step, chunks, heads,
    HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr,
):  # fmt: skip
    """Store the mean of each channel of a head of v over tokens 0, step, 2 * step, ... < limit.

    There are at most `samples` of these. v: `ValueRows`. The sums of errors, the last row of its
    levels, are zeroed for `value_block`.
    """
    offs_d = tl.arange(0, HEAD_PAD)
    base = v.ptr + b.to(tl.int64) * v.strides[0] + h * HEAD_DIM
    total = tl.zeros([MEAN_ROWS, HEAD_PAD], tl.float32)
    for start in range(0, samples, MEAN_ROWS):
        offs_t = (start + tl.arange(0, MEAN_ROWS)) * step
        total += tl.load(
            base + offs_t.to(tl.int64)[:, None] * v.strides[1] + offs_d[None, :],
            mask=(offs_t < limit)[:, None] & (offs_d < HEAD_DIM)[None, :],
            other=0.0,
        ).to(tl.float32)
    # Add pairwise, so that all kernels add in the same order, whatever their layouts are.
    for i in tl.static_range(5):
        total = tl.sum(tl.reshape(total, [2, MEAN_ROWS >> (i + 1), HEAD_PAD]), axis=0)
    total = tl.reshape(total, [HEAD_PAD])
    count = tl.maximum(1, (limit + step - 1) // step).to(tl.float32)
    bh = b.to(tl.int64) * heads + h
    tl.store(v.stats_ptr + bh * (1 + chunks) * HEAD_PAD + offs_d, tl.div_rn(total, count))
    tl.store(v.error_ptr + (3 * bh + 2) * HEAD_PAD + offs_d, tl.zeros([HEAD_PAD], tl.int32))


@triton.jit
def value_block(
    block, h, b, limit, v, n_padded, chunks, heads,
    HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, BLOCK_T: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Store BLOCK_T tokens of a head of v, less their mean, transposed in e4m3.

    There is one scale per channel. Tokens are permuted within groups of 32. Tokens from `limit` on
    are masked. v: `ValueRows`; the rounding errors are added to the last row of its levels.
    """
    offs_d = tl.arange(0, HEAD_PAD)
    bh = b.to(tl.int64) * heads + h
    offs_c = tl.arange(0, CHUNKS)
    stats = v.stats_ptr + bh * (1 + chunks) * HEAD_PAD + offs_d
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
        tl.store(v.levels_ptr + levels, amax / _E4M3_MAX)
        tl.store(v.levels_ptr + levels + HEAD_PAD, mean)
    # Position (h, t, f, e) of a group of 32 holds token (h, f, t, e), sizes (2, 4, 2, 2): with
    # keys in this order the accumulator of q k^T is, register by register, the operand of p v.
    p = tl.arange(0, BLOCK_T)
    token = (p & ~31) + (p & 16) + ((p >> 1) & 1) * 8 + ((p >> 2) & 3) * 2 + (p & 1)
    offs_t = block * BLOCK_T + token
    mask = (offs_t < limit)[:, None] & (offs_d < HEAD_DIM)[None, :]
    x = tl.load(
        v.ptr + b.to(tl.int64) * v.strides[0] + offs_t.to(tl.int64)[:, None] * v.strides[1]
        + (h * HEAD_DIM + offs_d)[None, :],
        mask=mask,
        other=0.0,
    ).to(tl.float32)  # fmt: skip
    inverse = tl.div_rn(tl.full([HEAD_PAD], _E4M3_MAX, tl.float32), amax)
    x = tl.where(mask, (x - mean[None, :]) * inverse[None, :], 0.0)
    y = x.to(tl.float8e4nv)
    tl.store(
        v.out_ptr + (bh * HEAD_PAD + offs_d[:, None]) * n_padded + block * BLOCK_T + p[None, :],
        tl.trans(y),
    )
    error = (x - y.to(tl.float32)) * _ERROR_STEPS
    error = (error + _ROUNDER).to(tl.int32, bitcast=True) - _ROUNDER_BITS
    # The errors are integers, so their sum does not depend on the order.
    tl.atomic_add(v.error_ptr + levels + 2 * HEAD_PAD, tl.sum(error, axis=0), sem="relaxed")


@triton.jit
def sample_mean(
    h, b, limit, rows, mean_ptr, rotary, samples, step, heads, eps,
    SHAPE: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Store the mean of a normalised, rotated head of `rows` over tokens 0, step, ... < limit.

    There are at most `samples` of these. mean [B, H, HEAD_PAD] fp32; rotary: cos, sin [N, D], or
    None.
    """
    HEAD_DIM: tl.constexpr = SHAPE.HEAD_DIM
    HEAD_PAD: tl.constexpr = SHAPE.HEAD_PAD
    BLOCK_T: tl.constexpr = SHAPE.BLOCK_T
    WORDS: tl.constexpr = rows.words_ptr is not None
    total = tl.zeros([HEAD_PAD], tl.float32)
    for start in range(0, samples, BLOCK_T):
        offs_t = (start + tl.arange(0, BLOCK_T)) * step
        mask_t = offs_t < limit
        rms = tl.zeros([BLOCK_T], tl.float32)
        row = b.to(tl.int64) * rows.strides[0] + offs_t.to(tl.int64) * rows.strides[1]
        if NORM == 1:
            rms = row_rms(rows.ptr + row, mask_t, eps, SHAPE.CHANNELS, BLOCK_T, SHAPE.BLOCK_C)
        tokens, first, mask, n_left = group_offsets(offs_t, mask_t, HEAD_DIM, HEAD_PAD)
        cos, sin = None, None
        if rotary is not None:
            cos, sin = rotary_tables(
                rotary[0], rotary[1], tokens, first, mask, n_left, BLOCK_T, HEAD_DIM, HEAD_PAD
            )
        offs = row[:, None] + first + h * HEAD_DIM
        x = read_channels(rows.ptr, rows.words_ptr, offs, mask, n_left, WORDS, HEAD_DIM % 32 != 0)
        x = head_tile(
            x, first, mask, n_left, rms, h, rows, cos, sin, eps, HEAD_DIM, HEAD_PAD, BLOCK_T, NORM
        )
        total += tl.sum(x, axis=0)
    count = tl.maximum(1, (limit + step - 1) // step)
    tl.store(mean_ptr + (b * heads + h) * HEAD_PAD + tl.arange(0, HEAD_PAD), total / count)


@triton.jit
def token_block(
    block, group, b, limit, rows, out, mean_ptr, rotary, n_scales, heads, factors,
    SHAPE: tl.constexpr, GROUP: tl.constexpr, QMAX: tl.constexpr,
    NORM: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Store BLOCK_T tokens of GROUP heads of k (KEYS) or q as int8 with their scales.

    Before that, norm, rotary embedding, smoothing and `hadamard` are applied. Tokens from `limit`
    on are masked. rows: `Rows`; out: `QuantizedRows`, 0 for masked keys; mean [B, H, HEAD_PAD] of
    k or None, subtracted from k, and for the shift of q, q · mean * factors.shift; rotary: cos,
    sin [N, D], or None. Scales are of blocks of k, and of rows of q, there times factors.q.
    """
    HEAD_DIM: tl.constexpr = SHAPE.HEAD_DIM
    HEAD_PAD: tl.constexpr = SHAPE.HEAD_PAD
    BLOCK_T: tl.constexpr = SHAPE.BLOCK_T
    WORDS: tl.constexpr = rows.words_ptr is not None
    offs_t = block * BLOCK_T + tl.arange(0, BLOCK_T)
    mask_t = offs_t < limit
    row = b.to(tl.int64) * rows.strides[0] + offs_t.to(tl.int64) * rows.strides[1]
    rms = tl.zeros([BLOCK_T], tl.float32)
    if NORM == 1:
        rms = row_rms(rows.ptr + row, mask_t, factors.eps, SHAPE.CHANNELS, BLOCK_T, SHAPE.BLOCK_C)
    tokens, first, mask, n_left = group_offsets(offs_t, mask_t, HEAD_DIM, HEAD_PAD)
    cos, sin = None, None
    if rotary is not None:
        cos, sin = rotary_tables(
            rotary[0], rotary[1], tokens, first, mask, n_left, BLOCK_T, HEAD_DIM, HEAD_PAD
        )
    inside = offs_t < out.n_padded
    # Load each head while the one before it is computed.
    padded: tl.constexpr = HEAD_DIM % 32 != 0
    offs = row[:, None] + first
    last = tl.minimum((group + 1) * GROUP, heads) - 1
    following = read_channels(
        rows.ptr, rows.words_ptr, offs + group * GROUP * HEAD_DIM, mask, n_left, WORDS, padded
    )
    for h in range(group * GROUP, last + 1):
        here = following
        at = offs + tl.minimum(h + 1, last) * HEAD_DIM
        following = read_channels(rows.ptr, rows.words_ptr, at, mask, n_left, WORDS, padded)
        bh = b.to(tl.int64) * heads + h
        x = head_tile(
            here, first, mask, n_left, rms, h, rows, cos, sin, factors.eps,
            HEAD_DIM, HEAD_PAD, BLOCK_T, NORM,
        )  # fmt: skip
        if KEYS and mean_ptr is not None:
            mean = load_mean(mean_ptr, bh, first, mask, BLOCK_T, HEAD_PAD)
            x = tl.where(mask_t[:, None], x - mean, 0.0)
        if out.shift_ptr is not None:
            mean = load_mean(mean_ptr, bh, first, mask, BLOCK_T, HEAD_PAD)
            shift = tl.sum(x * mean, axis=1) * factors.shift
            tl.store(out.shift_ptr + bh * out.n_padded + offs_t, shift, mask=inside)
        x = hadamard(x, BLOCK_T, HEAD_PAD)
        # A maximum drops NaN but a sum keeps it, so a NaN in x makes the scale NaN.
        if KEYS:
            amax = tl.max(tl.abs(x))
            total = tl.sum(x)
            amax = tl.where(amax > TINY, amax, 1.0)
            x *= tl.div_rn(QMAX * 1.0, amax)
            scale = tl.where(total == total, amax / QMAX, total)
            tl.store(out.scale_ptr + bh * n_scales + block, scale)
        else:
            amax = tl.max(tl.abs(x), axis=1)
            total = tl.sum(x, axis=1)
            amax = tl.where(amax > TINY, amax, 1.0)
            x *= tl.div_rn(tl.full([BLOCK_T], QMAX, tl.float32), amax)[:, None]
            scale = tl.where(total == total, amax / QMAX * factors.q, total)
            # The threads of the first channels store it; a vector would be exchanged first.
            tl.store(
                out.scale_ptr + bh * out.n_padded + tokens,
                scale[:, None] + 0.0 * first,
                mask=inside[:, None] & (first == 0),
            )
        words = out.int8_ptr + ((bh * out.n_padded + tokens) * HEAD_PAD + first) // 8
        store_int8(words, x, tokens < out.n_padded, BLOCK_T, HEAD_PAD)


@triton.jit
def zero_counters(ptr, row, n_counters, ROWS: tl.constexpr, COUNTER_ROWS: tl.constexpr):
    """Zero the counters of ROWS rows from `row` on, for the one-launch kernel."""
    counters: tl.constexpr = 1 if ROWS < COUNTER_ROWS else ROWS // COUNTER_ROWS
    counter = row // COUNTER_ROWS + tl.arange(0, counters)
    tl.store(ptr + counter, 0, mask=counter < n_counters)


@triton.jit(do_not_specialize=LENGTHS)
def statistics_kernel(
    k, v, mean_ptr, rotary, lengths_ptr, n_kv, step, chunk_tokens, chunks, heads, eps,
    SHAPE: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Store the mean of a sample of k, and the mean of a sample and maxima of v.

    Grid: (heads if k is averaged + heads * chunks + heads for fp8, batch). k: `Rows`;
    v: `ValueRows`; mean fp32 [B, H, HEAD_PAD], or None if k is not averaged; rotary: cos, sin
    [N, D], or None; lengths [B] or None.
    """
    at, b = tl.program_id(0), tl.program_id(1)
    limit = kv_limit(lengths_ptr, b, n_kv)
    means = 0
    if mean_ptr is not None:
        means = heads
        if at < means:
            sample_mean(
                at, b, limit, k, mean_ptr, rotary, tl.cdiv(n_kv, step), step, heads, eps,
                SHAPE, NORM,
            )  # fmt: skip
    if v.stats_ptr is not None:  # noqa: SIM102 (a compile-time branch)
        if at >= means:
            chunk, h = (at - means) // heads, (at - means) % heads
            if chunk < chunks:
                channel_amax(
                    chunk, h, b, limit, v, chunk_tokens, chunks, heads,
                    SHAPE.HEAD_DIM, SHAPE.HEAD_PAD, SHAPE.BLOCK_T,
                )  # fmt: skip
            else:
                value_mean(
                    h, b, limit, v, tl.cdiv(n_kv, step), step, chunks, heads,
                    SHAPE.HEAD_DIM, SHAPE.HEAD_PAD,
                )  # fmt: skip


@triton.jit(do_not_specialize=LENGTHS)
def prologue_kernel(
    q, q_out, counter_ptr, k, k_out, v, mean_ptr, rotary, lengths_ptr,
    n_q, n_kv, heads, n_counters, chunks, q_blocks, kv_blocks, factors,
    SHAPE: tl.constexpr, OPTIONS: tl.constexpr,
):  # fmt: skip
    """Store q and k as int8 and, for fp8, v as transposed e4m3.

    Grid: (blocks of BLOCK_T tokens of k, then of q, then of v; groups of GROUP heads; batch).
    counter [B, n_counters] int32 or None; lengths [B] or None; the rest as in `token_block` and
    `value_block`.
    """
    block, group, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    limit = kv_limit(lengths_ptr, b, n_kv)
    GROUP: tl.constexpr = OPTIONS.GROUP
    if block < kv_blocks:
        token_block(
            block, group, b, limit, k, k_out, mean_ptr, rotary, kv_blocks, heads, factors,
            SHAPE, GROUP, OPTIONS.QMAX, OPTIONS.K_NORM, True,
        )  # fmt: skip
    elif block < kv_blocks + q_blocks:
        block -= kv_blocks
        if counter_ptr is not None:  # noqa: SIM102 (a compile-time branch)
            if group == 0:
                zero_counters(
                    counter_ptr + b * n_counters, block * SHAPE.BLOCK_T, n_counters,
                    SHAPE.BLOCK_T, OPTIONS.COUNTER_ROWS,
                )  # fmt: skip
        token_block(
            block, group, b, n_q, q, q_out, mean_ptr, rotary, 0, heads, factors,
            SHAPE, GROUP, OPTIONS.QMAX, OPTIONS.Q_NORM, False,
        )  # fmt: skip
    elif v.stats_ptr is not None:
        for h in range(group * GROUP, tl.minimum((group + 1) * GROUP, heads)):
            value_block(
                block - kv_blocks - q_blocks, h, b, limit, v, k_out.n_padded, chunks, heads,
                SHAPE.HEAD_DIM, SHAPE.HEAD_PAD, SHAPE.BLOCK_T, OPTIONS.CHUNKS,
            )  # fmt: skip


def _rows(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, head_dim: int
) -> Rows:
    """Describe x [B, N, H*D] (dense rows), weight [H*D] or [D] or None, bias [D] or None."""
    given = (x, weight, bias)
    words = tuple(map(_as_words, given))
    readable = all(w is not None for w, one in zip(words, given, strict=True) if one is not None)
    if head_dim % 4 or not readable:
        words = (None, None, None)
    return Rows(*given, *words, x.stride()[:2])


def _heads_a_program(heads: int, programs: int) -> int:
    """Return the heads per program: all, unless that leaves a large GPU idle."""
    return max(1, min(heads, heads * programs // 512))


def run_prologue(job: Prologue) -> None:
    """Compute the operands of a job into its memory."""
    a, queries, keys, values, counters, counter_rows = job
    q, k, v, heads, head_dim, norms = a.q, a.k, a.v, a.spec.heads, a.head_dim, a.norms
    (batch, n_q, channels), n_kv, device = q.shape, k.shape[1], q.device
    fp8, smooth = values is not None, a.spec.smooth_k
    head_pad, rows = pad_head(head_dim), scale_block(head_dim)
    tile = tile_for("prologue", str(head_pad), target_of(device))
    # A thread takes 32 channels of a token, so a block of few tokens has work for few warps.
    warps = min(tile.warps, max(1, rows * head_pad // 1024))
    block_c = min(tile.block_n, 2048 * warps // rows, triton.next_power_of_2(channels))
    shape = Shape(channels, head_dim, head_pad, rows, block_c)

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(batch, heads, *shape, head_pad, dtype=torch.float32, device=device)

    mean = empty() if smooth else None
    chunk_tokens = cdiv(cdiv(n_kv, AMAX_CHUNKS), rows) * rows
    chunks = cdiv(n_kv, chunk_tokens)
    common = {
        "k": _rows(k, norms.k, norms.k_bias, head_dim),
        "v": job.value_rows(v.stride()[:2], empty(1 + chunks) if fp8 else None),
        "rotary": a.rotary,
        "lengths_ptr": a.kv_lengths,
        "n_kv": n_kv,
        "chunks": chunks,
        "heads": heads,
        "num_stages": tile.stages,
    }
    if smooth or fp8:
        launch(
            statistics_kernel,
            (heads * (smooth + (chunks + 1) * fp8), batch),
            device,
            mean_ptr=mean,
            step=job.step,
            chunk_tokens=chunk_tokens,
            eps=norms.eps,
            # With half the tokens and half the warps a thread may use twice the registers.
            SHAPE=shape._replace(BLOCK_T=max(16, rows // 2)),
            NORM=job.k_norm,
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
        q=_rows(q, norms.q, norms.q_bias, head_dim),
        q_out=QuantizedRows(
            queries.int8.view(torch.int64), queries.scale, queries.shift, n_q_padded
        ),
        counter_ptr=counters,
        k_out=QuantizedRows(keys.int8.view(torch.int64), keys.scale, None, n_kv_padded),
        mean_ptr=None if mean is None else mean.view(torch.int64),
        n_q=n_q,
        n_counters=0 if counters is None else counters.shape[1],
        q_blocks=q_blocks,
        kv_blocks=kv_blocks,
        factors=job.factors,
        SHAPE=shape,
        OPTIONS=Options(group, QMAX[a.spec.attention], job.q_norm, job.k_norm, counter_rows),
        num_warps=warps,
        **common,
    )
