"""Compile the kernels of a model's videos where there is no GPU, into Triton's cache on disk.

Every network and the VAE of a pipeline run once on the meta device, patched, and each kernel that
they would launch is compiled for the GPU that will be there (`ops/ahead.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from turbo_rcm_patch.checkpoints.read import Progress
from turbo_rcm_patch.config import PatchConfig
from turbo_rcm_patch.errors import ConfigError, SamplingError
from turbo_rcm_patch.extras import missing
from turbo_rcm_patch.files import try_json, write_json
from turbo_rcm_patch.patching import patch_model
from turbo_rcm_patch.patching.block import Level
from turbo_rcm_patch.patching.record import record_of
from turbo_rcm_patch.video.environment import code_digest
from turbo_rcm_patch.video.load import config_folder, load_skeleton, pipeline_class
from turbo_rcm_patch.video.pipelines import PIPELINES
from turbo_rcm_patch.video.settings import Settings

#: The file in a cache folder that says which kernels were compiled into it for which model.
NOTE: Final = "turbo_rcm_patch.json"
#: Name of an NVIDIA GPU's architecture -> the number that Triton takes.
ARCHITECTURES: Final = {f"sm_{arch}": arch for arch in (80, 86, 89, 90, 100, 120)}


def precompile(
    model: str | Path,
    *,
    gpu: str = "sm_90",
    out: str | Path | None = None,
    dtype: torch.dtype = torch.bfloat16,
    config: PatchConfig | None = None,
    height: int | None = None,
    width: int | None = None,
    num_frames: int | None = None,
    progress: Progress | None = None,
) -> str:
    """Compile what the first video of a model would compile, without weights and without a GPU.

    That is the blocks as asked for, and as the guard may run them, and the VAE in fp32 and in
    `dtype`. Kernels of a size, such as a video's length, are the same for most sizes.

    Args:
        model: As for `load_pipeline`; only configurations are read.
        gpu: The architecture, one of `ARCHITECTURES`.
        out: The cache folder, for TRITON_CACHE_DIR; by default Triton's own.
        dtype: dtype of the transformer.
        config: How the model will be patched.
        height: Height in pixels; by default the model's usual one, like the next two.
        width: Width in pixels.
        num_frames: Number of frames.
        progress: Called with a stage, what is done and the total.

    Returns:
        How many kernels were compiled and were there, in which folder, and the only release of
        Triton that will find them.

    Raises:
        ConfigError: No such architecture, or a Triton before 3.6.
        MissingPackageError: Triton is not installed.
        ModelFolderError: The model is missing, or of another kind.
        SamplingError: A kernel does not compile.
    """
    if gpu not in ARCHITECTURES:
        raise ConfigError("gpu", expected=f"one of {', '.join(ARCHITECTURES)}", got=repr(gpu))
    # Imported here, because the package runs without Triton too.
    try:
        from turbo_rcm_patch.ops import ahead, gluon
    except ImportError as error:
        raise missing("precompile", "triton") from error
    if not gluon.has_hopper_kernels():
        got, remedy = ahead.VERSION, "pip install torch==2.11.0 brings 3.6"
        raise ConfigError("Triton", expected="3.6 or newer", got=got, remedy=remedy)
    progress = progress or (lambda *_: None)
    sizes = {"height": height, "width": width, "num_frames": num_frames}
    calls = list(_calls(model, dtype, config or PatchConfig(), sizes))
    folder = Path(out).expanduser() if out is not None else ahead.cache_folder()
    show = partial(progress, "compile")
    try:
        seen = ahead.compile_for(ARCHITECTURES[gpu], calls, folder, show)
    except (RuntimeError, ahead.TritonError) as error:
        what, why = "a kernel did not compile", str(error).strip()[:500]
        raise SamplingError(what, got=why) from error
    note = try_json(folder / NOTE)
    note[f"{model} on {gpu}"] = {
        "code": code_digest(),
        "triton": ahead.VERSION,
        "kernels": {key: name for key, (name, _) in seen.items()},
    }
    write_json(folder / NOTE, note)
    cached = sum(hit for _, hit in seen.values())
    return (
        f"{len(seen) - cached} kernels compiled, {cached} were there, in {folder}, "
        f"for Triton {ahead.VERSION}"
    )


def cached_models() -> dict[str, str]:
    """Return for each model that was compiled into Triton's cache of this process what is there
    now: "MODEL on GPU" -> "65 of 65 kernels", or why they are of no use."""
    from turbo_rcm_patch.ops import ahead

    models = {}
    for name, entry in try_json(ahead.cache_folder() / NOTE).items():
        there = [ahead.is_cached(*kernel) for kernel in entry["kernels"].items()]
        models[name] = f"{sum(there)} of {len(there)} kernels"
        if entry["triton"] != ahead.VERSION:
            models[name] = f"compiled by Triton {entry['triton']}"
        elif entry["code"] != code_digest():
            models[name] = "compiled by another release of this package"
    return models


def _calls(
    model: str | Path, dtype: torch.dtype, config: PatchConfig, sizes: dict[str, int | None]
) -> Iterator[Callable[[], object]]:
    """Yield calls of a pipeline's parts, of which each launches kernels."""
    folder = config_folder(model)
    kind = PIPELINES[pipeline_class(folder)]
    chosen = {name: size for name, size in sizes.items() if size is not None}
    settings = Settings.for_model(folder, kind.usual, kind.with_scheduler, **chosen)
    config = replace(config, guard=False)  # It compares results, and there are none.
    latent = _latent_size(_empty_vae(folder).config, settings)
    pipe = load_skeleton(folder)
    for network in filter(None, (pipe.transformer, pipe.transformer_2)):
        _cast(network, dtype)
        inputs = _cogvideox_inputs if kind.cogvideox else _wan_inputs
        yield partial(_run_network, network, config, inputs(network, settings, latent))
    for vae_dtype in dict.fromkeys((torch.float32, dtype)):
        vae = _empty_vae(folder)
        _cast(vae, vae_dtype)
        yield partial(_run_vae, vae, config, settings, latent, encodes=kind.image)


def _empty_vae(folder: Path) -> Any:
    import diffusers

    config = diffusers.AutoencoderKLWan.load_config(str(folder), subfolder="vae")
    with torch.device("meta"):
        return getattr(diffusers, config["_class_name"]).from_config(config).eval()


def _latent_size(vae: Any, settings: Settings) -> tuple[int, int, int]:
    """Return frames, height and width of the latents of a video, by a VAE's configuration."""
    blocks = len(vae.get("block_out_channels", "1234"))
    span = vae.get("scale_factor_temporal") or int(vae.temporal_compression_ratio)
    side = vae.get("scale_factor_spatial") or 2 ** (blocks - 1)
    return (settings.num_frames - 1) // span + 1, settings.height // side, settings.width // side


def _cast(network: nn.Module, dtype: torch.dtype) -> None:
    """Cast a network as diffusers does while it loads one."""
    wide = getattr(network, "_keep_in_fp32_modules", None) or ()
    for name, parameter in network.named_parameters():
        in_fp32 = any(part in wide for part in name.split("."))
        parameter.data = parameter.data.to(torch.float32 if in_fp32 else dtype)
    network.eval()


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _wan_inputs(
    network: Any, settings: Settings, latent: tuple[int, int, int]
) -> dict[str, torch.Tensor]:
    """Return the inputs of a Wan network; its pipelines call it once for each half of guidance."""
    config, dtype = network.config, network.dtype
    inputs = {
        "hidden_states": _empty(1, config.in_channels, *latent, dtype=dtype),
        "timestep": _empty(1, dtype=torch.int64),
        "encoder_hidden_states": _empty(
            1, settings.max_sequence_length, config.text_dim, dtype=dtype
        ),
    }
    if config.get("image_dim"):
        inputs["encoder_hidden_states_image"] = _empty(1, 257, config.image_dim, dtype=dtype)
    return inputs


def _cogvideox_inputs(
    network: Any, settings: Settings, latent: tuple[int, int, int]
) -> dict[str, Any]:
    """Return the inputs of a CogVideoX network, which gets both halves of guidance at once."""
    config, dtype = network.config, network.dtype
    batch = 2 if settings.guidance_scale > 1 else 1
    span, side = config.patch_size_t or 1, config.patch_size
    frames = -(-latent[0] // span) * span
    inputs: dict[str, Any] = {
        "hidden_states": _empty(batch, frames, config.in_channels, *latent[1:], dtype=dtype),
        "timestep": _empty(batch, dtype=torch.int64),
        "encoder_hidden_states": _empty(
            batch, settings.max_sequence_length, config.text_embed_dim, dtype=dtype
        ),
    }
    if config.use_rotary_positional_embeddings:
        tokens = frames // span * (latent[1] // side) * (latent[2] // side)
        inputs["image_rotary_emb"] = (_empty(tokens, config.attention_head_dim),) * 2
    if config.ofs_embed_dim:
        inputs["ofs"] = _empty(1)
    return inputs


def _run_network(network: Any, config: PatchConfig, inputs: dict[str, Any]) -> None:
    """Run a network at each level to which the guard may raise its blocks."""
    patch_model(network, config)
    record = record_of(network)
    assert record is not None
    for level in (Level.AS_ASKED, Level.WIDE_VALUES, Level.EXACT, Level.EXACT_16BIT):
        for block in record.blocks:
            block.raise_level(level, "")
        network(**inputs)


def _run_vae(
    vae: Any,
    config: PatchConfig,
    settings: Settings,
    latent: tuple[int, int, int],
    *,
    encodes: bool,
) -> None:
    """Decode a video, and encode one where the pipeline does."""
    patch_model(vae, config)
    channels = vae.config.get("z_dim") or vae.config.latent_channels
    vae.decode(_empty(1, channels, *latent, dtype=vae.dtype))
    if encodes:
        size = settings.num_frames, settings.height, settings.width
        vae.encode(_empty(1, 3, *size, dtype=vae.dtype))
