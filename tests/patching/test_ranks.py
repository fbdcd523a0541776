"""Two real ranks on a CPU that share no sequence: each has its own verdict, and asks nobody."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.patching.wan import run, wan
from turbo_rcm_patch import PatchConfig, patch_model


def decides_for_itself(rank: int) -> None:
    """Only one rank sees an attention that int4 cannot follow, and only it gives it back; the
    other runs no forward at all."""
    if rank == 0:
        return
    model = wan()
    model.blocks[0].attn1.norm_q.weight.data.mul_(30)
    report = patch_model(model, PatchConfig(attention="int4", kinds=("self",), guard_budget=0.3))
    run(model)
    assert report.guard[0].error > 0.3
    assert [pair.path for pair in report.pairs if pair.fused][0] == "blocks.1.attn1"


def rank_main(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = Path(folder, "store").as_uri()
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    try:
        decides_for_itself(rank)
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_two_ranks(tmp_path: Path) -> None:
    if not dist.is_available():
        pytest.skip("this torch was built without torch.distributed")
    mp.spawn(rank_main, args=(os.fspath(tmp_path),), nprocs=2)
