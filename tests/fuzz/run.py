"""Cases by number: what each is drawn from, and how many of them run where."""

from __future__ import annotations

import logging
import random
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import torch

from tests.fuzz.draw import Draw
from tests.fuzz.models import run_orders
from tests.fuzz.operations import run_operation
from tests.poison import poisoned_memory

__all__ = ["Plan", "Result", "cases_of", "run", "worker"]

#: Share of the cases that are models; one costs as much as thirty operations.
MODELS = 0.2


@dataclass(frozen=True)
class Plan:
    """Which cases there are.

    Attributes:
        seed: Of all of them.
        device: "cpu" or "cuda".
        pool: How many combinations of what kernels are compiled for (dtypes, head sizes, flags,
            layouts, options) the cases share; 0 gives every case its own. Compiling costs
            seconds and a case milliseconds.
        models: Share of the cases that are models.
    """

    seed: int
    device: str = "cpu"
    pool: int = 0
    models: float = MODELS

    def group(self, case: int) -> int:
        """Cases of one group run the same kernels."""
        return case % self.pool if self.pool else case

    def command(self, case: int) -> str:
        """What runs this case alone."""
        more = f" --device {self.device} --pool {self.pool}" if self.device != "cpu" else ""
        more += f" --models {self.models}" if self.models != MODELS else ""
        return f"python -m tests.fuzz --seed {self.seed} --only {case}{more}"

    def run(self, case: int) -> str:
        """Run one case; returns what it was.

        Raises:
            Exception: Whatever is wrong.
        """
        kind = random.Random(f"{self.seed}/kind/{self.group(case)}")
        value = random.Random(f"{self.seed}/value/{case}")
        device = torch.device(self.device)
        torch.manual_seed(case)
        if kind.random() < self.models:
            return run_orders(kind, value, device)
        return run_operation(Draw(kind, value, device))


@dataclass
class Result:
    """What came of some cases.

    Attributes:
        cases: How many ran.
        names: How many of each operation and model.
        failures: A line for each that failed, with the command that runs it again.
        seconds: Time it took.
        compiled: Kernels that were compiled, by name.
        compiling: Seconds of that.
    """

    cases: int = 0
    names: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0
    compiled: Counter[str] = field(default_factory=Counter)
    compiling: float = 0.0

    def add(self, other: Result) -> None:
        self.cases += other.cases
        self.names += other.names
        self.failures += other.failures
        self.seconds = max(self.seconds, other.seconds)
        self.compiled += other.compiled
        self.compiling += other.compiling


def cases_of(plan: Plan, worker: int, workers: int) -> Iterator[int]:
    """Cases of this worker, without end: those of one group go to one worker."""
    case = 0
    while True:
        if plan.group(case) % workers == worker:
            yield case
        case += 1


def run(
    plan: Plan,
    cases: Iterable[int],
    *,
    until: float = float("inf"),
    most: float = float("inf"),
    echo: bool = True,
) -> Result:
    """Run cases until a time of `time.monotonic`, or until so many failed."""
    result, start = Result(), time.monotonic()
    watch_compiling(result)
    logging.disable(logging.WARNING)
    try:
        with poisoned_memory(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for case in cases:
                if time.monotonic() > until or len(result.failures) >= most:
                    break
                result.cases += 1
                try:
                    result.names[plan.run(case).split(":")[0]] += 1
                except Exception as error:
                    said = f"{type(error).__name__}: {error}"
                    line = f"{plan.command(case)}  # {' '.join(said.split())[:700]}"
                    result.failures.append(line)
                    if echo:
                        print(line, flush=True)
    finally:
        logging.disable(logging.NOTSET)
    result.seconds = time.monotonic() - start
    return result


def watch_compiling(result: Result) -> None:
    """Count what Triton compiles."""
    if not torch.cuda.is_available():
        return
    from triton import knobs

    def listener(*, src: Any, metadata: Any, times: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            result.compiled[str(metadata.get("name", "?"))] += 1
            result.compiling += times.total / 1e6

    knobs.compilation.listener = listener


def worker(plan: Plan, index: int, workers: int, cases: int | None, seconds: float) -> Result:
    """The cases of one process; here and not beside the command, whose module a spawned process
    does not load."""
    torch.set_num_threads(1)
    mine = cases_of(plan, index, workers)
    if cases is not None:
        mine = takewhile(lambda case: case < cases, mine)
    return run(plan, mine, until=time.monotonic() + seconds)
