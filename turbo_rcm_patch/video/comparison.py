"""Generate baseline, changed and control videos from the same noise, and give a verdict.

Three passes over the prompts leave latents on disk, a fourth decodes and measures. Each finished
piece is kept, so the same command continues where it was stopped. The model is changed during the
second pass only. Several processes share the three passes; the first of them alone reads and
writes the folder, and does the rest.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import cache, partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, get_args

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from turbo_rcm_patch import tiny
from turbo_rcm_patch.checkpoints.read import Progress
from turbo_rcm_patch.config import PatchConfig
from turbo_rcm_patch.errors import ConfigError, SamplingError
from turbo_rcm_patch.extras import require
from turbo_rcm_patch.patching import PatchReport, sla_as_defined
from turbo_rcm_patch.video.clips import Clip, Outcome, show
from turbo_rcm_patch.video.environment import code_digest, device_name, versions
from turbo_rcm_patch.video.generation import (
    Conditioning,
    Make,
    Meter,
    OnStep,
    Sample,
    Watched,
    check_seed,
    decode_latents,
    encode,
    sample_by,
    sample_latents,
    settings_for,
)
from turbo_rcm_patch.video.judged import BackendCalls, check_judged, judged, judged_vae
from turbo_rcm_patch.video.load import SHIPPED
from turbo_rcm_patch.video.many import Processes
from turbo_rcm_patch.video.measures import (
    NetworkNumber,
    drift,
    frame_drift,
    fusion_number,
    in_fp32,
    measure_network,
)
from turbo_rcm_patch.video.pipelines import (
    VideoPipeline,
    check_images,
    kind_of,
    network_of,
    networks_of,
)
from turbo_rcm_patch.video.report import shown_command, without_places, write_report
from turbo_rcm_patch.video.settings import GivenFrames, Settings
from turbo_rcm_patch.video.source import ImageLike, Source, digest_of, sources_of
from turbo_rcm_patch.video.store import PROMPT_FILES, Store, check_out, lock_folder
from turbo_rcm_patch.video.verdict import FUSION_LIMIT, MEDIAN, WORST, Ran, Verdict, judge
from turbo_rcm_patch.video.video import write_mp4

Variant = Literal["baseline", "patched", "control"]

#: A video of at most so many steps is made in fp32 where videos miss a limit.
TRUTH_STEPS: Final = 8

#: Said beside the time of a patched model whose kernels did not run.
EMULATED: Final = "On a CPU the patch is no faster: plain torch stands in for its kernels"

_BACKENDS: Final = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


@dataclass(frozen=True, slots=True)
class Observer:
    """A detector for videos of a world it knows. It has no part in the verdict.

    Attributes:
        asks: Returns the contents that a prompt asks for, e.g. "red circle, right".
        sees: Returns the contents of frames [F, H, W, 3] in 0..1, in the same words.
    """

    asks: Callable[[str], str]
    sees: Callable[[torch.Tensor], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptResult(Clip):
    """Numbers of one prompt.

    Attributes:
        seed: The seed.
        decode_seconds: Mean time of one decoding.
        seen: The observer's words about what was "asked" for, and about the videos "baseline" and
            "patched"; None without an observer.
    """

    seed: int
    decode_seconds: float
    seen: dict[str, str] | None = None
    files: ClassVar[tuple[str, ...]] = PROMPT_FILES


@dataclass(frozen=True, slots=True)
class Truth:
    """The worst frames of one prompt's videos, by PSNR in dB against the same video of the network
    in fp32.

    Baseline and control share most of their roundings, so they are nearer to each other than to
    the truth, and a network that rounds less may be far from both.
    """

    key: str
    prompt: str
    baseline: float
    patched: float
    control: float

    def __str__(self) -> str:
        best = "the judged one is nearer" if self.patched >= self.baseline else "it is nearer"
        return (
            f"Against the network in fp32 the worst frame of {self.prompt!r} has "
            f"{self.patched:.1f} dB, the baseline's {self.baseline:.1f} ({best}), the control's "
            f"{self.control:.1f}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison(Outcome):
    """The result of a comparison.

    Attributes:
        network: Error of the network against fp32 truth, None if it was not measured.
        fusion: Fused against unfused in fp32, None where our kernels do not run the attention.
        truth: The farthest video against fp32; None where all meet their limits, or where that
            takes more than `TRUTH_STEPS` steps or the network was not measured.
        attention_backend: The judged backend of diffusers; None if the patch was judged.
        control_backend: Exact attention backend of the control run.
        baseline: The model that the other two runs are compared with, in words.
        patch_report: The report of the patched model, as a table.
        patch: The same for JSON.
        times: Seconds of the first call and of the median one, and peak memory, of each variant.
        settings: How the videos were sampled.
        identity: Everything but prompts and seeds that decides what is generated, for JSON.
    """

    one: ClassVar[str] = "prompt"

    results: tuple[PromptResult, ...]
    network: NetworkNumber | None
    fusion: float | None
    truth: Truth | None
    attention_backend: str | None
    control_backend: str
    baseline: str
    patch_report: str
    patch: dict[str, Any]
    times: dict[Variant, dict[str, float | None]]
    settings: Settings | GivenFrames
    identity: dict[str, Any]

    @property
    def name(self) -> str:
        """The judged model in a word."""
        return self.attention_backend or "patched"

    @property
    def steps_run(self) -> int:
        """The denoising steps of a video."""
        return self.settings.steps

    @property
    def guarded(self) -> bool:
        """True if a guard compared blocks while the judged videos were made."""
        return self.attention_backend is None and bool(self.identity["config"]["guard"])

    @property
    def judged_model(self) -> str:
        """The judged model in a few sentences."""
        patch = self.patch
        if not patch:
            return f"The unpatched model on the attention backend {self.attention_backend}."
        chosen = str(PatchConfig(**self.identity["config"])).removeprefix("PatchConfig")
        return (
            f"The model after patch_model with {chosen.strip('()') or 'its defaults'}: "
            f"{patch['fused']} of its {len(patch['pairs'])} branches run fused with the sum into "
            "the residual."
        )

    @property
    def facts(self) -> dict[str, str]:
        """How the videos were made, without the folders of this machine."""
        settings, identity = self.settings, self.identity
        model, backend = identity["model"], self.attention_backend
        patch = ", ".join(f"{name}={value}" for name, value in identity["config"].items())
        sampler = {
            name: value
            for name, value in identity["settings"].items()
            if value not in (None, "", ()) and name not in ("height", "width", "num_frames")
        }
        facts = {
            "command": shown_command(self.command) or "called from Python",
            "model": model_in_words(model),
            "machine": identity["device"],
            "video": f"{settings.num_frames} frames of {settings.width} × {settings.height}",
            "sampler": ", ".join(f"{name}={value}" for name, value in sampler.items()),
            "transformer": identity["dtype"] + "; VAE in float32" * (not self.made_by_caller),
            "baseline": self.baseline,
            "control": f"scaled_dot_product_attention on its {self.control_backend} backend",
            "judged": f"attention backend {backend}, unpatched" if backend else f"patch: {patch}",
            "versions": ", ".join(f"{k} {v}" for k, v in identity["versions"].items()),
        }
        return {name: without_places(text) for name, text in facts.items()}

    @property
    def chips(self) -> list[str]:
        """The model, the machine and the settings, in a few words each."""
        facts, versions = self.facts, self.identity["versions"]
        judged = [f"attention backend {self.attention_backend}"] if self.attention_backend else []
        packages = [f"{name} {versions[name]}" for name in ("torch", "triton") if name in versions]
        steps = [] if self.made_by_caller else [f"{self.settings.steps} steps"]
        return [facts["model"], *judged, facts["machine"], facts["video"], *steps, *packages]

    @property
    def made_by_caller(self) -> bool:
        """True if a function of the caller made the videos (`compare(..., make=)`)."""
        return isinstance(self.settings, GivenFrames)

    @property
    def seen(self) -> dict[str, int] | None:
        """How many videos an observer looked at, how many show what was asked, and how many show
        the same before and after; None if there was no observer."""
        seen = [one.seen for one in self.results if one.seen]
        counts = {
            "prompts": len(seen),
            "baseline": sum(one["baseline"] == one["asked"] for one in seen),
            "patched": sum(one["patched"] == one["asked"] for one in seen),
            "same": sum(one["patched"] == one["baseline"] for one in seen),
        }
        return counts if seen else None

    @property
    def emulated(self) -> bool:
        """True if plain torch ran in the place of the kernels, so that its time means nothing."""
        ours = (
            self.attention_backend == "turbo_rcm_int8" and not self.times["patched"]["peak_bytes"]
        )
        return ours or self.patch.get("impl") == "reference"

    @property
    def speed(self) -> str:
        """Seconds a video and peak memory, unpatched and changed, in words."""
        decode = statistics.median(one.decode_seconds for one in self.results)
        runs = [self.times[name] for name in ("baseline", "patched")]
        old, new = ((one["median_seconds"] or 0.0) + decode for one in runs)
        words = f"{old:.3g} s a video unpatched, {new:.3g} s {self.name} ({old / new:.2f} times "
        words += f"as fast), denoised and decoded on {self.identity['device']}"
        peaks = [one["peak_bytes"] / 2**30 for one in runs if one["peak_bytes"]]
        if len(peaks) == len(runs):
            words += f"; peak memory while denoising {peaks[0]:.2f} and {peaks[1]:.2f} GiB"
        if self.emulated:
            words += f". {EMULATED}"
        return words

    def as_dict(self) -> dict[str, object]:
        """Return the contents of metrics.json."""
        network, fusion, ran = self.network, self.fusion, self.judgement.ran
        kept = ("attention_backend", "control_backend", "baseline", "times", "patch", "identity")
        return {
            "schema": 1,
            **{name: getattr(self, name) for name in ("verdict", "speed", *kept, "command")},
            "checks": self.judgement.numbers,
            "ran": ran and asdict(ran) | {"share_as_asked": ran.share, "words": str(ran)},
            "prompts": [one.as_dict() for one in self.results],
            "patch_table": self.patch_report,
            "missing": self.judgement.missing,
            "network": network and asdict(network) | {"ratio": network.ratio},
            "truth": self.truth and asdict(self.truth),
            "fusion": None
            if fusion is None
            else {"fused_vs_unfused": fusion, "limit": FUSION_LIMIT},
        }

    def __str__(self) -> str:
        lines = [f"verdict: {self.verdict}"]
        lines += [f"  {self.judgement.ran}"] if self.judgement.ran else []
        lines += [f"  {self.speed}"]
        lines += [f"  {'ok ' if c.passed else 'NO '} {c}" for c in self.judgement.checks]
        lines += [f"  --  {self.truth}"] if self.truth else []
        lines += [f"  --  not measured: {what}" for what in self.judgement.missing]
        if self.network is None and not self.judgement.missing:
            lines += ["  --  not measured, as you asked: the network number"]
        if self.attention_backend:
            lines += [f"judged: the unpatched model, attention backend {self.attention_backend!r}"]
        if seen := self.seen:
            lines += [
                f"detector: {seen['baseline']} of {seen['prompts']} videos show what was asked "
                f"for without the patch, {seen['patched']} with it"
            ]
        lines += [f"baseline: {self.baseline}"]
        lines += [f"control: exact attention on the {self.control_backend!r} backend"]
        return "\n".join([*lines, f"report:  {self.report}", f"short:   {self.short_report}"])


def model_in_words(model: str) -> str:
    """Return the name of a model, without the folders that it lies in."""
    for name, attribute in SHIPPED.items():
        if Path(model) == getattr(tiny, attribute):
            return f"{name}, trained on moving shapes"
    return Path(model).name if Path(model).is_absolute() else model


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
    settings: Settings | None = None,
    network_number: bool | None = None,
    fresh: bool = False,
    observer: Observer | None = None,
    progress: Progress | None = None,
    command: str = "",
    processes: Processes | None = None,
    **overrides: object,
) -> Comparison:
    """Generate every prompt three times and judge whether patching changed anything visible.

    If an attention holds SLA's `proj_l` (`load_extra`), baseline and control compute SLA by its
    definition in plain torch with the same `sla_topk`, because its weights were not trained for
    dense attention.

    Args:
        pipe: An unpatched pipeline, with the transformer in bf16 and the VAE in fp32. With `make`
            any pipeline of diffusers whose transformer can be patched.
        prompts: One or many. Prompt i uses seed + i.
        make: Makes a video from a seed, with `pipe` and whatever it needs: frames [F, H, W, 3] in
            0..1. `prompts` are then the names of the videos in the report, and of the settings
            only `fps` is taken. The network number is not measured.
        images: For image to video the first frame, one for all prompts or one for each.
        out: Folder for videos, plots, metrics.json, report.html and report.md. Finished prompts in
            it are kept, and so are files that no comparison wrote.
        seed: Seed of initial noise and re-noising.
        config: How to patch.
        attention_backend: Judge the unpatched model on this attention backend of diffusers
            ("sage", "flash", "_native_cudnn", ...) or on "turbo_rcm_int8", instead of the patch.
            Backends are as before afterwards.
        settings: How to sample; by default as the model's folder says.
        network_number: True measures the network's error against fp32, False leaves it out. None
            measures it if it can be measured: the transformer is not offloaded, and one call in
            fp32 fits into memory. If not, the verdict is not "unchanged" and says why.
        fresh: Start again: use nothing that comparisons wrote into `out`. Each file stays until it
            is replaced, the others until this comparison is done.
        observer: Describes the videos. The report shows it; the verdict ignores it.
        progress: Called with a stage, what is done and the total, as the work proceeds; after the
            first step with an estimate of time and memory in words, and 0 of 0.
        command: The command line, for the report.
        processes: Those that share the work, each of which calls this with the same arguments and
            its own pipeline; by default this one alone.
        **overrides: Fields of `Settings` by name.

    Returns:
        The verdict and its numbers, on every process.

    Raises:
        ConfigError: An option is invalid, or the attention backend cannot be used here.
        SamplingError: Among others: another process failed.
    """
    require("report", "compare")
    config = config or PatchConfig()
    sources = sources_of(prompts, images)
    check_seed(seed, len(sources))
    chosen: Settings | GivenFrames
    if make is None:
        chosen = settings_for(pipe, settings, **overrides)
        given = {one.prompt: one.image is not None for one in sources}
        check_images(kind_of(pipe), type(pipe).__name__, given)
    else:
        chosen = _given_frames(
            overrides, images=images, settings=settings, network_number=network_number
        )
        network_number = False
    processes = processes or Processes()
    processes.broadcast(lambda: check_out(out, fresh=fresh))
    if network_number and (why := why_no_network(pipe)):
        raise SamplingError(
            "the network number",
            expected="a transformer that stays on one device",
            got=why,
            remedy="Leave out --network-number, or load without offloading",
        )
    with ExitStack() as until_done:
        processes.broadcast(lambda: until_done.enter_context(lock_folder(out)))
        check_judged(pipe, config, attention_backend)
        inputs = {Store.key(one.prompt, seed + i): one.digest for i, one in enumerate(sources)}
        identity = identify(pipe, chosen, config)
        identity |= {"inputs": inputs, "attention_backend": attention_backend}
        store = processes.broadcast(lambda: Store(out, identity, fresh=fresh))
        run = _Run(
            pipe, make, sources, inputs, seed, chosen, config, attention_backend,
            store=store, identity=identity, progress=progress or (lambda *_: None),
            processes=processes,
        )  # fmt: skip
        run.sample("baseline", run.unpatched())
        run.sample("patched", judged(pipe, config, attention_backend))
        control = run.sample_control()
        return processes.broadcast(
            lambda: run.concluded(network_number, observer, control, command)
        )


@dataclass(eq=False)
class _Run:
    """The work of one comparison, piece by piece; finished pieces of an earlier run are kept."""

    pipe: VideoPipeline
    make: Make | None
    sources: Sequence[Source]
    inputs: dict[str, str]  # prompts by their names in the store -> digests of their images
    seed: int
    settings: Any
    config: PatchConfig
    attention_backend: str | None
    store: Store
    identity: dict[str, Any]
    progress: Progress
    processes: Processes

    def __post_init__(self) -> None:
        self.keys = list(self.inputs)
        #: Return the embeddings of prompt i, encoded once for all passes, on the CPU.
        self.embed = cache(
            lambda i: {
                name: one.cpu()
                for name, one in encode(self.pipe, self.sources[i], self.settings).items()
                if isinstance(one, torch.Tensor)
            }
        )

    def encoded(self, i: int) -> Conditioning:
        """Return prompt i, encoded, with its image."""
        image = self.sources[i].read()
        if digest_of(image) != self.inputs[self.keys[i]]:
            raise SamplingError(
                f"the image for the video of prompt {i + 1} changed during the comparison",
                expected="the same pixels for all three videos",
                remedy="Start again, and leave the file alone until it is done",
            )
        device = self.pipe._execution_device
        found: dict[str, Any] = {name: one.to(device) for name, one in self.embed(i).items()}
        return found if image is None else found | {"image": image}

    @contextmanager
    def unpatched(self, backend: str | None = None) -> Iterator[None]:
        """Run the authors' attention, or SLA's definition where it holds a proj_l; exactly on one
        of `_BACKENDS` if it is named."""
        exactly = sdpa_kernel(_BACKENDS[backend]) if backend else nullcontext()
        with sla_as_defined(self.pipe, self.config.sla_topk), exactly:
            yield

    def sample(
        self,
        variant: Variant,
        model: AbstractContextManager[PatchReport | BackendCalls | None],
        *,
        warm: bool = True,
    ) -> None:
        """Generate the missing samples, each process its share. The first call is timed
        separately and discarded.

        Args:
            variant: The name of the pass.
            model: Entered for the pass; yields the report of a patched model, or the calls of a
                backend.
            warm: False leaves the first call and runs/VARIANT.json out.
        """
        shared, store, steps = self.processes, self.store, self.settings.steps
        missing = shared.broadcast(
            lambda: [i for i, key in enumerate(self.keys) if not store.has_sample(key, variant)]
        )
        total = len(self.keys) * steps
        done = total - len(missing) * steps
        self.progress(variant, done, total)
        if not missing:
            return
        mine = shared.share(missing)
        for i in mine if self.make is None else ():  # outside the model: the encoder is the same
            self.embed(i)
        with model as watched:
            report = watched if isinstance(watched, PatchReport) else None
            began, reported = time.perf_counter(), variant != "baseline" or not shared.first

            def estimate(step: int, _: int) -> None:
                if step == 1 and not reported:
                    self.progress(self.estimated(time.perf_counter() - began), 0, 0)

            first = self._generate(mine[0], estimate).seconds if mine and warm else None
            for start in range(0, len(missing), shared.ranks.world):
                now = missing[start : start + shared.ranks.world]
                sample = None
                if shared.ranks.rank < len(now):

                    def on_step(step: int, _: int, at: int = done, n: int = len(now)) -> None:
                        self.progress(variant, at + n * step, total)

                    sample = self._generate(now[shared.ranks.rank], on_step, watched)
                done += len(now) * steps
                came = shared.gather((sample, str(report or "")))
                if came and warm:
                    note = {
                        "table": "\n\n".join(dict.fromkeys(table for _, table in came)),
                        "report": report.as_dict() if report else {},
                        "first_call_seconds": first,
                    }
                    store.write_json(f"runs/{variant}.json", note)
                for i, (one, _) in zip(now, came, strict=False):
                    assert one is not None
                    if variant == "baseline" and not one.latents.isfinite().all():
                        raise SamplingError(
                            "the unpatched model gave NaN or infinite latents",
                            got=f"seed {self.seed + i}, {self.keys[i]}",
                            remedy="Check the model's dtype and weights: there is nothing to "
                            "compare with",
                        )
                    store.save_sample(self.keys[i], variant, one)
        self.progress(variant, total, total)

    def estimated(self, seconds: float) -> str:
        """Return how long all will take if every step takes as long as the first, and what will be
        written."""
        count, steps = 3 * len(self.keys), self.settings.steps
        left = timedelta(seconds=round(seconds * count * steps / self.processes.ranks.world))
        device = self.pipe._execution_device
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
        memory = f" and {peak / 2**30:.2f} GiB" if peak else ""
        return (
            f"The first step took {seconds:.2g} s{memory}. "
            f"{count} videos of {steps} steps take {left} at this pace; decoding them comes after "
            f"that. {self.store.out} gets report.html, report.md, metrics.json and a folder of "
            "videos for each prompt."
        )

    def _generate(
        self, i: int, on_step: OnStep | None = None, watched: Watched | None = None
    ) -> Sample:
        if self.make is not None:
            made = sample_by(self.make, self.seed + i, self.pipe._execution_device, watched)
            if on_step is not None:
                on_step(1, 1)
            return made
        return sample_latents(
            self.pipe,
            self.encoded(i),
            seed=self.seed + i,
            settings=self.settings,
            keep_trajectory=True,
            on_step=on_step,
            watched=watched,
        )

    def sample_control(self) -> str:
        """Sample under the first exact backend that differs from the baseline; return its name."""
        known = self.processes.broadcast(lambda: self.store.read_json("runs/control.json"))
        refused = []
        for name in [known["backend"]] if known else candidates(self.pipe._execution_device):
            why = "" if known else self.processes.broadcast(partial(self._refuses, name))
            if not why:
                self.sample("control", self.unpatched(name), warm=False)
                return str(name)
            refused.append(f"{name} {why}")
        raise SamplingError(
            "no exact attention backend differs from the one the model uses",
            got="; ".join(refused),
            remedy="Compare in bf16, and without a diffusers attention backend set on the model",
        )

    def _refuses(self, name: str) -> str:
        """Return why a backend cannot be the control, empty if it can. Keep the sample then."""
        if self.make is None:
            self.embed(0)
        try:
            with self.unpatched(name):
                sample = self._generate(0)
        except torch.OutOfMemoryError:
            return "runs out of memory"
        except RuntimeError as error:
            # torch's words on a GPU and on a CPU. A fault of the device speaks of kernels, too.
            if not any(w in str(error) for w in ("No available kernel", "No viable backend")):
                raise
            return "cannot run this model"
        if not sample.latents.isfinite().all():
            return "gives NaN or infinity"
        if torch.equal(sample.latents, self.store.load_sample(self.keys[0], "baseline").latents):
            return "is bit-equal to the baseline"
        self.store.save_sample(self.keys[0], "control", sample)
        self.store.write_json("runs/control.json", {"backend": name})
        return ""

    def network(self, wanted: bool | None) -> tuple[NetworkNumber | None, str]:
        """Return the network number, measured once; or None and why, "" if it was left out on
        request."""
        if wanted is False:
            return None, ""
        known = self.store.read_json("runs/network.json")
        if known:
            return NetworkNumber(**{name: float(value) for name, value in known.items()}), ""
        if why := why_no_network(self.pipe):
            return None, why
        clean = self.store.load_sample(self.keys[0], "baseline").latents
        try:
            number = measure_network(
                self.pipe, self.encoded(0), clean, self.settings, self.config,
                attention_backend=self.attention_backend,
                progress=partial(self.progress, "network"),
            )  # fmt: skip
        except torch.OutOfMemoryError:
            return None, "one call of it in fp32 does not fit the device's memory"
        if number.unpatched == 0:
            return None, "unpatched it has no error: it runs in fp32"
        self.store.write_json("runs/network.json", asdict(number))
        return number, ""

    def fusion(self) -> float | None:
        """Return the change by fusing alone for the model's heads; None where our kernels do not
        run the attention."""
        if self.attention_backend is not None or self.config.attention == "sage":
            return None
        shape = network_of(self.pipe).config
        heads, head_dim = shape.num_attention_heads, shape.attention_head_dim
        device = self.pipe._execution_device
        return fusion_number(self.config, device, heads=heads, head_dim=head_dim)

    def concluded(
        self, network_number: bool | None, observer: Observer | None, control: str, command: str
    ) -> Comparison:
        """Measure, judge and write the report, when all samples are there."""
        if self.make is not None:
            shape = self.store.load_sample(self.keys[0], "baseline").latents.shape
            sizes = dict(zip(("num_frames", "height", "width"), shape[:3], strict=True))
            self.settings = replace(self.settings, **sizes)
        network, why = self.network(network_number)
        fusion = self.fusion()
        results = []
        for i, key in enumerate(self.keys):
            self.progress("videos", i, len(self.keys))
            known = PromptResult.finished(self.store, key)
            results.append(known or self._finish(i, observer))
        self.progress("videos", len(self.keys), len(self.keys))
        judgement = judge(
            [one.patched for one in results],
            [one.control for one in results if one.control],
            network_ratio=network.ratio if network else None,
            fusion=fusion,
            missing=[f"the network number ({why})"] if why else [],
            ran=self.ran(),
        )
        patch = self.store.read_json("runs/patched.json") or {}
        comparison = Comparison(
            judgement=judgement,
            results=tuple(results),
            network=network,
            fusion=fusion,
            truth=self.truth(results, judgement) if network else None,
            attention_backend=self.attention_backend,
            control_backend=control,
            baseline=_baseline(self.pipe, self.config),
            patch_report=patch.get("table")
            or f"nothing: the unpatched model, attention backend {self.attention_backend}",
            patch=patch.get("report", {}),
            times={variant: self.times(variant) for variant in get_args(Variant)},
            settings=self.settings,
            identity=self.identity,
            command=command,
            out=self.store.out,
        )
        write_report(comparison)
        return comparison

    def truth(self, results: Sequence[PromptResult], judgement: Verdict) -> Truth | None:
        """Measure the farthest video against that of the network in fp32, if videos miss a limit,
        few steps make it cheap and it fits into memory."""
        far = [one for one in judgement.checks if one.name in (MEDIAN, WORST) and not one.passed]
        cheap = self.settings.steps <= TRUTH_STEPS and not why_no_network(self.pipe)
        if not far or not cheap:
            return None
        i = min(range(len(results)), key=lambda i: results[i].patched.worst_psnr)
        key = self.keys[i]
        known = self.store.read_json("runs/truth.json")
        if known and known["key"] == key:
            return Truth(**known)
        try:
            with self.unpatched(), in_fp32(networks_of(self.pipe).values()):
                exact = self._generate(i, partial(self.progress, "truth")).latents
        except torch.OutOfMemoryError:
            return None
        latents = {one: self.store.load_sample(key, one).latents for one in get_args(Variant)}
        frames = self._decode(latents | {"truth": exact})
        found = Truth(key, results[i].prompt, **{
            one: frame_drift(frames[one], frames["truth"]).worst_psnr for one in latents
        })  # fmt: skip
        self.store.write_json("runs/truth.json", asdict(found))
        return found

    def ran(self) -> Ran | None:
        """Return in which form the blocks of the judged model ran; None if nobody counted."""
        videos = [self.store.load_sample(key, "patched").forms for key in self.keys]
        auto = self.config.attention == "auto" or self.attention_backend
        asked = f"{'int8' if auto else self.config.attention} attention"
        asked += " and int8 Linears" if self.config.linear != "as-is" else ""
        part = ["length"] if self.attention_backend is None else []
        part += ["wide-values"] if self.config.pv == "auto" else []
        return Ran.of(asked, part, videos)

    def _finish(self, i: int, observer: Observer | None) -> PromptResult:
        """Decode the three variants, measure, and write videos and sheet; the record comes last
        and marks the end."""
        key, prompt, fps = self.keys[i], self.sources[i].prompt, self.settings.fps
        samples = {name: self.store.load_sample(key, name) for name in get_args(Variant)}
        with Meter(self.pipe._execution_device) as meter:
            frames = self._decode({name: sample.latents for name, sample in samples.items()})
        runs = {}
        for name in ("patched", "control"):
            far = drift(frames[name], samples[name], frames["baseline"], samples["baseline"])
            # Nobody has seen the latents of a video that the caller made.
            runs[name] = far if self.make is None else replace(far, latents=math.nan)
        folder = self.store.folder(key)
        found, shown = show(frames, runs, folder, fps)
        write_mp4(shown["baseline"], folder / "baseline.mp4", fps)
        write_mp4(shown["patched"], folder / "patched.mp4", fps)
        write_mp4(shown["patched difference"], folder / "difference.mp4", fps)
        seen = None
        if observer is not None:
            seen = {name: observer.sees(frames[name]) for name in ("baseline", "patched")}
            seen["asked"] = observer.asks(prompt)
        result = PromptResult(
            key=key,
            prompt=prompt,
            seed=self.seed + i,
            fps=fps,
            decode_seconds=meter.seconds / len(samples),
            seen=seen,
            **found,
        )
        self.store.write_json(f"prompts/{key}/record.json", result.as_dict())
        return result

    def _decode(self, latents: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the frames [F, H, W, 3] of each variant, those of the patched one by a patched
        VAE.

        On a CPU together, which takes a third of the time, because torch has a fast convolution
        for batches only; elsewhere one after the other, which takes a third of the memory.
        """
        if self.make is not None:
            return latents
        others = {name: one for name, one in latents.items() if name != "patched"}
        with judged_vae(self.pipe, self.config, self.attention_backend):
            frames = {"patched": decode_latents(self.pipe, latents["patched"])[0]}
        if self.pipe._execution_device.type == "cpu":
            together = decode_latents(self.pipe, torch.cat(list(others.values())))
            return frames | dict(zip(others, together, strict=True))
        return frames | {name: decode_latents(self.pipe, one)[0] for name, one in others.items()}

    def times(self, variant: Variant) -> dict[str, float | None]:
        """Return seconds of the first call and of the median one, and peak memory."""
        samples = [self.store.load_sample(key, variant) for key in self.keys]
        note = self.store.read_json(f"runs/{variant}.json") or {}
        return {
            "first_call_seconds": note.get("first_call_seconds"),
            "median_seconds": statistics.median(s.seconds for s in samples),
            "peak_bytes": max((s.peak_bytes for s in samples if s.peak_bytes), default=None),
        }


def _given_frames(overrides: Mapping[str, object], **left_out: object) -> GivenFrames:
    """Return the settings of a comparison with `make`.

    Raises:
        ConfigError: Others are given than the frames a second.
    """
    wrong = sorted({*overrides} - {"fps"}) + [name for name, x in left_out.items() if x]
    if wrong:
        raise ConfigError(
            "compare with make",
            expected="no setting but fps, no image and no network number",
            got=", ".join(wrong),
            remedy="Give them to the pipeline inside of make",
        )
    return GivenFrames(**overrides)  # type: ignore[arg-type]


def candidates(device: torch.device) -> tuple[str, ...]:
    """Return the names of exact backends for the control, best first.

    "Native" is flash on a CPU and cuDNN or flash on a GPU, depending on the card; the first
    candidate whose result differs from native is the control. math comes last on a GPU, because it
    holds the whole score matrix.
    """
    return ("math", "flash") if device.type == "cpu" else ("flash", "efficient", "cudnn", "math")


def why_no_network(pipe: VideoPipeline) -> str:
    """Return why the network number cannot be measured, or "".

    Its truth is the network in fp32, upcast one block at a time, so its size is no reason; weights
    that are elsewhere while it does not run are one.
    """
    if pipe.transformer is None:
        return "a pipeline without a high-noise transformer"
    return "an offloaded transformer" if any(map(_offloads, pipe.transformer.modules())) else ""


def _offloads(module: torch.nn.Module) -> bool:
    """Return True if a hook of accelerate's or diffusers' keeps a module's weights elsewhere."""
    hooks = getattr(module.__dict__.get("_diffusers_hook"), "hooks", {})
    return "_hf_hook" in module.__dict__ or any("offload" in name for name in hooks)


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
    pipe: VideoPipeline, settings: Settings | GivenFrames, config: PatchConfig
) -> dict[str, Any]:
    """Return everything but prompts and seeds that decides what is generated."""
    return {
        "model": str(getattr(pipe, "name_or_path", None) or type(pipe).__name__),
        "weights": " ".join(map(_weights, networks_of(pipe).values())),
        "dtype": str(network_of(pipe).dtype).removeprefix("torch."),
        "device": device_name(pipe._execution_device),
        "settings": settings.as_dict(),
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
