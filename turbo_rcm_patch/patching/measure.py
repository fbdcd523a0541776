"""The numbers by which the guard decides: the distance of a fast path from its original block, and
what both add to the error of the network.

A block is compared branch by branch. The term c_out * F(x) that each branch adds to the residual
streams is compared with the author's, so that a wrong gate of a small branch cannot hide in the
sum of a large one. The rounding of the author's stream is subtracted first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.linalg import vector_norm

from turbo_rcm_patch.ops.attention.api import attend
from turbo_rcm_patch.ops.attention.reference import norm_rope, split_heads
from turbo_rcm_patch.ops.attention.spec import AttentionSpec
from turbo_rcm_patch.ops.formats import Norms, Rotary

#: Largest relative error of a branch, per sample. int8 attention of random inputs has an error of
#: 0.03 to 0.04, exact attention of 0.005 (bf16).
BUDGET: Final = 0.10
#: Multiples of the budget that are allowed for the worst hundredth of the rows, and for the last
#: rows, which kernels mask.
ROW_ROOM: Final = 4.0
LAST_ROOM: Final = 2.0
_LAST_ROWS: Final = 64
#: Of a longer sequence about this many rows, evenly spaced, and all of the last rows are compared.
#: The number of rows in a kernel's tile is a power of two and the distance of two rows is odd, so
#: every position within a tile is reached.
_WHOLE: Final = 4096
#: Two computations that round once each differ by 0.3 of the epsilon (root mean square over evenly
#: spread mantissas). This much is subtracted, with room for a second rounding.
_ROUNDING_ALLOWANCE: Final = 0.5
#: Rows of an attention that are compared with fp32, evenly spaced.
_ROWS: Final = 64
#: Rows of a block's output that are read as the network's last Linear reads them.
_READ_ROWS: Final = 512
#: Bytes that the heads that are measured at a time may hold, where twice the queries are not
#: larger: a feed-forward holds more. For every key a head holds about four times its channels and
#: four times its rows in fp32.
_LEAST: Final = 32 << 20
_CHANNELS: Final = 4
_LOGITS: Final = 4
#: Largest number of parts into which the keys are split for the product with the values. Without
#: a split, one or two multiprocessors per head would loop over all keys.
_PARTS: Final = 16
#: Relative root mean square error of one rounding, in units of the dtype's epsilon.
_ROUNDING: Final = 0.204
#: Roundings between the residual stream and q or k, inside a branch, and outside the blocks.
_OF_OPERANDS: Final = 2.0
_INSIDE: Final = 4.0
_OUTSIDE: Final = 2.5

#: Phrases in the errors of code that cannot run here, or that memory is short for.
_CANNOT_RUN: Final = (
    *("out of memory", "allocate memory", "not enough memory", "no kernel image"),
    *("not implemented", "not supported", "not compiled with", "Could not run", "cpu tensor"),
)

#: What is compared of the residual streams before the first branch and after each branch.
Stages = Sequence[tuple[Tensor, ...]]
_Stream = Sequence[Tensor]


class Notes:
    """Records what the fast path of a block computes, for the guard.

    It keeps little memory: some rows of the residual streams, and the errors of the attention.

    Args:
        measures: True to measure the self-attention.
        wide: True to measure it with values in 16 bits too.

    Attributes:
        streams: Rows of the residual streams after each branch but the last.
        errors: The errors of the self-attention, as of `attention_errors`: as it ran, with values
            in 16 bits if that was asked for, and the author's. Empty if it was not measured.
        failed: Why it could not be measured, or "".
    """

    def __init__(self, *, measures: bool, wide: bool) -> None:
        self.streams: list[tuple[Tensor, ...]] = []
        self.errors: tuple[float, ...] = ()
        self.failed = ""
        self._measures, self._wide = measures, wide

    def saw_streams(self, *streams: Tensor) -> None:
        """Keep rows of the residual streams after a branch, fp32 [B, N, C] each."""
        self.streams.append(sample(streams))

    def saw_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        norms: Norms,
        rotary: Rotary | None,
        spec: AttentionSpec,
        out: Tensor,
    ) -> None:
        """Measure the self-attention.

        This is done at once: other ranks overwrite operands in their symmetric memory.

        Args:
            q: As for `attention.attend`.
            k: The same.
            v: The same.
            norms: The same.
            rotary: The same.
            spec: The same.
            out: What it returned.
        """
        if not self._measures:
            return
        try:
            results = [out]
            if self._wide:
                wide = replace(spec, pv="bf16")
                results.append(attend(q, k, v, spec=wide, norms=norms, rotary=rotary))
            self.errors = attention_errors(q, k, v, norms, rotary, spec.heads, *results)
        except Exception as error:
            self.failed = why_cannot_run(error)


def why_cannot_run(error: Exception) -> str:
    """Return why code cannot run here, by its error; raise an error that says something else.

    Kept, the error would hold what its traceback does until the garbage collector runs.
    """
    kinds = (NotImplementedError, ImportError, MemoryError, torch.OutOfMemoryError)
    device = getattr(torch, "AcceleratorError", RuntimeError)
    text = str(error) if type(error) in (RuntimeError, ValueError, AssertionError, device) else ""
    if not (isinstance(error, kinds) or any(phrase in text for phrase in _CANNOT_RUN)):
        raise error
    return f"the original code failed: {type(error).__name__}: {error}"


@dataclass(frozen=True, slots=True)
class Measure:
    """The distance of a block from its author's.

    Attributes:
        error: The largest error, scaled so that `BUDGET` is the limit for every kind of error.
        where: A description of the branch, the stream and the sample with that error.
    """

    error: float
    where: str


def sample(streams: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the rows of residual streams [B, N, C] that are compared, the last rows at the end.

    A few rows are kept of a long sequence, so that the guard needs little memory.
    """
    sampled = []
    for x in streams:
        every, last = _rows_of(x.shape[1])
        sampled.append(x if every == 1 else torch.cat([x[:, ::every], x[:, -last:]], 1))
    return tuple(sampled)


def _rows_of(length: int) -> tuple[int, int]:
    """Return the distance of two compared rows and the number of last rows."""
    every = 1 if length <= _WHOLE else -(-length // _WHOLE) | 1
    return every, min(_LAST_ROWS, max(1, length // 16))


def measure(fast: Stages, original: Stages, lengths: Sequence[int], dtype: torch.dtype) -> Measure:
    """Compare a block branch by branch.

    Args:
        fast: Rows of the fast path's streams, before the first branch the author's.
        original: Rows of the author's streams.
        lengths: The lengths of the streams.
        dtype: The model's dtype.
    """
    floor = 2 * (_ROUNDING_ALLOWANCE * torch.finfo(dtype).eps) ** 2
    streams = zip(zip(*fast, strict=True), zip(*original, strict=True), lengths, strict=True)
    errors = [_compare(xs, ys, n, floor) for xs, ys, n in streams]
    table = torch.nan_to_num(torch.stack(errors, 1), nan=inf)  # [stage, stream, kind, B]
    values = table.flatten().tolist()  # The only wait for the device.
    worst = max(range(len(values)), key=values.__getitem__)
    place, sample = divmod(worst, table.shape[3])
    stage, stream, kind = place // (3 * len(errors)), place // 3 % len(errors), place % 3
    where = f"branch {stage + 1}" + (f", stream {stream + 1}" if len(errors) > 1 else "")
    where += ("", ", its worst rows", ", its last rows")[kind]
    where += f", sample {sample}" if table.shape[3] > 1 else ""
    return Measure(values[worst], where)


def _compare(fast: _Stream, original: _Stream, length: int, floor: float) -> Tensor:
    """Compare one stream.

    Args:
        fast: The fast path's, [B, rows, C] before the first branch and after each branch.
        original: The author's.
        length: The number of all rows.
        floor: Square of the rounding of the author's stream, as a share of the stream's square.

    Returns:
        The errors of all rows, of the worst rows and of the last rows, [branches, 3, B].
    """
    every, last = _rows_of(length)
    off, adds, size = _squares(fast, original).unbind(1)
    excess = (off - floor * size).clamp_min(0)
    last_left, last_adds = excess[..., -last:], adds[..., -last:]
    if every > 1:
        excess, adds = excess[..., :-last], adds[..., :-last]
    typical = adds.median(-1).values
    # The error of the worst hundredth is relative to what these rows add or to the typical row,
    # whichever is larger.
    worst, where = torch.nan_to_num(excess, nan=inf).topk(max(1, excess.shape[-1] // 100), dim=-1)
    row_size = torch.maximum(typical, adds.gather(-1, where).mean(-1))
    least = torch.maximum(typical * last, last_adds.sum(-1))
    offs = torch.stack([excess.sum(-1), worst.mean(-1), last_left.sum(-1)], 1)
    sizes = torch.stack([adds.sum(-1), ROW_ROOM**2 * row_size, LAST_ROOM**2 * least], 1)
    return torch.where(offs == 0, offs, offs / sizes).sqrt()


def _squares(fast: _Stream, original: _Stream) -> Tensor:
    """Sum squares over the channels of some rows.

    Returns:
        fp32 [branches, 3, B, n]: the squares of the distance of the two terms that a branch adds,
        of the author's term, and of the author's stream after it.
    """
    norms: list[Tensor] = []
    before, off_before = original[0], None
    for x, y in zip(fast[1:], original[1:], strict=True):
        after = y.float()
        # (x1 - x0) - (y1 - y0) is computed as (x1 - y1) - (x0 - y0). The difference of two close
        # numbers is exact, and the first x0 - y0 is 0.
        now = x - after
        off = now if off_before is None else now - off_before
        norms += [vector_norm(vectors, dim=-1) for vectors in (off, after - before, after)]
        before, off_before = y, now
    return torch.stack(norms).square().view(-1, 3, *norms[0].shape)


# --- errors to fp32 ------------------------------------------------------------------------------


class Shares(NamedTuple):
    """Squares of the errors that a block adds, as shares of the square of what the network's last
    Linear reads of its output.

    Attributes:
        original: Share of the original block.
        fast: Share of the fast path.
    """

    original: float
    fast: float


def shares(
    fast: Stages,
    original: Stages,
    of_attention: Sequence[float],
    last: Tensor | None,
    dtype: torch.dtype,
    int8: bool,
) -> tuple[float, ...]:
    """Estimate what the original block and the fast path add to the network's error.

    An error counts by what the network's last Linear reads of it: a rounding is largest in the
    largest channels of the stream, which a trained network hardly reads, and a branch writes, with
    its errors, what is read.

    Three errors are drawn for both: the roundings of the residual stream (the author's after every
    branch, the fast path's once), the roundings inside the branches, and exact attention of
    operands that carry their own roundings. The errors of quantised attention are measured on a
    sample of rows. The error of int8 Linears is at most the distance between both.

    Args:
        fast: Rows of the fast path's streams, the video last.
        original: Rows of the author's.
        of_attention: What `attention_errors` returned for its self-attention; empty where that
            has no error of its own.
        last: Weight of the network's last Linear [Cout, C], None if it cannot be read.
        dtype: The model's dtype. For fp32 the roundings of bf16 are taken, because no 8-bit path
            comes near fp32.
        int8: True if Linears ran in int8.

    Returns:
        Squares of errors, as shares of the square of what the network's last Linear reads of the
        block's output: of the original, of the fast path with each attention of `of_attention` but
        without int8 Linears, and the least of the fast path with these Linears.
    """
    step = -(-original[-1][-1].shape[1] // _READ_ROWS)
    streams = [stage[-1][:, ::step].float() for stage in original]
    x, square = streams[-1], (_ROUNDING * _eps(dtype)) ** 2
    added = [(after - before).square() for before, after in pairwise(streams)]
    inside = square * _INSIDE * sum(added)
    of_attention = of_attention or (0.0, 0.0)
    rounded = square * sum([stream.square() for stream in streams[1:]])
    once = 0.0 if dtype == torch.float32 else square * x.square() + inside
    random = torch.Generator(x.device).manual_seed(0)
    drawn = torch.randn(x.shape, generator=random, device=x.device, dtype=x.dtype)
    ys = [
        torch.zeros_like(x),  # what is read of the output itself, with a minus
        fast[-1][-1][:, ::step].float(),
        x + drawn * (rounded + inside + of_attention[-1] * added[0]).sqrt(),
        *[x + drawn * (once + error * added[0]).sqrt() for error in of_attention],
    ]
    normed = F.layer_norm(x, x.shape[-1:])
    squares = []
    for y in ys:
        off = F.layer_norm(y, y.shape[-1:]) - normed
        off = off if last is None else off @ last.to(off).T
        squares.append(vector_norm(off).square())
    size, distance, of_original, *fasts = torch.stack(squares).tolist()
    least = max(0.0, distance - of_original) if int8 else 0.0
    return tuple(part / max(size, 1e-30) for part in (of_original, *fasts, least))


def predicted(blocks: Iterable[Shares], dtype: torch.dtype) -> float:
    """Return the patched network's error divided by the unpatched one's, if every error reaches
    the output with the same factor."""
    outside = _OUTSIDE * (_ROUNDING * _eps(dtype)) ** 2
    original, fast = map(sum, zip((outside, outside), *blocks, strict=True))
    return float((fast / original) ** 0.5)


def _eps(dtype: torch.dtype) -> float:
    return torch.finfo(torch.bfloat16 if dtype == torch.float32 else dtype).eps


@torch.no_grad()
def attention_errors(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    norms: Norms,
    rotary: Rotary | None,
    heads: int,
    *results: Tensor,
) -> tuple[float, ...]:
    """Compare results of an attention with fp32 on a sample of its rows, a few heads at a time.

    Args:
        q: [B, N, H*D], before its norm if `norms` holds that.
        k: [B, Nk, H*D].
        v: [B, Nk, H*D].
        norms: The norms that the kernel computed.
        rotary: The rotary table that the kernel read, or None.
        heads: H.
        *results: [B, N, H*D] each.

    Returns:
        The squares of errors, as shares of the output's square: of each result, and of exact
        attention in the model's dtype. All include the error that rounded operands cause.
    """
    batch, keys, dim = len(k), k.shape[1], q.shape[2] // heads
    step = -(-q.shape[1] // _ROWS)
    rows = None if rotary is None else (rotary[0][::step], rotary[1][::step])
    some_q = q[:, ::step]
    heads_of_q = _heads(some_q, norms.q, norms.q_bias, rows, norms.eps, dim)
    heads_of_k = _heads(k, norms.k, norms.k_bias, rotary, norms.eps, dim)
    # A separate generator, so that the caller's random numbers do not change. All heads share the
    # same draws: the mean of the squares does not change.
    random = torch.Generator(q.device).manual_seed(0)
    spread = _OF_OPERANDS**0.5 * _ROUNDING * _eps(q.dtype)
    shake_q, shake_k = (
        torch.normal(
            1.0, spread, (batch, 1, n, dim), generator=random, device=q.device,
            dtype=torch.float32,
        )
        for n in (some_q.shape[1], keys)
    )  # fmt: skip
    held = 4 * batch * keys * (_CHANNELS * dim + _LOGITS * some_q.shape[1])
    most = max(1, max(_LEAST, 2 * q.nbytes) // held)
    sums = torch.zeros(3 + len(results), device=q.device, dtype=torch.float32)
    for start in range(0, heads, most):
        some = slice(start * dim, (start + most) * dim)
        qh, kh = heads_of_q(some), heads_of_k(some)
        vh = split_heads(v[..., some], qh.shape[1])
        rounded = F.scaled_dot_product_attention(qh.to(v.dtype), kh.to(v.dtype), vh)
        truth, moved = _attend(qh, kh, vh, shake_q, shake_k)
        got = [split_heads(out[:, ::step, some], qh.shape[1]) for out in results]
        off = torch.stack([torch.zeros_like(truth), moved, *got, rounded]) - truth
        sums += vector_norm(off.flatten(1), dim=-1).square()
    size, of_operands, *errors = sums.tolist()
    return tuple((error + of_operands) / max(size, 1e-30) for error in errors)


def _heads(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    tables: Rotary | None,
    eps: float,
    dim: int,
) -> Callable[[slice], Tensor]:
    """Return what gives the heads of some channels, normalised and rotated, fp32 [B, H, N, D].

    The sums of a norm across all heads are computed once.

    Args:
        x: Queries or keys before their norm and rotary embedding, [B, N, H*D].
        weight: Weight of the norm, [H*D] across all heads or [D] per head, or None.
        bias: [D], or None.
        tables: (cos, sin), [N, D] each, or None.
        eps: Epsilon of the norm.
        dim: D.
    """
    cos, sin = tables or (None, None)
    scale = None  # what a norm across all heads multiplies by before its weight, [B, N, 1]
    if weight is not None and bias is None and len(weight) == x.shape[2]:
        square = vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32).square()
        scale = torch.rsqrt(square / len(weight) + eps)

    def of(some: slice) -> Tensor:
        part, part_weight = x[..., some], weight
        if weight is not None and scale is not None:
            part, part_weight = part * scale * weight[some].float(), None
        return norm_rope(
            part, part.shape[2] // dim, weight=part_weight, bias=bias, cos=cos, sin=sin, eps=eps
        )

    return of


def _attend(
    q: Tensor, k: Tensor, v: Tensor, shake_q: Tensor, shake_k: Tensor
) -> tuple[Tensor, ...]:
    """Compute attention in fp32 for few rows, and the same with q and k shaken.

    If the user has allowed TF32, its roundings, an eighth of bf16's, add up to 6 % to the author's
    share of a bf16 model (simulated). They can double that of an fp16 model, where the error of
    int8 is hundreds of times larger.

    Args:
        q: [B, H, R, D].
        k: [B, H, N, D].
        v: [B, H, N, D], in any dtype.
        shake_q: What q is multiplied by, [B, 1, R, D].
        shake_k: What k is multiplied by, [B, 1, N, D].

    Returns:
        Both, [B, H, R, D].
    """
    batch, heads, rows, dim = q.shape
    keys = v.shape[2]
    parts = next(n for n in range(_PARTS, 0, -1) if keys % n == 0)
    weights = []
    for shaken in (False, True):
        q, k = (q * shake_q, k * shake_k) if shaken else (q, k)
        logits = torch.bmm((q * dim**-0.5).flatten(0, 1), k.flatten(0, 1).mT)
        weights.append(logits.softmax(-1).view(-1, rows, parts, keys // parts).transpose(1, 2))
        del logits
    by_part = torch.cat(weights, 2).flatten(0, 1)  # [B * H * parts, 2 * R, N / parts]
    del weights
    wide = v.to(torch.float32, memory_format=torch.contiguous_format)
    out = torch.bmm(by_part, wide.reshape(-1, keys // parts, dim))
    return out.view(batch, heads, parts, -1, rows, dim).sum(2).unbind(2)
