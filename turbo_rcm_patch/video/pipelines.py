"""The pipelines of diffusers that `generate` and `compare` call, and the differences between them.

Any other pipeline is called by its user: `compare(pipe, ..., make=...)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch

from turbo_rcm_patch.errors import NotAModelError, SamplingError
from turbo_rcm_patch.patching.find import VAE, parts_of
from turbo_rcm_patch.video.settings import WAN_OWN, Settings

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline, ModelMixin, SchedulerMixin

    class LoadedPipeline(DiffusionPipeline):  # type: ignore[misc]
        """What type checkers know of the pipelines that `load_pipeline` returns."""

        transformer: ModelMixin
        vae: ModelMixin
        scheduler: SchedulerMixin


#: A pipeline of one of the classes in `PIPELINES`, for annotations.
VideoPipeline: TypeAlias = "DiffusionPipeline"


@dataclass(frozen=True, slots=True)
class Kind:
    """The differences between pipelines.

    Attributes:
        usual: Settings where neither the caller nor the model's folder says.
        with_scheduler: Steps and guidance that the pipeline's own scheduler is usually run with.
        image: True if it makes a video from an image, the first frame.
        few_steps: True if its networks predict a rectified flow's velocity, as few-step samplers
            need. CogVideoX's predict v = alpha noise - sigma x0 of a variance-preserving process.
        cogvideox: True if latents are [B, F, C, H, W], in the network's dtype from step to step,
            and the VAE takes them in pairs; else they are Wan's, [B, C, F, H, W] in fp32.
    """

    usual: Mapping[str, object] = field(default_factory=dict)
    with_scheduler: Mapping[str, object] = field(default_factory=lambda: WAN_OWN)
    image: bool = False
    few_steps: bool = False
    cogvideox: bool = False


_SKYREELS: Final = {"height": 544, "width": 960, "num_frames": 97, "fps": 24}
#: Those of CogVideoX 1.0, 2B and 5B.
_COG: Final = {"height": 480, "width": 720, "num_frames": 49, "fps": 8, "max_sequence_length": 226}
_SIX: Final = {"steps": 50, "guidance_scale": 6.0}
#: A class of diffusers -> its differences. ChronoEdit runs without temporal reasoning.
PIPELINES: Final = {
    "WanPipeline": Kind(few_steps=True),
    "WanImageToVideoPipeline": Kind(image=True, few_steps=True),
    "SkyReelsV2Pipeline": Kind(_SKYREELS, _SIX),
    "ChronoEditPipeline": Kind(image=True),
    "CogVideoXPipeline": Kind(_COG, _SIX, cogvideox=True),
    "CogVideoXImageToVideoPipeline": Kind(_COG, _SIX, image=True, cogvideox=True),
}


def kind_of(pipe: object) -> Kind:
    """Find the kind of a pipeline, whose class may be derived from a known one.

    Raises:
        NotAModelError: It is of another class.
    """
    for cls in type(pipe).__mro__:
        if cls.__name__ in PIPELINES and cls.__module__.partition(".")[0] == "diffusers":
            return PIPELINES[cls.__name__]
    expected, got = f"a diffusers {' or '.join(PIPELINES)}", type(pipe).__name__
    remedy = "Load one with turbo_rcm_patch.video.load_pipeline. `compare` takes any pipeline "
    remedy += "with make=, a function that calls it"
    raise NotAModelError("pipe", expected=expected, got=got, remedy=remedy)


def check_image(pipeline: str, kind: Kind, given: bool) -> None:
    """Refuse an image where a pipeline takes none, and the other way round.

    Args:
        pipeline: Its class, for messages.
        kind: Its kind.
        given: True if there is an image.

    Raises:
        SamplingError: It is wrong.
    """
    if given == kind.image:
        return
    others = " or ".join(name for name, other in PIPELINES.items() if other.image)
    expected, remedy = f"none, because a {pipeline} takes a prompt alone", "Leave it out"
    if kind.image:
        expected, remedy = f"one, because a {pipeline} starts from it", "Give `image=FILE`"
    raise SamplingError(
        "image",
        expected=expected,
        got="one" if given else "none",
        remedy=remedy if kind.image else f"{remedy}, or load a {others}",
    )


def networks_of(model: object) -> dict[str, Any]:
    """Return the denoising networks of a pipeline by name, or a network under the name ""."""
    return {name: part for name, part in parts_of(model).items() if name != VAE}


def network_of(pipe: Any) -> Any:
    """Return the (high-noise) transformer of a pipeline, or its only one."""
    return pipe.transformer or pipe.transformer_2


def check_one_image(pipe: Any) -> None:
    """Refuse a model of Wan that was trained with a first and a last frame.

    Raises:
        SamplingError: It is one.
    """
    config = network_of(pipe).config
    if config.get("image_dim") and config.get("pos_embed_seq_len"):
        raise SamplingError(
            f"a {type(pipe).__name__} with a first and a last frame",
            expected="a model that takes the first frame alone",
            got="pos_embed_seq_len in the transformer's configuration",
            remedy="Call the pipeline yourself; `compare` judges it with make= "
            "(docs/comparing.md)",
        )


def frames_to_ask(pipe: Any, asked: int) -> int:
    """Return the number to ask a pipeline for: it would round one that its VAE cannot make to
    another number than its VAE does."""
    return min(frames_made(pipe, asked), asked)


def frames_made(pipe: Any, asked: int) -> int:
    """Return how many frames the VAE makes where so many are asked for. CogVideoX's takes latents
    in pairs, and the first of an odd number alone."""
    span = int(pipe.vae_scale_factor_temporal)
    before = (asked - 1) // span
    if kind_of(pipe).cogvideox and before % 2:
        return span * (before + 1)
    return span * before + 1


def size_limits(pipe: Any) -> dict[str, tuple[int, int]]:
    """Return the least and the most of some settings that a model has positions for. A setting
    that is not named has no limit."""
    config, pixels = network_of(pipe).config, pipe.vae_scale_factor_spatial
    if kind_of(pipe).cogvideox:
        trained = {name: config[f"sample_{name}"] * pixels for name in ("height", "width")}
        limits: dict[str, tuple[int, int]] = {}
        if config["patch_size_t"]:  # CogVideoX 1.5
            limits |= {name: (1, size) for name, size in trained.items()}
        if config["use_learned_positional_embeddings"]:  # CogVideoX 5B I2V
            limits |= {name: (size, size) for name, size in trained.items()}
        if not config["use_rotary_positional_embeddings"]:  # CogVideoX 2B
            tokens = config["max_text_seq_length"]
            limits["max_sequence_length"] = (tokens, tokens)
        return limits
    positions = config["rope_max_seq_len"]
    patch_frames, patch_height, patch_width = config["patch_size"]
    return {
        "height": (1, positions * patch_height * pixels),
        "width": (1, positions * patch_width * pixels),
        "num_frames": (
            1,
            (positions * patch_frames - 1) * int(pipe.vae_scale_factor_temporal) + 1,
        ),
    }


def initial_noise(pipe: Any, settings: Settings, seed: int) -> torch.Tensor:
    """Draw the noise of a seed as fp32 on the CPU, in the form of a pipeline's `latents`.

    The pipelines of CogVideoX draw another one in the network's dtype, and those of Wan do not
    scale theirs, as few-step samplers need it.
    """
    vae, network, span = pipe.vae.config, network_of(pipe), int(pipe.vae_scale_factor_temporal)
    frames = (frames_to_ask(pipe, settings.num_frames) - 1) // span + 1
    rows = settings.height // pipe.vae_scale_factor_spatial
    columns = settings.width // pipe.vae_scale_factor_spatial
    generator = torch.Generator("cpu").manual_seed(seed)
    draw = partial(torch.randn, generator=generator, dtype=torch.float32)
    if kind_of(pipe).cogvideox:
        frames += -frames % (network.config.patch_size_t or 1)
        noise = draw((1, frames, vae.latent_channels, rows, columns))
        return noise.to(pipe.text_encoder.dtype)
    rows -= rows % network.config.patch_size[1]  # The pipelines round a size to whole patches.
    columns -= columns % network.config.patch_size[2]
    noise = draw((1, vae.z_dim, frames, rows, columns))
    return (noise.double() * getattr(pipe.scheduler, "init_noise_sigma", 1)).float()
