"""The W8A8 linear: int8 product, scales, bias and GELU in one launch.

With a weight scale per row and 128 channels, or per block of 128 x 128 (GROUPED), a step over K is
one group of channels. Its integer product is scaled and added in fp32, so a tile needs registers
for both.
"""

from __future__ import annotations

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


@triton.jit
def _step(acc, x, w, w_scale_ptr, w_scale_strides, start_k, offs_c, c_out,
          BLOCK_K: tl.constexpr, GROUPED: tl.constexpr, BLOCKS: tl.constexpr):  # fmt: skip
    """Return acc + x w^T; with GROUPED the product is scaled by this group's scales, in fp32."""
    if GROUPED:
        rows = offs_c // BLOCK_K if BLOCKS else offs_c
        group = w_scale_ptr + start_k // BLOCK_K * w_scale_strides[1]
        scale_ptrs = group + rows * w_scale_strides[0]
        scale = tl.load(scale_ptrs, mask=offs_c < c_out, other=0.0)
        part = tl.dot(x, tl.trans(w), out_dtype=tl.int32)
        acc += part.to(tl.float32) * scale[None, :]
    else:
        acc = tl.dot(x, tl.trans(w), acc, out_dtype=tl.int32)
    return acc


@triton.jit
def _product_tile(
    x_src, w_src, w_scale_ptr, w_scale_strides,
    row, start_c, rows_left, channels, c_out,
    BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
    DESCRIPTORS: tl.constexpr, GROUPED: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Multiply rows row.. of x by rows start_c.. of the weight: a tile [BLOCK_M, BLOCK_C].

    It is int32, or fp32 and scaled by the weight's scales (GROUPED). x int8 [rows, K], weight int8
    [Cout, K]: pointers, or descriptors over the same memory, which read 0 outside. rows_left: the
    number of rows from `row` on that belong to this batch entry.
    """
    acc = tl.zeros([BLOCK_M, BLOCK_C], tl.float32 if GROUPED else tl.int32)
    offs_c = start_c + tl.arange(0, BLOCK_C)
    if DESCRIPTORS:
        for start_k in range(0, channels, BLOCK_K):
            x = x_src.load([row, start_k])
            w = w_src.load([start_c, start_k])
            acc = _step(acc, x, w, w_scale_ptr, w_scale_strides,
                        start_k, offs_c, c_out, BLOCK_K, GROUPED, BLOCKS)  # fmt: skip
    else:
        offs_k = tl.arange(0, BLOCK_K)
        rows_m, rows_c = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_C)
        mask_m, mask_c = (rows_m < rows_left)[:, None], (start_c + rows_c < c_out)[:, None]
        x_ptrs = x_src + row.to(tl.int64) * channels
        x_ptrs += rows_m[:, None] * channels + offs_k[None, :]
        w_ptrs = w_src + start_c.to(tl.int64) * channels
        w_ptrs += rows_c[:, None] * channels + offs_k[None, :]
        for start_k in range(0, channels, BLOCK_K):
            if EVEN_K:
                x = tl.load(x_ptrs + start_k, mask=mask_m, other=0)
                w = tl.load(w_ptrs + start_k, mask=mask_c, other=0)
            else:
                mask_k = (start_k + offs_k < channels)[None, :]
                x = tl.load(x_ptrs + start_k, mask=mask_m & mask_k, other=0)
                w = tl.load(w_ptrs + start_k, mask=mask_c & mask_k, other=0)
            acc = _step(acc, x, w, w_scale_ptr, w_scale_strides,
                        start_k, offs_c, c_out, BLOCK_K, GROUPED, BLOCKS)  # fmt: skip
    return acc


@triton.jit
def _epilogue(
    acc, y_ptr, x_scale_ptr, w_scale_ptr, bias_ptr, b, start_m, start_c, n_tokens, c_out,
    BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
    HAS_BIAS: tl.constexpr, GELU: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    """Scale a tile of products, add the bias, activate, and store.

    With GROUPED the products already include the weight's scales.
    """
    offs_m = start_m + tl.arange(0, BLOCK_M)
    offs_c = start_c + tl.arange(0, BLOCK_C)
    mask_m, mask_c = offs_m < n_tokens, offs_c < c_out
    first = b.to(tl.int64) * n_tokens
    x_scale = tl.load(x_scale_ptr + first + offs_m, mask=mask_m, other=0.0)
    y = acc.to(tl.float32) * x_scale[:, None]
    if not GROUPED:
        w_scale = tl.load(w_scale_ptr + offs_c, mask=mask_c, other=0.0)
        y *= w_scale[None, :]
    if HAS_BIAS:
        y += tl.load(bias_ptr + offs_c, mask=mask_c, other=0.0).to(tl.float32)[None, :]
    if GELU:
        y = gelu_tanh(y)
    rows = (first + offs_m) * c_out
    tl.store(
        y_ptr + rows[:, None] + offs_c[None, :],
        y.to(y_ptr.dtype.element_ty),
        mask=mask_m[:, None] & mask_c[None, :],
    )


@triton.jit(do_not_specialize=LENGTHS)
def int8_linear_kernel(
    y_ptr, x_src, x_scale_ptr, w_src, w_scale_ptr, bias_ptr,
    n_tokens, channels, c_out, w_scale_strides,
    BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    DESCRIPTORS: tl.constexpr, EVEN_K: tl.constexpr, HAS_BIAS: tl.constexpr, GELU: tl.constexpr,
    GROUPED: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Compute y = gelu((x W^T) * x_scale * w_scale + bias).

    Grid: (batch * blocks of rows * blocks of columns,). GROUP_M blocks of rows share the weight in
    L2.
    y [B, N, Cout] dense; x int8 [B * N, K], weight int8 [Cout, K]: pointers to dense memory, or
    descriptors (DESCRIPTORS); x_scale [B, N] and w_scale [Cout] fp32, or [Cout, groups
    of BLOCK_K channels] (GROUPED), or [groups of BLOCK_K rows, groups of BLOCK_K channels]
    (BLOCKS too); bias [Cout].
    """
    blocks_m, blocks_c = tl.cdiv(n_tokens, BLOCK_M), tl.cdiv(c_out, BLOCK_C)
    tile = tl.program_id(0)
    b = tile // (blocks_m * blocks_c)
    pid = tile % (blocks_m * blocks_c)
    first_m = pid // (GROUP_M * blocks_c) * GROUP_M
    rows_here = tl.minimum(blocks_m - first_m, GROUP_M)
    inside = pid % (GROUP_M * blocks_c)
    start_m = (first_m + inside % rows_here) * BLOCK_M
    start_c = inside // rows_here * BLOCK_C
    acc = _product_tile(
        x_src, w_src, w_scale_ptr, w_scale_strides,
        b * n_tokens + start_m, start_c, n_tokens - start_m, channels, c_out,
        BLOCK_M, BLOCK_C, BLOCK_K, EVEN_K, DESCRIPTORS, GROUPED, BLOCKS,
    )  # fmt: skip
    _epilogue(
        acc, y_ptr, x_scale_ptr, w_scale_ptr, bias_ptr, b, start_m, start_c, n_tokens, c_out,
        BLOCK_M, BLOCK_C, HAS_BIAS, GELU, GROUPED,
    )  # fmt: skip


def _crowded(tile: Tile) -> bool:
    """Return True if a tile's sums take half of a thread's registers, so that a second sum would
    spill."""
    return tile.block_m * tile.block_n >= 128 * 32 * tile.warps


def launch_kernel(y: torch.Tensor, x: Int8Tensor, linear: LinearInputs) -> None:
    """Write gelu(x @ weight^T + bias) into y [B, N, Cout], which is dense.

    x [B, N, K] int8; weight int8 [Cout, K], dense; its scale fp32 [Cout], [Cout, groups of 128
    channels] or [groups of 128 rows, groups of 128 channels]; bias [Cout] or None, dense.
    """
    weight, weight_scale, bias, activation = linear
    batch, n_tokens, channels = x.data.shape
    features = weight.shape[0]
    target = target_of(y.device)
    grouped = weight_scale.dim() == 2
    blocks = grouped and weight_scale.shape[0] != features
    outputs = y.numel()
    # A hardware copy needs an address that is a multiple of 16; that of a slice may not be.
    descriptors = target.descriptors and weight.data_ptr() % ALIGNED == 0
    size = "wide" if outputs >= LARGE else "medium" if outputs >= MEDIUM else "small"
    tile = tile_for("int8_linear", size, target)
    if grouped and _crowded(tile):  # Two sums per value: of integers, and of scaled products.
        tile = tile._replace(warps=2 * tile.warps)
    if not grouped:
        weight_scale = weight_scale.contiguous()
    elif not blocks:  # Make the scales of a group contiguous, as the kernel reads them.
        weight_scale = weight_scale.t().contiguous().t()
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
        x_scale_ptr=x.scale,
        w_src=w_src,
        w_scale_ptr=weight_scale,
        w_scale_strides=(weight_scale.stride(0), weight_scale.stride(1) if grouped else 0),
        bias_ptr=bias,
        n_tokens=n_tokens,
        channels=channels,
        c_out=features,
        BLOCK_M=tile.block_m,
        BLOCK_C=tile.block_n,
        BLOCK_K=BLOCK_K,
        GROUP_M=8,
        DESCRIPTORS=descriptors,
        EVEN_K=channels % BLOCK_K == 0,
        HAS_BIAS=bias is not None,
        GELU=activation == "gelu-tanh",
        GROUPED=grouped,
        BLOCKS=blocks,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
