"""Checksums of many tensors in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from turbo_rcm_patch.kernels.launch import launch, target_of

#: 32-bit words that share a checksum: 16 KiB.
CHUNK = 4096


@triton.jit
def multiplier(place):
    """What the word at a place within its chunk is multiplied by: int32, not 0, and another at
    every place. Both multiplications are by odd numbers, so the map is one to one; the shift
    between them keeps the factors of four places from adding up to nothing in a pattern."""
    x = (place + 1).to(tl.uint32) * 0x9E3779B1
    return ((x ^ (x >> 15)) * 0x85EBCA77).to(tl.int32, bitcast=True)


@triton.jit
def fingerprint_kernel(
    address_ptr, words_ptr, first_ptr, tensor_ptr, out_ptr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """sum over a chunk of word * multiplier(place), in 64 bits that wrap around.

    Grid: (chunks of all tensors,).
    address, words [T] int64: where a tensor lies, and its length in 32-bit words; first [T] int64:
    its first chunk; tensor [chunks] int32: whose chunk it is; out [chunks] int64.
    """
    chunk = tl.program_id(0)
    tensor = tl.load(tensor_ptr + chunk)
    start = (chunk - tl.load(first_ptr + tensor)) * CHUNK
    base = tl.load(address_ptr + tensor).to(tl.pointer_type(tl.int32)) + start
    rest = tl.minimum(tl.load(words_ptr + tensor) - start, CHUNK).to(tl.int32)
    place = tl.arange(0, CHUNK)
    # Address and length are multiples of 16 bytes, or the op reads the tensor: loads are wide.
    mask = place < tl.multiple_of(rest, 4)
    word = tl.load(tl.multiple_of(base, 16) + place, mask=mask, other=0)  # [CHUNK]
    total = tl.sum(word.to(tl.int64) * multiplier(place).to(tl.int64), axis=0)
    tl.store(out_ptr + chunk, total)


class Table:
    """Where tensors lie, on their device, for launches over all of them.

    It holds addresses, not tensors: whoever launches knows that the tensors are still there.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        words = [tensor.nbytes // 4 for tensor in tensors]
        chunks = [triton.cdiv(n, CHUNK) for n in words]
        first = [sum(chunks[:i]) for i in range(len(chunks))]
        self.device = tensors[0].device
        self.chunks = sum(chunks)
        addresses = [tensor.data_ptr() for tensor in tensors]
        rows = torch.tensor([addresses, words, first], dtype=torch.int64).to(self.device)
        self.addresses, self.words, self.first = rows.unbind(0)
        owners = torch.arange(len(chunks)).repeat_interleave(torch.tensor(chunks))
        self.owners = owners.to(self.device, torch.int32)


def fingerprint(table: Table) -> torch.Tensor:
    """A checksum for every chunk of CHUNK words of every tensor, int64 [chunks]."""
    target_of(table.device)
    out = torch.empty(table.chunks, dtype=torch.int64, device=table.device)
    launch(
        fingerprint_kernel,
        (table.chunks,),
        table.device,
        address_ptr=table.addresses,
        words_ptr=table.words,
        first_ptr=table.first,
        tensor_ptr=table.owners,
        out_ptr=out,
        CHUNK=CHUNK,
        num_warps=4,
        num_stages=1,
    )
    return out
