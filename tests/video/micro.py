"""Complete but untrained Wan pipelines that generate in a fraction of a second."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLWan,
    ChronoEditPipeline,
    ChronoEditTransformer3DModel,
    FlowMatchEulerDiscreteScheduler,
    SkyReelsV2Pipeline,
    SkyReelsV2Transformer3DModel,
    UniPCMultistepScheduler,
    WanAnimatePipeline,
    WanAnimateTransformer3DModel,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
    WanVACEPipeline,
    WanVACETransformer3DModel,
    WanVideoToVideoPipeline,
)
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    CLIPVisionModel,
    PreTrainedTokenizerFast,
    UMT5Config,
    UMT5EncoderModel,
)

from tests.patching.models import ANIMATE

WORDS = [
    *("a", "red", "green", "blue", "circle", "square", "ring", "moves"),
    *("left", "right", "up", "down", "on", "black", "white"),
]
#: Configuration of a transformer of the Wan family.
TRANSFORMER: dict[str, Any] = dict(
    patch_size=(1, 1, 1), num_attention_heads=2, attention_head_dim=64, in_channels=4,
    out_channels=4, text_dim=32, freq_dim=32, ffn_dim=128, num_layers=2, cross_attn_norm=True,
    qk_norm="rms_norm_across_heads", rope_max_seq_len=32,
)  # fmt: skip
#: Everything `generate` needs to know to be quick here.
SMALL = {"height": 32, "width": 32, "num_frames": 5, "max_sequence_length": 16}


def options(**settings: object) -> list[str]:
    """Settings as options of the command line."""
    pairs = ((f"--{name.replace('_', '-')}", str(value)) for name, value in settings.items())
    return [word for pair in pairs for word in pair]


QUICK = options(**SMALL, steps=2, device="cpu")


def hooked(pipe: Any) -> dict[str, bool]:
    """Which parts of a pipeline have hooks, as offloading puts them."""
    names = {"_hf_hook", "_diffusers_hook"}
    return {
        name: any(names & vars(module).keys() for module in part.modules())
        for name, part in pipe.components.items()
        if isinstance(part, torch.nn.Module)
    }


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
        parts = vae_and_text()
        transformers = [_transformer() for _ in range(2 if experts else 1)]
    return WanPipeline(**parts, **_experts(transformers))


def micro_token_time_pipe(*, image: bool) -> WanPipeline | WanImageToVideoPipeline:
    """As Wan 2.2 TI2V: a timestep per token, and the image in the place of the first frame."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        parts = vae_and_text()
        transformers = [_transformer(patch_size=(1, 2, 2))]
    cls = WanImageToVideoPipeline if image else WanPipeline
    return cls(**parts, **_experts(transformers), expand_timesteps=True)


def micro_image_pipe(*, experts: bool, last: bool = False) -> WanImageToVideoPipeline:
    """As Wan 2.2 A14B I2V with two experts, or as Wan 2.1 I2V with a CLIP image encoder (and as
    FLF2V, with a last frame); the image is in the 4 mask and 4 condition channels of the
    transformer's input."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        parts = vae_and_text()
        if experts:
            return WanImageToVideoPipeline(
                **parts, **_experts([_transformer(in_channels=12) for _ in range(2)])
            )
        network = _transformer(
            in_channels=12, image_dim=16, added_kv_proj_dim=128,
            pos_embed_seq_len=2 * 5 if last else None,
        )  # fmt: skip
        return WanImageToVideoPipeline(**parts, **_experts([network]), **image_encoder())


def micro_video_pipe() -> WanVideoToVideoPipeline:
    """From a video."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return WanVideoToVideoPipeline(
            **vae_and_text(), transformer=_transformer(), scheduler=unipc(flow_shift=3.0)
        )  # fmt: skip


def image_encoder() -> dict[str, Any]:
    """CLIP, of 16 channels."""
    config = CLIPVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        image_size=32, patch_size=16,
    )  # fmt: skip
    return {
        "image_encoder": CLIPVisionModel(config).eval(),
        "image_processor": CLIPImageProcessor(size=32, crop_size=32),
    }


def unipc(**config: Any) -> UniPCMultistepScheduler:
    """Wan's own scheduler."""
    return UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, **config
    )


def vace() -> WanVACEPipeline:
    network = WanVACETransformer3DModel(
        **TRANSFORMER | {"patch_size": (1, 2, 2)}, vace_layers=[0, 1], vace_in_channels=72
    )
    return WanVACEPipeline(**vae_and_text(), transformer=lively(network), scheduler=unipc())


def animate() -> WanAnimatePipeline:
    network = WanAnimateTransformer3DModel(
        **TRANSFORMER | ANIMATE | {"image_dim": 16}, added_kv_proj_dim=128
    )
    parts = vae_and_text() | image_encoder()
    return WanAnimatePipeline(**parts, transformer=lively(network), scheduler=unipc())


def skyreels(cls: Any = SkyReelsV2Pipeline) -> Any:
    network = SkyReelsV2Transformer3DModel(**TRANSFORMER)
    return cls(**vae_and_text(), transformer=lively(network), scheduler=unipc())


def chronoedit() -> ChronoEditPipeline:
    network = ChronoEditTransformer3DModel(
        **TRANSFORMER | {"in_channels": 12}, image_dim=16, added_kv_proj_dim=128
    )
    parts = vae_and_text() | image_encoder()
    return ChronoEditPipeline(**parts, transformer=lively(network), scheduler=unipc())


def _experts(transformers: list[WanTransformer3DModel]) -> dict[str, Any]:
    two = len(transformers) == 2
    return {
        "transformer": transformers[0],
        "transformer_2": transformers[1] if two else None,
        "boundary_ratio": 0.9 if two else None,
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=3.0),
    }


def vae_and_text() -> dict[str, Any]:
    """What the pipelines of the family share beside their transformer."""
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
    return {"tokenizer": tokenizer(), "text_encoder": text.eval(), "vae": vae.eval()}


def _transformer(**config: Any) -> WanTransformer3DModel:
    return lively(WanTransformer3DModel(**{**TRANSFORMER, **config}))


def lively(model: Any) -> Any:
    """Raise the gates and sharpen the queries of every block."""
    with torch.no_grad():
        for block in (*getattr(model, "vace_blocks", ()), *model.blocks):
            block.scale_shift_table[:, [2, 5]] += 0.3
            block.attn1.norm_q.weight *= 4.0
    return model.eval()


#: Wan's pipelines that run with few steps.
WAN_PIPES: dict[str, Callable[[], Any]] = {
    "t2v": micro_pipe,
    "t2v-two-experts": partial(micro_pipe, experts=True),
    "t2v-token-times": partial(micro_token_time_pipe, image=False),
    "i2v-clip": partial(micro_image_pipe, experts=False),
    "i2v-two-experts": partial(micro_image_pipe, experts=True),
    "i2v-token-times": partial(micro_token_time_pipe, image=True),
}


def save(pipe: WanPipeline, folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipe.save_pretrained(folder)
    return folder
