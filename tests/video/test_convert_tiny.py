"""The shipped model as a `.pth` and back: a base whose settings and heads are not Wan's."""

from __future__ import annotations

import json
import runpy
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from diffusers import WanPipeline

from turbo_rcm_patch.__main__ import main
from turbo_rcm_patch.tiny import TINY_WAN
from turbo_rcm_patch.turbodiffusion.convert import _KEPT
from turbo_rcm_patch.video import Settings
from turbowan.models import transformer_folder

T2V = Path(__file__).parents[2] / "examples" / "turbowan_t2v.py"


@pytest.fixture(scope="module")
def pth(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "tiny.pth"
    assert main(["convert", "--back", str(TINY_WAN), str(path)]) == 0
    return path


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens pipelines were asked to make of a prompt."""
    seen: list[int] = []
    encode = WanPipeline.encode_prompt

    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs["max_sequence_length"])
        return encode(self, *args, **kwargs)

    monkeypatch.setattr(WanPipeline, "encode_prompt", recorded)
    return seen


def converted(pth: Path, out: Path, *more: str) -> dict[str, Any]:
    assert main(["convert", str(pth), str(out), "--base", str(TINY_WAN), *more]) == 0
    settings: dict[str, Any] = json.loads((out / "turbo_rcm.json").read_text())
    return settings


def test_the_settings_of_the_base_are_kept(pth: Path, tmp_path: Path, prompts: list[int]) -> None:
    settings = converted(pth, tmp_path / "tw4", "--heads", "4")
    base = json.loads((TINY_WAN / "turbo_rcm.json").read_text())
    assert settings == base | {"sampler": "rcm", "steps": 4, "sigma_max": 80.0}
    arguments = ["--dit_path", str(tmp_path / "tw4"), "--prompt", "a red circle"]
    arguments += ["--resolution", "32x32", "--num_frames", "5", "--num_steps", "1"]
    arguments += ["--attention_type", "original", "--device", "cpu"]
    arguments += ["--save_path", str(tmp_path / "video.mp4")]
    assert runpy.run_path(str(T2V))["main"](arguments) == 0
    assert prompts == [24] and (tmp_path / "video.mp4").stat().st_size > 500


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
    dropped = {"guidance_scale_2", "strength", "times", "shift", "lora"}
    assert every == {*_KEPT, *own, *dropped}, "convert decides about every setting"


def test_heads_are_those_of_the_base(pth: Path, tmp_path: Path, capsys) -> None:
    converted(pth, tmp_path / "whole")
    assert heads_of(tmp_path / "whole" / "transformer") == 4 and "channels" not in told(capsys)
    command = ["convert", str(pth), str(tmp_path / "other"), "--base", str(TINY_WAN)]
    assert main([*command, "--heads", "2"]) == 2
    text = told(capsys)
    assert "--heads" in text and "expected: 4, as" in text and "got: 2" in text


def test_heads_that_nothing_shows_are_told(pth: Path, tmp_path: Path, capsys) -> None:
    assert main(["convert", str(pth), str(tmp_path / "bare")]) == 0
    assert "2 heads of 128 channels: --heads N if that is wrong" in told(capsys)
    assert main(["convert", str(pth), str(tmp_path / "four"), "--heads", "4"]) == 0
    assert "channels" not in told(capsys)
    for folder, text in (
        ("four", "4 heads of 64 channels: convert it with --heads 4"),
        ("bare", ""),
    ):
        back = tmp_path / f"{folder}.pth"
        assert main(["convert", "--back", str(tmp_path / folder), str(back)]) == 0
        printed = told(capsys)
        assert text in printed and ("channels" in printed) == bool(text)


def test_the_script_converts_with_the_heads_of_the_base(pth: Path, tmp_path: Path) -> None:
    guessed = transformer_folder(pth, cache=tmp_path)
    assert heads_of(guessed) == 2
    arguments = ["--dit_path", str(pth), "--base", "tiny", "--cache", str(tmp_path)]
    arguments += ["--prompt", "a ring", "--resolution", "32x32", "--num_frames", "5"]
    arguments += ["--num_steps", "1", "--attention_type", "original", "--device", "cpu"]
    arguments += ["--save_path", str(tmp_path / "video.mp4")]
    assert runpy.run_path(str(T2V))["main"](arguments) == 0
    assert heads_of(guessed) == 4, "converted again"
    made = (guessed / "config.json").stat().st_ino
    assert transformer_folder(pth, cache=tmp_path, base=TINY_WAN) == guessed
    assert (guessed / "config.json").stat().st_ino == made


def heads_of(folder: Path) -> int:
    heads: int = json.loads((folder / "config.json").read_text())["num_attention_heads"]
    return heads


def told(capsys: pytest.CaptureFixture[str]) -> str:
    printed = capsys.readouterr()
    return " ".join((printed.out + printed.err).split())
