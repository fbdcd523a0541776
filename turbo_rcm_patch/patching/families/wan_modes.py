"""What may run now in a block of the Wan family, asked on every forward, and its modulation.

diffusers copies the Wan block and its attention from file to file, so each model has classes of
its own with the same members; `BlockClasses` names those of one file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from diffusers.models.normalization import FP32LayerNorm
from torch import Tensor, nn

from turbo_rcm_patch.ops.spec import AttentionSpec
from turbo_rcm_patch.patching.blocks import Mode, plain_dropout, refuse_parallel
from turbo_rcm_patch.patching.families.wan_sla import runs_itself
from turbo_rcm_patch.patching.linears import Linears
from turbo_rcm_patch.patching.plain import bare, drops, plain_norm
from turbo_rcm_patch.patching.plan import AttentionPlan
from turbo_rcm_patch.patching.state import PairState, Precise
from turbo_rcm_patch.skip import Cast

__all__ = [
    "BlockClasses",
    "attention_mode",
    "chosen_backend",
    "gated",
    "modulation",
    "plain_layer_norm",
    "plan_attention",
]


@dataclass(frozen=True, slots=True)
class BlockClasses:
    """The classes of one kind of block.

    Attributes:
        block: The block.
        attention: Its attention, self and cross.
        processor: What computes that attention.
    """

    block: type[nn.Module]
    attention: type[nn.Module]
    processor: type


def attention_mode(attn: Any, classes: BlockClasses) -> Mode:
    """What may run now: ours in the place of the attention, the skip after it, or nothing of ours.

    Raises:
        ContextParallelError: The attention is split over several ranks.
    """
    kind: object = type(attn)  # an object, or a type checker would take attn for a plain Module
    if kind is not classes.attention or type(attn.processor) is not classes.processor:
        return "as-written"
    refuse_parallel("attention", attn.processor)
    if drops(attn.to_out[1]):
        return "as-written"
    return "ours" if runs_itself(attn) else "called"


def chosen_backend(attn: Any) -> str:
    """The attention backend that somebody chose (`set_attention_backend`, `attention_backend`), or
    "" for torch's own."""
    chosen = attn.processor._attention_backend
    if chosen is None:
        chosen = _AttentionBackendRegistry._active_backend
    name: str = getattr(chosen, "value", chosen)
    return "" if name == AttentionBackendName.NATIVE.value else name


def plain_layer_norm(norm: Any) -> bool:
    """Whether `norm(x.float())` is exactly a layer norm of the last dimension in fp32."""
    return type(norm) is FP32LayerNorm and len(norm.normalized_shape) == 1 and bare(norm)


def modulation(table: Tensor, temb: Tensor) -> tuple[Tensor, ...]:
    """(shift, scale, gate) of self-attention and of the feed-forward, fp32, [B, 1 or N, C].

    Args:
        table: [1, 6, C].
        temb: [B, 6, C], or [B, N, 6, C] with a timestep per token.
    """
    if temb.ndim == 4:
        rows = (table.unsqueeze(0) + temb.float()).chunk(6, dim=2)
        return tuple(row.squeeze(2) for row in rows)
    return (table + temb.float()).chunk(6, dim=1)


def gated(hidden: Tensor, branch: Tensor, gate: Tensor) -> Tensor:
    """The author's gated skip: fp32, rounded once."""
    return (hidden.float() + branch * gate).type_as(hidden)


def plan_attention(
    name: str,
    attn: Any,
    classes: BlockClasses,
    specs: Mapping[Precise, AttentionSpec],
    state: PairState,
    linears: Linears,
    *,
    cast: Cast,
) -> AttentionPlan | None:
    """The plan of an attention whose every module is plain; None where one has to be called.

    Args:
        name: Of the attention in its block.
        attn: The attention.
        classes: What its classes have to be.
        specs: How it is computed after each step of the guard.
        state: Where the guard is now, and whether its Linears may run in int8.
        linears: Knows which Linears run in int8.
        cast: Of its skip.
    """
    if attention_mode(attn, classes) != "ours" or attn.fused_projections:
        return None
    like, norms, int8 = attn.to_out[0].weight, (attn.norm_q, attn.norm_k), state.int8
    cross = attn.is_cross_attention
    names = (("q", attn.to_q), ("kv", attn.to_k, attn.to_v)) if cross else (
        ("qkv", attn.to_q, attn.to_k, attn.to_v),
    )  # fmt: skip
    products = [
        linears.product(f"{name}.{key}", modules, like, int8=int8)
        for key, *modules in (*names, ("out", attn.to_out[0]))
    ]
    if any(product is None or product.int8 != int8 for product in products):
        return None
    if not all(plain_norm(norm, like) for norm in norms) or norms[0].eps != norms[1].eps:
        return None
    if not plain_dropout(attn.to_out[1]):
        return None
    asked, exact = (
        replace(specs[step], eps=norms[0].eps) for step in (state.precision, "exact attention")
    )
    few = cross and asked.attention in ("auto", "int8")
    project, *of_context, out = products
    assert project is not None
    return AttentionPlan(
        project, of_context[0] if cross else None, *norms,
        attn.to_out[0], out if int8 else None, asked, exact if few else None, cast,
    )  # fmt: skip
