"""TurboDiffusion's checkpoints in diffusers' pipelines, and its scripts' loop in plain torch."""

from __future__ import annotations

import math
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from PIL import Image

from tests.checkpoints.test_convert_command import base_folder
from tests.checkpoints.wan_model import Options, save
from turbo_rcm_patch import RCMScheduler
from turbo_rcm_patch.checkpoints.convert import convert_pipeline, convert_transformer
from turbo_rcm_patch.video import load_pipeline
from turbo_rcm_patch.video.rcm_times import rcm_times

#: Width and height of a picture; 5 frames of it are 24 tokens.
SIZE, LATENTS = (64, 48), (4, 2, 6, 8)
PROMPT = "a red circle  moves left"


@pytest.fixture(scope="module")
def image_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base_folder(tmp_path_factory.mktemp("model") / "base", experts=True)


@pytest.fixture(scope="module")
def text_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base_folder(tmp_path_factory.mktemp("model") / "base")


@pytest.fixture(scope="module")
def text_pths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    path = tmp_path_factory.mktemp("text") / "model.pth"
    save(Options(text=32, sla=True), path)
    return [path]


@pytest.fixture(scope="module")
def expert_pths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("image")
    for seed, name in enumerate(("high", "low"), start=1):
        save(Options(text=32, inputs=12, sla=True), folder / f"{name}.pth", seed=seed)
    return [folder / "high.pth", folder / "low.pth"]


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of another shape than the video, and with fine detail."""
    path = tmp_path_factory.mktemp("picture") / "image.png"
    values = np.random.default_rng(0).integers(0, 256, (90, 130, 3), dtype=np.uint8)
    Image.fromarray(values).save(path)
    return path


def pipeline(pths: list[Path], base: Path, **how: Any) -> Any:
    """Convert a checkpoint, or that of each expert, once, and load the pipeline in fp32."""
    folder = pths[0].with_name(f"{pths[0].stem}-pipeline")
    if not folder.exists():
        convert_pipeline(*pths[:1], folder, base=base, low_noise=[*pths, None][1])
    pipe = load_pipeline(folder, **{"dtype": torch.float32, "device": "cpu", **how})
    pipe.set_progress_bar_config(disable=True)
    return pipe


def network_of(pth: Path) -> WanTransformer3DModel:
    """The converted transformer."""
    folder = pth.with_suffix("")
    if not folder.exists():
        convert_transformer(pth, folder)
    return WanTransformer3DModel.from_pretrained(folder).eval()


def stretched(path: Path) -> torch.Tensor:
    """[1, 3, H, W] in 0..1: bilinear with antialiasing on bytes, as the models were distilled."""
    with Image.open(path) as image:
        pixels = torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)[None]
    pixels = torch.nn.functional.interpolate(
        pixels, SIZE[::-1], mode="bilinear", antialias=True, align_corners=False
    )
    return pixels.float() / 255


def sample(
    pipe: Any,
    *,
    seed: int,
    samples: int = 1,
    steps: int = 4,
    sigma_max: float = 80.0,
    boundary: float = 0.0,
    ode: bool = False,
    picture: Path | None = None,
) -> torch.Tensor:
    """The latents that a pipeline makes of the noise that TurboDiffusion's script draws."""
    scheduler = RCMScheduler(
        sigma_max=sigma_max, sampler="ode" if ode else "sde", timestep_dtype="bfloat16"
    )
    pipe.scheduler = scheduler
    if picture is not None:
        # The loop compares a step's own time with the boundary, a pipeline the rounded one.
        times = rcm_times(steps, sigma_max)[:-1]
        rounded = [*((times * 1000).to(torch.bfloat16).double() / 1000).tolist(), -1.0]
        high = int((times >= boundary).sum())
        ratio = sum(rounded[high - 1 : high + 1]) / 2 if high else 2.0
        pipe.register_to_config(boundary_ratio=max(ratio, 0.0))
    device = pipe._execution_device
    generator = torch.Generator(device).manual_seed(seed)
    noise = torch.randn(samples, *LATENTS, generator=generator, device=device)
    scheduler.step = partial(scheduler.step, generator=generator)
    latents: torch.Tensor = pipe(
        prompt=PROMPT,
        width=SIZE[0],
        height=SIZE[1],
        num_frames=5,
        num_inference_steps=steps,
        num_videos_per_prompt=samples,
        guidance_scale=1.0,
        latents=scheduler.init_noise(noise),
        output_type="latent",
        **({} if picture is None else {"image": stretched(picture)}),
    ).frames
    return latents.float()


# The numbers of TurboDiffusion's scripts (inference/wan2.1_t2v_infer.py, wan2.2_i2v_infer.py).


@torch.no_grad()
def embedding(base: Path) -> torch.Tensor:
    """[1, 512, C]: cleaned, padded to 512 tokens, masked, and zeros for the padding."""
    from transformers import AutoTokenizer, UMT5EncoderModel

    tokenizer = AutoTokenizer.from_pretrained(base / "tokenizer")
    encoder = UMT5EncoderModel.from_pretrained(base / "text_encoder").eval()
    cleaned = re.sub(r"\s+", " ", PROMPT).strip()
    ids = tokenizer(
        [cleaned], padding="max_length", truncation=True, max_length=512, return_tensors="pt"
    )
    embeds = encoder(ids.input_ids, ids.attention_mask).last_hidden_state
    return embeds * ids.attention_mask[..., None]


@torch.no_grad()
def condition(base: Path, path: Path) -> torch.Tensor:
    """[1, 4 + C, T, H, W]: which latents are given, and the first frame followed by grey."""
    vae = AutoencoderKLWan.from_pretrained(base, subfolder="vae").eval()
    first = (stretched(path) - 0.5) / 0.5
    video = torch.cat([first[:, :, None], torch.zeros(1, 3, 4, *SIZE[::-1])], dim=2)
    latents = vae.encode(video).latent_dist.mode()
    mask = torch.zeros(1, 4, *latents.shape[2:])
    mask[:, :, 0] = 1.0
    return torch.cat([mask, latents], dim=1)


@torch.no_grad()
def plain_loop(
    networks: list[Any],
    base: Path,
    *,
    seed: int,
    samples: int = 1,
    steps: int = 4,
    sigma_max: float = 80.0,
    boundary: float = 0.0,
    ode: bool = False,
    picture: Path | None = None,
    device: str = "cpu",
) -> torch.Tensor:
    text = embedding(base).to(device).expand(samples, -1, -1)
    generator = torch.Generator(device)
    generator.manual_seed(seed)
    noise = torch.randn(samples, *LATENTS, device=device, generator=generator)
    trig = [math.atan(sigma_max), *(1.5, 1.4, 1.0)[: steps - 1], 0.0]
    times = [math.sin(t) / (math.cos(t) + math.sin(t)) for t in trig]
    x = noise.double() * times[0]
    for t, t_next in zip(times[:-1], times[1:], strict=True):
        network = networks[-1] if t < boundary else networks[0]
        inputs = x.float()
        if picture is not None:
            first = condition(base, picture).to(device).expand(samples, -1, -1, -1, -1)
            inputs = torch.cat([inputs, first], dim=1)
        when = torch.tensor([t * 1000]).bfloat16().float().expand(samples).to(device)
        v = network(inputs, when, text, return_dict=False)[0].double()
        if ode:
            x = x - (t - t_next) * v
        else:
            eps = torch.randn(x.shape, dtype=torch.float32, device=device, generator=generator)
            x = (1 - t_next) * (x - t * v) + t_next * eps
    return x.float()
