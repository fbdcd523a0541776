"""The options of an attention."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Final

from turbo_rcm_patch.config import CHOICES, Attention, Impl, PVDType, check_fields, is_number
from turbo_rcm_patch.errors import ConfigError

#: Largest head_dim of the kernels.
MAX_HEAD_DIM: Final = 256

#: Least epsilon: smaller ones may be 0 in fp32.
_LEAST_EPS: Final = 1e-37


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """The options of an attention.

    Attributes:
        heads: Number of heads H; head_dim is channels / heads.
        attention: "int8" and "int4" quantise q and k; "exact" is torch's
            scaled_dot_product_attention; "sage" calls the sageattention package; "auto" takes
            "int8" or "exact" by the device and the lengths (`dispatch`).
        pv: Element type of probabilities and values in the second product; "auto" asks
            `resolve_pv` with the number of keys. "fp16" serves logits up to about 1e7, the others
            up to 1e9. With larger logits the rounding of their distance to the maximum leaves the
            range of p, and rows become NaN.
        smooth_k: Subtract the mean over tokens from k before quantising, which leaves the softmax
            unchanged. Release 2.x of sageattention ignores this and always does so.
        causal: Query i sees keys 0..i, as torch's `is_causal` (aligned at the first token).
        sm_scale: Factor on the logits, over 0, head_dim ** -0.5 by default.
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
        choices = {field: CHOICES[field] for field in ("attention", "pv", "impl")}
        check_fields(self, choices, "smooth_k", "causal")
        scale = self.sm_scale
        if scale is not None and not (is_number(scale) and isfinite(scale) and scale > 0.0):
            raise ConfigError(
                "AttentionSpec.sm_scale", expected="a finite number over 0, or None",
                got=repr(scale), remedy="Give its sign to q",
            )  # fmt: skip
        if not is_number(self.eps) or not _LEAST_EPS <= self.eps < 1.0:
            raise ConfigError(
                "AttentionSpec.eps",
                expected=f"{_LEAST_EPS} to 1, because rows of zeros are normalised too",
                got=repr(self.eps),
            )

    def scale_of(self, head_dim: int) -> float:
        """Return the factor on the logits for heads of `head_dim` channels."""
        return head_dim**-0.5 if self.sm_scale is None else float(self.sm_scale)
