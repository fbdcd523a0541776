"""Skips and norms of two residual streams, text and video, that are one sequence inside a branch.
One launch serves both.

With short sequences the number of launches limits the speed. To combine the modulation of a stream
with weight and bias of its layer norm would take four more launches, so the kernel does it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from turbo_rcm_patch.ops.launch import LENGTHS, dense_rows, launch, round_to, target_of
from turbo_rcm_patch.ops.replay import replayed
from turbo_rcm_patch.ops.residual.norm_triton import broadcast, norm_warps, normal
from turbo_rcm_patch.ops.residual.skip_norm_triton import close_row

#: A tensor for each stream.
Two = tuple[torch.Tensor, torch.Tensor]


@triton.jit
def _row(second, first_ptr, first_strides, second_ptr, second_strides, b, n):
    """Return a pointer to row n of sample b of one of two tensors; n counts within its stream."""
    first = first_ptr + b * first_strides[0] + n * first_strides[1]
    other = second_ptr + b * second_strides[0] + n * second_strides[1]
    return tl.where(second, other, first)


@triton.jit(do_not_specialize=LENGTHS)
def streams_kernel(
    first_y_ptr, second_y_ptr, normed_ptr, branch_ptr,
    first_x_ptr, second_x_ptr, first_gate_ptr, second_gate_ptr,
    first_factor_ptr, second_factor_ptr, first_offset_ptr, second_offset_ptr,
    weight_ptr, bias_ptr,
    branch_strides, first_x_strides, second_x_strides, first_gate_strides, second_gate_strides,
    first_factor_strides, second_factor_strides, first_offset_strides, second_offset_strides,
    n_tokens, rows, channels, eps,
    BLOCK_C: tl.constexpr, SKIP: tl.constexpr, ROUND_TO: tl.constexpr, NORM: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, ONE: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Compute the skip of each stream (SKIP), and the norm of both as one sequence (NORM).

    The skip is y = x + gate * branch. The norm is (layer_norm * weight + bias) * (ONE + factor) +
    offset, of y or, without SKIP, of x.

    Grid: (tokens of both streams, batch). The first n_tokens of `rows` are the first stream's.
    x [B, Ni, C] with contiguous channels; y [B, Ni, C] dense; branch [B, rows, C];
    normed [B, rows, C] dense; gate, factor and offset broadcast to x, and their strides end with
    that of channels; weight, bias [C].
    Steps and layouts, and so the bits of skip and norm, are those of `skip_norm_kernel`.
    """
    at, b = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    second = at >= n_tokens
    n = tl.where(second, at - n_tokens, at)
    offs_c = tl.arange(0, BLOCK_C)
    mask_c = offs_c < channels
    x_row = _row(second, first_x_ptr, first_x_strides, second_x_ptr, second_x_strides, b, n)
    if SKIP:
        gate_row = _row(
            second, first_gate_ptr, first_gate_strides, second_gate_ptr, second_gate_strides, b, n
        )
        stride = tl.where(second, second_gate_strides[2], first_gate_strides[2])
        gate = tl.load(
            tl.max_contiguous(gate_row + offs_c * stride, VALUES), mask=mask_c, other=0.0
        )
        y_row = tl.where(
            second,
            second_y_ptr + (b * (rows - n_tokens) + n) * channels,
            first_y_ptr + (b * n_tokens + n) * channels,
        )
        branch_row = branch_ptr + b * branch_strides[0] + at * branch_strides[1]
        x = close_row(
            y_row, branch_row, x_row, gate, offs_c, mask_c, True, ROUND_TO, VALUES
        )  # fmt: skip
    else:
        x_ptrs = tl.max_contiguous(x_row + offs_c, VALUES)
        x = tl.load(x_ptrs, mask=mask_c, other=0.0).to(tl.float32)
    if NORM:
        factor_row = _row(
            second, first_factor_ptr, first_factor_strides, second_factor_ptr,
            second_factor_strides, b, n,
        )  # fmt: skip
        offset_row = _row(
            second, first_offset_ptr, first_offset_strides, second_offset_ptr,
            second_offset_strides, b, n,
        )  # fmt: skip
        stride = tl.where(second, second_factor_strides[2], first_factor_strides[2])
        factor = tl.load(factor_row + offs_c * stride, mask=mask_c, other=0.0)
        factor = factor.to(tl.float32) + ONE
        stride = tl.where(second, second_offset_strides[2], first_offset_strides[2])
        offset = tl.load(offset_row + offs_c * stride, mask=mask_c, other=0.0).to(tl.float32)
        if HAS_BIAS:
            offset += factor * tl.load(bias_ptr + offs_c, mask=mask_c, other=0.0).to(tl.float32)
        if HAS_WEIGHT:
            factor *= tl.load(weight_ptr + offs_c, mask=mask_c, other=0.0).to(tl.float32)
        y = normal(x, mask_c, channels, eps) * factor + offset
        out = normed_ptr + (b * rows + at) * channels
        tl.store(out + offs_c, y.to(normed_ptr.dtype.element_ty), mask=mask_c)


@replayed
def streams(
    x: Two,
    branch: torch.Tensor | None,
    gate: Two | None,
    factor: Two | None,
    offset: Two | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    *,
    cast: str,
    one: float,
    eps: float,
    out_dtype: torch.dtype,
    normed_dtype: torch.dtype,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Compute the skip of two streams, their norm, or both.

    Args:
        x: [B, Ni, C] each.
        branch: [B, N1 + N2, C]; None for no skip.
        gate: Gates that broadcast to the streams; None without a branch.
        factor: Factors that broadcast to the streams; None for no norm.
        offset: Offsets that broadcast to the streams; None without a factor.
        weight: Weight of the layer norm, [C] or None.
        bias: Bias of the layer norm, [C] or None.
        cast: Cast policy of the skip, as in `ops.skip`.
        one: Added to the factor.
        eps: Epsilon of the norm.
        out_dtype: dtype of the sums.
        normed_dtype: dtype of the norm.

    Returns:
        The two sums [B, Ni, C], or None without a branch, and the norm of them (without a branch,
        of x) as one sequence [B, N1 + N2, C], or None without a factor.
    """
    device = x[0].device
    target_of(device)
    batch, n_tokens, channels = x[0].shape
    rows = n_tokens + x[1].shape[1]
    first, second = dense_rows(x[0]), dense_rows(x[1])
    y: tuple[torch.Tensor | None, ...] = (None, None)
    dtypes = [first.dtype]
    branch_strides: tuple[int, ...] = (0, 0)
    if branch is not None:
        branch = dense_rows(branch)
        branch_strides = branch.stride()[:2]
        y = tuple([torch.empty(part.shape, dtype=out_dtype, device=device) for part in x])
        dtypes = [out_dtype]
    normed = None
    if factor is not None:
        normed = torch.empty(batch, rows, channels, dtype=normed_dtype, device=device)
        assert offset is not None
        dtypes += [normed_dtype, factor[0].dtype, offset[0].dtype]
    arguments: dict[str, object] = {}
    for name, pair in (("gate", gate), ("factor", factor), ("offset", offset)):
        for side, part, like in zip(("first", "second"), pair or (None, None), x, strict=True):
            value, strides = broadcast(part, like.shape)
            arguments[f"{side}_{name}_ptr"] = value
            arguments[f"{side}_{name}_strides"] = strides
    launch(
        streams_kernel,
        (rows, batch),
        device,
        first_y_ptr=y[0],
        second_y_ptr=y[1],
        normed_ptr=normed,
        branch_ptr=branch,
        first_x_ptr=first,
        second_x_ptr=second,
        weight_ptr=None if weight is None else weight.contiguous(),
        bias_ptr=None if bias is None else bias.contiguous(),
        branch_strides=branch_strides,
        first_x_strides=first.stride()[:2],
        second_x_strides=second.stride()[:2],
        n_tokens=n_tokens,
        rows=rows,
        channels=channels,
        eps=eps,
        BLOCK_C=triton.next_power_of_2(channels),
        SKIP=branch is not None,
        ROUND_TO=round_to(cast, first.dtype),
        NORM=factor is not None,
        HAS_WEIGHT=weight is not None,
        HAS_BIAS=bias is not None,
        ONE=one,
        VALUES=16 // min([dtype.itemsize for dtype in dtypes]),
        **arguments,
        num_warps=norm_warps(channels),
        num_stages=1,
    )
    return y[0], y[1], normed
