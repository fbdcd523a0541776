"""The recipes at toy size, and a training of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from training.__main__ import train
from training.recipes import RECIPES, Recipe

_TRANSFORMER = {"num_attention_heads": 1, "num_layers": 1}
_WAN = {
    "transformer": {**_TRANSFORMER, "ffn_dim": 64, "text_dim": 64},
    "text_encoder": {"d_model": 64, "d_ff": 160},
}
_CHANGES = {
    "wan": {"vae": {"base_dim": 8, "dim_mult": [1, 1, 2]}, **_WAN},
    "world": _WAN,
    "cogvideox": {  # Its text encoder starts from the tiny Wan's, whose size it has.
        "vae": {"block_out_channels": [8, 8, 8], "sample_height": 32, "sample_width": 32},
        "transformer": {
            **_TRANSFORMER, "time_embed_dim": 16, "sample_height": 8, "sample_width": 8,
            "sample_frames": 9,
        },
    },
}  # fmt: skip


def micro(name: str, steps: int = 4) -> Recipe:
    """A recipe for 9 frames of 32 x 32 pixels, in a few steps a stage."""
    recipe = RECIPES[name]
    changes = {"settings": {"height": 32, "width": 32, "num_frames": 9}, **_CHANGES[name]}
    known = recipe.networks.changes
    merged = {part: {**known.get(part, {}), **changes[part]} for part in changes}
    return replace(
        recipe,
        networks=replace(recipe.networks, changes=merged),
        stages={
            stage: replace(budget, steps=steps, batch=4 if budget.batch == 128 else 2)
            for stage, budget in recipe.stages.items()
        },
        buckets=tuple(
            replace(bucket, frames=9, height=32, width=32 * i, clips=2, shards=4)
            for i, bucket in enumerate(recipe.buckets, 1)
        ),
        fill=3,
    )


def train_micro(name: str, out: Path) -> None:
    train(out, micro(name), torch.device("cpu"))
