"""The int8 linear for Hopper with a weight scale per block of 128 x 128.

The same arithmetic as `int8_linear.int8_linear_kernel`, bit for bit: a step over K is one block,
whose integer product is scaled and added in fp32. One warp loads, as in `hopper_linear`, and
three groups of four multiply 64 rows each; while one scales its step, the tensor cores have
another's.

On an H200 at 32,760 rows of 1,536 channels that is 833 to 1,017 * 10^12 op/s, where the portable
kernel has 475 to 561. Two groups of 128 rows (650 to 1,013), two or three that multiply in turns
(737 to 974) and two programs on a multiprocessor (568 to 989) were slower, except for the two
programs at 8,960 features: 975 against 952.
"""

from __future__ import annotations

import torch
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
    REGISTERS_3,
    describe_rows,
    describe_weight,
    loader,
    place,
    programs,
    publish,
    ring,
)
from turbo_rcm_patch.kernels.launch import (
    LENGTHS,
    cdiv,
    coefficient,
    launch,
    round_to,
    skip_arguments,
)
from turbo_rcm_patch.kernels.rows import Rows

__all__ = ["hopper_linear_blocks", "hopper_linear_blocks_kernel"]

#: Groups, and the rows of each: those of one instruction, so that integers and sums fit.
_GROUPS = gl.constexpr(3)
_BLOCK_M = gl.constexpr(64)
#: Columns of a tile: a block of the weight.
_BLOCK_N = gl.constexpr(128)
#: Slots: what fits into 227 KiB.
_STAGES = gl.constexpr(5)


@gluon.jit
def _group(
    shared, memory, skip, out, skip_stride_c, out_stride_c,
    w_scale_ptr, n_tokens, channels, c_out, tiles,
    GROUP: gl.constexpr, EIGHTS: gl.constexpr, HAS_BIAS: gl.constexpr, GELU: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr, SKIP_FORM: gl.constexpr, OUT_FORM: gl.constexpr,
    ROUND_TO: gl.constexpr,
):  # fmt: skip
    """64 rows of every tile."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    x_smem, w_smem, ready, empty = shared
    steps = gl.cdiv(channels, BLOCK_K)
    step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        b, start_m, start_c = place(tile, n_tokens, c_out, _GROUPS * _BLOCK_M, _BLOCK_N)
        start_m += GROUP * _BLOCK_M
        if HAS_RESIDUAL:
            fetch(memory, b, start_m, start_c, n_tokens, c_out, _BLOCK_M, _BLOCK_N)
        scale_ptr = w_scale_ptr + start_c // _BLOCK_N * steps
        scale = gl.load(scale_ptr)
        acc = gl.zeros([_BLOCK_M, _BLOCK_N], gl.float32, layout)
        for k in range(0, steps):
            slot = (step + k) % _STAGES
            following = gl.load(scale_ptr + gl.minimum(k + 1, steps - 1))  # a product ahead
            mbarrier.wait(ready.index(slot), ((step + k) // _STAGES) % 2)
            x_tile = x_smem.index(slot * _GROUPS + GROUP)
            w_tile = w_smem.index(slot).reshape([_BLOCK_N, BLOCK_K]).permute((1, 0))
            part = gl.zeros([_BLOCK_M, _BLOCK_N], gl.int32, layout)
            part = warpgroup_mma(x_tile, w_tile, part, use_acc=False, is_async=True)
            part = warpgroup_mma_wait(0, deps=(part,))
            mbarrier.arrive(empty.index(slot), count=1)
            acc += part.to(gl.float32) * scale
            scale = following
        step += steps
        finish(
            acc, memory, skip, out, skip_stride_c, out_stride_c,
            b, start_m, start_c, n_tokens, c_out, _BLOCK_M, _BLOCK_N,
            EIGHTS, HAS_BIAS, GELU, HAS_RESIDUAL, SKIP_FORM, OUT_FORM, ROUND_TO, True,
        )  # fmt: skip


@gluon.jit(do_not_specialize=LENGTHS)
def hopper_linear_blocks_kernel(
    y_ptr, x_desc, x_scale_ptr, w_desc, w_scale_ptr, bias_ptr, residual_ptr,
    skip_ptr, out_ptr,
    residual_stride_b, residual_stride_n,
    skip_value, skip_stride_b, skip_stride_n, skip_stride_c,
    out_value, out_stride_b, out_stride_n, out_stride_c,
    n_tokens, channels, c_out, tiles,
    EIGHTS: gl.constexpr, HAS_BIAS: gl.constexpr, GELU: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr, SKIP_FORM: gl.constexpr, OUT_FORM: gl.constexpr,
    ROUND_TO: gl.constexpr,
):  # fmt: skip
    """y = c_skip * residual + c_out * gelu((x (W * w_scale)^T) * x_scale + bias).

    Grid: as many programs as the card has multiprocessors, which take every so many tiles.
    Arguments as in `hopper_linear.hopper_linear_kernel`, but w_scale fp32
    [ceil(Cout / 128), ceil(K / 128)].
    """
    shared = ring(x_desc, w_desc, _GROUPS, _BLOCK_M, _BLOCK_N, _STAGES, EIGHTS)
    publish()
    memory = (
        y_ptr, x_scale_ptr, w_scale_ptr, bias_ptr, residual_ptr,
        residual_stride_b, residual_stride_n,
    )  # fmt: skip
    # Strides of channels stay apart: a 1 in a tuple would no longer be a constant.
    skip = (skip_ptr, skip_value, skip_stride_b, skip_stride_n)
    out = (out_ptr, out_value, out_stride_b, out_stride_n)
    gl.warp_specialize(
        [
            (_group, (shared, memory, skip, out, skip_stride_c, out_stride_c,
                      w_scale_ptr, n_tokens, channels, c_out, tiles, 0, EIGHTS, HAS_BIAS, GELU,
                      HAS_RESIDUAL, SKIP_FORM, OUT_FORM, ROUND_TO)),
            (_group, (shared, memory, skip, out, skip_stride_c, out_stride_c,
                      w_scale_ptr, n_tokens, channels, c_out, tiles, 1, EIGHTS, HAS_BIAS, GELU,
                      HAS_RESIDUAL, SKIP_FORM, OUT_FORM, ROUND_TO)),
            (_group, (shared, memory, skip, out, skip_stride_c, out_stride_c,
                      w_scale_ptr, n_tokens, channels, c_out, tiles, 2, EIGHTS, HAS_BIAS, GELU,
                      HAS_RESIDUAL, SKIP_FORM, OUT_FORM, ROUND_TO)),
            (loader, (x_desc, w_desc, shared, n_tokens, channels, c_out, tiles,
                      _GROUPS, _BLOCK_M, _BLOCK_N, _STAGES, EIGHTS)),
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
    eights: bool | None = None,
) -> None:
    """As `hopper_linear.hopper_linear`; weight_scale [ceil(Cout / 128), ceil(K / 128)] dense.

    `eights`, the order of columns, overrides what was chosen, for tuning.
    """
    batch, n_tokens, channels = x.int8.shape
    features = weight.shape[0]
    if eights is None:
        eights = features % 32 == 0
    rows, columns = _GROUPS.value * _BLOCK_M.value, _BLOCK_N.value
    tiles = batch * cdiv(n_tokens, rows) * cdiv(features, columns)
    describe = describe_weight if eights else describe_rows
    launch(
        hopper_linear_blocks_kernel,
        (min(tiles, programs(y.device)),),
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
        EIGHTS=eights,
        HAS_BIAS=bias is not None,
        GELU=gelu,
        ROUND_TO=round_to(cast, y.dtype if residual is None else residual.dtype),
        **skip_arguments(residual, coefficient(c_skip, y.shape), coefficient(c_out, y.shape)),
        num_warps=4,
    )
