"""Threads that share a patched model, and processes that are forked beside them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.measures import relative_l2
from tests.patching.models import WAN, run, wan
from turbo_rcm_patch import patch_model, unpatch_model
from turbo_rcm_patch.ops.int8_linear import samples
from turbo_rcm_patch.ops.int8_linear.api import quantize_rows
from turbo_rcm_patch.patching.families.wan import WanBlock
from turbo_rcm_patch.patching.int8_linears import Int8Copies, Int8Forward


def together(count: int, work: Callable[[int], None]) -> None:
    """Run work(0), work(1), ... in threads, and raise what one of them raised."""
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(work, range(count)))


@pytest.mark.parametrize(("linear", "target"), [("as-is", 0.8), ("int8", 0.9)])
def test_the_first_forwards_of_several_threads_decide_as_one_does(
    linear: Any, target: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The threads wait in each block, so their comparisons interleave. The target is one that some
    blocks miss."""
    inputs = WAN.inputs(dtype=torch.bfloat16)

    def made() -> tuple[Any, Any]:
        model = wan(num_layers=6).bfloat16().eval().requires_grad_(False)
        return model, patch_model(model, attention="int8", linear=linear, fidelity=target)

    model, report = made()
    expected = run(model, inputs)
    words = report.ran()
    assert len(set(words.values())) > 1  # some blocks are exact
    own = WanBlock.fast

    def slowly(self: Any, *inputs: Any, **named: Any) -> Any:
        time.sleep(0.01)
        return own(self, *inputs, **named)

    model, report = made()
    outputs: dict[int, Tensor] = {}
    monkeypatch.setattr(WanBlock, "fast", slowly)
    together(4, lambda index: outputs.__setitem__(index, run(model, inputs)))
    monkeypatch.undo()
    assert all(torch.equal(output, expected) for output in outputs.values())
    assert report.ran() == words
    assert torch.equal(run(model, inputs), expected)


def test_threads_share_a_patched_model() -> None:
    model = WAN.model()
    report = patch_model(model, attention="int8", linear="int8", fidelity=None)
    given = [WAN.inputs(batch) for batch in (1, 2)] * 2
    alone = [run(model, inputs) for inputs in given]

    def work(index: int) -> None:
        for _ in range(4):
            assert torch.equal(run(model, given[index]), alone[index])

    together(4, work)
    assert not report.guard.decisions


@pytest.mark.parametrize("at", [0, 1, 7])
def test_weights_that_another_thread_casts_meanwhile_are_compared(
    at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cast falls between two steps of one comparison."""
    linears = [torch.nn.Linear(64, 64) for _ in range(4)]
    forwards = [Int8Forward(linear.requires_grad_(False), "auto") for linear in linears]
    copies = Int8Copies(forwards)
    copies.follow()
    read, calls = samples._read, []

    def cast_before_reading(*args: Any) -> Tensor:
        calls.append(1)
        if len(calls) == at + 1:
            for linear in linears:
                linear.to(torch.bfloat16)
        return read(*args)

    monkeypatch.setattr(samples, "_read", cast_before_reading)
    for _ in range(4):
        copies.follow()
    assert linears[0].weight.dtype == torch.bfloat16
    linears[0].weight.data.neg_()
    forwards[0]._made = forwards[1]._made = (linears[0].weight, linears[0].weight)
    copies.follow()
    assert forwards[0]._made is None and forwards[1]._made is not None


def test_a_thread_goes_on_while_another_unpatches() -> None:
    model, inputs = WAN.model(), WAN.inputs(batch=1)
    expected, stop = run(model, inputs), threading.Event()
    furthest = 0.0

    def work(index: int) -> None:
        nonlocal furthest
        if index:
            while not stop.is_set():
                furthest = max(furthest, relative_l2(run(model, inputs), expected))
            return
        try:
            for _ in range(60):
                patch_model(model, attention="int8", linear="int8", guard=False)
                time.sleep(0.005)
                unpatch_model(model)
        finally:
            stop.set()

    together(2, work)
    assert furthest < 0.05


def test_rows_on_their_way_to_a_linear_that_is_unpatched_are_multiplied() -> None:
    torch.manual_seed(0)
    for bias in (True, False):
        linear, x = torch.nn.Linear(24, 8, bias=bias), torch.randn(2, 5, 24)
        with torch.no_grad():
            made = linear(quantize_rows(x, "auto"))
            assert relative_l2(made, F.linear(x, linear.weight, linear.bias)) < 0.02
