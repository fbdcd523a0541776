"""Hopper's own kernels where the release of Triton can build them, a warning where it cannot."""

from __future__ import annotations

import pytest
import triton

from turbo_rcm_patch.kernels.gluon import hopper_module


@pytest.fixture(autouse=True)
def fresh():
    hopper_module.cache_clear()
    yield
    hopper_module.cache_clear()


@pytest.mark.parametrize("name", ["hopper", "hopper_linear", "hopper_linear_blocks"])
def test_this_release_can(name: str) -> None:
    assert hopper_module(name, "attention") is not None


def test_an_older_release_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "__version__", "3.5.1")
    with pytest.warns(UserWarning, match=r"3\.5\.1 lacks what a faster attention .* 3\.6"):
        assert hopper_module("hopper", "attention") is None


def test_names_that_are_gone_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(UserWarning, match="no_such_module"):
        assert hopper_module("no_such_module", "attention") is None
