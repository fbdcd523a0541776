"""What may run now in a block of the Wan family, asked on every forward, and its modulation.

diffusers copies the Wan block and its attention from file to file, so each model has classes of
its own with the same members; `BlockClasses` names those of one file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from diffusers.models.normalization import FP32LayerNorm
from torch import Tensor, nn

from turbo_rcm_patch.patching.blocks import Mode, refuse_parallel
from turbo_rcm_patch.patching.families.wan_sla import runs_itself
from turbo_rcm_patch.patching.plain import bare, drops

__all__ = [
    "BlockClasses",
    "attention_mode",
    "chosen_backend",
    "gated",
    "modulation",
    "plain_layer_norm",
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
