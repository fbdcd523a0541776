"""Decoder and encoder of Wan's VAEs on the fast path, whoever wrote the classes.

The authors' decoders run one latent frame at a time, and each causal convolution caches its last
two input frames. The same numbers come from any number of frames at once, because nothing but
these frames links two calls: zeros come before the first frame, and the first frame passes the
resamplings in time alone. So levels at low resolution run many frames at once, and the full
resolution a few (`_ROOM`).

The authors' classes differ in names and nesting, so modules are looked up by kind. A family runs
what its author has around the coders.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from turbo_rcm_patch.ops.conv3d.passes import Duplicate, RMSNorm, norm_silu
from turbo_rcm_patch.patching.plain import original_class
from turbo_rcm_patch.patching.vae import PatchedCoder, Video

#: Frames of full resolution that a level runs at once, as elements of its largest tensor. The
#: author's decoder runs four too.
_ROOM: int = 4


#: Blocks that hold others.
_GROUPS: Final = [
    *("Down_ResidualBlock", "ResidualDownBlock", "ResidualUpBlock", "UpBlock", "Up_ResidualBlock")
]
#: Class of a module inside -> the first parameters of its forward.
_FORWARDS: Final = {
    "AttentionBlock": ("self", "x"),
    "AvgDown3D": ("self", "x"),
    "CausalConv3d": ("self", "x", "cache_x"),
    "DupUp3D": ("self", "x", "first_chunk"),
    "RMS_norm": ("self", "x"),
    "Upsample": ("self", "x"),
} | dict.fromkeys(
    (*_GROUPS, "Decoder3d", "Encoder3d", "MidBlock", "Resample", "ResidualBlock"),
    ("self", "x", "feat_cache", "feat_idx"),
)
_TORCH: Final = frozenset(
    {nn.Conv2d, nn.Dropout, nn.Identity, nn.ModuleList, nn.Sequential, nn.SiLU, nn.Upsample,
     nn.ZeroPad2d}
)  # fmt: skip
#: Layers of a coder's end, and of a residual block.
_END: Final = ["RMS_norm", "SiLU", "CausalConv3d"]
_RESIDUAL: Final = [*_END[:2], "CausalConv3d", *_END[:2], "Dropout", "CausalConv3d"]


class Level(NamedTuple):
    """The blocks of one resolution, in order.

    Attributes:
        blocks: Residual blocks and attentions.
        resample: What enlarges or reduces their result, or None.
        shortcut: What adds the level's input to it (Wan 2.2), or None.
    """

    blocks: list[Any]
    resample: Any = None
    shortcut: Any = None


class WanCoder(PatchedCoder):
    """What decoder and encoder share."""

    known, forwards = _TORCH, _FORWARDS | {f"Wan{name}": own for name, own in _FORWARDS.items()}

    def coded(self, video: Video, x: Tensor) -> Tensor:
        pieces = [video.rows.whole(one) for one in self.pieces(video, x.movedim(1, -1))]
        return _joined(pieces).movedim(-1, 1).contiguous()

    def pieces(self, video: Video, x: Tensor) -> Iterator[Tensor]:
        """Yield the result of the frames x [B, T, H, W, C], a few frames at a time.

        x has the strides of [B, C, T, H, W].
        """
        raise NotImplementedError

    def why_modules(self) -> str:
        if why := super().why_modules():
            return why
        blocks = [*self.middle(), *(one for level in self.levels() for one in level.blocks)]
        known = {*map(kind_of, blocks)} <= {"ResidualBlock", "AttentionBlock"}
        if known and [*map(kind_of, self.end())] == _END:
            return ""
        return f"{self.part}: its blocks are not the author's"

    def why_module(self, module: nn.Module) -> str:
        if hasattr(module, "gamma") and not module.channel_first:
            return "its norm is not over channels"
        if isinstance(module, nn.Upsample) and (
            module.scale_factor != (2.0, 2.0) or not module.mode.startswith("nearest")
        ):
            return "it does not repeat pixels"
        if kind_of(module) == "ResidualBlock" and [*map(kind_of, _layers(module))] != _RESIDUAL:
            return "its layers are not the author's"
        why = "" if _own_padding(module) else "its padding is not the author's"
        return super().why_module(module) or why

    def closes(self, module: nn.Module) -> Literal["self", "convolution"] | None:
        if kind_of(module) == "AttentionBlock":
            return "self"
        adds = kind_of(module) == "ResidualBlock" or getattr(module, "avg_shortcut", None)
        return "convolution" if adds else None

    # --- where the modules are now ---------------------------------------------------------------

    def start(self) -> Any:
        """Return the first convolution."""
        return getattr(self.block, "conv_in", None) or self.block.conv1

    def middle(self) -> list[Any]:
        """Return the blocks at the lowest resolution."""
        return list(_inside(getattr(self.block, "mid_block", None) or self.block.middle))

    def end(self) -> list[Any]:
        """Return the last norm, its SiLU and the last convolution."""
        coder = self.block
        own = getattr(coder, "head", None)
        return [coder.norm_out, coder.nonlinearity, coder.conv_out] if own is None else [*own]

    def levels(self) -> list[Level]:
        """Return the levels of another resolution, in order."""
        names = "up_blocks", "down_blocks", "upsamples", "downsamples"
        held = next(one for name in names if (one := getattr(self.block, name, None)) is not None)
        found, blocks = list[Level](), list[Any]()
        for group in held:
            shortcut, resample = getattr(group, "avg_shortcut", None), None
            blocks += _inside(group)
            if blocks and kind_of(blocks[-1]) == "Resample":
                resample = blocks.pop()
            if resample is not None or shortcut is not None:
                found.append(Level(blocks, resample, shortcut))
                blocks = []
        return found + ([Level(blocks)] if blocks else [])

    # --- blocks, each beside its author's forward ------------------------------------------------

    def resnet(self, video: Video, block: Any, x: Tensor) -> Tensor:
        """Run a residual block on x [B, T, H, W, C]."""
        video.rows.refresh(x)
        norm1, _, conv1, norm2, _, _, conv2 = _layers(block)
        shortcut = getattr(block, "shortcut", None) or block.conv_shortcut
        h = x
        if not isinstance(shortcut, nn.Identity):
            h = video.conv(shortcut, x.to(video.dtype))
        y = video.behind(conv1, x, rms(norm1, x))
        y = video.conv(conv1, y, bias=False)  # the next pass adds the bias
        y = video.behind(conv2, y, rms(norm2, x), before=video.bias(conv1))
        return video.conv(conv2, y, residual=h)

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
            run = self.resnet if kind_of(block) == "ResidualBlock" else self.attention
            x = run(video, block, x)
        return x

    def head(self, video: Video, x: Tensor) -> Tensor:
        """Run the last norm and convolution."""
        video.rows.refresh(x)
        norm, _, conv = self.end()
        return video.conv(conv, video.behind(conv, x, rms(norm, x)))


class Decoder(WanCoder):
    """A Wan VAE's decoder."""

    part, shared = "decoder", True

    def first_frames(self, x: Tensor) -> int:
        return 2

    def pieces(self, video: Video, x: Tensor) -> Iterator[Tensor]:
        levels, start = self.levels(), self.start()
        ups = [level.resample for level in levels if level.resample is not None]
        room = _ROOM * x.shape[0] * x.shape[2] * x.shape[3] * 4 ** len(ups)
        room *= max([self.end()[0].gamma.numel(), *(up.dim for up in ups[-1:])])

        x = video.rows.part(x.contiguous())
        x = video.conv(start, video.behind(start, x))
        pieces: Iterator[Any] = iter((self.blocks(video, self.middle(), x),))
        del x
        for level in levels:
            pieces = self._up(video, level, pieces, room)
        for x in pieces:
            y = self.head(video, x)
            del x
            yield y

    def _up(
        self, video: Video, level: Level, pieces: Iterator[Tensor], room: int
    ) -> Iterator[Tensor]:
        """Run a level on pieces [B, T, H, W, C]."""
        up = level.resample
        x: Any
        for x in pieces:
            # Nothing is held while other levels run, but what is read again.
            y: Any = x
            x = None if level.shortcut is None else x
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
                yield self._enlarge(video, level, y[:, part], None if x is None else x[:, part])
            x = y = None

    def _enlarge(self, video: Video, level: Level, y: Tensor, x: Tensor | None) -> Tensor:
        """Run the upsampling of a level on y, and add its shortcut of the level's input x."""
        up, y, first = level.resample, video.rows.narrow(y), False
        if up.mode == "upsample3d":  # The first frame stays one frame.
            conv = up.time_conv
            first = conv not in video.history
            video.history.setdefault(conv)  # Zeros come before the second.
            start, y = y[:, :first], y[:, first:]
            if y.shape[1]:
                y = video.conv(conv, video.behind(conv, y), dtype=video.dtype)
                # The first half of the channels is the first of two frames.
                y = torch.unflatten(y, 4, (2, -1)).permute(0, 1, 4, 2, 3, 5).flatten(1, 2)
            y = torch.cat([start.to(video.dtype), y], 1) if first else y
        duplicate = None
        if x is not None:
            own = level.shortcut
            duplicate = Duplicate(video.rows.narrow(x), own.factor_t, own.repeats, first)
        return video.enlarge(up.resample[1], y, duplicate)


class Encoder(WanCoder):
    """A Wan VAE's encoder."""

    part = "encoder"

    def first_frames(self, x: Tensor) -> int:
        return 5

    def pieces(self, video: Video, x: Tensor) -> Iterator[Tensor]:
        conv = self.start()
        start = [x] if conv in video.history else [x[:, :1], *torch.split(x[:, 1:], 4, 1)]
        pieces: Iterator[Tensor] = (
            video.conv(conv, video.behind(conv, one.contiguous()))
            for one in _gathered((one for one in start if one.shape[1]), _ROOM)
        )
        for level in self.levels():
            pieces = self._down(video, level, pieces)
            if level.resample is not None:
                pieces = _gathered(pieces, _ROOM)
        for y in pieces:
            yield self.head(video, self.blocks(video, self.middle(), y))

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
        x = video.conv(down.resample[1], x, dtype=dtype)
        if not in_time:
            return x
        conv, parts = down.time_conv, []
        if conv not in video.history:
            parts, video.history[conv] = [x[:, :1].to(video.stream)], x[:, :1].clone()
            x = x[:, 1:]
        if x.shape[1]:
            y = torch.cat([video.history[conv], x], 1)
            video.history[conv] = x[:, -1:].clone()
            parts.append(video.conv(conv, y))
        return _joined(parts)


def kind_of(module: Any) -> str:
    """Return the name of a module's class, without the prefix that diffusers gives it."""
    return original_class(module).__name__.removeprefix("Wan")


def _inside(module: Any) -> Iterator[Any]:
    """Yield residual blocks, attentions, resamplings and unknown modules in the order in which
    they run."""
    kind = kind_of(module)
    if kind == "MidBlock":  # diffusers keeps the two apart
        pairs = zip(module.attentions, module.resnets[1:], strict=True)
        yield from (module.resnets[0], *(one for pair in pairs for one in pair))
    elif kind in ("ModuleList", "Sequential", *_GROUPS):
        for child in module.children():
            yield from _inside(child)
    elif kind not in ("AvgDown3D", "DupUp3D"):
        yield module


def _layers(block: Any) -> list[Any]:
    """Return the layers of a residual block."""
    if hasattr(block, "residual"):
        return [*block.residual]
    silu = block.nonlinearity
    return [block.norm1, silu, block.conv1, block.norm2, silu, block.dropout, block.conv2]


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


def _average(x: Tensor, shortcut: Any) -> Tensor:
    """Run an `AvgDown3D` on x [B, T, H, W, C]."""
    ft, fs = shortcut.factor_t, shortcut.factor_s
    x = F.pad(x, (0, 0, 0, 0, 0, 0, (ft - x.shape[1] % ft) % ft, 0))
    for dim, factor in ((3, fs), (2, fs), (1, ft)):
        x = torch.unflatten(x, dim, (-1, factor))
    x = x.permute(0, 1, 3, 5, 7, 2, 4, 6).flatten(4)  # [B, T', H', W', C * ft * fs * fs]
    return torch.unflatten(x, 4, (shortcut.out_channels, shortcut.group_size)).mean(-1)


def _joined(pieces: list[Tensor]) -> Tensor:
    """Join pieces of a video along time, without a copy of a single one."""
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)


def _gathered(pieces: Iterator[Tensor], frames: int) -> Iterator[Tensor]:
    """Join pieces of a video along time until each has at least this many frames."""
    held: list[Tensor] = []
    for piece in pieces:
        held.append(piece)
        if sum(one.shape[1] for one in held) >= frames:
            yield _joined(held)
            held = []
    if held:
        yield _joined(held)
