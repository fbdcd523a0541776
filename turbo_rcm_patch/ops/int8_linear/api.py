"""The int8 linear, and the quantisation of rows to int8.

The numeric contract, which the kernels follow too:

- A row (all its channels) is quantised symmetrically, with the scale max |row| / 127, and values
  are rounded half to even. Rows whose values are all smaller than `TINY` become zeros. A row with
  a NaN or an infinity has the scale NaN.
- Activations have a scale per row. Weights have a scale per output channel, or per block of
  128 x 128.
- The product of the integers is exact (int32). It is multiplied by both scales, and the bias is
  added, in fp32. With a scale per block, the product over each 128 channels is exact, and these
  products are scaled and added in fp32.
- The activation function is computed in fp32.

A scale per output channel is finer than TurboDiffusion's scales per block of 128 x 128 (arXiv
2512.16093). It is applied after the sum over channels, so it adds no work inside the sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from turbo_rcm_patch.config import Impl, check_choice
from turbo_rcm_patch.errors import ConfigError, DTypeError, ShapeError
from turbo_rcm_patch.ops.checks import (
    check_float,
    check_out_dtype,
    check_same_device,
    check_shape,
    check_tensor,
    check_tokens,
    check_weight,
)
from turbo_rcm_patch.ops.dispatch import Implementation, always, choose, resolve_impl
from turbo_rcm_patch.ops.formats import (
    ALIGNED,
    INT8_MAX,
    LARGE,
    TINY,
    Int8Tensor,
    LinearInputs,
    int8_rows,
    padded_channels,
)
from turbo_rcm_patch.ops.register import needs_registered, refuse_gradient, register
from turbo_rcm_patch.ops.replay import replayed

if TYPE_CHECKING:
    from turbo_rcm_patch.ops.launch import Target

#: Number of products that an int32 can add without overflow.
MAX_CHANNELS: Final = (2**31 - 1) // INT8_MAX**2
#: Rows and columns of a block of the weight that share a scale.
GROUP: Final = 128
#: Rows of a weight that are held in fp32 at once.
_ROWS_AT_ONCE: Final = 1024

Activation = Literal["gelu-tanh"]


# --- rows ----------------------------------------------------------------------------------------


def quantized_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise x [..., K] of any float dtype: int8 [..., K] and scale [...] fp32."""
    x = x.float()
    amax = x.abs().amax(-1)
    finite = amax.isfinite()  # amax keeps NaN
    amax = torch.where(finite & (amax > TINY), amax, torch.ones_like(amax))
    int8 = (x * (INT8_MAX / amax).unsqueeze(-1)).round_().nan_to_num_(0.0)
    int8 = int8.clamp(-INT8_MAX, INT8_MAX).to(torch.int8)
    return int8, torch.where(finite, amax / INT8_MAX, torch.full_like(amax, float("nan")))


def integer_product(x: Tensor, weight: Tensor) -> Tensor:
    """Compute x @ weight^T of int8 tensors [B, N, K] and [Cout, K], rounded once to fp32.

    The sum before that rounding is exact: it is computed in fp32 if 24 bits hold every sum, and in
    fp64 otherwise.
    """
    wide = torch.float32 if x.shape[-1] * INT8_MAX**2 <= 2**24 else torch.float64
    return F.linear(x.to(wide), weight.to(wide)).float()


def quantize_rows(x: Tensor, impl: str) -> Int8Tensor:
    """Quantise x [B, N, K], with its rows padded as in `Int8Tensor`."""
    compute = _registered_rows if needs_registered(x) else _quantize_rows
    return int8_rows(*compute(x, impl))


def _quantize_rows(x: Tensor, impl: str) -> tuple[Tensor, Tensor]:
    if resolve_impl(impl, x.device) == "triton":
        from turbo_rcm_patch.ops.numerics import quantize_rows as launch

        return launch(x)
    data, scale = quantized_rows(x)
    return F.pad(data, (0, padded_channels(x.shape[2]) - x.shape[2])), scale


def _empty_rows(x: Tensor, impl: str) -> tuple[Tensor, Tensor]:
    shape = (x.shape[0], x.shape[1], padded_channels(x.shape[2]))
    return x.new_empty(shape, dtype=torch.int8), x.new_empty(x.shape[:2], dtype=torch.float32)


_registered_rows = register("quantize_rows", _quantize_rows, _empty_rows)


def quantize_weight(weight: Tensor, *, impl: Impl = "auto") -> tuple[Tensor, Tensor]:
    """Quantise the weight of a Linear to int8 with a scale per output channel, max |row| / 127.

    Args:
        weight: [Cout, K], bf16, fp16 or fp32. It is detached: a quantised weight is a constant.
        impl: "triton", "reference" or "auto".

    Returns:
        int8 [Cout, K] and fp32 [Cout]; the weight is about int8 * scale[:, None].

    Raises:
        ShapeError: The weight is not a matrix, or K is over `MAX_CHANNELS`.
        DTypeError: The weight is not of a float dtype.
    """
    check_float("weight", weight)
    if weight.dim() != 2:
        raise ShapeError("weight", expected="[Cout, K]", got=str(list(weight.shape)))
    check_channels(weight.shape[1])
    data, scale = quantize_rows(weight.detach().unsqueeze(0), impl)
    return data[0, :, : weight.shape[1]].contiguous(), scale[0]


def check_channels(channels: int) -> None:
    """Refuse a number of channels over which an int32 sum could overflow."""
    if not 1 <= channels <= MAX_CHANNELS:
        raise ShapeError(
            "channels of an int8 product",
            expected=f"1 to {MAX_CHANNELS}, whose sum fits into an int32",
            got=str(channels),
            remedy="Run this Linear as it is",
        )


# --- products ------------------------------------------------------------------------------------


def linear_int8(
    x: Tensor | Int8Tensor,
    *,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    activation: str = "",
    impl: str,
    out_dtype: torch.dtype,
) -> Tensor:
    """Compute `int8_linear` without its checks, for patched blocks."""
    linear = LinearInputs(weight, scale, bias, activation)
    if needs_registered(x.data if isinstance(x, Int8Tensor) else x):
        return _registered_linear(_plain_rows(x), linear, impl, out_dtype)
    return _linear(x, linear, impl, out_dtype)


def _plain_rows(x: Tensor | Int8Tensor) -> Tensor | Int8Tensor:
    """Return rows in the class that the registered operation takes."""
    return Int8Tensor(*x) if isinstance(x, Int8Tensor) else x


def _linear(
    x: Tensor | Int8Tensor, linear: LinearInputs, impl: str, out_dtype: torch.dtype
) -> Tensor:
    if resolve_impl(impl, linear.weight.device) == "triton":
        return launch_linear(x, linear, out_dtype=out_dtype)
    weight, weight_scale, bias, activation = linear
    data, scale = x if isinstance(x, Int8Tensor) else quantized_rows(x)
    data = data[..., : weight.shape[1]]
    if weight_scale.dim() == 2:
        branch = _grouped_product(data, weight, weight_scale) * scale.unsqueeze(-1)
    else:
        branch = integer_product(data, weight) * scale.unsqueeze(-1) * weight_scale
    branch = branch if bias is None else branch + bias.float()
    if activation == "gelu-tanh":
        branch = F.gelu(branch, approximate="tanh")
    return branch.to(out_dtype).contiguous()


def _empty_linear(
    x: Tensor | Int8Tensor, linear: LinearInputs, impl: str, out_dtype: torch.dtype
) -> Tensor:
    data = x.data if isinstance(x, Int8Tensor) else x
    shape = (data.shape[0], data.shape[1], linear.weight.shape[0])
    return data.new_empty(shape, dtype=out_dtype)


_registered_linear = register("int8_linear", _linear, _empty_linear, Int8Tensor, LinearInputs)


# --- which implementation runs -------------------------------------------------------------------


#: Writes the product of rows into its first argument.
LinearKernel = Callable[[Tensor, Int8Tensor, LinearInputs], None]


def _hopper() -> LinearKernel:
    from turbo_rcm_patch.ops.int8_linear.hopper import launch_kernel

    return launch_kernel


def _triton() -> LinearKernel:
    from turbo_rcm_patch.ops.int8_linear.triton import launch_kernel

    return launch_kernel


def _large_on_hopper(target: Target, call: tuple[Tensor, Tensor]) -> bool:
    y, weight = call  # as the kernels read it
    # A hardware copy needs an address that is a multiple of 16; that of a slice may not be.
    aligned = weight.data_ptr() % ALIGNED == 0
    return target == ("cuda", 90) and y.numel() >= LARGE and aligned


#: The product.
KERNELS: Final = (
    Implementation(
        "hopper", _large_on_hopper, f"sm_90, {LARGE:,} outputs or more", _hopper, "int8 linear"
    ),
    Implementation("triton", always, "everything else", _triton, "int8 linear"),
)  # fmt: skip


@replayed
def launch_linear(
    x: Tensor | Int8Tensor, linear: LinearInputs, *, out_dtype: torch.dtype
) -> Tensor:
    """Launch an int8 linear: [B, N, Cout].

    Args:
        x: [B, N, K] in int8, or in a float dtype, which a first kernel quantises.
        linear: What it is multiplied with.
        out_dtype: dtype of the result.
    """
    if not isinstance(x, Int8Tensor):
        from turbo_rcm_patch.ops.numerics import quantize_rows as launch

        x = launch(x)
    rows = Int8Tensor(x.data.contiguous(), x.scale.contiguous())
    batch, n_tokens, channels = rows.data.shape  # channels are padded
    weight = linear.weight
    if weight.shape[1] != channels:  # padding by 0 would copy
        weight = F.pad(weight, (0, channels - weight.shape[1]))
    bias = None if linear.bias is None else linear.bias.contiguous()
    linear = linear._replace(weight=weight.contiguous(), bias=bias)
    y = torch.empty(batch, n_tokens, weight.shape[0], dtype=out_dtype, device=rows.data.device)
    if y.numel():  # Triton refuses a descriptor without rows.
        choose(KERNELS, y.device, (y, linear.weight))(y, rows, linear)
    return y


# --- the public function -------------------------------------------------------------------------


def _scales_of_rows(scale: Tensor, rows: int) -> Tensor:
    """Return the scales of each of Cout rows: [Cout] as they are, or those of blocks
    [ceil(Cout / 128), ceil(K / 128)] as [Cout, ceil(K / 128)]."""
    return scale if scale.dim() == 1 else scale.repeat_interleave(GROUP, 0)[:rows]


def _grouped_product(x: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """Compute x @ (weight * scale)^T of integers x in fp32, one group of channels at a time."""
    scales = _scales_of_rows(weight_scale, weight.shape[0])
    x_parts, w_parts = torch.split(x, GROUP, -1), torch.split(weight, GROUP, -1)
    groups = zip(x_parts, w_parts, scales.unbind(1), strict=True)
    parts = [integer_product(x_part, w_part) * scale for x_part, w_part, scale in groups]
    return sum(parts[1:], parts[0])


def _multiplied_weight(weight: Tensor, scales: Tensor) -> Tensor:
    """Multiply an int8 weight by the scales of its rows: fp32 [Cout, K]."""
    if scales.dim() == 1:
        return weight.float() * scales.unsqueeze(1)
    return weight.float() * scales.repeat_interleave(GROUP, 1)[:, : weight.shape[1]]


def dequantized(weight: Tensor, weight_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute int8 times scale, rounded once to `dtype`, without an fp32 copy of the whole.

    Args:
        weight: int8 [Cout, K].
        weight_scale: fp32, in one of the two shapes that `int8_linear` takes.
        dtype: Any float dtype.

    Returns:
        [Cout, K].
    """
    rows = weight.shape[0]
    scales = _scales_of_rows(weight_scale, rows)
    if dtype == torch.float32 or rows <= _ROWS_AT_ONCE or torch.compiler.is_compiling():
        return _multiplied_weight(weight, scales).to(dtype)
    out = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    parts = (torch.split(x, _ROWS_AT_ONCE) for x in (out, weight, scales))
    for out_part, weight_part, scales_part in zip(*parts, strict=True):
        out_part.copy_(_multiplied_weight(weight_part, scales_part))
    return out


def int8_linear(
    x: Tensor | Int8Tensor,
    weight_int8: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Activation | None = None,
    impl: Impl = "auto",
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute activation(x @ weight^T + bias) in int8.

    Unless x comes as int8 rows, a separate pass quantises it with a scale per row.

    Args:
        x: [B, N, K], bf16, fp16 or fp32, or `Int8Tensor` of it, from `norm_modulate_rows`.
        weight_int8: int8 [Cout, K], from `quantize_weight`.
        weight_scale: fp32 [Cout], also from `quantize_weight`; or
            [ceil(Cout / 128), ceil(K / 128)], a scale for every block of 128 x 128.
        bias: [Cout], any of these float dtypes, or None.
        activation: "gelu-tanh" (`F.gelu(approximate="tanh")`, in fp32 on the unrounded sum) or
            None.
        impl: "triton", "reference" or "auto".
        out_dtype: dtype of the result; x's by default, required with rows.

    Returns:
        [B, N, Cout], contiguous.

    Raises:
        ShapeError: Shapes do not fit together, or K is over `MAX_CHANNELS`.
        DTypeError: A tensor has another dtype.
        GradientError: A gradient is wanted.
        ConfigError: An unknown activation, or rows without an out_dtype.
    """
    rows = x if isinstance(x, Int8Tensor) else None
    source = x.data if isinstance(x, Int8Tensor) else x
    check_out_dtype(out_dtype)
    _check_linear(source, weight_int8, weight_scale, bias, activation, rows)
    check_same_device(source.device, weight_int8=weight_int8, weight_scale=weight_scale, bias=bias)
    refuse_gradient("int8_linear", (source, weight_scale, bias))
    if out_dtype is None:
        if rows is not None:
            raise ConfigError("out_dtype", expected="a dtype, because rows have none", got="None")
        out_dtype = source.dtype
    scale = None if rows is None else rows.scale
    linear = LinearInputs(weight_int8, weight_scale, bias, activation or "")
    registered = needs_registered(source, scale, weight_int8, weight_scale, bias)
    compute = _registered_linear if registered else _linear
    return compute(_plain_rows(x), linear, impl, out_dtype)


def _check_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    activation: str | None,
    rows: Int8Tensor | None,
) -> None:
    check_choice("activation", activation, (None, *get_args(Activation)))
    for name, tensor in (("x", x), ("weight_int8", weight), ("weight_scale", scale)):
        check_tensor(name, tensor)
    if rows is None:
        check_tokens("x", x)
    else:
        check_shape("scale of x", rows.scale, x.shape[:2])
        check_same_device(x.device, scale_of_x=rows.scale)
        if x.dtype != torch.int8 or x.dim() != 3:
            raise DTypeError("x", expected="int8 [B, N, K]", got=f"{x.dtype} {list(x.shape)}")
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
    blocks = tuple(-(-size // GROUP) for size in weight.shape)
    if tuple(scale.shape) not in ((weight.shape[0],), blocks):
        raise ShapeError(
            "weight_scale",
            expected=f"[{weight.shape[0]}] or {list(blocks)}",
            got=str(list(scale.shape)),
        )
    if bias is not None:
        check_shape("bias", bias, (weight.shape[0],))


# --- linear and GELU in 16 bits ------------------------------------------------------------------


def _linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    if x.is_cuda and x.dtype != torch.float32 and torch.version.hip is None:
        # cuBLASLt's epilogue: GELU in its tanh form, on the sum in fp32.
        flat = torch._addmm_activation(bias, x.flatten(0, 1), weight.t(), use_gelu=True)
        return flat.view(x.shape[0], x.shape[1], weight.shape[0])
    return F.gelu(F.linear(x, weight, bias), approximate="tanh")


def _empty_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1], weight.shape[0])


_registered_gelu = register("linear_gelu", _linear_gelu, _empty_gelu)


def gelu_of_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Compute `linear_gelu` without its checks, for patched blocks."""
    return (_registered_gelu if needs_registered(x) else _linear_gelu)(x, weight, bias)


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Compute gelu(x @ weight^T + bias) with the tanh form of GELU.

    In 16 bits on an NVIDIA GPU the activation is the epilogue of the matrix product, so it reads
    the unrounded sum.

    Args:
        x: [B, N, Cin], bf16, fp16 or fp32.
        weight: [Cout, Cin], dtype of x.
        bias: [Cout], any of these dtypes; rounded to that of x.

    Returns:
        [B, N, Cout], dtype of x.

    Raises:
        OpError: The arguments do not fit together, or a gradient is wanted.
    """
    check_weight(x, weight, bias)
    refuse_gradient("linear_gelu", (x, weight, bias))
    bias = bias.to(x.dtype)
    compute = _registered_gelu if needs_registered(x, weight, bias) else _linear_gelu
    return compute(x, weight, bias)
