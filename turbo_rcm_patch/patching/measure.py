"""The numbers by which the guard decides: the distance of a fast path from its author's block, and
what both add to the error of the network.

A block is compared branch by branch. The term c_out * F(x) that each branch adds to the residual
streams is compared with the author's, so that a wrong gate of a small branch cannot hide in the
sum of a large one. The rounding of the author's stream is subtracted first.
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

#: Largest relative error of a branch, per sample. int8 attention of random inputs has an error of
#: 0.03 to 0.04, exact attention of 0.005 (bf16).
BUDGET: Final = 0.10
#: Multiples of the budget that are allowed for the worst hundredth of the rows, and for the last
#: rows, which kernels mask.
ROW_ROOM: Final = 4.0
LAST_ROOM: Final = 2.0
_LAST_ROWS: Final = 64
#: Two computations that round once each differ by 0.3 of the epsilon (root mean square over evenly
#: spread mantissas). This much is subtracted, with room for a second rounding.
_TAKEN_OFF: Final = 0.5
#: Elements that are held in fp32 at a time.
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

#: The residual streams before the first branch and after each branch.
Stages = Sequence[tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True)
class Measure:
    """The distance of a block from its author's.

    Attributes:
        error: The largest error, scaled so that `BUDGET` is the limit for every kind of error.
        where: The branch, the stream and the sample with that error, in words.
        added: The square of what each branch adds, as a share of the square of the block's output.
        apart: Square of the distance of the two outputs, as the same share.
    """

    error: float
    where: str
    added: tuple[float, ...]
    apart: float


def measure(fast: Stages, author: Stages, dtype: torch.dtype) -> Measure:
    """Compare a block branch by branch.

    Args:
        fast: Streams of the fast path.
        author: Streams of the author's forward.
        dtype: The model's dtype.
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
    # The only wait for the device.
    values = torch.cat([table.double().flatten(), shares.double()]).tolist()
    errors, (apart, *added_shares) = values[: table.numel()], values[table.numel() :]
    worst = max(range(len(errors)), key=errors.__getitem__)
    samples = table.shape[1]
    where = places[worst // samples] + (f", sample {worst % samples}" if samples > 1 else "")
    return Measure(errors[worst], where, tuple(added_shares), apart)


def _by_rows(
    x0: Tensor, x1: Tensor, y0: Tensor, y1: Tensor, *, whole: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Sum the squares of each row of (x1 - x0) - (y1 - y0), y1 - y0 and y1: three [B, N] fp64.

    With `whole`, of x1 - y1, y1 and y1 instead.
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
    """Return the error of the worst hundredth of the rows, [B].

    It is relative to what these rows add or to the typical row, whichever is larger.
    """
    off = torch.nan_to_num(off, nan=inf)
    worst, where = off.topk(max(1, off.shape[1] // 100), dim=-1)
    own = adds.gather(-1, where).mean(-1)
    return _ratio(worst.mean(-1), torch.maximum(typical, own))


def _ratio(off: Tensor, size: Tensor) -> Tensor:
    return torch.where(off == 0, off, off / size).sqrt()


# --- errors to fp32 ------------------------------------------------------------------------------


class Shares(NamedTuple):
    """Squares of the errors that a block adds, as shares of the square of its output.

    If every such error reaches the network's output with the same factor, the patched network's
    error divided by the unpatched one's is sqrt(sum of `fast` / sum of `author`).

    Attributes:
        author: Share of the author's block.
        fast: Share of the fast path.
    """

    author: float
    fast: float


def shares(found: Measure, operands: Operands | None, dtype: torch.dtype, int8: bool) -> Shares:
    """Estimate what the author's block and the fast path add to the network's error.

    Three terms are computed for both: the roundings of the residual stream (the author's after
    every branch, the fast path's once), the roundings inside the branches, and exact attention of
    operands that carry their own roundings. The error of int8 attention is measured on a sample of
    rows. The error of int8 Linears is the rest of the distance between both.

    Args:
        found: The comparison of the block.
        operands: Operands of its self-attention where that ran in int8, or None.
        dtype: The model's dtype. For fp32 the roundings of bf16 are taken, because no 8-bit path
            comes near fp32.
        int8: True if Linears ran in int8.
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
    """Compare an attention with fp32 on a sample of its rows.

    Args:
        given: Operands and output of the attention.
        spread: Relative error that earlier roundings leave in q and k.

    Returns:
        The squares of two errors, as shares of the output's square: of int8 attention, and of
        exact attention in the model's dtype. Both include the error that rounded operands cause.
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
    # A separate generator, so that the caller's random numbers do not change.
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
