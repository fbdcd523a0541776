"""The report of a patched model: its pairs, how each runs, and why it runs so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from math import isfinite
from typing import Any

from turbo_rcm_patch.config import PatchConfig
from turbo_rcm_patch.errors import PlanError
from turbo_rcm_patch.ops.dispatch import chosen
from turbo_rcm_patch.patching.block import PatchedBlock
from turbo_rcm_patch.patching.guard_log import GuardLog, grouped, merged_path, without_number
from turbo_rcm_patch.patching.plan import Plan
from turbo_rcm_patch.skip import SkipPair


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
        for alike in grouped(
            self, lambda pair: replace(pair, path=without_number(pair.path), reason="")
        ):
            pair, path = alike[0], merged_path([other.path for other in alike])
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
        for alike in grouped([pair for pair in self if pair.reason], lambda pair: pair.reason):
            paths = grouped([pair.path for pair in alike], without_number)
            lines.append(f"  {', '.join(map(merged_path, paths))}: {alike[0].reason}")
        return "\n".join(lines)


def _formula(pair: SkipPair, index: int) -> str:
    stream = pair.streams[index]
    skip = "x" if stream.c_skip == "1" else f"{stream.c_skip} * x"
    # With two formulas in a row there is no room for the shapes of their coefficients.
    shape = stream.c_out_shape if len(pair.streams) == 1 else ""
    gate = "" if stream.c_out == "1" else f"{stream.c_out}{shape} * "
    name = f"{stream.name}: " if len(pair.streams) > 1 else ""
    return f"{name}{skip} + {gate}F(x)"


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
    _plan: Callable[[], Plan | None]

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy describes the present state, and does not hold the model.
        try:
            plan = self.plan
        except PlanError:
            plan = None
        return _as_it_was, (self.model, self.config, self.guard, self._live(), plan)

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

    @property
    def plan(self) -> Plan | None:
        """How each block of the networks runs, to be saved and given to `patch_model`: the plan
        that this model was patched with, or what the guard decided; None before it has.

        Raises:
            PlanError: The model is not patched any more, or its networks were patched one by one.
        """
        return self._plan()

    def ran(self) -> dict[str, str]:
        """Return how each block ran on the last forward outside a compiled graph, by its path.

        Blocks that did not run, or that a cache skipped, are missing.
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

    def __str__(self) -> str:
        live, config = self._live(), self.config
        pairs = live.pairs
        attention: str = config.attention
        if attention in ("auto", "int8", "int4"):
            if attention == "auto":  # as `ops.resolved` chooses
                attention = "int8" if live.device == "cpu" else "int8 or exact by length"
            attention = f"{attention}, p and v in {live.pv}"
        head = [
            f"{self.model}: {pairs.fused} of {len(pairs)} skip pairs run fused",
            f"attention {attention}; implementation {live.impl} on {live.device}",
        ]
        if config.linear != "as-is":
            head[1] += f"; {live.linears}"
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
                asdict(record) | {"error": record.error if isfinite(record.error) else None}
                for record in self.guard
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
        linears: How many Linears run in int8, and why others do not.
        notes: Remarks, such as a setting that the patched model ignores.
    """

    pairs: PairTable
    ran: dict[str, str]
    device: str
    impl: str
    pv: str
    linears: str
    notes: list[str]


def _as_it_was(
    model: str, config: PatchConfig, guard: GuardLog, live: Live, plan: Plan | None
) -> PatchReport:
    """Return a report of a state in the past."""
    return PatchReport(model, config, guard, lambda: live, list, lambda: plan)
