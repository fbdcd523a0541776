"""Write files and folders completely or not at all, lock them, and read the JSON of others.

A new file or folder is written beside its place, and renamed when it is complete. If writing fails
or is interrupted, it is removed, and what was in its place is unchanged. What a killed process has
left is removed by the next one that writes there.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Literal

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

from turbo_rcm_patch.errors import CheckpointError, OutputError, OutputExistsError, TurboRCMError

#: How the names of unfinished files begin. They are hidden.
_PARTIAL: Final = ".turbo_rcm_patch-partial-"
#: A trial write is as large as a block of most file systems.
_TRIAL: Final = bytes(4096)
#: A folder is replaced only if it is empty or contains one of these.
_MODEL: Final = ("config.json", "model_index.json")
_ELSEWHERE: Final = "Choose another place"
#: Codes of a disk that takes no more, and how safetensors and shutil quote them.
_FULL: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO}
_QUOTED: Final = re.compile(r"(?:os error |Errno )(\d+)")
#: More bytes than a JSON file of a model has; the largest are tokenizers of some 20 MB.
_MOST_JSON: Final = 1 << 27

_LockState = Literal["held", "taken", "none"]


# --- files ---------------------------------------------------------------------------------------


@contextmanager
def atomic(target: Path) -> Iterator[Path]:
    """Yield a path beside `target` that becomes `target` when the block ends.

    A link stays a link: the file that it leads to is replaced.

    Args:
        target: The file to be; its folder is made.

    Yields:
        Where to write, with the ending of `target`.

    Raises:
        OutputError: The file cannot be written, or the block raised an `OSError`.
    """
    with output_errors(target):
        target = _real_file(target)
        target.parent.mkdir(parents=True, exist_ok=True)
    partial = _beside(target)
    try:
        with output_errors(target), locked(partial, os.O_WRONLY | os.O_CREAT):
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


def check_writable(target: Path) -> None:
    """Check that a file can be written before hours of work depend on it. Leaves no trace.

    Args:
        target: The file to be.

    Raises:
        OutputError: It cannot be written, or the disk is full.
    """
    with output_errors(target):
        target = _real_file(target)
        trial = _beside(_existing_parent(target) / target.name)
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


def _beside(target: Path) -> Path:
    # Containers that share a folder have the same process numbers.
    return target.with_name(f"{_PARTIAL}{secrets.token_hex(8)}{target.suffix}")


def _existing_parent(target: Path) -> Path:
    return next(parent for parent in target.absolute().parents if parent.exists())


def _real_file(target: Path) -> Path:
    """Follow links to the file itself. Refuses devices, which must not be replaced."""
    if target.is_symlink():
        target = Path(os.path.realpath(target))
    if target.exists() and not target.is_file():
        raise OutputError(
            f"{target} cannot be written",
            expected="a file, or a path that does not exist",
            got="a folder, a device or a pipe",
            remedy=_ELSEWHERE,
        )
    return target


def _flush(path: Path) -> None:
    """Wait until the disk has a file's contents or a folder's entries."""
    # Windows flushes only what was opened for writing; a folder cannot be.
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- folders -------------------------------------------------------------------------------------


@contextmanager
def atomic_folder(target: Path, *, force: bool, needed: int = 0) -> Iterator[Path]:
    """Yield a new folder that becomes `target` when the block ends.

    No rename replaces a folder that is not empty, so an old one is first moved out of its place.
    The next writer puts it back if the process was killed between the two renames.

    Args:
        target: The folder to be.
        force: Allow replacing the folder of a model.
        needed: Bytes that will be written.

    Raises:
        OutputExistsError: The target already exists, another process is writing it, or there is
            too little space for it.
        OutputError: It cannot be written, for instance because the disk is full.
    """
    target = target.absolute()  # "." has no name, and is its own parent.
    beside = target.parent / f".{target.name}.partial"
    new, old = beside / "new", beside / "old"
    with ExitStack() as stack, output_errors(target, only_full=True):
        with output_errors(target):
            busy = f"{target} is being written by another process"
            stack.enter_context(lock_folder(beside, busy))
        try:
            _clean_up(new, old, target)
            check_target(target, force=force)
            _check_space(target, needed)
            new.mkdir()
            yield new
            check_target(target, force=force)  # It took minutes.
            if os.path.lexists(target):
                os.replace(target, old)
            os.replace(new, target)
        finally:
            with suppress(OSError):
                _clean_up(new, old, target)


def check_target(target: Path, *, force: bool) -> None:
    """Refuse to write a folder over something else, unless it may be replaced.

    Raises:
        OutputExistsError: It is there and `force` is off; or it is no folder of a model, which
            `force` does not remove.
    """
    if not os.path.lexists(target):
        return
    if not force:
        raise OutputExistsError(
            f"{target} already exists",
            expected="a path that does not exist",
            remedy="Choose another path, or pass `force=True` to replace it",
        )
    inside = sorted(os.listdir(target)) if target.is_dir() else []
    is_file = target.exists() and not target.is_dir()
    if is_file or (inside and set(inside).isdisjoint(_MODEL)):
        raise OutputExistsError(
            f"{target} is not replaced",
            expected=f"a folder with one of {_MODEL}",
            got="a file" if is_file else f"a folder with {inside[:6]}",
            remedy="Choose another path, or remove it yourself if you do not need it",
        )


def check_outside(target: Path, *sources: str | Path | None) -> None:
    """Refuse a target that contains an input, because replacing it would delete the input.

    Raises:
        OutputExistsError: A source is in the target, or is it.
    """
    whole = os.path.realpath(target)  # `Path.resolve` raises where links lead in a circle.
    for source in sources:
        if source is not None and Path(os.path.realpath(source)).is_relative_to(whole):
            raise OutputExistsError(
                f"{target} holds {source}, which is read",
                expected="another path",
                remedy="Choose another path, or move that file out of it",
            )


def _check_space(target: Path, needed: int) -> None:
    free = shutil.disk_usage(target.parent).free
    if free < needed:
        raise OutputExistsError(
            f"{target.parent} has too little space for {target.name}",
            expected=f"{needed / 2**30:.1f} GiB",
            got=f"{free / 2**30:.1f} GiB",
            remedy="Choose another disk, a smaller `dtype=`, or links in place of `copy=True`",
        )


def _clean_up(new: Path, old: Path, target: Path) -> None:
    """Restore a target whose replacement did not finish, and remove the unfinished parts."""
    if os.path.lexists(old) and not os.path.lexists(target):
        os.rename(old, target)
    for path in (new, old):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


# --- locks ---------------------------------------------------------------------------------------


@contextmanager
def lock_folder(folder: Path, busy: str = "") -> Iterator[None]:
    """Lock a folder against other processes, on file systems that support locks.

    The folder is made if it does not exist, and removed at the end if it is empty.

    Args:
        folder: The folder.
        busy: The error's text if another process has locked it, by default that it is in use.

    Raises:
        OutputExistsError: Another process has locked it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder) as state:
        if state == "taken":
            busy = busy or f"{folder} is in use by another run"
            raise OutputExistsError(busy, remedy="Wait until it is done, or choose another path")
        try:
            yield
        finally:
            with suppress(OSError):  # It holds something.
                folder.rmdir()


@contextmanager
def locked(path: Path, flags: int = os.O_RDONLY) -> Iterator[_LockState]:
    """Hold a lock on a file or folder: "held", "taken" if another process has it, or "none" where
    the system has no such locks."""
    if fcntl is None:  # Windows, where a lock would keep ffmpeg from writing.
        yield "none"
        return
    descriptor = os.open(path, flags, 0o666)
    try:
        yield _lock(descriptor, path)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, path: Path) -> _LockState:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return "taken"
    except OSError:
        return "none"
    # The process that had the lock may have removed the path meanwhile.
    there = path.exists() and os.path.samestat(os.fstat(descriptor), path.stat())
    return "held" if there else "taken"


# --- errors --------------------------------------------------------------------------------------


@contextmanager
def output_errors(target: Path, *, only_full: bool = False) -> Iterator[None]:
    """Turn errors of the system into an `OutputError` that names the file.

    Args:
        target: The file or folder that is written.
        only_full: Only those of a disk that takes no more: the block does more than write.
    """
    try:
        yield
    except TurboRCMError:
        raise
    except Exception as error:
        code = _code_of(error)
        is_full = code in _FULL
        if not is_full and (only_full or not isinstance(error, OSError)):
            raise
        got, remedy = str(getattr(error, "strerror", "") or error), _ELSEWHERE
        if code is not None and is_full:
            place = _existing_parent(target)
            free = shutil.disk_usage(place).free / 2**30
            got = f"{os.strerror(code)}; {free:.1f} GiB free in {place}"
            remedy = "Free some space, or choose another disk"
        failure = OutputError(f"{target} cannot be written", got=got, remedy=remedy)
        failure.errno = code
        raise failure from error


def _code_of(error: Exception) -> int | None:
    """Return the system's code of an error, also of one that a library only quotes."""
    code: int | None = getattr(error, "errno", None)
    quoted = _QUOTED.search(str(error)) if code is None else None
    return int(quoted[1]) if quoted else code


# --- reading -------------------------------------------------------------------------------------


def check_regular(path: Path, error: type[TurboRCMError], most: int | None = None) -> None:
    """Refuse a folder, a pipe, for which reading would wait, and a device, which has no end.

    A missing file passes: opening it says why it cannot be read.

    Args:
        path: The file, or a link to it.
        error: The class of the error.
        most: Its largest plausible size in bytes.
    """
    try:
        status = path.stat()
    except OSError:
        return
    if not stat.S_ISREG(status.st_mode):
        raise error(f"{path}", expected="a regular file", got="a folder, a pipe or a device")
    if most is not None and status.st_size > most:
        raise error(f"{path}", expected=f"at most {most} bytes", got=str(status.st_size))


def read_json(
    path: Path,
    error: type[TurboRCMError] = CheckpointError,
    remedy: str = "Download the file again",
) -> dict[str, Any]:
    """Read a JSON object that others wrote.

    Args:
        path: The file.
        error: The class of the error if it is none, or cannot be read.
        remedy: The remedy of that error.
    """
    check_regular(path, error, _MOST_JSON)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as why:
        raise error(f"{path} is not valid JSON ({why})", remedy=remedy) from why
    except OSError as why:
        raise error(
            f"{path} cannot be read ({why.strerror})", remedy="Check its permissions and the disk"
        ) from why
    if not isinstance(value, dict):
        raise error(str(path), expected="a JSON object", got=type(value).__name__, remedy=remedy)
    return value


def try_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; empty if there is none that can be read."""
    try:
        return read_json(path)
    except CheckpointError:
        return {}
