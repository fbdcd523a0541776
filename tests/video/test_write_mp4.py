"""An mp4 is written whole, or it is said that it was not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from turbo_rcm_patch.__main__ import main
from turbo_rcm_patch.errors import SamplingError
from turbo_rcm_patch.video.video import find_ffmpeg, write_mp4

FRAMES = np.zeros((3, 16, 16, 3), dtype=np.uint8)


@pytest.mark.parametrize("name", ["a.webm", "a.txt", "turbo-v2.1"])
def test_an_ending_without_a_place_for_h264_leaves_nothing(name: str, tmp_path: Path) -> None:
    with pytest.raises(SamplingError, match="cannot be written as h264"):
        write_mp4(FRAMES, tmp_path / name, fps=16)
    assert not list(tmp_path.iterdir())


def test_a_folder_with_a_space_is_no_obstacle(tmp_path: Path) -> None:
    write_mp4(FRAMES, tmp_path / "a b" / "c d.mp4", fps=16)
    assert (tmp_path / "a b" / "c d.mp4").stat().st_size > 500


def test_generate_refuses_such_a_name_before_it_loads(tmp_path: Path, capsys) -> None:
    out = str(tmp_path / "circle.avi")
    model = ["--model", str(tmp_path / "none")]
    assert main(["generate", *model, "--prompt", "a red circle", "--out", out]) == 2
    assert "a file that ends in one of" in capsys.readouterr().err


def test_an_ffmpeg_that_counts_only_decoded_frames_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ffmpeg 7.0 does."""
    program, real = tmp_path / "ffmpeg", find_ffmpeg()
    program.write_text(
        '#!/bin/sh\ncase "$*" in\n'
        f"*'-c copy'*) '{real}' \"$@\" | grep -v ^frame= ;;\n"
        f"*) exec '{real}' \"$@\" ;;\nesac\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(program))
    write_mp4(FRAMES, tmp_path / "video.mp4", fps=8)
    assert (tmp_path / "video.mp4").stat().st_size > 500
