"""Kernels in Gluon, which only some releases of Triton can build."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from importlib import import_module
from types import ModuleType

import triton
from triton.errors import TritonError

#: The first release whose Gluon says what these kernels say.
_SINCE = (3, 6)


@cache
def hopper_module(name: str, what: str) -> ModuleType | None:
    """A module of kernels for compute capability 9.0, or None, with a warning, where this release
    of Triton cannot build them: the portable kernel runs then.

    Args:
        name: Of the module, in `hopper`.
        what: What is faster with it, for the warning.
    """
    try:
        if tuple(map(int, triton.__version__.split(".")[:2])) < _SINCE:
            raise ImportError(f"it came with {'.'.join(map(str, _SINCE))}")
        return import_module(f"turbo_rcm_patch.kernels.hopper.{name}")
    except (ImportError, AttributeError) as error:  # Gluon is experimental: names come and go
        warnings.warn(
            f"Triton {triton.__version__} lacks what a faster {what} for Hopper needs ({error}): "
            "the portable kernel runs instead.",
            stacklevel=2,
        )
        return None


#: Modules, and what is in them, whose kernels did not compile.
_failed: set[tuple[str, str]] = set()


def ran_on_hopper(name: str, what: str, run: Callable[[ModuleType], bool | None]) -> bool:
    """Run a module of kernels for compute capability 9.0, where this release of Triton has it and
    can compile it. Gluon's front and back end change between releases: what does not compile
    warns once, and is not tried again.

    Args:
        name: Of the module, in `hopper`.
        what: What is faster with it, for the warning.
        run: Launches its kernels; False says that they do not serve this call.

    Returns:
        Whether it ran; else the portable kernel has to.
    """
    module = None if (name, what) in _failed else hopper_module(name, what)
    if module is None:
        return False
    try:
        return run(module) is not False
    except (TritonError, RuntimeError) as error:
        if not isinstance(error, TritonError) and "PassManager" not in str(error):
            raise  # the launch failed, not the compiler
        _failed.add((name, what))
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        warnings.warn(
            f"Triton {triton.__version__} cannot compile a faster {what} for Hopper ({first}): "
            "the portable kernel runs instead.",
            stacklevel=2,
        )
        return False
