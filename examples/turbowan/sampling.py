"""One generation: the first frame, and the noise and steps of TurboDiffusion's loop in diffusers'
pipelines."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from turbo_rcm_patch.errors import SamplingError
from turbo_rcm_patch.video import source
from turbo_rcm_patch.video.families.wan import Wan
from turbo_rcm_patch.video.rcm_times import rcm_times
from turbo_rcm_patch.video.scheduler import RCMScheduler
from turbo_rcm_patch.video.settings import Settings, folder_defaults
from turbo_rcm_patch.video.video import write_mp4

if TYPE_CHECKING:
    from diffusers import WanImageToVideoPipeline, WanPipeline

FPS: Final = 16
#: Width and height are multiples of this.
_STRIDE: Final = 16
#: The only setting of a model's folder that the scripts have no argument for.
_TEXT_TOKENS: Final = "max_sequence_length"


def adapted_size(image: tuple[int, int], area: tuple[int, int]) -> tuple[int, int]:
    """Width and height with an image's aspect ratio and about the area of another size.

    Args:
        image: Width and height of the image.
        area: Width and height whose product is aimed at.

    Returns:
        Width and height, the nearest multiples of 16.
    """
    pixels, ratio = area[0] * area[1], image[1] / image[0]
    ideal = math.sqrt(pixels / ratio), math.sqrt(pixels * ratio)
    width, height = (max(1, round(side / _STRIDE)) * _STRIDE for side in ideal)
    return width, height


def read_image(path: str | Path) -> torch.Tensor:
    """An image file as uint8, [1, 3, H, W].

    Raises:
        SamplingError: There is none, or it is no image.
    """
    rgb = source.read_image(path, "--image_path")
    pixels = torch.frombuffer(bytearray(rgb.tobytes()), dtype=torch.uint8)
    return pixels.view(1, rgb.height, rgb.width, 3).permute(0, 3, 1, 2).contiguous()


def fitted(image: torch.Tensor, width: int, height: int) -> torch.Tensor:
    """Stretched to a size and scaled to 0..1, as the models were distilled.

    Bilinear with antialiasing on bytes, where diffusers' pipeline would use Lanczos.

    Args:
        image: uint8, [1, 3, H, W].
        width: Of the video.
        height: Of the video.

    Returns:
        fp32, [1, 3, height, width].
    """
    if image.shape[-2:] != (height, width):
        image = torch.nn.functional.interpolate(
            image, (height, width), mode="bilinear", antialias=True, align_corners=False
        )
    return image.to(torch.float32) / 255


def boundary_ratio(boundary: float, num_steps: int, sigma_max: float) -> float:
    """A pipeline's `boundary_ratio` that switches experts where TurboDiffusion's loop does.

    That compares a step's own time with the boundary, a pipeline the time rounded for the network:
    0.9338 is not below 0.933, and its 932 is below 933.

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
    if high == num_steps:
        return 0.0
    return float(rounded[high - 1 : high + 1].mean())


def sample(
    pipe: WanPipeline | WanImageToVideoPipeline,
    prompt: str,
    *,
    width: int,
    height: int,
    num_frames: int = 81,
    num_steps: int = 4,
    num_samples: int = 1,
    seed: int = 0,
    image: torch.Tensor | None = None,
) -> torch.Tensor:
    """Latents of some videos of one prompt, which start from the noise of TurboDiffusion's script.

    One generator, on the device that the pipeline runs on, draws the initial noise of all videos
    and then, a step at a time, theirs again. CPU and GPU draw other numbers from the same seed.

    Args:
        pipe: With an `RCMScheduler`, patched or not.
        prompt: What to show.
        width: A multiple of 16.
        height: A multiple of 16.
        num_frames: Frames; the largest 4n + 1 of them are made.
        num_steps: 1 to 4.
        num_samples: How many videos, in one batch.
        seed: Of all noise.
        image: The first frame of a `WanImageToVideoPipeline`, uint8, [1, 3, H, W] of any size.

    Returns:
        [num_samples, channels, frames, height, width] of the VAE's latents, fp64.

    Raises:
        SamplingError: The scheduler is another one, or the latents are not finite.
    """
    scheduler = pipe.scheduler
    if not isinstance(scheduler, RCMScheduler):
        raise SamplingError(
            "pipe.scheduler", expected="an RCMScheduler", got=type(scheduler).__name__
        )
    device = pipe._execution_device
    per_latent, scale = pipe.vae_scale_factor_temporal, pipe.vae_scale_factor_spatial
    frames = 1 + (num_frames - 1) // per_latent
    shape = (num_samples, pipe.vae.config.z_dim, frames, height // scale, width // scale)
    generator = torch.Generator(device).manual_seed(seed)
    noise = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
    more: dict[str, Any] = {} if image is None else {"image": fitted(image, width, height)}
    scheduler.set_noise_generator(generator)
    try:
        latents: torch.Tensor = pipe(
            prompt=prompt,
            width=width,
            height=height,
            num_frames=per_latent * (frames - 1) + 1,
            num_inference_steps=num_steps,
            num_videos_per_prompt=num_samples,
            guidance_scale=1.0,
            latents=scheduler.init_noise(noise),
            max_sequence_length=_text_tokens(pipe),
            output_type="latent",
            **more,
        ).frames
    except BaseException:
        pipe.maybe_free_model_hooks()  # Under offload, or the next video finds less memory.
        raise
    finally:
        scheduler.set_noise_generator(None)
    if not torch.isfinite(latents).all():
        raise SamplingError(
            f"the latents of {prompt!r}",
            expected="finite values",
            got="NaN or infinity",
            remedy="Pass --guard to see which pair makes them, or check the checkpoint",
        )
    return latents


def _text_tokens(pipe: WanPipeline | WanImageToVideoPipeline) -> int:
    """Tokens of a prompt, 512 if the base's folder does not say; what is missing is zeros."""
    given = folder_defaults(getattr(pipe, "name_or_path", None))
    own: dict[str, Any] = {key: value for key, value in given.items() if key == _TEXT_TOKENS}
    return Settings(**own).max_sequence_length


@torch.no_grad()
def decode(pipe: WanPipeline | WanImageToVideoPipeline, latents: torch.Tensor) -> torch.Tensor:
    """Videos of latents, in the VAE's dtype and in 0..1 in fp32.

    Args:
        pipe: With the VAE.
        latents: What `sample` returned.

    Returns:
        fp32, [B, F, H, W, 3], on the CPU.
    """
    vae = pipe.vae
    latents = latents.to(pipe._execution_device, torch.float32).to(vae.dtype)
    mean, std = Wan.scales(pipe, latents)
    try:
        # The reciprocal is rounded too, as where the models come from.
        video: torch.Tensor = vae.decode(latents / (1.0 / std) + mean, return_dict=False)[0]
    finally:
        pipe.maybe_free_model_hooks()
    return ((video.float().cpu().clamp(-1, 1) + 1) / 2).permute(0, 2, 3, 4, 1)


def write_video(videos: torch.Tensor, path: Path) -> None:
    """Write videos side by side as one mp4, which is whole or not there.

    Args:
        videos: In 0..1, [B, F, H, W, 3].
        path: The file.
    """
    beside = torch.cat(list(videos.nan_to_num()), dim=2)
    write_mp4((beside.numpy() * 255 + 0.5).astype(np.uint8), path, fps=FPS)
