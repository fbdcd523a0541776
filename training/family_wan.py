"""The tiny Wan as a family: rectified flow, the rCM sampler with fresh noise in every step."""

from __future__ import annotations

from typing import Final

from diffusers import AutoencoderKLWan, WanPipeline, WanTransformer3DModel
from torch import Tensor, nn
from transformers import UMT5EncoderModel

from training.build import (
    TinyConfig,
)
from training.flow import Velocity, rcm_times
from turbo_rcm_patch.tiny import TINY_WAN

NAME: Final = "wan"
SHIPPED: Final = TINY_WAN
PIPELINE: Final = WanPipeline
TRANSFORMER: Final = WanTransformer3DModel
TEXT_ENCODER: Final = UMT5EncoderModel
VAE: Final = AutoencoderKLWan
MINUTES: Final = {"vae": 5.0, "teacher": 7.0, "student": 4.5, "decoder": 4.0}
RECIPE: Final[dict[str, float]] = {}
RENOISES: Final = True
#: Pipelines in bf16 round 1000 t to 8 bits (988, 932, 852, 608): the student must not mind.
JITTER: Final = 0.002
ATTENTIONS: Final = {"self": "attn1", "cross": "attn2"}


def config() -> TinyConfig:
    """The sizes that ship."""
    return TinyConfig()


def blocks(transformer: WanTransformer3DModel) -> nn.ModuleList:
    """The transformer's blocks."""
    found: nn.ModuleList = transformer.blocks
    return found


def velocity(transformer: WanTransformer3DModel, text: Tensor) -> Velocity:
    """The network itself: it was trained to predict noise - x0."""

    def field(x: Tensor, t: Tensor) -> Tensor:
        found: Tensor = transformer(
            x.to(transformer.dtype), t * 1000.0, text.to(transformer.dtype), return_dict=False
        )[0]
        return found

    return field


def times(steps: int) -> tuple[float, ...]:
    """Times of the rCM sampler."""
    return rcm_times(steps)
