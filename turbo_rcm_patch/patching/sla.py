"""SLA in diffusers' Wan classes: a self-attention that holds a `proj_l` is sparse-linear.

TurboDiffusion keeps `proj_l` in fp32 in a network in bf16. Here it is attached to the
attention modules as buffers that hold the bits of its fp32 values as int32, so that casting the
model does not change them.

The author's attention is dense, but such weights were trained for SLA. So the forward of the
attention is replaced too, by SLA as it is defined, in plain torch. The guard compares with it, and
it runs wherever the block runs its original forward.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from turbo_rcm_patch import ops
from turbo_rcm_patch.errors import CheckpointError
from turbo_rcm_patch.patching.plain import Replacement

#: Buffers of an attention that hold the bits of SLA's projection: weight [D, D], bias [D], int32.
PROJ_L: Final = ("turbo_proj_l_weight", "turbo_proj_l_bias")
#: The key of a transformer's configuration that records its `proj_l`.
MARK: Final = "_turbo_rcm_sla"


def attach_proj_l(attention: nn.Module, weight: Tensor, bias: Tensor) -> None:
    """Attach the projection that makes an attention sparse-linear once the model is patched.

    Args:
        attention: Self-attention with heads of D channels.
        weight: [D, D], any float dtype.
        bias: [D], any float dtype.
    """
    detach_proj_l(attention)
    parameter = next(attention.parameters(), weight)
    device = weight.device if parameter.is_meta else parameter.device
    for name, value in zip(PROJ_L, (weight, bias), strict=True):
        values = value.detach().to(device, torch.float32).clone()
        attention.register_buffer(name, values.view(torch.int32), persistent=False)


def attached_proj_l(attention: nn.Module) -> tuple[Tensor, Tensor] | None:
    """Return the attached projection, weight [D, D] and bias [D] in fp32, or None."""
    weight, bias = (attention._buffers.get(name) for name in PROJ_L)
    if weight is None or bias is None:
        return None
    return weight.view(torch.float32), bias.view(torch.float32)


def detach_proj_l(attention: nn.Module) -> None:
    """Remove the attached projection completely."""
    for name in PROJ_L:
        if name in attention._buffers:
            delattr(attention, name)


def held_proj_l(model: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    """Return every attached `proj_l` of a model, by the path of its attention."""
    held = ((name, attached_proj_l(module)) for name, module in model.named_modules())
    return {name: pair for name, pair in held if pair is not None}


def refuse_lost_proj_l(model: nn.Module, path: str) -> None:
    """Raise if a model's configuration says that it has SLA, but its `proj_l` are not attached.

    This happens when a stock class loads a converted folder.

    Raises:
        CheckpointError: Some are missing.
    """
    config: Any = getattr(model, "config", None)
    mark = config.get(MARK) if isinstance(config, Mapping) else None
    if not isinstance(mark, Mapping) or len(held_proj_l(model)) >= mark["count"]:
        return
    raise CheckpointError(
        f"{path or type(model).__name__}: its configuration says that it has SLA in "
        f"{mark['count']} attentions, but their proj_l are missing, and its weights were not "
        "trained for dense attention",
        expected="its proj_l attached",
        got="a model that was loaded without them",
        remedy="Call load_extra(transformer, converted_folder) before patch_model, or load the "
        "pipeline with load_pipeline. If dense attention is meant, call unload_extra(transformer)",
    )


class SLAForward(Replacement):
    """The replacement of the forward of one self-attention.

    It holds the attention, so that a deep copy of a patched model holds the copied one.
    """

    def __init__(self, attn: Any, topk: float) -> None:
        self._attn, self._topk = attn, topk

    def __call__(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Run the author's projections and norms around SLA.

        Without a proj_l, with a mask or as a cross-attention, run the original forward.

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
            forward: Any = type(attn).forward
            written: Tensor = forward(
                attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb, **kwargs
            )
            return written
        if attn.fused_projections:
            q, k, v = attn.to_qkv(hidden_states).chunk(3, dim=-1)
        else:
            q, k, v = (linear(hidden_states) for linear in (attn.to_q, attn.to_k, attn.to_v))
        q, k = attn.norm_q(q).to(v.dtype), attn.norm_k(k).to(v.dtype)
        weight, bias = (x.to(q.device) for x in held)
        sparsity = ops.Sparsity.sage(self._topk, q.device)
        spec = ops.AttentionSpec(heads=attn.heads, attention="exact")
        with torch.autocast(q.device.type, enabled=False):
            out = ops.sparse_linear_attention(
                q, k, v, weight, bias, spec, sparsity, rotary=rotary_emb
            )
        branch: Tensor = attn.to_out[1](attn.to_out[0](out))
        return branch
