"""cache-dit beside the patch (`pip install cache-dit`): a patched model caches the steps that the
unpatched one does, in either order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.measures import relative_l2
from tests.patching.models import named, wan
from turbo_rcm_patch import patch_model, report_of, unpatch_model

cache_dit = pytest.importorskip("cache_dit", reason="needs the package cache-dit")

STEPS, LAYERS = 5, 3


def enable_cache(model: Any) -> None:
    """Compute every block in the first step, and the first block alone in the others."""
    config = cache_dit.DBCacheConfig(
        Fn_compute_blocks=1, Bn_compute_blocks=0, max_warmup_steps=1, residual_diff_threshold=10.0,
        enable_separate_cfg=False, num_inference_steps=STEPS,
    )  # fmt: skip
    cache_dit.enable_cache(model, cache_config=config)


def sampled(model: Any) -> tuple[Tensor, int]:
    """A few Euler steps, and how many blocks ran in them."""
    ran: list[int] = []
    hooks = [
        block.attn1.to_q.register_forward_hook(lambda *_: ran.append(1)) for block in model.blocks
    ]
    inputs = named("t2v").inputs()
    for step in range(STEPS):
        inputs["timestep"] = torch.full((2,), 900.0 - 150 * step)
        with torch.no_grad():
            inputs["hidden_states"] = inputs["hidden_states"] - 0.2 * model(**inputs)[0]
    for hook in hooks:
        hook.remove()
    return inputs["hidden_states"], len(ran)


@pytest.mark.parametrize("order", ["patch first", "cache first"])
@pytest.mark.parametrize("attention", ["exact", "int8"])
def test_a_patched_model_caches_what_the_unpatched_one_does(attention: Any, order: str) -> None:
    model, reference = (wan(num_layers=LAYERS).eval().requires_grad_(False) for _ in range(2))
    whole, _ = sampled(reference)
    enable_cache(reference)
    expected, blocks = sampled(reference)
    assert blocks == LAYERS + STEPS - 1
    assert relative_l2(expected, whole) > 0.01
    if order == "cache first":
        enable_cache(model)
    patch_model(model, attention=attention, guard=False)
    if order == "patch first":
        enable_cache(model)
    made, count = sampled(model)
    assert count == blocks
    assert relative_l2(made, expected) <= (3e-6 if attention == "exact" else 0.03)
    assert all(words.startswith("fused") for words in report_of(model).ran().values())
    unpatch_model(model)
    assert not any("forward" in vars(block) for block in model.blocks)
    cache_dit.disable_cache(model)
    assert torch.equal(sampled(model)[0], whole)
