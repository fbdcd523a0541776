"""`parallel`: one forward of Wan split over all GPUs, unpatched and patched.

It starts a process for each GPU. All ranks compute; the first one writes. On one GPU each rank
computes the whole forward by itself.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from benchmarks.models import MakeCall, network_of
from benchmarks.network import BROKEN
from benchmarks.runner import (
    ERROR,
    TIMES,
    Benchmark,
    Column,
    Journal,
    Plan,
    Record,
    Wrong,
    error_to,
    free,
    peak_gib,
    seconds_of,
    time_forwards,
)
from turbo_rcm_patch import PatchConfig, patched, register_backend
from turbo_rcm_patch.diffusers_backend import BACKEND
from turbo_rcm_patch.errors import ConfigError


@dataclass(frozen=True, slots=True)
class _Way:
    """A way to run the network.

    Attributes:
        split: "ulysses" or "ring" over all ranks, or "" for one GPU.
        config: How it is patched; None for unpatched.
        backend: An attention backend of diffusers. Rings need one that returns the logsumexp.
    """

    split: str = ""
    config: PatchConfig | None = None
    backend: str = ""


_PATCHED: Final = PatchConfig(guard=False)
_INT8: Final = PatchConfig(guard=False, linear="int8")
_WAYS: Final = {
    "one GPU eager": _Way(),
    "one GPU patched": _Way(config=_PATCHED),
    "one GPU patched int8 Linears": _Way(config=_INT8),
    "Ulysses cuDNN": _Way("ulysses", backend="_native_cudnn"),
    "Ulysses sage": _Way("ulysses", backend="sage"),
    "Ulysses patched": _Way("ulysses", _PATCHED),
    "Ulysses patched exact": _Way("ulysses", PatchConfig(guard=False, attention="exact")),
    "Ulysses patched int8 Linears": _Way("ulysses", _INT8),
    "Ulysses patched guard on": _Way("ulysses", PatchConfig()),
    "ring patched": _Way("ring", _PATCHED, backend=BACKEND),
}
#: Case -> network and tokens.
_CASES: Final = {
    "1.3b": ("1.3b", "32760"),
    "14b": ("14b", "32760"),
    "14b-75600": ("14b", "75600"),
}
_COLUMNS: Final = (
    *TIMES, Column("CPU ms", "cpu_ms.median", ".2f"), Column("of one GPU", "of_one", ".3f"),
    Column("GiB", "peak_gib", ".1f"), Column("same on all", "same_on_all_ranks", ""), ERROR,
)  # fmt: skip
_ABOUT: Final = {
    "network": "Wan2.1, seeded random weights, bf16, batch 1",
    "ms": "of forwards queued one after another on all ranks, by the first rank's wall clock",
    "of_one": "median over that of the same method on one GPU",
    "same_on_all_ranks": "every rank got the same bits",
    "error": "relative L2 to the unpatched forward on one GPU",
}
_TIMEOUT: Final = timedelta(seconds=180)


def parallel(plan: Plan) -> int:
    """Measure, and write `parallel.json`.

    Returns:
        0 if every patched forward was right on every rank.

    Raises:
        ConfigError: There is one GPU only.
    """
    _PARALLEL.chosen(plan)
    ranks = 2 if plan.micro and plan.device == "cpu" else torch.cuda.device_count()
    if ranks < 2:
        raise ConfigError("parallel", expected="two GPUs or more", got=str(ranks))
    with tempfile.TemporaryDirectory() as folder:
        # Daemons end with this process, also where one waits for another after Ctrl-C.
        spawn(_rank, (plan, ranks, folder), nprocs=ranks, daemon=True)  # type: ignore[no-untyped-call]
        return 0 if Path(folder, "right").exists() else 1


def _rank(rank: int, plan: Plan, ranks: int, folder: str) -> None:
    cpu = plan.device == "cpu"
    device = torch.device("cpu") if cpu else torch.device("cuda", rank)
    if not cpu:
        torch.cuda.set_device(device)
    store = Path(folder, "store").as_uri()
    dist.init_process_group(
        "gloo" if cpu else "cpu:gloo,cuda:nccl",
        init_method=store, rank=rank, world_size=ranks, timeout=_TIMEOUT,
    )  # fmt: skip
    try:
        wrong = replace(_PARALLEL, about=_ABOUT | {"ranks": ranks})(plan, device, rank)
        if not wrong and rank == 0:
            Path(folder, "right").touch()
    finally:
        dist.destroy_process_group()


@torch.no_grad()
def _measure(case: str, methods: list[str], journal: Journal) -> None:
    plan, device = journal.plan, journal.device
    name, tokens = _CASES[case]
    network, make = network_of(name, plan, device, tokens)
    truth = make(plan.seed)()
    for method in methods:
        way = _WAYS[method]
        one = journal.case(case).get("one GPU " + method.split(" ", 1)[1], {}) if way.split else {}
        journal.measure(case, method, partial(_one, way, network, make, truth, journal, one))
        if way.split:  # diffusers does not take parallelism off a network again.
            del network, make
            free(device)
            network, make = network_of(name, plan, device, tokens)


def _one(
    way: _Way, network: Any, make: MakeCall, truth: torch.Tensor, journal: Journal, one: Record,
    record: Record,
) -> None:  # fmt: skip
    """Check and time one way on all ranks; `one` is the record of the same way on one GPU."""
    plan, device = journal.plan, journal.device
    call = make(plan.seed)
    with _entered(way, network, device):
        outputs: list[torch.Tensor] = []
        record["first_seconds"] = seconds_of(lambda: outputs.append(call()), device)
        output = outputs.pop()
        record["error"] = error_to(truth, BROKEN)(output)
        if way.split:
            record["same_on_all_ranks"] = _same(output)
            if not record["same_on_all_ranks"]:
                raise Wrong("ranks differ")
        call()
        rounds = plan.most(5)
        record["ms"], record["cpu_ms"] = time_forwards(
            call, device, rounds, dist.barrier, queued=2
        )
        record["peak_gib"] = peak_gib(call, device)
    if "ms" in one:
        record["of_one"] = record["ms"]["median"] / one["ms"]["median"]


@contextmanager
def _entered(way: _Way, network: Any, device: torch.device) -> Iterator[None]:
    """Patch the network and share its sequence; only the patch is taken off again."""
    from diffusers import ContextParallelConfig
    from diffusers.models.attention_dispatch import attention_backend

    gpu = device.type == "cuda"
    if way.backend == BACKEND:
        register_backend()
    backend = attention_backend(way.backend) if way.backend else nullcontext()
    with backend, patched(network, way.config) if way.config else nullcontext():
        if way.split:
            degrees = {f"{way.split}_degree": dist.get_world_size()}
            # diffusers counts accelerators, of which a CPU machine has none.
            counted = mock.patch.object(torch.accelerator, "device_count", return_value=1)
            with nullcontext() if gpu else counted:
                network.enable_parallelism(config=ContextParallelConfig(**degrees))
        yield


def _same(x: torch.Tensor) -> bool:
    """Return True if every rank has the same bits."""
    x = x.contiguous()
    every = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(every, x)
    return all(torch.equal(x, other) for other in every)


_PARALLEL: Final = Benchmark(
    name="parallel", about=_ABOUT, columns=_COLUMNS, cases=_CASES, methods=_WAYS,
    measure=_measure, default=["1.3b"],
)  # fmt: skip
