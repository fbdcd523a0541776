"""torch.compile of a patched model: no graph break, no recompile over steps, in any order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.patching.wan import CASES, INT8, Case, run, wan
from turbo_rcm_patch import PatchConfig, ops, patch_model, patched, unpatch_model


class Counting:
    """The "eager" backend, counting how many graphs it was given."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return graph


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("case", [CASES[i] for i in (0, 1, 3, 4)], ids=lambda case: case.name)
@pytest.mark.supports("WanTransformer3DModel", "torch.compile")
def test_whole_model_without_graph_break_or_recompile(case: Case) -> None:
    model, backend = case.model(), Counting()
    with patched(model, PatchConfig(guard=True)):
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        for step in range(4):
            inputs = case.inputs()
            inputs["timestep"] = inputs["timestep"] - 100.0 * step
            assert torch.equal(run(compiled, **inputs), run(model, **inputs))
    assert backend.graphs == 1


def test_patching_after_compiling_and_back() -> None:
    model, backend = wan(), Counting()
    expected = run(model)
    with patched(model, INT8):
        fused = run(model)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    assert torch.equal(run(compiled), expected)
    patch_model(model, INT8)
    assert torch.equal(run(compiled), fused)
    unpatch_model(model)
    assert torch.equal(run(compiled), expected)
    assert backend.graphs == 2


def test_a_compiled_model_can_be_passed() -> None:
    model = wan()
    compiled = torch.compile(model, backend="eager")
    report = patch_model(compiled, INT8)
    assert report.pairs[0].path == "blocks.0.attn1"
    unpatch_model(model)


@pytest.mark.parametrize("patch_first", [True, False], ids=["patch-first", "patch-after"])
@pytest.mark.parametrize("linear", ["as-is", "int8"])
def test_repeated_blocks_share_one_graph(patch_first: bool, linear: Any) -> None:
    config = PatchConfig(guard=False, linear=linear)
    model, backend = wan(num_layers=3), Counting()
    with patched(model, config):
        fused = run(model)
    if patch_first:
        patch_model(model, config)
    model.compile_repeated_blocks(backend=backend, fullgraph=True)
    if not patch_first:
        patch_model(model, config)
    assert torch.equal(run(model), fused)
    assert backend.graphs == 1


def test_a_lora_that_comes_after_compiling_is_noticed() -> None:
    from tests.patching.test_around import add_lora

    model, backend = wan(), Counting()
    patch_model(model, INT8)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    without = run(compiled)
    add_lora(model)
    assert torch.allclose(run(compiled), run(model), atol=1e-6)
    assert not torch.allclose(run(compiled), without, atol=1e-3)


def test_a_pair_given_back_is_noticed() -> None:
    model, backend = wan(), Counting()
    expected = run(model)
    report = patch_model(model, PatchConfig(attention="int4", guard_budget=1e-6))
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    assert not torch.allclose(run(compiled), expected, atol=1e-4)
    run(model)
    assert report.fused == 2, "the feed-forwards are exact"
    assert torch.allclose(run(compiled), expected, atol=1e-5)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiler_gets_the_author_s_block_where_attention_is_exact_anyway(
    monkeypatch: pytest.MonkeyPatch, dynamic: bool
) -> None:
    """As on a GPU, where "auto" is exact for short sequences: there a compiler fuses more than our
    operations do. What was asked for by name, and longer sequences, are ours."""
    case = CASES[0]
    inputs = case.inputs()
    model = case.model()
    expected = run(model, **inputs)
    for below, config, theirs in (
        (10**6, PatchConfig(attention="auto", guard=False), True),
        (2, PatchConfig(attention="auto", guard=False), False),
        (10**6, PatchConfig(attention="int8", guard=False), False),
        (10**6, PatchConfig(attention="auto", linear="int8", guard=False), False),
    ):
        monkeypatch.setattr(ops, "exact_below", lambda *args, below=below: below)
        torch._dynamo.reset()
        with patched(model, config):
            plain = run(model, **inputs)
            compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=dynamic)
            made = run(compiled, **inputs)
            assert torch.equal(made, expected) == theirs
            assert torch.equal(made, plain) != theirs
    torch._dynamo.reset()
