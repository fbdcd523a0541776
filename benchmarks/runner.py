"""What every comparison shares: the plan, the file that is written as it goes, and the contest.

A contest checks each method against the truth and times those that are right, in turns, so that a
card that grows warm slows all of them alike. A method whose output is wrong is reported as wrong;
one that cannot be imported or refuses is reported with its reason.
"""

from __future__ import annotations

import gc
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from turbo_rcm_patch.kernels.tile_table import table_path

from benchmarks.machine import ClockWatch, ceilings, machine
from benchmarks.measure import (
    Call,
    Timing,
    call_times,
    calls_within,
    device_of,
    errors_of,
    generator,
    reason_of,
)
from turbo_rcm_patch.errors import ConfigError, OutputExistsError
from turbo_rcm_patch.output import check_writable, write_json
from turbo_rcm_patch.video.environment import code_digest, device_name, versions
from turbo_rcm_patch.video.store import to_json

#: What goes to a JSON file.
Record = dict[str, Any]
#: Numbers of an output against the truth.
Errors = Callable[[torch.Tensor], dict[str, float]]
#: Goes into a network, with a backend for a compiler.
Enter = Callable[[Any, str], AbstractContextManager[object]]
#: Finds a number in the records of all methods, by the name of one.
Find = Callable[[Mapping[str, Record], str], float | None]
#: A path of keys in a method's record ("a.b or c.b": the first that is there), or a function.
Value = str | Find


class Column(NamedTuple):
    """A column of the table on the screen: its title and width, its number and how to write it."""

    title: str
    width: int
    value: Value = ""
    form: str = ""


Columns = Sequence[Column]


def number(value: object, *keys: str) -> float | None:
    """A number deep in a record, None if there is none."""
    for key in keys:
        if not isinstance(value, Mapping) or key not in value:
            return None
        value = value[key]
    return float(value) if isinstance(value, (int, float)) else None


def times(*clocks: str, digits: int = 4) -> tuple[Column, ...]:
    """Median, 20th and 80th percentile by the first of these clocks that a method has."""
    return tuple(
        Column(title, 9, " or ".join(f"{clock}.{key}" for clock in clocks or ("milliseconds",)),
               f".{digits}f")
        for title, key in (("ms", "median"), ("p20", "p20"), ("p80", "p80"))
    )  # fmt: skip


def over(base: str, path: str = "milliseconds.median") -> Find:
    """A method's number divided by that of `base`."""

    def find(found: Mapping[str, Record], name: str) -> float | None:
        own, other = (number(found.get(one), *path.split(".")) for one in (name, base))
        return own / other if own and other else None

    return find


REL_L2: Final = Column("relL2", 9, "error.relative_l2", ".5f")
PEAK: Final = Column(
    "peak GiB", 8, lambda found, name: (number(found[name], "peak_bytes") or 0) / 2**30, ".2f"
)


@dataclass(frozen=True, slots=True)
class Shape:
    """An attention: q [batch, q_tokens, heads * head_dim], k and v [batch, kv_tokens, ...]."""

    batch: int
    q_tokens: int
    kv_tokens: int
    heads: int
    head_dim: int

    @classmethod
    def square(cls, heads: int, tokens: int, head_dim: int, batch: int = 1) -> Shape:
        """As many keys as queries."""
        return cls(batch, tokens, tokens, heads, head_dim)

    @property
    def channels(self) -> int:
        """heads * head_dim."""
        return self.heads * self.head_dim

    @property
    def name(self) -> str:
        """H12-N4096-D128, with the batch in front unless it is 1."""
        name = f"H{self.heads}-N{self.q_tokens}-D{self.head_dim}"
        return name if self.batch == 1 else f"B{self.batch}-{name}"

    @property
    def record(self) -> dict[str, int]:
        """For a file."""
        return {"B": self.batch, "H": self.heads, "N": self.q_tokens, "D": self.head_dim}

    def __str__(self) -> str:
        tokens = f"N{self.q_tokens}"
        if self.kv_tokens != self.q_tokens:
            tokens += f"x{self.kv_tokens}"
        return f"B{self.batch} H{self.heads} {tokens} D{self.head_dim}"


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to measure: milliseconds a measurement (infinite: the most calls), and the fewest
    and most calls."""

    budget: float
    least: int
    most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the command line asked for.

    Attributes:
        out: Folder of the JSON file and the plots.
        device: Where.
        quick: Fewer sizes and fewer calls.
        micro: Toy sizes, to try the command itself.
        only: Names of cases; empty for the default ones.
        peers: Names of methods; empty for all.
        calls: Most timed calls of a measurement; None leaves it to the benchmark.
        limit: Seconds after which no further measurement begins.
        seed: Of inputs and weights.
        command: The command line, for the file.
        turbodiffusion: A checkout of TurboDiffusion, for `network`.
        inputs: Pairs of a timestep and a seed, for `fidelity`.
    """

    out: Path
    device: str = "cuda"
    quick: bool = False
    micro: bool = False
    only: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    calls: int | None = None
    limit: float = 600.0
    seed: int = 0
    command: str = ""
    turbodiffusion: Path | None = None
    inputs: int = 1

    def __post_init__(self) -> None:
        if self.calls is not None and self.calls < 1:
            raise ConfigError("--calls", expected="1 or more", got=str(self.calls))
        if self.inputs < 1:
            raise ConfigError("--inputs", expected="1 or more", got=str(self.inputs))
        if not self.limit >= 0:
            raise ConfigError("--limit", expected="seconds, 0 or more", got=str(self.limit))
        if self.out.exists() and not self.out.is_dir():
            raise ConfigError("--out", expected="a folder", got=f"the file {self.out}")

    @property
    def compiler(self) -> str:
        """Backend of torch.compile."""
        return "eager" if self.micro else "inductor"

    def torch_device(self) -> torch.device:
        """The device, after checking that it is there and fits the sizes."""
        return device_of(self.device, needs_gpu=not self.micro)

    def effort(
        self, budget: float, most: int, *, quick: tuple[float, int] | None = None, least: int = 4
    ) -> Effort:
        """How long to measure, with what --quick, --micro and --calls change about it."""
        if self.micro:
            budget, least, most = 5.0, 2, 2
        elif self.quick and quick is not None:
            budget, most = quick
        most = self.calls or most
        return Effort(budget, min(least, most), most)


def chosen(option: str, wanted: Sequence[str], known: Sequence[str]) -> list[str]:
    """The wanted names in the order of the known ones; all if none is wanted.

    Raises:
        ConfigError: A name that is not known.
    """
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise ConfigError(option, expected=f"some of {', '.join(known)}", got=", ".join(unknown))
    return [name for name in known if not wanted or name in wanted]


def check_target(path: Path, own: Callable[[Any], bool], plots: Iterable[Path] = ()) -> None:
    """Refuse to write over files that a benchmark did not write, and where nothing can be written.

    Args:
        path: The result to be.
        own: Whether what a JSON file holds is this benchmark's.
        plots: What lies beside the result, if that is not there yet.

    Raises:
        OutputExistsError: Such a file is there.
        OutputError: The result cannot be written.
    """
    others = [plot for plot in plots if plot.exists()]
    if path.exists():
        try:
            others += [] if own(json.loads(path.read_text(encoding="utf-8"))) else [path]
        except (OSError, ValueError, LookupError, TypeError):
            others.append(path)
    if others:
        raise OutputExistsError(
            f"--out {path.parent} holds files that this benchmark did not write, under the "
            "names of its own",
            expected="a new folder, or one that it has written to",
            got=", ".join(other.name for other in others),
            remedy="Choose another folder",
        )
    check_writable(path)


@dataclass(slots=True)
class Journal:
    """One run of a benchmark: what is written and what is shown.

    Args:
        name: Of the benchmark; the file is `<name>.json`.
        plan: What was asked for.
        columns: Of the table on the screen; the first two name case and method.
        about: Goes to the file: definitions and formulas.
    """

    name: str
    plan: Plan
    columns: Columns
    about: Mapping[str, object] = field(default_factory=dict)
    cases: dict[str, Record] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    summary: Record = field(default_factory=dict)
    finished: bool = False
    device: torch.device = field(init=False)
    watch: ClockWatch = field(init=False)
    #: The head of the file.
    header: Record = field(init=False)
    _begin: float = field(init=False)

    def __post_init__(self) -> None:
        self.device = self.plan.torch_device()
        self._check_out()
        self._begin = time.monotonic()
        self.watch = ClockWatch(self.device)
        found, tiles = machine(self.device), table_path()
        self.header = {
            "benchmark": self.name,
            "command": self.plan.command,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": found,
            "versions": versions(),
            "code": code_digest(),
            "tiles": str(tiles) if tiles.exists() else "as shipped",
            "quick": self.plan.quick,
            "micro": self.plan.micro,
            "about": dict(self.about),
            "ceilings": {"data sheet": ceilings(self.device)},
        }
        print(f"{device_name(self.device)}, torch {torch.__version__}, writing {self.path}")
        if "driver" in found:
            print(
                f"driver {found['driver']}, SM clock at most {found['sm_clock_max_mhz']} MHz, "
                f"tiles {self.header['tiles']}"
            )
        self.line([column.title for column in self.columns])
        self.line(["-" * column.width for column in self.columns])

    @property
    def time_is_up(self) -> bool:
        """Who measures looks at it between measurements and never in one."""
        return time.monotonic() >= self._begin + self.plan.limit

    @property
    def path(self) -> Path:
        """The JSON file."""
        return self.plan.out / f"{self.name}.json"

    def _check_out(self) -> None:
        """Refuse to write over files that no benchmark wrote, and where nothing can be written."""
        from benchmarks.plots import plots_of

        def own(found: Any) -> bool:
            return bool(found["benchmark"] == self.name)

        beside = [] if self.path.exists() else plots_of(self.path, self.name)
        check_target(self.path, own, beside)

    def line(self, cells: Sequence[str]) -> None:
        """One line of the table; numbers to the right, the last cell as long as it is."""
        parts = []
        for text, (_, width, *_) in zip(cells, self.columns, strict=False):
            number = text[:1].isdigit() or text[:1] in "-+." or text == "nan"
            parts.append(text.rjust(width) if number and set(text) != {"-"} else text.ljust(width))
        print("  ".join(parts).rstrip(), flush=True)

    def row(self, case: str, name: str, found: Mapping[str, Record]) -> None:
        """The line of a method: its numbers, or why there are none.

        Args:
            case: The first cell.
            name: The second one; a key of `found`.
            found: The records of all methods of the case.
        """
        cells = []
        for _, _, value, form in self.columns[2:]:
            if callable(value):
                known = [value(found, name)]
            else:
                known = [number(found[name], *path.split(".")) for path in value.split(" or ")]
            cells.append(next((f"{one:{form}}" for one in known if one is not None), ""))
        if "reason" in found[name] or not cells[0]:
            reasons = [text for key, text in found[name].items() if key.endswith("reason")]
            cells = [*map(str, reasons), "not timed"][:1]
        self.line((case, name, *cells))

    def late(self, what: str) -> bool:
        """Whether the time is up; then `what` is noted as left out."""
        if self.time_is_up:
            self.left_out.append(what)
            return True
        return False

    def case(self, name: str, value: Record) -> None:
        """Keep a case and write the file."""
        self.cases[name] = value
        self.write()

    def document(self) -> Record:
        """What the file holds now."""
        return {
            **self.header,
            "seconds": round(time.monotonic() - self._begin, 1),
            "observed": self.watch.since(self._begin),
            "finished": self.finished,
            "left_out": self.left_out,
            "summary": self.summary,
            "cases": self.cases,
        }

    def write(self) -> None:
        """Write the file, whole or not at all."""
        write_json(self.path, to_json(self.document()))

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around all measurements: whatever ends them, the file and the plots show what there
        was."""
        from benchmarks.plots import draw

        finished = False
        try:
            yield
            finished = True
        finally:
            self._close(finished)
            for path in draw(self.path):
                print(f"drawn: {path}", flush=True)

    def _close(self, finished: bool) -> None:
        self.finished = finished and not self.left_out
        self.write()
        self.watch.stop()
        for what in self.left_out:
            print(f"left out, no time: {what}")
        clock = self.watch.since(self._begin)["sm_clock_mhz"]
        if isinstance(clock, dict):
            print("SM clock: {least:.0f} to {most:.0f} MHz, median {median:.0f}".format(**clock))
        print(f"{self.path}: {len(self.cases)} cases in {self.document()['seconds']} s")
        sys.stdout.flush()


def run_cases(
    plan: Plan,
    name: str,
    columns: Columns,
    about: Mapping[str, object],
    cases: Mapping[str, Any],
    measure: Callable[[Any, list[str], Journal], bool],
    *,
    methods: Sequence[str],
    default: Sequence[str] = (),
    before: Callable[[Journal], None] | None = None,
) -> int:
    """Run a benchmark: one case after the other, as long as the time allows.

    Args:
        plan: What was asked for.
        name: Of the benchmark.
        columns: Of the table on the screen.
        about: Goes to the file: definitions and formulas.
        cases: Name -> case.
        measure: Measures a case with some methods and keeps it; whether what is ours was right.
        methods: Names of all methods.
        default: Names of the cases that are measured unless others are asked for; empty for all.
        before: Called before the first case.

    Returns:
        0 if everything of ours was right, else 1.
    """
    only = chosen("--only", plan.only or default, list(cases))
    peers = chosen("--peers", plan.peers, methods)
    journal = Journal(name, plan, columns, about)
    good = True
    with journal.running():
        if before is not None:
            before(journal)
        for case in only:
            if not journal.late(case):
                good &= measure(cases[case], peers, journal)
                free(journal.device)
    return 0 if good else 1


# --- one method after the other ------------------------------------------------------------------


class Wrong(Exception):
    """What a method computed is too far from the truth to be timed."""


def check(error: Mapping[str, float], limit: float, beside: str = "") -> None:
    """Raise Wrong if the relative L2 is not below the limit."""
    if not error["relative_l2"] < limit:
        raise Wrong(f"wrong (relL2 {error['relative_l2']:.3g}{beside})")


@contextmanager
def attempted(record: Record) -> Iterator[None]:
    """Say in the record whether what runs inside was timed, was wrong, or could not run here."""
    try:
        yield
        record["status"] = "timed"
    except Wrong as error:
        record.update(status="wrong", reason=str(error))
    except Exception as error:  # a peer may fail in any way, and the others go on
        record.update(status="missing", reason=reason_of(error))


def as_written(network: object, backend: str) -> AbstractContextManager[object]:
    """Change nothing."""
    return nullcontext()


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to run a network, or to compute something else.

    Attributes:
        name: As in the table and the file.
        enter: Goes into it for a network, with a backend for torch.compile; may raise.
        ours: Whether it is ours, so that it must be right.
        profiled: Whether the time of its kernels is measured too.
    """

    name: str
    enter: Enter = as_written
    ours: bool = False
    profiled: bool = False


def one_by_one(
    journal: Journal,
    case: str,
    record: Record,
    variants: Iterable[Variant],
    measure: Callable[[Variant, Record], None],
    key: str = "variants",
) -> bool:
    """Measure each variant, show it and keep the case at once.

    Args:
        journal: Of the benchmark.
        case: Name of the case.
        record: Of the case; it gets the records of the variants.
        variants: In the order in which they run, as long as the time allows.
        measure: Writes into the variant's own record; may raise, also `Wrong`.
        key: Of the variants in `record`.

    Returns:
        Whether all of ours were right.
    """
    found, good = record.setdefault(key, {}), True
    for variant in variants:
        if journal.late(f"{case}, {variant.name}"):
            continue
        one: Record = {}
        found[variant.name] = one
        with attempted(one):
            measure(variant, one)
        gc.collect()
        good &= "reason" not in one or not variant.ours
        journal.row(case, variant.name, found)
        journal.case(case, record)
    return good


# --- the contest ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Method:
    """A way to compute something.

    Attributes:
        name: As in the table and the file.
        make: Gets one set of inputs, gives back the call to be timed; may raise.
        context: Entered around every call, outside the clock.
        note: What a reader has to know.
        several: Whether it is more than one kernel, so that one of them alone is of interest.
        errors: Against its own truth, where it computes something else than the others.
    """

    name: str
    make: Callable[[Sequence[torch.Tensor]], Call]
    context: Callable[[], AbstractContextManager[object]] = nullcontext
    note: str = ""
    several: bool = False
    errors: Errors | None = None


@dataclass(slots=True)
class Entrant:
    """A method in one case.

    Attributes:
        method: Which.
        record: What goes to the file; `status` is "ready", "timed", "wrong", "missing" or "left
            out".
        calls: One a set of inputs; empty unless it was checked and found right.
    """

    method: Method
    record: Record
    calls: list[Call] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Of the method."""
        return self.method.name

    def median(self, clock: str = "milliseconds") -> float | None:
        """Median time in ms, None if it was not timed."""
        timing = self.record.get(clock)
        return None if timing is None else float(timing["median"])


def compete(
    methods: Sequence[Method],
    sets: Sequence[Sequence[torch.Tensor]],
    errors: Errors,
    journal: Journal,
    effort: Effort,
    where: str,
    *,
    wrong: float,
    clocks: Sequence[str] = ("milliseconds",),
    alone: tuple[str, str] | None = None,
) -> list[Entrant]:
    """Check all methods, then time in turns those that are right.

    Args:
        methods: Which.
        sets: Sets of inputs; the outputs of the first are checked, all are timed.
        errors: Numbers of an output against the truth.
        journal: For the device and the deadline.
        effort: How long.
        where: Name of the case, for what is left out.
        wrong: Relative L2 from which an output is wrong and not inaccurate.
        clocks: "milliseconds", calls one by one, and "graph_milliseconds", a call inside a CUDA
            graph over all sets. On a CPU, which has no graphs, both are calls one by one.
        alone: (group of kernels, name in the file): for methods of several kernels, what those of
            the group take alone.
    """
    entrants = [admit(method, sets, errors, wrong) for method in methods]
    for clock in clocks:
        _time(entrants, journal, effort, where, clock)
    for entrant in entrants:
        failed = [entrant.record.get(f"{clock}_reason") for clock in clocks]
        if entrant.record.get("status") == "ready" and any(failed):  # It ran once, and then not.
            entrant.record.update(status="missing", reason=next(filter(None, failed)))
            entrant.calls = []
        asked = alone is not None and entrant.calls and entrant.method.several
        if not asked or journal.late(f"{where}, {entrant.name}, kernels"):
            continue
        with entrant.method.context():
            found = kernel_milliseconds(rotating(entrant.calls), journal.device, calls=3)
        assert alone is not None
        group, key = alone
        entrant.record[key] = sum(ms for name, ms in found.items() if group_of(name) == group)
        entrant.record["kernels"] = dict(list(found.items())[:8])
    return entrants


def admit(
    method: Method, sets: Sequence[Sequence[torch.Tensor]], errors: Errors, wrong: float
) -> Entrant:
    """Check a method on the first set of inputs; arguments as in `compete`."""
    entrant = Entrant(method, {"note": method.note} if method.note else {})
    with attempted(entrant.record), method.context():
        calls = [method.make(one) for one in sets]
        output = calls[0]()
        entrant.record["error"] = found = (method.errors or errors)(output)
        finite = bool(output.isfinite().all())
        check(found, wrong if finite else 0.0, "" if finite else ", not finite")
        entrant.calls = calls
    if entrant.calls:
        entrant.record["status"] = "ready"
    return entrant


#: Rounds in which all methods are timed in turn.
_ROUNDS: Final = 2


def _time(
    entrants: Sequence[Entrant], journal: Journal, effort: Effort, where: str, clock: str
) -> None:
    device = journal.device
    graph = clock.startswith("graph") and device.type == "cuda"
    running: list[tuple[Entrant, Callable[[], object], int, int, list[float]]] = []
    for entrant in entrants:
        if not entrant.calls:
            continue
        if journal.late(f"{where}, {entrant.name}, {clock}"):
            if entrant.record["status"] == "ready":
                entrant.record.update(status="left out", reason="no time left")
            continue
        with entrant.method.context():
            try:
                make: Callable[..., Callable[[], object]] = graph_of if graph else rotating
                call = make(entrant.calls)
                calls = calls_within(call, device, effort.budget, effort.least, effort.most)
            except Exception as error:  # e.g. a peer that cannot be captured
                entrant.record[f"{clock}_reason"] = reason_of(error)
                continue
        running.append((entrant, call, len(entrant.calls) if graph else 1, calls, []))
    for round_ in range(_ROUNDS):
        for entrant, call, per, calls, times in running:
            broken = f"{clock}_reason" in entrant.record
            if broken or (round_ and journal.time_is_up and times):
                continue
            try:
                with entrant.method.context():
                    # What takes long needs no warming up: it was called a moment ago.
                    warmup = 1 if calls > 10 else 0
                    some = call_times(call, device, -(-calls // _ROUNDS), warmup=warmup)
            except Exception as error:
                entrant.record[f"{clock}_reason"] = reason_of(error)
                continue
            times += [one / per for one in some]
    for entrant, _, _, _, times in running:
        if f"{clock}_reason" in entrant.record:
            continue
        entrant.record[clock] = asdict(Timing.of(times))
        entrant.record["status"] = "timed"


def finish(
    entrants: Sequence[Entrant], journal: Journal, case: str, record: Record, base: str = ""
) -> None:
    """Show the entrants and keep the case.

    Args:
        entrants: After a contest.
        journal: Of the benchmark.
        case: Name of the case.
        record: Of the case; it gets the entrants' records.
        base: The method whose median over that of another one is the other's `speed_up`.
    """
    found = record["methods"] = {entrant.name: entrant.record for entrant in entrants}
    for name, one in found.items():
        ratio = over(name)(found, base) if base else None
        if ratio is not None:
            one["speed_up"] = ratio
        journal.row(case, name, found)
    journal.case(case, record)


# --- inputs, clocks and kernels ------------------------------------------------------------------

#: Input sets together are at least twice this, more than the L2 of any card so far (H200: 50 MB).
_L2_BYTES: Final = 64 * 2**20
_MOST_SETS: Final = 12

#: What kernels do, by parts of their names; the first group that fits counts.
_PARTS: Final[tuple[tuple[str, tuple[str, ...]], ...]] = (
    (
        "prologue",
        ("prologue", "statistics_kernel", "quantize", "quant_", "quantint8", "meanscale",
         "transposepadpermute", "submean"),
    ),
    ("attention", ("attention", "attn", "fmha", "flash", "sdpa", "one_launch", "hopper_kernel")),
    ("norm and modulate", ("layer_norm", "layernorm", "rms_norm", "rmsnorm", "modulate", "norm_")),
    ("GEMM", ("nvjet",)),  # cuBLAS, also where its name says that it ends with GELU
    ("activation", ("gelu", "silu", "tanh")),
    ("skip", ("skip_kernel", "close_skip")),
    (
        "GEMM",
        ("gemm", "cutlass", "cublas", "xmma", "project", "linear", "triton_mm", "splitk",
         "addmm", "bmm", "matmul"),
    ),
    ("elementwise and copies", ("elementwise", "triton_poi", "triton_red", "triton_per", "copy",
                                "memcpy", "memset", "reduce_kernel", "catarray", "aten::")),
)  # fmt: skip
GROUPS: Final = (*dict.fromkeys(name for name, _ in _PARTS), "other")


def random_normal(
    shape: Shape, device: torch.device, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [B, Nq, H*D], k and v [B, Nk, H*D], standard normal, bf16."""
    random = generator(device, seed)
    q, k, v = (
        torch.randn(shape.batch, n, shape.channels, generator=random, device=device).bfloat16()
        for n in (shape.q_tokens, shape.kv_tokens, shape.kv_tokens)
    )
    return q, k, v


def errors_to(truth: torch.Tensor, rows: torch.Tensor) -> Errors:
    """Numbers of some rows of an output."""
    return lambda output: errors_of(output[:, rows], truth)


def group_of(kernel: str) -> str:
    """What a kernel does, judged by its name."""
    name = kernel.lower()
    for group, parts in _PARTS:
        if any(part in name for part in parts):
            return group
    return "other"


def input_sets(bytes_a_set: int) -> int:
    """How many sets of inputs keep each other out of L2: at least two."""
    return max(2, min(_MOST_SETS, -(-2 * _L2_BYTES // max(1, bytes_a_set))))


def rotating(calls: Sequence[Call]) -> Call:
    """A call that makes the given ones in turn."""
    turn = itertools.cycle(calls)
    return lambda: next(turn)()


def graph_of(calls: Sequence[Call]) -> Callable[[], None]:
    """All calls once, as one CUDA graph; what it gives back replays it."""
    stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # what a first call sets up must not be captured
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph.replay


def kernel_milliseconds(
    call: Callable[[], object], device: torch.device, calls: int = 1
) -> dict[str, float]:
    """Milliseconds a call spends in each kernel (on a CPU: in each operator), by name."""
    from torch.profiler import ProfilerActivity, profile

    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CUDA] if on_gpu else [ProfilerActivity.CPU]
    call()
    wait(device)
    with profile(activities=activities, acc_events=True) as recorded:
        for _ in range(calls):
            call()
        wait(device)
    found: dict[str, float] = {}
    for event in recorded.key_averages():
        if on_gpu and str(event.device_type) != "DeviceType.CUDA":
            continue
        micro = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if micro > 0:
            found[event.key] = found.get(event.key, 0.0) + micro / 1e3 / calls
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def wait(device: torch.device) -> None:
    """Until the device has nothing to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def queued_milliseconds(
    call: Callable[[], object],
    device: torch.device,
    rounds: int,
    queued: int,
    ready: Callable[[], object] = lambda: None,
) -> dict[str, float]:
    """Of one of several queued calls, by the wall clock.

    Args:
        call: What to time.
        device: Where it runs.
        rounds: How often.
        queued: Calls a round; 0: until one returns when the device has nothing to do.
        ready: Called before a round, e.g. so that several ranks begin together.
    """
    times = []
    for _ in range(rounds):
        wait(device)
        ready()
        wait(device)
        begin = time.perf_counter()
        for _ in range(max(1, queued)):
            call()
        if queued:
            wait(device)
        times.append((time.perf_counter() - begin) / max(1, queued) * 1e3)
    wait(device)
    return {"median": statistics.median(times), "least": min(times), "most": max(times)}


def peak_bytes(call: Callable[[], object], device: torch.device) -> dict[str, int]:
    """Peak of allocated memory during a call, whole and on top of what was there before; nothing
    on a CPU."""
    if device.type != "cuda":
        return {}
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    return {"peak_bytes": peak, "peak_bytes_over_weights": peak - before}


def free(device: torch.device) -> None:
    """Give memory back before the next case needs it."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
