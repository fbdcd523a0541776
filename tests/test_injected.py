"""An exception at any call inside patching, undoing, a forward and generating: nothing
is half done, nothing is lost, and the next attempt is as if there had been none before.

`STRIDE=1 pytest tests/test_injected.py` looks at every call; without it at every few.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

from tests.patching.models import dicts, named, run, wan
from tests.video.micro import SMALL, micro_pipe
from turbo_rcm_patch import PatchConfig, is_patched, patch_model, patched, report_of, unpatch_model
from turbo_rcm_patch.patching.record import PatchRecord
from turbo_rcm_patch.video.generation import generate
from turbo_rcm_patch.video.settings import Settings

PACKAGE = str(Path(__file__).parents[1] / "turbo_rcm_patch")
#: Every how many calls one raises. Primes, so that two tests look at other calls.
STRIDE = int(os.environ.get("STRIDE", "0"))
WAN = named("t2v")
CONFIGS = [PatchConfig(attention="exact"), PatchConfig(linear="int8", guard=False)]
IDS = ["guard", "int8"]


class Injected(BaseException):
    """Ctrl-C, out of memory, anything."""


def interrupted(step: int, action: Callable[[], Any], after: str = "install") -> bool:
    """Run an action with an exception at a call or its end, in the package or contextlib.

    Args:
        step: The number of calls and ends before it, counted from a function of this name on.
        action: The action.
        after: The name; "" counts calls of the package alone, from the first one on.

    Returns:
        True if there was an exception.
    """
    left, began, raised = step, not after, False
    events = ("call", "c_call", "c_return") if after else ("call",)

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal left, began, raised
        code = frame.f_code
        mine = code.co_filename.startswith(PACKAGE)
        mine = mine or bool(after) and code.co_filename.endswith("contextlib.py")
        began = began or code.co_name == after
        # Python looks for signals after a call, not when a function returns.
        if began and mine and event in events:
            left -= 1
            if left < 0:
                raised = True
                raise Injected  # Python takes the profile away now.

    sys.setprofile(profile)
    try:
        action()
    except Injected:
        pass
    finally:
        sys.setprofile(None)
    return raised


def each_call(action: Callable[[], Any], stride: int) -> Iterator[int]:
    """Run an action again and again, with an exception at each of its first calls, then at every
    `stride`th; the last time without one."""
    step, reached = 0, True
    while reached:
        reached = interrupted(step, action, "")
        yield step
        step += 1 if step < 20 else STRIDE or stride
    assert step > 20, "it has fewer calls than was thought"


def undone(model: Any) -> None:
    if is_patched(model):
        unpatch_model(model)


@pytest.fixture
def model() -> Any:
    return wan(num_layers=1).eval().requires_grad_(False)


@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
def test_patching_and_undoing(config: PatchConfig, model: Any) -> None:
    inputs, before = WAN.inputs(), dicts(model)
    expected = run(model, inputs)
    for step in each_call(lambda: patch_model(model, config), 61):
        # The last calls describe a model that is patched by then; nothing is between.
        assert not is_patched(model) or report_of(model).fused == 3
        undone(model)
        assert dicts(model) == before, f"call {step}"
    patch_model(model, config)
    for step in each_call(lambda: unpatch_model(model), 127):
        undone(model)
        assert dicts(model) == before and torch.equal(run(model, inputs), expected), step
        patch_model(model, config)


@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
def test_a_forward(config: PatchConfig, model: Any) -> None:
    """The next one gives what it gives without an exception before it, every pair compared."""
    inputs, before = WAN.inputs(), dicts(model)
    plain = run(model, inputs)
    report = patch_model(model, config)
    expected, records = run(model, inputs), len(report.guard)
    assert (records > 0) is config.guard
    unpatch_model(model)
    report = patch_model(model, config)
    for step in each_call(lambda: run(model, inputs), 131):
        assert torch.equal(run(model, inputs), expected), f"call {step}"
        assert len(report.guard) >= records, f"call {step}: a pair was never compared"
        unpatch_model(model)
        assert dicts(model) == before, f"call {step}"
        report = patch_model(model, config)
    unpatch_model(model)
    assert torch.equal(run(model, inputs), plain)


def test_generating() -> None:
    """The pipeline is as before, and its next video is the one it always makes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        pipe = micro_pipe()
        settings = Settings(sampler="rcm", steps=1, guidance_scale=1.0, **SMALL)
        clean = [dicts(pipe.transformer), dicts(pipe.vae)]
        expected = generate(pipe, "a", settings=settings).latents
        assert [dicts(pipe.transformer), dicts(pipe.vae)] == clean

        def state() -> list[object]:
            parts = dicts(pipe.transformer), dicts(pipe.vae), dict(vars(pipe)), dict(pipe.config)
            generators = torch.get_rng_state().tolist(), np.random.get_state()[1].tolist()
            return [pipe.scheduler, *parts, *generators, random.getstate()]

        before = state()
        for step in each_call(lambda: generate(pipe, "a", settings=settings), 97):
            assert state() == before, step
        assert torch.equal(generate(pipe, "a", settings=settings).latents, expected)
    finally:
        torch.set_num_threads(threads)


# Two exceptions, and one between `patched` and its block.


@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
def test_a_second_ctrl_c_while_patching_leaves_nothing_that_cannot_be_undone(
    config: PatchConfig, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run(model, WAN.inputs())
    before = dicts(model)
    undo, first, second = PatchRecord.undo, 0, -1

    def undo_and_be_interrupted(record: PatchRecord) -> None:
        nonlocal second
        step, second = second, -1
        if step >= 0:
            hit.append(interrupted(step, lambda: undo(record), "undo"))
            if hit[-1]:
                raise Injected
        else:
            undo(record)

    monkeypatch.setattr(PatchRecord, "undo", undo_and_be_interrupted)
    while interrupted(first, lambda: patch_model(model, config)):
        undone(model)  # The last calls come when everything is in place.
        assert dicts(model) == before, first
        hit, last = [True], 0
        while hit[-1]:
            second = last
            hit.append(False)  # where the first one comes too late for patching to undo anything
            interrupted(first, lambda: patch_model(model, config))
            second = -1
            undone(model)
            assert dicts(model) == before, (first, last)
            last += STRIDE or (7 if last < 40 else 1409)
        first += STRIDE or (11 if first < 60 else 127)
    assert first > 20
    unpatch_model(model)
    assert torch.equal(run(model, WAN.inputs()), expected)


def test_ctrl_c_between_patched_and_its_block_undoes_it(model: Any) -> None:
    before, step = dicts(model), 0

    def use() -> None:
        try:
            with patched(model, CONFIGS[0]):
                sys.setprofile(None)
        except Injected as error:
            held.append(error)  # as an interactive session keeps the last error

    held: list[BaseException] = []
    while interrupted(step, use):  # also one that Python drops, as in a generator that ends
        assert dicts(model) == before, f"call {step}"
        step += 1
    assert len(held) > 50
