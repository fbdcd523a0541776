"""A process killed at any of its writes: what was there is whole or was replaced by what is whole,
and the next run goes on."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from tests.checkpoints.wan_model import SLA, converted
from tests.files import everything
from tests.killed import killed_at
from turbo_rcm_patch.checkpoints import write_checkpoint
from turbo_rcm_patch.checkpoints.convert import convert_transformer
from turbo_rcm_patch.checkpoints.extra_file import EXTRA_FILE, write_extra
from turbo_rcm_patch.video.store import Store, StoredClip
from turbo_rcm_patch.video.video import write_mp4

FRAMES = np.zeros((5, 32, 32, 3), dtype=np.uint8)


def every_step(
    folder: Path, action: Callable[[], Any], whole: Callable[[], None], *, least: int
) -> None:
    """Kill the action at each write, always from the same start; after each, what it writes is old
    or new, and after some the next run is done."""
    start = folder.with_name(f"{folder.name}-start")
    shutil.copytree(folder, start)
    for step in itertools.count(1):
        shutil.rmtree(folder)
        shutil.copytree(start, folder)
        killed = killed_at(step, folder, action)
        whole()
        if not killed:
            break
        if step % 7 == 1:
            action()
            whole()
    assert step > least, "it wrote less often than was thought"


def old_or_new(path: Path, *texts: bytes) -> Callable[[], None]:
    def check() -> None:
        assert path.read_bytes() in texts

    return check


def test_a_video(tmp_path: Path) -> None:
    path = tmp_path / "v.mp4"
    write_mp4(FRAMES, path, fps=8)
    old = path.read_bytes()
    brighter = FRAMES + 100
    write_mp4(brighter, path, fps=8)
    new = path.read_bytes()
    path.write_bytes(old)
    assert old != new
    every_step(
        tmp_path, lambda: write_mp4(brighter, path, fps=8), old_or_new(path, old, new), least=2
    )


def test_a_converted_folder_that_replaces_another(tmp_path: Path) -> None:
    """Between two renames the old one may lie beside its place; the next run puts it back."""
    out = tmp_path / "here" / "out"
    new = everything(converted(SLA, tmp_path, "new"))
    out.parent.mkdir()
    convert_transformer(tmp_path / "in.pth", out, dtype=torch.float32)
    old = everything(out)
    assert old != new

    def whole() -> None:
        places = [out, *out.parent.glob(".out.partial/old")]
        found = [everything(place) for place in places if place.exists()]
        assert old in found or new in found

    every_step(
        out.parent, lambda: convert_transformer(tmp_path / "in.pth", out, force=True), whole,
        least=6,
    )  # fmt: skip
    assert [path.name for path in out.parent.iterdir()] == ["out"] and everything(out) == new


def test_a_checkpoint_that_is_written_back(tmp_path: Path) -> None:
    folder = converted(SLA, tmp_path)
    path = tmp_path / "here" / "back.pth"
    path.parent.mkdir()
    path.write_bytes(b"old")

    def whole() -> None:
        text = path.read_bytes()
        if text != b"old":
            assert torch.load(path, weights_only=True)

    every_step(
        path.parent, lambda: write_checkpoint(folder, path, force=True), whole,
        least=4,
    )  # fmt: skip
    assert [one.name for one in path.parent.iterdir()] == ["back.pth"]


def test_the_file_beside_a_transformer(tmp_path: Path) -> None:
    path = tmp_path / EXTRA_FILE
    write_extra(tmp_path, {"a": torch.zeros(3)})

    def whole() -> None:
        assert float(load_file(path)["a"].sum()) in (0.0, 3.0)

    every_step(tmp_path, lambda: write_extra(tmp_path, {"a": torch.ones(3)}), whole, least=1)
    assert [one.name for one in tmp_path.iterdir()] == [EXTRA_FILE]


def test_the_folder_of_a_comparison(tmp_path: Path) -> None:
    """Killed at any write of its files, the folder is opened again and knows what is its own."""
    out, key = tmp_path / "out", Store.key("a", 0)
    clip = StoredClip(frames=torch.ones(2), seconds=1.0)

    def run() -> None:
        store = Store(out, {"model": "m"}, fresh=False)
        store.save_clip(key, "baseline", clip)
        store.write_json("runs/baseline.json", {"a": 1})

    def whole() -> None:
        store = Store(out, {"model": "m"}, fresh=False)
        if store.has_clip(key, "baseline"):
            assert torch.equal(store.load_clip(key, "baseline").frames, clip.frames)
        assert store.read_json("runs/baseline.json") in (None, {"a": 1})

    every_step(tmp_path, run, whole, least=5)
    Store(out, {"model": "m"}, fresh=False)
    assert not list(out.rglob(".*")), "what a killed process left is removed"
    for step in itertools.count(1):  # And while it is removed to start again.
        if not killed_at(step, tmp_path, lambda: Store(out, {"model": "n"}, fresh=True)):
            break
        if json.loads((out / "settings.json").read_text())["model"] == "n":
            assert not (out / "clips").exists(), "it is called new when the old is gone"
        Store(out, {"model": "m"}, fresh=True).save_clip(key, "baseline", clip)
    assert step > 3 and not (out / "clips").exists()
