"""Write a checkpoint as a transformer folder of diffusers, and such a folder as a checkpoint.

The extra file holds the tensors that the stock class has no place for, by the names of its
modules:

- `blocks.N.attn1.proj_l.weight` [D, D] and `.bias` [D] of SLA;
- `<Linear>.weight_int8` int8 [Cout, K] and `<Linear>.weight_scale_bits`, the bits of the fp32
  scales [ceil(Cout / 128), ceil(K / 128)], of a `-quant` checkpoint: the state dict of an
  `Int8Linear`. The stock weight is the product of both, so that stock classes load the folder.
  With `int8_only` there is no product, and both are among the weights.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn

from turbo_rcm_patch.checkpoints.extra_file import (
    EXTRA_FILE,
    EXTRA_METADATA,
    WEIGHTS,
    StoredTensors,
    check_mark,
    mark_of,
    mark_of_tensors,
    weight_files,
)
from turbo_rcm_patch.checkpoints.keys import (
    HEAD_DIM,
    PATCH,
    Name,
    Sizes,
    blocks_of,
    names,
    sizes_of_config,
)
from turbo_rcm_patch.checkpoints.pipeline import read_json
from turbo_rcm_patch.checkpoints.read import Checkpoint, Progress, Wanted, check_tensors
from turbo_rcm_patch.checkpoints.staging import check_outside, check_target, staged
from turbo_rcm_patch.errors import CheckpointError
from turbo_rcm_patch.ops.int8_linear.api import dequantized
from turbo_rcm_patch.output import write_json
from turbo_rcm_patch.patching.int8_weights import INT8_MARK, SCALE, WEIGHT, scale_bits, stands_for
from turbo_rcm_patch.patching.sla import MARK

_log = logging.getLogger(__name__)

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
        heads: How many heads of how many channels, and the argument for it, where no tensor shows
            it; else "".
    """

    path: Path
    tensors: int
    int8: int
    sla: int
    heads: str = ""

    def __str__(self) -> str:
        said = [f"{self.path}: {self.tensors} tensors"]
        said += [f"int8 weights of {self.int8} Linears"] * bool(self.int8)
        said += [f"proj_l of {self.sla} blocks"] * bool(self.sla)
        return ", ".join(said)


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


def _items(
    checkpoint: Checkpoint, dtype: torch.dtype | None, *, int8_only: bool
) -> tuple[list[_Item], dict[str, Tensor]]:
    """The tensors of the files of weights, and those of the extra file."""
    tensors, items = checkpoint.tensors, []
    extra: dict[str, Tensor] = {}
    if int8_only and not checkpoint.quantised:
        raise CheckpointError(
            "--int8-only",
            expected="a -quant checkpoint, with int8 weights",
            got="one without",
            remedy="Convert it without --int8-only, and run it with --linear int8-only",
        )
    for name in names(checkpoint.sizes):
        pair = tuple(tensors[n] for n in name.their_int8 if name.linear and n in tensors)
        if pair:
            parts = zip(name.our_int8, (pair[0], scale_bits(pair[1])), strict=True)
            if int8_only:
                items += [_Item(key, (part,), part.dtype, part.shape) for key, part in parts]
                continue
            extra |= parts
        if name.extra:
            extra[name.ours] = tensors[name.theirs]
            continue
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
        write_json(folder / f"{WEIGHTS}.safetensors.index.json", listing, indent=2, sort_keys=True)
    owners = [key.removesuffix(".weight") for key in extra if key.endswith(".proj_l.weight")]
    proj_l = {
        owner.removesuffix(".proj_l"): (extra[f"{owner}.weight"], extra[f"{owner}.bias"])
        for owner in owners
    }
    marks: dict[str, object] = {MARK: mark_of_tensors(proj_l)} if proj_l else {}
    if int8_only:
        marks["quantization_config"] = dict(INT8_MARK)
    entries = checkpoint.sizes.config() | marks | (config or {})
    write_json(folder / "config.json", entries, indent=2, sort_keys=True)
    if extra:
        save_file(_unshared(extra), folder / EXTRA_FILE, metadata=EXTRA_METADATA)
    for path in folder.glob("*.safetensors"):  # These are written for their owner alone.
        shutil.copymode(folder / "config.json", path)
    int8 = sum(key.endswith(f".{WEIGHT}") for key in (*extra, *where))
    return Written(folder, len(items), int8, len(proj_l))


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


def transformer_folder(folder: str | Path) -> Path:
    """Find the transformer's folder, given that folder or its pipeline's.

    Raises:
        CheckpointError: There is none, or a pipeline's folder has two.
    """
    given = Path(folder)
    if (given / "transformer_2" / "config.json").is_file():
        raise CheckpointError(
            f"{given} has two experts",
            expected="the folder of one",
            remedy=f"Choose {given / 'transformer'} or {given / 'transformer_2'}",
        )
    for path in (given, given / "transformer"):
        if (path / "config.json").is_file() and not (path / "model_index.json").is_file():
            return path
    raise CheckpointError(
        f"{given} has no config.json",
        expected="a transformer folder of diffusers, or a pipeline folder with one",
    )


def write_checkpoint(
    folder: str | Path,
    target: str | Path,
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> Written:
    """Write a transformer folder as a TurboDiffusion `.pth`: `convert --back`.

    Every tensor is that of the folder, bit for bit. A Linear with an int8 weight in the extra file
    is written in int8; a stock weight that no longer is the product of that and its scales is
    refused. The whole model is held in memory.

    Args:
        folder: A transformer folder, or a pipeline folder with one.
        target: The `.pth` file.
        force: Allow replacing a file.
        progress: Called with bytes.

    Raises:
        CheckpointError: The folder cannot be read, or is of another model.
        CheckpointKeysError: Tensors are missing, unexpected or of other shapes.
        OutputExistsError: The file already exists.
        OutputError: It cannot be written.
    """
    place, path = transformer_folder(folder), Path(target)
    check_target(path, force=force, folder=False)
    config, extra_file, files = place / "config.json", place / EXTRA_FILE, weight_files(place)
    check_outside(path, config, extra_file, *files)
    extra = [extra_file] if extra_file.is_file() else []
    if proj_l := StoredTensors(*extra).proj_l():
        check_mark(place, proj_l, None)
    stored = StoredTensors(*files, *extra)
    has_sla = any(".proj_l." in key for key in stored.listing)  # or among the weights
    if mark_of(read_json(config)) and not has_sla:
        _log.warning(
            "%s says that the model has SLA, but there is no proj_l in the folder: the "
            "checkpoint is written without SLA, and dense attention is not what its weights "
            "were trained for. Put %s of the converted folder beside it, and convert again",
            config,
            EXTRA_FILE,
        )
    sizes = _sizes(config, sla=has_sla)
    sources: dict[Name, tuple[str, ...]] = {}
    wanted: dict[str, Wanted] = {}
    for name in names(sizes):
        int8, bits = name.our_int8
        sources[name] = (int8, bits) if name.linear and int8 in stored else (name.ours,)
        if int8 in sources[name]:
            wanted[int8] = Wanted((name.shape,), torch.int8)
            wanted[bits] = Wanted((blocks_of(name.shape),), torch.int32)
        if int8 not in sources[name] or name.ours in stored:
            wanted[name.ours] = Wanted((name.our_shape,))
    check_tensors(str(place), wanted, stored.listing)
    total = sum(stored.listing[key].nbytes for keys in sources.values() for key in keys)
    tensors: dict[str, Tensor] = {}
    with staged(path, force=force, folder=False, needed=total) as made:
        for name, keys in sources.items():
            found = [stored[key] for key in keys]
            if len(found) == 1:
                tensors[name.theirs] = found[0].reshape(name.shape)
            else:
                found[1] = found[1].view(torch.float32)
                if name.ours in stored:
                    check_product(f"{place}: {name.ours}", stored[name.ours], *found)
                tensors.update(zip(name.their_int8, found, strict=True))
            if progress is not None:
                done = sum(tensor.nbytes for tensor in tensors.values())
                progress("convert", done, total)
        torch.save(tensors, made)
    int8_linears = sum(len(keys) == 2 for keys in sources.values())
    shown = sizes.sla or sizes.head_dim == HEAD_DIM
    heads = "" if shown else f"{sizes.heads_text}: convert it with --heads {sizes.heads}"
    return Written(path, len(tensors), int8_linears, sizes.layers * sizes.sla, heads)


def check_product(where: str, weight: Tensor, int8: Tensor, scale: Tensor) -> None:
    """Refuse int8 weights that a stock weight no longer is the product of, but for rounding.

    Args:
        where: The weight's file and name.
        weight: [Cout, K], any float dtype.
        int8: int8 [Cout, K].
        scale: fp32 [ceil(Cout / 128), ceil(K / 128)].

    Raises:
        CheckpointError: One of the two has changed since they were converted.
    """
    if weight.shape != int8.shape or not stands_for(weight, int8, scale):
        raise CheckpointError(
            f"{where} is not the product of its int8 weight and scales",
            expected="the weights of the same folder, unchanged",
            remedy=f"Load the transformer from this folder. If its weights were changed on "
            f"purpose, remove {EXTRA_FILE}: they are then used without int8 and proj_l",
        )


def stored_int8(
    where: str, name: str, module: nn.Module | None, stored: StoredTensors, *, by_row: bool = False
) -> tuple[Tensor, Tensor]:
    """Read the int8 weight of a Linear, and its scales in fp32.

    Args:
        where: The file.
        name: The Linear's name.
        module: The Linear, whose weight may be on any device.
        stored: The tensors of the file.
        by_row: The scales may also be one for each row, as this package makes them.

    Raises:
        CheckpointError: They are not those of this Linear, or the scales are missing.
    """
    keys = f"{name}.{WEIGHT}", f"{name}.{SCALE}"
    weight, scale = stored.listing[keys[0]], stored.listing.get(keys[1])
    shape = tuple(weight.shape)
    if type(module) is not nn.Linear or module.weight.shape != shape:
        raise CheckpointError(
            f"{where}: {name}", expected=f"a Linear {list(shape)}", got=described(module)
        )
    blocks = blocks_of(shape)
    layouts = [blocks] + [(shape[0],), (shape[0], blocks[1])] * by_row
    if weight.dtype != torch.int8 or scale is None or tuple(scale.shape) not in layouts:
        raise CheckpointError(
            f"{where}: {name}",
            expected=f"int8 and scales of the shape {' or '.join(map(str, map(list, layouts)))}",
            got=f"{weight.dtype} with {'none' if scale is None else list(scale.shape)}",
        )
    return stored[keys[0]], stored[keys[1]].view(torch.float32)


def described(module: nn.Module | None) -> str:
    """Describe a module for messages."""
    weight = getattr(module, "weight", None)
    shape = f" {list(weight.shape)}" if isinstance(weight, Tensor) else ""
    return "no such module" if module is None else f"a {type(module).__name__}{shape}"


def _sizes(path: Path, *, sla: bool) -> Sizes:
    """The sizes in a diffusers configuration, if a WanModel can have them."""
    given = read_json(path)
    for key, wanted in (
        ("_class_name", "WanTransformer3DModel"),
        ("patch_size", list(PATCH)),
        ("eps", 1e-6),
    ):
        if given.get(key, wanted) != wanted:
            raise CheckpointError(
                f"{path}: {key}", expected=f"{wanted!r}, as WanModel has it", got=repr(given[key])
            )
    try:
        return sizes_of_config(given, sla=sla)
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} lacks {error}", expected="the configuration of a WanTransformer3DModel"
        ) from error
