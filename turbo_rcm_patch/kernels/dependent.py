"""Programmatic dependent launch: a kernel may begin while the one before it still runs.

For kernels launched with `launch_pdl=True`. What the one before wrote may be read after
`wait_for_previous`; without the launch option both say nothing.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = ["let_next_begin", "wait_for_previous"]


@gluon.jit
def wait_for_previous():
    """Until the kernel before this one has ended and what it wrote can be read."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def let_next_begin():
    """Once every program has said so, the next kernel's programs take what room is left."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // dummy $0", "=r", [],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
