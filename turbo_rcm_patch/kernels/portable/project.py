"""The projection whose epilogue closes the skip: `c_skip * residual + c_out * (x W^T + bias)`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from turbo_rcm_patch.kernels.launch import (
    LENGTHS,
    Tile,
    cdiv,
    launch,
    near_rows,
    round_to,
    skip_arguments,
    target_of,
    tile_for,
)
from turbo_rcm_patch.kernels.portable.skip import close_skip, skip
from turbo_rcm_patch.kernels.replay import replayed


@triton.jit
def project_tile(
    x_ptr, x_stride, mask_m, weight_ptr, bias_ptr, weight_stride, start_c, c_in, c_out,
    BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr, CACHE: tl.constexpr,
):  # fmt: skip
    """x W^T + bias for BLOCK_M rows and BLOCK_C columns, fp32.

    x_ptr: the first row, rows x_stride apart and dense in channels; weight [Cout, Cin];
    bias [Cout]. Offsets inside a tile fit into 32 bits (`near_rows`), its origin is a 64-bit
    pointer.
    """
    offs_m, offs_k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    rows_c = tl.arange(0, BLOCK_C)
    offs_c = start_c + rows_c
    mask_c = offs_c < c_out
    x_ptrs = x_ptr + offs_m[:, None] * x_stride + offs_k[None, :]
    w_ptrs = weight_ptr + tl.cast(start_c, tl.int64) * weight_stride
    w_ptrs += rows_c[:, None] * weight_stride + offs_k[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    for start_k in range(0, c_in, BLOCK_K):
        if EVEN_K:
            x = tl.load(x_ptrs + start_k, mask=mask_m[:, None], other=0.0, cache_modifier=CACHE)
            w = tl.load(w_ptrs + start_k, mask=mask_c[:, None], other=0.0)
        else:
            mask_k = (start_k + offs_k < c_in)[None, :]
            x = tl.load(
                x_ptrs + start_k, mask=mask_m[:, None] & mask_k, other=0.0, cache_modifier=CACHE
            )
            w = tl.load(w_ptrs + start_k, mask=mask_c[:, None] & mask_k, other=0.0)
        acc = tl.dot(x, tl.trans(w), acc, input_precision=PRECISION)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + offs_c, mask=mask_c, other=0.0).to(tl.float32)[None, :]
    return acc, offs_c, mask_c


@triton.jit(do_not_specialize=LENGTHS)
def project_kernel(
    y_ptr, x_ptr, weight_ptr, bias_ptr, residual_ptr, skip_ptr, out_ptr,
    x_strides, weight_stride, residual_strides,
    skip_value, skip_strides, out_value, out_strides,
    n_tokens, c_in, c_out,
    BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, SKIP_KIND: tl.constexpr, OUT_KIND: tl.constexpr,
    ROUND_TO: tl.constexpr,
):  # fmt: skip
    """y = c_skip * residual + c_out * (x W^T + bias).

    Grid: (blocks of rows * blocks of columns, batch); GROUP_M blocks of rows share the weight in
        L2.
    y [B, N, Cout] dense; x [B, N, Cin]; weight [Cout, Cin]; residual [B, N, Cout].
    """
    pid, b = tl.program_id(0), tl.program_id(1)
    blocks_m, blocks_c = tl.cdiv(n_tokens, BLOCK_M), tl.cdiv(c_out, BLOCK_C)
    first_m = pid // (GROUP_M * blocks_c) * GROUP_M
    rows_here = tl.minimum(blocks_m - first_m, GROUP_M)
    inside = pid % (GROUP_M * blocks_c)
    start_m = (first_m + inside % rows_here) * BLOCK_M
    start_c = inside // rows_here * BLOCK_C
    offs_m = start_m + tl.arange(0, BLOCK_M)
    mask_m = offs_m < n_tokens
    x_first = x_ptr + b.to(tl.int64) * x_strides[0] + start_m.to(tl.int64) * x_strides[1]
    branch, offs_c, mask_c = project_tile(
        x_first, x_strides[1], mask_m, weight_ptr, bias_ptr, weight_stride, start_c, c_in, c_out,
        BLOCK_M, BLOCK_C, BLOCK_K, HAS_BIAS, EVEN_K, PRECISION, "",
    )  # fmt: skip
    y = close_skip(
        branch, residual_ptr, residual_strides, b, offs_m, offs_c,
        mask_m, mask_c,
        skip_ptr, skip_value, skip_strides, out_ptr, out_value, out_strides,
        HAS_RESIDUAL, SKIP_KIND, OUT_KIND, ROUND_TO,
    )  # fmt: skip
    rows = (b.to(tl.int64) * n_tokens + offs_m.to(tl.int64)) * c_out
    tl.store(
        y_ptr + rows[:, None] + offs_c[None, :],
        y.to(y_ptr.dtype.element_ty),
        mask=mask_m[:, None] & mask_c[None, :],
    )


def by_library(x: torch.Tensor) -> bool:
    """Whether cuBLAS and a skip of its own pass close this product.

    They do in 16 bits on a GPU: on an H200 they are faster than this kernel with its best tile at
    every size that was measured, 256 to 17,160 tokens (`python -m benchmarks linear`).
    """
    return x.is_cuda and x.dtype != torch.float32


@replayed
def project_skip(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    c_skip: float | torch.Tensor,
    c_out: float | torch.Tensor,
    *,
    cast: str,
    out_dtype: torch.dtype,
    tile: Tile | None = None,
) -> torch.Tensor:
    """x [B, N, Cin], weight [Cout, Cin], residual [B, N, Cout]; `tile` asks for this kernel.

    A product in 16 bits on a GPU is cuBLAS's, which rounds it to x's dtype before the skip, as
    eager code does.
    """
    batch, n_tokens, c_in = x.shape
    features = weight.shape[0]
    if tile is None and by_library(x):
        branch = F.linear(x, weight, None if bias is None else bias.to(x.dtype))
        if residual is None and not isinstance(c_out, torch.Tensor) and c_out == 1.0:
            return branch.to(out_dtype)
        return skip(residual, branch, c_skip, c_out, cast=cast, out_dtype=out_dtype)
    if tile is None:
        variant = "fp32" if x.dtype == torch.float32 else "16bit"
        tile = tile_for("project", variant, target_of(x.device))
    block_k = 32 if x.dtype == torch.float32 else 64
    x, weight = near_rows(x), near_rows(weight)
    y = torch.empty(batch, n_tokens, features, dtype=out_dtype, device=x.device)
    launch(
        project_kernel,
        (cdiv(n_tokens, tile.block_m) * cdiv(features, tile.block_n), batch),
        x.device,
        y_ptr=y,
        x_ptr=x,
        weight_ptr=weight,
        bias_ptr=None if bias is None else bias.contiguous(),
        x_strides=x.stride()[:2],
        weight_stride=weight.stride(0),
        n_tokens=n_tokens,
        c_in=c_in,
        c_out=features,
        BLOCK_M=tile.block_m,
        BLOCK_C=tile.block_n,
        BLOCK_K=block_k,
        GROUP_M=8,
        HAS_BIAS=bias is not None,
        EVEN_K=c_in % block_k == 0,
        PRECISION="ieee",
        ROUND_TO=round_to(cast, out_dtype if residual is None else residual.dtype),
        **skip_arguments(residual, c_skip, c_out, y.shape),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return y


def project_skip_streams(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residuals: list[torch.Tensor],
    c_out: list[torch.Tensor],
    *,
    cast: str,
    out_dtype: torch.dtype,
) -> list[torch.Tensor]:
    """residual + c_out * (rows of x W^T + bias) for residuals [B, Ni, Cout] that share the rows of
    x [B, N, Cin].

    A product for the library is computed once: the rows of one stream are strided in a batch, and
    a product of them would first copy them.
    """
    lengths = [residual.shape[1] for residual in residuals]
    library = by_library(x)
    if library:
        x = F.linear(x, weight, None if bias is None else bias.to(x.dtype))
    closed = []
    for rows, residual, gate in zip(x.split(lengths, dim=1), residuals, c_out, strict=True):
        if not rows.shape[1]:
            closed.append(torch.empty_like(residual, dtype=out_dtype))
            continue
        how = {"cast": cast, "out_dtype": out_dtype}
        if library:
            closed.append(skip(residual, rows, 1.0, gate, **how))
        else:
            closed.append(project_skip(rows, weight, bias, residual, 1.0, gate, **how))
    return closed
