"""Rendered clips, and the prompts that name them."""

from __future__ import annotations

import torch

from training.data import Scenes, render, sample_scenes
from turbo_rcm_patch.tiny.prompts import COLOURS, DEMO_PROMPTS, MOTIONS, SHAPES, caption, clips

CPU = torch.device("cpu")


def _scenes(count: int, seed: int = 0) -> Scenes:
    return sample_scenes(count, torch.Generator().manual_seed(seed))


def test_training_never_draws_a_held_out_combination() -> None:
    """A fifth is held out or more, and both parts have every shape, colour and motion."""
    seen, unseen = (
        {(c.shape, c.colour, c.motion) for c in clips(held_out=held_out)}
        for held_out in (False, True)
    )
    assert {(c.shape, c.colour, c.motion) for c in _scenes(5000).clips} <= seen
    assert not seen & unseen and len(unseen) >= 0.2 * len(seen | unseen)
    for axis, values in enumerate((SHAPES, COLOURS, MOTIONS)):
        for part in (seen, unseen):
            assert {combination[axis] for combination in part} == set(values)


def test_demo_prompts_are_held_out() -> None:
    assert len(DEMO_PROMPTS) >= 8
    assert set(DEMO_PROMPTS) <= {caption(clip) for clip in clips(held_out=True)}


def test_same_seed_same_videos() -> None:
    first, second, other = (render(_scenes(3, seed), CPU, frames=5, size=32) for seed in (5, 5, 6))
    assert first.shape == (3, 3, 5, 32, 32) and first.min() >= 0 and first.max() <= 1
    assert torch.equal(first, second) and not torch.equal(first, other)


def test_a_clip_shows_its_colour_and_its_motion() -> None:
    """Bright is the object alone; its middle goes where the caption says."""
    scenes = _scenes(64, 1)
    videos = render(scenes, CPU, frames=9, size=64)
    bright = videos.amax(1) > 0.58  # [B, F, H, W]
    rows, columns = torch.meshgrid(torch.arange(64.0), torch.arange(64.0), indexing="ij")
    for clip, video, mask in zip(scenes.clips, videos, bright, strict=True):
        colour = torch.stack([frame[:, seen].median(1).values for frame, seen in
                              zip(video.transpose(0, 1), mask, strict=True)]).mean(0)  # fmt: skip
        assert torch.dist(colour, torch.tensor(COLOURS[clip.colour])) < 0.01
        x, y = ([float(axis[seen].mean()) for seen in mask] for axis in (columns, rows))
        moved = {"right": x[-1] - x[0], "left": x[0] - x[-1], "up": y[0] - y[-1],
                 "down": y[-1] - y[0]}  # fmt: skip
        for motion, distance in moved.items():
            assert (distance > 15) == (clip.motion == motion), clip
