"""The runner of every benchmark: the plan, the clocks, the printed table and the JSON file.

A method is checked before it is timed. One whose output is wrong is reported as wrong; one that
cannot run here is reported with its reason, and the others go on. Each result is on disk as soon
as it is measured.
"""

from __future__ import annotations

import gc
import json
import statistics
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist

from turbo_rcm_patch.errors import ConfigError, DeviceError, OutputExistsError
from turbo_rcm_patch.files import check_writable, write_json
from turbo_rcm_patch.video.environment import code_digest, device_name, versions
from turbo_rcm_patch.video.measures import relative_l2

Call = Callable[[], torch.Tensor]
#: What a file holds of a case or a method.
Record = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The options of the command line.

    Attributes:
        out: Folder of the JSON file.
        device: "cuda", "cuda:1", or "cpu" with `micro`.
        only: Names of cases and of methods; empty for the default ones.
        calls: Most timed calls of a measurement; None for the benchmark's own number.
        limit: Seconds after which no further measurement begins.
        seed: Of inputs and weights.
        micro: Toy sizes, to try a command.
        command: The command line, for the file.
    """

    out: Path
    device: str = "cuda"
    only: tuple[str, ...] = ()
    calls: int | None = None
    limit: float = 540.0
    seed: int = 0
    micro: bool = False
    command: str = ""

    def __post_init__(self) -> None:
        if self.calls is not None and self.calls < 1:
            raise ConfigError("--calls", expected="1 or more", got=str(self.calls))
        if not self.limit >= 0:
            raise ConfigError("--limit", expected="seconds, 0 or more", got=str(self.limit))

    @property
    def compiler(self) -> str:
        """The backend of torch.compile."""
        return "eager" if self.micro else "inductor"

    def most(self, calls: int) -> int:
        """The number of timed calls: a benchmark's own, unless the command line says another."""
        return self.calls or (2 if self.micro else calls)

    def torch_device(self) -> torch.device:
        """Return the device, made the current one, after checking that it is there.

        Raises:
            ConfigError: It is no CUDA device, and the sizes are real.
            DeviceError: torch does not see it.
        """
        if self.device == "cpu" and self.micro:
            return torch.device("cpu")
        if self.device.split(":")[0] != "cuda":
            raise ConfigError(
                "--device",
                expected='"cuda" or "cuda:1"',
                got=self.device,
                remedy="--device cpu --micro tries the command without a GPU",
            )
        device = torch.device(self.device)
        if (device.index or 0) >= torch.cuda.device_count():
            raise DeviceError(
                "--device",
                expected="a CUDA device that torch sees",
                got=f"{self.device}, and torch sees {torch.cuda.device_count()}",
                remedy="`turbo-rcm-patch doctor` says why; --device cpu --micro needs none",
            )
        device = torch.device("cuda", device.index or 0)  # set_device wants a number
        torch.cuda.set_device(device)
        return device


# --- clocks and errors ---------------------------------------------------------------------------


class Wrong(Exception):
    """An output is too far from the truth for its time to mean anything."""


def check(error: float, limit: float) -> float:
    """Return a relative L2 error, or raise `Wrong` if it is not below the limit."""
    if not error < limit:
        raise Wrong(f"wrong: relative L2 {error:.3g}")
    return error


def wait(device: torch.device) -> None:
    """Wait until the device has nothing left to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def summary(times: Sequence[float]) -> Record:
    """Median, 20th and 80th percentile, and how many there are."""
    ordered = sorted(times)
    fifth = len(ordered) // 5
    return {
        "median": statistics.median(ordered),
        "p20": ordered[fifth],
        "p80": ordered[-1 - fifth],
        "calls": len(ordered),
    }


def time_calls(call: Callable[[], object], device: torch.device, calls: int) -> Record:
    """Milliseconds of each of so many calls, queued one after another, after one to warm up.

    CUDA events measure on a GPU, the wall clock on a CPU.
    """
    call()
    wait(device)
    if device.type != "cuda":
        times = []
        for _ in range(calls):
            begin = time.perf_counter()
            call()
            times.append(1e3 * (time.perf_counter() - begin))
        return summary(times)
    events: list[tuple[Any, Any]] = []
    for _ in range(calls):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        call()
        end.record()
        events.append((start, end))
    wait(device)
    return summary([start.elapsed_time(end) for start, end in events])


def time_forwards(
    call: Callable[[], object],
    device: torch.device,
    rounds: int,
    ready: Callable[[], object] = lambda: None,
    queued: int = 0,
) -> tuple[Record, Record]:
    """Time a forward in two ways, in milliseconds.

    Args:
        call: The forward.
        device: Where it runs.
        rounds: How often each is measured.
        ready: Called before each round, so that several ranks begin together.
        queued: Forwards in a round of the first way; 0 for one long or three short ones. Ranks
            that exchange must make the same number.

    Returns:
        Of one of several queued forwards by the wall clock; and of the CPU, until a forward
        returns that began on an idle device.
    """
    # A long forward hides its launches by itself.
    queued = queued or (1 if seconds_of(call, device) > 0.15 else 3)
    whole, cpu = [], []
    for _ in range(rounds):
        ready()
        wait(device)
        begin = time.perf_counter()
        for _ in range(queued):
            call()
        wait(device)
        whole.append(1e3 * (time.perf_counter() - begin) / queued)
    for _ in range(rounds):
        ready()
        wait(device)
        begin = time.perf_counter()
        call()
        cpu.append(1e3 * (time.perf_counter() - begin))
    wait(device)
    return summary(whole), summary(cpu)


def idle_at(device: torch.device) -> float:
    """The time in seconds, once the device has nothing left to do."""
    wait(device)
    return time.perf_counter()


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call, alone."""
    begin = idle_at(device)
    call()
    return idle_at(device) - begin


def peak_gib(call: Callable[[], object], device: torch.device) -> float | None:
    """GiB of allocated memory at the peak of a call, weights included; None on a CPU."""
    cuda = device.type == "cuda"
    wait(device)
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    call()
    wait(device)
    return torch.cuda.max_memory_allocated(device) / 2**30 if cuda else None


def generator(device: torch.device, seed: int) -> torch.Generator:
    """A seeded generator on the device."""
    return torch.Generator(device=device).manual_seed(seed)


def free(device: torch.device) -> None:
    """Release unused memory for the next measurement."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


# --- the table and the file ----------------------------------------------------------------------


class Column(NamedTuple):
    """A column of the table: its title, the number's path in a method's record, and its format."""

    title: str
    path: str
    form: str


TIMES: Final = (
    Column("ms", "ms.median", ".3f"),
    Column("p20", "ms.p20", ".3f"),
    Column("p80", "ms.p80", ".3f"),
)
ERROR: Final = Column("error", "error", ".4f")


def machine(device: torch.device) -> Record:
    """Name, compute capability, size and driver of a device."""
    found: Record = {"device": device_name(device)}
    if device.type == "cuda":
        card: Any = torch.cuda.get_device_properties(device)
        found |= {
            "capability": f"{card.major}.{card.minor}",
            "multiprocessors": card.multi_processor_count,
            "memory_gib": round(card.total_memory / 2**30, 1),
            "driver": _driver(),
        }
    return found


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
        return said.stdout.splitlines()[0].strip()
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown"


class Journal:
    """One run of a benchmark. A file of the same machine, versions and code is continued.

    Args:
        name: Of the benchmark; its file is `<name>.json`.
        plan: What was asked for.
        columns: Of the table, after case and method.
        about: Definitions, for the file.
        device: Where it measures; the plan's by default.
        rank: Ranks above 0 print and write nothing.

    Raises:
        OutputExistsError: A file of that name is there that no benchmark wrote.
        OutputError: The file cannot be written.
    """

    def __init__(
        self,
        name: str,
        plan: Plan,
        columns: Sequence[Column],
        about: Mapping[str, object],
        device: torch.device | None = None,
        rank: int = 0,
    ) -> None:
        self.plan, self.columns, self._rank = plan, columns, rank
        self.device = plan.torch_device() if device is None else device
        self.path = plan.out / f"{name}.json"
        self.failed = False
        self._begin = time.monotonic()
        head: Record = {
            "benchmark": name,
            "machine": machine(self.device),
            "versions": versions(),
            "code": code_digest(),
            "micro": plan.micro,
            "seed": plan.seed,
            "about": dict(about),
        }
        before = {} if rank else self._before(name)
        same = all(before.get(key) == value for key, value in head.items())
        self.document: Record = before if same else head | {"runs": [], "cases": {}}
        self._run: Record = {
            "command": plan.command,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "left_out": [],
        }
        self.document["runs"].append(self._run)
        known = self.document["versions"]
        self._say(f"{head['machine']['device']}, torch {known['torch']}, triton {known['triton']}")
        self._say(f"| case | method | {' | '.join(column.title for column in columns)} |")
        self._say("|---|---|" + "---:|" * len(columns))

    def _say(self, line: str) -> None:
        if not self._rank:
            print(line, flush=True)

    def _before(self, name: str) -> Record:
        check_writable(self.path)
        if not self.path.exists():
            return {}
        try:
            found: Record = json.loads(self.path.read_text(encoding="utf-8"))
            if found["benchmark"] == name:
                return found
        except (OSError, ValueError, LookupError, TypeError):
            pass
        raise OutputExistsError(
            f"--out {self.path.parent}",
            expected="a new folder, or one that a benchmark has written to",
            got=f"{self.path.name} of another origin",
            remedy="Choose another folder",
        )

    def case(self, name: str, **facts: object) -> dict[str, Record]:
        """Return the records of a case's methods, after adding facts about the case."""
        case: Record = self.document["cases"].setdefault(name, {"methods": {}})
        case.update(facts)
        methods: dict[str, Record] = case["methods"]
        return methods

    def late(self, what: str) -> bool:
        """Return True if the time is up, on rank 0 if there are several, and note what is left
        out."""
        late = time.monotonic() >= self._begin + self.plan.limit
        if dist.is_available() and dist.is_initialized():
            said = torch.tensor(int(late), device=self.device)
            dist.broadcast(said, 0)
            late = bool(said)
        if late:
            self._run["left_out"].append(what)
        return late

    def measure(self, case: str, method: str, function: Callable[[Record], None]) -> None:
        """Measure one method, print its row and write the file.

        The command fails if a method of this library cannot run or is wrong.

        Args:
            case: Name of the case.
            method: Name of the method.
            function: Fills the method's record; may raise, also `Wrong`.
        """
        if self.late(f"{case}, {method}"):
            return
        record: Record = {}
        try:
            function(record)
            record["status"] = "timed"
        except Wrong as error:
            record.update(status="wrong", reason=str(error))
        except Exception as error:  # A peer may fail in any way.
            record.update(status="missing", reason=reason_of(error))
        self.case(case)[method] = record
        self.failed |= is_patched(method) and record["status"] != "timed"
        cells = [_cell(record, column) for column in self.columns]
        if "reason" in record:
            cells[:1] = [record["reason"]]
        self._say(f"| {case} | {method} | {' | '.join(cells)} |")
        self.write()
        free(self.device)

    def write(self) -> None:
        """Write the file, whole or not at all."""
        self._run["seconds"] = round(time.monotonic() - self._begin, 1)
        if not self._rank:
            write_json(self.path, self.document)

    def close(self) -> None:
        """Write the file and say where it is and what is missing."""
        self.write()
        for what in self._run["left_out"]:
            self._say(f"left out, no time: {what}")
        self._say(f"{self.path}: {self._run['seconds']} s")


def is_patched(method: str) -> bool:
    """Return True if a method is this library's."""
    return not {"patched", "fused"}.isdisjoint(method.split())


def _cell(record: Record, column: Column) -> str:
    value: Any = record
    for key in column.path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:{column.form}}" if isinstance(value, (int, float)) else str(value or "")


def reason_of(error: BaseException) -> str:
    """An error in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300] if lines else 'no message'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """A registered benchmark.

    Attributes:
        name: Its file is `<name>.json`.
        about: Definitions, for the file.
        columns: Of the table, after case and method.
        cases, methods: All their names.
        measure: Measures a case with some of the methods.
        default: The cases that are measured unless others are named; empty for all.
    """

    name: str
    about: Mapping[str, object]
    columns: Sequence[Column]
    cases: Collection[str]
    methods: Collection[str]
    measure: Callable[[str, list[str], Journal], None]
    default: Sequence[str] = ()

    def chosen(self, plan: Plan) -> tuple[list[str], list[str]]:
        """Divide the names of `--only` into cases and methods, each in their own order.

        Raises:
            ConfigError: A name is neither.
        """
        only = plan.only
        unknown = [name for name in only if name not in self.cases and name not in self.methods]
        if unknown:
            raise ConfigError(
                "--only",
                expected=f"cases ({', '.join(self.cases)}) or methods ({', '.join(self.methods)})",
                got=", ".join(unknown),
            )
        first = list(self.default or self.cases)[: 1 if plan.micro else None]  # All are alike.
        cases = [name for name in self.cases if name in only] or first
        return cases, [name for name in self.methods if name in only] or list(self.methods)

    def __call__(self, plan: Plan, device: torch.device | None = None, rank: int = 0) -> int:
        """Measure one case after the other, as long as the time allows, and write the file.

        Args:
            plan: What was asked for.
            device: Where to measure; by default the plan's.
            rank: Of this process. Ranks above 0 measure along and write nothing.

        Returns:
            0 if every method of this library ran and was right, else 1.
        """
        cases, methods = self.chosen(plan)
        journal = Journal(self.name, plan, self.columns, self.about, device, rank)
        try:
            for case in cases:
                if not journal.late(case):
                    self.measure(case, methods, journal)
                    free(journal.device)
        finally:
            journal.close()
        return int(journal.failed)


def error_to(truth: torch.Tensor, limit: float) -> Callable[[torch.Tensor], float]:
    """Return a function that gives an output's relative L2 error, or raises `Wrong`."""
    return lambda output: check(relative_l2(output, truth), limit)
