"""`parallel`: one forward of Wan, and a video with guidance, on all GPUs, unpatched and patched.

A video is the pipeline's own call without the text encoder: four steps with guidance, decoding,
and frames on the GPU. The two forwards of a step run on two groups of ranks, and each group splits
its sequence.

It starts a process for each GPU. All ranks compute; the first one writes. On one GPU each rank
computes the whole by itself.

`ms` is of forwards queued one after another on all ranks, by the first rank's wall clock; of a
video a step with guidance. `video s` is denoising, decoding and frames: the VAE is in bf16,
patched where the network is, and all ranks decode its rows together. `same on all` says that every
rank got the same bits, `same as one` that they are those of one GPU with the same patch. `error`
is relative L2 to the unpatched forward, or to the unpatched video's frames, on one GPU.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from benchmarks import runner
from benchmarks.models import build_network, make_call, record_report
from benchmarks.network import BROKEN
from benchmarks.pipeline import SIZE_480P, Case, build_pipeline
from benchmarks.runner import ERROR, MS, Benchmark, Column, Measure, Plan, Record, Wrong
from turbo_rcm_patch import PatchReport, patched, register_backend
from turbo_rcm_patch import parallel as on_ranks
from turbo_rcm_patch.diffusers_backend import BACKEND
from turbo_rcm_patch.errors import ConfigError


class _Way(NamedTuple):
    """A way to run the network.

    Attributes:
        split: "ulysses" or "ring" over all ranks, "cfg" for two groups of ranks with Ulysses
            inside, or "" for one GPU.
        options: Of its patch; None for unpatched.
        backend: An attention backend of diffusers. Rings need one that returns the logsumexp.
    """

    split: str = ""
    options: dict[str, Any] | None = None
    backend: str = ""


_PATCHED: Final[dict[str, Any]] = {"guard": False}
_INT8: Final[dict[str, Any]] = {"guard": False, "linear": "int8"}
_WAYS: Final = {
    "one GPU patched": _Way("", _PATCHED),
    "one GPU patched int8 Linears": _Way("", _INT8),
    "Ulysses cuDNN": _Way("ulysses", backend="_native_cudnn"),
    "Ulysses patched": _Way("ulysses", _PATCHED),
    "Ulysses patched int8 Linears": _Way("ulysses", _INT8),
    "Ulysses patched guard on": _Way("ulysses", {}),
    # The last of a forward, because diffusers does not take a ring off again.
    "ring patched": _Way("ring", _PATCHED, backend=BACKEND),
    "CFG patched": _Way("cfg", _PATCHED),
}
#: Case -> network and tokens of a forward, or a video.
_CASES: Final[dict[str, tuple[str, int] | Case]] = {
    "1.3b": ("1.3b", 32760),
    "14b": ("14b", 32760),
    "1.3b-video": Case("1.3b", 4, 5.0, SIZE_480P),
}


_TIMEOUT: Final = timedelta(seconds=180)


@dataclass(frozen=True, slots=True, kw_only=True)
class _OnRanks(Benchmark):
    """A benchmark that starts a process for each GPU."""

    def __call__(self, plan: Plan) -> int:
        """Measure on all GPUs, and write `parallel.json`.

        Raises:
            ConfigError: There is one GPU only.
        """
        self.chosen(plan)
        ranks = 2 if plan.micro and plan.device == "cpu" else torch.cuda.device_count()
        if ranks < 2:
            raise ConfigError("parallel", expected="two GPUs or more", got=str(ranks))
        with tempfile.TemporaryDirectory() as folder:
            # Daemons end with this process, also where one waits for another after Ctrl-C.
            spawn(_rank, (plan, ranks, folder), nprocs=ranks, daemon=True)  # type: ignore[no-untyped-call]
            return 0 if Path(folder, "right").exists() else 1


def _rank(rank: int, plan: Plan, ranks: int, folder: str) -> None:
    cpu = plan.device == "cpu"
    if rank:  # The first one alone prints and writes what people read.
        plan = replace(plan, out=Path(folder, str(rank)))
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if cpu:
        torch.set_num_threads(1)  # The ranks share the cores.
    else:
        torch.cuda.set_device(rank)
    store = Path(folder, "store").as_uri()
    dist.init_process_group(
        "cpu:gloo" if cpu else "cpu:gloo,cuda:nccl",
        init_method=store, rank=rank, world_size=ranks, timeout=_TIMEOUT,
    )  # fmt: skip
    try:
        wrong = Benchmark.__call__(parallel, plan)
        if not wrong and rank == 0:
            Path(folder, "right").touch()
    finally:
        dist.destroy_process_group()


def _prepare(name: str, plan: Plan, device: torch.device) -> Measure:
    case = _CASES[name]
    pipe: Any
    call: Callable[..., torch.Tensor]
    if isinstance(case, Case):
        pipe, call = build_pipeline(case, plan, torch.bfloat16, device)
    else:
        network = build_network(case[0], plan, device)
        pipe = SimpleNamespace(transformer=network)
        call = make_call(network, plan, device, case[1])
    outputs = {"truth": call()}  # and of each method on one GPU

    def measure(method: str, record: Record) -> None:
        way, record["ranks"] = _WAYS[method], dist.get_world_size()
        with _entered(way, pipe, device) as report:
            output = call()
            record["error"] = runner.checked_error(output, outputs["truth"], BROKEN)
            if not way.split:
                outputs[method] = output
            elif not _same_on_all_ranks(output):
                raise Wrong("ranks differ")
            else:
                record["same_on_all_ranks"] = True
                for name, alone in _WAYS.items():
                    if not alone.split and alone.options == way.options and name in outputs:
                        record["same_as_one"] = torch.equal(output, outputs[name])
            if isinstance(case, Case):
                _time_video(pipe, call, device, record)
            else:
                call()
                record["ms"] = runner.time_forwards(call, device, ready=dist.barrier, queued=2)
            record_report(record, report)

    return measure


def _time_video(
    pipe: Any, call: Callable[..., torch.Tensor], device: torch.device, record: Record
) -> None:
    """Time a whole video, and a step of others that end with their latents."""

    def seconds(output: str) -> float:
        dist.barrier()
        return runner.seconds_of(lambda: call(output), device)

    record["video_seconds"] = seconds("pt")
    record["ms"] = min(1e3 * seconds("latent") / pipe.num_timesteps for _ in range(2))


@contextmanager
def _entered(way: _Way, pipe: Any, device: torch.device) -> Iterator[PatchReport | None]:
    """Patch a pipeline and run it on all ranks; of a ring only the patch is undone."""
    from diffusers import ContextParallelConfig
    from diffusers.models.attention_dispatch import attention_backend

    world = dist.get_world_size()
    if way.backend == BACKEND:
        register_backend()
    with ExitStack() as stack:
        if way.backend:
            stack.enter_context(attention_backend(way.backend))
        report = None
        if way.options is not None:
            report = stack.enter_context(patched(pipe, **way.options))
        if device.type == "cpu":  # diffusers counts accelerators, of which it has none.
            stack.enter_context(mock.patch.object(torch.accelerator, "device_count", lambda: 1))
        if way.split == "ring":
            config = ContextParallelConfig(ring_degree=world)
            pipe.transformer.enable_parallelism(config=config)
        elif way.split:
            groups = 2 if way.split == "cfg" else 1
            shared = on_ranks(pipe, cfg=groups, ulysses=world // groups)
            stack.enter_context(shared)
        yield report


def _same_on_all_ranks(x: torch.Tensor) -> bool:
    """Return True if every rank has the same bits."""
    x = x.contiguous()
    every = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(every, x)
    return all(torch.equal(x, other) for other in every)


parallel: Final = _OnRanks(
    name="parallel",
    text="a forward of Wan, and a video with guidance, on all GPUs",
    columns=(
        MS, Column("video s", "video_seconds", ".2f"),
        Column("same on all", "same_on_all_ranks", ""), Column("same as one", "same_as_one", ""),
        ERROR,
    ),
    cases={  # Guidance is a video's alone.
        name: [
            method for method, way in _WAYS.items()
            if way.split in (("", "cfg") if isinstance(case, Case) else ("", "ulysses", "ring"))
        ]
        for name, case in _CASES.items()
    },
    prepare=_prepare,
    default=["1.3b"],
)  # fmt: skip
