"""Operations: a body that eager inference calls directly, and a registration for other callers.

A schema and a fake are registered, so that a compiler traces a call as one node. There is no
derivative: public functions raise where a gradient is wanted, and a patched model then runs its
author's code.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any, Final, get_type_hints

import torch
from torch import Tensor
from torch.autograd import forward_ad

from turbo_rcm_patch.errors import GradientError

#: The library of torch that holds the operations. Its end would remove them.
_LIBRARY: Any = torch.library.Library("turbo_rcm_patch", "DEF")  # type: ignore[no-untyped-call]
_PLAIN: Final = (Tensor, torch.nn.Parameter)
#: Asked on every call, so their names are looked up once.
_compiling: Final = torch.compiler.is_compiling
_dispatch_modes: Final = torch._C._len_torch_dispatch_stack
_tracer: Final = torch._C._get_tracing_state
_autocast: Final = torch._C._is_any_autocast_enabled


class Operation:
    """One operation, to be called with positional arguments.

    Eager inference on plain tensors runs the body. A compiler, a tracer, a dispatch mode or a
    subclass of Tensor gets the registered operation, which takes 2 us more.

    Args:
        name: Name in this library's namespace.
        body: Computes the result from tensors, numbers and strings alone, and returns new tensors.
        fake: Makes empty results of the right shapes and dtypes.
    """

    def __init__(self, name: str, body: Callable[..., Any], fake: Callable[..., Any]) -> None:
        self._body = body
        schema = torch.library.infer_schema(body, mutates_args=())
        _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, self._registered_body, "CompositeExplicitAutograd")
        _LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")
        torch.library.register_fake(f"turbo_rcm_patch::{name}", fake, lib=_LIBRARY)
        self._name = name
        self._registered = getattr(torch.ops.turbo_rcm_patch, name).default

    def __call__(self, *args: Any) -> Any:
        if _compiling() or any([isinstance(x, Tensor) and type(x) not in _PLAIN for x in args]):
            return self._registered(*args)
        return self.unchecked(*args)

    def unchecked(self, *args: Any) -> Any:
        """Compute the result for a patched block, whose tensors after the first are as plain."""
        if (
            _compiling()
            or type(args[0]) not in _PLAIN
            or _dispatch_modes()
            or _tracer() is not None
        ):
            return self._registered(*args)
        if _autocast():
            return without_autocast(self._body, args)
        return self._body(*args)

    def _registered_body(self, *args: Any) -> Any:
        refuse_gradient(f"turbo_rcm_patch::{self._name}", _tensors(args))
        return without_autocast(self._body, args)


def without_autocast(body: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Run a body without autocast, because the dtypes of its products are part of its contract."""
    with ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        return body(*args)


def refuse_gradient(what: str, tensors: Iterable[Tensor | None]) -> None:
    """Raise if a derivative is wanted.

    Raises:
        GradientError: A tensor requires a gradient, or forward-mode differentiation or a transform
            of torch.func is active.
    """
    transformed = forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()
    wanted = torch.is_grad_enabled() and any([x is not None and x.requires_grad for x in tensors])
    if transformed or wanted:
        raise GradientError(
            what,
            expected="inference: the fused operations have no derivative",
            got="a transform of torch.func or forward mode" if transformed
            else "a tensor that requires a gradient",
            remedy="Call it under torch.no_grad(), or compute in plain torch where a derivative "
            "is wanted",
        )  # fmt: skip


def _tensors(args: Iterable[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for one in args:
        if isinstance(one, Tensor):
            found.append(one)
        elif isinstance(one, (list, tuple)):
            found += _tensors(one)
    return found


def flattened(
    order: tuple[str, ...], returns: object, *types: object
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a body that takes `*args` the signature of an operation's schema.

    Args:
        order: The names of the arguments.
        returns: The type of the result.
        *types: Named tuples, or mappings from names, that give the types of the arguments.
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
