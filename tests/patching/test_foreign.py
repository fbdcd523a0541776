"""Code that is not the author's, on a class, on a module inside a block, or in the place of a
function: the patched model runs it as often as the unpatched one, or the report names it."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.activations import GELU
from diffusers.models.attention import FeedForward
from diffusers.models.normalization import CogVideoXLayerNormZero, FP32LayerNorm
from diffusers.models.transformers import transformer_wan
from torch import nn
from torch.overrides import TorchFunctionMode

from tests.measures import relative_l2
from tests.patching.models import COG, WAN, blocks, named, run
from tests.patching.test_changes import (
    NAMED,
    TIGHT,
    first,
    hook,
    larger,
    replace_processor,
    wrap,
)
from turbo_rcm_patch import patch_model, report_of, unpatch_model
from turbo_rcm_patch.errors import NothingToPatchError

# --- on a class ----------------------------------------------------------------------------------

WAN_BLOCK = WAN.model().blocks[0]
COG_BLOCK = COG.model().transformer_blocks[0]
FUNCTIONS = [
    (WAN, type(WAN_BLOCK), "forward"),
    (WAN, type(WAN_BLOCK.attn1), "forward"),
    (WAN, type(WAN_BLOCK.attn1), "__call__"),
    (WAN, type(WAN_BLOCK.attn1.processor), "__call__"),
    (WAN, FeedForward, "forward"),
    (WAN, FP32LayerNorm, "forward"),
    (WAN, GELU, "forward"),
    (WAN, GELU, "gelu"),
    (WAN, nn.RMSNorm, "forward"),
    (WAN, nn.Linear, "forward"),
    (WAN, nn.Dropout, "forward"),
    (COG, type(COG_BLOCK), "forward"),
    (COG, type(COG_BLOCK.attn1), "forward"),
    (COG, type(COG_BLOCK.attn1.processor), "__call__"),
    (COG, CogVideoXLayerNormZero, "forward"),
    (COG, nn.Linear, "forward"),
    (COG, nn.LayerNorm, "forward"),
    (COG, GELU, "forward"),
    (COG, nn.SiLU, "forward"),
    (COG, nn.Dropout, "forward"),
]


#: Classes beside a Linear: int8 copies and rows depend on them.
_BESIDE_LINEARS = (FeedForward, FP32LayerNorm, GELU, nn.RMSNorm, nn.Linear, CogVideoXLayerNormZero,
                   nn.LayerNorm)  # fmt: skip


@pytest.mark.parametrize("first", [True, False], ids=["replaced-first", "patched-first"])
@pytest.mark.parametrize(
    ("one", "cls", "name", "linear"),
    [(*one, "as-is") for one in FUNCTIONS]
    + [(*one, "int8") for one in FUNCTIONS if one[1] in _BESIDE_LINEARS],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_a_function_that_replaced_a_classs_is_called(
    one: Any, cls: Any, name: str, first: bool, linear: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, calls = getattr(cls, name), []

    def mine(self: Any, *args: Any, **named: Any) -> Any:
        calls.append(self)
        return larger(self, args, own(self, *args, **named))

    unpatched, model, inputs = one.model(), one.model(), one.inputs()
    before = run(unpatched, inputs)
    if not first:
        patch_model(model, attention="exact", linear=linear)
        run(model, inputs)
    with monkeypatch.context() as context:
        context.setattr(cls, name, mine)
        expected, count = run(unpatched, inputs), len(calls)
        calls.clear()
        if first:
            with suppress(NothingToPatchError):
                patch_model(model, attention="exact", linear=linear, guard=False)
        made = run(model, inputs)
    assert relative_l2(expected, before) > 100 * TIGHT
    assert relative_l2(made, expected) <= (TIGHT if linear == "as-is" else 0.05)
    assert count and len(calls) == count
    # Once the class has its own function again, a model is patched as if nothing had been.
    fresh = one.model()
    report = patch_model(fresh, attention="exact", linear=linear, guard=False)
    assert relative_l2(run(fresh, inputs), before) <= (TIGHT if linear == "as-is" else 0.05)
    assert (
        report.fused
        == sum(pair.runs != "as-written" for pair in report.pairs)
        == len(report.pairs)
    )


def set_on(path: str, name: str, value: Any) -> Any:
    """Set an attribute of a module of the first block; a function makes it of the old one."""

    def change(block: nn.Module) -> None:
        module = block.get_submodule(path)
        old = getattr(module, name, None)
        setattr(module, name, value(old) if callable(value) else value)

    return change


def hook_on(path: str) -> Any:
    return lambda block: block.get_submodule(path).register_forward_hook(lambda m, a, y: 1.25 * y)


def attend_twice(own: Any) -> Any:
    return lambda q, k, v, *rest: 2 * own(q, k, v)


TURBO_CHANGES = [
    ("turbo", hook_on("self_attn"), "self_attn is called as a module"),
    ("turbo", hook_on("cross_attn"), "cross_attn is called as a module"),
    ("turbo", hook_on("ffn"), "ffn is called as a module"),
    ("turbo", hook_on("self_attn.attn_op"), "attn_op of self_attn"),
    ("turbo", hook_on("cross_attn.attn_op"), "attn_op of cross_attn"),
    ("turbo-i2v", hook_on("cross_attn.attn_op_image"), "attn_op of cross_attn"),
    ("turbo", set_on("self_attn.attn_op", "local_attn", attend_twice), "its local attention"),
    ("turbo", set_on("cross_attn.attn_op", "local_attn", attend_twice), "its local attention"),
    ("turbo-i2v", set_on("cross_attn.attn_op_image", "local_attn", attend_twice), "its local"),
    ("turbo", set_on("ffn.1", "approximate", "none"), "ffn is a Sequential"),
    ("turbo", lambda block: block.ffn.append(nn.Tanh()), "ffn is a Sequential"),
    ("turbo", lambda block: setattr(block, "ffn", Counts(block.ffn)), "ffn is a Counts"),
    ("turbo-sla", hook_on("self_attn.attn_op.local_attn"), "proj_l is called as a module"),
    ("turbo-sla", set_on("self_attn.attn_op.local_attn", "feature_map_k",
                         lambda own: lambda x: F.elu(x) + 1), "its feature map"),
    ("turbo-sla", set_on("self_attn.attn_op.local_attn", "feature_map_q",
                         lambda own: lambda x: F.elu(x) + 1), "its feature map"),
    ("turbo-sla", set_on("self_attn.attn_op.local_attn", "BLKQ", 100), "blocks of 100 by 64"),
    ("turbo-sla", set_on("self_attn.attn_op.local_attn", "BLKK", 100), "blocks of 128 by 100"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "words"), TURBO_CHANGES)
def test_what_is_not_turbodiffusions_is_called(name: str, change: Any, words: str) -> None:
    one = named(name)
    unpatched, model, inputs = one.model(), one.model(), one.inputs()
    for each in (unpatched, model):
        del each.blocks[1]
    before = run(unpatched, inputs)
    for each in (unpatched, model):
        change(each.blocks[0]._checkpoint_wrapped_module)
    expected = run(unpatched, inputs)
    assert relative_l2(expected, before) > 10 * TIGHT
    with pytest.raises(NothingToPatchError, match=words):
        patch_model(model)
    assert torch.equal(run(model, inputs), expected)


# --- inside a block ------------------------------------------------------------------------------


class Counts(nn.Module):
    """A wrapper with a state."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.calls = inner, 0

    def forward(self, *args: Any, **named: Any) -> Any:
        self.calls += 1
        return self.inner(*args, **named) * (1 + 0.1 * self.calls)


def count_calls(block: Any) -> None:
    calls = []

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        calls.append(1)
        return output * (1 + 0.1 * len(calls))

    block.attn1.to_out[0].register_forward_hook(hook)


def replace_forward(block: Any) -> None:
    calls: list[int] = []
    own = block.attn1.to_v.forward
    block.attn1.to_v.forward = lambda x: own(x) * (calls.append(1) or len(calls))


def cache_taylor(model: Any) -> None:
    from diffusers import TaylorSeerCacheConfig

    config = {"cache_interval": 3, "disable_cache_before_step": 1}
    model.enable_cache(
        TaylorSeerCacheConfig(cache_identifiers=[r"blocks\.\d+\.ffn\.net\.2"], **config)
    )


STATES = {
    "hook": first(count_calls),
    "random": lambda model: blocks(model)[1].attn1.to_v.register_forward_pre_hook(
        lambda module, args: (args[0] * torch.rand(()),)
    ),
    "to_out.0": wrap("attn1.to_out.0", Counts),
    "norm2": wrap("norm2", Counts),
    "forward": first(replace_forward),
    "taylor": cache_taylor,
}


@pytest.mark.parametrize("order", ["changed first", "patched first"])
@pytest.mark.parametrize("name", STATES)
def test_what_keeps_a_state_inside_a_block_runs_once_a_call(name: str, order: str) -> None:
    made = []
    for is_ours in (False, True):
        model, inputs = WAN.model(), WAN.inputs()
        if is_ours and order == "patched first":
            patch_model(model, attention="exact")
        STATES[name](model)
        if is_ours and order == "changed first":
            patch_model(model, attention="exact")
        torch.manual_seed(3)
        outputs = []
        for step in range(8):
            moved = {**inputs, "hidden_states": inputs["hidden_states"] * (1 + 0.1 * step)}
            with model.cache_context("cond"):
                outputs.append(run(model, moved))
        made.append(outputs)
        if is_ours:
            assert "which is not run a second time" in str(report_of(model).guard)
            assert not report_of(model).guard.decisions
    for theirs, ours in zip(*made, strict=True):
        assert relative_l2(ours, theirs) <= TIGHT


def test_a_block_is_compared_once_nothing_foreign_is_inside() -> None:
    model, inputs = WAN.model(), WAN.inputs()
    report = patch_model(model, attention="exact")
    hook = model.blocks[0].norm2.register_forward_hook(lambda *_: None)
    run(model, inputs)
    hook.remove()
    run(model, inputs)
    kept = [record.path for record in report.guard if record.verdict == "kept"]
    assert sorted(kept) == ["blocks.0", "blocks.1"]


@pytest.mark.parametrize("change", ["offloaded-leaves", "offloaded-by-accelerate"])
def test_offloading_and_casting_are_no_states(change: str) -> None:
    """Accelerate leaves no weight of the last Linear to read, so all of the stream counts."""
    model, inputs = WAN.model(), WAN.inputs()
    NAMED[change].apply(model)
    report = patch_model(model, attention="int8")
    run(model, inputs)
    assert not report.guard.skipped
    assert len(report.guard) == 2
    assert report.guard.prediction is not None


# --- in the place of a function ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "owner", "attribute"),
    [
        *[(name, transformer_wan, "dispatch_attention_fn") for name in ("t2v", "i2v")],
        *[(name, F, "scaled_dot_product_attention")
          for name in ("t2v", "i2v", "cogvideox-5b", "turbo")],
    ],
    ids=lambda one: getattr(one, "__name__", one),
)  # fmt: skip
def test_a_replaced_attention_is_called_where_attention_is_exact(
    name: str, owner: Any, attribute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = named(name)
    own, calls = getattr(owner, attribute), []

    def mine(*args: Any, **named: Any) -> Any:
        calls.append(1)
        return own(*args, **named) * 1.25

    unpatched, model, inputs = one.model(), one.model(), one.inputs()
    before = run(unpatched, inputs)
    report = patch_model(model, attention="exact")
    run(model, inputs)
    monkeypatch.setattr(owner, attribute, mine)
    expected, count = run(unpatched, inputs), len(calls)
    assert relative_l2(expected, before) > 100 * TIGHT
    for _ in range(5):
        calls.clear()
        assert relative_l2(run(model, inputs), expected) <= TIGHT
        assert len(calls) == count
    unpatch_model(model)
    patch_model(model, attention="int8")
    made = run(model, inputs)
    assert relative_l2(made, before) < 0.03
    assert f"{attribute}' is chosen and not used" in str(report_of(model))
    assert "not run a second time" in str(report_of(model).guard)
    assert not report.guard.decisions


@pytest.mark.parametrize(
    ("one", "name"),
    [(one, name) for one in (WAN, COG) for name in ("gelu", "linear", "layer_norm")]
    + [(WAN, "rms_norm")],
    ids=str,
)
def test_a_replaced_function_of_torch_is_called(
    one: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    unpatched, model, inputs = one.model(), one.model(), one.inputs()
    patch_model(model, attention="exact")
    before, own = run(model, inputs), getattr(F, name)
    monkeypatch.setattr(F, name, lambda *args, **named: own(*args, **named) * 1.25)
    expected = run(unpatched, inputs)
    assert relative_l2(expected, before) > 100 * TIGHT
    assert torch.equal(run(model, inputs), expected)


@pytest.mark.parametrize("linear", ["as-is", "int8"])
def test_a_function_mode_sees_what_the_author_calls(linear: Any) -> None:
    class Sees(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            made = func(*args, **(kwargs or {}))
            return made * 1.25 if func is F.scaled_dot_product_attention else made

    unpatched, model, inputs = WAN.model(), WAN.model(), WAN.inputs()
    patch_model(model, attention="int8", linear=linear)
    run(model, inputs)
    with Sees():
        expected, made = run(unpatched, inputs), run(model, inputs)
    assert relative_l2(made, expected) <= (TIGHT if linear == "as-is" else 0.05)
    with torch.device("cpu"):  # is one too, and replaces nothing
        run(model, inputs)
    assert all(words.startswith("fused") for words in report_of(model).ran().values())


# --- compiled ------------------------------------------------------------------------------------


CHANGES = {"hook-feed-forward": hook("ffn"), "processor": replace_processor, "hook": hook("attn1")}


@pytest.mark.parametrize(
    ("one", "change"), [*((WAN, change) for change in CHANGES), (COG, "processor")], ids=str
)
def test_a_compiled_model_keeps_hooks_and_processors(one: Any, change: str) -> None:
    unpatched, model, inputs = one.model(), one.model(), one.inputs()
    before = run(unpatched, inputs)
    for each in (unpatched, model):
        CHANGES[change](each)
    expected = run(unpatched, inputs)
    assert relative_l2(expected, before) > 100 * TIGHT
    patch_model(model, attention="exact", guard=False)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert relative_l2(run(compiled, inputs), expected) <= TIGHT
    torch._dynamo.reset()
