"""What the linear branch knows of the keys: one matrix per head, projected, and one sum; and, from
the same pass over them, what the block map knows."""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from turbo_rcm_patch.kernels.gluon import ran_on_hopper
from turbo_rcm_patch.kernels.launch import LENGTHS, cdiv, launch, pad_head, target_of

__all__ = [
    "KeySums",
    "LinearBranch",
    "chunks_of",
    "empty_sums",
    "key_value_kernel",
    "linear_branch",
]

#: Programs of `key_value_kernel`: twice the multiprocessors of a large GPU.
_PROGRAMS = 264
#: Keys that a program reads at a time.
_STEP = 64
#: Added to the denominator by the author's code (thu-ml/TurboDiffusion, SLA/core.py).
_EPS = 1e-5

_LOG2_E = tl.constexpr(1.4426950408889634)


class KeySums(NamedTuple):
    """What one pass over the keys gives, the first two by chunks of them.

    matrix [B, H, chunks, HEAD_PAD, HEAD_PAD] fp32 is phi(k)^T v, total [B, H, chunks, HEAD_PAD]
    fp32 the sum of phi(k); k_pooled [B, H, k_blocks, HEAD_PAD], in the dtype of k, the means of
    blocks of k less its mean, 0 in padded channels.
    """

    matrix: torch.Tensor
    total: torch.Tensor
    k_pooled: torch.Tensor


class LinearBranch(NamedTuple):
    """phi(q) @ matrix / (phi(q) · total + eps) + bias is the branch with its projection.

    matrix [B, H, HEAD_PAD, HEAD_PAD] in the dtype of k, total [B, H, HEAD_PAD] fp32, bias
    [HEAD_PAD] fp32 or None, eps; k_pooled as in `KeySums`, for the block map.
    """

    matrix: torch.Tensor
    total: torch.Tensor
    bias: torch.Tensor | None
    eps: float
    k_pooled: torch.Tensor


@triton.jit
def _softmax_features(x, offs_d, HEAD_DIM: tl.constexpr):
    """phi(x): softmax of x [T, HEAD_PAD] fp32 over the channels of its head; 0 in the others."""
    x = tl.where((offs_d < HEAD_DIM)[None, :], x, float("-inf"))
    e = tl.exp2((x - tl.max(x, axis=1)[:, None]) * _LOG2_E)
    return e / tl.sum(e, axis=1)[:, None]


@triton.jit
def _by_rows(x, STEP: tl.constexpr, ROWS: tl.constexpr, HEAD_PAD: tl.constexpr):
    """Sums [ROWS, HEAD_PAD] of every ROWS-th of x [STEP, HEAD_PAD]: those a thread has itself,
    which need no exchange."""
    return tl.sum(tl.reshape(x, [STEP // ROWS, ROWS, HEAD_PAD]), axis=0)


@triton.jit(do_not_specialize=LENGTHS)
def key_value_kernel(
    matrix_ptr, total_ptr, k_pooled_ptr, k_ptr, v_ptr, k_mean_ptr,
    k_stride_b, k_stride_n, v_stride_b, v_stride_n, n_kv, k_blocks, blocks_a_chunk, chunks, heads,
    HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, BLOCK_K: tl.constexpr, STEP: tl.constexpr,
    ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """phi(k)^T v and the sum of phi(k) over a chunk of keys, and k's means over its blocks.

    Grid: (chunks, heads, batch). k, v [B, N, H*D]; k_mean [B, H, HEAD_PAD], in the dtype of k, to
    which k is rounded again without it; what is written as in `KeySums`.
    """
    chunk, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    bh = b.to(tl.int64) * heads + h
    offs_d = tl.arange(0, HEAD_PAD)
    offs_c = (h * HEAD_DIM + offs_d)[None, :]
    k_rows = k_ptr + b.to(tl.int64) * k_stride_b + offs_c
    v_rows = v_ptr + b.to(tl.int64) * v_stride_b + offs_c
    mean = tl.load(k_mean_ptr + bh * HEAD_PAD + offs_d).to(tl.float32)[None, :]
    matrix = tl.zeros([HEAD_PAD, HEAD_PAD], tl.float32)
    total = tl.zeros([ROWS, HEAD_PAD], tl.float32)
    first = chunk * blocks_a_chunk
    for block in tl.range(first, tl.minimum(first + blocks_a_chunk, k_blocks)):
        pooled = tl.zeros([ROWS, HEAD_PAD], tl.float32)
        for step in tl.static_range(BLOCK_K // STEP):
            offs_t = block * BLOCK_K + step * STEP + tl.arange(0, STEP)
            mask_t = (offs_t < n_kv)[:, None]
            mask = mask_t & (offs_d < HEAD_DIM)[None, :]
            tokens = offs_t.to(tl.int64)[:, None]
            k = tl.load(k_rows + tokens * k_stride_n, mask=mask, other=0.0)
            v = tl.load(v_rows + tokens * v_stride_n, mask=mask, other=0.0)
            smooth = (k.to(tl.float32) - mean).to(k.dtype).to(tl.float32)
            pooled += _by_rows(tl.where(mask_t, smooth, 0.0), STEP, ROWS, HEAD_PAD)
            phi = _softmax_features(k.to(tl.float32), offs_d, HEAD_DIM)
            phi = tl.where(mask_t, phi, 0.0).to(v.dtype)
            matrix = tl.dot(tl.trans(phi), v, matrix, input_precision=PRECISION)
            total += _by_rows(phi.to(tl.float32), STEP, ROWS, HEAD_PAD)
        count = tl.minimum(BLOCK_K, n_kv - block * BLOCK_K)
        out = k_pooled_ptr + (bh * k_blocks + block) * HEAD_PAD + offs_d
        tl.store(out, (tl.sum(pooled, axis=0) / count).to(k_ptr.dtype.element_ty))
    place = bh * chunks + chunk
    tl.store(total_ptr + place * HEAD_PAD + offs_d, tl.sum(total, axis=0))
    tl.store(
        matrix_ptr + place * HEAD_PAD * HEAD_PAD + offs_d[:, None] * HEAD_PAD + offs_d[None, :],
        matrix,
    )


def chunks_of(batch_heads: int, k_blocks: int, programs: int) -> tuple[int, int]:
    """Blocks of keys of a chunk, and chunks, for about so many programs."""
    blocks = cdiv(k_blocks, max(1, programs // batch_heads))
    return blocks, cdiv(k_blocks, blocks)


def _key_sums(
    k: torch.Tensor, v: torch.Tensor, k_mean: torch.Tensor, *, heads: int, block_k: int
) -> KeySums:
    """One pass over k and v [B, N, H*D] with contiguous channels."""
    target = target_of(k.device)
    hopper = target.backend == "cuda" and target.arch == 90
    made: list[KeySums] = []

    def on_hopper(own: ModuleType) -> bool:
        if not own.serves(k, v, heads=heads, block_k=block_k):
            return False
        made.append(own.hopper_key_sums(k, v, k_mean, heads=heads, block_k=block_k))
        return True

    if hopper and ran_on_hopper("hopper_key_value", "linear branch", on_hopper):
        return made[0]
    batch, n_kv, channels = k.shape
    head_dim = channels // heads
    head_pad, k_blocks = pad_head(head_dim), cdiv(n_kv, block_k)
    blocks_a_chunk, chunks = chunks_of(batch * heads, k_blocks, _PROGRAMS)
    sums = empty_sums(k, heads, head_pad, chunks, k_blocks)
    # 4-byte tiles beside a [D, D] sum leave room for half as many, and for one at a time.
    wide = k.element_size() > 2 and head_pad > 64
    step = min(_STEP // 2 if wide else _STEP, block_k)
    launch(
        key_value_kernel,
        (chunks, heads, batch),
        k.device,
        matrix_ptr=sums.matrix,
        total_ptr=sums.total,
        k_pooled_ptr=sums.k_pooled,
        k_ptr=k,
        v_ptr=v,
        k_mean_ptr=k_mean,
        k_stride_b=k.stride(0),
        k_stride_n=k.stride(1),
        v_stride_b=v.stride(0),
        v_stride_n=v.stride(1),
        n_kv=n_kv,
        k_blocks=k_blocks,
        blocks_a_chunk=blocks_a_chunk,
        chunks=chunks,
        heads=heads,
        HEAD_DIM=head_dim,
        HEAD_PAD=head_pad,
        BLOCK_K=block_k,
        STEP=step,
        ROWS=16,
        # On Hopper fp32 in three parts spills little; elsewhere more than as it is.
        PRECISION="tf32x3" if hopper else "ieee",
        num_warps=8 if head_pad > 64 else 4,
        num_stages=1 if wide else 2,
    )
    return sums


def empty_sums(k: torch.Tensor, heads: int, head_pad: int, chunks: int, k_blocks: int) -> KeySums:
    """Room for the sums over k [B, N, H*D]."""

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(k.shape[0], heads, *shape, head_pad, dtype=dtype, device=k.device)

    return KeySums(empty(chunks, head_pad), empty(chunks), empty(k_blocks, dtype=k.dtype))


def linear_branch(
    k: torch.Tensor,
    v: torch.Tensor,
    k_mean: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    heads: int,
    block_k: int,
) -> LinearBranch:
    """k and v [B, N, H*D] with contiguous channels, k_mean [B, H, HEAD_PAD] in the dtype of k;
    weight [D, D], bias [D]."""
    n_kv, head_dim = k.shape[1], k.shape[2] // heads
    head_pad = pad_head(head_dim)
    matrix, total, k_pooled = _key_sums(k, v, k_mean, heads=heads, block_k=block_k)
    # D / N keeps the sums over tokens near 1, where fp16 has its precision. The projection is
    # linear, so it goes into the matrix: the branch is one product in the attention's epilogue.
    factor = head_dim / n_kv
    own = _padded(weight.float(), head_pad) * factor
    projected = torch.matmul(matrix.sum(2), own.T).to(v.dtype)
    if bias is not None:
        bias = _padded(bias.float(), head_pad).contiguous()
    return LinearBranch(projected, total.sum(2) * factor, bias, _EPS * factor, k_pooled)


def _padded(x: torch.Tensor, head_pad: int) -> torch.Tensor:
    """x [D] or [D, D] with zeros to HEAD_PAD."""
    missing = head_pad - x.shape[-1]
    return torch.nn.functional.pad(x, (0, missing) * x.dim()) if missing else x
