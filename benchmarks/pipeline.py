"""`pipeline`: seconds of a video, everything counted, in a fresh process.

Each method runs in a process of its own, whose kernels, if any, an earlier one has compiled with
a video of one step. It makes two videos; what is measured is the second. A video is the pipeline's
own call: denoising, decoding, and frames on the GPU, without the text encoder, which costs all
methods the same. Weights and embeddings are random, because the time does not depend on their
values.

`first s` is the video before the measured one, `patch s` is `patch_model` itself. Denoising ends
when the VAE's decoder is called and the device is idle; the rest is decoding, frames included.
`same bits` says that two videos of one seed have the same frames. `GiB` is allocated memory at the
peak of the second video. The network is in bf16 and the VAE in the dtype that the method names:
fp32 with TF32 is how diffusers' pages load Wan, bf16 how they load CogVideoX.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any, Final, NamedTuple
from unittest import mock

import diffusers
import torch

from benchmarks import runner
from benchmarks.models import SLA, WAYS, Way, build_network, build_vae, text_tokens
from benchmarks.runner import Benchmark, Column, Measure, Plan, Record, Wrong
from turbo_rcm_patch import patch_model


class Case(NamedTuple):
    """A pipeline and its settings; sizes are height, width and frames."""

    network: str
    steps: int
    guidance: float
    size: tuple[int, int, int]


class _Method(NamedTuple):
    """The dtype of the VAE, the options of the patch, or None without one, and what else is done
    to the network."""

    vae: torch.dtype
    options: dict[str, Any] | None = None
    way: Way = Way()


SIZE_480P: Final = (480, 832, 81)
_MICRO_SIZE: Final = (64, 64, 9)
_CASES: Final = {
    "1.3b-4-steps": Case("1.3b", 4, 1.0, SIZE_480P),
    "1.3b-sla-4-steps": Case(SLA, 4, 1.0, SIZE_480P),
    "1.3b-30-steps": Case("1.3b", 30, 5.0, SIZE_480P),
    "14b-4-steps": Case("14b", 4, 1.0, SIZE_480P),
    "wan2.2-5b-3-steps": Case("wan2.2-5b", 3, 1.0, (704, 1280, 121)),
    "cogvideox-5b-50-steps": Case("cogvideox-5b", 50, 6.0, (480, 720, 49)),
}
METHODS: Final = {
    "unpatched fp32 VAE": _Method(torch.float32),
    "patched fp32 VAE": _Method(torch.float32, {}),
    "unpatched bf16 VAE": _Method(torch.bfloat16),
    "patched bf16 VAE": _Method(torch.bfloat16, {}),
    "patched int8 Linears bf16 VAE": _Method(torch.bfloat16, {"linear": "int8"}),
    "compile sage bf16 VAE": _Method(torch.bfloat16, way=WAYS["compile sage"]),
}


class _CogVideoX(diffusers.CogVideoXPipeline):  # type: ignore[misc]
    """Casts latents to the VAE's dtype, as `WanPipeline` does; diffusers' own hands on bf16."""

    def decode_latents(self, latents: torch.Tensor) -> torch.Tensor:
        """Decode latents of the network's dtype."""
        frames: torch.Tensor = super().decode_latents(latents.to(self.vae.dtype))
        return frames


def _prepare(case: str, plan: Plan, device: torch.device) -> Measure:
    return partial(_fresh, plan, case)


def _fresh(plan: Plan, case: str, method: str, record: Record) -> None:
    """Measure in a fresh process; where kernels are compiled another one caches them before."""
    how = METHODS[method]
    compiles = how.options is not None or how.way != Way()
    for measured in (False, True) if compiles else (True,):
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            record.update(pool.submit(_videos, plan, case, method, measured).result())
    if not record["same_bits"]:
        raise Wrong("one seed gave different frames, or some that are not finite")


@torch.no_grad()
def _videos(plan: Plan, name: str, method: str, measured: bool) -> Record:
    """Make a video of one step, or with `measured` two whole ones, and return what is known."""
    device, how, case = plan.torch_device, METHODS[method], _CASES[name]
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    record: Record = {}
    case = case if measured else case._replace(steps=1)
    pipe, video = build_pipeline(case, plan, how.vae, device)
    if how.options is not None:
        begin = runner.idle_at(device)
        patch_model(pipe, **how.options)
        record["patch_seconds"] = runner.idle_at(device) - begin
    decode, times, second = pipe.vae.decode, list[float](), list[torch.Tensor]()

    def decoding(*args: Any, **kwargs: Any) -> Any:
        times.append(runner.idle_at(device))
        return decode(*args, **kwargs)

    def again() -> None:
        times.append(runner.idle_at(device))
        with mock.patch.object(pipe.vae, "decode", decoding):
            second.append(video())
        times.append(runner.idle_at(device))

    with how.way.entered(pipe.transformer, plan.compiler):
        begin = runner.idle_at(device)
        frames = video()
        record["first_seconds"] = runner.idle_at(device) - begin
        if measured:
            frames = frames.cpu()  # The peak of the second video is its own.
            record["peak_gib"] = runner.peak_gib(again, device)
            begin, denoised, end = times
            record["second_seconds"] = end - begin
            record["denoise_seconds"] = denoised - begin
            record["decode_seconds"] = end - denoised
            record["same_bits"] = torch.equal(frames, second[0].cpu())
    return record


def build_pipeline(
    case: Case, plan: Plan, vae_dtype: torch.dtype, device: torch.device
) -> tuple[Any, Callable[..., torch.Tensor]]:
    """Return a pipeline without text encoder, and a function that makes its video.

    Args:
        case: The case; with the plan's `micro` its steps are at most two.
        plan: Says whether sizes are toys.
        vae_dtype: Of the VAE. The network is in bf16.
        device: Where it is made.

    Returns:
        The function takes diffusers' `output_type` and makes the same video in every call.
    """
    cogvideox, large = case.network.startswith("cog"), case.network == "wan2.2-5b"
    vae_name = "cogvideox" if cogvideox else case.network if large else "wan2.1"
    vae = build_vae(vae_name, plan, device).to(vae_dtype)
    network = build_network(case.network, plan, device)
    parts: Record = {
        "vae": vae, "transformer": network, "tokenizer": None, "text_encoder": None
    }  # fmt: skip
    if cogvideox:
        channels = network.config.text_embed_dim
        pipe: Any = _CogVideoX(**parts, scheduler=diffusers.CogVideoXDDIMScheduler())
    else:
        channels = network.config.text_dim
        scheduler = diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        )
        pipe = diffusers.WanPipeline(**parts, scheduler=scheduler, expand_timesteps=large)
    pipe.set_progress_bar_config(disable=True)
    height, width, frames = _MICRO_SIZE if plan.micro else case.size
    steps = min(2, case.steps) if plan.micro else case.steps
    options: Record = {"guidance_scale": case.guidance, "num_inference_steps": steps}
    options |= {"height": height, "width": width, "num_frames": frames}
    names = ["prompt_embeds"] + ["negative_prompt_embeds"] * (case.guidance > 1.0)
    for index, name in enumerate(names):
        random = runner.generator(device, index)
        size = 1, text_tokens(network, plan), channels
        options[name] = torch.randn(size, generator=random, device=device).bfloat16()

    def video(output: str = "pt") -> torch.Tensor:
        random = torch.Generator().manual_seed(0)
        frames: torch.Tensor = pipe(
            **options, generator=random, output_type=output, return_dict=False
        )[0]
        return frames

    return pipe, video


pipeline: Final = Benchmark(
    name="pipeline",
    text="seconds of a video, everything counted, in a fresh process",
    columns=(
        Column("video s", "second_seconds", ".2f"), Column("first s", "first_seconds", ".2f"),
        Column("denoising s", "denoise_seconds", ".2f"),
        Column("decoding s", "decode_seconds", ".2f"), Column("same bits", "same_bits", ""),
        Column("GiB", "peak_gib", ".1f"), Column("patch s", "patch_seconds", ".2f"),
    ),
    cases={  # Unpatched, SLA is dense attention, another function.
        name: [method for method in METHODS if case.network != SLA or runner.is_patched(method)]
        for name, case in _CASES.items()
    },
    prepare=_prepare,
    default=["1.3b-4-steps", "wan2.2-5b-3-steps"],
)  # fmt: skip
