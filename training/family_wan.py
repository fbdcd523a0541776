"""The tiny Wan as a family: rectified flow, the rCM sampler with fresh noise in every step."""

from __future__ import annotations

from typing import Final

import torch
from diffusers import (
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from torch import Tensor, nn
from transformers import UMT5Config, UMT5EncoderModel

from training.build import TinyConfig, text_sizes
from training.flow import Velocity
from turbo_rcm_patch.tiny import TINY_WAN
from turbo_rcm_patch.video.rcm_times import rcm_times

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
KEPT: Final = tuple(WanTransformer3DModel._keep_in_fp32_modules)


def config() -> TinyConfig:
    """The sizes that ship."""
    return TinyConfig()


def blocks(transformer: WanTransformer3DModel) -> nn.ModuleList:
    """The transformer's blocks."""
    found: nn.ModuleList = transformer.blocks
    return found


def build_vae(config: TinyConfig) -> AutoencoderKLWan:
    """A small Wan video autoencoder with random weights; latents start unnormalised."""
    vae = AutoencoderKLWan(
        base_dim=config.vae_dim,
        z_dim=config.latent_channels,
        dim_mult=list(config.vae_mult),
        num_res_blocks=config.vae_blocks,
        temperal_downsample=[True, True],
        latents_mean=[0.0] * config.latent_channels,
        latents_std=[1.0] * config.latent_channels,
        scale_factor_temporal=4,
        scale_factor_spatial=4,
    )
    # Quiet latents at first: a posterior of unit variance would drown the young encoder.
    with torch.no_grad():
        vae.quant_conv.bias[config.latent_channels :] = -6.0
    return vae


def build_transformer(config: TinyConfig) -> WanTransformer3DModel:
    """A small Wan transformer with random weights; it predicts the velocity noise - x0."""
    model = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=config.heads,
        attention_head_dim=config.head_dim,
        in_channels=config.latent_channels,
        out_channels=config.latent_channels,
        text_dim=config.text_dim,
        freq_dim=256,
        ffn_dim=config.ffn_dim,
        num_layers=config.layers,
        cross_attn_norm=True,
        rope_max_seq_len=64,
    )
    # Start from "predict nothing": the first steps do not explode.
    nn.init.zeros_(model.proj_out.weight)
    nn.init.zeros_(model.proj_out.bias)
    return model


def build_text_encoder(config: TinyConfig) -> UMT5EncoderModel:
    """A small umT5 encoder with random weights."""
    return UMT5EncoderModel(UMT5Config(**text_sizes(config)))


def encode_text(encoder: UMT5EncoderModel, ids: Tensor, mask: Tensor) -> Tensor:
    """Embed captions exactly as `WanPipeline` does: zeros after the end of the text.

    Args:
        encoder: The text encoder.
        ids: [B, L] int64 token ids, padded.
        mask: [B, L] int64, 1 for a token.

    Returns:
        [B, L, text_dim] in the encoder's dtype.
    """
    hidden: Tensor = encoder(ids, mask).last_hidden_state
    return hidden * mask[..., None].to(hidden.dtype)


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
    return tuple(rcm_times(steps).tolist())


def scheduler() -> FlowMatchEulerDiscreteScheduler:
    """The scheduler that ships."""
    return FlowMatchEulerDiscreteScheduler(shift=1.0, stochastic_sampling=True)
