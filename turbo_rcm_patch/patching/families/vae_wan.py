"""The VAE of Wan 2.1, and of Wan 2.2's 5B (`is_residual`), in diffusers 0.42.1."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import torch
from diffusers.models.autoencoders import autoencoder_kl_wan as author
from diffusers.models.autoencoders.vae import DecoderOutput
from torch import Tensor, nn

from turbo_rcm_patch.config import PatchConfig
from turbo_rcm_patch.patching.block import PatchedBlock
from turbo_rcm_patch.patching.families import wan_coders
from turbo_rcm_patch.patching.families.common import check_parameters
from turbo_rcm_patch.patching.families.wan_coders import Layout, Level, Resnet
from turbo_rcm_patch.skip import SkipPair

_INSIDE: Final = frozenset(
    {
        author.WanCausalConv3d, author.WanRMS_norm, author.WanUpsample, author.WanResample,
        author.WanResidualBlock, author.WanAttentionBlock, author.WanMidBlock, author.WanUpBlock,
        author.WanResidualUpBlock, author.WanResidualDownBlock, author.AvgDown3D, author.DupUp3D,
        nn.ModuleList, nn.Sequential, nn.Conv2d, nn.ZeroPad2d, nn.SiLU, nn.Dropout, nn.Identity,
    }
)  # fmt: skip


class _Coder(wan_coders.WanCoder):
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

    def layout(self) -> Layout:
        coder, middle = self.block, self.block.mid_block
        blocks = [middle.resnets[0]]
        for attn, resnet in zip(middle.attentions, middle.resnets[1:], strict=True):
            blocks += [attn, resnet] if attn is not None else [resnet]
        held = coder.up_blocks if self.part == "decoder" else coder.down_blocks
        return Layout(coder.conv_in, list(map(_block, blocks)), list(_levels(held)),
                      coder.norm_out, coder.conv_out)  # fmt: skip


class WanDecoder(_Coder, wan_coders.Decoder):
    """Replaces `AutoencoderKLWan._decode`."""

    __slots__ = ()
    caller = "_decode"

    def untiled(self, z: Tensor, return_dict: bool = True) -> Any:
        x = self.vae.post_quant_conv(z)
        out = self.coded(self.new_video(x), x)
        if self.vae.config.patch_size is not None:
            out = author.unpatchify(out, patch_size=self.vae.config.patch_size)
        out = torch.clamp(out, min=-1.0, max=1.0)
        return DecoderOutput(sample=out) if return_dict else (out,)


class WanEncoder(_Coder, wan_coders.Encoder):
    """Replaces `AutoencoderKLWan._encode`."""

    __slots__ = ()
    caller = "_encode"
    halves = 2  # mean and logarithm of the variance

    def untiled(self, x: Tensor) -> Any:
        frames = 1 + (x.shape[2] - 1) // 4 * 4  # The author leaves out the rest too.
        out = self.coded(self.new_video(x), x[:, :, :frames])
        return self.vae.quant_conv(out)


def _block(module: Any) -> Any:
    """Return the modules of a `WanResidualBlock`, or an attention itself."""
    if not isinstance(module, author.WanResidualBlock):
        return module
    plain = isinstance(module.conv_shortcut, nn.Identity)
    return Resnet(module.norm1, module.conv1, module.norm2, module.conv2,
                  None if plain else module.conv_shortcut)  # fmt: skip


def _levels(held: Iterable[Any]) -> Iterable[Level]:
    """Yield the levels of a decoder or an encoder."""
    blocks: list[Any] = []  # of Wan 2.1's encoder, whose blocks are in one list
    for one in held:
        if isinstance(one, author.WanResample):
            yield Level(blocks, one)
            blocks = []
        elif not hasattr(one, "resnets"):
            blocks.append(_block(one))
        else:
            ups = getattr(one, "upsamplers", None)  # of a WanUpBlock
            one_of = getattr(one, "upsampler", None) or getattr(one, "downsampler", None)
            shortcut = getattr(one, "avg_shortcut", None)
            yield Level(
                list(map(_block, one.resnets)), one_of if ups is None else ups[0], shortcut
            )
    if blocks:
        yield Level(blocks)


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
