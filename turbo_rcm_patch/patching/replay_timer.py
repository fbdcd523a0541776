"""A time limit for the exchanges inside CUDA graphs.

torch's NCCL watchdog times every exchange that it starts, and none that a graph replays: where a
rank died, the others would wait for its messages for ever. So an event is recorded behind every
replay, and one thread looks whether the oldest that is outstanding was reached in time.

An exchange that is late is ended as torch's watchdog ends one by default: the process ends, with
its reason in the log. To abort the communicators is no remedy: their kernels would end, and the
host would go on, with garbage for a result and no error, because nobody waits for the work of a
graph; and NCCL gives no communicator back while a graph still holds it.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from time import monotonic
from typing import Final, Protocol

#: torch's own switch for what its watchdog does, and the older name of it; "0" is nothing.
_HANDLING: Final = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING")

_log = logging.getLogger(__name__)


class Reached(Protocol):
    """An event of a device."""

    def query(self) -> bool:
        """Whether the device reached it."""


def end_process(why: str) -> None:
    """Say why, and end the process as torch's watchdog does, unless that was switched off."""
    _log.error("%s", why)
    if "0" not in [os.environ[name] for name in _HANDLING if name in os.environ][:1]:
        os.abort()


class ReplayTimer:
    """Ends the process when a replay is not done in time.

    Its thread starts with the first replay, sleeps while none is outstanding, wakes at most once
    in the time limit, and ends with the timer. It keeps neither the interpreter nor a model alive.

    Args:
        timeout: From the launch of a replay.
        who: Whose replays they are, for the log.
        end: Called with the reason when one is late.
    """

    __slots__ = ("__weakref__", "_thread", "_watch")

    def __init__(
        self, timeout: timedelta, who: str, end: Callable[[str], None] = end_process
    ) -> None:
        self._watch = _Watch(timeout.total_seconds(), who, end)
        self._thread: threading.Thread | None = None
        # At the interpreter's exit the thread is to go on as long as it can.
        weakref.finalize(self, self._watch.close).atexit = False

    def add(self, event: Reached) -> None:
        """A replay was launched, and this event recorded behind it."""
        self._watch.add(event)
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._watch.run, name="turbo_rcm_patch replay timer", daemon=True
            )
            self._thread.start()

    def close(self) -> None:
        """End the thread: nothing is outstanding any more."""
        self._watch.close()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join()


class _Watch:
    """What the thread knows."""

    def __init__(self, seconds: float, who: str, end: Callable[[str], None]) -> None:
        self._seconds, self._who, self._end = seconds, who, end
        # Its lock is reentrant: the collector may close this in the middle of anything below.
        self._changed = threading.Condition()
        #: With the time of the launch, the oldest first.
        self._outstanding: deque[tuple[Reached, float]] = deque()
        self._asleep = False
        self._closed = False

    def add(self, event: Reached) -> None:
        with self._changed:
            self._forget_done()
            self._outstanding.append((event, monotonic()))
            if self._asleep:  # Else it looks again in time.
                self._asleep = False
                self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._outstanding.clear()
            self._changed.notify()

    def run(self) -> None:
        while self._in_time():
            pass

    def _in_time(self) -> bool:
        """Wait for the next look; False when the thread is to end."""
        with self._changed:
            self._forget_done()
            if self._closed:
                return False
            if not self._outstanding:
                self._asleep = True
                self._changed.wait(self._seconds)
                return True
            left = self._outstanding[0][1] + self._seconds - monotonic()
            if left > 0:
                self._changed.wait(left)
                return True
            self._outstanding.clear()
        self._end(
            f"a CUDA graph of {self._who} was launched {self._seconds:g} s ago and is not done: "
            "another rank of its sequence has probably died or raised, and this one waits for its "
            "messages. This process ends. Look for the first error of the other ranks and start "
            "all of them again. If a forward may take longer, give init_process_group a larger "
            "timeout; with cuda_graphs=False torch times every exchange itself"
        )
        return True

    def _forget_done(self) -> None:
        while self._outstanding and _reached(self._outstanding[0][0]):
            if self._outstanding:
                self._outstanding.popleft()


def _reached(event: Reached) -> bool:
    try:
        return event.query()
    except RuntimeError:  # The device failed; whoever waits for it is told.
        return True
