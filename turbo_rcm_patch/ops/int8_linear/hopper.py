"""The int8 linear for Hopper, in Gluon: one warp loads, groups of four warps multiply.

    y = gelu((x W^T) * x_scale * w_scale + bias)

The arithmetic is that of `triton.int8_linear_kernel`, bit for bit. A weight has a
scale per row (`hopper_linear_kernel`) or per block of 128 x 128 (`hopper_linear_blocks_kernel`,
where a step over K is one block, whose integer product is scaled and added in fp32).

A program takes every P-th tile of y, P being the number of programs. In the cooperative schedule
(CUTLASS's word) its groups share a tile, and each group has some of the rows. In the ping-pong
schedule groups take tiles in turn, so that one group finishes a tile while the other multiplies.

Warps, over time, for the cooperative schedule (a step is 128 channels):

    producer   load 0 | load 1 | ... STAGES ahead of the slowest group, across the borders of tiles
    group 0    wait 0, multiply 0 | wait 1, multiply 1, release 0 | ... | release last, epilogue
    group 1    the same with the next rows of the tile and the same slots of the weight

and for ping-pong, where a slot belongs to the tile of one group:

    group 0    multiply tile 0            | epilogue of tile 0       | multiply tile 2 | ...
    group 1    wait for its turn          | multiply tile 1          | epilogue of tile 1 | ...

Shared memory (PARTS: groups, or 1 for ping-pong):

    x      int8 [STAGES * PARTS, BLOCK_M, 128], swizzled by 128 bytes
    w      int8 [STAGES, BLOCK_N, 128], the same
    ready  [STAGES], empty [STAGES], order [GROUPS]: barriers of 8 bytes

Together they take 192 KiB (ping-pong and cooperative of 128 rows), 224 KiB (192 rows) or 200 KiB
(scales per block).

Barriers:

    name         arrivals   who arrives            who waits   phase of the n-th wait
    ready[slot]  1 + bytes  producer, copies       groups      n % 2
    empty[slot]  PARTS      groups, one each       producer    (n % 2) ^ 1: the first passes
    order[g]     1          group before g         group g     n % 2; for group 0 (n % 2) ^ 1

n counts the uses of that slot, or a group's tiles. Only ping-pong uses `order`.

A thread has pairs of neighbouring columns of a product of the tensor cores. If the number of
features is divisible by 32, the weight's rows are loaded in an order that gives a thread eight
neighbouring columns (PERMUTED, `describe_weight`). So whole 16-byte words are stored without an
exchange between threads.

With a scale per block this kernel reaches 833 to 1,017 * 10^12 op/s on an H200 at 32,760 rows of
1,536 channels, and the portable kernel 475 to 561. Two groups of 128 rows (650 to 1,013), two or
three groups in ping-pong (737 to 974) and two programs on a multiprocessor (568 to 989) were
slower, except for the two programs at 8,960 features: 975 against 952.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

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

from turbo_rcm_patch.ops.formats import Int8Tensor, LinearInputs
from turbo_rcm_patch.ops.hopper_common import (
    cta_barrier,
    pieces_of,
    programs,
    tma_load,
    unpermuted,
)
from turbo_rcm_patch.ops.launch import LENGTHS, cdiv, launch
from turbo_rcm_patch.ops.numerics import gelu_tanh


class LinearMemory(NamedTuple):
    """The result of a product, its scales and its bias.

    Attributes:
        y_ptr: [B, N, Cout] dense.
        x_scale_ptr: fp32 [B, N].
        w_scale_ptr: fp32 [Cout], or [ceil(Cout / 128), ceil(K / 128)].
        bias_ptr: [Cout] or None.
    """

    y_ptr: torch.Tensor
    x_scale_ptr: torch.Tensor
    w_scale_ptr: torch.Tensor
    bias_ptr: torch.Tensor | None


class LinearForm(NamedTuple):
    """The numbers of the kernels that are known when they are compiled.

    Attributes:
        GROUPS: Groups of four warps, 2 or 3.
        PARTS: Groups that share a tile.
        BLOCK_M: Rows of a group.
        BLOCK_N: Columns of a group.
        STAGES: Slots of shared memory.
        PERMUTED: True if the weight is in the order of `describe_weight`.
        GELU: True if GELU comes after the product.
    """

    GROUPS: int
    PARTS: int
    BLOCK_M: int
    BLOCK_N: int
    STAGES: int
    PERMUTED: bool
    GELU: bool


@gluon.jit
def _epilogue(acc, memory, place, sizes, FORM: gl.constexpr, SCALED: gl.constexpr):
    """Scale a product [BLOCK_M, BLOCK_N], add the bias, activate, store.

    The product is int32, or fp32 that includes the weight's scales (SCALED). memory:
    `LinearMemory`; place: batch entry, first row and column; sizes: tokens, K, Cout and tiles.
    """
    b, start_m, start_c = place
    n_tokens, _, c_out, _ = sizes
    PERMUTED: gl.constexpr = FORM.PERMUTED
    ACROSS: gl.constexpr = FORM.BLOCK_N // 32
    PIECES: gl.constexpr = FORM.BLOCK_M // 64 * ACROSS
    pieces = pieces_of(acc, FORM.BLOCK_M, FORM.BLOCK_N)
    like = unpermuted(pieces[0], PERMUTED)
    layout: gl.constexpr = like.type.layout
    first = b.to(gl.int64) * n_tokens
    lanes_m = start_m + gl.arange(0, 64, gl.SliceLayout(1, layout))
    lanes_c = start_c + gl.arange(0, 32, gl.SliceLayout(0, layout))
    for i in gl.static_range(PIECES):
        offs_m, offs_c = lanes_m + i // ACROSS * 64, lanes_c + i % ACROSS * 32
        mask_m, mask_c = offs_m < n_tokens, offs_c < c_out
        if i % ACROSS == 0:
            x_scale = gl.load(memory.x_scale_ptr + first + offs_m, mask=mask_m, other=0.0)
        if not SCALED:
            w_scale = gl.load(memory.w_scale_ptr + offs_c, mask=mask_c, other=0.0)
        if memory.bias_ptr is not None:
            bias = gl.load(memory.bias_ptr + offs_c, mask=mask_c, other=0.0).to(gl.float32)
        y = unpermuted(pieces[i], PERMUTED).to(gl.float32) * x_scale[:, None]
        if not SCALED:
            y = y * w_scale[None, :]
        if memory.bias_ptr is not None:
            y += bias[None, :]
        if FORM.GELU:
            y = gelu_tanh(y)
        gl.store(
            memory.y_ptr + ((first + offs_m) * c_out)[:, None] + offs_c[None, :],
            y.to(memory.y_ptr.dtype.element_ty),
            mask=mask_m[:, None] & mask_c[None, :],
        )


#: Channels of one step over K: the width of a hardware copy's swizzle.
_BLOCK_K = gl.constexpr(128)
#: Blocks of rows that share the weight in L2.
_GROUP_M = gl.constexpr(8)
#: Registers per thread of the loading warp and of two or three groups, which fill a
#: multiprocessor; see `attention/hopper.py`.
_PRODUCER_REGISTERS = gl.constexpr(24)
_REGISTERS_2 = gl.constexpr(240)
_REGISTERS_3 = gl.constexpr(160)


class KernelSchedule(NamedTuple):
    """The division of the work among groups.

    A group multiplies block_m rows by block_n columns. In ping-pong that is a tile, and groups
    take tiles in turn. Else a tile has the rows of all groups.
    """

    groups: int  # 2 or 3
    block_m: int  # 64 or 128
    block_n: int
    stages: int
    ping_pong: bool

    @property
    def tile(self) -> tuple[int, int]:
        return self.block_m * (1 if self.ping_pong else self.groups), self.block_n


#: Name -> schedule. Each has as many slots as fit into 227 KiB.
SCHEDULES = {
    "cooperative-128x256": KernelSchedule(2, 64, 256, 4, False),
    "cooperative-192x256": KernelSchedule(3, 64, 256, 4, False),
    "ping-pong-128x128": KernelSchedule(2, 128, 128, 6, True),
}
#: Up to the first number of channels the epilogue takes a large share of the time, and from the
#: second on a small one.
_SHORT, _LONG = 3072, 8192
#: Number of columns up to which a row of tiles has few tiles.
_NARROW = 2048


def schedule_for(channels: int, features: int, *, gelu: bool) -> KernelSchedule:
    """Return the schedule that was fastest on an H200 at 32,760 tokens.

    For a short K groups take turns, so that one multiplies while another finishes its tile. For a
    long K, or with a short epilogue, larger tiles are faster, because they read the L2 less often.

    Args:
        channels: K.
        features: Cout.
        gelu: True if GELU comes after the product.
    """
    if channels <= _SHORT:
        return SCHEDULES["cooperative-128x256" if features <= _NARROW else "ping-pong-128x128"]
    if gelu and channels < _LONG:
        return SCHEDULES["ping-pong-128x128"]
    return SCHEDULES["cooperative-192x256"]


@gluon.jit
def _tile_offsets(tile, sizes, FORM: gl.constexpr):
    """Return batch entry, first row and first column of a tile."""
    n_tokens, _, c_out, _ = sizes
    TILE_M: gl.constexpr = FORM.PARTS * FORM.BLOCK_M
    blocks_m, blocks_c = gl.cdiv(n_tokens, TILE_M), gl.cdiv(c_out, FORM.BLOCK_N)
    b = tile // (blocks_m * blocks_c)
    inside = tile % (blocks_m * blocks_c)
    first_m = inside // (_GROUP_M * blocks_c) * _GROUP_M
    rows_here = gl.minimum(blocks_m - first_m, _GROUP_M)
    inside = inside % (_GROUP_M * blocks_c)
    return b, (first_m + inside % rows_here) * TILE_M, inside // rows_here * FORM.BLOCK_N


class Pipeline(NamedTuple):
    """The slots of shared memory and their barriers, "ready" and "empty"."""

    x: gl.shared_memory_descriptor
    w: gl.shared_memory_descriptor
    ready: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


@gluon.jit
def _allocate_pipeline(x_desc, w_desc, FORM: gl.constexpr):
    """Allocate STAGES slots for PARTS blocks of x and one of the weight, with their barriers.

    A slot has one barrier for "ready" and one for "empty", at which PARTS groups arrive.
    """
    STAGES: gl.constexpr = FORM.STAGES
    PARTS: gl.constexpr = FORM.PARTS
    x_smem = gl.allocate_shared_memory(
        gl.int8, [STAGES * PARTS, FORM.BLOCK_M, _BLOCK_K], x_desc.layout
    )
    if FORM.PERMUTED:
        w_smem = gl.allocate_shared_memory(
            gl.int8, [STAGES, FORM.BLOCK_N // 32, 4, 4, 2, _BLOCK_K], w_desc.layout
        )
    else:
        w_smem = gl.allocate_shared_memory(
            gl.int8, [STAGES, FORM.BLOCK_N, _BLOCK_K], w_desc.layout
        )
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(ready.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=PARTS)
    return Pipeline(x_smem, w_smem, ready, empty)


@gluon.jit
def _fence_barriers():
    """Make new barriers visible to all warps and to the hardware copies."""
    fence_async_shared()
    cta_barrier()


@gluon.jit
def _producer(x_desc, w_desc, shared, sizes, FORM: gl.constexpr):
    """Fill the slots in turn, each with PARTS blocks of x and one of the weight."""
    n_tokens, channels, _, tiles = sizes
    PARTS: gl.constexpr = FORM.PARTS
    step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        b, start_m, start_c = _tile_offsets(tile, sizes, FORM)
        row = b * n_tokens + start_m
        for start_k in range(0, channels, _BLOCK_K):
            slot = step % FORM.STAGES
            full = shared.ready.index(slot)
            # The phase before the first counts as complete, so the first round does not wait.
            mbarrier.wait(shared.empty.index(slot), ((step // FORM.STAGES) % 2) ^ 1)
            mbarrier.expect(full, (PARTS * FORM.BLOCK_M + FORM.BLOCK_N) * _BLOCK_K)
            for part in gl.static_range(PARTS):
                x_tile = shared.x.index(slot * PARTS + part)
                tma_load(x_desc, [row + part * FORM.BLOCK_M, start_k], full, x_tile)
            if FORM.PERMUTED:
                tma_load(w_desc, [start_c // 32, 0, 0, 0, start_k], full, shared.w.index(slot))
            else:
                tma_load(w_desc, [start_c, start_k], full, shared.w.index(slot))
            step += 1


@gluon.jit
def _consumer(shared, order, memory, sizes, GROUP: gl.constexpr, FORM: gl.constexpr):
    """Compute BLOCK_M rows of every tile; in ping-pong every GROUPS-th tile of a program."""
    _, channels, _, tiles = sizes
    GROUPS: gl.constexpr = FORM.GROUPS
    STAGES: gl.constexpr = FORM.STAGES
    BLOCK_M: gl.constexpr = FORM.BLOCK_M
    BLOCK_N: gl.constexpr = FORM.BLOCK_N
    PING_PONG: gl.constexpr = FORM.PARTS < FORM.GROUPS
    # The widest int8 instruction of Triton whose columns are a power of two.
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    PART: gl.constexpr = 0 if PING_PONG else GROUP
    FIRST: gl.constexpr = 1 if GROUP == 0 else 0
    EVERY: gl.constexpr = GROUPS if PING_PONG else 1
    steps = gl.cdiv(channels, _BLOCK_K)
    step = 0
    taken = 0
    first = gl.program_id(0)
    if PING_PONG:
        step = steps * GROUP
        first = first + GROUP * gl.num_programs(0)
    for tile in range(first, tiles, gl.num_programs(0) * EVERY):
        b, start_m, start_c = _tile_offsets(tile, sizes, FORM)
        start_m += PART * BLOCK_M
        if PING_PONG:
            # A barrier tells only whether the number of fills is odd or even, so no group may wait
            # for a fill before the previous one is complete. The first group begins.
            mbarrier.wait(order.index(GROUP), (taken % 2) ^ FIRST)
        acc = gl.zeros([BLOCK_M, BLOCK_N], gl.int32, layout)
        for k in range(0, steps):
            slot = (step + k) % STAGES
            mbarrier.wait(shared.ready.index(slot), ((step + k) // STAGES) % 2)
            x_tile = shared.x.index(slot * FORM.PARTS + PART)
            w_tile = shared.w.index(slot).reshape([BLOCK_N, _BLOCK_K]).permute((1, 0))
            acc = warpgroup_mma(x_tile, w_tile, acc, use_acc=k > 0, is_async=True)
            # One step stays in flight. The step before it no longer reads its slot.
            acc = warpgroup_mma_wait(1, deps=(acc,))
            before = shared.empty.index((step + k + STAGES - 1) % STAGES)
            mbarrier.arrive(before, count=1, pred=k > 0)
        if PING_PONG:
            mbarrier.arrive(order.index((GROUP + 1) % GROUPS), count=1)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(shared.empty.index((step + steps - 1) % STAGES), count=1)
        step += steps * EVERY
        taken += 1  # noqa: SIM113
        _epilogue(acc, memory, (b, start_m, start_c), sizes, FORM, SCALED=False)


@gluon.jit(do_not_specialize=LENGTHS)
def hopper_linear_kernel(
    memory, x_desc, w_desc, n_tokens, channels, c_out, tiles, FORM: gl.constexpr
):
    """Compute y = gelu((x W^T) * x_scale * w_scale + bias).

    Grid: as many programs as the card has multiprocessors; each takes every P-th tile.
    memory: `LinearMemory`; descriptors have blocks of BLOCK_M rows of x int8 [B * N, K], and of
    BLOCK_N rows of the weight int8 [Cout, K].
    """
    GROUPS: gl.constexpr = FORM.GROUPS
    shared = _allocate_pipeline(x_desc, w_desc, FORM)
    order = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    for group in gl.static_range(GROUPS):
        mbarrier.init(order.index(group), count=1)
    _fence_barriers()
    sizes = (n_tokens, channels, c_out, tiles)
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_consumer, (shared, order, memory, sizes, 0, FORM)),
                (_consumer, (shared, order, memory, sizes, 1, FORM)),
                (_producer, (x_desc, w_desc, shared, sizes, FORM)),
            ],
            [4, 1],
            [_REGISTERS_2, _PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_consumer, (shared, order, memory, sizes, 0, FORM)),
                (_consumer, (shared, order, memory, sizes, 1, FORM)),
                (_consumer, (shared, order, memory, sizes, 2, FORM)),
                (_producer, (x_desc, w_desc, shared, sizes, FORM)),
            ],
            [4, 4, 1],
            [_REGISTERS_3, _REGISTERS_3, _PRODUCER_REGISTERS],
        )


@cache
def _layout(block: tuple[int, ...]) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(block, gl.int8)


def _describe_rows(x: torch.Tensor, rows: int) -> TensorDescriptor:
    """Describe x int8 [R, K] in blocks of `rows` rows."""
    block = [rows, _BLOCK_K.value]
    return TensorDescriptor.from_tensor(x, block, _layout(tuple(block)))


def describe_weight(weight: torch.Tensor, rows: int) -> TensorDescriptor:
    """Describe int8 [Cout, K] in blocks of `rows` rows, in the order PERMUTED.

    Row 8q + 2j + e of every 32 comes at place 8j + 2q + e. Thread q of four has columns 2q and
    2q + 1 of every eight columns j of a product, so in this order it has eight neighbours. Cout is
    divisible by 32.
    """
    features, channels = weight.shape
    block = [rows // 32, 4, 4, 2, _BLOCK_K.value]
    strides = [32 * channels, 2 * channels, 8 * channels, channels, 1]
    shape = [features // 32, 4, 4, 2, channels]
    return TensorDescriptor(weight, shape, strides, block, _layout(tuple(block)))


#: The schedule for a scale per block. A group has the rows of one instruction, so that integers
#: and sums fit into its registers. A tile has the columns of a block. The slots fill 227 KiB.
_BLOCK_SCALED = KernelSchedule(3, 64, 128, 5, False)


@gluon.jit
def _block_scaled_consumer(shared, memory, sizes, GROUP: gl.constexpr, FORM: gl.constexpr):
    """Compute 64 rows of every tile."""
    _, channels, _, tiles = sizes
    STAGES: gl.constexpr = FORM.STAGES
    BLOCK_M: gl.constexpr = FORM.BLOCK_M
    BLOCK_N: gl.constexpr = FORM.BLOCK_N
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    steps = gl.cdiv(channels, _BLOCK_K)
    step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        b, start_m, start_c = _tile_offsets(tile, sizes, FORM)
        start_m += GROUP * BLOCK_M
        scale_ptr = memory.w_scale_ptr + start_c // BLOCK_N * steps
        scale = gl.load(scale_ptr)
        acc = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout)
        for k in range(0, steps):
            slot = (step + k) % STAGES
            following = gl.load(scale_ptr + gl.minimum(k + 1, steps - 1))  # one step ahead
            mbarrier.wait(shared.ready.index(slot), ((step + k) // STAGES) % 2)
            x_tile = shared.x.index(slot * FORM.PARTS + GROUP)
            w_tile = shared.w.index(slot).reshape([BLOCK_N, _BLOCK_K]).permute((1, 0))
            part = gl.zeros([BLOCK_M, BLOCK_N], gl.int32, layout)
            part = warpgroup_mma(x_tile, w_tile, part, use_acc=False, is_async=True)
            part = warpgroup_mma_wait(0, deps=(part,))
            mbarrier.arrive(shared.empty.index(slot), count=1)
            acc += part.to(gl.float32) * scale
            scale = following
        step += steps
        _epilogue(acc, memory, (b, start_m, start_c), sizes, FORM, SCALED=True)


@gluon.jit(do_not_specialize=LENGTHS)
def hopper_linear_blocks_kernel(
    memory, x_desc, w_desc, n_tokens, channels, c_out, tiles, FORM: gl.constexpr
):
    """Compute y = gelu((x (W * w_scale)^T) * x_scale + bias) with a scale per block.

    Grid and arguments as in `hopper_linear_kernel`.
    """
    shared = _allocate_pipeline(x_desc, w_desc, FORM)
    _fence_barriers()
    sizes = (n_tokens, channels, c_out, tiles)
    gl.warp_specialize(
        [
            (_block_scaled_consumer, (shared, memory, sizes, 0, FORM)),
            (_block_scaled_consumer, (shared, memory, sizes, 1, FORM)),
            (_block_scaled_consumer, (shared, memory, sizes, 2, FORM)),
            (_producer, (x_desc, w_desc, shared, sizes, FORM)),
        ],
        [4, 4, 1],
        [_REGISTERS_3, _REGISTERS_3, _PRODUCER_REGISTERS],
    )


def launch_kernel(
    y: torch.Tensor,
    x: Int8Tensor,
    linear: LinearInputs,
    *,
    schedule: KernelSchedule | None = None,
) -> None:
    """Write gelu(x @ weight^T + bias) into y [B, N, Cout], which is dense.

    x [B, N, K] int8; weight int8 [Cout, K] dense, aligned to 16 bytes, with K padded as in x; its
    scale [Cout], or [ceil(Cout / 128), ceil(K / 128)]. `schedule` replaces the choice of one for
    a scale per row, for tuning.
    """
    weight, weight_scale, bias, activation = linear
    weight_scale, gelu = weight_scale.contiguous(), activation == "gelu-tanh"
    batch, n_tokens, channels = x.data.shape
    features = weight.shape[0]
    blocks = weight_scale.dim() == 2
    if blocks:
        schedule = _BLOCK_SCALED
    schedule = schedule or schedule_for(channels, features, gelu=gelu)
    permuted = features % 32 == 0
    tile_m, tile_n = schedule.tile
    tiles = batch * cdiv(n_tokens, tile_m) * cdiv(features, tile_n)
    describe = describe_weight if permuted else _describe_rows
    launch(
        hopper_linear_blocks_kernel if blocks else hopper_linear_kernel,
        (min(tiles, programs(y.device)),),
        y.device,
        memory=LinearMemory(y, x.scale, weight_scale, bias),
        x_desc=_describe_rows(x.data.view(-1, channels), schedule.block_m),
        w_desc=describe(weight, schedule.block_n),
        n_tokens=n_tokens,
        channels=channels,
        c_out=features,
        tiles=tiles,
        FORM=LinearForm(
            GROUPS=schedule.groups,
            PARTS=1 if schedule.ping_pong else schedule.groups,
            BLOCK_M=schedule.block_m,
            BLOCK_N=schedule.block_n,
            STAGES=schedule.stages,
            PERMUTED=permuted,
            GELU=gelu,
        ),
        num_warps=4,
    )
