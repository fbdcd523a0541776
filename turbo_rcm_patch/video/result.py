"""`Judged`: the result of `compare` and of `judge`, in words and as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from turbo_rcm_patch import tiny
from turbo_rcm_patch.config import PatchConfig
from turbo_rcm_patch.text import one_line
from turbo_rcm_patch.video.clips import Clip
from turbo_rcm_patch.video.load import SHIPPED
from turbo_rcm_patch.video.measures import NetworkNumber
from turbo_rcm_patch.video.report import shown_command, without_places
from turbo_rcm_patch.video.verdict import FUSION_LIMIT, Verdict, Word, interval

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
        times: Of each run ("baseline", "patched", "control") the seconds of the first call, of
            the median one and of the median decoding, and peak memory.
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
        return model_in_words(self.identity["model"])

    @property
    def made_by_caller(self) -> bool:
        """True if a function of the caller made the videos (`compare(..., make=)`)."""
        return "made by" in self.identity["settings"]

    @property
    def guarded(self) -> bool:
        """True if a guard compared blocks while the judged videos were made."""
        return self.attention_backend is None and bool(self.identity["config"]["guard"])

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
            return f"The unpatched model on the attention backend {self.attention_backend}."
        options = str(PatchConfig(**self.identity["config"])).removeprefix("PatchConfig")
        return (
            f"The model after patch_model with {options.strip('()') or 'its defaults'}: "
            f"{self.patch['fused']} of its {len(self.patch['pairs'])} branches run fused with the "
            "sum into the residual."
        )

    @property
    def speed(self) -> str:
        """Seconds a video and peak memory, unpatched and changed, in words."""
        runs = [self.times[name] for name in ("baseline", "patched")]
        old, new = (
            (run["median_seconds"] or 0.0) + (run["decode_seconds"] or 0.0) for run in runs
        )
        text = f"{old:.3g} s a video unpatched, {new:.3g} s {self.name} ({old / new:.2f} times "
        text += f"as fast), denoised and decoded on {self.identity['device']}"
        peaks = [run["peak_bytes"] / 2**30 for run in runs if run["peak_bytes"]]
        if len(peaks) == len(runs):
            text += f"; peak memory while denoising {peaks[0]:.2f} and {peaks[1]:.2f} GiB"
        if self.emulated:
            text += f". {EMULATED}"
        return text

    @property
    def facts(self) -> dict[str, str]:
        """How the videos were made."""
        identity, backend = self.identity, self.attention_backend
        patch = ", ".join(f"{name}={value}" for name, value in identity["config"].items())
        sampler = ", ".join(
            f"{name}={value}"
            for name, value in identity["settings"].items()
            if value not in (None, "", ()) and name not in ("height", "width", "num_frames")
        )
        return {
            "model": self.title,
            "machine": identity["device"],
            "sampler": sampler,
            "transformer": identity["dtype"] + "; VAE in float32" * (not self.made_by_caller),
            "baseline": self.baseline,
            "control": f"scaled_dot_product_attention on its {self.control_backend} backend",
            "judged": f"attention backend {backend}, unpatched" if backend else f"patch: {patch}",
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
        agreement: See `verdict.agreement`; None if `compare` made the videos.
        places: "baseline", "candidate" and "control" -> the folder, without those it lies in.
    """

    judgement: Verdict
    results: tuple[Clip, ...]
    command: str
    out: Path
    versions: dict[str, str]
    model: ModelFacts | None = None
    refused: Mapping[str, str]
    agreement: float | None = None
    places: Mapping[str, str]

    @property
    def verdict(self) -> Word:
        """ "unchanged", "similar", "changed", "undecided" or "not judged" (see `Verdict`)."""
        return self.judgement.word

    @property
    def latents(self) -> bool:
        """True if the clips are latents, so that no video shows them."""
        return self.results[0].is_latents

    @property
    def name(self) -> str:
        """The word for what was judged."""
        return self.model.name if self.model else "candidate"

    @property
    def noun(self) -> str:
        """The word for a clip."""
        return "prompt" if self.model else "clip"

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
    def sizes(self) -> str:
        """The lengths and sizes of the clips, in words."""
        sizes = {
            f"{clip.frames} frames of {clip.width} × {clip.height}, {clip.fps:g} fps"
            for clip in self.results
        }
        several = f"clips of {len(sizes)} lengths, sizes or frame rates"
        return "latents" if self.latents else sizes.pop() if len(sizes) == 1 else several

    @property
    def facts(self) -> dict[str, str]:
        """How the videos were made, or where they came from, without the folders of this
        machine."""
        facts = {"command": shown_command(self.command) or "called from Python"}
        facts |= self.model.facts if self.model else self.places
        facts["video" if self.model else "clips"] = self.sizes
        facts["versions"] = ", ".join(f"{name} {text}" for name, text in self.versions.items())
        return {name: without_places(text) for name, text in facts.items()}

    @property
    def chips(self) -> list[str]:
        """The most important facts, in a few words each."""
        if (model := self.model) is None:
            count = f"{len(self.results)} clip{'s' * (len(self.results) > 1)}"
            places = [f"{name}: {place}" for name, place in self.places.items()]
            return [*places, count, self.sizes]
        chips = [model.title]
        if model.attention_backend:
            chips.append(f"attention backend {model.attention_backend}")
        chips += [model.identity["device"], self.sizes]
        if steps := model.identity["settings"].get("steps"):
            chips.append(f"{steps} steps")
        packages = [name for name in ("torch", "triton") if name in self.versions]
        return chips + [f"{name} {self.versions[name]}" for name in packages]

    def as_dict(self) -> dict[str, object]:
        """Return the contents of metrics.json."""
        ran = self.judgement.ran
        psnrs = {"patched": [clip.patched.psnr for clip in self.results]}
        psnrs["control"] = [clip.control.psnr for clip in self.results if clip.control]
        names = ("verdict", "agreement", "latents", "refused", "places", "versions", "command")
        return {
            "schema": 1,
            **{name: getattr(self, name) for name in names},
            **(self.model.as_dict() if self.model else {}),
            "checks": self.judgement.numbers,
            "missing": self.judgement.missing,
            "ran": ran and ran.as_dict(),
            "median_interval": {run: interval(values) for run, values in psnrs.items()},
            f"{self.noun}s": [
                {name: value for name, value in clip.as_dict().items() if name != "runs"}
                for clip in self.results
            ],
        }

    def __str__(self) -> str:
        lines = [f"verdict: {self.verdict}"]
        lines += [f"  {self.judgement.ran}"] if self.judgement.ran else []
        lines += [f"  {self.model.speed}"] if self.model else []
        if self.agreement is not None:
            lines += [f"  the same word in {self.agreement:.0%} of resamples of the clips"]
        lines += [f"  {'ok ' if c.passed else 'NO '} {c}" for c in self.judgement.checks]
        lines += [f"  --  not measured: {what}" for what in self.judgement.missing]
        lines += self._model_lines(self.model) if self.model else self._clip_lines()
        lines += [f"could not be judged: {why}" for why in self.refused.values()]
        lines += [f"report:  {self.report}", f"short:   {self.short_report}"]
        # A name with a line end would write a line of its own, for instance another verdict.
        return "\n".join(map(one_line, lines))

    def _model_lines(self, model: ModelFacts) -> list[str]:
        lines = []
        if model.network is None and not self.judgement.missing:
            lines += ["  --  not measured, as you asked: the network number"]
        if model.attention_backend:
            lines += [f"judged: the unpatched model, attention backend {self.name!r}"]
        lines += [f"baseline: {model.baseline}"]
        return [*lines, f"control: exact attention on the {model.control_backend!r} backend"]

    def _clip_lines(self) -> list[str]:
        unit, lines = "SNR" if self.latents else "PSNR", []
        for clip in self.results:
            control = f", control {clip.control.psnr:.1f}" if clip.control else ""
            lines += [f"  {clip.prompt}: {unit} {clip.patched.psnr:.1f} dB{control}"]
        return lines


def model_in_words(model: str) -> str:
    """Return the name of a model, without the folders that it lies in."""
    for name, attribute in SHIPPED.items():
        if Path(model) == getattr(tiny, attribute):
            return f"{name}, trained on moving shapes"
    return Path(model).name if Path(model).is_absolute() else model
