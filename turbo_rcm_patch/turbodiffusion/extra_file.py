"""What lies beside a model's weights on disk: SLA's `proj_l` and int8 weights.

Stock classes have no place for them, so they are in a file of their own, `EXTRA_FILE`, and the
entry `MARK` of config.json says that there are `proj_l` and which. Diffusers carries entries that
begin with an underscore through `from_pretrained` and `save_pretrained`, so a model that lost its
`proj_l` on the way is recognised. Folders that others converted have the `proj_l` among the
weights, where stock classes drop them.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from turbo_rcm_patch.errors import CheckpointError
from turbo_rcm_patch.patching.int8_weights import attached_int8, stands_for
from turbo_rcm_patch.patching.sla import MARK, held_proj_l

#: The file of everything that diffusers' class has no place for.
EXTRA_FILE: Final = "turbo_extra.safetensors"
#: Which version of the extra file it is; one entry, because their order in a file is left open.
#: Since version 2 config.json marks its `proj_l`, so that a file of other weights is recognised.
EXTRA_METADATA: Final = {"turbo_rcm_patch": "2"}
#: diffusers' name of a file of weights.
WEIGHTS: Final = "diffusion_pytorch_model"

#: As this library names SLA's Linear, and as others do who kept TurboDiffusion's module names.
_PROJ_L: Final = re.compile(
    r"((?:.+\.)?attn1)(?:\.attn_op)?(?:\.local_attn)?\.proj_l\.(weight|bias)"
)

#: Attention -> weight [D, D] and bias [D].
ProjL = Mapping[str, tuple[Tensor, Tensor]]


def proj_l_key(key: str) -> tuple[str, str] | None:
    """The attention and the part ("weight", "bias") that a tensor's name means, or None."""
    found = _PROJ_L.fullmatch(key)
    return (found[1], found[2]) if found else None


def mark_of_tensors(proj_l: ProjL) -> dict[str, object]:
    """The mark of some `proj_l`: how many, and a digest of their values in fp32.

    Args:
        proj_l: By attention, weight [D, D] and bias [D] of any float dtype.
    """
    digest = hashlib.blake2b(digest_size=8)
    for name in sorted(proj_l):
        digest.update(name.encode())
        for part in proj_l[name]:
            values = part.detach().to("cpu", torch.float32).contiguous()
            digest.update(values.view(torch.uint8).numpy().tobytes())
    return {"count": len(proj_l), "digest": digest.hexdigest()}


def mark_of(config: object) -> object:
    """The mark in a model's configuration: a dictionary, None if dense is meant, "" if there is
    none.

    Raises:
        CheckpointError: The entry is something else.
    """
    get: Callable[..., Any] | None = getattr(config, "get", None)
    mark = "" if get is None else get(MARK, "")
    if mark is None or mark == "":
        return mark
    if isinstance(mark, Mapping):
        count, digest = mark.get("count"), mark.get("digest")
        if isinstance(count, int) and isinstance(digest, str):
            return mark
    raise CheckpointError(
        f"config.json: {MARK}", expected='{"count": …, "digest": …} or null', got=repr(mark)[:80]
    )


def read_config(folder: Path) -> dict[str, Any]:
    """A folder's config.json; nothing if there is none that can be read."""
    try:
        value = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def shard_path(folder: Path, name: object, where: Path) -> Path:
    """The file of weights that an index names, which has to lie in the index's own folder.

    Args:
        folder: Of the index.
        name: What it says.
        where: The index, for the error.

    Raises:
        CheckpointError: The name leads anywhere else, or is none of a safetensors file.
    """
    plain = isinstance(name, str) and name.endswith(".safetensors")
    # By name, not by where a link leads: the hub's cache keeps its files elsewhere.
    if not plain or name in ("", ".", "..") or "/" in str(name) or "\\" in str(name):
        raise CheckpointError(
            f"{where}: weight_map",
            expected="names of safetensors files in the same folder",
            got=repr(name)[:120],
            remedy="Do not use this folder unless you know who wrote it, and why",
        )
    return folder / str(name)


def weight_files(folder: Path) -> list[Path]:
    """The files of weights; another variant may lie beside those that the index names.

    Raises:
        CheckpointError: The index is damaged, or names files elsewhere.
    """
    index = folder / f"{WEIGHTS}.safetensors.index.json"
    if not index.is_file():
        return [folder / f"{WEIGHTS}.safetensors"]
    try:
        listing = json.loads(index.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{index} is not valid JSON ({error})") from error
    names = listing.get("weight_map") if isinstance(listing, dict) else None
    if not isinstance(names, dict) or not names:
        raise CheckpointError(str(index), expected='a "weight_map"', got="none")
    return sorted({shard_path(folder, name, index) for name in names.values()})


def folder_proj_l(folder: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """Every `proj_l` of a transformer folder, from the extra file or from among the weights.

    Returns:
        By attention ("blocks.0.attn1"), weight [D, D] and bias [D], in the file's dtype; empty if
        there is none.

    Raises:
        CheckpointError: A file is damaged, or a weight lacks its bias.
    """
    extra = folder / EXTRA_FILE
    found = _read(folder, [extra]) if extra.is_file() else {}
    if found:
        return found
    files = [path for path in weight_files(folder) if path.is_file()]
    return _read(folder, files or sorted(folder.glob(f"{WEIGHTS}*.safetensors")))


def _read(folder: Path, files: Iterable[Path]) -> dict[str, tuple[Tensor, Tensor]]:
    parts: dict[str, dict[str, Tensor]] = {}
    for path in files:
        for owner, part, tensor in _tensors(path):
            parts.setdefault(owner, {})[part] = tensor
    return {owner: _pair(folder, owner, parts[owner]) for owner in parts}


def _pair(path: Path, owner: str, parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    if parts.keys() != {"weight", "bias"}:
        raise CheckpointError(
            f"{path}: proj_l of {owner}", expected="a weight and a bias", got=" and ".join(parts)
        )
    return parts["weight"], parts["bias"]


def _tensors(path: Path) -> Iterator[tuple[str, str, Tensor]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118  not a dictionary
                owner = proj_l_key(key)
                if owner is not None:
                    yield *owner, file.get_tensor(key)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} is missing, damaged or incomplete ({error})",
            remedy="Write or download it again",
        ) from error


def left_behind(folder: Path) -> bool:
    """Whether a folder's extra file is of other weights, over which these were saved: since its
    version 2 config.json marks what belongs to it."""
    extra = folder / EXTRA_FILE
    return extra.is_file() and _version(extra) >= 2 and not mark_of(read_config(folder))


def check_mark(folder: Path, proj_l: ProjL, mark: object) -> None:
    """Compare the `proj_l` of a folder with its config.json and with a model's configuration.

    Args:
        folder: The transformer folder.
        proj_l: What `folder_proj_l` found there.
        mark: What `mark_of` returned of the model that they are for.

    Raises:
        CheckpointError: They belong to other weights.
    """
    own, there = mark_of_tensors(proj_l), mark_of(read_config(folder))
    if left_behind(folder) or (there and there != own):
        raise CheckpointError(
            f"{folder / EXTRA_FILE}: proj_l of {len(proj_l)} attentions",
            expected="those that config.json beside it marks"
            if there
            else "none: config.json beside it marks none, so other weights have left them there",
            got=f"digest {own['digest']}",
            remedy="Convert or download the folder again, or remove that file if it does not "
            "belong to the weights",
        )
    if isinstance(mark, Mapping) and mark != own:
        raise CheckpointError(
            f"{folder}: proj_l of {len(proj_l)} attentions",
            expected="those that the model's configuration marks",
            got=f"digest {own['digest']}",
            remedy="Pass the folder that the model came from; of two experts each has its own",
        )


def _version(path: Path) -> int:
    """Of an extra file; 1 where it does not say, and 0 if it cannot be read."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            said = (file.metadata() or {}).get("turbo_rcm_patch", "1")
    except (SafetensorError, OSError):
        return 0
    return int(said) if said.isdecimal() else 1


def remove_extra(folder: Path) -> None:
    """Remove an extra file that this library wrote: a model without extra tensors is saved over
    what it belonged to."""
    path = folder / EXTRA_FILE
    if path.is_file() and _version(path) >= 2:
        path.unlink()


def write_extra(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write the extra file; it is whole or not there.

    Args:
        folder: The transformer folder.
        tensors: By name, each in memory of its own.
    """
    from safetensors.torch import save_file

    beside = folder / f".{EXTRA_FILE}.partial"
    try:
        save_file(dict(tensors), beside, metadata=EXTRA_METADATA)
        os.replace(beside, folder / EXTRA_FILE)
    finally:
        beside.unlink(missing_ok=True)


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
