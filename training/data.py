"""Procedural videos, rendered analytically on whatever device trains: seeded, batched, unlimited.

A scene is a handful of numbers per clip; `render` turns scenes into pixels with signed distance
functions and one pixel of antialiasing. Scenes are drawn on the CPU, so that a seed means the same
videos on every device.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from typing import Final

import torch
from torch import Tensor

from turbo_rcm_patch.tiny.detector import motion_path, signed_distance
from turbo_rcm_patch.tiny.prompts import (
    BACKGROUNDS,
    COLOURS,
    MOTIONS,
    SHAPES,
    SIZES,
    Clip,
    caption,
    clips,
)

REFERENCE_SIZE: Final = 128  # every length below is in pixels of a video of this size
_RADIUS: Final = {"small": (16.0, 18.0), "large": (24.0, 26.5)}
_TRAVEL: Final = (44.0, 52.0)
_JITTER: Final = 5.0


@dataclass(slots=True)
class Scenes:
    """A batch of clips as numbers; every tensor is [B].

    Attributes:
        shape, colour, motion, size, background: int64 indices into the tuples of `prompts`.
        x, y: fp32, the middle of the path, in pixels of the reference size.
        radius: fp32 pixels.
        travel: fp32 pixels, the length of the path.
    """

    shape: Tensor
    colour: Tensor
    motion: Tensor
    size: Tensor
    background: Tensor
    x: Tensor
    y: Tensor
    radius: Tensor
    travel: Tensor

    def __len__(self) -> int:
        return self.shape.shape[0]

    def to(self, device: torch.device | str) -> Scenes:
        """The same scenes on another device."""
        return Scenes(*(getattr(self, f.name).to(device) for f in fields(self)))

    def clips(self) -> list[Clip]:
        """The scenes in words."""
        colours, motions = tuple(COLOURS), tuple(MOTIONS)
        columns = (self.shape, self.colour, self.motion, self.size, self.background)
        return [
            Clip(SHAPES[s], colours[c], motions[m], SIZES[z], BACKGROUNDS[b])
            for s, c, m, z, b in zip(*(column.tolist() for column in columns), strict=True)
        ]

    def captions(self) -> list[str]:
        """One caption per scene."""
        return [caption(clip) for clip in self.clips()]


@cache
def _table(held_out: bool) -> Tensor:
    colours, motions = tuple(COLOURS), tuple(MOTIONS)
    rows = [
        (
            SHAPES.index(c.shape),
            colours.index(c.colour),
            motions.index(c.motion),
            SIZES.index(c.size),
            BACKGROUNDS.index(c.background),
        )
        for c in clips(held_out=held_out)
    ]
    return torch.tensor(rows, dtype=torch.int64)


def sample_scenes(count: int, generator: torch.Generator, *, held_out: bool = False) -> Scenes:
    """Draw scenes uniformly over the allowed combinations.

    Args:
        count: Number of clips B.
        generator: A CPU generator; its state alone decides what comes out.
        held_out: Draw from the combinations that training never sees instead of from the others.
    """
    table = _table(held_out)
    rows = table[torch.randint(len(table), (count,), generator=generator)]
    uniform = torch.rand(4, count, generator=generator)
    ranges = torch.tensor([_RADIUS[name] for name in SIZES])[rows[:, 3]]
    middle = REFERENCE_SIZE / 2
    shape, colour, motion, size_word, background = rows.unbind(1)
    return Scenes(
        shape=shape,
        colour=colour,
        motion=motion,
        size=size_word,
        background=background,
        x=middle + _JITTER * (2 * uniform[0] - 1),
        y=middle + _JITTER * (2 * uniform[1] - 1),
        radius=ranges[:, 0] + (ranges[:, 1] - ranges[:, 0]) * uniform[2],
        travel=_TRAVEL[0] + (_TRAVEL[1] - _TRAVEL[0]) * uniform[3],
    )


def render(
    scenes: Scenes,
    *,
    frames: int = 17,
    size: int = REFERENCE_SIZE,
    window: tuple[Tensor, Tensor, int] | None = None,
) -> Tensor:
    """Render scenes.

    Args:
        scenes: B clips, on the device that renders.
        frames: Number of frames F.
        size: Height and width of the whole picture in pixels.
        window: (top [B], left [B], side): only this square of each picture, for crops.

    Returns:
        [B, 3, F, H, W] fp32 in 0..1, on the scenes' device.
    """
    device = scenes.x.device
    unit = REFERENCE_SIZE / size
    side = size if window is None else window[2]
    grid = torch.arange(side, device=device, dtype=torch.float32) + 0.5
    rows = grid.expand(len(scenes), side)
    cols = rows
    if window is not None:
        rows, cols = rows + window[0][:, None], cols + window[1][:, None]
    rows, cols = rows * unit, cols * unit  # [B, side], reference pixels

    dx, dy, scale = (table[scenes.motion] for table in motion_path(frames, device))  # [B, F]
    radius = (scenes.radius[:, None] * scale)[:, :, None, None]
    cx = scenes.x[:, None] + dx * scenes.travel[:, None]
    cy = scenes.y[:, None] + dy * scenes.travel[:, None]
    px = (cols[:, None, None, :] - cx[:, :, None, None]) / radius
    py = (rows[:, None, :, None] - cy[:, :, None, None]) / radius
    px, py = px.expand(-1, -1, side, -1), py.expand(-1, -1, -1, side)
    distance = torch.empty_like(px)
    for shape in range(len(SHAPES)):
        member = scenes.shape == shape
        distance[member] = signed_distance(shape, px[member], py[member])
    cover = (0.5 - distance * radius / unit).clamp(0, 1)[:, None]  # [B, 1, F, H, W]

    palette = torch.tensor(list(COLOURS.values()), device=device)
    colour = palette[scenes.colour][:, :, None, None, None]
    backdrop = _background(scenes.background, rows, cols)[:, :, None]
    return backdrop + cover * (colour - backdrop)


def _background(kind: Tensor, rows: Tensor, cols: Tensor) -> Tensor:
    """[B, 3, H, W]; all of them darker than 0.3, so that no object can hide in them."""
    stripe = torch.remainder(torch.floor(cols / 8), 2)[:, None, :].expand(-1, rows.shape[1], -1)
    checker = torch.remainder(
        torch.floor(rows / 16)[:, :, None] + torch.floor(cols / 16)[:, None, :], 2
    )
    low = torch.tensor([[0.05] * 3, [0.05, 0.07, 0.28], [0.10] * 3, [0.09, 0.14, 0.12]])
    high = torch.tensor([[0.05] * 3, [0.05, 0.07, 0.28], [0.24] * 3, [0.20, 0.28, 0.24]])
    low, high = (table.to(rows.device)[kind][:, :, None, None] for table in (low, high))
    pattern = torch.where((kind == BACKGROUNDS.index("striped"))[:, None, None], stripe, checker)
    return low + pattern[:, None] * (high - low)
