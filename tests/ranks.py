"""Several processes that share process groups, for tests of what ranks send each other."""

from __future__ import annotations

import faulthandler
import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from diffusers import ContextParallelConfig

from tests import processes
from tests.processes import server

#: An exchange that nobody answers fails after this: a machine may stand still for a while, and on
#: GPUs a rank may be compiling kernels that another has. Less than pytest gives a test.
TIMEOUT = timedelta(seconds=150)


def _main(
    rank: int,
    world: int,
    backend: str,
    folder: str,
    function: Callable[..., None],
    args: tuple,
    timeout: timedelta,
) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    faulthandler.enable(Path(folder, f"{rank}.fault").open("w"))  # noqa: SIM115 - to its end
    store = Path(folder, "store").as_uri()
    if "nccl" in backend:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend, init_method=store, rank=rank, world_size=world, timeout=timeout
    )
    try:
        function(rank, *args)
        dist.barrier()  # nobody leaves while another still needs it
    finally:
        dist.destroy_process_group()


def enable_parallelism(model: Any, **degrees: Any) -> None:
    """Split a model's sequence, as users do. diffusers counts accelerators, of which a CPU machine
    has none."""
    count = max(2, torch.accelerator.device_count())
    with mock.patch.object(torch.accelerator, "device_count", return_value=count):
        model.enable_parallelism(config=ContextParallelConfig(**degrees))


def on_two_gpus(function: Callable[..., None], *args: object, **options: Any) -> None:
    """Run function(rank, *args) in two processes, each with a GPU."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    on_ranks(2, function, *args, backend="cpu:gloo,cuda:nccl", **options)


def on_ranks(
    world: int,
    function: Callable[..., None],
    *args: object,
    backend: str = "cpu:gloo",
    timeout: timedelta = TIMEOUT,
) -> None:
    """Run function(rank, *args) in so many processes of one group. On GPUs nothing is shared.

    Raises:
        ProcessRaisedException, ProcessExitedException: One failed. Notes say where those were that
            a signal ended."""
    start = "spawn" if "nccl" in backend else processes.RANKS or server().get_start_method()
    with tempfile.TemporaryDirectory() as folder:
        given = (world, backend, os.fspath(folder), function, args, timeout)
        try:
            mp.start_processes(_main, args=given, nprocs=world, start_method=start)
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            for path in sorted(Path(folder).glob("*.fault")):
                if text := path.read_text(encoding="utf-8", errors="replace"):
                    error.add_note(f"rank {path.stem}: {text}")
            raise
