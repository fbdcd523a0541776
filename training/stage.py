"""The loop of every stage: optimiser, averaged weights, log, and a checkpoint to resume from."""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn

from training.families import Budget
from turbo_rcm_patch.errors import TurboRCMError
from turbo_rcm_patch.output import atomic

#: Seconds between checkpoints.
SAVE_EVERY: Final = 60.0
_LOG_EVERY: Final = 20


class TrainingError(TurboRCMError, RuntimeError):
    """A training cannot go on."""


@dataclass(slots=True)
class Run:
    """A training run: its folder, its device, and the seed of everything."""

    out: Path
    device: torch.device
    seed: int = 0
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

    def generators(self, salt: int) -> tuple[torch.Generator, torch.Generator]:
        """Return a CPU generator for scenes and one on the device for noise."""
        seed = self.seed * 1000 + salt
        noise = torch.Generator(self.device).manual_seed(seed + 500)
        return torch.Generator().manual_seed(seed), noise


class Stage:
    """A resumable optimisation of some networks over a number of steps.

    The learning rate warms up over 100 steps and falls along a cosine.

    Attributes:
        average: Averaged copies of the networks, in evaluation mode.
        scenes, noise: Generators; the checkpoint has their states.
    """

    def __init__(
        self,
        run: Run,
        name: str,
        networks: dict[str, nn.Module],
        budget: Budget,
        *,
        salt: int,
        decay: float = 0.999,
        weight_decay: float = 0.0,
    ) -> None:
        self.run, self.name, self.networks, self.budget = run, name, networks, budget
        self.average = {
            key: copy.deepcopy(net).eval().requires_grad_(False) for key, net in networks.items()
        }
        self.parameters: list[Tensor] = [p for net in networks.values() for p in net.parameters()]
        self._averaged: list[Tensor] = [
            p for net in self.average.values() for p in net.parameters()
        ]
        self._decay = decay
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=budget.lr,
            betas=(0.9, 0.99),
            weight_decay=weight_decay,
            fused=run.device.type == "cuda",
        )
        self.scenes, self.noise = run.generators(salt)
        self.step = 0
        self._path = run.out / "state" / f"{name}.pt"
        if self._path.exists():
            self._resume()

    @property
    def done(self) -> bool:
        """True once all steps are made."""
        return self.step >= self.budget.steps

    @property
    def progress(self) -> float:
        """Share of the steps that are made."""
        return min(1.0, self.step / self.budget.steps)

    def save(self) -> None:
        """Replace the checkpoint; if the process is killed meanwhile, the old one stays."""
        state = {
            "networks": {key: net.state_dict() for key, net in self.networks.items()},
            "average": {key: net.state_dict() for key, net in self.average.items()},
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "generators": (self.scenes.get_state(), self.noise.get_state()),
        }
        with atomic(self._path) as partial:
            torch.save(state, partial)

    def _resume(self) -> None:
        state = torch.load(self._path, map_location=self.run.device, weights_only=True)
        for kind, nets in (("networks", self.networks), ("average", self.average)):
            for key, net in nets.items():
                net.load_state_dict(state[kind][key])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]
        for generator, saved in zip((self.scenes, self.noise), state["generators"], strict=True):
            generator.set_state(saved.cpu())
        self.run.log(stage=self.name, event="resumed", step=self.step)

    def train(self, loss_of: Callable[[], Tensor]) -> None:
        """Minimise the loss of a batch until the steps are made.

        Raises:
            TrainingError: The loss or a weight is not finite. The checkpoint before it stays.
        """
        saved, steps = time.monotonic(), self.budget.steps
        while not self.done:
            for group in self.optimizer.param_groups:
                group["lr"] = self._learning_rate()
            loss = loss_of()
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            norm = nn.utils.clip_grad_norm_(self.parameters, 1.0)
            self.optimizer.step()
            self.step += 1
            decay = min(self._decay, (1 + self.step) / (10 + self.step))
            with torch.no_grad():
                torch._foreach_lerp_(self._averaged, self.parameters, 1 - decay)
            if self.step % _LOG_EVERY and self.step not in (1, 10, steps):
                continue
            self._check_finite(float(loss.detach()))
            numbers = {"loss": round(float(loss.detach()), 5), "norm": round(float(norm), 4)}
            self.run.log(stage=self.name, step=self.step, of=steps, **numbers)
            if self.done or time.monotonic() - saved > SAVE_EVERY:
                self.save()
                saved = time.monotonic()

    @torch.no_grad()
    def _check_finite(self, loss: float) -> None:
        """Raise before weights that are not finite replace the checkpoint.

        A finite loss, which is from before the step, may have a gradient that is not finite.
        """
        norms = torch.stack(torch._foreach_norm(self.parameters))
        if not (math.isfinite(loss) and bool(norms.isfinite().all())):
            raise TrainingError(
                f"{self.name} diverged at step {self.step}",
                expected="a finite loss and finite weights",
                remedy="Use a lower learning rate for this stage in training/families.py; the "
                "same command then goes on from the last checkpoint",
            )

    def _learning_rate(self) -> float:
        warm = min(1.0, (self.step + 1) / 100)
        cosine = 0.5 * (1 + math.cos(math.pi * self.progress))
        return self.budget.lr * warm * (0.02 + 0.98 * cosine)


def batches(count: int, size: int) -> Iterator[slice]:
    """Slices of at most `size` that cover `count`."""
    for start in range(0, count, size):
        yield slice(start, min(count, start + size))
