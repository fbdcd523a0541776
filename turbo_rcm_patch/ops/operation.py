"""An operation of torch's registry that runs its body directly where nobody needs the registry.

The registry costs some ten microseconds a call, and more with many arguments. It is needed to
compile, export, trace, differentiate or transform a call, and by whoever watches the operations of
a forward. Eager inference on plain tensors is none of that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch.autograd import forward_ad

__all__ = ["Operation", "runs_directly"]

#: Types of arguments that can neither want a gradient nor hold a tensor.
_PLAIN: Final = frozenset({type(None), bool, int, float, str, torch.dtype})


def runs_directly(args: tuple[Any, ...]) -> bool:
    """Whether a call with these arguments is eager inference on plain tensors.

    False inside a compiled or traced graph, a transform of torch.func, forward-mode AD or a
    dispatch mode, where an argument wants a gradient, and where one is a subclass of Tensor.
    """
    if (
        torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
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
        self._body = body
        self.registered = torch.library.custom_op(name, body, mutates_args=())

    def __call__(self, *args: Any) -> Any:
        if not torch.compiler.is_compiling() and runs_directly(args):
            return self._body(*args)
        return self.registered(*args)

    def register_fake(self, fake: Callable[..., Any]) -> Callable[..., Any]:
        """See `torch.library.CustomOpDef.register_fake`."""
        return self.registered.register_fake(fake)

    def register_autograd(
        self, backward: Callable[..., Any], *, setup_context: Callable[..., Any] | None = None
    ) -> None:
        """See `torch.library.CustomOpDef.register_autograd`."""
        self.registered.register_autograd(backward, setup_context=setup_context)
