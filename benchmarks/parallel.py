"""`parallel`: one forward of Wan on several GPUs, unpatched and patched, and where its time goes.

It starts a process for each GPU by itself, or is one of those that `torchrun` started. The first
rank measures and writes; the others compute along. A forward begins on all ranks at once.
"""

from __future__ import annotations

import gc
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from benchmarks.forward import BROKEN
from benchmarks.measure import Call, errors_of
from benchmarks.networks import network_of
from benchmarks.rows import LENGTHS
from benchmarks.runner import (
    PEAK,
    REL_L2,
    Column,
    Journal,
    Plan,
    Record,
    Wrong,
    attempted,
    check,
    chosen,
    free,
    peak_bytes,
    queued_milliseconds,
    wait,
)
from turbo_rcm_patch import PatchConfig, patched
from turbo_rcm_patch.errors import ConfigError

#: Forwards before the timed ones.
_WARM_UPS: Final = 3

_COLUMNS: Final = (
    Column("network", 10), Column("method", 36), Column("ms", 9, "milliseconds.median", ".2f"),
    Column("least", 9, "milliseconds.least", ".2f"),
    Column("CPU ms", 8, "cpu_milliseconds.median", ".2f"), Column("of one", 8, "of_one", ".3f"),
    Column("exposed", 8, "exposed", ".4f"), Column("idle", 7, "idle", ".4f"), PEAK, REL_L2,
)  # fmt: skip
_MICRO_RANKS: Final = 2
_TIMEOUT: Final = timedelta(seconds=120)


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run the network.

    Attributes:
        name: Of it.
        split: (Ulysses, ring) for so many ranks; None runs on one.
        config: How it is patched; None leaves it as it is.
        backend: The attention of diffusers.
    """

    name: str
    split: Callable[[int], tuple[int, int]] | None = None
    config: PatchConfig | None = None
    backend: str = ""


def _ulysses(ranks: int) -> tuple[int, int]:
    return ranks, 1


def _ring(ranks: int) -> tuple[int, int]:
    return 1, ranks


_OURS: Final = PatchConfig(guard=False)
ONE, ONE_PATCHED = "one GPU eager", "one GPU patched"
WAYS: Final = {
    way.name: way
    for way in (
        Way(ONE),
        Way(ONE_PATCHED, config=_OURS),
        Way("one GPU patched int8 Linears", config=PatchConfig(guard=False, linear="int8")),
        Way("Ulysses cuDNN", _ulysses, backend="_native_cudnn"),
        Way("Ulysses patched", _ulysses, _OURS),
        Way("ring patched", _ring, _OURS),
        Way("Ulysses patched exact", _ulysses, PatchConfig(guard=False, attention="exact")),
        Way("Ulysses patched int8 Linears", _ulysses, PatchConfig(guard=False, linear="int8")),
    )
}
#: Case -> (network, tokens).
CASES: Final = {
    "1.3b": ("1.3b", "32760"),
    "14b": ("14b", "32760"),
    "14b-75600": ("14b", "75600"),
}


def run(plan: Plan) -> int:
    """Measure and write `parallel.json`; 0 if every patched forward was right on every rank."""
    chosen("--only", plan.only, list(CASES))
    chosen("--peers", plan.peers, list(WAYS))
    if "LOCAL_RANK" in os.environ:  # torchrun
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        return 0 if _on_rank(rank, plan, ranks, "env://") else 1
    ranks = _MICRO_RANKS if plan.micro else torch.cuda.device_count()
    if ranks < 2:
        raise ConfigError("parallel", expected="two GPUs or more", got=str(ranks))
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder, "store").as_uri()
        # Daemons end with this process, also where one of them waits for the other after Ctrl-C.
        given = plan, ranks, store, folder
        spawn(_spawned, given, nprocs=ranks, daemon=True)  # type: ignore[no-untyped-call]
        return 0 if Path(folder, "right").exists() else 1


def _spawned(rank: int, plan: Plan, ranks: int, store: str, folder: str) -> None:
    os.environ["LOCAL_RANK"] = str(rank)
    if _on_rank(rank, plan, ranks, store) and rank == 0:
        Path(folder, "right").touch()


def _on_rank(rank: int, plan: Plan, ranks: int, store: str) -> bool:
    """All cases, on one of the ranks; whether what is ours was right."""
    cpu = plan.device == "cpu"
    device = torch.device("cpu") if cpu else torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    if not cpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "gloo" if cpu else "cpu:gloo,cuda:nccl",
        init_method=store, rank=rank, world_size=ranks, timeout=_TIMEOUT,
    )  # fmt: skip
    try:
        if rank:
            return _measure_all(plan, device, None)
        journal = Journal("parallel", plan, _COLUMNS, about=_about(ranks))
        with journal.running():
            return _measure_all(plan, device, journal)
    finally:
        dist.destroy_process_group()


def _about(ranks: int) -> Record:
    return {
        "network": "Wan2.1 with seeded random weights in bf16, batch 1, no guard",
        "ranks": ranks,
        "NCCL": _nccl_version(),
        "NCCL_NVLS_ENABLE": os.environ.get("NCCL_NVLS_ENABLE", ""),
        "milliseconds": "of forwards queued one after another on all ranks, median of rounds",
        "cpu_milliseconds": "until the call returns, the GPU idle before it; median",
        "exposed": "share of a forward in which the GPU runs a kernel of NCCL and no other",
        "idle": "share in which it runs none",
        "error": "to the unpatched eager forward on one GPU",
        "apart_from_one": "to the patched forward on one GPU, with the same configuration",
        "same_on_all_ranks": "whether every rank got the same bits",
        "replay_is_plain": "whether replayed CUDA graphs gave the bits of a plain forward",
    }


def _nccl_version() -> str:
    if not torch.cuda.is_available():
        return ""
    version: Any = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return ".".join(map(str, version))


def _measure_all(plan: Plan, device: torch.device, journal: Journal | None) -> bool:
    good = True
    for case in chosen("--only", plan.only or ("1.3b", "14b"), list(CASES)):
        good &= _case(case, plan, device, journal)
    return good


@torch.no_grad()
def _case(case: str, plan: Plan, device: torch.device, journal: Journal | None) -> bool:
    name, tokens = CASES[case]
    latents = None if plan.micro else (1, 16, *LENGTHS[tokens])
    network, make, record = network_of(name, plan, device, latents)
    call = make(plan.seed)
    found: dict[str, Record] = record.setdefault("methods", {})
    outputs: dict[str, torch.Tensor] = {"eager": call()}
    good = True
    for way_name in chosen("--peers", plan.peers, list(WAYS)):
        late = journal is not None and journal.late(f"{case}, {way_name}")
        if _of_first(int(late), device):
            continue
        way = WAYS[way_name]
        found[way_name] = one = _measure(way, network, call, plan, device, outputs)
        good &= one["status"] == "timed" or way.config is None
        if journal is not None:
            base = found.get(ONE_PATCHED if way.config else ONE, {}).get("milliseconds")
            if base and one["status"] == "timed":
                one["of_one"] = one["milliseconds"]["median"] / base["median"]
            journal.row(case, way_name, found)
            journal.case(case, record)
    del network, make, call, outputs
    free(device)
    return good


def _of_first(value: int, device: torch.device) -> int:
    """What the first rank says."""
    told = torch.tensor([value], device=device)
    dist.broadcast(told, 0)
    return int(told)


@contextmanager
def _entered(way: Way, network: Any, device: torch.device) -> Iterator[None]:
    from diffusers import ContextParallelConfig
    from diffusers.models.attention_dispatch import attention_backend
    from turbo_rcm_patch.patching.parallel import disable_parallelism

    backend = attention_backend(way.backend) if way.backend and device.type == "cuda" else None
    split = way.split
    with backend or nullcontext(), patched(network, way.config) if way.config else nullcontext():
        if split is None:
            yield
            return
        ulysses, ring = split(dist.get_world_size())
        # diffusers counts accelerators, of which a CPU machine has none.
        one = mock.patch.object(torch.accelerator, "device_count", return_value=1)
        with one if device.type == "cpu" else nullcontext():
            network.enable_parallelism(
                config=ContextParallelConfig(ulysses_degree=ulysses, ring_degree=ring)
            )
        try:
            yield
        finally:
            disable_parallelism(network)


def _measure(
    way: Way,
    network: Any,
    call: Call,
    plan: Plan,
    device: torch.device,
    outputs: dict[str, torch.Tensor],
) -> Record:
    """One way; on one GPU the others compute along, each for itself."""
    record: Record = {}
    with attempted(record), _entered(way, network, device):
        begin = time.perf_counter()
        output = call()
        wait(device)
        record["first_seconds"] = time.perf_counter() - begin
        record["error"] = errors_of(output, outputs["eager"])
        if way.config is not None:
            key = repr(way.config)
            if way.split is None:
                outputs[key] = output
            elif key in outputs:
                record["apart_from_one"] = errors_of(output, outputs[key])["relative_l2"]
        if way.split is not None:
            record["same_on_all_ranks"] = _same(output)
        check(record["error"], BROKEN)
        if not record.get("same_on_all_ranks", True):
            raise Wrong("ranks differ")
        call()
        rounds = plan.calls or (3 if plan.quick else 5)
        for clock, queued in (("milliseconds", 1 if plan.quick else 2), ("cpu_milliseconds", 0)):
            record[clock] = queued_milliseconds(call, device, rounds, queued, dist.barrier)
        record |= peak_bytes(call, device)
        record |= _profile(call, device)
    gc.collect()
    return record


def _replay_is(output: torch.Tensor, call: Call) -> bool:
    """Whether a forward gives the same bits once it is captured."""
    again = [call() for _ in range(_WARM_UPS + 1)]
    return all(torch.equal(x, output) for x in again)


def _everywhere(right: bool, device: torch.device) -> bool:
    """Whether it is so on every rank: all of them go on, or none does."""
    told = torch.tensor(int(right), device=device)
    dist.all_reduce(told, dist.ReduceOp.MIN)
    return bool(told.item())


def _same(x: torch.Tensor) -> bool:
    x = x.contiguous()
    every = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(every, x)
    return all(torch.equal(x, other) for other in every)


def _profile(call: Call, device: torch.device) -> Record:
    """Where one forward spends its time on this GPU: shares of exposed exchange and of idleness,
    and the milliseconds of the longest kernels."""
    if device.type != "cuda":
        return {}
    from torch.profiler import ProfilerActivity, profile

    wait(device)
    dist.barrier()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as recorded:
        call()
        wait(device)
    exchange: list[tuple[int, int]] = []
    compute: list[tuple[int, int]] = []
    by_name: dict[str, float] = {}
    profiler: Any = recorded.profiler
    for event in profiler.kineto_results.events():
        name = event.name()
        if str(event.device_type()) != "DeviceType.CUDA" or name.startswith(
            ("nccl:", "ProfilerStep")
        ):
            continue
        begin, long = event.start_ns(), event.duration_ns()
        if not long:
            continue
        (exchange if "nccl" in name.lower() else compute).append((begin, begin + long))
        by_name[name] = by_name.get(name, 0.0) + long / 1e6
    if not compute:
        return {}
    everything = exchange + compute
    span = max(end for _, end in everything) - min(begin for begin, _ in everything)
    busy, computing = _covered(everything), _covered(compute)
    longest = sorted(by_name.items(), key=lambda item: -item[1])[:12]
    return {
        "exposed": (busy - computing) / span,
        "idle": (span - busy) / span,
        "exchange_milliseconds": _covered(exchange) / 1e6,
        "profiled_milliseconds": span / 1e6,
        "longest_kernels": {name[:80]: round(ms, 3) for name, ms in longest},
    }


def _covered(intervals: list[tuple[int, int]]) -> int:
    """Nanoseconds in which one of these intervals runs."""
    total = reach = 0
    for begin, end in sorted(intervals):
        total += max(0, end - max(begin, reach))
        reach = max(reach, end)
    return total
