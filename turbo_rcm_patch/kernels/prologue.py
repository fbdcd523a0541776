"""RMSNorm + rotary embedding + smoothing + quantisation of q and k, in nearly one pass.

Two kernels. `sample_mean_kernel` averages k over a sample of tokens (any constant smooths
exactly). `quantize_kernel` does all the rest for q or k: a program takes a block of tokens, sums
the squares of their rows where the norm spans all heads, then takes head by head while the rows
are in cache.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from turbo_rcm_patch.kernels.heads import SPREAD, head_tile, kv_limit, row_rms, signs, spread
from turbo_rcm_patch.kernels.launch import (
    dense_rows,
    launch,
    pad_head,
    scale_block,
    target_of,
    tile_for,
)

__all__ = [
    "PADDED_TO",
    "KeyBlocks",
    "Queries",
    "quantize_kernel",
    "quantize_keys",
    "quantize_queries",
    "sample_mean",
    "sample_mean_kernel",
]

LOG2_E = 1.4426950408889634
PADDED_TO = 128  # tokens are padded to a multiple of this
MEAN_SAMPLES = 256
SAMPLE_CHUNK = 16
NO_NORM, NORM_ACROSS, NORM_PER_HEAD = 0, 1, 2

_MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding it rounds to an integer, half to even


@triton.jit
def _load_mean(
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
def sample_mean_kernel(
    k_ptr, partial_ptr, weight_ptr, cos_ptr, sin_ptr, lengths_ptr,
    stride_b, stride_n, n_tokens, step, chunks, heads, eps,
    CHANNELS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
    NORM: tl.constexpr, ROPE: tl.constexpr, HAS_LENGTHS: tl.constexpr,
):  # fmt: skip
    """Partial sums of k, normalised and rotated, over tokens 0, step, 2 * step, ...

    Grid: (chunks of BLOCK_T samples, heads, batch).
    k [B, N, H*D]; partial [B, H, chunks, HEAD_PAD] fp32; weight [H*D] or [D]; cos, sin [N, D];
    lengths [B].
    """
    chunk, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    limit = kv_limit(lengths_ptr, b, n_tokens, HAS_LENGTHS)
    offs_t = (chunk * BLOCK_T + tl.arange(0, BLOCK_T)) * step
    mask_t = offs_t < limit
    rows = k_ptr + b.to(tl.int64) * stride_b + offs_t.to(tl.int64) * stride_n
    rms = tl.zeros([BLOCK_T], tl.float32)
    if NORM == 1:
        rms = row_rms(rows, mask_t, eps, CHANNELS, BLOCK_T, BLOCK_C)
    x = head_tile(
        rows, offs_t, mask_t, rms, h, weight_ptr, cos_ptr, sin_ptr, eps,
        HEAD_DIM, HEAD_PAD, BLOCK_T, NORM, ROPE,
    )  # fmt: skip
    bh = b.to(tl.int64) * heads + h
    tl.store(
        partial_ptr + (bh * chunks + chunk) * HEAD_PAD + tl.arange(0, HEAD_PAD), tl.sum(x, axis=0)
    )


@triton.jit
def quantize_kernel(
    x_ptr, int8_ptr, scale_ptr, signs_ptr, weight_ptr, cos_ptr, sin_ptr, partial_ptr, shift_ptr,
    lengths_ptr, counter_ptr,
    stride_b, stride_n, n_tokens, n_padded, n_scales, heads, n_mean, step, chunks, n_counters,
    eps, factor, shift_factor,
    CHANNELS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, GROUP: tl.constexpr, CHUNKS: tl.constexpr,
    COUNTER_ROWS: tl.constexpr, QMAX: tl.constexpr, PER_ROW: tl.constexpr,
    NORM: tl.constexpr, ROPE: tl.constexpr, HAS_LENGTHS: tl.constexpr,
    SUBTRACT: tl.constexpr, SHIFT: tl.constexpr, COUNTERS: tl.constexpr,
):  # fmt: skip
    """int8 q (a scale per row) or k (a scale per BLOCK_T tokens), after `spread`.

    Grid: (blocks of BLOCK_T tokens, groups of GROUP heads, batch).
    x [B, N, H*D]; signs [32, 32]; int8 [B, H, n_padded, HEAD_PAD]; scale [B, H, n_scales] fp32,
    times `factor`; weight [H*D] or [D]; cos, sin [N, D]; partial [B, H, chunks, HEAD_PAD] sums of
    a sample of k, subtracted from k (SUBTRACT) or multiplied with q (SHIFT: shift [B, H, n_padded]
    fp32 is q · mean * shift_factor); counter [B, n_counters] int32, zeroed for the kernel that
    counts.
    """
    block, group, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    offs_t = block * BLOCK_T + tl.arange(0, BLOCK_T)
    if COUNTERS:
        first = block * BLOCK_T // COUNTER_ROWS
        if group == 0:
            tl.store(counter_ptr + b * n_counters + first, 0, mask=first < n_counters)
    limit = kv_limit(lengths_ptr, b, n_mean, HAS_LENGTHS)
    mask_t = offs_t < n_tokens
    if SUBTRACT or PER_ROW == 0:
        mask_t = offs_t < limit
    rows = x_ptr + b.to(tl.int64) * stride_b + offs_t.to(tl.int64) * stride_n
    rms = tl.zeros([BLOCK_T], tl.float32)
    if NORM == 1:
        rms = row_rms(rows, mask_t, eps, CHANNELS, BLOCK_T, BLOCK_C)
    offs_d = tl.arange(0, HEAD_PAD)
    for h in range(group * GROUP, tl.minimum((group + 1) * GROUP, heads)):
        x = head_tile(
            rows, offs_t, mask_t, rms, h, weight_ptr, cos_ptr, sin_ptr, eps,
            HEAD_DIM, HEAD_PAD, BLOCK_T, NORM, ROPE,
        )  # fmt: skip
        bh = b.to(tl.int64) * heads + h
        if SUBTRACT:
            mean = _load_mean(partial_ptr, bh, limit, step, chunks, HEAD_PAD, CHUNKS)
            x = tl.where(mask_t[:, None], x - mean[None, :], 0.0)
        if SHIFT:
            mean = _load_mean(partial_ptr, bh, limit, step, chunks, HEAD_PAD, CHUNKS)
            shift = tl.sum(x * mean[None, :], axis=1) * shift_factor
            tl.store(shift_ptr + bh * n_padded + offs_t, shift, mask=offs_t < n_padded)
        x = spread(x, signs_ptr, BLOCK_T, HEAD_PAD)
        amax = tl.max(tl.abs(x), axis=1)
        total = tl.sum(x, axis=1)
        if PER_ROW:
            amax = tl.where(amax > 0, amax, 1.0)
            inverse = tl.div_rn(tl.full([BLOCK_T], QMAX, tl.float32), amax)
            y = (x * inverse[:, None] + _MAGIC) - _MAGIC
            # A maximum drops NaN, a sum keeps it: a NaN in x becomes a NaN scale, not a zero.
            scale = tl.where(total == total, amax / QMAX * factor, total)
            tl.store(scale_ptr + bh * n_scales + offs_t, scale, mask=offs_t < n_scales)
        else:
            amax = tl.max(amax, axis=0)
            total = tl.sum(total, axis=0)
            amax = tl.where(amax > 0, amax, 1.0)
            y = (x * tl.div_rn(QMAX * 1.0, amax) + _MAGIC) - _MAGIC
            scale = tl.where(total == total, amax / QMAX * factor, total)
            tl.store(scale_ptr + bh * n_scales + block, scale)
        tl.store(
            int8_ptr + (bh * n_padded + offs_t[:, None]) * HEAD_PAD + offs_d[None, :],
            y.to(tl.int8),
            mask=(offs_t < n_padded)[:, None],
        )


class Mean(NamedTuple):
    """Partial sums of a sample of k: [B, H, chunks, HEAD_PAD] fp32, and the sample's stride."""

    partial: torch.Tensor
    step: int
    chunks: int


class Queries(NamedTuple):
    """int8 [B, H, n_padded, HEAD_PAD], scale [B, H, n_padded], shift [B, H, n_padded] or None."""

    int8: torch.Tensor
    scale: torch.Tensor
    shift: torch.Tensor | None


class KeyBlocks(NamedTuple):
    """int8 [B, H, n_padded, HEAD_PAD] and scale [B, H, n_padded / scale_block(D)]."""

    int8: torch.Tensor
    scale: torch.Tensor


def _norm_form(weight: torch.Tensor | None, channels: int) -> int:
    if weight is None:
        return NO_NORM
    return NORM_ACROSS if weight.numel() == channels else NORM_PER_HEAD


def _table(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.contiguous()


def _group(heads: int, programs: int) -> int:
    """Heads a program takes: all, unless that leaves a large GPU idle."""
    return max(1, min(heads, heads * programs // 512))


def sample_mean(
    k: torch.Tensor,
    heads: int,
    *,
    weight: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    lengths: torch.Tensor | None,
    eps: float,
) -> Mean:
    """Partial sums over at most `MEAN_SAMPLES` evenly spaced tokens of k [B, N, H*D]."""
    batch, n_tokens, channels = k.shape
    head_pad = pad_head(channels // heads)
    step = triton.cdiv(n_tokens, MEAN_SAMPLES)
    chunks = triton.cdiv(triton.cdiv(n_tokens, step), SAMPLE_CHUNK)
    partial = torch.empty(batch, heads, chunks, head_pad, dtype=torch.float32, device=k.device)
    launch(
        sample_mean_kernel,
        (chunks, heads, batch),
        k.device,
        k_ptr=k,
        partial_ptr=partial,
        weight_ptr=weight,
        cos_ptr=_table(cos),
        sin_ptr=_table(sin),
        lengths_ptr=lengths,
        stride_b=k.stride(0),
        stride_n=k.stride(1),
        n_tokens=n_tokens,
        step=step,
        chunks=chunks,
        heads=heads,
        eps=eps,
        CHANNELS=channels,
        HEAD_DIM=channels // heads,
        HEAD_PAD=head_pad,
        BLOCK_T=SAMPLE_CHUNK,
        BLOCK_C=min(512, triton.next_power_of_2(channels)),
        NORM=_norm_form(weight, channels),
        ROPE=cos is not None,
        HAS_LENGTHS=lengths is not None,
        num_warps=4,
        num_stages=1,
    )
    return Mean(partial, step, chunks)


def _quantize(
    x, heads, *, per_row, n_padded, n_mean, mean, weight, cos, sin, lengths, eps, qmax, factor,
    shift_factor, want_shift, counters, counter_rows,
):  # fmt: skip
    batch, n_tokens, channels = x.shape
    head_pad = pad_head(channels // heads)
    target = target_of(x.device)
    tile = tile_for("quantize", f"{'row' if per_row else 'block'}_{head_pad}", target)
    block_t = tile.block_m if per_row else scale_block(channels // heads)
    n_scales = n_padded if per_row else n_padded // block_t
    int8 = torch.empty(batch, heads, n_padded, head_pad, dtype=torch.int8, device=x.device)
    scale = torch.empty(batch, heads, n_scales, dtype=torch.float32, device=x.device)
    shift = None
    if want_shift and mean is not None:
        shift = torch.empty(batch, heads, n_padded, dtype=torch.float32, device=x.device)
    blocks = triton.cdiv(n_padded, block_t)
    group = _group(heads, blocks * batch)
    launch(
        quantize_kernel,
        (blocks, triton.cdiv(heads, group), batch),
        x.device,
        x_ptr=x,
        int8_ptr=int8,
        scale_ptr=scale,
        signs_ptr=signs(x.device, target.backend),
        weight_ptr=weight,
        cos_ptr=_table(cos),
        sin_ptr=_table(sin),
        partial_ptr=None if mean is None else mean.partial,
        shift_ptr=shift,
        lengths_ptr=lengths,
        counter_ptr=counters,
        stride_b=x.stride(0),
        stride_n=x.stride(1),
        n_tokens=n_tokens,
        n_padded=n_padded,
        n_scales=n_scales,
        heads=heads,
        n_mean=n_mean,
        step=1 if mean is None else mean.step,
        chunks=1 if mean is None else mean.chunks,
        n_counters=0 if counters is None else counters.shape[1],
        eps=eps,
        factor=factor,
        shift_factor=shift_factor,
        CHANNELS=channels,
        HEAD_DIM=channels // heads,
        HEAD_PAD=head_pad,
        BLOCK_T=block_t,
        BLOCK_C=min(tile.block_n, triton.next_power_of_2(channels)),
        GROUP=group,
        CHUNKS=MEAN_SAMPLES // SAMPLE_CHUNK,
        COUNTER_ROWS=counter_rows,
        QMAX=qmax,
        PER_ROW=per_row,
        NORM=_norm_form(weight, channels),
        ROPE=cos is not None,
        HAS_LENGTHS=lengths is not None,
        SUBTRACT=mean is not None and not per_row,
        SHIFT=shift is not None,
        COUNTERS=counters is not None,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return int8, scale, shift


def quantize_queries(
    q: torch.Tensor,
    heads: int,
    *,
    weight: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    eps: float,
    qmax: int,
    sm_scale: float,
    mean: Mean | None,
    n_kv: int,
    lengths: torch.Tensor | None,
    want_shift: bool,
    counters: torch.Tensor | None = None,
    counter_rows: int = 1,
) -> Queries:
    """q [B, Nq, H*D] as int8, with sm_scale * log2(e) in its scales, and what spreading q and k
    has multiplied logits by divided out. Shift is sm_scale * q · mean."""
    n_padded = triton.cdiv(q.shape[1], PADDED_TO) * PADDED_TO
    int8, scale, shift = _quantize(
        dense_rows(q), heads, per_row=True, n_padded=n_padded, n_mean=n_kv,
        mean=mean if want_shift else None, weight=weight, cos=cos, sin=sin,
        lengths=lengths if want_shift else None, eps=eps, qmax=qmax,
        factor=sm_scale * LOG2_E / SPREAD.value, shift_factor=sm_scale,
        want_shift=want_shift, counters=counters, counter_rows=counter_rows,
    )  # fmt: skip
    return Queries(int8, scale, shift)


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
    """k [B, Nk, H*D] as int8; keys that are not seen are 0."""
    n_padded = triton.cdiv(k.shape[1], PADDED_TO) * PADDED_TO
    int8, scale, _ = _quantize(
        k, heads, per_row=False, n_padded=n_padded, n_mean=k.shape[1], mean=mean, weight=weight,
        cos=cos, sin=sin, lengths=lengths, eps=eps, qmax=qmax, factor=1.0, shift_factor=1.0,
        want_shift=False, counters=None, counter_rows=1,
    )  # fmt: skip
    return KeyBlocks(int8, scale)
