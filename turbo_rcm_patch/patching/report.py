"""The report of a patched model: its pairs, how each runs, and why any was left alone."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, overload

from turbo_rcm_patch.config import PatchConfig
from turbo_rcm_patch.ops import INT8_MIN_KEYS, quantises
from turbo_rcm_patch.patching.noise import Noise, predicted
from turbo_rcm_patch.patching.state import Step, When
from turbo_rcm_patch.skip import SkipPair

if TYPE_CHECKING:
    from turbo_rcm_patch.patching.guard import Guard

#: Numbers in a path that count repeated blocks: "blocks.12.attn1" -> "blocks.", "12", ".attn1".
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


Decision = Literal["kept", "given back", "not compared"] | Step


@dataclass(frozen=True, slots=True)
class GuardRecord:
    """The comparison of one pair with its author's code on a real forward.

    Attributes:
        path: The pair.
        step: Index of the denoising step; None if it is unknown.
        when: "first" or "last" step, "middle" (between them), or "asked" (by `check_next`).
        error: Relative L2 of the closed pair against its author's code, as a share of what the
            author's code adds to the residual, less the rounding of its dtype. It is the largest
            over samples, streams, heads and rows (`measure` has the limit of each), and infinity
            if a value is not finite.
        budget: Largest error that is accepted.
        verdict: "kept", "given back" to the author's code, or a step towards precision after which
            the pair was compared again: "linears given back" (int8 Linears run as they are),
            "some heads exact", "16-bit p and v", "exact attention". "not compared": the residual
            stream in front of it was not finite, and all pairs are compared on the next forward.
        where: Where the error is: in a sample, rows, a head, the input of the branch, last keys.
        sample: The sample with the largest error.
        head: Its worst head, before the output projection; None where there is no attention.
        head_error: The error of that head.
        gain: The systematic share by which the pair, or a head of it, is too large or too small,
            less what an honest error makes of it.
        rows: Its worst rows, at most eight of them.
        row_error: The error of the worst hundredth of its rows.
        noise: What the pair adds to the error of the network, and each head; None unless
            precision="auto" decides by it.
    """

    path: str
    step: int | None
    when: When
    error: float
    budget: float
    verdict: Decision
    where: str = ""
    sample: int = 0
    head: int | None = None
    head_error: float = 0.0
    gain: float = 0.0
    rows: tuple[int, ...] = ()
    row_error: float = 0.0
    noise: Noise | None = None


#: Comparisons between the steps that are kept: a service makes one a step for as long as it runs.
_MOST_BETWEEN: Final = 1024
_MORE_PRECISE: Final = ("some heads exact", "16-bit p and v", "exact attention")


class GuardLog(Sequence[GuardRecord]):
    """The comparisons that the guard has made, oldest first: all of them, but of those between
    the first and the last step that were within the budget the latest, and the largest error."""

    def __init__(self) -> None:
        self._records: list[GuardRecord] = []
        self._between = 0
        self._guards: list[Guard] = []

    @overload
    def __getitem__(self, index: int) -> GuardRecord: ...
    @overload
    def __getitem__(self, index: slice) -> list[GuardRecord]: ...
    def __getitem__(self, index: int | slice) -> GuardRecord | list[GuardRecord]:
        return self._records[index]

    def __len__(self) -> int:
        return len(self._records)

    def __repr__(self) -> str:
        return f"GuardLog({len(self)} comparisons)"

    def add(self, record: GuardRecord) -> None:
        """Append one comparison."""
        self._records.append(record)
        self._between += _is_between(record)
        if self._between > 2 * _MOST_BETWEEN:
            old = [one for one in self._records if _is_between(one)][:-_MOST_BETWEEN]
            old.remove(max(old, key=lambda one: one.error))
            gone = set(map(id, old))
            self._records[:] = [one for one in self._records if id(one) not in gone]
            self._between -= len(old)

    def attach(self, guard: Guard) -> None:
        """Let `check_next` reach this guard."""
        self._guards.append(guard)

    def check_next(self) -> None:
        """Compare every fused pair on the next forward, whatever its step."""
        for guard in self._guards:
            guard.check_next()

    @property
    def fidelity(self) -> float | None:
        """The network's error that the last comparison of each pair predicts, in units of the
        unpatched network's; None where nothing was measured (see `noise`), or not all of it."""
        return None if self.unmeasured else predicted(list(self._noises().values()))

    @property
    def unmeasured(self) -> list[str]:
        """Paths of the pairs whose attention runs in 8 bits that could not be measured, because no
        weight of their output projection can be read."""
        return [path for path, noise in self._noises().items() if not noise.known]

    def _noises(self) -> dict[str, Noise]:
        found = {r.path: r.noise for r in self._records if r.noise is not None}
        back = {r.path for r in self._records if r.verdict == "given back"}
        return {
            path: replace(n, ours=n.author, known=True) if path in back else n
            for path, n in found.items()
        }

    @property
    def unseen(self) -> list[str]:
        """Paths of the fused pairs that have not been compared yet.

        The guard does not compare forwards that train, autocast or run in a compiled graph.
        """
        return [path for guard in self._guards for path in guard.unseen()]

    def __str__(self) -> str:
        if not self._records:
            return "guard: no forward has been compared yet"
        worst = max(self._records, key=lambda record: record.error)
        back = [record for record in self._records if record.verdict != "kept"]
        final = Counter({r.path: r.verdict for r in back}.values())
        text = (
            f"guard: {len(self._records)} comparisons, largest error {worst.error:.4g} "
            f"({worst.path}, {_step(worst)}{_place(worst)}), budget {worst.budget:g}"
        )
        counts = {
            "given back": final["given back"] + final["linears given back"],
            "made more precise": sum(final[verdict] for verdict in _MORE_PRECISE),
            "not compared": final["not compared"],
        }
        text += "".join(f", {n} {what}" for what, n in counts.items() if n)
        unseen = self.unseen
        if unseen:
            text += (
                f", {len(unseen)} pairs have not been compared yet: {', '.join(_ranges(unseen))}"
            )
        elif not back:
            text += ", all kept"
        return "\n".join([text, *(f"  {r.verdict}: {_where(r)}" for r in back)])


def _is_between(record: GuardRecord) -> bool:
    return record.when == "middle" and record.verdict == "kept"


def _step(record: GuardRecord) -> str:
    step = "" if record.step is None else f" (index {record.step})"
    return f"{record.when} step{step}" if record.when != "asked" else f"asked for{step}"


def _where(record: GuardRecord) -> str:
    return f"{record.path} at {record.error:.4g}, {_step(record)}{_place(record)}"


def _place(record: GuardRecord) -> str:
    """What the error is of, with the worst head and rows of that sample."""
    parts = [record.where] if record.where else []
    if record.head is not None and not record.where.startswith("head"):
        parts.append(f"worst head {record.head}")
    if record.rows and not record.where.startswith("rows"):
        parts.append(f"worst row {record.rows[0]}")
    return "".join(f", {part}" for part in parts)


class PairTable(Sequence[SkipPair]):
    """The skip pairs of a model. Printing the table groups blocks that run alike."""

    def __init__(self, pairs: Iterable[SkipPair]) -> None:
        self._pairs = tuple(pairs)

    @overload
    def __getitem__(self, index: int) -> SkipPair: ...
    @overload
    def __getitem__(self, index: slice) -> PairTable: ...
    def __getitem__(self, index: int | slice) -> SkipPair | PairTable:
        if isinstance(index, slice):
            return PairTable(self._pairs[index])
        return self._pairs[index]

    def __len__(self) -> int:
        return len(self._pairs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PairTable) and self._pairs == other._pairs

    def __hash__(self) -> int:
        return hash(self._pairs)

    def __repr__(self) -> str:
        return f"PairTable({len(self)} pairs, {self.fused} fused)"

    @property
    def fused(self) -> int:
        """How many pairs one of our kernels closes."""
        return sum(pair.fused for pair in self._pairs)

    def as_dict(self) -> list[dict[str, object]]:
        """Plain data for JSON."""
        return [asdict(pair) for pair in self._pairs]

    def __str__(self) -> str:
        head: tuple[str, ...] = ("pairs", "kind", "heads", "skip", "sums in", "W_o", "runs")
        linears = any(pair.int8_linears for pair in self._pairs)
        if linears:
            head += ("int8 Linears",)
        rows = [head]
        reasons: dict[str, list[str]] = {}
        for path, count, pair in _grouped(self._pairs):
            rows.append(
                (
                    path,
                    pair.kind,
                    f"{pair.heads} x {pair.head_dim}" if pair.heads else "-",
                    " | ".join(_formula(pair, i) for i in range(len(pair.streams))),
                    "fp32" if pair.cast == "fp32" else "model dtype",
                    "yes" if pair.projection else "no",
                    f"{pair.runs}" + (f"  ({count})" if count > 1 else ""),
                )
                + ((", ".join(pair.int8_linears) or "-",) if linears else ())
            )
            if pair.reason:
                reasons.setdefault(pair.reason, []).append(path)
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
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
        counts = Counter(pair.runs for pair in self._pairs)
        parts = ", ".join(f"{count} {runs}" for runs, count in counts.items())
        return f"{len(self)} pairs, {self.fused} fused: {parts}" if self._pairs else "no pairs"


def _formula(pair: SkipPair, index: int) -> str:
    stream = pair.streams[index]
    skip = "x" if stream.c_skip == "1" else f"{stream.c_skip} * x"
    # Two formulas in a row leave no room for the shapes of their coefficients.
    shape = stream.c_out_shape if len(pair.streams) == 1 else ""
    gate = "" if stream.c_out == "1" else f"{stream.c_out}{shape} * "
    name = f"{stream.name}: " if len(pair.streams) > 1 else ""
    return f"{name}{skip} + {gate}F(x)"


def _grouped(pairs: Sequence[SkipPair]) -> list[tuple[str, int, SkipPair]]:
    """(path with a range of blocks, number of pairs, one of them), in order of appearance."""
    groups: dict[tuple[object, ...], list[SkipPair]] = {}
    for pair in pairs:
        shape = _NUMBER.sub("#", pair.path)
        key: tuple[object, ...] = (
            shape,
            pair.kind,
            pair.heads,
            pair.head_dim,
            pair.streams,
            pair.cast,
        )
        key += (pair.projection, pair.runs, pair.reason, pair.int8_linears)
        groups.setdefault(key, []).append(pair)
    return [(_range([p.path for p in group]), len(group), group[0]) for group in groups.values()]


def _ranges(paths: list[str]) -> list[str]:
    """Paths that differ only in the number of their block as one."""
    groups: dict[str, list[str]] = {}
    for path in paths:
        groups.setdefault(_NUMBER.sub("#", path), []).append(path)
    return [_range(group) for group in groups.values()]


def _range(paths: list[str]) -> str:
    """["blocks.0.a", "blocks.1.a", "blocks.3.a"] -> "blocks.0-1,3.a"."""
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


@dataclass(slots=True, eq=False)
class PatchReport:
    """What `patch_model` did. The report stays up to date when the guard gives pairs back.

    Attributes:
        model: The class of what was patched.
        config: The configuration.
        guard: The guard's comparisons so far.
    """

    model: str
    config: PatchConfig
    guard: GuardLog
    _pairs: Callable[[], list[SkipPair]] = field(repr=False)
    _ran: Callable[[], list[str]] = field(repr=False)
    _device: Callable[[], tuple[str, str, str]] = field(repr=False)
    _graphs: Callable[[], list[str]] = field(repr=False)
    _parallel: Callable[[], list[str]] = field(repr=False)
    _exact: Callable[[], dict[str, tuple[int, ...]]] = field(repr=False)
    _save: Callable[[Path], None] = field(repr=False)

    def __repr__(self) -> str:
        return (
            f"PatchReport({self.model}: {self.fused} of {len(self.pairs)} fused, {self.config!r})"
        )

    @property
    def pairs(self) -> PairTable:
        """Every pair, as it runs now."""
        return PairTable(self._pairs())

    @property
    def fused(self) -> int:
        """How many pairs one of our kernels closes now."""
        return self.pairs.fused

    @property
    def last_forward(self) -> dict[str, int]:
        """How many pairs ran in which way on the last forward outside a compiled graph."""
        return dict(Counter(filter(None, self._ran())))

    @property
    def exact_heads(self) -> dict[str, tuple[int, ...]]:
        """The heads that run exactly for the target of precision="auto", by the path of their
        attention; all heads of an attention that was made exact."""
        return self._exact()

    def save_calibration(self, path: str | os.PathLike[str]) -> None:
        """Write how each pair runs now, refusals too, for `PatchConfig(calibration=path)`, with a
        fingerprint of the model's weights."""
        self._save(Path(path))

    @property
    def precision_map(self) -> str:
        """A line for each self-attention, and for others with exact heads. A head is
        8 (int8 q and k, or what `attention` asks for) or e (exact)."""
        exact = self.exact_heads
        rows = [
            (pair.path, "".join("8e"[h in exact.get(pair.path, ())] for h in range(pair.heads)))
            for pair in self.pairs
            if pair.fused and (pair.kind == "self" or pair.path in exact) and pair.projection
        ]
        width = max((len(path) for path, _ in rows), default=0)
        return "\n".join(f"{path:{width}}  {heads}" for path, heads in rows)

    @property
    def cuda_graphs(self) -> list[str]:
        """With `cuda_graphs=True`, a line for each model: how many graphs there are, how many
        forwards replayed one, and why the last forward did not."""
        return self._graphs()

    @property
    def parallel(self) -> list[str]:
        """A line for each model whose sequence several ranks share: how many, and what they send
        each other."""
        return self._parallel()

    @property
    def impl(self) -> str:
        """The implementation on the model's device: "triton" or "reference"."""
        return self._device()[1]

    @property
    def pv(self) -> str:
        """Element type of probabilities and values on that device."""
        return self._device()[2]

    def __str__(self) -> str:
        device, impl, pv = self._device()
        config = self.config
        attention = config.attention
        if quantises(attention):
            by_length = attention == "auto" and device.startswith("cuda")
            own = "int8" if attention == "auto" else attention
            attention_text = f"{own} q and k, p and v in {pv}"
            if by_length:
                attention_text = f"by length exact, or {attention_text}"
            if attention != "int4" and config.form != "one-launch":
                attention_text += f"; cross-attention to fewer than {INT8_MIN_KEYS:,} keys exact"
        else:
            attention_text = attention
        head = [
            f"{self.model}: {self.fused} of {len(self.pairs)} skip pairs run fused",
            f"attention {attention_text}; implementation {impl} on {device}; form {config.form}",
            *self.parallel,
        ]
        if config.linear != "as-is":
            head[1] += "; plain Linears in int8"
        if config.linear == "int8-only":
            head[1] += ", without originals"
        guard = str(self.guard) if config.guard else "guard: off"
        ran = ", ".join(f"{count} {how}" for how, count in self.last_forward.items())
        last = f"last forward: {ran or 'none yet outside a compiled graph'}"
        lines = [*head, "", str(self.pairs), "", last, *self.cuda_graphs, guard]
        predicted = self.guard.fidelity
        if predicted is not None:
            lines.append(
                f"predicted error of the network: {predicted:.2f} of the unpatched one's in 16 "
                f"bits, target {config.fidelity:g}"
            )
        if self.guard.unmeasured:
            lines.append(
                "predicted error of the network: unknown, the weight of the output projection "
                f"cannot be read in {', '.join(_ranges(self.guard.unmeasured))}"
            )
        if self.exact_heads and quantises(attention):
            lines += ["heads of the attentions (8: int8, e: exact)", self.precision_map]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, object]:
        """Plain data for JSON."""
        device, impl, pv = self._device()
        return {
            "model": self.model,
            "device": device,
            "impl": impl,
            "pv": pv,
            "config": asdict(self.config),
            "fused": self.fused,
            "pairs": self.pairs.as_dict(),
            "last_forward": self.last_forward,
            "cuda_graphs": self.cuda_graphs,
            "parallel": self.parallel,
            "not_compared": self.guard.unseen,
            "exact_heads": {path: list(heads) for path, heads in self.exact_heads.items()},
            "predicted_fidelity": _finite(self.guard.fidelity),
            "guard": [_finite(asdict(record)) for record in self.guard],
        }


def _finite(value: Any) -> Any:
    """Plain data with None in the place of NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not isfinite(value) else value
