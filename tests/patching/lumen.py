"""A network for an exercise: Wan's block with other names, joined q, k and v, norms of a head,
a modulation that each block computes by itself, and one norm more, behind cross-attention."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class SelfMix(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.norm_query, self.norm_key = (nn.RMSNorm(dim // heads, eps=1e-6) for _ in "qk")
        self.back = nn.Linear(dim, dim)

    def forward(self, tokens: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.qkv(tokens).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        q, k = rotate(self.norm_query(q), cos, sin), rotate(self.norm_key(k), cos, sin)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return self.back(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class TextMix(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(dim, dim) for _ in "qkv")
        self.back = nn.Linear(dim, dim)

    def forward(self, tokens: Tensor, words: Tensor) -> Tensor:
        q, k, v = (
            x.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for x in (self.query(tokens), self.key(words), self.value(words))
        )
        return self.back(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs of neighbouring channels; x [B, N, H, D], cos and sin [N, D]."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([-odd, even], -1).flatten(-2)
    return (x.float() * cos[:, None] + turned * sin[:, None]).type_as(x)


class LumenBlock(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))
        self.ln_mix = nn.LayerNorm(dim, eps=1e-6, elementwise_affine=False)
        self.mix = SelfMix(dim, heads)
        self.ln_text = nn.LayerNorm(dim, eps=1e-6)
        self.text_mix = TextMix(dim, heads)
        self.ln_text_out = nn.LayerNorm(dim, eps=1e-6)
        self.ln_wide = nn.LayerNorm(dim, eps=1e-6, elementwise_affine=False)
        self.widen = nn.Linear(dim, 4 * dim)
        self.narrow = nn.Linear(4 * dim, dim)

    def forward(
        self, tokens: Tensor, words: Tensor, vec: Tensor, rope: tuple[Tensor, Tensor]
    ) -> Tensor:
        """tokens [B, N, C], words [B, T, C], vec [B, C], rope: cos and sin [N, D]."""
        scale1, shift1, gate1, scale2, shift2, gate2 = self.modulation(vec)[:, None].chunk(6, -1)
        tokens = tokens + gate1 * self.mix(self.ln_mix(tokens) * (1 + scale1) + shift1, *rope)
        tokens = tokens + self.ln_text_out(self.text_mix(self.ln_text(tokens), words))
        wide = self.widen(self.ln_wide(tokens) * (1 + scale2) + shift2)
        return tokens + gate2 * self.narrow(F.gelu(wide, approximate="tanh"))


class LumenTransformer(nn.Module):
    def __init__(self, dim: int = 128, heads: int = 2, blocks: int = 2) -> None:
        super().__init__()
        self.stack = nn.ModuleList(LumenBlock(dim, heads) for _ in range(blocks))
        self.head = nn.Linear(dim, dim)

    def forward(self, tokens: Tensor, words: Tensor, vec: Tensor, angles: Tensor) -> Tensor:
        """angles [N, D]; the others as in a block."""
        rope = angles.cos(), angles.sin()
        for block in self.stack:
            tokens = block(tokens, words, vec, rope)
        return self.head(tokens)


def lumen(dtype: torch.dtype = torch.float32) -> LumenTransformer:
    """A seeded tiny model in which attention reaches the output."""
    torch.manual_seed(0)
    model = LumenTransformer().eval().requires_grad_(False)
    for block in model.stack:
        block.modulation[1].bias.data.unflatten(0, (6, -1))[[2, 5]] += 0.7
        for norm in (block.ln_text, block.ln_text_out, block.mix.norm_query, block.mix.norm_key):
            norm.weight.data.normal_(1.5, 0.3)
        for norm in (block.ln_text, block.ln_text_out):
            norm.bias.data.normal_(0.0, 0.2)
    return model.to(dtype)


def inputs(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "tokens": noise(2, 60, 128).to(dtype),
        "words": noise(2, 7, 128).to(dtype),
        "vec": noise(2, 128).to(dtype),
        "angles": noise(60, 32).repeat_interleave(2, -1),
    }
