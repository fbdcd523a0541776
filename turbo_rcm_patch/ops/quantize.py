"""Rows of a float matrix in int8, and the weight of a Linear as such rows.

Numeric contract, which the kernels follow too: a row (all its channels) is quantised
symmetrically, scale max |row| / 127, values rounded half to even. Rows smaller than `TINY`
everywhere are zeros. A row with a NaN or an infinity has scale NaN.

Finer than TurboDiffusion's scales per 128x128 block (arXiv 2512.16093). Scales are applied after
the sum over channels, so they cost nothing inside it.
"""

from __future__ import annotations

from typing import Final, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from turbo_rcm_patch.config import Impl
from turbo_rcm_patch.errors import ShapeError
from turbo_rcm_patch.kernels.operands import Rows
from turbo_rcm_patch.ops.checks import check_float, check_impl, check_same_device
from turbo_rcm_patch.ops.dispatch import resolve_impl
from turbo_rcm_patch.ops.modes import transformed
from turbo_rcm_patch.ops.operation import Operation

#: Largest magnitude of a quantised value.
INT8_MAX: Final = 127
#: Rows that are smaller than this everywhere are zeros: the inverse of their scale would overflow.
TINY: Final = 2.0**-100
#: Products that an int32 adds without overflow.
MAX_CHANNELS: Final = (2**31 - 1) // INT8_MAX**2


def quantized_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., K] any float dtype as int8 [..., K] and scale [...] fp32."""
    x = x.float()
    amax = x.abs().amax(-1)
    finite = amax.isfinite()  # amax keeps NaN
    amax = torch.where(finite & (amax > TINY), amax, torch.ones_like(amax))
    int8 = (x * (INT8_MAX / amax).unsqueeze(-1)).round_().nan_to_num_(0.0)
    int8 = int8.clamp(-INT8_MAX, INT8_MAX).to(torch.int8)
    return int8, torch.where(finite, amax / INT8_MAX, torch.full_like(amax, float("nan")))


def integer_product(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight^T of int8 tensors [B, N, K] and [Cout, K], rounded once to fp32.

    Exact before that rounding: a CPU multiplies int8 as fp32 where 24 bits hold every sum, and in
    fp64 beyond.
    """
    wide = torch.float32 if x.shape[-1] * INT8_MAX**2 <= 2**24 else torch.float64
    return F.linear(x.to(wide), weight.to(wide)).float()


def stacked_rows(*weights: Tensor) -> Rows:
    """The kernel of `quantize_weight`: int8 [1, sum of Cout, K or more] and scales [1, sum of
    Cout]. Nothing is checked."""
    from turbo_rcm_patch.kernels.portable.rows import quantize_stacked as launch

    return launch(weights)


def unpadded(int8: Tensor, channels: int) -> Tensor:
    """int8 [1, Cout, K or more] as [Cout, K], dense."""
    rows = int8[0]
    return rows if rows.shape[1] == channels else rows[:, :channels].contiguous()


def _quantize_weights(weights: list[Tensor], impl: str) -> tuple[Tensor, Tensor]:
    if resolve_impl(cast("Impl", impl), weights[0].device) == "triton":
        rows = stacked_rows(*weights)
        return unpadded(rows.int8, weights[0].shape[1]), rows.scale[0]
    return _in_plain_torch(weights)


def _in_plain_torch(weights: list[Tensor]) -> tuple[Tensor, Tensor]:
    int8, scale = zip(*map(quantized_rows, weights), strict=True)
    return torch.cat(int8), torch.cat(scale)


quantize_weights = Operation("turbo_rcm_patch::quantize_weights", _quantize_weights)


@quantize_weights.register_fake
def _quantize_weights_fake(weights: list[Tensor], impl: str) -> tuple[Tensor, Tensor]:
    first, rows = weights[0], sum(w.shape[0] for w in weights)
    return (
        torch.empty(rows, first.shape[1], dtype=torch.int8, device=first.device),
        torch.empty(rows, dtype=torch.float32, device=first.device),
    )


def quantize_weight(*weights: Tensor, impl: Impl = "auto") -> tuple[Tensor, Tensor]:
    """Quantise the weight of a Linear to int8 with a scale per output channel, max |row| / 127.

    Several Linears over the same input become one, with their outputs side by side.

    Args:
        weights: [Cout, K] each, with the same K, bf16, fp16 or fp32. A quantised weight is a
            constant, so gradients are not tracked.
        impl: "triton", "reference" or "auto".

    Returns:
        int8 [sum of Cout, K] and fp32 [sum of Cout]; the weight is about
        int8 * scale[:, None].

    Raises:
        ShapeError: One is not a matrix, their K differ, or K is over `MAX_CHANNELS`.
        DTypeError: One is not a float matrix.
    """
    check_impl(impl)
    if not weights:
        raise ShapeError("weights", expected="at least one", got="none")
    for weight in weights:
        check_float("weight", weight)
        check_same_device(weights[0].device, weight=weight)
        if weight.dim() != 2 or weight.shape[1] != weights[0].shape[1]:
            shapes = [list(w.shape) for w in weights]
            raise ShapeError("weight", expected="[Cout, K], of one K", got=str(shapes))
    check_channels(weights[0].shape[1])
    held = [weight.detach() for weight in weights]
    if transformed():  # vmap has no rule for an operation of ours
        return _in_plain_torch(held)
    int8, scale = quantize_weights(held, impl)
    return int8, scale


def check_channels(channels: int) -> None:
    """Refuse a number of channels whose products an int32 cannot add."""
    if not 1 <= channels <= MAX_CHANNELS:
        raise ShapeError(
            "channels of an int8 product",
            expected=f"1 to {MAX_CHANNELS}, whose sum fits into an int32",
            got=str(channels),
            remedy="Run this Linear as it is",
        )
