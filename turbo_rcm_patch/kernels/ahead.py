"""Compile the kernels of a call before it runs, several at a time, and say how far that is.

A first forward starts a dozen kernels that nobody has compiled yet. One after another they take
seconds; most of that is spent outside Python's lock, so threads compile them side by side.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from inspect import signature
from typing import Any

import torch

#: What it says is shown by the command line (`exit_codes.run_command`).
_log = logging.getLogger(__name__)

_MOST_THREADS = 16
_local = threading.local()

#: Seconds of compiling before the first line and between lines; kernels from Triton's cache take
#: less in all.
_SAY_EVERY = 3.0
#: Seconds from which a first launch has compiled its kernel and not loaded it from the cache.
_COMPILES = 0.3


class _Round:
    """Kernels that are compiled one after another or side by side, from the first to the last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.begin(0.0)

    def begin(self, now: float) -> None:
        self.began = self._said = self._until = now
        self.asked = self.done = 0

    def compiled(self, seconds: float) -> None:
        """Another kernel is ready, after so many seconds."""
        now = time.monotonic()
        with self._lock:
            if self.done >= self.asked and now - seconds > self._until + _SAY_EVERY:
                self.begin(now - seconds)
            self.done, self._until = self.done + 1, now
            if now - self._said < _SAY_EVERY:
                return
            self._said = now
            of = f" of {self.asked}" if self.asked > self.done else ""
            text = f"compiled kernel {self.done}{of} ({now - self.began:.0f} s)"
        _log.info(text)

    def end(self) -> None:
        """Nothing is left to compile; say so if there was a line before."""
        with self._lock:
            said, self.asked = self._said > self.began, self.done
        if said:
            _log.info(
                "compiled %d kernels in %.0f s; Triton's cache keeps them for the next start",
                self.done, self._until - self.began,
            )  # fmt: skip


_round = _Round()
#: Compiled kernels that `note_launch` has seen.
_seen: set[int] = set()


def note_launch(compiled: object, seconds: float) -> None:
    """A launch gave this compiled kernel (None in Triton's interpreter) after so many seconds:
    count it if it was compiled for it."""
    if seconds > _COMPILES and compiled is not None and id(compiled) not in _seen:
        _seen.add(id(compiled))
        _round.compiled(seconds)


def compiling() -> bool:
    """Whether this thread only compiles what it launches."""
    return getattr(_local, "active", False)


def compiled_only(kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any]) -> bool:
    """Compile a kernel instead of starting it, where `compile_ahead` asks for that.

    Returns:
        Whether the launch is done with.
    """
    if not compiling():
        return False
    kernel.warmup(grid=grid, **arguments)
    return True


@contextmanager
def running_for_real() -> Iterator[None]:
    """Start kernels inside although `compile_ahead` runs: for what is made once and kept."""
    before, _local.active = compiling(), False
    try:
        yield
    finally:
        _local.active = before


def compile_ahead(call: Callable[[], object], device: torch.device) -> bool:
    """Compile every kernel that a call would start, several at a time.

    The call runs with its launches left out, so its result is garbage and is thrown away. What
    cannot be compiled is left to the real call, which raises the error or takes another kernel.

    Args:
        call: Launches kernels; has no other effect.
        device: Where they will run.

    Returns:
        False where this release of Triton cannot compile in threads, or is at it already, or the
        call failed.
    """
    try:
        from triton.runtime._async_compile import AsyncCompileMode, active_mode
    except ImportError:
        return False
    if active_mode.get() is not None:  # somebody else's, which does as well
        return False
    if "ignore_errors" not in signature(AsyncCompileMode).parameters:
        return False  # In 3.5 a kernel that does not compile would end the whole call.

    class Compiler(AsyncCompileMode):
        # `then` differs between releases: what to do with a kernel, and since 3.9 after a failure.
        def submit(self, key: Any, compile_fn: Callable[[], Any], *then: Any) -> Any:
            def compile_one() -> Any:
                try:
                    return _loaded(compile_fn(), device)
                finally:
                    _round.compiled(0.0)

            if key not in self.future_kernels:
                _round.asked += 1
            return super().submit(key, compile_one, *then)

    count = min(_MOST_THREADS, os.cpu_count() or 1)
    # Triton compiles for the current device.
    here = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    try:
        with here, ThreadPoolExecutor(count) as threads, Compiler(threads, ignore_errors=True):
            _round.begin(time.monotonic())
            _local.active = True
            try:
                call()
            finally:
                _local.active = False
    except Exception as error:
        # The real call raises it again, unless it comes from Triton's mode, which is experimental.
        _log.info("kernels were not compiled side by side: %s: %s", type(error).__name__, error)
        return False
    finally:
        active_mode.set(None)  # It stays set where its end is interrupted.
        _round.end()
    return True


def _loaded(kernel: Any, device: torch.device) -> Any:
    """A compiled kernel on its device, with its launcher built."""
    if hasattr(kernel, "_init_handles"):
        with torch.cuda.device(device):
            kernel._init_handles()
    return kernel
