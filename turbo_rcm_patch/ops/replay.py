"""Repeat the kernel launches of a call without repeating its decisions.

The launches of a launcher depend only on the shapes, strides, dtypes and alignment of its tensors
and on its other arguments: the signature. The first call with a signature runs the launcher and
records the kernels that it starts, their arguments, and its allocations. Later calls with the same
signature allocate the same sizes and start the compiled kernels directly. They compute no grid,
tile or specialisation, and do not run Triton's argument binder.

A recording is kept only if it is complete. A launcher that also runs a torch operation, or passes
memory that is neither an argument's nor its own, is never replayed.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from turbo_rcm_patch.ops.attention.spec import AttentionSpec
from turbo_rcm_patch.ops.generated_calls import Source, tuple_of

#: Scratch buffers below this many bytes share one allocation.
_SHARED_BELOW = 16 << 20
#: Alignment of a buffer inside a shared allocation, the same as that of torch's allocator.
_ALIGNED_TO = 256
#: Signatures kept for one launcher. When there are more, the oldest is dropped.
_MOST_PROGRAMS = 4096
#: Attempts to record a signature before it is given up. The first call may create constants, and
#: later calls find them.
_ATTEMPTS = 2
_P = ParamSpec("_P")
_R = TypeVar("_R")

_aten = torch.ops.aten
_ALLOCATIONS = frozenset(
    {
        _aten.empty.memory_format,
        _aten.empty_strided.default,
        _aten.empty_like.default,
        _aten.new_empty.default,
        _aten.new_empty_strided.default,
    }
)

#: Types whose values are part of a signature. The options of an operator are hashable.
_PLAIN = frozenset({type(None), bool, int, float, str, torch.dtype, AttentionSpec})
_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})

_data_ptr = torch.Tensor.data_ptr
_local = threading.local()
#: Storage address -> tensor that lives as long as the process, which any recording may read.
_kept: dict[int, torch.Tensor] = {}


def recorder() -> Recorder | None:
    """Return the recording that runs in this thread, to which `launch` reports, or None."""
    return getattr(_local, "recorder", None)


def compiles_only() -> bool:
    """Return True while this thread compiles launches and starts none (`launch.compile_ahead`)."""
    return getattr(_local, "compiles_only", False)


@contextmanager
def compiling_only() -> Iterator[None]:
    """Let `launch` compile and start nothing."""
    _local.compiles_only = True
    try:
        yield
    finally:
        _local.compiles_only = False


def keep_for_replay(tensor: torch.Tensor) -> torch.Tensor:
    """Keep a tensor for the life of the process, so that recordings may hold its address."""
    _kept[tensor.untyped_storage().data_ptr()] = tensor
    return tensor


def _replays() -> bool:
    """Return True if launches may be replayed: no recording runs, no hook watches them, and they
    are not only compiled."""
    return recorder() is None and not _launch_hooks() and not compiles_only()


#: An allocation of a program: shape, strides, dtype.
_Buffer = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


@dataclass(frozen=True, slots=True)
class Program:
    """The recorded launches of one signature.

    Slot i is the address of the i-th tensor argument; the slots of buffers come after.

    Attributes:
        index: The number of the GPU, or None on a CPU.
        alignment: The low bits of the addresses of the arguments.
        low_bits: The largest of these.
        aliases: Two arguments that share memory, and the distance of their addresses.
        buffers: What is allocated.
        starts: Start the kernels, given the addresses of all slots and the stream.
        result: Builds the result from arguments and buffers.
    """

    index: int | None
    alignment: list[int]
    low_bits: int
    aliases: tuple[tuple[int, int, int], ...]
    buffers: tuple[_Buffer, ...]
    starts: tuple[Callable[[list[int], int], None], ...]
    result: Callable[[list[torch.Tensor], list[torch.Tensor]], Any]

    def fits(self, addresses: list[int]) -> bool:
        """Return True if arguments share memory and are aligned as in the recorded call."""
        bits = self.low_bits
        for address in addresses:
            bits |= address
        if bits & 15 and [address & 15 for address in addresses] != self.alignment:
            return False
        for first, second, distance in self.aliases:
            if addresses[second] - addresses[first] != distance:
                return False
        return True


def _raw_stream(index: int | None) -> int:
    return torch._C._cuda_getCurrentRawStream(index)


class _Unrepeatable(Exception):
    """A recorded call cannot be repeated: it uses memory that nothing here names."""


class _Launch(NamedTuple):
    """A kernel that was launched, its arguments by name, and the compiled kernel that ran."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    compiled: Any


class Recorder(TorchDispatchMode):
    """Records the allocations and the kernels of a launcher that runs inside `with recorder`.

    Args:
        tensors: The tensors among its arguments, in order.

    Attributes:
        inputs: These.
        complete: False once the launcher has done anything else.
    """

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self.inputs = tensors
        self._allocated: list[torch.Tensor] = []
        self._launches: list[_Launch] = []
        self.complete = True

    def __enter__(self) -> Recorder:
        _local.recorder = self
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        _local.recorder = None
        super().__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _ALLOCATIONS:
            self._allocated.append(out)
        elif not _is_view(func):
            self.complete = False
        return out

    def launched(
        self, kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any], compiled: Any
    ) -> None:
        """Record a launch, with its arguments by name and the compiled kernel that ran."""
        if not hasattr(compiled, "packed_metadata"):  # so it is in the interpreter
            self.complete = False
        self._launches.append(_Launch(kernel, grid, arguments, compiled))

    def program(self, result: Any) -> Program | None:
        """Return the recorded program, given the launcher's result; None if it is incomplete."""
        if not self.complete or not self._launches:
            return None
        try:
            memory = _Memory(self.inputs, self._allocated, result)
            starts = tuple([_start(launch, memory) for launch in self._launches])
        except _Unrepeatable:
            return None
        device, alignment = self.inputs[0].device, [x.data_ptr() & 15 for x in self.inputs]
        return Program(
            index=device.index if device.type == "cuda" else None,
            alignment=alignment,
            low_bits=max(alignment),
            aliases=memory.aliases(),
            buffers=memory.buffers,
            starts=starts,
            result=memory.result,
        )


class _Memory:
    """Where the tensors of a recorded call lie.

    Args:
        inputs: The tensors among the arguments of the launcher.
        allocated: Its allocations, in order.
        result: What it returned.

    Attributes:
        buffers: The allocations of a replay.
        result: Builds the result of a replay from arguments and buffers.

    Raises:
        _Unrepeatable: An argument has no memory, or the result is no argument and no allocation.
    """

    def __init__(
        self, inputs: list[torch.Tensor], allocated: list[torch.Tensor], result: Any
    ) -> None:
        self._inputs, self._allocated = inputs, allocated
        self._arguments: dict[int, list[int]] = {}
        for i, tensor in enumerate(inputs):
            self._arguments.setdefault(_storage(tensor), []).append(i)
        # Empty tensors have no address by which to find them.
        self._owners = {_storage(x): i for i, x in enumerate(allocated) if x.numel()}
        if 0 in self._arguments:
            raise _Unrepeatable
        returned = {self._owners.get(_storage(tensor)) for tensor in _tensors(result)}
        self.buffers, self._slots = _buffers(allocated, returned)
        source = Source()
        self.result = source.function("inputs, buffers", self._result(result, source))

    def address_of(self, tensor: torch.Tensor) -> str:
        """Return an expression for the address of a tensor: `at` holds those of all slots.

        Raises:
            _Unrepeatable: It is neither an argument, nor an allocation, nor a constant.
        """
        storage, address = _storage(tensor), tensor.data_ptr()
        if storage in self._owners:
            allocation = self._owners[storage]
            buffer, offset = self._slots[allocation]
            slot = len(self._inputs) + buffer
            offset += address - self._allocated[allocation].data_ptr()
        elif storage in self._arguments:
            slot = self._arguments[storage][0]
            offset = address - self._inputs[slot].data_ptr()
        elif storage in _kept:
            return str(address)
        else:
            raise _Unrepeatable
        return f"at[{slot}] + {offset}" if offset else f"at[{slot}]"

    def aliases(self) -> tuple[tuple[int, int, int], ...]:
        """Return pairs of arguments that share memory, and the distance of their addresses."""
        addresses = [x.data_ptr() for x in self._inputs]
        return tuple(
            (first, other, addresses[other] - addresses[first])
            for first, *others in self._arguments.values()
            for other in others
        )

    def _result(self, value: Any, source: Source) -> str:
        """Return an expression for a result: a constant, an argument, a whole allocation, or a
        tuple of these."""
        if isinstance(value, tuple):
            parts = tuple_of([self._result(part, source) for part in value])
            make = getattr(value, "_make", None)  # of a NamedTuple
            return f"{source.constant(make)}({parts})" if make else parts
        if not isinstance(value, torch.Tensor):
            if type(value) not in _PLAIN:
                raise _Unrepeatable
            return source.constant(value)
        for i, tensor in enumerate(self._inputs):
            if tensor is value:
                return f"inputs[{i}]"
        index = self._owners.get(_storage(value))
        if index is None or _layout(value) != _layout(self._allocated[index]):
            raise _Unrepeatable
        return f"buffers[{self._slots[index][0]}]"


def _layout(x: torch.Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.dtype, x.data_ptr()


def _start(launch: _Launch, memory: _Memory) -> Callable[[list[int], int], None]:
    """Return a function that starts a recorded kernel, given the addresses and the stream."""
    from turbo_rcm_patch.ops.triton36_launcher import descriptors_like, starter_of

    starter, source = starter_of(launch.compiled), Source()
    layouts = iter(starter.layouts)
    arguments = [*map(str, (*launch.grid, 1, 1)[:3]), "stream"]
    arguments += map(source.constant, starter.head)
    for name in launch.kernel.arg_names:
        value = launch.arguments[name]
        base = getattr(value, "base", None)
        if not isinstance(base, torch.Tensor):
            arguments.append(_expression(value, memory, source))
            continue
        descriptor_at, numbers = descriptors_like(value, next(layouts, None))
        arguments.append(f"{source.constant(descriptor_at)}({memory.address_of(base)})")
        arguments += map(source.constant, numbers)
    call = f"{source.constant(starter.function)}({', '.join(arguments)})"
    return source.function("at, stream", call)


def _expression(value: Any, memory: _Memory, source: Source) -> str:
    """Return an argument without descriptors as an expression."""
    if isinstance(value, torch.Tensor):
        return memory.address_of(value)
    if any(True for _ in _tensors(value)):
        return tuple_of([_expression(part, memory, source) for part in value])
    return source.constant(value)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Return a tensor, or those in a tuple at any depth."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from _tensors(part)


@functools.cache
def _is_view(func: Any) -> bool:
    """Return True if an operation only makes a view of an argument."""
    returns, arguments = func._schema.returns, func._schema.arguments
    writes = any(a.alias_info is not None and a.alias_info.is_write for a in arguments)
    return bool(returns) and not writes and all(r.alias_info is not None for r in returns)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _buffers(
    allocated: list[torch.Tensor], returned: set[int | None]
) -> tuple[tuple[_Buffer, ...], list[tuple[int, int]]]:
    """Assign the recorded allocations to buffers; small scratch shares the last one.

    Returns:
        The buffers, and (buffer, offset) of each recorded allocation.
    """
    sizes = [x.untyped_storage().nbytes() for x in allocated]
    shares = [i not in returned and size < _SHARED_BELOW for i, size in enumerate(sizes)]
    buffers: list[_Buffer] = []
    slots: list[tuple[int, int]] = []
    last, shared = shares.count(False), 0
    for tensor, size, sharing in zip(allocated, sizes, shares, strict=True):
        if sharing:
            slots.append((last, shared))
            shared += -(-size // _ALIGNED_TO) * _ALIGNED_TO
        else:
            slots.append((len(buffers), 0))
            buffers.append((tuple(tensor.shape), tensor.stride(), tensor.dtype))
    if any(shares):
        buffers.append(((shared,), (1,), torch.uint8))
    return tuple(buffers), slots


def _on_gpu(tensor: torch.Tensor) -> bool:
    """Return True if launches over a tensor can be recorded; tests replace this function."""
    return tensor.is_cuda


def _capturing(tensor: torch.Tensor) -> bool:
    """Return True while a CUDA graph is captured; tests replace this function."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


@functools.cache
def _knobs() -> Any:
    import triton  # here, because the operators' own modules load without it

    return triton.knobs.runtime


def _launch_hooks() -> object:
    """Return the hooks that watch launches, if any; a replay would not call them."""
    runtime = _knobs()
    before, after = runtime.launch_enter_hook, runtime.launch_exit_hook
    try:
        return before.calls or after.calls
    except AttributeError:  # one function or None, as a user may set it
        return getattr(before, "calls", before) or getattr(after, "calls", after)


_Getter = Callable[[Any], tuple[Any, ...]]


def _getter(places: list[int]) -> _Getter:
    """Return a function that takes the values at these places of a tuple, as a tuple."""
    if len(places) > 1:
        return itemgetter(*places)
    return itemgetter(slice(places[0], places[0] + 1) if places else slice(0))


@functools.lru_cache(maxsize=4096)
def _getters_of(kinds: tuple[type, ...]) -> tuple[_Getter, _Getter, _Getter] | None:
    """Return getters of the tensors, the tuples and the plain values among values of these types,
    or None if one is of another type."""
    tensors = [i for i, kind in enumerate(kinds) if kind in _TENSORS]
    tuples = [i for i, kind in enumerate(kinds) if issubclass(kind, tuple)]
    plain = [i for i, kind in enumerate(kinds) if kind in _PLAIN]
    if len(tensors) + len(tuples) + len(plain) < len(kinds):
        return None
    return _getter(tensors), _getter(tuples), _getter(plain)


def _add_to_key(values: tuple[Any, ...], key: list[Any], tensors: list[torch.Tensor]) -> bool:
    """Add the types and plain values of arguments to a key, and their tensors to a list.

    Return False if one is of an unknown type.
    """
    kinds = tuple(map(type, values))
    getters = _getters_of(kinds)
    if getters is None:
        return False
    tensors_of, tuples_of, plain_of = getters
    key += kinds, plain_of(values)
    tensors += tensors_of(values)
    return all([_add_to_key(inner, key, tensors) for inner in tuples_of(values)])


#: Signature -> its programs, one for each way its arguments are aligned and share memory; the
#: number of failed attempts so far; None once given up.
_Programs = dict[Any, list[Program] | int | None]


def _keep(programs: _Programs, signature: Any, recorder: Recorder, result: Any) -> None:
    """Keep a recorded call for later ones, if it can be repeated."""
    program, known = recorder.program(result), programs.get(signature, 0)
    if program is not None:
        programs[signature] = [*(known if isinstance(known, list) else []), program]
    elif not isinstance(known, list) and not _capturing(recorder.inputs[0]):
        # In a captured graph constants belong to the graph, so a failure there does not count.
        attempts = (known or 0) + 1
        programs[signature] = attempts if attempts < _ATTEMPTS else None
    while len(programs) > _MOST_PROGRAMS:
        programs.pop(next(iter(list(programs))), None)


def replayed(launcher: Callable[_P, _R]) -> Callable[_P, _R]:
    """Make a launcher record its launches and replay them; see the module's docstring.

    The launcher takes tensors, None and hashable values, and returns a tensor, None, or a tuple of
    them. It allocates with `torch.empty` and its variants. It always runs itself on a CPU, while a
    hook watches launches, and inside another recording.
    """
    programs: _Programs = {}

    @functools.wraps(launcher)
    def launch(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        tensors: list[torch.Tensor] = []
        key: list[Any] = [tuple(kwargs)] if kwargs else []
        values = (*args, *kwargs.values()) if kwargs else args
        if not _replays() or not _add_to_key(values, key, tensors):
            return launcher(*args, **kwargs)
        key += [(x.dtype, x.shape, x.stride(), x.get_device()) for x in tensors]
        signature = tuple(key)
        known = programs.get(signature, 0)
        # Written out here: every call on the way to a kernel takes part of a microsecond.
        for program in known if known.__class__ is list else ():  # type: ignore[union-attr]
            addresses = list(map(_data_ptr, tensors))
            if not program.fits(addresses):
                continue
            index = program.index
            # As torch.cuda.current_device(), without its check that CUDA is initialised.
            if index is not None and index != torch._C._cuda_getDevice():
                with torch.cuda.device(index):
                    return launch(*args, **kwargs)
            allocate = tensors[0].new_empty_strided  # the fastest of torch's allocating functions
            buffers = [allocate(shape, stride, dtype=of) for shape, stride, of in program.buffers]
            at = [*addresses, *map(_data_ptr, buffers)]
            stream = _raw_stream(index)
            for start in program.starts:
                start(at, stream)
            repeated: _R = program.result(tensors, buffers)
            return repeated
        if known is None or not tensors or not _on_gpu(tensors[0]):
            return launcher(*args, **kwargs)
        with Recorder(tensors) as recording:
            result = launcher(*args, **kwargs)
        _keep(programs, signature, recording, result)
        return result

    return launch
