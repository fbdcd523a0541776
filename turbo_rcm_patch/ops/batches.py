"""Batches that are longer than a grid of programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar, cast

import torch
from torch import Tensor

#: Samples of one launch: CUDA's grids have at most so many programs in their second and third
#: dimension, which are the batch's.
MAX_BATCH: Final = 65535

R = TypeVar("R", Tensor, tuple[Tensor, ...])
T = TypeVar("T")


def of_batch(value: T, part: slice, batch: int) -> T:
    """The samples `part` of a tensor whose first dimension is the batch, of a coefficient [B] or
    [B, ...], or of each tensor of a sequence; anything else as it is."""
    if isinstance(value, Tensor):
        return cast("T", value[part] if value.dim() and value.shape[0] == batch else value)
    if isinstance(value, list | tuple):
        return cast("T", type(value)(of_batch(v, part, batch) for v in value))
    return value


def in_parts(batch: int, run: Callable[[slice], R]) -> R:
    """Run an operation for at most `MAX_BATCH` samples at a time, and put the results together."""
    parts = [run(slice(start, start + MAX_BATCH)) for start in range(0, batch, MAX_BATCH)]
    if isinstance(parts[0], Tensor):
        return torch.cat(parts)
    several = zip(*parts, strict=True)
    return cast("R", tuple(torch.cat(one) for one in several))
