"""Run the attention of a video transformer in fused int8 kernels, with one line.

    from turbo_rcm_patch import patch_model
    report = patch_model(pipe.transformer)

The public names load on first use. Importing this package imports neither triton nor diffusers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from turbo_rcm_patch.checkpoints.extra import load_extra, unload_extra
    from turbo_rcm_patch.config import PatchConfig
    from turbo_rcm_patch.ops.sageattn import sageattn
    from turbo_rcm_patch.patching.backend import register_backend, unregister_backend
    from turbo_rcm_patch.patching.find import find_pairs
    from turbo_rcm_patch.patching.int8_only import keep_int8_only
    from turbo_rcm_patch.patching.patch import (
        is_patched,
        patch_model,
        patched,
        refresh,
        report_of,
        unpatch_model,
    )
    from turbo_rcm_patch.patching.report import PairTable, PatchReport
    from turbo_rcm_patch.sampling.scheduler import RCMScheduler
    from turbo_rcm_patch.skip import SkipPair

__version__: Final = "0.1.0"

__all__ = [
    "PairTable",
    "PatchConfig",
    "PatchReport",
    "RCMScheduler",
    "SkipPair",
    "__version__",
    "find_pairs",
    "is_patched",
    "keep_int8_only",
    "load_extra",
    "patch_model",
    "patched",
    "refresh",
    "register_backend",
    "report_of",
    "sageattn",
    "unload_extra",
    "unpatch_model",
    "unregister_backend",
]

_HOME: Final = {
    "PairTable": "turbo_rcm_patch.patching.report",
    "PatchConfig": "turbo_rcm_patch.config",
    "PatchReport": "turbo_rcm_patch.patching.report",
    "RCMScheduler": "turbo_rcm_patch.sampling.scheduler",
    "SkipPair": "turbo_rcm_patch.skip",
    "find_pairs": "turbo_rcm_patch.patching.find",
    "is_patched": "turbo_rcm_patch.patching.patch",
    "keep_int8_only": "turbo_rcm_patch.patching.int8_only",
    "load_extra": "turbo_rcm_patch.checkpoints.extra",
    "patch_model": "turbo_rcm_patch.patching.patch",
    "patched": "turbo_rcm_patch.patching.patch",
    "refresh": "turbo_rcm_patch.patching.patch",
    "register_backend": "turbo_rcm_patch.patching.backend",
    "report_of": "turbo_rcm_patch.patching.patch",
    "sageattn": "turbo_rcm_patch.ops.sageattn",
    "unload_extra": "turbo_rcm_patch.checkpoints.extra",
    "unpatch_model": "turbo_rcm_patch.patching.patch",
    "unregister_backend": "turbo_rcm_patch.patching.backend",
}


#: A saved pipeline names this module for `RCMScheduler`, and diffusers then looks for
#: `SchedulerMixin` in it. Not a public name.
_HOME_OF_BASES: Final = {"SchedulerMixin": "diffusers.schedulers.scheduling_utils"}


def __getattr__(name: str) -> object:
    if name in _HOME_OF_BASES:
        return getattr(import_module(_HOME_OF_BASES[name]), name)
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
