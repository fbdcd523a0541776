"""How a compiled kernel is started fastest with Triton 3.6, whose launcher is known.

A launch with 26 arguments takes 21.6 us through `kernel[grid]`, 9.9 through the compiled kernel
and 6.6 through its function `run`. With two tensor descriptors a third of that is spent on making
them, on every call. The function that `run` calls with descriptors made is in a cell of a closure.
A kernel without scratch memory is started by that function, with descriptors kept by address.
Other kernels, and all kernels with other releases, are started by `run`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import triton

#: Descriptors kept for one argument of one launch, by address.
_MOST_DESCRIPTORS = 4096


class Starter(NamedTuple):
    """A function that starts a compiled kernel.

    Attributes:
        function: It takes the grid, the stream, `head`, and the arguments of the kernel.
        head: Its arguments between the stream and those of the kernel.
        layouts: The layouts of tensor descriptors where it takes them as the hardware does.
    """

    function: Callable[..., None]
    head: tuple[Any, ...]
    layouts: tuple[Any, ...]


def starter_of(compiled: Any) -> Starter:
    """Return the fastest function that starts a compiled kernel."""
    run, function, packed = compiled.run, compiled.function, compiled.packed_metadata
    public = Starter(run, (function, packed, None, None, None), ())
    if not triton.__version__.startswith("3.6.") or type(run).__name__ != "CudaLauncher":
        return public
    if run.global_scratch_size or run.profile_scratch_size:
        return public
    start, layouts = run.launch, ()
    if getattr(start, "__closure__", None):
        cells = dict(zip(start.__code__.co_freevars, start.__closure__, strict=True))
        start = cells["launcher"].cell_contents
        layouts = tuple(cells["tensordesc_meta"].cell_contents)
    if None in layouts:  # On targets without hardware copies descriptors are passed in parts.
        return public
    flags = run.launch_cooperative_grid, run.launch_pdl, None, None
    return Starter(start, (function, *flags, packed, None, None, None), layouts)


class _Address:
    """A replacement for the base of a tensor descriptor, of which only the address is read."""

    __slots__ = ("_address",)

    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        return self._address


class _Descriptor:
    """A copy of a tensor descriptor over other memory, with the attributes that Triton reads."""

    def __init__(self, like: Any, address: int) -> None:
        self.__dict__.update(vars(like))
        self.base = _Address(address)


def descriptors_like(recorded: Any, layout: Any | None) -> tuple[Callable[[int], Any], list[Any]]:
    """Return a function that makes descriptors like a recorded one, and keeps them by address.

    Args:
        recorded: The descriptor. Its memory is not kept, because it would live as long as these.
        layout: Its layout in `Starter.layouts`, or None for the public launcher.

    Returns:
        The function, and the numbers after the descriptor among the kernel's arguments.
    """
    kept = lru_cache(_MOST_DESCRIPTORS)
    like = _Descriptor(recorded, recorded.base.data_ptr())
    if layout is None:
        return kept(partial(_Descriptor, like)), []
    from triton.backends.nvidia.driver import make_tensordesc_arg

    def make(address: int) -> Any:
        return make_tensordesc_arg(_Descriptor(like, address), layout)[0]

    return kept(make), make_tensordesc_arg(like, layout)[1:]
