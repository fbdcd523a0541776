"""Looking at a model while it trains: accuracy on held-out prompts, a sheet, a folder."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from training.build import TinyConfig, build_tokenizer, half, tokenize, write_settings
from training.data import render, sample_scenes
from training.family import Family
from training.flow import Velocity, guided
from training.plots import loss_curves, sheet
from training.run import Run, Stage, batches
from training.train_vae import decode_frames
from turbo_rcm_patch.errors import MissingPackageError
from turbo_rcm_patch.output import merged
from turbo_rcm_patch.tiny.detector import accuracy, detect

# (text [B, L, D], text of the empty caption, noise [B, C, F, H, W], generator) -> latents
Sampler = Callable[[Tensor, Tensor, Tensor, torch.Generator], Tensor]


def sharpness(frames: Tensor) -> float:
    """Root mean square difference of neighbouring pixels of frames [B, F, H, W, 3]."""
    across = frames.diff(dim=2).square().mean() + frames.diff(dim=3).square().mean()
    return float(across.sqrt())


@dataclass(frozen=True, slots=True)
class Flow:
    """The common settings of teacher and student.

    Attributes:
        run: Where and how.
        family: Of the network.
        config: Sizes.
        vae: That ships; for the probes.
        guidance: Classifier-free guidance of the teacher.
        compiled: Compile the transformer blocks.
        probe_count: Videos a probe.
    """

    run: Run
    family: Family
    config: TinyConfig
    vae: nn.Module
    guidance: float
    compiled: bool
    probe_count: int

    def velocity(self, model: nn.Module, text: Tensor) -> Velocity:
        """A network as a rectified flow, for fixed captions [B, L, D], in the run's precision."""
        field = self.family.velocity(model, text)

        def velocity(x: Tensor, t: Tensor) -> Tensor:
            with self.run.precision():
                return field(x, t)

        return velocity

    def guided(self, model: nn.Module, text: Tensor, free: Tensor) -> Velocity:
        """The same with guidance away from the captions `free`."""
        return guided(self.velocity(model, text), self.velocity(model, free), self.guidance)

    def compile_blocks(self, *models: nn.Module) -> None:
        """Compile the blocks in place; whatever cannot be compiled runs eagerly."""
        if not self.compiled:
            return
        import torch._dynamo

        torch._dynamo.config.suppress_errors = True
        torch._dynamo.config.cache_size_limit = 64
        for model in models:
            blocks = self.family.blocks(model)
            for block in blocks:
                block.compile(dynamic=False)
            self.run.log(event="blocks will be compiled", blocks=len(blocks))

    def export(self, name: str, encoder: nn.Module, transformer: nn.Module) -> None:
        """Write the pipeline folder `<family>_<name>`."""
        folder = self.run.out / f"{self.family.NAME}_{name}"
        export(folder, self.family, self.config, self.vae, encoder, transformer)


@torch.no_grad()
def probe_flow(
    flow: Flow,
    stage: Stage,
    encoder: nn.Module,
    samplers: dict[str, Sampler],
    transformer: nn.Module,
    *,
    batch: int = 64,
) -> None:
    """Export `<family>_<stage>`, generate from held-out prompts, judge, log and draw."""
    run, family, config, count = flow.run, flow.family, flow.config, flow.probe_count
    began = time.monotonic()
    # First: what interrupts the drawing takes no weights with it.
    flow.export(stage.name, encoder, transformer)
    scenes, noises = run.generators(90)
    wanted = sample_scenes(count, scenes, held_out=True)
    captions, length = [*wanted.captions(), ""], config.max_sequence_length
    ids, mask = tokenize(build_tokenizer(config), captions, length)
    text = family.encode_text(encoder, ids.to(run.device), mask.to(run.device))
    noise = torch.randn((count, *config.latent_shape), generator=noises, device=run.device)
    real = render(wanted.to(run.device), frames=config.frames, size=config.size).permute(
        0, 2, 3, 4, 1
    )
    record: dict[str, float] = {}
    for suffix, sampler in samplers.items():
        latents = torch.cat(
            [
                sampler(
                    text[part], text[-1:].expand(len(noise[part]), -1, -1), noise[part], noises
                )
                for part in batches(count, batch)
            ]
        )
        frames = decode_frames(flow.vae, latents, run)
        found = accuracy(
            [d for part in batches(count, 64) for d in detect(frames[part])], wanted.clips()
        )
        record |= {key + suffix: round(value, 4) for key, value in found.items()}
        record["sharpness" + suffix] = round(sharpness(frames) / sharpness(real), 3)
        sheet(frames, run.out / "sheets" / f"{stage.name}{suffix}_{stage.step:06d}.png")
    run.log(
        stage=stage.name,
        step=stage.step,
        probe_seconds=round(time.monotonic() - began, 1),
        **record,
    )
    with suppress(MissingPackageError):  # Without matplotlib: `curves` can draw them later.
        loss_curves(run.out / "log.jsonl", run.out / "curves.png")


def export(
    folder: Path,
    family: Family,
    config: TinyConfig,
    vae: nn.Module,
    encoder: nn.Module,
    transformer: nn.Module,
) -> None:
    """Write a pipeline folder of less than 16 MiB, from copies on the CPU, and the settings it was
    trained for.

    The transformer is stored in bf16 with the parts that diffusers keeps in fp32 left alone, so
    that loading in bf16 changes nothing; the VAE is stored in fp16, whose finer mantissa suits
    fp32 decoding; the text encoder stays in fp32, because transformers would load a half-precision
    file in half precision.
    """
    parts = {}
    for name, model, build, dtype, kept in (
        ("vae", vae, family.VAE, torch.float16, ()),
        ("transformer", transformer, family.TRANSFORMER, torch.bfloat16, family.KEPT),
    ):
        fresh = parts[name] = build.from_config(model.config)
        fresh.load_state_dict({k: v.cpu().contiguous() for k, v in model.state_dict().items()})
        fresh.register_to_config(_name_or_path="")  # where it was once loaded from says nothing
        half(fresh, dtype, kept)
    pipe = family.PIPELINE(
        **parts,
        tokenizer=build_tokenizer(config),
        text_encoder=copy.deepcopy(encoder).cpu(),
        scheduler=family.scheduler(),
    )
    with merged(folder) as made:
        pipe.save_pretrained(made, safe_serialization=True)
        write_settings(made, config)
