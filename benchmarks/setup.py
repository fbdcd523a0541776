"""What every measurement shares: sizes, options, the deadline, the clock and the result."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from turbo_rcm_patch.errors import ConfigError, DeviceError

__all__ = [
    "MICRO",
    "Deadline",
    "Options",
    "Result",
    "Shape",
    "Sizes",
    "Timing",
    "call_times",
    "errors_of",
    "generator",
    "time_call",
]


@dataclass(frozen=True, slots=True)
class Shape:
    """An attention: q [batch, q_tokens, heads * head_dim], k and v [batch, kv_tokens, ...]."""

    batch: int
    q_tokens: int
    kv_tokens: int
    heads: int
    head_dim: int

    @property
    def channels(self) -> int:
        """heads * head_dim."""
        return self.heads * self.head_dim

    def __str__(self) -> str:
        tokens = f"N{self.q_tokens}"
        if self.kv_tokens != self.q_tokens:
            tokens += f"x{self.kv_tokens}"
        return f"B{self.batch} H{self.heads} {tokens} D{self.head_dim}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How large everything is. The defaults are the real sizes; `MICRO` is for trying the command.

    Attributes:
        accuracy: Attentions of the accuracy table.
        one_launch: Attentions of the repeated one-launch form.
        fusion: Attentions of the fusion numbers.
        network: Arguments of WanTransformer3DModel; the defaults are Wan2.1-T2V-1.3B's.
        latents: [B, C, F, H, W] of the timed forward: 480p, 81 frames are 32,760 tokens.
        truth_latents: [B, C, F, H, W] of the network number, whose truth is computed in fp32.
        text_tokens: Length of the encoded prompt.
    """

    accuracy: tuple[Shape, ...] = (
        Shape(1, 4096, 4096, 12, 64),
        Shape(1, 4096, 4096, 12, 128),
        Shape(1, 4001, 4001, 12, 128),
    )
    one_launch: tuple[Shape, ...] = (
        Shape(1, 1280, 1280, 4, 64),
        Shape(2, 777, 512, 12, 128),
    )
    fusion: tuple[Shape, ...] = (
        Shape(2, 1280, 1280, 4, 64),
        Shape(1, 2049, 2049, 12, 128),
        Shape(2, 1000, 77, 12, 128),
    )
    network: dict[str, object] = field(
        default_factory=lambda: {
            "patch_size": (1, 2, 2),
            "num_attention_heads": 12,
            "attention_head_dim": 128,
            "in_channels": 16,
            "out_channels": 16,
            "text_dim": 4096,
            "freq_dim": 256,
            "ffn_dim": 8960,
            "num_layers": 30,
            "cross_attn_norm": True,
            "qk_norm": "rms_norm_across_heads",
        }
    )
    latents: tuple[int, ...] = (1, 16, 21, 60, 104)
    truth_latents: tuple[int, ...] = (1, 16, 21, 30, 52)
    text_tokens: int = 512


MICRO: Final = Sizes(
    accuracy=(Shape(1, 96, 96, 2, 64),),
    one_launch=(Shape(1, 70, 70, 2, 64),),
    fusion=(Shape(1, 70, 33, 2, 64),),
    network={
        "num_attention_heads": 2,
        "attention_head_dim": 64,
        "text_dim": 32,
        "freq_dim": 32,
        "ffn_dim": 128,
        "num_layers": 2,
    },
    latents=(1, 16, 3, 8, 8),
    truth_latents=(1, 16, 2, 8, 8),
    text_tokens=9,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to measure.

    Attributes:
        sizes: How large.
        device: Where.
        seed: Of weights and inputs.
        repeats: Runs of the one-launch form, over all its shapes together.
        forwards: Timed forwards of the network.
        times: Timesteps of the network number.
        seeds: Noise seeds of the network number.
        full_size_inputs: Inputs of the network number at the size of the timed forward.
        limit: Seconds after which a part stops and says what it left out.
    """

    sizes: Sizes = field(default_factory=Sizes)
    device: str = "cuda"
    seed: int = 0
    repeats: int = 100_000
    forwards: int = 7
    times: int = 3
    seeds: int = 4
    full_size_inputs: int = 1
    limit: float = 240.0

    def __post_init__(self) -> None:
        for name, least in (
            ("repeats", 1),
            ("forwards", 1),
            ("times", 1),
            ("seeds", 1),
            ("full_size_inputs", 0),
        ):
            value = getattr(self, name)
            if value < least:
                raise ConfigError(name, expected=f"{least} or more", got=str(value))
        if self.times > 3:
            raise ConfigError("times", expected="1 to 3", got=str(self.times))

    def torch_device(self) -> torch.device:
        """The device, after checking that it is there."""
        device = torch.device(self.device)
        if device.type == "cuda" and not torch.cuda.is_available():
            raise DeviceError(
                "device",
                expected="a CUDA device that torch can see",
                got=self.device,
                remedy="Use --device cpu --micro to try the command without one",
            )
        return device


class Deadline:
    """Seconds left for a part. Parts look at it between measurements and never in one.

    Args:
        seconds: How many.
        keep: Called with what a part has so far; see `keep`.
    """

    def __init__(self, seconds: float, keep: Callable[[Result], None] | None = None) -> None:
        self._end = time.monotonic() + seconds
        self._keep = keep

    def keep(self, result: Result) -> None:
        """Write what a part has so far, so that a run that is killed leaves it behind."""
        if self._keep is not None:
            self._keep(result)

    @property
    def passed(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() >= self._end


@dataclass(slots=True)
class Result:
    """What a part measured.

    Attributes:
        data: Goes to the JSON file.
        header: Column titles of the table on the screen.
        rows: Its rows.
        failures: Limits that were not met, in words.
        left_out: What the deadline cut, in words.
    """

    header: tuple[str, ...]
    data: dict[str, object] = field(default_factory=dict)
    rows: list[tuple[str, ...]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


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


def generator(device: torch.device, seed: int) -> torch.Generator:
    """A seeded generator on the device."""
    return torch.Generator(device=device).manual_seed(seed)


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


def time_call(
    call: Callable[[], object], device: torch.device, calls: int, warmup: int = 2
) -> Timing:
    """Time a call: CUDA events on a GPU, the wall clock on a CPU.

    Args:
        call: What to time; its result is dropped.
        device: Where it runs.
        calls: Timed calls.
        warmup: Calls before the first timed one.
    """
    return Timing.of(call_times(call, device, calls, warmup))


def call_times(
    call: Callable[[], object], device: torch.device, calls: int, warmup: int = 2
) -> list[float]:
    """Milliseconds of each timed call, in the order of the calls; arguments as in `time_call`."""
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
