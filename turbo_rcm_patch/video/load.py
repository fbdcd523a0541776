"""Load a Wan or CogVideoX pipeline from a folder, a hub id or a shipped model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

import torch
from torch import nn

from turbo_rcm_patch.checkpoints import EXTRA_FILE, load_extra
from turbo_rcm_patch.checkpoints.extra_file import folder_proj_l, mark_of
from turbo_rcm_patch.checkpoints.int8_folder import is_int8_only, load_int8_only
from turbo_rcm_patch.checkpoints.pipeline import DEFAULTS_FILE, LAYOUT
from turbo_rcm_patch.config import check_choice
from turbo_rcm_patch.errors import ConfigError, DeviceError, ModelFolderError
from turbo_rcm_patch.extras import require
from turbo_rcm_patch.patching import find, keep_int8_only
from turbo_rcm_patch.patching.sla import MARK, attach_proj_l, held_proj_l
from turbo_rcm_patch.video.loading import HUB_ID, loading
from turbo_rcm_patch.video.lora import add_loras, check_loras
from turbo_rcm_patch.video.pipelines import PIPELINES
from turbo_rcm_patch.video.scheduler import RCMScheduler
from turbo_rcm_patch.video.settings import FASTWAN, folder_defaults

if TYPE_CHECKING:
    from diffusers import ModelMixin, WanPipeline

    from turbo_rcm_patch.video.pipelines import LoadedPipeline

Offload = Literal["none", "model", "group", "sequential"]

#: The name under which the shipped Wan can be loaded.
TINY: Final = "tiny"
#: Names of shipped models -> what they are called in `turbo_rcm_patch.tiny`.
SHIPPED: Final = {TINY: "TINY_WAN", "tiny-cogvideox": "TINY_COGVIDEOX"}

#: Pipelines that diffusers does not have -> the one of diffusers with their parts.
_ALIASES: Final = {FASTWAN: "WanPipeline"}
_HUB_EXAMPLE: Final = "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"
#: The files of a hub id that say what the model is.
_CONFIGS: Final = ("model_index.json", "*/config.json", DEFAULTS_FILE, f"*/{EXTRA_FILE}")
_WITH_WEIGHTS: Final = (*find.COMPONENTS, "vae", "text_encoder", "image_encoder")


def load_pipeline(
    model: str | Path = TINY,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device | None = None,
    offload: Offload = "none",
    int8: Literal["only"] | None = None,
    lora: Sequence[str] = (),
) -> LoadedPipeline:
    """Load a pipeline: transformer and text encoder in `dtype`, VAE and image encoder in fp32.

    Args:
        model: A folder (never touches the network), one of `SHIPPED`, or a hub id.
        dtype: dtype of the transformer and the text encoder. Layers that diffusers keeps in fp32
            stay in fp32.
        device: Where to run; by default a GPU if there is one.
        offload: "model" keeps one component at a time on the GPU. "group" keeps one block of a
            transformer there and fetches the next meanwhile, and one layer of the text encoder and
            the VAE, which decodes in tiles. "sequential" keeps one layer at a time.
        int8: "only" keeps int8 weights alone, as `keep_int8_only` does. A folder that has no
            others always loads so.
        lora: LoRAs to load and not to fuse, each `PATH_OR_ID[:SCALE]`. With two experts, a name
            with "high_noise" or "low_noise" in it goes to that one, another to both;
            "transformer=..." and "transformer_2=..." choose. See `lora.add_loras`.

    Returns:
        One of the pipelines in `pipelines.PIPELINES`, ready to run. If the folder was converted
        from a checkpoint with SLA, its `proj_l` are attached (`load_extra`).

    Raises:
        ConfigError: An argument has another value.
        DeviceError: The device is not there, or nothing can be offloaded from it.
        ModelFolderError: The model or a LoRA is missing, broken, or of another kind.
        MissingPackageError: A package of the extra "video" is missing, or peft for a LoRA.
    """
    require("video", "load_pipeline", "transformers", "tokenizers", "accelerate", "ftfy")
    check_choice("offload", offload, get_args(Offload))
    if not isinstance(dtype, torch.dtype):
        expected = "a dtype of torch, for instance torch.bfloat16"
        raise ConfigError("dtype", expected=expected, got=repr(dtype))
    target = choose_device(device)
    if offload != "none" and target.type == "cpu":
        expected, remedy = "a GPU to offload from", "Leave offload out on a machine without a GPU"
        raise DeviceError(f"offload={offload!r}", expected=expected, got="cpu", remedy=remedy)
    check_loras(lora)
    pipe = _from_pretrained(local_folder(model) or _download(str(model)), dtype)
    add_loras(pipe, lora)
    if int8 == "only":  # The Linears that the folder has no int8 weights for.
        keep_int8_only(pipe)
    move(pipe, target, offload)
    loaded: LoadedPipeline = pipe
    return loaded


def pipeline_class(model: str | Path) -> str:
    """Return diffusers' class of the pipeline of a model, of which only model_index.json is read.

    Raises:
        ModelFolderError: There is none, or it is of another kind.
    """
    import diffusers

    folder = config_folder(model)
    with _loading_from(folder):
        index = diffusers.DiffusionPipeline.load_config(str(folder), local_files_only=True)
    asked = str(index.get("_class_name"))
    asked = _ALIASES.get(asked, asked)
    if asked not in PIPELINES:
        what, expected = "model_index.json: _class_name", f"one of {tuple(PIPELINES)}"
        remedy = "The transformer of another pipeline may be patched (find_pairs says so), "
        remedy += "but generate and compare run these. From Python compare takes any with "
        remedy += "make="
        raise ModelFolderError(what, expected=expected, got=repr(asked), remedy=remedy)
    return asked


def config_folder(model: str | Path) -> Path:
    """Return a folder that has at least the configuration of a model; of a hub id it is fetched.

    Raises:
        ModelFolderError: There is no such model, or the hub cannot be reached.
    """
    if folder := local_folder(model):
        return folder
    from huggingface_hub import snapshot_download

    with _loading_from(model):
        return Path(snapshot_download(str(model), allow_patterns=[*_CONFIGS]))


def local_folder(model: str | Path) -> Path | None:
    """Find the folder that `model` names; None if it has the form of a hub id.

    Raises:
        ModelFolderError: It is neither.
    """
    if str(model) in SHIPPED and not Path(model).is_dir():
        from turbo_rcm_patch import tiny

        shipped: Path = getattr(tiny, SHIPPED[str(model)])
        if not shipped.is_dir():
            what, remedy = f"no weights of {model}", "Run it from one; wheels hold 'tiny' alone"
            raise ModelFolderError(what, expected="a clone of the repository", remedy=remedy)
        return shipped
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        remedy = "Convert single-file checkpoints with the pipeline's save_pretrained(folder)"
        raise ModelFolderError(f"{path} is a file", expected=LAYOUT, remedy=remedy)
    if not (isinstance(model, str) and HUB_ID.fullmatch(model)):
        remedy = f"Shipped models are {' and '.join(SHIPPED)}; else pass a folder that exists, or "
        remedy += f"a hub id like '{_HUB_EXAMPLE}'"
        raise ModelFolderError(f"no such folder: {path}", expected=LAYOUT, remedy=remedy)
    return None


def _from_pretrained(folder: Path, dtype: torch.dtype) -> Any:
    """Load a pipeline from a folder, and attach the `proj_l` of its transformers."""
    import diffusers

    # diffusers finds a scheduler only in modules that are imported. Folders name the package, or
    # `RCMScheduler`'s module, which is imported above.
    asked = pipeline_class(folder)
    with _loading_from(folder):
        parts = [folder / name for name in find.COMPONENTS]
        alone = {part.name: load_int8_only(part, dtype) for part in parts if is_int8_only(part)}
        # The image encoder is small, runs once, and has fp32 in the authors' examples.
        dtypes = {"default": dtype} | {
            part: torch.float32 for part in ("vae", "image_encoder") if (folder / part).is_dir()
        }
        pipe = getattr(diffusers, asked).from_pretrained(
            str(folder), dtype=dtypes, local_files_only=True, **alone
        )
    for name in _WITH_WEIGHTS:
        part = getattr(pipe, name, None)
        if part is None:
            continue
        if any(p.is_meta for p in part.parameters()):
            what = f"{folder}/{name}: weights that its config.json asks for are not in its files"
            remedy = "Download the folder again, config.json included"
            raise ModelFolderError(what, remedy=remedy)
        part.eval()
        if name in find.COMPONENTS:
            _attach_extra(part, folder / name)
    return pipe


def _download(model: str) -> Path:
    """Return the folder of a hub id in the hub's cache, with the files that diffusers needs and
    those of this package."""
    import diffusers

    pipeline = getattr(diffusers, pipeline_class(model))
    with _loading_from(model):
        return Path(pipeline.download(model))


def _loading_from(folder: Path | str) -> AbstractContextManager[None]:
    """Turn a failure to load a folder or a hub id into an error that says what to check."""
    if isinstance(folder, Path):
        failed, expected = f"{folder} could not be loaded", LAYOUT
        remedy = "Compare the component named above with the model's original folder"
    else:
        failed = f"{folder!r} is not a folder here, and loading it from the model hub failed"
        expected = f"a folder, one of {tuple(SHIPPED)}, or a hub id like '{_HUB_EXAMPLE}'"
        remedy = "Check the spelling and the connection, or download the folder first"
    return loading(ModelFolderError, failed, expected=expected, remedy=remedy)


def _attach_extra(transformer: Any, folder: Path) -> None:
    """Attach the `proj_l` of a transformer from its folder."""
    if folder_proj_l(folder):
        load_extra(transformer, folder)
    if isinstance(mark_of(transformer.config), Mapping) and not held_proj_l(transformer):
        what = f"{folder}/config.json says that it has SLA, but there is no {EXTRA_FILE} with its "
        what += "proj_l, and its weights were not trained for dense attention"
        expected = "a folder that `python -m turbo_rcm_patch convert` wrote"
        got = str(sorted(path.name for path in folder.iterdir()))
        remedy = f"Put {EXTRA_FILE} of the converted folder there; if dense attention is meant, "
        remedy += f'set "{MARK}" to null in config.json'
        raise ModelFolderError(what, expected=expected, got=got, remedy=remedy)


def choose_device(device: str | torch.device | None) -> torch.device:
    """Return the given device, or else a GPU if there is one.

    Raises:
        DeviceError: torch does not see it, or it is neither a CPU nor a CUDA device.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError:
        chosen = torch.device("meta")
    if chosen.type not in ("cpu", "cuda"):
        raise DeviceError("device", expected="'cpu', 'cuda' or 'cuda:N'", got=repr(str(device)))
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if chosen.type == "cuda" and (chosen.index or 0) >= count:
        expected = f"one of the {count} GPUs that torch can see, from 'cuda:0' on"
        remedy = "Run `python -m turbo_rcm_patch doctor`, or use `device='cpu'`"
        raise DeviceError("device", expected=expected, got=repr(str(device)), remedy=remedy)
    return chosen


def move(pipe: Any, device: torch.device, offload: Offload) -> None:
    """Move a pipeline to a device; with offloading, only the parts in use."""
    if offload == "model":
        pipe.enable_model_cpu_offload(device=device)
    elif offload == "sequential":
        pipe.enable_sequential_cpu_offload(device=device)
    elif offload == "none":
        pipe.to(device)
    else:
        _offload_by_groups(pipe, device)


def _offload_by_groups(pipe: Any, device: torch.device) -> None:
    """Offload blocks of the transformers, which still run in int8 because no Linear of theirs is
    hooked, and layers of everything else."""
    from diffusers.hooks import apply_group_offloading

    for name, part in pipe.components.items():
        if isinstance(part, nn.Module):
            blocks = name in find.COMPONENTS
            apply_group_offloading(
                part,
                onload_device=device,
                offload_device=torch.device("cpu"),
                offload_type="block_level" if blocks else "leaf_level",
                num_blocks_per_group=1 if blocks else None,
                use_stream=blocks and device.type == "cuda",
            )
    if hasattr(getattr(pipe, "vae", None), "enable_tiling"):
        pipe.vae.enable_tiling()


def load_skeleton(model: str | Path, *, lora: Sequence[str] = ()) -> WanPipeline:
    """Build the networks and the VAE of a model without weights from their config.json, which is
    fast for any size.

    Args:
        model: As for `load_pipeline`. Of a hub id only the small configuration files are fetched.
        lora: As for `load_pipeline`.

    Returns:
        A pipeline that cannot generate. Its scheduler is the rCM sampler if the model's folder
        asks for few steps, so that the skip pair of the whole network is listed.
    """
    require("video", "a diffusers pipeline", "transformers", "accelerate")
    from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline

    folder = config_folder(model)
    optional = (*find.COMPONENTS[1:], find.VAE)
    there = [name for name in optional if (folder / name / "config.json").is_file()]
    networks = {name: _empty_network(folder, name) for name in ("transformer", *there)}
    vae = networks.pop(find.VAE, None)
    few = folder_defaults(folder).get("sampler", "scheduler") != "scheduler"
    scheduler = RCMScheduler() if few else FlowMatchEulerDiscreteScheduler()
    pipe = WanPipeline(
        **dict.fromkeys(("tokenizer", "text_encoder", "transformer", "transformer_2", "vae"))
        | {"scheduler": scheduler, "boundary_ratio": 0.9}
        | networks
    )
    pipe.register_modules(vae=vae)  # WanPipeline's constructor reads what only Wan's VAE has.
    add_loras(pipe, lora)
    return pipe


def _empty_network(folder: Path, name: str) -> ModelMixin:
    import diffusers

    families = find.VAES if name == find.VAE else find.FAMILIES
    known = sorted(key.rpartition(".")[2] for key in families if key.startswith("diffusers."))
    with (
        loading(
            ModelFolderError,
            f"{folder}: no usable {name}/config.json",
            expected=f"the configuration of one of {', '.join(known)}",
            remedy="Check the path; for another class call find_pairs on the loaded model",
        ),
        torch.device("meta"),
    ):
        config = diffusers.WanTransformer3DModel.load_config(
            str(folder), subfolder=name, local_files_only=True
        )
        asked = config.get("_class_name")
        if asked not in known:  # Another class would be built wrong from this configuration.
            raise ValueError(f"_class_name {asked!r}")
        network = getattr(diffusers, asked).from_config(config)
    # What `load_pipeline` would attach.
    attentions = {key: module for key, module in network.named_modules() if key.endswith(".attn1")}
    for key in folder_proj_l(folder / name):
        if key in attentions:
            dim = attentions[key].inner_dim // attentions[key].heads
            empty = torch.empty(dim, dim, device="meta"), torch.empty(dim, device="meta")
            attach_proj_l(attentions[key], *empty)
    return network
