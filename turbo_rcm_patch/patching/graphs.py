"""A patched forward as CUDA graphs: `PatchConfig(cuda_graphs=True)`.

Short forwards are bound by Python. A graph launches all kernels of a forward at once, with the
shapes, the addresses and the decisions of the forward that was captured, so it may replay only
while all of them are still the same:

- The arguments: there is one graph for each signature (shapes, strides, dtypes, every number).
  Tensors are copied into the graph's own, and what it returns is copied out, because guidance
  calls a model twice before it reads the first result.
- The model: `_Look` compares every module, parameter, buffer and attribute, hooks, the states of
  the pairs and torch's global settings with what they were. What is written into a weight in place
  needs no look, because a graph reads the memory.
- The int8 copies of weights: they are compared with their weights in front of every replay, as in
  front of any other forward, and the graph reads them where they are.

If one of them differs, the graphs are dropped and captured again after `WARM_UPS` plain forwards.
What needs Python on every forward (hooks, offloading, caches) is never captured; the report says
why. The guard gets the forwards that it wants to compare: these run plain.

Ranks that share a sequence tell each other in front of every forward what each would do, through
the host, because the exchanges inside a graph wait for all of them. They replay a graph that all
of them captured together, capture one where all can, and run plain otherwise. What a captured
forward would ask the others is what they said in the plain forward before it. A `ReplayTimer`
takes the place of torch's watchdog, which times nothing inside a graph.
"""

from __future__ import annotations

import gc
import inspect
import logging
import sys
import threading
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import repeat
from types import MethodType, SimpleNamespace
from typing import Any, ClassVar, Final, NoReturn
from zlib import crc32

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as nn_module
from torch.utils._device import DeviceContext

from turbo_rcm_patch.ops.exchange import Answers, ContextParallel, tells_on_host, timeout_of
from turbo_rcm_patch.ops.modes import is_capturing
from turbo_rcm_patch.ops.operation import replay_token, runs_directly
from turbo_rcm_patch.patching.copies import Copies, Held
from turbo_rcm_patch.patching.guard import Guard
from turbo_rcm_patch.patching.parallel import (
    Wish,
    anything,
    groups_of,
    groups_of_model,
    processor_class,
    split_hooks,
    told_wishes,
)
from turbo_rcm_patch.patching.plain import (
    autocasting,
    bare,
    drops,
    hook_names,
    written_by_its_author,
)
from turbo_rcm_patch.patching.plan import Look, parts_of
from turbo_rcm_patch.patching.record import record_of
from turbo_rcm_patch.patching.replay_timer import Reached, ReplayTimer
from turbo_rcm_patch.patching.state import PairState, decides

#: Plain forwards of a signature before it is captured: the first makes plans and compiles kernels,
#: the second repeats the recorded launches.
WARM_UPS: Final = 2
#: Graphs that a model keeps; past that the least recently used goes.
MOST_GRAPHS: Final = 4
#: Signatures whose forwards are counted, and those that are given up.
_MOST_SIGNATURES: Final = 64
#: Changes of the model with no replay in between before graphs are given up.
_MOST_CHANGES: Final = 8

#: Types whose values a signature holds as they are.
_PLAIN: Final = frozenset(
    {type(None), bool, int, str, bytes, torch.dtype, torch.device, torch.Size}
)
_TENSORS: Final = (Tensor, nn.Parameter)

_CHANGING: Final = "its weights, modules or attributes change from forward to forward"
_COMPARED: Final = "the guard compares it"

_log = logging.getLogger(__name__)


class _NoGraphError(Exception):
    """This forward is not captured; says why."""


# --- arguments and results -----------------------------------------------------------------------


def _signature(value: Any, tensors: list[Tensor]) -> Any:
    """What has to be the same for a graph to serve; appends the tensors in order.

    Raises:
        _NoGraphError: Something in it is neither a tensor nor a plain value.
    """
    kind = type(value)
    if kind in _TENSORS:
        tensors.append(value)
        return value.shape, value.stride(), value.dtype, value.device
    if kind in _PLAIN:
        return kind, value
    if kind is float:
        return value.hex()  # 0.0 == -0.0
    if kind is tuple or kind is list:
        return kind, *[_signature(part, tensors) for part in value]
    if kind is dict:
        return kind, *[(name, _signature(part, tensors)) for name, part in value.items()]
    raise _NoGraphError(f"an argument is a {kind.__module__}.{kind.__qualname__}")


def _replaced(value: Any, tensors: Iterator[Tensor]) -> Any:
    """The same arguments with other tensors."""
    kind = type(value)
    if kind in _TENSORS:
        return next(tensors)
    if kind is tuple or kind is list:
        return kind(_replaced(part, tensors) for part in value)
    if kind is dict:
        return {name: _replaced(part, tensors) for name, part in value.items()}
    return value


def _like(x: Tensor) -> Tensor:
    """A tensor of its own memory with the shape and strides of another."""
    base = _unrepeated(x)
    strides = sorted(
        (stride, size) for size, stride in zip(base.shape, base.stride(), strict=True) if size > 1
    )
    reach = 1
    for stride, size in strides:
        if stride < reach:
            raise _NoGraphError("an argument's elements share memory")
        reach = stride * size
    made = torch.empty_strided(base.shape, base.stride(), dtype=x.dtype, device=x.device)
    return made.as_strided(x.shape, x.stride())


def _unrepeated(x: Tensor) -> Tensor:
    """Without the dimensions that an `expand` repeats, which cannot be written."""
    for dim, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        if stride == 0 and size > 1:
            x = x.narrow(dim, 0, 1)
    return x


def _arrived(leaf: Any) -> Any:
    """A tensor that an exchange gave, once it is waited for."""
    wait = getattr(type(leaf), "trigger_wait", None)
    return leaf if wait is None else wait(leaf)


def _taken_apart(result: Any) -> tuple[list[Any], Any]:
    """The leaves of a result and its structure; the author's output class stays one."""
    leaves, structure = torch.utils._pytree.tree_flatten(result)
    for leaf in leaves:
        kind = type(leaf)
        if kind not in _TENSORS and kind not in _PLAIN and kind is not float:
            raise _NoGraphError(f"it returns a {kind.__module__}.{kind.__qualname__}")
    return leaves, structure


# --- the device ----------------------------------------------------------------------------------


@contextmanager
def _no_collection() -> Iterator[None]:
    """Inside, Python collects no cycles: one may hold another graph, which cannot be destroyed
    while a stream is captured."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


class GraphPool:
    """The graphs of one model on one device, which share their memory.

    What one graph needs between its kernels, another may write over. So a copy in, a replay and a
    copy out are one turn, and turns come one after the other, whatever stream they run on.
    """

    #: One side stream for each device, because cuBLAS keeps a workspace for every stream.
    _streams: Final[dict[torch.device, torch.cuda.Stream]] = {}
    #: Failed captures, which torch's allocators may still refer to.
    _failed: Final[list[object]] = []

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._handle: Any = None
        self._alive = 0
        self._turn = torch.cuda.Event()  # type: ignore[no-untyped-call]

    @staticmethod
    def serves(device: torch.device) -> bool:
        """Whether graphs can be captured there."""
        return device.type == "cuda"

    def capture(self, run: Callable[[], Any]) -> tuple[Any, Any]:
        """A graph of what `run` launches, and what it returned, which holds no values yet.

        It runs twice, the first time plainly on the stream that is captured next, so that what a
        stream needs only once (workspaces of libraries) does not lie in the graph's memory.
        """
        device = self._device
        side = self._streams.get(device)
        if side is None:
            side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._streams[device] = side
        with torch.cuda.device(device):
            current = torch.cuda.current_stream(device)
            side.wait_stream(current)
            with torch.cuda.stream(side):
                run()
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()  # A graph cannot use memory that is kept for others.
            if not self._alive:  # A handle is void once its last graph is gone.
                self._handle = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.stream(side), _no_collection():
                # Other threads may go on using the device.
                graph.capture_begin(pool=self._handle, capture_error_mode="thread_local")
                try:
                    result = run()
                    graph.capture_end()
                except BaseException:
                    self._abandon(graph)
                    raise
            current.wait_stream(side)
        self._alive += 1
        return graph, result

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture that failed, so that the device can be used as before."""
        with warnings.catch_warnings(), suppress(RuntimeError):
            warnings.simplefilter("ignore")  # The graph may be empty.
            graph.capture_end()
            graph.reset()
            return
        # A call that may not be captured made it void: torch ends nothing of its own then.
        self._failed.append(graph)
        for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
            with suppress(AttributeError, RuntimeError):
                getattr(torch._C, name)(torch.cuda.current_device(), self._handle)
        # Random numbers are drawn as in a capture until one ends well.
        value, other = torch.zeros((), device=self._device), torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self._device)
        other.capture_begin(capture_error_mode="thread_local")
        value.zero_()
        other.capture_end()
        other.reset()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """A graph's turn on the current stream."""
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(self._turn)
        try:
            yield
        finally:
            self._turn.record(stream)

    def mark(self) -> Reached:
        """An event behind what the current stream was asked to do."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def drop(self, graph: Any) -> None:
        """Give up a graph, once it is done."""
        self._turn.synchronize()
        graph.reset()
        self._alive -= 1

    def release(self) -> None:
        """Give the memory back to the device, once every graph is dropped."""
        torch.cuda.empty_cache()


# --- the model -----------------------------------------------------------------------------------

#: What decides how torch computes the same operation, read from its C++ side.
_SETTINGS: Final = [
    getattr(torch._C, name)
    for name in (
        "_get_blas_preferred_backend",
        "_get_cublas_allow_bf16_reduced_precision_reduction",
        "_get_cublas_allow_fp16_accumulation",
        "_get_cublas_allow_fp16_reduced_precision_reduction",
        "_get_cudnn_benchmark",
        "_get_cudnn_deterministic",
        "_get_cudnn_enabled",
        "_get_cudnn_sdp_enabled",
        "_get_deterministic_algorithms",
        "_get_flash_sdp_enabled",
        "_get_math_sdp_allow_fp16_bf16_reduction",
        "_get_math_sdp_enabled",
        "_get_mem_efficient_sdp_enabled",
        "_get_sdp_priority_order",
    )
    if hasattr(torch._C, name)
]
#: torch 2.9 and newer have one precision of fp32 for each library; to read the older switches
#: beside them may raise.
_PRECISION: Final = getattr(torch._C, "_get_fp32_precision_getter", None)


def _global_settings() -> tuple[Any, ...]:
    """What other code may have set for the whole process."""
    if _PRECISION is None:
        precision = (torch._C._get_cublas_allow_tf32(), torch._C._get_cudnn_allow_tf32())
    else:
        precision = (_PRECISION("cuda", "matmul"), _PRECISION("cuda", "conv"))
    dispatch: Any = sys.modules.get("diffusers.models.attention_dispatch")
    registry = getattr(dispatch, "_AttentionBackendRegistry", None)
    return (
        replay_token(),
        F.scaled_dot_product_attention,
        getattr(registry, "_active_backend", None),
        torch.get_default_dtype(),
        [mode.device for mode in _function_modes()],
        precision,
        *[setting() for setting in _SETTINGS],
    )


def _function_modes() -> list[Any]:
    if not torch._C._len_torch_function_stack():
        return []
    overrides: Any = torch.overrides
    modes: list[Any] = overrides._get_current_function_mode_stack()
    return modes


def _frozen(value: Any, around: tuple[Any, ...] = ()) -> Any:
    """A deep copy of mutable containers, also of classes made from them, so that a change in place
    shows; anything else as it is, and a container inside itself.

    Args:
        value: Any object.
        around: The containers that it is in.
    """
    if any(value is one for one in around):
        return value

    def inside(part: Any) -> Any:
        return _frozen(part, (*around, value))

    if isinstance(value, dict):
        return {name: inside(part) for name, part in value.items()}
    if isinstance(value, list):
        return [inside(part) for part in value]
    if isinstance(value, tuple):
        return tuple(map(inside, value))
    if isinstance(value, deque):
        return deque(map(inside, value))
    if type(value) is SimpleNamespace:
        return SimpleNamespace(**inside(vars(value)))
    return set(value) if isinstance(value, set) else value


class _Look(Look):
    """A model as it was, to be compared with what it is.

    A graph rests on more than a plan: on addresses, on what lists and dicts of an attribute hold
    (peft keeps scales so), on methods of classes.

    Attributes:
        why: Why no graph of it can be captured, or "".
        device: Where its arguments are, and its weights if one can.
        groups: The ranks that share its sequence, or None.
    """

    __slots__ = ("_addresses", "_devices", "_dtypes", "_forwards", "_settings", "_shapes",
                 "_states", "_strides", "_taken", "_tensors", "device", "groups",
                 "why")  # fmt: skip

    def __init__(
        self,
        model: nn.Module,
        states: Sequence[PairState],
        device: torch.device,
        groups: ContextParallel | None,
    ) -> None:
        inside: list[Any] = []

        def kept(value: Any) -> Any:
            inside.append(_frozen(value))
            return inside[-1]

        super().__init__(model, kept)
        modules, processors = parts_of(model)
        calls = [
            *((cls, "forward") for cls in dict.fromkeys(map(type, modules))),
            *((cls, "__call__") for cls in dict.fromkeys(map(type, processors))),
        ]
        self._forwards = [(cls, name, getattr(cls, name)) for cls, name in calls]
        for module in modules:
            # Somebody who takes one of several hooks away changes nothing else that is looked at.
            hooks = getattr(module.__dict__.get("_diffusers_hook"), "hooks", {})
            if hooks:
                self._compare(hooks, [*hooks])
        within = [x for x in _leaves(inside) if isinstance(x, Tensor)]
        self._tensors = [*self._held, *self._hold(within)]
        self.device, self._states, self._taken = device, states, list(map(decides, states))
        self.groups = groups
        self._settings = _global_settings()
        tensors: list[Any] = [tensor() for tensor in self._tensors]
        self.why = _why_never(model, modules, processors, tensors, device, groups)
        if self.why:
            self._devices = list(map(Tensor.get_device, tensors))
        else:
            self._addresses = list(map(Tensor.data_ptr, tensors))
            self._shapes = list(map(Tensor.size, tensors))
            self._strides = list(map(Tensor.stride, tensors))
            self._dtypes = [x.dtype for x in tensors]

    def holds(self) -> bool:
        """Whether everything is as it was."""
        if not super().holds():
            return False
        if any(getattr(cls, name) is not own for cls, name, own in self._forwards):
            return False
        if list(map(decides, self._states)) != self._taken:
            return False
        if _global_settings() != self._settings:
            return False
        tensors: list[Any] = [tensor() for tensor in self._tensors]
        if self.why:
            return list(map(Tensor.get_device, tensors)) == self._devices
        return (
            list(map(Tensor.data_ptr, tensors)) == self._addresses
            and list(map(Tensor.size, tensors)) == self._shapes
            and list(map(Tensor.stride, tensors)) == self._strides
            and [x.dtype for x in tensors] == self._dtypes
        )


def _leaves(values: Sequence[Any]) -> Iterator[Any]:
    """What is in containers, each of which is looked into once."""
    seen: set[int] = set()
    waiting = list(values)
    while waiting:
        value = waiting.pop()
        if type(value) is SimpleNamespace:
            value = vars(value)
        if not isinstance(value, (dict, tuple, list, set, deque)):
            yield value
        elif id(value) not in seen:
            seen.add(id(value))
            waiting += value.values() if isinstance(value, dict) else value


def _why_never(
    model: nn.Module,
    modules: list[Any],
    processors: list[Any],
    tensors: list[Tensor],
    device: torch.device,
    groups: ContextParallel | None,
) -> str:
    """Why a model as it is needs Python on every forward, or ""."""
    record = record_of(model)
    ours = {id(entry.ours) for entry in record.entries} if record is not None else set()
    names = {id(module): name for name, module in model.named_modules()}
    why = _why_not_parallel(model, groups, device)
    if why:
        return why
    for module in modules:
        name = names[id(module)] or "the model"
        own = vars(module)
        forward = own.get("forward")
        if not written_by_its_author(type(module)):
            return f"the forward of {type(module).__qualname__} was replaced"
        if module is not model:
            if module._forward_hooks or module._forward_pre_hooks:
                return f"{name} is hooked (torch hooks)"
            splits = groups is not None and split_hooks(module, lambda f: id(f) in ours)
            if id(forward) not in ours and not bare(module) and not splits:
                return f"{name} is hooked ({hook_names(module)})"
            if own.get("_compiled_call_impl") is not None or "_orig_mod" in own["_modules"]:
                return f"{name} is compiled by itself"
        if isinstance(module, nn.modules.dropout._DropoutNd) and drops(module):
            return f"{name} is an active dropout"
    package = _package(type(model))
    for processor in processors:
        if _package(processor_class(processor)) != package:
            return f"{type(processor).__qualname__}, an attention processor, is not {package}'s"
    for tensor in tensors:
        if type(tensor) not in _TENSORS:
            return f"a weight is a {type(tensor).__qualname__}"
        if tensor.device != device:
            return f"a weight or buffer is on {tensor.device}, its arguments on {device}"
    return ""


def _why_not_parallel(
    model: nn.Module, groups: ContextParallel | None, device: torch.device
) -> str:
    """Why a model as it is split over ranks needs Python on every forward, or ""."""
    if groups is None:
        sharded = getattr(model, "_parallel_config", None) is not None
        return "several ranks have parts of its weights" if sharded else ""
    if groups_of(model) is None:
        return "its sequence is split by its author's own code"
    if anything(model):
        return "its ranks may have different numbers of tokens, and ask on every forward"
    if not tells_on_host(groups, device):
        return "its ranks have no CPU backend to agree through"
    return ""


def _package(cls: type) -> str:
    return cls.__module__.split(".")[0]


# --- the forward ---------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Captured:
    """A graph and what belongs to it.

    Attributes:
        graph: It has `replay`.
        inputs: The tensors that it reads in the place of the arguments.
        leaves: What it returns, tensors as it writes them.
        structure: How the leaves are held.
        held: The int8 copies that it reads.
        ran: How each pair ran, for the report.
        number: What the ranks that captured it together call it; 0 where it is of one rank alone.
        signature: Stands for its arguments among them.
    """

    graph: Any
    inputs: list[Tensor]
    leaves: list[Any]
    structure: Any
    held: list[Held]
    ran: list[str]
    number: int = 0
    signature: int = 0


class Graphs:
    """Stands in for the forward of a whole model.

    A copy of it (deepcopy, pickle) starts without graphs.

    Args:
        model: The patched model.
        inner: What patching put in the place of its forward, or None for the author's own.
        states: Its pairs.
        copies: The int8 copies of its weights.
        guard: Compares pairs on some forwards; None where it is off.
    """

    # Hooks copy the `__dict__` of what they wrap.
    __slots__ = ("_busy", "_captured", "_changes", "_closed", "_copies", "_failed", "_guard",
                 "_inner", "_lock", "_look", "_model", "_pool", "_replays", "_said", "_seen",
                 "_states", "_timer", "_why")  # fmt: skip

    #: The largest number that a graph of several ranks has in this process.
    _last_number: ClassVar[int] = 0

    def __init__(
        self,
        model: nn.Module,
        inner: Callable[..., Any] | None,
        states: Sequence[PairState],
        copies: Copies,
        guard: Guard | None,
    ) -> None:
        self._model, self._inner, self._states = model, inner, states
        self._copies, self._guard = copies, guard
        self._lock = threading.RLock()
        self._busy = self._closed = False
        self._captured: OrderedDict[Any, _Captured] = OrderedDict()
        self._pool: GraphPool | None = None
        self._timer: ReplayTimer | None = None
        self._said: set[str] = set()
        self._replays = 0
        self._start()

    def _start(self) -> None:
        self._look: _Look | None = None
        self._seen: OrderedDict[Any, int] = OrderedDict()
        self._failed: dict[Any, str] = {}
        self._changes, self._why = 0, ""

    def __reduce__(self) -> tuple[type[Graphs], tuple[Any, ...]]:
        return Graphs, (self._model, self._inner, self._states, self._copies, self._guard)

    @property
    def __signature__(self) -> inspect.Signature:
        """That of the forward it stands for, which hooks ask."""
        return inspect.signature(self._inner or MethodType(type(self._model).forward, self._model))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the model's forward returns for these arguments."""
        if not torch.compiler.is_compiling():
            tensors: list[Tensor] = []
            captured = self._served(args, kwargs, tensors)
            if captured is not None:
                try:
                    return self._replay(captured, tensors)
                finally:
                    self._leave()
        return self._plain(args, kwargs)

    def _plain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._inner is not None:
            return self._inner(*args, **kwargs)
        return type(self._model).forward(self._model, *args, **kwargs)

    # --- deciding --------------------------------------------------------------------------------

    def _served(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]
    ) -> _Captured | None:
        """The graph of this forward, with the lock held; None where it runs plain."""
        groups = groups_of_model(self._model)
        # Whatever the arguments turn out to be.
        told = groups is not None and tells_on_host(groups, torch.device("cpu"))
        together = groups if told else None
        # Ranks that wait for this one cannot do without its answer.
        if not self._lock.acquire(blocking=together is not None):
            return None  # Another thread's turn.
        if self._busy:  # The model calls itself, or is captured.
            self._lock.release()
            return None
        self._busy = True
        captured = None
        try:
            if together is not None:
                captured = self._agreed(together, args, kwargs, tensors)
            else:
                key = _signature((args, kwargs), tensors)
                device = self._device(tensors)
                captured = self._ready(key, device, groups, args, kwargs, tensors)
        except _NoGraphError as error:
            self._why = str(error)
        finally:
            if captured is None:
                self._leave()
        return captured

    def _leave(self) -> None:
        self._busy = False
        self._lock.release()

    def _device(self, tensors: list[Tensor]) -> torch.device:
        """Where this forward runs, if it may be captured at all.

        Raises:
            _NoGraphError: It may not.
        """
        if self._closed:
            raise _NoGraphError("the model is unpatched")
        devices = {x.device for x in tensors}
        device = next(iter(devices), torch.device("cpu"))
        if len(devices) > 1 or not GraphPool.serves(device):
            raise _NoGraphError(f"arguments on {', '.join(sorted(map(str, devices))) or 'none'}")
        if torch.is_grad_enabled():
            raise _NoGraphError("gradients are on")
        if autocasting(tensors[0]):
            raise _NoGraphError("autocast is on")
        if not runs_directly(tuple(tensors)) or any(
            type(mode) is not DeviceContext for mode in _function_modes()
        ):
            raise _NoGraphError("a mode or a transform of torch looks on")
        if is_capturing(device):
            raise _NoGraphError("somebody else captures it")
        if nn_module._has_any_global_hook():  # type: ignore[no-untyped-call]
            raise _NoGraphError("hooks are set for all modules")
        if replay_token() is None:
            raise _NoGraphError("somebody watches launches")
        return device

    def _ready(
        self,
        key: Any,
        device: torch.device,
        groups: ContextParallel | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[Tensor],
    ) -> _Captured | None:
        self._check(key, device, groups)
        if self._guard is not None and not self._guard.skips():
            raise _NoGraphError(_COMPARED)
        captured = self._kept(key)
        if captured is None:
            if not self._is_warm(key):
                return None
            captured = self._capture(key, device, args, kwargs, tensors)
        self._captured.move_to_end(key)
        self._why = ""
        return captured

    def _check(self, key: Any, device: torch.device, groups: ContextParallel | None) -> None:
        """Look whether the model is as it was.

        Raises:
            _NoGraphError: It may not be captured.
        """
        if self._changes > _MOST_CHANGES:
            raise _NoGraphError(_CHANGING)
        look = self._look
        if look is None or look.device != device or look.groups is not groups or not look.holds():
            self._look_again(device, groups)
        assert self._look is not None
        if self._look.why:
            self._give_up(self._look.why)
        if key in self._failed:
            raise _NoGraphError(self._failed[key])

    def _kept(self, key: Any) -> _Captured | None:
        """The graph of a signature, where the int8 copies that it reads are those of today."""
        captured = self._captured.get(key)
        if captured is not None:
            self._copies.look()
            if not all(held.is_kept() for held in captured.held):
                self._drop(key)
                captured = None
        return captured

    def _is_warm(self, key: Any) -> bool:
        """Whether enough forwards of a signature ran plain; counts this one."""
        seen = self._seen[key] = self._seen.pop(key, 0) + 1
        if len(self._seen) > _MOST_SIGNATURES:
            self._seen.popitem(last=False)
        return seen > WARM_UPS

    def _look_again(self, device: torch.device, groups: ContextParallel | None) -> None:
        if self._look is not None and not self._look.why:
            self._changes += 1
        self._drop_all()
        self._seen.clear()
        self._look = _Look(self._model, self._states, device, groups)
        if self._changes > _MOST_CHANGES:
            self._give_up(_CHANGING)

    def _give_up(self, why: str) -> NoReturn:
        self.note(why)
        raise _NoGraphError(why)

    def _fail(self, key: Any, why: str) -> NoReturn:
        """Give up a signature."""
        if len(self._failed) >= _MOST_SIGNATURES:
            self._failed.pop(next(iter(self._failed)))
        self._failed[key] = why
        self._give_up(why)

    def note(self, why: str) -> None:
        """Say why forwards run plain, in the report and once as a warning."""
        self._why = why
        if why not in self._said:
            self._said.add(why)
            _log.warning("the forward is not captured as a CUDA graph: %s", why)

    # --- several ranks ---------------------------------------------------------------------------

    def _agreed(
        self,
        groups: ContextParallel,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[Tensor],
    ) -> _Captured | None:
        """The graph of this forward on every rank of its sequence; None where it runs plain on
        all of them.

        Whatever this rank does, the others wait for its answer.
        """
        wish, why = Wish("plain"), ""
        captured = unchecked = None
        device = tensors[0].device if tensors else torch.device("cpu")
        try:
            key = _signature((args, kwargs), tensors)
            device = self._device(tensors)
            self._check(key, device, groups)
            if self._guard is not None:
                unchecked = self._guard.unchecked()
                if unchecked is None:
                    raise _NoGraphError(_COMPARED)
            captured = self._kept(key)
            # The device is another one on every rank.
            signature = crc32(repr(key).replace(repr(device), "").encode())
            if captured is not None:
                wish = Wish("replay", captured.number, self._last_number, captured.signature)
            elif self._is_warm(key):
                wish = Wish("capture", 0, self._last_number, signature)
        except _NoGraphError as error:
            why = str(error)
        wishes = told_wishes(groups, device, wish)
        if why:
            raise _NoGraphError(why)
        plain = [rank for rank, other in enumerate(wishes) if other.way == "plain"]
        if plain:
            if groups.rank not in plain:
                raise _NoGraphError(f"it does on rank {', '.join(map(str, plain))}")
            return None
        if wish.way == "replay" and all(other[:2] == wish[:2] for other in wishes):
            assert captured is not None
            if self._guard is not None:
                assert unchecked is not None
                self._guard.skip(unchecked)
        elif len({other.signature for other in wishes}) == 1:
            # A graph that others have no more is of no use.
            if captured is not None:
                self._drop(key)
            captured = self._capture_together(groups, key, device, args, kwargs, tensors)
            captured.signature = signature
        else:
            raise _NoGraphError("the ranks have different arguments")
        self._captured.move_to_end(key)
        self._why = ""
        return captured

    def _capture_together(
        self,
        groups: ContextParallel,
        key: Any,
        device: torch.device,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[Tensor],
    ) -> _Captured:
        """Capture this forward on every rank, or on none.

        Raises:
            _NoGraphError: A rank could not.
        """
        captured, failed = None, _NoGraphError("")
        try:
            captured = self._capture(key, device, args, kwargs, tensors, Answers())
        except _NoGraphError as error:
            failed = error
        wish = Wish("failed" if captured is None else "captured", last=self._last_number)
        try:
            wishes = told_wishes(groups, device, wish)
        except BaseException:
            if captured is not None:
                self._drop(key)
            raise
        if captured is None:
            raise failed
        ranks = [str(rank) for rank, other in enumerate(wishes) if other.way != "captured"]
        if ranks:
            self._drop(key)
            self._fail(key, f"it could not be captured on rank {', '.join(ranks)}")
        captured.number = Graphs._last_number = max(other.last for other in wishes) + 1
        if self._timer is None:
            self._timer = ReplayTimer(
                timeout_of(groups.group, device),
                f"a {type(self._model).__qualname__} on rank {groups.rank} of {groups.size}",
            )
        return captured

    # --- graphs ----------------------------------------------------------------------------------

    def _capture(
        self,
        key: Any,
        device: torch.device,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[Tensor],
        answers: Answers | None = None,
    ) -> _Captured:
        """Capture this forward.

        Args:
            answers: Takes what the other ranks say in the plain forward before the capture, for
                the capture itself; None for one rank alone.

        Raises:
            _NoGraphError: It could not be captured; the device and the model are as before.
        """
        asked: Iterator[Callable[[], AbstractContextManager[None]]] = repeat(nullcontext)
        if answers is not None:
            asked = iter((answers.kept, answers.again))
        try:
            # Later forwards may be of other modes.
            with torch.inference_mode(False), torch.no_grad():
                inputs = [_like(x) for x in tensors]
                for own, given in zip(inputs, tensors, strict=True):
                    _unrepeated(own).copy_(_unrepeated(given))
            versions = [x._version for x in inputs]
            own_args, own_kwargs = _replaced((args, kwargs), iter(inputs))
            while len(self._captured) >= MOST_GRAPHS:
                self._drop(next(iter(self._captured)))
            pool = self._pool = self._pool or GraphPool(device)

            def run() -> Any:
                with next(asked)():
                    result = self._plain(own_args, dict(own_kwargs))
                # Views of what diffusers gathers are not waited for yet.
                return torch.utils._pytree.tree_map(_arrived, result) if answers else result

            with self._copies.read_in_place() as held:
                graph, result = pool.capture(run)
            try:
                leaves, structure = _taken_apart(result)
                if [x._version for x in inputs] != versions:
                    raise _NoGraphError("it writes to its arguments")
            except BaseException:
                pool.drop(graph)
                raise
        except Exception as error:
            text = str(error).strip().splitlines()
            why = f"{text[0] if text else ''} ({type(error).__name__})"
            self._fail(key, str(error) if isinstance(error, _NoGraphError) else why)
        ran = [state.ran for state in self._states]
        captured = _Captured(graph, inputs, leaves, structure, list(held), ran)
        self._captured[key] = captured
        return captured

    def _replay(self, captured: _Captured, tensors: list[Tensor]) -> Any:
        assert self._pool is not None
        with self._pool.turn():
            for own, given in zip(captured.inputs, tensors, strict=True):
                _unrepeated(own).copy_(_unrepeated(given))
            captured.graph.replay()
            leaves = [x.clone() if isinstance(x, Tensor) else x for x in captured.leaves]
        if self._timer is not None:
            self._timer.add(self._pool.mark())
        for state, ran in zip(self._states, captured.ran, strict=True):
            state.ran = ran
        self._replays += 1
        self._changes = 0
        return torch.utils._pytree.tree_unflatten(leaves, captured.structure)

    def _drop(self, key: Any) -> None:
        assert self._pool is not None
        self._seen.pop(key, None)
        self._pool.drop(self._captured.pop(key).graph)
        if not self._captured and self._timer is not None:
            # Not before: the graphs were waited for, and a rank may have died.
            self._timer.close()
            self._timer = None

    def _drop_all(self) -> None:
        for key in list(self._captured):
            self._drop(key)
        if self._pool is not None:
            self._pool.release()
        self._pool = None

    # --- for the patch ---------------------------------------------------------------------------

    def clear(self) -> None:
        """Drop every graph, and forget what was given up: `refresh`."""
        with self._lock:
            if self._busy:  # Inside a forward: the next one looks again.
                self._look = None
                return
            self._drop_all()
            self._start()

    def close(self) -> None:
        """Drop every graph for good: the model is unpatched."""
        self._closed = True
        self.clear()

    def moved(self) -> None:
        """The model moved or was cast: graphs of other memory give theirs back."""
        if self._captured and (self._look is None or not self._look.holds()):
            self.clear()

    def __str__(self) -> str:
        """One line for the report."""
        if self._captured:
            line = f"CUDA graphs: {len(self._captured)} captured, {self._replays} replays"
        else:
            line = "CUDA graphs: none" + ("" if self._why else " yet")
        return f"{line}; the last forward ran plain: {self._why}" if self._why else line
