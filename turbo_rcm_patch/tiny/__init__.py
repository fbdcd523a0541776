"""The shipped models: a tiny Wan and a tiny CogVideoX, complete text-to-video pipelines, trained
from scratch by `training/`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

__all__ = ["TINY_COGVIDEOX", "TINY_WAN"]

TINY_WAN: Final = Path(__file__).parent / "weights" / "wan"
TINY_COGVIDEOX: Final = Path(__file__).parent / "weights" / "cogvideox"
