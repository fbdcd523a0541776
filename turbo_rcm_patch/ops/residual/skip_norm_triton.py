"""A skip and the norm of its result in one pass: the residual stream is written but not read
again."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from turbo_rcm_patch.ops.formats import Int8Tensor
from turbo_rcm_patch.ops.int8_rows import empty_rows, row_arguments
from turbo_rcm_patch.ops.launch import LENGTHS, dense_rows, launch, round_to, target_of
from turbo_rcm_patch.ops.replay import replayed
from turbo_rcm_patch.ops.residual.norm_triton import (
    broadcast,
    modulated,
    modulation_arguments,
    norm_warps,
    normal,
    store_int8_norm,
)
from turbo_rcm_patch.ops.residual.skip_triton import scaled, skipped


@triton.jit
def close_row(
    y_row, branch_row, residual_row, gate, offs_c, mask_c,
    HAS_GATE: tl.constexpr, ROUND_TO: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Store residual + gate * branch for channels offs_c of a row.

    Return the stored values in fp32, 0 outside mask_c. gate: [channels], as loaded. VALUES: see
    `skip_norm`.
    """
    branch_ptrs = tl.max_contiguous(branch_row + offs_c, VALUES)
    residual_ptrs = tl.max_contiguous(residual_row + offs_c, VALUES)
    branch = tl.load(branch_ptrs, mask=mask_c, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptrs, mask=mask_c, other=0.0)
    c_out = 1.0
    if HAS_GATE:
        if ROUND_TO is not None:
            gate = gate.to(ROUND_TO)
        c_out = gate.to(tl.float32)
    y = skipped(scaled(branch, c_out, ROUND_TO), residual, 1.0, ROUND_TO)
    y = y.to(y_row.dtype.element_ty)
    tl.store(y_row + offs_c, y, mask=mask_c)
    return y.to(tl.float32)


@triton.jit
def _close(
    y_ptr, branch_ptr, residual_ptr, gate_ptr, branch_strides, residual_strides, gate_strides,
    b, n, n_tokens, channels, offs_c, mask_c,
    HAS_GATE: tl.constexpr, ROUND_TO: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Call `close_row` for token n of sample b."""
    branch_row = branch_ptr + b * branch_strides[0] + n * branch_strides[1]
    residual_row = residual_ptr + b * residual_strides[0] + n * residual_strides[1]
    gate = mask_c
    if HAS_GATE:
        gate_row = gate_ptr + b * gate_strides[0] + n * gate_strides[1]
        gate_ptrs = tl.max_contiguous(gate_row + offs_c * gate_strides[2], VALUES)
        gate = tl.load(gate_ptrs, mask=mask_c, other=0.0)
    return close_row(
        y_ptr + (b * n_tokens + n) * channels, branch_row, residual_row, gate, offs_c, mask_c,
        HAS_GATE, ROUND_TO, VALUES,
    )  # fmt: skip


@triton.jit(do_not_specialize=LENGTHS)
def skip_norm_kernel(
    y_ptr, normed_ptr, branch_ptr, residual_ptr, gate_ptr, factor_ptr, offset_ptr,
    branch_strides, residual_strides, gate_strides, factor_strides, offset_strides,
    n_tokens, channels, eps,
    BLOCK_C: tl.constexpr, HAS_GATE: tl.constexpr, ROUND_TO: tl.constexpr,
    HAS_FACTOR: tl.constexpr, HAS_OFFSET: tl.constexpr, ONE: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Compute y = residual + gate * branch, and layer_norm(y) * (ONE + factor) + offset.

    The norm reads y as it is stored. One program computes one token.
    Grid: (tokens, batch). y, normed [B, N, C] dense; branch, residual [B, N, C] with contiguous
    channels; gate, factor and offset broadcast to them.
    Steps and layouts, and so the bits, are those of `skip_kernel` and `norm_modulate_kernel`.
    """
    n, b = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    offs_c = tl.arange(0, BLOCK_C)
    mask_c = offs_c < channels
    y = _close(
        y_ptr, branch_ptr, residual_ptr, gate_ptr, branch_strides, residual_strides, gate_strides,
        b, n, n_tokens, channels, offs_c, mask_c, HAS_GATE, ROUND_TO, VALUES,
    )  # fmt: skip
    x = modulated(
        normal(y, mask_c, channels, eps), factor_ptr, offset_ptr, factor_strides, offset_strides,
        b, n, offs_c, mask_c, HAS_FACTOR, HAS_OFFSET, ONE,
    )  # fmt: skip
    out = normed_ptr + (b * n_tokens + n) * channels
    tl.store(out + offs_c, x.to(normed_ptr.dtype.element_ty), mask=mask_c)


@triton.jit(do_not_specialize=LENGTHS)
def skip_norm_rows_kernel(
    y_ptr, int8_ptr, scale_ptr, branch_ptr, residual_ptr, gate_ptr, factor_ptr, offset_ptr,
    branch_strides, residual_strides, gate_strides, factor_strides, offset_strides,
    n_tokens, channels, padded, eps,
    HEAD: tl.constexpr, TAIL: tl.constexpr, HAS_GATE: tl.constexpr, ROUND_TO: tl.constexpr,
    HAS_FACTOR: tl.constexpr, HAS_OFFSET: tl.constexpr, ONE: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Compute `skip_norm_kernel` with the norm as int8 rows and their scales.

    Grid: (tokens, batch). int8 [B, N, padded] dense, 0 from channel C on; scale [B, N] fp32.
    Steps and layouts, and so the bits, are those of `skip_kernel` and `norm_modulate_rows_kernel`.
    """
    n, b = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    offs_h = tl.arange(0, HEAD)
    mask_h = offs_h < channels
    head = _close(
        y_ptr, branch_ptr, residual_ptr, gate_ptr, branch_strides, residual_strides, gate_strides,
        b, n, n_tokens, channels, offs_h, mask_h, HAS_GATE, ROUND_TO, VALUES,
    )  # fmt: skip
    tail, offs_t, mask_t = head, offs_h, mask_h
    if TAIL:
        offs_t = HEAD + tl.arange(0, TAIL)
        mask_t = offs_t < channels
        tail = _close(
            y_ptr, branch_ptr, residual_ptr, gate_ptr, branch_strides, residual_strides,
            gate_strides, b, n, n_tokens, channels, offs_t, mask_t, HAS_GATE, ROUND_TO, VALUES,
        )  # fmt: skip
    store_int8_norm(
        int8_ptr, scale_ptr, head, offs_h, mask_h, tail, offs_t, mask_t, factor_ptr, offset_ptr,
        factor_strides, offset_strides, b, n, n_tokens, channels, padded, eps,
        TAIL, HAS_FACTOR, HAS_OFFSET, ONE,
    )  # fmt: skip


@replayed
def skip_norm(
    residual: torch.Tensor,
    branch: torch.Tensor,
    c_out: float | torch.Tensor,
    factor: torch.Tensor | None,
    offset: torch.Tensor | None,
    *,
    cast: str,
    out_dtype: torch.dtype,
    one: float,
    eps: float,
    normed_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor | Int8Tensor]:
    """Compute y = residual + c_out * branch, and layer_norm(y) * (one + factor) + offset.

    residual, branch [B, N, C]; c_out is a tensor or the number 1; tensors broadcast to [B, N, C].
    The norm has `normed_dtype`; with torch.int8 it is int8 rows and their scales.

    A thread holds VALUES neighbouring channels: as many as the norm's own kernel reads at once,
    whatever the dtype of the branch. So both kernels sum a row in the same order.
    """
    target_of(branch.device)
    batch, n_tokens, channels = branch.shape
    branch, residual = dense_rows(branch), dense_rows(residual)
    gate = c_out if isinstance(c_out, torch.Tensor) else None
    assert gate is not None or c_out == 1.0
    gate, gate_strides = broadcast(gate, branch.shape)
    rows = normed_dtype == torch.int8
    dtypes = [out_dtype, out_dtype if rows else normed_dtype]
    dtypes += [x.dtype for x in (factor, offset) if x is not None]
    y = torch.empty(batch, n_tokens, channels, dtype=out_dtype, device=branch.device)
    arguments = {
        "y_ptr": y,
        "branch_ptr": branch,
        "residual_ptr": residual,
        "gate_ptr": gate,
        "branch_strides": branch.stride()[:2],
        "residual_strides": residual.stride()[:2],
        "gate_strides": gate_strides,
        "n_tokens": n_tokens,
        "channels": channels,
        "eps": eps,
        "HAS_GATE": gate is not None,
        "ROUND_TO": round_to(cast, residual.dtype),
        "VALUES": 16 // min([dtype.itemsize for dtype in dtypes]),
        **modulation_arguments(factor, offset, one, branch.shape),
    }
    grid = n_tokens, batch
    if rows:
        int8 = empty_rows(batch, n_tokens, channels, branch.device)
        launch(skip_norm_rows_kernel, grid, branch.device, **row_arguments(int8), **arguments)
        return y, int8
    normed = torch.empty_like(y, dtype=normed_dtype)
    launch(
        skip_norm_kernel,
        grid,
        branch.device,
        normed_ptr=normed,
        BLOCK_C=triton.next_power_of_2(channels),
        num_warps=norm_warps(channels),
        num_stages=1,
        **arguments,
    )
    return y, normed
