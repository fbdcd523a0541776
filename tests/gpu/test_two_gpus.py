"""A sequence over two GPUs through NCCL equals the same forward on one. `make test-two-gpus`

The same ranks run on a CPU through gloo, so that the test itself is known to work. Where more than
two GPUs are visible, two of them run: two heads cannot be dealt out to four ranks.
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
from diffusers.models.attention_dispatch import attention_backend

from tests.measures import relative_l2
from tests.patching.models import mapped, named, run, wan
from tests.patching.test_symmetric import POINTS, slowly
from tests.ranks import enable_parallelism, on_ranks
from tests.video.micro import SMALL, micro_pipe
from turbo_rcm_patch import parallel, patch_model, patched, register_backend, report_of
from turbo_rcm_patch.diffusers_backend import BACKEND
from turbo_rcm_patch.patching import symmetric
from turbo_rcm_patch.video import generate

NCCL = "cpu:gloo,cuda:nccl"
#: Case -> options of the patch, degrees, and the relative L2 to one GPU. Sums come in another
#: order and round to bf16, which decides how some values round to int8.
_ULYSSES, _UNEVEN = {"ulysses_degree": 2}, {"ulysses_degree": 2, "ulysses_anything": True}
_INT8 = {"attention": "int8", "guard": False}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], float]] = {
    "exact Ulysses": ({"attention": "exact", "guard": False}, _ULYSSES, 1e-2),
    "int8 Ulysses": (_INT8, _ULYSSES, 2e-2),
    "int8 Linears": (_INT8 | {"linear": "int8"}, _ULYSSES, 2e-2),
    "guard on": (_INT8 | {"guard": True}, _ULYSSES, 2e-2),
    "uneven heads": (_INT8, _UNEVEN, 2e-2),
    "uneven heads, guard on": (_INT8 | {"guard": True}, _UNEVEN, 2e-2),
    "int8 ring": (_INT8, {"ring_degree": 2}, 2e-2),
}


def _model(name: str, rank: int, backend: str) -> tuple[Any, Any, dict[str, Any]]:
    """Two models with the same weights, and inputs, on this rank's device."""
    device = torch.device("cuda", rank) if "nccl" in backend else torch.device("cpu")
    row = named(name)
    inputs = mapped(row.inputs(dtype=torch.bfloat16), lambda x: x.to(device))
    alone, shared = (row.model(torch.bfloat16).to(device) for _ in range(2))
    return alone, shared, inputs


def _shares(rank: int, backend: str, case: str) -> None:
    options, degrees, near = CASES[case]
    name = "three-heads-of-24" if "ulysses_anything" in degrees else "t2v"
    alone, shared, inputs = _model(name, rank, backend)
    patch_model(alone, **options)
    expected = run(alone, inputs)
    register_backend()
    patch_model(shared, **options)
    with attention_backend(BACKEND) if "ring_degree" in degrees else nullcontext():
        enable_parallelism(shared, **degrees)
        made = run(shared, inputs)
    assert all(words.startswith("fused") for words in report_of(shared).ran().values())
    assert relative_l2(made, expected) <= near
    assert "parallel over 2 ranks" in str(report_of(shared))


def _on_two(backend: str, function: Any, *args: object) -> None:
    if "nccl" in backend and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    on_ranks(2, function, backend, *args, backend=backend)


@pytest.mark.parametrize(
    ("backend", "case"),
    [
        *(("cpu:gloo", case) for case in ("guard on", "int8 ring", "uneven heads, guard on")),
        *(pytest.param(NCCL, case, marks=pytest.mark.gpu) for case in CASES),
    ],
)
def test_two_ranks_compute_what_one_does(backend: str, case: str) -> None:
    _on_two(backend, _shares, case)


def _same_bits(rank: int, backend: str, options: dict[str, Any]) -> None:
    """Exchanges in symmetric memory give the bits of those through the group, again and again, and
    when a stream of one rank is far behind."""
    device = torch.device("cuda", rank) if "nccl" in backend else torch.device("cpu")
    inputs = mapped(named("t2v").inputs(1, torch.bfloat16), lambda x: x.to(device))
    # 1,040 tokens: a tile has rows of both ranks.
    videos = [torch.randn(1, 4, 5, 32, 26).to(device, torch.bfloat16) for _ in range(3)]

    def sleep() -> None:
        if device.type == "cuda":
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
        enable_parallelism(model, **_ULYSSES)
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
    for slow, point in product(range(2), late if device.type == "cuda" else []):
        with mock.patch.object(*point) if rank == slow else nullcontext():
            made, report = outputs()
        assert ("in symmetric memory" in report) == (symmetric._boot(device) is not None)
        assert all(map(torch.equal, made, expected)), (slow, point[1])


@pytest.mark.parametrize(
    ("backend", "options"),
    [
        ("cpu:gloo", _INT8),
        *(
            pytest.param(NCCL, _INT8 | more, marks=pytest.mark.gpu)
            for more in ({}, {"attention": "exact"}, {"guard": True}, {"linear": "int8"})
        ),
    ],
)
def test_exchanges_in_symmetric_memory_give_the_same_bits(
    backend: str, options: dict[str, Any]
) -> None:
    _on_two(backend, _same_bits, options)


def _freed(rank: int, backend: str) -> None:
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


def _waits_in_vain(rank: int, backend: str) -> None:
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
    if torch.cuda.device_count() < 2 or symmetric._boot(torch.device("cuda", 0)) is None:
        pytest.skip("needs two GPUs that NVLink joins")


@pytest.mark.gpu
def test_symmetric_memory_is_freed() -> None:
    _with_nvlink()
    _on_two(NCCL, _freed)


@pytest.mark.gpu
def test_a_rank_waits_no_longer_than_the_groups_timeout() -> None:
    _with_nvlink()
    begun = time.monotonic()
    with pytest.raises(mp.ProcessExitedException):
        on_ranks(2, _waits_in_vain, NCCL, backend=NCCL, timeout=timedelta(seconds=20))
    assert time.monotonic() - begun < 150


def _halves_a_step(rank: int, backend: str, options: dict[str, Any] | None) -> None:
    pipe = micro_pipe(experts=True)
    pipe.to(torch.device("cuda", rank) if "nccl" in backend else torch.device("cpu"))

    def latents() -> torch.Tensor:
        with patched(pipe, **options) if options else nullcontext():
            call: dict[str, Any] = {"sampler": "scheduler", "steps": 3, "guidance_scale": 5.0}
            return generate(pipe, "a red circle moves left", **call, **SMALL).latents

    expected = latents()
    with parallel(pipe, cfg=2):
        assert torch.equal(latents(), expected)


@pytest.mark.parametrize("backend", ["cpu:gloo", pytest.param(NCCL, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("attention", [None, "int8"])
def test_two_groups_share_a_step_and_give_the_bits_of_one_process(
    backend: str, attention: str | None
) -> None:
    _on_two(backend, _halves_a_step, attention and {"attention": attention})
