"""Where clips come from: shapes that are rendered when they are needed, or a recorded world.

Shapes are rendered on whatever device trains: seeded, batched, unlimited. A scene is a handful of
numbers per clip; `render` turns scenes into pixels with signed distance functions and one pixel of
antialiasing. Scenes are drawn on the CPU, so that a seed means the same videos on every device.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from training import world
from training.world import Bucket, Shard
from turbo_rcm_patch.tiny import prompts
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
)  # fmt: skip

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
    names = SHAPES, colours, motions, SIZES, BACKGROUNDS
    every = ((c.shape, c.colour, c.motion, c.size, c.background) for c in clips(held_out=held_out))
    rows = [[own.index(word) for own, word in zip(names, c, strict=True)] for c in every]
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
    x, y = (middle + _JITTER * (2 * one - 1) for one in uniform[:2])
    radius = ranges[:, 0] + (ranges[:, 1] - ranges[:, 0]) * uniform[2]
    travel = _TRAVEL[0] + (_TRAVEL[1] - _TRAVEL[0]) * uniform[3]
    return Scenes(shape, colour, motion, size_word, background, x, y, radius, travel)


def render(scenes: Scenes, *, frames: int = 17, size: int = REFERENCE_SIZE) -> Tensor:
    """Render scenes.

    Args:
        scenes: B clips, on the device that renders.
        frames: Number of frames F.
        size: Height and width of the picture in pixels.

    Returns:
        [B, 3, F, H, W] fp32 in 0..1, on the scenes' device.
    """
    device = scenes.x.device
    unit = REFERENCE_SIZE / size
    grid = (torch.arange(size, device=device, dtype=torch.float32) + 0.5) * unit
    rows = cols = grid.expand(len(scenes), size)  # in reference pixels

    dx, dy, scale = (table[scenes.motion] for table in motion_path(frames, device))  # [B, F]
    radius = (scenes.radius[:, None] * scale)[:, :, None, None]
    cx = scenes.x[:, None] + dx * scenes.travel[:, None]
    cy = scenes.y[:, None] + dy * scenes.travel[:, None]
    px = (cols[:, None, None, :] - cx[:, :, None, None]) / radius
    py = (rows[:, None, :, None] - cy[:, :, None, None]) / radius
    px, py = px.expand(-1, -1, size, -1), py.expand(-1, -1, -1, size)
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


class Source:
    """Clips for training.

    Attributes:
        words: Every word of its prompts.
    """

    words: list[str]

    def __init__(self, folder: Path, device: torch.device, seed: int = 0) -> None:
        self._folder, self._device, self._seed = folder, device, seed

    def prepare(self, buckets: Sequence[Bucket]) -> None:
        """Make what all ranks read, on one of them."""

    def shards(
        self, bucket: Bucket, indices: Sequence[int], *, held_out: bool = False
    ) -> Iterator[tuple[Tensor, list[str]]]:
        """Yield whole shards: videos [n, 3, F, H, W] in 0..1 on the device, and prompts."""
        raise NotImplementedError

    def videos(self, bucket: Bucket, count: int, generator: torch.Generator) -> Tensor:
        """Draw clips [count, 3, F, H, W] in 0..1 on the device, for an autoencoder."""
        raise NotImplementedError


class Shapes(Source):
    """Rendered shapes. Held out are combinations of shape, colour and motion."""

    words = prompts.words()

    def shards(
        self, bucket: Bucket, indices: Sequence[int], *, held_out: bool = False
    ) -> Iterator[tuple[Tensor, list[str]]]:
        for index in indices:
            generator = torch.Generator().manual_seed((self._seed * 1000 + 4) * 10**6 + index)
            scenes = sample_scenes(bucket.clips, generator, held_out=held_out)
            yield self._render(bucket, scenes), scenes.captions()

    def videos(self, bucket: Bucket, count: int, generator: torch.Generator) -> Tensor:
        return self._render(bucket, sample_scenes(count, generator))

    def _render(self, bucket: Bucket, scenes: Scenes) -> Tensor:
        return render(scenes.to(self._device), frames=bucket.frames, size=bucket.height)


class World(Source):
    """Recorded clips. Frames of the first shards stay in `folder`, for the autoencoder."""

    words = world.words()
    #: Shards of a bucket whose frames stay.
    keeps = 32

    def __init__(self, folder: Path, device: torch.device, seed: int = 0) -> None:
        super().__init__(folder, device, seed)
        self._frames: dict[str, list[Tensor]] = {}

    def prepare(self, buckets: Sequence[Bucket]) -> None:
        kept = [shard for bucket in buckets for shard in self._kept(bucket)]
        for _ in world.record([*kept, Shard(buckets[0], 0, self._seed, True)], self._folder):
            pass

    def _kept(self, bucket: Bucket) -> list[Shard]:
        return [Shard(bucket, i, self._seed) for i in range(min(self.keeps, bucket.shards))]

    def shards(
        self, bucket: Bucket, indices: Sequence[int], *, held_out: bool = False
    ) -> Iterator[tuple[Tensor, list[str]]]:
        wanted = [Shard(bucket, index, self._seed, held_out) for index in indices]
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        processes = max(1, len(os.sched_getaffinity(0)) // ranks)
        paths = world.record(wanted, self._folder, processes)
        for shard, path in zip(wanted, paths, strict=True):
            facts = json.loads(path.with_suffix(".json").read_text())
            yield self._as_video(_frames(path)), [fact["prompt"] for fact in facts]
            if not held_out and shard.index >= self.keeps:
                path.unlink()

    def videos(self, bucket: Bucket, count: int, generator: torch.Generator) -> Tensor:
        if bucket.name not in self._frames:
            paths = world.record(self._kept(bucket), self._folder)
            self._frames[bucket.name] = [_frames(path).to(self._device) for path in paths]
        files = self._frames[bucket.name]
        pick = torch.randint(len(files) * bucket.clips, (count,), generator=generator).tolist()
        return self._as_video(
            torch.stack([files[i // bucket.clips][i % bucket.clips] for i in pick])
        )

    def _as_video(self, frames: Tensor) -> Tensor:
        return frames.to(self._device).permute(0, 4, 1, 2, 3).float() / 255


def _frames(path: Path) -> Tensor:
    """Frames of a shard, uint8 [n, F, H, W, 3], in memory that maps the file."""
    return torch.from_numpy(np.load(path, mmap_mode="c"))
