"""What is in a folder."""

from __future__ import annotations

from pathlib import Path

__all__ = ["everything"]


def everything(folder: Path) -> dict[str, bytes]:
    """The content of every file, by its path in the folder."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
