"""How long the plan of a block is kept, and the token with which it runs.

A block asks many questions before it may read a weight instead of calling a module: is this a
plain Linear, is it hooked, are its dtype and device those of the activation. The answers rest on
the block's modules and a few facts about its inputs, so they are given once and kept until
`Watch.holds` says no. In eager inference on plain tensors a kept plan runs with a token, which
names the layout of the inputs, and calls the bodies of operations; elsewhere the plan is made anew
on every forward and calls the public operations.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, count
from operator import attrgetter, itemgetter, methodcaller
from typing import Any, Final, Generic, TypeVar

import torch
from torch import Tensor, nn

from turbo_rcm_patch.ops.operation import replay_token, runs_directly
from turbo_rcm_patch.patching import plain

#: What names the inputs of a step, see `signature`.
Token = Any
#: Plans made in a row that did not live to a second forward before a block plans only on every
#: so-many-th forward: what changes with every forward is not worth looking at.
_MOST_FAILURES: Final = 8
_REST: Final = 64

_dtype = attrgetter("dtype")
_shape = attrgetter("shape")
_device = methodcaller("get_device")
_stride = methodcaller("stride")
_HOOKS: Final = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)

#: What every module has and never replaces; what is inside is looked at.
_CONTAINERS: Final = frozenset(vars(nn.Module())) - {"training"}

#: Signatures of inputs that have a number.
_MOST_SIGNATURES: Final = 4096
_numbers: Final[dict[Any, int]] = {}
_count: Final = count()

_T = TypeVar("_T")
#: Gives None, as a reference to what died does: for a parameter that is None.
_NOTHING: Final[Any] = weakref.ref(set[int]())


def plain_inference(inputs: tuple[Any, ...]) -> bool:
    """Whether this forward, without autocast, is eager inference on plain tensors."""
    return not (torch.compiler.is_compiling() or torch.is_grad_enabled()) and runs_directly(inputs)


def signature(*inputs: Tensor) -> int | None:
    """The token of `Step` for a block's inputs: every tensor inside a plan has a shape, stride and
    dtype that follow from theirs. None where nothing may be replayed.

    A number stands for what the inputs look like, because every step looks its token up.
    """
    generation = replay_token()
    if generation is None:
        return None
    key = (
        generation, tuple(map(_shape, inputs)), tuple(map(_stride, inputs)),
        tuple(map(_dtype, inputs)), tuple(map(_device, inputs)),
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
    """The token behind modules that were called: what they return may lie otherwise in memory
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


class Watch:
    """What a plan rests on: the modules of a block, as they were when it was made.

    It sees a hook, an instance forward, a class's that was replaced, another class, a replaced
    module, parameter or processor, and an attribute, dtype or device that changed. What is written
    into a parameter it need not see, because a plan reads the parameter and holds no copy of it.

    Args:
        block: Its modules, and the processors that its attentions hold, are watched.
        states: Objects whose fields decide too, compared by `key`.
        key: What of them decides.
        read: The tensors whose memory a plan hands to kernels, so that dtype, device, shape and
            strides have to stay; a product of torch looks at its weight itself. None for every
            parameter and buffer of the block.
    """

    __slots__ = (
        "_attributes",
        "_classes",
        "_devices",
        "_dtypes",
        "_held",
        "_hooked",
        "_hooks",
        "_key",
        "_objects",
        "_owned",
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
        modules: list[Any] = list(block.modules())
        processors = [m.__dict__["processor"] for m in modules if "processor" in m.__dict__]
        objects = [*modules, *(p for p in processors if hasattr(p, "__dict__"))]
        self._attributes = []
        for own in map(vars, objects):
            names = [name for name in own if name not in _CONTAINERS]
            if own is vars(block):  # Its forward is ours, or around ours, and holds this watch.
                names = [name for name in names if name != "forward"]
            if names:  # One name gives its value, several a tuple of theirs.
                values_of = itemgetter(*names)
                self._attributes.append((own, len(own), values_of, values_of(own)))
        # The block's own hooks run around the forward that the plan stands for.
        self._hooks = [m.__dict__.get(name, {}) for m in modules[1:] for name in _HOOKS]
        self._hooked = list(map(len, self._hooks))
        # Views: they show what is inside at every look.
        self._owned = [
            m.__dict__[name].values()
            for m in modules
            for name in ("_parameters", "_buffers", "_modules")
            if m.__dict__[name]
        ]
        held = list(chain.from_iterable(self._owned))
        self._objects = objects
        self._classes = list(map(type, [*objects, *held]))
        tensors = [x for x in held if isinstance(x, Tensor)]
        # Weakly, or a weight that was replaced would keep its memory until the next look.
        self._held = [_NOTHING if x is None else weakref.ref(x) for x in held]
        looked_at = tensors if read is None else list(read)
        self._read = list(map(weakref.ref, looked_at))
        self._dtypes = list(map(_dtype, looked_at))
        self._devices = list(map(_device, looked_at))
        self._strides = list(map(_stride, looked_at))
        self._shapes = list(map(_shape, looked_at))
        self._replaced = plain.replaced
        self._states, self._key = tuple(states), key
        self._seen = [key(state) for state in self._states]

    def holds(self) -> bool:
        """Whether everything is as it was."""
        if list(map(len, self._hooks)) != self._hooked or self._replaced is not plain.replaced:
            return False
        owned = list(chain.from_iterable(self._owned))
        if list(map(type, [*self._objects, *owned])) != self._classes:
            return False
        try:
            for own, count, values_of, values in self._attributes:
                if len(own) != count or values_of(own) != values:
                    return False
        except (KeyError, RuntimeError, ValueError):
            return False  # a name is gone, or two tensors or arrays are not the same one
        for held, own in zip(self._held, owned, strict=True):
            if held() is not own:  # What died is None here, also where another has its address.
                return False
        read = [reference() for reference in self._read]
        return (
            list(map(_dtype, read)) == self._dtypes
            and list(map(_device, read)) == self._devices
            and list(map(_stride, read)) == self._strides
            and list(map(_shape, read)) == self._shapes
            and list(map(self._key, self._states)) == self._seen
        )


class PlanSlot(Generic[_T]):
    """The plan of one block, made when it is first asked for and again when a look says so.

    A copy (deepcopy, pickle) starts empty, because a plan holds modules.
    """

    __slots__ = ("_failures", "_kept", "compiled")

    def __init__(self) -> None:
        # One attribute, written at once: another thread may read it at any time.
        self._kept: tuple[Watch, object, _T] | None = None
        self._failures = 0
        #: Tokens of the forwards whose kernels were compiled ahead.
        self.compiled: set[Any] = set()

    def __reduce__(self) -> tuple[type[PlanSlot[_T]], tuple[()]]:
        return PlanSlot, ()

    def get(
        self, facts: object, make: Callable[[], _T], watch: Callable[[_T], Watch]
    ) -> _T | None:
        """The plan; None where plans have not lived long enough to be worth looking at.

        Args:
            facts: What decides about the plan beside what is watched.
            make: Makes the plan.
            watch: Makes what a plan rests on.
        """
        kept = self._kept
        if kept is not None and kept[1] == facts and kept[0].holds():
            self._failures = 0
            return kept[2]
        self._failures += 1
        if self._failures > _MOST_FAILURES and self._failures % _REST:
            self._kept = None
            return None
        plan = make()
        self._kept = watch(plan), facts, plan
        return plan
