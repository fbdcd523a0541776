"""SLA's projection, attached to diffusers' attention modules as buffers.

TurboDiffusion keeps `proj_l` in fp32 beside a network in bf16, so here it is kept as the bits of
its fp32 values: casting the model leaves it as it is.
"""

from __future__ import annotations

import inspect
import itertools
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from turbo_rcm_patch.errors import CheckpointError, ShapeError
from turbo_rcm_patch.patching.int8_weights import attached_int8, stands_for
from turbo_rcm_patch.patching.stored import (
    EXTRA_FILE,
    MARK,
    folder_proj_l,
    left_behind,
    mark_of,
    mark_of_tensors,
    places_of,
    remove_extra,
    write_extra,
)

#: Buffers of an attention that hold the bits of SLA's projection: weight [D, D], bias [D], int32.
PROJ_L: Final = ("turbo_proj_l_weight", "turbo_proj_l_bias")


def attach_proj_l(attention: nn.Module, weight: Tensor, bias: Tensor) -> None:
    """Give an attention the projection that makes it sparse-linear once the model is patched.

    Args:
        attention: Self-attention with heads of D channels.
        weight: [D, D], any float dtype.
        bias: [D], any float dtype.

    Raises:
        ShapeError: They do not belong to the heads of this attention.
    """
    dim = weight.shape[-1]
    heads, width = getattr(attention, "heads", 0), getattr(attention, "inner_dim", 0)
    expected = dim if not heads or not width else width // heads
    if tuple(weight.shape) != (expected,) * 2 or tuple(bias.shape) != (expected,):
        raise ShapeError(
            "proj_l",
            expected=f"a weight [{expected}, {expected}] and a bias [{expected}]",
            got=f"{list(weight.shape)} and {list(bias.shape)}",
        )
    detach_proj_l(attention)
    own = next(attention.parameters(), weight)
    device = weight.device if own.is_meta else own.device
    for name, given in zip(PROJ_L, (weight, bias), strict=True):
        values = given.detach().to(device, torch.float32).clone()
        attention.register_buffer(name, values.view(torch.int32), persistent=False)


def attached_proj_l(attention: nn.Module) -> tuple[Tensor, Tensor] | None:
    """The attached projection, or None.

    Returns:
        Weight [D, D] and bias [D], fp32, views of what is attached.
    """
    weight, bias = (attention._buffers.get(name) for name in PROJ_L)
    if weight is None or bias is None:
        return None
    return weight.view(torch.float32), bias.view(torch.float32)


def detach_proj_l(attention: nn.Module) -> None:
    """Take the projection away; nothing of it stays behind."""
    for name in PROJ_L:
        if name in attention._buffers:
            delattr(attention, name)


class SavesExtra:
    """Stands in for the `save_pretrained` of a transformer with `proj_l` or int8 weights: writes
    the extra file too, so that what is saved is a converted folder.

    It holds the transformer, so that a deep copy saves its own.
    """

    __slots__ = ("_model",)

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    @property
    def __signature__(self) -> inspect.Signature:
        """That of the class: a pipeline passes only what it finds there."""
        stock: Any = type(self._model)
        return inspect.signature(stock.save_pretrained.__get__(self._model))

    def __call__(
        self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any
    ) -> object:
        """As the class's own, with the extra file.

        Args:
            save_directory: The transformer folder.
            *args: For the class's own.
            **kwargs: Likewise.
        """
        model: Any = self._model
        proj_l = held_proj_l(model)
        extra = {
            f"{name}.proj_l.{part}": tensor.to("cpu", copy=True).contiguous()
            for name, pair in proj_l.items()
            for part, tensor in zip(("weight", "bias"), pair, strict=True)
        }
        for name, module in model.named_modules():
            int8 = attached_int8(module)
            # What was written through `.data`, as merging an adapter does, is not seen before.
            if int8 is not None and (module.weight.is_meta or stands_for(module.weight, *int8)):
                for part, tensor in zip(("int8_weight", "scale"), int8, strict=True):
                    extra[f"{name}.{part}"] = tensor.to("cpu", copy=True).contiguous()
        folder = Path(save_directory)
        if kwargs.get("is_main_process", args[0] if args else True) and not folder.is_file():
            if proj_l:
                model.register_to_config(**{MARK: mark_of_tensors(proj_l)})
            folder.mkdir(parents=True, exist_ok=True)
            # First, because the class may upload the folder.
            if extra:
                write_extra(folder, extra)
            elif not isinstance(mark_of(model.config), Mapping):
                remove_extra(folder)
        result: object = type(model).save_pretrained(model, save_directory, *args, **kwargs)
        return result


def held_proj_l(model: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    """Every attached `proj_l` of a model, by the path of its attention."""
    held = ((name, attached_proj_l(module)) for name, module in model.named_modules())
    return {name: pair for name, pair in held if pair is not None}


def save_with_extra(model: nn.Module) -> None:
    """Let `save_pretrained` of a diffusers model keep what is attached."""
    if hasattr(type(model), "save_pretrained") and "save_pretrained" not in model.__dict__:
        model.save_pretrained = SavesExtra(model)  # type: ignore[assignment]


def save_as_class(model: nn.Module) -> None:
    """Take `save_with_extra` back."""
    if isinstance(model.__dict__.get("save_pretrained"), SavesExtra):
        del model.__dict__["save_pretrained"]


def mark_sla(model: nn.Module, mark: object) -> None:
    """Say in a diffusers model's configuration which `proj_l` belong to it; None: dense is meant.

    `patch_model` then does not look for them beside the weights.
    """
    register = getattr(model, "register_to_config", None)
    if register is not None:
        register(**{MARK: mark})


@dataclass(slots=True, eq=False)
class Recovered:
    """What `recover_proj_l` attached to a model.

    Attributes:
        model: The transformer.
        attentions: Those that got their `proj_l`.
        saves: Whether its `save_pretrained` was replaced.
    """

    model: nn.Module
    attentions: list[nn.Module] = field(default_factory=list)
    saves: bool = False

    def undo(self) -> None:
        """Take it away again."""
        for attention in self.attentions:
            detach_proj_l(attention)
        self.attentions.clear()
        if self.saves:
            save_as_class(self.model)
            self.saves = False


def recover_proj_l(model: nn.Module, path: str = "") -> Recovered:
    """Attach the `proj_l` that a transformer lost when a stock class loaded it.

    They are looked for on this disk: beside the weights that it was loaded from, and, by the mark
    in its configuration, where it was saved from. Nothing changes in a model that holds its
    `proj_l`, that has none, or whose user called `unload_extra`.

    Args:
        model: A transformer of any family.
        path: Where it is in what the user passed, for the error.

    Returns:
        What was attached, to be taken away by `undo`.

    Raises:
        CheckpointError: Its configuration says that it has SLA, and they are nowhere.
    """
    result = Recovered(model)
    mark = mark_of(getattr(model, "config", None))
    held = held_proj_l(model)
    if mark is None or (held and not isinstance(mark, Mapping)):
        return result
    if isinstance(mark, Mapping) and len(held) >= mark["count"]:
        return result
    stored = _stored(model, mark, path or type(model).__name__)
    modules = dict(model.named_modules())
    try:
        for name, (weight, bias) in stored.items():
            attention = modules.get(name)
            if attention is None:
                raise CheckpointError(
                    f"{path or type(model).__name__}: proj_l of {name}",
                    expected="an attention of the model",
                    got="no such module",
                    remedy="Load the model and its weights from the same folder",
                )
            if name not in held:
                result.attentions.append(attention)
                attach_proj_l(attention, weight, bias)
        if result.attentions and "save_pretrained" not in model.__dict__:
            save_with_extra(model)
            result.saves = isinstance(model.__dict__.get("save_pretrained"), SavesExtra)
    except BaseException:
        result.undo()
        raise
    return result


def _stored(model: nn.Module, mark: object, path: str) -> dict[str, tuple[Tensor, Tensor]]:
    """The `proj_l` on disk that belong to a model."""
    if not isinstance(mark, Mapping):
        return _unmarked(next(places_of(model), []), path)
    looked = []
    for place in itertools.chain.from_iterable(places_of(model)):
        looked.append(str(place))
        try:
            found = folder_proj_l(place)
        except CheckpointError as error:
            looked[-1] += f" ({error.what})"
            continue
        if found and mark_of_tensors(found) == mark:
            return found
    raise CheckpointError(
        f"{path}: its configuration says that it has SLA in {mark['count']} attentions, but their "
        "proj_l are missing, and its weights were not trained for dense attention",
        expected=f"{EXTRA_FILE} beside the weights, as `convert` writes it",
        got=f"none of these weights in {', '.join(looked) or 'any folder on this disk'}",
        remedy=f"Put {EXTRA_FILE} of the converted folder beside the weights, or call "
        "load_extra(transformer, converted_folder) before patch_model. If dense attention is "
        "meant, call unload_extra(transformer) first",
    )


def _unmarked(near: list[Path], path: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Of a folder that says nothing: converted by others, or before there was a mark."""
    found = []
    for place in near:
        try:
            proj_l = {} if left_behind(place) else folder_proj_l(place)
        except CheckpointError:
            if (place / EXTRA_FILE).is_file():
                raise
            proj_l = {}  # The model was loaded from other files than these.
        if proj_l:
            found.append((place, proj_l))
    if len(found) > 1:
        raise CheckpointError(
            f"{path}: two experts have SLA, and nothing says which of them it is",
            expected="one folder with proj_l",
            got=" and ".join(str(place) for place, _ in found),
            remedy="Call load_extra(transformer, folder) before patch_model",
        )
    return found[0][1] if found else {}


@contextmanager
def recovered_proj_l(*models: nn.Module) -> Iterator[None]:
    """`recover_proj_l` for the length of a `with` block."""
    done: list[Recovered] = []
    try:
        for model in models:
            done.append(recover_proj_l(model))
        yield
    finally:
        for one in done:
            one.undo()
