"""The `sageattention` package as a selectable attention, with the precautions that its releases
need."""

from __future__ import annotations

from functools import cache
from importlib import import_module, metadata
from types import FunctionType
from typing import Final

import torch

from turbo_rcm_patch.errors import DeviceError, MaskError, MissingPackageError, ShapeError
from turbo_rcm_patch.extras import install

_HEAD_DIMS: Final = (64, 96, 128)
#: Release 1.x lets the padded keys of its last block of 64 into the softmax with logit 0. Up to
#: this share of padded keys the effect stays below the package's own quantisation error; above it
#: we refuse.
_MAX_PADDED_SHARE: Final = 1e-3
_HOPPER: Final = (9, 0)
#: The kernel's binding that sageattention calls on Hopper.
_BINDING: Final = "qk_int8_sv_f8_accum_f32_fuse_v_scale_attn_inst_buf"


@cache
def broken_sage() -> str:
    """Return why the installed sageattention gives wrong results on a GPU here, or "".

    In release 2.2.0 of the package index a fake implementation for torch.compile has the name of
    the binding for Hopper and replaces it, so the kernel never runs and the output stays
    uninitialised memory (thu-ml/SageAttention 307, 320). The repaired source has the same version,
    so the binding itself is examined, as sglang does (pull request 34107).
    """
    gpus = range(torch.cuda.device_count())
    if not any(torch.cuda.get_device_capability(gpu) == _HOPPER for gpu in gpus):
        return ""
    try:
        binding = getattr(import_module("sageattention.sm90_compile"), _BINDING, None)
    except ImportError:  # Releases without torch.compile call their kernels directly.
        return ""
    if not isinstance(binding, FunctionType) or "_qattn_sm90" in binding.__code__.co_names:
        return ""
    return (
        f"sageattention {_release()} never runs its kernel for Hopper (SageAttention issue 320): "
        "its output is noise"
    )


def refuse_unusable_sage(device: torch.device) -> None:
    """Refuse attention="sage" where it cannot run or gives wrong results.

    Args:
        device: The device of the attention.

    Raises:
        DeviceError: There is no CUDA device, or the release is broken on it.
        MissingPackageError: sageattention is not installed.
    """
    if device.type != "cuda":
        raise DeviceError(
            'attention="sage"',
            expected="a CUDA device",
            got=str(device),
            remedy='Use attention="int8"',
        )
    try:
        import_module("sageattention")
    except ImportError as error:
        raise MissingPackageError(
            'attention="sage"',
            expected="the sageattention package",
            got=f"{type(error).__name__}: {error}",
            remedy=f'{install("sage")}, or use attention="int8"',
        ) from error
    why = broken_sage()
    if why:
        raise DeviceError(
            'attention="sage"',
            expected="a sageattention whose kernels run on this GPU",
            got=why,
            remedy="Install its repaired source (pip install --no-build-isolation "
            "git+https://github.com/thu-ml/SageAttention), or use attention='int8'",
        )


@cache
def _release() -> str:
    """Return the version of the package, which is read from the disk."""
    return metadata.version("sageattention")


def sage_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    sm_scale: float,
    causal: bool,
    smooth_k: bool,
) -> torch.Tensor:
    """Compute softmax(sm_scale * q k^T) v by `sageattention.sageattn`; tensors [B, H, N, D] in
    bf16 or fp16 on a CUDA device.

    Raises:
        DeviceError: The tensors are not on a CUDA device, or the release is broken there.
        MissingPackageError: sageattention is not installed.
        ShapeError: head_dim is not 64, 96 or 128.
        MaskError: Release 1.x would let too many padded keys into the softmax.
    """
    refuse_unusable_sage(q.device)
    # No import statement: tools would take it for `engines/stand_in/sageattention`.
    sageattn = import_module("sageattention").sageattn
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
