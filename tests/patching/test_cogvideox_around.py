"""What is put around a CogVideoX block: adapters, caches, offloading, training, compilers, hooks.

The comparison is always with the same features on an unpatched model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.patching.cogvideox import BOTH_CLASSES, CASES, COGVIDEOX, ONE_EACH, ROTARY, Case
from tests.patching.test_around import (
    BOTH,
    add_lora,
    both_orders,
    cast_layers,
    faster,
    first_block,
    group_offloading,
    loop,
    offload_sequentially,
    pyramid,
)
from tests.patching.test_compile import Counting, fresh_dynamo
from tests.patching.wan import EXACT, relative, run
from turbo_rcm_patch import PatchConfig, ops, patch_model, patched, unpatch_model
from turbo_rcm_patch.patching.plan import PlanSlot

__all__ = ["fresh_dynamo"]

BF16 = torch.bfloat16
EXACT_GUARDED = PatchConfig(attention="exact")
EACH_CLASS = pytest.mark.parametrize("case", ONE_EACH, ids=lambda case: case.name)


# --- adapters, caches, offloading, casting -------------------------------------------------------


@BOTH
@EACH_CLASS
@pytest.mark.supports(BOTH_CLASSES, "LoRA")
def test_lora(case: Case, patch_first: bool) -> None:
    model, inputs = case.model(), case.inputs()
    without = run(model, **inputs)
    add_lora(model)
    expected = run(model, **inputs)
    half = run(model, **inputs, attention_kwargs={"scale": 0.5})
    assert relative(expected, without) > 0.05 and relative(half, expected) > 0.02
    model = case.model()
    report = both_orders(model, add_lora, patch_first)
    assert relative(run(model, **inputs), expected) < 1e-5
    assert relative(run(model, **inputs, attention_kwargs={"scale": 0.5}), half) < 1e-5
    assert {pair.runs for pair in report.pairs} == {"after-linear"}
    assert "peft's Linear" in report.pairs[0].reason
    unpatch_model(model)
    assert torch.equal(run(model, **inputs), expected)


@BOTH
@pytest.mark.parametrize("cache", [first_block, pyramid, faster])
@pytest.mark.supports(COGVIDEOX, "FirstBlockCache", "PAB, FasterCache")
def test_caches(cache: Callable[[Any], None], patch_first: bool) -> None:
    model = ROTARY.model()
    without = loop(model, ROTARY.inputs())
    cache(model)
    expected = loop(model, ROTARY.inputs())
    assert relative(expected, without) > 1e-4, "the cache must have an effect"
    model = ROTARY.model()
    report = both_orders(model, cache, patch_first)
    assert relative(loop(model, ROTARY.inputs()), expected) < 1e-5
    called = cache is not first_block
    assert report.pairs[0].runs == ("after-linear" if called else "two-launch")
    model._reset_stateful_cache()
    unpatch_model(model)
    assert torch.equal(loop(model, ROTARY.inputs()), expected)
    model.disable_cache()
    assert torch.equal(loop(model, ROTARY.inputs()), without)


@BOTH
@pytest.mark.parametrize("kind", ["block_level", "leaf_level"])
@EACH_CLASS
@pytest.mark.supports(BOTH_CLASSES, "offloading, casting")
def test_group_offloading_to_disk(case: Case, kind: str, patch_first: bool) -> None:
    model, inputs = case.model(), case.inputs()
    expected = run(model, **inputs)
    with group_offloading(kind) as offload:
        report = both_orders(model, offload, patch_first)
        for _ in range(2):
            assert relative(run(model, **inputs), expected) < 1e-5
        runs = {pair.runs for pair in report.pairs}
        leaf = kind == "leaf_level"
        assert runs == ({"after-linear"} if leaf else {"two-launch", "in-linear"})
        unpatch_model(model)
        assert relative(run(model, **inputs), expected) < 1e-5


@BOTH
@pytest.mark.parametrize("feature", [cast_layers, offload_sequentially])
@EACH_CLASS
@pytest.mark.supports(BOTH_CLASSES, "offloading, casting")
def test_weights_that_move_are_not_read(
    case: Case, feature: Callable[[Any], None], patch_first: bool
) -> None:
    model, inputs = case.model(), case.inputs()
    feature(model)
    expected = run(model, **inputs)
    model = case.model()
    report = both_orders(model, feature, patch_first)
    assert relative(run(model, **inputs), expected) < 1e-5
    assert {pair.runs for pair in report.pairs} == {"after-linear"}
    unpatch_model(model)
    assert torch.equal(run(model, **inputs), expected)


# --- training, dtypes, what is called ------------------------------------------------------------


@EACH_CLASS
@pytest.mark.supports(BOTH_CLASSES, "training")
def test_gradients_and_checkpointing_are_the_author_s(case: Case) -> None:
    def gradients(model: Any, checkpointing: bool) -> dict[str, torch.Tensor]:
        model.train().requires_grad_(True)
        model.zero_grad()
        if checkpointing:
            model.enable_gradient_checkpointing()
        model(**case.inputs())[0].square().mean().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    expected = gradients(case.model(), False)
    assert len(expected) > 20
    for checkpointing in (False, True):
        model = case.model()
        with patched(model, EXACT_GUARDED):
            found = gradients(model, checkpointing)
        assert found.keys() == expected.keys()
        worst = max(relative(found[name], expected[name]) for name in expected)
        assert worst < 1e-4, checkpointing


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_autocast_runs_as_written() -> None:
    model, inputs = ROTARY.model(), ROTARY.inputs()
    with torch.autocast("cpu", BF16):
        expected = run(model, **inputs)
        with patched(model):
            assert torch.equal(run(model, **inputs), expected)


@pytest.mark.parametrize("where", ["attn1.to_out.1", "ff.net.1", "ff.net.3"])
def test_active_dropout_runs_as_written(where: str) -> None:
    model, inputs = ROTARY.model(), ROTARY.inputs()
    model.transformer_blocks[0].get_submodule(where).p = 0.5
    model.train()
    report = patch_model(model, EXACT)
    left = [pair for pair in report.pairs if not pair.fused]
    assert [pair.path for pair in left] == [f"transformer_blocks.0.{where.split('.')[0]}"]
    assert "dropout is active" in left[0].reason
    torch.manual_seed(3)
    output = run(model, **inputs)
    unpatch_model(model)
    torch.manual_seed(3)
    assert relative(output, run(model, **inputs)) < 1e-5


def test_float16_and_strided_context() -> None:
    model, inputs = ROTARY.model(torch.float16), ROTARY.inputs(dtype=torch.float16)
    inputs["encoder_hidden_states"] = inputs["encoder_hidden_states"].repeat(1, 1, 2)[..., ::2]
    expected = run(model, **inputs)
    with patched(model, EXACT):
        assert relative(run(model, **inputs), expected) < 5e-3


@pytest.mark.parametrize("where", ["attn1.norm_q", "attn1.norm_k", "norm1", "norm2.norm"])
def test_a_norm_that_is_not_plain_is_called(where: str) -> None:
    model, inputs = ROTARY.model(), ROTARY.inputs()
    for block in model.transformer_blocks:
        norm = block.get_submodule(where)
        if where == "norm1":
            norm.register_forward_hook(lambda module, args, out: tuple(2 * part for part in out))
        else:
            # A head's own scale: it sees [B, H, N, D], as the author calls it.
            norm.register_forward_hook(
                lambda module, args, out: (
                    out * torch.arange(1.0, 1 + out.shape[1])[:, None, None]
                    if out.dim() == 4
                    else out * 2
                )
            )
    expected = run(model, **inputs)
    with patched(model, EXACT):
        assert relative(run(model, **inputs), expected) < 1e-5


def _other(name: str, norm: nn.LayerNorm) -> nn.Module:
    """A norm in the place of one of q or k that is not quite its class's."""

    class Doubling(nn.LayerNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    shape = tuple(norm.normalized_shape)
    return {
        "subclass": lambda: Doubling(shape, eps=1e-6),
        "rms-norm": lambda: nn.RMSNorm(shape, eps=1e-6),
        "no-bias": lambda: nn.LayerNorm(shape, eps=1e-6, bias=False),
        "no-weights": lambda: nn.LayerNorm(shape, eps=1e-6, elementwise_affine=False),
        "its-own-eps": lambda: nn.LayerNorm(shape, eps=0.5),
        "nothing": nn.Identity,
    }[name]()


@pytest.mark.parametrize(
    "name", ["subclass", "rms-norm", "no-bias", "no-weights", "its-own-eps", "nothing"]
)
@pytest.mark.parametrize("where", ["norm_q", "norm_k"])
def test_norms_of_heads_that_are_others_are_called(where: str, name: str) -> None:
    model, inputs = ROTARY.model(), ROTARY.inputs()
    for block in model.transformer_blocks:
        norm = _other(name, getattr(block.attn1, where)).requires_grad_(False)
        setattr(block.attn1, where, norm)
    expected = run(model, **inputs)
    with patched(model, EXACT) as report:
        assert "norm_q and norm_k are called" in report.pairs[0].reason
        assert relative(run(model, **inputs), expected) < 1e-5


@pytest.mark.usefixtures("no_plans")
def test_the_prologue_takes_the_norms_of_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = ROTARY.model(), ROTARY.inputs()
    for block in model.transformer_blocks:
        block.attn1.norm_q.eps = block.attn1.norm_k.eps = 0.5
    expected, calls = run(model, **inputs), []
    attention_skip = ops.attention_skip

    def watched(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append((args[3], kwargs))
        return attention_skip(*args, **kwargs)

    monkeypatch.setattr(ops, "attention_skip", watched)
    with patched(model, EXACT):
        assert relative(run(model, **inputs), expected) < 1e-5
    assert len(calls) == 2
    for (spec, given), block in zip(calls, model.transformer_blocks, strict=True):
        assert spec.eps == 0.5
        assert given["norm_q"] is block.attn1.norm_q.weight
        assert given["norm_k_bias"] is block.attn1.norm_k.bias


def test_attention_without_norms() -> None:
    model, inputs = ROTARY.model(), ROTARY.inputs()
    for block in model.transformer_blocks:
        block.attn1.norm_q = block.attn1.norm_k = None
    expected = run(model, **inputs)
    with patched(model, EXACT) as report:
        assert relative(run(model, **inputs), expected) < 1e-5
        assert not report.pairs[0].reason


@pytest.mark.parametrize("where", ["attn1.to_out.0", "attn1.to_out.1", "ff.net.2", "ff.net.3"])
def test_a_hooked_projection_is_called(where: str) -> None:
    model, inputs = ROTARY.model(), ROTARY.inputs()
    module = model.transformer_blocks[0].get_submodule(where)
    module.register_forward_hook(lambda module, args, output: output * 2)
    expected = run(model, **inputs)
    for config in (EXACT, PatchConfig(attention="exact", linear="int8", guard=False)):
        with patched(model, config) as report:
            assert relative(run(model, **inputs), expected) < (1e-5 if config is EXACT else 0.02)
            (pair,) = [p for p in report.pairs if p.runs == "after-linear"]
            assert pair.path == f"transformer_blocks.0.{where.split('.')[0]}"


def test_attention_kwargs_reach_the_attention() -> None:
    model, inputs = ROTARY.model(), ROTARY.inputs()
    tokens = 7 + 4 * 6 * 4
    mask = torch.zeros(1, 1, tokens).expand(2, tokens, tokens).clone()
    mask[:, :, 3:7] = -10000.0
    inputs["attention_kwargs"] = {"attention_mask": mask}
    without = run(model, **ROTARY.inputs())
    expected = run(model, **inputs)
    assert relative(expected, without) > 1e-3
    with patched(model, EXACT):
        assert relative(run(model, **inputs), expected) < 1e-5
        assert relative(run(model, **ROTARY.inputs()), without) < 1e-5


@pytest.mark.parametrize("hook", [None, "Linear"])
def test_gates_of_another_dtype_promote_as_in_the_author_s_sum(hook: str | None) -> None:
    model = ROTARY.model()
    block = model.transformer_blocks[0]
    block.norm2.register_forward_hook(
        lambda module, args, out: (*out[:2], *(gate.double() for gate in out[2:]))
    )
    if hook:
        block.ff.net[2].register_forward_hook(lambda module, args, out: 2 * out)
    given = torch.randn(1, 9, 128), torch.randn(1, 7, 128), torch.randn(1, 16)
    with torch.no_grad():
        expected = block(*given)
        with patched(model, EXACT):
            for ours, author_s in zip(block(*given), expected, strict=True):
                assert ours.dtype == author_s.dtype == torch.float64
                assert relative(ours, author_s) < 1e-5


# --- compilation ---------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [CASES[i] for i in (0, 1, 5, -2)], ids=lambda case: case.name)
@pytest.mark.supports(BOTH_CLASSES, "torch.compile")
def test_compiles_without_graph_break_or_recompile(case: Case) -> None:
    model, backend = case.model(), Counting()
    with patched(model, precision="fixed"):
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        for step in range(3):
            inputs = case.inputs()
            inputs["timestep"] = inputs["timestep"] - 100 * step
            assert torch.equal(run(compiled, **inputs), run(model, **inputs))
    assert backend.graphs == 1


def test_another_activation_before_the_modulation_is_called() -> None:
    """Ours reads the Linear behind it only where that is what the class makes it."""
    case = CASES[0]
    one, other = case.model(), case.model()
    for model in (one, other):
        for block in model.transformer_blocks:
            block.norm1.silu = nn.Tanh()
    patch_model(one, EXACT)
    for _ in range(2):
        assert relative(run(one, **case.inputs()), run(other, **case.inputs())) < 1e-5


@pytest.mark.parametrize("which", ["norm1", "norm2"])
@pytest.mark.parametrize("name", ["weight", "bias"])
def test_weights_of_a_layer_norm_that_lie_otherwise_make_a_new_plan(
    which: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel reads them as they lay when its launch was recorded."""
    case = CASES[0]
    model, made = case.model(), []
    patch_model(model, EXACT)
    before = run(model, **case.inputs())
    own = PlanSlot.get

    def get(self: Any, facts: Any, make: Callable[[], Any], watch: Any) -> Any:
        return own(self, facts, lambda: made.append(1) or make(), watch)

    monkeypatch.setattr(PlanSlot, "get", get)
    assert torch.equal(run(model, **case.inputs()), before) and not made
    weight = getattr(getattr(model.transformer_blocks[0], which).norm, name)
    weight.data = torch.stack([weight, weight], 1)[:, 0]
    assert torch.equal(run(model, **case.inputs()), before) and len(made) == 1
