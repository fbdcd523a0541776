"""The tiny CogVideoX: its parts, and its network read as a rectified flow.

The network is what CogVideoX's is: it predicts v = alpha noise - sigma x0 of a variance-preserving
process at whole-numbered times, with the noise schedule of CogVideoX-2B, whose last time is pure
noise. So the folder runs in diffusers' own `CogVideoXPipeline` with its own
`CogVideoXDDIMScheduler`. Training knows one flow only, x_t = (1 - t) x0 + t noise; the two differ
by a scale of the state and a name of the time, and `velocity` translates.

Its latents are those of the tiny Wan, normalised: one autoencoder's space, two networks in it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Final

import torch
from diffusers import (
    AutoencoderKLCogVideoX,
    CogVideoXDDIMScheduler,
    CogVideoXPipeline,
    CogVideoXTransformer3DModel,
)
from diffusers.models.embeddings import get_3d_rotary_pos_embed
from torch import Tensor, nn
from transformers import T5Config, T5EncoderModel, UMT5EncoderModel

from training.build import TinyConfig, text_sizes
from training.flow import Velocity
from turbo_rcm_patch.tiny import TINY_COGVIDEOX, TINY_WAN

NAME: Final = "cogvideox"
SHIPPED: Final = TINY_COGVIDEOX
PIPELINE: Final = CogVideoXPipeline
TRANSFORMER: Final = CogVideoXTransformer3DModel
TEXT_ENCODER: Final = T5EncoderModel
VAE: Final = AutoencoderKLCogVideoX
MINUTES: Final = {"vae": 4.5, "teacher": 5.8, "student": 2.0}
RECIPE: Final = {
    "batch_vae": 8,
    "clips": 24576,
    "corpus_seconds": 28.0,
    "probe_count": 64,
    "fill": 32,
}
RENOISES: Final = False  # DDIM follows the flow
JITTER: Final = 0.0  # its times are whole numbers, which no pipeline rounds
KEPT: Final = ()
ATTENTIONS: Final = {"joint": "attn1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CogVideoXConfig(TinyConfig):
    """Sizes of the tiny CogVideoX: 1,280 video tokens and 24 of text through every attention."""

    layers: int = 5
    time_dim: int = 64
    vae_channels: tuple[int, ...] = (16, 32, 64)
    vae_groups: int = 8

    def small(self) -> TinyConfig:
        """The same architecture small enough to train a few steps in a unit test."""
        # The text encoder keeps its width, to start from the tiny Wan's.
        return replace(
            self, size=32, frames=9, heads=1, layers=1, vae_channels=(8, 8, 8), time_dim=16
        )


def config() -> CogVideoXConfig:
    """The sizes that ship, and how the folder wants to be sampled."""
    return CogVideoXConfig(
        settings={"sampler": "scheduler", "fps": 8, "steps": 4, "guidance_scale": 1.0}
    )


def build_transformer(config: CogVideoXConfig) -> CogVideoXTransformer3DModel:
    """A small CogVideoX transformer with rotary embeddings, as the 5B has, and random weights."""
    _, frames, rows, columns = config.latent_shape
    model = CogVideoXTransformer3DModel(
        num_attention_heads=config.heads,
        attention_head_dim=config.head_dim,
        in_channels=config.latent_channels,
        out_channels=config.latent_channels,
        time_embed_dim=config.time_dim,
        text_embed_dim=config.text_dim,
        num_layers=config.layers,
        sample_height=rows,
        sample_width=columns,
        sample_frames=4 * (frames - 1) + 1,
        max_text_seq_length=config.max_sequence_length,
        use_rotary_positional_embeddings=True,
    )
    # Start from "predict nothing": the first steps do not explode.
    nn.init.zeros_(model.proj_out.weight)
    nn.init.zeros_(model.proj_out.bias)
    return model


def build_vae(config: CogVideoXConfig) -> AutoencoderKLCogVideoX:
    """A small CogVideoX video autoencoder with random weights, 4x in space and in time."""
    levels = len(config.vae_channels)
    return AutoencoderKLCogVideoX(
        down_block_types=("CogVideoXDownBlock3D",) * levels,
        up_block_types=("CogVideoXUpBlock3D",) * levels,
        block_out_channels=config.vae_channels,
        latent_channels=config.latent_channels,
        layers_per_block=1,
        norm_num_groups=config.vae_groups,
        sample_height=config.size,
        sample_width=config.size,
        scaling_factor=1.0,  # the space it is taught is normalised already
    )


def build_text_encoder(config: CogVideoXConfig) -> T5EncoderModel:
    """A small T5 encoder that starts from the tiny Wan's umT5.

    T5 has the relative positions of umT5's first layer in all of its layers; the rest is the same.
    """
    sizes = text_sizes(config)
    encoder = T5EncoderModel(T5Config(**sizes, feed_forward_proj="gated-gelu"))
    known = UMT5EncoderModel.from_pretrained(
        TINY_WAN, subfolder="text_encoder", dtype=torch.float32
    ).state_dict()
    encoder.load_state_dict({name: known[name] for name in encoder.state_dict()})
    return encoder


def encode_text(encoder: T5EncoderModel, ids: Tensor, mask: Tensor) -> Tensor:
    """Embed captions exactly as `CogVideoXPipeline` does: padding is text like any other.

    Args:
        encoder: The text encoder.
        ids: [B, L] int64 token ids, padded.
        mask: Not looked at.

    Returns:
        [B, L, text_dim] in the encoder's dtype.
    """
    del mask
    hidden: Tensor = encoder(ids)[0]
    return hidden


def blocks(transformer: CogVideoXTransformer3DModel) -> nn.ModuleList:
    """The transformer's blocks."""
    found: nn.ModuleList = transformer.transformer_blocks
    return found


def scheduler() -> CogVideoXDDIMScheduler:
    """The scheduler that ships: that of CogVideoX-2B."""
    return CogVideoXDDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        set_alpha_to_one=True,
        prediction_type="v_prediction",
        rescale_betas_zero_snr=True,
        snr_shift_scale=3.0,
        timestep_spacing="trailing",
    )


@cache
def flow_times(device: torch.device) -> Tensor:
    """Rectified-flow time sigma / (alpha + sigma) of every time of the schedule, [1000] fp64."""
    kept: Tensor = scheduler().alphas_cumprod.double().to(device)
    alpha, sigma = kept.sqrt(), (1 - kept).sqrt()
    return sigma / (alpha + sigma)


def times(steps: int) -> tuple[float, ...]:
    """Where `CogVideoXDDIMScheduler` calls the network, in rectified-flow time."""
    own = scheduler()
    own.set_timesteps(steps)
    return (*flow_times(torch.device("cpu"))[own.timesteps].tolist(), 0.0)


def _schedule_time(t: Tensor) -> Tensor:
    """Times of the schedule, with fractions, of rectified-flow times [B]; fp32."""
    table = flow_times(t.device)
    wanted = t.double()
    above = torch.searchsorted(table, wanted).clamp(1, len(table) - 1)
    low, high = table[above - 1], table[above]
    return (above - 1 + ((wanted - low) / (high - low)).clamp(0, 1)).float()


@cache
def _rotary(transformer_config: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    frames, rows, columns, head_dim = transformer_config
    cos, sin = get_3d_rotary_pos_embed(
        embed_dim=head_dim,
        crops_coords=((0, 0), (rows, columns)),
        grid_size=(rows, columns),
        temporal_size=frames,
        device=device,
    )
    return cos, sin


def velocity(transformer: CogVideoXTransformer3DModel, text: Tensor) -> Velocity:
    """The network as a rectified flow: noise - x0 from v = alpha noise - sigma x0."""
    own = transformer.config
    dtype = transformer.dtype

    def field(x: Tensor, t: Tensor) -> Tensor:
        sigma, alpha = t, 1 - t
        size = (sigma.square() + alpha.square()).sqrt()
        sigma, alpha, size = (one[:, None, None, None, None] for one in (sigma, alpha, size))
        sigma, alpha = sigma / size, alpha / size
        state = x / size  # of variance one, as the schedule has it
        frames, rows, columns = x.shape[2:]
        grid = frames, rows // own.patch_size, columns // own.patch_size
        v: Tensor = transformer(
            hidden_states=state.transpose(1, 2).to(dtype),  # CogVideoX has frames before channels
            encoder_hidden_states=text.to(dtype),
            timestep=_schedule_time(t),
            image_rotary_emb=_rotary((*grid, own.attention_head_dim), x.device),
            return_dict=False,
        )[0]
        return (sigma - alpha) * state + (alpha + sigma) * v.transpose(1, 2).float()

    return field
