"""The VAE and the text encoder of TurboDiffusion's `--vae_path` and `--text_encoder_path`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from turbo_rcm_patch.checkpoints.original import Part, read_text_encoder, read_vae
from turbo_rcm_patch.checkpoints.read import Wanted, check_tensors
from turbo_rcm_patch.checkpoints.stored import read_json
from turbo_rcm_patch.errors import CheckpointError
from turbo_rcm_patch.extras import require

if TYPE_CHECKING:
    from diffusers import AutoencoderKLWan
    from transformers import UMT5EncoderModel

__all__ = ["load_text_encoder", "load_vae"]

#: Channels of the latents whose mean and deviation diffusers knows.
_CHANNELS: Final = 16
#: What of a VAE's configuration no tensor shows.
_STATISTICS: Final = ("latents_mean", "latents_std")


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
        CheckpointError: It is another file.
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
    require("video", "the text encoder")
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
