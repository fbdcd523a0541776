"""Find the known models in what a user passes, and their skip pairs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from turbo_rcm_patch.config import PatchConfig
from turbo_rcm_patch.errors import NotAModelError, UnknownArchitectureError
from turbo_rcm_patch.patching.plain import note_classes_of
from turbo_rcm_patch.patching.record import record_of
from turbo_rcm_patch.patching.registry import FAMILIES, Family, family_of, qualified_name
from turbo_rcm_patch.patching.report import PairTable
from turbo_rcm_patch.patching.sla import recovered_proj_l
from turbo_rcm_patch.patching.state import ModelPlan
from turbo_rcm_patch.skip import SkipPair, Stream

#: Where a diffusers pipeline keeps its denoising networks (two experts in Wan 2.2).
_COMPONENTS = ("transformer", "transformer_2")


@dataclass(frozen=True, slots=True)
class Target:
    """A module that a family serves, and its path in what the user passed."""

    module: nn.Module
    family: Family
    path: str
    component: str = ""


def find_targets(model: object) -> list[Target]:
    """Every module in a model or pipeline whose exact class is known.

    Raises:
        NotAModelError: Neither a torch module nor an object that holds one as `transformer`.
        UnknownArchitectureError: No registered family knows a class in it.
    """
    parts = parts_of(model)
    found = [
        target for component, part in parts.items() for target in _walk(part, component, component)
    ]
    # A network may be held under two names.
    targets = list({id(target.module): target for target in reversed(found)}.values())[::-1]
    if not targets:
        names = ", ".join(qualified_name(type(part)) for part in parts.values())
        raise UnknownArchitectureError(
            "model",
            expected="one of " + ", ".join(sorted(FAMILIES)) + ", or a WanModel laid out as "
            "TurboDiffusion's",
            got=names,
            remedy="If it is part of a transformer, pass the transformer. A subclass is not "
            "patched, because it may run another forward",
        )
    return targets


def parts_of(model: object) -> dict[str, nn.Module]:
    """A module by itself under the name "", or the networks of a pipeline by their names.

    Raises:
        NotAModelError: It is neither.
    """
    if isinstance(model, nn.Module):
        return {"": model}
    held = {name: getattr(model, name, None) for name in _COMPONENTS}
    parts = {name: part for name, part in held.items() if isinstance(part, nn.Module)}
    if not parts:
        raise NotAModelError(
            "model",
            expected="a torch.nn.Module, or a pipeline with one as its transformer",
            got=f"a {qualified_name(type(model))}",
            remedy="Pass pipe.transformer or the pipeline itself",
        )
    return parts


def _walk(module: nn.Module, path: str, component: str) -> list[Target]:
    """Known modules from here down; what is inside a known module belongs to its family."""
    family = family_of(module)
    if family is not None:
        note_classes_of(module)
        return [Target(module, family, path, component)]
    found = []
    for name, child in module.named_children():
        if name == "_orig_mod":  # What torch.compile wraps keeps its paths.
            found += _walk(child, path, component)
        else:
            found += _walk(child, f"{path}.{name}" if path else name, component)
    return found


def plan_all(model: object, config: PatchConfig) -> list[tuple[Target, ModelPlan]]:
    """Check every target, and plan it. Changes nothing."""
    targets = find_targets(model)
    for target in targets:
        target.family.check(target.module)
    planned = []
    for target in targets:
        plan = target.family.plan(target.module, target.path, config)
        plan.boundary += _boundary(model, target)
        planned.append((target, plan))
    return planned


def _boundary(model: object, target: Target) -> list[SkipPair]:
    """The network boundary, which a pipeline with an rCM scheduler closes around its network."""
    scheduler = getattr(model, "scheduler", None)
    if isinstance(model, nn.Module) or not target.component:
        return []
    if type(scheduler).__name__ != "RCMScheduler":
        return []
    return [
        SkipPair(
            path=target.component,
            kind="boundary",
            heads=0,
            head_dim=0,
            streams=(Stream("latents", "1", "-t", "[B]"),),
            cast="fp32",
            projection=False,
            runs="as-written",
            reason="the scheduler's step closes the network's skip and re-noises in one fp64 pass",
        )
    ]


def find_pairs(model: object) -> PairTable:
    """List every skip pair of a model or pipeline, and how it runs or would run by default.

    Args:
        model: A module of a known class, a module that contains one, or a diffusers pipeline. For
            a patched one the table says how the pairs run now.

    Raises:
        PatchError: The model cannot be patched; the message says why and what to do.
        CheckpointError: The model's configuration says that it has SLA, but its `proj_l` cannot be
            found.
    """
    pairs: list[SkipPair] = []
    targets = find_targets(model)
    for target in targets:
        record = record_of(target.module)
        if record is not None:
            pairs += record.pairs()
            continue
        with recovered_proj_l(target.module):
            target.family.check(target.module)
            plan = target.family.plan(target.module, target.path, PatchConfig())
        pairs += plan.pairs + _boundary(model, target)
    return PairTable(pairs)


def execution_device(model: nn.Module) -> torch.device:
    """Where a model computes: where its offloading hooks move it to, or where its weights are."""
    for module in model.modules():
        hook: Any = module.__dict__.get("_hf_hook")
        device = getattr(hook, "execution_device", None)
        if device is not None:
            return torch.device(device if not isinstance(device, int) else f"cuda:{device}")
        registry: Any = module.__dict__.get("_diffusers_hook")
        for entry in getattr(registry, "hooks", {}).values():
            onload = getattr(getattr(entry, "group", None), "onload_device", None)
            if onload is not None:
                return torch.device(onload)
    parameter = next(model.parameters(), None)
    return parameter.device if parameter is not None else torch.device("cpu")
