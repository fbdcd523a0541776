"""The skip as the last lines of a kernel: `c_skip * residual + c_out * branch`, in fp32."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["close_skip", "gelu_tanh", "load_coefficient", "scaled", "skipped"]

_SQRT_2_OVER_PI = tl.constexpr(0.7978845608028654)
_CUBE = tl.constexpr(0.044715)
_MINUS_2_LOG2_E = tl.constexpr(-2.8853900817779268)


@triton.jit
def gelu_tanh(x):
    """0.5 x (1 + tanh(u)) as x * sigmoid(2u), which cancels nowhere; fp32."""
    u = x * (1.0 + _CUBE * x * x) * _SQRT_2_OVER_PI
    return x / (1.0 + tl.exp2(u * _MINUS_2_LOG2_E))


@triton.jit
def load_coefficient(
    ptr, value, stride_b, stride_n, stride_c, b, offs_n, offs_c, mask_n, mask_c,
    FORM: tl.constexpr, ROUND_TO: tl.constexpr,
):  # fmt: skip
    """A coefficient that broadcasts against a tile [N, C], in fp32.

    FORM: 0 the number `value`, 1 varies with the batch, 2 with batch and channel, 3 with
    everything. ROUND_TO: dtype that tensor coefficients are rounded to first, or None.
    """
    c = value
    if FORM != 0:
        base = ptr + b.to(tl.int64) * stride_b
        if FORM == 1:
            c = tl.load(base)
        elif FORM == 2:
            c = tl.load(base + offs_c * stride_c, mask=mask_c, other=0.0)[None, :]
        else:
            c = tl.load(
                base + offs_n.to(tl.int64)[:, None] * stride_n + offs_c[None, :] * stride_c,
                mask=mask_n[:, None] & mask_c[None, :],
                other=0.0,
            )
        if ROUND_TO is not None:
            c = c.to(ROUND_TO)
        c = c.to(tl.float32)
    return c


@triton.jit
def _product(x, c):
    """x * c, rounded. A plain product would be contracted with the sum that follows (in 16 bits
    too, where the compiler narrows the steps), and the result would not be what eager code gives.
    """
    return tl.fma(x, c, 0.0)


@triton.jit
def _rounded(x, ROUND_TO: tl.constexpr):
    if ROUND_TO is not None:
        x = x.to(ROUND_TO).to(tl.float32)
    return x


@triton.jit
def scaled(branch, c_out, ROUND_TO: tl.constexpr):
    """c_out * branch, rounded as `close_skip` says."""
    return _rounded(_product(_rounded(branch, ROUND_TO), c_out), ROUND_TO)


@triton.jit
def skipped(y, residual, c_skip, ROUND_TO: tl.constexpr):
    """c_skip * residual + y, rounded as `close_skip` says."""
    return _rounded(_rounded(_product(residual.to(tl.float32), c_skip), ROUND_TO) + y, ROUND_TO)


@triton.jit
def close_skip(
    branch, residual_ptr, stride_b, stride_n, b, offs_n, offs_c, mask_n, mask_c,
    skip_ptr, skip_value, skip_stride_b, skip_stride_n, skip_stride_c,
    out_ptr, out_value, out_stride_b, out_stride_n, out_stride_c,
    HAS_RESIDUAL: tl.constexpr, SKIP_FORM: tl.constexpr, OUT_FORM: tl.constexpr,
    ROUND_TO: tl.constexpr,
):  # fmt: skip
    """c_skip * residual + c_out * branch for a tile `branch` [N, C] fp32.

    residual [B, N, C] with contiguous channels. ROUND_TO: None computes in fp32 throughout; a
    dtype rounds after every step. Both equal eager code bit for bit.
    """
    c_out = load_coefficient(
        out_ptr, out_value, out_stride_b, out_stride_n, out_stride_c, b, offs_n, offs_c,
        mask_n, mask_c, OUT_FORM, ROUND_TO,
    )  # fmt: skip
    y = scaled(branch, c_out, ROUND_TO)
    if HAS_RESIDUAL:
        c_skip = load_coefficient(
            skip_ptr, skip_value, skip_stride_b, skip_stride_n, skip_stride_c, b, offs_n, offs_c,
            mask_n, mask_c, SKIP_FORM, ROUND_TO,
        )  # fmt: skip
        residual = tl.load(
            residual_ptr + b.to(tl.int64) * stride_b + offs_n.to(tl.int64)[:, None] * stride_n
            + offs_c[None, :],
            mask=mask_n[:, None] & mask_c[None, :],
            other=0.0,
        )  # fmt: skip
        y = skipped(y, residual, c_skip, ROUND_TO)
    return y
