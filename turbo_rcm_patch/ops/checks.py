"""Backend-neutral checks of the arguments of public operations. The launchers check the
hardware."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from turbo_rcm_patch.errors import DTypeError, MaskError, ShapeError
from turbo_rcm_patch.ops.attention.spec import MAX_HEAD_DIM, AttentionSpec
from turbo_rcm_patch.skip import Coefficient

FLOATS: Final = (torch.bfloat16, torch.float16, torch.float32)
#: dtypes of results and coefficients, which the kernels also take in fp64.
_WIDE_FLOATS: Final = (*FLOATS, torch.float64)


def _shape(x: torch.Tensor) -> str:
    return str(list(x.shape))


def check_tensor(name: str, x: object) -> None:
    """Refuse anything but a dense tensor."""
    if not isinstance(x, torch.Tensor):
        raise DTypeError(name, expected="a torch.Tensor", got=type(x).__name__)
    if x.layout is not torch.strided:
        raise ShapeError(
            name, expected="a dense tensor", got=str(x.layout), remedy="Call its to_dense()"
        )


def check_same_device(device: torch.device, **values: object) -> None:
    """Refuse tensors on another device, because a kernel reads the memory of one."""
    for name, x in values.items():
        if isinstance(x, torch.Tensor) and x.device != device:
            raise ShapeError(
                name,
                expected=f"a tensor on {device}, beside the others",
                got=f"one on {x.device}",
                remedy="Move it there",
            )


def check_out_dtype(dtype: torch.dtype | None) -> None:
    """Refuse a dtype of a result that is not a float dtype of at least 16 bits.

    Integers would truncate the result silently, and torch has few products and sums in 8 bits.
    """
    if dtype is not None and dtype not in _WIDE_FLOATS:
        raise DTypeError(
            "out_dtype", expected="bfloat16, float16, float32 or float64", got=repr(dtype)
        )


def check_float(name: str, x: torch.Tensor) -> None:
    check_tensor(name, x)
    if x.dtype not in FLOATS:
        raise DTypeError(name, expected="bfloat16, float16 or float32", got=str(x.dtype))


def check_tokens(name: str, x: torch.Tensor) -> None:
    """Refuse a tensor of another float dtype or without three dimensions."""
    check_float(name, x)
    if x.dim() != 3:
        raise ShapeError(name, expected="[batch, tokens, channels]", got=_shape(x))


def check_shape(name: str, x: torch.Tensor, shape: Sequence[int]) -> None:
    """Refuse a tensor of another float dtype or another shape."""
    check_float(name, x)
    if tuple(x.shape) != tuple(shape):
        raise ShapeError(name, expected=str(list(shape)), got=_shape(x))


def broadcasts(shape: Sequence[int], full: Sequence[int]) -> bool:
    """Return True if a shape broadcasts to another with the same number of dimensions.

    Sizes may be symbols of a compiler, which compares them correctly with == but not with `in`.
    """
    if len(shape) != len(full):
        return False
    return all(size == 1 or size == wide for size, wide in zip(shape, full, strict=True))


def check_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec
) -> None:
    """Check q [B, Nq, H*D], k and v [B, Nk, H*D]: one dtype, one device and 1 <= D <= 256."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tokens(name, x)
        if x.dtype != q.dtype:
            raise DTypeError(name, expected=f"the dtype of q, {q.dtype}", got=str(x.dtype))
    check_same_device(q.device, k=k, v=v)
    batch, _, channels = q.shape
    if k.shape != v.shape or k.shape[0] != batch or k.shape[2] != channels:
        raise ShapeError(
            "k and v",
            expected=f"both [{batch}, Nk, {channels}]",
            got=f"{_shape(k)} and {_shape(v)}",
        )
    if q.shape[1] < 1 or k.shape[1] < 1:
        raise ShapeError(
            "q and k", expected="at least one token each", got=f"{_shape(q)}, {_shape(k)}"
        )
    if channels % spec.heads or not channels:
        raise ShapeError(
            "q", expected=f"channels, divisible by heads={spec.heads}", got=f"{channels} channels"
        )
    head_dim = channels // spec.heads
    if head_dim > MAX_HEAD_DIM:
        raise ShapeError(
            "head_dim",
            expected=f"at most {MAX_HEAD_DIM}",
            got=str(head_dim),
            remedy='Use attention="exact" through torch for this module',
        )


def check_norm(name: str, weight: torch.Tensor | None, channels: int, heads: int) -> None:
    """Check the weight of the RMSNorm of q or k: [H*D] (across all heads) or [D] (per head)."""
    if weight is None:
        return
    check_float(name, weight)
    head_dim = channels // heads
    if weight.dim() != 1 or not (weight.numel() == channels or weight.numel() == head_dim):
        raise ShapeError(
            name,
            expected=f"[{channels}] (across heads) or [{head_dim}] (per head)",
            got=_shape(weight),
        )


def rotary_parts(
    rotary: tuple[torch.Tensor, torch.Tensor] | None, n_q: int, n_kv: int, head_dim: int
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Check rotary tables, and return (cos, sin) as [N, D] views.

    A table may be [N, D] or [1, N, 1, D]; N is the length of q and of k.
    """
    if rotary is None:
        return None, None
    cos, sin = rotary
    for name, table in (("cos", cos), ("sin", sin)):
        check_tensor(f"rotary {name}", table)
        whole = table.shape[-1] == head_dim and table.numel() == n_q * head_dim
        if not whole or n_q != n_kv or head_dim % 2:
            raise ShapeError(
                f"rotary {name}",
                expected="[N, D] or [1, N, 1, D] with N = Nq = Nk and an even D",
                got=f"{_shape(table)} with Nq={n_q}, Nk={n_kv}, D={head_dim}",
            )
        if not table.dtype.is_floating_point:
            raise DTypeError(f"rotary {name}", expected="a float dtype", got=str(table.dtype))
    return cos.reshape(n_q, head_dim), sin.reshape(n_q, head_dim)


def check_lengths(kv_lengths: torch.Tensor | None, batch: int) -> None:
    """Check that key lengths are an integer tensor [B].

    Their values are not read, which would wait for the device. A length over Nk means all keys.
    """
    if kv_lengths is None:
        return
    check_tensor("kv_lengths", kv_lengths)
    integers = kv_lengths.dtype in (torch.int32, torch.int64)
    if kv_lengths.shape != (batch,) or not integers:
        raise MaskError(
            "kv_lengths",
            expected=f"[{batch}] key lengths, int32 or int64",
            got=f"{_shape(kv_lengths)}, {kv_lengths.dtype}",
            remedy="Only key padding at the end and causal=True are masked exactly",
        )


def check_weight(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Check weight [Cout, Cin] and bias [Cout] of a projection of x [B, N, Cin]."""
    check_tokens("x", x)
    check_float("weight", weight)
    check_same_device(x.device, weight=weight, bias=bias)
    if weight.dim() != 2 or weight.shape[1] != x.shape[2]:
        raise ShapeError("weight", expected=f"[Cout, {x.shape[2]}]", got=_shape(weight))
    if x.dtype != weight.dtype:
        raise DTypeError(
            "weight",
            expected=f"the dtype of x, {x.dtype}",
            got=str(weight.dtype),
            remedy="Call the Linear and close the skip with ops.skip",
        )
    if bias is not None:
        check_shape("bias", bias, (weight.shape[0],))


def _checked_coefficient(
    name: str, value: Coefficient, shape: tuple[int, int, int]
) -> float | torch.Tensor:
    """Check a coefficient of a skip over [B, N, C], and return it as a float or as a tensor that
    broadcasts to that shape and keeps its float dtype."""
    if not isinstance(value, torch.Tensor):
        try:
            return float(value)
        except (TypeError, ValueError):
            raise DTypeError(
                name, expected="a number or a tensor", got=type(value).__name__
            ) from None
    check_tensor(name, value)
    if not value.dtype.is_floating_point:
        raise DTypeError(name, expected="a float dtype", got=str(value.dtype))
    if value.dtype not in _WIDE_FLOATS:  # not every compiler supports floats of 8 bits
        value = value.float()
    if value.dim() == 1 and broadcasts(value.shape, shape[:1]):
        return value.view(-1, 1, 1)
    if value.dim() == 0:
        return value.view(1, 1, 1)
    if not broadcasts(value.shape, shape):
        batch, _, channels = shape
        raise ShapeError(
            name,
            expected=f"a float, [{batch}], [{batch}, 1, {channels}] or {list(shape)}",
            got=_shape(value),
        )
    return value


def checked_coefficients(
    residual: torch.Tensor | None,
    c_skip: Coefficient,
    c_out: Coefficient,
    shape: tuple[int, int, int],
) -> tuple[float | torch.Tensor, float | torch.Tensor]:
    """Check a skip over [B, N, C], and return c_skip and c_out as `_checked_coefficient` does.

    Without a residual c_skip is no tensor.
    """
    if residual is not None:
        check_shape("residual", residual, shape)
    c_skip = _checked_coefficient("c_skip", c_skip, shape)
    c_out = _checked_coefficient("c_out", c_out, shape)
    return 1.0 if residual is None and isinstance(c_skip, torch.Tensor) else c_skip, c_out
