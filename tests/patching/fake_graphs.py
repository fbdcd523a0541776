"""A stand-in for CUDA graphs on a CPU.

It records the operations of a forward with the tensors that they read and write, and repeats them.
Like a CUDA graph it sees what is written into these tensors, and nothing of what Python would do
by now.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map


def _tensors(held: Any) -> list[torch.Tensor]:
    return [x for x in tree_flatten(held)[0] if isinstance(x, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _arrived(held: Any) -> Any:
    """A tensor that a functional collective gave, as a plain one."""
    wait = getattr(held, "trigger_wait", None)
    return held if wait is None else wait()


def _done(func: Any, out: Any) -> Any:
    """What an operation gave, once it is there: a graph has exchanges in its order, too."""
    for each in tree_flatten(out)[0]:
        if isinstance(each, torch.ScriptObject):
            each.wait()  # type: ignore[attr-defined]
        elif func.namespace == "_c10d_functional":
            torch.ops._c10d_functional.wait_tensor(each)
    return out


class Recording(TorchDispatchMode):
    """The operations of a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.made: list[torch.Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map(_arrived, (args, kwargs or {}))
        if "_wrap_tensor" in func.__name__:  # It only says that an exchange is under way.
            return args[0]
        out = _done(func, func(*args, **kwargs))
        self.calls.append((func, args, kwargs, out))
        given = set(map(_storage, _tensors((args, kwargs))))
        self.made += [x for x in _tensors(out) if _storage(x) not in given]
        return out


class FakeGraph:
    """A recording that can be repeated."""

    def __init__(self, calls: list[tuple[Any, Any, Any, Any]]) -> None:
        self.calls: list[tuple[Any, Any, Any, Any]] | None = calls
        self.replays = 0

    def replay(self) -> None:
        assert self.calls is not None, "it was dropped"
        self.replays += 1
        for func, args, kwargs, out in self.calls:
            made = _done(func, func(*args, **kwargs))
            for new, old in zip(_tensors(made), _tensors(out), strict=True):
                if new.data_ptr() != old.data_ptr():  # Neither a view nor written in place.
                    old.copy_(new)


class FakeEvent:
    """An event, which is reached unless replays hang."""

    hang = False

    def query(self) -> bool:
        return not FakeEvent.hang


class FakePool:
    """What `graphs.GraphPool` is on a GPU.

    Attributes:
        captures: How many graphs were captured, in all pools.
        dropped: How many were dropped.
        capturing: Whether one is captured now.
    """

    pools: list[FakePool] = []
    captures = dropped = 0
    capturing = False
    #: Called inside a capture.
    during: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, device: torch.device) -> None:
        self.alive: list[FakeGraph] = []
        self.turns = 0
        FakePool.pools.append(self)

    @classmethod
    def reset(cls) -> None:
        cls.pools, cls.captures, cls.dropped, cls.capturing = [], 0, 0, False
        cls.during = staticmethod(lambda: None)

    @staticmethod
    def serves(device: torch.device) -> bool:
        return device.type == "cpu"

    def capture(self, run: Callable[[], Any]) -> tuple[FakeGraph, Any]:
        run()
        recording = Recording()
        FakePool.capturing = True
        try:
            FakePool.during()
            with recording:
                result = run()
        finally:
            FakePool.capturing = False
        # A capture computes nothing: whoever reads the result before a replay reads this.
        for tensor in recording.made:
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))
        graph = FakeGraph(recording.calls)
        self.alive.append(graph)
        FakePool.captures += 1
        return graph, result

    def mark(self) -> FakeEvent:
        return FakeEvent()

    @contextmanager
    def turn(self) -> Iterator[None]:
        self.turns += 1
        yield

    def drop(self, graph: FakeGraph) -> None:
        graph.calls = None
        self.alive.remove(graph)
        FakePool.dropped += 1

    def release(self) -> None:
        assert not self.alive

    @classmethod
    def replays(cls) -> int:
        return sum(graph.replays for pool in cls.pools for graph in pool.alive)
