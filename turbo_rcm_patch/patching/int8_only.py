"""Drop the original weights of the Linears that run in int8, Linear by Linear."""

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
from turbo_rcm_patch.patching.int8_module import HOOK_LEFTOVERS, Int8Linear, RefusesGradients
from turbo_rcm_patch.patching.int8_weights import attached_int8, stands_for

_log = logging.getLogger(__name__)

#: Entry "quantization_config" of config.json where a Linear's weight is in int8 alone. diffusers
#: refuses an unknown quantisation. Without this entry it would run such a folder without weights.
INT8_MARK: Final = {"quant_method": "turbo_rcm_int8"}

#: Rows of a weight that are quantised at once; a CPU holds them in fp32 meanwhile.
_ROWS: Final = 1024


def mark_int8_only(model: nn.Module) -> None:
    """Record in a diffusers model's configuration that it has int8 weights alone, and let its
    `requires_grad_(True)` raise a `DroppedWeightError`."""
    register = getattr(model, "register_to_config", None)
    if register is not None:
        register(quantization_config=dict(INT8_MARK))
    vars(model)["requires_grad_"] = RefusesGradients(model)


def is_marked(config: Mapping[str, object]) -> bool:
    """Return True if a configuration carries the entry of `mark_int8_only`."""
    return config.get("quantization_config") == INT8_MARK


def refuse_offloaded(models: list[nn.Module]) -> None:
    """Raise an `OffloadedError` if hooks move the weights in and out for each call.

    Such hooks keep the originals, and would not find their replacements. After the originals are
    dropped a model may be offloaded.
    """
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
            for name in HOOK_LEFTOVERS:  # A cycle would keep the weight until it is collected.
                vars(linear).pop(name, None)
            del linear
        gc.collect()  # Removed hooks form cycles with the functions that they wrapped.
    finally:
        for model in models:
            if any(type(module) is Int8Linear for module in model.modules()):
                mark_int8_only(model)
        if 0 < len(linears) < count:  # Freed originals cannot be restored.
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
    """Return the int8 weight attached to a Linear, or quantise one with a scale per row."""
    # A tensor made in inference mode could not be used in a later forward outside it.
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
