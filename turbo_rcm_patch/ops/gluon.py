"""Import and run kernels in Gluon, which only some releases of Triton can build."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from importlib import import_module
from types import ModuleType

import torch
import triton
from triton.errors import TritonError

from turbo_rcm_patch.ops.launch import target_of

#: The first release of Triton whose Gluon has all functions that these kernels use.
_SINCE = (3, 6)


@cache
def hopper_module(name: str, what: str) -> ModuleType | None:
    """Import a module of kernels for compute capability 9.0.

    Return None, with a warning, if this release of Triton cannot build them; the portable kernel
    runs then.

    Args:
        name: Name of the module below `ops`.
        what: The operation that it makes faster, for the warning.
    """
    try:
        if tuple(map(int, triton.__version__.split(".")[:2])) < _SINCE:
            raise ImportError(f"it came with {'.'.join(map(str, _SINCE))}")
        return import_module(f"turbo_rcm_patch.ops.{name}")
    except (ImportError, AttributeError) as error:  # Gluon is experimental, and its names change
        warnings.warn(
            f"Triton {triton.__version__} lacks what a faster {what} for Hopper needs ({error}): "
            "the portable kernel runs instead.",
            stacklevel=2,
        )
        return None


def load_kernels(device: torch.device) -> None:
    """Import what the first forward on a GPU imports, and let Triton hash its own files."""
    for name in (
        "attention.triton",
        "residual.norm_triton",
        "residual.skip_triton",
        "residual.skip_norm_triton",
    ):
        import_module(f"turbo_rcm_patch.ops.{name}")
    if target_of(device) == ("cuda", 90):
        hopper_module("attention.hopper", "attention")
    hashes = getattr(triton.runtime.cache, "triton_key", None)  # 0.4 s, once a process
    if hashes is not None:
        hashes()


#: (module, operation) of kernels that did not compile.
_failed: set[tuple[str, str]] = set()


def ran_on_hopper(name: str, what: str, run: Callable[[ModuleType], bool | None]) -> bool:
    """Run kernels for compute capability 9.0 if this release of Triton can compile them.

    Gluon's front and back end change between releases. A kernel that does not compile warns once,
    and is not tried again.

    Args:
        name: Name of the module below `ops`.
        what: The operation that it makes faster, for the warning.
        run: Launches the kernels, or returns False if they do not support this call.

    Returns:
        True if the kernels ran. Otherwise the portable kernel has to run.
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
