"""A checkpoint of TurboDiffusion and a diffusers folder of its base, as one pipeline."""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch
from torch import nn

from turbo_rcm_patch import RCMScheduler
from turbo_rcm_patch.errors import CheckpointError, ModelFolderError, OutputExistsError
from turbo_rcm_patch.extras import require
from turbo_rcm_patch.turbodiffusion import EXTRA_FILE, load_extra, unload_extra
from turbo_rcm_patch.turbodiffusion.convert import convert_transformer
from turbo_rcm_patch.turbodiffusion.distributed import dcp_metadata
from turbo_rcm_patch.turbodiffusion.extra_file import folder_proj_l, mark_of
from turbo_rcm_patch.turbodiffusion.folder import FORMAT
from turbo_rcm_patch.turbodiffusion.original import Part, read_text_encoder, read_vae
from turbo_rcm_patch.turbodiffusion.pipeline import check_part, read_json
from turbo_rcm_patch.turbodiffusion.read import Wanted, check_tensors, open_width
from turbo_rcm_patch.video.int8_folder import is_int8_only, load_int8_only
from turbo_rcm_patch.video.load import Offload, choose_device, loading, move, resolve_model
from turbo_rcm_patch.video.progress import bars
from turbowan.arguments import base_of

if TYPE_CHECKING:
    from diffusers import (
        AutoencoderKLWan,
        WanImageToVideoPipeline,
        WanPipeline,
        WanTransformer3DModel,
    )
    from transformers import UMT5EncoderModel

    from turbo_rcm_patch.turbodiffusion.read import Progress

    _Pipeline = TypeVar("_Pipeline", WanPipeline, WanImageToVideoPipeline)

#: The model's name -> width and number of blocks.
SIZES: Final = {
    "Wan2.1-1.3B": (1536, 30),
    "Wan2.1-14B": (5120, 40),
    "Wan2.2-A14B": (5120, 40),
}
#: Entry of config.json that says which file a converted folder was made of.
_SOURCE: Final = "_turbo_rcm_source"
_PARTS: Final = ("transformer", "transformer_2")
#: Channels of the latents whose mean and deviation diffusers knows.
_CHANNELS: Final = 16
#: What of a VAE's configuration no tensor shows.
_STATISTICS: Final = ("latents_mean", "latents_std")
_EXPECTED: Final = (
    "a .pth of TurboDiffusion, or a folder that `python -m turbo_rcm_patch convert` wrote"
)


def transformer_folders(
    paths: Sequence[str | Path],
    *,
    base: str | Path | None = None,
    cache: str | Path | None = None,
    progress: Progress | None = None,
) -> list[Path]:
    """The transformer folders of one network or of two experts, all of whose paths are there.

    Args:
        paths: One, or the high-noise expert's and the low-noise expert's.
        base: As in `transformer_folder`.
        cache: As in `transformer_folder`.
        progress: Called with MiB, each network under a name of its own.

    Raises:
        CheckpointError, OutputExistsError: As in `transformer_folder`.
    """
    for path in paths:
        if not Path(path).expanduser().exists():
            raise CheckpointError(f"no such file or folder: {path}", expected=_EXPECTED)
    folders = []
    for path, part in zip(paths, _PARTS, strict=False):

        def in_mib(_: str, done: int, total: int, name: str = part) -> None:
            if progress is not None:
                progress(name, done >> 20, max(1, total >> 20))

        folders.append(
            transformer_folder(path, part=part, base=base, cache=cache, progress=in_mib)
        )
    return folders


def transformer_folder(
    path: str | Path,
    *,
    part: str = "transformer",
    base: str | Path | None = None,
    cache: str | Path | None = None,
    progress: Progress | None = None,
) -> Path:
    """The transformer folder that an argument of the scripts leads to.

    A `.pth` file is converted to a folder beside it or in `cache`, which is used again until the
    file is another one (by its size and time) or is converted in another way.

    Args:
        path: TurboDiffusion's `.pth` file or a DCP folder, a transformer folder or a pipeline
            folder.
        part: Which transformer of a pipeline folder.
        base: A pipeline folder, or a hub id. Heads that no tensor shows are as many as those of a
            folder's transformer, if that is as wide.
        cache: Folder for what is converted; made if it does not exist.
        progress: Called with bytes while converting.

    Raises:
        CheckpointError: There is nothing there, or it is not a WanModel of TurboDiffusion.
        OutputExistsError: The folder cannot be written, or something else is in its place.
    """
    given = Path(path).expanduser()
    metadata = dcp_metadata(given) if given.is_dir() else None
    if given.is_dir() and metadata is None:
        folder = given / part if (given / "model_index.json").is_file() else given
        if not (folder / "config.json").is_file():
            raise CheckpointError(
                f"{folder} has no config.json",
                expected=_EXPECTED,
            )
        return folder
    if not given.exists():
        raise CheckpointError(f"no such file or folder: {given}", expected=_EXPECTED)
    name = f"{given.name.removesuffix('.pth')}-diffusers"
    if cache is None:
        target = given.parent / name
    else:  # Where two experts may come from files of one name.
        origin = hashlib.blake2b(str(given.resolve().parent).encode(), digest_size=4).hexdigest()
        target = Path(cache).expanduser() / f"{name}-{origin}"
    status = (metadata or given).stat()
    source = {"format": FORMAT, "bytes": status.st_size, "modified_ns": status.st_mtime_ns}
    heads, width = _heads(base, part)
    if _is(target, source, heads):
        return target
    if heads is not None and open_width(given) != width:
        heads = None  # SLA shows them, or only the base's VAE and text encoder fit.
    if _is(target, source, heads):
        return target
    # A pipeline folder, for one, which has no config.json.
    if target.is_dir() and any(target.iterdir()) and _made_of(target) is None:
        raise OutputExistsError(
            f"{target} already exists and is not what {given.name} was converted to",
            remedy=f"Give {target} itself if it is meant, or another --cache folder",
        )
    try:
        convert_transformer(
            given,
            target,
            heads=heads,
            force=target.exists(),
            config={_SOURCE: source},
            progress=progress,
        )
    except OutputExistsError as error:
        if _is(target, source, heads):
            return target  # Another process was first.
        raise OutputExistsError(
            error.what,
            expected=error.expected,
            got=error.got,
            remedy="Choose another folder with --cache",
        ) from error
    return target


def _heads(base: str | Path | None, part: str) -> tuple[int | None, int]:
    """Heads and width of a base's transformer; None and 0 if it has none here."""
    root = None if base is None else resolve_model(base)
    file = root / part / "config.json" if isinstance(root, Path) else None
    if file is None or not file.is_file():
        return None, 0
    config = read_json(file)
    heads, head_dim = (config.get(f) for f in ("num_attention_heads", "attention_head_dim"))
    if not isinstance(heads, int) or not isinstance(head_dim, int):
        return None, 0
    return heads, heads * head_dim


def _is(folder: Path, source: object, heads: int | None) -> bool:
    """Whether a folder was converted from that file, with that many heads; None for any."""
    if _made_of(folder) != source:
        return False
    return heads in (None, read_json(folder / "config.json").get("num_attention_heads"))


def _made_of(folder: Path) -> object:
    """The file that a folder was converted from, or None if it does not say so."""
    config = folder / "config.json"
    return read_json(config).get(_SOURCE) if config.is_file() else None


def load(
    pipeline: type[_Pipeline],
    folders: Sequence[Path],
    base: str | Path,
    *,
    sla: bool = True,
    int8: bool = True,
    model: str | None = None,
    vae_path: str | Path | None = None,
    text_encoder_path: str | Path | None = None,
    dtype: torch.dtype = torch.bfloat16,
    vae_dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device | None = None,
    offload: Offload = "none",
) -> _Pipeline:
    """A pipeline of one or two converted transformers and a base's other parts.

    Args:
        pipeline: diffusers' class.
        folders: Transformer folders: one, or the high-noise expert's and the low-noise expert's.
        base: A folder of a diffusers pipeline, which needs no transformer, or a hub id.
        sla: Whether attention is to be SLA; without, `proj_l` is not attached.
        int8: Whether the int8 weights of a -quant checkpoint are attached, beside the multiplied
            out ones, for `linear="int8"`.
        model: A name in `SIZES` that the transformers have to be, or None.
        vae_path: `Wan2.1_VAE.pth`, in place of the base's VAE.
        text_encoder_path: `models_t5_umt5-xxl-enc-bf16.pth`, in place of the base's text encoder.
        dtype: Of transformers and text encoder; layers that diffusers keeps in fp32 stay in it.
        vae_dtype: Of the VAE.
        device: Where to run; by default a GPU if there is one.
        offload: As in `load_pipeline`.

    Raises:
        CheckpointError: A transformer is not the model, has no SLA, or cannot be loaded.
        ModelFolderError: The base cannot be loaded, or its parts do not fit.
    """
    target = choose_device(device)
    image = pipeline.__name__ == "WanImageToVideoPipeline"
    networks = [
        _transformer(folder, dtype, sla=sla, int8=int8 and offload != "sequential")
        for folder in folders
    ]
    for folder, network in zip(folders, networks, strict=True):
        _check_model(folder, network, model, image=image)
    root = resolve_model(base)
    local = isinstance(root, Path)
    if isinstance(root, Path):
        for name, own in (("vae", vae_path), ("text_encoder", text_encoder_path)):
            if not own:
                check_part(root, name, weights=True)
    parts: dict[str, Any] = dict.fromkeys(_PARTS) | dict(zip(_PARTS, networks, strict=False))
    if vae_path:
        parts["vae"] = load_vae(vae_path, dtype=vae_dtype, base=root)
    if text_encoder_path:
        parts["text_encoder"] = load_text_encoder(text_encoder_path, dtype=dtype)
    with loading(
        ModelFolderError,
        f"--base: {root} could not be loaded",
        expected="a diffusers pipeline of Wan (its transformers are not needed): "
        "model_index.json beside the folders vae, text_encoder, tokenizer and scheduler"
        + ("" if local else ", or a hub id like 'Wan-AI/Wan2.1-T2V-1.3B-Diffusers'"),
    ):
        pipe = pipeline.from_pretrained(
            str(root),
            **parts,
            boundary_ratio=None,
            dtype={"default": dtype, "vae": vae_dtype},
            local_files_only=local,
        )
    _check_base(root, pipe, networks[0])
    move(pipe, target, offload)
    return pipe


def load_given(
    pipeline: type[_Pipeline], checkpoints: Sequence[str], arguments: argparse.Namespace
) -> _Pipeline:
    """A pipeline with the rCM scheduler, as the arguments of a script ask for it; checkpoints are
    converted on first use.

    Args:
        pipeline: diffusers' class.
        checkpoints: Of the transformer, or of the high-noise and the low-noise expert.
        arguments: From `parse`.
    """
    base = base_of(arguments, checkpoints[0])
    with bars() as progress:
        folders = transformer_folders(
            checkpoints, base=base, cache=arguments.cache, progress=progress
        )
    named = ("model", "vae_path", "text_encoder_path", "device", "offload")
    pipe = load(
        pipeline,
        folders,
        base,
        sla=arguments.attention_type != "original" and not arguments.no_patch,
        int8=arguments.quant_linear and not arguments.no_patch,
        dtype=getattr(torch, arguments.dtype),
        vae_dtype=getattr(torch, arguments.vae_dtype),
        **{name: getattr(arguments, name) for name in named},
    )
    # Network times in bf16, as the published loop has them.
    pipe.scheduler = RCMScheduler(
        sigma_max=arguments.sigma_max,
        sampler="ode" if getattr(arguments, "ode", False) else "sde",
        timestep_dtype="bfloat16",
    )
    return pipe


def _transformer(
    folder: Path, dtype: torch.dtype, *, sla: bool, int8: bool
) -> WanTransformer3DModel:
    from diffusers import WanTransformer3DModel

    with loading(
        CheckpointError,
        f"{folder} could not be loaded",
        expected="a transformer folder that `python -m turbo_rcm_patch convert` wrote",
    ):
        network = (
            load_int8_only(folder, dtype)
            if is_int8_only(folder)
            else WanTransformer3DModel.from_pretrained(
                str(folder), dtype=dtype, local_files_only=True
            )
        )
    network.eval()
    has_sla = False
    if (folder / EXTRA_FILE).is_file() or folder_proj_l(folder):
        has_sla = bool(load_extra(network, folder, int8=int8, proj_l=sla).proj_l)
    if sla and not has_sla:
        raise CheckpointError(
            f"{folder} has no proj_l, the projection of SLA",
            expected="a checkpoint trained with SLA for --attention_type sla or sagesla",
            remedy="Pass --attention_type original",
        )
    if not sla and mark_of(network.config):
        unload_extra(network)  # Its proj_l are lost, and dense attention is asked for.
    return network


def _check_model(folder: Path, network: Any, model: str | None, *, image: bool) -> None:
    config = network.config
    found = (config.num_attention_heads * config.attention_head_dim, config.num_layers)
    if model is not None and found != SIZES[model]:
        raise CheckpointError(
            f"{folder} is not --model {model}",
            expected=f"{SIZES[model][1]} blocks of width {SIZES[model][0]}",
            got=f"{found[1]} blocks of width {found[0]}",
            remedy="Leave --model out: sizes are read from the checkpoint",
        )
    makes_image = config.in_channels != config.out_channels
    if makes_image != image or config.image_dim is not None:
        kind = "image" if makes_image else "text"
        wanted = "Wan 2.2's image-to-video experts" if image else "a text-to-video model"
        raise CheckpointError(
            f"{folder} is {'an' if makes_image else 'a'} {kind}-to-video model"
            + ("" if config.image_dim is None else " with an image encoder"),
            expected=wanted,
            remedy=f"Use examples/turbowan_{'t2v' if image else 'i2v'}.py for the other kind",
        )


def _check_base(root: Path | str, pipe: Any, network: Any) -> None:
    for name in ("vae", "text_encoder"):
        if any(parameter.is_meta for parameter in getattr(pipe, name).parameters()):
            raise ModelFolderError(
                f"--base: {root}/{name} lacks weights that its config.json asks for",
                remedy="Download the folder again",
            )
        getattr(pipe, name).eval()
    sizes = {
        "channels of a latent": (pipe.vae.config.z_dim, network.config.out_channels),
        "width of the text encoder": (pipe.text_encoder.config.d_model, network.config.text_dim),
    }
    for what, (base, transformer) in sizes.items():
        if base != transformer:
            raise ModelFolderError(
                f"--base: {root} does not fit the checkpoint: {what}",
                expected=str(transformer),
                got=str(base),
                remedy="Choose the diffusers folder of the same Wan version",
            )


def load_vae(
    path: str | Path, *, dtype: torch.dtype, base: Path | str | None = None
) -> AutoencoderKLWan:
    """Wan 2.1's VAE from its authors' file.

    Args:
        path: `Wan2.1_VAE.pth`.
        dtype: Of its weights.
        base: A pipeline folder, whose VAE says mean and deviation of latents that are not Wan's 16
            channels.

    Raises:
        CheckpointError: It is not Wan 2.1's VAE.
    """
    from diffusers import AutoencoderKLWan

    part = read_vae(path)
    config: dict[str, Any] = dict(part.config)
    if config["z_dim"] != _CHANNELS:
        file = Path(base) / "vae" / "config.json" if isinstance(base, Path) else None
        there = read_json(file) if file is not None and file.is_file() else {}
        config |= {name: there.get(name, ()) for name in _STATISTICS}
        if any(len(config[name]) != config["z_dim"] for name in _STATISTICS):
            raise CheckpointError(
                f"--vae_path: {path} has latents of {config['z_dim']} channels",
                expected=f"{_CHANNELS}, or a --base folder with the VAE of as many",
            )
    with torch.device("meta"):
        vae = AutoencoderKLWan(**config)
    _fill(vae, part, dtype, f"--vae_path: {path}", "the VAE of Wan 2.1")
    return vae.eval()


def load_text_encoder(path: str | Path, *, dtype: torch.dtype) -> UMT5EncoderModel:
    """The encoder of umT5 from Wan's authors' file.

    Args:
        path: `models_t5_umt5-xxl-enc-bf16.pth`.
        dtype: Of its weights.

    Raises:
        CheckpointError: It is another file.
    """
    require("video", "the text encoder", "transformers")
    from transformers import UMT5Config, UMT5EncoderModel

    part = read_text_encoder(path)
    config: dict[str, Any] = part.config | {"feed_forward_proj": "gated-gelu", "dropout_rate": 0.0}
    with torch.device("meta"):
        encoder = UMT5EncoderModel(UMT5Config(**config))
    embedding = "encoder.embed_tokens.weight"
    part.tensors.setdefault(embedding, part.tensors["shared.weight"])
    _fill(encoder, part, dtype, f"--text_encoder_path: {path}", "the encoder of umT5")
    encoder.tie_weights()
    return encoder.eval()


def _fill(model: nn.Module, part: Part, dtype: torch.dtype, where: str, what: str) -> None:
    """Give a model without weights those of a file, all of them."""
    listed = model.state_dict()
    wanted = {name: Wanted((tuple(tensor.shape),)) for name, tensor in listed.items()}
    check_tensors(where, wanted, part.tensors, what)
    # In memory of their own, and not mapped: a file may be replaced while the model runs.
    own = {name: tensor.to(dtype, copy=True) for name, tensor in part.tensors.items()}
    model.load_state_dict(own, assign=True)
    left = [name for name, tensor in model.named_buffers() if tensor.is_meta]
    assert not left, f"buffers without values: {left}"
