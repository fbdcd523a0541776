"""Import and run kernels in Gluon, which only some releases of Triton can build."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import TypeVar

import triton
from triton.errors import TritonError

_T = TypeVar("_T")
#: The first release of Triton whose Gluon has all functions that these kernels use.
_SINCE = (3, 6)


def has_hopper_kernels() -> bool:
    """Return True if this release of Triton has what kernels for compute capability 9.0 use."""
    return tuple(map(int, triton.__version__.split(".")[:2])) >= _SINCE


@cache
def hopper_module(load: Callable[[], ModuleType], what: str) -> ModuleType | None:
    """Import a module of kernels for compute capability 9.0.

    Return None, with a warning, if this release of Triton cannot build them; the portable kernel
    runs then.

    Args:
        load: Imports the module.
        what: What it makes faster, for the warning.
    """
    try:
        if not has_hopper_kernels():
            raise ImportError(f"it came with {'.'.join(map(str, _SINCE))}")
        return load()
    except (ImportError, AttributeError) as error:  # Gluon is experimental, and its names change
        warnings.warn(
            f"Triton {triton.__version__} lacks what a faster {what} for Hopper needs ({error}): "
            "the portable kernel runs instead.",
            stacklevel=2,
        )
        return None


def hash_compiler() -> None:
    """Let Triton hash its own files, which takes 0.4 s, once a process."""
    hashes = getattr(triton.runtime.cache, "triton_key", None)
    if hashes is not None:
        hashes()


#: What kernels would have made faster that did not compile.
_failed: set[str] = set()


def ran(
    load: Callable[[], ModuleType], what: str, run: Callable[[ModuleType], _T]
) -> tuple[_T] | None:
    """Run kernels for compute capability 9.0 if this release of Triton can compile them.

    Gluon's front and back end change between releases. A kernel that does not compile warns once,
    and is not tried again.

    Args:
        load: Imports their module.
        what: What they make faster, for the warning.
        run: Launches them.

    Returns:
        What `run` returned, or None if the portable kernel has to run.
    """
    module = None if what in _failed else hopper_module(load, what)
    if module is None:
        return None
    try:
        return (run(module),)
    except (TritonError, RuntimeError) as error:
        if not isinstance(error, TritonError) and "PassManager" not in str(error):
            raise  # the launch failed, not the compiler
        _failed.add(what)
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        warnings.warn(
            f"Triton {triton.__version__} cannot compile a faster {what} for Hopper ({first}): "
            "the portable kernel runs instead.",
            stacklevel=2,
        )
        return None
