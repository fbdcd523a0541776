"""Hopper's own kernels where the release of Triton can build them, a warning where it cannot."""

from __future__ import annotations

import warnings

import pytest
import triton
from triton.runtime.errors import OutOfResources, PTXASError

from tests.launches import needs_hopper_kernels
from turbo_rcm_patch.ops.gluon import hopper_module, ran_on_hopper

ERRORS = {
    "assembler": PTXASError("ptxas: no such instruction"),
    "resources": OutOfResources(300000, 232448, "shared memory"),
    "pass": RuntimeError("PassManager::run failed"),
}


@pytest.fixture(autouse=True)
def _hopper() -> None:
    needs_hopper_kernels()


@pytest.mark.parametrize(
    "name",
    [
        "attention.hopper",
        "int8_linear.hopper",
        "sparse_linear.hopper",
        "attention.prologue_hopper",
    ],
)
def test_this_release_has_them(name: str) -> None:
    assert hopper_module(name, name) is not None


def test_an_older_release_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "__version__", "3.5.1")
    with pytest.warns(UserWarning, match=r"3\.5\.1 lacks what a faster older one .* 3\.6"):
        assert hopper_module("attention.hopper", "older one") is None


def test_names_that_are_gone_are_said() -> None:
    with pytest.warns(UserWarning, match="no_such_module"):
        assert hopper_module("no_such_module", "attention") is None


@pytest.mark.parametrize("why", ERRORS)
def test_what_does_not_compile_warns_once_and_runs_on_portable_kernels(why: str) -> None:
    tried = []

    def fails(own: object) -> None:
        tried.append(own)
        raise ERRORS[why]

    with pytest.warns(UserWarning, match=f"cannot compile a faster {why} .* portable"):
        assert not ran_on_hopper("attention.hopper", why, fails)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not ran_on_hopper("attention.hopper", why, fails)
    assert len(tried) == 1
    assert ran_on_hopper("attention.hopper", f"other than {why}", lambda own: None)


def test_a_launch_that_fails_is_no_compiler_error() -> None:
    def fails(own: object) -> None:
        raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory"):
        ran_on_hopper("attention.hopper", "launch", fails)
    assert ran_on_hopper("attention.hopper", "launch", lambda own: None)


def test_kernels_that_do_not_serve_a_call() -> None:
    assert not ran_on_hopper("attention.hopper", "call", lambda own: False)
