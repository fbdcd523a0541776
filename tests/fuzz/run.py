"""Cases by number: what each is drawn from, and how many of them run where."""

from __future__ import annotations

import logging
import random
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch

from tests.fuzz.draw import Draw
from tests.fuzz.models import run_orders
from tests.fuzz.operations import run_operation
from tests.poison import poisoned_memory

__all__ = ["Plan", "Result", "cases_of", "failed", "outcome", "quietly", "run"]

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

    def is_lost(self) -> bool:
        """Whether an error has left the GPU useless to this process: no later case can run."""
        if self.device != "cuda":
            return False
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            return True
        return False


@dataclass
class Result:
    """What came of some cases.

    Attributes:
        cases: How many ran.
        end: None of them has this number or a higher one.
        names: How many of each operation and model.
        failures: A line for each that failed, with the command that runs it again.
        seconds: Time it took.
        compiled: Kernels that were compiled, by name.
        compiling: Seconds of that.
    """

    cases: int = 0
    end: int = 0
    names: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0
    compiled: Counter[str] = field(default_factory=Counter)
    compiling: float = 0.0

    def note(self, case: int, name: str, failure: str) -> None:
        """One more case."""
        self.cases += 1
        self.end = max(self.end, case + 1)
        if failure:
            self.failures.append(failure)
        else:
            self.names[name] += 1


def cases_of(
    plan: Plan, worker: int, workers: int, start: int = 0, end: int | None = None
) -> Iterator[int]:
    """Cases of this worker in a range: those of one group go to one worker."""
    for case in count(start) if end is None else range(start, end):
        if plan.group(case) % workers == worker:
            yield case


def run(
    plan: Plan,
    cases: Iterable[int],
    *,
    until: float = float("inf"),
    most: float = float("inf"),
    echo: bool = True,
) -> Result:
    """Run cases until a time of `time.monotonic`, until so many failed, or the GPU is lost."""
    result, start = Result(), time.monotonic()
    watch_compiling(result)
    with quietly():
        for case in cases:
            if time.monotonic() > until or len(result.failures) >= most:
                break
            name, failure = outcome(plan, case)
            result.note(case, name, failure)
            if failure and echo:
                print(failure, flush=True)
            if failure and plan.is_lost():
                break
    result.seconds = time.monotonic() - start
    return result


@contextmanager
def quietly() -> Iterator[None]:
    """Inside, memory is poisoned and nothing warns."""
    logging.disable(logging.WARNING)
    try:
        with poisoned_memory(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def outcome(plan: Plan, case: int) -> tuple[str, str]:
    """Run a case: what it was, and "", or "" and the line of its failure."""
    try:
        return plan.run(case).split(":")[0], ""
    except Exception as error:
        return "", failed(plan, case, f"{type(error).__name__}: {error}")


def failed(plan: Plan, case: int, said: str) -> str:
    """The command that runs a case again, and what came of it."""
    return f"{plan.command(case)}  # {' '.join(said.split())[:700]}"


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
