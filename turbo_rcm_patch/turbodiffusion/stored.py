"""Read a transformer folder, tensor by tensor, and write it as a `.pth`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from turbo_rcm_patch.errors import CheckpointError
from turbo_rcm_patch.patching.int8_weights import stands_for
from turbo_rcm_patch.turbodiffusion.extra_file import (
    EXTRA_FILE,
    check_mark,
    folder_proj_l,
    mark_of,
    proj_l_key,
    weight_files,
)
from turbo_rcm_patch.turbodiffusion.folder import Written, keys_alone
from turbo_rcm_patch.turbodiffusion.keys import (
    HEAD_DIM,
    PATCH,
    Name,
    Sizes,
    blocks_of,
    names,
    sizes_of_config,
)
from turbo_rcm_patch.turbodiffusion.pipeline import read_json
from turbo_rcm_patch.turbodiffusion.read import Progress, Wanted, check_tensors
from turbo_rcm_patch.turbodiffusion.staging import check_outside, check_target, staged

_log = logging.getLogger(__name__)

_DTYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "I32": torch.int32,
}


class StoredTensors:
    """The tensors of one or more safetensors files. Each is read only when it is used.

    SLA's Linear has one name, ours, however the file calls it.

    Attributes:
        listing: Shape and dtype of each, as a tensor on the meta device.
    """

    def __init__(self, *files: Path) -> None:
        from safetensors import SafetensorError, safe_open

        self.listing: dict[str, Tensor] = {}
        self._get: dict[str, Callable[[], Tensor]] = {}
        for path in files:
            try:
                opened: Any = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(
                    f"{path} is missing, damaged or incomplete ({error})",
                    remedy="Write or download it again",
                ) from error
            for key in opened.keys():  # noqa: SIM118  not a dictionary
                part = opened.get_slice(key)
                dtype = _DTYPES.get(part.get_dtype(), torch.bool)  # What fits nothing wanted.
                owner = proj_l_key(key)
                name = key if owner is None else f"{owner[0]}.proj_l.{owner[1]}"
                if name in self.listing:
                    raise CheckpointError(
                        f"{path}: {key} occurs twice",
                        expected="each tensor once in the files of a folder",
                        remedy="Remove the files that do not belong to it",
                    )
                self.listing[name] = torch.empty(part.get_shape(), dtype=dtype, device="meta")
                self._get[name] = partial(opened.get_tensor, key)

    def __contains__(self, key: str) -> bool:
        return key in self._get

    def __getitem__(self, key: str) -> Tensor:
        return self._get[key]()


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
        force: Whether it may replace a file.
        progress: Called with bytes.

    Raises:
        CheckpointError: The folder cannot be read, or is of another model.
        CheckpointKeysError: Tensors are missing, unexpected or of other shapes.
        OutputExistsError: The file already exists, or cannot be written.
    """
    place, path = transformer_folder(folder), Path(target)
    check_target(path, force=force, folder=False)
    config, extra_file, files = place / "config.json", place / EXTRA_FILE, weight_files(place)
    check_outside(path, config, extra_file, *files)
    stock = StoredTensors(*files)
    extra = StoredTensors(*([extra_file] if extra_file.is_file() else []))
    # Folders that others converted have it among the weights.
    sla = extra if _has_sla(extra) else stock
    if sla is extra:
        check_mark(place, folder_proj_l(place), None)
    if mark_of(read_json(config)) and not _has_sla(sla):
        _log.warning(
            "%s says that the model has SLA, but there is no proj_l in the folder: the "
            "checkpoint is written without SLA, and dense attention is not what its weights "
            "were trained for. Put %s of the converted folder beside it, and convert again",
            config,
            EXTRA_FILE,
        )
    sizes = _sizes(config, sla=_has_sla(sla))
    listed = names(sizes)
    alone = {n for n in listed if n.linear and keys_alone(n)[0] in stock}
    int8 = {n for n in listed if n.linear and n.our_int8[0] in extra}
    wanted: dict[str, Wanted] = {}
    for name in listed:
        if name in alone:  # In int8, and their products nowhere.
            weight, scale = keys_alone(name)
            wanted[weight] = Wanted((name.shape,), torch.int8)
            wanted[scale] = Wanted((blocks_of(name.shape),), torch.int32)
        elif sla is stock or not name.extra:
            wanted[name.ours] = Wanted((name.our_shape,))
    check_tensors(str(place), wanted, stock.listing)
    if extra_file.is_file():
        beside = [name for name in listed if sla is extra or not name.extra]
        check_tensors(str(extra_file), _wanted_extra(beside, int8), extra.listing)
    #: What is written, by name: where it is, and its keys there.
    sources = {
        name: (stock, keys_alone(name)) if name in alone
        else (extra, name.our_int8) if name in int8
        else (sla if name.extra else stock, (name.ours,))
        for name in listed
    }  # fmt: skip
    bytes_of = {
        n: sum(held.listing[k].nbytes for k in keys) for n, (held, keys) in sources.items()
    }
    total, done = sum(bytes_of.values()), 0
    tensors: dict[str, Tensor] = {}
    with staged(path, force=force, folder=False, needed=total) as made:
        for name, (held, keys) in sources.items():
            found = [held[key] for key in keys]
            if name in int8:
                check_product(f"{place}: {name.ours}", stock[name.ours], *found)
            if name in alone:
                found[1] = found[1].view(torch.float32)
            if len(found) == 2:
                tensors.update(zip(name.their_int8, found, strict=True))
            else:
                tensors[name.theirs] = found[0].reshape(name.shape)
            done += bytes_of[name]
            if progress is not None:
                progress("convert", done, total)
        torch.save(tensors, made)
    blocks = len({n.ours.split(".")[1] for n in listed if n.extra})
    shown = sizes.sla or sizes.head_dim == HEAD_DIM
    heads = "" if shown else f"{sizes.heads_text}: convert it with --heads {sizes.heads}"
    return Written(path, len(tensors), len(int8 | alone), blocks, extra_file="", heads=heads)


def _has_sla(stored: StoredTensors) -> bool:
    return any(key.endswith(".attn1.proj_l.weight") for key in stored.listing)


def _wanted_extra(listed: list[Name], int8: set[Name]) -> dict[str, Wanted]:
    """The tensors that the extra file of a model must hold, given which Linears are in int8."""
    wanted = {name.ours: Wanted((name.shape,)) for name in listed if name.extra}
    for name in int8:
        weight, scale = name.our_int8
        wanted[weight] = Wanted((name.shape,), torch.int8)
        wanted[scale] = Wanted((blocks_of(name.shape),))
    return wanted


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
            expected="the weights of the same folder, which nobody changed",
            remedy=f"Load the transformer from this folder. If its weights were changed on "
            f"purpose, remove {EXTRA_FILE}: they are then used without int8 and proj_l",
        )


def _sizes(path: Path, *, sla: bool) -> Sizes:
    """What a configuration of diffusers' WanTransformer3DModel says, where theirs can be it."""
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
