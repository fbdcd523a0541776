"""Write a checkpoint as a transformer folder of diffusers.

The weights of a `-quant` checkpoint are written in one of two ways:

- multiplied by their scales, so that stock classes load the folder;
- with `int8_only` as they are: `<Linear>.weight_int8` int8 [Cout, K] and
  `<Linear>.weight_scale_bits`, the bits of the fp32 scales [ceil(Cout / 128), ceil(K / 128)]. That
  is the state dict of an `Int8Linear`.

SLA's `blocks.N.attn1.proj_l.weight` [D, D] and `.bias` [D], which stock classes have no place for,
are in `EXTRA_FILE`.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from turbo_rcm_patch.checkpoints.extra_file import (
    EXTRA_FILE,
    EXTRA_METADATA,
    WEIGHTS,
    mark_of_tensors,
    proj_l_of,
)
from turbo_rcm_patch.checkpoints.keys import names
from turbo_rcm_patch.checkpoints.read import Checkpoint, Progress
from turbo_rcm_patch.errors import CheckpointError
from turbo_rcm_patch.files import write_json
from turbo_rcm_patch.ops.int8_linear.api import dequantized
from turbo_rcm_patch.patching.int8_weights import INT8_MARK, scale_bits
from turbo_rcm_patch.patching.sla import MARK

#: Largest file of weights; converting needs about twice that in memory.
SHARD_BYTES: Final = 4 * 2**30
#: Parts of names whose tensors diffusers keeps in fp32 in a model of any dtype.
_FP32: Final = {"time_embedder", "scale_shift_table", "norm1", "norm2", "norm3"}


@dataclass(frozen=True, slots=True)
class Written:
    """The result of a conversion.

    Attributes:
        path: The folder.
        tensors: How many, the extra file's not counted.
        int8: Linears with an int8 weight.
        dequantized: Linears whose int8 weight was multiplied by its scales.
        sla: Blocks with SLA's `proj_l`.
        heads: How many heads of how many channels, and the argument for it, where no tensor shows
            it; else "".
    """

    path: Path
    tensors: int
    int8: int
    dequantized: int
    sla: int
    heads: str = ""

    def __str__(self) -> str:
        parts = [f"{self.path}: {self.tensors} tensors"]
        if self.int8:
            parts.append(f"int8 weights of {self.int8} Linears")
        if self.dequantized:
            parts.append(
                f"int8 weights of {self.dequantized} Linears multiplied by their scales "
                "(--int8-only keeps them as they are)"
            )
        if self.sla:
            parts.append(f"proj_l of {self.sla} blocks")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class _Item:
    """A tensor to write, made only when its file is written.

    Attributes:
        key: Its name.
        source: The tensor, or int8 and the scales that it is the product of.
        dtype: In the file.
        shape: In the file.
    """

    key: str
    source: tuple[Tensor, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def tensor(self) -> Tensor:
        """Return it in its dtype and shape, dense and in memory of its own."""
        if len(self.source) == 2:
            int8, scale = self.source
            return dequantized(int8, scale.float(), self.dtype)
        # A copy: weights may share a storage, which safetensors refuses.
        return self.source[0].to(self.dtype, copy=True).reshape(self.shape).contiguous()


def folder_bytes(
    checkpoint: Checkpoint, dtype: torch.dtype | None, *, int8_only: bool = False
) -> int:
    """Bytes that `write_transformer` writes, up to some kilobytes."""
    weights = _weights(checkpoint, dtype, int8_only=int8_only)
    return sum(item.size for item in (*weights, *_proj_l(checkpoint)))


def write_transformer(
    checkpoint: Checkpoint,
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    int8_only: bool = False,
    config: dict[str, object] | None = None,
    progress: Progress | None = None,
) -> Written:
    """Write a transformer into an existing, empty folder.

    Args:
        checkpoint: The checkpoint that `read_checkpoint` returned.
        folder: The folder.
        dtype: Of the weights that diffusers would cast (norms, modulation and the time embedder
            stay as they are); None keeps every tensor's own, and multiplies int8 weights to the
            dtype of their bias.
        int8_only: Write the int8 weights of a `-quant` checkpoint and not their products. Such a
            folder is about as large as the checkpoint. Stock classes refuse it; `load_pipeline`
            loads it.
        config: Entries of config.json to use in place of those inferred.
        progress: Called with bytes.
    """
    from safetensors.torch import save_file

    weights = _weights(checkpoint, dtype, int8_only=int8_only)
    _write_weights(folder, weights, progress)
    marks: dict[str, object] = {"quantization_config": dict(INT8_MARK)} if int8_only else {}
    proj_l = {item.key: item.tensor() for item in _proj_l(checkpoint)}
    if proj_l:
        save_file(proj_l, folder / EXTRA_FILE, metadata=EXTRA_METADATA)
        marks[MARK] = mark_of_tensors(proj_l_of(proj_l))
    entries = checkpoint.sizes.config() | marks | (config or {})
    write_json(folder / "config.json", entries, indent=2, sort_keys=True)
    for path in folder.glob("*.safetensors"):  # These are written for their owner alone.
        shutil.copymode(folder / "config.json", path)
    quantized = sum(name.endswith(".int8_weight") for name in checkpoint.tensors)
    return Written(
        folder,
        tensors=len(weights),
        int8=quantized if int8_only else 0,
        dequantized=0 if int8_only else quantized,
        sla=len(proj_l) // 2,
    )


def _proj_l(checkpoint: Checkpoint) -> list[_Item]:
    """The tensors of the extra file."""
    pairs = [
        (name.ours, checkpoint.tensors[name.theirs])
        for name in names(checkpoint.sizes)
        if name.extra
    ]
    return [_Item(key, (tensor,), tensor.dtype, tensor.shape) for key, tensor in pairs]


def _weights(checkpoint: Checkpoint, dtype: torch.dtype | None, *, int8_only: bool) -> list[_Item]:
    """The tensors of the files of weights."""
    if int8_only and not checkpoint.quantised:
        raise CheckpointError(
            "--int8-only",
            expected="a -quant checkpoint, with int8 weights",
            got="one without",
            remedy="Convert it without --int8-only, and run it with --linear int8-only",
        )
    items: list[_Item] = []
    for name in names(checkpoint.sizes):
        if name.extra:
            continue
        int8, scale = (checkpoint.tensors.get(key) for key in name.their_int8)
        source: tuple[Tensor, ...]
        if int8 is None or scale is None or not name.linear:
            weight = checkpoint.tensors[name.theirs]
            source, chosen = (weight,), weight.dtype
        elif int8_only:
            parts = zip(name.our_int8, (int8, scale_bits(scale)), strict=True)
            items += [_Item(key, (part,), part.dtype, part.shape) for key, part in parts]
            continue
        else:
            source = int8, scale
            chosen = checkpoint.tensors[f"{name.theirs.removesuffix('weight')}bias"].dtype
        if dtype is not None and _FP32.isdisjoint(name.ours.split(".")):
            chosen = dtype
        items.append(_Item(name.ours, source, chosen, name.our_shape))
    return items


def _write_weights(folder: Path, items: list[_Item], progress: Progress | None) -> None:
    """Write the files of weights, and their index if there are several."""
    from safetensors.torch import save_file

    total, done = sum(item.size for item in items), 0
    shards: list[list[_Item]] = []
    room = 0
    for item in items:
        if item.size > room or not shards:
            shards.append([])
            room = SHARD_BYTES
        shards[-1].append(item)
        room -= item.size
    weight_map: dict[str, str] = {}
    for index, shard in enumerate(shards):
        part = f"-{index + 1:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
        file = f"{WEIGHTS}{part}.safetensors"
        tensors = {}
        for item in shard:
            tensors[item.key] = item.tensor()
            weight_map[item.key] = file
            done += item.size
            if progress is not None:
                progress("convert", done, total)
        save_file(tensors, folder / file, metadata={"format": "pt"})
    if len(shards) > 1:
        listing = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json(folder / f"{WEIGHTS}.safetensors.index.json", listing, indent=2, sort_keys=True)
