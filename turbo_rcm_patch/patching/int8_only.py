"""Drop the originals of the Linears that run in int8, Linear by Linear."""

from __future__ import annotations

import gc
import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from turbo_rcm_patch import ops
from turbo_rcm_patch.config import Impl
from turbo_rcm_patch.errors import OffloadedError
from turbo_rcm_patch.patching.int8_module import LEFT_BEHIND, Int8Linear, RefusesGradients
from turbo_rcm_patch.patching.int8_weights import attached_int8, stands_for

_log = logging.getLogger(__name__)

#: Entry "quantization_config" of config.json where a Linear's weight is in int8 alone. diffusers
#: refuses a quantisation that it does not know, and would else run such a folder without weights.
INT8_MARK: Final = {"quant_method": "turbo_rcm_int8"}

#: Rows of a weight that are quantised at once: a CPU needs them in fp32.
_ROWS: Final = 1024


def mark_int8_only(model: nn.Module) -> None:
    """Say in a diffusers model's configuration that it has int8 weights alone, and let its
    `requires_grad_(True)` raise a `DroppedWeightError`."""
    register = getattr(model, "register_to_config", None)
    if register is not None:
        register(quantization_config=dict(INT8_MARK))
    vars(model)["requires_grad_"] = RefusesGradients(model)


def is_marked(config: Mapping[str, object]) -> bool:
    """Whether a configuration says so."""
    return config.get("quantization_config") == INT8_MARK


def refuse_offloaded(models: list[nn.Module]) -> None:
    """Raise an `OffloadedError` if hooks bring the weights and take them away: they keep the
    originals, and would not find what replaces them. A model without originals may be
    offloaded."""
    for model in models:
        modules = dict(model.named_modules())
        if any(type(module) is Int8Linear for module in modules.values()):
            continue
        for name, module in modules.items():
            kind = next(_offloading(module), "")
            if kind:
                raise OffloadedError(
                    f"{name or type(model).__name__}: {kind}",
                    expected="a model whose weights no hook has taken over",
                    got="one that is offloaded in parts",
                    remedy='Drop the originals first (patch_model with linear="int8-only", '
                    'keep_int8_only, or load_pipeline with int8="only"), and then enable '
                    "offloading. Offloading by whole models may come first",
                )


def _offloading(module: nn.Module) -> Iterator[str]:
    hook: Any = module.__dict__.get("_hf_hook")
    for one in (hook, *getattr(hook, "hooks", ())):
        if getattr(one, "offload", False):
            yield type(one).__name__
    registry: Any = module.__dict__.get("_diffusers_hook")
    yield from (name for name in getattr(registry, "hooks", {}) if "offload" in name)


def drop_originals(
    models: list[nn.Module],
    linears: list[nn.Linear],
    impl: Impl,
    device: torch.device | str | None = None,
) -> int:
    """Put an `Int8Linear` in the place of each Linear. If that stops half way (no memory, Ctrl-C),
    those that were replaced stay so, and the model is marked and complete.

    Args:
        models: What holds them.
        linears: Plain; it is emptied, so that each original can go.
        impl: "triton", "reference" or "auto".
        device: As for `keep_int8_only`.

    Returns:
        How many.
    """
    count = len(linears)
    places: dict[int, list[tuple[dict[str, Any], str]]] = defaultdict(list)
    wanted = {id(linear) for linear in linears}
    # A module may be in several models.
    held = {id(module): module._modules for model in models for module in model.modules()}
    for children in held.values():
        for name, child_id in [(name, id(child)) for name, child in children.items()]:
            if child_id in wanted:
                places[child_id].append((children, name))
    linears.reverse()
    try:
        while linears:
            linear = linears[-1]
            made = Int8Linear.in_place_of(linear, *_quantized(linear, impl, device))
            for children, name in places[id(linears.pop())]:
                children[name] = made
            for name in LEFT_BEHIND:  # A cycle would keep the weight until one is looked for.
                vars(linear).pop(name, None)
            del linear
        gc.collect()  # Hooks that others have removed are in cycles with what they wrapped.
    finally:
        for model in models:
            if any(type(module) is Int8Linear for module in model.modules()):
                mark_int8_only(model)
        if 0 < len(linears) < count:  # What was freed cannot be brought back.
            _log.warning(
                "Stopped half way: %d of %d Linears have int8 weights alone, the others have "
                'their own. The model runs. Patch it with linear="int8-only" again to go on, or '
                "load it again",
                count - len(linears),
                count,
            )
    return count


@torch.no_grad()
def _quantized(
    linear: nn.Linear, impl: Impl, device: torch.device | str | None
) -> tuple[Tensor, Tensor]:
    """The int8 weight that came with a Linear, or one with a scale per row."""
    # Later forwards may be of other modes.
    with torch.inference_mode(False):
        brought = attached_int8(linear)
        if brought is not None and stands_for(linear.weight, *brought):
            return brought
        weight = linear.weight.detach()
        int8 = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
        scale = torch.empty(weight.shape[0], dtype=torch.float32, device=weight.device)
        for start in range(0, weight.shape[0], _ROWS):
            rows = slice(start, start + _ROWS)
            part = weight[rows] if device is None else weight[rows].to(device)
            int8[rows], scale[rows] = ops.quantize_weight(part, impl=impl)
        return int8, scale
