"""Gradients of the exact attention with its prologue and skip, in closed form and in chunks of
rows.

Whatever computed the forward pass (int8 or not), its gradient is the gradient of the exact
mathematics: rounding has no useful derivative. Nothing is kept from the forward pass but its
inputs. Written out instead of differentiated because a custom operation runs below autograd.
"""

from __future__ import annotations

import torch

from turbo_rcm_patch.ops.reference import (
    key_mask,
    norm_rope,
    row_chunks,
    split_heads,
    unseen_keys,
)


def norm_rope_gradients(
    dy: torch.Tensor,
    x: torch.Tensor,
    *,
    weight: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    eps: float,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Gradient of `reference.norm_rope`.

    Args:
        dy: [B, H, N, D] fp32.
        x: [B, N, H*D], the input.
        weight: [H*D], [D] or None.
        cos: [N, D] or None.
        sin: [N, D] or None.
        eps: As in the forward pass.
        bias: [D] or None.

    Returns:
        Gradient of x [B, N, H*D] fp32, and of the weight and the bias (their shapes, fp32) or
        None.
    """
    heads = dy.shape[1]
    if cos is not None and sin is not None:
        c, s = cos[:, 0::2].float(), sin[:, 1::2].float()
        even, odd = dy[..., 0::2], dy[..., 1::2]
        dy = torch.stack((even * c + odd * s, odd * c - even * s), -1).flatten(-2)
    dy = dy.transpose(1, 2)  # [B, N, H, D]
    if weight is None:
        return dy.flatten(2), None, None
    x = x.float()
    if bias is None and weight.numel() == x.shape[-1]:
        dy = dy.flatten(2)
    else:
        x = x.view(*x.shape[:2], heads, -1)
    if bias is not None:
        x = x - x.mean(-1, keepdim=True)
    rms = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    d_weight = (dy * x * rms).flatten(0, -2).sum(0)
    g = dy * weight.float()
    dx = rms * (g - x * rms.square() * (g * x).mean(-1, keepdim=True))
    d_bias = None
    if bias is not None:
        dx = dx - dx.mean(-1, keepdim=True)
        d_bias = dy.flatten(0, -2).sum(0)
    return (dx if dx.dim() == 3 else dx.flatten(2)), d_weight, d_bias


def attention_gradients(
    d_out: torch.Tensor,
    d_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    sm_scale: float,
    causal: bool,
    kv_lengths: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of `reference.exact_attention` with respect to q, k and v.

    Args:
        d_out: [B, H, Nq, D] fp32.
        d_lse: [B, H, Nq] fp32 or None.
        q: [B, H, Nq, D] fp32.
        k: [B, H, Nk, D] fp32.
        v: [B, H, Nk, D] fp32.
        sm_scale: Factor on the logits.
        causal: Query i sees keys 0..i.
        kv_lengths: int [B] or None.
    """
    batch, heads, n_q, _ = q.shape
    n_kv = k.shape[2]
    mask = key_mask(batch, n_q, n_kv, causal=causal, kv_lengths=kv_lengths, device=q.device)
    if kv_lengths is not None:
        unseen = unseen_keys(n_kv, kv_lengths)
        k, v = k.masked_fill(unseen, 0.0), v.masked_fill(unseen, 0.0)
    # The first part makes a sum, so that under vmap it has the dimension of what is added.
    dq, dk, dv = [], None, None
    for rows in row_chunks(n_q, batch * heads * n_kv):
        logits = (q[:, :, rows] * sm_scale) @ k.transpose(-1, -2)
        if mask is not None:
            logits.masked_fill_(~(mask if mask.shape[2] == 1 else mask[:, :, rows]), float("-inf"))
        lse = torch.logsumexp(logits, -1, keepdim=True)
        p = (logits - lse.masked_fill(lse == float("-inf"), 0.0)).exp_()
        g = d_out[:, :, rows]
        dv = _added(dv, p.transpose(-1, -2) @ g)
        dp = g @ v.transpose(-1, -2)
        delta = (p * dp).sum(-1, keepdim=True)
        if d_lse is not None:
            delta = delta - d_lse[:, :, rows].unsqueeze(-1)
        ds = p * (dp - delta) * sm_scale
        dq.append(ds @ k)
        dk = _added(dk, ds.transpose(-1, -2) @ q[:, :, rows])
    assert dk is not None and dv is not None
    return torch.cat(dq, 2), dk, dv


def _added(total: torch.Tensor | None, part: torch.Tensor) -> torch.Tensor:
    return part if total is None else total.add_(part)


def prepare(
    x: torch.Tensor,
    heads: int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """[B, N, H*D] -> [B, H, N, D] fp32, normalised and rotated."""
    if weight is None and cos is None:
        return split_heads(x, heads).float()
    return norm_rope(x, heads, weight=weight, bias=bias, cos=cos, sin=sin, eps=eps)


def sum_to(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The gradient of a tensor that was broadcast, from that of what it was broadcast to."""
    return x.sum_to_size(like.shape).to(like.dtype)
