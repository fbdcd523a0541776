"""The passes between the convolutions of a video autoencoder, each one read and one write.

All activations are channels-last, [B, T, H, W, C] with contiguous channels. Every pass computes in
fp32 and rounds once. On a GPU they are Triton kernels (`triton.py`), elsewhere plain torch.
"""

from __future__ import annotations

from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from turbo_rcm_patch.errors import ShapeError
from turbo_rcm_patch.ops.conv3d.formats import LEAST_NORM, Duplicate, GroupNorm, RMSNorm
from turbo_rcm_patch.ops.dispatch import resolve_impl


def norm_silu(
    x: Tensor,
    norm: RMSNorm | GroupNorm | None,
    *,
    silu: bool = True,
    before: Tensor | None = None,
    residual: Tensor | None = None,
    frames: int = 0,
    history: Tensor | None = None,
    dtype: torch.dtype | None = None,
    in_place: bool = False,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Compute silu(norm(x + before) + residual) behind the frames of history of a causal
    convolution.

    Args:
        x: [B, T, H, W, C]; any strides with contiguous channels and dense frames.
        norm: The norm, or None for none.
        silu: False leaves SiLU out.
        before: [C], added to x first: the bias of the convolution that made x. None for none.
        residual: [B, T, H, W, C], contiguous, or None.
        frames: Number of frames of history that the convolution needs.
        history: [B, frames, H, W, C] that an earlier call returned; None for zeros.
        dtype: dtype of the result; by default that of x.
        in_place: Whether a kernel may write the result over x, contiguous and without history, if
            their dtypes are the same.
        impl: "triton", "reference" or "auto".

    Returns:
        [B, frames + T, H, W, C], contiguous, and a copy of its last frames for the next call,
        [B, frames, H, W, C].

    Raises:
        ShapeError: The history is of another video.
    """
    dtype = dtype or x.dtype
    if history is not None and history.shape != (x.shape[0], frames, *x.shape[2:]):
        raise ShapeError(
            "norm_silu: history",
            expected=f"{frames} frames of {list(x.shape)}",
            got=str(list(history.shape)),
            remedy="Begin each video with an empty cache",
        )
    if resolve_impl(impl, x.device) == "triton":
        from turbo_rcm_patch.ops.conv3d import triton

        out = x if in_place and dtype == x.dtype else None
        return triton.norm_silu(
            x, norm, silu, before, frames, history, dtype, residual=residual, y=out
        )
    y = x.float()
    if before is not None:
        y = y + before.float()
    if isinstance(norm, RMSNorm):
        y = F.normalize(y, dim=-1, eps=LEAST_NORM) * x.shape[-1] ** 0.5
        y = y * norm.weight.float().flatten()
        if norm.bias is not None:
            y = y + norm.bias.float().flatten()
    elif norm is not None:
        planes = y.permute(0, 4, 1, 2, 3)
        weight, bias = norm.weight.float(), norm.bias.float()
        y = F.group_norm(planes, norm.groups, weight, bias, norm.eps).permute(0, 2, 3, 4, 1)
        if norm.scale is not None and norm.shift is not None:
            y = y * _nearest(norm.scale, y).float() + _nearest(norm.shift, y).float()
    if residual is not None:
        y = y + residual.float()
    y = (F.silu(y) if silu else y).to(dtype)
    if history is None:
        history = y.new_zeros(y.shape[0], frames, *y.shape[2:])
    y = (torch.cat([history, y], 1) if frames else y).contiguous()
    return y, y[:, y.shape[1] - frames :].clone()


def _nearest(latent: Tensor, y: Tensor) -> Tensor:
    """Return the latent's pixel of every pixel of y, [B, T, H, W, C]."""
    repeat = y.shape[2] // latent.shape[2]
    latent = latent.repeat_interleave(repeat, 2).repeat_interleave(repeat, 3)
    return latent[:, frames_of(y.shape[1], latent.shape[1], y.device)]


def frames_of(n_frames: int, n_latent: int, device: torch.device) -> Tensor:
    """Return the latent frame of each frame: with an odd number, the first has one of its own."""
    odd = n_frames > 1 and n_frames % 2
    repeat = (n_frames - odd) // (n_latent - odd)
    return (torch.arange(n_frames, device=device) + odd * (repeat - 1)) // repeat


def upsample(
    y: Tensor,
    bias: Tensor | None,
    duplicate: Duplicate | None = None,
    *,
    repeat: int = 1,
    first: bool = False,
    dtype: torch.dtype,
    impl: str = "auto",
) -> Tensor:
    """Write the phases of an upsampling convolution (`api.pack_phases`) into their pixels, and add
    bias and shortcut.

    Args:
        y: [B, T, H + 1, W + 1, 4 * C], contiguous. Pixel (2 * h + i, 2 * w + j) of the result is
            phase 2 * i + j of pixel (h + i, w + j).
        bias: [C], or None.
        duplicate: What is added, or None.
        repeat: Number of equal frames that each frame becomes.
        first: True if the first frame stays one, here and in the shortcut.
        dtype: dtype of the result.
        impl: "triton", "reference" or "auto".

    Returns:
        [B, T * repeat, 2 * H, 2 * W, C], contiguous; with `first` repeat - 1 frames fewer.
    """
    if resolve_impl(impl, y.device) == "triton":
        from turbo_rcm_patch.ops.conv3d import triton

        return triton.upsample(y, bias, duplicate, repeat, first, dtype)
    batch, frames, height, width, channels = y.shape
    phases = torch.unflatten(y.float(), 4, (2, 2, channels // 4))
    out = phases.new_empty(batch, frames, 2 * height - 2, 2 * width - 2, channels // 4)
    for i, j in product(range(2), repeat=2):
        out[:, :, i::2, j::2] = phases[:, :, i : height - 1 + i, j : width - 1 + j, i, j]
    out = out.repeat_interleave(repeat, 1)[:, first * (repeat - 1) :]
    if bias is not None:
        out = out + bias.float()
    if duplicate is not None:
        x, times, repeats = duplicate
        wide = torch.unflatten(x.repeat_interleave(repeats, 4), 4, (channels // 4, times, 2, 2))
        wide = wide.permute(0, 1, 5, 2, 6, 3, 7, 4).flatten(1, 2).flatten(2, 3).flatten(3, 4)
        out = out + wide[:, first * (times - 1) :].float()
    return out.to(dtype)
