"""Operations around the branches of a block, each in one pass: layer norm with modulation, as a
tensor or as int8 rows, and a linear with GELU in its epilogue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from turbo_rcm_patch.config import Impl
from turbo_rcm_patch.errors import DTypeError, ShapeError
from turbo_rcm_patch.kernels.operands import Rows, padded_channels
from turbo_rcm_patch.ops import batches
from turbo_rcm_patch.ops.checks import (
    broadcasts,
    check_eps,
    check_float,
    check_impl,
    check_out_dtype,
    check_same_device,
    check_tensor,
    check_weight,
    one_for_form,
)
from turbo_rcm_patch.ops.dispatch import resolve_impl
from turbo_rcm_patch.ops.modes import (
    as_documented,
    refuse_derivative,
    transformed,
    without_autocast,
)
from turbo_rcm_patch.ops.operation import Operation
from turbo_rcm_patch.ops.projection import closed, either
from turbo_rcm_patch.ops.quantize import quantized_rows
from turbo_rcm_patch.skip import Cast

# --- layer norm and modulation -------------------------------------------------------------------


@as_documented
def _norm_forward(
    x: Tensor,
    factor: Tensor | None,
    offset: Tensor | None,
    one: float,
    eps: float,
    impl: str,
    out_dtype: torch.dtype,
) -> Tensor:
    # No kernel has to know of rows without channels.
    if resolve_impl(cast("Impl", impl), x.device) == "triton" and x.shape[2]:
        from turbo_rcm_patch.kernels.portable.norm import norm_modulate as launch

        return launch(x, factor, offset, one=one, eps=eps, out_dtype=out_dtype)
    return norm_in_plain_torch(x, factor, offset, one, eps, out_dtype)


def norm_in_plain_torch(
    x: Tensor,
    factor: Tensor | None,
    offset: Tensor | None,
    one: float,
    eps: float,
    out_dtype: torch.dtype,
) -> Tensor:
    """layer_norm(x) * (one + factor) + offset in fp32, rounded once; see `norm_modulate`."""
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
    """Whether both are one row of channels, as the weights of a layer norm are."""
    return factor.shape == offset.shape == (1, 1, x.shape[-1])


norm_forward = Operation("turbo_rcm_patch::norm_modulate", _norm_forward)


@norm_forward.register_fake
def _norm_fake(x: Tensor, *args: Any) -> Tensor:
    return torch.empty(x.shape, dtype=args[-1], device=x.device)


def _norm_setup(ctx: Any, inputs: tuple[object, ...], output: Tensor) -> None:
    x, factor, offset, one, eps, *_ = inputs
    ctx.save_for_backward(x, factor)
    ctx.numbers = one, eps
    ctx.offset = None if offset is None else (offset.shape, offset.dtype)  # type: ignore[attr-defined]


def norm_gradients(
    d_out: Tensor,
    x: Tensor,
    factor: Tensor | None,
    offset: tuple[torch.Size, torch.dtype] | None,
    one: float,
    eps: float,
    needs: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of x, factor and offset; of the offset only shape and dtype matter."""
    g, wide = d_out.float(), x.float()
    centred = wide - wide.mean(-1, keepdim=True)
    rms = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    normal = centred * rms
    d_x = d_factor = d_offset = None
    if needs[0]:
        d = g if factor is None else g * (one + factor.float())
        inner = (d * normal).mean(-1, keepdim=True)
        d_x = (rms * (d - d.mean(-1, keepdim=True) - normal * inner)).to(x.dtype)
    if factor is not None and needs[1]:
        d_factor = (g * normal).sum_to_size(factor.shape).to(factor.dtype)
    if offset is not None and needs[2]:
        shape, dtype = offset
        d_offset = g.sum_to_size(shape).to(dtype)
    return d_x, d_factor, d_offset


def _norm_autograd(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
    x, factor = ctx.saved_tensors
    one, eps = ctx.numbers
    grads = norm_gradients(d_out, x, factor, ctx.offset, one, eps, ctx.needs_input_grad)
    return (*grads, None, None, None, None)


norm_forward.register_autograd(_norm_autograd, setup_context=_norm_setup)


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
        shift: Likewise; None for 0.
        form: "modulation" adds 1 to scale (adaptive layer norm, arXiv 2212.09748); "affine" does
            not.
        eps: Added to the variance.
        impl: "triton", "reference" or "auto".
        out_dtype: dtype of the result; x's by default.

    Returns:
        [B, N, C], contiguous.

    Raises:
        ShapeError: x is not [B, N, C], or scale or shift does not broadcast to it.
    """
    check_impl(impl)
    check_eps(eps)
    check_out_dtype(out_dtype)
    parts = _modulation(x, scale, shift)
    one = one_for_form(form)
    if x.shape[0] > batches.MAX_BATCH:

        def run(part: slice) -> Tensor:
            scale, shift = batches.of_batch(parts, part, x.shape[0])
            return norm_modulate(
                x[part], scale=scale, shift=shift, form=form, eps=eps, impl=impl,
                out_dtype=out_dtype,
            )  # fmt: skip

        return batches.in_parts(x.shape[0], run)
    dtype = x.dtype if out_dtype is None else out_dtype
    if transformed():
        return norm_in_plain_torch(x, *parts, one, eps, dtype)
    out: Tensor = norm_forward(x, *parts, one, eps, impl, dtype)
    return out


def _modulation(
    x: Tensor, scale: Tensor | None, shift: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """scale and shift with three dimensions, checked."""
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
    return parts[0], parts[1]


def skip_norm(
    residual: Tensor,
    branch: Tensor,
    c_out: Tensor | None,
    factor: Tensor | None,
    offset: Tensor | None,
    one: float,
    eps: float,
    cast_policy: Cast,
    impl: Impl,
    out_dtype: torch.dtype,
    normed_dtype: torch.dtype,
) -> tuple[Tensor, Any]:
    """What `skip` and then `norm_modulate` of its result give, or `norm_modulate_rows`, bit for
    bit, in one pass; for plans (`Step`), as nothing is checked here.

    Args:
        residual: [B, N, C], bf16, fp16 or fp32.
        branch: [B, N, C], any of these dtypes.
        c_out: [B, 1 or N, C], or None for 1.
        factor: Of the norm, broadcasts to [B, N, C], or None.
        offset: Likewise.
        one: 1.0 for a modulation, 0.0 for weights of a norm.
        eps: Of the norm.
        cast_policy: As in `skip`.
        impl: "triton", "reference" or "auto".
        out_dtype: Of the sum.
        normed_dtype: Of its norm; torch.int8 for int8 rows and their scales.

    Returns:
        The sum [B, N, C], and its norm: the same, or `Rows`.
    """
    gate = either(c_out, 1.0)
    if resolve_impl(impl, branch.device) == "triton":
        from turbo_rcm_patch.kernels.portable.skip_norm import skip_norm as launch

        return launch(
            residual, branch, gate, factor, offset,
            cast=cast_policy, out_dtype=out_dtype, one=one, eps=eps, normed_dtype=normed_dtype,
        )  # fmt: skip
    y = closed(residual, branch, 1.0, gate, cast=cast_policy, impl=impl, out_dtype=out_dtype)
    if normed_dtype == torch.int8:
        return y, rows_forward.body(y, factor, offset, one, eps, impl)
    return y, norm_in_plain_torch(y, factor, offset, one, eps, normed_dtype)


# --- the same as int8 rows -----------------------------------------------------------------------


@as_documented
def _rows_forward(
    x: Tensor, factor: Tensor | None, offset: Tensor | None, one: float, eps: float, impl: str
) -> tuple[Tensor, Tensor]:
    if resolve_impl(cast("Impl", impl), x.device) == "triton":
        from turbo_rcm_patch.kernels.portable.norm import norm_modulate_rows as launch

        rows = launch(x, factor, offset, one=one, eps=eps)
        return rows.int8, rows.scale
    normed = _norm_forward(x, factor, offset, one, eps, impl, torch.float32)
    int8, scale = quantized_rows(normed)
    return F.pad(int8, (0, padded_channels(x.shape[2]) - x.shape[2])), scale


rows_forward = Operation("turbo_rcm_patch::norm_modulate_rows", _rows_forward)


@rows_forward.register_fake
def _rows_fake(
    x: Tensor, factor: Tensor | None, offset: Tensor | None, one: float, eps: float, impl: str
) -> tuple[Tensor, Tensor]:
    shape = (x.shape[0], x.shape[1], padded_channels(x.shape[2]))
    return (
        x.new_empty(shape, dtype=torch.int8),
        x.new_empty(x.shape[:2], dtype=torch.float32),
    )


def norm_modulate_rows(
    x: Tensor,
    *,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    form: Literal["modulation", "affine"] = "modulation",
    eps: float = 1e-6,
    impl: Impl = "auto",
) -> Rows:
    """Compute `norm_modulate` as int8 with a scale per row, the input of `int8_linear`.

    This is one pass over memory instead of three. Nothing is rounded before int8.

    Args:
        x: [B, N, C], bf16, fp16 or fp32.
        scale: As in `norm_modulate`.
        shift: Likewise.
        form: Likewise.
        eps: Likewise.
        impl: "triton", "reference" or "auto".

    Returns:
        int8 [B, N, C padded to a multiple of 16 with zeros] and scale fp32 [B, N].

    Raises:
        ShapeError: x is not [B, N, C], or scale or shift does not broadcast to it.
        GradientError: An argument requires a gradient; integers have none.
    """
    check_impl(impl)
    check_eps(eps)
    parts = _modulation(x, scale, shift)
    if not x.shape[2]:
        raise ShapeError("x", expected="at least one channel", got=str(list(x.shape)))
    refuse_derivative(
        "norm_modulate_rows",
        x,
        *parts,
        expected="inputs without a derivative, because int8 rows have none",
        remedy="Use norm_modulate, and int8_linear of its result",
    )
    one = one_for_form(form)
    if x.shape[0] > batches.MAX_BATCH:

        def run(part: slice) -> tuple[Tensor, ...]:
            scale, shift = batches.of_batch(parts, part, x.shape[0])
            return norm_modulate_rows(
                x[part], scale=scale, shift=shift, form=form, eps=eps, impl=impl
            )

        return Rows(*batches.in_parts(x.shape[0], run))
    int8, scales = rows_forward(x, *parts, one, eps, impl)
    return Rows(int8, scales)


# --- linear and GELU -----------------------------------------------------------------------------


@as_documented
def _gelu_forward(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    if x.is_cuda and x.dtype != torch.float32 and torch.version.hip is None:
        # cuBLASLt's epilogue: GELU in its tanh form, on the sum in fp32.
        flat = torch._addmm_activation(bias, x.flatten(0, 1), weight.t(), use_gelu=True)
        return flat.view(x.shape[0], x.shape[1], weight.shape[0])
    return F.gelu(F.linear(x, weight, bias), approximate="tanh")


gelu_forward = Operation("turbo_rcm_patch::linear_gelu", _gelu_forward)


@gelu_forward.register_fake
def _gelu_fake(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1], weight.shape[0])


def _gelu_setup(ctx: Any, inputs: tuple[object, ...], output: Tensor) -> None:
    ctx.save_for_backward(*cast("tuple[Tensor, ...]", inputs))


def _gelu_autograd(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, bias = ctx.saved_tensors
    needs = ctx.needs_input_grad
    inner = F.linear(x, weight, bias)
    d = torch.ops.aten.gelu_backward(d_out, inner, approximate="tanh")
    d_x = d @ weight if needs[0] else None
    d_weight = d.flatten(0, 1).T @ x.flatten(0, 1) if needs[1] else None
    d_bias = d.sum((0, 1)).to(bias.dtype) if needs[2] else None
    return d_x, d_weight, d_bias


gelu_forward.register_autograd(_gelu_autograd, setup_context=_gelu_setup)


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Compute gelu(x @ weight^T + bias), in GELU's tanh form.

    In 16 bits on an NVIDIA GPU the activation is the epilogue of the matrix product, so it takes
    the sum before that is rounded.

    Args:
        x: [B, N, Cin], bf16, fp16 or fp32.
        weight: [Cout, Cin], dtype of x.
        bias: [Cout], any of these dtypes; rounded to that of x.

    Returns:
        [B, N, Cout], dtype of x.
    """
    if bias is None:
        raise DTypeError("bias", expected="a torch.Tensor", got="None", remedy="Pass zeros")
    check_weight(x, weight, bias)
    bias = bias.to(x.dtype)
    if transformed():
        with without_autocast(x.device):
            return F.gelu(F.linear(x, weight, bias), approximate="tanh")
    out: Tensor = gelu_forward(x, weight, bias)
    return out
