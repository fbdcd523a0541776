"""diffusers' AnyFlow transformer: Wan's block with a modulation per token, whose rotary table is
complex (arXiv 2605.13724). Its causal variant is in `wan_anyflow_far`. Written against diffusers
0.42.
"""

from __future__ import annotations

import sys
from typing import Any, Final

import torch
from diffusers.models.attention import FeedForward
from diffusers.models.normalization import RMSNorm
from torch import Tensor

from turbo_rcm_patch.config import PatchConfig
from turbo_rcm_patch.patching.block import PatchedBlock
from turbo_rcm_patch.patching.families import diffusers_parts as parts
from turbo_rcm_patch.patching.families.checks import check_parameters
from turbo_rcm_patch.patching.families.wan import WanBlock, attend_of
from turbo_rcm_patch.patching.find import find_blocks
from turbo_rcm_patch.patching.pieces import RMS_NORMS, KeptTables, Rotary
from turbo_rcm_patch.patching.plain import author_class
from turbo_rcm_patch.patching.sla import attached_proj_l
from turbo_rcm_patch.skip import SkipPair

RMS_NORMS.add(RMSNorm)

_CACHED: Final = ("kv_cache", "kv_cache_flag")
_BLOCK: Final = (
    "self", "hidden_states", "encoder_hidden_states", "temb", "rotary_emb", "attention_mask",
    *_CACHED,
)  # fmt: skip
_ATTENTION: Final = ("self", "attn", "hidden_states", "encoder_hidden_states", "attention_mask")


class AnyFlowBlock(WanBlock):
    """Stands in for the forward of an `AnyFlowTransformerBlock`."""

    __slots__ = ("kept",)

    #: Rotary tables of the forward, by their names in `rotary_emb`.
    kept: dict[str, KeptTables]

    def __call__(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        temb: Tensor,
        rotary_emb: dict[str, Tensor],
        attention_mask: Any,
        kv_cache: dict[str, Tensor] | None = None,
        kv_cache_flag: dict[str, Any] | None = None,
    ) -> Tensor:
        """Run the block.

        Args:
            hidden_states: [B, N, C], the model's dtype.
            encoder_hidden_states: [B, T, C] text, with the image tokens in front.
            temb: [B, N, 6, C].
            rotary_emb: "query" [1, 1, N, D / 2] and "key" [1, 1, Nk, D / 2], complex.
            attention_mask: The causal variant's block mask, or None.
            kv_cache: The causal variant's, see `wan_anyflow_far.Cache`; None without one.
            kv_cache_flag: The same.

        Returns:
            [B, N, C], dtype of hidden_states.
        """
        inputs = (hidden_states, encoder_hidden_states, temb, rotary_emb, attention_mask)
        cached = () if kv_cache is None else (kv_cache, kv_cache_flag)
        out: Tensor = self.run(*inputs, *cached)
        return out

    def call_attention(
        self, attn: Any, h: Tensor, context: Tensor | None, mask: Any, rotary: Any
    ) -> Tensor:
        if context is not None:
            made: Tensor = attn(h, encoder_hidden_states=context)
        else:
            made = attn(h, rotary_emb=rotary)
        return made

    def tables(self, rotary: Any, name: str = "query") -> Rotary:
        table: Tensor = rotary[name]

        def make() -> Rotary:
            pairs = torch.view_as_real(table[0, 0]).float().repeat_interleave(2, dim=1)
            return pairs[..., 0].contiguous(), pairs[..., 1].contiguous()

        return self.kept[name].of((table,), None, make)

    def why_modules(self) -> str:
        if attached_proj_l(self.block.attn1) is not None:
            return "SLA is not known of AnyFlow"
        return super().why_modules()

    def why_inputs(
        self, x: Tensor, context: Any, temb: Any, rotary: Any, mask: Any, *cached: Any
    ) -> str:
        if mask is not None:
            return "its attention has a mask"
        return super().why_inputs(x, context, temb, self.tables(rotary))

    def beside(self) -> list[tuple[Any, Any]]:
        return []


def blocks_of(
    model: Any, path: str, config: PatchConfig, make: type[AnyFlowBlock] = AnyFlowBlock
) -> list[PatchedBlock | SkipPair]:
    """Find the blocks of a model, in the order in which they run.

    Raises:
        FamilyError: A forward takes other parameters than this was written for.
        OpError: The kernels do not take the model's heads or dtype.
    """
    file: Any = sys.modules[author_class(model).__module__]
    causal = getattr(file, "AnyFlowCausalAttnProcessor", None)
    block, attention = file.AnyFlowTransformerBlock, file.AnyFlowAttention
    own, cross = causal or file.AnyFlowAttnProcessor, file.AnyFlowCrossAttnProcessor
    parts.ATTENTIONS[attention] = (own, cross)
    expected = {
        block.forward: _BLOCK,
        attention.forward: ("self", "hidden_states", "kwargs"),
        own.__call__: (*_ATTENTION, "rotary_emb", *(_CACHED if causal else ())),
        cross.__call__: _ATTENTION,
        FeedForward.forward: ("self", "hidden_states", "args", "kwargs"),
    }
    check_parameters(expected, "diffusers")
    found = find_blocks(model.blocks, f"{path}.blocks", block, make)
    made = [one.made(attend_of(one, config), config) for one in found]
    kept = {"query": KeptTables(), "key": KeptTables()}
    for one in made:
        if isinstance(one, AnyFlowBlock):
            one.kept = kept
    return made
