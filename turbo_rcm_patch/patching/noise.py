"""What a pair adds to the error of its network, by head, and which heads are to run exactly.

The network number is e(patched) / e(unpatched), both to the same network in fp32. A pair adds to
either error what its own roundings are worth in the residual stream behind it. Here that is a
square over some evenly spaced rows, as a share of the stream's own. If the network carries every
such error on to its output alike, the number is the root of the sum of ours over the sum of the
author's: the prediction. A target for the number is then a budget for all pairs together, and what
is made more exact first is what takes the most error away for its time (`choose`).

Estimated are the roundings that both have: one of the stream behind a pair (none where ours stays
in fp32), and those inside a branch. Measured are, for each head, attention in fp64 over the
operands that the model gave it, and how far from that are: exact attention in the model's dtype,
exact attention of operands that are off by a rounding or two, as those of the model are, and ours.
Each goes through the output projection and the gate; what 8 bits add is ours less the first.

Where several ranks share a sequence, each measures the rows that it has of those that one process
would take, against the keys of all ranks, which it gathers head by head. The squares of all ranks
are summed in the same order everywhere, so all have the same numbers and choose the same heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from math import inf, sqrt
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from turbo_rcm_patch import ops
from turbo_rcm_patch.ops.exchange import ContextParallel, gather, told
from turbo_rcm_patch.ops.reference import exact_attention, norm_rope, sdpa_attention

#: Rows that are looked at, evenly spaced over the sequence.
ROWS: Final = 128
#: The root mean square error of one rounding over evenly spread mantissas, as a share of the value
#: and of the dtype's epsilon.
_ROUNDING: Final = 0.204
#: A head that ran exactly has the error of exact attention in the model's dtype; an error of
#: so many times that is not rounding any more.
_WRONG: Final = 4.0
#: Roundings between the residual stream and q or k.
_OF_OPERANDS: Final = 2.0
#: Roundings inside a branch that reach its output: norm, projections, what is between them.
_INSIDE: Final = 4.0
#: Over the target the error is brought down to this share of it, so that the last step does not
#: exceed it.
_AIM: Final = 0.95
#: What a second part for exact heads costs an attention beside its share of them, and what 16-bit
#: Linears cost a pair: in units of a whole attention made exact, times the tokens. On an H200 at
#: 8,190 tokens a block takes 0.26 ms more with all of 12 heads exact, 0.41 with 9 or 10, and 0.37
#: with its three pairs' Linears in 16 bits.
_SECOND_PART: Final = 6_500.0
_WIDE_LINEARS: Final = 3_900.0


class Operands(NamedTuple):
    """What an attention of ours was given.

    Attributes:
        q: [B, N, H * D].
        k: [B, Nk, H * D].
        v: [B, Nk, H * D].
        norms: Weights of the norms of q and k, then their biases, each or None.
        rotary: (cos, sin), or None.
        spec: How it is computed.
        parallel: The ranks that share its keys; None where this one has all of them.
        heads_apart: Whether each head is attention to these keys alone, so that it can be measured
            and run exactly; not with a mask, sparse keys, or image tokens beside them.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    norms: tuple[Tensor | None, ...]
    rotary: tuple[Tensor, Tensor] | None
    spec: ops.AttentionSpec
    parallel: ContextParallel | None = None
    heads_apart: bool = True


class Share(NamedTuple):
    """What this rank has of a sequence.

    Attributes:
        parallel: The ranks that share it.
        lengths: Tokens of every rank.
    """

    parallel: ContextParallel
    lengths: tuple[int, ...]

    def summed(self, x: Tensor) -> Tensor:
        """Squares of all ranks added up in the order of the ranks: fp64 on the CPU, with the same
        bits on every rank."""
        rows = told("noise", x.double().flatten().tolist(), self.parallel, x.device)
        total = reduce(torch.add, (torch.tensor(row, dtype=torch.float64) for row in rows))
        return total.view(x.shape)


class _Rows(NamedTuple):
    """The rows of a sequence that are looked at.

    Attributes:
        first: The first of them that is here.
        step: Every how many tokens there is one.
        total: Tokens of the whole sequence.
        everywhere: How many of them the whole sequence has.
        before: How many of them are on ranks before this one.
    """

    first: int
    step: int
    total: int
    everywhere: int
    before: int


def _rows(tokens: int, share: Share | None) -> _Rows:
    """The rows to look at where so many tokens are here."""
    total = tokens if share is None else sum(share.lengths)
    before = 0 if share is None else sum(share.lengths[: share.parallel.rank])
    step = -(-total // ROWS)
    return _Rows(-before % step, step, total, -(-total // step), -(-before // step))


def quantised(given: Operands) -> bool:
    """Whether an attention runs in 8 bits, or some of its heads do."""
    return ops.quantises(ops.attention_name(given.spec, given.q, given.k))


@dataclass(frozen=True, slots=True)
class HeadNoise:
    """One head of one attention, the worst sample of each number.

    Attributes:
        error: Relative L2 of its output to attention in fp64 over the same operands.
        rounding: The same of exact attention in the model's dtype.
        added: What it adds to the residual stream beyond that rounding, in units of what the
            author's pair adds by rounding.
        exact: Whether it ran exactly.
    """

    error: float
    rounding: float
    added: float
    exact: bool


@dataclass(frozen=True, slots=True)
class Noise:
    """What one pair adds to the error of the residual stream behind it, as shares of the stream's
    square.

    Attributes:
        author: What the author's code adds by rounding.
        ours: What ours adds, with its 8 bits.
        linears: The part of that which is not the heads': the 8 bits of int8 Linears, with those
            of an attention whose heads cannot be measured.
        heads: One entry a head, none where the branch is no attention of ours in 8 bits.
        tokens: Of the pair's streams.
        known: Whether that is all; not where the 8 bits of an attention could not be measured.
    """

    author: float
    ours: float
    linears: float = 0.0
    heads: tuple[HeadNoise, ...] = ()
    tokens: int = 1
    known: bool = True

    @property
    def broken(self) -> int | None:
        """A head that ran exactly and is further from exact attention than rounding takes it."""
        wrong = [i for i, h in enumerate(self.heads) if h.exact and h.error > _WRONG * h.rounding]
        return wrong[0] if wrong else None


def predicted(noises: Sequence[Noise]) -> float | None:
    """The network's error in units of the unpatched network's; None where nothing was measured."""
    author = sum(noise.author for noise in noises)
    return sqrt(sum(noise.ours for noise in noises) / author) if author else None


class _Option(NamedTuple):
    """Something of one pair that may be made more exact: heads, or its int8 Linears where none."""

    pair: str
    heads: tuple[int, ...]
    gain: float
    cost: float


def choose(noises: Mapping[str, Noise], target: float) -> dict[str, tuple[bool, tuple[int, ...]]]:
    """What has to be made more exact, so that the prediction meets a target.

    Args:
        noises: What each pair adds, by its name.
        target: For the network number.

    Returns:
        For pairs that change: whether their int8 Linears are given back, and the heads that are to
        run exactly beside those that do.
    """
    number = predicted(list(noises.values()))
    if number is None or number <= target:
        return {}
    author = sum(noise.author for noise in noises.values())
    over = author * (number**2 - (_AIM * target) ** 2)
    options = [option for name, noise in noises.items() for option in _options(name, noise)]
    chosen: dict[str, tuple[bool, tuple[int, ...]]] = {}
    for one in sorted(options, key=lambda option: option.cost / option.gain):
        if over <= 0:
            break
        linears, heads = chosen.get(one.pair, (False, ()))
        chosen[one.pair] = linears or not one.heads, tuple(sorted({*heads, *one.heads}))
        over -= one.gain
    return chosen


def _options(name: str, noise: Noise) -> list[_Option]:
    """The int8 Linears of a pair; the heads worth running apart; then the remaining ones."""
    found: list[_Option] = []
    if noise.linears > 0:
        found.append(_Option(name, (), noise.linears, _WIDE_LINEARS / noise.tokens))
    done = sum(head.exact for head in noise.heads)
    part, count = _SECOND_PART / noise.tokens, len(noise.heads)
    shares = sorted(
        ((h.added**2 * noise.author, i) for i, h in enumerate(noise.heads) if not h.exact),
        reverse=True,
    )
    paid = min(1.0, part + done / count) if done else 0.0
    whole = sum(share for share, _ in shares)
    if not whole:
        return found
    best, gain = _Option(name, tuple(i for _, i in shares), whole, 1.0 - paid), 0.0
    for some, (share, _) in enumerate(shares[:-1], 1):
        gain += share
        cost = part + (done + some) / count - paid
        if cost >= 1.0 - paid:
            break  # As dear as all of them.
        if gain * best.cost > best.gain * cost:
            best = _Option(name, tuple(i for _, i in shares[:some]), gain, cost)
    rest = tuple(i for _, i in shares if i not in best.heads)
    if rest and whole > best.gain:
        found.append(_Option(name, rest, whole - best.gain, 1.0 - paid - best.cost))
    return [*found, best]


def pair_noise(
    ours: Sequence[Tensor],
    author: Sequence[Tensor],
    base: Sequence[Tensor],
    *,
    wide: bool,
    narrowed: bool,
    linears: bool,
    heads: tuple[Tensor, Tensor, Tensor, Tensor] | None,
    exact: tuple[int, ...],
    rest: bool = False,
    share: Share | None = None,
) -> Noise:
    """What a pair adds, over the worst of its samples.

    Args:
        ours: [B, N, C] a residual stream behind the pair, any float dtype.
        author: The same from the author's code.
        base: What the residual alone comes to.
        wide: Whether our stream stays in fp32 behind the pair: a block then rounds it once.
        narrowed: Whether the author's pair got our stream rounded.
        linears: Whether some of its Linears ran in int8.
        heads: Of `head_noise`, or None.
        exact: Heads that ran exactly.
        rest: Whether its attention ran in 8 bits that can only be told from what is left over.
        share: What this rank has of the sequence; None for all of it. Every rank calls it then.
    """
    first, step, tokens, *_ = _rows(sum(y.shape[1] for y in author), share)
    sums = torch.zeros(3, author[0].shape[0], device=author[0].device).double()
    for x, y, r in zip(ours, author, base, strict=True):
        x, wide_y, r = (part[:, first::step].float() for part in (x, y, r))
        parts = (wide_y, wide_y - r, x - wide_y)
        sums += torch.stack([part.square().sum((1, 2)).double() for part in parts])
    if share is not None:
        sums = share.summed(sums)
    stream, added, apart = (sums[0].clamp_min(1e-30), sums[1], sums[2])
    inside = _INSIDE * (added / stream)
    square = _rounding(author[0].dtype) ** 2
    of_author = square * (1 + inside)
    # A model in fp32 rounds nothing that counts here.
    rounds = author[0].dtype != torch.float32
    of_ours = square * ((0.0 if wide else 1.0) + inside) * rounds
    of_heads = torch.zeros_like(of_author).unsqueeze(1)
    if heads is not None:
        both = heads[3].sum(1) / stream
        of_author, of_ours = of_author + both, of_ours + both * rounds
        of_heads = heads[2] / stream.unsqueeze(1)
    of_linears = torch.zeros_like(of_author)
    if linears or rest:
        # Where ours goes on from fp32, a rounding of the stream in front lies between them, too.
        apart = apart / stream - (square if narrowed else 0.0)
        of_linears = (apart - of_author - of_ours - of_heads.sum(1)).clamp_min(0)
    total = of_ours + of_heads.sum(1) + of_linears
    worst = int((total / of_author).argmax())
    found: tuple[HeadNoise, ...] = ()
    if heads is not None:
        units = (of_heads / of_author.unsqueeze(1)).sqrt()
        numbers = [x.amax(0).tolist() for x in (heads[0], heads[1], units)]
        found = tuple(
            HeadNoise(error, rounding, added, head in exact)
            for head, (error, rounding, added) in enumerate(zip(*numbers, strict=True))
        )
    author_share = float(of_author[worst])
    eight = sum(h.added**2 for h in found) * author_share + float(of_linears[worst])
    ours_share = float(of_ours[worst]) + eight
    linears_share = float(of_linears[worst]) if linears else 0.0
    return Noise(author_share, ours_share, linears_share, found, tokens)


def _rounding(dtype: torch.dtype) -> float:
    """Relative root mean square error of one rounding to a dtype. Nothing in 8 bits is near fp32:
    there a model in bf16 is the measure."""
    return _ROUNDING * torch.finfo(torch.bfloat16 if dtype == torch.float32 else dtype).eps


def head_noise(
    given: Operands,
    ours: Tensor,
    weight: Tensor,
    gates: Sequence[Tensor],
    share: Share | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compare each head of an attention with attention in fp64.

    Args:
        given: What the attention was given.
        ours: What it made, [B, N, H * D].
        weight: Of the output projection, [C, H * D].
        gates: What the projected branch is multiplied with, [B, n, C] for each stream.
        share: What this rank has of the sequence; None for all of it. Every rank calls it then.

    Returns:
        [B, H] each: relative L2 of ours, that of exact attention in the model's dtype, the square
        of what ours adds to the residual stream beyond that, over `ROWS` rows, and the square of
        what exact attention adds there with rounded operands.
    """
    squares = _squares(given, ours, weight, gates, share)
    if share is not None:
        squares = share.summed(squares)
    size, *off, added, rounded, shaken = squares.unbind()
    found = [
        *[(x / size.clamp_min(1e-60)).sqrt() for x in off],
        (added - rounded).clamp_min(0),
        rounded + shaken,
    ]
    error, rounding, added, both = torch.nan_to_num(torch.stack(found), nan=inf).unbind()
    return error, rounding, added, both


def _squares(
    given: Operands,
    ours: Tensor,
    weight: Tensor,
    gates: Sequence[Tensor],
    share: Share | None,
) -> Tensor:
    """Sums of squares over the rows that are here, [6, B, H] fp64: of attention in fp64; of how
    far from it ours is, and exact attention in the model's dtype; and of what ours, that, and
    exact attention of rounded operands add to the residual stream."""
    q, k, v, (of_q, of_k, bias_q, bias_k), rotary, spec, parallel, _ = given
    heads, dim = spec.heads, q.shape[2] // spec.heads
    first, step, _, count, before = _rows(q.shape[1], share)
    scale = spec.scale_of(dim)
    cos, sin = (None, None) if rotary is None else (x.reshape(-1, dim) for x in rotary)
    rows = slice(first, None, step)
    rows_cos, rows_sin = (None, None) if cos is None or sin is None else (cos[rows], sin[rows])
    gate = _some(gates, first, step)
    inverse_q, inverse_k = (
        _inverse(x, w, b, spec.eps) for x, w, b in ((q[:, rows], of_q, bias_q), (k, of_k, bias_k))
    )
    numbers = torch.zeros(6, q.shape[0], heads, dtype=torch.float64, device=q.device)
    # A generator of its own: the caller's random numbers stay as they are.
    random = torch.Generator(q.device).manual_seed(0)
    spread = _OF_OPERANDS**0.5 * _rounding(v.dtype)

    def off_by_roundings(x: Tensor, before: int, count: int) -> Tensor:
        # Drawn for all rows of which x has some, so that ranks and one process draw the same.
        shape = (*x.shape[:2], count, x.shape[3])
        drawn = torch.randn(shape, generator=random, device=x.device)
        some = drawn[:, :, before : before + x.shape[2]]
        return x.double() * some.mul_(spread).add_(1)

    for head in range(heads):
        at = slice(head * dim, (head + 1) * dim)
        kh = _prepared(k[..., at], of_k, bias_k, inverse_k, at, cos, sin, spec.eps)
        vh = v[..., at].unsqueeze(1)
        if share is not None and parallel is not None:
            kh, vh = _of_all_ranks(kh, vh, share)
        qh = _prepared(q[:, rows, at], of_q, bias_q, inverse_q, at, rows_cos, rows_sin, spec.eps)
        if not qh.shape[2]:  # All rows are on other ranks, which need these keys.
            continue
        truth, _ = exact_attention(qh.double(), kh.double(), vh.double(), sm_scale=scale)
        rounded = sdpa_attention(qh.to(v.dtype), kh.to(v.dtype), vh, sm_scale=scale)
        shaken, _ = exact_attention(
            off_by_roundings(qh, before, count), off_by_roundings(kh, 0, kh.shape[2]),
            vh.double(), sm_scale=scale,
        )  # fmt: skip
        off = [x.double() - truth[:, 0] for x in (ours[:, rows, at], rounded[:, 0], shaken[:, 0])]
        columns = weight[:, at].float()
        behind = [F.linear(x.float(), columns) * gate for x in off]
        for n, x in enumerate((truth[:, 0], *off[:2], *behind)):
            numbers[n, :, head] = x.square().sum((1, 2))
    return numbers


def _of_all_ranks(k: Tensor, v: Tensor, share: Share) -> tuple[Tensor, Tensor]:
    """k [B, 1, n, D] fp32 and v [B, 1, n, D] of one head as those of all ranks, in one message."""
    parts = [x[:, 0].contiguous().view(torch.uint8) for x in (k, v)]
    sent = F.pad(torch.cat(parts, -1), (0, 0, 0, max(share.lengths) - k.shape[2]))
    came = gather("keys of a head", sent, share.parallel.group).wait()
    whole = torch.cat([x[:, :n] for x, n in zip(came, share.lengths, strict=True)], 1)
    k_all, v_all = torch.split(whole, [part.shape[-1] for part in parts], -1)
    return (
        k_all.contiguous().view(k.dtype).unsqueeze(1),
        v_all.contiguous().view(v.dtype).unsqueeze(1),
    )


def _some(streams: Sequence[Tensor], first: int, step: int) -> Tensor:
    """Rows a step apart, from the first one on, of streams that follow each other, in fp32."""
    found, passed = [], 0
    for x in streams:
        found.append(x[:, (first - passed) % step :: step].float())
        passed += x.shape[1]
    return torch.cat(found, 1)


def _inverse(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor | None:
    """1 / root mean square of the rows [B, N, 1], where a norm goes across all heads."""
    if weight is None or bias is not None or weight.numel() != x.shape[-1]:
        return None
    size = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    return torch.rsqrt(size.square() / x.shape[-1] + eps)


def _prepared(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    inverse: Tensor | None,
    at: slice,
    cos: Tensor | None,
    sin: Tensor | None,
    eps: float,
) -> Tensor:
    """One head of q or k after its norm and rotary embedding, [B, 1, N, D] fp32."""
    x = x.float()
    if inverse is not None and weight is not None:
        x, weight = x * inverse * weight[at].float(), None
    return norm_rope(x, 1, weight=weight, bias=bias, cos=cos, sin=sin, eps=eps)
