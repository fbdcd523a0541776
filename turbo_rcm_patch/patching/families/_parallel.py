"""How diffusers' context parallelism splits and gathers each family, and attention processors that
follow it.

diffusers splits the inputs of some modules over the ranks and gathers the outputs of others, by a
plan. It has one for Wan and ChronoEdit; the others are here. Written against diffusers 0.42.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import Any, Final, cast

import torch
from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput
from diffusers.models.attention_processor import (
    CogVideoXAttnProcessor2_0,
    FusedCogVideoXAttnProcessor2_0,
)
from diffusers.models.transformers.transformer_chronoedit import (
    WanAttnProcessor as ChronoEditAttnProcessor,
)
from diffusers.models.transformers.transformer_skyreels_v2 import SkyReelsV2AttnProcessor
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from diffusers.models.transformers.transformer_wan_animate import (
    WanAnimateFaceBlockAttnProcessor,
)
from diffusers.models.transformers.transformer_wan_animate import (
    WanAttnProcessor as WanAnimateAttnProcessor,
)
from torch import Tensor, nn

from turbo_rcm_patch.ops.parallel import parallel_attention
from turbo_rcm_patch.ops.spec import AttentionSpec
from turbo_rcm_patch.patching.parallel import groups_of, processor_class
from turbo_rcm_patch.patching.registry import author_class

_TOKENS: Final = ContextParallelInput(split_dim=1, expected_dims=3)
_GATHERED: Final = ContextParallelOutput(gather_dim=1, expected_dims=3)
_TABLE: Final = ContextParallelInput(split_dim=1, expected_dims=4, split_output=True)
_ROPE: Final = {0: _TABLE, 1: _TABLE}


def _block(index: int) -> str:
    """A second name of a block: a plan has one entry a name, and a block may split its input and
    gather its output."""
    return f"blocks.{index}."


def _vace(model: Any) -> dict[str, Any]:
    """The first control block begins with its hidden states and control states, and every other
    goes on with what the one before gave."""
    return {
        "rope": _ROPE,
        "vace_blocks.0": {"hidden_states": _TOKENS, "control_hidden_states": _TOKENS},
        "blocks.0": {"hidden_states": _TOKENS},
        "proj_out": _GATHERED,
    }


def _skyreels(model: Any) -> dict[str, Any]:
    """With diffusion forcing each token has its own modulation, [B, 6, N, C] in the blocks and
    [B, N, C] after them, where the model makes it for all tokens: so the last block gathers."""
    return {
        "rope": _ROPE,
        "blocks.0": {"hidden_states": _TOKENS},
        "blocks.*": {"temb": ContextParallelInput(split_dim=2, expected_dims=4)},
        _block(len(model.blocks) - 1): _GATHERED,
    }


def _animate(model: Any) -> dict[str, Any]:
    """The face adapters after some blocks take whole frames: the block before one gathers, the
    block after one splits again, and the adapters run on every rank."""
    last, every = len(model.blocks) - 1, model.config.inject_face_latents_blocks
    plan: dict[str, Any] = {"rope": _ROPE, "blocks.0": {"hidden_states": _TOKENS}}
    for index in range(0, last + 1, every):
        plan[_block(index)] = _GATHERED
        if index < last:
            plan[f"blocks.{index + 1}"] = {"hidden_states": _TOKENS}
    if last % every:
        plan["proj_out"] = _GATHERED
    return plan


def _cogvideox(model: Any) -> dict[str, Any]:
    """Text and video are split each; a rank's keys are its text and its video."""
    table = ContextParallelInput(split_dim=0, expected_dims=2)
    return {
        "transformer_blocks.0": {"hidden_states": _TOKENS, "encoder_hidden_states": _TOKENS},
        "transformer_blocks.*": {"image_rotary_emb": [table, table]},
        "proj_out": _GATHERED,
    }


def _consisid(model: Any) -> dict[str, Any]:
    """As CogVideoX; but after its blocks it puts text and video together and takes them apart at
    the whole text's length, so the last block gathers both."""
    plan = _cogvideox(model)
    del plan["proj_out"]
    return {**plan, f"transformer_{_block(len(model.transformer_blocks) - 1)}": [_GATHERED] * 2}


def _chronoedit(model: Any) -> dict[str, Any]:
    """Its own, and a timestep of each token is split as Wan's is."""
    timestep = ContextParallelInput(split_dim=1, expected_dims=2)
    return {**type(model)._cp_plan, "": {"timestep": timestep}}


#: By the name of a class of diffusers.
_PLANS: Final[dict[str, Callable[[Any], dict[str, Any]]]] = {
    "ChronoEditTransformer3DModel": _chronoedit,
    "WanVACETransformer3DModel": _vace,
    "SkyReelsV2Transformer3DModel": _skyreels,
    "WanAnimateTransformer3DModel": _animate,
    "CogVideoXTransformer3DModel": _cogvideox,
    "ConsisIDTransformer3DModel": _consisid,
}


def plan_of(model: nn.Module) -> dict[str, Any] | None:
    """Which inputs are split and which outputs are gathered: ours, else diffusers' plan of this
    class, else None."""
    own: dict[str, Any] | None = getattr(type(model), "_cp_plan", None)
    make = _PLANS.get(author_class(model).__name__)
    return own if make is None else make(model)


# --- processors ----------------------------------------------------------------------------------


class _Exact:
    """Exact attention over the tokens of all ranks.

    Attributes:
        lengths: Tokens of every rank, while a block lends them; without them the ranks ask.
    """

    _parallel_config: Any = None
    lengths: Sequence[int] = ()

    def _exact(self, attn: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        groups = groups_of(self)
        assert groups is not None
        q, k = (x.to(v.dtype) for x in (q, k))  # Norms leave autocast in fp32.
        spec = AttentionSpec(heads=attn.heads, attention="exact")
        return parallel_attention(q, k, v, spec, groups, lengths=self.lengths)


class _Wan(_Exact):
    """Self-attention of the Wan family over the tokens of all ranks, exact, by our exchanges:
    diffusers' own ring gathers all keys, and its Ulysses wants heads that divide."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        if encoder_hidden_states is not None:  # keys that every rank has: as on one device
            author: Any = processor_class(self)
            alone = author()
            vars(alone).update(vars(self), _parallel_config=None)
            out: Tensor = alone(
                attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb
            )
            return out
        if groups_of(self) is None or attention_mask is not None:
            out = super().__call__(  # type: ignore[misc]
                attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb
            )
            return out
        if attn.fused_projections:
            query, key, value = attn.to_qkv(hidden_states).chunk(3, dim=-1)
        else:
            query, key, value = (
                linear(hidden_states) for linear in (attn.to_q, attn.to_k, attn.to_v)
            )
        query, key = attn.norm_q(query), attn.norm_k(key)
        if rotary_emb is not None:
            query, key = (_rotated(x, attn.heads, *rotary_emb) for x in (query, key))
        out = self._exact(attn, query, key, value)
        return attn.to_out[1](attn.to_out[0](out))  # type: ignore[no-any-return]


def _rotated(x: Tensor, heads: int, cos: Tensor, sin: Tensor) -> Tensor:
    """As the processors of the Wan family do it, in the same dtypes."""
    x = torch.unflatten(x, 2, (heads, -1))
    even, odd = x[..., 0::2], x[..., 1::2]
    c, s = cos[..., 0::2], sin[..., 1::2]
    out = torch.empty_like(x)
    out[..., 0::2] = even * c - odd * s
    out[..., 1::2] = even * s + odd * c
    return out.flatten(2)


class _CogVideoX(_Exact):
    """Attention of CogVideoX and ConsisID over the text and the video of all ranks, exact. Theirs
    takes no notice of parallelism."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        from diffusers.models.embeddings import apply_rotary_emb

        if groups_of(self) is None or attention_mask is not None:
            out: tuple[Tensor, Tensor] = super().__call__(  # type: ignore[misc]
                attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb
            )
            return out
        text = encoder_hidden_states.shape[1]
        x = torch.cat([encoder_hidden_states, hidden_states], dim=1)
        if isinstance(self, FusedCogVideoXAttnProcessor2_0):
            query, key, value = attn.to_qkv(x).chunk(3, dim=-1)
        else:
            query, key, value = (linear(x) for linear in (attn.to_q, attn.to_k, attn.to_v))
        query, key = (
            torch.unflatten(t, 2, (attn.heads, -1)).transpose(1, 2) for t in (query, key)
        )
        if attn.norm_q is not None:
            query = attn.norm_q(query)
        if attn.norm_k is not None:
            key = attn.norm_k(key)
        if image_rotary_emb is not None:
            for t in (query, key):
                t[:, :, text:] = apply_rotary_emb(t[:, :, text:], image_rotary_emb)
        query, key = (t.transpose(1, 2).flatten(2) for t in (query, key))
        states = self._exact(attn, query, key, value)
        states = attn.to_out[1](attn.to_out[0](states))
        return states[:, text:], states[:, :text]


class _Alone:
    """Attention that every rank computes whole, whatever the model's parallelism: the face
    adapters of Animate, whose tokens the plan has gathered."""

    @property
    def _parallel_config(self) -> None:
        return None

    @_parallel_config.setter
    def _parallel_config(self, config: object) -> None:
        pass


_MIXINS: Final[dict[type, type]] = {
    WanAttnProcessor: _Wan,
    ChronoEditAttnProcessor: _Wan,
    WanAnimateAttnProcessor: _Wan,
    SkyReelsV2AttnProcessor: _Wan,
    WanAnimateFaceBlockAttnProcessor: _Alone,
    CogVideoXAttnProcessor2_0: _CogVideoX,
    FusedCogVideoXAttnProcessor2_0: _CogVideoX,
}


@cache
def _distributed_class(cls: Hashable) -> type:
    assert isinstance(cls, type)
    return type(f"Distributed{cls.__name__}", (_MIXINS[cls], cls), {"author_class": cls})


def distributed(processor: Any) -> Any | None:
    """A processor that computes what this one does, over the tokens of all ranks where the model
    is parallel; None for one of a class that is not known."""
    if type(processor) not in _MIXINS:
        return None
    made = _distributed_class(cast(Hashable, type(processor)))()
    own = vars(processor)
    vars(made).update({name: own[name] for name in own if name != "_parallel_config"})
    return made


def is_distributed(processor: object) -> bool:
    """Whether `distributed` made this processor."""
    return isinstance(processor, (_Wan, _CogVideoX, _Alone))
