"""Which blocks of keys a block of queries attends to: pooled q and k, and the largest products."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from turbo_rcm_patch.kernels.launch import launch, pad_head

__all__ = ["block_scores", "largest_scores", "pool_kernel", "select_kernel"]

#: Scores that a program of `select_kernel` holds.
_SCORES = 4096

_LOWEST = tl.constexpr(-2147483648)
_NO_SIGN = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _block(rows, block, n_tokens, stride_n, mask_d, BLOCK: tl.constexpr):
    """A block of tokens [BLOCK, HEAD_PAD] fp32, its mask [BLOCK, 1] and how many they are."""
    offs_t = block * BLOCK + tl.arange(0, BLOCK)
    mask_t = (offs_t < n_tokens)[:, None]
    x = tl.load(
        rows + offs_t.to(tl.int64)[:, None] * stride_n, mask=mask_t & mask_d, other=0.0
    ).to(tl.float32)
    return x, mask_t, tl.minimum(BLOCK, n_tokens - block * BLOCK)


@triton.jit
def pool_kernel(
    q_pooled_ptr, k_pooled_ptr, q_ptr, k_ptr, k_mean_ptr,
    q_stride_b, q_stride_n, k_stride_b, k_stride_n, n_q, n_kv, q_blocks, k_blocks, heads,
    HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Means of blocks of q, and of k less its mean over all tokens.

    Grid: (blocks of q, then of k; heads; batch). q [B, Nq, H*D], k [B, Nk, H*D], k_mean
    [B, H, HEAD_PAD]; q_pooled [B, H, q_blocks, HEAD_PAD], k_pooled likewise, 0 in padded channels;
    all of one dtype, to which k is rounded again without its mean.
    """
    block, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    bh = b.to(tl.int64) * heads + h
    offs_d = tl.arange(0, HEAD_PAD)
    mask_d = (offs_d < HEAD_DIM)[None, :]
    offs_c = (h * HEAD_DIM + offs_d)[None, :]
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    if block < q_blocks:
        rows = q_ptr + b.to(tl.int64) * q_stride_b + offs_c
        q, _, count = _block(rows, block, n_q, q_stride_n, mask_d, BLOCK_Q)
        out = q_pooled_ptr + (bh * q_blocks + block) * HEAD_PAD + offs_d
        tl.store(out, (tl.sum(q, axis=0) / count).to(dtype))
    else:
        block -= q_blocks
        rows = k_ptr + b.to(tl.int64) * k_stride_b + offs_c
        k, mask_t, count = _block(rows, block, n_kv, k_stride_n, mask_d, BLOCK_K)
        mean = tl.load(k_mean_ptr + bh * HEAD_PAD + offs_d).to(tl.float32)
        k = tl.where(mask_t, (k - mean[None, :]).to(dtype).to(tl.float32), 0.0)
        out = k_pooled_ptr + (bh * k_blocks + block) * HEAD_PAD + offs_d
        tl.store(out, (tl.sum(k, axis=0) / count).to(dtype))


def block_scores(
    q: torch.Tensor,
    k: torch.Tensor,
    k_mean: torch.Tensor,
    *,
    heads: int,
    block_q: int,
    block_k: int,
) -> torch.Tensor:
    """Products of pooled q and pooled k [B, H, q_blocks, k_blocks], in their dtype.

    q [B, Nq, H*D] and k [B, Nk, H*D] with contiguous channels, k_mean [B, H, HEAD_PAD]. Rounded at
    every step as the author's code is (thu-ml/TurboDiffusion, SLA/utils.py): among blocks whose
    scores are nearly equal the rounding chooses.
    """
    batch, n_q, channels = q.shape
    n_kv, head_dim = k.shape[1], channels // heads
    head_pad = pad_head(head_dim)
    q_blocks, k_blocks = triton.cdiv(n_q, block_q), triton.cdiv(n_kv, block_k)
    q_pooled = torch.empty(batch, heads, q_blocks, head_pad, dtype=q.dtype, device=q.device)
    k_pooled = torch.empty(batch, heads, k_blocks, head_pad, dtype=q.dtype, device=q.device)
    launch(
        pool_kernel,
        (q_blocks + k_blocks, heads, batch),
        q.device,
        q_pooled_ptr=q_pooled,
        k_pooled_ptr=k_pooled,
        q_ptr=q,
        k_ptr=k,
        k_mean_ptr=k_mean,
        q_stride_b=q.stride(0),
        q_stride_n=q.stride(1),
        k_stride_b=k.stride(0),
        k_stride_n=k.stride(1),
        n_q=n_q,
        n_kv=n_kv,
        q_blocks=q_blocks,
        k_blocks=k_blocks,
        heads=heads,
        HEAD_DIM=head_dim,
        HEAD_PAD=head_pad,
        BLOCK_Q=block_q,
        BLOCK_K=block_k,
        num_warps=8 if head_pad > 64 else 4,
        num_stages=1,
    )
    return torch.matmul(q_pooled, k_pooled.transpose(-1, -2))


@triton.jit
def select_kernel(
    lut_ptr, scores_ptr, rows, columns, count,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The columns of the `count` largest scores of each row, ascending; of equals the first.

    Grid: (blocks of ROWS rows). scores [rows, columns]; lut [rows, count] int32. A NaN is
    the largest, so that it is seen. The count-th largest is found bit by bit, from the integers
    whose order is that of the scores: no sorting, and the same in every run.
    """
    offs_r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    offs_c = tl.arange(0, COLUMNS)
    inside = (offs_r < rows)[:, None] & (offs_c < columns)[None, :]
    row = offs_r.to(tl.int64)[:, None]
    # -0 + 0 is 0: both zeros are equal.
    scores = tl.load(scores_ptr + row * columns + offs_c[None, :], mask=inside, other=0.0)
    scores = scores.to(tl.float32) + 0.0
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


def largest_scores(scores: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` blocks of keys that each block of queries sees: int32 [B, H, q_blocks, count],
    ascending, for scores [B, H, q_blocks, k_blocks]."""
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
