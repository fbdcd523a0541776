"""What the prologues of q, k and v share, and the mean that smooths k.

Before the attention kernel: `sample_mean_kernel` averages k over a sample of tokens (any constant
smooths exactly), then `queries` and `keys` normalise, rotate, spread and quantise, in one pass
over memory each: a program takes a block of tokens, sums the squares of their rows where the norm
spans all heads, then takes head by head while the rows are in cache.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from turbo_rcm_patch.kernels.heads import head_tile, kv_limit, row_rms
from turbo_rcm_patch.kernels.launch import launch, pad_head

__all__ = [
    "MEAN_CHUNKS",
    "PADDED_TO",
    "Mean",
    "heads_a_program",
    "row_arguments",
    "sample_mean",
    "sample_mean_kernel",
]

PADDED_TO = 128  # tokens are padded to a multiple of this
MEAN_SAMPLES = 256
SAMPLE_CHUNK = 16
MEAN_CHUNKS = MEAN_SAMPLES // SAMPLE_CHUNK  # at most so many partial sums
NO_NORM, NORM_ACROSS, NORM_PER_HEAD = 0, 1, 2


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


class Mean(NamedTuple):
    """Partial sums of a sample of k: [B, H, chunks, HEAD_PAD] fp32, and the sample's stride."""

    partial: torch.Tensor
    step: int
    chunks: int


def row_arguments(
    x: torch.Tensor,
    heads: int,
    *,
    weight: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    eps: float,
    block_c: int,
) -> dict[str, object]:
    """What every kernel here takes to read x [B, N, H*D], dense rows: norm, tables, sizes."""
    _, n_tokens, channels = x.shape
    norm = NO_NORM
    if weight is not None:
        norm = NORM_ACROSS if weight.numel() == channels else NORM_PER_HEAD
    return {
        "weight_ptr": weight,
        "cos_ptr": None if cos is None else cos.contiguous(),
        "sin_ptr": None if sin is None else sin.contiguous(),
        "stride_b": x.stride(0),
        "stride_n": x.stride(1),
        "n_tokens": n_tokens,
        "heads": heads,
        "eps": eps,
        "CHANNELS": channels,
        "HEAD_DIM": channels // heads,
        "HEAD_PAD": pad_head(channels // heads),
        "BLOCK_C": min(block_c, triton.next_power_of_2(channels)),
        "NORM": norm,
        "ROPE": cos is not None,
    }


def heads_a_program(heads: int, programs: int) -> int:
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
        lengths_ptr=lengths,
        step=step,
        chunks=chunks,
        BLOCK_T=SAMPLE_CHUNK,
        HAS_LENGTHS=lengths is not None,
        num_warps=4,
        num_stages=1,
        **row_arguments(k, heads, weight=weight, cos=cos, sin=sin, eps=eps, block_c=512),
    )
    return Mean(partial, step, chunks)
