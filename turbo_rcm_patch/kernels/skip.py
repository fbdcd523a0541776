"""The elementwise skip: one pass over residual and branch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from turbo_rcm_patch.kernels.epilogue import close_skip
from turbo_rcm_patch.kernels.launch import (
    LENGTHS,
    cdiv,
    coefficient,
    dense_rows,
    launch,
    round_to,
    skip_arguments,
    target_of,
    tile_for,
)
from turbo_rcm_patch.kernels.replay import replayed

__all__ = ["skip", "skip_kernel"]


@triton.jit(do_not_specialize=LENGTHS)
def skip_kernel(
    y_ptr, branch_ptr, residual_ptr, skip_ptr, out_ptr,
    branch_stride_b, branch_stride_n, residual_stride_b, residual_stride_n,
    skip_value, skip_stride_b, skip_stride_n, skip_stride_c,
    out_value, out_stride_b, out_stride_n, out_stride_c,
    n_tokens, channels,
    BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, SKIP_FORM: tl.constexpr, OUT_FORM: tl.constexpr,
    ROUND_TO: tl.constexpr,
):  # fmt: skip
    """y = c_skip * residual + c_out * branch.

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
        branch_ptr + b.to(tl.int64) * branch_stride_b
        + offs_n.to(tl.int64)[:, None] * branch_stride_n + offs_c[None, :],
        mask=mask,
        other=0.0,
    ).to(tl.float32)  # fmt: skip
    y = close_skip(
        branch, residual_ptr, residual_stride_b, residual_stride_n, b, offs_n, offs_c,
        mask_n, mask_c,
        skip_ptr, skip_value, skip_stride_b, skip_stride_n, skip_stride_c,
        out_ptr, out_value, out_stride_b, out_stride_n, out_stride_c,
        HAS_RESIDUAL, SKIP_FORM, OUT_FORM, ROUND_TO,
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
    """c_skip * residual + c_out * branch; tensors [B, N, C], coefficients broadcast to it."""
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
        branch_stride_b=branch.stride(0),
        branch_stride_n=branch.stride(1),
        n_tokens=n_tokens,
        channels=channels,
        BLOCK_N=tile.block_m,
        BLOCK_C=tile.block_n,
        ROUND_TO=round_to(cast, dtype),
        **skip_arguments(
            residual, coefficient(c_skip, branch.shape), coefficient(c_out, branch.shape)
        ),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return y
