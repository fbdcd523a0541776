"""The guard: run blocks again as their authors wrote them, and compare the results with those that
the fast path returns.

Each block is compared on its first forward and on the last denoising step where that is known.
After that, one block is compared on every fourth forward. A block over the budget runs more
exactly from that call on: values in fp8 become 16 bits wide, then attention exact, then Linears
run in 16 bits too, then its author's code runs. If a fault is found later than on a first forward,
the guard compares every block after it, and all blocks on the next forward. On a block's first
forward `fidelity` may raise its level too, by the predicted error of the network. A call that
raises the level already returns the result at the new level, so equal inputs give equal results.

The guard compares nothing while a compiler traces, while a CUDA graph is captured, and where the
author's forward runs anyway. A block that holds something foreign is not run a second time. Where
the author's code cannot run, or memory is short, the next forward tries again.

What a forward learns belongs to it until the block is decided, so forwards of several threads
decide alike. The guard compares few rows of each stream, and runs the author's block for those
rows alone, whose queries still see all keys. It measures an attention as soon as it has run. So it
takes little more memory than the block, and over many rows a fifth of the author's operations.
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
from turbo_rcm_patch.patching.block import LEVEL_WORDS, Level, PatchedBlock
from turbo_rcm_patch.patching.int8_linears import in_16_bits
from turbo_rcm_patch.patching.measure import (
    BUDGET,
    Measure,
    Shares,
    Stages,
    attention_errors,
    measure,
    predicted,
    sample,
    shares,
)
from turbo_rcm_patch.patching.pieces import Notes, Operands
from turbo_rcm_patch.patching.plain import author_class, capturing
from turbo_rcm_patch.patching.report import GuardLog, GuardRecord, When

_log = logging.getLogger(__name__)

#: Forwards from one comparison of a single block to the next, alternating: one in four on average.
#: Both numbers are odd, so that both forwards of a step with classifier-free guidance are reached.
#: A comparison took some 22 ms of a forward's 360 (Wan2.1-1.3B, 32,760 tokens) when the author's
#: block ran over all rows, 19 of them: 1.5 % in this way, and 6 % on every forward.
_FORWARDS_BETWEEN_CHECKS: Final = (3, 5)
#: Least distance, in blocks, between two blocks that are compared one after the other in this way.
_STRIDE: Final = 7
#: The prediction has to stay below this share of the target, because networks have measured up to
#: 15 % more than was predicted (results/2026-11-28/guard_margin.txt).
_TARGET_SHARE: Final = 0.95
#: What an error says if code cannot run here or memory is short, beside the errors of that kind.
_CANNOT: Final = (
    *("out of memory", "allocate memory", "not enough memory", "no kernel image"),
    *("not implemented", "not supported", "not compiled with", "Could not run", "cpu tensor"),
)
#: The arguments of torch's attention that can be given by position.
_SDPA: Final = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")

_NOTHING: Final = Shares(0.0, 0.0)


@dataclass(slots=True)
class _Forward:
    """The forward that one thread is in.

    Attributes:
        index: The last block that began.
        way: The attention options that hold beside the blocks' levels.
        shares: What is known of the blocks that were compared on their first forward, by index.
        step: Index of the denoising step, None if it is unknown.
        last: True on the last denoising step.
        sample: Index of the one block to compare on this forward, -1 for none.
        every: True if all blocks are compared on this forward.
        stopped: True if a comparison could not run; no other is tried on this forward.
    """

    index: int = 1 << 30
    way: tuple[Any, ...] = ()
    shares: dict[int, Shares] = field(default_factory=dict)
    step: int | None = None
    last: bool = False
    sample: int = -1
    every: bool = False
    stopped: bool = False


@dataclass(slots=True)
class _Compared:
    """The comparisons of one way to run so far.

    Attributes:
        shares: Of the blocks that were compared on their first forward, by index.
        last: Indices of blocks that were compared on a last step.
    """

    shares: dict[int, Shares] = field(default_factory=dict)
    last: set[int] = field(default_factory=set)


class _Notes(Notes):
    """Notes that keep little memory: some rows of the streams, and the errors of the attention.

    Args:
        measures: True to measure the attention.

    Attributes:
        errors: The errors of the attention, or None.
        failed: Why it could not be measured, or "".
    """

    class _Rows(list[tuple[Tensor, ...]]):
        def append(self, streams: tuple[Tensor, ...]) -> None:
            super().append(sample(streams))

    def __init__(self, measures: bool) -> None:
        super().__init__()
        self.streams = self._Rows()
        self.errors: tuple[float, float] | None = None
        self.failed = ""
        self._measures = measures

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "attention" or value is None:
            super().__setattr__(name, value)
        elif self._measures:
            try:
                self.errors = attention_errors(Operands(*value))
            except Exception as error:
                self.failed = _why_cannot_run(error)


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
        self.log, self._count, self._agree = log, count, agree
        # A diffusers pipeline can be referred to weakly.
        weak = hasattr(type(pipe), "__weakref__")
        self._pipe = weakref.ref(pipe) if weak else None
        self._seen: dict[Any, _Compared] = {}
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

    def check_next(self) -> None:
        """Compare every block on the next forward."""
        self._asked = True
        self.requests += 1

    @property
    def prediction(self) -> float | None:
        """The predicted error of the network, in units of the unpatched network's.

        It is the largest over all ways to run, and None before all blocks of one were compared.
        """
        seen = [(list(seen.shares.values()), way[0]) for way, seen in list(self._seen.items())]
        return max([predicted(*one) for one in seen if any(map(any, one[0]))], default=None)

    def within_video(self) -> bool:
        """Return True if the pipeline is known to be past the first step of a video."""
        now = None if self._pipe is None else self._step_of(self._pipe(), "")
        return now is not None and 0 < now[0] < now[1]

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
        x = block.streams(inputs)[0]
        one = ops.resolved(block._asked, x.device, *lengths)
        here.way = x.dtype, x.device.type, one.attention, one.pv
        here.shares = dict(self._seen.setdefault(here.way, _Compared()).shares)
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
        if foreign := block.foreign():
            self._skip(block, here, f"{foreign}, which is not run a second time")
            return block.fast(None, *inputs)
        streams = block.streams(inputs)
        lengths, dtype = [x.shape[1] for x in streams], streams[0].dtype
        first, fresh = block.index not in here.shares, not block.int8
        author: Stages = []
        out = None
        while True:
            level, out = block.level, None  # Frees the result of a lower level.
            notes = _Notes(first and self._target is not None)
            out = block.fast(notes, *inputs)
            found, failed = None, notes.failed
            try:
                if not author and not failed:
                    author = _author(block, inputs)
                if not failed:
                    fast = [author[0], *notes.streams, sample(block.streams(out))]
                    found = measure(fast, author, lengths, dtype)
            except Exception as error:
                failed = _why_cannot_run(error)
            # Nothing can be learned where the author's own result is not finite.
            if found is not None and found.error == math.inf and not _finite(author):
                self._refuse_non_finite(block, inputs)
                found, failed = None, "its author's result is not finite"
            # All ranks that share a sequence go the same way.
            off, skip = self._agree(block, [found.error if found else 0.0], float(not found))
            if skip or found is None:
                here.stopped, self._asked = True, self._asked or here.every
                if failed:
                    self._skip(block, here, failed)
                return out
            if off > BUDGET and not fresh and block.copies is not None:
                block.copies.forget()  # A weight may have changed behind its int8 copy.
                fresh = True
                continue
            if off > BUDGET:
                share, reason = _NOTHING, f"{off:.3g} off in {found.where}, budget {BUDGET:g}"
            else:
                share, reason = self._share(block, fast, author, notes, here, first)
            higher = _next_level(block, *here.way[2:]) if reason else level
            if block.level == level < higher:  # else another thread raised it meanwhile
                block.raise_level(higher, reason)
                if not first:  # The fault began later, perhaps in other blocks too.
                    here.every = self._asked = True
                self._add(block, here, first, found, LEVEL_WORDS[higher], reason)
            if block.level == Level.AUTHOR:
                out, share = _run_author(block, inputs, {}), _NOTHING
                break
            if block.level == level:
                break
        if block.level != Level.AUTHOR:
            self._add(block, here, first, found, "kept", found.where)
        seen = self._seen[here.way]
        if first:
            here.shares[block.index] = share
            seen.shares.setdefault(block.index, share)
        if here.last:
            seen.last.add(block.index)
        return out

    def _share(
        self,
        block: PatchedBlock,
        fast: Stages,
        author: Stages,
        notes: _Notes,
        here: _Forward,
        first: bool,
    ) -> tuple[Shares, str]:
        """Return the shares of a block, and why it has to run more exactly for the target, or
        ""."""
        if not first or self._target is None:
            return _NOTHING, ""
        int8, dtype = any(forward.on for forward in block.int8), here.way[0]
        last = getattr(block.proj_out, "weight", None)
        channels = author[-1][-1].shape[-1]
        if type(last) is not nn.Parameter or last.is_meta or last.shape[-1] != channels:
            last = None  # sharded, offloaded, quantised or of another stream
        found = shares(fast, author, notes.errors, last, dtype, int8)
        one = Shares(*self._agree(block, [*found]))
        if not math.isfinite(one.author + one.fast):
            return _NOTHING, ""
        error = predicted([*here.shares.values(), one], dtype)
        higher = _next_level(block, *here.way[2:])
        if error > _TARGET_SHARE * self._target and higher < Level.AUTHOR:
            return one, f"the network's error would be {error:.2f}, target {self._target:g}"
        return one, ""

    def _skip(self, block: PatchedBlock, here: _Forward, words: str) -> None:
        """Record once that a block was not compared."""
        if not any(one.path == block.path and one.where == words for one in self.log.skipped):
            self._add(block, here, block.index not in here.shares, None, "not compared", words)
            _log.warning("%s is not compared: %s", block.path, words)

    def _refuse_non_finite(self, block: PatchedBlock, inputs: tuple[Any, ...]) -> None:
        """Raise NonFiniteInputError if the first block was given an input that is not finite."""
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
            # A target may raise every block: the first one warns, the report has them all.
            known = error <= BUDGET and sum(one.verdict == verdict for one in self.log) > 1
            level = logging.INFO if known else logging.WARNING
            _log.log(level, "%s: %s from now on: %s", block.path, verdict, where)


def _next_level(block: PatchedBlock, attention: str, pv: str) -> Level:
    """Return the next level that changes how a block with this attention and pv runs."""
    if block.level < Level.WIDE_VALUES and ops.quantises(attention) and pv == "fp8":
        return Level.WIDE_VALUES
    asked = block.config.attention == "exact"
    exact = asked or (attention == "exact" and not block.other_forwards())
    if block.level < Level.EXACT and not exact:
        return Level.EXACT
    if block.level < Level.EXACT_16BIT and block.int8:
        return Level.EXACT_16BIT
    return Level.AUTHOR


def _author(block: PatchedBlock, inputs: tuple[Any, ...]) -> Stages:
    """Run the author's block for the rows that are compared, and return these rows of its residual
    streams before the first branch and after each.

    Only the self-attention reads other rows, so it alone runs over the whole sequence.
    """
    found: list[tuple[Tensor, ...]] = []
    streams = block.streams(inputs)
    members: dict[str, Any] = {}
    keep: Callable[[Any], tuple[Tensor, ...]] = sample
    *text, video = (x is not y for x, y in zip(sample(streams), streams, strict=True))
    if block.mixes and video and not any(text):
        members[block.mixes], keep = _attention_of_rows(block, inputs), tuple
        inputs = block.rows_of(lambda x: sample((x,))[0], *inputs)

    def noting(module: nn.Module) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            found.append(keep(block.streams(args)))
            return module(*args, **kwargs)

        return call

    members |= {name: noting(getattr(block.block, name)) for name in block.stages}
    out = keep(block.streams(_run_author(block, inputs, members)))
    return [*found, out]


def _run_author(block: PatchedBlock, inputs: tuple[Any, ...], members: dict[str, Any]) -> Any:
    """Run the author's forward on a shallow copy of the block with some members replaced.

    The block itself is not changed, because another thread may be running it.
    """
    twin = object.__new__(type(block.block))
    vars(twin).update(vars(block.block) | block.author_members() | members)
    with in_16_bits():
        return author_class(twin).forward(twin, *inputs)


class _Given(Exception):  # noqa: N818  no error: it ends the author's forward at its attention
    pass


def _attention_of_rows(block: PatchedBlock, inputs: tuple[Any, ...]) -> Callable[..., Any]:
    """Return what stands for the author's self-attention: it attends over the whole sequence,
    whatever it is given, and returns the rows that are compared."""

    def stop(*args: Any, **kwargs: Any) -> None:
        raise _Given(args, kwargs)

    try:
        _run_author(block, inputs, {block.mixes: stop})
    except _Given as given:
        args, kwargs = given.args
    attention: Any = block.author_members().get(block.mixes, getattr(block.block, block.mixes))

    def call(*_: Any, **__: Any) -> Any:
        queries = _SomeQueries([x.shape[1] for x in block.streams(inputs)])
        with queries if block.plain_attention() else nullcontext():
            made = attention(*args, **kwargs)
        if queries.some:
            return made
        return sample(made) if isinstance(made, tuple) else sample((made,))[0]

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
            given = dict(zip(_SDPA, args, strict=False)) | kwargs
            query = given["query"].transpose(1, -2)
            masked = given.get("attn_mask") is not None or given.get("is_causal")
            if query.dim() == 4 and query.shape[1] == self._all and not masked:
                before, after = query.split([self._before, self._all - self._before], 1)
                given["query"] = torch.cat([before, *sample((after,))], 1).transpose(1, -2)
                args, kwargs, self.some = (), given, True
        return func(*args, **kwargs)


def _why_cannot_run(error: Exception) -> str:
    """Return why code cannot run here, by its error; raise an error that says something else.

    Kept, the error would hold what its traceback does until the garbage collector runs.
    """
    kinds = (NotImplementedError, ImportError, MemoryError, torch.OutOfMemoryError)
    device = getattr(torch, "AcceleratorError", RuntimeError)
    words = type(error) in (RuntimeError, ValueError, AssertionError, device)
    if not (isinstance(error, kinds) or (words and any(one in str(error) for one in _CANNOT))):
        raise error
    return f"its author's code failed: {type(error).__name__}: {error}"


def _finite(stages: Stages) -> bool:
    return all(bool(x.isfinite().all()) for streams in stages for x in streams)
