"""Kernels that are compiled before a call runs: what is launched, what is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from triton.runtime import _async_compile

from turbo_rcm_patch.kernels import ahead, replay
from turbo_rcm_patch.kernels.launch import launch
from turbo_rcm_patch.ops.operation import Step

CPU = torch.device("cpu")


class Kernel:
    """Stands for a jit function: it notes what it is asked to compile and to start."""

    def __init__(self) -> None:
        self.compiled: list[dict[str, Any]] = []
        self.started: list[dict[str, Any]] = []

    def warmup(self, *, grid: tuple[int, ...], **arguments: Any) -> None:
        self.compiled.append(arguments)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda **arguments: self.started.append(arguments)


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


def test_an_error_of_the_call_leaves_launches_as_they_were() -> None:
    def fails() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        ahead.compile_ahead(fails, CPU)
    assert not ahead.compiling() and _async_compile.active_mode.get() is None
    kernel = Kernel()
    launch(kernel, (1,), CPU, n=1)
    assert kernel.started


def test_kernels_are_compiled_side_by_side_and_a_failure_is_left_to_the_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The real mode of Triton, with a compiler of ours."""
    from threading import Barrier

    meet = Barrier(2, timeout=30)  # two compilations have to be under way at once
    finalised: list[str] = []

    class Compiled:
        def warmup(self, *, grid: tuple[int, ...], name: str) -> None:
            mode = _async_compile.active_mode.get()
            assert mode is not None

            def compile_fn() -> str:
                meet.wait()
                if name == "bad":
                    raise RuntimeError("it does not compile")
                return name

            mode.submit(name, compile_fn, finalised.append)

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
