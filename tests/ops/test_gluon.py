"""Hopper's own kernels where the release of Triton can build them, a warning where it cannot."""

from __future__ import annotations

import warnings
from types import ModuleType

import pytest
import triton
from triton.runtime.errors import OutOfResources, PTXASError

from tests.launches import needs_hopper_kernels
from turbo_rcm_patch.ops.attention import api as attention
from turbo_rcm_patch.ops.dispatch import Implementation
from turbo_rcm_patch.ops.gluon import hopper_module, ran
from turbo_rcm_patch.ops.int8_linear import api as int8_linear
from turbo_rcm_patch.ops.launch import Target
from turbo_rcm_patch.ops.sparse_linear import api as sparse_linear

TABLES = (attention.KERNELS, attention.PROLOGUES, int8_linear.KERNELS, sparse_linear.KEY_SUMS)
LOAD = attention.KERNELS[0].load

ERRORS = {
    "assembler": PTXASError("ptxas: no such instruction"),
    "resources": OutOfResources(300000, 232448, "shared memory"),
    "pass": RuntimeError("PassManager::run failed"),
}


@pytest.fixture(autouse=True)
def _hopper() -> None:
    needs_hopper_kernels()


@pytest.mark.parametrize(
    "one",
    [one for *special, _ in TABLES for one in special],
    ids=lambda one: f"{one.what}-{one.name}".replace(" ", "-"),
)
def test_this_release_has_them(one: Implementation) -> None:
    assert hopper_module(one.load, one.what) is not None


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table[0].what.replace(" ", "-"))
def test_the_last_row_of_a_table_serves_every_call(table: tuple[Implementation, ...]) -> None:
    assert table[-1].serves(Target("cuda", 70), None)


def test_an_older_release_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "__version__", "3.5.1")
    with pytest.warns(UserWarning, match=r"3\.5\.1 lacks what a faster older one .* 3\.6"):
        assert hopper_module(LOAD, "older one") is None


def test_names_that_are_gone_are_said() -> None:
    def load() -> ModuleType:
        raise AttributeError("module 'gluon' has no attribute 'barrier'")

    with pytest.warns(UserWarning, match="no attribute 'barrier'"):
        assert hopper_module(load, "attention") is None


@pytest.mark.parametrize("why", ERRORS)
def test_what_does_not_compile_warns_once_and_runs_on_portable_kernels(why: str) -> None:
    tried = []

    def fails(own: object) -> None:
        tried.append(own)
        raise ERRORS[why]

    with pytest.warns(UserWarning, match=f"cannot compile a faster {why} .* portable"):
        assert not ran(LOAD, why, fails)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not ran(LOAD, why, fails)
    assert len(tried) == 1
    assert ran(LOAD, f"other than {why}", lambda own: None)


def test_a_launch_that_fails_is_no_compiler_error() -> None:
    def fails(own: object) -> None:
        raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory"):
        ran(LOAD, "launch", fails)
    assert ran(LOAD, "launch", lambda own: None)
