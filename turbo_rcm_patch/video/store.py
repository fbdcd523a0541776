"""The output folder of a comparison: what is finished stays, what is half written never shows.

Layout: settings.json (what the folder belongs to), latents/ (one file a prompt and variant),
prompts/ (videos and record of each finished prompt), runs/ (one file a variant), plots/,
metrics.json, report.html and report.md; and the list of all of these, `MARKER`. What is not on
that list is somebody else's: it is never read as ours, replaced or removed.

A comparison that starts again keeps what an earlier one wrote until it replaces it or is done, so
that an interruption loses nothing. The list names these files as earlier; they are not read.
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

from turbo_rcm_patch.errors import OutputExistsError, SamplingError
from turbo_rcm_patch.output import atomic, check_writable, is_partial, write_json
from turbo_rcm_patch.turbodiffusion.staging import lock_file
from turbo_rcm_patch.video.generation import Sample

#: The list of the files that comparisons wrote into a folder. Without it a folder is not ours.
MARKER: Final = "turbo_rcm_patch_files.json"
#: Files of a finished prompt; the record comes last.
PROMPT_FILES: Final = (
    *("baseline.mp4", "patched.mp4", "difference.mp4", "side_by_side.mp4", "panes.mp4"),
    *("sheet.png", "record.json"),
)
_PLOTS: Final = ("prompts.png", "frames.png", "steps.png")
_RUNS: Final = ("baseline.json", "patched.json", "control.json", "network.json")
#: Files whose names do not depend on the prompts.
_FIXED: Final = (
    *("settings.json", "metrics.json", "report.html", "report.md"),
    *(f"plots/{name}" for name in _PLOTS),
    *(f"runs/{name}" for name in _RUNS),
)
#: All names that a list may hold. A list may come from anywhere, and its entries are removed.
_LAYOUT: Final = re.compile(
    "|".join(map(re.escape, _FIXED))
    + r"|latents/[a-z0-9-]+\.[a-z]+\.safetensors|prompts/[a-z0-9-]+/(?:"
    + "|".join(map(re.escape, PROMPT_FILES))
    + ")"
)
_FOLDERS: Final = ("latents", "prompts", "runs", "plots")
_YOURSELF: Final = "Choose another --out, or remove these files yourself if you do not need them"


class Store:
    """Files of one comparison.

    Args:
        out: The folder; made if it does not exist.
        identity: Everything that decides what the results are, prompts and seeds aside. A folder
            that was started with another identity is refused. Its "inputs", a digest for each
            prompt, may grow: prompts that were there keep theirs.
        fresh: Start again: use no file that earlier comparisons wrote into the folder. Each stays
            until it is replaced; `finish` removes the others.

    Raises:
        OutputExistsError: The folder holds files of our names that no comparison wrote; nothing
            was touched.
        SamplingError: The folder belongs to a comparison with another identity.
    """

    def __init__(self, out: str | Path, identity: Mapping[str, object], *, fresh: bool) -> None:
        self.out = check_out(out, fresh=fresh)
        self._ours, self._earlier = _listed(self.out) or (set(), set())
        if fresh:
            self._start_again()
        wanted = json.loads(json.dumps(to_json(identity)))
        found = self.read_json("settings.json")
        if found is not None and "inputs" in wanted:
            there, new = dict(found.get("inputs", {})), wanted["inputs"]
            if all(there.get(key, digest) == digest for key, digest in new.items()):
                added, wanted["inputs"] = new.keys() - there.keys(), there | new
                found["inputs"] = wanted["inputs"]
                if added and found == wanted:
                    found = None
        if found is None:
            self.write_json("settings.json", wanted)
        elif found != wanted:
            differing = sorted(k for k in {*found, *wanted} if found.get(k) != wanted.get(k))
            raise SamplingError(
                f"{self.out} holds a comparison made with other settings",
                expected=f"the same {', '.join(differing)}",
                got=", ".join(f"{k}={_short(found.get(k))}" for k in differing),
                remedy="Start again with --fresh (from Python fresh=True; `demo` does it without "
                "--resume), which replaces what comparisons wrote there, or choose another folder",
            )

    def _start_again(self) -> None:
        """Call all that is on the list earlier, and remove what killed processes left."""
        if self._ours:
            self._earlier = set(self._ours)
            self._write_list()
        for place in self._places():
            for path in place.iterdir() if place.is_dir() else ():
                if is_partial(path) and path.is_file():
                    path.unlink(missing_ok=True)

    def finish(self) -> None:
        """Remove the earlier files that were not replaced, and our folders that are empty then:
        the comparison is complete."""
        if not self._earlier:
            return
        for name in sorted(self._earlier):
            with suppress(FileNotFoundError, IsADirectoryError):
                (self.out / name).unlink()
        for place in reversed(self._places()[1:]):
            with suppress(OSError):  # It is not there, or holds something else.
                place.rmdir()
        self._ours -= self._earlier
        self._earlier = set()
        self._write_list()

    def _places(self) -> list[Path]:
        """The folders that may hold files of ours, each before those in it."""
        places = [self.out, *(self.out / name for name in _FOLDERS)]
        inner = {(self.out / n).parent for n in self._ours if n.startswith("prompts/")}
        return places + sorted(inner)

    def claim(self, *names: str) -> None:
        """Put files on the list before they are written.

        Raises:
            OutputExistsError: One of them is there, and no comparison wrote it.
        """
        assert all(_LAYOUT.fullmatch(name) for name in names), "the layout knows all our files"
        new = {*names} - self._ours
        if not new:
            return
        there = [name for name in sorted(new) if _is_there(self.out / name)]
        self._merge()
        _refuse_others(self.out, [name for name in there if name not in self._ours])
        self._ours |= new
        self._write_list()

    def _replaced(self, *names: str) -> None:
        """Take files that are written now off the earlier ones."""
        if not self._earlier.isdisjoint(names):
            self._earlier.difference_update(names)
            self._merge()
            self._write_list()

    def _merge(self) -> None:
        """Another process may be at work in the same folder."""
        there, earlier = _listed(self.out) or (set(), set())
        self._ours |= there
        self._earlier &= earlier

    def _write_list(self) -> None:
        about = "Files in this folder that turbo_rcm_patch wrote and may remove or replace."
        known: dict[str, object] = {"about": about, "format": 1, "files": sorted(self._ours)}
        if self._earlier:
            known["earlier"] = sorted(self._earlier)
        write_json(self.out / MARKER, known)

    def _has(self, name: str) -> bool:
        return name in self._ours - self._earlier and (self.out / name).is_file()

    @staticmethod
    def key(prompt: str, seed: int) -> str:
        """A readable name that no other prompt and seed have."""
        digest = hashlib.blake2b(f"{seed}\0{prompt}".encode(), digest_size=8).hexdigest()
        words = re.sub(r"[^a-z0-9]+", "-", prompt.lower()).strip("-")[:40].strip("-")
        return f"{words or 'prompt'}-{digest}"

    def folder(self, key: str) -> Path:
        """Where the videos of a prompt go."""
        self.claim(*(f"prompts/{key}/{name}" for name in PROMPT_FILES))
        path = self.out / "prompts" / key
        path.mkdir(parents=True, exist_ok=True)
        return path

    def is_finished(self, key: str) -> bool:
        """Whether every file of a prompt is there."""
        return all(self._has(f"prompts/{key}/{name}") for name in PROMPT_FILES)

    def claim_report(self) -> None:
        """Put what `write_report` writes on the list. It replaces all of it, and reads none."""
        names = ("metrics.json", "report.html", "report.md", *(f"plots/{n}" for n in _PLOTS))
        self.claim(*names)
        self._replaced(*names)

    def has_sample(self, key: str, variant: str) -> bool:
        """Whether a generation is finished."""
        return self._has(self._latents(key, variant))

    def save_sample(self, key: str, variant: str, sample: Sample) -> None:
        """Keep a generation: latents as they are, with time and memory beside them."""
        from safetensors.torch import save

        tensors = {"latents": sample.latents.contiguous()}
        for i, step in enumerate(sample.trajectory):
            tensors[f"step.{i:03d}"] = step.contiguous()
        note = {"seconds": repr(sample.seconds), "peak_bytes": str(sample.peak_bytes or "")}
        name = self._latents(key, variant)
        self.claim(name)
        with atomic(self.out / name) as path:
            path.write_bytes(save(tensors, metadata=note))
        self._replaced(name)

    def load_sample(self, key: str, variant: str) -> Sample:
        """Read a finished generation."""
        from safetensors import SafetensorError, safe_open

        path = self.out / self._latents(key, variant)
        with reading(path, SafetensorError), safe_open(path, framework="pt") as file:
            note = file.metadata()
            tensors: dict[str, torch.Tensor] = {k: file.get_tensor(k) for k in sorted(file.keys())}
            latents, peak = tensors.pop("latents"), note["peak_bytes"]
            return Sample(
                latents,
                tuple(tensors.values()),
                float(note["seconds"]),
                int(peak) if peak else None,
            )

    def read_json(self, name: str) -> dict[str, Any] | None:
        """A JSON file of ours, None if it was not written yet."""
        if not self._has(name):
            return None
        path = self.out / name
        with reading(path):
            value = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(value, dict):
                raise TypeError(f"a {type(value).__name__}, not an object")
        return value

    def write_json(self, name: str, value: object) -> Path:
        """Write a JSON file, floats that JSON lacks as strings."""
        self.claim(name)
        write_json(self.out / name, to_json(value))
        folder, _, last = name.rpartition("/")
        # The record marks that the videos beside it are written too.
        beside = PROMPT_FILES if last == "record.json" else (last,)
        self._replaced(*(f"{folder}/{one}" if folder else one for one in beside))
        return self.out / name

    def _latents(self, key: str, variant: str) -> str:
        return f"latents/{key}.{variant}.safetensors"


def check_out(out: str | Path, *, fresh: bool) -> Path:
    """Check, before anything is loaded, that a comparison may write into a folder and can.

    Args:
        out: The folder of a comparison.
        fresh: Whether what comparisons wrote there will be replaced.

    Returns:
        The folder, which may not be there yet.

    Raises:
        SamplingError: It is a file.
        OutputExistsError: It holds files of our names that no comparison wrote.
        OutputError: It cannot be written to.
    """
    folder = Path(out).expanduser()
    if folder.exists() and not folder.is_dir():
        raise SamplingError(
            f"{folder} is a file",
            expected="a folder to write into",
            remedy="Choose another one (commands: --out DIR; from Python: out=DIR)",
        )
    listed = _listed(folder)
    ours, earlier = listed or (set(), set())
    there = [name for name in _FIXED if _is_there(folder / name)]
    _refuse_others(folder, [name for name in there if name not in ours])
    for name in _FOLDERS:
        if (folder / name).exists() and not (folder / name).is_dir():
            raise OutputExistsError(
                f"{folder / name} is a file, where a comparison has a folder",
                expected="a folder, or nothing",
                remedy=_YOURSELF,
            )
        if (fresh or earlier) and (
            folder / name
        ).is_symlink():  # What is removed through it would be elsewhere.
            raise OutputExistsError(
                f"{folder / name} is a link, which this program did not make",
                expected="a folder",
                remedy=_YOURSELF,
            )
    check_writable(folder / MARKER)
    return folder


def marker_of(out: str | Path) -> bytes | None:
    """The list of the files of comparisons, which each that begins again writes anew; None without
    one."""
    try:
        return (Path(out).expanduser() / MARKER).read_bytes()
    except OSError:
        return None


@contextmanager
def in_use(out: str | Path) -> Iterator[None]:
    """Inside, no other process compares into this folder, where its file system has locks.

    Raises:
        OutputExistsError: Another process does.
    """
    folder = Path(out).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:  # Windows opens no folder.
        yield
        return
    try:
        try:
            lock_file(descriptor)
        except BlockingIOError as error:
            raise OutputExistsError(
                f"{folder} is in use by another comparison",
                expected="a folder into which nobody writes",
                remedy="Wait until it is done, or choose another folder",
            ) from error
        except OSError:  # There are no locks here, which is no reason to stop.
            pass
        try:
            yield
        finally:
            with suppress(OSError):  # It holds something.
                folder.rmdir()
    finally:
        os.close(descriptor)


def _listed(folder: Path) -> tuple[set[str], set[str]] | None:
    """The files that comparisons wrote into a folder, and those among them that were there when
    the last one started again; None if it is not a folder of ours."""
    path = folder / MARKER
    if not _is_there(path):
        return None
    try:
        text = json.loads(path.read_text(encoding="utf-8"))
        names, earlier = text["files"], text.get("earlier", [])
        if not all(_LAYOUT.fullmatch(name) for name in (*names, *earlier)):
            raise ValueError("an entry that is not a file of a comparison")
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise OutputExistsError(
            f"{path} cannot be read, so it is unknown which files in {folder} are ours",
            expected="the list of our files, as it was written",
            got=f"{type(error).__name__}: {error}",
            remedy="Choose another --out, or remove the folder yourself if you do not need its "
            "files",
        ) from error
    return set(names), {*names} & {*earlier}


def _refuse_others(folder: Path, names: list[str]) -> None:
    if names:
        raise OutputExistsError(
            f"{folder} holds files that no comparison wrote, under names that one would write",
            expected=f"a new folder, or one whose files are listed in its {MARKER}",
            got=", ".join(names),
            remedy=_YOURSELF,
        )


def _is_there(path: Path) -> bool:
    return path.exists() or path.is_symlink()


@contextmanager
def reading(path: Path, *more: type[Exception]) -> Iterator[None]:
    """Say of a file of ours that somebody changed it, where reading it fails."""
    damage: tuple[type[Exception], ...] = (OSError, ValueError, LookupError, TypeError)
    damage += (AssertionError, *more)
    try:
        yield
    except damage as error:
        raise SamplingError(
            f"{path} was changed since it was written",
            got=f"{type(error).__name__}: {error}",
            remedy="Start again with --fresh (from Python fresh=True), or choose another folder",
        ) from error


def to_json(value: object) -> object:
    """`value` with tuples as lists and infinite or undefined floats as strings ("inf", "nan")."""
    if isinstance(value, Mapping):
        return {str(k): to_json(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    return str(value)


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
