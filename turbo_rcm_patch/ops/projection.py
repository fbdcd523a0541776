"""Close a skip after a projection, or over any branch.

`project_skip` is a projection whose epilogue closes the skip. `attention_project_skip` puts an
attention before it, in one launch or in two. `skip` closes a skip over a branch that was computed
before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, cast

import torch
from torch import Tensor

from turbo_rcm_patch.config import Impl
from turbo_rcm_patch.errors import ConfigError, ShapeError
from turbo_rcm_patch.ops import batches
from turbo_rcm_patch.ops.checks import (
    check_float,
    check_impl,
    check_out_dtype,
    check_same_device,
    check_weight,
    skip_parts,
)
from turbo_rcm_patch.ops.dispatch import resolve_impl
from turbo_rcm_patch.ops.gradients import sum_to
from turbo_rcm_patch.ops.modes import as_documented, transformed
from turbo_rcm_patch.ops.operation import Operation, flattened
from turbo_rcm_patch.ops.reference import close_skip, project
from turbo_rcm_patch.skip import Cast, Coefficient

#: What a schema has of words.
_WORDS: Final = {"cast_policy": str, "impl": str}


def check_cast(value: str) -> None:
    if value not in ("fp32", "model"):
        raise ConfigError("cast", expected="'fp32' or 'model'", got=repr(value))


# --- skip ----------------------------------------------------------------------------------------


class SkipInputs(NamedTuple):
    """The arguments of the registered skip, in its order."""

    residual: Tensor
    branch: Tensor
    c_skip: Tensor | None
    c_out: Tensor | None
    c_skip_value: float
    c_out_value: float
    cast_policy: Cast
    impl: Impl
    out_dtype: torch.dtype


def closed(
    residual: Tensor | None,
    branch: Tensor,
    c_skip: float | Tensor,
    c_out: float | Tensor,
    *,
    cast: Cast,
    impl: Impl,
    out_dtype: torch.dtype,
) -> Tensor:
    """c_skip * residual + c_out * branch, by a kernel or by torch."""
    if resolve_impl(impl, branch.device) == "triton":
        from turbo_rcm_patch.kernels.portable.skip import skip as launch

        return launch(residual, branch, c_skip, c_out, cast=cast, out_dtype=out_dtype)
    y = close_skip(residual, branch, c_skip, c_out, cast=cast, out_dtype=out_dtype)
    return y.contiguous()


def either(tensor: Tensor | None, value: float) -> float | Tensor:
    """A coefficient: its tensor, or its number where there is none."""
    return value if tensor is None else tensor


@as_documented
@flattened(SkipInputs._fields, Tensor, SkipInputs, _WORDS)
def _skip_forward(*args: Any) -> Tensor:
    a = SkipInputs(*args)
    return closed(
        a.residual, a.branch, either(a.c_skip, a.c_skip_value), either(a.c_out, a.c_out_value),
        cast=a.cast_policy, impl=a.impl, out_dtype=a.out_dtype,
    )  # fmt: skip


skip_forward = Operation("turbo_rcm_patch::skip", _skip_forward)


@skip_forward.register_fake
def _skip_fake(*args: Any) -> Tensor:
    a = SkipInputs(*args)
    return torch.empty(a.residual.shape, dtype=a.out_dtype, device=a.residual.device)


def _skip_setup(ctx: Any, inputs: tuple[object, ...], output: Tensor) -> None:
    residual, branch, c_skip, c_out = cast(
        "tuple[Tensor, Tensor, Tensor | None, Tensor | None]", inputs[:4]
    )
    # A tensor is kept only for the gradient that needs it.
    ctx.save_for_backward(
        residual if c_skip is not None and c_skip.requires_grad else None,
        branch if c_out is not None and c_out.requires_grad else None,
        c_skip,
        c_out,
    )
    ctx.values = inputs[4:6]
    ctx.dtypes = residual.dtype, branch.dtype


def _skip_autograd(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
    residual, branch, c_skip, c_out = ctx.saved_tensors
    c_skip_value, c_out_value = ctx.values
    dtypes = ctx.dtypes
    needs = ctx.needs_input_grad
    g = d_out.float()
    grads: list[Tensor | None] = [None] * 9
    if needs[0]:
        grads[0] = (g * (c_skip_value if c_skip is None else c_skip.float())).to(dtypes[0])
    if needs[1]:
        grads[1] = (g * (c_out_value if c_out is None else c_out.float())).to(dtypes[1])
    if needs[2]:
        grads[2] = sum_to(g * residual.float(), c_skip)
    if needs[3]:
        grads[3] = sum_to(g * branch.float(), c_out)
    return tuple(grads)


skip_forward.register_autograd(_skip_autograd, setup_context=_skip_setup)


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
        c_out: Likewise.
        cast: "fp32" computes in fp32 and rounds once; "model" rounds every step to the residual's
            dtype, as eager code in the model's dtype does (tensor coefficients are rounded to it
            first).
        impl: "triton", "reference" or "auto".
        out_dtype: dtype of the result; the residual's by default.

    Returns:
        [B, N, C], contiguous.
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
    if shape[0] > batches.MAX_BATCH:
        each = (residual, branch, c_skip, c_out)
        return batches.in_parts(
            shape[0],
            lambda part: skip(
                *batches.of_batch(each, part, shape[0]), cast=cast, impl=impl, out_dtype=out_dtype
            ),
        )
    factors = skip_parts(residual, c_skip, c_out, shape)
    check_same_device(residual.device, branch=branch, c_skip=factors[0], c_out=factors[1])
    plain = transformed()
    out: Tensor = (_skip_forward if plain else skip_forward)(
        residual, branch, *factors, cast, "reference" if plain else impl,
        residual.dtype if out_dtype is None else out_dtype,
    )  # fmt: skip
    return out


# --- projection + skip ---------------------------------------------------------------------------


class ProjectInputs(NamedTuple):
    """The arguments of the registered projection with its skip, in its order."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    residual: Tensor | None
    c_skip: Tensor | None
    c_out: Tensor | None
    c_skip_value: float
    c_out_value: float
    cast_policy: Cast
    impl: Impl
    out_dtype: torch.dtype


@as_documented
@flattened(ProjectInputs._fields, Tensor, ProjectInputs, _WORDS)
def _project_forward(*args: Any) -> Tensor:
    a = ProjectInputs(*args)
    factors = either(a.c_skip, a.c_skip_value), either(a.c_out, a.c_out_value)
    if resolve_impl(a.impl, a.x.device) == "triton":
        from turbo_rcm_patch.kernels.portable.project import project_skip as launch

        return launch(*a[:3], a.residual, *factors, cast=a.cast_policy, out_dtype=a.out_dtype)
    branch = project(*a[:3])
    y = close_skip(a.residual, branch, *factors, cast=a.cast_policy, out_dtype=a.out_dtype)
    return y.contiguous()


project_forward = Operation("turbo_rcm_patch::project_skip", _project_forward)


@project_forward.register_fake
def _project_fake(*args: Any) -> Tensor:
    a = ProjectInputs(*args)
    return a.x.new_empty((a.x.shape[0], a.x.shape[1], a.weight.shape[0]), dtype=a.out_dtype)


def closes_apart(x: Tensor, impl: Impl) -> bool:
    """Whether `project_skip` of x is a product of the library and a pass that closes the skip."""
    if resolve_impl(impl, x.device) != "triton":
        return False
    from turbo_rcm_patch.kernels.portable.project import by_library

    return by_library(x)


def project_gradients(
    d_out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    c_skip: Tensor | None,
    c_out: Tensor | None,
    c_skip_value: float,
    c_out_value: float,
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """Gradients of x, weight, bias, residual, c_skip, c_out in that order; products in the dtype
    of x."""
    g = d_out.float()
    grads: list[Tensor | None] = [None] * 6
    if residual is not None and needs[3]:
        grads[3] = (g * (c_skip_value if c_skip is None else c_skip.float())).to(residual.dtype)
    if residual is not None and c_skip is not None and needs[4]:
        grads[4] = sum_to(g * residual.float(), c_skip)
    if c_out is not None and needs[5]:
        grads[5] = sum_to(g * project(x, weight, bias), c_out)
    if not any(needs[:3]):
        return grads
    d_branch = g * (c_out_value if c_out is None else c_out.float())
    low = d_branch.to(x.dtype)
    if needs[0]:
        grads[0] = low @ weight
    if needs[1]:
        grads[1] = low.flatten(0, 1).T @ x.flatten(0, 1)
    if bias is not None and needs[2]:
        grads[2] = d_branch.sum((0, 1)).to(bias.dtype)
    return grads


def _project_setup(ctx: Any, inputs: tuple[object, ...], output: Tensor) -> None:
    ctx.save_for_backward(*cast("tuple[Tensor | None, ...]", inputs[:6]))
    ctx.values = inputs[6:8]


def _project_autograd(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
    c_skip_value, c_out_value = ctx.values
    needs = ctx.needs_input_grad
    x, weight, bias, residual, c_skip, c_out = ctx.saved_tensors
    values = c_skip_value, c_out_value
    grads = project_gradients(d_out, x, weight, bias, residual, c_skip, c_out, *values, needs[:6])
    return (*grads, None, None, None, None, None)


project_forward.register_autograd(_project_autograd, setup_context=_project_setup)


def project_skip(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None,
    c_skip: Coefficient = 1.0,
    c_out: Coefficient = 1.0,
    cast: Cast = "fp32",
    impl: Impl = "auto",
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute c_skip * residual + c_out * (x @ weight^T + bias).

    Args:
        x: [B, N, Cin], bf16, fp16 or fp32.
        weight: [Cout, Cin], dtype of x.
        bias: [Cout] or None.
        residual: [B, N, Cout] or None.
        c_skip: Float or tensor [B], [B, 1, Cout] or [B, N, Cout].
        c_out: Likewise.
        cast: "fp32": product, bias and skip are computed in fp32 and rounded once at the end.
            (cuBLAS computes a 16-bit product on a GPU; then the product is rounded to x's dtype
            first.) "model": the projection and then every step of the skip is rounded to
            the residual's dtype.
        impl: "triton", "reference" or "auto".
        out_dtype: dtype of the result; x's by default.

    Returns:
        [B, N, Cout], contiguous.
    """
    check_cast(cast)
    check_impl(impl)
    check_out_dtype(out_dtype)
    check_weight(x, weight, bias)
    shape = (x.shape[0], x.shape[1], weight.shape[0])
    if shape[0] > batches.MAX_BATCH:
        each = (x, residual, c_skip, c_out)

        def run(part: slice) -> Tensor:
            x, residual, c_skip, c_out = batches.of_batch(each, part, shape[0])
            return project_skip(
                x, weight, bias, residual=residual, c_skip=c_skip, c_out=c_out, cast=cast,
                impl=impl, out_dtype=out_dtype,
            )  # fmt: skip

        return batches.in_parts(shape[0], run)
    factors = skip_parts(residual, c_skip, c_out, shape)
    check_same_device(x.device, residual=residual, c_skip=factors[0], c_out=factors[1])
    plain = transformed()
    out: Tensor = (_project_forward if plain else project_forward)(
        x, weight, bias, residual, *factors, cast, "reference" if plain else impl,
        x.dtype if out_dtype is None else out_dtype,
    )  # fmt: skip
    return out
