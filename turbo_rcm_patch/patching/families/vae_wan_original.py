"""Wan's VAE in the classes of its authors: `WanVAE_` of Wan and TurboDiffusion (2.1), and `WanVAE`
of ComfyUI (2.1, and 2.2 with patches).

Their code runs from a checkout (Wan-Video/Wan2.1, `wan/modules/vae.py`; thu-ml/TurboDiffusion,
`rcm/tokenizers/wan2pt1.py`; ComfyUI, `comfy/ldm/wan/vae.py` and `vae2_2.py`), whose modules have
no fixed names. So this file imports none of it, and recognises it by names, layout and signatures.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any, Final

from torch import Tensor, nn

from turbo_rcm_patch.config import PatchConfig
from turbo_rcm_patch.ops.conv3d.api import pack_weight
from turbo_rcm_patch.patching.block import PatchedBlock
from turbo_rcm_patch.patching.families import wan_coders
from turbo_rcm_patch.patching.families.common import check_parameters
from turbo_rcm_patch.patching.families.wan_coders import Layout, Level, Resnet
from turbo_rcm_patch.patching.plain import FLOATS, author_class
from turbo_rcm_patch.patching.vae import Video
from turbo_rcm_patch.skip import SkipPair

#: Class of the author's -> the first parameters of its forward. Others may follow, with defaults.
_FORWARDS: Final = {
    "AttentionBlock": ("self", "x"),
    "AvgDown3D": ("self", "x"),
    "CausalConv3d": ("self", "x", "cache_x"),
    "DupUp3D": ("self", "x", "first_chunk"),
    "RMS_norm": ("self", "x"),
    "Upsample": ("self", "x"),
} | dict.fromkeys(
    (
        *("Decoder3d", "Down_ResidualBlock", "Encoder3d", "Resample", "ResidualBlock"),
        "Up_ResidualBlock",
    ),
    ("self", "x", "feat_cache", "feat_idx"),
)  # fmt: skip
_TORCH: Final = frozenset(
    {nn.Conv2d, nn.Dropout, nn.Identity, nn.Sequential, nn.SiLU, nn.Upsample, nn.ZeroPad2d}
)
#: Members of a residual block's `residual`, in order.
_RESIDUAL: Final = [
    "RMS_norm",
    "SiLU",
    "CausalConv3d",
    "RMS_norm",
    "SiLU",
    "Dropout",
    "CausalConv3d",
]
#: The module of ComfyUI whose convolutions keep their weights elsewhere, and cast them when read.
_COMFY_OPS: Final = "comfy.ops"


class _Coder(wan_coders.WanCoder):
    """What decoder and encoder share."""

    __slots__ = ()

    def patches(self) -> bool:
        """Return True for Wan 2.2's VAE, whose coders see squares of four pixels as channels."""
        return type(self.vae.decoder.upsamples[0]).__name__ == "Up_ResidualBlock"

    def knows(self, module: nn.Module) -> bool:
        cls = author_class(module)
        own = cls.__name__ in _FORWARDS and _folder(cls) == _folder(type(self.vae))
        lent = cls.__name__ == "Conv2d" and cls.__module__ == _COMFY_OPS
        return own or lent or cls in _TORCH

    def why_module(self, module: nn.Module) -> str:
        if isinstance(module, nn.Upsample) and (
            module.scale_factor != (2.0, 2.0) or not module.mode.startswith("nearest")
        ):
            return "it does not repeat pixels"
        if module is self.block:
            layout = self.layout()
            names = [type(layout.norm_out).__name__, type(layout.conv_out).__name__]
            blocks = [*layout.middle, *(one for level in layout.levels for one in level.blocks)]
            names += [type(one).__name__ for one in blocks if not isinstance(one, Resnet)]
            if names[:2] != ["RMS_norm", "CausalConv3d"] or {*names[2:]} - {"AttentionBlock"}:
                return "its blocks are not the author's"
        if type(module).__name__ == "ResidualBlock" and _names(module.residual) != _RESIDUAL:
            return "its layers are not the author's"
        return super().why_module(module)

    def why_inputs(self, x: Tensor) -> str:
        if _COMFY_OPS not in {base.__module__ for base in type(self.block.conv1).__mro__}:
            return super().why_inputs(x)
        for name, weight in self.block.named_parameters():  # wherever they are
            if type(weight) is not nn.Parameter or weight.dtype not in FLOATS:
                return f"{name} is a {type(weight).__name__} in {weight.dtype}"
        return "" if x.dim() == 5 and x.numel() else "the input is not [B, C, T, H, W]"

    def read(self, video: Video, conv: Any) -> tuple[Tensor, Tensor | None]:
        if not hasattr(conv, "comfy_cast_weights"):
            return super().read(video, conv)
        lender: Any = sys.modules[_COMFY_OPS]
        given = {"dtype": video.stream, "bias_dtype": video.stream, "device": video.device}
        if "offloadable" in inspect.signature(lender.cast_bias_weight).parameters:
            given["offloadable"] = True
        weight, bias, *stream = lender.cast_bias_weight(conv, **given)
        packed = pack_weight(weight, video.dtype)
        # What was lent goes back, so nothing that is kept may be a view of it.
        packed = packed.clone() if packed.data_ptr() == weight.data_ptr() else packed
        kept = None if bias is None else bias.clone()
        if stream:
            lender.uncast_bias_weight(conv, weight, bias, *stream)
        return packed, kept

    def layout(self) -> Layout:
        coder = self.block
        levels: list[Level] = []
        blocks: list[Any] = []
        for one in coder.upsamples if self.part == "decoder" else coder.downsamples:
            inner = getattr(one, "upsamples", getattr(one, "downsamples", None))  # of Wan 2.2
            shortcut = getattr(one, "avg_shortcut", None)
            for module in (one,) if inner is None else inner:
                if type(module).__name__ == "Resample":
                    levels.append(Level(blocks, module, shortcut))
                    blocks = []
                else:
                    blocks.append(_block(module))
            if inner is not None and blocks:
                levels.append(Level(blocks, None, shortcut))
                blocks = []
        levels += [Level(blocks)] if blocks else []
        return Layout(coder.conv1, [*map(_block, coder.middle)], levels, coder.head[0],
                      coder.head[-1])  # fmt: skip


class OriginalDecoder(_Coder, wan_coders.Decoder):
    """Replaces `decode`."""

    __slots__ = ()
    caller = "decode"

    def run_video(self, z: Tensor, scale: Any = None) -> Any:
        if scale is not None:
            mean, factor = map(_per_channel, scale)
            z = z / factor + mean
        z = self.vae.conv2(z)
        out = self.coded(self.new_video(z), z)
        return _author(self.vae).unpatchify(out, patch_size=2) if self.patches() else out


class OriginalEncoder(_Coder, wan_coders.Encoder):
    """Replaces `encode`, which returns the mean."""

    __slots__ = ()
    caller = "encode"

    def run_video(self, x: Tensor, scale: Any = None) -> Any:
        x = _author(self.vae).patchify(x, patch_size=2) if self.patches() else x
        mu = self.vae.conv1(self.coded(self.new_video(x), x)).chunk(2, dim=1)[0]
        if scale is not None:
            mean, factor = map(_per_channel, scale)
            mu = (mu - mean) * factor
        return mu

    def why_inputs(self, x: Tensor) -> str:
        window = getattr(self.vae, "temporal_window", 4)  # TurboDiffusion's
        if x.dim() == 5 and (x.shape[2] % 4 != 1 or window % 4):
            return f"{x.shape[2]} frames in windows of {window} are not 4 n + 1 in windows of 4 n"
        return super().why_inputs(x)


def _folder(cls: type) -> str:
    return cls.__module__.rpartition(".")[0]


def _author(vae: Any) -> Any:
    """Return the module in which a VAE's class was written."""
    return sys.modules[author_class(vae).__module__]


def _names(modules: Any) -> list[str]:
    return [type(module).__name__ for module in modules]


def _per_channel(value: Any) -> Any:
    """Return a mean or a factor so that it meets [B, C, T, H, W]."""
    return value.view(1, -1, 1, 1, 1) if isinstance(value, Tensor) else value


def _block(module: Any) -> Any:
    """Return the modules of a `ResidualBlock`, or another module itself."""
    if type(module).__name__ != "ResidualBlock":
        return module
    norm1, _, conv1, norm2, _, _, conv2 = module.residual
    plain = isinstance(module.shortcut, nn.Identity)
    return Resnet(norm1, conv1, norm2, conv2, None if plain else module.shortcut)


def recognises(model: Any) -> bool:
    """Return True if a VAE has the layout of Wan's; other projects use the same names."""
    if not all(isinstance(getattr(model, name, None), nn.Module)
               for name in ("encoder", "decoder", "conv1", "conv2")):  # fmt: skip
        return False
    held = getattr(model.decoder, "upsamples", ()), getattr(model.encoder, "downsamples", ())
    kinds = {"ResidualBlock", "AttentionBlock", "Resample", "Up_ResidualBlock"}
    kinds.add("Down_ResidualBlock")
    return all(one and {*_names(one)} <= kinds for one in held)


def blocks_of(model: Any, path: str, config: PatchConfig) -> list[PatchedBlock | SkipPair]:
    """Find the decoder and the encoder of a VAE.

    Raises:
        FamilyError: A forward takes other parameters than this was written for.
    """
    cls: Any = author_class(model)
    inside = {author_class(module) for module in model.modules()} - {cls}
    first: dict[Any, tuple[str, ...]] = {
        one.forward: _FORWARDS[one.__name__]
        for one in inside
        if one.__name__ in _FORWARDS and _folder(one) == _folder(cls)
    }
    scaled = len(inspect.signature(cls.decode).parameters) > 2
    for name, given in (("decode", "z"), ("encode", "x")):
        first[getattr(cls, name)] = ("self", given, "scale") if scaled else ("self", given)
    expected = {function: names + _optional(function, names) for function, names in first.items()}
    check_parameters(expected, "Wan")
    return [one(model, path, config) for one in (OriginalDecoder, OriginalEncoder)]


def _optional(function: Any, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the parameters with defaults that follow those of these names."""
    more = [*inspect.signature(function).parameters.values()][len(names) :]
    return tuple(one.name for one in more if one.default is not one.empty)
