"""Tiny random Wan transformers of every supported kind, and how to run them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from tests.measures import relative_l2
from turbo_rcm_patch import PatchConfig

#: The fused path with torch's own attention: tight comparisons.
EXACT = PatchConfig(attention="exact", guard=False)
INT8 = PatchConfig(guard=False)

BASE: dict[str, Any] = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 2,
    "attention_head_dim": 64,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 16,
    "freq_dim": 32,
    "ffn_dim": 64,
    "num_layers": 2,
    "rope_max_seq_len": 32,
}
I2V: dict[str, Any] = {"image_dim": 16, "added_kv_proj_dim": 128}


@dataclass(frozen=True)
class Case:
    """A configuration, its input, and how many pairs of each kind run how."""

    name: str
    config: dict[str, Any] = field(default_factory=dict)
    per_token: bool = False
    fuse_qkv: bool = False
    image: bool = False
    fused: int = 6

    def model(self, dtype: torch.dtype = torch.float32) -> Any:
        made = wan(**self.config, **(I2V if self.image else {}))
        if self.fuse_qkv:
            made.fuse_qkv_projections()
        if dtype != torch.float32:
            keep = ("time_embedder", "scale_shift_table", "norm1", "norm2", "norm3", "rope")
            for name, parameter in made.named_parameters():
                if not any(part in name for part in keep):
                    parameter.data = parameter.data.to(dtype)
        return made

    def inputs(self, batch: int = 1, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
        tokens = 3 * 4 * 5
        generator = torch.Generator().manual_seed(1)

        def noise(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(dtype)

        given: dict[str, Any] = {
            "hidden_states": noise(batch, 4, 3, 8, 10),
            "timestep": torch.tensor([500.0] * batch),
            "encoder_hidden_states": noise(batch, 512 if self.image else 7, 16),
            "return_dict": False,
        }
        if self.image:
            given["encoder_hidden_states_image"] = noise(batch, 5, 16)
        if self.per_token:
            given["timestep"] = torch.rand(batch, tokens, generator=generator) * 1000
        return given


CASES = [
    Case("2.1-t2v"),
    Case("2.1-i2v", image=True, fused=8),
    Case("2.2-a14b-no-cross-norm", {"cross_attn_norm": False}),
    Case("2.2-ti2v-gate-per-token", per_token=True),
    Case("fused-qkv", fuse_qkv=True),
    Case("fused-qkv-i2v", fuse_qkv=True, image=True, fused=8),
    Case("head-dim-128", {"attention_head_dim": 128, "num_attention_heads": 1}),
    Case("head-dim-24-three-heads", {"attention_head_dim": 24, "num_attention_heads": 3}),
]


def wan(**config: Any) -> Any:
    """A seeded tiny model in which attention reaches the output: live gates, peaked queries."""
    torch.manual_seed(0)
    model = WanTransformer3DModel(**{**BASE, **config}).eval().requires_grad_(False)
    for block in model.blocks:
        block.scale_shift_table.data[:, (2, 5)] += 0.7
        block.attn1.norm_q.weight.data.mul_(3)
        block.attn2.norm_q.weight.data.mul_(3)
        nn.init.normal_(block.attn1.norm_k.weight, 1.0, 0.2)
    return model


def with_lora(model: nn.Module, *targets: str) -> None:
    """A LoRA with weights that are not zero in Linears of a module that is not diffusers'."""
    torch.manual_seed(7)
    config = LoraConfig(r=4, lora_alpha=16, target_modules=list(targets), init_lora_weights=False)
    inject_adapter_in_model(config, model)
    model.eval().requires_grad_(False)


def run(model: Any, **inputs: Any) -> torch.Tensor:
    """One forward, without gradients."""
    with torch.no_grad():
        output: torch.Tensor = model(**(inputs or CASES[0].inputs()))[0]
    return output


relative = relative_l2


def dicts(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Every instance attribute of every module, containers copied one level deep."""
    return {
        name: {key: _copied(value) for key, value in vars(module).items()}
        for name, module in model.named_modules()
    }


def _copied(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else value
