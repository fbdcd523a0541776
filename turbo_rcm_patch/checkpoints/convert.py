"""Convert TurboDiffusion's checkpoints to transformer or pipeline folders of diffusers."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch

from turbo_rcm_patch.checkpoints.folder import Written, folder_bytes, write_transformer
from turbo_rcm_patch.checkpoints.pipeline import DEFAULTS_FILE, check_part, stored_settings
from turbo_rcm_patch.checkpoints.read import Checkpoint, Progress, read_checkpoint
from turbo_rcm_patch.errors import ModelFolderError, OutputExistsError
from turbo_rcm_patch.files import atomic_folder, check_outside, check_target, read_json, write_json

#: Fraction of the time axis above which the high-noise expert of Wan 2.2 runs.
_BOUNDARY: Final = 0.9
#: First noise level of the distilled samplers.
_SIGMA_MAX, _SIGMA_MAX_TWO_EXPERTS = 80.0, 200.0
#: Entries that no weight shows, taken from the base's config.json.
_FROM_BASE: Final = ("eps", "rope_max_seq_len")
#: Settings copied from the base; the rest belong to the sampler.
_KEPT: Final = (
    *("height", "width", "num_frames", "fps"),
    *("negative_prompt", "max_sequence_length"),
)
_TRANSFORMERS: Final = ("transformer", "transformer_2")
_WITH_WEIGHTS: Final = ("vae", "text_encoder", "image_encoder")


def convert_transformer(
    checkpoint: str | Path,
    out: str | Path,
    *,
    dtype: torch.dtype | None = None,
    heads: int | None = None,
    network: str | None = None,
    int8_only: bool = False,
    force: bool = False,
    progress: Progress | None = None,
) -> Written:
    """Write a checkpoint as a transformer folder, completely or not at all.

    Args:
        checkpoint: The `.pth` file.
        out: The folder to write.
        dtype: As in `write_transformer`.
        heads: As in `read_checkpoint`.
        network: As in `read_checkpoint`.
        int8_only: As in `write_transformer`, of a `-quant` checkpoint.
        force: Allow replacing an existing model folder.
        progress: Called with bytes.

    Raises:
        CheckpointError: The checkpoint cannot be read.
        CheckpointKeysError: Its tensors are not those of a WanModel.
        OutputExistsError: `out` already exists.
        OutputError: It cannot be written.
    """
    target = Path(out)
    check_target(target, force=force)
    check_outside(target, checkpoint)
    source = read_checkpoint(checkpoint, heads=heads, network=network, progress=progress)
    needed = folder_bytes(source, dtype, int8_only=int8_only)
    with atomic_folder(target, force=force, needed=needed) as folder:
        written = write_transformer(
            source, folder, dtype=dtype, int8_only=int8_only, progress=progress
        )
    is_assumed = heads is None and not source.sizes.sla
    note = f"{source.sizes.heads_text}: --heads N if that is wrong" if is_assumed else ""
    return replace(written, path=target, heads=note)


def convert_pipeline(
    checkpoint: str | Path,
    out: str | Path,
    *,
    base: str | Path,
    low_noise: str | Path | None = None,
    dtype: torch.dtype | None = None,
    heads: int | None = None,
    network: str | None = None,
    int8_only: bool = False,
    copy: bool = False,
    force: bool = False,
    progress: Progress | None = None,
) -> tuple[Written, ...]:
    """Write a pipeline folder with the checkpoint's transformer and all other parts of the base.

    Its scheduler is `RCMScheduler`. VAE, text encoder and the other parts are links to the base.
    The default sizes and lengths of videos and prompts are also the base's.

    Args:
        checkpoint: The `.pth` file; of Wan 2.2 A14B, the high-noise expert's.
        out: The folder to write.
        base: A pipeline folder of the same model, as diffusers publishes it. Of its transformers
            only the configurations are needed.
        low_noise: The low-noise expert's `.pth` file of Wan 2.2 A14B.
        dtype: As in `write_transformer`.
        heads: As in `read_checkpoint`; by default as in the base.
        network: As in `read_checkpoint`, of both checkpoints.
        int8_only: As in `write_transformer`, of `-quant` checkpoints.
        copy: Copy the base's parts instead of linking to them.
        force: Allow replacing an existing model folder.
        progress: Called with bytes.

    Returns:
        The result of each transformer.

    Raises:
        ModelFolderError: The base is not a pipeline folder of Wan, or is another model's.
        CheckpointError, CheckpointKeysError, OutputExistsError: As `convert_transformer`.
    """
    target, root = Path(out), Path(base)
    files = [path for path in (checkpoint, low_noise) if path is not None]
    check_target(target, force=force)
    index = _index(root, experts=len(files))
    check_outside(target, root, *files)
    experts = {
        part: _read_expert(path, root / part, heads, network, progress)
        for part, path in zip(_TRANSFORMERS, files, strict=False)
    }
    other_parts, settings = _other_parts(root, index), stored_settings(root)
    # A base that was made with links may lead back into the folder that is replaced.
    paths = [path for part in other_parts.values() for path in (part, *part.rglob("*"))]
    check_outside(target, *paths)
    needed = sum(folder_bytes(e, dtype, int8_only=int8_only) for e, _ in experts.values())
    if copy:
        needed += sum(path.stat().st_size for path in paths if path.is_file())
    results = []
    with atomic_folder(target, force=force, needed=needed) as folder:
        for part, (source, config) in experts.items():
            (folder / part).mkdir()
            written = write_transformer(
                source,
                folder / part,
                dtype=dtype,
                int8_only=int8_only,
                config=config,
                progress=progress,
            )
            results.append(replace(written, path=target / part))
        for part, place in other_parts.items():
            if copy:
                shutil.copytree(place, folder / part)
                continue
            try:
                (folder / part).symlink_to(place, target_is_directory=True)
            except OSError as error:  # Windows asks for a privilege, and some disks have no links.
                raise OutputExistsError(
                    f"{place} cannot be linked to ({error.strerror})",
                    remedy="Copy the base's parts with --copy (copy=True)",
                ) from error
        _write_sampler(folder, index, settings, experts=len(experts))
    return tuple(results)


def _index(root: Path, *, experts: int) -> dict[str, object]:
    path = root / "model_index.json"
    index: dict[str, object] = read_json(path, ModelFolderError) if path.is_file() else {}
    if not str(index.get("_class_name")).startswith("Wan"):
        raise ModelFolderError(
            f"{path}: _class_name" if index else f"{root} has no model_index.json",
            expected="a diffusers folder with a pipeline of the same Wan model",
            got=str(index.get("_class_name", "")),
            remedy="Choose it with --base. Download it first: a hub id is not looked up here",
        )
    has = [part for part in _TRANSFORMERS if (root / part / "config.json").is_file()]
    if len(has) != experts:
        raise ModelFolderError(
            f"{root} has {len(has)} transformers, and {experts} checkpoints were given",
            expected="one checkpoint, and one more with --low-noise for Wan 2.2 A14B",
        )
    return index


def _read_expert(
    path: str | Path,
    folder: Path,
    heads: int | None,
    network: str | None,
    progress: Progress | None,
) -> tuple[Checkpoint, dict[str, object]]:
    """Read a checkpoint of the model whose configuration is in a folder of the base, and the
    entries of that which no weight shows."""
    config = read_json(folder / "config.json")
    base_heads = config.get("num_attention_heads")
    if isinstance(base_heads, int):  # Another one differs below.
        heads = heads or base_heads
    source = read_checkpoint(path, heads=heads, network=network, progress=progress)
    differences = [
        f"{key}: {config[key]!r} there, {value!r} in the checkpoint"
        for key, value in source.sizes.config().items()
        if key in config and key not in _FROM_BASE and config[key] != value
    ]
    if differences:
        raise ModelFolderError(
            f"{folder} is not the model of {path}",
            got="; ".join(differences),
            expected="the same sizes",
            remedy="Choose the diffusers folder of the same Wan model with --base",
        )
    return source, {key: config[key] for key in _FROM_BASE if key in config}


def _other_parts(root: Path, index: dict[str, object]) -> dict[str, Path]:
    """The folders of a base that are used unchanged, by their names in the pipeline."""
    parts = {}
    for part, entry in index.items():
        is_replaced = part in (*_TRANSFORMERS, "scheduler")
        if is_replaced or not isinstance(entry, list) or entry[:1] == [None]:
            continue
        if not re.fullmatch(r"\w+", part):
            raise ModelFolderError(
                f"{root / 'model_index.json'}: {part!r}",
                expected="names of folders beside it",
                remedy="Do not use this base unless you know who wrote it, and why",
            )
        check_part(root, part, weights=part in _WITH_WEIGHTS)
        parts[part] = (root / part).resolve()
    return parts


def _write_sampler(
    folder: Path, index: dict[str, object], settings: dict[str, object], *, experts: int
) -> None:
    """Write the scheduler, model_index.json and the settings of a distilled pipeline."""
    from turbo_rcm_patch import RCMScheduler

    sigma_max = _SIGMA_MAX if experts == 1 else _SIGMA_MAX_TWO_EXPERTS
    RCMScheduler(sigma_max=sigma_max).save_pretrained(folder / "scheduler")
    index = index | {"scheduler": [RCMScheduler.__module__, RCMScheduler.__name__]}
    if experts == 2:
        index["boundary_ratio"] = _BOUNDARY
    write_json(folder / "model_index.json", index, indent=2, sort_keys=True)
    # The base may be the teacher, whose guidance no student has.
    kept = {key: value for key, value in settings.items() if key in _KEPT}
    sampler = {"sampler": "rcm", "steps": 4, "sigma_max": sigma_max, "guidance_scale": 1.0}
    write_json(folder / DEFAULTS_FILE, kept | sampler, indent=2, sort_keys=True)
