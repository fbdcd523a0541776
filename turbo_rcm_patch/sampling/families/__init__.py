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
    from turbo_rcm_patch.sampling.generation import Conditioning
    from turbo_rcm_patch.sampling.network_input import NetworkInput
    from turbo_rcm_patch.sampling.settings import Sampler, Settings

    #: What `generate` and `compare` run, for annotations.
    VideoPipeline: TypeAlias = "WanPipeline | CogVideoXPipeline"

__all__ = ["FAMILIES", "AfterStep", "BlockProbe", "PipelineFamily", "family_named", "family_of"]

#: A diffusers pipeline that `generate` and `compare` run -> the module that serves it.
FAMILIES: Final = {"WanPipeline": "wan", "CogVideoXPipeline": "cogvideox"}

#: diffusers' `callback_on_step_end`.
AfterStep = Callable[[object, int, object, dict[str, torch.Tensor]], dict[str, torch.Tensor]]


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

    def encode(
        self, pipe: Any, prompt: str, settings: Settings
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Embeddings [1, L, C] of the prompt, and under guidance of the negative prompt."""

    def latent_shape(self, pipe: Any, settings: Settings) -> tuple[int, ...]:
        """Shape of one video's latents, with the pipeline's order of axes."""

    def denoise(
        self,
        pipe: Any,
        conditioning: Conditioning,
        noise: torch.Tensor,
        settings: Settings,
        after_step: AfterStep,
    ) -> torch.Tensor:
        """Denoise standard normal noise to latents with the pipeline's own loop."""

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
