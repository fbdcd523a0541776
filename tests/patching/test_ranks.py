"""Two real ranks on a CPU that share no sequence: each has its own verdict, and asks nobody."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from tests.patching.wan import run, wan
from tests.ranks import on_ranks
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


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")
def test_two_ranks() -> None:
    on_ranks(2, decides_for_itself)
