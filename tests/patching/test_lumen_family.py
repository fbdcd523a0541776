"""The family of `lumen`, added by CONTRIBUTING.md alone."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.patching import lumen_family
from tests.patching.lumen import LumenTransformer, SelfMix, inputs, lumen
from tests.patching.wan import EXACT, INT8, dicts, relative, with_lora
from turbo_rcm_patch import PatchConfig, patch_model, patched, unpatch_model
from turbo_rcm_patch.errors import FamilyError, UnknownArchitectureError
from turbo_rcm_patch.patching.author import Notes
from turbo_rcm_patch.patching.branches import readable_norms
from turbo_rcm_patch.patching.registry import FAMILIES, qualified_name


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The registry's line, and the file where families lie."""
    monkeypatch.setitem(FAMILIES, qualified_name(LumenTransformer), "lumen")
    where = "turbo_rcm_patch.patching.families.lumen"
    monkeypatch.setitem(sys.modules, where, lumen_family)


def run(model: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    with torch.no_grad():
        output: torch.Tensor = model(**inputs(dtype))
    return output


def test_norms_that_are_not_there_need_not_be_called() -> None:
    none = {"weight": None, "bias": None}
    x, norm = torch.randn(2, 3, 16), torch.nn.RMSNorm(16, 1e-5)
    assert readable_norms((None, None), x) == (none, none, 1e-6)
    assert readable_norms((norm, None), x) is None  # type: ignore[arg-type]
    held = readable_norms((norm, norm), x)
    assert held is not None and held[0] is norm._parameters


def test_without_the_registry_s_line_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(FAMILIES, qualified_name(LumenTransformer))
    with pytest.raises(UnknownArchitectureError):
        patch_model(lumen())


def test_its_pairs_are_fused_and_exact_attention_is_the_author_s() -> None:
    model = lumen()
    before, expected = dicts(model), run(model)
    report = patch_model(model, EXACT)
    assert [(pair.path, pair.kind, pair.runs) for pair in report.pairs[:3]] == [
        ("stack.0.mix", "self", "two-launch"),
        ("stack.0.text_mix", "cross", "after-linear"),
        ("stack.0.widen", "feed-forward", "in-linear"),
    ]
    assert report.fused == 6
    assert relative(run(model), expected) < 1e-5
    unpatch_model(model)
    assert dicts(model) == before and torch.equal(run(model), expected)


@pytest.mark.parametrize("linear", ["as-is", "int8"])
def test_int8_is_near(linear: Any) -> None:
    model = lumen(torch.bfloat16)
    truth = run(lumen())
    written = relative(run(model, torch.bfloat16), truth)
    with patched(model, PatchConfig(guard=False, linear=linear)) as report:
        assert relative(run(model, torch.bfloat16), truth) < max(0.02, 2 * written)
        named = {pair.kind: pair.int8_linears for pair in report.pairs}
    int8 = linear == "int8"
    assert named == {
        "self": ("qkv", "back") if int8 else (),
        "cross": ("query", "key", "value", "back") if int8 else (),
        "feed-forward": ("widen", "narrow") if int8 else (),
    }


def test_what_is_left_as_written_is_bit_equal() -> None:
    model, seen = lumen(torch.bfloat16), []
    # Hooked, so that it is called: with the residual stream behind the pairs before it.
    model.stack[0].ln_wide.register_forward_pre_hook(lambda module, args: seen.append(*args))
    run(model, torch.bfloat16)
    with patched(model, PatchConfig(guard=False, kinds=("feed-forward",))) as report:
        run(model, torch.bfloat16)
        assert report.fused == 2
    assert torch.equal(*seen)


def test_modules_that_are_not_plain_are_called_once() -> None:
    model = lumen()
    with_lora(model, "back", "narrow")
    first, second = model.stack
    hooked = [
        first.modulation, first.ln_mix, first.mix, first.text_mix, first.ln_text_out, first.widen,
        second.mix.norm_query, second.ln_text, second.ln_wide, second.narrow,
    ]  # fmt: skip
    calls: list[int] = []
    for index, module in enumerate(hooked):
        module.register_forward_hook(lambda *args, index=index: calls.append(index))
    expected = run(model)
    calls.clear()
    for config in (EXACT, PatchConfig(attention="exact"), PatchConfig()):
        with patched(model, config) as report:
            close = relative(run(model), expected)
            assert close < (1e-5 if config.attention == "exact" else 0.02)
            assert {pair.runs for pair in report.pairs} == {"after-linear"}
            assert report.fused == 6
        assert sorted(calls) == list(range(len(hooked))), "each is called once"
        calls.clear()


def test_a_hooked_module_of_a_pair_that_was_given_back_is_called_once() -> None:
    model = lumen()
    calls: list[int] = []
    block = model.stack[0]
    hooked = [block.modulation, block.mix, block.text_mix, block.ln_text_out, block.widen]
    for index, module in enumerate(hooked):
        module.register_forward_hook(lambda *args, index=index: calls.append(index))
    expected = run(model)
    with patched(model, PatchConfig(attention="exact")) as report:
        run(model)
        for forward in [part.forward for part in model.stack]:
            for state in forward._states.values():
                state.give_back("for this test")
        calls.clear()
        assert relative(run(model), expected) < 1e-6
        assert report.fused == 0
        assert sorted(calls) == list(range(len(hooked)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_guard_is_silent_on_it(dtype: torch.dtype) -> None:
    model = lumen(dtype)
    with patched(model, PatchConfig()) as report:
        run(model, dtype)
        assert len(report.guard) >= 6 and all(entry.error < 0.1 for entry in report.guard)
        assert report.fused == 6


WRONG = {
    "no gate": ("widen", {"at": 0}),
    "the wrong norm": ("text_mix", {"norm": "ln_text_out"}),
    "the wrong rows": ("mix", {"at": 3}),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_guard_is_loud_at_a_wrong_description(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    branch, change = WRONG[name]
    family = lumen_family.LumenBlockForward
    branches = tuple(replace(b, **change) if b.name == branch else b for b in family.branches)
    monkeypatch.setattr(family, "branches", branches)
    model = lumen()
    expected = run(model)
    with patched(model, PatchConfig(attention="exact")) as report:
        assert relative(run(model), expected) < 1e-5, "a pair that was given back is its author's"
        assert [p.path for p in report.pairs if not p.fused] == [
            f"stack.{i}.{branch}" for i in range(2)
        ]


def test_the_guard_tells_the_last_keys_from_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[float] = []
    own = Notes.last_keys

    def spy(notes: Notes) -> torch.Tensor | None:
        made = own(notes)
        assert made is not None and notes.before is not None
        shares.append(float(made.norm() / notes.before.norm()))
        return made

    monkeypatch.setattr(Notes, "last_keys", spy)
    model = lumen()
    with patched(model, PatchConfig()):
        run(model)
    assert len(shares) == 2 and max(shares) < 0.5, "one key of 60"


def test_a_peaked_attention_keeps_its_inputs_in_16_bits() -> None:
    model = lumen()
    model.stack[0].mix.norm_query.weight.data.mul_(4)
    report = patch_model(model, PatchConfig(linear="int8"))
    assert report.pairs[0].int8_linears == ("back",)
    assert report.pairs[3].int8_linears == ("qkv", "back")


@pytest.mark.parametrize(
    ("field", "wrong"),
    [("norm", "ln_mixed"), ("name", "mixer"), ("output", "backwards"), ("last", "narrower")],
)
def test_a_wrong_name_in_a_branch_is_refused_before_the_first_forward(
    field: str, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = lumen_family.LumenBlockForward
    at = 2 if field == "last" else 0
    branch = family.branches[at]
    branches = list(family.branches)
    branches[at] = replace(branch, **{field: wrong})
    monkeypatch.setattr(family, "branches", tuple(branches))
    with pytest.raises(FamilyError, match=f"(?s){field} of the branch.*{wrong}"):
        patch_model(lumen())


class SuperMix(SelfMix):
    def forward(self, tokens: torch.Tensor, *rope: torch.Tensor) -> torch.Tensor:
        assert isinstance(self, SuperMix)
        return super().forward(tokens, *rope) + super(SelfMix, self).extra_repr().__len__()


class SuperLinear(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def test_the_guard_runs_an_author_s_code_that_calls_super() -> None:
    model = lumen()
    model.stack[0].mix.__class__ = SuperMix
    for linear in (model.stack[1].mix.qkv, model.stack[1].text_mix.value, model.stack[1].narrow):
        linear.__class__ = SuperLinear
    model.stack[1].mix.qkv.register_forward_hook(lambda *args: None)
    expected = run(model)
    with patched(model, PatchConfig(attention="exact")) as report:
        assert relative(run(model), expected) < 1e-5
        assert report.guard and report.fused == 6


class OtherMix(SelfMix):
    def forward(self, tokens: torch.Tensor, *rope: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(tokens, *rope)


class Other(torch.nn.Module):
    def forward(self, tokens: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        return tokens.roll(1, -1)


def test_what_is_of_another_class_is_called() -> None:
    model = lumen()
    model.stack[0].mix = OtherMix(128, 2).requires_grad_(False)
    model.stack[1].mix, model.stack[1].text_mix = Other(), Other()
    expected = run(model)
    for config in (EXACT, PatchConfig()):
        with patched(model, config) as report:
            assert relative(run(model), expected) < 1e-5
            assert report.fused == 6
            assert {p.runs for p in report.pairs if p.kind == "self"} == {"after-linear"}
    model.stack[0] = Other()
    with patched(model, EXACT) as report:
        assert report.fused == 3


@pytest.mark.parametrize("single", ["tokens", "words", "vec", "words vec"])
def test_what_is_there_once_is_every_sample_s(single: str) -> None:
    model, given = lumen(), inputs()
    given |= {name: given[name][:1] for name in single.split()}
    with torch.no_grad():
        expected = model(**given)
        with patched(model, EXACT):
            assert relative(model(**given), expected) < 1e-5
        with patched(model, PatchConfig(attention="exact")) as report:
            assert relative(model(**given), expected) < 1e-5
            assert report.fused == 6


def test_tables_in_another_dtype() -> None:
    model, given = lumen(torch.bfloat16), inputs(torch.bfloat16)
    given["angles"] = given["angles"].bfloat16()
    with torch.no_grad():
        expected = model(**given)
        with patched(model, EXACT):
            assert relative(model(**given), expected) < 0.02


def test_it_compiles_without_a_break() -> None:
    model = lumen()
    patch_model(model, INT8)
    expected = run(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert relative(run(compiled), expected) < 1e-5
