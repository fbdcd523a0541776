"""Loading a Wan or CogVideoX pipeline, generating with it, and comparing it with its patched self.

Names load on first use, because diffusers takes seconds to import. No submodule may have the name
of a function here.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from turbo_rcm_patch.sampling.comparison import Comparison, compare
    from turbo_rcm_patch.sampling.generation import Generation, generate
    from turbo_rcm_patch.sampling.int8_folder import load_int8_only
    from turbo_rcm_patch.sampling.load import load_pipeline
    from turbo_rcm_patch.sampling.measures import NetworkNumber, network_number
    from turbo_rcm_patch.sampling.scheduler import RCMScheduler
    from turbo_rcm_patch.sampling.settings import Settings
    from turbo_rcm_patch.sampling.source import Source
    from turbo_rcm_patch.sampling.verdict import Verdict, judge

__all__ = [
    "Comparison",
    "Generation",
    "NetworkNumber",
    "RCMScheduler",
    "Settings",
    "Source",
    "Verdict",
    "compare",
    "generate",
    "judge",
    "load_int8_only",
    "load_pipeline",
    "network_number",
]

_HOMES = {
    "Comparison": "comparison",
    "Generation": "generation",
    "NetworkNumber": "measures",
    "RCMScheduler": "scheduler",
    "Settings": "settings",
    "Source": "source",
    "Verdict": "verdict",
    "compare": "comparison",
    "generate": "generation",
    "judge": "verdict",
    "load_int8_only": "int8_folder",
    "load_pipeline": "load",
    "network_number": "measures",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
