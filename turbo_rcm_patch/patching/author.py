"""The author's code of one pair, run beside ours without a trace.

The guard compares a pair with the author's own forward of the block, in which the other pairs add
nothing. A module that somebody hooked (a cache, offloading, casting) may not be called twice, so
ours notes what such a module was given and what it returned, and the author's code gets the same
back; whether ours and the author's gave it the same input is compared, too. Everything else is
called as ever.

A block hands its modules to `call`, and the input of a branch to `observe`. Both cost a look at a
thread's own notes on a forward that nobody checks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from turbo_rcm_patch.patching.plain import runs_itself, stand_in

_local = threading.local()

_TILE: Final = 64


def call(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a module from a fused path; noted on a forward that the guard checks."""
    if torch.compiler.is_compiling():
        return module(*args, **kwargs)
    notes: Notes | None = getattr(_local, "notes", None)
    if notes is None:
        return module(*args, **kwargs)
    return notes.call(module, args, kwargs)


def observe(x: Any, *values: Any) -> None:
    """Tell the guard the input of a branch.

    Args:
        x: After its norm: [B, N, C], or int8 rows of it.
        *values: Of an attention, the Linears whose last rows make values: that of its keys, and
            that of the image tokens, which are other keys.
    """
    notes: Notes | None = getattr(_local, "notes", None)
    if notes is not None:
        notes.ours, notes.values = x, values


def observe_attention(operands: Any) -> None:
    """Tell the guard what an attention in 8 bits is given: `noise.Operands`."""
    notes: Notes | None = getattr(_local, "notes", None)
    if notes is not None and notes.wants_operands:
        notes.operands = operands


def quiet(module: nn.Module) -> bool:
    """Whether calling a module again changes nothing: nothing hangs on it or on what is in it."""
    return all(map(runs_itself, module.modules()))


class _Call(NamedTuple):
    """One call of a hooked module."""

    module: nn.Module
    given: tuple[Tensor, ...]
    returned: Any


class Notes:
    """What one pair called and made while the guard compares it.

    Attributes:
        ours: The input of our branch, after its norm; or int8 rows of it, and their scales.
        theirs: The author's.
        before: What the author's output projection gets, [B, N, H * D].
        output: The author's output projection.
        values: The Linears whose last rows make values, see `observe`; none where nobody knows.
        wants_operands: Whether somebody asks for these.
        operands: What our attention was given, where it runs in 8 bits.
        replayed: What hooked modules got from ours and would have got from the author.
    """

    def __init__(self, wants_operands: bool = True) -> None:
        self.wants_operands = wants_operands
        self.ours: Tensor | tuple[Tensor, Tensor] | None = None
        self.theirs: Tensor | None = None
        self.before: Tensor | None = None
        self.output: nn.Module | None = None
        self.values: tuple[Any, ...] = ()
        self.operands: Any = None
        self.replayed: list[tuple[Tensor, Tensor]] = []
        self._calls: dict[int, list[_Call]] = {}
        self._branch: Callable[[], Any] | None = None
        self._centre: Tensor | None = None
        self._taken_apart: set[int] = set()

    def forget(self) -> None:
        """Let go of all tensors. What runs the branch again holds the notes, and so it would keep
        them until Python looks for cycles."""
        self.ours = self.theirs = self.before = self.operands = self._centre = None
        self._branch = None
        self.replayed, self._calls = [], {}

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Note what this thread's fused path calls."""
        before = getattr(_local, "notes", None)
        _local.notes = self
        try:
            yield
        finally:
            _local.notes = before

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a module for ours; what a hooked one made of the same input is not made again."""
        if quiet(module):
            return module(*args, **kwargs)
        given = _tensors(args, kwargs)
        for earlier in self._calls.get(id(module), []):
            if len(earlier.given) == len(given) and all(
                a is b or torch.equal(a, b) for a, b in zip(earlier.given, given, strict=True)
            ):
                return earlier.returned
        returned = module(*args, **kwargs)
        self._calls.setdefault(id(module), []).append(_Call(module, given, returned))
        return returned

    def replay(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[bool, Any]:
        """What a hooked module returned to ours, called with tensors of these shapes."""
        given = _tensors(args, kwargs)
        for earlier in self._calls.get(id(module), []):
            pairs = list(zip(earlier.given, given, strict=False))
            if len(earlier.given) == len(given) and all(a.shape == b.shape for a, b in pairs):
                self.replayed += [pair for pair in pairs if pair[0].is_floating_point()]
                return True, _copied(earlier.returned)  # Authors write into what they get.
        return False, None

    # --- the author's code -----------------------------------------------------------------------

    def over(self, module: nn.Module, **instead: Any) -> Author:
        """The module as its author's code may use it, with some of its members replaced."""
        return Author(module, self, instead)

    def branch(
        self,
        module: nn.Module,
        output: str = "",
        run: Callable[..., Any] | None = None,
        **instead: Any,
    ) -> Callable[..., Any]:
        """A branch as the block calls it.

        Args:
            module: Attention, feed-forward or Linear.
            output: Name of its output projection, where its input is to be kept: a Linear, or a
                list that begins with one.
            run: The function of its class that computes it, if that is not its forward.
            **instead: Members to replace.
        """

        def called(*args: Any, **kwargs: Any) -> Any:
            self.theirs = _joined(args, kwargs)
            self._branch = lambda: own(*args, **kwargs)
            return own(*args, **kwargs)

        held: Any = getattr(module, output, None) if output else None
        if held is not None:  # Somebody's own module in the branch's place may have none.
            first = held if isinstance(held, nn.Linear) or not _listed(held) else held[0]
            self.output = first
            watched = self._watched(first)
            rest = [] if first is held else [self.member(part) for part in list(held)[1:]]
            instead[output] = watched if first is held else [watched, *rest]
        view = self.over(module, **instead) if instead or run else self.member(module)
        own = partial(run, view) if run else view
        return called

    def last_keys(self) -> Tensor | None:
        """What the last keys add to the author's attention, before the output projection.

        They are told from the rest by their values, of which the mean of all outputs is taken
        away: without these keys, the others would have their share.

        Returns:
            [B, N, H * D], or None where it cannot be told.
        """
        if self._branch is None or self.before is None or not self.values:
            return None
        before, self._taken_apart = self.before, set()
        self._centre = before.float().mean(1, keepdim=True).to(before.dtype)
        try:
            self._branch()
            # The author may use a Linear without a call, which shows nothing.
            apart = self._taken_apart == set(map(id, self.values))
            return self.before if apart else None
        finally:
            self.before, self._centre = before, None

    def member(self, value: Any) -> Any:
        """A member of a module as the author's code may use it."""
        if not isinstance(value, nn.Module):
            return value
        usable: Any = value if quiet(value) else Author(value, self, {})
        if self._centre is not None and any(value is one for one in self.values):
            return self._only_last(value, usable, self._centre)
        return usable

    def _watched(self, linear: nn.Module) -> Callable[[Tensor], Any]:
        usable = self.member(linear)

        def run(x: Tensor) -> Any:
            self.before = x
            return x if self._centre is not None else usable(x)

        return run

    def _only_last(
        self, linear: nn.Module, project: Callable[[Tensor], Tensor], centre: Tensor
    ) -> Callable[..., Any]:
        def run(x: Tensor) -> Tensor:
            made = project(x)
            self._taken_apart.add(id(linear))
            if made.shape[0] == 1:  # A text of one sample may stand for every sample's.
                made = made.expand(centre.shape[0], -1, -1)
            made = made.clone()
            values = made[..., -centre.shape[-1] :]  # Behind q and k, where it makes them too.
            last = _last(values.shape[1])
            kept = values[:, -last:] - centre
            values.zero_()
            if linear is self.values[0]:
                values[:, -last:] = kept
            return made

        return run


class Untold(Notes):
    """For a pair that runs as its author wrote it from now on: every module is called as ever."""

    def member(self, value: Any) -> Any:
        return value

    def branch(
        self,
        module: nn.Module,
        output: str = "",
        run: Callable[..., Any] | None = None,
        **instead: Any,
    ) -> Callable[..., Any]:
        return module


class Author:
    """A module in the eyes of its author's code: hooked ones in it return what they returned to
    ours, and are not called."""

    def __init__(self, module: nn.Module, notes: Notes, instead: dict[str, Any]) -> None:
        self.__dict__.update(_module=module, _notes=notes, _instead=instead)

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # `super()` and `isinstance` in the author's code ask for it.
        module = self.__dict__.get("_module")
        return Author if module is None else type(module)  # A compiler asks before there is one.

    def __getattr__(self, name: str) -> Any:
        if name in ("_instead", "_module", "_notes"):  # A compiler asks before they are set.
            raise AttributeError(name)
        if name in self._instead:
            return self._instead[name]
        value = getattr(self._module, name)
        if isinstance(value, MethodType) and value.__self__ is self._module:
            return MethodType(value.__func__, self)
        return self._notes.member(value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module
        if not quiet(module):  # Ours may have called it whole for what hangs on a part of it.
            known, returned = self._notes.replay(module, args, kwargs)
            if known:
                return returned
        instead = stand_in(module)
        if instead is not None:
            return instead.over(self)(*args, **kwargs)
        return type(module).forward(self, *args, **kwargs)

    def __iter__(self) -> Iterator[Any]:
        return (self._notes.member(part) for part in self._module)

    def __getitem__(self, index: Any) -> Any:
        return self._notes.member(self._module[index])

    def __len__(self) -> int:
        return len(self._module)


# --- what stands in for the other pairs of a block -----------------------------------------------


def same(*args: Any) -> Any:
    """A norm of another pair: it changes nothing. Of CogVideoX's, the gates are zero."""
    if len(args) == 1:
        return args[0]
    video, text, _ = args
    return video, text, torch.zeros_like(video[:, :1]), torch.zeros_like(text[:, :1])


def nothing(*args: Any, **kwargs: Any) -> Any:
    """A branch of another pair: it adds nothing."""
    return _filled(torch.zeros_like, args, kwargs)


def ones(*args: Any, **kwargs: Any) -> Any:
    """A branch of ones: what a pair makes of it is its gate."""
    return _filled(torch.ones_like, args, kwargs)


def _filled(make: Callable[[Tensor], Tensor], args: tuple[Any, ...], kwargs: Any) -> Any:
    if args:
        return make(args[0])
    return make(kwargs["hidden_states"]), make(kwargs["encoder_hidden_states"])


def _last(keys: int) -> int:
    """How many keys are the last ones: of many, those behind the last whole tile of a kernel."""
    return max(1, keys // 32) if keys < 4 * _TILE else keys % _TILE or _TILE


def _joined(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The input of a branch; of two streams, text first."""
    if args:
        first: Tensor = args[0]
        return first
    return torch.cat([kwargs["encoder_hidden_states"], kwargs["hidden_states"]], dim=1)


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, ...]:
    values = [*args, *kwargs.values()]
    return tuple(value for value in values if isinstance(value, Tensor))


def _copied(made: Any) -> Any:
    if isinstance(made, Tensor):
        return made.clone()
    return type(made)(map(_copied, made)) if type(made) in (tuple, list) else made


def _listed(held: Any) -> bool:
    return isinstance(held, nn.ModuleList | nn.Sequential)
