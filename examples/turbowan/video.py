"""A checkpoint of TurboDiffusion as a pipeline of diffusers, with the noise of its loop."""

from __future__ import annotations

import argparse
import hashlib
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from PIL import Image

from turbo_rcm_patch import RCMScheduler, load_extra
from turbo_rcm_patch.errors import CheckpointError, ModelFolderError, SamplingError
from turbo_rcm_patch.patching.sla import held_proj_l
from turbo_rcm_patch.turbodiffusion import read_checkpoint
from turbo_rcm_patch.turbodiffusion.convert import convert_pipeline
from turbo_rcm_patch.video import load_pipeline
from turbo_rcm_patch.video.load import resolve_model
from turbo_rcm_patch.video.rcm_times import rcm_times
from turbo_rcm_patch.video.video import write_mp4
from turbowan.arguments import STRIDE

FPS: Final = 16
#: --model -> the pipeline that has its VAE, text encoder and tokenizer.
BASES: Final = {
    "Wan2.1-1.3B": "Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
    "Wan2.1-14B": "Wan-AI/Wan2.1-T2V-14B-Diffusers",
    "Wan2.2-A14B": "Wan-AI/Wan2.2-I2V-A14B-Diffusers",
}


def load(checkpoints: Sequence[str], arguments: argparse.Namespace) -> Any:
    """Load a pipeline with the rCM scheduler; `.pth` files are converted on first use.

    Args:
        checkpoints: Of the transformer, or of the high-noise and the low-noise expert; or a
            converted pipeline folder.
        arguments: From `parse`.

    Raises:
        CheckpointError: A file cannot be read, is another model, or has no SLA.
        ModelFolderError: The base cannot be loaded, or is another model's.
    """
    given = [Path(path).expanduser() for path in checkpoints]
    whole = (given[0] / "model_index.json").is_file()
    folder = given[0] if whole else _converted(given, arguments)
    pipe: Any = load_pipeline(
        folder,
        dtype=getattr(torch, arguments.dtype),
        device=arguments.device,
        offload=arguments.offload,
        int8=arguments.quant_linear,
    )
    image = len(given) == 2
    if type(pipe).__name__ != ("WanImageToVideoPipeline" if image else "WanPipeline"):
        raise CheckpointError(
            f"{folder} is a {type(pipe).__name__}",
            expected="an image-to-video model" if image else "a text-to-video model",
            remedy=f"Use examples/turbowan_{'t2v' if image else 'i2v'}.py for the other kind",
        )
    for name in ("transformer", "transformer_2")[: len(given)] if not arguments.no_patch else ():
        network, dense = getattr(pipe, name), arguments.attention_type == "original"
        if dense and held_proj_l(network):
            load_extra(network, folder / name, int8=arguments.quant_linear, proj_l=False)
        elif not dense and not held_proj_l(network):
            raise CheckpointError(
                f"{folder / name} has no proj_l, the projection of SLA",
                expected="a checkpoint trained with SLA for --attention_type sla or sagesla",
                remedy="Pass --attention_type original",
            )
    pipe.scheduler = RCMScheduler(
        sigma_max=arguments.sigma_max,
        sampler="ode" if getattr(arguments, "ode", False) else "sde",
        timestep_dtype="bfloat16",  # network times as in the published loop
    )
    return pipe


def _converted(paths: list[Path], arguments: argparse.Namespace) -> Path:
    """The pipeline folder of `.pth` files and a base, converted unless it is there. Its name has a
    digest of these files, so that changed ones are converted again."""
    for path in paths:
        if not path.is_file():
            read_checkpoint(path)  # which says what is wrong
    base = _base(arguments.base or BASES[arguments.model])
    files = [(str(p.resolve()), p.stat().st_size, p.stat().st_mtime_ns) for p in paths]
    digest = hashlib.blake2b(repr((str(base.resolve()), files)).encode(), digest_size=4)
    place = Path(arguments.cache).expanduser() if arguments.cache else paths[0].parent
    target = place / f"{paths[0].stem}-diffusers-{digest.hexdigest()}"
    if not target.exists():
        print(f"Converting to {target}, once", file=sys.stderr)
        convert_pipeline(
            paths[0], target, base=base, low_noise=paths[1] if len(paths) == 2 else None
        )
    return target


def _base(name: str) -> Path:
    """The folder of a base; one of the hub is downloaded without its transformers' weights."""
    from huggingface_hub import snapshot_download

    root = resolve_model(name)
    if isinstance(root, Path):
        return root
    weights = [f"transformer*/*.{ending}" for ending in ("safetensors", "bin")]
    try:
        return Path(snapshot_download(root, ignore_patterns=weights))
    except (OSError, ValueError) as error:
        raise ModelFolderError(
            f"--base: {root!r} is no folder here, and downloading it failed ({error})",
            remedy="Check the spelling and the connection, or download the folder first",
        ) from error


def read_image(path: str | Path) -> Image.Image:
    """Read an image file as RGB.

    Raises:
        SamplingError: There is none, or it is no image.
    """
    try:
        with Image.open(Path(path).expanduser()) as image:
            return image.convert("RGB")
    except (OSError, Image.DecompressionBombError) as error:
        raise SamplingError(
            f"--image_path: {path} cannot be read as an image ({error})",
            remedy="Pass a PNG or JPEG file",
        ) from error


def fitted(image: Image.Image, width: int, height: int) -> torch.Tensor:
    """Stretch an image as the models were distilled: bilinear with antialiasing on bytes, where
    diffusers' pipeline would use Lanczos.

    Returns:
        fp32 in 0..1, [1, 3, height, width].
    """
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]
    if pixels.shape[-2:] != (height, width):
        pixels = torch.nn.functional.interpolate(
            pixels, (height, width), mode="bilinear", antialias=True, align_corners=False
        )
    return pixels.float() / 255


def adapted_size(image: tuple[int, int], area: tuple[int, int]) -> tuple[int, int]:
    """The multiples of 16 nearest to an image's aspect ratio and the area of another size.

    Args:
        image: Width and height of the image.
        area: Width and height whose product is aimed at.

    Returns:
        Width and height.
    """
    pixels, ratio = area[0] * area[1], image[1] / image[0]
    ideal = math.sqrt(pixels / ratio), math.sqrt(pixels * ratio)
    width, height = (max(1, round(side / STRIDE)) * STRIDE for side in ideal)
    return width, height


def boundary_ratio(boundary: float, num_steps: int, sigma_max: float) -> float:
    """A pipeline's `boundary_ratio` that switches experts where TurboDiffusion's loop does.

    That loop compares a step's own time with the boundary, a pipeline the time rounded for the
    network: 0.9338 is not below 0.933, and its 932 is below 933.

    Args:
        boundary: Time under which the low-noise expert runs.
        num_steps: 1 to 4.
        sigma_max: Noise level of the first step.

    Returns:
        A fraction between the last step of the high-noise expert and the first of the other.
    """
    times = rcm_times(num_steps, sigma_max)[:-1]
    rounded = (times * 1000).to(torch.bfloat16).double() / 1000
    high = int((times >= boundary).sum())
    if high == 0:
        return float(rounded[0]) + 1.0
    return 0.0 if high == num_steps else float(rounded[high - 1 : high + 1].mean())


def sample(
    pipe: Any,
    arguments: argparse.Namespace,
    size: tuple[int, int],
    image: Image.Image | None = None,
) -> np.ndarray:
    """Make videos from the noise of TurboDiffusion's script.

    One generator, on the device that the pipeline runs on, draws the initial noise of all videos
    and then, step by step, their fresh noise. CPU and GPU draw other numbers from the same seed.

    Args:
        pipe: From `load`, patched or not.
        arguments: From `parse`.
        size: Width and height, multiples of 16.
        image: The first frame, of any size.

    Returns:
        fp32 in 0..1, [num_samples, frames, height, width, 3].

    Raises:
        SamplingError: A value is not finite.
    """
    width, height = size
    device, per_latent, scale = (
        pipe._execution_device, pipe.vae_scale_factor_temporal, pipe.vae_scale_factor_spatial
    )  # fmt: skip
    frames = 1 + (arguments.num_frames - 1) // per_latent
    channels = pipe.vae.config.z_dim
    shape = (arguments.num_samples, channels, frames, height // scale, width // scale)
    generator = torch.Generator(device).manual_seed(arguments.seed)
    noise = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
    pipe.scheduler.set_noise_generator(generator)
    more = {} if image is None else {"image": fitted(image, width, height)}
    videos: np.ndarray = pipe(
        prompt=arguments.prompt,
        width=width,
        height=height,
        num_frames=per_latent * (frames - 1) + 1,
        num_inference_steps=arguments.num_steps,
        num_videos_per_prompt=arguments.num_samples,
        guidance_scale=1.0,
        latents=pipe.scheduler.init_noise(noise),
        output_type="np",
        **more,
    ).frames
    if not np.isfinite(videos).all():
        raise SamplingError(
            f"the video of {arguments.prompt!r}", expected="finite values", got="NaN or infinity",
            remedy="Check the checkpoint, and compare with --no_patch",
        )  # fmt: skip
    return videos


def write_video(videos: np.ndarray, path: Path) -> None:
    """Write videos side by side as one mp4, completely or not at all.

    Args:
        videos: In 0..1, [B, F, H, W, 3].
        path: The file.
    """
    beside = np.concatenate(list(videos), axis=2)
    write_mp4((beside * 255 + 0.5).astype(np.uint8), path, fps=FPS)
