"""int8 weights of a `-quant` checkpoint, attached to the Linears that run with them.

They are buffers of the Linear, so they move with it. They are not in its state dict, so no other
code sees them. Scales are kept as the bits of fp32, because `.to(torch.bfloat16)` would round
floats. They are used as long as the Linear has the weight to which they were attached, with
unchanged values. A copy of the model (deepcopy, pickle) ignores them and quantises its own.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn

from turbo_rcm_patch.ops.int8_linear import GROUP

_INT8: Final = "turbo_int8_weight"
_SCALE: Final = "turbo_int8_scale_bits"
_ORIGIN: Final = "turbo_int8_origin"
#: Largest relative error of one rounding to bf16 (2^-8) and one to fp16 (2^-11), and largest
#: absolute error where fp16 is subnormal.
_RELATIVE, _ABSOLUTE = 2.0**-8 + 2.0**-10, 2.0**-24


class _Origin:
    """The weight that an int8 weight stands for, and its version when that was attached."""

    __slots__ = ("version", "weight")

    def __init__(self, weight: Tensor | None = None) -> None:
        self.weight = weight
        self.version = 0 if weight is None else weight._version

    def __reduce__(self) -> tuple[type[_Origin], tuple[()]]:
        return _Origin, ()  # A copy of the Linear has another weight, so it gets no origin.

    def is_of(self, weight: Tensor) -> bool:
        return self.weight is weight and self.version == weight._version


def attach_int8(linear: nn.Linear, int8: Tensor, scale: Tensor) -> None:
    """Attach the int8 weight with which a Linear runs under `linear="int8"`.

    Args:
        linear: The Linear. Its own weight [Cout, K], which other code uses, is about int8 times
            the scale.
        int8: int8 [Cout, K].
        scale: fp32 [ceil(Cout / 128), ceil(K / 128)], one for every block of 128 x 128.
    """
    device = linear.weight.device
    detach_int8(linear)
    if linear.weight.is_inference():
        return  # An inference tensor has no version, and does not run in int8.
    linear.register_buffer(_INT8, int8.to(device), persistent=False)
    bits = scale.to(device).float().contiguous().view(torch.int32)
    linear.register_buffer(_SCALE, bits, persistent=False)
    setattr(linear, _ORIGIN, _Origin(linear.weight))


def attached_int8(linear: nn.Module) -> tuple[Tensor, Tensor] | None:
    """Return the attached int8 weight and its scales, or None.

    The result is None if there are none, or if the version of the weight shows a change. Writes
    through `.data` do not change the version; `stands_for` finds them.

    Returns:
        int8 [Cout, K] and fp32 [ceil(Cout / 128), ceil(K / 128)].
    """
    buffers = linear._buffers
    int8, bits = buffers.get(_INT8), buffers.get(_SCALE)
    if int8 is None or bits is None:
        return None
    weight = linear._parameters.get("weight")
    if weight is None or not getattr(linear, _ORIGIN).is_of(weight):
        return None
    return int8, bits.view(torch.float32)


def detach_int8(linear: nn.Module) -> None:
    """Remove the attached int8 weight completely."""
    for name in (_INT8, _SCALE):
        if name in linear._buffers:
            delattr(linear, name)
    linear.__dict__.pop(_ORIGIN, None)


def stands_for(weight: Tensor, int8: Tensor, scale: Tensor) -> bool:
    """Return True if int8 times scale is this weight up to rounding. This waits for the device.

    Args:
        weight: [Cout, K], any float dtype.
        int8: int8 [Cout, K].
        scale: fp32 [ceil(Cout / 128), ceil(K / 128)].
    """
    fits = torch.ones((), dtype=torch.bool, device=weight.device)
    # Part by part, because an fp32 copy of the whole weight would be large.
    for i, rows in enumerate(torch.split(weight.detach(), GROUP)):
        groups = scale[i].repeat_interleave(GROUP)[: weight.shape[1]]
        product = int8[i * GROUP : i * GROUP + len(rows)] * groups
        near = (rows.float() - product).abs() <= _RELATIVE * product.abs() + _ABSOLUTE
        fits &= near.all()
    return bool(fits)
