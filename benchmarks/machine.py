"""What a measurement ran on: card, driver, and the clock that was observed while it ran."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable
from typing import Final

import torch

from benchmarks.measure import time_call
from turbo_rcm_patch.video.environment import device_name

#: Dense peaks from the vendor's data sheets, by a part of the device name: 1e12 operations a
#: second of 8-bit and 16-bit matrix products, and 1e12 bytes a second of memory.
SPEC_SHEETS: Final = {
    "H200": {"int8 and fp8": 1979.0, "bf16": 989.5, "memory": 4.8},
    "H100": {"int8 and fp8": 1979.0, "bf16": 989.5, "memory": 3.35},
}
#: exp2 units: operations a clock and multiprocessor on sm_80 to sm_90 (CUDA's table of arithmetic
#: throughput).
_EXPONENTIALS_A_CLOCK: Final = 16


def machine(device: torch.device) -> dict[str, object]:
    """Name, and on a GPU capability, size and driver."""
    found: dict[str, object] = {"device": device_name(device)}
    if device.type != "cuda":
        return found
    properties = torch.cuda.get_device_properties(device)
    found["capability"] = f"{properties.major}.{properties.minor}"
    found["multiprocessors"] = properties.multi_processor_count
    found["memory_bytes"] = properties.total_memory
    found["driver"] = _ask_nvidia_smi(device, "driver_version")
    found["sm_clock_max_mhz"] = _ask_nvidia_smi(device, "clocks.max.sm")
    return found


def ceilings(device: torch.device) -> dict[str, float]:
    """The data sheet of the card, and nothing for a card that has no entry."""
    if device.type != "cuda":
        return {}
    name = device_name(device)
    return next((dict(sheet) for card, sheet in SPEC_SHEETS.items() if card in name), {})


def exponential_ceiling(device: torch.device, head_dim: int, mhz: float) -> float | None:
    """1e12 operations a second at which an attention that takes every exponential from the
    special-function units keeps them busy; None for cards whose number of units is not known here.

    Args:
        device: Which card.
        head_dim: An exponential comes with 4 * head_dim operations of the two products.
        mhz: SM clock.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    properties = torch.cuda.get_device_properties(device)
    if not (8, 0) <= (properties.major, properties.minor) <= (9, 0):
        return None
    exponentials = _EXPONENTIALS_A_CLOCK * properties.multi_processor_count * mhz * 1e6
    return float(4 * head_dim * exponentials / 1e12)


def _ask_nvidia_smi(device: torch.device, field: str) -> str:
    """One field of `nvidia-smi --query-gpu`, "unknown" where it cannot be asked."""
    try:
        answer = subprocess.run(
            ["nvidia-smi", *_which(device), f"--query-gpu={field}", _FORMAT],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
        return answer.stdout.splitlines()[0].strip()
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown"


_FORMAT: Final = "--format=csv,noheader,nounits"


def _which(device: torch.device) -> list[str]:
    # By UUID: nvidia-smi counts cards that CUDA_VISIBLE_DEVICES hides.
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return [] if uuid is None else ["-i", f"GPU-{uuid}"]


class ClockWatch:
    """Samples the SM clock in the background while measurements run.

    Args:
        device: Whose clock; on a CPU nothing is sampled.
        every: Milliseconds between samples.
    """

    def __init__(self, device: torch.device, every: int = 200) -> None:
        self._samples: list[tuple[float, float, float]] = []
        self._process: subprocess.Popen[str] | None = None
        if device.type != "cuda":
            return
        command = ["nvidia-smi", *_which(device), "--query-gpu=clocks.sm,power.draw", _FORMAT]
        try:
            self._process = subprocess.Popen(
                [*command, f"--loop-ms={every}"],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        except OSError:
            return
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        for line in self._process.stdout:
            try:
                clock, power = (float(part) for part in line.split(","))
            except ValueError:
                continue  # "[N/A]" on cards that do not say
            self._samples.append((time.monotonic(), clock, power))

    def since(self, begin: float) -> dict[str, object]:
        """Median and range in MHz and the median power in watts since `time.monotonic()` was
        `begin`; "unknown" without a sample."""
        seen = [(clock, power) for when, clock, power in list(self._samples) if when >= begin]
        if not seen:
            return {"sm_clock_mhz": "unknown"}
        clocks, powers = (sorted(column) for column in zip(*seen, strict=True))
        middle = len(seen) // 2
        return {
            "sm_clock_mhz": {"median": clocks[middle], "least": clocks[0], "most": clocks[-1]},
            "power_watts": powers[middle],
            "samples": len(seen),
        }

    def stop(self) -> None:
        """End the background process."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(timeout=10)
            self._process = None


def measured_ceilings(device: torch.device) -> dict[str, float]:
    """What plain calls reach on this GPU: 1e12 operations or bytes a second."""

    def rate(work: float, call: Callable[[], torch.Tensor]) -> float:
        return work / time_call(call, device, 10).median / 1e9

    size = 8192
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    eight = (16 * a).clamp(-127, 127).to(torch.int8)
    source = torch.empty(2**30, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    return {
        "bf16 product of cuBLAS": rate(2 * size**3, lambda: a @ a),
        "int8 product of cuBLAS": rate(2 * size**3, lambda: torch._int_mm(eight, eight.t())),
        "copy of memory": rate(2 * 2**30, lambda: target.copy_(source)),
    }
