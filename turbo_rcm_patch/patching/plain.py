"""Is this module exactly what its class says? Only then may its weights be read instead of calling
it.

LoRA replaces a Linear by another class, quantisation replaces its weight, offloading and casting
hook its forward. All of that works when the module is called and silently breaks when its weight
is read, so the questions here are asked at run time, on every forward, and are cheap: attribute
look-ups that a compiler can guard on.
"""

from __future__ import annotations

from types import MethodType
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from turbo_rcm_patch.ops.modes import transformed
from turbo_rcm_patch.patching.int8_linear import Int8Linear

#: What the kernels take.
_FLOATS: Final = (torch.bfloat16, torch.float16, torch.float32)


class Weights:
    """Stands for a plain Linear or norm inside an operation, which is given a module's tensors and
    not the module.

    Args:
        weight: Of a Linear [Cout, K], or of a norm.
        bias: None without one.
        eps: Of a norm.
    """

    __slots__ = ("_parameters", "eps")

    def __init__(self, weight: Tensor | None, bias: Tensor | None, eps: float = 0.0) -> None:
        #: As a module's: what reads weights reads them here.
        self._parameters = {"weight": weight, "bias": bias}
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        weight = self.weight
        assert weight is not None
        return F.linear(x, weight, self.bias)

    @property
    def weight(self) -> Tensor | None:
        return self._parameters["weight"]

    @property
    def bias(self) -> Tensor | None:
        return self._parameters["bias"]

    @property
    def in_features(self) -> int:
        weight = self.weight
        assert weight is not None
        return weight.shape[1]

    @property
    def out_features(self) -> int:
        weight = self.weight
        assert weight is not None
        return weight.shape[0]


def autocasting(x: torch.Tensor) -> bool:
    """Whether autocast picks a dtype per operation of the author's code; ours would not follow."""
    device = x.device.type
    return device != "meta" and torch.is_autocast_enabled(device)


def unserved(x: torch.Tensor) -> bool:
    """Whether a block with this input runs as written, whatever it consists of.

    Under autocast; in fp64, to which a model may be cast after it was patched; and where a
    forward-mode derivative or a transform of torch.func looks: the author's code has every
    derivative, ours is fused for the usual one.
    """
    return x.dtype not in _FLOATS or autocasting(x) or transformed()


def bare(module: nn.Module) -> bool:
    """Whether calling the module runs its class's forward and nothing else."""
    forward = module.__dict__.get("forward")
    if forward is not None and not _is_own_forward(module, forward):
        return False
    return not _hooked(module)


def _hooked(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def _is_own_forward(module: nn.Module, forward: object) -> bool:
    # diffusers leaves the bound method behind as an instance attribute when its last hook goes.
    return (
        isinstance(forward, MethodType)
        and forward.__self__ is module
        and forward.__func__ is type(module).forward
    )


def stand_in(module: nn.Module) -> Any:
    """A forward of ours that computes what the author's module does, in its place and with nothing
    around it; or None."""
    forward = module.__dict__.get("forward")
    return forward if hasattr(forward, "over") and not _hooked(module) else None


def runs_itself(module: nn.Module) -> bool:
    """Whether calling the module runs its class's forward or what stands in for it, and nothing
    else."""
    return bare(module) or stand_in(module) is not None


def hook_names(module: nn.Module) -> str:
    """What hangs on a module that is not `bare`, for a person to read."""
    registry = module.__dict__.get("_diffusers_hook")
    names = list(getattr(registry, "_hook_order", []))
    if "_hf_hook" in module.__dict__:
        names.append(type(module.__dict__["_hf_hook"]).__name__)
    if not names and "forward" in module.__dict__:
        names.append("an instance forward")
    if not names:
        names.append("torch hooks")
    return ", ".join(names)


def plain_linear(module: nn.Module | Weights, x: torch.Tensor) -> bool:
    """Whether `module(x)` is exactly `x @ weight.T + bias` with a weight that can be read now.

    Args:
        module: Any module, or what stands for a Linear.
        x: The activation it would be called with; dtype and device must be the weight's.
    """
    held: Any = module
    if type(held) is not Weights:
        if type(held) is not nn.Linear or not bare(held):
            return False
        # A quantised or sharded weight is a subclass of Tensor, and so is its Parameter.
        if type(held.weight) is not nn.Parameter:
            return False
    fits: bool = held.weight.dtype == x.dtype and held.weight.device == x.device
    return fits


def weight_is_known(module: nn.Module, x: torch.Tensor) -> bool:
    """Whether `module(x)` is exactly `x @ weight.T + bias`, with a weight that can be read now, or
    int8 in its place.

    Args:
        module: Any module.
        x: As for `plain_linear`.
    """
    if type(module) is not Int8Linear:
        return plain_linear(module, x)
    if not bare(module) or module.dtype != x.dtype:
        return False
    held = [p for p in module._parameters.values() if p is not None]
    return all(type(p) is nn.Parameter and p.device == x.device for p in held)


def plain_norm(module: nn.Module, x: torch.Tensor) -> bool:
    """Whether `module(x)` is exactly an RMSNorm of the last dimension, its weight readable."""
    if type(module) is not nn.RMSNorm or not bare(module):
        return False
    weight = module.weight
    return (
        type(weight) is nn.Parameter
        and module.eps is not None
        and len(module.normalized_shape) == 1
        and weight.dtype == x.dtype
        and weight.device == x.device
    )


def drops(module: nn.Module) -> bool:
    """Whether a Dropout would change what passes through it now."""
    return module.training and float(getattr(module, "p", 0.0)) > 0.0


def why_not_plain(module: nn.Module) -> str:
    """Why a Linear's weight may not be read, or "" if it may.

    This is for the report; `plain_linear` decides at run time. A weight on the meta device without
    an offloading hook belongs to a model without weights, which is described as it would run.
    """
    kind = type(module)
    if kind is Int8Linear and bare(module):
        return ""
    if kind is not nn.Linear and kind is not Int8Linear:
        return f"it is {kind.__module__.split('.')[0]}'s {kind.__qualname__}"
    if not bare(module):
        return f"it is hooked ({hook_names(module)})"
    weight = module.weight
    if type(weight) is not nn.Parameter:
        return f"its weight is a {type(weight).__qualname__}"
    return ""
