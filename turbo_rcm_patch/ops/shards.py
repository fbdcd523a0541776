"""Quantised pieces of a sequence in plain torch: what context-parallel attention computes before
and after its exchanges, on a CPU.

`kernels.portable.shards` has the same functions for a GPU. The numeric contract is that of
`emulation`, with the means of k and v and the range of v given, because they belong to the whole
sequence.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from turbo_rcm_patch.ops.emulation import (
    E4M3_MAX,
    ERROR_STEPS,
    LOG2_E,
    hadamard,
    quantized,
    sample_sum_of_v,
    scaled_v,
    softmax_pv,
    value_errors,
)
from turbo_rcm_patch.ops.emulation import value_levels as levels_of_v
from turbo_rcm_patch.ops.reference import exact_attention, norm_rope, split_heads
from turbo_rcm_patch.ops.spec import hadamard_width, key_block

#: Tokens of int8 q and k and of e4m3 v are padded to a multiple of this, and every rank's keys
#: begin at one: a multiple of every `key_block`.
PADDED_TO = 128

_ROWS = 256  # query rows at a time, as in `emulation`


class Tokens(NamedTuple):
    """q or k of some tokens, before its norm and its rotary embedding.

    Attributes:
        x: [B, N, H*D].
        heads: H.
        weight: Of its norm: [H*D] across heads, [D] per head, or None.
        bias: [D] beside a weight [D], or None.
        cos: [N, D] or None.
        sin: [N, D] or None.
        eps: Of its norm.
    """

    x: Tensor
    heads: int
    weight: Tensor | None
    bias: Tensor | None
    cos: Tensor | None
    sin: Tensor | None
    eps: float

    def rows(self, which: slice) -> Tokens:
        """Some of the tokens."""
        cos, sin = (None if t is None else t[which] for t in (self.cos, self.sin))
        return self._replace(x=self.x[:, which], cos=cos, sin=sin)


def padded(tokens: int) -> int:
    """Rows that so many tokens take."""
    return -(-tokens // PADDED_TO) * PADDED_TO


def width(head_dim: int) -> int:
    """Channels of a head in int8 and e4m3."""
    return head_dim + -head_dim % hadamard_width(head_dim)


def _rotated(tokens: Tokens) -> Tensor:
    return norm_rope(
        tokens.x,
        tokens.heads,
        weight=tokens.weight,
        bias=tokens.bias,
        cos=tokens.cos,
        sin=tokens.sin,
        eps=tokens.eps,
    )


def prepared(tokens: Tokens, dtype: torch.dtype) -> Tensor:
    """q or k after its norm and rotary embedding, for exact attention: [B, N, H*D] in `dtype`."""
    return _rotated(tokens).to(dtype).transpose(1, 2).flatten(2)


def statistics(
    k: Tokens, v: Tensor, *, first: int, step: int, smooth_k: bool, fp8: bool
) -> Tensor:
    """Sums of k, normalised and rotated, and of v over tokens first, first + step, ..., and the
    largest magnitudes of the channels of v.

    Returns:
        [3, B, H, D] fp32; zeros where they are not wanted.
    """
    batch, _, channels = v.shape
    found = torch.zeros(3, batch, k.heads, channels // k.heads, device=v.device)
    sample = slice(first, None, step)
    if smooth_k and first < v.shape[1]:
        found[0] = _rotated(k.rows(sample)).sum(2)
    if fp8:
        found[1] = sample_sum_of_v(split_heads(v[:, sample].float(), k.heads))
        found[2] = v.float().abs().amax(1).view(found[2].shape)
    return found


def _int8(x: Tensor, amax: Tensor, qmax: int) -> tuple[Tensor, Tensor]:
    """`quantized`, and a NaN or an infinity becomes a NaN in the scale, which int8 has not."""
    integers, scale = quantized(x, amax, qmax)
    finite = amax.isfinite()
    scale = torch.where(finite, scale, torch.full_like(scale, float("nan")))
    return torch.where(finite, integers, torch.zeros_like(integers)).to(torch.int8), scale


def queries(q: Tokens, *, sm_scale: float, qmax: int) -> tuple[Tensor, Tensor]:
    """int8 q [B, H, padded(N), width(D)] and its scales [B, H, padded(N)] into log2 units."""
    n, head_dim = q.x.shape[1], q.x.shape[2] // q.heads
    x = F.pad(hadamard(_rotated(q)), (0, 0, 0, padded(n) - n))
    int8, scale = _int8(x, x.abs().amax(-1, keepdim=True), qmax)
    return int8, scale.squeeze(-1) * (sm_scale * LOG2_E / hadamard_width(head_dim))


def keys(k: Tokens, mean: Tensor | None, *, qmax: int) -> tuple[Tensor, Tensor]:
    """int8 k [B, H, padded(N), width(D)] less `mean` [B, H, D], 0 in the padding, and its scales
    [B, H, padded(N) / key_block(D)]."""
    batch, n, channels = k.x.shape
    head_dim = channels // k.heads
    block = key_block(head_dim)
    if not n:
        empty = torch.empty(batch, k.heads, 0, width(head_dim), device=k.x.device)
        return empty.to(torch.int8), empty[..., 0]
    x = _rotated(k)
    if mean is not None:
        x = x - mean.unsqueeze(2)
    x = torch.unflatten(F.pad(hadamard(x), (0, 0, 0, padded(n) - n)), 2, (-1, block))
    int8, scale = _int8(x, x.abs().amax((-1, -2), keepdim=True), qmax)
    return int8.flatten(2, 3), scale.flatten(2)


def value_levels(mean: Tensor, amax: Tensor) -> Tensor:
    """Scale and subtracted mean of e4m3 v, [B, H, 2, width(D)], from the mean of a sample and the
    largest magnitudes [B, H, D]."""
    mean, amax = levels_of_v(mean, amax)
    levels = torch.stack([amax / E4M3_MAX, mean], 2)
    return F.pad(levels, (0, width(amax.shape[-1]) - amax.shape[-1]))


def values(v: Tensor, mean: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    """v [B, N, H*D] in e4m3, from the same: [B, H, width(D), padded(N)], 0 in the padding; and the
    sums of its rounding errors [B, H, width(D)] int32, as in `kernels.operands.Values`."""
    head_dim, n = v.shape[2] // amax.shape[1], v.shape[1]
    mean, amax = levels_of_v(mean, amax)
    x = scaled_v(split_heads(v.float(), amax.shape[1]), mean, amax)
    x = F.pad(x, (0, width(head_dim) - head_dim, 0, padded(n) - n))
    rounded = x.to(torch.float8_e4m3fn)
    errors = value_errors(x, rounded.float()).to(torch.int32)
    return rounded.transpose(2, 3).contiguous(), errors


def attend(
    q: tuple[Tensor, Tensor],
    k: tuple[Tensor, Tensor],
    v: Tensor,
    v_levels: Tensor | None,
    *,
    n_q: int,
    n_kv: int,
    head_dim: int,
    pv: Literal["fp8", "bf16", "fp16"],
    out_dtype: torch.dtype,
    want_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """softmax(q k^T) v of quantised operands.

    Args:
        q: As `queries` makes it.
        k: As `keys` makes it.
        v: As `values` makes it, or 16-bit [B, n_kv, H*D] with `v_levels` None.
        v_levels: As `value_levels` makes it, and the sums of errors as a third row: fp32 [B, H, 3,
            width(D)], whose bits are an int32 there.
        n_q: Queries; the rest of the rows is padding.
        n_kv: Keys, likewise.
        head_dim: D.
        pv: Element type of probabilities.
        out_dtype: Of the output.
        want_lse: Also return the logsumexp, of logits less q · mean of k.

    Returns:
        [B, n_q, H*D], and fp32 [B, H, n_q] or None.
    """
    block = key_block(head_dim)
    blocks = -(-n_kv // block)
    batch, heads = q[0].shape[:2]
    if v_levels is not None:
        wide = v.float()[:, :, :head_dim, : blocks * block].transpose(2, 3).contiguous()
    else:
        wide = F.pad(split_heads(v, heads).float(), (0, 0, 0, blocks * block - n_kv))
    unseen = torch.arange(blocks * block, device=v.device) >= n_kv
    out = torch.empty(batch, n_q, heads, head_dim, device=v.device)
    lse = torch.empty(batch, heads, n_q, device=v.device) if want_lse else None
    for b in range(batch):
        for h in range(heads):
            k_t = k[0][b, h, : blocks * block].float().T
            for start in range(0, n_q, _ROWS):
                rows = slice(start, min(start + _ROWS, n_q))
                logits = q[0][b, h, rows].float() @ k_t
                if blocks * block != n_kv:
                    logits.masked_fill_(unseen, float("-inf"))
                scale = q[1][b, h, rows, None] * k[1][b, h, :blocks]
                o, chunk_lse = softmax_pv(logits.view(-1, blocks, block), scale, wide[b, h], pv)
                out[b, rows, h] = o
                if lse is not None:
                    lse[b, h, rows] = chunk_lse
    if v_levels is not None:
        scale, mean = v_levels[:, :, :2, :head_dim].unbind(2)
        errors = v_levels[:, :, 2, :head_dim].contiguous().view(torch.int32)
        offset = mean + errors * (scale / (n_kv * ERROR_STEPS))
        out = out * scale.unsqueeze(1) + offset.unsqueeze(1)
    return out.flatten(2).to(out_dtype), lse


def exact_with_lse(q: Tensor, k: Tensor, v: Tensor, sm_scale: float) -> tuple[Tensor, Tensor]:
    """Exact attention of [B, H, N, D] and its logsumexp [B, H, N], both fp32."""
    return exact_attention(q.float(), k.float(), v.float(), sm_scale=sm_scale)
