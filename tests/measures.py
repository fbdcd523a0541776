"""How far two tensors are apart, and attention as it is."""

from __future__ import annotations

from torch import Tensor

from turbo_rcm_patch.ops.attention.reference import exact_attention, split_heads

__all__ = ["relative_l2", "truth"]


def relative_l2(value: Tensor, truth: Tensor) -> float:
    """|value - truth| / |truth| over all elements, in fp64."""
    value, truth = value.detach().double(), truth.detach().double()
    return float((value - truth).norm() / truth.norm())


def truth(q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
    """Attention in fp64 of [B, N, H*D] tensors without norm and rotary."""
    scale = (q.shape[-1] // heads) ** -0.5
    qh, kh, vh = (split_heads(x, heads).double() for x in (q, k, v))
    return exact_attention(qh, kh, vh, sm_scale=scale)[0].transpose(1, 2).flatten(2)
