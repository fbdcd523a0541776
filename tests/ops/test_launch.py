"""Views whose strides pass what kernels compute in 32 bits are copied before a launch. On meta
tensors, which have such strides without the memory."""

from __future__ import annotations

import pytest
import torch

from turbo_rcm_patch.ops.launch import coefficient
from turbo_rcm_patch.ops.residual.triton import broadcast


def far(shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(2**40, device="meta").as_strided(shape, strides)


@pytest.mark.parametrize(("apart", "copied"), [(2**31 // 63 + 1, True), (2**24, False)])
def test_channels_that_lie_far_apart_are_copied(apart: int, copied: bool) -> None:
    shape = torch.Size((2, 3, 64))
    value = far((1, 1, 64), (0, 0, apart))
    of_skip, kind = coefficient(value, shape)
    assert of_skip.strides == (0, 0, 1 if copied else apart)
    own, strides = broadcast(value, shape)
    assert (own is not value) == copied
    assert strides[2] == own.stride(2) == (1 if copied else apart)
