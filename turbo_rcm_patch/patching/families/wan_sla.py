"""SLA in diffusers' Wan classes: self-attention that holds a `proj_l` is sparse-linear.

The author's attention is dense, and that is not what such weights were trained for. So its forward
is replaced too, by SLA as it is defined, in plain torch: what the guard compares with, what a pair
that was given back runs, and what runs inside somebody's hooks or under autocast.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from turbo_rcm_patch import ops
from turbo_rcm_patch.config import PatchConfig
from turbo_rcm_patch.errors import ShapeError
from turbo_rcm_patch.ops.parallel import parallel_sparse_linear_attention
from turbo_rcm_patch.patching.guard import Guard
from turbo_rcm_patch.patching.pairs import linear_pair
from turbo_rcm_patch.patching.parallel import groups_of, processor_class
from turbo_rcm_patch.patching.plain import autocasting, runs_itself
from turbo_rcm_patch.patching.record import holds, innermost
from turbo_rcm_patch.patching.sla import attached_proj_l
from turbo_rcm_patch.patching.state import PairState
from turbo_rcm_patch.skip import Residual, SkipPair

_DENSE: Final = "it runs dense, without SLA, though a proj_l is attached"
_DEFINED: Final = "SLA runs as it is defined, in plain torch"


class SLAForward:
    """Stands in for the forward of one self-attention: SLA as it is defined, in plain torch.

    It holds the attention, so that a deep copy of a patched model holds the copied one.
    """

    __slots__ = ("_attn", "_class", "_processor", "_spec", "_topk")

    def __init__(
        self, attn: Any, processor: type, config: PatchConfig, guard: Guard | None
    ) -> None:
        self._attn, self._processor, self._topk = attn, processor, config.sla_topk
        self._class: Any = type(attn)
        self._spec = ops.AttentionSpec(heads=attn.heads, attention="exact")

    def over(self, attn: Any) -> SLAForward:
        """The same over what stands for the attention."""
        other = SLAForward.__new__(SLAForward)
        other._attn, other._class, other._processor = attn, self._class, self._processor
        other._spec, other._topk = self._spec, self._topk
        return other

    def __call__(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """The author's projections and norms around SLA; the author's forward without a proj_l.

        Args:
            hidden_states: [B, N, C].
            encoder_hidden_states: None for self-attention.
            attention_mask: None; with a mask the author's attention runs.
            rotary_emb: (cos, sin), each [1, N, 1, head_dim].
            **kwargs: For the author's processor.

        Returns:
            [B, N, C].

        Raises:
            GradientError: A gradient is wanted.
        """
        attn = self._attn
        sparse = encoder_hidden_states is None and attention_mask is None
        if not sparse or not _serves(attn, self._processor):
            written: Tensor = self._class.forward(
                attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb, **kwargs
            )
            return written
        if attn.fused_projections:
            q, k, v = attn.to_qkv(hidden_states).chunk(3, dim=-1)
        else:
            q, k, v = attn.to_q(hidden_states), attn.to_k(hidden_states), attn.to_v(hidden_states)
        q, k = attn.norm_q(q), attn.norm_k(k)
        if autocasting(v):
            # A norm leaves autocast in fp32, and no product of ours is to follow it.
            with torch.autocast(v.device.type, enabled=False):
                out = self._attention(q.to(v.dtype), k.to(v.dtype), v, rotary_emb)
        else:
            out = self._attention(q, k, v, rotary_emb)
        branch: Tensor = attn.to_out[1](attn.to_out[0](out))
        return branch

    def _attention(
        self, q: Tensor, k: Tensor, v: Tensor, rotary: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        weight, bias = attached(self._attn, q.device)
        sparsity = ops.Sparsity.sage(self._topk, q.device)
        processor = self._attn.processor
        groups = groups_of(processor)
        if groups is not None:
            return parallel_sparse_linear_attention(
                q, k, v, weight, bias, self._spec, sparsity, groups, rotary=rotary,
                lengths=getattr(processor, "lengths", None),
            )  # fmt: skip
        return ops.sparse_linear_attention(
            q, k, v, weight, bias, self._spec, sparsity, rotary=rotary
        )


def attached(attn: nn.Module, device: torch.device) -> tuple[Tensor, Tensor]:
    """Weight and bias of the attached proj_l on the device of the activations; an offloaded block
    keeps them elsewhere."""
    held = attached_proj_l(attn)
    assert held is not None
    return held[0].to(device), held[1].to(device)


def _serves(attn: Any, processor: type) -> bool:
    return attached_proj_l(attn) is not None and processor_class(attn.processor) is processor


def check_sla(path: str, attn: Any) -> None:
    """Raise if the heads of an attention with a proj_l are too wide for sparse attention."""
    head_dim = attn.inner_dim // attn.heads
    if attached_proj_l(attn) is not None and head_dim > ops.MAX_SPARSE_HEAD_DIM:
        raise ShapeError(
            f"{path}: head_dim",
            expected=f"at most {ops.MAX_SPARSE_HEAD_DIM} with a proj_l (SLA)",
            got=str(head_dim),
            remedy="Call unload_extra to run without SLA",
        )


def replaceable(attn: nn.Module) -> bool:
    """Whether SLA's forward can take the place of the attention's, or has."""
    return innermost(attn) is not None or holds(attn, SLAForward)


def with_linear(
    pair: SkipPair, attn: Any, config: PatchConfig, *, dense: bool
) -> tuple[SkipPair, SkipPair]:
    """Self-attention with a proj_l: the sum of sparse and linear attention is a pair of its own,
    in front of W_o.

    Args:
        pair: The self-attention, as it would run without a proj_l.
        attn: The attention.
        config: How the model is patched.
        dense: Whether it is left dense: nothing of ours may take its place, or it has a mask.
    """
    path = f"{pair.path}.proj_l"
    if dense:
        pair = replace(pair, reason=f"{pair.reason}; {_DENSE}")
        return pair, linear_pair(pair, path, "as-written", pair.reason)
    if pair.runs != "as-written" and runs_itself(attn):
        if config.attention == "sage":
            words = f'attention="sage" has no sparse kernel: {_DEFINED}'
            pair = replace(pair, runs="after-linear", reason=words)
            return pair, linear_pair(pair, path, "as-written", words)
        words = f"sparse: softmax over sla_topk={config.sla_topk:g} of the blocks of keys, linear "
        words += "attention over all"
        if config.attention == "exact":
            words += f"; {_DEFINED}"
        pair = replace(
            pair,
            runs="two-launch" if pair.runs == "one-launch" else pair.runs,
            reason="; ".join(filter(None, [pair.reason, words])),
        )
        runs: Residual = "as-written" if config.attention == "exact" else "in-kernel"
        return pair, linear_pair(pair, path, runs, words)
    pair = replace(pair, reason=f"{pair.reason}; {_DEFINED}")
    return pair, linear_pair(pair, path, "as-written", pair.reason)


def give_back_linear(state: PairState, linear: PairState, *, exact: bool) -> None:
    """What the guard's decision about an attention means for the sum of its branches.

    Args:
        state: The self-attention, after it was compared.
        linear: The sum of its branches.
        exact: Whether the attention is exact from now on.
    """
    if state.live and not (linear.live and exact):
        return
    if not state.live:
        state.give_back(f"{state.pair.reason}; {_DEFINED}")
    linear.give_back(f"{state.pair.reason}; {_DEFINED}" if state.live else state.pair.reason)
