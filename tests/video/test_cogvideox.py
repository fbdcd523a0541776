"""CogVideoX from a folder to a verdict, on an untrained model; and on the shipped one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from diffusers import CogVideoXDPMScheduler

from tests.video.micro import QUICK, SMALL, options, save
from tests.video.micro_cogvideox import micro_cogvideox
from turbo_rcm_patch.__main__ import main
from turbo_rcm_patch.errors import ConfigError
from turbo_rcm_patch.video import generate
from turbo_rcm_patch.video.generation import settings_for
from turbo_rcm_patch.video.load import load_pipeline
from turbo_rcm_patch.video.pipelines import trimmed
from turbo_rcm_patch.video.settings import Settings

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


def test_settings_are_those_of_the_family(pipe, folder: Path, tmp_path: Path) -> None:
    settings = settings_for(pipe)
    assert (settings.sampler, settings.steps, settings.guidance_scale) == ("scheduler", 50, 6.0)
    assert (settings.height, settings.width, settings.num_frames) == (480, 720, 49)
    own = Path(shutil.copytree(folder, tmp_path / "own"))
    (own / "turbo_rcm.json").write_text('{"sampler": "scheduler", "steps": 4, "height": 64}')
    settings = settings_for(load_pipeline(own, device="cpu"), width=32)
    assert (settings.steps, settings.height, settings.width) == (4, 64, 32)


@pytest.mark.supports("CogVideoXTransformer3DModel", "rCM sampler")
def test_the_rcm_sampler_is_refused(pipe) -> None:
    with pytest.raises(ConfigError, match=r"CogVideoXPipeline.*scheduler.*rectified flow"):
        settings_for(pipe, sampler="rcm", steps=4, guidance_scale=1.0)
    with pytest.raises(ConfigError, match="CogVideoXPipeline"):
        generate(pipe, PROMPT, sampler="lightning", **SMALL)


def test_frames_that_fill_a_patch_in_time_are_dropped(small: Settings) -> None:
    """CogVideoX 1.5: 9 frames are 3 of latents, denoised as 4."""
    made = micro_cogvideox(patch_t=2).to(torch.bfloat16)
    made.vae.float()
    settings = Settings.for_model(None, **(small.as_dict() | {"num_frames": 9}))
    found = generate(made, PROMPT, settings=settings)
    assert found.frames.shape[0] == 9


def test_the_first_frames_are_those_that_are_dropped(small: Settings) -> None:
    """As the author's pipeline does."""
    made = micro_cogvideox(patch_t=2).to(torch.bfloat16)
    settings = Settings.for_model(None, **(small.as_dict() | {"num_frames": 9}))
    latents = torch.arange(4.0).view(1, 4, 1, 1, 1).expand(1, 4, 4, 8, 8) * 1e6
    kept = trimmed(made, latents, settings.num_frames)
    assert kept[0, :, 0, 0, 0].tolist() == [1e6, 2e6, 3e6]


def test_a_scheduler_with_noise_of_its_own_repeats_itself(folder: Path, small: Settings) -> None:
    made = load_pipeline(folder, device="cpu")
    made.scheduler = CogVideoXDPMScheduler.from_config(made.scheduler.config)
    state = torch.get_rng_state()
    first, second = (generate(made, PROMPT, settings=small).latents for _ in range(2))
    assert torch.equal(first, second) and torch.equal(torch.get_rng_state(), state)


def test_the_command_line_takes_a_folder(folder: Path, tmp_path: Path, capsys) -> None:
    given = options(model=folder, prompt=PROMPT, guidance_scale=1, out=tmp_path / "video.mp4")
    assert main(["generate", *QUICK, *given]) == 0
    assert (tmp_path / "video.mp4").is_file() and "fused" in capsys.readouterr().out
