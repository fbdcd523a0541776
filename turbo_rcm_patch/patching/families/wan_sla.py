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
from turbo_rcm_patch.patching.blocks import refuse_parallel
from turbo_rcm_patch.patching.families._sla import linear_pair
from turbo_rcm_patch.patching.guard import Guard
from turbo_rcm_patch.patching.plain import autocasting, bare
from turbo_rcm_patch.patching.record import holds, innermost
from turbo_rcm_patch.patching.sla import attached_proj_l
from turbo_rcm_patch.patching.state import PairState
from turbo_rcm_patch.skip import Residual, SkipPair

__all__ = [
    "SLAForward",
    "check_sla",
    "replaceable",
    "runs_itself",
    "settle",
    "sparse_attention",
    "with_linear",
]

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
            ContextParallelError: The attention is split over several ranks.
            GradientError: A gradient is wanted.
        """
        attn = self._attn
        sparse = encoder_hidden_states is None and attention_mask is None
        if not sparse or not _serves(attn, self._processor):
            written: Tensor = self._class.forward(
                attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb, **kwargs
            )
            return written
        refuse_parallel("attention", attn.processor)
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
        return sparse_attention(self._attn, q, k, v, self._spec, self._topk, rotary=rotary)


def sparse_attention(
    attn: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: ops.AttentionSpec,
    topk: float,
    *,
    rotary: tuple[Tensor, Tensor] | None,
    norm_q: Tensor | None = None,
    norm_k: Tensor | None = None,
) -> Tensor:
    """`ops.sparse_linear_attention` with the attached proj_l and SageSLA's blocks.

    Args:
        attn: Holds the proj_l.
        q: [B, N, H*D].
        k: [B, N, H*D].
        v: [B, N, H*D].
        spec: How the sparse part is computed.
        topk: Share of the blocks of keys.
        rotary: (cos, sin).
        norm_q: RMSNorm weight of q.
        norm_k: Likewise for k.

    Returns:
        [B, N, H*D], dtype of q.
    """
    attached = attached_proj_l(attn)
    assert attached is not None
    weight, bias = (x.to(q.device) for x in attached)
    sparsity = ops.Sparsity.sage(topk, q.device)
    return ops.sparse_linear_attention(
        q, k, v, weight, bias, spec, sparsity, norm_q=norm_q, norm_k=norm_k, rotary=rotary
    )


def _serves(attn: Any, processor: type) -> bool:
    return attached_proj_l(attn) is not None and type(attn.processor) is processor


def runs_itself(attn: nn.Module) -> bool:
    """Whether calling the attention runs its class's forward or SLA's, and nothing else."""
    if type(attn.__dict__.get("forward")) is not SLAForward:
        return bare(attn)
    return not (
        attn._forward_hooks
        or attn._forward_pre_hooks
        or attn._backward_hooks
        or attn._backward_pre_hooks
    )


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
    """Self-attention with a proj_l: the sum of its branches is a pair of its own, before W_o.

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


def settle(state: PairState, linear: PairState | None, *, fused: bool, exact: bool) -> None:
    """What the guard's decision about an attention means for the sum of its branches.

    Args:
        state: The self-attention, after it was compared.
        linear: The sum of its branches, or None for dense attention.
        fused: Whether it was accepted.
        exact: Whether it is exact from now on.
    """
    if linear is None or not linear.live and fused:
        return
    if not fused:
        state.give_back(f"{state.pair.reason}; {_DEFINED}")
    if not fused or exact:
        linear.give_back(f"{state.pair.reason}; {_DEFINED}" if fused else state.pair.reason)
