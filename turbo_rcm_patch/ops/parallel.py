"""Attention over a sequence whose tokens several ranks share: Ulysses, ring, and both.

Ulysses: every rank sends each other rank a share of the heads of its tokens, computes the
attention of its own heads over all tokens, and sends the output back. Ring: keys and values are
passed on from rank to rank, and partial results are merged by their logsumexp in fp32. Unified:
Ulysses within groups of neighbours, and a ring among those groups.

Norms, rotary embedding, smoothing, Hadamard matrix and quantisation run on the local tokens before
anything is sent, so that int8 q and k with their scales and e4m3 or 16-bit v travel. The mean of k
and the scale of v belong to the whole sequence: one small gather makes them the same on every
rank. Blocks of keys that share a scale begin where they would in one piece; the few tokens of a
block that lie on the next rank are fetched before it is quantised.

Where a sequence is long, the heads are exchanged in two shares: while the attention of the first
runs, the second is on its way, and so is the output of the first while the second runs. The last
attention begins with the queries of other ranks, whose output travels while it goes on with its
own.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from types import ModuleType
from typing import Any, Final, Literal, cast
from zlib import crc32

import torch
from torch import Tensor

from turbo_rcm_patch.config import Impl, PVDType
from turbo_rcm_patch.errors import (
    ConfigError,
    MaskError,
    OpError,
    RankMismatchError,
    ShapeError,
    TurboRCMError,
)
from turbo_rcm_patch.kernels.operands import QMAX
from turbo_rcm_patch.ops import shards as reference_shards
from turbo_rcm_patch.ops.attention import with_positive_scale
from turbo_rcm_patch.ops.batches import MAX_BATCH
from turbo_rcm_patch.ops.checks import (
    check_attention,
    check_norm,
    check_out_dtype,
    check_same_device,
    refuse_exact_heads,
    rotary_parts,
)
from turbo_rcm_patch.ops.dispatch import decider, resolve_impl, resolve_pv, resolved
from turbo_rcm_patch.ops.emulation import MEAN_SAMPLES
from turbo_rcm_patch.ops.exchange import (
    ContextParallel,
    Pending,
    all_to_all,
    concatenated,
    gather,
    pass_on,
    split_evenly,
    told,
)
from turbo_rcm_patch.ops.modes import as_documented, refuse_derivative
from turbo_rcm_patch.ops.operation import Operation
from turbo_rcm_patch.ops.reference import sdpa_attention, split_heads
from turbo_rcm_patch.ops.registry import columns_of, head_spans, write_columns
from turbo_rcm_patch.ops.sage import sage_attention
from turbo_rcm_patch.ops.shards import PADDED_TO, Tokens, padded
from turbo_rcm_patch.ops.sparse_linear import Sparsity, sparse_linear_attention
from turbo_rcm_patch.ops.spec import AttentionSpec, key_block

_DTYPES: Final = ("bfloat16", "float16", "float32", "float64")
_NORMS: Final = ("none", "across heads", "per head", "layer norm per head")
_PVS: Final = ("auto", "fp8", "bf16", "fp16")
#: From so many tokens on heads are exchanged in two shares. Below, every message costs more time
#: on the host than it hides.
_LONG: Final = 16_384
#: Queries of a program of the attention kernel and programs at a time, on an H100 or H200. On
#: other cards, where they are others, shares are as right but may not be as fast.
_ROWS, _SLOTS = 192, 132
#: What comes from every rank, once it is there.
_Came = Pending[list[list[Tensor]]]
#: How what ranks have to agree on is written as a number: words, or "int", or "float", or "heads".
Kind = Sequence[str] | Literal["int", "float", "heads"]
#: Sets of heads below this are written as bits, others as a digest.
_HEADS_AS_BITS: Final = 63
_HEADER: Final[dict[str, Kind]] = {
    "ulysses degree": "int",
    "batch": "int",
    "channels": "int",
    "heads": "int",
    "dtype": _DTYPES,
    "out_dtype": _DTYPES,
    "attention": ("int8", "int4", "exact", "sage", "auto"),
    "what decides for auto": "int",
    "pv": _PVS,
    "pv on this device": _PVS,
    "smooth_k": "int",
    "sm_scale": "float",
    "eps": "float",
    "norm_q": _NORMS,
    "norm_k": _NORMS,
    "rotary": ("none", *_DTYPES),
    "impl": ("triton", "reference"),
    "exact_heads": "heads",
    "topk": "float",
    "block_q": "int",
    "block_k": "int",
}
#: How many numbers ranks tell each other in front of a forward and at its beginning, and what
#: stands for the tokens in front of it.
_ROW: Final = 40
_AHEAD: Final = -1


def parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    parallel: ContextParallel,
    *,
    norm_q: Tensor | None = None,
    norm_k: Tensor | None = None,
    norm_q_bias: Tensor | None = None,
    norm_k_bias: Tensor | None = None,
    rotary: tuple[Tensor, Tensor] | None = None,
    lengths: Sequence[int] | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """softmax(sm_scale * q k^T) v over the tokens of all ranks of `parallel`, for the local q.

    Every rank calls it with its own tokens, of any number above 0, and with the same spec. Heads
    need not divide by the number of ranks. With `exact_heads` it runs in two parts, as
    `attention_skip` does: the heads that quantise, and after them the others. There is no
    gradient.

    Args:
        q: [B, N, H*D], bf16, fp16 or fp32, the local tokens.
        k: [B, N, H*D], dtype of q.
        v: [B, N, H*D], dtype of q.
        spec: How the attention is computed; not causal.
        parallel: The process groups.
        norm_q: Weight of the norm of q; see `attention_skip` for it and the next three.
        norm_k: Weight of the norm of k.
        norm_q_bias: Bias of the norm of q, which makes it a layer norm.
        norm_k_bias: Bias of the norm of k, likewise.
        rotary: (cos, sin) of the local tokens, each [N, D] or [1, N, 1, D].
        lengths: What `agreed_lengths` gave for such arguments. None asks the other ranks, which
            costs a small exchange through the host.
        out_dtype: dtype of the result; q's by default.

    Returns:
        [B, N, H*D], contiguous.

    Raises:
        RankMismatchError: The arguments of the ranks do not fit together, or a rank refused its
            own; on every rank alike. On a rank that refused, the reason is its cause.
    """
    norms = norm_q, norm_k, norm_q_bias, norm_k_bias
    given = [] if lengths is None else list(lengths)
    args = _asked(
        parallel, q, given,
        lambda: _checked(q, k, v, spec, parallel, norms, rotary, given, out_dtype),
    )  # fmt: skip
    out: Tensor = parallel_attention_forward(*args)
    return out


def parallel_sparse_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    spec: AttentionSpec,
    sparsity: Sparsity,
    parallel: ContextParallel,
    *,
    norm_q: Tensor | None = None,
    norm_k: Tensor | None = None,
    rotary: tuple[Tensor, Tensor] | None = None,
    lengths: Sequence[int] | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`sparse_linear_attention` over the tokens of all ranks, by Ulysses: blocks of keys are
    chosen, and the linear branch is computed, head by head over the whole sequence, so the result
    is that of one device, bit for bit. q and k travel as they are after their norm and rotary
    embedding, in the dtype that they are rounded to in any case.

    Args:
        q: [B, N, H*D], the local tokens; see `sparse_linear_attention` for it and the next ones.
        k: [B, N, H*D].
        v: [B, N, H*D].
        weight: [D, D] of proj_l, the same on every rank.
        bias: [D] or None, likewise.
        spec: How the sparse part is computed.
        sparsity: Which keys it sees.
        parallel: The process groups, without a ring.
        norm_q: Weight of the norm of q.
        norm_k: Weight of the norm of k.
        rotary: (cos, sin) of the local tokens.
        lengths: As in `parallel_attention`.
        out_dtype: dtype of the result; q's by default.

    Returns:
        [B, N, H*D], contiguous.

    Raises:
        RankMismatchError: As in `parallel_attention`.
        OpError: Likewise; also for a ring.
    """
    norms = norm_q, norm_k, None, None
    given = [] if lengths is None else list(lengths)
    args = _asked(
        parallel, q, given,
        lambda: _checked(q, k, v, spec, parallel, norms, rotary, given, out_dtype, sparse=True),
    )  # fmt: skip
    cos, sin = args[7:9]
    if not given:
        given = _agree(parallel, q.device, _header(parallel, q, norms, cos, args[11:], sparsity))
    layout = _layout_of(parallel, tuple(given), spec.heads)
    head_dim = q.shape[2] // spec.heads
    own = _shards(resolve_impl(spec.impl, q.device))
    whole = _exchanged(
        Tokens(q, spec.heads, norm_q, None, cos, sin, spec.eps),
        Tokens(k, spec.heads, norm_k, None, cos, sin, spec.eps),
        v, layout, own,
    )  # fmt: skip
    if layout.own_heads:
        out = sparse_linear_attention(
            *whole, weight, bias, replace(spec, heads=layout.own_heads), sparsity,
            out_dtype=out_dtype,
        )  # fmt: skip
    else:
        # What the ranks with heads refuse is refused here too.
        sparse_linear_attention(q[:, :1], k[:, :1], v[:, :1], weight, bias, spec, sparsity)
        out = whole[0].to(args[-1])
    return _outputs(out, layout, q.shape[1], head_dim).contiguous()


def agreed_lengths(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    parallel: ContextParallel,
    *,
    norm_q: Tensor | None = None,
    norm_k: Tensor | None = None,
    norm_q_bias: Tensor | None = None,
    norm_k_bias: Tensor | None = None,
    rotary: tuple[Tensor, Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
) -> list[int]:
    """Ask the other ranks, once for many calls: the `lengths` that `parallel_attention` takes.

    Every rank calls it at the same point, as the first block of a forward does. They hold for
    calls that differ from this one in the values of their tensors alone.

    Raises:
        RankMismatchError: As in `parallel_attention`.
    """
    norms = norm_q, norm_k, norm_q_bias, norm_k_bias
    args = _asked(
        parallel, q, [], lambda: _checked(q, k, v, spec, parallel, norms, rotary, [], out_dtype)
    )
    return _agree(
        parallel, args[0].device, _header(parallel, args[0], args[3:7], args[7], args[11:])
    )


def agreed_forward(
    x: Tensor,
    tokens: int,
    spec: AttentionSpec,
    parallel: ContextParallel,
    *,
    same: Mapping[str, tuple[Kind, object]] | None = None,
    free: Sequence[int] = (),
) -> tuple[list[int], list[list[int]]]:
    """Ask the other ranks, once at the beginning of a model's forward: the `lengths` that every
    attention of this forward takes.

    Args:
        x: [B, ..., C], an input of the model's blocks.
        tokens: That this rank has.
        spec: How its attentions are computed.
        parallel: The process groups.
        same: What else has to be the same on every rank, by name: its kind and its value.
        free: Numbers to tell the others.

    Returns:
        The lengths, and what every rank told.

    Raises:
        RankMismatchError: The forwards of the ranks do not fit together; on every rank alike.
    """
    impl = resolve_impl(spec.impl, x.device)
    values: dict[str, object] = {
        "ulysses degree": parallel.ulysses_degree,
        "batch": x.shape[0],
        "channels": x.shape[-1],
        "heads": spec.heads,
        "dtype": x.dtype,
        "attention": spec.attention,
        "what decides for auto": decider(x.device) if spec.attention == "auto" else 0,
        "pv": spec.pv,
        "pv on this device": resolve_pv(spec.pv, x.device),
        "smooth_k": spec.smooth_k,
        "impl": impl,
    }
    kinds = {name: _HEADER[name] for name in values}
    for name, (kind, value) in (same or {}).items():
        kinds[name], values[name] = kind, value
    codes = [_code(value, kinds[name]) for name, value in values.items()]
    table = _told_row([tokens, *codes, *free], parallel, x.device)
    _refuse_ahead(table)
    end = 1 + len(codes)
    _refuse_differing("the forward of a parallel model", [row[1:end] for row in table], kinds)
    return [row[0] for row in table], [row[end : end + len(free)] for row in table]


def agreed_ahead(
    values: Sequence[int], parallel: ContextParallel, device: torch.device
) -> list[list[int]]:
    """Tell the other ranks a few numbers in front of a model's forward, before its header.

    The message has the size of that header and a mark, so that a rank that sends its header at
    once is noticed, and nobody waits.

    Args:
        values: The numbers.
        parallel: The process groups.
        device: Of the model.

    Returns:
        What every rank told.

    Raises:
        RankMismatchError: Some ranks sent the header of their forward; on every rank alike.
    """
    table = _told_row([_AHEAD, *values], parallel, device)
    _refuse_ahead(table, all_of=True)
    return [each[1 : 1 + len(values)] for each in table]


def _told_row(
    row: Sequence[int], parallel: ContextParallel, device: torch.device
) -> list[list[int]]:
    assert len(row) <= _ROW
    return told("header", [*row, *[0] * (_ROW - len(row))], parallel, device)


def _refuse_ahead(table: Sequence[Sequence[int]], all_of: bool = False) -> None:
    ahead = [rank for rank, row in enumerate(table) if row[0] == _AHEAD]
    if len(ahead) != (len(table) if all_of else 0):
        raise RankMismatchError(
            "the forward of a parallel model",
            expected="cuda_graphs the same on every rank",
            got=f"cuda_graphs=True on rank {', '.join(map(str, ahead))} alone",
        )


def _asked(
    parallel: ContextParallel, q: Tensor, lengths: list[int], check: Callable[[], tuple[Any, ...]]
) -> tuple[Any, ...]:
    """What a check gives; and what this rank refuses is refused on all."""
    if not isinstance(parallel, ContextParallel):
        raise ConfigError("parallel", expected="a ContextParallel", got=type(parallel).__name__)
    try:
        return check()
    except TurboRCMError as error:
        if not lengths and isinstance(q, Tensor):
            _agree(parallel, q.device, None, error)
        raise  # every rank refuses


def _checked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    parallel: ContextParallel,
    norms: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None],
    rotary: tuple[Tensor, Tensor] | None,
    lengths: list[int],
    out_dtype: torch.dtype | None,
    sparse: bool = False,
) -> tuple[Any, ...]:
    """The arguments of the registered operation."""
    if sparse and parallel.ring is not None:
        raise OpError(
            "sparse_linear_attention in a ring",
            expected="all keys of a head on one rank, where the best are chosen",
            remedy="Use Ulysses",
        )
    check_attention(q, k, v, spec)
    if sparse:
        refuse_exact_heads(spec, "parallel_sparse_linear_attention")
    if q.shape[1] != k.shape[1]:
        raise OpError(
            "parallel_attention",
            expected="self-attention: as many keys as queries",
            got=f"{q.shape[1]} queries and {k.shape[1]} keys",
            remedy="Keys that every rank has need no exchange: use attention_skip",
        )
    if q.shape[0] > MAX_BATCH:
        raise ShapeError(
            "q",
            expected=f"at most {MAX_BATCH} samples",
            got=str(q.shape[0]),
            remedy="Call it for parts of the batch",
        )
    if spec.causal:
        raise MaskError("causal=True", expected="no mask over several ranks")
    if spec.attention == "sage" and parallel.ring is not None:
        raise OpError(
            'attention="sage" in a ring',
            expected="an attention that gives its logsumexp",
            remedy='Use Ulysses, or attention="int8" or "exact"',
        )
    channels, (norm_q, norm_k, norm_q_bias, norm_k_bias) = q.shape[2], norms
    check_norm("norm_q", norm_q, norm_q_bias, channels, spec.heads)
    check_norm("norm_k", norm_k, norm_k_bias, channels, spec.heads)
    cos, sin = rotary_parts(rotary, q.shape[1], k.shape[1], channels // spec.heads)
    check_out_dtype(out_dtype)
    check_same_device(
        q.device, norm_q=norm_q, norm_k=norm_k, norm_q_bias=norm_q_bias, norm_k_bias=norm_k_bias,
        cos=cos, sin=sin,
    )  # fmt: skip
    refuse_derivative(
        "parallel_attention",
        q, k, v, *norms,
        expected="inference: no gradient crosses the ranks",
        remedy="Run it under torch.no_grad(), or train without context parallelism",
    )  # fmt: skip
    if lengths and (len(lengths) != parallel.size or lengths[parallel.rank] != q.shape[1]):
        raise OpError(
            "lengths",
            expected=f"of {parallel.size} ranks, {q.shape[1]} at {parallel.rank}",
            got=str(lengths),
        )
    q, norm_q, norm_q_bias, sm_scale = with_positive_scale(
        q, norm_q, norm_q_bias, spec.scale_of(channels // spec.heads)
    )
    return (
        q, k, v, norm_q, norm_k, norm_q_bias, norm_k_bias, cos, sin,
        lengths, parallel.name, spec.heads, spec.attention,
        spec.pv, spec.smooth_k, sm_scale, spec.eps, spec.impl, list(spec.exact_heads),
        q.dtype if out_dtype is None else out_dtype,
    )  # fmt: skip


# --- agreement -----------------------------------------------------------------------------------


def _code(value: object, kind: Kind) -> int:
    if kind == "float":
        return int(struct.unpack("<q", struct.pack("<d", value))[0])
    if kind == "int":
        return int(cast("int", value))
    if kind == "heads":
        heads = cast("Sequence[int]", value)
        if max(heads, default=0) >= _HEADS_AS_BITS:
            return -1 - crc32(repr(list(heads)).encode())
        return sum(1 << head for head in heads)
    return kind.index(str(value).removeprefix("torch."))


def _word(code: int, kind: Kind) -> str:
    if kind == "float":
        return repr(struct.unpack("<d", struct.pack("<q", code))[0])
    if kind == "heads":
        return str([h for h in range(_HEADS_AS_BITS) if code >> h & 1]) if code >= 0 else "others"
    return str(code) if kind == "int" else kind[code]


def _norm_word(weight: Tensor | None, bias: Tensor | None, channels: int) -> str:
    if weight is None:
        return "none"
    if bias is not None:
        return "layer norm per head"
    return "across heads" if weight.numel() == channels else "per head"


def _header(
    parallel: ContextParallel,
    q: Tensor,
    norms: Sequence[Tensor | None],
    cos: Tensor | None,
    numbers: tuple[int, str, str, bool, float, float, str, Sequence[int], torch.dtype],
    sparsity: Sparsity | None = None,
) -> tuple[int, dict[str, object]]:
    """The local tokens, and what `_HEADER` lists; the numbers are the operation's last
    arguments."""
    batch, tokens, channels = q.shape
    heads, attention, pv, smooth_k, sm_scale, eps, impl, exact_heads, out_dtype = numbers
    norm_q, norm_k, norm_q_bias, norm_k_bias = norms
    return tokens, {
        "ulysses degree": parallel.ulysses_degree,
        "batch": batch,
        "channels": channels,
        "heads": heads,
        "dtype": q.dtype,
        "out_dtype": out_dtype,
        "attention": attention,
        # Ranks whose tables differ would decide differently, and wait for each other.
        "what decides for auto": (
            decider(q.device) if attention == "auto" and sparsity is None else 0
        ),
        "pv": pv,
        "pv on this device": resolve_pv(cast("PVDType", pv), q.device),
        "smooth_k": smooth_k,
        "sm_scale": sm_scale,
        "eps": eps,
        "norm_q": _norm_word(norm_q, norm_q_bias, channels),
        "norm_k": _norm_word(norm_k, norm_k_bias, channels),
        "rotary": "none" if cos is None else cos.dtype,
        "impl": resolve_impl(cast("Impl", impl), q.device),
        "exact_heads": exact_heads,
        "topk": 0.0 if sparsity is None else sparsity.topk,
        "block_q": 0 if sparsity is None else sparsity.block_q,
        "block_k": 0 if sparsity is None else sparsity.block_k,
    }


def _agree(
    parallel: ContextParallel,
    device: torch.device,
    own: tuple[int, Mapping[str, object]] | None,
    error: Exception | None = None,
) -> list[int]:
    """The number of tokens of every rank, when all agree on the rest.

    Through the host, because sizes of messages depend on it: by a CPU backend where the group has
    one beside the GPU's, which waits for no kernel.

    Args:
        own: Number of tokens and what `_HEADER` lists; None where this rank refuses because of
            `error`.

    Returns:
        Nothing where every rank refuses.

    Raises:
        RankMismatchError: They do not, or some refused.
    """
    # Whether this rank refuses, its number of tokens, and the rest.
    row = [int(own is None), 0, *(0 for _ in _HEADER)]
    if own is not None:
        row[1:] = own[0], *(_code(own[1][name], kind) for name, kind in _HEADER.items())
    table = told("header", row, parallel, device)
    refused = [str(rank) for rank, row in enumerate(table) if row[0]]
    if error is not None and len(refused) == len(table):
        return []
    if refused:
        raise RankMismatchError(
            "parallel_attention",
            expected="arguments that every rank accepts",
            got=f"a refusal on rank {', '.join(refused)}, which says why",
        ) from error
    _refuse_differing("parallel_attention", [row[2:] for row in table], _HEADER)
    return [row[1] for row in table]


def _refuse_differing(
    what: str, table: Sequence[Sequence[int]], kinds: Mapping[str, Kind]
) -> None:
    differ = []
    for at, (name, kind) in enumerate(kinds.items()):
        codes = [row[at] for row in table]
        if len(set(codes)) > 1:
            words = (f"{_word(c, kind)} on rank {rank}" for rank, c in enumerate(codes))
            differ.append(f"{name} {', '.join(words)}")
    if differ:
        raise RankMismatchError(what, expected="the same on every rank", got="; ".join(differ))


# --- layout --------------------------------------------------------------------------------------


class _Layout:
    """Who has which tokens and which heads.

    Args:
        parallel: The process groups.
        lengths: Tokens of every rank.
        heads: H.

    Attributes:
        parallel: As given.
        lengths: As given.
        here: This rank among those near it, which are those it exchanges heads with.
        near: Tokens of the near ranks.
        chunks: Tokens of each group of near ranks: of each part of the ring.
        total: Of the whole sequence.
        chunk: Of the near ranks together.
        heads: Heads of the near ranks.
        own_heads: Heads of this one.
        first: The first local token of the sample that k's mean is taken over, which is tokens 0,
            step, 2 * step of the whole sequence.
        step: Every how many tokens there is one.
        sampled: Tokens of that sample.
        mine: Which of this rank's tokens each near rank quantises as keys.
        theirs: How many of each near rank's tokens this rank quantises.
        parts: For each near rank: how many keys it quantises from its own tokens alone, and how
            many in the last block, which it completes with tokens of others.
    """

    def __init__(self, parallel: ContextParallel, lengths: Sequence[int], heads: int) -> None:
        degree, lengths = parallel.ulysses_degree, list(lengths)
        self.parallel, self.here, self.lengths = parallel, parallel.ulysses_rank, lengths
        self.near = lengths[parallel.ring_rank * degree :][:degree]
        self.chunks = [sum(lengths[i : i + degree]) for i in range(0, len(lengths), degree)]
        self.total, self.chunk = sum(lengths), sum(self.near)
        self.heads = split_evenly(heads, degree)
        self.own_heads = self.heads[self.here]
        self.step = max(1, -(-self.total // MEAN_SAMPLES))
        self.first = -sum(lengths[: parallel.rank]) % self.step
        self.sampled = -(-self.total // self.step)

        # All keys but the first begin at multiples of PADDED_TO, as they would in one piece.
        ends = list(accumulate(self.near))
        held = list(zip([0, *ends], ends, strict=False))
        ends = [min(padded(end), self.chunk) for end in ends]
        owned = list(zip([0, *ends], ends, strict=False))
        first = held[self.here][0]
        shares = [_shared(held[self.here], other) for other in owned]
        self.mine = [slice(start - first, stop - first) for start, stop in shares]
        shares = [_shared(other, owned[self.here]) for other in held]
        self.theirs = [stop - start for start, stop in shares]
        self.parts = []
        for own, keys in zip(held, owned, strict=True):
            start, stop = _shared(own, keys)
            whole, main = keys[1] - keys[0], stop - start
            if main < whole:
                main = main // PADDED_TO * PADDED_TO
            self.parts.append((main, whole - main))

    def shares(self, heads: int) -> list[tuple[slice, _Layout]]:
        """Ranges of the H heads that are exchanged one after the other, each with its layout: one,
        or two where the attention takes no longer in two launches."""
        parallel, degree = self.parallel, len(self.heads)
        groups, ends = -(-heads // degree), [heads]
        if parallel.ring is None and degree > 1 and self.total >= _LONG:
            whole = _waves(self.total, groups)
            for first in range((groups + 1) // 2, groups):
                if _waves(self.total, first) + _waves(self.total, groups - first) <= whole:
                    ends = [first * degree, heads]
                    break
        lengths = tuple(self.lengths)
        return [
            (slice(start, end), _layout_of(parallel, lengths, end - start))
            for start, end in zip([0, *ends], ends, strict=False)
        ]

    def queries(self, last: bool) -> list[list[int]]:
        """Near ranks whose queries are computed together, in the order of time: those of others
        first in the last share, where that takes no longer."""
        others = [rank for rank in range(len(self.near)) if rank != self.here]
        own = self.near[self.here]
        apart = _waves(self.total - own, self.own_heads) + _waves(own, self.own_heads)
        if (
            last and others and self.parallel.ring is None and self.total >= _LONG
            and apart <= _waves(self.total, self.own_heads)
        ):  # fmt: skip
            return [others, [self.here]]
        return [list(range(len(self.near)))]

    def by_heads(self, *tensors: Tensor, dim: int = 1, channels: int = 1) -> list[list[Tensor]]:
        """Tensors in the shares of the ranks, along a dimension of H * channels."""
        sizes = [n * channels for n in self.heads]
        return [
            list(each) for each in zip(*(torch.split(x, sizes, dim) for x in tensors), strict=True)
        ]


def _waves(tokens: int, heads: int) -> int:
    """How many rounds the programs of the attention take, `_SLOTS` at a time."""
    return -(-(-(-tokens // _ROWS) * heads) // _SLOTS)


def _shared(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    """What two ranges have in common, from first to last."""
    start = max(one[0], other[0])
    return start, max(start, min(one[1], other[1]))


# --- the operation -------------------------------------------------------------------------------


def _shards(impl: Literal["triton", "reference"]) -> ModuleType:
    if impl == "reference":
        return reference_shards
    from turbo_rcm_patch.kernels.portable import shards

    return shards


def _prepared(own: ModuleType, tokens: Tokens, dtype: torch.dtype) -> Tensor:
    """q or k after its norm and rotary embedding; in plain torch where no kernel has this norm."""
    x: Tensor | None = own.prepared(tokens, dtype)
    return reference_shards.prepared(tokens, dtype) if x is None else x


@lru_cache(maxsize=64)
def _layout_of(parallel: ContextParallel, lengths: tuple[int, ...], heads: int) -> _Layout:
    return _Layout(parallel, lengths, heads)


@as_documented
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    norm_q: Tensor | None,
    norm_k: Tensor | None,
    norm_q_bias: Tensor | None,
    norm_k_bias: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    lengths: list[int],
    parallel: str,
    heads: int,
    attention: str,
    pv: str,
    smooth_k: bool,
    sm_scale: float,
    eps: float,
    impl: str,
    exact_heads: list[int],
    out_dtype: torch.dtype,
) -> Tensor:
    groups = ContextParallel.named(parallel)
    head_dim, device = q.shape[2] // heads, q.device
    if not lengths:
        norms = norm_q, norm_k, norm_q_bias, norm_k_bias
        numbers = heads, attention, pv, smooth_k, sm_scale, eps, impl, exact_heads, out_dtype
        lengths = _agree(groups, device, _header(groups, q, norms, cos, numbers))
    if not q.shape[0]:  # as on every rank
        return q.new_empty(q.shape, dtype=out_dtype)
    layout = _layout_of(groups, tuple(lengths), heads)
    queries = Tokens(q, heads, norm_q, norm_q_bias, cos, sin, eps)
    keys = Tokens(k, heads, norm_k, norm_k_bias, cos, sin, eps)
    asked: Any = {"attention": attention, "pv": pv, "impl": impl}
    # By the whole sequence, which is the same on every rank.
    choice = resolved(
        AttentionSpec(heads=heads, **asked), device, layout.total, layout.total, head_dim
    )
    how = choice, smooth_k, sm_scale, out_dtype
    if not exact_heads or choice.attention not in QMAX:
        return _whole(queries, keys, v, layout, *how)
    own = _shards(cast("Literal['triton', 'reference']", choice.impl))
    # Norms may go across all heads, so they come first. The reference takes q and k unrounded, a
    # kernel in the dtype of v, as on one device.
    dtype = torch.float32 if choice.impl == "reference" else v.dtype
    ready = [_prepared(own, tokens, dtype) for tokens in (queries, keys)]
    out = q.new_empty(q.shape, dtype=out_dtype)
    marked = [head in exact_heads for head in range(heads)]
    for chosen, part in ((False, choice), (True, replace(choice, attention="exact"))):
        spans = head_spans([one == chosen for one in marked], head_dim)
        if not spans:
            continue
        count = marked.count(chosen)
        of_q, of_k = (
            Tokens(columns_of(x, spans), count, None, None, None, None, eps) for x in ready
        )
        made = _whole(
            of_q, of_k, columns_of(v, spans), _layout_of(groups, tuple(lengths), count),
            part, *how[1:],
        )  # fmt: skip
        write_columns(out, made, spans)
    return out


def _whole(
    q: Tokens,
    k: Tokens,
    v: Tensor,
    layout: _Layout,
    choice: AttentionSpec,
    smooth_k: bool,
    sm_scale: float,
    out_dtype: torch.dtype,
) -> Tensor:
    """The attention of all heads that q has, each in the same way: [B, N, H*D]."""
    own = _shards(cast("Literal['triton', 'reference']", choice.impl))
    if choice.attention in QMAX:
        return _quantised(
            q, k, v, layout, own,
            qmax=QMAX[choice.attention], sm_scale=sm_scale, smooth_k=smooth_k,
            out_dtype=out_dtype, pv=cast("Literal['fp8', 'bf16', 'fp16']", choice.pv),
        )  # fmt: skip
    sage = choice.attention == "sage"
    out = _exact(q, k, v, layout, own, sm_scale, out_dtype, sage, smooth_k)
    return _outputs(out, layout, v.shape[1], v.shape[2] // q.heads).contiguous()


parallel_attention_forward = Operation("turbo_rcm_patch::parallel_attention_forward", _forward)


@parallel_attention_forward.register_fake
def _fake(q: Tensor, *args: Any) -> Tensor:
    return q.new_empty(q.shape, dtype=args[-1])


def _exchanged(
    q: Tokens, k: Tokens, v: Tensor, layout: _Layout, own: ModuleType
) -> tuple[Tensor, Tensor, Tensor]:
    """q and k after their norms and rotary embedding, and v, [B, n, h*D]: this rank's heads of the
    tokens of its Ulysses group."""
    head_dim = v.shape[2] // q.heads
    pending = []
    for what, tokens in (("q", q), ("k", k)):
        x = _prepared(own, tokens, v.dtype)
        pending.append(_tokens_by_heads(what, x, layout, head_dim))
    pending.append(_tokens_by_heads("v", v, layout, head_dim))
    q_all, k_all, v_all = (concatenated([x for (x,) in p.wait()], 1) for p in pending)
    return q_all, k_all, v_all


def _exact(
    q: Tokens,
    k: Tokens,
    v: Tensor,
    layout: _Layout,
    own: ModuleType,
    sm_scale: float,
    out_dtype: torch.dtype,
    sage: bool,
    smooth_k: bool,
) -> Tensor:
    """The attention of this rank's heads for the queries of its Ulysses group."""
    q_all, *kv = _exchanged(q, k, v, layout, own)
    heads = layout.own_heads
    if not heads:
        return q_all.to(out_dtype)

    def attend(kv: Sequence[Tensor], n_kv: int, partial: bool) -> tuple[Tensor, Tensor | None]:
        qh, kh, vh = (split_heads(x, heads) for x in (q_all, *kv))
        lse = None
        if partial:
            out, lse = own.exact_with_lse(qh, kh, vh, sm_scale)
        elif sage:
            out = sage_attention(qh, kh, vh, sm_scale=sm_scale, causal=False, smooth_k=smooth_k)
        else:
            out = sdpa_attention(qh, kh, vh, sm_scale=sm_scale)
        return out.transpose(1, 2).flatten(2), lse

    def shapes(n_kv: int) -> list[tuple[int, ...]]:
        return [(x.shape[0], n_kv, x.shape[2]) for x in kv]

    return _around(kv, shapes, attend, layout).to(out_dtype)


def _quantised(
    q: Tokens,
    k: Tokens,
    v: Tensor,
    layout: _Layout,
    own: ModuleType,
    *,
    qmax: int,
    sm_scale: float,
    smooth_k: bool,
    pv: Literal["fp8", "bf16", "fp16"],
    out_dtype: torch.dtype,
) -> Tensor:
    """The attention of quantised operands: [B, N, H*D] of this rank's own tokens."""
    (batch, tokens, channels), fp8 = v.shape, pv == "fp8"
    head_dim, group = channels // q.heads, layout.parallel.ulysses
    near, parts = layout.near, layout.parts
    width, block = own.width(head_dim), key_block(head_dim)
    shares = layout.shares(q.heads)

    def start(what: str, x: Tensor, at: int, shapes: Sequence[tuple[int, ...]]) -> _Came:
        heads, one = shares[at]
        pieces = one.by_heads(x[:, heads])
        sizes = [[(batch, one.own_heads, *shape)] for shape in shapes]
        return all_to_all(what, pieces, sizes, group)

    def start_values(x: Tensor, at: int) -> _Came:
        if fp8:
            return start("v", x, at, [(width, padded(n)) for n, _ in parts])
        heads, one = shares[at]
        of_heads = slice(heads.start * head_dim, heads.stop * head_dim)
        return _tokens_by_heads("v", x[..., of_heads], one, head_dim)

    padded_near = [(padded(n), width) for n in near]
    padded_parts = [(padded(n), width) for n, _ in parts]
    # What others wait for goes first; then whatever can be computed before theirs has come.
    local = None
    if smooth_k or fp8:
        local = own.statistics(
            k, v, first=layout.first, step=layout.step, smooth_k=smooth_k, fp8=fp8
        )
    statistics, fetched = _fetch(k, v if fp8 else None, local, layout)
    q_int8, q_scale = own.queries(q, sm_scale=sm_scale, qmax=qmax)
    q_came = [start("q", q_int8, 0, padded_near)]
    mean = of_v = levels = errors = None
    if statistics is not None:
        gathered = statistics()  # [ranks, 3, B, H, D]
        means = gathered[:, :2].sum(0) / layout.sampled
        mean = means[0] if smooth_k else None
        of_v = (means[1], gathered[:, 2].amax(0)) if fp8 else None
    first = layout.mine[layout.here].start
    here = slice(first, first + parts[layout.here][0])
    k_int8, k_scale = own.keys(k.rows(here), mean, qmax=qmax)
    k_came = [start("k", k_int8, 0, padded_parts)]
    if of_v is not None:
        levels = own.value_levels(*of_v)
        v_sent, errors = own.values(v[:, here], *of_v)
    else:
        v_sent = v.to(torch.bfloat16 if pv == "bf16" else torch.float16)
    v_came = [start_values(v_sent, 0)]
    # Last and least: scales, and the keys and values of the block that lies on two ranks.
    k_rest, v_rest = fetched()
    rest = [q_scale, k_scale, *reversed(own.keys(k_rest, mean, qmax=qmax))]
    shapes: list[tuple[int, ...]]
    rest_shapes = []
    if of_v is not None and errors is not None:
        v_tail, more = own.values(v_rest, *of_v)
        rest += [v_tail, errors + more]
    for n, (main, tail) in zip(near, parts, strict=True):
        shapes = [(padded(n),), (padded(main) // block,), (padded(tail) // block,)]
        shapes += [(padded(tail), width)]
        shapes += [(width, padded(tail)), (width,)] if fp8 else []
        rest_shapes.append(
            [(batch, one.own_heads, *shape) for _, one in shares for shape in shapes]
        )
    by_share = [one.by_heads(*(x[:, heads] for x in rest)) for heads, one in shares]
    rest_came = all_to_all(
        "rest", [[x for each in by_share for x in each[r]] for r in range(len(near))],
        rest_shapes, group,
    )  # fmt: skip
    for at in range(1, len(shares)):
        q_came.append(start("q", q_int8, at, padded_near))
        k_came.append(start("k", k_int8, at, padded_parts))
        v_came.append(start_values(v_sent, at))

    def attention(at: int) -> Callable[[], list[Tensor]]:
        """Of one share: computes, sends the output, and gives what waits for that of others."""
        heads, one = shares[at]
        mains = [[x for (x,) in came[at].wait()] for came in (q_came, k_came, v_came)]
        small = [each[at * len(rest) :][: len(rest)] for each in rest_came.wait()]
        if not one.own_heads:
            none = v.new_empty(batch, layout.chunk, 0, dtype=out_dtype)
            return _return(torch.split(none, near, 1), one, tokens, head_dim)

        def whole(mains: Sequence[Tensor], which: int, dim: int = 2) -> Tensor:
            pairs = zip(mains, (x[which] for x in small), strict=True)
            # Kernels take these as contiguous. One piece of this rank's own is a part of all
            # heads, which is contiguous for one sample alone: with more it is copied.
            return concatenated([x for pair in pairs for x in pair], dim).contiguous()

        kv = [
            whole(mains[1], 3),
            whole([x[1] for x in small], 2),
            whole(mains[2], 4, 3) if fp8 else concatenated(mains[2], 1),
        ]
        if levels is not None:
            # Errors are those of the keys of this part of the ring, with which they are passed on.
            total = torch.stack([x[5] for x in small]).sum(0, dtype=torch.int32)
            own_levels = one.by_heads(levels[:, heads])[one.here][0]
            kv.append(torch.cat([own_levels, total.view(torch.float32).unsqueeze(2)], 2))

        def shapes_of(n_kv: int) -> list[tuple[int, ...]]:
            n = padded(n_kv)
            own_heads = batch, one.own_heads
            last = (*own_heads, width, n) if fp8 else (batch, n_kv, one.own_heads * head_dim)
            of_levels = [(*own_heads, 3, width)] if fp8 else []
            return [(*own_heads, n, width), (*own_heads, n // block), last, *of_levels]

        outs: list[Tensor] = [v] * len(near)
        returned: Callable[[], list[Tensor]] | None = None
        for ranks in one.queries(at + 1 == len(shares)):
            counts = [near[rank] for rank in ranks]
            n_q, rows = sum(counts), padded(sum(counts))
            q_all = (
                _joined([mains[0][rank] for rank in ranks], counts, rows),
                _joined([small[rank][0] for rank in ranks], counts, rows),
            )

            def attend(
                kv: Sequence[Tensor], n_kv: int, partial: bool,
                q_all: tuple[Tensor, Tensor] = q_all, n_q: int = n_q,
            ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
                result: tuple[Tensor, Tensor | None] = own.attend(
                    q_all, (kv[0], kv[1]), kv[2], kv[3] if fp8 else None,
                    n_q=n_q, n_kv=n_kv, head_dim=head_dim, pv=pv,
                    out_dtype=torch.float32 if partial else out_dtype, want_lse=partial,
                )  # fmt: skip
                return result

            out = _around(kv, shapes_of, attend, one).to(out_dtype)
            for rank, x in zip(ranks, torch.split(out, counts, 1), strict=True):
                outs[rank] = x
            if one.here not in ranks:
                returned = _return(
                    [x[:, :0] if r == one.here else x for r, x in enumerate(outs)],
                    one,
                    tokens,
                    head_dim,
                )
        if returned is None:
            return _return(outs, one, tokens, head_dim)
        others = returned

        def with_own() -> list[Tensor]:
            came = others()
            came[one.here] = outs[one.here]
            return came

        return with_own

    returning = [attention(at) for at in range(len(shares))]
    return concatenated([x for came in returning for x in came()], 2).contiguous()


def _fetch(
    k: Tokens, v: Tensor | None, statistics: Tensor | None, layout: _Layout
) -> tuple[Callable[[], Tensor] | None, Callable[[], tuple[Tokens, Tensor | None]]]:
    """Start to exchange statistics, and the few tokens of k and v that other ranks quantise; in
    one message where both go to the same ranks.

    Returns:
        Waits, and gives the statistics of all ranks; None without any. And waits, and gives the
        tokens of the block that this rank completes: none, where it has its blocks to itself.
    """
    mine, here = layout.mine, layout.here
    main, tail = layout.parts[here]
    given = [x for x in (k.cos, k.sin, k.x, v) if x is not None]

    def take(x: Tensor, rows: slice) -> Tensor:
        return x[rows] if x.dim() == 2 else x[:, rows]

    split = any(tail for _, tail in layout.parts)
    whole_group = layout.parallel.ring is None
    along = [statistics] if split and whole_group and statistics is not None else []
    pending = None
    if split:
        none = slice(0, 0)
        pending = all_to_all(
            "boundary",
            [
                [*along, *(take(x, none if rank == here else rows) for x in given)]
                for rank, rows in enumerate(mine)
            ],
            [
                [
                    *(x.shape for x in along),
                    *((*x.shape[:-2], 0 if rank == here else n, x.shape[-1]) for x in given),
                ]
                for rank, n in enumerate(layout.theirs)
            ],
            layout.parallel.ulysses,
        )

    def of_all_ranks() -> Tensor:
        assert pending is not None
        return torch.stack([came[0] for came in pending.wait()])

    every: Callable[[], Tensor] | None = of_all_ranks if along else None
    if statistics is not None and not along:
        every = gather("statistics", statistics, layout.parallel.group).wait

    def finish() -> tuple[Tokens, Tensor | None]:
        stop = mine[here].stop
        own = slice(mine[here].start + main, stop) if tail else slice(stop, stop)
        pieces = [[take(x, own)] for x in given]
        if pending is not None:
            for came in pending.wait():
                for piece, x in zip(pieces, came[len(along) :], strict=True):
                    piece.append(x)
        whole = iter([concatenated(piece, -2) for piece in pieces])
        cos, sin = (None if t is None else next(whole) for t in (k.cos, k.sin))
        return k._replace(x=next(whole), cos=cos, sin=sin), next(whole, None)

    return every, finish


def _tokens_by_heads(what: str, x: Tensor, layout: _Layout, head_dim: int) -> _Came:
    """Start to exchange the heads of x [B, N, H*D]; gives [B, n, h*D] of every rank."""
    shapes = [[(x.shape[0], n, layout.own_heads * head_dim)] for n in layout.near]
    pieces = layout.by_heads(x, dim=2, channels=head_dim)
    return all_to_all(what, pieces, shapes, layout.parallel.ulysses)


def _outputs(out: Tensor, layout: _Layout, tokens: int, head_dim: int) -> Tensor:
    """[B, n, h*D] of the heads of this rank and the tokens of its Ulysses group as [B, N, H*D] of
    its own tokens."""
    return concatenated(_return(torch.split(out, layout.near, 1), layout, tokens, head_dim)(), 2)


def _return(
    outs: Sequence[Tensor], layout: _Layout, tokens: int, head_dim: int
) -> Callable[[], list[Tensor]]:
    """Start to send the near ranks the output of their tokens [B, n, h*D]; waits for that of the
    tokens here, [B, N, h*D] of the heads of each rank. If its own output is empty, the one that
    comes back is, too."""
    own = outs[layout.here].shape[1]
    shapes = [
        [(outs[0].shape[0], own if rank == layout.here else tokens, n * head_dim)]
        for rank, n in enumerate(layout.heads)
    ]
    pending = all_to_all("out", [[x] for x in outs], shapes, layout.parallel.ulysses)
    return lambda: [x for (x,) in pending.wait()]


def _joined(parts: Sequence[Tensor], counts: Sequence[int], rows: int) -> Tensor:
    """The first so many rows [B, H, row, ...] of each part, and rows that nobody reads up to
    `rows`."""
    if len(parts) == 1 and parts[0].shape[2] == rows:
        return concatenated([parts[0].contiguous()], 2)
    pieces = [x.narrow(2, 0, n) for x, n in zip(parts, counts, strict=True)]
    if rows > sum(counts):
        shape = list(pieces[0].shape)
        shape[2] = rows - sum(counts)
        pieces.append(pieces[0].new_empty(shape))
    return concatenated(pieces, 2)


def _around(
    kv: Sequence[Tensor],
    shapes: Callable[[int], list[tuple[int, ...]]],
    attend: Callable[[Sequence[Tensor], int, bool], tuple[Tensor, Tensor | None]],
    layout: _Layout,
) -> Tensor:
    """The attention over the keys of a whole ring, which are passed on while they are used.

    Args:
        kv: Keys and values of this rank's part of the ring.
        shapes: Of such, from a number of keys.
        attend: The attention over so many keys; whether it is a part, in fp32 and with its
            logsumexp.
        layout: Who has how many.
    """
    ring = layout.parallel.ring
    if ring is None:
        return attend(kv, layout.chunk, False)[0]
    rank, counts = layout.parallel.ring_rank, layout.chunks
    out: Tensor | None = None
    lse: Tensor | None = None
    for i in range(len(counts)):
        following = None
        if i + 1 < len(counts):
            n_next = counts[(rank - i - 1) % len(counts)]
            following = pass_on("ring", kv, shapes(n_next), ring)
        part, part_lse = attend(kv, counts[(rank - i) % len(counts)], True)
        assert part_lse is not None
        if out is None or lse is None:
            out, lse = part.float(), part_lse
        else:
            share = torch.sigmoid(part_lse - lse).transpose(1, 2).unsqueeze(-1)
            heads = (lse.shape[1], -1)
            out = torch.lerp(
                torch.unflatten(out, 2, heads), torch.unflatten(part.float(), 2, heads), share
            ).flatten(2)
            lse = torch.logaddexp(lse, part_lse)
        if following is not None:
            kv = following.wait()
    assert out is not None
    return out
