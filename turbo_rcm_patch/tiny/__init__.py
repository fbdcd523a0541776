"""The shipped model: a complete, tiny Wan text-to-video pipeline, trained here from nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Final

__all__ = ["TINY_WAN"]

TINY_WAN: Final = Path(__file__).parent / "weights" / "wan"
