"""The passes between convolutions as Triton kernels: a program holds some pixels of one frame."""

from __future__ import annotations

from typing import NamedTuple

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


class Pixels(NamedTuple):
    """Activations [B, T, H * W, C] with dense frames, and what is added to them.

    Attributes:
        ptr: The activations.
        strides: Their strides of batch and frames.
        before_ptr: [C], added first, or None.
        residual_ptr: [B, T, H * W, C] dense, added after the norm, or None.
    """

    ptr: torch.Tensor
    strides: tuple[int, int]
    before_ptr: torch.Tensor | None
    residual_ptr: torch.Tensor | None


class PaddedOutput(NamedTuple):
    """The memory of a pass that writes behind frames of history; all dense.

    Attributes:
        y_ptr: [B, FRAMES + T, H * W, C].
        kept_ptr: The last frames of y, [B, FRAMES, H * W, C].
        history_ptr: The first frames of y, as `kept`, or None for zeros.
    """

    y_ptr: torch.Tensor
    kept_ptr: torch.Tensor
    history_ptr: torch.Tensor | None


class LatentModulation(NamedTuple):
    """Scale and shift by the latent, [B, t, h, w, C] fp32, with strides of batch and frames."""

    scale_ptr: torch.Tensor
    shift_ptr: torch.Tensor
    strides: tuple[int, int]


class PassForm(NamedTuple):
    """The numbers of a pass that are known when it is compiled.

    Attributes:
        C: Channels.
        FRAMES: Frames of history.
        NORM: 1 for Wan's RMS norm; 2 to multiply by the weight and add the bias of a group norm
            whose statistics are known; 0 for none.
        SILU: True if SiLU comes last.
        BLOCK_P: Pixels of a program.
        BLOCK_C: C up to a power of two.
    """

    C: int
    FRAMES: int
    NORM: int
    SILU: bool
    BLOCK_P: int
    BLOCK_C: int


@triton.jit(do_not_specialize=_LENGTHS)
def norm_silu_kernel(
    out, x, norm, root, latent, frames, pixels, width, first, repeat, square, latent_width,
    FORM: tl.constexpr,
):  # fmt: skip
    """Write silu(norm(x + before) + residual) behind FRAMES frames of history.

    Grid: (blocks of pixels, B * (FRAMES + T)). out: `PaddedOutput`; x: `Pixels`; norm: `RMSNorm`
    of weight and bias [C], or [B, C] fp32 for a group norm; root: the square root of C; latent:
    `LatentModulation`, applied after the norm, or None.
    """
    C: tl.constexpr = FORM.C
    FRAMES: tl.constexpr = FORM.FRAMES
    j, b = tl.program_id(1) % (FRAMES + frames), tl.program_id(1) // (FRAMES + frames)
    offs_p = tl.program_id(0) * FORM.BLOCK_P + tl.arange(0, FORM.BLOCK_P)
    offs_c = tl.arange(0, FORM.BLOCK_C)
    mask_c = offs_c < C
    mask = (offs_p < pixels)[:, None] & mask_c[None, :]
    offs = offs_p.to(tl.int64)[:, None] * C + offs_c[None, :]  # [BLOCK_P, BLOCK_C]
    b = b.to(tl.int64)
    frame = pixels.to(tl.int64) * C
    if j < FRAMES:
        y = tl.full([FORM.BLOCK_P, FORM.BLOCK_C], 0.0, out.y_ptr.dtype.element_ty)
        if out.history_ptr is not None:
            history = out.history_ptr + (b * FRAMES + j) * frame
            y = tl.load(history + offs, mask=mask, other=0.0)
    else:
        t = j - FRAMES
        row = x.ptr + b * x.strides[0] + t.to(tl.int64) * x.strides[1]
        z = tl.load(row + offs, mask=mask, other=0.0).to(tl.float32)
        if x.before_ptr is not None:
            z += _channels(x.before_ptr, offs_c, mask_c)
        if FORM.NORM == 1:
            length = tl.sqrt(tl.sum(z * z, axis=1))
            z *= (root / tl.maximum(length, _LEAST_NORM))[:, None]
            z *= _channels(norm.weight, offs_c, mask_c)
            if norm.bias is not None:
                z += _channels(norm.bias, offs_c, mask_c)
        elif FORM.NORM == 2:
            z = z * _channels(norm.weight + b * C, offs_c, mask_c)
            z += _channels(norm.bias + b * C, offs_c, mask_c)
            if latent is not None:
                at = (offs_p // width) // square * latent_width + (offs_p % width) // square
                pixel = b * latent.strides[0] + ((t + first) // repeat) * latent.strides[1]
                pixel = pixel + at.to(tl.int64)[:, None] * C + offs_c[None, :]
                z *= tl.load(latent.scale_ptr + pixel, mask=mask, other=0.0).to(tl.float32)
                z += tl.load(latent.shift_ptr + pixel, mask=mask, other=0.0).to(tl.float32)
        if x.residual_ptr is not None:
            residual = x.residual_ptr + (b * frames + t) * frame
            z += tl.load(residual + offs, mask=mask, other=0.0).to(tl.float32)
        if FORM.SILU:
            z = z / (1.0 + tl.exp(-z))
        y = z.to(out.y_ptr.dtype.element_ty)
    tl.store(out.y_ptr + tl.program_id(1).to(tl.int64) * frame + offs, y, mask=mask)
    if j >= frames:
        tl.store(out.kept_ptr + (b * FRAMES + j - frames) * frame + offs, y, mask=mask)


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
    kind, factors, latent = 0, RMSNorm(None, None), None
    if isinstance(norm, RMSNorm):
        kind, factors = 1, norm
    elif norm is not None:
        kind, factors = 2, RMSNorm(*group_factors(x, before, norm))
        if norm.scale is not None:
            latent = LatentModulation(norm.scale, norm.shift, norm.scale.stride()[:2])
    batch, n_frames, height, width, channels = x.shape
    whole, few = ((batch, count, height, width, channels) for count in (frames + n_frames, frames))
    y = torch.empty(whole, dtype=dtype, device=x.device) if y is None else y
    kept = torch.empty(few, dtype=dtype, device=x.device)
    block_p, block_c = _tile(channels)
    pixels, odd = height * width, int(n_frames > 1 and n_frames % 2 == 1)
    repeat = square = latent_width = 1
    if latent is not None:
        _, latent_frames, _, latent_width, _ = latent.scale_ptr.shape
        repeat, square = (n_frames - odd) // (latent_frames - odd), width // latent_width
    launch(
        norm_silu_kernel,
        (cdiv(pixels, block_p), batch * (frames + n_frames)),
        x.device,
        out=PaddedOutput(y, kept, history),
        x=Pixels(x, x.stride()[:2], before, residual),
        norm=factors,
        root=channels**0.5,
        latent=latent,
        frames=n_frames,
        pixels=pixels,
        width=width,
        first=odd * (repeat - 1),
        repeat=repeat,
        square=square,
        latent_width=latent_width,
        FORM=PassForm(channels, frames, kind, silu, block_p, block_c),
        num_warps=4,
        num_stages=1,
    )
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
    factor_ptr, offset_ptr, sums_ptr, x, weight_ptr, bias_ptr, n, parts, eps,
    C: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Compute factor and offset [B, C] of a group norm: norm(x + before) = x * factor + offset.

    Grid: (groups, B). x: `Pixels`; n: number of pixels; WIDTH: channels of a group; BLOCK_N: parts
    that are summed at a time; BLOCK_C: WIDTH up to a power of two.
    """
    g, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    offs_c = tl.arange(0, BLOCK_C)
    mask_c = offs_c < WIDTH
    offs_g = g * WIDTH + offs_c
    total = tl.full([BLOCK_C], 0.0, tl.float32)
    squares = tl.full([BLOCK_C], 0.0, tl.float32)
    for start in range(0, parts, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        mask = (offs_n < parts)[:, None] & mask_c[None, :]
        at = sums_ptr + (b * parts + offs_n.to(tl.int64))[:, None] * 2 * C + offs_g[None, :]
        total += tl.sum(tl.load(at, mask=mask, other=0.0), axis=0)
        squares += tl.sum(tl.load(at + C, mask=mask, other=0.0), axis=0)
    mean = total / n  # of a channel, from its first pixel
    spread = squares - total * mean
    first = tl.load(x.ptr + b * x.strides[0] + offs_g, mask=mask_c, other=0.0)
    place = mean + first.to(tl.float32)
    if x.before_ptr is not None:
        place += tl.load(x.before_ptr + offs_g, mask=mask_c, other=0.0).to(tl.float32)
    place = tl.where(mask_c, place, 0.0)
    centre = tl.sum(place, axis=0) / WIDTH
    away = tl.where(mask_c, place - centre, 0.0)
    spread = tl.where(mask_c, spread + n * (away * away), 0.0)
    variance = tl.sum(spread, axis=0) / (n * WIDTH)
    factor = tl.load(weight_ptr + offs_g, mask=mask_c, other=0.0).to(tl.float32)
    factor /= tl.sqrt(variance + eps)
    bias = tl.load(bias_ptr + offs_g, mask=mask_c, other=0.0).to(tl.float32)
    tl.store(factor_ptr + b * C + offs_g, factor, mask=mask_c)
    tl.store(offset_ptr + b * C + offs_g, bias - centre * factor, mask=mask_c)


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
        group_sums_kernel,
        (parts, batch),
        x.device,
        sums_ptr=sums,
        x_ptr=x,
        x_strides=x.stride()[:2],
        frames=n_frames,
        pixels=pixels,
        steps=steps,
        C=channels,
        BLOCK_P=block_p,
        BLOCK_C=block_c,
        num_warps=4,
        num_stages=3,
    )
    width = channels // norm.groups
    launch(
        group_factors_kernel,
        (norm.groups, batch),
        x.device,
        factor_ptr=factor,
        offset_ptr=offset,
        sums_ptr=sums,
        x=Pixels(x, x.stride()[:2], before, None),
        weight_ptr=norm.weight,
        bias_ptr=norm.bias,
        n=float(n_frames * pixels),
        parts=parts,
        eps=norm.eps,
        C=channels,
        WIDTH=width,
        BLOCK_N=128,
        BLOCK_C=triton.next_power_of_2(width),
        num_warps=4,
        num_stages=1,
    )
    return factor, offset


class DuplicateOperand(NamedTuple):
    """The input of Wan 2.2's shortcut, see `passes.Duplicate`.

    Attributes:
        ptr: [B, t, H, width, C'].
        strides: Its strides but the last.
        skipped: TIMES - 1 if its first frame becomes one, else 0.
    """

    ptr: torch.Tensor
    strides: tuple[int, int, int, int]
    skipped: int


class UpsampleForm(NamedTuple):
    """The numbers of `upsample_kernel` that are known when it is compiled.

    Attributes:
        C: Channels of the result.
        TIMES: As `passes.Duplicate.times`.
        REPEATS: As `passes.Duplicate.repeats`.
        BLOCK_P: Pixels of a program.
        BLOCK_C: C up to a power of two.
    """

    C: int
    TIMES: int
    REPEATS: int
    BLOCK_P: int
    BLOCK_C: int


@triton.jit(do_not_specialize=_LENGTHS)
def upsample_kernel(
    out_ptr, y_ptr, bias_ptr, duplicate, frames, n_frames, width, first, repeat, FORM: tl.constexpr
):
    """Write phases into their pixels, and add bias and shortcut.

    Grid: (blocks of a row, 2H, B * n_frames). y [B, frames, H + 1, width + 1, 4, C]; out
    [B, n_frames, 2H, 2 * width, C]; bias [C] or None; duplicate: `DuplicateOperand` or None.
    """
    C: tl.constexpr = FORM.C
    TIMES: tl.constexpr = FORM.TIMES
    row, t = tl.program_id(1), tl.program_id(2) % n_frames
    b = (tl.program_id(2) // n_frames).to(tl.int64)
    offs_p = tl.program_id(0) * FORM.BLOCK_P + tl.arange(0, FORM.BLOCK_P)
    offs_c = tl.arange(0, FORM.BLOCK_C)
    mask_c = offs_c < C
    mask = (offs_p < 2 * width)[:, None] & mask_c[None, :]
    i, j = row % 2, offs_p % 2
    frame = b * frames + (t + first) // repeat
    pixel = (frame * (tl.num_programs(1) // 2 + 1) + row // 2 + i) * (width + 1) + offs_p // 2 + j
    phase = 2 * i + j
    y_ptrs = y_ptr + (4 * pixel + phase)[:, None] * C + offs_c[None, :]
    y = tl.load(y_ptrs, mask=mask, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        y += _channels(bias_ptr, offs_c, mask_c)
    if duplicate is not None:
        time = t + duplicate.skipped
        source = duplicate.ptr + b * duplicate.strides[0]
        source += (time // TIMES).to(tl.int64) * duplicate.strides[1]
        source += (row // 2).to(tl.int64) * duplicate.strides[2]
        at = (offs_p // 2).to(tl.int64) * duplicate.strides[3]
        repeated = offs_c[None, :] * (4 * TIMES) + (time % TIMES * 4 + phase)[:, None]
        x_ptrs = source + at[:, None] + repeated // FORM.REPEATS
        y += tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
    rows = tl.program_id(2).to(tl.int64) * tl.num_programs(1) + row
    out = out_ptr + (rows * 2 * width + offs_p)[:, None] * C + offs_c[None, :]
    tl.store(out, y.to(out_ptr.dtype.element_ty), mask=mask)


@replayed
def upsample(
    y: torch.Tensor,
    bias: torch.Tensor | None,
    duplicate: Duplicate | None,
    repeat: int,
    first: bool,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Compute `passes.upsample`."""
    target_of(y.device)
    batch, frames, height, width, channels = y.shape
    height, width, channels = height - 1, width - 1, channels // 4
    n_frames = frames * repeat - first * (repeat - 1)
    out = torch.empty(
        (batch, n_frames, 2 * height, 2 * width, channels), dtype=dtype, device=y.device
    )
    block_p, block_c = _tile(channels)
    shortcut, times, repeats = None, 1, 1
    if duplicate is not None:
        x, times, repeats = duplicate
        shortcut = DuplicateOperand(x, x.stride()[:4], first * (times - 1))
    launch(
        upsample_kernel,
        (cdiv(2 * width, block_p), 2 * height, batch * n_frames),
        y.device,
        out_ptr=out,
        y_ptr=y,
        bias_ptr=bias,
        duplicate=shortcut,
        frames=frames,
        n_frames=n_frames,
        width=width,
        first=first * (repeat - 1),
        repeat=repeat,
        FORM=UpsampleForm(channels, times, repeats, block_p, block_c),
        num_warps=4,
        num_stages=1,
    )
    return out
