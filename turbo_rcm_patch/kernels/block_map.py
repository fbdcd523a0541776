"""Which blocks of keys a block of queries attends to: pooled q and k, and the largest products."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from turbo_rcm_patch.kernels.launch import launch, pad_head

__all__ = ["largest_scores", "pool_kernel", "pool_queries", "select_kernel"]

#: Scores that a program of `select_kernel` holds.
_SCORES = 4096

_LOWEST = tl.constexpr(-2147483648)
_NO_SIGN = tl.constexpr(0x7FFFFFFF)


@triton.jit
def pool_kernel(
    pooled_ptr, x_ptr, stride_b, stride_n, n_tokens, n_blocks, heads,
    HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Mean of x over every block of tokens.

    Grid: (blocks, heads, batch). x [B, N, H*D]; pooled [B, H, n_blocks, HEAD_PAD] fp32, 0 in
    padded channels.
    """
    block, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    offs_t = block * BLOCK + tl.arange(0, BLOCK)
    offs_d = tl.arange(0, HEAD_PAD)
    x = tl.load(
        x_ptr + b.to(tl.int64) * stride_b + offs_t.to(tl.int64)[:, None] * stride_n
        + (h * HEAD_DIM + offs_d)[None, :],
        mask=(offs_t < n_tokens)[:, None] & (offs_d < HEAD_DIM)[None, :],
        other=0.0,
    ).to(tl.float32)  # fmt: skip
    mean = tl.sum(x, axis=0) / tl.minimum(BLOCK, n_tokens - block * BLOCK)
    bh = b.to(tl.int64) * heads + h
    tl.store(pooled_ptr + (bh * n_blocks + block) * HEAD_PAD + offs_d, mean)


def pool_queries(q: torch.Tensor, *, heads: int, block: int) -> torch.Tensor:
    """Means of blocks of q [B, N, H*D] with contiguous channels: [B, H, blocks, HEAD_PAD] fp32."""
    batch, n_tokens, channels = q.shape
    head_dim = channels // heads
    head_pad, blocks = pad_head(head_dim), triton.cdiv(n_tokens, block)
    pooled = torch.empty(batch, heads, blocks, head_pad, dtype=torch.float32, device=q.device)
    launch(
        pool_kernel,
        (blocks, heads, batch),
        q.device,
        pooled_ptr=pooled,
        x_ptr=q,
        stride_b=q.stride(0),
        stride_n=q.stride(1),
        n_tokens=n_tokens,
        n_blocks=blocks,
        heads=heads,
        HEAD_DIM=head_dim,
        HEAD_PAD=head_pad,
        BLOCK=block,
        num_warps=4,
        num_stages=1,
    )
    return pooled


@triton.jit
def select_kernel(
    lut_ptr, scores_ptr, rows, columns, count,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The columns of the `count` largest scores of each row, ascending; of equals the first.

    Grid: (blocks of ROWS rows). scores [rows, columns] fp32; lut [rows, count] int32. A NaN is
    the largest, so that it is seen. The count-th largest is found bit by bit, from the integers
    whose order is that of the scores: no sorting, and the same in every run.
    """
    offs_r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    offs_c = tl.arange(0, COLUMNS)
    inside = (offs_r < rows)[:, None] & (offs_c < columns)[None, :]
    row = offs_r.to(tl.int64)[:, None]
    # -0 + 0 is 0: both zeros are equal.
    scores = tl.load(scores_ptr + row * columns + offs_c[None, :], mask=inside, other=0.0) + 0.0
    bits = scores.to(tl.int32, bitcast=True)
    rank = tl.where(bits < 0, bits ^ _NO_SIGN, bits)
    rank = tl.where(scores == scores, rank, _NO_SIGN)
    rank = tl.where(inside, rank, _LOWEST)
    # The largest integer that `count` of a row reach, counted from the lowest.
    least = tl.zeros([ROWS], tl.int32)
    for i in range(32):
        trial = least | (tl.full([ROWS], 1, tl.int32) << (31 - i))
        reached = tl.sum((rank >= (trial ^ _LOWEST)[:, None]).to(tl.int32), axis=1)
        least = tl.where(reached >= count, trial, least)
    least = (least ^ _LOWEST)[:, None]
    above = rank > least
    room = count - tl.sum(above.to(tl.int32), axis=1)[:, None]
    equal = rank == least
    first = equal & (tl.cumsum(equal.to(tl.int32), axis=1) <= room)
    chosen = (above | first) & inside
    place = tl.cumsum(chosen.to(tl.int32), axis=1) - 1
    columns_of = tl.zeros([ROWS, COLUMNS], tl.int32) + offs_c[None, :]
    tl.store(lut_ptr + row * count + place, columns_of, mask=chosen)


def largest_scores(pooled_q: torch.Tensor, pooled_k: torch.Tensor, count: int) -> torch.Tensor:
    """int32 [B, H, q_blocks, count], ascending: the blocks of keys each block of queries sees.

    pooled_q [B, H, q_blocks, HEAD_PAD] fp32, pooled_k [B, H, k_blocks, HEAD_PAD] fp32.
    """
    # A shift of all keys moves a row's scores alike; without it they have their digits left.
    pooled_k = pooled_k - pooled_k.mean(2, keepdim=True)
    scores = torch.matmul(pooled_q, pooled_k.transpose(-1, -2))
    batch, heads, q_blocks, k_blocks = scores.shape
    lut = torch.empty(batch, heads, q_blocks, count, dtype=torch.int32, device=scores.device)
    columns = max(16, triton.next_power_of_2(k_blocks))
    per_program = max(1, _SCORES // columns)
    rows = batch * heads * q_blocks
    launch(
        select_kernel,
        (triton.cdiv(rows, per_program),),
        scores.device,
        lut_ptr=lut,
        scores_ptr=scores,
        rows=rows,
        columns=k_blocks,
        count=count,
        ROWS=per_program,
        COLUMNS=columns,
        num_warps=4,
        num_stages=1,
    )
    return lut
