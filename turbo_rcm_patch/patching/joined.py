"""A branch of a block as one registered operation: attention, or feed-forward, with its norm, its
Linears and its skip.

A compiler calls these instead of the finer public operations, because every call of an operation
costs Python in each forward. An operation gets the tensors of a branch and how it runs in plain
values, and runs it by the pieces of `branches`, as a plan does in eager inference: what it
launches is recorded and replayed. It holds no weight and nothing of a block, so a compiler can
share one graph between all blocks, and a weight that is replaced is an input like any other.

They have no derivative. Where one is wanted, and where a module has to be called, the finer
operations run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, Final, cast, get_type_hints

import torch
from torch import Tensor

from turbo_rcm_patch import ops
from turbo_rcm_patch.ops.batches import MAX_BATCH
from turbo_rcm_patch.ops.checks import FLOATS
from turbo_rcm_patch.ops.operation import define, flattened
from turbo_rcm_patch.patching.branches import (
    AttentionLayout,
    AttentionModules,
    AttentionRun,
    BranchOperands,
    FeedForwardLayout,
    FeedForwardModules,
    FeedForwardRun,
    FusedNorm,
    Given,
    Hidden,
    Modulation,
    Norm,
    Run,
    StreamsNorm,
)
from turbo_rcm_patch.patching.copies import Copies
from turbo_rcm_patch.patching.linears import (
    Close,
    FreshLinears,
    Rounding,
    StreamsClose,
    holder,
)
from turbo_rcm_patch.patching.plain import Weights
from turbo_rcm_patch.patching.plan import Token, signature

#: Branches that a thread keeps: one for each layout, whatever the number of blocks.
_MOST_BRANCHES: Final = 64
#: Signatures of inputs that a branch remembers to have checked.
_MOST_CHECKED: Final = 256

_Layout = AttentionLayout | FeedForwardLayout
_local = threading.local()


def run_joined(run: Run, hidden: Hidden, given: Given) -> Hidden:
    """The residual streams behind a branch, by one operation where it calls no module and nobody
    wants a gradient; for code that a compiler traces."""
    operands = run.operands(hidden, given)
    streams = [hidden] if isinstance(hidden, Tensor) else list(hidden)
    if operands is None or _wants_gradient(streams, operands):
        return run(None, hidden, given)[0]
    rows, rotary, context, held, layout = operands
    if isinstance(layout, FeedForwardLayout):
        packed = _packed(layout, _FEED_FORWARD_TYPES, held)
        made = _feed_forward(streams, list(rows), held, *packed)
    else:
        packed = _packed(layout, _ATTENTION_TYPES, held)
        cos, sin = (None, None) if rotary is None else rotary
        made = _attention(streams, list(rows), context, cos, sin, held, *packed)
    return made[0] if isinstance(hidden, Tensor) else tuple(made)


def _wants_gradient(streams: list[Tensor], operands: BranchOperands) -> bool:
    if not torch.is_grad_enabled():
        return False
    tensors = [*streams, *operands.rows, operands.context, *operands.held]
    return any([x is not None and x.requires_grad for x in tensors])


#: The dtypes of a model and of its residual stream as words; "" where nobody chose one.
_DTYPES: Final[dict[torch.dtype | None, str]] = {
    None: "",
    **{x: str(x).removeprefix("torch.") for x in FLOATS},
}
_NAMED: Final = {name: dtype for dtype, name in _DTYPES.items()}


def _types(layout: type[_Layout]) -> dict[Any, list[int]]:
    """Which fields of a layout are words, dtypes, flags, integers and floats, by their places."""
    places: dict[Any, list[int]] = {str: [], torch.dtype: [], bool: [], int: [], float: []}
    for place, kind in enumerate(get_type_hints(layout).values()):
        places[torch.dtype if kind == torch.dtype | None else kind].append(place)
    return places


_ATTENTION_TYPES: Final = _types(AttentionLayout)
_FEED_FORWARD_TYPES: Final = _types(FeedForwardLayout)


def _packed(
    layout: _Layout, types: dict[Any, list[int]], held: list[Tensor | None]
) -> tuple[str, list[int], list[float]]:
    """A layout in three arguments, because each argument of an operation costs time on every
    call: its words, dtypes and flags, its integers and its floats. A compiler may have made
    symbols of the numbers. The words say which weights are missing, too: that is another
    branch."""
    fields: Any = layout
    present = "".join(["0" if x is None else "1" for x in held])
    flags = ["1" if fields[i] else "0" for i in types[bool]]
    dtypes = [_DTYPES[fields[i]] for i in types[torch.dtype]]
    words = "|".join([*[fields[i] for i in types[str]], *dtypes, *flags, present])
    return words, [fields[i] for i in types[int]], [fields[i] for i in types[float]]


def _unpacked(kind: type[_Layout], types: dict[Any, list[int]], packed: Sequence[Any]) -> Any:
    words, sizes, numbers = packed
    fields: list[Any] = [None] * len(kind._fields)
    *texts, _ = words.split("|")
    rest = texts[len(types[str]) :]
    count = len(types[torch.dtype])
    dtypes, rest = [_NAMED[name] for name in rest[:count]], rest[count:]
    flags = [flag == "1" for flag in rest]
    found: dict[Any, Any] = {
        str: texts, torch.dtype: dtypes, bool: flags, int: sizes, float: numbers,
    }  # fmt: skip
    for own, places in types.items():
        for place, value in zip(places, found[own], strict=False):
            fields[place] = value
    return kind(*fields)


class _State:
    """Stands for the state of a pair; a compiled forward is not reported."""

    def __init__(self, int8: bool, int8_inputs: bool) -> None:
        self.int8, self.int8_inputs, self.ran = int8, int8_inputs, ""

    def note(self, how: str) -> None:
        """Say nothing."""


class _Branch:
    """A branch that is given its tensors on every call.

    Args:
        layout: How it runs.
        held: Its weights and biases, see `BranchOperands`.
        streams: Its residual streams.
        given: What else it gets.
    """

    def __init__(
        self, layout: _Layout, held: Sequence[Tensor | None], streams: list[Tensor], given: Given
    ) -> None:
        pairs = zip(held[::2], held[1::2], strict=True)
        self._weights = [Weights(weight, bias) for weight, bias in pairs]
        self._slots = [w._parameters for w in self._weights]
        self._joined = len(streams) > 1
        self._head_dim, self._products = 0, 2
        if isinstance(layout, AttentionLayout):
            self._head_dim = layout.head_dim
            self._products = 2 * (layout.qkv + layout.kv + layout.image)
        if layout.int8:
            self._products = 0
        self._checked: set[Token] = set()
        self._model = layout.model
        like = streams[-1].to(layout.model)
        weights = iter(self._weights)
        self._run: Run
        if isinstance(layout, AttentionLayout):
            self._run = _attention_run(layout, weights, self._joined, like, given)
        else:
            self._run = _feed_forward_run(layout, weights, self._joined, like)

    def __call__(
        self, held: Sequence[Tensor | None], streams: list[Tensor], given: Given
    ) -> list[Tensor]:
        slots = self._slots
        for slot, weight, bias in zip(slots, held[::2], held[1::2], strict=True):
            slot["weight"], slot["bias"] = weight, bias
        try:
            token = self._token(held, streams, given)
            if self._joined:
                return list(self._run(token, tuple(streams), given)[0])
            return [self._run(token, streams[0], given)[0]]
        finally:
            for slot in slots:  # Or they would live as long as the process.
                slot["weight"] = slot["bias"] = None

    def _token(self, held: Sequence[Tensor | None], streams: list[Tensor], given: Given) -> Token:
        """See `plan.signature`; None where an operation that checks its arguments has to run. A
        product of torch looks at its weights itself."""
        kept = [x for x in held[self._products :] if x is not None]
        tensors = [*streams, *given.rows, *kept, *(given.rotary or ())]
        if given.context is not None:
            tensors.append(given.context)
        token = signature(*tensors)
        if token is None or token in self._checked:
            return token
        if not _fits(streams, given, self._head_dim, self._model) or any(
            [x.device != streams[0].device for x in tensors]
        ):
            return None
        if len(self._checked) >= _MOST_CHECKED:
            self._checked.clear()
        self._checked.add(token)
        return token


def _fits(streams: list[Tensor], given: Given, head_dim: int, model: torch.dtype) -> bool:
    """Whether the inputs fit each other as the bodies of the operations want them, which check
    nothing."""
    first, context = streams[0], given.context
    batch, _, channels = first.shape
    lengths = [x.shape[1] for x in streams]
    coefficients = zip(given.rows, lengths * 3, strict=False)
    return (
        0 < batch <= MAX_BATCH
        and all([x.dtype is first.dtype for x in streams])
        and all([x.shape[::2] == (batch, channels) and x.shape[1] for x in streams])
        and all([x.dim() == 3 and x.shape[0] in (1, batch) for x in given.rows])
        and all([x.shape[1] in (1, n) and x.shape[2] == channels for x, n in coefficients])
        and (
            context is None
            or (context.dim() == 3 and context.shape[0] == batch and context.dtype is model)
        )
        and all([table.numel() == sum(lengths) * head_dim for table in given.rotary or ()])
    )


# --- from a layout to a branch -------------------------------------------------------------------


def _attention_run(
    layout: AttentionLayout, weights: Iterator[Weights], joined: bool, like: Tensor, given: Given
) -> AttentionRun:
    qkv, kv, image = (
        tuple(islice(weights, count)) for count in (layout.qkv, layout.kv, layout.image)
    )
    out, of_q, of_k = islice(weights, 3)
    modules = AttentionModules(
        heads=layout.heads, head_dim=layout.head_dim, qkv=qkv, kv=kv, norms=(of_q, of_k),
        readable=(holder(of_q), holder(of_k), layout.eps), out=(out,), image=image,
    )  # fmt: skip
    if image:
        modules.image_norm = norm = next(weights)
        modules.image_readable = holder(norm)
    if layout.topk:
        projection: Any = next(weights)
        modules.sparse = lambda device: (projection.weight, projection.bias)
        modules.sparsity = ops.Sparsity(
            topk=layout.topk, block_q=layout.block_q, block_k=layout.block_k
        )
    asked = ops.AttentionSpec(
        heads=layout.heads, attention=cast("Any", layout.attention), pv=cast("Any", layout.pv),
        smooth_k=layout.smooth_k, eps=layout.eps, impl=cast("Any", layout.impl),
    )  # fmt: skip
    few = replace(asked, attention="exact") if layout.few else None
    linears, close = _close_of(layout, out, joined, like)
    return AttentionRun(
        linears, "", modules, (_state(layout), None), _norm_of(layout, weights), (asked, few),
        like, given, close, cast("Any", layout.form), _rounding(layout),
    )  # fmt: skip


def _feed_forward_run(
    layout: FeedForwardLayout, weights: Iterator[Weights], joined: bool, like: Tensor
) -> FeedForwardRun:
    first, last = islice(weights, 2)
    modules = FeedForwardModules(first=first, called=(), last=(last,))
    linears, close = _close_of(layout, last, joined, like)
    norm = _norm_of(layout, weights)
    return FeedForwardRun(
        linears, "", modules, _state(layout), norm, like, close, _rounding(layout)
    )


def _rounding(layout: _Layout) -> Rounding | None:
    if layout.out is None:
        return None
    return Rounding(layout.model, layout.out, cast("Any", layout.cast))


def _state(layout: _Layout) -> Any:
    inputs = layout.int8_inputs if isinstance(layout, AttentionLayout) else True
    return _State(layout.int8, inputs)


def _close_of(
    layout: _Layout, linear: Weights, joined: bool, like: Tensor
) -> tuple[FreshLinears, Close]:
    linears = FreshLinears(Copies(cast("Any", layout.impl)))
    kind = StreamsClose if joined else Close
    return linears, kind(
        linears, "", (linear,), like, int8=layout.int8, cast=cast("Any", layout.cast),
        impl=cast("Any", layout.impl), rounding=_rounding(layout),
    )  # fmt: skip


def _norm_of(layout: _Layout, weights: Iterator[Weights]) -> Callable[[bool], Norm]:
    impl: Any = layout.impl
    rounding = _rounding(layout)

    def norm(as_rows: bool) -> Norm:
        if layout.norm == "streams":
            return StreamsNorm(_of_streams, 0.0, {}, layout.norm_eps, impl, rounding, plain=True)
        rows = as_rows and layout.as_rows
        if layout.norm == "modulated":
            own = Weights(None, None, layout.norm_eps)
            return FusedNorm(own, 0, impl, rounding, as_rows=rows)
        own = next(weights)
        own.eps = layout.norm_eps
        return FusedNorm(own, None, impl, rounding, as_rows=rows)

    return norm


def _of_streams(given: Given) -> Modulation:
    """Factors, offsets and gates of two streams."""
    return Modulation(given.rows[:2], given.rows[2:4], given.rows[4:])


# --- the operations ------------------------------------------------------------------------------


#: The tensors of a branch, as in `Operands`, and `_packed`.
_TYPES: Final = {
    "streams": list[Tensor], "rows": list[Tensor], "context": Tensor | None,
    "cos": Tensor | None, "sin": Tensor | None, "held": list[Tensor | None],
    "words": str, "sizes": list[int], "numbers": list[float],
}  # fmt: skip


@flattened(tuple(_TYPES), list[Tensor], _TYPES)
def _attention_body(
    streams: list[Tensor],
    rows: list[Tensor],
    context: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    held: list[Tensor | None],
    *packed: Any,
) -> list[Tensor]:
    given = Given(context, tuple(rows), None if cos is None or sin is None else (cos, sin))
    return _branch(AttentionLayout, packed, streams, given, held)(held, streams, given)


@flattened(
    ("streams", "rows", "held", "words", "sizes", "numbers"), list[Tensor], _TYPES
)  # fmt: skip
def _feed_forward_body(
    streams: list[Tensor], rows: list[Tensor], held: list[Tensor | None], *packed: Any
) -> list[Tensor]:
    given = Given(None, tuple(rows))
    return _branch(FeedForwardLayout, packed, streams, given, held)(held, streams, given)


def _branch(
    kind: type[_Layout],
    packed: Any,
    streams: list[Tensor],
    given: Given,
    held: Sequence[Tensor | None],
) -> _Branch:
    """The branch of a layout, made when this thread first needs it."""
    words, sizes, numbers = packed
    # What is chosen for one device does not run on another.
    key = kind, words, tuple(sizes), tuple(numbers), len(streams), streams[0].device
    kept: dict[Any, _Branch] | None = getattr(_local, "kept", None)
    if kept is None:
        kept = _local.kept = {}
    branch = kept.get(key)
    if branch is None:
        if len(kept) >= _MOST_BRANCHES:
            kept.clear()
        types = _ATTENTION_TYPES if kind is AttentionLayout else _FEED_FORWARD_TYPES
        layout = _unpacked(kind, types, packed)
        branch = kept[key] = _Branch(layout, held, streams, given)
    return branch


def _attention_fake(streams: list[Tensor], *args: Any) -> list[Tensor]:
    return _like(streams, _unpacked(AttentionLayout, _ATTENTION_TYPES, args[-3:]))


def _feed_forward_fake(streams: list[Tensor], *args: Any) -> list[Tensor]:
    return _like(streams, _unpacked(FeedForwardLayout, _FEED_FORWARD_TYPES, args[-3:]))


def _like(streams: list[Tensor], layout: _Layout) -> list[Tensor]:
    dtype = layout.model if layout.out is None else layout.out
    return [x.new_empty(x.shape, dtype=dtype) for x in streams]


_attention: Final = define("attention_branch", _attention_body, _attention_fake)
_feed_forward: Final = define("feed_forward_branch", _feed_forward_body, _feed_forward_fake)
