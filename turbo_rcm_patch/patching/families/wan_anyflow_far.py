"""diffusers' causal AnyFlow transformer (FAR), which generates a video chunk by chunk (arXiv
2605.13724). Written against diffusers 0.42.

A denoising step attends to the cached keys of earlier chunks and to its own, and runs fused. A
forward that fills the cache has a block mask and is its author's: what the guard runs beside it
would write other keys.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from turbo_rcm_patch.config import PatchConfig
from turbo_rcm_patch.ops import unchecked
from turbo_rcm_patch.patching.block import PatchedBlock
from turbo_rcm_patch.patching.families import diffusers_parts as parts
from turbo_rcm_patch.patching.families import wan_anyflow
from turbo_rcm_patch.patching.families.wan_anyflow import AnyFlowBlock
from turbo_rcm_patch.patching.pieces import NO_NORMS, Notes, Operands, called
from turbo_rcm_patch.skip import SkipPair

#: The author's processor appends zeros to q, k and v up to a multiple of this many queries. It has
#: no mask, so those zeros are keys like others.
_BLOCK: Final = 128


class Cache(NamedTuple):
    """Keys and values of earlier chunks.

    Attributes:
        held: "compressed_cache" and "full_cache", [2, B, H, L, D] each: keys after their norm and
            before their rotary embedding, and values.
        flags: How many tokens of each are filled, and whether this forward fills them.
    """

    held: dict[str, Tensor]
    flags: dict[str, Any]

    def joined(self, index: int, new: Tensor) -> Tensor:
        """Return the cached keys (index 0) or values (1) before the new ones: [B, Nk, H*D]."""
        counts = (
            ("compressed_cache", self.flags["num_cached_compressed_tokens"]),
            ("full_cache", self.flags["num_cached_full_tokens"]),
        )
        old = [self.held[name][index, :, :, :n].transpose(1, 2).flatten(2) for name, n in counts]
        return torch.cat([*old, new], dim=1)


class AnyFlowFARBlock(AnyFlowBlock):
    """Stands in for the forward of a causal `AnyFlowTransformerBlock`."""

    __slots__ = ()

    def fast(  # type: ignore[override]
        self,
        notes: Notes | None,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        temb: Tensor,
        rotary_emb: Any,
        mask: None,
        *cached: Any,
    ) -> Tensor:
        cache: Any = Cache(*cached)
        return super().fast(notes, hidden_states, encoder_hidden_states, temb, rotary_emb, cache)

    def self_attention(
        self, notes: Notes | None, attn: Any, h: Any, rotary: Any, mask: Any
    ) -> Tensor:
        if self.config.attention == "exact":
            made: Tensor = attn(h, rotary_emb=rotary, kv_cache=mask.held, kv_cache_flag=mask.flags)
            return made
        attend = self.attend
        q, k, v = parts.qkv(attn, h)
        k, v = mask.joined(0, called(attn.norm_k, k)), mask.joined(1, v)
        rest = (attend.heads, 1e-6, attend.impl)
        q = unchecked.norm_rotate(called(attn.norm_q, q), None, None, *self.tables(rotary), *rest)
        k = unchecked.norm_rotate(k, None, None, *self.tables(rotary, "key"), *rest)
        k, v = (F.pad(x, (0, 0, 0, -q.shape[1] % _BLOCK)) for x in (k, v))
        out = attend(q, k, v, NO_NORMS)
        if notes is not None:
            notes.attention = Operands(q, k, v, NO_NORMS, None, attend.heads, out)
        return parts.project_out(attn, out)

    def lengths(self, *inputs: Any) -> tuple[int, int]:
        queries, keys = inputs[0].shape[1], inputs[3]["key"].shape[2]
        return queries, keys + -queries % _BLOCK

    def why_inputs(self, *inputs: Any) -> str:
        if len(inputs) == 5:
            return "causal attention without a cache"
        held, flags = inputs[5:]
        if flags["is_cache_step"]:
            return "the forward fills the cache of keys"
        if any(x.dtype != inputs[0].dtype for x in held.values()):
            return "the cache of keys is of another dtype than the video"
        return super().why_inputs(*inputs)

    def pairs(self) -> list[SkipPair]:
        pairs = super().pairs()
        if pairs[0].runs == "one-launch":  # It knows no cache.
            pairs[0] = replace(pairs[0], runs="two-launch")
        return pairs

    def notes(self) -> list[str]:
        return []  # The backend "flex" is the author's own choice.


def blocks_of(model: Any, path: str, config: PatchConfig) -> list[PatchedBlock | SkipPair]:
    """Find the blocks of a model, in the order in which they run.

    Raises:
        FamilyError: A forward takes other parameters than this was written for.
        OpError: The kernels do not take the model's heads or dtype.
    """
    return wan_anyflow.blocks_of(model, path, config, AnyFlowFARBlock)
