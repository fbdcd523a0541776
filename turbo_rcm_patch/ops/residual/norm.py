"""Layer norm with modulation, alone or fused with the skip before it, as a tensor or as int8
rows."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from turbo_rcm_patch.config import Impl
from turbo_rcm_patch.errors import DTypeError, ShapeError
from turbo_rcm_patch.ops.checks import (
    broadcasts,
    check_eps,
    check_float,
    check_impl,
    check_out_dtype,
    check_same_device,
    check_tensor,
    one_for_form,
)
from turbo_rcm_patch.ops.dispatch import resolve_impl
from turbo_rcm_patch.ops.formats import Int8Tensor, padded_channels
from turbo_rcm_patch.ops.int8_linear.api import quantized_rows
from turbo_rcm_patch.ops.register import Operation, refuse_gradient
from turbo_rcm_patch.ops.residual.skip import closed, either


def norm_in_plain_torch(
    x: Tensor,
    factor: Tensor | None,
    offset: Tensor | None,
    one: float,
    eps: float,
    out_dtype: torch.dtype,
) -> Tensor:
    """Compute layer_norm(x) * (one + factor) + offset in fp32, rounded once."""
    if one == 0.0 and factor is not None and offset is not None and _is_row(factor, offset, x):
        weight, bias = factor.flatten().float(), offset.flatten().float()
        y = F.layer_norm(x.float(), (x.shape[-1],), weight, bias, eps)
        return y.to(out_dtype).clone(memory_format=torch.contiguous_format)
    y = F.layer_norm(x.float(), (x.shape[-1],), eps=eps)
    if factor is not None:
        y = y * (one + factor.float())
    if offset is not None:
        y = y + offset.float()
    return y.to(out_dtype).clone(memory_format=torch.contiguous_format)


def _is_row(factor: Tensor, offset: Tensor, x: Tensor) -> bool:
    """Return True if factor and offset are one row of channels each, [1, 1, C]."""
    return factor.shape == offset.shape == (1, 1, x.shape[-1])


def _norm(
    x: Tensor,
    factor: Tensor | None,
    offset: Tensor | None,
    one: float,
    eps: float,
    impl: str,
    out_dtype: torch.dtype,
) -> Tensor:
    # The kernel does not take rows without channels.
    if resolve_impl(impl, x.device) == "triton" and x.shape[2]:
        from turbo_rcm_patch.ops.residual.norm_triton import norm_modulate as launch

        return launch(x, factor, offset, one=one, eps=eps, out_dtype=out_dtype)
    return norm_in_plain_torch(x, factor, offset, one, eps, out_dtype)


def _norm_fake(x: Tensor, *args: Any) -> Tensor:
    return torch.empty(x.shape, dtype=args[-1], device=x.device)


norm_operation = Operation("norm_modulate", _norm, _norm_fake)


def _rows(
    x: Tensor, factor: Tensor | None, offset: Tensor | None, one: float, eps: float, impl: str
) -> tuple[Tensor, Tensor]:
    if resolve_impl(impl, x.device) == "triton":
        from turbo_rcm_patch.ops.residual.norm_triton import norm_modulate_rows as launch

        rows = launch(x, factor, offset, one=one, eps=eps)
        return rows.data, rows.scale
    int8, scale = quantized_rows(norm_in_plain_torch(x, factor, offset, one, eps, torch.float32))
    return F.pad(int8, (0, padded_channels(x.shape[2]) - x.shape[2])), scale


def _rows_fake(x: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    shape = (x.shape[0], x.shape[1], padded_channels(x.shape[2]))
    return x.new_empty(shape, dtype=torch.int8), x.new_empty(x.shape[:2], dtype=torch.float32)


rows_operation = Operation("norm_modulate_rows", _rows, _rows_fake)


def _skip_norm(
    residual: Tensor,
    branch: Tensor,
    c_out: Tensor | None,
    factor: Tensor | None,
    offset: Tensor | None,
    one: float,
    eps: float,
    cast_policy: str,
    impl: str,
    out_dtype: torch.dtype,
    normed_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Compute `skip` and `norm_modulate` of its result in one pass, with the same bits.

    Args:
        residual: [B, N, C], bf16, fp16 or fp32.
        branch: [B, N, C], any of these dtypes.
        c_out: [B, 1 or N, C], or None for 1.
        factor: Factor of the norm, broadcasts to [B, N, C], or None.
        offset: Offset of the norm, broadcasts to [B, N, C], or None.
        one: Added to the factor: 1.0 for a modulation, 0.0 for weights of a norm.
        eps: Epsilon of the norm.
        cast_policy: Cast policy of the skip, "fp32" or "model".
        impl: "triton", "reference" or "auto".
        out_dtype: dtype of the sum.
        normed_dtype: dtype of the norm.

    Returns:
        The sum and its norm, [B, N, C] each.
    """
    gate = either(c_out, 1.0)
    if resolve_impl(impl, branch.device) == "triton":
        from turbo_rcm_patch.ops.residual.skip_norm_triton import skip_norm as launch

        made: Any = launch(
            residual, branch, gate, factor, offset,
            cast=cast_policy, out_dtype=out_dtype, one=one, eps=eps, normed_dtype=normed_dtype,
        )  # fmt: skip
        return made[0], made[1]
    y = closed(
        residual, branch, 1.0, gate, cast_policy=cast_policy, impl=impl, out_dtype=out_dtype
    )
    return y, norm_in_plain_torch(y, factor, offset, one, eps, normed_dtype)


def _skip_norm_fake(residual: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    sum_dtype, normed_dtype = args[-2:]
    return (
        residual.new_empty(residual.shape, dtype=sum_dtype),
        residual.new_empty(residual.shape, dtype=normed_dtype),
    )


skip_norm = Operation("skip_norm", _skip_norm, _skip_norm_fake)


def _skip_norm_rows(
    residual: Tensor,
    branch: Tensor,
    c_out: Tensor | None,
    factor: Tensor | None,
    offset: Tensor | None,
    one: float,
    eps: float,
    cast_policy: str,
    impl: str,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `skip_norm` with the norm as int8 rows: the sum, int8 and scales."""
    gate = either(c_out, 1.0)
    if resolve_impl(impl, branch.device) == "triton":
        from turbo_rcm_patch.ops.residual.skip_norm_triton import skip_norm as launch

        y, rows = launch(
            residual, branch, gate, factor, offset,
            cast=cast_policy, out_dtype=out_dtype, one=one, eps=eps, normed_dtype=torch.int8,
        )  # fmt: skip
        return y, rows[0], rows[1]
    y = closed(
        residual, branch, 1.0, gate, cast_policy=cast_policy, impl=impl, out_dtype=out_dtype
    )
    return y, *_rows(y, factor, offset, one, eps, impl)


def _skip_norm_rows_fake(residual: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    y = residual.new_empty(residual.shape, dtype=args[-1])
    return y, *_rows_fake(residual)


skip_norm_rows = Operation("skip_norm_rows", _skip_norm_rows, _skip_norm_rows_fake)


# --- public functions ----------------------------------------------------------------------------


def norm_modulate(
    x: Tensor,
    *,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    form: Literal["modulation", "affine"] = "modulation",
    eps: float = 1e-6,
    impl: Impl = "auto",
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute layer_norm(x) * (1 + scale) + shift, or layer_norm(x) * scale + shift, in fp32.

    Args:
        x: [B, N, C], bf16, fp16 or fp32.
        scale: Broadcasts to [B, N, C], any float dtype, read as fp32; None for a factor of 1.
        shift: Broadcasts to [B, N, C], any float dtype, read as fp32; None for 0.
        form: "modulation" adds 1 to scale (adaptive layer norm, arXiv 2212.09748); "affine" does
            not.
        eps: Added to the variance.
        impl: "triton", "reference" or "auto".
        out_dtype: dtype of the result; x's by default.

    Returns:
        [B, N, C], contiguous.

    Raises:
        ShapeError: x is not [B, N, C], or scale or shift does not broadcast to it.
        GradientError: A gradient is wanted.
    """
    check_out_dtype(out_dtype)
    parts = _modulation(x, scale, shift, eps, impl)
    dtype = x.dtype if out_dtype is None else out_dtype
    out: Tensor = norm_operation(x, *parts, one_for_form(form), eps, impl, dtype)
    return out


def norm_modulate_rows(
    x: Tensor,
    *,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    form: Literal["modulation", "affine"] = "modulation",
    eps: float = 1e-6,
    impl: Impl = "auto",
) -> Int8Tensor:
    """Compute `norm_modulate` as int8 with a scale per row, the input of `int8_linear`.

    This takes one pass over memory instead of three. The only rounding is the one to int8.

    Args:
        x: [B, N, C], bf16, fp16 or fp32.
        scale: Broadcasts to [B, N, C], any float dtype, read as fp32; None for a factor of 1.
        shift: Broadcasts to [B, N, C], any float dtype, read as fp32; None for 0.
        form: "modulation" or "affine", as in `norm_modulate`.
        eps: Added to the variance.
        impl: "triton", "reference" or "auto".

    Returns:
        int8 [B, N, C padded to a multiple of 16 with zeros] and scale fp32 [B, N].

    Raises:
        ShapeError: x is not [B, N, C], or scale or shift does not broadcast to it.
        GradientError: A gradient is wanted.
    """
    parts = _modulation(x, scale, shift, eps, impl)
    if not x.shape[2]:
        raise ShapeError("x", expected="at least one channel", got=str(list(x.shape)))
    return Int8Tensor(*rows_operation(x, *parts, one_for_form(form), eps, impl))


def _modulation(
    x: Tensor, scale: Tensor | None, shift: Tensor | None, eps: float, impl: Impl
) -> tuple[Tensor | None, Tensor | None]:
    """Check all arguments of a norm, and return scale and shift with three dimensions each."""
    check_impl(impl)
    check_eps(eps)
    check_float("x", x)
    if x.dim() != 3:
        raise ShapeError("x", expected="[batch, tokens, channels]", got=str(list(x.shape)))
    parts: list[Tensor | None] = []
    for name, part in (("scale", scale), ("shift", shift)):
        if part is not None:
            check_tensor(name, part)
            if part.is_complex():
                raise DTypeError(name, expected="real numbers", got=str(part.dtype))
            part = part.view((1,) * (3 - part.dim()) + tuple(part.shape))
            if not broadcasts(part.shape, x.shape):
                raise ShapeError(
                    name, expected=f"broadcasts to {list(x.shape)}", got=str(list(part.shape))
                )
        parts.append(part)
    check_same_device(x.device, scale=parts[0], shift=parts[1])
    refuse_gradient("norm_modulate", (x, *parts))
    return parts[0], parts[1]
