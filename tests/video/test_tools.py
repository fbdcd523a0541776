"""The tools that measure a trained model take any folder, and their tables hold what they say."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.video.micro import SMALL
from tools import combinations, lora, separation
from training import world

PROMPTS = ["a red circle moves left", "a blue ring moves up"]
SIZES = ["--num-frames", "5", "--height", "32", "--width", "32"]


@pytest.fixture
def folder(micro_folder: Path, tmp_path: Path) -> Path:
    """A model that was made for few steps of small videos, and a file of prompts."""
    made = shutil.copytree(micro_folder, tmp_path / "model")
    own = {"sampler": "rcm", "steps": 3, "guidance_scale": 1.0, "fps": 12, **SMALL}
    (made / "turbo_rcm.json").write_text(json.dumps(own))
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
    return made


def given(folder: Path, *options: str) -> list[str]:
    place = folder.parent
    names = ["--model", str(folder), "--prompts", str(place / "prompts.txt")]
    return [*names, "--out", str(place / "out"), "--json", str(place / "found.json"), *options]


def found(folder: Path) -> Any:
    return json.loads((folder.parent / "found.json").read_text())


def test_separation_takes_another_model_and_its_prompts(folder: Path) -> None:
    separation.main(given(folder))
    videos = torch.load(folder.parent / "out" / "baseline.pt")
    assert [(*one["frames"].shape, one["fps"]) for one in videos] == 2 * [(5, 32, 32, 3, 12)]
    table = found(folder)
    assert table["prompts"] == PROMPTS and table["model"] == "model"
    assert "two threads" in table["changes"]["legal"]
    far = table["measures"]["latents"]["median"]
    assert all(far[fault] > 0 for fault in table["changes"]["faults"])
    assert far["int4"] > 3 * far["math attention"]
    with pytest.raises(SystemExit):  # and uses no videos of other prompts
        separation.main(given(folder)[:2] + given(folder)[4:])


def test_caches_skip_and_the_patch_beside_them_is_judged(folder: Path, no_pictures: None) -> None:
    rows = [*combinations.CACHES]
    more = [
        "--sampler",
        "scheduler",
        "--steps",
        "10",
        "--guidance-scale",
        "2",
        "--threshold",
        "0.9",
        *SIZES,
    ]
    combinations.main([*given(folder, *more), "--rows", "plain", *rows])
    table = found(folder)["rows"]
    assert list(table) == ["plain", *rows]
    assert table["plain"]["effect"] == 0
    for name in rows:  # Each changes the videos more than the patch does.
        assert table[name]["effect"] > 2 * table[name]["distance"] > 0, name


def test_a_lora_is_trained_and_the_patch_beside_it_is_judged(
    folder: Path, no_pictures: None
) -> None:
    clips = np.random.default_rng(0).integers(0, 256, (4, 5, 32, 32, 3), np.uint8)
    np.save(folder.parent / "clips.npy", clips)
    facts = [{"colour": name, "prompt": f"in a {name} base"} for name in ("green", "red") * 2]
    (folder.parent / "clips.json").write_text(json.dumps(facts))
    options = ["--clips", str(folder.parent / "clips.npy"), "--steps", "12", "--lr", "0.03"]
    lora.main(["--model", str(folder), "--out", str(folder.parent / "made"), *options])
    file = str(folder.parent / "made" / "lora.safetensors")
    combinations.main(
        [*given(folder), "--rows", "plain", "LoRA", "--lora", file, "--colour", "grey"]
    )
    table = found(folder)["rows"]
    assert table["LoRA"]["effect"] > 2 * table["LoRA"]["distance"] > 0
    unpatched, patched, count = table["LoRA"]["colour"]
    assert count == len(PROMPTS) and max(unpatched, patched) <= count


def test_prompts_for_evaluation_speak_the_language_of_the_clips() -> None:
    prompts = combinations.PROMPTS.read_text().splitlines()
    assert len(set(prompts)) == 20
    known = set(world.words())
    assert all(set(one.replace(",", "").split()) <= known for one in prompts)
    assert {combinations.colour_of(one) for one in prompts} <= {*world.HUES, "grey"}
