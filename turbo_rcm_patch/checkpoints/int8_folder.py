"""Load a folder whose Linears have int8 weights alone, without making their products.

Its tensors are the state dict of the model with its `Int8Linear`s. `convert --int8-only` writes
such a folder, and `save_pretrained` of a model with int8 weights alone. Its config.json names a
quantisation that diffusers does not know, so that stock classes refuse it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from turbo_rcm_patch.checkpoints.extra_file import WEIGHTS, StoredTensors, weight_files
from turbo_rcm_patch.checkpoints.keys import blocks_of
from turbo_rcm_patch.checkpoints.read import Wanted, check_tensors
from turbo_rcm_patch.errors import CheckpointError
from turbo_rcm_patch.extras import require
from turbo_rcm_patch.files import try_json
from turbo_rcm_patch.patching.int8_weights import (
    INT8_MARK,
    SCALE,
    WEIGHT,
    Int8Linear,
    mark_int8_only,
)


def is_int8_only(folder: Path) -> bool:
    """Return True if the Linears of a transformer folder have int8 weights alone."""
    return bool(try_json(folder / "config.json").get("quantization_config") == INT8_MARK)


def load_int8_only(folder: str | Path, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Load a transformer whose Linears have int8 weights alone.

    SLA's `proj_l` are not attached; `load_extra(transformer, folder)` does.

    Args:
        folder: The transformer folder.
        dtype: dtype of all other weights but those that diffusers keeps in fp32, and of the
            products where an int8 Linear is called.

    Returns:
        A transformer of diffusers, on the CPU, in evaluation mode.

    Raises:
        CheckpointError: The folder has no int8 weights, or cannot be read.
        CheckpointKeysError: Tensors are missing or unexpected.
    """
    require("diffusers", "load_int8_only", "diffusers")
    require("video", "load_int8_only", "accelerate")
    import diffusers
    from accelerate import init_empty_weights

    place = Path(folder)
    config = try_json(place / "config.json")
    cls = getattr(diffusers, str(config.get("_class_name")), None)
    if cls is None or not is_int8_only(place):
        raise CheckpointError(
            f"{place} has no int8 weights of a transformer",
            expected="a folder that `convert --int8-only` wrote from a -quant checkpoint, or that "
            "was saved from a model with int8 weights alone",
        )
    with init_empty_weights():
        network = cls.from_config(config)
    stored = StoredTensors(*weight_files(place))
    _insert_int8(place, network, stored, dtype)
    _check(place, network, stored)
    network.load_state_dict(_tensors(network, stored, dtype), assign=True)
    network.register_to_config(_name_or_path=str(place))
    mark_int8_only(network)
    return network.eval()


def _insert_int8(place: Path, network: Any, stored: StoredTensors, dtype: torch.dtype) -> None:
    """Replace every Linear that has an int8 weight in the files by an `Int8Linear`."""
    modules = dict(network.named_modules())
    for key in stored.listing:
        name, _, kind = key.rpartition(".")
        if kind != WEIGHT:
            continue
        linear: Any = modules.get(name)
        int8_linear = Int8Linear.in_place_of(linear, *_stored_int8(place, name, linear, stored))
        int8_linear.dtype = dtype
        network.set_submodule(name, int8_linear)


def _stored_int8(
    place: Path, name: str, module: nn.Module | None, stored: StoredTensors
) -> tuple[Tensor, Tensor]:
    """Read the int8 weight of a Linear, and its scales in fp32: one a block of 128 x 128, as
    TurboDiffusion makes them, or one a row, as this package does."""
    keys = f"{name}.{WEIGHT}", f"{name}.{SCALE}"
    weight, scale = stored.listing[keys[0]], stored.listing.get(keys[1])
    shape = tuple(weight.shape)
    if type(module) is not nn.Linear or module.weight.shape != shape:
        raise CheckpointError(
            f"{place}: {name}",
            expected=f"a Linear {list(shape)}",
            got="no such module" if module is None else f"a {module}",
        )
    layouts = [blocks_of(shape), (shape[0],)]
    if weight.dtype != torch.int8 or scale is None or tuple(scale.shape) not in layouts:
        raise CheckpointError(
            f"{place}: {name}",
            expected=f"int8 and scales of the shape {' or '.join(map(str, map(list, layouts)))}",
            got=f"{weight.dtype} with {'none' if scale is None else list(scale.shape)}",
        )
    return stored[keys[0]], stored[keys[1]].view(torch.float32)


def _check(place: Path, network: nn.Module, stored: StoredTensors) -> None:
    """Compare the files with the state dict of the network; SLA's may be among the weights."""
    wanted = {
        name: Wanted((tuple(t.shape),), None if t.is_floating_point() else t.dtype)
        for name, t in network.state_dict().items()
    }
    present = {k: t for k, t in stored.listing.items() if ".attn1.proj_l." not in k}
    of = f"one {type(network).__name__} ({INT8_MARK['quant_method']})"
    check_tensors(f"{place}/{WEIGHTS}", wanted, present, of)


def _tensors(network: Any, stored: StoredTensors, dtype: torch.dtype) -> dict[str, Tensor]:
    """The state dict: int8 weights as they are, others in `dtype` or, as diffusers does, fp32."""
    tensors: dict[str, Tensor] = {
        name: int8 for name, int8 in network.named_parameters() if not int8.is_meta
    }
    in_fp32 = set(network._keep_in_fp32_modules or ())
    for name in network.state_dict():
        if name in tensors:
            continue
        tensor = stored[name]
        if tensor.is_floating_point():
            is_fp32 = not in_fp32.isdisjoint(name.split("."))
            tensor = tensor.to(torch.float32 if is_fp32 else dtype)
        tensors[name] = tensor
    return tensors
