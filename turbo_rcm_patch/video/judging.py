"""The verdict of `compare` on anybody's videos, without a model: files paired by name."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from turbo_rcm_patch.checkpoints.read import Progress
from turbo_rcm_patch.errors import (
    ConfigError,
    MissingPackageError,
    OutputError,
    SamplingError,
    TurboRCMError,
)
from turbo_rcm_patch.extras import require
from turbo_rcm_patch.files import check_regular, lock_folder
from turbo_rcm_patch.interrupts import reraise_interrupts
from turbo_rcm_patch.video.clips import Clip, measure
from turbo_rcm_patch.video.environment import code_digest, versions
from turbo_rcm_patch.video.measures import SSIM_SIDE
from turbo_rcm_patch.video.report import without_places, write_report
from turbo_rcm_patch.video.result import Judged
from turbo_rcm_patch.video.source import read_image
from turbo_rcm_patch.video.store import Store, check_out
from turbo_rcm_patch.video.verdict import judge
from turbo_rcm_patch.video.video import (
    MOST_VALUES,
    VIDEO_ENDINGS,
    frame_rate,
    read_frames,
)

#: Most bytes of a file of tensors: `MOST_VALUES` in fp64, and something beside them.
_MOST_BYTES: Final = 1 << 32
_TENSORS: Final = ".safetensors"
#: The name of its tensor.
_FRAMES: Final = "frames"
_SAVE: Final = (
    'Save decoded frames with `save_file({"frames": frames}, path)`, [F, H, W, 3] in 0..1'
)
_CODED: Final = (
    "Clips are {} files: unless these were coded without loss, their coding is what is measured "
    "(h264 alone takes a video some 45 dB away). Save .png or .safetensors"
)
#: Frames a second of clips that do not say.
FPS: Final = 16


def read_clip(path: Path) -> torch.Tensor:
    """Read a video, a folder of PNGs, or a file of tensors.

    Args:
        path: An .mp4 or another of `VIDEO_ENDINGS`; a folder of .png, in the order of the numbers
            in their names; or a .safetensors with a tensor "frames" [F, H, W, 3], uint8 or float
            in 0..1.

    Returns:
        [F, H, W, 3] in 0..1, fp32.

    Raises:
        SamplingError: It cannot be read, is none of these, or is too large.
    """
    if path.is_dir():
        return _folder(path)
    check_regular(path, SamplingError, _MOST_BYTES)
    if path.suffix.lower() == _TENSORS:
        return _tensor(path)
    return _stacked(read_frames(path), path)


def _folder(path: Path) -> torch.Tensor:
    def number(file: Path) -> list[tuple[int, str]]:
        parts = re.findall(r"\d+|\D+", file.name)
        return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]

    files = sorted(filter(_is_png, path.iterdir()), key=number)
    frames: list[np.ndarray] = []
    for file in files:
        frames.append(np.asarray(read_image(file)))
        _check_size(frames[0].size * len(files), path)
    return _stacked(frames, path)


def _stacked(frames: list[np.ndarray], path: Path) -> torch.Tensor:
    sizes = Counter(f"{frame.shape[1]} x {frame.shape[0]}" for frame in frames)
    if len(sizes) > 1:
        got = ", ".join(f"{count} of {size}" for size, count in sizes.items())
        raise _wrong(path, "frames of one size", got)
    return torch.from_numpy(np.stack(frames)).float() / 255


def _tensor(path: Path) -> torch.Tensor:
    try:
        with reraise_interrupts(), safe_open(path, framework="pt") as file:
            if _FRAMES not in (names := list(file.keys())):
                raise _wrong(path, f'a tensor "{_FRAMES}"', ", ".join(names[:8]), _SAVE)
            shape = file.get_slice(_FRAMES).get_shape()
            if len(shape) != 4 or shape[3] != 3:
                raise _wrong(path, "frames [F, H, W, 3]", shape, _SAVE)
            _check_size(int(np.prod(shape, dtype=object)), path)
            tensor: torch.Tensor = file.get_tensor(_FRAMES)
    except (OSError, SafetensorError) as error:
        raise SamplingError(f"{path} is missing, damaged or incomplete ({error})") from error
    if not (tensor.is_floating_point() or tensor.dtype == torch.uint8):
        raise _wrong(path, "uint8 or floats", tensor.dtype)
    frames = tensor.float() / (255 if tensor.dtype == torch.uint8 else 1)
    # A number that is not finite is a fault of the video, and not of its scale.
    low, high = map(float, frames.nan_to_num(0.5, 0.5, 0.5).aminmax())
    if not 0 <= low <= high <= 1:
        raise _wrong(path, "frames in 0..1", f"numbers from {low:.4g} to {high:.4g}", _SAVE)
    return frames


def _wrong(path: Path, expected: str, got: object, remedy: str = "") -> SamplingError:
    return SamplingError(str(path), expected=expected, got=str(got), remedy=remedy)


def _check_size(count: int, path: Path) -> None:
    if not 0 < count <= MOST_VALUES:
        raise _wrong(path, f"1 to {MOST_VALUES} numbers", count, "Cut it into parts")


def _is_png(path: Path) -> bool:
    return path.suffix.lower() == ".png" and not path.name.startswith(".")


def clips_in(folder: Path, option: str) -> dict[str, list[Path]]:
    """List the clips of a folder by their names without ending; a file is a clip by itself.

    Raises:
        SamplingError: It is no such place, or has no clip.
    """
    folder = folder.expanduser()
    if folder.is_file():
        return {"clip": [folder]}
    clips: dict[str, list[Path]] = {}
    try:
        for entry in sorted(folder.iterdir()):
            frames = entry.is_dir() and any(map(_is_png, entry.iterdir()))
            known = not entry.is_dir() and entry.suffix.lower() in (*VIDEO_ENDINGS, _TENSORS)
            if not entry.name.startswith(".") and (frames or known):
                str(entry).encode()  # into the report
                clips.setdefault(entry.name if frames else entry.stem, []).append(entry)
    except (OSError, UnicodeEncodeError) as error:
        what, expected = f"{option} {folder}", "a folder of clips with names in UTF-8, or a clip"
        raise SamplingError(what, expected=expected, got=ascii(str(error))) from error
    if not clips:
        expected = f"files {', '.join((*VIDEO_ENDINGS, _TENSORS))}, or folders of .png"
        raise SamplingError(f"{option} {folder} has no clip", expected=expected)
    return clips


def judge_folders(
    baseline: str | Path,
    candidate: str | Path,
    control: str | Path | None = None,
    *,
    out: str | Path,
    fps: float = FPS,
    fresh: bool = False,
    progress: Progress | None = None,
    command: str = "",
) -> Judged:
    """Judge videos against those of the same names, as `compare` judges its own.

    Args:
        baseline: A folder of clips (see `read_clip`), or one clip.
        candidate: The judged ones.
        control: Those of the baseline's model under another exact attention. Without them there
            are numbers and no verdict.
        out: Folder for the report on this baseline and candidate. Clips that are finished there
            are not measured again, unless their files have changed.
        fps: Frames a second of clips that do not say.
        fresh: Remove what was in `out`, and start again.
        progress: Called with a stage, what is done and the total, as the work proceeds.
        command: The command line, for the report.

    Raises:
        SamplingError: No clip could be judged, or `out` holds a report on other places.
        ConfigError: `fps` is not between 1 and 240.
    """
    require("report", "judge")
    if not 1 <= fps <= 240:
        raise ConfigError("fps", expected="from 1 to 240", got=f"{fps:g}")
    places = {"baseline": baseline, "candidate": candidate}
    places |= {"control": control} if control is not None else {}
    clips = {name: clips_in(Path(place), f"--{name}") for name, place in places.items()}
    progress = progress or (lambda *_: None)
    results: list[Clip] = []
    refused: dict[str, str] = {}
    with lock_folder(check_out(out, fresh=fresh)):
        identity = {"command": "judge", "fps": fps, "versions": versions(), "code": code_digest()}
        for name in ("baseline", "candidate"):
            identity[name] = str(Path(places[name]).expanduser().resolve())
        store = Store(out, identity, fresh=fresh)
        names = list(dict.fromkeys(name for named in clips.values() for name in named))
        for done, name in enumerate(names):
            progress("judge", done, len(names))
            try:
                pair = _paired(name, clips)
                inputs = {which: _digest(path) for which, path in pair.items()}
                kept = Clip.finished(store, Store.key(name, 0), inputs)
                results.append(kept or _measure(store, name, pair, inputs, fps))
            except (OutputError, MissingPackageError):
                raise  # of all clips
            except TurboRCMError as error:  # The others are judged.
                refused[name] = str(error)
            except OSError as error:
                refused[name] = f"{error.filename}: {error.strerror}"
        progress("judge", len(names), len(names))
        if not results:
            got = "; ".join(list(refused.values())[:3]) + "; ..." * (len(refused) > 3)
            raise SamplingError("no clip could be judged", got=got)
        paths = [path for named in clips.values() for files in named.values() for path in files]
        coded = sorted({path.suffix.lower() for path in paths} & {*VIDEO_ENDINGS})
        return conclude(
            store,
            results,
            command=command,
            places={
                name: without_places(str(Path(place).absolute())) for name, place in places.items()
            },
            refused=refused,
            notes=(_CODED.format(", ".join(coded)),) if coded else (),
        )


def conclude(
    store: Store,
    results: Sequence[Clip],
    *,
    numbers: Mapping[str, Any] = MappingProxyType({}),
    **facts: Any,
) -> Judged:
    """Give the verdict on measured clips, and write the report.

    Args:
        store: The folder.
        results: One entry per clip, at least one.
        numbers: What `verdict.judge` takes beside the drifts.
        **facts: The other fields of `Judged`.
    """
    controls = [clip.control for clip in results if clip.control] or None
    judged = Judged(
        judgement=judge([clip.patched for clip in results], controls, **numbers),
        results=tuple(results),
        out=store.out,
        versions=versions(),
        **facts,
    )
    write_report(judged)
    return judged


def _paired(name: str, clips: Mapping[str, Mapping[str, list[Path]]]) -> dict[str, Path]:
    paths: dict[str, Path] = {}
    for which, named in clips.items():
        files = named.get(name, [])
        if len(files) != 1:
            got = " and ".join(map(str, files)) or "none"
            there = next(named[name][0] for named in clips.values() if name in named)
            raise _wrong(there, f"one clip {name!r} in --{which}", got)
        paths[which] = files[0]
    return paths


def _digest(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in sorted(filter(_is_png, path.iterdir())) if path.is_dir() else [path]:
        check_regular(part, SamplingError, _MOST_BYTES)
        with part.open("rb") as file:
            digest.update(part.name.encode() + hashlib.file_digest(file, "blake2b").digest())
    return digest.hexdigest()


def _measure(
    store: Store, name: str, paths: Mapping[str, Path], inputs: Mapping[str, str], fps: float
) -> Clip:
    """Read, measure and show one clip; its record comes last and marks the end."""
    clips = {which: read_clip(path) for which, path in paths.items()}
    truth, first = clips["baseline"], paths["baseline"]
    if not truth.isfinite().all():
        raise _wrong(first, "finite numbers", "others")
    if min(truth.shape[1:3]) < SSIM_SIDE:
        raise _wrong(first, f"at least {SSIM_SIDE} pixels a side", _size(truth))
    for which, frames in clips.items():
        if frames.shape != truth.shape:
            raise _wrong(paths[which], f"{_size(truth)}, as {first}", _size(frames))
    if (control := clips.get("control")) is not None:
        finite = bool(control.isfinite().all())
        if not finite or torch.equal(control, truth):
            got = "a control that " + ("is equal to it" if finite else "holds NaN or infinity")
            remedy = "Make it with another exact attention backend, and save it without loss"
            raise _wrong(paths["control"], "another rounding than the baseline's", got, remedy)
    fps = (first.suffix.lower() in VIDEO_ENDINGS and frame_rate(first)) or fps
    clips["patched"] = clips.pop("candidate")
    identity = {"key": Store.key(name, 0), "prompt": name, "fps": fps}
    return measure(store, clips, inputs, label="candidate", **identity)


def _size(frames: torch.Tensor) -> str:
    count, height, width, _ = frames.shape
    return f"{count} frames of {width} x {height}"
