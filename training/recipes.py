"""What each model is trained with: sizes, clips, and the steps of its stages."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from training.data import Shapes, World
from training.loop import Budget
from training.networks import CogVideoX, Wan
from training.world import Bucket
from turbo_rcm_patch.tiny import TINY_COGVIDEOX, TINY_WAN

#: Of the autoencoders, in space.
SHRINK: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a model is trained.

    The autoencoders shrink by 4 in space and in time, to 8 channels. So 17 frames of 128 x 128 are
    5 x 32 x 32 latents and, with patches of (1, 2, 2), 1,280 tokens.

    Attributes:
        name: Begins the names of the folders that a training writes.
        networks: Its networks.
        source: Where its clips come from.
        stages: Stage -> budget, in the order of training. Batches are of the first bucket; others
            have as many tokens.
        buckets: Shapes of the clips. The model is made for the first one.
        fill: Batches of the teacher before the student's first step.
        guidance: Classifier-free guidance of the teacher.
        licence: Of the clips, written beside the weights.
    """

    name: str
    networks: Wan
    source: type[Shapes | World] = Shapes
    stages: Mapping[str, Budget]
    buckets: tuple[Bucket, ...]
    fill: int
    guidance: float = 1.5
    licence: Path | None = None

    def latent_shape(self, bucket: Bucket) -> tuple[int, int, int, int]:
        """(C, F, H, W) of the latents of one clip."""
        frames = (bucket.frames - 1) // 4 + 1
        return 8, frames, bucket.height // SHRINK, bucket.width // SHRINK

    def batch(self, stage: str, bucket: Bucket) -> int:
        """Clips of a bucket with as many tokens as the stage's batch of the first one."""
        size, first = (math.prod(self.latent_shape(b)) for b in (bucket, self.buckets[0]))
        return max(1, self.stages[stage].batch * first // size)


_WORLD: Final[dict[str, dict[str, Any]]] = {
    "transformer": {"num_attention_heads": 2, "attention_head_dim": 128},
    "settings": {"height": 96, "width": 160, "fps": 16},
}
RECIPES: Final = {
    "wan": Recipe(
        name="wan", networks=Wan(TINY_WAN, {}, Shapes.words),
        stages={
            "vae": Budget(1520, 16, 1e-3), "teacher": Budget(6220, 128, 1e-3),
            "student": Budget(2380, 128, 5e-4), "decoder": Budget(1600, 16, 6e-4),
        },
        buckets=(Bucket("square", 17, 128, 128, clips=64, shards=768),), fill=48,
    ),
    "cogvideox": Recipe(
        name="cogvideox",
        networks=CogVideoX(TINY_COGVIDEOX, {}, Shapes.words),
        stages={
            "twin": Budget(2000, 8, 1e-3), "teacher": Budget(7880, 128, 1e-3),
            "student": Budget(1520, 128, 5e-4),
        },
        buckets=(Bucket("square", 17, 128, 128, clips=64, shards=384),), fill=32,
    ),
    "world": Recipe(
        name="world", source=World,
        networks=Wan(TINY_WAN, _WORLD, World.words, tuned=True),
        stages={
            "vae": Budget(1000, 8, 1e-3), "teacher": Budget(3500, 128, 1e-3, muon=True),
            "student": Budget(700, 128, 4e-4), "decoder": Budget(150, 8, 6e-4),
        },
        buckets=(
            Bucket("short", 17, 96, 160, clips=32, shards=160, share=0.7),
            Bucket("long", 81, 120, 208, clips=8, shards=32, share=0.2),
            Bucket("large", 41, 240, 416, clips=4, shards=26, share=0.1),
        ),
        fill=48, guidance=2.5,
        licence=Path(__file__).parent / "weights" / "world" / "ARTWORK.md",
    ),
}  # fmt: skip
