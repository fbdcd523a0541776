"""Some elements of each of many weights, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from turbo_rcm_patch.ops.launch import launch, target_of
from turbo_rcm_patch.ops.replay import replayed


@triton.jit
def samples_kernel(table_ptr, bits_ptr, SAMPLES: tl.constexpr):
    """bits[w, i] = the element i * last // (SAMPLES - 1) * unit behind the first of weight w.

    Grid: (weights,).
    table [weights, 3] int64: address of the first element, last, unit; bits [weights, SAMPLES],
    integers of the size of an element.
    """
    row = tl.program_id(0)
    entry = table_ptr + row * 3
    first = tl.load(entry).to(tl.pointer_type(bits_ptr.dtype.element_ty))
    offs_i = tl.arange(0, SAMPLES)
    place = offs_i * tl.load(entry + 1) // (SAMPLES - 1) * tl.load(entry + 2)
    tl.store(bits_ptr + row * SAMPLES + offs_i, tl.load(first + place))


@replayed
def samples(table: torch.Tensor, dtype: torch.dtype, count: int) -> torch.Tensor:
    """Read `count` elements of each weight of a table: [weights, count], integers of `dtype`."""
    target_of(table.device)
    bits = torch.empty(table.shape[0], count, dtype=dtype, device=table.device)
    launch(
        samples_kernel, (table.shape[0],), table.device,
        table_ptr=table, bits_ptr=bits, SAMPLES=count, num_warps=1,
    )  # fmt: skip
    return bits
