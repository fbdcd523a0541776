"""Kernels in Gluon, which only some releases of Triton can build."""

from __future__ import annotations

import warnings
from functools import cache
from importlib import import_module
from types import ModuleType

import triton

__all__ = ["hopper_module"]

#: The first release whose Gluon says what these kernels say.
_SINCE = (3, 6)


@cache
def hopper_module(name: str, what: str) -> ModuleType | None:
    """A module of kernels for compute capability 9.0, or None, with a warning, where this release
    of Triton cannot build them: the portable kernel runs then.

    Args:
        name: Of the module, in this package.
        what: What is faster with it, for the warning.
    """
    try:
        if tuple(map(int, triton.__version__.split(".")[:2])) < _SINCE:
            raise ImportError(f"it came with {'.'.join(map(str, _SINCE))}")
        return import_module(f"turbo_rcm_patch.kernels.{name}")
    except (ImportError, AttributeError) as error:  # Gluon is experimental: names come and go
        warnings.warn(
            f"Triton {triton.__version__} lacks what a faster {what} for Hopper needs ({error}): "
            "the portable kernel runs instead.",
            stacklevel=2,
        )
        return None
