"""A complete but untrained WanPipeline that generates in a fraction of a second."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from diffusers import (
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

WORDS = [
    *("a", "red", "green", "blue", "circle", "square", "ring", "moves"),
    *("left", "right", "up", "down", "on", "black", "white"),
]
#: Everything `generate` needs to know to be quick here.
SMALL = {"height": 32, "width": 32, "num_frames": 5, "max_sequence_length": 16}


def tokenizer() -> PreTrainedTokenizerFast:
    vocab = {word: i for i, word in enumerate(["<pad>", "</s>", "<unk>", *WORDS])}
    raw = Tokenizer(WordLevel(vocab, unk_token="<unk>"))
    raw.pre_tokenizer = Whitespace()
    raw.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )


def micro_pipe(*, seed: int = 0, experts: bool = False) -> WanPipeline:
    """A pipeline in fp32 whose attention really reaches its output (gates are raised)."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        vae = AutoencoderKLWan(
            base_dim=4, z_dim=4, dim_mult=[1, 2, 2, 2], num_res_blocks=1,
            temperal_downsample=[False, True, True], latents_mean=[0.0] * 4, latents_std=[1.0] * 4,
        )  # fmt: skip
        text = UMT5EncoderModel(
            UMT5Config(
                vocab_size=len(WORDS) + 3, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4,
                relative_attention_num_buckets=8, feed_forward_proj="gated-gelu", dropout_rate=0.0,
            )
        )  # fmt: skip
        transformers = [_transformer() for _ in range(2 if experts else 1)]
    return WanPipeline(
        tokenizer=tokenizer(),
        text_encoder=text.eval(),
        vae=vae.eval(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        transformer=transformers[0],
        transformer_2=transformers[1] if experts else None,
        boundary_ratio=0.9 if experts else None,
    )


def _transformer() -> WanTransformer3DModel:
    model = WanTransformer3DModel(
        patch_size=(1, 1, 1), num_attention_heads=2, attention_head_dim=64, in_channels=4,
        out_channels=4, text_dim=32, freq_dim=32, ffn_dim=128, num_layers=2, cross_attn_norm=True,
        qk_norm="rms_norm_across_heads", rope_max_seq_len=32,
    )  # fmt: skip
    with torch.no_grad():
        for block in model.blocks:
            block.scale_shift_table[:, [2, 5]] += 0.3
            block.attn1.norm_q.weight *= 4.0
    return model.eval()


def save(pipe: WanPipeline, folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipe.save_pretrained(folder)
    return folder
