"""The shipped models: a tiny Wan and a tiny CogVideoX, complete text-to-video pipelines, trained
from scratch by `training/`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from turbo_rcm_patch.tiny.prompts import DEMO_PROMPTS

__all__ = ["DEMO_PROMPTS", "TINY_COGVIDEOX", "TINY_WAN"]

TINY_WAN: Final = Path(__file__).parent / "weights" / "wan"
TINY_COGVIDEOX: Final = Path(__file__).parent / "weights" / "cogvideox"
