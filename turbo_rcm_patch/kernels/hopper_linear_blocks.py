"""The int8 linear for Hopper with a weight scale per block of 128 x 128.

The same arithmetic as `int8_linear.int8_linear_kernel`, bit for bit: a step over K is one block,
whose integer product is scaled and added in fp32. One warp loads, as in `hopper_linear`, and
groups of four multiply; while one scales its step, the tensor cores have another's. Where K is
short, two programs share a multiprocessor, so that one multiplies while the other finishes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from turbo_rcm_patch.kernels.hopper_finish import fetch, finish
from turbo_rcm_patch.kernels.hopper_linear import (
    BLOCK_K,
    LOADER_REGISTERS,
    REGISTERS_2,
    REGISTERS_3,
    describe_rows,
    describe_weight,
    loader,
    place,
    programs,
    ring,
)
from turbo_rcm_patch.kernels.launch import coefficient, launch, round_to, skip_arguments
from turbo_rcm_patch.kernels.rows import Rows

__all__ = ["FORMS", "Form", "form_for", "hopper_linear_blocks", "hopper_linear_blocks_kernel"]

#: Rows of one instruction, and columns of a tile: a block of the weight.
_BLOCK_M = gl.constexpr(64)
_BLOCK_N = gl.constexpr(128)
#: Registers of a thread at the launch where two programs of 8 warps share a multiprocessor. Four
#: of the warps give theirs to the group.
_SHARED_REGISTERS = 128


class Form(NamedTuple):
    """How the work is cut: a tile has 64 * halves * groups rows.

    A group has its sums in fp32 for `halves` times 64 rows, and integers for 64 at a time. With
    `turns`, groups start their products of 64 rows one after the other, so that one scales while
    the next multiplies; without, the tensor cores divide their time as they like.
    """

    groups: int  # 1, 2 or 3
    halves: int  # 1 or 2
    stages: int
    turns: bool

    @property
    def programs(self) -> int:
        """How many share a multiprocessor."""
        return 2 if self.groups == 1 else 1


#: Forms by name; slots are what fits into 227 KiB.
FORMS = {
    "two-programs": Form(1, 2, 3, False),
    "two-groups": Form(2, 2, 4, False),
    "three-groups": Form(3, 1, 5, False),
    "two-in-turns": Form(2, 2, 4, True),
    "three-in-turns": Form(3, 1, 5, True),
}
#: Channels up to which what follows the product is a large share of it.
_SHORT = 3072


def form_for(channels: int) -> Form:
    """The form for a K."""
    return FORMS["two-programs" if channels <= _SHORT else "two-groups"]


@gluon.jit
def _step(
    acc, x_tile, w_tile, scale, empty, turn, phase,
    LAST: gl.constexpr, GROUP: gl.constexpr, GROUPS: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """acc + x w^T * scale; LAST says that the slot is free then."""
    layout: gl.constexpr = acc.type.layout
    part = gl.zeros([_BLOCK_M, _BLOCK_N], gl.int32, layout)
    if TURNS:
        # The first group begins.
        mbarrier.wait(turn.index(GROUP), phase ^ (1 if GROUP == 0 else 0))
    part = warpgroup_mma(x_tile, w_tile, part, use_acc=False, is_async=True)
    if TURNS:
        mbarrier.arrive(turn.index((GROUP + 1) % GROUPS), count=1)
    part = warpgroup_mma_wait(0, deps=(part,))
    if LAST:
        mbarrier.arrive(empty, count=1)
    return acc + part.to(gl.float32) * scale


@gluon.jit
def _group(
    shared, memory, skip, out, skip_stride_c, out_stride_c,
    w_scale_ptr, n_tokens, channels, c_out, tiles,
    GROUP: gl.constexpr, GROUPS: gl.constexpr, HALVES: gl.constexpr, TURNS: gl.constexpr,
    STAGES: gl.constexpr, EIGHTS: gl.constexpr, HAS_BIAS: gl.constexpr, GELU: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr, SKIP_FORM: gl.constexpr, OUT_FORM: gl.constexpr,
    ROUND_TO: gl.constexpr,
):  # fmt: skip
    """HALVES times 64 rows of every tile."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    PARTS: gl.constexpr = GROUPS * HALVES
    ROWS: gl.constexpr = HALVES * _BLOCK_M
    x_smem, w_smem, ready, empty, turn = shared
    steps = gl.cdiv(channels, BLOCK_K)
    step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        b, start_m, start_c = place(tile, n_tokens, c_out, PARTS * _BLOCK_M, _BLOCK_N)
        start_m += GROUP * ROWS
        if HAS_RESIDUAL:
            fetch(memory, b, start_m, start_c, n_tokens, c_out, ROWS, _BLOCK_N)
        scale_ptr = w_scale_ptr + start_c // _BLOCK_N * steps
        scale = gl.load(scale_ptr)
        acc = gl.zeros([_BLOCK_M, _BLOCK_N], gl.float32, layout)
        lower = acc
        for k in range(0, steps):
            slot = (step + k) % STAGES
            following = gl.load(scale_ptr + gl.minimum(k + 1, steps - 1))  # a product ahead
            mbarrier.wait(ready.index(slot), ((step + k) // STAGES) % 2)
            w_tile = w_smem.index(slot).reshape([_BLOCK_N, BLOCK_K]).permute((1, 0))
            x_first = slot * PARTS + GROUP * HALVES
            free = empty.index(slot)
            acc = _step(
                acc, x_smem.index(x_first), w_tile, scale, free,
                turn, 0 if HALVES == 2 else (step + k) % 2, HALVES == 1, GROUP, GROUPS, TURNS,
            )  # fmt: skip
            if HALVES == 2:
                lower = _step(
                    lower, x_smem.index(x_first + 1), w_tile, scale, free,
                    turn, 1, True, GROUP, GROUPS, TURNS,
                )  # fmt: skip
            scale = following
        step += steps
        for half in gl.static_range(HALVES):
            finish(
                acc if half == 0 else lower, memory, skip, out, skip_stride_c, out_stride_c,
                b, start_m + half * _BLOCK_M, start_c, n_tokens, c_out, _BLOCK_M, _BLOCK_N,
                EIGHTS, HAS_BIAS, GELU, HAS_RESIDUAL, SKIP_FORM, OUT_FORM, ROUND_TO, True,
            )  # fmt: skip


@gluon.jit(do_not_specialize=["tiles"])
def hopper_linear_blocks_kernel(
    y_ptr, x_desc, x_scale_ptr, w_desc, w_scale_ptr, bias_ptr, residual_ptr,
    skip_ptr, out_ptr,
    residual_stride_b, residual_stride_n,
    skip_value, skip_stride_b, skip_stride_n, skip_stride_c,
    out_value, out_stride_b, out_stride_n, out_stride_c,
    n_tokens, channels, c_out, tiles,
    GROUPS: gl.constexpr, HALVES: gl.constexpr, TURNS: gl.constexpr, STAGES: gl.constexpr,
    EIGHTS: gl.constexpr, HAS_BIAS: gl.constexpr, GELU: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr, SKIP_FORM: gl.constexpr, OUT_FORM: gl.constexpr,
    ROUND_TO: gl.constexpr,
):  # fmt: skip
    """y = c_skip * residual + c_out * gelu((x (W * w_scale)^T) * x_scale + bias).

    Grid: as many programs as the card holds at a time, which take every so many tiles.
    Arguments as in `hopper_linear.hopper_linear_kernel`, but w_scale fp32
    [ceil(Cout / 128), ceil(K / 128)]. GROUPS, HALVES, TURNS: see `Form`.
    """
    PARTS: gl.constexpr = GROUPS * HALVES
    shared = ring(x_desc, w_desc, GROUPS, GROUPS, PARTS, _BLOCK_M, _BLOCK_N, STAGES, EIGHTS)
    memory = (
        y_ptr, x_scale_ptr, w_scale_ptr, bias_ptr, residual_ptr,
        residual_stride_b, residual_stride_n,
    )  # fmt: skip
    # Strides of channels stay apart: a 1 in a tuple would no longer be a constant.
    skip = (skip_ptr, skip_value, skip_stride_b, skip_stride_n)
    out = (out_ptr, out_value, out_stride_b, out_stride_n)
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (_group, (shared, memory, skip, out, skip_stride_c, out_stride_c,
                          w_scale_ptr, n_tokens, channels, c_out, tiles,
                          0, GROUPS, HALVES, TURNS, STAGES, EIGHTS, HAS_BIAS, GELU,
                          HAS_RESIDUAL, SKIP_FORM, OUT_FORM, ROUND_TO)),
                (loader, (x_desc, w_desc, shared, n_tokens, channels, c_out, tiles,
                          PARTS, _BLOCK_M, _BLOCK_N, STAGES, EIGHTS)),
            ],
            [1],
            [LOADER_REGISTERS],
        )  # fmt: skip
    elif GROUPS == 2:
        gl.warp_specialize(
            [
                (_group, (shared, memory, skip, out, skip_stride_c, out_stride_c,
                          w_scale_ptr, n_tokens, channels, c_out, tiles,
                          0, GROUPS, HALVES, TURNS, STAGES, EIGHTS, HAS_BIAS, GELU,
                          HAS_RESIDUAL, SKIP_FORM, OUT_FORM, ROUND_TO)),
                (_group, (shared, memory, skip, out, skip_stride_c, out_stride_c,
                          w_scale_ptr, n_tokens, channels, c_out, tiles,
                          1, GROUPS, HALVES, TURNS, STAGES, EIGHTS, HAS_BIAS, GELU,
                          HAS_RESIDUAL, SKIP_FORM, OUT_FORM, ROUND_TO)),
                (loader, (x_desc, w_desc, shared, n_tokens, channels, c_out, tiles,
                          PARTS, _BLOCK_M, _BLOCK_N, STAGES, EIGHTS)),
            ],
            [4, 1],
            [REGISTERS_2, LOADER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_group, (shared, memory, skip, out, skip_stride_c, out_stride_c,
                          w_scale_ptr, n_tokens, channels, c_out, tiles,
                          0, GROUPS, HALVES, TURNS, STAGES, EIGHTS, HAS_BIAS, GELU,
                          HAS_RESIDUAL, SKIP_FORM, OUT_FORM, ROUND_TO)),
                (_group, (shared, memory, skip, out, skip_stride_c, out_stride_c,
                          w_scale_ptr, n_tokens, channels, c_out, tiles,
                          1, GROUPS, HALVES, TURNS, STAGES, EIGHTS, HAS_BIAS, GELU,
                          HAS_RESIDUAL, SKIP_FORM, OUT_FORM, ROUND_TO)),
                (_group, (shared, memory, skip, out, skip_stride_c, out_stride_c,
                          w_scale_ptr, n_tokens, channels, c_out, tiles,
                          2, GROUPS, HALVES, TURNS, STAGES, EIGHTS, HAS_BIAS, GELU,
                          HAS_RESIDUAL, SKIP_FORM, OUT_FORM, ROUND_TO)),
                (loader, (x_desc, w_desc, shared, n_tokens, channels, c_out, tiles,
                          PARTS, _BLOCK_M, _BLOCK_N, STAGES, EIGHTS)),
            ],
            [4, 4, 1],
            [REGISTERS_3, REGISTERS_3, LOADER_REGISTERS],
        )  # fmt: skip


def hopper_linear_blocks(
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
    """As `hopper_linear.hopper_linear`; weight_scale [ceil(Cout / 128), ceil(K / 128)] dense.

    `form` and `eights`, the order of columns, override what was chosen, for tuning.
    """
    batch, n_tokens, channels = x.int8.shape
    features = weight.shape[0]
    form = form or form_for(channels)
    if eights is None:
        eights = features % 32 == 0
    rows, columns = _BLOCK_M.value * form.halves * form.groups, _BLOCK_N.value
    tiles = batch * triton.cdiv(n_tokens, rows) * triton.cdiv(features, columns)
    describe = describe_weight if eights else describe_rows
    launch(
        hopper_linear_blocks_kernel,
        (min(tiles, form.programs * programs(y.device)),),
        y.device,
        y_ptr=y,
        x_desc=describe_rows(x.int8.view(-1, channels), _BLOCK_M.value),
        x_scale_ptr=x.scale,
        w_desc=describe(weight, columns),
        w_scale_ptr=weight_scale,
        bias_ptr=bias,
        n_tokens=n_tokens,
        channels=channels,
        c_out=features,
        tiles=tiles,
        GROUPS=form.groups,
        HALVES=form.halves,
        TURNS=form.turns,
        STAGES=form.stages,
        EIGHTS=eights,
        HAS_BIAS=bias is not None,
        GELU=gelu,
        ROUND_TO=round_to(cast, y.dtype if residual is None else residual.dtype),
        **skip_arguments(residual, coefficient(c_skip, y.shape), coefficient(c_out, y.shape)),
        num_warps=4,
        **({"maxnreg": _SHARED_REGISTERS} if form.programs == 2 else {}),
    )
