"""Symmetric memory on two GPUs that NVLink joins. `make test-two-gpus`

`tests/test_several_ranks.py` compares two GPUs with one. Where more than two are visible, two run.
"""

from __future__ import annotations

import os
import time
from contextlib import nullcontext
from datetime import timedelta
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.patching.models import mapped, named, run, wan
from tests.patching.test_symmetric import POINTS, slowly
from tests.ranks import enable_parallelism, on_two_gpus
from turbo_rcm_patch import patch_model, report_of
from turbo_rcm_patch.patching import symmetric

pytestmark = pytest.mark.gpu
INT8: dict[str, Any] = {"attention": "int8", "guard": False}


def _same_bits(rank: int, options: dict[str, Any]) -> None:
    """Exchanges in symmetric memory give the bits of those through the group, again and again, and
    when a stream of one rank is far behind."""
    device = torch.device("cuda", rank)
    inputs = mapped(named("t2v").inputs(1, torch.bfloat16), lambda x: x.to(device))
    # 1,040 tokens: a tile has rows of both ranks.
    videos = [torch.randn(1, 4, 5, 32, 26).to(device, torch.bfloat16) for _ in range(3)]

    def sleep() -> None:
        torch.cuda._sleep(20_000_000)  # some 10 ms

    def late_copies(self: Any, staged: Any) -> Any:
        context = beside(self, staged)
        with context:
            sleep()
        return context

    def outputs() -> tuple[list[torch.Tensor], str]:
        symmetric.release()
        model = wan(num_attention_heads=4, attention_head_dim=128).eval().requires_grad_(False)
        patch_model(model.to(device, torch.bfloat16), **options)
        enable_parallelism(model, ulysses_degree=2)
        made = [run(model, inputs | {"hidden_states": x}) for x in videos * 3]
        return made, str(report_of(model))

    with mock.patch.object(symmetric, "_boot", lambda device: None):
        expected, report = outputs()
    assert "symmetric" not in report
    made, report = outputs()
    assert ("in symmetric memory" in report) == (symmetric._boot(device) is not None)
    assert all(map(torch.equal, made, expected))
    assert not torch.equal(made[0], made[1])
    beside = symmetric._Copies.on_side_stream
    late = [
        (place, name, slowly(getattr(place, name), *how, sleep)) for place, name, *how in POINTS
    ]
    late.append((symmetric._Copies, "on_side_stream", late_copies))
    for slow, point in product(range(2), late):
        with mock.patch.object(*point) if rank == slow else nullcontext():
            made, report = outputs()
        assert ("in symmetric memory" in report) == (symmetric._boot(device) is not None)
        assert all(map(torch.equal, made, expected)), (slow, point[1])


@pytest.mark.parametrize(
    "more", [{}, {"attention": "exact"}, {"guard": True}, {"linear": "int8"}], ids=str
)
def test_exchanges_in_symmetric_memory_give_the_same_bits(more: dict[str, Any]) -> None:
    on_two_gpus(_same_bits, INT8 | more)


def _freed(rank: int) -> None:
    """What is too small is freed, and all when it is released, also where a peer mapped it."""
    device = torch.device("cuda", rank)
    x = torch.zeros(1, 1024, 16384, dtype=torch.bfloat16, device=device)  # 32 MiB
    dist.all_reduce(x[0, :1, :1].clone())  # NCCL keeps buffers
    assert symmetric.shared(dist.group.WORLD, x[:, :1]) is not None
    symmetric.release()
    dist.barrier()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info(device)[0]
    for tokens, kept in ((512, 64), (1024, 128), (256, 128)):
        assert symmetric.shared(dist.group.WORLD, x[:, :tokens]) is not None
        dist.barrier()
        used = before - torch.cuda.mem_get_info(device)[0]
        assert abs(used - (kept << 20)) <= 16 << 20, (tokens, used)
    symmetric.release()
    dist.barrier()
    torch.cuda.synchronize(device)
    assert before - torch.cuda.mem_get_info(device)[0] <= 16 << 20


def _waits_in_vain(rank: int) -> None:
    device = torch.device("cuda", rank)
    shared = symmetric.shared(dist.group.WORLD, torch.zeros(1, 64, 256, device=device))
    assert shared is not None
    if rank == 1:
        time.sleep(300)
    shared.barrier()
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        os._exit(3)  # torch's own clean-up may wait for a GPU that has failed


def _with_nvlink() -> None:
    if symmetric._boot(torch.device("cuda", 0)) is None:
        pytest.skip("needs two GPUs that NVLink joins")


def test_symmetric_memory_is_freed() -> None:
    _with_nvlink()
    on_two_gpus(_freed)


def test_a_rank_waits_no_longer_than_the_groups_timeout() -> None:
    _with_nvlink()
    begun = time.monotonic()
    with pytest.raises(mp.ProcessExitedException):
        on_two_gpus(_waits_in_vain, timeout=timedelta(seconds=20))
    assert time.monotonic() - begun < 150
