"""Going back to a `.pth`, the room that writing takes, and what an interrupted write leaves."""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.turbodiffusion.test_extra import load, run
from tests.turbodiffusion.test_lost_weights import pipeline_base
from tests.turbodiffusion.wan_model import Options, save
from turbo_rcm_patch.errors import CheckpointError, OutputExistsError
from turbo_rcm_patch.patching.sla import held_proj_l
from turbo_rcm_patch.turbodiffusion import EXTRA_FILE, staging, write_checkpoint
from turbo_rcm_patch.turbodiffusion.convert import convert_pipeline, convert_transformer
from turbo_rcm_patch.turbodiffusion.staging import remove_abandoned, staged
from turbowan import models

QUANT = Options("quant", quant=True, dtype=torch.bfloat16, layers=1)
SLA = Options("sla-quant", quant=True, sla=True, dtype=torch.bfloat16, layers=1)
WEIGHTS = "diffusion_pytorch_model.safetensors"


def converted(options: Options, place: Path, **more: Any) -> Path:
    save(options, place / "in.pth")
    convert_transformer(place / "in.pth", place / "folder", **more)
    return place / "folder"


def test_going_back_never_replaces_what_it_reads(tmp_path: Path) -> None:
    folder = converted(SLA, tmp_path)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for name in (WEIGHTS, EXTRA_FILE, "config.json"):
        with pytest.raises(OutputExistsError, match="which is read"):
            write_checkpoint(folder, folder / name, force=True)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_going_back_takes_the_room_of_what_it_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not of the products, which are twice as large."""
    folder = converted(QUANT, tmp_path)
    size, usage = (tmp_path / "in.pth").stat().st_size, shutil.disk_usage(tmp_path)
    done: list[tuple[int, int]] = []
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=size))
    write_checkpoint(
        folder, tmp_path / "back.pth", progress=lambda _, part, total: done.append((part, total))
    )
    assert done[-1][0] == done[-1][1] <= size
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=done[-1][1] - 1))
    with pytest.raises(OutputExistsError, match="too little space"):
        write_checkpoint(folder, tmp_path / "again.pth")


def test_going_back_refuses_proj_l_of_other_weights(tmp_path: Path) -> None:
    folder = converted(SLA, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    del config["_turbo_rcm_sla"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="other weights have left them there"):
        write_checkpoint(folder, tmp_path / "back.pth")
    assert not list(tmp_path.glob("*back*"))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_weights_in_fp8_go_back(dtype: torch.dtype, tmp_path: Path) -> None:
    state = save(Options(layers=1), tmp_path / "in.pth")
    key = "blocks.0.ffn.0.weight"
    torch.save(state | {key: state[key].to(dtype)}, tmp_path / "in.pth")
    convert_transformer(tmp_path / "in.pth", tmp_path / "out")
    write_checkpoint(tmp_path / "out", tmp_path / "back.pth")
    back = torch.load(tmp_path / "back.pth", weights_only=True)[key]
    assert back.dtype == dtype and torch.equal(back.float(), state[key].to(dtype).float())


def test_an_interrupted_removal_is_done_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock goes last, so that who comes next sees that nobody holds it."""
    with monkeypatch.context() as patch:

        def interrupted(path: Path, **_: Any) -> None:
            (path / "lock").unlink(missing_ok=True)  # Whatever comes first in a directory.
            raise KeyboardInterrupt

        patch.setattr(staging.shutil, "rmtree", interrupted)
        with (
            pytest.raises(KeyboardInterrupt),
            staged(tmp_path / "n", force=False, folder=True) as made,
        ):
            (made / "w").write_text("gigabytes")
            raise ValueError
    assert (made.parent / "lock").exists() and (made / "w").exists()
    remove_abandoned(tmp_path / "n")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("age", "left"), [(0, True), (7200, False)])
@pytest.mark.parametrize("marker", [None, "unlocked"])
def test_what_lost_its_lock_is_removed_later(
    age: int, left: bool, marker: str | None, tmp_path: Path
) -> None:
    """A new one has no lock yet, and on a file system without locks it never gets one."""
    place, target = tmp_path / ".n.partial-x", tmp_path / "n"
    (place / "old").mkdir(parents=True)
    (place / "old" / "config.json").write_text("the only one")
    if marker:
        (place / marker).touch()
    os.utime(place, (time.time() - age,) * 2)
    remove_abandoned(target)
    left = left or marker is not None
    assert place.exists() == left and target.exists() != left
    if not left:
        assert (target / "config.json").read_text() == "the only one"


def test_the_folder_one_is_in_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(QUANT, tmp_path / "in.pth")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    convert_transformer(tmp_path / "in.pth", ".", force=True)
    assert (tmp_path / "here" / "config.json").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "in.pth"]


def test_a_disk_without_links_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(Options(layers=1), tmp_path / "in.pth")
    base = pipeline_base(tmp_path / "base")

    def refused(*_: Any, **__: Any) -> None:
        raise OSError(errno.EINVAL, "a required privilege is not held by the client")

    monkeypatch.setattr(os, "symlink", refused)
    with pytest.raises(OutputExistsError, match="--copy"):
        convert_pipeline(tmp_path / "in.pth", tmp_path / "out", base=base)
    assert not (tmp_path / "out").exists()


def test_the_scripts_load_int8_weights_alone(tmp_path: Path) -> None:
    folder = converted(SLA, tmp_path)
    convert_transformer(tmp_path / "in.pth", tmp_path / "only", int8_only=True)
    both, only = (
        models._transformer(path, torch.bfloat16, sla=True, int8=True)
        for path in (folder, tmp_path / "only")
    )
    assert len(held_proj_l(only)) == 1
    assert torch.equal(run(only, torch.bfloat16), run(both, torch.bfloat16))


def test_a_changed_weight_does_not_go_back_as_the_one_before(tmp_path: Path) -> None:
    folder = converted(QUANT, tmp_path)
    tensors = load_file(folder / WEIGHTS)
    tensors["blocks.0.attn1.to_q.weight"] *= 1.02
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="is not the product"):
        write_checkpoint(folder, tmp_path / "back.pth")
    (folder / EXTRA_FILE).unlink()
    write_checkpoint(folder, tmp_path / "back.pth")
    back = torch.load(tmp_path / "back.pth", weights_only=True)
    assert torch.equal(back["blocks.0.self_attn.q.weight"],
                       load(folder, torch.bfloat16).blocks[0].attn1.to_q.weight)  # fmt: skip
