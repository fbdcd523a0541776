"""A deterministic detector of colour, shape and motion: thresholds, moments, templates.

The outlines and paths of the tiny world are defined here; training renders its videos from them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from turbo_rcm_patch.tiny.prompts import COLOURS, MOTIONS, SHAPES, Clip

UNKNOWN: Final = "none"
_BRIGHT: Final = 0.58  # between the brightest background (0.28) and the darkest object (0.9)
_MIN_AREA: Final = 0.004  # of the picture
_GRID: Final = 40
_SPAN: Final = 1.35  # half the side of the template window, in units of sqrt(area)
_MIN_IOU: Final = 0.72
_MIN_COSINE: Final = 0.85
_MIN_SWING: Final = 0.05  # root mean square of a path, in picture widths
_MIN_GROWTH: Final = 0.6  # |log| of the area ratio between the last and the first frames
_MAX_COLOUR_DISTANCE: Final = 0.35
#: Factors on the radius between which an object grows or shrinks.
_GROWTH: Final = (0.6, 1.4)


def motion_path(frames: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """Offsets and scale of every motion over time.

    Returns:
        dx, dy: [motions, frames] fp32 in units of the travel; scale: the same, factor on the
        radius.
    """
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
    dx, dy, scale = zip(*(paths[name] for name in MOTIONS), strict=True)
    return torch.stack(dx), torch.stack(dy), torch.stack(scale)


def signed_distance(shape: int, x: Tensor, y: Tensor) -> Tensor:
    """Distance to the outline of a shape of radius 1 around the origin; y points down.

    Negative inside; exact along the edges, which is where a pixel is neither inside nor outside.
    """
    name = SHAPES[shape]
    if name == "circle":
        return torch.hypot(x, y) - 1.0
    if name == "ring":
        return (torch.hypot(x, y) - 0.82).abs() - 0.26
    if name == "square":
        return torch.maximum(x.abs(), y.abs()) - 0.9
    if name == "cross":
        ax, ay = x.abs(), y.abs()
        return torch.minimum(
            torch.maximum(ax - 1.1, ay - 0.36), torch.maximum(ax - 0.36, ay - 1.1)
        )
    if name == "triangle":
        half, slope = 0.6, math.sqrt(3) / 2
        return torch.maximum(y - half, x.abs() * slope - y * 0.5 - half)
    # star: fold the plane into half a point, then one straight edge from the tip to the notch
    tip, notch, fold = 1.25, 0.55, math.pi / 5
    rho, angle = torch.hypot(x, y), torch.atan2(x, -y)
    angle = (torch.remainder(angle + fold, 2 * fold) - fold).abs()
    px, py = rho * torch.cos(angle), rho * torch.sin(angle)
    ex, ey = notch * math.cos(fold) - tip, notch * math.sin(fold)
    length = math.hypot(ex, ey)
    return ((px - tip) * (-ey) + py * ex) / -length


@dataclass(frozen=True, slots=True)
class Detection:
    """What one video shows; "none" if nothing clear was found."""

    colour: str
    shape: str
    motion: str


def detect(frames: Tensor) -> list[Detection]:
    """Detect what videos show.

    Args:
        frames: [B, F, H, W, 3] (or one video [F, H, W, 3]), any float dtype, in 0..1.

    Returns:
        One detection per video.
    """
    if frames.ndim == 4:
        frames = frames[None]
    frames = frames.float().clamp(0, 1)
    mask = (frames.amax(-1) > _BRIGHT).float()  # [B, F, H, W]
    area = mask.mean((2, 3))
    seen = area > _MIN_AREA
    visible = seen.float().mean(1) > 0.7
    ys = torch.arange(frames.shape[2], device=frames.device) + 0.5
    xs = torch.arange(frames.shape[3], device=frames.device) + 0.5
    total = mask.sum((2, 3)).clamp(min=1)
    cy = (mask.sum(3) * ys).sum(2) / total
    cx = (mask.sum(2) * xs).sum(2) / total
    colour = _colour(frames, mask)
    shape = _shape(mask, cx, cy, total, seen)
    motion = _motion(cx / frames.shape[3], cy / frames.shape[2], area)
    names = (tuple(COLOURS), SHAPES, tuple(MOTIONS))
    return [
        Detection(
            *(table[i] if v and i >= 0 else UNKNOWN for table, i in zip(names, row, strict=True))
        )
        for v, *row in zip(
            visible.tolist(), colour.tolist(), shape.tolist(), motion.tolist(), strict=True
        )
    ]


def accuracy(detections: list[Detection], wanted: list[Clip]) -> dict[str, float]:
    """Share of videos that show what was asked for, per attribute and for all three together."""
    pairs = list(zip(detections, wanted, strict=True))
    hits = {
        name: [getattr(d, name) == getattr(w, name) for d, w in pairs]
        for name in ("colour", "shape", "motion")
    }
    result = {name: sum(values) / len(values) for name, values in hits.items()}
    result["all"] = sum(map(all, zip(*hits.values(), strict=True))) / len(pairs)
    return result


def _colour(frames: Tensor, mask: Tensor) -> Tensor:
    # The inside only: edges mix with the background, and a decoder blurs them further.
    inside = (F.avg_pool2d(mask, 3, stride=1, padding=1) > 0.99).float()
    inside = torch.where(inside.sum((1, 2, 3), keepdim=True) > 20, inside, mask)[..., None]
    mean = (frames * inside).sum((1, 2, 3)) / inside.sum((1, 2, 3)).clamp(min=1)
    palette = torch.tensor(list(COLOURS.values()), device=frames.device)
    distance = torch.cdist(mean, palette)
    best = distance.min(1)
    return torch.where(best.values < _MAX_COLOUR_DISTANCE, best.indices, -1)


def _window(cx: Tensor, cy: Tensor, total: Tensor, height: int, width: int) -> Tensor:
    """Sampling grid [N, G, G, 2] around centroids, scaled by the square root of the area."""
    line = torch.linspace(-_SPAN, _SPAN, _GRID, device=cx.device)
    half = total.sqrt()[:, None]
    gx = (cx[:, None] + line * half) / width * 2 - 1
    gy = (cy[:, None] + line * half) / height * 2 - 1
    n = len(cx)
    return torch.stack(
        [gx[:, None, :].expand(n, _GRID, _GRID), gy[:, :, None].expand(n, _GRID, _GRID)], -1
    )


@cache
def _templates() -> Tensor:
    """[shapes, G, G]: each shape rendered large and cut out exactly as a detected object is."""
    size, radius = 256, 70.0
    line = (torch.arange(size) + 0.5 - size / 2) / radius
    y, x = torch.meshgrid(line, line, indexing="ij")
    masks = torch.stack([(signed_distance(s, x, y) < 0).float() for s in range(len(SHAPES))])
    total = masks.sum((1, 2))
    pixel = torch.arange(size) + 0.5
    cx = (masks.sum(1) * pixel).sum(1) / total
    cy = (masks.sum(2) * pixel).sum(1) / total
    grid = _window(cx, cy, total, size, size)
    return F.grid_sample(masks[:, None], grid, align_corners=False)[:, 0]


def _shape(mask: Tensor, cx: Tensor, cy: Tensor, total: Tensor, seen: Tensor) -> Tensor:
    batch, count, height, width = mask.shape
    grid = _window(cx.flatten(), cy.flatten(), total.flatten(), height, width)
    cut = F.grid_sample(mask.reshape(-1, 1, height, width), grid, align_corners=False)[:, 0]
    cut = cut.reshape(batch, count, 1, -1)
    template = _templates().to(mask.device).flatten(1)
    both = torch.minimum(cut, template).sum(-1)
    either = torch.maximum(cut, template).sum(-1).clamp(min=1e-6)
    # Large objects say more about their outline than small ones.
    weight = (total * seen)[..., None]
    iou = (both / either * weight).sum(1) / weight.sum(1).clamp(min=1e-6)
    best = iou.max(1)
    return torch.where(best.values > _MIN_IOU, best.indices, -1)


def _motion(cx: Tensor, cy: Tensor, area: Tensor) -> Tensor:
    count = cx.shape[1]
    edge = max(1, count // 6)
    growth = (
        area[:, -edge:].mean(1).clamp(min=1e-6) / area[:, :edge].mean(1).clamp(min=1e-6)
    ).log()
    path = torch.cat([cx - cx.mean(1, keepdim=True), cy - cy.mean(1, keepdim=True)], 1)
    dx, dy, _ = motion_path(count, cx.device)
    wanted = torch.cat([dx - dx.mean(1, keepdim=True), dy - dy.mean(1, keepdim=True)], 1)
    cosine = F.normalize(path, dim=1) @ F.normalize(wanted, dim=1).T  # a motion in place scores 0
    best = cosine.max(1)
    swing = (path.square().sum(1) / count).sqrt()
    moved = (best.values > _MIN_COSINE) & (swing > _MIN_SWING)
    names = tuple(MOTIONS)
    found = torch.where(moved, best.indices, -1)
    still = swing < _MIN_SWING
    found = torch.where(still & (growth > _MIN_GROWTH), names.index("grow"), found)
    return torch.where(still & (growth < -_MIN_GROWTH), names.index("shrink"), found)
