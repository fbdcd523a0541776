"""Loading a Wan or CogVideoX pipeline, generating with it, and comparing it with its patched self.

Names load on first use, because diffusers takes seconds to import. No submodule may have the name
of a function here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from turbo_rcm_patch.lazy import loading_names

if TYPE_CHECKING:
    from turbo_rcm_patch.video.comparison import compare as compare
    from turbo_rcm_patch.video.generation import Generation as Generation
    from turbo_rcm_patch.video.generation import generate as generate
    from turbo_rcm_patch.video.judging import judge_folders as judge_folders
    from turbo_rcm_patch.video.load import load_pipeline as load_pipeline
    from turbo_rcm_patch.video.measures import NetworkNumber as NetworkNumber
    from turbo_rcm_patch.video.measures import network_number as network_number
    from turbo_rcm_patch.video.result import Judged as Judged
    from turbo_rcm_patch.video.scheduler import RCMScheduler as RCMScheduler
    from turbo_rcm_patch.video.settings import Settings as Settings
    from turbo_rcm_patch.video.settings import SettingsOptions as SettingsOptions
    from turbo_rcm_patch.video.verdict import Verdict as Verdict
    from turbo_rcm_patch.video.verdict import judge as judge
else:
    __getattr__, __all__ = loading_names(
        __name__,
        {
            "comparison": "compare",
            "generation": "Generation generate",
            "load": "load_pipeline",
            "judging": "judge_folders",
            "measures": "NetworkNumber network_number",
            "result": "Judged",
            "scheduler": "RCMScheduler",
            "settings": "Settings SettingsOptions",
            "verdict": "Verdict judge",
        },
    )

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
