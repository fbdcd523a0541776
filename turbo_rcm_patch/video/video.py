"""mp4 files from float frames, and frames from mp4 files."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from subprocess import PIPE, Popen
from tempfile import TemporaryFile
from typing import Final, Literal

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from turbo_rcm_patch.errors import MissingPackageError, OutputError, SamplingError
from turbo_rcm_patch.extras import require
from turbo_rcm_patch.files import atomic
from turbo_rcm_patch.interrupts import held_back

#: Files that can hold h264.
ENDINGS: Final = (".mp4", ".m4v", ".mov", ".mkv")
#: Files that hold a video and not an image.
VIDEO_ENDINGS: Final = (*ENDINGS, ".webm", ".avi", ".gif")
#: Videos with a shorter side below this are enlarged, so that a person can see them.
MIN_SIDE: Final = 256
#: Videos side by side are at most this wide.
MAX_WIDTH: Final = 1920
#: Panes of the report's player are at most this wide: a report is sent around, and phones decode
#: no video that is wider than some 4,000 pixels.
MAX_PANE: Final = 832
#: Video of a pane -> its column and row.
PANES: Final = {
    "baseline": (0, 0),
    "patched": (1, 0),
    "control": (2, 0),
    "patched difference": (1, 1),
    "control difference": (2, 1),
}
#: Every so many frames one can be shown without those before it, so that seeking is quick.
SEEK_EVERY: Final = 8
#: Differences are amplified by one of these where they are shown.
GAINS: Final = (4, 8, 16, 32, 64, 128)
LABEL_HEIGHT: Final = 26
GAP: Final = 8
#: Most frames that are read of a video.
MOST_FRAMES: Final = 257
#: Most numbers of a clip: 1 GiB in fp32, or 97 frames of 720 x 1280.
MOST_VALUES: Final = 1 << 28
_REMEDY: Final = (
    "Is the disk full? If not, `python -m turbo_rcm_patch doctor` says which ffmpeg this is"
)
INK: Final = (32, 36, 44)
PAPER: Final = (255, 255, 255)


def choose_gain(differences: Sequence[torch.Tensor]) -> int:
    """Choose the amplification at which nearly all of these differences stay below full
    brightness.

    Args:
        differences: |a - b| of two videos each, any shape. One gain serves all, so that they can
            be compared by eye.
    """
    largest = max(
        float(np.quantile(difference.nan_to_num().numpy(), 0.998)) for difference in differences
    )
    fitting = [gain for gain in GAINS if gain * largest <= 1.0]
    return max(fitting, default=GAINS[0])


def as_bytes(frames: torch.Tensor) -> np.ndarray:
    """Return frames [F, H, W, 3], float, as uint8: clipped to 0..1, and NaN becomes black."""
    bytes_of = (frames.clamp(0, 1).nan_to_num() * 255).round().to(torch.uint8)
    return bytes_of.cpu().numpy()


def enlarge(frames: torch.Tensor, method: Literal["smooth", "nearest"] = "smooth") -> np.ndarray:
    """Enlarge frames by a whole factor to at least `MIN_SIDE` pixels on the shorter side.

    Args:
        frames: [F, H, W, 3], float; clipped to 0..1.
        method: "smooth" (Lanczos) for pictures, "nearest" where single pixels matter.

    Returns:
        uint8, [F, H', W', 3].
    """
    pixels = as_bytes(frames)
    height, width = pixels.shape[1:3]
    factor = math.ceil(MIN_SIDE / min(height, width))
    if factor == 1:
        return pixels
    kind = Image.Resampling.LANCZOS if method == "smooth" else Image.Resampling.NEAREST
    size = (width * factor, height * factor)
    return np.stack([np.asarray(Image.fromarray(p).resize(size, kind)) for p in pixels])


def side_by_side(videos: dict[str, np.ndarray]) -> np.ndarray:
    """Put videos of one size next to each other, each under its label, or in two columns if that
    would be wider than `MAX_WIDTH`; uint8, [F, H', W', 3]."""
    width = next(iter(videos.values())).shape[2]
    columns = len(videos) if len(videos) * (width + GAP) <= MAX_WIDTH else 2
    gap = [(0, 0), (0, 0), (0, GAP), (0, 0)]
    cells = [np.pad(_labelled(*pair), gap, constant_values=255) for pair in videos.items()]
    cells += [np.full_like(cells[0], 255)] * (-len(cells) % columns)
    rows = [np.concatenate(cells[i : i + columns], 2) for i in range(0, len(cells), columns)]
    return np.concatenate(rows, 1)[:, :, :-GAP]


def _labelled(label: str, video: np.ndarray) -> np.ndarray:
    """Put a label above a video, uint8 [F, H, W, 3]."""
    strip = Image.new("RGB", (video.shape[2], LABEL_HEIGHT), PAPER)
    font = ImageFont.load_default(size=15)
    ImageDraw.Draw(strip).text((0, 4), label, fill=INK, font=font)
    return np.concatenate([np.repeat(np.asarray(strip)[None], len(video), 0), video], 1)


def pane_size(height: int, width: int) -> tuple[int, int]:
    """Return height and width, both even, of a pane of the report's player for such a video."""
    factor = math.ceil(MIN_SIDE / min(height, width))
    scale = min(factor, MAX_PANE / width)
    return round(height * scale / 2) * 2, round(width * scale / 2) * 2


def panes(videos: Mapping[str, np.ndarray], size: tuple[int, int]) -> np.ndarray:
    """Join videos to one, so that a player cannot show different frames of them.

    Args:
        videos: Names in `PANES` -> its video; uint8, [F, H, W, 3], of one size.
        size: Height and width of a pane.

    Returns:
        uint8, [F, 2 * height, 3 * width, 3]; black where there is no pane.
    """
    height, width = size
    canvas = np.zeros((len(videos["baseline"]), 2 * height, 3 * width, 3), np.uint8)
    for name, video in videos.items():
        column, row = PANES[name]
        place = canvas[:, row * height :, column * width :][:, :height, :width]
        for i, frame in enumerate(video):
            picture = Image.fromarray(frame).resize((width, height), Image.Resampling.BOX)
            place[i] = np.asarray(picture)
    return canvas


def find_ffmpeg() -> str:
    """Find the ffmpeg that writes videos.

    Raises:
        MissingPackageError: There is none.
    """
    require("video", "writing mp4", "imageio", "imageio_ffmpeg", "numpy", "PIL")
    try:
        import imageio_ffmpeg

        return str(imageio_ffmpeg.get_ffmpeg_exe())
    except (ImportError, RuntimeError) as error:
        what, got = "no ffmpeg to write mp4 with", str(error)
        remedy = "Run `pip install --force-reinstall imageio-ffmpeg`, which brings one"
        raise MissingPackageError(what, got=got, remedy=remedy) from error


def write_mp4(
    frames: np.ndarray, path: Path, fps: float, *, seek_every: int | None = None
) -> None:
    """Write h264 that every browser plays; odd sides are padded by repeating the edge.

    Args:
        frames: uint8, [F, H, W, 3].
        path: The file, replaced only by one that is complete and can be read again.
        fps: Frames a second.
        seek_every: The most frames from one that can be shown by itself to the next.

    Raises:
        SamplingError: A file with this ending cannot hold h264.
        OutputError: ffmpeg failed, for instance on a full disk; an existing file is unchanged.
        MissingPackageError: There is no ffmpeg.
    """
    if (ending := path.suffix.lower()) not in ENDINGS:
        expected = f"a file name that ends in one of {ENDINGS}"
        raise SamplingError(f"{path} cannot be written as h264", expected=expected, got=ending)
    odd = [(0, 0), (0, frames.shape[1] % 2), (0, frames.shape[2] % 2), (0, 0)]
    frames = np.ascontiguousarray(np.pad(frames, odd, mode="edge"))
    count, height, width = frames.shape[:3]
    reads = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-r", str(fps)]
    encodes = ["-an", "-c:v", "libx264", "-pix_fmt", "yuv420p", "-crf", "16"]
    encodes += ["-preset", "veryfast"]
    if seek_every is not None:
        encodes += ["-g", str(seek_every)]
    if ending != ".mkv":
        encodes += ["-movflags", "+faststart"]
    with atomic(path) as temporary:
        arguments = [*reads, "-i", "pipe:0", *encodes, "-y", _file(temporary)]
        run_ffmpeg(arguments, f"{path} was not written", frames)
        written = _count_frames(temporary, path)
        if written != count:
            what = f"{path} was not written: ffmpeg reported success, but its file lacks frames"
            expected = f"{count} frames"
            raise OutputError(what, expected=expected, got=str(written), remedy=_REMEDY)


def read_frames(path: Path) -> list[np.ndarray]:
    """Read the frames of a video: uint8, [H, W, 3] each. Their times are ignored.

    Args:
        path: A file of any kind that ffmpeg reads, an animated image included.

    Raises:
        SamplingError: The file is missing, or holds no video; or it has more than `MOST_VALUES`
            bytes of pixels, or than `MOST_FRAMES` frames.
        MissingPackageError: There is no ffmpeg.
    """
    reads = ["-xerror", "-i", _file(path), "-map", "0:v:0", "-fps_mode", "passthrough"]
    # ffmpeg stops at the first picture beyond the limits.
    reads += ["-frames:v", str(MOST_FRAMES + 1), "-fs", str(MOST_VALUES)]
    code, out, messages = _ffmpeg(
        [*reads, "-f", "image2pipe", "-c:v", "ppm", "-pix_fmt", "rgb24", "-"]
    )
    if code or not out:
        raise SamplingError(
            f"video {path} cannot be read",
            expected="a video file",
            got=f"from ffmpeg: {messages.splitlines()[-1][:200] if messages else 'no frame'}",
            remedy="Check whether it is complete, or convert it to mp4",
        )
    frames = []
    stream = BytesIO(out)
    while stream.readline():  # P6
        width, height = map(int, stream.readline().split())
        stream.readline()  # 255
        pixels = np.frombuffer(stream.read(3 * width * height), np.uint8)
        frames.append(pixels.reshape(height, width, 3))
    if len(out) >= MOST_VALUES or len(frames) > MOST_FRAMES:
        raise SamplingError(
            f"{path} is too large",
            expected=f"at most {MOST_FRAMES} frames, and {MOST_VALUES} bytes of pixels",
            remedy="Cut it into parts",
        )
    return frames


def frame_rate(path: Path) -> float | None:
    """Return the frames a second that a video says it has; None if it says nothing, as a GIF of
    one picture does."""
    shows = ["-v", "info", "-nostats", "-i", _file(path), "-map", "0:v:0", "-t", "0"]
    _, _, messages = _ffmpeg([*shows, "-f", "null", "-"])
    match = re.search(r"Stream #0:\d+.*: Video: .*?([\d.]+) fps", messages)
    return float(match[1]) if match else None


def _count_frames(video: Path, target: Path) -> int:
    """Count the frames of a video by decoding all of it."""
    whole = ["-xerror", "-i", _file(video), "-map", "0:v:0"]
    to_nothing = ["-f", "null", "-nostats", "-progress", "pipe:1", "-"]
    messages, _ = run_ffmpeg([*whole, *to_nothing], f"{target} was not written")
    counts = [line for line in messages.splitlines() if line.startswith("frame=")]
    return int(counts[-1].partition("=")[2]) if counts else 0


def _file(path: Path) -> str:
    """Write a path so that ffmpeg takes it literally, even if it looks like an option or a
    protocol."""
    return f"file:{path.absolute()}"


def run_ffmpeg(
    arguments: Sequence[str], failed: str, frames: np.ndarray | None = None
) -> tuple[str, str]:
    """Run ffmpeg to its end, or end it if this process is interrupted.

    Args:
        arguments: Of ffmpeg; `-v error` comes before them.
        failed: How an error begins.
        frames: Its input, if there is any.

    Returns:
        What it printed, and what it logged.

    Raises:
        OutputError: It failed.
        MissingPackageError: There is no ffmpeg.
    """
    code, out, messages = _ffmpeg(arguments, frames)
    if code:
        # The first lines say what happened, the last that therefore nothing else did.
        how = f"signal {-code}" if code < 0 else f"exit {code}"
        got = f"{how}, {' / '.join(messages.splitlines()[:3])[:400] or 'no message'}"
        raise OutputError(f"{failed}: ffmpeg failed", got=got, remedy=_REMEDY)
    return out.decode(errors="replace"), messages


def _ffmpeg(arguments: Sequence[str], frames: np.ndarray | None = None) -> tuple[int, bytes, str]:
    """Return the exit code of ffmpeg, its output, and what it logged."""
    program, process = find_ffmpeg(), None
    try:
        # Its own session: Ctrl-C in a terminal reaches this process alone, which ends it.
        with TemporaryFile() as log:
            with held_back():
                command = [program, "-v", "error", *arguments]
                process = Popen(
                    command, stdin=PIPE, stdout=PIPE, stderr=log, start_new_session=True
                )
            out = process.communicate(b"" if frames is None else frames.tobytes())[0]
            log.seek(0)
            messages = log.read()
    except BaseException as error:
        if process is not None:
            with held_back(), process:  # which closes its pipes and waits
                process.kill()
        elif isinstance(error, OSError):  # IMAGEIO_FFMPEG_EXE may name anything.
            what, got = "no ffmpeg to read and write videos with", f"{program} ({error.strerror})"
            remedy = "Unset IMAGEIO_FFMPEG_EXE, or let it name an ffmpeg"
            raise MissingPackageError(what, got=got, remedy=remedy) from error
        raise
    return process.returncode, out, messages.decode(errors="replace").strip()
