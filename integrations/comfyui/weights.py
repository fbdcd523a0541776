"""TurboWan weights with the names of ComfyUI's Wan, which are those of the original code."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from turbo_rcm_patch.errors import CheckpointError
from turbo_rcm_patch.turbodiffusion import Sizes, read_checkpoint
from turbo_rcm_patch.turbodiffusion.blocks import dequantise
from turbo_rcm_patch.turbodiffusion.extra_file import folder_proj_l, weight_files
from turbo_rcm_patch.turbodiffusion.keys import HEAD_DIM, Name, names, sizes_of_config
from turbo_rcm_patch.turbodiffusion.stored import StoredTensors, read_json, transformer_folder

__all__ = ["read_wan"]

ProjL = dict[int, tuple[Tensor, Tensor | None]]


def read_wan(path: str | Path) -> tuple[dict[str, Tensor], ProjL]:
    """The tensors of a TurboDiffusion `.pth`, or of the folder that `convert` made from one.

    Args:
        path: The `.pth` file; or the transformer folder, or a file of weights in it.

    Returns:
        The state dict of ComfyUI's WanModel, with int8 weights multiplied out; and for each
        block that has SLA the weight and bias of `proj_l`.

    Raises:
        CheckpointError: It cannot be read, or ComfyUI could not load it: that takes every width
            for heads of 128 channels.
    """
    given = Path(path)
    if given.is_file() and given.suffix == ".safetensors":
        given = given.parent
        if not (given / "config.json").is_file():
            raise CheckpointError(
                str(path),
                expected="a .pth of TurboDiffusion, or a file in a folder that "
                "`turbo-rcm-patch convert` wrote, beside its config.json",
                got="a single .safetensors",
                remedy="Choose the .pth as it was downloaded, or convert it. Load weights without "
                "SLA with ComfyUI's own loader",
            )
    folder = given.is_dir() and any(
        (given / p / "config.json").is_file() for p in ("", "transformer")
    )
    sizes, tensors, proj_l = _from_folder(given) if folder else _from_checkpoint(given)
    if sizes.head_dim != HEAD_DIM:
        raise CheckpointError(
            str(path), expected=f"heads of {HEAD_DIM} channels", got=sizes.heads_text
        )
    return tensors, proj_l


def _from_checkpoint(path: Path) -> tuple[Sizes, dict[str, Tensor], ProjL]:
    found = read_checkpoint(path)
    tensors: dict[str, Tensor] = {}
    parts: dict[int, dict[str, Tensor]] = {}
    for name in names(found.sizes):
        if name.extra:
            parts.setdefault(_block(name), {})[name.theirs.rpartition(".")[2]] = found.tensors[
                name.theirs
            ]
        elif name.linear and name.their_int8[0] in found.tensors:
            int8, scale = (found.tensors[key] for key in name.their_int8)
            bias = found.tensors[f"{name.theirs.removesuffix('weight')}bias"]
            tensors[name.theirs] = dequantise(int8, scale, bias.dtype)
        else:
            tensors[name.theirs] = found.tensors[name.theirs].reshape(name.our_shape)
    proj_l: ProjL = {block: (part["weight"], part.get("bias")) for block, part in parts.items()}
    return found.sizes, tensors, proj_l


def _from_folder(path: Path) -> tuple[Sizes, dict[str, Tensor], ProjL]:
    place = transformer_folder(path)
    config = read_json(place / "config.json")
    if config.get("_class_name") != "WanTransformer3DModel":
        raise CheckpointError(
            f"{place / 'config.json'}: _class_name",
            expected="WanTransformer3DModel",
            got=repr(config.get("_class_name")),
        )
    sizes = sizes_of_config(config)
    stored = StoredTensors(*weight_files(place))
    listed = names(sizes)
    missing = [name.ours for name in listed if name.ours not in stored.listing]
    if missing:
        raise CheckpointError(
            str(place), expected=f"{len(listed)} tensors", got=f"none called {missing[0]}"
        )
    tensors = {name.theirs: stored[name.ours] for name in listed}
    proj_l: ProjL = {
        int(owner.split(".")[1]): (weight, bias)
        for owner, (weight, bias) in folder_proj_l(place).items()
    }
    return sizes, tensors, proj_l


def _block(name: Name) -> int:
    return int(name.theirs.split(".")[1])
