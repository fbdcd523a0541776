"""The output folder of a comparison: what is finished stays, what is half written never shows.

Layout: settings.json (what the folder belongs to), latents/ (one file a prompt and variant),
prompts/ (videos and record of each finished prompt), runs/ (one file a variant), plots/,
metrics.json and report.html.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch

from turbo_rcm_patch.errors import SamplingError
from turbo_rcm_patch.sampling.generation import Sample

__all__ = ["Store", "atomic", "from_json", "to_json"]

_OURS: Final = (
    *("settings.json", "metrics.json", "report.html"),
    *("latents", "prompts", "runs", "plots"),
)


class Store:
    """Files of one comparison.

    Args:
        out: The folder; made if it does not exist.
        identity: Everything that decides what the results are, prompts and seeds aside. A folder
            that was started with another identity is refused.
        fresh: Start again: drop what an earlier comparison left in the folder (and nothing else).
    """

    def __init__(self, out: str | Path, identity: Mapping[str, object], *, fresh: bool) -> None:
        self.out = Path(out).expanduser()
        if self.out.exists() and not self.out.is_dir():
            raise SamplingError(f"{self.out} is a file", expected="a folder to write into")
        if fresh:
            self.clear()
        self.out.mkdir(parents=True, exist_ok=True)
        wanted = json.loads(json.dumps(to_json(identity)))
        path = self.out / "settings.json"
        if path.is_file():
            found = json.loads(path.read_text(encoding="utf-8"))
            if found != wanted:
                differing = sorted(k for k in {*found, *wanted} if found.get(k) != wanted.get(k))
                raise SamplingError(
                    f"{self.out} holds a comparison made with other settings",
                    expected=f"the same {', '.join(differing)}",
                    got=", ".join(f"{k}={_short(found.get(k))}" for k in differing),
                    remedy="Pass --fresh to start again, or choose another folder",
                )
        else:
            self.write_json("settings.json", wanted)

    def clear(self) -> None:
        """Remove what comparisons write into this folder."""
        for name in _OURS:
            path = self.out / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    @staticmethod
    def key(prompt: str, seed: int) -> str:
        """A readable name that no other prompt and seed have."""
        digest = hashlib.blake2b(f"{seed}\0{prompt}".encode(), digest_size=4).hexdigest()
        words = re.sub(r"[^a-z0-9]+", "-", prompt.lower()).strip("-")[:40].strip("-")
        return f"{words or 'prompt'}-{digest}"

    def folder(self, key: str) -> Path:
        """Where the videos of a prompt go."""
        path = self.out / "prompts" / key
        path.mkdir(parents=True, exist_ok=True)
        return path

    def has_sample(self, key: str, variant: str) -> bool:
        """Whether a generation is finished."""
        return self._latents(key, variant).is_file()

    def save_sample(self, key: str, variant: str, sample: Sample) -> None:
        """Keep a generation: latents as they are, with time and memory beside them."""
        from safetensors.torch import save_file

        tensors = {"latents": sample.latents.contiguous()}
        for i, step in enumerate(sample.trajectory):
            tensors[f"step.{i:03d}"] = step.contiguous()
        note = {"seconds": repr(sample.seconds), "peak_bytes": str(sample.peak_bytes or "")}
        with atomic(self._latents(key, variant)) as path:
            save_file(tensors, path, metadata=note)

    def load_sample(self, key: str, variant: str) -> Sample:
        """Read a finished generation."""
        from safetensors import safe_open

        with safe_open(self._latents(key, variant), framework="pt") as file:
            note = file.metadata()
            tensors: dict[str, torch.Tensor] = {k: file.get_tensor(k) for k in sorted(file.keys())}
        latents = tensors.pop("latents")
        peak = note["peak_bytes"]
        return Sample(
            latents, tuple(tensors.values()), float(note["seconds"]), int(peak) if peak else None
        )

    def read_json(self, name: str) -> dict[str, object] | None:
        """A JSON file of ours, None if it was not written yet."""
        path = self.out / name
        if not path.is_file():
            return None
        value = json.loads(path.read_text(encoding="utf-8"))
        assert isinstance(value, dict), f"{path} is ours and holds an object"
        return value

    def write_json(self, name: str, value: object) -> Path:
        """Write a JSON file, floats that JSON lacks as strings."""
        return self.write_text(name, json.dumps(to_json(value), indent=1) + "\n")

    def write_text(self, name: str, text: str) -> Path:
        """Write a text file."""
        target = self.out / name
        with atomic(target) as path:
            path.write_text(text, encoding="utf-8")
        return target

    def _latents(self, key: str, variant: str) -> Path:
        return self.out / "latents" / f"{key}.{variant}.safetensors"


@contextmanager
def atomic(target: Path) -> Iterator[Path]:
    """A temporary path in the same folder that becomes `target` on success and vanishes on any
    failure.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{os.getpid()}-{target.name}")
    try:
        yield temporary
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


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


def from_json(value: object) -> float:
    """A float that `to_json` wrote."""
    assert isinstance(value, (str, int, float)), "numbers are written as numbers or strings"
    return float(value)


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
