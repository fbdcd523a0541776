"""Elements of weights that are compared to notice a write that no version shows.

A kernel reads the elements of all weights through a table of their addresses, in one launch.
Reading them in plain torch takes a view and a copy for each weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from turbo_rcm_patch.ops.dispatch import resolve_impl

#: Elements of a weight that are compared, and the share of a row by which each is further right
#: than the one before, so that they lie in all parts of rows and columns.
SAMPLES: Final = 32
_RIGHT: Final = 0.618
#: Bytes of an element -> an integer of this size, because NaN is unlike itself.
_BITS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def layout(weights: Sequence[Tensor]) -> Any:
    """Return what decides where the elements of weights lie, to be compared."""
    return [(w.data_ptr(), w.stride(), w.shape, w.dtype, w.device) for w in weights]


class Samples:
    """Reads some elements of each of several weights of one dtype on one device.

    Args:
        weights: [Cout, K] each, any strides. They are not held.
        impl: "triton", "reference" or "auto".
    """

    def __init__(self, weights: Sequence[Tensor], impl: str) -> None:
        device = weights[0].device
        self._bits = _BITS[weights[0].element_size()]
        self._places = [_places(weight) for weight in weights]
        self._table: Tensor | None = None  # int64 [weights, 3]: address, last, unit
        if resolve_impl(impl, device) == "triton":
            table = [
                (w.data_ptr(), *place) for w, place in zip(weights, self._places, strict=True)
            ]
            self._table = torch.tensor(table, device=device)

    def read(self, weights: Sequence[Tensor]) -> Tensor:
        """Return the elements [weights, SAMPLES] as integers.

        Args:
            weights: The same, with the same `layout`.
        """
        if self._table is not None:
            from turbo_rcm_patch.ops.int8_linear.samples_triton import samples

            return samples(self._table, self._bits, SAMPLES)
        return torch.cat(list(map(_read, weights, self._places))).view(self._bits)


def _places(weight: Tensor) -> tuple[int, int]:
    """Return (last, unit): the i-th element is i * last // (SAMPLES - 1) * unit behind the first.

    They are spread over a contiguous weight, or over the diagonal of another.
    """
    if weight.is_contiguous():
        rows, columns = weight.shape
        step = (rows * columns - 1) // (SAMPLES - 1)
        if step > columns:
            step -= (step - int(_RIGHT * columns)) % columns
        return (SAMPLES - 1) * step, 1
    return min(weight.shape) - 1, sum(weight.stride())


def _read(weight: Tensor, places: tuple[int, int]) -> Tensor:
    last, unit = places
    if last % (SAMPLES - 1) == 0:
        return weight.as_strided((1, SAMPLES), (1, last // (SAMPLES - 1) * unit))
    at = torch.arange(SAMPLES, device=weight.device) * last // (SAMPLES - 1)
    return weight.diagonal()[at].unsqueeze(0)
