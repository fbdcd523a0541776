"""The results of the linear branch's pass over the keys, which two kernels fill."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from turbo_rcm_patch.ops.launch import cdiv, strides


class KeySums(NamedTuple):
    """The results of one pass over the keys.

    Attributes:
        matrix: phi(k)^T v by chunks of keys, fp32 [B, H, chunks, HEAD_PAD, HEAD_PAD].
        total: Sum of phi(k) by chunks of keys, fp32 [B, H, chunks, HEAD_PAD].
        k_pooled: Means of blocks of k less the mean of k, [B, H, k_blocks, HEAD_PAD] in the dtype
            of k, 0 in padded channels.
    """

    matrix: torch.Tensor
    total: torch.Tensor
    k_pooled: torch.Tensor


class KeyOperands(NamedTuple):
    """The operands of the pass.

    Attributes:
        k_ptr: [B, N, H*D] with contiguous channels.
        v_ptr: The same.
        k_mean_ptr: [B, H, HEAD_PAD] in the dtype of k.
        k_strides: Strides of batch and tokens.
        v_strides: Strides of batch and tokens.
    """

    k_ptr: torch.Tensor
    v_ptr: torch.Tensor
    k_mean_ptr: torch.Tensor
    k_strides: tuple[int, int]
    v_strides: tuple[int, int]


def key_pass(
    k: torch.Tensor,
    v: torch.Tensor,
    k_mean: torch.Tensor,
    *,
    heads: int,
    head_pad: int,
    block_k: int,
    programs: int,
) -> tuple[KeySums, tuple[int, int, int], dict[str, Any]]:
    """Describe a pass over keys and values, in about `programs` programs.

    Returns:
        Its results, and the grid and the arguments that every kernel takes.
    """
    batch, n_kv, _ = k.shape
    k_blocks = cdiv(n_kv, block_k)
    blocks_a_chunk = cdiv(k_blocks, max(1, programs // (batch * heads)))
    chunks = cdiv(k_blocks, blocks_a_chunk)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(batch, heads, *shape, head_pad, dtype=dtype, device=k.device)

    sums = KeySums(empty(chunks, head_pad), empty(chunks), empty(k_blocks, dtype=k.dtype))
    arguments = {
        "sums": sums,
        "keys": KeyOperands(k, v, k_mean, strides(k), strides(v)),
        "n_kv": n_kv,
        "k_blocks": k_blocks,
        "blocks_a_chunk": blocks_a_chunk,
        "chunks": chunks,
        "heads": heads,
    }
    return sums, (chunks, heads, batch), arguments
