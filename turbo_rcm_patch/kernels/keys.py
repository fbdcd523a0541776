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
    nearest,
    row_rms,
    spread,
)
from turbo_rcm_patch.kernels.launch import launch, pad_head, scale_block, target_of, tile_for
from turbo_rcm_patch.kernels.prologue import (
    MEAN_CHUNKS,
    PADDED_TO,
    Mean,
    heads_a_program,
    row_arguments,
)

__all__ = ["KeyBlocks", "quantize_keys", "quantize_keys_kernel"]


@triton.jit
def _tile(
    rows, offs_t, mask_t, rms, h, mean, weight_ptr, cos_ptr, sin_ptr, eps,
    HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, ROWS: tl.constexpr,
    NORM: tl.constexpr, ROPE: tl.constexpr, SUBTRACT: tl.constexpr,
):  # fmt: skip
    """[ROWS, HEAD_PAD] fp32: normalised, rotated, without its mean, spread; 0 where masked."""
    x = head_tile(
        rows, offs_t, mask_t, rms, h, weight_ptr, cos_ptr, sin_ptr, eps,
        HEAD_DIM, HEAD_PAD, ROWS, NORM, ROPE,
    )  # fmt: skip
    if SUBTRACT:
        x = tl.where(mask_t[:, None], x - mean[None, :], 0.0)
    return spread(x, ROWS, HEAD_PAD)


@triton.jit
def quantize_keys_kernel(
    k_ptr, int8_ptr, scale_ptr, weight_ptr, cos_ptr, sin_ptr, partial_ptr, lengths_ptr,
    stride_b, stride_n, n_tokens, n_padded, n_scales, heads, step, chunks, eps,
    CHANNELS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr,
    ROWS: tl.constexpr, HALVES: tl.constexpr, BLOCK_C: tl.constexpr, GROUP: tl.constexpr,
    CHUNKS: tl.constexpr, QMAX: tl.constexpr,
    NORM: tl.constexpr, ROPE: tl.constexpr, HAS_LENGTHS: tl.constexpr, SUBTRACT: tl.constexpr,
):  # fmt: skip
    """int8 k and its scales, after norm, rotary embedding, smoothing and `spread`.

    Grid: (blocks of ROWS tokens, of 2 * ROWS with HALVES, groups of GROUP heads, batch).
    k [B, N, H*D]; int8 [B, H, n_padded, HEAD_PAD], 0 for keys that are not seen; scale
    [B, H, n_scales] fp32; weight [H*D] or [D]; cos, sin [N, D]; partial [B, H, chunks, HEAD_PAD]
    sums of a sample of k, whose mean is subtracted (SUBTRACT).

    HALVES: a block that does not fit into registers is taken in two. The first half is computed
    for the sake of the common scale and once more to be stored.
    """
    block, group, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    limit = kv_limit(lengths_ptr, b, n_tokens, HAS_LENGTHS)
    offs_t = block * (2 * ROWS if HALVES else ROWS) + tl.arange(0, ROWS)
    mask_t = offs_t < limit
    k_ptr += b.to(tl.int64) * stride_b
    rows = k_ptr + offs_t.to(tl.int64) * stride_n
    rms = tl.zeros([ROWS], tl.float32)
    if NORM == 1:
        rms = row_rms(rows, mask_t, eps, CHANNELS, ROWS, BLOCK_C)
    other_t, other_mask, other_rows, other_rms = offs_t, mask_t, rows, rms
    if HALVES:
        other_t = offs_t + ROWS
        other_mask = other_t < limit
        other_rows = k_ptr + other_t.to(tl.int64) * stride_n
        if NORM == 1:
            other_rms = row_rms(other_rows, other_mask, eps, CHANNELS, ROWS, BLOCK_C)
    offs_d = tl.arange(0, HEAD_PAD)
    for h in range(group * GROUP, tl.minimum((group + 1) * GROUP, heads)):
        bh = b.to(tl.int64) * heads + h
        mean = None
        if SUBTRACT:
            mean = load_mean(partial_ptr, bh, limit, step, chunks, HEAD_PAD, CHUNKS)
        x = _tile(
            rows, offs_t, mask_t, rms, h, mean, weight_ptr, cos_ptr, sin_ptr, eps,
            HEAD_DIM, HEAD_PAD, ROWS, NORM, ROPE, SUBTRACT,
        )  # fmt: skip
        amax, total = tl.max(tl.abs(x)), tl.sum(x)
        if HALVES:
            x = _tile(
                other_rows, other_t, other_mask, other_rms, h, mean, weight_ptr, cos_ptr, sin_ptr,
                eps, HEAD_DIM, HEAD_PAD, ROWS, NORM, ROPE, SUBTRACT,
            )  # fmt: skip
            amax, total = tl.maximum(amax, tl.max(tl.abs(x))), total + tl.sum(x)
        amax = tl.where(amax > 0, amax, 1.0)
        inverse = tl.div_rn(QMAX * 1.0, amax)
        # A maximum drops NaN, a sum keeps it: a NaN in x becomes a NaN scale, not a zero.
        tl.store(scale_ptr + bh * n_scales + block, tl.where(total == total, amax / QMAX, total))
        out = int8_ptr + bh * n_padded * HEAD_PAD + offs_d[None, :]
        tl.store(out + other_t[:, None] * HEAD_PAD, nearest(x * inverse))
        if HALVES:
            x = _tile(
                rows, offs_t, mask_t, rms, h, mean, weight_ptr, cos_ptr, sin_ptr, eps,
                HEAD_DIM, HEAD_PAD, ROWS, NORM, ROPE, SUBTRACT,
            )  # fmt: skip
            tl.store(out + offs_t[:, None] * HEAD_PAD, nearest(x * inverse))


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
    mean: Mean | None,
    lengths: torch.Tensor | None,
) -> KeyBlocks:
    """k [B, Nk, H*D], dense rows, as int8; keys that are not seen are 0."""
    batch, n_tokens, channels = k.shape
    head_pad, keys_a_scale = pad_head(channels // heads), scale_block(channels // heads)
    tile = tile_for("quantize", f"block_{head_pad}", target_of(k.device))
    n_padded = triton.cdiv(n_tokens, PADDED_TO) * PADDED_TO
    blocks = n_padded // keys_a_scale
    rows = min(tile.block_m, keys_a_scale)
    int8 = torch.empty(batch, heads, n_padded, head_pad, dtype=torch.int8, device=k.device)
    scale = torch.empty(batch, heads, blocks, dtype=torch.float32, device=k.device)
    group = heads_a_program(heads, blocks * batch)
    launch(
        quantize_keys_kernel,
        (blocks, triton.cdiv(heads, group), batch),
        k.device,
        k_ptr=k,
        int8_ptr=int8,
        scale_ptr=scale,
        partial_ptr=None if mean is None else mean.partial,
        lengths_ptr=lengths,
        n_padded=n_padded,
        n_scales=blocks,
        step=1 if mean is None else mean.step,
        chunks=1 if mean is None else mean.chunks,
        ROWS=rows,
        HALVES=rows < keys_a_scale,
        GROUP=group,
        CHUNKS=MEAN_CHUNKS,
        QMAX=qmax,
        HAS_LENGTHS=lengths is not None,
        SUBTRACT=mean is not None,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **row_arguments(k, heads, weight=weight, cos=cos, sin=sin, eps=eps, block_c=tile.block_n),
    )
    return KeyBlocks(int8, scale)
