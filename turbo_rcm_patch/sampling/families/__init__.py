"""One module per family of pipelines, for what differs between them; found by the pipeline's
class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

import torch

from turbo_rcm_patch.errors import NotAModelError

if TYPE_CHECKING:
    from diffusers import CogVideoXPipeline, WanPipeline

    from turbo_rcm_patch.config import Form
    from turbo_rcm_patch.sampling.measures import NetworkInput
    from turbo_rcm_patch.sampling.settings import Sampler, Settings

__all__ = [
    "FAMILIES",
    "BlockProbe",
    "PipelineFamily",
    "VideoPipeline",
    "family_named",
    "family_of",
]

#: What `generate` and `compare` run, for annotations.
VideoPipeline: TypeAlias = "WanPipeline | CogVideoXPipeline"
#: A diffusers pipeline that `generate` and `compare` run -> the module that serves it.
FAMILIES: Final = {"WanPipeline": "wan", "CogVideoXPipeline": "cogvideox"}


@dataclass(frozen=True, slots=True)
class BlockProbe:
    """A transformer cut down to its first block, and one call of it.

    Attributes:
        network: The transformer, in fp32.
        block: Its only block.
        inputs: Keyword arguments of a call.
        tokens: Video tokens of that call.
        branch: What the block adds to its input, of its (arguments, keyword arguments, output).
        forms: The ways in which this family's pairs can be closed.
    """

    network: torch.nn.Module
    block: torch.nn.Module
    inputs: Mapping[str, object]
    tokens: int
    branch: Callable[[Any, Any, Any], torch.Tensor]
    forms: tuple[Form, ...]


class PipelineFamily(Protocol):
    """The functions that a family's module offers.

    Attributes:
        SAMPLERS: What `Settings.sampler` may be.
        DEFAULTS: Settings where neither the caller nor the model's folder says.
        OWN: What the pipeline's own scheduler is usually run with.
    """

    SAMPLERS: tuple[Sampler, ...]
    DEFAULTS: Mapping[str, object]
    OWN: Mapping[str, object]

    def latent_shape(self, pipe: Any, settings: Settings) -> tuple[int, ...]:
        """Shape of one video's latents, with the pipeline's order of axes."""

    def call_inputs(
        self, pipe: Any, noise: torch.Tensor, settings: Settings, dtype: torch.dtype
    ) -> dict[str, object]:
        """What the pipeline's `__call__` takes beside what all take: `latents`, made of standard
        normal noise in fp32; `dtype` is the embeddings'."""

    def trim(self, pipe: Any, latents: torch.Tensor, settings: Settings) -> torch.Tensor:
        """Of denoised latents, those of the video."""

    def decode(self, pipe: Any, latents: torch.Tensor) -> torch.Tensor:
        """Decode fp32 latents on the VAE's device to a video [B, 3, F, H, W] in about -1..1."""

    def network_calls(
        self,
        pipe: Any,
        noises: Sequence[torch.Tensor],
        embeds: torch.Tensor,
        clean: torch.Tensor,
        settings: Settings,
    ) -> list[NetworkInput]:
        """The calls of the transformer for one prompt: three times for every noise."""

    def block_probe(self, folder: Path) -> BlockProbe:
        """The first block of a pipeline folder's transformer, with an input of odd size."""


def family_named(pipeline: str) -> PipelineFamily:
    """Find the family of a pipeline's class name, one of `FAMILIES`."""
    module: Any = import_module(f"{__name__}.{FAMILIES[pipeline]}")
    family: PipelineFamily = module
    return family


def family_of(pipe: object) -> PipelineFamily:
    """Find the family of a pipeline, whose class may be derived from a known one.

    Raises:
        NotAModelError: It is of another class.
    """
    for cls in type(pipe).__mro__:
        if cls.__name__ in FAMILIES and cls.__module__.partition(".")[0] == "diffusers":
            return family_named(cls.__name__)
    raise NotAModelError(
        "pipe",
        expected=f"a diffusers {' or '.join(FAMILIES)}",
        got=type(pipe).__name__,
        remedy="Load one with turbo_rcm_patch.sampling.load_pipeline",
    )
