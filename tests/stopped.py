"""A process that is stopped at each of its writes in turn, for tests of what is left."""

from __future__ import annotations

import errno
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

__all__ = ["WAYS", "stopped_at"]

#: What Python tells of before it changes a folder.
_EVENTS = {
    "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.link", "os.symlink",
    "os.chmod", "shutil.rmtree", "shutil.move", "shutil.copyfile", "tempfile.mkdtemp",
}  # fmt: skip
_KILLED, _DONE, _RAISED = 9, 0, 3
#: How a process is stopped, as by SIGKILL, by Ctrl-C, or by the disk.
WAYS: dict[str, BaseException | None] = {
    "killed": None,
    "ctrl-c": KeyboardInterrupt(),
    "full": OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
}


def stopped_at(step: int, folder: Path, action: Callable[[], Any], way: str = "killed") -> bool:
    """Run an action in a forked process that is stopped before its write number `step` (from 1) in
    `folder`.

    Returns:
        True if it was stopped, False if it was done before.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
        child = os.fork()
    if child == 0:
        left, code = [step], _RAISED
        try:
            torch.set_num_threads(1)  # OpenMP's other threads stayed behind
            _stop_at(left, str(folder), WAYS[way])
            action()
            code = _RAISED if left[0] <= 0 else _DONE  # It may have got over it.
        except BaseException as error:
            if left[0] > 0:
                os.write(2, f"{type(error).__name__}: {error}\n".encode())
                code = 1
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (_KILLED, _RAISED, _DONE), f"step {step}: it failed by itself"
    return code != _DONE


def _stop_at(left: list[int], folder: str, error: BaseException | None) -> None:
    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            writes = bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        else:
            writes = event in _EVENTS
        # What a library writes without a word is looked at when it is renamed.
        if not writes or folder not in str(arguments):
            return
        left[0] -= 1
        if left[0] == 0:
            if error is not None:
                raise error
            os._exit(_KILLED)

    sys.addaudithook(hook)
