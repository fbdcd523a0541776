"""What a patched model carries: the live state of each pair, and the forwards that read it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch import nn

from turbo_rcm_patch.config import PatchConfig
from turbo_rcm_patch.skip import Residual, SkipPair

if TYPE_CHECKING:
    from turbo_rcm_patch.patching.guard import Guard

__all__ = ["Installation", "ModelPlan", "PairState"]


class PairState:
    """One pair of a patched model, as it runs now.

    Attributes:
        pair: The pair and how it runs; replaced when that changes.
        live: Whether the fused path runs. A plain flag, because a forward reads it on every call.
        int8: Whether its Linears may run in int8; a plain flag too.
    """

    __slots__ = ("_step", "int8", "live", "pair")

    def __init__(self, pair: SkipPair, *, int8: bool = False) -> None:
        self.pair = pair
        self.live = pair.fused
        self.int8 = int8 and pair.fused
        self._step = ""

    def give_back(self, reason: str) -> None:
        """Run this pair as its author wrote it from now on."""
        runs: Residual = "as-written"
        self.live = self.int8 = False
        self.pair = replace(self.pair, runs=runs, reason=reason, int8_linears=())

    def give_back_linears(self, reason: str) -> None:
        """Run its Linears as they are from now on, and the pair fused as before."""
        self.int8, self._step = False, reason
        self.pair = self.shown(self.pair)

    def shown(self, fresh: SkipPair) -> SkipPair:
        """A fresh look at this pair, with what was decided since it was patched."""
        if not self.live:
            return self.pair
        if not self._step:
            return fresh
        return replace(fresh, reason=self._step, int8_linears=())


@dataclass(slots=True, eq=False)
class Installation:
    """One attribute that patching sets on one module.

    Attributes:
        module: The module.
        name: The attribute, "forward" or another method.
        make: Builds what is put there, from the guard of the model (None where the guard is off).
    """

    module: nn.Module
    name: str
    make: Callable[[Guard | None], Any]


@dataclass(slots=True, eq=False)
class ModelPlan:
    """Everything that is known about one model before anything about it changes.

    Attributes:
        model: The module whose class a family knows.
        path: Where it sits in what the user passed: "" for the module itself, "transformer" in a
            pipeline.
        config: How it is patched.
        states: Its pairs.
        installations: The attributes to set.
        boundary: The network boundary, where one is owned here.
    """

    model: nn.Module
    path: str
    config: PatchConfig
    states: list[PairState]
    installations: list[Installation] = field(default_factory=list)
    boundary: list[SkipPair] = field(default_factory=list)

    @property
    def pairs(self) -> list[SkipPair]:
        """Every pair, as it runs now."""
        return [state.pair for state in self.states] + self.boundary
