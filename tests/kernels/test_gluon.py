"""Hopper's own kernels where the release of Triton can build them, a warning where it cannot."""

from __future__ import annotations

import warnings

import pytest
import triton
from triton.runtime.errors import OutOfResources, PTXASError

from tests.launches import needs_hopper_kernels
from turbo_rcm_patch.kernels import gluon
from turbo_rcm_patch.kernels.gluon import hopper_module, ran_on_hopper


@pytest.fixture(autouse=True)
def fresh():
    needs_hopper_kernels()
    hopper_module.cache_clear()
    gluon._failed.clear()
    yield
    hopper_module.cache_clear()
    gluon._failed.clear()


@pytest.mark.parametrize("name", ["attention", "int8_linear", "linear_branch", "prologue"])
def test_this_release_can(name: str) -> None:
    assert hopper_module(name, "attention") is not None


def test_an_older_release_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "__version__", "3.5.1")
    with pytest.warns(UserWarning, match=r"3\.5\.1 lacks what a faster attention .* 3\.6"):
        assert hopper_module("attention", "attention") is None


def test_names_that_are_gone_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(UserWarning, match="no_such_module"):
        assert hopper_module("no_such_module", "attention") is None


@pytest.mark.parametrize(
    "error",
    [
        PTXASError("ptxas: no such instruction"),
        OutOfResources(300000, 232448, "shared memory"),
        RuntimeError("PassManager::run failed"),
    ],
    ids=["assembler", "resources", "pass"],
)
def test_what_does_not_compile_warns_once_and_runs_on_portable_kernels(error: Exception) -> None:
    tried = []

    def fails(own: object) -> None:
        tried.append(own)
        raise error

    with pytest.warns(UserWarning, match=r"cannot compile a faster attention .* portable"):
        assert not ran_on_hopper("attention", "attention", fails)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not ran_on_hopper("attention", "attention", fails)
    assert len(tried) == 1
    assert ran_on_hopper("int8_linear", "int8 linear", lambda own: None), "others still run"


def test_a_launch_that_fails_is_no_compiler_error() -> None:
    def fails(own: object) -> None:
        raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory"):
        ran_on_hopper("attention", "attention", fails)
    assert ran_on_hopper("attention", "attention", lambda own: None)


def test_kernels_that_do_not_serve_a_call() -> None:
    assert not ran_on_hopper("attention", "attention", lambda own: False)
