"""Layer norm with its modulation, straight to int8 rows: what a W8A8 linear multiplies."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from turbo_rcm_patch.kernels.launch import LENGTHS, dense_rows, launch, target_of
from turbo_rcm_patch.kernels.replay import replayed
from turbo_rcm_patch.kernels.rows import (
    Rows,
    amax_poison,
    empty_rows,
    int8_scale,
    magnitude,
    nearest_int8,
    row_parts,
    row_warps,
)

__all__ = ["norm_modulate_rows", "norm_modulate_rows_kernel"]


@triton.jit
def _modulated(
    x, factor_ptr, offset_ptr, factor_stride_c, offset_stride_c, offs_c, mask_c,
    HAS_FACTOR: tl.constexpr, HAS_OFFSET: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    """x * (ONE + factor) + offset for channels offs_c of one token, 0 outside mask_c; fp32."""
    if HAS_FACTOR:
        factor = tl.load(factor_ptr + offs_c * factor_stride_c, mask=mask_c, other=0.0)
        x *= factor.to(tl.float32) + ONE
    if HAS_OFFSET:
        offset = tl.load(offset_ptr + offs_c * offset_stride_c, mask=mask_c, other=0.0)
        x += offset.to(tl.float32)
    return x


@triton.jit
def _store_int8(out, x, inverse, offs_c, padded):
    int8 = nearest_int8(x[None, :], inverse[None])
    tl.store(out + offs_c[None, :], int8, mask=(offs_c < padded)[None, :])


@triton.jit(do_not_specialize=LENGTHS)
def norm_modulate_rows_kernel(
    int8_ptr, scale_ptr, x_ptr, factor_ptr, offset_ptr,
    x_stride_b, x_stride_n,
    factor_stride_b, factor_stride_n, factor_stride_c,
    offset_stride_b, offset_stride_n, offset_stride_c,
    n_tokens, channels, padded, eps,
    HEAD: tl.constexpr, TAIL: tl.constexpr,
    HAS_FACTOR: tl.constexpr, HAS_OFFSET: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    """int8 rows of layer_norm(x) * (ONE + factor) + offset and their scales, a token a program.

    Grid: (tokens, batch). x [B, N, C] with contiguous channels; factor and offset broadcast to it;
    int8 [B, N, padded] dense, 0 from channel C on; scale [B, N] fp32. HEAD, TAIL: as in
    `rows.quantize_rows_kernel`. Everything in fp32: no rounding before the one to int8.
    """
    n, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = x_ptr + b * x_stride_b + n.to(tl.int64) * x_stride_n
    factors = factor_ptr
    if HAS_FACTOR:
        factors += b * factor_stride_b + n.to(tl.int64) * factor_stride_n
    offsets = offset_ptr
    if HAS_OFFSET:
        offsets += b * offset_stride_b + n.to(tl.int64) * offset_stride_n
    offs_h = tl.arange(0, HEAD)
    mask_h = offs_h < channels
    head = tl.load(row + offs_h, mask=mask_h, other=0.0).to(tl.float32)
    total = tl.sum(head, axis=0)
    if TAIL:
        offs_t = HEAD + tl.arange(0, TAIL)
        mask_t = offs_t < channels
        tail = tl.load(row + offs_t, mask=mask_t, other=0.0).to(tl.float32)
        total += tl.sum(tail, axis=0)
    mean = total / channels
    head = tl.where(mask_h, head - mean, 0.0)
    squares = tl.sum(head * head, axis=0)
    if TAIL:
        tail = tl.where(mask_t, tail - mean, 0.0)
        squares += tl.sum(tail * tail, axis=0)
    inverse_std = 1.0 / tl.sqrt(squares / channels + eps)
    head = _modulated(
        head * inverse_std, factors, offsets, factor_stride_c, offset_stride_c, offs_h, mask_h,
        HAS_FACTOR, HAS_OFFSET, ONE,
    )  # fmt: skip
    bits = tl.max(magnitude(head), axis=0)
    if TAIL:
        tail = _modulated(
            tail * inverse_std, factors, offsets, factor_stride_c, offset_stride_c, offs_t,
            mask_t, HAS_FACTOR, HAS_OFFSET, ONE,
        )  # fmt: skip
        bits = tl.maximum(bits, tl.max(magnitude(tail), axis=0))
    amax, poison = amax_poison(bits)
    scale, inverse = int8_scale(amax, poison)
    tl.store(scale_ptr + b * n_tokens + n, scale)
    out = int8_ptr + (b * n_tokens + n) * padded
    _store_int8(out, head, inverse, offs_h, padded)
    if TAIL:
        _store_int8(out, tail, inverse, offs_t, padded)


@replayed
def norm_modulate_rows(
    x: torch.Tensor,
    factor: torch.Tensor | None,
    offset: torch.Tensor | None,
    *,
    one: float,
    eps: float,
) -> Rows:
    """layer_norm(x) * (one + factor) + offset in int8 rows; x [B, N, C], factor and offset
    broadcast to it."""
    target_of(x.device)
    batch, n_tokens, channels = x.shape
    x = dense_rows(x)
    rows = empty_rows(batch, n_tokens, channels, x.device)
    padded = rows.int8.shape[2]
    head, tail = row_parts(padded)
    strides = {}
    for name, value in (("factor", factor), ("offset", offset)):
        wide = (0, 0, 0) if value is None else value.expand(x.shape).stride()
        strides |= {f"{name}_stride_{axis}": s for axis, s in zip("bnc", wide, strict=True)}
    launch(
        norm_modulate_rows_kernel,
        (n_tokens, batch),
        x.device,
        int8_ptr=rows.int8,
        scale_ptr=rows.scale,
        x_ptr=x,
        factor_ptr=factor,
        offset_ptr=offset,
        x_stride_b=x.stride(0),
        x_stride_n=x.stride(1),
        n_tokens=n_tokens,
        channels=channels,
        padded=padded,
        eps=eps,
        HEAD=head,
        TAIL=tail,
        HAS_FACTOR=factor is not None,
        HAS_OFFSET=offset is not None,
        ONE=one,
        num_warps=row_warps(head + tail),
        num_stages=1,
        **strides,
    )
    return rows
