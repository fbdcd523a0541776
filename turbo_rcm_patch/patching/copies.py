"""The int8 copies of a model's weights, and how they stay those of the weights it has now.

A copy is good for the tensors it was made from, as long as they hold the bits they held then. Most
changes show in a tensor's identity, version or address. What is written through `.data` (peft's
`fuse_lora`, an average of weights that is copied in, some fused optimisers) does not, so the bits
are compared, by checksums taken on the device (`ops.Fingerprints`):

- in front of the first copy that a forward uses, those of all copies, in one pass, and the host
  waits once for the answer;
- in front of a copy that is used a second time within one forward, or whose weight was elsewhere
  when all were looked at, its own.

So between two uses of a copy its weight was looked at, and nothing that happens between two
forwards can be missed. What can be: a weight that is written through `.data` while a forward runs,
between that forward's first block and its own. The next forward sees it.

Where nothing can be asked, while a compiler traces or somebody captures a CUDA graph, no copy is
used: the graph quantises the weight on every replay. A graph of our own (`graphs`) reads the
copies where they are, because we look at them in front of every replay.
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from turbo_rcm_patch import ops
from turbo_rcm_patch.config import Impl
from turbo_rcm_patch.ops import Fingerprints
from turbo_rcm_patch.ops.int8_linear import GROUP, scales_of_rows
from turbo_rcm_patch.ops.modes import is_capturing, reference, synchronize
from turbo_rcm_patch.ops.operation import running_for_real
from turbo_rcm_patch.patching.int8_weights import attached_int8, stands_for

#: How often in a row a weight may have moved since the forward before (a model goes to its device,
#: or there and back between two videos). One that moves again is offloaded on every forward, and
#: an int8 copy of it would hold the memory that offloading is to save.
_MOVES: Final = 2

#: (block, name of the Linears within it).
Key = tuple[int, str]
#: int8 [Cout, K], its scales, bias [Cout] or None.
Made = tuple[Tensor, Tensor, Tensor | None]
_Place = tuple[int, torch.device, torch.dtype, torch.Size, tuple[int, ...]]

#: Of every model that is alive.
_ALL: Final[weakref.WeakSet[Copies]] = weakref.WeakSet()
_ALL_LOCK: Final = threading.RLock()


@dataclass(slots=True, eq=False)
class _Copy:
    """An int8 weight and what it was made from.

    Attributes:
        made: None where it is not kept.
        checksums: Of the sources when it was made, int64.
        prints: What takes them again.
        sources: Weights and biases, held weakly where that is allowed.
        versions: How often each had been written to.
        places: Where each was and how it lay there, and the same of int8 weights that came with
            them.
        moves: How often in a row the sources had moved since the forward before.
        moved: Whether they were elsewhere when all copies were looked at.
        sound: The forward in which the bits were last found to be the same.
        used: The forward in which it was last used.
    """

    made: Made | None
    checksums: Tensor | None
    prints: Fingerprints | None
    sources: tuple[Callable[[], Tensor | None], ...]
    versions: tuple[int, ...]
    places: tuple[_Place, ...]
    moves: int
    moved: bool
    sound: int
    used: int

    def is_of(self, parameters: Sequence[Tensor]) -> bool:
        """Whether it was made from these, unless something was written behind their versions."""
        return (
            len(parameters) == len(self.sources)
            and all(ref() is p for ref, p in zip(self.sources, parameters, strict=True))
            and self.versions == tuple(p._version for p in parameters)
        )

    def in_place(self) -> bool:
        """Whether the sources are where they were, with the versions they had."""
        return _in_place([source() for source in self.sources], self.versions, self.places)

    def holds(self, linears: Sequence[Any]) -> bool:
        """`in_place`, and whether these are the Linears it was made from, without an int8 weight
        of their own."""
        parameters: list[Tensor | None] = []
        for linear in linears:
            if linear._buffers:
                return False
            own = linear._parameters
            bias = own["bias"]
            parameters += (own["weight"],) if bias is None else (own["weight"], bias)
        return (
            len(parameters) == len(self.places) == len(self.sources)
            and all([p is source() for p, source in zip(parameters, self.sources, strict=True)])
            and _in_place(parameters, self.versions, self.places)
        )

    def release(self) -> None:
        """Give the memory back, once no stream reads it any more."""
        if self.made is not None and not is_capturing(self.made[0].device):
            synchronize(self.made[0].device, every_stream=True)
        self.made = self.checksums = self.prints = None


def _in_place(
    sources: Sequence[Tensor | None], versions: Sequence[int], places: Sequence[_Place]
) -> bool:
    """Whether tensors are where they were, with the versions they had. Places that follow are of
    int8 weights."""
    for x, version, place in zip(sources, versions, places, strict=False):
        if x is None or x._version != version:
            return False
        # `_place` without a call, because every forward asks for every weight.
        if (x.data_ptr(), x.device, x.dtype, x.shape, x.stride()) != place:
            return False
    return True


class Held:
    """A copy that a CUDA graph reads."""

    __slots__ = ("_copy", "_int8")

    def __init__(self, copy: _Copy, int8: Tensor) -> None:
        self._copy, self._int8 = copy, weakref.ref(int8)

    def is_kept(self) -> bool:
        """Whether it is where it was when the graph was captured."""
        made = self._copy.made
        return made is not None and made[0] is self._int8()


class Copies:
    """The int8 copies of one model, for all of its blocks.

    A deep copy or a pickle starts empty.
    """

    __slots__ = (
        "__weakref__",
        "_blocks",
        "_closed",
        "_copies",
        "_forward",
        "_impl",
        "_lock",
        "_looked",
        "_reader",
        "_together",
    )

    def __init__(self, impl: Impl) -> None:
        self._impl = impl
        self._copies: dict[Key, _Copy] = {}
        self._blocks = 0
        self._forward = 0
        self._looked = False
        self._closed = False
        self._lock = threading.RLock()
        # The thread that captures a graph of ours, and what the graph reads.
        self._reader: tuple[int, list[Held]] | None = None
        # The copies of a device that were last looked at together, and what did it.
        self._together: dict[torch.device, tuple[list[_Copy], Fingerprints, Tensor]] = {}
        with _ALL_LOCK:
            _ALL.add(self)

    def __reduce__(self) -> tuple[type[Copies], tuple[Impl]]:
        return Copies, (self._impl,)

    @property
    def impl(self) -> Impl:
        """ "triton", "reference" or "auto"."""
        return self._impl

    def add_block(self) -> int:
        """A number for one more block."""
        self._blocks += 1
        return self._blocks

    def begin(self) -> None:
        """A forward of the model begins: weights may have changed since the last."""
        self._forward += 1
        self._looked = False

    def of(self, key: Key, linears: Sequence[Any]) -> Made:
        """The int8 weight of some Linears over the same input, the stored one where it is good.

        Args:
            key: The block and a name for these Linears within it.
            linears: Plain Linears with [Cout, K] weights, of one K.

        Returns:
            int8 [sum of Cout, K], its scales as `ops.int8_linear` takes them, and the bias
            [sum of Cout] or None.
        """
        if is_capturing(linears[0].weight.device):
            return self._in_place(key, linears) or self.fresh(linears, brought=False)
        with self._lock:
            if not torch._C._len_torch_dispatch_stack():
                return self._kept(key, linears)
            # Selective checkpointing records the operations of a forward and replays them in the
            # backward; looking after copies is none of them.
            with _disable_current_modes():
                return self._kept(key, linears)

    @contextmanager
    def read_in_place(self) -> Iterator[list[Held]]:
        """Let a graph that this thread captures inside read the copies where they are. Whoever
        replays it calls `look` before, and asks what was yielded whether it is still kept."""
        held: list[Held] = []
        self._reader = (threading.get_ident(), held)
        try:
            yield held
        finally:
            self._reader = None

    def look(self) -> None:
        """Begin a forward that replays a graph: compare all copies with their weights, and drop
        those that are of others."""
        self.begin()
        with self._lock, _disable_current_modes():
            self._looked = True
            self._look()

    def _in_place(self, key: Key, linears: Sequence[Any]) -> Made | None:
        """The copy that a graph of ours may read; None in anybody else's."""
        reader, copy = self._reader, self._copies.get(key)
        if reader is None or reader[0] != threading.get_ident() or copy is None:
            return None
        if copy.made is None or not copy.is_of(_parameters(linears)):
            return None
        reader[1].append(Held(copy, copy.made[0]))
        return copy.made

    def _kept(self, key: Key, linears: Sequence[Any]) -> Made:
        if not self._looked:
            self._looked = True
            self._look()
        known = self._copies.get(key)
        # Looked at with all others, and not used since: nearly every time.
        if (
            known is not None
            and known.made is not None
            and known.sound == self._forward != known.used
            and known.holds(linears)
        ):
            known.used, known.moves = self._forward, 0
            return known.made
        parameters = _parameters(linears)
        brought = [int8 for int8, _ in _brought(linears)]
        places = tuple(map(_place, (*parameters, *brought)))
        copy, moves = self._copies.get(key), 0
        if copy is not None and copy.is_of(parameters):
            if copy.places == places and copy.made is not None:
                if copy.sound != self._forward or copy.used == self._forward:
                    self._compare([copy])
                if copy.made is not None:
                    copy.used, copy.moves = self._forward, 0
                    return copy.made
            elif copy.moved or copy.places != places:
                moves = copy.moves + 1
        return self._make(key, linears, parameters, places, moves)

    def fresh(self, linears: Sequence[Any], *, brought: bool = True) -> Made:
        """The same as `of`, made now and not kept: what a graph that is traced does.

        Args:
            linears: As for `of`.
            brought: Whether an int8 weight that came with a Linear may serve. Asking whether it
                is still the weight's waits for the device, which a CUDA graph cannot.
        """
        given = _brought(linears) if brought else []
        if len(given) == len(linears) and _current(linears, given):
            int8, scale = _stacked(given)
        else:
            int8, scale = ops.quantize_weight(*(m.weight for m in linears), impl=self._impl)
        return int8, scale, stacked_bias(linears)

    def forget(self, key: Key) -> None:
        """Drop a copy that is not used any more, or those of a whole branch."""
        with self._lock:
            block, name = key
            for known in list(self._copies):
                if known == key or (known[0] == block and known[1].startswith(f"{name}.")):
                    self._copies.pop(known).release()
                    self._together.clear()

    def clear(self) -> None:
        """Drop every copy. Each is made again when it is needed."""
        with self._lock:
            for copy in self._copies.values():
                copy.release()
            self._copies.clear()
            self._together.clear()

    def close(self) -> None:
        """Drop every copy for good: the model is unpatched, but somebody may hold its blocks."""
        self._closed = True
        self.clear()

    def tensors(self) -> list[Tensor]:
        """What is kept."""
        kept = [copy.made for copy in self._copies.values() if copy.made is not None]
        return [tensor for int8, scale, _ in kept for tensor in (int8, scale)]

    def bytes(self) -> int:
        """How much memory the copies hold."""
        return sum(tensor.nbytes for tensor in self.tensors())

    # --- keeping them good -----------------------------------------------------------------------

    def _look(self) -> None:
        """Look at all copies at once. One whose weight is elsewhere now gives its memory back."""
        here: dict[torch.device, list[_Copy]] = defaultdict(list)
        for copy in self._copies.values():
            if not copy.in_place():
                copy.moved = True
                copy.release()
                continue
            copy.moved, copy.moves = False, 0
            if copy.made is not None:
                here[copy.places[0][1]].append(copy)
        for device, copies in here.items():
            self._compare(copies, device)

    def _compare(self, copies: list[_Copy], device: torch.device | None = None) -> None:
        """Compare the bits of the sources, which are in place, with what they were; a copy of
        others gives its memory back.

        Args:
            copies: Of one device; each has its checksums.
            device: Where these are all of a device's copies, to be looked at again.
        """
        known = self._together.get(device) if device is not None else None
        if known is not None and known[0] == copies:
            _, prints, before = known
        elif len(copies) == 1:
            prints, before = _taken(copies[0])
        else:
            sources = [source() for copy in copies for source in copy.sources]
            prints = Fingerprints([source for source in sources if source is not None], self._impl)
            before = torch.cat([_taken(copy)[1] for copy in copies])
        if device is not None:
            self._together[device] = (copies, prints, before)
        with running_for_real():
            now = prints.take()
        if torch.equal(now, before):
            for copy in copies:
                copy.sound = self._forward
            return
        differ = (now != before).tolist()
        self._together.clear()
        for copy in copies:
            count = sum(_taken(copy)[0].counts)
            changed, differ = any(differ[:count]), differ[count:]
            if changed:
                copy.release()
            else:
                copy.sound = self._forward

    def _make(
        self,
        key: Key,
        linears: Sequence[Any],
        parameters: list[Tensor],
        places: tuple[_Place, ...],
        moves: int,
    ) -> Made:
        self.forget(key)  # Its memory first, and what belongs to models that were moved away.
        with _ALL_LOCK:
            everyone = list(_ALL)
        for other in everyone:
            if other is not self:
                other.release_moved()
        # Later forwards may be of other modes.
        with torch.inference_mode(False), torch.no_grad(), running_for_real():
            keep = moves <= _MOVES and not self._closed
            prints = Fingerprints(parameters, self._impl) if keep else None
            checksums = None if prints is None else prints.take()
            made = self.fresh(linears)
            if keep:
                synchronize(made[0].device)  # The next forward may be another stream's.
        self._copies[key] = _Copy(
            made if keep else None,
            checksums,
            prints,
            tuple(map(reference, parameters)),
            tuple(p._version for p in parameters),
            places,
            moves,
            moved=False,
            sound=self._forward,
            used=self._forward,
        )
        return made

    def release_moved(self) -> None:
        """Give back the memory of copies whose weights have left their device."""
        if not self._lock.acquire(blocking=False):
            return  # It runs in another thread, and is where it was.
        try:
            for copy in self._copies.values():
                weight = copy.sources[0]()
                if weight is None or weight.device != copy.places[0][1]:
                    copy.moved = True
                    copy.release()
            self._together.clear()
        finally:
            self._lock.release()


def _parameters(linears: Sequence[Any]) -> list[Tensor]:
    held = [linear._parameters for linear in linears]
    return [p for own in held for p in (own["weight"], own["bias"]) if p is not None]


def stacked_bias(linears: Sequence[Any]) -> Tensor | None:
    """The biases of Linears one after another, 0 for one without; None where none has any."""
    if len(linears) == 1 or all([m.bias is None for m in linears]):
        bias: Tensor | None = linears[0].bias
        return bias
    biases = [m.weight.new_zeros(m.out_features) if m.bias is None else m.bias for m in linears]
    return torch.cat(biases)


def _place(tensor: Tensor) -> _Place:
    return tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride()


def _taken(copy: _Copy) -> tuple[Fingerprints, Tensor]:
    assert copy.prints is not None and copy.checksums is not None
    return copy.prints, copy.checksums


def _brought(linears: Iterable[Any]) -> list[tuple[Tensor, Tensor]]:
    """The int8 weights that some of these Linears bring along."""
    return [given for given in map(attached_int8, linears) if given is not None]


def _current(linears: Sequence[Any], given: list[tuple[Tensor, Tensor]]) -> bool:
    """Whether weights still are what came with them in int8."""
    return all(stands_for(m.weight, *one) for m, one in zip(linears, given, strict=True))


def _stacked(given: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Several int8 weights over the same input as one."""
    if len(given) == 1:
        return given[0]
    int8, scales = zip(*given, strict=True)
    if all(weight.shape[0] % GROUP == 0 for weight in int8[:-1]):
        return torch.cat(int8), torch.cat(scales)
    # Blocks would begin inside another's.
    rows = [scales_of_rows(scale, weight.shape[0]) for weight, scale in given]
    return torch.cat(int8), torch.cat([scale.t() for scale in rows], 1).t()
