"""Decoder and encoder of Wan's VAEs on the fast path, whoever wrote the classes.

The authors' decoders run one latent frame at a time, and each causal convolution caches its last
two input frames. The same numbers come from any number of frames at once, because nothing but
these frames links two calls: zeros come before the first frame, and the first frame passes the
resamplings in time alone. So levels at low resolution run many frames at once, and the full
resolution a few (`_ROOM`).

A family says where the modules are (`Layout`), and runs what its author has around the coders.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from turbo_rcm_patch.ops.conv3d.passes import RMSNorm, norm_silu, upsample
from turbo_rcm_patch.patching.shared_rows import Rows
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


class Resnet(NamedTuple):
    """The modules of a residual block; the shortcut is a convolution of single pixels, or None."""

    norm1: Any
    conv1: Any
    norm2: Any
    conv2: Any
    shortcut: Any


class Level(NamedTuple):
    """The blocks of one resolution, in order.

    Attributes:
        blocks: `Resnet`s and attentions.
        resample: What enlarges or reduces their result, or None.
        shortcut: What adds the level's input to it (Wan 2.2), or None.
    """

    blocks: list[Any]
    resample: Any = None
    shortcut: Any = None


class Layout(NamedTuple):
    """The modules of a coder. `middle` holds the blocks at the lowest resolution."""

    conv_in: Any
    middle: list[Any]
    levels: list[Level]
    norm_out: Any
    conv_out: Any


class WanCoder(PatchedCoder):
    """What decoder and encoder share."""

    __slots__ = ()

    def layout(self) -> Layout:
        """Return where the coder's modules are now."""
        raise NotImplementedError

    def coded(self, video: Video, x: Tensor) -> Tensor:
        return channels_first(torch.cat(list(self.pieces(video, channels_last(x))), 1))

    def pieces(self, video: Video, x: Tensor) -> Iterator[Tensor]:
        """Yield the result of the frames x [B, T, H, W, C], a few frames at a time."""
        raise NotImplementedError

    def why_module(self, module: nn.Module) -> str:
        if not plain_conv(module):
            return "its groups, dilation or padding are not the author's"
        if hasattr(module, "gamma") and not module.channel_first:
            return "its norm is not over channels"
        return "" if _own_padding(module) else "its padding is not the author's"

    def pairs(self) -> list[SkipPair]:
        found = []
        for name, module in self.block.named_modules():
            if type(module).__name__.endswith("AttentionBlock"):
                found.append(self.residual_pair(name, "self", int(getattr(module, "dim", 0))))
            elif getattr(module, "avg_shortcut", None) is not None or type(
                module
            ).__name__.removeprefix("Wan") == ("ResidualBlock"):
                found.append(self.residual_pair(name))
        return found

    # --- blocks, each beside its author's forward ------------------------------------------------

    def resnet(self, video: Video, block: Resnet, x: Tensor) -> Tensor:
        """Run a residual block on x [B, T, H, W, C]."""
        video.rows.refresh(x)
        h = x
        if block.shortcut is not None:
            h = video.conv(block.shortcut, x.to(video.dtype))
        y = video.behind(block.conv1, x, rms(block.norm1, x))
        y = video.conv(block.conv1, y, bias=False)  # the next pass adds the bias
        y = video.behind(block.conv2, y, rms(block.norm2, x), before=video.bias(block.conv1))
        return video.conv(block.conv2, y, residual=h)

    def attention(self, video: Video, block: Any, x: Tensor) -> Tensor:
        """Run an attention: one head over the pixels of each frame."""
        x = video.rows.whole(x)
        batch, frames, height, width, channels = x.shape
        y, _ = norm_silu(x, rms(block.norm, x), silu=False, dtype=video.dtype, impl=video.impl)
        qkv = video.conv(block.to_qkv, y, dtype=video.dtype)
        qkv = qkv.view(batch * frames, 1, height * width, 3 * channels)
        q, k, v = qkv.chunk(3, dim=-1)
        y = F.scaled_dot_product_attention(q, k, v).reshape(x.shape)
        return video.rows.part(video.conv(block.proj, y, residual=x))

    def blocks(self, video: Video, blocks: list[Any], x: Tensor) -> Tensor:
        """Run the blocks of a level or of the middle."""
        for block in blocks:
            run = self.resnet if isinstance(block, Resnet) else self.attention
            x = run(video, block, x)
        return x

    def head(self, video: Video, layout: Layout, x: Tensor) -> Tensor:
        """Run the last norm and convolution."""
        video.rows.refresh(x)
        return video.conv(
            layout.conv_out, video.behind(layout.conv_out, x, rms(layout.norm_out, x))
        )


class Decoder(WanCoder):
    """A Wan VAE's decoder."""

    __slots__ = ()
    part, shared = "decoder", True

    def new_video(self, x: Tensor) -> Video:
        video = super().new_video(x)
        video.rows = Rows(self.ranks, x.shape[3])
        return video

    def first_frames(self, x: Tensor) -> int:
        return 2

    def coded(self, video: Video, x: Tensor) -> Tensor:
        """Run the decoder on the latent frames x [B, C, T, h, w]."""
        batch, _, frames, height, width = x.shape
        layout = self.layout()
        modes = [level.resample.mode for level in layout.levels if level.resample is not None]
        longer, larger = 2 ** modes.count("upsample3d"), 2 ** len(modes)
        frames = frames * longer - (0 if self.block in video.begun else longer - 1)
        shape = (batch, layout.conv_out.out_channels, frames, height * larger, width * larger)
        out = torch.empty(shape, dtype=x.dtype, device=x.device)
        done = 0
        for y in self.pieces(video, channels_last(x)):
            out[:, :, done : done + y.shape[1]] = channels_first(video.rows.whole(y))
            done += y.shape[1]
        video.begun.add(self.block)
        return out

    def pieces(self, video: Video, x: Tensor) -> Iterator[Tensor]:
        layout = self.layout()
        ups = [level.resample for level in layout.levels if level.resample is not None]
        room = _ROOM * x.shape[0] * x.shape[2] * x.shape[3] * 4 ** len(ups)
        room *= max([layout.norm_out.gamma.numel(), *(up.dim for up in ups[-1:])])

        x = video.rows.part(x)
        x = video.conv(layout.conv_in, video.behind(layout.conv_in, x, silu=False))
        pieces: Iterator[Any] = iter((self.blocks(video, layout.middle, x),))
        del x
        for level in layout.levels:
            pieces = self._up(video, level, pieces, room)
        for x in pieces:
            y = self.head(video, layout, x)
            del x
            yield y

    def _up(
        self, video: Video, level: Level, pieces: Iterator[Tensor], room: int
    ) -> Iterator[Tensor]:
        """Run a level on pieces [B, T, H, W, C]."""
        up, shortcut = level.resample, level.shortcut
        x: Any
        for x in pieces:
            # Nothing is held while other levels run, but what is read again.
            y: Any = x
            x = None if shortcut is None else x
            for block in level.blocks:
                y = self.blocks(video, [block], y)
            if up is None:
                done, y = [y], None
                yield done.pop()
                continue
            # As many as on one rank, so that all ranks take the same steps, and the same kernels.
            size = y.shape[0] * video.rows.whole_height(y) * y[0, 0, 0].numel()
            frames = max(1, room // (size * (8 if up.mode == "upsample3d" else 4)))
            video.rows.refresh(y)
            for start in range(0, y.shape[1], frames):
                part = slice(start, start + frames)
                yield self._enlarge(
                    video, up, shortcut, y[:, part], x if x is None else x[:, part]
                )
            x = y = None

    def _enlarge(
        self, video: Video, up: Any, shortcut: Any, y: Tensor, x: Tensor | None
    ) -> Tensor:
        """Run the upsampling of a level on y, and add its shortcut of the level's input x."""
        first = up not in video.begun
        wide = self._resample(video, up, video.rows.narrow(y))
        if x is not None:
            _duplicate(wide, video.rows.narrow(x), shortcut, first)
        return wide

    def _resample(self, video: Video, up: Any, x: Tensor) -> Tensor:
        """Enlarge x twice, and in time where its author does. The first frame stays one frame."""
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


class Encoder(WanCoder):
    """A Wan VAE's encoder."""

    __slots__ = ()
    part = "encoder"

    def first_frames(self, x: Tensor) -> int:
        return 5

    def pieces(self, video: Video, x: Tensor) -> Iterator[Tensor]:
        layout = self.layout()
        start = [x[:, :1], *torch.split(x[:, 1:], 4, 1)] if self.block not in video.begun else [x]
        video.begun.add(self.block)
        pieces = iter([one for one in start if one.shape[1]])
        pieces = self._in(video, layout.conv_in, gathered(pieces, _ROOM))
        frames = _ROOM
        for level in layout.levels:
            pieces = self._down(video, level, pieces)
            if level.resample is not None:
                pieces = gathered(pieces, frames)
        for y in pieces:
            yield self.head(video, layout, self.blocks(video, layout.middle, y))

    def _in(self, video: Video, conv: Any, pieces: Iterator[Tensor]) -> Iterator[Tensor]:
        for x in pieces:
            yield video.conv(conv, video.behind(conv, x, silu=False))

    def _down(self, video: Video, level: Level, pieces: Iterator[Tensor]) -> Iterator[Tensor]:
        """Run a level on pieces [B, T, H, W, C]."""
        for x in pieces:
            y = self.blocks(video, level.blocks, x)
            if level.resample is not None:
                y = self._resample(video, level.resample, y)
            yield y if level.shortcut is None else y + _average(x, level.shortcut)

    def _resample(self, video: Video, down: Any, x: Tensor) -> Tensor:
        """Halve x, and in time where its author does. The first frame stays one frame."""
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


def rms(norm: Any, x: Tensor) -> RMSNorm:
    """Return the weights of one of Wan's norms on the device of x."""
    bias = norm.bias if isinstance(norm.bias, Tensor) else None
    return RMSNorm(norm.gamma.to(x.device), None if bias is None else bias.to(x.device))


def _own_padding(module: Any) -> bool:
    """Return False for a causal convolution with other padding than keeps a frame's size."""
    padding = getattr(module, "_padding", None)
    if padding is None:
        return True
    height, width = module.kernel_size[1] // 2, module.kernel_size[2] // 2
    if isinstance(padding, int):  # in time; ComfyUI's newest leaves the rest to the convolution
        return bool(module.padding == (0, height, width))
    return bool(padding[:4] == (width, width, height, height))


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
