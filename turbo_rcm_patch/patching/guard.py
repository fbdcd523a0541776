"""The guard: run blocks again as their authors wrote them, and compare the results with those that
the fast path returns.

Each block is compared on its first forward and on the last denoising step where that is known.
After that, one block is compared on every fourth forward. A block over the budget runs more
exactly from that call on: first with exact attention, then also with Linears in 16 bits, then with
its author's code. If a fault is found later than on a first forward, the guard compares every
block after it, and all blocks on the next forward. On a block's first forward `fidelity` may raise
its level too, by the predicted error of the network. A call that raises the level already returns
the result at the new level, so equal inputs give equal results.

The guard compares nothing while a compiler traces, while a CUDA graph is captured, and where the
author's forward runs anyway.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn

from turbo_rcm_patch import ops
from turbo_rcm_patch.config import PatchConfig
from turbo_rcm_patch.errors import NonFiniteInputError
from turbo_rcm_patch.patching.block import LEVEL_WORDS, Level, PatchedBlock
from turbo_rcm_patch.patching.int8_linears import in_16_bits
from turbo_rcm_patch.patching.measure import BUDGET, Measure, Stages, measure, shares
from turbo_rcm_patch.patching.pieces import Notes
from turbo_rcm_patch.patching.plain import author_class
from turbo_rcm_patch.patching.report import GuardLog, GuardRecord, When

_log = logging.getLogger(__name__)

#: Forwards from one comparison of a single block to the next, alternating: one in four on average.
#: Both numbers are odd, so that both forwards of a step with classifier-free guidance are reached.
#: A comparison takes some 22 ms of a forward's 360 (Wan2.1-1.3B, 32,760 tokens; the author's block
#: is 19 of them), so this is 1.5 %; on every forward it would be 6 %.
_PAUSES: Final = (3, 5)
#: Least distance, in blocks, between two blocks that are compared one after the other in this way.
_STRIDE: Final = 7
#: The prediction has to stay below this share of the target, so that later blocks have room.
_AIM: Final = 0.95


@dataclass(slots=True)
class _Forward:
    """The forward that one thread is in.

    Attributes:
        index: The last block that began.
        way: The attention options that hold beside the blocks' levels.
        step: Index of the denoising step, None if it is unknown.
        last: True on the last denoising step.
        sample: Index of the one block to compare on this forward, -1 for none.
        every: True if all blocks are compared on this forward.
    """

    index: int = 1 << 30
    way: tuple[Any, ...] = ()
    step: int | None = None
    last: bool = False
    sample: int = -1
    every: bool = False


@dataclass(slots=True)
class _Compared:
    """The comparisons of one way to run so far.

    Attributes:
        first: Indices of blocks that were compared on their first forward.
        last: Indices of blocks that were compared on a last step.
        author: Sum of `Shares.author` over the blocks so far.
        fast: Sum of `Shares.fast`.
    """

    first: set[int] = field(default_factory=set)
    last: set[int] = field(default_factory=set)
    author: float = 0.0
    fast: float = 0.0


class Guard:
    """The guard of one model.

    Args:
        config: How the model is patched.
        log: Gets a record of each comparison.
        count: The number of blocks.
        pipe: The diffusers pipeline whose scheduler knows the denoising step, held weakly; None
            for a model without one.
        agree: Returns the largest of each number over the ranks that share a sequence.
    """

    def __init__(
        self,
        config: PatchConfig,
        log: GuardLog,
        count: int,
        pipe: object | None,
        agree: Callable[[PatchedBlock, list[float]], list[float]],
    ) -> None:
        self._target = config.fidelity
        self.log, self._count, self._agree = log, count, agree
        # A diffusers pipeline can be referred to weakly.
        weak = hasattr(type(pipe), "__weakref__")
        self._pipe = weakref.ref(pipe) if weak else None
        self._seen: dict[Any, _Compared] = {}
        self._turn, self._due, self._sampled = 0, 4, 0
        # Without a common divisor of stride and count the samples reach every block.
        self._stride = next(n for n in itertools.count(_STRIDE) if math.gcd(n, max(count, 1)) == 1)
        self._asked = False
        #: Timesteps and the number of those of this network, which one read finds.
        self._steps: tuple[Any, int] = (None, 0)
        self._threads = threading.local()
        log.attach(self)

    def __getstate__(self) -> dict[str, Any]:
        # A copy does not belong to the pipeline.
        return vars(self) | {"_threads": None, "_pipe": None, "_steps": (None, 0)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _threads=threading.local())

    def check_next(self) -> None:
        """Compare every block on the next forward."""
        self._asked = True

    @property
    def prediction(self) -> float | None:
        """The predicted error of the network, in units of the unpatched network's.

        It is the largest over all ways to run, and None before all blocks of one were compared.
        """
        found = [(s.fast / s.author) ** 0.5 for s in self._seen.values() if s.author]
        return max(found, default=None)

    # --- which blocks ----------------------------------------------------------------------------

    def wants(self, block: PatchedBlock, inputs: tuple[Any, ...]) -> bool:
        """Return True if this call of a block is to be compared."""
        here: _Forward | None = getattr(self._threads, "here", None)
        if here is None:
            here = self._threads.here = _Forward()
        if block.index <= here.index:  # Blocks run in order, so a new forward began.
            self._begin(here, block, inputs)
        here.index = block.index
        if here.every or block.index == here.sample:
            return True
        seen = self._seen[here.way]
        if block.index not in seen.first:
            return not _capturing(block.streams(inputs)[0])
        return here.last and block.index not in seen.last

    def _begin(self, here: _Forward, block: PatchedBlock, inputs: tuple[Any, ...]) -> None:
        x, attend = block.streams(inputs)[0], block._asked
        one = ops.resolved(attend.spec(), x.device, *block.lengths(*inputs))
        here.way = x.dtype, x.device.type, one.attention, one.pv
        self._seen.setdefault(here.way, _Compared())
        now = None if self._pipe is None else self._step_of(self._pipe(), block.path)
        here.step = None if now is None else now[0]
        here.last = now is not None and now[0] == now[1] - 1
        capturing = _capturing(x)
        here.every, self._asked = self._asked and not capturing, self._asked and capturing
        self._turn += 1
        here.sample = -1
        if self._turn >= self._due and not capturing:
            self._due = self._turn + _PAUSES[self._turn % 2]
            here.sample = self._sampled = (self._sampled + self._stride) % self._count

    def _step_of(self, pipe: object, path: str) -> tuple[int, int] | None:
        """Return (index of a pipeline's denoising step, number of steps of this network), or None.

        The high-noise expert of Wan 2.2 runs the first steps alone.
        """
        scheduler: Any = getattr(pipe, "scheduler", None)
        timesteps = getattr(scheduler, "timesteps", None)
        if timesteps is None or len(timesteps) == 0:
            return None
        config = getattr(pipe, "config", None)
        ratio = getattr(config, "boundary_ratio", None)
        if ratio is None or path.partition(".")[0] != "transformer":
            steps = len(timesteps)
        elif self._steps[0] is timesteps:
            steps = self._steps[1]
        else:
            least = ratio * scheduler.config.num_train_timesteps
            steps = int((timesteps >= least).sum())
            self._steps = timesteps, steps
        return int(getattr(scheduler, "_step_index", None) or 0), steps

    # --- comparing -------------------------------------------------------------------------------

    @torch.no_grad()
    def compare(self, block: PatchedBlock, inputs: tuple[Any, ...]) -> Any:
        """Run a block, compare it with its author's, and raise its level until the error fits.

        Returns:
            The result of the block at its level from now on.
        """
        here: _Forward = self._threads.here
        seen, dtype = self._seen[here.way], block.streams(inputs)[0].dtype
        first = block.index not in seen.first
        notes = Notes()
        out = block.fast(notes, *inputs)
        try:
            author, expected = _author(block, inputs)
        except Exception as error:  # The author's code may miss a package or a device.
            words = f"its author's code failed: {type(error).__name__}: {error}"
            self._add(block, here, first, None, "not compared", words)
            seen.first.add(block.index)
            return out
        while True:
            fast = [author[0], *notes.streams, block.streams(out)]
            found = measure(fast, author, dtype)
            if found.error == float("inf"):
                self._refuse_non_finite(block, inputs, author)
            reason = self._why_over(block, found, notes, dtype, here, first)
            level = block.level if not reason else _next_level(block, notes)
            if level == block.level:
                break
            block.raise_level(level, reason)
            if not first:  # The fault began later, perhaps in other blocks too.
                here.every = self._asked = True
            self._add(block, here, first, found, LEVEL_WORDS[level], reason)
            if level == Level.AUTHOR:
                out = expected
                break
            notes = Notes()
            out = block.fast(notes, *inputs)
        if block.level != Level.AUTHOR:
            self._add(block, here, first, found, "kept", found.where)
        seen.first.add(block.index)
        if here.last:
            seen.last.add(block.index)
        return out

    def _why_over(
        self,
        block: PatchedBlock,
        found: Measure,
        notes: Notes,
        dtype: torch.dtype,
        here: _Forward,
        first: bool,
    ) -> str:
        """Return why a block has to run more exactly, or "" after counting its shares."""
        (error,) = self._agree(block, [found.error])
        if error > BUDGET:
            return f"{error:.3g} off in {found.where}, budget {BUDGET:g}"
        if not first or self._target is None:
            return ""
        int8 = any(forward.on for forward in block.int8)
        one = shares(found, notes.attention, dtype, int8)
        author, fast = self._agree(block, [one.author, one.fast])
        seen = self._seen[here.way]
        predicted = ((seen.fast + fast) / max(seen.author + author, 1e-60)) ** 0.5
        if predicted > _AIM * self._target and _next_level(block, notes) < Level.AUTHOR:
            return f"the network's error would be {predicted:.2f}, target {self._target:g}"
        seen.author += author
        seen.fast += fast
        return ""

    def _refuse_non_finite(
        self, block: PatchedBlock, inputs: tuple[Any, ...], author: Stages
    ) -> None:
        """Raise NonFiniteInputError if the author's result is not finite either."""
        if block.index == 0:
            bad = [x for x in inputs if isinstance(x, Tensor) and not bool(x.isfinite().all())]
            if bad:
                raise NonFiniteInputError(
                    f"the input of {block.path}",
                    expected="finite numbers",
                    got=f"a tensor {list(bad[0].shape)} with NaN or infinity",
                    remedy="Look at latents, text embedding and timestep",
                )

    def _add(
        self,
        block: PatchedBlock,
        here: _Forward,
        first: bool,
        found: Measure | None,
        verdict: str,
        where: str,
    ) -> None:
        when: When = "first" if first else "last" if here.last else "sampled"
        error = float("nan") if found is None else found.error
        self.log.add(GuardRecord(block.path, here.step, when, error, BUDGET, verdict, where))
        if verdict not in ("kept", "not compared"):
            _log.warning("%s: %s from now on: %s", block.path, verdict, where)


def _next_level(block: PatchedBlock, notes: Notes) -> Level:
    """Return the next level that changes how a block runs."""
    if block.level < Level.EXACT and block.config.attention not in ("exact",):
        return Level.EXACT
    if block.level < Level.WIDE and block.int8:
        return Level.WIDE
    return Level.AUTHOR


def _author(block: PatchedBlock, inputs: tuple[Any, ...]) -> tuple[Stages, Any]:
    """Run the author's block, and return its residual streams after each branch and its output.

    The author's forward runs on a shallow copy whose stages record their inputs. The block itself
    is not changed, because another thread may be running it.
    """
    found: list[tuple[Tensor, ...]] = []

    def noting(module: nn.Module) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            found.append(block.streams(args))
            return module(*args, **kwargs)

        return call

    twin = object.__new__(type(block.block))
    vars(twin).update(vars(block.block))
    for name in block.stages:
        vars(twin)[name] = noting(getattr(block.block, name))
    with in_16_bits():
        out = author_class(twin).forward(twin, *inputs)
    return [*found, block.streams(out)], out


def _capturing(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()
