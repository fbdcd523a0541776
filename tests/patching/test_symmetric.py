"""Ranks that write to each other's memory, over real ranks on a CPU whose memory is a mapped file.

On a card torch's symmetric memory maps it (`tests/gpu/test_two_gpus.py`); all else is the same.
`tests/test_several_ranks.py` compares the bits with those of exchanges through the group.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
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
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.patching.models import named, run, wan
from tests.ranks import enable_parallelism, on_ranks
from turbo_rcm_patch import parallel, patch_model, report_of
from turbo_rcm_patch.ops import AttentionSpec
from turbo_rcm_patch.patching import symmetric
from turbo_rcm_patch.patching.families import diffusers_parts
from turbo_rcm_patch.patching.ulysses import Ulysses, attention

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")


T2V = named("t2v")
#: What was mapped last, which has to be free before more is.
_mapped: list[ref[Tensor]] = []


def _map(folder: Path, own: Tensor, group: Any) -> tuple[list[Tensor], Any]:
    """Files that all ranks map, with NaN in them."""
    assert not [one for one in _mapped if one() is not None]
    ranks = "-".join(map(str, dist.get_process_group_ranks(group)))
    folder = folder / f"{ranks} {own.numel()}"
    folder.mkdir(exist_ok=True)
    dist.barrier(group)
    every = [
        torch.from_file(str(folder / str(rank)), True, own.numel(), dtype=torch.uint8)
        for rank in range(group.size())
    ]
    every[group.rank()].fill_(255)
    _mapped[:] = map(ref, every)
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


def _split(model: Any, attention: str = "exact") -> Any:
    """A patched model whose sequence all ranks share."""
    patch_model(model, attention=attention, guard=False)
    enable_parallelism(model, ulysses_degree=dist.get_world_size())
    return model


def _through_the_group(attention: str, *batches: int) -> list[Tensor]:
    """Outputs with exchanges through the process group."""
    model = _split(T2V.model(), attention)
    outputs = [run(model, T2V.inputs(batch)) for batch in batches]
    assert not _in_memory(model)
    return outputs


def _in_memory(model: Any) -> bool:
    return "in symmetric memory" in str(report_of(model))


# --- slow ranks ----------------------------------------------------------------------------------


class _Deferred(TorchDispatchMode):
    """Puts copies off."""

    def __init__(self, later: list[Callable[[], object]]) -> None:
        super().__init__()
        self._later = later

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is torch.ops.aten.copy_.default
        self._later.append(partial(func, *args))
        return args[0]


class _LateCopies(symmetric._Copies):
    """Copies beside the stream that run as late as they may."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._later: list[Callable[[], object]] = []

    def on_side_stream(self, staged: tuple[Tensor, ...]) -> Any:
        super().on_side_stream(staged)
        return _Deferred(self._later)

    def join(self) -> None:
        for copy in self._later:
            copy()
        self._later.clear()
        super().join()


def _attend_to(to: tuple[Tensor, ...], q: Tensor, k: Tensor, v: Tensor, *, spec: Any) -> bool:
    """Write as the kernels of a card do: some rows of one rank after those of another."""
    out = attention.attend(q, k, v, spec=spec)
    for one, part in zip(to, out.chunk(len(to), 1), strict=True):
        one.copy_(part)
    return True


def slowly(function: Any, first: bool, sleep: Callable[[], object]) -> Any:
    """A function with a pause before it or after it."""

    def call(*args: Any, **named: Any) -> Any:
        if first:
            sleep()
        made = function(*args, **named)
        if not first:
            sleep()
        return made

    return call


#: Where a rank is slow: before it writes q, k and v; before it reads them; before it reads the
#: output.
POINTS: list[tuple[Any, str, bool]] = [
    (symmetric.Shared, "write", True),
    (Ulysses, "to_heads", False),
    (diffusers_parts, "project_out", True),
]


def _one_is_slow(rank: int, folder: str, slow: tuple[int, ...]) -> None:
    ranks, inputs = dist.get_world_size(), T2V.inputs(1)
    if ranks == 3:
        inputs["hidden_states"] = torch.randn(1, 4, 3, 8, 8)
    model = _split(wan(num_attention_heads=ranks).eval().requires_grad_(False))
    videos = [inputs["hidden_states"] + shift for shift in (0.0, 1.0)]

    def outputs() -> list[Tensor]:
        return [run(model, inputs | {"hidden_states": x}) for x in videos]

    expected = outputs()
    assert not torch.equal(*expected)
    for kernel, one, (place, name, first) in product((False, True), slow, POINTS):
        late = mock.patch.object(
            place, name, slowly(getattr(place, name), first, partial(time.sleep, 0.1))
        )
        with (
            mapped(folder, _Copies=_LateCopies),
            mock.patch.object(
                attention, "attend_to", _attend_to if kernel else lambda *_, **__: False
            ),
            late if rank == one else mock.MagicMock(),
        ):
            assert all(map(torch.equal, outputs(), expected)), (kernel, one, name)
            assert _in_memory(model)


def _several_shapes(rank: int, folder: str) -> None:
    """An attention of another shape overwrites nothing that a slow rank reads."""
    spec, group = AttentionSpec(heads=2, attention="exact", impl="reference"), dist.group.WORLD
    with mapped(folder):
        for slow, (batch, tokens, dtype) in product(
            range(2), [(2, 12, torch.float32), (1, 4, torch.float16), (1, 12, torch.float32)]
        ):
            x = torch.randn(batch, tokens, 8).to(dtype)
            ulysses = Ulysses(group, spec, 4, [tokens, tokens])
            v, q, k = (ulysses.send(index, x + index) for index in (2, 0, 1))
            came = ulysses.to_heads(q, k, v)
            for index, heads in enumerate(came[:3]):
                if rank == slow:
                    time.sleep(0.05)
                assert torch.equal(ulysses.scatter(heads), (x + index).chunk(2, 2)[rank])
            out = ulysses.to_tokens(came[0])
            if rank == slow:
                time.sleep(0.1)
            assert torch.equal(out, x)
        assert symmetric.in_use(group)


def _after_a_failure(rank: int, folder: str) -> None:
    """What a failed call was sending does not reach the next."""
    expected, model = _through_the_group("exact", 2), _split(T2V.model())
    with mapped(folder, _Copies=_LateCopies):
        run(model, T2V.inputs(2))
        to_k = model.blocks[1].attn1.to_k
        with (
            mock.patch.object(to_k, "forward", side_effect=MemoryError),
            pytest.raises(MemoryError),
        ):
            run(model, T2V.inputs(1))
        assert torch.equal(run(model, T2V.inputs(2)), expected[0])
        assert _in_memory(model)


# --- ranks that cannot share ---------------------------------------------------------------------


def _cannot_share(rank: int, folder: str, why: str) -> None:
    """All ranks exchange through the group."""

    def allocate(*_: object) -> Any:
        raise RuntimeError("no memory")

    def map_(own: Tensor, group: Any) -> Any:
        flat, barrier = _map(Path(folder), own, group)
        if why == "map":
            raise RuntimeError("cannot be mapped")
        return [x.clone() for x in flat], barrier  # What is written does not arrive.

    failing: dict[str, Any] = {
        "allocate": {"_allocate": allocate},
        "map": {"_map": map_},
        "arrive": {"_map": map_},
        "hosts": {"_boot": lambda device: f"machine {rank}", "_allocate": None},
        "switch": {},
    }[why]
    fails_here = rank == 1 or why == "hosts"
    switch = {symmetric.OFF: str(rank)} if why == "switch" else {}
    expected = _through_the_group("int8", 1, 1)
    warnings: list[str] = []
    with (
        mapped(folder, **failing if fails_here else {}),
        mock.patch.dict(os.environ, switch),
    ):
        symmetric._log.addFilter(lambda line: warnings.append(line.getMessage()))
        assert symmetric._log.isEnabledFor(logging.WARNING)
        assert all(map(torch.equal, _through_the_group("int8", 1, 1), expected))
    failed = why not in ("hosts", "switch")  # It is tried once.
    assert ["through the process group" in text for text in warnings] == [True] * failed


@pytest.mark.parametrize(
    ("links", "joined"),
    [
        ([[0, 2], [2, 0]], True),
        ([[0, 2, 0], [2, 0, 0], [0, 0, 0]], False),
        ([[0]], False),  # a process that sees its own GPU only, or a part of one (MIG)
        (ValueError("no NVML"), False),
    ],
)
def test_memory_is_shared_where_nvlink_joins_all_gpus(links: Any, joined: bool) -> None:
    detect = mock.Mock(side_effect=[SimpleNamespace(matrix=links)])
    if isinstance(links, Exception):
        detect.side_effect = links
    private = torch._C._distributed_c10d
    with (
        mock.patch.object(torch.version, "cuda", "13.0"),
        mock.patch.object(private, "_detect_dma_connectivity", detect, create=True),
    ):
        found = symmetric._boot(torch.device("cuda", 0))
    assert (found is not None) == (joined and symmetric._BOOT_ID.exists())
    assert detect.called


def _kept_inputs(rank: int, folder: str) -> None:
    """A hook inside the output projection, as below a LoRA, keeps what it saw."""
    model, kept = _split(T2V.model()), list[Tensor]()
    for block in model.blocks:
        linear = block.attn1.to_out[0]
        linear.register_forward_hook(lambda module, args, out: kept.append(args[0]))
        block.attn1.to_out[0] = nn.Sequential(linear)
    with mapped(folder):
        run(model, T2V.inputs())
        assert _in_memory(model)
        assert len(kept) == 2 and not torch.equal(*kept)
        expected = [x.clone() for x in kept]
        run(model, {**T2V.inputs(), "timestep": torch.tensor([7, 7])})
        assert all(map(torch.equal, kept, expected))


def _undone(rank: int, folder: str) -> None:
    """The memory is freed when parallel is undone and the card has no error."""
    pipe = SimpleNamespace(transformer=T2V.model())
    patch_model(pipe.transformer, attention="int8", guard=False)
    broken = mock.patch.object(symmetric._Memory, "synchronize", side_effect=RuntimeError)
    with mapped(folder), mock.patch.object(torch.accelerator, "device_count", return_value=2):
        for _ in range(2):
            with parallel(pipe, ulysses=2):
                run(pipe.transformer, T2V.inputs())
                assert _in_memory(pipe.transformer)
                memory = ref(symmetric._memories[dist.group.WORLD])
            assert memory() is None
        with pytest.raises(ZeroDivisionError), broken, parallel(pipe, ulysses=2):
            run(pipe.transformer, T2V.inputs())
            raise ZeroDivisionError
        assert symmetric.in_use(dist.group.WORLD)  # Freeing it, torch would end the process.


def _waits_in_vain(rank: int, folder: str) -> None:
    """A rank waits for another no longer than the group's timeout."""

    def of(rank: int, nbytes: int) -> Tensor:
        return torch.from_file(str(Path(folder, str(rank))), True, nbytes, dtype=torch.uint8)

    def rendezvous(own: Tensor, group: Any) -> Any:
        def barrier(channel: int = 0, timeout_ms: int = 0) -> None:
            wait = timedelta(milliseconds=timeout_ms or 1e9)
            dist.monitored_barrier(group, wait, wait_all_ranks=True)

        return SimpleNamespace(
            get_buffer=lambda rank, size, dtype: of(rank, *size), barrier=barrier
        )

    torchs = pytest.importorskip("torch.distributed._symmetric_memory")
    own: dict[str, Any] = {"_map": symmetric._map}
    own["_allocate"] = lambda nbytes, device: of(rank, nbytes)
    group = dist.new_group(timeout=timedelta(seconds=5), backend="gloo")
    with mapped(folder, **own), mock.patch.object(torchs, "rendezvous", rendezvous):
        shared = symmetric.shared(group, torch.randn(1, 4, 8))
        assert shared is not None
        if rank == 0:
            begun = time.monotonic()
            with pytest.raises(RuntimeError, match="monitoredBarrier"):
                shared.barrier()
            assert time.monotonic() - begun < 60


#: Name -> number of ranks, and what each of them does with a folder for its memory.
WAYS: dict[str, tuple[int, Callable[..., None]]] = {
    "slow": (2, partial(_one_is_slow, slow=(0, 1))),
    "slow-of-three": (3, partial(_one_is_slow, slow=(1,))),
    "shapes": (2, _several_shapes),
    "failure": (2, _after_a_failure),
    "hook": (2, _kept_inputs),
    "undone": (2, _undone),
    "timeout": (2, _waits_in_vain),
    **{f"cannot-{why}": (2, partial(_cannot_share, why=why))
       for why in ("allocate", "map", "arrive", "hosts", "switch")},
}  # fmt: skip


@pytest.mark.parametrize("name", WAYS)
def test_ranks_that_share_memory(name: str, tmp_path: Path) -> None:
    ranks, way = WAYS[name]
    on_ranks(ranks, way, str(tmp_path))
