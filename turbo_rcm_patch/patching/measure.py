"""Numbers that the guard decides by: how far a fast path is from its author's block, and what both
are worth as errors of the network.

A block is compared branch by branch: what each adds to the residual streams, c_out * F(x), is
compared with what the author's adds, so a wrong gate of a small branch cannot hide in the sum of a
large one. The rounding of the author's stream is taken off first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from turbo_rcm_patch.ops.reference import norm_rope, split_heads
from turbo_rcm_patch.patching.pieces import Operands

#: A sample whose branch is off by more than this share of what it adds goes over the budget. int8
#: attention of random inputs is off by 0.03 to 0.04, exact attention by 0.005 (bf16).
BUDGET: Final = 0.10
#: The worst hundredth of the rows may be off by so many times the budget, and the last rows, which
#: kernels mask, by so many times.
ROW_ROOM: Final = 4.0
LAST_ROOM: Final = 2.0
_LAST_ROWS: Final = 64
#: Two computations that round once each are 0.3 of the epsilon apart (root mean square over evenly
#: spread mantissas); so much is taken off, with room for a second rounding.
_TAKEN_OFF: Final = 0.5
#: Elements that are in fp32 at a time.
_CHUNK: Final = 6 << 20

#: Rows of an attention that are compared with fp32, evenly spaced.
_ROWS: Final = 64
#: Bytes of logits at a time.
_LOGITS: Final = 256 << 20
#: Relative root mean square error of one rounding, in units of the dtype's epsilon.
_ROUNDING: Final = 0.204
#: Roundings between the residual stream and q or k, and inside a branch.
_OF_OPERANDS: Final = 2.0
_INSIDE: Final = 4.0

#: The residual streams after each branch, those before the first in front.
Stages = Sequence[tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True)
class Measure:
    """How far a block is from its author's.

    Attributes:
        error: The largest error, in units in which `BUDGET` is the limit of all.
        where: The branch, the stream and the sample that it is of, in words.
        added: Sum of squares that each branch adds, as shares of the square of the block's output.
        apart: Square of the distance of both outputs, as the same share.
    """

    error: float
    where: str
    added: tuple[float, ...]
    apart: float


def measure(fast: Stages, author: Stages, dtype: torch.dtype) -> Measure:
    """Compare a block branch by branch.

    Args:
        fast: Of the fast path.
        author: Of the author's forward.
        dtype: Of the model.
    """
    floor = 2 * (_TAKEN_OFF * torch.finfo(dtype).eps) ** 2
    numbers, places, added = [], [], []
    for stage in range(1, len(author)):
        sums = []
        for stream in range(len(author[0])):
            four = (fast[stage - 1], fast[stage], author[stage - 1], author[stage])
            off, adds, size = _by_rows(*[one[stream] for one in four])
            left = (off - floor * size).clamp_min(0)
            typical = adds.median(-1).values
            numbers.append(_ratio(left.sum(-1), adds.sum(-1)))
            numbers.append(_worst_rows(left, adds, typical) / ROW_ROOM)
            last = min(_LAST_ROWS, max(1, off.shape[1] // 16))
            least = torch.maximum(adds[:, -last:].sum(-1), typical * last)
            numbers.append(_ratio(left[:, -last:].sum(-1), least) / LAST_ROOM)
            branch = f"branch {stage}" + (f", stream {stream + 1}" if len(author[0]) > 1 else "")
            places += [branch, f"{branch}, its worst rows", f"{branch}, its last rows"]
            sums.append(adds.sum())
        added.append(torch.stack(sums).sum())
    ends = [_by_rows(x, x, y, y, whole=True) for x, y in zip(fast[-1], author[-1], strict=True)]
    off, _, size = (
        torch.stack([part.sum() for part in parts]).sum() for parts in zip(*ends, strict=True)
    )
    table = torch.nan_to_num(torch.stack(numbers), nan=inf)
    shares = torch.nan_to_num(torch.stack([off, *added]) / size, nan=inf)
    # The one wait for the device.
    values = torch.cat([table.double().flatten(), shares.double()]).tolist()
    errors, (apart, *added_shares) = values[: table.numel()], values[table.numel() :]
    worst = max(range(len(errors)), key=errors.__getitem__)
    samples = table.shape[1]
    where = places[worst // samples] + (f", sample {worst % samples}" if samples > 1 else "")
    return Measure(errors[worst], where, tuple(added_shares), apart)


def _by_rows(
    x0: Tensor, x1: Tensor, y0: Tensor, y1: Tensor, *, whole: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Squares by row, [B, N] fp64: of (x1 - x0) - (y1 - y0), of y1 - y0, and of y1.

    With `whole` nothing is subtracted: of x1 - y1, of y1, and of y1.
    """
    parts = []
    step = max(1, _CHUNK // max(1, y1.shape[0] * y1.shape[2]))
    for start in range(0, y1.shape[1], step):
        rows = slice(start, start + step)
        end = y1[:, rows].float()
        adds = end if whole else end - y0[:, rows].float()
        other = x1[:, rows].float()
        off = other - end if whole else other - x0[:, rows].float() - adds
        parts.append(torch.stack([part.square().sum(-1) for part in (off, adds, end)]))
    off, adds, size = torch.cat(parts, -1).double()
    return off, adds, size


def _worst_rows(off: Tensor, adds: Tensor, typical: Tensor) -> Tensor:
    """The error of the worst hundredth of the rows, [B]. A few rows that add much do not make the
    others look small, nor the other way round."""
    off = torch.nan_to_num(off, nan=inf)
    worst, where = off.topk(max(1, off.shape[1] // 100), dim=-1)
    own = adds.gather(-1, where).mean(-1)
    return _ratio(worst.mean(-1), torch.maximum(typical, own))


def _ratio(off: Tensor, size: Tensor) -> Tensor:
    return torch.where(off == 0, off, off / size).sqrt()


# --- errors to fp32 ------------------------------------------------------------------------------


class Shares(NamedTuple):
    """Squares of what a block adds to the error of the network, as shares of its output's square.

    If the network carries every such error on to its output alike, the patched network's error
    over the unpatched one's is the root of the sum of `fast` over the sum of `author`.
    """

    author: float
    fast: float


def shares(found: Measure, operands: Operands | None, dtype: torch.dtype, int8: bool) -> Shares:
    """Estimate what the author's block and the fast path add to the network's error.

    Counted for both: roundings of the residual stream (the author's after every branch, the fast
    path's once), those inside the branches, and exact attention of operands that are off by their
    own roundings. Measured: int8 attention on a sample of rows. int8 Linears are what is left of
    the distance between both.

    Args:
        found: Of the block.
        operands: Of its self-attention where that ran in int8, or None.
        dtype: Of the model; nothing in 8 bits is near fp32, so there bf16 is the measure.
        int8: Whether Linears ran in int8.
    """
    wide = dtype == torch.float32
    eps = torch.finfo(torch.bfloat16 if wide else dtype).eps
    square, inside = (_ROUNDING * eps) ** 2, _INSIDE * sum(found.added)
    author, fast = square * (len(found.added) + inside), square * (1 + inside) * (not wide)
    if operands is not None:
        of_fast, of_author = attention_errors(operands, _OF_OPERANDS**0.5 * _ROUNDING * eps)
        author += of_author * found.added[0]
        fast += of_fast * found.added[0]
    if int8:
        fast += max(0.0, found.apart - author - fast)
    return Shares(author, fast)


@torch.no_grad()
def attention_errors(given: Operands, spread: float) -> tuple[float, float]:
    """Compare an attention with fp32 on some rows.

    Args:
        given: Its operands and output.
        spread: Relative error of q and k by the roundings before them.

    Returns:
        Squares, as shares of the output's: of int8 attention's error, and of exact attention's in
        the model's dtype. Both with the error that rounded operands make of an exact one.
    """
    q, k, v, norms, rotary, heads, out = given
    step = -(-q.shape[1] // _ROWS)
    cos, sin = (None, None) if rotary is None else rotary
    rows_cos, rows_sin = (None if x is None else x[::step] for x in (cos, sin))
    eps = norms.eps
    wide_q = norm_rope(
        q[:, ::step], heads, weight=norms.q, bias=norms.q_bias, cos=rows_cos, sin=rows_sin, eps=eps
    ).float()
    got = split_heads(out[:, ::step], heads).float()
    each = max(1, _LOGITS // (4 * q.shape[0] * wide_q.shape[2] * k.shape[1]))
    # A generator of its own: the caller's random numbers stay as they are.
    random = torch.Generator(q.device).manual_seed(0)

    def shaken(x: Tensor) -> Tensor:
        drawn = torch.randn(x.shape, generator=random, device=x.device)
        return x * drawn.mul_(spread).add_(1)

    wide_k = norm_rope(k, heads, weight=norms.k, bias=norms.k_bias, cos=cos, sin=sin, eps=eps)
    vh = split_heads(v, heads)
    sums = torch.zeros(4, dtype=torch.float64, device=q.device)
    for start in range(0, heads, each):
        some = slice(start, start + each)
        qh, kh, v_wide = wide_q[:, some], wide_k[:, some].float(), vh[:, some].float()
        truth = F.scaled_dot_product_attention(qh, kh, v_wide)
        rounded = F.scaled_dot_product_attention(qh.to(v.dtype), kh.to(v.dtype), vh[:, some])
        moved = F.scaled_dot_product_attention(shaken(qh), shaken(kh), v_wide)
        off = (truth, got[:, some] - truth, rounded.float() - truth, moved - truth)
        sums += torch.stack([x.double().square().sum() for x in off])
    size, of_fast, of_author, of_operands = sums.tolist()
    size = max(size, 1e-30)
    return (of_fast + of_operands) / size, (of_author + of_operands) / size
