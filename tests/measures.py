"""How far two tensors are apart."""

from __future__ import annotations

from torch import Tensor

__all__ = ["relative_l2"]


def relative_l2(value: Tensor, truth: Tensor) -> float:
    """|value - truth| / |truth| over all elements, in fp64."""
    value, truth = value.detach().double(), truth.detach().double()
    return float((value - truth).norm() / truth.norm())
