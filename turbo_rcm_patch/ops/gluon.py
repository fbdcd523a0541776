"""Import and run kernels in Gluon, which only some releases of Triton can build."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar, cast

import triton
from triton.errors import TritonError

_F = TypeVar("_F", bound=Callable[..., Any])
#: The first release of Triton whose Gluon has all functions that these kernels use.
_SINCE = (3, 6)
#: What kernels would have made faster that did not compile.
_failed: set[str] = set()


def has_hopper_kernels() -> bool:
    """Return True if this release of Triton has what kernels for compute capability 9.0 use."""
    return tuple(map(int, triton.__version__.split(".")[:2])) >= _SINCE


@cache
def _imported(load: Callable[[], Any], what: str) -> Any:
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


def hopper_function(load: Callable[[], _F], what: str) -> _F | None:
    """Import the launcher of kernels for compute capability 9.0.

    Return None if one of them did not compile before, or, with a warning, if this release of
    Triton cannot build them; the portable kernel runs then.

    Args:
        load: Imports and returns the launcher.
        what: The result that it computes faster, for the warning.
    """
    return None if what in _failed else cast("_F | None", _imported(load, what))


def is_compiler_error(error: Exception) -> bool:
    """Return True if Triton could not compile a kernel, and False if its launch failed.

    Gluon's front and back end change between releases.
    """
    in_pass = isinstance(error, RuntimeError) and "PassManager" in str(error)
    return isinstance(error, TritonError) or in_pass


def give_up(what: str, error: Exception) -> None:
    """Warn that a kernel does not compile, so that it is not tried again.

    Args:
        what: The result that it would have computed faster.
        error: The compiler's.
    """
    _failed.add(what)
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    warnings.warn(
        f"Triton {triton.__version__} cannot compile a faster {what} for Hopper ({first}): "
        "the portable kernel runs instead.",
        stacklevel=3,
    )


def hash_compiler() -> None:
    """Let Triton hash its own files, which takes 0.4 s, once a process."""
    hashes = getattr(triton.runtime.cache, "triton_key", None)
    if hashes is not None:
        hashes()
