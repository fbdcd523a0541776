"""What a user types: keywords beside a configuration, questions about a model, and short reprs."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from tests.patching.wan import run, wan
from turbo_rcm_patch import (
    PatchConfig,
    is_patched,
    patch_model,
    patched,
    report_of,
    unpatch_model,
)
from turbo_rcm_patch.config import PatchOptions
from turbo_rcm_patch.errors import (
    AlreadyPatchedError,
    ConfigError,
    NotAModelError,
    NotPatchedError,
)


def test_keywords_are_fields() -> None:
    model = wan()
    report = patch_model(model, attention="exact", guard=False)
    assert report.config == PatchConfig(attention="exact", guard=False)
    unpatch_model(model)
    with patched(model, linear="int8") as report:
        assert report.config == PatchConfig(linear="int8")


def test_a_keyword_replaces_a_field_of_the_configuration() -> None:
    base = PatchConfig(attention="exact", guard=False)
    with patched(wan(), base, guard=True) as report:
        assert report.config == PatchConfig(attention="exact")
    assert base == PatchConfig(attention="exact", guard=False)


def test_the_keywords_are_all_fields_of_the_configuration() -> None:
    assert list(PatchOptions.__annotations__) == list(PatchConfig.__dataclass_fields__)


@pytest.mark.parametrize(
    ("given", "options", "words"),
    [
        ("int8", {}, "patch_model(model, attention='int8')"),
        ("exact", {}, "patch_model(model, attention='exact')"),
        ({"attention": "exact"}, {}, "expected a PatchConfig"),
        (PatchConfig, {}, "expected a PatchConfig"),
        (None, {"attentoin": "exact"}, "Did you mean 'attention'"),
        (None, {"zzz": 1}, "attention, pv, linear"),
        (None, {"attention": "int7"}, "'int8', 'int4', 'exact', 'sage'"),
    ],
)
def test_what_is_no_configuration_is_refused_with_what_to_write(
    given: Any, options: Any, words: str
) -> None:
    model = wan()
    for call in (patch_model, lambda *a, **k: patched(*a, **k).__enter__()):
        with pytest.raises(ConfigError) as caught:
            call(model, given, **options)
        assert words in str(caught.value)
    assert not is_patched(model)


def test_is_patched_and_report_of() -> None:
    class Pipe:
        transformer, transformer_2 = wan(), wan(num_layers=3)

    pipe = Pipe()
    assert not is_patched(pipe)
    with pytest.raises(NotPatchedError, match="report_of"):
        report_of(pipe)
    report = patch_model(pipe)
    run(pipe.transformer)
    assert is_patched(pipe) and is_patched(pipe.transformer_2)
    again = report_of(pipe)
    assert str(again) == str(report) and again.as_dict() == report.as_dict()
    assert again.guard is report.guard and len(again.guard) == 6
    assert len(report_of(pipe.transformer).pairs) == 6
    unpatch_model(pipe.transformer)
    assert is_patched(pipe) and not is_patched(pipe.transformer)
    assert len(report_of(pipe).pairs) == 9
    unpatch_model(pipe)
    assert not is_patched(pipe)
    with pytest.raises(NotAModelError):
        is_patched("transformer")


def test_half_patched_is_refused_without_a_change() -> None:
    class Pipe:
        transformer, transformer_2 = wan(), wan()

    patch_model(Pipe.transformer)
    with pytest.raises(AlreadyPatchedError):
        patch_model(Pipe())
    assert not is_patched(Pipe.transformer_2)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_has_a_report_of_its_own(how: str) -> None:
    model = wan()
    report = patch_model(model, attention="int4", guard_budget=1e-6)
    twin = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    run(twin)
    assert len(report.guard) == 0 and report.fused == 6
    assert len(report_of(twin).guard) == 6 and report_of(twin).fused == 2
    unpatch_model(model)
    assert is_patched(twin)


def test_reprs_are_short() -> None:
    model = wan()
    report = patch_model(model, attention="exact")
    assert repr(PatchConfig()) == "PatchConfig()"
    assert repr(report.config) == "PatchConfig(attention='exact')"
    assert eval(repr(report.config)) == report.config
    text = "PatchReport(WanTransformer3DModel: 6 of 6 fused, PatchConfig(attention='exact'))"
    assert repr(report) == text
    assert repr(report.pairs) == "PairTable(6 pairs, 6 fused)"
    assert repr(report.pairs[0]) == "SkipPair('blocks.0.attn1', kind='self', runs='two-launch')"
    assert repr(report.guard) == "GuardLog(0 comparisons)"
    # A debugger or a notebook prints what a model carries.
    assert len(repr(vars(model)["_turbo_rcm_patch"])) < 200
