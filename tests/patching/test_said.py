"""What a patched model says: what was given back, what really ran, and what it does not honour."""

from __future__ import annotations

import copy
import gc
import json
import logging
import math
import weakref
from typing import Any

import pytest
import torch
from diffusers.models.attention_dispatch import attention_backend

from tests.patching import cogvideox, turbodiffusion
from tests.patching.wan import CASES, relative, run, wan
from turbo_rcm_patch import PatchConfig, patch_model, unpatch_model
from turbo_rcm_patch.patching import report as report_file


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "turbo_rcm" in record.name]


def test_what_is_given_back_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    model = wan()
    report = patch_model(model, PatchConfig(attention="int4", guard_budget=1e-3, kinds=("self",)))
    with caplog.at_level(logging.WARNING):
        run(model)
    first, second = messages(caplog)
    assert first.startswith(
        "blocks.0.attn1: given back to its author's code by the guard: relative L2 0."
    )
    assert second.startswith("blocks.1.attn1: ")
    assert "exceeds the budget of 0.001 on the first step, in " in first
    assert report.last_forward == {"as written": 6}
    run(model)
    assert len(messages(caplog)) == 2


def test_a_step_towards_precision_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    model = wan()
    patch_model(model, PatchConfig(precision="auto", guard_budget=1e-4, kinds=("self",)))
    with caplog.at_level(logging.WARNING):
        run(model)
    said = [message for message in messages(caplog) if message.startswith("blocks.0.attn1")]
    assert ["p and v changed to 16 bits" in said[0], "attention made exact" in said[1]] == [
        True,
        True,
    ]


def test_what_really_ran() -> None:
    model = wan()
    report = patch_model(model)
    assert report.last_forward == {} and "last forward: none yet" in str(report)
    run(model)
    assert report.last_forward == {
        "fused with int8 attention": 2,
        "fused with exact attention": 2,
        "fused": 2,
    }
    text = "last forward: 2 fused with int8 attention, 2 fused with exact attention, 2 fused"
    assert text in str(report)
    for block in model.blocks:
        block.attn1.register_forward_hook(lambda *args: None)
    run(model)
    assert report.last_forward["fused after a module that was called"] == 2
    assert json.loads(json.dumps(report.as_dict()))["last_forward"] == report.last_forward


MODELS: dict[str, Any] = {
    "wan": (wan, CASES[0].inputs, 6),
    "cogvideox": (cogvideox.CASES[0].model, cogvideox.CASES[0].inputs, 4),
    "turbodiffusion": (turbodiffusion.tiny, turbodiffusion.tiny_inputs, 6),
}


@pytest.mark.parametrize("name", MODELS)
def test_autocast_is_said(name: str, caplog: pytest.LogCaptureFixture) -> None:
    make, inputs, count = MODELS[name]
    model, given = make(), inputs()
    report = patch_model(model)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), caplog.at_level(logging.WARNING):
        model(**given)
        model(**given)
    (message,) = messages(caplog)
    assert message.startswith("autocast is on, so the patched blocks run as their authors")
    assert report.last_forward == {"as written because of autocast": count}
    assert f"{count} as written because of autocast" in str(report)
    with torch.no_grad():
        model(**given)
    assert not any("written" in how for how in report.last_forward)


def test_a_chosen_backend_that_is_not_used_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model = wan()
    patch_model(model)
    with caplog.at_level(logging.WARNING):
        run(model)
        with attention_backend("_native_math"):
            run(model)
            run(model)
    (message,) = messages(caplog)
    assert "the attention backend '_native_math' is chosen and not used" in message


@pytest.mark.parametrize("how", ["context", "method"])
def test_an_exact_attention_honours_the_chosen_backend(
    how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from diffusers.models import attention_dispatch

    registry = attention_dispatch._AttentionBackendRegistry
    name = attention_dispatch.AttentionBackendName._NATIVE_MATH
    right, calls = registry._backends[name], 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return right(*args, **kwargs)

    monkeypatch.setitem(registry._backends, name, counted)
    model = wan()
    expected = run(model)
    report = patch_model(model, PatchConfig(attention="exact", guard=False))
    before = registry._active_backend
    with caplog.at_level(logging.WARNING):
        if how == "context":
            with attention_backend("_native_math"):
                output = run(model)
        else:
            model.set_attention_backend("_native_math")
            output = run(model)
            model.reset_attention_backend()
            registry.set_active_backend(before)
    assert calls == 4 and relative(output, expected) < 1e-5
    assert report.last_forward["fused after a module that was called"] == 4
    assert messages(caplog) == []
    run(model)
    assert calls == 4


def test_a_kept_report_does_not_keep_the_model() -> None:
    model = wan()
    report = patch_model(model)
    run(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None and "all kept" in str(report)


def test_a_copy_has_a_guard_of_its_own() -> None:
    model = wan()
    report = patch_model(model)
    twin = copy.deepcopy(model)
    run(twin)
    assert len(report.guard) == 0 and len(report.guard.unseen) == 6
    run(model)
    assert report.guard.unseen == []
    for one in (model, twin):
        unpatch_model(one)


def test_plain_data_has_no_infinity_anywhere() -> None:
    """JSON has none."""
    data = {"a": [1.0, math.inf], "b": {"c": math.nan, "d": ("x", 2, None)}}
    assert report_file._finite(data) == {"a": [1.0, None], "b": {"c": None, "d": ["x", 2, None]}}
