"""The video autoencoders.

Stage one trains the tiny Wan's, on crops first and on whole pictures last. The last stage trains
its decoder alone, while latents stay what the transformers have learnt. A decoder sees two kinds
of latents: those of the encoder, and those of a transformer, which are off by a little. Both are
trained for: latents are drawn from the posterior and shaken by a further few per cent of their
spread.

The CogVideoX autoencoder is another network for the latents that the tiny Wan's already has.
Nothing has to be found there, only learnt: the encoder repeats what Wan's encoder says,
normalised, and the decoder draws the video that those latents came from. So the transformer can
be trained on Wan's latents before, after or beside that stage.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Final

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLCogVideoX, AutoencoderKLWan
from torch import Tensor, nn

from training import family_cogvideox, family_wan
from training.build import TinyConfig
from training.data import REFERENCE_SIZE, Scenes, render, sample_scenes
from training.plots import sheet
from training.run import Budget, Run, Stage, batches

_CROP_PHASE: Final = 0.65  # share of the budget spent on crops of half the side
_KL: Final = 3e-4
_EDGE: Final = 0.5
_SALT: Final = 1

#: The decoder alone, and its further shake of a latent channel's standard deviation.
_DECODER_EDGE: Final = 1.0
_SHAKE: Final = 0.05
_DECODER_SALT: Final = 5

_TWIN_SALT: Final = 6
_LOGVAR: Final = -6.0  # a posterior that hardly spreads: nobody samples from it


def decode(vae: AutoencoderKLWan, latents: Tensor) -> Tensor:
    """Decode as `AutoencoderKLWan.decode`, without its clamp, whose gradient is zero outside.

    Args:
        vae: The autoencoder.
        latents: [B, C, F, H, W], not normalised.

    Returns:
        [B, 3, 4F-3, 4H, 4W] in about -1..1.
    """
    vae.clear_cache()
    x = vae.post_quant_conv(latents)
    chunks = []
    for i in range(x.shape[2]):
        vae._conv_idx = [0]
        chunks.append(
            vae.decoder(
                x[:, :, i : i + 1],
                feat_cache=vae._feat_map,
                feat_idx=vae._conv_idx,
                first_chunk=i == 0,
            )
        )
    vae.clear_cache()
    return torch.cat(chunks, 2)


def statistics(
    vae: AutoencoderKLWan | AutoencoderKLCogVideoX, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the latents, each [1, C, 1, 1, 1] fp32.

    CogVideoX has one number for all channels, the inverse of their standard deviation.
    """
    shape = (1, -1, 1, 1, 1)
    if vae.config.latents_mean is None:
        std = torch.full((1, 1, 1, 1, 1), 1 / vae.config.scaling_factor, device=device)
        return torch.zeros_like(std), std
    mean = torch.tensor(vae.config.latents_mean, device=device).view(shape)
    return mean, torch.tensor(vae.config.latents_std, device=device).view(shape)


@torch.no_grad()
def encode(vae: AutoencoderKLWan, videos: Tensor) -> Tensor:
    """Normalised latents [B, C, F, H, W] fp32 (posterior means) of [B, 3, F, H, W] in 0..1."""
    mean, std = statistics(vae, videos.device)
    latents: Tensor = vae.encode(videos * 2 - 1).latent_dist.mode()
    return (latents.float() - mean) / std


@torch.no_grad()
def decode_frames(
    vae: AutoencoderKLWan | AutoencoderKLCogVideoX, latents: Tensor, run: Run, *, batch: int = 16
) -> Tensor:
    """Frames [B, F, H, W, 3] fp32 in 0..1 of normalised latents."""
    mean, std = statistics(vae, latents.device)
    parts = []
    for part in batches(len(latents), batch):
        with run.precision():
            parts.append(vae.decode(latents[part] * std + mean).sample.float())
    return (torch.cat(parts).permute(0, 2, 3, 4, 1) / 2 + 0.5).clamp(0, 1)


def videos_of(
    run: Run, config: TinyConfig, count: int, generator: torch.Generator, *, held_out: bool = False
) -> Tensor:
    """Whole rendered videos [B, 3, F, H, W] in 0..1."""
    scenes = sample_scenes(count, generator, held_out=held_out).to(run.device)
    return render(scenes, frames=config.frames, size=config.size)


def report_reconstruction(stage: Stage, videos: Tensor, found: Tensor, **others: Tensor) -> None:
    """Log how far decoded frames are from videos, and draw both side by side.

    Args:
        stage: Whose log and sheets.
        videos: [B, 3, F, H, W] in 0..1.
        found: Frames [B, F, H, W, 3].
        **others: Name -> frames whose mean PSNR is logged as well.
    """
    frames = videos.permute(0, 2, 3, 4, 1)
    error = F.mse_loss(found, frames, reduction="none").mean((1, 2, 3, 4)).clamp(min=1e-9)
    stage.run.log(
        stage=stage.name,
        step=stage.step,
        psnr=round(float(-10 * error.log10().mean()), 2),
        psnr_worst=round(float(-10 * error.log10().max()), 2),
        **{
            name: round(float(-10 * F.mse_loss(other, frames).log10()), 2)
            for name, other in others.items()
        },
    )
    pairs = torch.stack([frames, found], 1).flatten(0, 1)
    sheet(pairs, stage.run.out / "sheets" / f"{stage.name}_{stage.step:06d}.png")


def _held_out(run: Run, config: TinyConfig, batch: int) -> Tensor:
    """Two batches of videos that no stage is trained on, the same at every probe."""
    return videos_of(run, config, 2 * batch, run.generators(98)[0], held_out=True)


def _encoded(vae: AutoencoderKLWan, videos: Tensor, run: Run, batch: int) -> Tensor:
    with run.precision():
        return torch.cat([encode(vae, videos[part]) for part in batches(len(videos), batch)])


def _crop(
    scenes: Scenes, side: int, size: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, int]:
    """A random square of each picture that is likely to contain the object."""
    scale = size / REFERENCE_SIZE
    corners = []
    for middle in (scenes.y, scenes.x):
        shift = (2 * torch.rand(len(scenes), generator=generator) - 1) * size / 4
        corner = (middle * scale - side / 2 + shift).clamp(0, size - side)
        corners.append((corner / 4).floor() * 4)  # on the latent grid, as in whole pictures
    return corners[0], corners[1], side


def _losses(
    vae: AutoencoderKLWan, videos: Tensor, generator: torch.Generator, run: Run
) -> dict[str, Tensor]:
    target = videos * 2 - 1
    with run.precision():
        posterior = vae.encode(target).latent_dist
        mean, logvar = posterior.mean.float(), posterior.logvar.float()
        noise = torch.randn(mean.shape, generator=generator, device=mean.device)
        found = decode(vae, mean + (0.5 * logvar).exp() * noise).float()
    error = found - target
    pixel = error.abs().mean() + error.square().mean()  # L1 alone is slow to find the objects
    edge = sum(error.diff(dim=axis).abs().mean() for axis in (2, 3, 4)) / 3
    kl = 0.5 * (mean.square() + logvar.exp() - 1 - logvar).mean()
    return {"loss": pixel + _EDGE * edge + _KL * kl, "pixel": pixel, "edge": edge, "kl": kl}


def channels_last(vae: nn.Module) -> None:
    """Lay the weights of convolutions out as GPUs read them fastest, in place."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    for parameter in vae.parameters():
        if parameter.ndim in formats:
            parameter.data = parameter.data.contiguous(memory_format=formats[parameter.ndim])


def train_vae(run: Run, config: TinyConfig, budget: Budget) -> AutoencoderKLWan:
    """Train (or continue, or just load) the autoencoder and set its latent statistics.

    L1 (with a square, which finds the objects first) keeps edges sharp, the L1 of differences
    along height, width and time sharpens them, and the small KL keeps latents bounded; sampling
    the posterior in training makes the decoder tolerant of a transformer's small errors.

    Args:
        run: Where and how.
        config: Sizes.
        budget: How long; whole pictures a step, and four times as many crops, of a quarter of the
            pixels.

    Returns:
        The averaged weights with `latents_mean` and `latents_std` in its config, in fp32.
    """
    batch = budget.batch
    torch.manual_seed(run.seed)
    vae = family_wan.build_vae(config).to(run.device)
    if run.device.type == "cuda":
        channels_last(vae)
    stage = Stage(run, "vae", {"vae": vae}, budget, salt=_SALT)

    def losses() -> dict[str, Tensor]:
        crops = stage.progress < _CROP_PHASE
        scenes = sample_scenes(batch * 4 if crops else batch, stage.scenes)
        window = _crop(scenes, config.size // 2, config.size, stage.scenes) if crops else None
        if window is not None:
            window = (window[0].to(run.device), window[1].to(run.device), window[2])
        videos = render(
            scenes.to(run.device), frames=config.frames, size=config.size, window=window
        )
        return _losses(vae, videos, stage.noise, run)

    def probe(stage: Stage) -> None:
        average = stage.ema["vae"]
        assert isinstance(average, AutoencoderKLWan)
        _set_statistics(average, config, run, batch)
        videos = _held_out(run, config, batch)
        latents = _encoded(average, videos, run, batch)
        found = decode_frames(average, latents, run, batch=batch)
        noisy = decode_frames(average, latents + 0.1 * torch.randn_like(latents), run, batch=batch)
        report_reconstruction(stage, videos, found, psnr_noisy_latents=noisy)

    stage.train(losses, probe)
    average = stage.ema["vae"]
    assert isinstance(average, AutoencoderKLWan)
    _set_statistics(average, config, run, batch)
    return average


@torch.no_grad()
def _set_statistics(vae: AutoencoderKLWan, config: TinyConfig, run: Run, batch: int) -> None:
    vae.register_to_config(
        latents_mean=[0.0] * config.latent_channels, latents_std=[1.0] * config.latent_channels
    )
    scenes, _ = run.generators(97)
    parts = []
    for _ in range(8):
        videos = videos_of(run, config, batch, scenes)
        with run.precision():
            parts.append(encode(vae, videos))
    latents = torch.cat(parts)
    vae.register_to_config(
        latents_mean=[round(v, 5) for v in latents.mean((0, 2, 3, 4)).tolist()],
        latents_std=[round(v, 5) for v in latents.std((0, 2, 3, 4)).clamp(min=1e-3).tolist()],
    )


# --- the decoder alone ---------------------------------------------------------------------------


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
    stage, batch = Stage(run, "decoder", parts, budget, salt=_DECODER_SALT), budget.batch
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
        loss = pixel + error.square().mean() + _DECODER_EDGE * edge
        return {"loss": loss, "pixel": pixel, "edge": torch.as_tensor(edge)}

    def averaged() -> AutoencoderKLWan:
        result = copy.deepcopy(vae)
        result.decoder.load_state_dict(stage.ema["decoder"].state_dict())
        result.post_quant_conv.load_state_dict(stage.ema["post_quant_conv"].state_dict())
        return result

    @torch.no_grad()
    def probe(stage: Stage) -> None:
        average = averaged()
        videos = _held_out(run, config, batch)
        found = decode_frames(average, _encoded(vae, videos, run, batch), run, batch=batch)
        report_reconstruction(stage, videos, found)

    stage.train(losses, probe)
    return averaged()


# --- the twin: CogVideoX's -----------------------------------------------------------------------


def train_twin(
    run: Run,
    config: family_cogvideox.CogVideoXConfig,
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
    vae = family_cogvideox.build_vae(config)
    if start is not None:
        vae = AutoencoderKLCogVideoX.from_pretrained(start, subfolder="vae", dtype=torch.float32)
    vae.to(run.device).train()
    stage, batch = Stage(run, "vae", {"vae": vae}, budget, salt=_TWIN_SALT), budget.batch

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
        videos = _held_out(run, config, batch)
        latents, own = (_encoded(one, videos, run, batch) for one in (original, average))
        found, both = (decode_frames(average, x, run, batch=batch) for x in (latents, own))
        report_reconstruction(stage, videos, found, psnr_own_latents=both)

    stage.train(losses, probe)
    average = stage.ema["vae"]
    assert isinstance(average, AutoencoderKLCogVideoX)
    return average
