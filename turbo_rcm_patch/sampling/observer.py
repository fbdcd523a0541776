"""Describe in words what a video shows, beside the numbers that measure drift."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

__all__ = ["Observer", "Seen", "as_asked"]


@dataclass(frozen=True, slots=True)
class Observer:
    """Says what a video shows. It has no part in the verdict.

    Attributes:
        asks: What a prompt asks for, e.g. "red circle, right".
        sees: What frames [F, H, W, 3] in 0..1 show, in the same words.
    """

    asks: Callable[[str], str]
    sees: Callable[[torch.Tensor], str]

    def look(self, prompt: str, baseline: torch.Tensor, patched: torch.Tensor) -> Seen:
        """Describe the two videos of a prompt."""
        return Seen(self.asks(prompt), self.sees(baseline), self.sees(patched))


@dataclass(frozen=True, slots=True)
class Seen:
    """What an observer found for one prompt.

    Attributes:
        asked: What the prompt asks for.
        baseline: What the unpatched model's video shows.
        patched: What the patched model's video shows.
    """

    asked: str
    baseline: str
    patched: str


def as_asked(seen: Sequence[Mapping[str, str]]) -> dict[str, int]:
    """Count the videos that show what was asked for, and the prompts with equal videos.

    Args:
        seen: `Seen` as dictionaries, one a prompt.
    """
    return {
        "prompts": len(seen),
        "baseline": sum(one["baseline"] == one["asked"] for one in seen),
        "patched": sum(one["patched"] == one["asked"] for one in seen),
        "same": sum(one["patched"] == one["baseline"] for one in seen),
    }
