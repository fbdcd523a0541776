"""Check a pipeline folder of diffusers part by part, and read the settings it may bring along."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError, safe_open

from turbo_rcm_patch.errors import CheckpointError, ModelFolderError, TurboRCMError

LAYOUT: Final = (
    "a diffusers WanPipeline or CogVideoXPipeline folder: model_index.json beside the folders "
    "transformer, vae, text_encoder, tokenizer and scheduler"
)
#: A model folder may say how it wants to be sampled: a JSON object of fields of `Settings`.
DEFAULTS_FILE: Final = "turbo_rcm.json"
#: The beginning of a Git LFS pointer, and more bytes than one has.
_LFS_MARK, _LFS_BYTES = b"version https://git-lfs", 1024


#: More bytes than a JSON file of a model has; the largest are tokenizers of some 20 MB.
MOST_JSON: Final = 1 << 27


def check_regular(path: Path, error: type[TurboRCMError], most: int | None = None) -> None:
    """Raise if a path is neither a regular file nor missing, so that no pipe is waited for and no
    endless device read, or if it is a folder.

    Args:
        path: The file, or a link to it.
        error: The class of the error.
        most: Its largest plausible size in bytes.
    """
    try:
        found = path.stat()
    except OSError:
        return  # Whoever opens it says why it cannot.
    if not stat.S_ISREG(found.st_mode):
        raise error(f"{path}", expected="a regular file", got="a folder, a pipe or a device")
    if most is not None and found.st_size > most:
        raise error(f"{path}", expected=f"at most {most} bytes", got=str(found.st_size))


def check_part(folder: Path, name: str, *, weights: bool) -> None:
    """Raise a `ModelFolderError` that names a missing or broken file in a part of a pipeline.

    Args:
        folder: The pipeline folder.
        name: The part.
        weights: True if it has to have weights.
    """
    part, again = folder / name, "Download the model again"
    if not part.is_dir():
        raise ModelFolderError(
            f"{folder} lacks the folder {name!r} that model_index.json lists",
            expected=LAYOUT,
            remedy=again,
        )
    found = [path for kind in ("*.safetensors", "*.bin") for path in sorted(part.glob(kind))]
    for lacks, there in (
        ("config.json", (part / "config.json").is_file()),
        ("weights", bool(found)),
    ):
        if weights and not there:
            inside = str(sorted(path.name for path in part.iterdir()))
            raise ModelFolderError(f"{part} has no {lacks}", got=inside, remedy=again)
    for path in part.rglob("*"):
        if not path.is_dir():
            check_regular(path, ModelFolderError)
    for path in sorted(part.glob("*.json")):
        read_json(path, ModelFolderError)
    for path in found:
        _check_weights(path)


def _check_weights(path: Path) -> None:
    problem, remedy = "", "Download the file again"
    if not path.exists():
        problem = "a broken link"
    elif path.stat().st_size < _LFS_BYTES and path.read_bytes().startswith(_LFS_MARK):
        problem = "a Git LFS pointer, not weights"
        remedy = "Run `git lfs pull` in the model's repository"
    elif path.suffix == ".safetensors":
        try:
            with safe_open(path, framework="pt") as tensors:
                tensors.keys()
        except (SafetensorError, OSError) as error:
            problem = f"damaged or incomplete ({error})"
    if problem:
        raise ModelFolderError(f"{path} is {problem}", remedy=remedy)


def read_json(
    path: Path,
    error: type[TurboRCMError] = CheckpointError,
    remedy: str = "Download the file again",
) -> dict[str, Any]:
    """Read a JSON object of a model folder.

    Args:
        path: The file.
        error: The class of the error if it is none, or cannot be read.
        remedy: The remedy of that error.
    """
    check_regular(path, error, MOST_JSON)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as why:
        raise error(f"{path} is not valid JSON ({why})", remedy=remedy) from why
    except OSError as why:
        raise error(
            f"{path} cannot be read ({why.strerror})", remedy="Check its permissions and the disk"
        ) from why
    if not isinstance(value, dict):
        raise error(str(path), expected="a JSON object", got=type(value).__name__, remedy=remedy)
    return value


def stored_settings(folder: str | Path | None) -> dict[str, object]:
    """Return the settings that a model folder brings along, and notes for other readers; empty if
    it brings none."""
    path = Path(folder) / DEFAULTS_FILE if folder else None
    if path is None or not path.is_file():
        return {}
    return read_json(path, ModelFolderError, "Repair or delete the file; it only holds defaults")
