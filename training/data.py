"""Where clips come from: shapes that are rendered when they are needed, or a recorded world.

Shapes are rendered on whatever device trains: seeded, batched, unlimited. A scene is a clip's
words and four numbers; `render` turns scenes into pixels with signed distance functions and one
pixel of antialiasing. Scenes are drawn on the CPU, so that a seed means the same videos on every
device. Held-out combinations of shape, colour and motion are never drawn.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch import Tensor

from training import world
from training.world import Bucket
from turbo_rcm_patch.tiny import prompts
from turbo_rcm_patch.tiny.prompts import BACKGROUNDS, COLOURS, MOTIONS, SHAPES, Clip

REFERENCE_SIZE: Final = 128  # every length below is in pixels of a video of this size
_RADIUS: Final = {"small": (16.0, 18.0), "large": (24.0, 26.5)}
_TRAVEL: Final = (44.0, 52.0)
_JITTER: Final = 5.0
#: Factors on the radius between which an object grows or shrinks.
_GROWTH: Final = (0.6, 1.4)
#: Shards of a recorded bucket whose frames stay.
_KEPT_SHARDS: Final = 32


class Scenes(NamedTuple):
    """A batch of clips: their words, and fp32 tensors [B].

    x and y are the middle of the path; they, the radius and the length of the path (`travel`) are
    in pixels of the reference size.
    """

    clips: list[Clip]
    x: Tensor
    y: Tensor
    radius: Tensor
    travel: Tensor


def sample_scenes(count: int, generator: torch.Generator) -> Scenes:
    """Draw scenes uniformly over the combinations that training may see.

    Args:
        count: Number of clips B.
        generator: A CPU generator; its state alone decides the scenes.
    """
    allowed = prompts.clips(held_out=False)
    picked = torch.randint(len(allowed), (count,), generator=generator).tolist()
    chosen = [allowed[i] for i in picked]
    uniform = torch.rand(4, count, generator=generator)
    least, most = torch.tensor([_RADIUS[clip.size] for clip in chosen]).T
    x, y = REFERENCE_SIZE / 2 + _JITTER * (2 * uniform[:2] - 1)
    travel = _TRAVEL[0] + (_TRAVEL[1] - _TRAVEL[0]) * uniform[3]
    return Scenes(chosen, x, y, least + (most - least) * uniform[2], travel)


def render(scenes: Scenes, device: torch.device, *, frames: int, size: int) -> Tensor:
    """Render scenes.

    Args:
        scenes: B clips.
        device: Where to render them.
        frames: Number of frames F.
        size: Height and width of the picture in pixels.

    Returns:
        [B, 3, F, H, W] fp32 in 0..1.
    """
    unit = REFERENCE_SIZE / size
    grid = (torch.arange(size, device=device) + 0.5) * unit
    x, y, radius, travel = (values.to(device)[:, None] for values in scenes[1:])
    paths = motion_paths(frames, device)
    dx, dy, scale = torch.stack([paths[clip.motion] for clip in scenes.clips], 1)  # [B, F]
    radius = (radius * scale)[:, :, None, None]
    px = (grid - (x + dx * travel)[:, :, None, None]) / radius  # [B, F, 1, W]
    py = (grid[:, None] - (y + dy * travel)[:, :, None, None]) / radius  # [B, F, H, 1]
    px, py = px.expand(-1, -1, size, -1), py.expand(-1, -1, -1, size)
    distance = torch.empty_like(px)
    for shape in SHAPES:
        members = torch.tensor([clip.shape == shape for clip in scenes.clips], device=device)
        distance[members] = signed_distance(shape, px[members], py[members])
    cover = (0.5 - distance * radius / unit).clamp(0, 1)[:, None]  # [B, 1, F, H, W]
    palette = torch.tensor([COLOURS[clip.colour] for clip in scenes.clips], device=device)
    pictures = _backgrounds(grid)
    backdrop = torch.stack([pictures[clip.background] for clip in scenes.clips])[:, :, None]
    videos: Tensor = backdrop + cover * (palette[:, :, None, None, None] - backdrop)
    return videos


def motion_paths(frames: int, device: torch.device) -> dict[str, Tensor]:
    """Path [3, F] of each motion: dx and dy in units of the travel, factor on the radius."""
    u = torch.linspace(0, 1, frames, device=device)
    zero, one = torch.zeros_like(u), torch.ones_like(u)
    hop = 0.7 * (0.5 - torch.sin(2 * math.pi * u).abs())
    low, high = _GROWTH
    paths = {
        "right": (u - 0.5, zero, one),
        "left": (0.5 - u, zero, one),
        "up": (zero, 0.5 - u, one),
        "down": (zero, u - 0.5, one),
        "grow": (zero, zero, low + (high - low) * u),
        "shrink": (zero, zero, high - (high - low) * u),
        "circle": (0.42 * torch.sin(2 * math.pi * u), -0.42 * torch.cos(2 * math.pi * u), one),
        "bounce": (zero, hop, one),
    }
    return {name: torch.stack(paths[name]) for name in MOTIONS}


def signed_distance(shape: str, x: Tensor, y: Tensor) -> Tensor:
    """Distance to the outline of a shape of radius 1 around the origin; y points down.

    Negative inside; exact along the edges, which is where a pixel is neither inside nor outside.
    """
    if shape == "circle":
        return torch.hypot(x, y) - 1.0
    if shape == "ring":
        return (torch.hypot(x, y) - 0.82).abs() - 0.26
    if shape == "square":
        return torch.maximum(x.abs(), y.abs()) - 0.9
    if shape == "cross":
        bars = [torch.maximum(a.abs() - 1.1, b.abs() - 0.36) for a, b in ((x, y), (y, x))]
        return torch.minimum(*bars)
    if shape == "triangle":
        return torch.maximum(y - 0.6, x.abs() * math.sqrt(3) / 2 - y * 0.5 - 0.6)
    # star: fold the plane into half a point, then one straight edge from the tip to the notch
    tip, notch, fold = 1.25, 0.55, math.pi / 5
    rho, angle = torch.hypot(x, y), torch.atan2(x, -y)
    angle = (torch.remainder(angle + fold, 2 * fold) - fold).abs()
    px, py = rho * torch.cos(angle), rho * torch.sin(angle)
    ex, ey = notch * math.cos(fold) - tip, notch * math.sin(fold)
    return ((px - tip) * (-ey) + py * ex) / -math.hypot(ex, ey)


def _backgrounds(grid: Tensor) -> dict[str, Tensor]:
    """[3, H, W] by name; all of them darker than 0.3, so that no object can hide in them."""
    stripes = torch.remainder(torch.floor(grid / 8), 2).expand(len(grid), -1)
    squares = torch.floor(grid / 16)
    checks = torch.remainder(squares[:, None] + squares, 2)
    colours = {
        "black": ([0.05] * 3, [0.05] * 3, stripes),
        "navy": ([0.05, 0.07, 0.28], [0.05, 0.07, 0.28], stripes),
        "striped": ([0.10] * 3, [0.24] * 3, stripes),
        "checkered": ([0.09, 0.14, 0.12], [0.20, 0.28, 0.24], checks),
    }
    pictures = {}
    for name in BACKGROUNDS:
        dark, light, pattern = colours[name]
        low, high = (grid.new_tensor(colour)[:, None, None] for colour in (dark, light))
        pictures[name] = low + pattern * (high - low)
    return pictures


class Shapes:
    """Rendered shapes.

    Attributes:
        words: Every word of the prompts.
    """

    words = prompts.words()

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._device = device  # Nothing is kept in the folder.

    def shards(self, bucket: Bucket, indices: Sequence[int]) -> Iterator[tuple[Tensor, list[str]]]:
        """Yield whole shards: videos [n, 3, F, H, W] in 0..1 on the device, and prompts."""
        for index in indices:
            generator = torch.Generator().manual_seed(4 * 10**6 + index)
            scenes = sample_scenes(bucket.clips, generator)
            yield self._render(bucket, scenes), [prompts.caption(clip) for clip in scenes.clips]

    def videos(self, bucket: Bucket, count: int, generator: torch.Generator) -> Tensor:
        """Draw clips [count, 3, F, H, W] in 0..1 on the device, for an autoencoder."""
        return self._render(bucket, sample_scenes(count, generator))

    def _render(self, bucket: Bucket, scenes: Scenes) -> Tensor:
        return render(scenes, self._device, frames=bucket.frames, size=bucket.height)


class World:
    """Recorded clips, with the members of `Shapes`.

    Frames of a bucket's first shards stay in `folder`, for the autoencoder.
    """

    words = world.words()

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._folder, self._device = folder, device
        self._frames: dict[str, Tensor] = {}

    def shards(self, bucket: Bucket, indices: Sequence[int]) -> Iterator[tuple[Tensor, list[str]]]:
        """Yield whole shards, recorded where they are missing."""
        paths = world.record(bucket, indices, self._folder)
        for index, path in zip(indices, paths, strict=True):
            frames, prompts = torch.load(path)
            yield self._as_video(frames), prompts
            if index >= _KEPT_SHARDS:
                path.unlink()

    def videos(self, bucket: Bucket, count: int, generator: torch.Generator) -> Tensor:
        """Draw clips of the shards whose frames stay."""
        if bucket.name not in self._frames:
            kept = range(min(_KEPT_SHARDS, bucket.shards))
            paths = world.record(bucket, kept, self._folder)
            shards = [torch.load(path)[0].to(self._device) for path in paths]
            self._frames[bucket.name] = torch.cat(shards)
        frames = self._frames[bucket.name]
        return self._as_video(frames[torch.randint(len(frames), (count,), generator=generator)])

    def _as_video(self, frames: Tensor) -> Tensor:
        return frames.to(self._device).permute(0, 4, 1, 2, 3).float() / 255
