"""How a block of diffusers' CogVideoX runs fused.

Text and video are one sequence inside the attention and the feed-forward, text first, and two
residual streams outside, each with its own modulation, gate and residual. Every sum is in the
model's dtype and rounds at every step. The layer norms of q and k, where they are exactly that,
and the rotary embedding, which turns only video tokens, are the attention's own: in fp32, without
the author's rounding between them, with an angle of zero for text.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F
from diffusers.models.attention_processor import (
    Attention,
    CogVideoXAttnProcessor2_0,
    FusedCogVideoXAttnProcessor2_0,
)
from diffusers.models.normalization import CogVideoXLayerNormZero
from torch import Tensor, nn

from turbo_rcm_patch.ops.batches import MAX_BATCH
from turbo_rcm_patch.ops.exchange import ContextParallel
from turbo_rcm_patch.patching.author import call
from turbo_rcm_patch.patching.block import BlockForward, Branch
from turbo_rcm_patch.patching.blocks import KeptTables, Mode
from turbo_rcm_patch.patching.branches import (
    AttentionModules,
    CalledNorm,
    FeedForwardModules,
    Given,
    Modulation,
    Norm,
    StreamsNorm,
)
from turbo_rcm_patch.patching.families._attention import attention_mode
from turbo_rcm_patch.patching.families._feed_forward import (
    feed_forward_mode,
    feed_forward_modules,
)
from turbo_rcm_patch.patching.linears import Rounding, holder, skip_streams
from turbo_rcm_patch.patching.parallel import follow, groups_of, processor_class
from turbo_rcm_patch.patching.plain import bare, plain_linear
from turbo_rcm_patch.patching.plan import Token, signature
from turbo_rcm_patch.patching.state import PairState

#: What may compute the attention: with a Linear each for q, k and v, or with one for all.
PROCESSORS: Final = (CogVideoXAttnProcessor2_0, FusedCogVideoXAttnProcessor2_0)

#: (text, video), the order of the sequence.
Streams = tuple[Tensor, Tensor]
Rotary = tuple[Tensor, Tensor]


class CogVideoXBlockForward(BlockForward):
    """Stands in for the forward of one block."""

    __slots__ = ()

    branches = (
        Branch(name="attn1", kind="self", norm="norm1", output="to_out"),
        Branch(name="ff", kind="feed-forward", norm="norm2"),
    )
    streams = True

    def __call__(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        temb: Tensor,
        image_rotary_emb: Rotary | None = None,
        attention_kwargs: dict[str, Any] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The author's block, with its skip pairs closed by ours where they are live.

        Args:
            hidden_states: [B, N, C] video, the model's dtype.
            encoder_hidden_states: [B, T, C] text.
            temb: [B, E].
            image_rotary_emb: (cos, sin), each [N, head_dim], where both channels of a pair hold
                the same angle, as diffusers makes them; or None.
            attention_kwargs: What the attention is called with besides; it is then called.

        Returns:
            Video [B, N, C] and text [B, T, C], dtype of hidden_states.
        """
        inputs: tuple[Any, ...] = (hidden_states, encoder_hidden_states, temb, image_rotary_emb)
        if attention_kwargs is not None:  # ConsisID's block takes none.
            inputs += (attention_kwargs,)
        same = hidden_states.dtype == encoder_hidden_states.dtype == temb.dtype
        if not torch.compiler.is_compiling() and self._first and self.ranks.model is not None:
            # Fusing projections swaps the processors, and the new ones take no notice of ranks.
            follow(self.ranks.model, "enabled")
        if not self._serves(hidden_states) or not same:
            written: tuple[Tensor, Tensor] = self._as_written(*inputs)
            return written
        guard = self._begin(
            hidden_states=hidden_states, encoder_hidden_states=encoder_hidden_states, temb=temb
        )
        rotary = None
        if image_rotary_emb is not None:
            tables: KeptTables = self._shared
            tokens, device = encoder_hidden_states.shape[1], hidden_states.device
            rotary = tables.of(
                image_rotary_emb, lambda: _with_text(image_rotary_emb, tokens, device),
                (tokens, device),
            )  # fmt: skip
        given = Given(
            None, (temb,), rotary, more=(image_rotary_emb, attention_kwargs or {}), forward=self
        )
        text, video = self._run((encoder_hidden_states, hidden_states), given, guard, inputs)
        return video, text

    def _by_author(
        self, name: str, view: Any, hidden: Streams, inputs: tuple[Any, ...]
    ) -> Streams:
        own: Any = type(self._block).forward
        video, text = own(view, hidden[1], hidden[0], *inputs[2:])
        return text, video

    def _facts(self, hidden: Streams, given: Given) -> tuple[Any, ...]:
        return hidden[1].dtype, hidden[1].get_device(), bool(given.more[1])

    def _token(self, hidden: Streams, given: Given) -> Token:
        (text, video), temb = hidden, given.rows[0]
        batch, tokens, channels = video.shape
        table = (text.shape[1] + tokens) * self._head_dim
        rotary = given.rotary or ()
        if not (
            video.device == text.device == temb.device
            and channels == self._width
            and text.dim() == 3
            and text.shape[::2] == (batch, channels)
            and temb.shape[0] == batch
            and 0 < batch <= MAX_BATCH
            and text.shape[1]
            and all([part.numel() == table for part in rotary])
        ):
            return None
        return signature(video, text, temb, *rotary)

    # --- the modules -----------------------------------------------------------------------------

    def _mode(self, branch: Branch, hidden: Streams, given: Given) -> Mode:
        if branch.kind == "feed-forward":
            return feed_forward_mode(self._block.ff)
        mode = mode_of(self._block.attn1)
        return "called" if mode == "ours" and given.more[1] else mode

    def _attention(self, branch: Branch, like: Tensor, given: Given) -> AttentionModules:
        attn = self._block.attn1
        norms, readable = (attn.norm_q, attn.norm_k), None
        if norms_of_heads(attn) and all([_readable(norm, like) for norm in norms]):
            readable = (norms[0]._parameters, norms[1]._parameters, norms[0].eps)
        return AttentionModules(
            heads=attn.heads, head_dim=attn.inner_dim // attn.heads,
            qkv=tuple([getattr(attn, name) for name in qkv_names(attn)]),
            norms=norms, readable=readable, out=attn.to_out,
            call_norm=lambda norm, x: _normed(norm, x, attn.heads),
        )  # fmt: skip

    def _groups(self) -> ContextParallel | None:
        return groups_of(getattr(self._block.attn1, "processor", None))

    def _feed_forward(self, module: Any) -> FeedForwardModules:
        return feed_forward_modules(module)

    def _norm(
        self,
        branch: Branch,
        state: PairState,
        hidden: Streams,
        given: Given,
        rounding: Rounding | None,
        *,
        as_rows: bool,
    ) -> Norm:
        """Both streams as one sequence after layer norm and modulation, and their gates.

        The weights of the layer norm and the modulation of a stream are one factor and one offset
        a channel, so that a single pass does both, in fp32.
        """
        norm = getattr(self._block, branch.norm)
        if state.live and _plain_zero_norm(norm, hidden[1]):
            silu = norm.silu
            plain = type(silu) is nn.SiLU and bare(silu)
            plain = plain and plain_linear(norm.linear, given.rows[0])
            return StreamsNorm(
                lambda given: _modulation(norm, given.rows[0], plain), 1.0, holder(norm.norm),
                norm.norm.eps, self._config.impl, rounding, plain=plain,
            )  # fmt: skip

        def called(streams: Streams, given: Given) -> tuple[Tensor, Streams]:
            text, video = streams
            x, context, gate, context_gate = call(norm, video, text, given.rows[0])
            return torch.cat([context, x], dim=1), (context_gate, gate)

        return CalledNorm(called, rounding)

    def call_branch(self, branch: Branch, x: Tensor, hidden: Streams, given: Given) -> Streams:
        module, tokens = getattr(self._block, branch.name), [s.shape[1] for s in hidden]
        if branch.kind == "feed-forward":
            text, video = call(module, x).split(tokens, dim=1)
            return text, video
        text, video = torch.split(x, tokens, dim=1)
        rotary, more = given.more
        video, text = call(
            module, hidden_states=video, encoder_hidden_states=text, image_rotary_emb=rotary,
            **more,
        )  # fmt: skip
        return text, video

    def close_called(
        self,
        branch: Branch,
        mode: Mode,
        made: Streams,
        hidden: Streams,
        gate: Streams,
        rounding: Rounding | None,
    ) -> Streams:
        if mode == "called":
            text, video = skip_streams(
                made, hidden, gate, cast=branch.cast if rounding is None else rounding.cast,
                impl=self._config.impl, rounding=rounding,
            )  # fmt: skip
        else:
            text, video = (x + g * y for x, y, g in zip(hidden, made, gate, strict=True))
        return text, video


def _with_text(rotary: Rotary, text_tokens: int, device: torch.device) -> Rotary:
    """Tables of video tokens behind text tokens, which are not turned."""
    cos, sin = (table.to(device) for table in rotary)
    still = cos.new_ones(text_tokens, cos.shape[-1])
    return torch.cat([still, cos]), torch.cat([torch.zeros_like(still), sin])


def _modulation(norm: Any, temb: Tensor, plain: bool) -> Modulation:
    """Scale, shift and gate of text and video, [B, 1, C] each.

    Args:
        norm: Of its class.
        temb: [B, E].
        plain: Whether its modules may be read.
    """
    if plain:
        own = norm.linear._parameters
        rows = F.linear(F.silu(temb), own["weight"], own["bias"])
    else:
        rows = call(norm.linear, call(norm.silu, temb))
    rows = torch.unflatten(rows, -1, (6, 1, -1))
    # In the order in which the author's norm takes them.
    shift, scale, gate, text_shift, text_scale, text_gate = rows.unbind(1)
    return Modulation((text_scale, scale), (text_shift, shift), (text_gate, gate))


def _plain_layer_norm(norm: Any) -> bool:
    """Whether a module is exactly a layer norm of the last dimension."""
    return type(norm) is nn.LayerNorm and len(norm.normalized_shape) == 1 and bare(norm)


def _plain_zero_norm(norm: Any, x: Tensor) -> bool:
    """Whether the norm before a branch is exactly its class's, its layer norm's weights
    readable."""
    if type(norm) is not CogVideoXLayerNormZero or not bare(norm):
        return False
    return _plain_layer_norm(norm.norm) and _readable(norm.norm, x)


def _readable(norm: nn.LayerNorm, x: Tensor) -> bool:
    """Whether what weights a layer norm has can be read now, beside x."""
    return all(
        p is None or (type(p) is nn.Parameter and p.dtype == x.dtype and p.device == x.device)
        for p in (norm.weight, norm.bias)
    )


def norms_of_heads(attn: Any) -> bool:
    """Whether the norms of q and k are layer norms of a head, as the class makes them, which the
    attention's prologue does; others are called.

    This is for the report, too; at run time their weights have to be readable besides.
    """
    head_dim = attn.inner_dim // attn.heads
    pair = (attn.norm_q, attn.norm_k)
    return all(
        _plain_layer_norm(norm)
        and norm.weight is not None
        and norm.bias is not None
        and norm.normalized_shape == (head_dim,)
        and norm.eps == attn.norm_q.eps
        for norm in pair
    )


def _normed(norm: Any, x: Tensor, heads: int) -> Tensor:
    """q or k [B, N, H*D] after the norm of its heads."""
    by_head = torch.unflatten(x, -1, (heads, -1))
    if _plain_layer_norm(norm):
        # It looks at one head of one token at a time, so the order of heads and tokens is free.
        normed: Tensor = norm(by_head)
        return normed.flatten(2)
    normed = call(norm, by_head.transpose(1, 2))
    return normed.transpose(1, 2).flatten(2)


def qkv_names(attn: Any) -> tuple[str, ...]:
    """Which Linears project q, k and v: `fuse_qkv_projections` swaps the processor, and undoing it
    swaps only that back."""
    fused = processor_class(attn.processor) is FusedCogVideoXAttnProcessor2_0
    return ("to_qkv",) if fused else ("to_q", "to_k", "to_v")


def mode_of(attn: Any) -> Mode:
    """What may run now in the place of an attention, see `attention_mode`."""
    mode = attention_mode(attn, Attention, PROCESSORS)
    return "as-written" if mode != "as-written" and attn.is_cross_attention else mode
