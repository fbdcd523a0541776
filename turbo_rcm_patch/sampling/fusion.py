"""Measure the fusion alone: fused against unfused over the same quantised attention, in fp32.

The errors of attention cancel here. What remains is the effect of closing the skip in a kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from turbo_rcm_patch.config import PatchConfig
from turbo_rcm_patch.ops import AttentionSpec, attention_project_skip, attention_skip
from turbo_rcm_patch.sampling.metrics import relative_l2
from turbo_rcm_patch.sampling.network import highest_precision

__all__ = ["FusionNumber", "fusion_number"]


@dataclass(frozen=True, slots=True)
class FusionNumber:
    """Relative L2 distances of `residual + gate * (attention @ W^T + b)`.

    Attributes:
        fused_vs_unfused: Fused against unfused.
        fused_vs_fp64: Fused against fp64 over the same quantised attention.
        unfused_vs_fp64: Unfused against the same.
    """

    fused_vs_unfused: float
    fused_vs_fp64: float
    unfused_vs_fp64: float


@torch.no_grad()
def fusion_number(
    config: PatchConfig,
    device: torch.device,
    *,
    heads: int,
    head_dim: int,
    tokens: int = 384,
    seed: int = 0,
) -> FusionNumber:
    """Measure one block's output projection and skip on random fp32 numbers.

    Args:
        config: How to patch.
        device: Where the kernels run.
        heads: Of the model in question.
        head_dim: Of the model in question.
        tokens: Sequence length.
        seed: Of the numbers, drawn on the CPU.
    """
    channels = heads * head_dim
    generator = torch.Generator("cpu").manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device)

    q, k, v, residual = (draw(1, tokens, channels) for _ in range(4))
    weight, bias, gate = (
        draw(channels, channels) / channels**0.5,
        draw(channels),
        draw(1, 1, channels),
    )
    spec = AttentionSpec(
        heads=heads,
        attention=config.attention,
        pv=config.pv,
        smooth_k=config.smooth_k,
        impl=config.impl,
    )
    with highest_precision():
        fused = attention_project_skip(
            q, k, v, weight, bias, spec, residual=residual, c_out=gate, form=config.form
        )
        attention = attention_skip(q, k, v, spec)
        unfused = residual + gate * (attention @ weight.T + bias)
        truth = residual.double() + gate.double() * (
            attention.double() @ weight.double().T + bias.double()
        )
    return FusionNumber(
        fused_vs_unfused=relative_l2(fused, unfused),
        fused_vs_fp64=relative_l2(fused, truth),
        unfused_vs_fp64=relative_l2(unfused, truth),
    )
