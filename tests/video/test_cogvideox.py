"""CogVideoX from a folder to a verdict, on an untrained model; and on the shipped one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.video.micro import QUICK, SMALL, options, save
from tests.video.micro_cogvideox import micro_cogvideox
from turbo_rcm_patch.__main__ import main
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


def test_the_command_line_takes_a_folder(folder: Path, tmp_path: Path, capsys) -> None:
    given = options(model=folder, prompt=PROMPT, guidance_scale=1, out=tmp_path / "video.mp4")
    assert main(["generate", *QUICK, *given]) == 0
    assert (tmp_path / "video.mp4").is_file() and "fused" in capsys.readouterr().out
