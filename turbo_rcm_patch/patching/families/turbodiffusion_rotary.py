"""TurboDiffusion's self-attention where flash-attn, whose rotary embedding it calls, is not
installed.

Its network cannot run there unpatched. Patched it can, and then the guard, a hooked attention, a
pair that was given back and autocast need the author's attention as well: the same modules called
in the same order, and the rotary embedding in plain torch.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from turbo_rcm_patch.patching.guard import Guard
from turbo_rcm_patch.patching.plain import bare
from turbo_rcm_patch.patching.registry import author_class

__all__ = ["RotaryForward", "lacks_rotary", "runs_itself"]

#: What the author's file sets to None where flash-attn is missing.
_ROTARY = "flash_apply_rotary_emb"


def lacks_rotary(attn: nn.Module) -> bool:
    """Whether an attention's own forward would fail for want of a rotary embedding."""
    file = sys.modules.get(author_class(attn).__module__)
    return file is not None and vars(file).get(_ROTARY, _ROTARY) is None


def runs_itself(attn: nn.Module) -> bool:
    """Whether calling the attention runs its class's forward or `RotaryForward`, and nothing
    else."""
    if type(attn.__dict__.get("forward")) is not RotaryForward:
        return bare(attn)
    return not (
        attn._forward_hooks
        or attn._forward_pre_hooks
        or attn._backward_hooks
        or attn._backward_pre_hooks
    )


class RotaryForward:
    """Stands in for the forward of one self-attention, which it holds."""

    __slots__ = ("_attn",)

    def __init__(self, attn: Any, guard: Guard | None) -> None:
        self._attn = attn

    def over(self, attn: Any) -> RotaryForward:
        """The same over what stands for the attention."""
        return RotaryForward(attn, None)

    def __call__(self, x: Tensor, seq_lens: Tensor, freqs: Tensor) -> Tensor:
        """The author's attention.

        Args:
            x: [B, N, C].
            seq_lens: [B]; not read.
            freqs: Rotary angles, [N, head_dim / 2] or of that many elements.

        Returns:
            [B, N, C].
        """
        attn = self._attn
        heads = attn.num_heads
        q, k, v = attn.norm_q(attn.q(x)), attn.norm_k(attn.k(x)), attn.v(x)
        q, k, v = (torch.unflatten(part, 2, (heads, -1)) for part in (q, k, v))
        branch: Tensor = attn.o(attn.attn_op(_turned(q, freqs), _turned(k, freqs), v).flatten(2))
        return branch


def _turned(x: Tensor, freqs: Tensor) -> Tensor:
    """x [B, N, H, D] with channels 2i and 2i + 1 turned by an angle, in fp32, rounded once."""
    angles = freqs.float().reshape(x.shape[1], 1, -1)
    cos, sin = angles.cos(), angles.sin()
    even, odd = torch.unflatten(x.float(), -1, (-1, 2)).unbind(-1)
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1)
    return turned.flatten(-2).to(x.dtype)
