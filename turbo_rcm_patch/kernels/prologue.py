"""What stands before the attention kernel, in two launches.

`statistics_kernel` averages k over a sample of tokens (any constant smooths exactly) and finds the
largest magnitude of each channel of v. `prologue_kernel` then normalises, rotates, spreads and
quantises q and k and transposes v, in one pass over memory: a program takes a block of tokens of
one of the three, sums the squares of their rows where the norm spans all heads, and goes from head
to head while the rows are in cache.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from turbo_rcm_patch.kernels.heads import kv_limit, spread_width
from turbo_rcm_patch.kernels.keys import key_block, sample_mean
from turbo_rcm_patch.kernels.launch import (
    LENGTHS,
    Target,
    Tile,
    cdiv,
    launch,
    pad_head,
    scale_block,
    tile_for,
)
from turbo_rcm_patch.kernels.operands import Prologue
from turbo_rcm_patch.kernels.queries import query_block
from turbo_rcm_patch.kernels.values import channel_amax, value_block

__all__ = ["AMAX_CHUNKS", "LOG2_E", "prologue_kernel", "run_prologue", "statistics_kernel"]

AMAX_CHUNKS = 32  # at most so many partial maxima of a channel of v
LOG2_E = 1.4426950408889634


@triton.jit(do_not_specialize=LENGTHS)
def statistics_kernel(
    k_ptr, k_words_ptr, mean_ptr, weight_ptr, weight_words_ptr, bias_ptr, bias_words_ptr,
    cos_ptr, sin_ptr, v_ptr, amax_ptr, lengths_ptr,
    k_stride_b, k_stride_n, v_stride_b, v_stride_n, n_kv, step, chunk_tokens, chunks, heads, eps,
    CHANNELS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, SAMPLES: tl.constexpr,
    NORM: tl.constexpr, ROPE: tl.constexpr, WORDS: tl.constexpr, HAS_LENGTHS: tl.constexpr,
    SMOOTH: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Mean of a sample of k (SMOOTH) and channel maxima of v by chunks of tokens (FP8).

    Grid: (heads with SMOOTH + heads * chunks with FP8, batch). Arguments as in `keys.sample_mean`
    and `values.channel_amax`; lengths [B].
    """
    at, b = tl.program_id(0), tl.program_id(1)
    limit = kv_limit(lengths_ptr, b, n_kv, HAS_LENGTHS)
    means = 0
    if SMOOTH:
        means = heads
        if at < means:
            sample_mean(
                at, b, limit, k_ptr, k_words_ptr, mean_ptr, weight_ptr, weight_words_ptr,
                bias_ptr, bias_words_ptr, cos_ptr, sin_ptr,
                k_stride_b, k_stride_n, step, heads, eps,
                CHANNELS, HEAD_DIM, HEAD_PAD, BLOCK_T, BLOCK_C, SAMPLES, NORM, ROPE, WORDS,
            )  # fmt: skip
    if FP8:  # noqa: SIM102 (decided when compiled: without it there is no v to read)
        if at >= means:
            channel_amax(
                (at - means) // heads, (at - means) % heads, b, limit,
                v_ptr, amax_ptr, v_stride_b, v_stride_n, chunk_tokens, chunks, heads,
                HEAD_DIM, HEAD_PAD, BLOCK_T,
            )  # fmt: skip


@triton.jit(do_not_specialize=LENGTHS)
def prologue_kernel(
    q_ptr, q_words_ptr, q_int8_ptr, q_scale_ptr, q_weight_ptr, q_weight_words_ptr,
    q_bias_ptr, q_bias_words_ptr, shift_ptr, counter_ptr,
    k_ptr, k_words_ptr, k_int8_ptr, k_scale_ptr, k_weight_ptr, k_weight_words_ptr,
    k_bias_ptr, k_bias_words_ptr, mean_ptr,
    v_ptr, amax_ptr, v_out_ptr, v_scale_ptr, cos_ptr, sin_ptr, lengths_ptr,
    q_stride_b, q_stride_n, k_stride_b, k_stride_n, v_stride_b, v_stride_n,
    n_q, n_kv, n_q_padded, n_kv_padded, heads, n_counters, chunks, q_blocks, kv_blocks,
    eps, factor, shift_factor,
    CHANNELS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_C: tl.constexpr, GROUP: tl.constexpr, QMAX: tl.constexpr,
    COUNTER_ROWS: tl.constexpr, CHUNKS: tl.constexpr,
    Q_NORM: tl.constexpr, K_NORM: tl.constexpr, ROPE: tl.constexpr,
    Q_WORDS: tl.constexpr, K_WORDS: tl.constexpr, HAS_LENGTHS: tl.constexpr,
    SUBTRACT: tl.constexpr, SHIFT: tl.constexpr, COUNTERS: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """q and k as int8 and, with FP8, v as transposed e4m3.

    Grid: (blocks of ROWS tokens of k, then of q, then of v; groups of GROUP heads; batch).
    Arguments as in `keys.key_block`, `queries.query_block` and `values.value_block`.
    """
    block, group, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    limit = kv_limit(lengths_ptr, b, n_kv, HAS_LENGTHS)
    if block < kv_blocks:
        key_block(
            block, group, b, limit,
            k_ptr, k_words_ptr, k_int8_ptr, k_scale_ptr, k_weight_ptr, k_weight_words_ptr,
            k_bias_ptr, k_bias_words_ptr, cos_ptr, sin_ptr, mean_ptr,
            k_stride_b, k_stride_n, n_kv_padded, kv_blocks, heads, eps,
            CHANNELS, HEAD_DIM, HEAD_PAD, ROWS, BLOCK_C, GROUP, QMAX,
            K_NORM, ROPE, K_WORDS, SUBTRACT,
        )  # fmt: skip
    elif block < kv_blocks + q_blocks:
        query_block(
            block - kv_blocks, group, b,
            q_ptr, q_words_ptr, q_int8_ptr, q_scale_ptr, q_weight_ptr, q_weight_words_ptr,
            q_bias_ptr, q_bias_words_ptr, cos_ptr, sin_ptr, mean_ptr, shift_ptr, counter_ptr,
            q_stride_b, q_stride_n, n_q, n_q_padded, heads, n_counters, eps, factor, shift_factor,
            CHANNELS, HEAD_DIM, HEAD_PAD, ROWS, BLOCK_C, GROUP, COUNTER_ROWS, QMAX,
            Q_NORM, ROPE, Q_WORDS, SHIFT, COUNTERS,
        )  # fmt: skip
    elif FP8:
        for h in range(group * GROUP, tl.minimum((group + 1) * GROUP, heads)):
            value_block(
                block - kv_blocks - q_blocks, h, b, limit,
                v_ptr, amax_ptr, v_out_ptr, v_scale_ptr, v_stride_b, v_stride_n, n_kv_padded,
                chunks, heads, HEAD_DIM, HEAD_PAD, ROWS, CHUNKS,
            )  # fmt: skip


def _as_words(x: torch.Tensor | None) -> torch.Tensor | None:
    """x as int64, four of its 16-bit elements to each, where its layout allows it."""
    if x is None:
        return None
    strides = (*x.stride()[:-1], x.storage_offset(), x.shape[-1])
    if x.element_size() != 2 or any(stride % 4 for stride in strides):
        return None
    # Memory that another library allocated may begin anywhere.
    if x.device.type != "meta" and x.data_ptr() % 8:
        return None
    return x.view(torch.int64)


class _Rows(NamedTuple):
    """The rows of q or k, and weight and bias of their norm, as words where all can be read so."""

    words: torch.Tensor | None = None
    weight_words: torch.Tensor | None = None
    bias_words: torch.Tensor | None = None


def _rows(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, head_dim: int
) -> _Rows:
    """x [B, N, H*D], dense rows; weight [H*D] or [D] or None; bias [D] or None."""
    words = _Rows(*map(_as_words, (x, weight, bias)))
    given = (True, weight is not None, bias is not None)
    readable = all(w is not None for w, there in zip(words, given, strict=True) if there)
    return words if head_dim % 4 == 0 and readable else _Rows()


def _heads_a_program(heads: int, programs: int) -> int:
    """Heads a program takes: all, unless that leaves a large GPU idle."""
    return max(1, min(heads, heads * programs // 512))


def run_prologue(job: Prologue, target: Target, tile: Tile | None = None) -> None:
    """Fill the operands of a job; `tile` in the place of the table's."""
    q, k, v, heads = job.q, job.k, job.v, job.heads
    (batch, _, channels), n_kv, device = q.shape, k.shape[1], q.device
    queries, keys, values = job.queries, job.keys, job.values
    head_dim, fp8 = job.head_dim, values is not None
    head_pad, rows = pad_head(head_dim), scale_block(head_dim)
    if tile is None:
        tile = tile_for("prologue", str(head_pad), target)
    # A thread takes 32 channels of a token: a block of few tokens wants no more warps than that.
    warps = min(tile.warps, max(1, rows * head_pad // 1024))
    q_rows = _rows(q, job.q_weight, job.q_bias, head_dim)
    k_rows = _rows(k, job.k_weight, job.k_bias, head_dim)
    common = {
        "cos_ptr": job.cos,
        "sin_ptr": job.sin,
        "lengths_ptr": job.lengths,
        "k_stride_b": k.stride(0),
        "k_stride_n": k.stride(1),
        "v_stride_b": v.stride(0),
        "v_stride_n": v.stride(1),
        "n_kv": n_kv,
        "heads": heads,
        "eps": job.eps,
        "CHANNELS": channels,
        "HEAD_DIM": head_dim,
        "HEAD_PAD": head_pad,
        "BLOCK_C": min(tile.block_n, 2048 * warps // rows, triton.next_power_of_2(channels)),
        "ROPE": job.cos is not None,
        "HAS_LENGTHS": job.lengths is not None,
        "FP8": fp8,
        "num_stages": tile.stages,
    }

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(batch, heads, *shape, head_pad, dtype=torch.float32, device=device)

    mean = empty() if job.smooth_k else None
    chunk_tokens = cdiv(cdiv(n_kv, AMAX_CHUNKS), rows) * rows
    chunks = cdiv(n_kv, chunk_tokens)
    amax = empty(chunks) if fp8 else None
    # Half the tokens of a prologue's program and half its warps: twice the registers a thread.
    block_t = max(16, rows // 2)
    if job.smooth_k or fp8:
        launch(
            statistics_kernel,
            (heads * (job.smooth_k + chunks * fp8), batch),
            device,
            k_ptr=k,
            k_words_ptr=k_rows.words,
            mean_ptr=mean,
            weight_ptr=job.k_weight,
            weight_words_ptr=k_rows.weight_words,
            bias_ptr=job.k_bias,
            bias_words_ptr=k_rows.bias_words,
            v_ptr=v,
            amax_ptr=amax,
            step=job.step,
            chunk_tokens=chunk_tokens,
            chunks=chunks,
            BLOCK_T=block_t,
            SAMPLES=cdiv(cdiv(n_kv, job.step), block_t) * block_t,
            NORM=job.k_norm,
            WORDS=k_rows.words is not None,
            SMOOTH=job.smooth_k,
            num_warps=max(4, warps // 2),
            **common,
        )
    n_q_padded, n_kv_padded = queries.int8.shape[2], keys.int8.shape[2]
    q_blocks, kv_blocks = n_q_padded // rows, n_kv_padded // rows
    blocks = q_blocks + kv_blocks * (1 + fp8)
    group = _heads_a_program(heads, blocks * batch)
    launch(
        prologue_kernel,
        (blocks, cdiv(heads, group), batch),
        device,
        q_ptr=q,
        q_words_ptr=q_rows.words,
        q_int8_ptr=queries.int8.view(torch.int64),
        q_scale_ptr=queries.scale,
        q_weight_ptr=job.q_weight,
        q_weight_words_ptr=q_rows.weight_words,
        q_bias_ptr=job.q_bias,
        q_bias_words_ptr=q_rows.bias_words,
        shift_ptr=queries.shift,
        counter_ptr=job.counters,
        k_ptr=k,
        k_words_ptr=k_rows.words,
        k_int8_ptr=keys.int8.view(torch.int64),
        k_scale_ptr=keys.scale,
        k_weight_ptr=job.k_weight,
        k_weight_words_ptr=k_rows.weight_words,
        k_bias_ptr=job.k_bias,
        k_bias_words_ptr=k_rows.bias_words,
        mean_ptr=None if mean is None else mean.view(torch.int64),
        v_ptr=v,
        amax_ptr=amax,
        v_out_ptr=None if values is None else values.e4m3,
        v_scale_ptr=None if values is None else values.scale,
        q_stride_b=q.stride(0),
        q_stride_n=q.stride(1),
        n_q=q.shape[1],
        n_q_padded=n_q_padded,
        n_kv_padded=n_kv_padded,
        n_counters=0 if job.counters is None else job.counters.shape[1],
        chunks=chunks,
        q_blocks=q_blocks,
        kv_blocks=kv_blocks,
        factor=job.sm_scale * LOG2_E / spread_width(head_pad),
        shift_factor=job.sm_scale,
        ROWS=rows,
        GROUP=group,
        QMAX=job.qmax,
        COUNTER_ROWS=job.counter_rows,
        CHUNKS=AMAX_CHUNKS,
        Q_NORM=job.q_norm,
        K_NORM=job.k_norm,
        Q_WORDS=q_rows.words is not None,
        K_WORDS=k_rows.words is not None,
        SUBTRACT=job.smooth_k,
        SHIFT=queries.shift is not None,
        COUNTERS=job.counters is not None,
        num_warps=warps,
        **common,
    )
