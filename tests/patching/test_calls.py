"""A patched block is called and exported as its author's is."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn

from tests.measures import relative_l2
from tests.patching.models import MODELS, named, run
from tests.patching.test_changes import TIGHT
from turbo_rcm_patch import patch_model, patched
from turbo_rcm_patch.patching import sla_as_defined


def called_with(block: nn.Module, model: nn.Module, inputs: Any) -> tuple[Any, dict[str, Any]]:
    """The arguments with which a model calls a block, by position and by name."""
    seen: list[tuple[Any, dict[str, Any]]] = []
    hook = block.register_forward_pre_hook(
        lambda module, args, named: seen.append((args, named)), with_kwargs=True
    )
    run(model, inputs)
    hook.remove()
    return seen[0]


def blocks_of(model: Any) -> list[Any]:
    """One block of each kind."""
    names = ("blocks", "vace_blocks", "transformer_blocks")
    held = [getattr(model, name)[0] for name in names if hasattr(model, name)] or [model]
    return [getattr(one, "_checkpoint_wrapped_module", one) for one in held]


def tensors(made: Any) -> list[torch.Tensor]:
    return [x for x in (made if isinstance(made, tuple) else (made,)) if x is not None]


@pytest.mark.parametrize("by", ["position", "name"])
@pytest.mark.parametrize("one", [one for one in MODELS if "sla" not in one.name], ids=str)
def test_a_block_takes_its_authors_arguments(one: Any, by: str) -> None:
    model, inputs = one.model(), one.inputs()
    for block in blocks_of(model):
        args, more = called_with(block, model, inputs)
        names = inspect.signature(type(block).forward).bind(block, *args, **more)
        names.apply_defaults()
        given = {name: value for name, value in names.arguments.items() if name != "self"}

        def call(block: Any = block, given: Any = given) -> list[torch.Tensor]:
            with torch.no_grad():
                return tensors(block(**given) if by == "name" else block(*given.values()))

        expected = call()
        with patched(model, attention="exact", guard=False) as report:
            made = call()
            assert any(words.startswith("fused") for words in report.ran().values())
        for ours, theirs in zip(made, expected, strict=True):
            assert relative_l2(ours, theirs) <= TIGHT


NAMES = ["t2v", "i2v", "vace", "skyreels", "anyflow", "sla", "cogvideox-5b", "consisid"]


@pytest.mark.parametrize("linear", ["as-is", "int8"])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_an_exported_block_is_its_authors(name: str, strict: bool, linear: Any) -> None:
    model, inputs = named(name).model(), named(name).inputs()
    block = blocks_of(model)[-1]
    args, more = called_with(block, model, inputs)
    with torch.no_grad():
        with sla_as_defined(model, 0.1):
            expected = tensors(block(*args, **more))
        patch_model(model, linear=linear)
        torch._dynamo.reset()
        made = torch.export.export(block, args, more, strict=strict).module()(*args, **more)
    assert all(map(torch.equal, tensors(made), expected))


@pytest.mark.parametrize("linear", ["as-is", "int8"])
@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16, torch.float16, "meta"])
@pytest.mark.parametrize("name", ["t2v", "sla", "skyreels", "cogvideox-5b", "rcm-projection"])
def test_the_default_dtype_and_device_change_nothing(name: str, default: Any, linear: Any) -> None:
    one = named(name)
    inputs = one.inputs(dtype=torch.bfloat16)
    made = []
    for changed in (False, True):
        model = one.model(torch.bfloat16)
        report = patch_model(model, attention="int8", linear=linear)
        try:
            if changed and default == "meta":
                torch.set_default_device(default)
            elif changed:
                torch.set_default_dtype(default)
            made.append((run(model, inputs), list(report.guard), report.guard.prediction))
        finally:
            torch.set_default_device(None)
            torch.set_default_dtype(torch.float32)
    (expected, *guarded), (same, *with_other) = made
    assert torch.equal(same, expected)
    assert guarded == with_other


@pytest.mark.parametrize("linear", ["as-is", "int8"])
@pytest.mark.parametrize("name", ["t2v", "skyreels", "vace", "cogvideox-5b", "rcm-projection"])
def test_a_forward_on_the_meta_device_is_the_authors(name: str, linear: Any) -> None:
    model = named(name).model().to("meta")
    inputs = {
        key: value.to("meta") if isinstance(value, torch.Tensor) else value
        for key, value in named(name).inputs().items()
    }
    expected = run(model, inputs)
    report = patch_model(model, linear=linear)
    assert run(model, inputs).shape == expected.shape
    assert all("meta device" in words for words in report.ran().values())


def test_as_many_tokens_as_modulations_are_no_other_layout() -> None:
    """SkyReels-V2 has a timestep per token as [B, 6, N, C], here with N = 6."""
    one = named("skyreels-forcing")
    model = one.model()
    (x, text, temb, rotary, *rest), more = called_with(model.blocks[0], model, one.inputs())
    assert temb.ndim == 4
    inputs = x[:, :6], text, temb[:, :, :6], tuple(part[:, :6] for part in rotary), *rest
    with torch.no_grad():
        expected = model.blocks[0](*inputs, **more)
        with patched(model, attention="exact", guard=False) as report:
            made = model.blocks[0](*inputs, **more)
            assert report.ran()["blocks.0"].startswith("fused")
    assert relative_l2(made, expected) <= TIGHT


@pytest.mark.parametrize("name", ["t2v", "cogvideox-5b"])
def test_dropout_that_alone_is_in_training_mode_drops(name: str) -> None:
    one = named(name)
    model, inputs = one.model(), one.inputs()
    for block in blocks_of(model):
        block.attn1.to_out[1].p = 0.5
        block.attn1.to_out[1].train()
    torch.manual_seed(0)
    expected = run(model, inputs)
    with patched(model, attention="exact", guard=False):
        torch.manual_seed(0)
        assert relative_l2(run(model, inputs), expected) <= TIGHT
