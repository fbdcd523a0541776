"""Load a Wan or CogVideoX pipeline from a folder, a hub id or a shipped model."""

from __future__ import annotations

import difflib
import json
import logging
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

import torch
from huggingface_hub import errors as hub_errors
from safetensors import SafetensorError

from turbo_rcm_patch.checkpoints import EXTRA_FILE, load_extra
from turbo_rcm_patch.errors import ConfigError, DeviceError, ModelFolderError
from turbo_rcm_patch.patching.sla import held_proj_l
from turbo_rcm_patch.patching.stored import MARK, folder_proj_l, mark_of
from turbo_rcm_patch.sampling.families import FAMILIES

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

    from turbo_rcm_patch.sampling.families import VideoPipeline

__all__ = [
    "LOAD_ERRORS",
    "SHIPPED",
    "TINY",
    "Offload",
    "check_folder",
    "check_offload",
    "check_part",
    "choose_device",
    "first_line",
    "load_pipeline",
    "move",
    "pipeline_name",
    "quiet_loading",
    "resolve_model",
]

Offload = Literal["none", "model", "sequential"]

#: The name under which the shipped Wan can be loaded.
TINY: Final = "tiny"
#: Names of shipped models -> what they are called in `turbo_rcm_patch.tiny`.
SHIPPED: Final = {TINY: "TINY_WAN", "tiny-cogvideox": "TINY_COGVIDEOX"}

PIPELINES: Final = tuple(FAMILIES)
LAYOUT: Final = (
    f"a diffusers {' or '.join(PIPELINES)} folder: model_index.json beside the folders "
    "transformer, vae, text_encoder, tokenizer and scheduler"
)
_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
#: Endings of files of weights, which no id has.
_WEIGHTS: Final = (".pth", ".pt", ".ckpt", ".bin", ".gguf", ".safetensors")
_TRANSFORMERS: Final = ("transformer", "transformer_2")
_LFS_MARK: Final = b"version https://git-lfs"
#: What loading libraries raise for files that are not what they should be.
LOAD_ERRORS: Final = (
    *(OSError, ValueError, KeyError, TypeError, RuntimeError),
    *(AttributeError, ImportError, SafetensorError),
    # What transformers raises for a configuration, where the installed hub library has it.
    *(error for error in [getattr(hub_errors, "StrictDataclassError", None)] if error),
)


def load_pipeline(
    model: str | Path = TINY,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device | None = None,
    offload: Offload = "none",
    int8: bool = True,
) -> VideoPipeline:
    """Load a pipeline: transformer and text encoder in `dtype`, VAE in fp32.

    Args:
        model: A folder (never touches the network), one of `SHIPPED`, or a hub id.
        dtype: dtype of the transformer and the text encoder. Layers that diffusers keeps in fp32
            stay in fp32.
        device: Where to run; by default a GPU if there is one.
        offload: "model" keeps one component at a time on the GPU, "sequential" one layer at a
            time.
        int8: Whether to attach the int8 weights of a converted checkpoint, for `linear="int8"`.

    Returns:
        A `WanPipeline` or `CogVideoXPipeline`, ready to run. If the folder was converted from a
        checkpoint with int8 weights or SLA, these are attached (`load_extra`).
    """
    if offload not in get_args(Offload):
        raise ConfigError("offload", expected=f"one of {get_args(Offload)}", got=repr(offload))
    target = choose_device(device)
    check_offload(offload, target)
    folder = resolve_model(model)
    if isinstance(folder, Path):
        check_folder(folder)
    # Under sequential offload Linears are hooked and not run in int8: their int8 weights would lie
    # on the GPU for nothing.
    pipe = _from_pretrained(folder, dtype, int8=int8 and offload != "sequential")
    move(pipe, target, offload)
    return pipe


def resolve_model(model: str | Path) -> Path | str:
    """Find the folder that `model` names, or return the hub id if it is one."""
    if str(model) in SHIPPED and not Path(model).is_dir():
        from turbo_rcm_patch import tiny

        shipped: Path = getattr(tiny, SHIPPED[str(model)])
        if not (shipped / "model_index.json").is_file():
            raise ModelFolderError(
                f"the shipped model {str(model)!r} is missing from {shipped}",
                remedy="Reinstall the package; its weights are part of it",
            )
        return shipped
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        raise ModelFolderError(
            f"{path} is a file",
            expected=LAYOUT,
            remedy="Convert single-file checkpoints with the pipeline's save_pretrained(folder)",
        )
    if isinstance(model, str) and _HUB_ID.fullmatch(model):
        _refuse_mistyped(model)
        return model
    raise ModelFolderError(
        f"no such folder: {path}",
        expected=LAYOUT,
        remedy=f"Shipped models are {' and '.join(SHIPPED)}; else pass a folder that exists, or a "
        "hub id like 'Wan-AI/Wan2.1-T2V-1.3B-Diffusers'",
    )


def _refuse_mistyped(model: str) -> None:
    """Raise a `ModelFolderError` for a path that only looks like a hub id.

    The hub would be asked for it, which without a connection takes half a minute to fail. It is a
    path if its first part is a folder here, or if its last part is the name of a file of weights.
    What the hub's cache holds is an id, whatever lies here.
    """
    parent, name = model.split("/")
    is_file = Path(name).suffix.lower() in _WEIGHTS
    if not (is_file or Path(parent).is_dir()) or _is_cached(model):
        return
    is_there = Path(parent).is_dir()
    folders = sorted(p.name for p in Path(parent).iterdir() if p.is_dir()) if is_there else []
    near = difflib.get_close_matches(name, folders, n=3, cutoff=0.5) or folders[:6]
    raise ModelFolderError(
        f"no such folder: {model}",
        expected=LAYOUT,
        got=f"in {parent}/: {', '.join(near) or 'no folders'}" if is_there else "",
        remedy="Check the spelling. If you mean a model of the hub, download it first "
        f"(`hf download {model}`), or run where no folder has the name {parent!r}",
    )


def _is_cached(model: str) -> bool:
    """Whether the hub's cache holds something of this id."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return (Path(HF_HUB_CACHE) / f"models--{model.replace('/', '--')}").is_dir()


def check_folder(folder: Path) -> None:
    """Raise a `ModelFolderError` that names the first thing missing or broken in a folder."""
    try:
        _check_folder(folder)
    except ModelFolderError:
        raise
    except OSError as error:
        raise ModelFolderError(
            f"{error.filename or folder} cannot be read ({error.strerror})",
            remedy="Check its permissions and the disk",
        ) from error


def _check_folder(folder: Path) -> None:
    index_path = folder / "model_index.json"
    if not index_path.is_file():
        inside = sorted(p.name for p in folder.iterdir())[:8]
        raise ModelFolderError(
            f"{folder} has no model_index.json", expected=LAYOUT, got=f"a folder with {inside}"
        )
    index = _read_json(index_path)
    if index.get("_class_name") not in PIPELINES:
        raise ModelFolderError(
            f"{index_path}: _class_name",
            expected=f"one of {PIPELINES}",
            got=repr(index.get("_class_name")),
            remedy="The transformer of another pipeline may be patched (find_pairs says so), but "
            "generate and compare run these",
        )
    for name, entry in index.items():
        if name.startswith("_") or not isinstance(entry, list) or entry[:1] == [None]:
            continue
        check_part(folder, name, weights=name in (*_TRANSFORMERS, "vae", "text_encoder"))


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
        _read_json(path)
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


def pipeline_name(folder: Path) -> str:
    """The class of the pipeline in a checked folder."""
    return str(_read_json(folder / "model_index.json")["_class_name"])


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
    from safetensors import safe_open

    try:
        with safe_open(path, framework="pt") as tensors:
            tensors.keys()
    except (SafetensorError, OSError) as error:
        raise ModelFolderError(
            f"{path} is damaged or incomplete ({error})",
            got=f"{path.stat().st_size} bytes",
            remedy="Download the file again",
        ) from error


def _read_json(path: Path) -> dict[str, object]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelFolderError(
            f"{path} is not valid JSON ({error})", remedy="Download the file again"
        ) from error
    if not isinstance(value, dict):
        raise ModelFolderError(str(path), expected="a JSON object", got=type(value).__name__)
    return value


def _from_pretrained(
    folder: Path | str, dtype: torch.dtype, *, int8: bool = True
) -> VideoPipeline:
    """Load a pipeline, and attach what was converted beside the weights of its transformers."""
    import diffusers

    # diffusers finds a scheduler only in modules that are imported. Folders of an older version
    # name this one, newer ones the package.
    import turbo_rcm_patch.sampling.scheduler  # noqa: F401

    local = isinstance(folder, Path)
    try:
        with quiet_loading():
            index = diffusers.DiffusionPipeline.load_config(str(folder), local_files_only=local)
            asked = index["_class_name"]
            if asked not in PIPELINES:
                raise TypeError(f"it is a {asked}, not one of {PIPELINES}")
            pipe = getattr(diffusers, asked).from_pretrained(
                str(folder),
                dtype={"default": dtype, "vae": torch.float32},
                local_files_only=local,
            )
    except LOAD_ERRORS as error:
        if not local:
            raise ModelFolderError(
                f"{folder!r} is not a folder here, and loading it from the model hub failed "
                f"({type(error).__name__}: {first_line(error)})",
                expected=f"a folder, one of {tuple(SHIPPED)}, or a hub id like "
                "'Wan-AI/Wan2.1-T2V-1.3B-Diffusers'",
                remedy="Check the spelling and the connection, or download the folder first",
            ) from error
        raise ModelFolderError(
            f"{folder} could not be loaded ({type(error).__name__}: {first_line(error)})",
            expected=LAYOUT,
            remedy="Compare the component named above with the model's original folder",
        ) from error
    for name in ("transformer", "transformer_2", "vae", "text_encoder"):
        part = getattr(pipe, name, None)
        if part is not None and any(p.is_meta for p in part.parameters()):
            raise ModelFolderError(
                f"{folder}/{name}: weights that its config.json asks for are not in its files",
                remedy="Download the folder again, config.json included",
            )
        if part is not None:
            part.eval()
        if part is not None and name in _TRANSFORMERS:
            _attach_extra(part, folder, name, int8=int8)
    return pipe


def _attach_extra(transformer: Any, folder: Path | str, name: str, *, int8: bool) -> None:
    """Attach what was converted beside a transformer's weights, in a folder or on the hub."""
    local = isinstance(folder, Path)
    place = Path(folder) / name if local else _fetch_extra(transformer, str(folder), name)
    if (place / EXTRA_FILE).is_file() or folder_proj_l(place):
        load_extra(transformer, place, int8=int8)
    mark = mark_of(transformer.config)
    if isinstance(mark, Mapping) and not held_proj_l(transformer):
        raise ModelFolderError(
            f"{folder}: {name}/config.json says that it has SLA, but {name} has no {EXTRA_FILE} "
            "with its proj_l, and its weights were not trained for dense attention",
            expected="a folder that `python -m turbo_rcm_patch convert` wrote",
            got=str(sorted(path.name for path in place.iterdir())),
            remedy=f"Put {EXTRA_FILE} of the converted folder there; if dense attention is meant, "
            f'set "{MARK}" to null in {name}/config.json',
        )


def _fetch_extra(transformer: Any, repository: str, name: str) -> Path:
    """Fetch the extra file of a transformer from the hub, because a pipeline's loader fetches only
    files that its classes know; return the folder in the hub's cache."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    place = Path(str(transformer.config.get("_name_or_path", "")))
    revision = place.parent.name if place.parent.parent.name == "snapshots" else None
    try:
        file = hf_hub_download(repository, f"{name}/{EXTRA_FILE}", revision=revision)
        return Path(file).parent
    except LocalEntryNotFoundError as error:  # Which is an EntryNotFoundError too.
        if mark_of(transformer.config):
            raise ModelFolderError(
                f"{repository}: {name}/{EXTRA_FILE}, which its config.json asks for, could not be "
                f"fetched ({first_line(error)})",
                remedy="Check the connection, or download the folder first",
            ) from error
    except EntryNotFoundError:
        pass
    return place


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Hide the loaders' progress bars and advice. Restores their settings, and torch's default
    dtype, which diffusers leaves changed if it fails."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    bars = [
        log
        for log in (diffusers_logging, transformers_logging)
        if getattr(log, "is_progress_bar_enabled", lambda: True)()
    ]
    dtype = torch.get_default_dtype()
    levels = [(log, log.get_verbosity()) for log in (diffusers_logging, transformers_logging)]
    for log in bars:
        log.disable_progress_bar()
    for log, _ in levels:
        log.set_verbosity(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_default_dtype(dtype)
        for log in bars:
            log.enable_progress_bar()
        for log, level in levels:
            log.set_verbosity(level)


def choose_device(device: str | torch.device | None) -> torch.device:
    """Return the given device, or else a GPU if there is one."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise DeviceError(
            "device", expected="'cpu', 'cuda' or 'cuda:N'", got=repr(device)
        ) from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise DeviceError(
            "device",
            expected="a GPU that torch can see",
            got=repr(device),
            remedy="Run `python -m turbo_rcm_patch doctor`, or use device='cpu'",
        )
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise DeviceError(
            "device",
            expected=f"one of the {torch.cuda.device_count()} GPUs that torch can see, from "
            "'cuda:0' on",
            got=repr(str(device)),
        )
    if chosen.type not in ("cpu", "cuda"):
        raise DeviceError("device", expected="'cpu', 'cuda' or 'cuda:N'", got=repr(str(device)))
    return chosen


def check_offload(offload: Offload, device: torch.device) -> None:
    """Raise a `DeviceError` if there is no GPU to offload from."""
    if offload != "none" and device.type == "cpu":
        raise DeviceError(
            f"offload={offload!r}",
            expected="a GPU to offload from",
            got="cpu",
            remedy="Leave offload at 'none' on a machine without a GPU",
        )


def move(pipe: DiffusionPipeline, device: torch.device, offload: Offload) -> None:
    """Move a pipeline to a device; with offloading, only the parts in use."""
    if offload == "model":
        pipe.enable_model_cpu_offload(device=device)
    elif offload == "sequential":
        pipe.enable_sequential_cpu_offload(device=device)
    else:
        pipe.to(device)


def first_line(error: BaseException) -> str:
    """Shorten another library's message to fit into one of ours, without its advice to read files
    unsafely."""
    text = str(error).strip()
    if "weights_only" in text:
        return "it holds more than weights, and was not executed"
    return text.splitlines()[0][:200] if text else "no message"
