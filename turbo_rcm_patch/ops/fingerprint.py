"""Whether tensors still hold the bits they held: checksums taken where the tensors are.

A write through `.data`, an optimiser's fused step and a foreign kernel leave no trace in a
tensor's version or address, so only its bits can tell. Every 16 KiB have a checksum of 64 bits:
the sum of their 32-bit words, each times a fixed factor of its own place. The chunks are compared
one by one.

A single changed word is always seen, and so are two that were swapped. Any other change of a chunk
goes unseen only if its differences times their factors happen to add up to 0 in 64 bits; for
differences that know nothing of the factors that is a chance of 2^-32 at most (2^-64 where the
lowest bits change), and once for every chunk that changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from turbo_rcm_patch.config import Impl
from turbo_rcm_patch.ops.dispatch import resolve_impl
from turbo_rcm_patch.ops.modes import reference

if TYPE_CHECKING:
    from turbo_rcm_patch.kernels.portable.fingerprint import Table

#: Words of 32 bits that share a checksum; the kernel has the same constant.
CHUNK: Final = 4096
#: Bytes whose multiples the kernel takes.
_ALIGNED: Final = 16
_LOW: Final = 0xFFFFFFFF


class Fingerprints:
    """The checksums of some tensors of one device, to be taken again and again.

    On a GPU that is one launch over all of them, which reads every byte once, waits for nothing
    and allocates 8 bytes for 16 KiB.

    Attributes:
        counts: How many checksums each tensor has.
    """

    def __init__(self, tensors: Sequence[Tensor], impl: Impl = "auto") -> None:
        """Take note of where tensors lie. They have to lie there when checksums are taken.

        They are held weakly, because weights that are offloaded must give their memory back.

        Args:
            tensors: At least one, of any shapes and of dtypes of 16 or 32 bits, on one device.
            impl: "triton", "reference" or "auto". A tensor whose address or size is no multiple of
                16 bytes is read by torch in either.
        """
        self._tensors = list(map(reference, tensors))
        self.counts = [max(1, -(-tensor.nbytes // (4 * CHUNK))) for tensor in tensors]
        wide = resolve_impl(impl, tensors[0].device) == "triton"
        self._by_kernel = [wide and _serves(tensor) for tensor in tensors]
        self._table: Table | None = None
        if any(self._by_kernel):
            from turbo_rcm_patch.kernels.portable.fingerprint import Table

            chosen = zip(tensors, self._by_kernel, strict=True)
            self._table = Table([tensor for tensor, ours in chosen if ours])

    def take(self) -> Tensor:
        """The checksums now, int64 [sum of counts], tensor by tensor; nothing waits for them."""
        with torch.no_grad():
            if self._table is None:
                return torch.cat([_checksums(tensor) for tensor in self._tensors])
            from turbo_rcm_patch.kernels.portable.fingerprint import fingerprint

            ours = fingerprint(self._table)
            if all(self._by_kernel):
                return ours
            counts = [n for n, own in zip(self.counts, self._by_kernel, strict=True) if own]
            parts = iter(torch.split(ours, counts))
            chosen = zip(self._tensors, self._by_kernel, strict=True)
            return torch.cat(
                [next(parts) if own else _checksums(tensor) for tensor, own in chosen]
            )


def _serves(tensor: Tensor) -> bool:
    """Whether the kernel reads this tensor."""
    places = (tensor.data_ptr(), tensor.nbytes)
    return tensor.is_contiguous() and tensor.nbytes > 0 and not any(p % _ALIGNED for p in places)


def _checksums(held: Callable[[], Tensor | None]) -> Tensor:
    """What the kernel computes, in torch; int64 [chunks].

    Where 32-bit words do not divide a tensor its elements are words.
    """
    tensor = held()
    assert tensor is not None
    flat = tensor.detach().contiguous().flatten()
    split = (flat.storage_offset() * flat.element_size()) % 4 or flat.nbytes % 4
    words = flat.view(torch.int16 if flat.element_size() == 2 and split else torch.int32)
    chunks = max(1, -(-tensor.nbytes // (4 * CHUNK)))
    width = -(-words.numel() // chunks) if split else CHUNK
    padded = F.pad(words, (0, chunks * width - words.numel())).view(chunks, width)
    return (padded.long() * _multipliers(width, tensor.device)).sum(1)


def _multipliers(count: int, device: torch.device) -> Tensor:
    """The factors of the first places of a chunk, int64 [count]; see the kernel."""
    x = (torch.arange(1, count + 1, device=device) * 0x9E3779B1) & _LOW
    x = ((x ^ (x >> 15)) * 0x85EBCA77) & _LOW
    return torch.where(x >= 2**31, x - 2**32, x)
