"""The models that ship: complete, small, loaded by diffusers alone, and they do what is asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline

import training
from turbo_rcm_patch.tiny import TINY_COGVIDEOX, TINY_WAN
from turbo_rcm_patch.tiny.prompts import COLOURS, DEMO_PROMPTS
from turbo_rcm_patch.video import generate, load_pipeline

TINY, WORLD = [TINY_WAN, TINY_COGVIDEOX], Path(training.__file__).parent / "weights" / "world"


@pytest.mark.parametrize("folder", [*TINY, WORLD], ids=lambda path: path.name)
def test_it_is_small_and_every_part_loads(folder: Path) -> None:
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 16 * 2**20
    assert {path.suffix for path in files} <= {".json", ".safetensors", ".md"}
    config = DiffusionPipeline.from_pretrained(folder).transformer.config
    assert config.attention_head_dim in (64, 128)
    settings = json.loads((folder / "turbo_rcm.json").read_text())
    frames = (settings["num_frames"] - 1) // 4 + 1
    assert frames * (settings["height"] // 8) * (settings["width"] // 8) >= 1000


@pytest.mark.parametrize("folder", TINY, ids=lambda path: path.name)
def test_a_held_out_prompt_becomes_what_it_says(folder: Path) -> None:
    """A red circle moves right: its colour, and the way of its middle."""
    assert DEMO_PROMPTS[0].startswith("a large red circle moving right")
    frames = generate(load_pipeline(folder, device="cpu"), DEMO_PROMPTS[0]).frames  # [F, H, W, 3]
    bright = frames.amax(-1) > 0.58
    colour = frames[bright].median(0).values
    distance = {name: torch.dist(colour, torch.tensor(rgb)) for name, rgb in COLOURS.items()}
    assert min(distance, key=distance.__getitem__) == "red" and distance["red"] < 0.35
    middle = [float(frame.nonzero()[:, 1].float().mean()) for frame in bright]
    assert 35 < middle[-1] - middle[0] < 60, middle  # training moved it by 44 to 52 pixels
    assert all(0.05 < float(frame.float().mean()) < 0.2 for frame in bright)
