"""Baseline, patched and control from the same noise, over many prompts, with a verdict.

Three passes over the prompts leave latents on disk, a fourth decodes and measures. Each finished
piece is kept, so the same command continues where it was stopped. The model is patched during the
second pass only.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from turbo_rcm_patch.config import PatchConfig
from turbo_rcm_patch.errors import ControlError, SamplingError
from turbo_rcm_patch.sampling import control as control_backends
from turbo_rcm_patch.sampling.environment import code_digest, device_name, versions
from turbo_rcm_patch.sampling.generate import (
    Conditioning,
    Sample,
    encode_prompt,
    sample_latents,
    settings_for,
)
from turbo_rcm_patch.sampling.measure import PromptResult, finish_prompt, read_prompt
from turbo_rcm_patch.sampling.network import NetworkNumber, measure_network
from turbo_rcm_patch.sampling.settings import Settings
from turbo_rcm_patch.sampling.store import Store, from_json
from turbo_rcm_patch.sampling.verdict import Verdict, judge

if TYPE_CHECKING:
    from diffusers import WanPipeline

__all__ = ["Comparison", "Progress", "Variant", "compare"]

Variant = Literal["baseline", "patched", "control"]

#: Called with (what is being done, units done, units in all).
Progress = Callable[[str, int, int], None]

#: Networks up to this many parameters get their network number without being asked: it needs an
#: fp32 copy.
SMALL_NETWORK = 200_000_000


@dataclass(frozen=True, slots=True)
class Comparison:
    """What a comparison found.

    Attributes:
        verdict: "unchanged" or "changed".
        judgement: The conditions behind it.
        results: One entry a prompt.
        network: Error of the network against fp32 truth, None if it was not measured.
        control_backend: Exact attention backend of the control run.
        patch_report: What was patched, as a table.
        report: The HTML page.
        metrics: The JSON file.
    """

    verdict: Literal["unchanged", "changed"]
    judgement: Verdict
    results: tuple[PromptResult, ...]
    network: NetworkNumber | None
    control_backend: str
    patch_report: str
    report: Path
    metrics: Path


def compare(
    pipe: WanPipeline,
    prompts: str | Sequence[str],
    *,
    out: str | Path,
    seed: int = 0,
    config: PatchConfig | None = None,
    settings: Settings | None = None,
    network_number: bool | None = None,
    fresh: bool = False,
    progress: Progress | None = None,
    command: str = "",
    **overrides: object,
) -> Comparison:
    """Generate every prompt three times and judge whether patching changed anything visible.

    Args:
        pipe: An unpatched pipeline; transformer in bf16 and VAE in fp32 for a verdict that means
            something.
        prompts: One or many. Prompt i uses seed + i.
        out: Folder for videos, plots, metrics.json and report.html. Finished prompts in it are
            kept.
        seed: Seed of initial noise and re-noising.
        config: How to patch.
        settings: How to sample; by default what the model's folder says.
        network_number: Whether to measure the network against fp32 truth; None decides by its
            size.
        fresh: Start again instead of continuing.
        progress: Called as the work goes on.
        command: The command line, for the report.
        **overrides: Fields of `Settings` by name.

    Returns:
        The verdict with everything it rests on.
    """
    from turbo_rcm_patch import patched

    config = config or PatchConfig()
    prompts = [prompts] if isinstance(prompts, str) else list(prompts)
    if not prompts or any(not prompt.strip() for prompt in prompts):
        raise SamplingError(
            "prompts", expected="at least one, none of them empty", got=repr(prompts)
        )
    settings = settings or settings_for(pipe, **overrides)
    with patched(pipe, config):
        pass  # what cannot be patched fails here, before hours of baseline
    store = Store(out, _identity(pipe, settings, config), fresh=fresh)
    run = _Run(pipe, prompts, seed, settings, store, progress or (lambda *_: None))

    run.sample("baseline", nullcontext())
    for prompt_seed, key in run.keys:
        if not torch.isfinite(store.load_sample(key, "baseline").latents).all():
            raise SamplingError(
                f"the unpatched model gave NaN or infinite latents (seed {prompt_seed}, {key})",
                remedy="Check dtype and weights of the model; there is nothing to compare with",
            )
    run.sample_patched(config)
    backend = run.sample_control()
    network = run.network(config, network_number)

    results = []
    for i, (prompt, (prompt_seed, key)) in enumerate(zip(prompts, run.keys, strict=True)):
        run.progress("videos", i, len(prompts))
        result = read_prompt(store, key)
        results.append(result or finish_prompt(pipe, store, key, prompt, prompt_seed, settings))
    run.progress("videos", len(prompts), len(prompts))

    judgement = judge(
        [one.patched for one in results],
        [one.control for one in results],
        network_ratio=network.ratio if network else None,
    )
    metrics = _metrics(run, results, judgement, network, backend, config, command)
    from turbo_rcm_patch.sampling.report import write_report

    metrics_path = store.write_json("metrics.json", metrics)
    report_path = write_report(store.out, metrics)
    return Comparison(
        verdict=judgement.word,
        judgement=judgement,
        results=tuple(results),
        network=network,
        control_backend=backend,
        patch_report=str((store.read_json("runs/patched.json") or {}).get("table", "")),
        report=report_path,
        metrics=metrics_path,
    )


class _Run:
    """The passes over the prompts; each skips what an earlier call has finished."""

    def __init__(
        self,
        pipe: WanPipeline,
        prompts: Sequence[str],
        seed: int,
        settings: Settings,
        store: Store,
        progress: Progress,
    ) -> None:
        self.pipe, self.prompts, self.settings, self.store = pipe, prompts, settings, store
        self.progress = progress
        self.keys = [(seed + i, Store.key(p, seed + i)) for i, p in enumerate(prompts)]
        self._encoded: dict[str, Conditioning] = {}

    def encoded(self, prompt: str) -> Conditioning:
        """The prompt's embeddings, computed once for all passes."""
        if prompt not in self._encoded:
            self._encoded[prompt] = encode_prompt(self.pipe, prompt, self.settings)
        return self._encoded[prompt]

    def missing(self, variant: Variant) -> list[int]:
        """Indices of the prompts that this variant has not generated yet."""
        keys = enumerate(self.keys)
        return [i for i, (_, key) in keys if not self.store.has_sample(key, variant)]

    def sample(
        self, variant: Variant, backend: AbstractContextManager[None], *, warm: bool = True
    ) -> None:
        """Generate what is missing; the first call is timed apart and thrown away."""
        missing = self.missing(variant)
        steps, total = self.settings.steps, len(self.prompts) * self.settings.steps
        done = total - len(missing) * steps
        self.progress(variant, done, total)
        for prompt in dict.fromkeys(self.prompts[i] for i in missing):
            self.encoded(prompt)  # outside the backend: only the transformer's attention differs
        with backend:
            if missing and warm:
                first = self._one(missing[0], None)
                self.store.write_json(
                    f"runs/{variant}.json", {"first_call_seconds": first.seconds}
                )
            for count, i in enumerate(missing):
                on_step = partial(self._stepped, variant, done + count * steps)
                sample = self._one(i, on_step)
                self.store.save_sample(self.keys[i][1], variant, sample)
        self.progress(variant, total, total)

    def sample_patched(self, config: PatchConfig) -> None:
        """The patched pass. The model is as it was afterwards, also after an exception."""
        from turbo_rcm_patch import patched

        if not self.missing("patched"):
            self.progress("patched", 1, 1)
            return
        with patched(self.pipe, config) as report:
            self.sample("patched", nullcontext())
            first = self.store.read_json("runs/patched.json") or {}
            self.store.write_json(
                "runs/patched.json", first | {"table": str(report), "report": report.as_dict()}
            )

    def sample_control(self) -> str:
        """The control pass under the first exact backend that differs from the baseline; returns
        its name.
        """
        known = self.store.read_json("runs/control.json")
        names = (
            [str(known["backend"])]
            if known
            else list(control_backends.candidates(self.pipe._execution_device))
        )
        refused = []
        for name in names:
            self.encoded(self.prompts[0])
            if known is None:
                why = self._refuses(name)
                if why:
                    refused.append(f"{name} {why}")
                    continue
                self.store.write_json("runs/control.json", {"backend": name})
            self.sample("control", control_backends.exact_backend(name), warm=False)
            self._check_control(name)
            return name
        raise ControlError(
            "no exact attention backend differs from the one the model uses",
            got="; ".join(refused),
            remedy="Compare in bf16, and without a diffusers attention backend set on the model",
        )

    def _refuses(self, name: str) -> str:
        """Why a backend cannot be the control, empty if it can."""
        try:
            with control_backends.exact_backend(name):
                sample = self._one(0, None)
        except torch.OutOfMemoryError:
            return "runs out of memory"
        except RuntimeError as error:
            if "kernel" not in str(error) and "backend" not in str(error):
                raise
            return "cannot run this model"
        baseline = self.store.load_sample(self.keys[0][1], "baseline")
        if torch.equal(sample.latents, baseline.latents):
            return "is bit-equal to the baseline"
        self.store.save_sample(self.keys[0][1], "control", sample)
        return ""

    def _check_control(self, name: str) -> None:
        for _, key in self.keys:
            baseline, sample = (self.store.load_sample(key, v) for v in ("baseline", "control"))
            if torch.equal(sample.latents, baseline.latents):
                raise ControlError(
                    f"the control run of {key} under {name!r} equals the baseline in every bit",
                    remedy="Start again with --fresh; was the model changed since?",
                )

    def network(self, config: PatchConfig, wanted: bool | None) -> NetworkNumber | None:
        """The network number, measured once."""
        known = self.store.read_json("runs/network.json")
        if known:
            return NetworkNumber(**{k: from_json(v) for k, v in known.items()})
        network = self.pipe.transformer
        if network is None or wanted is False:
            return None
        small = sum(p.numel() for p in network.parameters()) <= SMALL_NETWORK
        if not wanted and not (small and network.device.type != "meta"):
            return None
        self.progress("network", 0, 1)
        clean = self.store.load_sample(self.keys[0][1], "baseline").latents
        conditioning = self.encoded(self.prompts[0])
        number = measure_network(self.pipe, conditioning, clean, self.settings, config)
        self.store.write_json("runs/network.json", asdict(number))
        self.progress("network", 1, 1)
        return number

    def _stepped(self, variant: Variant, before: int, step: int, steps: int) -> None:
        self.progress(variant, before + step, len(self.prompts) * steps)

    def _one(self, i: int, on_step: Callable[[int, int], None] | None) -> Sample:
        return sample_latents(
            self.pipe,
            self.encoded(self.prompts[i]),
            seed=self.keys[i][0],
            settings=self.settings,
            keep_trajectory=True,
            on_step=on_step,
        )


def _identity(pipe: WanPipeline, settings: Settings, config: PatchConfig) -> dict[str, object]:
    """Everything but prompts and seeds that decides what is generated."""
    network = pipe.transformer if pipe.transformer is not None else pipe.transformer_2
    return {
        "model": str(getattr(pipe, "name_or_path", None) or type(pipe).__name__),
        "weights": _weights_digest(network),
        "dtype": str(network.dtype).removeprefix("torch."),
        "device": device_name(pipe._execution_device),
        "settings": settings.as_dict(),
        "config": asdict(config),
        "versions": versions(),
        "code": code_digest(),
    }


def _weights_digest(network: torch.nn.Module) -> str:
    """Tells a retrained model of the same name: sums of a few parameters, without moving the rest.
    """
    named = [(n, p) for n, p in network.named_parameters() if p.device.type != "meta"]
    picks = named[:: max(1, len(named) // 16)]
    return " ".join(f"{float(p.detach().float().sum()):.6g}" for _, p in picks)


def _metrics(
    run: _Run,
    results: Sequence[PromptResult],
    judgement: Verdict,
    network: NetworkNumber | None,
    backend: str,
    config: PatchConfig,
    command: str,
) -> dict[str, object]:
    store = run.store
    patch = store.read_json("runs/patched.json") or {}
    times = {}
    for variant in ("baseline", "patched", "control"):
        samples = [store.load_sample(key, variant) for _, key in run.keys]
        peaks = [s.peak_bytes for s in samples if s.peak_bytes is not None]
        note = store.read_json(f"runs/{variant}.json") or {}
        times[variant] = {
            "first_call_seconds": note.get("first_call_seconds"),
            "median_seconds": statistics.median(s.seconds for s in samples),
            "peak_bytes": max(peaks) if peaks else None,
        }
    return {
        "schema": 1,
        "verdict": judgement.word,
        "checks": [asdict(check) | {"passed": check.passed} for check in judgement.checks],
        "network": asdict(network) | {"ratio": network.ratio} if network else None,
        "control_backend": backend,
        "times": times,
        "prompts": [one.as_dict() for one in results],
        "patch": patch.get("report"),
        "patch_table": patch.get("table", ""),
        "identity": store.read_json("settings.json"),
        "config": asdict(config),
        "command": command,
    }
