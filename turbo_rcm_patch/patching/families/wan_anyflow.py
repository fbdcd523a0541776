"""diffusers' AnyFlow transformer: Wan's block with a modulation per token, whose rotary table is
complex (arXiv 2605.13724), and its causal variant (FAR), which generates a video chunk by chunk.
Written against diffusers 0.42.

A denoising step of the causal one attends to the cached keys of earlier chunks and to its own, and
runs fused. A forward that fills the cache has a block mask and is its author's: what the guard
runs again would write other keys.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from dataclasses import replace
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from diffusers.models.attention import FeedForward
from diffusers.models.normalization import RMSNorm
from torch import Tensor

from turbo_rcm_patch.config import PatchConfig
from turbo_rcm_patch.ops.attention import api as attention
from turbo_rcm_patch.ops.formats import NO_NORMS, Rotary
from turbo_rcm_patch.patching.block import PatchedBlock
from turbo_rcm_patch.patching.families import diffusers_parts as parts
from turbo_rcm_patch.patching.families.common import check_parameters
from turbo_rcm_patch.patching.families.wan import WanBlock, heads_of
from turbo_rcm_patch.patching.find import find_blocks
from turbo_rcm_patch.patching.measure import Notes
from turbo_rcm_patch.patching.pieces import (
    RMS_NORMS,
    KeptTables,
    called,
)
from turbo_rcm_patch.patching.plain import original_class
from turbo_rcm_patch.patching.sla import attached_proj_l
from turbo_rcm_patch.skip import SkipPair

RMS_NORMS.add(RMSNorm)

_CACHED: Final = ("kv_cache", "kv_cache_flag")
_BLOCK: Final = (
    "self", "hidden_states", "encoder_hidden_states", "temb", "rotary_emb", "attention_mask",
    *_CACHED,
)  # fmt: skip
_ATTENTION: Final = ("self", "attn", "hidden_states", "encoder_hidden_states", "attention_mask")

#: The author's processor appends zeros to q, k and v up to a multiple of this many queries. It has
#: no mask, so those zeros are keys like others.
_PADDED_TO: Final = 128


class AnyFlowBlock(WanBlock):
    """Replaces the forward of an `AnyFlowTransformerBlock`."""

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
            kv_cache: The causal variant's, see `Cache`; None without one.
            kv_cache_flag: The same.

        Returns:
            [B, N, C], dtype of hidden_states.
        """
        cached = () if kv_cache is None else (kv_cache, kv_cache_flag)
        inputs: Any = (
            hidden_states, encoder_hidden_states, temb, rotary_emb, attention_mask, *cached
        )  # fmt: skip
        out: Tensor = self.runs(*inputs)(*inputs)
        return out

    def call_attention(
        self, attn: Any, h: Tensor, context: Tensor | None, mask: Any, rotary: Any
    ) -> Tensor:
        inputs = {"rotary_emb": rotary} if context is None else {"encoder_hidden_states": context}
        branch: Tensor = attn(h, **inputs)
        return branch

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
        if not cached and rotary["key"] is not rotary["query"]:
            return "keys have another rotary table than queries"
        return super().why_inputs(x, context, temb, self.tables(rotary))

    def other_forwards(self) -> list[tuple[Any, Any]]:
        return []


# --- the causal variant --------------------------------------------------------------------------


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
        old = []
        for name in ("compressed", "full"):
            count = self.flags[f"num_cached_{name}_tokens"]
            old.append(self.held[f"{name}_cache"][index, :, :, :count].transpose(1, 2).flatten(2))
        return torch.cat([*old, new], dim=1)


class AnyFlowFARBlock(AnyFlowBlock):
    """Replaces the forward of a causal `AnyFlowTransformerBlock`."""

    def fast(self, *inputs: Any, notes: Notes | None = None) -> Tensor:
        x, text, temb, rotary, mask, *cached = inputs
        return super().fast(x, text, temb, rotary, mask, Cache(*cached), notes=notes)

    def self_attention(
        self, notes: Notes | None, attn: Any, h: Any, rotary: Any, mask: Any, cache: Cache
    ) -> Tensor:
        if self.config.attention == "exact":
            cached = {"kv_cache": cache.held, "kv_cache_flag": cache.flags}
            out: Tensor = attn(h, rotary_emb=rotary, **cached)
            return out
        spec = self.spec
        q, k, v = parts.project(parts.linears_of(attn, "qkv"), h, 3)
        k, v = cache.joined(0, called(attn.norm_k, k)), cache.joined(1, v)
        rest: Any = {"weight": None, "heads": spec.heads, "impl": spec.impl}
        q = called(attn.norm_q, q)
        q = attention.norm_rotate(q, rotary=self.tables(rotary), **rest)
        k = attention.norm_rotate(k, rotary=self.tables(rotary, "key"), **rest)
        k, v = (F.pad(x, (0, 0, 0, -q.shape[1] % _PADDED_TO)) for x in (k, v))
        out = attention.attend(q, k, v, spec=spec)
        if notes is not None:
            notes.saw_attention(q, k, v, NO_NORMS, None, spec, out)
        return parts.project_out(attn, out)

    def lengths(self, *inputs: Any) -> tuple[int, int]:
        queries, keys = inputs[0].shape[1], inputs[3]["key"].shape[2]
        return queries, keys + -queries % _PADDED_TO

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

    def unused_backends(self) -> Collection[str]:
        # The backend "flex" of the self-attention is the author's own choice.
        exact = self.config.attention == "exact"
        return () if exact else parts.chosen_backends(self.block.attn2)


# --- what is patched in a model ------------------------------------------------------------------


def blocks_of(model: Any, path: str, config: PatchConfig) -> list[PatchedBlock | SkipPair]:
    """Find the blocks of a model, in the order in which they run.

    Raises:
        FamilyError: A forward takes other parameters than this was written for.
        OpError: The kernels do not take the model's heads or dtype.
    """
    file: Any = sys.modules[original_class(model).__module__]
    causal = getattr(file, "AnyFlowCausalAttnProcessor", None)
    block, attn = file.AnyFlowTransformerBlock, file.AnyFlowAttention
    own_processor, cross = causal or file.AnyFlowAttnProcessor, file.AnyFlowCrossAttnProcessor
    parts.ATTENTIONS[attn] = (own_processor, cross)
    expected = {
        block.forward: _BLOCK,
        attn.forward: ("self", "hidden_states", "kwargs"),
        own_processor.__call__: (*_ATTENTION, "rotary_emb", *(_CACHED if causal else ())),
        cross.__call__: _ATTENTION,
        FeedForward.forward: ("self", "hidden_states", "args", "kwargs"),
    }
    check_parameters(expected, "diffusers")
    make = AnyFlowFARBlock if causal else AnyFlowBlock
    kept = {"query": KeptTables(), "key": KeptTables()}
    return find_blocks(model.blocks, f"{path}.blocks", block, make, config, heads_of, kept=kept)
