"""The time limit for the exchanges inside CUDA graphs."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest

from turbo_rcm_patch.patching import replay_timer
from turbo_rcm_patch.patching.replay_timer import ReplayTimer, end_process

#: A machine with other work may stand still for half of it.
SHORT = timedelta(seconds=1)


class Event:
    def __init__(self, reached: bool = False) -> None:
        self.reached = reached
        self.looks = 0

    def query(self) -> bool:
        self.looks += 1
        return self.reached


class Failed(Event):
    def query(self) -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if "replay timer" in thread.name]


def test_a_replay_that_is_late_ends_once_and_names_the_remedy() -> None:
    said: list[str] = []
    ended = threading.Event()

    def end(why: str) -> None:
        said.append(why)
        ended.set()

    timer = ReplayTimer(SHORT, "a Model on rank 0 of 2", end)
    begin = time.monotonic()
    for _ in range(3):  # a loop goes on launching
        timer.add(Event())
    assert ended.wait(30)
    assert 0.9 < time.monotonic() - begin < 30
    time.sleep(0.5)
    timer.close()
    (why,) = said
    for part in ("a Model on rank 0 of 2", " 1 s", "timeout", "start all of them", "cuda_graphs"):
        assert part in why


def test_replays_in_time_are_left_alone() -> None:
    said: list[str] = []
    timer = ReplayTimer(SHORT, "a Model", said.append)
    events = [Event() for _ in range(5)]
    for event in events:
        timer.add(event)
        time.sleep(0.1)
        event.reached = True
    time.sleep(1.2)
    assert not said
    timer.add(Event())  # the thread slept, as nothing was outstanding
    time.sleep(1.7)
    timer.close()
    assert len(said) == 1


def test_the_limit_is_that_of_the_oldest() -> None:
    said: list[float] = []
    timer = ReplayTimer(SHORT, "a Model", lambda why: said.append(time.monotonic()))
    begin = time.monotonic()
    timer.add(Event())
    for _ in range(3):
        time.sleep(0.3)
        timer.add(Event())
    time.sleep(0.8)  # The newest has until 1.9.
    timer.close()
    assert said and said[0] - begin < 1.8


def test_a_device_that_failed_is_not_late() -> None:
    said: list[str] = []
    timer = ReplayTimer(SHORT, "a Model", said.append)
    timer.add(Failed())
    time.sleep(1.5)
    timer.close()
    assert not said


def test_the_thread_sleeps_and_ends() -> None:
    timer = ReplayTimer(SHORT, "a Model")
    assert not threads(), "nothing was launched"
    event = Event(reached=True)
    timer.add(event)
    (thread,) = threads()
    assert thread.daemon
    time.sleep(0.5)
    looks = event.looks
    time.sleep(1.2)
    assert event.looks == looks <= 2, "it looks while nothing is outstanding"
    timer.close()
    assert not threads()
    timer.close()


def test_a_timer_that_is_forgotten_ends_its_thread() -> None:
    timer = ReplayTimer(SHORT, "a Model")
    timer.add(Event(reached=True))
    (thread,) = threads()
    del timer
    gc.collect()
    thread.join(30)
    assert not thread.is_alive()


@pytest.mark.parametrize("handling", [None, "0", "3"])
def test_how_a_process_ends(
    handling: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    aborted: list[int] = []
    monkeypatch.setattr(replay_timer.os, "abort", lambda: aborted.append(1))
    for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"):
        monkeypatch.delenv(name, raising=False)
    if handling is not None:
        monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", handling)
    with caplog.at_level(logging.ERROR):
        end_process("because")
    assert caplog.messages == ["because"]
    assert aborted == ([] if handling == "0" else [1])


def test_an_outstanding_replay_does_not_keep_the_interpreter_alive() -> None:
    code = (
        "from datetime import timedelta\n"
        "from turbo_rcm_patch.patching.replay_timer import ReplayTimer\n"
        "class Never:\n"
        "    def query(self): return False\n"
        "timer = ReplayTimer(timedelta(minutes=10), 'a Model')\n"
        "timer.add(Never())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=100, env=dict(os.environ))
    assert done.returncode == 0


class Box:
    """Holds itself and a timer, as a patched model does."""

    timer: ReplayTimer
    me: Box


class Collecting(Event):
    """The collector runs while the timer's thread looks at this event, once it may."""

    may = False

    def query(self) -> bool:
        if self.may:
            gc.collect()
        return super().query()


def test_a_timer_may_be_collected_in_its_own_thread() -> None:
    gc.collect()
    gc.disable()
    try:
        box = Box()
        box.me, box.timer = box, ReplayTimer(SHORT, "a Model", end=lambda why: None)
        event = Collecting()
        box.timer.add(event)
        (thread,) = threads()
        del box
        event.may = True
        thread.join(10)
        assert not thread.is_alive()
    finally:
        gc.enable()
