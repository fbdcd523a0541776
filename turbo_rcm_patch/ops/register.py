"""How operators meet torch.

An operator is a plain function in its folder's `api.py`. Eager inference on plain tensors calls it
directly. A compiler, a tracer, a dispatch mode, autocast or a subclass of Tensor needs an
operation that torch knows (`needs_registered`). `register` makes one from the function itself:

    def scaled(x: Tensor, norm: Norm, impl: str) -> Tensor: ...

    registered_scaled = register("scaled", scaled, lambda x, *_: x.new_empty(x.shape))

    compute = registered_scaled if needs_registered(x) else scaled
    y = compute(x, norm, impl)

All operations have one schema, "(Tensor[] tensors, float[] numbers, str key) -> Tensor[]". The
arguments of a call are split into its tensors, its numbers, and a key that describes the rest.
A compiler traces a call as one node. A number that it holds as a symbol becomes a constant here,
so what depends on lengths is computed inside an operation, from shapes. There is no derivative:
public functions raise where a gradient is wanted, and a patched model then runs its original code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import lru_cache
from typing import Any, Final, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from turbo_rcm_patch.errors import GradientError

_P = ParamSpec("_P")
_R = TypeVar("_R", bound=Tensor | tuple[Tensor, ...])

#: The library of torch that holds the operations. Its end would remove them.
_LIBRARY: Any = torch.library.Library("turbo_rcm_patch", "DEF")  # type: ignore[no-untyped-call]
_SCHEMA: Final = "(Tensor[] tensors, float[] numbers, str key) -> Tensor[]"
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
        or (more != () and any([y is not None and type(y) not in _PLAIN for y in more]))
    )


def register(
    name: str,
    function: Callable[_P, _R],
    fake: Callable[_P, _R],
    *records: type,
) -> Callable[_P, _R]:
    """Register a function as an operation of torch, and return one that calls the operation.

    Args:
        name: Its name in this library's namespace.
        function: Takes tensors, numbers, strings, dtypes, None, and records and tuples of these,
            by position. Returns new tensors: one, if it is annotated so, else a tuple. It runs
            without autocast, because the dtypes of its products are part of its contract.
        fake: Takes the same and makes empty results of the right shapes and dtypes.
        *records: The NamedTuples and frozen dataclasses among the arguments.
    """
    for record in records:
        _FIELDS[record] = getattr(record, "_fields", None) or tuple(record.__annotations__)
        _RECORDS[record.__name__] = record
    single = function.__annotations__["return"] == "Tensor"
    real: Callable[..., _R] = function
    empty: Callable[..., _R] = fake

    def compute(tensors: list[Tensor], numbers: list[float], key: str) -> list[Tensor]:
        refuse_gradient(f"turbo_rcm_patch::{name}", tensors)
        with ExitStack() as stack:
            for device in ("cpu", "cuda"):
                if torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, enabled=False))
            return _as_list(real(*_joined(tensors, numbers, key)))

    def imitate(tensors: list[Tensor], numbers: list[float], key: str) -> list[Tensor]:
        return _as_list(empty(*_joined(tensors, numbers, key)))

    _LIBRARY.define(name + _SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, compute, "CompositeExplicitAutograd")
    _LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(f"turbo_rcm_patch::{name}", imitate, lib=_LIBRARY)
    operation: Any = getattr(torch.ops.turbo_rcm_patch, name).default

    def call(*args: _P.args, **_: _P.kwargs) -> Any:
        results = operation(*split(args))
        return results[0] if single else tuple(results)

    return call


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
            "is wanted"
        )  # fmt: skip


# --- a call as tensors, numbers and a key --------------------------------------------------------

#: Records by name, and the names of their fields.
_RECORDS: Final[dict[str, type]] = {}
_FIELDS: Final[dict[type, tuple[str, ...]]] = {}
_CONSTANTS: Final = {"None": None, "True": True, "False": False}


#: The place of a tensor in what a key describes.
_TENSOR: Final = object()


def split(args: tuple[Any, ...]) -> tuple[list[Tensor], list[float], str]:
    """Return the arguments of a call as an operation takes them. A compiler traces this."""
    tensors: list[Tensor] = []
    numbers: list[float] = []
    return tensors, numbers, _described(args, tensors, numbers)


def _described(value: Any, tensors: list[Tensor], numbers: list[float]) -> str:
    """Return the words that describe a value, and append its tensors and numbers to the lists."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return "tensor"
    if value is None or isinstance(value, bool):
        return str(value)
    if isinstance(value, (int, float)):
        numbers.append(value)
        return "int" if isinstance(value, int) else "float"
    if isinstance(value, str):
        return f"str:{value}"
    if isinstance(value, torch.dtype):
        return str(value)
    if type(value) is tuple:
        words, parts = [f"tuple:{len(value)}"], list(value)
    else:
        words = [type(value).__name__]
        parts = [getattr(value, field) for field in _FIELDS[type(value)]]
    return " ".join(words + [_described(part, tensors, numbers) for part in parts])


def _joined(tensors: list[Tensor], numbers: list[float], key: str) -> Any:
    """Return the arguments of which `split` made these."""
    return _filled(_template(key, tuple(numbers)), iter(tensors))


@lru_cache(maxsize=4096)
def _template(key: str, numbers: tuple[float, ...]) -> Any:
    """Return the arguments that a key describes, with `_TENSOR` in the place of tensors."""
    return _parsed(iter(key.split(" ")), iter(numbers))


def _parsed(words: Iterator[str], numbers: Iterator[float]) -> Any:
    word = next(words)
    kind, _, text = word.partition(":")
    if kind == "tensor":
        return _TENSOR
    if kind in _CONSTANTS:
        return _CONSTANTS[kind]
    if kind in ("int", "float"):
        number = next(numbers)
        return int(number) if kind == "int" else number
    if kind == "str":
        return text
    if kind == "tuple":
        return tuple([_parsed(words, numbers) for _ in range(int(text))])
    if kind.startswith("torch."):
        return getattr(torch, kind.removeprefix("torch."))
    record = _RECORDS[kind]
    return record(**{field: _parsed(words, numbers) for field in _FIELDS[record]})


def _filled(template: Any, tensors: Iterator[Tensor]) -> Any:
    """Return a template with its tensors in their places."""
    if template is _TENSOR:
        return next(tensors)
    if not isinstance(template, tuple):
        return template
    make = getattr(template, "_make", tuple)
    return make([_filled(part, tensors) for part in template])


def _as_list(result: Tensor | tuple[Tensor, ...]) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)
