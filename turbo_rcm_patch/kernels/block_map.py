"""Which blocks of keys a block of queries attends to: those with the largest scores."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from turbo_rcm_patch.kernels.launch import LENGTHS, cdiv, launch
from turbo_rcm_patch.kernels.replay import replayed

__all__ = ["largest_scores", "select_kernel"]

#: Scores that a program of `select_kernel` holds.
_SCORES = 4096

_LOWEST = tl.constexpr(-2147483648)
_NO_SIGN = tl.constexpr(0x7FFFFFFF)


@triton.jit(do_not_specialize=LENGTHS)
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


@replayed
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
        (cdiv(rows, per_program),),
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
