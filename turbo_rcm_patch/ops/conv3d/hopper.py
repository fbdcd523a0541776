"""Convolution over time and space for Hopper, in Gluon, as an implicit matrix product.

    y[t, h, w] = sum of W[kt, kh, kw] x[t + kt, h + kh - 1, w + kw - 1] over the taps
                 + bias + residual

Activations are channels-last, and x begins with the frames of history that a causal convolution
needs, so there is no padding in time. The padding in space is what a hardware copy writes for
coordinates outside of the frame: zeros.

A tile of y is 6 rows of 64 neighbouring positions, with up to 128 output channels. Each of three
groups of four warps has two of the rows. One step of the product takes 64 bytes of input channels
at one offset in time and one along the row: a copy brings 8 rows of 64 positions, which serve all
three offsets across the rows, because such an offset is a whole row of shared memory. So the L2 is
read 4 times for each element of x. A copy for each of the 27 taps would read it 27 times, and take
longer than the product.

Warps, over time (a step is 3 taps of 32 channels):

    producer   load 0 | load 1 | ... STAGES ahead of the slowest group, across the borders of tiles
    group g    wait 0, multiply 0 | wait 1, multiply 1, release 0 | ... | release last, epilogue

Shared memory:

    x      [STAGES, 8 rows, 64 positions, 64 bytes], swizzled by 64 bytes: 32 KiB a slot
    w      [STAGES, 3 taps, 128 channels, 64 bytes], the same: 24 KiB a slot
    ready  [STAGES], empty [STAGES]: barriers of 8 bytes

Barriers:

    name         arrivals   who arrives            who waits   phase of the n-th wait
    ready[slot]  1 + bytes  producer, copies       groups      n % 2
    empty[slot]  3          groups, one each       producer    (n % 2) ^ 1: the first passes

n counts the uses of that slot.

The columns of a product are a power of two. For 96 output channels a group multiplies by 64 and by
32 columns (REST). It reads x into registers for that (REGISTERS), because two products that both
read x from shared memory would wait for it. fp32 is rounded to TF32 in registers. A descriptor
reads the rows of the weight in the order of `int8_linear.hopper.describe_weight`, which gives a
thread eight neighbouring channels, so that it stores whole 16-byte words.

Rows and positions may change places (`_turned`): of a frame of 60 x 104, tiles of 6 x 64 cover 128
columns, and tiles of 64 x 6 only 64 x 108.

On an H200 this kernel reaches 748 TFLOP/s for 96 channels at 480 x 832, where cuDNN takes a kernel
of sm_80 (289), 723 for 192 channels at 240 x 416 (584), and 749 for 384 at 120 x 208 (613), all in
bf16 and three taps along each axis. For 256, 512 and 1,024 channels cuDNN is up to 28 % faster.
Slower variants for 96 channels: 128 columns with x in shared memory (632) and in registers (537).
In TF32 it reaches 327, 312 and 361, where cuDNN reaches 141, 243 and 210.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from turbo_rcm_patch.ops.conv3d.formats import Call
from turbo_rcm_patch.ops.hopper_common import (
    cta_barrier,
    pieces_of,
    programs,
    tma_load,
    unpermuted,
)
from turbo_rcm_patch.ops.launch import LENGTHS, cdiv, launch

_GROUPS = gl.constexpr(3)
_ROWS = gl.constexpr(2)  # of a group
_ROWS_READ = gl.constexpr(8)  # those of a tile and one above and below
_WIDTH = gl.constexpr(64)
_STEP_BYTES = gl.constexpr(64)
_STAGES = gl.constexpr(3)
_PRODUCER_REGISTERS = gl.constexpr(24)
_REGISTERS = gl.constexpr(160)
#: Rows of a tile.
_TILE_ROWS = _GROUPS.value * _ROWS.value


class ConvMemory(NamedTuple):
    """The result of a convolution, and what is added to it.

    Attributes:
        y_ptr: [B, n_frames, rows, width, features] dense.
        bias_ptr: [features] or None.
        residual_ptr: As y, or None.
    """

    y_ptr: torch.Tensor
    bias_ptr: torch.Tensor | None
    residual_ptr: torch.Tensor | None


class ConvForm(NamedTuple):
    """The numbers of the kernel that are known when it is compiled.

    Attributes:
        ACROSS: Taps across the rows.
        MAIN: Output channels of a tile, in one product.
        REST: Those in a second product, 0 or 32.
        SLOT_N: Output channels of a slot of the weight.
        REGISTERS: True if x is multiplied from registers.
        TURNED: True if the frames of y and the taps of w lie in memory with rows and positions
            changed.
        WHOLE: True if features are divisible by MAIN + REST.
    """

    ACROSS: int
    MAIN: int
    REST: int
    SLOT_N: int
    REGISTERS: bool
    TURNED: bool
    WHOLE: bool


@gluon.jit
def _tile(tile, sizes):
    """Return sample, frame, first row, first position and channel tile of a tile.

    Channel tiles and frames come first, so that programs which run together share x in the L2.
    """
    frames, rows, width, n_tiles = sizes
    across = gl.cdiv(width, _WIDTH)
    down = gl.cdiv(rows, _GROUPS * _ROWS)
    n = tile % n_tiles
    tile = tile // n_tiles
    t = tile % frames
    tile = tile // frames
    w = tile % across * _WIDTH
    tile = tile // across
    return tile // down, t, tile % down * (_GROUPS * _ROWS), w, n


@gluon.jit
def _producer(x_desc, w_desc, shared, sizes, weight_sizes, tiles, FORM: gl.constexpr):
    """Fill the slots in turn, each with rows of x and the taps of the weight over them."""
    ACROSS: gl.constexpr = FORM.ACROSS
    x_smem, w_smem, ready, empty = shared
    BLOCK_K: gl.constexpr = _STEP_BYTES // (x_desc.dtype.primitive_bitwidth // 8)
    channels, _, times, along_taps = weight_sizes
    steps = channels // BLOCK_K
    step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        b, t, row, w, n = _tile(tile, sizes)
        for k in range(0, times * along_taps * steps):
            c, offset = k % steps * BLOCK_K, k // steps
            kt, along = offset // along_taps, offset % along_taps
            slot = step % _STAGES
            full = ready.index(slot)
            # The phase before the first counts as complete, so the first round does not wait.
            mbarrier.wait(empty.index(slot), ((step // _STAGES) % 2) ^ 1)
            mbarrier.expect(full, (_ROWS_READ * _WIDTH + ACROSS * FORM.SLOT_N) * _STEP_BYTES)
            at = [b, t + kt, row - ACROSS // 2, w + along - along_taps // 2, c]
            tma_load(x_desc, at, full, x_smem.index(slot))
            for across in gl.static_range(ACROSS):
                if FORM.TURNED:
                    tap = (kt * along_taps + along) * ACROSS + across
                else:
                    tap = (kt * ACROSS + across) * along_taps + along
                at_w = [n * ((FORM.MAIN + FORM.REST) // 32), 0, 0, 0, tap * channels + c]
                tma_load(w_desc, at_w, full, w_smem.index(slot * ACROSS + across))
            step += 1


@gluon.jit
def _to_tf32(x):
    """Round fp32 to TF32, of which the tensor cores would cut off the last bits."""
    return gl.inline_asm_elementwise(
        "cvt.rna.tf32.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _multiply(x, taps, main, rest, use, x_layout: gl.constexpr, FORM: gl.constexpr):
    """Start main += x taps[:MAIN]^T and rest += x taps[MAIN:]^T.

    x [64, BLOCK_K] is in registers or in shared memory. Without REST the second is not computed.
    """
    MAIN: gl.constexpr = FORM.MAIN
    REST: gl.constexpr = FORM.REST
    first = taps.slice(0, MAIN).permute((1, 0))
    main = warpgroup_mma(x, first, main, use_acc=use, is_async=True)
    if REST:
        second = taps.slice(MAIN, REST).permute((1, 0))
        if FORM.REGISTERS:
            x = gl.convert_layout(x, x_layout, assert_trivial=True)
        rest = warpgroup_mma(x, second, rest, use_acc=use, is_async=True)
    return main, rest


@gluon.jit
def _consumer(shared, memory, sizes, weight_sizes, tiles, GROUP: gl.constexpr, FORM: gl.constexpr):
    """Compute two rows of every tile."""
    ACROSS: gl.constexpr = FORM.ACROSS
    MAIN: gl.constexpr = FORM.MAIN
    REST: gl.constexpr = FORM.REST
    REGISTERS: gl.constexpr = FORM.REGISTERS
    SLOT_N: gl.constexpr = FORM.SLOT_N
    x_smem, w_smem, ready, empty = shared
    frames, _, _, _ = sizes
    BLOCK_K: gl.constexpr = _STEP_BYTES // (x_smem.dtype.primitive_bitwidth // 8)
    DEPTH: gl.constexpr = BLOCK_K // 2
    main_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MAIN, DEPTH])
    rest_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, DEPTH])
    PAIR: gl.constexpr = 32 // x_smem.dtype.primitive_bitwidth  # channels in a register
    x_layout: gl.constexpr = gl.DotOperandLayout(0, main_layout, PAIR)
    x_rest_layout: gl.constexpr = gl.DotOperandLayout(0, rest_layout, PAIR)
    channels, features, times, along_taps = weight_sizes
    steps = times * along_taps * (channels // BLOCK_K)
    STARTED: gl.constexpr = 2 * ACROSS * (2 if REST else 1)
    step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        b, t, row, w, n = _tile(tile, sizes)
        upper = gl.zeros([_WIDTH, MAIN], gl.float32, main_layout)
        lower = gl.zeros([_WIDTH, MAIN], gl.float32, main_layout)
        upper_rest = gl.zeros([_WIDTH, 32], gl.float32, rest_layout)
        lower_rest = gl.zeros([_WIDTH, 32], gl.float32, rest_layout)
        for k in range(0, steps):
            slot = (step + k) % _STAGES
            mbarrier.wait(ready.index(slot), ((step + k) // _STAGES) % 2)
            x_rows = x_smem.index(slot).reshape([_ROWS_READ * _WIDTH, BLOCK_K])
            for i in gl.static_range(ACROSS + 1):  # the rows that the group's two rows need
                x = x_rows.slice((GROUP * _ROWS + i) * _WIDTH, _WIDTH)
                if REGISTERS:
                    x = x.load(x_layout)
                    if PAIR == 1:
                        x = _to_tf32(x)
                if i < ACROSS:
                    taps = w_smem.index(slot * ACROSS + i).reshape([SLOT_N, BLOCK_K])
                    upper, upper_rest = _multiply(
                        x, taps, upper, upper_rest, k + i > 0, x_rest_layout, FORM
                    )
                if i > 0:
                    taps = w_smem.index(slot * ACROSS + i - 1).reshape([SLOT_N, BLOCK_K])
                    lower, lower_rest = _multiply(
                        x, taps, lower, lower_rest, k + i > 1, x_rest_layout, FORM
                    )
            if REGISTERS:
                # The next step's rows need the registers of this step's.
                upper, lower, upper_rest, lower_rest = warpgroup_mma_wait(
                    0, deps=(upper, lower, upper_rest, lower_rest)
                )
                mbarrier.arrive(empty.index(slot), count=1)
            else:
                # This step's products stay in flight. Those before it no longer read their slot.
                upper, lower, upper_rest, lower_rest = warpgroup_mma_wait(
                    STARTED, deps=(upper, lower, upper_rest, lower_rest)
                )
                before = empty.index((step + k + _STAGES - 1) % _STAGES)
                mbarrier.arrive(before, count=1, pred=k > 0)
        if not REGISTERS:
            upper, lower, upper_rest, lower_rest = warpgroup_mma_wait(
                0, deps=(upper, lower, upper_rest, lower_rest)
            )
            mbarrier.arrive(empty.index((step + steps - 1) % _STAGES), count=1)
        step += steps
        for i in gl.static_range(_ROWS):
            main, rest = (upper, upper_rest) if i == 0 else (lower, lower_rest)
            pieces = pieces_of(main, _WIDTH, MAIN)
            if REST:
                pieces = pieces + (rest,)
            place = (b * frames + t, row + GROUP * _ROWS + i, w, n * (MAIN + REST))
            _epilogue(pieces, memory, place, sizes, features, FORM)


@gluon.jit
def _epilogue(pieces, memory, place, sizes, features, FORM: gl.constexpr):
    """Add bias and residual to a row of products, pieces [64, 32], and store it."""
    PIECES: gl.constexpr = (FORM.MAIN + FORM.REST) // 32
    y_ptr, bias_ptr, residual_ptr = memory
    _, rows, width, _ = sizes
    frame, row, w, start_c = place
    like = unpermuted(pieces[0], True)
    layout: gl.constexpr = like.type.layout
    offs_w = w + gl.arange(0, 64, gl.SliceLayout(1, layout))
    lanes_c = gl.arange(0, 32, gl.SliceLayout(0, layout))
    mask = (offs_w < width) & (row < rows)
    first = frame.to(gl.int64) * rows * width
    token = first + (offs_w * rows + row if FORM.TURNED else row * width + offs_w)
    for i in gl.static_range(PIECES):
        offs_c = start_c + i * 32 + lanes_c
        inside = mask[:, None]
        if not FORM.WHOLE:
            inside = inside & (offs_c < features)[None, :]
        y = unpermuted(pieces[i], True)
        if bias_ptr is not None:
            bias = gl.load(bias_ptr + offs_c, mask=offs_c < features, other=0.0)
            y += bias.to(gl.float32)[None, :]
        at = (token * features)[:, None] + offs_c[None, :]
        if residual_ptr is not None:
            y += gl.load(residual_ptr + at, mask=inside, other=0.0).to(gl.float32)
        gl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)


#: As `LENGTHS`: no divisibility of these helps the kernel.
_SIZES = (*LENGTHS, "along_taps", "n_frames", "n_tiles", "times", "width")


@gluon.jit(do_not_specialize=_SIZES)
def hopper_conv3d_kernel(
    memory, x_desc, w_desc, n_frames, rows, width, n_tiles, tiles, channels, times, along_taps,
    FORM: gl.constexpr,
):  # fmt: skip
    """Compute y = conv3d(x, w) + bias + residual.

    Grid: as many programs as the card has multiprocessors; each takes every P-th tile.
    channels: those of x and those of y, called features.
    x [B, n_frames + times - 1, rows, width, channels]; w [features, times, taps across the rows,
    along_taps, channels]; memory: `ConvMemory`.
    """
    BLOCK_K: gl.constexpr = _STEP_BYTES // (x_desc.dtype.primitive_bitwidth // 8)
    x_smem = gl.allocate_shared_memory(
        x_desc.dtype, [_STAGES, 1, 1, _ROWS_READ, _WIDTH, BLOCK_K], x_desc.layout
    )
    w_smem = gl.allocate_shared_memory(
        w_desc.dtype, [_STAGES * FORM.ACROSS, FORM.SLOT_N // 32, 4, 4, 2, BLOCK_K], w_desc.layout
    )
    ready = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(_STAGES):
        mbarrier.init(ready.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=_GROUPS)
    fence_async_shared()
    cta_barrier()
    shared = (x_smem, w_smem, ready, empty)
    sizes = (n_frames, rows, width, n_tiles)
    weight_sizes = (channels[0], channels[1], times, along_taps)
    gl.warp_specialize(
        [
            (_consumer, (shared, memory, sizes, weight_sizes, tiles, 0, FORM)),
            (_consumer, (shared, memory, sizes, weight_sizes, tiles, 1, FORM)),
            (_consumer, (shared, memory, sizes, weight_sizes, tiles, 2, FORM)),
            (_producer, (x_desc, w_desc, shared, sizes, weight_sizes, tiles, FORM)),
        ],
        [4, 4, 1],
        [_REGISTERS, _REGISTERS, _PRODUCER_REGISTERS],
    )


_ELEMENTS = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}


@cache
def _layout(block: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(block, _ELEMENTS[dtype])


def _covered(rows: int, width: int) -> int:
    """Return the positions that the tiles over a frame cover."""
    return cdiv(rows, _TILE_ROWS) * _TILE_ROWS * cdiv(width, _WIDTH.value) * _WIDTH.value


def _turned(height: int, width: int) -> bool:
    """Return True if tiles whose rows run down the frame cover less beyond its borders."""
    return _covered(width, height) < _covered(height, width)


def columns_for(features: int) -> tuple[int, int]:
    """Return MAIN and REST, the output channels of a tile: those that waste the fewest."""
    if features <= 64:
        return (64, 0) if features > 32 else (32, 0)
    wasted = {columns: -features % sum(columns) for columns in ((128, 0), (64, 32))}
    return min(wasted, key=lambda columns: wasted[columns])


def conv3d(
    call: Call, bias: torch.Tensor | None, residual: torch.Tensor | None, *, out_dtype: torch.dtype
) -> torch.Tensor:
    """Compute a convolution of stride 1 with padding in space and none in time.

    Args:
        call: x [B, T + KT - 1, H, W, Cin], dense, bf16, fp16 or fp32, which is rounded to
            TF32; weight [Cout, KT, KH, KW, Cin], dense, of the same dtype; fp32 as
            `api.pack_weight` rounds it. KH and KW are 1 or 3.
        bias: [Cout] or None.
        residual: [B, T, H, W, Cout], dense, or None.
        out_dtype: dtype of the result.

    Returns:
        [B, T, H, W, Cout].
    """
    x, weight = call.x, call.weight
    features, kt, kh, kw, channels = weight.shape
    if features % 32 or channels % 32:  # few channels at the ends of a model
        x = F.pad(x, (0, -channels % 32)) if channels % 32 else x
        weight = F.pad(weight, (0, -channels % 32, 0, 0, 0, 0, 0, 0, 0, -features % 32))
        channels = weight.shape[4]
    batch, _, height, width, _ = x.shape
    frames = x.shape[1] - kt + 1
    y = torch.empty(batch, frames, height, width, features, dtype=out_dtype, device=x.device)
    turned = _turned(height, width)
    if turned:
        x, height, width = x.transpose(2, 3), width, height
    main, rest = columns_for(features)
    slot_n = triton.next_power_of_2(main + rest)
    block_k = _STEP_BYTES.value // x.element_size()
    block = (1, 1, _ROWS_READ.value, _WIDTH.value, block_k)
    w_block = (slot_n // 32, 4, 4, 2, block_k)
    row = kt * kh * kw * channels
    n_tiles = cdiv(features, main + rest)
    tiles = n_tiles * batch * frames * cdiv(height, _TILE_ROWS) * cdiv(width, _WIDTH.value)
    launch(
        hopper_conv3d_kernel,
        (min(tiles, programs(x.device)),),
        x.device,
        memory=ConvMemory(y, bias, residual),
        x_desc=TensorDescriptor.from_tensor(x, list(block), _layout(block, x.dtype)),
        w_desc=TensorDescriptor(
            weight,
            [weight.shape[0] // 32, 4, 4, 2, row],
            [32 * row, 2 * row, 8 * row, row, 1],
            list(w_block),
            _layout(w_block, x.dtype),
        ),
        n_frames=frames,
        rows=height,
        width=width,
        n_tiles=n_tiles,
        tiles=tiles,
        channels=(channels, features),
        times=kt,
        along_taps=kh if turned else kw,
        FORM=ConvForm(
            ACROSS=kw if turned else kh,
            MAIN=main,
            REST=rest,
            SLOT_N=slot_n,
            REGISTERS=rest > 0 or x.dtype == torch.float32,
            TURNED=turned,
            WHOLE=features % (main + rest) == 0,
        ),
        num_warps=4,
    )
    return y
