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
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from turbo_rcm_patch.patching.agreement import gather_objects, on

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
        rank, ranks = memory.rank, len(memory.flat)
        width, size = channels // ranks, x.numel() * x.element_size()
        part = memory.flat[rank].numel() // 4

        def of_ranks(index: int, *shape: int) -> list[Tensor]:
            start = index * part
            return [flat[start : start + size].view(x.dtype).view(shape) for flat in memory.flat]

        qkv = [of_ranks(index, batch, ranks * n, width) for index in range(3)]
        out = of_ranks(3, batch, n, channels)
        tokens, heads = slice(rank * n, (rank + 1) * n), slice(rank * width, (rank + 1) * width)
        self.qkv = tuple(tensors[rank] for tensors in qkv)
        self.out = out[rank]
        self.to_out = tuple(tensor[..., heads] for tensor in out)
        self._to_qkv = [tuple(tensor[:, tokens] for tensor in tensors) for tensors in qkv]
        # Not the memory, which holds this: in a cycle it would wait for the garbage collector.
        self._rank, self._copies, self._barrier = rank, memory.copies, memory.barrier

    def write(self, index: int, kernel: Callable[[tuple[Tensor, ...]], None]) -> None:
        """Give every rank its heads of the local tokens of q, k or v.

        q and v are written here, and copied while the next product is computed. k would have to be
        waited for at once, so the kernel writes it there.

        Args:
            index: 0 for q, 1 for k, 2 for v.
            kernel: Writes to the tensors [B, n, H*D / P] of the ranks.
        """
        to = self._to_qkv[index]
        if index == 1 or len(to[0]) > 1:  # Tokens of several samples are no single copy.
            kernel(to)
            return
        others = [*range(self._rank + 1, len(to)), *range(self._rank)]  # not all to the same one
        staged = tuple(torch.empty_like(x) if rank in others else x for rank, x in enumerate(to))
        kernel(staged)
        with self._copies.on_side_stream(staged):
            for rank in others:
                to[rank].copy_(staged[rank])

    def barrier(self) -> None:
        """Make the stream wait until all ranks are here. What they wrote is there then."""
        self._copies.join()
        self._barrier()


class _Copies:
    """Copies to other ranks, on a stream beside the current one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)  # Streams of `torch.cpu` do nothing.
        self._staged: list[tuple[Tensor, ...]] = []
        self._stream: Any = None
        self._side_stream = self._module.Stream(device)

    def begin(self) -> None:
        """Order copies after the work of the current stream, and that after all work before."""
        stream = self._module.current_stream(self._device)
        if self._stream is not None and stream != self._stream:
            stream.wait_stream(self._stream)  # The same memory was used there before.
        self._stream = stream
        self.join()  # copies that a failed call left

    def on_side_stream(self, staged: tuple[Tensor, ...]) -> AbstractContextManager[Any]:
        """Return a context for the copies of tensors, which are kept until they are joined."""
        self._staged.append(staged)
        self._side_stream.wait_stream(self._stream)
        context: AbstractContextManager[Any] = self._module.stream(self._side_stream)
        return context

    def join(self) -> None:
        """Make the stream wait for the copies."""
        if self._staged:
            self._stream.wait_stream(self._side_stream)
        self._staged.clear()


class _Memory:
    """The memory of a group: a flat tensor of bytes of each rank, in four parts of one size."""

    def __init__(self, rank: int, flat: list[Tensor], barrier: Callable[[], None]) -> None:
        self.rank, self.flat, self.barrier = rank, flat, barrier
        self.device = flat[rank].device
        self.copies = _Copies(self.device)
        self._shared: dict[Any, Shared] = {}

    def fits(self, nbytes: int, device: torch.device) -> bool:
        return self.flat[self.rank].numel() >= nbytes and self.device == device

    def synchronize(self) -> None:
        torch.get_device_module(self.device).synchronize(self.device)

    def shared(self, x: Tensor) -> Shared:
        """Return the tensors for local tokens like x [B, n, H*D]."""
        self.copies.begin()
        key = x.shape, x.dtype
        if key not in self._shared:
            with torch.inference_mode(False):  # Later calls may be outside of that mode.
                self._shared[key] = Shared(self, x)
        return self._shared[key]


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
        with torch.inference_mode(False), on(x.device):
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


def _set_up(group: Any, nbytes: int, device: torch.device) -> _Memory | None:
    """Map memory of every rank, on all of them or on none."""
    hosts = gather_objects(group, None if os.environ.get(OFF) == "1" else _boot(device), device)
    if None in hosts or len(set(hosts)) > 1:
        return None
    steps: tuple[Callable[[Any], Any], ...] = (
        lambda _: _allocate(nbytes, device),
        lambda buffer: _Memory(group.rank(), *_map(buffer, group)),
        _tried,
    )
    error, result = "", None
    for step in steps:
        try:
            result = step(result)
        except Exception as failure:  # of torch's private functions, too
            error = str(failure) or type(failure).__name__
        # Only after a step that succeeded on all ranks may one wait for another.
        if not all(gather_objects(group, not error, device)):
            _log.warning(
                "The ranks exchange through the process group, because their memory could not be "
                "shared: %s",
                error or "another rank failed",
            )
            return None
    return result


def _boot(device: torch.device) -> str | None:
    """Return what identifies this host and container, or None if its GPUs are not joined by
    NVLink. The ranks hand over their memory by files of the container and numbers of processes."""
    if device.type != "cuda" or torch.version.cuda is None:
        return None
    try:
        from torch._C import _autograd, _distributed_c10d

        detect: Any = _distributed_c10d._detect_dma_connectivity  # type: ignore[attr-defined]
        links = detect(_autograd.DeviceType.CUDA, "nvlink").matrix
        host = [_BOOT_ID.read_text(), *map(os.readlink, _NAMESPACES)]
    except Exception:  # It is not torch's public API, and the files are Linux's.
        return None
    # A process that sees one GPU cannot tell. torch refuses ranks whose GPUs have one number.
    ranks = range(len(links))
    joined = len(ranks) > 1 and all(links[i][j] for i in ranks for j in ranks if i != j)
    return " ".join(host) if joined else None


def _allocate(nbytes: int, device: torch.device) -> Tensor:
    from torch._C._distributed_c10d import _SymmetricMemory

    torch.cuda.empty_cache()  # It is not taken from what torch keeps.
    memory: Tensor = _SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, device)
    return memory


def _map(buffer: Any, group: Any) -> tuple[list[Tensor], Callable[[], None]]:
    """Return the memory of all ranks, and a barrier among them on the current stream.

    It ends with an error of the GPU after the group's timeout; by default it would wait for ever.
    """
    from torch.distributed._symmetric_memory import rendezvous

    before = os.environ.get(_NO_MULTICAST)
    os.environ[_NO_MULTICAST] = "1"
    try:
        handle = rendezvous(buffer, group)
    finally:
        del os.environ[_NO_MULTICAST]
        if before is not None:
            os.environ[_NO_MULTICAST] = before
    flat = [
        buffer
        if rank == group.rank()
        else handle.get_buffer(rank, (buffer.numel(),), buffer.dtype)
        for rank in range(group.size())
    ]
    timeout = group._get_backend(buffer.device).options._timeout
    return flat, partial(handle.barrier, timeout_ms=math.ceil(timeout.total_seconds() * 1000))


def _tried(memory: _Memory) -> _Memory:
    """Return a memory if the bytes that every rank writes to it arrive."""
    ranks, received = len(memory.flat), memory.flat[memory.rank]
    for flat in memory.flat:
        flat[memory.rank] = memory.rank
    memory.barrier()
    if received[:ranks].tolist() != [*range(ranks)]:
        raise RuntimeError("a byte that a rank wrote did not arrive")
    return memory
