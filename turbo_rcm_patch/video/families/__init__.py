"""One class for each pipeline of diffusers that `generate` and `compare` run, with the differences
between them; one module a family.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeAlias

import torch

from turbo_rcm_patch.errors import NotAModelError, SamplingError

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

    from turbo_rcm_patch.video.generation import Conditioning
    from turbo_rcm_patch.video.settings import Settings
    from turbo_rcm_patch.video.source import Source

#: A pipeline of one of the classes in `FAMILIES`, for annotations.
VideoPipeline: TypeAlias = "DiffusionPipeline"
#: A diffusers pipeline that `generate` and `compare` run -> "module.Class" of its family.
FAMILIES: Final = {
    "WanPipeline": "wan.Wan",
    "WanImageToVideoPipeline": "wan.WanImage",
    "WanVideoToVideoPipeline": "wan.WanVideo",
    "WanVACEPipeline": "wan.Vace",
    "WanAnimatePipeline": "wan.Animate",
    "SkyReelsV2Pipeline": "wan.SkyReels",
    "ChronoEditPipeline": "wan.ChronoEdit",
    "CogVideoXPipeline": "cogvideox.CogVideoX",
    "CogVideoXImageToVideoPipeline": "cogvideox.CogVideoXImage",
    "CogVideoXVideoToVideoPipeline": "cogvideox.CogVideoXVideo",
    "ConsisIDPipeline": "cogvideox.ConsisID",
}


@dataclass(frozen=True, slots=True)
class Job:
    """A video that is to be made.

    Attributes:
        pipe: The pipeline.
        seed: Seed of its noise.
        conditioning: The encoded source.
        settings: How it is sampled.
    """

    pipe: Any
    seed: int
    conditioning: Conditioning
    settings: Settings


#: Latents as a pipeline's loop holds them, each with its network time.
States = list[tuple[torch.Tensor, float]]


class PipelineFamily(ABC):
    """The differences between pipelines.

    Attributes:
        FEW_STEPS: True if its networks predict a rectified flow's velocity, as few-step samplers
            need.
        DEFAULTS: Settings where neither the caller nor the model's folder says.
        OWN: Steps and guidance that the pipeline's own scheduler is usually run with.
        NEEDS: Fields that a `Source` must have beside its prompt.
        MAY: Fields that it may have.
        AS_GIVEN: Fields that the pipeline takes under the same name, and resizes.
    """

    FEW_STEPS: ClassVar[bool] = True
    DEFAULTS: ClassVar[Mapping[str, object]] = {}
    OWN: ClassVar[Mapping[str, object]]
    NEEDS: ClassVar[tuple[str, ...]] = ()
    MAY: ClassVar[tuple[str, ...]] = ()
    AS_GIVEN: ClassVar[tuple[str, ...]] = ("image", "last_image")

    @abstractmethod
    def latent_shape(
        self, pipe: Any, settings: Settings, conditioning: Conditioning | None = None
    ) -> tuple[int, ...]:
        """Return the shape of one video's latents in the denoising loop, with the pipeline's order
        of axes. Some pipelines add a frame for each reference of `conditioning`."""

    def frames_made(self, pipe: Any, asked: int) -> int:
        """Return how many frames the VAE makes where so many are asked for."""
        span = int(pipe.vae_scale_factor_temporal)
        return (asked - 1) // span * span + 1

    @abstractmethod
    def call_inputs(self, job: Job) -> dict[str, object]:
        """Return the arguments that this pipeline's `__call__` takes beside those that all take:
        `latents`, made of the standard normal noise of the seed, and the video's source."""

    def trim(self, job: Job, latents: torch.Tensor) -> torch.Tensor:
        """Cut denoised latents to those of the video."""
        return latents

    @abstractmethod
    def decode(self, pipe: Any, latents: torch.Tensor) -> torch.Tensor:
        """Decode fp32 latents on the VAE's device to a video [B, 3, F, H, W] in about -1..1."""

    @abstractmethod
    def noised(self, pipe: Any, clean: torch.Tensor, noise: torch.Tensor) -> States:
        """Return latents at the three times of the network number."""

    @staticmethod
    def from_video(job: Job) -> dict[str, object]:
        """Return `call_inputs` of a pipeline that draws the noise and adds it to a video."""
        return {
            "video": job.conditioning.frames("video", job.settings),
            "strength": 1.0 if job.settings.strength is None else job.settings.strength,
            "generator": torch.Generator("cpu").manual_seed(job.seed),
        }

    def check(self, pipeline: str, sources: Sequence[Source]) -> None:
        """Raise unless the pipeline can make a video from each of these.

        Args:
            pipeline: The class of the pipeline, for messages.
            sources: The sources of the videos.

        Raises:
            SamplingError: One lacks what the pipeline needs, or has what it does not take.
        """
        takes, a = self.takes, f"because a {pipeline}"
        most = f"no more than {' and '.join(takes)}" if takes else "a prompt alone"
        for source in sources:
            for name in dict.fromkeys((*self.NEEDS, *source.given)):
                if name not in source.given:
                    expected, got = f"one, {a} makes videos from it", "none"
                    remedy = f"Give --{name.replace('_', '-')} FILE, from Python {name}="
                elif name not in takes:
                    expected, got = f"none, {a} takes {most}", "one"
                    others = [key for key in FAMILIES if name in family_named(key).takes]
                    remedy = f"Leave it out, or load a {' or '.join(others)}"
                else:
                    continue
                what = f"{name} of the prompt {source.prompt!r}"
                raise SamplingError(what, expected=expected, got=got, remedy=remedy)

    @property
    def takes(self) -> tuple[str, ...]:
        """The fields that a `Source` can have beside its prompt."""
        return (*self.NEEDS, *self.MAY)


def draw(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Draw standard normal noise, fp32, on the CPU: `torch.Generator("cpu").manual_seed(seed)`."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32)


def family_named(pipeline: str) -> PipelineFamily:
    """Find the family of a pipeline's class name, one of `FAMILIES`."""
    module, _, name = FAMILIES[pipeline].partition(".")
    family: PipelineFamily = getattr(import_module(f"{__name__}.{module}"), name)()
    return family


def family_of(pipe: object) -> PipelineFamily:
    """Find the family of a pipeline, whose class may be derived from a known one.

    Raises:
        NotAModelError: It is of another class.
    """
    for cls in type(pipe).__mro__:
        if cls.__name__ in FAMILIES and cls.__module__.partition(".")[0] == "diffusers":
            return family_named(cls.__name__)
    expected, got = f"a diffusers {' or '.join(FAMILIES)}", type(pipe).__name__
    remedy = "Load one with turbo_rcm_patch.video.load_pipeline"
    raise NotAModelError("pipe", expected=expected, got=got, remedy=remedy)
