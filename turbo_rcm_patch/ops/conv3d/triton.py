"""The passes between convolutions as Triton kernels: a program holds some pixels of one frame."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from turbo_rcm_patch.ops.conv3d.passes import LEAST_NORM, GroupNorm, RMSNorm
from turbo_rcm_patch.ops.launch import cdiv, launch, target_of
from turbo_rcm_patch.ops.replay import replayed

#: Arguments for which no kernel is compiled again: they vary with the video.
_LENGTHS = (
    *("first", "frames", "latent_width", "n_frames", "parts", "pixels", "repeat", "rows"),
    *("square", "steps", "width"),
)
#: Elements of a program's tile.
_TILE = 4096
#: Programs of a sample that sum for a group norm; each keeps its sums in registers.
_PARTS = 512

_LEAST_NORM = tl.constexpr(LEAST_NORM)


@triton.jit
def _channels(ptr, offs_c, mask_c):
    return tl.load(ptr + offs_c, mask=mask_c, other=0.0).to(tl.float32)[None, :]


@triton.jit(do_not_specialize=_LENGTHS)
def norm_silu_kernel(
    y_ptr, kept_ptr, x, history_ptr, norm, latent, residual_ptr,
    frames, pixels, width, first, repeat, square, latent_width, root,
    C: tl.constexpr, FRAMES: tl.constexpr, NORM: tl.constexpr, SILU: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Write silu(norm(x + before)) behind FRAMES frames of history, and the last ones to `kept`.

    norm: weight and bias. NORM 1 is Wan's RMS norm with weight and bias [C]; NORM 2 multiplies by
    weight [B, C] and adds bias [B, C], fp32 (a group norm whose statistics are known); NORM 0 is
    none. latent: None, or scale and shift, [B, t, h, w, C] fp32, which are then multiplied by and
    added, and their strides of batch and frames. residual: None, or what y is added to, dense.

    Grid: (blocks of pixels, B * (FRAMES + T)). x: [B, T, H * W, C] with dense frames, its
    strides of batch and frames, and `before` [C] or None; y dense.
    """
    j, b = tl.program_id(1) % (FRAMES + frames), tl.program_id(1) // (FRAMES + frames)
    offs_p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    offs_c = tl.arange(0, BLOCK_C)
    mask_c = offs_c < C
    mask = (offs_p < pixels)[:, None] & mask_c[None, :]
    offs = offs_p.to(tl.int64)[:, None] * C + offs_c[None, :]  # [BLOCK_P, BLOCK_C]
    b = b.to(tl.int64)
    frame = pixels.to(tl.int64) * C
    if j < FRAMES:
        y = tl.zeros([BLOCK_P, BLOCK_C], y_ptr.dtype.element_ty)
        if history_ptr is not None:
            y = tl.load(history_ptr + (b * FRAMES + j) * frame + offs, mask=mask, other=0.0)
    else:
        t = j - FRAMES
        row = x[0] + b * x[1][0] + t.to(tl.int64) * x[1][1]
        z = tl.load(row + offs, mask=mask, other=0.0).to(tl.float32)
        if x[2] is not None:
            z += _channels(x[2], offs_c, mask_c)
        if NORM == 1:
            length = tl.sqrt(tl.sum(z * z, axis=1))
            z *= (root / tl.maximum(length, _LEAST_NORM))[:, None]
            z *= _channels(norm[0], offs_c, mask_c)
            if norm[1] is not None:
                z += _channels(norm[1], offs_c, mask_c)
        elif NORM == 2:
            z = z * _channels(norm[0] + b * C, offs_c, mask_c)
            z += _channels(norm[1] + b * C, offs_c, mask_c)
            if latent is not None:
                at = (offs_p // width) // square * latent_width + (offs_p % width) // square
                pixel = b * latent[2][0] + ((t + first) // repeat) * latent[2][1]
                pixel = pixel + at.to(tl.int64)[:, None] * C + offs_c[None, :]
                z *= tl.load(latent[0] + pixel, mask=mask, other=0.0).to(tl.float32)
                z += tl.load(latent[1] + pixel, mask=mask, other=0.0).to(tl.float32)
        if residual_ptr is not None:  # without history
            at = tl.program_id(1).to(tl.int64) * frame + offs
            z += tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
        if SILU:
            z = z / (1.0 + tl.exp(-z))
        y = z.to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + tl.program_id(1).to(tl.int64) * frame + offs, y, mask=mask)
    if j >= frames:
        tl.store(kept_ptr + (b * FRAMES + j - frames) * frame + offs, y, mask=mask)


def _tile(channels: int) -> tuple[int, int]:
    block_c = triton.next_power_of_2(channels)
    return max(1, _TILE // block_c), block_c


def norm_silu(
    x: torch.Tensor,
    norm: RMSNorm | GroupNorm | None,
    silu: bool,
    before: torch.Tensor | None,
    frames: int,
    history: torch.Tensor | None,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `passes.norm_silu`."""
    kind, weight, bias, scale, shift = 0, None, None, None, None
    if isinstance(norm, RMSNorm):
        kind, weight, bias = 1, norm.weight, norm.bias
    elif norm is not None:
        kind, scale, shift = 2, norm.scale, norm.shift
        weight, bias = group_factors(x, before, norm.weight, norm.bias, norm.groups, norm.eps)
    return _norm_silu(
        x, before, history, (weight, bias), None if scale is None else (scale, shift), None, None,
        kind=kind, silu=silu, frames=frames, dtype=dtype,
    )  # fmt: skip


@replayed
def _norm_silu(
    x: torch.Tensor,
    before: torch.Tensor | None,
    history: torch.Tensor | None,
    norm: tuple[torch.Tensor | None, torch.Tensor | None],
    latent: tuple[torch.Tensor, torch.Tensor] | None,
    residual: torch.Tensor | None,
    y: torch.Tensor | None,
    *,
    kind: int,
    silu: bool,
    frames: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    target_of(x.device)
    batch, n_frames, height, width, channels = x.shape
    whole, few = ((batch, count, height, width, channels) for count in (frames + n_frames, frames))
    y = torch.empty(whole, dtype=dtype, device=x.device) if y is None else y
    kept = torch.empty(few, dtype=dtype, device=x.device)
    block_p, block_c = _tile(channels)
    pixels, odd = height * width, int(n_frames > 1 and n_frames % 2 == 1)
    repeat = square = latent_width = 1
    if latent is not None:
        _, latent_frames, _, latent_width, _ = latent[0].shape
        repeat, square = (n_frames - odd) // (latent_frames - odd), width // latent_width
    launch(
        norm_silu_kernel, (cdiv(pixels, block_p), batch * (frames + n_frames)), x.device,
        y_ptr=y, kept_ptr=kept, x=(x, x.stride()[:2], before), history_ptr=history, norm=norm,
        latent=None if latent is None else (*latent, latent[0].stride()[:2]),
        residual_ptr=residual, frames=n_frames, pixels=pixels, width=width,
        first=odd * (repeat - 1), repeat=repeat, square=square, latent_width=latent_width,
        root=channels**0.5, C=channels, FRAMES=frames, NORM=kind, SILU=silu,
        BLOCK_P=block_p, BLOCK_C=block_c, num_warps=4, num_stages=1,
    )  # fmt: skip
    return y, kept


@triton.jit(do_not_specialize=_LENGTHS)
def group_sums_kernel(
    sums_ptr, x_ptr, x_strides, frames, pixels, steps,
    C: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Sum the distances from the sample's first pixel and their squares, over some pixels.

    Grid: (parts, B). x [B, T, H * W, C] with dense frames; sums [B, parts, 2, C] fp32.
    """
    part, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    offs_c = tl.arange(0, BLOCK_C)
    mask_c = offs_c < C
    sample = x_ptr + b * x_strides[0]
    first = tl.load(sample + offs_c, mask=mask_c, other=0.0).to(tl.float32)[None, :]
    total = tl.zeros([BLOCK_P, BLOCK_C], tl.float32)
    squares = tl.zeros([BLOCK_P, BLOCK_C], tl.float32)
    for step in range(steps):
        rows = (part * steps + step).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
        mask = (rows < frames.to(tl.int64) * pixels)[:, None] & mask_c[None, :]
        at = rows // pixels * x_strides[1] + rows % pixels * C
        x = tl.load(sample + at[:, None] + offs_c[None, :], mask=mask, other=0.0)
        x = tl.where(mask, x.to(tl.float32) - first, 0.0)
        total += x
        squares += x * x
    out = sums_ptr + (b * tl.num_programs(0) + part) * 2 * C + offs_c
    tl.store(out, tl.sum(total, axis=0), mask=mask_c)
    tl.store(out + C, tl.sum(squares, axis=0), mask=mask_c)


@triton.jit(do_not_specialize=_LENGTHS)
def group_factors_kernel(
    factor_ptr, offset_ptr, sums_ptr, x_ptr, before_ptr, weight_ptr, bias_ptr,
    x_stride_b, n, parts, eps,
    C: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Compute factor and offset [B, C] of a group norm: norm(x + before) = x * factor + offset.

    Grid: (groups, B). n is the number of pixels; WIDTH is the number of channels of a group.
    """
    g, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    offs_c = tl.arange(0, BLOCK_C)
    mask_c = offs_c < WIDTH
    own = g * WIDTH + offs_c
    total = tl.zeros([BLOCK_C], tl.float32)
    squares = tl.zeros([BLOCK_C], tl.float32)
    for start in range(0, parts, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        mask = (offs_n < parts)[:, None] & mask_c[None, :]
        at = sums_ptr + (b * parts + offs_n.to(tl.int64))[:, None] * 2 * C + own[None, :]
        total += tl.sum(tl.load(at, mask=mask, other=0.0), axis=0)
        squares += tl.sum(tl.load(at + C, mask=mask, other=0.0), axis=0)
    mean = total / n  # of a channel, from its first pixel
    spread = squares - total * mean
    place = mean + tl.load(x_ptr + b * x_stride_b + own, mask=mask_c, other=0.0).to(tl.float32)
    if before_ptr is not None:
        place += tl.load(before_ptr + own, mask=mask_c, other=0.0).to(tl.float32)
    place = tl.where(mask_c, place, 0.0)
    centre = tl.sum(place, axis=0) / WIDTH
    away = tl.where(mask_c, place - centre, 0.0)
    spread = tl.where(mask_c, spread + n * (away * away), 0.0)
    variance = tl.sum(spread, axis=0) / (n * WIDTH)
    factor = tl.load(weight_ptr + own, mask=mask_c, other=0.0).to(tl.float32)
    factor /= tl.sqrt(variance + eps)
    offset = tl.load(bias_ptr + own, mask=mask_c, other=0.0).to(tl.float32) - centre * factor
    tl.store(factor_ptr + b * C + own, factor, mask=mask_c)
    tl.store(offset_ptr + b * C + own, offset, mask=mask_c)


@replayed
def group_factors(
    x: torch.Tensor,
    before: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor,
    groups: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return factor and offset, [B, C] fp32: group_norm(x + before) = (x + before) * factor +
    offset."""
    target_of(x.device)
    batch, n_frames, height, width, channels = x.shape
    pixels = height * width
    block_p, block_c = _tile(channels)
    tiles = cdiv(n_frames * pixels, block_p)
    steps = cdiv(tiles, _PARTS)
    parts = cdiv(tiles, steps)
    sums = torch.empty((batch, parts, 2, channels), dtype=torch.float32, device=x.device)
    factor = torch.empty((batch, channels), dtype=torch.float32, device=x.device)
    offset = torch.empty((batch, channels), dtype=torch.float32, device=x.device)
    launch(
        group_sums_kernel, (parts, batch), x.device, sums_ptr=sums, x_ptr=x,
        x_strides=x.stride()[:2], frames=n_frames, pixels=pixels, steps=steps, C=channels,
        BLOCK_P=block_p, BLOCK_C=block_c, num_warps=4, num_stages=3,
    )  # fmt: skip
    launch(
        group_factors_kernel, (groups, batch), x.device, factor_ptr=factor, offset_ptr=offset,
        sums_ptr=sums, x_ptr=x, before_ptr=before, weight_ptr=weight, bias_ptr=bias,
        x_stride_b=x.stride(0), n=float(n_frames * pixels), parts=parts, eps=eps, C=channels,
        WIDTH=channels // groups, BLOCK_N=128,
        BLOCK_C=triton.next_power_of_2(channels // groups), num_warps=4, num_stages=1,
    )  # fmt: skip
    return factor, offset


@triton.jit(do_not_specialize=_LENGTHS)
def upsample_kernel(
    out_ptr, x_ptr, x_strides, out_stride_b, n_frames, width, C: tl.constexpr, S: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Write pixels of one row into two pixels of two rows.

    Grid: (blocks of a row, H, B * T * S). x [B, T, S, H, W, C]; out [B, T * S, 2H, 2W, C] with
    dense frames.
    """
    row, j = tl.program_id(1), tl.program_id(2) % n_frames
    b = (tl.program_id(2) // n_frames).to(tl.int64)
    offs_p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    offs_c = tl.arange(0, BLOCK_C)
    mask = (offs_p < width)[:, None] & (offs_c < C)[None, :]
    source = x_ptr + b * x_strides[0] + (j // S).to(tl.int64) * x_strides[1]
    source += (j % S).to(tl.int64) * x_strides[2] + row.to(tl.int64) * x_strides[3]
    x = tl.load(
        source + offs_p.to(tl.int64)[:, None] * x_strides[4] + offs_c[None, :],
        mask=mask, other=0.0,
    )  # fmt: skip
    height = tl.num_programs(1)
    rows = (j.to(tl.int64) * 2 * height + 2 * row) * 2 * width
    out = out_ptr + b * out_stride_b + (rows + 2 * offs_p)[:, None] * C + offs_c[None, :]
    tl.store(out, x, mask=mask)
    tl.store(out + C, x, mask=mask)
    out += 2 * width.to(tl.int64) * C
    tl.store(out, x, mask=mask)
    tl.store(out + C, x, mask=mask)


@replayed
def upsample(x: torch.Tensor, out: torch.Tensor) -> None:
    """Compute `passes.upsample`."""
    target_of(x.device)
    batch, n_frames, s, height, width, channels = x.shape
    block_p, block_c = _tile(channels)
    block_p = min(block_p, triton.next_power_of_2(width))
    launch(
        upsample_kernel,
        (cdiv(width, block_p), height, batch * n_frames * s),
        x.device,
        out_ptr=out,
        x_ptr=x,
        x_strides=x.stride()[:5],
        out_stride_b=out.stride(0),
        n_frames=n_frames * s,
        width=width,
        C=channels,
        S=s,
        BLOCK_P=block_p,
        BLOCK_C=block_c,
        num_warps=4,
        num_stages=1,
    )


def add_bias_residual(
    y: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None, out: torch.Tensor
) -> None:
    """Compute `passes.add_bias_residual` of dense tensors into `out`, which may be y."""
    _norm_silu(
        y, bias, None, (None, None), None, residual, out, kind=0, silu=False, frames=0,
        dtype=out.dtype,
    )  # fmt: skip
