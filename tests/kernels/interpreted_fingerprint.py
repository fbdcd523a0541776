"""Checksums in Triton's interpreter; run by test_interpreter.py. Integers are equal or wrong."""

from __future__ import annotations

import pytest
import torch

from turbo_rcm_patch.kernels.portable import fingerprint as kernel
from turbo_rcm_patch.ops import Fingerprints
from turbo_rcm_patch.ops.fingerprint import CHUNK, _multipliers

pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


def test_constants_are_the_op_s() -> None:
    assert kernel.CHUNK == CHUNK


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_equal_to_the_reference(dtype: torch.dtype) -> None:
    """One chunk, more and less, a tail, and tensors that the kernel has to leave to torch."""
    odd = torch.randn(CHUNK + 3).to(dtype)
    tensors = [
        torch.randn(64, 128).to(dtype),
        torch.randn(100, 136).to(dtype),
        torch.randn(8).to(dtype),
        odd[1:],
        odd[:7],
        torch.randn(32, 48).to(dtype).t(),
        torch.full((16,), float("nan")).to(dtype),
    ]
    ours, theirs = (Fingerprints(tensors, impl) for impl in ("triton", "reference"))
    assert ours._table is not None and ours.counts == theirs.counts
    assert torch.equal(ours.take(), theirs.take())
    tensors[1][70, 5] += 1
    assert torch.equal(ours.take(), theirs.take())


def test_multipliers_differ_and_are_not_zero() -> None:
    found = _multipliers(CHUNK, torch.device("cpu"))
    assert len(found.unique()) == CHUNK and bool((found != 0).all())
