"""The guard: run blocks again as their authors wrote them, and compare the results with those that
the fast path returns.

Each block is compared on its first forward and on the last denoising step where that is known.
After that, one block is compared on every fourth forward. A block over the budget runs more
exactly from that call on: values in fp8 become 16 bits wide, then attention exact, then Linears
run in 16 bits too, then the original forward runs. If a fault is found later than on a first
forward, the guard compares every block after it, and all blocks on the next forward. A call that
raises the level already returns the result at the new level, so equal inputs give equal results.

When all blocks of a forward were compared, `fidelity` may raise levels too, by the predicted error
of the network (`choose`), and the forward runs again (`network`). Later a block is raised whose
error is far above what it was then.

The guard compares nothing while a compiler traces, while a CUDA graph is captured, and where the
original forward runs anyway. A block that holds stateful code is not run a second time. Where the
original cannot run, or memory is short, the next forward tries again.

What a forward learns belongs to it until the block is decided, so forwards of several threads
decide alike. The guard compares few rows of each stream, and runs the original block for those
rows alone, whose queries still see all keys. It measures an attention as soon as it has run. So it
takes little more memory than the block, and over many rows a fifth of the original's operations.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from turbo_rcm_patch import ops
from turbo_rcm_patch.config import PatchConfig
from turbo_rcm_patch.errors import NonFiniteInputError
from turbo_rcm_patch.ops.replay import capturing
from turbo_rcm_patch.patching.block import LEVEL_DESCRIPTIONS, Level, PatchedBlock
from turbo_rcm_patch.patching.choose import (
    Forms,
    Rates,
    choose,
    levels_above,
    milliseconds,
    rates_of,
)
from turbo_rcm_patch.patching.guard_log import GuardLog, GuardRecord, When
from turbo_rcm_patch.patching.int8_linears import in_16_bits
from turbo_rcm_patch.patching.measure import (
    BUDGET,
    Measure,
    Notes,
    Shares,
    Stages,
    measure,
    predicted,
    sample,
    shares,
    why_cannot_run,
)
from turbo_rcm_patch.patching.plain import original_class

_log = logging.getLogger(__name__)

#: Forwards from one comparison of a single block to the next, alternating: one in four on average.
#: Both numbers are odd, so that both forwards of a step with classifier-free guidance are reached.
#: A comparison takes some 13 ms of a forward's 371 (Wan2.1-1.3B, 32,760 tokens; a first forward,
#: which compares all 30 blocks, takes 0.38 s more: results/2026-11-29/first_forward.txt): 0.9 % in
#: this way, and 3.4 % on every forward.
_FORWARDS_BETWEEN_CHECKS: Final = (3, 5)
#: Least distance, in blocks, between two blocks that are compared one after the other in this way.
_STRIDE: Final = 7
#: The prediction has to stay below this share of the target. With the target itself networks have
#: measured up to 15 % more than was predicted (results/2026-11-28/guard_margin.txt), and 27 % more
#: where no block was raised (results/2026-11-27/guard_prediction.txt).
_TARGET_SHARE: Final = 0.95
#: A block's error is far above that of its first forward, or of its plan, if its square exceeds
#: this many times the larger one of that and of the author's. The error of fp8 relative to the
#: author's differs up to four times between steps, downwards.
_FAR: Final = 4.0
#: The arguments of torch's attention that can be given by position.
_SDPA: Final = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")

_NOTHING: Final = Shares(0.0, 0.0)
#: One thread chooses at a time.
_DECIDING: Final = threading.Lock()


@dataclass(slots=True)
class _Measured:
    """A block that was compared on its first forward, or because all blocks were.

    Attributes:
        block: The block, which a report that is kept must not keep.
        ran: The level at which it ran.
        forms: What it adds to the network's error at that level and at higher ones; empty if that
            was not measured.
        when: The occasion of the comparison.
        error: Its error.
    """

    block: weakref.ref[PatchedBlock]
    ran: Level
    forms: Forms
    when: When
    error: float


@dataclass(slots=True)
class _Forward:
    """The forward that one thread is in.

    Attributes:
        index: The last block that began.
        way: The dtype, device and attention options of the forward.
        shares: What is known of the blocks at their levels, by index.
        rates: What the device does per second.
        measured: The blocks about which the forward decides at its end, by index.
        step: Index of the denoising step, None if it is unknown.
        last: True on the last denoising step.
        sample: Index of the one block to compare on this forward, -1 for none.
        every: True if all blocks are compared on this forward.
        stopped: True if a comparison could not run; no other is tried on this forward.
    """

    index: int = 1 << 30
    way: tuple[Any, ...] = ()
    rates: Rates = ()
    shares: dict[int, Shares] = field(default_factory=dict)
    measured: dict[int, _Measured] = field(default_factory=dict)
    step: int | None = None
    last: bool = False
    sample: int = -1
    every: bool = False
    stopped: bool = False

    def error(self) -> float:
        """Return the network's predicted error, by the blocks that are known."""
        return predicted(self.shares.values(), self.way[0])

    def exceeds(self, limit: float) -> bool:
        """Return True if the blocks so far have more error than a limit; True before the first.
        What is outside of the blocks is left out, since more blocks follow."""
        original, fast = map(sum, zip(_NOTHING, *self.shares.values(), strict=True))
        return bool(fast >= limit**2 * original)


@dataclass(slots=True)
class _Compared:
    """The comparisons of one way to run so far.

    Attributes:
        shares: What the blocks that were compared on their first forward add to the network's
            error, by index.
        last: Indices of blocks that were compared on a last step.
    """

    shares: dict[int, Shares] = field(default_factory=dict)
    last: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Call:
    """One call of a block that is compared.

    Attributes:
        block: The block.
        inputs: The inputs of its original forward.
        forward: The forward that it belongs to.
        first: True if its block is compared for the first time in this way to run.
        lengths: The lengths of its residual streams.
        fresh: True if no int8 copy can be out of date.
        original: Rows of the original's streams, once that has run.
    """

    block: PatchedBlock
    inputs: tuple[Any, ...]
    forward: _Forward
    first: bool
    lengths: list[int]
    fresh: bool
    original: Stages = ()


@dataclass(slots=True)
class _Attempt:
    """One run of a block at one level, compared with the original.

    Attributes:
        level: The level.
        out: The result of the block.
        measure: Its distance from the original; None if it was not compared.
        failed: Why it could not be compared on this rank, or "".
        skipped: True if it could not be compared on a rank that shares the sequence.
        forms: What it adds to the network's error at this level and at higher ones.
        reason: Why the block has to run more exactly, or "".
    """

    level: Level
    out: Any
    measure: Measure | None = None
    failed: str = ""
    skipped: bool = False
    forms: Forms = field(default_factory=dict)
    reason: str = ""


class Guard:
    """The guard of one model.

    Args:
        config: How the model is patched.
        log: Gets a record of each comparison.
        count: The number of blocks.
        pipe: The diffusers pipeline whose scheduler knows the denoising step, held weakly; None
            for a model without one.
        agree: `ulysses.all_reduce_max`, so that all ranks that run a block decide alike.
    """

    def __init__(
        self,
        config: PatchConfig,
        log: GuardLog,
        count: int,
        pipe: object | None,
        agree: Callable[..., list[float]],
    ) -> None:
        self._target = config.fidelity
        self._limit = math.inf if config.fidelity is None else _TARGET_SHARE * config.fidelity
        self.log, self._count, self._agree = log, count, agree
        # A diffusers pipeline can be referred to weakly.
        weak = hasattr(type(pipe), "__weakref__")
        self._pipe = weakref.ref(pipe) if weak else None
        self._seen: dict[Any, _Compared] = {}
        self._trusted: tuple[dict[int, Shares], tuple[str, ...]] = ({}, ())
        self._turn, self._due, self._sampled = 0, 4, 0
        # Without a common divisor of stride and count the samples reach every block.
        self._stride = next(n for n in itertools.count(_STRIDE) if math.gcd(n, max(count, 1)) == 1)
        self._asked, self.requests = False, 0
        #: Timesteps and the number of those of this network, which one read finds.
        self._steps: tuple[Any, int] = (None, 0)
        self._threads = threading.local()
        log.attach(self)

    def __getstate__(self) -> dict[str, Any]:
        # A copy does not belong to the pipeline.
        return vars(self) | {"_threads": None, "_pipe": None, "_steps": (None, 0)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _threads=threading.local())

    def trust(self, shares: dict[int, Shares], way: tuple[str, ...]) -> None:
        """Take over what a plan measured, by the index of a block: in this way to run no first
        forward compares these."""
        self._trusted = shares, way

    def holds(self) -> bool:
        """Return True if no more was measured than what a plan told."""
        told, way = self._trusted
        seen = list(self._seen.items())
        return all((each.shares, tuple(map(str, key))) == (told, way) for key, each in seen)

    def decided(self) -> tuple[dict[int, Shares], float | None, tuple[str, ...]]:
        """Return what is known of the blocks that were compared on their first forward, by index,
        and the predicted error of the network by that, None where nothing was measured; of the way
        to run with the largest error, and that: dtype, kind of device, attention and values."""
        measured = []
        for way, seen in list(self._seen.items()):
            shares, names = {**seen.shares}, tuple(map(str, way))
            known = any(map(any, shares.values()))
            error = predicted(shares.values(), way[0]) if known else None
            measured.append((shares, error, names))
        return max(measured, key=lambda way: way[1] or 0.0, default=({}, None, ()))

    def check_next(self) -> None:
        """Compare every block on the next forward."""
        self._asked = True
        self.requests += 1

    @property
    def prediction(self) -> float | None:
        """The predicted error of the network, in units of the unpatched network's.

        It is the largest over all ways to run, and None before anything was measured.
        """
        return self.decided()[1]

    # --- which blocks ----------------------------------------------------------------------------

    def wants(
        self, block: PatchedBlock, inputs: tuple[Any, ...], lengths: tuple[int, int]
    ) -> bool:
        """Return True if a call of a block is to be compared; lengths as in `block.lengths`."""
        here: _Forward | None = getattr(self._threads, "here", None)
        if here is None:
            here = self._threads.here = _Forward()
        if block.index <= here.index:  # Blocks run in order, so a new forward began.
            self._begin(here, block, inputs, lengths)
        here.index = block.index
        if here.stopped:
            return False
        if here.every or block.index == here.sample:
            return True
        if block.index not in here.shares:
            return not capturing(block.streams(inputs)[0])
        return here.last and block.index not in self._seen[here.way].last

    def _begin(
        self,
        here: _Forward,
        block: PatchedBlock,
        inputs: tuple[Any, ...],
        lengths: tuple[int, int],
    ) -> None:
        if here.index == self._count - 1:  # Other code replaced the network's forward.
            self.decide()
        here.measured = {}
        x = block.streams(inputs)[0]
        spec = ops.resolved(block.asked, x.device, *lengths)
        here.way = x.dtype, x.device.type, spec.attention, spec.pv
        here.rates = rates_of(x.device)[0]
        trusted, way = self._trusted
        known = {**trusted} if way == tuple(map(str, here.way)) else {}
        seen = self._seen.setdefault(here.way, _Compared(known))
        here.shares = dict(seen.shares)
        here.stopped = False
        now = None if self._pipe is None else self._step_of(self._pipe(), block.path)
        here.step = None if now is None else now[0]
        here.last = now is not None and now[0] == now[1] - 1
        captured = capturing(x)
        here.every, self._asked = self._asked and not captured, self._asked and captured
        self._turn += 1
        here.sample = -1
        if self._turn >= self._due and not captured:
            self._due = self._turn + _FORWARDS_BETWEEN_CHECKS[self._turn % 2]
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
        if self._steps[0] is not timesteps:
            steps = len(timesteps)
            if ratio is not None and path.partition(".")[0] == "transformer":
                steps = int((timesteps >= ratio * scheduler.config.num_train_timesteps).sum())
            self._steps = timesteps, steps
        return int(getattr(scheduler, "_step_index", None) or 0), self._steps[1]

    # --- comparing -------------------------------------------------------------------------------

    @torch.no_grad()
    def compare(self, block: PatchedBlock, inputs: tuple[Any, ...]) -> Any:
        """Run a block, compare it with its original, and raise its level until the error fits.

        Returns:
            The result of the block at its level from now on.
        """
        here: _Forward = self._threads.here
        if stateful := block.stateful_code():
            self._skip(block, here, f"{stateful}, which is not run a second time")
            return block.fast(*inputs)
        call = _Call(
            block=block,
            inputs=inputs,
            forward=here,
            first=block.index not in here.shares,
            lengths=[x.shape[1] for x in block.streams(inputs)],
            fresh=not block.int8,
        )
        attempt = self._run_and_measure(call)
        while self._runs_again(call, attempt):
            attempt.out = None  # The next attempt needs the memory.
            attempt = self._run_and_measure(call)
        self._conclude(call, attempt)
        if self._count == 1 and self.decide():  # Its network may be the block itself.
            return block.fast(*inputs)
        return attempt.out

    def _run_and_measure(self, call: _Call) -> _Attempt:
        """Run a block at its present level, and measure how far it is from the original."""
        block, here = call.block, call.forward
        if block.level == Level.ORIGINAL:
            return _Attempt(block.level, _run_original(block, call.inputs, {}))
        # Values in 16 bits cost another attention: they are measured where they may be needed.
        above = levels_above(block, block.level, *here.way[2:])
        wide = not block.level.attention and above[0].attention == Level.WIDE_VALUES
        wide = wide and (here.every or here.exceeds(self._limit))
        notes = Notes(measures=self._target is not None, wide=wide)
        attempt = _Attempt(block.level, block.fast(*call.inputs, notes=notes), failed=notes.failed)
        fast: Stages = ()
        try:
            if not attempt.failed:
                call.original = call.original or _run_original_rows(block, call.inputs)
                fast = [call.original[0], *notes.streams, sample(block.streams(attempt.out))]
                attempt.measure = measure(fast, call.original, call.lengths, here.way[0])
        except Exception as error:
            attempt.failed = why_cannot_run(error)
        # Nothing can be learned where the original's result is not finite.
        infinite = attempt.measure is not None and attempt.measure.error == math.inf
        if infinite and not _finite(call.original):
            self._refuse_non_finite(block, call.inputs)
            attempt.measure, attempt.failed = None, "the original block's result is not finite"
        # All ranks that share a sequence go the same way.
        measured = attempt.measure
        off, skipped = self._agree(
            block, [measured.error if measured else 0.0], float(not measured)
        )
        attempt.skipped = bool(skipped)
        if attempt.skipped or measured is None:
            return attempt
        if off > BUDGET and block.copies is not None and not call.fresh:
            block.copies.forget()  # A weight may have changed and its int8 copy not.
            call.fresh = True
            del attempt, fast
            return self._run_and_measure(call)
        if off > BUDGET:
            attempt.reason = f"{off:.3g} off in {measured.where}, budget {BUDGET:g}"
        elif self._target is not None:
            attempt.forms = self._forms(call, fast, notes, wide=wide)
            attempt.reason = self._far_above(call, attempt.forms)
        return attempt

    def _forms(self, call: _Call, fast: Stages, notes: Notes, *, wide: bool) -> Forms:
        """Return what a block adds to the network's error at its level and at higher ones."""
        block, here = call.block, call.forward
        int8, dtype = any(forward.on for forward in block.int8), here.way[0]
        last = getattr(block.proj_out, "weight", None)
        channels = call.original[-1][-1].shape[-1]
        if type(last) is not nn.Parameter or last.is_meta or last.shape[-1] != channels:
            last = None  # sharded, offloaded, quantised or of another stream
        errors = notes.errors or (0.0,) * (3 if wide else 2)  # of no rank's own head
        numbers = shares(fast, call.original, errors, last, dtype, int8)
        original, *fasts, least = self._agree(block, [*numbers])
        if not math.isfinite(original + sum(fasts) + least):
            return {block.level: _NOTHING}
        by_attention = {Level.EXACT.attention: fasts[-1], block.level.attention: fasts[0]}
        if wide:
            by_attention[Level.WIDE_VALUES.attention] = fasts[1]
        return {
            level: Shares(original, max(by_attention[level.attention], least * level.int8_linears))
            for level in [block.level, *levels_above(block, block.level, *here.way[2:])[:-1]]
            if level.attention in by_attention
        }

    def _far_above(self, call: _Call, forms: Forms) -> str:
        """Say if a block has an error that it had not on its first forward, or by its plan."""
        share, known = forms[call.block.level], call.forward.shares.get(call.block.index)
        if known is None or call.forward.every or known == _NOTHING:
            return ""
        expected = max(known.fast, share.original)
        if share.fast <= _FAR * expected:
            return ""
        times = (share.fast / expected) ** 0.5
        return f"its error is {times:.3g} times what was measured when its level was chosen"

    def _runs_again(self, call: _Call, attempt: _Attempt) -> bool:
        """Return True if a block has to run again, at the higher level that it has then."""
        block = call.block
        if attempt.skipped or attempt.level == Level.ORIGINAL:
            return False
        if block.level != attempt.level:  # Another thread raised it meanwhile.
            return True
        if not attempt.reason:
            return False
        here = call.forward
        level = levels_above(block, attempt.level, *here.way[2:])[0]
        block.raise_level(level, attempt.reason)
        if not call.first:  # The fault began later, perhaps in other blocks too.
            here.every = self._asked = True
        assert attempt.measure is not None
        self._add(
            block.path,
            here,
            _when(call.first, here),
            attempt.measure.error,
            LEVEL_DESCRIPTIONS[level],
            attempt.reason,
        )
        return True

    def _conclude(self, call: _Call, attempt: _Attempt) -> None:
        """Remember what a comparison found."""
        block, here = call.block, call.forward
        if attempt.skipped:
            here.stopped, self._asked = True, self._asked or here.every
            if attempt.failed:
                self._skip(block, here, attempt.failed)
            return
        when = _when(call.first, here)
        error = 0.0 if attempt.measure is None else attempt.measure.error
        if attempt.measure is not None:
            self._add(block.path, here, when, error, "kept", attempt.measure.where)
        if call.first or here.every:
            measured = _Measured(weakref.ref(block), attempt.level, attempt.forms, when, error)
            here.measured[block.index] = measured
            here.shares[block.index] = attempt.forms.get(attempt.level, _NOTHING)
        if here.last:
            self._seen[here.way].last.add(block.index)

    def forget(self) -> None:
        """Forget what this thread's forward measured, which did not end."""
        self._threads.here = _Forward()

    def decide(self) -> bool:
        """Choose the levels of the blocks that this thread's forward measured, at its end.

        Returns:
            True if a block ran at another level than it has now.
        """
        here: _Forward | None = getattr(self._threads, "here", None)
        if here is None or not here.measured:
            return False
        measured, here.measured = here.measured, {}
        if here.stopped:  # The next forward measures all again.
            return False
        with _DECIDING:
            return self._decide(here, measured)

    def _decide(self, here: _Forward, measured: dict[int, _Measured]) -> bool:
        held = {index: block for index, each in measured.items() if (block := each.block())}
        if any(block.level != measured[index].ran for index, block in held.items()):
            return True  # Another thread decided meanwhile.
        blocks = {index: block for index, block in held.items() if measured[index].forms}
        forms = [measured[index].forms for index in blocks]
        attention, pv = here.way[2:]
        times = [
            {level: milliseconds(block, level, attention, pv, here.rates) for level in each}
            for block, each in zip(blocks.values(), forms, strict=True)
        ]
        others = [share for index, share in here.shares.items() if index not in blocks]
        levels = choose(forms, times, others, self._limit, here.way[0])
        reason = (
            f"the network's predicted error would be {here.error():.3g}, limit "
            f"{self._limit:.3g} ({_TARGET_SHARE} of fidelity={self._target})"
        )
        raised = {}
        for (index, block), level in zip(blocks.items(), levels, strict=True):
            if block.raise_level(level, reason):
                each, verdict = measured[index], LEVEL_DESCRIPTIONS[block.level]
                self._add(block.path, here, each.when, each.error, verdict, reason)
                raised[index] = here.shares[index] = each.forms[block.level]
        seen = self._seen[here.way]
        # Of several forwards that measured all blocks the one with the largest error counts.
        worse = here.error() > predicted(seen.shares.values(), here.way[0])
        if worse or not here.shares.keys() <= seen.shares.keys():
            seen.shares = {**here.shares}
        else:
            seen.shares |= raised
        return bool(raised)

    def _skip(self, block: PatchedBlock, here: _Forward, why: str) -> None:
        """Record once that a block was not compared."""
        if any(record.path == block.path and record.where == why for record in self.log.skipped):
            return
        when = _when(block.index not in here.shares, here)
        nan = float("nan")
        self.log.add(GuardRecord(block.path, here.step, when, nan, BUDGET, "not compared", why))
        _log.warning("%s is not compared: %s", block.path, why)

    def _refuse_non_finite(self, block: PatchedBlock, inputs: tuple[Any, ...]) -> None:
        """Raise NonFiniteInputError if the first block was given an input that is not finite."""
        for x in inputs if block.index == 0 else ():
            if isinstance(x, Tensor) and not bool(x.isfinite().all()):
                raise NonFiniteInputError(
                    f"the input of {block.path}",
                    expected="finite numbers",
                    got=f"a tensor {list(x.shape)} with NaN or infinity",
                    remedy="Look at latents, text embedding and timestep",
                )

    def _add(
        self, path: str, here: _Forward, when: When, error: float, verdict: str, where: str
    ) -> None:
        """Record a comparison, and log a decision."""
        self.log.add(GuardRecord(path, here.step, when, error, BUDGET, verdict, where))
        if verdict != "kept":
            # A target may raise every block: the first one warns, the report has them all.
            known = error <= BUDGET and sum(record.verdict == verdict for record in self.log) > 1
            level = logging.INFO if known else logging.WARNING
            _log.log(level, "%s: %s from now on: %s", path, verdict, where)


def _when(first: bool, forward: _Forward) -> When:
    return "first" if first else "last" if forward.last else "sampled"


def _run_original_rows(block: PatchedBlock, inputs: tuple[Any, ...]) -> Stages:
    """Run the original block for the rows that are compared, and return these rows of its residual
    streams before the first branch and after each.

    Only the self-attention reads other rows, so it alone runs over the whole sequence.
    """
    stages: list[tuple[Tensor, ...]] = []
    streams = block.streams(inputs)
    members: dict[str, Any] = {}
    keep: Callable[[Any], tuple[Tensor, ...]] = sample
    *text, video = (x is not y for x, y in zip(sample(streams), streams, strict=True))
    if block.mixes and video and not any(text):
        members[block.mixes], keep = _attention_of_rows(block, inputs), tuple
        inputs = block.rows_of(lambda x: sample((x,))[0], *inputs)

    def noting(module: nn.Module) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            stages.append(keep(block.streams(args)))
            return module(*args, **kwargs)

        return call

    members |= {name: noting(getattr(block.block, name)) for name in block.stages}
    out = keep(block.streams(_run_original(block, inputs, members)))
    return [*stages, out]


def _run_original(block: PatchedBlock, inputs: tuple[Any, ...], members: dict[str, Any]) -> Any:
    """Run the original forward on a shallow copy of the block with some members replaced.

    The block itself is not changed, because another thread may be running it.
    """
    twin = object.__new__(type(block.block))
    vars(twin).update(vars(block.block) | block.original_members() | members)
    with in_16_bits():
        return original_class(twin).forward(twin, *inputs)


class _AttentionReached(Exception):  # noqa: N818  no error
    """Ends an original forward at its self-attention, and carries the arguments of that.

    All rows are needed up to there, and only some from there on. Without an end, the rest of the
    block would run over all rows, which is most of its work.
    """


def _attention_of_rows(block: PatchedBlock, inputs: tuple[Any, ...]) -> Callable[..., Any]:
    """Return what stands for the author's self-attention: it attends over the whole sequence,
    whatever it is given, and returns the rows that are compared."""

    def stop(*args: Any, **kwargs: Any) -> None:
        raise _AttentionReached(args, kwargs)

    try:
        _run_original(block, inputs, {block.mixes: stop})
    except _AttentionReached as reached:
        args, kwargs = reached.args
    attention: Any = block.original_members().get(block.mixes, getattr(block.block, block.mixes))

    def call(*_: Any, **__: Any) -> Any:
        queries = _SomeQueries([x.shape[1] for x in block.streams(inputs)])
        with queries if block.plain_attention() else nullcontext():
            out = attention(*args, **kwargs)
        if queries.some:
            return out
        return sample(out) if isinstance(out, tuple) else sample((out,))[0]

    return call


class _SomeQueries(TorchFunctionMode):
    """Gives an attention over all streams the queries of the rows that are compared.

    An attention that is not torch's, has a mask or other lengths is left alone.

    Args:
        lengths: The lengths of the streams, in their order; only the last one is sampled.

    Attributes:
        some: True if an attention was given some of its queries.
    """

    def __init__(self, lengths: list[int]) -> None:
        super().__init__()
        self._before, self._all, self.some = sum(lengths[:-1]), sum(lengths), False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            arguments = dict(zip(_SDPA, args, strict=False)) | kwargs
            query = arguments["query"].transpose(1, -2)
            masked = arguments.get("attn_mask") is not None or arguments.get("is_causal")
            if query.dim() == 4 and query.shape[1] == self._all and not masked:
                before, after = query.split([self._before, self._all - self._before], 1)
                arguments["query"] = torch.cat([before, *sample((after,))], 1).transpose(1, -2)
                args, kwargs, self.some = (), arguments, True
        return func(*args, **kwargs)


def _finite(stages: Stages) -> bool:
    return all(bool(x.isfinite().all()) for streams in stages for x in streams)
