"""The VAE of Wan 2.1, and of Wan 2.2's 5B (`is_residual`), in diffusers. Written against 0.42.1.

The author's decoder runs one latent frame at a time, and each causal convolution caches its last
two input frames. The same numbers come from any number of frames at once, because nothing but
these frames links two calls: zeros come before the first frame, and the first frame passes the
resamplings in time alone. So levels at low resolution run many frames at once, and the full
resolution a few (`_ROOM`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
import torch.nn.functional as F
from diffusers.models.autoencoders import autoencoder_kl_wan as author
from diffusers.models.autoencoders.vae import DecoderOutput
from torch import Tensor, nn

from turbo_rcm_patch.config import PatchConfig
from turbo_rcm_patch.ops.conv3d.passes import RMSNorm, norm_silu, upsample
from turbo_rcm_patch.patching.block import PatchedBlock
from turbo_rcm_patch.patching.families.common import check_parameters
from turbo_rcm_patch.patching.vae import (
    PatchedCoder,
    Video,
    channels_first,
    channels_last,
    gathered,
    plain_conv,
)
from turbo_rcm_patch.skip import SkipPair

#: Frames of full resolution that a level runs at once, as elements of its largest tensor. The
#: author's decoder runs four too.
_ROOM: int = 4

_INSIDE: Final = frozenset(
    {
        author.WanCausalConv3d, author.WanRMS_norm, author.WanUpsample, author.WanResample,
        author.WanResidualBlock, author.WanAttentionBlock, author.WanMidBlock, author.WanUpBlock,
        author.WanResidualUpBlock, author.WanResidualDownBlock, author.AvgDown3D, author.DupUp3D,
        nn.ModuleList, nn.Sequential, nn.Conv2d, nn.ZeroPad2d, nn.SiLU, nn.Dropout, nn.Identity,
    }
)  # fmt: skip


class _Coder(PatchedCoder):
    """What decoder and encoder share."""

    __slots__ = ()
    known = _INSIDE

    def run_video(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        vae, encodes = self.vae, self.part == "encoder"
        scale = 1 if encodes else vae.spatial_compression_ratio
        larger = x.shape[3] > vae.tile_sample_min_height // scale
        larger |= x.shape[4] > vae.tile_sample_min_width // scale
        if encodes and vae.config.patch_size is not None:
            x = author.patchify(x, vae.config.patch_size)
        if vae.use_tiling and larger:
            tiled = getattr(author.AutoencoderKLWan, f"tiled_{self.caller[1:]}")
            return tiled(self.twin(self._tile), x, *args, **kwargs)
        return self.untiled(x, *args, **kwargs)

    def untiled(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run a whole video without tiles."""
        raise NotImplementedError

    def _tile(self, x: Tensor, feat_cache: list[Any], **_: Any) -> Tensor:
        """Stand in for the coder in the author's loop over tiles and frames, which begins each
        tile with an empty cache."""
        if feat_cache[0] is None:
            feat_cache[0] = self.new_video(x)
        return self.coded(feat_cache[0], x)

    def coded(self, video: Video, x: Tensor) -> Tensor:
        return channels_first(torch.cat(list(self.pieces(video, channels_last(x))), 1))

    def pieces(self, video: Video, x: Tensor) -> Iterator[Tensor]:
        """Yield the result of the frames x [B, T, H, W, C], a few frames at a time."""
        raise NotImplementedError

    def why_module(self, module: nn.Module) -> str:
        if not plain_conv(module):
            return "its groups, dilation or padding are not the author's"
        if isinstance(module, author.WanCausalConv3d):
            height, width = module.kernel_size[1] // 2, module.kernel_size[2] // 2
            if module._padding[:4] != (width, width, height, height):
                return "its padding is not the author's"
        if isinstance(module, author.WanRMS_norm) and not module.channel_first:
            return "its norm is not over channels"
        return ""

    def pairs(self) -> list[SkipPair]:
        found = []
        for name, module in self.block.named_modules():
            if isinstance(module, author.WanAttentionBlock):
                found.append(self.residual_pair(name, "self", module.dim))
            elif getattr(module, "avg_shortcut", None) is not None or isinstance(
                module, author.WanResidualBlock
            ):
                found.append(self.residual_pair(name))
        return found

    # --- blocks, each beside its author's forward ------------------------------------------------

    def resnet(self, video: Video, block: Any, x: Tensor) -> Tensor:
        """Run a `WanResidualBlock` on x [B, T, H, W, C]."""
        h = x
        if not isinstance(block.conv_shortcut, nn.Identity):
            h = video.conv(block.conv_shortcut, x.to(video.dtype))
        y = video.behind(block.conv1, x, rms(block.norm1))
        y = video.conv(block.conv1, y, bias=False)  # the next pass adds the bias
        y = video.behind(block.conv2, y, rms(block.norm2), before=block.conv1.bias)
        return video.conv(block.conv2, y, residual=h)

    def attention(self, video: Video, block: Any, x: Tensor) -> Tensor:
        """Run a `WanAttentionBlock`: one head over the pixels of each frame."""
        batch, frames, height, width, channels = x.shape
        y, _ = norm_silu(x, rms(block.norm), silu=False, dtype=video.dtype, impl=video.impl)
        qkv = video.conv(block.to_qkv, y, dtype=video.dtype)
        qkv = qkv.view(batch * frames, 1, height * width, 3 * channels)
        q, k, v = qkv.chunk(3, dim=-1)
        y = F.scaled_dot_product_attention(q, k, v).reshape(x.shape)
        return video.conv(block.proj, y, residual=x)

    def middle(self, video: Video, block: Any, x: Tensor) -> Tensor:
        """Run a `WanMidBlock`."""
        x = self.resnet(video, block.resnets[0], x)
        for attn, resnet in zip(block.attentions, block.resnets[1:], strict=True):
            if attn is not None:
                x = self.attention(video, attn, x)
            x = self.resnet(video, resnet, x)
        return x

    def head(self, video: Video, x: Tensor) -> Tensor:
        """Run the last norm and convolution."""
        y = video.behind(self.block.conv_out, x, rms(self.block.norm_out))
        return video.conv(self.block.conv_out, y)


class WanDecoder(_Coder):
    """Replaces `AutoencoderKLWan._decode`."""

    __slots__ = ()
    part, caller = "decoder", "_decode"

    def first_frames(self, x: Tensor) -> int:
        return 2

    def untiled(self, z: Tensor, return_dict: bool = True) -> Any:
        x = self.vae.post_quant_conv(z)
        out = self.coded(self.new_video(x), x)
        if self.vae.config.patch_size is not None:
            out = author.unpatchify(out, patch_size=self.vae.config.patch_size)
        out = torch.clamp(out, min=-1.0, max=1.0)
        return DecoderOutput(sample=out) if return_dict else (out,)

    def coded(self, video: Video, x: Tensor) -> Tensor:
        """Run the decoder on the latent frames x [B, C, T, h, w]."""
        batch, _, frames, height, width = x.shape
        modes = [up.mode for up in map(_upsampler, self.block.up_blocks) if up is not None]
        longer, larger = 2 ** modes.count("upsample3d"), 2 ** len(modes)
        frames = frames * longer - (0 if self.block in video.begun else longer - 1)
        shape = (batch, self.block.conv_out.out_channels, frames, height * larger, width * larger)
        out = torch.empty(shape, dtype=x.dtype, device=x.device)
        done = 0
        for y in self.pieces(video, channels_last(x)):
            out[:, :, done : done + y.shape[1]] = channels_first(y)
            done += y.shape[1]
        video.begun.add(self.block)
        return out

    def pieces(self, video: Video, x: Tensor) -> Iterator[Tensor]:
        block = self.block
        ups = [up for up in map(_upsampler, block.up_blocks) if up is not None]
        room = _ROOM * x.shape[0] * x.shape[2] * x.shape[3] * 4 ** len(ups)
        room *= max([block.norm_out.gamma.numel(), *(up.dim for up in ups[-1:])])

        x = video.conv(block.conv_in, video.behind(block.conv_in, x, silu=False))
        x = self.middle(video, block.mid_block, x)
        pieces: Iterator[Any] = iter((x,))
        for one in block.up_blocks:
            pieces = self._up(video, one, pieces, room)
        for x in pieces:
            y = self.head(video, x)
            del x
            yield y

    def _up(
        self, video: Video, block: Any, pieces: Iterator[Tensor], room: int
    ) -> Iterator[Tensor]:
        """Run a `WanUpBlock` or a `WanResidualUpBlock` on pieces [B, T, H, W, C]."""
        up = _upsampler(block)
        shortcut = getattr(block, "avg_shortcut", None)
        x: Any
        for x in pieces:
            # Nothing is held while other levels run, but what is read again.
            y: Any = x
            x = None if shortcut is None else x
            for resnet in block.resnets:
                y = self.resnet(video, resnet, y)
            if up is None:
                done, y = [y], None
                yield done.pop()
                continue
            frames = max(1, room // (y[:, 0].numel() * (8 if up.mode == "upsample3d" else 4)))
            for start in range(0, y.shape[1], frames):
                part = slice(start, start + frames)
                yield self._enlarge(
                    video, up, shortcut, y[:, part], x if x is None else x[:, part]
                )
            x = y = None

    def _enlarge(
        self, video: Video, up: Any, shortcut: Any, y: Tensor, x: Tensor | None
    ) -> Tensor:
        """Run the upsampling of a block on y, and add its shortcut of the block's input x."""
        first = up not in video.begun
        wide = self._resample(video, up, y)
        if x is not None:
            _duplicate(wide, x, shortcut, first)
        return wide

    def _resample(self, video: Video, up: Any, x: Tensor) -> Tensor:
        """Run a `WanResample` that upsamples. The first frame stays one frame."""
        batch, frames, height, width, channels = x.shape
        first = up not in video.begun
        video.begun.add(up)
        if up.mode == "upsample2d":
            parts = [x.unsqueeze(2)]
        else:
            parts = [x[:, :1].unsqueeze(2)] if first else []
            x = x[:, 1:] if first else x
            if x.shape[1]:
                y = video.behind(up.time_conv, x, silu=False)
                y = video.conv(up.time_conv, y, dtype=video.dtype)
                # The first half of the channels is the first of two frames.
                parts.append(torch.unflatten(y, -1, (2, channels)).permute(0, 1, 4, 2, 3, 5))
        frames = sum(part.shape[1] * part.shape[2] for part in parts)
        wide = x.new_empty(batch, frames, 2 * height, 2 * width, channels, dtype=video.dtype)
        done = 0
        for part in parts:
            count = part.shape[1] * part.shape[2]
            upsample(part, wide[:, done : done + count], impl=video.impl)
            done += count
        return video.conv(up.resample[1], wide)


class WanEncoder(_Coder):
    """Replaces `AutoencoderKLWan._encode`."""

    __slots__ = ()
    part, caller = "encoder", "_encode"
    halves = 2  # mean and logarithm of the variance

    def first_frames(self, x: Tensor) -> int:
        return 5

    def untiled(self, x: Tensor) -> Any:
        frames = 1 + (x.shape[2] - 1) // 4 * 4  # The author leaves out the rest too.
        out = self.coded(self.new_video(x), x[:, :, :frames])
        return self.vae.quant_conv(out)

    def pieces(self, video: Video, x: Tensor) -> Iterator[Tensor]:
        block = self.block
        start = [x[:, :1], *torch.split(x[:, 1:], 4, 1)] if block not in video.begun else [x]
        video.begun.add(block)
        pieces = iter([one for one in start if one.shape[1]])
        pieces = self._in(video, gathered(pieces, _ROOM))
        frames = _ROOM
        for one in block.down_blocks:
            pieces = self._down(video, one, pieces)
            if isinstance(getattr(one, "downsampler", one), author.WanResample):
                pieces = gathered(pieces, frames)
        for y in pieces:
            yield self.head(video, self.middle(video, block.mid_block, y))

    def _in(self, video: Video, pieces: Iterator[Tensor]) -> Iterator[Tensor]:
        conv = self.block.conv_in
        for x in pieces:
            yield video.conv(conv, video.behind(conv, x, silu=False))

    def _down(self, video: Video, block: Any, pieces: Iterator[Tensor]) -> Iterator[Tensor]:
        """Run one of the encoder's `down_blocks` on pieces [B, T, H, W, C]."""
        for x in pieces:
            if isinstance(block, author.WanResidualBlock):
                yield self.resnet(video, block, x)
            elif isinstance(block, author.WanResample):
                yield self._resample(video, block, x)
            else:  # a WanResidualDownBlock
                y = x
                for resnet in block.resnets:
                    y = self.resnet(video, resnet, y)
                if block.downsampler is not None:
                    y = self._resample(video, block.downsampler, y)
                yield y + _average(x, block.avg_shortcut)

    def _resample(self, video: Video, down: Any, x: Tensor) -> Tensor:
        """Run a `WanResample` that downsamples. The first frame stays one frame."""
        x = F.pad(x.to(video.dtype), (0, 0, 0, 1, 0, 1))
        in_time = down.mode == "downsample3d"
        dtype = video.dtype if in_time else video.stream
        x = video.conv(down.resample[1], x, padding=(0, 0), dtype=dtype)
        if not in_time:
            return x
        conv, parts = down.time_conv, []
        if down not in video.begun:
            video.begun.add(down)
            parts, video.history[conv] = [x[:, :1].to(video.stream)], x[:, :1].clone()
            x = x[:, 1:]
        if x.shape[1]:
            y = torch.cat([video.history[conv], x], 1)
            video.history[conv] = x[:, -1:].clone()
            parts.append(video.conv(conv, y))
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def rms(norm: Any) -> RMSNorm:
    """Return the weights of a `WanRMS_norm`."""
    return RMSNorm(norm.gamma, norm.bias if isinstance(norm.bias, Tensor) else None)


def _upsampler(block: Any) -> Any:
    """Return the `WanResample` of an up block, or None."""
    if isinstance(block, author.WanResidualUpBlock):
        return block.upsampler
    return None if block.upsamplers is None else block.upsamplers[0]


def _duplicate(y: Tensor, x: Tensor, shortcut: Any, first: bool) -> None:
    """Add a `DupUp3D` of x [B, T, H, W, C'] to y [B, T * ft, H * fs, W * fs, C], in place.

    Output channel c of phase p (in time, row, column) takes channel (c * ft * fs * fs + p) //
    repeats of x. Phases that share a channel are a view of it.
    """
    ft, fs, phases = shortcut.factor_t, shortcut.factor_s, shortcut.factor
    if first:  # Of the first frame only the last phase in time is left.
        for p in range(phases - fs * fs, phases):
            y[:, 0, p // fs % fs :: fs, p % fs :: fs] += _phase(x[:, 0], shortcut, p)
        x, y = x[:, 1:], y[:, 1:]
    for p in range(phases if x.shape[1] else 0):
        phase = y[:, p // (fs * fs) :: ft, p // fs % fs :: fs, p % fs :: fs]
        phase += _phase(x, shortcut, p)


def _phase(x: Tensor, shortcut: Any, p: int) -> Tensor:
    """Return the channels of phase p of a `DupUp3D`, a view of x [..., C']."""
    own = shortcut.factor // shortcut.repeats
    return torch.unflatten(x, -1, (shortcut.out_channels, own))[..., p // shortcut.repeats]


def _average(x: Tensor, shortcut: Any) -> Tensor:
    """Run an `AvgDown3D` on x [B, T, H, W, C]."""
    ft, fs = shortcut.factor_t, shortcut.factor_s
    x = F.pad(x, (0, 0, 0, 0, 0, 0, (ft - x.shape[1] % ft) % ft, 0))
    for dim, factor in ((3, fs), (2, fs), (1, ft)):
        x = torch.unflatten(x, dim, (-1, factor))
    x = x.permute(0, 1, 3, 5, 7, 2, 4, 6).flatten(4)  # [B, T', H', W', C * ft * fs * fs]
    return torch.unflatten(x, 4, (shortcut.out_channels, shortcut.group_size)).mean(-1)


def blocks_of(model: Any, path: str, config: PatchConfig) -> list[PatchedBlock | SkipPair]:
    """Find the decoder and the encoder of a VAE."""
    video = ("self", "x", "feat_cache", "feat_idx")
    expected = {
        author.WanDecoder3d.forward: (*video, "first_chunk"),
        author.WanEncoder3d.forward: video,
        author.WanResidualBlock.forward: video,
        author.WanResample.forward: video,
        author.WanMidBlock.forward: video,
        author.WanAttentionBlock.forward: ("self", "x"),
        author.WanRMS_norm.forward: ("self", "x"),
        author.WanCausalConv3d.forward: ("self", "x", "cache_x"),
        author.AutoencoderKLWan._decode: ("self", "z", "return_dict"),
        author.AutoencoderKLWan._encode: ("self", "x"),
    }
    check_parameters(expected, "diffusers")
    coders = (WanDecoder, WanEncoder)
    return [one(model, path, config) for one in coders if getattr(model, one.part) is not None]
