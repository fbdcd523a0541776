"""Text to video: encode the prompt, sample latents, decode them.

The pipeline's own `__call__` denoises, so hooks, offloading, both experts of Wan 2.2 and every
scheduler behave as usual. Unpatched and patched models take the same path. `families` holds what
differs between pipelines.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final

import torch

from turbo_rcm_patch.errors import ConfigError, DTypeError
from turbo_rcm_patch.sampling.families import PipelineFamily, VideoPipeline, family_of
from turbo_rcm_patch.sampling.scheduler import RCMScheduler, noise_stream
from turbo_rcm_patch.sampling.settings import Settings

__all__ = [
    "TRAJECTORY",
    "Conditioning",
    "Generation",
    "Meter",
    "Sample",
    "decode_latents",
    "encode_prompt",
    "generate",
    "initial_noise",
    "sample_latents",
    "settings_for",
    "trajectory_steps",
]

#: Most steps that a trajectory keeps.
TRAJECTORY: Final = 12

#: Called after every denoising step with (steps done, steps in all).
OnStep = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Conditioning:
    """The embeddings [1, L, C] of a prompt and, under guidance, of the negative prompt."""

    embeds: torch.Tensor
    negative_embeds: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Sample:
    """Denoised latents.

    Attributes:
        latents: [1, C, F, H, W] (of CogVideoX [1, F, C, H, W]), fp32, on the CPU.
        trajectory: The latents after some steps (see `trajectory_steps`), same form; empty unless
            asked for.
        seconds: Time of the denoising loop.
        peak_bytes: Peak memory of the denoising loop.
    """

    latents: torch.Tensor
    trajectory: tuple[torch.Tensor, ...]
    seconds: float
    peak_bytes: int | None


@dataclass(frozen=True, slots=True)
class Generation:
    """A generated video.

    Attributes:
        prompt: The prompt.
        seed: Seed of initial noise and re-noising.
        settings: The settings it was made with.
        latents: [1, C, F, H, W] (of CogVideoX [1, F, C, H, W]), fp32, on the CPU.
        frames: [F, H, W, 3], fp32 in 0..1, on the CPU.
        seconds: Time of the denoising loop.
        decode_seconds: Time of the VAE.
        peak_bytes: Peak memory of the denoising loop.
    """

    prompt: str
    seed: int
    settings: Settings
    latents: torch.Tensor
    frames: torch.Tensor
    seconds: float
    decode_seconds: float
    peak_bytes: int | None


def generate(
    pipe: VideoPipeline,
    prompt: str,
    *,
    seed: int = 0,
    settings: Settings | None = None,
    on_step: OnStep | None = None,
    **overrides: object,
) -> Generation:
    """Generate one video.

    Args:
        pipe: A `WanPipeline` or `CogVideoXPipeline`, patched or not, on any device, with or
            without offloading. Its VAE must be in fp32.
        prompt: The prompt.
        seed: Seed of the initial noise and of the re-noising, which have separate generators.
        settings: The settings; by default those of the model's folder (see `Settings.for_model`).
        on_step: Called after every step with (done, total).
        **overrides: Fields of `Settings` by name, e.g. `steps=4`, `sampler="rcm"`, `sigma_max=80`.

    Returns:
        Latents, float frames, times and peak memory.
    """
    if settings is None:
        settings = settings_for(pipe, **overrides)
    elif overrides:
        settings = Settings.for_model(None, **(settings.as_dict() | overrides))
    conditioning = encode_prompt(pipe, prompt, settings)
    sample = sample_latents(pipe, conditioning, seed=seed, settings=settings, on_step=on_step)
    with Meter(pipe._execution_device) as decoding:
        frames = decode_latents(pipe, sample.latents)[0]
    return Generation(
        prompt=prompt,
        seed=seed,
        settings=settings,
        latents=sample.latents,
        frames=frames,
        seconds=sample.seconds,
        decode_seconds=decoding.seconds,
        peak_bytes=sample.peak_bytes,
    )


def settings_for(pipe: VideoPipeline, **overrides: object) -> Settings:
    """Settings for a loaded pipeline: the overrides, then its folder's `turbo_rcm.json`, then the
    defaults of its family.
    """
    family = family_of(pipe)
    name = getattr(pipe, "name_or_path", None)
    folder = name if name and Path(name).is_dir() else None
    settings = Settings.for_model(folder, family.DEFAULTS, family.OWN, **overrides)
    _check_sampler(pipe, family, settings)
    return settings


@torch.no_grad()
def encode_prompt(pipe: VideoPipeline, prompt: str, settings: Settings) -> Conditioning:
    """Run the text encoder.

    Args:
        pipe: The pipeline.
        prompt: The prompt.
        settings: Read for guidance, negative prompt and length.

    Returns:
        Embeddings [1, L, C] in the encoder's dtype, on the pipeline's device.
    """
    guided = settings.guidance_scale > 1.0
    embeds, negative = pipe.encode_prompt(
        prompt=prompt,
        negative_prompt=settings.negative_prompt if guided else None,
        do_classifier_free_guidance=guided,
        max_sequence_length=settings.max_sequence_length,
        device=pipe._execution_device,
    )
    return Conditioning(embeds, negative)


def initial_noise(pipe: VideoPipeline, seed: int, settings: Settings) -> torch.Tensor:
    """Standard normal noise [1, C, F, H, W] (CogVideoX: [1, F, C, H, W]), fp32, on the CPU:
    `torch.Generator("cpu").manual_seed(seed)`.
    """
    shape = family_of(pipe).latent_shape(pipe, settings)
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32)


def trajectory_steps(steps: int) -> tuple[int, ...]:
    """Indices of the steps whose latents a trajectory keeps: all, or twelve evenly spread ones."""
    if steps <= TRAJECTORY:
        return tuple(range(steps))
    return tuple(round((i + 1) * steps / TRAJECTORY) - 1 for i in range(TRAJECTORY))


def sample_latents(
    pipe: VideoPipeline,
    conditioning: Conditioning,
    *,
    seed: int,
    settings: Settings,
    keep_trajectory: bool = False,
    on_step: OnStep | None = None,
) -> Sample:
    """Denoise from seeded noise with the pipeline's own loop.

    Args:
        pipe: The pipeline; its scheduler and progress bar are as before afterwards.
        conditioning: From `encode_prompt`.
        seed: Seed of initial noise and re-noising.
        settings: How to sample.
        keep_trajectory: Whether to keep the latents after the `trajectory_steps`.
        on_step: Called after every step with (done, total).

    Returns:
        Latents, time and peak memory.
    """
    family, device = family_of(pipe), pipe._execution_device
    _check_sampler(pipe, family, settings)
    noise = initial_noise(pipe, seed, settings)
    kept: list[torch.Tensor] = []
    wanted = trajectory_steps(settings.steps) if keep_trajectory else ()

    def after_step(
        _: object, step: int, __: object, tensors: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        if step in wanted:  # stays on the device: copying here would wait for it
            kept.append(tensors["latents"].clone())
        if on_step is not None:
            on_step(step + 1, settings.steps)
        return {}

    with (
        _quiet(pipe),
        _sampler(pipe, settings, seed),
        _private_rng(device, seed),
        Meter(device) as meter,
    ):
        latents = pipe(
            prompt_embeds=conditioning.embeds,
            negative_prompt_embeds=conditioning.negative_embeds,
            height=settings.height,
            width=settings.width,
            num_frames=settings.num_frames,
            num_inference_steps=settings.steps,
            guidance_scale=settings.guidance_scale,
            max_sequence_length=settings.max_sequence_length,
            callback_on_step_end=after_step,
            output_type="latent",
            **family.call_inputs(pipe, noise, settings, conditioning.embeds.dtype),
        ).frames
    latents = family.trim(pipe, latents, settings)
    return Sample(
        latents=latents.to("cpu", torch.float32),
        trajectory=tuple(step.to("cpu", torch.float32) for step in kept),
        seconds=meter.seconds,
        peak_bytes=meter.peak_bytes,
    )


@torch.no_grad()
def decode_latents(pipe: VideoPipeline, latents: torch.Tensor) -> torch.Tensor:
    """Decode with the VAE in fp32.

    Args:
        pipe: The pipeline, whose VAE must be in fp32: in bf16 its rounding would hide what is
            being compared.
        latents: [B, C, F, H, W] (CogVideoX: [B, F, C, H, W]), any float dtype, as the transformer
            sees them.

    Returns:
        Frames [B, F, H, W, 3], fp32 in 0..1, on the CPU.
    """
    vae = pipe.vae
    if vae.dtype != torch.float32:
        raise DTypeError(
            "the VAE's dtype",
            expected="torch.float32",
            got=str(vae.dtype),
            remedy="Call pipe.vae.to(torch.float32), or load with load_pipeline",
        )
    video = family_of(pipe).decode(pipe, latents.to(pipe._execution_device, torch.float32))
    pipe.maybe_free_model_hooks()
    frames = (video.float() / 2 + 0.5).clamp(0, 1)  # [B, 3, F, H, W]
    return frames.permute(0, 2, 3, 4, 1).contiguous().cpu()


def _check_sampler(pipe: object, family: PipelineFamily, settings: Settings) -> None:
    if settings.sampler not in family.SAMPLERS:
        raise ConfigError(
            f"sampler of a {type(pipe).__name__}",
            expected=f"one of {family.SAMPLERS}",
            got=repr(settings.sampler),
            remedy="The rCM sampler is for students that predict a rectified flow's velocity; "
            "leave sampler out",
        )


@contextmanager
def _sampler(pipe: VideoPipeline, settings: Settings, seed: int) -> Iterator[None]:
    """Give the pipeline the sampler of `settings`, and its own scheduler back afterwards."""
    if settings.sampler == "scheduler":
        yield
        return
    own = pipe.scheduler
    pipe.scheduler = RCMScheduler(
        num_train_timesteps=own.config.get("num_train_timesteps", 1000),
        sigma_max=settings.sigma_max,
        sampler=settings.form,
        noise_seed=seed,
        timestep_dtype=own.config.get("timestep_dtype", "float32"),
    )
    try:
        yield
    finally:
        pipe.scheduler = own


@contextmanager
def _quiet(pipe: VideoPipeline) -> Iterator[None]:
    """Hide the pipeline's progress bar, and restore its settings afterwards."""
    before = getattr(pipe, "_progress_bar_config", None)
    pipe.set_progress_bar_config(disable=True)
    try:
        yield
    finally:
        if before is None:
            del pipe._progress_bar_config
        else:
            pipe._progress_bar_config = before


@contextmanager
def _private_rng(device: torch.device, seed: int) -> Iterator[None]:
    """Make schedulers that use the global generators reproducible, and restore the caller's
    generators afterwards."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(noise_stream(seed, "scheduler").initial_seed())
        yield


class Meter:
    """Context manager that measures what runs inside, synchronising with the device at both ends
    only.

    Attributes:
        seconds: Wall-clock time.
        peak_bytes: Most memory held at once: the allocator's on a GPU, resident memory of the
            process on a Linux CPU, None where neither can be read.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds = 0.0
        self.peak_bytes: int | None = None

    def __enter__(self) -> Meter:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            self._resettable = _reset_resident_peak()
        self._start = time.perf_counter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.device.type == "cuda":
            if error is None:  # after a fault on the device, waiting would hide the first error
                torch.cuda.synchronize(self.device)
                self.peak_bytes = torch.cuda.max_memory_allocated(self.device)
        elif self._resettable:
            self.peak_bytes = _resident_peak()
        self.seconds = time.perf_counter() - self._start


def _reset_resident_peak() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")  # 5: reset the peak of resident memory
    except OSError:
        return False
    return True


def _resident_peak() -> int | None:
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None
