"""Finding skip pairs in a model, running them fused, and putting everything back."""

from __future__ import annotations

from turbo_rcm_patch.patching.find import find_pairs
from turbo_rcm_patch.patching.patch import (
    is_patched,
    patch_model,
    patched,
    refresh,
    report_of,
    sla_as_defined,
    unpatch_model,
)
from turbo_rcm_patch.patching.report import GuardLog, GuardRecord, PairTable, PatchReport

__all__ = [
    "GuardLog",
    "GuardRecord",
    "PairTable",
    "PatchReport",
    "find_pairs",
    "is_patched",
    "patch_model",
    "patched",
    "refresh",
    "report_of",
    "sla_as_defined",
    "unpatch_model",
]
