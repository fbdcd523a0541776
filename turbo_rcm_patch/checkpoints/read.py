"""A TurboDiffusion `.pth`, read safely: tensors only, mapped into memory, every name checked."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch import Tensor

from turbo_rcm_patch.checkpoints.keys import SLA_LINEAR, Name, Sizes, blocks_of, names, sizes_of
from turbo_rcm_patch.errors import CheckpointError, CheckpointKeysError

__all__ = ["Checkpoint", "Wanted", "check_tensors", "open_width", "read_checkpoint"]

#: What wrappers put between a module and its parameters.
_WRAPPERS: Final = {
    *("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "module"),
}
#: Where training keeps the network itself.
_ROOTS: Final = ("net.", "model.")
#: Where a file keeps its tensors, if not at the top.
_CONTAINERS: Final = ("state_dict", "model", "net")
#: Names that an error lists of each kind.
_LISTED: Final = 12


class Wanted(NamedTuple):
    """A tensor that has to be there: the shapes it may have, and whether it is int8 or a float."""

    shapes: tuple[tuple[int, ...], ...]
    int8: bool = False

    def fits(self, tensor: Tensor) -> bool:
        """Whether a tensor is as wanted."""
        kind = tensor.dtype == torch.int8 if self.int8 else tensor.dtype.is_floating_point
        return kind and tuple(tensor.shape) in self.shapes

    def __str__(self) -> str:
        return f"{'int8' if self.int8 else 'float'} {list(self.shapes[0])}"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose names and shapes are those of a WanModel.

    Attributes:
        tensors: By TurboDiffusion's names, without prefixes, as they lie in the file.
        sizes: The model's.
        left_out: Entries that hold no weights (`_extra_state`).
    """

    tensors: dict[str, Tensor]
    sizes: Sizes
    left_out: tuple[str, ...] = ()

    @property
    def quantised(self) -> bool:
        """Whether Linears are in int8."""
        return any(name.endswith(".int8_weight") for name in self.tensors)


def read_checkpoint(path: str | Path, *, heads: int | None = None) -> Checkpoint:
    """Read a checkpoint of TurboDiffusion's WanModel, plain or `-quant`, with or without SLA.

    Nothing in the file is executed (`weights_only`), and its tensors stay on disk until they are
    used. Prefixes of training, compilation and checkpointing are taken off the names.

    Args:
        path: The `.pth` file.
        heads: Attention heads, needed only where they are not of 128 channels and there is no SLA.

    Raises:
        CheckpointError: It cannot be read, holds more than tensors, or is of no WanModel.
        CheckpointKeysError: Tensors are missing, unexpected or of other shapes.
    """
    found = _unwrapped(_load(Path(path)), Path(path))
    left_out = tuple(sorted(name for name in found if name.endswith("_extra_state")))
    tensors: dict[str, Tensor] = {}
    for name, value in found.items():
        if name in left_out:
            continue
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"{path}: {name}", expected="a tensor", got=f"a {type(value).__name__}"
            )
        tensors[name] = _whole(name, value)
    sizes = sizes_of({name: tensor.shape for name, tensor in tensors.items()}, heads=heads)
    check_tensors(str(path), _wanted(names(sizes), tensors), tensors)
    return Checkpoint(tensors, sizes, left_out)


def open_width(path: str | Path) -> int:
    """Channels of a token, in a checkpoint that does not show its heads; 0 in any other.

    Raises:
        CheckpointError: It cannot be read, or holds more than tensors.
    """
    found = _unwrapped(_load(Path(path)), Path(path))
    weight = found.get("patch_embedding.weight")
    if any(name.startswith(f"blocks.0.{SLA_LINEAR[0]}.") for name in found) or not isinstance(
        weight, Tensor
    ):
        return 0
    return weight.shape[0] if weight.ndim else 0


def check_tensors(where: str, wanted: Mapping[str, Wanted], tensors: Mapping[str, Tensor]) -> None:
    """Compare tensors with what has to be there.

    Raises:
        CheckpointKeysError: It lists what is missing, unexpected, or of another shape or kind.
    """
    missing = [f"{name} {want}" for name, want in wanted.items() if name not in tensors]
    unexpected = [
        f"{name} {list(tensor.shape)}" for name, tensor in tensors.items() if name not in wanted
    ]
    mismatched = [
        f"{name}: expected {want}, got {str(tensors[name].dtype).removeprefix('torch.')} "
        f"{list(tensors[name].shape)}"
        for name, want in wanted.items()
        if name in tensors and not want.fits(tensors[name])
    ]
    if missing or unexpected or mismatched:
        lists = {"missing": missing, "unexpected": unexpected, "mismatched": mismatched}
        error = CheckpointKeysError(
            f"{where}: {len(missing)} tensors are missing, {len(unexpected)} unexpected, "
            f"{len(mismatched)} mismatched",
            expected="the weights of one WanModel",
            got="; ".join(f"{kind}: {_some(found)}" for kind, found in lists.items() if found),
        )
        error.missing, error.unexpected, error.mismatched = map(tuple, lists.values())
        raise error


def _some(found: list[str]) -> str:
    more = f", and {len(found) - _LISTED} more" if len(found) > _LISTED else ""
    return ", ".join(found[:_LISTED]) + more


def _wanted(all_names: Iterable[Name], tensors: Mapping[str, Tensor]) -> dict[str, Wanted]:
    """Every Linear as the checkpoint has it, in int8 or not."""
    wanted = {}
    for name in all_names:
        int8, scale = name.their_int8
        if name.linear and int8 in tensors:
            wanted[int8] = Wanted((name.shape,), int8=True)
            wanted[scale] = Wanted((blocks_of(name.shape),))
        else:
            # Wan's own files have the patch embedding as a convolution.
            wanted[name.theirs] = Wanted((name.shape, name.our_shape))
    return wanted


def _load(path: Path) -> object:
    if not path.is_file():
        raise CheckpointError(f"no such file: {path}", expected="a TurboDiffusion .pth")
    if torch.distributed.is_available():
        import_module("torch.distributed.tensor")  # which lets sharded tensors be read
    try:
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap" not in str(error):
                raise
            return torch.load(path, map_location="cpu", weights_only=True)  # an old format
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} is not a torch checkpoint, or holds more than tensors; it was not executed",
            got=str(error).strip().splitlines()[0][:200],
            remedy="Download it again, or save its state dict alone in the program that wrote it",
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError, LookupError) as error:
        raise CheckpointError(
            f"{path} is not a torch checkpoint, or not all of one ({type(error).__name__}: "
            f"{str(error).strip().splitlines()[0][:200] if str(error).strip() else 'no message'})",
            remedy="Download the file again",
        ) from error


def _unwrapped(loaded: object, path: Path) -> dict[str, object]:
    for container in _CONTAINERS:
        inside = loaded.get(container) if isinstance(loaded, Mapping) else None
        if isinstance(inside, Mapping):
            loaded = inside
            break
    if not isinstance(loaded, Mapping):
        raise CheckpointError(
            str(path), expected="a dictionary of tensors", got=f"a {type(loaded).__name__}"
        )
    result: dict[str, object] = {}
    for key, value in loaded.items():
        name = ".".join(part for part in str(key).split(".") if part not in _WRAPPERS)
        for root in _ROOTS:
            name = name.removeprefix(root)
        if name in result:
            raise CheckpointError(
                f"{path}: two entries are {name} without their prefixes",
                remedy="Keep one network in the file",
            )
        result[name] = value
    return result


def _whole(name: str, tensor: Tensor) -> Tensor:
    """A plain tensor; of one that was sharded, its only shard."""
    local = getattr(tensor, "to_local", None)
    if local is None:
        return tensor.detach()
    part: Tensor = local()
    if part.shape != tensor.shape:
        raise CheckpointError(
            f"{name} is one shard of several",
            expected=f"all of {list(tensor.shape)}",
            got=str(list(part.shape)),
            remedy="Merge the shards with torch.distributed.checkpoint first",
        )
    return part.detach()
