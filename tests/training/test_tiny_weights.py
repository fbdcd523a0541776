"""The model that ships: it is complete, small, loads in diffusers alone, and does what is asked.

400 videos are judged on a GPU (`results/tiny_wan.json`); here a few, by the same detector.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from diffusers import WanPipeline

from training.evaluate import Evaluation, zeroed
from turbo_rcm_patch.tiny import TINY_WAN

RESULTS = Path(__file__).parents[2] / "results" / "tiny_wan.json"
ATTRIBUTES = ("colour", "shape", "motion")


@pytest.fixture(scope="module")
def judge() -> Evaluation:
    return Evaluation.load(TINY_WAN, count=4, seed=11, device="cpu", dtype=torch.bfloat16)


def test_it_is_small_and_holds_safetensors_only() -> None:
    files = [path for path in TINY_WAN.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 16 * 2**20
    assert {path.suffix for path in files} <= {".json", ".safetensors", ".md"}


def test_every_part_loads() -> None:
    pipe = WanPipeline.from_pretrained(TINY_WAN)
    config = pipe.transformer.config
    assert config.attention_head_dim in (64, 128)
    settings = json.loads((TINY_WAN / "turbo_rcm.json").read_text())
    assert settings["num_frames"] >= 16 and settings["height"] >= 128
    frames = (settings["num_frames"] - 1) // 4 + 1
    assert frames * (settings["height"] // 8) * (settings["width"] // 8) >= 1000


def test_held_out_prompts_become_what_they_say(judge: Evaluation, tmp_path: Path) -> None:
    """One of four may miss each attribute; guessing gets one of eight."""
    found = judge.judge(judge.frames(steps=4), tmp_path / "sheet.png")
    assert all(found[name] >= 3 / 4 for name in ATTRIBUTES), found


@pytest.mark.parametrize("attention", ["attn1", "attn2"])
def test_without_an_attention_it_does_not(
    judge: Evaluation, attention: str, tmp_path: Path
) -> None:
    """Most of the time goes into decoding, so it is one video."""
    few = judge.first(1)
    with zeroed(judge.pipe.transformer.blocks, attention):
        found = few.judge(few.frames(steps=4), tmp_path / "sheet.png")
    assert found["all"] == 0, found


def test_the_recorded_evaluation_meets_its_bounds() -> None:
    """On 400 held-out prompts; see the model card."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert results["videos"] >= 400
    for name in ATTRIBUTES:
        assert results["rendered"][name] >= 0.99
        assert results["shuffled"][name] <= 0.2
        student = results["student_4_steps"][name]
        assert student >= 0.95 and student >= results["teacher"][name] - 0.03
        for zero in ("zeroed_self_attention", "zeroed_cross_attention"):
            assert results[zero][name] < student / 2
