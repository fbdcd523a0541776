"""Values in e4m3: transposed, one scale per channel, keys permuted for the second product."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["LEAST_V", "channel_amax", "value_block"]

_E4M3_MAX = tl.constexpr(448.0)
#: A channel is scaled by this magnitude at least: below it the inverse of its scale overflows.
LEAST_V = tl.constexpr(2.0**-117)


@triton.jit
def channel_amax(
    chunk, h, b, limit,
    v_ptr, amax_ptr, stride_b, stride_n, chunk_tokens, chunks, heads,
    HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Largest magnitude of each channel of a head of v over a chunk of tokens.

    v [B, N, H*D]; amax [B, H, chunks, HEAD_PAD] fp32.
    """
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
def value_block(
    block, h, b, limit,
    v_ptr, amax_ptr, out_ptr, scale_ptr, stride_b, stride_n, n_padded, chunks, heads,
    HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, BLOCK_T: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """A head of v in e4m3, transposed, one scale per channel, tokens permuted within groups of 32:
    BLOCK_T tokens, of which those before `limit` are seen.

    v [B, N, H*D]; amax [B, H, chunks, HEAD_PAD] fp32; out [B, H, HEAD_PAD, n_padded] e4m3;
    scale [B, H, HEAD_PAD] fp32.
    """
    offs_d = tl.arange(0, HEAD_PAD)
    bh = b.to(tl.int64) * heads + h
    offs_c = tl.arange(0, CHUNKS)
    partial = tl.load(
        amax_ptr + (bh * chunks + offs_c[:, None]) * HEAD_PAD + offs_d[None, :],
        mask=(offs_c < chunks)[:, None],
        other=0.0,
    )
    amax = tl.max(partial, axis=0)
    amax = tl.maximum(amax, LEAST_V)
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
