"""Load a Wan or CogVideoX pipeline from a folder, a hub id or a shipped model."""

from __future__ import annotations

import difflib
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

import torch
from huggingface_hub import errors as hub_errors
from safetensors import SafetensorError
from torch import nn

from turbo_rcm_patch.errors import ConfigError, DeviceError, ModelFolderError, TurboRCMError
from turbo_rcm_patch.extras import require
from turbo_rcm_patch.interrupts import kept_apart
from turbo_rcm_patch.patching import find, keep_int8_only
from turbo_rcm_patch.patching.sla import MARK, attach_proj_l, held_proj_l
from turbo_rcm_patch.turbodiffusion import EXTRA_FILE, load_extra
from turbo_rcm_patch.turbodiffusion.extra_file import folder_proj_l, mark_of
from turbo_rcm_patch.turbodiffusion.pipeline import DEFAULTS_FILE, LAYOUT, check_part, read_json
from turbo_rcm_patch.video.families import FAMILIES, VideoPipeline
from turbo_rcm_patch.video.int8_folder import holds_int8, is_int8_only, load_int8_only
from turbo_rcm_patch.video.scheduler import RCMScheduler
from turbo_rcm_patch.video.settings import folder_defaults

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline, ModelMixin, WanPipeline

Offload = Literal["none", "model", "group", "sequential"]

#: The name under which the shipped Wan can be loaded.
TINY: Final = "tiny"
#: Names of shipped models -> what they are called in `turbo_rcm_patch.tiny`.
SHIPPED: Final = {TINY: "TINY_WAN", "tiny-cogvideox": "TINY_COGVIDEOX"}

PIPELINES: Final = tuple(FAMILIES)
_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_EXAMPLE: Final = "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"
#: Endings of files of weights, which no id has.
_WEIGHTS: Final = (".pth", ".pt", ".ckpt", ".bin", ".gguf", ".safetensors")
_TRANSFORMERS: Final = ("transformer", "transformer_2")
_WITH_WEIGHTS: Final = (*_TRANSFORMERS, "vae", "text_encoder", "image_encoder")
#: What sees and makes pictures.
_ENCODERS: Final = frozenset({"vae", "image_encoder"})
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
    int8: bool | Literal["only"] = True,
) -> VideoPipeline:
    """Load a pipeline: transformer and text encoder in `dtype`, VAE and image encoder in fp32.

    Args:
        model: A folder (never touches the network), one of `SHIPPED`, or a hub id.
        dtype: dtype of the transformer and the text encoder. Layers that diffusers keeps in fp32
            stay in fp32.
        device: Where to run; by default a GPU if there is one.
        offload: "model" keeps one component at a time on the GPU. "group" keeps one block of a
            transformer there and fetches the next meanwhile, and one layer of the text encoder and
            the VAE, which decodes in tiles. "sequential" keeps one layer at a time.
        int8: Whether to attach the int8 weights of a converted checkpoint, for `linear="int8"`.
            "only" keeps int8 weights alone, as `keep_int8_only` does: those of the folder, and no
            original is read, or new ones. A folder without originals always loads so.

    Returns:
        One of the pipelines in `families.FAMILIES`, ready to run. If the folder was converted
        from a checkpoint with int8 weights or SLA, these are attached (`load_extra`).
    """
    require("video", "load_pipeline", "transformers", "tokenizers", "accelerate", "ftfy")
    if offload not in get_args(Offload):
        raise ConfigError("offload", expected=f"one of {get_args(Offload)}", got=repr(offload))
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(
            "dtype", expected="a dtype of torch, for instance torch.bfloat16", got=repr(dtype)
        )
    target = choose_device(device)
    check_offload(offload, target)
    folder = resolve_model(model)
    if isinstance(folder, Path):
        check_folder(folder)
    # Under sequential offload Linears are hooked and not run in int8: int8 weights beside others
    # would lie on the GPU for nothing.
    if offload == "sequential" and int8 != "only":
        int8 = False
    pipe = _from_pretrained(folder, dtype, int8=int8)
    if int8 == "only":  # Of what the folder has no int8 weights for.
        keep_int8_only(pipe)
    move(pipe, target, offload)
    return pipe


def pipeline_class(model: str | Path) -> str | None:
    """The class of the pipeline that a model has, before it is loaded; None for a hub id.

    Raises:
        ModelFolderError: The folder is not there, or something in it is missing or broken.
    """
    folder = resolve_model(model)
    return check_folder(folder) if isinstance(folder, Path) else None


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
        f"hub id like '{_HUB_EXAMPLE}'",
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


def check_folder(folder: Path) -> str:
    """The class of the pipeline in a folder; or raise a `ModelFolderError` that names the first
    thing missing or broken in it."""
    try:
        return _check_folder(folder)
    except ModelFolderError:
        raise
    except OSError as error:
        raise ModelFolderError(
            f"{error.filename or folder} cannot be read ({error.strerror})",
            remedy="Check its permissions and the disk",
        ) from error


def _check_folder(folder: Path) -> str:
    index_path = folder / "model_index.json"
    if not index_path.is_file():
        inside = sorted(p.name for p in folder.iterdir())[:8]
        raise ModelFolderError(
            f"{folder} has no model_index.json", expected=LAYOUT, got=f"a folder with {inside}"
        )
    index = read_json(index_path, ModelFolderError)
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
        check_part(folder, name, weights=name in _WITH_WEIGHTS)
    return str(index["_class_name"])


def _from_pretrained(
    folder: Path | str, dtype: torch.dtype, *, int8: bool | Literal["only"] = True
) -> VideoPipeline:
    """Load a pipeline, and attach what was converted beside the weights of its transformers."""
    import diffusers

    # diffusers finds a scheduler only in modules that are imported. Folders of an older version
    # name `RCMScheduler`'s, which is imported above, newer ones the package.
    local = isinstance(folder, Path)
    if local:
        failed, expected = f"{folder} could not be loaded", LAYOUT
        remedy = "Compare the component named above with the model's original folder"
    else:
        failed = f"{folder!r} is not a folder here, and loading it from the model hub failed"
        expected = f"a folder, one of {tuple(SHIPPED)}, or a hub id like '{_HUB_EXAMPLE}'"
        remedy = "Check the spelling and the connection, or download the folder first"
    with loading(ModelFolderError, failed, expected=expected, remedy=remedy):
        index = diffusers.DiffusionPipeline.load_config(str(folder), local_files_only=local)
        asked = index["_class_name"]
        if asked not in PIPELINES:
            raise TypeError(f"it is a {asked}, not one of {PIPELINES}")
        alone = {}
        if isinstance(folder, Path):
            alone = _int8_parts(folder, dtype, wanted=int8 == "only")
        # The image encoder is small, runs once, and has fp32 in the authors' examples.
        dtypes = {"default": dtype} | dict.fromkeys(_ENCODERS & index.keys(), torch.float32)
        pipe = getattr(diffusers, asked).from_pretrained(
            str(folder), dtype=dtypes, local_files_only=local, **alone
        )
    for name in _WITH_WEIGHTS:
        part = getattr(pipe, name, None)
        if part is not None and any(p.is_meta for p in part.parameters()):
            raise ModelFolderError(
                f"{folder}/{name}: weights that its config.json asks for are not in its files",
                remedy="Download the folder again, config.json included",
            )
        if part is not None:
            part.eval()
        if part is not None and name in _TRANSFORMERS:
            _attach_extra(part, folder, name, int8=bool(int8) and name not in alone)
    if not local:
        from huggingface_hub.errors import EntryNotFoundError

        with suppress(EntryNotFoundError):  # There is none, or no connection.
            network = pipe.transformer or getattr(pipe, "transformer_2", None)
            _fetch(network, str(folder), DEFAULTS_FILE)
    return pipe


def _fetch(transformer: Any, repository: str, file: str) -> Path:
    """Fetch a file from the hub that a pipeline's loader does not know, of the revision of a
    transformer that was loaded from there."""
    from huggingface_hub import hf_hub_download

    place = Path(str(transformer.config.get("_name_or_path", "")))
    revision = place.parent.name if place.parent.parent.name == "snapshots" else None
    return Path(hf_hub_download(repository, file, revision=revision))


def _int8_parts(folder: Path, dtype: torch.dtype, *, wanted: bool) -> dict[str, Any]:
    """The transformers of a folder that are loaded with int8 weights alone: because there are no
    others, or because it was asked for and there are int8 weights."""
    parts = [folder / name for name in _TRANSFORMERS if (folder / name / "config.json").is_file()]
    chosen = [part for part in parts if is_int8_only(part) or (wanted and holds_int8(part))]
    return {part.name: load_int8_only(part, dtype) for part in chosen}


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
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        return _fetch(transformer, repository, f"{name}/{EXTRA_FILE}").parent
    except LocalEntryNotFoundError as error:  # Which is an EntryNotFoundError too.
        if mark_of(transformer.config):
            raise ModelFolderError(
                f"{repository}: {name}/{EXTRA_FILE}, which its config.json asks for, could not be "
                f"fetched ({first_line(error)})",
                remedy="Check the connection, or download the folder first",
            ) from error
    except EntryNotFoundError:
        pass
    return Path(str(transformer.config.get("_name_or_path", "")))


@contextmanager
def loading(
    error: type[TurboRCMError], failed: str, *, expected: str, remedy: str = ""
) -> Iterator[None]:
    """Load something quietly, and raise an error of ours where a library cannot.

    Args:
        error: Its class.
        failed: What it begins with; the library's words follow.
        expected: As in `TurboRCMError`.
        remedy: As in `TurboRCMError`.
    """
    try:
        with kept_apart(), quiet_loading():
            yield
    except LOAD_ERRORS as why:
        said = f"{type(why).__name__}: {first_line(why)}"
        if str(why).startswith("Failed to import"):  # It is no fault of the files.
            remedy = "Run `turbo-rcm-patch doctor`: it says which versions of the packages work"
        raise error(f"{failed} ({said})", expected=expected, remedy=remedy) from why


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Hide the loaders' progress bars and advice. Restores their settings, and torch's default
    dtype, which diffusers leaves changed if it fails."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    logs = (diffusers_logging, transformers_logging)
    bars = [log for log in logs if getattr(log, "is_progress_bar_enabled", lambda: True)()]
    levels = [(log, log.get_verbosity()) for log in logs]
    dtype = torch.get_default_dtype()
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
    elif offload == "group":
        _offload_by_groups(pipe, device)
    else:
        pipe.to(device)


def _offload_by_groups(pipe: DiffusionPipeline, device: torch.device) -> None:
    """Blocks of the transformers, which still run in int8 because no Linear of theirs is hooked,
    and layers of everything else."""
    from diffusers.hooks import apply_group_offloading

    for name, part in pipe.components.items():
        if not isinstance(part, nn.Module):
            continue
        blocks = name in _TRANSFORMERS
        apply_group_offloading(
            part,
            onload_device=device,
            offload_device=torch.device("cpu"),
            offload_type="block_level" if blocks else "leaf_level",
            num_blocks_per_group=1 if blocks else None,
            use_stream=blocks and device.type == "cuda",
        )
    tile: Callable[[], None] | None = getattr(getattr(pipe, "vae", None), "enable_tiling", None)
    if tile is not None:
        tile()


def first_line(error: BaseException) -> str:
    """Shorten another library's message to fit into one of ours, without its advice to read files
    unsafely. Of an import that failed because of another the last line says why."""
    text = str(error).strip()
    if "weights_only" in text:
        return "it holds more than weights, and was not executed"
    lines = text.splitlines() or ["no message"]
    return lines[-1 if lines[0].startswith("Failed to import") else 0][:200]


def load_skeleton(model: str | Path) -> WanPipeline:
    """Transformers built from their config.json only, in no time and memory whatever their size.

    Args:
        model: As for `load_pipeline`. Of a hub id only the small configuration files are fetched.

    Returns:
        A pipeline that cannot generate. Its scheduler is the rCM sampler if the model's folder
        asks for it, so that the skip pair of the whole network is listed.
    """
    require("video", "a diffusers pipeline", "transformers", "accelerate")
    from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline

    folder = resolve_model(model)
    first = _empty_transformer(folder, "transformer")
    second = None
    if isinstance(folder, Path) and (folder / "transformer_2").is_dir():
        second = _empty_transformer(folder, "transformer_2")
    defaults = folder_defaults(folder if isinstance(folder, Path) else None)
    distilled = bool(defaults) and defaults.get("sampler", "rcm") == "rcm"
    return WanPipeline(
        tokenizer=None,
        text_encoder=None,
        vae=None,
        scheduler=RCMScheduler() if distilled else FlowMatchEulerDiscreteScheduler(),
        transformer=first,
        transformer_2=second,
        boundary_ratio=0.9 if second is not None else None,
    )


def _empty_transformer(folder: Path | str, name: str) -> ModelMixin:
    import diffusers

    classes = [key for key in find.FAMILIES if key.startswith("diffusers.")]
    known = sorted(key.rpartition(".")[2] for key in classes)
    local = isinstance(folder, Path)
    with (
        loading(
            ModelFolderError,
            f"{folder}: no usable {name}/config.json",
            expected=f"the configuration of one of {', '.join(known)}",
            remedy="Check the path; for another class call find_pairs on the loaded model"
            if local
            else "Check the spelling and the connection, or download the folder first",
        ),
        torch.device("meta"),
    ):
        config = diffusers.WanTransformer3DModel.load_config(
            str(folder), subfolder=name, local_files_only=local
        )
        asked = config.get("_class_name")
        # Another class would be built wrong from this configuration, not refused.
        cls = getattr(diffusers, asked) if asked in known else None
        network = None if cls is None else cls.from_config(config)
    if network is None:
        raise ModelFolderError(
            f"{folder}: {name}/config.json: _class_name",
            expected=f"one of {', '.join(known)}",
            got=repr(asked),
            remedy="For another class call find_pairs on the loaded model",
        )
    network = _with_stand_ins(network)
    _attach_sla(network, Path(folder) / name if local else None)
    return network


def _attach_sla(network: ModelMixin, folder: Path | None) -> None:
    """Zeros for each proj_l that `load_pipeline` would attach; by the mark where only config.json
    is at hand."""
    modules = dict(network.named_modules())
    if folder is not None:
        owners = list(folder_proj_l(folder))
    else:
        owners = [name for name in modules if name.endswith(".attn1")] * bool(
            mark_of(network.config)
        )
    for name in owners:
        attention = modules.get(name)
        if attention is not None:
            dim = attention.inner_dim // attention.heads
            attach_proj_l(attention, torch.zeros(dim, dim), torch.zeros(dim))


def _with_stand_ins(network: ModelMixin) -> ModelMixin:
    """Weights of the right shape and dtype on the CPU, one number each, in place of none at all.

    The dtypes are those of a model loaded in bf16, where diffusers keeps some layers in fp32.
    """
    for module_name, module in network.named_modules():
        for name, weight in module.named_parameters(recurse=False):
            parts = f"{module_name}.{name}".split(".")
            kept = any(part in parts for part in network._keep_in_fp32_modules or ())
            one = torch.zeros(1, dtype=torch.float32 if kept else torch.bfloat16)
            stand_in = nn.Parameter(one.expand(weight.shape), requires_grad=False)
            setattr(module, name, stand_in)
    return network
