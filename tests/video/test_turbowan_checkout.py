"""Converted pipelines against TurboDiffusion's own scripts, run from a checkout.

`pytest tests/video/test_turbowan_checkout.py --turbodiffusion PATH`. The scripts run as they
are, on a CPU; in place of their networks, VAE and text encoder stand those of the pipelines.
"""

from __future__ import annotations

import runpy
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from diffusers import AutoencoderKLWan
from PIL import Image

from tests.video.turbowan import (
    LATENTS,
    PROMPT,
    SIZE,
    embedding,
    expert_pths,
    image_base,
    network_of,
    picture,
    pipeline,
    sample,
    stretched,
    text_base,
    text_pth,
)

__all__ = ["expert_pths", "image_base", "picture", "text_base", "text_pth"]


@pytest.fixture(scope="module")
def scripts(request: pytest.FixtureRequest) -> Path:
    given = request.config.getoption("--turbodiffusion", default=None)
    if not given:
        pytest.skip("needs --turbodiffusion PATH, a checkout of TurboDiffusion")
    folder = Path(given) / "turbodiffusion" / "inference"
    if not folder.is_dir():
        pytest.fail(f"{given} is not a checkout of TurboDiffusion: no {folder}", pytrace=False)
    return folder


def module(name: str, **members: object) -> types.ModuleType:
    made = types.ModuleType(name)
    vars(made).update(members)
    return made


def nothing(*_: object, **__: object) -> None:
    pass


def same(x: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    return x


def their_loop(
    script: Path, arguments: list[str], base: Path, picture: Path | None = None
) -> tuple[torch.Tensor, list[str]]:
    """The samples and the expert of every network call, of a script with the networks, the VAE
    and the text encoder of a folder in the place of its own."""
    vae = AutoencoderKLWan.from_pretrained(base, subfolder="vae").eval()
    calls: list[str] = []
    decoded: list[torch.Tensor] = []

    class Tokenizer:
        latent_ch, spatial_compression_factor = LATENTS[0], 8

        def get_latent_num_frames(self, frames: int) -> int:
            return 1 + (frames - 1) // 4

        def encode(self, frames: torch.Tensor) -> torch.Tensor:
            return vae.encode(frames).latent_dist.mode()

        def decode(self, latents: torch.Tensor) -> torch.Tensor:
            decoded.append(latents)
            return latents

    def first_frame(opened: Any) -> torch.Tensor:
        assert isinstance(opened, Image.Image) and picture is not None
        return (stretched(picture, SIZE)[0] - 0.5) / 0.5

    transforms = mock.MagicMock()
    transforms.Compose.return_value = first_frame
    members: dict[str, dict[str, Any]] = {
        "einops": {
            "repeat": lambda x, _, k: x.repeat(k, 1, 1),
            "rearrange": lambda x, *_, **__: x,
        },
        "tqdm": {"tqdm": lambda steps, **_: steps},
        "imaginaire.utils": {"log": types.SimpleNamespace(info=nothing, success=nothing)},
        "imaginaire.utils.io": {"save_image_or_video": nothing},
        "rcm.datasets.utils": {
            "VIDEO_RES_SIZE_INFO": dict.fromkeys(("480p", "720p"), {"16:9": SIZE})
        },
        "rcm.utils.umt5": {
            "clear_umt5_memory": nothing,
            "get_umt5_embedding": lambda **_: embedding(base, PROMPT),
        },
        "rcm.tokenizers.wan2pt1": {"Wan2pt1VAEInterface": lambda **_: Tokenizer()},
        "modify_model": {
            "create_model": lambda dit_path, **_: Converted(dit_path, calls),
            "tensor_kwargs": {"device": "cpu", "dtype": torch.float32},
        },
    }
    names = ("torchvision", "torchvision.transforms", "imaginaire", "rcm", "rcm.datasets",
             "rcm.utils", "rcm.tokenizers")  # fmt: skip
    stubs: dict[str, Any] = {name: module(name) for name in names}
    stubs |= {name: module(name, **its) for name, its in members.items()}
    stubs["torchvision.transforms.v2"] = transforms
    before = torch._dynamo.config.suppress_errors
    argv = [str(script), "--prompt", "a cat", "--seed", "5", *arguments]
    with mock.patch.dict(sys.modules, stubs), mock.patch.object(sys, "argv", argv):
        try:
            runpy.run_path(str(script), run_name="__main__")
        finally:
            torch._dynamo.config.suppress_errors = before  # the scripts switch it on
    (samples,) = decoded
    return samples, calls


class Converted:
    """A converted checkpoint, called as the scripts call theirs, which compute in bf16 alone."""

    def __init__(self, path: str, calls: list[str]) -> None:
        self.network, self.name, self.calls = network_of(Path(path)), Path(path).stem, calls

    def cpu(self) -> Converted:
        return self

    cuda = cpu

    def __call__(
        self,
        *,
        x_B_C_T_H_W: torch.Tensor,
        timesteps_B_T: torch.Tensor,
        crossattn_emb: torch.Tensor,
        y_B_C_T_H_W: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self.calls.append(self.name)
        x = x_B_C_T_H_W
        inputs = x if y_B_C_T_H_W is None else torch.cat([x, y_B_C_T_H_W], dim=1)
        when = timesteps_B_T.bfloat16().float().flatten()
        return self.network(inputs, when, crossattn_emb, return_dict=False)[0]


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("steps", [1, 4])
def test_text_to_video(steps: int, samples: int, scripts, text_pth, text_base) -> None:
    arguments = ["--dit_path", str(text_pth), "--num_frames", "5"]
    arguments += ["--num_steps", str(steps), "--num_samples", str(samples)]
    theirs, calls = their_loop(scripts / "wan2.1_t2v_infer.py", arguments, text_base)
    ours = sample(pipeline([text_pth], text_base), seed=5, samples=samples, steps=steps)
    assert calls == ["model"] * steps
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("ode", [False, True], ids=["sde", "ode"])
@pytest.mark.parametrize("boundary", [0.9, 0.933])
def test_image_to_video(ode, boundary, scripts, expert_pths, image_base, picture) -> None:
    arguments = ["--image_path", str(picture), "--num_frames", "5", "--num_samples", "2"]
    arguments += ["--boundary", str(boundary), *(["--ode"] if ode else [])]
    for name, path in zip(("high", "low"), expert_pths, strict=True):
        arguments += [f"--{name}_noise_model_path", str(path)]
    script = scripts / "wan2.2_i2v_infer.py"
    theirs, calls = their_loop(script, arguments, image_base, picture)
    how = {"seed": 5, "samples": 2, "sigma_max": 200.0, "boundary": boundary, "ode": ode}
    pipe = pipeline(expert_pths, image_base)
    ours = sample(pipe, image=stretched(picture, SIZE), **how)
    assert calls == ["high", "high", "low", "low"]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
