"""Relatives of Wan beyond the table of models: a whole rollout of a causal one, and pipelines whose
transformer is Wan's own class."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.measures import relative_l2
from tests.patching.models import named
from turbo_rcm_patch import patch_model, patched, report_of, unpatch_model

HEADS, DIM = 2, 64


def rollout(model: Any) -> Tensor:
    """Three chunks of one frame, each denoised once and then written into the cache, by which the
    first is compressed: [B, 3, C, H, W]."""
    generator = torch.Generator().manual_seed(3)
    tokens, compressed = 20, 4
    held = {"compressed_cache": 2 * compressed, "full_cache": 2 * tokens}
    caches = [
        {name: torch.zeros(2, 1, HEADS, n, DIM) for name, n in held.items()} for _ in model.blocks
    ]
    noise = torch.randn(1, 3, 4, 8, 10, generator=generator)
    text = torch.randn(1, 7, 16, generator=generator)
    done: list[Tensor] = []
    for chunk in range(3):
        step: dict[str, Any] = {
            "encoder_hidden_states": text, "kv_cache": caches, "return_dict": False,
            "chunk_partition": [1] * (chunk + 1), "r_timestep": torch.zeros(1, 1),
        }  # fmt: skip
        flags: dict[str, Any] = {"is_cache_step": False, "num_cached_chunks": chunk}
        with torch.no_grad():
            made, _ = model(
                hidden_states=noise[:, chunk : chunk + 1], timestep=torch.full((1, 1), 900.0),
                kv_cache_flag=flags, **step,
            )  # fmt: skip
            done.append(made)
            seen = torch.cat(done, dim=1)
            step["r_timestep"] = torch.zeros(1, chunk + 1)
            flags = {"is_cache_step": True, "num_cached_chunks": chunk}
            model(
                hidden_states=seen, timestep=torch.zeros(1, chunk + 1), kv_cache_flag=flags, **step
            )
    return torch.cat(done, dim=1)


def test_a_causal_rollout_is_its_authors() -> None:
    model = named("anyflow-far").model()
    expected = rollout(model)
    with patched(model, attention="exact", guard=False):
        assert relative_l2(rollout(model), expected) <= 3e-6
        assert all("fills the cache" in words for words in report_of(model).ran().values())
    report = patch_model(model, attention="int8", fidelity=None)
    made = rollout(model)
    assert 0 < relative_l2(made, expected) <= 0.03
    assert not report.guard.decisions
    # The guard runs blocks twice; the cached keys are the same with it and without.
    unpatch_model(model)
    with patched(model, attention="int8", guard=False):
        assert torch.equal(rollout(model), made)
