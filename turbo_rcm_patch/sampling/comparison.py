"""Generate baseline, patched and control videos from the same noise, and give a verdict.

Three passes over the prompts leave latents on disk, a fourth decodes and measures. Each finished
piece is kept, so the same command continues where it was stopped. The model is patched during the
second pass only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from turbo_rcm_patch.config import PatchConfig
from turbo_rcm_patch.errors import SamplingError
from turbo_rcm_patch.sampling.fusion import FusionNumber
from turbo_rcm_patch.sampling.generation import settings_for
from turbo_rcm_patch.sampling.measure import PromptResult, finish_prompt, read_prompt
from turbo_rcm_patch.sampling.network import NetworkNumber
from turbo_rcm_patch.sampling.observer import Observer, as_asked
from turbo_rcm_patch.sampling.passes import Passes, Progress, why_no_network
from turbo_rcm_patch.sampling.record import collect_metrics, identity
from turbo_rcm_patch.sampling.report import write_report
from turbo_rcm_patch.sampling.settings import Settings
from turbo_rcm_patch.sampling.store import Store, check_out
from turbo_rcm_patch.sampling.verdict import FUSION_LIMIT, Verdict, Word, judge
from turbo_rcm_patch.sampling.video import find_ffmpeg

if TYPE_CHECKING:
    from turbo_rcm_patch.sampling.families import VideoPipeline

__all__ = ["Comparison", "compare"]


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of a comparison.

    Attributes:
        verdict: "unchanged", "changed" or "undecided" (see `Verdict`).
        judgement: The conditions behind it.
        results: One entry per prompt.
        network: Error of the network against fp32 truth, None if it was not measured.
        fusion: Fused against unfused in fp32, None where no kernel of ours runs the attention.
        control_backend: Exact attention backend of the control run.
        baseline: What the other two runs are compared with, in words.
        patch_report: What was patched, as a table.
        report: The HTML page.
        metrics: The JSON file.
    """

    verdict: Word
    judgement: Verdict
    results: tuple[PromptResult, ...]
    network: NetworkNumber | None
    fusion: FusionNumber | None
    control_backend: str
    baseline: str
    patch_report: str
    report: Path
    metrics: Path

    def __str__(self) -> str:
        lines = [f"verdict: {self.verdict}"]
        lines += [f"  {'ok ' if c.passed else 'NO '} {c}" for c in self.judgement.checks]
        lines += [f"  --  not measured: {what}" for what in self.judgement.missing]
        if self.network is None and not self.judgement.missing:
            lines += ["  --  not measured, as you asked: the network number"]
        seen = [asdict(one.seen) for one in self.results if one.seen]
        if seen:
            found = as_asked(seen)
            lines += [
                f"detector: {found['baseline']} of {len(seen)} videos show what was asked for "
                f"without the patch, {found['patched']} with it"
            ]
        lines += [f"baseline: {self.baseline}"]
        lines += [f"control: exact attention on the {self.control_backend!r} backend"]
        lines += [f"report:  {self.report}"]
        return "\n".join(lines)


def compare(
    pipe: VideoPipeline,
    prompts: str | Sequence[str],
    *,
    out: str | Path,
    seed: int = 0,
    config: PatchConfig | None = None,
    settings: Settings | None = None,
    network_number: bool | None = None,
    fresh: bool = False,
    observer: Observer | None = None,
    progress: Progress | None = None,
    command: str = "",
    **overrides: object,
) -> Comparison:
    """Generate every prompt three times and judge whether patching changed anything visible.

    If an attention holds SLA's `proj_l` (`load_extra`), baseline and control compute SLA by its
    definition in plain torch with the same `sla_topk`, because its weights were not trained for
    dense attention.

    Args:
        pipe: An unpatched pipeline, with the transformer in bf16 and the VAE in fp32.
        prompts: One or many. Prompt i uses seed + i.
        out: Folder for videos, plots, metrics.json and report.html. Finished prompts in it are
            kept, and so are files that no comparison wrote.
        seed: Seed of initial noise and re-noising.
        config: How to patch.
        settings: How to sample; by default as the model's folder says.
        network_number: Whether to measure the network's error against fp32. None measures it if
            it can be measured: the transformer is not offloaded, and one call in fp32 fits into
            memory. If not, the verdict is not "unchanged" and says why. False leaves the number
            out.
        fresh: Start again: remove what comparisons wrote into `out`, as late as possible.
        observer: Says what the videos show. The report shows it; the verdict ignores it.
        progress: Called as the work proceeds.
        command: The command line, for the report.
        **overrides: Fields of `Settings` by name.

    Returns:
        The verdict and the numbers behind it.
    """
    from turbo_rcm_patch import patched
    from turbo_rcm_patch.patching import sla_as_defined

    config = config or PatchConfig()
    prompts = [prompts] if isinstance(prompts, str) else list(prompts)
    if not prompts or any(not prompt.strip() for prompt in prompts):
        raise SamplingError(
            "prompts", expected="at least one, none of them empty", got=repr(prompts)
        )
    settings = settings or settings_for(pipe, **overrides)
    check_out(out, fresh=fresh)
    find_ffmpeg()
    why_no_network(pipe, network_number)
    with sla_as_defined(pipe, config.sla_topk) as sparse:
        baseline = _baseline(sparse, config)
    with patched(pipe, config):
        pass  # what cannot be patched fails here, before hours of baseline
    store = Store(out, identity(pipe, settings, config), fresh=fresh)
    run = Passes(pipe, prompts, seed, settings, store, progress or (lambda *_: None))

    run.sample_baseline(config)
    for prompt_seed, key in run.keys:
        if not torch.isfinite(store.load_sample(key, "baseline").latents).all():
            raise SamplingError(
                f"the unpatched model gave NaN or infinite latents (seed {prompt_seed}, {key})",
                remedy="Check dtype and weights of the model; there is nothing to compare with",
            )
    run.sample_patched(config)
    backend = run.sample_control(config)
    network, why = run.network(config, network_number)
    missing = [f"the network number ({why})"] if why else []
    fusion = run.fusion(config)

    results = []
    for i, (prompt, (prompt_seed, key)) in enumerate(zip(prompts, run.keys, strict=True)):
        run.progress("videos", i, len(prompts))
        result = read_prompt(store, key)
        results.append(
            result or finish_prompt(pipe, store, key, prompt, prompt_seed, settings, observer)
        )
    run.progress("videos", len(prompts), len(prompts))

    judgement = judge(
        [one.patched for one in results],
        [one.control for one in results],
        network_ratio=network.ratio if network else None,
        fusion=fusion.fused_vs_unfused if fusion else None,
        missing=missing,
    )
    metrics = collect_metrics(store, results, judgement, backend, command) | {
        "baseline": baseline,
        "missing": missing,
        "network": asdict(network) | {"ratio": network.ratio} if network else None,
        "fusion": asdict(fusion) | {"limit": FUSION_LIMIT} if fusion else None,
    }
    metrics_path = store.write_json("metrics.json", metrics)
    store.plots()
    store.claim("report.html")
    report_path = write_report(store.out, metrics)
    return Comparison(
        verdict=judgement.word,
        judgement=judgement,
        results=tuple(results),
        network=network,
        fusion=fusion,
        control_backend=backend,
        baseline=baseline,
        patch_report=str((store.read_json("runs/patched.json") or {}).get("table", "")),
        report=report_path,
        metrics=metrics_path,
    )


def _baseline(sparse: int, config: PatchConfig) -> str:
    if not sparse:
        return "the unpatched model"
    return (
        f"the unpatched model, with SLA computed by its definition in plain torch in {sparse} "
        f"attentions that hold a proj_l (sla_topk={config.sla_topk:g}); the control changes the "
        "backend of the other attentions"
    )
