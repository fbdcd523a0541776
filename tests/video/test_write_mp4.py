"""An mp4 is written whole, or it is said that it was not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.files import everything, stub_ffmpeg
from turbo_rcm_patch.errors import OutputError, SamplingError
from turbo_rcm_patch.video.video import read_frames, write_mp4

imageio_ffmpeg = pytest.importorskip(
    "imageio_ffmpeg", reason="videos are written by ffmpeg: pip install imageio-ffmpeg"
)

FRAMES = np.random.default_rng(0).integers(0, 256, (9, 64, 64, 3), dtype=np.uint8)


@pytest.mark.parametrize("name", ["a.webm", "a.txt", "turbo-v2.1"])
def test_an_ending_without_a_place_for_h264_leaves_nothing(name: str, tmp_path: Path) -> None:
    with pytest.raises(SamplingError, match="cannot be written as h264"):
        write_mp4(FRAMES, tmp_path / name, fps=16)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["-y.mp4", "concat:a.mov", "%d.mkv", "a b'c.m4v", "a b/c d.mp4"])
def test_a_name_is_a_name_to_ffmpeg(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    write_mp4(FRAMES, Path(name), fps=16)
    assert list(everything(tmp_path)) == [name]
    assert len(read_frames(Path(name))) == len(FRAMES)


@pytest.mark.parametrize("size", [(64, 64), (33, 47)], ids=["even", "odd"])
def test_what_is_written_can_be_read(size: tuple[int, int], tmp_path: Path) -> None:
    grey = np.full((5, *size, 3), 100, np.uint8)
    write_mp4(grey, tmp_path / "v.mp4", fps=16)
    frames = read_frames(tmp_path / "v.mp4")
    even = tuple(side + side % 2 for side in size)
    assert len(frames) == 5 and frames[0].shape == (*even, 3)
    assert abs(frames[4].astype(int) - 100).max() <= 3


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ('"$FFMPEG" "$@"; echo "No space left on device" >&2; exit 228',
         "exit 228, No space left"),
        ("cat >/dev/null; exit 0", "expected 9 frames; got 0"),
        ('"$FFMPEG" "$@" && head -c 2000 "$OUT" >"$OUT.x" && mv "$OUT.x" "$OUT"', "ffmpeg failed"),
        ('head -c 1000 >/dev/null; kill -9 $$', "signal 9"),
        ('case "$*" in *rawvideo*) head -c 49152 | "$FFMPEG" "$@"; cat >/dev/null; exit 0 ;; esac'
         '; exec "$FFMPEG" "$@"', "expected 9 frames; got 4"),
    ],
    ids=["full", "nothing", "truncated", "killed", "lost frames"],
)  # fmt: skip
def test_a_good_video_is_not_replaced_by_a_broken_one(
    script: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out" / "v.mp4"
    write_mp4(FRAMES, path, fps=16)
    good = path.read_bytes()
    stub_ffmpeg(tmp_path, monkeypatch, script)
    with pytest.raises(OutputError, match=words) as caught:
        write_mp4(FRAMES, path, fps=16)
    assert str(path) in str(caught.value)
    assert everything(path.parent) == {"v.mp4": good}
