"""TurboWan weights with the names of ComfyUI's Wan, which are those of the original code."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from turbo_rcm_patch.checkpoints import read_checkpoint
from turbo_rcm_patch.checkpoints.keys import HEAD_DIM, names
from turbo_rcm_patch.errors import CheckpointError
from turbo_rcm_patch.ops.int8_linear.api import dequantized

ProjL = dict[int, tuple[Tensor, Tensor | None]]


def read_wan(path: str | Path) -> tuple[dict[str, Tensor], ProjL]:
    """Read a TurboDiffusion `.pth`.

    Returns:
        The state dict of ComfyUI's WanModel, with int8 weights multiplied out; and for each block
        that has SLA the weight [D, D] and bias [D] of `proj_l`.

    Raises:
        CheckpointError: It cannot be read, or ComfyUI could not load it: that takes every width
            for heads of 128 channels.
    """
    if Path(path).suffix == ".safetensors":
        raise CheckpointError(
            str(path),
            expected="a .pth of TurboDiffusion",
            got="a .safetensors",
            remedy="Choose the .pth as it was downloaded. Load weights without SLA with ComfyUI's "
            "own loader",
        )
    checkpoint = read_checkpoint(Path(path))
    if checkpoint.sizes.head_dim != HEAD_DIM:
        raise CheckpointError(
            str(path), expected=f"heads of {HEAD_DIM} channels", got=checkpoint.sizes.heads_text
        )
    tensors: dict[str, Tensor] = {}
    parts: dict[int, dict[str, Tensor]] = {}
    for name in names(checkpoint.sizes):
        key = name.theirs
        if name.extra:
            block, part = int(key.split(".")[1]), key.rpartition(".")[2]
            parts.setdefault(block, {})[part] = checkpoint.tensors[key]
        elif name.linear and name.their_int8[0] in checkpoint.tensors:
            int8, scale = (checkpoint.tensors[part] for part in name.their_int8)
            bias = checkpoint.tensors[f"{key.removesuffix('weight')}bias"]
            tensors[key] = dequantized(int8, scale.float(), bias.dtype)
        else:
            tensors[key] = checkpoint.tensors[key].reshape(name.our_shape)
    return tensors, {block: (part["weight"], part.get("bias")) for block, part in parts.items()}
