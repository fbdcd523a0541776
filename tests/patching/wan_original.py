"""Small VAEs with the names, the layout and the arithmetic of Wan's own classes (Wan-Video/Wan2.1
and 2.2, `wan/modules/vae.py` and `vae2_2.py`; thu-ml/TurboDiffusion; ComfyUI, `comfy/ldm/wan`),
written here as an oracle, with diffusers' modules where the authors' are the same. Tests run the
real ones from a checkout.

Where a module `comfy.ops` is there, its convolutions are used, as in ComfyUI.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.autoencoders import autoencoder_kl_wan
from diffusers.models.autoencoders.autoencoder_kl_wan import patchify, unpatchify
from torch import Tensor, nn

ops: Any = sys.modules.get("comfy.ops", nn)


class CausalConv3d(ops.Conv3d):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        time, height, width = self.padding
        self._padding = (width, width, height, height, 2 * time, 0)
        self.padding = (0, 0, 0)

    def forward(self, x: Tensor, cache_x: Tensor | None = None, cache_list: Any = None) -> Tensor:
        padding = list(self._padding)
        if cache_x is not None and padding[4]:
            padding[4] -= cache_x.shape[2]
            x = torch.cat([cache_x, x], 2)
        return super().forward(F.pad(x, padding))


class RMS_norm(autoencoder_kl_wan.WanRMS_norm):  # noqa: N801 - the author's name
    pass


class Upsample(autoencoder_kl_wan.WanUpsample):
    pass


def cached(conv: Any, x: Tensor, cache: Any, index: list[int]) -> Tensor:
    """Run a causal convolution behind the last two frames that it read."""
    if cache is None:
        return conv(x)
    before, at = cache[index[0]], index[0]
    before = x[:, :, :0] if isinstance(before, str) else before
    index[0] += 1
    cache[at] = (x if before is None else torch.cat([before, x], 2))[:, :, -2:]
    return conv(x, before)


def flat(module: nn.Module, x: Tensor) -> Tensor:
    y = module(x.transpose(1, 2).flatten(0, 1))
    return y.unflatten(0, (x.shape[0], -1)).transpose(1, 2)


class Resample(nn.Module):
    def __init__(self, dim: int, mode: str, out: int = 0) -> None:
        super().__init__()
        self.dim, self.mode = dim, mode
        if mode.startswith("up"):
            wider = Upsample(scale_factor=(2.0, 2.0), mode="nearest-exact")
            self.resample = nn.Sequential(wider, ops.Conv2d(dim, out or dim // 2, 3, padding=1))
        else:
            narrower = ops.Conv2d(dim, dim, 3, stride=(2, 2))
            self.resample = nn.Sequential(nn.ZeroPad2d((0, 1, 0, 1)), narrower)
        if mode == "upsample3d":
            self.time_conv = CausalConv3d(dim, 2 * dim, (3, 1, 1), padding=(1, 0, 0))
        elif mode == "downsample3d":
            self.time_conv = CausalConv3d(dim, dim, (3, 1, 1), stride=(2, 1, 1))

    def forward(self, x: Tensor, feat_cache: Any = None, feat_idx: Any = None) -> Tensor:
        in_time = self.mode.endswith("3d") and feat_cache is not None
        if in_time:
            at, before = feat_idx[0], feat_cache[feat_idx[0]]
        if in_time and self.mode == "upsample3d":
            if before is None:  # the first frame
                feat_cache[at], feat_idx[0] = "Rep", at + 1
            else:
                y = cached(self.time_conv, x, feat_cache, feat_idx)
                x = y.unflatten(1, (2, -1)).permute(0, 2, 3, 1, 4, 5).flatten(2, 3)
        x = flat(self.resample, x)
        if in_time and self.mode == "downsample3d":
            feat_cache[at], feat_idx[0] = x[:, :, -1:], at + 1
            x = x if before is None else self.time_conv(torch.cat([before, x], 2))
        return x


class ResidualBlock(nn.Module):
    def __init__(self, in_dim: int, out_dim: int) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            RMS_norm(in_dim, images=False), nn.SiLU(),
            CausalConv3d(in_dim, out_dim, 3, padding=1),
            RMS_norm(out_dim, images=False), nn.SiLU(), nn.Dropout(0.0),
            CausalConv3d(out_dim, out_dim, 3, padding=1),
        )  # fmt: skip
        self.shortcut = nn.Identity() if in_dim == out_dim else CausalConv3d(in_dim, out_dim, 1)

    def forward(self, x: Tensor, feat_cache: Any = None, feat_idx: Any = None) -> Tensor:
        y = x
        for layer in self.residual:
            conv = isinstance(layer, CausalConv3d)
            y = cached(layer, y, feat_cache, feat_idx) if conv else layer(y)
        return y + self.shortcut(x)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


class AttentionBlock(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim, self.norm = dim, RMS_norm(dim)
        self.to_qkv, self.proj = ops.Conv2d(dim, dim * 3, 1), ops.Conv2d(dim, dim, 1)
        self.optimized_attention = attention  # ComfyUI's name

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.to_qkv(self.norm(x)).flatten(2).transpose(1, 2).unsqueeze(1).chunk(3, -1)
        y = self.optimized_attention(q, k, v).squeeze(1).transpose(1, 2)
        return self.proj(y.unflatten(2, x.shape[2:]))

    def forward(self, x: Tensor) -> Tensor:
        y = self.attend(x.transpose(1, 2).flatten(0, 1))
        return x + y.unflatten(0, (x.shape[0], -1)).transpose(1, 2)


class AvgDown3D(autoencoder_kl_wan.AvgDown3D):
    pass


class DupUp3D(autoencoder_kl_wan.DupUp3D):
    pass


class Down_ResidualBlock(nn.Module):  # noqa: N801
    def __init__(self, in_dim: int, out_dim: int, mode: str) -> None:
        super().__init__()
        last = [Resample(out_dim, mode)] if mode else []
        self.downsamples = nn.Sequential(ResidualBlock(in_dim, out_dim), *last)
        factor_t, factor_s = 1 + mode.endswith("3d"), 1 + bool(mode)
        self.avg_shortcut = AvgDown3D(in_dim, out_dim, factor_t, factor_s)

    def forward(self, x: Tensor, feat_cache: Any = None, feat_idx: Any = None) -> Tensor:
        y = x
        for layer in self.downsamples:
            y = layer(y, feat_cache, feat_idx)
        return y + self.avg_shortcut(x)


class Up_ResidualBlock(nn.Module):  # noqa: N801
    def __init__(self, in_dim: int, out_dim: int, mode: str) -> None:
        super().__init__()
        last = [Resample(out_dim, mode, out_dim)] if mode else []
        self.upsamples = nn.Sequential(
            ResidualBlock(in_dim, out_dim), ResidualBlock(out_dim, out_dim), *last
        )
        factor_t = 1 + mode.endswith("3d")
        self.avg_shortcut = DupUp3D(in_dim, out_dim, factor_t, 2) if mode else None

    def forward(
        self, x: Tensor, feat_cache: Any = None, feat_idx: Any = None, first_chunk: bool = False
    ) -> Tensor:
        y = x
        for layer in self.upsamples:
            y = layer(y, feat_cache, feat_idx)
        return y if self.avg_shortcut is None else y + self.avg_shortcut(x, first_chunk)


def run(layers: Any, x: Tensor, cache: Any, index: Any, *more: Any) -> Tensor:
    for layer in layers:
        if isinstance(layer, CausalConv3d):
            x = cached(layer, x, cache, index)
        elif isinstance(layer, Up_ResidualBlock):
            x = layer(x, cache, index, *more)
        elif isinstance(layer, ResidualBlock | Resample | Down_ResidualBlock):
            x = layer(x, cache, index)
        else:
            x = layer(x)
    return x


def middle(dim: int) -> nn.Sequential:
    return nn.Sequential(ResidualBlock(dim, dim), AttentionBlock(dim), ResidualBlock(dim, dim))


def head(dim: int, out: int) -> nn.Sequential:
    return nn.Sequential(
        RMS_norm(dim, images=False), nn.SiLU(), CausalConv3d(dim, out, 3, padding=1)
    )


class Encoder3d(nn.Module):
    def __init__(self, dim: int, z_dim: int, patches: bool) -> None:
        super().__init__()
        dims, modes = (dim, dim, 2 * dim, 2 * dim), ("downsample2d", "downsample3d", "")
        self.conv1 = CausalConv3d(12 if patches else 3, dim, 3, padding=1)
        layers: list[nn.Module] = []
        for before, after, mode in zip(dims, dims[1:], modes, strict=False):
            if patches:
                layers.append(Down_ResidualBlock(before, after, mode))
            else:
                layers += [ResidualBlock(before, after)] + (
                    [Resample(after, mode)] if mode else []
                )
        self.downsamples = nn.Sequential(*layers)
        self.middle, self.head = middle(dims[-1]), head(dims[-1], z_dim)

    def forward(self, x: Tensor, feat_cache: Any = None, feat_idx: Any = None) -> Tensor:
        layers = [self.conv1, *self.downsamples, *self.middle, *self.head]
        return run(layers, x, feat_cache, feat_idx)


class Decoder3d(nn.Module):
    def __init__(self, dim: int, z_dim: int, patches: bool) -> None:
        super().__init__()
        dims, modes = (2 * dim, 2 * dim, dim, dim), ("upsample3d", "upsample2d", "")
        self.conv1 = CausalConv3d(z_dim, dims[0], 3, padding=1)
        self.middle = middle(dims[0])
        layers: list[nn.Module] = []
        into = dims[0]
        for out, mode in zip(dims[1:], modes, strict=False):
            if patches:
                layers.append(Up_ResidualBlock(into, out, mode))
                into = out
            else:
                layers += [ResidualBlock(into, out)] + ([Resample(out, mode)] if mode else [])
                into = out // 2
        self.upsamples = nn.Sequential(*layers)
        self.head = head(dims[-1], 12 if patches else 3)

    def forward(
        self, x: Tensor, feat_cache: Any = None, feat_idx: Any = None, first_chunk: bool = False
    ) -> Tensor:
        layers = [self.conv1, *self.middle, *self.upsamples, *self.head]
        return run(layers, x, feat_cache, feat_idx, first_chunk)


class _Both(nn.Module):
    """Loops over frames; both authors' classes keep the coders under these names."""

    def __init__(self, dim: int = 8, z_dim: int = 4, patches: bool = False) -> None:
        super().__init__()
        self.patches, self.z_dim, self.temporal_window = patches, z_dim, 4
        self.encoder = Encoder3d(dim, 2 * z_dim, patches)
        self.conv1 = CausalConv3d(2 * z_dim, 2 * z_dim, 1)
        self.conv2 = CausalConv3d(z_dim, z_dim, 1)
        self.decoder = Decoder3d(dim, z_dim, patches)

    def decoded(self, z: Tensor) -> Tensor:
        cache: list[Any] = [None] * 99
        frames = self.conv2(z).split(1, 2)
        parts = [self.decoder(one, cache, [0], i == 0) for i, one in enumerate(frames)]
        out = torch.cat(parts, 2)
        return unpatchify(out, patch_size=2) if self.patches else out

    def encoded(self, x: Tensor) -> Tensor:
        x = patchify(x, patch_size=2) if self.patches else x
        cache: list[Any] = [None] * 99
        frames = [x[:, :, :1], *(x[:, :, 1:].split(4, 2) if x.shape[2] > 1 else ())]
        parts = [self.encoder(one, cache, [0]) for one in frames if one.shape[2]]
        return self.conv1(torch.cat(parts, 2)).chunk(2, dim=1)[0]


class WanVAE_(_Both):  # noqa: N801
    """Wan's and TurboDiffusion's."""

    def decode(self, z: Tensor, scale: Any) -> Tensor:
        mean, factor = (one.view(1, -1, 1, 1, 1) for one in scale)
        return self.decoded(z / factor + mean)

    def encode(self, x: Tensor, scale: Any) -> Tensor:
        mean, factor = (one.view(1, -1, 1, 1, 1) for one in scale)
        return (self.encoded(x) - mean) * factor


class WanVAE(_Both):
    """ComfyUI's."""

    def decode(self, z: Tensor) -> Tensor:
        return self.decoded(z)

    def encode(self, x: Tensor) -> Tensor:
        return self.encoded(x)
