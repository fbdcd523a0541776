"""The undo record: which functions were replaced and where, so that unpatching restores them.

A function that a module runs can sit in several places: the instance attribute `forward`,
accelerate's `_old_forward`, the reference chain of diffusers' hook registry, or what `parallel`
runs. Patching under existing hooks replaces the innermost of them; hooks that come or go
afterwards move our function between those places, so undoing looks for it instead of trusting a
saved position.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from types import MethodType
from typing import Any, Final, NoReturn

from torch import nn

from turbo_rcm_patch.config import PatchConfig
from turbo_rcm_patch.errors import ContextParallelError, WrappedError
from turbo_rcm_patch.patching.block import PatchedBlock
from turbo_rcm_patch.patching.guard import Guard
from turbo_rcm_patch.patching.int8_linears import WRITERS
from turbo_rcm_patch.patching.network import DecidingForward
from turbo_rcm_patch.patching.plain import Replacement, is_own, own_function, owner
from turbo_rcm_patch.patching.plan import NetworkPlan, Plan
from turbo_rcm_patch.patching.ulysses import PARALLEL
from turbo_rcm_patch.skip import SkipPair

#: The instance attribute under which a patched model keeps its record.
ATTRIBUTE: Final = "_turbo_rcm_patch"


#: A place that holds a function: a module or a reference of diffusers' hook chain, and the name of
#: its attribute.
Slot = tuple[Any, str]


def _held(slot: Slot) -> Any:
    """Return the content of a place, or None. Class attributes do not count."""
    return vars(slot[0]).get(slot[1])


def _slots(module: nn.Module, name: str) -> Iterator[Slot]:
    """Yield all places that can hold the function `module.name`, the instance attribute first."""
    yield module, name
    if name != "forward":
        return
    if "_old_forward" in module.__dict__:
        yield module, "_old_forward"
    for reference in getattr(module.__dict__.get("_diffusers_hook"), "_fn_refs", ()):
        yield reference, "original_forward"
        yield reference, "forward"
    if PARALLEL in module.__dict__:
        yield module.__dict__[PARALLEL], "inner"


def innermost(module: nn.Module, name: str) -> Slot | None:
    """Return the place of the author's own function, under any hooks.

    Return None if the function was replaced on the instance or on its class. The place is the
    instance attribute if that is absent, or if it is the class's bound method, which diffusers
    leaves there when its last hook is removed.
    """
    if not own_function(type(module), name):
        return None
    places = list(_slots(module, name))
    if _held(places[0]) is None:
        return places[0]
    return next((slot for slot in places if is_own(module, name, _held(slot))), None)


def runs_own_forward(module: nn.Module) -> bool:
    """Return True if a module's forward is its author's or ours, under any hooks."""
    ours = [isinstance(owner(_held(slot)), Replacement) for slot in _slots(module, "forward")]
    return innermost(module, "forward") is not None or any(ours)


@dataclass(slots=True, eq=False)
class Entry:
    """One function that was replaced.

    Attributes:
        module: The module to which the function belongs.
        name: The attribute through which the module runs it.
        function: The replacement.
        slot: The place of the replacement when it was installed, from `innermost`.
        absent: True if nothing was there; else it was the class's own bound method, which is not
            kept, because pickle would store it as "the `forward` of that module": the replacement.
    """

    module: nn.Module
    name: str
    function: Any
    slot: Slot
    absent: bool

    def install(self) -> None:
        """Put the replacement in place."""
        setattr(*self.slot, self.function)

    def located(self) -> list[Slot]:
        """Return all places that hold the replacement now."""
        return [slot for slot in _slots(self.module, self.name) if _held(slot) is self.function]

    def check(self, path: str) -> None:
        """Raise WrappedError if other code replaced our function after patching."""
        outside = _held((self.module, self.name))
        if outside is None or is_own(self.module, self.name, outside) or self.located():
            return
        raise WrappedError(
            f"{path}.{self.name} was replaced after patching",
            expected="our function, or hooks of diffusers or accelerate around it",
            got=repr(outside)[:120],
            remedy="Undo the later change first, then call unpatch_model again",
        )

    def undo(self) -> None:
        """Remove the replacement from every place that holds it."""
        for slot in self.located():
            if self.absent and slot == (self.module, self.name):
                delattr(*slot)
            else:  # A later hook may have saved the replacement in the author's place.
                original = MethodType(getattr(type(self.module), self.name), self.module)
                setattr(*slot, original)


def refuse_replicas() -> NoReturn:
    """Replaces a patched model's function that makes the replicas of `nn.DataParallel`.

    A replica's modules would hold our functions of the first GPU's modules.
    """
    raise ContextParallelError(
        "a patched model",
        expected="one that runs on one GPU, or on several by turbo_rcm_patch.parallel",
        got="nn.DataParallel, which copies it for each GPU",
        remedy="Start a process for each GPU, or unpatch the model first",
    )


@dataclass(slots=True, eq=False)
class PatchRecord:
    """All that is needed to restore one patched model and to report on it.

    Attributes:
        model: The model.
        path: Its name in what the user passed.
        config: How it is patched.
        blocks: Its blocks in the order in which they run.
        others: Pairs that run as their author wrote them.
        entries: The functions that are replaced.
        guard: Its guard, or None.
        dropped: Number of Linears that lost their original weights (int8-only).
        keeps_vae: True if the VAE of the pipeline was patched before, by another call.
        plan: The plan by which the blocks run, or None.
        planned: How the blocks run by it, or None.
    """

    model: nn.Module
    path: str
    config: PatchConfig
    blocks: list[PatchedBlock]
    others: list[SkipPair]
    entries: list[Entry] = field(default_factory=list)
    guard: Guard | None = None
    dropped: int = 0
    keeps_vae: bool = False
    plan: Plan | None = None
    planned: NetworkPlan | None = None

    def __repr__(self) -> str:
        return f"PatchRecord({self.path or 'model'!r}, {len(self.entries)} functions)"

    def pairs(self) -> list[SkipPair]:
        """Return every pair as it would run now."""
        return [pair for block in self.blocks for pair in self._pairs(block)] + self.others

    def _pairs(self, block: PatchedBlock) -> list[SkipPair]:
        entry = next((entry for entry in self.entries if entry.module is block.block), None)
        if entry is None or entry.located() or record_of(self.model) is not self:
            return block.pairs()
        reason = "other code replaced the block's forward after patching"
        return [
            replace(pair, runs="as-written", reason=reason, int8_linears=())
            for pair in block.pairs()
        ]

    def replace(self, module: nn.Module, name: str, function: Any) -> bool:
        """Add an entry, to be installed later, and return True; do nothing if the present function
        is not the author's own."""
        slot = innermost(module, name)
        if slot is not None:
            self.entries.append(Entry(module, name, function, slot, _held(slot) is None))
        return slot is not None

    def install(self) -> None:
        """Install all entries. After an exception, `undo` removes those that were installed."""
        setattr(self.model, ATTRIBUTE, self)  # first, so that `unpatch_model` always finds it
        self.replace(self.model, "_replicate_for_data_parallel", refuse_replicas)
        for entry in self.entries:
            entry.install()

    def check(self) -> None:
        """Raise WrappedError if undoing is not safe; change nothing."""
        names = {id(module): name for name, module in self.model.named_modules()}
        for entry in self.entries:
            # The network's own only watches: where other code replaced it, theirs stays.
            if not isinstance(owner(entry.function), DecidingForward):
                entry.check(names.get(id(entry.module)) or type(entry.module).__name__)

    def undo(self) -> None:
        """Undo the entries that are installed. Call `check` first."""
        for entry in reversed(self.entries):
            entry.undo()
            deciding = owner(entry.function)
            if isinstance(deciding, DecidingForward):
                deciding.retire()
        undo_replacements(self.model)
        vars(self.model).pop(ATTRIBUTE, None)


def _installed(model: nn.Module) -> Iterator[Entry]:
    """Yield every replacement in a model, also those that were copied with their blocks."""
    for module, name in product(model.modules(), ("forward", *WRITERS)):
        for slot in _slots(module, name):
            replacement = owner(_held(slot))
            retired = isinstance(replacement, DecidingForward) and replacement.guard is None
            if isinstance(replacement, Replacement) and not retired:
                yield Entry(module, name, _held(slot), slot, absent=True)


def holds_patch(model: nn.Module) -> bool:
    """Return True if a model, or one inside, is patched or holds a replacement."""
    return any(map(record_of, model.modules())) or any(True for _ in _installed(model))


def undo_replacements(model: nn.Module) -> None:
    """Remove every replacement in a model."""
    for entry in list(_installed(model)):
        entry.undo()


def record_of(model: nn.Module) -> PatchRecord | None:
    """Return the record of a patched model, or None."""
    record: PatchRecord | None = model.__dict__.get(ATTRIBUTE)
    return record
