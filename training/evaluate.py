"""Judge the videos of a trained model with the detector.

Prompts are drawn from the held-out combinations. Colour, shape and motion are judged for the
student at several numbers of steps, with each attention zeroed, and for the teacher where its
folder is given; beside them, for rendered videos and for prompts shuffled among themselves.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from training.data import Scenes, render, sample_scenes
from training.families import SETTINGS_FILE, Family, family_of_folder, tokenize
from training.flow import few_step, guided, ode
from training.stage import batches, sheet
from training.train import statistics
from turbo_rcm_patch.files import check_writable, write_json
from turbo_rcm_patch.tiny.detector import accuracy, detect

_TEACHER_STEPS: Final = 24
_BATCH: Final = 16


@contextmanager
def zeroed(blocks: Any, attention: str) -> Iterator[None]:
    """Make the attention of this name return zeros in every block while inside."""

    def zero(_: object, __: object, out: Tensor | tuple[Tensor, ...]) -> object:
        return tuple(map(torch.zeros_like, out)) if isinstance(out, tuple) else 0 * out

    handles = [getattr(block, attention).register_forward_hook(zero) for block in blocks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass(slots=True)
class Evaluation:
    """A loaded pipeline folder, the prompts to judge it with, and the noise to start from."""

    family: Family
    pipe: Any
    settings: dict[str, float]
    scenes: Scenes
    seed: int

    @classmethod
    def load(
        cls, folder: Path, *, count: int, seed: int, device: str, dtype: torch.dtype
    ) -> Evaluation:
        """Load a folder; the autoencoder stays in fp32, the transformer takes `dtype`."""
        family = family_of_folder(folder)
        pipe = family.pipeline.from_pretrained(
            folder, dtype={"transformer": dtype, "default": torch.float32}
        ).to(device)
        scenes = sample_scenes(count, torch.Generator().manual_seed(seed), held_out=True)
        settings = json.loads((folder / SETTINGS_FILE).read_text())
        return cls(family, pipe, settings, scenes, seed)

    def first(self, count: int) -> Evaluation:
        """Return the same with the first prompts alone."""
        return replace(self, scenes=_rows(self.scenes, slice(count)))

    def _text(self, prompts: list[str]) -> Tensor:
        tokens = tokenize(self.pipe.tokenizer, prompts, int(self.settings["max_sequence_length"]))
        ids, mask = (each.to(self.pipe.text_encoder.device) for each in tokens)
        return self.family.encode_text(self.pipe.text_encoder, ids, mask)

    @torch.no_grad()
    def frames(self, *, steps: int | None, guidance: float = 1.0) -> Iterator[Tensor]:
        """Batches of frames [b, F, H, W, 3] fp32 in 0..1; few steps, or with None the ODE."""
        pipe, network, family = self.pipe, self.pipe.transformer, self.family
        device = network.device
        span, space = pipe.vae_scale_factor_temporal, pipe.vae_scale_factor_spatial
        side = int(self.settings["height"]) // space
        size = (int(self.settings["num_frames"]) - 1) // span + 1, side, side
        mean, std = statistics(pipe.vae, device)
        prompts = self.scenes.captions()
        generator = torch.Generator().manual_seed(self.seed + 1)
        renoise = torch.Generator(device).manual_seed(self.seed + 2)
        for part in batches(len(prompts), _BATCH):
            texts = prompts[part]
            shape = (len(texts), network.config.in_channels, *size)
            noise = torch.randn(shape, generator=generator).to(device)
            field = family.velocity(network, self._text(texts))
            if steps is None:
                free = family.velocity(network, self._text([""] * len(texts)))
                latents = ode(guided(field, free, guidance), noise, 1.0, _TEACHER_STEPS)
            else:
                times = family.times(steps)
                latents = few_step(field, noise, times, renoise, renoise=family.renoises)
            video = pipe.vae.decode(latents * std + mean).sample
            yield (video.permute(0, 2, 3, 4, 1).float() / 2 + 0.5).clamp(0, 1)

    def judge(self, videos: Iterator[Tensor], picture: Path | None = None) -> dict[str, float]:
        """Return the accuracy over all prompts; draw the first batch where a path is given."""
        found = []
        for i, frames in enumerate(videos):
            found += detect(frames)
            if i == 0 and picture is not None:
                sheet(frames, picture)
        right = accuracy(found, self.scenes.clips())
        return {key: round(value, 4) for key, value in right.items()}

    def controls(self) -> dict[str, dict[str, float]]:
        """Return the detector's accuracy on rendered videos, and on their prompts shuffled."""
        found = []
        frames, size = int(self.settings["num_frames"]), int(self.settings["height"])
        for part in batches(len(self.scenes), _BATCH):
            videos = render(_rows(self.scenes, part), frames=frames, size=size)
            found += detect(videos.permute(0, 2, 3, 4, 1))
        wanted = self.scenes.clips()
        shuffled = random.Random(self.seed).sample(wanted, len(wanted))
        return {"rendered": accuracy(found, wanted), "shuffled": accuracy(found, shuffled)}


def _rows(scenes: Scenes, rows: slice) -> Scenes:
    return Scenes(*(getattr(scenes, name)[rows] for name in Scenes.__slots__))


def evaluate(
    model: Path,
    out: Path,
    *,
    teacher: Path | None = None,
    count: int = 400,
    steps: Sequence[int] = (4, 2, 1),
    seed: int = 7,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    guidance: float = 1.5,
) -> dict[str, object]:
    """Make every judgement, write evaluation.json and sheets under `out`, return the numbers."""
    check_writable(out / "evaluation.json")

    def load(folder: Path) -> Evaluation:
        return Evaluation.load(folder, count=count, seed=seed, device=device, dtype=dtype)

    student = load(model)
    gpu = torch.device(device).type == "cuda"
    results: dict[str, object] = {
        "videos": count,
        "seed": seed,
        "device": torch.cuda.get_device_name(device) if gpu else device,
        "torch": torch.__version__,
        "dtype": str(dtype),
        **student.controls(),
    }

    def record(name: str, judge: Evaluation, videos: Iterator[Tensor]) -> None:
        results[name] = judge.judge(videos, out / f"{name}.png")
        print(f"{name}: {json.dumps(results[name])}", flush=True)
        write_json(out / "evaluation.json", results, indent=2)

    for some in steps:
        record(f"student_{some}_steps", student, student.frames(steps=some))
    blocks = student.family.blocks(student.pipe.transformer)
    for name, attention in student.family.attentions.items():
        with zeroed(blocks, attention):
            record(f"zeroed_{name}_attention", student, student.frames(steps=steps[0]))
    if teacher is not None:
        reference = load(teacher)
        record("teacher", reference, reference.frames(steps=None, guidance=guidance))
    return results
