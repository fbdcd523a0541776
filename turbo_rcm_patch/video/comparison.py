"""Make baseline, changed and control videos from the same noise, and judge them.

Three passes over the prompts leave clips on disk, a fourth measures them (`clips`), and the
verdict is that of `judge` (`judging`). Each finished piece is kept, so the same command continues
where it was stopped. The model is changed during the second pass only.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, Literal, Unpack

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from turbo_rcm_patch.checkpoints.read import Progress
from turbo_rcm_patch.config import PatchConfig
from turbo_rcm_patch.errors import ConfigError, SamplingError
from turbo_rcm_patch.extras import require
from turbo_rcm_patch.files import lock_folder
from turbo_rcm_patch.patching import PatchReport, sla_as_defined
from turbo_rcm_patch.patching.plan import Plan, config_and_plan
from turbo_rcm_patch.video.clips import Clip, measure
from turbo_rcm_patch.video.environment import code_digest, device_name, versions
from turbo_rcm_patch.video.generation import Meter, check_seed, generate, replaced, settings_for
from turbo_rcm_patch.video.judged import (
    BackendCalls,
    check_judged,
    judged,
    watched_forwards,
    with_skipped,
)
from turbo_rcm_patch.video.judging import FPS, conclude
from turbo_rcm_patch.video.measures import CapturedCalls, NetworkNumber, OnStep, fusion_number
from turbo_rcm_patch.video.measures import network_number as measure_network
from turbo_rcm_patch.video.pipelines import (
    VideoPipeline,
    check_image,
    kind_of,
    network_of,
    networks_of,
)
from turbo_rcm_patch.video.result import Judged, ModelFacts
from turbo_rcm_patch.video.settings import Settings, SettingsOptions
from turbo_rcm_patch.video.source import ImageLike, Source, sources_of
from turbo_rcm_patch.video.store import Store, check_out
from turbo_rcm_patch.video.verdict import Ran

#: Makes a video from a seed: frames [F, H, W, 3] in 0..1.
Make = Callable[[int], "torch.Tensor | np.ndarray"]
Run = Literal["baseline", "patched", "control"]
RUNS: Final[tuple[Run, ...]] = ("baseline", "patched", "control")

_BACKENDS: Final = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
#: The file of the network number.
_NETWORK: Final = "runs/network.json"
#: The plan by which the changed videos were made.
_PLAN: Final = "runs/plan_of_videos.json"
#: Stands for a video that holds NaN or infinity: `generate` raises in the place of returning it.
_NO_FRAMES: Final = torch.tensor(torch.nan)
#: Makes a video, and calls back after each step; returns frames, and how long that took.
_MakeClip = Callable[["_Video", OnStep], tuple[torch.Tensor, dict[str, Any]]]
#: Entered while videos are made; may yield what watches the blocks of the model.
_Entered = AbstractContextManager[PatchReport | BackendCalls | None]


def compare(
    pipe: VideoPipeline,
    prompts: str | Sequence[str],
    *,
    out: str | Path,
    make: Make | None = None,
    images: ImageLike | Sequence[ImageLike] | None = None,
    seed: int = 0,
    config: PatchConfig | None = None,
    attention_backend: str | None = None,
    plan: Plan | str | Path | None = None,
    settings: Settings | None = None,
    network_number: bool = True,
    fresh: bool = False,
    progress: Progress | None = None,
    command: str = "",
    **overrides: Unpack[SettingsOptions],
) -> Judged:
    """Make every video three times and judge whether patching changed anything visible.

    If an attention holds SLA's `proj_l` (`load_extra`), baseline and control compute SLA by its
    definition in plain torch with the same `sla_topk`, because its weights were not trained for
    dense attention.

    Args:
        pipe: An unpatched pipeline, with the transformer in bf16 and the VAE in fp32. With `make`
            any pipeline of diffusers whose transformer can be patched.
        prompts: One or many. Prompt i uses seed + i.
        make: Makes a video from a seed, with `pipe` and whatever it needs: frames [F, H, W, 3] in
            0..1. `prompts` are then the names of the videos in the report, and of the settings
            only `fps` is taken.
        images: For image to video the first frame, one for all prompts or one for each.
        out: Folder for videos, metrics.json and report.html. Finished prompts in it are kept, and
            so are files that no comparison wrote.
        seed: Seed of initial noise and re-noising.
        config: How to patch.
        attention_backend: Judge the unpatched model on this attention backend of diffusers
            ("sage", "flash", "_native_cudnn", ...) or on "turbo_rcm_int8", instead of the patch.
            Backends are as before afterwards.
        plan: As for `patch_model`; by default that of the changed videos which are in `out`.
        settings: How to sample; by default as the model's folder says.
        network_number: Measure the network's error against fp32. Where that cannot be done,
            because the transformer is offloaded or one call in fp32 does not fit into memory, the
            verdict is at best "undecided" and says why.
        fresh: Start again: use nothing that comparisons wrote into `out`. Each file stays until it
            is replaced, the others until this comparison is done.
        progress: Called with a stage, what is done and the total, as the work proceeds; after the
            first step with an estimate of time and memory in words, and 0 of 0.
        command: The command line, for the report.
        **overrides: Fields of `Settings` by name.

    Returns:
        The verdict and its numbers.

    Raises:
        ConfigError: An option is invalid, or the attention backend cannot be used here.
    """
    require("report", "compare")
    config, plan = config_and_plan(config, plan)
    make_clip: _MakeClip
    # Read once, so that all three videos are made from the same pixels.
    sources = [Source(source.prompt, source.read()) for source in sources_of(prompts, images)]
    check_seed(seed, len(sources))
    if make is None:
        chosen = settings_for(pipe, settings, **overrides)
        check_image(type(pipe).__name__, kind_of(pipe), sources[0].image is not None)
        how, fps, steps = chosen.as_dict(), chosen.fps, chosen.steps
        make_clip = partial(_generate_clip, pipe, chosen)
    else:
        others = {**overrides, "images": images, "settings": settings}
        if wrong := [name for name, x in others.items() if x is not None and name != "fps"]:
            raise ConfigError(
                "compare with make",
                expected="no setting but fps, and no image",
                got=", ".join(wrong),
                remedy="Give them to the pipeline inside of make",
            )
        asked = overrides.get("fps")
        fps, steps = Settings(fps=FPS if asked is None else asked).fps, 1
        how = {"fps": fps, "made by": "a function of the caller"}
        make_clip = partial(_call_clip, pipe, make)
    with lock_folder(check_out(out, fresh=fresh)):
        check_judged(pipe, config, attention_backend, plan)
        videos = [_Video(source, seed + i) for i, source in enumerate(sources)]
        identity = identify(pipe, how, config) | {
            "inputs": {video.key: video.source.digest for video in videos},
            "attention_backend": attention_backend,
        }
        if plan is not None:
            identity["plan"] = str(plan)
        store = Store(out, identity, fresh=fresh)
        kept = store.out / _PLAN
        decided = Plan.load(kept) if plan is None and kept.is_file() else plan
        for video in videos:
            video.clip = Clip.finished(store, video.key, video.source.digest)
        context = (pipe, config, attention_backend, plan, progress or (lambda *_: None))
        comparison = _Comparison(store, videos, make_clip, steps, *context)
        calls = CapturedCalls(networks_of(pipe).values()) if network_number else None
        comparison.make("baseline", _unpatched(pipe, config), calls or nullcontext())
        judged_model = judged(pipe, config, attention_backend, decided)
        comparison.make("patched", judged_model, nullcontext())
        control = comparison.control()
        comparison.make("control", _unpatched(pipe, config, control))
        network, why = comparison.network(calls)
        fusion = None
        if attention_backend is None and config.attention != "sage":
            shape = network_of(pipe).config
            heads, head_dim = shape.num_attention_heads, shape.attention_head_dim
            device = pipe._execution_device
            fusion = fusion_number(config, device, heads=heads, head_dim=head_dim)
        clips = comparison.clips(fps)
        note = store.read_json("runs/patched.json") or {}
        model = ModelFacts(
            network=network,
            fusion=fusion,
            attention_backend=attention_backend,
            control_backend=control,
            baseline=_baseline(pipe, config),
            patch_report=note.get("table")
            or f"nothing: the unpatched model, attention backend {attention_backend}",
            patch=note.get("report", {}),
            times={run: _times(store, clips, run) for run in RUNS[:2]},
            identity=identity,
        )
        return conclude(
            store,
            clips,
            command=command,
            model=model,
            numbers={
                "network_ratio": network and network.ratio,
                "fusion": fusion,
                "missing": [f"the network number ({why})"] if why else [],
                "ran": comparison.ran(clips),
            },
        )


@dataclass(slots=True)
class _Video:
    """One video of a comparison.

    Attributes:
        source: What it is made from.
        seed: Its seed.
        clip: Its numbers, if it is measured.
    """

    source: Source
    seed: int
    clip: Clip | None = None

    @property
    def key(self) -> str:
        """Its name in the folder."""
        return Store.key(self.source.prompt, self.seed)


def _generate_clip(
    pipe: VideoPipeline, settings: Settings, video: _Video, on_step: OnStep
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Make a video with `generate`."""
    began, source = time.perf_counter(), video.source
    note = {"seconds": 0.0, "decode_seconds": 0.0, "peak_bytes": None}
    options: dict[str, Any] = {"image": source.image, "seed": video.seed, "settings": settings}
    try:
        result = generate(pipe, source.prompt, on_step=on_step, **options)
    except SamplingError as error:
        if "NaN or infinity" not in error.what:
            raise
        return _NO_FRAMES, note | {"seconds": time.perf_counter() - began}
    return result.frames, {name: getattr(result, name) for name in note}


def _call_clip(
    pipe: VideoPipeline, make: Make, video: _Video, on_step: OnStep
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Make a video with a function of the caller."""
    with torch.no_grad(), Meter(pipe._execution_device) as meter:
        frames = torch.as_tensor(make(video.seed))
    if frames.ndim != 4 or frames.shape[-1] != 3 or not frames.is_floating_point():
        raise SamplingError(
            "the result of make(seed)",
            expected="frames [F, H, W, 3] in 0..1, as a tensor or an array of numpy",
            got=f"{tuple(frames.shape)} in {frames.dtype}",
            remedy='Call the pipeline with output_type="np", and return its .frames[0]',
        )
    on_step(1, 1)
    note = {"seconds": meter.seconds, "decode_seconds": 0.0, "peak_bytes": meter.peak_bytes}
    return frames.to("cpu", torch.float32), note


@dataclass(frozen=True, slots=True)
class _Comparison:
    """The videos of a comparison, made run by run.

    Attributes:
        store: Where they are kept.
        videos: All of them.
        make_clip: Makes a video.
        steps: Steps of a video.
        pipe: The pipeline.
        config: As for `compare`.
        attention_backend: The same.
        plan: The same.
        progress: The same.
    """

    store: Store
    videos: Sequence[_Video]
    make_clip: _MakeClip
    steps: int
    pipe: VideoPipeline
    config: PatchConfig
    attention_backend: str | None
    plan: Plan | None
    progress: Progress

    def make(self, run: Run, model: _Entered, first_call: _Entered | None = None) -> None:
        """Make the videos of one run that are not there.

        Args:
            run: The name of the run.
            model: Entered for the run: changes the model.
            first_call: Entered for a first call, which is timed separately and discarded. Without
                it there is none, and no runs/RUN.json.
        """
        missing = [v for v in self.missing() if not self.store.has_clip(v.key, run)]
        total = len(self.videos) * self.steps
        done = total - len(missing) * self.steps
        self.progress(run, done, total)
        if not missing:
            return
        with model as watched:
            note: dict[str, Any] = {}
            if first_call is not None:
                on_step = self._estimate() if run == "baseline" else _ignore
                with first_call:
                    note["first_call_seconds"] = self.make_clip(missing[0], on_step)[1]["seconds"]
            for video in missing:
                show_step = partial(self._show_step, run, done)
                with watched_forwards(self.pipe, watched) as forwards:
                    frames, clip_note = self.make_clip(video, show_step)
                done += self.steps
                if run == "baseline" and not frames.isfinite().all():
                    raise SamplingError(
                        "the unpatched model gave NaN or infinity",
                        got=video.key,
                        remedy="Check the model's dtype and weights: there is nothing to compare "
                        "with",
                    )
                if frames is _NO_FRAMES:
                    frames = frames.expand_as(self.store.load_clip(video.key, "baseline")[0])
                if isinstance(watched, PatchReport):
                    note |= {"table": str(watched), "report": watched.as_dict()}
                    if made := watched.plan:
                        made.save(self.store.out / _PLAN)
                if first_call is not None:
                    self.store.write_json(f"runs/{run}.json", note)
                clip_note["forms"] = with_skipped(forwards)
                self.store.save_clip(video.key, run, frames, clip_note)
        self.progress(run, total, total)

    def missing(self) -> list[_Video]:
        """Return the videos that are not measured."""
        return [video for video in self.videos if video.clip is None]

    def _show_step(self, run: Run, before: int, step: int, _: int) -> None:
        self.progress(run, before + step, len(self.videos) * self.steps)

    def _estimate(self) -> OnStep:
        """Return the function that says, once a step is done, how long all will take if every
        step takes as long, and what will be written."""
        times = [time.perf_counter()]

        def on_step(step: int, steps: int) -> None:
            times.append(time.perf_counter())
            if step != min(2, steps):  # The prompt is encoded before the first step.
                return
            count, seconds = 3 * len(self.videos), times[-1] - times[-2]
            device = self.pipe._execution_device
            remaining = timedelta(seconds=round(seconds * count * self.steps))
            peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
            memory = f" and {peak / 2**30:.2f} GiB" if peak else ""
            self.progress(
                f"A step took {seconds:.2g} s{memory}. {count} videos of {self.steps} steps take "
                f"{remaining} at this pace, and decoding is added to that. {self.store.out} gets "
                "report.html, metrics.json and a folder of videos for each prompt.",
                0,
                0,
            )

        return on_step

    def control(self) -> str:
        """Return the exact attention backend of the control, chosen once."""
        known = self.store.read_json("runs/control.json") or {"backend": self._choose_control()}
        self.store.write_json("runs/control.json", known)
        return str(known["backend"])

    def _choose_control(self) -> str:
        """Choose the backend with the first video that is missing, and keep this video."""
        video = (self.missing() or self.videos)[0]
        baseline, _ = self.store.load_clip(video.key, "baseline")
        refused = []
        for name in candidates(self.pipe._execution_device):
            try:
                with _unpatched(self.pipe, self.config, name):
                    frames, note = self.make_clip(video, _ignore)
            except torch.OutOfMemoryError:
                refused.append(f"{name} runs out of memory")
                continue
            except RuntimeError as error:
                # torch's messages on a GPU and on a CPU. Faults of the device name kernels, too.
                if not re.search("No (available kernel|viable backend)", str(error)):
                    raise
                refused.append(f"{name} cannot run this model")
                continue
            if not frames.isfinite().all():
                refused.append(f"{name} gives NaN or infinity")
            elif torch.equal(frames, baseline):
                refused.append(f"{name} is bit-equal to the baseline")
            else:
                self.store.save_clip(video.key, "control", frames, note)
                return name
        raise SamplingError(
            "no exact attention backend differs from the one the model uses",
            got="; ".join(refused),
            remedy="Compare in bf16, and without a diffusers attention backend set on the model",
        )

    def network(self, calls: CapturedCalls | None) -> tuple[NetworkNumber | None, str]:
        """Return the network number, measured once; or None and why, unless it was left out."""
        if calls is None:
            return None, ""
        if known := self.store.read_json(_NETWORK):
            return NetworkNumber(**{name: float(value) for name, value in known.items()}), ""
        if why := why_no_network(self.pipe):
            return None, why
        if not any(calls.kept.values()):  # An earlier run has made the baseline.
            with _unpatched(self.pipe, self.config), calls:
                self.make_clip(self.videos[0], _ignore)
        kept = {network: inputs for network, inputs in calls.kept.items() if inputs}
        if not kept:
            return None, "the videos were made without a call of it"
        try:
            number = measure_network(
                kept,
                self.config,
                attention_backend=self.attention_backend,
                plans={} if self.plan is None else self.plan.of_each(networks_of(self.pipe)),
                progress=partial(self.progress, "network"),
            )
        except torch.OutOfMemoryError:
            return None, "one call of it in fp32 does not fit the device's memory"
        if number.unpatched == 0:
            return None, "unpatched it has no error: it runs in fp32"
        self.store.write_json(_NETWORK, asdict(number))
        return number, ""

    def clips(self, fps: int) -> list[Clip]:
        """Measure all videos whose three runs are there, and return the numbers of every video."""
        clips, total = [], len(self.videos)
        for done, video in enumerate(self.videos):
            self.progress("videos", done, total)
            clip = video.clip
            if clip is None:
                runs = {run: self.store.load_clip(video.key, run) for run in RUNS}
                clip = measure(
                    self.store,
                    {run: frames for run, (frames, _) in runs.items()},
                    video.source.digest,
                    key=video.key,
                    prompt=video.source.prompt,
                    seed=video.seed,
                    fps=fps,
                    runs={run: note for run, (_, note) in runs.items()},
                )
            clips.append(clip)
            self.store.remove_clips(video.key)
        self.progress("videos", total, total)
        return clips

    def ran(self, clips: Sequence[Clip]) -> Ran | None:
        """Return in which form the blocks of the judged model ran; None if nobody counted."""
        auto = self.config.attention == "auto" or self.attention_backend
        asked = f"{'int8' if auto else self.config.attention} attention"
        asked += " and int8 Linears" if self.config.linear != "as-is" else ""
        part = ["length"] if self.attention_backend is None else []
        part += ["wide-values"] if self.config.pv == "auto" else []
        return Ran.of(asked, part, [clip.runs["patched"]["forms"] for clip in clips])


@contextmanager
def _unpatched(
    pipe: VideoPipeline, config: PatchConfig, backend: str | None = None
) -> Iterator[None]:
    """Run the authors' attention, or SLA's definition where it holds a proj_l; exactly on one of
    `_BACKENDS` if it is named."""
    exactly = _on_backend(pipe, _BACKENDS[backend]) if backend else nullcontext()
    with sla_as_defined(pipe, config.sla_topk), exactly, fast_on_a_cpu(pipe):
        yield


@contextmanager
def fast_on_a_cpu(pipe: VideoPipeline) -> Iterator[None]:
    """Let the VAE decode small latents in a batch of two, of which one is kept.

    For a batch of one, torch's convolutions on a CPU take a path that is several times slower,
    unless channels times frames times rows are more than 20,480 (`use_mkldnn` in ATen's
    Convolution.cpp). The widest of these VAEs' blocks have 384 channels.
    """
    vae = getattr(pipe, "vae", None)
    if vae is None or pipe._execution_device.type != "cpu":
        yield
        return
    decode = vae.decode

    def decode_twice(z: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if len(z) > 1 or 384 * z.shape[3] > 20480:
            return decode(z, *args, **kwargs)
        decoded = decode(torch.cat([z, z]), *args, **kwargs)
        if isinstance(decoded, tuple):
            return (decoded[0][:1],)
        return type(decoded)(sample=decoded.sample[:1])

    with replaced(vae, decode=decode_twice):
        yield


@contextmanager
def _on_backend(pipe: VideoPipeline, backend: SDPBackend) -> Iterator[None]:
    """Compute the attentions of the networks on one backend of torch; those of text encoders and
    of the VAE run as they do for the baseline."""
    with ExitStack() as undo:
        exactly = undo.enter_context(ExitStack())

        def enter(*_: object) -> None:
            exactly.enter_context(sdpa_kernel(backend))

        def leave(*_: object) -> None:
            exactly.close()

        for network in networks_of(pipe).values():
            undo.enter_context(network.register_forward_pre_hook(enter))
            undo.enter_context(network.register_forward_hook(leave, always_call=True))
        yield


def candidates(device: torch.device) -> tuple[str, ...]:
    """Return the names of exact backends for the control, best first.

    "Native" is flash on a CPU and cuDNN or flash on a GPU, depending on the card; the first
    candidate whose result differs from native is the control. math comes last on a GPU, because it
    holds the whole score matrix.
    """
    return ("math", "flash") if device.type == "cpu" else ("flash", "efficient", "cudnn", "math")


def _ignore(step: int, steps: int) -> None:
    """Do nothing after a step."""


def why_no_network(pipe: VideoPipeline) -> str:
    """Return why the network number cannot be measured, or "".

    Its truth is the network in fp32, upcast one block at a time, so its size is no reason; weights
    that are elsewhere while it does not run are one.
    """
    for network in networks_of(pipe).values():
        for module in network.modules():
            hooks = getattr(module.__dict__.get("_diffusers_hook"), "hooks", {})
            if "_hf_hook" in module.__dict__ or any("offload" in name for name in hooks):
                return "an offloaded transformer"
    return ""


def _times(store: Store, results: Sequence[Clip], run: Run) -> dict[str, float | None]:
    """Return seconds of the first call, of the median one and of the median decoding, and peak
    memory."""
    notes = [clip.runs[run] for clip in results]
    first = store.read_json(f"runs/{run}.json") or {}
    return {
        "first_call_seconds": first.get("first_call_seconds"),
        "median_seconds": statistics.median(note["seconds"] for note in notes),
        "decode_seconds": statistics.median(note["decode_seconds"] for note in notes),
        "peak_bytes": max((n["peak_bytes"] for n in notes if n["peak_bytes"]), default=None),
    }


def _baseline(pipe: VideoPipeline, config: PatchConfig) -> str:
    with sla_as_defined(pipe, config.sla_topk) as sparse:
        if not sparse:
            return "the unpatched model"
    return (
        f"the unpatched model, with SLA computed by its definition in plain torch in {sparse} "
        f"attentions that hold a proj_l (sla_topk={config.sla_topk:g}); the control changes the "
        "backend of the other attentions"
    )


def identify(
    pipe: VideoPipeline, settings: Mapping[str, object], config: PatchConfig
) -> dict[str, Any]:
    """Return everything but prompts and seeds that decides what is generated."""
    return {
        "model": str(getattr(pipe, "name_or_path", None) or type(pipe).__name__),
        "weights": " ".join(map(_weights, networks_of(pipe).values())),
        "dtype": str(network_of(pipe).dtype).removeprefix("torch."),
        "device": device_name(pipe._execution_device),
        "settings": dict(settings),
        "config": asdict(config),
        "versions": versions(),
        "code": code_digest(),
    }


def _weights(network: torch.nn.Module) -> str:
    """Return a digest of a network: names, shapes and some values of its tensors, SLA's proj_l
    among them, and which adapters are on, and how strongly, which no weight shows."""
    digest = blake2b(digest_size=8)
    tensors = dict(network.named_parameters()) | dict(network.named_buffers())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {list(tensor.shape)} {tensor.dtype}".encode())
        if not tensor.is_meta and tensor.numel():
            some = tensor.detach().flatten()[:: max(1, tensor.numel() // 16)][:16]
            digest.update(repr(some.double().tolist()).encode())
    for name, module in network.named_modules():
        if hasattr(module, "active_adapters") and hasattr(module, "scaling"):
            state = module.active_adapters, module.scaling, module.disable_adapters, module.merged
            digest.update(f"{name} {state}".encode())
    return digest.hexdigest()
