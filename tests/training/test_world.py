"""A recorded world: what its prompts say, and what a recording and a training on it leave."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from training import world
from training.__main__ import main
from training.world import Bucket, Shard, caption, look, maps_of, record_shard, words
from turbo_rcm_patch.errors import MissingPackageError
from turbo_rcm_patch.video import generate, load_pipeline

TOY = Bucket("toy", 9, 64, 96, clips=4)
FACTS = {
    "policy": "fight", "monster": "zombie", "light": "dim", "colour": "brown", "space": "wide",
    "place": "base", "camera": "still",
}  # fmt: skip


def test_a_prompt_is_a_sentence_of_known_words() -> None:
    assert caption(FACTS) == "fighting a zombie in a dim brown wide base, camera still"
    for policy in world._POLICIES:
        assert set(caption(FACTS | {"policy": policy}).replace(",", "").split()) <= set(words())


@pytest.mark.parametrize(
    ("colour", "said"),
    [((120, 120, 120), ("bright", "grey")), ((70, 60, 40), ("dark", "brown")),
     ((200, 10, 10), ("dim", "red")), ((20, 60, 200), ("bright", "blue"))],
)  # fmt: skip
def test_frames_say_their_light_and_colour(colour: tuple[int, ...], said: tuple[str, str]) -> None:
    assert look(np.full((2, 4, 4, 3), colour, np.uint8)) == said


@pytest.mark.parametrize("game", ["freedoom1.wad", "freedoom2.wad"])
def test_maps_of_the_evaluation_are_unseen(game: str) -> None:
    seen, unseen = (set(maps_of(game, held_out=held_out)) for held_out in (False, True))
    assert not seen & unseen and len(unseen) >= 6 and len(seen) >= 25


def test_without_the_package_only_what_is_there_is_read(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(world, "find_spec", lambda name: None)
    shard = Shard(TOY, 0)
    with pytest.raises(MissingPackageError, match="vizdoom"):
        next(world.record([shard], tmp_path))
    shard.path(tmp_path).touch()
    assert list(world.record([shard], tmp_path)) == [shard.path(tmp_path)]


def test_a_shard_has_the_bytes_of_its_seed(tmp_path: Path) -> None:
    pytest.importorskip("vizdoom")
    path, again, other = (
        record_shard(tmp_path / name, Shard(TOY, 0, seed, held_out=True))
        for name, seed in (("first", 3), ("second", 3), ("third", 4))
    )
    assert path.read_bytes() == again.read_bytes() != other.read_bytes()
    frames, facts = np.load(path), json.loads(path.with_suffix(".json").read_text())
    assert frames.shape == (4, 9, 64, 96, 3) and frames.mean((1, 2, 3, 4)).min() > 20
    assert {fact["map"].split()[1] for fact in facts} <= {
        name for game in world._CAMPAIGNS for name in maps_of(game, held_out=True)
    }
    written = path.stat().st_mtime_ns
    assert record_shard(tmp_path / "first", Shard(TOY, 0, 3, held_out=True)) == path
    assert path.stat().st_mtime_ns == written


def test_a_world_is_learnt_in_pieces_and_generates(tmp_path, monkeypatch) -> None:
    """Recorded, trained in pieces that are over at once, packaged in int8, and loaded."""
    pytest.importorskip("vizdoom")
    command = f"train --family world --micro --device cpu --out {tmp_path} --minutes 1e-9"
    pieces = 0
    while '"finished"' not in (log := tmp_path / "log.jsonl").read_text() if pieces else True:
        assert main(command.split()) == 0 and (pieces := pieces + 1) < 40
    assert pieces > 3 and '"out of time"' in log.read_text()
    for name in ("vae", "teacher", "student", "curves"):
        assert (tmp_path / f"{name}.png").is_file()
    folder = tmp_path / "world_student"
    assert "Freedoom" in (folder / "ARTWORK.md").read_text()
    made = generate(load_pipeline(folder, device="cpu"), caption(FACTS))
    assert made.frames.shape == (9, 32, 32, 3) and made.frames.isfinite().all()
