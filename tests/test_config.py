"""PatchConfig validates itself and cannot be changed."""

from __future__ import annotations

import dataclasses

import pytest

from turbo_rcm_patch.config import PatchConfig
from turbo_rcm_patch.errors import ConfigError


def test_defaults_are_valid_and_fuse_everything() -> None:
    config = PatchConfig()
    assert config.attention == "auto"
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
        ("guard", "yes"),
        ("sla_topk", 0.0),
        ("sla_topk", 1.5),
        ("sla_topk", True),
        ("sla_topk", float("nan")),
        ("sla_topk", "0.1"),
        ("sla_topk", None),
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
