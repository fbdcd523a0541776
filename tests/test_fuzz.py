"""The fuzz finds nothing, and finds a planted fault."""

from __future__ import annotations

import pytest
import torch

from tools import fuzz


@pytest.mark.parametrize(("kind", "cases"), [("operations", 200), ("models", 12)])
def test_a_slice_of_the_fuzz_finds_nothing(kind: str, cases: int) -> None:
    with torch.no_grad():
        said = [fuzz.run_case(7, case, kind) for case in range(cases)]
    assert not list(filter(None, said))


def test_the_fuzz_finds_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    right = fuzz.ops.skip
    monkeypatch.setattr(fuzz.ops, "skip", lambda x, y, a, b: right(x, y, b, a))
    said = [fuzz.run_case(7, case, "operations") for case in range(60)]
    assert any(": skip " in words and "relative error" in words for words in said)
