"""The recipe that all shipped models share: an autoencoder, a teacher, a few-step student.

The Wan's autoencoder is trained on crops first and on whole pictures last, and its decoder once
more at the end, while latents stay what the transformers have learnt: it sees latents of the
encoder and of a transformer, which are off by a little, so both are trained for. The CogVideoX's
is another network for the latents of the tiny Wan: its encoder repeats what Wan's says, and its
decoder draws the video that those latents came from.

The teacher is a flow-matching transformer, trained together with its text encoder.

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
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.data import REFERENCE_SIZE, Scenes, render, sample_scenes
from training.families import Family, Recipe, Wan, build_tokenizer, family_of_folder, tokenize
from training.flow import Velocity, few_step, guided, ode, sample_times
from training.stage import Run, Stage, TrainingError, batches
from turbo_rcm_patch.errors import ModelFolderError
from turbo_rcm_patch.output import merged, write_json
from turbo_rcm_patch.tiny import TINY_WAN

_MOST_BYTES: Final = 16 * 2**20
_CROP_PHASE: Final = 0.65  # share of the steps on crops of half the side
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
#: Seeds of the stages' generators.
_SALTS: Final = {"vae": 1, "teacher": 2, "student": 3, "corpus": 4, "decoder": 5, "twin": 6}


def train(run: Run, family: Family, recipe: Recipe | None = None) -> None:
    """Train a model in all stages, or go on where an earlier call with the same folder stopped.

    The folder receives `log.jsonl`, `state/` and the pipelines `<family>_teacher` and
    `<family>_student`.

    Raises:
        TrainingError: The folder is that of another run, or a stage diverged.
    """
    recipe = recipe or family.recipe
    _check_folder(run, family, recipe)
    torch.set_float32_matmul_precision("high")
    if family.name == "wan":
        encoding = vae = _train_vae(run, family, recipe)
    else:
        encoding = load_vae(Wan(), TINY_WAN, run.device)
        vae = _train_twin(run, family, recipe, encoding)
    clips = cache(lambda: _encode_clips(run, recipe, encoding))
    teacher, encoder = _train_teacher(run, family, recipe, clips)
    student = _train_student(run, family, recipe, clips, teacher, encoder)
    if "decoder" in recipe.stages:
        vae = _train_decoder(run, recipe, vae)
    for name, network in (("teacher", teacher), ("student", student)):
        family.export(run.out / f"{family.name}_{name}", recipe, vae, encoder, network)
    run.log(event="finished")


def _check_folder(run: Run, family: Family, recipe: Recipe) -> None:
    path = run.out / "config.json"
    own = {"family": family.name, "seed": run.seed, "sizes": list(recipe.latent_shape)}
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
    write_json(path, own)


def install(family: Family, student: Path, target: Path | None = None) -> Path:
    """Put a trained pipeline folder where the package looks for it; the model card stays.

    Raises:
        ModelFolderError: There is no such folder, or with the card it exceeds 16 MiB.
    """
    target = target or family.shipped
    family_of_folder(student)
    files = [path for path in student.rglob("*") if path.is_file()]
    kept = [path for path in target.glob("*.md") if not (student / path.name).exists()]
    size = sum(path.stat().st_size for path in files + kept)
    if size > _MOST_BYTES:
        expected = f"at most {_MOST_BYTES} bytes"
        raise ModelFolderError("size of the model", expected=expected, got=str(size))
    with merged(target) as made:
        shutil.copytree(student, made, dirs_exist_ok=True)
    return target


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
            )
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


def _videos(run: Run, recipe: Recipe, count: int, generator: torch.Generator) -> Tensor:
    scenes = sample_scenes(count, generator).to(run.device)
    return render(scenes, frames=recipe.frames, size=recipe.size)


def _crops(run: Run, recipe: Recipe, count: int, generator: torch.Generator) -> Tensor:
    """Squares of half the side, each likely to contain the object."""
    scenes, size, side = sample_scenes(count, generator), recipe.size, recipe.size // 2
    corners = []
    for middle in (scenes.y, scenes.x):
        shift = (2 * torch.rand(count, generator=generator) - 1) * size / 4
        corner = (middle * size / REFERENCE_SIZE - side / 2 + shift).clamp(0, size - side)
        corner = (corner / 4).floor() * 4  # on the latent grid, as in whole pictures
        corners.append(corner.to(run.device))
    window = corners[0], corners[1], side
    return render(scenes.to(run.device), frames=recipe.frames, size=size, window=window)


def _picture_loss(found: Tensor, target: Tensor, edge: float) -> Tensor:
    """L1 keeps edges sharp, its square finds the objects first, differences sharpen edges."""
    error = found.float() - target
    pixel = error.abs().mean() + error.square().mean()
    edges = torch.stack([error.diff(dim=axis).abs().mean() for axis in (2, 3, 4)]).mean()
    return pixel + edge * edges


def _train_vae(run: Run, family: Family, recipe: Recipe) -> Any:
    """Train the tiny Wan's autoencoder, and set the statistics of its latents.

    A small KL keeps latents bounded. Sampling the posterior makes the decoder tolerant of a
    transformer's small errors. A step of crops has four times as many, of a quarter of the pixels.
    """
    torch.manual_seed(run.seed)
    vae = family.build_vae(recipe).to(run.device)
    if run.device.type == "cuda":
        channels_last(vae)
    budget = recipe.stages["vae"]
    stage = Stage(run, "vae", {"vae": vae}, budget, salt=_SALTS["vae"])

    def loss() -> Tensor:
        crops = stage.progress < _CROP_PHASE
        count, draw = (4 * budget.batch, _crops) if crops else (budget.batch, _videos)
        target = draw(run, recipe, count, stage.scenes) * 2 - 1
        with run.precision():
            posterior = vae.encode(target).latent_dist
            mean, logvar = posterior.mean.float(), posterior.logvar.float()
            noise = torch.randn(mean.shape, generator=stage.noise, device=mean.device)
            found = decode(vae, mean + (0.5 * logvar).exp() * noise)
        kl: Tensor = 0.5 * (mean.square() + logvar.exp() - 1 - logvar).mean()
        return _picture_loss(found, target, _EDGE) + _KL * kl

    stage.train(loss)
    average: Any = stage.average["vae"]
    _set_statistics(run, recipe, average)
    return average


@torch.no_grad()
def _set_statistics(run: Run, recipe: Recipe, vae: Any) -> None:
    scenes, _ = run.generators(97)
    parts = []
    for _ in range(8):
        videos = _videos(run, recipe, recipe.stages["vae"].batch, scenes)
        with run.precision():
            parts.append(encode(vae, videos))
    latents = torch.cat(parts)
    vae.register_to_config(
        latents_mean=[round(v, 5) for v in latents.mean((0, 2, 3, 4)).tolist()],
        latents_std=[round(v, 5) for v in latents.std((0, 2, 3, 4)).clamp(min=1e-3).tolist()],
    )


def _train_decoder(run: Run, recipe: Recipe, vae: Any) -> Any:
    """Train the decoder once more; encoder and latents stay."""
    trained, budget = copy.deepcopy(vae), recipe.stages["decoder"]
    parts = {name: getattr(trained, name) for name in ("decoder", "post_quant_conv")}
    for part in parts.values():
        part.requires_grad_(True)
    stage = Stage(run, "decoder", parts, budget, salt=_SALTS["decoder"])
    _, std = statistics(vae, run.device)

    def loss() -> Tensor:
        target = _videos(run, recipe, budget.batch, stage.scenes) * 2 - 1
        with run.precision():
            with torch.no_grad():
                posterior = vae.encode(target).latent_dist
                spread = (0.5 * posterior.logvar.float()).exp() + _SHAKE * std
                noise = torch.randn(spread.shape, generator=stage.noise, device=run.device)
                latents = posterior.mean.float() + spread * noise
            found = decode(trained, latents)
        return _picture_loss(found, target, _DECODER_EDGE)

    stage.train(loss)
    for name, part in parts.items():
        part.load_state_dict(stage.average[name].state_dict())
    return trained.eval().requires_grad_(False)


def _train_twin(run: Run, family: Family, recipe: Recipe, original: Any) -> Any:
    """Train CogVideoX's autoencoder on the latents of the tiny Wan's, which stays as it is.

    Its group norms see whole pictures in use, so they do in training.
    """
    torch.manual_seed(run.seed + 2)
    vae, budget = family.build_vae(recipe).to(run.device).train(), recipe.stages["vae"]
    stage = Stage(run, "vae", {"vae": vae}, budget, salt=_SALTS["twin"])

    def loss() -> Tensor:
        videos = _videos(run, recipe, budget.batch, stage.scenes)
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
    """Encoded clips.

    Latents [N, C, F, H, W] bf16; ids and mask [N, L] int64; empty: those of the empty caption.
    """

    latents: Tensor
    ids: Tensor
    mask: Tensor
    empty: tuple[Tensor, Tensor]


def _encode_clips(run: Run, recipe: Recipe, vae: Any, *, batch: int = 64) -> Corpus:
    """Render and encode the clips of teacher and student."""
    tokenizer, length = build_tokenizer(recipe), recipe.text_tokens
    generator, _ = run.generators(_SALTS["corpus"])
    latents: list[Tensor] = []
    texts: list[str] = []
    for part in batches(recipe.clips, batch):
        scenes: Scenes = sample_scenes(part.stop - part.start, generator)
        videos = render(scenes.to(run.device), frames=recipe.frames, size=recipe.size)
        with run.precision():
            latents.append(encode(vae, videos).bfloat16())
        texts += scenes.captions()
    ids, mask = (each.to(run.device) for each in tokenize(tokenizer, texts, length))
    none, no_mask = (each.to(run.device) for each in tokenize(tokenizer, [""], length))
    run.log(event="corpus", clips=len(texts))
    return Corpus(torch.cat(latents), ids, mask, (none, no_mask))


def _compile_blocks(run: Run, family: Family, *models: Any) -> None:
    """Compile the blocks in place on a GPU; what cannot be compiled runs eagerly."""
    if run.device.type != "cuda":
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
    run: Run, family: Family, recipe: Recipe, clips: Callable[[], Corpus]
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
    corpus, batch = clips(), budget.batch
    _compile_blocks(run, family, transformer)

    def loss() -> Tensor:
        pick = torch.randint(len(corpus.ids), (batch,), generator=stage.noise, device=device)
        x0 = corpus.latents[pick].float()
        drop = torch.rand(batch, 1, generator=stage.noise, device=device) < _DROPOUT
        ids = torch.where(drop, corpus.empty[0], corpus.ids[pick])
        mask = torch.where(drop, corpus.empty[1], corpus.mask[pick])
        noise = torch.randn(x0.shape, generator=stage.noise, device=device)
        t = sample_times(batch, stage.noise, device)
        mix = t[:, None, None, None, None]
        with run.precision():
            text = family.encode_text(encoder, ids, mask)
            v = family.velocity(transformer, text)((1 - mix) * x0 + mix * noise, t)
        return F.mse_loss(v.float(), noise - x0)

    stage.train(loss)
    return average


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
    run: Run,
    family: Family,
    recipe: Recipe,
    clips: Callable[[], Corpus],
    teacher: nn.Module,
    encoder: nn.Module,
) -> nn.Module:
    """Distil the averaged teacher, where the student starts; it learns to do without guidance."""
    budget, device = recipe.stages["student"], run.device
    student = family.build_transformer(recipe).to(device)
    student.load_state_dict(teacher.state_dict())
    networks = {"transformer": student}
    stage = Stage(run, "student", networks, budget, salt=_SALTS["student"], decay=0.995)
    average = stage.average["transformer"]
    if stage.done:
        return average
    corpus, batch, shape = clips(), budget.batch, recipe.latent_shape
    _compile_blocks(run, family, student, teacher)
    times = family.times(4)
    with torch.no_grad():
        texts = torch.cat(
            [
                family.encode_text(encoder, corpus.ids[part], corpus.mask[part])
                for part in batches(len(corpus.ids), 512)
            ]
        )
        empty = family.encode_text(encoder, *corpus.empty).expand(batch, -1, -1)
    buffer = _Endpoints(min(len(texts), 32768) + batch, shape, device)
    turn = 0

    @torch.no_grad()
    def extend() -> None:
        nonlocal turn
        index = (0, 1, 2, 3, 0, 1, 2)[turn % 7]  # the last jump is the easiest one
        from_data = turn % 2 == 0
        turn += 1
        pick = torch.randint(len(texts), (batch,), generator=stage.noise, device=device)
        noise = torch.randn((batch, *shape), generator=stage.noise, device=device)
        field = guided(
            _velocity(run, family, teacher, texts[pick]),
            _velocity(run, family, teacher, empty),
            recipe.guidance,
        )
        if index == 0:
            buffer.add(times[0] * noise, times[0], pick, ode(field, noise, 1.0, _SUBSTEPS[0]))
            return
        t = times[index]
        if from_data:
            state = (1 - t) * corpus.latents[pick].float() + t * noise
        else:
            own = _velocity(run, family, average, texts[pick])
            state = few_step(own, noise, times[: index + 1], stage.noise, renoise=family.renoises)
        buffer.add(state, t, pick, ode(field, state, t, _SUBSTEPS[index]))

    for _ in range(recipe.fill):
        extend()

    def loss() -> Tensor:
        if stage.step % recipe.refresh == 0:
            extend()
        rows = torch.randint(buffer.count, (batch,), generator=stage.noise, device=device)
        x, t, end = buffer.state[rows], buffer.time[rows], buffer.end[rows]
        around = torch.rand(batch, generator=stage.noise, device=device) * 2 - 1
        field = _velocity(run, family, student, texts[buffer.pick[rows]])
        v = field(x, t + family.jitter * around)
        error = x - t[:, None, None, None, None] * v.float() - end
        return ((error.square() + _HUBER**2).sqrt() - _HUBER).mean()

    stage.train(loss)
    return average
