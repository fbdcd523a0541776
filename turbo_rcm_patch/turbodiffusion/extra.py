"""Attach SLA's `proj_l` and int8 weights to a loaded transformer, and detach them.

Stock classes have no place for either. int8 weights are multiplied as they are, with their scale
per block, so no weight is rounded twice; only activations are rounded. For one Linear of 1536 x
1536 normal values the error against its dequantised weight is then 0.0081 (relative L2). With
TurboDiffusion's own blocks of activations it is 0.0092, and with a weight that is quantised again
by row 0.0114.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from turbo_rcm_patch.errors import AlreadyPatchedError, CheckpointError
from turbo_rcm_patch.patching.int8_weights import (
    attach_int8,
    detach_int8,
    held_int8,
    restore_int8,
)
from turbo_rcm_patch.patching.record import record_of
from turbo_rcm_patch.patching.sla import (
    attach_proj_l,
    attached_proj_l,
    detach_proj_l,
    held_proj_l,
)
from turbo_rcm_patch.turbodiffusion.extra_file import (
    EXTRA_FILE,
    check_mark,
    folder_proj_l,
    mark_of,
    mark_of_tensors,
    mark_sla,
    save_as_class,
    save_with_extra,
    weight_files,
)
from turbo_rcm_patch.turbodiffusion.keys import blocks_of
from turbo_rcm_patch.turbodiffusion.stored import StoredTensors, check_product, transformer_folder


@dataclass(frozen=True, slots=True)
class Extra:
    """What `load_extra` attached.

    Attributes:
        path: The file.
        int8: Names of the Linears with an int8 weight.
        proj_l: Names of the attentions with SLA's projection.
    """

    path: Path
    int8: tuple[str, ...]
    proj_l: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"{self.path}: int8 weights of {len(self.int8)} Linears, "
            f"proj_l of {len(self.proj_l)} attentions"
        )


def load_extra(
    transformer: nn.Module, folder: str | Path, *, int8: bool = True, proj_l: bool = True
) -> Extra:
    """Attach the contents of a converted folder's extra file to the transformer loaded from it.

    `patch_model(transformer, linear="int8")` then uses the checkpoint's own int8 weights, with
    their scales, wherever it runs a Linear in int8. `proj_l` is attached to the self-attention of
    each block, as buffers named in `PROJ_L`, and a patched transformer then runs SLA there.

    Both move with the model. Neither is in its state dict, but `save_pretrained` writes them
    beside the weights. Outputs do not change until the transformer is patched. `unload_extra`
    takes both away. Load first, then patch: a patched transformer uses int8 weights from its next
    forward on, but refuses `proj_l`, because patching has already chosen how its attentions run.

    Args:
        transformer: diffusers' WanTransformer3DModel.
        folder: The transformer folder, or the pipeline folder with it. The `proj_l` may also be
            among the weights, as in folders that other programs converted.
        int8: Whether to attach int8 weights. False takes away those that are attached.
        proj_l: Whether to attach `proj_l`. False means dense attention: those that are attached
            are taken away, from a patched transformer too, and `patch_model` does not look for
            them either.

    Returns:
        What was attached.

    Raises:
        AlreadyPatchedError: The transformer is patched, and the file holds `proj_l`.
        CheckpointError: There is no such file, or it belongs to other weights.

    After an error nothing has changed.
    """
    place = transformer_folder(folder)
    path = place / EXTRA_FILE
    mark = mark_of(getattr(transformer, "config", None))
    found = folder_proj_l(place)
    if found:
        check_mark(place, found, mark)
    elif not path.is_file():
        raise CheckpointError(
            f"{place} has no {EXTRA_FILE}",
            expected="a folder that `python -m turbo_rcm_patch convert` wrote from a checkpoint "
            "with SLA or int8 weights",
        )
    elif isinstance(mark, Mapping) and proj_l:
        raise CheckpointError(
            f"{path} has no proj_l",
            expected=f"those of {mark['count']} attentions that config.json marks",
            remedy="Pass the folder that the model was converted to",
        )
    stored = StoredTensors(*([path] if path.is_file() else weight_files(place)))
    if not path.is_file():
        path = place
    modules = dict(transformer.named_modules())
    linears, attentions = [], []
    for key in stored.listing:
        module, _, kind = key.rpartition(".")
        if kind == "int8_weight" and int8:
            _check_linear(path, module, modules.get(module), stored)
            linears.append(module)
    for owner, (weight, _) in found.items() if proj_l else ():
        _check_attention(path, owner, modules.get(owner), weight)
        attentions.append(owner)
    if attentions and record_of(transformer) is not None:
        raise AlreadyPatchedError(
            f"{path}: proj_l of {len(attentions)} attentions",
            expected="a transformer that is patched after its proj_l is attached",
            got="a patched one",
            remedy="Call unpatch_model, then load_extra, then patch_model",
        )
    before = [(modules[name], held_int8(modules[name])) for name in linears]
    projections = [(modules[name], attached_proj_l(modules[name])) for name in attentions]
    try:
        for name in linears:
            _attach(path, name, modules[name], stored)
        for name in attentions:
            attach_proj_l(modules[name], *found[name])
    except BaseException:
        for linear, int8_weight in before:
            restore_int8(linear, int8_weight)
        for attention, held in projections:
            detach_proj_l(attention)
            if held is not None:
                attach_proj_l(attention, *held)
        raise
    if found or (not proj_l and held_proj_l(transformer)):
        mark_sla(transformer, mark_of_tensors(found) if proj_l else None)
    for module in modules.values():
        if not int8:
            detach_int8(module)
        if not proj_l:
            detach_proj_l(module)
    save_with_extra(transformer)
    return Extra(path, tuple(linears), tuple(attentions))


def unload_extra(transformer: nn.Module) -> None:
    """Remove what `load_extra` attached. The model is then as it was before.

    A patched one runs dense attention from its next forward on, and with int8 weights of its own.
    So does one that is patched later: that dense attention is meant is said in its configuration,
    and `patch_model` does not attach `proj_l` that lie beside the weights.
    """
    if held_proj_l(transformer) or mark_of(getattr(transformer, "config", None)):
        mark_sla(transformer, None)
    save_as_class(transformer)
    for module in transformer.modules():
        detach_int8(module)
        detach_proj_l(module)


def _attach(path: Path, name: str, linear: nn.Module, stored: StoredTensors) -> None:
    assert isinstance(linear, nn.Linear)
    int8 = stored[f"{name}.int8_weight"].to(linear.weight.device)
    scale = stored[f"{name}.scale"].to(int8.device).float()
    check_product(f"{path}: {name}.weight", linear.weight, int8, scale)
    attach_int8(linear, int8, scale)


def _check_linear(path: Path, name: str, module: nn.Module | None, stored: StoredTensors) -> None:
    int8 = stored.listing[f"{name}.int8_weight"]
    scale = stored.listing.get(f"{name}.scale")
    if type(module) is not nn.Linear or module.weight.shape != int8.shape:
        got = "no such module" if module is None else _described(module)
        raise CheckpointError(f"{path}: {name}", expected=f"a Linear {list(int8.shape)}", got=got)
    if (
        int8.dtype != torch.int8
        or scale is None
        or tuple(scale.shape) != blocks_of(tuple(int8.shape))
    ):
        raise CheckpointError(
            f"{path}: {name}", expected=f"int8 and {list(blocks_of(tuple(int8.shape)))} scales"
        )
    if module.weight.is_meta:
        raise CheckpointError(f"{name}.weight is on the meta device", expected="loaded weights")


def _check_attention(path: Path, name: str, module: nn.Module | None, weight: Tensor) -> None:
    shape = tuple(weight.shape)
    heads = getattr(module, "heads", None)
    width = getattr(getattr(module, "to_v", None), "out_features", 0)
    if not heads or shape != (width // heads,) * 2:
        got = "no such module" if module is None else _described(module)
        raise CheckpointError(
            f"{path}: {name}", expected=f"attention with heads of {shape[0]} channels", got=got
        )


def _described(module: nn.Module) -> str:
    weight = getattr(module, "weight", None)
    shape = f" {list(weight.shape)}" if isinstance(weight, Tensor) else ""
    return f"a {type(module).__name__}{shape}"
