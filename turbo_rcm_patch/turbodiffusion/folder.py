"""Write a checkpoint as a transformer folder of diffusers: config.json, safetensors, extra file.

The extra file holds the tensors that the stock class has no place for, by the names of its
modules:

- `blocks.N.attn1.proj_l.weight` [D, D] and `.bias` [D] of SLA;
- `<Linear>.int8_weight` int8 [Cout, K] and `<Linear>.scale` fp32 [ceil(Cout / 128), ceil(K / 128)]
  of a `-quant` checkpoint, whose stock weight is the product of both, so that stock classes load
  the folder. With `int8_only` there is no product, and both are among the weights, by the names
  of `Int8Linear`.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from turbo_rcm_patch.ops.int8_linear import dequantized
from turbo_rcm_patch.patching.int8_module import SCALE
from turbo_rcm_patch.patching.int8_module import WEIGHT as INT8_WEIGHT
from turbo_rcm_patch.patching.int8_only import INT8_MARK
from turbo_rcm_patch.patching.sla import MARK
from turbo_rcm_patch.turbodiffusion.extra_file import (
    EXTRA_FILE,
    EXTRA_METADATA,
    WEIGHTS,
    mark_of_tensors,
)
from turbo_rcm_patch.turbodiffusion.keys import Name, names
from turbo_rcm_patch.turbodiffusion.pipeline import write_json
from turbo_rcm_patch.turbodiffusion.read import Checkpoint, Progress

#: Largest file of weights; converting needs about twice that in memory, or the extra file.
SHARD_BYTES: Final = 4 * 2**30
#: Parts of names whose tensors diffusers keeps in fp32 in a model of any dtype.
_FP32: Final = {"time_embedder", "scale_shift_table", "norm1", "norm2", "norm3"}


@dataclass(frozen=True, slots=True)
class Written:
    """The result of a conversion.

    Attributes:
        path: The folder or file.
        tensors: How many, the extra file's not counted.
        int8: Linears with an int8 weight.
        sla: Blocks with SLA's `proj_l`.
        left_out: Entries of the checkpoint that hold no weights.
        extra_file: The file that int8 weights and `proj_l` are in, or "" if it is the same.
        heads: How many heads of how many channels, and the argument for it, where no tensor shows
            it; else "".
    """

    path: Path
    tensors: int
    int8: int
    sla: int
    left_out: tuple[str, ...] = ()
    extra_file: str = EXTRA_FILE
    heads: str = ""

    def __str__(self) -> str:
        kept = []
        if self.int8:
            kept.append(f"the int8 weights of {self.int8} Linears")
        if self.sla:
            kept.append(f"proj_l of {self.sla} blocks")
        where = f", {self.extra_file} with " if self.extra_file else ", with "
        extra = where + " and ".join(kept) if kept else ""
        return f"{self.path}: {self.tensors} tensors{extra}"


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
        """In its dtype and shape, dense and in memory of its own."""
        if len(self.source) == 2:
            int8, scale = self.source
            return dequantized(int8, scale.float(), self.dtype)
        # A copy: weights may share a storage, which safetensors refuses.
        return self.source[0].to(self.dtype, copy=True).reshape(self.shape).contiguous()


def keys_alone(name: Name) -> tuple[str, str]:
    """The keys of an int8 weight and its scales in a folder without their product."""
    linear = name.ours.removesuffix("weight")
    return f"{linear}{INT8_WEIGHT}", f"{linear}{SCALE}"


def _items(
    checkpoint: Checkpoint, dtype: torch.dtype | None, *, int8_only: bool
) -> tuple[list[_Item], dict[str, Tensor]]:
    """The tensors of the files of weights, and those of the extra file."""
    tensors, items = checkpoint.tensors, []
    extra: dict[str, Tensor] = {}
    for name in names(checkpoint.sizes):
        pair = tuple(tensors[n] for n in name.their_int8 if name.linear and n in tensors)
        if name.extra:
            extra[name.ours] = tensors[name.theirs]
        elif int8_only and pair:
            as_they_are = pair[0], pair[1].float().contiguous().view(torch.int32)
            for key, part in zip(keys_alone(name), as_they_are, strict=True):
                items.append(_Item(key, (part,), part.dtype, part.shape))
        else:
            extra |= zip(name.our_int8, pair, strict=bool(pair))
            # Without an asked dtype, a product gets that of its Linear's bias.
            shown = f"{name.theirs.removesuffix('weight')}bias" if pair else name.theirs
            own = tensors[shown].dtype
            if dtype is not None and not _FP32 & set(name.ours.split(".")):
                own = dtype
            source = pair or (tensors[name.theirs],)
            items.append(_Item(name.ours, source, own, name.our_shape))
    return items, extra


def folder_bytes(
    checkpoint: Checkpoint, dtype: torch.dtype | None, *, int8_only: bool = False
) -> int:
    """Bytes that `write_transformer` writes, up to some kilobytes."""
    items, extra = _items(checkpoint, dtype, int8_only=int8_only)
    return sum(item.size for item in items) + sum(tensor.nbytes for tensor in extra.values())


def write_transformer(
    checkpoint: Checkpoint,
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    int8_only: bool = False,
    shard_bytes: int = SHARD_BYTES,
    config: dict[str, object] | None = None,
    progress: Progress | None = None,
) -> Written:
    """Write a transformer into an existing, empty folder.

    Args:
        checkpoint: The checkpoint that `read_checkpoint` returned.
        folder: The folder.
        dtype: Of the weights that diffusers would cast (norms, modulation and the time embedder
            stay as they are); None keeps every tensor's own, and multiplies int8 weights back to
            the dtype of their bias.
        int8_only: Write the int8 weights of a `-quant` checkpoint and not their products. Such a
            folder is about as large as the checkpoint. Stock classes refuse it; `load_pipeline`
            loads it.
        shard_bytes: Largest file.
        config: Entries of config.json to use in place of those inferred.
        progress: Called with bytes.
    """
    from safetensors.torch import save_file

    items, extra = _items(checkpoint, dtype, int8_only=int8_only)
    total, done = sum(item.size for item in items), 0
    shards = list(_shards(items, shard_bytes))
    where: dict[str, str] = {}
    for index, shard in enumerate(shards):
        part = f"-{index + 1:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
        file = f"{WEIGHTS}{part}.safetensors"
        tensors = {}
        for item in shard:
            tensors[item.key] = item.tensor()
            where[item.key] = file
            done += item.size
            if progress is not None:
                progress("convert", done, total)
        save_file(tensors, folder / file, metadata={"format": "pt"})
    if len(shards) > 1:
        listing = {"metadata": {"total_size": total}, "weight_map": where}
        write_json(folder / f"{WEIGHTS}.safetensors.index.json", listing)
    owners = [key.removesuffix(".weight") for key in extra if key.endswith(".proj_l.weight")]
    proj_l = {
        owner.removesuffix(".proj_l"): (extra[f"{owner}.weight"], extra[f"{owner}.bias"])
        for owner in owners
    }
    marks: dict[str, object] = {MARK: mark_of_tensors(proj_l)} if proj_l else {}
    if int8_only:
        marks["quantization_config"] = dict(INT8_MARK)
    write_json(folder / "config.json", checkpoint.sizes.config() | marks | (config or {}))
    if extra:
        save_file(_unshared(extra), folder / EXTRA_FILE, metadata=EXTRA_METADATA)
    for path in folder.glob("*.safetensors"):  # These are written for their owner alone.
        shutil.copymode(folder / "config.json", path)
    int8 = sum(key.endswith((".int8_weight", f".{INT8_WEIGHT}")) for key in (*extra, *where))
    return Written(
        folder, len(items), int8, len(proj_l), checkpoint.left_out,
        extra_file="" if int8_only and not extra else EXTRA_FILE,
    )  # fmt: skip


def _unshared(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors with a storage each, because safetensors refuses others; mapped ones stay mapped."""
    result, seen = {}, set()
    for key, tensor in tensors.items():
        dense = tensor.contiguous()
        storage = dense.untyped_storage()
        shared = storage.nbytes() != dense.nbytes or storage.data_ptr() in seen
        seen.add(storage.data_ptr())
        result[key] = dense.clone() if shared else dense
    return result


def _shards(items: list[_Item], largest: int) -> Iterator[list[_Item]]:
    shard: list[_Item] = []
    for item in items:
        if shard and sum(i.size for i in shard) + item.size > largest:
            yield shard
            shard = []
        shard.append(item)
    if shard:
        yield shard
