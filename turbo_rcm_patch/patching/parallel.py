"""Models whose sequence several ranks share, through diffusers' `enable_parallelism`.

diffusers writes its configuration to the model and to the attention processors, and hooks that
split inputs and gather outputs to some modules. Here is what the patch reads of that, what makes
it work for the families that diffusers has no plan for, and the way back, which diffusers lacks;
and what the ranks of a patched model agree on at the beginning of every forward.

While a patched model is parallel, its attentions have processors of ours that compute exact
attention over all ranks: what the guard compares with, and what a pair that is given back runs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Literal,
    NamedTuple,
    get_args,
    get_origin,
    get_type_hints,
)
from zlib import crc32

import torch
from torch import Tensor, nn

from turbo_rcm_patch.config import KINDS, PatchConfig
from turbo_rcm_patch.errors import ContextParallelError, RankMismatchError
from turbo_rcm_patch.ops.exchange import ContextParallel, told
from turbo_rcm_patch.ops.parallel import Kind, agreed_ahead, agreed_forward
from turbo_rcm_patch.ops.spec import AttentionSpec
from turbo_rcm_patch.patching.record import record_of
from turbo_rcm_patch.patching.registry import family_of
from turbo_rcm_patch.patching.sla import attached_proj_l
from turbo_rcm_patch.patching.state import PairState, When

if TYPE_CHECKING:
    from turbo_rcm_patch.patching.block import BlockForward
    from turbo_rcm_patch.patching.guard import Guard

_CONFIG: Final = "_parallel_config"
_PLAN: Final = "_cp_plan"
#: On an attention module: the processor that stood there before `distribute_attention`.
_BEFORE: Final = "_turbo_rcm_processor"
#: On a model: its processors were replaced because it is patched and parallel, and go with its
#: parallelism.
_FOLLOWS: Final = "_turbo_rcm_follows"
#: What diffusers' names of its hooks begin with.
_HOOKS: Final = ("cp_input---", "cp_output---")
_WHENS: Final[tuple[When, ...]] = ("first", "last", "asked", "middle")
#: Options that are the same on all ranks, beside those of the attention, and their types.
_HINTS: Final = {
    name: hint
    for name, hint in get_type_hints(PatchConfig).items()
    if name not in ("attention", "pv", "smooth_k", "impl", "calibration")
}
_ELSEWHERE: Final = "as on another rank of its sequence, where the guard decided it"


def groups_of(holder: object) -> ContextParallel | None:
    """The process groups that a model or an attention processor shares its sequence over; None
    where it is whole."""
    config: Any = getattr(holder, _CONFIG, None)
    config = getattr(config, "context_parallel_config", None)
    if config is None:
        return None
    return ContextParallel.from_groups(
        config._flattened_mesh.get_group(),
        config._ulysses_mesh.get_group() if config.ulysses_degree > 1 else None,
        config._ring_mesh.get_group() if config.ring_degree > 1 else None,
    )


def groups_of_model(model: Any) -> ContextParallel | None:
    """The same for a whole model, TurboDiffusion's own among them."""
    # Past `Module.__getattr__`, because every forward asks.
    group = getattr(model, "__dict__", {}).get("_cp_group")
    return groups_of(model) or (None if group is None else ulysses_over(group))


def ulysses_over(group: Any) -> ContextParallel | None:
    """Ulysses over the ranks of one process group; None for no group or one rank."""
    if group is None or group.size() < 2:
        return None
    return ContextParallel.from_groups(group, group, None)


def processor_class(processor: object) -> type:
    """The class of an attention processor; of one that `distribute_attention` made, its author's
    class, whose attention it computes."""
    kind: type = getattr(type(processor), "author_class", type(processor))
    return kind


def context_parallel_plan(model: nn.Module) -> dict[str, Any]:
    """What `enable_parallelism` takes as `cp_plan` for a model of a known family.

    Raises:
        ContextParallelError: Nobody has a plan for it.
    """
    from turbo_rcm_patch.patching.families._parallel import plan_of

    plan = plan_of(model) if family_of(model) is not None else None
    if plan is None:
        raise ContextParallelError(
            f"context_parallel_plan({type(model).__qualname__})",
            expected="a transformer of diffusers that this library patches",
            got=type(model).__qualname__,
            remedy="Pass a cp_plan of your own to enable_parallelism",
        )
    return plan


def attach_plan(model: nn.Module) -> None:
    """Make `model.enable_parallelism(config=...)` find a plan, where its class has none or one
    that is not enough. A plan that somebody set on the model stays."""
    if _PLAN not in model.__dict__:
        model.__dict__[_PLAN] = context_parallel_plan(model)


def detach_plan(model: nn.Module) -> None:
    """Drop the plan that `attach_plan` set."""
    model.__dict__.pop(_PLAN, None)


def distribute_attention(model: nn.Module) -> bool:
    """Give every attention a processor that computes exactly what its own does, over the tokens of
    all ranks while the model is parallel, by the exchanges of `ops.parallel`.

    CogVideoX and ConsisID need it, because their processors take no notice of parallelism; the
    others gain rings that pass keys on, and numbers of heads and tokens that do not divide.

    Returns:
        Whether any was replaced.
    """
    from turbo_rcm_patch.patching.families._parallel import distributed

    config, found = getattr(model, _CONFIG, None), False
    for module in model.modules():
        processor = module.__dict__.get("processor")
        made = None if processor is None else distributed(processor)
        if made is None:
            continue
        if getattr(config, "context_parallel_config", None) is not None:
            made._parallel_config = config
        module.__dict__.update({_BEFORE: processor, "processor": made})
        found = True
    return found


def restore_attention(model: nn.Module) -> None:
    """Put back the processors that `distribute_attention` replaced; one that somebody set since
    stays."""
    from turbo_rcm_patch.patching.families._parallel import is_distributed

    for module in model.modules():
        before = module.__dict__.pop(_BEFORE, None)
        if before is not None and is_distributed(module.__dict__.get("processor")):
            module.__dict__["processor"] = before


def disable_parallelism(model: nn.Module) -> None:
    """Undo `model.enable_parallelism`: drop its hooks and its configuration, and the processors
    that a patched model got for it. The process groups stay, because others may use them.

    CUDA graphs of the model go at once, because the communicators of their groups cannot be
    destroyed before them.

    Raises:
        ContextParallelError: The model is not parallel, or shards its weights.
    """
    config = getattr(model, _CONFIG, None)
    if getattr(config, "context_parallel_config", None) is None:
        raise ContextParallelError(
            "disable_parallelism",
            expected="a model that enable_parallelism split the sequence of",
            got="none" if config is None else "sharded weights",
        )
    record = record_of(model)
    if record is not None and record.graphs is not None:
        record.graphs.clear()
    for module in model.modules():
        registry: Any = module.__dict__.get("_diffusers_hook")
        if registry is not None:
            for name in [name for name in registry.hooks if name.startswith(_HOOKS)]:
                registry.remove_hook(name, recurse=False)
            if not registry.hooks:
                del module._diffusers_hook
            forward = module.__dict__.get("forward")
            if getattr(forward, "__func__", None) is type(module).forward:
                del module.forward  # the class's own, as it was
        for holder in (module, module.__dict__.get("processor")):
            if holder is not None and vars(holder).get(_CONFIG) is config:
                delattr(holder, _CONFIG)
    for module in model.modules():
        # What the processor of ours replaced has the configuration still.
        before = module.__dict__.get(_BEFORE)
        if before is not None and vars(before).get(_CONFIG) is config:
            delattr(before, _CONFIG)
    if model.__dict__.pop(_FOLLOWS, ""):
        restore_attention(model)


# --- a patched model -----------------------------------------------------------------------------


class EnableParallelism:
    """Stands in for the `enable_parallelism` of a patched model: as its author's, with a plan for
    every family, and processors that compute exact attention over all ranks."""

    __slots__ = ("_config", "_model")

    def __init__(self, model: nn.Module, config: PatchConfig) -> None:
        self._model, self._config = model, config

    def __call__(self, *, config: Any, cp_plan: dict[str, Any] | None = None) -> None:
        """As diffusers' method.

        Raises:
            ContextParallelError: The patched model cannot run so; nothing was changed.
        """
        model: Any = self._model
        splits = getattr(config, "context_parallel_config", config)
        if hasattr(splits, "ring_degree"):
            _refuse_ring(model, self._config, splits.ring_degree > 1)
            if cp_plan is None and _PLAN not in vars(model):
                cp_plan = context_parallel_plan(model)
        type(model).enable_parallelism(model, config=config, cp_plan=cp_plan)
        follow(model, "enabled")


def follow(model: nn.Module, since: Literal["enabled", "patched"]) -> None:
    """Give the attentions of a patched model that is parallel processors of ours, until it is
    parallel no more.

    Args:
        model: The model.
        since: What came last.
    """
    if groups_of(model) is not None and distribute_attention(model):
        model.__dict__.setdefault(_FOLLOWS, since)


def leave(model: nn.Module) -> None:
    """The patch goes and the parallelism stays. Processors that know of ranks come back where the
    model was parallel before it was patched; elsewhere ours stay until `disable_parallelism`,
    because the model would be wrong without them."""
    before = [vars(module).get(_BEFORE) for module in model.modules()]
    know = all(hasattr(type(one), _CONFIG) for one in before if one is not None)
    if vars(model).get(_FOLLOWS) == "patched" and know:
        del model.__dict__[_FOLLOWS]
        restore_attention(model)


def check_parallel(model: nn.Module, config: PatchConfig) -> None:
    """Raise before anything changes if a parallel model cannot be patched like this.

    Raises:
        ContextParallelError: It asks in a ring for an attention that no ring has.
    """
    groups = groups_of(model)
    _refuse_ring(model, config, groups is not None and groups.ring is not None)


def _refuse_ring(model: nn.Module, config: PatchConfig, ring: bool) -> None:
    if not ring:
        return
    what = ""
    if config.attention == "sage":
        what = 'attention="sage", which gives no logsumexp'
    elif any(attached_proj_l(module) is not None for module in model.modules()):
        what = "SLA, which chooses among all keys of a head"
    if what:
        raise ContextParallelError(
            "ring_degree",
            expected="Ulysses alone",
            got=f"a ring and {what}",
            remedy="Use ContextParallelConfig(ulysses_degree=...)",
        )


def split_words(model: nn.Module, config: PatchConfig, pv: str) -> str:
    """Over how many ranks a model's sequence is split, and what they send each other; "" where it
    is whole. For the report."""
    groups = groups_of_model(model)
    if groups is None:
        return ""
    degrees = [("Ulysses", groups.ulysses_degree), ("ring", groups.ring_degree)]
    form = " x ".join(f"{name} {degree}" for name, degree in degrees if degree > 1)
    sparse = any(attached_proj_l(module) is not None for module in model.modules())
    exact = sparse or config.attention in ("exact", "sage")
    sent = "q, k and v in the model's dtype" if exact else f"{config.attention} q and k, {pv} v"
    if config.attention == "auto":
        sent = f"int8 q and k and {pv} v, or all in the model's dtype, by length"
    back = "the output in the model's dtype" if groups.ulysses is not None else "no output"
    return f"parallel: rank {groups.rank} of {groups.size} ({form}); sent: {sent}; {back}"


class Ranks:
    """What the ranks of one patched model agree on, forward by forward.

    They have the same pairs and decide about them together, because how a pair runs decides what
    the ranks send each other. A forward that is not parallel asks nobody.

    Args:
        states: The model's pairs.
        model: The model.

    Attributes:
        lengths: Tokens of every rank in the forward under way; none where nobody was asked in it.
    """

    __slots__ = ("_blocks", "_model", "_ran", "_states", "lengths")

    def __init__(self, states: list[PairState], model: nn.Module | None) -> None:
        self._states = states
        self._model: Callable[[], nn.Module | None] = (
            _gone if model is None else weakref.ref(model)
        )
        self.lengths: list[int] = []
        #: Blocks behind the first one that ran with these lengths, by id.
        self._ran: set[int] = set()
        # They hold this, and would keep each other until Python looks for cycles.
        self._blocks: list[weakref.ref[BlockForward]] = []

    def __reduce__(self) -> tuple[type[Ranks], tuple[Any, ...], None, Iterator[BlockForward]]:
        # The last are what `append` is called with.
        return Ranks, (self._states, self._model()), None, iter(self._living())

    def append(self, block: BlockForward) -> None:
        """Have what stands in for the forward of one more block take part."""
        self._blocks.append(weakref.ref(block))

    def _living(self) -> list[BlockForward]:
        return [block for block in (ref() for ref in self._blocks) if block is not None]

    @property
    def model(self) -> nn.Module | None:
        """The model, while it lives."""
        return self._model()

    def begin(
        self,
        groups: ContextParallel,
        x: Tensor,
        streams: Sequence[int],
        spec: AttentionSpec,
        config: PatchConfig,
        guard: Guard | None,
    ) -> None:
        """A forward of a parallel model begins on every rank: check that theirs fit together, and
        if the ranks have seen different forwards before, go on with what the most careful of them
        does.

        Args:
            groups: Who shares the sequence.
            x: An input of the first block.
            streams: Tokens that this rank has of every stream.
            spec: How its attentions are computed.
            config: How the model is patched.
            guard: Compares pairs on some forwards, or None.

        Raises:
            RankMismatchError: They do not fit; on every rank alike.
        """
        self.lengths, self._ran = [], set()
        mine = self._caution()
        begun = (0,) * (len(_WHENS) + 2) if guard is None else guard.begun(_WHENS)
        marks = repr([state.exact_heads for state in self._states]).encode()
        measured = 0 if guard is None else guard.measured
        digest = crc32(marks, crc32(bytes([*mine, *begun]), measured))
        model = self.model
        # What is not inference is refused by an attention, when others may wait for it already.
        gradient = torch.is_grad_enabled() and (
            x.requires_grad
            or (model is not None and any(p.requires_grad for p in model.parameters()))
        )
        # One that is called sends something else than ours.
        called = [at for at, block in enumerate(self._living()) if block.calls_attention()]
        tokens, even = sum(streams), not anything(model)
        same: dict[str, tuple[Kind, object]] = {
            "tokens": ("int", tokens if even else 0),
            "pairs": ("int", len(self._states)),
            "a gradient is wanted": ("int", gradient),
            "blocks whose self-attention somebody hooked or replaced": ("heads", called),
            **_settings(config),
        }
        self.lengths, digests = agreed_forward(x, tokens, spec, groups, same=same, free=[digest])
        lengths = self.lengths
        if sorted(lengths, reverse=True) != lengths or lengths[0] - lengths[-1] > len(streams):
            raise RankMismatchError(
                "tokens of the ranks",
                expected="those of one sequence, split as evenly as it can be",
                got=str(lengths),
                remedy="Give every rank the same inputs",
            )
        if all(each == [digest] for each in digests):
            return
        heads = [h in state.exact_heads for state in self._states for h in range(state.pair.heads)]
        told_here = [*mine, *begun, measured, *map(int, heads)]
        rows = told("states", told_here, groups, x.device)
        agreed = [max(column) for column in zip(*rows, strict=True)]
        width, at = len(mine) // max(1, len(self._states)), len(mine) + len(begun)
        bits = iter(agreed[at + 1 :])
        for index, state in enumerate(self._states):
            marked = tuple([h for h in range(state.pair.heads) if next(bits)])
            self._follow(state, agreed[index * width :][:width], marked)
        if guard is not None:
            asked = agreed[len(mine) :][: len(_WHENS)]
            whens = [when for when, bit in zip(_WHENS, asked, strict=True) if bit]
            guard.resume(whens, agreed[at - 1])
            if len({row[at] for row in rows}) > 1:
                guard.measure_again()

    def reach(self, block: BlockForward) -> None:
        """A block runs that is not the first. Where it ran with these lengths before, this is
        another forward, whose first block asked nobody (it may be compiled by now)."""
        if id(block) in self._ran:
            self.lengths = []
        self._ran.add(id(block))

    def _caution(self) -> list[int]:
        """What decides how each pair runs and whether it is compared, such that the larger of two
        numbers is the more careful; `_follow` reads them in this order."""
        made: list[int] = []
        for state in self._states:
            careful = state.precision
            made += (
                not state.live,
                not state.int8,
                careful != "as asked for",
                careful == "exact attention",
                *[when in state.unseen for when in _WHENS],
            )
        return list(map(int, made))

    def _follow(
        self, state: PairState, agreed: Sequence[int], exact_heads: tuple[int, ...]
    ) -> None:
        given_back, no_int8, careful, exact = agreed[: -len(_WHENS)]
        whole = exact or (exact_heads and len(exact_heads) == state.pair.heads)
        state.decide(
            _ELSEWHERE,
            int8=state.int8 and not no_int8,
            precision="exact attention" if whole else "16-bit p and v" if careful else None,
            exact_heads=exact_heads,
        )
        if given_back and state.live:
            state.give_back(f"given back {_ELSEWHERE}")
        unseen = zip(_WHENS, agreed[-len(_WHENS) :], strict=True)
        state.unseen = {when for when, bit in unseen if bit}


@contextmanager
def lent(attentions: Iterable[nn.Module], lengths: list[int]) -> Iterator[None]:
    """Inside, the processors of ours that these attentions have take the tokens of every rank from
    the forward under way, and ask nobody."""
    found: list[Any] = [attn.__dict__.get("processor") for attn in attentions]
    found = [one for one in found if hasattr(one, "lengths") and not one.lengths]
    for processor in found:
        processor.lengths = lengths
    try:
        yield
    finally:
        for processor in found:
            del processor.lengths


def _settings(config: PatchConfig) -> dict[str, tuple[Kind, object]]:
    """What has to be the same on every rank of how a model is patched, beside its attention.

    What a calibration chose is agreed on; where its file lies may differ."""
    made: dict[str, tuple[Kind, object]] = {}
    for name, hint in _HINTS.items():
        value = getattr(config, name)
        kind: Kind = "float" if hint is float else "int"
        if get_origin(hint) is Literal:
            kind = get_args(hint)
        elif name == "kinds":
            kind, value = "heads", [KINDS.index(one) for one in value]
        made[f"PatchConfig.{name}"] = kind, value
    return made


def anything(model: nn.Module | None) -> bool:
    """Whether the ranks of a model may have different numbers of tokens."""
    config: Any = getattr(getattr(model, _CONFIG, None), "context_parallel_config", None)
    return any(getattr(config, name, False) for name in ("ulysses_anything", "ring_anything"))


# --- CUDA graphs ---------------------------------------------------------------------------------

#: What a rank wants to do with a forward, and what became of its capture.
Way = Literal["plain", "capture", "replay", "captured", "failed"]
_WAYS: Final[tuple[Way, ...]] = ("plain", "capture", "replay", "captured", "failed")


class Wish(NamedTuple):
    """What a rank would do with the forward that begins.

    Attributes:
        way: It runs plain, captures a graph, or replays one; or what became of its capture.
        graph: The number of the graph that it would replay. Ranks that captured one together gave
            it the same, and no other graph has it.
        last: The largest number that this process gave to a graph.
        signature: Stands for the arguments of the forward.
    """

    way: Way
    graph: int = 0
    last: int = 0
    signature: int = 0


def told_wishes(groups: ContextParallel, device: torch.device, wish: Wish) -> list[Wish]:
    """What every rank would do, this one among them.

    Raises:
        RankMismatchError: Some rank's model is patched without `cuda_graphs`; on every rank alike.
    """
    row = [_WAYS.index(wish.way), *wish[1:]]
    table = agreed_ahead(row, groups, device)
    return [Wish(_WAYS[way], *numbers) for way, *numbers in table]


def split_hooks(module: nn.Module, ours: Callable[[object], bool]) -> dict[str, Any]:
    """diffusers' hooks of a module, where all that hangs on it splits inputs or gathers outputs
    for context parallelism; empty where there is none, or something else.

    Args:
        module: The module.
        ours: Whether a function stands in for a forward.
    """
    registry: Any = module.__dict__.get("_diffusers_hook")
    hooks: dict[str, Any] = getattr(registry, "hooks", {})
    if not hooks or not all(name.startswith(_HOOKS) for name in hooks):
        return {}
    outer: Any = module.__dict__.get("forward")
    for reference in reversed(registry._fn_refs):
        # Each function of the chain holds the reference through which it calls the next one.
        cells = getattr(getattr(outer, "func", None), "__closure__", None) or ()
        if not any(cell.cell_contents is reference for cell in cells):
            return {}
        outer = reference.forward
    own = getattr(outer, "__func__", None) is type(module).forward
    return hooks if own or ours(outer) else {}


def _gone() -> None:
    """A model that is not there."""
