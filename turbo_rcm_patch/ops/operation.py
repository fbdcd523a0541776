"""An operation of torch's registry that runs its body directly where nobody needs the registry.

The registry costs some ten microseconds a call, and more with many arguments. It is needed to
compile, export, trace, differentiate or transform a call, and by whoever watches the operations of
a forward. Eager inference on plain tensors is none of that.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, wraps
from types import ModuleType
from typing import Any, Final, get_type_hints

import torch

from turbo_rcm_patch.errors import GradientError
from turbo_rcm_patch.ops.exchange import silent
from turbo_rcm_patch.ops.modes import as_documented, transformed

#: Types of arguments that can neither want a gradient nor hold a tensor.
_PLAIN: Final = frozenset({type(None), bool, int, float, str, torch.dtype})
_TENSORS: Final = frozenset({torch.Tensor, torch.nn.Parameter})


def runs_directly(args: tuple[Any, ...]) -> bool:
    """Whether a call with these arguments is eager inference on plain tensors.

    False inside a compiled or traced graph, a transform of torch.func, forward-mode AD or a
    dispatch mode, where an argument wants a gradient, and where one is a subclass of Tensor.
    """
    if (
        torch._C._len_torch_dispatch_stack()
        or transformed()
        or torch._C._get_tracing_state() is not None
    ):
        return False
    wants_gradient = torch.is_grad_enabled()
    for value in args:
        kind = type(value)
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            if wants_gradient and value.requires_grad:
                return False
        elif kind is list or kind is tuple:
            if not runs_directly(tuple(value)):
                return False
        elif kind not in _PLAIN:
            return False
    return True


class Operation:
    """A registered operation and its body.

    Args:
        name: "turbo_rcm_patch::" and its name.
        body: What it computes, from tensors, numbers and strings alone.
    """

    def __init__(self, name: str, body: Callable[..., Any]) -> None:
        self.body = body
        self.registered = torch.library.custom_op(name, body, mutates_args=())

    def __call__(self, *args: Any) -> Any:
        if not torch.compiler.is_compiling() and runs_directly(args):
            return self.body(*args)
        return self.registered(*args)

    def register_fake(self, fake: Callable[..., Any]) -> Callable[..., Any]:
        """See `torch.library.CustomOpDef.register_fake`."""
        return self.registered.register_fake(fake)

    def register_autograd(
        self, backward: Callable[..., Any], *, setup_context: Callable[..., Any] | None = None
    ) -> None:
        """See `torch.library.CustomOpDef.register_autograd`."""
        self.registered.register_autograd(backward, setup_context=setup_context)


#: Where `define` registers; what it registered goes with it.
_LIBRARY: Any = torch.library.Library("turbo_rcm_patch", "FRAGMENT")  # type: ignore[no-untyped-call]


def define(name: str, body: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Register an operation that has no derivative, for graphs in which none is wanted.

    A call costs some 2 us where one of an `Operation` through the registry costs 10: it has no
    wrapper for autograd. A derivative is refused when it runs.

    Args:
        name: Within this library's namespace.
        body: What it computes, from tensors, numbers and strings alone; it returns new tensors.
        fake: Makes what it returns, without values.

    Returns:
        The operation, to be called.
    """

    @as_documented
    @wraps(body)
    def run(*args: Any) -> Any:
        if torch.is_grad_enabled() and _wants_gradient(args):
            raise GradientError(
                f"turbo_rcm_patch::{name}",
                expected="inference, for which its graph was made",
                got="a tensor that requires a gradient",
                remedy="Call it under torch.no_grad(), or compile or export the model with grad "
                "enabled",
            )
        return body(*args)

    schema = torch.library.infer_schema(body, mutates_args=())
    _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    _LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(f"turbo_rcm_patch::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.turbo_rcm_patch, name).default


def _wants_gradient(args: Iterable[Any]) -> bool:
    return any(
        _wants_gradient(x) if isinstance(x, (list, tuple)) else getattr(x, "requires_grad", False)
        for x in args
    )


def flattened(
    order: tuple[str, ...], returns: object, *types: object
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a body that takes `*args` the signature of an operation's schema.

    Args:
        order: The names of the arguments.
        returns: The type of the result.
        *types: Where the arguments' types are: named tuples, or mappings from names.
    """
    known: dict[str, Any] = {}
    for kind in types:
        known |= kind if isinstance(kind, dict) else get_type_hints(kind)
    parameters = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=known[name])
        for name in order
    ]

    signature = inspect.Signature(parameters, return_annotation=returns)

    def decorate(body: Callable[..., Any]) -> Callable[..., Any]:
        body.__signature__ = signature  # type: ignore[attr-defined]
        return body

    return decorate


def replay_token() -> int | None:
    """What a `Step` needs beside the signature of its inputs: changes when recordings are void;
    None where nothing may be replayed."""
    replay = _replay()
    return None if replay is None else replay.replay_generation()


@cache
def _replay() -> ModuleType | None:
    """Recordings need Triton."""
    try:
        from turbo_rcm_patch.kernels import replay
    except ImportError:
        return None
    return replay


def compile_ahead(call: Callable[[], object], device: torch.device) -> None:
    """Compile every kernel that a call would start on a GPU, several at a time, so that a first
    forward does not compile them one after another. Does nothing without Triton.

    Args:
        call: Runs operations and has no other effect; its kernels are not started, so what it
            gives is garbage.
        device: Where they will run.
    """
    if device.type != "cuda" or _replay() is None:
        return
    from turbo_rcm_patch.kernels import ahead

    with silent():
        ahead.compile_ahead(call, device)


def running_for_real() -> AbstractContextManager[object]:
    """Inside, kernels are started although `compile_ahead` runs: for what is made once and
    kept."""
    if _replay() is None:
        return nullcontext()
    from turbo_rcm_patch.kernels import ahead

    return ahead.running_for_real()


class Step:
    """One call of an operation in a plan, which always gets the same numbers and, under one token,
    tensors of the same shapes, strides, dtypes and devices. The caller sees to that; nothing is
    checked.

    The first call under a token records what the operation launches; later ones launch it. What
    cannot be recorded, and everything on a CPU, runs the operation's body.
    """

    __slots__ = ("_body", "_found", "_recordings")

    #: Tokens that a step remembers; a forward of another length is another token.
    MOST_TOKENS: Final = 64

    def __init__(self, operation: Operation | Callable[..., Any]) -> None:
        self._body = operation.body if isinstance(operation, Operation) else operation
        self._recordings: Any = None
        self._found: dict[Any, Any] = {}  # the recordings' own, once there are any

    def __call__(self, token: Any, *args: Any) -> Any:
        """The operation of these arguments.

        Args:
            token: Names the signature of the tensors; None where nothing may be replayed.
            *args: As the operation takes them.
        """
        if token is None:
            return self._body(*args)
        tensors = [x for x in args if x.__class__ in _TENSORS]
        found = self._found.get(token)
        if found.__class__ is list:  # As `Recordings.run` does, without another frame.
            addresses = [x.data_ptr() for x in tensors]
            for program in found:
                if program.fits(addresses):
                    return program(tensors, addresses)
        if self._recordings is None:
            replay = _replay()
            assert replay is not None
            self._recordings = replay.Recordings(self.MOST_TOKENS)
            self._found = self._recordings.found
        return self._recordings.run(token, tensors, self._body, args, {})
