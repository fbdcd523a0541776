"""Linears with int8 weights alone.

An `Int8Linear` replaces an `nn.Linear` whose original weight is dropped (`linear="int8-only"`), or
whose checkpoint never had one. A call multiplies with int8 times scale, rounded once to its dtype.
That product is its weight: the author's code, the guard and any reader of `weight` see it. A
patched model reads the integers instead. Its int8 weight and scales are parameters, so they move
and are offloaded as a weight is. They have other names than `weight`, so that loading code does
not mistake them for one.

Scales are kept as the bits of fp32, because `.to(torch.bfloat16)` would round floats.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from turbo_rcm_patch import ops
from turbo_rcm_patch.config import Impl
from turbo_rcm_patch.errors import DTypeError, OffloadedError
from turbo_rcm_patch.ops.int8_linear.api import dequantized
from turbo_rcm_patch.patching.plain import FLOATS
from turbo_rcm_patch.patching.read_only_weight import ReadOnlyWeight

#: Entry "quantization_config" of config.json where a Linear's weight is in int8 alone. diffusers
#: refuses an unknown quantisation. Without this entry it would run such a folder without weights.
INT8_MARK: Final = {"quant_method": "turbo_rcm_int8"}

#: Rows of a weight that are quantised at once; a CPU holds them in fp32 meanwhile.
_ROWS: Final = 1024
#: Names of the parameters, in a model and in every file.
WEIGHT: Final = "weight_int8"
SCALE: Final = "weight_scale_bits"


def scale_bits(scale: Tensor) -> Tensor:
    """Return the bits of scales in fp32, as int32, which no cast of a model rounds."""
    return scale.float().contiguous().view(torch.int32)


class Int8Linear(nn.Linear):
    """x @ (int8 * scale)^T + bias.

    Args:
        int8: int8 [Cout, K].
        scale: fp32 [Cout] or [ceil(Cout / 128), ceil(K / 128)].
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
        self.register_parameter(WEIGHT, nn.Parameter(int8.detach(), requires_grad=False))
        bits = scale_bits(scale.detach())
        self.register_parameter(SCALE, nn.Parameter(bits, requires_grad=False))
        self.register_parameter("bias", bias)

    @classmethod
    def in_place_of(cls, linear: nn.Linear, int8: Tensor, scale: Tensor) -> Int8Linear:
        """Make one with a Linear's bias, dtype and mode."""
        bias: Any = linear._parameters.get("bias")
        result = cls(int8, scale, bias, linear.weight.dtype)
        result.training = linear.training
        return result

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
        return dequantized(*self.int8, self.dtype).as_subclass(ReadOnlyWeight)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  the name that callers know
        """Compute input @ weight^T + bias: input [..., K], result [..., Cout]."""
        return F.linear(input, dequantized(*self.int8, self.dtype), self.bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Int8Linear:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        device = self.int8[0].device
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=device)).dtype
        return self


# --- dropping originals --------------------------------------------------------------------------


def mark_int8_only(model: nn.Module) -> None:
    """Record in a diffusers model's configuration that it has int8 weights alone."""
    register = getattr(model, "register_to_config", None)
    if register is not None:
        register(quantization_config=dict(INT8_MARK))


def _refuse_cast(models: list[nn.Module], linears: list[nn.Linear]) -> None:
    """Raise a `DTypeError` if a weight is stored in a dtype that cannot be quantised, as fp8 by
    layerwise casting."""
    names = {id(module): name for model in models for name, module in model.named_modules()}
    for linear in linears:
        if linear.weight.dtype not in FLOATS:
            raise DTypeError(
                f"{names[id(linear)]}.weight",
                expected="bfloat16, float16 or float32",
                got=str(linear.weight.dtype),
                remedy="Patch before enable_layerwise_casting: int8 is as small as fp8. "
                'linear="int8" works with it as it is',
            )


def _refuse_offloaded(models: list[nn.Module]) -> None:
    """Raise an `OffloadedError` if hooks move the weights in and out for each call.

    Such hooks keep the originals, and would not find their replacements. After the originals are
    dropped a model may be offloaded.
    """
    for model in models:
        modules = dict(model.named_modules())
        if any(type(module) is Int8Linear for module in modules.values()):
            continue
        for name, module in modules.items():
            hook: Any = vars(module).get("_hf_hook")
            each = (hook, *getattr(hook, "hooks", ()))
            kinds = [type(hook).__name__ for hook in each if getattr(hook, "offload", False)]
            registry: Any = vars(module).get("_diffusers_hook")
            kinds += [kind for kind in getattr(registry, "hooks", {}) if "offload" in kind]
            if kinds:
                raise OffloadedError(
                    f"{name or type(model).__name__}: {kinds[0]}",
                    expected="a model whose weights no hook has taken over",
                    got="one that is offloaded in parts",
                    remedy='Drop the originals first (patch_model with linear="int8-only", '
                    'keep_int8_only, or load_pipeline with int8="only"), and then enable '
                    "offloading. Offloading by whole models may come first",
                )


def drop_originals(
    models: list[nn.Module],
    linears: list[nn.Linear],
    impl: Impl,
    device: torch.device | str | None = None,
) -> int:
    """Replace each Linear by an `Int8Linear`.

    If this stops half way (no memory, Ctrl-C), replaced Linears stay replaced, and the model is
    marked and runs.

    Args:
        models: The models that hold the Linears.
        linears: Plain Linears. The list is emptied, so that each original can be freed.
        impl: "triton", "reference" or "auto".
        device: As for `keep_int8_only`.

    Returns:
        The number of Linears that were replaced.

    Raises:
        OffloadedError: A hook offloads a model in parts. Nothing has changed.
        DTypeError: A weight cannot be quantised. Nothing has changed.
    """
    _refuse_offloaded(models)
    _refuse_cast(models, linears)
    count = len(linears)
    places: dict[int, list[tuple[dict[str, Any], str]]] = defaultdict(list)
    for children in [module._modules for model in models for module in model.modules()]:
        for name in children:
            places[id(children[name])].append((children, name))
    try:
        while linears:
            linear = linears.pop()
            replacement = Int8Linear.in_place_of(linear, *_quantized(linear, impl, device))
            for children, name in places[id(linear)]:
                children[name] = replacement
            for name in ("forward", "_diffusers_hook"):  # Hooks leave cycles that keep the weight.
                vars(linear).pop(name, None)
            del linear
        gc.collect()  # Removed hooks form cycles with the functions that they wrapped.
    finally:
        for model in models:
            if any(type(module) is Int8Linear for module in model.modules()):
                mark_int8_only(model)
    return count


@torch.no_grad()
def _quantized(
    linear: nn.Linear, impl: Impl, device: torch.device | str | None
) -> tuple[Tensor, Tensor]:
    """Quantise the weight of a Linear, with a scale per row."""
    # A tensor made in inference mode could not be used in a later forward outside it.
    with torch.inference_mode(False):
        weight = linear.weight.detach()
        int8 = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
        scale = torch.empty(weight.shape[0], dtype=torch.float32, device=weight.device)
        for start in range(0, weight.shape[0], _ROWS):
            rows = slice(start, start + _ROWS)
            part = weight[rows] if device is None else weight[rows].to(device)
            int8[rows], scale[rows] = ops.quantize_weight(part, impl=impl)
        return int8, scale
