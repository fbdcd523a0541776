"""The parts of every stage: a log, a clock that survives restarts, checkpoints, an EMA."""

from __future__ import annotations

import copy
import io
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn

from turbo_rcm_patch.errors import TurboRCMError

_CONTROL: Final = "control.json"
_PIECE: Final = 15 * 2**20  # bytes of a state file
Probe = Callable[["Stage"], None]


class TrainingError(TurboRCMError, RuntimeError):
    """A training cannot go on, or what it left cannot be read."""


@dataclass(slots=True)
class Run:
    """One training run in one folder.

    Attributes:
        out: Where everything goes.
        device: Where it runs.
        seed: Seeds everything.
        autocast: bf16 autocast around the networks.
        save_every: Seconds between checkpoints.
        limit: Seconds after which every stage stops where it is, with weights that can be used.
    """

    out: Path
    device: torch.device
    seed: int
    autocast: bool = True
    save_every: float = 60.0
    limit: float = math.inf
    began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)

    @property
    def late(self) -> bool:
        """True once the time limit is over."""
        return time.monotonic() - self.began > self.limit

    def log(self, **record: object) -> None:
        """Append one JSON line to log.jsonl and say it on stdout."""
        record = {"wall": round(time.monotonic() - self.began, 1), **record}
        line = json.dumps(record)
        with (self.out / "log.jsonl").open("a") as file:
            file.write(line + "\n")
        print(line, flush=True)

    def precision(self) -> torch.autocast:
        """The autocast context of this run."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.autocast)

    def generators(self, salt: int) -> tuple[torch.Generator, torch.Generator]:
        """A CPU generator for scenes and one on the device for noise."""
        seed = self.seed * 1000 + salt
        return (
            torch.Generator().manual_seed(seed),
            torch.Generator(self.device).manual_seed(seed + 500),
        )

    def control(self, stage: str) -> dict[str, float]:
        """Read a stage's settings from control.json; a broken file has none."""
        path = self.out / _CONTROL
        try:
            found = json.loads(path.read_text()).get(stage, {}) if path.exists() else {}
            return {key: float(value) for key, value in found.items()}
        except (ValueError, AttributeError, TypeError):
            self.log(event="control.json is not readable")
            return {}


@dataclass(frozen=True, slots=True)
class Budget:
    """How long a stage trains, and how.

    Attributes:
        minutes: Of training; restarts do not count.
        steps: In place of minutes, where given.
        batch: Clips a step.
        lr: Largest learning rate.
    """

    minutes: float
    steps: int | None
    batch: int
    lr: float


class Stage:
    """A resumable, time-boxed or step-boxed optimisation of some networks.

    The learning rate warms up over 100 steps and falls along a cosine over the budget: seconds of
    training (restarts do not count), or steps where `steps` is given, which makes a run
    repeatable.
    """

    def __init__(
        self,
        run: Run,
        name: str,
        networks: dict[str, nn.Module],
        budget: Budget,
        *,
        salt: int,
        ema_decay: float = 0.999,
        weight_decay: float = 0.0,
    ) -> None:
        self.run, self.name, self.networks, self.ema_decay = run, name, networks, ema_decay
        self.minutes, self.steps, self.lr = budget.minutes, budget.steps, budget.lr
        self.ema = {
            key: copy.deepcopy(net).eval().requires_grad_(False) for key, net in networks.items()
        }
        self.parameters: list[Tensor] = [p for net in networks.values() for p in net.parameters()]
        self._ema_parameters: list[Tensor] = [
            p for net in self.ema.values() for p in net.parameters()
        ]
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=budget.lr,
            betas=(0.9, 0.99),
            weight_decay=weight_decay,
            fused=run.device.type == "cuda",
        )
        self.scenes, self.noise = run.generators(salt)
        self.step, self.seconds, self.done = 0, 0.0, False
        self._path = run.out / "state" / name
        self._obey_control()  # First, because a stage is finished by its budget.
        self._resume()

    @property
    def progress(self) -> float:
        """Share of the budget that is used, 0 to 1."""
        used = (
            self.step / self.steps if self.steps else self.seconds / max(60 * self.minutes, 1e-6)
        )
        return min(1.0, used)

    @property
    def open(self) -> bool:
        """True while there is work left, and time to do it."""
        return not self.done and self.progress < 1.0 and not self.run.late

    def save(self) -> None:
        """Write the state next to the old one, then swap; no file is larger than 16 MiB.

        Killed at any moment, it leaves a complete state where `_resume` looks.
        """
        state = {
            "networks": {key: net.state_dict() for key, net in self.networks.items()},
            "ema": {key: net.state_dict() for key, net in self.ema.items()},
            "optimizer": self.optimizer.state_dict(),
            "clock": (self.step, self.seconds, self.done),
            "generators": (self.scenes.get_state(), self.noise.get_state()),
        }
        buffer = io.BytesIO()
        torch.save(state, buffer)
        fresh, old = self._path.with_suffix(".new"), self._path.with_suffix(".old")
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        content = buffer.getbuffer()
        for i, start in enumerate(range(0, len(content), _PIECE)):
            (fresh / f"{i:03d}.bin").write_bytes(content[start : start + _PIECE])
        if self._path.exists():  # If not, the old one is all there is.
            shutil.rmtree(old, ignore_errors=True)
            self._path.rename(old)
        fresh.rename(self._path)
        shutil.rmtree(old, ignore_errors=True)

    def _resume(self) -> None:
        """Continue from the last checkpoint, if there is one."""
        # Between the two renames of `save` there is only the old one.
        places = (self._path, self._path.with_suffix(".old"))
        folder = next((place for place in places if place.exists()), None)
        if folder is None:
            return
        content = io.BytesIO(b"".join(p.read_bytes() for p in sorted(folder.glob("*.bin"))))
        state = torch.load(content, map_location=self.run.device, weights_only=True)
        for key, net in self.networks.items():
            net.load_state_dict(state["networks"][key])
            self.ema[key].load_state_dict(state["ema"][key])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds, done = state["clock"]
        self.done = done and self.progress >= 1.0  # a larger budget continues a finished stage
        self.scenes.set_state(state["generators"][0].cpu())
        self.noise.set_state(state["generators"][1].cpu())
        self.run.log(
            stage=self.name, event="resumed", step=self.step, seconds=round(self.seconds, 1)
        )

    def train(
        self, loss_of: Callable[[], dict[str, Tensor]], probe: Probe, *, probe_every: float = 120.0
    ) -> None:
        """Optimise until the budget is used, or the run's time limit is over.

        Args:
            loss_of: Computes one batch's losses; "loss" is minimised, the others are logged.
            probe: Called with this stage every `probe_every` seconds and at the end, off the
                clock.
            probe_every: Seconds.
        """
        last_save = last_probe = time.monotonic()
        mark, mark_step = time.monotonic(), self.step
        while self.open:
            for group in self.optimizer.param_groups:
                group["lr"] = self._learning_rate()
            losses = loss_of()
            self.optimizer.zero_grad(set_to_none=True)
            losses["loss"].backward()  # type: ignore[no-untyped-call]
            norm = nn.utils.clip_grad_norm_(self.parameters, 1.0)
            self.optimizer.step()
            self.step += 1
            self._update_ema()
            if self.step % 20 == 0 or self.step in (1, 10) or self.steps == self.step:
                values = {key: round(float(value.detach()), 5) for key, value in losses.items()}
                self._check_finite(values["loss"])
                now = time.monotonic()
                self.run.log(
                    stage=self.name,
                    step=self.step,
                    progress=round(self.progress, 4),
                    seconds=round(self.seconds + now - mark, 1),
                    steps_per_second=round((self.step - mark_step) / max(now - mark, 1e-9), 3),
                    lr=round(self._learning_rate(), 7),
                    norm=round(float(norm), 4),
                    **values,
                )
                self.seconds += now - mark
                mark, mark_step = now, self.step
                self._obey_control()
                if now - last_save > self.run.save_every:
                    self.save()
                    last_save = time.monotonic()
                if now - last_probe > probe_every:
                    probe(self)
                    last_probe = time.monotonic()
                mark = time.monotonic()
        if not self.done:
            self._check_finite()
            self.done = self.progress >= 1.0
            self.save()
            probe(self)
            self.run.log(
                stage=self.name,
                event="done" if self.done else "stopped by the time limit",
                step=self.step,
                seconds=round(self.seconds, 1),
            )

    def _obey_control(self) -> None:
        """Take budget and peak learning rate from control.json, where it has them."""
        for key, value in self.run.control(self.name).items():
            if key in ("lr", "minutes"):
                setattr(self, key, value)

    @torch.no_grad()
    def _check_finite(self, loss: float = 0.0) -> None:
        """Raise before weights that are not finite replace the checkpoint.

        The loss alone does not tell: it is from before the step, and a finite loss may have a
        gradient that is not finite.
        """
        norms = torch.stack(torch._foreach_norm(self.parameters))
        if not (math.isfinite(loss) and bool(norms.isfinite().all())):
            raise TrainingError(
                f"{self.name} diverged at step {self.step}",
                expected="a finite loss and finite weights",
                remedy="The same command with --resume and a lower learning rate goes on from the "
                f"last checkpoint: --lr-{self.name}, or control.json",
            )

    def _learning_rate(self) -> float:
        warm = min(1.0, (self.step + 1) / 100)
        return self.lr * warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * self.progress)))

    @torch.no_grad()
    def _update_ema(self) -> None:
        decay = min(self.ema_decay, (1 + self.step) / (10 + self.step))
        torch._foreach_lerp_(self._ema_parameters, self.parameters, 1 - decay)


def batches(count: int, size: int) -> Iterator[slice]:
    """Slices of at most `size` that cover `count`."""
    for start in range(0, count, size):
        yield slice(start, min(count, start + size))
