"""mp4 files and contact sheets from float frames."""

from __future__ import annotations

import math
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Final, Literal

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from turbo_rcm_patch.errors import MissingPackageError, OutputError, SamplingError
from turbo_rcm_patch.extras import require
from turbo_rcm_patch.output import atomic

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
#: What the panes show and where: column and row.
PANES: Final = {
    "baseline": (0, 0),
    "patched": (1, 0),
    "control": (2, 0),
    "patched difference": (1, 1),
    "control difference": (2, 1),
}
#: Frames between two of which each can be shown without those before it, so that seeking is quick.
SEEK_EVERY: Final = 8
#: Differences are amplified by one of these where they are shown.
GAINS: Final = (4, 8, 16, 32, 64, 128)
LABEL_HEIGHT: Final = 26
GAP: Final = 8
#: Most frames that are read of a video.
MOST_FRAMES: Final = 257
#: Frames of a video in a contact sheet, evenly spread, first and last included.
COLUMNS: Final = 6
_REMEDY: Final = (
    "Is the disk full? If not, `python -m turbo_rcm_patch doctor` says which ffmpeg this is"
)
INK: Final = (32, 36, 44)
PAPER: Final = (255, 255, 255)


def amplified_difference(a: torch.Tensor, b: torch.Tensor, gain: float) -> torch.Tensor:
    """|a - b| * gain, clipped to 0..1; both [F, H, W, 3]."""
    return ((a - b).abs() * gain).clamp(0, 1)


def choose_gain(differences: Sequence[torch.Tensor]) -> int:
    """Choose the amplification at which nearly all of these differences stay below full
    brightness.

    Args:
        differences: |a - b| of two videos each, any shape. One gain serves all, so that they can
            be compared by eye.
    """
    largest = max(float(np.quantile(one.nan_to_num().numpy(), 0.998)) for one in differences)
    fitting = [gain for gain in GAINS if gain * largest <= 1.0]
    return max(fitting, default=GAINS[0])


def as_bytes(frames: torch.Tensor) -> np.ndarray:
    """Frames [F, H, W, 3], float in 0..1, as uint8; NaN is black."""
    bytes_of = (frames.clamp(0, 1).nan_to_num() * 255).round().to(torch.uint8)
    return bytes_of.cpu().numpy()


def enlarge(frames: torch.Tensor, method: Literal["smooth", "nearest"] = "smooth") -> np.ndarray:
    """Frames as bytes, enlarged by a whole factor to at least `MIN_SIDE` pixels on the shorter
    side.

    Args:
        frames: [F, H, W, 3], float in 0..1.
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
    """Videos of one size, each under its label: next to each other, or in two columns if that
    would be wider than `MAX_WIDTH`; uint8, [F, H', W', 3]."""
    height, width = next(iter(videos.values())).shape[1:3]
    columns = len(videos) if len(videos) * (width + GAP) <= MAX_WIDTH else 2
    rows = math.ceil(len(videos) / columns)
    cell_height, cell_width = height + LABEL_HEIGHT, width + GAP
    size = (columns * cell_width - GAP, rows * cell_height)
    paper = Image.new("RGB", size, PAPER)
    pen = ImageDraw.Draw(paper)
    font = ImageFont.load_default(size=15)
    places = [(i // columns * cell_height, i % columns * cell_width) for i in range(len(videos))]
    for label, (top, left) in zip(videos, places, strict=True):
        pen.text((left, top + 4), label, fill=INK, font=font)
    canvas = np.repeat(np.asarray(paper)[None], min(len(v) for v in videos.values()), axis=0)
    for video, (top, left) in zip(videos.values(), places, strict=True):
        top += LABEL_HEIGHT
        canvas[:, top : top + height, left : left + width] = video[: len(canvas)]
    return canvas


def pane_size(height: int, width: int) -> tuple[int, int]:
    """Height and width of a pane of the report's player, both even, of a video of this size."""
    factor = math.ceil(MIN_SIDE / min(height, width))
    scale = min(factor, MAX_PANE / width)
    return round(height * scale / 2) * 2, round(width * scale / 2) * 2


def panes(videos: Mapping[str, np.ndarray], size: tuple[int, int]) -> np.ndarray:
    """One video that holds several, so that a player cannot show different frames of them.

    Args:
        videos: What each pane of `PANES` shows; uint8, [F, H, W, 3], of one size.
        size: Height and width of a pane.

    Returns:
        uint8, [F, 2 * height, 3 * width, 3]; black where there is no pane.
    """
    height, width = size
    columns, rows = (1 + max(place[i] for place in PANES.values()) for i in (0, 1))
    count = min(len(video) for video in videos.values())
    canvas = np.zeros((count, rows * height, columns * width, 3), np.uint8)
    for name, (column, row) in PANES.items():
        top, left = row * height, column * width
        for target, frame in zip(canvas, videos[name], strict=False):
            if frame.shape[:2] != size:
                picture = Image.fromarray(frame).resize((width, height), Image.Resampling.BOX)
                frame = np.asarray(picture)
            target[top : top + height, left : left + width] = frame
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
        raise MissingPackageError(
            "no ffmpeg to write mp4 with",
            got=str(error),
            remedy="Run `pip install --force-reinstall imageio-ffmpeg`, which brings one",
        ) from error


def write_mp4(frames: np.ndarray, path: Path, fps: int, *, seek_every: int | None = None) -> None:
    """Write h264 that every browser plays; odd sides are padded by repeating the edge.

    Args:
        frames: uint8, [F, H, W, 3].
        path: The file, replaced only by one that is complete and can be read again.
        fps: Frames a second.
        seek_every: Most frames between two that can be shown without those before them.

    Raises:
        SamplingError: The ending is one that has no place for h264.
        OutputError: ffmpeg failed, for instance on a full disk; what was there is as it was.
        MissingPackageError: There is no ffmpeg.
    """
    ending = path.suffix.lower()
    if ending not in ENDINGS:
        raise SamplingError(
            f"{path} cannot be written as h264",
            expected=f"a file name that ends in one of {ENDINGS}",
            got=path.suffix or "no ending",
        )
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
        found = _count_frames(temporary, path)
        if found != count:
            raise OutputError(
                f"{path} was not written: ffmpeg reported success, but its file lacks frames",
                expected=f"{count} frames",
                got=str(found),
                remedy=_REMEDY,
            )


def read_frames(path: Path, name: str = "video") -> list[Image.Image]:
    """Read the first frames of a video, at most `MOST_FRAMES`, as RGB. Their times are ignored.

    Args:
        path: A file of any kind that ffmpeg reads, an animated image included.
        name: What the video is for, for messages.

    Raises:
        SamplingError: The file is missing, or holds no video.
        MissingPackageError: There is no ffmpeg.
    """
    path = path.expanduser()
    if not path.is_file():
        raise SamplingError(
            f"{name} {path} cannot be read (there is no such file)",
            expected="a video file",
            remedy="Check its name",
        )
    command = [find_ffmpeg(), "-v", "error", "-i", _file(path), "-map", "0:v:0"]
    command += ["-fps_mode", "passthrough", "-frames:v", str(MOST_FRAMES)]
    command += ["-f", "image2pipe", "-c:v", "ppm", "-pix_fmt", "rgb24", "-"]
    frames: list[Image.Image] = []
    with tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors
            )
        except OSError as error:
            raise _no_program(command[0], error) from error
        with process:
            assert process.stdout is not None
            try:
                frames += _pictures(process.stdout)
            except BaseException:
                process.kill()
                raise
        errors.seek(0)
        said = errors.read().decode(errors="replace").strip().splitlines()
    if process.returncode or not frames:
        raise SamplingError(
            f"{name} {path} cannot be read",
            expected="a video file",
            got=f"from ffmpeg: {said[-1][:200] if said else 'no frame'}",
            remedy="Check whether it is complete, or convert it to mp4",
        )
    return frames


def _pictures(stream: IO[bytes]) -> Iterator[Image.Image]:
    """The pictures of binary PPM files in a row, until they end or are cut off."""
    while True:
        _, sides, _ = (stream.readline().split() for _ in range(3))  # P6, width and height, 255
        if len(sides) != 2:
            return
        width, height = map(int, sides)
        pixels = stream.read(3 * width * height)
        if len(pixels) < 3 * width * height:
            return
        yield Image.frombytes("RGB", (width, height), pixels)


def _count_frames(video: Path, told: Path) -> int:
    """Count the frames of a video by reading all of it."""
    whole = ["-xerror", "-i", _file(video), "-map", "0:v:0"]
    to_nothing = ["-f", "null", "-nostats", "-progress", "pipe:1", "-"]
    for how in (["-c", "copy"], []):  # ffmpeg 7.0 counts only frames that it decodes.
        said, _ = run_ffmpeg([*whole, *how, *to_nothing], f"{told} was not written")
        counts = [line for line in said.splitlines() if line.startswith("frame=")]
        if counts:
            return int(counts[-1].partition("=")[2])
    return 0


def _file(path: Path) -> str:
    """Write a path so that ffmpeg takes it literally, even if it looks like an option or a
    protocol."""
    return f"file:{path.absolute()}"


def run_ffmpeg(
    arguments: Sequence[str], failed: str, given: np.ndarray | None = None
) -> tuple[str, str]:
    """Run ffmpeg, and end it if we are interrupted.

    Args:
        arguments: Of ffmpeg; `-v error` comes before them.
        failed: What an error says first.
        given: What it reads, if anything.

    Returns:
        What it printed, and what it logged.

    Raises:
        OutputError: It failed.
        MissingPackageError: There is no ffmpeg.
    """
    program = find_ffmpeg()
    try:
        done = subprocess.run(
            [program, "-v", "error", *arguments],
            input=b"" if given is None else given.data.cast("B"),
            capture_output=True,
            check=False,
        )
    except OSError as error:
        raise _no_program(program, error) from error
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        # The first lines say what happened, the last that therefore nothing else did.
        how = f"signal {-done.returncode}" if done.returncode < 0 else f"exit {done.returncode}"
        raise OutputError(
            f"{failed}: ffmpeg failed",
            got=f"{how}, {' / '.join(said[:3])[:400] or 'no message'}",
            remedy=_REMEDY,
        )
    return done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")


def _no_program(program: str, error: OSError) -> MissingPackageError:
    """IMAGEIO_FFMPEG_EXE may name anything."""
    return MissingPackageError(
        "no ffmpeg to read and write videos with",
        got=f"{program} ({error.strerror})",
        remedy="Unset IMAGEIO_FFMPEG_EXE, or let it name an ffmpeg",
    )


def contact_sheet(rows: dict[str, np.ndarray], path: Path) -> None:
    """Some frames of each video, one labelled row a video, as a PNG.

    Args:
        rows: Label to uint8 frames [F, H, W, 3], all of one size.
        path: The file, replaced only when complete.
    """
    frames = next(iter(rows.values()))
    count, height, width = frames.shape[:3]
    columns = min(count, COLUMNS)
    picks = [round(i * (count - 1) / max(1, columns - 1)) for i in range(columns)]
    scale = min(1.0, 220 / width)
    width, height = round(width * scale), round(height * scale)
    sheet = Image.new(
        "RGB",
        (len(picks) * (width + GAP) + GAP, len(rows) * (height + LABEL_HEIGHT) + GAP),
        PAPER,
    )
    pen = ImageDraw.Draw(sheet)
    for r, (label, video) in enumerate(rows.items()):
        top = r * (height + LABEL_HEIGHT)
        pen.text((GAP, top + 5), label, fill=INK, font=ImageFont.load_default(size=14))
        for c, index in enumerate(picks):
            tile = Image.fromarray(video[index]).resize((width, height), Image.Resampling.LANCZOS)
            sheet.paste(tile, (GAP + c * (width + GAP), top + LABEL_HEIGHT))
    with atomic(path) as temporary:
        sheet.save(temporary, format="PNG")
