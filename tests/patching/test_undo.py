"""Patching changes instance attributes alone, whole or not at all, and undoing it is exact."""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from typing import Any

import pytest
import torch
from accelerate.hooks import attach_execution_device_hook, remove_hook_from_module
from diffusers import FirstBlockCacheConfig
from torch import nn

from tests.measures import relative_l2
from tests.patching.models import MODELS, WAN, classes, dicts, run
from turbo_rcm_patch import (
    is_patched,
    keep_int8_only,
    patch_model,
    patched,
    report_of,
    unpatch_model,
)
from turbo_rcm_patch.errors import (
    AlreadyPatchedError,
    NotPatchedError,
    WrappedError,
)
from turbo_rcm_patch.patching.plain import is_own
from turbo_rcm_patch.patching.record import Entry, holds_patch


@pytest.mark.supports(classes(MODELS), "unpatched, bit-equal")
@pytest.mark.parametrize(
    ("one", "linear"), [*((one, "int8") for one in MODELS), (WAN, "as-is")], ids=str
)
def test_nothing_is_left_of_a_patch(one: Any, linear: Any) -> None:
    model, inputs = one.model(), one.inputs()
    expected, before = run(model, inputs), dicts(model)  # some keep tables of their own
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    patch_model(model, linear=linear)
    run(model, inputs)
    assert list(model.state_dict()) == list(state)
    unpatch_model(model)
    assert dicts(model) == before
    assert all(torch.equal(model.state_dict()[name], state[name]) for name in state)
    assert torch.equal(run(model, inputs), expected)
    assert not is_patched(model)


def test_an_exception_inside_patched_undoes_it() -> None:
    model = WAN.model()
    before = dicts(model)
    with pytest.raises(ZeroDivisionError), patched(model, linear="int8"):
        run(model, WAN.inputs())
        raise ZeroDivisionError
    assert dicts(model) == before


def test_patching_twice_is_refused_and_changes_nothing() -> None:
    model = WAN.model()
    report = patch_model(model)
    before = dicts(model)
    with pytest.raises(AlreadyPatchedError, match="unpatch_model first"):
        patch_model(model, attention="exact")
    assert dicts(model) == before
    assert report_of(model).config == report.config
    with pytest.raises(NotPatchedError):
        unpatch_model(WAN.model())


@pytest.mark.parametrize("linear", ["as-is", "int8"])
def test_a_wrapper_that_came_later_is_not_dropped(linear: Any) -> None:
    model, inputs = WAN.model(), WAN.inputs()
    patch_model(model, linear=linear, guard=False)
    block = model.blocks[0]
    ours = block.forward
    block.forward = lambda *args, **named: ours(*args, **named) * 1.5
    made, before = run(model, inputs), dicts(model)
    with pytest.raises(WrappedError, match="Undo the later change first"):
        unpatch_model(model)
    assert dicts(model) == before
    assert torch.equal(run(model, inputs), made)
    block.forward = ours
    unpatch_model(model)
    assert "forward" not in vars(block)


def test_a_block_with_a_forward_of_its_own_is_left_alone() -> None:
    model, inputs = WAN.model(), WAN.inputs()
    block = model.blocks[0]
    own = block.forward
    block.forward = lambda *args, **named: own(*args, **named) * 1.5
    expected = run(model, inputs)
    report = patch_model(model, attention="exact")
    assert (run(model, inputs) - expected).abs().max() < 1e-4
    left = [pair for pair in report.pairs if pair.path.startswith("blocks.0")]
    assert {pair.runs for pair in left} == {"as-written"}
    assert "replaced by other code" in left[0].reason
    unpatch_model(model)
    assert torch.equal(run(model, inputs), expected)


def test_a_failure_while_installing_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = WAN.model()
    before, install = dicts(model), Entry.install

    def fails_on_the_second_block(entry: Entry) -> None:
        if entry.module is model.blocks[1]:
            raise RuntimeError("no attribute for you")
        install(entry)

    monkeypatch.setattr(Entry, "install", fails_on_the_second_block)
    with pytest.raises(RuntimeError, match="no attribute"):
        patch_model(model)
    assert dicts(model) == before


HOOKS: dict[str, tuple[Any, Any]] = {
    "cache": (lambda m: m.enable_cache(FirstBlockCacheConfig()), lambda m: m.disable_cache()),
    "accelerate": (
        lambda m: attach_execution_device_hook(m, torch.device("cpu")),
        lambda m: remove_hook_from_module(m, recurse=True),
    ),
}


def attributes(model: nn.Module) -> set[tuple[str, str]]:
    """Names of instance attributes; a `forward` that is the class's own, as hooks leave it, is
    none."""
    return {
        (where, name)
        for where, module in model.named_modules()
        for name, value in vars(module).items()
        if not (name == "forward" and is_own(module, name, value))
    }


@pytest.mark.parametrize("linear", ["as-is", "int8"])
@pytest.mark.parametrize("order", ["hpud", "hpdu", "phdu", "phud", "hupd", "huphdu", "phuphdu"])
@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_that_come_and_go_are_all_that_is_left(kind: str, order: str, linear: Any) -> None:
    """h and u: hook and unhook; p and d: patch, and undo it."""
    model, twin, inputs = WAN.model(), WAN.model(), WAN.inputs()
    expected = run(twin, inputs)
    do: Any = dict(zip("hu", HOOKS[kind], strict=True))
    do["p"] = lambda m: is_patched(m) or patch_model(m, attention="exact", linear=linear)
    for step in order:
        if step in "hu":
            do[step](twin)
        (unpatch_model if step == "d" else do[step])(model)
        with model.cache_context("cond"), twin.cache_context("cond"):
            made, _ = run(model, inputs), run(twin, inputs)
        fused = is_patched(model) and report_of(model).last_forward
        assert not fused or all(words.startswith("fused") for words in fused), step
        assert relative_l2(made, expected) < (0.05 if linear == "int8" else 1e-5), step
        if not is_patched(model):
            assert attributes(model) == attributes(twin), step
            assert not holds_patch(model), step
    assert torch.equal(run(model, inputs), expected)


def test_a_patched_model_can_be_collected() -> None:
    model = WAN.model()
    report = patch_model(model, linear="int8")
    run(model, WAN.inputs())
    gone = weakref.ref(model.blocks[0].attn1.to_q.weight)
    del model
    gc.collect()
    assert gone() is None
    assert "gone" in str(report) and len(report.guard) >= 2


@pytest.mark.parametrize("linear", ["as-is", "int8"])
def test_copies_of_patched_blocks_are_undone_too(linear: Any) -> None:
    model, inputs = WAN.model(), WAN.inputs()
    twin, other = WAN.model(), WAN.model()
    patch_model(model, linear=linear)
    for one in (model, other):
        one.blocks.append(copy.deepcopy(model.blocks[0]))
    twin.blocks.append(twin.blocks[0])
    run(model, inputs)
    unpatch_model(model)
    assert torch.equal(run(model, inputs), run(twin, inputs))
    with patched(model, linear=linear):
        model.blocks[2] = copy.deepcopy(model.blocks[0])
    assert not is_patched(model)
    # A model that was never patched itself.
    assert is_patched(other)
    with pytest.raises(AlreadyPatchedError, match="unpatch_model first"):
        patch_model(other)
    unpatch_model(other)
    assert torch.equal(run(other, inputs), run(twin, inputs))
    assert not is_patched(model) and not is_patched(other)
    assert not any("forward" in attributes for attributes in dicts(other).values())


def test_an_error_inside_patched_is_not_hidden(caplog: pytest.LogCaptureFixture) -> None:
    model = WAN.model()
    with pytest.raises(ZeroDivisionError), patched(model):
        model.blocks[0].forward = lambda *args: args[0]
        raise ZeroDivisionError
    assert "The model stays patched" in caplog.text and "Undo the later change" in caplog.text


def test_unpatching_dropped_weights_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model = WAN.model()
    patch_model(model, linear="int8-only")
    with caplog.at_level(logging.WARNING):
        unpatch_model(model)
    assert "int8 weights alone" in caplog.text
    assert keep_int8_only(model) == 0


def test_a_shared_block_is_patched_once() -> None:
    model, inputs = WAN.model(), WAN.inputs()
    model.blocks[1] = model.blocks[0]
    expected, before = run(model, inputs), dicts(model)  # some keep tables of their own
    report = patch_model(model, attention="exact")
    assert len(report.pairs) == 3
    assert (run(model, inputs) - expected).abs().max() < 1e-4
    unpatch_model(model)
    assert dicts(model) == before
