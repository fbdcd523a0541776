"""Read a TurboDiffusion `.pth` safely: only tensors, mapped into memory, all names checked."""

from __future__ import annotations

import logging
import pickle
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from turbo_rcm_patch.checkpoints.archive import check_archive
from turbo_rcm_patch.checkpoints.keys import Name, Sizes, blocks_of, names, sizes_of
from turbo_rcm_patch.errors import CheckpointError, CheckpointKeysError
from turbo_rcm_patch.interrupts import reraise_interrupts

_log = logging.getLogger(__name__)

#: Called with a stage, and how much of how much is done.
Progress = Callable[[str, int, int], None]

#: Parts of names that wrappers put between a module and its parameters.
_WRAPPERS: Final = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "module"}
#: The tensor that shows where a network is: "net_ema.patch_embedding.weight" is in "net_ema".
_ANCHOR: Final = "patch_embedding.weight"
#: Largest depth of nested dictionaries, and largest number of networks in a file.
_DEPTH, _NETWORKS = 4, 16
#: Beginning of the name of a container without networks.
_OPTIMIZER: Final = "optim"
#: End of the name of an entry that holds no weights.
_STATE: Final = "_extra_state"
#: The name in torch's refusal of a file with more than tensors.
_GLOBAL: Final = re.compile(r"GLOBAL ([\w.]+)|(?:class|global|function) ([\w.]+\.[\w.]+)")
#: Number of names that an error lists of each kind.
_LISTED: Final = 12


class Wanted(NamedTuple):
    """A tensor that must exist: the shapes it may have, and its dtype; None for any float."""

    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype | None = None

    def fits(self, tensor: Tensor) -> bool:
        """Return True if a tensor has such a shape and dtype."""
        floats = self.dtype is None and tensor.is_floating_point()
        return (floats or tensor.dtype == self.dtype) and tuple(tensor.shape) in self.shapes

    def __str__(self) -> str:
        kind = str(self.dtype or "float").removeprefix("torch.")
        return f"{kind} {list(self.shapes[0])}"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose names and shapes are those of a WanModel.

    Attributes:
        tensors: By TurboDiffusion's names, without prefixes, as they lie in the file.
        sizes: The model's.
    """

    tensors: dict[str, Tensor]
    sizes: Sizes

    @property
    def quantised(self) -> bool:
        """True if Linears are in int8."""
        return any(name.endswith(".int8_weight") for name in self.tensors)


def read_checkpoint(
    path: str | Path,
    *,
    heads: int | None = None,
    network: str | None = None,
    progress: Progress | None = None,
) -> Checkpoint:
    """Read a checkpoint of TurboDiffusion's WanModel, plain or `-quant`, with or without SLA.

    Nothing in the file is executed (`weights_only`), and its tensors stay on disk until they are
    used, after they were compared with the file's checksums. Prefixes of training, compilation and
    checkpointing are taken off the names.

    Args:
        path: The `.pth` file.
        heads: Attention heads, needed only where they are not of 128 channels and there is no SLA.
        network: The network to take from a file with several or with other weights: its place, or
            a part of it ("model_ema", "net_ema").
        progress: Called with bytes while checksums are compared.

    Raises:
        CheckpointError: The file cannot be read, is damaged, holds more than tensors, several
            networks to choose from or weights of no network, or is of no WanModel.
        CheckpointKeysError: Tensors are missing, unexpected or of other shapes.
    """
    networks, strays = _networks(_entries(read_archive(Path(path), progress), path))
    chosen = _chosen(sorted(networks), path, network)
    if strays and network is None:
        raise CheckpointError(
            f"{path} holds weights beside the network",
            expected="those of one WanModel",
            got=_some(strays),
            remedy=f"Leave them out with --network {chosen or 'NAME'} (network=)",
        )
    if strays:
        _log.warning("%s: weights beside the network are left out: %s", path, _some(strays))
    tensors = networks[chosen]
    for name, tensor in tensors.items():
        _check_plain(f"{path}: {name}", tensor)
    sizes = sizes_of({name: tensor.shape for name, tensor in tensors.items()}, heads=heads)
    check_tensors(str(path), _wanted(names(sizes), tensors), tensors)
    return Checkpoint(tensors, sizes)


def check_tensors(
    where: str,
    wanted: Mapping[str, Wanted],
    tensors: Mapping[str, Tensor],
    of: str = "one WanModel",
) -> None:
    """Compare tensors with those that must exist.

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
            expected=f"the weights of {of}",
            got="; ".join(f"{kind}: {_some(lines)}" for kind, lines in lists.items() if lines),
        )
        error.missing, error.unexpected, error.mismatched = map(tuple, lists.values())
        raise error


def _some(names: list[str]) -> str:
    more = f", and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


def _wanted(all_names: Iterable[Name], tensors: Mapping[str, Tensor]) -> dict[str, Wanted]:
    """The tensors of a checkpoint, each Linear in int8 if the checkpoint has it so."""
    wanted = {}
    for name in all_names:
        int8, scale = name.their_int8
        if name.linear and int8 in tensors:
            wanted[int8] = Wanted((name.shape,), torch.int8)
            wanted[scale] = Wanted((blocks_of(name.shape),))
        else:
            # Wan's own files have the patch embedding as a convolution.
            wanted[name.theirs] = Wanted((name.shape, name.our_shape))
    return wanted


@reraise_interrupts()
def read_archive(path: Path, progress: Progress | None = None) -> object:
    """Return what `torch.save` wrote, its tensors on disk until they are used. Nothing in the file
    is executed.

    Raises:
        CheckpointError: It is missing, damaged, or holds more than tensors and plain data.
    """
    if not path.is_file():
        folder = path.is_dir()
        remedy = "Make a file of a distributed checkpoint: python -m torch.distributed.checkpoint."
        remedy += "format_utils dcp_to_torch DIR FILE"
        raise CheckpointError(
            f"{path} is a folder" if folder else f"no such file: {path}",
            expected="a TurboDiffusion .pth",
            remedy=remedy if folder else "",
        )
    try:
        with path.open("rb") as file:
            check_archive(file, str(path), progress)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror})") from error
    try:
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap" not in str(error):
                raise
            return torch.load(path, map_location="cpu", weights_only=True)  # an old format
    except pickle.UnpicklingError as error:
        # torch's own message advises reading the file unsafely.
        wanted = _GLOBAL.search(str(error))
        raise CheckpointError(
            f"{path} is not a torch checkpoint, or contains more than tensors; "
            "nothing in it was executed",
            got=f"one that asks for {wanted[1] or wanted[2]}" if wanted else "something else",
            remedy="Download it again, or save its state dict alone in the program that wrote it",
        ) from error
    except Exception as error:  # The content decides which.
        line = "" if "weights_only" in str(error) else str(error).strip().partition("\n")[0][:200]
        raise CheckpointError(
            f"{path} is not a torch checkpoint, or is incomplete ({type(error).__name__}: {line})",
            remedy="Download the file again",
        ) from error


def _entries(loaded: object, path: str | Path) -> dict[str, Tensor]:
    """The tensors of nested dictionaries, by all names on the way to each, joined by dots and
    without those of wrappers."""
    if not isinstance(loaded, Mapping):
        raise CheckpointError(
            str(path), expected="a dictionary of tensors", got=f"a {type(loaded).__name__}"
        )
    tensors: dict[str, Tensor] = {}
    # Each dictionary is opened once, because one that holds itself has no end.
    queue: deque[tuple[Mapping[Any, object], tuple[str, ...]]] = deque([(loaded, ())])
    opened = {id(loaded)}
    while queue:
        entries, containers = queue.popleft()
        for key, value in entries.items():
            parts = [part for part in str(key).split(".") if part not in _WRAPPERS]
            name = ".".join((*containers, *parts))
            if isinstance(value, Mapping):
                if not (
                    len(containers) >= _DEPTH
                    or id(value) in opened
                    or str(key).lower().startswith(_OPTIMIZER)
                ):
                    opened.add(id(value))
                    queue.append((value, (*containers, *parts)))
            elif isinstance(value, Tensor) and not name.endswith(_STATE):
                if name in tensors:
                    raise CheckpointError(
                        f"{path}: two entries have the same name, {name}, once prefixes are "
                        "removed",
                        remedy="Keep one network in the file",
                    )
                tensors[name] = value
    return tensors


def _networks(entries: dict[str, Tensor]) -> tuple[dict[str, dict[str, Tensor]], list[str]]:
    """Every network of a file, by its place, and the names of weights of none."""
    ends = [name for name in entries if f".{name}".endswith(f".{_ANCHOR}")]
    roots = sorted((name.removesuffix(_ANCHOR) for name in ends), key=len, reverse=True)
    if not roots:
        return {"": entries}, []  # The caller refuses their names.
    networks: dict[str, dict[str, Tensor]] = {root: {} for root in roots[:_NETWORKS]}
    strays = []
    for name, tensor in entries.items():
        root = next((root for root in networks if name.startswith(root)), None)
        if root is not None:
            networks[root][name.removeprefix(root)] = tensor
        elif tensor.is_floating_point() and tensor.numel() > 1:  # no counter or random state
            strays.append(name)
    return {root.removesuffix("."): tensors for root, tensors in networks.items()}, strays


def _chosen(names: list[str], path: str | Path, asked: str | None) -> str:
    """The only network of a file, or the one with the given name or part of a name."""
    fitting = names
    if asked is not None:
        parts = [name for name in names if asked in name.split(".")]
        fitting = [name for name in names if name == asked] or parts
    if len(fitting) == 1:
        return fitting[0]
    shown = ", ".join(repr(name) for name in names)
    raise CheckpointError(
        f"{path} holds {len(names)} networks" if asked is None else f"--network {asked}",
        expected="a name that fits one of them",
        got=shown if asked is None else f"{len(fitting)} that fit, of {shown}",
        remedy="Choose one with --network NAME (network=)",
    )


def _check_plain(name: str, tensor: Tensor) -> None:
    """Refuse a tensor that is not dense, or has fewer bytes in the file than in memory."""
    whole = type(tensor) in (Tensor, nn.Parameter) and not (tensor.is_meta or tensor.is_nested)
    whole = whole and tensor.layout is torch.strided
    if not whole or tensor.untyped_storage().nbytes() < tensor.nbytes:
        raise CheckpointError(
            name,
            expected="a plain, dense tensor with all its values in the file",
            got=f"a {type(tensor).__name__} on the device {tensor.device} that has not",
            remedy="Save it as a whole, contiguous tensor in the program that wrote it",
        )
