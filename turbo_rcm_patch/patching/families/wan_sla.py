"""SLA in diffusers' Wan classes: a self-attention that holds a `proj_l` is sparse-linear.

The author's attention is dense, but such weights were trained for SLA. So the forward of the
attention is replaced too, by SLA as it is defined, in plain torch. The guard compares with it, and
it runs wherever the block runs its author's forward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from turbo_rcm_patch import ops
from turbo_rcm_patch.patching.sla import attached_proj_l


class SLAForward:
    """The replacement of the forward of one self-attention.

    It holds the attention, so that a deep copy of a patched model holds the copied one.
    """

    __slots__ = ("_attn", "_class", "_spec", "_topk")

    def __init__(self, attn: Any, topk: float) -> None:
        self._attn, self._topk, self._class = attn, topk, type(attn)
        self._spec = ops.AttentionSpec(heads=attn.heads, attention="exact")

    def __call__(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Run the author's projections and norms around SLA.

        Without a proj_l, with a mask or as a cross-attention, run the author's forward.

        Args:
            hidden_states: [B, N, C].
            encoder_hidden_states: None for self-attention.
            attention_mask: None.
            rotary_emb: (cos, sin), each [1, N, 1, D].
            **kwargs: For the author's processor.

        Returns:
            [B, N, C].
        """
        attn, held = self._attn, attached_proj_l(self._attn)
        if held is None or encoder_hidden_states is not None or attention_mask is not None:
            forward: Any = self._class.forward
            written: Tensor = forward(
                attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb, **kwargs
            )
            return written
        if attn.fused_projections:
            q, k, v = attn.to_qkv(hidden_states).chunk(3, dim=-1)
        else:
            q, k, v = attn.to_q(hidden_states), attn.to_k(hidden_states), attn.to_v(hidden_states)
        q, k = attn.norm_q(q).to(v.dtype), attn.norm_k(k).to(v.dtype)
        weight, bias = (x.to(q.device) for x in held)
        sparsity = ops.Sparsity.sage(self._topk, q.device)
        with torch.autocast(q.device.type, enabled=False):
            out = ops.sparse_linear_attention(
                q, k, v, weight, bias, self._spec, sparsity, rotary=rotary_emb
            )
        branch: Tensor = attn.to_out[1](attn.to_out[0](out))
        return branch
