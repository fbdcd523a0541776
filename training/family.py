"""The differences between the tiny models: one module for each family."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Protocol

from torch import Tensor, nn

from training.build import TinyConfig
from training.flow import Velocity

#: Name -> module. The name also begins those of the folders that a training writes.
FAMILIES: Final = {"wan": "family_wan", "cogvideox": "family_cogvideox"}


class Family(Protocol):
    """The members of a family's module.

    Attributes:
        NAME: Its key in `FAMILIES`.
        SHIPPED: Where the package looks for the trained model.
        PIPELINE, TRANSFORMER, TEXT_ENCODER, VAE: Its classes in diffusers and transformers.
        MINUTES: Training budget of each stage; a stage that is not listed does not exist.
        RECIPE: Defaults of training's other arguments where they are not Wan's.
        RENOISES: True if its few-step sampler adds fresh noise; False if it follows the flow.
        JITTER: Spread of the student's network times in training, in rectified-flow time.
        KEPT: Modules of the transformer that diffusers keeps in fp32.
        ATTENTIONS: Name of a zeroed attention in an evaluation -> the blocks' attribute.
    """

    NAME: str
    SHIPPED: Path
    PIPELINE: Any
    TRANSFORMER: Any
    TEXT_ENCODER: Any
    VAE: Any
    MINUTES: Mapping[str, float]
    RECIPE: Mapping[str, float]
    RENOISES: bool
    JITTER: float
    KEPT: tuple[str, ...]
    ATTENTIONS: Mapping[str, str]

    def config(self) -> TinyConfig:
        """The sizes that ship."""

    def build_transformer(self, config: TinyConfig) -> nn.Module:
        """A transformer that predicts nothing yet."""

    def build_text_encoder(self, config: TinyConfig) -> nn.Module:
        """A text encoder to be trained with the transformer."""

    def encode_text(self, encoder: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
        """Embed captions [B, L] exactly as the pipeline does: [B, L, text_dim]."""

    def blocks(self, transformer: nn.Module) -> nn.ModuleList:
        """The transformer's blocks."""

    def velocity(self, transformer: nn.Module, text: Tensor) -> Velocity:
        """The network as a rectified flow, for fixed captions [B, L, text_dim]."""

    def times(self, steps: int) -> tuple[float, ...]:
        """Rectified-flow times of the few-step sampler, steps + 1 of them, the last one 0."""

    def scheduler(self) -> Any:
        """The scheduler that ships."""


def family_of(name: str) -> Family:
    """The family of a name in `FAMILIES`."""
    module: Any = import_module(f"training.{FAMILIES[name]}")
    family: Family = module
    return family


def family_of_folder(folder: Path) -> Family:
    """The family whose pipeline a folder holds; Wan's where its index does not say."""
    index = folder / "model_index.json"
    text = index.read_text(encoding="utf-8") if index.is_file() else ""
    return family_of("cogvideox" if '"CogVideoXPipeline"' in text else "wan")
