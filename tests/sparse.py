"""What tests of sparse-linear attention share: weights of its linear branch, and the blocks of
keys that the kernels choose."""

from __future__ import annotations

import torch

from tests.inputs import attention_inputs
from turbo_rcm_patch.ops import Sparsity
from turbo_rcm_patch.ops.attention.reference import split_heads
from turbo_rcm_patch.ops.sparse_linear.reference import block_map

__all__ = ["ELSEWHERE", "FLOOR", "HOPPER", "chosen_blocks", "proj_l"]


HOPPER, ELSEWHERE = {"block_q": 64, "block_k": 128}, {"block_q": 128, "block_k": 64}
#: int8 q and k with 16-bit or e4m3 P and v against exact mathematics, N(0, 1).
FLOOR = {"bf16": 0.02, "fp8": 0.05}


def proj_l(dim: int, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """Random: the author's starts at zero, which would hide the linear branch."""
    weight = torch.randn(dim, dim, device=device) * dim**-0.5
    return weight, torch.randn(dim, device=device)


def chosen_blocks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, sparsity: Sparsity
) -> torch.Tensor:
    """The kernels' block map, after comparing it with the reference's."""
    from turbo_rcm_patch.ops.sparse_linear.api import launch_key_sums
    from turbo_rcm_patch.ops.sparse_linear.triton import largest_scores, prepare_tokens

    geometry = {"block_q": sparsity.block_q, "block_k": sparsity.block_k}
    count = sparsity.count(k.shape[1])
    inputs = attention_inputs(q, k, v, heads=heads)
    _, _, q_pooled, k_sums = prepare_tokens(inputs, sparsity.block_q)
    k_mean = (k_sums.sum(1) / k.shape[1]).to(k.dtype)
    sums = launch_key_sums(k, v, k_mean, heads=heads, block_k=sparsity.block_k)
    chosen = largest_scores(q_pooled @ sums.k_pooled.transpose(-1, -2), count)
    qh, kh = (split_heads(x, heads).float() for x in (q, k))
    expected = block_map(qh, kh, count=count, dtype=q.dtype, **geometry)
    assert (chosen[..., 1:] > chosen[..., :-1]).all()
    differing = (chosen != expected).any(-1).double().mean()
    assert differing < 0.1, f"{differing:.1%} of the blocks of queries"
    return chosen.long()
