"""diffusers' Wan transformers and their relatives with the same block.

- Wan 2.1 T2V, I2V and FLF2V, both experts of 2.2 A14B, and 2.2 TI2V with a gate per token (arXiv
  2503.20314). Lucy-Edit and FastWan's 5B with full attention are the same class.
- ChronoEdit, whose rotary table alone differs (arXiv 2510.04290).
- Wan-Animate, which adds a face adapter between its blocks (arXiv 2509.14055).
- SkyReels-V2, whose self-attention may have a mask (arXiv 2504.13074).
- VACE's plain blocks; its control blocks are in `wan_vace`. AnyFlow's are in `wan_anyflow`.

diffusers copies the block and its attention from file to file under the same names. Written
against diffusers 0.42.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from typing import Any, Final

import torch
from diffusers.models.attention import FeedForward
from diffusers.models.normalization import FP32LayerNorm
from torch import Tensor

from turbo_rcm_patch import ops
from turbo_rcm_patch.config import PatchConfig
from turbo_rcm_patch.ops.attention import api as attention
from turbo_rcm_patch.ops.formats import NO_NORMS, AttentionInputs, Rotary, Skip
from turbo_rcm_patch.ops.sparse_linear import api as sparse_linear
from turbo_rcm_patch.patching import symmetric
from turbo_rcm_patch.patching.block import PatchedBlock
from turbo_rcm_patch.patching.families import diffusers_parts as parts
from turbo_rcm_patch.patching.families.common import (
    block_pairs,
    check_attention,
    check_parameters,
    pairs_between_blocks,
)
from turbo_rcm_patch.patching.find import find_blocks
from turbo_rcm_patch.patching.int8_linears import takes_rows
from turbo_rcm_patch.patching.measure import Notes
from turbo_rcm_patch.patching.pieces import (
    LAYER_NORMS,
    feed_forward,
    gelu_linear,
    norm,
    rms_norms,
    skip,
    skip_norm,
)
from turbo_rcm_patch.patching.plain import compiling, hooked, original_class
from turbo_rcm_patch.patching.sla import SLAForward, attached_proj_l
from turbo_rcm_patch.patching.ulysses import (
    context_parallel,
    exchanges_itself,
    original_attention,
    tokens_of_ranks,
    ulysses_of,
)
from turbo_rcm_patch.skip import SkipPair, Stream

LAYER_NORMS.add(FP32LayerNorm)

#: Text tokens after the image tokens where cross-attention has both; the author's processor has
#: the same constant.
TEXT_TOKENS: Final = 512

_GATES: Final = (
    Stream("video", "1", "gate_msa", "[B, 1 or N, C]"),
    Stream("video", "1", "c_gate_msa", "[B, 1 or N, C]"),
)


class WanBlock(PatchedBlock):
    """The replacement of the forward of a `WanTransformerBlock`."""

    stages = ("norm1", "norm2", "norm3")
    mixes = "attn1"

    def __call__(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        temb: Tensor,
        rotary_emb: Rotary,
    ) -> Tensor:
        """Run the block.

        Args:
            hidden_states: [B, N, C], the model's dtype.
            encoder_hidden_states: [B, T, C] text, with the image tokens in front for I2V.
            temb: [B, 6, C], or with a timestep per token [B, N, 6, C].
            rotary_emb: (cos, sin), each [1, N, 1, D] fp32.

        Returns:
            [B, N, C], dtype of hidden_states.
        """
        inputs = hidden_states, encoder_hidden_states, temb, rotary_emb
        out: Tensor = self.runs(*inputs)(*inputs)
        return out

    def fast(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        temb: Tensor,
        rotary_emb: Rotary,
        mask: Tensor | None = None,
        cache: Any = None,
        *,
        notes: Notes | None = None,
    ) -> Tensor:
        block, impl, dtype = self.block, self.config.impl, hidden_states.dtype
        attn1, attn2, ffn = block.attn1, block.attn2, block.ffn
        int8 = len(self.int8) > 0  # torch 2.11 cannot trace `bool` of a list
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(temb)

        plain = mask is None and cache is None
        rows = int8 and plain and takes_rows(parts.linears_of(attn1, "qkv"))
        h = norm(block.norm1, hidden_states, scale1, shift1, dtype, impl, rows=rows)
        rows = int8 and takes_rows((attn2.to_q,))
        if plain and self.one_launch(attn1):
            x = self.self_attention_skip(attn1, h, rotary_emb, hidden_states, gate1)
            h = norm(block.norm2, x, None, None, dtype, impl, rows=rows)
        else:
            y = self.self_attention(notes, attn1, h, rotary_emb, mask, cache)
            x, h = skip_norm(
                hidden_states, y, gate1, block.norm2, None, None, dtype, impl, rows=rows
            )
        if notes is not None:
            notes.saw_streams(x)

        y = self.cross_attention(attn2, h, encoder_hidden_states)
        rows = int8 and takes_rows((gelu_linear(ffn.net)[0],))
        x, h = skip_norm(x, y, None, block.norm3, scale2, shift2, dtype, impl, rows=rows)
        if notes is not None:
            notes.saw_streams(x)

        return skip(x, feed_forward(ffn.net, h), gate2, dtype, impl)

    def modulation(self, temb: Tensor) -> tuple[Tensor, ...]:
        """Return shift, scale and gate of self-attention and feed-forward, fp32 [B, 1 or N, C]."""
        table: Tensor = self.block.scale_shift_table
        if table.dtype != torch.float32:  # An fp32 table widens temb in the pass that adds it.
            temb = temb.float()
        if temb.ndim == 3:
            return (table + temb).chunk(6, dim=1)
        rows = (table.unsqueeze(0) + temb).chunk(6, dim=2)
        return tuple([row.squeeze(2) for row in rows])

    def self_attention(
        self,
        notes: Notes | None,
        attn: Any,
        h: Any,
        rotary: Rotary,
        mask: Tensor | None,
        cache: Any,
    ) -> Tensor:
        """Run self-attention and its output projection: [B, N, C].

        Only AnyFlow's causal block has a cache of keys.
        """
        if mask is not None or self.calls_backend(attn) or exchanges_itself(attn.processor):
            return self.call_attention(attn, h, None, mask, rotary)
        spec, own_tables = self.spec, self.tables(rotary)
        tables: Rotary | None = own_tables
        ulysses = ulysses_of(self, attn.processor, own_tables)
        if ulysses is None:
            q, k, v = parts.project(parts.linears_of(attn, "qkv"), h, 3)
            q, k, norms = rms_norms(attn.norm_q, attn.norm_k, q, k)
        else:
            sent = parts.qkv_sent(attn, h, ulysses, own_tables)
            q, k, v, spec = ulysses.to_heads(*sent)
            norms, tables = NO_NORMS, None
        proj_l = attached_proj_l(attn)
        attended = None
        if ulysses is not None and proj_l is None and notes is None:
            attended = ulysses.attend(q, k, v, spec)
        if attended is not None:
            out = attended
        elif not q.numel():  # There are more ranks than heads, and this one has none.
            out = q
        elif proj_l is not None:
            weight, bias = (x.to(q.device) for x in proj_l)
            sparsity = ops.Sparsity.sage(self.config.sla_topk, q.device)
            out = sparse_linear.attend_sparse(
                q, k, v, spec=spec, proj_l=(weight, bias), sparsity=sparsity, norms=norms,
                rotary=tables,
            )  # fmt: skip
        else:
            out = attention.attend(q, k, v, spec=spec, norms=norms, rotary=tables)
            if notes is not None:
                notes.saw_attention(q, k, v, norms, tables, spec, out)
        if ulysses is not None:
            out = ulysses.to_tokens(out) if attended is None else attended
            if not compiling() and any(map(hooked, attn.to_out[0].modules())):
                out = out.clone()  # A hook may keep it, and the next attention overwrites it.
        return parts.project_out(attn, out)

    def cross_attention(self, attn: Any, h: Any, context: Tensor) -> Tensor:
        """Run cross-attention to text, and to an image if there is one: [B, N, C]."""
        image = None
        if self.calls_backend(attn):
            return self.call_attention(attn, h, context, None, None)
        if self.has_image():
            tokens = context.shape[1] - TEXT_TOKENS
            image, context = context[:, :tokens], context[:, tokens:]
        own_q = attn.to_q(h)
        k, v = parts.project(parts.linears_of(attn, "kv"), context, 2)
        spec = self.spec_over(k.shape[1])
        q, k, norms = rms_norms(attn.norm_q, attn.norm_k, own_q, k)
        out = attention.attend(q, k, v, spec=spec, norms=norms)
        if image is not None:
            k, v = parts.project(parts.linears_of(attn, "added"), image, 2)
            q, k, norms = rms_norms(attn.norm_q, attn.norm_added_k, own_q, k)
            out = attention.attend(q, k, v, spec=spec, norms=norms, residual=out)
        return parts.project_out(attn, out)

    def call_attention(
        self, attn: Any, h: Tensor, context: Tensor | None, mask: Any, rotary: Any
    ) -> Tensor:
        """Call an attention as the module it is: [B, N, C]."""
        branch: Tensor = attn(h, context, mask, rotary)
        return branch

    def has_image(self) -> bool:
        """Return True if cross-attention has keys of an image besides those of the text."""
        return getattr(self.block.attn2, "add_k_proj", None) is not None

    def tables(self, rotary: Any) -> Rotary:
        """Return the rotary embedding as (cos, sin), each [N, D]."""
        dim = self.head_dim
        return rotary[0].reshape(-1, dim), rotary[1].reshape(-1, dim)

    def calls_backend(self, attn: Any) -> bool:
        """Return True if exact attention was asked for and the user chose how it is computed, by a
        backend or by a function in the place of torch's."""
        return self.config.attention == "exact" and bool(parts.chosen_backend(attn.processor))

    # --- attention, projection and skip in one launch --------------------------------------------

    def one_launch(self, attn: Any) -> bool:
        """Return True if `form="one-launch"` was asked for and supports this attention."""
        if self.config.form != "one-launch" or self.level:
            return False
        return (
            parts.plain_projection(attn)
            and attached_proj_l(attn) is None
            and context_parallel(attn.processor) is None
        )

    def self_attention_skip(
        self, attn: Any, h: Any, rotary: Rotary, residual: Tensor, gate: Tensor
    ) -> Tensor:
        """Run self-attention, its projection and its skip in one kernel: fp32 [B, N, C]."""
        linear = attn.to_out[0]
        q, k, v = parts.project(parts.linears_of(attn, "qkv"), h, 3)
        q, k, norms = rms_norms(attn.norm_q, attn.norm_k, q, k)
        skip = Skip(residual, c_out=gate)
        inputs = AttentionInputs(
            q, k, v, self.spec, torch.float32, norms, self.tables(rotary), skip
        )
        return attention.attend_and_project(inputs, linear.weight, linear.bias, form="one-launch")

    # --- when the author's forward runs ----------------------------------------------------------

    def why_modules(self) -> str:
        block = self.block
        return (
            parts.why_attention("attn1", block.attn1, stand_in=SLAForward)
            or parts.why_attention("attn2", block.attn2)
            or parts.why_feed_forward("ffn", block.ffn)
        )

    def why_inputs(self, x: Tensor, context: Any, temb: Any, rotary: Any, *mask: Any) -> str:
        if not isinstance(rotary, tuple) or context is None or context.dim() != 3:
            return "it has no text or no rotary table"
        batch, tokens, channels = x.shape
        fits = (
            context.dtype == x.dtype
            and context.device == x.device
            and context.shape[0] == batch
            and channels == self.spec.heads * self.head_dim
            and temb.shape[0] == batch
            and rotary[0].numel() == rotary[1].numel() == tokens * self.head_dim
            and (not self.has_image() or context.shape[1] > TEXT_TOKENS)
            and 0 < batch < 65536
        )
        return "" if fits else "text, modulation or rotary table do not fit the video"

    def lengths(self, *inputs: Any) -> tuple[int, int]:
        processor = getattr(self.block.attn1, "processor", None)
        tokens = tokens_of_ranks(self, processor, inputs[0])
        return tokens, tokens

    def group(self) -> Any:
        split = context_parallel(getattr(self.block.attn1, "processor", None))
        return None if split is None else split._flattened_mesh.get_group()

    def plain_attention(self) -> bool:
        chosen = parts.chosen_backend(self.block.attn1.processor)
        return super().plain_attention() and not chosen

    def rows_of(self, take: Callable[[Tensor], Tensor], *inputs: Any) -> tuple[Any, ...]:
        x, text, temb, *rest = inputs
        if temb.ndim == 4 and temb.shape[1] == x.shape[1]:  # a timestep per token
            temb = take(temb)
        return take(x), text, temb, *rest

    def original_members(self) -> dict[str, Any]:
        return {"attn1": original_attention(self, self.block.attn1)}

    def other_forwards(self) -> list[tuple[Any, Any]]:
        attn = self.block.attn1
        sparse = attached_proj_l(attn) is not None
        return [(attn, SLAForward(attn, self.config.sla_topk))] if sparse else []

    # --- for the report --------------------------------------------------------------------------

    def notes(self) -> list[str]:
        processor = getattr(self.block.attn1, "processor", None)
        split = context_parallel(processor)
        if split is not None:
            by = "its own code" if exchanges_itself(processor) else "two exchanges an attention"
            if symmetric.in_use(split._ulysses_mesh.get_group()):
                by += ", in symmetric memory"
            return [f"parallel over {split._flattened_mesh.size()} ranks, by {by}"]
        return super().notes()

    def replaced_attention(self) -> str:
        return parts.replaced_attention(getattr(self.block.attn1, "processor", None))

    def unused_backends(self) -> Collection[str]:
        if self.config.attention == "exact":
            return ()
        block = self.block
        return parts.chosen_backends(block.attn1, block.attn2)

    def linears(self) -> dict[str, Any]:
        block = self.block
        linears = parts.attention_linears("attn1", block.attn1)
        linears |= parts.attention_linears("attn2", block.attn2)
        return linears | parts.feed_forward_linears("ffn", block.ffn)

    def pairs(self) -> list[SkipPair]:
        proj_l = "proj_l" if attached_proj_l(self.block.attn1) is not None else ""
        names = ("attn1", "attn2", "ffn")
        return block_pairs(self, names, _GATES, "fp32", proj_l=proj_l, image=self.has_image())


class SkyReelsBlock(WanBlock):
    """The replacement of the forward of a `SkyReelsV2TransformerBlock`."""

    def __call__(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        temb: Tensor,
        rotary_emb: Rotary,
        attention_mask: Tensor | None,
    ) -> Tensor:
        """Run the block.

        Args:
            hidden_states: As for Wan.
            encoder_hidden_states: As for Wan.
            temb: As for Wan, but with a timestep per token [B, 6, N, C].
            rotary_emb: As for Wan.
            attention_mask: bool [1, 1, N, N], True where a query sees a key, or None.

        Returns:
            [B, N, C], dtype of hidden_states.
        """
        inputs = (hidden_states, encoder_hidden_states, temb, rotary_emb, attention_mask)
        out: Tensor = self.runs(*inputs)(*inputs)
        return out

    def modulation(self, temb: Tensor) -> tuple[Tensor, ...]:
        return super().modulation(temb.transpose(1, 2) if temb.ndim == 4 else temb)

    def rows_of(self, take: Callable[[Tensor], Tensor], *inputs: Any) -> tuple[Any, ...]:
        x, text, temb, *rest = inputs
        temb = take(temb.transpose(1, 2)).transpose(1, 2) if temb.ndim == 4 else temb
        return take(x), text, temb, *rest


# --- what is patched in a model ------------------------------------------------------------------

_BLOCK: Final = ("self", "hidden_states", "encoder_hidden_states", "temb", "rotary_emb")
_ATTENTION: Final = ("hidden_states", "encoder_hidden_states", "attention_mask", "rotary_emb")


def blocks_of(model: Any, path: str, config: PatchConfig) -> list[PatchedBlock | SkipPair]:
    """Find the blocks of a model, in the order in which they run.

    Raises:
        FamilyError: A forward takes other parameters than this was written for.
        OpError: The kernels do not take the model's heads or dtype.
    """
    file: Any = sys.modules[original_class(model).__module__]
    prefix = "SkyReelsV2" if hasattr(file, "SkyReelsV2TransformerBlock") else "Wan"
    block, attn, processor = (
        getattr(file, prefix + name) for name in ("TransformerBlock", "Attention", "AttnProcessor")
    )
    parts.ATTENTIONS[attn] = (processor,)
    mask = ("attention_mask",) if prefix == "SkyReelsV2" else ()
    expected = {
        block.forward: (*_BLOCK, *mask),
        attn.forward: ("self", *_ATTENTION, "kwargs"),
        processor.__call__: ("self", "attn", *_ATTENTION),
        FeedForward.forward: ("self", "hidden_states", "args", "kwargs"),
    }
    check_parameters(expected, "diffusers")
    make = SkyReelsBlock if mask else WanBlock
    blocks = find_blocks(model.blocks, f"{path}.blocks", block, make, config, heads_of)
    return blocks + pairs_between_blocks(model, path, "face_adapter", "1")


def heads_of(block: Any, path: str) -> tuple[int, int]:
    """Check a block's attentions, and return their heads and the channels of a head."""
    heads, head_dim = 1, 0
    for name in ("attn1", "attn2"):
        attn: Any = getattr(block, name, None)
        if type(attn) in parts.ATTENTIONS:
            heads, head_dim = attn.heads, attn.inner_dim // attn.heads
            linears = parts.attention_linears(name, attn)
            named = {key.removeprefix(f"{name}."): linear for key, linear in linears.items()}
            check_attention(f"{path}.{name}", head_dim, named)
    return heads, head_dim
