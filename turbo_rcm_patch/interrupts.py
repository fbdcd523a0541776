"""Ctrl-C and SIGTERM: held back while a child starts, and never taken for another error."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

#: 128 plus the number of SIGTERM, as a shell reports it.
TERMINATED: Final = 143
_SIGNALS: Final[tuple[int, ...]] = (signal.SIGINT, signal.SIGTERM)
_Handler = Callable[[int, FrameType | None], object]


@contextmanager
def held_back() -> Iterator[None]:
    """Deliver signals that arrive inside the block when it ends.

    A child that is being started has no handle yet: an exception there would leave a process
    without an owner.
    """
    arrived: list[int] = []
    try:
        with _handled(lambda _: lambda number, frame: arrived.append(number)):
            yield
    finally:
        for number in arrived:
            signal.raise_signal(number)


@contextmanager
def reraise_interrupts() -> Iterator[None]:
    """Raise the interruption in place of an error that a library made of it.

    torch and safetensors call Python from native code. A KeyboardInterrupt that is raised in there
    comes out as an error of theirs without a trace of its cause, for instance "could not determine
    the shape of object type 'torch.storage.UntypedStorage'".

    Raises:
        KeyboardInterrupt: On Ctrl-C.
        SystemExit: On SIGTERM, unless the caller handles it: files and children are cleaned up.
    """
    raised: list[BaseException] = []

    def instead(handler: _Handler) -> _Handler:
        def note(number: int, frame: FrameType | None) -> None:
            try:
                handler(number, frame)
            except BaseException as stop:
                raised.append(stop)
                raise

        return note

    with _handled(instead):
        try:
            yield
        except Exception as error:
            if raised:
                raise raised[-1] from error
            raise


@contextmanager
def _handled(instead: Callable[[_Handler], _Handler]) -> Iterator[None]:
    """Replace the handlers of both signals inside the block. Only the main thread has any."""
    before: dict[int, Any] = {}
    try:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                previous = handler = signal.getsignal(number)
                if number == signal.SIGTERM and previous is signal.SIG_DFL:
                    handler = _end
                if callable(handler):  # The handlers of native libraries are not.
                    before[number] = previous
                    signal.signal(number, instead(handler))
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def _end(_: int, __: FrameType | None) -> None:
    sys.exit(TERMINATED)
