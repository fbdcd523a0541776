"""Procedural videos and the detector that judges them."""

from __future__ import annotations

import random

import pytest
import torch

from training.data import Scenes, render, sample_scenes
from turbo_rcm_patch.errors import ConfigError
from turbo_rcm_patch.tiny.detector import UNKNOWN, accuracy, detect
from turbo_rcm_patch.tiny.prompts import (
    COLOURS,
    DEMO_PROMPTS,
    MOTIONS,
    SHAPES,
    caption,
    clips,
    parse,
)


def _scenes(count: int, seed: int = 0, *, held_out: bool = False) -> Scenes:
    return sample_scenes(count, torch.Generator().manual_seed(seed), held_out=held_out)


def _combinations(held_out: bool) -> set[tuple[str, str, str]]:
    return {(c.shape, c.colour, c.motion) for c in clips(held_out=held_out)}


def test_training_never_draws_a_held_out_combination() -> None:
    drawn = {(c.shape, c.colour, c.motion) for c in _scenes(5000).clips()}
    assert not drawn & _combinations(True)


def test_held_out_share_and_coverage() -> None:
    seen, unseen = _combinations(False), _combinations(True)
    assert not seen & unseen
    assert len(unseen) >= 0.2 * len(seen | unseen)
    for axis, values in enumerate((SHAPES, COLOURS, MOTIONS)):
        assert {c[axis] for c in seen} == set(values)
        assert {c[axis] for c in unseen} == set(values)


def test_demo_prompts_are_held_out() -> None:
    assert len(DEMO_PROMPTS) >= 8
    for prompt in DEMO_PROMPTS:
        clip = parse(prompt)
        assert (clip.shape, clip.colour, clip.motion) in _combinations(True)


def test_every_caption_reads_back() -> None:
    for clip in clips(held_out=True) + clips(held_out=False):
        assert parse(caption(clip)) == clip


@pytest.mark.parametrize(
    "text", ["", "a purple cow", "a large red circle flying on a black background"]
)
def test_foreign_sentences_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="caption"):
        parse(text)


def test_same_seed_same_videos() -> None:
    first, second = (render(_scenes(3, 5), frames=5, size=32) for _ in range(2))
    assert first.shape == (3, 3, 5, 32, 32) and first.min() >= 0 and first.max() <= 1
    assert torch.equal(first, second)
    assert not torch.equal(first, render(_scenes(3, 6), frames=5, size=32))


def test_detector_reads_rendered_videos() -> None:
    scenes = _scenes(64, 1, held_out=True)
    found = detect(render(scenes).permute(0, 2, 3, 4, 1))
    result = accuracy(found, scenes.clips())
    assert min(result.values()) >= 0.99, result
    shuffled = random.Random(0).sample(scenes.clips(), len(scenes))
    chance = accuracy(found, shuffled)
    assert max(chance[name] for name in ("colour", "shape", "motion")) < 0.3, chance


@pytest.mark.parametrize("value", [0.0, 1.0], ids=["black", "white"])
def test_detector_sees_nothing_where_nothing_is(value: float) -> None:
    (found,) = detect(torch.full((17, 64, 64, 3), value))
    assert found.motion == UNKNOWN and (value == 1.0 or found.colour == UNKNOWN)
