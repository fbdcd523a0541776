"""Last stage: the VAE's decoder alone, while latents stay what the transformers have learnt.

A decoder sees two kinds of latents: those of the encoder, and those of a transformer, which are
off by a little. Both are trained for: latents are drawn from the posterior and shaken by a further
few per cent of their spread.
"""

from __future__ import annotations

import copy
from typing import Final

import torch
from diffusers import AutoencoderKLWan
from torch import Tensor

from training.build import TinyConfig
from training.run import Budget, Run, Stage, batches
from training.train_vae import (
    decode,
    decode_frames,
    encode,
    report_reconstruction,
    statistics,
    videos_of,
)

_EDGE: Final = 1.0
_SHAKE: Final = 0.05  # of a latent channel's standard deviation
_SALT: Final = 5


def train_decoder(
    run: Run,
    config: TinyConfig,
    vae: AutoencoderKLWan,
    budget: Budget,
) -> AutoencoderKLWan:
    """Train the decoder with a frozen encoder.

    Args:
        run: Where and how.
        config: Sizes.
        vae: The autoencoder after `train_vae`; left as it is.
        budget: How long; whole pictures a step.

    Returns:
        The same encoder and latent statistics with the averaged new decoder, in fp32.
    """
    trained = copy.deepcopy(vae)
    parts = {"decoder": trained.decoder, "post_quant_conv": trained.post_quant_conv}
    for part in parts.values():
        part.requires_grad_(True)
    stage, batch = Stage(run, "decoder", parts, budget, salt=_SALT), budget.batch
    _, std = statistics(vae, run.device)

    def losses() -> dict[str, Tensor]:
        target = videos_of(run, config, batch, stage.scenes) * 2 - 1
        with run.precision():
            with torch.no_grad():
                posterior = vae.encode(target).latent_dist
                spread = (0.5 * posterior.logvar.float()).exp() + _SHAKE * std
                noise = torch.randn(spread.shape, generator=stage.noise, device=run.device)
                latents = posterior.mean.float() + spread * noise
            found = decode(trained, latents).float()
        error = found - target
        pixel = error.abs().mean()
        edge = sum(error.diff(dim=axis).abs().mean() for axis in (2, 3, 4)) / 3
        loss = pixel + error.square().mean() + _EDGE * edge
        return {"loss": loss, "pixel": pixel, "edge": torch.as_tensor(edge)}

    def averaged() -> AutoencoderKLWan:
        result = copy.deepcopy(vae)
        result.decoder.load_state_dict(stage.ema["decoder"].state_dict())
        result.post_quant_conv.load_state_dict(stage.ema["post_quant_conv"].state_dict())
        return result

    @torch.no_grad()
    def probe(stage: Stage) -> None:
        average = averaged()
        scenes, _ = run.generators(98)
        videos = videos_of(run, config, 2 * batch, scenes, held_out=True)
        with run.precision():
            latents = torch.cat([encode(vae, videos[p]) for p in batches(2 * batch, batch)])
        found = decode_frames(average, latents, run, batch=batch)
        report_reconstruction(stage, videos, found)

    stage.train(losses, probe)
    return averaged()
