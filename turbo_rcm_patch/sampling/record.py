"""What a comparison writes down: which results belong together, and metrics.json."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import torch

from turbo_rcm_patch.config import PatchConfig
from turbo_rcm_patch.patching.sla import attached_proj_l, recovered_proj_l
from turbo_rcm_patch.sampling.environment import code_digest, device_name, versions
from turbo_rcm_patch.sampling.measure import PromptResult
from turbo_rcm_patch.sampling.settings import Settings
from turbo_rcm_patch.sampling.store import Store
from turbo_rcm_patch.sampling.verdict import Verdict

if TYPE_CHECKING:
    from turbo_rcm_patch.sampling.families import VideoPipeline

__all__ = ["collect_metrics", "identity"]


def identity(pipe: VideoPipeline, settings: Settings, config: PatchConfig) -> dict[str, object]:
    """Everything but prompts and seeds that decides what is generated."""
    network = pipe.transformer if pipe.transformer is not None else pipe.transformer_2
    return {
        "model": str(getattr(pipe, "name_or_path", None) or type(pipe).__name__),
        "weights": _weights_digest(network),
        "sla": _sla_digest(network),
        "dtype": str(network.dtype).removeprefix("torch."),
        "device": device_name(pipe._execution_device),
        "settings": settings.as_dict(),
        "config": asdict(config),
        "versions": versions(),
        "code": code_digest(),
    }


def _weights_digest(network: torch.nn.Module) -> str:
    """Tells a retrained model of the same name: sums of a few parameters, the rest unread."""
    named = [(n, p) for n, p in network.named_parameters() if p.device.type != "meta"]
    picks = named[:: max(1, len(named) // 16)]
    return " ".join(f"{float(p.detach().float().sum()):.6g}" for _, p in picks)


def _sla_digest(network: torch.nn.Module) -> str:
    """Tells a network with SLA's proj_l from one without, and from one with another."""
    with recovered_proj_l(network):
        held = [attached_proj_l(module) for module in network.modules()]
    return " ".join(f"{float(one[0].sum()):.6g}" for one in held if one is not None)


def collect_metrics(
    store: Store,
    results: Sequence[PromptResult],
    judgement: Verdict,
    backend: str,
    command: str,
) -> dict[str, object]:
    """What metrics.json holds, the network's and the fusion's numbers aside.

    Args:
        store: Of the comparison.
        results: One entry a prompt.
        judgement: The verdict.
        backend: Exact attention backend of the control.
        command: The command line, or nothing.
    """
    patch = store.read_json("runs/patched.json") or {}
    times = {}
    for variant in ("baseline", "patched", "control"):
        samples = [store.load_sample(one.key, variant) for one in results]
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
        "control_backend": backend,
        "times": times,
        "prompts": [one.as_dict() for one in results],
        "patch": patch.get("report"),
        "patch_table": patch.get("table", ""),
        "identity": store.read_json("settings.json"),
        "command": command,
    }
