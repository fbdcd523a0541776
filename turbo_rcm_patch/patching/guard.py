"""The guard: compares each fused pair with its author's code on real forwards.

It runs on the first and the last step of each expert. A pair over budget, or with a non-finite
value, goes back to its author's code for good. Which step a forward belongs to is what the
pipeline says when it enters the model's `cache_context`; in a patched pipeline whose calls do not
say it, the scheduler knows. Where nobody knows, the first forward is checked and
`report.guard.check_next()` asks for another.

The guard does nothing while a compiler traces, and costs one attribute look-up on other forwards.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Literal

import torch
from torch import nn

from turbo_rcm_patch.config import PatchConfig
from turbo_rcm_patch.errors import NonFiniteInputError
from turbo_rcm_patch.patching.report import Decision, GuardLog, GuardRecord
from turbo_rcm_patch.patching.state import PairState, Step

__all__ = ["Guard", "PipelineSteps", "StepContext"]

When = Literal["first", "last", "asked"]
#: A branch, or its rows of each residual stream.
Branch = torch.Tensor | tuple[torch.Tensor, ...]


class PipelineSteps:
    """What a diffusers pipeline knows about its denoising loop, held weakly.

    It is only asked on forwards, and only until the guard has seen a first and a last step.
    """

    def __init__(self, pipe: object, component: str) -> None:
        self._pipe: weakref.ref[Any] | None = weakref.ref(pipe)
        self._component = component

    def __getstate__(self) -> dict[str, object]:
        # A weak reference can neither be pickled nor mean anything in another process.
        return {"_pipe": None, "_component": self._component}

    def __deepcopy__(self, memo: dict[int, object]) -> PipelineSteps:
        other = PipelineSteps.__new__(PipelineSteps)
        other._pipe, other._component = None, self._component
        return other

    def index(self) -> int | None:
        """Index of the current step, read from the scheduler's own counter; no device is asked."""
        pipe = self._pipe() if self._pipe is not None else None
        scheduler = getattr(pipe, "scheduler", None)
        timestep = getattr(pipe, "_current_timestep", None)
        if scheduler is None or timestep is None:
            return None
        if _times_of_frames(timestep):
            # Copies of the scheduler count each frame; the row's place in the matrix is the step.
            return int(timestep.storage_offset()) // int(timestep.numel())
        if not hasattr(scheduler, "_step_index"):
            return _position(timestep, getattr(scheduler, "timesteps", None))
        index = scheduler._step_index
        return int(index) if index is not None else 0

    def last(self) -> int | None:
        """Index of the last step that this expert runs."""
        pipe = self._pipe() if self._pipe is not None else None
        if _times_of_frames(getattr(pipe, "_current_timestep", None)):
            rows = getattr(pipe, "_num_timesteps", None)
            return None if rows is None else int(rows) - 1
        timesteps = getattr(getattr(pipe, "scheduler", None), "timesteps", None)
        if timesteps is None or len(timesteps) == 0:
            return None
        ratio = getattr(getattr(pipe, "config", None), "boundary_ratio", None)
        if ratio is None or self._component != "transformer":
            return len(timesteps) - 1
        boundary = ratio * pipe.scheduler.config.num_train_timesteps  # type: ignore[union-attr]
        return int((timesteps >= boundary).sum()) - 1


def _position(timestep: object, timesteps: object) -> int | None:
    """Where a timestep lies among those of a scheduler that does not count its steps.

    A loop over a tensor yields views of it, so the place is in the memory: no device is asked.
    """
    if not (isinstance(timestep, torch.Tensor) and isinstance(timesteps, torch.Tensor)):
        return None
    if timestep.numel() != 1 or timesteps.dim() != 1 or not timesteps.numel():
        return None
    if timestep.untyped_storage().data_ptr() != timesteps.untyped_storage().data_ptr():
        return None
    return (timestep.storage_offset() - timesteps.storage_offset()) // timesteps.stride(0)


def _times_of_frames(timestep: object) -> bool:
    """Whether a step has a time for every frame: a row of a dense matrix with a row for each step,
    as diffusion forcing has it (SkyReels-V2).
    """
    return isinstance(timestep, torch.Tensor) and timestep.ndim == 1 and timestep.numel() > 0


class Guard:
    """The guard of one model (one expert)."""

    def __init__(
        self, config: PatchConfig, path: str, log: GuardLog, steps: PipelineSteps | None
    ) -> None:
        self.active = False
        self.log = log
        self._budget = config.guard_budget
        self._path = path
        self._steps = steps
        self._remaining: set[When] = {"first", "last"}
        self._asked = False
        self._context: tuple[str, int | None, int | None] | None = None
        self._names: set[str] = set()
        self._step: int | None = None
        self._when: When | None = None
        self._last: int | None = None
        log.attach(self)

    def check_next(self) -> None:
        """Check the next forward whatever its step."""
        self._asked = True

    # --- where in the denoising loop we are ------------------------------------------------------

    def enter(self, name: str, step: int | None, count: int | None) -> None:
        """The pipeline announces a forward: its name ("cond", "uncond"), step and step count."""
        self._context = (name, step, count)

    def leave(self) -> None:
        """The announced forward is over."""
        self._context = None

    def begin(self, **inputs: torch.Tensor) -> None:
        """A forward reaches the first patched block; decides whether it is checked.

        Raises:
            NonFiniteInputError: It is checked, and an input of the block has a NaN or an infinity.
        """
        self.active = False
        if not self._remaining and not self._asked and self._when is None:
            return
        self._when = self._label()
        if self._when is None:
            return
        self.active = True
        self._refuse_non_finite(inputs)

    def _label(self) -> When | None:
        name, step, count = self._context or ("", None, None)
        if step is None and self._steps is not None:
            step = self._steps.index()
        same = self._when is not None and self._context is not None
        if same and step == self._step and name not in self._names:
            # The second forward of classifier-free guidance belongs to the same step.
            self._names.add(name)
            return self._when
        if step is not None and self._step is not None and step < self._step:
            self._last = None  # Another run, perhaps of another length.
        self._names, self._step = {name}, step
        when: When | None = None
        if self._asked:
            self._asked, when = False, "asked"
        if "first" in self._remaining:
            self._last = None
            when = "first"
        elif "last" in self._remaining and step is not None and step == self._last_step(count):
            when = "last"
        if when in ("first", "last"):
            self._remaining.discard(when)
        if when == "first" and step is not None and step == self._last_step(count):
            self._remaining.discard("last")  # A single step is both.
        return when

    def _last_step(self, count: int | None) -> int | None:
        if self._last is None:
            last = self._steps.last() if self._steps is not None else None
            if last is None:
                return None if count is None else count - 1
            self._last = last
        return self._last

    # --- comparing -------------------------------------------------------------------------------

    @torch.no_grad()
    def _refuse_non_finite(self, inputs: dict[str, torch.Tensor]) -> None:
        for name, x in inputs.items():
            if not bool(torch.isfinite(x).all()):
                self.active = False
                if self._when in ("first", "last"):
                    self._remaining.add(self._when)  # The step has yet to be seen.
                raise NonFiniteInputError(
                    f"{name} of the first patched block of {self._path or 'the model'}",
                    expected="finite values",
                    got=f"{int((~torch.isfinite(x)).sum())} of {x.numel()} not finite",
                    remedy="Check the latents, the prompt embeddings and the layers before the "
                    "blocks; guard=False lets such values pass as the author's code would",
                )

    def accepts(
        self,
        states: tuple[PairState, ...],
        exact: Callable[[], Branch],
        fused: Callable[[], Branch],
    ) -> bool:
        """Compare a branch with its author's code; over budget, the pairs are given back.

        Before that, what can be made more precise is: Linears that run in int8 are given back
        first, then, with precision="auto", p and v get 16 bits, then the attention is exact. The
        branch is computed once more after each step.

        Args:
            states: The pairs that the branch closes (cross-attention and its image branch are
                measured together, after their common output projection).
            exact: The author's branch, [B, N, C]; of several residual streams, one tensor each.
            fused: Our branch likewise, as the states' flags say. It may be overwritten.
        """
        with torch.no_grad():
            truth = exact()
        while (error := self._error(truth, fused)) > self._budget:
            step = next((state.next_step for state in states if state.next_step), None)
            if step is None:
                break
            self._record(states, error, step)
            for state in states:
                state.take(step, self._reason(_STEPS[step], error))
        else:
            self._record(states, error, "kept")
            return True
        self._record(states, error, "given back")
        for state in states:
            state.give_back(self._reason("given back", error))
        return False

    @torch.no_grad()
    def _error(self, truth: Branch, fused: Callable[[], Branch]) -> float:
        """Relative L2 of our branch, the largest over streams and ranks; infinity where it is not
        finite."""
        pairs = zip(_parts(fused()), _parts(truth), strict=True)
        error = torch.stack([_distance(ours, exact) for ours, exact in pairs]).max()
        _reduce_max(error)
        return float(error)

    def _record(self, states: tuple[PairState, ...], error: float, verdict: Decision) -> None:
        for state in states:
            self.log.add(
                GuardRecord(
                    path=state.pair.path,
                    step=self._step,
                    when=self._when or "asked",
                    error=error,
                    budget=self._budget,
                    verdict=verdict,
                )
            )

    def _reason(self, what: str, error: float) -> str:
        where = "" if self._step is None else f" (index {self._step})"
        return (
            f"{what} by the guard: relative L2 {error:.3g} over the budget {self._budget:g} on "
            f"the {self._when} step{where}"
        )


_STEPS: Final[dict[Step, str]] = {
    "linears given back": "int8 Linears given back",
    "16-bit p and v": "p and v given 16 bits",
    "exact attention": "attention made exact",
}


def _parts(branch: Branch) -> tuple[torch.Tensor, ...]:
    return (branch,) if isinstance(branch, torch.Tensor) else branch


def _distance(ours: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Relative L2, one number; overwrites ours."""
    distance = torch.linalg.vector_norm(ours.sub_(exact), dtype=torch.float32)
    size = torch.linalg.vector_norm(exact, dtype=torch.float32)
    error = torch.where(distance == 0, distance, distance / size)
    return torch.nan_to_num(error, nan=float("inf"), posinf=float("inf"))


def _reduce_max(error: torch.Tensor) -> None:
    """The largest error over ranks, so that all ranks run the same code afterwards."""
    dist = torch.distributed
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(error, op=dist.ReduceOp.MAX)


class StepContext:
    """Stands in for the `cache_context` method of one model and tells the guard what it hears."""

    __slots__ = ("_guard", "_model")

    def __init__(self, model: nn.Module, guard: Guard) -> None:
        self._model, self._guard = model, guard

    @contextmanager
    def __call__(self, name: str, **about: Any) -> Iterator[None]:
        """What the model's own `cache_context` does, in between."""
        own: Any = type(self._model)
        self._guard.enter(name, about.get("step_index"), about.get("num_inference_steps"))
        try:
            with own.cache_context(self._model, name, **about):
                yield
        finally:
            self._guard.leave()
