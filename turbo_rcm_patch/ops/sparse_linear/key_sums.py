"""The results of the linear branch's pass over the keys, which two kernels fill."""

from __future__ import annotations

from typing import NamedTuple

import torch

from turbo_rcm_patch.ops.launch import cdiv


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


def chunks_of(batch_heads: int, k_blocks: int, programs: int) -> tuple[int, int]:
    """Return blocks of keys per chunk, and the number of chunks, for about `programs` programs."""
    blocks = cdiv(k_blocks, max(1, programs // batch_heads))
    return blocks, cdiv(k_blocks, blocks)


def empty_sums(k: torch.Tensor, heads: int, head_pad: int, chunks: int, k_blocks: int) -> KeySums:
    """Allocate the sums over k [B, N, H*D]."""

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(k.shape[0], heads, *shape, head_pad, dtype=dtype, device=k.device)

    return KeySums(empty(chunks, head_pad), empty(chunks), empty(k_blocks, dtype=k.dtype))
