"""The linear branch's pass over the keys for Hopper, in Gluon.

    matrix = phi(k)^T v,  total = sum of phi(k),  means of blocks of k without its mean

The arithmetic is that of `triton.key_value_kernel`. A thread has 32 channels of
a key, so that phi, a softmax over a head's channels, needs two exchanges between threads instead
of eight. The sums over keys (of phi, and of k without its mean) are products with ones, beside the
product with v, so that warps exchange no data in the loop.

All D / 16 warps of a program do the same. Over time, in steps of 64 keys:

    copies         k, v of step i + 3 (three steps ahead)
    CUDA cores     phi and smoothed k of step i, while the tensor cores are at step i - 1
    tensor cores   phi^T v, phi^T ones, smooth^T ones of step i

Shared memory, for heads of D channels in 16 bits:

    k_ring       [STAGES, 64, D], swizzled in pieces of 16 bytes
    v_ring       [STAGES, 64, D], swizzled for the tensor cores
    phi_tile     [64, D], swizzled for the tensor cores
    smooth_tile  [64, D], swizzled for the tensor cores: k without its mean
    ones         [8, 64]

Together they take 161 KiB for D = 128 and 81 KiB for 64, with four stages.

There is no mbarrier. In a step `async_copy.wait_group(STAGES - 2)` waits for a thread's copies of
its keys, and `warpgroup_mma_wait(0)` for the products of the step before. After the first barrier
of the program no warp reads phi_tile and smooth_tile any more. After the second, both are written.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from turbo_rcm_patch.ops import formats
from turbo_rcm_patch.ops.hopper_common import copy_async, cta_barrier
from turbo_rcm_patch.ops.launch import LENGTHS, launch
from turbo_rcm_patch.ops.sparse_linear.key_sums import KeySums, key_pass

_PROGRAMS = 132  # one per multiprocessor of an H100 or H200
_STAGES = gl.constexpr(4)
_T = gl.constexpr(64)  # keys of a step
_LOG2_E = gl.constexpr(formats.LOG2_E)
_ONES = gl.constexpr(8)  # columns of a product that sums: the fewest possible


@gluon.jit
def _copy(rings, slot, pointers, strides, rows, rows_left, D: gl.constexpr, wide: gl.constexpr):
    """Start to copy keys and values, with 0 from row `rows_left` on."""
    offs_d = gl.arange(0, D, gl.SliceLayout(0, wide))[None, :]
    mask = (rows < rows_left)[:, None]
    for i in gl.static_range(2):
        at = pointers[i] + (rows[:, None] * strides[i] + offs_d)
        copy_async(rings[i].index(slot), at, mask=mask)
    async_copy.commit_group()


@gluon.jit
def _store_pooled(pooled, out_ptr, block, n_kv, BLOCK_K: gl.constexpr):
    """Store the mean of a block of keys, from equal columns of sums [D, _ONES]."""
    count = gl.minimum(BLOCK_K, n_kv - block * BLOCK_K)
    mean = gl.max(pooled, axis=1) / count
    offs_d = gl.arange(0, pooled.shape[0], mean.type.layout)
    gl.store(out_ptr + block * pooled.shape[0] + offs_d, mean.to(out_ptr.dtype.element_ty))


@gluon.jit(do_not_specialize=LENGTHS)
def hopper_key_value_kernel(
    sums, keys, n_kv, k_blocks, blocks_a_chunk, chunks, heads,
    D: gl.constexpr, BLOCK_K: gl.constexpr,
):  # fmt: skip
    """Compute phi(k)^T v and the sum of phi(k) over a chunk of keys, and the means of k's blocks.

    Grid: (chunks, heads, batch). Arguments as in `triton.key_value_kernel`.
    """
    chunk = gl.program_id(0)
    h = gl.program_id(1)
    b = gl.program_id(2)
    warps: gl.constexpr = D // 16
    dtype: gl.constexpr = keys.k_ptr.dtype.element_ty
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [warps, 1], [1, 0])
    # As `prologue_hopper.row_per_thread_layout`, for fewer warps.
    row_layout: gl.constexpr = gl.BlockedLayout([1, 32], [1024 // D, D // 32], [warps, 1], [0, 1])
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, D, 16])
    layout_ones: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, _ONES, 16])
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_T, D], dtype)
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    k_ring = gl.allocate_shared_memory(dtype, [_STAGES, _T, D], swizzled)
    v_ring = gl.allocate_shared_memory(dtype, [_STAGES, _T, D], tile)
    phi_tile = gl.allocate_shared_memory(dtype, [_T, D], tile)
    smooth_tile = gl.allocate_shared_memory(dtype, [_T, D], tile)
    registers: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // _T, _T // 8], [warps, 1], [1, 0])
    ones = gl.allocate_shared_memory(
        dtype, [_ONES, _T], gl.NVMMASharedLayout.get_default_for([_ONES, _T], dtype),
        gl.full([_ONES, _T], 1.0, dtype, registers),
    )  # fmt: skip

    bh = b.to(gl.int64) * heads + h
    first = chunk * blocks_a_chunk
    last = gl.minimum(first + blocks_a_chunk, k_blocks)
    per_block: gl.constexpr = BLOCK_K // _T
    begin = first * BLOCK_K
    end = gl.minimum(last * BLOCK_K, n_kv)
    rows = gl.arange(0, _T, gl.SliceLayout(1, wide))
    layout_rows = gl.arange(0, _T, gl.SliceLayout(1, row_layout))
    k_rows = keys.k_ptr + b.to(gl.int64) * keys.k_strides[0] + h * D
    v_rows = keys.v_ptr + b.to(gl.int64) * keys.v_strides[0] + h * D
    k_rows += begin.to(gl.int64) * keys.k_strides[1]
    v_rows += begin.to(gl.int64) * keys.v_strides[1]
    rows_left = end - begin
    offs_d = gl.arange(0, D, gl.SliceLayout(0, row_layout))
    mean = gl.load(keys.k_mean_ptr + bh * D + offs_d).to(gl.float32)
    rings, pointers, strides = (
        (k_ring, v_ring),
        (k_rows, v_rows),
        (keys.k_strides[1], keys.v_strides[1]),
    )
    for i in gl.static_range(_STAGES - 1):
        _copy(rings, i, pointers, strides, i * _T + rows, rows_left, D, wide)
    matrix = warpgroup_mma_init(gl.zeros([D, D], gl.float32, layout))
    total = warpgroup_mma_init(gl.zeros([D, _ONES], gl.float32, layout_ones))
    pooled = warpgroup_mma_init(gl.zeros([D, _ONES], gl.float32, layout_ones))
    k_pooled_ptr = sums.k_pooled + bh * (k_blocks * D)
    step = 0
    for block in range(first, last):
        for part in gl.static_range(per_block):
            stage = step % _STAGES
            async_copy.wait_group(_STAGES - 2)
            x = k_ring.index(stage).load(row_layout).to(gl.float32)
            inside = step * _T + layout_rows < rows_left
            smooth = (x - gl.where(inside[:, None], mean[None, :], 0.0)).to(dtype)
            peak = gl.max(x, axis=1)
            e = gl.exp2(x * _LOG2_E - (peak * _LOG2_E)[:, None])
            inverse = gl.where(inside, 1.0 / gl.sum(e, axis=1), 0.0)
            phi = (e * inverse[:, None]).to(dtype)
            # The products of the step before have read the tiles that are written here.
            matrix, total, pooled = warpgroup_mma_wait(0, deps=(matrix, total, pooled))
            if part == 0:  # noqa: SIM102 (a compile-time branch)
                if block > first:
                    _store_pooled(pooled, k_pooled_ptr, block - 1, n_kv, BLOCK_K)
            cta_barrier()
            phi_tile.store(phi)
            smooth_tile.store(smooth)
            ahead = step + _STAGES - 1
            slot = ahead % _STAGES
            _copy(rings, slot, pointers, strides, ahead * _T + rows, rows_left, D, wide)
            fence_async_shared()
            cta_barrier()
            features = phi_tile.permute((1, 0))
            column = ones.permute((1, 0))
            matrix = warpgroup_mma(features, v_ring.index(stage), matrix, is_async=True)
            total = warpgroup_mma(features, column, total, is_async=True)
            pooled = warpgroup_mma(
                smooth_tile.permute((1, 0)), column, pooled, use_acc=part > 0, is_async=True
            )
            step += 1
    matrix, total, pooled = warpgroup_mma_wait(0, deps=(matrix, total, pooled))
    async_copy.wait_group(0)
    _store_pooled(pooled, k_pooled_ptr, last - 1, n_kv, BLOCK_K)
    place = bh * chunks + chunk
    column_sum = gl.max(total, axis=1)
    at = gl.arange(0, D, column_sum.type.layout)
    gl.store(sums.total + place * D + at, column_sum)
    at_k = gl.arange(0, D, gl.SliceLayout(1, layout))
    at_v = gl.arange(0, D, gl.SliceLayout(0, layout))
    gl.store(sums.matrix + place * (D * D) + at_k[:, None] * D + at_v[None, :], matrix)


def launch_key_sums(
    k: torch.Tensor, v: torch.Tensor, k_mean: torch.Tensor, *, heads: int, block_k: int
) -> KeySums:
    """Run one pass over k and v [B, N, H*D]; k_mean [B, H, D] in their dtype."""
    head_dim = k.shape[2] // heads
    sums, grid, arguments = key_pass(
        k, v, k_mean, heads=heads, head_pad=head_dim, block_k=block_k, programs=_PROGRAMS
    )
    launch(
        hopper_key_value_kernel,
        grid,
        k.device,
        **arguments,
        D=head_dim,
        BLOCK_K=block_k,
        num_warps=head_dim // 16,
    )
    return sums
