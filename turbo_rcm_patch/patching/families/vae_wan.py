"""Wan's VAEs: `AutoencoderKLWan` of diffusers (2.1, and 2.2's 5B, `is_residual`), `WanVAE_` of Wan
and TurboDiffusion (2.1), and `WanVAE` of ComfyUI (2.1, and 2.2 with patches).

The last two run from a checkout (Wan-Video/Wan2.1, `wan/modules/vae.py`; thu-ml/TurboDiffusion,
`rcm/tokenizers/wan2pt1.py`; ComfyUI, `comfy/ldm/wan/vae.py` and `vae2_2.py`), whose modules have
no fixed names. So this file imports nobody's package, and knows modules by names, layout and
signatures. It has what each author does around the coders.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any, Final

import torch
from torch import Tensor, nn

from turbo_rcm_patch.config import PatchConfig
from turbo_rcm_patch.ops.conv3d.api import pack_weight
from turbo_rcm_patch.patching.block import PatchedBlock
from turbo_rcm_patch.patching.families.common import check_coders
from turbo_rcm_patch.patching.families.wan_coders import Decoder, Encoder, WanCoder
from turbo_rcm_patch.patching.plain import original_class
from turbo_rcm_patch.patching.vae import CoderSession, PatchedCoder, kind_of
from turbo_rcm_patch.skip import SkipPair

#: The module of ComfyUI whose convolutions keep their weights elsewhere, and cast them when read.
_COMFY_OPS: Final = "comfy.ops"


class _Diffusers(WanCoder):
    """The parts that the coders of diffusers share."""

    def run_video(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the coder over whole frames, or with the author's loop over tiles and frames where
        the VAE splits a video of this size into tiles."""
        vae = self.vae
        scale = 1 if self.part == "encoder" else vae.spatial_compression_ratio
        height, width = vae.tile_sample_min_height // scale, vae.tile_sample_min_width // scale
        if vae.use_tiling and (x.shape[3] > height or x.shape[4] > width):
            return self.run_original(self.twin(self._run_tile), x, *args, **kwargs)
        return self.run_whole_frames(x, *args, **kwargs)

    def run_whole_frames(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the coder over whole frames, and what the author has around it."""
        raise NotImplementedError

    def _run_tile(self, x: Tensor, feat_cache: list[Any], **_: Any) -> Tensor:
        """Run the next frames of a tile. The author begins each tile with an empty cache."""
        if feat_cache[0] is None:
            feat_cache[0] = CoderSession(self, x)
        return self.run_frames(feat_cache[0], x)


class WanDecoder(_Diffusers, Decoder):
    """Replaces `AutoencoderKLWan._decode`."""

    caller = "_decode"

    def run_whole_frames(self, z: Tensor, return_dict: bool = True) -> Any:
        x = self.vae.post_quant_conv(z)
        out = self.run_frames(CoderSession(self, x), x)
        original = _file_of(self.vae)
        if self.vae.config.patch_size is not None:
            out = original.unpatchify(out, patch_size=self.vae.config.patch_size)
        out = torch.clamp(out, min=-1.0, max=1.0)
        return original.DecoderOutput(sample=out) if return_dict else (out,)


class WanEncoder(_Diffusers, Encoder):
    """Replaces `AutoencoderKLWan._encode`."""

    caller = "_encode"
    halves = 2  # mean and logarithm of the variance

    def run_whole_frames(self, x: Tensor) -> Any:
        if self.vae.config.patch_size is not None:
            x = _file_of(self.vae).patchify(x, self.vae.config.patch_size)
        frames = 1 + (x.shape[2] - 1) // 4 * 4  # The author leaves out the rest too.
        out = self.run_frames(CoderSession(self, x), x[:, :, :frames])
        return self.vae.quant_conv(out)


class _Original(WanCoder):
    """The parts that the coders of the other classes share."""

    def patches(self) -> bool:
        """Return True for Wan 2.2's VAE, whose coders see squares of four pixels as channels."""
        return kind_of(self.vae.decoder.upsamples[0]) == "Up_ResidualBlock"

    def other_forwards(self) -> list[tuple[Any, Any]]:
        # A patched VAE of ComfyUI shares its modules with one that is not.
        streams = original_class(self.vae).__name__ == "WanVAE_"
        return super().other_forwards() if streams else []

    def knows(self, cls: type[nn.Module]) -> bool:
        casts = cls.__name__ == "Conv2d" and cls.__module__ == _COMFY_OPS
        return casts or super().knows(cls)

    def casts_weights(self) -> bool:
        return _COMFY_OPS in {base.__module__ for base in type(self.block.conv1).__mro__}

    def read(self, session: CoderSession, conv: Any) -> tuple[Tensor, Tensor | None]:
        if not hasattr(conv, "comfy_cast_weights"):
            return super().read(session, conv)
        ops: Any = sys.modules[_COMFY_OPS]
        dtype = session.stream
        options = {"dtype": dtype, "bias_dtype": dtype, "device": session.device}
        if "offloadable" in inspect.signature(ops.cast_bias_weight).parameters:
            options["offloadable"] = True
        weight, bias, *stream = ops.cast_bias_weight(conv, **options)
        packed = pack_weight(weight, session.dtype)
        # ComfyUI takes its tensors back, so nothing that is kept may be a view of them.
        packed = packed.clone() if packed.data_ptr() == weight.data_ptr() else packed
        bias_copy = None if bias is None else bias.clone()
        if stream:
            ops.uncast_bias_weight(conv, weight, bias, *stream)
        return packed, bias_copy


class OriginalDecoder(_Original, Decoder):
    """Replaces `decode`."""

    caller = "decode"

    def run_video(self, z: Tensor, scale: Any = None) -> Any:
        if scale is not None:
            mean, factor = map(_per_channel, scale)
            z = z / factor + mean
        z = self.vae.conv2(z)
        out = self.run_frames(CoderSession(self, z), z)
        return _file_of(self.vae).unpatchify(out, patch_size=2) if self.patches() else out


class OriginalEncoder(_Original, Encoder):
    """Replaces `encode`, which returns the mean."""

    caller = "encode"

    def run_video(self, x: Tensor, scale: Any = None) -> Any:
        x = _file_of(self.vae).patchify(x, patch_size=2) if self.patches() else x
        out = self.run_frames(CoderSession(self, x), x)
        mu = self.vae.conv1(out).chunk(2, dim=1)[0]
        if scale is not None:
            mean, factor = map(_per_channel, scale)
            mu = (mu - mean) * factor
        return mu

    def why_inputs(self, x: Tensor, *_: Any) -> str:
        window = getattr(self.vae, "temporal_window", 4)  # TurboDiffusion's
        if x.dim() == 5 and (x.shape[2] % 4 != 1 or window % 4):
            return f"{x.shape[2]} frames in windows of {window} are not 4 n + 1 in windows of 4 n"
        return super().why_inputs(x)


def _file_of(vae: Any) -> Any:
    """Return the module in which a VAE's class was written."""
    return sys.modules[original_class(vae).__module__]


def _per_channel(value: Any) -> Any:
    """Return a mean or a factor so that it meets [B, C, T, H, W]."""
    return value.view(1, -1, 1, 1, 1) if isinstance(value, Tensor) else value


def recognises(model: Any) -> bool:
    """Return True if a VAE has the layout of Wan's; other projects use the same names."""
    names = "encoder", "decoder", "conv1", "conv2"
    if not all(isinstance(getattr(model, name, None), nn.Module) for name in names):
        return False
    lists = getattr(model.decoder, "upsamples", ()), getattr(model.encoder, "downsamples", ())
    kinds = {"ResidualBlock", "AttentionBlock", "Resample", "Up_ResidualBlock"}
    kinds.add("Down_ResidualBlock")
    return all(blocks and {*map(kind_of, blocks)} <= kinds for blocks in lists)


def blocks_of(model: Any, path: str, config: PatchConfig) -> list[PatchedBlock | SkipPair]:
    """Find the decoder and the encoder of a VAE.

    Raises:
        FamilyError: A forward takes other parameters than this was written for.
    """
    model_class: Any = original_class(model)
    original = not hasattr(model_class, "_decode")
    scaled = original and len(inspect.signature(model_class.decode).parameters) > 2
    scale = ("scale",) if scaled else ()
    coders: tuple[type[PatchedCoder], ...] = (
        (OriginalDecoder, OriginalEncoder) if original else (WanDecoder, WanEncoder)
    )
    check_coders(model, coders, ("self", "z", *scale), ("self", "x", *scale))
    return [cls(model, path, config) for cls in coders if getattr(model, cls.part) is not None]
