"""Stages two and three: flow matching with text, then distillation to four steps.

Distillation. The student predicts the same velocity v as the teacher and is read in rCM's
parameterisation, x0 = x_t - t * v (c_skip = 1, c_out = -t in rectified-flow time). It is used only
at the four times of its sampler, so the consistency condition "from any point of a trajectory,
jump to its end" is imposed there directly: for a state x_t at one of these times, the target is
the end of the *teacher's* ODE trajectory from x_t, and the loss is a pseudo-Huber distance in x0.
That is discrete-time consistency distillation with the bootstrap taken out: no Jacobian-vector
product through attention (rCM's continuous-time form needs one), no moving target, nothing that
can diverge, at the price of some teacher calls, which a network this small can afford. The states
are where the sampler will be: pure noise at the first time; later, one half noised training
latents, one half where the student's own sampler has come, so that it learns to correct its own
errors. A robust loss asks for a median of what is possible, not a mean, and so stays sharp.
Endpoints are kept in a ring buffer and used several times. Consistency models: arXiv 2303.01469;
rCM: arXiv 2510.08431 (the parameterisation and the sampler were taken).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLWan
from torch import Tensor, nn

from training.build import TinyConfig, build_tokenizer, tokenize
from training.data import render, sample_scenes
from training.flow import few_step, ode, sample_times
from training.probe import Flow, probe_flow
from training.run import Budget, Run, Stage, batches
from training.train_vae import encode

_DROPOUT: Final = 0.1  # of captions, for classifier-free guidance
_HUBER: Final = 0.1
_TEACHER_SALT, _STUDENT_SALT, _CORPUS_SALT = 2, 3, 4
# Network calls of the teacher from each of the four times; from pure noise it starts at t = 1.
_SUBSTEPS: Final = (14, 10, 8, 5)
TEACHER_STEPS: Final = 24


@dataclass(slots=True)
class Corpus:
    """Encoded clips.

    Latents [N, C, F, H, W] bf16; ids and mask [N, L] int64; empty: those of the empty caption.
    """

    latents: Tensor
    ids: Tensor
    mask: Tensor
    empty: tuple[Tensor, Tensor]


def build_corpus(
    run: Run,
    config: TinyConfig,
    vae: AutoencoderKLWan,
    *,
    count: int,
    seconds: float,
    batch: int = 64,
) -> Corpus:
    """Render and encode clips until there are `count`, or time is up: `seconds`, or the run's
    (at least one batch)."""
    tokenizer = build_tokenizer(config)
    generator, _ = run.generators(_CORPUS_SALT)
    began = time.monotonic()
    latents: list[Tensor] = []
    texts: list[str] = []

    def goes_on() -> bool:
        return not run.late and time.monotonic() - began < seconds

    while len(texts) < count and (not texts or goes_on()):
        scenes = sample_scenes(min(batch, count - len(texts)), generator)
        videos = render(scenes.to(run.device), frames=config.frames, size=config.size)
        with run.precision():
            latents.append(encode(vae, videos).bfloat16())
        texts += scenes.captions()
        if run.device.type == "cuda":
            torch.cuda.synchronize()
    ids, mask = tokenize(tokenizer, texts, config.max_sequence_length)
    empty = tokenize(tokenizer, [""], config.max_sequence_length)
    run.log(event="corpus", clips=len(texts), seconds=round(time.monotonic() - began, 1))
    return Corpus(
        torch.cat(latents),
        ids.to(run.device),
        mask.to(run.device),
        (empty[0].to(run.device), empty[1].to(run.device)),
    )


def train_teacher(
    flow: Flow, clips: Callable[[], Corpus], budget: Budget, start: Path | None = None
) -> tuple[nn.Module, nn.Module]:
    """Flow matching; transformer and text encoder learn together.

    Args:
        flow: What it has in common with the student.
        clips: Gives the encoded clips; not called if the teacher is finished.
        budget: How long; clips a step.
        start: Pipeline folder from whose weights both begin, instead of from random ones.

    Returns:
        Their averaged weights.
    """
    run, family, batch = flow.run, flow.family, budget.batch
    torch.manual_seed(run.seed + 1)
    transformer = family.build_transformer(flow.config).to(run.device)
    encoder = family.build_text_encoder(flow.config).to(run.device)
    if start is not None:
        for part, known, name in (
            (transformer, family.TRANSFORMER, "transformer"),
            (encoder, family.TEXT_ENCODER, "text_encoder"),
        ):
            found = known.from_pretrained(start, subfolder=name, dtype=torch.float32)
            part.load_state_dict(found.state_dict())
    networks = {"transformer": transformer, "text_encoder": encoder}
    stage = Stage(
        run, "teacher", networks, budget, salt=_TEACHER_SALT, ema_decay=0.998, weight_decay=0.01
    )
    average = stage.ema["transformer"], stage.ema["text_encoder"]
    if stage.done:
        return average
    corpus = clips()
    flow.compile_blocks(transformer)

    def losses() -> dict[str, Tensor]:
        pick = torch.randint(len(corpus.ids), (batch,), generator=stage.noise, device=run.device)
        x0 = corpus.latents[pick].float()
        drop = torch.rand(batch, 1, generator=stage.noise, device=run.device) < _DROPOUT
        ids = torch.where(drop, corpus.empty[0], corpus.ids[pick])
        mask = torch.where(drop, corpus.empty[1], corpus.mask[pick])
        noise = torch.randn(x0.shape, generator=stage.noise, device=run.device)
        t = sample_times(batch, stage.noise, run.device)
        mix = t[:, None, None, None, None]
        with run.precision():
            text = family.encode_text(encoder, ids, mask)
            v = family.velocity(transformer, text)((1 - mix) * x0 + mix * noise, t)
        return {"loss": F.mse_loss(v.float(), noise - x0)}

    def probe(stage: Stage) -> None:
        model, words = average

        def sample(
            text: Tensor, free: Tensor, noise: Tensor, generator: torch.Generator
        ) -> Tensor:
            del generator
            return ode(flow.guided(model, text, free), noise, 1.0, TEACHER_STEPS)

        probe_flow(flow, stage, words, {"": sample}, model)

    stage.train(losses, probe)
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


def train_student(
    flow: Flow,
    clips: Callable[[], Corpus],
    teacher: nn.Module,
    encoder: nn.Module,
    budget: Budget,
    *,
    fill: int,
    refresh: int,
) -> nn.Module:
    """Distil the teacher as the module's docstring says; the text encoder stays as it is.

    Args:
        flow: What it has in common with the teacher; it learns to do without guidance.
        clips: Gives the encoded clips; not called if the student is finished.
        teacher: Averaged teacher; also where the student starts.
        encoder: Averaged text encoder.
        budget: How long; samples per step and per teacher batch.
        fill: Teacher batches before the first step.
        refresh: Student steps per new teacher batch.
    """
    run, family, config, batch = flow.run, flow.family, flow.config, budget.batch
    student = family.build_transformer(config).to(run.device)
    student.load_state_dict(teacher.state_dict())
    networks = {"transformer": student}
    stage = Stage(run, "student", networks, budget, salt=_STUDENT_SALT, ema_decay=0.995)
    average = stage.ema["transformer"]
    if stage.done:
        return average
    corpus = clips()
    flow.compile_blocks(student, teacher)
    times = family.times(4)
    with torch.no_grad():
        texts = torch.cat(
            [
                family.encode_text(encoder, corpus.ids[part], corpus.mask[part])
                for part in batches(len(corpus.ids), 512)
            ]
        )
        empty = family.encode_text(encoder, *corpus.empty).expand(batch, -1, -1)
    buffer = _Endpoints(min(len(texts), 32768) + batch, config.latent_shape, run.device)
    turn = 0

    @torch.no_grad()
    def extend() -> None:
        nonlocal turn
        index = (0, 1, 2, 3, 0, 1, 2)[turn % 7]  # the last jump is the easiest one
        from_data = turn % 2 == 0
        turn += 1
        pick = torch.randint(len(texts), (batch,), generator=stage.noise, device=run.device)
        noise = torch.randn(
            (batch, *config.latent_shape), generator=stage.noise, device=run.device
        )
        field = flow.guided(teacher, texts[pick], empty)
        if index == 0:
            buffer.add(times[0] * noise, times[0], pick, ode(field, noise, 1.0, _SUBSTEPS[0]))
            return
        t = times[index]
        if from_data:
            state = (1 - t) * corpus.latents[pick].float() + t * noise
        else:
            own = flow.velocity(average, texts[pick])
            state = few_step(own, noise, times[: index + 1], stage.noise, renoise=family.RENOISES)
        buffer.add(state, t, pick, ode(field, state, t, _SUBSTEPS[index]))

    began = time.monotonic()
    for _ in range(fill):
        if not stage.open:
            break
        extend()
    run.log(
        stage="student",
        event="endpoints",
        count=buffer.count,
        seconds=round(time.monotonic() - began, 1),
    )

    def losses() -> dict[str, Tensor]:
        if stage.step % refresh == 0 or not buffer.count:
            extend()
        rows = torch.randint(buffer.count, (batch,), generator=stage.noise, device=run.device)
        x, t, end = buffer.state[rows], buffer.time[rows], buffer.end[rows]
        around = torch.rand(batch, generator=stage.noise, device=run.device) * 2 - 1
        field = flow.velocity(student, texts[buffer.pick[rows]])
        v = field(x, t + family.JITTER * around)
        x0 = x - t[:, None, None, None, None] * v.float()
        error = x0 - end
        return {
            "loss": ((error.square() + _HUBER**2).sqrt() - _HUBER).mean(),
            "mse": error.detach().square().mean(),
        }

    def probe(stage: Stage) -> None:
        def sampler(count: int):  # type: ignore[no-untyped-def]
            def sample(
                text: Tensor, free: Tensor, noise: Tensor, generator: torch.Generator
            ) -> Tensor:
                field = flow.velocity(average, text)
                return few_step(
                    field, noise, family.times(count), generator, renoise=family.RENOISES
                )

            return sample

        samplers = {"": sampler(4), "_2step": sampler(2), "_1step": sampler(1)}
        probe_flow(flow, stage, encoder, samplers, average)

    stage.train(losses, probe, probe_every=75.0)
    return average
