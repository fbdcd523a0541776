"""How much memory a forward that the guard compares takes beside one of the unpatched model."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers.hooks import HookRegistry, ModelHook
from torch import nn
from torch.profiler import ProfilerActivity, profile

from tests.patching import wan
from turbo_rcm_patch import patch_model, unpatch_model
from turbo_rcm_patch.ops import AttentionSpec
from turbo_rcm_patch.patching import measure
from turbo_rcm_patch.patching.author import Notes
from turbo_rcm_patch.patching.noise import Operands, head_noise

#: Tokens and channels of the residual stream.
TOKENS, CHANNELS = 2048, 256
#: Bytes of one residual stream in bf16.
STREAM = TOKENS * CHANNELS * 2


def model(layers: int) -> Any:
    case = wan.Case("", {"num_attention_heads": 4, "ffn_dim": 6 * CHANNELS, "num_layers": layers})
    return case.model(torch.bfloat16).requires_grad_(False)


def given() -> dict[str, Any]:
    inputs = wan.CASES[0].inputs(1, torch.bfloat16)
    shape = (*inputs["hidden_states"].shape[:2], 2, 64, 64)
    return inputs | {"hidden_states": torch.randn(shape).bfloat16()}


def peak(run: Callable[[], Any]) -> float:
    """Most bytes that are allocated at once beside what is there, in residual streams."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    events = seen.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    now = most = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most / STREAM


def test_a_forward_that_is_compared_takes_a_few_streams_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many pairs there are."""
    # As many chunks as there are of a sequence of full length.
    monkeypatch.setattr(measure, "_CHUNK", TOKENS * CHANNELS // 8)
    inputs = given()
    unpatched = peak(lambda: wan.run(model(1), **inputs))
    taken = []
    for layers in (1, 3):
        patched = model(layers)
        report = patch_model(patched, attention="exact")
        taken.append(peak(lambda: wan.run(patched, **inputs)))  # noqa: B023 - called at once
        assert len(report.guard) == len(report.pairs)
    assert 1 < taken[0] - unpatched < 8, (unpatched, taken)
    assert taken[1] - taken[0] < 1.5, "what a pair was compared with is kept"


def test_measuring_heads_takes_a_few_streams() -> None:
    """With many heads as with few: one is measured at a time."""
    q, k, v = torch.randn(3, 1, TOKENS, CHANNELS).bfloat16()
    norms = (torch.ones(CHANNELS).bfloat16(), torch.ones(CHANNELS).bfloat16(), None, None)
    weight, gates = torch.randn(CHANNELS, CHANNELS).bfloat16(), [q]
    given = Operands(q, k, v, norms, None, AttentionSpec(heads=16))
    assert peak(lambda: head_noise(given, v, weight, gates)) < 14


def test_what_runs_a_branch_again_is_let_go_of_at_once() -> None:
    """It holds the inputs, and they would wait for Python's collector."""
    held = nn.Identity()
    notes, gone = Notes(), weakref.ref(held)
    notes._branch = functools.partial(held, notes)
    del held
    gc.disable()
    try:
        notes.forget()
        assert gone() is None
    finally:
        gc.enable()


def test_the_report_keeps_no_input_of_a_forward_whose_pairs_are_skipped() -> None:
    """A cache skips the second block, so its pairs are never compared."""

    class Skip(ModelHook):  # type: ignore[misc]
        def new_forward(self, module: nn.Module, *args: Any) -> Any:
            return args[0]

    given: list[weakref.ref[torch.Tensor]] = []
    model = wan.CASES[0].model()
    report = patch_model(model)
    HookRegistry.check_if_exists_or_initialize(model.blocks[1]).register_hook(Skip(), "skip")
    handle = model.blocks[0].register_forward_pre_hook(
        lambda _, args: given.extend(weakref.ref(x) for x in args if isinstance(x, torch.Tensor))
    )
    for _ in range(2):
        wan.run(model)
    handle.remove()
    unpatch_model(model)
    del model
    gc.collect()
    assert len(report.guard) > 0 and len(given) > 4
    assert not any(x() is not None for x in given)
