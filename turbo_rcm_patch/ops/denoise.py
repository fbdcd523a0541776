"""One step of a few-step sampler: the skip of the whole network and the re-noising after it, in
one elementwise pass.

`ops.skip` closes a skip in fp32 and has no third term, and a sampler's state is fp64.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from turbo_rcm_patch.config import Impl
from turbo_rcm_patch.errors import DTypeError, GradientError, ShapeError
from turbo_rcm_patch.ops.checks import check_impl, check_tensor
from turbo_rcm_patch.ops.dispatch import resolve_impl
from turbo_rcm_patch.ops.modes import transformed
from turbo_rcm_patch.ops.operation import Operation


def _forward(
    x: Tensor, branch: Tensor, noise: Tensor | None, coefficients: Tensor, impl: str
) -> Tensor:
    if resolve_impl(cast("Impl", impl), x.device) == "triton":
        from turbo_rcm_patch.kernels.portable.denoise import denoise_step as launch

        return launch(x, branch, noise, coefficients)
    c_skip, c_out, c_noise = coefficients.unbind()
    y = c_skip * x.double() + c_out * branch.double()
    return (y if noise is None else y + c_noise * noise.double()).contiguous()


denoise_forward = Operation("turbo_rcm_patch::denoise_step", _forward)


@denoise_forward.register_fake
def _fake(
    x: Tensor, branch: Tensor, noise: Tensor | None, coefficients: Tensor, impl: str
) -> Tensor:
    return torch.empty(x.shape, dtype=torch.float64, device=x.device)


def _setup(ctx: Any, inputs: tuple[object, ...], output: Tensor) -> None:
    x, branch, noise, coefficients, _ = cast(
        "tuple[Tensor, Tensor, Tensor | None, Tensor, str]", inputs
    )
    ctx.save_for_backward(coefficients)
    ctx.dtypes = x.dtype, branch.dtype, None if noise is None else noise.dtype


def _autograd(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
    (coefficients,) = ctx.saved_tensors
    grads = [
        (c * d_out).to(dtype) if need else None
        for c, dtype, need in zip(
            coefficients.unbind(), ctx.dtypes, ctx.needs_input_grad, strict=False
        )
    ]
    return (*grads, None, None)


denoise_forward.register_autograd(_autograd, setup_context=_setup)


def denoise_step(
    x: Tensor,
    branch: Tensor,
    noise: Tensor | None,
    coefficients: Tensor,
    *,
    impl: Impl = "auto",
) -> Tensor:
    """Compute coefficients[0] * x + coefficients[1] * branch + coefficients[2] * noise in fp64.

    A few-step sampler closes its network's skip and adds noise up to the level of the next step.
    Both are linear, so one pass over the three tensors does both.

    Args:
        x: The noisy state, any shape, any float dtype.
        branch: The network's output, shape and device of x, any float dtype.
        noise: Fresh noise, likewise, or None if the step adds none.
        coefficients: fp64 [3] on the device of x: c_skip, c_out, c_noise.
        impl: "triton", "reference" or "auto".

    Returns:
        fp64, shape of x, contiguous.

    Raises:
        ShapeError: Shapes or devices differ, or coefficients is not [3].
        DTypeError: A tensor is not of a float dtype, or coefficients is not fp64.
        GradientError: coefficients requires a gradient.
    """
    for name, tensor in (("x", x), ("branch", branch), ("noise", noise)):
        if tensor is None:
            continue
        check_tensor(name, tensor)
        if not tensor.dtype.is_floating_point:
            raise DTypeError(name, expected="a float dtype", got=str(tensor.dtype))
        if tensor.shape != x.shape or tensor.device != x.device:
            raise ShapeError(
                name,
                expected=f"{list(x.shape)} on {x.device}, as x",
                got=f"{list(tensor.shape)} on {tensor.device}",
            )
    check_tensor("coefficients", coefficients)
    check_impl(impl)
    if coefficients.shape != (3,) or coefficients.device != x.device:
        raise ShapeError(
            "coefficients",
            expected=f"[3] on {x.device}",
            got=f"{list(coefficients.shape)} on {coefficients.device}",
        )
    if coefficients.dtype != torch.float64:
        raise DTypeError("coefficients", expected="torch.float64", got=str(coefficients.dtype))
    if coefficients.requires_grad:
        raise GradientError(
            "coefficients", expected="numbers without gradient", got="requires_grad=True"
        )
    if transformed():
        return _forward(x, branch, noise, coefficients, "reference")
    out: Tensor = denoise_forward(x, branch, noise, coefficients, impl)
    return out
