"""Read a TurboDiffusion `.pth` safely: only tensors, mapped into memory, all names checked."""

from __future__ import annotations

import logging
import math
import pickle
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import torch
from torch import Tensor

from turbo_rcm_patch.errors import CheckpointError, CheckpointKeysError
from turbo_rcm_patch.interrupts import kept_apart
from turbo_rcm_patch.turbodiffusion.archive import check_archive, check_sums
from turbo_rcm_patch.turbodiffusion.distributed import (
    StoredTensor,
    dcp_metadata,
    list_dcp,
    load_dcp,
)
from turbo_rcm_patch.turbodiffusion.keys import SLA_LINEAR, Name, Sizes, blocks_of, names, sizes_of

_log = logging.getLogger(__name__)

#: Called with a stage, and how much of how much is done.
Progress = Callable[[str, int, int], None]

#: What wrappers put between a module and its parameters.
_WRAPPERS: Final = {
    *("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "module"),
}
#: Prefixes under which training keeps a network.
_ROOTS: Final = ("net.", "model.")
#: The tensor that shows where a network is: "net_ema.patch_embedding.weight" is in "net_ema".
_ANCHOR: Final = "patch_embedding.weight"
#: How deep a network may lie in dictionaries.
_DEPTH: Final = 4
#: How the name of a container without networks begins.
_OPTIMIZER: Final = "optim"
#: A part of a name that means an average over training.
_AVERAGE: Final = re.compile(r"(^|[._])(ema|averaged?)([._]|$)", re.IGNORECASE)
#: The name in torch's refusal of a file with more than tensors.
_GLOBAL: Final = re.compile(r"GLOBAL ([\w.]+)|(?:class|global|function) ([\w.]+\.[\w.]+)")
#: Names that an error lists of each kind.
_LISTED: Final = 12


class Wanted(NamedTuple):
    """A tensor that must exist: the shapes it may have, and its dtype; None for any float."""

    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype | None = None

    def fits(self, tensor: Tensor) -> bool:
        """Whether a tensor is as wanted."""
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
        left_out: Entries that hold no weights (`_extra_state`).
        network: Which network of the file it is ("model", "net_ema"); "" for one at the top.
        others: The networks of the file that were not taken.
    """

    tensors: dict[str, Tensor]
    sizes: Sizes
    left_out: tuple[str, ...] = ()
    network: str = ""
    others: tuple[str, ...] = ()

    @property
    def quantised(self) -> bool:
        """Whether Linears are in int8."""
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
        path: The `.pth` file, or a folder of torch.distributed.checkpoint (DCP), of which the
            network is read into memory.
        heads: Attention heads, needed only where they are not of 128 channels and there is no SLA.
        network: Which network, of a file with several: a container or a prefix of its names
            ("model_ema", "net_ema"). By default the only one that is not an average (EMA); a
            warning in the log names those that were not taken.
        progress: Called with bytes while checksums are compared.

    Raises:
        CheckpointError: It cannot be read, is damaged, holds more than tensors or several networks
            to choose from, or is of no WanModel.
        CheckpointKeysError: Tensors are missing, unexpected or of other shapes.
    """
    source = Path(path)
    metadata = dcp_metadata(source) if source.is_dir() else None
    loaded = _load(source, progress) if metadata is None else list_dcp(metadata)
    chosen, others, found, strays = _network(loaded, source, network)
    if strays:
        _log.warning(
            "%s holds weights beside the network, which are left out: %s",
            path,
            _some(list(strays)),
        )
    if others and network is None:
        _log.warning(
            "%s holds several networks: %r is taken, and not %s. Choose with --network (network=)",
            path,
            chosen,
            ", ".join(repr(name) for name in others),
        )
    left_out = tuple(sorted(name for name in found if name.endswith("_extra_state")))
    found |= load_dcp(
        source, {n: x for n, x in found.items() if isinstance(x, StoredTensor)}, progress
    )
    tensors: dict[str, Tensor] = {}
    for name, value in found.items():
        if name not in left_out:
            tensors[name] = _tensor(f"{path}: {name}", value)
    sizes = sizes_of({name: tensor.shape for name, tensor in tensors.items()}, heads=heads)
    check_tensors(str(path), _wanted(names(sizes), tensors), tensors)
    return Checkpoint(tensors, sizes, left_out, chosen, others)


def read_tensors(path: str | Path, anchor: str) -> dict[str, Tensor]:
    """The tensors of another network than a transformer, as safely as `read_checkpoint`.

    Args:
        path: The `.pth` file.
        anchor: A tensor that it has, to find it in a container or under a prefix.

    Raises:
        CheckpointError: It cannot be read, is damaged, holds more than tensors, or no such one.
    """
    source = Path(path).expanduser()
    found = _network(_load(source), source, None, anchor).entries
    if anchor not in found:
        raise CheckpointError(
            str(path), expected=f"a network with {anchor}", got=", ".join(sorted(found)[:4])
        )
    return {name: _tensor(f"{path}: {name}", value) for name, value in found.items()}


def _tensor(name: str, value: object) -> Tensor:
    if not isinstance(value, Tensor):
        raise CheckpointError(name, expected="a tensor", got=f"a {type(value).__name__}")
    return _whole(name, value)


def open_width(path: str | Path) -> int:
    """Channels of a token in a checkpoint that does not show its number of heads; 0 in any other.

    Raises:
        CheckpointError: It cannot be read, or holds more than tensors.
    """
    source = Path(path)
    metadata = dcp_metadata(source) if source.is_dir() else None
    loaded = _load(source, sums=False) if metadata is None else list_dcp(metadata)
    found = _network(loaded, source, None).entries
    weight = found.get(_ANCHOR)
    sla = any(name.startswith(f"blocks.0.{SLA_LINEAR[0]}.") for name in found)
    if sla or not isinstance(weight, Tensor | StoredTensor) or not weight.shape:
        return 0
    return weight.shape[0]


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
            wanted[int8] = Wanted((name.shape,), torch.int8)
            wanted[scale] = Wanted((blocks_of(name.shape),))
        else:
            # Wan's own files have the patch embedding as a convolution.
            wanted[name.theirs] = Wanted((name.shape, name.our_shape))
    return wanted


@kept_apart()
def _load(path: Path, progress: Progress | None = None, *, sums: bool = True) -> object:
    if not path.is_file():
        folder = " is a folder" if path.is_dir() else ""
        raise CheckpointError(
            f"{path}{folder}" if folder else f"no such file: {path}",
            expected="a TurboDiffusion .pth, or a folder of torch.distributed.checkpoint",
            remedy="A folder of diffusers goes back to a .pth with --back" if folder else "",
        )
    try:
        with path.open("rb") as file:
            records = check_archive(file, str(path))
            if sums:
                check_sums(file, str(path), records, progress)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror})") from error
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
            f"{path} is not a torch checkpoint, or contains more than tensors; "
            "nothing in it was executed",
            got=_asked_for(error),
            remedy="Download it again, or save its state dict alone in the program that wrote it",
        ) from error
    except Exception as error:  # Of what a file of any content leads to.
        raise CheckpointError(
            f"{path} is not a torch checkpoint, or is incomplete ({type(error).__name__}: "
            f"{_quoted(error)})",
            remedy="Download the file again",
        ) from error


def _asked_for(error: pickle.UnpicklingError) -> str:
    """Name what a file tried to run, from torch's refusal, without its advice to trust it."""
    name = _GLOBAL.search(str(error))
    return f"one that asks for {name[1] or name[2]}" if name else "something else"


def _quoted(error: BaseException) -> str:
    """The first line of torch's message, unless it is advice to read the file unsafely."""
    text = str(error).strip()
    if not text or "weights_only" in text.splitlines()[0]:
        return "no message" if not text else "of a kind that cannot be read safely"
    return text.splitlines()[0][:200]


class _Found(NamedTuple):
    """A network of a file: its name, the names of the others, its entries without container and
    prefix, and where there are weights that belong to no network."""

    name: str
    others: tuple[str, ...]
    entries: dict[str, object]
    strays: tuple[str, ...]


def _network(loaded: object, path: Path, asked: str | None, anchor: str = _ANCHOR) -> _Found:
    """Find one network in a file by its anchor (the patch embedding of a transformer): at the top
    level, in a container, under a prefix, or among several."""
    if not isinstance(loaded, Mapping):
        raise CheckpointError(
            str(path), expected="a dictionary of tensors", got=f"a {type(loaded).__name__}"
        )
    found, strays = _collect(loaded, path, anchor)
    if not found:
        bare, twice = _bare(loaded, _ROOTS)
        _refuse_twice(twice, path)
        return _Found("", (), bare, ())  # Whose names the caller refuses.
    chosen = _chosen(sorted(found), path, asked)
    others = tuple(sorted(set(found) - {chosen}))
    entries, beside = found[chosen]
    weights = {name: value for name, value in beside.items() if _is_weight(value)}
    if asked is None:  # What belongs to no network is refused by name.
        entries = weights | entries
    else:
        strays += weights
    if not others:  # Then a lone entry under a prefix is this one's too.
        entries, twice = _bare(entries, _ROOTS)
        _refuse_twice(twice, path)
    return _Found(chosen, others, entries, tuple(sorted(strays)))


def _collect(
    loaded: Mapping[Any, object], path: Path, anchor: str
) -> tuple[dict[str, tuple[dict[str, object], dict[str, object]]], list[str]]:
    """Every network of a file, and where there are weights of none.

    Returns:
        By name, the entries of a network, and what lies at its level and belongs to none; and the
        names of other weights, or of the containers that they are in.
    """
    found: dict[str, tuple[dict[str, object], dict[str, object]]] = {}
    strays: list[str] = []
    # The shallowest first. Each dictionary is opened once: one that holds itself has no end.
    queue: deque[tuple[Mapping[Any, object], tuple[str, ...]]] = deque([(loaded, ())])
    opened: dict[int, dict[str, tuple[dict[str, object], dict[str, object]]]] = {}
    while queue:
        entries, containers = queue.popleft()
        again = id(entries) in opened
        networks = opened[id(entries)] if again else _networks(entries, path, anchor)
        opened[id(entries)] = networks
        for root, network in networks.items():
            found[".".join((*containers, *root.split(".")[:-1]))] = network
        if again:
            continue
        if not networks:
            named = [str(key) for key, value in entries.items() if _is_weight(value)]
            strays += [".".join(containers)] if containers and named else named
        for key, value in entries.items():
            inner = isinstance(value, Mapping) and len(containers) < _DEPTH
            if inner and not str(key).lower().startswith(_OPTIMIZER):
                queue.append((cast("Mapping[Any, object]", value), (*containers, str(key))))
    return found, strays


def _networks(
    entries: Mapping[Any, object], path: Path, anchor: str
) -> dict[str, tuple[dict[str, object], dict[str, object]]]:
    """The networks at one level, by prefix: the entries of each, and those that are of none of
    several. With one they are its own, so that the caller refuses them by name."""
    bare, twice = _bare(entries)
    roots = [
        name.removesuffix(anchor)
        for name, value in bare.items()
        if f".{name}".endswith(f".{anchor}") and isinstance(value, Tensor | StoredTensor)
    ]
    _refuse_twice([name for name in twice if name.startswith(tuple(roots))], path)
    inside = {}
    for root in sorted(roots, key=len, reverse=True):
        names = [name for name in bare if name.startswith(root)]
        inside[root] = {name.removeprefix(root): bare.pop(name) for name in names}
    beside = {name: value for name, value in bare.items() if not isinstance(value, Mapping)}
    if len(inside) == 1:
        return {root: (beside | network, {}) for root, network in inside.items()}
    return {root: (network, beside) for root, network in inside.items()}


def _is_weight(value: object) -> bool:
    """Whether a value may be a network's, and not a counter, the state of a generator or an
    object."""
    if not isinstance(value, Tensor | StoredTensor):
        return False
    return value.dtype.is_floating_point and math.prod(value.shape) > 1


def _chosen(names: list[str], path: Path, asked: str | None) -> str:
    """The network with the given name; else the only one, or the only one without averaging."""
    if asked is not None:
        fitting = [name for name in names if name == asked]
        fitting = fitting or [name for name in names if asked in name.split(".")]
    else:
        fitting = [name for name in names if not _AVERAGE.search(name)] or names
    if len(fitting) == 1:
        return fitting[0]
    shown = ", ".join(repr(name) for name in names)
    raise CheckpointError(
        f"{path} holds {len(names)} networks" if asked is None else f"--network {asked}",
        expected="a name that fits one of them",
        got=shown if asked is None else f"{len(fitting)} that fit, of {shown}",
        remedy="Choose one with --network NAME (network=)",
    )


def _bare(
    entries: Mapping[Any, object], roots: tuple[str, ...] = ()
) -> tuple[dict[str, object], list[str]]:
    """Entries by their names without prefixes and without what wrappers put between modules, and
    the names that more than one of them has then."""
    result: dict[str, object] = {}
    twice = []
    for key, value in entries.items():
        name = ".".join(part for part in str(key).split(".") if part not in _WRAPPERS)
        for root in roots:
            name = name.removeprefix(root)
        if name in result:
            twice.append(name)
        result[name] = value
    return result, twice


def _refuse_twice(names: list[str], path: Path) -> None:
    if names:
        raise CheckpointError(
            f"{path}: two entries have the same name, {names[0]}, once prefixes are removed",
            remedy="Keep one network in the file",
        )


def _whole(name: str, tensor: Tensor) -> Tensor:
    """A plain tensor, or the only shard of one that was sharded."""
    if tensor.is_meta or tensor.is_nested or tensor.layout is not torch.strided:
        raise CheckpointError(
            name,
            expected="a plain tensor with values",
            got=f"one on the device {tensor.device}, nested or of the layout {tensor.layout}",
            remedy="Save it as a dense tensor in the program that wrote it",
        )
    local = getattr(tensor, "to_local", None)
    part: Tensor = tensor.detach() if local is None else local()
    if part.untyped_storage().nbytes() < part.nbytes:
        raise CheckpointError(
            f"{name} repeats its values to {part.nbytes} bytes",
            expected=f"the {part.untyped_storage().nbytes()} bytes that the file has of it",
            remedy="Save it as a contiguous tensor in the program that wrote it",
        )
    if part.shape != tensor.shape:
        raise CheckpointError(
            f"{name} is one shard of several",
            expected=f"all of {list(tensor.shape)}",
            got=str(list(part.shape)),
            remedy="Merge the shards with torch.distributed.checkpoint first",
        )
    return part.detach()
