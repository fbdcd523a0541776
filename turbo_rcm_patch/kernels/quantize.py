"""q, k and v as the attention kernels take them."""

from __future__ import annotations

from types import ModuleType

import torch

from turbo_rcm_patch.kernels.gluon import ran_on_hopper
from turbo_rcm_patch.kernels.launch import Tile, dense_rows, pad_head, scale_block, target_of
from turbo_rcm_patch.kernels.operands import Keys, Operands, Prologue, Queries, Values
from turbo_rcm_patch.kernels.prologue import run_prologue
from turbo_rcm_patch.kernels.replay import replayed

__all__ = ["quantize"]

PADDED_TO = 128  # tokens are padded to a multiple of this


@replayed
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
    norm_q_bias: torch.Tensor | None = None,
    norm_k_bias: torch.Tensor | None = None,
    want_lse: bool = False,
    counters: torch.Tensor | None = None,
    counter_rows: int = 1,
    portable: bool = False,
    tile: Tile | None = None,
) -> Operands:
    """Run the prologue on q [B, Nq, H*D], k and v [B, Nk, H*D].

    Args:
        portable: The portable kernels even where there are others.
        tile: In the place of the table's, of the portable kernels.
    """
    q, k, v = dense_rows(q), dense_rows(k), dense_rows(v)
    (batch, n_q, channels), n_kv, device = q.shape, k.shape[1], q.device
    head_dim, fp8 = channels // heads, pv == "fp8"
    head_pad = pad_head(head_dim)
    n_q_padded, n_kv_padded = (-(-n // PADDED_TO) * PADDED_TO for n in (n_q, n_kv))

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(batch, heads, *shape, dtype=dtype, device=device)

    def contiguous(x: torch.Tensor | None) -> torch.Tensor | None:
        return None if x is None else x.contiguous()

    queries = Queries(
        empty(n_q_padded, head_pad, dtype=torch.int8),
        empty(n_q_padded),
        empty(n_q_padded) if want_lse and smooth_k else None,
    )
    keys = Keys(
        empty(n_kv_padded, head_pad, dtype=torch.int8),
        empty(n_kv_padded // scale_block(head_dim)),
    )
    values = None
    if fp8:
        values = Values(empty(head_pad, n_kv_padded, dtype=torch.float8_e4m3fn), empty(head_pad))
    job = Prologue(
        q,
        k,
        v,
        heads,
        contiguous(norm_q),
        contiguous(norm_k),
        contiguous(norm_q_bias),
        contiguous(norm_k_bias),
        contiguous(cos),
        contiguous(sin),
        contiguous(kv_lengths),
        eps,
        sm_scale,
        qmax,
        smooth_k,
        queries,
        keys,
        values,
        counters,
        counter_rows,
    )
    target = target_of(device)
    hopper = target.backend == "cuda" and target.arch == 90 and not portable and tile is None

    def on_hopper(own: ModuleType) -> bool:
        if not own.serves(job):
            return False
        own.run_hopper_prologue(job)
        return True

    if not (hopper and ran_on_hopper("hopper_prologue", "prologue", on_hopper)):
        run_prologue(job, target, tile)
    wide = None if fp8 else v.to(torch.bfloat16 if pv == "bf16" else torch.float16)
    return Operands(queries, keys, values, wide, n_q, n_kv, job.lengths)
