"""The VAE of CogVideoX in diffusers. Written against 0.42.1.

The author's loops run two latent frames (the first time three, where their number is odd) or eight
frames at a time. Its group norms take their statistics over such a batch of frames, so the fast
path keeps the author's batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from turbo_rcm_patch.config import PatchConfig
from turbo_rcm_patch.ops.conv3d.formats import GroupNorm
from turbo_rcm_patch.patching.block import PatchedBlock
from turbo_rcm_patch.patching.families.common import check_coders
from turbo_rcm_patch.patching.vae import CoderSession, PatchedCoder, kind_of
from turbo_rcm_patch.skip import SkipPair

#: Class of a module inside, without "CogVideoX" -> the first parameters of its forward.
_FORWARDS: Final = {
    "CausalConv3d": ("self", "inputs", "conv_cache"),
    "Downsample3D": ("self", "x"),
    "ResnetBlock3D": ("self", "inputs", "temb", "zq", "conv_cache"),
    "SafeConv3d": ("self", "input"),
    "SpatialNorm3D": ("self", "f", "zq", "conv_cache"),
    "Upsample3D": ("self", "inputs"),
    **dict.fromkeys(("Decoder3D", "Encoder3D"), ("self", "sample", "temb", "conv_cache")),
} | dict.fromkeys(
    ("DownBlock3D", "MidBlock3D", "UpBlock3D"),
    ("self", "hidden_states", "temb", "zq", "conv_cache"),
)


def _layers(norm: str, resample: str) -> dict[str, str]:
    """Return the kinds of the modules in each kind of module, in a coder with this kind of norm
    and of modules that enlarge or reduce."""
    return {
        "CausalConv3d": "SafeConv3d",
        "SpatialNorm3D": "GroupNorm CausalConv3d CausalConv3d",
        "ResnetBlock3D": f"SiLU {norm} {norm} CausalConv3d Dropout CausalConv3d( SafeConv3d)?",
        **dict.fromkeys(("DownBlock3D", "UpBlock3D"), f"(ResnetBlock3D ?)+({resample})?"),
        "MidBlock3D": "(ResnetBlock3D ?)+",
        resample: "Conv2d",
        **dict.fromkeys(
            ("Decoder3D", "Encoder3D"),
            f"CausalConv3d ((Down|Mid|Up)Block3D )+{norm} SiLU CausalConv3d",
        ),
    }


class _Coder(PatchedCoder):
    """The parts that decoder and encoder share."""

    #: Name of the VAE's number of frames that the author's loop takes at once.
    batch_frames: ClassVar[str]
    #: Name of the modules that end a block and enlarge or reduce its result.
    resamples: ClassVar[str]
    repeats_first = True
    forwards = {f"CogVideoX{name}": names for name, names in _FORWARDS.items()}
    settings: ClassVar[Mapping[str, Any]] = {
        "CausalConv3d": {"pad_mode": ("constant", "first")},
        "GroupNorm": {"affine": (True,)},
    }

    def run_video(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the author's loops over tiles and batches of frames, with `run_batch` as coder."""
        return self.run_original(self.twin(self.run_batch), x, *args, **kwargs)

    def first_frames(self, x: Tensor) -> int:
        frames = int(getattr(self.vae, self.batch_frames))
        return min(x.shape[2], frames + x.shape[2] % frames)

    def why_module(self, name: str, module: Any) -> str:
        causal = kind_of(module) == "CausalConv3d"
        if causal and module.time_kernel_size != module.conv.kernel_size[0]:
            return "its time_kernel_size is not the author's"
        return super().why_module(name, module)

    # --- blocks, each beside its author's forward ------------------------------------------------

    def run_batch(
        self, x: Tensor, conv_cache: CoderSession | None = None
    ) -> tuple[Tensor, CoderSession]:
        """Run the coder over the next batch of frames, as the author's forward.

        Args:
            x: [B, C, T, H, W].
            conv_cache: The state after the batch before; None for the first one.

        Returns:
            [B, C', T', H', W'], and the state.
        """
        session = CoderSession(self, x) if conv_cache is None else conv_cache
        h = x.movedim(1, -1).contiguous()
        zq = h.to(session.dtype) if self.part == "decoder" else None
        coder = self.block
        start, end = coder.conv_in.conv, coder.conv_out.conv
        h = session.conv(start, session.with_history(start, h))
        down, up = getattr(coder, "down_blocks", ()), getattr(coder, "up_blocks", ())
        for block in (*down, coder.mid_block, *up):
            for resnet in block.resnets:
                h = self.resnet(session, resnet, h, zq)
            for resample in getattr(block, self.resamples, None) or ():
                h = self.resample(session, resample, h)
        h = session.with_history(end, h, group(session, coder.norm_out, zq))
        return session.conv(end, h).movedim(-1, 1).contiguous(), session

    def resnet(self, session: CoderSession, block: Any, x: Tensor, zq: Tensor | None) -> Tensor:
        """Run a `CogVideoXResnetBlock3D` on x [B, T, H, W, C]."""
        norms = group(session, block.norm1, zq), group(session, block.norm2, zq)
        wider = block.in_channels != block.out_channels
        shortcut = block.conv_shortcut if wider else None
        return session.residual_block(x, norms, (block.conv1.conv, block.conv2.conv), shortcut)

    def resample(self, session: CoderSession, module: Any, x: Tensor) -> Tensor:
        """Run the end of a block, which enlarges or reduces x."""
        raise NotImplementedError


class CogVideoXDecoder(_Coder):
    """Replaces `AutoencoderKLCogVideoX._decode`."""

    part, caller, batch_frames = "decoder", "_decode", "num_latent_frames_batch_size"
    resamples = "upsamplers"
    layers = _layers("SpatialNorm3D", "Upsample3D")
    resampling: ClassVar[Mapping[str, Any]] = {"upsamplers.0.conv": ((3, 3), (1, 1))}

    def resample(self, session: CoderSession, module: Any, x: Tensor) -> Tensor:
        """Run a `CogVideoXUpsample3D`; of an odd number of frames the first stays one."""
        twice = module.compress_time and x.shape[1] > 1
        odd = twice and x.shape[1] % 2 == 1
        return session.upsample(module.conv, x, repeat=2 if twice else 1, first=odd)


class CogVideoXEncoder(_Coder):
    """Replaces `AutoencoderKLCogVideoX._encode`."""

    part, caller, batch_frames = "encoder", "_encode", "num_sample_frames_batch_size"
    resamples = "downsamplers"
    layers = _layers("GroupNorm", "Downsample3D")
    resampling: ClassVar[Mapping[str, Any]] = {"downsamplers.0.conv": ((3, 3), (2, 2))}
    halves = 2  # mean and logarithm of the variance

    def resample(self, session: CoderSession, module: Any, x: Tensor) -> Tensor:
        """Run a `CogVideoXDownsample3D`: means of two frames, of an odd number all but the first,
        and a convolution with stride 2."""
        if module.compress_time and x.shape[1] > 1:
            first = x.shape[1] % 2
            rest = torch.unflatten(x[:, first:], 1, (-1, 2)).mean(2)
            x = torch.cat([x[:, :first], rest], 1)
        return session.conv(module.conv, F.pad(x.to(session.dtype), (0, 0, 0, 1, 0, 1)))


def group(session: CoderSession, norm: Any, zq: Tensor | None) -> GroupNorm:
    """Return the weights of a `GroupNorm`, or of a `CogVideoXSpatialNorm3D` and its modulation.

    The author's two convolutions of one pixel read the latent after it was enlarged; they are the
    same before that.
    """
    if zq is None:
        return GroupNorm(norm.weight, norm.bias, norm.num_groups, norm.eps)
    scale = session.conv(norm.conv_y.conv, zq, dtype=session.dtype)
    shift = session.conv(norm.conv_b.conv, zq, dtype=session.dtype)
    norm = norm.norm_layer
    return GroupNorm(norm.weight, norm.bias, norm.num_groups, norm.eps, scale, shift)


def blocks_of(model: Any, path: str, config: PatchConfig) -> list[PatchedBlock | SkipPair]:
    """Find the decoder and the encoder of a VAE."""
    coders = CogVideoXDecoder, CogVideoXEncoder
    check_coders(model, coders, ("self", "z"), ("self", "x"))
    return [cls(model, path, config) for cls in coders]
