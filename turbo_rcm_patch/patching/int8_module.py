"""A Linear that has its weight only in int8.

It replaces an `nn.Linear` whose original weight is dropped (`linear="int8-only"`), or whose
checkpoint never had one. A call multiplies with int8 times scale, rounded once to its dtype. That
product is its weight: the author's code, the guard and any reader of `weight` see it. A patched
model reads the integers instead.

The int8 weight and its scales are parameters, so they move and are offloaded as a weight is. They
have other names than `weight`, so that loading code does not mistake them for one. Scales are kept
as the bits of fp32, because `.to(torch.bfloat16)` would round floats.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from turbo_rcm_patch.errors import DroppedWeightError
from turbo_rcm_patch.ops.int8_linear import dequantized

#: Names of the parameters.
WEIGHT: Final = "weight_int8"
SCALE: Final = "weight_scale_bits"
#: Attributes that hooks of diffusers and accelerate leave on a Linear; they refer to the Linear.
HOOK_LEFTOVERS: Final = ("forward", "_diffusers_hook")
#: Attributes of every Linear; the user put any others on an instance.
_STOCK: Final = frozenset({*vars(nn.Linear(1, 1)), *HOOK_LEFTOVERS})
#: Names of functions that write into a tensor, beside those that end in "_".
_WRITES: Final = {
    *("__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__"),
    *("__ipow__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__"),
    *("__imatmul__", "__setitem__", "__set__"),
}
#: Functions whose result has the same values as their argument.
_VIEWS: Final = frozenset({"__get__", "__getitem__", "detach", "view", "t", "transpose"})


class _ReadOnly(Tensor):
    """A weight that was computed for one reader. It refuses writes, which would be lost."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        writes = name in _WRITES or (name.endswith("_") and not name.endswith("__"))
        named = kwargs or {}
        written = [*args[:1], *named.values()] if writes else [named.get("out")]
        if any(isinstance(one, cls) for one in written) and name != "requires_grad_":
            raise DroppedWeightError(
                f"{name} of the weight of an Int8Linear",
                expected="a Linear with a weight to write into",
                got="one with int8 alone",
                remedy="Fuse adapters before the weights are dropped, or keep the adapter beside "
                "the Linear, which is called with it",
            )
        with torch._C.DisableTorchFunctionSubclass():
            made = func(*args, **named)
        if name in _VIEWS and isinstance(made, Tensor) and not isinstance(made, cls):
            return made.as_subclass(cls)
        return made


class Int8Linear(nn.Linear):
    """x @ (int8 * scale)^T + bias.

    Args:
        int8: int8 [Cout, K].
        scale: fp32 [Cout], [Cout, ceil(K / 128)] or [ceil(Cout / 128), ceil(K / 128)].
        bias: [Cout] or None.
        dtype: dtype of weight, input and output.

    Attributes:
        dtype: dtype of weight, input and output; `.to` changes it.
    """

    dtype: torch.dtype

    def __init__(
        self, int8: Tensor, scale: Tensor, bias: nn.Parameter | None, dtype: torch.dtype
    ) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = int8.shape
        self.dtype = dtype
        bits = scale.detach().float().contiguous().view(torch.int32)
        self.register_parameter(WEIGHT, nn.Parameter(int8.detach(), requires_grad=False))
        self.register_parameter(SCALE, nn.Parameter(bits, requires_grad=False))
        self.register_parameter("bias", bias)

    @classmethod
    def in_place_of(cls, linear: nn.Linear, int8: Tensor, scale: Tensor) -> Int8Linear:
        """Make one with a Linear's bias, dtype and mode, and the attributes its user added."""
        bias: Any = linear._parameters.get("bias")
        made = cls(int8, scale, bias, linear.weight.dtype)
        made.training = linear.training
        own = {name: value for name, value in vars(linear).items() if name not in _STOCK}
        made.__dict__.update(own)
        return made

    @property
    def int8(self) -> tuple[Tensor, Tensor]:
        """Return int8 [Cout, K] and its scales, as `ops.int8_linear` takes them."""
        held = self._parameters
        weight, bits = held[WEIGHT], held[SCALE]
        assert weight is not None and bits is not None
        return weight, bits.view(torch.float32)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """int8 times scale [Cout, K], computed on each read, and read-only."""
        return dequantized(*self.int8, self.dtype).as_subclass(_ReadOnly)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  the name that callers know
        """Compute input @ weight^T + bias: input [..., K], result [..., Cout]."""
        return F.linear(input, dequantized(*self.int8, self.dtype), self.bias)

    def requires_grad_(self, requires_grad: bool = True) -> Int8Linear:
        """Refuse gradients of int8 weights; False is what they have."""
        RefusesGradients(self)(requires_grad)
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Int8Linear:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        device = self.int8[0].device
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=device)).dtype
        return self

    def extra_repr(self) -> str:
        """Return the text that a Linear shows."""
        return f"{super().extra_repr()}, dtype={self.dtype}"


class RefusesGradients:
    """The `requires_grad_` of a module with int8 weights alone.

    It holds the module weakly, so that the module goes with its last reference.

    Args:
        module: The module.
    """

    __slots__ = ("_module",)

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    def __reduce__(self) -> tuple[type[RefusesGradients], tuple[nn.Module | None]]:
        return RefusesGradients, (self._module(),)  # A copied module gets its own.

    def __call__(self, requires_grad: bool = True) -> nn.Module:
        """Switch gradients off.

        Raises:
            DroppedWeightError: They are to be switched on. Nothing has changed.
        """
        module = self._module()
        assert module is not None
        if requires_grad:
            raise DroppedWeightError(
                f"requires_grad_(True) on a {type(module).__qualname__}",
                expected="weights in a float dtype",
                got="Linears with int8 weights alone, which take no gradient",
                remedy="Train an adapter beside them (model.add_adapter), or load the model with "
                "its weights",
            )
        return nn.Module.requires_grad_(module, False)


def weight_dtype(linear: Any) -> torch.dtype:
    """Return the dtype of a Linear's weight, without making the weight of an `Int8Linear`."""
    found = linear.dtype if type(linear) is Int8Linear else linear.weight.dtype
    assert isinstance(found, torch.dtype)
    return found
