"""Make one video with the pipeline's own call.

So images, hooks, offloading, both experts of Wan 2.2 and every scheduler behave as usual.
Unpatched and patched models take the same path. `pipelines` holds what differs between pipelines.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from numbers import Integral
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import torch

from turbo_rcm_patch.errors import ConfigError, DTypeError, SamplingError
from turbo_rcm_patch.video.lora import loras_of
from turbo_rcm_patch.video.pipelines import (
    VideoPipeline,
    check_images,
    check_one_image,
    decode,
    draw,
    frames_made,
    initial_noise,
    kind_of,
    network_of,
    networks_of,
    trimmed,
)
from turbo_rcm_patch.video.rcm_times import noise_stream
from turbo_rcm_patch.video.scheduler import RCMScheduler
from turbo_rcm_patch.video.settings import Settings
from turbo_rcm_patch.video.source import ImageLike, Source, sources_of

_log = logging.getLogger(__name__)

#: Most steps that a trajectory keeps.
TRAJECTORY: Final = 12

#: A model takes at least so many steps, unless it was distilled.
_MANY: Final = 10

#: Attributes of a pipeline that shows no progress bar.
_QUIET: Final = {"_progress_bar_config": {"disable": True}}

#: Called after every denoising step with (steps done, steps in all).
OnStep = Callable[[int, int], None]


#: Makes a video from a seed: frames [F, H, W, 3] in 0..1.
Make = Callable[[int], "torch.Tensor | np.ndarray"]

#: Arguments of a pipeline's call that say what the video shows: embeddings, and an image.
Conditioning = dict[str, Any]


class Watched(Protocol):
    """Something that knows in which form attentions ran: a `PatchReport`, for instance."""

    def forms(self) -> dict[str, str]:
        """Return the form of each block that ran since `forget`, by its name."""

    def forget(self) -> None:
        """Forget the forms so far."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Denoised latents.

    Attributes:
        latents: [1, C, F, H, W] (of CogVideoX [1, F, C, H, W]), fp32, on the CPU.
        trajectory: The latents after some steps (see `trajectory_steps`), same form; empty unless
            asked for.
        seconds: Time of the pipeline's call: denoising, and encoding an image.
        peak_bytes: Peak memory of that call.
        forms: Of each step the form in which each block ran, if that was watched.
    """

    latents: torch.Tensor
    trajectory: tuple[torch.Tensor, ...]
    seconds: float
    peak_bytes: int | None
    forms: tuple[dict[str, str], ...] = field(default=(), kw_only=True)


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


def generate(
    pipe: VideoPipeline,
    prompt: str,
    *,
    image: ImageLike | None = None,
    seed: int = 0,
    settings: Settings | None = None,
    on_step: OnStep | None = None,
    **overrides: object,
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
        raise ConfigError("prompt", expected="one prompt", got=str(len(prompt)), remedy=remedy)
    source = sources_of(prompt, image)[0]
    _check_pipeline(pipe, source, settings)
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
        # The pipelines round a number that their VAE cannot make to another one.
        "num_frames": min(frames_made(pipe, settings.num_frames), settings.num_frames),
        "num_inference_steps": settings.steps,
        "guidance_scale": settings.guidance_scale,
        "max_sequence_length": settings.max_sequence_length,
    }
    if settings.guidance_scale_2 is not None:
        call["guidance_scale_2"] = settings.guidance_scale_2
    if source.image is not None:
        call["image"] = source.read()
    return call


def _check_pipeline(pipe: VideoPipeline, source: Source, settings: Settings) -> None:
    """Refuse what a pipeline cannot make, before anything is made."""
    given = {source.prompt: source.image is not None}
    check_images(kind_of(pipe), type(pipe).__name__, given)
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
        _replaced(pipe, **_QUIET, scheduler=_scheduler(pipe, settings, seed)),
        # CogVideoX's pipelines encode an image in the network's dtype.
        _replaced(pipe.vae, encode=lambda x: encode_image(x.to(pipe.vae.dtype))),
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
    pipe: VideoPipeline, settings: Settings | None = None, **overrides: object
) -> Settings:
    """Return the settings for a loaded pipeline: the overrides, then the given settings or else
    its folder's `turbo_rcm.json`, then the usual ones of the pipeline.

    Warns once if few steps are chosen for a model that is not marked as distilled.

    Raises:
        ConfigError: A setting has another value, or the pipeline does not take it.
    """
    kind, folder = kind_of(pipe), folder_of(pipe)
    usual = dict(kind.usual)
    if isinstance(pipe.scheduler, RCMScheduler):
        kept = pipe.scheduler.config
        usual |= {"sampler": "rcm", "sigma_max": kept.sigma_max, "form": kept.sampler}
        if kept.times is not None:
            usual |= {"sampler": "times", "times": tuple(kept.times)}
    if settings is None:
        settings = Settings.for_model(folder, usual, kind.own, **overrides)
    elif overrides:
        settings = Settings.for_model(None, **settings.as_dict() | overrides)
    settings = replace(settings, lora=loras_of(pipe))
    _check_settings(pipe, settings)
    if settings.few_steps or settings.steps < _MANY:
        says = Settings.for_model(folder, usual, kind.own)
        if not (says.few_steps or says.steps < _MANY or settings.lora):
            _say_once(
                f"{settings.steps} steps (sampler {settings.sampler}): nothing says that "
                f"{folder or type(pipe).__name__} was distilled for few steps, and a model that "
                "was not gives blurred videos. Load the LoRA it was distilled with (--lora), name "
                "the sampler in its turbo_rcm.json, or use sampler 'scheduler' with its usual "
                "steps."
            )
    return settings


@cache
def _say_once(text: str) -> None:
    """Log a warning, unless it was logged before."""
    _log.warning("%s", text)


def _forms(watched: Watched) -> dict[str, str]:
    """Return the forms of a network's blocks. A VAE has no form that was asked for."""
    return {name: form for name, form in watched.forms().items() if not name.startswith("vae.")}


@torch.no_grad()
def sample_by(make: Make, seed: int, device: torch.device, watched: Watched | None) -> Sample:
    """Let a function of the caller make a video; its frames are in the place of latents.

    Raises:
        SamplingError: It returned something else than frames.
    """
    if watched is not None:
        watched.forget()
    with Meter(device) as meter:
        frames = make(seed)
    found = torch.as_tensor(frames)
    if found.ndim != 4 or found.shape[-1] != 3 or not found.is_floating_point():
        raise SamplingError(
            "the result of make(seed)",
            expected="frames [F, H, W, 3] in 0..1, as a tensor or an array of numpy",
            got=f"{tuple(found.shape)} in {found.dtype}",
            remedy='Call the pipeline with output_type="np", and return its .frames[0]',
        )
    return Sample(
        latents=found.to("cpu", torch.float32).contiguous(),
        trajectory=(),
        seconds=meter.seconds,
        peak_bytes=meter.peak_bytes,
        forms=() if watched is None else (_forms(watched),),
    )


@torch.no_grad()
def encode(pipe: VideoPipeline, source: Source, settings: Settings) -> Conditioning:
    """Run the text encoder, and read the image if there is one.

    Args:
        pipe: The pipeline.
        source: The source of the video.
        settings: Read for guidance, negative prompt and length.

    Returns:
        Embeddings [1, L, C] in the encoder's dtype, on the pipeline's device, and the image.

    Raises:
        SamplingError: The pipeline takes no image, or needs one.
    """
    image, kind = source.read(), kind_of(pipe)
    check_images(kind, type(pipe).__name__, {source.prompt: image is not None})
    check_one_image(pipe)
    guided = settings.guidance_scale > 1.0
    embeds, negative = pipe.encode_prompt(
        prompt=source.prompt,
        negative_prompt=settings.negative_prompt if guided else None,
        do_classifier_free_guidance=guided,
        max_sequence_length=settings.max_sequence_length,
        device=pipe._execution_device,
    )
    found = {"prompt_embeds": embeds, "negative_prompt_embeds": negative}
    return found if image is None else found | {"image": image}


def trajectory_steps(steps: int) -> tuple[int, ...]:
    """Return the indices of the steps whose latents a trajectory keeps: all, or twelve evenly
    spread ones."""
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
    watched: Watched | None = None,
) -> Sample:
    """Denoise from seeded noise with the pipeline's own loop.

    Args:
        pipe: The pipeline; its scheduler and progress bar are as before afterwards.
        conditioning: From `encode`.
        seed: Seed of initial noise and re-noising.
        settings: How to sample.
        keep_trajectory: Keep the latents after the `trajectory_steps`.
        on_step: Called after every step with (done, total).
        watched: Asked after every step in which form the blocks ran.

    Returns:
        Latents, time and peak memory.
    """
    device = pipe._execution_device
    _check_settings(pipe, settings)
    _check_size(pipe, settings)
    kept: list[torch.Tensor] = []
    forms: list[dict[str, str]] = []
    wanted = trajectory_steps(settings.steps) if keep_trajectory else ()

    def after_step(
        _: object, step: int, __: object, tensors: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        if step in wanted:  # stays on the device: copying here would wait for it
            kept.append(tensors["latents"].clone())
        if watched is not None:
            forms.append(_forms(watched))
            if len(forms) < settings.steps:  # The report shows how the last step ran.
                watched.forget()
        if on_step is not None:
            on_step(step + 1, settings.steps)
        return {}

    if watched is not None:
        watched.forget()
    with (
        _replaced(pipe, **_QUIET, scheduler=_scheduler(pipe, settings, seed)),
        _private_rng(device, seed),
        Meter(device) as meter,
    ):
        latents = _denoise(pipe, conditioning, seed, settings, callback_on_step_end=after_step)
    return Sample(
        latents=latents.to("cpu", torch.float32),
        trajectory=tuple(step.to("cpu", torch.float32) for step in kept),
        seconds=meter.seconds,
        peak_bytes=meter.peak_bytes,
        forms=tuple(forms),
    )


def _denoise(
    pipe: VideoPipeline,
    conditioning: Conditioning,
    seed: int,
    settings: Settings,
    **more: object,
) -> torch.Tensor:
    """Call the pipeline and return its latents after all steps."""
    # The pipelines round a number that their VAE cannot make to another one.
    frames = min(frames_made(pipe, settings.num_frames), settings.num_frames)
    call: dict[str, object] = {
        "height": settings.height,
        "width": settings.width,
        "num_frames": frames,
        "num_inference_steps": settings.steps,
        "guidance_scale": settings.guidance_scale,
        "max_sequence_length": settings.max_sequence_length,
        "output_type": "latent",
    }
    if settings.guidance_scale_2 is not None:
        call["guidance_scale_2"] = settings.guidance_scale_2
    own, encode_image = pipe.prepare_latents, pipe.vae.encode

    def prepared(*given: object, **named: object) -> Any:
        """Put the noise of the seed in the place of the pipeline's, scaled for a few-step sampler:
        pipelines draw another one in bf16, and those of Wan do not scale it."""
        made = own(*given, **named)
        latents, *others = made if isinstance(made, tuple) else (made,)
        noise = draw(latents.shape, seed).double() * getattr(pipe.scheduler, "init_noise_sigma", 1)
        latents = noise.to(latents.dtype).to(latents.device)
        return (latents, *others) if others else latents

    with (
        _replaced(pipe, prepare_latents=prepared),
        # CogVideoX's pipelines encode an image in the network's dtype, where this VAE has fp32.
        _replaced(pipe.vae, encode=lambda x: encode_image(x.to(pipe.vae.dtype))),
    ):
        latents: torch.Tensor = pipe(**call | conditioning | more).frames
    return trimmed(pipe, latents, frames)


@torch.no_grad()
def recorded_calls(
    pipe: VideoPipeline,
    conditioning: Conditioning,
    settings: Settings,
    states: Sequence[tuple[torch.Tensor, float]],
) -> list[dict[str, Any]]:
    """Find out how the pipeline calls its transformer, without running it or making a step.

    The pipeline's own loop runs with a scheduler that hands it these states, so that conditions,
    masks and times of each token are the pipeline's.

    Args:
        pipe: The pipeline; as before afterwards.
        conditioning: From `encode`.
        settings: Shape of the video.
        states: Latents as the loop holds them, each with its network time.

    Returns:
        The keyword arguments of the call for each state, without guidance.
    """
    replay = _Replay(pipe.scheduler.config, states)
    calls: list[dict[str, Any]] = []

    def record(**given: Any) -> tuple[torch.Tensor]:
        calls.append(given)
        # The first call sees the pipeline's own noise. It serves to get all states through `step`.
        return (given["hidden_states"],)

    with (
        _replaced(pipe, **_QUIET, scheduler=replay),
        _private_rng(pipe._execution_device, 0),
        ExitStack() as stack,
    ):
        for network in networks_of(pipe).values():
            stack.enter_context(_replaced(network, forward=record))
        steps = {"num_inference_steps": len(states) + 1, "guidance_scale": 1.0}
        plain = {**conditioning, "negative_prompt_embeds": None}
        _denoise(pipe, plain, 0, settings, **steps)
    return calls[1:]


class _Replay:
    """A scheduler whose steps lead through given states."""

    order = 1
    init_noise_sigma = 1.0

    def __init__(
        self, config: Mapping[str, Any], states: Sequence[tuple[torch.Tensor, float]]
    ) -> None:
        self.config, self._states = config, list(states)
        times = [time for _, time in states]
        self._times = torch.tensor([*times[:1], *times] or [0.0])
        self.timesteps, self.sigmas = self._times, self._times / 1000.0

    def set_timesteps(self, _: int, device: torch.device | None = None) -> None:
        self.timesteps = self._times.to(device)

    def set_begin_index(self, _: int = 0) -> None:
        """Do nothing: there is no time to look up."""

    def scale_model_input(self, sample: torch.Tensor, _: object = None) -> torch.Tensor:
        return sample

    def step(
        self, _: torch.Tensor, __: object, sample: torch.Tensor, return_dict: bool = False
    ) -> tuple[torch.Tensor]:
        del return_dict
        return (self._states.pop(0)[0] if self._states else sample,)


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
        got, remedy = str(vae.dtype), "Call pipe.vae.to(torch.float32), or use load_pipeline"
        raise DTypeError("the VAE's dtype", expected="torch.float32", got=got, remedy=remedy)
    video = decode(pipe, latents.to(pipe._execution_device, torch.float32))
    pipe.maybe_free_model_hooks()
    frames = (video.float() / 2 + 0.5).clamp(0, 1)  # [B, 3, F, H, W]
    return frames.permute(0, 2, 3, 4, 1).contiguous().cpu()


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
        expected, remedy = "none, because it has no second expert", "Leave --guidance-scale-2 out"
        raise ConfigError(what, expected=expected, got=got, remedy=remedy)


def _check_size(pipe: VideoPipeline, settings: Settings) -> None:
    """Refuse a size beyond the model's positions, and say what becomes of the number of frames."""
    config = network_of(pipe).config
    positions = getattr(config, "rope_max_seq_len", None)
    for name, axis in (("height", 1), ("width", 2)) if positions else ():
        most = positions * config.patch_size[axis] * pipe.vae_scale_factor_spatial
        if getattr(settings, name) > most:
            got, expected = str(getattr(settings, name)), f"at most {most}, the model's positions"
            raise ConfigError(f"{name} of this model", expected=expected, got=got)
    made = frames_made(pipe, settings.num_frames)
    if made != settings.num_frames:
        _say_once(f"num_frames {settings.num_frames}: this VAE makes {made} frames of that")


def _scheduler(pipe: VideoPipeline, settings: Settings, seed: int) -> object:
    """Return the scheduler that `settings` ask for, the pipeline's own or a few-step one."""
    if settings.few_steps is None:
        return pipe.scheduler
    own = pipe.scheduler.config
    return RCMScheduler(
        num_train_timesteps=own.get("num_train_timesteps", 1000),
        noise_seed=seed,
        timestep_dtype=own.get("timestep_dtype", "float32"),
        **settings.few_steps,
    )


@contextmanager
def _replaced(owner: object, **attributes: object) -> Iterator[None]:
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
