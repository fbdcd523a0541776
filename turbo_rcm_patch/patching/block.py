"""The forward that stands in for a transformer block's own: describe, resolve, run.

A family describes its block: a tuple of `Branch`, and what is its own in methods of a subclass of
`BlockForward`. `resolve` asks the modules what they are, once, and makes a plan: one run of
`branches` for each branch. In eager inference the plan is kept for as long as a look says that it
is true (`plan.Watch`); elsewhere it is made anew on every forward, where a compiler traces it. On
a forward that the guard checks, each branch of the plan is compared with the author's code.
"""

from __future__ import annotations

import copy
import copyreg
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from types import MethodType
from typing import Any, ClassVar, Final, Literal

import torch
from torch import Tensor, nn

from turbo_rcm_patch import ops
from turbo_rcm_patch.config import PatchConfig
from turbo_rcm_patch.errors import FamilyError
from turbo_rcm_patch.ops.batches import MAX_BATCH
from turbo_rcm_patch.ops.exchange import ContextParallel
from turbo_rcm_patch.ops.modes import is_capturing
from turbo_rcm_patch.ops.operation import compile_ahead
from turbo_rcm_patch.ops.self_test import ensure_tested
from turbo_rcm_patch.patching import plain
from turbo_rcm_patch.patching.author import Notes, Untold, call, nothing, same
from turbo_rcm_patch.patching.blocks import KeptTables, Mode, may_run
from turbo_rcm_patch.patching.branches import (
    TEXT_TOKENS,
    AttentionModules,
    AttentionRun,
    AuthorRun,
    CalledNorm,
    CalledRun,
    FeedForwardModules,
    FeedForwardRun,
    FusedNorm,
    Given,
    Hidden,
    Norm,
    Run,
)
from turbo_rcm_patch.patching.copies import Copies
from turbo_rcm_patch.patching.guard import Guard, Pair
from turbo_rcm_patch.patching.joined import run_joined
from turbo_rcm_patch.patching.linears import Close, Linears, Rounding, StreamsClose, rounded
from turbo_rcm_patch.patching.parallel import Ranks, groups_of_model, lent
from turbo_rcm_patch.patching.plain import bare, runs_itself, unserved
from turbo_rcm_patch.patching.plan import PlanSlot, Token, Watch, plain_inference, signature
from turbo_rcm_patch.patching.state import PairState, decides, specs_of
from turbo_rcm_patch.skip import Cast

#: Signatures of inputs that a block remembers to have compiled for.
_MOST_COMPILED: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """One branch of a block.

    Attributes:
        name: Of its module in the block, and of its pair; of its first Linear, where it is no
            module of its own.
        kind: "self", "cross" or "feed-forward".
        norm: Name of the norm before it.
        at: Where its shift, scale and gate begin in the rows of the modulation; None where the
            norm has weights of its own and the gate is 1.
        cast: Where its skip is summed.
        inner: Name of the pair inside it: another attention that is added before the projection.
        output: Name of its output projection, where the gate alone stands between that and the
            residual.
        last: Name of its last Linear, where it is no module of its own.
        behind: Name of a module of the block behind it, which its sum goes through.
    """

    name: str
    kind: Literal["self", "cross", "feed-forward", "control"]
    norm: str
    at: int | None = None
    cast: Cast = "model"
    inner: str = ""
    output: str = ""
    last: str = ""
    behind: str = ""


def _misnamed(
    path: str, branch: str, field: str, name: str, where: str, names: list[str]
) -> FamilyError:
    return FamilyError(
        f"{path}: {field} of the branch {branch!r}",
        expected=f"one of {where} ({', '.join(names)})",
        got=repr(name),
        remedy="Mend the family's Branch, or the name of the pair",
    )


class _Plan(tuple[Run, ...]):
    """A plan that is kept.

    Attributes:
        alone: Whether it calls no module.
        ahead: Whether a norm runs in the pass that closes the skip before it.
    """

    alone: bool
    ahead: bool

    def __init__(self, runs: tuple[Run, ...]) -> None:
        self.alone = all([run.read is not None for run in runs])
        self.ahead = False
        for run, behind in pairwise(runs):
            if run.close is not None and behind.norm is not None:
                self.ahead |= run.close.precede(behind.norm)


class BlockForward:
    """Stands in for the forward of one block.

    It holds the block itself, so that a deep copy of a patched model holds the copied block.

    Args:
        shared: What its family gives all blocks of a model.
        block: The block.
        states: Its pairs, by the names of their branches.
        config: How the model is patched.
        copies: The int8 copies of the model's weights.
        first: Whether it is the first block of the model.
        guard: Compares pairs on some forwards, or None.
    """

    __slots__ = ("_author", "_block", "_compiler_below", "_config", "_first", "_guard",
                 "_head_dim", "_linears", "_shared", "_slot", "_specs", "_states", "_warned",
                 "_width", "__weakref__", "ranks")  # fmt: skip

    #: In the order in which they run.
    branches: ClassVar[tuple[Branch, ...]]
    #: Whether a norm may give int8 rows.
    int8_rows: ClassVar[bool] = False
    #: Whether text and video are residual streams of their own: (text, video).
    streams: ClassVar[bool] = False
    #: Whether a compiler can trace the author's block as a whole.
    traceable: ClassVar[bool] = True
    #: The class of the norms before branches: a layer norm that computes in fp32.
    layer_norm: ClassVar[type[nn.LayerNorm]] = nn.LayerNorm
    #: Where the author modulates what such a norm gives.
    modulation_cast: ClassVar[Cast] = "fp32"
    #: Modules of the block outside the branches, which `__call__` calls: the author's forward gets
    #: what they made in the place of what it is made of.
    apart: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        shared: Any,
        block: Any,
        states: dict[str, PairState],
        config: PatchConfig,
        copies: Copies,
        first: bool,
        guard: Guard | None,
    ) -> None:
        self._block, self._states, self._config = block, states, config
        self._shared = shared
        # Of the attentions; 0 where somebody replaced all of them.
        known = [state.pair for state in states.values() if state.pair.heads]
        heads, self._head_dim = (known[0].heads, known[0].head_dim) if known else (1, 0)
        self._width = heads * self._head_dim
        self._author: Any = type(block).forward
        self._first, self._guard = first, guard
        self._linears = Linears(copies)
        self._warned: set[str] = set()
        self._specs = specs_of(
            ops.AttentionSpec(
                heads=heads, attention=config.attention, pv=config.pv, smooth_k=config.smooth_k,
                impl=config.impl,
            )
        )  # fmt: skip
        self._slot: PlanSlot[tuple[Run, ...]] = PlanSlot()
        self._compiler_below = self._traced_below()
        #: What the blocks of one model agree on with those of other ranks.
        self.ranks = Ranks([], None)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy inside a copied model; where the block is copied without its model, the author's
        forward of that block."""
        model = self.ranks.model
        if model is not None and id(model) not in memo:
            block = copy.deepcopy(self._block, memo)
            return MethodType(type(block).forward, block)
        made = memo[id(self)] = type(self).__new__(type(self))
        for name in copyreg._slotnames(type(self)):  # type: ignore[attr-defined]
            setattr(made, name, copy.deepcopy(getattr(self, name), memo))
        return made

    def forget_plan(self) -> None:
        """Make the plan again on the next forward; it holds modules that may be replaced."""
        self._slot.clear()

    # --- what a family says of its own -----------------------------------------------------------

    def _by_author(self, name: str, view: Any, hidden: Hidden, inputs: tuple[Any, ...]) -> Hidden:
        """The streams behind one pair, by the author's forward.

        Args:
            name: Of the branch that runs.
            view: What stands for the block; its other branches add nothing.
            hidden: The streams.
            inputs: Of the block's forward. The first is the stream.
        """
        del name
        return type(self._block).forward(view, hidden, *inputs[1:])

    def _mode(self, branch: Branch, hidden: Hidden, given: Given) -> Mode:
        """What may run now in the place of a branch's module, whatever its pair's state."""
        raise NotImplementedError

    def _attention(self, branch: Branch, like: Tensor, given: Given) -> AttentionModules:
        """The modules of an attention whose mode is "ours"."""
        raise NotImplementedError

    def _feed_forward(self, module: Any) -> FeedForwardModules:
        """The modules of a feed-forward whose mode is "ours"."""
        raise NotImplementedError

    def _groups(self) -> ContextParallel | None:
        """The ranks that share the sequence of self-attention; None where it is whole, as in a
        family without a plan for context parallelism."""
        return None

    def _fused_norm(self, branch: Branch, like: Tensor) -> bool:
        """Whether the norm before a branch is exactly a layer norm in fp32."""
        norm: Any = getattr(self._block, branch.norm)
        if type(norm) is not self.layer_norm or len(norm.normalized_shape) != 1 or not bare(norm):
            return False
        return branch.at is None or (norm.weight is None and norm.bias is None)

    def called_norm(self, norm: Any, hidden: Tensor) -> Tensor:
        """The norm before a branch, called, before its modulation."""
        normed: Tensor = call(norm, hidden)
        return normed

    def _beside(self, branch: Branch, given: Given) -> tuple[Any, ...]:
        """What an attention of the block is called with beside its hidden states."""
        raise NotImplementedError

    def call_branch(self, branch: Branch, x: Any, hidden: Hidden, given: Given) -> Any:
        """The modules of a branch, called as the block's author calls them."""
        module = getattr(self._block, branch.name)
        if branch.last:
            parts = self._feed_forward(module)
            for part in (*parts.called, *parts.between, *parts.last):
                x = call(part, x)
            return x
        more = () if branch.kind == "feed-forward" else self._beside(branch, given)
        made = call(module, x, *more)
        return call(getattr(self._block, branch.behind), made) if branch.behind else made

    def _facts(self, hidden: Hidden, given: Given) -> tuple[Any, ...]:
        """What decides about the plan beside the modules: a plan is for forwards where it is the
        same."""
        context: Any = given.context
        text_alone = "image" in self._states and context.shape[1] <= TEXT_TOKENS
        return (
            hidden.dtype, hidden.get_device(), context.dtype, context.get_device(), text_alone,
        )  # fmt: skip

    def _token(self, hidden: Hidden, given: Given) -> Token:
        """The signature of the inputs; None where they do not fit each other as the bodies of the
        operations want them, which check nothing."""
        (batch, tokens, channels), context = hidden.shape, given.context
        assert context is not None and given.rotary is not None
        row, (cos, sin) = given.rows[0], given.rotary
        if not (
            hidden.dtype is context.dtype
            and hidden.device == context.device
            and channels == self._width
            and batch <= MAX_BATCH
            and 0 < batch == context.shape[0]
            and context.dim() == 3
            and row.shape[-1] == channels
            and row.shape[0] in (1, batch)
            and row.shape[1] in (1, tokens)
            and cos.shape == sin.shape
            and cos.numel() == tokens * self._head_dim
        ):
            return None
        return signature(hidden, context, row, cos, sin)

    # --- resolve ---------------------------------------------------------------------------------

    @classmethod
    def check_branches(
        cls, path: str, block: nn.Module, states: Mapping[str, PairState] | None = None
    ) -> None:
        """Raise a typed error if a name in the description of a block is none of its members.

        Args:
            path: Of the block.
            block: Of a class that its family knows.
            states: Its pairs, by the names of their branches; None before they were made.

        Raises:
            FamilyError: A branch names what is not there.
        """
        for branch in cls.branches:
            for field in ("name", "norm", "last", "behind"):
                member = getattr(branch, field)
                if member and not hasattr(block, member):
                    names = [name for name, _ in block.named_children()]
                    raise _misnamed(path, branch.name, field, member, "the block's members", names)
            if states is None:
                continue
            if branch.name not in states:
                raise _misnamed(path, branch.name, "name", branch.name, "the pairs", [*states])
            module = getattr(block, branch.name)
            ours = states[branch.name].pair.runs in ("one-launch", "two-launch")
            if branch.output and ours and not hasattr(module, branch.output):
                names = [name for name, _ in module.named_children()]
                where = f"the members of {branch.name!r}"
                raise _misnamed(path, branch.name, "output", branch.output, where, names)

    def _resolve(self, hidden: Hidden, given: Given) -> tuple[Run, ...]:
        """The plan of the block as it is now."""
        return tuple([self._run_of(branch, hidden, given) for branch in self._branches()])

    def _branches(self) -> tuple[Branch, ...]:
        return self.branches

    def _run_of(self, branch: Branch, hidden: Hidden, given: Given) -> Run:
        name, config = branch.name, self._config
        state, inner = self._states[name], self._states.get(branch.inner)
        like: Tensor = hidden[1] if self.streams else hidden
        mode: Mode = self._mode(branch, hidden, given) if state.live else "as-written"
        rounding = self._rounding(branch, like.dtype)
        if mode != "ours" and config.linear == "int8":
            for one in (name, branch.inner):
                self._linears.forget(one)
        # A compiler cannot trace what stands for the block.
        if state.returned and not torch.compiler.is_compiling():
            return AuthorRun((state, inner), branch, rounding)
        if mode != "ours":
            norm = self._norm(branch, state, hidden, given, rounding, as_rows=False)
            return CalledRun((state, inner), mode, norm, branch, rounding)
        module = getattr(self._block, name)

        def norm_of(as_rows: bool) -> Norm:
            return self._norm(branch, state, hidden, given, rounding, as_rows=as_rows)

        kind = StreamsClose if self.streams else Close
        if branch.kind == "feed-forward":
            parts = self._feed_forward(module)
            close = kind(
                self._linears, f"{name}.2", parts.last, like,
                int8=state.int8, cast=branch.cast, impl=config.impl, rounding=rounding,
            )  # fmt: skip
            return FeedForwardRun(
                self._linears, name, parts, state, norm_of, like, close, rounding
            )
        modules = self._attention(branch, like, given)
        close = kind(
            self._linears, f"{name}.out", modules.out, like,
            int8=state.int8, cast=branch.cast, impl=config.impl, rounding=rounding,
        )  # fmt: skip
        asked, few = self._specs[state.precision], None
        if len(state.exact_heads) > 0:
            asked = replace(asked, exact_heads=state.exact_heads)
        quantised = asked.attention in ("auto", "int8")
        if branch.kind == "cross" and quantised and config.form != "one-launch":
            few = self._specs["exact attention"]
        return AttentionRun(
            self._linears, name, modules, (state, inner), norm_of, (asked, few), like, given,
            close, "two-launch" if self.streams else config.form, rounding,
            self._groups() if branch.kind == "self" else None,
        )  # fmt: skip

    def _rounding(self, branch: Branch, dtype: torch.dtype) -> Rounding | None:
        """How the fp32 residual stream is rounded around a branch of a 16-bit model; None if there
        is none.

        It is rounded behind the last branch, and where the next one is its author's.
        """
        if self._config.residual == "model" or dtype not in (torch.bfloat16, torch.float16):
            return None
        live = [self._states[one.name].live for one in self._branches()]
        at = [one.name for one in self._branches()].index(branch.name)
        behind = at + 1 < len(live) and live[at + 1]
        wide = behind or (at > 0 and live[at - 1])
        out = torch.float32 if behind else dtype
        return Rounding(dtype, out, "fp32" if wide else branch.cast)

    def _norm(
        self,
        branch: Branch,
        state: PairState,
        hidden: Hidden,
        given: Given,
        rounding: Rounding | None,
        *,
        as_rows: bool,
    ) -> Norm:
        """The norm before a branch, and its modulation."""
        norm, at = getattr(self._block, branch.norm), branch.at
        if state.live and self._fused_norm(branch, hidden):
            return FusedNorm(
                norm, at, self._config.impl, rounding, as_rows=as_rows and self.int8_rows
            )

        def called(hidden: Tensor, given: Given) -> tuple[Tensor, Any]:
            x = given.forward.called_norm(norm, hidden)
            if at is None:
                return x.type_as(hidden), None
            shift, scale, gate = given.rows[at : at + 3]
            if given.forward.modulation_cast == "fp32":
                x = x.float()
            return (x * (1 + scale) + shift).type_as(hidden), gate

        return CalledNorm(called, rounding)

    def run_author(self, branch: Branch, hidden: Hidden, given: Given) -> Hidden:
        """Run one pair by its author's forward; every module in it is called."""
        assert given.author is not None
        with self.lent():
            return given.author(branch.name, self._only(branch.name, Untold(), None), hidden)

    def close_called(
        self,
        branch: Branch,
        mode: Mode,
        made: Any,
        hidden: Any,
        gate: Any,
        rounding: Rounding | None,
    ) -> Hidden:
        """The skip after a branch that was called: ours, or the author's sum."""
        cast, dtype = branch.cast, hidden.dtype if rounding is None else rounding.model
        if mode == "called" and (cast == "fp32" or made.dtype == dtype):
            c_out = 1.0 if gate is None else gate
            if rounding is None:
                return ops.skip(hidden, made, 1.0, c_out, cast=cast, impl=self._config.impl)
            return ops.skip(
                hidden, made, 1.0, c_out, cast=rounding.cast, impl=self._config.impl,
                out_dtype=rounding.out,
            )  # fmt: skip
        hidden = rounded(hidden, rounding)
        if gate is None:
            return hidden + made
        if cast == "fp32":
            return (hidden.float() + made.float() * gate).type_as(hidden)
        return hidden + made * gate.type_as(hidden)

    # --- run -------------------------------------------------------------------------------------

    def _traced_below(self) -> int:
        """The number of tokens below which a compiler gets the author's block.

        Below it "auto" is exact attention, and our kernels have nothing of their own to add. A
        compiler fuses the author's steps into fewer kernels than our operations are, and calls
        them with less Python (docs/performance.md).
        """
        config, block = self._config, self._block
        apart = config.attention != "auto" or config.linear != "as-is" or not self._head_dim
        if apart or config.form == "one-launch" or not self.traceable or "linear" in self._states:
            return 0
        parameter = next(block.parameters(), None)
        if parameter is None:
            return 0
        return ops.exact_below(self._specs["as asked for"], parameter.device, self._head_dim)

    def _serves(self, hidden: Tensor) -> bool:
        """Whether ours may run; the first block says what it will not follow."""
        few = torch.compiler.is_compiling() and hidden.shape[1] < self._compiler_below
        # Of a sequence that ranks share these are not all tokens, and the other ranks may have
        # more: there the operation decides.
        if few and self._groups() is None:
            return False
        # Blocks share one compiled graph, so none may look at whether it is the first there.
        warned = None if torch.compiler.is_compiling() or not self._first else self._warned
        if warned is not None:
            plain.look_at_classes()
        if plain.replaced and type(self._block) in plain.replaced:
            for state in self._states.values():
                state.note("as written")
            return False
        if unserved(hidden) and not may_run(hidden, self._states.values(), warned):
            return False
        if warned is not None:
            self._warn(warned)
        return True

    def _warn(self, warned: set[str]) -> None:
        """Say once what the model's settings ask for and ours does not follow."""

    def _as_written(self, *inputs: Any) -> Any:
        """The author's forward of this block."""
        # A compiler does not trace the look-up of a class's function.
        compiling = torch.compiler.is_compiling()
        if not compiling:
            self.ranks.lengths = []  # Nobody agreed on this forward.
        author: Any = self._author if compiling else type(self._block).forward
        return author(self._block, *inputs)

    def _begin(self, **inputs: Tensor) -> Guard | None:
        """The guard, on a forward that may be checked."""
        if torch.compiler.is_compiling():
            return None
        guard = self._guard
        if self._first:
            if self._config.self_test and self._config.attention == "auto" and self._head_dim:
                hidden, heads = next(iter(inputs.values())), self._specs["as asked for"].heads
                ensure_tested(hidden.device, hidden.shape[-1] // heads, heads)
            self._linears.copies.begin()
            if isinstance(self._shared, KeptTables):
                self._shared.begin()
            if guard is not None:
                guard.begin(self._way(*inputs.values()), **inputs)
        return guard

    def _way(self, hidden: Tensor, context: Tensor, *_: Tensor) -> tuple[object, ...]:
        """What decides how the pairs of a forward run beside their states."""
        spec, parallel = self._specs["as asked for"], self._groups()
        tokens = hidden.shape[1] + context.shape[1] * self.streams
        if parallel is not None:
            # Nobody has asked yet. Where ranks have different numbers, this is too large on the
            # first and too small on the last, so that one of them is right about a threshold; and
            # what one rank compares, all do.
            tokens *= parallel.size
        if not self._head_dim:
            return hidden.dtype, hidden.device.type
        keys = (tokens,) if self.streams else (tokens, context.shape[1])
        dim = hidden.shape[2] // spec.heads
        each = [ops.resolved(spec, hidden.device, tokens, n, dim) for n in keys]
        few = keys[-1] < ops.INT8_MIN_KEYS  # Of a prompt.
        return hidden.dtype, hidden.device.type, few, *[(one.attention, one.pv) for one in each]

    def _planned(self, hidden: Hidden, given: Given) -> tuple[tuple[Run, ...], Token]:
        """The plan that serves this forward, and the token of its inputs: None where public
        operations have to run."""
        inputs = hidden if self.streams else (hidden, given.context)
        # One that wants a gradient where none is kept is recomputed later (reentrant
        # checkpointing).
        if not inputs[0].requires_grad and plain_inference((*inputs, *given.rows[:1])):
            facts = self._facts(hidden, given)
            plan = self._slot.get(facts, lambda: _Plan(self._resolve(hidden, given)), self._watch)
            if plan is not None:
                return plan, self._token(hidden, given)
        return self._resolve(hidden, given), None

    def _watch(self, plan: tuple[Run, ...]) -> Watch:
        read: list[Tensor] | None = []
        for run in plan:
            own = run.read
            # What is called now may be read once its dtype or device is another.
            read = None if read is None or own is None else read + own
        return Watch(self._block, self._states.values(), decides, read)

    def _run(
        self,
        hidden: Hidden,
        given: Given,
        guard: Guard | None,
        inputs: tuple[Any, ...],
    ) -> Hidden:
        """The branches of the block and the skips around them.

        Args:
            hidden: [B, N, C], or one tensor a stream.
            given: What else the block gets.
            guard: Compares pairs on some forwards, or None.
            inputs: Of the block's forward, as its author gets them.
        """

        def author(name: str, view: Any, hidden: Hidden) -> Hidden:
            return self._by_author(name, view, hidden, inputs)

        # Blocks share one compiled graph, so none may look at whether it is the first there.
        if torch.compiler.is_compiling():
            if self._groups() is not None:
                self.ranks.lengths = []  # Nobody agreed on this forward.
        elif self._first:
            self._begin_parallel(hidden, guard)
        elif self.ranks.lengths:
            self.ranks.reach(self)
        if guard is None or not guard.wants(tuple(self._states.values())):
            plan, token = self._planned(hidden, given)
            if token is None and torch.compiler.is_compiling():
                for run in plan:
                    hidden = run_joined(run, hidden, given)
                return hidden
            if getattr(plan, "ahead", False):
                given = given._replace(ahead={})
            if token is not None and self._first:
                self._compile_ahead(plan, token, hidden, given)
            # Torch looks for gradients in front of every product and allocation. A plan that calls
            # nobody's module wants none, so it passes that by.
            alone = token is not None and getattr(plan, "alone", False)
            if not alone:
                given = given._replace(author=author)
            with torch._C._AutoDispatchBelowAutograd() if alone else nullcontext():
                for run in plan:
                    hidden, token = run(token, hidden, given)
            return hidden
        if self._first:
            plan, token = self._planned(hidden, given)
            self._compile_ahead(plan, token, hidden, given, given._replace(ahead={}))
        given, parallel = given._replace(compared=True, author=author), self._groups()
        dtype = (hidden[1] if self.streams else hidden).dtype
        for index, branch in enumerate(self._branches()):
            hidden = self._compared(guard, index, branch, hidden, given, author, dtype, parallel)
        return hidden

    def calls_attention(self) -> bool:
        """Whether the self-attention of the block is called while the model is parallel, because
        somebody hooked or replaced it or what computes it."""
        for branch in self.branches:
            if branch.kind == "self":
                attn = getattr(self._block, branch.name)
                known = hasattr(type(attn.__dict__.get("processor")), "author_class")
                if not known or not runs_itself(attn):
                    return True
        return False

    def lent(self) -> AbstractContextManager[None]:
        """Inside, self-attention that is called knows what the forward under way has agreed on."""
        if torch.compiler.is_compiling() or not self.ranks.lengths:
            return nullcontext()
        names = [branch.name for branch in self.branches if branch.kind == "self"]
        return lent([getattr(self._block, name) for name in names], self.ranks.lengths)

    def _begin_parallel(self, hidden: Hidden, guard: Guard | None) -> None:
        """Agree on this forward with the ranks that share its sequence."""
        # The model's: somebody may have replaced what computes the attention of this block.
        model = self.ranks.model
        parallel = self._groups() if model is None else groups_of_model(model)
        if parallel is None:
            self.ranks.lengths = []
            return
        like: Tensor = hidden[1] if self.streams else hidden
        tokens = [x.shape[1] for x in (hidden if self.streams else (hidden,))]
        spec = self._specs["as asked for"]
        self.ranks.begin(parallel, like, tokens, spec, self._config, guard)

    def _compile_ahead(
        self, plan: tuple[Run, ...], token: Token, hidden: Hidden, *ways: Given
    ) -> None:
        """Compile the kernels of this block side by side before it runs for the first time with
        such inputs; those of the other blocks are the same. Not where somebody else's module is
        called, because it would be called twice.

        Args:
            plan: Of the block.
            token: Of its inputs.
            hidden: Its residual streams.
            *ways: What else it gets, once for each way in which it will run.
        """
        like: Tensor = hidden[1] if self.streams else hidden
        done = self._slot.compiled
        if token is None or token in done or is_capturing(like.device):
            return
        if len(done) >= _MOST_COMPILED:
            done.clear()
        done.add(token)
        if any([run.read is None for run in plan]):
            return

        def launches() -> None:
            for given in ways:
                streams, behind = hidden, token
                for run in plan:
                    streams, behind = run(behind, streams, given)

        compile_ahead(launches, like.device)

    def _compared(
        self,
        guard: Guard,
        index: int,
        branch: Branch,
        hidden: Hidden,
        given: Given,
        author: Callable[[str, Any, Hidden], Hidden],
        dtype: torch.dtype,
        parallel: ContextParallel | None,
    ) -> Hidden:
        """One pair, compared with its author's code where the guard wants that; the author's code
        gets the residual stream in the model's dtype."""
        seen = rounded(hidden, self._rounding(branch, dtype))

        def ours() -> Hidden:
            plan, token = self._planned(seen, given)  # A step of the guard makes another one.
            if token is not None and seen is not hidden:
                # Another thread's guard may have made a plan that expects the rounded stream.
                token = (token, "wide")
            return plan[index](token, hidden, given)[0]

        states = self._closed_together(branch, given)
        if not states or not states[0].live or not guard.wants(states):
            return ours()

        def written(notes: Notes, x: Any, instead: Callable[..., Any] | None) -> Hidden:
            return author(branch.name, self._only(branch.name, notes, instead), x)

        def attention() -> Tensor | None:
            return self._planned(seen, given)[0][index].attention(hidden, given)

        narrowed = seen is not hidden
        with self.lent():
            closed = guard.close(Pair(states, seen, ours, written, attention, parallel, narrowed))
        self._after_comparing(branch)
        return closed

    def _closed_together(self, branch: Branch, given: Given) -> tuple[PairState, ...]:
        """The pairs that one output projection closes."""
        names = (branch.name, branch.inner)
        return tuple([self._states[name] for name in names if name in self._states])

    def _after_comparing(self, branch: Branch) -> None:
        """What the guard's decision about a pair means for the one inside it."""

    def _only(self, name: str, notes: Notes, instead: Callable[..., Any] | None) -> Any:
        """The block for its author's forward, with one pair in it: the others add nothing."""
        members: dict[str, Any] = dict.fromkeys(self.apart, same)
        for branch in self._branches():
            makes: Any = instead
            if branch.name != name:
                makes = nothing
                members |= {branch.norm: same, branch.behind: same}  # A name "" is none.
            elif instead is not None and not self.streams:
                members[branch.norm] = same  # Of streams it makes the gates, too.
            if makes is not None:
                own = {branch.name: same, branch.last: makes}
                members |= own if branch.last else {branch.name: makes}
            elif not branch.last:
                members[name] = self._watched(branch, notes)
            else:
                members[name] = notes.branch(getattr(self._block, name))
        return notes.over(self._block, **members)

    def _watched(self, branch: Branch, notes: Notes) -> Callable[..., Any]:
        """The author's own branch, whose input is noted."""
        return notes.branch(getattr(self._block, branch.name), branch.output)
