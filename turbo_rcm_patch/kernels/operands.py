"""The operands of the attention kernels: q, k and v quantised."""

from __future__ import annotations

from typing import NamedTuple

import torch

from turbo_rcm_patch.kernels.keys import KeyBlocks, quantize_keys
from turbo_rcm_patch.kernels.launch import dense_rows
from turbo_rcm_patch.kernels.prologue import sample_mean
from turbo_rcm_patch.kernels.queries import Queries, quantize_queries
from turbo_rcm_patch.kernels.values import Values, quantize_values

__all__ = ["Operands", "quantize"]


class Operands(NamedTuple):
    """What the prologues made of q, k and v: `values` for fp8, else 16-bit `v` [B, Nk, H*D]."""

    queries: Queries
    keys: KeyBlocks
    values: Values | None
    v: torch.Tensor | None
    n_q: int
    n_kv: int
    lengths: torch.Tensor | None


def quantize(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    heads: int,
    norm_q: torch.Tensor | None,
    norm_k: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    kv_lengths: torch.Tensor | None,
    pv: str,
    qmax: int,
    smooth_k: bool,
    sm_scale: float,
    eps: float,
    want_lse: bool = False,
    counters: torch.Tensor | None = None,
    counter_rows: int = 1,
) -> Operands:
    """Run the prologues on q [B, Nq, H*D], k and v [B, Nk, H*D]."""
    k, v = dense_rows(k), dense_rows(v)
    lengths = None if kv_lengths is None else kv_lengths.contiguous()
    mean = None
    if smooth_k:
        mean = sample_mean(k, heads, weight=norm_k, cos=cos, sin=sin, lengths=lengths, eps=eps)
    queries = quantize_queries(
        q, heads, weight=norm_q, cos=cos, sin=sin, eps=eps, qmax=qmax, sm_scale=sm_scale,
        mean=mean, n_kv=k.shape[1], lengths=lengths, want_shift=want_lse, counters=counters,
        counter_rows=counter_rows,
    )  # fmt: skip
    keys = quantize_keys(
        k, heads, weight=norm_k, cos=cos, sin=sin, eps=eps, qmax=qmax, mean=mean, lengths=lengths
    )
    values = quantize_values(v, heads, lengths=lengths) if pv == "fp8" else None
    wide = None
    if values is None:
        wide = v.to(torch.bfloat16 if pv == "bf16" else torch.float16)
    return Operands(queries, keys, values, wide, q.shape[1], k.shape[1], lengths)
