"""Each recipe in a few steps at toy size, and how its networks are read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from diffusers import CogVideoXPipeline
from torch import nn

from tests.training.micro import micro, train_micro
from training.__main__ import STAGES
from training.flow import few_step, ode
from training.loop import Stage
from training.networks import tokenize
from training.recipes import RECIPES
from training.stages import decode
from turbo_rcm_patch.tiny.prompts import DEMO_PROMPTS, caption, clips
from turbo_rcm_patch.video import generate, load_pipeline

WAN, COGVIDEOX = micro("wan"), micro("cogvideox")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two families share a folder."""
    out = tmp_path_factory.mktemp("run")
    for name in ("wan", "cogvideox"):
        train_micro(name, out)
    return dict.fromkeys(("wan", "cogvideox"), out)


def test_a_run_leaves_folders_that_generate(trained: dict[str, Path]) -> None:
    for name, out in trained.items():
        log = (out / name / "log.jsonl").read_text()
        records = [json.loads(line) for line in log.splitlines()]
        assert {record.get("stage") for record in records} >= set(RECIPES[name].stages)
        assert records[-1]["event"] == "finished"
        for model in ("teacher", "student"):
            video = generate(load_pipeline(out / f"{name}_{model}", device="cpu"), DEMO_PROMPTS[0])
            assert video.frames.shape == (9, 32, 32, 3) and video.frames.isfinite().all()
            assert video.settings.steps == 4


def test_an_interrupted_run_ends_as_if_it_had_not_been(trained, tmp_path, monkeypatch) -> None:
    """Interrupted before the student and run again, the student is the same to the last bit; run
    once more, nothing is trained."""

    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setitem(STAGES, "student", interrupted)
        train_micro("wan", tmp_path)
    train_micro("wan", tmp_path)
    name = "wan_student/transformer/diffusion_pytorch_model.safetensors"
    assert (tmp_path / name).read_bytes() == (trained["wan"] / name).read_bytes()

    def trains(stage: Stage, *_: object) -> None:
        assert stage.done, stage.name

    monkeypatch.setattr(Stage, "train", trains)
    train_micro("wan", tmp_path)


def test_ode_is_second_order() -> None:
    """dx/dt = x has the solution x(0) = x(1) / e."""
    start = torch.ones(1, 1, 1, 1, 1, dtype=torch.float64)
    errors = [
        abs(float(ode(lambda x, t: x.double(), start, 1.0, n)) - 0.36787944117) for n in (20, 40)
    ]
    # `ode` reads velocities in fp32, far below these errors
    assert errors[0] / errors[1] > 3.0 and errors[1] < 1e-3


def test_samplers_reach_the_data_when_the_velocity_is_exact() -> None:
    """All mass on one point: v = (x - point) / t, a straight line; it is reached exactly."""
    point = torch.full((2, 1, 1, 2, 2), 0.7)

    def velocity(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return (x - point) / t[:, None, None, None, None]

    noise = torch.randn(point.shape, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(ode(velocity, noise, 1.0, 5), point)
    for steps in (1, 2, 4):
        times = WAN.networks.times(steps)
        found = few_step(velocity, noise, times, torch.Generator().manual_seed(1))
        torch.testing.assert_close(found, point)


def test_the_decoder_in_training_is_the_vae_without_its_clamp() -> None:
    torch.manual_seed(0)
    vae = WAN.networks.build_vae()
    latents = torch.randn(1, *WAN.latent_shape(WAN.buckets[0]))
    with torch.no_grad():
        assert torch.equal(decode(vae, latents).clamp(-1, 1), vae.decode(latents).sample)


def test_the_tokenizer_knows_every_caption() -> None:
    tokenizer = RECIPES["wan"].networks.build_tokenizer()
    for text in map(caption, clips(held_out=True)):
        ids = tokenizer(text).input_ids
        assert len(ids) <= tokenizer.model_max_length and tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


@torch.no_grad()
def test_a_cogvideox_is_read_as_its_pipeline_reads_it() -> None:
    """Text, state, times, rotary embeddings, order of axes: the latents of diffusers' DDIM."""
    torch.manual_seed(0)
    networks = COGVIDEOX.networks
    transformer = networks.build_transformer().eval()
    nn.init.normal_(transformer.proj_out.weight, std=0.05)
    pipe = CogVideoXPipeline(
        networks.build_tokenizer(), networks.build_text_encoder().eval(),
        networks.build_vae().eval(), transformer, networks.scheduler(),
    )  # fmt: skip
    pipe.set_progress_bar_config(disable=True)
    text = networks.encode_text(pipe.text_encoder, *tokenize(pipe.tokenizer, [DEMO_PROMPTS[0]]))
    embeds, _ = pipe.encode_prompt(DEMO_PROMPTS[0], None, False, max_sequence_length=24)
    assert torch.equal(text, embeds)
    noise = torch.randn(1, 8, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    for steps in (1, 2, 4):
        theirs = pipe(
            prompt_embeds=embeds, height=32, width=32, num_frames=9, num_inference_steps=steps,
            guidance_scale=1.0, latents=noise.transpose(1, 2), output_type="latent",
        ).frames  # fmt: skip
        flow = networks.velocity(transformer, embeds)
        ours = few_step(flow, noise, networks.times(steps), None, renoise=False)
        assert not torch.allclose(ours, noise, atol=0.1)
        torch.testing.assert_close(ours, theirs.transpose(1, 2), rtol=1e-4, atol=1e-4)
