"""The residual operator: skips, and the layer norm before the next branch.

    y = c_skip * x + c_out * F(x)        h = (layer_norm(y) * weight + bias) * (1 + scale) + shift

`skip_norm` is what a patched block calls: it closes a skip, computes the norm of the result, or
both, in one pass over memory. `skip` takes any coefficients. `norm_modulate` and
`norm_modulate_rows` are the norm alone, with checks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from turbo_rcm_patch.config import Impl
from turbo_rcm_patch.errors import ShapeError
from turbo_rcm_patch.ops.checks import (
    broadcasts,
    check_float,
    check_out_dtype,
    check_same_device,
    check_tensor,
    check_tokens,
    checked_coefficients,
)
from turbo_rcm_patch.ops.dispatch import resolve_impl
from turbo_rcm_patch.ops.formats import Int8Tensor, Streams, int8_rows, padded_channels
from turbo_rcm_patch.ops.register import needs_registered, refuse_gradient, register
from turbo_rcm_patch.ops.residual import reference
from turbo_rcm_patch.skip import Coefficient


class Norm(NamedTuple):
    """A layer norm and its modulation, (layer_norm(x) * weight + bias) * (1 + scale) + shift.

    Attributes:
        scale: Broadcasts to x [B, N, C], for two streams a pair; None for no modulation.
        shift: As scale.
        weight: [C], or what broadcasts to x where there is no modulation; None for 1.
        bias: As weight; None for 0.
        eps: Added to the variance.
    """

    scale: Streams | None = None
    shift: Streams | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    eps: float = 1e-6


# --- for patched blocks, which have checked their inputs -----------------------------------------


def skip_norm(
    x: Streams,
    branch: Tensor | None = None,
    *,
    gate: Streams | None = None,
    norm: Norm | None = None,
    dtype: torch.dtype = torch.float32,
    norm_dtype: torch.dtype | None = None,
    impl: str = "auto",
) -> tuple[Any, Any]:
    """Compute y = x + gate * branch in fp32, the layer norm of y, or both, in one pass.

    The norm reads y as it is stored, so the bits are those of two calls. Two streams, such as text
    and video, are one sequence in the branch and in the norm. The arguments are not checked.

    Args:
        x: [B, N, C], bf16, fp16 or fp32; or two streams [B, Ni, C] of one dtype.
        branch: [B, N, C], for two streams the tokens of the second after those of the first; None
            for y = x.
        gate: Broadcasts to x, for two streams a pair; None for 1.
        norm: The norm of y, or None.
        dtype: dtype of y.
        norm_dtype: dtype of the norm; torch.int8 for `Int8Tensor`, the input of `int8_linear`.
        impl: "triton", "reference" or "auto".

    Returns:
        y, a pair for two streams, None without a branch; and the norm [B, N, C], or None.
    """
    registered = needs_registered(x[0] if isinstance(x, tuple) else x)
    if norm is None and not isinstance(x, tuple):
        assert branch is not None and not isinstance(gate, tuple)
        close = _registered_skip if registered else close_skip
        return close(x, branch, 1.0, 1.0 if gate is None else gate, impl, dtype), None
    compute = _registered_skip_norm if registered else _skip_norm
    results = compute(x, branch, gate, norm, dtype, norm_dtype, impl)
    y: Any = None
    if branch is not None:
        streams = 2 if isinstance(x, tuple) else 1
        y = results[:2] if isinstance(x, tuple) else results[0]
        results = results[streams:]
    if norm is None or norm_dtype is None:
        return y, None
    return y, int8_rows(*results) if norm_dtype == torch.int8 else results[0]


def close_skip(
    residual: Tensor | None,
    branch: Tensor,
    c_skip: float | Tensor,
    c_out: float | Tensor,
    impl: str,
    out_dtype: torch.dtype,
) -> Tensor:
    """Compute c_skip * residual + c_out * branch, inside the body of any operation.

    Args:
        residual: [B, N, C], or None for c_out * branch alone.
        branch: [B, N, C].
        c_skip: Float or tensor that broadcasts to [B, N, C].
        c_out: Float or tensor that broadcasts to [B, N, C].
        impl: "triton", "reference" or "auto".
        out_dtype: dtype of the result.
    """
    if resolve_impl(impl, branch.device) == "triton":
        from turbo_rcm_patch.ops.residual.triton import skip as launch

        return launch(residual, branch, c_skip, c_out, out_dtype=out_dtype)
    y = reference.close_skip(residual, branch, c_skip, c_out, out_dtype=out_dtype)
    return y.contiguous()


def _skip_norm(
    x: Streams,
    branch: Tensor | None,
    gate: Streams | None,
    norm: Norm | None,
    dtype: torch.dtype,
    norm_dtype: torch.dtype | None,
    impl: str,
) -> tuple[Tensor, ...]:
    """Compute `skip_norm`: y of each stream if there is a branch, then the norm if there is one,
    as int8 with its scales or as one tensor."""
    factor, offset, weight, bias, eps = norm or Norm()
    one = 1.0
    if factor is None and offset is None:  # a norm with weights and without modulation
        factor, offset, weight, bias, one = weight, bias, None, None, 0.0
    launch = reference.skip_norm
    first = x[0] if isinstance(x, tuple) else x
    if resolve_impl(impl, first.device) == "triton":
        from turbo_rcm_patch.ops.residual import triton

        launch = triton.skip_norm
    return launch(
        x, branch, gate=gate, factor=factor, offset=offset, weight=weight, bias=bias, one=one,
        eps=eps, dtype=dtype, norm_dtype=None if norm is None else norm_dtype,
    )  # fmt: skip


def _empty_skip_norm(
    x: Streams,
    branch: Tensor | None,
    gate: Streams | None,
    norm: Norm | None,
    dtype: torch.dtype,
    norm_dtype: torch.dtype | None,
    impl: str,
) -> tuple[Tensor, ...]:
    streams = x if isinstance(x, tuple) else (x,)
    first = streams[0]
    ys = () if branch is None else tuple(first.new_empty(y.shape, dtype=dtype) for y in streams)
    if norm is None or norm_dtype is None:
        return ys
    batch, tokens, channels = first.shape[0], sum([y.shape[1] for y in streams]), first.shape[2]
    if norm_dtype != torch.int8:
        return *ys, first.new_empty((batch, tokens, channels), dtype=norm_dtype)
    int8 = first.new_empty((batch, tokens, padded_channels(channels)), dtype=torch.int8)
    return *ys, int8, first.new_empty((batch, tokens), dtype=torch.float32)


_registered_skip_norm = register("skip_norm", _skip_norm, _empty_skip_norm, Norm)


_registered_skip = register(
    "skip", close_skip, lambda _, branch, *rest: branch.new_empty(branch.shape, dtype=rest[-1])
)


# --- public functions ----------------------------------------------------------------------------


def skip(
    residual: Tensor,
    branch: Tensor,
    c_skip: Coefficient = 1.0,
    c_out: Coefficient = 1.0,
    *,
    impl: Impl = "auto",
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute c_skip * residual + c_out * branch in one elementwise pass, in fp32, rounded once.

    Args:
        residual: [B, N, C], bf16, fp16 or fp32.
        branch: [B, N, C], any of these dtypes.
        c_skip: Float or tensor [B], [B, 1, C] or [B, N, C].
        c_out: Float or tensor, as c_skip.
        impl: "triton", "reference" or "auto".
        out_dtype: dtype of the result; the residual's by default.

    Returns:
        [B, N, C], contiguous.

    Raises:
        OpError: The arguments do not fit together, or a gradient is wanted.
    """
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
    c_skip, c_out = checked_coefficients(residual, c_skip, c_out, shape)
    tensors = [branch, *(c for c in (c_skip, c_out) if isinstance(c, Tensor))]
    check_same_device(residual.device, branch=branch, c_skip=c_skip, c_out=c_out)
    refuse_gradient("skip", (residual, *tensors))
    close = _registered_skip if needs_registered(residual, *tensors) else close_skip
    return close(residual, branch, c_skip, c_out, impl, out_dtype or residual.dtype)


def norm_modulate(
    x: Tensor,
    *,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    eps: float = 1e-6,
    impl: Impl = "auto",
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute layer_norm(x) * (1 + scale) + shift in fp32 (adaptive layer norm, arXiv 2212.09748).

    Args:
        x: [B, N, C], bf16, fp16 or fp32.
        scale: Broadcasts to [B, N, C], any float dtype, read as fp32; None for a factor of 1.
        shift: Broadcasts to [B, N, C], any float dtype, read as fp32; None for 0.
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
    return _modulated(x, scale, shift, eps, out_dtype, impl)[0]


def norm_modulate_rows(
    x: Tensor,
    *,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    eps: float = 1e-6,
    impl: Impl = "auto",
) -> Int8Tensor:
    """Compute `norm_modulate` as int8 with a scale per row, the input of `int8_linear`.

    This takes one pass over memory instead of three. The only rounding is the one to int8.

    Args:
        x: [B, N, C], bf16, fp16 or fp32.
        scale: Broadcasts to [B, N, C], any float dtype, read as fp32; None for a factor of 1.
        shift: Broadcasts to [B, N, C], any float dtype, read as fp32; None for 0.
        eps: Added to the variance.
        impl: "triton", "reference" or "auto".

    Returns:
        int8 [B, N, C padded to a multiple of 16 with zeros] and scale fp32 [B, N].

    Raises:
        ShapeError: x is not [B, N, C], or scale or shift does not broadcast to it.
        GradientError: A gradient is wanted.
    """
    return int8_rows(*_modulated(x, scale, shift, eps, torch.int8, impl))


def _modulated(
    x: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    eps: float,
    norm_dtype: torch.dtype | None,
    impl: str,
) -> tuple[Tensor, ...]:
    """Check all arguments of a norm, and compute it as `_skip_norm` does."""
    check_tokens("x", x)
    parts: list[Tensor | None] = []
    for name, part in (("scale", scale), ("shift", shift)):
        if part is not None:
            check_tensor(name, part)
            part = part.view((1,) * (3 - part.dim()) + tuple(part.shape))
            if not broadcasts(part.shape, x.shape):
                raise ShapeError(
                    name, expected=f"broadcasts to {list(x.shape)}", got=str(list(part.shape))
                )
        parts.append(part)
    check_same_device(x.device, scale=parts[0], shift=parts[1])
    refuse_gradient("norm_modulate", (x, *parts))
    compute = _registered_skip_norm if needs_registered(x, scale, shift) else _skip_norm
    norm = Norm(scale=parts[0], shift=parts[1], eps=eps)
    return compute(x, None, None, norm, x.dtype, norm_dtype or x.dtype, impl)
