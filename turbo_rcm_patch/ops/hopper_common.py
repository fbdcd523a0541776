"""Shared parts of the kernels for Hopper: names that differ between releases of Triton,
programmatic dependent launch (PDL), and a product's pieces in the order of its weight.

With PDL a kernel may begin while the kernel before it still runs. A kernel that is launched with
`launch_pdl=True` may read the other's results only after `grid_dependency_wait`. Without that
launch option both functions do nothing.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

# Renamed in Triton 3.8, 3.7 and 3.9.
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
cta_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
copy_async = (
    async_copy.async_load
    if hasattr(async_copy, "async_load")
    else async_copy.async_copy_global_to_shared
)


@gluon.jit
def grid_dependency_wait():
    """Wait until the kernel before this one has ended and its results can be read."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def launch_dependents():
    """Let the next kernel start in free resources once every program has called this."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // dummy $0", "=r", [],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def pieces_of(acc, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Split acc [ROWS, COLUMNS] into pieces of 64 x 32, row by row, without moving data."""
    if ROWS > 64:
        upper, lower = gl.split(acc.reshape([2, ROWS // 2, COLUMNS]).permute([1, 2, 0]))
        return pieces_of(upper, ROWS // 2, COLUMNS) + pieces_of(lower, ROWS // 2, COLUMNS)
    elif COLUMNS > 32:
        left, right = gl.split(acc.reshape([ROWS, 2, COLUMNS // 2]).permute([0, 2, 1]))
        return pieces_of(left, ROWS, COLUMNS // 2) + pieces_of(right, ROWS, COLUMNS // 2)
    else:
        return (acc,)


@gluon.jit
def unpermuted(part, PERMUTED: gl.constexpr):
    """Return a piece [64, 32] with its columns in order, undoing that of `describe_weight`."""
    if PERMUTED:
        part = part.reshape([64, 4, 4, 2]).permute([0, 2, 1, 3]).reshape([64, 32])
        # The values stay in their threads, with eight neighbours in successive registers.
        words: gl.constexpr = gl.DistributedLinearLayout(
            [[0, 1], [0, 2], [0, 4], [8, 0]],
            [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
            [[16, 0], [32, 0]],
            [],
            [64, 32],
        )
        part = gl.convert_layout(part, words, assert_trivial=True)
    return part


def programs(device: torch.device) -> int:
    if device.type != "cuda":
        return 4  # for tests, which record launches without a GPU
    return torch.cuda.get_device_properties(device).multi_processor_count
