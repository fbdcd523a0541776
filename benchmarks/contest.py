"""Methods that compute the same thing: each is checked against the truth, then timed.

A method whose output is wrong is reported as wrong and not timed; one that cannot be imported or
refuses is reported with its reason. Methods are timed in turns, so that a card that grows warm
slows all of them alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Final

import torch

from benchmarks.clock import (
    Call,
    calls_within,
    graph_of,
    group_of,
    kernel_milliseconds,
    rotating,
)
from benchmarks.journal import Journal
from benchmarks.setup import Timing, call_times

__all__ = ["Effort", "Entrant", "Method", "admit", "reason_of", "time_entrants"]

#: Rounds in which all methods are timed in turn.
_ROUNDS: Final = 2


@dataclass(frozen=True, slots=True)
class Method:
    """A way to compute something.

    Attributes:
        name: As in the table and the file.
        make: Gets one set of inputs, gives back the call to be timed; may raise.
        context: Entered around every call, outside the clock.
        note: What a reader has to know.
        prologue: Whether it is more than one kernel, so that the attention kernel alone is of
            interest.
    """

    name: str
    make: Callable[[Sequence[torch.Tensor]], Call]
    context: Callable[[], AbstractContextManager[object]] = nullcontext
    note: str = ""
    prologue: bool = False


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to measure: milliseconds a measurement, and the fewest and most calls."""

    budget: float = 400.0
    least: int = 6
    most: int = 100


@dataclass(slots=True)
class Entrant:
    """A method in one case.

    Attributes:
        method: Which.
        record: What goes to the file; `status` is "ready", "timed", "wrong", "missing" or "left
            out".
        calls: One a set of inputs; empty unless it is ready.
    """

    method: Method
    record: dict[str, object]
    calls: list[Call] = field(default_factory=list)

    @property
    def ready(self) -> bool:
        """Whether it was checked and found right."""
        return bool(self.calls)

    def median(self, clock: str = "milliseconds") -> float | None:
        """Median time in ms, None if it was not timed."""
        timing = self.record.get(clock)
        return float(timing["median"]) if isinstance(timing, dict) else None


def reason_of(error: BaseException) -> str:
    """An error in one line."""
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else "no message"
    return f"{type(error).__name__}: {text[:300]}"


def admit(
    method: Method,
    sets: Sequence[Sequence[torch.Tensor]],
    errors: Callable[[torch.Tensor], dict[str, float]],
    limit: float,
    judged: str = "relative_l2",
) -> Entrant:
    """Check a method on the first set of inputs.

    Args:
        method: Which.
        sets: Sets of inputs.
        errors: Numbers of an output against the truth.
        limit: A method whose number `judged` is not below this is wrong.
        judged: Which number.
    """
    record: dict[str, object] = {"note": method.note} if method.note else {}
    entrant = Entrant(method, record)
    try:
        with method.context():
            calls = [method.make(one) for one in sets]
            output = calls[0]()
            found = errors(output)
            finite = bool(output.isfinite().all())
    except Exception as error:  # a peer may fail in any way; ours show up as missing in the table
        record.update(status="missing", reason=reason_of(error))
        return entrant
    record["error"] = found
    if not finite or not found[judged] < limit:
        what = "" if finite else ", not finite"
        record.update(
            status="wrong",
            reason=f"wrong ({judged.replace('relative_l', 'relL')} {found[judged]:.3g}{what})",
        )
        return entrant
    record["status"] = "ready"
    entrant.calls = calls
    return entrant


def time_entrants(
    entrants: Sequence[Entrant],
    journal: Journal,
    effort: Effort,
    where: str,
    *,
    eager: bool = True,
    graph: bool = False,
    kernels: bool = False,
) -> None:
    """Time the entrants that are ready, in turns, and write into their records.

    Args:
        entrants: Of one case.
        journal: For the device and the deadline.
        effort: How long.
        where: Name of the case, for what is left out.
        eager: Time calls one by one.
        graph: Time them as a CUDA graph over all sets as well ("graph_milliseconds" a call). On a
            CPU, which has no graphs, calls are timed one by one instead.
        kernels: Also measure the attention kernel alone ("kernel_milliseconds"), for methods that
            have a prologue.
    """
    device = journal.device
    if eager:
        _time(entrants, journal, effort, where, "milliseconds", rotating, 1)
    if graph:
        _time(entrants, journal, effort, where, "graph_milliseconds", None, 0)
    for entrant in entrants:
        alone = kernels and entrant.ready and entrant.method.prologue
        if not alone or journal.late(f"{where}, {entrant.method.name}, kernels"):
            continue
        with entrant.method.context():
            found = kernel_milliseconds(rotating(entrant.calls), device, calls=3)
        entrant.record["kernel_milliseconds"] = sum(
            value for name, value in found.items() if group_of(name) == "attention"
        )
        entrant.record["kernels"] = dict(list(found.items())[:8])


def _time(
    entrants: Sequence[Entrant],
    journal: Journal,
    effort: Effort,
    where: str,
    clock: str,
    make: Callable[[Sequence[Call]], Callable[[], object]] | None,
    share: int,
) -> None:
    device = journal.device
    running: list[tuple[Entrant, Callable[[], object], int, int, list[float]]] = []
    for entrant in entrants:
        if not entrant.ready:
            continue
        if journal.late(f"{where}, {entrant.method.name}, {clock}"):
            if entrant.record["status"] == "ready":
                entrant.record.update(status="left out", reason="no time left")
            continue
        with entrant.method.context():
            try:
                per = share
                if make is not None:
                    call = make(entrant.calls)
                elif device.type == "cuda":
                    call, per = graph_of(entrant.calls), len(entrant.calls)
                else:
                    call, per = rotating(entrant.calls), 1
                calls = calls_within(call, device, effort.budget, effort.least, effort.most)
            except Exception as error:  # e.g. a peer that cannot be captured
                entrant.record[f"{clock}_reason"] = reason_of(error)
                continue
        running.append((entrant, call, per, calls, []))
    for round_ in range(_ROUNDS):
        for entrant, call, per, calls, times in running:
            if round_ and journal.deadline.passed and times:
                continue
            with entrant.method.context():
                # What takes long needs no warming up: it was called a moment ago.
                warmup = 1 if calls > 10 else 0
                some = call_times(call, device, -(-calls // _ROUNDS), warmup=warmup)
            times += [one / per for one in some]
    for entrant, _, _, _, times in running:
        entrant.record[clock] = asdict(Timing.of(times))
        entrant.record["status"] = "timed"
