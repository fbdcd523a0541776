"""A recorded world: what its prompts say, and what a recording and a training on it leave."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.training.micro import micro, train_micro
from training import world
from training.world import Bucket, caption, light_and_colour, maps_of, record_shard, words
from turbo_rcm_patch.video import generate, load_pipeline

TOY = Bucket("toy", 9, 64, 96, clips=4)
PROMPT = caption("fight", "zombie", "dim brown wide", "still")


def known(prompt: str) -> bool:
    return set(prompt.replace(",", "").split()) <= set(words())


def test_prompts_are_of_known_words_and_maps_for_evaluation_are_left_out() -> None:
    assert PROMPT == "fighting a zombie in a dim brown wide base, camera still"
    evaluated = (Path(world.__file__).parent / "world_prompts.txt").read_text().splitlines()
    assert len(set(evaluated)) == 20
    for policy in world._POLICIES:
        assert known(caption(policy, "zombie", "dim brown wide", "still"))
    assert all(map(known, evaluated))
    for game, count in (("freedoom1.wad", 36), ("freedoom2.wad", 32)):
        assert 25 <= len(maps_of(game)) <= count - 6


@pytest.mark.parametrize(
    ("colour", "said"),
    [((120, 120, 120), ("bright", "grey")), ((70, 60, 40), ("dark", "brown")),
     ((200, 10, 10), ("dim", "red")), ((20, 60, 200), ("bright", "blue"))],
)  # fmt: skip
def test_frames_say_their_light_and_colour(colour: tuple[int, ...], said: tuple[str, str]) -> None:
    assert light_and_colour(np.full((2, 4, 4, 3), colour, np.uint8)) == said


def test_a_shard_has_the_bytes_of_its_name(tmp_path: Path) -> None:
    pytest.importorskip("vizdoom")
    path, again, other = (
        record_shard(tmp_path / name, TOY, index)
        for name, index in (("first", 3), ("second", 3), ("third", 4))
    )
    frames, prompts = torch.load(path)
    assert torch.equal(frames, torch.load(again)[0])
    assert not torch.equal(frames, torch.load(other)[0])
    assert frames.shape == (4, 9, 64, 96, 3) and frames.float().mean((1, 2, 3, 4)).min() > 20
    assert len(prompts) == 4 and all(map(known, prompts))
    written = path.stat().st_mtime_ns
    assert record_shard(tmp_path / "first", TOY, 3) == path
    assert list(world.record(TOY, [3], tmp_path / "first")) == [path]
    assert path.stat().st_mtime_ns == written


@pytest.mark.slow
def test_a_world_is_learnt_and_generates(tmp_path: Path) -> None:
    """From shards that are there, packaged, and loaded."""
    random = torch.Generator().manual_seed(0)
    for bucket in micro("world").buckets:
        for index in range(bucket.shards):
            path = world.shard_path(tmp_path / "world" / "frames", bucket, index)
            path.parent.mkdir(parents=True, exist_ok=True)
            shape = bucket.clips, bucket.frames, bucket.height, bucket.width, 3
            frames = torch.randint(256, shape, generator=random, dtype=torch.uint8)
            torch.save((frames, [PROMPT] * bucket.clips), path)
    train_micro("world", tmp_path)
    folder = tmp_path / "world_student"
    assert "Freedoom" in (folder / "ARTWORK.md").read_text()
    video = generate(load_pipeline(folder, device="cpu"), PROMPT)
    assert video.frames.shape == (9, 32, 32, 3) and video.frames.isfinite().all()
