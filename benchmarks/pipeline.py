"""`pipeline`: seconds of a video, everything counted, in a fresh process.

Each method runs in a process of its own, whose kernels, if any, an earlier one has compiled with
a video of one step. It makes two videos; what is measured is the second. A video is the pipeline's
own call: denoising, decoding, and frames on the GPU. Weights and embeddings are random, because
the time does not depend on their values. The text encoder costs all methods the same; it is
measured with "unpatched", with random weights of its true size.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any, Final, NamedTuple
from unittest import mock

import torch

from benchmarks.models import SLA, build_cogvideox, build_vae, build_wan, made_on
from benchmarks.runner import (
    Benchmark,
    Column,
    Journal,
    Plan,
    Record,
    Wrong,
    generator,
    idle_at,
    is_patched,
    peak_gib,
    seconds_of,
    wait,
)
from benchmarks.ways import WAYS, Way, as_written, record_report
from turbo_rcm_patch import patch_model
from turbo_rcm_patch.config import PatchOptions


class Case(NamedTuple):
    """A pipeline and its settings; sizes are height, width and frames."""

    network: str
    steps: int
    guidance: float
    size: tuple[int, int, int]
    micro_size: tuple[int, int, int] = (64, 64, 9)


class _Method(NamedTuple):
    """The dtype of the VAE, the options of the patch, or None without one, and what else is done
    to the network."""

    vae: torch.dtype
    options: PatchOptions | None = None
    way: Way = as_written


SIZE_480P: Final = (480, 832, 81)
_CASES: Final = {
    "1.3b-4-steps": Case("1.3b", 4, 1.0, SIZE_480P),
    "1.3b-sla-4-steps": Case(SLA, 4, 1.0, SIZE_480P),
    "1.3b-30-steps": Case("1.3b", 30, 5.0, SIZE_480P),
    "14b-4-steps": Case("14b", 4, 1.0, SIZE_480P),
    "wan2.2-5b-3-steps": Case("wan2.2-5b", 3, 1.0, (704, 1280, 121)),
    "cogvideox-5b-50-steps": Case("cogvideox-5b", 50, 6.0, (480, 720, 49)),
}
_DEFAULT: Final = ["1.3b-4-steps", "wan2.2-5b-3-steps"]
_METHODS: Final = {
    "unpatched": _Method(torch.float32),
    "unpatched bf16 VAE": _Method(torch.bfloat16),
    "compile sage bf16 VAE": _Method(torch.bfloat16, way=WAYS["compile sage"]),
    "patched": _Method(torch.bfloat16, {}),
    "patched fp32 VAE": _Method(torch.float32, {}),
    "patched guard off": _Method(torch.bfloat16, {"guard": False}),
    "patched int8 Linears": _Method(torch.bfloat16, {"linear": "int8"}),
}
_COLUMNS: Final = (
    Column("first s", "first_seconds", ".2f"), Column("second s", "second_seconds", ".2f"),
    Column("denoising s", "denoise_seconds", ".2f"), Column("decoding s", "decode_seconds", ".2f"),
    Column("text s", "text_seconds", ".2f"), Column("same bits", "same_bits", ""),
    Column("GiB", "peak_gib", ".1f"), Column("patch s", "patch_seconds", ".2f"),
)  # fmt: skip
_ABOUT: Final = {
    "first_seconds": "the first video of a fresh process; where kernels are compiled another one "
    "has made a video of one step and cached them on disk",
    "second_seconds": "the next video: denoising, decoding and frames, without the text encoder",
    "denoise_seconds": "of the second video, until the VAE's decoder is called and the device is "
    "idle",
    "decode_seconds": "the rest of the second video, frames included",
    "text_seconds": "UMT5-XXL over 512 tokens in bf16, where it was measured",
    "same_bits": "two videos of one seed have the same frames, bit for bit",
    "patch_seconds": "patch_model itself",
    "peak_gib": "allocated memory at the peak of the second video, weights included",
    "unpatched": "network in bf16; VAE in fp32 with TF32, as diffusers' pages load Wan, and in "
    "bf16 for CogVideoX",
    "compile sage bf16 VAE": "blocks compiled as compile_repeated_blocks does, attention by "
    "diffusers' backend sage",
    SLA: "sparse-linear attention with the share of key blocks that sla_topk says by default",
}


def _measure(case: str, methods: list[str], journal: Journal) -> None:
    if _CASES[case].network == SLA:  # Unpatched it is dense attention, another function.
        methods = [method for method in methods if is_patched(method)]
    for method in methods:
        journal.measure(case, method, partial(_fresh, journal.plan, case, method))


def _fresh(plan: Plan, case: str, method: str, record: Record) -> None:
    """Measure in a fresh process; where kernels are compiled another one caches them before."""
    how = _METHODS[method]
    compiles = how.options is not None or how.way is not as_written
    for measured in (False, True) if compiles else (True,):
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            given = plan, case, method, time.time(), measured
            record.update(pool.submit(_videos, *given).result())
    if not record.pop("finite"):
        raise Wrong("frames that are not finite")
    if not record["same_bits"]:
        raise Wrong("one seed gave different frames")


def _phases(what: str, began: float, device: torch.device) -> Callable[..., None]:
    """Return what prints the seconds of each phase at its end, so that a run that is cut off shows
    where it was."""
    print(what, end=":", file=sys.stderr, flush=True)

    def ended(phase: str, end: str = ",") -> None:
        nonlocal began
        wait(device)
        now = time.time()
        print(f" {phase} {now - began:.1f}", end=end, file=sys.stderr, flush=True)
        began = now

    return ended


@torch.no_grad()
def _videos(plan: Plan, case: str, method: str, began: float, measured: bool) -> Record:
    """Make a video of one step, or with `measured` two whole ones, and return what is known.

    `began` is when the process was asked for, by `time.time`.
    """
    device, how = plan.torch_device(), _METHODS[method]
    ended = _phases(f"{case}, {method}{'' if measured else ', one step'}", began, device)
    ended("start")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    record: Record = {}
    if method == "unpatched" and not plan.micro and not case.startswith("cog"):
        record["text_seconds"] = _text_seconds(device)
    one = _CASES[case] if measured else _CASES[case]._replace(steps=1)
    vae_dtype = torch.bfloat16 if case.startswith("cog") else how.vae
    pipe, video = build_pipeline(one, plan, vae_dtype, device)
    ended("weights")
    report = None
    if how.options is not None:
        begin = idle_at(device)
        report = patch_model(pipe, **how.options)
        record["patch_seconds"] = idle_at(device) - begin
        ended("patch")
    decode, times, second = pipe.vae.decode, list[float](), list[torch.Tensor]()

    def decoding(*args: Any, **kwargs: Any) -> Any:
        times.append(idle_at(device))
        return decode(*args, **kwargs)

    def again() -> None:
        times.append(idle_at(device))
        with mock.patch.object(pipe.vae, "decode", decoding):
            second.append(video())
        times.append(idle_at(device))

    with how.way(pipe.transformer, plan.compiler):
        begin = idle_at(device)
        frames = video()
        record["first_seconds"] = idle_at(device) - begin
        ended("first video", "," if measured else " s\n")
        record["finite"] = bool(frames.isfinite().all())
        if measured:
            frames = frames.cpu()  # The peak of the second video is its own.
            record["peak_gib"] = peak_gib(again, device)
            ended("second", " s\n")
            begin, denoised, end = times
            record["second_seconds"] = end - begin
            record["denoise_seconds"] = denoised - begin
            record["decode_seconds"] = end - denoised
            record["same_bits"] = torch.equal(frames, second[0].cpu())
    if report is not None:
        record_report(record, report)
        record["guard"] = str(report.guard)
    return record


def _text_seconds(device: torch.device) -> float:
    """Return the seconds of Wan's text encoder over 512 tokens, the second time."""
    from transformers import UMT5Config, UMT5EncoderModel

    size = UMT5Config(
        vocab_size=256384, d_model=4096, d_kv=64, d_ff=10240, num_layers=24, num_heads=64
    )
    with made_on(device, 0, torch.bfloat16):
        encoder = UMT5EncoderModel._from_config(size)
    tokens = torch.ones(1, 512, dtype=torch.long, device=device)
    encoder(tokens)
    return seconds_of(lambda: encoder(tokens), device)


def build_pipeline(
    one: Case, plan: Plan, vae_dtype: torch.dtype, device: torch.device
) -> tuple[Any, Callable[..., torch.Tensor]]:
    """Return a pipeline without text encoder, and a function that makes its video.

    Args:
        one: The case; with the plan's `micro` its steps are at most two.
        plan: For seed and sizes.
        vae_dtype: Of the VAE. The network is in bf16.
        device: Where it is made.

    Returns:
        The function takes diffusers' `output_type` and makes the same video in every call.
    """
    from diffusers import (
        CogVideoXDDIMScheduler,
        CogVideoXPipeline,
        UniPCMultistepScheduler,
        WanPipeline,
    )

    size = one.micro_size if plan.micro else one.size
    given: Record = dict(zip(("height", "width", "num_frames"), size, strict=True))
    given |= {"num_inference_steps": one.steps, "guidance_scale": one.guidance}
    if plan.micro:
        given["num_inference_steps"] = min(2, one.steps)
    parts: Record = {"tokenizer": None, "text_encoder": None}
    if one.network.startswith("cog"):
        vae = build_vae("cogvideox", plan, device)
        network: Any = build_cogvideox(one.network, plan, device)
        parts["scheduler"] = CogVideoXDDIMScheduler()
        make: Any = CogVideoXPipeline
        tokens, channels = network.config.max_text_seq_length, network.config.text_embed_dim
    else:
        network = build_wan(one.network, plan, device)
        vae = build_vae("wan2.1" if one.network != "wan2.2-5b" else one.network, plan, device)
        parts["scheduler"] = UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        )
        make = WanPipeline
        parts["expand_timesteps"] = one.network == "wan2.2-5b"
        tokens, channels = (9 if plan.micro else 512), network.config.text_dim
    pipe = make(**parts, vae=vae.to(vae_dtype), transformer=network)
    pipe.set_progress_bar_config(disable=True)
    names = ["prompt_embeds"] + (["negative_prompt_embeds"] if one.guidance > 1.0 else [])
    for index, name in enumerate(names):
        random = generator(device, plan.seed + index)
        text = torch.randn(1, tokens, channels, generator=random, device=device)
        given[name] = text.to(torch.bfloat16)

    def video(output: str = "pt") -> torch.Tensor:
        random = torch.Generator().manual_seed(plan.seed)
        made: torch.Tensor = pipe(
            **given, generator=random, output_type=output, return_dict=False
        )[0]
        return made

    return pipe, video


pipeline: Final = Benchmark(
    name="pipeline", about=_ABOUT, columns=_COLUMNS, cases=_CASES, methods=_METHODS,
    measure=_measure, default=_DEFAULT,
)  # fmt: skip
