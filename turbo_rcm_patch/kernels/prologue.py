"""What stands before the attention kernel, in two launches.

`statistics_kernel` averages k over a sample of tokens (any constant smooths exactly) and finds the
largest magnitude of each channel of v. `prologue_kernel` then normalises, rotates, spreads and
quantises q and k and transposes v, in one pass over memory: a program takes a block of tokens of
one of the three, sums the squares of their rows where the norm spans all heads, and goes from head
to head while the rows are in cache.
"""

from __future__ import annotations

import triton
import triton.language as tl

from turbo_rcm_patch.kernels.heads import kv_limit
from turbo_rcm_patch.kernels.keys import key_block, sample_mean
from turbo_rcm_patch.kernels.queries import query_block
from turbo_rcm_patch.kernels.values import channel_amax, value_block

__all__ = ["prologue_kernel", "statistics_kernel"]


@triton.jit
def statistics_kernel(
    k_ptr, k_words_ptr, mean_ptr, weight_ptr, weight_words_ptr, cos_ptr, sin_ptr,
    v_ptr, amax_ptr, lengths_ptr,
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
                cos_ptr, sin_ptr, k_stride_b, k_stride_n, step, heads, eps,
                CHANNELS, HEAD_DIM, HEAD_PAD, BLOCK_T, BLOCK_C, SAMPLES, NORM, ROPE, WORDS,
            )  # fmt: skip
    if FP8:  # noqa: SIM102 (decided when compiled: without it there is no v to read)
        if at >= means:
            channel_amax(
                (at - means) // heads, (at - means) % heads, b, limit,
                v_ptr, amax_ptr, v_stride_b, v_stride_n, chunk_tokens, chunks, heads,
                HEAD_DIM, HEAD_PAD, BLOCK_T,
            )  # fmt: skip


@triton.jit
def prologue_kernel(
    q_ptr, q_words_ptr, q_int8_ptr, q_scale_ptr, q_weight_ptr, q_weight_words_ptr, shift_ptr,
    counter_ptr,
    k_ptr, k_words_ptr, k_int8_ptr, k_scale_ptr, k_weight_ptr, k_weight_words_ptr, mean_ptr,
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
            cos_ptr, sin_ptr, mean_ptr, k_stride_b, k_stride_n, n_kv_padded, kv_blocks, heads, eps,
            CHANNELS, HEAD_DIM, HEAD_PAD, ROWS, BLOCK_C, GROUP, QMAX,
            K_NORM, ROPE, K_WORDS, SUBTRACT,
        )  # fmt: skip
    elif block < kv_blocks + q_blocks:
        query_block(
            block - kv_blocks, group, b,
            q_ptr, q_words_ptr, q_int8_ptr, q_scale_ptr, q_weight_ptr, q_weight_words_ptr,
            cos_ptr, sin_ptr, mean_ptr, shift_ptr, counter_ptr,
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
