"""The W8A8 linear: int8 product, scales, bias and GELU in one launch.

With a weight scale per block of 128 x 128 (BLOCKS), a step over K is one block. Its integer
product is scaled and added in fp32, so a tile needs registers for both.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from turbo_rcm_patch.ops.formats import ALIGNED, LARGE, Int8Tensor, LinearInputs
from turbo_rcm_patch.ops.launch import (
    LENGTHS,
    Tile,
    cdiv,
    descriptor,
    launch,
    target_of,
    tile_for,
)
from turbo_rcm_patch.ops.numerics import gelu_tanh

#: Least number of outputs for which tiles of 128x128 are faster than those of 64x64 (1,950 x 1,536
#: outputs of 8,960 channels: 52 us against 74).
MEDIUM = 5 * 2**19
#: Channels of one step over K: 128 bytes of int8, the widest swizzle of a hardware copy.
BLOCK_K = 128


class Scales(NamedTuple):
    """The scales of a product and its bias.

    Attributes:
        x_ptr: fp32 [B, N].
        w_ptr: fp32 [Cout], or [blocks of BLOCK_K rows, blocks of BLOCK_K channels].
        w_stride: Stride of the rows of scales per block.
        bias_ptr: [Cout] or None.
    """

    x_ptr: torch.Tensor
    w_ptr: torch.Tensor
    w_stride: int
    bias_ptr: torch.Tensor | None


class LinearForm(NamedTuple):
    """The numbers of `int8_linear_kernel` that are known when it is compiled.

    Attributes:
        BLOCK_M: Rows of a tile.
        BLOCK_C: Columns of a tile.
        BLOCK_K: Channels of a step.
        GROUP_M: Blocks of rows that share the weight in L2.
        DESCRIPTORS: True if descriptors load x and the weight.
        EVEN_K: True if BLOCK_K divides K.
        GELU: True if GELU comes after the product.
        BLOCKS: True for a weight scale per block.
    """

    BLOCK_M: int
    BLOCK_C: int
    BLOCK_K: int
    GROUP_M: int
    DESCRIPTORS: bool
    EVEN_K: bool
    GELU: bool
    BLOCKS: bool


@triton.jit
def _step(acc, x, w, scales, start_k, offs_c, c_out, FORM: tl.constexpr):
    """Return acc + x w^T; with BLOCKS the product is scaled by this block's scales, in fp32."""
    if FORM.BLOCKS:
        block = scales.w_ptr + start_k // FORM.BLOCK_K
        scale_ptrs = block + offs_c // FORM.BLOCK_K * scales.w_stride
        scale = tl.load(scale_ptrs, mask=offs_c < c_out, other=0.0)
        part = tl.dot(x, tl.trans(w), out_dtype=tl.int32)
        acc += part.to(tl.float32) * scale[None, :]
    else:
        acc = tl.dot(x, tl.trans(w), acc, out_dtype=tl.int32)
    return acc


@triton.jit
def _product_tile(x_src, w_src, scales, place, channels, c_out, FORM: tl.constexpr):
    """Multiply rows of x by rows of the weight: a tile [BLOCK_M, BLOCK_C].

    It is int32, or fp32 and scaled by the weight's scales (BLOCKS). x int8 [rows, K], weight int8
    [Cout, K]: pointers, or descriptors over the same memory, which read 0 outside. place: first
    row of x, first row of the weight, and how many rows from that of x on belong to this batch
    entry.
    """
    BLOCK_K: tl.constexpr = FORM.BLOCK_K
    row, start_c, rows_left = place
    acc = tl.full([FORM.BLOCK_M, FORM.BLOCK_C], 0, tl.float32 if FORM.BLOCKS else tl.int32)
    rows_m, rows_c = tl.arange(0, FORM.BLOCK_M), tl.arange(0, FORM.BLOCK_C)
    offs_c = start_c + rows_c
    if FORM.DESCRIPTORS:
        for start_k in range(0, channels, BLOCK_K):
            x = x_src.load([row, start_k])
            w = w_src.load([start_c, start_k])
            acc = _step(acc, x, w, scales, start_k, offs_c, c_out, FORM)
    else:
        offs_k = tl.arange(0, BLOCK_K)
        mask_m, mask_c = (rows_m < rows_left)[:, None], (offs_c < c_out)[:, None]
        x_ptrs = x_src + row.to(tl.int64) * channels
        x_ptrs += rows_m[:, None] * channels + offs_k[None, :]
        w_ptrs = w_src + start_c.to(tl.int64) * channels
        w_ptrs += rows_c[:, None] * channels + offs_k[None, :]
        for start_k in range(0, channels, BLOCK_K):
            if FORM.EVEN_K:
                x = tl.load(x_ptrs + start_k, mask=mask_m, other=0)
                w = tl.load(w_ptrs + start_k, mask=mask_c, other=0)
            else:
                mask_k = (start_k + offs_k < channels)[None, :]
                x = tl.load(x_ptrs + start_k, mask=mask_m & mask_k, other=0)
                w = tl.load(w_ptrs + start_k, mask=mask_c & mask_k, other=0)
            acc = _step(acc, x, w, scales, start_k, offs_c, c_out, FORM)
    return acc


@triton.jit
def _epilogue(acc, y_ptr, scales, place, n_tokens, c_out, FORM: tl.constexpr):
    """Scale a tile of products, add the bias, activate, and store.

    place: batch entry, first row and first column. With BLOCKS the products already include the
    weight's scales.
    """
    b, start_m, start_c = place
    offs_m = start_m + tl.arange(0, FORM.BLOCK_M)
    offs_c = start_c + tl.arange(0, FORM.BLOCK_C)
    mask_m, mask_c = offs_m < n_tokens, offs_c < c_out
    first = b.to(tl.int64) * n_tokens
    x_scale = tl.load(scales.x_ptr + first + offs_m, mask=mask_m, other=0.0)
    y = acc.to(tl.float32) * x_scale[:, None]
    if not FORM.BLOCKS:
        w_scale = tl.load(scales.w_ptr + offs_c, mask=mask_c, other=0.0)
        y *= w_scale[None, :]
    if scales.bias_ptr is not None:
        bias = tl.load(scales.bias_ptr + offs_c, mask=mask_c, other=0.0).to(tl.float32)
        y += bias[None, :]
    if FORM.GELU:
        y = gelu_tanh(y)
    rows = (first + offs_m) * c_out
    tl.store(
        y_ptr + rows[:, None] + offs_c[None, :],
        y.to(y_ptr.dtype.element_ty),
        mask=mask_m[:, None] & mask_c[None, :],
    )


@triton.jit(do_not_specialize=LENGTHS)
def int8_linear_kernel(y_ptr, x_src, w_src, scales, n_tokens, channels, c_out, FORM: tl.constexpr):
    """Compute y = gelu((x W^T) * x_scale * w_scale + bias).

    Grid: (batch * blocks of rows * blocks of columns,). GROUP_M blocks of rows share the weight in
    L2.
    y [B, N, Cout] dense; x int8 [B * N, K], weight int8 [Cout, K]: pointers to dense memory, or
    descriptors (DESCRIPTORS); scales: `Scales`.
    """
    blocks_m, blocks_c = tl.cdiv(n_tokens, FORM.BLOCK_M), tl.cdiv(c_out, FORM.BLOCK_C)
    tile = tl.program_id(0)
    b = tile // (blocks_m * blocks_c)
    pid = tile % (blocks_m * blocks_c)
    first_m = pid // (FORM.GROUP_M * blocks_c) * FORM.GROUP_M
    rows_here = tl.minimum(blocks_m - first_m, FORM.GROUP_M)
    inside = pid % (FORM.GROUP_M * blocks_c)
    start_m = (first_m + inside % rows_here) * FORM.BLOCK_M
    start_c = inside // rows_here * FORM.BLOCK_C
    place = (b * n_tokens + start_m, start_c, n_tokens - start_m)
    acc = _product_tile(x_src, w_src, scales, place, channels, c_out, FORM)
    _epilogue(acc, y_ptr, scales, (b, start_m, start_c), n_tokens, c_out, FORM)


def _crowded(tile: Tile) -> bool:
    """Return True if a tile's sums take half of a thread's registers, so that a second sum would
    spill."""
    return tile.block_m * tile.block_n >= 128 * 32 * tile.warps


def launch_kernel(y: torch.Tensor, x: Int8Tensor, linear: LinearInputs) -> None:
    """Write gelu(x @ weight^T + bias) into y [B, N, Cout], which is dense.

    x [B, N, K] int8; weight int8 [Cout, K], dense; its scale fp32 [Cout],
    or [blocks of 128 rows, blocks of 128 channels]; bias [Cout] or None, dense.
    """
    weight, weight_scale, bias, activation = linear
    batch, n_tokens, channels = x.data.shape
    features = weight.shape[0]
    target = target_of(y.device)
    blocks = weight_scale.dim() == 2
    weight_scale = weight_scale.contiguous()
    outputs = y.numel()
    # A hardware copy needs an address that is a multiple of 16; that of a slice may not be.
    descriptors = target.descriptors and weight.data_ptr() % ALIGNED == 0
    size = "wide" if outputs >= LARGE else "medium" if outputs >= MEDIUM else "small"
    tile = tile_for("int8_linear", size, target)
    if blocks and _crowded(tile):  # Two sums per value: of integers, and of scaled products.
        tile = tile._replace(warps=2 * tile.warps)
    x_src, w_src = x.data, weight
    if descriptors:
        x_src = descriptor(x_src.view(-1, channels), [tile.block_m, BLOCK_K])
        w_src = descriptor(w_src, [tile.block_n, BLOCK_K])
    tiles = batch * cdiv(n_tokens, tile.block_m) * cdiv(features, tile.block_n)
    launch(
        int8_linear_kernel,
        (tiles,),
        y.device,
        y_ptr=y,
        x_src=x_src,
        w_src=w_src,
        scales=Scales(x.scale, weight_scale, weight_scale.stride(0), bias),
        n_tokens=n_tokens,
        channels=channels,
        c_out=features,
        FORM=LinearForm(
            BLOCK_M=tile.block_m,
            BLOCK_C=tile.block_n,
            BLOCK_K=BLOCK_K,
            GROUP_M=8,
            DESCRIPTORS=descriptors,
            EVEN_K=channels % BLOCK_K == 0,
            GELU=activation == "gelu-tanh",
            BLOCKS=blocks,
        ),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
