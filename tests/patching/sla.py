"""SLA in diffusers' Wan, for tests: models that hold a proj_l, and SLA written out plainly."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F

from tests.patching.wan import CASES, Case
from turbo_rcm_patch import PatchConfig
from turbo_rcm_patch.patching.sla import attach_proj_l, attached_proj_l, detach_proj_l

BF16 = torch.bfloat16
TOPK = 0.5
INT8 = PatchConfig(guard=False, sla_topk=TOPK)
EXACT = PatchConfig(attention="exact", guard=False, sla_topk=TOPK)
#: Same sums in fp32, in another order.
TIGHT = 1e-5

T2V, I2V, TI2V, FUSED_QKV = (CASES[i] for i in (0, 1, 3, 4))
BY_CASE = [T2V, I2V, TI2V, FUSED_QKV, CASES[6], CASES[7]]


def names(cases: list[Case]) -> list[str]:
    return [case.name for case in cases]


def with_sla(model: Any) -> Any:
    """A random proj_l in every self-attention, large enough to show."""
    generator = torch.Generator().manual_seed(7)
    for block in model.blocks:
        dim = block.attn1.inner_dim // block.attn1.heads
        weight = torch.randn(dim, dim, generator=generator) * 2 * dim**-0.5
        attach_proj_l(block.attn1, weight, torch.randn(dim, generator=generator) * 0.3)
    return model


def without_sla(model: Any) -> Any:
    for block in model.blocks:
        detach_proj_l(block.attn1)
    return model


def inputs_of(case: Case, dtype: torch.dtype = torch.float32, batch: int = 2) -> dict[str, Any]:
    """360 tokens: three blocks of queries, six of keys, neither of them whole."""
    generator = torch.Generator().manual_seed(1)
    given = case.inputs(batch, dtype)
    given["hidden_states"] = torch.randn(batch, 4, 3, 20, 24, generator=generator).to(dtype)
    if case.per_token:
        given["timestep"] = torch.rand(batch, 360, generator=generator) * 1000
    return given


def run(model: Any, given: dict[str, Any]) -> torch.Tensor:
    with torch.no_grad():
        output: torch.Tensor = model(**given)[0]
    return output


class PlainSLA:
    """A processor with SLA written out in the simplest way: a mask over all keys."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor, topk: float) -> None:
        self.weight, self.bias, self.topk = weight, bias, topk

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        x, dtype = hidden_states, hidden_states.dtype
        if attn.fused_projections:
            q, k, v = attn.to_qkv(x).chunk(3, -1)
        else:
            q, k, v = attn.to_q(x), attn.to_k(x), attn.to_v(x)
        q, k = attn.norm_q(q), attn.norm_k(k)
        q, k, v = (y.unflatten(2, (attn.heads, -1)).transpose(1, 2) for y in (q, k, v))
        assert rotary_emb is not None and attention_mask is None
        q, k = (turned(y, *rotary_emb).to(dtype) for y in (q, k))
        mask = self.seen(q, k)
        q, k, v = q.float(), k.float(), v.float()
        sparse = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        share = q.softmax(-1) @ k.softmax(-1).transpose(-1, -2)
        linear = share @ v / (share.sum(-1, keepdim=True) + 1e-5)
        out = sparse + F.linear(linear, self.weight, self.bias)
        return attn.to_out[1](attn.to_out[0](out.transpose(1, 2).flatten(2).to(dtype)))

    def seen(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        rows, columns = torch.arange(q.shape[2]) // 128, torch.arange(k.shape[2]) // 64
        smooth = (k.float() - k.float().mean(2, keepdim=True).to(k.dtype).float()).to(k.dtype)
        pooled = [
            torch.stack([x[:, :, of == i].float().mean(2) for i in of.unique()], 2).to(q.dtype)
            for x, of in ((q, rows), (smooth, columns))
        ]
        score = (pooled[0].float() @ pooled[1].float().transpose(-1, -2)).to(q.dtype).float()
        count = max(1, int(self.topk * score.shape[-1]))
        order = score.sort(dim=-1, descending=True, stable=True).indices[..., :count]
        chosen = torch.zeros_like(score).scatter(-1, order, 1.0).bool()
        return chosen[:, :, rows][..., columns]


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """As diffusers picks them: ChronoEdit's two sines of a pair differ by 1e-3."""
    cos, sin = cos[0, :, 0, 0::2], sin[0, :, 0, 1::2]
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)


def oracle(model: Any, topk: float = TOPK) -> Any:
    """A copy of the model whose author's blocks run `PlainSLA`."""
    twin = copy.deepcopy(model)
    for block in twin.blocks:
        held = attached_proj_l(block.attn1)
        assert held is not None
        block.attn1.processor = PlainSLA(held[0].clone(), held[1].clone(), topk)
    return without_sla(twin)
