"""What GPU tests share."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from turbo_rcm_patch.ops import resolve_pv


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Normal values on the GPU, rounded to `dtype`."""
    return torch.randn(*shape, device="cuda").to(dtype)


def has_fp8() -> bool:
    return resolve_pv("auto", torch.device("cuda", 0)) == "fp8"


def skip_without(pv: str) -> None:
    """Skip a test of e4m3 p and v on a card that cannot multiply them."""
    if pv == "fp8" and not has_fp8():
        pytest.skip("this GPU has no e4m3 matrix units")
