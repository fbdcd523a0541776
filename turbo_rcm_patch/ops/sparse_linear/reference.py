"""Sparse-linear attention in plain torch: exact by its definition, and emulating int8.

Sources: SLA (arXiv 2509.24006) and its inference code in thu-ml/TurboDiffusion, `SLA/core.py`
(arXiv 2512.16093), from which the block map, the feature map and the epsilon are taken. Like
`reference.py` this shares no code with the kernels.
"""

from __future__ import annotations

import itertools
from typing import Final, Literal

import torch
import torch.nn.functional as F

from turbo_rcm_patch.ops.attention.emulation import (
    quantized_q_and_k,
    rounded_v,
    sample_mean,
    softmax_pv,
)
from turbo_rcm_patch.ops.formats import scale_block

#: Elements of the chosen keys that are gathered at a time: 128 MiB in fp32.
_GATHERED: Final = 2**25
#: Added to the denominator of the linear branch by the author's code.
LINEAR_EPS: Final = 1e-5


def _block_means(x: torch.Tensor, block: int) -> torch.Tensor:
    """Average x [B, H, N, D] over blocks of tokens; the last block may be shorter."""
    sums = _blocks_of(x, block).sum(2).view(*x.shape[:2], -1, x.shape[3])
    counts = torch.full((sums.shape[2], 1), block, dtype=x.dtype, device=x.device)
    counts[-1] -= -x.shape[2] % block
    return sums / counts


def block_map(
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    count: int,
    block_q: int,
    block_k: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Choose the `count` blocks of keys that each block of queries sees.

    A score is the product of the mean of a block of q and the mean of a block of k. The mean of
    all of k is subtracted from k first, which shifts all scores of a row by the same number. The
    blocks with the largest scores are taken, and the earlier one of equal scores. Each step is
    rounded to `dtype` as in the author's code, because the rounding decides among blocks whose
    scores are nearly equal.

    Args:
        q: [B, H, Nq, D] fp32 or fp64, normalised and rotated.
        k: [B, H, Nk, D] fp32 or fp64, normalised and rotated.
        count: Blocks of keys per block of queries.
        block_q: Queries in a block.
        block_k: Keys in a block.
        dtype: dtype of the author's code; with that of q, no step is rounded.

    Returns:
        int64 [B, H, ceil(Nq / block_q), count], ascending.
    """

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return x.to(dtype).to(q.dtype)

    smooth = rounded(k - rounded(k.mean(2, keepdim=True)))
    pooled_q, pooled_k = rounded(_block_means(q, block_q)), rounded(_block_means(smooth, block_k))
    scores = rounded(pooled_q @ pooled_k.transpose(-1, -2))
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    return order[..., :count].sort(dim=-1).values


def exact_sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    blocks: torch.Tensor,
    *,
    sm_scale: float,
    block_q: int,
    block_k: int,
) -> torch.Tensor:
    """Compute softmax(sm_scale * q k^T) v over the keys of chosen blocks, in the inputs' dtype.

    Args:
        q: [B, H, Nq, D] fp32 or fp64.
        k: [B, H, Nk, D].
        v: [B, H, Nk, D].
        blocks: int64 [B, H, q blocks, count], the result of `block_map`.
        sm_scale: Factor on the logits.
        block_q: Queries in a block.
        block_k: Keys in a block.

    Returns:
        [B, H, Nq, D].
    """
    n_q, n_kv, dim = q.shape[2], *k.shape[2:]
    rows, chosen = _blocks_of(q, block_q).flatten(0, 1), blocks.flatten(0, 2)
    k, v = _blocks_of(k, block_k), _blocks_of(v, block_k)
    head = torch.arange(len(k), device=q.device).repeat_interleave(blocks.shape[2])
    out = torch.empty_like(rows)
    width = chosen.shape[1] * block_k
    step = max(1, _GATHERED // (width * max(dim, block_q)))
    for start in range(0, len(rows), step):
        here = slice(start, start + step)
        head_index, which = head[here, None], chosen[here]
        logits = rows[here] @ k[head_index, which].flatten(1, 2).mT * sm_scale
        logits.masked_fill_(_keys_of(which, block_k)[:, None] >= n_kv, float("-inf"))
        out[here] = logits.softmax(-1) @ v[head_index, which].flatten(1, 2)
    return out.view(*q.shape[:2], -1, dim)[:, :, :n_q]


def _blocks_of(x: torch.Tensor, block: int) -> torch.Tensor:
    """Cut x [B, H, N, D] into blocks of tokens, [B*H, blocks, block, D], padded with zeros."""
    whole = F.pad(x, (0, 0, 0, -x.shape[2] % block))
    return whole.reshape(x.shape[0] * x.shape[1], -1, block, x.shape[3])


def _keys_of(blocks: torch.Tensor, block_k: int) -> torch.Tensor:
    """Return the indices of the keys in blocks [..., count]; some may lie past the end of k."""
    return (blocks[..., None] * block_k + torch.arange(block_k, device=blocks.device)).flatten(-2)


def linear_branch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Compute proj_l(phi(q) (phi(k)^T v) / (eps + phi(q) · sum phi(k))), phi = channel softmax.

    As in the kernels, the projection is multiplied into the [D, D] matrix, and the division is
    applied to phi(q). All steps are fp32, except that phi and the matrix are rounded to `dtype`
    before their product.

    Args:
        q: [B, H, Nq, D] fp32, normalised and rotated.
        k: [B, H, Nk, D] fp32, normalised and rotated.
        v: [B, H, Nk, D] fp32.
        weight: [D, D].
        bias: [D] or None.
        dtype: dtype of the second product's operands; fp32 leaves them unrounded.

    Returns:
        [B, H, Nq, D] fp32.
    """
    # D / N keeps the sums over tokens near 1, where fp16 has its precision.
    factor = k.shape[3] / k.shape[2]
    phi_q, phi_k = q.softmax(-1), k.softmax(-1).to(dtype).float()
    matrix = (phi_k.transpose(-1, -2) @ v) @ (weight.float() * factor).T
    denominator = (phi_q * phi_k.sum(2, keepdim=True)).sum(-1, keepdim=True) * factor
    phi_q = phi_q / (denominator + LINEAR_EPS * factor)
    if dtype == torch.float16:
        phi_q = phi_q.clamp(max=torch.finfo(dtype).max)
    out = phi_q.to(dtype).float() @ matrix.to(dtype).float()
    return out if bias is None else out + bias.float()


def emulated_sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    blocks: torch.Tensor,
    *,
    sm_scale: float,
    pv: Literal["fp8", "bf16", "fp16"],
    qmax: int,
    smooth_k: bool,
    block_q: int,
    block_k: int,
) -> torch.Tensor:
    """Compute `exact_sparse_attention` with q, k, P and v quantised as in the module `emulation`.

    Args:
        q: [B, H, Nq, D] fp32, normalised and rotated.
        k: [B, H, Nk, D] fp32, normalised and rotated.
        v: [B, H, Nk, D], any float dtype.
        blocks: int64 [B, H, q blocks, count], the result of `block_map`.
        sm_scale: Factor on the logits.
        pv: Element type of P and v.
        qmax: 127 for int8, 7 for int4.
        smooth_k: Subtract k's mean first.
        block_q: Queries in a block.
        block_k: Keys in a block.

    Returns:
        [B, H, Nq, D] fp32.
    """
    n_kv, dim = k.shape[2:]
    group = scale_block(dim)  # keys that share a scale
    step = min(block_k, group)
    if smooth_k:
        k = k - sample_mean(k, None)
    v, v_scale, v_offset = rounded_v(v, pv)
    whole = -(-n_kv // 128) * 128
    k, v = (F.pad(x.float(), (0, 0, 0, whole - n_kv)) for x in (k, v))
    (q_int, q_scale), (k_int, k_scale) = quantized_q_and_k(q, k, qmax, sm_scale)

    out = torch.empty(*q.shape[:3], dim, dtype=torch.float32, device=q.device)
    for b, h, i in itertools.product(*map(range, blocks.shape[:3])):
        rows = slice(i * block_q, (i + 1) * block_q)
        keys = _keys_of(blocks[b, h, i], block_k)
        logits = q_int[b, h, rows] @ k_int[b, h, keys].T
        logits.masked_fill_(keys >= n_kv, float("-inf"))
        scale = q_scale[b, h, rows] * k_scale[b, h, keys[::step] // group]
        out[b, h, rows], _ = softmax_pv(
            logits.view(logits.shape[0], -1, step), scale, v[b, h, keys], pv
        )
    return out if v_scale is None or v_offset is None else out * v_scale + v_offset
