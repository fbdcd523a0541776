"""diffusers' SkyReels-V2: the Wan block with a mask, and with another layout of its modulation.

With `num_frame_per_block` above 1 self-attention gets a block-causal mask over frames; the kernels
have no such mask, so that attention is exact and only what follows it is fused. With diffusion
forcing every frame has a timestep of its own, [B, 6, N, C] once it is spread over tokens
(SkyReels-V2: arXiv 2504.13074). Written against diffusers 0.42.
"""

from __future__ import annotations

from typing import Any

from diffusers.models.transformers import transformer_skyreels_v2 as author
from torch import nn

from turbo_rcm_patch.config import PatchConfig
from turbo_rcm_patch.patching.families.wan_block import BlockClasses, WanBlockForward
from turbo_rcm_patch.patching.families.wan_plan import (
    BLOCK,
    check_blocks,
    check_signatures,
    plan_blocks,
)
from turbo_rcm_patch.patching.state import ModelPlan


def check(model: nn.Module) -> None:
    """Raise a typed error if this instance cannot be patched at all."""
    check_signatures(_classes(), (*BLOCK, "attention_mask"))
    check_blocks(model, "blocks", _classes())


def plan(model: nn.Module, path: str, config: PatchConfig) -> ModelPlan:
    """The pairs of every block, how each would run, and the block forwards to install."""
    network: Any = model
    result = ModelPlan(model, path, config, states=[])
    masked = network.config.num_frame_per_block > 1
    plan_blocks(result, "blocks", _classes(), SkyReelsBlockForward, masked=masked)
    return result


def _classes() -> BlockClasses:
    return BlockClasses(
        author.SkyReelsV2TransformerBlock,
        author.SkyReelsV2Attention,
        author.SkyReelsV2AttnProcessor,
    )


class SkyReelsBlockForward(WanBlockForward):
    """Stands in for the forward of one block."""

    __slots__ = ()

    takes_mask = True
    frames_inside = True
