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

from turbo_rcm_patch.checkpoints.extra_file import WEIGHTS, stored_tensors, weight_files
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
    stored = stored_tensors(*weight_files(place))
    _insert_int8(place, network, stored, dtype)
    wanted = {
        name: Wanted((tuple(t.shape),), None if t.is_floating_point() else t.dtype)
        for name, t in network.state_dict().items()
    }
    present = {name: t for name, t in stored.items() if ".attn1.proj_l." not in name}
    of = f"one {type(network).__name__} ({INT8_MARK['quant_method']})"
    check_tensors(f"{place}/{WEIGHTS}", wanted, present, of)
    in_fp32 = set(network._keep_in_fp32_modules or ())
    for name, tensor in present.items():
        if tensor.is_floating_point():
            is_fp32 = not in_fp32.isdisjoint(name.split("."))
            present[name] = tensor.to(torch.float32 if is_fp32 else dtype)
    network.load_state_dict(present, assign=True)
    network.register_to_config(_name_or_path=str(place))
    mark_int8_only(network)
    return network.eval()


def _insert_int8(place: Path, network: Any, stored: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Replace every Linear that has an int8 weight in the files by an `Int8Linear`.

    Its scales, in fp32, are one a block of 128 x 128, as TurboDiffusion makes them, or one a row,
    as this package does.
    """
    modules = dict(network.named_modules())
    for key, weight in stored.items():
        name, _, kind = key.rpartition(".")
        if kind != WEIGHT:
            continue
        linear, bits = modules.get(name), stored.get(f"{name}.{SCALE}")
        shape, scales = tuple(weight.shape), None if bits is None else tuple(bits.shape)
        if (
            type(linear) is not nn.Linear
            or linear.weight.shape != shape
            or weight.dtype != torch.int8
            or bits is None
            or bits.dtype != torch.int32
            or scales not in (blocks_of(shape), shape[:1])
        ):
            raise CheckpointError(
                f"{place}: {name}",
                expected=f"a Linear {list(shape)}, and its int8 weight with one scale a block of "
                "128 x 128 or one a row",
                got=f"{linear or 'no such module'}, {weight.dtype} with scales {scales}",
            )
        int8_linear = Int8Linear.in_place_of(linear, weight, bits.view(torch.float32))
        int8_linear.dtype = dtype
        network.set_submodule(name, int8_linear)
