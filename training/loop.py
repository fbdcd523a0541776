"""The loop of every stage: optimiser, averaged weights, log, several GPUs, pieces that resume."""

from __future__ import annotations

import copy
import json
import math
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from turbo_rcm_patch.errors import TurboRCMError
from turbo_rcm_patch.files import atomic

#: Seconds between checkpoints.
SAVE_EVERY: Final = 60.0
_LOG_EVERY: Final = 20


class TrainingError(TurboRCMError, RuntimeError):
    """A training cannot go on."""


class OutOfTimeError(TurboRCMError, RuntimeError):
    """The minutes of this piece are over. The same command goes on."""


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
    """A training run: its folder, its device, and the seed of everything.

    Attributes:
        minutes: Length of this piece; 0 is no limit.
        compiles: Compile the transformers' blocks on a GPU.
    """

    out: Path
    device: torch.device
    seed: int = 0
    minutes: float = 0.0
    compiles: bool = True
    began: float = field(default_factory=time.monotonic)

    @property
    def rank(self) -> int:
        """Number of this process among those that train together."""
        return dist.get_rank() if dist.is_initialized() else 0

    @property
    def ranks(self) -> int:
        """Processes that train together, each with its own batches."""
        return dist.get_world_size() if dist.is_initialized() else 1

    def log(self, **record: object) -> None:
        """Append one JSON line to log.jsonl and print it, on rank 0."""
        if self.rank:
            return
        line = json.dumps({"wall": round(time.monotonic() - self.began, 1), **record})
        self.out.mkdir(parents=True, exist_ok=True)
        with (self.out / "log.jsonl").open("a") as file:
            file.write(line + "\n")
        print(line, flush=True)

    def precision(self) -> torch.autocast:
        """Return bf16 autocast on a GPU; a CPU computes in fp32."""
        gpu = self.device.type == "cuda"
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=gpu)

    def is_over(self) -> bool:
        """Whether the minutes of this piece are over, by the clock of rank 0."""
        over = float(time.monotonic() - self.began > 60 * (self.minutes or math.inf))
        flag = torch.tensor(over, device=self.device)
        if self.ranks > 1:
            dist.broadcast(flag, 0)
        return bool(flag)

    def wait(self) -> None:
        """Wait until all ranks are here."""
        if self.ranks > 1:
            dist.barrier()


class Stage:
    """A resumable optimisation of some networks over a number of steps.

    The learning rate warms up over 100 steps and falls along a cosine. Every step draws from
    generators seeded by run, stage, rank and step, so that a resumed stage ends as a whole one.

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
        self._light = self._path.with_suffix(".light.pt")
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
        """Seed the generators for this step of this rank."""
        salt = zlib.crc32(self.name.encode()) % 1000
        seed = (self.run.seed * 1000 + salt) * 10**8 + self.step * 64 + self.run.rank
        self.scenes.manual_seed(seed)
        self.noise.manual_seed(seed)

    def save(self, *, light: bool = False) -> None:
        """Replace the checkpoint; if the process is killed meanwhile, the old one stays.

        The light one, of averaged weights in fp16, is for a machine that the large one does not
        reach: a stage goes on from there with a new optimiser.
        """
        if self.run.rank:
            return
        average = {key: net.state_dict() for key, net in self.average.items()}
        state = {
            "step": self.step,
            "average": average,
            "networks": {key: net.state_dict() for key, net in self.networks.items()},
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }
        with atomic(self._path) as partial:
            torch.save(state, partial)
        if light:
            half = {
                key: {name: tensor.half() for name, tensor in tensors.items()}
                for key, tensors in average.items()
            }
            with atomic(self._light) as partial:
                torch.save({"step": self.step, "average": half}, partial)

    def _resume(self) -> None:
        path = self._path if self._path.exists() else self._light
        if not path.exists():
            return
        state = torch.load(path, map_location=self.run.device, weights_only=True)
        for networks, kind in ((self.networks, "networks"), (self.average, "average")):
            for key, net in networks.items():
                net.load_state_dict(state.get(kind, state["average"])[key])
        for optimizer, saved in zip(self.optimizers, state.get("optimizers", []), strict=False):
            optimizer.load_state_dict(saved)
        self.step = state["step"]
        self.run.log(stage=self.name, event="resumed", step=self.step, of_file=path.name)

    def train(self, loss_of: Callable[[], Tensor]) -> None:
        """Minimise the loss of a batch until the steps are made.

        Raises:
            TrainingError: The loss or a weight is not finite. The checkpoint before it stays.
            OutOfTimeError: The piece is over. The checkpoint has its last step.
        """
        saved, steps = time.monotonic(), self.budget.steps
        start, first = saved, self.step
        while not self.done:
            self.reseed()
            loss = loss_of()
            for parameter in self.parameters:
                parameter.grad = None
            loss.backward()  # type: ignore[no-untyped-call]
            self._average_gradients()
            norm = nn.utils.clip_grad_norm_(self.parameters, 1.0)
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
            self._check_finite(float(loss.detach()))
            numbers = {"loss": round(float(loss.detach()), 5), "norm": round(float(norm), 4)}
            pace = (time.monotonic() - start) / (self.step - first)
            left = round((steps - self.step) * pace / 60, 1)
            self.run.log(stage=self.name, step=self.step, of=steps, **numbers, minutes_left=left)
            over = self.run.is_over() and not self.done
            if over or self.done or time.monotonic() - saved > SAVE_EVERY:
                self.save(light=over or self.done)
                saved = time.monotonic()
            if over:
                raise OutOfTimeError(
                    f"{self.run.minutes:g} minutes are over",
                    got=f"{self.name}: step {self.step} of {steps}, some {left} minutes left",
                    remedy="The same command goes on from here",
                )

    def _average_gradients(self) -> None:
        if self.run.ranks > 1:
            gradients: list[Tensor] = [p.grad for p in self.parameters if p.grad is not None]
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            dist.all_reduce(flat)
            parts = torch.split(flat / self.run.ranks, [g.numel() for g in gradients])
            for gradient, part in zip(gradients, parts, strict=True):
                gradient.copy_(part.view_as(gradient))

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
                remedy="Use a lower learning rate for this stage in training/recipes.py; the "
                "same command then goes on from the last checkpoint",
            )

    def _learning_rate(self) -> float:
        warm = min(1.0, (self.step + 1) / 100)
        cosine = 0.5 * (1 + math.cos(math.pi * self.progress))
        return self.budget.lr * warm * (0.02 + 0.98 * cosine)


class Recorded:
    """A loss whose forward and backward are one CUDA graph for each shape of its inputs.

    Eagerly a small convolutional network waits for its launches: a step of the world's autoencoder
    takes 0.3 to 0.5 s on an H200, and recorded 0.09. On a CPU the loss is called as it is.

    Args:
        loss: Scalar loss of tensors. Its weights are updated in place and never replaced.
        parameters: What it is differentiated by.
    """

    def __init__(self, loss: Callable[..., Tensor], parameters: Sequence[Tensor]) -> None:
        self._loss, self._parameters = loss, list(parameters)
        self._graphs: dict[tuple[torch.Size, ...], tuple[Any, ...]] = {}

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Return the loss; its `backward` hands out gradients that are computed already."""
        if not inputs[0].is_cuda:
            return self._loss(*inputs)
        key = tuple(x.shape for x in inputs)
        if key not in self._graphs:
            self._graphs[key] = self._record(*(x.clone() for x in inputs))
        graph, held, loss, gradients = self._graphs[key]
        for kept, given in zip(held, inputs, strict=True):
            kept.copy_(given)
        graph.replay()
        return self._hand_out(loss, self._parameters, gradients)

    @staticmethod
    def _hand_out(loss: Tensor, parameters: list[Tensor], gradients: tuple[Any, ...]) -> Tensor:
        # No edge to the parameters: one would keep their accumulators, which belong to the stream
        # of this call, and the next recording would fail at them.
        out: Tensor = _Computed.apply(  # type: ignore[no-untyped-call]
            loss.clone().requires_grad_(), parameters, gradients
        )
        return out

    def _record(self, *held: Tensor) -> tuple[Any, ...]:
        def both() -> tuple[Tensor, tuple[Tensor, ...]]:
            loss = self._loss(*held)
            return loss.detach(), torch.autograd.grad(loss, self._parameters, allow_unused=True)

        ahead = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        ahead.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(ahead):
            for _ in range(2):
                both()
        torch.cuda.current_stream().wait_stream(ahead)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss, gradients = both()
        return graph, held, loss, gradients


class _Computed(torch.autograd.Function):
    """A loss [] whose gradients are known."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, parameters: list[Tensor], gradients: Any) -> Tensor:
        ctx.known = parameters, gradients
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        for parameter, gradient in zip(*ctx.known, strict=True):
            if gradient is not None:
                had = parameter.grad
                parameter.grad = gradient.clone() if had is None else had + gradient
        return grad, None, None
