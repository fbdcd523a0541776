"""The guard's log.

Paths of repeated blocks are merged where the log or a table is printed: "blocks.0-1,3.attn1".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from itertools import groupby
from math import isnan
from typing import Any, Final, Literal, TypeVar

_T = TypeVar("_T")

#: Numbers in a path that count repeated blocks: "blocks.12.attn1" -> "blocks.", "12", ".attn1".
_NUMBER = re.compile(r"(?<=\.)(\d+)(?=\.|$)")

#: The occasion of a comparison: the first forward of a block, a last step, or a sample between.
When = Literal["first", "last", "sampled"]

#: Comparisons within the budget that are kept. A service that runs for long makes many.
_MOST_KEPT: Final = 1024


@dataclass(frozen=True, slots=True)
class GuardRecord:
    """The comparison of one block with its original on a real forward.

    Attributes:
        path: The block.
        step: Index of the denoising step; None if it is unknown.
        when: "first" forward of the block, "last" step, or "sampled".
        error: The largest error of a branch, relative L2 to what the author's adds, less the
            rounding of the model's dtype (`measure`); NaN if it was not compared.
        budget: The largest error that is accepted.
        verdict: "kept", "not compared", or how the block runs from that call on.
        where: The branch with the error, or why the block runs more exactly.
    """

    path: str
    step: int | None
    when: When
    error: float
    budget: float
    verdict: str
    where: str = ""


class GuardLog(list[GuardRecord]):
    """The guard's comparisons, oldest first: every decision, and the latest that were kept."""

    def __init__(self) -> None:
        self._guards: list[Any] = []

    def __repr__(self) -> str:
        return f"GuardLog({len(self)} comparisons)"

    def add(self, record: GuardRecord) -> None:
        """Append one comparison, and drop the oldest within the budget if there are too many."""
        self.append(record)
        if len(self) - len(self.decisions) - len(self.skipped) > _MOST_KEPT:
            del self[next(i for i, record in enumerate(self) if record.verdict == "kept")]

    def attach(self, guard: Any) -> None:
        """Connect `check_next` and `prediction` to a guard."""
        self._guards.append(guard)

    def check_next(self) -> None:
        """Compare every block on the next forward."""
        for guard in self._guards:
            guard.check_next()

    @property
    def decisions(self) -> list[GuardRecord]:
        """The comparisons that made a block run more exactly."""
        return [record for record in self if record.verdict not in ("kept", "not compared")]

    @property
    def skipped(self) -> list[GuardRecord]:
        """The blocks that could not be compared, and why."""
        return [record for record in self if record.verdict == "not compared"]

    @property
    def prediction(self) -> float | None:
        """The predicted error of the network to fp32, in units of the unpatched network's.

        None if `fidelity` is None, or before all blocks were compared.
        """
        predictions = [guard.prediction for guard in self._guards]
        return max(
            (prediction for prediction in predictions if prediction is not None), default=None
        )

    def __str__(self) -> str:
        if not self:
            return "guard: no block has been compared yet"
        decisions, skipped, prediction = self.decisions, self.skipped, self.prediction
        largest = max((record.error for record in self if record.verdict == "kept"), default=0.0)
        text = f"guard: {len(self) - len(skipped)} comparisons, largest error kept {largest:.3g}"
        text += f", {len(decisions)} decisions" if decisions else ", all kept"
        if prediction is not None:
            text += f"; predicted error of the network {prediction:.2f} of the unpatched one's"
        latest = {record.path: record for record in decisions}.values()
        for records in grouped(
            [*latest, *skipped],
            lambda record: (record.verdict, isnan(record.error) and record.where),
        ):
            paths = grouped([record.path for record in records], without_number)
            text += f"\n  {records[0].verdict}: {', '.join(map(merged_path, paths))}"
            text += f" ({records[0].where})"
        return text


def grouped(items: Iterable[_T], key: Callable[[_T], Hashable]) -> list[list[_T]]:
    """Group items with the same key, in the order of their first ones."""
    groups: dict[Hashable, list[_T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


def without_number(path: str) -> str:
    """Return a path without the number of its block."""
    return _NUMBER.sub("#", path)


def merged_path(paths: list[str]) -> str:
    """Merge ["blocks.0.a", "blocks.1.a", "blocks.3.a"] into "blocks.0-1,3.a"."""
    if len(set(paths)) == 1:
        return paths[0]
    before, _, after = _NUMBER.split(paths[0], maxsplit=1)
    numbers = sorted({int(_NUMBER.split(path, maxsplit=1)[1]) for path in paths})
    runs = []
    for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        first, *rest = [number for _, number in run]
        runs.append(f"{first}-{rest[-1]}" if rest else str(first))
    return before + ",".join(runs) + after
