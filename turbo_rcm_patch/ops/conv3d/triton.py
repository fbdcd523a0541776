"""The passes between convolutions as Triton kernels: a program holds some pixels of one frame."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from turbo_rcm_patch.ops.conv3d.formats import LEAST_NORM, Duplicate, GroupNorm, RMSNorm
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
    y_ptr, kept_ptr, x, history_ptr, norm, latent,
    frames, pixels, width, first, repeat, square, latent_width, root,
    C: tl.constexpr, FRAMES: tl.constexpr, NORM: tl.constexpr, SILU: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Write silu(norm(x + before)) behind FRAMES frames of history, and the last ones to `kept`.

    norm: weight and bias. NORM 1 is Wan's RMS norm with weight and bias [C]; NORM 2 multiplies by
    weight [B, C] and adds bias [B, C], fp32 (a group norm whose statistics are known); NORM 0 is
    none. latent: None, or scale and shift, [B, t, h, w, C] fp32, which are then multiplied by and
    added, and their strides of batch and frames.

    Grid: (blocks of pixels, B * (FRAMES + T)). x: [B, T, H * W, C] with dense frames, its
    strides of batch and frames, `before` [C] or None, and a residual [B, T, H * W, C], added after
    the norm, or None; that and y are dense.
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
        if x[3] is not None:
            own = x[3] + (b * frames + t) * frame + offs
            z += tl.load(own, mask=mask, other=0.0).to(tl.float32)
        if SILU:
            z = z / (1.0 + tl.exp(-z))
        y = z.to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + tl.program_id(1).to(tl.int64) * frame + offs, y, mask=mask)
    if j >= frames:
        tl.store(kept_ptr + (b * FRAMES + j - frames) * frame + offs, y, mask=mask)


def _tile(channels: int) -> tuple[int, int]:
    block_c = triton.next_power_of_2(channels)
    return max(1, _TILE // block_c), block_c


@replayed
def norm_silu(
    x: torch.Tensor,
    norm: RMSNorm | GroupNorm | None,
    silu: bool,
    before: torch.Tensor | None,
    frames: int,
    history: torch.Tensor | None,
    dtype: torch.dtype,
    residual: torch.Tensor | None = None,
    y: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `passes.norm_silu`, into y if that is given."""
    target_of(x.device)
    kind, weight, bias, latent = 0, None, None, None
    if isinstance(norm, RMSNorm):
        kind, weight, bias = 1, norm.weight, norm.bias
    elif norm is not None:
        kind = 2
        weight, bias = group_factors(x, before, norm)
        latent = None if norm.scale is None else (norm.scale, norm.shift, norm.scale.stride()[:2])
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
        y_ptr=y, kept_ptr=kept, x=(x, x.stride()[:2], before, residual), history_ptr=history,
        norm=(weight, bias), latent=latent, frames=n_frames, pixels=pixels, width=width,
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


def group_factors(
    x: torch.Tensor, before: torch.Tensor | None, norm: GroupNorm
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return factor and offset, [B, C] fp32: group_norm(x + before) = (x + before) * factor +
    offset."""
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
        group_factors_kernel, (norm.groups, batch), x.device, factor_ptr=factor,
        offset_ptr=offset, sums_ptr=sums, x_ptr=x, before_ptr=before, weight_ptr=norm.weight,
        bias_ptr=norm.bias, x_stride_b=x.stride(0), n=float(n_frames * pixels), parts=parts,
        eps=norm.eps, C=channels, WIDTH=channels // norm.groups, BLOCK_N=128,
        BLOCK_C=triton.next_power_of_2(channels // norm.groups), num_warps=4, num_stages=1,
    )  # fmt: skip
    return factor, offset


@triton.jit(do_not_specialize=_LENGTHS)
def enlarge_kernel(
    out_ptr, y_ptr, bias_ptr, duplicate, frames, n_frames, width, first, repeat,
    C: tl.constexpr, TIMES: tl.constexpr, REPEATS: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Write phases into their pixels, and add bias and shortcut.

    Grid: (blocks of a row, 2H, B * n_frames). y [B, frames, H + 1, width + 1, 4, C]; out
    [B, n_frames, 2H, 2 * width, C]; bias [C] or None; duplicate: None, or x [B, t, H, width, C'],
    its strides but the last, and TIMES - 1 if its first frame becomes one, else 0.
    """
    row, t = tl.program_id(1), tl.program_id(2) % n_frames
    b = (tl.program_id(2) // n_frames).to(tl.int64)
    offs_p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    offs_c = tl.arange(0, BLOCK_C)
    mask_c = offs_c < C
    mask = (offs_p < 2 * width)[:, None] & mask_c[None, :]
    i, j = row % 2, offs_p % 2
    frame = b * frames + (t + first) // repeat
    pixel = (frame * (tl.num_programs(1) // 2 + 1) + row // 2 + i) * (width + 1) + offs_p // 2 + j
    phase = 2 * i + j
    y = tl.load(
        y_ptr + (4 * pixel + phase)[:, None] * C + offs_c[None, :], mask=mask, other=0.0
    ).to(tl.float32)  # fmt: skip
    if bias_ptr is not None:
        y += _channels(bias_ptr, offs_c, mask_c)
    if duplicate is not None:
        time = t + duplicate[2]
        source = (
            duplicate[0] + b * duplicate[1][0] + (time // TIMES).to(tl.int64) * duplicate[1][1]
        )
        source += (row // 2).to(tl.int64) * duplicate[1][2]
        at = (offs_p // 2).to(tl.int64) * duplicate[1][3]
        own = offs_c[None, :] * (4 * TIMES) + (time % TIMES * 4 + phase)[:, None]
        y += tl.load(source + at[:, None] + own // REPEATS, mask=mask, other=0.0).to(tl.float32)
    rows = tl.program_id(2).to(tl.int64) * tl.num_programs(1) + row
    out = out_ptr + (rows * 2 * width + offs_p)[:, None] * C + offs_c[None, :]
    tl.store(out, y.to(out_ptr.dtype.element_ty), mask=mask)


@replayed
def enlarge(
    y: torch.Tensor,
    bias: torch.Tensor | None,
    duplicate: Duplicate | None,
    repeat: int,
    first: bool,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Compute `passes.enlarge`."""
    target_of(y.device)
    batch, frames, height, width, channels = y.shape
    height, width, channels = height - 1, width - 1, channels // 4
    n_frames = frames * repeat - first * (repeat - 1)
    out = torch.empty(
        (batch, n_frames, 2 * height, 2 * width, channels), dtype=dtype, device=y.device
    )
    block_p, block_c = _tile(channels)
    x, times, repeats, begins = duplicate or (None, 1, 1, False)
    launch(
        enlarge_kernel, (cdiv(2 * width, block_p), 2 * height, batch * n_frames), y.device,
        out_ptr=out, y_ptr=y, bias_ptr=bias,
        duplicate=None if x is None else (x, x.stride()[:4], begins * (times - 1)),
        frames=frames, n_frames=n_frames, width=width, first=first * (repeat - 1), repeat=repeat,
        C=channels, TIMES=times, REPEATS=repeats, BLOCK_P=block_p, BLOCK_C=block_c,
        num_warps=4, num_stages=1,
    )  # fmt: skip
    return out
