"""Checks of modules and calls: does a module run its class's code alone, and is a call plain
inference?

They run on every call of a block, so each is a few attribute look-ups. Where a check fails, the
author's own forward runs, which is always right.
"""

from __future__ import annotations

from types import MethodType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules.module import _has_any_global_hook

#: The dtypes that the kernels take.
FLOATS: Final = (torch.bfloat16, torch.float16, torch.float32)

#: (class, name) -> the function that the class had when a model was patched.
_known: Final[dict[tuple[type, str], object]] = {}


class Replacement:
    """Base of the objects whose bound methods replace functions of a module.

    A compiler and `torch.export` take a bound method for a function, and a callable object not.
    """

    __slots__ = ()


def author_class(module: Any) -> type[nn.Module]:
    """Return the class in which a module's author wrote its forward.

    `fully_shard` replaces a module's class by a subclass of its own mixin and the original class.
    """
    cls: type[nn.Module] = type(module)
    mixin = cls.__bases__[0]
    sharded = mixin.__name__ == "FSDPModule" and mixin.__module__.startswith("torch.distributed")
    return cls.__bases__[1] if sharded and len(cls.__bases__) == 2 else cls


def note_classes(model: nn.Module) -> None:
    """Record the functions of the classes of a model's modules and processors.

    `class_replaced` compares with them.
    """
    for module in model.modules():
        _known.setdefault((type(module), "forward"), type(module).forward)
        processor = module.__dict__.get("processor")
        if processor is not None:
            _known.setdefault((type(processor), "__call__"), type(processor).__call__)


def class_replaced(one: object, name: str = "forward") -> bool:
    """Return True if other code replaced a function of an object's class.

    A replacement after patching is always found. One before patching is found if its function
    comes from another file.
    """
    cls = type(one)
    now = getattr(cls, name)
    return _known.get((cls, name), now) is not now


def own_function(cls: type, name: str) -> bool:
    """Return True if a function of a class was defined in the file of that class or of a base."""
    owner = next((base for base in cls.__mro__ if name in vars(base)), None)
    if owner is None:
        return True
    function = vars(owner)[name]
    while hasattr(function, "__wrapped__") and _package(function) == "torch":
        function = function.__wrapped__  # a decorator of torch, such as no_grad
    return _package(function) in ("", owner.__module__.partition(".")[0])


def _package(function: Any) -> str:
    name: str = getattr(function, "__globals__", {}).get("__name__", "")
    return name.partition(".")[0]


def is_own(module: nn.Module, name: str, value: object) -> bool:
    """Return True if an instance attribute is the class's own bound method.

    diffusers leaves it there when its last hook is removed.
    """
    return (
        isinstance(value, MethodType)
        and value.__self__ is module
        and value.__func__ is getattr(type(module), name)
    )


def installed(module: nn.Module) -> Any:
    """Return the forward of a module's instance, or None.

    A hook of accelerate that only moves inputs to the module's device is looked through.
    """
    hook: Any = module.__dict__.get("_hf_hook")
    forward = module.__dict__.get("forward")
    if type(hook).__name__ != "AlignDevicesHook":
        return forward
    loads = hook.offload and (hook.place_submodules or [*module.parameters(recurse=False)])
    theirs = getattr(getattr(forward, "func", None), "__module__", "") == "accelerate.hooks"
    return module.__dict__.get("_old_forward") if theirs and not loads else forward


def replaced_by(module: nn.Module) -> type | None:
    """Return the class of the replacement that is installed as a module's forward, or None."""
    owner = getattr(installed(module), "__self__", None)
    return type(owner) if isinstance(owner, Replacement) else None


def hooked(module: nn.Module) -> bool:
    """Return True if a module has torch hooks."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def bare(module: nn.Module) -> bool:
    """Return True if calling a module runs its class's forward and no other code."""
    if "forward" in module.__dict__ and not is_own(module, "forward", installed(module)):
        return False
    if (  # `hooked`, without a call: a block asks this of a dozen modules
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    ):
        return False
    cls = type(module)
    return _known.get((cls, "forward"), cls.forward) is cls.forward


def hook_names(module: nn.Module) -> str:
    """Name the hooks and replacements of a module that is not bare, for the report."""
    registry = module.__dict__.get("_diffusers_hook")
    names = list(getattr(registry, "_hook_order", []))
    if "_hf_hook" in module.__dict__:
        names.append(type(module.__dict__["_hf_hook"]).__name__)
    replaced = class_replaced(module) or "forward" in module.__dict__
    return ", ".join(names) or ("a replaced forward" if replaced else "torch hooks")


def plain_linear(module: nn.Module, x: Tensor) -> bool:
    """Return True if `module(x)` is exactly x @ weight.T + bias with a weight that can be read.

    Args:
        module: Any module.
        x: Its input; the result is False if its dtype or device is not the weight's.
    """
    if type(module) is not nn.Linear or not bare(module):
        return False
    weight = module.weight
    # A quantised or sharded weight is a subclass of Tensor, and so is its Parameter.
    return type(weight) is nn.Parameter and weight.dtype == x.dtype and weight.device == x.device


def readable(*tensors: Tensor | None, device: torch.device) -> bool:
    """Return True if a kernel on the device can read all of the tensors."""
    plain = (nn.Parameter, Tensor)
    return all([x is None or (type(x) in plain and x.device == device) for x in tensors])


def drops(module: nn.Module) -> bool:
    """Return True if a Dropout is active now."""
    return module.training and float(getattr(module, "p", 0.0)) > 0.0


#: Return True while torch.compile traces. All of `patching` asks here.
compiling = torch.compiler.is_compiling


def why_not_inference(block: nn.Module, x: Tensor, inputs: tuple[Any, ...]) -> str:
    """Return why the author's forward has to run this call, or "" if it is plain inference.

    Args:
        block: The block.
        x: Its residual stream [B, N, C].
        inputs: All arguments of the call.
    """
    if x.dtype not in FLOATS:
        return f"the input is {x.dtype}"
    if x.is_meta:
        return "the input is on the meta device"
    if torch.is_autocast_enabled(x.device.type):
        return "autocast is on"
    if forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active():
        return "a transform of torch.func or forward-mode differentiation is active"
    if torch.is_grad_enabled() and any(
        [x.requires_grad for x in (*inputs, *block.parameters()) if isinstance(x, Tensor)]
    ):
        return "a gradient may be wanted (inference runs under torch.no_grad)"
    if compiling():
        # Before torch 2.13 `torch.compiler.is_exporting()` is True in every compiled graph.
        return "the model is exported" if torch.compiler._is_exporting_flag else ""
    if class_replaced(block):
        return "the forward of its class was replaced"
    if _has_any_global_hook():  # type: ignore[no-untyped-call]
        return "a hook is registered for all modules"
    if type(x) is not Tensor:
        return f"the input is a {type(x).__name__}"
    if torch._C._len_torch_dispatch_stack() or torch._C._get_tracing_state() is not None:
        return "a dispatch mode or a tracer is active"
    return ""
