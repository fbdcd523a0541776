"""Tiny random CogVideoX and ConsisID transformers of every supported kind, and their inputs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers import CogVideoXTransformer3DModel, ConsisIDTransformer3DModel
from diffusers.models.attention_processor import FusedCogVideoXAttnProcessor2_0
from diffusers.models.embeddings import get_3d_rotary_pos_embed
from torch import nn

BASE: dict[str, Any] = {
    "num_attention_heads": 2,
    "attention_head_dim": 64,
    "in_channels": 4,
    "out_channels": 4,
    "time_embed_dim": 16,
    "text_embed_dim": 16,
    "num_layers": 2,
    "sample_width": 8,
    "sample_height": 12,
    "sample_frames": 13,
    "max_text_seq_length": 7,
}
#: Latent frames, rows and columns of the patched video, text tokens.
FRAMES, HEIGHT, WIDTH, TEXT = 4, 6, 4, 7
FACE: dict[str, Any] = {
    "is_train_face": True,
    "LFE_id_dim": 16,
    "LFE_vit_dim": 8,
    "LFE_depth": 5,
    "LFE_dim_head": 8,
    "LFE_num_heads": 2,
    "LFE_num_id_token": 2,
    "LFE_num_querie": 3,
    "LFE_output_dim": 85,
    "LFE_ff_mult": 2,
    "cross_attn_dim_head": 16,
    "cross_attn_num_heads": 2,
}


@dataclass(frozen=True)
class Case:
    """A configuration, its input, and how many of its pairs are left as written."""

    name: str
    config: dict[str, Any] = field(default_factory=dict)
    rotary: bool = False
    fuse_qkv: bool = False
    unfuse: bool = False
    consisid: bool = False
    as_written: int = 0

    def model(self, dtype: torch.dtype = torch.float32) -> Any:
        config = self.config | {"use_rotary_positional_embeddings": self.rotary}
        made = cogvideox(self.consisid, **config)
        if self.fuse_qkv and self.consisid:
            fuse_by_hand(made)
        elif self.fuse_qkv:
            made.fuse_qkv_projections()
        if self.unfuse:
            made.unfuse_qkv_projections()
        for tensor in (*made.parameters(), *made.buffers()):
            tensor.data = tensor.data.to(dtype)
        return made

    def inputs(self, batch: int = 1, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(1)

        def noise(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(dtype)

        channels = self.config.get("in_channels", 4)
        given: dict[str, Any] = {
            "hidden_states": noise(batch, FRAMES, channels, 2 * HEIGHT, 2 * WIDTH),
            "timestep": torch.tensor([500] * batch),
            "encoder_hidden_states": noise(batch, TEXT, 16),
            "return_dict": False,
        }
        if self.rotary:
            frames = FRAMES // self.config.get("patch_size_t", 1)
            given["image_rotary_emb"] = get_3d_rotary_pos_embed(
                self.config.get("attention_head_dim", 64),
                ((0, 0), (HEIGHT, WIDTH)),
                (HEIGHT, WIDTH),
                frames,
            )
        if "ofs_embed_dim" in self.config:
            given["ofs"] = torch.full((1,), 2.0)
        if "is_train_face" in self.config:
            given["id_cond"] = noise(batch, 16)
            given["id_vit_hidden"] = [noise(batch, 6, 8) for _ in range(5)]
        return given


#: Names of the two classes.
COGVIDEOX, CONSISID = BOTH_CLASSES = ("CogVideoXTransformer3DModel", "ConsisIDTransformer3DModel")

CASES = [
    Case("2b"),
    Case("5b", rotary=True),
    Case("5b-i2v", {"in_channels": 8, "use_learned_positional_embeddings": True}, rotary=True),
    Case("1.5-t2v", {"patch_size_t": 2, "patch_bias": False}, rotary=True),
    Case(
        "1.5-i2v",
        {"patch_size_t": 2, "patch_bias": False, "in_channels": 8, "ofs_embed_dim": 16},
        rotary=True,
    ),
    Case("fused-qkv", rotary=True, fuse_qkv=True),
    Case("fused-qkv-undone", rotary=True, fuse_qkv=True, unfuse=True),
    Case("no-affine", {"norm_elementwise_affine": False}),
    Case("no-bias", {"attention_bias": False}, fuse_qkv=True),
    Case("geglu", {"activation_fn": "geglu"}),
    Case("three-heads-of-16", {"num_attention_heads": 3, "attention_head_dim": 16}, rotary=True),
    Case("consisid-fused-qkv", rotary=True, fuse_qkv=True, consisid=True),
    Case("consisid", rotary=True, consisid=True),
    Case("consisid-face", FACE, rotary=True, consisid=True, as_written=1),
]
ROTARY = CASES[1]
#: One case of each class, for what costs more time.
ONE_EACH = [ROTARY, CASES[-2]]


def widened(inputs: dict[str, Any]) -> dict[str, Any]:
    """The same inputs in fp32."""
    return {
        name: [part.float() for part in value]
        if isinstance(value, list)
        else value.float()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
        else value
        for name, value in inputs.items()
    }


def fuse_by_hand(model: Any) -> None:
    """ConsisID's `fuse_qkv_projections` does nothing: its attentions are not of the kind that it
    looks for."""
    for block in model.transformer_blocks:
        block.attn1.fuse_projections()
        block.attn1.set_processor(FusedCogVideoXAttnProcessor2_0())


def cogvideox(consisid: bool = False, **config: Any) -> Any:
    """A seeded tiny model in which attention reaches the output: live gates, peaked queries."""
    torch.manual_seed(0)
    kind = ConsisIDTransformer3DModel if consisid else CogVideoXTransformer3DModel
    model = kind(**{**BASE, **config}).eval().requires_grad_(False)
    for block in model.transformer_blocks:
        for norm in (block.norm1, block.norm2):
            nn.init.normal_(norm.linear.bias, 0.3, 0.4)
            _spread(norm.norm)
        _spread(block.attn1.norm_q, 3.0)
        _spread(block.attn1.norm_k)
    return model


def _spread(norm: Any, scale: float = 1.0) -> None:
    if norm.weight is not None:
        nn.init.normal_(norm.weight, scale, 0.2)
        nn.init.normal_(norm.bias, 0.0, 0.2)
