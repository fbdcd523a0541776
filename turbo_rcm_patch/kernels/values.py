"""Values in e4m3: transposed, one scale per channel, keys permuted for the second product."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from turbo_rcm_patch.kernels.heads import kv_limit
from turbo_rcm_patch.kernels.launch import launch, pad_head, target_of, tile_for
from turbo_rcm_patch.kernels.prologue import PADDED_TO

__all__ = ["Values", "channel_amax_kernel", "quantize_values", "transpose_values_kernel"]

AMAX_CHUNKS = 32

_E4M3_MAX = tl.constexpr(448.0)


@triton.jit
def channel_amax_kernel(
    v_ptr, amax_ptr, lengths_ptr,
    stride_b, stride_n, n_tokens, chunk_tokens, chunks, heads,
    HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, BLOCK_T: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
):  # fmt: skip
    """Largest magnitude of each channel of v over chunks of tokens.

    Grid: (chunks, heads, batch). v [B, N, H*D]; amax [B, H, chunks, HEAD_PAD] fp32; lengths [B].
    """
    chunk, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    limit = kv_limit(lengths_ptr, b, n_tokens, HAS_LENGTHS)
    offs_d = tl.arange(0, HEAD_PAD)
    base = v_ptr + b.to(tl.int64) * stride_b + h * HEAD_DIM
    amax = tl.zeros([BLOCK_T, HEAD_PAD], tl.float32)
    for start in range(0, chunk_tokens, BLOCK_T):
        offs_t = chunk * chunk_tokens + start + tl.arange(0, BLOCK_T)
        x = tl.load(
            base + offs_t.to(tl.int64)[:, None] * stride_n + offs_d[None, :],
            mask=(offs_t < limit)[:, None] & (offs_d < HEAD_DIM)[None, :],
            other=0.0,
        ).to(tl.float32)
        amax = tl.maximum(amax, tl.abs(x))
    bh = b.to(tl.int64) * heads + h
    tl.store(amax_ptr + (bh * chunks + chunk) * HEAD_PAD + offs_d, tl.max(amax, axis=0))


@triton.jit
def transpose_values_kernel(
    v_ptr, amax_ptr, out_ptr, scale_ptr, lengths_ptr,
    stride_b, stride_n, n_tokens, n_padded, chunks, heads,
    HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, BLOCK_T: tl.constexpr, CHUNKS: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
):  # fmt: skip
    """v in e4m3, transposed, one scale per channel, tokens permuted within groups of 32.

    Grid: (blocks of BLOCK_T tokens, heads, batch).
    v [B, N, H*D]; amax [B, H, chunks, HEAD_PAD] fp32; out [B, H, HEAD_PAD, n_padded] e4m3;
    scale [B, H, HEAD_PAD] fp32; lengths [B].
    """
    block, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    limit = kv_limit(lengths_ptr, b, n_tokens, HAS_LENGTHS)
    offs_d = tl.arange(0, HEAD_PAD)
    bh = b.to(tl.int64) * heads + h
    offs_c = tl.arange(0, CHUNKS)
    partial = tl.load(
        amax_ptr + (bh * chunks + offs_c[:, None]) * HEAD_PAD + offs_d[None, :],
        mask=(offs_c < chunks)[:, None],
        other=0.0,
    )
    amax = tl.max(partial, axis=0)
    amax = tl.where(amax > 0, amax, 1.0)
    if block == 0:
        tl.store(scale_ptr + bh * HEAD_PAD + offs_d, amax / _E4M3_MAX)
    # Position (h, t, f, e) of a group of 32 holds token (h, f, t, e), sizes (2, 4, 2, 2): with
    # keys in this order the accumulator of q k^T is, register by register, the operand of p v.
    p = tl.arange(0, BLOCK_T)
    token = (p & ~31) + (p & 16) + ((p >> 1) & 1) * 8 + ((p >> 2) & 3) * 2 + (p & 1)
    offs_t = block * BLOCK_T + token
    x = tl.load(
        v_ptr + b.to(tl.int64) * stride_b + offs_t.to(tl.int64)[:, None] * stride_n
        + (h * HEAD_DIM + offs_d)[None, :],
        mask=(offs_t < limit)[:, None] & (offs_d < HEAD_DIM)[None, :],
        other=0.0,
    ).to(tl.float32)  # fmt: skip
    y = (x * tl.div_rn(tl.full([HEAD_PAD], 448.0, tl.float32), amax)[None, :]).to(tl.float8e4nv)
    tl.store(
        out_ptr + (bh * HEAD_PAD + offs_d[:, None]) * n_padded + block * BLOCK_T + p[None, :],
        tl.trans(y),
    )


class Values(NamedTuple):
    """e4m3 [B, H, HEAD_PAD, n_padded] and scale [B, H, HEAD_PAD]."""

    e4m3: torch.Tensor
    scale: torch.Tensor


def quantize_values(v: torch.Tensor, heads: int, *, lengths: torch.Tensor | None) -> Values:
    """v [B, Nk, H*D] as transposed e4m3; keys that are not seen are 0."""
    batch, n_tokens, channels = v.shape
    head_dim = channels // heads
    head_pad = pad_head(head_dim)
    n_padded = triton.cdiv(n_tokens, PADDED_TO) * PADDED_TO
    block_t = 64
    chunk_tokens = triton.cdiv(triton.cdiv(n_tokens, AMAX_CHUNKS), block_t) * block_t
    chunks = triton.cdiv(n_tokens, chunk_tokens)
    amax = torch.empty(batch, heads, chunks, head_pad, dtype=torch.float32, device=v.device)
    out = torch.empty(batch, heads, head_pad, n_padded, dtype=torch.float8_e4m3fn, device=v.device)
    scale = torch.empty(batch, heads, head_pad, dtype=torch.float32, device=v.device)
    launch(
        channel_amax_kernel,
        (chunks, heads, batch),
        v.device,
        v_ptr=v,
        amax_ptr=amax,
        lengths_ptr=lengths,
        stride_b=v.stride(0),
        stride_n=v.stride(1),
        n_tokens=n_tokens,
        chunk_tokens=chunk_tokens,
        chunks=chunks,
        heads=heads,
        HEAD_DIM=head_dim,
        HEAD_PAD=head_pad,
        BLOCK_T=block_t,
        HAS_LENGTHS=lengths is not None,
        num_warps=8,
        num_stages=2,
    )
    tile = tile_for("transpose_values", str(head_pad), target_of(v.device))
    launch(
        transpose_values_kernel,
        (n_padded // tile.block_m, heads, batch),
        v.device,
        v_ptr=v,
        amax_ptr=amax,
        out_ptr=out,
        scale_ptr=scale,
        lengths_ptr=lengths,
        stride_b=v.stride(0),
        stride_n=v.stride(1),
        n_tokens=n_tokens,
        n_padded=n_padded,
        chunks=chunks,
        heads=heads,
        HEAD_DIM=head_dim,
        HEAD_PAD=head_pad,
        BLOCK_T=tile.block_m,
        CHUNKS=AMAX_CHUNKS,
        HAS_LENGTHS=lengths is not None,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return Values(out, scale)
