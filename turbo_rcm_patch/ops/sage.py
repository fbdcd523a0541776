"""The `sageattention` package as a selectable attention, with the precautions its releases
need."""

from __future__ import annotations

from functools import cache
from importlib import metadata
from typing import Final

import torch

from turbo_rcm_patch.errors import DeviceError, MaskError, MissingPackageError, ShapeError

_HEAD_DIMS: Final = (64, 96, 128)
#: Release 1.x lets the padded keys of its last block of 64 into the softmax with logit 0. Up to
#: this share of padded keys the effect stays below the package's own quantisation error; above it
#: we refuse.
_MAX_PADDED_SHARE: Final = 1e-3


@cache
def _release() -> str:
    """The version of the package, which is read from the disk."""
    try:
        return metadata.version("sageattention")
    except metadata.PackageNotFoundError as error:
        raise MissingPackageError(
            "sageattention's version",
            expected="an installed package",
            got="one that is importable and has no metadata",
            remedy="Install it: pip install sageattention",
        ) from error


def sage_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    sm_scale: float,
    causal: bool,
    smooth_k: bool,
) -> torch.Tensor:
    """softmax(sm_scale * q k^T) v by `sageattention.sageattn`; tensors [B, H, N, D] in bf16 or
    fp16 on a CUDA device.

    Raises:
        DeviceError: The tensors are not on a CUDA device.
        MissingPackageError: sageattention is not installed.
        ShapeError: head_dim is not 64, 96 or 128.
        MaskError: Release 1.x would let too many padded keys into the softmax.
    """
    if q.device.type != "cuda":
        raise DeviceError(
            'attention="sage"',
            expected="CUDA tensors",
            got=str(q.device),
            remedy='Use attention="int8"',
        )
    try:
        from sageattention import sageattn
    except ImportError as error:
        raise MissingPackageError(
            'attention="sage"',
            expected="the sageattention package",
            got=f"{type(error).__name__}: {error}",
            remedy='pip install sageattention, or use attention="int8"',
        ) from error
    if q.shape[-1] not in _HEAD_DIMS:
        raise ShapeError(
            'head_dim with attention="sage"', expected=f"one of {_HEAD_DIMS}", got=str(q.shape[-1])
        )
    if q.dtype == torch.float32:
        q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
    if _release().startswith("1."):
        padded = -k.shape[2] % 64
        if padded > _MAX_PADDED_SHARE * k.shape[2]:
            raise MaskError(
                'attention="sage"',
                expected="keys divisible by 64 (release 1.x does not mask padded keys)",
                got=f"{k.shape[2]} keys",
                remedy='Use attention="int8" or sageattention 2.x',
            )
        k = k.clone()  # 1.x subtracts the mean from its argument in place
    out: torch.Tensor = sageattn(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        tensor_layout="HND",
        is_causal=causal,
        sm_scale=sm_scale,
        smooth_k=smooth_k,
    )
    return out
