"""Read a transformer folder, tensor by tensor, and write it as a `.pth`."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from torch import Tensor

from turbo_rcm_patch.errors import CheckpointError
from turbo_rcm_patch.patching.int8_weights import stands_for
from turbo_rcm_patch.turbodiffusion.extra_file import (
    EXTRA_FILE,
    StoredTensors,
    check_mark,
    mark_of,
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
        OutputExistsError: The file already exists, or cannot be written.
    """
    place, path = transformer_folder(folder), Path(target)
    check_target(path, force=force, folder=False)
    config, extra_file, files = place / "config.json", place / EXTRA_FILE, weight_files(place)
    check_outside(path, config, extra_file, *files)
    stock = StoredTensors(*files)
    extra = StoredTensors(*([extra_file] if extra_file.is_file() else []))
    beside = extra.proj_l()
    if beside:
        check_mark(place, beside, None)
    # Folders that others converted have it among the weights.
    sla = extra if beside else stock
    has_sla = any(".proj_l." in key for key in sla.listing)
    if mark_of(read_json(config)) and not has_sla:
        _log.warning(
            "%s says that the model has SLA, but there is no proj_l in the folder: the "
            "checkpoint is written without SLA, and dense attention is not what its weights "
            "were trained for. Put %s of the converted folder beside it, and convert again",
            config,
            EXTRA_FILE,
        )
    sizes = _sizes(config, sla=has_sla)
    listed = names(sizes)
    #: Each tensor's file and its keys there, and the tensors that each file must hold.
    sources: dict[Name, tuple[StoredTensors, tuple[str, ...]]] = {}
    in_stock: dict[str, Wanted] = {}
    in_extra: dict[str, Wanted] = {}
    for name in listed:
        int8 = Wanted((name.shape,), torch.int8)
        blocks = blocks_of(name.shape) if name.linear else ()
        if name.linear and keys_alone(name)[0] in stock:  # Its product is nowhere.
            sources[name] = stock, keys_alone(name)
            in_stock |= zip(keys_alone(name), (int8, Wanted((blocks,), torch.int32)), strict=True)
            continue
        held = sla if name.extra else stock
        (in_extra if held is extra else in_stock)[name.ours] = Wanted((name.our_shape,))
        sources[name] = held, (name.ours,)
        if name.linear and name.our_int8[0] in extra:
            sources[name] = extra, name.our_int8
            in_extra |= zip(name.our_int8, (int8, Wanted((blocks,))), strict=True)
    check_tensors(str(place), in_stock, stock.listing)
    check_tensors(str(extra_file), in_extra, extra.listing)
    total = sum(held.listing[key].nbytes for held, keys in sources.values() for key in keys)
    tensors: dict[str, Tensor] = {}
    with staged(path, force=force, folder=False, needed=total) as made:
        for name, (held, keys) in sources.items():
            found = [held[key] for key in keys]
            if len(found) == 1:
                tensors[name.theirs] = found[0].reshape(name.shape)
            else:
                if held is extra:
                    check_product(f"{place}: {name.ours}", stock[name.ours], *found)
                else:
                    found[1] = found[1].view(torch.float32)
                tensors.update(zip(name.their_int8, found, strict=True))
            if progress is not None:
                done = sum(tensor.nbytes for tensor in tensors.values())
                progress("convert", done, total)
        torch.save(tensors, made)
    int8_count = sum(len(keys) == 2 for _, keys in sources.values())
    blocks_with_sla = sizes.layers if sizes.sla else 0
    shown = sizes.sla or sizes.head_dim == HEAD_DIM
    heads = "" if shown else f"{sizes.heads_text}: convert it with --heads {sizes.heads}"
    return Written(path, len(tensors), int8_count, blocks_with_sla, extra_file="", heads=heads)


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
