"""What the linear branch knows of the keys: one matrix per head, projected, and one sum."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from turbo_rcm_patch.kernels.launch import launch, pad_head, target_of

__all__ = ["LinearBranch", "key_value_kernel", "linear_branch"]

#: Programs of `key_value_kernel`: twice the multiprocessors of a large GPU.
_PROGRAMS = 264
#: Keys that a program reads at a time.
_STEP = 64
#: Added to the denominator by the author's code (thu-ml/TurboDiffusion, SLA/core.py).
_EPS = 1e-5

_LOG2_E = tl.constexpr(1.4426950408889634)


class LinearBranch(NamedTuple):
    """phi(q) @ matrix / (phi(q) · total + eps) + bias is the branch with its projection.

    matrix [B, H, HEAD_PAD, HEAD_PAD] in the dtype of k, total [B, H, HEAD_PAD] fp32, bias
    [HEAD_PAD] fp32 or None, eps. k_mean [B, H, HEAD_PAD], in the dtype of k, is the mean of k over
    its tokens, which the block map takes out.
    """

    matrix: torch.Tensor
    total: torch.Tensor
    bias: torch.Tensor | None
    eps: float
    k_mean: torch.Tensor


@triton.jit
def _softmax_features(x, offs_d, HEAD_DIM: tl.constexpr):
    """phi(x): softmax of x [T, HEAD_PAD] fp32 over the channels of its head; 0 in the others."""
    x = tl.where((offs_d < HEAD_DIM)[None, :], x, float("-inf"))
    e = tl.exp2((x - tl.max(x, axis=1)[:, None]) * _LOG2_E)
    return e / tl.sum(e, axis=1)[:, None]


@triton.jit
def key_value_kernel(
    matrix_ptr, total_ptr, k_total_ptr, k_ptr, v_ptr,
    k_stride_b, k_stride_n, v_stride_b, v_stride_n, n_kv, steps_a_chunk, chunks, heads,
    HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """phi(k)^T v, the sum of phi(k) and the sum of k over a chunk of keys.

    Grid: (chunks, heads, batch). k, v [B, N, H*D]; matrix [B, H, chunks, HEAD_PAD, HEAD_PAD]
    fp32 (channels of k, then of v), total and k_total [B, H, chunks, HEAD_PAD] fp32.
    """
    chunk, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    bh = b.to(tl.int64) * heads + h
    offs_d = tl.arange(0, HEAD_PAD)
    offs_c = (h * HEAD_DIM + offs_d)[None, :]
    k_rows = k_ptr + b.to(tl.int64) * k_stride_b + offs_c
    v_rows = v_ptr + b.to(tl.int64) * v_stride_b + offs_c
    matrix = tl.zeros([HEAD_PAD, HEAD_PAD], tl.float32)
    total = tl.zeros([HEAD_PAD], tl.float32)
    k_total = tl.zeros([HEAD_PAD], tl.float32)
    first = chunk * steps_a_chunk * STEP
    for start in tl.range(first, tl.minimum(first + steps_a_chunk * STEP, n_kv), STEP):
        offs_t = start + tl.arange(0, STEP)
        mask_t = offs_t < n_kv
        mask = mask_t[:, None] & (offs_d < HEAD_DIM)[None, :]
        tokens = offs_t.to(tl.int64)[:, None]
        k = tl.load(k_rows + tokens * k_stride_n, mask=mask, other=0.0).to(tl.float32)
        v = tl.load(v_rows + tokens * v_stride_n, mask=mask, other=0.0)
        k_total += tl.sum(k, axis=0)
        phi = tl.where(mask_t[:, None], _softmax_features(k, offs_d, HEAD_DIM), 0.0).to(v.dtype)
        matrix = tl.dot(tl.trans(phi), v, matrix, input_precision="ieee")
        total += tl.sum(phi.to(tl.float32), axis=0)
    place = bh * chunks + chunk
    tl.store(total_ptr + place * HEAD_PAD + offs_d, total)
    tl.store(k_total_ptr + place * HEAD_PAD + offs_d, k_total)
    tl.store(
        matrix_ptr + place * HEAD_PAD * HEAD_PAD + offs_d[:, None] * HEAD_PAD + offs_d[None, :],
        matrix,
    )


def linear_branch(
    k: torch.Tensor,
    v: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    heads: int,
) -> LinearBranch:
    """One pass over k and v [B, N, H*D] with contiguous channels; weight [D, D], bias [D]."""
    batch, n_kv, channels = k.shape
    head_dim = channels // heads
    head_pad, steps = pad_head(head_dim), triton.cdiv(n_kv, _STEP)
    steps_a_chunk = triton.cdiv(steps, max(1, _PROGRAMS // (batch * heads)))
    chunks = triton.cdiv(steps, steps_a_chunk)

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(batch, heads, chunks, *shape, dtype=torch.float32, device=k.device)

    matrix, total, k_total = empty(head_pad, head_pad), empty(head_pad), empty(head_pad)
    launch(
        key_value_kernel,
        (chunks, heads, batch),
        k.device,
        matrix_ptr=matrix,
        total_ptr=total,
        k_total_ptr=k_total,
        k_ptr=k,
        v_ptr=v,
        k_stride_b=k.stride(0),
        k_stride_n=k.stride(1),
        v_stride_b=v.stride(0),
        v_stride_n=v.stride(1),
        n_kv=n_kv,
        steps_a_chunk=steps_a_chunk,
        chunks=chunks,
        heads=heads,
        HEAD_DIM=head_dim,
        HEAD_PAD=head_pad,
        STEP=_STEP,
        num_warps=8 if head_pad > 64 else 4,
        num_stages=3 if target_of(k.device).descriptors else 2,
    )
    # D / N keeps the sums over tokens near 1, where fp16 has its precision. The projection is
    # linear, so it goes into the matrix: the branch is one product in the attention's epilogue.
    factor = head_dim / n_kv
    own = _padded(weight.float(), head_pad) * factor
    projected = torch.matmul(matrix.sum(2), own.T).to(v.dtype)
    if bias is not None:
        bias = _padded(bias.float(), head_pad).contiguous()
    k_mean = (k_total.sum(2) / n_kv).to(k.dtype)
    return LinearBranch(projected, total.sum(2) * factor, bias, _EPS * factor, k_mean)


def _padded(x: torch.Tensor, head_pad: int) -> torch.Tensor:
    """x [D] or [D, D] with zeros to HEAD_PAD."""
    missing = head_pad - x.shape[-1]
    return torch.nn.functional.pad(x, (0, missing) * x.dim()) if missing else x
