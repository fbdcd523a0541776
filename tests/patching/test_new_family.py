"""A family that is added by CONTRIBUTING.md alone: one file, one registry line, and this test."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from tests.patching import variant_family
from tests.patching.variant import Attention, VariantTransformer, inputs, variant
from tests.patching.wan import EXACT, INT8, dicts, relative, with_lora
from turbo_rcm_patch import PatchConfig, patch_model, patched, unpatch_model
from turbo_rcm_patch.errors import UnknownArchitectureError
from turbo_rcm_patch.patching.registry import FAMILIES, qualified_name


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The registry's line, and the file where families lie."""
    monkeypatch.setitem(FAMILIES, qualified_name(VariantTransformer), "variant")
    where = "turbo_rcm_patch.patching.families.variant"
    monkeypatch.setitem(sys.modules, where, variant_family)


def run(model: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    with torch.no_grad():
        output: torch.Tensor = model(**inputs(dtype))
    return output


def test_without_the_registry_s_line_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(FAMILIES, qualified_name(VariantTransformer))
    with pytest.raises(UnknownArchitectureError):
        patch_model(variant())


def test_its_pairs_are_fused_and_exact_attention_is_the_author_s() -> None:
    model = variant()
    before, expected = dicts(model), run(model)
    report = patch_model(model, EXACT)
    kinds = [(pair.kind, pair.runs) for pair in report.pairs[:3]]
    assert kinds == [
        ("self", "two-launch"), ("cross", "two-launch"), ("feed-forward", "in-linear")
    ]  # fmt: skip
    assert report.fused == 6
    assert relative(run(model), expected) < 1e-5
    unpatch_model(model)
    assert dicts(model) == before and torch.equal(run(model), expected)


@pytest.mark.parametrize("linear", ["as-is", "int8"])
def test_int8_is_near(linear: Any) -> None:
    model = variant(torch.bfloat16)
    truth = run(variant().float())
    written = relative(run(model, torch.bfloat16), truth)
    with patched(model, PatchConfig(guard=False, linear=linear)):
        assert relative(run(model, torch.bfloat16), truth) < max(0.02, 2 * written)


def test_modules_that_are_not_plain_are_called() -> None:
    model = variant()
    with_lora(model, "o_proj")
    calls: list[int] = []
    for module in (
        model.layers[0].mlp,
        model.layers[1].cross_attention,
        model.layers[1].text_norm,
    ):
        module.register_forward_hook(lambda *args: calls.append(1))
    expected = run(model)
    calls.clear()
    with patched(model, EXACT) as report:
        assert relative(run(model), expected) < 1e-5
        assert {pair.runs for pair in report.pairs if pair.kind == "self"} == {"after-linear"}
    assert len(calls) == 3
    calls.clear()
    with patched(model, PatchConfig()):
        run(model)
    assert len(calls) == 3, "the guard calls nothing twice"


def test_the_guard_is_silent_on_it_and_loud_at_a_wrong_gate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = variant()
    with patched(model, PatchConfig()) as report:
        run(model)
        assert report.guard and all(entry.error < 0.1 for entry in report.guard)
        assert report.fused == 6
    wrong = variant_family.Branch(
        name="mlp", kind="feed-forward", norm="mlp_norm", at=0, cast="fp32"
    )
    branches = (*variant_family.VariantBlockForward.branches[:2], wrong)
    monkeypatch.setattr(variant_family.VariantBlockForward, "branches", branches)
    with patched(model, PatchConfig()) as report:
        run(model)
        assert [pair.kind for pair in report.pairs if not pair.fused] == ["feed-forward"] * 2


class Doubled(Attention):
    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return 2 * super().forward(*args, **kwargs)


class Elsewhere(torch.nn.Module):
    def forward(self, x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        return x.roll(1, -1)


def test_a_subclass_of_an_attention_is_called_and_another_block_left_alone() -> None:
    model = variant()
    model.layers[0].self_attention = Doubled(128, 2).requires_grad_(False)
    model.layers[1] = Elsewhere()
    expected = run(model)
    for config in (EXACT, PatchConfig(attention="exact")):
        with patched(model, config) as report:
            assert relative(run(model), expected) < 1e-5
            assert [pair.fused for pair in report.pairs] == [True, True, True, False]
            assert "Doubled" in report.pairs[0].reason and "Elsewhere" in report.pairs[3].reason


def test_a_peaked_attention_keeps_its_inputs_in_16_bits() -> None:
    model = variant()
    model.layers[0].self_attention.q_norm.weight.data.mul_(4)
    report = patch_model(model, PatchConfig(linear="int8"))
    assert report.pairs[0].int8_linears == ("o_proj",)
    assert report.pairs[3].int8_linears == ("q_proj", "k_proj", "v_proj", "o_proj")


def test_it_compiles_without_a_break() -> None:
    model = variant()
    patch_model(model, INT8)
    expected = run(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert relative(run(compiled), expected) < 1e-5
