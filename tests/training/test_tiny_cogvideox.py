"""The tiny CogVideoX: its network read as a flow, and a few steps of every stage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from diffusers import CogVideoXPipeline
from torch import nn

from training.families import CogVideoX, build_tokenizer, family_of_folder, small, tokenize
from training.flow import few_step
from training.stage import Run
from training.train import train
from turbo_rcm_patch.tiny.prompts import DEMO_PROMPTS
from turbo_rcm_patch.video import generate, load_pipeline

FAMILY = CogVideoX()
MICRO = small(FAMILY.recipe)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tiny") / "run"
    train(Run(out, torch.device("cpu")), FAMILY, MICRO)
    return out


@pytest.fixture(scope="module")
def pipe() -> CogVideoXPipeline:
    """Micro parts with random weights, whose network predicts something."""
    torch.manual_seed(0)
    transformer = FAMILY.build_transformer(MICRO).eval()
    nn.init.normal_(transformer.proj_out.weight, std=0.05)
    made = CogVideoXPipeline(
        build_tokenizer(MICRO, FAMILY.source.words),
        FAMILY.build_text_encoder(MICRO).eval(),
        FAMILY.build_vae(MICRO).eval(),
        transformer,
        FAMILY.scheduler(),
    )
    made.set_progress_bar_config(disable=True)
    return made


def test_text_is_embedded_as_the_pipeline_does(pipe: CogVideoXPipeline) -> None:
    ids, mask = tokenize(pipe.tokenizer, list(DEMO_PROMPTS[:2]), 24)
    own = FAMILY.encode_text(pipe.text_encoder, ids, mask)
    theirs, _ = pipe.encode_prompt(list(DEMO_PROMPTS[:2]), None, False, max_sequence_length=24)
    assert torch.equal(own, theirs)


@pytest.mark.parametrize("steps", [1, 2, 4])
@torch.no_grad()
def test_following_the_flow_is_what_the_pipeline_does(pipe: CogVideoXPipeline, steps: int) -> None:
    """State, times, rotary embeddings, order of axes: the same latents as from diffusers' DDIM."""
    noise = torch.randn(1, 8, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    embeds, _ = pipe.encode_prompt(DEMO_PROMPTS[0], None, False, max_sequence_length=24)
    theirs = pipe(
        prompt_embeds=embeds, height=32, width=32, num_frames=9, num_inference_steps=steps,
        guidance_scale=1.0, latents=noise.transpose(1, 2), output_type="latent",
    ).frames  # fmt: skip
    field = FAMILY.velocity(pipe.transformer, embeds)
    own = few_step(field, noise, FAMILY.times(steps), None, renoise=False)
    assert not torch.allclose(own, noise, atol=0.1)
    torch.testing.assert_close(own, theirs.transpose(1, 2), rtol=1e-4, atol=1e-4)


def test_the_run_leaves_folders_that_generate(trained: Path) -> None:
    records = [json.loads(line) for line in (trained / "log.jsonl").read_text().splitlines()]
    assert {r.get("stage") for r in records} >= {"vae", "teacher", "student"}
    for name in ("cogvideox_teacher", "cogvideox_student"):
        assert family_of_folder(trained / name).name == "cogvideox"
        made = generate(load_pipeline(trained / name, device="cpu"), DEMO_PROMPTS[0])
        assert made.settings.steps == 4 and made.settings.sampler == "scheduler"
        assert made.frames.shape == (9, 32, 32, 3) and torch.isfinite(made.frames).all()
