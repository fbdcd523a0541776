"""Find skip pairs in a model, run them fused, and restore the model."""

from __future__ import annotations

from turbo_rcm_patch.patching.guard_log import GuardLog, GuardRecord
from turbo_rcm_patch.patching.patch import (
    find_pairs,
    is_patched,
    keep_int8_only,
    patch_model,
    patched,
    refresh,
    report_of,
    sla_as_defined,
    unpatch_model,
)
from turbo_rcm_patch.patching.report import PairTable, PatchReport
from turbo_rcm_patch.patching.vae import share

__all__ = [
    "GuardLog",
    "GuardRecord",
    "PairTable",
    "PatchReport",
    "find_pairs",
    "is_patched",
    "keep_int8_only",
    "patch_model",
    "patched",
    "refresh",
    "report_of",
    "share",
    "sla_as_defined",
    "unpatch_model",
]
