"""The CogVideoX autoencoder: another network for the latents that the tiny Wan's already has.

Nothing has to be found here, only learnt: the encoder repeats what Wan's encoder says, normalised,
and the decoder draws the video that those latents came from. So the transformer can be trained on
Wan's latents before, after or beside this stage. As in `train_decoder`, the decoder sees latents
that are off by a little, as those of a transformer are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLCogVideoX, AutoencoderKLWan
from torch import Tensor

from training.family_cogvideox import CogVideoXConfig, build_vae
from training.run import Budget, Run, Stage, batches
from training.train_vae import decode_frames, encode, report_reconstruction, videos_of

_EDGE: Final = 0.5
_SHAKE: Final = 0.05  # of a latent channel's standard deviation
_SALT: Final = 6
_LOGVAR: Final = -6.0  # a posterior that hardly spreads: nobody samples from it


def train_twin(
    run: Run,
    config: CogVideoXConfig,
    original: AutoencoderKLWan,
    budget: Budget,
    *,
    start: Path | None = None,
) -> AutoencoderKLCogVideoX:
    """Train (or continue, or just load) the autoencoder.

    Args:
        run: Where and how.
        config: Sizes.
        original: The tiny Wan's autoencoder; left as it is.
        budget: How long; whole pictures a step, as group norms see whole pictures in use as well.
        start: Pipeline folder to begin from, instead of from random weights.

    Returns:
        The averaged weights, in fp32.
    """
    torch.manual_seed(run.seed + 2)
    vae = build_vae(config)
    if start is not None:
        vae = AutoencoderKLCogVideoX.from_pretrained(start, subfolder="vae", dtype=torch.float32)
    vae.to(run.device).train()
    stage, batch = Stage(run, "vae", {"vae": vae}, budget, salt=_SALT), budget.batch

    def losses() -> dict[str, Tensor]:
        videos = videos_of(run, config, batch, stage.scenes)
        target = videos * 2 - 1
        with run.precision():
            latents = encode(original, videos)
            posterior = vae.encode(target).latent_dist
            noise = torch.randn(latents.shape, generator=stage.noise, device=run.device)
            found = vae.decode(latents + _SHAKE * noise).sample.float()
        space = F.mse_loss(posterior.mean.float(), latents)
        spread = F.mse_loss(posterior.logvar.float(), torch.full_like(latents, _LOGVAR))
        error = found - target
        pixel = error.abs().mean() + error.square().mean()  # as in `train_vae`
        edge = torch.stack([error.diff(dim=axis).abs().mean() for axis in (2, 3, 4)]).mean()
        loss = pixel + _EDGE * edge + space + 0.01 * spread
        return {"loss": loss, "pixel": pixel, "edge": edge, "space": space}

    @torch.no_grad()
    def probe(stage: Stage) -> None:
        average = stage.ema["vae"]
        scenes, _ = run.generators(98)
        videos = videos_of(run, config, 2 * batch, scenes, held_out=True)
        with run.precision():
            parts = [
                (encode(original, videos[p]), encode(average, videos[p]))
                for p in batches(2 * batch, batch)
            ]
        latents, own = (torch.cat(each) for each in zip(*parts, strict=True))
        found = decode_frames(average, latents, run, batch=batch)
        both = decode_frames(average, own, run, batch=batch)
        report_reconstruction(stage, videos, found, psnr_own_latents=both)

    stage.train(losses, probe)
    average = stage.ema["vae"]
    assert isinstance(average, AutoencoderKLCogVideoX)
    return average
