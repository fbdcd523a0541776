"""diffusers' `CogVideoXPipeline`: 2B, 5B and 1.5, text to video, with their own schedulers.

The networks predict v = alpha noise - sigma x0 of a variance-preserving process, so the rCM
sampler, which is a rectified flow's, is not for them. Latents are [B, F, C, H, W], as the pipeline
has them, and are kept in the network's dtype from step to step, as the pipeline does.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from turbo_rcm_patch.errors import SamplingError
from turbo_rcm_patch.sampling.families import BlockProbe
from turbo_rcm_patch.sampling.measures import TIMES, NetworkInput
from turbo_rcm_patch.sampling.settings import Sampler, Settings

if TYPE_CHECKING:
    from diffusers import CogVideoXPipeline

SAMPLERS: Final[tuple[Sampler, ...]] = ("scheduler",)
#: Of CogVideoX 1.0, 2B and 5B.
DEFAULTS: Final[dict[str, object]] = {
    "sampler": "scheduler",
    "height": 480,
    "width": 720,
    "num_frames": 49,
    "fps": 8,
    "max_sequence_length": 226,
}
OWN: Final[dict[str, object]] = {"steps": 50, "guidance_scale": 6.0}
#: Tokens along frames, height and width: with 13 of text 277 in all, no multiple of any block.
GRID: Final = (3, 8, 11)
TEXT: Final = 13


def _latent_frames(pipe: CogVideoXPipeline, settings: Settings) -> int:
    return (settings.num_frames - 1) // int(pipe.vae_scale_factor_temporal) + 1


def latent_shape(pipe: CogVideoXPipeline, settings: Settings) -> tuple[int, ...]:
    """[1, F, C, H, W]. CogVideoX 1.5 denoises a whole number of its patches in time."""
    frames, patch = _latent_frames(pipe, settings), pipe.transformer.config.patch_size_t or 1
    return (
        1,
        -(-frames // patch) * patch,
        pipe.transformer.config.in_channels,
        settings.height // pipe.vae_scale_factor_spatial,
        settings.width // pipe.vae_scale_factor_spatial,
    )


def call_inputs(
    pipe: CogVideoXPipeline, noise: torch.Tensor, settings: Settings, dtype: torch.dtype
) -> dict[str, object]:
    """`CogVideoXPipeline` scales the noise that it is given, and does not cast it."""
    del pipe, settings
    return {"latents": noise.to(dtype)}


def trim(pipe: CogVideoXPipeline, latents: torch.Tensor, settings: Settings) -> torch.Tensor:
    """Without the first frames, which only fill a patch in time."""
    return latents[:, latents.shape[1] - _latent_frames(pipe, settings) :]


def decode(pipe: CogVideoXPipeline, latents: torch.Tensor) -> torch.Tensor:
    """Video [B, 3, F, H, W] in about -1..1."""
    video: torch.Tensor = pipe.decode_latents(latents)
    return video


def network_calls(
    pipe: CogVideoXPipeline,
    noises: Sequence[torch.Tensor],
    embeds: torch.Tensor,
    clean: torch.Tensor,
    settings: Settings,
) -> list[NetworkInput]:
    """Calls at those times of the pipeline's schedule whose noise levels are those of `TIMES`.

    Raises:
        SamplingError: The pipeline's scheduler has no such schedule.
    """
    network, scheduler = pipe.transformer, pipe.scheduler
    kept = getattr(scheduler, "alphas_cumprod", None)
    if kept is None:
        raise SamplingError(
            "the network number",
            expected="a scheduler with alphas_cumprod, such as CogVideoXDDIMScheduler",
            got=type(scheduler).__name__,
            remedy="Leave out --network-number",
        )
    alpha, sigma = kept.double().sqrt().cpu(), (1 - kept.double()).sqrt().cpu()
    flow_times = sigma / (alpha + sigma)
    device, dtype = noises[0].device, network.dtype
    frames = noises[0].shape[1]
    if clean.shape[1] < frames:  # the frames that were dropped
        clean = torch.cat([clean[:, :1].expand(-1, frames - clean.shape[1], -1, -1, -1), clean], 1)
    rotary = None
    if network.config.use_rotary_positional_embeddings:
        rotary = pipe._prepare_rotary_positional_embeddings(
            settings.height, settings.width, frames, device
        )
    calls = []
    for noise in noises:
        for wanted in TIMES:
            step = int((flow_times - wanted).abs().argmin())
            noisy = float(alpha[step]) * clean + float(sigma[step]) * noise
            calls.append(
                NetworkInput(
                    hidden_states=noisy.to(dtype),
                    timestep=torch.tensor([step], device=device),
                    encoder_hidden_states=embeds.to(dtype),
                    image_rotary_emb=rotary,
                )
            )
    return calls


def block_probe(folder: Path) -> BlockProbe:
    """The first block, with 264 video tokens and 13 of text."""
    from diffusers import CogVideoXTransformer3DModel
    from diffusers.models.embeddings import get_3d_rotary_pos_embed

    network = CogVideoXTransformer3DModel.from_pretrained(
        str(folder), subfolder="transformer", dtype=torch.float32, local_files_only=True
    )
    network.transformer_blocks = network.transformer_blocks[:1]
    config = network.config
    frames, rows, columns = GRID
    patch = config.patch_size
    span = frames * (config.patch_size_t or 1)
    generator = torch.Generator("cpu").manual_seed(0)
    shape = (1, span, config.in_channels, rows * patch, columns * patch)
    inputs: dict[str, object] = {
        "hidden_states": torch.randn(shape, generator=generator),
        "encoder_hidden_states": torch.randn(1, TEXT, config.text_embed_dim, generator=generator),
        "timestep": torch.tensor([749]),
    }
    if config.use_rotary_positional_embeddings:
        inputs["image_rotary_emb"] = get_3d_rotary_pos_embed(
            embed_dim=config.attention_head_dim,
            crops_coords=((0, 0), (rows, columns)),
            grid_size=(rows, columns),
            temporal_size=frames,
        )
    return BlockProbe(
        network=network,
        block=network.transformer_blocks[0],
        inputs=inputs,
        tokens=frames * rows * columns,
        branch=_both_streams,
        # A pair with two residual streams is never closed in one launch.
        forms=("two-launch",),
    )


def _both_streams(
    given: tuple[object, ...],
    named: dict[str, torch.Tensor],
    out: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    del given
    video, text = out
    return torch.cat(
        [text - named["encoder_hidden_states"], video - named["hidden_states"]], dim=1
    )
