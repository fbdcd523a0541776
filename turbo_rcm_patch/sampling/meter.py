"""Measure time and peak memory of a piece of work."""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType

import torch

__all__ = ["Meter"]


class Meter:
    """Context manager that measures the code inside. It waits for the device only at its beginning
    and its end.

    Attributes:
        seconds: Wall-clock time.
        peak_bytes: Most memory held at once: the allocator's on a GPU, resident memory of the
            process on a Linux CPU, None where neither can be read.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds = 0.0
        self.peak_bytes: int | None = None

    def __enter__(self) -> Meter:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            self._resettable = _reset_resident_peak()
        self._start = time.perf_counter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.device.type == "cuda":
            if error is None:  # after a fault on the device, waiting would hide the first error
                torch.cuda.synchronize(self.device)
                self.peak_bytes = torch.cuda.max_memory_allocated(self.device)
        elif self._resettable:
            self.peak_bytes = _resident_peak()
        self.seconds = time.perf_counter() - self._start


def _reset_resident_peak() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")  # 5: reset the peak of resident memory
    except OSError:
        return False
    return True


def _resident_peak() -> int | None:
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None
