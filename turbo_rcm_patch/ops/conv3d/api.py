"""The convolution of a video autoencoder on channels-last activations.

`IMPLEMENTATIONS` is the dispatch table: the first implementation that serves a call runs it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from turbo_rcm_patch.config import Impl
from turbo_rcm_patch.errors import ConfigError, DTypeError, ShapeError
from turbo_rcm_patch.ops.conv3d.passes import add_bias_residual
from turbo_rcm_patch.ops.dispatch import resolve_impl
from turbo_rcm_patch.ops.register import refuse_gradient

#: What the kernel for sm_90 makes faster, for a warning.
_WHAT: Final = "convolution of a VAE"
#: Strides over time, height and width.
Stride = tuple[int, int, int]


class Call(NamedTuple):
    """What the choice of an implementation depends on.

    Attributes:
        x: Activations, as in `conv3d`.
        weight: Packed weight, as in `conv3d`.
        stride: Strides.
        padding: Zeros above and below, left and right.
        impl: As `PatchConfig.impl`.
    """

    x: Tensor
    weight: Tensor
    stride: Stride
    padding: tuple[int, int]
    impl: Impl = "auto"


class Choice(NamedTuple):
    """One row of the dispatch table.

    Attributes:
        name: Its name in reports.
        serves: Returns True for the calls that it runs.
        run: Computes a call, with its bias, its residual and the dtype of the result.
        reason: Why it is chosen there.
    """

    name: str
    serves: Callable[[Call], bool]
    run: Callable[[Call, Tensor | None, Tensor | None, torch.dtype], Tensor]
    reason: str


def pack_weight(weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a convolution's weight channels-last, [Cout, kT, kH, kW, Cin], a copy where needed.

    Args:
        weight: [Cout, Cin, kT, kH, kW], or [Cout, Cin, kH, kW] of a 2D convolution.
        dtype: dtype of the result; by default the weight's. fp32 on a GPU is rounded to TF32 where
            torch's flag for convolutions allows that.
    """
    wide = weight.detach() if weight.dim() == 5 else weight.detach().unsqueeze(2)
    packed = wide.permute(0, 2, 3, 4, 1).to(dtype or weight.dtype).contiguous()
    if packed.dtype != torch.float32 or not (packed.is_cuda and torch.backends.cudnn.allow_tf32):
        return packed
    # Products will be in TF32, and the tensor cores would cut off the last bits.
    rounded = ((packed.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)
    return torch.where(packed.isfinite(), rounded, packed)


def pack_phases(packed: Tensor) -> Tensor:
    """Return the weight of a convolution that reads a frame enlarged twice (nearest), for one that
    reads the frame itself.

    Of three neighbours in the enlarged frame two are one pixel. So each of the four phases of the
    result (upper left, upper right, lower left, lower right) is a convolution of 2 x 2 taps, whose
    weights are sums: 4 products for 9, and the enlarged frame is never written.

    Args:
        packed: [Cout, 1, 3, 3, Cin] of `pack_weight`.

    Returns:
        [4 * Cout, 1, 2, 2, Cin] in the dtype of `packed`, to be padded by one zero all around.
    """
    phases = [packed.float().permute(0, 4, 1, 2, 3)]
    for dim in (3, 4):
        taps = [one.unbind(dim) for one in phases]
        pairs = [pair for a, b, c in taps for pair in ((a, b + c), (a + b, c))]
        phases = [torch.stack(pair, dim) for pair in pairs]
    return pack_weight(torch.cat(phases), packed.dtype)


def _is_pointwise(call: Call) -> bool:
    return call.weight.shape[1:4] == (1, 1, 1) and call.stride == (1, 1, 1)


def _linear(
    call: Call, bias: Tensor | None, residual: Tensor | None, dtype: torch.dtype
) -> Tensor:
    weight = call.weight.flatten(1)
    if residual is None and dtype == call.x.dtype:
        return F.linear(call.x, weight, None if bias is None else bias.to(dtype))
    y = F.linear(call.x, weight)
    return add_bias_residual(y, bias, residual, dtype=dtype, impl=call.impl)


def _torch(call: Call, bias: Tensor | None, residual: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Run torch's convolution in its channels-last format.

    On a GPU bias and residual are added in one pass after it, because torch would take two.
    """
    x, weight = call.x, call.weight.permute(0, 4, 1, 2, 3)
    own = None if bias is None or x.is_cuda else bias.to(x.dtype)
    bias = bias if own is None else None
    if call.weight.shape[1] == 1 and call.stride[0] == 1:  # cuDNN has more kernels in 2D
        y = F.conv2d(
            x.flatten(0, 1).permute(0, 3, 1, 2), weight.squeeze(2), own, call.stride[1:],
            call.padding,
        )  # fmt: skip
        y = y.permute(0, 2, 3, 1)
        y = y.reshape(*x.shape[:2], *y.shape[1:])
    else:
        y = F.conv3d(
            x.permute(0, 4, 1, 2, 3), weight, own, call.stride, (0, *call.padding)
        ).permute(0, 2, 3, 4, 1)
    y = y.contiguous()  # A no-op where torch kept the format.
    if bias is None and residual is None and dtype == y.dtype:
        return y
    return add_bias_residual(y, bias, residual, dtype=dtype, impl=call.impl)


def _load_hopper() -> ModuleType:
    from turbo_rcm_patch.ops.conv3d import hopper

    return hopper


def _on_hopper(call: Call) -> bool:
    """Return True where the kernel for sm_90 was faster than cuDNN on an H200 (`hopper.py`).

    The number of frames has no part in it, so the bits do not depend on how many are decoded at
    once.
    """
    features, *taps, _ = call.weight.shape
    if not call.x.is_cuda or resolve_impl(call.impl, call.x.device) != "triton":
        return False
    from turbo_rcm_patch.ops.gluon import hopper_module
    from turbo_rcm_patch.ops.launch import target_of

    same = call.stride == (1, 1, 1) and call.padding == (taps[1] // 2, taps[2] // 2)
    if not same or taps[1] != taps[2] or not {1, 3}.issuperset(taps):
        return False
    if call.x.dtype != torch.float32:
        chosen = features % 256 != 0 or taps[1] == 1
    else:
        chosen = torch.backends.cudnn.allow_tf32 and (features % 128 != 0 or features == 384)
    return (
        chosen
        and target_of(call.x.device) == ("cuda", 90)
        and hopper_module(_load_hopper, _WHAT) is not None
    )


def _hopper(
    call: Call, bias: Tensor | None, residual: Tensor | None, dtype: torch.dtype
) -> Tensor:
    from turbo_rcm_patch.ops.gluon import ran

    made: list[Tensor] = []

    def run(own: Any) -> None:
        made.append(own.conv3d(call.x, call.weight, bias, residual, out_dtype=dtype))

    return made[0] if ran(_load_hopper, _WHAT, run) else _torch(call, bias, residual, dtype)


IMPLEMENTATIONS: Final = [
    Choice("linear", _is_pointwise, _linear, "a 1x1x1 convolution is one product"),
    Choice(
        "hopper",
        _on_hopper,
        _hopper,
        "sm_90: up to 2.6 times as fast as cuDNN where Cout is no multiple of its 256 columns",
    ),
    Choice("torch", lambda call: True, _torch, "cuDNN's kernels, channels-last"),
]


def implementation_of(call: Call) -> Choice:
    """Return the implementation that runs a call."""
    return next(one for one in IMPLEMENTATIONS if one.serves(call))


def conv3d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    stride: Stride = (1, 1, 1),
    padding: tuple[int, int] = (0, 0),
    dtype: torch.dtype | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """Convolve channels-last activations, without padding in time, and add bias and residual.

    Products are in the dtype of x, sums in fp32.

    Args:
        x: [B, T + kT - 1, H, W, Cin], contiguous, bf16, fp16 or fp32. The frames of history that a
            causal convolution needs come first (`passes.norm_silu` writes behind them).
        weight: [Cout, kT, kH, kW, Cin], contiguous, in the dtype of x (`pack_weight`).
        bias: [Cout], or None.
        residual: [B, T', H', W', Cout], added to the result, or None.
        stride: Strides over time, height and width.
        padding: Zeros above and below, and left and right.
        dtype: dtype of the result; by default that of x.
        impl: "reference" keeps every pass in plain torch.

    Returns:
        [B, T', H', W', Cout], contiguous.
    """
    if x.dim() != 5 or weight.dim() != 5 or x.shape[4] != weight.shape[4]:
        raise ShapeError(
            "x and weight of conv3d",
            expected="[B, T, H, W, Cin] and [Cout, kT, kH, kW, Cin]",
            got=f"{list(x.shape)} and {list(weight.shape)}",
            remedy="Pack the weight with pack_weight",
        )
    if x.dtype != weight.dtype or x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise DTypeError(
            "x and weight of conv3d",
            expected="both bfloat16, float16 or float32",
            got=f"{x.dtype} and {weight.dtype}",
        )
    if not x.is_contiguous() or not weight.is_contiguous():
        raise ConfigError(
            "x and weight of conv3d", expected="contiguous tensors", got="other strides",
            remedy="Call contiguous() on them",
        )  # fmt: skip
    refuse_gradient("conv3d", (x, weight, bias, residual))
    call = Call(x, weight, stride, padding, impl)
    return implementation_of(call).run(call, bias, residual, dtype or x.dtype)
