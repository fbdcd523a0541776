"""int8 attention with the skip in its epilogue, for every card.

Three choices make it fast on Hopper: small row tiles (three programs share a multiprocessor and
hide each other's softmax), hardware copies for q, k and v, and row maxima of raw integers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from turbo_rcm_patch.ops.attention.online_softmax import (
    LN_2,
    attend,
    attention_arguments,
    register_limit,
    tile_of,
)
from turbo_rcm_patch.ops.formats import (
    NO_SKIP,
    AttentionInputs,
    AttentionOutput,
    QuantizedOperands,
)
from turbo_rcm_patch.ops.launch import (
    LENGTHS,
    cdiv,
    launch,
    skip_arguments,
)
from turbo_rcm_patch.ops.numerics import close_skip


@triton.jit(do_not_specialize=LENGTHS)
def attention_kernel(
    out, q_src, k_src, v_src, operands, skip, n_q, n_rank, n_kv,
    FORM: tl.constexpr, KINDS: tl.constexpr,
):  # fmt: skip
    """Compute y = c_skip * residual + c_out * softmax(q k^T) v.

    Grid: (blocks of BLOCK_M rows, heads, batch). out: `AttentionOutput`; the rest as in `attend`
    and `close_skip`.
    """
    start_m = tl.program_id(0) * FORM.BLOCK_M
    h, b = tl.program_id(1), tl.program_id(2)
    branch, lse = attend(q_src, k_src, v_src, operands, n_kv, b, h, start_m, FORM=FORM)
    offs_m = start_m + tl.arange(0, FORM.BLOCK_M)
    offs_d = tl.arange(0, FORM.HEAD_PAD)
    offs_c = h * FORM.HEAD_DIM + offs_d
    mask_m, mask_d = offs_m < n_q, offs_d < FORM.HEAD_DIM
    bh = b.to(tl.int64) * operands.heads + h
    if out.lse_ptr is not None:
        lse = lse * LN_2
        if out.shift_ptr is not None:
            shift = out.shift_ptr + bh * operands.n_q_padded + offs_m
            lse += tl.load(shift, mask=mask_m, other=0.0)
        tl.store(out.lse_ptr + bh * n_q + offs_m, lse, mask=mask_m)
    y = close_skip(branch, skip, b, (offs_m, offs_c), (mask_m, mask_d), KINDS)
    y = y.to(out.y_ptrs[0].dtype.element_ty)
    RANKS: tl.constexpr = len(out.y_ptrs)
    for rank in tl.static_range(RANKS):  # A tile may have rows of two of them.
        offs_rank = offs_m - rank * n_rank
        row = b.to(tl.int64) * n_rank + offs_rank.to(tl.int64)
        rows = row * (RANKS * operands.heads * FORM.HEAD_DIM)
        mask = (offs_rank >= 0) & (offs_rank < n_rank)
        y_ptrs = out.y_ptrs[rank] + rows[:, None] + offs_c[None, :]
        tl.store(y_ptrs, y, mask=mask[:, None] & mask_d[None, :])


def launch_kernel(
    a: AttentionInputs,
    operands: QuantizedOperands,
    ys: tuple[torch.Tensor, ...],
    lse: torch.Tensor | None,
) -> None:
    """Write an attention with its skip.

    Args:
        a: The attention.
        operands: The results of its prologue.
        ys: The result [B, Nq, H*D], or of each of P ranks a tensor for its Nq/P rows, whose rows
            have P*H*D channels: it begins at the H*D of them that this rank computes.
        lse: The logsumexp, fp32 [B, H, Nq], or None.
    """
    batch, n_q, _ = a.q.shape
    tile = tile_of(a)
    launch(
        attention_kernel,
        (cdiv(n_q, tile.block_m), a.spec.heads, batch),
        a.q.device,
        out=AttentionOutput(ys, lse, operands.queries.shift),
        n_rank=n_q // len(ys),
        **skip_arguments(*(a.skip or NO_SKIP), a.q.shape),
        **attention_arguments(a, operands, tile),
        **(register_limit(a, tile) if a.spec.pv == "fp8" else {}),
    )
