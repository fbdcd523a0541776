"""The prompts that the shipped models know, and the combinations that training never sees."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Final

SHAPES: Final = ("circle", "square", "triangle", "star", "ring", "cross")
# Pairwise at least 0.45 apart in RGB, one channel near 1: brightness alone finds the object.
COLOURS: Final = {
    "red": (0.95, 0.10, 0.10),
    "green": (0.10, 0.90, 0.15),
    "blue": (0.15, 0.25, 1.00),
    "yellow": (1.00, 0.95, 0.10),
    "magenta": (0.95, 0.10, 0.90),
    "cyan": (0.10, 0.95, 0.95),
    "orange": (1.00, 0.50, 0.05),
    "white": (1.00, 1.00, 1.00),
}
MOTIONS: Final = {
    "right": "moving right",
    "left": "moving left",
    "up": "moving up",
    "down": "moving down",
    "grow": "growing",
    "shrink": "shrinking",
    "circle": "circling",
    "bounce": "bouncing",
}
SIZES: Final = ("small", "large")
BACKGROUNDS: Final = ("black", "navy", "striped", "checkered")

_HELD_OUT_EVERY: Final = 4


@dataclass(frozen=True, slots=True)
class Clip:
    """A video in words of the vocabulary above."""

    shape: str
    colour: str
    motion: str
    size: str
    background: str


def is_held_out(shape: int, colour: int, motion: int) -> bool:
    """True if training leaves this combination out: one in four; every pair still occurs."""
    return (shape + colour + motion) % _HELD_OUT_EVERY == 0


def clips(*, held_out: bool) -> list[Clip]:
    """All clips whose (shape, colour, motion) is held out, or all that training may use."""
    chosen = []
    for (s, shape), (c, colour), (m, motion) in product(
        enumerate(SHAPES), enumerate(COLOURS), enumerate(MOTIONS)
    ):
        if is_held_out(s, c, m) == held_out:
            chosen += [Clip(shape, colour, motion, z, b) for z, b in product(SIZES, BACKGROUNDS)]
    return chosen


def caption(clip: Clip) -> str:
    """The one sentence that describes a clip."""
    return (
        f"a {clip.size} {clip.colour} {clip.shape} {MOTIONS[clip.motion]} "
        f"on a {clip.background} background"
    )


def words() -> list[str]:
    """Every word of the grammar, sorted."""
    phrases = [*SHAPES, *COLOURS, *MOTIONS.values(), *SIZES, *BACKGROUNDS, "a on background"]
    return sorted({word for phrase in phrases for word in phrase.split()})


# Held-out combinations only: every shape, colour and motion of the world appears at least once.
DEMO_PROMPTS: Final = (
    "a large red circle moving right on a black background",
    "a large cyan square moving up on a striped background",
    "a large yellow star circling on a navy background",
    "a small white triangle bouncing on a checkered background",
    "a large magenta ring moving right on a striped background",
    "a large green cross moving up on a navy background",
    "a large orange triangle growing on a black background",
    "a large blue star moving down on a checkered background",
    "a large white ring moving left on a navy background",
    "a small yellow circle shrinking on a striped background",
)
