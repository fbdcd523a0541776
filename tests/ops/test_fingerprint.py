"""Checksums of tensors: what they see. Integers are equal or wrong."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.implementations import Implementation, over
from turbo_rcm_patch.kernels.portable import fingerprint as kernel
from turbo_rcm_patch.ops import Fingerprints
from turbo_rcm_patch.ops.fingerprint import CHUNK, _multipliers

pytestmark = pytest.mark.usefixtures("poisoned")

FLOATS = [torch.float32, torch.float16, torch.bfloat16]


def exchange(weight: torch.Tensor, *indices: tuple[tuple[int, int], tuple[int, int]]) -> None:
    for a, b in indices:
        weight[a], weight[b] = weight[b].clone(), weight[a].clone()


CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "one value": lambda w: w[3, 5].mul_(1.01),
    "the last value": lambda w: w[-1, -1].neg_(),
    "a sign": lambda w: w[0, 0].neg_(),
    "every sign": lambda w: w.neg_(),
    "two values of a row": lambda w: exchange(w, ((2, 3), (2, 9))),
    "two values of a word": lambda w: exchange(w, ((2, 4), (2, 5))),
    "two values of a column": lambda w: exchange(w, ((2, 3), (90, 3))),
    "two rows": lambda w: w.copy_(w[[1, 0, *range(2, len(w))]]),
    "all rows": lambda w: w.copy_(w.roll(1, 0)),
    "all columns": lambda w: w.copy_(w.roll(1, 1)),
    "whole chunks": lambda w: w.copy_(w.flatten().roll(2 * CHUNK).view_as(w)),
    "zero": lambda w: w.zero_(),
    "NaN": lambda w: w[5, 5].fill_(float("nan")),
    # A rectangle: every row and every column keeps its sum.
    "a rectangle": lambda w: (
        w[0, 0].add_(1.0), w[0, 2].sub_(1.0), w[4, 0].sub_(1.0), w[4, 2].add_(1.0)
    ),
}  # fmt: skip


SEEN = {"dtype": [torch.bfloat16, torch.float32], "change": CHANGES}


@over(reference=SEEN, gpu=SEEN)
def test_a_change_is_seen(on: Implementation, dtype: torch.dtype, change: str) -> None:
    weight = torch.randint(1, 200, (128, 256)).to(on.device, dtype)  # so that sums are exact
    other = on.randn(16)
    prints = Fingerprints([other, weight], on.impl)
    before = prints.take()
    assert torch.equal(prints.take(), before)
    CHANGES[change](weight)
    after = prints.take()
    assert not torch.equal(after, before)
    assert after[0] == before[0]


@over(interpreter={"dtype": FLOATS}, gpu={"dtype": FLOATS})
def test_the_kernel_s_checksum_is_that_of_the_reference(
    on: Implementation, dtype: torch.dtype
) -> None:
    """One chunk, more and less, a tail, and tensors that the kernel has to leave to torch."""
    odd = on.randn(CHUNK + 3, dtype=dtype)
    tensors = [
        on.randn(64, 128, dtype=dtype),
        on.randn(100, 136, dtype=dtype),
        on.randn(8, dtype=dtype),
        odd[1:],
        odd[:7],
        on.randn(32, 48, dtype=dtype).t(),
        torch.full((16,), float("nan"), device=on.device).to(dtype),
    ]
    ours, theirs = (Fingerprints(tensors, impl) for impl in (on.impl, "reference"))
    assert ours._table is not None and ours.counts == theirs.counts
    assert torch.equal(ours.take(), theirs.take())
    tensors[1][70, 5] += 1
    assert torch.equal(ours.take(), theirs.take())


def test_kernel_and_reference_have_chunks_of_one_size() -> None:
    assert kernel.CHUNK == CHUNK


def test_multipliers_differ_and_are_not_zero() -> None:
    found = _multipliers(CHUNK, torch.device("cpu"))
    assert len(found.unique()) == CHUNK and bool((found != 0).all())


@given(st.integers(0, 2**31), st.integers(0, 2**31), st.integers(1, 2**16))
def test_any_two_values_that_were_exchanged_are_seen(a: int, b: int, bits: int) -> None:
    weight = torch.zeros(2 * CHUNK, dtype=torch.int32)
    weight[a % weight.numel()] = bits
    weight[b % weight.numel()] = -bits
    prints = Fingerprints([weight])
    before, held = prints.take(), weight.clone()
    weight[a % weight.numel()], weight[b % weight.numel()] = (
        held[b % weight.numel()], held[a % weight.numel()],
    )  # fmt: skip
    assert torch.equal(prints.take(), before) == torch.equal(weight, held)


def test_checksums_keep_no_tensor_alive() -> None:
    weight = torch.randn(16)
    prints, alive = Fingerprints([weight]), weakref.ref(weight)
    prints.take()
    del weight
    assert alive() is None


def test_a_change_is_seen_at_odd_sizes_and_strides() -> None:
    base = torch.randn(9, 7).to(torch.bfloat16)
    tensors = [base, base.t(), base[1:, 1:], base[0, :0]]
    prints = Fingerprints(tensors)
    before = prints.take()
    assert len(before) == sum(prints.counts) == 4
    base[8, 6] += 1
    assert (prints.take() != before).tolist() == [True, True, True, False]
