"""diffusers' `WanPipeline`: rectified flow, with one expert or two."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from turbo_rcm_patch.sampling.families import BlockProbe
from turbo_rcm_patch.sampling.measures import NetworkInput, network_inputs
from turbo_rcm_patch.sampling.scheduler import RCMScheduler
from turbo_rcm_patch.sampling.settings import WAN_OWN, Sampler, Settings

if TYPE_CHECKING:
    from diffusers import WanPipeline

SAMPLERS: Final[tuple[Sampler, ...]] = ("rcm", "scheduler")
DEFAULTS: Final[dict[str, object]] = {}
OWN: Final = WAN_OWN
#: Tokens along frames, height and width: 264 in all, no multiple of any block.
GRID: Final = (3, 8, 11)


def latent_shape(pipe: WanPipeline, settings: Settings) -> tuple[int, ...]:
    """[1, C, F, H, W]."""
    network = pipe.transformer if pipe.transformer is not None else pipe.transformer_2
    space, span = pipe.vae_scale_factor_spatial, pipe.vae_scale_factor_temporal
    patch = network.config.patch_size
    return (
        1,
        network.config.in_channels,
        (settings.num_frames - 1) // span + 1,
        settings.height // (space * patch[1]) * patch[1],
        settings.width // (space * patch[2]) * patch[2],
    )


def call_inputs(
    pipe: WanPipeline, noise: torch.Tensor, settings: Settings, dtype: torch.dtype
) -> dict[str, object]:
    """`WanPipeline` does not scale the latents that it is given, and keeps them in fp32."""
    del dtype
    if isinstance(pipe.scheduler, RCMScheduler):
        noise = pipe.scheduler.init_noise(noise)
    return {"latents": noise.to(torch.float32), "guidance_scale_2": settings.guidance_scale_2}


def trim(pipe: WanPipeline, latents: torch.Tensor, settings: Settings) -> torch.Tensor:
    """All of them are the video's."""
    del pipe, settings
    return latents


def decode(pipe: WanPipeline, latents: torch.Tensor) -> torch.Tensor:
    """Video [B, 3, F, H, W] in about -1..1."""
    vae = pipe.vae
    shape = (1, vae.config.z_dim, 1, 1, 1)
    mean = latents.new_tensor(vae.config.latents_mean).view(shape)
    std = latents.new_tensor(vae.config.latents_std).view(shape)
    video: torch.Tensor = vae.decode(latents * std + mean, return_dict=False)[0]
    return video


def network_calls(
    pipe: WanPipeline,
    noises: Sequence[torch.Tensor],
    embeds: torch.Tensor,
    clean: torch.Tensor,
    settings: Settings,
) -> list[NetworkInput]:
    """Calls of the (high-noise) transformer."""
    del settings
    return network_inputs(noises, embeds, clean=clean, dtype=pipe.transformer.dtype)


def block_probe(folder: Path) -> BlockProbe:
    """The first block, with 264 tokens."""
    from diffusers import WanTransformer3DModel

    network = WanTransformer3DModel.from_pretrained(
        str(folder), subfolder="transformer", dtype=torch.float32, local_files_only=True
    )
    network.blocks = network.blocks[:1]
    config = network.config
    generator = torch.Generator("cpu").manual_seed(0)
    shape = [tokens * patch for tokens, patch in zip(GRID, config.patch_size, strict=True)]
    return BlockProbe(
        network=network,
        block=network.blocks[0],
        inputs={
            "hidden_states": torch.randn(1, config.in_channels, *shape, generator=generator),
            "encoder_hidden_states": torch.randn(1, 13, config.text_dim, generator=generator),
            "timestep": torch.tensor([933.78]),
        },
        tokens=GRID[0] * GRID[1] * GRID[2],
        branch=lambda given, _, out: out - given[0],
        forms=("one-launch", "two-launch"),
    )
