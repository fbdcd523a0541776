"""The recipe that all shipped models share: an autoencoder, a teacher, a few-step student.

An autoencoder is trained on crops first and on whole pictures last, and its decoder once
more at the end, while latents stay what the transformers have learnt: it sees latents of the
encoder and of a transformer, which are off by a little, so both are trained for. The CogVideoX's
is another network for the latents of the tiny Wan: its encoder repeats what Wan's says, and its
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
import json
import math
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.data import Source
from training.families import Family, Recipe, Wan, build_tokenizer, family_of_folder, tokenize
from training.flow import Velocity, few_step, guided, ode, sample_times
from training.stage import OutOfTimeError, Recorded, Run, Stage, TrainingError, batches, sheet
from training.world import Bucket
from turbo_rcm_patch.errors import ModelFolderError
from turbo_rcm_patch.files import atomic, atomic_folder, write_json
from turbo_rcm_patch.tiny import TINY_WAN

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
#: Network calls of the teacher for a sheet, and videos on one.
_SHEET_STEPS, _SHEET_VIDEOS = 24, 6
#: Elements of a student's largest ring buffer.
_MOST_STATES: Final = 2**30
#: Seeds of the stages' generators.
_SALTS: Final = {"vae": 1, "teacher": 2, "student": 3, "decoder": 5, "twin": 6}


def train(run: Run, family: Family, recipe: Recipe | None = None) -> None:
    """Train a model in all stages, or go on where an earlier call with the same folder stopped.

    The folder receives `log.jsonl`, `curves.png`, a sheet of each stage, `state/`, `latents/` and
    the pipelines `<family>_teacher` and `<family>_student`.

    Raises:
        TrainingError: The folder is that of another run, or a stage diverged.
        OutOfTimeError: The minutes of this piece are over.
    """
    recipe = recipe or family.recipe
    _check_folder(run, family, recipe)
    torch.set_float32_matmul_precision("high")
    source = family.source(run.out / "frames", run.device, run.seed)
    if not run.rank:
        source.prepare(recipe.buckets)
    run.wait()
    if family.name == "cogvideox":
        encoding = load_vae(Wan(), TINY_WAN, run.device)
        vae = _train_twin(run, family, recipe, source, encoding)
    else:
        encoding = vae = _train_vae(run, family, recipe, source)
    clips = cache(lambda: _encode_clips(run, recipe, source, encoding))
    teacher, encoder = _train_teacher(run, family, recipe, clips, vae)
    student = _train_student(run, family, recipe, clips, teacher, encoder, vae)
    if "decoder" in recipe.stages:
        vae = _train_decoder(run, recipe, source, vae)
    if not run.rank:
        for name, network in (("teacher", teacher), ("student", student)):
            family.export(run.out / f"{family.name}_{name}", recipe, vae, encoder, network)
    run.log(event="finished")


def _check_folder(run: Run, family: Family, recipe: Recipe) -> None:
    path = run.out / "config.json"
    sizes = [list(recipe.latent_shape(bucket)) for bucket in recipe.buckets]
    own = {"family": family.name, "seed": run.seed, "sizes": sizes}
    if path.exists():
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            found = "no JSON"
        if found != own:
            raise TrainingError(
                f"{path} is that of another run",
                expected=str(own), got=str(found)[:200], remedy="Choose another --out",
            )  # fmt: skip
    if not run.rank:
        write_json(path, own)


def install(family: Family, student: Path, target: Path | None = None) -> Path:
    """Put a trained pipeline folder where the package looks for it; the model card stays.

    Raises:
        ModelFolderError: There is no such folder, or with the card it is too large to ship.
    """
    target = target or family.shipped
    family_of_folder(student)
    files = [path for path in student.rglob("*") if path.is_file()]
    kept = [path for path in target.glob("*.md") if not (student / path.name).exists()]
    size = sum(path.stat().st_size for path in files + kept)
    if size > family.most_bytes:
        expected = f"at most {family.most_bytes} bytes"
        raise ModelFolderError("size of the model", expected=expected, got=str(size))
    with atomic_folder(target, force=True) as made:
        shutil.copytree(student, made, dirs_exist_ok=True)
        for card in kept:
            shutil.copy2(card, made)
    return target


def bucket_of(recipe: Recipe, step: int) -> Bucket:
    """The bucket of a step, which is the same on all ranks."""
    shares = [bucket.share for bucket in recipe.buckets]
    return random.Random(step).choices(recipe.buckets, shares)[0]


# --- the autoencoders ----------------------------------------------------------------------------


def load_vae(family: Family, folder: Path, device: torch.device) -> Any:
    """Load a finished autoencoder, frozen, in fp32."""
    vae = family.vae.from_pretrained(folder, subfolder="vae", dtype=torch.float32).to(device)
    return channels_last(vae.eval().requires_grad_(False))


def channels_last(vae: Any) -> Any:
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
        chunks.append(
            vae.decoder(
                x[:, :, i : i + 1],
                feat_cache=vae._feat_map,
                feat_idx=vae._conv_idx,
                first_chunk=i == 0,
            )  # fmt: skip
        )
    vae.clear_cache()
    return torch.cat(chunks, 2)


def statistics(vae: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the latents, each [1, C or 1, 1, 1, 1] fp32.

    CogVideoX has one number for all channels, the inverse of their standard deviation.
    """
    mean, std = vae.config.latents_mean, vae.config.latents_std
    if mean is None:
        mean, std = [0.0], [1 / vae.config.scaling_factor]
    mean, std = (torch.tensor(one, device=device).view(1, -1, 1, 1, 1) for one in (mean, std))
    return mean, std


@torch.no_grad()
def encode(vae: Any, videos: Tensor) -> Tensor:
    """Normalised latents [B, C, F, H, W] fp32 (posterior means) of [B, 3, F, H, W] in 0..1."""
    mean, std = statistics(vae, videos.device)
    latents: Tensor = vae.encode(videos * 2 - 1).latent_dist.mode()
    return (latents.float() - mean) / std


def _crops(recipe: Recipe, source: Source, stage: Stage, count: int) -> Tensor:
    """Parts of clips of one bucket, of all its frames and of as many pixels for each bucket.

    A crop of the first one has half its sides. Crops have all frames, because latents of frames
    that come later than any in training grow. A large clip gives several crops.
    """
    first, grid = recipe.buckets[0], 2 ** (len(recipe.vae_channels) - 1)
    bucket = bucket_of(recipe, stage.step)
    sizes = [one.frames * one.height * one.width for one in (first, bucket)]
    videos = source.videos(bucket, max(1, count * sizes[0] // sizes[1]), stage.scenes)
    shrink = math.sqrt(first.frames / bucket.frames) / 2 / grid
    height, width = (int(side * shrink) * grid for side in (first.height, first.width))
    sides = bucket.frames, height, width
    parts = []
    for i in range(count):
        part = videos[i % len(videos)]
        for axis, (side, unit) in enumerate(zip(sides, (1, grid, grid), strict=True), 1):
            room = (part.shape[axis] - side) // unit + 1
            start = int(torch.randint(room, (), generator=stage.scenes)) * unit
            part = part.narrow(axis, start, side)
        parts.append(part)
    return torch.stack(parts)


def _noise_for(recipe: Recipe, stage: Stage, videos: Tensor) -> Tensor:
    shape = len(videos), *recipe.latent_shape(Bucket("", *videos.shape[2:]))
    return torch.randn(shape, generator=stage.noise, device=videos.device)


def _picture_loss(found: Tensor, target: Tensor, edge: float) -> Tensor:
    """L1 keeps edges sharp, its square finds the objects first, differences sharpen edges."""
    error = found.float() - target
    pixel = error.abs().mean() + error.square().mean()
    edges = torch.stack([error.diff(dim=axis).abs().mean() for axis in (2, 3, 4)]).mean()
    return pixel + edge * edges


def _train_vae(run: Run, family: Family, recipe: Recipe, source: Source) -> Any:
    """Train an autoencoder, and set the statistics of its latents.

    A small KL keeps latents bounded. Sampling the posterior makes the decoder tolerant of a
    transformer's small errors. A step of crops has four times as many, of a quarter of the pixels.
    """
    torch.manual_seed(run.seed)
    vae = family.build_vae(recipe).to(run.device)
    if run.device.type == "cuda":
        channels_last(vae)
    budget, first = recipe.stages["vae"], recipe.buckets[0]
    stage = Stage(run, "vae", {"vae": vae}, budget, salt=_SALTS["vae"])
    average: Any = stage.average["vae"]

    def distance(target: Tensor, noise: Tensor) -> Tensor:
        with run.precision():
            posterior = vae.encode(target).latent_dist
            mean, logvar = posterior.mean.float(), posterior.logvar.float()
            found = decode(vae, mean + (0.5 * logvar).exp() * noise)
        kl: Tensor = 0.5 * (mean.square() + logvar.exp() - 1 - logvar).mean()
        return _picture_loss(found, target, _EDGE) + _KL * kl

    recorded = Recorded(distance, stage.parameters)

    def loss() -> Tensor:
        if stage.progress < recipe.crop_phase:
            target = _crops(recipe, source, stage, 4 * budget.batch) * 2 - 1
        else:
            target = source.videos(first, budget.batch, stage.scenes) * 2 - 1
        return recorded(target, _noise_for(recipe, stage, target))

    @torch.no_grad()
    def show() -> None:
        """Say what is lost of clips that were held out, and show them beside the original."""
        videos, _ = next(source.shards(first, [0], held_out=True))
        videos = videos[:_SHEET_VIDEOS]
        with run.precision():
            found = average.decode(average.encode(videos * 2 - 1).latent_dist.mode()).sample
        found = found.float() / 2 + 0.5
        psnr = -10 * math.log10(F.mse_loss(found, videos))
        run.log(stage="vae", event="held out", psnr=round(psnr, 2))
        both = torch.stack((videos, found), 1).flatten(0, 1).permute(0, 2, 3, 4, 1)
        sheet(both, run.out / "vae.png")

    stage.train(loss, show)
    _set_statistics(run, recipe, source, average)
    return average


@torch.no_grad()
def _set_statistics(run: Run, recipe: Recipe, source: Source, vae: Any) -> None:
    generator, parts = torch.Generator().manual_seed(run.seed * 1000 + 97), []
    for _ in range(8):
        videos = source.videos(recipe.buckets[0], recipe.stages["vae"].batch, generator)
        with run.precision():
            parts.append(encode(vae, videos))
    latents = torch.cat(parts)
    vae.register_to_config(
        latents_mean=[round(v, 5) for v in latents.mean((0, 2, 3, 4)).tolist()],
        latents_std=[round(v, 5) for v in latents.std((0, 2, 3, 4)).clamp(min=1e-3).tolist()],
    )


def _train_decoder(run: Run, recipe: Recipe, source: Source, vae: Any) -> Any:
    """Train the decoder once more; encoder and latents stay."""
    trained, budget = copy.deepcopy(vae), recipe.stages["decoder"]
    parts = {name: getattr(trained, name) for name in ("decoder", "post_quant_conv")}
    for part in parts.values():
        part.requires_grad_(True)
    stage = Stage(run, "decoder", parts, budget, salt=_SALTS["decoder"])
    _, std = statistics(vae, run.device)

    def distance(target: Tensor, noise: Tensor) -> Tensor:
        with run.precision():
            with torch.no_grad():
                posterior = vae.encode(target).latent_dist
                spread = (0.5 * posterior.logvar.float()).exp() + _SHAKE * std
            found = decode(trained, posterior.mean.float() + spread * noise)
        return _picture_loss(found, target, _DECODER_EDGE)

    recorded = Recorded(distance, stage.parameters)

    def loss() -> Tensor:
        target = source.videos(recipe.buckets[0], budget.batch, stage.scenes) * 2 - 1
        return recorded(target, _noise_for(recipe, stage, target))

    stage.train(loss)
    for name, part in parts.items():
        part.load_state_dict(stage.average[name].state_dict())
    return trained.eval().requires_grad_(False)


def _train_twin(run: Run, family: Family, recipe: Recipe, source: Source, original: Any) -> Any:
    """Train CogVideoX's autoencoder on the latents of the tiny Wan's, which stays as it is.

    Its group norms see whole pictures in use, so they do in training.
    """
    torch.manual_seed(run.seed + 2)
    vae, budget = family.build_vae(recipe).to(run.device).train(), recipe.stages["vae"]
    stage = Stage(run, "vae", {"vae": vae}, budget, salt=_SALTS["twin"])

    def loss() -> Tensor:
        videos = source.videos(recipe.buckets[0], budget.batch, stage.scenes)
        target = videos * 2 - 1
        with run.precision():
            latents = encode(original, videos)
            posterior = vae.encode(target).latent_dist
            noise = torch.randn(latents.shape, generator=stage.noise, device=run.device)
            found = vae.decode(latents + _SHAKE * noise).sample
        space = F.mse_loss(posterior.mean.float(), latents)
        spread = F.mse_loss(posterior.logvar.float(), torch.full_like(latents, _LOGVAR))
        return _picture_loss(found, target, _EDGE) + space + 0.01 * spread

    stage.train(loss)
    return stage.average["vae"]


# --- teacher and student -------------------------------------------------------------------------


@dataclass(slots=True)
class Corpus:
    """Encoded clips of one bucket.

    Latents [N, C, F, H, W] bf16; ids and mask [N, L] int64; empty: those of the empty caption;
    texts: embedded captions [N, L, text_dim], once there is a text encoder.
    """

    latents: Tensor
    ids: Tensor
    mask: Tensor
    empty: tuple[Tensor, Tensor]
    texts: Tensor | None = None


Corpora = dict[str, Corpus]


def _encode_clips(
    run: Run, recipe: Recipe, source: Source, vae: Any, *, batch: int = 16
) -> Corpora:
    """Encode the clips of teacher and student, a file a shard, and read all of them.

    Ranks share the shards. Held-out clips of the first bucket are the corpus "held out".
    """
    folder, first = run.out / "latents", recipe.buckets[0]
    wanted = [(bucket.name, bucket, range(bucket.shards), False) for bucket in recipe.buckets]
    wanted.append(("held out", first, range(1), True))
    tokenizer = build_tokenizer(recipe, source.words)
    none, no_mask = (each.to(run.device) for each in tokenize(tokenizer, [""], recipe.text_tokens))
    paths = {
        name: [folder / f"{name}-{i:05}.pt" for i in indices] for name, _, indices, _ in wanted
    }
    for name, bucket, indices, held_out in wanted:
        todo = [i for i in indices[run.rank :: run.ranks] if not paths[name][i].exists()]
        for i, (videos, prompts) in zip(
            todo, source.shards(bucket, todo, held_out=held_out), strict=True
        ):
            with run.precision():
                parts = [encode(vae, videos[one]) for one in batches(len(videos), batch)]
            with atomic(paths[name][i]) as partial:
                torch.save((torch.cat(parts).bfloat16().cpu(), prompts), partial)
            if run.ranks == 1 and run.is_over():  # `is_over` is for all ranks at once
                raise OutOfTimeError(f"{run.minutes:g} minutes are over", got=f"{name}: shard {i}")
    run.wait()
    corpora = {}
    for name, files in paths.items():
        loaded = [torch.load(path, mmap=True) for path in files]
        prompts = [prompt for _, some in loaded for prompt in some]
        ids, mask = (t.to(run.device) for t in tokenize(tokenizer, prompts, recipe.text_tokens))
        latents = torch.cat([one for one, _ in loaded]).to(run.device)
        corpora[name] = Corpus(latents, ids, mask, (none, no_mask))
        run.log(event="corpus", bucket=name, clips=len(latents))
    return corpora


def _compile_blocks(run: Run, family: Family, *models: Any) -> None:
    """Compile the blocks in place on a GPU; what cannot be compiled runs eagerly."""
    if run.device.type != "cuda" or not run.compiles:
        return
    import torch._dynamo

    torch._dynamo.config.suppress_errors = True
    torch._dynamo.config.cache_size_limit = 64
    for model in models:
        for block in family.blocks(model):
            block.compile(dynamic=False)


def _velocity(run: Run, family: Family, network: Any, text: Tensor) -> Velocity:
    """Return the network as a flow in the run's precision."""
    field = family.velocity(network, text)

    def velocity(x: Tensor, t: Tensor) -> Tensor:
        with run.precision():
            return field(x, t)

    return velocity


def _train_teacher(
    run: Run, family: Family, recipe: Recipe, clips: Callable[[], Corpora], vae: Any
) -> tuple[nn.Module, nn.Module]:
    """Flow matching; return the averaged transformer and text encoder, which learn together."""
    budget, device = recipe.stages["teacher"], run.device
    torch.manual_seed(run.seed + 1)
    transformer = family.build_transformer(recipe).to(device)
    encoder = family.build_text_encoder(recipe).to(device)
    networks = {"transformer": transformer, "text_encoder": encoder}
    stage = Stage(
        run, "teacher", networks, budget, salt=_SALTS["teacher"], decay=0.998, weight_decay=0.01
    )
    average = stage.average["transformer"], stage.average["text_encoder"]
    if stage.done:
        return average
    corpora = clips()
    _compile_blocks(run, family, transformer)

    def loss_of(corpus: Corpus, batch: int, network: Any, text_encoder: Any) -> Tensor:
        pick = torch.randint(len(corpus.ids), (batch,), generator=stage.noise, device=device)
        x0 = corpus.latents[pick].float()
        drop = torch.rand(batch, 1, generator=stage.noise, device=device) < _DROPOUT
        ids = torch.where(drop, corpus.empty[0], corpus.ids[pick])
        mask = torch.where(drop, corpus.empty[1], corpus.mask[pick])
        noise = torch.randn(x0.shape, generator=stage.noise, device=device)
        t = sample_times(batch, stage.noise, device)
        mix = t[:, None, None, None, None]
        with run.precision():
            text = family.encode_text(text_encoder, ids, mask)
            v = family.velocity(network, text)((1 - mix) * x0 + mix * noise, t)
        return F.mse_loss(v.float(), noise - x0)

    def loss() -> Tensor:
        bucket = bucket_of(recipe, stage.step)
        batch = recipe.batch("teacher", bucket)
        return loss_of(corpora[bucket.name], batch, transformer, encoder)

    @torch.no_grad()
    def show() -> None:
        held = corpora["held out"]
        losses = [float(loss_of(held, min(64, budget.batch), *average)) for _ in range(8)]
        run.log(stage="teacher", event="held out", flow=round(sum(losses) / 8, 5))
        _embed(family, average[1], {"held out": held})
        _show(run, family, recipe, held, average[0], vae, "teacher")

    stage.train(loss, show)
    return average


@torch.no_grad()
def _embed(family: Family, encoder: Any, corpora: Corpora) -> None:
    for corpus in corpora.values():
        parts = [
            family.encode_text(encoder, corpus.ids[part], corpus.mask[part])
            for part in batches(len(corpus.ids), 512)
        ]
        corpus.texts = torch.cat(parts)


@torch.no_grad()
def _show(
    run: Run, family: Family, recipe: Recipe, held: Corpus, network: Any, vae: Any, name: str
) -> None:
    """Write a sheet of videos of held-out prompts."""
    assert held.texts is not None
    texts = held.texts[:_SHEET_VIDEOS]
    generator = torch.Generator(run.device).manual_seed(run.seed)
    shape = len(texts), *recipe.latent_shape(recipe.buckets[0])
    noise = torch.randn(shape, generator=generator, device=run.device)
    field = _velocity(run, family, network, texts)
    if name == "teacher":
        latents = ode(field, noise, 1.0, _SHEET_STEPS)
    else:
        latents = few_step(field, noise, family.times(4), generator, renoise=family.renoises)
    mean, std = statistics(vae, run.device)
    with run.precision():
        video = vae.decode(latents * std + mean).sample
    sheet(video.permute(0, 2, 3, 4, 1).float() / 2 + 0.5, run.out / f"{name}.png")


class _Endpoints:
    """A ring buffer of (state, time, caption number, end of the teacher's trajectory)."""

    def __init__(self, capacity: int, shape: tuple[int, ...], device: torch.device) -> None:
        self.state = torch.empty(capacity, *shape, device=device)
        self.end = torch.empty(capacity, *shape, device=device)
        self.time = torch.empty(capacity, device=device)
        self.pick = torch.empty(capacity, dtype=torch.int64, device=device)
        self.count, self._next = 0, 0

    def add(self, state: Tensor, time: float, pick: Tensor, end: Tensor) -> None:
        capacity = len(self.time)
        where = (torch.arange(len(state), device=state.device) + self._next) % capacity
        self.state[where], self.end[where] = state, end
        self.time[where], self.pick[where] = time, pick
        self._next = (self._next + len(state)) % capacity
        self.count = min(capacity, self.count + len(state))


def _train_student(
    run: Run, family: Family, recipe: Recipe, clips: Callable[[], Corpora], teacher: nn.Module,
    encoder: nn.Module, vae: Any,
) -> nn.Module:  # fmt: skip
    """Distil the averaged teacher, where the student starts; it learns to do without guidance."""
    budget, device = recipe.stages["student"], run.device
    student = family.build_transformer(recipe).to(device)
    student.load_state_dict(teacher.state_dict())
    networks = {"transformer": student}
    stage = Stage(run, "student", networks, budget, salt=_SALTS["student"], decay=0.995)
    average = stage.average["transformer"]
    if stage.done:
        return average
    corpora = clips()
    _compile_blocks(run, family, student, teacher)
    times = family.times(4)
    _embed(family, encoder, corpora)
    with torch.no_grad():
        empty = family.encode_text(encoder, *corpora["held out"].empty)
    buffers = {}
    for bucket in recipe.buckets:
        shape = recipe.latent_shape(bucket)
        count = min(len(corpora[bucket.name].ids), 32768, _MOST_STATES // math.prod(shape))
        buffers[bucket.name] = _Endpoints(count + recipe.batch("student", bucket), shape, device)
    turn = 0

    @torch.no_grad()
    def extend(bucket: Bucket) -> None:
        nonlocal turn
        index = (0, 1, 2, 3, 0, 1, 2)[turn % 7]  # the last jump is the easiest one
        from_data = turn % 2 == 0
        turn += 1
        corpus, batch = corpora[bucket.name], recipe.batch("student", bucket)
        add, texts = buffers[bucket.name].add, corpus.texts
        assert texts is not None
        pick = torch.randint(len(texts), (batch,), generator=stage.noise, device=device)
        shape = batch, *recipe.latent_shape(bucket)
        noise = torch.randn(shape, generator=stage.noise, device=device)
        field = guided(
            _velocity(run, family, teacher, texts[pick]),
            _velocity(run, family, teacher, empty.expand(batch, -1, -1)),
            recipe.guidance,
        )
        if index == 0:
            add(times[0] * noise, times[0], pick, ode(field, noise, 1.0, _SUBSTEPS[0]))
            return
        t = times[index]
        if from_data:
            state = (1 - t) * corpus.latents[pick].float() + t * noise
        else:
            own = _velocity(run, family, average, texts[pick])
            state = few_step(own, noise, times[: index + 1], stage.noise, renoise=family.renoises)
        add(state, t, pick, ode(field, state, t, _SUBSTEPS[index]))

    for i in range(recipe.fill):
        extend(recipe.buckets[i % len(recipe.buckets)])

    def loss() -> Tensor:
        bucket = bucket_of(recipe, stage.step)
        batch, buffer = recipe.batch("student", bucket), buffers[bucket.name]
        texts = corpora[bucket.name].texts
        assert texts is not None
        if stage.step % recipe.refresh == 0:
            extend(bucket)
        rows = torch.randint(buffer.count, (batch,), generator=stage.noise, device=device)
        x, t, end = buffer.state[rows], buffer.time[rows], buffer.end[rows]
        around = torch.rand(batch, generator=stage.noise, device=device) * 2 - 1
        field = _velocity(run, family, student, texts[buffer.pick[rows]])
        v = field(x, t + family.jitter * around)
        error = x - t[:, None, None, None, None] * v.float() - end
        return ((error.square() + _HUBER**2).sqrt() - _HUBER).mean()

    stage.train(
        loss, lambda: _show(run, family, recipe, corpora["held out"], average, vae, "student")
    )
    return average
