"""The common parts of the tiny models: sizes, a tokenizer, the settings on disk."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from turbo_rcm_patch.errors import ModelFolderError
from turbo_rcm_patch.tiny.prompts import words

SETTINGS_FILE: Final = "turbo_rcm.json"
_SPECIAL: Final = ("<pad>", "</s>", "<unk>")


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


def text_sizes(config: TinyConfig) -> dict[str, Any]:
    """Return the configuration of either text encoder."""
    return {
        "vocab_size": 64,
        "d_model": config.text_dim,
        "d_kv": 32,
        "num_heads": 4,
        "d_ff": config.text_dim * 5 // 2,
        "num_layers": config.text_layers,
        "dropout_rate": 0.0,
        "pad_token_id": 0,
        "eos_token_id": 1,
    }


def trained_folder(folder: Path) -> Path:
    """A folder that a training wrote.

    Raises:
        ModelFolderError: It is none.
    """
    if not (folder / SETTINGS_FILE).exists():
        raise ModelFolderError(
            "model",
            expected=f"a folder with {SETTINGS_FILE}",
            got=str(folder),
            remedy="Train it first",
        )
    return folder


def tokenize(
    tokenizer: PreTrainedTokenizerFast, texts: list[str], length: int
) -> tuple[Tensor, Tensor]:
    """Ids and mask [B, L] int64, padded to `length`."""
    tokens = tokenizer(
        texts, padding="max_length", max_length=length, truncation=True, return_tensors="pt"
    )
    return tokens.input_ids, tokens.attention_mask


def half(model: nn.Module, dtype: torch.dtype, keep: tuple[str, ...] = ()) -> None:
    """Round all weights in place, but those of the modules named in `keep`."""
    for name, parameter in model.named_parameters():
        if not any(part in name.split(".") for part in keep):
            parameter.data = parameter.data.to(dtype)


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
