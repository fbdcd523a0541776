"""Check a pipeline folder of diffusers part by part, and read the settings it may bring along."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from safetensors import SafetensorError, safe_open

from turbo_rcm_patch.errors import ModelFolderError
from turbo_rcm_patch.files import check_regular, read_json

LAYOUT: Final = (
    "a diffusers WanPipeline or CogVideoXPipeline folder: model_index.json beside the folders "
    "transformer, vae, text_encoder, tokenizer and scheduler"
)
#: A model folder may say how it wants to be sampled: a JSON object of fields of `Settings`.
DEFAULTS_FILE: Final = "turbo_rcm.json"
#: The beginning of a Git LFS pointer, and more bytes than one has.
_LFS_MARK, _LFS_BYTES = b"version https://git-lfs", 1024


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
    files = [path for kind in ("*.safetensors", "*.bin") for path in sorted(part.glob(kind))]
    has_config = (part / "config.json").is_file()
    if weights and not (has_config and files):
        inside = str(sorted(path.name for path in part.iterdir()))
        missing = "weights" if has_config else "config.json"
        raise ModelFolderError(f"{part} has no {missing}", got=inside, remedy=again)
    for path in part.rglob("*"):
        if not path.is_dir():
            check_regular(path, ModelFolderError)
    for path in sorted(part.glob("*.json")):
        read_json(path, ModelFolderError)
    for path in files:
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


def stored_settings(folder: str | Path | None) -> dict[str, object]:
    """Return the settings that a model folder brings along, and notes for other readers; empty if
    it brings none."""
    path = Path(folder) / DEFAULTS_FILE if folder else None
    if path is None or not path.is_file():
        return {}
    return read_json(path, ModelFolderError, "Repair or delete the file; it only holds defaults")
