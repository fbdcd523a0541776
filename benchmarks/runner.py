"""The runner of every benchmark: the plan, the clocks, the printed table and the JSON file.

A method is checked before it is timed. One whose output is wrong is reported as wrong; one that
cannot run here is reported with its reason, and the others go on. Each result is on disk as soon
as it is measured.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch.utils.collect_env import get_nvidia_driver_version, run

from turbo_rcm_patch.errors import ConfigError, OutputExistsError
from turbo_rcm_patch.files import check_writable, write_json
from turbo_rcm_patch.video.environment import code_digest, device_name, versions
from turbo_rcm_patch.video.measures import relative_l2

Call = Callable[[], torch.Tensor]
#: What a file holds of a case or a method.
Record = dict[str, Any]
#: Measures a method and fills its record; may raise, also `Wrong`.
Measure = Callable[[str, Record], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The options of the command line.

    Attributes:
        out: Folder of the JSON file.
        device: "cuda", or "cpu" with `micro`.
        only: Names of cases and of methods; empty for the default ones.
        micro: Toy sizes, to try a command.
        command: The command line, for the file.
    """

    out: Path
    device: str = "cuda"
    only: tuple[str, ...] = ()
    micro: bool = False
    command: str = ""

    @property
    def compiler(self) -> str:
        """The backend of torch.compile."""
        return "eager" if self.micro else "inductor"

    @property
    def torch_device(self) -> torch.device:
        """The device."""
        cpu = self.device == "cpu"
        return torch.device("cpu") if cpu else torch.device("cuda", torch.cuda.current_device())


# --- clocks and errors ---------------------------------------------------------------------------


class Wrong(Exception):
    """An output is too far from the truth for its time to mean anything."""


def checked_error(output: torch.Tensor, truth: torch.Tensor, limit: float) -> float:
    """Return the relative L2 error of an output.

    Raises:
        Wrong: It is not below the limit, or not a number.
    """
    error = relative_l2(output, truth)
    if not error < limit:
        raise Wrong(f"wrong: relative L2 {error:.3g}")
    return error


def time_queued(call: Callable[[], object], device: torch.device) -> float:
    """Milliseconds of a short call: the median of as many as take 0.3 s, with cold caches."""
    if device.type != "cuda":
        call()
        return 1e3 * seconds_of(call, device)
    from triton.testing import do_bench

    return float(do_bench(call, warmup=50, rep=300, return_mode="median"))


def time_forwards(
    call: Callable[[], object],
    device: torch.device,
    *,
    ready: Callable[[], object] = lambda: None,
    queued: int | None = None,
) -> float:
    """Time queued forwards by the wall clock; milliseconds of one, the median of some rounds.

    Args:
        call: The forward.
        device: Where it runs.
        ready: Called before each round, so that several ranks begin together.
        queued: Forwards in a round; by default one long or three short ones. Ranks that exchange
            must make the same number.
    """
    # A long forward hides its launches by itself.
    queued = queued or (1 if seconds_of(call, device) > 0.15 else 3)
    times = []
    for _ in range(_rounds(device)):
        ready()
        begin = idle_at(device)
        for _ in range(queued):
            call()
        times.append(1e3 * (idle_at(device) - begin) / queued)
    return statistics.median(times)


def time_on_cpu(call: Callable[[], object], device: torch.device) -> float:
    """Milliseconds until a forward returns that began on an idle device; the median."""
    times = []
    for _ in range(_rounds(device)):
        begin = idle_at(device)
        call()
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times)


def _rounds(device: torch.device) -> int:
    return 5 if device.type == "cuda" else 2


def idle_at(device: torch.device) -> float:
    """The time in seconds, once the device has nothing left to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call, alone."""
    begin = idle_at(device)
    call()
    return idle_at(device) - begin


def peak_gib(call: Callable[[], object], device: torch.device) -> float | None:
    """GiB of allocated memory at the peak of a call, weights included; None on a CPU."""
    if device.type != "cuda":
        call()
        return None
    idle_at(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    return torch.cuda.max_memory_allocated(device) / 2**30


def generator(device: torch.device, seed: int = 0) -> torch.Generator:
    """A seeded generator on the device."""
    return torch.Generator(device=device).manual_seed(seed)


def free(device: torch.device) -> None:
    """Release unused memory for the next measurement."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


# --- the table and the file ----------------------------------------------------------------------


class Column(NamedTuple):
    """A column of the table: its title, its number's key in a method's record, and its format."""

    title: str
    key: str
    form: str

    def cell(self, record: Record) -> str:
        """The number of a record in this column."""
        value = record.get(self.key)
        if isinstance(value, bool):
            return "yes" if value else "no"
        return "" if value is None else f"{value:{self.form}}"


MS: Final = Column("ms", "ms", ".3f")
ERROR: Final = Column("error", "error", ".4f")


def machine(device: torch.device) -> Record:
    """Name and driver of a device."""
    if device.type != "cuda":
        return {"device": device_name(device)}
    driver = get_nvidia_driver_version(run)  # type: ignore[no-untyped-call]
    return {"device": device_name(device), "driver": driver}


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """A registered benchmark.

    Attributes:
        name: Its file is `<name>.json`.
        text: What it measures, for the help.
        columns: Of the table, after case and method.
        cases: Case -> the methods that it can be measured with.
        prepare: Builds a case; returns the function that measures its methods.
        default: The cases that are measured unless others are named; empty for all.
    """

    name: str
    text: str
    columns: Sequence[Column]
    cases: Mapping[str, Sequence[str]]
    prepare: Callable[[str, Plan, torch.device], Measure]
    default: Sequence[str] = ()

    def chosen(self, plan: Plan) -> dict[str, list[str]]:
        """Return the methods of each case that `--only` names, in the order of the table.

        Raises:
            ConfigError: A name is neither a case nor a method.
        """
        methods = list(dict.fromkeys(name for names in self.cases.values() for name in names))
        unknown = [name for name in plan.only if name not in self.cases and name not in methods]
        if unknown:
            raise ConfigError(
                "--only", got=", ".join(unknown),
                expected=f"cases ({', '.join(self.cases)}) or methods ({', '.join(methods)})",
            )  # fmt: skip
        first = list(self.default or self.cases)[: 1 if plan.micro else None]  # All are alike.
        cases = [name for name in self.cases if name in plan.only] or first
        named = set(plan.only).intersection(methods) or methods
        return {case: [name for name in self.cases[case] if name in named] for case in cases}

    def __call__(self, plan: Plan) -> int:
        """Measure one case after the other; print a row and write the file after each method.

        Returns:
            0 if every method of this library ran and was right, else 1.
        """
        chosen, device, failed = self.chosen(plan), plan.torch_device, False
        path = plan.out / f"{self.name}.json"
        check_new(path)
        cases, known = dict[str, Record](), versions()
        document = {
            "benchmark": self.name, "command": plan.command, "micro": plan.micro,
            "machine": machine(device), "versions": known, "code": code_digest(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"), "cases": cases,
        }  # fmt: skip
        print(f"{device_name(device)}, torch {known['torch']}, triton {known['triton']}")
        print(f"| case | method | {' | '.join(column.title for column in self.columns)} |")
        print("|---|---|" + "---:|" * len(self.columns), flush=True)
        for case, methods in chosen.items():
            with torch.no_grad():
                measure = self.prepare(case, plan, device)
                records = cases.setdefault(case, {"methods": {}})["methods"]
                for method in methods:
                    records[method] = record = _record(measure, method)
                    failed |= is_patched(method) and record["status"] != "timed"
                    cells = [column.cell(record) for column in self.columns]
                    if "reason" in record:
                        cells[:1] = [record["reason"]]
                    print(f"| {case} | {method} | {' | '.join(cells)} |", flush=True)
                    write_json(path, document)
                    free(device)
                del measure
            free(device)
        print(path)
        return int(failed)


def _record(measure: Measure, method: str) -> Record:
    """Measure one method; return its record, with the reason if it is wrong or cannot run."""
    record: Record = {}
    try:
        measure(method, record)
        record["status"] = "timed"
    except Wrong as error:
        record.update(status="wrong", reason=str(error))
    except Exception as error:  # A peer may fail in any way.
        first = str(error).strip().split("\n")[0][:300] or "no message"
        record.update(status="missing", reason=f"{type(error).__name__}: {first}")
    return record


def check_new(path: Path) -> None:
    """Check that a file can be written and replaces none.

    Raises:
        OutputExistsError: The file is there.
        OutputError: It cannot be written.
    """
    check_writable(path)
    if path.exists():
        raise OutputExistsError(
            f"--out {path.parent}", expected="a folder without a file of this benchmark",
            got=path.name, remedy="Choose another folder",
        )  # fmt: skip


def is_patched(method: str) -> bool:
    """Return True if a method is this library's."""
    return not {"patched", "fused"}.isdisjoint(method.split())
