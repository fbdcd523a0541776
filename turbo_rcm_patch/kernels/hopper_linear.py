"""The int8 linear for Hopper: warps that load and warps that multiply, in Gluon.

The same arithmetic as `int8_linear.int8_linear_kernel`, bit for bit. What Triton cannot say and
Gluon can: one warp loads, a row of slots ahead, across the borders of tiles; groups of four warps
multiply. They either share a tile (every group has its rows, and each load of the weight serves
all of them), or take tiles in turn, so that one scales, activates and stores while another
multiplies. The slots are filled in the order of the tiles, which is all that the turns need.

A thread has pairs of neighbouring columns of a product of the tensor cores. Where the features
divide by 32, the weight's rows are loaded in an order that makes eight neighbours of them
(`describe_weight`): whole 16-byte words are stored, and the residual is loaded so, without an
exchange.
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
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from turbo_rcm_patch.kernels.hopper_finish import fetch, finish
from turbo_rcm_patch.kernels.launch import (
    LENGTHS,
    cdiv,
    coefficient,
    launch,
    round_to,
    skip_arguments,
)
from turbo_rcm_patch.kernels.rows import Rows

__all__ = ["FORMS", "Form", "form_for", "hopper_linear", "hopper_linear_kernel"]

# Renamed in Triton 3.8 and 3.7.
_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

#: Channels of one step: the width of a hardware copy's swizzle.
BLOCK_K = gl.constexpr(128)
#: Blocks of rows that share the weight in L2.
_GROUP_M = gl.constexpr(8)
#: What a multiprocessor has for 12 or 16 warps, less the loading warp's; see `hopper`.
LOADER_REGISTERS = gl.constexpr(24)
REGISTERS_2 = gl.constexpr(240)
REGISTERS_3 = gl.constexpr(160)


class Form(NamedTuple):
    """How the work is cut.

    A group multiplies block_m rows by block_n columns. With `turns` that is a tile, and
    groups take tiles in turn; without, a tile has the rows of all groups.
    """

    groups: int  # 2 or 3
    block_m: int  # 64 or 128
    block_n: int
    stages: int
    turns: bool

    @property
    def tile(self) -> tuple[int, int]:
        return self.block_m * (1 if self.turns else self.groups), self.block_n


#: Forms by name; slots are what fits into 227 KiB.
FORMS = {
    "shared-128x256": Form(2, 64, 256, 4, False),
    "shared-192x256": Form(3, 64, 256, 4, False),
    "turns-128x128": Form(2, 128, 128, 6, True),
}
#: Channels up to which what follows the product is a large share of it, and from which it is not.
_SHORT, _LONG = 3072, 8192
#: Columns up to which a row of tiles is few.
_NARROW = 2048


def form_for(channels: int, features: int, *, finished: bool) -> Form:
    """The form that was fastest on an H200 at 32,760 tokens.

    Where K is short, groups take turns, so that one multiplies while another finishes its tile;
    where it is long, or nothing follows the product, larger tiles read the L2 less often.

    Args:
        channels: K.
        features: Cout.
        finished: Whether GELU or a skip follows.
    """
    if channels <= _SHORT:
        return FORMS["shared-128x256" if features <= _NARROW else "turns-128x128"]
    if finished and channels < _LONG:
        return FORMS["turns-128x128"]
    return FORMS["shared-192x256"]


@gluon.jit
def place(tile, n_tokens, c_out, TILE_M: gl.constexpr, TILE_N: gl.constexpr):
    """Batch entry, first row and first column of a tile."""
    blocks_m, blocks_c = gl.cdiv(n_tokens, TILE_M), gl.cdiv(c_out, TILE_N)
    b = tile // (blocks_m * blocks_c)
    inside = tile % (blocks_m * blocks_c)
    first_m = inside // (_GROUP_M * blocks_c) * _GROUP_M
    rows_here = gl.minimum(blocks_m - first_m, _GROUP_M)
    inside = inside % (_GROUP_M * blocks_c)
    return b, (first_m + inside % rows_here) * TILE_M, inside // rows_here * TILE_N


@gluon.jit
def ring(
    x_desc, w_desc, PARTS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, EIGHTS: gl.constexpr,
):  # fmt: skip
    """STAGES slots for PARTS blocks of x and one of the weight, and their barriers: a slot is
    ready, and as many groups as there are blocks of x are done with it."""
    x_smem = gl.allocate_shared_memory(gl.int8, [STAGES * PARTS, BLOCK_M, BLOCK_K], x_desc.layout)
    if EIGHTS:
        w_smem = gl.allocate_shared_memory(
            gl.int8, [STAGES, BLOCK_N // 32, 4, 4, 2, BLOCK_K], w_desc.layout
        )
    else:
        w_smem = gl.allocate_shared_memory(gl.int8, [STAGES, BLOCK_N, BLOCK_K], w_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(ready.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=PARTS)
    return x_smem, w_smem, ready, empty


@gluon.jit
def publish():
    """Show new barriers to every warp and to the hardware copies."""
    fence_async_shared()
    _barrier()


@gluon.jit
def loader(
    x_desc, w_desc, shared, n_tokens, channels, c_out, tiles,
    PARTS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, EIGHTS: gl.constexpr,
):  # fmt: skip
    """Fill the slots in turn: PARTS blocks of x and all columns of the weight, one step over K."""
    x_smem, w_smem, ready, empty = shared
    step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        b, start_m, start_c = place(tile, n_tokens, c_out, PARTS * BLOCK_M, BLOCK_N)
        row = b * n_tokens + start_m
        for start_k in range(0, channels, BLOCK_K):
            slot = step % STAGES
            full = ready.index(slot)
            # The phase before the first counts as complete: the first round waits for nobody.
            mbarrier.wait(empty.index(slot), ((step // STAGES) % 2) ^ 1)
            mbarrier.expect(full, (PARTS * BLOCK_M + BLOCK_N) * BLOCK_K)
            for part in gl.static_range(PARTS):
                x_tile = x_smem.index(slot * PARTS + part)
                _load(x_desc, [row + part * BLOCK_M, start_k], full, x_tile)
            if EIGHTS:
                _load(w_desc, [start_c // 32, 0, 0, 0, start_k], full, w_smem.index(slot))
            else:
                _load(w_desc, [start_c, start_k], full, w_smem.index(slot))
            step += 1


@gluon.jit
def _group(
    shared, turn, memory, skip, out, skip_stride_c, out_stride_c,
    n_tokens, channels, c_out, tiles,
    GROUP: gl.constexpr, GROUPS: gl.constexpr, TURNS: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, EIGHTS: gl.constexpr, HAS_BIAS: gl.constexpr, GELU: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr, SKIP_FORM: gl.constexpr, OUT_FORM: gl.constexpr,
    ROUND_TO: gl.constexpr,
):  # fmt: skip
    """BLOCK_M rows of every tile, or, with TURNS, every GROUPS-th tile of the program."""
    # The widest int8 instruction that Triton knows how to write and that divides a power of two.
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    PARTS: gl.constexpr = 1 if TURNS else GROUPS
    PART: gl.constexpr = 0 if TURNS else GROUP
    FIRST: gl.constexpr = 1 if GROUP == 0 else 0
    EVERY: gl.constexpr = GROUPS if TURNS else 1
    x_smem, w_smem, ready, empty = shared
    steps = gl.cdiv(channels, BLOCK_K)
    step = 0
    taken = 0
    first = gl.program_id(0)
    if TURNS:
        step = steps * GROUP
        first = first + GROUP * gl.num_programs(0)
    for tile in range(first, tiles, gl.num_programs(0) * EVERY):
        b, start_m, start_c = place(tile, n_tokens, c_out, PARTS * BLOCK_M, BLOCK_N)
        start_m += PART * BLOCK_M
        if HAS_RESIDUAL:
            fetch(
                memory, b, start_m, start_c, n_tokens, c_out, BLOCK_M, BLOCK_N
            )  # fmt: skip
        if TURNS:
            # A slot says only whether its fills so far are odd or even: nobody may wait for one
            # while the fill before it is to come. (The first group begins.)
            mbarrier.wait(turn.index(GROUP), (taken % 2) ^ FIRST)
        acc = gl.zeros([BLOCK_M, BLOCK_N], gl.int32, layout)
        for k in range(0, steps):
            slot = (step + k) % STAGES
            mbarrier.wait(ready.index(slot), ((step + k) // STAGES) % 2)
            x_tile = x_smem.index(slot * PARTS + PART)
            w_tile = w_smem.index(slot).reshape([BLOCK_N, BLOCK_K]).permute((1, 0))
            acc = warpgroup_mma(x_tile, w_tile, acc, use_acc=k > 0, is_async=True)
            # One step stays in flight; the one before it is done with its slot.
            acc = warpgroup_mma_wait(1, deps=(acc,))
            mbarrier.arrive(empty.index((step + k + STAGES - 1) % STAGES), count=1, pred=k > 0)
        if TURNS:
            mbarrier.arrive(turn.index((GROUP + 1) % GROUPS), count=1)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index((step + steps - 1) % STAGES), count=1)
        step += steps * EVERY
        taken += 1  # noqa: SIM113
        finish(
            acc, memory, skip, out, skip_stride_c, out_stride_c,
            b, start_m, start_c, n_tokens, c_out,
            BLOCK_M, BLOCK_N, EIGHTS, HAS_BIAS, GELU, HAS_RESIDUAL, SKIP_FORM, OUT_FORM, ROUND_TO,
            False,
        )  # fmt: skip


@gluon.jit(do_not_specialize=LENGTHS)
def hopper_linear_kernel(
    y_ptr, x_desc, x_scale_ptr, w_desc, w_scale_ptr, bias_ptr, residual_ptr,
    skip_ptr, out_ptr,
    residual_stride_b, residual_stride_n,
    skip_value, skip_stride_b, skip_stride_n, skip_stride_c,
    out_value, out_stride_b, out_stride_n, out_stride_c,
    n_tokens, channels, c_out, tiles,
    GROUPS: gl.constexpr, TURNS: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    EIGHTS: gl.constexpr, HAS_BIAS: gl.constexpr, GELU: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr, SKIP_FORM: gl.constexpr, OUT_FORM: gl.constexpr,
    ROUND_TO: gl.constexpr,
):  # fmt: skip
    """y = c_skip * residual + c_out * gelu((x W^T) * x_scale * w_scale + bias).

    Grid: as many programs as the card has multiprocessors, which take every so many tiles.
    Arguments as in `int8_linear.int8_linear_kernel`; descriptors have blocks of BLOCK_M rows of
    x int8 [B * N, K], and of BLOCK_N rows of the weight int8 [Cout, K], with EIGHTS in
    the order of `describe_weight`. GROUPS, TURNS, BLOCK_M, BLOCK_N: see `Form`.
    """
    PARTS: gl.constexpr = 1 if TURNS else GROUPS
    shared = ring(x_desc, w_desc, PARTS, BLOCK_M, BLOCK_N, STAGES, EIGHTS)
    turn = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    for group in gl.static_range(GROUPS):
        mbarrier.init(turn.index(group), count=1)
    publish()
    memory = (
        y_ptr, x_scale_ptr, w_scale_ptr, bias_ptr, residual_ptr,
        residual_stride_b, residual_stride_n,
    )  # fmt: skip
    # Strides of channels stay apart: a 1 in a tuple would no longer be a constant.
    skip = (skip_ptr, skip_value, skip_stride_b, skip_stride_n)
    out = (out_ptr, out_value, out_stride_b, out_stride_n)
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_group, (shared, turn, memory, skip, out, skip_stride_c, out_stride_c,
                          n_tokens, channels, c_out, tiles, 0, GROUPS,
                          TURNS, BLOCK_M, BLOCK_N, STAGES, EIGHTS, HAS_BIAS, GELU,
                          HAS_RESIDUAL, SKIP_FORM, OUT_FORM, ROUND_TO)),
                (_group, (shared, turn, memory, skip, out, skip_stride_c, out_stride_c,
                          n_tokens, channels, c_out, tiles, 1, GROUPS,
                          TURNS, BLOCK_M, BLOCK_N, STAGES, EIGHTS, HAS_BIAS, GELU,
                          HAS_RESIDUAL, SKIP_FORM, OUT_FORM, ROUND_TO)),
                (loader, (x_desc, w_desc, shared, n_tokens, channels, c_out, tiles,
                           PARTS, BLOCK_M, BLOCK_N, STAGES, EIGHTS)),
            ],
            [4, 1],
            [REGISTERS_2, LOADER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_group, (shared, turn, memory, skip, out, skip_stride_c, out_stride_c,
                          n_tokens, channels, c_out, tiles, 0, GROUPS,
                          TURNS, BLOCK_M, BLOCK_N, STAGES, EIGHTS, HAS_BIAS, GELU,
                          HAS_RESIDUAL, SKIP_FORM, OUT_FORM, ROUND_TO)),
                (_group, (shared, turn, memory, skip, out, skip_stride_c, out_stride_c,
                          n_tokens, channels, c_out, tiles, 1, GROUPS,
                          TURNS, BLOCK_M, BLOCK_N, STAGES, EIGHTS, HAS_BIAS, GELU,
                          HAS_RESIDUAL, SKIP_FORM, OUT_FORM, ROUND_TO)),
                (_group, (shared, turn, memory, skip, out, skip_stride_c, out_stride_c,
                          n_tokens, channels, c_out, tiles, 2, GROUPS,
                          TURNS, BLOCK_M, BLOCK_N, STAGES, EIGHTS, HAS_BIAS, GELU,
                          HAS_RESIDUAL, SKIP_FORM, OUT_FORM, ROUND_TO)),
                (loader, (x_desc, w_desc, shared, n_tokens, channels, c_out, tiles,
                           PARTS, BLOCK_M, BLOCK_N, STAGES, EIGHTS)),
            ],
            [4, 4, 1],
            [REGISTERS_3, REGISTERS_3, LOADER_REGISTERS],
        )  # fmt: skip


@cache
def _layout(block: tuple[int, ...]) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(block, gl.int8)


def describe_rows(x: torch.Tensor, rows: int) -> TensorDescriptor:
    """x int8 [R, K] in blocks of `rows` rows."""
    block = [rows, BLOCK_K.value]
    return TensorDescriptor.from_tensor(x, block, _layout(tuple(block)))


def describe_weight(weight: torch.Tensor, rows: int) -> TensorDescriptor:
    """int8 [Cout, K] in blocks of `rows` rows, row 8q + 2j + e of every 32 at place 8j + 2q + e.

    Thread q of four has columns 2q and 2q + 1 of every eight columns j of a product: with this
    order, those are eight neighbours. Cout divides by 32.
    """
    features, channels = weight.shape
    block = [rows // 32, 4, 4, 2, BLOCK_K.value]
    strides = [32 * channels, 2 * channels, 8 * channels, channels, 1]
    shape = [features // 32, 4, 4, 2, channels]
    return TensorDescriptor(weight, shape, strides, block, _layout(tuple(block)))


def programs(device: torch.device) -> int:
    if device.type != "cuda":
        return 4  # a recording of launches
    return torch.cuda.get_device_properties(device).multi_processor_count


def hopper_linear(
    y: torch.Tensor,
    x: Rows,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    c_skip: float | torch.Tensor,
    c_out: float | torch.Tensor,
    *,
    gelu: bool,
    cast: str,
    form: Form | None = None,
    eights: bool | None = None,
) -> None:
    """The linear into y [B, N, Cout] dense; x [B, N, K] in int8 rows; weight int8 [Cout, K] dense,
    16 bytes aligned, its K padded as x's; weight_scale [Cout]; residual [B, N, Cout].

    `form` and `eights`, the order of columns, override what was chosen, for tuning.
    """
    batch, n_tokens, channels = x.int8.shape
    features = weight.shape[0]
    finished = gelu or residual is not None
    form = form or form_for(channels, features, finished=finished)
    if eights is None:
        eights = features % 32 == 0
    tile_m, tile_n = form.tile
    tiles = batch * cdiv(n_tokens, tile_m) * cdiv(features, tile_n)
    describe = describe_weight if eights else describe_rows
    launch(
        hopper_linear_kernel,
        (min(tiles, programs(y.device)),),
        y.device,
        y_ptr=y,
        x_desc=describe_rows(x.int8.view(-1, channels), form.block_m),
        x_scale_ptr=x.scale,
        w_desc=describe(weight, form.block_n),
        w_scale_ptr=weight_scale,
        bias_ptr=bias,
        n_tokens=n_tokens,
        channels=channels,
        c_out=features,
        tiles=tiles,
        GROUPS=form.groups,
        TURNS=form.turns,
        BLOCK_M=form.block_m,
        BLOCK_N=form.block_n,
        STAGES=form.stages,
        EIGHTS=eights,
        HAS_BIAS=bias is not None,
        GELU=gelu,
        ROUND_TO=round_to(cast, y.dtype if residual is None else residual.dtype),
        **skip_arguments(residual, coefficient(c_skip, y.shape), coefficient(c_out, y.shape)),
        num_warps=4,
    )
