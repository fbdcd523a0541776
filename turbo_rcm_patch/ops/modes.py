"""What torch may have switched on around an operation: transforms, autocast, and capture.

A registered operation runs below autograd. A derivative in forward mode would pass it as an exact
zero, and the transforms of torch.func would fail in it or loop over it. So wherever one of them
looks, the public functions compute their exact mathematics in plain torch instead, which has every
derivative: reference code, attention in chunks of rows.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import wraps
from typing import Any, Final, TypeVar, cast

import torch
from torch import Tensor
from torch._C import _functorch
from torch.autograd import forward_ad

from turbo_rcm_patch.errors import GradientError

F = TypeVar("F", bound=Callable[..., Any])


_PLAIN: Final = (Tensor, torch.nn.Parameter)


def reference(
    x: Tensor, gone: Callable[[object], object] | None = None
) -> Callable[[], Tensor | None]:
    """A function that gives a tensor, or None once it is gone; it keeps only those alive to which
    no weak reference is allowed.

    A module that moves swaps the contents of parameters of another class (torchao's), and of all
    parameters where torch was set to do so. `torch.utils.swap_tensors` refuses that for a tensor
    with a weak reference.

    Args:
        x: The tensor.
        gone: Called once it is gone.
    """
    if type(x) in _PLAIN and not torch.__future__.get_swap_module_params_on_conversion():
        return weakref.ref(x, gone)
    return lambda: x


def transformed() -> bool:
    """Whether a forward-mode derivative or a transform of torch.func is active here.

    It asks for the mode and not for tensors: weights may carry a tangent where activations do not.
    0.1 us; a compiler traces it and guards on it.
    """
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()


def _has_derivative(x: Tensor) -> bool:
    if x.requires_grad and torch.is_grad_enabled():
        return True
    if not transformed():
        return False
    while _functorch.is_functorch_wrapped_tensor(x):
        if _functorch.is_gradtrackingtensor(x):
            return True
        x = _functorch.get_unwrapped(x)
    tangent: Tensor | None = forward_ad.unpack_dual(x).tangent  # type: ignore[no-untyped-call]
    return tangent is not None


def refuse_derivative(what: str, *tensors: Tensor | None, expected: str, remedy: str) -> None:
    """Raise where a tensor carries a derivative, of either mode, that `what` does not have.

    Raises:
        GradientError: One of them requires a gradient, carries a tangent, or is differentiated by
            torch.func.
    """
    if any(x is not None and _has_derivative(x) for x in tensors):
        raise GradientError(what, expected=expected, got="a request for one", remedy=remedy)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Switch autocast off for a device, where it is on."""
    on = device.type != "meta" and torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if on else nullcontext()


def as_documented(body: F) -> F:
    """Run the body of an operation without autocast.

    Which dtype multiplies what is part of an operation's contract. Autocast reaches into bodies,
    and would compute an fp32 operation in 16 bits.
    """

    @wraps(body)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch._C._is_any_autocast_enabled():
            return body(*args, **kwargs)
        with ExitStack() as stack:
            for device in ("cpu", "cuda"):
                if torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, enabled=False))
            return body(*args, **kwargs)

    # torch reads the schema of an operation here, and would look up types in this module.
    run.__signature__ = inspect.signature(body, eval_str=True)  # type: ignore[attr-defined]
    return cast("F", run)


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is captured here: then nothing is written yet, what is made belongs to
    the graph, and nothing may wait for the device."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def synchronize(device: torch.device, *, every_stream: bool = False) -> None:
    """Wait until what this stream (or every stream) was asked to do on a device is done.

    For what is made in one call and read in later ones, which may come from another stream.
    """
    if device.type == "cuda":
        if every_stream:
            torch.cuda.synchronize(device)
        else:
            torch.cuda.current_stream(device).synchronize()
