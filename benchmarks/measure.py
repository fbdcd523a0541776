"""Timed calls and errors, shared by the comparisons."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from turbo_rcm_patch.errors import ConfigError, DeviceError
from turbo_rcm_patch.video.environment import device_name, versions

Call = Callable[[], torch.Tensor]

#: Heads, tokens and channels a head: Wan2.1-1.3B at 480p and shorter, and CogVideoX-5B.
#: Relative L2 to fp64 from which an output is wrong and not inaccurate: int8 with fp8 PV has 0.05.
WRONG: Final = 0.1


def print_line(device: torch.device, found: Sequence[str]) -> None:
    """Print what was found on a device, with its name and the versions, as one line to paste."""
    known = versions()
    about = [f"{one} {known[one]}" for one in ("turbo_rcm_patch", "torch", "triton", "cuda")
             if one in known]  # fmt: skip
    print("\nPaste this line into an issue:")
    print(" | ".join([device_name(device), ", ".join(about), *found]))


def device_of(name: str, *, needs_gpu: bool = False) -> torch.device:
    """A device by its name, made the current one, after checking that it is there.

    Args:
        name: "cuda", "cuda:1" or "cpu".
        needs_gpu: Whether the sizes are too large for a CPU.
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ConfigError("--device", expected='"cuda", "cuda:1" or "cpu"', got=name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise DeviceError(
            "device",
            expected="a CUDA device that torch can see",
            got=name,
            remedy="`turbo-rcm-patch doctor` says why torch sees none. "
            "Use --device cpu --micro to try the command without one",
        )
    if device.type != "cuda" and needs_gpu:
        raise ConfigError(
            "--device",
            expected="a GPU for the real sizes",
            got=name,
            remedy="Add --micro to try the command without one",
        )
    if device.type == "cuda" and device.index is not None:
        count = torch.cuda.device_count()
        if device.index >= count:
            raise DeviceError(
                "--device", expected=f'at most "cuda:{count - 1}": torch sees {count}', got=name
            )
        torch.cuda.set_device(device)  # where streams and graphs are made
    return device


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds of a call: median, 20th and 80th percentile, number of calls."""

    median: float
    p20: float
    p80: float
    calls: int

    @classmethod
    def of(cls, times: Sequence[float]) -> Timing:
        """From the milliseconds of each call, in any order."""
        ordered = sorted(times)
        fifth = len(ordered) // 5
        return cls(statistics.median(ordered), ordered[fifth], ordered[-1 - fifth], len(ordered))


def call_times(
    call: Callable[[], object], device: torch.device, calls: int, warmup: int = 2
) -> list[float]:
    """Milliseconds of each timed call: CUDA events on a GPU, the wall clock on a CPU.

    Args:
        call: What to time; its result is dropped.
        device: Where it runs.
        calls: Timed calls.
        warmup: Calls before the first timed one.
    """
    for _ in range(warmup):
        call()
    if device.type == "cuda":
        make = functools.partial(torch.cuda.Event, enable_timing=True)
        events = [(make(), make()) for _ in range(calls)]
        torch.cuda.synchronize(device)
        for start, end in events:
            start.record()
            call()
            end.record()
        torch.cuda.synchronize(device)
        return [start.elapsed_time(end) for start, end in events]
    times = []
    for _ in range(calls):
        begin = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - begin))
    return times


def time_call(
    call: Callable[[], object], device: torch.device, calls: int, warmup: int = 2
) -> Timing:
    """Time a call; arguments as in `call_times`."""
    return Timing.of(call_times(call, device, calls, warmup))


def calls_within(
    call: Callable[[], object], device: torch.device, budget: float, least: int, most: int
) -> int:
    """How many calls take about `budget` milliseconds, judged by one of them."""
    one = call_times(call, device, 1, warmup=1)[0]
    return max(least, min(most, int(budget / max(one, 1e-3))))


def generator(device: torch.device, seed: int) -> torch.Generator:
    """A seeded generator on the device."""
    return torch.Generator(device=device).manual_seed(seed)


def some_rows(tokens: int, most: int, device: torch.device) -> torch.Tensor:
    """Numbers of at most `most` rows, first and last among them, int64."""
    return torch.linspace(0, tokens - 1, min(most, tokens), device=device).long()


def errors_of(value: torch.Tensor, truth: torch.Tensor) -> dict[str, float]:
    """Cosine, relative L2, relative L1 and RMSE against the truth, computed in fp64.

    Args:
        value: Any shape and float dtype.
        truth: The same shape.
    """
    x, y = value.double().flatten(), truth.double().flatten()
    difference = x - y
    return {
        "cosine": float(x @ y / (x.norm() * y.norm())),
        "relative_l2": float(difference.norm() / y.norm()),
        "relative_l1": float(difference.abs().sum() / y.abs().sum()),
        "rmse": float(difference.square().mean().sqrt()),
    }


def attention_fp64(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int) -> torch.Tensor:
    """softmax(q k^T / sqrt(D)) v in fp64, a head at a time, written for measurements alone.

    Args:
        q: [B, Nq, H*D], any float dtype.
        k: [B, Nk, H*D].
        v: [B, Nk, H*D].
        heads: H.

    Returns:
        [B, Nq, H*D], fp64.
    """
    out = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    dim = q.shape[-1] // heads
    for head in range(heads):
        part = slice(head * dim, (head + 1) * dim)
        logits = q[..., part].double() @ k[..., part].double().transpose(-1, -2) * dim**-0.5
        out[..., part] = logits.softmax(-1) @ v[..., part].double()
    return out


def reason_of(error: BaseException) -> str:
    """An error in one line."""
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else "no message"
    return f"{type(error).__name__}: {text[:300]}"
