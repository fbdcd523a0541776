"""What diffusers, accelerate and peft do around a block, before and after patching (both orders).

The comparison is always with the same features on an unpatched model.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import accelerate
import pytest
import torch
from accelerate.hooks import remove_hook_from_module
from diffusers import FirstBlockCacheConfig, PyramidAttentionBroadcastConfig
from diffusers.hooks import FasterCacheConfig, apply_group_offloading
from diffusers.models.attention import FeedForward
from diffusers.models.transformers.transformer_wan import (
    WanAttention,
    WanAttnProcessor,
    WanTransformerBlock,
)
from peft import LoraConfig
from torch import nn

from tests.patching.wan import CASES, EXACT, dicts, relative, run, wan
from turbo_rcm_patch import PatchConfig, find_pairs, is_patched, patch_model, unpatch_model
from turbo_rcm_patch.errors import NothingToPatchError

BOTH = pytest.mark.parametrize("patch_first", [True, False], ids=["patch-first", "patch-after"])
CPU = torch.device("cpu")


def both_orders(model: Any, feature: Callable[[Any], None], patch_first: bool) -> Any:
    """The report of patching before or after the feature."""
    if patch_first:
        report = patch_model(model, EXACT)
        feature(model)
        return report
    feature(model)
    return patch_model(model, EXACT)


# --- adapters ------------------------------------------------------------------------------------


def add_lora(model: Any) -> None:
    torch.manual_seed(7)
    targets = ["to_q", "to_k", "to_v", "to_out.0", "net.2"]
    model.add_adapter(
        LoraConfig(r=4, lora_alpha=16, target_modules=targets, init_lora_weights=False)
    )
    model.eval()


@BOTH
@pytest.mark.supports("WanTransformer3DModel", "LoRA")
def test_lora(patch_first: bool) -> None:
    model = wan()
    without = run(model)
    add_lora(model)
    expected = run(model)
    assert relative(expected, without) > 0.05
    model = wan()
    report = both_orders(model, add_lora, patch_first)
    assert relative(run(model), expected) < 1e-5
    # Both the report and the table say how it runs now, whenever the LoRA came.
    assert {pair.runs for pair in report.pairs} == {"after-linear"}
    assert "peft's Linear" in find_pairs(model)[0].reason
    unpatch_model(model)
    assert torch.equal(run(model), expected)


def test_lora_switched_and_removed_while_patched() -> None:
    model = wan()
    without = run(model)
    report = patch_model(model, EXACT)
    add_lora(model)
    model.disable_adapters()
    assert relative(run(model), without) < 1e-5
    model.delete_adapters("default")
    assert relative(run(model), without) < 1e-5
    assert report.fused == 6


# --- caches --------------------------------------------------------------------------------------

#: The first lies outside the ranges of the caches, which have nothing to offer yet.
TIMESTEPS = (990, 890, 880, 500)


def loop(model: Any, inputs: dict[str, Any] | None = None) -> torch.Tensor:
    outputs = []
    for step, timestep in enumerate(TIMESTEPS):
        NOW[0] = timestep
        inputs = (inputs or CASES[0].inputs()) | {"timestep": torch.tensor([float(timestep)])}
        with model.cache_context("cond", step_index=step, num_inference_steps=4):
            outputs.append(run(model, **inputs))
    return torch.stack(outputs)


NOW = [0]


def first_block(model: Any) -> None:
    model.enable_cache(FirstBlockCacheConfig(threshold=0.5))


def pyramid(model: Any) -> None:
    model.enable_cache(
        PyramidAttentionBroadcastConfig(
            spatial_attention_block_skip_range=2,
            cross_attention_block_skip_range=2,
            spatial_attention_timestep_skip_range=(100, 950),
            cross_attention_timestep_skip_range=(100, 950),
            spatial_attention_block_identifiers=("blocks",),
            cross_attention_block_identifiers=("blocks",),
            current_timestep_callback=lambda: NOW[0],
        )
    )


def faster(model: Any) -> None:
    model.enable_cache(
        FasterCacheConfig(
            spatial_attention_block_skip_range=2,
            spatial_attention_timestep_skip_range=(100, 950),
            spatial_attention_block_identifiers=("blocks.*attn1",),
            attention_weight_callback=lambda _: 0.5,
            is_guidance_distilled=True,
            current_timestep_callback=lambda: NOW[0],
            tensor_format="BFCHW",
        )
    )


@BOTH
@pytest.mark.parametrize("cache", [first_block, pyramid, faster])
@pytest.mark.parametrize("guard", [False, True], ids=["no-guard", "guard"])
@pytest.mark.supports("WanTransformer3DModel", "FirstBlockCache", "PAB, FasterCache")
def test_caches(cache: Callable[[Any], None], patch_first: bool, guard: bool) -> None:
    model = wan()
    without = loop(model)
    cache(model)
    expected = loop(model)
    assert relative(expected, without) > 1e-4, "the cache must have an effect"
    model = wan()
    if patch_first:
        patch_model(model, PatchConfig(attention="exact", guard=guard))
    cache(model)
    if not patch_first:
        patch_model(model, PatchConfig(attention="exact", guard=guard))
    assert relative(loop(model), expected) < 1e-5
    model._reset_stateful_cache()
    unpatch_model(model)
    assert torch.equal(loop(model), expected)
    model.disable_cache()
    assert torch.equal(loop(model), without)


@BOTH
def test_disabling_a_cache_keeps_the_patch_and_its_way_back(patch_first: bool) -> None:
    model = wan()
    without = run(model)
    both_orders(model, first_block, patch_first)
    model.disable_cache()
    block = model.blocks[0]
    assert type(block.forward).__name__ == "WanBlockForward"
    unpatch_model(model)
    assert type(block.forward).__name__ == "method"
    assert torch.equal(run(model), without)
    # The registry stays behind with no references: patching over it works as over nothing.
    patch_model(model, EXACT)
    assert relative(run(model), without) < 1e-5
    unpatch_model(model)
    assert torch.equal(run(model), without)


@pytest.mark.parametrize("cache", [first_block, pyramid])
def test_undo_under_hooks_leaves_nothing_behind(cache: Callable[[Any], None]) -> None:
    model = wan()
    cache(model)
    before = dicts(model)
    chain = [
        dict(vars(reference))
        for module in model.modules()
        if "_diffusers_hook" in vars(module)
        for reference in module._diffusers_hook._fn_refs
    ]
    patch_model(model)
    unpatch_model(model)
    assert dicts(model) == before
    after = [
        dict(vars(reference))
        for module in model.modules()
        if "_diffusers_hook" in vars(module)
        for reference in module._diffusers_hook._fn_refs
    ]
    assert after == chain


# --- offloading and casting ----------------------------------------------------------------------


@contextmanager
def group_offloading(kind: str) -> Iterator[Callable[[Any], None]]:
    with tempfile.TemporaryDirectory() as folder:

        def apply(model: Any) -> None:
            apply_group_offloading(
                model,
                onload_device=CPU,
                offload_device=CPU,
                offload_type=kind,
                num_blocks_per_group=1,
                offload_to_disk_path=folder,
            )

        yield apply


@BOTH
@pytest.mark.parametrize("kind", ["block_level", "leaf_level"])
@pytest.mark.supports("WanTransformer3DModel", "offloading, casting")
def test_group_offloading_to_disk(kind: str, patch_first: bool) -> None:
    model = wan()
    expected = run(model)
    with group_offloading(kind) as apply:
        report = both_orders(model, apply, patch_first)
        for _ in range(2):
            assert relative(run(model), expected) < 1e-5
        # On leaf level every Linear is hooked and only ever called.
        runs = {pair.runs for pair in report.pairs}
        leaf = kind == "leaf_level"
        assert runs == ({"after-linear"} if leaf else {"two-launch", "in-linear"})
        unpatch_model(model)
        assert relative(run(model), expected) < 1e-5


def cast_layers(model: Any) -> None:
    model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)


@BOTH
@pytest.mark.supports("WanTransformer3DModel", "offloading, casting")
def test_layerwise_casting(patch_first: bool) -> None:
    model = wan()
    cast_layers(model)
    expected = run(model)
    model = wan()
    report = both_orders(model, cast_layers, patch_first)
    assert relative(run(model), expected) < 1e-5
    assert {pair.runs for pair in report.pairs} == {"after-linear"}
    unpatch_model(model)
    assert torch.equal(run(model), expected)


def offload_sequentially(model: Any) -> None:
    accelerate.cpu_offload(model, execution_device=CPU)


@BOTH
@pytest.mark.supports("WanTransformer3DModel", "offloading, casting")
def test_sequential_offloading(patch_first: bool) -> None:
    model = wan()
    expected = run(model)
    report = both_orders(model, offload_sequentially, patch_first)
    assert model.blocks[0].attn1.to_q.weight.device.type == "meta"
    assert relative(run(model), expected) < 1e-5
    assert report.fused == 6
    unpatch_model(model)
    assert torch.equal(run(model), expected)


@BOTH
def test_removing_sequential_offloading_keeps_the_patch(patch_first: bool) -> None:
    model = wan()
    expected = run(model)
    report = both_orders(model, offload_sequentially, patch_first)
    remove_hook_from_module(model, recurse=True)
    assert type(model.blocks[0].forward).__name__ == "WanBlockForward"
    assert {pair.runs for pair in report.pairs} == {"two-launch", "in-linear"}
    assert relative(run(model), expected) < 1e-5
    unpatch_model(model)
    assert torch.equal(run(model), expected)


# --- other things that replace a Linear ----------------------------------------------------------


def test_a_quantised_weight_is_called() -> None:
    class Quantised(torch.nn.Linear):
        """Stands for a quantised Linear: its weight is not what it multiplies with."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.linear(x, self.weight * 0.5, self.bias)

    model = wan()
    for block in model.blocks:
        for holder, index in ((block.attn1.to_out, 0), (block.ffn.net, 2)):
            old = holder[index]
            new = Quantised(old.in_features, old.out_features).requires_grad_(False)
            new.load_state_dict(old.state_dict())
            holder[index] = new
    expected = run(model)
    report = patch_model(model, EXACT)
    assert relative(run(model), expected) < 1e-5
    assert [pair.runs for pair in report.pairs[:3]] == [
        "after-linear",
        "two-launch",
        "after-linear",
    ]


@pytest.mark.parametrize("kind", ["forward hook", "pre-hook", "own forward", "parametrised"])
def test_a_hooked_projection_is_called(kind: str) -> None:
    model = wan()
    linear = model.blocks[0].attn1.to_out[0]
    if kind == "forward hook":
        linear.register_forward_hook(lambda module, args, output: output * 2)
    elif kind == "pre-hook":
        linear.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    elif kind == "own forward":
        linear.forward = lambda x: 2 * type(linear).forward(linear, x)
    else:
        torch.nn.utils.parametrizations.weight_norm(linear)
        linear.parametrizations.weight.original0.data *= 2
    expected = run(model)
    patch_model(model, EXACT)
    assert relative(run(model), expected) < 1e-5
    assert find_pairs(model)[0].runs == "after-linear"


class OwnProcessor:
    """Somebody's own: it has nothing of diffusers' processors but the call."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __call__(self, attn: Any, *given: Any, **named: Any) -> Any:
        return self.inner(attn, *given, **named)


@BOTH
@pytest.mark.parametrize("attention", ["exact", "int8"])
def test_a_processor_of_ones_own_in_the_first_block(attention: Any, patch_first: bool) -> None:
    model = wan()
    attn = model.blocks[0].attn1
    if patch_first:
        patch_model(model, attention=attention, guard=False)
    attn.processor = OwnProcessor(attn.processor)
    if not patch_first:
        patch_model(model, attention=attention, guard=False)
    assert relative(run(model), run(wan())) < (1e-5 if attention == "exact" else 0.05)


# --- functions that were replaced on a class -----------------------------------------------------


@BOTH
@pytest.mark.parametrize(
    ("cls", "name", "way"),
    [
        (WanTransformerBlock, "forward", "as-written"),
        (WanAttention, "forward", "after-linear"),
        (WanAttnProcessor, "__call__", "after-linear"),
        (FeedForward, "forward", "after-linear"),
        (nn.Linear, "forward", "after-linear"),
    ],
    ids=lambda one: getattr(one, "__name__", one),
)
def test_what_was_replaced_on_a_class_runs(
    monkeypatch: pytest.MonkeyPatch, cls: type, name: str, way: str, patch_first: bool
) -> None:
    own, calls = getattr(cls, name), 0

    @functools.wraps(own)
    def counted(*given: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        return own(*given, **named)

    model, other = wan(), wan()
    expected = run(model)
    patch_model(other, EXACT)
    if patch_first:
        report = patch_model(model, EXACT)
        run(model)
    with monkeypatch.context() as patch:
        patch.setattr(cls, name, counted)
        run(wan())
        unpatched, calls = calls, 0
        if patch_first:
            pass
        elif way == "as-written":
            with pytest.raises(NothingToPatchError, match="somebody replaced WanTransformerBlock"):
                patch_model(model, EXACT)
        else:
            report = patch_model(model, EXACT)
        assert relative(run(model), expected) < 1e-5
        assert calls == unpatched
        pairs = report.pairs if is_patched(model) else find_pairs(model)
        left = [p for p in pairs if f"somebody replaced {cls.__qualname__}" in p.reason]
        assert left and {p.runs for p in left} == {way}
    assert relative(run(model), expected) < 1e-5  # It was put back.
    if patch_first:
        assert not [p for p in report.pairs if p.reason]
        assert torch.equal(run(model), run(other))
