"""The parts of the tiny Wan: sizes, a tokenizer over the world's words, the folder on disk."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import torch
from diffusers import (
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

from turbo_rcm_patch.tiny.prompts import words

SETTINGS_FILE: Final = "turbo_rcm.json"
_SPECIAL: Final = ("<pad>", "</s>", "<unk>")
_FP32_PARTS: Final = tuple(WanTransformer3DModel._keep_in_fp32_modules)


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyConfig:
    """Sizes of the tiny Wan.

    The VAE shrinks by 4 in space and in time, so 17 frames of 128x128 are 5x32x32 latents and,
    with patches of (1, 2, 2), 1,280 tokens.
    """

    size: int = 128
    frames: int = 17
    latent_channels: int = 8
    vae_dim: int = 16
    vae_mult: tuple[int, ...] = (1, 2, 4)
    vae_blocks: int = 1
    heads: int = 4
    head_dim: int = 64
    layers: int = 6
    ffn_dim: int = 512
    text_dim: int = 128
    text_layers: int = 2
    max_sequence_length: int = 24
    settings: dict[str, float | int | str] = field(
        default_factory=lambda: {
            "fps": 8,
            "steps": 4,
            "sigma_max": 80,
            "guidance_scale": 1.0,
        }
    )

    @classmethod
    def micro(cls) -> TinyConfig:
        """The default sizes made `small`."""
        return cls().small()

    def small(self) -> TinyConfig:
        """The same architecture small enough to train a few steps in a unit test."""
        return replace(
            self,
            size=32,
            frames=9,
            vae_dim=8,
            vae_mult=(1, 1, 2),
            heads=1,
            layers=1,
            ffn_dim=64,
            text_dim=64,
        )

    @property
    def latent_shape(self) -> tuple[int, int, int, int]:
        """(C, F, H, W) of one video's latents."""
        side = self.size // 4
        return self.latent_channels, (self.frames - 1) // 4 + 1, side, side


def build_vae(config: TinyConfig) -> AutoencoderKLWan:
    """A small Wan video autoencoder with random weights; latents start unnormalised."""
    vae = AutoencoderKLWan(
        base_dim=config.vae_dim,
        z_dim=config.latent_channels,
        dim_mult=list(config.vae_mult),
        num_res_blocks=config.vae_blocks,
        temperal_downsample=[True, True],
        latents_mean=[0.0] * config.latent_channels,
        latents_std=[1.0] * config.latent_channels,
        scale_factor_temporal=4,
        scale_factor_spatial=4,
    )
    # Quiet latents at first: a posterior of unit variance would drown the young encoder.
    with torch.no_grad():
        vae.quant_conv.bias[config.latent_channels :] = -6.0
    return vae


def build_transformer(config: TinyConfig) -> WanTransformer3DModel:
    """A small Wan transformer with random weights; it predicts the velocity noise - x0."""
    model = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=config.heads,
        attention_head_dim=config.head_dim,
        in_channels=config.latent_channels,
        out_channels=config.latent_channels,
        text_dim=config.text_dim,
        freq_dim=256,
        ffn_dim=config.ffn_dim,
        num_layers=config.layers,
        cross_attn_norm=True,
        rope_max_seq_len=64,
    )
    # Start from "predict nothing": the first steps do not explode.
    nn.init.zeros_(model.proj_out.weight)
    nn.init.zeros_(model.proj_out.bias)
    return model


def build_text_encoder(config: TinyConfig) -> UMT5EncoderModel:
    """A small umT5 encoder with random weights."""
    return UMT5EncoderModel(
        UMT5Config(
            vocab_size=64,
            d_model=config.text_dim,
            d_kv=32,
            num_heads=4,
            d_ff=config.text_dim * 5 // 2,
            num_layers=config.text_layers,
            dropout_rate=0.0,
            pad_token_id=0,
            eos_token_id=1,
        )
    )


def build_tokenizer(config: TinyConfig) -> PreTrainedTokenizerFast:
    """A word-level tokenizer over the caption grammar, in lower case, punctuation dropped."""
    vocabulary = {word: i for i, word in enumerate((*_SPECIAL, *words()))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Lowercase(), normalizers.Replace(Regex(r"[^a-z ]+"), " ")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", vocabulary["</s>"])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=config.max_sequence_length,
    )


def tokenize(
    tokenizer: PreTrainedTokenizerFast, texts: list[str], length: int
) -> tuple[Tensor, Tensor]:
    """Ids and mask [B, L] int64, padded to `length`."""
    tokens = tokenizer(
        texts, padding="max_length", max_length=length, truncation=True, return_tensors="pt"
    )
    return tokens.input_ids, tokens.attention_mask


def encode_text(encoder: UMT5EncoderModel, ids: Tensor, mask: Tensor) -> Tensor:
    """Embed captions exactly as `WanPipeline` does: zeros after the end of the text.

    Args:
        encoder: The text encoder.
        ids: [B, L] int64 token ids, padded.
        mask: [B, L] int64, 1 for a token.

    Returns:
        [B, L, text_dim] in the encoder's dtype.
    """
    hidden: Tensor = encoder(ids, mask).last_hidden_state
    return hidden * mask[..., None].to(hidden.dtype)


def half(model: nn.Module, dtype: torch.dtype, keep: tuple[str, ...] = ()) -> None:
    """Round all weights in place, but those of the modules named in `keep`."""
    for name, parameter in model.named_parameters():
        if not any(part in name.split(".") for part in keep):
            parameter.data = parameter.data.to(dtype)


def save_pipeline(
    folder: Path,
    config: TinyConfig,
    *,
    vae: AutoencoderKLWan,
    text_encoder: UMT5EncoderModel,
    transformer: WanTransformer3DModel,
) -> None:
    """Write a `WanPipeline` folder of less than 16 MiB, and the settings it was trained for.

    The transformer is stored in bf16 with the parts that diffusers keeps in fp32 left alone, so
    that loading in bf16 changes nothing; the VAE is stored in fp16, whose finer mantissa suits
    fp32 decoding; the text encoder stays in fp32, because transformers would load a half-precision
    file in half precision. The arguments are rounded in place: pass copies.
    """
    half(transformer, torch.bfloat16, _FP32_PARTS)
    half(vae, torch.float16)
    for model in (vae, transformer):  # where a part was once loaded from says nothing here
        model.register_to_config(_name_or_path="")
    pipe = WanPipeline(
        tokenizer=build_tokenizer(config),
        text_encoder=text_encoder,
        vae=vae,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0, stochastic_sampling=True),
        transformer=transformer,
    )
    pipe.save_pretrained(folder, safe_serialization=True)
    write_settings(folder, config)


def write_settings(folder: Path, config: TinyConfig) -> None:
    """Say in the folder how its model wants to be sampled."""
    settings = {
        "height": config.size,
        "width": config.size,
        "num_frames": config.frames,
        **config.settings,
        "max_sequence_length": config.max_sequence_length,
    }
    (folder / SETTINGS_FILE).write_text(json.dumps(settings, indent=2) + "\n")
