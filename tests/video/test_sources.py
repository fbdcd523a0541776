"""Videos made from more than text: an image, or what a function of the user gives a pipeline."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FirstBlockCacheConfig
from PIL import Image

from tests.video.cases import CASES, IMAGE, loaded, picture, settings_of
from tests.video.micro import (
    animate,
    micro_image_pipe,
    micro_video_pipe,
    vace,
)
from tests.video.micro_cogvideox import micro_cogvideox
from tests.video.test_generate import CLASSES
from turbo_rcm_patch import PatchConfig
from turbo_rcm_patch.errors import ConfigError, SamplingError
from turbo_rcm_patch.video import comparison
from turbo_rcm_patch.video.comparison import compare
from turbo_rcm_patch.video.source import Source

pytestmark = pytest.mark.usefixtures("no_pictures_here")
PROMPT = "a red circle moves left"
OTHER = "a blue square moves up"


def film(frames: int = 9) -> list[Image.Image]:
    return [picture(3 * i) for i in range(frames)]


PIPELINE = {"prompt": PROMPT, "height": 32, "width": 32}
#: What ConsisID's face models would have made.
IDENTITY = {
    "id_cond": torch.linspace(-1, 1, 16)[None],
    "id_vit_hidden": [torch.linspace(-1, 1 + i, 48).view(1, 6, 8) for i in range(5)],
}
#: A pipeline that `generate` does not call, and the arguments with which its user calls it.
UNUSUAL: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "wan-two-frames": (
        lambda: micro_image_pipe(experts=False, last=True),
        IMAGE | {"last_image": picture(9), "num_frames": 5},
    ),
    "wan-video": (micro_video_pipe, {"video": film(5), "strength": 0.6}),
    "vace": (
        vace,
        {"video": [x.resize((32, 32)) for x in film(5)], "reference_images": [picture(8)] * 2,
         "mask": [Image.new("L", (32, 32), 255)] * 5, "num_frames": 5},
    ),
    "animate": (
        animate,
        IMAGE | {"pose_video": film(5), "face_video": [picture(5 * i, 16) for i in range(5)],
                 "segment_frame_length": 5},
    ),
    "cogvideox-video": (lambda: micro_cogvideox(source="video"), {"video": film(5)}),
    "cogvideox-face": (
        lambda: micro_cogvideox(source="face"), IMAGE | IDENTITY | {"num_frames": 5}
    ),
}  # fmt: skip


def unusual(name: str) -> Any:
    return loaded(name, UNUSUAL[name][0])


@pytest.mark.parametrize("name", ["wan-clip", "skyreels", "chronoedit", "cogvideox-image"])
@pytest.mark.supports(CLASSES, "compare")
def test_compare_gives_every_number(name: str, tmp_path: Path) -> None:
    settings = settings_of(name)
    images = CASES[name][1].get("image")
    found = compare(loaded(name), PROMPT, images=images, out=tmp_path, settings=settings)
    assert found.model.network is not None and 0 < found.model.network.ratio < 2
    assert found.results[0].patched.psnr > 40 and found.model.fusion is not None, str(found)
    metrics = json.loads(found.metrics.read_text())
    assert list(metrics["identity"]["inputs"].values()) == [Source(PROMPT, images).digest]


@pytest.mark.parametrize("name", UNUSUAL)
@pytest.mark.supports(("WanVACETransformer3DModel", "WanAnimateTransformer3DModel"), "compare")
@pytest.mark.supports(("ConsisIDTransformer3DModel",), "compare")
@pytest.mark.supports(("ConsisIDTransformer3DModel",), "its pipeline")
def test_any_pipeline_is_compared_with_a_function_that_calls_it(name, tmp_path, capsys) -> None:
    pipe, given = unusual(name), UNUSUAL[name][1]
    if name.startswith("cogvideox"):  # Its pipelines encode in the network's dtype.
        pipe.vae.to(torch.bfloat16)
    seeds: list[int] = []

    def make(seed: int) -> np.ndarray:
        seeds.append(seed)
        generator = torch.Generator().manual_seed(seed)
        call = PIPELINE | {"num_inference_steps": 3, "guidance_scale": 1.0} | given
        call["max_sequence_length"] = 16 if name.startswith("cogvideox") else 512
        frames: np.ndarray = pipe(**call, generator=generator, output_type="np").frames[0]
        return frames

    before = make(7)
    prompts = ["one", "two"] if name == "wan-video" else ["one"]
    # Of random weights the guard predicts too much.
    asked = {"make": make, "seed": 7, "out": tmp_path, "config": PatchConfig(fidelity=2.0)}
    found = compare(pipe, prompts, **asked, fps=8)
    assert {*seeds} == {7 + i for i in range(len(prompts))}
    assert (
        found.model.network is not None
        and 0 < found.model.network.ratio < 2
        and found.verdict != "undecided"
    )
    assert found.results[0].patched.psnr > 25, str(found)
    blocks = 4 if name == "vace" else 2
    assert str(found.judgement.ran) == f"All {blocks} blocks ran int8 attention in every forward"
    assert found.model.control_backend in str(found)
    metrics = json.loads(found.metrics.read_text())
    assert metrics["identity"]["settings"] == {"fps": 8, "made by": "a function of the caller"}
    page = found.report.read_text()
    assert f"{len(before)} frames of 32 × 32" in page and "4 steps" not in page
    assert "as you asked" not in page + str(found), "nobody did"
    assert np.array_equal(make(7), before), "the pipeline is unpatched again"
    count = len(seeds)
    again = compare(pipe, prompts, **asked, fps=8)
    assert again.verdict == found.verdict and len(seeds) == count, "finished videos are kept"
    with pytest.raises(SamplingError, match="fps"):
        compare(pipe, prompts, **asked, fps=9)


def test_a_block_that_a_cache_skipped_did_not_run(tmp_path: Path) -> None:
    """FirstBlockCache runs the first block alone where that changes little."""
    pipe, settings = loaded("wan"), settings_of("wan")
    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=100.0))
    try:
        found = compare(pipe, PROMPT, out=tmp_path, network_number=False, settings=settings)
    finally:
        pipe.transformer.disable_cache()
    ran = found.judgement.ran
    assert ran.calls == {
        "transformer.blocks.0": [Counter(asked=1)] * 4,
        "transformer.blocks.1": [Counter(asked=1)] + [Counter(skipped=1)] * 3,
    }
    assert ran.share == 1
    calls = json.loads(found.metrics.read_text())["ran"]["calls"]
    assert calls["transformer.blocks.1"] == [{"asked": 1}] + [{"skipped": 1}] * 3


def test_what_make_does_not_take_or_return_is_told(tmp_path: Path) -> None:
    pipe, out = unusual("wan-video"), tmp_path / "out"
    for wrong in ({"steps": 3}, {"images": picture()}):
        with pytest.raises(ConfigError, match=f"{next(iter(wrong))}.*inside of make"):
            compare(pipe, PROMPT, make=lambda seed: torch.zeros(5, 32, 32, 3), out=out, **wrong)
    for made_so in (torch.zeros(5, 3, 32, 32), np.zeros((5, 32, 32, 3), np.uint8)):
        with pytest.raises(SamplingError, match=r"make\(seed\).*output_type=\"np\""):
            compare(pipe, PROMPT, make=lambda seed, x=made_so: x, out=out)


def test_another_image_is_refused_and_more_prompts_are_not(tmp_path, monkeypatch) -> None:
    pipe, settings = loaded("wan-two-experts"), settings_of("wan-two-experts", steps=1)
    given = {"out": tmp_path, "settings": settings, "network_number": False}
    compare(pipe, PROMPT, images=picture(), **given)
    with pytest.raises(SamplingError, match=r"same inputs.*`fresh=True`"):
        compare(pipe, PROMPT, images=picture(1), **given)
    more = compare(pipe, [PROMPT, OTHER], images=[picture(), picture(1)], **given)
    assert (
        len(more.model.identity["inputs"]) == len(set(more.model.identity["inputs"].values())) == 2
    )
    calls: list[int] = []
    real = comparison.generate
    monkeypatch.setattr(comparison, "generate", lambda *a, **k: calls.append(1) or real(*a, **k))
    compare(pipe, [PROMPT, OTHER], images=[picture(), picture(1)], **given)
    assert calls == [], "all of it is there"


def test_each_prompt_has_an_image(tmp_path: Path) -> None:
    pipe, settings = loaded("wan-clip"), settings_of("wan-clip")
    with pytest.raises(SamplingError, match="one for each of 2 prompts"):
        compare(pipe, [PROMPT, OTHER], images=[picture()], out=tmp_path, settings=settings)
