"""What ranks that share one sequence send each other, over process groups of torch.distributed.

Tensors travel as bytes, so that any dtype passes through any backend. Every exchange is started
and waited for apart, so that what is computed in between hides it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from math import prod
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from turbo_rcm_patch.errors import ConfigError, RankMismatchError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ContextParallel:
    """The process groups that share one sequence.

    The ranks of `group` hold consecutive parts of the sequence, in the order of the group. Ulysses
    exchanges heads within groups of neighbours; a ring passes keys and values on from one of these
    groups to the next. So the rank of a process in `group` is its rank in `ring` times the size of
    `ulysses` plus its rank in `ulysses`.

    Attributes:
        group: All ranks of the sequence.
        ulysses: The ranks that exchange heads, or None for no Ulysses.
        ring: The ranks that pass keys and values on, or None for no ring.
        name: Names the groups; registered operations take it in their place.
        host: Ranks of `group` on a CPU backend, once `told` needed one.
    """

    group: ProcessGroup
    ulysses: ProcessGroup | None = None
    ring: ProcessGroup | None = None
    name: str = field(init=False)
    host: ProcessGroup | None = field(init=False, default=None, compare=False)

    def __post_init__(self) -> None:
        ranks = [_ranks(group) for group in (self.group, self.ulysses, self.ring)]
        degrees = [max(1, len(r)) for r in ranks]
        here = [
            dist.get_rank(g) if g is not None else 0 for g in (self.group, self.ulysses, self.ring)
        ]
        fits = degrees[0] == degrees[1] * degrees[2] and here[0] == here[2] * degrees[1] + here[1]
        own = ranks[0][here[2] * degrees[1] :][: degrees[1]], ranks[0][here[1] :: degrees[1]]
        if not fits or (ranks[1] and ranks[1] != own[0]) or (ranks[2] and ranks[2] != own[1]):
            raise ConfigError(
                "ContextParallel",
                expected="ranks of `group` in the order (ring, ulysses), of which `ulysses` holds "
                "neighbours and `ring` every so many",
                got=f"group {ranks[0]}, ulysses {ranks[1]}, ring {ranks[2]}",
            )
        object.__setattr__(self, "name", _name(self.group, self.ulysses, self.ring))
        _known[self.name] = self

    @classmethod
    def from_groups(
        cls, group: ProcessGroup, ulysses: ProcessGroup | None, ring: ProcessGroup | None
    ) -> ContextParallel:
        """The same object for the same groups. Where one of the two is the whole sequence, it is
        `group` as well: exchanges of one communicator do not run into each other."""
        if ring is None or ulysses is None:
            group = ulysses or ring or group
        known = _known.get(_name(group, ulysses, ring))
        fits = known is not None and known.group is group
        return cast(ContextParallel, known) if fits else cls(group, ulysses, ring)

    @classmethod
    def from_mesh(cls, mesh: DeviceMesh) -> ContextParallel:
        """The groups of a mesh whose dimensions "ring" and "ulysses" share the sequence, as
        diffusers' `ContextParallelConfig` makes it. Others (data parallel) may stand beside them.
        """
        ring, ulysses = mesh["ring"], mesh["ulysses"]
        group = mesh["ring", "ulysses"]._flatten().get_group()
        return cls.from_groups(
            group,
            ulysses.get_group() if ulysses.size() > 1 else None,
            ring.get_group() if ring.size() > 1 else None,
        )

    @classmethod
    def named(cls, name: str) -> ContextParallel:
        """The groups of a `name`."""
        return _known[name]

    @property
    def size(self) -> int:
        """Number of ranks that share the sequence."""
        return self.group.size()

    @property
    def ulysses_degree(self) -> int:
        """Number of ranks that exchange heads."""
        return 1 if self.ulysses is None else self.ulysses.size()

    @property
    def ring_degree(self) -> int:
        """Number of groups that pass keys on."""
        return 1 if self.ring is None else self.ring.size()

    @property
    def rank(self) -> int:
        """Position of this process in the sequence."""
        return dist.get_rank(self.group)

    @property
    def ulysses_rank(self) -> int:
        """Position of this process among those it exchanges heads with."""
        return 0 if self.ulysses is None else dist.get_rank(self.ulysses)

    @property
    def ring_rank(self) -> int:
        """Position of this process in its ring."""
        return 0 if self.ring is None else dist.get_rank(self.ring)


#: By name. Groups live as long as the process, or until they are destroyed.
_known: Final[dict[str, ContextParallel]] = {}


def _name(*groups: ProcessGroup | None) -> str:
    return "/".join("" if group is None else group.group_name for group in groups)


def _ranks(group: ProcessGroup | None) -> list[int]:
    return [] if group is None else dist.get_process_group_ranks(group)


#: Whether exchanges under way are left out; see `silent`.
_silent = threading.local()


@contextmanager
def silent() -> Iterator[None]:
    """Inside, this thread's exchanges send nothing and give garbage: for a call that only compiles
    its kernels, which other ranks need not make."""
    before = getattr(_silent, "active", False)
    _silent.active = True
    try:
        yield
    finally:
        _silent.active = before


def _is_silent() -> bool:
    return getattr(_silent, "active", False)


def split_evenly(count: int, parts: int) -> list[int]:
    """Sizes of `count` things in so many parts that differ by one at most, as `tensor_split`."""
    return [count // parts + (i < count % parts) for i in range(parts)]


#: Bytes sent to other ranks, by what they are, while `counting_bytes` runs.
_counts: dict[str, int] | None = None


@contextmanager
def counting_bytes() -> Iterator[dict[str, int]]:
    """Gives a dict that counts the bytes this rank sends to others inside, by what they are."""
    global _counts
    _counts = {}
    try:
        yield _counts
    finally:
        _counts = None


def _count(what: str, sent: int) -> None:
    if _counts is not None:
        _counts[what] = _counts.get(what, 0) + sent


class Pending(Generic[T]):
    """An exchange under way; what it reads stays alive until it was waited for.

    Args:
        works: Handles of torch.distributed.
        result: Makes what came, once they are done.
        keep: What they read.
    """

    __slots__ = ("_keep", "_result", "_works")

    def __init__(
        self,
        works: Sequence[dist.Work | None],
        result: Callable[[], T],
        keep: Sequence[Tensor] = (),
    ) -> None:
        self._works, self._result, self._keep = works, result, keep

    def wait(self) -> T:
        """What came. On a GPU the current stream waits and the host does not."""
        for work in self._works:
            if work is not None:
                work.wait()
        result = self._result()
        self._works, self._result, self._keep = (), lambda: result, ()
        return result


def _as_bytes(x: Tensor) -> Tensor:
    flat = x.reshape(-1)
    if flat.stride(0) != 1:  # every so many elements, or one of them
        flat = flat.clone(memory_format=torch.contiguous_format).as_strided(flat.shape, (1,))
    return flat.view(torch.uint8)


def _one_after_another(pieces: Sequence[Tensor]) -> Tensor:
    """Pieces as flat bytes: their own memory where they lie in it like that."""
    there = [piece for piece in pieces if piece.numel()]
    if not there:
        return _as_bytes(pieces[0])
    end = there[0].data_ptr()
    for piece in there:
        if not piece.is_contiguous() or piece.data_ptr() != end:
            return torch.cat([_as_bytes(piece) for piece in there])
        end += piece.numel() * piece.element_size()
    if len({piece.dtype for piece in there}) > 1:
        return torch.cat([_as_bytes(piece) for piece in there])
    return _as_bytes(there[0].as_strided((sum(piece.numel() for piece in there),), (1,)))


def all_to_all(
    what: str,
    pieces: Sequence[Sequence[Tensor]],
    shapes: Sequence[Sequence[Sequence[int]]],
    group: ProcessGroup | None,
) -> Pending[list[list[Tensor]]]:
    """Start to send some tensors to every rank of a group and to receive as many from each, in one
    message.

    What a rank has for itself is not copied where it has only one peer. With more, it travels
    along, because the memory that is sent has no gap then.

    Args:
        what: Names it, for `counting_bytes`.
        pieces: The tensors for each rank, of any shapes; the n-th of all ranks has one dtype.
        shapes: Of those that come from each rank.
        group: None is this process alone.

    Returns:
        Gives the tensors that came, by rank.
    """
    if group is None:
        return Pending((), lambda: [list(each) for each in pieces])
    dtypes, here = [piece.dtype for piece in pieces[0]], dist.get_rank(group)
    own = list(pieces[here]) if len(pieces) == 2 else None
    if own is not None:
        pieces = [[] if rank == here else each for rank, each in enumerate(pieces)]
    sent = [sum(piece.numel() * piece.element_size() for piece in each) for each in pieces]
    flat = _one_after_another([piece for each in pieces for piece in each])
    sizes = [
        [prod(shape) * dtype.itemsize for shape, dtype in zip(each, dtypes, strict=True)]
        if own is None or rank != here
        else []
        for rank, each in enumerate(shapes)
    ]
    came = torch.empty(sum(map(sum, sizes)), dtype=torch.uint8, device=flat.device)
    work = None
    if not _is_silent():
        work = dist.all_to_all_single(
            came, flat, [sum(each) for each in sizes], sent, group=group, async_op=True
        )
        _count(what, sum(sent) - sent[here])

    def result() -> list[list[Tensor]]:
        made: list[list[Tensor]] = []
        start = 0
        for each, lengths in zip(shapes, sizes, strict=True):
            if own is not None and len(made) == here:
                made.append(own)
                continue
            made.append([])
            for shape, size, dtype in zip(each, lengths, dtypes, strict=True):
                part = came[start : start + size]
                if start % dtype.itemsize:  # cannot be read there as what it is
                    part = part.clone()
                made[-1].append(part.view(dtype).view(*shape))
                start += size
        return made

    return Pending([work], result, (flat, came))


def gather(what: str, x: Tensor, group: ProcessGroup) -> Pending[Tensor]:
    """Start to collect a tensor of one shape from every rank of a group: [ranks, *shape]."""
    x = x.contiguous()
    together = x.new_empty(group.size(), *x.shape)
    came = list(together.unbind())
    if _is_silent():
        return Pending((), lambda: together)
    if x.is_cuda:
        work = dist.all_gather_into_tensor(together, x, group=group, async_op=True)
    else:  # gloo gathers into a list
        work = dist.all_gather(came, x, group=group, async_op=True)
    _count(what, x.numel() * x.element_size() * (group.size() - 1))
    return Pending([work], lambda: together, (x,))


def told(
    what: str, values: Sequence[int | float], parallel: ContextParallel, device: torch.device
) -> list[list[Any]]:
    """A few numbers of every rank of a sequence, on the host; all of one type.

    Through a CPU backend, which waits for no kernel and fails at once where a rank died: that of
    the group, else one made for the same ranks the first time. Where there is none, through the
    device, for which the host then waits.
    """
    answers: Answers | None = getattr(_answers, "kept", None)
    if answers is not None and answers.given:
        return answers.next(what)
    group, at = parallel.group, torch.device("cpu")
    if "cpu:" not in dist.get_backend_config(group):
        group = _host_group(parallel, device)
        at = device if group is parallel.group else at
    floats = any(isinstance(value, float) for value in values)
    dtype = torch.float64 if floats else torch.int64
    rows = gather(what, torch.tensor(list(values), dtype=dtype, device=at), group).wait()
    found = cast("list[list[Any]]", rows.tolist())
    if answers is not None:
        answers.add(what, found)
    return found


#: What `told` keeps on this thread; see `Answers`.
_answers = threading.local()


class Answers:
    """What the ranks told each other in one forward, to run the same forward again and ask nobody:
    while a CUDA graph is captured, whose replays cannot ask either.

    Attributes:
        given: Whether they are given now.
    """

    __slots__ = ("_kept", "_next", "given")

    def __init__(self) -> None:
        self._kept: list[tuple[str, list[list[Any]]]] = []
        self._next = 0
        self.given = False

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Inside, what this thread asks is asked, and the answers are kept."""
        before = getattr(_answers, "kept", None)
        _answers.kept, self.given = self, False
        try:
            yield
        finally:
            _answers.kept = before

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside, this thread gets these answers, in the same order.

        Raises:
            RankMismatchError: It asks something else.
        """
        before = getattr(_answers, "kept", None)
        _answers.kept, self.given, self._next = self, True, 0
        try:
            yield
            if self._next < len(self._kept):
                raise _other_question("nothing", self._kept[self._next][0])
        finally:
            _answers.kept, self.given = before, False

    def add(self, what: str, rows: list[list[Any]]) -> None:
        """Keep an answer."""
        self._kept.append((what, rows))

    def next(self, what: str) -> list[list[Any]]:
        """The next answer, to a question of this name."""
        name, rows = self._kept[self._next] if self._next < len(self._kept) else ("nothing", [])
        if name != what:
            raise _other_question(what, name)
        self._next += 1
        return [list(row) for row in rows]


def _other_question(now: str, before: str) -> RankMismatchError:
    return RankMismatchError(
        "a forward that runs again", expected=f"to exchange {before}, as before", got=now
    )


def tells_on_host(parallel: ContextParallel, device: torch.device) -> bool:
    """Whether `told` goes through a CPU backend. Every rank calls it at the same point."""
    return (
        "cpu:" in dist.get_backend_config(parallel.group)
        or _host_group(parallel, device) is not parallel.group
    )


def timeout_of(group: ProcessGroup, device: torch.device) -> timedelta:
    """How long the backend of a device waits for the other ranks of a group."""
    with suppress(AttributeError, RuntimeError):
        own: Any = group._get_backend(device)
        timeout: timedelta = own.options._timeout
        return timeout
    return timedelta(minutes=10)


def _host_group(parallel: ContextParallel, device: torch.device) -> ProcessGroup:
    """The ranks of a sequence on gloo; the group itself where one of them cannot have that."""
    if parallel.host is None:
        config = dist.get_backend_config(parallel.group)
        if f"{device.type}:" not in config:
            device = torch.device(config.partition(":")[0])
        made, timeout = parallel.group, timeout_of(parallel.group, device)
        if dist.is_gloo_available():
            with suppress(RuntimeError):  # no network interface for it
                made = dist.new_group(
                    dist.get_process_group_ranks(parallel.group),
                    timeout=timeout, backend="gloo", use_local_synchronization=True,
                )  # fmt: skip
        # A rank that has none would tell through the group, and wait there for the others.
        there = torch.tensor([made is not parallel.group], device=device)
        if not gather("host", there, parallel.group).wait().all():
            made = parallel.group
        object.__setattr__(parallel, "host", made)
    return cast("ProcessGroup", parallel.host)


def pass_on(
    what: str, tensors: Sequence[Tensor], shapes: Sequence[Sequence[int]], group: ProcessGroup
) -> Pending[list[Tensor]]:
    """Start to send tensors to the next rank of a ring and to receive others, of the same dtypes
    and the given shapes, from the one before."""
    size, rank = group.size(), dist.get_rank(group)
    came = [
        torch.empty(tuple(shape), dtype=x.dtype, device=x.device)
        for x, shape in zip(tensors, shapes, strict=True)
    ]
    sent = [x.contiguous() for x in tensors]
    operations = []
    for x, y in zip(sent, came, strict=True):
        for do, tensor, peer in (
            (dist.isend, x, (rank + 1) % size),
            (dist.irecv, y, (rank - 1) % size),
        ):
            if tensor.numel():
                operations.append(dist.P2POp(do, _as_bytes(tensor), group=group, group_peer=peer))
    if _is_silent():
        return Pending((), lambda: came)
    works = dist.batch_isend_irecv(operations) if operations else []
    _count(what, sum(x.numel() * x.element_size() for x in sent))
    return Pending(works, lambda: came, sent)


def concatenated(pieces: Sequence[Tensor], dim: int) -> Tensor:
    """torch.cat, without a copy of a single piece that kernels can read where it is."""
    there = [piece for piece in pieces if piece.shape[dim]] or list(pieces[:1])
    if len(there) == 1:
        # Tensor descriptors want 16 bytes, and a piece may lie anywhere in a message.
        return there[0].clone() if there[0].data_ptr() % 16 else there[0]
    # A copy of bytes takes as long as one of words, an eighth of the rate. Nor does every backend
    # concatenate e4m3.
    if all(map(_in_words, there)):
        return torch.cat([x.view(torch.int64) for x in there], dim).view(there[0].dtype)
    if there[0].element_size() == 1:
        return torch.cat([x.view(torch.uint8) for x in there], dim).view(there[0].dtype)
    return torch.cat(there, dim)


def _in_words(x: Tensor) -> bool:
    """Whether the memory of x can be read 8 bytes at a time."""
    each = 8 // x.element_size()
    whole = x.shape[-1] % each == 0 and x.storage_offset() % each == 0
    strides = x.stride()
    return whole and strides[-1] == 1 and not any(stride % each for stride in strides[:-1])
