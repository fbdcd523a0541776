"""Judge generated videos: `python -m training evaluate --out DIR --count 400`.

Prompts are drawn from the held-out combinations. The detector judges colour, shape and motion of
the student at each number of steps, of the teacher where its folder is given, and of the student
with an attention zeroed (self or cross; CogVideoX has one, over text and video); beside it stand
the same detector on rendered videos and on prompts shuffled among themselves.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from training.build import SETTINGS_FILE, tokenize, trained_folder
from training.data import Scenes, render, sample_scenes
from training.family import Family, family_of_folder
from training.flow import few_step, guided, ode
from training.plots import sheet
from training.train_vae import statistics
from training.usage import add_options
from turbo_rcm_patch.output import check_writable, write_json
from turbo_rcm_patch.tiny.detector import accuracy, detect
from turbo_rcm_patch.video.load import TINY, resolve_model

_TEACHER_STEPS = 24


@contextmanager
def zeroed(blocks: nn.ModuleList, attention: str) -> Iterator[None]:
    """Make the attention of this name return zeros in every block while inside."""

    def zero(_: nn.Module, __: object, out: Tensor | tuple[Tensor, ...]) -> object:
        if isinstance(out, tuple):
            return tuple(torch.zeros_like(one) for one in out)
        return torch.zeros_like(out)

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
    batch: int

    @classmethod
    def load(
        cls, folder: Path, *, count: int, seed: int, batch: int, device: str, dtype: torch.dtype
    ) -> Evaluation:
        """Load a folder; the VAE stays in fp32, the transformer takes `dtype`."""
        family = family_of_folder(trained_folder(folder))
        pipe = family.PIPELINE.from_pretrained(
            folder, dtype={"transformer": dtype, "default": torch.float32}
        ).to(device)
        generator = torch.Generator().manual_seed(seed)
        scenes = sample_scenes(count, generator, held_out=True)
        settings = json.loads((folder / SETTINGS_FILE).read_text())
        return cls(family, pipe, settings, scenes, seed, batch)

    def first(self, count: int) -> Evaluation:
        """The first videos alone, in one batch."""
        scenes = Scenes(*(getattr(self.scenes, name)[:count] for name in Scenes.__slots__))
        return replace(self, scenes=scenes, batch=count)

    def _text(self, prompts: list[str]) -> Tensor:
        tokens = tokenize(self.pipe.tokenizer, prompts, int(self.settings["max_sequence_length"]))
        ids, mask = (each.to(self.pipe.text_encoder.device) for each in tokens)
        return self.family.encode_text(self.pipe.text_encoder, ids, mask)

    @torch.no_grad()
    def frames(self, *, steps: int | None, guidance: float = 1.0) -> Iterator[Tensor]:
        """Batches of frames [b, F, H, W, 3] fp32 in 0..1; few steps, or with None the ODE."""
        pipe, network, velocity = self.pipe, self.pipe.transformer, self.family.velocity
        device = network.device
        span, space = pipe.vae_scale_factor_temporal, pipe.vae_scale_factor_spatial
        latent_frames = (int(self.settings["num_frames"]) - 1) // span + 1
        side = int(self.settings["height"]) // space
        channels = pipe.transformer.config.in_channels
        mean, std = statistics(pipe.vae, device)
        prompts = self.scenes.captions()
        generator = torch.Generator().manual_seed(self.seed + 1)
        renoise = torch.Generator(device).manual_seed(self.seed + 2)
        for start in range(0, len(prompts), self.batch):
            part = prompts[start : start + self.batch]
            shape = (len(part), channels, latent_frames, side, side)
            noise = torch.randn(shape, generator=generator).to(device)
            field = velocity(network, self._text(part))
            if steps is None:
                free = velocity(network, self._text([""] * len(part)))
                latents = ode(guided(field, free, guidance), noise, 1.0, _TEACHER_STEPS)
            else:
                times = self.family.times(steps)
                latents = few_step(field, noise, times, renoise, renoise=self.family.RENOISES)
            video = pipe.vae.decode(latents * std + mean).sample
            yield (video.permute(0, 2, 3, 4, 1).float() / 2 + 0.5).clamp(0, 1)

    def judge(self, videos: Iterator[Tensor], picture: Path | None = None) -> dict[str, float]:
        """Accuracy over all prompts; optionally draws the first batch."""
        began, found = time.monotonic(), []
        for i, frames in enumerate(videos):
            found += detect(frames)
            if i == 0 and picture is not None:
                sheet(frames, picture)
        result = {
            key: round(value, 4) for key, value in accuracy(found, self.scenes.clips()).items()
        }
        return {**result, "seconds_per_video": round((time.monotonic() - began) / len(found), 3)}

    def controls(self) -> dict[str, dict[str, float]]:
        """The detector on rendered videos, and on their prompts shuffled."""
        found = []
        for start in range(0, len(self.scenes), self.batch):
            rows = slice(start, start + self.batch)
            part = Scenes(*(getattr(self.scenes, name)[rows] for name in Scenes.__slots__))
            videos = render(
                part, frames=int(self.settings["num_frames"]), size=int(self.settings["height"])
            )
            found += detect(videos.permute(0, 2, 3, 4, 1))
        wanted = self.scenes.clips()
        shuffled = random.Random(self.seed).sample(wanted, len(wanted))
        return {"rendered": accuracy(found, wanted), "shuffled": accuracy(found, shuffled)}


def evaluate(
    model: Path,
    out: Path,
    *,
    teacher: Path | None = None,
    count: int = 400,
    steps: Sequence[int] = (4, 2, 1),
    seed: int = 7,
    batch: int = 16,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    guidance: float = 1.5,
    say: Callable[[str], None] = print,
) -> dict[str, object]:
    """Run every judgement, write evaluation.json and sheets under `out`, return the numbers."""
    check_writable(out / "evaluation.json")
    load = {"count": count, "seed": seed, "batch": batch, "device": device, "dtype": dtype}
    student = Evaluation.load(model, **load)  # type: ignore[arg-type]
    results: dict[str, object] = {
        "videos": count,
        "seed": seed,
        "device": _device_name(device),
        "torch": torch.__version__,
        "dtype": str(dtype),
        **student.controls(),
    }

    def record(name: str, numbers: dict[str, float]) -> None:
        results[name] = numbers
        say(f"{name}: {json.dumps(numbers)}")
        write_json(out / "evaluation.json", results, indent=2)

    for count_steps in steps:
        name = f"student_{count_steps}_steps"
        record(name, student.judge(student.frames(steps=count_steps), out / f"{name}.png"))
    blocks = student.family.blocks(student.pipe.transformer)
    for name, attention in student.family.ATTENTIONS.items():
        with zeroed(blocks, attention):
            numbers = student.judge(student.frames(steps=steps[0]), out / f"zeroed_{name}.png")
        record(f"zeroed_{name}_attention", numbers)
    if teacher is not None:
        reference = Evaluation.load(teacher, **load)  # type: ignore[arg-type]
        frames = reference.frames(steps=None, guidance=guidance)
        record("teacher", reference.judge(frames, out / "teacher.png"))
    return results


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else device


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of `evaluate`."""
    parser = argparse.ArgumentParser(
        prog="python -m training evaluate", description=(__doc__ or "").splitlines()[0]
    )
    shown = "(default: %(default)s)"
    options = {
        "--model PATH_OR_ID": f"the student: a pipeline folder, or one that ships by name {shown}",
        "--teacher FOLDER": "pipeline folder of the teacher, to be judged as well",
        "--out FOLDER": f"folder for evaluation.json and sheets of frames {shown}",
        "--count N": f"held-out prompts {shown}",
        "--seed N": f"seed of prompts and noise {shown}",
        "--batch N": f"videos that are generated together {shown}",
        "--device DEVICE": "cpu, cuda or cuda:N (default: a GPU if there is one)",
        "--dtype {float32,bfloat16}": f"dtype of the transformer {shown}",
        "--guidance S": f"classifier-free guidance of the teacher {shown}",
    }
    add_options(
        parser, options, model=TINY, out=Path("outputs/evaluation"), count=400, seed=7, batch=16,
        device="cuda" if torch.cuda.is_available() else "cpu", dtype="float32", guidance=1.5,
    )  # fmt: skip
    parser.add_argument(
        "--steps",
        metavar="N",
        type=int,
        nargs="+",
        default=[4, 2, 1],
        help="numbers of steps of the student; the first is also that of a zeroed attention "
        "(default: 4 2 1)",
    )
    given = vars(parser.parse_args(arguments))
    given["dtype"] = getattr(torch, given["dtype"])
    evaluate(Path(resolve_model(given.pop("model"))), given.pop("out"), **given)
