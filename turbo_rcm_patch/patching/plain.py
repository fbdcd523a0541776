"""Checks of modules and calls: does a module run its class's code alone, and is a call plain
inference?

They run on every call of a block, so each is a few attribute look-ups. Where a check fails, the
author's own forward runs, which is always right.
"""

from __future__ import annotations

from types import BuiltinFunctionType, MethodType
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules.module import _has_any_global_hook
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from turbo_rcm_patch.ops.dispatch import without_data

#: The dtypes that the kernels take.
FLOATS: Final = (torch.bfloat16, torch.float16, torch.float32)

#: (class, name) -> its function that was judged last, and True if the author wrote it. Only a
#: cache: a function is judged by itself.
_judged: Final[dict[tuple[type, str], tuple[object, bool]]] = {}
#: Why the original forward runs where a gradient may be wanted.
GRADIENT: Final = "a gradient may be wanted (inference runs under torch.no_grad)"
#: What calling a module runs.
_CALL: Final = nn.Module.__call__
#: Packages whose modules and hooks keep nothing from one call for the next.
_STATELESS: Final = {
    *("torch", "diffusers", "accelerate", "peft", "turbo_rcm_patch", "bitsandbytes", "optimum"),
    *("torchao", "SLA", "ops"),  # the last two are TurboDiffusion's
}
#: Hooks of diffusers that move or cast weights.
_MOVES_WEIGHTS: Final = {
    *("group_offloading", "layer_execution_tracker", "lazy_prefetch_group_offloading"),
    *("layerwise_casting", "peft_autocast_disable"),
}
#: The functions of torch that `replaced_functions` found to be torch's own.
_own_functions: tuple[object, ...] = ()


class Replacement:
    """Base of the objects whose bound methods replace functions of a module.

    A compiler and `torch.export` take a bound method for a function, and a callable object not.
    """


def original_class(module: Any) -> type[nn.Module]:
    """Return the class in which a module's author wrote its forward.

    `fully_shard` replaces a module's class by a subclass of its own mixin and the original class.
    """
    cls: type[nn.Module] = type(module)
    mixin = cls.__bases__[0]
    sharded = mixin.__name__ == "FSDPModule" and mixin.__module__.startswith("torch.distributed")
    return cls.__bases__[1] if sharded and len(cls.__bases__) == 2 else cls


def original_forward(module: Any) -> Any:
    """Return the forward that a module's author wrote, to be called with the module.

    A compiler cannot read it from a class that is allowed in its graphs, so it gets the one that
    was judged last.
    """
    cls = original_class(module)
    judged = _judged.get((cls, "forward")) if compiling() else None
    return cls.forward if judged is None else judged[0]


def judge_classes(model: nn.Module) -> None:
    """Judge the functions of the classes of a model's modules, which a compiler cannot do."""
    for module in model.modules():
        for name in ("forward", "gelu"):
            if hasattr(type(module), name):
                own_function(type(module), name)
        processor = module.__dict__.get("processor")
        if processor is not None:
            own_function(type(processor), "__call__")


def own_function(cls: type, name: str) -> bool:
    """Return True if a function of a class is its author's.

    The author wrote it where the class, or the base that has it, is defined. Another function was
    put there by other code, before or after patching.
    """
    now = getattr(cls, name)
    found, own = _judged.get((cls, name), (None, True))
    if found is now:
        return own
    if compiling():
        return found is None
    owner = next((base for base in cls.__mro__ if name in vars(base)), None)
    own = owner is None or wrote(owner.__module__, name, vars(owner)[name])
    _judged[cls, name] = now, own
    return own


def wrote(file: str, name: str, function: Any) -> bool:
    """Return True if a function was defined under this name in a module, or in a package."""
    code, there = getattr(function, "__code__", None), getattr(function, "__globals__", {})
    home = str(there.get("__name__"))
    inner, package = getattr(function, "__wrapped__", None), home.partition(".")[0]
    if inner is not None and package in ("torch", file.partition(".")[0]):
        return wrote(file, name, inner)  # a decorator of torch or of the author
    return file in (home, package) and (code is None or code.co_name == name)


def replaced_functions() -> list[str]:
    """Return the names of functions of torch that other code replaced, among those that the
    authors' modules call and the fast path replaces."""
    global _own_functions
    now = F.gelu, F.layer_norm, F.linear, F.rms_norm
    if now == _own_functions:  # every block asks
        return []
    named = zip(("gelu", "layer_norm", "linear", "rms_norm"), now, strict=True)
    replaced = [name for name, function in named if not torchs_own(function, name)]
    _own_functions = () if replaced else now
    return replaced


def torchs_own(function: Any, name: str) -> bool:
    """Return True if a function of `torch.nn.functional` is torch's."""
    builtin = type(function) is BuiltinFunctionType and function.__name__ == name
    return builtin or getattr(function, "__globals__", None) is vars(F)


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


def owner(function: Any) -> Any:
    """Return the object that a bound method belongs to, or None.

    torch 2.11 traces `getattr(method, "__self__", None)` as None.
    """
    return function.__self__ if type(function) is MethodType else None


def replaced_by(module: nn.Module) -> type | None:
    """Return the class of the replacement that is installed as a module's forward, or None."""
    replacement = owner(installed(module))
    return type(replacement) if isinstance(replacement, Replacement) else None


def hooked(module: nn.Module) -> bool:
    """Return True if a module has torch hooks."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def runs_only_its_forward(module: nn.Module) -> bool:
    """Return True if calling a module runs its class's forward and no other code."""
    if "forward" in module.__dict__ and not is_own(module, "forward", installed(module)):
        return False
    cls = type(module)
    if hooked(module) or cls.__call__ is not _CALL:
        return False
    judged, own = _judged.get((cls, "forward"), (None, True))  # `own_function`, without a call
    return own if judged is cls.forward else own_function(cls, "forward")


def hook_names(module: nn.Module) -> str:
    """Name what else a module runs than its class's forward, for the report."""
    registry = module.__dict__.get("_diffusers_hook")
    names = list(getattr(registry, "_hook_order", []))
    if "_hf_hook" in module.__dict__:
        names.append(type(module.__dict__["_hf_hook"]).__name__)
    own = own_function(type(module), "forward")
    replaced = not own or ("forward" in module.__dict__ and replaced_by(module) is None)
    return ", ".join(names) or ("a replaced forward" if replaced else "torch hooks")


def stateful_code(block: nn.Module) -> str:
    """Return what inside a block may keep something from call to call, or "".

    That is a hook, a replaced forward, a module of a package that is not known, or an active
    dropout. Hooks that move or cast weights, and what is around the block, do not count.
    """
    known = _STATELESS | {root_package(type(block))}
    for name, module in block.named_modules():
        held = vars(module)
        code = [type(module)]
        if name:
            code += [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
            if not is_own(module, "forward", held.get("forward")):
                code.append(held.get("forward", nn.Module))
            hook = held.get("_hf_hook")
            code += [type(one) for one in getattr(hook, "hooks", (hook,)) if one is not None]
            hooks = getattr(held.get("_diffusers_hook"), "hooks", {})
            if not hooks.keys() <= _MOVES_WEIGHTS or any(
                root_package(x) not in known for x in code
            ):
                return f"{name} has {hook_names(module)}"
        if root_package(code[0]) not in known:
            return f"{name} is a {type(module).__qualname__}"
        if drops(module):
            return f"{name} draws random numbers"
    return ""


def root_package(code: Any) -> str:
    """Return the package in which a function, a class or the class of a callable is defined."""
    code = getattr(code, "func", code)  # of a partial
    code = getattr(code, "__func__", code)  # of a method
    file: Any = getattr(code, "__globals__", {}).get("__name__") or getattr(
        code if isinstance(code, type) else type(code), "__module__", ""
    )
    return str(file).partition(".")[0]


def plain_linear(module: nn.Module, x: Tensor) -> bool:
    """Return True if `module(x)` is exactly x @ weight.T + bias with a weight that can be read.

    Args:
        module: Any module.
        x: Its input; the result is False if its dtype or device is not the weight's.
    """
    if type(module) is not nn.Linear or not runs_only_its_forward(module):
        return False
    if not isinstance(x, Tensor):  # int8 rows, if the model was unpatched meanwhile
        return False
    weight = module.weight
    # A quantised or sharded weight is a subclass of Tensor, and so is its Parameter.
    return type(weight) is nn.Parameter and weight.dtype == x.dtype and weight.device == x.device


def kernel_can_read(*tensors: Tensor | None, device: torch.device) -> bool:
    """Return True if a kernel on the device can read all of the tensors."""
    plain = (nn.Parameter, Tensor)
    return all([x is None or (type(x) in plain and x.device == device) for x in tensors])


def drops(module: nn.Module) -> bool:
    """Return True if a Dropout is active now."""
    return module.training and float(getattr(module, "p", 0.0)) > 0.0


def capturing(x: Tensor) -> bool:
    """Return True while a CUDA graph is captured, when nothing may wait for the device."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def casts_itself(device: torch.device) -> bool:
    """Return True if autocast is on for a device. The meta device has none, and torch raises."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


#: Return True while torch.compile traces. All of `patching` asks here.
compiling = torch.compiler.is_compiling


def why_not_inference(block: nn.Module, x: Tensor, inputs: tuple[Any, ...]) -> str:
    """Return why the original forward has to run this call, or "" if it is plain inference.

    Args:
        block: The block.
        x: Its residual stream [B, N, C].
        inputs: All arguments of the call.
    """
    if x.dtype not in FLOATS:
        return f"the input is {x.dtype}"
    if without_data(x):
        return "the input is on the meta device"
    if casts_itself(x.device):
        return "autocast is on"
    if forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active():
        return "a transform of torch.func or forward-mode differentiation is active"
    if torch.is_grad_enabled() and any(
        [x.requires_grad for x in (*inputs, *block.parameters()) if isinstance(x, Tensor)]
    ):
        return GRADIENT
    if compiling():
        # Before torch 2.13 `torch.compiler.is_exporting()` is True in every compiled graph.
        return "the model is exported" if torch.compiler._is_exporting_flag else ""
    if not own_function(type(block), "forward"):
        return "the forward of its class was replaced"
    if _has_any_global_hook():  # type: ignore[no-untyped-call]
        return "a hook is registered for all modules"
    if replaced := replaced_functions():
        return f"torch.nn.functional.{replaced[0]} was replaced"
    modes: Any = _get_current_function_mode_stack  # of which a default device is one
    if torch._C._len_torch_function_stack() and any(
        [type(mode) is not DeviceContext for mode in modes()]
    ):
        return "a function mode is active"
    if type(x) is not Tensor:
        return f"the input is a {type(x).__name__}"
    if torch._C._len_torch_dispatch_stack() or torch._C._get_tracing_state() is not None:
        return "a dispatch mode or a tracer is active"
    return ""
