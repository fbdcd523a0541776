"""The convolution of a video autoencoder on channels-last activations.

`KERNELS` is the dispatch table: the first implementation that serves a call runs it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from turbo_rcm_patch.config import Impl
from turbo_rcm_patch.ops.conv3d.formats import Call, Stride
from turbo_rcm_patch.ops.dispatch import Implementation, always, choose, on_gpu, resolve_impl
from turbo_rcm_patch.ops.register import refuse_gradient

if TYPE_CHECKING:
    from turbo_rcm_patch.ops.launch import Target

#: What the implementations compute, for the report and a warning.
_WHAT: Final = "convolution of a VAE"


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
        taps = [phase.unbind(dim) for phase in phases]
        pairs = [pair for a, b, c in taps for pair in ((a, b + c), (a + b, c))]
        phases = [torch.stack(pair, dim) for pair in pairs]
    return pack_weight(torch.cat(phases), packed.dtype)


def _reference() -> Callable[..., Tensor]:
    from turbo_rcm_patch.ops.conv3d.reference import conv3d

    return conv3d


def _hopper() -> Callable[..., Tensor]:
    from turbo_rcm_patch.ops.conv3d.hopper import conv3d

    return conv3d


def _on_hopper(target: Target, call: Call) -> bool:
    """Return True where the kernel for sm_90 was faster than cuDNN on an H200 (`hopper.py`).

    The number of frames has no part in it, so the bits do not depend on how many are decoded at
    once.
    """
    features, *taps, _ = call.weight.shape
    same = call.stride == (1, 1, 1) and call.padding == (taps[1] // 2, taps[2] // 2)
    if not same or taps[1] != taps[2] or not {1, 3}.issuperset(taps) or max(taps) == 1:
        return False
    if call.x.dtype != torch.float32:
        chosen = features % 256 != 0 or taps[1] == 1
    else:
        chosen = torch.backends.cudnn.allow_tf32 and (features % 128 != 0 or features == 384)
    return chosen and target == ("cuda", 90)


KERNELS: Final = (
    Implementation(
        "hopper", _on_hopper,
        "sm_90: up to 2.6 times as fast as cuDNN where Cout is no multiple of its 256 columns",
        _hopper, _WHAT,
    ),
    Implementation("torch", always, "cuDNN's kernels, channels-last", _reference, _WHAT),
)  # fmt: skip


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
    counts: Counter[str] | None = None,
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
        counts: Counts the implementation that runs, by its name.

    Returns:
        [B, T', H', W', Cout], contiguous.
    """
    assert x.dtype == weight.dtype and x.shape[4] == weight.shape[4]
    assert x.is_contiguous() and weight.is_contiguous()
    refuse_gradient("conv3d", (x, weight, bias, residual))
    call = Call(x, weight, stride, padding, impl)
    kernel = _reference()
    if on_gpu(x.device) and resolve_impl(impl, x.device) == "triton":
        kernel = choose(KERNELS, x.device, call, counts)
    elif counts is not None:
        counts[KERNELS[-1].name] += 1
    return kernel(call, bias, residual, out_dtype=dtype or x.dtype)
