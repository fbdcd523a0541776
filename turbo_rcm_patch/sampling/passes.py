"""The passes of a comparison over its prompts. Each skips what an earlier run has finished."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch

from turbo_rcm_patch.config import PatchConfig
from turbo_rcm_patch.errors import ControlError, SamplingError
from turbo_rcm_patch.sampling.control import candidates, exact_backend
from turbo_rcm_patch.sampling.fusion import FusionNumber, fusion_number
from turbo_rcm_patch.sampling.generation import (
    Conditioning,
    Sample,
    encode_prompt,
    sample_latents,
)
from turbo_rcm_patch.sampling.network import NetworkNumber, measure_network
from turbo_rcm_patch.sampling.settings import Settings
from turbo_rcm_patch.sampling.store import Store, from_json

if TYPE_CHECKING:
    from turbo_rcm_patch.sampling.families import VideoPipeline

__all__ = ["Passes", "Progress", "Variant", "why_no_network"]

Variant = Literal["baseline", "patched", "control"]

#: Called with (what is being done, units done, units in all).
Progress = Callable[[str, int, int], None]


class Passes:
    """The passes over the prompts. Each skips what an earlier call has finished."""

    def __init__(
        self,
        pipe: VideoPipeline,
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
        self,
        variant: Variant,
        backend: AbstractContextManager[None],
        *,
        warm: bool = True,
        note: Callable[[], dict[str, object]] = dict,
    ) -> None:
        """Generate the missing samples. The first call is timed separately, and its result is
        thrown away.

        `note` is kept beside the samples, before each of them.
        """
        missing = self.missing(variant)
        steps, total = self.settings.steps, len(self.prompts) * self.settings.steps
        done = total - len(missing) * steps
        self.progress(variant, done, total)
        for prompt in dict.fromkeys(self.prompts[i] for i in missing):
            self.encoded(prompt)  # outside the backend: only the transformer's attention differs
        with backend:
            kept: dict[str, object] = {}
            if missing and warm:
                kept["first_call_seconds"] = self._one(missing[0], None).seconds
            for count, i in enumerate(missing):
                on_step = partial(self._stepped, variant, done + count * steps)
                sample = self._one(i, on_step)
                if warm:
                    self.store.write_json(f"runs/{variant}.json", kept | note())
                self.store.save_sample(self.keys[i][1], variant, sample)
        self.progress(variant, total, total)

    def sample_baseline(self, config: PatchConfig) -> None:
        """Generate the baseline with the unpatched model."""
        self.sample("baseline", _unpatched(self.pipe, config, nullcontext()))

    def sample_patched(self, config: PatchConfig) -> None:
        """Generate with the patched model. It is unpatched afterwards, also after an exception."""
        from turbo_rcm_patch import patched

        if not self.missing("patched"):
            self.progress("patched", 1, 1)
            return
        with patched(self.pipe, config) as report:
            self.sample(
                "patched",
                nullcontext(),
                note=lambda: {"table": str(report), "report": report.as_dict()},
            )

    def sample_control(self, config: PatchConfig) -> str:
        """Generate with the first exact backend whose result differs from the baseline, and return
        its name."""
        known = self.store.read_json("runs/control.json")
        names = [str(known["backend"])] if known else list(candidates(self.pipe._execution_device))
        refused = []
        for name in names:
            self.encoded(self.prompts[0])
            if known is None:
                why = self._refuses(name, config)
                if why:
                    refused.append(f"{name} {why}")
                    continue
                self.store.write_json("runs/control.json", {"backend": name})
            control = _unpatched(self.pipe, config, exact_backend(name))
            self.sample("control", control, warm=False)
            self._check_control(name)
            return name
        raise ControlError(
            "no exact attention backend differs from the one the model uses",
            got="; ".join(refused),
            remedy="Compare in bf16, and without a diffusers attention backend set on the model",
        )

    def _refuses(self, name: str, config: PatchConfig) -> str:
        """The reason why a backend cannot be the control; empty if it can."""
        try:
            with _unpatched(self.pipe, config, exact_backend(name)):
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
                    f"the control run of {key} under {name!r} is bit-equal to the baseline",
                    remedy="Start again with --fresh; the model may have changed since",
                )

    def network(
        self, config: PatchConfig, wanted: bool | None
    ) -> tuple[NetworkNumber | None, str]:
        """Measure the network number once. Returns it, or None and the reason; the reason is empty
        if it was left out on request."""
        known = self.store.read_json("runs/network.json")
        if known:
            return NetworkNumber(**{k: from_json(v) for k, v in known.items()}), ""
        why = why_no_network(self.pipe, wanted)
        if why or wanted is False:
            return None, why
        self.progress("network", 0, 1)
        clean = self.store.load_sample(self.keys[0][1], "baseline").latents
        conditioning = self.encoded(self.prompts[0])
        try:
            number = measure_network(self.pipe, conditioning, clean, self.settings, config)
        except torch.OutOfMemoryError:
            return None, "one call of it in fp32 does not fit the device's memory"
        if number.unpatched == 0:
            return None, "unpatched it has no error: it runs in fp32"
        self.store.write_json("runs/network.json", asdict(number))
        self.progress("network", 1, 1)
        return number, ""

    def fusion(self, config: PatchConfig) -> FusionNumber | None:
        """Measure the fusion alone for the model's head shape; None if our kernels do not run its
        attention."""
        if config.attention == "sage":
            return None
        shape = self.pipe.transformer or self.pipe.transformer_2
        return fusion_number(
            config,
            self.pipe._execution_device,
            heads=shape.config.num_attention_heads,
            head_dim=shape.config.attention_head_dim,
        )

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


@contextmanager
def _unpatched(
    pipe: VideoPipeline, config: PatchConfig, backend: AbstractContextManager[None]
) -> Iterator[None]:
    """Run the unpatched model; where it holds a proj_l, with SLA by its definition."""
    from turbo_rcm_patch.patching import sla_as_defined

    with sla_as_defined(pipe, config.sla_topk), backend:
        yield


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
    """Whether a hook of accelerate or diffusers keeps its weights on another device."""
    hooks = getattr(module.__dict__.get("_diffusers_hook"), "hooks", {})
    return "_hf_hook" in module.__dict__ or any("offload" in name for name in hooks)
