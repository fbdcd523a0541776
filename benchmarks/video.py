"""`video`: seconds of the first and the second video in a fresh process.

Each method runs in a process of its own, whose kernels an earlier one has compiled and cached.
A video is four denoising steps of Wan2.1-1.3B without guidance, 81 frames of 480 x 832. Weights
and embeddings are random, because the time does not depend on their values; text encoder and VAE
cost all methods the same and are left out.
"""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any, Final

import torch

from benchmarks.models import build_wan
from benchmarks.runner import (
    Benchmark,
    Column,
    Journal,
    Plan,
    Record,
    Wrong,
    generator,
    peak_gib,
    seconds_of,
)
from benchmarks.ways import record_report
from turbo_rcm_patch import patch_model
from turbo_rcm_patch.config import PatchOptions

_METHODS: Final[dict[str, PatchOptions | None]] = {
    "unpatched": None,
    "patched": {},
    "patched guard off": {"guard": False},
    "patched int8 Linears": {"linear": "int8"},
}
_STEPS: Final = 4
_CASE: Final = "1.3b-4-steps"
_COLUMNS: Final = (
    Column("first s", "first_seconds", ".2f"), Column("second s", "second_seconds", ".2f"),
    Column("third s", "third_seconds", ".2f"), Column("same bits", "same_bits", ""),
    Column("in int8", "in_int8", "d"), Column("GiB", "peak_gib", ".1f"),
    Column("patch s", "patch_seconds", ".2f"),
)  # fmt: skip
_ABOUT: Final = {
    "first_seconds": "the first video of a fresh process whose kernels are cached on disk",
    "same_bits": "three videos of one seed have the same latents, bit for bit",
    "patch_seconds": "patch_model itself",
    "peak_gib": "allocated memory at the peak of the third video, weights included",
}


def _measure(case: str, methods: list[str], journal: Journal) -> None:
    for method in methods:
        journal.measure(case, method, partial(_fresh, journal.plan, method))


def _fresh(plan: Plan, method: str, record: Record) -> None:
    """Measure in a fresh process, after another one that compiles the kernels."""
    for videos in (1, 3):
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            record.update(pool.submit(_videos, plan, method, videos).result())
    if not record.pop("finite"):
        raise Wrong("latents that are not finite")
    if not record["same_bits"]:
        raise Wrong("one seed gave different latents")


@torch.no_grad()
def _videos(plan: Plan, method: str, count: int) -> Record:
    """Make so many videos of one seed, and return their seconds and what is known of them."""
    device = plan.torch_device()
    pipe, given = _pipeline(plan, device)
    record: Record = {}
    options, report = _METHODS[method], None
    if options is not None:
        reports: list[Any] = []
        record["patch_seconds"] = seconds_of(
            lambda: reports.append(patch_model(pipe, **options)), device
        )
        report = reports[0]
    latents: list[torch.Tensor] = []

    def video() -> None:
        random = torch.Generator().manual_seed(plan.seed)
        made = pipe(**given, generator=random, output_type="latent", return_dict=False)
        latents.append(made[0])

    for name in ("first", "second", "third")[:count]:
        record[f"{name}_seconds"] = seconds_of(video, device)
    if count == 3:
        record["peak_gib"] = peak_gib(video, device)
    record["same_bits"] = all(torch.equal(latents[0], other) for other in latents)
    record["finite"] = bool(latents[0].isfinite().all())
    if report is not None:
        record_report(record, report)
        record["guard"] = str(report.guard)
    return record


def _pipeline(plan: Plan, device: torch.device) -> tuple[Any, Record]:
    """Return a pipeline without text encoder and VAE, and its arguments."""
    from diffusers import UniPCMultistepScheduler, WanPipeline

    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )
    network = build_wan("1.3b", plan, device)
    pipe: Any = WanPipeline(
        tokenizer=None, text_encoder=None, vae=None, transformer=network, scheduler=scheduler
    )
    pipe.set_progress_bar_config(disable=True)
    text = torch.randn(
        1, 9 if plan.micro else 512, network.config.text_dim,
        generator=generator(device, plan.seed), device=device,
    )  # fmt: skip
    size = (64, 64, 9) if plan.micro else (480, 832, 81)
    return pipe, {
        **dict(zip(("height", "width", "num_frames"), size, strict=True)),
        "prompt_embeds": text.bfloat16(),
        "num_inference_steps": _STEPS,
        "guidance_scale": 1.0,
    }


video: Final = Benchmark(
    name="video", about=_ABOUT, columns=_COLUMNS, cases=[_CASE], methods=_METHODS,
    measure=_measure,
)  # fmt: skip
