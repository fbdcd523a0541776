"""The stages that all recipes share: an autoencoder, a teacher, a few-step student.

An autoencoder is trained on crops first and on whole pictures last, and its decoder once more at
the end, while latents stay what the transformers have learnt: it sees latents of the encoder and
of a transformer, which are off by a little, so both are trained for. CogVideoX's is another
network for the latents of the tiny Wan ("twin"): its encoder repeats what Wan's says, and its
decoder draws the video that those latents came from.

The teacher is a flow-matching transformer, trained together with its text encoder. A step takes
clips of one bucket, as many as make the same number of tokens.

Distillation. The student predicts the same velocity v as the teacher and is read in rCM's
parameterisation, x0 = x_t - t * v (c_skip = 1, c_out = -t in rectified-flow time). It is used only
at the four times of its sampler, so the consistency condition "from any point of a trajectory,
jump to its end" is imposed there directly: for a state x_t at one of these times, the target is
the end of the *teacher's* ODE trajectory from x_t, and the loss is a pseudo-Huber distance in x0.
That is discrete-time consistency distillation without the bootstrap: no Jacobian-vector product
through attention (rCM's continuous-time form needs one) and no moving target, at the price of some
teacher calls, which a network this small can afford. The states are where the sampler will be:
pure noise at the first time; later, one half noised training latents, one half where the student's
own sampler has come, so that it learns to correct its own errors. A robust loss asks for a median
of what is possible, not a mean, and so stays sharp. Consistency models: arXiv 2303.01469; rCM:
arXiv 2510.08431 (the parameterisation and the sampler were taken).
"""

from __future__ import annotations

import copy
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLWan
from torch import Tensor

from training.data import Shapes, World
from training.flow import Velocity, few_step, guided, ode, sample_times
from training.loop import Run, Stage
from training.networks import tokenize
from training.recipes import SHRINK, Recipe
from training.world import Bucket
from turbo_rcm_patch.files import atomic
from turbo_rcm_patch.tiny import TINY_WAN

#: Share of an autoencoder's steps that see crops.
_CROP_PHASE: Final = 0.65
_KL: Final = 3e-4
_EDGE: Final = 0.5
_DECODER_EDGE: Final = 1.0
#: A further spread of latents that a decoder is trained on, in their standard deviations.
_SHAKE: Final = 0.05
_LOGVAR: Final = -6.0  # a posterior that hardly spreads: nobody samples from it
_DROPOUT: Final = 0.1  # of captions, for classifier-free guidance
_HUBER: Final = 0.1
# Network calls of the teacher from each of the four times; from pure noise it starts at t = 1.
_SUBSTEPS: Final = (14, 10, 8, 5)
_REFRESH: Final = 6  # steps of the student for each new batch of the teacher
#: Elements of a student's largest ring buffer.
_MOST_STATES: Final = 2**30


@dataclass(slots=True)
class Corpus:
    """Encoded clips of one bucket.

    Latents [N, C, F, H, W] bf16; ids and mask [N, L] int64.
    """

    latents: Tensor
    ids: Tensor
    mask: Tensor


@dataclass
class Training:
    """What the stages of a run share.

    Attributes:
        models: Finished ones: "vae", "teacher", "text_encoder", "student".
    """

    run: Run
    recipe: Recipe
    source: Shapes | World
    models: dict[str, Any] = field(default_factory=dict)

    def stage(self, name: str, networks: dict[str, Any], **decays: float) -> Stage:
        """Return the stage with the recipe's budget, where it was left."""
        return Stage(self.run, name, networks, self.recipe.stages[name], **decays)

    def bucket(self, step: int) -> Bucket:
        """The bucket of a step."""
        shares = [bucket.share for bucket in self.recipe.buckets]
        return random.Random(step).choices(self.recipe.buckets, shares)[0]

    @cached_property
    def encoding(self) -> Any:
        """The autoencoder whose latents the transformers learn; CogVideoX's are the tiny Wan's."""
        if "twin" not in self.recipe.stages:
            return self.models["vae"]
        vae = AutoencoderKLWan.from_pretrained(TINY_WAN, subfolder="vae", dtype=torch.float32)
        return _channels_last(vae.to(self.run.device).eval().requires_grad_(False))

    @cached_property
    def empty(self) -> tuple[Tensor, Tensor]:
        """Ids and mask [1, L] of the empty caption."""
        ids, mask = tokenize(self.recipe.networks.build_tokenizer(), [""])
        return ids.to(self.run.device), mask.to(self.run.device)

    @cached_property
    def corpora(self) -> dict[str, Corpus]:
        """The encoded clips of each bucket, a file a shard."""
        tokenizer, corpora = self.recipe.networks.build_tokenizer(), {}
        for bucket in self.recipe.buckets:
            paths = self._encode(bucket)
            saved = [torch.load(path, mmap=True) for path in paths]
            prompts = [prompt for _, shard_prompts in saved for prompt in shard_prompts]
            ids, mask = (tokens.to(self.run.device) for tokens in tokenize(tokenizer, prompts))
            latents = torch.cat([latents for latents, _ in saved]).to(self.run.device)
            corpora[bucket.name] = Corpus(latents, ids, mask)
            self.run.log(event="corpus", bucket=bucket.name, clips=len(latents))
        return corpora

    def _encode(self, bucket: Bucket) -> list[Path]:
        """Encode the shards of a bucket that are missing; return the files of all."""
        run, folder = self.run, self.run.out / "latents"
        paths = [folder / f"{bucket.name}-{i:05}.pt" for i in range(bucket.shards)]
        missing = [i for i, path in enumerate(paths) if not path.exists()]
        shards = self.source.shards(bucket, missing)
        for i, (videos, prompts) in zip(missing, shards, strict=True):
            with run.precision():
                parts = torch.split(videos, 16)
                latents = torch.cat([encode(self.encoding, part) for part in parts])
            with atomic(paths[i]) as partial:
                torch.save((latents.bfloat16().cpu(), prompts), partial)
        return paths

    def velocity(self, network: Any, text: Tensor) -> Velocity:
        """Return the network as a flow in the run's precision."""
        flow = self.recipe.networks.velocity(network, text)

        def velocity(x: Tensor, t: Tensor) -> Tensor:
            with self.run.precision():
                return flow(x, t)

        return velocity


# --- the autoencoders ----------------------------------------------------------------------------


def _channels_last(vae: Any) -> Any:
    """Lay the weights of convolutions out as GPUs read them fastest, in place."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    for parameter in vae.parameters():
        if parameter.ndim in formats:
            parameter.data = parameter.data.contiguous(memory_format=formats[parameter.ndim])
    return vae


def decode(vae: Any, latents: Tensor) -> Tensor:
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
        cache = {"feat_cache": vae._feat_map, "feat_idx": vae._conv_idx}
        chunks.append(vae.decoder(x[:, :, i : i + 1], **cache, first_chunk=i == 0))
    vae.clear_cache()
    return torch.cat(chunks, 2)


@torch.no_grad()
def encode(vae: Any, videos: Tensor) -> Tensor:
    """Normalised latents [B, C, F, H, W] fp32 (posterior means) of [B, 3, F, H, W] in 0..1."""
    mean, std = (
        torch.tensor(values, device=videos.device).view(1, -1, 1, 1, 1)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    latents: Tensor = vae.encode(videos * 2 - 1).latent_dist.mode()
    return (latents.float() - mean) / std


def _picture_loss(picture: Tensor, target: Tensor, edge: float) -> Tensor:
    """L1 keeps edges sharp, its square finds the objects first, differences sharpen edges."""
    error = picture.float() - target
    pixel = error.abs().mean() + error.square().mean()
    edges = torch.stack([error.diff(dim=axis).abs().mean() for axis in (2, 3, 4)]).mean()
    return pixel + edge * edges


def _crops(training: Training, stage: Stage, count: int) -> Tensor:
    """Parts of clips of one bucket, of all its frames and of as many pixels for each bucket.

    A crop of the first one has half its sides. Crops have all frames, because latents of frames
    that come later than any in training grow. A large clip gives several crops.
    """
    first, grid = training.recipe.buckets[0], SHRINK
    bucket = training.bucket(stage.step)
    clips = max(1, count * first.pixels // bucket.pixels)
    videos = training.source.videos(bucket, clips, stage.scenes)
    shrink = math.sqrt(first.frames / bucket.frames) / 2 / grid
    height, width = (int(side * shrink) * grid for side in (first.height, first.width))
    crops = []
    for i in range(count):
        top, left = (
            grid * int(torch.randint((room - side) // grid + 1, (), generator=stage.scenes))
            for room, side in ((bucket.height, height), (bucket.width, width))
        )
        crops.append(videos[i % len(videos), ..., top : top + height, left : left + width])
    return torch.stack(crops)


def _train_vae(training: Training) -> None:
    """Train an autoencoder, and set the statistics of its latents.

    A small KL keeps latents bounded. Sampling the posterior makes the decoder tolerant of a
    transformer's small errors. A step of crops has four times as many, of a quarter of the pixels.
    """
    run, recipe, source = training.run, training.recipe, training.source
    vae = _channels_last(recipe.networks.build_vae().to(run.device))
    stage, first = training.stage("vae", {"vae": vae}), recipe.buckets[0]
    batch = stage.budget.batch

    def loss() -> Tensor:
        if stage.progress < _CROP_PHASE:
            target = _crops(training, stage, 4 * batch) * 2 - 1
        else:
            target = source.videos(first, batch, stage.scenes) * 2 - 1
        with run.precision():
            posterior = vae.encode(target).latent_dist
            mean, logvar = posterior.mean.float(), posterior.logvar.float()
            noise = torch.randn(mean.shape, generator=stage.noise, device=run.device)
            picture = decode(vae, mean + (0.5 * logvar).exp() * noise)
        kl: Tensor = 0.5 * (mean.square() + logvar.exp() - 1 - logvar).mean()
        return _picture_loss(picture, target, _EDGE) + _KL * kl

    stage.train(loss)
    average: Any = stage.average["vae"]
    generator, parts = torch.Generator().manual_seed(97), []
    with torch.no_grad(), run.precision():
        for _ in range(8):
            videos = source.videos(first, batch, generator)
            parts.append(average.encode(videos * 2 - 1).latent_dist.mode().float())
    latents = torch.cat(parts).transpose(0, 1).flatten(1)  # [C, ...]
    average.register_to_config(
        latents_mean=[round(v, 5) for v in latents.mean(1).tolist()],
        latents_std=[round(v, 5) for v in latents.std(1).clamp(min=1e-3).tolist()],
    )
    training.models["vae"] = average


def _train_decoder(training: Training) -> None:
    """Train the decoder once more; encoder and latents stay."""
    run, vae = training.run, copy.deepcopy(training.models["vae"])
    parts = {name: getattr(vae, name).requires_grad_() for name in ("decoder", "post_quant_conv")}
    stage = training.stage("decoder", parts)
    std = torch.tensor(vae.config.latents_std, device=run.device).view(1, -1, 1, 1, 1)

    def loss() -> Tensor:
        first, batch = training.recipe.buckets[0], stage.budget.batch
        target = training.source.videos(first, batch, stage.scenes) * 2 - 1
        with run.precision():
            with torch.no_grad():
                posterior = vae.encode(target).latent_dist
                mean = posterior.mean.float()
                spread = (0.5 * posterior.logvar.float()).exp() + _SHAKE * std
            noise = torch.randn(mean.shape, generator=stage.noise, device=run.device)
            picture = decode(vae, mean + spread * noise)
        return _picture_loss(picture, target, _DECODER_EDGE)

    stage.train(loss)
    for name, part in parts.items():
        part.load_state_dict(stage.average[name].state_dict())
    training.models["vae"] = vae.eval().requires_grad_(False)


def _train_twin(training: Training) -> None:
    """Train CogVideoX's autoencoder on the latents of the tiny Wan's, which stays as it is.

    Its group norms see whole pictures in use, so they do in training.
    """
    run, recipe = training.run, training.recipe
    vae = recipe.networks.build_vae().to(run.device).train()
    stage = training.stage("twin", {"vae": vae})

    def loss() -> Tensor:
        videos = training.source.videos(recipe.buckets[0], stage.budget.batch, stage.scenes)
        target = videos * 2 - 1
        with run.precision():
            latents = encode(training.encoding, videos)
            posterior = vae.encode(target).latent_dist
            noise = torch.randn(latents.shape, generator=stage.noise, device=run.device)
            picture = vae.decode(latents + _SHAKE * noise).sample
        space = F.mse_loss(posterior.mean.float(), latents)
        spread = F.mse_loss(posterior.logvar.float(), torch.full_like(latents, _LOGVAR))
        return _picture_loss(picture, target, _EDGE) + space + 0.01 * spread

    stage.train(loss)
    training.models["vae"] = stage.average["vae"]


# --- teacher and student -------------------------------------------------------------------------


def _train_teacher(training: Training) -> None:
    """Flow matching of the transformer and the text encoder, which learn together."""
    run, networks = training.run, training.recipe.networks
    transformer = networks.build_transformer().to(run.device)
    encoder = networks.build_text_encoder().to(run.device)
    parts = {"teacher": transformer, "text_encoder": encoder}
    stage = training.stage("teacher", parts, decay=0.998, weight_decay=0.01)
    training.models.update(stage.average)
    if stage.done:
        return

    def loss() -> Tensor:
        bucket = training.bucket(stage.step)
        corpus, batch = training.corpora[bucket.name], training.recipe.batch("teacher", bucket)
        draw: dict[str, Any] = {"generator": stage.noise, "device": run.device}
        picked = torch.randint(len(corpus.ids), (batch,), **draw)
        x0 = corpus.latents[picked].float()
        dropped = torch.rand(batch, 1, **draw) < _DROPOUT
        ids = torch.where(dropped, training.empty[0], corpus.ids[picked])
        mask = torch.where(dropped, training.empty[1], corpus.mask[picked])
        noise = torch.randn(x0.shape, **draw)
        t = sample_times(batch, stage.noise, run.device)
        mix = t[:, None, None, None, None]
        with run.precision():
            text = networks.encode_text(encoder, ids, mask)
        v = training.velocity(transformer, text)((1 - mix) * x0 + mix * noise, t)
        return F.mse_loss(v.float(), noise - x0)

    stage.train(loss)


class _Endpoints:
    """A ring buffer of (state, time, caption number, end of the teacher's trajectory)."""

    def __init__(self, capacity: int, shape: tuple[int, ...], device: torch.device) -> None:
        self.state = torch.empty(capacity, *shape, device=device)
        self.end = torch.empty(capacity, *shape, device=device)
        self.time = torch.empty(capacity, device=device)
        self.caption = torch.empty(capacity, dtype=torch.int64, device=device)
        self.count, self._next = 0, 0

    def add(self, state: Tensor, time: float, caption: Tensor, end: Tensor) -> None:
        capacity = len(self.time)
        where = (torch.arange(len(state), device=state.device) + self._next) % capacity
        self.state[where], self.end[where] = state, end
        self.time[where], self.caption[where] = time, caption
        self._next = (self._next + len(state)) % capacity
        self.count = min(capacity, self.count + len(state))


def _train_student(training: Training) -> None:
    """Distil the averaged teacher, where the student starts; it learns to do without guidance."""
    run, recipe, networks = training.run, training.recipe, training.recipe.networks
    teacher, encoder = training.models["teacher"], training.models["text_encoder"]
    student = networks.build_transformer().to(run.device)
    student.load_state_dict(teacher.state_dict())
    stage = training.stage("student", {"student": student}, decay=0.995)
    training.models.update(stage.average)
    if stage.done:
        return
    corpora, average, times = training.corpora, stage.average["student"], networks.times(4)
    with torch.no_grad():
        empty = networks.encode_text(encoder, *training.empty)
        texts = {name: _embedded(networks, encoder, corpus) for name, corpus in corpora.items()}
    endpoints = {}
    for bucket in recipe.buckets:
        shape = recipe.latent_shape(bucket)
        count = min(len(texts[bucket.name]), 32768, _MOST_STATES // math.prod(shape))
        endpoints[bucket.name] = _Endpoints(
            count + recipe.batch("student", bucket), shape, run.device
        )
    time_indices = itertools.cycle((0, 1, 2, 3, 0, 1, 2))  # the last jump is the easiest one
    from_data = itertools.cycle((True, False))

    @torch.no_grad()
    def extend(bucket: Bucket) -> None:
        """Add a batch of states and the ends of the teacher's trajectories from there."""
        index, noised_data = next(time_indices), next(from_data)
        corpus, batch = corpora[bucket.name], recipe.batch("student", bucket)
        picked = torch.randint(len(corpus.ids), (batch,), generator=stage.noise, device=run.device)
        shape, text, t = recipe.latent_shape(bucket), texts[bucket.name][picked], times[index]
        noise = torch.randn(batch, *shape, generator=stage.noise, device=run.device)
        flow = guided(
            training.velocity(teacher, text),
            training.velocity(teacher, empty.expand(batch, -1, -1)),
            recipe.guidance,
        )
        start = t
        if index == 0:
            state, start = noise, 1.0
        elif noised_data:
            state = (1 - t) * corpus.latents[picked].float() + t * noise
        else:
            student_flow, path = training.velocity(average, text), times[: index + 1]
            state = few_step(student_flow, noise, path, stage.noise, renoise=networks.renoises)
        end = ode(flow, state, start, _SUBSTEPS[index])
        endpoints[bucket.name].add(t * state if index == 0 else state, t, picked, end)

    for i in range(recipe.fill):
        extend(recipe.buckets[i % len(recipe.buckets)])

    def loss() -> Tensor:
        bucket = training.bucket(stage.step)
        batch, kept = recipe.batch("student", bucket), endpoints[bucket.name]
        if stage.step % _REFRESH == 0:
            extend(bucket)
        rows = torch.randint(kept.count, (batch,), generator=stage.noise, device=run.device)
        x, t, end = kept.state[rows], kept.time[rows], kept.end[rows]
        jitter = torch.rand(batch, generator=stage.noise, device=run.device) * 2 - 1
        flow = training.velocity(student, texts[bucket.name][kept.caption[rows]])
        v = flow(x, t + networks.jitter * jitter)
        error = x - t[:, None, None, None, None] * v.float() - end
        return ((error.square() + _HUBER**2).sqrt() - _HUBER).mean()

    stage.train(loss)


def _embedded(networks: Any, encoder: Any, corpus: Corpus) -> Tensor:
    pairs = zip(torch.split(corpus.ids, 512), torch.split(corpus.mask, 512), strict=True)
    return torch.cat([networks.encode_text(encoder, ids, mask) for ids, mask in pairs])


STAGES: Final[dict[str, Callable[[Training], None]]] = {
    "vae": _train_vae,
    "twin": _train_twin,
    "teacher": _train_teacher,
    "student": _train_student,
    "decoder": _train_decoder,
}
