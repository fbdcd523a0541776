"""A complete but untrained CogVideoXPipeline that generates in a fraction of a second."""

from __future__ import annotations

import torch
from diffusers import (
    AutoencoderKLCogVideoX,
    CogVideoXDDIMScheduler,
    CogVideoXImageToVideoPipeline,
    CogVideoXPipeline,
    CogVideoXTransformer3DModel,
    CogVideoXVideoToVideoPipeline,
    ConsisIDTransformer3DModel,
)
from diffusers.pipelines.consisid.pipeline_consisid import (
    ConsisIDPipeline,
)  # not from diffusers: needs no OpenCV
from transformers import T5Config, T5EncoderModel

from tests.patching.models import FACE
from tests.video.micro import WORDS, tokenizer

LEVELS = 3


PIPELINES = {
    "text": CogVideoXPipeline,
    "image": CogVideoXImageToVideoPipeline,
    "video": CogVideoXVideoToVideoPipeline,
    "face": ConsisIDPipeline,
}


def micro_cogvideox(
    *, seed: int = 0, rotary: bool = True, patch_t: int | None = None, source: str = "text"
):
    """A pipeline in fp32 whose attention really reaches its output (gates are raised).

    From an image, one of 1.5 (`patch_t`) is told the offset of its frames too.
    """
    face = source == "face"
    image = source == "image" or face
    network = ConsisIDTransformer3DModel if face else CogVideoXTransformer3DModel
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        vae = AutoencoderKLCogVideoX(
            down_block_types=("CogVideoXDownBlock3D",) * LEVELS,
            up_block_types=("CogVideoXUpBlock3D",) * LEVELS,
            block_out_channels=(8,) * LEVELS, layers_per_block=1, norm_num_groups=2,
            latent_channels=4, scaling_factor=0.7,
        )  # fmt: skip
        text = T5EncoderModel(
            T5Config(
                vocab_size=len(WORDS) + 3, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4,
                relative_attention_num_buckets=8, feed_forward_proj="gated-gelu", dropout_rate=0.0,
            )
        )  # fmt: skip
        more = FACE if face else {
            "ofs_embed_dim": 32 if image and patch_t else None, "patch_size_t": patch_t
        }  # fmt: skip
        transformer = network(
            num_attention_heads=2, attention_head_dim=64, in_channels=8 if image else 4,
            out_channels=4,
            time_embed_dim=32, text_embed_dim=32, num_layers=2, sample_width=8, sample_height=8,
            sample_frames=5, max_text_seq_length=16,
            use_rotary_positional_embeddings=rotary, **more,
        )  # fmt: skip
        with torch.no_grad():
            for block in transformer.transformer_blocks:
                for norm in (block.norm1, block.norm2):
                    gates = norm.linear.bias.view(6, -1)
                    gates[[2, 5]] += 0.3
                block.attn1.norm_q.weight *= 2.0
    return PIPELINES[source](
        tokenizer=tokenizer(),
        text_encoder=text.eval(),
        vae=vae.eval(),
        transformer=transformer.eval(),
        scheduler=CogVideoXDDIMScheduler(
            beta_schedule="scaled_linear",
            clip_sample=False,
            prediction_type="v_prediction",
            rescale_betas_zero_snr=True,
            timestep_spacing="trailing",
        ),
    )
