"""diffusers' pipelines of the rest of the Wan family, tiny and untrained: patched, guarded on the
first and the last step, and as before afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from diffusers import (
    ChronoEditPipeline,
    ChronoEditTransformer3DModel,
    SkyReelsV2DiffusionForcingPipeline,
    SkyReelsV2Pipeline,
    SkyReelsV2Transformer3DModel,
    UniPCMultistepScheduler,
    WanAnimatePipeline,
    WanAnimateTransformer3DModel,
    WanVACEPipeline,
    WanVACETransformer3DModel,
)
from PIL import Image
from tests.patching.wan_family import ANIMATE

from tests.measures import relative_l2
from tests.video.micro import SMALL, TRANSFORMER, image_encoder, lively, vae_and_text
from turbo_rcm_patch import RCMScheduler, patch_model, unpatch_model

STEPS = 4


def unipc() -> UniPCMultistepScheduler:
    return UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000
    )


def vace() -> Any:
    network = WanVACETransformer3DModel(
        **TRANSFORMER | {"patch_size": (1, 2, 2)}, vace_layers=[0, 1], vace_in_channels=72
    )
    return WanVACEPipeline(**vae_and_text(), transformer=lively(network), scheduler=RCMScheduler())


def animate() -> Any:
    network = WanAnimateTransformer3DModel(
        **TRANSFORMER | ANIMATE | {"image_dim": 16}, added_kv_proj_dim=128
    )
    return WanAnimatePipeline(
        **vae_and_text(), **image_encoder(), transformer=lively(network), scheduler=RCMScheduler()
    )


def skyreels() -> Any:
    network = SkyReelsV2Transformer3DModel(**TRANSFORMER)
    return SkyReelsV2Pipeline(**vae_and_text(), transformer=lively(network), scheduler=unipc())


def forcing() -> Any:
    network = SkyReelsV2Transformer3DModel(**TRANSFORMER)
    return SkyReelsV2DiffusionForcingPipeline(
        **vae_and_text(), transformer=lively(network), scheduler=unipc()
    )


def chronoedit() -> Any:
    network = ChronoEditTransformer3DModel(
        **TRANSFORMER | {"in_channels": 12}, image_dim=16, added_kv_proj_dim=128
    )
    return ChronoEditPipeline(
        **vae_and_text(), **image_encoder(), transformer=lively(network), scheduler=unipc()
    )


PICTURE = {"image": Image.new("RGB", (32, 32), "teal"), "max_sequence_length": 512}
#: The pose video says how many frames there will be.
FACES: dict[str, Any] = {
    "num_frames": None,
    "pose_video": [Image.new("RGB", (32, 32), "black")] * 5,
    "face_video": [Image.new("RGB", (16, 16), "pink")] * 5,
    "segment_frame_length": 5,
}
#: Pipeline, how it is called beside the usual, and the index of its last step.
CASES: dict[str, tuple[Callable[[], Any], dict[str, Any], int]] = {
    "vace-rcm": (vace, {"guidance_scale": 1.0}, STEPS - 1),
    "animate-rcm": (
        animate,
        PICTURE | FACES | {"guidance_scale": 1.0},
        STEPS - 1,
    ),
    "chronoedit": (chronoedit, PICTURE | {"guidance_scale": 1.0}, STEPS - 1),
    "skyreels": (skyreels, {}, STEPS - 1),
    "skyreels-forcing": (forcing, {}, STEPS - 1),
    # Two blocks of two frames, the second two steps behind the first, with the mask.
    "skyreels-forcing-causal": (
        forcing,
        {"num_frames": 13, "ar_step": 2, "causal_block_size": 2},
        STEPS + 1,
    ),
}
#: What each of them runs.
NETWORKS = {
    vace: WanVACETransformer3DModel,
    animate: WanAnimateTransformer3DModel,
    chronoedit: ChronoEditTransformer3DModel,
    skyreels: SkyReelsV2Transformer3DModel,
    forcing: SkyReelsV2Transformer3DModel,
}


def classes(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted({NETWORKS[CASES[name][0]].__name__ for name in names}))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.supports(classes(CASES), "its pipeline")
@pytest.mark.supports(classes(name for name in CASES if name.endswith("-rcm")), "rCM sampler")
def test_patched_guarded_and_put_back(name: str) -> None:
    make, more, last = CASES[name]
    torch.manual_seed(0)
    pipe = make()
    pipe.set_progress_bar_config(disable=True)
    call = {**SMALL, "num_inference_steps": STEPS, "guidance_scale": 3.0, **more}
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
    after = generate()
    error = relative_l2(after, before)
    assert error < 0.02
    looked = {(record.step, record.when) for record in report.guard}
    # In between the guard takes a pair in turn.
    assert {step for step, when in looked if when == "middle"} <= set(range(1, last))
    assert {(step, when) for step, when in looked if when != "middle"} == {
        (0, "first"),
        (last, "last"),
    }
    forwards = 2 if call["guidance_scale"] > 1 else 1
    whole = [record for record in report.guard if record.when != "middle"]
    assert len(whole) == 2 * forwards * report.fused
    assert {record.verdict for record in report.guard} == {"kept"}
    assert ("mask" in str(report)) is ("causal" in name)
    unpatch_model(pipe)
    assert torch.equal(generate(), before)
