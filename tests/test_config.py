"""PatchConfig validates itself and cannot be changed."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from turbo_rcm_patch.config import KINDS, PatchConfig
from turbo_rcm_patch.errors import ConfigError


def test_defaults_are_valid_and_fuse_everything() -> None:
    config = PatchConfig()
    assert config.attention == "auto"
    assert config.kinds == KINDS
    assert config.guard
    assert config.linear == "as-is"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("attention", "int2"),
        ("pv", "fp4"),
        ("linear", "int4"),
        ("impl", "cuda"),
        ("form", "three-launch"),
        ("smooth_k", 1),
        ("cuda_graphs", "auto"),
        ("guard", "yes"),
        ("guard_budget", 0.0),
        ("guard_budget", float("inf")),
        ("guard_budget", float("nan")),
        ("guard_budget", "x"),
        ("sla_topk", 0.0),
        ("sla_topk", 1.5),
        ("sla_topk", True),
        ("sla_topk", float("nan")),
        ("sla_topk", "0.1"),
        ("sla_topk", None),
        ("kinds", ()),
        ("kinds", "self"),
        ("kinds", 5),
        ("kinds", ("self", "sideways")),
    ],
)
def test_a_bad_field_is_named_with_its_value(field: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        PatchConfig(**{field: value})
    assert f"PatchConfig.{field}" in str(caught.value)
    assert repr(value) in str(caught.value)


def test_unknown_choices_list_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"auto.*int8.*int4.*exact.*sage"):
        PatchConfig(attention="int2")


def test_is_frozen_keyword_only_and_hashable() -> None:
    config = PatchConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.attention = "exact"
    with pytest.raises(TypeError):
        PatchConfig("int8")
    assert hash(config) == hash(PatchConfig())
    assert dataclasses.replace(config, attention="exact") == PatchConfig(attention="exact")


@pytest.mark.parametrize(
    "other",
    [{"guard": False}, {"attention": "exact"}, {"attention": "int4"}, {"precision": "fixed"}],
)
def test_precision_is_chosen_with_a_guard_and_int8(other: dict[str, Any]) -> None:
    assert PatchConfig().chooses and PatchConfig(attention="int8").chooses
    assert not PatchConfig(**other).chooses


def test_kinds_of_any_collection_are_the_same_tuple() -> None:
    expected = PatchConfig(kinds=("self", "cross"))
    for kinds in (["self", "cross"], {"cross", "self"}, dict.fromkeys(("cross", "self"))):
        config = PatchConfig(kinds=kinds)  # type: ignore[arg-type]
        assert config == expected and config.kinds == ("self", "cross")
        assert hash(config) == hash(expected)
