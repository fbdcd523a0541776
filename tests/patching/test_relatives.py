"""Relatives of Wan beyond the table of models: a rollout of a causal one, a pipeline that holds
Wan's own class, classes that are not served, and SLA where its author's kernel cannot run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import LucyEditPipeline, WanAnimate2Transformer3DModel
from torch import Tensor

from tests.measures import relative_l2
from tests.patching import turbodiffusion
from tests.patching.models import dicts, named, run, wan
from turbo_rcm_patch import is_patched, patch_model, patched, report_of, unpatch_model
from turbo_rcm_patch.errors import UnknownArchitectureError

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


def test_lucy_edit_is_wans_class_with_twice_the_channels() -> None:
    one = named("gate-per-token")
    model, inputs = wan(in_channels=8).eval().requires_grad_(False), one.inputs()
    inputs["hidden_states"] = torch.cat([inputs["hidden_states"]] * 2, dim=1)
    expected = run(model, inputs)
    none: Any = dict.fromkeys(("tokenizer", "text_encoder", "vae", "scheduler"))
    pipe = LucyEditPipeline(transformer=model, **none)
    report = patch_model(pipe, attention="exact", guard=False)
    assert report.fused == 6
    assert relative_l2(run(model, inputs), expected) <= 3e-6
    assert all(words.startswith("fused") for words in report.ran().values())
    unpatch_model(pipe)


def animate_2() -> Any:
    return WanAnimate2Transformer3DModel(
        text_len=7, in_dim=8, dim=32, ffn_dim=32, freq_dim=16, text_dim=16, out_dim=4,
        num_heads=2, num_layers=1, use_img_emb=False,
    )  # fmt: skip


def test_a_class_that_does_not_fit_says_why() -> None:
    with pytest.raises(UnknownArchitectureError, match=r"Run it unpatched.*block mask"):
        patch_model(animate_2())


@pytest.mark.parametrize("served", ["transformer", "transformer_2"])
def test_of_two_experts_both_are_patched_or_neither(served: str) -> None:
    other = "transformer" if served == "transformer_2" else "transformer_2"
    pipe = SimpleNamespace(**{served: named("t2v").model(), other: animate_2()})
    before = [dicts(getattr(pipe, name)) for name in (served, other)]
    with pytest.raises(UnknownArchitectureError) as raised:
        patch_model(pipe)
    assert str(raised.value).startswith(f"{other}; ")
    assert "WanAnimate2Transformer3DModel" in raised.value.got
    assert [dicts(getattr(pipe, name)) for name in (served, other)] == before
    # The remedy that the message names works.
    assert f"patch_model(pipe.{served})" in raised.value.remedy
    patch_model(getattr(pipe, served))
    assert is_patched(pipe)


def test_sla_is_not_compared_where_its_authors_kernel_cannot_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = named("turbo-sla")
    model, inputs = one.model(), one.inputs()
    with patched(model, attention="int8", guard=False):
        expected = run(model, inputs)

    def launch(*_: Any) -> None:  # what Triton says on a CPU
        raise ValueError("Pointer argument (at 0) cannot be accessed from Triton (cpu tensor?)")

    monkeypatch.setattr(turbodiffusion.SparseLinearAttention, "blocks", launch)
    with pytest.raises(ValueError, match="cpu tensor"):
        run(model, inputs)
    report = patch_model(model, attention="int8")
    assert torch.equal(run(model, inputs), expected)
    assert {record.verdict for record in report.guard} == {"not compared"}
    assert "not compared" in str(report.guard)
    assert "cpu tensor" in str(report.guard)
