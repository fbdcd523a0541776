"""Is this module exactly what its class says? Only then may its weights be read instead of calling
it.

LoRA replaces a Linear by another class, quantisation replaces its weight, offloading and casting
hook its forward. All of that works when the module is called and silently breaks when its weight
is read, so the questions here are asked at run time, on every forward, and are cheap: attribute
look-ups that a compiler can guard on. What other code may replace on a class is looked at once a
forward of the model.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import MethodType
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from turbo_rcm_patch.ops.modes import transformed
from turbo_rcm_patch.patching.int8_linear import Int8Linear

#: What the kernels take.
_FLOATS: Final = (torch.bfloat16, torch.float16, torch.float32)


#: Classes of modules and processors whose function (forward, __call__) is not their author's now:
#: other code replaced it for all instances. Another tuple whenever that changes.
replaced: tuple[type, ...] = ()
#: What the classes that blocks consist of ran when they were last looked at.
_forwards: Final[dict[Any, object]] = {}
_calls: Final[dict[Any, object]] = {}


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


def note_classes_of(model: nn.Module) -> None:
    """Have `look_at_classes` look at the classes of a model's modules and processors, too."""
    modules = list(model.modules())
    held = [_author_class(m.__dict__["processor"]) for m in modules if "processor" in m.__dict__]
    _note(map(type, modules), _forwards)
    _note((cls for cls in held if any("__call__" in vars(base) for base in cls.__mro__)), _calls)


def look_at_classes() -> None:
    """Find out whether somebody replaced a function of a class, or put one back, since the last
    forward; see `replaced`."""
    # No calls, because every forward asks; copies, because another thread may patch a model.
    for cls in [*_forwards]:
        if cls.forward is not _forwards[cls]:
            return _note(list(_forwards), _forwards)
    for cls in [*_calls]:
        if cls.__call__ is not _calls[cls]:
            return _note(list(_calls), _calls)
    return None


def _note(classes: Iterable[Any], functions: dict[Any, object]) -> None:
    global replaced
    name, found = "forward" if functions is _forwards else "__call__", list(replaced)
    for cls in dict.fromkeys(classes):
        functions[cls] = getattr(cls, name)
        theirs = written_by_its_author(cls, name)
        if theirs and cls in found:
            found.remove(cls)
        elif not theirs and cls not in found:
            found.append(cls)
    if found != list(replaced):
        replaced = tuple(found)


def class_replaced(one: object) -> bool:
    """Whether somebody replaced what an object's class runs."""
    return bool(replaced) and _author_class(one) in replaced


def _author_class(one: object) -> type:
    # That of a processor whose sequence is split stands for its author's.
    cls: type = getattr(type(one), "author_class", type(one))
    return cls


def written_by_its_author(cls: type, name: str = "forward") -> bool:
    """Whether the function that a class runs is the one in its file, and not one that other code
    put in its place, which may look like it (`functools.wraps`)."""
    owner = next((base for base in cls.__mro__ if name in vars(base)), None)
    if owner is None:
        return True
    function = vars(owner)[name]
    if getattr(function, "__module__", None) != owner.__module__:
        return False
    while _package(function) == "torch" and hasattr(function, "__wrapped__"):
        function = function.__wrapped__  # A decorator of torch (`no_grad`) is its author's.
    return _package(function) in ("", owner.__module__.partition(".")[0])


def _package(function: Any) -> str:
    """The package whose file a function stands in; "" for one of Python itself."""
    name: str = getattr(function, "__globals__", {}).get("__name__", "")
    return name.partition(".")[0]


def bare(module: nn.Module) -> bool:
    """Whether calling the module runs what the author of its class wrote and nothing else."""
    if replaced and type(module) in replaced:  # No call: blocks ask this often.
        return False
    forward = module.__dict__.get("forward")
    if forward is not None and not is_own(module, "forward", forward):
        return False
    return not _hooked(module)


def _hooked(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def is_own(module: nn.Module, name: str, value: object) -> bool:
    """Whether an instance attribute is the bound method itself, which diffusers leaves behind when
    its last hook goes."""
    return (
        isinstance(value, MethodType)
        and value.__self__ is module
        and value.__func__ is getattr(type(module), name)
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
    for one in (module, module.__dict__.get("processor")):
        if class_replaced(one):
            cls = _author_class(one)
            runs = "forward" if cls in _forwards else "__call__"
            names.append(f"somebody replaced {cls.__qualname__}.{runs}")
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
