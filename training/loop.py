"""The loop of every stage: optimiser, averaged weights, log, checkpoints to resume from."""

from __future__ import annotations

import copy
import json
import math
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn

from turbo_rcm_patch.files import atomic

#: Seconds between checkpoints.
SAVE_EVERY: Final = 60.0
_LOG_EVERY: Final = 20


@dataclass(frozen=True, slots=True)
class Budget:
    """Steps of a stage, videos or samples a step, and the largest learning rate.

    With `muon` (torch 2.9) the matrices of blocks are trained by Muon, whose steps are scaled to
    the size of AdamW's (arXiv 2502.16982).
    """

    steps: int
    batch: int
    lr: float
    muon: bool = False


@dataclass(slots=True)
class Run:
    """A training run: its folder and its device."""

    out: Path
    device: torch.device
    began: float = field(default_factory=time.monotonic)

    def log(self, **record: object) -> None:
        """Append one JSON line to log.jsonl and print it."""
        line = json.dumps({"wall": round(time.monotonic() - self.began, 1), **record})
        self.out.mkdir(parents=True, exist_ok=True)
        with (self.out / "log.jsonl").open("a") as file:
            file.write(line + "\n")
        print(line, flush=True)

    def precision(self) -> torch.autocast:
        """Return bf16 autocast on a GPU; a CPU computes in fp32."""
        gpu = self.device.type == "cuda"
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=gpu)


class Stage:
    """A resumable optimisation of some networks over a number of steps.

    The learning rate warms up over 100 steps and falls along a cosine. Every step draws from
    generators seeded by stage and step, so that a resumed stage ends as a whole one.

    Attributes:
        average: Averaged copies of the networks, in evaluation mode.
        scenes, noise: Generators on the CPU and on the device.
    """

    def __init__(
        self, run: Run, name: str, networks: dict[str, nn.Module], budget: Budget, *,
        decay: float = 0.999, weight_decay: float = 0.0,
    ) -> None:  # fmt: skip
        self.run, self.name, self.networks, self.budget = run, name, networks, budget
        self.average = {
            key: copy.deepcopy(net).eval().requires_grad_(False) for key, net in networks.items()
        }
        self._decay = decay
        named = [pair for net in networks.values() for pair in net.named_parameters()]
        self.parameters: list[Tensor] = [parameter for _, parameter in named]
        self._averaged: list[Tensor] = [
            p for net in self.average.values() for p in net.parameters()
        ]
        matrices, others = list[Tensor](), list[Tensor]()
        for key, parameter in named:
            in_muon = budget.muon and parameter.ndim == 2 and key.startswith("blocks.")
            (matrices if in_muon else others).append(parameter)
        fused = run.device.type == "cuda"
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(
                others, budget.lr, (0.9, 0.99), weight_decay=weight_decay, fused=fused
            )
        ]
        if matrices:
            self.optimizers.append(
                torch.optim.Muon(matrices, budget.lr, weight_decay, adjust_lr_fn="match_rms_adamw")
            )
        self.scenes, self.noise = torch.Generator(), torch.Generator(run.device)
        self.step = 0
        self._path = run.out / "state" / f"{name}.pt"
        self._resume()
        self.reseed()

    @property
    def done(self) -> bool:
        """True once all steps are made."""
        return self.step >= self.budget.steps

    @property
    def progress(self) -> float:
        """Share of the steps that are made."""
        return min(1.0, self.step / self.budget.steps)

    def reseed(self) -> None:
        """Seed the generators for this step."""
        salt = zlib.crc32(self.name.encode()) % 1000
        seed = salt * 10**8 + self.step * 64
        self.scenes.manual_seed(seed)
        self.noise.manual_seed(seed)

    def save(self) -> None:
        """Replace the checkpoint; if the process is killed meanwhile, the old one stays."""
        state = {
            "step": self.step,
            "average": {key: net.state_dict() for key, net in self.average.items()},
            "networks": {key: net.state_dict() for key, net in self.networks.items()},
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }
        with atomic(self._path) as partial:
            torch.save(state, partial)

    def _resume(self) -> None:
        if not self._path.exists():
            return
        state = torch.load(self._path, map_location=self.run.device, weights_only=True)
        for kind, networks in (("networks", self.networks), ("average", self.average)):
            for key, net in networks.items():
                net.load_state_dict(state[kind][key])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step = state["step"]
        self.run.log(stage=self.name, event="resumed", step=self.step)

    def train(self, loss_of: Callable[[], Tensor]) -> None:
        """Minimise the loss of a batch until the steps are made.

        Raises:
            RuntimeError: A gradient is not finite. The checkpoint before it stays.
        """
        saved, steps = time.monotonic(), self.budget.steps
        while not self.done:
            self.reseed()
            loss = loss_of()
            for parameter in self.parameters:
                parameter.grad = None
            loss.backward()  # type: ignore[no-untyped-call]
            norm = nn.utils.clip_grad_norm_(self.parameters, 1.0, error_if_nonfinite=True)
            for optimizer in self.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = self._learning_rate()
                optimizer.step()
            self.step += 1
            decay = min(self._decay, (1 + self.step) / (10 + self.step))
            with torch.no_grad():
                torch._foreach_lerp_(self._averaged, self.parameters, 1 - decay)
            if self.step % _LOG_EVERY and self.step not in (1, 10, steps):
                continue
            numbers = {"loss": round(float(loss.detach()), 5), "norm": round(float(norm), 4)}
            self.run.log(stage=self.name, step=self.step, of=steps, **numbers)
            if self.done or time.monotonic() - saved > SAVE_EVERY:
                self.save()
                saved = time.monotonic()

    def _learning_rate(self) -> float:
        warm = min(1.0, (self.step + 1) / 100)
        cosine = 0.5 * (1 + math.cos(math.pi * self.progress))
        return self.budget.lr * warm * (0.02 + 0.98 * cosine)
