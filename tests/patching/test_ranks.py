"""Two real ranks on a CPU: diffusers' context parallelism is refused, each has its verdict."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig

from tests.patching.wan import CASES, run, wan
from tests.ranks import on_ranks
from turbo_rcm_patch import PatchConfig, errors, patch_model, unpatch_model


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


def refuses_context_parallelism(rank: int) -> None:
    config = ContextParallelConfig(ulysses_degree=2)
    model = wan()
    patch_model(model)
    # diffusers counts accelerators, of which a CPU machine has none.
    with mock.patch.object(torch.accelerator, "device_count", return_value=1):
        model.enable_parallelism(config=config)
    with pytest.raises(errors.ContextParallelError):
        run(model, **CASES[0].inputs())
    unpatch_model(model)
    with pytest.raises(errors.ContextParallelError):
        patch_model(model)


def both(rank: int) -> None:
    decides_for_itself(rank)
    refuses_context_parallelism(rank)


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")
def test_two_ranks() -> None:
    on_ranks(2, both)
