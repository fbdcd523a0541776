"""Ranks that write to each other's memory, over real ranks on a CPU whose memory is a mapped file.

On a card torch's symmetric memory maps it (`tests/gpu/test_two_gpus.py`); all else is the same.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.patching.models import named, run
from tests.ranks import enable_parallelism, on_ranks
from turbo_rcm_patch import parallel, patch_model, report_of
from turbo_rcm_patch.patching import symmetric

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")


def _map(folder: Path, own: Tensor, group: Any) -> tuple[list[Tensor], Any]:
    """Files that all ranks map, with NaN in them."""
    folder = folder / str(own.numel())
    folder.mkdir(exist_ok=True)
    dist.barrier(group)
    every = [
        torch.from_file(str(folder / str(rank)), True, own.numel(), dtype=torch.uint8)
        for rank in range(group.size())
    ]
    every[group.rank()].fill_(255)
    dist.barrier(group)
    return every, partial(dist.barrier, group)


@contextmanager
def mapped(folder: str, **more: Any) -> Iterator[None]:
    """Joins this machine's ranks as NVLink joins GPUs."""
    own: dict[str, Any] = {
        "_boot": lambda device: "this machine",
        "_allocate": lambda nbytes, device: torch.empty(nbytes, dtype=torch.uint8),
        "_map": partial(_map, Path(folder)),
    }
    symmetric.release()
    with mock.patch.multiple(symmetric, **own | more):
        yield
    symmetric.release()


def _output(
    options: dict[str, Any], ranks: int, name: str, *batches: int, shared: bool = False
) -> list[Tensor]:
    one = named(name)
    model = one.model()
    patch_model(model, **options)
    enable_parallelism(model, ulysses_degree=ranks)
    made = [run(model, one.inputs(batch)) for batch in batches]
    assert all(words.startswith("fused") for words in report_of(model).ran().values())
    assert ("in symmetric memory" in str(report_of(model))) == shared
    return made


def _same_bits(rank: int, folder: str, ranks: int, name: str, ways: list[dict[str, Any]]) -> None:
    for number, options in enumerate(ways):
        expected = _output(options, ranks, name, 1, 2, 1)
        own = Path(folder, str(number))
        own.mkdir(exist_ok=True)
        with mapped(str(own)):
            with torch.inference_mode():
                made = _output(options, ranks, name, 1, shared=True)
            made += _output(options, ranks, name, 2, 1, shared=True)  # more memory, then less
        assert all(map(torch.equal, made, expected))


_WAYS = [
    {"attention": attention, "guard": guard}
    for attention, guard in product(("exact", "int8"), (False, True))
]


@pytest.mark.parametrize(
    ("ranks", "name", "ways"),
    [
        (2, "t2v", _WAYS),
        (2, "sla", [{"attention": "int8", "guard": False, "sla_topk": 0.5}]),
    ],
)
def test_the_bits_are_those_of_exchanges_through_the_group(
    tmp_path: Path, ranks: int, name: str, ways: list[dict[str, Any]]
) -> None:
    on_ranks(ranks, _same_bits, str(tmp_path), ranks, name, ways)


def _fails_on_one(rank: int, folder: str, what: str) -> None:
    def allocate(*_: object) -> Any:
        raise RuntimeError("no memory")

    def map_(own: Tensor, group: Any) -> Any:
        every, barrier = _map(Path(folder), own, group)
        if what == "map":
            raise RuntimeError("cannot be mapped")
        return [x.clone() for x in every], barrier  # What is written does not arrive.

    failing: dict[str, Any] = {"_allocate": allocate} if what == "allocate" else {"_map": map_}
    options: dict[str, Any] = {"attention": "int8", "guard": False}
    expected = _output(options, 2, "t2v", 1, 1)
    said: list[str] = []
    with mapped(folder, **failing if rank == 1 else {}):
        symmetric._log.addFilter(lambda line: said.append(line.getMessage()))
        assert symmetric._log.isEnabledFor(logging.WARNING)
        assert all(map(torch.equal, _output(options, 2, "t2v", 1, 1), expected))
    assert len(said) == 1 and "through the process group" in said[0], said  # not tried again


@pytest.mark.parametrize("what", ["allocate", "map", "arrive"])
def test_all_ranks_exchange_through_the_group_if_one_cannot_share_its_memory(
    tmp_path: Path, what: str
) -> None:
    on_ranks(2, _fails_on_one, str(tmp_path), what)


def _elsewhere(rank: int, folder: str) -> None:
    options: dict[str, Any] = {"attention": "int8", "guard": False}
    expected = _output(options, 2, "t2v", 1)
    with mapped(folder, _boot=lambda device: f"machine {rank}", _allocate=None):
        assert torch.equal(_output(options, 2, "t2v", 1)[0], expected[0])


def test_ranks_of_two_hosts_exchange_through_the_group(tmp_path: Path) -> None:
    on_ranks(2, _elsewhere, str(tmp_path))


def _kept_inputs(rank: int, folder: str) -> None:
    """A hook of the output projection keeps what it saw."""
    one, kept = named("t2v"), []
    model = one.model()
    patch_model(model, attention="exact", guard=False)
    enable_parallelism(model, ulysses_degree=2)
    for block in model.blocks:
        block.attn1.to_out[0].register_forward_hook(lambda module, args, out: kept.append(args[0]))
    with mapped(folder):
        run(model, one.inputs())
        assert "in symmetric memory" in str(report_of(model))
        assert len(kept) == 2 and not torch.equal(*kept)
        expected = [x.clone() for x in kept]
        run(model, {**one.inputs(), "timestep": torch.tensor([7, 7])})
        assert all(map(torch.equal, kept, expected))


def test_what_a_hook_keeps_of_an_attention_is_not_overwritten(tmp_path: Path) -> None:
    on_ranks(2, _kept_inputs, str(tmp_path))


def _undone(rank: int, folder: str) -> None:
    one = named("t2v")
    pipe = SimpleNamespace(transformer=one.model())
    patch_model(pipe.transformer, attention="int8", guard=False)
    with mapped(folder), mock.patch.object(torch.accelerator, "device_count", return_value=2):
        for _ in range(2):
            with parallel(pipe, ulysses=2):
                run(pipe.transformer, one.inputs())
                assert "in symmetric memory" in str(report_of(pipe.transformer))
                memory = ref(symmetric._memories[dist.group.WORLD])
            gc.collect()
            assert memory() is None


def test_the_memory_is_freed_when_parallel_is_undone(tmp_path: Path) -> None:
    on_ranks(2, _undone, str(tmp_path))
