"""A skip and the norm that reads it, in one pass: the residual stream is written and not read
again."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from turbo_rcm_patch.kernels.launch import LENGTHS, dense_rows, launch, round_to, target_of
from turbo_rcm_patch.kernels.portable.norm import modulated, norm_warps, normal, wide_strides
from turbo_rcm_patch.kernels.portable.skip import scaled, skipped
from turbo_rcm_patch.kernels.replay import replayed

__all__ = ["skip_norm", "skip_norm_kernel"]


@triton.jit(do_not_specialize=LENGTHS)
def skip_norm_kernel(
    y_ptr, normed_ptr, branch_ptr, residual_ptr, gate_ptr, factor_ptr, offset_ptr,
    normed_stride_b, branch_strides, residual_strides, gate_strides, factor_strides,
    offset_strides, n_tokens, channels, eps,
    BLOCK_C: tl.constexpr, HAS_GATE: tl.constexpr, ROUND_TO: tl.constexpr,
    HAS_FACTOR: tl.constexpr, HAS_OFFSET: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    """y = residual + gate * branch, and layer_norm(y) * (ONE + factor) + offset of y as it is
    stored, a token a program.

    Grid: (tokens, batch). y [B, N, C] dense; normed [B, N, C], its rows dense within a sample;
    branch, residual [B, N, C] with contiguous channels; gate, factor and offset broadcast to them.
    Steps, layouts and so the bits are those of `skip_kernel` and `norm_modulate_kernel`.
    """
    n, b = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    offs_c = tl.arange(0, BLOCK_C)
    mask_c = offs_c < channels
    branch = tl.load(
        branch_ptr + b * branch_strides[0] + n * branch_strides[1] + offs_c,
        mask=mask_c,
        other=0.0,
    ).to(tl.float32)  # fmt: skip
    residual = tl.load(
        residual_ptr + b * residual_strides[0] + n * residual_strides[1] + offs_c,
        mask=mask_c,
        other=0.0,
    )
    c_out = 1.0
    if HAS_GATE:
        at = gate_ptr + b * gate_strides[0] + n * gate_strides[1]
        gate = tl.load(at + offs_c * gate_strides[2], mask=mask_c, other=0.0)
        if ROUND_TO is not None:
            gate = gate.to(ROUND_TO)
        c_out = gate.to(tl.float32)
    y = skipped(scaled(branch, c_out, ROUND_TO), residual, 1.0, ROUND_TO)
    y = y.to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + (b * n_tokens + n) * channels + offs_c, y, mask=mask_c)
    factors, offsets = factor_ptr, offset_ptr
    if HAS_FACTOR:
        factors += b * factor_strides[0] + n * factor_strides[1]
    if HAS_OFFSET:
        offsets += b * offset_strides[0] + n * offset_strides[1]
    x = modulated(
        normal(y.to(tl.float32), mask_c, channels, eps), factors, offsets, factor_strides[2],
        offset_strides[2], offs_c, mask_c, HAS_FACTOR, HAS_OFFSET, ONE,
    )  # fmt: skip
    out = normed_ptr + b * normed_stride_b + n * channels
    tl.store(out + offs_c, x.to(normed_ptr.dtype.element_ty), mask=mask_c)


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
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """residual + c_out * branch, and layer_norm of it * (one + factor) + offset.

    residual, branch [B, N, C]; a c_out that is a number is 1; tensors broadcast to [B, N, C].
    `out` takes the second: [B, N, C], the rows of a sample dense.
    """
    target_of(branch.device)
    batch, n_tokens, channels = branch.shape
    branch, residual = dense_rows(branch), dense_rows(residual)
    y = torch.empty(branch.shape, dtype=out_dtype, device=branch.device)
    normed = torch.empty_like(y, dtype=normed_dtype) if out is None else out
    gate = c_out if isinstance(c_out, torch.Tensor) else None
    assert gate is not None or c_out == 1.0
    launch(
        skip_norm_kernel,
        (n_tokens, batch),
        branch.device,
        y_ptr=y,
        normed_ptr=normed,
        branch_ptr=branch,
        residual_ptr=residual,
        gate_ptr=gate,
        factor_ptr=factor,
        offset_ptr=offset,
        normed_stride_b=normed.stride(0),
        branch_strides=branch.stride()[:2],
        residual_strides=residual.stride()[:2],
        gate_strides=wide_strides(gate, branch.shape),
        factor_strides=wide_strides(factor, branch.shape),
        offset_strides=wide_strides(offset, branch.shape),
        n_tokens=n_tokens,
        channels=channels,
        eps=eps,
        BLOCK_C=triton.next_power_of_2(channels),
        HAS_GATE=gate is not None,
        ROUND_TO=round_to(cast, residual.dtype),
        HAS_FACTOR=factor is not None,
        HAS_OFFSET=offset is not None,
        ONE=one,
        num_warps=norm_warps(channels),
        num_stages=1,
    )
    return y, normed
