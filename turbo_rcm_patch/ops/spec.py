"""The options of an attention, and the choices that depend on the device."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Final, Literal, get_args

import torch

from turbo_rcm_patch.config import Attention, Impl, PVDType, is_number
from turbo_rcm_patch.errors import ConfigError, DeviceError, Fp8UnsupportedError

__all__ = [
    "FP8_MIN_KEYS",
    "INT8_MIN_KEYS",
    "MAX_HEAD_DIM",
    "QMAX",
    "AttentionSpec",
    "describe_pv",
    "key_block",
    "resolve_impl",
    "resolve_pv",
]

#: Largest head_dim the kernels are built for.
MAX_HEAD_DIM: Final = 256
#: Largest magnitude of a quantised q or k.
QMAX: Final = {"int8": 127, "int4": 7}
#: Keys from which pv="auto" takes fp8 where the device has it. fp8 has three times the error of
#: bf16 (results/h200/ops.json), which a long sequence repays with a faster second product and a
#: short one does not, because there attention is a small part of the time.
FP8_MIN_KEYS: Final = 4096
#: Keys below which a patched cross-attention is exact: over the 512 tokens of a prompt torch's own
#: attention takes 182 us on an H200 (32,760 queries, 12 heads of 128) and int8 takes 980, and
#: there is no error to speak of.
INT8_MIN_KEYS: Final = 1024


#: What fp32 does not take for 0.
_LEAST_EPS: Final = 1e-37


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """The options of an attention.

    Attributes:
        heads: Number of heads H; head_dim is channels / heads.
        attention: "int8" and "int4" quantise q and k; "exact" is torch's
            scaled_dot_product_attention; "sage" calls the sageattention package.
        pv: Element type of probabilities and values in the second product; "auto" asks
            `resolve_pv` with the number of keys.
        smooth_k: Subtract a per-channel mean over tokens from k before quantising (leaves softmax
            unchanged).
        causal: Query i sees keys 0..i, as torch's `is_causal` (aligned at the first token).
        sm_scale: Factor on the logits, of either sign, head_dim ** -0.5 by default.
        eps: Epsilon of the norms of q and k.
        impl: "triton", "reference", or "auto", which asks `resolve_impl`.
    """

    heads: int
    attention: Attention = "int8"
    pv: PVDType = "auto"
    smooth_k: bool = True
    causal: bool = False
    sm_scale: float | None = None
    eps: float = 1e-6
    impl: Impl = "auto"

    def __post_init__(self) -> None:
        if not isinstance(self.heads, int) or self.heads < 1:
            raise ConfigError(
                "AttentionSpec.heads", expected="a positive number of heads", got=repr(self.heads)
            )
        for field, choices in (
            ("attention", get_args(Attention)),
            ("pv", get_args(PVDType)),
            ("impl", get_args(Impl)),
        ):
            value = getattr(self, field)
            if value not in choices:
                raise ConfigError(
                    f"AttentionSpec.{field}", expected=f"one of {choices}", got=repr(value)
                )
        scale = self.sm_scale
        if scale is not None and not (is_number(scale) and isfinite(scale)):
            raise ConfigError(
                "AttentionSpec.sm_scale", expected="a finite number or None", got=repr(scale)
            )
        if not _LEAST_EPS <= self.eps < 1.0:
            raise ConfigError(
                "AttentionSpec.eps",
                expected=f"{_LEAST_EPS} to 1, because rows of zeros are normalised too",
                got=repr(self.eps),
            )

    def scale_of(self, head_dim: int) -> float:
        """The factor on the logits of heads of so many channels."""
        return head_dim**-0.5 if self.sm_scale is None else float(self.sm_scale)


def key_block(head_dim: int) -> int:
    """Keys that share one k scale and one step of the online softmax; part of the numeric
    contract."""
    if head_dim <= 64 or head_dim == 128:
        return 128
    return 64 if head_dim < 128 else 32


def mix_width(head_dim: int) -> int:
    """Channels that one Hadamard matrix mixes before int8; part of the numeric contract.

    A whole head of up to 64: over 32 of 64 the shipped model's network number is 1.055, over 64 it
    is 1.024. Wider heads have not been measured.
    """
    return 64 if 32 < head_dim <= 64 else 32


def resolve_impl(impl: Impl, device: torch.device) -> Literal["triton", "reference"]:
    """Choose the implementation for `device`.

    "auto" is "triton" on a GPU (CUDA or HIP) and "reference" elsewhere. Asking for "triton" on
    another device is refused here unless Triton's interpreter is on, which the launcher knows.

    Raises:
        ConfigError: `impl` has another value.
    """
    if impl == "auto":
        return "triton" if device.type == "cuda" else "reference"
    if impl not in get_args(Impl):
        raise ConfigError("impl", expected=f"one of {get_args(Impl)}", got=repr(impl))
    return impl


def resolve_pv(
    pv: PVDType, device: torch.device, n_kv: int | None = None
) -> Literal["fp8", "bf16", "fp16"]:
    """Choose the element type of probabilities and values for `device`.

    "auto" is fp8 on an NVIDIA GPU of compute capability 8.9 or newer from `FP8_MIN_KEYS` keys on,
    and else bf16. A type that is named is used at any length.

    Args:
        pv: The type, or "auto".
        device: Where the attention runs.
        n_kv: Number of keys; None means many.

    Raises:
        Fp8UnsupportedError: fp8 is named, but the GPU has no e4m3 matrix units.
    """
    if pv in ("bf16", "fp16"):
        return pv
    if device.type != "cuda":
        return "fp8" if pv == "fp8" else "bf16"
    if pv == "auto" and n_kv is not None and n_kv < FP8_MIN_KEYS:
        return "bf16"
    if torch.version.hip is not None:
        has_fp8, name = False, "a HIP device, whose e4m3 is another format"
    else:
        if not torch.cuda.is_available():
            raise DeviceError(
                "pv",
                expected="a visible CUDA device",
                got=str(device),
                remedy="Name pv explicitly",
            )
        capability = torch.cuda.get_device_capability(device)
        has_fp8, name = capability >= (8, 9), f"compute capability {capability[0]}.{capability[1]}"
    if pv == "fp8" and not has_fp8:
        raise Fp8UnsupportedError(
            'pv="fp8"',
            expected="compute capability 8.9 or newer",
            got=name,
            remedy='Use pv="auto"',
        )
    return "fp8" if has_fp8 else "bf16"


def describe_pv(pv: PVDType, device: torch.device) -> str:
    """Describe what `resolve_pv` chooses on `device` at every length."""
    resolved = resolve_pv(pv, device)
    if pv == "auto" and resolved == "fp8":
        return f"fp8 from {FP8_MIN_KEYS:,} keys, else {resolve_pv(pv, device, 0)}"
    return resolved
