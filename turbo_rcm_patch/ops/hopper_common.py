"""Shared parts of the kernels for Hopper: names that differ between releases of Triton, and
programmatic dependent launch (PDL).

With PDL a kernel may begin while the kernel before it still runs. A kernel that is launched with
`launch_pdl=True` may read the other's results only after `grid_dependency_wait`. Without that
launch option both functions do nothing.
"""

from __future__ import annotations

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
