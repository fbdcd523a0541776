"""Many videos on many GPUs: which process makes which video, and which are made already.

Whoever starts several processes (torchrun, and what is built on it) tells each of them its rank in
environment variables. The prompts are dealt out by rank, and every process writes its own files.
Nothing is exchanged, but at the end each waits for the others: torchrun ends all processes as soon
as one of them leaves with an error.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Final, TypeVar

import torch
import torch.distributed as dist

from turbo_rcm_patch.errors import ConfigError
from turbo_rcm_patch.output import atomic

__all__ = ["Ranks", "is_made", "note_made", "ranks_here"]

_T = TypeVar("_T")

#: How long the first to be done waits for the last.
_PATIENCE: Final = timedelta(days=7)


@dataclass(frozen=True, slots=True)
class Ranks:
    """Where this process stands among those that share the work.

    Attributes:
        rank: Its number, from 0 on.
        world: How many there are.
        local: Its number on this machine, which is the GPU that it takes.
    """

    rank: int = 0
    world: int = 1
    local: int = 0

    def share(self, work: Sequence[_T]) -> list[_T]:
        """What this process does: every `world`-th piece, so that all of them begin at once."""
        return list(work[self.rank :: self.world])

    def device(self, given: str | None) -> str | None:
        """The device of this process: the given one, or the GPU of its number."""
        if given is None and self.world > 1 and torch.cuda.is_available():
            return f"cuda:{self.local}"
        return given

    def wait(self) -> None:
        """Return when every process has come here."""
        if self.world == 1:
            return
        if dist.is_initialized():  # Ray's trainer has done so.
            dist.barrier(dist.new_group(backend="gloo", timeout=_PATIENCE))
            return
        dist.init_process_group("gloo", timeout=_PATIENCE)
        try:
            dist.barrier()
        finally:
            dist.destroy_process_group()


def ranks_here(environment: Mapping[str, str] | None = None) -> Ranks:
    """Read what torchrun says: WORLD_SIZE, RANK and LOCAL_RANK; one process without them.

    Raises:
        ConfigError: They contradict each other.
    """
    given = os.environ if environment is None else environment
    if "WORLD_SIZE" not in given:
        return Ranks()
    values = {name: given.get(name, "") for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK")}
    try:
        world, rank, local = map(int, values.values())
    except ValueError:
        world, rank, local = 0, 0, 0
    if not (0 <= rank < world and 0 <= local <= rank):
        raise ConfigError(
            "the environment of this process",
            expected="WORLD_SIZE, RANK below it, and LOCAL_RANK, as torchrun sets them",
            got=", ".join(f"{name}={value!r}" for name, value in values.items()),
            remedy="Start with `torchrun --nproc-per-node N`, or unset WORLD_SIZE",
        )
    return Ranks(rank, world, local)


def _note(video: Path) -> Path:
    return video.with_suffix(".json")


def note_made(video: Path, identity: Mapping[str, object]) -> None:
    """Write beside a video what it was made from, once the video is there."""
    with atomic(_note(video)) as path:
        path.write_text(json.dumps(identity, indent=1) + "\n", encoding="utf-8")


def is_made(video: Path, identity: Mapping[str, object]) -> bool:
    """Whether a video is there and was made from just this."""
    try:
        found = json.loads(_note(video).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(found == json.loads(json.dumps(identity))) and video.is_file()
