"""PatchConfig validates itself and cannot be changed."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import pickle

import numpy as np
import pytest
from torch import nn

from turbo_rcm_patch import patch_model
from turbo_rcm_patch.config import PatchConfig
from turbo_rcm_patch.errors import ConfigError

BAD: dict[str, list[object]] = {
    "attention": ["int2"], "pv": ["fp4"], "linear": ["int4"], "impl": ["cuda"],
    "form": ["three-launch"], "smooth_k": [1], "guard": ["yes"],
    "sla_topk": [0.0, 1.5, True, float("nan"), "0.1", None],
}  # fmt: skip


@pytest.mark.parametrize(("field", "value"), [(f, one) for f in BAD for one in BAD[f]])
def test_a_bad_field_is_named_with_its_value(field: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        PatchConfig(**{field: value})
    assert f"PatchConfig.{field}" in str(caught.value)
    assert repr(value) in str(caught.value)


def test_unknown_choices_list_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"auto.*int8.*int4.*exact.*sage"):
        PatchConfig(attention="int2")


#: Arguments of `PatchConfig` or of `patch_model` after the model, and what the error says to do.
WRONG = [
    (("int8",), {}, "as keywords: attention='int8'"),
    (({"pv": "fp8", "guard": False},), {}, "as keywords: attention='int8'"),
    ((), {"atention": "int8"}, "Did you mean 'attention'"),
    ((), {"attention": "int8", "zzz": 1}, "sla_topk; got zzz."),
]


@pytest.mark.parametrize(("values", "options", "words"), WRONG)
def test_what_is_no_field_is_explained_alike_everywhere(values, options, words) -> None:
    model = nn.Linear(2, 2)
    calls = {
        "PatchConfig": lambda: PatchConfig(*values, **options),
        "patch_model": lambda: patch_model(model, *values, **options),
        "replace": lambda: dataclasses.replace(PatchConfig(), **options),
    }
    for name, call in calls.items():
        if name == "replace" and values:
            continue
        with pytest.raises(ConfigError) as caught:
            call()
        assert words in str(caught.value), name


def test_the_signature_shows_the_fields() -> None:
    assert list(inspect.signature(PatchConfig).parameters) == [
        field.name for field in dataclasses.fields(PatchConfig)
    ]
    config = PatchConfig(pv="bf16")
    assert copy.deepcopy(config) == pickle.loads(pickle.dumps(config)) == config


def test_numbers_of_numpy_can_be_written_as_json() -> None:
    config = PatchConfig(fidelity=np.float32(0.5), sla_topk=np.float32(0.25))
    assert json.dumps(dataclasses.asdict(config)).endswith('"fidelity": 0.5, "sla_topk": 0.25}')


def test_is_frozen_and_hashable() -> None:
    config = PatchConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.attention = "exact"
    assert hash(config) == hash(PatchConfig())
    assert dataclasses.replace(config, attention="exact") == PatchConfig(attention="exact")
