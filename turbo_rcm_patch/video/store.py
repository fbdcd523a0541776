"""The files of `generate` and `compare`: a result is finished when its files are there.

A video is finished when a JSON file beside it says how it was made. A comparison has a folder:
settings.json (what the folder belongs to, and the mark of such a folder), clips/ (frames of each
prompt and run, until they are measured), prompts/ (videos and record of each finished prompt),
runs/ (one file a run), metrics.json and report.html. Every file is written whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from turbo_rcm_patch.errors import OutputExistsError, SamplingError
from turbo_rcm_patch.files import (
    atomic,
    check_writable,
    read_json,
    remove_leftovers,
    try_json,
    write_json,
)
from turbo_rcm_patch.interrupts import reraise_interrupts
from turbo_rcm_patch.video.video import find_ffmpeg

#: Videos of a finished clip; its record.json comes last.
CLIP_FILES: Final = ("side_by_side.mp4", "panes.mp4")
#: The file that marks the folder of a comparison; it is written first.
_SETTINGS: Final = "settings.json"
_FOLDERS: Final = ("clips", "prompts", "runs")
#: What a comparison writes, so that a new start removes nothing else.
_PATTERNS: Final = (
    *("metrics.json", "report.html", "runs/*.json", "clips/*.safetensors"),
    *(f"prompts/*/{name}" for name in (*CLIP_FILES, "record.json")),
)
_MADE_BY: Final = {"made by": "turbo_rcm_patch"}
#: What reading a file of a comparison raises if somebody has changed it.
_DAMAGE: Final = (
    *(OSError, ValueError, LookupError, TypeError, AssertionError, RecursionError),
    SafetensorError,
)
_AGAIN: Final = "Start again with `fresh=True`, or choose another folder"


class Store:
    """Files of one comparison.

    Args:
        out: The folder, which `check_out` accepts; made if it does not exist.
        identity: Everything that decides what the results are, prompts and seeds aside. A folder
            that was started with another identity is refused. Its "inputs", a digest for each
            prompt, may grow: prompts that were there keep theirs.
        fresh: Remove what earlier comparisons wrote into the folder.

    Attributes:
        out: As given.

    Raises:
        SamplingError: The folder belongs to a comparison with another identity.
    """

    def __init__(self, out: str | Path, identity: Mapping[str, object], *, fresh: bool) -> None:
        self.out = Path(out).expanduser()
        for folder in (self.out, *(self.out / name for name in _FOLDERS)):
            remove_leftovers(folder)
        if fresh:
            for pattern in _PATTERNS:  # The mark stays, and is replaced then.
                for path in self.out.glob(pattern):
                    path.unlink(missing_ok=True)
            for folder in (*self.out.glob("prompts/*"), *(self.out / name for name in _FOLDERS)):
                with suppress(OSError):  # It is not there, or holds something else.
                    folder.rmdir()
        wanted = json.loads(json.dumps(to_json({**_MADE_BY, **identity})))
        earlier = None if fresh else self.read_json(_SETTINGS)
        if earlier is not None:
            there, new = earlier.get("inputs", {}), wanted.get("inputs", {})
            if all(there.get(key, digest) == digest for key, digest in new.items()):
                wanted["inputs"] = earlier["inputs"] = there | new
            _refuse_other(f"{self.out} holds a comparison", earlier, wanted, _AGAIN)
        self.write_json(_SETTINGS, wanted)

    @staticmethod
    def key(prompt: str, seed: int) -> str:
        """Return a readable name that no other prompt and seed have."""
        digest = hashlib.blake2b(f"{seed}\0{prompt}".encode(), digest_size=8).hexdigest()
        words = re.sub(r"[^a-z0-9]+", "-", prompt.lower()).strip("-")[:40].strip("-")
        return f"{words or 'prompt'}-{digest}"

    def folder(self, key: str) -> Path:
        """Make and return the folder for the videos of a prompt."""
        path = self.out / "prompts" / key
        path.mkdir(parents=True, exist_ok=True)
        remove_leftovers(path)
        return path

    def has_clip(self, key: str, run: str) -> bool:
        """Return True if a clip is there to be measured."""
        return self._clip(key, run).is_file()

    def save_clip(self, key: str, run: str, frames: torch.Tensor, note: dict[str, Any]) -> None:
        """Keep frames, and how they were made, until they are measured."""
        with atomic(self._clip(key, run)) as path:
            save_file({"frames": frames.contiguous()}, path, {"note": json.dumps(note)})

    def load_clip(self, key: str, run: str) -> tuple[torch.Tensor, dict[str, Any]]:
        """Read frames, and how they were made."""
        path = self._clip(key, run)
        with reading(path), safe_open(path, framework="pt") as file:
            return file.get_tensor("frames"), json.loads(file.metadata()["note"])

    def remove_clips(self, key: str) -> None:
        """Remove the clips of a prompt, which are measured."""
        for path in (self.out / "clips").glob(f"{key}.*.safetensors"):
            path.unlink()

    def read_json(self, name: str) -> dict[str, Any] | None:
        """Read a JSON file of the folder; None if it was not written yet."""
        path = self.out / name
        return read_json(path, SamplingError, _AGAIN) if path.is_file() else None

    def write_json(self, name: str, value: object) -> None:
        """Write a JSON file, floats that JSON lacks as strings."""
        write_json(self.out / name, to_json(value))

    def _clip(self, key: str, run: str) -> Path:
        return self.out / "clips" / f"{key}.{run}.safetensors"


def check_out(out: str | Path, *, fresh: bool) -> Path:
    """Check, before anything is loaded, that a comparison may write into a folder, and can: what
    would fail at the end fails here.

    Args:
        out: The folder of a comparison.
        fresh: True if what comparisons wrote there will be removed.

    Returns:
        The folder, which may not be there yet.

    Raises:
        OutputExistsError: It is not the folder of a comparison and holds files or folders with the
            names of one; or one of its folders is a link, through which files elsewhere would be
            removed.
        OutputError: It cannot be written to.
        MissingPackageError: There is no ffmpeg.
    """
    folder = Path(out).expanduser()
    check_writable(folder / _SETTINGS)
    if _made_by_us(folder / _SETTINGS):
        what = "holds links that no comparison made"
        others = [name for name in _FOLDERS if fresh and (folder / name).is_symlink()]
    else:
        what = "is not the folder of a comparison, and holds files with the names of one"
        names = (_SETTINGS, "metrics.json", "report.html", *_FOLDERS)
        others = [name for name in names if os.path.lexists(folder / name)]
    if others:
        raise OutputExistsError(
            f"{folder} {what}",
            expected="a new folder, or one that a comparison has made",
            got=", ".join(others),
            remedy="Choose another `out=`, or remove these files yourself if you do not need them",
        )
    find_ffmpeg()
    return folder


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn a failure to read a file of a comparison into an error that says so."""
    try:
        with reraise_interrupts():
            yield
    except _DAMAGE as error:
        what, got = f"{path} was changed since it was written", f"{type(error).__name__}: {error}"
        raise SamplingError(what, got=got, remedy=_AGAIN) from error


def _refuse_other(what: str, held: Any, wanted: Any, remedy: str) -> None:
    """Raise a `SamplingError` that names the entries in which two records differ."""

    def differing(old: Any, new: Any, name: str) -> list[str]:
        if not (isinstance(old, dict) and isinstance(new, dict)):
            return [] if old == new else [f"{name}={json.dumps(old)}, now {json.dumps(new)}"]
        keys = sorted({*old, *new})
        pairs = ((old.get(k), new.get(k), f"{name}.{k}" if name else k) for k in keys)
        return [difference for pair in pairs for difference in differing(*pair)]

    if others := differing(held, wanted, ""):
        expected = f"the same {', '.join(one.partition('=')[0] for one in others)}"
        what, got = f"{what} made with other settings", "; ".join(others)
        raise SamplingError(what, expected=expected, got=got, remedy=remedy)


def check_note(video: Path) -> None:
    """Refuse to write the note of a video over another file.

    Raises:
        OutputExistsError: Such a file is there.
    """
    note = video.with_suffix(".json")
    if note.exists() and not _made_by_us(note):
        what = f"{note}, which would say how {video.name} was made, is another file"
        expected, remedy = "no file, or one of `generate`", "Choose another --out, or rename it"
        raise OutputExistsError(what, expected=expected, remedy=remedy)


def note_made(video: Path, identity: Mapping[str, object]) -> None:
    """Write beside a video how it was made, once the video is there."""
    write_json(video.with_suffix(".json"), identity)


def forget_made(video: Path) -> None:
    """Remove the note beside a video that is about to be replaced."""
    if _made_by_us(video.with_suffix(".json")):
        video.with_suffix(".json").unlink(missing_ok=True)


def is_made(video: Path, identity: Mapping[str, object]) -> bool:
    """Return True if a video is there and was made from just this.

    Raises:
        SamplingError: A finished video was made with other settings.
    """
    note = video.with_suffix(".json")
    if not (video.is_file() and _made_by_us(note)):
        return False
    held, wanted = try_json(note), json.loads(json.dumps(identity))
    held = {name: value for name, value in held.items() if name != "frames"}
    remedy = "Choose another `out=`, or remove it if you do not need it"
    _refuse_other(f"{video} is a video", held, wanted, remedy)
    return True


def _made_by_us(path: Path) -> bool:
    made_by = try_json(path).get("made by")
    return str(made_by).startswith(_MADE_BY["made by"])


def to_json(value: object) -> object:
    """Return `value` with tuples as lists and infinite or undefined floats as "inf" and "nan"."""
    if isinstance(value, Mapping):
        return {str(k): to_json(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    return str(value)
