"""Read a folder of torch.distributed.checkpoint (DCP) without executing anything in it.

torch unpickles such a folder's `.metadata` without restrictions. Here it may only name what torch
itself puts there, and gets stand-ins for it. Files are looked for in the folder alone.
"""

from __future__ import annotations

import io
import math
import pickle
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import torch
from torch import Tensor

from turbo_rcm_patch.errors import CheckpointError
from turbo_rcm_patch.turbodiffusion.archive import LARGEST_PICKLE, check_archive, check_sums

_METADATA: Final = ".metadata"
_CHECKPOINT: Final = "torch.distributed.checkpoint"
#: Module -> what torch puts into `.metadata` from it.
_KNOWN: Final[dict[str, set[str]]] = {
    f"{_CHECKPOINT}.metadata": {
        *("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata"),
        *("ChunkStorageMetadata", "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    },
    f"{_CHECKPOINT}.filesystem": {"_StorageInfo"},
    "torch": {"Size", *(name for name, x in vars(torch).items() if type(x) is torch.dtype)},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "pathlib._local": {"Path", "PosixPath", "PurePosixPath"},
}


# Python's own: the memory of C's grows with a number in the file.
class _Reader(pickle._Unpickler):
    """Gives stand-ins that are made for one load. A pickle can set attributes of every class and
    function that it names, so it gets none that anything else uses."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)
        self._given: dict[str, Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        if name not in _KNOWN.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name}")
        if isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)  # It takes no attributes.
        return self._given.setdefault(name, _stand_in(name))


def _stand_in(name: str) -> Any:
    if name == "Size":
        return lambda sizes=(): torch.Size(sizes)
    if name == "OrderedDict":
        return lambda entries=(): dict(entries)
    if name.endswith("Path"):
        return lambda *parts: "/".join(map(str, parts))
    if name in ("_get_layout", "_MEM_FORMAT_ENCODING"):
        return lambda *_: None

    def set_state(self: object, state: Any) -> None:
        # TensorProperties has a tuple that begins with its dtype.
        vars(self).update(state if isinstance(state, dict) else {"dtype": state[0]})

    return type(name, (), {"__setstate__": set_state})


class StoredTensor(NamedTuple):
    """A tensor of such a folder that has not been read yet.

    Attributes:
        shape: Of the whole tensor.
        dtype: Its own.
        shards: File, first byte, bytes, offsets and sizes of each.
    """

    shape: torch.Size
    dtype: torch.dtype
    shards: tuple[tuple[Path, int, int, torch.Size, torch.Size], ...]

    @property
    def size(self) -> int:
        """Bytes of the whole."""
        return math.prod(self.shape) * self.dtype.itemsize


def dcp_metadata(folder: Path) -> Path | None:
    """Find the `.metadata` of a folder, or that in the `model` folder of one training step."""
    places = (folder / _METADATA, folder / "model" / _METADATA)
    return next((path for path in places if path.is_file()), None)


def list_dcp(metadata: Path) -> dict[str, object]:
    """List every entry of such a folder, nested as it was saved: a `StoredTensor`, or None for
    other objects.

    Args:
        metadata: What `dcp_metadata` returned.

    Raises:
        CheckpointError: It is damaged, holds other things than torch puts there, or leads
            elsewhere.
    """
    try:
        size = metadata.stat().st_size
        if size > LARGEST_PICKLE:
            raise CheckpointError(
                f"{metadata}", expected=f"at most {LARGEST_PICKLE} bytes", got=str(size)
            )
        found: Any = _Reader(io.BytesIO(metadata.read_bytes())).load()
        listed = found.state_dict_metadata
        # Entries that are no tensors have no offset.
        stored = {
            (index.fqn, getattr(index, "offset", None)): info
            for index, info in found.storage_data.items()
        }
        paths = getattr(found, "planner_data", None) or {}
        result: dict[str, Any] = {}
        for name, entry in listed.items():
            *containers, last = paths.get(name) or (name,)
            inside = result
            for container in containers:  # Names are of nested dictionaries that were flattened.
                inside = inside.setdefault(str(container), {})
            inside[str(last)] = _listed(metadata.parent, name, entry, stored)
        return result
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{metadata} is not the metadata of a distributed checkpoint, or contains more; "
            "nothing in it was executed",
            got=f"one that asks for {str(error)[:120]}",
            remedy="Copy it again, or save it again in the program that wrote it",
        ) from error
    except CheckpointError:
        raise
    except Exception as error:  # Of what a file of any content leads to.
        raise CheckpointError(
            f"{metadata} is not the metadata of a distributed checkpoint, or is incomplete "
            f"({type(error).__name__})",
            remedy="Copy the folder again",
        ) from error


def _listed(
    folder: Path, name: str, entry: Any, stored: dict[tuple[str, torch.Size | None], Any]
) -> StoredTensor | None:
    chunks = getattr(entry, "chunks", None)
    if chunks is None:
        return None
    shards = []
    for chunk in chunks:
        info = stored[name, chunk.offsets]
        if getattr(info, "transform_descriptors", None):
            raise CheckpointError(
                f"{folder}: {name} was written through {info.transform_descriptors}",
                expected="tensors as torch.distributed.checkpoint writes them by default",
            )
        file = str(info.relative_path)
        if file in ("", ".", "..") or "/" in file or "\\" in file:
            raise CheckpointError(
                f"{folder / _METADATA}: file of {name}",
                expected="a file in the same folder",
                got=repr(file)[:120],
                remedy="Do not use this folder unless you know who wrote it, and why",
            )
        start, length = int(info.offset), int(info.length)
        offsets, sizes = torch.Size(chunk.offsets), torch.Size(chunk.sizes)
        if min(start, length, *offsets, *sizes) < 0:
            raise ValueError
        shards.append((folder / file, start, length, offsets, sizes))
    result = StoredTensor(torch.Size(entry.size), entry.properties.dtype, tuple(shards))
    if not isinstance(result.dtype, torch.dtype) or min(0, *result.shape) < 0:
        raise ValueError
    _check_whole(folder, name, result)
    return result


def _check_whole(folder: Path, name: str, tensor: StoredTensor) -> None:
    """Check that the shards of a tensor are disjoint and complete."""
    boxes = [
        [range(a, a + n) for a, n in zip(offsets, sizes, strict=True)]
        for *_, offsets, sizes in tensor.shards
    ]
    inside = all(
        side.start >= 0 and side.stop <= length
        for box in boxes
        for side, length in zip(box, tensor.shape, strict=True)
    )
    held = sum(math.prod(map(len, box)) for box in boxes)
    if not inside or held != math.prod(tensor.shape) or _overlap(boxes):
        raise CheckpointError(
            f"{folder}: {name} is not whole",
            expected=f"shards that make up {list(tensor.shape)}",
            got=f"{len(boxes)} shards of {held} elements",
            remedy="Copy the files of all ranks into one folder",
        )


def _overlap(boxes: list[list[range]]) -> bool:
    """Whether two boxes share an element: a sweep along the axis that has the most cuts, because
    every pair of many shards takes too long."""
    boxes = [box for box in boxes if all(box)]
    if len(boxes) < 2 or not boxes[0]:
        return len(boxes) > 1
    axes = range(len(boxes[0]))
    along = max(axes, key=lambda axis: len({box[axis].start for box in boxes}))
    near: list[list[range]] = []
    for box in sorted(boxes, key=lambda box: box[along].start):
        near = [other for other in near if other[along].stop > box[along].start]
        for other in near:
            pairs = zip(box, other, strict=True)
            if all(max(a.start, b.start) < min(a.stop, b.stop) for a, b in pairs):
                return True
        near.append(box)
    return False


def _check_bytes(folder: Path, tensors: dict[str, StoredTensor]) -> None:
    """Refuse tensors that are declared larger than what is in the files."""
    used: Counter[Path] = Counter()
    for name, tensor in tensors.items():
        lengths = sum(length for _, _, length, *_ in tensor.shards)
        if lengths < tensor.size:
            raise CheckpointError(
                f"{folder}: {name}",
                expected=f"{tensor.size} bytes, for {tensor.dtype} {list(tensor.shape)}",
                got=f"{lengths} bytes",
                remedy="Copy the folder again",
            )
        for file, _, length, *_ in tensor.shards:
            used[file] += length
    for file, wanted in used.items():
        try:
            size = file.stat().st_size
        except OSError as error:
            raise _unread(str(file), error) from error
        if size < wanted:
            raise CheckpointError(
                f"{file} is incomplete",
                expected=f"{wanted} bytes or more",
                got=str(size),
                remedy="Copy the folder again",
            )


def _unread(name: str, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{name} cannot be read ({error.strerror})",
        remedy="Copy the files of all ranks into one folder",
    )


def load_dcp(
    folder: Path,
    tensors: dict[str, StoredTensor],
    progress: Callable[[str, int, int], None] | None = None,
) -> dict[str, Tensor]:
    """Read complete tensors into memory.

    Args:
        folder: For errors.
        tensors: Of `list_dcp`, by the names that they get.
        progress: Called with bytes.

    Raises:
        CheckpointError: A file is missing or damaged, or holds more than tensors.
    """
    _check_bytes(folder, tensors)
    result: dict[str, Tensor] = {}
    total, done = sum(tensor.size for tensor in tensors.values()), 0
    for name, stored in tensors.items():
        whole = torch.empty(stored.shape, dtype=stored.dtype)
        for file, start, length, offsets, sizes in stored.shards:
            part = _shard(file, start, length, f"{folder}: {name} in {file.name}")
            if part.shape != sizes or part.dtype != stored.dtype:
                raise CheckpointError(
                    f"{folder}: {name} in {file.name}",
                    expected=f"{stored.dtype} {list(sizes)}, as {_METADATA} says",
                    got=f"{part.dtype} {list(part.shape)}",
                )
            place = tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))
            whole[place] = part
        result[name] = whole
        done += stored.size
        if progress is not None:
            progress("read", done, total)
    return result


def _shard(file: Path, start: int, length: int, name: str) -> Tensor:
    try:
        with file.open("rb") as stream:
            stream.seek(start)
            held = io.BytesIO(stream.read(length))
    except OSError as error:
        raise _unread(name, error) from error
    try:
        check_sums(held, name, check_archive(held, name))
        held.seek(0)
        part = torch.load(held, map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except Exception as error:  # Of what a file of any content leads to.
        raise CheckpointError(
            f"{name} is not a complete tensor; nothing in it was executed",
            remedy="Copy the folder again",
        ) from error
    if not isinstance(part, Tensor):
        raise CheckpointError(name, expected="a tensor", got=f"a {type(part).__name__}")
    return part.detach()
