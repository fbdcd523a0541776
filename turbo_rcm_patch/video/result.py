"""`Judged`: the result of `compare` and of `judge`, as facts for a terminal, the page and JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from turbo_rcm_patch import tiny
from turbo_rcm_patch.config import PatchConfig
from turbo_rcm_patch.text import as_typed, one_line
from turbo_rcm_patch.video.clips import Clip
from turbo_rcm_patch.video.load import SHIPPED
from turbo_rcm_patch.video.measures import NetworkNumber
from turbo_rcm_patch.video.report import without_places
from turbo_rcm_patch.video.verdict import FEW, FUSION_LIMIT, Verdict, Word, interval

#: Said beside the time of a patched model whose kernels did not run.
EMULATED: Final = "On a CPU the patch is no faster: plain torch stands in for its kernels"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What `compare` knows of the model whose videos it made.

    Attributes:
        network: Error of the network against fp32 truth, None if it was not measured.
        fusion: Fused against unfused in fp32, None where our kernels do not run the attention.
        attention_backend: The judged backend of diffusers; None if the patch was judged.
        control_backend: Exact attention backend of the control run.
        baseline: The model that the other two runs are compared with, in words.
        patch_report: The report of the patched model, as a table.
        patch: The same for JSON.
        times: Of "baseline" and "patched" the seconds of the first call, of the median later one
            and of its decoding, and peak memory.
        identity: Everything but prompts and seeds that decides what is generated, for JSON.
    """

    network: NetworkNumber | None
    fusion: float | None
    attention_backend: str | None
    control_backend: str
    baseline: str
    patch_report: str
    patch: dict[str, Any]
    times: dict[str, dict[str, float | None]]
    identity: dict[str, Any]

    @property
    def name(self) -> str:
        """The judged model in a word."""
        return self.attention_backend or "patched"

    @property
    def title(self) -> str:
        """The name of the model, without the folders that it lies in."""
        model = self.identity["model"]
        for name, attribute in SHIPPED.items():
            if Path(model) == getattr(tiny, attribute):
                return f"{name}, trained on moving shapes"
        return Path(model).name if Path(model).is_absolute() else model

    @property
    def emulated(self) -> bool:
        """True if plain torch ran in the place of the kernels, so that its time means nothing."""
        our_backend = self.attention_backend == "turbo_rcm_int8"
        on_cpu = not self.times["patched"]["peak_bytes"]
        return our_backend and on_cpu or self.patch.get("impl") == "reference"

    @property
    def judged_model(self) -> str:
        """The judged model in a few sentences."""
        if not self.patch:
            return f"the unpatched model on the attention backend {self.attention_backend}"
        options = str(PatchConfig(**self.identity["config"])).removeprefix("PatchConfig")
        return (
            f"the model after patch_model with {options.strip('()') or 'its defaults'}: "
            f"{self.patch['fused']} of its {len(self.patch['pairs'])} branches run fused with the "
            "sum into the residual"
        )

    @property
    def speed(self) -> str:
        """Seconds a video and peak memory, unpatched and changed, in words. The ratio is of a GPU
        alone."""
        runs = [self.times[name] for name in ("baseline", "patched")]
        old, new = (
            (run["median_seconds"] or 0.0) + (run["decode_seconds"] or 0.0) for run in runs
        )
        peaks = [run["peak_bytes"] / 2**30 for run in runs if run["peak_bytes"]]
        on_gpu = len(peaks) == len(runs)
        ratio = f" ({old / new:.2f} times as fast)" if on_gpu else ""
        text = f"{old:.3g} s a video unpatched, {new:.3g} s {self.name}{ratio}, after a first one,"
        text += f" denoised and decoded on {self.identity['device']}"
        if on_gpu:
            text += f"; peak memory while denoising {peaks[0]:.2f} and {peaks[1]:.2f} GiB"
        return text + f". {EMULATED}" * self.emulated

    @property
    def facts(self) -> dict[str, str]:
        """How the videos were made."""
        identity = self.identity
        sampler = ", ".join(
            f"{name}={value}"
            for name, value in identity["settings"].items()
            if value not in (None, "", ()) and name not in ("height", "width", "num_frames")
        )
        by_caller = "made by" in identity["settings"]  # `compare(..., make=)`
        return {
            "model": self.title,
            "machine": identity["device"],
            "sampler": sampler,
            "transformer": identity["dtype"] + "; VAE in float32" * (not by_caller),
            "baseline": self.baseline,
            "control": f"scaled_dot_product_attention on its {self.control_backend} backend",
            "judged": self.judged_model,
        }

    def as_dict(self) -> dict[str, object]:
        """Return what metrics.json has of the model."""
        network, fusion = self.network, self.fusion
        names = ("speed", "attention_backend", "control_backend", "baseline", "times", "patch")
        return {
            **{name: getattr(self, name) for name in (*names, "identity")},
            "patch_table": self.patch_report,
            "network": network and asdict(network) | {"ratio": network.ratio},
            "fusion": None
            if fusion is None
            else {"fused_vs_unfused": fusion, "limit": FUSION_LIMIT},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """The verdict on videos, with the numbers of each.

    Attributes:
        judgement: The verdict and its conditions.
        results: One entry per clip.
        command: The command line, or nothing.
        out: The folder with everything.
        versions: Of the packages.
        model: What `compare` knows of the model; None for videos that others have made.
        refused: Name of each clip that could not be judged -> why.
        places: "baseline", "candidate" and "control" -> the folder, without those it lies in.
        notes: More that a reader has to know, a sentence each.
    """

    judgement: Verdict
    results: tuple[Clip, ...]
    command: str
    out: Path
    versions: dict[str, str]
    model: ModelFacts | None = None
    refused: Mapping[str, str] = field(default_factory=dict)
    places: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def verdict(self) -> Word:
        """ "unchanged", "similar", "changed", "undecided" or "not judged" (see `Verdict`)."""
        return self.judgement.word

    @property
    def name(self) -> str:
        """The word for what was judged."""
        return self.model.name if self.model else "candidate"

    @property
    def noun(self) -> str:
        """The word for a clip."""
        return "prompt" if self.model else "clip"

    @property
    def scope(self) -> str:
        """How many clips the verdict is over, in words."""
        count = len(self.results)
        return f"over {count} {self.noun}{'s' * (count > 1)}"

    @property
    def sentences(self) -> list[str]:
        """What a terminal and the page say beside the verdict."""
        model, sentences = self.model, []
        if len(self.results) < FEW:
            sentences += [f"The PSNR of single {self.noun}s scatters by some 5 dB: give ten"]
        sentences += [str(self.judgement.ran)] if self.judgement.ran else []
        sentences += [model.speed] if model else []
        if model and model.network is None and not self.judgement.missing:
            sentences += ["The error of the network was not measured, as you asked"]
        sentences += self.notes
        return [as_typed(text) for text in sentences] if self.command else sentences

    @property
    def report(self) -> Path:
        """The HTML page."""
        return self.out / "report.html"

    @property
    def metrics(self) -> Path:
        """The JSON file."""
        return self.out / "metrics.json"

    @property
    def facts(self) -> dict[str, str]:
        """How the videos were made, or where they came from, without the folders of this
        machine."""
        sizes = {
            f"{clip.frames} frames of {clip.width} × {clip.height}, {clip.fps:g} fps"
            for clip in self.results
        }
        several = f"clips of {len(sizes)} lengths, sizes or frame rates"
        facts = {"command": self.command or "called from Python"}
        facts |= self.model.facts if self.model else self.places
        facts["video" if self.model else "clips"] = min(sizes) if len(sizes) == 1 else several
        facts["versions"] = ", ".join(f"{name} {text}" for name, text in self.versions.items())
        return {name: without_places(text) for name, text in facts.items()}

    def as_dict(self) -> dict[str, object]:
        """Return the contents of metrics.json."""
        ran = self.judgement.ran
        psnrs = {"patched": [clip.patched.psnr for clip in self.results]}
        psnrs["control"] = [clip.control.psnr for clip in self.results if clip.control]
        names = ("verdict", "refused", "places", "notes", "versions", "command")
        return {
            "schema": 1,
            **{name: getattr(self, name) for name in names},
            **(self.model.as_dict() if self.model else {}),
            "checks": [
                asdict(check) | {"passed": check.passed, "similar": check.similar}
                for check in self.judgement.checks
            ],
            "missing": self.judgement.missing,
            "ran": ran and ran.as_dict(),
            "median_interval": {run: interval(values) for run, values in psnrs.items()},
            f"{self.noun}s": [
                {name: value for name, value in clip.as_dict().items() if name != "runs"}
                for clip in self.results
            ],
        }

    def __str__(self) -> str:
        facts = self.facts
        lines = [f"verdict: {self.verdict}, {self.scope}"]
        lines += [f"  {sentence}" for sentence in self.sentences]
        lines += [f"  {'ok ' if c.passed else 'NO '} {c}" for c in self.judgement.checks]
        lines += [f"  --  not measured: {what}" for what in self.judgement.missing]
        for clip in self.results:
            control = f", control {clip.control.psnr:.1f}" if clip.control else ""
            lines += [f"  {clip.prompt}: PSNR {clip.patched.psnr:.1f} dB{control}"]
        models = ("judged", "baseline", "candidate", "control")
        lines += [f"{name}: {facts[name]}" for name in models if name in facts]
        lines += [f"could not be judged: {why}" for why in self.refused.values()]
        lines += [f"report: {self.report}"]
        # A name with a line end would write a line of its own, for instance another verdict.
        return "\n".join(map(one_line, lines))
