"""What a patched model carries: the live state of each pair, and the forwards that read it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

import torch
from torch import nn

from turbo_rcm_patch.config import PatchConfig
from turbo_rcm_patch.ops.spec import AttentionSpec
from turbo_rcm_patch.patching.copies import Copies
from turbo_rcm_patch.skip import Residual, SkipPair

if TYPE_CHECKING:
    from turbo_rcm_patch.patching.guard import Guard
    from turbo_rcm_patch.patching.parallel import Ranks

#: How an attention runs.
Precise = Literal["as asked for", "16-bit p and v", "exact attention"]
#: Forwards on which the guard compares a pair.
When = Literal["first", "last", "asked", "middle"]
#: What the guard may do about a pair before it gives it back.
Step = Literal["linears given back", "some heads exact", "16-bit p and v", "exact attention"]

#: How the path ends of the sum of a sparse and a linear attention: keys have two shares there.
SPARSE: Final = (".proj_l", ".local_attn")
#: The values of `Precise`, the more precise the later.
_PRECISIONS: Final[tuple[Precise, ...]] = get_args(Precise)
#: What of a pair's state decides how it runs.
decides: Final = attrgetter("live", "int8", "precision", "exact_heads")


class PairState:
    """One pair of a patched model, as it runs now.

    Attributes:
        pair: The pair and how it runs; replaced when that changes.
        live: Whether the fused path runs. A plain flag, because a forward reads it on every call.
        int8: Whether its Linears may run in int8; a plain flag too.
        int8_inputs: Whether the Linears of an attention's q, k and v may, too.
        precision: How its attention runs, where the guard may choose.
        exact_heads: Heads of its attention that run exactly, ascending.
        unseen: Forwards on which the guard has yet to compare it.
        ways: How it ran when the guard compared it: see `Guard.begin`.
        originals: Linears to drop for int8-only, between plan and installation.
        returned: Whether it was given back.
        ran: How it ran on the last forward outside a compiled graph, "" before the first.
    """

    __slots__ = (
        "_linears", "_reason", "_steps", "exact_heads", "int8", "int8_inputs", "live",
        "originals", "pair", "precision", "ran", "returned", "unseen", "ways",
    )  # fmt: skip

    def __init__(
        self, pair: SkipPair, *, int8: bool = False, auto: bool = False, narrow: bool = True
    ) -> None:
        self.pair = pair
        self.live = pair.fused
        self.int8 = self._linears = int8 and pair.fused
        self.int8_inputs = True
        self.precision: Precise = "as asked for"
        self.exact_heads: tuple[int, ...] = ()
        self.unseen: set[When] = {"first", "last"}
        self.ways: set[Hashable] = set()
        self.originals: tuple[nn.Module, ...] = ()
        self.returned = False
        self.ran = ""
        self._reason = ""
        self._steps: list[Step] = ["linears given back"] if self.int8 else []
        if auto and pair.fused:
            # p and v may be in fp8 only where that was not ruled out.
            self._steps += ["16-bit p and v"] if narrow else []
            self._steps += ["exact attention"]

    def note(self, how: str) -> None:
        """Say how it runs on this forward; a compiled graph would only say how it was traced."""
        if not torch.compiler.is_compiling():
            self.ran = how

    def give_back(self, reason: str) -> None:
        """Run this pair as its author wrote it from now on."""
        runs: Residual = "as-written"
        self.live, self.int8, self.returned = False, False, True
        self.pair = replace(self.pair, runs=runs, reason=reason, int8_linears=())

    @property
    def next_step(self) -> Step | None:
        """What can be made more precise before the pair is given back, the cheapest first."""
        # An attention that ran exactly gets no more exact.
        exact = self.ran.endswith("exact attention")
        useful = (s for s in self._steps if s == "linears given back" or not exact)
        return next(useful, None)

    def take(self, step: Step, reason: str) -> None:
        """Run the pair more precisely from now on, and fused as before."""
        if step not in self._steps:
            return
        if step == "linears given back":
            self.decide(reason, int8=False)
        elif step != "some heads exact":
            self.decide(reason, precision=step)

    def decide(
        self,
        reason: str,
        *,
        int8: bool | None = None,
        precision: Precise | None = None,
        exact_heads: Collection[int] | None = None,
    ) -> None:
        """Run so from now on; what is None stays. No step is left that would be less precise."""
        before = self.int8, self.precision, self.exact_heads
        if int8 is not None:
            self.int8 = int8
        if precision is not None:
            self.precision = precision
        if exact_heads is not None:
            self.exact_heads = tuple(sorted(set(exact_heads)))
        if before == (self.int8, self.precision, self.exact_heads):
            return
        passed = _PRECISIONS[: _PRECISIONS.index(self.precision) + 1]
        self._steps = [
            step
            for step in self._steps
            if (self.int8 if step == "linears given back" else step not in passed)
        ]
        self._reason = reason
        self.pair = self.shown(self.pair)

    @property
    def heads_in_16_bits(self) -> tuple[int, ...]:
        """The heads that the guard had run exactly, all of them where the attention is."""
        whole = self.live and self.precision == "exact attention"
        return tuple(range(self.pair.heads)) if whole else self.exact_heads * self.live

    @property
    def chosen(self) -> dict[str, object]:
        """What was chosen since it was patched, for a calibration; empty if nothing was."""
        if self.returned:
            return {"given back": True}
        found: dict[str, object] = {}
        if not self.live:
            return found
        if self.exact_heads:
            found["exact_heads"] = list(self.exact_heads)
        if self.precision != "as asked for":
            found["precision"] = self.precision
        if not self.int8 and self._linears:
            found["linears given back"] = True
        return found

    def choose(self, chosen: Mapping[str, Any], reason: str) -> None:
        """Run as a calibration says from now on."""
        if not self.live or not chosen:
            return
        if chosen.get("given back"):
            self.give_back(reason)
            return
        self.decide(
            reason,
            int8=self.int8 and not chosen.get("linears given back"),
            precision=chosen.get("precision", "as asked for"),
            exact_heads=chosen.get("exact_heads", ()),
        )

    def take_heads(self, heads: Collection[int], reason: str) -> None:
        """Run these heads exactly from now on, beside those that do."""
        marked = {*self.exact_heads, *heads}
        if len(marked) == self.pair.heads and "exact attention" in self._steps:
            self.decide(reason, precision="exact attention")
        else:
            self.decide(reason, exact_heads=marked)

    def shown(self, fresh: SkipPair) -> SkipPair:
        """A fresh look at this pair, with what was decided since it was patched."""
        if not self.live:
            return self.pair
        if not self._reason:
            return fresh
        linears = fresh.int8_linears if self.int8 else ()
        apart = self.precision == "exact attention" or self.exact_heads
        runs: Residual = "two-launch" if apart and fresh.runs == "one-launch" else fresh.runs
        return replace(fresh, runs=runs, reason=self._reason, int8_linears=linears)


def specs_of(spec: AttentionSpec) -> dict[Precise, AttentionSpec]:
    """How an attention runs after each step of the guard."""
    return {
        "as asked for": spec,
        "16-bit p and v": replace(spec, pv="bf16" if spec.pv in ("auto", "fp8") else spec.pv),
        "exact attention": replace(spec, attention="exact"),
    }


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
        copies: The int8 copies of its weights.
        ranks: What its blocks agree on with those of other ranks; None where it has no blocks.
        weights: Fingerprint of the weights that it came with, where patching dropped some.
    """

    model: nn.Module
    path: str
    config: PatchConfig
    states: list[PairState]
    installations: list[Installation] = field(default_factory=list)
    boundary: list[SkipPair] = field(default_factory=list)
    copies: Copies = field(init=False)
    ranks: Ranks | None = None
    weights: str | None = None

    def __post_init__(self) -> None:
        self.copies = Copies(self.config.impl)

    @property
    def pairs(self) -> list[SkipPair]:
        """Every pair, as it runs now."""
        return [state.pair for state in self.states] + self.boundary
