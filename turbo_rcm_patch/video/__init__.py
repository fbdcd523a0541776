"""Loading a Wan or CogVideoX pipeline, generating with it, and comparing it with its patched self.

Names load on first use, because diffusers takes seconds to import. No submodule may have the name
of a function here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from turbo_rcm_patch.lazy import loading_names

if TYPE_CHECKING:
    from turbo_rcm_patch.video.comparison import Comparison, compare
    from turbo_rcm_patch.video.generation import Generation, generate
    from turbo_rcm_patch.video.judging import Judged, judge_folders
    from turbo_rcm_patch.video.load import load_pipeline
    from turbo_rcm_patch.video.lora import add_loras
    from turbo_rcm_patch.video.measures import NetworkNumber, network_number
    from turbo_rcm_patch.video.scheduler import RCMScheduler
    from turbo_rcm_patch.video.settings import Settings
    from turbo_rcm_patch.video.verdict import Verdict, judge

__all__ = [
    "Comparison",
    "Generation",
    "Judged",
    "NetworkNumber",
    "RCMScheduler",
    "Settings",
    "Verdict",
    "add_loras",
    "compare",
    "generate",
    "judge",
    "judge_folders",
    "load_pipeline",
    "network_number",
]

__getattr__ = loading_names(
    __name__,
    {
        "comparison": "Comparison compare",
        "generation": "Generation generate",
        "load": "load_pipeline",
        "judging": "Judged judge_folders",
        "lora": "add_loras",
        "measures": "NetworkNumber network_number",
        "scheduler": "RCMScheduler",
        "settings": "Settings",
        "verdict": "Verdict judge",
    },
)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
