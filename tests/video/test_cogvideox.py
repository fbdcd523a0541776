"""CogVideoX from a folder to a verdict, on an untrained model; and on the shipped one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.video.micro import QUICK, SMALL, options, save
from tests.video.micro_cogvideox import micro_cogvideox
from turbo_rcm_patch import PatchConfig
from turbo_rcm_patch.__main__ import main
from turbo_rcm_patch.video import generate
from turbo_rcm_patch.video.generation import encode, recorded_calls, settings_for
from turbo_rcm_patch.video.load import load_pipeline
from turbo_rcm_patch.video.measures import TIMES, measure_network
from turbo_rcm_patch.video.pipelines import draw, noised, trimmed
from turbo_rcm_patch.video.settings import Settings
from turbo_rcm_patch.video.source import Source

pytestmark = pytest.mark.usefixtures("no_pictures_here")
PROMPT = "a red circle moves left"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(micro_cogvideox(), tmp_path_factory.mktemp("model") / "cogvideox")


@pytest.fixture(scope="module")
def pipe(folder: Path):
    return load_pipeline(folder, device="cpu")


@pytest.fixture(scope="module")
def small(pipe) -> Settings:
    return settings_for(pipe, steps=2, guidance_scale=1.0, **SMALL)


def test_frames_that_fill_a_patch_in_time_are_dropped(small: Settings) -> None:
    """CogVideoX 1.5: 9 frames are 3 of latents, denoised as 4."""
    made = micro_cogvideox(patch_t=2).to(torch.bfloat16)
    made.vae.float()
    settings = Settings.for_model(None, **(small.as_dict() | {"num_frames": 9}))
    found = generate(made, PROMPT, settings=settings)
    assert found.frames.shape[0] == 9
    clean = trimmed(made, found.latents, 9)
    conditioning = encode(made, Source(PROMPT), settings)
    number = measure_network(made, conditioning, clean, settings, PatchConfig())
    assert 0 < number.unpatched < 0.2 and number.ratio > 0


def test_the_first_frames_are_those_that_are_dropped(small: Settings) -> None:
    """As the author's pipeline does; for the network they come back as copies of the first."""
    made = micro_cogvideox(patch_t=2).to(torch.bfloat16)
    settings = Settings.for_model(None, **(small.as_dict() | {"num_frames": 9}))
    latents = torch.arange(4.0).view(1, 4, 1, 1, 1).expand(1, 4, 4, 8, 8) * 1e6
    kept = trimmed(made, latents, settings.num_frames)
    assert kept[0, :, 0, 0, 0].tolist() == [1e6, 2e6, 3e6]
    states = noised(made, kept, 0, TIMES)
    assert len(states) == 3
    for noisy, _ in states:
        seen = noisy[0, :, 0, 0, 0].float()
        wanted = torch.tensor([1.0, 1.0, 2.0, 3.0])
        torch.testing.assert_close(seen / seen[0], wanted, rtol=2e-2, atol=0)


def test_the_networks_inputs_have_the_schedules_noise(pipe, small: Settings) -> None:
    """Three times, with the noise levels of the rectified-flow times, added by the scheduler."""
    clean, noise = torch.randn(1, 2, 4, 8, 8), draw((1, 2, 4, 8, 8), 5)
    conditioning = encode(pipe, Source(PROMPT), small)
    states = noised(pipe, clean, 5, TIMES)
    calls = recorded_calls(pipe, conditioning, small, states)
    assert len(calls) == 3 and all(one["image_rotary_emb"] is not None for one in calls)
    for one in calls:
        wanted = pipe.scheduler.add_noise(clean, noise, one["timestep"].long())
        torch.testing.assert_close(one["hidden_states"], wanted.bfloat16())
        assert torch.equal(one["encoder_hidden_states"], conditioning["prompt_embeds"])
    times = [float(one["timestep"]) for one in calls]
    assert times == sorted(times, reverse=True)


def test_the_command_line_takes_a_folder(folder: Path, tmp_path: Path, capsys) -> None:
    given = options(model=folder, prompt=PROMPT, guidance_scale=1, out=tmp_path / "video.mp4")
    assert main(["generate", *QUICK, *given]) == 0
    assert (tmp_path / "video.mp4").is_file() and "fused" in capsys.readouterr().out
