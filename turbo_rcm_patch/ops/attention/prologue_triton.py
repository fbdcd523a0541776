"""The prologue of the attention kernel: q and k to int8 and v to e4m3, in two launches.

`statistics_kernel` averages k and v over a sample of tokens, and finds the largest magnitude of
each channel of v. The averages are subtracted later; any constant can be subtracted exactly.
`prologue_kernel` then normalises, rotates, mixes and quantises q and k, and transposes and rounds
v, in one pass over memory. A program takes a block of tokens of q, k or v. If the norm spans all
heads, it first sums the squares of the rows. Then it goes from head to head while the rows are in
cache. The rounding errors of v are summed over all tokens, and the attention adds their mean back.

This is the plain form, for any head and dtype. On Hopper `prologue_hopper` runs instead where it
can.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from turbo_rcm_patch.ops import formats
from turbo_rcm_patch.ops.formats import QMAX, CommonOperands, Prologue, scale_block
from turbo_rcm_patch.ops.launch import (
    AMAX_CHUNKS,
    LENGTHS,
    cdiv,
    launch,
    pad_head,
    target_of,
    tile_for,
)
from turbo_rcm_patch.ops.numerics import (
    ROUNDER,
    ROUNDER_BITS,
    TINY,
    kv_limit,
    load_rotary,
    nearest_int8,
    norm_rotate_tile,
)

_E4M3_MAX = tl.constexpr(formats.E4M3_MAX)
_LEAST_V = tl.constexpr(formats.LEAST_V)
_LARGEST_CENTRED = tl.constexpr(formats.LARGEST_CENTRED)
_MEAN_ROWS = tl.constexpr(formats.MEAN_ROWS)
_ERROR_STEPS = tl.constexpr(float(formats.ERROR_STEPS))
_CHUNKS = tl.constexpr(AMAX_CHUNKS)


class Form(NamedTuple):
    """The numbers of a prologue that are known when it is compiled.

    Attributes:
        CHANNELS: H*D.
        HEAD_DIM: D.
        HEAD_PAD: D up to a power of two.
        BLOCK_T: Tokens of a program.
        BLOCK_C: Channels that a norm across all heads reads at a time.
        GROUP: Heads of a program.
        QMAX: Largest magnitude of quantised q and k.
        Q_NORM: Kind of the norm of q, see `formats.norm_kind`.
        K_NORM: Kind of the norm of k.
        COUNTER_ROWS: Rows of q that share a counter.
    """

    CHANNELS: int
    HEAD_DIM: int
    HEAD_PAD: int
    BLOCK_T: int
    BLOCK_C: int
    GROUP: int
    QMAX: int
    Q_NORM: int
    K_NORM: int
    COUNTER_ROWS: int


# --- q and k -------------------------------------------------------------------------------------


@triton.jit
def row_pointers(rows, b, offs_t):
    """Return pointers [T] to the first channels of tokens offs_t of q, k or v."""
    return rows.ptr + b.to(tl.int64) * rows.strides[0] + offs_t.to(tl.int64) * rows.strides[1]


@triton.jit
def inverse_rms_of(row_ptrs, mask_t, eps, FORM: tl.constexpr):
    """Compute 1 / rms of whole rows, [T, 1]."""
    total = tl.zeros([row_ptrs.shape[0]], tl.float32)
    for start in range(0, FORM.CHANNELS, FORM.BLOCK_C):
        offs_c = start + tl.arange(0, FORM.BLOCK_C)
        x = tl.load(
            row_ptrs[:, None] + offs_c[None, :],
            mask=mask_t[:, None] & (offs_c < FORM.CHANNELS)[None, :],
            other=0.0,
        ).to(tl.float32)
        total += tl.sum(x * x, axis=1)
    return (1.0 / tl.sqrt(total / FORM.CHANNELS + eps))[:, None]


@triton.jit
def head_tile(rows, rotary, tokens, h, inverse_rms, eps, FORM: tl.constexpr, NORM: tl.constexpr):
    """Normalise and rotate head h of some tokens: [T, HEAD_PAD] fp32, 0 where masked.

    tokens: pointers to their rows, their numbers and their mask, [T] each. The rotary tables are
    loaded for each head, because beside a head there are no registers to keep them.
    """
    row_ptrs, offs_t, mask_t = tokens
    offs_d = tl.arange(0, FORM.HEAD_PAD)
    mask_d = offs_d < FORM.HEAD_DIM
    mask = mask_t[:, None] & mask_d[None, :]
    offs_c = h * FORM.HEAD_DIM + offs_d
    x = tl.load(row_ptrs[:, None] + offs_c[None, :], mask=mask, other=0.0).to(tl.float32)
    weight, bias = 1.0, 0.0
    if NORM != 0:
        offs_w = offs_c if NORM == 1 else offs_d
        weight = tl.load(rows.weight_ptr + offs_w, mask=mask_d, other=0.0).to(tl.float32)[None, :]
    if NORM == 3:
        # Masked like x, so that a token past the end stays 0.
        bias = tl.load(rows.bias_ptr + offs_d, mask=mask_d, other=0.0).to(tl.float32)
        bias = tl.where(mask, bias[None, :], 0.0)
    tables = None
    if rotary is not None:
        tables = load_rotary(rotary, offs_t[:, None] * FORM.HEAD_DIM + offs_d[None, :], mask)
    return norm_rotate_tile(x, inverse_rms, weight, bias, tables, eps, FORM.HEAD_DIM, NORM)


@triton.jit
def hadamard(x):
    """Multiply every `hadamard_width` channels of x [T, HEAD_PAD] fp32 by a Hadamard matrix.

    The matrix is not normalised. Applied to both q and k it only multiplies their products by a
    factor. It spreads the outliers of single channels over the others, so that the int8 steps get
    finer (as in FlashAttention-3, arXiv 2407.08608). There is one stage of sums and differences
    per bit of the channel's index.
    """
    T: tl.constexpr = x.shape[0]
    HEAD_PAD: tl.constexpr = x.shape[1]
    second = tl.arange(0, 2)[None, :, None] == 1
    for i in tl.static_range(5):
        pairs = tl.reshape(x, [T * HEAD_PAD >> (i + 1), 2, 1 << i])
        total = tl.sum(pairs, axis=1)[:, None, :]
        difference = tl.sum(tl.where(second, -pairs, pairs), axis=1)[:, None, :]
        x = tl.where(second, difference, total)
    if HEAD_PAD == 64:
        # As on Hopper: the difference is the sum less twice the second value.
        pairs = tl.reshape(x, [T, 2, 32])
        total = tl.sum(pairs, axis=1)[:, None, :]
        x = tl.where(second, total - 2.0 * pairs, total + 0.0 * pairs)
    return tl.reshape(x, [T, HEAD_PAD])


@triton.jit
def sample_mean(h, b, limit, rows, common, step, eps, FORM: tl.constexpr):
    """Store the mean of a normalised, rotated head of k over tokens 0, step, ... < limit.

    rows: `TokenRows` of k.
    """
    count = tl.cdiv(limit, step)
    total = tl.full([FORM.HEAD_PAD], 0.0, tl.float32)
    for start in range(0, count, FORM.BLOCK_T):
        offs_t = (start + tl.arange(0, FORM.BLOCK_T)) * step
        mask_t = offs_t < limit
        row_ptrs = row_pointers(rows, b, offs_t)
        inverse_rms = 1.0
        if FORM.K_NORM == 1:
            inverse_rms = inverse_rms_of(row_ptrs, mask_t, eps, FORM)
        tokens = (row_ptrs, offs_t, mask_t)
        x = head_tile(rows, common.rotary, tokens, h, inverse_rms, eps, FORM, FORM.K_NORM)
        total += tl.sum(x, axis=0)
    bh = b * (FORM.CHANNELS // FORM.HEAD_DIM) + h
    out = common.mean_ptr + bh * FORM.HEAD_PAD + tl.arange(0, FORM.HEAD_PAD)
    tl.store(out, total / tl.maximum(1, count))


@triton.jit
def token_block(
    block, group, b, limit, rows, common, factors,
    FORM: tl.constexpr, NORM: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Store BLOCK_T tokens of GROUP heads of k (KEYS) or q as int8 with their scales.

    Before that, norm, rotary embedding, smoothing and `hadamard` are applied. Tokens from `limit`
    on are masked, and masked keys are 0. rows: `TokenRows`; common: `CommonOperands`. Its mean is
    subtracted from k, and for the shift of q, q · mean * factors.shift. Scales are of blocks of
    k, and of rows of q, there times factors.q.
    """
    HEADS: tl.constexpr = FORM.CHANNELS // FORM.HEAD_DIM
    out = rows.out
    offs_t = block * FORM.BLOCK_T + tl.arange(0, FORM.BLOCK_T)
    offs_d = tl.arange(0, FORM.HEAD_PAD)
    offs_out = tl.arange(0, FORM.BLOCK_T)[:, None] * FORM.HEAD_PAD + offs_d[None, :]
    mask_t = offs_t < limit
    row_ptrs = row_pointers(rows, b, offs_t)
    inverse_rms = 1.0
    if NORM == 1:
        inverse_rms = inverse_rms_of(row_ptrs, mask_t, factors.eps, FORM)
    tokens = (row_ptrs, offs_t, mask_t)
    for h in range(group * FORM.GROUP, tl.minimum((group + 1) * FORM.GROUP, HEADS)):
        bh = b.to(tl.int64) * HEADS + h
        x = head_tile(rows, common.rotary, tokens, h, inverse_rms, factors.eps, FORM, NORM)
        if common.mean_ptr is not None:
            mean = tl.load(common.mean_ptr + bh * FORM.HEAD_PAD + offs_d)[None, :]
            if KEYS:
                x = tl.where(mask_t[:, None], x - mean, 0.0)
            if out.shift is not None:
                shift = tl.sum(x * mean, axis=1) * factors.shift
                tl.store(out.shift + bh * out.n_padded + offs_t, shift)
        x = hadamard(x)
        # A maximum drops NaN but a sum keeps it, so a NaN in x makes the scale NaN.
        if KEYS:
            amax, total = tl.max(tl.abs(x)), tl.sum(x)
        else:
            amax, total = tl.max(tl.abs(x), axis=1), tl.sum(x, axis=1)
        amax = tl.where(amax > TINY, amax, 1.0)
        inverse = tl.div_rn(tl.zeros_like(amax) + FORM.QMAX, amax)
        if KEYS:
            scale = tl.where(total == total, amax / FORM.QMAX, total)
            scales = out.scale + bh * (out.n_padded // FORM.BLOCK_T)
            tl.store(scales + block, scale)
        else:
            scale = tl.where(total == total, amax / FORM.QMAX * factors.q, total)
            tl.store(out.scale + bh * out.n_padded + offs_t, scale)
            inverse = inverse[:, None]
        out_ptr = out.int8 + (bh * out.n_padded + block * FORM.BLOCK_T) * FORM.HEAD_PAD
        tl.store(out_ptr + offs_out, nearest_int8(x, inverse))


@triton.jit
def zero_counters(ptr, row, n_counters, FORM: tl.constexpr):
    """Zero the counters of BLOCK_T rows from `row` on, for the one-launch kernel."""
    fewer: tl.constexpr = FORM.BLOCK_T < FORM.COUNTER_ROWS
    counters: tl.constexpr = 1 if fewer else FORM.BLOCK_T // FORM.COUNTER_ROWS
    counter = row // FORM.COUNTER_ROWS + tl.arange(0, counters)
    tl.store(ptr + counter, 0, mask=counter < n_counters)


# --- v -------------------------------------------------------------------------------------------


@triton.jit
def load_values(v, b, h, offs_t, limit, FORM: tl.constexpr):
    """Load tokens offs_t of a head of v, [T, HEAD_PAD] fp32, 0 from `limit` on."""
    offs_d = tl.arange(0, FORM.HEAD_PAD)
    return tl.load(
        row_pointers(v, b, offs_t)[:, None] + (h * FORM.HEAD_DIM + offs_d)[None, :],
        mask=(offs_t < limit)[:, None] & (offs_d < FORM.HEAD_DIM)[None, :],
        other=0.0,
    ).to(tl.float32)


@triton.jit
def channel_amax(chunk, h, b, limit, v, chunk_tokens, chunks, FORM: tl.constexpr):
    """Store the largest magnitude of each channel of a head of v over a chunk of tokens.

    v: `ValueRows`.
    """
    amax = tl.full([FORM.BLOCK_T, FORM.HEAD_PAD], 0.0, tl.float32)
    for start in range(0, chunk_tokens, FORM.BLOCK_T):
        offs_t = chunk * chunk_tokens + start + tl.arange(0, FORM.BLOCK_T)
        amax = tl.maximum(amax, tl.abs(load_values(v, b, h, offs_t, limit, FORM)))
    bh = b.to(tl.int64) * (FORM.CHANNELS // FORM.HEAD_DIM) + h
    out = v.stats_ptr + (bh * (1 + chunks) + 1 + chunk) * FORM.HEAD_PAD
    tl.store(out + tl.arange(0, FORM.HEAD_PAD), tl.max(amax, axis=0))


@triton.jit
def value_mean(h, b, limit, v, step, chunks, FORM: tl.constexpr):
    """Store the mean of each channel of a head of v over tokens 0, step, 2 * step, ... < limit.

    v: `ValueRows`. The sums of errors, the last row of its levels, are zeroed for `value_block`.
    """
    HEAD_PAD: tl.constexpr = FORM.HEAD_PAD
    count = tl.cdiv(limit, step)
    total = tl.zeros([_MEAN_ROWS, HEAD_PAD], tl.float32)
    for start in range(0, count, _MEAN_ROWS):
        offs_t = (start + tl.arange(0, _MEAN_ROWS)) * step
        total += load_values(v, b, h, offs_t, limit, FORM)
    # Add pairwise, so that all kernels add in the same order, whatever their layouts are.
    for i in tl.static_range(5):
        total = tl.sum(tl.reshape(total, [2, _MEAN_ROWS >> (i + 1), HEAD_PAD]), axis=0)
    total = tl.reshape(total, [HEAD_PAD])
    count = tl.maximum(1, count).to(tl.float32)
    bh = b.to(tl.int64) * (FORM.CHANNELS // FORM.HEAD_DIM) + h
    offs_d = tl.arange(0, HEAD_PAD)
    tl.store(v.stats_ptr + bh * (1 + chunks) * HEAD_PAD + offs_d, tl.div_rn(total, count))
    tl.store(v.error_ptr + (3 * bh + 2) * HEAD_PAD + offs_d, tl.zeros([HEAD_PAD], tl.int32))


@triton.jit
def value_block(block, h, b, limit, v, n_padded, chunks, FORM: tl.constexpr):
    """Store BLOCK_T tokens of a head of v, less their mean, transposed in e4m3.

    There is one scale per channel. Tokens are permuted within groups of 32. Tokens from `limit` on
    are masked. v: `ValueRows`; the rounding errors are added to the last row of its levels.
    """
    HEAD_PAD: tl.constexpr = FORM.HEAD_PAD
    offs_d = tl.arange(0, HEAD_PAD)
    bh = b.to(tl.int64) * (FORM.CHANNELS // FORM.HEAD_DIM) + h
    offs_c = tl.arange(0, _CHUNKS)
    stats = v.stats_ptr + bh * (1 + chunks) * HEAD_PAD + offs_d
    partial = tl.load(
        stats[None, :] + (1 + offs_c[:, None]) * HEAD_PAD,
        mask=(offs_c < chunks)[:, None],
        other=0.0,
    )
    amax = tl.max(partial, axis=0)
    mean = tl.where(amax < _LARGEST_CENTRED, tl.load(stats), 0.0)
    amax = tl.maximum(amax + tl.abs(mean), _LEAST_V)
    levels = 3 * bh * HEAD_PAD + offs_d
    if block == 0:
        tl.store(v.levels_ptr + levels, amax / _E4M3_MAX)
        tl.store(v.levels_ptr + levels + HEAD_PAD, mean)
    # Position (h, t, f, e) of a group of 32 holds token (h, f, t, e), sizes (2, 4, 2, 2): with
    # keys in this order the accumulator of q k^T is, register by register, the operand of p v.
    p = tl.arange(0, FORM.BLOCK_T)
    token = (p & ~31) + (p & 16) + ((p >> 1) & 1) * 8 + ((p >> 2) & 3) * 2 + (p & 1)
    offs_t = block * FORM.BLOCK_T + token
    x = load_values(v, b, h, offs_t, limit, FORM)
    inverse = tl.div_rn(tl.full([HEAD_PAD], _E4M3_MAX, tl.float32), amax)
    mask = (offs_t < limit)[:, None] & (offs_d < FORM.HEAD_DIM)[None, :]
    x = tl.where(mask, (x - mean[None, :]) * inverse[None, :], 0.0)
    y = x.to(tl.float8e4nv)
    tl.store(
        v.out_ptr
        + (bh * HEAD_PAD + offs_d[:, None]) * n_padded
        + (block * FORM.BLOCK_T + p)[None, :],
        tl.trans(y),
    )
    error = (x - y.to(tl.float32)) * _ERROR_STEPS
    error = (error + ROUNDER).to(tl.int32, bitcast=True) - ROUNDER_BITS
    # The errors are integers, so their sum does not depend on the order.
    tl.atomic_add(v.error_ptr + levels + 2 * HEAD_PAD, tl.sum(error, axis=0), sem="relaxed")


# --- the two launches ----------------------------------------------------------------------------


@triton.jit(do_not_specialize=LENGTHS)
def statistics_kernel(k, v, common, n_kv, step, chunk_tokens, chunks, eps, FORM: tl.constexpr):
    """Store the mean of a sample of k, and the mean of a sample and maxima of v.

    Grid: (heads if k is averaged + heads * chunks + heads for fp8, batch). k: `TokenRows`;
    v: `ValueRows`; common: `CommonOperands`.
    """
    HEADS: tl.constexpr = FORM.CHANNELS // FORM.HEAD_DIM
    MEANS: tl.constexpr = HEADS if common.mean_ptr is not None else 0
    program, b = tl.program_id(0), tl.program_id(1)
    limit = kv_limit(common.lengths_ptr, b, n_kv)
    if program < MEANS:
        if common.mean_ptr is not None:
            sample_mean(program, b, limit, k, common, step, eps, FORM)
    elif v.stats_ptr is not None:
        chunk, h = (program - MEANS) // HEADS, (program - MEANS) % HEADS
        if chunk < chunks:
            channel_amax(chunk, h, b, limit, v, chunk_tokens, chunks, FORM)
        else:
            value_mean(h, b, limit, v, step, chunks, FORM)


@triton.jit(do_not_specialize=LENGTHS)
def prologue_kernel(q, k, v, common, n_q, n_kv, n_counters, chunks, factors, FORM: tl.constexpr):
    """Store q and k as int8 and, for fp8, v as transposed e4m3.

    Grid: (blocks of BLOCK_T tokens of k, then of q, then of v; groups of GROUP heads; batch).
    q, k: `TokenRows`; v: `ValueRows`; common: `CommonOperands`.
    """
    block, group, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    limit = kv_limit(common.lengths_ptr, b, n_kv)
    q_blocks = q.out.n_padded // FORM.BLOCK_T
    kv_blocks = k.out.n_padded // FORM.BLOCK_T
    if block < kv_blocks:
        token_block(block, group, b, limit, k, common, factors, FORM, NORM=FORM.K_NORM, KEYS=True)
    elif block < kv_blocks + q_blocks:
        block -= kv_blocks
        if common.counter_ptr is not None:  # noqa: SIM102 (a compile-time branch)
            if group == 0:
                counters = common.counter_ptr + b * n_counters
                zero_counters(counters, block * FORM.BLOCK_T, n_counters, FORM)
        token_block(block, group, b, n_q, q, common, factors, FORM, NORM=FORM.Q_NORM, KEYS=False)
    elif v.stats_ptr is not None:
        HEADS: tl.constexpr = FORM.CHANNELS // FORM.HEAD_DIM
        block -= kv_blocks + q_blocks
        for h in range(group * FORM.GROUP, tl.minimum((group + 1) * FORM.GROUP, HEADS)):
            value_block(block, h, b, limit, v, k.out.n_padded, chunks, FORM)


def run_prologue(job: Prologue) -> None:
    """Compute the operands of a job into its memory."""
    a, queries, keys, values, counters, counter_rows = job
    heads, head_dim, device = a.spec.heads, a.head_dim, a.q.device
    (batch, n_q, channels), n_kv = a.q.shape, a.k.shape[1]
    fp8, smooth = values is not None, a.spec.smooth_k
    head_pad, rows = pad_head(head_dim), scale_block(head_dim)
    tile = tile_for("prologue", str(head_pad), target_of(device))
    blocks = queries.n_padded // rows + keys.n_padded // rows * (1 + fp8)
    # A thread holds 32 values of a head, so a block of few tokens has work for few warps.
    warps = min(tile.warps, max(1, rows * head_pad // 1024))
    form = Form(
        CHANNELS=channels,
        HEAD_DIM=head_dim,
        HEAD_PAD=head_pad,
        BLOCK_T=rows,
        BLOCK_C=min(tile.block_n, 2048 * warps // rows, triton.next_power_of_2(channels)),
        # All heads, unless that leaves a large GPU idle.
        GROUP=max(1, min(heads, heads * blocks * batch // 512)),
        QMAX=QMAX[a.spec.attention],
        Q_NORM=job.q_norm,
        K_NORM=job.k_norm,
        COUNTER_ROWS=counter_rows,
    )

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(batch, heads, *shape, head_pad, dtype=torch.float32, device=device)

    chunk_tokens = cdiv(cdiv(n_kv, AMAX_CHUNKS), rows) * rows
    chunks = cdiv(n_kv, chunk_tokens)
    arguments = {
        "k": job.key_rows(a.k.stride()[:2]),
        "v": job.value_rows(a.v.stride()[:2], empty(1 + chunks) if fp8 else None),
        "common": CommonOperands(empty() if smooth else None, a.rotary, a.kv_lengths, counters),
        "n_kv": n_kv,
        "chunks": chunks,
        "num_stages": tile.stages,
    }
    if smooth or fp8:
        launch(
            statistics_kernel,
            (heads * (smooth + (chunks + 1) * fp8), batch),
            device,
            step=job.step,
            chunk_tokens=chunk_tokens,
            eps=a.norms.eps,
            # With half the tokens and half the warps a thread may use twice the registers.
            FORM=form._replace(BLOCK_T=max(16, rows // 2)),
            num_warps=max(4, warps // 2),
            **arguments,
        )
    launch(
        prologue_kernel,
        (blocks, cdiv(heads, form.GROUP), batch),
        device,
        q=job.query_rows(a.q.stride()[:2]),
        n_q=n_q,
        n_counters=0 if counters is None else counters.shape[1],
        factors=job.factors,
        FORM=form,
        num_warps=warps,
        **arguments,
    )
