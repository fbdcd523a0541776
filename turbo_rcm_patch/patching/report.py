"""The report of a patched model: its pairs, how each runs, and why it runs so."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from math import isfinite, isnan
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

from turbo_rcm_patch.config import PatchConfig
from turbo_rcm_patch.ops.dispatch import chosen
from turbo_rcm_patch.skip import SkipPair

if TYPE_CHECKING:
    from turbo_rcm_patch.patching.block import PatchedBlock
    from turbo_rcm_patch.patching.guard import Guard

_T = TypeVar("_T")

#: Numbers in a path that count repeated blocks: "blocks.12.attn1" -> "blocks.", "12", ".attn1".
_NUMBER = re.compile(r"(?<=\.)(\d+)(?=\.|$)")

#: The occasion of a comparison: the first forward of a block, a last step, or a sample between.
When = Literal["first", "last", "sampled"]

#: Comparisons within the budget that are kept. A service that runs for long makes many.
_MOST_KEPT: Final = 1024


@dataclass(frozen=True, slots=True)
class GuardRecord:
    """The comparison of one block with its author's code on a real forward.

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
        self._guards: list[Guard] = []

    def __repr__(self) -> str:
        return f"GuardLog({len(self)} comparisons)"

    def add(self, record: GuardRecord) -> None:
        """Append one comparison, and drop the oldest within the budget if there are too many."""
        self.append(record)
        if len(self) - len(self.decisions) - len(self.skipped) > _MOST_KEPT:
            del self[next(i for i, one in enumerate(self) if one.verdict == "kept")]

    def attach(self, guard: Guard) -> None:
        """Connect `check_next` and `prediction` to a guard."""
        self._guards.append(guard)

    def check_next(self) -> None:
        """Compare every block on the next forward."""
        for guard in self._guards:
            guard.check_next()

    @property
    def decisions(self) -> list[GuardRecord]:
        """The comparisons that made a block run more exactly."""
        return [one for one in self if one.verdict not in ("kept", "not compared")]

    @property
    def skipped(self) -> list[GuardRecord]:
        """The blocks that could not be compared, and why."""
        return [one for one in self if one.verdict == "not compared"]

    @property
    def prediction(self) -> float | None:
        """The predicted error of the network to fp32, in units of the unpatched network's.

        None if `fidelity` is None, or before all blocks were compared.
        """
        found = [guard.prediction for guard in self._guards]
        return max((one for one in found if one is not None), default=None)

    def __str__(self) -> str:
        if not self:
            return "guard: no block has been compared yet"
        decisions, skipped, prediction = self.decisions, self.skipped, self.prediction
        largest = max((one.error for one in self if one.verdict == "kept"), default=0.0)
        text = f"guard: {len(self) - len(skipped)} comparisons, largest error kept {largest:.3g}"
        text += f", {len(decisions)} decisions" if decisions else ", all kept"
        if prediction is not None:
            text += f"; predicted error of the network {prediction:.2f} of the unpatched one's"
        latest = {one.path: one for one in decisions}.values()
        for records in _groups(
            [*latest, *skipped], lambda one: (one.verdict, isnan(one.error) and one.where)
        ):
            paths = _groups([one.path for one in records], _shape)
            text += f"\n  {records[0].verdict}: {', '.join(map(_range, paths))}"
            text += f" ({records[0].where})"
        return text


class PairTable(tuple[SkipPair, ...]):
    """The skip pairs of a model. Printing the table groups blocks that run alike."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"PairTable({len(self)} pairs, {self.fused} fused)"

    @property
    def fused(self) -> int:
        """Number of pairs that one of our kernels closes."""
        return sum(pair.fused for pair in self)

    def as_dict(self) -> list[dict[str, object]]:
        """Return plain data for JSON."""
        return [asdict(pair) for pair in self]

    def __str__(self) -> str:
        linears = any(pair.int8_linears for pair in self)
        rows = [["pairs", "kind", "heads", "skip", "residual dtype", "W_o", "runs"]]
        rows[0] += ["int8 Linears"] if linears else []
        for alike in _groups(self, lambda pair: replace(pair, path=_shape(pair.path), reason="")):
            pair, path = alike[0], _range([one.path for one in alike])
            row = [path, pair.kind, f"{pair.heads} x {pair.head_dim}" if pair.heads else "-"]
            row.append(" | ".join(_formula(pair, i) for i in range(len(pair.streams))))
            row.append("fp32" if pair.fused or pair.cast == "fp32" else "model dtype")
            row.append("yes" if pair.projection else "no")
            row.append(f"{pair.runs}" + (f"  ({len(alike)})" if len(alike) > 1 else ""))
            rows.append(row + ([", ".join(pair.int8_linears) or "-"] if linears else []))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = [
            "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        lines.insert(1, "  ".join("-" * width for width in widths))
        counts = Counter(pair.runs for pair in self)
        ways = ", ".join(f"{count} {runs}" for runs, count in counts.items())
        lines.append(f"{len(self)} pairs, {self.fused} fused: {ways}")
        for alike in _groups([pair for pair in self if pair.reason], lambda pair: pair.reason):
            paths = _groups([pair.path for pair in alike], _shape)
            lines.append(f"  {', '.join(map(_range, paths))}: {alike[0].reason}")
        return "\n".join(lines)


def _formula(pair: SkipPair, index: int) -> str:
    stream = pair.streams[index]
    skip = "x" if stream.c_skip == "1" else f"{stream.c_skip} * x"
    # With two formulas in a row there is no room for the shapes of their coefficients.
    shape = stream.c_out_shape if len(pair.streams) == 1 else ""
    gate = "" if stream.c_out == "1" else f"{stream.c_out}{shape} * "
    name = f"{stream.name}: " if len(pair.streams) > 1 else ""
    return f"{name}{skip} + {gate}F(x)"


def _groups(items: Iterable[_T], key: Callable[[_T], Hashable]) -> list[list[_T]]:
    """Group items with the same key, in the order of their first ones."""
    groups: dict[Hashable, list[_T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


def _shape(path: str) -> str:
    """Return a path without the number of its block."""
    return _NUMBER.sub("#", path)


def _range(paths: list[str]) -> str:
    """Merge ["blocks.0.a", "blocks.1.a", "blocks.3.a"] into "blocks.0-1,3.a"."""
    if len(set(paths)) == 1:
        return paths[0]
    before, _, after = _NUMBER.split(paths[0], maxsplit=1)
    numbers = sorted({int(_NUMBER.split(path, maxsplit=1)[1]) for path in paths})
    runs = []
    for _, run in groupby(enumerate(numbers), lambda one: one[1] - one[0]):
        first, *rest = [number for _, number in run]
        runs.append(f"{first}-{rest[-1]}" if rest else str(first))
    return before + ",".join(runs) + after


@dataclass(frozen=True, slots=True, eq=False)
class PatchReport:
    """The report of `patch_model`. It reads the patched model on each use, so it stays up to date.

    Attributes:
        model: The class of the patched model or pipeline.
        config: The configuration.
        guard: The guard's comparisons so far.
    """

    model: str
    config: PatchConfig
    guard: GuardLog
    _live: Callable[[], Live]
    _blocks: Callable[[], list[PatchedBlock]]

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy describes the present state, and does not hold the model.
        return PatchReport, (self.model, self.config, self.guard, self._live(), list)

    def __repr__(self) -> str:
        pairs = self.pairs
        return f"PatchReport({self.model}: {pairs.fused} of {len(pairs)} fused, {self.config!r})"

    @property
    def pairs(self) -> PairTable:
        """Every pair, as it runs now."""
        return self._live().pairs

    @property
    def fused(self) -> int:
        """Number of pairs that one of our kernels closes now."""
        return self.pairs.fused

    def ran(self) -> dict[str, str]:
        """Return how each block ran on the last forward outside a compiled graph, by its path.

        Blocks that have not run are missing.
        """
        return dict(self._live().ran)

    def forms(self) -> dict[str, str]:
        """Return in which form each block ran since `forget`, by its path: "asked", or another
        word of `PatchedBlock.form`."""
        return {block.path: form for block in self._blocks() if (form := block.form())}

    def forget(self) -> None:
        """Forget how blocks ran, so that `ran` and `forms` describe only later forwards."""
        for block in self._blocks():
            block.last = None

    @property
    def last_forward(self) -> dict[str, int]:
        """Way to run -> number of blocks, on the last forward outside a compiled graph."""
        return dict(Counter(self.ran().values()))

    @property
    def impl(self) -> str:
        """The implementation on the model's device: "triton" or "reference"."""
        return self._live().impl

    @property
    def pv(self) -> str:
        """Element type of probabilities and values on the model's device."""
        return self._live().pv

    def __str__(self) -> str:
        live, config = self._live(), self.config
        pairs = live.pairs
        words: str = config.attention
        if words in ("auto", "int8", "int4"):
            own = "int8 or exact by length" if words == "auto" else words
            words = f"{own}, p and v in {live.pv}"
        head = [
            f"{self.model}: {pairs.fused} of {len(pairs)} skip pairs run fused",
            f"attention {words}; implementation {live.impl} on {live.device}",
        ]
        if config.linear != "as-is":
            head[1] += f"; Linears in {config.linear}"
        if config.conv != "as-is":
            head[1] += f"; convolutions of a VAE in {config.conv}"
        each = self.last_forward.items()
        ran = ", ".join(f"{n} block{'s' * (n != 1)} {how}" for how, n in each)
        last = f"last forward: {ran or 'none yet outside a compiled graph'}"
        guard = str(self.guard) if config.guard else "guard: off"
        kernels = [f"kernels of this process: {line}" for line in chosen()]
        return "\n".join([*head, *live.notes, "", str(pairs), "", last, *kernels, guard])

    def as_dict(self) -> dict[str, object]:
        """Return plain data for JSON."""
        live = self._live()
        return {
            "model": self.model,
            "device": live.device,
            "impl": live.impl,
            "pv": live.pv,
            "config": asdict(self.config),
            "fused": live.pairs.fused,
            "pairs": live.pairs.as_dict(),
            "last_forward": self.last_forward,
            "kernels": chosen(),
            "notes": live.notes,
            "prediction": self.guard.prediction,
            "guard": [
                asdict(one) | {"error": one.error if isfinite(one.error) else None}
                for one in self.guard
            ],
        }


@dataclass(frozen=True, slots=True)
class Live:
    """The present state of a patched model.

    Attributes:
        pairs: Its pairs.
        ran: How each block ran, by path.
        device: The device on which it computes.
        impl: "triton" or "reference".
        pv: Element type of probabilities and values.
        notes: Remarks, such as a setting that the patched model ignores.
    """

    pairs: PairTable
    ran: dict[str, str]
    device: str
    impl: str
    pv: str
    notes: list[str]

    def __call__(self) -> Live:
        """Return the state, as a report asks for it."""
        return self
