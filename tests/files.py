"""What is in a folder, and a program in the place of ffmpeg."""

from __future__ import annotations

from pathlib import Path

import pytest

__all__ = ["everything", "stub_ffmpeg"]


def everything(folder: Path) -> dict[str, bytes]:
    """The content of every file, by its path in the folder."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def stub_ffmpeg(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Take a shell script for ffmpeg; $FFMPEG is the real one, and $OUT the file to write."""
    from imageio_ffmpeg import get_ffmpeg_exe

    path = folder / "bin" / "ffmpeg"
    path.parent.mkdir()
    out = 'for last; do :; done; OUT="${last#file:}"'
    path.write_text(f"#!/bin/sh\nFFMPEG={get_ffmpeg_exe()}\n{out}\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(path))
