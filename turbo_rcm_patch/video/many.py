"""Videos on many GPUs: which process makes which video, and which are made already.

Whoever starts several processes (torchrun, and what is built on it) tells each of them its rank in
environment variables. Neighbours may split the tokens of each video (a *group*), and the prompts
are dealt out to the groups. `generate` lets every group write its own files; `compare` sends the
latents to the first process, which alone writes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch
import torch.distributed as dist

from turbo_rcm_patch.errors import (
    ConfigError,
    OutputExistsError,
    SamplingError,
)
from turbo_rcm_patch.output import write_json

if TYPE_CHECKING:
    pass

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

    def device(self, given: str | None) -> str | None:
        """The device of this process: the given one, or the GPU of its number.

        Raises:
            ConfigError: There are more processes than GPUs on this machine.
        """
        if self.world == 1 or given not in (None, "cuda") or not torch.cuda.is_available():
            return given
        if self.local >= torch.cuda.device_count():
            raise ConfigError(
                "processes of this machine",
                expected=f"at most {torch.cuda.device_count()}, one for each GPU",
                got=f"number {self.local}, counted from 0",
                remedy="Lower torchrun's --nproc-per-node",
            )
        return f"cuda:{self.local}"


class Processes:
    """The processes that make videos together, each of them a share of the prompts.

    Args:
        ranks: Which of them this is.

    Attributes:
        ranks: As given.
    """

    def __init__(self, ranks: Ranks | None = None) -> None:
        self.ranks = ranks or Ranks()
        self._all: dist.ProcessGroup | None = None

    @property
    def first(self) -> bool:
        """Whether this is the first process of all."""
        return self.ranks.rank == 0

    def share(self, work: Sequence[_T]) -> list[_T]:
        """Return what this process does: every so many pieces, so that all begin at once."""
        return list(work[self.ranks.rank :: self.ranks.world])

    @contextmanager
    def joined(self, device: str | None = None) -> Iterator[None]:
        """Inside, the processes can exchange things. Leaving it without an error waits for all of
        them, because torchrun ends every process as soon as one has failed."""
        if self.ranks.world == 1:
            yield
            return
        on_gpu = (device or "cuda").startswith("cuda") and torch.cuda.is_available()
        began = not dist.is_initialized()  # Ray's trainer has done so.
        if began:
            if on_gpu:
                torch.cuda.set_device(self.ranks.device(device))
            try:
                dist.init_process_group("gloo")
            except ValueError as error:  # MASTER_ADDR is missing, or is none.
                raise ConfigError(
                    "the environment of this process",
                    expected="MASTER_ADDR and MASTER_PORT, as torchrun sets them",
                    got=str(error).splitlines()[0],
                    remedy="Start with `torchrun --nproc-per-node N`, or unset WORLD_SIZE",
                ) from error
        self._all = dist.new_group(backend="gloo", timeout=_PATIENCE)
        yield
        self.wait()
        self._all = None
        if began:
            dist.destroy_process_group()

    def wait(self) -> None:
        """Return when every process has come here."""
        if self._all is not None:
            self._exchange(lambda: dist.barrier(self._all))

    def from_first(self, make: Callable[[], _T]) -> _T:
        """What `make` gives on the first process, on all of them.

        Raises:
            SamplingError: It raised there; there the error itself is raised.
        """
        group = self._all
        if group is None:
            return make()
        told: list[Any] = [None, None]
        raised: Exception | None = None
        if self.first:
            try:
                told = [make(), None]
            except Exception as error:  # the others hear of it, whatever it is
                raised, told = error, [None, f"{type(error).__name__}: {error}"]
        self._exchange(lambda: dist.broadcast_object_list(told, 0, group=group))
        if raised is not None:
            raise raised
        if told[1] is not None:
            raise SamplingError("process 0 failed", got=told[1])
        return told[0]  # type: ignore[no-any-return]

    def gathered(self, value: _T | None) -> list[_T]:
        """Return on the first process what every process has; elsewhere nothing."""
        if self._all is None:
            assert value is not None
            return [value]
        came: list[Any] | None = [None] * self.ranks.world if self.first else None
        self._exchange(lambda: dist.gather_object(value, came, 0, group=self._all))
        return [] if came is None else came

    def _exchange(self, run: Callable[[], object]) -> None:
        try:
            run()
        except RuntimeError as error:  # gloo's words for a connection that broke
            raise SamplingError(
                "another process has ended",
                got=str(error).splitlines()[0],
                remedy="Its own output says why",
            ) from error


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
        fits = 0 <= rank < world and 0 <= local <= rank
    except ValueError:
        fits = False
    if not fits:
        raise ConfigError(
            "the environment of this process",
            expected="WORLD_SIZE, RANK below it, and LOCAL_RANK, as torchrun sets them",
            got=", ".join(f"{name}={value!r}" for name, value in values.items()),
            remedy="Start with `torchrun --nproc-per-node N`, or unset WORLD_SIZE",
        )
    return Ranks(rank, world, local)


def _note(video: Path) -> Path:
    return video.with_suffix(".json")


def _noted(video: Path) -> dict[str, object] | None:
    """What stands beside a video in a note of ours."""
    try:
        found = json.loads(_note(video).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    ours = isinstance(found, dict) and str(found.get("made by")).startswith("turbo_rcm_patch")
    return found if ours else None


def check_note(video: Path) -> None:
    """Refuse to write a note over a file that is none.

    Raises:
        OutputExistsError: Such a file is there.
    """
    note = _note(video)
    if note.exists() and _noted(video) is None:
        raise OutputExistsError(
            f"{note}, which would say what {video.name} was made from, is another file",
            expected="no file, or one that `generate` wrote",
            remedy="Choose another --out, or rename the file",
        )


def note_made(video: Path, identity: Mapping[str, object]) -> None:
    """Write beside a video what it was made from, once the video is there."""
    write_json(_note(video), identity)


def forget_made(video: Path) -> bool:
    """Remove the note beside a video that is about to be replaced; whether there was one."""
    if _noted(video) is None:
        return False
    _note(video).unlink(missing_ok=True)
    return True


def is_made(video: Path, identity: Mapping[str, object]) -> bool:
    """Whether a video is there and was made from just this."""
    return _noted(video) == json.loads(json.dumps(identity)) and video.is_file()
