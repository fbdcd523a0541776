"""How a block of diffusers' CogVideoX runs fused.

Text and video are one sequence inside the attention and the feed-forward, text first, and two
residual streams outside, each with its own modulation, gate and residual. Every sum is in the
model's dtype and rounds at every step. The layer norms of q and k, where they are exactly that,
and the rotary embedding, which turns only video tokens, are the attention's own: in fp32, without
the author's rounding between them, with an angle of zero for text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import torch
from diffusers.models.attention_processor import (
    Attention,
    CogVideoXAttnProcessor2_0,
    FusedCogVideoXAttnProcessor2_0,
)
from diffusers.models.normalization import CogVideoXLayerNormZero
from torch import Tensor, nn

from turbo_rcm_patch import ops
from turbo_rcm_patch.config import PatchConfig
from turbo_rcm_patch.patching.author import Notes, call, nothing, observe, same
from turbo_rcm_patch.patching.blocks import (
    Mode,
    may_run,
    note_mode,
    plain_dropout,
    refuse_parallel,
)
from turbo_rcm_patch.patching.copies import Copies
from turbo_rcm_patch.patching.families._feed_forward import expand, feed_forward_mode
from turbo_rcm_patch.patching.guard import Guard, Pair
from turbo_rcm_patch.patching.linears import Linears
from turbo_rcm_patch.patching.plain import bare, drops, plain_linear
from turbo_rcm_patch.patching.state import PairState, specs_of

__all__ = [
    "PROCESSORS",
    "CogVideoXBlockForward",
    "attention_mode",
    "norms_of_heads",
    "qkv_names",
]

#: What may compute the attention: with a Linear each for q, k and v, or with one for all.
PROCESSORS: Final = (CogVideoXAttnProcessor2_0, FusedCogVideoXAttnProcessor2_0)

#: The norm before each branch of a block, and the output projection of the branch.
_NORMS: Final = {"attn1": "norm1", "ff": "norm2"}
_OUTPUTS: Final = {"attn1": "to_out"}

#: (text, video), the order of the sequence.
Streams = tuple[Tensor, Tensor]
Rotary = tuple[Tensor, Tensor]
#: The author's forward of a block, given what stands for the block and the streams.
Author = Callable[[Any, Streams], Streams]


class CogVideoXBlockForward:
    """Stands in for the forward of one block.

    It holds the block itself, so that a deep copy of a patched model holds the copied block.
    """

    __slots__ = (
        "_attn1",
        "_block",
        "_ff",
        "_guard",
        "_head",
        "_linears",
        "_said",
        "_spec",
        "_specs",
    )

    def __init__(
        self,
        block: Any,
        states: dict[str, PairState],
        config: PatchConfig,
        copies: Copies,
        head: bool,
        guard: Guard | None,
    ) -> None:
        self._block = block
        self._attn1, self._ff = states["attn1"], states["ff"]
        self._guard = guard
        self._head = head
        self._linears = Linears(copies)
        self._said: set[str] = set()
        self._linears = Linears(copies)
        self._spec = ops.AttentionSpec(
            heads=block.attn1.heads,
            attention=config.attention,
            pv=config.pv,
            smooth_k=config.smooth_k,
            impl=config.impl,
        )
        self._specs = specs_of(self._spec)

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
        given = (hidden_states, encoder_hidden_states, temb, image_rotary_emb)
        if attention_kwargs is not None:  # ConsisID's block takes none.
            given += (attention_kwargs,)  # type: ignore[assignment]
        same = hidden_states.dtype == encoder_hidden_states.dtype == temb.dtype
        states = (self._attn1, self._ff)
        if not may_run(hidden_states, states, self._said if self._head else None) or not same:
            written: tuple[Tensor, Tensor] = type(self._block).forward(self._block, *given)
            return written
        guard = self._begin(hidden_states, encoder_hidden_states, temb)
        block, streams = self._block, (encoder_hidden_states, hidden_states)

        def first(streams: Streams) -> Streams:
            x, gates = self._modulated(block.norm1, streams, temb, self._attn1)
            return self._attention(x, streams, gates, image_rotary_emb, attention_kwargs or {})

        def second(streams: Streams) -> Streams:
            x, gates = self._modulated(block.norm2, streams, temb, self._ff)
            return self._feed_forward(x, streams, gates)

        def heads(streams: Streams) -> Tensor | None:
            if self._mode(attention_kwargs or {}) != "ours":
                return None
            x, _ = self._modulated(block.norm1, streams, temb, self._attn1)
            return self._heads(x, _lengths(streams)[0], image_rotary_emb)

        def author(view: Any, streams: Streams) -> Streams:
            own: Any = type(block).forward
            video, text = own(view, streams[1], streams[0], *given[2:])
            return text, video

        streams = self._pair(guard, "attn1", self._attn1, streams, first, author, heads)
        text, video = self._pair(guard, "ff", self._ff, streams, second, author)
        return video, text

    def _pair(
        self,
        guard: Guard | None,
        name: str,
        state: PairState,
        streams: Streams,
        ours: Callable[[Streams], Streams],
        author: Author,
        heads: Callable[[Streams], Tensor | None] = lambda streams: None,
    ) -> Streams:
        """One pair, compared with its author's code where the guard wants that."""
        if guard is None or not state.live or not guard.wants((state,)):
            return ours(streams)

        def written(notes: Notes, x: Any, branch: Callable[..., Any] | None) -> Streams:
            return author(self._only(name, notes, branch), x)

        text, video = guard.close(
            Pair((state,), streams, lambda: ours(streams), written, lambda: heads(streams))
        )
        return text, video

    def _only(self, name: str, notes: Notes, branch: Callable[..., Any] | None) -> Any:
        """The block for its author's forward, with one pair in it: the others add nothing."""
        instead: dict[str, Any] = {}
        for other, norm in _NORMS.items():
            if other != name:
                instead |= {norm: same, other: nothing}
            elif branch is not None:
                instead[other] = branch
            else:
                own = getattr(self._block, other)
                instead[other] = notes.branch(own, _OUTPUTS.get(other, ""))
        return notes.over(self._block, **instead)

    def _begin(self, hidden: Tensor, context: Tensor, temb: Tensor) -> Guard | None:
        """The guard, on a forward that is to be checked."""
        if torch.compiler.is_compiling():
            return None
        if self._head:
            self._linears.begin()
        guard = self._guard
        if guard is None:
            return None
        if self._head:
            guard.begin(hidden_states=hidden, encoder_hidden_states=context, temb=temb)
        return guard

    def _modulated(
        self, norm: Any, streams: Streams, temb: Tensor, state: PairState
    ) -> tuple[Tensor, Streams]:
        """Both streams as one sequence after layer norm and modulation, and their gates.

        The weights of the layer norm and the modulation of a stream are one factor and one offset
        a channel, so that a single pass does both, in fp32.
        """
        text, video = streams
        if not (state.live and _plain_zero_norm(norm, video)):
            x, context, gate, context_gate = call(norm, video, text, temb)
            return torch.cat([context, x], dim=1), (context_gate, gate)
        # [B, stream, (shift, scale, gate), C], video before text.
        rows = call(norm.linear, call(norm.silu, temb)).unflatten(-1, (2, 3, -1)).flip(1)
        shift, scale, gates = rows.unsqueeze(3).unbind(2)
        factor, offset = 1 + scale.float(), shift.float()
        inner = norm.norm
        if inner.bias is not None:
            offset = torch.addcmul(offset, factor, inner.bias.float())
        if inner.weight is not None:
            factor = factor * inner.weight.float()
        x = ops.norm_modulate_streams(
            streams,
            scale=factor.unbind(1),
            shift=offset.unbind(1),
            form="affine",
            eps=inner.eps,
            impl=self._spec.impl,
        )
        return x, gates.unbind(1)

    def _attention(
        self,
        x: Tensor,
        streams: Streams,
        gates: Streams,
        rotary: Rotary | None,
        attention_kwargs: dict[str, Any],
    ) -> Streams:
        attn, mode = self._block.attn1, self._mode(attention_kwargs)
        observe(x)
        note_mode(self._attn1, mode)
        tokens = _lengths(streams)
        if mode == "ours":
            out = self._heads(x, tokens[0], rotary)
            return self._close(
                "attn1.out", out, attn.to_out, self._attn1.int8, tokens, streams, gates
            )
        text, video = torch.split(x, tokens, dim=1)
        video, text = call(
            attn,
            hidden_states=video,
            encoder_hidden_states=text,
            image_rotary_emb=rotary,
            **attention_kwargs,
        )
        return self._closed(mode, (text, video), streams, gates)

    def _mode(self, attention_kwargs: dict[str, Any]) -> Mode:
        mode = attention_mode(self._block.attn1)
        if not self._attn1.live:
            return "as-written"
        return "called" if mode == "ours" and attention_kwargs else mode

    def _heads(self, x: Tensor, text_tokens: int, rotary: Rotary | None) -> Tensor:
        """What the attention's output projection gets, [B, T + N, H * D]."""
        attn, int8 = self._block.attn1, self._attn1.int8
        modules = tuple(getattr(attn, name) for name in qkv_names(attn))
        projected = self._linears.project("attn1.qkv", x, modules, int8=int8)
        q, k, v = projected if len(projected) == 3 else projected[0].chunk(3, dim=-1)
        spec = self._specs[self._attn1.precision]
        self._attn1.note(f"fused with {ops.attention_name(spec, q, k)} attention")
        norms: dict[str, Any] = {}
        if norms_of_heads(attn) and _readable(attn.norm_q, q) and _readable(attn.norm_k, k):
            for name in ("norm_q", "norm_k"):
                norm = getattr(attn, name)
                norms |= {name: norm.weight, f"{name}_bias": norm.bias}
            if attn.norm_q.eps != spec.eps:
                spec = replace(spec, eps=attn.norm_q.eps)
        else:
            q, k = _normed(attn.norm_q, q, attn.heads), _normed(attn.norm_k, k, attn.heads)
        if rotary is not None:
            cos, sin = (table.to(x.device) for table in rotary)
            still = cos.new_ones(text_tokens, cos.shape[-1])
            rotary = torch.cat([still, cos]), torch.cat([torch.zeros_like(still), sin])
        return ops.attention_skip(q, k, v, spec, rotary=rotary, **norms)

    def _feed_forward(self, x: Tensor, streams: Streams, gates: Streams) -> Streams:
        ff, state = self._block.ff, self._ff
        observe(x)
        tokens = _lengths(streams)
        mode = feed_forward_mode(ff) if state.live else "as-written"
        note_mode(state, mode)
        if mode == "ours":
            h = expand(ff, x, self._linears, "ff.0", int8=state.int8)
            return self._close("ff.2", h, ff.net[2:], state.int8, tokens, streams, gates)
        text, video = call(ff, x).split(tokens, dim=1)
        return self._closed(mode, (text, video), streams, gates)

    def _close(
        self,
        key: str,
        x: Tensor,
        modules: Any,
        int8: bool,
        tokens: list[int],
        streams: Streams,
        gates: Streams,
    ) -> Streams:
        """stream + gate * (its rows of what the modules, a Linear and dropouts, make of x)."""
        linear, *dropouts = modules
        branch: Tensor | None = None
        if all(map(plain_dropout, dropouts)):
            branch = self._linears.close(key, x, linear, int8=int8)
            if branch is None and plain_linear(linear, x):
                weight, bias, impl = linear.weight, linear.bias, self._spec.impl
                if _same_dtype(x, streams, gates):
                    text, video = ops.project_skip_streams(
                        x, weight, bias, residuals=streams, c_out=gates, cast="model", impl=impl
                    )
                    return text, video
                branch = ops.project_skip(x, weight, bias, residual=None, impl=impl)
        if branch is None:
            branch = call(linear, x)
            for dropout in dropouts:
                branch = call(dropout, branch)
        text, video = torch.split(branch, tokens, dim=1)
        return self._closed("called", (text, video), streams, gates)

    def _closed(self, mode: Mode, branch: Streams, streams: Streams, gates: Streams) -> Streams:
        """The skip after a branch that was called: one pass a stream, or the author's sum."""
        if mode == "called" and _same_dtype(branch[0], streams, gates):
            text, video = (
                ops.skip(x, part, 1.0, gate, cast="model", impl=self._spec.impl)
                for x, part, gate in zip(streams, branch, gates, strict=True)
            )
        else:
            text, video = (
                x + gate * part for x, part, gate in zip(streams, branch, gates, strict=True)
            )
        return text, video


def _lengths(streams: Streams) -> list[int]:
    return [stream.shape[1] for stream in streams]


def _same_dtype(branch: Tensor, streams: Streams, gates: Streams) -> bool:
    """Whether the author's sum is in one dtype throughout; torch promotes where it is not."""
    return all(x.dtype == branch.dtype for x in (*streams, *gates))


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
    if norm is None:
        return x
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
    fused = type(attn.processor) is FusedCogVideoXAttnProcessor2_0
    return ("to_qkv",) if fused else ("to_q", "to_k", "to_v")


def attention_mode(attn: Any) -> Mode:
    """What may run now: ours in the place of the attention, the skip after it, or nothing of ours.

    Raises:
        ContextParallelError: The attention is split over several ranks.
    """
    if type(attn) is not Attention or type(attn.processor) not in PROCESSORS:
        return "as-written"
    refuse_parallel("attention", attn.processor)
    if attn.is_cross_attention or drops(attn.to_out[1]):
        return "as-written"
    return "ours" if bare(attn) else "called"
