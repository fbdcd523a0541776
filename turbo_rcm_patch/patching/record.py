"""The undo record: what was where, so that unpatching restores exactly that.

A function that a module runs can sit in several places: the instance attribute `forward`,
accelerate's `_old_forward`, or the reference chain of diffusers' hook registry. Patching under
existing hooks replaces the innermost of them; hooks that come or go afterwards move our function
between those places, so undoing looks for it instead of trusting a saved position.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from types import MethodType
from typing import TYPE_CHECKING, Any, Final, Literal

from torch import nn

from turbo_rcm_patch.errors import WrappedError
from turbo_rcm_patch.patching.plain import is_own, look_at_classes
from turbo_rcm_patch.patching.registry import family_of
from turbo_rcm_patch.patching.report import GuardLog
from turbo_rcm_patch.patching.sla import Recovered
from turbo_rcm_patch.patching.state import ModelPlan
from turbo_rcm_patch.skip import SkipPair

if TYPE_CHECKING:
    from turbo_rcm_patch.patching.graphs import Graphs

#: The instance attribute under which a patched model keeps its record.
ATTRIBUTE: Final = "_turbo_rcm_patch"


class _Before(Enum):
    """What was in a slot where it is not kept itself; survives deepcopy and pickle as itself."""

    ABSENT = 0
    #: The bound method itself. Pickle would keep "the `forward` of that module", which is ours.
    OWN = 1


_ABSENT: Final = _Before.ABSENT
_OWN: Final = _Before.OWN


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """A place where a function sits.

    Attributes:
        holder: A module, or a reference of diffusers' hook chain.
        name: The attribute that holds the function.
    """

    holder: Any
    name: str

    def get(self) -> Any:
        """What is there, or `_ABSENT` (class attributes do not count)."""
        return vars(self.holder).get(self.name, _ABSENT)

    def put(self, value: Any) -> None:
        """Set it, or delete it if the value is `_ABSENT`."""
        if value is not _ABSENT:
            setattr(self.holder, self.name, value)
        elif self.get() is not _ABSENT:
            delattr(self.holder, self.name)


def _slots(module: nn.Module, name: str) -> Iterator[Slot]:
    """Every place that can hold the function `module.name` runs, the instance attribute first."""
    yield Slot(module, name)
    if name != "forward":
        return
    if "_old_forward" in module.__dict__:
        yield Slot(module, "_old_forward")
    for reference in getattr(module.__dict__.get("_diffusers_hook"), "_fn_refs", ()):
        yield Slot(reference, "original_forward")
        yield Slot(reference, "forward")


def _own(module: nn.Module, name: str) -> MethodType:
    return MethodType(getattr(type(module), name), module)


def innermost(module: nn.Module, name: str = "forward") -> Slot | None:
    """Where the author's own function sits under whatever hooks there are; None if it was
    replaced.

    The instance attribute is the place if nothing is there, or if it is the bound method itself,
    which diffusers leaves behind when its last hook is removed.
    """
    places = list(_slots(module, name))
    if places[0].get() is _ABSENT:
        return places[0]
    return next((slot for slot in places if is_own(module, name, slot.get())), None)


def holds(module: nn.Module, kind: type, name: str = "forward") -> bool:
    """Whether a function of this kind sits anywhere that `module.name` runs it from."""
    return any(isinstance(slot.get(), kind) for slot in _slots(module, name))


@dataclass(slots=True, eq=False)
class Entry:
    """One function that was replaced.

    Attributes:
        module: The module it belongs to.
        name: The attribute through which the module runs it.
        ours: What was put there.
        slot: Where it was put.
        before: What was there, or a marker for it.
    """

    module: nn.Module
    name: str
    ours: Any
    slot: Slot
    before: Any

    def __post_init__(self) -> None:
        if is_own(self.module, self.name, self.before):
            self.before = _OWN

    def install(self) -> None:
        """Put ours in place."""
        self.slot.put(self.ours)

    def restore(self, slot: Slot) -> None:
        """Put back what was there."""
        slot.put(_own(self.module, self.name) if self.before is _OWN else self.before)

    def located(self) -> list[Slot]:
        """Where ours sits now."""
        return [slot for slot in _slots(self.module, self.name) if slot.get() is self.ours]

    def check(self, path: str) -> None:
        """Raise WrappedError if removing ours would drop somebody else's change, or miss ours."""
        outside = Slot(self.module, self.name).get()
        bare = outside is _ABSENT or is_own(self.module, self.name, outside)
        if bare or self.located():
            return
        raise WrappedError(
            f"{path}.{self.name} was replaced after patching",
            expected="our function, or hooks of diffusers or accelerate around it",
            got=repr(outside)[:120],
            remedy="Undo the later change first, then call unpatch_model again",
        )

    def undo(self) -> None:
        """Take ours away, wherever it sits now."""
        for slot in self.located():
            # Hooks that came later captured ours; without us, the author's.
            captured = slot.holder is not self.module or slot.name != self.name
            if captured and self.before is _ABSENT:
                slot.put(_own(self.module, self.name))
            else:
                self.restore(slot)


@dataclass(slots=True, eq=False)
class PatchRecord:
    """Everything one patched model needs to be put back, and what it runs meanwhile."""

    plan: ModelPlan
    log: GuardLog
    entries: list[Entry] = field(default_factory=list)
    recovered: Recovered | None = None
    graphs: Graphs | None = None
    #: Linears of all models patched with this one whose originals were dropped.
    dropped: int = 0

    def __repr__(self) -> str:
        return f"PatchRecord({self.plan.path or 'model'!r}, {len(self.entries)} functions)"

    def pairs(self) -> list[SkipPair]:
        """Every pair as it runs now: what the guard gave back, and what was hooked since."""
        plan = self.plan
        if record_of(plan.model) is not self:
            return plan.pairs
        family = family_of(plan.model)
        assert family is not None
        look_at_classes()
        fresh = family.plan(plan.model, plan.path, plan.config).states
        known = {state.pair.path: state for state in plan.states}
        if any(new.pair.path not in known for new in fresh):
            return plan.pairs
        # A pair may be gone: SLA's is with its proj_l.
        return [known[new.pair.path].shown(new.pair) for new in fresh] + plan.boundary

    def install(self) -> None:
        """Set every attribute, or none: what raises on the way is undone before it propagates."""
        done: list[Entry] = []
        try:
            for entry in self.entries:
                done.append(entry)
                entry.install()
            setattr(self.plan.model, ATTRIBUTE, self)
        except BaseException:
            for entry in reversed(done):
                entry.restore(entry.slot)
            self._forget()
            raise

    def check(self) -> None:
        """Raise before anything changes if undoing is not safe."""
        names = {id(module): name for name, module in self.plan.model.named_modules()}
        for entry in self.entries:
            entry.check(names.get(id(entry.module)) or type(entry.module).__name__)

    def undo(self) -> None:
        """Restore every attribute. Call `check` first."""
        for entry in reversed(self.entries):
            entry.undo()
        self.plan.copies.close()
        if self.graphs is not None:
            self.graphs.close()
        if self.recovered is not None:
            self.recovered.undo()
        self._forget()

    def _forget(self) -> None:
        if ATTRIBUTE in self.plan.model.__dict__:
            delattr(self.plan.model, ATTRIBUTE)


def record_of(model: nn.Module) -> PatchRecord | None:
    """The record a model carries, if it is patched."""
    record: PatchRecord | Literal[None] = model.__dict__.get(ATTRIBUTE)
    return record
