"""Kernels that are compiled before a call runs: what is launched, what is not."""

from __future__ import annotations

import logging
import sys
from inspect import signature
from typing import Any

import pytest
import torch

from turbo_rcm_patch.exit_codes import run_command
from turbo_rcm_patch.kernels import ahead, replay
from turbo_rcm_patch.kernels.launch import launch
from turbo_rcm_patch.ops.operation import Step

_async_compile: Any = pytest.importorskip(
    "triton.runtime._async_compile", reason="Triton 3.4 cannot compile in threads"
)

CPU = torch.device("cpu")

#: Triton 3.9 takes a function more.
AFTER_A_FAILURE = (
    [lambda future: None]
    if "cleanup_fn" in signature(_async_compile.AsyncCompileMode.submit).parameters
    else []
)


class Kernel:
    """Stands for a jit function: it notes what it is asked to compile and to start."""

    def __init__(self) -> None:
        self.compiled: list[dict[str, Any]] = []
        self.started: list[dict[str, Any]] = []

    def warmup(self, *, grid: tuple[int, ...], enable_fp_fusion: bool, **arguments: Any) -> None:
        self.compiled.append(arguments)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda enable_fp_fusion, **arguments: self.started.append(arguments)


def test_a_call_that_is_compiled_ahead_starts_nothing() -> None:
    kernel = Kernel()
    assert ahead.compile_ahead(lambda: launch(kernel, (1,), CPU, n=3), CPU)
    assert kernel.compiled == [{"n": 3}] and not kernel.started
    launch(kernel, (1,), CPU, n=3)
    assert kernel.started == [{"n": 3}] and len(kernel.compiled) == 1


def test_what_is_made_once_and_kept_runs_for_real() -> None:
    kernel = Kernel()

    def call() -> None:
        launch(kernel, (1,), CPU, n=1)
        with ahead.running_for_real():
            launch(kernel, (1,), CPU, n=2)
        launch(kernel, (1,), CPU, n=3)

    ahead.compile_ahead(call, CPU)
    assert kernel.compiled == [{"n": 1}, {"n": 3}] and kernel.started == [{"n": 2}]


def test_nothing_is_recorded_or_replayed_meanwhile() -> None:
    tokens: list[int | None] = []
    ahead.compile_ahead(lambda: tokens.append(replay.replay_generation()), CPU)
    assert tokens == [None]
    assert replay.replay_generation() is not None


def test_a_step_with_a_token_is_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_on_gpu", lambda tensor: True)
    kernel, x = Kernel(), torch.zeros(2)
    step = Step(lambda x: launch(kernel, (1,), CPU, x=x))
    for _ in range(3):  # It would be taken to be unrecordable.
        ahead.compile_ahead(lambda: step(7, x), CPU)
    assert len(kernel.compiled) == 3 and not kernel.started and not step._found


def test_an_error_of_the_call_is_left_to_the_real_one() -> None:
    def fails() -> None:
        raise ZeroDivisionError

    assert not ahead.compile_ahead(fails, CPU)
    assert not ahead.compiling() and _async_compile.active_mode.get() is None
    kernel = Kernel()
    launch(kernel, (1,), CPU, n=1)
    assert kernel.started


def test_kernels_are_compiled_side_by_side_and_a_failure_is_left_to_the_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The real mode of Triton, with a compiler of ours."""
    from threading import Barrier

    meet = Barrier(2, timeout=120)  # two compilations have to be under way at once
    finalised: list[str] = []

    class Compiled:
        def warmup(self, *, name: str, **options: Any) -> None:
            mode = _async_compile.active_mode.get()
            assert mode is not None

            def compile_fn() -> str:
                meet.wait()
                if name == "bad":
                    raise RuntimeError("it does not compile")
                return name

            mode.submit(name, compile_fn, finalised.append, *AFTER_A_FAILURE)

    monkeypatch.setattr(ahead.os, "cpu_count", lambda: 2)
    kernel = Compiled()

    def call() -> None:
        for name in ("good", "bad"):
            launch(kernel, (1,), CPU, name=name)

    ahead.compile_ahead(call, CPU)
    assert finalised == ["good"]


def test_an_interrupt_while_compiling_leaves_triton_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(self: object, *error: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(_async_compile.AsyncCompileMode, "__exit__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ahead.compile_ahead(lambda: None, CPU)
    assert _async_compile.active_mode.get() is None and not ahead.compiling()


def test_somebody_elses_parallel_compilation_is_left_alone() -> None:
    from concurrent.futures import ThreadPoolExecutor

    calls: list[int] = []
    with ThreadPoolExecutor(1) as threads, _async_compile.AsyncCompileMode(threads):
        assert not ahead.compile_ahead(lambda: calls.append(1), CPU)
        assert _async_compile.active_mode.get() is not None
    assert not calls


# --- how far it is -------------------------------------------------------------------------------


class Clock:
    """Stands for `time` in `ahead`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(ahead, "time", clock)
    monkeypatch.setattr(ahead, "_round", ahead._Round())
    monkeypatch.setattr(ahead, "_seen", set())
    return clock


class Slow:
    """A kernel whose compilation takes its time, in Triton's real mode with one thread."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self.clock, self.seconds = clock, seconds

    def warmup(self, *, n: int, **options: Any) -> None:
        mode = _async_compile.active_mode.get()
        assert mode is not None

        def compile_fn() -> None:
            self.clock.now += self.seconds

        mode.submit(n, compile_fn, lambda kernel: None, *AFTER_A_FAILURE)


def compiled_ahead(clock: Clock, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead.os, "cpu_count", lambda: 1)
    kernel = Slow(clock, seconds)

    def call() -> None:
        for n in (1, 2, 2, 3, 4, 5, 6):
            launch(kernel, (1,), CPU, n=n)

    assert ahead.compile_ahead(call, CPU)


def test_slow_compilations_are_counted(
    clock: Clock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.INFO):
        compiled_ahead(clock, 2.0, monkeypatch)
    *lines, last = caplog.messages
    # How many are asked for by then depends on the threads.
    assert [line.split(" of ")[0].split(" (")[0] for line in lines] == [
        f"compiled kernel {n}" for n in (2, 4, 6)
    ]
    assert [line[line.index("(") :] for line in lines] == ["(4 s)", "(8 s)", "(12 s)"]
    assert last == "compiled 6 kernels in 12 s; Triton's cache keeps them for the next start"


def test_nothing_is_said_where_kernels_come_from_the_cache(
    clock: Clock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            compiled_ahead(clock, 0.1, monkeypatch)
            clock.now += 60
    assert not caplog.messages


def test_kernels_that_are_compiled_at_their_launch_are_counted(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """Once each: a launch also takes long where many wait in front of it."""
    kernels = [object() for _ in range(4)]
    with caplog.at_level(logging.INFO):
        for kernel in kernels:
            for _ in range(2):
                clock.now += 2.0
                ahead.note_launch(kernel, 2.0)
        for _ in range(9):
            clock.now += 2.0
            ahead.note_launch(None, 2.0)  # the interpreter
            ahead.note_launch(object(), 0.1)
    assert caplog.messages == [f"compiled kernel {n} ({4 * n - 2} s)" for n in (2, 3, 4)]


def test_a_later_round_begins_anew(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        ahead.note_launch("one", 2.0)
        clock.now += 600
        ahead.note_launch("two", 5.0)
    assert caplog.messages == ["compiled kernel 1 (5 s)"]


def test_a_command_shows_it_on_stderr(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    log = logging.getLogger("turbo_rcm_patch.kernels.ahead")
    before = log.level, list(log.handlers)

    def run() -> int:
        ahead.note_launch("one", 5.0)
        sys.stderr.write("between\n")
        return 0

    assert run_command(run, interrupted="") == 0
    assert capsys.readouterr().err == "compiled kernel 1 (5 s)\nbetween\n"
    assert (log.level, list(log.handlers)) == before
