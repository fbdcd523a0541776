"""The shipped model as a `.pth` and back: a base whose settings and heads are not Wan's."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
from diffusers import WanPipeline

from turbo_rcm_patch.__main__ import main
from turbo_rcm_patch.tiny import TINY_WAN

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
