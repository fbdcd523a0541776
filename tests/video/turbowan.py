"""What the tests of the TurboDiffusion examples share: checkpoints, calls, and the loop of its
scripts in plain torch."""

from __future__ import annotations

import math
import re
import runpy
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import imageio_ffmpeg
import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from PIL import Image

from tests.turbodiffusion.test_convert_command import base_folder
from tests.turbodiffusion.wan_model import Options, save
from turbo_rcm_patch import PatchConfig, load_extra, patch_model
from turbo_rcm_patch.turbodiffusion.convert import convert_transformer

EXAMPLES = Path(__file__).parents[2] / "examples"
TEXT = Options(text=32, sla=True)
IMAGE = Options(text=32, inputs=12, sla=True)
#: In fp32 on the CPU, 64 x 48 pixels and 5 frames: 24 tokens.
SMALL = ["--device", "cpu", "--resolution", "64x48", "--num_frames", "5"]
EXACT = ["--dtype", "float32"]
PROMPT = "a red circle  moves left"


@pytest.fixture(scope="module")
def image_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base_folder(tmp_path_factory.mktemp("model") / "base", experts=True)


@pytest.fixture(scope="module")
def text_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base_folder(tmp_path_factory.mktemp("model") / "base")


@pytest.fixture(scope="module")
def text_pth(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "model.pth"
    save(TEXT, path)
    return path


@pytest.fixture(scope="module")
def expert_pths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("image")
    for seed, name in enumerate(("high", "low"), start=1):
        save(IMAGE, folder / f"{name}.pth", seed=seed)
    return [folder / "high.pth", folder / "low.pth"]


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of another shape than the video, and with fine detail."""
    path = tmp_path_factory.mktemp("picture") / "image.png"
    values = np.random.default_rng(0).integers(0, 256, (90, 130, 3), dtype=np.uint8)
    Image.fromarray(values).save(path)
    return path


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What VAEs were asked to decode: the latents, because theirs has mean 0 and deviation 1."""
    latents: list[torch.Tensor] = []
    decode = AutoencoderKLWan.decode

    def recorded(self: Any, z: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        latents.append(z.clone())
        return decode(self, z, *args, **kwargs)

    monkeypatch.setattr(AutoencoderKLWan, "decode", recorded)
    return latents


def main_of(example: str) -> Callable[[Sequence[str]], None]:
    return runpy.run_path(str(EXAMPLES / example))["main"]


def text_to_video(pth: Path, base: Path, out: Path, *more: str) -> None:
    arguments = ["--dit_path", str(pth), "--base", str(base), "--save_path", str(out), *SMALL]
    main_of("turbowan_t2v.py")([*arguments, "--prompt", PROMPT, *more])


def image_to_video(pths: list[Path], base: Path, picture: Path, out: Path, *more: str) -> None:
    arguments = ["--high_noise_model_path", str(pths[0]), "--low_noise_model_path", str(pths[1])]
    arguments += ["--base", str(base), "--save_path", str(out), "--image_path", str(picture)]
    main_of("turbowan_i2v.py")([*arguments, *SMALL, "--prompt", PROMPT, *more])


def movie(path: Path) -> tuple[int, tuple[int, int], float]:
    """Frames, (width, height) and frames a second."""
    program = imageio_ffmpeg.get_ffmpeg_exe()
    done = subprocess.run(
        [program, "-i", str(path), "-f", "null", "-"], capture_output=True, text=True, check=True
    )
    width, height, fps = re.search(
        r"Video: .* (\d+)x(\d+)[ ,].* ([\d.]+) fps", done.stderr
    ).groups()
    frames = re.findall(r"frame=\s*(\d+)", done.stderr)[-1]
    return int(frames), (int(width), int(height)), float(fps)


# The numbers of TurboDiffusion's scripts, in plain torch.


@torch.no_grad()
def embedding(base: Path, prompt: str) -> torch.Tensor:
    """[1, 512, C]: cleaned, padded to 512 tokens, masked, and zeros for the padding."""
    from transformers import AutoTokenizer, UMT5EncoderModel

    tokenizer = AutoTokenizer.from_pretrained(base / "tokenizer")
    encoder = UMT5EncoderModel.from_pretrained(base / "text_encoder").eval()
    cleaned = re.sub(r"\s+", " ", prompt).strip()
    ids = tokenizer(
        [cleaned], padding="max_length", truncation=True, max_length=512, return_tensors="pt"
    )
    embeds = encoder(ids.input_ids, ids.attention_mask).last_hidden_state
    return embeds * ids.attention_mask[..., None]


@torch.no_grad()
def condition(base: Path, path: Path, width: int, height: int, frames: int) -> torch.Tensor:
    """[1, 4 + C, T, H, W]: which latents are given, and the first frame followed by grey."""
    vae = AutoencoderKLWan.from_pretrained(base, subfolder="vae").eval()
    with Image.open(path) as image:
        pixels = torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)[None]
    pixels = torch.nn.functional.interpolate(
        pixels, (height, width), mode="bilinear", antialias=True, align_corners=False
    )
    first = (pixels.float() / 255 - 0.5) / 0.5
    video = torch.cat([first[:, :, None], torch.zeros(1, 3, frames - 1, height, width)], dim=2)
    latents = vae.encode(video).latent_dist.mode()
    mask = torch.zeros(1, 4, *latents.shape[2:])
    mask[:, :, 0] = 1.0
    return torch.cat([mask, latents], dim=1)


@torch.no_grad()
def plain_loop(
    networks: list[Any],
    text: torch.Tensor,
    *,
    shape: tuple[int, ...],
    seed: int,
    samples: int = 1,
    steps: int = 4,
    sigma_max: float = 80.0,
    boundary: float = 0.0,
    ode: bool = False,
    given: torch.Tensor | None = None,
    our_roundings: bool = False,
    device: str = "cpu",
) -> torch.Tensor:
    """In the roundings of the scripts, or with `our_roundings`: a first sample in fp32, as the
    pipelines have it, and fp64 where the scripts multiply noise in fp32. Nothing but last bits,
    but those decide how some values are rounded to int8."""
    generator = torch.Generator(device)
    generator.manual_seed(seed)
    noise = torch.randn(samples, *shape, dtype=torch.float32, device=device, generator=generator)
    trig = [math.atan(sigma_max), *(1.5, 1.4, 1.0)[: steps - 1], 0.0]
    times = [math.sin(t) / (math.cos(t) + math.sin(t)) for t in trig]
    x = noise.double() * times[0]
    x = x.float().double() if our_roundings else x
    for t, t_next in zip(times[:-1], times[1:], strict=True):
        network = networks[-1] if t < boundary else networks[0]
        inputs = x.float()
        if given is not None:
            inputs = torch.cat([inputs, given.expand(samples, -1, -1, -1, -1)], dim=1)
        when = torch.tensor([t * 1000]).bfloat16().float().expand(samples).to(device)
        v = network(inputs, when, text.expand(samples, -1, -1), return_dict=False)[0].double()
        if ode:
            x = x - (t - t_next) * v
        else:
            eps = torch.randn(x.shape, dtype=torch.float32, device=device, generator=generator)
            x = (1 - t_next) * (x - t * v) + t_next * (eps.double() if our_roundings else eps)
    return x.float()


def network_of(pth: Path, config: PatchConfig | None = None) -> WanTransformer3DModel:
    """The converted transformer, patched if asked for."""
    folder = pth.with_suffix("")
    if not folder.exists():
        convert_transformer(pth, folder)
    network = WanTransformer3DModel.from_pretrained(folder).eval()
    if config is not None:
        load_extra(network, folder)
        patch_model(network, config)
    return network


LATENTS = (4, 2, 6, 8)
