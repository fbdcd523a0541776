"""Agreement of ranks: all of them make the same call with the same values before they exchange
anything. Ranks that differ would make one video of two, or wait for each other for ever.

Each rank reduces the call and its values to one number of 64 bits. The numbers are gathered, eight
bytes a rank, and read once. Where they differ, all ranks raise the same error, which names the
first value that differs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from turbo_rcm_patch.errors import ContextParallelError

_T = TypeVar("_T")

#: Bytes of a number -> an integer type of that size.
_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: Constants of splitmix64, as signed numbers: its step, and its shifts and factors.
_STEP: Final = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX: Final = (30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64))
#: Elements that are hashed at once.
_PART: Final = 1 << 22
#: Least number of elements that are read of each weight.
_SAMPLE: Final = 32


def agree(group: Any, call: str, values: Mapping[str, Any], device: torch.device) -> None:
    """Check that all ranks of a group make the same call with the same values.

    It is a collective of one number a rank, and waits for the device once.

    Args:
        group: The process group.
        call: The name of the call, with its number.
        values: Name -> tensors, numbers, texts, and lists and mappings of them.
        device: Where numbers are gathered.

    Raises:
        ContextParallelError: They differ. It is raised on all ranks.
    """
    prints: dict[str, tuple[str, list[Tensor]]] = {"the call": (call, [])}
    prints |= {name: _fingerprint(x) for name, x in values.items()}
    text = repr([(name, words) for name, (words, _) in prints.items()])
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    number = torch.full((), int.from_bytes(digest, "little", signed=True), device=device)
    hashes = [x.to(device) for _, tensors in prints.values() for x in tensors]
    mark = _hash(torch.stack([number, *hashes]))
    marks = mark.new_empty(dist.get_world_size(group))
    dist.all_gather_into_tensor(marks, mark.view(1), group=group)
    if len(set(marks.tolist())) == 1:
        return
    details = {name: (text, [int(x) for x in tensors]) for name, (text, tensors) in prints.items()}
    _refuse(gather_objects(group, details, device), dist.get_process_group_ranks(group))


def _refuse(of_ranks: list[dict[str, tuple[str, list[int]]]], ranks: list[int]) -> None:
    """Raise an error that names the first value that differs."""
    first = of_ranks[0]
    for name in dict.fromkeys(name for details in of_ranks for name in details):
        for rank, details in zip(ranks, of_ranks, strict=True):
            if details.get(name) == first.get(name):
                continue
            texts = [each[name][0] if name in each else "none" for each in (first, details)]
            got = f"other values on rank {rank} than on rank {ranks[0]}"
            if texts[0] != texts[1] and max(map(len, texts)) < 80:
                got = f"{texts[0]} on rank {ranks[0]}, {texts[1]} on rank {rank}"
            raise ContextParallelError(
                name,
                expected="the same on every rank",
                got=got,
                remedy="Give every rank the same prompt and settings, the same weights and "
                "patch, and a generator with the same seed",
            )


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which a GPU is the current one, as torch's functions expect."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@torch.compiler.disable  # type: ignore[untyped-decorator]
def gather_objects(group: Any, value: _T, device: torch.device) -> list[_T]:
    """Return a value of each rank of a group."""
    values: list[Any] = [None] * dist.get_world_size(group)
    with on(device):
        dist.all_gather_object(values, value, group=group)
    return values


def sample(weights: Iterable[tuple[str, Tensor]], device: torch.device) -> list[Any]:
    """Return names, types and shapes of weights, and some elements of each.

    A weight that is sharded or quantised, or has no memory, is known by its type alone.
    """
    names: list[str] = []
    elements: dict[torch.dtype, list[Tensor]] = {}
    for name, weight in weights:
        name = name.replace("_orig_mod.", "")  # A compiled module has the same weights.
        names.append(f"{name} {type(weight).__name__} {weight.dtype} {[*weight.shape]}")
        integer = _INTEGERS.get(weight.element_size())
        if type(weight) in (Tensor, nn.Parameter) and not weight.is_meta and integer is not None:
            flat = weight.detach().view(integer).flatten()
            step = max(1, len(flat) // _SAMPLE)
            elements.setdefault(integer, []).append(flat[::step].to(device))
    return [names, *map(torch.cat, elements.values())]


def _fingerprint(value: Any) -> tuple[str, list[Tensor]]:
    """Return a text that describes a value, and a hash of the bits of each tensor in it.

    Of an object of another class the text has the name of the class.
    """
    if isinstance(value, Tensor):
        text = f"{value.dtype} {[*value.shape]}"
        return text, [_hash(value)] if type(value) in (Tensor, nn.Parameter) else []
    if isinstance(value, Mapping):
        value = sorted(value.items(), key=lambda item: str(item[0]))
    if isinstance(value, (list, tuple)):
        prints = [_fingerprint(item) for item in value]
        text = ", ".join(text for text, _ in prints)
        return f"[{text}]", [x for _, tensors in prints for x in tensors]
    if value is None or isinstance(value, (str, int, float, torch.dtype)):
        return repr(value), []
    if hasattr(value, "tolist"):  # NumPy's
        return repr(value.tolist()), []
    return type(value).__qualname__, []


def _hash(x: Tensor) -> Tensor:
    """Return a number [] that depends on the bits of all elements and on their places."""
    x = x.detach()
    x = (torch.view_as_real(x) if x.is_complex() else x).flatten()
    parts, place = [], 1
    for part in torch.split(x.view(_INTEGERS[x.element_size()]), _PART):  # bounds the memory
        places = torch.arange(place, place + len(part), device=x.device)
        mixed = part.to(torch.int64) + places * _STEP
        for shift, factor in _MIX:
            shifted = (mixed >> shift) & ((1 << 64 - shift) - 1)  # without the sign
            mixed = (mixed ^ shifted) * factor
        parts.append(mixed.sum())
        place += len(part)
    return torch.stack(parts).sum()
