"""Shared test set-up: which tests run where, seeds, and poisoned memory.

GPU tests carry the marker `gpu`. They are left out unless `-m` names it; when it does and there is
no GPU they fail, because a suite that was asked for and silently skipped proves nothing. Tests
with the marker `interpreter` run in a process with Triton's interpreter on.
"""

from __future__ import annotations

import gc
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings

from tests import interpreter
from tests.poison import poisoned_memory

_INTERPRETER = interpreter.Interpreter()

# Examples are drawn from a fixed seed, and no deadline: the first call of an operator is slow on a
# busy machine.
settings.register_profile("reproducible", derandomize=True, deadline=None, max_examples=50)
settings.load_profile("reproducible")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--durations-to",
        type=Path,
        metavar="FILE",
        help="write the seconds of the slowest hundred tests and fixtures to this file",
    )


def pytest_configure(config: pytest.Config) -> None:
    # Background jobs of a shell ignore SIGINT, which some tests send.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Two workers on two cores: one thread each, or they fight.
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Whoever gets the first of them starts the interpreter, and others need not.
    items.sort(key=lambda item: item.get_closest_marker("interpreter") is None)
    if "gpu" in (config.option.markexpr or ""):
        return
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu:
        config.hook.pytest_deselected(items=on_gpu)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


def pytest_collection_finish() -> None:
    # What was imported and collected stays: a collection of garbage, which takes up to a second
    # over millions of objects, leaves it out from here on. Modules and hooks are cycles of some
    # hundred objects each, so that Python would collect in every test.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    path = config.getoption("--durations-to")
    if path is None:
        return
    every = [one for found in terminalreporter.stats.values() for one in found]
    reports = [one for one in every if isinstance(one, pytest.TestReport)]
    slowest = sorted(reports, key=lambda report: -report.duration)[:100]
    lines = [f"{one.duration:7.1f} s  {one.when:8}  {one.nodeid}\n" for one in slowest]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.fail("the GPU suite was asked for, but torch sees no GPU", pytrace=False)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if interpreter.HERE or not pyfuncitem.get_closest_marker("interpreter"):
        return None
    _INTERPRETER.run(pyfuncitem)
    return True


def pytest_unconfigure() -> None:
    _INTERPRETER.stop(kill=True)  # xdist sends a worker SIGINT that takes 5 s to end


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test starts from the same random state, whichever worker runs it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Uninitialised memory is NaN (int8: -128), so that reading it cannot go unnoticed."""
    with poisoned_memory():
        yield
