"""Relatives of Wan beyond the table of models: AnyFlow in its pipelines, a pipeline that holds
Wan's own class, classes that are not served, SLA where its author's kernel cannot run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import (
    AnyFlowFARPipeline,
    AnyFlowPipeline,
    FlowMapEulerDiscreteScheduler,
    WanAnimate2Transformer3DModel,
)
from torch import Tensor

from tests.measures import relative_l2
from tests.patching import turbodiffusion
from tests.patching.models import ANYFLOWS, classes, dicts, named, run
from tests.patching.test_changes import NAMED, check
from turbo_rcm_patch import is_patched, patch_model, patched, report_of, unpatch_model
from turbo_rcm_patch.errors import UnknownArchitectureError

ANYFLOW_PIPELINES = {"anyflow": AnyFlowPipeline, "anyflow-far": AnyFlowFARPipeline}
NO_PARTS: Any = dict.fromkeys(("tokenizer", "text_encoder", "vae"))


def sampled(pipe: Any) -> Tensor:
    """Latents of three frames; the causal pipeline makes a chunk of each, and compresses the first
    chunk's keys for the third."""
    generator = torch.Generator().manual_seed(3)
    text = torch.randn(1, 7, 16, generator=generator)
    far = {"chunk_partition": [1, 1, 1]} if isinstance(pipe, AnyFlowFARPipeline) else {}
    frames: Tensor = pipe(
        prompt_embeds=text, height=64, width=80, num_frames=9, num_inference_steps=2,
        generator=generator, output_type="latent", **far,
    ).frames  # fmt: skip
    assert frames.shape == (1, 4, 3, 8, 10)
    return frames


@pytest.mark.supports(classes(ANYFLOWS), "its pipeline")
@pytest.mark.parametrize("one", ANYFLOWS, ids=str)
def test_anyflows_pipelines_make_the_same_latents(one: Any) -> None:
    scheduler = FlowMapEulerDiscreteScheduler()
    pipe = ANYFLOW_PIPELINES[one.name](**NO_PARTS, transformer=one.model(), scheduler=scheduler)
    pipe.set_progress_bar_config(disable=True)
    expected = sampled(pipe)
    with patched(pipe, attention="exact", guard=False):
        assert relative_l2(sampled(pipe), expected) <= 3e-6
    report = patch_model(pipe, attention="int8", fidelity=None)
    made = sampled(pipe)
    assert 0 < relative_l2(made, expected) <= 0.03
    assert all(words.startswith("fused") for words in report.ran().values())
    assert not report.guard.decisions
    # The guard runs blocks twice; the causal model's cache of keys is the same with and without.
    unpatch_model(pipe)
    with patched(pipe, attention="int8", guard=False):
        assert torch.equal(sampled(pipe), made)
    assert torch.equal(sampled(pipe), expected)


@pytest.mark.supports("AnyFlowFARTransformer3DModel", "attention mask")
def test_a_forward_that_fills_the_cache_is_the_authors() -> None:
    one = named("anyflow-far")
    model, inputs, reference = one.model(), one.inputs(), one.inputs()
    for given in (inputs, reference):
        given |= {"hidden_states": torch.ones(2, 2, 4, 8, 10), "chunk_partition": [1, 1]}
        given |= {"timestep": torch.zeros(2, 2), "r_timestep": torch.zeros(2, 2)}
        given["kv_cache_flag"]["is_cache_step"] = True
    with torch.no_grad():
        model(**reference)
        patch_model(model, attention="int8")
        model(**inputs)
    assert all("fills the cache" in words for words in report_of(model).ran().values())
    for made, expected in zip(inputs["kv_cache"], reference["kv_cache"], strict=True):
        assert all(torch.equal(made[name], expected[name]) for name in made)


@pytest.mark.supports(classes(ANYFLOWS), "LoRA", "offloading, casting")
@pytest.mark.parametrize(
    ("name", "linear"),
    [("lora", "int8"), ("layerwise-casting", "as-is"), ("offloaded-leaves", "int8"),
     ("hook-attention", "as-is"), ("hook-norm-of-q", "int8"), ("other-norm", "as-is")],
)  # fmt: skip
@pytest.mark.parametrize("one", ANYFLOWS, ids=str)
def test_a_patched_relative_follows_a_change(one: Any, name: str, linear: str) -> None:
    check(one, NAMED[name], linear, "patch first")


def animate_2() -> Any:
    return WanAnimate2Transformer3DModel(
        text_len=7, in_dim=8, dim=32, ffn_dim=32, freq_dim=16, text_dim=16, out_dim=4,
        num_heads=2, num_layers=1, use_img_emb=False,
    )  # fmt: skip


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
