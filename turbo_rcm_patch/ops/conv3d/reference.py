"""The convolution in plain torch, on any device: the CPU's path, and cuDNN's on a GPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from turbo_rcm_patch.ops.conv3d.formats import Call
from turbo_rcm_patch.ops.conv3d.passes import norm_silu
from turbo_rcm_patch.ops.dispatch import on_gpu


def conv3d(
    call: Call, bias: Tensor | None, residual: Tensor | None, *, out_dtype: torch.dtype
) -> Tensor:
    """Run torch's convolution in its channels-last format; one of 1x1x1 is one product.

    On a GPU bias and residual are added in one pass after it, because torch would take two.
    """
    x, weight = call.x, call.weight.permute(0, 4, 1, 2, 3)
    product = weight.shape[2:] == (1, 1, 1) and call.stride == (1, 1, 1)
    torch_bias = None  # the bias that torch adds
    if (residual is None and out_dtype == x.dtype) if product else not on_gpu(x.device):
        torch_bias, bias = None if bias is None else bias.to(x.dtype), None
    if product:
        y = F.linear(x, call.weight.flatten(1), torch_bias)
    elif weight.shape[2] == 1 and call.stride[0] == 1:  # cuDNN has more kernels in 2D
        y = F.conv2d(
            x.flatten(0, 1).permute(0, 3, 1, 2), weight.squeeze(2), torch_bias, call.stride[1:],
            call.padding,
        )  # fmt: skip
        y = y.permute(0, 2, 3, 1)
        y = y.reshape(*x.shape[:2], *y.shape[1:])
    else:
        y = F.conv3d(
            x.permute(0, 4, 1, 2, 3), weight, torch_bias, call.stride, (0, *call.padding)
        ).permute(0, 2, 3, 4, 1)
    y = y.contiguous()  # A no-op where torch kept the format.
    if bias is None and residual is None and out_dtype == y.dtype:
        return y
    return norm_silu(
        y, None, silu=False, before=bias, residual=residual, dtype=out_dtype, in_place=True,
        impl=call.impl,
    )[0]  # fmt: skip
