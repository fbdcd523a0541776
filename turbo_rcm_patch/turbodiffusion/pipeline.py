"""A pipeline folder of diffusers: what its parts need, and the settings it may bring along."""

from __future__ import annotations

import json
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
_LFS_MARK: Final = b"version https://git-lfs"


def check_part(folder: Path, name: str, *, weights: bool) -> None:
    """Raise a `ModelFolderError` that names what is missing or broken in a part of a pipeline.

    Args:
        folder: The pipeline folder.
        name: The part.
        weights: Whether it has to have some.
    """
    part = folder / name
    if not part.is_dir():
        raise ModelFolderError(
            f"{folder} lacks the folder {name!r} that model_index.json lists",
            expected=LAYOUT,
            remedy="Download the model again",
        )
    if weights and not (part / "config.json").is_file():
        raise ModelFolderError(
            f"{part} has no config.json",
            got=str(sorted(p.name for p in part.iterdir())),
            remedy="Download the model again",
        )
    for path in sorted(part.glob("*.json")):
        read_json(path, ModelFolderError)
    found = [p for s in ("*.safetensors", "*.bin") for p in sorted(part.glob(s))]
    if weights and not found:
        raise ModelFolderError(
            f"{part} has no weights",
            expected="*.safetensors",
            got=str(sorted(p.name for p in part.iterdir())),
            remedy="Download the model again",
        )
    for path in found:
        _check_weights(path)


def _check_weights(path: Path) -> None:
    if not path.exists():
        raise ModelFolderError(f"{path} is a broken link", remedy="Download the model again")
    with path.open("rb") as file:
        head = file.read(len(_LFS_MARK))
    if head == _LFS_MARK:
        raise ModelFolderError(
            f"{path} is a Git LFS pointer, not weights",
            remedy="Run `git lfs pull` in the model's repository",
        )
    if path.suffix != ".safetensors":
        return
    try:
        with safe_open(path, framework="pt") as tensors:
            tensors.keys()
    except (SafetensorError, OSError) as error:
        raise ModelFolderError(
            f"{path} is damaged or incomplete ({error})",
            got=f"{path.stat().st_size} bytes",
            remedy="Download the file again",
        ) from error


def read_json(
    path: Path,
    error: type[TurboRCMError] = CheckpointError,
    remedy: str = "Download the file again",
) -> dict[str, Any]:
    """A JSON object of a model folder.

    Args:
        path: The file.
        error: What to raise if it is none, or cannot be read.
        remedy: What to do then.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as why:
        raise error(f"{path} is not valid JSON ({why})", remedy=remedy) from why
    except OSError as why:
        raise error(
            f"{path} cannot be read ({why.strerror})", remedy="Check its permissions and the disk"
        ) from why
    if not isinstance(value, dict):
        raise error(str(path), expected="a JSON object", got=type(value).__name__)
    return value


def stored_settings(folder: str | Path | None) -> dict[str, object]:
    """The settings that a model folder brings along, and notes for other readers; may be empty."""
    path = Path(folder) / DEFAULTS_FILE if folder else None
    if path is None or not path.is_file():
        return {}
    return read_json(path, ModelFolderError, "Mend or delete the file; it only holds defaults")
