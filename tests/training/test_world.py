"""A recorded world: what its prompts say, and what a recording and a training on it leave."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.training.micro import micro, train_micro
from training import world
from training.world import (
    Bucket,
    caption,
    light_and_colour,
    maps_of,
    record_shard,
    shard_path,
    words,
)
from turbo_rcm_patch.errors import MissingPackageError
from turbo_rcm_patch.video import generate, load_pipeline

TOY = Bucket("toy", 9, 64, 96, clips=4)
PROMPT = caption("fight", "zombie", "dim brown wide", "still")


def test_a_prompt_is_a_sentence_of_known_words() -> None:
    assert PROMPT == "fighting a zombie in a dim brown wide base, camera still"
    for policy in world._POLICIES:
        prompt = caption(policy, "zombie", "dim brown wide", "still")
        assert set(prompt.replace(",", "").split()) <= set(words())


@pytest.mark.parametrize(
    ("colour", "said"),
    [((120, 120, 120), ("bright", "grey")), ((70, 60, 40), ("dark", "brown")),
     ((200, 10, 10), ("dim", "red")), ((20, 60, 200), ("bright", "blue"))],
)  # fmt: skip
def test_frames_say_their_light_and_colour(colour: tuple[int, ...], said: tuple[str, str]) -> None:
    assert light_and_colour(np.full((2, 4, 4, 3), colour, np.uint8)) == said


def test_maps_for_evaluation_are_left_out_and_its_prompts_speak_the_language_of_clips() -> None:
    for game, count in (("freedoom1.wad", 36), ("freedoom2.wad", 32)):
        assert 25 <= len(maps_of(game)) <= count - 6
    prompts = (Path(world.__file__).parent / "world_prompts.txt").read_text().splitlines()
    assert len(set(prompts)) == 20
    assert {word for prompt in prompts for word in prompt.replace(",", "").split()} <= set(words())


def test_without_the_package_only_what_is_there_is_read(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(world, "find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match="vizdoom"):
        next(world.record(TOY, [0], 0, tmp_path))
    path = shard_path(tmp_path, TOY, 0, 0)
    path.touch()
    assert list(world.record(TOY, [0], 0, tmp_path)) == [path]


def test_a_shard_has_the_bytes_of_its_seed(tmp_path: Path) -> None:
    pytest.importorskip("vizdoom")
    path, again, other = (
        record_shard(tmp_path / name, TOY, seed, 0)
        for name, seed in (("first", 3), ("second", 3), ("third", 4))
    )
    assert path.read_bytes() == again.read_bytes() != other.read_bytes()
    frames, prompts = np.load(path), json.loads(path.with_suffix(".json").read_text())
    assert frames.shape == (4, 9, 64, 96, 3) and frames.mean((1, 2, 3, 4)).min() > 20
    for prompt in prompts:
        assert set(prompt.replace(",", "").split()) <= set(words())
    written = path.stat().st_mtime_ns
    assert record_shard(tmp_path / "first", TOY, 3, 0) == path
    assert path.stat().st_mtime_ns == written


@pytest.mark.slow
def test_a_world_is_learnt_and_generates(tmp_path: Path) -> None:
    """From shards that are there, packaged in int8, and loaded."""
    random = np.random.default_rng(0)
    for bucket in micro("world").buckets:
        for index in range(bucket.shards):
            path = shard_path(tmp_path / "frames", bucket, 0, index)
            path.parent.mkdir(exist_ok=True)
            shape = bucket.clips, bucket.frames, bucket.height, bucket.width, 3
            np.save(path, random.integers(0, 256, shape, np.uint8))
            path.with_suffix(".json").write_text(json.dumps([PROMPT] * bucket.clips))
    train_micro("world", tmp_path)
    folder = tmp_path / "world_student"
    assert "Freedoom" in (folder / "ARTWORK.md").read_text()
    video = generate(load_pipeline(folder, device="cpu"), PROMPT)
    assert video.frames.shape == (9, 32, 32, 3) and video.frames.isfinite().all()
