"""The operations in plain torch: the exact form, to which the others are compared, and the parts
that it shares with the int8-emulating form in `emulation.py`.

It shares no code with the kernels, so that a comparison finds errors of either.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

# By name: a caller may put `sageattn` in the place of the one in `torch.nn.functional`.
from torch.nn.functional import scaled_dot_product_attention

#: Elements of logits that the chunked forms hold at a time.
_CHUNK_ELEMENTS = 1 << 24


def split_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """View [B, N, H*D] as [B, H, N, D]."""
    return x.view(*x.shape[:2], heads, x.shape[2] // heads).transpose(1, 2)


def norm_rope(
    x: torch.Tensor,
    heads: int,
    *,
    weight: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    eps: float,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Compute RMSNorm (with a bias, layer norm), then rotary embedding, without rounding between.

    Args:
        x: [B, N, H*D].
        heads: H.
        weight: [H*D] to normalise across all heads, [D] per head, or None.
        cos: [N, D], used at even channels (diffusers' interleaved form), or None.
        sin: [N, D], used at odd channels, or None.
        eps: Added to the mean square or the variance.
        bias: [D] beside a weight [D] for a layer norm per head, or None.
        dtype: dtype of the arithmetic, fp32 or fp64.

    Returns:
        [B, H, N, D] in `dtype`, dense.
    """
    x = x.to(dtype)
    across = weight is not None and bias is None and weight.numel() == x.shape[-1]
    if weight is not None and across:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.to(dtype)
    y = split_heads(x, heads)
    if weight is not None and bias is not None:
        y = F.layer_norm(y, y.shape[-1:], weight.to(dtype), bias.to(dtype), eps)
    elif weight is not None and not across:
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * weight.to(dtype)
    if cos is not None and sin is not None:
        even, odd = y[..., 0::2], y[..., 1::2]
        c, s = cos[:, 0::2].to(dtype), sin[:, 1::2].to(dtype)
        return torch.stack((even * c - odd * s, even * s + odd * c), -1).flatten(-2)
    return y.contiguous()


def key_mask(
    n_q: int, n_kv: int, *, causal: bool, kv_lengths: torch.Tensor | None, device: torch.device
) -> torch.Tensor | None:
    """Return a boolean mask of the keys that a query sees, [B or 1, 1, Nq or 1, Nk].

    Return None if every query sees every key.
    """
    mask = None if kv_lengths is None else ~unseen_keys(n_kv, kv_lengths).mT
    if causal:
        columns = torch.arange(n_kv, device=device)
        below = (columns <= torch.arange(n_q, device=device).view(-1, 1)).view(1, 1, n_q, n_kv)
        mask = below if mask is None else mask & below
    return mask


def unseen_keys(n_kv: int, kv_lengths: torch.Tensor) -> torch.Tensor:
    """Return a boolean mask of the keys past the length, [B, 1, Nk, 1]."""
    columns = torch.arange(n_kv, device=kv_lengths.device)
    return (columns >= kv_lengths.unsqueeze(1))[:, None, :, None]


def exact_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    sm_scale: float,
    causal: bool = False,
    kv_lengths: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute softmax(sm_scale * q k^T) v by its definition, in the inputs' dtype (fp32 or fp64).

    Args:
        q: [B, H, Nq, D].
        k: [B, H, Nk, D].
        v: [B, H, Nk, D].
        sm_scale: Factor on the logits.
        causal: Query i sees keys 0..i.
        kv_lengths: int [B]; keys at or past the length are masked, even if they hold NaN.

    Returns:
        Output [B, H, Nq, D] (0 where a query sees no key) and natural-log logsumexp [B, H, Nq]
        (-inf there).
    """
    batch, heads, n_q, _ = q.shape
    mask = key_mask(n_q, k.shape[2], causal=causal, kv_lengths=kv_lengths, device=q.device)
    if kv_lengths is not None:
        unseen = unseen_keys(k.shape[2], kv_lengths)
        k, v = k.masked_fill(unseen, 0.0), v.masked_fill(unseen, 0.0)
    # No tensor is written in place, so that all transforms of torch work.
    out, lse = [], []
    step = max(1, _CHUNK_ELEMENTS // max(1, batch * heads * k.shape[2]))
    for start in range(0, n_q, step):
        rows = slice(start, start + step)
        logits = (q[:, :, rows] * sm_scale) @ k.transpose(-1, -2)
        if mask is not None:
            seen = mask if mask.shape[2] == 1 else mask[:, :, rows]
            logits = logits.masked_fill(~seen, float("-inf"))
        chunk_lse = torch.logsumexp(logits, -1)
        lse.append(chunk_lse)
        # A row without visible keys has logsumexp -inf; exp(-inf - 0) gives its weights, 0.
        total = chunk_lse.masked_fill(chunk_lse == float("-inf"), 0.0).unsqueeze(-1)
        out.append((logits - total).exp() @ v)
    return torch.cat(out, 2), torch.cat(lse, 2)


def without_overlap(x: torch.Tensor) -> torch.Tensor:
    """Return x, or a copy if its rows overlap in memory (windows over a sequence).

    torch's CPU attention passes such strides to a BLAS that does not support them, and returns
    wrong numbers.
    """
    return x.contiguous() if 0 < x.stride(-2) < x.shape[-1] else x


def aligned_to_16_bytes(x: torch.Tensor) -> torch.Tensor:
    """Return x, or a copy if its address is not a multiple of 16 bytes.

    On a GPU torch's attention with a mask checks only strides, and gives NaN or a fault for other
    addresses. A compiler aligns by itself.
    """
    if torch.compiler.is_compiling() or not x.storage_offset() * x.element_size() % 16:
        return x
    return x.clone()


def sdpa_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    sm_scale: float,
    causal: bool = False,
    kv_lengths: torch.Tensor | None = None,
) -> torch.Tensor:
    """Call torch's scaled_dot_product_attention on [B, H, N, D], with a backend of its choice.

    The masks are those of `exact_attention`.
    """
    if kv_lengths is None:
        return scaled_dot_product_attention(q, k, v, is_causal=causal, scale=sm_scale)
    n_q, n_kv = q.shape[2], k.shape[2]
    mask = key_mask(n_q, n_kv, causal=causal, kv_lengths=kv_lengths, device=q.device)
    assert mask is not None
    unseen = unseen_keys(n_kv, kv_lengths)
    k, v = k.masked_fill(unseen, 0.0), v.masked_fill(unseen, 0.0)
    mask = mask.expand(-1, -1, n_q, -1)
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=sm_scale)
    return out.masked_fill(~mask.any(-1, keepdim=True), 0.0)


def project(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Compute x @ weight^T + bias in fp32.

    16-bit operands on a CPU are multiplied in their own dtype, with fp32 sums inside, because
    widening the weight on every call would cost more than the product. That adds one rounding.

    Args:
        x: [B, N, Cin].
        weight: [Cout, Cin].
        bias: [Cout] or None.

    Returns:
        fp32 [B, N, Cout].
    """
    if x.device.type == "cpu" and x.dtype == weight.dtype and x.dtype != torch.float32:
        return F.linear(x, weight, None if bias is None else bias.to(x.dtype)).float()
    return F.linear(x.float(), weight.float(), None if bias is None else bias.float())
