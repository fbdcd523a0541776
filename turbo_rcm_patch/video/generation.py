"""Make one video with the pipeline's own call.

So images, hooks, offloading, both experts of Wan 2.2 and every scheduler behave as usual.
Unpatched and patched models take the same path. `pipelines` holds what differs between pipelines.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from numbers import Integral
from pathlib import Path
from typing import Any, Final, Unpack

import numpy as np
import torch

from turbo_rcm_patch.errors import ConfigError, DTypeError, SamplingError
from turbo_rcm_patch.video.lora import loras_of
from turbo_rcm_patch.video.pipelines import (
    VideoPipeline,
    check_image,
    check_one_image,
    frames_made,
    frames_to_ask,
    initial_noise,
    kind_of,
    network_of,
    size_limits,
)
from turbo_rcm_patch.video.rcm_times import MAX_STEPS, noise_stream
from turbo_rcm_patch.video.scheduler import RCMScheduler
from turbo_rcm_patch.video.settings import Settings, SettingsOptions
from turbo_rcm_patch.video.source import ImageLike, Source, sources_of
from turbo_rcm_patch.video.video import as_bytes, write_mp4

_log = logging.getLogger(__name__)

#: A model takes at least so many steps, unless it was distilled.
_MANY: Final = 10

#: Called after every denoising step with (steps done, steps in all).
OnStep = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A generated video.

    Attributes:
        prompt: The prompt.
        seed: Seed of initial noise and re-noising.
        settings: The settings it was made with.
        frames: [F, H, W, 3], fp32 in 0..1, on the CPU.
        latents: The latents after the last step, in the pipeline's layout; fp32, on the CPU.
        seconds: Time of all steps, and of encoding the prompt and an image before them.
        decode_seconds: Time of the VAE.
        peak_bytes: Peak memory until the last step; None on a CPU.
    """

    prompt: str
    seed: int
    settings: Settings
    frames: torch.Tensor
    latents: torch.Tensor
    seconds: float
    decode_seconds: float
    peak_bytes: int | None

    def __repr__(self) -> str:
        frames, height, width, _ = self.frames.shape
        return (
            f"Generation({self.prompt!r}, seed={self.seed}: {frames} frames of {width} x {height} "
            f"in {self.seconds:.2f} s, and {self.decode_seconds:.2f} s to decode)"
        )

    def save(self, path: str | Path) -> Path:
        """Write the video as an mp4 file, and return its path.

        Args:
            path: The file to be, which ends in .mp4; its folder is made.

        Raises:
            OutputError: It cannot be written.
        """
        path = Path(path).expanduser()
        write_mp4(as_bytes(self.frames), path, self.settings.fps)
        return path


def generate(
    pipe: VideoPipeline,
    prompt: str,
    *,
    image: ImageLike | None = None,
    seed: int = 0,
    settings: Settings | None = None,
    on_step: OnStep | None = None,
    **overrides: Unpack[SettingsOptions],
) -> Generation:
    """Generate one video with the pipeline's own call.

    Args:
        pipe: One of `pipelines.PIPELINES`, patched or not, on any device, with or without
            offloading. Its VAE must be in fp32: in bf16 its rounding would hide what a comparison
            looks for. The pipeline is unchanged afterwards.
        prompt: The prompt.
        image: For an image-to-video pipeline the first frame: a file or an image of PIL's, which
            the pipeline resizes to the size of the video.
        seed: Seed of the initial noise and of the re-noising, which have separate generators.
        settings: The settings; by default those of the model's folder (see `Settings.for_model`).
        on_step: Called after every step with (done, total).
        **overrides: Fields of `Settings` by name, e.g. `sampler="lightning"`, `height=480`.

    Returns:
        Float frames, latents, times and peak memory.

    Raises:
        ConfigError: A setting has another value, or the pipeline does not take it.
        DTypeError: The VAE is not in fp32.
        SamplingError: The pipeline takes no image, or needs one, or the video is not finite.
    """
    settings = settings_for(pipe, settings, **overrides)
    check_seed(seed)
    if not isinstance(prompt, str):
        remedy = "Call `generate` for each of them, or `compare`, which takes several"
        raise ConfigError("prompt", expected="one prompt", got=repr(prompt)[:80], remedy=remedy)
    source = sources_of(prompt, image)[0]
    check_pipeline(pipe, source, settings)
    denoising, decoding = Meter(pipe._execution_device), Meter(pipe._execution_device)
    latents = torch.empty(0)

    def after_step(
        _: object, step: int, __: object, tensors: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        nonlocal latents
        latents = tensors["latents"]
        if step + 1 == pipe.num_timesteps:
            latents = latents.to(pipe.vae.dtype)  # CogVideoX's pipelines do not cast them.
            denoising.stop()
            decoding.start()
        if on_step is not None:
            on_step(step + 1, settings.steps)
        return {"latents": latents}

    with _prepared(pipe, settings, seed):
        denoising.start()
        frames = pipe(
            prompt=source.prompt,
            latents=initial_noise(pipe, settings, seed),
            output_type="np",
            callback_on_step_end=after_step,
            **_call_arguments(pipe, source, settings),
        ).frames[0]
        decoding.stop()
    if not np.isfinite(frames).all():
        part = "latents" if not latents.isfinite().all() else "frames"
        what, got = "the video holds NaN or infinity", f"{part} that are not finite"
        remedy = "Look for NaN in the weights and in what is given, and try another dtype: fp16 "
        remedy += "overflows where bf16 does not"
        raise SamplingError(what, expected="finite numbers", got=got, remedy=remedy)
    return Generation(
        prompt=source.prompt,
        seed=seed,
        settings=settings,
        frames=torch.from_numpy(frames),
        latents=latents.to("cpu", torch.float32),
        seconds=denoising.seconds,
        decode_seconds=decoding.seconds,
        peak_bytes=denoising.peak_bytes,
    )


def _call_arguments(pipe: VideoPipeline, source: Source, settings: Settings) -> dict[str, object]:
    """Return the arguments of a pipeline's call that settings and image decide."""
    call: dict[str, object] = {
        "negative_prompt": settings.negative_prompt,
        "height": settings.height,
        "width": settings.width,
        "num_frames": frames_to_ask(pipe, settings.num_frames),
        "num_inference_steps": settings.steps,
        "guidance_scale": settings.guidance_scale,
        "max_sequence_length": settings.max_sequence_length,
    }
    if settings.guidance_scale_2 is not None:
        call["guidance_scale_2"] = settings.guidance_scale_2
    if source.image is not None:
        call["image"] = source.read()
    return call


def check_pipeline(pipe: VideoPipeline, source: Source, settings: Settings) -> None:
    """Refuse what a pipeline cannot make, before anything is made."""
    check_image(type(pipe).__name__, kind_of(pipe), source.image is not None)
    check_one_image(pipe)
    if pipe.vae.dtype != torch.float32:
        got, remedy = str(pipe.vae.dtype), "Call pipe.vae.to(torch.float32), or use load_pipeline"
        raise DTypeError("the VAE's dtype", expected="torch.float32", got=got, remedy=remedy)
    _check_size(pipe, settings)


@contextmanager
def _prepared(pipe: VideoPipeline, settings: Settings, seed: int) -> Iterator[None]:
    """Give a pipeline its sampler, no progress bar, and generators of its own for one call."""
    encode_image = pipe.vae.encode
    with (
        replaced(pipe, scheduler=_scheduler(pipe, settings, seed)),
        replaced(pipe, _progress_bar_config={"disable": True}),
        # CogVideoX's pipelines encode an image in the network's dtype.
        replaced(pipe.vae, encode=lambda x: encode_image(x.to(pipe.vae.dtype))),
        _private_rng(pipe._execution_device, seed),
    ):
        yield


def folder_of(pipe: VideoPipeline) -> Path | None:
    """Find the folder that a pipeline was loaded from, of a name on the hub that of the hub's
    cache; None if it was made otherwise."""
    name = getattr(pipe, "name_or_path", None)
    if name and Path(name).is_dir():
        return Path(name)
    part = Path(str(network_of(pipe).config.get("_name_or_path", "")))
    return part.parent if part.parent.parent.name == "snapshots" else None


def check_seed(seed: int, count: int = 1) -> None:
    """Raise a `ConfigError` unless torch takes this seed and the next ones for `count` videos."""
    if not isinstance(seed, Integral) or not -(2**63) <= seed <= 2**64 - count:
        raise ConfigError("seed", expected="an integer that fits into 64 bits", got=repr(seed))


def settings_for(
    pipe: VideoPipeline, settings: Settings | None = None, **overrides: Unpack[SettingsOptions]
) -> Settings:
    """Return the settings for a loaded pipeline: the overrides, then the given settings or else
    its folder's `turbo_rcm.json`, then the usual ones of the pipeline.

    Warns once if few steps are chosen for a model that is not marked as distilled.

    Raises:
        ConfigError: A setting has another value, or the pipeline does not take it.
    """
    kind, folder = kind_of(pipe), folder_of(pipe)
    with_scheduler = kind.with_scheduler
    if isinstance(pipe.scheduler, RCMScheduler):
        steps = len(pipe.scheduler.config.times or range(MAX_STEPS))
        with_scheduler = {"steps": steps, "guidance_scale": 1.0}
    if settings is None:
        settings = Settings.for_model(folder, kind.usual, with_scheduler, **overrides)
    elif overrides:
        settings = Settings.for_model(None, **settings.as_dict() | overrides)
    settings = replace(settings, lora=loras_of(pipe))
    _check_settings(pipe, settings)
    if settings.few_steps or settings.steps < _MANY:
        says = Settings.for_model(folder, kind.usual, with_scheduler)
        if not (says.few_steps or says.steps < _MANY or settings.lora):
            _say_once(
                f"{settings.steps} steps (sampler {settings.sampler}): nothing says that "
                f"{folder or type(pipe).__name__} was distilled for few steps, and a model that "
                "was not gives blurred videos. Load the LoRA it was distilled with, name "
                "the sampler in its turbo_rcm.json, or use sampler 'scheduler' with its usual "
                "steps."
            )
    return settings


@cache
def _say_once(text: str) -> None:
    """Log a warning, unless it was logged before."""
    _log.warning("%s", text)


def _check_settings(pipe: Any, settings: Settings) -> None:
    """Refuse settings that this pipeline does not take."""
    name = type(pipe).__name__
    if settings.few_steps and not kind_of(pipe).few_steps:
        what, got = f"sampler of a {name}", repr(settings.sampler)
        remedy = "Few-step samplers are for students that predict a rectified flow's velocity; "
        remedy += "leave sampler out"
        raise ConfigError(what, expected="'scheduler'", got=got, remedy=remedy)
    if settings.guidance_scale_2 is not None and getattr(pipe, "transformer_2", None) is None:
        what, got = f"guidance_scale_2 of a {name}", repr(settings.guidance_scale_2)
        expected, remedy = "none, because it has no second expert", "Leave `guidance_scale_2=` out"
        raise ConfigError(what, expected=expected, got=got, remedy=remedy)


def _check_size(pipe: VideoPipeline, settings: Settings) -> None:
    """Refuse a size that the model has no positions for, and say what becomes of the number of
    frames."""
    asked, frames = settings.num_frames, frames_made(pipe, settings.num_frames)
    for name, (least, most) in size_limits(pipe).items():
        value = getattr(settings, name)
        if not least <= (frames if name == "num_frames" else value) <= most:
            expected = str(most) if least == most else f"at most {most}, the model's positions"
            got, remedy = str(value), f"Choose `{name}={most}`"
            raise ConfigError(f"{name} of this model", expected=expected, got=got, remedy=remedy)
    if frames != asked:
        above = next(n for n in itertools.count(asked) if frames_made(pipe, n) == n)
        nearer = (
            f"; {above} is nearer" if frames < asked and above - asked < asked - frames else ""
        )
        _say_once(f"num_frames {asked}: this VAE makes {frames} frames of that{nearer}")


def _scheduler(pipe: VideoPipeline, settings: Settings, seed: int) -> object:
    """Return the scheduler that `settings` ask for, the pipeline's own or a few-step one."""
    config = pipe.scheduler.config
    if settings.few_steps is None:
        if isinstance(pipe.scheduler, RCMScheduler):
            return RCMScheduler.from_config(config, noise_seed=seed)
        return pipe.scheduler
    return RCMScheduler(
        num_train_timesteps=config.get("num_train_timesteps", 1000),
        noise_seed=seed,
        timestep_dtype=config.get("timestep_dtype", "float32"),
        **settings.few_steps,
    )


@contextmanager
def replaced(owner: object, **attributes: object) -> Iterator[None]:
    """Set attributes of an instance, and restore afterwards what was there."""
    with ExitStack() as undo:
        for name, value in attributes.items():
            if name in owner.__dict__:
                undo.callback(setattr, owner, name, owner.__dict__[name])
            else:
                undo.callback(delattr, owner, name)
            setattr(owner, name, value)
        yield


@contextmanager
def _private_rng(device: torch.device, seed: int) -> Iterator[None]:
    """Make schedulers that use the global generators reproducible, and restore the caller's
    generators afterwards."""
    number = noise_stream(seed, "scheduler").initial_seed()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(number)  # `torch.manual_seed` seeds every GPU
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(number)
        yield


class Meter:
    """Context manager that measures what runs inside, synchronising with the device at both ends
    only.

    Attributes:
        seconds: Wall-clock time.
        peak_bytes: Most memory that the allocator of a GPU held at once, None on a CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds = 0.0
        self.peak_bytes: int | None = None

    def start(self) -> None:
        """Start the clock, and forget the peak memory so far."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        self._start = time.perf_counter()

    def stop(self) -> None:
        """Read the clock and the peak memory since `start`."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            self.peak_bytes = torch.cuda.max_memory_allocated(self.device)
        self.seconds = time.perf_counter() - self._start

    def __enter__(self) -> Meter:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:  # After a fault on the device, waiting would hide the first error.
            self.stop()
