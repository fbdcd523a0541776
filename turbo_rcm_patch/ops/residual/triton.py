"""The kernel of a pass over the residual stream, that of a tile of a skip with any coefficients,
and the norm and rotary embedding of q and k.

A pass closes a skip, computes the norm of the result, or both, for one residual stream or for two
that are one sequence inside a branch. All that it does not do is absent from the compiled kernel.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from turbo_rcm_patch.ops.formats import Streams, norm_kind, padded_channels
from turbo_rcm_patch.ops.launch import (
    LENGTHS,
    cdiv,
    dense_rows,
    launch,
    skip_arguments,
    target_of,
    tile_for,
)
from turbo_rcm_patch.ops.numerics import (
    amax_and_nan,
    close_skip,
    int8_scale,
    load_rotary,
    magnitude,
    nearest_int8,
    norm_rotate_tile,
    row_parts,
    row_warps,
    scaled,
)
from turbo_rcm_patch.ops.replay import replayed

# --- a pass over the residual stream -------------------------------------------------------------


class Operand(NamedTuple):
    """A tensor [B, N, C] that a kernel reads or writes, with its strides."""

    ptr: torch.Tensor
    strides: tuple[int, int, int]


class StreamOperands(NamedTuple):
    """The residual stream of a pass, and the skip that it closes.

    Attributes:
        y: An operand per stream, or None without a skip.
        x: An operand per stream.
        branch: [B, rows, C] of all streams, or None without a skip.
        gate: An operand per stream, or None for 1.
    """

    y: tuple[Operand, ...] | None
    x: tuple[Operand, ...]
    branch: Operand | None
    gate: tuple[Operand, ...] | None


class NormOperands(NamedTuple):
    """The norm of a pass.

    Attributes:
        out: [B, rows, C] of all streams, or None for no norm.
        scale_ptr: fp32 [B, rows], which makes `out` int8 rows, or None.
        factor: An operand per stream, or None.
        offset: An operand per stream, or None.
        weight_ptr: [C] or None.
        bias_ptr: [C] or None.
        eps: Epsilon.
    """

    out: Operand | None
    scale_ptr: torch.Tensor | None
    factor: tuple[Operand, ...] | None
    offset: tuple[Operand, ...] | None
    weight_ptr: torch.Tensor | None
    bias_ptr: torch.Tensor | None
    eps: float


class PassForm(NamedTuple):
    """The numbers of a pass that are known when it is compiled.

    Attributes:
        HEAD: First channels of a row, a power of two.
        TAIL: Channels after these, 0 or a power of two.
        ONE: Added to the factor.
        TWO: True for two streams.
        VALUES: Most neighbouring channels of a thread, see `skip_norm`.
    """

    HEAD: int
    TAIL: int
    ONE: float
    TWO: bool
    VALUES: int


@triton.jit
def _ptrs(of, place, offs_c, TWO: tl.constexpr, VALUES: tl.constexpr = None):
    """Return pointers to channels offs_c of a token.

    `of` has an `Operand` for each stream. place: whether the token is of the second stream, its
    sample, its number within the stream and within all rows. With VALUES a thread gets at most so
    many neighbouring channels. The hint stands here, because the compiler loses one on the result
    of a call.
    """
    second, b, n, _ = place
    row = of[0].ptr + b * of[0].strides[0] + n * of[0].strides[1]
    stride_c = of[0].strides[2]
    if TWO:
        other = of[1].ptr + b * of[1].strides[0] + n * of[1].strides[1]
        row = tl.where(second, other, row)
        stride_c = tl.where(second, of[1].strides[2], stride_c)
    ptrs = row + offs_c * stride_c
    if VALUES is not None:
        ptrs = tl.max_contiguous(ptrs, VALUES)
    return ptrs


@triton.jit
def _stream(streams, place, offs_c, mask_c, FORM: tl.constexpr):
    """Return a part of the stream in fp32, 0 outside mask_c, and store it after a skip."""
    TWO: tl.constexpr = FORM.TWO
    VALUES: tl.constexpr = FORM.VALUES
    if streams.branch is None:
        x_ptrs = _ptrs(streams.x, place, offs_c, TWO, VALUES)
        y = tl.load(x_ptrs, mask=mask_c, other=0.0).to(tl.float32)
    else:
        c_out = 1.0
        if streams.gate is not None:
            gate_ptrs = _ptrs(streams.gate, place, offs_c, TWO, VALUES)
            c_out = tl.load(gate_ptrs, mask=mask_c, other=0.0).to(tl.float32)
        _, b, _, row = place
        branch = streams.branch
        branch_row = branch.ptr + b * branch.strides[0] + row * branch.strides[1]
        branch_ptrs = tl.max_contiguous(branch_row + offs_c, VALUES)
        x_ptrs = _ptrs(streams.x, place, offs_c, TWO, VALUES)
        out = tl.load(branch_ptrs, mask=mask_c, other=0.0).to(tl.float32)
        residual = tl.load(x_ptrs, mask=mask_c, other=0.0)
        y = scaled(residual.to(tl.float32), 1.0) + scaled(out, c_out)
        y = y.to(streams.y[0].ptr.dtype.element_ty)
        tl.store(_ptrs(streams.y, place, offs_c, TWO), y, mask=mask_c)
        y = y.to(tl.float32)
    return y


@triton.jit
def _modulated(x, norm, place, offs_c, mask_c, FORM: tl.constexpr):
    """Return (x * weight + bias) * (ONE + factor) + offset in fp32, 0 outside mask_c."""
    if norm.factor is not None:
        factor_ptrs = _ptrs(norm.factor, place, offs_c, FORM.TWO)
        scale = tl.load(factor_ptrs, mask=mask_c, other=0.0).to(tl.float32) + FORM.ONE
    if norm.offset is not None:
        offset_ptrs = _ptrs(norm.offset, place, offs_c, FORM.TWO)
        shift = tl.load(offset_ptrs, mask=mask_c, other=0.0).to(tl.float32)
        if norm.bias_ptr is not None:
            bias = tl.load(norm.bias_ptr + offs_c, mask=mask_c, other=0.0).to(tl.float32)
            shift += scale * bias
    if norm.factor is not None:
        if norm.weight_ptr is not None:
            scale *= tl.load(norm.weight_ptr + offs_c, mask=mask_c, other=0.0).to(tl.float32)
        x *= scale
    if norm.offset is not None:
        x += shift
    return x


@triton.jit
def _store(norm, x, inverse, place, offs_c, padded):
    """Store a part of the norm's row, rounded to its dtype; int8 rows have `padded` channels."""
    _, b, _, row = place
    out = norm.out.ptr + b * norm.out.strides[0] + row * norm.out.strides[1]
    if norm.scale_ptr is not None:
        # As a tile of one row: the layout of a store of bytes must not become that of the sums.
        int8 = nearest_int8(x[None, :], inverse)
        tl.store(out + offs_c[None, :], int8, mask=(offs_c < padded)[None, :])
    else:
        tl.store(out + offs_c, x.to(norm.out.ptr.dtype.element_ty), mask=offs_c < padded)


@triton.jit(do_not_specialize=LENGTHS)
def residual_kernel(streams, norm, n_tokens, rows, channels, padded, FORM: tl.constexpr):
    """Compute y = x + gate * branch, and (layer_norm(y) * weight + bias) * (ONE + factor) +
    offset.

    Without a branch y is x, and is not stored. Without an output of the norm there is no norm. All
    steps are fp32. The norm reads y as it is stored. One program computes one token.

    Grid: (tokens of all streams, batch). streams: `StreamOperands`; norm: `NormOperands`. Of two
    streams the first n_tokens of `rows` are the first one's. Channels of x, y, branch and the norm
    are contiguous. int8 rows have `padded` channels, 0 from channel C on. A row has HEAD channels
    and TAIL more (0 for none), both powers of two, as in `numerics.quantize_rows_kernel`.
    """
    HEAD: tl.constexpr = FORM.HEAD
    TAIL: tl.constexpr = FORM.TAIL
    row, b = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    second = row >= n_tokens
    n = row
    if FORM.TWO:
        n = tl.where(second, row - n_tokens, row)
    place = (second, b, n, row)
    offs_h = tl.arange(0, HEAD)
    mask_h = offs_h < channels
    head = _stream(streams, place, offs_h, mask_h, FORM)
    if TAIL:
        offs_t = HEAD + tl.arange(0, TAIL)
        mask_t = offs_t < channels
        tail = _stream(streams, place, offs_t, mask_t, FORM)
    if norm.out is not None:
        total = tl.sum(head, axis=0)
        if TAIL:
            total += tl.sum(tail, axis=0)
        mean = total / channels
        head = tl.where(mask_h, head - mean, 0.0)
        squares = tl.sum(head * head, axis=0)
        if TAIL:
            tail = tl.where(mask_t, tail - mean, 0.0)
            squares += tl.sum(tail * tail, axis=0)
        inverse_std = 1.0 / tl.sqrt(squares / channels + norm.eps)
        head = _modulated(head * inverse_std, norm, place, offs_h, mask_h, FORM)
        if TAIL:
            tail = _modulated(tail * inverse_std, norm, place, offs_t, mask_t, FORM)
        inverse = inverse_std
        if norm.scale_ptr is not None:
            bits = tl.max(magnitude(head), axis=0)
            if TAIL:
                bits = tl.maximum(bits, tl.max(magnitude(tail), axis=0))
            amax, poison = amax_and_nan(bits)
            scale, inverse = int8_scale(amax, poison)
            tl.store(norm.scale_ptr + b * rows + row, scale)
        _store(norm, head, inverse, place, offs_h, padded)
        if TAIL:
            _store(norm, tail, inverse, place, offs_t, padded)


def broadcast(value: torch.Tensor, shape: torch.Size) -> Operand:
    """Return a tensor that broadcasts to [B, N, C] with its strides over that.

    It is copied if the offset of its last channel would overflow the 32 bits of the kernels.
    """
    wide = value.expand(shape)
    if wide.stride(2) * shape[2] >= 2**31:
        return broadcast(value.contiguous(), shape)
    return Operand(value, wide.stride())


def _each(values: Streams | None, streams: tuple[torch.Tensor, ...]) -> tuple[Operand, ...] | None:
    """Return what broadcasts to each stream, with its strides."""
    if values is None:
        return None
    pair = values if isinstance(values, tuple) else (values,)
    return tuple(broadcast(value, x.shape) for value, x in zip(pair, streams, strict=True))


def _dense(x: torch.Tensor) -> Operand:
    x = dense_rows(x)
    return Operand(x, (x.stride(0), x.stride(1), 1))


def norm_warps(channels: int) -> int:
    """Return the number of warps of a program that holds a row of `channels`."""
    return 4 if channels <= 2048 else 8


@replayed
def skip_norm(
    x: Streams,
    branch: torch.Tensor | None,
    *,
    gate: Streams | None,
    factor: Streams | None,
    offset: Streams | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    one: float,
    eps: float,
    dtype: torch.dtype,
    norm_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, ...]:
    """Compute y = x + gate * branch, its norm, or both; see `reference.skip_norm`.

    A thread holds VALUES neighbouring channels: as many as the norm alone reads at once, whatever
    the dtype of the branch. So the kernel sums a row in the same order with a skip and without.
    """
    streams = x if isinstance(x, tuple) else (x,)
    device = streams[0].device
    target_of(device)
    batch, n_tokens, channels = streams[0].shape
    rows = sum(part.shape[1] for part in streams)
    int8, skipped_streams = norm_dtype == torch.int8, ()
    if branch is not None:
        skipped_streams = tuple(
            torch.empty(part.shape, dtype=dtype, device=device) for part in streams
        )
    normed, scale, padded = None, None, channels
    dtypes = [dtype if skipped_streams else streams[0].dtype]
    if norm_dtype is not None:
        padded = padded_channels(channels) if int8 else channels
        normed = torch.empty(batch, rows, padded, dtype=norm_dtype, device=device)
        for values in (factor, offset):
            if values is not None:
                dtypes.append((values if isinstance(values, torch.Tensor) else values[0]).dtype)
    if int8:
        scale = torch.empty(batch, rows, dtype=torch.float32, device=device)
        head, tail = row_parts(padded)
        warps = row_warps(head + tail)
    else:
        head, tail, warps = triton.next_power_of_2(channels), 0, norm_warps(channels)
        dtypes += [] if norm_dtype is None else [norm_dtype]
    operands = StreamOperands(
        y=tuple(map(_dense, skipped_streams)) or None,
        x=tuple(map(_dense, streams)),
        branch=None if branch is None else _dense(branch),
        gate=_each(gate, streams),
    )
    norm = NormOperands(
        out=None if normed is None else _dense(normed),
        scale_ptr=scale,
        factor=_each(factor, streams),
        offset=_each(offset, streams),
        weight_ptr=None if weight is None else weight.contiguous(),
        bias_ptr=None if bias is None else bias.contiguous(),
        eps=eps,
    )
    values = 16 // min([dtype.itemsize for dtype in dtypes])
    launch(
        residual_kernel,
        (rows, batch),
        device,
        streams=operands,
        norm=norm,
        n_tokens=n_tokens,
        rows=rows,
        channels=channels,
        padded=padded,
        FORM=PassForm(head, tail, one, len(streams) == 2, values),
        num_warps=warps,
        num_stages=1,
    )
    return *skipped_streams, *[x for x in (normed, scale) if x is not None]


# --- a skip with any coefficients, a tile a program ----------------------------------------------


@triton.jit(do_not_specialize=LENGTHS)
def skip_kernel(
    y_ptr, branch_ptr, skip, branch_strides, n_tokens, channels,
    BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
    KINDS: tl.constexpr,
):  # fmt: skip
    """Compute y = c_skip * residual + c_out * branch, with the arguments of `close_skip`.

    Grid: (blocks of tokens * blocks of channels, batch).
    y [B, N, C] dense; branch [B, N, C] with contiguous channels.
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
    y = close_skip(branch, skip, b, (offs_n, offs_c), (mask_n, mask_c), KINDS)
    rows = (b.to(tl.int64) * n_tokens + offs_n.to(tl.int64)) * channels
    tl.store(y_ptr + rows[:, None] + offs_c[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@replayed
def skip(
    residual: torch.Tensor | None,
    branch: torch.Tensor,
    c_skip: float | torch.Tensor,
    c_out: float | torch.Tensor,
    *,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Compute c_skip * residual + c_out * branch of [B, N, C]; coefficients broadcast to it."""
    tile = tile_for("skip", "any", target_of(branch.device))
    batch, n_tokens, channels = branch.shape
    branch = dense_rows(branch)
    y = torch.empty(batch, n_tokens, channels, dtype=out_dtype, device=branch.device)
    launch(
        skip_kernel,
        (cdiv(n_tokens, tile.block_m) * cdiv(channels, tile.block_n), batch),
        branch.device,
        y_ptr=y,
        branch_ptr=branch,
        branch_strides=branch.stride()[:2],
        n_tokens=n_tokens,
        channels=channels,
        BLOCK_N=tile.block_m,
        BLOCK_C=tile.block_n,
        **skip_arguments(residual, c_skip, c_out, branch.shape),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return y


# --- q and k -------------------------------------------------------------------------------------


class NormRotateForm(NamedTuple):
    """The numbers of `norm_rotate_kernel` that are known when it is compiled.

    Attributes:
        HEADS: H.
        HEADS_PAD: H up to a power of two.
        HEAD_DIM: D.
        HEAD_PAD: D up to a power of two.
        BLOCK_C: H*D up to a power of two.
        NORM: Kind of the norm, see `formats.norm_kind`.
    """

    HEADS: int
    HEADS_PAD: int
    HEAD_DIM: int
    HEAD_PAD: int
    BLOCK_C: int
    NORM: int


@triton.jit(do_not_specialize=LENGTHS)
def norm_rotate_kernel(
    y_ptrs, x_ptr, weight_ptr, bias_ptr, rotary, x_strides, n_tokens, eps, FORM: tl.constexpr
):
    """Apply the norm of q or k, then the rotary embedding.

    Grid: (tokens, batch). x [B, N, H*D] with contiguous channels; y [B, n_tokens, H*D / RANKS]
    of each rank, of which the N tokens from its pointer on are written; weight [H*D], or [D] per
    head; bias [D]; rotary: cos, sin [N, D], or None.
    """
    CHANNELS: tl.constexpr = FORM.HEADS * FORM.HEAD_DIM
    n, b = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    offs_h = tl.arange(0, FORM.HEADS_PAD)[:, None]
    offs_d = tl.arange(0, FORM.HEAD_PAD)[None, :]
    offs_c = offs_h * FORM.HEAD_DIM + offs_d
    mask_d = offs_d < FORM.HEAD_DIM
    mask = (offs_h < FORM.HEADS) & mask_d
    row = x_ptr + b * x_strides[0] + n * x_strides[1]
    x = tl.load(row + offs_c, mask=mask, other=0.0).to(tl.float32)  # [HEADS_PAD, HEAD_PAD]
    inverse_rms, weight, bias, tables = 1.0, 1.0, 0.0, None
    if FORM.NORM == 1:  # across all heads
        # The row is read again without padding, so that heads do not change the order of the sum.
        offs_row = tl.arange(0, FORM.BLOCK_C)
        values = tl.load(row + offs_row, mask=offs_row < CHANNELS, other=0.0).to(tl.float32)
        inverse_rms = 1.0 / tl.sqrt(tl.sum(values * values, axis=0) / CHANNELS + eps)
        weight = tl.load(weight_ptr + offs_c, mask=mask, other=0.0).to(tl.float32)
    if FORM.NORM >= 2:  # per head
        weight = tl.load(weight_ptr + offs_d, mask=mask_d, other=0.0).to(tl.float32)
    if FORM.NORM == 3:  # layer norm
        bias = tl.load(bias_ptr + offs_d, mask=mask_d, other=0.0).to(tl.float32)
    if rotary is not None:
        tables = load_rotary(rotary, n * FORM.HEAD_DIM + offs_d, mask_d)
    x = norm_rotate_tile(x, inverse_rms, weight, bias, tables, eps, FORM.HEAD_DIM, FORM.NORM)
    x = x.to(y_ptrs[0].dtype.element_ty)
    RANKS: tl.constexpr = len(y_ptrs)
    WIDTH: tl.constexpr = CHANNELS // RANKS
    for rank in tl.static_range(RANKS):
        offs_rank = offs_c - rank * WIDTH
        out = y_ptrs[rank] + (b * n_tokens + n) * WIDTH
        tl.store(out + offs_rank, x, mask=mask & (offs_rank >= 0) & (offs_rank < WIDTH))


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
    to: tuple[torch.Tensor, ...] = (),
) -> torch.Tensor:
    """Apply norm and rotary embedding to x [B, N, H*D]; the result is dense, in the dtype of x.

    weight [H*D] or None; if D is a power of two, also [D] with a bias [D] (layer norm of each
    head) or without (RMSNorm of each head). cos and sin [N, D] or None. With by_head the result is
    viewed as [B, H, N, D]. With `to` it is written to tensors [B, N, H*D / P] of P ranks, which
    may be some tokens of dense ones, and the first is returned.
    """
    target_of(x.device)
    batch, n_tokens, channels = x.shape
    x = dense_rows(x)
    if to:
        y = to[0]
    elif by_head:
        dim = channels // heads
        strides = (n_tokens * channels, dim, channels, 1)
        y = x.new_empty_strided((batch, heads, n_tokens, dim), strides)
    else:
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    form = NormRotateForm(
        HEADS=heads,
        HEADS_PAD=triton.next_power_of_2(heads),
        HEAD_DIM=channels // heads,
        HEAD_PAD=triton.next_power_of_2(channels // heads),
        BLOCK_C=triton.next_power_of_2(channels),
        NORM=norm_kind(weight, bias, channels),
    )
    launch(
        norm_rotate_kernel,
        (n_tokens, batch),
        x.device,
        y_ptrs=to or (y,),
        x_ptr=x,
        weight_ptr=None if weight is None else weight.contiguous(),
        bias_ptr=None if bias is None else bias.contiguous(),
        rotary=None if cos is None or sin is None else (cos.contiguous(), sin.contiguous()),
        x_strides=x.stride()[:2],
        n_tokens=y.stride(0) * max(1, len(to)) // channels,
        eps=eps,
        FORM=form,
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
) -> tuple[torch.Tensor, ...]:
    """Apply `norm_rotate` by heads to q and k, in one replay; a norm is (weight, bias)."""
    rest = {"cos": cos, "sin": sin, "eps": eps, "by_head": True}
    return tuple(
        norm_rotate(x, heads, weight=weight, bias=bias, **rest)
        for x, (weight, bias) in ((q, norm_q), (k, norm_k))
    )
