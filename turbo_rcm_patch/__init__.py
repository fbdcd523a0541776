"""Run the attention of a video transformer in fused int8 kernels, with one line.

    from turbo_rcm_patch import patch_model
    report = patch_model(pipe.transformer)

The public names load on first use. Importing this package imports neither triton nor diffusers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

from turbo_rcm_patch.lazy import loading_names

__version__: Final = "0.1.0"

if TYPE_CHECKING:
    from turbo_rcm_patch.checkpoints.extra import load_extra as load_extra
    from turbo_rcm_patch.checkpoints.extra import unload_extra as unload_extra
    from turbo_rcm_patch.config import PatchConfig as PatchConfig
    from turbo_rcm_patch.diffusers_backend import register_backend as register_backend
    from turbo_rcm_patch.diffusers_backend import unregister_backend as unregister_backend
    from turbo_rcm_patch.diffusers_parallel import Parallel as Parallel
    from turbo_rcm_patch.diffusers_parallel import parallel as parallel
    from turbo_rcm_patch.ops.sageattn import sageattn as sageattn
    from turbo_rcm_patch.patching.patch import find_pairs as find_pairs
    from turbo_rcm_patch.patching.patch import is_patched as is_patched
    from turbo_rcm_patch.patching.patch import keep_int8_only as keep_int8_only
    from turbo_rcm_patch.patching.patch import patch_model as patch_model
    from turbo_rcm_patch.patching.patch import patched as patched
    from turbo_rcm_patch.patching.patch import refresh as refresh
    from turbo_rcm_patch.patching.patch import report_of as report_of
    from turbo_rcm_patch.patching.patch import unpatch_model as unpatch_model
    from turbo_rcm_patch.patching.report import PairTable as PairTable
    from turbo_rcm_patch.patching.report import PatchReport as PatchReport
    from turbo_rcm_patch.skip import SkipPair as SkipPair
    from turbo_rcm_patch.video.scheduler import RCMScheduler as RCMScheduler
else:
    _find, __all__ = loading_names(
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
    __all__ += ["__version__"]

    #: A saved pipeline names this module for `RCMScheduler`, and diffusers then looks for
    #: `SchedulerMixin` in it. Not a public name.
    _HOME_OF_BASES: Final = {"SchedulerMixin": "diffusers.schedulers.scheduling_utils"}

    def __getattr__(name: str) -> object:
        if name in _HOME_OF_BASES:
            return getattr(import_module(_HOME_OF_BASES[name]), name)
        return _find(name)

    def __dir__() -> list[str]:
        return sorted(__all__)
