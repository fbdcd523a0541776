"""The caches and block skippers of diffusers, and one of TeaCache's kind, beside those in
`test_around`: patched before or after, the output is that of the unpatched model with the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import LayerSkipConfig
from diffusers.hooks import (
    MagCacheConfig,
    SeaCacheConfig,
    TaylorSeerCacheConfig,
    apply_layer_skip,
)

from tests.patching.wan import CASES, relative, run, wan
from turbo_rcm_patch import PatchConfig, patch_model, unpatch_model


def mag(model: Any) -> None:
    ratios = torch.ones(6)
    model.enable_cache(
        MagCacheConfig(threshold=0.5, max_skip_steps=2, num_inference_steps=6, mag_ratios=ratios)
    )


def sea(model: Any) -> None:
    model.enable_cache(SeaCacheConfig(threshold=5.0))


def taylor(model: Any, **more: Any) -> None:
    model.enable_cache(
        TaylorSeerCacheConfig(cache_interval=2, disable_cache_before_step=1, **more)
    )


def taylor_lite(model: Any) -> None:
    taylor(model, use_lite_mode=True)


def taylor_of_attention(model: Any) -> None:
    taylor(model, cache_identifiers=[r"blocks.*attn1$", r"blocks.*attn2$"])


def taylor_of_linears(model: Any) -> None:
    taylor(model, cache_identifiers=[r"blocks.*ffn\.net\.2", r"blocks.*to_out\.0"])


def skip_layers(model: Any) -> None:
    apply_layer_skip(model, LayerSkipConfig(indices=[1], fqn="blocks"))


def tea(model: Any) -> None:
    """TeaCache replaces the network's forward and runs its blocks on some steps only."""
    own, kept, step = type(model).forward, [], [0]

    def forward(*args: Any, **kwargs: Any) -> Any:
        step[0] += 1
        if step[0] % 2 == 1 or not kept:
            kept[:] = [own(model, *args, **kwargs)]
        return kept[0]

    model.forward = forward


#: Whether the guard may be on: it calls a hooked Linear besides, and TaylorSeer counts its calls.
FEATURES = [
    (mag, True),
    (sea, True),
    (taylor_lite, True),
    (taylor_of_attention, True),
    (taylor_of_linears, False),
    (skip_layers, True),
    (tea, True),
]


def loop(model: Any) -> torch.Tensor:
    outputs = []
    for step in range(6):
        at = {"step_index": step, "num_inference_steps": 6, "sigma": 1.0 - step / 6}
        inputs = CASES[0].inputs() | {"timestep": torch.tensor([990.0 - 150 * step])}
        with model.cache_context("cond", **at):
            outputs.append(run(model, **inputs))
    return torch.stack(outputs)


@pytest.mark.parametrize("patch_first", [True, False], ids=["patch-first", "patch-after"])
@pytest.mark.parametrize("linear", ["as-is", "int8"])
@pytest.mark.parametrize(
    ("feature", "guarded"), FEATURES, ids=[feature.__name__ for feature, _ in FEATURES]
)
def test_with_a_cache(
    feature: Callable[[Any], None], guarded: bool, linear: Any, patch_first: bool
) -> None:
    model = wan(num_layers=3)
    without = loop(model)
    feature(model)
    expected = loop(model)
    assert relative(expected, without) > 1e-3, "it must have an effect"
    model = wan(num_layers=3)
    config = PatchConfig(attention="exact", linear=linear, guard=guarded)
    if patch_first:
        patch_model(model, config)
    feature(model)
    if not patch_first:
        patch_model(model, config)
    found = relative(loop(model), expected)
    assert found < 1e-5 if linear == "as-is" else 1e-4 < found < 0.02
    model._reset_stateful_cache() if feature not in (tea, skip_layers) else None
    unpatch_model(model)
