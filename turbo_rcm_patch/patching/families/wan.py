"""diffusers' Wan transformers whose block is the plain one, each with its own copy of it.

- Wan: 2.1 T2V, I2V and FLF2V (first and last frame), both experts of 2.2 A14B, and 2.2 TI2V with a
  gate per token (arXiv 2503.20314);
- ChronoEdit, whose rotary table alone differs (arXiv 2510.04290);
- Wan-Animate, which adds a face adapter between its blocks (arXiv 2509.14055).

Written against diffusers 0.42.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from turbo_rcm_patch.config import PatchConfig
from turbo_rcm_patch.patching.families._attention import attention_pair
from turbo_rcm_patch.patching.families.wan_block import BlockClasses
from turbo_rcm_patch.patching.families.wan_plan import check_blocks, check_signatures, plan_blocks
from turbo_rcm_patch.patching.pairs import Runs
from turbo_rcm_patch.patching.registry import author_class
from turbo_rcm_patch.patching.state import ModelPlan, PairState
from turbo_rcm_patch.skip import SkipPair


def check(model: nn.Module) -> None:
    """Raise a typed error if this instance cannot be patched at all."""
    check_signatures(_classes(model))
    check_blocks(model, "blocks", _classes(model))


def plan(model: nn.Module, path: str, config: PatchConfig) -> ModelPlan:
    """The pairs of every block, how each would run, and the block forwards to install."""
    result = ModelPlan(model, path, config, states=[])
    plan_blocks(result, "blocks", _classes(model))
    for index, attn in enumerate(getattr(model, "face_adapter", ())):
        pair = _face_pair(attn, f"{path}.face_adapter.{index}".lstrip("."), model)
        result.states.append(PairState(pair))
    return result


def _classes(model: nn.Module) -> BlockClasses:
    """The block and its attention in the model's own file: they have the same names in each."""
    file: Any = sys.modules[author_class(model).__module__]
    return BlockClasses(file.WanTransformerBlock, file.WanAttention, file.WanAttnProcessor)


def _face_pair(attn: Any, path: str, model: Any) -> SkipPair:
    """Wan-Animate's attention of a frame's tokens to that frame's face."""
    keys = model.config.face_encoder_num_heads + 1
    runs: Runs = (
        "as-written",
        f"the model's own forward adds it between two blocks, and attention to the {keys} "
        "tokens of a face costs next to nothing",
    )
    return attention_pair(attn, path, "cross", runs)
