"""Poisoned memory: what nobody wrote is NaN, so that reading it cannot go unnoticed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

__all__ = ["filled", "poisoned_memory"]


@torch.no_grad()
def filled(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, filled with what stands out in its dtype. It may be a leaf that requires a
    gradient: torch's checkpoints make such ones."""
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return tensor.fill_(float("nan"))
    if tensor.dtype == torch.int8:
        return tensor.fill_(-128)
    return tensor.fill_(torch.iinfo(tensor.dtype).max) if tensor.dtype != torch.bool else tensor


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Inside, uninitialised memory is NaN (int8: -128)."""

    def poisoning(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def empty(*args: object, **kwargs: object) -> torch.Tensor:
            return filled(make(*args, **kwargs))

        return empty

    names = [(torch, "empty"), (torch, "empty_like"), (torch, "empty_strided")]
    places = [*names, (torch.Tensor, "new_empty")]
    real = [getattr(owner, name) for owner, name in places]
    try:
        for (owner, name), make in zip(places, real, strict=True):
            setattr(owner, name, poisoning(make))
        yield
    finally:
        for (owner, name), make in zip(places, real, strict=True):
            setattr(owner, name, make)
