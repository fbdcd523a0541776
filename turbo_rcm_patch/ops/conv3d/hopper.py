"""Convolution over time and space for Hopper, in Gluon, as an implicit matrix product.

    y[t, h, w] = sum over kt, kh, kw of W[kt, kh, kw] x[t + kt, h + kh - 1, w + kw - 1] + bias (+ residual)

Activations are channels-last, and x begins with the frames of history that a causal convolution
needs, so there is no padding in time. The padding in space is what a hardware copy writes for
coordinates outside of the frame: zeros.

A tile of y is 6 rows of 64 neighbouring positions. Each of three groups of four warps has two of
the rows, and all output channels (up to 128) of them. One step of the product takes 32 input
channels at one offset in time and one in width: the copy brings 8 rows of 64 positions, which
serve all three offsets in height, because an offset in height is a whole row of shared memory. So
the L2 is read 4 times for each element of x, where a copy per tap reads it 27 times, which would
take longer than the product.

Warps, over time (a step is 3 taps of 32 channels):

    producer   load 0 | load 1 | ... STAGES ahead of the slowest group, across the borders of tiles
    group g    wait 0, multiply 0 | wait 1, multiply 1, release 0 | ... | release last, epilogue

Shared memory:

    x      [STAGES, 8 rows, 64 positions, 32 channels], swizzled by 64 bytes: 32 KiB a slot
    w      [STAGES, 3 taps, 128, 32], swizzled by 64 bytes: 24 KiB a slot
    ready  [STAGES], empty [STAGES]: barriers of 8 bytes

Barriers:

    name         arrivals   who arrives            who waits   phase of the n-th wait
    ready[slot]  1 + bytes  producer, copies       groups      n % 2
    empty[slot]  3          groups, one each       producer    (n % 2) ^ 1: the first passes

The shape of a product of the tensor cores is a power of two, so 96 output channels cost as much as
128. The rows of the weight are in the order of `packed`, which gives a thread eight neighbouring
channels, so that it stores whole 16-byte words.
"""

from __future__ import annotations

from functools import cache

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from turbo_rcm_patch.ops.hopper_common import cta_barrier, tma_load
from turbo_rcm_patch.ops.launch import LENGTHS, cdiv, launch
from turbo_rcm_patch.ops.int8_linear.hopper import _pieces, _unpermuted, programs

_GROUPS = gl.constexpr(3)
_ROWS = gl.constexpr(2)  # of a group
_WIDTH = gl.constexpr(64)
_BLOCK_K = gl.constexpr(32)
_BLOCK_N = gl.constexpr(128)
_STAGES = gl.constexpr(3)
#: Rows of the frame in a tile of y.
_TILE_ROWS = _GROUPS.value * _ROWS.value
_PRODUCER_REGISTERS = gl.constexpr(24)
_REGISTERS = gl.constexpr(160)


@gluon.jit
def _tile(tile, frames, height, width, TILE_ROWS: gl.constexpr, WIDTH: gl.constexpr):
    """Return sample, frame, first row and first position of a tile.

    Frames come first, so that the programs which run together share x in the L2.
    """
    across, down = gl.cdiv(width, WIDTH), gl.cdiv(height, TILE_ROWS)
    t = tile % frames
    rest = tile // frames
    w = rest % across * WIDTH
    h = rest // across % down * TILE_ROWS
    return rest // (across * down), t, h, w


@gluon.jit
def _producer(
    x_desc, w_desc, shared, sizes,
    CHANNELS: gl.constexpr, KT: gl.constexpr, KH: gl.constexpr, KW: gl.constexpr,
    ROWS_READ: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Fill the slots in turn, each with rows of x and the taps of the weight over them."""
    x_smem, w_smem, ready, empty = shared
    frames, height, width, tiles = sizes
    STEPS: gl.constexpr = CHANNELS // _BLOCK_K
    step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        b, t, h, w = _tile(tile, frames, height, width, _GROUPS * _ROWS, _WIDTH)
        for k in range(0, KT * KW * STEPS):
            c, tap = k % STEPS * _BLOCK_K, k // STEPS
            kt, kw = tap // KW, tap % KW
            slot = step % STAGES
            full = ready.index(slot)
            mbarrier.wait(empty.index(slot), ((step // STAGES) % 2) ^ 1)
            mbarrier.expect(full, (ROWS_READ * _WIDTH + KH * _BLOCK_N) * _BLOCK_K * 2)
            at = [b, t + kt, h - KH // 2, w + kw - KW // 2, c]
            tma_load(x_desc, at, full, x_smem.index(slot))
            for kh in gl.static_range(KH):
                tma_load(
                    w_desc, [((kt * KH + kh) * KW + kw) * 4, 0, 0, 0, c], full,
                    w_smem.index(slot * KH + kh),
                )  # fmt: skip
            step += 1


@gluon.jit
def _consumer(
    shared, memory, sizes,
    GROUP: gl.constexpr, CHANNELS: gl.constexpr, FEATURES: gl.constexpr,
    KT: gl.constexpr, KH: gl.constexpr, KW: gl.constexpr,
    ROWS_READ: gl.constexpr, STAGES: gl.constexpr,
    HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr,
):  # fmt: skip
    """Compute two rows of every tile."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _BLOCK_N, 16])
    STEPS: gl.constexpr = KT * KW * (CHANNELS // _BLOCK_K)
    x_smem, w_smem, ready, empty = shared
    frames, height, width, tiles = sizes
    step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        b, t, h, w = _tile(tile, frames, height, width, _GROUPS * _ROWS, _WIDTH)
        upper = gl.zeros([_WIDTH, _BLOCK_N], gl.float32, layout)
        lower = gl.zeros([_WIDTH, _BLOCK_N], gl.float32, layout)
        for k in range(0, STEPS):
            slot = (step + k) % STAGES
            mbarrier.wait(ready.index(slot), ((step + k) // STAGES) % 2)
            rows = x_smem.index(slot).reshape([ROWS_READ * _WIDTH, _BLOCK_K])
            for kh in gl.static_range(KH):
                taps = w_smem.index(slot * KH + kh).reshape([_BLOCK_N, _BLOCK_K])
                use = (k > 0) if kh == 0 else True
                taps = taps.permute((1, 0))
                x = rows.slice((GROUP * _ROWS + kh) * _WIDTH, _WIDTH)
                upper = warpgroup_mma(x, taps, upper, use_acc=use, is_async=True)
                x = rows.slice((GROUP * _ROWS + kh + 1) * _WIDTH, _WIDTH)
                lower = warpgroup_mma(x, taps, lower, use_acc=use, is_async=True)
            # The products of this step stay in flight. Those before it no longer read their slot.
            upper, lower = warpgroup_mma_wait(2 * KH, deps=(upper, lower))
            mbarrier.arrive(empty.index((step + k + STAGES - 1) % STAGES), count=1, pred=k > 0)
        upper, lower = warpgroup_mma_wait(0, deps=(upper, lower))
        mbarrier.arrive(empty.index((step + STEPS - 1) % STAGES), count=1)
        step += STEPS
        frame, row = b * frames + t, h + GROUP * _ROWS
        _epilogue(
            upper, memory, frame, row, w, height, width, FEATURES, HAS_BIAS, HAS_RESIDUAL
        )
        _epilogue(
            lower, memory, frame, row + 1, w, height, width, FEATURES, HAS_BIAS, HAS_RESIDUAL
        )


@gluon.jit
def _epilogue(
    acc, memory, frame, row, w, height, width, FEATURES: gl.constexpr,
    HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr,
):  # fmt: skip
    """Add bias and residual to a row of products [64, 128], and store it."""
    y_ptr, bias_ptr, residual_ptr = memory
    pieces = _pieces(acc, _WIDTH, _BLOCK_N)
    like = _unpermuted(pieces[0], True)
    out: gl.constexpr = like.type.layout
    offs_w = w + gl.arange(0, 64, gl.SliceLayout(1, out))
    lanes_c = gl.arange(0, 32, gl.SliceLayout(0, out))
    mask = (offs_w < width) & (row < height)
    first = (frame.to(gl.int64) * height + row) * width
    for i in gl.static_range(FEATURES // 32):
        offs_c = i * 32 + lanes_c
        y = _unpermuted(pieces[i], True)
        if HAS_BIAS:
            y += gl.load(bias_ptr + offs_c).to(gl.float32)[None, :]
        at = ((first + offs_w) * FEATURES)[:, None] + offs_c[None, :]
        if HAS_RESIDUAL:
            y += gl.load(residual_ptr + at, mask=mask[:, None], other=0.0).to(gl.float32)
        gl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask[:, None])


@gluon.jit(do_not_specialize=LENGTHS)
def hopper_conv3d_kernel(
    y_ptr, x_desc, w_desc, bias_ptr, residual_ptr, frames, height, width, tiles,
    CHANNELS: gl.constexpr, FEATURES: gl.constexpr,
    KT: gl.constexpr, KH: gl.constexpr, KW: gl.constexpr,
    ROWS_READ: gl.constexpr, STAGES: gl.constexpr,
    HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr,
):  # fmt: skip
    """Compute y = conv3d(x, w) + bias + residual.

    Grid: as many programs as the card has multiprocessors; each takes every P-th tile.
    x [B, frames + KT - 1, height, width, CHANNELS]; w as in `packed`; y, residual
    [B, frames, height, width, FEATURES]; bias [FEATURES].
    """
    x_smem = gl.allocate_shared_memory(
        x_desc.dtype, [STAGES, 1, 1, ROWS_READ, _WIDTH, _BLOCK_K], x_desc.layout
    )
    w_smem = gl.allocate_shared_memory(
        w_desc.dtype, [STAGES * KH, 4, 4, 4, 2, _BLOCK_K], w_desc.layout
    )
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(ready.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=_GROUPS)
    fence_async_shared()
    cta_barrier()
    shared = (x_smem, w_smem, ready, empty)
    memory = (y_ptr, bias_ptr, residual_ptr)
    sizes = (frames, height, width, tiles)
    gl.warp_specialize(
        [
            (_consumer, (shared, memory, sizes, 0, CHANNELS, FEATURES, KT, KH, KW,
                         ROWS_READ, STAGES, HAS_BIAS, HAS_RESIDUAL)),
            (_consumer, (shared, memory, sizes, 1, CHANNELS, FEATURES, KT, KH, KW,
                         ROWS_READ, STAGES, HAS_BIAS, HAS_RESIDUAL)),
            (_consumer, (shared, memory, sizes, 2, CHANNELS, FEATURES, KT, KH, KW,
                         ROWS_READ, STAGES, HAS_BIAS, HAS_RESIDUAL)),
            (_producer, (x_desc, w_desc, shared, sizes, CHANNELS, KT, KH, KW, ROWS_READ, STAGES)),
        ],
        [4, 4, 1],
        [_REGISTERS, _REGISTERS, _PRODUCER_REGISTERS],
    )  # fmt: skip


@cache
def _layout(block: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(
        block, gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    )


def packed(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight [Cout, Cin, KT, KH, KW] as the kernel reads it: [taps, 128, Cin].

    Output channels are padded with zeros to 128. Channel 8q + 2j + e of every 32 comes at place
    8j + 2q + e, as in `int8_linear.hopper.describe_weight`.
    """
    features, channels = weight.shape[:2]
    taps = weight.permute(2, 3, 4, 0, 1).reshape(-1, features, channels)
    taps = torch.nn.functional.pad(taps, (0, 0, 0, _BLOCK_N.value - features))
    return taps.view(-1, 4, 4, 4, 2, channels).transpose(2, 3).reshape(-1, _BLOCK_N.value, channels)


def serves(weight: torch.Tensor) -> bool:
    """Return True if the kernel supports a weight [Cout, Cin, KT, KH, KW]."""
    features, channels, *taps = weight.shape
    return (
        weight.dtype in (torch.bfloat16, torch.float16)
        and features % 32 == channels % 32 == 0
        and features <= _BLOCK_N.value
        and all(tap in (1, 3) for tap in taps)
    )


def conv3d(
    x: torch.Tensor,
    weight: torch.Tensor,
    taps: tuple[int, int, int],
    features: int,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    """Compute a convolution of stride 1 with padding in space and none in time.

    Args:
        x: [B, T + KT - 1, H, W, Cin], dense, bf16 or fp16.
        weight: From `packed`, dtype of x.
        taps: KT, KH, KW.
        features: Cout.
        bias: [Cout] or None.
        residual: [B, T, H, W, Cout], dense, or None.

    Returns:
        [B, T, H, W, Cout].
    """
    batch, _, height, width, channels = x.shape
    kt, kh, kw = taps
    frames = x.shape[1] - kt + 1
    y = x.new_empty((batch, frames, height, width, features))
    rows_read = 8
    block = (1, 1, rows_read, _WIDTH.value, _BLOCK_K.value)
    x_desc = TensorDescriptor.from_tensor(x, list(block), _layout(block, x.dtype))
    w_block = (4, 4, 4, 2, _BLOCK_K.value)
    w_desc = TensorDescriptor.from_tensor(
        weight.view(-1, 4, 4, 2, channels), list(w_block), _layout(w_block, x.dtype)
    )
    tiles = batch * frames * cdiv(height, _TILE_ROWS) * cdiv(width, _WIDTH.value)
    launch(
        hopper_conv3d_kernel,
        (min(tiles, programs(x.device)),),
        x.device,
        y_ptr=y,
        x_desc=x_desc,
        w_desc=w_desc,
        bias_ptr=bias,
        residual_ptr=residual,
        frames=frames,
        height=height,
        width=width,
        tiles=tiles,
        CHANNELS=channels,
        FEATURES=features,
        KT=kt,
        KH=kh,
        KW=kw,
        ROWS_READ=rows_read,
        STAGES=_STAGES.value,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        num_warps=4,
    )
    return y
