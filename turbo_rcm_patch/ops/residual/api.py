"""The residual operator: skips, and the layer norm before the next branch.

    y = c_skip * x + c_out * F(x)        h = (layer_norm(y) * weight + bias) * (1 + scale) + shift

`skip_norm` is what a patched block calls: it closes a skip, computes the norm of the result, or
both, in one pass over memory. `skip` takes any coefficients. `norm_modulate` and
`norm_modulate_rows` are the norm alone, with checks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from turbo_rcm_patch.config import Impl, check_choice
from turbo_rcm_patch.errors import DTypeError, ShapeError
from turbo_rcm_patch.ops.checks import (
    broadcasts,
    check_eps,
    check_float,
    check_impl,
    check_out_dtype,
    check_same_device,
    check_tensor,
    skip_parts,
)
from turbo_rcm_patch.ops.dispatch import resolve_impl
from turbo_rcm_patch.ops.formats import Int8Tensor, Streams, int8_rows, padded_channels
from turbo_rcm_patch.ops.register import (
    decode,
    encode,
    needs_registered,
    refuse_gradient,
    register,
)
from turbo_rcm_patch.ops.residual import reference
from turbo_rcm_patch.skip import Cast, Coefficient


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
    first = x[0] if isinstance(x, tuple) else x
    if norm is not None or isinstance(x, tuple):
        how: Any = {"dtype": dtype, "norm_dtype": norm_dtype, "impl": impl}
        return _pass(needs_registered(first), x, branch, gate, norm, **how)
    assert branch is not None and not isinstance(gate, tuple)
    if needs_registered(first):
        options = encode(cast="fp32", impl=impl)
        return _skip_operation(first, branch, None, gate, 1.0, 1.0, dtype, options), None
    return close_skip(first, branch, 1.0, _either(gate, 1.0), impl=impl, out_dtype=dtype), None


def close_skip(
    residual: Tensor | None,
    branch: Tensor,
    c_skip: float | Tensor,
    c_out: float | Tensor,
    *,
    impl: str,
    out_dtype: torch.dtype,
    cast: Cast = "fp32",
) -> Tensor:
    """Compute c_skip * residual + c_out * branch, inside the body of any operation.

    Args:
        residual: [B, N, C], or None for c_out * branch alone.
        branch: [B, N, C].
        c_skip: Float or tensor that broadcasts to [B, N, C].
        c_out: Float or tensor that broadcasts to [B, N, C].
        impl: "triton", "reference" or "auto".
        out_dtype: dtype of the result.
        cast: As in `skip`.
    """
    if resolve_impl(impl, branch.device) == "triton":
        from turbo_rcm_patch.ops.residual.triton import skip as launch

        return launch(residual, branch, c_skip, c_out, cast=cast, out_dtype=out_dtype)
    how: Any = {"cast": cast, "out_dtype": out_dtype}
    return reference.close_skip(residual, branch, c_skip, c_out, **how).contiguous()


def _pass(
    registered: bool,
    x: Streams,
    branch: Tensor | None,
    gate: Streams | None,
    norm: Norm | None,
    *,
    dtype: torch.dtype,
    norm_dtype: torch.dtype | None,
    impl: str,
) -> tuple[Any, Any]:
    factor, offset, weight, bias, eps = norm or _NO_NORM
    one = 1.0
    if factor is None and offset is None:  # a norm with weights and without modulation
        factor, offset, weight, bias, one = weight, bias, None, None, 0.0
    norm_dtype = None if norm is None else norm_dtype
    if registered:
        made = _skip_norm_operation(
            _each(x), branch, _each(gate), _each(factor), _each(offset), weight, bias,
            one=one, eps=eps, dtype=dtype, norm_dtype=norm_dtype, impl=impl,
        )  # fmt: skip
    else:
        made = _implementation(impl, x)(
            x, branch, gate=gate, factor=factor, offset=offset, weight=weight, bias=bias, one=one,
            eps=eps, dtype=dtype, norm_dtype=norm_dtype,
        )  # fmt: skip
    y: Any = None
    if branch is not None:
        y, made = (tuple(made[:2]), made[2:]) if isinstance(x, tuple) else (made[0], made[1:])
    if norm_dtype is None:
        return y, None
    return y, int8_rows(*made) if norm_dtype == torch.int8 else made[0]


_NO_NORM: Final = Norm()


def _implementation(impl: str, x: Streams) -> Callable[..., tuple[Tensor, ...]]:
    first = x[0] if isinstance(x, tuple) else x
    if resolve_impl(impl, first.device) == "triton":
        from turbo_rcm_patch.ops.residual.triton import skip_norm as launch

        return launch
    return reference.skip_norm


def _each(values: Streams | None) -> list[Tensor]:
    """Return the tensors of one stream or two, as a schema takes them."""
    return [] if values is None else list(values) if isinstance(values, tuple) else [values]


def _either(tensor: Tensor | None, value: float) -> float | Tensor:
    return value if tensor is None else tensor


# --- registration --------------------------------------------------------------------------------


def _skip_norm_body(x: list[Tensor], branch: Tensor | None, *tensors: Any) -> list[Tensor]:
    gate, factor, offset, weight, bias, one, eps, dtype, norm_dtype, impl = tensors
    given: list[Any] = [None if not part else part[0] if len(part) == 1 else tuple(part)
             for part in (x, gate, factor, offset)]  # fmt: skip
    return list(
        _implementation(impl, given[0])(
            given[0], branch, gate=given[1], factor=given[2], offset=given[3], weight=weight,
            bias=bias, one=one, eps=eps, dtype=dtype, norm_dtype=norm_dtype,
        )
    )  # fmt: skip


def _skip_norm_fake(x: list[Tensor], branch: Tensor | None, *rest: Any) -> list[Tensor]:
    dtype, norm_dtype = rest[-3:-1]
    made = [] if branch is None else [x[0].new_empty(one.shape, dtype=dtype) for one in x]
    if norm_dtype is None:
        return made
    shape = [x[0].shape[0], sum([one.shape[1] for one in x]), x[0].shape[2]]
    if norm_dtype != torch.int8:
        return [*made, x[0].new_empty(shape, dtype=norm_dtype)]
    int8 = x[0].new_empty([*shape[:2], padded_channels(shape[2])], dtype=torch.int8)
    return [*made, int8, x[0].new_empty(shape[:2], dtype=torch.float32)]


_skip_norm_operation = register(
    "skip_norm(Tensor[] x, Tensor? branch, Tensor[] gate, Tensor[] factor, Tensor[] offset, "
    "Tensor? weight, Tensor? bias, float one, float eps, ScalarType dtype, "
    "ScalarType? norm_dtype, str impl) -> Tensor[]",
    _skip_norm_body,
    _skip_norm_fake,
)


def _skip_body(
    residual: Tensor,
    branch: Tensor,
    c_skip: Tensor | None,
    c_out: Tensor | None,
    c_skip_value: float,
    c_out_value: float,
    dtype: torch.dtype,
    options: str,
) -> Tensor:
    coefficients = _either(c_skip, c_skip_value), _either(c_out, c_out_value)
    return close_skip(residual, branch, *coefficients, out_dtype=dtype, **decode(options))


def _skip_fake(residual: Tensor, *rest: Any) -> Tensor:
    return torch.empty(residual.shape, dtype=rest[-2], device=residual.device)


_skip_operation = register(
    "skip(Tensor residual, Tensor branch, Tensor? c_skip, Tensor? c_out, float c_skip_value, "
    "float c_out_value, ScalarType dtype, str options) -> Tensor",
    _skip_body,
    _skip_fake,
)


# --- public functions ----------------------------------------------------------------------------


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
    check_choice("cast", cast, get_args(Cast))
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
    if needs_registered(residual, branch, *factors[:2]):
        made: Tensor = _skip_operation(
            residual, branch, *factors, dtype, encode(cast=cast, impl=impl)
        )
        return made
    return _skip_body(residual, branch, *factors, dtype, encode(cast=cast, impl=impl))


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
    norm = _norm(x, scale, shift, form, eps, impl)
    # The kernel does not take rows without channels.
    how: Any = {"norm_dtype": out_dtype or x.dtype, "impl": impl if x.shape[2] else "reference"}
    out: Tensor = _pass(
        needs_registered(x, scale, shift), x, None, None, norm, dtype=x.dtype, **how
    )[1]
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
    norm = _norm(x, scale, shift, form, eps, impl)
    if not x.shape[2]:
        raise ShapeError("x", expected="at least one channel", got=str(list(x.shape)))
    how: Any = {"norm_dtype": torch.int8, "impl": impl}
    rows: Int8Tensor = _pass(
        needs_registered(x, scale, shift), x, None, None, norm, dtype=x.dtype, **how
    )[1]
    return rows


def _norm(
    x: Tensor, scale: Tensor | None, shift: Tensor | None, form: str, eps: float, impl: Impl
) -> Norm:
    """Check all arguments of a norm, and return it; scale and shift get three dimensions each."""
    check_choice("form", form, ("modulation", "affine"))
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
    modulates = form == "modulation"
    if modulates:
        return Norm(scale=parts[0], shift=parts[1], eps=eps)
    return Norm(weight=parts[0], bias=parts[1], eps=eps)
