"""Norms in one pass over memory: layer norm with modulation, and the norm of q or k with rotary
embedding."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from turbo_rcm_patch.ops.formats import Int8Tensor, norm_kind
from turbo_rcm_patch.ops.int8_rows import (
    amax_poison,
    empty_rows,
    int8_scale,
    magnitude,
    nearest_int8,
    row_arguments,
)
from turbo_rcm_patch.ops.launch import LENGTHS, dense_rows, launch, target_of
from turbo_rcm_patch.ops.replay import replayed


@triton.jit
def normal(x, mask_c, channels, eps):
    """Normalise a row x [C] fp32 to (x - mean) / std, 0 outside mask_c."""
    mean = tl.sum(x, axis=0) / channels
    x = tl.where(mask_c, x - mean, 0.0)
    return x * (1.0 / tl.sqrt(tl.sum(x * x, axis=0) / channels + eps))


@triton.jit
def modulated(
    x, factor_ptr, offset_ptr, factor_strides, offset_strides, b, n, offs_c, mask_c,
    HAS_FACTOR: tl.constexpr, HAS_OFFSET: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    """Return x * (ONE + factor) + offset for channels offs_c of token n of sample b, in fp32.

    It is 0 outside mask_c.
    """
    if HAS_FACTOR:
        factors = factor_ptr + b * factor_strides[0] + n * factor_strides[1]
        factor = tl.load(factors + offs_c * factor_strides[2], mask=mask_c, other=0.0)
        x *= factor.to(tl.float32) + ONE
    if HAS_OFFSET:
        offsets = offset_ptr + b * offset_strides[0] + n * offset_strides[1]
        offset = tl.load(offsets + offs_c * offset_strides[2], mask=mask_c, other=0.0)
        x += offset.to(tl.float32)
    return x


@triton.jit(do_not_specialize=LENGTHS)
def norm_modulate_kernel(
    y_ptr, x_ptr, factor_ptr, offset_ptr,
    y_stride_b, x_strides, factor_strides, offset_strides, channels, eps,
    BLOCK_C: tl.constexpr, HAS_FACTOR: tl.constexpr, HAS_OFFSET: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    """Compute y = layer_norm(x) * (ONE + factor) + offset, one token per program.

    Grid: (tokens, batch). x, y [B, N, C] with contiguous channels, the rows of y dense within a
    sample; factor and offset broadcast to [B, N, C].
    """
    n, b = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    offs_c = tl.arange(0, BLOCK_C)
    mask_c = offs_c < channels
    row = x_ptr + b * x_strides[0] + n * x_strides[1]
    x = tl.load(row + offs_c, mask=mask_c, other=0.0).to(tl.float32)
    x = modulated(
        normal(x, mask_c, channels, eps), factor_ptr, offset_ptr, factor_strides, offset_strides,
        b, n, offs_c, mask_c, HAS_FACTOR, HAS_OFFSET, ONE,
    )  # fmt: skip
    out = y_ptr + b * y_stride_b + n * channels
    tl.store(out + offs_c, x.to(y_ptr.dtype.element_ty), mask=mask_c)


def broadcast(
    value: torch.Tensor | None, shape: torch.Size
) -> tuple[torch.Tensor | None, tuple[int, int, int]]:
    """Return a tensor that broadcasts to [B, N, C] and its strides over that, 0 for None.

    It is copied if the offset of its last channel would overflow the 32 bits of the kernels.
    """
    if value is None:
        return None, (0, 0, 0)
    stride_b, stride_n, stride_c = value.expand(shape).stride()
    if stride_c * shape[2] >= 2**31:
        return broadcast(value.contiguous(), shape)
    return value, (stride_b, stride_n, stride_c)


def modulation_arguments(
    factor: torch.Tensor | None, offset: torch.Tensor | None, one: float, shape: torch.Size
) -> dict[str, object]:
    """Return the arguments of `modulated`; factor and offset broadcast to `shape` [B, N, C]."""
    factor, factor_strides = broadcast(factor, shape)
    offset, offset_strides = broadcast(offset, shape)
    return {
        "factor_ptr": factor,
        "offset_ptr": offset,
        "factor_strides": factor_strides,
        "offset_strides": offset_strides,
        "HAS_FACTOR": factor is not None,
        "HAS_OFFSET": offset is not None,
        "ONE": one,
    }


def norm_warps(channels: int) -> int:
    """Return the number of warps of a program that holds a row of `channels`."""
    return 4 if channels <= 2048 else 8


@replayed
def norm_modulate(
    x: torch.Tensor,
    factor: torch.Tensor | None,
    offset: torch.Tensor | None,
    *,
    one: float,
    eps: float,
    out_dtype: torch.dtype,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute layer_norm(x) * (one + factor) + offset; factor and offset broadcast to x [B, N, C].

    The result is written into `out` if given: [B, N, C] whose rows are dense within a sample, such
    as a part of a longer sequence.
    """
    target_of(x.device)
    batch, n_tokens, channels = x.shape
    x = dense_rows(x)
    y = torch.empty(x.shape, dtype=out_dtype, device=x.device) if out is None else out
    launch(
        norm_modulate_kernel,
        (n_tokens, batch),
        x.device,
        y_ptr=y,
        x_ptr=x,
        y_stride_b=y.stride(0),
        x_strides=x.stride()[:2],
        channels=channels,
        eps=eps,
        BLOCK_C=triton.next_power_of_2(channels),
        **modulation_arguments(factor, offset, one, x.shape),
        num_warps=norm_warps(channels),
        num_stages=1,
    )
    return y


@triton.jit(do_not_specialize=LENGTHS)
def norm_rotate_kernel(
    y_ptr, x_ptr, weight_ptr, bias_ptr, cos_ptr, sin_ptr,
    x_strides, n_tokens, eps,
    CHANNELS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_C: tl.constexpr,
    NORM: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    """Apply the norm of q or k (NORM as in `operands`), then the rotary embedding (ROPE).

    Grid: (tokens, batch). x [B, N, H*D] with contiguous channels, y dense; weight [H*D], or [D]
    per head, for which D is a power of two; bias [D]; cos, sin [N, D].
    """
    n, b = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    offs_c = tl.arange(0, BLOCK_C)
    mask_c = offs_c < CHANNELS
    row = x_ptr + b * x_strides[0] + n * x_strides[1]
    x = tl.load(row + offs_c, mask=mask_c, other=0.0).to(tl.float32)
    if NORM == 1:  # across all heads
        w = tl.load(weight_ptr + offs_c, mask=mask_c, other=0.0).to(tl.float32)
        x = x * (1.0 / tl.sqrt(tl.sum(x * x, axis=0) / CHANNELS + eps)) * w
    elif NORM >= 2:  # per head
        x = tl.reshape(x, [BLOCK_C // HEAD_DIM, HEAD_DIM])
        if NORM == 3:  # layer norm
            x -= (tl.sum(x, axis=1) / HEAD_DIM)[:, None]
        x *= (1.0 / tl.sqrt(tl.sum(x * x, axis=1) / HEAD_DIM + eps))[:, None]
        x = tl.reshape(x, [BLOCK_C])
        own = offs_c % HEAD_DIM
        x *= tl.load(weight_ptr + own, mask=mask_c, other=0.0).to(tl.float32)
        if NORM == 3:
            x += tl.load(bias_ptr + own, mask=mask_c, other=0.0).to(tl.float32)
    if ROPE:
        table = n * HEAD_DIM + offs_c % HEAD_DIM
        cos = tl.load(cos_ptr + table, mask=mask_c, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + table, mask=mask_c, other=0.0).to(tl.float32)
        even, odd = tl.split(tl.reshape(x, [BLOCK_C // 2, 2]))
        c, _ = tl.split(tl.reshape(cos, [BLOCK_C // 2, 2]))
        _, s = tl.split(tl.reshape(sin, [BLOCK_C // 2, 2]))
        x = tl.reshape(tl.join(even * c - odd * s, even * s + odd * c), [BLOCK_C])
    out = y_ptr + (b * n_tokens + n) * CHANNELS
    tl.store(out + offs_c, x.to(y_ptr.dtype.element_ty), mask=mask_c)


@replayed
def norm_rotate(
    x: torch.Tensor,
    heads: int,
    *,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    eps: float,
    by_head: bool = False,
) -> torch.Tensor:
    """Apply norm and rotary embedding to x [B, N, H*D]; the result is dense, in the dtype of x.

    weight [H*D] or None; if D is a power of two, also [D] with a bias [D] (layer norm of each
    head) or without (RMSNorm of each head). cos and sin [N, D] or None. With by_head the result is
    viewed as [B, H, N, D].
    """
    target_of(x.device)
    batch, n_tokens, channels = x.shape
    x = dense_rows(x)
    if by_head:
        dim = channels // heads
        strides = (n_tokens * channels, dim, channels, 1)
        y = x.new_empty_strided((batch, heads, n_tokens, dim), strides)
    else:
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch(
        norm_rotate_kernel,
        (n_tokens, batch),
        x.device,
        y_ptr=y,
        x_ptr=x,
        weight_ptr=None if weight is None else weight.contiguous(),
        bias_ptr=None if bias is None else bias.contiguous(),
        cos_ptr=None if cos is None else cos.contiguous(),
        sin_ptr=None if sin is None else sin.contiguous(),
        x_strides=x.stride()[:2],
        n_tokens=n_tokens,
        eps=eps,
        CHANNELS=channels,
        HEAD_DIM=channels // heads,
        BLOCK_C=triton.next_power_of_2(channels),
        NORM=norm_kind(weight, bias, channels),
        ROPE=cos is not None,
        num_warps=norm_warps(channels),
        num_stages=1,
    )
    return y


@replayed
def norm_rotate_both(
    q: torch.Tensor,
    k: torch.Tensor,
    heads: int,
    norm_q: tuple[torch.Tensor | None, torch.Tensor | None],
    norm_k: tuple[torch.Tensor | None, torch.Tensor | None],
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply `norm_rotate` by heads to q and k, in one replay; a norm is (weight, bias)."""
    return (
        norm_rotate(
            q, heads, weight=norm_q[0], bias=norm_q[1], cos=cos, sin=sin, eps=eps, by_head=True
        ),
        norm_rotate(
            k, heads, weight=norm_k[0], bias=norm_k[1], cos=cos, sin=sin, eps=eps, by_head=True
        ),
    )


@triton.jit
def _store_int8(out, x, inverse, offs_c, padded):
    int8 = nearest_int8(x[None, :], inverse[None])
    tl.store(out + offs_c[None, :], int8, mask=(offs_c < padded)[None, :])


@triton.jit
def store_int8_norm(
    int8_ptr, scale_ptr, head, offs_h, mask_h, tail, offs_t, mask_t, factor_ptr, offset_ptr,
    factor_strides, offset_strides, b, n, n_tokens, channels, padded, eps,
    TAIL: tl.constexpr, HAS_FACTOR: tl.constexpr, HAS_OFFSET: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    """Store layer_norm(x) * (ONE + factor) + offset of token n of sample b as int8 and scale.

    The row x is fp32 in two parts, 0 outside their masks. Without TAIL the second is not read.
    """
    total = tl.sum(head, axis=0)
    if TAIL:
        total += tl.sum(tail, axis=0)
    mean = total / channels
    head = tl.where(mask_h, head - mean, 0.0)
    squares = tl.sum(head * head, axis=0)
    if TAIL:
        tail = tl.where(mask_t, tail - mean, 0.0)
        squares += tl.sum(tail * tail, axis=0)
    inverse_std = 1.0 / tl.sqrt(squares / channels + eps)
    head = modulated(
        head * inverse_std, factor_ptr, offset_ptr, factor_strides, offset_strides, b, n, offs_h,
        mask_h, HAS_FACTOR, HAS_OFFSET, ONE,
    )  # fmt: skip
    bits = tl.max(magnitude(head), axis=0)
    if TAIL:
        tail = modulated(
            tail * inverse_std, factor_ptr, offset_ptr, factor_strides, offset_strides, b, n,
            offs_t, mask_t, HAS_FACTOR, HAS_OFFSET, ONE,
        )  # fmt: skip
        bits = tl.maximum(bits, tl.max(magnitude(tail), axis=0))
    amax, poison = amax_poison(bits)
    scale, inverse = int8_scale(amax, poison)
    row = b * n_tokens + n
    tl.store(scale_ptr + row, scale)
    _store_int8(int8_ptr + row * padded, head, inverse, offs_h, padded)
    if TAIL:
        _store_int8(int8_ptr + row * padded, tail, inverse, offs_t, padded)


@triton.jit(do_not_specialize=LENGTHS)
def norm_modulate_rows_kernel(
    int8_ptr, scale_ptr, x_ptr, factor_ptr, offset_ptr,
    x_strides, factor_strides, offset_strides, n_tokens, channels, padded, eps,
    HEAD: tl.constexpr, TAIL: tl.constexpr,
    HAS_FACTOR: tl.constexpr, HAS_OFFSET: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    """Compute layer_norm(x) * (ONE + factor) + offset as int8 rows, one token per program.

    Grid: (tokens, batch). x [B, N, C] with contiguous channels; factor and offset broadcast to it;
    int8 [B, N, padded] dense, 0 from channel C on; scale [B, N] fp32. HEAD, TAIL: as in
    `rows.quantize_rows_kernel`. All steps are fp32, and only the last rounds, to int8.
    """
    n, b = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    row = x_ptr + b * x_strides[0] + n * x_strides[1]
    offs_h = tl.arange(0, HEAD)
    mask_h = offs_h < channels
    head = tl.load(row + offs_h, mask=mask_h, other=0.0).to(tl.float32)
    tail, offs_t, mask_t = head, offs_h, mask_h
    if TAIL:
        offs_t = HEAD + tl.arange(0, TAIL)
        mask_t = offs_t < channels
        tail = tl.load(row + offs_t, mask=mask_t, other=0.0).to(tl.float32)
    store_int8_norm(
        int8_ptr, scale_ptr, head, offs_h, mask_h, tail, offs_t, mask_t, factor_ptr, offset_ptr,
        factor_strides, offset_strides, b, n, n_tokens, channels, padded, eps,
        TAIL, HAS_FACTOR, HAS_OFFSET, ONE,
    )  # fmt: skip


@replayed
def norm_modulate_rows(
    x: torch.Tensor,
    factor: torch.Tensor | None,
    offset: torch.Tensor | None,
    *,
    one: float,
    eps: float,
) -> Int8Tensor:
    """Compute layer_norm(x) * (one + factor) + offset as int8 rows.

    Factor and offset broadcast to x [B, N, C].
    """
    target_of(x.device)
    batch, n_tokens, channels = x.shape
    x = dense_rows(x)
    rows = empty_rows(batch, n_tokens, channels, x.device)
    launch(
        norm_modulate_rows_kernel,
        (n_tokens, batch),
        x.device,
        x_ptr=x,
        x_strides=x.stride()[:2],
        n_tokens=n_tokens,
        channels=channels,
        eps=eps,
        **modulation_arguments(factor, offset, one, x.shape),
        **row_arguments(rows),
    )
    return rows
