"""`linear="int8"`: give the plain Linears of a patched block an int8 forward.

The forward is an instance attribute of the Linear itself. A LoRA wraps the Linear and calls it, so
an int8 base and a 16-bit low-rank part add up. Hooks, offloading and replaced Linears need no code
here either. The int8 copy of a weight is made when it is first needed, and again when the weight
is another object or has another version, address, dtype or device. The model's own functions that
write weights drop all copies, and so does a forward with gradients.

Writes through `.data`, fused optimizers, `EMAModel.copy_to` and collectives leave the version of a
weight as it was. So every forward compares some elements of every weight with those of the forward
before, and makes the copies of changed weights again. That takes 0.3 ms, and no other sign is
safe: a scheduler's step index stays where an interrupted video left it. A write into a few
elements needs `refresh(model)`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from turbo_rcm_patch.config import Impl
from turbo_rcm_patch.ops import MAX_CHANNELS, quantize_weight
from turbo_rcm_patch.ops.dispatch import without_data
from turbo_rcm_patch.ops.formats import Int8Tensor
from turbo_rcm_patch.ops.int8_linear import api as int8_linear
from turbo_rcm_patch.ops.int8_linear.samples import Samples, layout
from turbo_rcm_patch.patching.int8_weights import Int8Linear
from turbo_rcm_patch.patching.plain import (
    FLOATS,
    Replacement,
    casts_itself,
    compiling,
    hooked,
    installed,
    original_class,
    own_function,
    owner,
)

#: A weight that has moved before this many calls in a row is offloaded. Its copy is not kept then,
#: because it would hold the memory that offloading saves.
_MOVES: Final = 3

#: Functions of a diffusers model that write or move weights without changing their versions.
WRITERS: Final = (
    "_apply",
    "fuse_lora",
    "load_lora_adapter",
    "load_state_dict",
    "unfuse_lora",
    "unload_lora",
)


class _Thread(threading.local):
    #: True to run Linears as their authors wrote them.
    wide = False


_thread: Final = _Thread()


@contextmanager
def in_16_bits() -> Iterator[None]:
    """Run the Linears that this thread calls as their authors wrote them."""
    _thread.wide = True
    try:
        yield
    finally:
        _thread.wide = False


class Int8Forward(Replacement):
    """The int8 forward of one Linear.

    Its method `run` is installed, not the object, because a compiler shares a graph among bound
    methods but not among callable objects.

    Args:
        linear: An `nn.Linear` or an `Int8Linear`.
        impl: "triton", "reference" or "auto".

    Attributes:
        linear: The module.
        impl: The implementation, as given.
        on: False runs the Linear as its author wrote it.
    """

    def __init__(self, linear: Any, impl: Impl) -> None:
        self.linear, self.impl, self.on = linear, impl, True
        self._made: tuple[Tensor, Tensor] | None = None
        self._of: tuple[Any, ...] | None = None
        self._moves = 0

    def run(self, input: Any, activation: str = "") -> Tensor:  # noqa: A002  Linear's name
        """Compute input @ weight^T + bias, and GELU if `activation` is "gelu-tanh".

        Args:
            input: [..., K], the dtype of the weight, or `Int8Tensor` of [B, N, K].
            activation: "" or "gelu-tanh".

        Returns:
            [..., Cout], dtype of the weight.
        """
        linear = self.linear
        is_rows = isinstance(input, Int8Tensor)
        if not is_rows and not self.serves(input):
            out: Tensor = type(linear).forward(linear, input)
            return F.gelu(out, approximate="tanh") if activation else out
        flat = not is_rows and input.dim() != 3
        weight, scale = self._weight()
        out = int8_linear.linear_int8(
            input.reshape(1, -1, input.shape[-1]) if flat else input,
            weight=weight, scale=scale, bias=linear._parameters["bias"], activation=activation,
            impl=self.impl, out_dtype=_dtype(linear) if is_rows else input.dtype,
        )  # fmt: skip
        return out.reshape(*input.shape[:-1], -1) if flat else out

    def serves(self, x: Tensor) -> bool:
        """Return True if the Linear runs in int8 on this input, which takes plain inference on its
        own dtype and device."""
        linear = self.linear
        held = [p for p in linear._parameters.values() if p is not None]
        return (
            self.on
            and (compiling() or not _thread.wide)
            and not torch.compiler._is_exporting_flag  # a graph that leaves is the author's
            and x.dim() >= 2
            and x.numel() > 0
            and not without_data(x)
            and holds_plainly(linear)
            and x.dtype == _dtype(linear)
            and x.dtype in FLOATS
            and not casts_itself(x.device)
            and all([p.device == x.device for p in held])
            and not (torch.is_grad_enabled() and any([p.requires_grad for p in (x, *held)]))
            and own_function(type(linear), "forward")
        )

    def _weight(self) -> tuple[Tensor, Tensor]:
        """Return int8 [Cout, K] and its scales for the present weight."""
        linear = self.linear
        if type(linear) is Int8Linear:
            held: tuple[Tensor, Tensor] = linear.int8
            return held
        weight = linear._parameters["weight"]
        if compiling():  # A graph quantises on every call, so that it sees a changed weight.
            return quantize_weight(weight, impl=self.impl)
        of = (
            weight,
            -1 if weight.is_inference() else weight._version,
            weight.data_ptr(),
            weight.dtype,
            weight.device,
        )
        before = self._of
        same = before is not None and before[0] is weight and before[1:] == of[1:]
        if self._made is not None and same:
            self._moves = 0
            return self._made
        self._moves = self._moves + 1 if self._of is not None else 0
        with torch.inference_mode(False), torch.no_grad():
            quantized = quantize_weight(weight.detach(), impl=self.impl)
        if self._moves < _MOVES:
            self._made, self._of = quantized, of
        else:
            self._made = None
        return quantized

    def forget(self) -> None:
        """Drop the int8 copy."""
        self._made = self._of = None
        self._moves = 0


def _dtype(linear: Any) -> torch.dtype:
    """Return the dtype of a Linear's input and output."""
    dtype: torch.dtype = (
        linear.dtype if type(linear) is Int8Linear else linear._parameters["weight"].dtype
    )
    return dtype


def holds_plainly(linear: nn.Module) -> bool:
    """Return True if a module is a Linear whose weight and bias are its own parameters.

    A quantised or sharded weight is a subclass of Tensor, and a normalised one no parameter.
    """
    held, cls = linear._parameters, original_class(linear)
    plain = cls is nn.Linear and type(held.get("weight")) is nn.Parameter
    return (plain or cls is Int8Linear) and "bias" in held


def int8_forward(module: Any) -> Int8Forward | None:
    """Return the int8 forward of a Linear, or None if calling it would run other code; None for
    None."""
    forward = None if module is None else owner(installed(module))
    if type(forward) is not Int8Forward or not forward.on or hooked(module):
        return None
    if not own_function(type(module), "forward"):
        return None
    return forward if holds_plainly(module) else None


def takes_rows(modules: Iterable[Any]) -> bool:
    """Return True if all of these modules run in int8 now, and so take a norm's int8 rows."""
    return all([int8_forward(module) is not None for module in modules])


def shared_rows(modules: tuple[Any, ...], x: Any) -> Any:
    """Quantise the input of several Linears once for all of them.

    Args:
        modules: Linears, or the modules that replaced them.
        x: [B, N, K], or `Int8Tensor` already.

    Returns:
        `Int8Tensor` if all of the modules run in int8 on x, else x.
    """
    impl = ""
    if isinstance(x, Int8Tensor):
        return x
    for module in modules:
        forward = int8_forward(module)
        if forward is None or x.dim() != 3 or not forward.serves(x):
            return x
        impl = forward.impl
    return int8_linear.quantize_rows(x, impl)


def why_not_int8(module: nn.Module) -> str:
    """Return why a module cannot run in int8, or ""."""
    if type(module) is Int8Linear:
        return ""
    if type(module) is not nn.Linear:
        return f"{type(module).__qualname__} keeps its own forward"
    weight = module._parameters.get("weight")
    if type(weight) is not nn.Parameter:
        kind = "is no parameter" if weight is None else f"is a {type(weight).__qualname__}"
        return f"a weight that {kind} is left as it is"
    if module.in_features > MAX_CHANNELS:
        return f"{module.in_features} channels overflow an int32 sum"
    return ""


class Int8Copies:
    """The int8 copies of a model's weights.

    Args:
        forwards: The int8 forwards of its Linears.
    """

    def __init__(self, forwards: list[Int8Forward]) -> None:
        self._forwards = forwards
        #: Where the weights lay when they were read last, and what reads them there: (device,
        #: dtype) -> the forwards of such weights, their places among all, the reader.
        self._readers: tuple[Any, dict[Any, tuple[list[Int8Forward], list[int], Samples]]]
        self._readers = None, {}
        #: (device, dtype) -> the forwards of such weights, and elements of each weight.
        self._seen: dict[Any, tuple[list[Int8Forward], Tensor]] = {}

    def forget(self) -> None:
        """Drop all copies."""
        for forward in self._forwards:
            forward.forget()

    @torch.inference_mode()
    def follow(self) -> None:
        """Drop the copies of weights that moved since the last call. This waits for the device."""
        if torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active():
            return
        forwards, weights = [], []
        for forward in self._forwards:  # hundreds, so each is a few look-ups
            weight = forward.linear._parameters.get("weight")
            if type(weight) is nn.Parameter and not without_data(weight):
                forwards.append(forward)
                weights.append(weight.data)  # stays as it is if another thread casts the model
        (known, readers), now = self._readers, (forwards, layout(weights))
        if now != known:
            readers = _readers(forwards, weights)
            self._readers = now, readers  # at once, because other threads read both
        seen, waiting = {}, []
        for key, (group, places, samples) in readers.items():
            bits = samples.read([weights[i] for i in places])
            before, values = self._seen.get(key, ([], bits))
            seen[key] = group, bits
            known_bits = before == group and not bits.is_meta
            waiting.append((group, (bits != values).any(1) if known_bits else None))
        for group, moved in waiting:
            flags = [True] * len(group) if moved is None else moved.tolist()
            for forward, flag in zip(group, flags, strict=True):
                if flag:
                    forward.forget()
        self._seen = seen  # After the copies are dropped: another thread may ask meanwhile.


def _readers(
    forwards: list[Int8Forward], weights: Sequence[Tensor]
) -> dict[Any, tuple[list[Int8Forward], list[int], Samples]]:
    """Return (device, dtype) -> the forwards of such weights, their places among all, and what
    reads elements of them."""
    groups: dict[Any, list[int]] = {}
    for i, weight in enumerate(weights):
        groups.setdefault((weight.device, weight.dtype), []).append(i)
    return {
        key: ([forwards[i] for i in at], at, Samples([weights[i] for i in at], forwards[0].impl))
        for key, at in groups.items()
    }


class DropsCopies(Replacement):
    """The replacement of a model's function that writes or moves weights: it runs the class's own,
    and then drops all int8 copies."""

    def __init__(self, model: nn.Module, name: str, copies: Int8Copies) -> None:
        self._model, self._name, self._copies = model, name, copies

    def __call__(self, *args: Any, **named: Any) -> Any:
        try:
            return getattr(type(self._model), self._name)(self._model, *args, **named)
        finally:
            self._copies.forget()
