"""Calls that are timed: over rotating inputs, as a CUDA graph, and kernel by kernel."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Final

import torch

from benchmarks.setup import call_times

__all__ = [
    "GROUPS",
    "L2_BYTES",
    "Call",
    "calls_within",
    "graph_of",
    "group_of",
    "input_sets",
    "kernel_milliseconds",
    "peak_bytes",
    "rotating",
]

Call = Callable[[], torch.Tensor]

#: Input sets together are at least twice this, more than the L2 of any card so far (H200: 50 MB).
L2_BYTES: Final = 64 * 2**20
_MOST_SETS: Final = 12

#: Group of a kernel by a part of its lower-case name; the first that fits. Prologue comes before
#: attention and norms before products: "quantize" and "layer_norm" occur in names with both.
_GROUPS: Final[tuple[tuple[str, tuple[str, ...]], ...]] = (
    (
        "prologue",
        ("prologue", "statistics_kernel", "quantize", "quant_", "quantint8", "meanscale",
         "transposepadpermute", "submean"),
    ),
    ("attention", ("attention", "attn", "fmha", "flash", "sdpa", "one_launch", "hopper_kernel")),
    ("norm and modulate", ("layer_norm", "layernorm", "rms_norm", "rmsnorm", "modulate", "norm_")),
    ("GEMM", ("nvjet",)),  # cuBLAS, also where its name says that it ends with GELU
    ("activation", ("gelu", "silu", "tanh")),
    ("skip", ("skip_kernel", "close_skip")),
    (
        "GEMM",
        ("gemm", "cutlass", "cublas", "xmma", "project", "linear", "triton_mm", "splitk",
         "addmm", "bmm", "matmul"),
    ),
    ("elementwise and copies", ("elementwise", "triton_poi", "triton_red", "triton_per", "copy",
                                "memcpy", "memset", "reduce_kernel", "catarray", "aten::")),
)  # fmt: skip
GROUPS: Final = (*dict.fromkeys(name for name, _ in _GROUPS), "other")


def group_of(kernel: str) -> str:
    """What a kernel does, judged by its name."""
    name = kernel.lower()
    for group, parts in _GROUPS:
        if any(part in name for part in parts):
            return group
    return "other"


def input_sets(bytes_a_set: int) -> int:
    """How many sets of inputs keep each other out of L2: at least two."""
    return max(2, min(_MOST_SETS, -(-2 * L2_BYTES // max(1, bytes_a_set))))


def rotating(calls: Sequence[Call]) -> Call:
    """A call that makes the given ones in turn."""
    turn = itertools.cycle(calls)
    return lambda: next(turn)()


def calls_within(
    call: Callable[[], object], device: torch.device, budget: float, least: int, most: int
) -> int:
    """How many calls take about `budget` milliseconds, judged by one of them."""
    one = call_times(call, device, 1, warmup=1)[0]
    return max(least, min(most, int(budget / max(one, 1e-3))))


def graph_of(calls: Sequence[Call]) -> Callable[[], None]:
    """All calls once, as one CUDA graph; what it gives back replays it."""
    stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # what a first call sets up must not be captured
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph.replay


def kernel_milliseconds(
    call: Callable[[], object], device: torch.device, calls: int = 1
) -> dict[str, float]:
    """Milliseconds a call spends in each kernel (on a CPU: in each operator), by name."""
    from torch.profiler import ProfilerActivity, profile

    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CUDA] if on_gpu else [ProfilerActivity.CPU]
    call()
    if on_gpu:
        torch.cuda.synchronize(device)
    with profile(activities=activities, acc_events=True) as recorded:
        for _ in range(calls):
            call()
        if on_gpu:
            torch.cuda.synchronize(device)
    found: dict[str, float] = {}
    for event in recorded.key_averages():
        if on_gpu and str(event.device_type) != "DeviceType.CUDA":
            continue
        micro = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if micro > 0:
            found[event.key] = found.get(event.key, 0.0) + micro / 1e3 / calls
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def peak_bytes(call: Callable[[], object], device: torch.device) -> dict[str, int]:
    """Peak of allocated memory during a call, whole and on top of what was there before; nothing
    on a CPU."""
    if device.type != "cuda":
        return {}
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    return {"peak_bytes": peak, "peak_bytes_over_weights": peak - before}
