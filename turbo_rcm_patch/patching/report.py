"""The report of a patched model: its pairs, how each runs, and why it runs so."""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from math import isfinite
from typing import TYPE_CHECKING, Any, Final, Literal, overload

from turbo_rcm_patch.config import PatchConfig
from turbo_rcm_patch.skip import SkipPair

if TYPE_CHECKING:
    from turbo_rcm_patch.patching.guard import Guard

#: Numbers in a path that count repeated blocks: "blocks.12.attn1" -> "blocks.", "12", ".attn1".
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")

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


class GuardLog(Sequence[GuardRecord]):
    """The guard's comparisons, oldest first: every decision, and the latest that were kept."""

    def __init__(self) -> None:
        self._decisions: list[GuardRecord] = []
        self._kept: deque[GuardRecord] = deque(maxlen=_MOST_KEPT)
        self._guards: list[Guard] = []
        self._count = 0
        self._largest = 0.0

    @overload
    def __getitem__(self, index: int) -> GuardRecord: ...
    @overload
    def __getitem__(self, index: slice) -> list[GuardRecord]: ...
    def __getitem__(self, index: int | slice) -> GuardRecord | list[GuardRecord]:
        return [*self._decisions, *self._kept][index]

    def __len__(self) -> int:
        return len(self._decisions) + len(self._kept)

    def __repr__(self) -> str:
        return f"GuardLog({self._count} comparisons)"

    def add(self, record: GuardRecord) -> None:
        """Append one comparison."""
        (self._kept if record.verdict == "kept" else self._decisions).append(record)
        self._count += 1
        if record.verdict == "kept":
            self._largest = max(self._largest, record.error)

    def attach(self, guard: Guard) -> None:
        """Connect `check_next` and `prediction` to a guard."""
        self._guards.append(guard)

    def check_next(self) -> None:
        """Compare every block on the next forward."""
        for guard in self._guards:
            guard.check_next()

    @property
    def decisions(self) -> list[GuardRecord]:
        """The comparisons that made a block run more exactly, and those that failed."""
        return list(self._decisions)

    @property
    def prediction(self) -> float | None:
        """The predicted error of the network to fp32, in units of the unpatched network's.

        None if `fidelity` is None, or before all blocks were compared.
        """
        found = [guard.prediction for guard in self._guards]
        return max((one for one in found if one is not None), default=None)

    def __str__(self) -> str:
        if not self._count:
            return "guard: no block has been compared yet"
        text = f"guard: {self._count} comparisons, largest error kept {self._largest:.3g}"
        text += f", {len(self._decisions)} decisions" if self._decisions else ", all kept"
        if self.prediction is not None:
            text += (
                f"; predicted error of the network {self.prediction:.2f} of the unpatched one's"
            )
        groups: dict[tuple[str, str], list[GuardRecord]] = {}
        for one in self._decisions:
            why = one.where if one.error != one.error else ""
            groups.setdefault((one.verdict, why), []).append(one)
        for (verdict, why), records in groups.items():
            paths = ", ".join(_ranges([record.path for record in records]))
            text += f"\n  {verdict}: {paths} ({why or records[0].where})"
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
        rows = [["pairs", "kind", "heads", "skip", "sums in", "W_o", "runs"]]
        rows[0] += ["int8 Linears"] if linears else []
        reasons: dict[str, list[str]] = {}
        for path, count, pair in _grouped(self):
            row = [path, pair.kind, f"{pair.heads} x {pair.head_dim}" if pair.heads else "-"]
            row.append(" | ".join(_formula(pair, i) for i in range(len(pair.streams))))
            row.append("fp32" if pair.cast == "fp32" else "model dtype")
            row.append("yes" if pair.projection else "no")
            row.append(f"{pair.runs}" + (f"  ({count})" if count > 1 else ""))
            rows.append(row + ([", ".join(pair.int8_linears) or "-"] if linears else []))
            if pair.reason:
                reasons.setdefault(pair.reason, []).append(path)
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = [
            "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        lines.insert(1, "  ".join("-" * width for width in widths))
        lines.append(self._totals())
        for reason, paths in reasons.items():
            lines.append(f"  {', '.join(paths)}: {reason}")
        return "\n".join(lines)

    def _totals(self) -> str:
        counts = Counter(pair.runs for pair in self)
        parts = ", ".join(f"{count} {runs}" for runs, count in counts.items())
        return f"{len(self)} pairs, {self.fused} fused: {parts}" if self else "no pairs"


def _formula(pair: SkipPair, index: int) -> str:
    stream = pair.streams[index]
    skip = "x" if stream.c_skip == "1" else f"{stream.c_skip} * x"
    # With two formulas in a row there is no room for the shapes of their coefficients.
    shape = stream.c_out_shape if len(pair.streams) == 1 else ""
    gate = "" if stream.c_out == "1" else f"{stream.c_out}{shape} * "
    name = f"{stream.name}: " if len(pair.streams) > 1 else ""
    return f"{name}{skip} + {gate}F(x)"


def _grouped(pairs: Sequence[SkipPair]) -> list[tuple[str, int, SkipPair]]:
    """Group pairs that run alike: (path with a range of blocks, number of pairs, one of them)."""
    groups: dict[SkipPair, list[SkipPair]] = {}
    for pair in pairs:
        shape = _NUMBER.sub("#", pair.path)
        groups.setdefault(replace(pair, path=shape), []).append(pair)
    return [(_range([p.path for p in group]), len(group), group[0]) for group in groups.values()]


def _ranges(paths: list[str]) -> list[str]:
    """Merge paths that differ only in the number of their block."""
    groups: dict[str, list[str]] = {}
    for path in paths:
        groups.setdefault(_NUMBER.sub("#", path), []).append(path)
    return [_range(group) for group in groups.values()]


def _range(paths: list[str]) -> str:
    """Merge ["blocks.0.a", "blocks.1.a", "blocks.3.a"] into "blocks.0-1,3.a"."""
    found = [_NUMBER.search(path) for path in paths]
    first = found[0]
    if len(paths) == 1 or first is None:
        return paths[0]
    numbers = sorted(int(match.group()) for match in found if match is not None)
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    text = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return paths[0][: first.start()] + text + paths[0][first.end() :]


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

    def __repr__(self) -> str:
        pairs = self.pairs
        return f"PatchReport({self.model}: {pairs.fused} of {len(pairs)} fused, {self.config!r})"

    @property
    def pairs(self) -> PairTable:
        """Every pair, as it runs now."""
        return PairTable(self._live().pairs)

    @property
    def fused(self) -> int:
        """Number of pairs that one of our kernels closes now."""
        return self.pairs.fused

    def ran(self) -> dict[str, str]:
        """Return how each block ran on the last forward outside a compiled graph, by its path.

        Blocks that have not run are missing.
        """
        return dict(self._live().ran)

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
        pairs = PairTable(live.pairs)
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
        ran = ", ".join(f"{count} blocks {how}" for how, count in self.last_forward.items())
        last = f"last forward: {ran or 'none yet outside a compiled graph'}"
        guard = str(self.guard) if config.guard else "guard: off"
        return "\n".join([*head, *live.notes, "", str(pairs), "", last, guard])

    def as_dict(self) -> dict[str, object]:
        """Return plain data for JSON."""
        live = self._live()
        pairs = PairTable(live.pairs)
        return {
            "model": self.model,
            "device": live.device,
            "impl": live.impl,
            "pv": live.pv,
            "config": asdict(self.config),
            "fused": pairs.fused,
            "pairs": pairs.as_dict(),
            "last_forward": self.last_forward,
            "notes": live.notes,
            "prediction": _finite(self.guard.prediction),
            "guard": [_finite(asdict(record)) for record in self.guard],
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

    pairs: list[SkipPair]
    ran: dict[str, str]
    device: str
    impl: str
    pv: str
    notes: list[str]


def _finite(value: Any) -> Any:
    """Replace NaN and infinity, which JSON does not have, by None in plain data."""
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not isfinite(value) else value
