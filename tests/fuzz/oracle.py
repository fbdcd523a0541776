"""The operations in fp64, written from their documentation and from nothing of the library."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "attention",
    "close",
    "contract",
    "heads_of",
    "layer_norm",
    "linear",
    "prepared",
    "quantised_rows",
    "seen_keys",
    "sparse_linear",
]


def heads_of(x: Tensor, heads: int) -> Tensor:
    """[B, N, H*D] as fp64 [B, H, N, D]."""
    return x.double().unflatten(2, (heads, -1)).transpose(1, 2)


def prepared(
    x: Tensor,
    heads: int,
    weight: Tensor | None,
    bias: Tensor | None,
    rotary: tuple[Tensor, Tensor] | None,
    eps: float,
) -> Tensor:
    """x [B, N, H*D] normalised and rotated, fp64 [B, H, N, D]."""
    dim = x.shape[2] // heads
    y = x.double().unflatten(2, (heads, dim))
    if weight is not None:
        wide = weight.double()
        if bias is not None:
            y = y - y.mean(-1, keepdim=True)
        over = (-1,) if bias is not None or weight.numel() == dim and heads > 1 else (-2, -1)
        y = y / (y.square().mean(over, keepdim=True) + eps).sqrt()
        y = y * (wide if weight.numel() == dim else wide.view(heads, dim))
        if bias is not None:
            y = y + bias.double()
    y = y.transpose(1, 2)
    if rotary is not None:
        cos, sin = (table.double().reshape(x.shape[1], dim) for table in rotary)
        a, b, c, s = y[..., ::2], y[..., 1::2], cos[:, ::2], sin[:, 1::2]
        y = torch.stack((a * c - b * s, a * s + b * c), -1).flatten(-2)
    return y


def seen_keys(q: Tensor, k: Tensor, lengths: Tensor | None, causal: bool) -> Tensor:
    """Which keys a query sees, [B, 1, Nq, Nk]."""
    rows = torch.arange(q.shape[2], device=q.device)[:, None]
    columns = torch.arange(k.shape[2], device=q.device)[None]
    seen = (columns <= rows) if causal else (columns >= 0).expand(len(rows), -1)
    if lengths is None:
        return seen.expand(q.shape[0], 1, -1, -1)
    return seen & (columns < lengths.view(-1, 1, 1, 1))


def attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, seen: Tensor
) -> tuple[Tensor, Tensor]:
    """softmax(scale q k^T) v over the keys that are seen, whatever the others hold, and the
    logsumexp; q, k, v [B, H, N, D]."""
    used = seen.any(2)[..., None]
    k, v = (torch.where(used, x, torch.zeros_like(x)) for x in (k, v))
    logits = (scale * (q @ k.mT)).masked_fill(~seen, -math.inf)
    p = torch.where(seen.any(-1, keepdim=True), logits, 0.0).softmax(-1) * seen
    return p @ v, logits.logsumexp(-1)


def close(
    residual: Tensor | None, branch: Tensor, c_skip: float | Tensor, c_out: float | Tensor
) -> Tensor:
    """c_skip * residual + c_out * branch, coefficients [B], [B, 1, C] or [B, N, C]."""
    c_skip, c_out = (
        c.double().view(-1, 1, 1) if isinstance(c, Tensor) and c.dim() < 2 else c
        for c in (c_skip, c_out)
    )
    y = c_out * branch.double()
    return y if residual is None else c_skip * residual.double() + y


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x.double(), weight.double(), None if bias is None else bias.double())


def layer_norm(
    x: Tensor, scale: Tensor | None, shift: Tensor | None, one: float, eps: float
) -> Tensor:
    y = x.double() - x.double().mean(-1, keepdim=True)
    y = y / (y.square().mean(-1, keepdim=True) + eps).sqrt()
    y = y if scale is None else y * (one + scale.double())
    return y if shift is None else y + shift.double()


def quantised_rows(x: Tensor, qmax: int = 127) -> tuple[Tensor, Tensor]:
    """Integers in fp64 and the scale [..., 1] of x [..., K]."""
    amax = x.double().abs().amax(-1, keepdim=True)
    amax = torch.where(amax > 2.0**-100, amax, torch.ones_like(amax))
    return (x.double() * qmax / amax).round(), amax / qmax


def _mixed(x: Tensor) -> Tensor:
    """x [..., D] times Hadamard matrices over 64 or 32 channels, of length 1."""
    dim = x.shape[-1]
    width = 64 if 32 < dim <= 64 else 32
    matrix = torch.ones(1, 1, dtype=torch.float64, device=x.device)
    while len(matrix) < width:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    x = F.pad(x, (0, -dim % width)).unflatten(-1, (-1, width))
    return (x @ matrix / width**0.5).flatten(-2)


def contract(
    q: Tensor, k: Tensor, v: Tensor, scale: float, seen: Tensor,
    *, pv: str, qmax: int, smooth: bool, lengths: Tensor | None,
) -> Tensor:  # fmt: skip
    """The attention by the numeric contract of docs/ARCHITECTURE.md, in fp64 between its
    roundings; q, k, v [B, H, N, D], the first two normalised and rotated."""
    n, dim = k.shape[2:]
    block = 128 if dim <= 64 or dim == 128 else 64 if dim < 128 else 32
    real = torch.full((len(k),), n, device=k.device) if lengths is None else lengths
    inside = (torch.arange(n, device=k.device) < real[:, None]).view(len(k), 1, n, 1)
    k, v = (torch.where(inside, x, torch.zeros_like(x)) for x in (k, v))
    if smooth:
        step = -(-n // 256)
        count = inside[:, :, ::step].sum(2, keepdim=True).clamp_min(1)
        k = torch.where(inside, k - k[:, :, ::step].sum(2, keepdim=True) / count, 0.0)
    pad = (0, 0, 0, -n % block)
    q_int, q_scale = quantised_rows(_mixed(q), qmax)
    k = F.pad(_mixed(k), pad)
    blocks = k.unflatten(2, (-1, block)).flatten(3)
    k_int, k_scale = quantised_rows(blocks, qmax)
    k_int = k_int.view(k.shape)
    k_scale = k_scale.repeat_interleave(block, -1).flatten(2)[:, :, None]
    v = F.pad(v, pad)
    v_scale, offset = torch.ones((), dtype=torch.float64, device=v.device), 0.0
    kind = {"fp8": torch.float8_e4m3fn, "bf16": torch.bfloat16, "fp16": torch.float16}[pv]
    if pv == "fp8":
        step = -(-n // 256)
        count = inside[:, :, ::step].sum(2, keepdim=True).clamp_min(1)
        mean = v[:, :, :n:step].sum(2, keepdim=True) / count
        there = F.pad(inside, pad)
        v_scale = (v.abs().amax(2, keepdim=True) + mean.abs()).clamp_min(2.0**-117) / 448
        v = torch.where(there, (v - mean) / v_scale, 0.0)
        errors = v - v.float().to(kind).double()
        seen_keys = inside.sum(2, keepdim=True).clamp_min(1)
        offset = mean + errors.sum(2, keepdim=True) / seen_keys * v_scale
    v = v.float().to(kind).double()
    logits = q_int @ k_int.mT * q_scale * k_scale * scale * math.log2(math.e)
    logits = logits.masked_fill(~F.pad(seen, (0, -n % block)), -math.inf)
    shift = {"fp8": math.log2(448), "fp16": 8.0, "bf16": 0.0}[pv]
    parts = logits.unflatten(-1, (-1, block))
    running = parts.amax(-1, keepdim=True).cummax(-2).values
    running = running.masked_fill(running == -math.inf, 0.0)
    p = torch.exp2(parts - running + shift).float().to(kind).double()
    p = (p * torch.exp2(running - running[..., -1:, :])).flatten(-2)
    return p @ v * v_scale / p.sum(-1, keepdim=True).clamp_min(1e-300) + offset


def sparse_linear(
    q: Tensor, k: Tensor, v: Tensor, weight: Tensor, bias: Tensor | None, scale: float,
    *, topk: float, block_q: int, block_k: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Sparse softmax plus proj_l(linear attention), [B, H, Nq, D] fp64, and by how much the last
    chosen block of each row beats the first that was not, as a share of the scores [B, H, Nq]."""
    rows = torch.arange(q.shape[2], device=q.device) // block_q
    columns = torch.arange(k.shape[2], device=q.device) // block_k
    to_q, to_k = (F.one_hot(at).double() for at in (rows, columns))
    smooth = k - k.mean(2, keepdim=True)
    scores = ((to_q / to_q.sum(0)).T @ q) @ ((to_k / to_k.sum(0)).T @ smooth).mT
    count = max(1, int(topk * scores.shape[-1]))
    order = scores.sort(-1, descending=True)
    gap = torch.full_like(scores[..., 0], math.inf)
    if count < scores.shape[-1]:
        gap = order.values[..., count - 1] - order.values[..., count]
        gap = gap / scores.abs().mean(-1).clamp_min(1e-300)
    chosen = torch.zeros_like(scores).scatter(-1, order.indices[..., :count], 1.0).bool()
    seen = chosen[:, :, rows][..., columns]
    sparse = (scale * (q @ k.mT)).masked_fill(~seen, -math.inf).softmax(-1) @ v
    phi_q, phi_k = q.softmax(-1), k.softmax(-1)
    below = (phi_q * phi_k.sum(2, keepdim=True)).sum(-1, keepdim=True) + 1e-5
    moved = linear(phi_q @ (phi_k.mT @ v) / below, weight, bias)
    return sparse + moved, gap[:, :, rows]
