"""Attach SLA's `proj_l` and int8 weights to a loaded transformer, and detach them.

Stock classes have no place for either. int8 weights are multiplied as they are, with their scale
per block, so no weight is rounded twice; only activations are rounded. For one Linear of 1536 x
1536 normal values the error against its dequantised weight is then 0.0081 (relative L2). With
TurboDiffusion's own blocks of activations it is 0.0092, and with a weight that is quantised again
by row 0.0114.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from turbo_rcm_patch.checkpoints.extra_file import (
    EXTRA_FILE,
    StoredTensors,
    check_mark,
    folder_proj_l,
    mark_of,
    mark_of_tensors,
    write_extra,
)
from turbo_rcm_patch.checkpoints.folder import (
    check_product,
    described,
    stored_int8,
    transformer_folder,
)
from turbo_rcm_patch.errors import AlreadyPatchedError, CheckpointError
from turbo_rcm_patch.patching.int8_weights import (
    SCALE,
    WEIGHT,
    attach_int8,
    attached_int8,
    detach_int8,
    scale_bits,
    stands_for,
)
from turbo_rcm_patch.patching.record import record_of
from turbo_rcm_patch.patching.sla import MARK, attach_proj_l, detach_proj_l, held_proj_l


@dataclass(frozen=True, slots=True)
class Extra:
    """The tensors that `load_extra` attached.

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
    takes both away. Load first, then patch: a patched transformer refuses `proj_l`, because
    patching has already chosen how its attentions run.

    Args:
        transformer: diffusers' WanTransformer3DModel.
        folder: The transformer folder, or the pipeline folder with it. The `proj_l` may also be
            among the weights, as in folders that other programs converted.
        int8: Attach int8 weights. False takes away those that are attached.
        proj_l: Attach `proj_l`. False means dense attention: those that are attached are taken
            away, from a patched transformer too.

    Returns:
        The names of the modules that it attached to.

    Raises:
        AlreadyPatchedError: The transformer is patched, and the file holds `proj_l`.
        CheckpointError: There is no such file, or it belongs to other weights.

    After an error nothing has changed.
    """
    place = transformer_folder(folder)
    path = place / EXTRA_FILE
    mark = mark_of(getattr(transformer, "config", None))
    found = folder_proj_l(place)
    if not found and not path.is_file():
        raise CheckpointError(
            f"{place} has no {EXTRA_FILE}",
            expected="a folder that `python -m turbo_rcm_patch convert` wrote from a checkpoint "
            "with SLA or int8 weights",
        )
    if found or (proj_l and isinstance(mark, Mapping)):
        check_mark(place, found, mark)
    stored = StoredTensors(*([path] if path.is_file() else []))
    path = path if path.is_file() else place
    modules = dict(transformer.named_modules())
    linears: dict[str, tuple[nn.Linear, Tensor, Tensor]] = {}
    for key in stored.listing if int8 else ():
        name, _, kind = key.rpartition(".")
        if kind == WEIGHT:
            linears[name] = _int8_of(path, name, modules.get(name), stored)
    attentions = found if proj_l else {}
    for name, (weight, _) in attentions.items():
        _check_attention(path, name, modules.get(name), weight)
    if attentions and record_of(transformer) is not None:
        raise AlreadyPatchedError(
            f"{path}: proj_l of {len(attentions)} attentions",
            expected="a transformer that is patched after its proj_l is attached",
            got="a patched one",
            remedy="Call unload_extra or unpatch_model, then load_extra, then patch_model",
        )
    if found or (not proj_l and held_proj_l(transformer)):
        _mark_sla(transformer, mark_of_tensors(found) if proj_l else None)
    for module in modules.values():
        if not int8:
            detach_int8(module)
        if not proj_l:
            detach_proj_l(module)
    for linear, weight, scale in linears.values():  # After all checks.
        attach_int8(linear, weight, scale)
    for name, (weight, bias) in attentions.items():
        attach_proj_l(modules[name], weight, bias)
    if hasattr(type(transformer), "save_pretrained"):
        transformer.__dict__.setdefault("save_pretrained", _SavesExtra(transformer))
    return Extra(path, tuple(linears), tuple(attentions))


def unload_extra(transformer: nn.Module) -> None:
    """Remove the tensors that `load_extra` attached. The model is then as it was before.

    A patched one runs dense attention from its next forward on, and with int8 weights of its own.
    So does one that is patched later: its configuration says that dense attention is meant.
    """
    if held_proj_l(transformer) or mark_of(getattr(transformer, "config", None)):
        _mark_sla(transformer, None)
    if isinstance(transformer.__dict__.get("save_pretrained"), _SavesExtra):
        del transformer.__dict__["save_pretrained"]
    for module in transformer.modules():
        detach_int8(module)
        detach_proj_l(module)


def _mark_sla(model: nn.Module, mark: object) -> None:
    """Say in a diffusers model's configuration which `proj_l` belong to it; None: dense is meant.

    A model whose marked `proj_l` are missing is not patched.
    """
    register = getattr(model, "register_to_config", None)
    if register is not None:
        register(**{MARK: mark})


def _int8_of(
    path: Path, name: str, module: nn.Module | None, stored: StoredTensors
) -> tuple[nn.Linear, Tensor, Tensor]:
    """A Linear and the int8 weight and scales that a file has of it, on its device."""
    found = stored_int8(str(path), name, module, stored)
    assert isinstance(module, nn.Linear)
    if module.weight.is_meta:
        raise CheckpointError(f"{name}.weight is on the meta device", expected="loaded weights")
    int8, scale = (part.to(module.weight.device) for part in found)
    check_product(f"{path}: {name}.weight", module.weight, int8, scale)
    return module, int8, scale


def _check_attention(path: Path, name: str, module: nn.Module | None, weight: Tensor) -> None:
    shape = tuple(weight.shape)
    heads = getattr(module, "heads", None)
    width = getattr(getattr(module, "to_v", None), "out_features", 0)
    if not heads or shape != (width // heads,) * 2:
        raise CheckpointError(
            f"{path}: {name}",
            expected=f"attention with heads of {shape[0]} channels",
            got=described(module),
        )


class _SavesExtra:
    """Replaces the `save_pretrained` of a transformer with `proj_l` or int8 weights: writes
    the extra file too, so that the saved folder is a converted one.

    It holds the transformer, so that a deep copy saves its own.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    @property
    def __signature__(self) -> inspect.Signature:
        """That of the class: a pipeline passes only arguments that it finds there."""
        stock: Any = type(self._model)
        return inspect.signature(stock.save_pretrained.__get__(self._model))

    def __call__(
        self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any
    ) -> object:
        model: Any = self._model
        folder, proj_l = Path(save_directory), held_proj_l(model)
        if kwargs.get("is_main_process", args[0] if args else True) and not folder.is_file():
            parts = {f"{name}.proj_l": (("weight", "bias"), pair) for name, pair in proj_l.items()}
            for name, module in model.named_modules():
                int8 = attached_int8(module)
                # A write through `.data`, as merging an adapter does, is not seen before.
                if int8 and (module.weight.is_meta or stands_for(module.weight, *int8)):
                    parts[name] = ((WEIGHT, SCALE), (int8[0], scale_bits(int8[1])))
            extra = {
                f"{name}.{part}": tensor.to("cpu", copy=True).contiguous()
                for name, (kinds, pair) in parts.items()
                for part, tensor in zip(kinds, pair, strict=True)
            }
            if proj_l:
                model.register_to_config(**{MARK: mark_of_tensors(proj_l)})
            folder.mkdir(parents=True, exist_ok=True)
            # First, because the class may upload the folder.
            if extra:
                write_extra(folder, extra)
            elif not isinstance(mark_of(model.config), Mapping):
                (folder / EXTRA_FILE).unlink(missing_ok=True)  # It is of other weights.
        result: object = type(model).save_pretrained(model, save_directory, *args, **kwargs)
        return result
