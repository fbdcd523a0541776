"""Keys as int8, a scale per block of tokens, with their mean taken out."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from turbo_rcm_patch.kernels.heads import (
    head_tile,
    kv_limit,
    load_mean,
    places,
    read_channels,
    rotary_tables,
    row_rms,
    spread,
    store_int8,
)
from turbo_rcm_patch.kernels.launch import launch, pad_head, scale_block, target_of, tile_for
from turbo_rcm_patch.kernels.prologue import PADDED_TO, heads_a_program, row_arguments

__all__ = ["KeyBlocks", "quantize_keys", "quantize_keys_kernel"]


@triton.jit
def quantize_keys_kernel(
    x_ptr, words_ptr, int8_ptr, scale_ptr, weight_ptr, weight_words_ptr, cos_ptr, sin_ptr,
    mean_ptr, lengths_ptr,
    stride_b, stride_n, n_tokens, n_padded, n_scales, heads, eps,
    CHANNELS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_C: tl.constexpr, GROUP: tl.constexpr, QMAX: tl.constexpr,
    NORM: tl.constexpr, ROPE: tl.constexpr, WORDS: tl.constexpr,
    HAS_LENGTHS: tl.constexpr, SUBTRACT: tl.constexpr,
):  # fmt: skip
    """int8 k and its scales, after norm, rotary embedding, smoothing and `spread`.

    Grid: (blocks of ROWS tokens, groups of GROUP heads, batch).
    x [B, N, H*D], words the same as int64 (WORDS); int8 [B, H, n_padded, HEAD_PAD] as int64, 0
    for keys that are not seen; scale [B, H, n_scales] fp32; weight [H*D] or [D]; cos, sin [N, D];
    mean [B, H, HEAD_PAD], subtracted (SUBTRACT).
    """
    block, group, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    limit = kv_limit(lengths_ptr, b, n_tokens, HAS_LENGTHS)
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
            here, first, mask, room, rms, h, weight_ptr, weight_words_ptr, cos, sin, eps,
            x_ptr.dtype.element_ty,
            HEAD_DIM, HEAD_PAD, ROWS, NORM, ROPE, WORDS,
        )  # fmt: skip
        if SUBTRACT:
            mean = load_mean(mean_ptr, bh, first, mask, ROWS, HEAD_PAD)
            x = tl.where(mask_t[:, None], x - mean, 0.0)
        x = spread(x, ROWS, HEAD_PAD)
        amax = tl.max(tl.abs(x))
        total = tl.sum(x)
        amax = tl.where(amax > 0, amax, 1.0)
        inverse = tl.div_rn(QMAX * 1.0, amax)
        # A maximum drops NaN, a sum keeps it: a NaN in x becomes a NaN scale, not a zero.
        tl.store(scale_ptr + bh * n_scales + block, tl.where(total == total, amax / QMAX, total))
        out = int8_ptr + ((bh * n_padded + tokens) * HEAD_PAD + first) // 8
        store_int8(out, x * inverse, tokens < n_padded, ROWS, HEAD_PAD)


class KeyBlocks(NamedTuple):
    """int8 [B, H, n_padded, HEAD_PAD] and scale [B, H, n_padded / scale_block(D)]."""

    int8: torch.Tensor
    scale: torch.Tensor


def quantize_keys(
    k: torch.Tensor,
    heads: int,
    *,
    weight: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    eps: float,
    qmax: int,
    mean: torch.Tensor | None,
    lengths: torch.Tensor | None,
) -> KeyBlocks:
    """k [B, Nk, H*D], dense rows, as int8; keys that are not seen are 0."""
    batch, n_tokens, channels = k.shape
    head_pad, keys_a_scale = pad_head(channels // heads), scale_block(channels // heads)
    tile = tile_for("quantize", f"block_{head_pad}", target_of(k.device))
    n_padded = triton.cdiv(n_tokens, PADDED_TO) * PADDED_TO
    blocks = n_padded // keys_a_scale
    int8 = torch.empty(batch, heads, n_padded, head_pad, dtype=torch.int8, device=k.device)
    scale = torch.empty(batch, heads, blocks, dtype=torch.float32, device=k.device)
    group = heads_a_program(heads, blocks * batch)
    launch(
        quantize_keys_kernel,
        (blocks, triton.cdiv(heads, group), batch),
        k.device,
        int8_ptr=int8.view(torch.int64),
        scale_ptr=scale,
        mean_ptr=mean,
        lengths_ptr=lengths,
        n_padded=n_padded,
        n_scales=blocks,
        ROWS=keys_a_scale,
        GROUP=group,
        QMAX=qmax,
        HAS_LENGTHS=lengths is not None,
        SUBTRACT=mean is not None,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **row_arguments(k, heads, weight=weight, cos=cos, sin=sin, eps=eps, block_c=tile.block_n),
    )
    return KeyBlocks(int8, scale)
