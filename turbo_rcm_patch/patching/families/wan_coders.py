"""Decoder and encoder of Wan's VAEs on the fast path, whoever wrote the classes.

The authors' decoders run one latent frame at a time, and each causal convolution caches its last
two input frames. The same numbers come from any number of frames at once, because nothing but
these frames (`CoderSession.history`) links two calls: zeros come before the first frame, and the
first frame passes the resamplings in time alone. So `run_frames` is a loop over chunks of frames,
each as long as memory allows.

The authors' classes differ in names and nesting, so modules are looked up by kind. A family runs
what its author has around the coders.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from turbo_rcm_patch.ops.conv3d.formats import Duplicate, RMSNorm
from turbo_rcm_patch.ops.conv3d.passes import norm_silu
from turbo_rcm_patch.patching.families.wan_streaming import StreamedCoder
from turbo_rcm_patch.patching.plain import root_package
from turbo_rcm_patch.patching.vae import CoderSession, PatchedCoder, kind_of

#: Frames of full resolution that run at once, as in the author's decoder.
_FRAMES: int = 4
#: How many times as many frames run at once in a decoder's lower resolutions.
_CHUNK_FACTOR: int = 2
#: Latent frames that an encoder's lowest resolution runs at once.
_LATENT_FRAMES: Final = 16


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
_SETTINGS: Final[Mapping[str, Any]] = {
    "DupUp3D": {"factor_s": (2,)},
    "RMS_norm": {"channel_first": (True,)},
    "Upsample": {"scale_factor": ((2.0, 2.0),), "mode": ("nearest", "nearest-exact")},
    "ZeroPad2d": {"padding": ((0, 1, 0, 1),), "value": (0,)},
}
#: Kind of a block -> the kinds of the layers in it (diffusers lists the activation once).
_LAYERS: Final = {
    "AttentionBlock": "RMS_norm Conv2d Conv2d",
    "ResidualBlock": "(SiLU RMS_norm|RMS_norm SiLU) CausalConv3d RMS_norm (SiLU )?Dropout "
    "CausalConv3d (Identity|CausalConv3d)",
}


class Resolution(NamedTuple):
    """The blocks of one resolution, in order.

    Attributes:
        blocks: Residual blocks and attentions.
        resample: Enlarges or reduces their result. None at a coder's last resolution.
        shortcut: Adds the input of the blocks to the result (Wan 2.2), or None.
    """

    blocks: list[Any]
    resample: Any = None
    shortcut: Any = None


class WanCoder(PatchedCoder):
    """The parts that decoder and encoder share."""

    settings = _SETTINGS
    forwards = _FORWARDS | {f"Wan{name}": names for name, names in _FORWARDS.items()}

    def other_forwards(self) -> list[tuple[Any, Any]]:
        return [(self.block, StreamedCoder(self))]

    def run_frames(self, session: CoderSession, x: Tensor) -> Tensor:
        """Run the coder over the next frames of a video.

        Args:
            session: The state after the frames before.
            x: [B, C, T, H, W].

        Returns:
            [B, C', T', H', W'], contiguous.
        """
        raise NotImplementedError

    def why_modules(self) -> str:
        if why := super().why_modules():
            return why
        *before, last = self.resolutions()
        blocks = [*self.middle(), *(block for level in (*before, last) for block in level.blocks)]
        known = {*map(kind_of, blocks)} <= {"ResidualBlock", "AttentionBlock"}
        resampled = before and all(level.resample is not None for level in before)
        resampled = resampled and last.resample is None
        ends = " ".join(map(kind_of, [self.start(), *self.end()]))
        if known and resampled and ends == "CausalConv3d RMS_norm SiLU CausalConv3d":
            return ""
        return f"{self.part}: its blocks are not the author's"

    def why_module(self, name: str, module: Any) -> str:
        if kind_of(module) == "RMS_norm":
            scaled = module.scale == module.gamma.numel() ** 0.5
            if not scaled or not (isinstance(module.bias, Tensor) or not module.bias):
                return "its scale or bias is not the author's"
        attention = vars(module).get("optimized_attention")  # of ComfyUI
        if attention and root_package(attention) != root_package(type(module)):
            return "its attention is not the author's"
        return super().why_module(name, module)

    # --- where the modules are now ---------------------------------------------------------------

    def start(self) -> Any:
        """Return the first convolution."""
        return getattr(self.block, "conv_in", None) or self.block.conv1

    def middle(self) -> list[Any]:
        """Return the blocks in the middle of the VAE, at the latent's resolution."""
        return list(_inside(getattr(self.block, "mid_block", None) or self.block.middle))

    def end(self) -> list[Any]:
        """Return the last norm, its SiLU and the last convolution."""
        coder = self.block
        head = getattr(coder, "head", None)
        return [coder.norm_out, coder.nonlinearity, coder.conv_out] if head is None else [*head]

    def resolutions(self) -> list[Resolution]:
        """Return the blocks of each resolution, in order, without those in the middle."""
        names = "up_blocks", "down_blocks", "upsamples", "downsamples"
        lists = (getattr(self.block, name, None) for name in names)
        resolutions: list[Resolution] = []
        blocks: list[Any] = []
        for group in next(modules for modules in lists if modules is not None):
            shortcut, resample = getattr(group, "avg_shortcut", None), None
            blocks += _inside(group)
            if blocks and kind_of(blocks[-1]) == "Resample":
                resample = blocks.pop()
            if resample is not None or shortcut is not None:
                resolutions.append(Resolution(blocks, resample, shortcut))
                blocks = []
        if blocks:
            resolutions.append(Resolution(blocks))
        return resolutions

    # --- blocks, each beside its author's forward ------------------------------------------------

    def run_block(self, session: CoderSession, block: Any, x: Tensor) -> Tensor:
        """Run a residual block or an attention on x [B, T, H, W, C], on this rank's rows."""
        halo = session.halo
        if kind_of(block) == "ResidualBlock":
            return self.resnet(session, block, halo.exchange_halo(x))
        return halo.scatter(self.attention(session, block, halo.gather(x)))

    def resnet(self, session: CoderSession, block: Any, x: Tensor) -> Tensor:
        """Run a residual block on x [B, T, H, W, C]."""
        if hasattr(block, "residual"):
            norm1, _, conv1, norm2, _, _, conv2 = block.residual
            shortcut = block.shortcut
        else:
            norm1, conv1, norm2, conv2 = block.norm1, block.conv1, block.norm2, block.conv2
            shortcut = block.conv_shortcut
        shortcut = None if isinstance(shortcut, nn.Identity) else shortcut
        norms = rms(norm1, x), rms(norm2, x)
        return session.residual_block(x, norms, (conv1, conv2), shortcut)

    def attention(self, session: CoderSession, block: Any, x: Tensor) -> Tensor:
        """Run an attention on x [B, T, H, W, C]: one head over the pixels of each frame."""
        batch, frames, height, width, channels = x.shape
        norm = rms(block.norm, x)
        y, _ = norm_silu(x, norm, silu=False, dtype=session.dtype, impl=session.impl)
        qkv = session.conv(block.to_qkv, y, dtype=session.dtype)
        qkv = qkv.view(batch * frames, 1, height * width, 3 * channels)
        q, k, v = qkv.chunk(3, dim=-1)
        y = F.scaled_dot_product_attention(q, k, v).reshape(x.shape)
        return session.conv(block.proj, y, residual=x)

    def head(self, session: CoderSession, x: Tensor) -> Tensor:
        """Run the last norm and convolution on x [B, T, H, W, C]."""
        norm, _, conv = self.end()
        return session.conv(conv, session.with_history(conv, x, rms(norm, x)))


class Decoder(WanCoder):
    """A Wan VAE's decoder."""

    part, shared = "decoder", True
    layers = _LAYERS | {"Resample": "Upsample Conv2d( CausalConv3d)?"}
    resampling: ClassVar[Mapping[str, Any]] = {"resample.1": ((3, 3), (1, 1))}

    def first_frames(self, x: Tensor) -> int:
        return 2

    def run_frames(self, session: CoderSession, x: Tensor) -> Tensor:
        halo, start = session.halo, self.start()
        *before, full = self.resolutions()
        times = 2 ** sum(level.resample.mode == "upsample3d" for level in before)
        batch, _, frames, height, width = x.shape
        if start in session.history:
            frames *= times
        else:  # A video's first frame stays one.
            frames = 1 + times * (frames - 1)
        scale = 2 ** len(before)
        out = x.new_empty(batch, self.end()[2].out_channels, frames, scale * height, scale * width)
        done = 0
        for latent in torch.split(x, max(1, _CHUNK_FACTOR * _FRAMES // times), 2):
            h = halo.scatter(latent.movedim(1, -1).contiguous())
            h = session.conv(start, session.with_history(start, h))
            for block in self.middle():
                h = self.run_block(session, block, h)
            for level in before:
                skip = None if level.shortcut is None else h
                for block in level.blocks:
                    h = self.run_block(session, block, h)
                halo.exchange_halo(h)
                if level is not before[-1]:
                    h = self.upsample(session, level, h, skip)
            for first in range(0, h.shape[1], _FRAMES):
                part = slice(first, first + _FRAMES)
                part_skip = None if skip is None else skip[:, part]
                y = self.upsample(session, before[-1], h[:, part], part_skip)
                for block in full.blocks:
                    y = self.run_block(session, block, y)
                y = halo.gather(self.head(session, halo.exchange_halo(y)))
                out[:, :, done : done + y.shape[1]] = y.movedim(-1, 1)
                done += y.shape[1]
        return out

    def upsample(
        self, session: CoderSession, level: Resolution, x: Tensor, skip: Tensor | None
    ) -> Tensor:
        """Upsample x [B, T, H, W, C], and add the shortcut of the resolution's input."""
        resample, x, first = level.resample, session.halo.shrink_halo(x), False
        if resample.mode == "upsample3d":
            first = resample.time_conv not in session.history
            x = self.double_frames(session, resample.time_conv, x)
        duplicate = None
        if skip is not None:  # The first of the blocks exchanged its halo.
            skip, shortcut = session.halo.shrink_halo(skip), level.shortcut
            duplicate = Duplicate(skip, shortcut.factor_t, shortcut.repeats)
        return session.upsample(resample.resample[1], x, duplicate, first=first)

    def double_frames(self, session: CoderSession, conv: Any, x: Tensor) -> Tensor:
        """Make two frames of each frame of x [B, T, H, W, C]. A video's first frame stays one."""
        first = conv not in session.history
        session.history.setdefault(conv)  # Zeros come before the second frame.
        start, x = x[:, :first], x[:, first:]
        if x.shape[1]:
            x = session.conv(conv, session.with_history(conv, x), dtype=session.dtype)
            # The first half of the channels is the first of two frames.
            x = torch.unflatten(x, 4, (2, -1)).permute(0, 1, 4, 2, 3, 5).flatten(1, 2)
        return torch.cat([start.to(session.dtype), x], 1) if first else x


class Encoder(WanCoder):
    """A Wan VAE's encoder."""

    part = "encoder"
    layers = _LAYERS | {"Resample": "ZeroPad2d Conv2d( CausalConv3d)?"}
    resampling: ClassVar[Mapping[str, Any]] = {
        "resample.1": ((3, 3), (2, 2)),
        "time_conv": ((3, 1, 1), (2, 1, 1)),
    }

    def first_frames(self, x: Tensor) -> int:
        return 5

    def run_frames(self, session: CoderSession, x: Tensor) -> Tensor:
        start = self.start()
        *higher, lowest = self.resolutions()
        times = 2 ** sum(level.resample.mode == "downsample3d" for level in higher)
        frames = -(-_FRAMES // times) * times
        first = start not in session.history  # A video's first frame stays one.
        ends = range(first + frames, x.shape[2], frames)
        latents = []
        for chunk in torch.tensor_split(x, [*ends], 2):
            h = chunk.movedim(1, -1).contiguous()
            h = session.conv(start, session.with_history(start, h))
            for level in higher:
                skip = None if level.shortcut is None else h
                for block in level.blocks:
                    h = self.run_block(session, block, h)
                h = self.downsample(session, level, h, skip)
            latents.append(h)
        results = []
        for h in torch.split(torch.cat(latents, 1), _LATENT_FRAMES, 1):
            skip = h
            for block in lowest.blocks:
                h = self.run_block(session, block, h)
            if lowest.shortcut is not None:
                h = h + _average(skip, lowest.shortcut)
            for block in self.middle():
                h = self.run_block(session, block, h)
            results.append(self.head(session, h))
        return torch.cat(results, 1).movedim(-1, 1).contiguous()

    def downsample(
        self, session: CoderSession, level: Resolution, x: Tensor, skip: Tensor | None
    ) -> Tensor:
        """Halve x [B, T, H, W, C], and in time where its author does, and add the shortcut of the
        resolution's input."""
        resample = level.resample
        in_time = resample.mode == "downsample3d"
        x = F.pad(x.to(session.dtype), (0, 0, 0, 1, 0, 1))
        dtype = session.dtype if in_time else session.stream
        x = session.conv(resample.resample[1], x, dtype=dtype)
        if in_time:
            x = self.halve_frames(session, resample.time_conv, x)
        return x if skip is None else x + _average(skip, level.shortcut)

    def halve_frames(self, session: CoderSession, conv: Any, x: Tensor) -> Tensor:
        """Make a frame of each two of x [B, T, H, W, C]. A video's first frame stays one."""
        first = conv not in session.history
        before = x[:, :1] if first else session.history[conv]
        session.history[conv] = x[:, -1:].clone()
        if not first:
            return session.conv(conv, torch.cat([before, x], 1))
        start = before.to(session.stream)
        return torch.cat([start, session.conv(conv, x)], 1) if x.shape[1] > 1 else start


def _inside(module: Any) -> Iterator[Any]:
    """Yield residual blocks, attentions, resamplings and unknown modules in the order in which
    they run."""
    kind = kind_of(module)
    if kind == "MidBlock":  # diffusers keeps the two apart
        pairs = zip(module.attentions, module.resnets[1:], strict=True)
        yield from (module.resnets[0], *(block for pair in pairs for block in pair))
    elif kind in ("ModuleList", "Sequential", *_GROUPS):
        for child in module.children():
            yield from _inside(child)
    elif kind not in ("AvgDown3D", "DupUp3D"):
        yield module


def rms(norm: Any, x: Tensor) -> RMSNorm:
    """Return the weights of one of Wan's norms on the device of x."""
    bias = norm.bias if isinstance(norm.bias, Tensor) else None
    return RMSNorm(norm.gamma.to(x.device), None if bias is None else bias.to(x.device))


def _average(x: Tensor, shortcut: Any) -> Tensor:
    """Run an `AvgDown3D` on x [B, T, H, W, C]."""
    ft, fs = shortcut.factor_t, shortcut.factor_s
    x = F.pad(x, (0, 0, 0, 0, 0, 0, (ft - x.shape[1] % ft) % ft, 0))
    for dim, factor in ((3, fs), (2, fs), (1, ft)):
        x = torch.unflatten(x, dim, (-1, factor))
    x = x.permute(0, 1, 3, 5, 7, 2, 4, 6).flatten(4)  # [B, T', H', W', C * ft * fs * fs]
    return torch.unflatten(x, 4, (shortcut.out_channels, shortcut.group_size)).mean(-1)
