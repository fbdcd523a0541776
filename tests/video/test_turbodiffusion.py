"""The rCM scheduler against TurboDiffusion's own sampling loop, run from a checkout of it.

`pytest tests/video/test_turbodiffusion.py --turbodiffusion PATH`. Its loop is the body of two
scripts, so they are run as scripts, on a CPU and in fp64: everything that they import beside torch
is replaced by the least that the loop touches, and the two networks by a formula.
"""

from __future__ import annotations

import math
import runpy
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from turbo_rcm_patch.video.scheduler import RCMScheduler

#: Channels, frames, height and width of the latents.
LATENTS = (4, 2, 4, 6)
SEED = 11


@pytest.fixture(scope="module")
def scripts(request: pytest.FixtureRequest) -> Path:
    given = request.config.getoption("--turbodiffusion", default=None)
    if not given:
        pytest.skip("needs --turbodiffusion PATH, a checkout of TurboDiffusion")
    folder = Path(given) / "turbodiffusion" / "inference"
    if not folder.is_dir():
        pytest.fail(f"{given} is not a checkout of TurboDiffusion: no {folder}", pytrace=False)
    return folder


def velocity(expert: str, x: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
    """A velocity that depends on the state, the time and the expert, in fp64."""
    t = timestep.double().view(-1, 1, 1, 1, 1) / 1000
    return torch.sin((3 if expert == "high" else 2) * x.double()) * (0.5 + t) - 0.2 * x.double()


class Network:
    """As much of a network as the scripts use."""

    def __init__(self, expert: str, calls: list[str]) -> None:
        self.expert, self.calls = expert, calls

    def cpu(self) -> Network:
        return self

    cuda = cpu

    def __call__(
        self, *, x_B_C_T_H_W: torch.Tensor, timesteps_B_T: torch.Tensor, **_: object
    ) -> torch.Tensor:
        self.calls.append(self.expert)
        return velocity(self.expert, x_B_C_T_H_W, timesteps_B_T)


class Tokenizer:
    """As much of a VAE as the scripts use; what it is asked to decode is the loop's result."""

    latent_ch, spatial_compression_factor = LATENTS[0], 8

    def __init__(self, decoded: list[torch.Tensor]) -> None:
        self.decoded = decoded

    def get_latent_num_frames(self, _: int) -> int:
        return LATENTS[1]

    def encode(self, frames: torch.Tensor) -> torch.Tensor:
        return torch.zeros(1, *LATENTS)

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        self.decoded.append(latents)
        return latents


@dataclass(frozen=True)
class Parts:
    """What takes the place of the scripts' models.

    Attributes:
        network: Of a checkpoint's path and the list of network calls.
        tokenizer: Of the list of what is decoded.
        text: Embedding of the prompt.
        image: The first frame of a file, [3, H, W] in -1..1.
        size: Width and height.
        dtype: That the networks get.
    """

    network: Callable[[str, list[str]], Any] = lambda path, calls: Network(
        "low" if "low" in path else "high", calls
    )
    tokenizer: Callable[[list[torch.Tensor]], Any] = Tokenizer
    text: torch.Tensor = torch.zeros(1, 3, 8)
    image: Callable[[Any], torch.Tensor] = lambda _: torch.zeros(3, 8 * LATENTS[2], 8 * LATENTS[3])
    size: tuple[int, int] = (8 * LATENTS[3], 8 * LATENTS[2])
    dtype: torch.dtype = torch.float64


def their_loop(
    script: Path, arguments: list[str], parts: Parts | None = None
) -> tuple[torch.Tensor, list[str]]:
    """The samples and the expert of every network call."""
    parts = parts or Parts()
    calls: list[str] = []
    decoded: list[torch.Tensor] = []

    def module(name: str, **members: object) -> types.ModuleType:
        made = types.ModuleType(name)
        made.__dict__.update(members)
        return made

    def create_model(dit_path: str, **_: object) -> Any:
        return parts.network(dit_path, calls)

    image = mock.MagicMock()
    image.Compose.return_value = parts.image
    size = {"480p": {"16:9": parts.size}}
    size["720p"] = size["480p"]
    log = types.SimpleNamespace(info=lambda *_: None, success=lambda *_: None)
    stubs: dict[str, Any] = {
        "einops": module(
            "einops", repeat=lambda x, _, k: x.repeat(k, 1, 1), rearrange=lambda x, *_, **__: x
        ),
        "tqdm": module("tqdm", tqdm=lambda steps, **_: steps),
        "torchvision": module("torchvision"),
        "torchvision.transforms": module("torchvision.transforms"),
        "torchvision.transforms.v2": image,
        "imaginaire": module("imaginaire"),
        "imaginaire.utils": module("imaginaire.utils", log=log),
        "imaginaire.utils.io": module(
            "imaginaire.utils.io", save_image_or_video=lambda *_, **__: None
        ),
        "rcm.datasets.utils": module("rcm.datasets.utils", VIDEO_RES_SIZE_INFO=size),
        "rcm.utils.umt5": module(
            "rcm.utils.umt5",
            clear_umt5_memory=lambda: None,
            get_umt5_embedding=lambda **_: parts.text,
        ),
        "rcm.tokenizers.wan2pt1": module(
            "rcm.tokenizers.wan2pt1", Wan2pt1VAEInterface=lambda **_: parts.tokenizer(decoded)
        ),
        "modify_model": module(
            "modify_model",
            create_model=create_model,
            tensor_kwargs={"device": "cpu", "dtype": parts.dtype},
        ),
    }
    for name in ("rcm", "rcm.datasets", "rcm.utils", "rcm.tokenizers"):
        stubs[name] = module(name)
    before = torch._dynamo.config.suppress_errors
    argv = [str(script), "--prompt", "a cat", "--seed", str(SEED), *arguments]
    with mock.patch.dict(sys.modules, stubs), mock.patch.object(sys, "argv", argv):
        try:
            runpy.run_path(str(script), run_name="__main__")
        finally:
            torch._dynamo.config.suppress_errors = before  # the scripts switch it on
    (samples,) = decoded
    return samples, calls


def our_loop(
    steps: int, sigma_max: float, sampler: str, boundary: float
) -> tuple[torch.Tensor, list[str]]:
    scheduler = RCMScheduler(sigma_max=sigma_max, sampler=sampler)  # type: ignore[arg-type]
    scheduler.set_timesteps(steps)
    generator = torch.Generator().manual_seed(SEED)
    x = scheduler.init_noise(torch.randn(1, *LATENTS, generator=generator))
    calls = []
    for t in scheduler.timesteps:
        # As a pipeline chooses the expert.
        expert = "high" if t >= boundary * scheduler.config.num_train_timesteps else "low"
        calls.append(expert)
        v = velocity(expert, x, t.view(1, 1))
        x = scheduler.step(v, t, x, generator=generator).prev_sample
    return x, calls


@pytest.mark.parametrize("sigma_max", [80.0, 200.0])
@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_text_to_video(scripts: Path, steps: int, sigma_max: float) -> None:
    arguments = ["--dit_path", "high", "--num_steps", str(steps), "--sigma_max", str(sigma_max)]
    theirs, calls = their_loop(scripts / "wan2.1_t2v_infer.py", arguments)
    ours, _ = our_loop(steps, sigma_max, "sde", boundary=0.0)
    assert calls == ["high"] * steps
    assert math.isfinite(float(ours.norm()))
    torch.testing.assert_close(ours, theirs.double(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("sampler", ["sde", "ode"])
@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_image_to_video_with_two_experts(
    scripts: Path, steps: int, sampler: str, tmp_path: Path
) -> None:
    from PIL import Image

    Image.new("RGB", (16, 16)).save(tmp_path / "image.png")
    arguments = ["--image_path", str(tmp_path / "image.png"), "--num_steps", str(steps)]
    arguments += ["--high_noise_model_path", "high", "--low_noise_model_path", "low"]
    arguments += ["--ode"] if sampler == "ode" else []
    theirs, their_calls = their_loop(scripts / "wan2.2_i2v_infer.py", arguments)
    ours, our_calls = our_loop(steps, 200.0, sampler, boundary=0.9)
    assert our_calls == their_calls == ["high", "high", "low", "low"][:steps]
    torch.testing.assert_close(ours, theirs.double(), rtol=0, atol=1e-6)
