"""Queries as int8, a scale per row."""

from __future__ import annotations

import triton
import triton.language as tl

from turbo_rcm_patch.kernels.heads import (
    TINY,
    head_tile,
    load_mean,
    places,
    read_channels,
    rotary_tables,
    row_rms,
    spread,
    store_int8,
)

__all__ = ["query_block"]


@triton.jit
def query_block(
    block, group, b,
    x_ptr, words_ptr, int8_ptr, scale_ptr, weight_ptr, weight_words_ptr,
    bias_ptr, bias_words_ptr, cos_ptr, sin_ptr, mean_ptr, shift_ptr, counter_ptr,
    stride_b, stride_n, n_tokens, n_padded, heads, n_counters,
    eps, factor, shift_factor,
    CHANNELS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, GROUP: tl.constexpr,
    COUNTER_ROWS: tl.constexpr, QMAX: tl.constexpr,
    NORM: tl.constexpr, ROPE: tl.constexpr, WORDS: tl.constexpr,
    SHIFT: tl.constexpr, COUNTERS: tl.constexpr,
):  # fmt: skip
    """int8 q and its scales, after norm, rotary embedding and `spread`: BLOCK_T tokens of GROUP
    heads.

    x [B, N, H*D], words the same as int64 (WORDS); int8 [B, H, n_padded, HEAD_PAD] as int64;
    scale [B, H, n_padded] fp32, times `factor`; weight [H*D] or [D]; bias [D]; cos, sin [N, D];
    mean [B, H, HEAD_PAD] of k, for shift [B, H, n_padded] fp32 = q · mean * shift_factor (SHIFT);
    counter [B, n_counters] int32, zeroed for the kernel that counts.
    """
    offs_t = block * BLOCK_T + tl.arange(0, BLOCK_T)
    if COUNTERS:
        counters: tl.constexpr = 1 if BLOCK_T < COUNTER_ROWS else BLOCK_T // COUNTER_ROWS
        counter = block * BLOCK_T // COUNTER_ROWS + tl.arange(0, counters)
        if group == 0:
            tl.store(counter_ptr + b * n_counters + counter, 0, mask=counter < n_counters)
    mask_t = offs_t < n_tokens
    row = b.to(tl.int64) * stride_b + offs_t.to(tl.int64) * stride_n
    rms = tl.zeros([BLOCK_T], tl.float32)
    if NORM == 1:
        rms = row_rms(x_ptr + row, mask_t, eps, CHANNELS, BLOCK_T, BLOCK_C)
    tokens, first, mask, room = places(offs_t, mask_t, HEAD_DIM, HEAD_PAD)
    cos, sin = None, None
    if ROPE:
        cos, sin = rotary_tables(
            cos_ptr, sin_ptr, tokens, first, mask, room, BLOCK_T, HEAD_DIM, HEAD_PAD
        )
    inside = offs_t < n_padded
    # A head is read while the one before it is computed.
    padded: tl.constexpr = HEAD_DIM % 32 != 0
    offs = row[:, None] + first
    last = tl.minimum((group + 1) * GROUP, heads) - 1
    following = read_channels(
        x_ptr, words_ptr, offs + group * GROUP * HEAD_DIM, mask, room, WORDS, padded
    )
    for h in range(group * GROUP, last + 1):
        here = following
        at = offs + tl.minimum(h + 1, last) * HEAD_DIM
        following = read_channels(x_ptr, words_ptr, at, mask, room, WORDS, padded)
        x = head_tile(
            here, first, mask, room, rms, h, weight_ptr, weight_words_ptr,
            bias_ptr, bias_words_ptr, cos, sin, eps, x_ptr.dtype.element_ty,
            HEAD_DIM, HEAD_PAD, BLOCK_T, NORM, ROPE, WORDS,
        )  # fmt: skip
        bh = b.to(tl.int64) * heads + h
        if SHIFT:
            mean = load_mean(mean_ptr, bh, first, mask, BLOCK_T, HEAD_PAD)
            shift = tl.sum(x * mean, axis=1) * shift_factor
            tl.store(shift_ptr + bh * n_padded + offs_t, shift, mask=inside)
        x = spread(x, BLOCK_T, HEAD_PAD)
        amax = tl.max(tl.abs(x), axis=1)
        total = tl.sum(x, axis=1)
        amax = tl.where(amax > TINY, amax, 1.0)
        inverse = tl.div_rn(tl.full([BLOCK_T], QMAX, tl.float32), amax)
        # A maximum drops NaN, a sum keeps it: a NaN in x becomes a NaN scale, not a zero.
        scale = tl.where(total == total, amax / QMAX * factor, total)
        # From the threads of the first channels: as a vector it would change hands first.
        tl.store(
            scale_ptr + bh * n_padded + tokens,
            scale[:, None] + 0.0 * first,
            mask=inside[:, None] & (first == 0),
        )
        out = int8_ptr + ((bh * n_padded + tokens) * HEAD_PAD + first) // 8
        store_int8(out, x * inverse[:, None], inside[:, None], BLOCK_T, HEAD_PAD)
