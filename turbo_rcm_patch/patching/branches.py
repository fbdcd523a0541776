"""The branches of a block as they run: norm, Linears, attention or GELU, projection and skip.

Each piece is made from the modules of one block, which it asks once what they are: plain, so that
their weights can be read; in int8; or something that has to be called. It then runs in one of two
ways. With a token (`plan.signature`), which stands for eager inference on plain tensors, it calls
the bodies of operations through `Step`, which replays what they launched. Without one (a compiler,
a gradient, a transform, a dispatch mode) it calls the public operations, which check their
arguments. A module that has to be called adds what it returned to the token, because it may return
other strides tomorrow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from turbo_rcm_patch import ops
from turbo_rcm_patch.config import Form, Impl
from turbo_rcm_patch.ops.dispatch import forms_measured
from turbo_rcm_patch.ops.elementwise import gelu_forward, norm_forward, rows_forward
from turbo_rcm_patch.ops.exchange import ContextParallel
from turbo_rcm_patch.ops.operation import Step
from turbo_rcm_patch.ops.parallel import parallel_attention, parallel_sparse_linear_attention
from turbo_rcm_patch.ops.projection import skip_forward
from turbo_rcm_patch.ops.reference import sdpa_attention, split_heads
from turbo_rcm_patch.ops.registry import (
    attention_forward,
    heads_forward,
    in_one_pass,
    rotated_heads,
)
from turbo_rcm_patch.ops.sparse_linear import sparse_linear_forward
from turbo_rcm_patch.ops.streams import folded, norm_both
from turbo_rcm_patch.patching.author import call, observe, observe_attention
from turbo_rcm_patch.patching.blocks import Mode, note_mode
from turbo_rcm_patch.patching.linears import (
    Close,
    Input,
    Linears,
    Projection,
    Rounding,
    StreamsClose,
    Terms,
    held_by,
    holder,
    rounded,
    tensors_of,
)
from turbo_rcm_patch.patching.noise import Operands
from turbo_rcm_patch.patching.plain import plain_norm
from turbo_rcm_patch.patching.plan import Token, after_call
from turbo_rcm_patch.patching.state import PairState

#: Text tokens that follow the image tokens where attention has both; the authors' modules have the
#: same constant.
TEXT_TOKENS: Final = 512

#: A residual stream [B, N, C], or one tensor for each of several.
Hidden = Any


class Given(NamedTuple):
    """What the branches of a block get beside the residual stream.

    Attributes:
        context: [B, T, C] text, with the image tokens in front for image-to-video, or None.
        rows: Shift, scale and gate of the modulated branches, [B, 1 or N, C] each.
        rotary: (cos, sin) as the operations take them, or None.
        mask: What self-attention may see, or None for everything.
        more: What a family's own calls take besides.
        forward: What stands in for the block's forward; a plan that held it would keep the block
            alive.
        compared: Whether the guard compares a branch on this forward.
        author: The author's forward of the block, as `BlockForward._run` gets it.
        ahead: Input and gate of branches whose norm ran in the pass that closed the skip before
            it, by that norm; None where every branch has to stand alone.
    """

    context: Tensor | None
    rows: tuple[Tensor, ...] = ()
    rotary: tuple[Tensor, Tensor] | None = None
    mask: Tensor | None = None
    more: tuple[Any, ...] = ()
    forward: Any = None
    compared: bool = False
    author: Callable[[str, Any, Hidden], Hidden] | None = None
    ahead: dict[Norm, tuple[Tensor, Any]] | None = None


# --- a branch as an operation --------------------------------------------------------------------


class FeedForwardLayout(NamedTuple):
    """How a feed-forward runs, in plain values: with its tensors, all that `joined` needs.

    Attributes:
        norm: What stands before it: "modulated", by rows of the modulation; "affine", by weights
            of its own; or "streams", two of the first kind.
        norm_eps: Of that norm.
        as_rows: Whether that norm gives int8 rows.
        cast: Of the skip.
        model: The model's dtype.
        out: Of the residual stream behind it; None where that has the model's dtype everywhere.
        impl: "triton", "reference" or "auto".
        int8: Whether its Linears are wanted in int8.
    """

    norm: str
    norm_eps: float
    as_rows: bool
    cast: str
    model: torch.dtype
    out: torch.dtype | None
    impl: str
    int8: bool


class AttentionLayout(NamedTuple):
    """The same of an attention.

    Attributes:
        norm: As in `FeedForwardLayout`, as all that follows up to `int8`.
        norm_eps: Likewise.
        as_rows: Likewise.
        cast: Likewise.
        model: Likewise.
        out: Likewise.
        impl: Likewise.
        int8: Likewise.
        heads: H.
        head_dim: D.
        qkv: How many Linears make q, k and v, or q of a cross-attention.
        kv: How many make k and v of a cross-attention.
        image: How many make those of the image tokens.
        attention: As in `AttentionSpec`, as all that follows up to `eps`.
        pv: Likewise.
        smooth_k: Likewise.
        eps: Likewise.
        few: Whether it is exact over few keys.
        form: "one-launch", "two-launch" or "auto".
        topk: Of a sparse attention, as in `Sparsity`; 0 for a dense one.
        block_q: Likewise.
        block_k: Likewise.
        int8_inputs: As in `PairState`.
    """

    norm: str
    norm_eps: float
    as_rows: bool
    cast: str
    model: torch.dtype
    out: torch.dtype | None
    impl: str
    int8: bool
    heads: int
    head_dim: int
    qkv: int
    kv: int
    image: int
    attention: str
    pv: str
    smooth_k: bool
    eps: float
    few: bool
    form: str
    topk: float
    block_q: int
    block_k: int
    int8_inputs: bool


class BranchOperands(NamedTuple):
    """A branch that calls no module, for `joined`.

    Attributes:
        rows: Shift, scale and gate of its norm; of two streams both factors, both offsets and both
            gates. Empty where its norm has a weight.
        rotary: (cos, sin), or None.
        context: What a cross-attention reads.
        held: Weights and biases: of the Linears in the order in which they run, of the norms of q
            and k, of the norm of the image's k, of SLA's projection, and of the norm in front.
        layout: How it runs.
    """

    rows: tuple[Tensor, ...]
    rotary: tuple[Tensor, Tensor] | None
    context: Tensor | None
    held: list[Tensor | None]
    layout: AttentionLayout | FeedForwardLayout


# --- norms ---------------------------------------------------------------------------------------


class Described(NamedTuple):
    """A norm's part of `BranchOperands`, read by names: torch 2.8's compiler cannot slice it.

    Attributes:
        rows: As there.
        held: Its weight and bias.
        norm: As in `FeedForwardLayout`, as all that follows.
        norm_eps: Likewise.
        as_rows: Likewise.
    """

    rows: tuple[Tensor, ...]
    held: list[Tensor | None]
    norm: str
    norm_eps: float
    as_rows: bool = False


class Norm(Protocol):
    """What stands before a branch.

    Attributes:
        read: The tensors that a kernel reads; None where a module is called.
        joins: Whether it can run in the pass that closes the skip before it; what it makes there
            is in `Given.ahead`.
    """

    @property
    def read(self) -> list[Tensor] | None: ...

    @property
    def joins(self) -> bool: ...

    def __call__(self, token: Token, hidden: Hidden, given: Given) -> tuple[Input, Any, Token]:
        """The input of the branch, its gate (None for 1), and the token behind it."""

    def terms(self, given: Given) -> Terms:
        """What it takes beside the residual stream, where it joins."""

    def described(self, hidden: Hidden, given: Given) -> Described | None:
        """Its part of `BranchOperands`; None where a module is called."""


class FusedNorm:
    """A layer norm with a factor and an offset, in one pass.

    Args:
        norm: The module.
        at: Where its shift, scale and gate begin in the rows of the block's modulation; None for
            its own weight and bias.
        impl: "triton", "reference" or "auto".
        rounding: Where the residual stream is wider than the model's dtype; None for nowhere.
        as_rows: Whether it comes out as int8 rows.
    """

    __slots__ = ("_as_rows", "_at", "_gives", "_held", "_impl", "_model", "_norm", "_step")
    joins = True

    def __init__(
        self, norm: Any, at: int | None, impl: Impl, rounding: Rounding | None, *, as_rows: bool
    ) -> None:
        self._norm, self._at, self._impl = norm, at, impl
        self._held = holder(norm)
        self._step = Step(rows_forward if as_rows else norm_forward)
        self._as_rows = as_rows
        self._model = None if rounding is None else rounding.model
        self._gives = torch.int8 if as_rows else self._model

    @property
    def read(self) -> list[Tensor]:
        return [] if self._at is not None else tensors_of(self._held)

    def terms(self, given: Given) -> Terms:
        at, eps = self._at, self._norm.eps
        if at is None:
            scale, shift = self._held["weight"], self._held["bias"]
            scale = None if scale is None else scale.view(1, 1, -1)
            shift = None if shift is None else shift.view(1, 1, -1)
            return (scale, shift, 0.0, eps), None, self._gives
        shift, scale, gate = given.rows[at : at + 3]
        return (scale, shift, 1.0, eps), gate, self._gives

    def __call__(self, token: Token, hidden: Tensor, given: Given) -> tuple[Input, Any, Token]:
        if given.ahead:
            made = given.ahead.pop(self, None)
            if made is not None:
                return *made, token
        at, eps, impl, gate = self._at, self._norm.eps, self._impl, None
        if token is not None:
            numbers, gate, dtype = self.terms(given)
            if self._as_rows:
                return self._step(token, hidden, *numbers, impl), gate, token
            return self._step(token, hidden, *numbers, impl, dtype or hidden.dtype), gate, token
        form: Literal["modulation", "affine"] = "affine"
        if at is None:
            scale, shift = self._norm.weight, self._norm.bias
        else:
            form, (shift, scale, gate) = "modulation", given.rows[at : at + 3]
        named: Any = {"scale": scale, "shift": shift, "form": form, "eps": eps, "impl": impl}
        if self._as_rows and not _wants_gradient(hidden, scale, shift):
            return ops.norm_modulate_rows(hidden, **named), gate, None
        return ops.norm_modulate(hidden, out_dtype=self._model, **named), gate, None

    def described(self, hidden: Tensor, given: Given) -> Described | None:
        at, eps = self._at, self._norm.eps
        if at is None:
            return Described((), held_by(self._held), "affine", eps, self._as_rows)
        rows = tuple(given.rows[at : at + 3])
        return Described(rows, [], "modulated", eps, self._as_rows)


def _wants_gradient(*parts: Tensor | None) -> bool:
    """Whether a gradient is wanted, which int8 rows do not have."""
    return torch.is_grad_enabled() and any([x is not None and x.requires_grad for x in parts])


class Modulation(NamedTuple):
    """What modulates the norms of two streams, a pair each, as the modules hold it.

    Attributes:
        scale: Broadcast to their streams.
        shift: Likewise.
        gates: Likewise.
    """

    scale: Sequence[Tensor]
    shift: Sequence[Tensor]
    gates: Sequence[Tensor]


class StreamsNorm:
    """The layer norms of two streams with a factor and an offset each, as one sequence.

    Args:
        modulation: Gives scale, shift and gate of both.
        one: Added to the scale.
        held: Where the layer norm keeps its weight and bias (`holder`), which are folded into the
            modulation.
        eps: Of the norm.
        impl: "triton", "reference" or "auto".
        rounding: Where the residual streams are wider than the model's dtype; None for nowhere.
        plain: Whether the modulation comes from modules that are what their classes say.
    """

    __slots__ = ("_eps", "_held", "_impl", "_model", "_modulation", "_one", "_plain", "_step",
                 "read")  # fmt: skip

    def __init__(
        self,
        modulation: Callable[[Given], Modulation],
        one: float,
        held: dict[str, Any],
        eps: float,
        impl: Impl,
        rounding: Rounding | None,
        *,
        plain: bool,
    ) -> None:
        self._modulation, self._one, self._held = modulation, one, held
        self._eps, self._impl = eps, impl
        self._model = None if rounding is None else rounding.model
        self._plain = plain
        self._step = Step(norm_both)
        #: What makes the modulation is called, where it is not plain.
        self.read: list[Tensor] | None = tensors_of(held) if plain else None

    @property
    def joins(self) -> bool:
        return self._plain

    def terms(self, given: Given) -> Terms:
        scale, shift, gates = self._modulation(given)
        own = self._held
        return (
            (*scale, *shift, own.get("weight"), own.get("bias"), self._one, self._eps), gates,
            self._model,
        )  # fmt: skip

    def __call__(
        self, token: Token, hidden: tuple[Tensor, ...], given: Given
    ) -> tuple[Input, Any, Token]:
        if given.ahead:
            made = given.ahead.pop(self, None)
            if made is not None:
                return *made, token
        dtype = self._model or hidden[0].dtype
        if token is not None:
            numbers, gates, _ = self.terms(given)
            if gates[0].dtype == dtype:  # Else torch will promote the streams.
                if not self._plain:
                    token = (token, *[(x.shape, x.stride()) for x in (*numbers[:4:2], gates[0])])
                return self._step(token, *hidden, *numbers, self._impl, dtype), gates, token
        scale, shift, gates = self._folded(given)
        x = ops.norm_modulate_streams(
            hidden, scale=scale, shift=shift, form="affine", eps=self._eps, impl=self._impl,
            out_dtype=self._model,
        )  # fmt: skip
        return x, gates, None

    def _folded(self, given: Given) -> Modulation:
        """Factors and offsets in the place of scale and shift."""
        scale, shift, gates = self._modulation(given)
        weight, bias = self._held.get("weight"), self._held.get("bias")
        if weight is None and bias is None and not self._one:
            return Modulation(scale, shift, gates)
        pairs = zip(scale, shift, strict=True)
        factors, offsets = zip(
            *[folded(*pair, weight, bias, self._one) for pair in pairs], strict=True
        )
        return Modulation(factors, offsets, gates)

    def described(self, hidden: tuple[Tensor, ...], given: Given) -> Described | None:
        scale, shift, gates = self._folded(given)
        if gates[0].dtype != (self._model or hidden[0].dtype):
            return None  # torch will promote the streams.
        return Described((*scale, *shift, *gates), [], "streams", self._eps)


class CalledNorm:
    """A norm that is called, with its modulation as the author writes it.

    Args:
        run: Gives the input of the branch and its gate.
        rounding: Where the residual stream is wider than the model's dtype; None for nowhere. What
            is called gets it rounded.
    """

    __slots__ = ("_rounding", "_run")
    read = None
    joins = False

    def __init__(
        self, run: Callable[[Hidden, Given], tuple[Tensor, Any]], rounding: Rounding | None
    ) -> None:
        self._run, self._rounding = run, rounding

    def __call__(self, token: Token, hidden: Hidden, given: Given) -> tuple[Input, Any, Token]:
        hidden = rounded(hidden, self._rounding)
        x, gate = self._run(hidden, given)
        like = hidden if isinstance(hidden, Tensor) else hidden[1]
        return x, gate, after_call(token, like, like.dtype, (x,), (like.shape[2],), x.shape[1])

    def terms(self, given: Given) -> Terms:
        raise AssertionError("what is called does not join")

    def described(self, hidden: Hidden, given: Given) -> Described | None:
        return None


# --- branches ------------------------------------------------------------------------------------


class Run(Protocol):
    """One branch of a block with the skip around it.

    Attributes:
        read: The tensors that kernels read; None where a module is called.
        norm: What stands before it and reads the residual stream as the branch before leaves it;
            None where nothing does.
        close: What closes its skip; None where that is its author's, or a pass of its own.
    """

    @property
    def read(self) -> list[Tensor] | None: ...

    @property
    def norm(self) -> Norm | None: ...

    @property
    def close(self) -> Close | None: ...

    def __call__(self, token: Token, hidden: Hidden, given: Given) -> tuple[Hidden, Token]:
        """The residual stream behind the branch, and the token there."""

    def attention(self, hidden: Hidden, given: Given) -> Tensor | None:
        """What the output projection gets, [B, N, H * D]; None where the branch is no attention
        of ours. For the guard."""

    def operands(self, hidden: Hidden, given: Given) -> BranchOperands | None:
        """What one operation needs to run the whole branch; None where a module is called."""


@dataclass(slots=True, kw_only=True)
class AttentionModules:
    """The modules of an attention that ours runs in the place of.

    Attributes:
        heads: H.
        head_dim: D.
        qkv: One Linear for q, k and v or three; of cross-attention the one for q.
        kv: Of cross-attention: one Linear for k and v, or two.
        norms: What normalises q and k; None where nothing does.
        readable: Where the weights of these norms are and their epsilon; None where they have to
            be called.
        call_norm: Calls a norm of q or k.
        out: The output projection and the dropouts after it.
        image: One Linear or two for k and v of the image tokens; none without them.
        image_norm: What normalises those k.
        image_readable: Where its weight is; None where it has to be called.
        sparse: Gives weight and bias of SLA's projection on a device; None for dense attention.
        sparsity: Which blocks of keys a query sees.
    """

    heads: int
    head_dim: int
    qkv: tuple[Any, ...]
    kv: tuple[Any, ...] = ()
    norms: tuple[Any, Any] = (None, None)
    readable: tuple[dict[str, Any], dict[str, Any], float] | None = None
    call_norm: Callable[[Any, Tensor], Tensor] = call
    out: Sequence[Any]
    image: tuple[Any, ...] = ()
    image_norm: Any = None
    image_readable: dict[str, Any] | None = None
    sparse: Callable[[torch.device], tuple[Tensor, Tensor | None]] | None = None
    sparsity: ops.Sparsity | None = None


def readable_norms(
    norms: tuple[Any, Any], like: Tensor, plain: Callable[[Any, Tensor], bool] = plain_norm
) -> tuple[dict[str, Any], dict[str, Any], float] | None:
    """What `AttentionModules.readable` is of norms of all heads or of one, without a bias.

    Args:
        norms: Of q and k; None for both, where there are none.
        like: Of the dtype and on the device of the residual stream.
        plain: Whether a norm's weight can be read.
    """
    if norms[0] is None and norms[1] is None:
        none: dict[str, Any] = {"weight": None, "bias": None}
        return none, none, 1e-6
    if not all([plain(norm, like) for norm in norms]) or norms[0].eps != norms[1].eps:
        return None
    return holder(norms[0]), holder(norms[1]), norms[0].eps


class _Way:
    """One way to compute an attention: as asked for, or exact because there are few keys."""

    __slots__ = ("how", "numbers", "one_pass", "spec")

    def __init__(self, spec: ops.AttentionSpec, head_dim: int, how: str) -> None:
        self.spec, self.how = spec, how
        #: What `attention_forward` takes of a spec, in its order.
        self.numbers = (
            spec.heads, spec.attention, spec.pv, spec.smooth_k, spec.causal,
            spec.scale_of(head_dim), spec.eps, spec.impl,
        )  # fmt: skip
        #: Whether exact attention gets q and k from one kernel each, which can be replayed.
        self.one_pass = False


#: Norms of q and k as the operations take them: weights, then biases.
Norms = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
_NO_NORMS: Final[Norms] = (None, None, None, None)


class AttentionRun:
    """Norm, projections, attention, output projection and skip.

    Args:
        linears: Keeps the int8 copies of the block's weights.
        name: Of the attention in its block.
        modules: Its modules.
        states: Its pair, and the one inside it if it has one.
        norm: Makes the norm before it, as int8 rows or not.
        specs: How it is computed: as asked for, and with few keys.
        like: Of the dtype and on the device of the residual stream.
        given: What else the block gets.
        close: Closes the skip.
        form: "one-launch", "two-launch" or "auto", of attention and projection.
        rounding: Where the residual stream is wider than the model's dtype; None for nowhere.
        parallel: The ranks that share its sequence; None where it is whole.
    """

    __slots__ = ("_asked", "_attend", "_attend_heads", "_attend_image", "_auto", "_biased",
                 "_few", "_form", "_fused", "_image", "_inner", "_masked", "_model", "_modules",
                 "_of_context", "_of_x", "_parallel", "_readable", "_rotate", "_rotate_image",
                 "_state", "_streams", "_width", "close", "norm")  # fmt: skip

    def __init__(
        self,
        linears: Linears,
        name: str,
        modules: AttentionModules,
        states: tuple[PairState | None, PairState | None],
        norm: Callable[[bool], Norm],
        specs: tuple[ops.AttentionSpec, ops.AttentionSpec | None],
        like: Tensor,
        given: Given,
        close: Close,
        form: Form,
        rounding: Rounding | None,
        parallel: ContextParallel | None = None,
    ) -> None:
        state, self._inner = states
        self._model = None if rounding is None else rounding.model
        assert state is not None
        self._state, self._modules, self.close = state, modules, close
        self._streams = isinstance(close, StreamsClose)
        self._width = modules.heads * modules.head_dim
        int8, cross = state.int8 and state.int8_inputs, len(modules.kv) > 0
        self._of_x = Projection(
            linears, f"{name}.q" if cross else f"{name}.qkv", modules.qkv, like, like.dtype,
            int8=int8, recomputed=like.requires_grad,
        )  # fmt: skip
        self._of_context = self._image = None
        if cross:
            context = given.context
            assert context is not None
            of_text = (f"{name}.kv", modules.kv, context, like.dtype)
            self._of_context = Projection(
                linears, *of_text, int8=int8, recomputed=like.requires_grad
            )
            if len(modules.image) > 0:
                of_image = ("image", modules.image, context, like.dtype)
                self._image = Projection(
                    linears, *of_image, int8=int8, recomputed=like.requires_grad
                )
        self.norm = norm(self._of_x.int8)
        self._fused = len(modules.kv or modules.qkv) == 1
        self._masked = given.mask is not None and not cross
        self._readable = None if self._masked else modules.readable
        self._biased = self._readable is not None and self._readable[0].get("bias") is not None
        # torch 2.11 cannot trace the truth value of a tuple or a function.
        added = len(modules.image) > 0 or modules.sparse is not None
        self._parallel = parallel
        apart = close.int8 or not close.plain or self._masked or added or parallel is not None
        apart = apart or len(specs[0].exact_heads) > 0
        self._form: Form = "two-launch" if apart else form
        asked = specs[0]
        if asked.attention == "auto" and (
            modules.sparse is not None or self._form == "one-launch"
        ):
            asked = replace(asked, attention="int8")  # No exact kernel is sparse or projects.
        self._asked, self._few = self._way(asked, like), None
        if specs[1] is not None:
            self._few = self._way(specs[1], like)
        #: What "auto" may become, by name; "auto" itself where a compiler traces.
        self._auto: dict[str, _Way] | None = None
        tracing = torch.compiler.is_compiling()
        if asked.attention == "auto" and not self._masked and not tracing:
            exact, int8_way = (replace(asked, attention=one) for one in ("exact", "int8"))
            self._auto = {
                "auto": self._asked,
                "exact": self._way(exact, like),
                "int8": self._way(int8_way, like),
            }
        operation = attention_forward if modules.sparse is None else sparse_linear_forward
        self._attend, self._attend_image = Step(operation), Step(attention_forward)
        self._attend_heads = Step(heads_forward), Step(heads_forward)
        self._rotate = Step(rotated_heads), Step(skip_forward)
        self._rotate_image = Step(rotated_heads), Step(skip_forward)

    def _way(self, spec: ops.AttentionSpec, like: Tensor) -> _Way:
        modules, readable = self._modules, self._readable
        if readable is not None and readable[2] != spec.eps:
            spec = replace(spec, eps=readable[2])
        how = "exact" if self._masked else spec.attention
        sparse = "sparse " * (modules.sparse is not None)
        some = len(spec.exact_heads)
        marked = f", {some} heads exact" if some and how != "exact" else ""
        way = _Way(spec, modules.head_dim, f"fused with {sparse}{how} attention{marked}")
        if spec.attention == "exact" and ops.resolve_impl(spec.impl, like.device) == "triton":
            held: Any = ({}, {}) if readable is None else readable[:2]
            way.one_pass = like.shape[-1] == self._width and all(
                [in_one_pass(like, o.get("weight"), o.get("bias"), spec.heads) for o in held]
            )
        return way

    @property
    def read(self) -> list[Tensor] | None:
        norm, readable = self.norm.read, self._readable
        held = self._modules.image_readable
        projections = [p for p in (self._of_x, self._of_context, self._image) if p is not None]
        called = not self.close.plain or not all([p.plain for p in projections])
        if norm is None or readable is None or called or (self._image and held is None):
            return None
        int8 = [x for p in projections for x in p.read]
        return [*norm, *tensors_of(*readable[:2], held), *int8, *self.close.read]

    def operands(self, hidden: Hidden, given: Given) -> BranchOperands | None:
        modules, readable, close, context = self._modules, self._readable, self.close, None
        like: Tensor = hidden[1] if self._streams else hidden
        dtype = self._model or like.dtype
        projections = [p for p in (self._of_x, self._of_context, self._image) if p is not None]
        if readable is None or not close.readable or not all([p.readable for p in projections]):
            return None
        norms = [readable[0], readable[1]]
        if self._image is not None:
            if modules.image_readable is None:
                return None
            norms.append(modules.image_readable)
        if self._of_context is not None:
            context = given.context
            if context is None or context.dtype != dtype:
                return None
        norm = self.norm.described(hidden, given)
        if norm is None or self._parallel is not None or len(self._asked.spec.exact_heads) > 0:
            return None
        spec, sparsity, sparse = self._asked.spec, modules.sparsity, modules.sparse
        held = [x for p in projections for x in p.held]
        held += [*close.weight, *held_by(*norms)]
        topk, block_q, block_k = 0.0, 0, 0
        if sparse is not None and sparsity is not None:
            held += sparse(like.device)
            topk, block_q, block_k = sparsity.topk, sparsity.block_q, sparsity.block_k
        layout = AttentionLayout(
            norm.norm, norm.norm_eps, norm.as_rows, close.cast, dtype, close.out_dtype,
            close.impl, self._state.int8, modules.heads, modules.head_dim, len(modules.qkv),
            len(modules.kv), len(modules.image),
            spec.attention, spec.pv, spec.smooth_k, spec.eps, self._few is not None, self._form,
            topk, block_q, block_k, self._state.int8_inputs,
        )  # fmt: skip
        rotary = given.rotary if self._of_context is None else None
        return BranchOperands(norm.rows, rotary, context, held + norm.held, layout)

    def attention(self, hidden: Hidden, given: Given) -> Tensor | None:
        """What the output projection gets, [B, N, H * D]."""
        out: Tensor = self(None, hidden, given, close=False)[0]
        return out

    def __call__(
        self, token: Token, hidden: Hidden, given: Given, close: bool = True
    ) -> tuple[Hidden, Token]:
        modules, few, rotary = self._modules, self._few, given.rotary
        like: Tensor = hidden[1] if self._streams else hidden
        dtype = self._model or like.dtype
        x, gate, token = self.norm(token, hidden, given)
        if given.compared:
            observe(x, (modules.kv or modules.qkv)[-1], *modules.image[-1:])
        made, token = self._of_x(token, x, like)
        image: Any = None
        if self._of_context is None:
            q, k, v = made[0].chunk(3, -1) if self._fused else made
        else:
            context: Any = given.context
            if self._image is not None:
                tokens = context.shape[1] - TEXT_TOKENS
                image, context = context[:, :tokens], context[:, tokens:]
            (q,), rotary = made, None
            made, token = self._of_context(token, context, like)
            k, v = made[0].chunk(2, -1) if self._fused else made
        way = self._asked if few is None or k.shape[1] >= ops.INT8_MIN_KEYS else few
        if self._auto is not None and way is self._asked:
            way = self._auto[self._name(way.spec, q, k, given)]
        self._note(token, way.how)
        own_q = q
        if self._readable is None or (token is None and q.dtype != dtype):
            if modules.norms[0] is not None:
                q = modules.call_norm(modules.norms[0], q)
            if modules.norms[1] is not None:
                k = modules.call_norm(modules.norms[1], k)
            norms = _NO_NORMS
            token = after_call(token, like, dtype, (q,), (self._width,), own_q.shape[1])
            token = after_call(token, like, dtype, (k,), (self._width,), v.shape[1])
        else:
            of_q, of_k, _ = self._readable
            norms = of_q["weight"], of_k["weight"], None, None
            if self._biased:
                norms = *norms[:2], of_q["bias"], of_k["bias"]
        if given.compared and not self._masked:
            apart = modules.sparse is None and self._image is None
            observe_attention(Operands(q, k, v, norms, rotary, way.spec, self._parallel, apart))
        if close and self._joined(token) and way.spec.attention != "exact":
            joined = ops.attention_project_skip(
                q, k, v, *self.close.weight, way.spec, residual=hidden,
                c_out=1.0 if gate is None else gate, rotary=rotary, cast=self.close.cast,
                form=self._form, out_dtype=self.close.out_dtype, **_named(norms),
            )  # fmt: skip
            return joined, token
        if self._masked:
            assert given.mask is not None
            out = ops.masked_attention(q, k, v, given.mask, way.spec, rotary=rotary)
        elif self._parallel is not None:
            out = self._shared(q, k, v, norms, rotary, way.spec, given)
        elif modules.sparse is not None:
            out = self._sparse(token, q, k, v, norms, rotary, way.spec)
        else:
            out = self._dense(token, q, k, v, norms, rotary, way)
        if self._image is not None:
            made, token = self._image(token, image, like)
            k, v = made[0].chunk(2, -1) if self._fused else made
            held = modules.image_readable
            if norms[0] is not None and held is not None:
                norms = norms[0], held["weight"], None, None
            else:
                if norms[0] is not None:
                    q = modules.call_norm(modules.norms[0], own_q)
                k, norms = modules.call_norm(modules.image_norm, k), _NO_NORMS
                token = after_call(token, like, dtype, (q,), (self._width,), own_q.shape[1])
                token = after_call(token, like, dtype, (k,), (self._width,), v.shape[1])
            out = self._dense(token, q, k, v, norms, None, way, out)
        return (self.close(token, out, hidden, gate, given=given) if close else out), token

    def _name(self, spec: ops.AttentionSpec, q: Tensor, k: Tensor, given: Given) -> str:
        """The attention that runs, by the length of the whole sequence. The keys of
        cross-attention are whole on every rank."""
        forward, cross = given.forward, self._of_context is not None
        whole = forward is None or not cross or not forward.ranks.lengths
        if self._parallel is None and whole:
            return ops.attention_name(spec, q, k)
        lengths = self._lengths(given)
        if lengths is None:
            return spec.attention  # The operation decides.
        total = sum(lengths)
        keys = k.shape[1] if cross else total
        return ops.resolved(spec, q.device, total, keys, self._modules.head_dim).attention

    @staticmethod
    def _lengths(given: Given) -> list[int] | None:
        """The tokens of every rank; None in a graph, where the operation asks for them."""
        if torch.compiler.is_compiling() or given.forward is None:
            return None
        return given.forward.ranks.lengths or None

    def _shared(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        norms: Norms,
        rotary: tuple[Tensor, Tensor] | None,
        spec: ops.AttentionSpec,
        given: Given,
    ) -> Tensor:
        """The attention of the local tokens to those of all ranks."""
        parallel, lengths, modules = self._parallel, self._lengths(given), self._modules
        assert parallel is not None
        if modules.sparse is None:
            return parallel_attention(
                q, k, v, spec, parallel, rotary=rotary, lengths=lengths, **_named(norms)
            )
        weight, bias = modules.sparse(q.device)
        assert modules.sparsity is not None
        return parallel_sparse_linear_attention(
            q, k, v, weight, bias, spec, modules.sparsity, parallel,
            norm_q=norms[0], norm_k=norms[1], rotary=rotary, lengths=lengths,
        )  # fmt: skip

    def _joined(self, token: Token) -> bool:
        """Whether attention and projection are one operation. With "auto" that operation reads the
        tables; a plan calls it only where one of them names a form."""
        if self._form == "auto":
            return token is None or forms_measured()
        return self._form == "one-launch"

    def _note(self, token: Token, how: str) -> None:
        """Say how the pairs run on this forward."""
        if token is None:
            self._state.note(how)
            note_mode(self._inner, "ours")
            return
        self._state.ran = how
        if self._inner is not None:
            self._inner.ran = "fused"

    def _dense(
        self,
        token: Token,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        norms: Norms,
        rotary: tuple[Tensor, Tensor] | None,
        way: _Way,
        residual: Tensor | None = None,
    ) -> Tensor:
        """residual + softmax(q k^T) v."""
        spec = way.spec
        if token is None or spec.attention == "sage":
            return ops.attention_skip(
                q, k, v, spec, residual=residual, rotary=rotary, **_named(norms)
            )
        cos = sin = None
        if rotary is not None:
            dim = self._modules.head_dim
            cos, sin = rotary[0].reshape(-1, dim), rotary[1].reshape(-1, dim)
        if spec.exact_heads and way.spec.attention != "exact":
            by_head: Tensor = self._attend_heads[residual is not None](
                token, q, k, v, residual, None, None, *norms, cos, sin, None, 1.0, 1.0,
                *way.numbers, q.dtype, False, list(spec.exact_heads),
            )  # fmt: skip
            return by_head
        if not way.one_pass:
            step = self._attend if residual is None else self._attend_image
            out, _ = step(
                token, q, k, v, residual, None, None, *norms, cos, sin, None, 1.0, 1.0,
                *way.numbers, q.dtype, False,
            )  # fmt: skip
            attended: Tensor = out
            return attended
        # The same as the operation, whose two passes are ours and can be replayed.
        rotate, skip = self._rotate if residual is None else self._rotate_image
        qh, kh = rotate(token, q, k, spec.heads, *norms, cos, sin, spec.eps)
        out = sdpa_attention(
            qh,
            kh,
            split_heads(v, spec.heads),
            sm_scale=way.numbers[5],
            causal=False,
            kv_lengths=None,
        )
        out = out.transpose(1, 2).flatten(2)
        if residual is None:
            return out.contiguous()
        closed: Tensor = skip(
            token, residual, out, None, None, 1.0, 1.0, "fp32", spec.impl, q.dtype
        )
        return closed

    def _sparse(
        self,
        token: Token,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        norms: Norms,
        rotary: tuple[Tensor, Tensor] | None,
        spec: ops.AttentionSpec,
    ) -> Tensor:
        """Sparse and projected linear attention."""
        sparsity, sparse = self._modules.sparsity, self._modules.sparse
        assert sparsity is not None and sparse is not None
        weight, bias = sparse(q.device)
        if token is None or rotary is None:
            return ops.sparse_linear_attention(
                q, k, v, weight, bias, spec, sparsity, norm_q=norms[0], norm_k=norms[1],
                rotary=rotary,
            )  # fmt: skip
        dim = self._modules.head_dim
        cos, sin = rotary[0].reshape(-1, dim), rotary[1].reshape(-1, dim)
        attended: Tensor = self._attend(
            token, q, k, v, weight, bias, *norms[:2], cos, sin, spec.heads, spec.attention,
            spec.pv, spec.smooth_k, self._asked.numbers[5], spec.eps, sparsity.count(k.shape[1]),
            sparsity.block_q, sparsity.block_k, spec.impl, q.dtype,
        )  # fmt: skip
        return attended


def _named(norms: Norms) -> dict[str, Any]:
    """Norms of q and k as the public operations name them."""
    return dict(zip(("norm_q", "norm_k", "norm_q_bias", "norm_k_bias"), norms, strict=True))


@dataclass(slots=True, kw_only=True)
class FeedForwardModules:
    """The modules of a feed-forward that ours runs in the place of.

    Attributes:
        first: The Linear before a GELU in its tanh form; None where the activation is another one.
        called: What is called in turn where that Linear cannot be read.
        between: Dropouts before the last Linear.
        last: The last Linear and the dropouts after it.
    """

    first: Any
    called: tuple[Any, ...]
    between: tuple[Any, ...] = ()
    last: Sequence[Any]


class FeedForwardRun:
    """Norm, Linear, GELU, Linear and skip.

    Args:
        linears: Keeps the int8 copies of the block's weights.
        name: Of the feed-forward in its block.
        modules: Its modules.
        state: Its pair.
        norm: Makes the norm before it, as int8 rows or not.
        like: Of the dtype and on the device of the residual stream.
        close: Closes the skip.
        rounding: Where the residual stream is wider than the model's dtype; None for nowhere.
    """

    __slots__ = ("_first", "_held", "_inner", "_model", "_modules", "_state", "_streams", "close",
                 "norm")  # fmt: skip

    def __init__(
        self,
        linears: Linears,
        name: str,
        modules: FeedForwardModules,
        state: PairState,
        norm: Callable[[bool], Norm],
        like: Tensor,
        close: Close,
        rounding: Rounding | None,
    ) -> None:
        self._modules, self._state, self.close = modules, state, close
        self._model = None if rounding is None else rounding.model
        self._streams = isinstance(close, StreamsClose)
        self._first = self._held = None
        self._inner = getattr(modules.last[0], "in_features", -1)
        first = modules.first
        if first is not None:
            project = Projection(
                linears, f"{name}.0", (first,), like, like.dtype, int8=state.int8,
                activation="gelu-tanh", recomputed=like.requires_grad,
            )  # fmt: skip
            if project.int8:
                self._first = project
            elif project.plain and first.bias is not None:
                self._held = first._parameters
        self.norm = norm(self._first is not None)

    @property
    def read(self) -> list[Tensor] | None:
        norm = self.norm.read
        called = self._first is None and self._held is None
        if norm is None or called or len(self._modules.between) > 0 or not self.close.plain:
            return None
        first = [] if self._first is None else self._first.read
        return [*norm, *first, *self.close.read]

    def attention(self, hidden: Hidden, given: Given) -> Tensor | None:
        return None

    def operands(self, hidden: Hidden, given: Given) -> BranchOperands | None:
        close, first = self.close, self._held
        if self._first is not None:
            first = self._modules.first._parameters
        if first is None or not close.readable or len(self._modules.between) > 0:
            return None
        if first.get("weight") is None:  # It has int8 weights alone.
            return None
        norm = self.norm.described(hidden, given)
        if norm is None:
            return None
        dtype = self._model or (hidden[1] if self._streams else hidden).dtype
        layout = FeedForwardLayout(
            norm.norm, norm.norm_eps, norm.as_rows, close.cast, dtype, close.out_dtype,
            close.impl, self._state.int8,
        )  # fmt: skip
        held = [*held_by(first), *close.weight, *norm.held]
        return BranchOperands(norm.rows, None, None, held, layout)

    def __call__(self, token: Token, hidden: Hidden, given: Given) -> tuple[Hidden, Token]:
        like: Tensor = hidden[1] if self._streams else hidden
        x, gate, token = self.norm(token, hidden, given)
        if given.compared:
            observe(x)
        if token is None:
            note_mode(self._state, "ours")
        else:
            self._state.ran = "fused"
        dtype = self._model or like.dtype
        h: Any = x  # int8 rows only where the first Linear is in int8
        tokens = like.shape[1] if not self._streams else hidden[0].shape[1] + like.shape[1]
        if self._first is not None:
            (h,), token = self._first(token, x, like)
        elif self._held is None or (token is None and h.dtype != self._modules.first.weight.dtype):
            for module in self._modules.called:
                h = call(module, h)
            token = after_call(token, like, dtype, (h,), (self._inner,), tokens)
        elif token is None:
            h = ops.linear_gelu(h, self._modules.first.weight, self._modules.first.bias)
        else:  # A library's product, of which there is nothing to replay.
            h = gelu_forward.body(h, self._held["weight"], self._held["bias"])
        for module in self._modules.between:
            h = call(module, h)
            token = after_call(token, like, dtype, (h,), (self._inner,), tokens)
        return self.close(token, h, hidden, gate, given=given), token


class CalledRun:
    """A branch whose module is called whole, and the skip after it: ours or as the author wrote
    it.

    Args:
        states: Its pair, and the one inside it if it has one.
        mode: "called" or "as-written".
        norm: What stands before it.
        branch: What the block's forward calls it by.
        rounding: Where the residual stream is wider than the model's dtype; None for nowhere.
    """

    __slots__ = ("_branch", "_mode", "_norm", "_rounding", "_states")
    read = close = None

    def __init__(
        self,
        states: tuple[PairState | None, PairState | None],
        mode: Mode,
        norm: Norm,
        branch: Any,
        rounding: Rounding | None,
    ) -> None:
        self._states, self._mode, self._norm, self._branch = states, mode, norm, branch
        self._rounding = rounding

    @property
    def norm(self) -> Norm | None:
        return None if self._mode == "as-written" else self._norm

    def operands(self, hidden: Hidden, given: Given) -> BranchOperands | None:
        return None

    def attention(self, hidden: Hidden, given: Given) -> Tensor | None:
        return None

    def __call__(self, token: Token, hidden: Hidden, given: Given) -> tuple[Hidden, Token]:
        rounding, mode = self._rounding, self._mode
        if mode == "as-written":
            hidden = rounded(hidden, rounding)
        x, gate, token = self._norm(token, hidden, given)
        if given.compared:
            observe(x)
        for state in self._states:
            note_mode(state, mode)
        with given.forward.lent():
            made = given.forward.call_branch(self._branch, x, hidden, given)
        closed = given.forward.close_called(self._branch, mode, made, hidden, gate, rounding)
        pairs: Any = ((hidden, closed),)
        if not isinstance(hidden, Tensor):
            pairs = zip(hidden, closed, strict=True)
        for stream, x in pairs:
            dtype = stream.dtype
            if rounding is not None and mode == "called":
                dtype = rounding.out
            token = after_call(token, stream, dtype, (x,), stream.shape[2:], stream.shape[1])
        return closed, token


class AuthorRun:
    """A pair that the guard gave back: the author's block, in which the other pairs add nothing.
    So norm, gate and sum are the author's, too, whatever ours takes them for.

    Args:
        states: Its pair, and the one inside it if it has one.
        branch: What the block's forward calls it by.
        rounding: Where the residual stream is wider than the model's dtype; None for nowhere.
    """

    __slots__ = ("_branch", "_rounding", "_states")
    read = close = norm = None

    def __init__(
        self,
        states: tuple[PairState | None, PairState | None],
        branch: Any,
        rounding: Rounding | None,
    ) -> None:
        self._states, self._branch, self._rounding = states, branch, rounding

    def operands(self, hidden: Hidden, given: Given) -> BranchOperands | None:
        return None

    def attention(self, hidden: Hidden, given: Given) -> Tensor | None:
        return None

    def __call__(self, token: Token, hidden: Hidden, given: Given) -> tuple[Hidden, Token]:
        for state in self._states:
            note_mode(state, "as-written")
        hidden = rounded(hidden, self._rounding)
        closed = given.forward.run_author(self._branch, hidden, given)
        single = isinstance(hidden, Tensor)
        for x, y in [(hidden, closed)] if single else zip(hidden, closed, strict=True):
            token = after_call(token, x, x.dtype, (y,), x.shape[2:], x.shape[1])
        return closed, token


class LinearRun:
    """One Linear of an input of the block, and the skip after it.

    Args:
        state: Its pair.
        module: The Linear, or whatever stands in its place.
        close: Closes the skip.
        source: Gives the input [B, N, K].
    """

    __slots__ = ("_module", "_source", "_state", "close")
    norm = None

    def __init__(
        self, state: PairState, module: Any, close: Close, source: Callable[[Given], Tensor]
    ) -> None:
        self._state, self._module, self.close, self._source = state, module, close, source

    @property
    def read(self) -> list[Tensor] | None:
        return self.close.read if self._state.live and self.close.plain else None

    def operands(self, hidden: Hidden, given: Given) -> BranchOperands | None:
        return None

    def attention(self, hidden: Hidden, given: Given) -> Tensor | None:
        return None

    def __call__(self, token: Token, hidden: Tensor, given: Given) -> tuple[Hidden, Token]:
        x, live = self._source(given), self._state.live
        note_mode(self._state, "ours" if live else "as-written")
        if not live:
            written: Tensor = call(self._module, x) + hidden
            shape = hidden.shape[2:], x.shape[1]
            return written, after_call(token, hidden, hidden.dtype, (written,), *shape)
        if given.compared:
            observe(x)
        return self.close(token, x, hidden, None, given=given), token
