"""Checksums of tensors: what they see."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from turbo_rcm_patch.ops import Fingerprints
from turbo_rcm_patch.ops.fingerprint import CHUNK


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", CHANGES)
def test_sees(name: str, dtype: torch.dtype) -> None:
    weight = torch.randint(1, 200, (128, 256)).to(dtype)  # so that sums are exact
    other = torch.randn(16)
    prints = Fingerprints([other, weight])
    before = prints.take()
    assert torch.equal(prints.take(), before)
    CHANGES[name](weight)
    after = prints.take()
    assert not torch.equal(after, before)
    assert after[0] == before[0]


@given(st.integers(0, 2**31), st.integers(0, 2**31), st.integers(1, 2**16))
def test_sees_any_two_values_that_were_exchanged(a: int, b: int, bits: int) -> None:
    weight = torch.zeros(2 * CHUNK, dtype=torch.int32)
    weight[a % weight.numel()] = bits
    weight[b % weight.numel()] = -bits
    prints = Fingerprints([weight])
    before, held = prints.take(), weight.clone()
    weight[a % weight.numel()], weight[b % weight.numel()] = (
        held[b % weight.numel()], held[a % weight.numel()],
    )  # fmt: skip
    assert torch.equal(prints.take(), before) == torch.equal(weight, held)


def test_holds_no_tensor() -> None:
    weight = torch.randn(16)
    prints, alive = Fingerprints([weight]), weakref.ref(weight)
    prints.take()
    del weight
    assert alive() is None


def test_odd_sizes_and_strides() -> None:
    base = torch.randn(9, 7).to(torch.bfloat16)
    tensors = [base, base.t(), base[1:, 1:], base[0, :0]]
    prints = Fingerprints(tensors)
    before = prints.take()
    assert len(before) == sum(prints.counts) == 4
    base[8, 6] += 1
    assert (prints.take() != before).tolist() == [True, True, True, False]
