"""diffusers' pipelines of the rest of the Wan family, tiny and untrained: patched, guarded on the
first and the last step, and as before afterwards."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from diffusers import SkyReelsV2DiffusionForcingPipeline
from PIL import Image

from tests.measures import relative_l2
from tests.video.micro import SMALL, animate, chronoedit, skyreels, vace
from turbo_rcm_patch import RCMScheduler, patch_model, unpatch_model

PICTURE = {"image": Image.new("RGB", (32, 32), "teal"), "max_sequence_length": 512}
#: The pose video says how many frames there will be.
FACES: dict[str, Any] = {
    "num_frames": None,
    "pose_video": [Image.new("RGB", (32, 32), "black")] * 5,
    "face_video": [Image.new("RGB", (16, 16), "pink")] * 5,
    "segment_frame_length": 5,
}
forcing = partial(skyreels, SkyReelsV2DiffusionForcingPipeline)
PLAIN = {"guidance_scale": 1.0}
FIRST, LAST = (0, "first"), (3, "last")
#: Pipeline, how it is called beside the usual, and the steps on which the guard looks.
CASES: dict[str, tuple[Callable[[], Any], dict[str, Any], set[tuple[int, str]]]] = {
    "vace-rcm": (vace, PLAIN, {FIRST, LAST}),
    "animate-rcm": (animate, PICTURE | FACES | PLAIN, {FIRST, LAST}),
    "chronoedit": (chronoedit, PICTURE | PLAIN, {FIRST, LAST}),
    "skyreels": (skyreels, {}, {FIRST, LAST}),
    "skyreels-forcing": (forcing, {}, {FIRST}),  # Its times are a frame's, not the scheduler's.
    # Two blocks of two frames, the second two steps after the first, with a mask: its author's.
    "skyreels-forcing-causal": (
        forcing,
        {"num_frames": 13, "ar_step": 2, "causal_block_size": 2},
        {FIRST},
    ),
}
CLASSES = ("WanVACETransformer3DModel", "WanAnimateTransformer3DModel")
MORE = ("ChronoEditTransformer3DModel", "SkyReelsV2Transformer3DModel")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.supports((*CLASSES, *MORE), "its pipeline")
@pytest.mark.supports(CLASSES, "rCM sampler")
def test_patched_guarded_and_put_back(name: str) -> None:
    make, more, looked = CASES[name]
    torch.manual_seed(0)
    pipe = make()
    if "rcm" in name:
        pipe.scheduler = RCMScheduler()
    pipe.set_progress_bar_config(disable=True)
    call = {**SMALL, "num_inference_steps": 4, "guidance_scale": 3.0, **more}
    call = {name: value for name, value in call.items() if value is not None}

    def generate() -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        with torch.random.fork_rng(devices=[]):
            frames: torch.Tensor = pipe(
                prompt="a red circle", generator=generator, output_type="latent", **call
            ).frames
        return frames

    before = generate()
    report = patch_model(pipe)
    error = relative_l2(generate(), before)
    assert error == 0 if "causal" in name else 0 < error < 0.02
    whole = {
        (record.step, record.when)
        for record in report.guard
        if record.when != "sampled" and not record.path.startswith("vae")
    }
    assert whole == looked
    assert {record.verdict for record in report.guard} <= {"kept", "not compared"}
    unpatch_model(pipe)
    assert torch.equal(generate(), before)
