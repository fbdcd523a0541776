"""Hopper's own kernels where the release of Triton can build them, a warning where it cannot."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
from triton.runtime.errors import OutOfResources, PTXASError

from tests.launches import needs_hopper_kernels
from turbo_rcm_patch.ops import launch
from turbo_rcm_patch.ops.attention import api as attention
from turbo_rcm_patch.ops.conv3d import api as conv3d
from turbo_rcm_patch.ops.dispatch import Implementation, always, choose
from turbo_rcm_patch.ops.gluon import hopper_function
from turbo_rcm_patch.ops.int8_linear import api as int8_linear
from turbo_rcm_patch.ops.launch import Target
from turbo_rcm_patch.ops.sparse_linear import api as sparse_linear

TABLES: tuple[tuple[Implementation[Any], ...], ...] = (
    attention.KERNELS,
    attention.PROLOGUE_KERNELS,
    int8_linear.KERNELS,
    sparse_linear.KERNELS,
    conv3d.KERNELS,
)

ERRORS = {
    "assembler": PTXASError("ptxas: no such instruction"),
    "resources": OutOfResources(300000, 232448, "shared memory"),
    "pass": RuntimeError("PassManager::run failed"),
}


@pytest.fixture(autouse=True)
def _hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    needs_hopper_kernels()
    monkeypatch.setattr(launch, "target_of", lambda device: Target("cuda", 90))


def run(load: Callable[[], Callable[[int], int]], what: str) -> tuple[int, Counter[str]]:
    """Run a function beside a portable one that adds 1, and count which of them ran."""
    table = (
        Implementation("special", always, "always", load, what),
        Implementation("portable", always, "always", lambda: lambda n: n + 1, what),
    )
    counts: Counter[str] = Counter()
    return choose(table, torch.device("cpu"), None, counts)(1), counts


@pytest.mark.parametrize(
    "row",
    [row for *special, _ in TABLES for row in special],
    ids=lambda row: f"{row.what}-{row.name}".replace(" ", "-"),
)
def test_this_release_has_them(row: Implementation[Any]) -> None:
    assert callable(hopper_function(row.load, row.what))


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table[0].what.replace(" ", "-"))
def test_the_last_row_of_a_table_serves_every_call(table: tuple[Implementation[Any], ...]) -> None:
    assert table[-1].serves(Target("cuda", 70), None)


def test_an_older_release_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "__version__", "3.5.1")
    with pytest.warns(UserWarning, match=r"3\.5\.1 lacks what a faster older one .* 3\.6"):
        assert run(lambda: int, "older one") == (2, {"portable": 1})


def test_names_that_are_gone_are_said() -> None:
    def load() -> Callable[[int], int]:
        raise AttributeError("module 'gluon' has no attribute 'barrier'")

    with pytest.warns(UserWarning, match="no attribute 'barrier'"):
        assert run(load, "attention") == (2, {"portable": 1})


@pytest.mark.parametrize("why", ERRORS)
def test_what_does_not_compile_warns_once_and_runs_on_portable_kernels(why: str) -> None:
    tried = []

    def fails(n: int) -> int:
        tried.append(n)
        raise ERRORS[why]

    with pytest.warns(UserWarning, match=f"cannot compile a faster {why} .* portable"):
        assert run(lambda: fails, why) == (2, {"portable": 1})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run(lambda: fails, why) == (2, {"portable": 1})
    assert len(tried) == 1
    assert run(lambda: int, f"other than {why}") == (1, {"special": 1})


def test_a_launch_that_fails_is_no_compiler_error() -> None:
    def fails(n: int) -> int:
        raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory"):
        run(lambda: fails, "launch")
    assert run(lambda: int, "launch") == (1, {"special": 1})
