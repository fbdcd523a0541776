"""Run the attention of a video transformer in fused int8 kernels, with one line.

    from turbo_rcm_patch import patch_model
    report = patch_model(pipe.transformer)

The public names load on first use. Importing this package imports neither triton nor diffusers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

from turbo_rcm_patch.lazy import loading_names

if TYPE_CHECKING:
    from turbo_rcm_patch.checkpoints.extra import load_extra, unload_extra
    from turbo_rcm_patch.config import PatchConfig
    from turbo_rcm_patch.diffusers_backend import register_backend, unregister_backend
    from turbo_rcm_patch.diffusers_parallel import Parallel, parallel
    from turbo_rcm_patch.ops.sageattn import sageattn
    from turbo_rcm_patch.patching.patch import (
        find_pairs,
        is_patched,
        keep_int8_only,
        patch_model,
        patched,
        refresh,
        report_of,
        unpatch_model,
    )
    from turbo_rcm_patch.patching.report import PairTable, PatchReport
    from turbo_rcm_patch.skip import SkipPair
    from turbo_rcm_patch.video.scheduler import RCMScheduler

__version__: Final = "0.1.0"

__all__ = [
    "PairTable",
    "Parallel",
    "PatchConfig",
    "PatchReport",
    "RCMScheduler",
    "SkipPair",
    "__version__",
    "find_pairs",
    "is_patched",
    "keep_int8_only",
    "load_extra",
    "parallel",
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

_find = loading_names(
    __name__,
    {
        "checkpoints.extra": "load_extra unload_extra",
        "config": "PatchConfig",
        "ops.sageattn": "sageattn",
        "diffusers_backend": "register_backend unregister_backend",
        "diffusers_parallel": "Parallel parallel",
        "patching.patch": "find_pairs is_patched keep_int8_only patch_model patched refresh "
        "report_of unpatch_model",
        "patching.report": "PairTable PatchReport",
        "video.scheduler": "RCMScheduler",
        "skip": "SkipPair",
    },
)

#: A saved pipeline names this module for `RCMScheduler`, and diffusers then looks for
#: `SchedulerMixin` in it. Not a public name.
_HOME_OF_BASES: Final = {"SchedulerMixin": "diffusers.schedulers.scheduling_utils"}


def __getattr__(name: str) -> object:
    if name in _HOME_OF_BASES:
        return getattr(import_module(_HOME_OF_BASES[name]), name)
    return _find(name)


def __dir__() -> list[str]:
    return sorted(__all__)
