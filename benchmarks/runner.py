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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from turbo_rcm_patch.errors import ConfigError, DeviceError, OutputExistsError
from turbo_rcm_patch.output import check_writable, write_json
from turbo_rcm_patch.video.environment import code_digest, device_name, versions
from turbo_rcm_patch.video.measures import relative_l2

Call = Callable[[], torch.Tensor]
#: What a file holds of a case or a method.
Record = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the command line asked for.

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
) -> tuple[Record, Record]:
    """Time a forward in two ways, in milliseconds.

    Args:
        call: The forward.
        device: Where it runs.
        rounds: How often each is measured.
        ready: Called before each round, so that several ranks begin together.

    Returns:
        Of one of several queued forwards by the wall clock; and of the CPU, until a forward
        returns that began on an idle device.
    """
    once = seconds_of(call, device)
    queued = 1 if once > 0.15 else 3  # A long forward hides its launches by itself.
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


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call, alone."""
    wait(device)
    begin = time.perf_counter()
    call()
    wait(device)
    return time.perf_counter() - begin


def peak_gib(call: Callable[[], object], device: torch.device) -> float | None:
    """GiB of allocated memory at the peak of a call, weights included; None on a CPU."""
    if device.type != "cuda":
        return None
    wait(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    wait(device)
    return torch.cuda.max_memory_allocated(device) / 2**30


def generator(device: torch.device, seed: int) -> torch.Generator:
    """A seeded generator on the device."""
    return torch.Generator(device=device).manual_seed(seed)


def free(device: torch.device) -> None:
    """Give unused memory back before the next measurement needs it."""
    gc.collect()
    if device.type == "cuda":
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
    ) -> None:
        self.plan, self.columns = plan, columns
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
        before = self._before(name)
        same = all(before.get(key) == value for key, value in head.items())
        self.document: Record = before if same else head | {"runs": [], "cases": {}}
        self._run: Record = {
            "command": plan.command,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "left_out": [],
        }
        self.document["runs"].append(self._run)
        known = self.document["versions"]
        print(f"{head['machine']['device']}, torch {known['torch']}, triton {known['triton']}")
        print(f"| case | method | {' | '.join(column.title for column in columns)} |")
        print("|---|---|" + "---:|" * len(columns), flush=True)

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
        """Return True if the time is up, and note what is left out."""
        if time.monotonic() < self._begin + self.plan.limit:
            return False
        self._run["left_out"].append(what)
        return True

    def measure(
        self, case: str, method: str, function: Callable[[Record], None], *, fused: bool = False
    ) -> None:
        """Measure one method, print its row and write the file.

        Args:
            case: Name of the case.
            method: Name of the method.
            function: Fills the method's record; may raise, also `Wrong`.
            fused: Whether the method is this library's, so that the command fails if it cannot
                run or is wrong.
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
        self.keep(case, method, record, fused=fused)

    def keep(self, case: str, method: str, record: Record, *, fused: bool = False) -> None:
        """Keep the record of a method, print its row and write the file."""
        self.case(case)[method] = record
        self.failed |= fused and record["status"] != "timed"
        cells = [_cell(record, column) for column in self.columns]
        if "reason" in record:
            cells[:1] = [record["reason"]]
        print(f"| {case} | {method} | {' | '.join(cells)} |", flush=True)
        self.write()
        free(self.device)

    def write(self) -> None:
        """Write the file, whole or not at all."""
        self._run["seconds"] = round(time.monotonic() - self._begin, 1)
        write_json(self.path, self.document)

    def close(self) -> None:
        """Write the file and say where it is and what is missing."""
        self.write()
        for what in self._run["left_out"]:
            print(f"left out, no time: {what}")
        print(f"{self.path}: {self._run['seconds']} s", flush=True)


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


def chosen(
    only: Sequence[str], cases: Sequence[str], methods: Sequence[str], default: Sequence[str] = ()
) -> tuple[list[str], list[str]]:
    """Divide the names of `--only` into cases and methods.

    Args:
        only: What was asked for.
        cases: Every case.
        methods: Every method.
        default: The cases that are measured unless others are named; empty for all.

    Returns:
        Cases and methods in their own order.

    Raises:
        ConfigError: A name is neither.
    """
    unknown = [name for name in only if name not in (*cases, *methods)]
    if unknown:
        raise ConfigError(
            "--only",
            expected=f"cases ({', '.join(cases)}) or methods ({', '.join(methods)})",
            got=", ".join(unknown),
        )
    some_cases = [name for name in cases if name in only]
    some_methods = [name for name in methods if name in only]
    return some_cases or list(default or cases), some_methods or list(methods)


def run_cases(
    plan: Plan,
    name: str,
    columns: Sequence[Column],
    about: Mapping[str, object],
    cases: Sequence[str],
    methods: Sequence[str],
    measure: Callable[[str, list[str], Journal], None],
    default: Sequence[str] = (),
) -> int:
    """Run a benchmark, one case after the other, as long as the time allows.

    Args:
        plan: What was asked for.
        name: Of the benchmark.
        columns: Of the table.
        about: Definitions, for the file.
        cases: Names of all cases.
        methods: Names of all methods.
        measure: Measures a case with some of the methods.
        default: See `chosen`.

    Returns:
        0 if every method of this library ran and was right, else 1.
    """
    first = list(default or cases)[: 1 if plan.micro else None]  # Toy sizes are all alike.
    some_cases, some_methods = chosen(plan.only, cases, methods, first)
    journal = Journal(name, plan, columns, about)
    try:
        for case in some_cases:
            if not journal.late(case):
                measure(case, some_methods, journal)
                free(journal.device)
    finally:
        journal.close()
    return int(journal.failed)


def error_to(truth: torch.Tensor, limit: float) -> Callable[[torch.Tensor], float]:
    """Return a function that gives an output's relative L2 error, or raises `Wrong`."""
    return lambda output: check(relative_l2(output, truth), limit)
