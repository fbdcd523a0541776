"""Load a transformer with int8 weights alone, without making the weights that they stand for.

Two kinds of folder have them: one that `convert` wrote from a `-quant` checkpoint, with the stock
weights beside the extra file, and one without stock weights, whose tensors are the state dict of
the model with its `Int8Linear`s. The second one's config.json names a quantisation that diffusers
does not know, so that stock classes refuse it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from turbo_rcm_patch.checkpoints.extra_file import (
    EXTRA_FILE,
    WEIGHTS,
    StoredTensors,
    read_config,
    weight_files,
)
from turbo_rcm_patch.checkpoints.folder import check_product, stored_int8
from turbo_rcm_patch.checkpoints.read import Wanted, check_tensors
from turbo_rcm_patch.errors import CheckpointError
from turbo_rcm_patch.extras import require
from turbo_rcm_patch.patching.int8_weights import (
    INT8_MARK,
    SCALE,
    WEIGHT,
    Int8Linear,
    mark_int8_only,
)


def is_int8_only(folder: Path) -> bool:
    """Return True if a transformer folder has int8 weights and no others for the same Linears."""
    return bool(read_config(folder).get("quantization_config") == INT8_MARK)


def holds_int8(folder: Path) -> bool:
    """Return True if a transformer folder has int8 weights that `load_int8_only` reads."""
    if is_int8_only(folder):
        return True
    extra = folder / EXTRA_FILE
    found = StoredTensors(extra).listing if extra.is_file() else ()
    return any(key.endswith(f".{WEIGHT}") for key in found)


def load_int8_only(folder: str | Path, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Load a transformer that keeps only int8 weights of the Linears that have them.

    A stock weight beside them is compared with them, Linear by Linear, and not kept. SLA's
    `proj_l` are not attached; `load_extra(transformer, folder, int8=False)` does.

    Args:
        folder: The transformer folder.
        dtype: dtype of all other weights but those that diffusers keeps in fp32, and of the
            products where an int8 Linear is called.

    Returns:
        A transformer of diffusers, on the CPU, in evaluation mode.

    Raises:
        CheckpointError: The folder has no int8 weights, cannot be read, or its stock weights are
            not the products of its int8 weights.
        CheckpointKeysError: Tensors are missing or unexpected.
    """
    require("diffusers", "load_int8_only", "diffusers")
    require("video", "load_int8_only", "accelerate")
    import diffusers
    from accelerate import init_empty_weights

    place = Path(folder)
    config = read_config(place)
    cls = getattr(diffusers, str(config.get("_class_name")), None)
    if cls is None or not holds_int8(place):
        what = f"{place} has no int8 weights of a transformer"
        expected = "a folder that `convert` wrote from a -quant checkpoint, or that was saved "
        raise CheckpointError(what, expected=expected + "from a model with int8 weights alone")
    with init_empty_weights():
        network = cls.from_config(config)
    files = [path for path in (*weight_files(place), place / EXTRA_FILE) if path.is_file()]
    stored = StoredTensors(*files)
    tensors: dict[str, Tensor] = {}
    modules = dict(network.named_modules())
    for name in [key.removesuffix(f".{WEIGHT}") for key in stored.listing if key.endswith(WEIGHT)]:
        linear: Any = modules.get(name)
        product = f"{name}.weight"
        int8 = stored_int8(str(place), name, linear, stored, by_row=product not in stored)
        if product in stored:
            check_product(f"{place}: {product}", stored[product], *int8)
        made = Int8Linear.in_place_of(linear, *int8)
        made.dtype = dtype
        network.set_submodule(name, made)
        tensors |= {f"{name}.{part}": made.get_parameter(part) for part in (WEIGHT, SCALE)}
    kept = set(network._keep_in_fp32_modules or ())
    for name in network.state_dict():
        if name in tensors or name not in stored:
            continue
        wide = not kept.isdisjoint(name.split("."))
        tensor = stored[name]
        as_stored = not tensor.is_floating_point()
        tensors[name] = tensor if as_stored else tensor.to(torch.float32 if wide else dtype)
    _check(place, network, tensors, stored)
    network.load_state_dict(tensors, assign=True)
    network.register_to_config(_name_or_path=str(place))
    mark_int8_only(network)
    return network.eval()


def _check(
    place: Path, network: nn.Module, tensors: Mapping[str, Tensor], stored: StoredTensors
) -> None:
    state = network.state_dict()
    wanted = {
        name: Wanted((tuple(t.shape),), None if t.is_floating_point() else t.dtype)
        for name, t in state.items()
    }
    # Stock weights of int8 Linears may be there, and SLA's among the weights.
    stock = {f"{n.removesuffix(WEIGHT)}weight" for n in state if n.endswith(f".{WEIGHT}")}
    others = [name for name in stored.listing if name not in stock]
    found = {name: stored.listing[name] for name in others if ".attn1.proj_l." not in name}
    of = f"one {type(network).__name__} ({INT8_MARK['quant_method']})"
    check_tensors(f"{place}/{WEIGHTS}", wanted, {**found, **tensors}, of)
