"""Keys as int8, a scale per block of tokens, with their mean taken out."""

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

__all__ = ["key_block", "sample_mean"]


@triton.jit
def sample_mean(
    h, b, limit,
    x_ptr, words_ptr, mean_ptr, weight_ptr, weight_words_ptr,
    bias_ptr, bias_words_ptr, cos_ptr, sin_ptr,
    stride_b, stride_n, step, heads, eps,
    CHANNELS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, SAMPLES: tl.constexpr,
    NORM: tl.constexpr, ROPE: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Mean of one head of x, normalised and rotated, over tokens 0, step, 2 * step, ... < limit.

    x [B, N, H*D], words the same as int64 (WORDS); mean [B, H, HEAD_PAD] fp32; weight [H*D] or
    [D]; bias [D]; cos, sin [N, D].
    """
    total = tl.zeros([HEAD_PAD], tl.float32)
    for start in range(0, SAMPLES, BLOCK_T):
        offs_t = (start + tl.arange(0, BLOCK_T)) * step
        mask_t = offs_t < limit
        rms = tl.zeros([BLOCK_T], tl.float32)
        row = b.to(tl.int64) * stride_b + offs_t.to(tl.int64) * stride_n
        if NORM == 1:
            rms = row_rms(x_ptr + row, mask_t, eps, CHANNELS, BLOCK_T, BLOCK_C)
        tokens, first, mask, room = places(offs_t, mask_t, HEAD_DIM, HEAD_PAD)
        cos, sin = None, None
        if ROPE:
            cos, sin = rotary_tables(
                cos_ptr, sin_ptr, tokens, first, mask, room, BLOCK_T, HEAD_DIM, HEAD_PAD
            )
        offs = row[:, None] + first + h * HEAD_DIM
        x = read_channels(x_ptr, words_ptr, offs, mask, room, WORDS, HEAD_DIM % 32 != 0)
        x = head_tile(
            x, first, mask, room, rms, h, weight_ptr, weight_words_ptr,
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
    stride_b, stride_n, n_padded, n_scales, heads, eps,
    CHANNELS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_C: tl.constexpr, GROUP: tl.constexpr, QMAX: tl.constexpr,
    NORM: tl.constexpr, ROPE: tl.constexpr, WORDS: tl.constexpr,
    SUBTRACT: tl.constexpr,
):  # fmt: skip
    """int8 k and its scales, after norm, rotary embedding, smoothing and `spread`: ROWS tokens of
    GROUP heads, of which those before `limit` are seen.

    x [B, N, H*D], words the same as int64 (WORDS); int8 [B, H, n_padded, HEAD_PAD] as int64, 0
    for keys that are not seen; scale [B, H, n_scales] fp32; weight [H*D] or [D]; bias [D]; cos,
    sin [N, D]; mean [B, H, HEAD_PAD], subtracted (SUBTRACT).
    """
    offs_t = block * ROWS + tl.arange(0, ROWS)
    mask_t = offs_t < limit
    row = b.to(tl.int64) * stride_b + offs_t.to(tl.int64) * stride_n
    rms = tl.zeros([ROWS], tl.float32)
    if NORM == 1:
        rms = row_rms(x_ptr + row, mask_t, eps, CHANNELS, ROWS, BLOCK_C)
    tokens, first, mask, room = places(offs_t, mask_t, HEAD_DIM, HEAD_PAD)
    cos, sin = None, None
    if ROPE:
        cos, sin = rotary_tables(
            cos_ptr, sin_ptr, tokens, first, mask, room, ROWS, HEAD_DIM, HEAD_PAD
        )
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
        bh = b.to(tl.int64) * heads + h
        x = head_tile(
            here, first, mask, room, rms, h, weight_ptr, weight_words_ptr,
            bias_ptr, bias_words_ptr, cos, sin, eps, x_ptr.dtype.element_ty,
            HEAD_DIM, HEAD_PAD, ROWS, NORM, ROPE, WORDS,
        )  # fmt: skip
        if SUBTRACT:
            mean = load_mean(mean_ptr, bh, first, mask, ROWS, HEAD_PAD)
            x = tl.where(mask_t[:, None], x - mean, 0.0)
        x = spread(x, ROWS, HEAD_PAD)
        amax = tl.max(tl.abs(x))
        total = tl.sum(x)
        amax = tl.where(amax > TINY, amax, 1.0)
        inverse = tl.div_rn(QMAX * 1.0, amax)
        # A maximum drops NaN, a sum keeps it: a NaN in x becomes a NaN scale, not a zero.
        tl.store(scale_ptr + bh * n_scales + block, tl.where(total == total, amax / QMAX, total))
        out = int8_ptr + ((bh * n_padded + tokens) * HEAD_PAD + first) // 8
        store_int8(out, x * inverse, tokens < n_padded, ROWS, HEAD_PAD)
