"""How long the plan of a block is kept, and the token with which it runs.

A block asks many questions before it may read a weight instead of calling a module: is this a
plain Linear, is it hooked, are its dtype and device those of the activation. The answers rest on
the block's modules and a few facts about its inputs, so they are given once and kept until
`Watch.holds` says no. In eager inference on plain tensors a kept plan runs with a token, which
names the layout of the inputs, and calls the bodies of operations; elsewhere the plan is made anew
on every forward and calls the public operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain, count
from operator import attrgetter, itemgetter
from typing import Any, Final, Generic, TypeVar

import torch
from torch import Tensor, nn

from turbo_rcm_patch.ops.modes import reference
from turbo_rcm_patch.ops.operation import replay_token, runs_directly
from turbo_rcm_patch.patching import plain

#: What names the inputs of a step, see `signature`.
Token = Any
#: After this many plans in a row that served one forward only, a block plans on every `_REST`-th
#: forward alone.
_MOST_FAILURES: Final = 8
_REST: Final = 64

_dtype = attrgetter("dtype")
_shape = attrgetter("shape")
#: Dicts of a module that decide what it computes. What is in them is looked at.
_HOOKS: Final = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
_OWNED: Final = ("_parameters", "_buffers", "_modules")
#: These, and what else `nn.Module` gives a module and nobody looks at.
_CONTAINERS: Final = frozenset(vars(nn.Module())) - {"training"}

#: Signatures of inputs that have a number.
_MOST_SIGNATURES: Final = 4096
_numbers: Final[dict[Any, int]] = {}
_count: Final = count()

_T = TypeVar("_T")


def plain_inference(inputs: tuple[Any, ...]) -> bool:
    """Whether this forward, without autocast, is eager inference on plain tensors."""
    return not (torch.compiler.is_compiling() or torch.is_grad_enabled()) and runs_directly(inputs)


def signature(*inputs: Tensor) -> int | None:
    """The token (see `Step`) of a block's inputs; None where nothing may be replayed. All tensors
    inside the block follow from them in shape, strides and dtype.

    A number stands for what the inputs look like, because every step looks its token up.
    """
    generation = replay_token()
    if generation is None:
        return None
    key = (
        generation, tuple(map(_shape, inputs)), tuple(map(Tensor.stride, inputs)),
        tuple(map(_dtype, inputs)), tuple(map(Tensor.get_device, inputs)),
    )  # fmt: skip
    number = _numbers.get(key)
    if number is None:
        if len(_numbers) >= _MOST_SIGNATURES:
            _numbers.clear()  # Others get new numbers, and no number comes twice.
        number = _numbers[key] = next(_count)
    return number


def after_call(
    token: Token,
    like: Tensor,
    dtype: torch.dtype,
    made: Sequence[Any],
    widths: Sequence[int],
    tokens: int,
) -> Token:
    """The token after modules were called: what they return may lie otherwise in memory
    every time. None where only an operation that checks its arguments may take it.

    Args:
        token: The one before.
        like: Of the device and batch that they should return.
        dtype: That they should return.
        made: What they returned.
        widths: How many channels each should have.
        tokens: How many rows each should have.
    """
    if token is None:
        return None
    shape = (like.shape[0], tokens)
    for x, width in zip(made, widths, strict=True):
        if type(x) is not Tensor or x.dtype is not dtype or x.device != like.device:
            return None
        if tuple(x.shape) != (*shape, width):
            return None
    return (token, *[x.stride() for x in made])


def parts_of(root: nn.Module) -> tuple[list[Any], list[Any]]:
    """The modules of a module, and the processors that its attentions hold."""
    modules: list[Any] = list(root.modules())
    return modules, [m.__dict__["processor"] for m in modules if "processor" in m.__dict__]


def itself(value: Any) -> Any:
    """The value."""
    return value


class Look:
    """Modules as they were, to be compared with what they are: plans and graphs rest on that.

    It sees a hook, an instance forward, another class, a replaced module, parameter, buffer or
    processor, an attribute that changed, came or went, and another dict in the place of a module's
    own.

    Args:
        root: Its modules and processors are looked at. Its own hooks and forward are not: they run
            around what rests on this look, or are ours.
        kept: What an attribute's value is compared with later.
    """

    __slots__ = (
        "_apart",
        "_attributes",
        "_classes",
        "_empty",
        "_filled",
        "_gone",
        "_held",
        "_ids",
        "_objects",
        "_owned",
    )

    def __init__(self, root: nn.Module, kept: Callable[[Any], Any] = itself) -> None:
        modules, processors = parts_of(root)
        self._objects: list[Any] = [*modules, *(p for p in processors if hasattr(p, "__dict__"))]
        self._attributes: list[Any] = []
        for one in self._objects:
            own = one.__dict__
            watched = [name for name in (*_HOOKS, *_OWNED) if name in own]
            names = [name for name in own if name not in _CONTAINERS]
            if one is root:
                watched, names = list(_OWNED), [name for name in names if name != "forward"]
            self._compare(own, names, watched, kept)
        hooks = [m.__dict__.get(name) for m in modules[1:] for name in _HOOKS]
        owned = [m.__dict__[name] for m in modules for name in _OWNED]
        self._empty = [container for container in (*hooks, *owned) if not container]
        self._filled = list(filter(None, hooks))
        # Views: they show what is inside at every look.
        self._owned = [container.values() for container in owned if container]
        inside = list(chain.from_iterable(self._owned))
        self._ids = list(map(id, inside))
        #: What no module holds among its own.
        self._apart = [root, *self._objects[len(modules) :]]
        self._classes = list(map(type, [*inside, *self._apart]))
        # Weakly, or a weight that was replaced would keep its memory until the next look. While
        # nothing is gone, no identity is used again.
        self._gone: list[object] = []
        self._held = self._hold(x for x in inside if isinstance(x, Tensor))

    def _compare(
        self,
        own: dict[str, Any],
        names: Sequence[str],
        containers: Sequence[str] = (),
        kept: Callable[[Any], Any] = itself,
    ) -> None:
        """Compare the values in a dict at every look. Of containers only the object matters, of
        which two that hold the same are one."""
        every = [*names, *containers]
        if len(every) == 1:
            every *= 2  # For one name `itemgetter` gives no tuple.
        values_of: Any = itemgetter(*every) if every else tuple
        values = values_of(own)
        count = len(values) - len(containers)
        values = (*map(kept, values[:count]), *values[count:])
        self._attributes.append((own, len(own), values_of, values))

    def _hold(self, tensors: Iterable[Tensor]) -> list[Callable[[], Any]]:
        """References to tensors, all of which have to live."""
        return [reference(x, self._gone.append) for x in tensors]

    def holds(self) -> bool:
        """Whether everything is as it was."""
        if any(self._empty) or not all(self._filled):
            return False
        inside = list(chain.from_iterable(self._owned))
        if list(map(id, inside)) != self._ids or self._gone:
            return False
        if list(map(type, [*inside, *self._apart])) != self._classes:
            return False
        try:
            for own, count, values_of, values in self._attributes:
                if len(own) != count or values_of(own) != values:
                    return False
        except Exception:
            return False  # A name is gone, or two values cannot be compared: two tensors, say.
        return True


class Watch(Look):
    """What a plan rests on: the modules of a block, as they were when it was made.

    It also sees a class's forward that was replaced, and a dtype or device that changed. What is
    written into a parameter it need not see, because a plan reads the parameter and holds no copy
    of it.

    Args:
        block: Its modules, and the processors that its attentions hold, are watched.
        states: Objects whose fields decide too, compared by `key`.
        key: What of them decides.
        read: The tensors whose memory a plan hands to kernels, so that dtype, device, shape and
            strides have to stay; a product of torch looks at its weight itself. None for every
            parameter and buffer of the block.
    """

    __slots__ = (
        "_devices",
        "_dtypes",
        "_key",
        "_read",
        "_replaced",
        "_seen",
        "_shapes",
        "_states",
        "_strides",
    )

    def __init__(
        self,
        block: nn.Module,
        states: Iterable[object],
        key: Callable[[Any], object],
        read: Iterable[Tensor] | None = None,
    ) -> None:
        super().__init__(block)
        self._read = self._held if read is None else self._hold(read)
        looked_at = [held() for held in self._read]
        self._dtypes = list(map(_dtype, looked_at))
        self._devices = list(map(Tensor.get_device, looked_at))
        self._strides = list(map(Tensor.stride, looked_at))
        self._shapes = list(map(_shape, looked_at))
        self._replaced = plain.replaced
        self._states, self._key = tuple(states), key
        self._seen = [key(state) for state in self._states]

    def holds(self) -> bool:
        """Whether everything is as it was."""
        if self._replaced is not plain.replaced or not super().holds():
            return False
        read = [held() for held in self._read]
        return (
            list(map(_dtype, read)) == self._dtypes
            and list(map(Tensor.get_device, read)) == self._devices
            and list(map(Tensor.stride, read)) == self._strides
            and list(map(_shape, read)) == self._shapes
            and list(map(self._key, self._states)) == self._seen
        )


class PlanSlot(Generic[_T]):
    """The plans of one block for its last two kinds of forwards, each made when it is first asked
    for and again when a look says so.

    A copy (deepcopy, pickle) starts empty, because a plan holds modules.
    """

    __slots__ = ("_failures", "_kept", "compiled")

    def __init__(self) -> None:
        # The newest first. One attribute, written at once: another thread may read it at any time.
        self._kept: tuple[tuple[Watch, object, _T], ...] = ()
        self._failures = 0
        #: Tokens of the forwards whose kernels were compiled ahead.
        self.compiled: set[Any] = set()

    def __reduce__(self) -> tuple[type[PlanSlot[_T]], tuple[()]]:
        return PlanSlot, ()

    def clear(self) -> None:
        """Forget the plans, and the modules that they hold."""
        self._kept = ()

    def get(
        self, facts: object, make: Callable[[], _T], watch: Callable[[_T], Watch]
    ) -> _T | None:
        """The plan; None while plans change too often to be kept.

        Args:
            facts: What decides about the plan beside what is watched.
            make: Makes the plan.
            watch: Makes what a plan rests on.
        """
        kept = self._kept
        for look, known, plan in kept:
            if known == facts:
                if look.holds():
                    self._failures = 0
                    return plan
                kept = ()  # The other may hold modules that are gone, too.
                break
        self._failures += 1
        if self._failures > _MOST_FAILURES and self._failures % _REST:
            self._kept = ()
            return None
        plan = make()
        self._kept = (watch(plan), facts, plan), *kept[:1]
        return plan
