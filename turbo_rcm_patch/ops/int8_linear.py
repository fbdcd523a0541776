"""A linear in int8: weights with a scale per output channel, per output channel and 128 input
channels, or per 128 of both, and activations with a scale per row.

Numeric contract, which the kernels follow too: rows of x and of the weight are quantised as
`quantize` says. The product of the integers is exact (int32), times both scales, plus bias, in
fp32. With a scale for each 128 channels the products over each 128 are exact, and are scaled and
added in fp32. The activation and the skip follow in fp32, without a rounding between (see
`project_skip`).
"""

from __future__ import annotations

import math
from typing import Any, Final, Literal, NamedTuple, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from turbo_rcm_patch.config import Impl
from turbo_rcm_patch.errors import ConfigError, DTypeError, GradientError, ShapeError
from turbo_rcm_patch.kernels.operands import Rows, padded_channels
from turbo_rcm_patch.ops import batches
from turbo_rcm_patch.ops.checks import (
    check_float,
    check_impl,
    check_out_dtype,
    check_same_device,
    check_tensor,
    skip_parts,
)
from turbo_rcm_patch.ops.dispatch import resolve_impl
from turbo_rcm_patch.ops.gradients import sum_to
from turbo_rcm_patch.ops.modes import (
    as_documented,
    refuse_derivative,
    transformed,
    without_autocast,
)
from turbo_rcm_patch.ops.operation import Operation, flattened
from turbo_rcm_patch.ops.projection import either
from turbo_rcm_patch.ops.quantize import check_channels, integer_product, quantized_rows
from turbo_rcm_patch.ops.reference import close_skip
from turbo_rcm_patch.skip import Cast, Coefficient

#: Input channels that share a scale where a weight has more than one for a row; with blocks,
#: output channels too.
GROUP: Final = 128

#: Rows of a weight that are in fp32 at once; a multiple of `GROUP`.
_ROWS_AT_ONCE: Final = 1024

Activation = Literal["gelu-tanh"]


class LinearInputs(NamedTuple):
    """What the registered int8 linears take beside x, in its order."""

    weight: Tensor
    weight_scale: Tensor
    bias: Tensor | None
    residual: Tensor | None
    c_skip: Tensor | None
    c_out: Tensor | None
    c_skip_value: float
    c_out_value: float
    activation: str
    cast_policy: Cast
    impl: Impl
    out_dtype: torch.dtype


_ROWS: Final = {"int8": Tensor, "scale": Tensor}
_WORDS: Final = {"x": Tensor, "cast_policy": str, "impl": str}


@as_documented
@flattened(("x", *LinearInputs._fields), Tensor, LinearInputs, _WORDS)
def _linear_forward(x: Tensor, *args: Any) -> Tensor:
    a = LinearInputs(*args)
    return _closed_product(*_rows_of(x, a.impl), a)


@as_documented
@flattened((*_ROWS, *LinearInputs._fields), Tensor, LinearInputs, _ROWS, _WORDS)
def _rows_forward(int8: Tensor, scale: Tensor, *args: Any) -> Tensor:
    return _closed_product(int8, scale, LinearInputs(*args))


def _rows_of(x: Tensor, impl: Impl) -> tuple[Tensor, Tensor]:
    if resolve_impl(impl, x.device) == "triton":
        from turbo_rcm_patch.kernels.portable.rows import quantize_rows

        return quantize_rows(x)
    return quantized_rows(x)


def _closed_product(int8: Tensor, scale: Tensor, a: LinearInputs) -> Tensor:
    factors = either(a.c_skip, a.c_skip_value), either(a.c_out, a.c_out_value)
    if resolve_impl(a.impl, int8.device) == "triton":
        from turbo_rcm_patch.kernels.portable.int8_linear import int8_linear as launch

        return launch(
            Rows(int8.contiguous(), scale.contiguous()), *a[:4], *factors,
            gelu=a.activation == "gelu-tanh", cast=a.cast_policy, out_dtype=a.out_dtype,
        )  # fmt: skip
    int8 = int8[..., : a.weight.shape[1]]
    if a.weight_scale.dim() == 2:
        branch = _grouped_product(int8, a.weight, a.weight_scale) * scale.unsqueeze(-1)
    else:
        branch = integer_product(int8, a.weight) * scale.unsqueeze(-1) * a.weight_scale
    branch = _activated(branch if a.bias is None else branch + a.bias.float(), a.activation)
    y = close_skip(a.residual, branch, *factors, cast=a.cast_policy, out_dtype=a.out_dtype)
    return y.contiguous()


def scales_of_rows(scale: Tensor, rows: int) -> Tensor:
    """The scales of blocks, fp32 [ceil(Cout / 128), ceil(K / 128)], for each of Cout rows.

    Returns:
        fp32 [Cout, ceil(K / 128)]; a group's scales lie side by side, which is how a kernel reads
        them.
    """
    return scale.t().repeat_interleave(GROUP, 1)[:, :rows].contiguous().t()


def _grouped_product(x: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """x @ (weight * scale)^T over integers x, group of channels by group, in fp32."""
    if weight_scale.shape[0] != weight.shape[0]:
        weight_scale = scales_of_rows(weight_scale, weight.shape[0])
    x_parts, w_parts = torch.split(x, GROUP, -1), torch.split(weight, GROUP, -1)
    groups = zip(x_parts, w_parts, weight_scale.unbind(1), strict=True)
    parts = [integer_product(x_part, w_part) * scale for x_part, w_part, scale in groups]
    return sum(parts[1:], parts[0])


def _multiplied_weight(weight: Tensor, weight_scale: Tensor) -> Tensor:
    """The weight that was multiplied with, fp32 [Cout, K]."""
    if weight_scale.dim() == 1:
        return weight.float() * weight_scale.unsqueeze(1)
    if weight_scale.shape[0] != weight.shape[0]:
        weight_scale = scales_of_rows(weight_scale, weight.shape[0])
    return weight.float() * weight_scale.repeat_interleave(GROUP, 1)[:, : weight.shape[1]]


def dequantized(weight: Tensor, weight_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """int8 times scale, rounded once to `dtype`; without an fp32 copy of the whole.

    Args:
        weight: int8 [Cout, K].
        weight_scale: As `int8_linear` takes it.
        dtype: Any float dtype.

    Returns:
        [Cout, K].
    """
    rows = weight.shape[0]
    if dtype == torch.float32 or rows <= _ROWS_AT_ONCE or torch.compiler.is_compiling():
        return _multiplied_weight(weight, weight_scale).to(dtype)
    by_row = weight_scale.shape[0] == rows
    made = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    for start in range(0, rows, _ROWS_AT_ONCE):
        part = slice(start, start + _ROWS_AT_ONCE)
        blocks = slice(start // GROUP, (start + _ROWS_AT_ONCE) // GROUP)
        made[part] = _multiplied_weight(weight[part], weight_scale[part if by_row else blocks])
    return made


def _activated(x: Tensor, activation: str) -> Tensor:
    return F.gelu(x, approximate="tanh") if activation == "gelu-tanh" else x


linear_forward = Operation("turbo_rcm_patch::int8_linear", _linear_forward)


@linear_forward.register_fake
def _linear_fake(x: Tensor, weight: Tensor, *args: object) -> Tensor:
    out_dtype = args[-1]
    assert isinstance(out_dtype, torch.dtype)
    return x.new_empty((x.shape[0], x.shape[1], weight.shape[0]), dtype=out_dtype)


def _setup(ctx: Any, inputs: tuple[object, ...], output: Tensor) -> None:
    ctx.save_for_backward(*cast("tuple[Tensor | None, ...]", inputs[:7]))
    ctx.c_skip_value, ctx.c_out_value, ctx.activation = inputs[7:10]


def _activation_gradient(g: Tensor, pre: Tensor) -> Tensor:
    """g times the derivative of gelu-tanh at `pre`; written out, because this runs below
    autograd."""
    root, cube = 0.7978845608028654, 0.044715
    t = torch.tanh(root * (pre + cube * pre**3))
    return g * (0.5 * (1 + t) + 0.5 * pre * (1 - t * t) * root * (1 + 3 * cube * pre * pre))


def _autograd(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, weight_scale, bias, residual, c_skip, c_out = ctx.saved_tensors
    needs = ctx.needs_input_grad
    grads: list[Tensor | None] = [None] * 13
    g = d_out.float()
    if needs[4]:
        grads[4] = (g * (ctx.c_skip_value if c_skip is None else c_skip.float())).to(
            residual.dtype
        )
    if residual is not None and needs[5]:
        grads[5] = sum_to(g * residual.float(), c_skip)
    if not any(needs[i] for i in (0, 3, 6)):
        return tuple(grads)
    # Straight through the rounding of x: the exact linear with the weight that was multiplied.
    real = _multiplied_weight(weight, weight_scale)
    pre = None
    if needs[6] or ctx.activation:
        pre = F.linear(x.float(), real, None if bias is None else bias.float())
    if needs[6]:
        assert pre is not None
        grads[6] = sum_to(g * _activated(pre, ctx.activation), c_out)
    g = g * (ctx.c_out_value if c_out is None else c_out.float())
    if ctx.activation:
        assert pre is not None
        g = _activation_gradient(g, pre)
    if needs[0]:
        grads[0] = (g @ real).to(x.dtype)
    if needs[3]:
        grads[3] = g.sum((0, 1)).to(bias.dtype)
    return tuple(grads)


linear_forward.register_autograd(_autograd, setup_context=_setup)

#: The same over rows that are int8 already, without a gradient.
rows_linear_forward = Operation("turbo_rcm_patch::int8_linear_rows", _rows_forward)


@rows_linear_forward.register_fake
def _rows_fake(int8: Tensor, scale: Tensor, weight: Tensor, *args: object) -> Tensor:
    out: Tensor = _linear_fake(int8, weight, *args)
    return out


def int8_linear(
    x: Tensor | Rows,
    weight_int8: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Activation | None = None,
    residual: Tensor | None = None,
    c_skip: Coefficient = 1.0,
    c_out: Coefficient = 1.0,
    cast: Cast = "fp32",
    impl: Impl = "auto",
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute c_skip * residual + c_out * activation(x @ weight^T + bias) in int8.

    Unless x comes as int8 rows, a separate pass quantises it with a scale per row. The gradients
    of x, bias, residual and coefficients are those of the exact linear with the weight int8 *
    scale. int8 rows have no gradient.

    Args:
        x: [B, N, K], bf16, fp16 or fp32, or `Rows` of it, from `norm_modulate_rows`.
        weight_int8: int8 [Cout, K], from `quantize_weight`.
        weight_scale: fp32 [Cout], also from `quantize_weight`; or [Cout, ceil(K / 128)], a scale
            for every 128 channels (fastest if the first dimension is dense); or
            [ceil(Cout / 128), ceil(K / 128)], a scale for every block of 128 x 128, which is
            faster on Hopper. It has no gradient.
        bias: [Cout], any of these float dtypes, or None.
        activation: "gelu-tanh" (`F.gelu(approximate="tanh")`, in fp32 on the unrounded sum) or
            None.
        residual: [B, N, Cout] or None.
        c_skip: Float or tensor [B], [B, 1, Cout] or [B, N, Cout].
        c_out: Likewise.
        cast: As in `project_skip`: "fp32" rounds once at the end, "model" after every step.
        impl: "triton", "reference" or "auto".
        out_dtype: dtype of the result; x's by default, required with rows.

    Returns:
        [B, N, Cout], contiguous.

    Raises:
        ShapeError: Shapes do not fit together, or K is over `MAX_CHANNELS`.
        DTypeError: A tensor has another dtype.
        GradientError: weight_scale requires a gradient, or c_skip does without a residual, or any
            argument does while x is rows.
        ConfigError: An unknown activation or cast, or rows without an out_dtype.
    """
    rows = x if isinstance(x, Rows) else None
    source = x.int8 if isinstance(x, Rows) else x
    check_impl(impl)
    check_out_dtype(out_dtype)
    _check_linear(source, weight_int8, weight_scale, bias, activation, cast, rows)
    shape = (source.shape[0], source.shape[1], weight_int8.shape[0])
    batch = shape[0]
    if batch > batches.MAX_BATCH:
        each = (source, None if rows is None else rows.scale, residual, c_skip, c_out)

        def run(part: slice) -> Tensor:
            source, scale, residual, c_skip, c_out = batches.of_batch(each, part, batch)
            return int8_linear(
                source if scale is None else Rows(source, scale),
                weight_int8, weight_scale, bias, activation=activation, residual=residual,
                c_skip=c_skip, c_out=c_out, cast=cast, impl=impl, out_dtype=out_dtype,
            )  # fmt: skip

        return batches.in_parts(batch, run)
    factors = skip_parts(residual, c_skip, c_out, shape)
    check_same_device(
        source.device, weight_int8=weight_int8, weight_scale=weight_scale, bias=bias,
        residual=residual, c_skip=factors[0], c_out=factors[1],
    )  # fmt: skip
    rest = (
        weight_int8, weight_scale, bias, residual, *factors, activation or "", cast, impl,
    )  # fmt: skip
    if rows is None and transformed():
        # Straight through the rounding of x, as in the backward pass.
        with without_autocast(source.device):
            real = _multiplied_weight(weight_int8, weight_scale)
            branch = F.linear(source.float(), real, None if bias is None else bias.float())
            return close_skip(
                residual,
                _activated(branch, activation or ""),
                either(factors[0], factors[2]),
                either(factors[1], factors[3]),
                cast=cast,
                out_dtype=source.dtype if out_dtype is None else out_dtype,
            ).contiguous()
    if rows is None:
        out: Tensor = linear_forward(
            source, *rest, source.dtype if out_dtype is None else out_dtype
        )
        return out
    if out_dtype is None:
        raise ConfigError("out_dtype", expected="a dtype, because rows have none", got="None")
    refuse_derivative(
        "int8_linear of rows",
        *(t for t in (rows.scale, *rest) if isinstance(t, Tensor)),
        expected="no gradient",
        remedy="Pass the activation itself",
    )
    closed: Tensor = rows_linear_forward(*rows, *rest, out_dtype)
    return closed


def _check_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    activation: str | None,
    cast_policy: str,
    rows: Rows | None,
) -> None:
    for name, value, choices in (
        ("activation", activation, (None, *get_args(Activation))),
        ("cast", cast_policy, get_args(Cast)),
    ):
        if value not in choices:
            raise ConfigError(name, expected=f"one of {choices}", got=repr(value))
    for name, tensor in (("x", x), ("weight_int8", weight), ("weight_scale", scale)):
        check_tensor(name, tensor)
    if rows is None:
        check_float("x", x)
    elif (x.dtype, getattr(rows.scale, "dtype", None)) != (torch.int8, torch.float32):
        kind = getattr(rows.scale, "dtype", type(rows.scale).__name__)
        raise DTypeError("x", expected="rows in int8 and float32", got=f"{x.dtype} and {kind}")
    elif (
        x.dim() != 3
        or rows.scale.shape != x.shape[:2]
        or not (rows.scale.device == x.device == weight.device)
    ):
        raise ShapeError(
            "x",
            expected=f"int8 [B, N, K padded] and scale [B, N] on {weight.device}",
            got=f"{list(x.shape)} on {x.device} and {list(rows.scale.shape)} on "
            f"{rows.scale.device}",
        )
    if x.dim() != 3:
        raise ShapeError("x", expected="[batch, tokens, channels]", got=str(list(x.shape)))
    if weight.dtype != torch.int8:
        raise DTypeError(
            "weight_int8",
            expected="int8",
            got=str(weight.dtype),
            remedy="Quantise it with ops.quantize_weight",
        )
    fits = weight.dim() == 2 and x.shape[2] == (
        weight.shape[1] if rows is None else padded_channels(weight.shape[1])
    )
    if not fits:
        raise ShapeError(
            "weight_int8", expected=f"[Cout, {x.shape[2]}]", got=str(list(weight.shape))
        )
    check_channels(weight.shape[1])
    if scale.dtype != torch.float32:
        raise DTypeError("weight_scale", expected="float32", got=str(scale.dtype))
    grouped = (weight.shape[0], math.ceil(weight.shape[1] / GROUP))
    blocks = (math.ceil(weight.shape[0] / GROUP), grouped[1])
    if tuple(scale.shape) not in ((weight.shape[0],), grouped, blocks):
        raise ShapeError(
            "weight_scale",
            expected=f"[{weight.shape[0]}], {list(grouped)} or {list(blocks)}",
            got=str(list(scale.shape)),
        )
    if bias is not None:
        check_float("bias", bias)
        if tuple(bias.shape) != (weight.shape[0],):
            raise ShapeError("bias", expected=f"[{weight.shape[0]}]", got=str(list(bias.shape)))
    if scale.requires_grad:
        raise GradientError(
            "weight_scale",
            expected="a constant, because a quantised weight has no gradient",
            got="requires_grad=True",
            remedy="Train with the Linear itself",
        )
