"""How far a closed pair is from its author's: per sample, per head, by rows, in the last keys, and
whether a sample or a head is too large or too small as a whole.

Every number is a share of what the pair adds to its residual, with the rounding of the residual
taken off, so a gate of zero is an error of 1 and a small gate makes nothing look large. A number
that needs more room than the error of a whole sample has a limit of its own, a multiple of the
budget; numbers are given in units in which the budget is the limit of all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

#: The worst hundredth of a sample's rows is judged as one. Single rows of a healthy int8 attention
#: are off by some times the mean; a wrong gate or residual is off by about 1.
ROW_ROOM: Final = 4.0
WORST_ROWS: Final = 100
#: The output of one head before the projection, where another's error does not hide it, and where
#: it is not yet small among many.
HEAD_ROOM: Final = 4.0
#: The share of the last keys that is missing, and what part of the error that is: both are near 1
#: if a kernel forgets them.
KEY_ROOM: Final = 4.0
#: The input of a branch is not quantised (but by int8 Linears), so its limit is a quarter of
#: the budget.
NORM_SHARE: Final = 0.25
#: A gain is <ours, author's> / <author's, author's> - 1. Quantising goes to both sides alike, so
#: the gain of an honest error is far smaller than the error, and has less room. What an error e of
#: a head of D channels does make of it is taken off: e^2 (logits that are off flatten a peaked
#: softmax) and e / sqrt(D), twice (an error that is the same in all rows).
GAIN_SHARE: Final = 0.25
_BY_CHANCE: Final = 2.0
#: A rounding to a step that is not small beside what is added loses some of that, or adds some.
_STEPS: Final = 4.0
#: Two computations that round once each to a dtype are 0.3 of its epsilon apart (root mean square
#: over evenly spread mantissas); so much is taken off an error with room for a second rounding.
_ROUNDING: Final = 0.5
#: A head whose square is less than this share of the mean of all is not judged by its own size.
_FAINT: Final = 0.1
#: A wrong share explains at least this part of an error (a cosine); below it, the agreement of an
#: error with what a head adds is chance.
_EXPLAINS: Final = 0.25
#: Elements of a chunk of rows: what is computed in fp32 at a time, 25 MB a tensor.
_CHUNK: Final = 6 << 20


@dataclass(frozen=True, slots=True)
class Measure:
    """One comparison; the larger of the two errors that a number is made of is its error.

    Attributes:
        error: The largest of all, in units in which the budget is the limit.
        sample: The sample with the largest error.
        head: Its worst head, None where the branch is no attention.
        head_error: Of that head, likewise.
        gain: The largest gain of the sample or of one of its heads, beyond what an honest error
            makes of it.
        rows: Its worst rows, at most eight, of the stream that is off the most.
        row_error: Of the worst hundredth of its rows, likewise.
        where: What the largest error is of, in words.
    """

    error: float
    sample: int = 0
    head: int | None = None
    head_error: float = 0.0
    gain: float = 0.0
    rows: tuple[int, ...] = ()
    row_error: float = 0.0
    where: str = ""


@dataclass(slots=True)
class _Streams:
    """Errors of the streams of a pair, a list entry a stream."""

    samples: list[Tensor]
    rows: list[Tensor]
    gains: list[Tensor]
    worst: list[Tensor]


def measure(
    ours: tuple[Tensor, ...],
    author: tuple[Tensor, ...],
    base: tuple[Tensor, ...],
    *,
    inputs: list[tuple[Tensor, Tensor, float]],
    heads: int = 0,
    before: Tensor | None = None,
    ours_before: Tensor | None = None,
    gates: tuple[Tensor, ...] | None = None,
    weight: Tensor | None = None,
    last_keys: Tensor | None = None,
) -> Measure:
    """Compare a pair with its author's code.

    Args:
        ours: [B, N, C] a residual stream, any float dtype.
        author: The same from the author's code.
        base: What the residual alone comes to, likewise.
        inputs: Tensors [B, ...] that both had on their way, ours first, and the room of each.
        heads: H, 0 where the branch is no attention.
        before: What the author's output projection got, [B, N, H * D]; N counts all streams.
        ours_before: The same of ours, where it can be had.
        gates: What the author's code multiplies the projected branch with, like `ours`.
        weight: Of the output projection, [C, H * D], where it is one.
        last_keys: What the last keys add to `before`.

    Returns:
        The worst of it; the errors of all samples are finite or infinite, never NaN.
    """
    streams = _Streams([], [], [], [])
    for one, other, still in zip(ours, author, base, strict=True):
        sample, rows, gain, worst = _by_rows(one, other, still)
        streams.samples.append(sample)
        streams.rows.append(rows / ROW_ROOM)
        streams.gains.append(gain / GAIN_SHARE)
        streams.worst.append(worst)
    samples, rows = torch.stack(streams.samples), torch.stack(streams.rows)
    gains = torch.stack(streams.gains).amax(0)
    found: list[tuple[str, Tensor]] = [("sample", samples.amax(0)), ("rows", rows.amax(0))]
    found.append(("gain", gains))
    for one, other, room in inputs:
        apart, _, _, _ = _by_rows(_rows(one), _rows(other), None)
        found.append(("input", _of(apart, samples) / room))
    by_head = _heads(ours, author, heads, before, ours_before, gates, weight)
    if by_head is not None:
        found += [("head", by_head[0].amax(1)), ("gain of a head", by_head[1].amax(1))]
        gains = torch.maximum(gains, found[-1][1])
    if last_keys is not None and gates is not None and weight is not None:
        share = _share_of(ours, author, last_keys, gates, weight)
        found.append(("last keys", share / KEY_ROOM))
    table = torch.stack([_finite(numbers) for _, numbers in found])
    table = torch.cat([table, _finite(gains).unsqueeze(0)])
    *values, gained = table.tolist()  # The one wait for the device.
    errors = [max(column) for column in zip(*values, strict=True)]
    at = max(range(len(errors)), key=errors.__getitem__)
    kind = found[max(range(len(found)), key=lambda i: values[i][at])][0]
    stream = int(_finite(rows[:, at]).argmax())
    head, error_of_head = None, 0.0
    if by_head is not None:
        of_heads = _finite(by_head[int(kind.startswith("gain"))][at])
        head, error_of_head = int(of_heads.argmax()), float(_finite(by_head[0][at]).max())
    those = tuple(sorted(streams.worst[stream][at].tolist()))
    gain = gained[at] * GAIN_SHARE
    words = {
        "sample": f"sample {at}",
        "gain": f"the size of sample {at}, {gain:.1%} off",
        "gain of a head": f"the size of head {head} of sample {at}, {gain:.1%} off",
        "rows": f"rows {', '.join(map(str, those))} of sample {at}",
        "input": f"the input of the branch, sample {at}",
        "head": f"head {head} of sample {at}",
        "last keys": f"the last keys, sample {at}",
    }
    return Measure(errors[at], at, head, error_of_head, gain, those, values[1][at], words[kind])


def _by_rows(
    ours: Tensor, author: Tensor, base: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Error of each sample [B], of its worst rows [B], gain of each sample [B], and which rows
    those are [B, up to 8].

    Without a base the size is that of the author's tensor itself.
    """
    ours, author = ours.expand_as(author), author
    parts: list[Tensor] = []
    floor = (_ROUNDING * torch.finfo(ours.dtype).eps) ** 2
    for rows in _chunks(author):
        y = author[:, rows].float()
        apart = ours[:, rows].float() - y
        size = y.square().sum(-1)
        adds = y if base is None else y - base[:, rows].float()
        along, added = (apart * adds).sum(-1), adds.square().sum(-1)
        parts.append(torch.stack([apart.square().sum(-1), added, size, along]))
    off, added, size, along = torch.cat(parts, dim=-1).double()
    whole = _ratio(_above(off.sum(-1), floor * size.sum(-1)), added.sum(-1))
    rounded = floor * size.sum(-1)
    gain = _gain(along.sum(-1), off.sum(-1), added.sum(-1), rounded, ours.shape[-1])
    off = torch.nan_to_num(_above(off, floor * size), nan=float("inf"), posinf=float("inf"))
    count = max(1, off.shape[-1] // WORST_ROWS)
    worst, where = off.topk(count, dim=-1)
    # A few rows that add much do not make the others look small, nor the other way round.
    typical = added.median(-1).values
    own = added.gather(-1, where).mean(-1)
    return whole, _ratio(worst.mean(-1), torch.maximum(typical, own)), gain, where[:, :8]


def _above(squares: Tensor, floor: Tensor) -> Tensor:
    """What is left of a sum of squares above the rounding."""
    return (squares - floor).clamp_min(0)


def _ratio(off: Tensor, size: Tensor) -> Tensor:
    return torch.where(off == 0, off, off / size).sqrt()


def _gain(
    along: Tensor, off: Tensor, size: Tensor, floor: Tensor, channels: int, own: float = 1.0
) -> Tensor:
    """What is left of a gain above what an honest error makes of it.

    Args:
        along: <off, author's>.
        off: Square of the error.
        size: Square of the author's.
        floor: Square of the rounding.
        channels: Over which an error that is the same in all rows may agree by chance.
        own: The share of the error that is not another head's.
    """
    across = _above(off, along.square() / size) / size
    honest = own * across + _BY_CHANCE * (across / channels).sqrt() + (_STEPS * floor / size) ** 2
    gain = _above((along / size).abs(), honest)
    return torch.where((off == 0) | (size == 0), 0.0, gain)


def _heads(
    ours: tuple[Tensor, ...],
    author: tuple[Tensor, ...],
    heads: int,
    before: Tensor | None,
    ours_before: Tensor | None,
    gates: tuple[Tensor, ...] | None,
    weight: Tensor | None,
) -> tuple[Tensor, Tensor] | None:
    """Error and gain of each head of each sample, [B, H]: before the projection, and as a wrong
    share of what it adds behind it."""
    if not heads or before is None:
        return None
    by_head = gains = torch.zeros(before.shape[0], heads, device=before.device).double()
    channels = before.shape[-1] // heads
    if ours_before is not None and ours_before.shape == before.shape:
        floor = (_ROUNDING * torch.finfo(ours_before.dtype).eps) ** 2
        off, size, along = torch.zeros(3, before.shape[0], heads, device=before.device).double()
        for rows in _chunks(before):
            right = _by_head(before[:, rows], heads)
            wrong = _by_head(ours_before[:, rows], heads) - right
            off += wrong.square().sum((1, 3))
            size += right.square().sum((1, 3))
            along += (wrong * right).sum((1, 3))
        size = torch.maximum(size, _FAINT * size.mean(-1, keepdim=True))
        by_head = _finite(_ratio(_above(off, floor * size), size)) / HEAD_ROOM
        gains = _finite(_gain(along, off, size, floor * size, channels)) / GAIN_SHARE
    if gates is None or weight is None:
        return by_head, gains
    off, gate = _difference(ours, author), _whole(gates)
    matrix = weight.float()
    agree = torch.zeros(before.shape[0], heads, device=before.device).double()
    wrong, squares = torch.zeros(2, before.shape[0], 1, device=before.device).double()
    theirs = _whole(author)
    strength = torch.zeros_like(gate[:, 0].float())
    for rows in _chunks(before):
        scaled = gate[:, rows].float()
        strength += scaled.square().sum(1)
        wrong += off(rows).square().sum((1, 2)).unsqueeze(1)
        squares += theirs[:, rows].float().square().sum((1, 2)).unsqueeze(1)
        back = F.linear(off(rows) * scaled, matrix.t()) * before[:, rows].float()
        agree += _by_head(back, heads).sum((1, 3))
    columns = _by_head(matrix, heads)
    strength = strength / before.shape[1]
    form = torch.einsum("chd,bc,che->bhde", columns, strength, columns)
    size = torch.zeros_like(agree)
    for rows in _chunks(before):
        part = _by_head(before[:, rows], heads)
        size += (torch.einsum("bnhd,bhde->bnhe", part, form) * part).sum((1, 3))
    explained = agree.square() > _EXPLAINS**2 * size * wrong
    size = torch.maximum(size, _FAINT * size.mean(-1, keepdim=True))
    share = torch.where(explained | wrong.isnan(), agree / size, 0.0).abs()
    rounded = (_ROUNDING * torch.finfo(ours[0].dtype).eps) ** 2 * squares
    behind = _gain(agree, wrong, size, rounded, matrix.shape[0], own=0.0)
    gains = torch.maximum(gains, _finite(behind) / GAIN_SHARE)
    return torch.maximum(_finite(share), by_head), gains


def _share_of(
    ours: tuple[Tensor, ...],
    author: tuple[Tensor, ...],
    part: Tensor,
    gates: tuple[Tensor, ...],
    weight: Tensor,
) -> Tensor:
    """How much of a part of the attention's output [B, N, H * D] ours has too much or too little
    of, at most as much as explains the error: [B]."""
    off, gate = _difference(ours, author), _whole(gates)
    agree, size, wrong = torch.zeros(3, part.shape[0], device=part.device).double()
    for rows in _chunks(part):
        adds = F.linear(part[:, rows].float(), weight.float()) * gate[:, rows].float()
        agree += (off(rows) * adds).sum((1, 2))
        size += adds.square().sum((1, 2))
        wrong += off(rows).square().sum((1, 2))
    share, explained = agree / size, agree / (size * wrong).sqrt()
    return torch.where(agree == 0, agree, torch.minimum(share.abs(), explained.abs()))


def _difference(ours: tuple[Tensor, ...], author: tuple[Tensor, ...]) -> Callable[[slice], Tensor]:
    """ours - author over the rows of all streams, in fp32, a few rows at a time."""
    one, other = _whole(ours), _whole(author)
    return lambda rows: one[:, rows].float() - other[:, rows].float()


def _whole(streams: tuple[Tensor, ...]) -> Tensor:
    """The rows of all streams, [B, N, C]."""
    return streams[0] if len(streams) == 1 else torch.cat(streams, dim=1)


def _by_head(x: Tensor, heads: int) -> Tensor:
    """[..., H * D] as [..., H, D] in fp32."""
    return x.float().view(*x.shape[:-1], heads, x.shape[-1] // heads)


def _chunks(x: Tensor) -> list[slice]:
    step = max(1, _CHUNK // max(1, x.shape[0] * x.shape[2]))
    return [slice(start, start + step) for start in range(0, x.shape[1], step)]


def _rows(x: Tensor) -> Tensor:
    """[B, rows, C] of a tensor of whatever shape."""
    if x.dim() < 3:
        return x.reshape(x.shape[0] if x.dim() else 1, 1, -1)
    return x.flatten(1, -2)


def _of(numbers: Tensor, samples: Tensor) -> Tensor:
    """One number a sample; a tensor that is not by sample is of them all."""
    count = samples.shape[1]
    return numbers if numbers.shape[0] == count else numbers.amax().expand(count)


def _finite(x: Tensor) -> Tensor:
    return torch.nan_to_num(x.double(), nan=float("inf"), posinf=float("inf"))
