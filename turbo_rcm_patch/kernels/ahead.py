"""Compile the kernels of a call before it runs, several at a time.

A first forward starts a dozen kernels that nobody has compiled yet. One after another they take
seconds; most of that is spent outside Python's lock, so threads compile them side by side.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

__all__ = ["compile_ahead", "compiled_only", "compiling", "running_for_real"]

_MOST_THREADS = 16
_local = threading.local()


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
        False where this release of Triton cannot compile in threads, or is at it already; nothing
        was done then.
    """
    try:
        from triton.runtime._async_compile import AsyncCompileMode, active_mode
    except ImportError:
        return False
    if active_mode.get() is not None:  # somebody else's, which does as well
        return False

    class Compiler(AsyncCompileMode):
        def submit(self, key: Any, compile_fn: Callable[[], Any], finalize_fn: Any) -> Any:
            return super().submit(key, lambda: _loaded(compile_fn(), device), finalize_fn)

    count = min(_MOST_THREADS, os.cpu_count() or 1)
    # Triton compiles for the current device.
    here = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    try:
        with here, ThreadPoolExecutor(count) as threads, Compiler(threads, ignore_errors=True):
            _local.active = True
            try:
                call()
            finally:
                _local.active = False
    finally:
        active_mode.set(None)  # It stays set where its end is interrupted.
    return True


def _loaded(kernel: Any, device: torch.device) -> Any:
    """A compiled kernel on its device, with its launcher built."""
    if hasattr(kernel, "_init_handles"):
        with torch.cuda.device(device):
            kernel._init_handles()
    return kernel
