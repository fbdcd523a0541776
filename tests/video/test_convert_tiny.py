"""The shipped model as a `.pth`: a base whose settings and heads are not Wan's."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from turbo_rcm_patch.__main__ import main
from turbo_rcm_patch.checkpoints.convert import _KEPT
from turbo_rcm_patch.checkpoints.keys import Sizes, names
from turbo_rcm_patch.tiny import TINY_WAN
from turbo_rcm_patch.video import Settings

TEXT, TIME = (f"condition_embedder.{name}_embedder.linear_1" for name in ("text", "time"))


@pytest.fixture(scope="module")
def pth(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "tiny.pth"
    stored = {}
    for file in (TINY_WAN / "transformer").glob("*.safetensors"):
        stored |= load_file(file)
    dim, ffn = (stored[f"blocks.0.ffn.net.{i}.weight"].shape[0] for i in ("2", "0.proj"))
    sizes = Sizes(
        dim=dim, head_dim=dim // 4, ffn=ffn, text=stored[f"{TEXT}.weight"].shape[1],
        freq=stored[f"{TIME}.weight"].shape[1], inputs=stored["patch_embedding.weight"].shape[1],
        outputs=stored["proj_out.weight"].shape[0] // 4,
        layers=len({key.split(".")[1] for key in stored if key.startswith("blocks.")}),
    )  # fmt: skip
    torch.save({n.theirs: stored[n.ours].reshape(n.shape) for n in names(sizes)}, path)
    return path


def converted(pth: Path, out: Path, *more: str) -> dict[str, Any]:
    assert main(["convert", str(pth), str(out), "--base", str(TINY_WAN), *more]) == 0
    settings: dict[str, Any] = json.loads((out / "turbo_rcm.json").read_text())
    return settings


def test_the_settings_of_the_base_are_kept(pth: Path, tmp_path: Path) -> None:
    settings = converted(pth, tmp_path / "tw4", "--heads", "4")
    base = json.loads((TINY_WAN / "turbo_rcm.json").read_text())
    assert settings == base | {"sampler": "rcm", "steps": 4, "sigma_max": 80.0}


def test_guidance_of_a_teacher_is_not_kept(pth: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    for path in TINY_WAN.iterdir():
        (base / path.name).symlink_to(path)
    (base / "turbo_rcm.json").unlink()
    teacher = {"sampler": "scheduler", "steps": 50, "guidance_scale": 5.0, "guidance_scale_2": 3.0}
    (base / "turbo_rcm.json").write_text(json.dumps(teacher | {"height": 64, "note": "mine"}))
    settings = converted(pth, tmp_path / "out", "--base", str(base))
    own = {"sampler": "rcm", "steps": 4, "sigma_max": 80.0, "guidance_scale": 1.0}
    assert settings == own | {"height": 64}
    every = {field.name for field in fields(Settings)}
    dropped = {"guidance_scale_2", "lora"}
    assert every == {*_KEPT, *own, *dropped}, "convert decides about every setting"


def test_heads_are_those_of_the_base(pth: Path, tmp_path: Path, capsys) -> None:
    converted(pth, tmp_path / "whole")
    assert heads_of(tmp_path / "whole" / "transformer") == 4 and "channels" not in told(capsys)
    command = ["convert", str(pth), str(tmp_path / "other"), "--base", str(TINY_WAN)]
    assert main([*command, "--heads", "2"]) == 2
    text = told(capsys)
    assert "num_attention_heads: 4 there, 2 in the checkpoint" in text


def test_heads_that_nothing_shows_are_told(pth: Path, tmp_path: Path, capsys) -> None:
    assert main(["convert", str(pth), str(tmp_path / "bare")]) == 0
    assert "2 heads of 128 channels: --heads N if that is wrong" in told(capsys)
    assert main(["convert", str(pth), str(tmp_path / "four"), "--heads", "4"]) == 0
    assert "channels" not in told(capsys)


def heads_of(folder: Path) -> int:
    heads: int = json.loads((folder / "config.json").read_text())["num_attention_heads"]
    return heads


def told(capsys: pytest.CaptureFixture[str]) -> str:
    printed = capsys.readouterr()
    return " ".join((printed.out + printed.err).split())
