"""The processes of torchrun: which of them makes which videos, and what they exchange.

torchrun tells each process its rank in environment variables, and ends all processes as soon as
one has failed. They share the prompts of `generate`, or make each video together.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist

from turbo_rcm_patch.errors import ConfigError, SamplingError

_T = TypeVar("_T")

#: How long the first process to finish waits for the last.
_PATIENCE: Final = timedelta(days=7)
_TORCHRUN: Final = "Start with `torchrun --nproc-per-node N`, or unset WORLD_SIZE"


@dataclass(slots=True)
class Processes:
    """The processes that share the work.

    Attributes:
        rank: The number of this one, from 0 on.
        world: How many there are.
        local: Its number on this machine, which is the GPU that it takes.
    """

    rank: int = 0
    world: int = 1
    local: int = 0
    _all: dist.ProcessGroup | None = None

    @classmethod
    def here(cls) -> Processes:
        """Read WORLD_SIZE, RANK and LOCAL_RANK, which torchrun sets; one process without them.

        Raises:
            ConfigError: They contradict each other.
        """
        if "WORLD_SIZE" not in os.environ:
            return cls()
        values = [os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")]
        with suppress(ValueError):
            rank, world, local = map(int, values)
            if 0 <= local <= rank < world:
                return cls(rank, world, local)
        raise _refused("RANK below WORLD_SIZE, and LOCAL_RANK", ", ".join(map(repr, values)))

    def device(self, asked: str | None) -> str | None:
        """Return the device of this process: the asked one, or the GPU of its number.

        Raises:
            ConfigError: There are more processes than GPUs on this machine.
        """
        if self.world == 1 or asked not in (None, "cuda") or not torch.cuda.is_available():
            return asked
        if self.local >= (count := torch.cuda.device_count()):
            got, remedy = f"number {self.local}, counted from 0", "Lower --nproc-per-node"
            raise _refused(f"at most {count} processes, one for each GPU", got, remedy)
        return f"cuda:{self.local}"

    @contextmanager
    def joined(self, device: str | None = None, *, together: bool = False) -> Iterator[None]:
        """Connect the processes inside the block, with `together` also for tensors on GPUs.
        Leaving it without an error waits for all of them."""
        if self.world == 1:
            yield
            return
        gpu = (device or "cuda").startswith("cuda") and torch.cuda.is_available()
        if gpu:
            torch.cuda.set_device(self.device(device))
        began = not dist.is_initialized()  # Ray's trainer has done so.
        if began:
            try:
                dist.init_process_group("cpu:gloo,cuda:nccl" if gpu and together else "cpu:gloo")
            except ValueError as error:  # MASTER_ADDR is missing, or is none.
                got = str(error).splitlines()[0]
                raise _refused("MASTER_ADDR and MASTER_PORT", got) from error
        self._all = dist.new_group(backend="gloo", timeout=_PATIENCE)
        yield
        self._exchange(lambda: dist.barrier(self._all))
        self._all = None
        if began:
            dist.destroy_process_group()

    def broadcast(self, make: Callable[[], _T]) -> _T:
        """Return on all processes the value that `make` gives on the first.

        Raises:
            SamplingError: It raised there; there the error itself is raised.
        """
        if self._all is None:
            return make()
        sent: list[Any] = [None, ""]
        try:
            if self.rank == 0:
                sent[0] = make()
        except Exception as error:  # Forward any error to the other ranks.
            sent[1] = f"{type(error).__name__}: {error}"
            raise
        finally:
            self._exchange(lambda: dist.broadcast_object_list(sent, 0, group=self._all))
        if sent[1]:
            raise SamplingError("process 0 failed", got=sent[1])
        return sent[0]  # type: ignore[no-any-return]

    def _exchange(self, run: Callable[[], object]) -> None:
        try:
            run()
        except RuntimeError as error:  # gloo's words for a connection that broke
            got, remedy = str(error).splitlines()[0], "Its own output says why"
            raise SamplingError("another process has ended", got=got, remedy=remedy) from error


def _refused(expected: str, got: str, remedy: str = _TORCHRUN) -> ConfigError:
    return ConfigError(
        "the environment of this process", expected=expected, got=got, remedy=remedy
    )
