"""How operators meet torch.

An operator is a plain function in its folder's `api.py`. Eager inference on plain tensors runs it
directly. A compiler, a tracer, a dispatch mode, autocast or a subclass of Tensor needs an
operation that torch knows (`needs_registered`), which takes 2 us more:

    def norm(x, *, weight, eps, impl):
        if needs_registered(x):
            return _operation(x, weight, eps, encode(impl=impl))
        return _computed(x, weight, eps, impl)

    _operation = register("norm(Tensor x, Tensor? weight, float eps, str options) -> Tensor", ...)

A schema and a fake are registered, so that a compiler traces a call as one node. There is no
derivative: public functions raise where a gradient is wanted, and a patched model then runs its
author's code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import cache
from typing import Any, Final

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


def needs_registered(x: Tensor, *more: Tensor | None) -> bool:
    """Return True if a call has to go through the registered operation.

    A patched block asks for its first tensor alone, because it has looked at the others.
    """
    return (
        _compiling()
        or type(x) not in _PLAIN
        or _dispatch_modes() > 0
        or _autocast()
        or _tracer() is not None
        or (more != () and any([one is not None and type(one) not in _PLAIN for one in more]))
    )


def register(schema: str, body: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Register an operation, and return it.

    Args:
        schema: Its schema, as torch writes it, with a name in this library's namespace.
        body: Computes the result, without autocast, and returns new tensors.
        fake: Makes empty results of the right shapes and dtypes.
    """
    name = schema.partition("(")[0]

    @functools.wraps(body)
    def without_derivative(*args: Any, **kwargs: Any) -> Any:
        refuse_gradient(f"turbo_rcm_patch::{name}", _tensors((args, tuple(kwargs.values()))))
        with ExitStack() as stack:  # the dtypes of its products are part of its contract
            for device in ("cpu", "cuda"):
                if torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, enabled=False))
            return body(*args, **kwargs)

    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, without_derivative, "CompositeExplicitAutograd")
    _LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(f"turbo_rcm_patch::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.turbo_rcm_patch, name).default


def encode(**options: str | bool) -> str:
    """Write the plain options of an operator as one string, the last argument of its schema."""
    return " ".join([f"{name}={value}" for name, value in options.items()])


@cache
def decode(options: str) -> dict[str, Any]:
    """Read what `encode` wrote."""
    values = (one.split("=", 1) for one in options.split(" "))
    flags = {"True": True, "False": False}
    return {name: flags.get(value, value) for name, value in values}


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
