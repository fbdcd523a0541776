"""Launches without a GPU: a stand-in for Triton's compiled kernels writes down what is started."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
from triton.runtime.jit import JITFunction

from turbo_rcm_patch.ops import replay
from turbo_rcm_patch.ops.launch import Target

#: Modules of kernels, Hopper's and the portable ones.
MODULES = (
    "attention.hopper", "int8_linear.hopper", "sparse_linear.hopper", "attention.prologue_hopper",
    "launch", "attention.triton", "attention.online_softmax", "int8_linear.triton",
    "residual.triton",
    "attention.one_launch_triton", "attention.prologue_triton", "numerics",
    "sparse_linear.triton",
)  # fmt: skip

#: Name, grid and arguments of each launch.
Log = list[tuple[str, tuple[int, ...], list[Any]]]

#: The one log of a process: recordings outlive the test that made them, and write here too.
_WRITTEN: Log = []


class Compiled:
    """Stands for a compiled kernel."""

    packed_metadata = (4, 1, 0)
    function = 0

    def __init__(self, name: str) -> None:
        self._name = name

    def run(self, x: int, y: int, z: int, stream: int, function: int, *rest: Any) -> None:
        _WRITTEN.append((self._name, (x, y, z), flat(rest[4:])))


def flat(value: Any) -> list[Any]:
    """Return a value, or those of a tuple at any depth."""
    return [x for part in value for x in flat(part)] if isinstance(value, tuple) else [value]


def needs_hopper_kernels() -> None:
    """Skip a test where this release of Triton, one before 3.6, has no such kernels."""
    pytest.importorskip(
        "turbo_rcm_patch.ops.attention.hopper", exc_type=ImportError,
        reason="Hopper's kernels, which are launched here, need a newer Triton",
    )  # fmt: skip


def write_down_launches(monkeypatch: pytest.MonkeyPatch) -> Log:
    """Return the launches from here on, as for a Hopper GPU, with tensors on the CPU. Launches of
    a launcher hold tensors, those of a replay addresses."""
    needs_hopper_kernels()
    _WRITTEN.clear()

    def launcher(kernel: JITFunction[Any], grid: tuple[int, ...]) -> Callable[..., Compiled]:
        def start(**arguments: Any) -> Compiled:
            values = tuple(arguments[name] for name in kernel.arg_names)
            _WRITTEN.append((kernel.__name__, (*grid, 1, 1)[:3], flat(values)))
            return Compiled(kernel.__name__)

        return start

    monkeypatch.setattr(JITFunction, "__getitem__", launcher)
    monkeypatch.setattr(replay, "_on_gpu", lambda tensor: True)
    monkeypatch.setattr(replay, "_raw_stream", lambda index: 0)
    for name in MODULES:
        module = importlib.import_module(f"turbo_rcm_patch.ops.{name}")
        if hasattr(module, "target_of"):
            monkeypatch.setattr(module, "target_of", lambda device: Target("cuda", 90))
    return _WRITTEN
