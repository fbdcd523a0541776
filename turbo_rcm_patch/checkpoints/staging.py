"""Write to a temporary path and rename it at the end, so that a target is complete or absent."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

from turbo_rcm_patch.errors import OutputExistsError
from turbo_rcm_patch.output import locked, telling

#: A folder may be replaced only if it contains one of these.
_MODEL: Final = ("config.json", "model_index.json")


def check_target(target: Path, *, force: bool, folder: bool) -> None:
    """Refuse a target that exists, unless it may be replaced.

    Args:
        target: The file or folder that will be written.
        force: Allow replacing it.
        folder: True if it will be a folder.

    Raises:
        OutputExistsError: It is there and `force` is off; or it is a folder without a model, or a
            file where a folder is to be or the other way round, which `force` does not remove.
    """
    if not os.path.lexists(target):
        return
    if not force:
        raise OutputExistsError(
            f"{target} already exists",
            expected="a path that does not exist",
            remedy="Choose another path, or pass --force (force=True) to replace it",
        )
    inside, expected = sorted(os.listdir(target)) if target.is_dir() else [], ""
    if target.exists() and target.is_dir() != folder:
        expected = "a folder" if folder else "a file"
    elif inside and not set(inside) & set(_MODEL):
        expected = f"a folder with one of {_MODEL}"
    if expected:
        raise OutputExistsError(
            f"{target} is not replaced",
            expected=expected,
            got=f"a folder with {inside[:6]}" if target.is_dir() else "a file",
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


@contextmanager
def staged(target: Path, *, force: bool, folder: bool, needed: int = 0) -> Iterator[Path]:
    """Give a temporary path that becomes `target` when the block ends, and is removed if the block
    fails or is interrupted.

    The target that was there is removed only when the new one is complete and in its place. The
    files of a killed process are removed by the next one that writes the same target.

    Args:
        target: The file or folder that will be written.
        force: Allow replacing it.
        folder: True if it will be a folder; it is made.
        needed: Bytes that will be written.

    Raises:
        OutputExistsError: The target already exists, another process is writing it, or there is
            too little space for it.
        OutputError: It cannot be written, for instance because the disk is full.
    """
    target = target.absolute()  # "." has no name, and is its own parent.
    place = target.parent / f".{target.name}.partial"
    made, old = place / "new", place / "old"
    with ExitStack() as lock, telling(target, full=True):
        with telling(target):
            _enter(lock, place, target)
        try:
            _settle(place, target)
            check_target(target, force=force, folder=folder)
            free = shutil.disk_usage(target.parent).free
            if free < needed:
                raise OutputExistsError(
                    f"{target.parent} has too little space for {target.name}",
                    expected=f"{needed / 2**30:.1f} GiB",
                    got=f"{free / 2**30:.1f} GiB",
                    remedy="Choose another disk, a smaller --dtype, or links in place of --copy",
                )
            if folder:
                made.mkdir()
            yield made
            check_target(target, force=force, folder=folder)  # It took minutes.
            # No rename replaces a folder that is not empty.
            if folder and os.path.lexists(target):
                os.replace(target, old)
            os.replace(made, target)
        finally:
            with suppress(OSError):
                _settle(place, target)
                place.rmdir()


def _enter(lock: ExitStack, place: Path, target: Path) -> None:
    """Make the folder of a target's parts, and lock it, on file systems that support locks."""
    while True:
        try:
            place.mkdir(parents=True, exist_ok=True)
            before = place.stat().st_ino
            state = lock.enter_context(locked(place))
        except FileNotFoundError:  # Its owner finished and removed it meanwhile.
            continue
        if state == "taken":
            raise OutputExistsError(
                f"{target} is being written by another process",
                remedy="Wait for it, or choose another path",
            )
        if place.is_dir() and place.stat().st_ino == before:
            return
        lock.close()  # The same, between its opening and its lock.


def _settle(place: Path, target: Path) -> None:
    """Restore a target whose replacement did not finish, and remove the unfinished parts."""
    old = place / "old"
    if os.path.lexists(old) and not os.path.lexists(target):
        os.rename(old, target)
    for path in (place / "new", old):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
