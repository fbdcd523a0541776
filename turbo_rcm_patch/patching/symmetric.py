"""Memory of each rank to which the others write, for the exchanges of an attention.

Where NVLink joins the GPUs of one host, torch's symmetric memory maps it into every process. A
kernel then stores each part of its result where the rank that needs it will read it. Nothing is
packed, unpacked or sent, and a result travels while the rest of it is still computed. NVLink's
multicast is not used.

Nothing is overwritten before it was read, however slow a rank is. Each rank's stream runs

    write q, k, v | barrier | read q, k, v, write out | barrier | read out | write the next q, k, v

- q, k and v are read before the second barrier, and written next after it.
- out is read before the next attention's first barrier, and written next after that.
- They lie in four parts that do not depend on the shape, so this holds between two shapes, too.
- Copies that a failed call left are waited for before a rank writes again.

Elsewhere, and if any rank cannot set it up, exchanges go through the process group.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

_log = logging.getLogger(__name__)

#: Bytes to whose multiples tensors are aligned.
_ALIGNED_TO: Final = 256
#: Changes with each start of a Linux machine, and is the same in all its containers.
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
#: Differ between containers.
_NAMESPACES: Final = "/proc/self/ns/mnt", "/proc/self/ns/pid"
#: Keeps torch from NVLink's multicast, which these exchanges do not need.
_NO_MULTICAST: Final = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
#: "1", on any rank: exchanges go through the process group.
OFF: Final = "TURBO_RCM_PATCH_NO_SYMMETRIC_MEMORY"


class Shared:
    """The tensors of an attention over N = P*n tokens on P ranks.

    Attributes:
        qkv: Of this rank: all tokens of its heads, [B, N, H*D / P] three times.
        out: Of this rank: its tokens of all heads, [B, n, H*D].
        to_out: Of each rank: its tokens of the heads that this rank computes, [B, n, H*D / P].
    """

    def __init__(self, memory: _Memory, x: Tensor) -> None:
        batch, n, channels = x.shape
        own, ranks = memory.rank, len(memory.flat)
        width, size = channels // ranks, x.numel() * x.element_size()
        part = memory.flat[own].numel() // 4

        def tensors(index: int, *shape: int) -> list[Tensor]:
            begin = index * part
            return [flat[begin : begin + size].view(x.dtype).view(shape) for flat in memory.flat]

        qkv = [tensors(index, batch, ranks * n, width) for index in range(3)]
        out = tensors(3, batch, n, channels)
        self.qkv = tuple(of_rank[own] for of_rank in qkv)
        self.out = out[own]
        self.to_out = tuple(one[..., own * width : (own + 1) * width] for one in out)
        self._to_qkv = [tuple(x[:, own * n : (own + 1) * n] for x in of_rank) for of_rank in qkv]
        # Not the memory, which holds this: in a cycle it would wait for the garbage collector.
        self._rank, self._copies, self._barrier = own, memory.copies, memory.barrier

    def write(self, index: int, kernel: Callable[[tuple[Tensor, ...]], None]) -> None:
        """Give every rank its heads of the local tokens of q, k or v.

        q and v are written here, and copied while the next product is computed. k would have to be
        waited for at once, so the kernel writes it there.

        Args:
            index: 0 for q, 1 for k, 2 for v.
            kernel: Writes to the tensors [B, n, H*D / P] of the ranks.
        """
        to, own = self._to_qkv[index], self._rank
        if index == 1 or len(to[0]) > 1:  # Rows of several samples are no single copy.
            return kernel(to)
        staged = tuple(x if rank == own else torch.empty_like(x) for rank, x in enumerate(to))
        kernel(staged)
        with self._copies.beside(staged):
            for rank in [*range(own + 1, len(to)), *range(own)]:  # not all to the same one
                to[rank].copy_(staged[rank])
        return None

    def barrier(self) -> None:
        """Make the stream wait until all ranks are here. What they wrote is there then."""
        self._copies.join()
        self._barrier()


class _Copies:
    """Copies to other ranks beside what the stream does next."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._staged: list[tuple[Tensor, ...]] = []
        self._stream: Any = None
        self._beside: Any = None
        if device.type == "cuda":
            self._beside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def follow(self) -> None:
        """Copy behind what the current stream does from now on, and that behind all before."""
        if self._beside is not None:
            stream = torch.cuda.current_stream(self._device)
            if self._stream is not None and stream != self._stream:
                stream.wait_stream(self._stream)  # The same memory was used there before.
            self._stream = stream
        self.join()  # what a failed call left

    def beside(self, staged: tuple[Tensor, ...]) -> AbstractContextManager[Any]:
        """Return a context for the copies of tensors, which are kept until they are joined."""
        self._staged.append(staged)
        if self._beside is None:
            return nullcontext()
        self._beside.wait_stream(self._stream)
        return torch.cuda.stream(self._beside)

    def join(self) -> None:
        """Make the stream wait for the copies."""
        if self._staged and self._beside is not None:
            self._stream.wait_stream(self._beside)
        self._staged.clear()


class _Memory:
    """The memory of a group: a flat tensor of bytes of each rank, in four parts of one size."""

    def __init__(self, rank: int, flat: list[Tensor], barrier: Callable[[], None]) -> None:
        self.rank, self.flat, self.barrier = rank, flat, barrier
        self.device = flat[rank].device
        self.copies = _Copies(self.device)
        self._made: dict[Any, Shared] = {}

    def fits(self, nbytes: int, device: torch.device) -> bool:
        return self.flat[self.rank].numel() >= nbytes and self.device == device

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def shared(self, x: Tensor) -> Shared:
        """Return the tensors for local tokens like x [B, n, H*D]."""
        self.copies.follow()
        key = x.shape, x.dtype
        if key not in self._made:
            with torch.inference_mode(False):  # Later calls may be outside of that mode.
                self._made[key] = Shared(self, x)
        return self._made[key]


#: The memory of each group; None where it could not be set up.
_memories: WeakKeyDictionary[Any, _Memory | None] = WeakKeyDictionary()


def shared(group: Any, x: Tensor) -> Shared | None:
    """Return the tensors for local tokens like x [B, n, H*D], or None if the ranks have none.

    The first call of a group, and one for more tokens than before, is a collective.
    """
    nbytes = 4 * math.ceil(x.numel() * x.element_size() / _ALIGNED_TO) * _ALIGNED_TO
    memory = _memories.get(group)
    if group not in _memories or (memory is not None and not memory.fits(nbytes, x.device)):
        memory = None
        _memories.pop(group, None)  # What is too small is freed first.
        with torch.inference_mode(False), _on(x.device):
            memory = _memories[group] = _set_up(group, nbytes, x.device)
    return None if memory is None else memory.shared(x)


def in_use(group: Any) -> bool:
    """Return True if the ranks of a group write to each other's memory."""
    return _memories.get(group) is not None


def release() -> None:
    """Forget all memory, so that it is freed.

    It is kept after an error of its GPU, because torch would end the process here, before Python
    shows that error.
    """
    try:
        for memory in filter(None, list(_memories.values())):
            memory.synchronize()
    except RuntimeError:
        return
    _memories.clear()


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which a GPU is the current one, as torch's functions expect."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _set_up(group: Any, nbytes: int, device: torch.device) -> _Memory | None:
    """Map memory of every rank, on all of them or on none."""
    boots = _gather(group, None if os.environ.get(OFF) == "1" else _boot(device))
    if None in boots or len(set(boots)) > 1:
        return None
    why, made = "", None

    def done(step: Callable[[Any], Any]) -> bool:
        """Return True if a step succeeded on all ranks. Only then may one wait for another."""
        nonlocal why, made
        try:
            made = step(made)
        except Exception as error:  # of torch's private functions, too
            why = str(error) or type(error).__name__
        return all(_gather(group, not why))

    if (
        done(lambda _: _allocate(nbytes, device))
        and done(lambda own: _Memory(group.rank(), *_map(own, group)))
        and done(_tried)
    ):
        return made
    _log.warning(
        "The ranks exchange through the process group, because their memory could not be shared: "
        "%s", why or "another rank failed",
    )  # fmt: skip
    return None


def _gather(group: Any, value: object) -> list[Any]:
    every: list[Any] = [None] * group.size()
    dist.all_gather_object(every, value, group=group)
    return every


def _boot(device: torch.device) -> str | None:
    """Return what identifies this host and container, or None if its GPUs are not joined by
    NVLink. The ranks hand over their memory by files of the container and numbers of processes."""
    if device.type != "cuda" or torch.version.cuda is None:
        return None
    try:
        from torch._C import _autograd, _distributed_c10d

        detect: Any = _distributed_c10d._detect_dma_connectivity  # type: ignore[attr-defined]
        links = detect(_autograd.DeviceType.CUDA, "nvlink").matrix
        here = [_BOOT_ID.read_text(), *map(os.readlink, _NAMESPACES)]
    except Exception:  # It is not torch's public API, and the files are Linux's.
        return None
    # A process that sees one GPU cannot tell. torch refuses ranks whose GPUs have one number.
    ranks = range(len(links))
    joined = len(ranks) > 1 and all(links[i][j] for i in ranks for j in ranks if i != j)
    return " ".join(here) if joined else None


def _allocate(nbytes: int, device: torch.device) -> Tensor:
    from torch._C._distributed_c10d import _SymmetricMemory

    torch.cuda.empty_cache()  # It is not taken from what torch keeps.
    made: Tensor = _SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, device)
    return made


def _map(own: Any, group: Any) -> tuple[list[Tensor], Callable[[], None]]:
    """Return the memory of all ranks, and a barrier among them on the current stream.

    It ends with an error of the GPU after the group's timeout; by default it would wait for ever.
    """
    from torch.distributed._symmetric_memory import rendezvous

    before = os.environ.get(_NO_MULTICAST)
    os.environ[_NO_MULTICAST] = "1"
    try:
        handle = rendezvous(own, group)
    finally:
        del os.environ[_NO_MULTICAST]
        if before is not None:
            os.environ[_NO_MULTICAST] = before
    size, rank = (own.numel(),), group.rank()
    every = [
        own if i == rank else handle.get_buffer(i, size, own.dtype) for i in range(group.size())
    ]
    timeout = group._get_backend(own.device).options._timeout
    return every, partial(handle.barrier, timeout_ms=math.ceil(timeout.total_seconds() * 1000))


def _tried(memory: _Memory) -> _Memory:
    """Return a memory if what every rank writes to it arrives."""
    ranks, own = len(memory.flat), memory.flat[memory.rank]
    for one in memory.flat:
        one[memory.rank] = memory.rank
    memory.barrier()
    if own[:ranks].tolist() != [*range(ranks)]:
        raise RuntimeError("what a rank wrote did not arrive")
    return memory
