"""A small WanModel with the names, the layout and the arithmetic of TurboDiffusion's (thu-ml/
TurboDiffusion, `rcm/networks/wan2pt1.py` and `wan2pt2.py`, `SLA/core.py`, `ops/core.py`), written
here as an oracle. The real one needs packages and a GPU; a test runs it from a checkout."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

__all__ = ["WanModel", "spread", "tiny", "with_fast_norms", "with_sparse"]


def attention(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None
) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, scale=softmax_scale).transpose(1, 2)


class MinimalA2AAttnOp(nn.Module):
    def __init__(self, local_attn: Any = attention) -> None:
        super().__init__()
        self.local_attn, self.pg, self.stream = local_attn, None, None

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any):
        return self.local_attn(query, key, value).flatten(2)


class WanRMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.dim, self.eps = dim, eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (self.dim,), eps=self.eps).type_as(x) * self.weight


class FastRMSNorm(nn.Module):
    def __init__(self, norm: WanRMSNorm) -> None:
        super().__init__()
        self.dim, self.eps = norm.dim, norm.eps
        self.register_buffer("weight", norm.weight.data.float())

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (self.dim,), self.weight.float(), self.eps).to(x.dtype)


class WanLayerNorm(nn.LayerNorm):
    def __init__(self, dim: int, eps: float, elementwise_affine: bool = False) -> None:
        super().__init__(dim, elementwise_affine=elementwise_affine, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = (None if p is None else p.float() for p in (self.weight, self.bias))
        return F.layer_norm(x.float(), self.normalized_shape, weight, bias, self.eps).type_as(x)


class FastLayerNorm(nn.Module):
    def __init__(self, norm: WanLayerNorm) -> None:
        super().__init__()
        self.dim, self.eps = norm.normalized_shape[0], norm.eps
        self.elementwise_affine = norm.weight is not None
        for name in ("weight", "bias"):
            given = getattr(norm, name)
            if given is None:
                self.register_parameter(name, None)
            else:
                self.register_buffer(name, given.data.float())

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = (None if p is None else p.float() for p in (self.weight, self.bias))
        return F.layer_norm(x.float(), (self.dim,), weight, bias, self.eps).to(x.dtype)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.complex(cos, sin)[None, :, None]).flatten(-2)


#: None where flash-attn is missing, as in the author's file.
flash_apply_rotary_emb: Any = turned


def rotated(x: Tensor, freqs: Tensor) -> Tensor:
    return flash_apply_rotary_emb(x.float(), freqs.cos(), freqs.sin()).to(x.dtype)


class WanSelfAttention(nn.Module):
    def __init__(self, dim: int, num_heads: int, eps: float) -> None:
        super().__init__()
        self.dim, self.num_heads, self.head_dim = dim, num_heads, dim // num_heads
        self.qk_norm, self.eps = True, eps
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
        self.norm_q, self.norm_k = WanRMSNorm(dim, eps), WanRMSNorm(dim, eps)
        self.attn_op = MinimalA2AAttnOp()

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (self.num_heads, self.head_dim))

    def forward(self, x: Tensor, seq_lens: Tensor, freqs: Tensor) -> Tensor:
        q, k = self.heads(self.norm_q(self.q(x))), self.heads(self.norm_k(self.k(x)))
        y = self.attn_op(rotated(q, freqs), rotated(k, freqs), self.heads(self.v(x)))
        return self.o(y)


class WanT2VCrossAttention(WanSelfAttention):
    def forward(self, x: Tensor, context: Tensor, context_lens: Any) -> Tensor:
        q, k = self.heads(self.norm_q(self.q(x))), self.heads(self.norm_k(self.k(context)))
        return self.o(self.attn_op(q, k, self.heads(self.v(context))))


class WanI2VCrossAttention(WanSelfAttention):
    def __init__(self, dim: int, num_heads: int, eps: float) -> None:
        super().__init__(dim, num_heads, eps)
        self.k_img, self.v_img = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.norm_k_img = WanRMSNorm(dim, eps)
        self.attn_op_image = MinimalA2AAttnOp()

    def forward(self, x: Tensor, context: Tensor, context_lens: Any) -> Tensor:
        image, text = context[:, :-512], context[:, -512:]
        q = self.heads(self.norm_q(self.q(x)))
        k = self.heads(self.norm_k(self.k(text)))
        k_img = self.heads(self.norm_k_img(self.k_img(image)))
        of_image = self.attn_op_image(q, k_img, self.heads(self.v_img(image)))
        return self.o(self.attn_op(q, k, self.heads(self.v(text))) + of_image)


class WanAttentionBlock(nn.Module):
    def __init__(self, cross: type, dim: int, ffn_dim: int, num_heads: int) -> None:
        super().__init__()
        eps = 1e-6
        self.norm1 = WanLayerNorm(dim, eps)
        self.self_attn = WanSelfAttention(dim, num_heads, eps)
        self.norm3 = WanLayerNorm(dim, eps, True)
        self.cross_attn = cross(dim, num_heads, eps)
        self.norm2 = WanLayerNorm(dim, eps)
        self.ffn = nn.Sequential(
            nn.Linear(dim, ffn_dim), nn.GELU(approximate="tanh"), nn.Linear(ffn_dim, dim)
        )
        self.modulation = nn.Parameter(torch.randn(1, 6, dim) / dim**0.5)

    def forward(
        self, x: Tensor, e: Tensor, seq_lens: Any, freqs: Tensor, context: Tensor, context_lens
    ) -> Tensor:
        e = (self.modulation + e).chunk(6, dim=1)
        y = (self.norm1(x).float() * (1 + e[1]) + e[0]).type_as(x)
        x = x + self.self_attn(y, seq_lens, freqs) * e[2].type_as(x)
        x = x + self.cross_attn(self.norm3(x), context, context_lens)
        y = (self.norm2(x).float() * (1 + e[4]) + e[3]).type_as(x)
        return x + self.ffn(y) * e[5].type_as(x)


class WanModel(nn.Module):
    def __init__(
        self, *, image: bool = False, dim: int = 128, num_heads: int = 2, layers: int = 2,
        checkpoint: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.dim, self.num_heads = dim, num_heads
        cross = WanI2VCrossAttention if image else WanT2VCrossAttention
        self.patch_embedding = nn.Linear(16, dim)
        self.blocks = nn.ModuleList(
            WanAttentionBlock(cross, dim, 2 * dim, num_heads) for _ in range(layers)
        )
        self.head = nn.Linear(dim, 16)
        if checkpoint:
            for name, block in self.blocks.named_children():
                self.blocks.register_module(name, checkpoint_wrapper(block))

    def forward(self, x: Tensor, e: Tensor, context: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device).float()
        rates = torch.logspace(0, -3, self.dim // self.num_heads // 2, device=x.device)
        hidden = self.patch_embedding(x)
        given = {"e": e, "seq_lens": torch.tensor([hidden.shape[1]] * len(x))}
        given |= {"freqs": torch.outer(places, rates), "context": context, "context_lens": None}
        for block in self.blocks:
            hidden = block(hidden, **given)
        return self.head(hidden)


class SparseLinearAttention(nn.Module):
    def __init__(self, head_dim: int, topk: float, BLKQ: int = 128, BLKK: int = 64) -> None:
        super().__init__()
        self.topk, self.BLKQ, self.BLKK = topk, BLKQ, BLKK
        self.proj_l = nn.Linear(head_dim, head_dim)

        def softmax_feature_map(x: Tensor) -> Tensor:
            return x.softmax(-1)

        self.feature_map_q = self.feature_map_k = softmax_feature_map

    def blocks(self, device: torch.device) -> tuple[int, int]:
        return self.BLKQ, self.BLKK

    def forward(self, q: Tensor, k: Tensor, v: Tensor, return_sparsity: bool = False) -> Tensor:
        dtype, device, (block_q, block_k) = q.dtype, q.device, self.blocks(q.device)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        rows, columns = (
            torch.arange(x.shape[2], device=device) // n for x, n in ((q, block_q), (k, block_k))
        )
        centred = k - k.mean(2, keepdim=True)
        mean_q = F.avg_pool2d(q.float(), (block_q, 1), ceil_mode=True)
        mean_k = F.avg_pool2d(centred.float(), (block_k, 1), ceil_mode=True)
        score = mean_q.to(dtype) @ mean_k.to(dtype).transpose(-1, -2)
        q, k, v = q.float(), k.float(), v.float()
        count = min(score.shape[-1], int(self.topk * score.shape[-1]))
        chosen = score.topk(count).indices
        seen = torch.zeros_like(score).scatter(-1, chosen, 1.0).bool()
        mask = seen[:, :, rows][..., columns]
        sparse = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        phi_q, phi_k = self.feature_map_q(q), self.feature_map_k(k)
        share = (phi_q * phi_k.sum(2, keepdim=True)).sum(-1, keepdim=True) + 1e-5
        linear = phi_q @ (phi_k.transpose(-1, -2) @ v) / share
        weight, bias = self.proj_l.weight.float(), self.proj_l.bias.float()
        return (sparse + F.linear(linear, weight, bias)).to(dtype).transpose(1, 2)


class SageSparseLinearAttention(SparseLinearAttention):
    """Exact, on any device."""

    def __init__(self, head_dim: int, topk: float) -> None:
        super().__init__(head_dim, topk)
        del self.BLKQ, self.BLKK

    def blocks(self, device: torch.device) -> tuple[int, int]:
        hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
        return (64, 128) if hopper else (128, 64)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, return_sparsity: bool = False) -> Tensor:
        return super().forward(q, k, v, return_sparsity)


def spread(model: Any) -> Any:
    """Add seeded noise to every vector of weights: norms, biases, tables of modulation."""
    generator = torch.Generator().manual_seed(9)
    for weight in model.parameters():
        if weight.dim() == 1 or weight.shape[0] == 1:
            weight.data += 0.2 * torch.randn(weight.shape, generator=generator)
    return model


def tiny(**options: Any) -> WanModel:
    """A seeded model in which attention reaches the output: peaked queries, live gates."""
    torch.manual_seed(0)
    model = WanModel(**options).eval().requires_grad_(False)
    for module in model.modules():
        if isinstance(module, WanAttentionBlock):
            module.modulation.data[:, (2, 5)] += 0.7
        if isinstance(module, WanRMSNorm):
            module.weight.data.mul_(2)
    return spread(model)


def with_sparse(model: WanModel, topk: float = 0.5, *, sage: bool = False) -> WanModel:
    """SLA or SageSLA in every self-attention, its projection random."""
    torch.manual_seed(1)
    kind = SageSparseLinearAttention if sage else SparseLinearAttention
    for module in model.modules():
        if type(module) is WanSelfAttention:
            local = kind(module.head_dim, topk).requires_grad_(False)
            nn.init.normal_(local.proj_l.weight, 0.0, 0.2)
            module.attn_op.local_attn = local
    return model


def with_fast_norms(model: WanModel) -> WanModel:
    """The norms that TurboDiffusion puts in place of the trained ones."""
    for name, module in list(model.blocks.named_modules()):
        fast = {WanRMSNorm: FastRMSNorm, WanLayerNorm: FastLayerNorm}.get(type(module))
        if fast is not None:
            model.blocks.set_submodule(name, fast(module))
    return model
