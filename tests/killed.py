"""A process that is killed at each of its writes in turn, for tests of what is left."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

__all__ = ["killed_at"]

#: What Python tells of before it changes a folder.
_EVENTS = {
    "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.link", "os.symlink",
    "os.chmod", "shutil.rmtree", "shutil.move", "shutil.copyfile", "tempfile.mkdtemp",
}  # fmt: skip
KILLED, DONE, FAILED = 9, 0, 3


def killed_at(step: int, folder: Path, action: Callable[[], Any]) -> bool:
    """Run an action in a forked process that dies, as by SIGKILL, before its write number `step`
    (from 1) in `folder`.

    Returns:
        True if it was killed, False if it was done before.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
        child = os.fork()
    if child == 0:
        code = FAILED
        try:
            torch.set_num_threads(1)  # OpenMP's other threads stayed behind
            _die_at(step, str(folder))
            action()
            code = DONE
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (KILLED, DONE), f"step {step}: it failed"
    return code == KILLED


def _die_at(step: int, folder: str) -> None:
    left = [step]

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
            os._exit(KILLED)

    sys.addaudithook(hook)
