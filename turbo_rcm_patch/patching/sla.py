"""SLA's projection, attached to diffusers' attention modules as buffers.

TurboDiffusion keeps `proj_l` in fp32 beside a network in bf16. Here the buffers hold the bits of
its fp32 values as int32, so that casting the model does not change them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from turbo_rcm_patch.errors import CheckpointError, ShapeError

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

    Raises:
        ShapeError: The shapes do not fit the heads of this attention.
    """
    dim = weight.shape[-1]
    heads, width = getattr(attention, "heads", 0), getattr(attention, "inner_dim", 0)
    expected = dim if not heads or not width else width // heads
    if tuple(weight.shape) != (expected,) * 2 or tuple(bias.shape) != (expected,):
        raise ShapeError(
            "proj_l",
            expected=f"a weight [{expected}, {expected}] and a bias [{expected}]",
            got=f"{list(weight.shape)} and {list(bias.shape)}",
        )
    detach_proj_l(attention)
    own = next(attention.parameters(), weight)
    device = weight.device if own.is_meta else own.device
    for name, given in zip(PROJ_L, (weight, bias), strict=True):
        values = given.detach().to(device, torch.float32).clone()
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
