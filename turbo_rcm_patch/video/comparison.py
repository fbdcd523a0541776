"""Generate baseline, patched and control videos from the same noise, and give a verdict.

Three passes over the prompts leave latents on disk, a fourth decodes and measures. Each finished
piece is kept, so the same command continues where it was stopped. The model is patched during the
second pass only. Several processes share the three passes; the first of them alone reads and
writes the folder, and does the rest.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, Literal, get_args

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from turbo_rcm_patch.config import PatchConfig
from turbo_rcm_patch.errors import SamplingError
from turbo_rcm_patch.extras import require
from turbo_rcm_patch.patching import patched, sla_as_defined
from turbo_rcm_patch.patching.sla import attached_proj_l
from turbo_rcm_patch.video.environment import code_digest, device_name, versions
from turbo_rcm_patch.video.families import VideoPipeline, family_of
from turbo_rcm_patch.video.filters import filtered
from turbo_rcm_patch.video.generation import (
    Conditioning,
    Meter,
    Sample,
    check_seed,
    decode_latents,
    encode,
    sample_latents,
    settings_for,
)
from turbo_rcm_patch.video.many import Processes
from turbo_rcm_patch.video.measures import (
    Drift,
    NetworkNumber,
    drift,
    fusion_number,
    measure_network,
)
from turbo_rcm_patch.video.progress import Progress
from turbo_rcm_patch.video.report import write_report
from turbo_rcm_patch.video.settings import Settings
from turbo_rcm_patch.video.source import ImageLike, Source, digest_of, sources_of
from turbo_rcm_patch.video.store import Store, check_out, in_use, reading
from turbo_rcm_patch.video.verdict import FUSION_LIMIT, Verdict, Word, judge
from turbo_rcm_patch.video.video import (
    SEEK_EVERY,
    amplified_difference,
    choose_gain,
    contact_sheet,
    enlarge,
    find_ffmpeg,
    pane_size,
    panes,
    side_by_side,
    write_mp4,
)

Variant = Literal["baseline", "patched", "control"]

_BACKENDS: Final = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


@dataclass(frozen=True, slots=True)
class Observer:
    """Judges videos of a world it knows. It has no part in the verdict.

    Attributes:
        asks: What a prompt asks for, e.g. "red circle, right".
        sees: What frames [F, H, W, 3] in 0..1 show, in the same words.
    """

    asks: Callable[[str], str]
    sees: Callable[[torch.Tensor], str]


@dataclass(frozen=True, slots=True)
class Seen:
    """What the observer says of one prompt.

    Attributes:
        asked: What the prompt asks for.
        baseline: What the unpatched model's video shows.
        patched: What the patched model's video shows.
    """

    asked: str
    baseline: str
    patched: str


@dataclass(frozen=True, slots=True)
class PromptResult:
    """Numbers of one prompt.

    Attributes:
        key: Name of its folder in `prompts/`.
        prompt: The prompt.
        seed: The seed.
        patched: Distance of the patched video from the baseline.
        control: Distance of the control video from the baseline.
        decode_seconds: Mean time of one decoding.
        gain: By how much the videos of differences are amplified.
        unmeasured: Why a measure of ffmpeg is missing, else empty.
        seen: What an observer says of the videos, if there was one.
    """

    key: str
    prompt: str
    seed: int
    patched: Drift
    control: Drift
    decode_seconds: float
    gain: int
    unmeasured: str = ""
    seen: Seen | None = None

    def as_dict(self) -> dict[str, object]:
        """For JSON, worst frames included."""
        drifts = {"patched": self.patched.as_dict(), "control": self.control.as_dict()}
        return asdict(self) | drifts


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of a comparison.

    Attributes:
        judgement: The verdict and the conditions behind it.
        results: One entry per prompt.
        network: Error of the network against fp32 truth, None if it was not measured.
        fusion: Fused against unfused in fp32, None where no kernel of ours runs the attention.
        control_backend: Exact attention backend of the control run.
        baseline: What the other two runs are compared with, in words.
        patch_report: What was patched, as a table.
        patch: The same for JSON.
        times: Seconds of the first call and of the median one, and peak memory, of each variant.
        settings: How the videos were sampled.
        identity: Everything but prompts and seeds that decides what is generated, for JSON.
        command: The command line, or nothing.
        out: The folder with everything.
    """

    judgement: Verdict
    results: tuple[PromptResult, ...]
    network: NetworkNumber | None
    fusion: float | None
    control_backend: str
    baseline: str
    patch_report: str
    patch: dict[str, Any]
    times: dict[Variant, dict[str, float | None]]
    settings: Settings
    identity: dict[str, Any]
    command: str
    out: Path

    @property
    def verdict(self) -> Word:
        """ "unchanged", "similar", "changed" or "undecided" (see `Verdict`)."""
        return self.judgement.word

    @property
    def report(self) -> Path:
        """The HTML page."""
        return self.out / "report.html"

    @property
    def short_report(self) -> Path:
        """The short form of the page in Markdown, to paste."""
        return self.out / "report.md"

    @property
    def metrics(self) -> Path:
        """The JSON file."""
        return self.out / "metrics.json"

    @property
    def seen(self) -> dict[str, int] | None:
        """How many videos an observer looked at, how many show what was asked, and how many show
        the same before and after; None if there was no observer."""
        seen = [one.seen for one in self.results if one.seen]
        if not seen:
            return None
        return {
            "prompts": len(seen),
            "baseline": sum(one.baseline == one.asked for one in seen),
            "patched": sum(one.patched == one.asked for one in seen),
            "same": sum(one.patched == one.baseline for one in seen),
        }

    def as_dict(self) -> dict[str, object]:
        """What metrics.json holds."""
        checks = self.judgement.checks
        network, fusion = self.network, self.fusion
        return {
            "schema": 1,
            "verdict": self.verdict,
            "checks": [
                asdict(check) | {"passed": check.passed, "similar": check.similar}
                for check in checks
            ],
            "control_backend": self.control_backend,
            "times": self.times,
            "prompts": [one.as_dict() for one in self.results],
            "patch": self.patch,
            "patch_table": self.patch_report,
            "identity": self.identity,
            "command": self.command,
            "baseline": self.baseline,
            "missing": self.judgement.missing,
            "network": asdict(network) | {"ratio": network.ratio} if network else None,
            "fusion": None
            if fusion is None
            else {"fused_vs_unfused": fusion, "limit": FUSION_LIMIT},
        }

    def __str__(self) -> str:
        lines = [f"verdict: {self.verdict}"]
        lines += [f"  {'ok ' if c.passed else 'NO '} {c}" for c in self.judgement.checks]
        lines += [f"  --  not measured: {what}" for what in self.judgement.missing]
        if self.network is None and not self.judgement.missing:
            lines += ["  --  not measured, as you asked: the network number"]
        if seen := self.seen:
            lines += [
                f"detector: {seen['baseline']} of {seen['prompts']} videos show what was asked "
                f"for without the patch, {seen['patched']} with it"
            ]
        lines += [f"baseline: {self.baseline}"]
        lines += [f"control: exact attention on the {self.control_backend!r} backend"]
        lines += [f"report:  {self.report}", f"short:   {self.short_report}"]
        return "\n".join(lines)


def compare(
    pipe: VideoPipeline,
    prompts: str | Source | Sequence[str | Source],
    *,
    out: str | Path,
    images: ImageLike | Sequence[ImageLike] | None = None,
    seed: int = 0,
    config: PatchConfig | None = None,
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
        pipe: An unpatched pipeline, with the transformer in bf16 and the VAE in fp32.
        prompts: One or many, each a text or a `Source`. Prompt i uses seed + i.
        images: For image to video the first frame, one for all prompts or one for each.
        out: Folder for videos, plots, metrics.json, report.html and report.md. Finished prompts in
            it are kept, and so are files that no comparison wrote.
        seed: Seed of initial noise and re-noising.
        config: How to patch.
        settings: How to sample; by default as the model's folder says.
        network_number: Whether to measure the network's error against fp32. None measures it if
            it can be measured: the transformer is not offloaded, and one call in fp32 fits into
            memory. If not, the verdict is not "unchanged" and says why. False leaves the number
            out.
        fresh: Start again: use nothing that comparisons wrote into `out`. Each file stays until it
            is replaced, the others until this comparison is done.
        observer: Says what the videos show. The report shows it; the verdict ignores it.
        progress: Called as the work proceeds.
        command: The command line, for the report.
        processes: Those that share the work, each of which calls this with the same arguments and
            its own pipeline; by default this one alone.
        **overrides: Fields of `Settings` by name.

    Returns:
        The verdict and the numbers behind it, on every process.

    Raises:
        SamplingError: Among others: another process failed.
    """
    require("report", "compare")
    config = config or PatchConfig()
    sources = sources_of(prompts, images)
    settings = settings_for(pipe, settings, **overrides)
    check_seed(seed, len(sources))
    family_of(pipe).check(type(pipe).__name__, sources)
    processes = processes or Processes()
    processes.from_first(lambda: check_out(out, fresh=fresh))
    find_ffmpeg()
    why_no_network(pipe, network_number)
    with ExitStack() as until_done:
        processes.from_first(lambda: until_done.enter_context(in_use(out)))
        with sla_as_defined(pipe, config.sla_topk) as sparse:
            baseline = _baseline(sparse, config)
        with patched(pipe, config):
            pass  # what cannot be patched fails here, before hours of baseline
        run = _Run(
            pipe,
            sources,
            seed,
            settings,
            config,
            out,
            fresh,
            progress or (lambda *_: None),
            processes,
        )
        run.sample("baseline", run.unpatched())
        processes.from_first(run.check_baseline)
        run.sample_patched()
        backend = run.sample_control()
        return processes.from_first(
            lambda: run.concluded(network_number, observer, backend, baseline, command)
        )


class _Run:
    """The work of one comparison, piece by piece; what an earlier run has finished is skipped."""

    def __init__(
        self,
        pipe: VideoPipeline,
        sources: Sequence[Source],
        seed: int,
        settings: Settings,
        config: PatchConfig,
        out: str | Path,
        fresh: bool,
        progress: Progress,
        processes: Processes,
    ) -> None:
        self.pipe, self.settings, self.config = pipe, settings, config
        self.progress, self.processes = progress, processes
        self.sources, self.prompts = sources, [source.prompt for source in sources]
        self.seeds = [seed + i for i in range(len(sources))]
        inputs = inputs_of(sources, seed)
        self.keys = list(inputs)
        self.identity = identify(pipe, settings, config) | {"inputs": inputs}
        processes.from_first(partial(self._open, out, fresh))
        self.digests = list(inputs.values())
        #: What source i is encoded to, once for all passes.
        self.encode = cache(lambda i: encode(pipe, sources[i], settings).kept())

    def _open(self, out: str | Path, fresh: bool) -> None:
        #: What is finished; the first process alone has it.
        self.store = Store(out, self.identity, fresh=fresh)

    def encoded(self, i: int) -> Conditioning:
        """Source i, encoded."""
        media = self.sources[i].media
        if digest_of(media) != self.digests[i]:
            raise SamplingError(
                f"what the video of prompt {i + 1} is made from changed during the comparison",
                expected="the same pixels for all three videos",
                got=", ".join(media),
                remedy="Start again, and leave the files alone until it is done",
            )
        return self.encode(i).again(self.pipe._execution_device, media)

    def _without(self, variant: Variant) -> list[int]:
        """The prompts without such a sample."""
        return [i for i, key in enumerate(self.keys) if not self.store.has_sample(key, variant)]

    @contextmanager
    def unpatched(self, backend: str | None = None) -> Iterator[None]:
        """Exact attention: the authors', or SLA's definition where it holds a proj_l; on one of
        `_BACKENDS` if named."""

        exact = sdpa_kernel(_BACKENDS[backend]) if backend else nullcontext()
        with sla_as_defined(self.pipe, self.config.sla_topk), exact:
            yield

    def sample(
        self,
        variant: Variant,
        backend: AbstractContextManager[None],
        *,
        warm: bool = True,
        note: Callable[[], dict[str, object]] = dict,
    ) -> None:
        """Generate what is missing, each group of processes its share; the first call is timed
        apart and thrown away.

        `note` is kept beside the samples, before each of them.
        """
        ours = self.processes
        missing = ours.from_first(lambda: self._without(variant))
        mine, steps = ours.share(missing), self.settings.steps_run
        total = len(self.prompts) * steps
        done = total - len(missing) * steps
        self.progress(variant, done, total)
        for i in mine:  # outside the backend: only the transformer's attention differs
            self.encode(i)
        before = ours.from_first(lambda: self.store.read_json(f"runs/{variant}.json"))
        with backend:
            kept: dict[str, object] = {}
            if mine and warm:
                kept["first_call_seconds"] = self._generate(mine[0]).seconds
            for start in range(0, len(missing), ours.ranks.world):
                now = missing[start : start + ours.ranks.world]
                sample = None
                if ours.ranks.rank < len(now):
                    on_step = partial(self._stepped, variant, done, len(now), total)
                    sample = self._generate(now[ours.ranks.rank], on_step)
                done += len(now) * steps
                came = ours.gathered((sample, note()))
                if came and warm:
                    self.store.write_json(f"runs/{variant}.json", kept | _together(came, before))
                for i, (one, _) in zip(now, came, strict=False):
                    assert one is not None
                    self.store.save_sample(self.keys[i], variant, one)
        self.progress(variant, total, total)

    def _stepped(
        self, variant: Variant, before: int, videos: int, total: int, step: int, _: int
    ) -> None:
        self.progress(variant, before + videos * step, total)

    def _generate(self, i: int, on_step: Callable[[int, int], None] | None = None) -> Sample:
        return sample_latents(
            self.pipe,
            self.encoded(i),
            seed=self.seeds[i],
            settings=self.settings,
            keep_trajectory=True,
            on_step=on_step,
        )

    def check_baseline(self) -> None:
        """Raise if the unpatched model has nothing to compare with."""
        for seed, key in zip(self.seeds, self.keys, strict=True):
            if not torch.isfinite(self.store.load_sample(key, "baseline").latents).all():
                raise SamplingError(
                    f"the unpatched model gave NaN or infinite latents (seed {seed}, {key})",
                    remedy="Check dtype and weights of the model; there is nothing to compare "
                    "with",
                )

    def sample_patched(self) -> None:
        """The patched pass. The model is as it was afterwards, also after an exception."""

        if not self.processes.from_first(lambda: self._without("patched")):
            self.progress("patched", 1, 1)
            return
        with patched(self.pipe, self.config) as report:
            self.sample(
                "patched",
                nullcontext(),
                note=lambda: {"table": str(report), "report": report.as_dict()},
            )

    def sample_control(self) -> str:
        """The control pass under the first exact backend that differs from the baseline; returns
        its name.
        """
        first = self.processes.from_first
        known = first(lambda: self.store.read_json("runs/control.json"))
        refused = []
        for name in [known["backend"]] if known else candidates(self.pipe._execution_device):
            if known is None and (why := self._refuses(name)):
                refused.append(f"{name} {why}")
                continue
            self.sample("control", self.unpatched(name), warm=False)
            first(partial(self._check_control, name))
            return str(name)
        raise SamplingError(
            "no exact attention backend differs from the one the model uses",
            got="; ".join(refused),
            remedy="Compare in bf16, and without a diffusers attention backend set on the model",
        )

    def _check_control(self, name: str) -> None:
        for key in self.keys:
            if self._equals_baseline(key, self.store.load_sample(key, "control")):
                raise SamplingError(
                    f"the control run of {key} under {name!r} equals the baseline in every bit",
                    remedy="Start again with --fresh; was the model changed since?",
                )

    def _refuses(self, name: str) -> str:
        """Why a backend cannot be the control, empty if it can."""
        sample, why = None, ""
        if self.processes.first:
            self.encode(0)
            try:
                with self.unpatched(name):
                    sample = self._generate(0)
            except torch.OutOfMemoryError:
                why = "runs out of memory"
            except RuntimeError as error:
                # Every fault of the device speaks of kernels, and one of an exchange of backends.
                fault = type(error).__name__ == "AcceleratorError" or "CUDA error" in str(error)
                fault |= isinstance(error, getattr(torch.distributed, "DistError", ()))
                if fault or ("kernel" not in str(error) and "backend" not in str(error)):
                    raise
                why = "cannot run this model"

        def decide() -> str:
            if sample is None:
                return why
            if not sample.latents.isfinite().all():
                return "gives NaN or infinity"
            if self._equals_baseline(self.keys[0], sample):
                return "is bit-equal to the baseline"
            self.store.save_sample(self.keys[0], "control", sample)
            self.store.write_json("runs/control.json", {"backend": name})
            return ""

        return self.processes.from_first(decide)

    def _equals_baseline(self, key: str, sample: Sample) -> bool:
        return torch.equal(sample.latents, self.store.load_sample(key, "baseline").latents)

    def network(self, wanted: bool | None) -> tuple[NetworkNumber | None, str]:
        """The network number, measured once; or None and why, "" if it was left out on request."""
        if wanted is False:
            return None, ""
        known = self.store.read_json("runs/network.json")
        if known:
            return NetworkNumber(**{name: float(value) for name, value in known.items()}), ""
        why = why_no_network(self.pipe, wanted)
        if why:
            return None, why
        self.progress("network", 0, 1)
        clean = self.store.load_sample(self.keys[0], "baseline").latents
        conditioning = self.encoded(0)
        try:
            number = measure_network(self.pipe, conditioning, clean, self.settings, self.config)
        except torch.OutOfMemoryError:
            return None, "one call of it in fp32 does not fit the device's memory"
        if number.unpatched == 0:
            return None, "unpatched it has no error: it runs in fp32"
        self.store.write_json("runs/network.json", asdict(number))
        self.progress("network", 1, 1)
        return number, ""

    def fusion(self) -> float | None:
        """What fusing alone changes, for the model's head shape; None for other people's
        attention.
        """
        if self.config.attention == "sage":
            return None
        shape = (self.pipe.transformer or self.pipe.transformer_2).config
        return fusion_number(
            self.config,
            self.pipe._execution_device,
            heads=shape.num_attention_heads,
            head_dim=shape.attention_head_dim,
        )

    def results(self, observer: Observer | None) -> tuple[PromptResult, ...]:
        """Videos and numbers of every prompt."""
        found = []
        for i, key in enumerate(self.keys):
            self.progress("videos", i, len(self.keys))
            found.append(self._finished(key) or self._finish(i, observer))
        self.progress("videos", len(self.keys), len(self.keys))
        return tuple(found)

    def concluded(
        self,
        network_number: bool | None,
        observer: Observer | None,
        backend: str,
        baseline: str,
        command: str,
    ) -> Comparison:
        """Measure, judge and write the report, when all samples are there."""
        network, why = self.network(network_number)
        missing = [f"the network number ({why})"] if why else []
        fusion = self.fusion()
        results = self.results(observer)
        judgement = judge(
            [one.patched for one in results],
            [one.control for one in results],
            network_ratio=network.ratio if network else None,
            fusion=fusion,
            missing=missing,
        )
        patch = self.store.read_json("runs/patched.json") or {}
        comparison = Comparison(
            judgement=judgement,
            results=results,
            network=network,
            fusion=fusion,
            control_backend=backend,
            baseline=baseline,
            patch_report=str(patch.get("table", "")),
            patch=patch.get("report", {}) | {k: patch[k] for k in ("earlier",) if k in patch},
            times={variant: self.times(variant) for variant in get_args(Variant)},
            settings=self.settings,
            identity=self.identity,
            command=command,
            out=self.store.out,
        )
        write_report(comparison)
        return comparison

    def _finished(self, key: str) -> PromptResult | None:
        """The numbers of a finished prompt, None if it is not finished."""
        name = f"prompts/{key}/record.json"
        record = self.store.read_json(name) if self.store.is_finished(key) else None
        if record is None:
            return None
        with reading(self.store.out / name):
            return PromptResult(
                key=key,
                prompt=str(record["prompt"]),
                seed=int(record["seed"]),
                patched=Drift.from_dict(record["patched"]),
                control=Drift.from_dict(record["control"]),
                decode_seconds=float(record["decode_seconds"]),
                gain=int(record["gain"]),
                unmeasured=str(record["unmeasured"]),
                seen=Seen(**record["seen"]) if record.get("seen") else None,
            )

    def _finish(self, i: int, observer: Observer | None) -> PromptResult:
        """Decode the three variants, measure, and write videos and sheet; the record comes last
        and marks the end.
        """
        key, prompt, fps = self.keys[i], self.prompts[i], self.settings.fps
        samples = {name: self.store.load_sample(key, name) for name in get_args(Variant)}
        with Meter(self.pipe._execution_device) as meter:
            frames = self._decode({name: sample.latents for name, sample in samples.items()})
        changed = ("patched", "control")
        drifts, missing = {}, set()
        for name in changed:
            found = filtered(frames[name], frames["baseline"], fps)
            far = drift(frames[name], samples[name], frames["baseline"], samples["baseline"])
            drifts[name] = replace(far, vmaf=found.vmaf, xpsnr=found.xpsnr)
            missing |= {found.why} - {""}
        gain = choose_gain([(frames[n] - frames["baseline"]).abs() for n in changed])
        baseline_video, patched_video = enlarge(frames["baseline"]), enlarge(frames["patched"])
        patched_difference, control_difference = (
            enlarge(amplified_difference(frames[n], frames["baseline"], gain), "nearest")
            for n in changed
        )
        rows = {
            "baseline": baseline_video,
            "patched": patched_video,
            f"patched - baseline, x {gain}": patched_difference,
            f"control - baseline, x {gain}": control_difference,
        }
        folder = self.store.folder(key)
        write_mp4(baseline_video, folder / "baseline.mp4", fps)
        write_mp4(patched_video, folder / "patched.mp4", fps)
        write_mp4(patched_difference, folder / "difference.mp4", fps)
        write_mp4(side_by_side(rows), folder / "side_by_side.mp4", fps)
        shown = {
            "baseline": baseline_video,
            "patched": patched_video,
            "control": enlarge(frames["control"]),
            "patched difference": patched_difference,
            "control difference": control_difference,
        }
        pane = pane_size(self.settings.height, self.settings.width)
        write_mp4(panes(shown, pane), folder / "panes.mp4", fps, seek_every=SEEK_EVERY)
        contact_sheet(rows, folder / "sheet.png")
        seen = None
        if observer is not None:
            both = (observer.sees(frames[name]) for name in ("baseline", "patched"))
            seen = Seen(observer.asks(prompt), *both)
        result = PromptResult(
            key,
            prompt,
            self.seeds[i],
            drifts["patched"],
            drifts["control"],
            decode_seconds=meter.seconds / len(samples),
            gain=gain,
            unmeasured="; ".join(sorted(missing)),
            seen=seen,
        )
        self.store.write_json(f"prompts/{key}/record.json", result.as_dict())
        return result

    def _decode(self, latents: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Frames [F, H, W, 3] of each variant.

        On a CPU together, which takes a third of the time, because torch has a fast convolution
        for batches only; elsewhere one after the other, which takes a third of the memory.
        """
        if self.pipe._execution_device.type == "cpu":
            together = decode_latents(self.pipe, torch.cat(list(latents.values())))
            return dict(zip(latents, together, strict=True))
        return {name: decode_latents(self.pipe, one)[0] for name, one in latents.items()}

    def times(self, variant: Variant) -> dict[str, float | None]:
        """Seconds of the first call and of the median one, and peak memory."""
        samples = [self.store.load_sample(key, variant) for key in self.keys]
        peaks = [s.peak_bytes for s in samples if s.peak_bytes is not None]
        note = self.store.read_json(f"runs/{variant}.json") or {}
        return {
            "first_call_seconds": note.get("first_call_seconds"),
            "median_seconds": statistics.median(s.seconds for s in samples),
            "peak_bytes": max(peaks) if peaks else None,
        }


def candidates(device: torch.device) -> tuple[str, ...]:
    """Names of exact backends for the control, best first.

    "Native" is flash on a CPU and cuDNN or flash on a GPU, depending on the card; the first
    candidate whose result differs from native is the control. math comes last on a GPU, because it
    holds the whole score matrix.
    """
    return ("math", "flash") if device.type == "cpu" else ("flash", "efficient", "cudnn", "math")


def why_no_network(pipe: VideoPipeline, wanted: bool | None) -> str:
    """Why the network number cannot be measured, or "".

    Its truth is the network in fp32, upcast one block at a time, so its size is no reason; that
    its weights are somewhere else when it does not run is one.

    Args:
        pipe: The pipeline.
        wanted: Whether it was asked for; False leaves it out, which is no reason either.

    Raises:
        SamplingError: It was asked for, and cannot be measured.
    """
    if wanted is False:
        return ""
    network = pipe.transformer
    reason = ""
    if network is None:
        reason = "a pipeline without a high-noise transformer"
    elif any(map(_offloads, network.modules())):
        reason = "an offloaded transformer"
    if reason and wanted:
        raise SamplingError(
            "the network number",
            expected="a transformer that stays on one device",
            got=reason,
            remedy="Leave out --network-number, or load without offloading",
        )
    return reason


def _offloads(module: torch.nn.Module) -> bool:
    """Whether a hook of accelerate's or diffusers' keeps its weights elsewhere."""
    hooks = getattr(module.__dict__.get("_diffusers_hook"), "hooks", {})
    return "_hf_hook" in module.__dict__ or any("offload" in name for name in hooks)


def _together(
    came: Sequence[tuple[object, dict[str, object]]], before: Mapping[str, Any] | None
) -> dict[str, object]:
    """The notes of all groups: that of the first, the tables that differ from its own, and those
    of the runs that made the samples before."""
    notes = [*([dict(before)] if before else []), *(note for _, note in came)]
    tables = list(dict.fromkeys(str(note["table"]) for note in notes if "table" in note))
    joined: dict[str, object] = {"table": "\n\n".join(tables)} if tables else {}
    if before and "report" in before:
        joined["earlier"] = [*before.get("earlier", ()), before["report"]]
    return came[0][1] | joined


def _baseline(sparse: int, config: PatchConfig) -> str:
    if not sparse:
        return "the unpatched model"
    return (
        f"the unpatched model, with SLA computed by its definition in plain torch in {sparse} "
        f"attentions that hold a proj_l (sla_topk={config.sla_topk:g}); the control changes the "
        "backend of the other attentions"
    )


def identify(pipe: VideoPipeline, settings: Settings, config: PatchConfig) -> dict[str, Any]:
    """Everything but prompts and seeds that decides what is generated."""
    networks = [one for one in (pipe.transformer, _second(pipe)) if one is not None]
    network = networks[0]
    # A retrained model of the same name differs in some values of its parameters; a network with
    # SLA's proj_l from one without, or with another, in the sums of these.
    proj_l = [attached_proj_l(module) for one in networks for module in one.modules()]
    return {
        "model": str(getattr(pipe, "name_or_path", None) or type(pipe).__name__),
        "weights": " ".join(_weights(one) for one in networks),
        "adapters": [_adapters(one) for one in networks],
        "sla": _sums(one[0] for one in proj_l if one is not None),
        "dtype": str(network.dtype).removeprefix("torch."),
        "device": device_name(pipe._execution_device),
        "settings": settings.as_dict(),
        "config": asdict(config),
        "versions": versions(),
        "code": code_digest(),
    }


def inputs_of(sources: Sequence[Source], seed: int) -> dict[str, str]:
    """The name of each prompt in a `Store`, with the digest of what it comes with."""
    return {Store.key(one.prompt, seed + i): one.digest for i, one in enumerate(sources)}


def _second(pipe: VideoPipeline) -> torch.nn.Module | None:
    second: torch.nn.Module | None = getattr(pipe, "transformer_2", None)
    return second


def _adapters(network: torch.nn.Module) -> str:
    """A digest of which adapters are on, and how strongly, which no weight shows."""
    found = [
        (name, str(getattr(module, "active_adapters", "")), str(getattr(module, "scaling", "")),
         str(getattr(module, "disable_adapters", "")), str(getattr(module, "merged", "")))
        for name, module in network.named_modules()
        if hasattr(module, "active_adapters") and hasattr(module, "scaling")
    ]  # fmt: skip
    return blake2b(repr(found).encode(), digest_size=8).hexdigest() if found else ""


def _weights(network: torch.nn.Module) -> str:
    """A digest of the names and shapes of a network's parameters and of some of their values."""
    digest = blake2b(digest_size=8)
    for name, parameter in sorted(network.named_parameters()):
        digest.update(f"{name} {list(parameter.shape)} {parameter.dtype}".encode())
        if not parameter.is_meta and parameter.numel():
            some = parameter.detach().flatten()[:: max(1, parameter.numel() // 16)][:16]
            digest.update(repr(some.double().tolist()).encode())
    return digest.hexdigest()


def _sums(tensors: Iterator[torch.Tensor]) -> str:
    return " ".join(f"{float(one.sum()):.6g}" for one in tensors)
