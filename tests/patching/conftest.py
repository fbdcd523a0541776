"""Fixtures of the tests of patching."""

from __future__ import annotations

import math

import pytest

from turbo_rcm_patch.patching import linears


@pytest.fixture
def peaked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linears run in int8 also where the norms of q and k make attention peaked."""
    monkeypatch.setattr(linears, "PEAKED", math.inf)
