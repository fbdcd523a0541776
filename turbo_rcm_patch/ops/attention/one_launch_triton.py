"""int8 attention, output projection and skip in one launch.

Every program computes one head of a block of rows and writes it. A counter tells a program that it
completed the last head of its rows. This program projects the rows while they are in L2, and
closes the skip. No program waits, and no atomics sum floats, so the result does not depend on the
order of programs.

The attention output passes from one program to another. It is written and read with plain
pointers, because a descriptor's store is ordered only for other descriptors. A barrier of the
whole program comes before the atomic, which one thread executes for all. The atomic acquires and
releases at device scope. The counters belong to one call, and its prologue zeroes them, so aborted
launches, streams and replayed graphs are safe.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from turbo_rcm_patch.ops.attention.online_softmax import attend, attention_arguments
from turbo_rcm_patch.ops.formats import NO_SKIP, AttentionInputs, QuantizedOperands
from turbo_rcm_patch.ops.launch import (
    LENGTHS,
    Tile,
    launch,
    skip_arguments,
)
from turbo_rcm_patch.ops.numerics import close_skip


class Projection(NamedTuple):
    """The output projection: weight [Cout, Cin] with its stride, bias [Cout] or None, and Cout."""

    weight_ptr: torch.Tensor
    weight_stride: int
    bias_ptr: torch.Tensor | None
    c_out: int


class ProjectionForm(NamedTuple):
    """The numbers of the projection and its skip that are known when they are compiled.

    Attributes:
        BLOCK_C: Columns of a tile.
        BLOCK_K: Depth of a tile.
        EVEN_K: True if that depth divides Cin.
    """

    BLOCK_C: int
    BLOCK_K: int
    EVEN_K: bool


@triton.jit
def project_tile(x_ptr, c_in, mask_m, projection, start_c, FORM: tl.constexpr):
    """Compute x W^T + bias for the rows of mask_m and BLOCK_C columns, in fp32.

    x_ptr: the first of dense rows of c_in channels; projection: `Projection`; FORM:
    `ProjectionForm`. Offsets inside a tile of dense rows fit into 32 bits; its origin is a 64-bit
    pointer.
    """
    BLOCK_M: tl.constexpr = mask_m.shape[0]
    offs_m, offs_k = tl.arange(0, BLOCK_M), tl.arange(0, FORM.BLOCK_K)
    rows_c = tl.arange(0, FORM.BLOCK_C)
    offs_c = start_c + rows_c
    mask_c = offs_c < projection.c_out
    x_ptrs = x_ptr + offs_m[:, None] * c_in + offs_k[None, :]
    w_ptrs = projection.weight_ptr + tl.cast(start_c, tl.int64) * projection.weight_stride
    w_ptrs += rows_c[:, None] * projection.weight_stride + offs_k[None, :]
    acc = tl.full([BLOCK_M, FORM.BLOCK_C], 0.0, tl.float32)
    for start_k in range(0, c_in, FORM.BLOCK_K):
        mask_x, mask_w = mask_m[:, None], mask_c[:, None]
        if not FORM.EVEN_K:
            mask_k = (start_k + offs_k < c_in)[None, :]
            mask_x, mask_w = mask_x & mask_k, mask_w & mask_k
        x = tl.load(x_ptrs + start_k, mask=mask_x, other=0.0, cache_modifier=".cg")
        w = tl.load(w_ptrs + start_k, mask=mask_w, other=0.0)
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
    if projection.bias_ptr is not None:
        bias = tl.load(projection.bias_ptr + offs_c, mask=mask_c, other=0.0)
        acc += bias.to(tl.float32)[None, :]
    return acc, offs_c, mask_c


class OneLaunchOutput(NamedTuple):
    """The memory that the kernel writes.

    Attributes:
        y_ptr: [B, Nq, Cout] dense.
        attended_ptr: [B, Nq, H*D] dense.
        counter_ptr: int32 [B, blocks of rows], zero.
    """

    y_ptr: torch.Tensor
    attended_ptr: torch.Tensor
    counter_ptr: torch.Tensor


@triton.jit(do_not_specialize=LENGTHS)
def one_launch_kernel(
    out, projection, q_src, k_src, v_src, operands, skip, n_q, n_kv,
    FORM: tl.constexpr, PROJECTION: tl.constexpr, KINDS: tl.constexpr,
):  # fmt: skip
    """Compute y = c_skip * residual + c_out * (softmax(q k^T) v W^T + bias).

    Grid: (heads, blocks of BLOCK_M rows, batch). Heads vary fastest, so that a block of rows is
    complete soon after its first program starts.
    out: `OneLaunchOutput`; FORM: `AttendForm`; PROJECTION: `ProjectionForm`; the rest as in
    `project_tile`, `attend` and `close_skip`. KINDS is an argument of its own, because Triton 3.6
    loses the types of a tuple within a tuple of constants.
    """
    h, block, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start_m = block * FORM.BLOCK_M
    tile, _ = attend(q_src, k_src, v_src, operands, n_kv, b, h, start_m, FORM=FORM)
    offs_m = start_m + tl.arange(0, FORM.BLOCK_M)
    offs_d = tl.arange(0, FORM.HEAD_PAD)
    mask_m = offs_m < n_q
    c_in = operands.heads * FORM.HEAD_DIM
    row = b.to(tl.int64) * n_q + start_m
    rows = tl.arange(0, FORM.BLOCK_M)[:, None]
    attended = out.attended_ptr + row * c_in
    tl.store(
        attended + rows * c_in + (h * FORM.HEAD_DIM + offs_d)[None, :],
        tile.to(out.attended_ptr.dtype.element_ty),
        mask=mask_m[:, None] & (offs_d < FORM.HEAD_DIM)[None, :],
    )
    # One thread executes the atomic. Without this barrier it would not wait for the other warps'
    # stores.
    tl.debug_barrier()
    blocks = tl.cdiv(n_q, FORM.BLOCK_M)
    done = tl.atomic_add(out.counter_ptr + b * blocks + block, 1, sem="acq_rel", scope="gpu")
    if done == operands.heads - 1:
        c_out = projection.c_out
        for start_c in range(0, c_out, PROJECTION.BLOCK_C):
            branch, offs_c, mask_c = project_tile(
                attended, c_in, mask_m, projection, start_c, PROJECTION
            )
            y = close_skip(branch, skip, b, (offs_m, offs_c), (mask_m, mask_c), KINDS)
            tl.store(
                out.y_ptr + row * c_out + rows * c_out + offs_c[None, :],
                y.to(out.y_ptr.dtype.element_ty),
                mask=mask_m[:, None] & mask_c[None, :],
            )


def launch_kernel(
    a: AttentionInputs,
    operands: QuantizedOperands,
    counters: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    tile: Tile,
) -> torch.Tensor:
    """Compute an attention, its projection and its skip: [B, Nq, Cout].

    The projection has a weight [Cout, H*D] and a bias [Cout].
    """
    batch, n_q, channels = a.q.shape
    features = weight.shape[0]
    arguments = attention_arguments(a, operands, tile)
    weight = weight.contiguous()
    block_k = 32 if a.q.dtype == torch.float32 else 64
    attended = torch.empty(batch, n_q, channels, dtype=a.q.dtype, device=a.q.device)
    y = torch.empty(batch, n_q, features, dtype=a.out_dtype, device=a.q.device)
    launch(
        one_launch_kernel,
        (a.spec.heads, counters.shape[1], batch),
        a.q.device,
        out=OneLaunchOutput(y, attended, counters),
        projection=Projection(
            weight, weight.stride(0), None if bias is None else bias.contiguous(), features
        ),
        **skip_arguments(*(a.skip or NO_SKIP), y.shape),
        PROJECTION=ProjectionForm(BLOCK_C=64, BLOCK_K=block_k, EVEN_K=channels % block_k == 0),
        **arguments,
    )
    return y
