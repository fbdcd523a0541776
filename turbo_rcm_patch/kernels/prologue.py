"""What the prologues of q, k and v share, and the mean that smooths k.

Before the attention kernel: `sample_mean_kernel` averages k over a sample of tokens (any constant
smooths exactly), then `queries` and `keys` normalise, rotate, spread and quantise, in one pass
over memory each: a program takes a block of tokens, sums the squares of their rows where the norm
spans all heads, then takes head by head while the rows are in cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from turbo_rcm_patch.kernels.heads import (
    GROUP_CHANNELS,
    head_tile,
    kv_limit,
    places,
    read_channels,
    rotary_tables,
    row_rms,
)
from turbo_rcm_patch.kernels.launch import launch, pad_head

__all__ = [
    "PADDED_TO",
    "heads_a_program",
    "row_arguments",
    "sample_mean",
    "sample_mean_kernel",
]

PADDED_TO = 128  # tokens are padded to a multiple of this
MEAN_SAMPLES = 256
NO_NORM, NORM_ACROSS, NORM_PER_HEAD = 0, 1, 2


@triton.jit
def sample_mean_kernel(
    x_ptr, words_ptr, mean_ptr, weight_ptr, weight_words_ptr, cos_ptr, sin_ptr, lengths_ptr,
    stride_b, stride_n, n_tokens, step, heads, eps,
    CHANNELS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, SAMPLES: tl.constexpr,
    NORM: tl.constexpr, ROPE: tl.constexpr, WORDS: tl.constexpr, HAS_LENGTHS: tl.constexpr,
):  # fmt: skip
    """Mean of x, normalised and rotated, over tokens 0, step, 2 * step, ...

    Grid: (heads, batch).
    x [B, N, H*D], words the same as int64 (WORDS); mean [B, H, HEAD_PAD] fp32; weight [H*D] or
    [D]; cos, sin [N, D]; lengths [B].
    """
    h, b = tl.program_id(0), tl.program_id(1)
    limit = kv_limit(lengths_ptr, b, n_tokens, HAS_LENGTHS)
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
            x, first, mask, room, rms, h, weight_ptr, weight_words_ptr, cos, sin, eps,
            x_ptr.dtype.element_ty,
            HEAD_DIM, HEAD_PAD, BLOCK_T, NORM, ROPE, WORDS,
        )  # fmt: skip
        total += tl.sum(x, axis=0)
    count = tl.maximum(1, (limit + step - 1) // step)
    tl.store(mean_ptr + (b * heads + h) * HEAD_PAD + tl.arange(0, HEAD_PAD), total / count)


def _as_words(x: torch.Tensor) -> torch.Tensor | None:
    """x as int64, four of its 16-bit elements to each, where its layout allows it."""
    strides = (*x.stride()[:-1], x.storage_offset(), x.shape[-1])
    if x.element_size() != 2 or any(stride % 4 for stride in strides):
        return None
    return x.view(torch.int64)


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
    head_dim = channels // heads
    norm = NO_NORM
    if weight is not None:
        norm = NORM_ACROSS if weight.numel() == channels else NORM_PER_HEAD
        weight = weight.contiguous()
    words, weight_words = _as_words(x), None if weight is None else _as_words(weight)
    by_words = words is not None and head_dim % 4 == 0
    by_words = by_words and (weight is None or weight_words is not None)
    return {
        "x_ptr": x,
        "words_ptr": words if by_words else None,
        "weight_ptr": weight,
        "weight_words_ptr": weight_words if by_words else None,
        "cos_ptr": None if cos is None else cos.contiguous(),
        "sin_ptr": None if sin is None else sin.contiguous(),
        "stride_b": x.stride(0),
        "stride_n": x.stride(1),
        "n_tokens": n_tokens,
        "heads": heads,
        "eps": eps,
        "CHANNELS": channels,
        "HEAD_DIM": head_dim,
        "HEAD_PAD": pad_head(head_dim),
        "BLOCK_C": min(block_c, triton.next_power_of_2(channels)),
        "NORM": norm,
        "ROPE": cos is not None,
        "WORDS": by_words,
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
) -> torch.Tensor:
    """Mean over at most `MEAN_SAMPLES` evenly spaced tokens of k [B, N, H*D]: [B, H, HEAD_PAD]
    fp32."""
    batch, n_tokens, channels = k.shape
    head_pad = pad_head(channels // heads)
    step = triton.cdiv(n_tokens, MEAN_SAMPLES)
    samples = triton.cdiv(n_tokens, step)
    warps = 16
    block_t = warps * 32 * GROUP_CHANNELS // head_pad
    mean = torch.empty(batch, heads, head_pad, dtype=torch.float32, device=k.device)
    launch(
        sample_mean_kernel,
        (heads, batch),
        k.device,
        mean_ptr=mean,
        lengths_ptr=lengths,
        step=step,
        BLOCK_T=block_t,
        SAMPLES=triton.cdiv(samples, block_t) * block_t,
        HAS_LENGTHS=lengths is not None,
        num_warps=warps,
        num_stages=1,
        **row_arguments(k, heads, weight=weight, cos=cos, sin=sin, eps=eps, block_c=256),
    )
    return mean
