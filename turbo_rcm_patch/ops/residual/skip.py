"""Close a skip over a branch: `c_skip * residual + c_out * branch`, in one pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from turbo_rcm_patch.config import Impl
from turbo_rcm_patch.errors import ConfigError, ShapeError
from turbo_rcm_patch.ops.attention.reference import close_skip
from turbo_rcm_patch.ops.checks import (
    check_float,
    check_impl,
    check_out_dtype,
    check_same_device,
    skip_parts,
)
from turbo_rcm_patch.ops.dispatch import resolve_impl
from turbo_rcm_patch.ops.register import Operation, refuse_gradient
from turbo_rcm_patch.skip import Cast, Coefficient


def check_cast(value: str) -> None:
    """Refuse a cast policy that does not exist."""
    if value not in ("fp32", "model"):
        raise ConfigError("cast", expected="'fp32' or 'model'", got=repr(value))


def closed(
    residual: Tensor | None,
    branch: Tensor,
    c_skip: float | Tensor,
    c_out: float | Tensor,
    *,
    cast_policy: str,
    impl: str,
    out_dtype: torch.dtype,
) -> Tensor:
    """Compute c_skip * residual + c_out * branch with a kernel or in torch, unchecked."""
    cast: Any = cast_policy
    if resolve_impl(impl, branch.device) == "triton":
        from turbo_rcm_patch.ops.residual.skip_triton import skip as launch

        return launch(residual, branch, c_skip, c_out, cast=cast, out_dtype=out_dtype)
    y = close_skip(residual, branch, c_skip, c_out, cast=cast, out_dtype=out_dtype)
    return y.contiguous()


def either(tensor: Tensor | None, value: float) -> float | Tensor:
    """Return the tensor of a coefficient, or its number if there is no tensor."""
    return value if tensor is None else tensor


def _skip(
    residual: Tensor,
    branch: Tensor,
    c_skip: Tensor | None,
    c_out: Tensor | None,
    c_skip_value: float,
    c_out_value: float,
    cast_policy: str,
    impl: str,
    out_dtype: torch.dtype,
) -> Tensor:
    return closed(
        residual, branch, either(c_skip, c_skip_value), either(c_out, c_out_value),
        cast_policy=cast_policy, impl=impl, out_dtype=out_dtype,
    )  # fmt: skip


def _skip_fake(residual: Tensor, *args: Any) -> Tensor:
    return torch.empty(residual.shape, dtype=args[-1], device=residual.device)


skip_operation = Operation("skip", _skip, _skip_fake)


def skip(
    residual: Tensor,
    branch: Tensor,
    c_skip: Coefficient = 1.0,
    c_out: Coefficient = 1.0,
    *,
    cast: Cast = "fp32",
    impl: Impl = "auto",
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute c_skip * residual + c_out * branch in one elementwise pass.

    Args:
        residual: [B, N, C], bf16, fp16 or fp32.
        branch: [B, N, C], any of these dtypes.
        c_skip: Float or tensor [B], [B, 1, C] or [B, N, C].
        c_out: Float or tensor, as c_skip.
        cast: "fp32" computes in fp32 and rounds once; "model" rounds every step to the residual's
            dtype, as eager code in the model's dtype does (tensor coefficients are rounded to it
            first).
        impl: "triton", "reference" or "auto".
        out_dtype: dtype of the result; the residual's by default.

    Returns:
        [B, N, C], contiguous.

    Raises:
        OpError: The arguments do not fit together, or a gradient is wanted.
    """
    check_cast(cast)
    check_impl(impl)
    check_out_dtype(out_dtype)
    check_float("residual", residual)
    check_float("branch", branch)
    if residual.dim() != 3 or residual.shape != branch.shape:
        raise ShapeError(
            "residual and branch",
            expected="both [batch, tokens, channels]",
            got=f"{list(residual.shape)} and {list(branch.shape)}",
        )
    shape = (residual.shape[0], residual.shape[1], residual.shape[2])
    factors = skip_parts(residual, c_skip, c_out, shape)
    check_same_device(residual.device, branch=branch, c_skip=factors[0], c_out=factors[1])
    refuse_gradient("skip", (residual, branch, *factors[:2]))
    dtype = residual.dtype if out_dtype is None else out_dtype
    out: Tensor = skip_operation(residual, branch, *factors, cast, impl, dtype)
    return out
