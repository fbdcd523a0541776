"""Sparse-linear attention: int8 attention over chosen blocks of keys, the linear branch added in
the epilogue.

The step over a block of keys, and with it the numeric contract, is that of the dense kernel; the
loop follows a table of blocks. The linear branch is one product of a row block's features with the
head's projected matrix, added to the accumulator of the softmax part.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from turbo_rcm_patch.kernels.attention import (
    attention_arguments,
    normalised,
    over_block,
    over_keys,
)
from turbo_rcm_patch.kernels.block_map import largest_scores
from turbo_rcm_patch.kernels.launch import (
    LENGTHS,
    cdiv,
    dense_rows,
    launch,
    pad_head,
    target_of,
    tile_for,
)
from turbo_rcm_patch.kernels.linear_branch import linear_branch
from turbo_rcm_patch.kernels.quantize import quantize
from turbo_rcm_patch.kernels.sparse_tokens import prepare_tokens

__all__ = ["sparse_attention_kernel", "sparse_linear_attention"]

#: Registers a thread may have if three programs of four warps share 65,536.
_THREE_PROGRAMS = 168

_LOG2_E = tl.constexpr(1.4426950408889634)
_FP16_MAX = tl.constexpr(65504.0)


@triton.jit
def _block_of(lut, i, count, STEPS: tl.constexpr):
    """The block of keys of step i out of lut [count], STEPS to a block; past the end the last."""
    return tl.load(lut + tl.maximum(0, tl.minimum(i // STEPS, count - 1)))


@triton.jit
def _over_blocks(
    acc, l_i, m_i, q, q_scale, k_src, k_scale_ptr, v_src, ones, bh, n_kv_padded,
    v_stride_n, offs_m, limit, lut, count,
    P_MAX_LOG2: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SCALE_BLOCK: tl.constexpr, FP8: tl.constexpr, DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """The online softmax over the first `count` blocks of keys in lut, all of them whole."""
    # The table is read two steps ahead: copies of the next step's keys begin in this one, and
    # would wait for an address that was just loaded. What is passed on has to change on the way,
    # or the compiler sees a dependence over two steps and does not overlap them.
    steps: tl.constexpr = BLOCK_K // BLOCK_N
    start_n = tl.load(lut) * BLOCK_K
    following = _block_of(lut, 1, count, steps)
    for i in tl.range(0, count * steps):
        later = _block_of(lut, i + 2, count, steps)
        acc, l_i, m_i = over_block(
            acc, l_i, m_i, q, q_scale, k_src, k_scale_ptr, v_src, ones, bh, n_kv_padded,
            v_stride_n, offs_m, limit, start_n,
            P_MAX_LOG2, HEAD_DIM, HEAD_PAD, BLOCK_M, BLOCK_N, SCALE_BLOCK,
            FP8, DESCRIPTORS, False, False,
        )  # fmt: skip
        start_n = following * BLOCK_K + (i + 1) % steps * BLOCK_N
        following = later
    return acc, l_i, m_i


@triton.jit
def _features(rows, start, mask_m, HEAD_DIM: tl.constexpr, STEP: tl.constexpr):
    """STEP channels of the argument of phi from `start` on, in log2 units; -inf past the head."""
    offs_d = start + tl.arange(0, STEP)
    mask_d = (offs_d < HEAD_DIM)[None, :]
    x = tl.load(rows + offs_d[None, :], mask=mask_m[:, None] & mask_d, other=0.0)
    return tl.where(mask_d, x.to(tl.float32) * _LOG2_E, float("-inf"))


@triton.jit
def _add_linear(
    acc, rows, matrix, total, mask_m, eps,
    HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """acc + phi(x) matrix / (phi(x) · total + eps), x the BLOCK_M rows at `rows` [BLOCK_M, 1].

    Twice over a few channels at a time, and not once over all: beside the accumulator there is
    room for no second tile if three programs are to share a multiprocessor.
    """
    STEP: tl.constexpr = 32
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK_M], tl.float32)
    along = tl.zeros([BLOCK_M], tl.float32)  # phi · total, both not yet normalised
    for start in tl.range(0, HEAD_PAD, STEP, num_stages=1):
        x = _features(rows, start, mask_m, HEAD_DIM, STEP)
        higher = tl.maximum(peak, tl.max(x, axis=1))
        e = tl.exp2(x - higher[:, None])
        fade = tl.exp2(peak - higher)
        t = tl.load(total + start + tl.arange(0, STEP))
        mass = mass * fade + tl.sum(e, axis=1)
        along = along * fade + tl.sum(e * t[None, :], axis=1)
        peak = higher
    # phi = e / mass, divided by along / mass + eps.
    factor = 1.0 / (along + eps * mass)
    columns = tl.arange(0, HEAD_PAD)[None, :]
    for start in tl.range(0, HEAD_PAD, STEP, num_stages=2):
        x = _features(rows, start, mask_m, HEAD_DIM, STEP)
        phi = tl.exp2(x - peak[:, None]) * factor[:, None]
        if matrix.dtype.element_ty == tl.float16:
            # Where a row's features meet hardly a key's, the division leaves its range.
            phi = tl.minimum(phi, _FP16_MAX, propagate_nan=tl.PropagateNan.ALL)
        m = tl.load(matrix + (start + tl.arange(0, STEP))[:, None] * HEAD_PAD + columns)
        acc = tl.dot(phi.to(m.dtype), m, acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=LENGTHS)
def sparse_attention_kernel(
    y_ptr, lut_ptr, features_ptr, matrix_ptr, total_ptr, bias_ptr,
    q_src, q_scale_ptr, k_src, k_scale_ptr, v_src, v_scale_ptr, ones_src,
    features_stride_b, features_stride_n, v_stride_b, v_stride_n,
    n_q, n_kv, n_q_padded, n_kv_padded, heads, q_blocks, count, linear_eps,
    P_MAX_LOG2: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SCALE_BLOCK: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    FP8: tl.constexpr, DESCRIPTORS: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """y = softmax over the chosen keys(q k^T) v + phi(q) matrix / (phi(q) · total + eps) + bias.

    Grid: (blocks of BLOCK_M rows, heads, batch).
    y [B, Nq, H*D] dense; lut [B, H, q_blocks, count] int32, ascending, the blocks of BLOCK_K keys
    that a block of BLOCK_Q rows sees; features [B, Nq, H*D] with contiguous channels, the
    argument of phi; matrix [B, H, HEAD_PAD, HEAD_PAD] in its dtype; total [B, H, HEAD_PAD] fp32;
    bias [HEAD_PAD] fp32; the rest as in `attention.attend`.
    """
    start_m = tl.program_id(0) * BLOCK_M
    h, b = tl.program_id(1), tl.program_id(2)
    bh = b.to(tl.int64) * heads + h
    offs_m = start_m + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, HEAD_PAD)
    if DESCRIPTORS:
        q = q_src.load([(bh * n_q_padded + start_m).to(tl.int32), 0])
    else:
        q_rows = q_src + (bh * n_q_padded + start_m) * HEAD_PAD
        q = tl.load(q_rows + tl.arange(0, BLOCK_M)[:, None] * HEAD_PAD + offs_d[None, :])
    q_scale = tl.load(q_scale_ptr + bh * n_q_padded + offs_m)
    k_scales = k_scale_ptr + bh * (n_kv_padded // SCALE_BLOCK)
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_PAD], tl.float32)
    ones = None
    if FP8:
        l_i = tl.zeros([BLOCK_M, 16], tl.float32)
        ones = tl.load(ones_src + tl.arange(0, BLOCK_N)[:, None] * 16 + tl.arange(0, 16)[None, :])
        v_head = v_src
    else:
        l_i = tl.zeros([BLOCK_M], tl.float32)
        v_head = v_src + b.to(tl.int64) * v_stride_b + h * HEAD_DIM

    # Blocks ascend, so the one block that may end past the last key is the last one chosen.
    lut = lut_ptr + (bh * q_blocks + start_m // BLOCK_Q) * count
    partial = tl.load(lut + count - 1) * BLOCK_K
    whole = count
    if partial + BLOCK_K > n_kv:
        whole = count - 1
    else:
        partial = n_kv
    acc, l_i, m_i = _over_blocks(
        acc, l_i, m_i, q, q_scale, k_src, k_scales, v_head, ones, bh, n_kv_padded,
        v_stride_n, offs_m, n_kv, lut, whole,
        P_MAX_LOG2, HEAD_DIM, HEAD_PAD, BLOCK_M, BLOCK_N, BLOCK_K, SCALE_BLOCK, FP8, DESCRIPTORS,
    )  # fmt: skip
    acc, l_i, m_i = over_keys(
        acc, l_i, m_i, q, q_scale, k_src, k_scales, v_head, ones, bh, n_kv_padded,
        v_stride_n, offs_m, n_kv, partial, n_kv,
        P_MAX_LOG2, HEAD_DIM, HEAD_PAD, BLOCK_M, BLOCK_N, SCALE_BLOCK,
        FP8, DESCRIPTORS, True, False,
    )  # fmt: skip
    acc, _ = normalised(acc, l_i, v_scale_ptr, bh, HEAD_PAD, FP8)

    mask_m, mask_d = offs_m < n_q, offs_d < HEAD_DIM
    mask = mask_m[:, None] & mask_d[None, :]
    offs_c = (h * HEAD_DIM + offs_d)[None, :]
    rows = offs_m.to(tl.int64)[:, None]
    features = features_ptr + b.to(tl.int64) * features_stride_b + rows * features_stride_n
    acc = _add_linear(
        acc, features + h * HEAD_DIM, matrix_ptr + bh * HEAD_PAD * HEAD_PAD,
        total_ptr + bh * HEAD_PAD, mask_m, linear_eps, HEAD_DIM, HEAD_PAD, BLOCK_M,
    )  # fmt: skip
    if HAS_BIAS:
        acc += tl.load(bias_ptr + offs_d)[None, :]
    out = y_ptr + (b.to(tl.int64) * n_q + rows) * (heads * HEAD_DIM) + offs_c
    tl.store(out, acc.to(y_ptr.dtype.element_ty), mask=mask)


def sparse_linear_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    heads: int,
    norm_q: torch.Tensor | None,
    norm_k: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    eps: float,
    count: int,
    block_q: int,
    block_k: int,
    pv: str,
    qmax: int,
    smooth_k: bool,
    sm_scale: float,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """The sum of both branches [B, Nq, H*D]; q [B, Nq, H*D], k and v [B, Nk, H*D], norms as in
    `prepare_tokens`; see `ops.sparse_linear_attention`."""
    v = dense_rows(v)
    q, k, q_pooled, k_mean = prepare_tokens(
        q, k, heads=heads, norm_q=norm_q, norm_k=norm_k, cos=cos, sin=sin, eps=eps, block_q=block_q
    )
    batch, n_q, channels = q.shape
    head_dim = channels // heads
    target = target_of(q.device)
    branch = linear_branch(k, v, k_mean, weight, bias, heads=heads, block_k=block_k)
    # Rounded at every step as the author's code is (thu-ml/TurboDiffusion, SLA/utils.py): among
    # blocks whose scores are nearly equal the rounding chooses.
    lut = largest_scores(torch.matmul(q_pooled, branch.k_pooled.transpose(-1, -2)), count)
    operands = quantize(
        q, k, v, heads=heads, norm_q=None, norm_k=None, cos=None, sin=None, kv_lengths=None,
        pv=pv, qmax=qmax, smooth_k=smooth_k, sm_scale=sm_scale, eps=0.0,
    )  # fmt: skip
    tile = tile_for(
        "attention", f"{'fp8' if pv == 'fp8' else '16bit'}_{pad_head(head_dim)}", target
    )
    # A program's rows share a choice of keys, and a step stays within a block of them.
    tile = tile._replace(block_m=min(tile.block_m, block_q), block_n=min(tile.block_n, block_k))
    arguments = attention_arguments(operands, tile, head_dim=head_dim, pv=pv, causal=False)
    for name in ("CAUSAL", "HAS_LENGTHS", "lengths_ptr"):
        del arguments[name]
    if target == ("cuda", 90) and tile.warps == 4 and q.element_size() == 2:
        # Left alone the compiler takes a few more, and two programs share a multiprocessor.
        arguments["maxnreg"] = _THREE_PROGRAMS
    y = torch.empty(batch, n_q, channels, dtype=out_dtype, device=q.device)
    launch(
        sparse_attention_kernel,
        (cdiv(n_q, tile.block_m), heads, batch),
        q.device,
        y_ptr=y,
        lut_ptr=lut,
        features_ptr=q,
        matrix_ptr=branch.matrix,
        total_ptr=branch.total,
        bias_ptr=branch.bias,
        features_stride_b=q.stride(0),
        features_stride_n=q.stride(1),
        q_blocks=lut.shape[2],
        count=count,
        linear_eps=branch.eps,
        BLOCK_Q=block_q,
        BLOCK_K=block_k,
        HAS_BIAS=bias is not None,
        **arguments,
    )
    return y
