"""`video`: seconds from text embeddings to frames, Wan2.1-1.3B's sizes, with its VAE.

Weights and embeddings are random: nothing of a video's time depends on what they hold. The text
encoder is left out, because all methods would pay the same for it. The guard is on, as it is for a
user: it compares the first and the last step.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any, Final

import torch

from benchmarks import runner
from benchmarks.measure import generator
from benchmarks.networks import build_wan, compiled, patched_with, sage_attention, sizes_of
from benchmarks.runner import PEAK, Column, Journal, Plan, Record, Variant, Wrong
from turbo_rcm_patch.video.generation import Conditioning, decode_latents, sample_latents
from turbo_rcm_patch.video.settings import Settings

#: Patched as a user patches, with the guard.
METHODS: Final = {
    variant.name: variant
    for variant in (
        Variant("eager"),
        Variant("eager sage", sage_attention),
        Variant("compiled", compiled),
        Variant("patched", patched_with(guard=True), ours=True),
        Variant("patched int8 Linears", patched_with(guard=True, linear="int8"), ours=True),
    )
}
_COLUMNS: Final = (
    Column("case", 22), Column("method", 22), Column("cold s", 8, "cold_seconds", ".2f"),
    Column("warm s", 8, "warm_seconds", ".2f"), Column("denoise s", 9, "denoise_seconds", ".2f"),
    Column("decode s", 8, "decode_seconds", ".2f"), Column("speed-up", 8, "speed_up", ".2f"), PEAK,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Case:
    """How a video is sampled: rCM's few steps, or many with guidance."""

    name: str
    sampler: dict[str, Any]


_CASES: Final = (
    _Case("rcm-4-steps", {"sampler": "rcm", "steps": 4}),
    _Case(
        "guidance-30-steps", {"sampler": "scheduler", "steps": 30, "guidance_scale": 5.0}
    ),
)  # fmt: skip


def run(plan: Plan) -> int:
    """Measure and write `video.json`; 0 if every patched video came out finite."""
    return runner.run_cases(
        plan,
        "video",
        _COLUMNS,
        {
            "network": "Wan2.1-T2V-1.3B and its VAE (fp32) with seeded random weights, 480p, 81 "
            "frames; --quick takes 10 steps for 30",
            "cold_seconds": "the first video in this process, compilation included; kernels that "
            "an earlier method compiled are kept",
            "warm_seconds": "median of the videos after it; the methods do not take turns",
            "denoise_seconds": "of these, in the sampler",
            "decode_seconds": "of these, in the VAE",
            "peak_bytes": "of allocated memory over one warm video, weights included",
            "guard": "on",
        },
        {case.name: case for case in _CASES},
        _measure_case,
        methods=list(METHODS),
    )


def _pipeline(plan: Plan, device: torch.device) -> Any:
    from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline

    sizes = sizes_of(plan)
    small = {"base_dim": 8, "num_res_blocks": 1} if plan.micro else {}
    with torch.random.fork_rng([device] if device.type == "cuda" else []), device:
        torch.manual_seed(plan.seed)
        vae = AutoencoderKLWan(**small).eval().requires_grad_(False)
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )
    network = build_wan(sizes.network, device, plan.seed)
    return WanPipeline(
        tokenizer=None, text_encoder=None, transformer=network, vae=vae, scheduler=scheduler
    )


def _settings(plan: Plan, case: _Case) -> Settings:
    size = {"height": 64, "width": 64, "num_frames": 9} if plan.micro else {}
    given = case.sampler | size
    if given["steps"] > 4 and (plan.quick or plan.micro):
        given["steps"] = 2 if plan.micro else 10
    return Settings(**given)


def _measure_case(case: _Case, peers: list[str], journal: Journal) -> bool:
    plan, device = journal.plan, journal.device
    pipe, settings = _pipeline(plan, device), _settings(plan, case)
    random, sizes = generator(device, plan.seed), sizes_of(plan)
    embeds = [
        torch.randn(
            1, sizes.text_tokens, sizes.network["text_dim"], generator=random, device=device
        ).bfloat16()
        for _ in range(2)
    ]
    conditioning = Conditioning(embeds[0], embeds[1] if settings.guidance_scale > 1 else None)

    def video() -> tuple[float, float, bool]:
        """Seconds of denoising, of decoding, and whether the frames are finite."""
        begin = time.perf_counter()
        sample = sample_latents(pipe, conditioning, seed=plan.seed, settings=settings)
        middle = time.perf_counter()
        frames = decode_latents(pipe, sample.latents)
        return middle - begin, time.perf_counter() - middle, bool(frames.isfinite().all())

    record: Record = {"settings": settings.as_dict()}

    def measure(method: Variant, one: Record) -> None:
        with method.enter(pipe.transformer, plan.compiler) as report, torch.no_grad():
            denoise, decode, finite = video()
            one["cold_seconds"] = denoise + decode
            times = []
            for _ in range(plan.calls or (1 if plan.quick or plan.micro else 3)):
                if device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats(device)
                denoise, decode, fine = video()
                times.append((denoise + decode, denoise, decode))
                finite &= fine
            if device.type == "cuda":
                one["peak_bytes"] = torch.cuda.max_memory_allocated(device)
            keys = ("warm_seconds", "denoise_seconds", "decode_seconds")
            one |= dict(zip(keys, map(statistics.median, zip(*times, strict=True)), strict=True))
            eager = runner.number(record, "methods", "eager", "warm_seconds")
            if eager is not None:
                one["speed_up"] = eager / one["warm_seconds"]
            pairs = getattr(report, "pairs", None)
            if pairs is not None:
                one |= {"fused": sum(pair.fused for pair in pairs), "pairs": len(pairs)}
            if not finite:
                raise Wrong("frames that are not finite")

    ways = [METHODS[name] for name in peers]
    return runner.one_by_one(journal, case.name, record, ways, measure, "methods")
