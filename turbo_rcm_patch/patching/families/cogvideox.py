"""diffusers' CogVideoX transformer (2B, 5B and 1.5, text to video and image to video; arXiv
2408.06072), and ConsisID, whose block is the same.

Inside the attention and the feed-forward text and video are one sequence, text first. Outside they
are two residual streams, each with its own modulation, gate and residual. The rotary embedding
turns only video tokens, so text has an angle of zero. Written against diffusers 0.42.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from diffusers.models.attention import FeedForward
from diffusers.models.attention_processor import (
    Attention,
    CogVideoXAttnProcessor2_0,
    FusedCogVideoXAttnProcessor2_0,
)
from diffusers.models.normalization import CogVideoXLayerNormZero
from diffusers.models.transformers.cogvideox_transformer_3d import CogVideoXBlock
from diffusers.models.transformers.consisid_transformer_3d import ConsisIDBlock
from torch import Tensor, nn

from turbo_rcm_patch.config import PatchConfig
from turbo_rcm_patch.ops.attention import api as attention
from turbo_rcm_patch.ops.formats import NO_NORMS, Norms, Rotary
from turbo_rcm_patch.ops.residual import api as residual
from turbo_rcm_patch.patching.block import PatchedBlock
from turbo_rcm_patch.patching.families import diffusers_parts as parts
from turbo_rcm_patch.patching.families.common import (
    branch_pair,
    check_attention,
    check_parameters,
    pairs_between_blocks,
)
from turbo_rcm_patch.patching.find import find_blocks
from turbo_rcm_patch.patching.measure import Notes
from turbo_rcm_patch.patching.pieces import (
    STREAM_DTYPE,
    KeptTables,
    called,
    feed_forward,
)
from turbo_rcm_patch.patching.plain import kernel_can_read, original_class, runs_only_its_forward
from turbo_rcm_patch.skip import SkipPair, Stream

parts.ATTENTIONS[Attention] = (CogVideoXAttnProcessor2_0, FusedCogVideoXAttnProcessor2_0)


#: Stream -> its gates in the author's code, without the branch.
_GATES: Final = (("text", "enc_gate"), ("video", "gate"))
_Two = tuple[Tensor, Tensor]


class CogVideoXBlockForward(PatchedBlock):
    """The replacement of the forward of a `CogVideoXBlock` or a `ConsisIDBlock`."""

    tables: KeptTables

    stages = ("norm1", "norm2")
    mixes = "attn1"

    def __call__(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        temb: Tensor,
        image_rotary_emb: Rotary | None = None,
        attention_kwargs: dict[str, Any] | None = None,
    ) -> _Two:
        """Run the block.

        Args:
            hidden_states: [B, N, C] video, the model's dtype.
            encoder_hidden_states: [B, T, C] text.
            temb: [B, E].
            image_rotary_emb: (cos, sin), each [N, D], or None.
            attention_kwargs: Further arguments of the attention.

        Returns:
            Video [B, N, C] and text [B, T, C], dtype of hidden_states.
        """
        # ConsisID's block takes no arguments for the attention.
        more = () if attention_kwargs is None else (attention_kwargs,)
        inputs = hidden_states, encoder_hidden_states, temb, image_rotary_emb, *more
        out: _Two = self.runs(*inputs)(*inputs)
        return out

    def fast(self, *inputs: Any, notes: Notes | None = None) -> _Two:
        video, text, temb, rotary = inputs[:4]
        block, impl, dtype = self.block, self.config.impl, video.dtype
        streams = text, video

        h, gates = self.norm(block.norm1, streams, temb)
        y = self.attention(notes, block.attn1, h, text, rotary)

        streams, h, gates = self.skip_norm(y, streams, gates, block.norm2, temb)
        if notes is not None:
            notes.saw_streams(*streams)

        y = feed_forward(block.ff.net, h)
        (text, video), _ = residual.skip_norm(streams, y, gate=gates, dtype=dtype, impl=impl)
        return video, text

    def modulation(self, zero: Any, temb: Tensor) -> tuple[residual.Norm, _Two] | None:
        """Read a norm of text and video and their gates, or return None if it has to be called.

        Its own modules compute the modulation, [B, 1, C] each.
        """
        norm = zero.norm
        if not (
            runs_only_its_forward(zero)
            and type(norm) is nn.LayerNorm
            and runs_only_its_forward(norm)
            and kernel_can_read(norm.weight, norm.bias, device=temb.device)
        ):
            return None
        rows = zero.linear(zero.silu(temb)).unflatten(-1, (6, 1, -1))
        # In the order in which the author's norm takes them.
        shift, scale, gate, text_shift, text_scale, text_gate = rows.unbind(1)
        factors = (norm.weight, norm.bias, norm.eps)
        read = residual.Norm((text_scale, scale), (text_shift, shift), *factors)
        return read, (text_gate, gate)

    def norm(self, zero: Any, streams: _Two, temb: Tensor) -> tuple[Tensor, _Two]:
        """Return the norm of both streams as one sequence [B, T + N, C], and their gates."""
        read, (text, video) = self.modulation(zero, temb), streams
        if read is None:
            x, context, gate, text_gate = zero(video, text, temb)
            return torch.cat([context, x], dim=1), (text_gate, gate)
        how: Any = {"norm": read[0], "norm_dtype": text.dtype, "impl": self.config.impl}
        return residual.skip_norm(streams, **how)[1], read[1]

    def skip_norm(
        self, y: Tensor, streams: _Two, gates: _Two, zero: Any, temb: Tensor
    ) -> tuple[_Two, Tensor, _Two]:
        """Close the skips of both streams and compute the next norm, in one pass.

        Returns:
            The streams in fp32, their norm as one sequence, and the gates of the next branch.
        """
        impl, dtype = self.config.impl, y.dtype
        read = self.modulation(zero, temb)
        if read is None:
            sums, _ = residual.skip_norm(streams, y, gate=gates, dtype=STREAM_DTYPE, impl=impl)
            return sums, *self.norm(zero, (sums[0].to(dtype), sums[1].to(dtype)), temb)
        sums, h = residual.skip_norm(
            streams, y, gate=gates, norm=read[0], dtype=STREAM_DTYPE, norm_dtype=dtype, impl=impl
        )
        return sums, h, read[1]

    def attention(
        self, notes: Notes | None, attn: Any, h: Tensor, text: Tensor, rotary: Rotary | None
    ) -> Tensor:
        """Run the attention over both streams and its output projection: [B, T + N, C]."""
        spec = self.spec
        q, k, v = parts.project(_qkv(attn), h, 3)
        q, k, norms = _norms_of_heads(attn, q, k)
        tables = None if rotary is None else self.rotary(rotary, text)
        out = attention.attend(q, k, v, spec=spec, norms=norms, rotary=tables)
        if notes is not None:
            notes.saw_attention(q, k, v, norms, tables, spec, out)
        return parts.project_out(attn, out)

    def rotary(self, rotary: Rotary, text: Tensor) -> Rotary:
        """Return rotary tables of text and video tokens, with an angle of zero for text."""
        tokens, device = text.shape[1], text.device

        def make() -> Rotary:
            cos, sin = (table.to(device) for table in rotary)
            still = cos.new_ones(tokens, cos.shape[-1])
            return torch.cat([still, cos]), torch.cat([torch.zeros_like(still), sin])

        return self.tables.of(rotary, (tokens, device), make)

    # --- when the author's forward runs ----------------------------------------------------------

    def why_modules(self) -> str:
        block = self.block
        for norm in (block.norm1, block.norm2):
            if type(norm) is not CogVideoXLayerNormZero:
                return f"a norm is a {type(norm).__qualname__}"
        return (
            parts.why_attention("attn1", block.attn1)
            or parts.why_feed_forward("ff", block.ff)
            or self.why_replaced()
        )

    def why_inputs(
        self, video: Tensor, text: Tensor, temb: Tensor, rotary: Rotary | None, kwargs: Any = None
    ) -> str:
        if kwargs:
            return "it has attention_kwargs"
        batch, tokens, channels = video.shape
        fits = (
            text.dtype == video.dtype == temb.dtype
            and text.device == video.device == temb.device
            and text.shape[::2] == (batch, channels)
            and temb.shape[0] == batch
            and channels == self.spec.heads * self.head_dim
            and all([table.shape == (tokens, self.head_dim) for table in rotary or ()])
            and 0 < batch < 65536
            and text.shape[1] > 0
        )
        return "" if fits else "text, modulation or rotary table do not fit the video"

    def rows_of(self, take: Callable[[Tensor], Tensor], *inputs: Any) -> tuple[Any, ...]:
        return take(inputs[0]), *inputs[1:]

    def streams(self, values: Any) -> tuple[Tensor, ...]:
        video, text = values[:2]
        return text, video

    # --- for the report --------------------------------------------------------------------------

    def replaced_attention(self) -> str:
        return parts.replaced_attention(getattr(self.block.attn1, "processor", None))

    def linears(self) -> dict[str, Any]:
        attn = self.block.attn1
        if type(attn) is not Attention:
            return parts.feed_forward_linears("ff", self.block.ff)
        names = ("to_qkv",) if len(_qkv(attn)) == 1 else ("to_q", "to_k", "to_v")
        linears = {f"attn1.{name}": getattr(attn, name) for name in names}
        linears |= {"attn1.to_out.0": attn.to_out[0]}
        return linears | parts.feed_forward_linears("ff", self.block.ff)

    def pairs(self) -> list[SkipPair]:
        why = self.why_block()
        attention, ff = (
            [Stream(name, "1", f"{gate}_{branch}", "[B, 1, C]") for name, gate in _GATES]
            for branch in ("msa", "ff")
        )
        return [
            branch_pair(self, "attn1", "self", why, *attention, cast="model"),
            branch_pair(self, "ff", "feed-forward", why, *ff, cast="model", heads=False),
        ]


def _qkv(attn: Any) -> tuple[Any, ...]:
    """Return the Linears of q, k and v.

    The processor decides, because undoing `fuse_qkv_projections` restores only the processor.
    """
    if type(attn.processor) is FusedCogVideoXAttnProcessor2_0:
        return (attn.to_qkv,)
    return attn.to_q, attn.to_k, attn.to_v


def _norms_of_heads(attn: Any, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Norms]:
    """Read the layer norms of q's and k's heads for the kernel, or call them."""
    of_q, of_k = attn.norm_q, attn.norm_k
    if of_q is None and of_k is None:
        return q, k, NO_NORMS
    head_dim = attn.inner_dim // attn.heads
    if all(_reads(norm, q, head_dim) for norm in (of_q, of_k)) and of_q.eps == of_k.eps:
        return q, k, Norms(of_q.weight, of_k.weight, of_q.bias, of_k.bias, of_q.eps)

    def normed(norm: Any, x: Tensor) -> Tensor:
        by_head = x.reshape(*x.shape[:-1], attn.heads, head_dim).transpose(1, 2)
        return called(norm, by_head).transpose(1, 2).flatten(2)

    return normed(of_q, q), normed(of_k, k), NO_NORMS


def _reads(norm: Any, x: Tensor, head_dim: int) -> bool:
    return (
        type(norm) is nn.LayerNorm
        and runs_only_its_forward(norm)
        and norm.weight is not None
        and norm.bias is not None
        and norm.normalized_shape == (head_dim,)
        and kernel_can_read(norm.weight, norm.bias, device=x.device)
        and norm.weight.dtype == x.dtype
    )


# --- what is patched in a model ------------------------------------------------------------------

_BLOCK: Final = ("self", "hidden_states", "encoder_hidden_states", "temb", "image_rotary_emb")
_ATTENTION: Final = ("hidden_states", "encoder_hidden_states", "attention_mask")


def blocks_of(model: Any, path: str, config: PatchConfig) -> list[PatchedBlock | SkipPair]:
    """Find the blocks of a model, in the order in which they run.

    Raises:
        FamilyError: A forward takes other parameters than this was written for.
        OpError: The kernels do not take the model's heads or dtype.
    """
    call: Any = {
        processor.__call__: ("self", "attn", *_ATTENTION, "image_rotary_emb")
        for processor in parts.ATTENTIONS[Attention]
    }
    check_parameters(
        {
            CogVideoXBlock.forward: (*_BLOCK, "attention_kwargs"),
            ConsisIDBlock.forward: _BLOCK,
            CogVideoXLayerNormZero.forward: _BLOCK[:4],
            Attention.forward: ("self", *_ATTENTION, "cross_attention_kwargs"),
            FeedForward.forward: ("self", "hidden_states", "args", "kwargs"),
            **call,
        },
        "diffusers",
    )
    consis = original_class(model).__name__ == "ConsisIDTransformer3DModel"
    cls = ConsisIDBlock if consis else CogVideoXBlock
    where = f"{path}.transformer_blocks"
    blocks = find_blocks(
        model.transformer_blocks, where, cls, CogVideoXBlockForward, config, _heads_of,
        tables=KeptTables(),
    )  # fmt: skip
    face = "perceiver_cross_attention"
    return blocks + pairs_between_blocks(model, path, face, "local_face_scale")


def _heads_of(block: Any, path: str) -> tuple[int, int]:
    """Check a block's attention, and return its heads and the channels of a head."""
    attn: Any = getattr(block, "attn1", None)
    if type(attn) is not Attention:
        return 1, 0
    head_dim = attn.inner_dim // attn.heads
    linears = {"to_q": attn.to_q, "to_k": attn.to_k, "to_v": attn.to_v}
    check_attention(f"{path}.attn1", head_dim, linears)
    return attn.heads, head_dim
