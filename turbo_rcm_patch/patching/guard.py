"""The guard: compares each closed pair with its author's code on real forwards of inference.

It compares all pairs on the first and the last step of each expert, and another few of them on
every step in between. A pair (norm, branch, gate and residual) over budget, or with a non-finite
value, goes back to its author's code for good. Which step a forward belongs to is what the
pipeline says when it enters the model's `cache_context`; in a patched pipeline whose calls do not
say it, the scheduler knows. Where nobody knows, the first forward is checked, and a few pairs now
and then; `report.guard.check_next()` asks for all of them.

What is compared is what the next pair gets: ours runs once and is the result. Nothing that hangs
on a module is called a second time (`author`). The guard does nothing while a compiler traces or a
graph is captured and in training, and costs a few attribute look-ups on other forwards.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import gcd, inf, isnan
from typing import Any, Final
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from turbo_rcm_patch.config import PatchConfig
from turbo_rcm_patch.errors import NonFiniteInputError
from turbo_rcm_patch.ops.exchange import ContextParallel, told
from turbo_rcm_patch.patching.author import Notes, nothing, ones
from turbo_rcm_patch.patching.int8_linear import Int8Linear
from turbo_rcm_patch.patching.measure import NORM_SHARE, Measure, measure
from turbo_rcm_patch.patching.noise import (
    Noise,
    Share,
    choose,
    head_noise,
    pair_noise,
    quantised,
)
from turbo_rcm_patch.patching.plain import drops, weight_is_known
from turbo_rcm_patch.patching.report import Decision, GuardLog, GuardRecord
from turbo_rcm_patch.patching.state import SPARSE, PairState, Step, When

_log = logging.getLogger(__name__)

#: A residual stream, or one tensor each of several.
Branch = Tensor | tuple[Tensor, ...]


class PipelineSteps:
    """What a diffusers pipeline knows about its denoising loop, held weakly where that can be.

    It is only asked on forwards, and only until the guard has seen a first and a last step.
    """

    def __init__(self, pipe: object, component: str) -> None:
        self._pipe: Callable[[], Any] | None = _reference(pipe)
        self._component = component
        #: The scheduler's timesteps, which are others in every run, how many there were, and the
        #: last step of this run, once it is known.
        self._timesteps: Callable[[], object] = _gone
        self._run = 0
        self._last: int | None = None

    def __getstate__(self) -> dict[str, object]:
        # A weak reference can neither be pickled nor mean anything in another process.
        kept = {"_pipe": None, "_timesteps": _gone, "_last": None}
        return vars(self) | kept

    def __deepcopy__(self, memo: dict[int, object]) -> PipelineSteps:
        other = PipelineSteps.__new__(PipelineSteps)
        vars(other).update(self.__getstate__())
        return other

    def run(self) -> int:
        """A number for the current run of the loop; the next one has another."""
        pipe = self._pipe() if self._pipe is not None else None
        timesteps = getattr(getattr(pipe, "scheduler", None), "timesteps", None)
        if timesteps is not None and self._timesteps() is not timesteps:
            self._timesteps, self._last = _reference(timesteps), None
            self._run += 1
        return self._run

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
        index = getattr(scheduler, "_step_index", None)
        if index is None:  # It counts none, or not yet; from a video the first one is not 0.
            index = _position(timestep, getattr(scheduler, "timesteps", None))
        if index is None and hasattr(scheduler, "_step_index"):
            index = getattr(scheduler, "_begin_index", None) or 0
        return None if index is None else int(index)

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
        if self._last is None:
            boundary = ratio * pipe.scheduler.config.num_train_timesteps  # type: ignore[union-attr]
            self._last = int((timesteps >= boundary).sum()) - 1  # Waits for the device.
        return self._last


def _reference(x: object) -> Callable[[], object]:
    """A weak reference, to what can have one."""
    try:
        return weakref.ref(x)
    except TypeError:
        return lambda: x


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


@torch.no_grad()
def _not_finite(inputs: dict[str, Tensor]) -> dict[str, tuple[Tensor, int]]:
    """How many values of each tensor are not finite, without waiting for them, and its size."""
    return {name: ((~torch.isfinite(x)).sum(), x.numel()) for name, x in inputs.items()}


@dataclass(slots=True)
class _Thread:
    """Where one thread is in its denoising loop.

    Attributes:
        context: What the pipeline announced: name ("cond", "uncond"), step and step count.
        names: Names of the forwards ("cond", "uncond") seen of the current step.
        step: Index of the current step.
        whens: What pairs are checked as on the current forward: a single step is the first and
            the last, and a pair that missed the first one is seen on a later one.
        chosen: The pairs of "middle", by their states' ids.
        turn: What these follow from.
        between: Whether some pairs were compared as "middle", on this step or in this run.
        standing: How many steps' worth of pairs this forward compares; with CUDA graphs those of
            the whole run.
        untold: Forwards that no step is known of.
        inputs: Of the current forward, until a pair of it is compared: how many values of each
            are not finite, and how many it has. A report holds a guard, and a forward may compare
            no pair, so the inputs themselves are not kept.
        fresh: Whether no pair of the current forward was compared yet.
        again: Whether it is another forward of the same step.
        done: What pairs were compared as on this step, by their states' ids.
        run: Which run of the loop it is in, where the pipeline says it.
        way: How the current forward runs, as its first block says.
        blind: Whether a value of the current forward's residual stream is not finite.
    """

    context: tuple[str, int | None, int | None] | None = None
    names: set[str] = field(default_factory=set)
    step: int | None = None
    whens: tuple[When, ...] = ()
    chosen: frozenset[int] = frozenset()
    turn: int = 0
    between: bool = False
    standing: int = 1
    untold: int = 0
    inputs: dict[str, tuple[Tensor, int]] = field(default_factory=dict)
    fresh: bool = False
    again: bool = False
    done: dict[int, When] = field(default_factory=dict)
    run: int | None = None
    way: Hashable = None
    blind: bool = False


class Guard:
    """The guard of one model (one expert).

    Which forward is checked is a thread's own affair; what a pair still has to show is kept in its
    state, and is over only once it was compared, so a forward that is interrupted leaves the rest
    to the next one. Only the ranks that share the sequence of a parallel forward decide together,
    through the group of that model's own mesh. In any other forward a rank decides for itself,
    because ranks need not run the same forwards, and a collective that one of them does not join
    never returns.
    """

    def __init__(
        self,
        config: PatchConfig,
        path: str,
        log: GuardLog,
        steps: PipelineSteps | None,
        model: nn.Module,
        states: list[PairState],
    ) -> None:
        self.log = log
        self._budget = config.guard_budget
        self._target = config.fidelity if config.chooses else None
        self._graphs = config.cuda_graphs
        self._turn = 0
        #: By the path of a pair: those closed with it, and its last record with a noise.
        self._noises: dict[str, tuple[tuple[PairState, ...], GuardRecord]] = {}
        self._digest: int | None = None
        self._unsettled = False
        self._path = path
        self._steps = steps
        self._states = states
        # A report holds a guard, and must not keep a model's memory.
        self._model: Callable[[], nn.Module | None] = weakref.ref(model)
        self._make()
        log.attach(self)

    def _make(self) -> None:
        self._threads = threading.local()
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, object]:
        # Neither a lock nor a thread's place can be pickled or means anything in a copy.
        kept = {k: v for k, v in vars(self).items() if k not in ("_threads", "_lock")}
        return kept | {"_model": self._model()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        model = state["_model"]
        self._model = weakref.ref(model) if model is not None else _gone
        self._make()

    @property
    def _here(self) -> _Thread:
        here: _Thread | None = getattr(self._threads, "here", None)
        if here is None:
            here = self._threads.here = _Thread()
        return here

    def check_next(self) -> None:
        """Check the next forward whatever its step."""
        for state in self._states:
            state.unseen.add("asked")

    def unseen(self) -> list[str]:
        """Paths of the pairs that run fused and were not compared yet."""
        return [s.pair.path for s in self._states if s.live and "first" in s.unseen]

    # --- where in the denoising loop we are ------------------------------------------------------

    def enter(self, name: str, step: int | None, count: int | None) -> None:
        """The pipeline announces a forward: its name ("cond", "uncond"), step and step count."""
        self._here.context = (name, step, count)

    def leave(self) -> None:
        """The announced forward is over."""
        self._here.context = None

    def begin(self, way: Hashable = None, /, **inputs: Tensor) -> None:
        """A forward reaches the first patched block; decides whether it is checked.

        Args:
            way: What decides how pairs run beside their states: dtype, device, and what
                attention="auto" and pv="auto" take for the lengths; None if nobody says. What was
                compared in one way is compared again on the first forward in another: attention
                that was exact in a short video has shown nothing about int8 in a long one.
            **inputs: Of the first block.

        Not in a forward that somebody may differentiate or that draws dropout masks: an input
        requires a gradient, or gradients are on and a parameter requires one, or a dropout is
        active, or torch.func or forward-mode differentiation runs it. There the author's code
        would draw other masks, and what is kept for the backward pass would be computed twice. Nor
        while a CUDA graph is captured, where nothing can be read.
        """
        here = self._here
        before, here.whens, here.inputs, here.fresh = here.whens, (), {}, False
        here.way, here.blind = way, False
        self._settle()
        live = [s for s in self._states if s.live] if way is not None else []
        new = [s for s in live if s.ways and way not in s.ways]
        if new and not self._is_training(inputs):
            for state in new:
                state.unseen |= {"first", "last"}
        whens = self._labels(here, before)
        if not whens:
            return
        if self._is_training(inputs) or _capturing():
            here.names = set()
            return
        here.whens, here.inputs, here.fresh = whens, _not_finite(inputs), True
        if "middle" in whens:
            with self._lock:
                turn, self._turn = self._turn, (self._turn + 1) % _TURNS
            self._choose(here, turn)

    def begun(self, whens: Sequence[When]) -> tuple[int, ...]:
        """What the forward that began is checked as, a bit for each, whether it is another one of
        its step, and the turn: for ranks that have to check the same."""
        here = self._here
        turn = here.turn if "middle" in here.whens else 0
        return (*[int(when in here.whens) for when in whens], int(here.again), turn)

    def resume(self, whens: Sequence[When], turn: int) -> None:
        """The forward that began is checked as these and on this turn, which ranks agreed on."""
        here = self._here
        here.whens, here.again, here.done, here.fresh = tuple(whens), False, {}, bool(whens)
        if "middle" in whens:
            with self._lock:
                self._turn = (turn + 1) % _TURNS
            self._choose(here, turn)

    @property
    def measured(self) -> int:
        """A digest of what the pairs add to the error of the network, by which heads are chosen:
        for ranks that have to choose the same."""
        if self._digest is None:
            with self._lock:
                noises = [(path, one.noise) for path, (_, one) in self._noises.items()]
            self._digest = crc32(repr(noises).encode())
        return self._digest

    def measure_again(self) -> None:
        """Forget what the pairs add to the error of the network, which ranks measured apart, and
        measure it on the next forward."""
        with self._lock:
            self._noises, self._digest, self._unsettled = {}, None, False
        self.check_next()

    def skips(self) -> bool:
        """Whether the forward that begins now is none to check. Then it counts as begun, though it
        may reach no block: a CUDA graph is replayed in its place."""
        unchecked = self.unchecked()
        if unchecked is None:
            return False
        self.skip(unchecked)
        return True

    def unchecked(self) -> _Thread | None:
        """What `skip` takes, if the forward that begins now is none to check; nothing counts as
        begun by that."""
        here = self._here
        self._settle()
        next_one = replace(here, names=set(here.names), whens=(), inputs={})
        return None if self._labels(next_one, here.whens) else next_one

    def skip(self, unchecked: _Thread) -> None:
        """Count the forward that begins now as begun."""
        self._threads.here = unchecked

    def _is_training(self, inputs: dict[str, Tensor]) -> bool:
        if any(x.requires_grad for x in inputs.values()) or _transformed():
            return True
        model = self._model()
        if model is None:
            return False
        if torch.is_grad_enabled() and any(p.requires_grad for p in model.parameters()):
            return True
        return any(
            drops(part)
            for part in model.modules()
            if isinstance(part, nn.modules.dropout._DropoutNd)
        )

    def _labels(self, here: _Thread, before: tuple[When, ...]) -> tuple[When, ...]:
        unseen = {when for state in self._states if state.live for when in state.unseen}
        name, step, count = here.context or ("", None, None)
        if step is None and self._steps is not None:
            step = self._steps.index()
        if before and here.context is not None and step == here.step and name not in here.names:
            # The second forward of classifier-free guidance belongs to the same step.
            here.names.add(name)
            here.again = True
            return tuple(when for when in before if when != "middle")
        run = self._steps.run() if self._steps is not None else None
        on = step is not None and here.step is not None and step >= here.step and run == here.run
        here.run = run
        here.between = here.between and on and (self._graphs or step == here.step)
        here.names, here.step, here.again, here.done = {name}, step, False, {}
        whens: list[When] = []
        if "first" in unseen:
            whens.append("first")
        if "asked" in unseen:
            whens.append("asked")
        if "last" in unseen and step is not None and step == self._last_step(count):
            whens.append("last")
        seen = any(state.live and not state.unseen - {"last"} for state in self._states)
        if seen and self._between(here, step, count):
            whens.append("middle")
        return tuple(whens)

    def _between(self, here: _Thread, step: int | None, count: int | None) -> bool:
        """Whether some pairs are compared on a forward between the first step and the last one:
        once a step; with CUDA graphs once a run, because that forward runs plain."""
        if step is None:
            here.standing = _UNTOLD if self._graphs else 1
            here.untold = (here.untold + 1) % (_UNTOLD * here.standing)
            return here.untold == 0
        last = self._last_step(count)
        if here.between or step < 1 or (last is not None and step >= last):
            return False
        here.standing = max(1, (last or 2) - 1) if self._graphs else 1
        # An expert may begin behind that step, and a video may, too.
        here.between = step >= 1 + self._turn % here.standing or not self._graphs
        return here.between

    def _choose(self, here: _Thread, turn: int) -> None:
        """The pairs that are compared on this turn. In time all of them come up, and those of
        turns that follow each other lie far apart."""
        live = [state for state in self._states if state.live]
        size = len(live)
        some = max(1, size // _MIDDLE) * here.standing
        stride = next((n for n in range(int(_FAR * size), size) if gcd(n, size) == 1), 1)
        here.turn = turn
        places = range(turn * some, turn * some + min(some, size))
        here.chosen = frozenset(id(live[place * stride % size]) for place in places)

    def _last_step(self, count: int | None) -> int | None:
        last = self._steps.last() if self._steps is not None else None
        return last if last is not None or count is None else count - 1

    def _refuse_non_finite(self, here: _Thread, pair: Pair) -> None:
        inputs, here.inputs, here.fresh = here.inputs, {}, False
        counts = {name: int(wrong) for name, (wrong, _) in inputs.items()}
        what, got = "an input", ""
        if pair.parallel is not None:  # No rank may stop alone.
            device = _parts(pair.residual)[0].device
            found = told("not finite", [sum(counts.values())], pair.parallel, device)
            ranks = [str(rank) for rank, (count,) in enumerate(found) if count]
            got = f"others on rank {', '.join(ranks)}" if ranks else ""
        for name, count in counts.items():
            if count:
                what, got = name, f"{count} of {inputs[name][1]} values not finite"
                break
        if got:
            here.whens, here.names = (), set()  # The step has yet to be seen.
            raise NonFiniteInputError(
                f"{what} of the first patched block of {self._path or 'the model'}",
                expected="finite values",
                got=got,
                remedy="Check the latents, the prompt embeddings and the layers before the "
                "blocks. On a later step a pair that was not compared before may have made them; "
                "report.guard.check_next() compares all. With guard=False such values pass "
                "through, as in the author's code",
            )

    # --- comparing -------------------------------------------------------------------------------

    def wants(self, states: tuple[PairState, ...]) -> bool:
        """Whether this forward is to show that these pairs are right."""
        here: _Thread | None = getattr(self._threads, "here", None)
        return here is not None and not here.blind and self._shown_as(here, states) is not None

    @staticmethod
    def _shown_as(here: _Thread, states: tuple[PairState, ...]) -> When | None:
        for when in here.whens:
            if any(when in state.unseen for state in states):
                return when
        if "middle" in here.whens and any(id(state) in here.chosen for state in states):
            return "middle"
        # Guidance's other forward shows what the first one showed.
        return here.done.get(id(states[0])) if here.whens and here.again else None

    def close(self, pair: Pair) -> Branch:
        """Run a pair, compare it with its author's code, and give it back over budget.

        Before that, what can be made more precise is: Linears that run in int8 are given back
        first, then, with precision="auto", p and v get 16 bits, then the attention is exact. The
        pair runs once more after each step; hooked modules are called again only with another
        input. With precision="auto" what the pair adds to the error of the network is measured,
        too. What the target asks for is decided once all pairs of the forward were compared, and
        holds from the next forward on.

        Returns:
            What the pair comes to, as it was accepted or as its author wrote it.

        Raises:
            NonFiniteInputError: An input of the first block has a NaN or an infinity.
        """
        here = self._here
        when = self._shown_as(here, pair.states) or "asked"
        if here.fresh:
            self._refuse_non_finite(here, pair)
        notes = Notes(wants_operands=self._target is not None and when != "middle")
        try:
            return self._compared(here, when, pair, notes)
        finally:
            notes.forget()

    def _compared(self, here: _Thread, when: When, pair: Pair, notes: Notes) -> Branch:
        before = _decided(pair)
        with notes.taken():
            result = pair.ours()
        with torch.no_grad():
            reference = _Reference(pair, notes, brief=when == "middle")
        failed = False
        while True:
            found = self._measured(reference, result, pair)
            over = found.error > self._budget
            if found.error == inf and self._is_blind(pair):
                here.blind = True
                if "middle" in here.whens:  # A pair that is not compared now may have made it so.
                    with self._lock:
                        self._record(when, here.step, pair, found, "not compared")
                    self.check_next()
                return result
            noise = None
            if not (over or when == "middle" or self._target is None):
                noise = reference.noise(result)
            broken = None if noise is None else noise.broken
            failed = failed or over or broken is not None
            if not over and broken is None:
                with self._lock:
                    self._record(when, here.step, pair, found, "kept", noise)
                break
            with self._lock:
                step: Step | None = None
                # Another thread's step came in between: what it made of the pair is measured
                # first. Ranks that share a sequence have to take the same steps.
                late = pair.parallel is None and before != _decided(pair)
                if over and not late:
                    step = next((one.next_step for one in pair.states if one.next_step), None)
                if not late:
                    self._record(when, here.step, pair, found, step or "given back", noise)
                    what = _STEPS[step] if step else "given back to its author's code"
                    reason = self._reason(when, here.step, what, found)
                    if noise is not None and broken is not None:
                        one = noise.heads[broken]
                        reason = (
                            f"{what} by the guard: head {broken} runs exactly and is "
                            f"{one.error:.3g} from exact attention, where rounding is "
                            f"{one.rounding:.3g}"
                        )
                    for state in pair.states:
                        _log.warning("%s: %s", state.pair.path, reason)
                        if step is None:
                            state.give_back(reason)
                        else:
                            state.take(step, reason)
            notes.operands, before = None, _decided(pair)
            with notes.taken():
                result = pair.ours()
            if not pair.states[0].live:
                break
        for state in pair.states:
            state.unseen.difference_update({*here.whens, "asked"})
            here.done[id(state)] = when
            if when != "middle":
                state.ways.add(here.way)
        if when == "middle":
            if failed:
                self.check_next()  # What was right on the first step is no longer.
        elif not here.again and not any(s.live and s.unseen & {*here.whens} for s in self._states):
            self._settle()
        return result

    @torch.no_grad()
    def _is_blind(self, pair: Pair) -> bool:
        """Whether the residual stream before a pair is not finite, which shows nothing about the
        pair or those behind it. Where all pairs are compared none of ours made it so: one that
        does is its author's before the next one runs."""
        wrong = sum(int((~torch.isfinite(x)).sum()) for x in _parts(pair.residual))
        if pair.parallel is not None:  # The error is that of all ranks, so all of them ask.
            device = _parts(pair.residual)[0].device
            wrong = sum(n for (n,) in told("not finite", [wrong], pair.parallel, device))
        if wrong:
            _log.warning(
                "%s: %d values of the residual stream before it are not finite; from here on the "
                "guard compares nothing on this forward",
                pair.states[0].pair.path,
                wrong,
            )
        return wrong > 0

    def _settle(self) -> None:
        """Make more exact what the target for the network asks for, after a forward whose pairs
        were compared; what changes is compared on the next one."""
        if not self._unsettled or self._target is None:
            return
        with self._lock:
            self._unsettled = False
            noises: dict[str, Noise] = {}
            for path, (states, record) in self._noises.items():
                one = record.noise
                assert one is not None
                back = Noise(one.author, one.author, tokens=one.tokens)
                noises[path] = one if states[0].live else back
            for path, (linears, heads) in choose(noises, self._target).items():
                states, record = self._noises[path]
                target = f"the target of {self._target:g} for the network's error"
                if linears:
                    for state in states:
                        state.take(
                            "linears given back",
                            f"{_STEPS['linears given back']} by the guard for {target}",
                        )
                    self.log.add(replace(record, verdict="linears given back"))
                if heads:
                    count = len({*heads, *states[0].exact_heads})
                    reason = f"{count} heads made exact by the guard for {target}"
                    states[0].take_heads(heads, reason)
                    self.log.add(replace(record, verdict="some heads exact"))
                for state in states:
                    state.unseen.add("asked")

    @torch.no_grad()
    def _measured(self, reference: _Reference, result: Branch, pair: Pair) -> Measure:
        found = reference.compare(result, self._budget)
        if pair.parallel is None:
            return found
        device = _parts(pair.residual)[0].device
        errors = [error for (error,) in told("guard", [float(found.error)], pair.parallel, device)]
        worst = max(errors, key=lambda error: inf if isnan(error) else error)
        if worst == errors[pair.parallel.rank]:
            return found
        where = f"the part of rank {errors.index(worst)}"
        return replace(found, error=worst, where=where)

    def _record(
        self,
        when: When,
        at: int | None,
        pair: Pair,
        found: Measure,
        verdict: Decision,
        noise: Noise | None = None,
    ) -> None:
        for state in pair.states:
            record = GuardRecord(
                path=state.pair.path,
                step=at,
                when=when,
                error=found.error,
                budget=self._budget,
                verdict=verdict,
                where=found.where,
                sample=found.sample,
                head=found.head,
                head_error=found.head_error,
                gain=found.gain,
                rows=found.rows,
                row_error=found.row_error,
                noise=noise if state is pair.states[0] else None,
            )
            self.log.add(record)
            if record.noise is not None:
                self._noises[state.pair.path] = pair.states, record
                self._digest = None
                self._unsettled = True

    def _reason(self, when: When, at: int | None, what: str, found: Measure) -> str:
        where = "" if at is None else f" (index {at})"
        return (
            f"{what} by the guard: relative L2 {found.error:.3g} exceeds the budget of "
            f"{self._budget:g} on the {when} step{where}, in {found.where}"
        )


@dataclass(slots=True)
class Pair:
    """What a block hands over to have a pair checked.

    Attributes:
        states: The pairs it closes (cross-attention and its image branch go through one output
            projection, so they are one).
        residual: [B, N, C], or one tensor a stream.
        ours: Runs the pair from norm to residual as the states' flags say.
        author: Runs the author's code of the pair from a residual, with the branch in its place
            that it is given, or with the author's own, made over the notes.
        attention: Our attention before the output projection, [B, N, H * D], with the notes of
            `ours`; it returns None where the branch is none or was called.
        parallel: The ranks that share the sequence, and compare their parts of it now.
        narrowed: Whether ours goes on from a wider residual stream than the author's code gets.
    """

    states: tuple[PairState, ...]
    residual: Branch
    ours: Callable[[], Branch]
    author: Callable[[Notes, Branch, Callable[..., Any] | None], Branch]
    attention: Callable[[], Tensor | None] = lambda: None
    parallel: ContextParallel | None = None
    narrowed: bool = False


class _Reference:
    """The author's side of a comparison, made once; in brief without what takes another attention:
    ours before the projection, and the last keys."""

    def __init__(self, pair: Pair, notes: Notes, *, brief: bool) -> None:
        self._pair, self._notes, self._brief = pair, notes, brief
        self._author = _parts(pair.author(notes, pair.residual, None))
        self._base = _parts(pair.residual)
        if any(stream.c_skip != "1" for stream in pair.states[0].pair.streams):
            self._base = _parts(pair.author(notes, pair.residual, nothing))
        self._theirs, self._before = notes.theirs, notes.before
        self._replayed, notes.replayed = notes.replayed, []
        self._heads = pair.states[0].pair.heads if notes.before is not None else 0
        #: Of the output projection; and whether what stands there does nothing beside it.
        self._weight: Tensor | None = None
        self._plain = False
        self._gates: tuple[Tensor, ...] | None = None
        self._last_keys: Tensor | None = None
        self._ours_before: Tensor | None = None
        output = notes.output
        if output is None or self._before is None:
            return
        self._weight = _weight_for_noise(output, self._before)
        self._plain = weight_is_known(output, self._before)
        if self._weight is None:
            return
        still = tuple(torch.zeros_like(x) for x in self._base)
        zero = still if isinstance(pair.residual, tuple) else still[0]
        self._gates = _parts(pair.author(notes, zero, ones))
        sums = any(state.pair.path.endswith(SPARSE) for state in pair.states)
        if self._plain and not brief and not sums:
            self._last_keys = notes.last_keys()

    def compare(self, result: Branch, budget: float) -> Measure:
        notes, pair = self._notes, self._pair
        inputs = [(one, other, 1.0) for one, other in self._replayed]
        if notes.ours is not None and self._theirs is not None:
            ours, room = notes.ours, NORM_SHARE
            if not isinstance(ours, Tensor):
                int8, scale = ours
                ours, room = int8[..., : self._theirs.shape[-1]] * scale.unsqueeze(-1), 1.0
            inputs.append((ours, self._theirs, room))
        before = None
        if self._heads and not self._brief:
            with notes.taken():
                before = pair.attention()
        self._ours_before = before
        return measure(
            _narrowed(_parts(result), self._author),
            self._author,
            self._base,
            inputs=inputs,
            heads=self._heads,
            before=self._before,
            ours_before=before,
            gates=self._gates if self._plain else None,
            weight=self._weight if self._plain else None,
            last_keys=self._last_keys,
        )

    @torch.no_grad()
    def noise(self, result: Branch) -> Noise:
        """What the pair adds to the error of its network, after `compare`; the same on all ranks
        that share a sequence."""
        state, given, before = self._pair.states[0], self._notes.operands, self._ours_before
        ours, heads, gates, weight = _parts(result), None, self._gates, self._weight
        known = before is not None and gates is not None and weight is not None
        exact = state.heads_in_16_bits
        eight = given is not None and quantised(given)
        known = known and given is not None and given.heads_apart and (eight or len(exact) > 0)
        # Nothing of it is replayed in front of a weight, so what is left over is what 8 bits add.
        rest = eight and (not given.heads_apart or self._notes.output is None)
        whole = rest or not eight
        parallel, share = self._pair.parallel, None
        if parallel is not None:
            # All ranks gather keys, or none does.
            tokens = sum(y.shape[1] for y in self._author)
            asked = [int(known), int(whole), tokens]
            rows = told("noise", asked, parallel, ours[0].device)
            known, whole = (all(row[i] for row in rows) for i in (0, 1))
            share = Share(parallel, tuple(row[2] for row in rows))
        if known:
            assert before is not None and gates is not None and weight is not None
            heads = head_noise(given, before, weight, gates, share)
        wide = ours[0].dtype == torch.float32 and self._author[0].dtype != torch.float32
        found = pair_noise(
            ours, self._author, self._base, wide=wide, narrowed=self._pair.narrowed,
            linears=state.int8, rest=rest, heads=heads, exact=exact, share=share,
        )  # fmt: skip
        return replace(found, known=known or whole)


_STEPS: Final[dict[Step, str]] = {
    "linears given back": "int8 Linears given back",
    "some heads exact": "some heads made exact",
    "16-bit p and v": "p and v changed to 16 bits",
    "exact attention": "attention made exact",
}
#: Of how many pairs one is compared on a step between the first and the last one. It costs what
#: its author's code takes: with 90 pairs some 2 % of a forward, with guidance half of that.
_MIDDLE: Final = 60
#: Forwards of an unknown step between two of which pairs are compared.
_UNTOLD: Final = 8
#: How far pairs of turns that follow each other lie apart, as a share of all.
_FAR: Final = 0.618
#: Turns are counted up to here, for ranks tell each other theirs as a byte.
_TURNS: Final = 251


def _decided(pair: Pair) -> list[object]:
    """What decides how a pair runs, of each of its states."""
    return [(s.live, s.int8, s.precision, s.exact_heads) for s in pair.states]


def _weight_for_noise(output: Any, x: Tensor) -> Tensor | None:
    """The weight that carries what heads add to the residual stream; None where none can be read.

    A hook, an adapter or a dtype of its own changes little about that, so unlike a multiplication
    in the module's place the estimate may read past them.
    """
    weight: Any = getattr(output, "weight", None)
    if isinstance(output, Int8Linear):
        weight = weight.as_subclass(Tensor)
    if type(weight) not in (nn.Parameter, Tensor) or weight.is_meta:
        return None
    readable = weight.is_floating_point() and weight.shape[1:] == x.shape[-1:]
    return weight.detach().to(x.device) if readable else None


def _gone() -> None:
    """A model that is not there."""


def _parts(branch: Branch) -> tuple[Tensor, ...]:
    return (branch,) if isinstance(branch, Tensor) else branch


def _narrowed(ours: tuple[Tensor, ...], author: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Our streams in the dtype of the author's, where ours are wider."""
    return tuple(
        x.to(y.dtype) if x.dtype == torch.float32 else x for x, y in zip(ours, author, strict=True)
    )


def _transformed() -> bool:
    """Whether torch.func or forward-mode differentiation looks on: no value can be read there, or
    what is computed twice is differentiated twice."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


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
