"""Cases in several processes. One that dies, hangs or loses its GPU is replaced, and goes on with
the next case."""

from __future__ import annotations

import multiprocessing
import time
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from tests.fuzz.run import (
    Plan,
    Result,
    cases_of,
    failed,
    outcome,
    quietly,
    watch_compiling,
)
from tests.processes import server

__all__ = ["run_in_processes"]

#: Seconds after which a case counts as hung; compiling a kernel may take most of it.
HUNG = 180.0
#: Seconds after the end for cases that began before it.
GRACE = 15.0
#: Processes in the place of one; a machine where more die is at fault itself.
MOST = 40


def work(
    plan: Plan, mine: tuple[int, int], cases: tuple[int, int | None], until: float, to: Connection
) -> None:
    """Run this process's cases, and say of each that it begins and what it was. `until` is a time
    of `time.time`, which processes share."""
    torch.set_num_threads(1)
    counts = Result()
    watch_compiling(counts)
    with quietly():
        for case in cases_of(plan, *mine, *cases):
            if time.time() > until:
                break
            to.send(("begins", case))
            name, failure = outcome(plan, case)
            lost = bool(failure) and plan.is_lost()
            to.send(("ran", name, failure, counts.compiled, counts.compiling))
            if lost:
                return
    to.send(("done",))


@dataclass
class Process:
    """One of the processes, and what it runs.

    Attributes:
        index: Its number; that which replaces it has the same.
        start: First case to run.
        case: What it runs now, and since when.
        kernels: What it compiled so far.
    """

    index: int
    start: int
    handle: Any = None
    pipe: Any = None
    case: int | None = None
    since: float = field(default_factory=time.time)
    times: int = 0
    done: bool = False
    kernels: tuple[Counter[str], float] = (Counter(), 0.0)


def run_in_processes(
    plan: Plan, workers: int, start: int, cases: int | None, seconds: float
) -> Result:
    """Run cases from `start` on, so many or for a time, and print the failures."""
    # On a CPU they are forked from one that has imported much, which CUDA does not survive.
    gpu = plan.device == "cuda"
    context: Any = multiprocessing.get_context("spawn") if gpu else server()
    result, began = Result(), time.time()
    until, end = began + seconds, None if cases is None else start + cases

    def begin(one: Process) -> None:
        one.pipe, to = context.Pipe(duplex=False)
        given = (plan, (one.index, workers), (one.start, end), until, to)
        one.handle = context.Process(target=work, args=given, daemon=True)
        one.handle.start()
        to.close()
        one.case, one.since, one.times = None, time.time(), one.times + 1

    def note(one: Process, name: str, failure: str) -> None:
        assert one.case is not None
        result.note(one.case, name, failure)
        if failure:
            print(failure, flush=True)
        one.start, one.case = one.case + 1, None

    def stopped(one: Process, why: str) -> None:
        """Replace it."""
        one.handle.kill()
        one.handle.join()
        result.compiled += one.kernels[0]
        result.compiling += one.kernels[1]
        one.kernels = (Counter(), 0.0)
        late = time.time() > until
        if one.case is not None and not late:
            note(one, "", failed(plan, one.case, why))
        if one.done or late or one.times >= MOST:
            one.done = True
        else:
            begin(one)

    def heard(one: Process, said: tuple[Any, ...]) -> None:
        if said[0] == "begins":
            one.case, one.since = said[1], time.time()
        elif said[0] == "ran":
            one.kernels = (said[3], said[4])
            note(one, said[1], said[2])
        else:
            one.done = True

    processes = [Process(index, start) for index in range(workers)]
    for one in processes:
        begin(one)
    while running := [one for one in processes if not one.done]:
        ready = wait([one.pipe for one in running], timeout=1.0)
        for one in running:
            if one.pipe in ready:
                try:
                    heard(one, one.pipe.recv())
                except EOFError:
                    one.handle.join()
                    stopped(one, f"the process died (exit code {one.handle.exitcode})")
                if one.done and one.handle.is_alive():
                    stopped(one, "")
            elif one.case is not None and time.time() - one.since > HUNG:
                stopped(one, f"took more than {HUNG:.0f} s")
            elif time.time() > until + GRACE:
                stopped(one, "")
    result.seconds = time.time() - began
    return result
