"""Write files completely or not at all: into a temporary file, which is then renamed."""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Literal

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

from turbo_rcm_patch.errors import OutputError, TurboRCMError

#: How the names of unfinished files begin. They are hidden.
_PARTIAL: Final = ".turbo_rcm_patch-partial-"
#: A trial write is as large as a block of most file systems.
_TRIAL: Final = bytes(4096)
_ELSEWHERE: Final = "Choose another place (for a command with --out: another --out)"
#: Codes of a disk that takes no more, and how libraries quote them.
_FULL: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO}
_OS_ERROR: Final = re.compile(r"(?:os error |Errno )(\d+)")


@contextmanager
def atomic(target: Path) -> Iterator[Path]:
    """Give a path beside `target` that becomes `target` when the block ends.

    If the block fails or is interrupted, the new file is removed and `target` is as it was. A link
    stays a link: the file that it leads to is replaced.

    Args:
        target: The file to be; its folder is made.

    Yields:
        Where to write, with the ending of `target`.

    Raises:
        OutputError: The file cannot be written, or the block raised an `OSError`.
    """
    with telling(target):
        target = _real_file(target)
        target.parent.mkdir(parents=True, exist_ok=True)
    partial = _beside(target)
    try:
        with telling(target), locked(partial, os.O_WRONLY | os.O_CREAT):
            yield partial
            _flush(partial)  # A full disk may be noticed only now.
            if target.exists():
                shutil.copymode(target, partial)
            os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)
    with suppress(OSError):  # Not every file system can flush a folder.
        _flush(target.parent)


def write_text(target: Path, text: str) -> None:
    """Write a text file in UTF-8, as `atomic` does."""
    with atomic(target) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(target: Path, value: object, *, indent: int = 1, sort_keys: bool = False) -> None:
    """Write a JSON file, as `atomic` does."""
    write_text(target, json.dumps(value, indent=indent, sort_keys=sort_keys) + "\n")


@contextmanager
def merged(target: Path) -> Iterator[Path]:
    """Give a new folder whose files are moved into `target`, one by one, when the block ends.

    A failure before that leaves `target` as it was; each of its files is the old or the new one at
    any time, and its other files stay.

    Args:
        target: The folder to be.

    Raises:
        OutputError: It cannot be written, or the block raised an `OSError`.
    """
    with telling(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = _beside(target)
        partial.mkdir()
    try:
        with telling(target):
            yield partial
            files = sorted(path for path in partial.rglob("*") if path.is_file())
            for path in files:
                _flush(path)
            for path in files:
                place = target / path.relative_to(partial)
                place.parent.mkdir(parents=True, exist_ok=True)
                os.replace(path, place)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def check_writable(target: Path) -> None:
    """Check that a file can be written before hours of work depend on it. Leaves no trace.

    Args:
        target: The file to be.

    Raises:
        OutputError: It cannot be written, or the disk is full.
    """
    with telling(target):
        target = _real_file(target)
        trial = _beside(next(one for one in target.parents if one.exists()) / target.name)
        try:
            trial.write_bytes(_TRIAL)
            _flush(trial)
        finally:
            trial.unlink(missing_ok=True)


def remove_leftovers(folder: Path) -> None:
    """Remove from a folder the unfinished files of processes that were killed.

    A process that writes a file holds a lock on it, so a file without one has no writer any more.
    Where the system has no locks, the files stay.
    """
    for path in folder.glob(f"{_PARTIAL}*"):
        with suppress(OSError), locked(path) as state:
            if state == "held":
                path.unlink()


@contextmanager
def locked(path: Path, flags: int = os.O_RDONLY) -> Iterator[Literal["held", "taken", "none"]]:
    """Hold a lock on a file or folder: "held", "taken" if another process has it, or "none" where
    the system has no such locks."""
    if fcntl is None:  # Windows, where a lock would keep ffmpeg from writing.
        yield "none"
        return
    descriptor = os.open(path, flags, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            state: Literal["held", "taken", "none"] = "held"
        except OSError as error:
            state = "taken" if isinstance(error, BlockingIOError) else "none"
        yield state
    finally:
        os.close(descriptor)


def _beside(target: Path) -> Path:
    # Containers that share a folder have the same process numbers.
    return target.with_name(f"{_PARTIAL}{secrets.token_hex(8)}{target.suffix}")


def _real_file(target: Path) -> Path:
    """Follow links to the file itself. Refuses devices, which must not be replaced."""
    if target.is_symlink():
        target = Path(os.path.realpath(target))
    if target.exists() and not target.is_file():
        what, got = f"{target} cannot be written", "a folder, a device or a pipe"
        expected = "a file, or a path that does not exist"
        raise OutputError(what, expected=expected, got=got, remedy=_ELSEWHERE)
    return target


def _flush(path: Path) -> None:
    """Wait until the disk has a file's contents or a folder's entries."""
    # Windows flushes only what was opened for writing; a folder cannot be.
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def telling(target: Path, *, full: bool = False) -> Iterator[None]:
    """Turn errors of the system into an `OutputError` that names the file.

    Args:
        target: The file.
        full: Only those of a disk that takes no more, and also where a library quotes them: the
            block does more than write.
    """
    try:
        yield
    except TurboRCMError:
        raise
    except Exception as error:
        code = _code_of(error)
        if (code not in _FULL) if full else not isinstance(error, OSError):
            raise
        got = os.strerror(code) if code in _FULL else str(getattr(error, "strerror", "") or error)
        if full:
            free = shutil.disk_usage(target.parent).free / 2**30
            got += f"; {free:.1f} GiB free in {target.parent}"
        remedy = "Free some space, or choose another disk" if code in _FULL else _ELSEWHERE
        failure = OutputError(f"{target} cannot be written", got=got, remedy=remedy)
        failure.errno = code
        raise failure from error


def _code_of(error: Exception) -> int | None:
    """The code of an error of the system, also in the words of a library."""
    if "inline_container" in str(error):  # Of torch's archives, which are only written here.
        return errno.ENOSPC
    code: int | None = getattr(error, "errno", None)
    # safetensors' own, and the list of files that shutil could not copy
    said = _OS_ERROR.search(str(error)) if code is None else None
    return int(said[1]) if said else code
