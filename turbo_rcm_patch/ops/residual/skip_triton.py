"""The elementwise skip: one pass over residual and branch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from turbo_rcm_patch.ops.launch import (
    LENGTHS,
    cdiv,
    dense_rows,
    launch,
    round_to,
    skip_arguments,
    strides,
    target_of,
    tile_for,
)
from turbo_rcm_patch.ops.replay import replayed

_SQRT_2_OVER_PI = tl.constexpr(0.7978845608028654)
_CUBE = tl.constexpr(0.044715)
_MINUS_2_LOG2_E = tl.constexpr(-2.8853900817779268)


@triton.jit
def gelu_tanh(x):
    """Compute 0.5 x (1 + tanh(u)) in fp32 as x * sigmoid(2u), which has no cancellation."""
    u = x * (1.0 + _CUBE * x * x) * _SQRT_2_OVER_PI
    return x / (1.0 + tl.exp2(u * _MINUS_2_LOG2_E))


@triton.jit
def load_coefficient(
    ptr, value, strides, b, offs_n, offs_c, mask_n, mask_c,
    KIND: tl.constexpr, ROUND_TO: tl.constexpr,
):  # fmt: skip
    """Load a coefficient that broadcasts against a tile [N, C], in fp32.

    KIND: 0 for the number `value`, or a tensor that varies with 1 batch, 2 batch and channel,
    3 batch, token and channel. ROUND_TO: dtype to which tensors are rounded first, or None.
    """
    c = value
    if KIND != 0:
        base = ptr + b.to(tl.int64) * strides[0]
        if KIND == 1:
            c = tl.load(base)
        elif KIND == 2:
            c = tl.load(base + offs_c * strides[2], mask=mask_c, other=0.0)[None, :]
        else:
            c = tl.load(
                base + offs_n.to(tl.int64)[:, None] * strides[1] + offs_c[None, :] * strides[2],
                mask=mask_n[:, None] & mask_c[None, :],
                other=0.0,
            )
        if ROUND_TO is not None:
            c = c.to(ROUND_TO)
        c = c.to(tl.float32)
    return c


@triton.jit
def _product(x, c):
    """Compute x * c, rounded.

    A plain product would be contracted with the sum after it (in 16 bits too, where the compiler
    narrows the steps), and the result would differ from eager code.
    """
    return tl.fma(x, c, 0.0)


@triton.jit
def _rounded(x, ROUND_TO: tl.constexpr):
    if ROUND_TO is not None:
        x = x.to(ROUND_TO).to(tl.float32)
    return x


@triton.jit
def scaled(branch, c_out, ROUND_TO: tl.constexpr):
    """Compute c_out * branch, rounded as in `close_skip`."""
    return _rounded(_product(_rounded(branch, ROUND_TO), c_out), ROUND_TO)


@triton.jit
def skipped(y, residual, c_skip, ROUND_TO: tl.constexpr):
    """Compute c_skip * residual + y, rounded as in `close_skip`."""
    return _rounded(_rounded(_product(residual.to(tl.float32), c_skip), ROUND_TO) + y, ROUND_TO)


@triton.jit
def close_skip(
    branch, residual_ptr, strides, b, offs_n, offs_c, mask_n, mask_c,
    skip_ptr, skip_value, skip_strides, out_ptr, out_value, out_strides,
    HAS_RESIDUAL: tl.constexpr, SKIP_KIND: tl.constexpr, OUT_KIND: tl.constexpr,
    ROUND_TO: tl.constexpr,
):  # fmt: skip
    """Compute c_skip * residual + c_out * branch for a tile `branch` [N, C] fp32.

    residual [B, N, C] with contiguous channels. ROUND_TO: None computes in fp32 throughout; a
    dtype rounds after every step. Both equal eager code bit for bit.
    """
    c_out = load_coefficient(
        out_ptr, out_value, out_strides, b, offs_n, offs_c,
        mask_n, mask_c, OUT_KIND, ROUND_TO,
    )  # fmt: skip
    y = scaled(branch, c_out, ROUND_TO)
    if HAS_RESIDUAL:
        c_skip = load_coefficient(
            skip_ptr, skip_value, skip_strides, b, offs_n, offs_c,
            mask_n, mask_c, SKIP_KIND, ROUND_TO,
        )  # fmt: skip
        residual = tl.load(
            residual_ptr + b.to(tl.int64) * strides[0]
            + offs_n.to(tl.int64)[:, None] * strides[1] + offs_c[None, :],
            mask=mask_n[:, None] & mask_c[None, :],
            other=0.0,
        )  # fmt: skip
        y = skipped(y, residual, c_skip, ROUND_TO)
    return y


@triton.jit(do_not_specialize=LENGTHS)
def skip_kernel(
    y_ptr, branch_ptr, residual_ptr, skip_ptr, out_ptr,
    branch_strides, residual_strides,
    skip_value, skip_strides, out_value, out_strides,
    n_tokens, channels,
    BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, SKIP_KIND: tl.constexpr, OUT_KIND: tl.constexpr,
    ROUND_TO: tl.constexpr,
):  # fmt: skip
    """Compute y = c_skip * residual + c_out * branch.

    Grid: (blocks of tokens * blocks of channels, batch).
    y [B, N, C] dense; branch, residual [B, N, C] with contiguous channels.
    """
    blocks_c = tl.cdiv(channels, BLOCK_C)
    pid, b = tl.program_id(0), tl.program_id(1)
    offs_n = (pid // blocks_c) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_c = (pid % blocks_c) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_n, mask_c = offs_n < n_tokens, offs_c < channels
    mask = mask_n[:, None] & mask_c[None, :]
    branch = tl.load(
        branch_ptr + b.to(tl.int64) * branch_strides[0]
        + offs_n.to(tl.int64)[:, None] * branch_strides[1] + offs_c[None, :],
        mask=mask,
        other=0.0,
    ).to(tl.float32)  # fmt: skip
    y = close_skip(
        branch, residual_ptr, residual_strides, b, offs_n, offs_c,
        mask_n, mask_c,
        skip_ptr, skip_value, skip_strides, out_ptr, out_value, out_strides,
        HAS_RESIDUAL, SKIP_KIND, OUT_KIND, ROUND_TO,
    )  # fmt: skip
    rows = (b.to(tl.int64) * n_tokens + offs_n.to(tl.int64)) * channels
    tl.store(y_ptr + rows[:, None] + offs_c[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@replayed
def skip(
    residual: torch.Tensor | None,
    branch: torch.Tensor,
    c_skip: float | torch.Tensor,
    c_out: float | torch.Tensor,
    *,
    cast: str,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Compute c_skip * residual + c_out * branch of [B, N, C]; coefficients broadcast to it."""
    tile = tile_for("skip", "any", target_of(branch.device))
    batch, n_tokens, channels = branch.shape
    branch = dense_rows(branch)
    y = torch.empty(batch, n_tokens, channels, dtype=out_dtype, device=branch.device)
    dtype = out_dtype if residual is None else residual.dtype
    launch(
        skip_kernel,
        (cdiv(n_tokens, tile.block_m) * cdiv(channels, tile.block_n), batch),
        branch.device,
        y_ptr=y,
        branch_ptr=branch,
        **strides(branch=branch),
        n_tokens=n_tokens,
        channels=channels,
        BLOCK_N=tile.block_m,
        BLOCK_C=tile.block_n,
        ROUND_TO=round_to(cast, dtype),
        **skip_arguments(residual, c_skip, c_out, branch.shape),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return y
