"""A video transformer that no family of the package knows: Wan's block with other names, and with
a norm of the text in front of cross-attention."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Norm(nn.LayerNorm):
    """A layer norm in fp32."""

    def forward(self, x: Tensor) -> Tensor:
        given = [p if p is None else p.float() for p in (self.weight, self.bias)]
        return F.layer_norm(x.float(), self.normalized_shape, *given, self.eps)


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(dim, dim) for _ in "qkvo")
        self.q_norm, self.k_norm = nn.RMSNorm(dim, eps=1e-6), nn.RMSNorm(dim, eps=1e-6)

    def forward(
        self, x: Tensor, context: Tensor | None = None, rotary: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        source = x if context is None else context
        q, k = self.q_norm(self.q_proj(x)), self.k_norm(self.k_proj(source))
        q, k, v = (
            y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (q, k, self.v_proj(source))
        )
        if rotary is not None:
            q, k = (_rotate(y, *rotary) for y in (q, k))
        out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.o_proj(out)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs of neighbouring channels, as in Wan; x [B, H, N, D], cos and sin [N, D]."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([-odd, even], -1).flatten(-2)
    return (x.float() * cos + turned * sin).type_as(x)


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.pre_norm = Norm(dim, elementwise_affine=False)
        self.self_attention = Attention(dim, heads)
        self.cross_norm, self.text_norm = Norm(dim), Norm(dim)
        self.cross_attention = Attention(dim, heads)
        self.mlp_norm = Norm(dim, elementwise_affine=False)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU("tanh"), nn.Linear(2 * dim, dim))
        self.table = nn.Parameter(torch.randn(1, 6, dim) * dim**-0.5)

    def forward(
        self, x: Tensor, text: Tensor, time: Tensor, rotary: tuple[Tensor, Tensor]
    ) -> Tensor:
        rows = (self.table + time.float()).chunk(6, 1)
        h = (self.pre_norm(x) * (1 + rows[1]) + rows[0]).type_as(x)
        x = (x.float() + self.self_attention(h, None, rotary).float() * rows[2]).type_as(x)
        h = self.cross_norm(x).type_as(x)
        x = x + self.cross_attention(h, self.text_norm(text).type_as(text))
        h = (self.mlp_norm(x) * (1 + rows[4]) + rows[3]).type_as(x)
        return (x.float() + self.mlp(h).float() * rows[5]).type_as(x)


class VariantTransformer(nn.Module):
    def __init__(self, dim: int = 128, heads: int = 2, blocks: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(dim, heads) for _ in range(blocks))
        self.head = nn.Linear(dim, dim)

    def forward(self, x: Tensor, text: Tensor, time: Tensor, angles: Tensor) -> Tensor:
        """x [B, N, C], text [B, T, C], time [B, 6, C], angles [N, D]."""
        rotary = angles.cos(), angles.sin()
        for layer in self.layers:
            x = layer(x, text, time, rotary)
        return self.head(x)


def variant(dtype: torch.dtype = torch.float32) -> VariantTransformer:
    """A seeded tiny model in which attention reaches the output: live gates, peaked queries."""
    torch.manual_seed(0)
    model = VariantTransformer().eval().requires_grad_(False)
    for block in model.layers:
        block.table.data[:, (2, 5)] += 0.7
        block.self_attention.q_norm.weight.data.mul_(3)
        block.cross_attention.q_norm.weight.data.mul_(3)
        for norm in (block.cross_norm, block.text_norm):
            norm.weight.data.normal_(1.0, 0.2)
            norm.bias.data.normal_(0.0, 0.2)
    return model.to(dtype)


def inputs(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "x": noise(2, 60, 128).to(dtype),
        "text": noise(2, 7, 128).to(dtype),
        "time": 0.1 * noise(2, 6, 128),
        "angles": noise(60, 32).repeat_interleave(2, -1),
    }
