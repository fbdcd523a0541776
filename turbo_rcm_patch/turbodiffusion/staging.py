"""Write beside the target and rename at the end, so that a target is complete or absent."""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from turbo_rcm_patch.errors import OutputExistsError, TurboRCMError
from turbo_rcm_patch.turbodiffusion.locks import lock_file

#: A folder may be replaced only if it contains one of these.
_OURS = ("config.json", "model_index.json")
#: How a disk says that it takes no more, and how libraries quote it.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
_OS_ERROR = re.compile(r"(?:os error |Errno )(\d+)")
#: File in a folder of `staged` that its process holds a lock on.
_LOCK = "lock"
#: Name of the same file before it is locked, and where a file system has no locks.
_UNLOCKED = "unlocked"
#: Seconds after which a folder without either is nobody's.
_FORGOTTEN = 3600


def check_target(target: Path, *, force: bool, folder: bool) -> None:
    """Refuse a target that exists, unless it may be replaced.

    Args:
        target: A file or a folder to be.
        force: Whether it may be replaced.
        folder: Whether it is to be a folder.

    Raises:
        OutputExistsError: It is there and `force` is off; or it is a folder without a model, or a
            file where a folder is to be or the other way round, which `force` does not remove.
    """
    if not (target.exists() or target.is_symlink()):
        return
    if not force:
        raise OutputExistsError(
            f"{target} already exists",
            expected="a path that does not exist",
            remedy="Choose another path, or pass --force (force=True) to replace it",
        )
    if target.exists() and target.is_dir() != folder:
        raise OutputExistsError(
            f"{target} already exists and is not replaced",
            expected="a folder" if folder else "a file",
            got="a folder" if target.is_dir() else "a file",
            remedy="Choose another path",
        )
    if folder and target.is_dir() and any(target.iterdir()):
        inside = sorted(path.name for path in target.iterdir())[:6]
        if not any(name in os.listdir(target) for name in _OURS):
            raise OutputExistsError(
                f"{target} is a folder without a model, so it is not replaced",
                expected=f"a folder with one of {_OURS}",
                got=str(inside),
                remedy="Remove it yourself if you do not need it",
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


@contextmanager
def staged(
    target: Path, *, force: bool, folder: bool, needed: int = 0, copied: int = 0
) -> Iterator[Path]:
    """Give a path beside `target` that becomes `target` when the block ends, and is removed if the
    block fails.

    An interruption (Ctrl-C) is a failure too. What was there is removed only when the new one is
    complete and in its place. What a killed process left is removed by the next one.

    Args:
        target: A file or a folder to be.
        force: Whether it may replace what is there.
        folder: Whether a folder is written; it is made.
        needed: Bytes of the weights that will be written.
        copied: Bytes that will be copied from elsewhere.

    Raises:
        OutputExistsError: It already exists, or cannot be written: the disk is full, say.
    """
    target = target.absolute()  # "." has no name, and is its own parent.
    remove_abandoned(target)  # It may put back what was there, and makes room.
    check_target(target, force=force, folder=folder)
    check_space(target, needed, copied=copied)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        place = Path(tempfile.mkdtemp(prefix=_prefix(target), dir=target.parent))
        lock = _lock(place)
    except OSError as error:
        raise OutputExistsError(
            f"{target.parent} cannot be written to ({error.strerror})",
            remedy="Choose another path",
        ) from error
    try:
        made = place / "new"
        if folder:
            made.mkdir()
        yield made
        check_target(target, force=force, folder=folder)  # It took minutes.
        _put(made, target, place / "old", folder=folder)
    except Exception as error:
        why = _unwritten(error)
        if why is None:
            raise
        free = shutil.disk_usage(target.parent).free
        raise OutputExistsError(
            f"{target} could not be written ({why}); what was written is removed",
            got=f"{free / 2**30:.1f} GiB free in {target.parent}",
            remedy="Free some space, or choose another disk",
        ) from error
    finally:
        try:
            _remove(place)
        finally:
            if lock is not None:
                os.close(lock)


def _remove(place: Path) -> None:
    """Remove a folder of `staged` with its lock last, because nothing removes one without."""
    for path in place.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != _LOCK:
            path.unlink()
    shutil.rmtree(place, ignore_errors=True)


def _put(made: Path, target: Path, old: Path, *, folder: bool) -> None:
    """Move what was made to its place, and what was there to `old`: a file in one step, a folder
    in two, because no rename replaces a folder that is not empty."""
    if not folder:
        os.replace(made, target)
        return
    try:
        if target.exists() or target.is_symlink():
            os.replace(target, old)
        os.replace(made, target)
    except BaseException:
        if os.path.lexists(old) and not os.path.lexists(target):
            os.replace(old, target)
        raise


def _unwritten(error: Exception) -> str | None:
    """The reason why a file could not be written, if the error of a library is about that."""
    if isinstance(error, TurboRCMError):
        return None
    if "inline_container" in str(error):  # Of torch's archives, which are only written here.
        return "the file system took no more"
    code = getattr(error, "errno", None)
    if code is None:  # safetensors' own, and the list of what shutil could not copy.
        said = _OS_ERROR.search(str(error))
        code = int(said[1]) if said else None
    return os.strerror(code) if code in _FULL else None


def remove_abandoned(target: Path) -> None:
    """Remove what killed processes left of a target that `staged` was writing.

    A folder that was replaced and is gone, because its process was killed between two renames, is
    put back first. A process holds a lock as long as it lives, however it ends. What cannot be
    locked stays: its process lives, or this file system has no locks. So does what lost its lock
    less than an hour ago.

    Args:
        target: A file or a folder to be.
    """
    start = _prefix(target)
    try:
        beside = [path for path in target.parent.iterdir() if path.name.startswith(start)]
    except OSError:
        return
    for place in beside:
        lock = None
        try:
            lock = os.open(place / _LOCK, os.O_RDWR)
            lock_file(lock)
        except OSError:
            if lock is not None:
                os.close(lock)
                continue
            if not _forgotten(place):
                continue
        try:
            if os.path.lexists(place / "old") and not os.path.lexists(target):
                os.rename(place / "old", target)  # The only one there is.
            _remove(place)
        except OSError:
            pass
        finally:
            if lock is not None:
                os.close(lock)


def _forgotten(place: Path) -> bool:
    """Whether a folder lost its lock while it was removed; one that is new has none yet."""
    if any(os.path.lexists(place / name) for name in (_LOCK, _UNLOCKED)):
        return False
    try:
        return time.time() - place.stat().st_mtime > _FORGOTTEN
    except OSError:
        return False


def _prefix(target: Path) -> str:
    return f".{target.name}.partial-"


def _lock(place: Path) -> int | None:
    """Lock a new folder until the descriptor is closed; None on file systems without locks."""
    try:
        lock = os.open(place / _UNLOCKED, os.O_RDWR | os.O_CREAT)
    except OSError:
        return None
    try:
        lock_file(lock)
        os.rename(place / _UNLOCKED, place / _LOCK)  # Nobody sees it before it is locked.
    except OSError:
        os.close(lock)
        return None
    return lock


def check_space(target: Path, written: int, *, copied: int = 0) -> None:
    """Refuse to begin writing if the disk has too little space.

    Args:
        target: A file or a folder to be.
        written: Bytes of the weights that will be written.
        copied: Bytes that will be copied from elsewhere.

    Raises:
        OutputExistsError: The disk of `target` has fewer bytes left.
    """
    parent = target.parent
    while not parent.exists():
        parent = parent.parent
    free = shutil.disk_usage(parent).free
    if free < written + copied:
        parts = f", {copied / 2**30:.1f} GiB of them copies of the base" if copied else ""
        raise OutputExistsError(
            f"{parent} has too little space for {target.name}",
            expected=f"{(written + copied) / 2**30:.1f} GiB{parts}",
            got=f"{free / 2**30:.1f} GiB",
            remedy="Choose another disk, or a smaller --dtype"
            + (", or link to the base (without --copy)" if copied else ""),
        )
