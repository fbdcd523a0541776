"""SLA's projection on an attention of a stock class, whose module has no place for it.

TurboDiffusion keeps `proj_l` in fp32 beside a network in bf16, so here it is kept as the bits of
its fp32 values: casting the model leaves it as it is.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn

from turbo_rcm_patch.errors import ShapeError

__all__ = ["PROJ_L", "attach_proj_l", "attached_proj_l", "detach_proj_l"]

#: Buffers of an attention that hold the bits of SLA's projection: weight [D, D], bias [D], int32.
PROJ_L: Final = ("turbo_proj_l_weight", "turbo_proj_l_bias")


def attach_proj_l(attention: nn.Module, weight: Tensor, bias: Tensor) -> None:
    """Give an attention the projection that makes it sparse-linear once the model is patched.

    Args:
        attention: Self-attention with heads of D channels.
        weight: [D, D], any float dtype.
        bias: [D], any float dtype.

    Raises:
        ShapeError: They do not belong to the heads of this attention.
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
    """The attached projection, or None.

    Returns:
        Weight [D, D] and bias [D], fp32, views of what is attached.
    """
    weight, bias = (attention._buffers.get(name) for name in PROJ_L)
    if weight is None or bias is None:
        return None
    return weight.view(torch.float32), bias.view(torch.float32)


def detach_proj_l(attention: nn.Module) -> None:
    """Take the projection away; nothing of it stays behind."""
    for name in PROJ_L:
        if name in attention._buffers:
            delattr(attention, name)
