"""Tiny VAEs with random weights, of every class that patching knows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLCogVideoX, AutoencoderKLWan
from torch import Tensor

from tests.patching import wan_original

_DOWN = {"temperal_downsample": [False, True, True], "num_res_blocks": 1}


@dataclass(frozen=True)
class VAE:
    """One row of the table.

    Attributes:
        name: For a reader.
        make: Makes it.
        channels: Channels of a latent.
        scale: Pixels a side of a latent's pixel.
        pairs: Number of skip pairs of decoder and encoder.
    """

    name: str
    make: Callable[[], Any]
    channels: int
    scale: int
    pairs: int

    def model(self, dtype: torch.dtype = torch.float32) -> Any:
        """Weights at which every layer reaches the output."""
        torch.manual_seed(0)
        vae = self.make().eval().requires_grad_(False)
        for name, weight in vae.named_parameters():
            norm = "norm" in name or name.endswith("gamma")
            if norm and weight.numel() == max(weight.shape):
                weight.normal_(0.0 if name.endswith("bias") else 1.0, 0.3)
            elif weight.dim() > 1:
                weight.normal_(0.0, 1.4 * weight[0].numel() ** -0.5)
            else:
                weight.normal_(0.0, 0.2)
        return vae.to(dtype)

    def latent(self, frames: int = 3, height: int = 4, width: int = 6, batch: int = 1) -> Any:
        generator = torch.Generator().manual_seed(1)
        return torch.randn(batch, self.channels, frames, height, width, generator=generator)

    def frames(self, frames: int = 9, height: int = 2, width: int = 3, batch: int = 1) -> Any:
        generator = torch.Generator().manual_seed(2)
        size = height * self.scale, width * self.scale
        return torch.randn(batch, 3, frames, *size, generator=generator)


def decode(model: Any, z: Tensor) -> Tensor:
    """The video of a latent."""
    out = model.decode(z, *_scale(model, z))
    video: Tensor = out if isinstance(out, Tensor) else out.sample
    return video


def encode(model: Any, x: Tensor) -> Tensor:
    """The latent's mean, and the logarithm of its variance where the class returns it."""
    out = model.encode(x, *_scale(model, x))
    latent: Tensor = out if isinstance(out, Tensor) else out.latent_dist.parameters
    return latent


def _scale(model: Any, x: Tensor) -> list[list[Tensor]]:
    """Mean and factor of a latent, which Wan's own class takes."""
    if type(model).__name__ != "WanVAE_":
        return []
    mean, factor = torch.tensor([0.1, -0.2, 0.3, 0.0]), torch.tensor([1.0, 2.0, 0.5, 0.7])
    return [[mean.to(x), factor.to(x)]]


def _wan() -> Any:
    return AutoencoderKLWan(base_dim=8, z_dim=4, dim_mult=[1, 2, 2, 4], **_DOWN)


def _wan_residual() -> Any:
    return AutoencoderKLWan(
        base_dim=8, decoder_base_dim=12, z_dim=6, dim_mult=[1, 2, 4, 4], is_residual=True,
        patch_size=2, in_channels=12, out_channels=12, scale_factor_spatial=16, **_DOWN,
    )  # fmt: skip


def _cogvideox() -> Any:
    return AutoencoderKLCogVideoX(
        block_out_channels=(8, 8, 16, 16), latent_channels=4, layers_per_block=1,
        norm_num_groups=4, sample_height=64, sample_width=64,
    )  # fmt: skip


WAN = VAE("wan", _wan, 4, 8, 18)
WAN_RESIDUAL = VAE("wan-residual", _wan_residual, 6, 16, 25)
COGVIDEOX = VAE("cogvideox", _cogvideox, 4, 8, 16)
#: Wan's and TurboDiffusion's own class, and ComfyUI's.
ORIGINAL = VAE("WanVAE_", wan_original.WanVAE_, 4, 4, 12)
COMFYUI = VAE("WanVAE", wan_original.WanVAE, 4, 4, 12)
COMFYUI_22 = VAE("WanVAE-2.2", partial(wan_original.WanVAE, patches=True), 4, 8, 20)
DIFFUSERS = (WAN, WAN_RESIDUAL, COGVIDEOX)
ORIGINALS = (ORIGINAL, COMFYUI, COMFYUI_22)
VAES = DIFFUSERS + ORIGINALS


def conv_in_float64(
    x: Any, weight: Any, bias: Any = None, *, residual: Any = None, stride: Any = (1, 1, 1),
    padding: Any = (0, 0), dtype: Any = None, impl: Any = "auto", counts: Any = None,
) -> torch.Tensor:  # fmt: skip
    """A convolution whose sums do not depend on the size of its input."""
    planes, filters = (one.double().movedim(-1, 1) for one in (x, weight))
    y = F.conv3d(planes, filters, None, stride, (0, *padding)).movedim(1, -1)
    y = y if bias is None else y + bias.double()
    y = y if residual is None else y + residual.double()
    return y.to(dtype or x.dtype).contiguous()
