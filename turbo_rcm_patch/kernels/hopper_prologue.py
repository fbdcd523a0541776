"""What stands before the attention kernel, for Hopper, in Gluon: the same two launches.

The arithmetic of `prologue`, for 16-bit rows that begin at multiples of 16 bytes and heads of 64
or 128 channels; see `hopper_tokens` for what is different.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from turbo_rcm_patch.kernels.dependent import let_next_begin, wait_for_previous
from turbo_rcm_patch.kernels.heads import spread_width
from turbo_rcm_patch.kernels.hopper_tokens import (
    allocate,
    copy_rows,
    keep_tables,
    own_layout,
    read_rows,
    rotated,
    row_rms,
    token_block,
    wide_layout,
)
from turbo_rcm_patch.kernels.launch import LENGTHS, cdiv, launch
from turbo_rcm_patch.kernels.operands import NORM_ACROSS, Prologue
from turbo_rcm_patch.kernels.prologue import AMAX_CHUNKS, LOG2_E

__all__ = [
    "HEAD_DIMS",
    "hopper_prologue_kernel",
    "hopper_statistics_kernel",
    "run_hopper_prologue",
    "serves",
]

#: Head dimensions that the kernels are built for.
HEAD_DIMS = (64, 128)

_SLOTS = 132  # programs of q, and of k, at a time, on an H100 or H200
_E4M3_MAX = gl.constexpr(448.0)
_LEAST_V = gl.constexpr(2.0**-117)  # as `values.LEAST_V`
_K_ROWS = gl.constexpr(128)  # keys that share a scale


@gluon.jit
def _values(
    part, h, b, limit,
    v_ptr, amax_ptr, out_ptr, scale_ptr, stride_b, stride_n, n_padded, chunks, tiles,
    CHANNELS: gl.constexpr, D: gl.constexpr, CHUNKS: gl.constexpr,
):  # fmt: skip
    """`values.value_block`, `tiles` times: a thread reads eight channels of the tokens that become
    neighbours, so that what it writes to shared memory is four or eight bytes wide."""
    T: gl.constexpr = 128
    layout: gl.constexpr = gl.BlockedLayout([D // 16, 8], [256 // D, D // 8], [8, 1], [1, 0])
    out_layout: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [8, 1], [1, 0])
    partial_layout: gl.constexpr = wide_layout(D, 4)
    bh = b.to(gl.int64) * (CHANNELS // D) + h
    # Position (h, t, f, e) of a group of 32 holds token (h, f, t, e): see `values.value_block`.
    p = gl.arange(0, T, gl.SliceLayout(1, layout))
    token = (p & ~31) + (p & 16) + ((p >> 1) & 1) * 8 + ((p >> 2) & 3) * 2 + (p & 1)
    start = part * (tiles * T)
    base = v_ptr + b.to(gl.int64) * stride_b + h * D
    base += start.to(gl.int64) * stride_n
    left = limit - start
    following = read_rows(base, token, left, stride_n, D, layout)
    wait_for_previous()  # the maxima
    offs_c = gl.arange(0, CHUNKS, gl.SliceLayout(1, partial_layout))
    partial = read_rows(amax_ptr + bh * (chunks * D), offs_c, chunks, D, D, partial_layout)
    amax = gl.max(partial, axis=0)
    amax = gl.maximum(amax, _LEAST_V)
    if part == 0:
        offs_s = gl.arange(0, D, gl.SliceLayout(0, partial_layout))
        gl.store(scale_ptr + bh * D + offs_s, amax / _E4M3_MAX)
    factor = gl.div_rn(gl.full_like(amax, _E4M3_MAX), amax)
    factor = gl.convert_layout(factor, gl.SliceLayout(0, layout))
    offs_d = gl.arange(0, D, gl.SliceLayout(1, out_layout))
    offs_p = gl.arange(0, T, gl.SliceLayout(0, out_layout))
    out_ptr += bh * D * n_padded + start
    out_at = offs_d[:, None] * n_padded + offs_p[None, :]
    for i in range(0, tiles):
        here = following
        token += T
        more = gl.where(i < tiles - 1, left, 0)
        following = read_rows(base, token, more, stride_n, D, layout)
        if start + i * T < n_padded:
            y = (here.to(gl.float32) * factor[None, :]).to(gl.float8e4nv)
            gl.store(out_ptr + i * T + out_at, gl.convert_layout(y.permute([1, 0]), out_layout))


@gluon.jit
def _zero(counter_ptr, row, n_counters, ROWS: gl.constexpr, COUNTER_ROWS: gl.constexpr):
    """Counters of ROWS rows from `row` on, for the kernel that counts."""
    counters: gl.constexpr = 1 if ROWS < COUNTER_ROWS else ROWS // COUNTER_ROWS
    at = row // COUNTER_ROWS + gl.arange(0, counters, gl.BlockedLayout([1], [32], [8], [0]))
    gl.store(counter_ptr + at, gl.full_like(at, 0), mask=at < n_counters)


@gluon.jit(do_not_specialize=LENGTHS)
def hopper_prologue_kernel(
    q_ptr, q_int8_ptr, q_scale_ptr, q_weight_ptr, q_bias_ptr, shift_ptr, counter_ptr,
    k_ptr, k_int8_ptr, k_scale_ptr, k_weight_ptr, k_bias_ptr, mean_ptr,
    v_ptr, amax_ptr, v_out_ptr, v_scale_ptr, cos_ptr, sin_ptr, lengths_ptr,
    q_stride_b, q_stride_n, k_stride_b, k_stride_n, v_stride_b, v_stride_n,
    n_q, n_kv, n_q_padded, n_kv_padded, n_counters, chunks, step,
    q_programs, k_programs, q_blocks, kv_blocks, q_group, k_group, tiles,
    eps, factor, shift_factor,
    CHANNELS: gl.constexpr, HEAD_DIM: gl.constexpr, QMAX: gl.constexpr,
    COUNTER_ROWS: gl.constexpr, CHUNKS: gl.constexpr, MEANS: gl.constexpr,
    Q_NORM: gl.constexpr, K_NORM: gl.constexpr, ROPE: gl.constexpr, HAS_LENGTHS: gl.constexpr,
    SUBTRACT: gl.constexpr, SHIFT: gl.constexpr, COUNTERS: gl.constexpr, FP8: gl.constexpr,
):  # fmt: skip
    """q and k as int8 and, with FP8, v as transposed e4m3.

    Grid: (blocks of q times groups of q_group heads + the same of k + parts of v times heads,
    batch).
    Arguments as in `prologue.prologue_kernel`, but mean [B, H, MEANS, D]: partial sums.
    """
    let_next_begin()
    at = gl.program_id(0)
    b = gl.program_id(1)
    limit = n_kv
    if HAS_LENGTHS:
        limit = gl.maximum(0, gl.minimum(gl.load(lengths_ptr + b), n_kv)).to(gl.int32)
    count = gl.maximum(1, (limit + step - 1) // step)
    shared = allocate(k_ptr.dtype.element_ty, _K_ROWS, HEAD_DIM, ROPE)
    # Queries first: they need nothing of the kernel before, which may still run.
    if at < q_programs:
        rows: gl.constexpr = 8192 // HEAD_DIM
        if COUNTERS:  # noqa: SIM102 (decided when compiled)
            if at < q_blocks:
                _zero(counter_ptr + b * n_counters, at * rows, n_counters, rows, COUNTER_ROWS)
        token_block(
            at % q_blocks, at // q_blocks, q_group, b, n_q, count, shared,
            q_ptr, q_int8_ptr, q_scale_ptr, q_weight_ptr, q_bias_ptr, cos_ptr, sin_ptr,
            mean_ptr, shift_ptr, q_stride_b, q_stride_n, n_q_padded, eps, factor, shift_factor,
            rows, CHANNELS, HEAD_DIM, QMAX, MEANS, Q_NORM, ROPE, False, False, SHIFT,
        )  # fmt: skip
    elif at < q_programs + k_programs:
        at = at - q_programs
        token_block(
            at % kv_blocks, at // kv_blocks, k_group, b, limit, count, shared,
            k_ptr, k_int8_ptr, k_scale_ptr, k_weight_ptr, k_bias_ptr, cos_ptr, sin_ptr,
            mean_ptr, None, k_stride_b, k_stride_n, n_kv_padded, eps, 1.0, 1.0,
            _K_ROWS, CHANNELS, HEAD_DIM, QMAX, MEANS, K_NORM, ROPE, True, SUBTRACT, False,
        )  # fmt: skip
    elif FP8:
        heads: gl.constexpr = CHANNELS // HEAD_DIM
        at = at - q_programs - k_programs
        _values(
            at // heads, at % heads, b, limit,
            v_ptr, amax_ptr, v_out_ptr, v_scale_ptr, v_stride_b, v_stride_n,
            n_kv_padded, chunks, tiles, CHANNELS, HEAD_DIM, CHUNKS,
        )  # fmt: skip


@gluon.jit
def _sample_sum(
    part, h, b, limit, step,
    x_ptr, mean_ptr, weight_ptr, bias_ptr, cos_ptr, sin_ptr, stride_b, stride_n, eps,
    CHANNELS: gl.constexpr, D: gl.constexpr, MEANS: gl.constexpr,
    NORM: gl.constexpr, ROPE: gl.constexpr,
):  # fmt: skip
    """Sum of one head of x, normalised and rotated, over a part of the tokens 0, step, 2 * step,
    ... < limit."""
    T: gl.constexpr = 8192 // D
    own: gl.constexpr = own_layout(D)
    tile, _, cos, sin = allocate(x_ptr.dtype.element_ty, T, D, ROPE)
    rows = gl.arange(0, T, gl.SliceLayout(1, wide_layout(D, 2)))
    start = part * T * step
    left = (limit - start + step - 1) // step
    base = x_ptr + b.to(gl.int64) * stride_b + start.to(gl.int64) * stride_n
    stride = gl.to_tensor(step).to(gl.int64) * stride_n
    copy_rows(tile, base + h * D, rows, left, stride, D)
    if ROPE:
        at = start.to(gl.int64) * D
        keep_tables(cos_ptr + at, sin_ptr + at, left, step * D, (cos, sin), T, D)
    rms = 0.0
    if NORM == 1:
        rms = row_rms(base, rows, left, stride, eps, CHANNELS, T, D, wide_layout(D, 2))
        rms = gl.convert_layout(rms, gl.SliceLayout(1, own))
    async_copy.wait_group(0)
    x = tile.load(own)
    x = rotated(x, rms, weight_ptr, bias_ptr, h, left, (cos, sin), eps, T, D, NORM, ROPE)
    bh = b.to(gl.int64) * (CHANNELS // D) + h
    at = mean_ptr + (bh * MEANS + part) * D
    gl.store(at + gl.arange(0, D, gl.SliceLayout(0, own)), gl.sum(x, axis=0))


@gluon.jit
def _channel_amax(
    chunk, h, b, limit,
    v_ptr, amax_ptr, stride_b, stride_n, chunk_tokens, chunks,
    CHANNELS: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """`values.channel_amax`."""
    T: gl.constexpr = 128
    layout: gl.constexpr = wide_layout(D, 2)
    start = chunk * chunk_tokens
    base = v_ptr + b.to(gl.int64) * stride_b + h * D + start.to(gl.int64) * stride_n
    left = gl.minimum(limit - start, chunk_tokens)
    amax = gl.zeros([T, D], gl.float32, layout)
    rows = gl.arange(0, T, gl.SliceLayout(1, layout))
    for _ in range(0, gl.cdiv(chunk_tokens, T)):
        x = read_rows(base, rows, left, stride_n, D, layout)
        base += T * stride_n
        left -= T
        amax = gl.maximum(amax, gl.abs(x.to(gl.float32)))
    bh = b.to(gl.int64) * (CHANNELS // D) + h
    offs_d = gl.arange(0, D, gl.SliceLayout(0, layout))
    gl.store(amax_ptr + (bh * chunks + chunk) * D + offs_d, gl.max(amax, axis=0))


@gluon.jit(do_not_specialize=LENGTHS)
def hopper_statistics_kernel(
    k_ptr, mean_ptr, weight_ptr, bias_ptr, cos_ptr, sin_ptr, v_ptr, amax_ptr, lengths_ptr,
    k_stride_b, k_stride_n, v_stride_b, v_stride_n, n_kv, step, chunk_tokens, chunks, eps,
    CHANNELS: gl.constexpr, HEAD_DIM: gl.constexpr, MEANS: gl.constexpr,
    NORM: gl.constexpr, ROPE: gl.constexpr, HAS_LENGTHS: gl.constexpr,
    SMOOTH: gl.constexpr, FP8: gl.constexpr,
):  # fmt: skip
    """Partial sums of a sample of k (SMOOTH) and channel maxima of v by chunks of tokens (FP8).

    Grid: (heads * MEANS with SMOOTH + heads * chunks with FP8, batch). Arguments as in
    `prologue.statistics_kernel`, but mean [B, H, MEANS, D].
    """
    let_next_begin()
    at = gl.program_id(0)
    b = gl.program_id(1)
    heads: gl.constexpr = CHANNELS // HEAD_DIM
    limit = n_kv
    if HAS_LENGTHS:
        limit = gl.maximum(0, gl.minimum(gl.load(lengths_ptr + b), n_kv)).to(gl.int32)
    means: gl.constexpr = heads * MEANS if SMOOTH else 0
    if at < means:
        if SMOOTH:
            _sample_sum(
                at // heads, at % heads, b, limit, step,
                k_ptr, mean_ptr, weight_ptr, bias_ptr, cos_ptr, sin_ptr, k_stride_b, k_stride_n,
                eps, CHANNELS, HEAD_DIM, MEANS, NORM, ROPE,
            )  # fmt: skip
    elif FP8:
        _channel_amax(
            (at - means) // heads, (at - means) % heads, b, limit,
            v_ptr, amax_ptr, v_stride_b, v_stride_n, chunk_tokens, chunks, CHANNELS, HEAD_DIM,
        )  # fmt: skip


def serves(job: Prologue) -> bool:
    """Whether these kernels can do a job: 16-bit rows that can be copied 16 bytes at a time."""
    dense = all(
        x.element_size() == 2
        and x.dtype == job.k.dtype
        and x.stride(1) % 16 == 0
        and x.stride(1) < 2**22
        and (x.shape[0] == 1 or x.stride(0) % 16 == 0)
        and (x.device.type == "meta" or x.data_ptr() % 16 == 0)
        for x in (job.q, job.k, job.v)
    )
    return dense and job.head_dim in HEAD_DIMS


@cache
def _heads_a_program(heads: int, blocks: int, start: float) -> int:
    """How many of the heads of a block of tokens a program takes, so that all end soonest.

    A program pays `start` heads' worth of time before its first head, and then reads one head
    while it computes another.
    """

    def time(group: int) -> float:
        return math.ceil(blocks * math.ceil(heads / group) / _SLOTS) * (group + start)

    return min((math.ceil(heads / groups) for groups in range(1, heads + 1)), key=time)


def run_hopper_prologue(job: Prologue) -> None:
    """Fill the operands of a job."""
    q, k, v, heads = job.q, job.k, job.v, job.heads
    (batch, n_q, channels), n_kv, device = q.shape, k.shape[1], q.device
    queries, keys, values = job.queries, job.keys, job.values
    head_dim, fp8 = job.head_dim, values is not None
    q_rows = 8192 // head_dim

    def empty(count: int) -> torch.Tensor:
        shape = (batch, heads, count, head_dim)
        return torch.empty(shape, dtype=torch.float32, device=device)

    means = cdiv(cdiv(n_kv, job.step), q_rows)
    mean = empty(means) if job.smooth_k else None
    # As many programs as run at a time, beside those of the mean.
    most = max(1, min(AMAX_CHUNKS, 200 * 128 // (head_dim * heads * batch)))
    chunk_tokens = cdiv(cdiv(n_kv, most), 128) * 128
    chunks = cdiv(n_kv, chunk_tokens)
    amax = empty(chunks) if fp8 else None
    common = {
        "k_ptr": k,
        "mean_ptr": mean,
        "cos_ptr": job.cos,
        "sin_ptr": job.sin,
        "v_ptr": v,
        "amax_ptr": amax,
        "lengths_ptr": job.lengths,
        "k_stride_b": 0 if batch == 1 else k.stride(0),
        "k_stride_n": k.stride(1),
        "v_stride_b": 0 if batch == 1 else v.stride(0),
        "v_stride_n": v.stride(1),
        "n_kv": n_kv,
        "step": job.step,
        "chunks": chunks,
        "eps": job.eps,
        "CHANNELS": channels,
        "HEAD_DIM": head_dim,
        "MEANS": means,
        "ROPE": job.cos is not None,
        "HAS_LENGTHS": job.lengths is not None,
        "FP8": fp8,
        "num_warps": 8,
    }
    dependent = job.smooth_k or fp8
    if dependent:
        launch(
            hopper_statistics_kernel,
            (heads * (means * job.smooth_k + chunks * fp8), batch),
            device,
            weight_ptr=job.k_weight,
            bias_ptr=job.k_bias,
            chunk_tokens=chunk_tokens,
            NORM=job.k_norm,
            SMOOTH=job.smooth_k,
            **common,
        )
    n_q_padded, n_kv_padded = queries.int8.shape[2], keys.int8.shape[2]
    q_blocks, kv_blocks = n_q_padded // q_rows, n_kv_padded // _K_ROWS.value
    q_group, k_group = (
        # A norm over all channels reads whole rows first.
        _heads_a_program(heads, batch * blocks, 1 + heads / 4 * (norm == NORM_ACROSS))
        for blocks, norm in ((q_blocks, job.q_norm), (kv_blocks, job.k_norm))
    )
    q_programs = q_blocks * cdiv(heads, q_group)
    k_programs = kv_blocks * cdiv(heads, k_group)
    tiles = min(4, cdiv(kv_blocks * heads * batch, 2 * _SLOTS))
    launch(
        hopper_prologue_kernel,
        (k_programs + q_programs + heads * cdiv(kv_blocks, tiles) * fp8, batch),
        device,
        q_ptr=q,
        q_int8_ptr=queries.int8,
        q_scale_ptr=queries.scale,
        q_weight_ptr=job.q_weight,
        q_bias_ptr=job.q_bias,
        shift_ptr=queries.shift,
        counter_ptr=job.counters,
        k_int8_ptr=keys.int8,
        k_scale_ptr=keys.scale,
        k_weight_ptr=job.k_weight,
        k_bias_ptr=job.k_bias,
        v_out_ptr=None if values is None else values.e4m3,
        v_scale_ptr=None if values is None else values.scale,
        q_stride_b=0 if batch == 1 else q.stride(0),
        q_stride_n=q.stride(1),
        n_q=n_q,
        n_q_padded=n_q_padded,
        n_kv_padded=n_kv_padded,
        n_counters=0 if job.counters is None else job.counters.shape[1],
        q_programs=q_programs,
        k_programs=k_programs,
        q_blocks=q_blocks,
        kv_blocks=kv_blocks,
        q_group=q_group,
        k_group=k_group,
        tiles=tiles,
        factor=job.sm_scale * LOG2_E / spread_width(head_dim),
        shift_factor=job.sm_scale,
        QMAX=job.qmax,
        COUNTER_ROWS=job.counter_rows,
        CHUNKS=AMAX_CHUNKS,
        Q_NORM=job.q_norm,
        K_NORM=job.k_norm,
        SUBTRACT=job.smooth_k,
        SHIFT=queries.shift is not None,
        COUNTERS=job.counters is not None,
        maxnreg=128,  # two programs a multiprocessor
        launch_pdl=dependent,
        **common,
    )
