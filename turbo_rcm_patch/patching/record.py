"""The undo record: which functions were replaced and where, so that unpatching restores them.

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
from typing import Any, Final

from torch import nn

from turbo_rcm_patch.config import PatchConfig
from turbo_rcm_patch.errors import WrappedError
from turbo_rcm_patch.patching.block import PatchedBlock
from turbo_rcm_patch.patching.guard import Guard
from turbo_rcm_patch.patching.plain import is_own, own_function
from turbo_rcm_patch.skip import SkipPair

#: The instance attribute under which a patched model keeps its record.
ATTRIBUTE: Final = "_turbo_rcm_patch"


class _Before(Enum):
    """Markers for the former content of a slot. They survive deepcopy and pickle as themselves."""

    ABSENT = 0
    #: The class's own bound method. Pickle would store it as "the `forward` of that module", which
    #: is the replacement.
    OWN = 1


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """A place that holds a function.

    Attributes:
        holder: A module, or a reference of diffusers' hook chain.
        name: The attribute that holds the function.
    """

    holder: Any
    name: str

    def get(self) -> Any:
        """Return the content, or `ABSENT`. Class attributes do not count."""
        return vars(self.holder).get(self.name, _Before.ABSENT)

    def put(self, value: Any) -> None:
        """Set the content, or delete it if the value is `ABSENT`."""
        if value is not _Before.ABSENT:
            setattr(self.holder, self.name, value)
        elif self.get() is not _Before.ABSENT:
            delattr(self.holder, self.name)


def _slots(module: nn.Module, name: str) -> Iterator[Slot]:
    """Yield all places that can hold the function `module.name`, the instance attribute first."""
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
    """Return the place of the author's own function, under any hooks.

    Return None if the function was replaced on the instance or on its class. The place is the
    instance attribute if that is absent, or if it is the class's bound method, which diffusers
    leaves there when its last hook is removed.
    """
    if not own_function(type(module), name):
        return None
    places = list(_slots(module, name))
    if places[0].get() is _Before.ABSENT:
        return places[0]
    return next((slot for slot in places if is_own(module, name, slot.get())), None)


@dataclass(slots=True, eq=False)
class Entry:
    """One function that was replaced.

    Attributes:
        module: The module to which the function belongs.
        name: The attribute through which the module runs it.
        function: The replacement.
        slot: The place of the replacement when it was installed.
        before: The former content of that place, or a marker for it.
    """

    module: nn.Module
    name: str
    function: Any
    slot: Slot
    before: Any = None

    def __post_init__(self) -> None:
        self.before = self.slot.get()
        if is_own(self.module, self.name, self.before):
            self.before = _Before.OWN

    def install(self) -> None:
        """Put the replacement in place."""
        self.slot.put(self.function)

    def restore(self, slot: Slot) -> None:
        """Restore the former content of a slot."""
        slot.put(_own(self.module, self.name) if self.before is _Before.OWN else self.before)

    def located(self) -> list[Slot]:
        """Return all places that hold the replacement now."""
        return [slot for slot in _slots(self.module, self.name) if slot.get() is self.function]

    def check(self, path: str) -> None:
        """Raise WrappedError if other code replaced our function after patching."""
        outside = Slot(self.module, self.name).get()
        bare = outside is _Before.ABSENT or is_own(self.module, self.name, outside)
        if bare or self.located():
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
            # A later hook saved the replacement where it would have saved the author's function.
            captured = slot.holder is not self.module or slot.name != self.name
            if captured and self.before is _Before.ABSENT:
                slot.put(_own(self.module, self.name))
            else:
                self.restore(slot)


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
    """

    model: nn.Module
    path: str
    config: PatchConfig
    blocks: list[PatchedBlock]
    others: list[SkipPair]
    entries: list[Entry] = field(default_factory=list)
    guard: Guard | None = None
    dropped: int = 0

    def __repr__(self) -> str:
        return f"PatchRecord({self.path or 'model'!r}, {len(self.entries)} functions)"

    def pairs(self) -> list[SkipPair]:
        """Return every pair as it would run now."""
        return [pair for block in self.blocks for pair in block.pairs()] + self.others

    def install(self) -> None:
        """Install all entries, or none: after an exception the model is as before."""
        done: list[Entry] = []
        try:
            for entry in self.entries:
                done.append(entry)
                entry.install()
            setattr(self.model, ATTRIBUTE, self)
        except BaseException:
            for entry in reversed(done):
                entry.restore(entry.slot)
            self._forget()
            raise

    def check(self) -> None:
        """Raise WrappedError if undoing is not safe; change nothing."""
        names = {id(module): name for name, module in self.model.named_modules()}
        for entry in self.entries:
            entry.check(names.get(id(entry.module)) or type(entry.module).__name__)

    def undo(self) -> None:
        """Undo all entries. Call `check` first."""
        for entry in reversed(self.entries):
            entry.undo()
        self._forget()

    def _forget(self) -> None:
        if ATTRIBUTE in self.model.__dict__:
            delattr(self.model, ATTRIBUTE)


def record_of(model: nn.Module) -> PatchRecord | None:
    """Return the record of a patched model, or None."""
    record: PatchRecord | None = model.__dict__.get(ATTRIBUTE)
    return record
