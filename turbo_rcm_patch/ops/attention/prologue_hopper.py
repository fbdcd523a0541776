"""The prologue of the attention for Hopper, in Gluon: q and k as int8, v as e4m3, in two launches.

The arithmetic is that of `prologue_triton`, for 16-bit rows that begin at multiples of 16 bytes
and heads of 64 or 128 channels. Memory is fastest if neighbouring threads access neighbouring
addresses. Norm, rotary pairs and the Hadamard matrix need 32 neighbouring channels in one thread.
So a tile is copied to shared memory in the first layout and read from there in the second, and the
int8 result takes the opposite way. The portable kernels load in the second layout, at a stride of
64 bytes, which takes four times the transactions.

`hopper_statistics_kernel` writes partial sums of a sample of k, and channel maxima and means of v.
`hopper_prologue_kernel` is its dependent launch (PDL), and waits for them only before it reads
them. All eight warps of a program do the same. Over time, per head:

    copies     head 0 | head 1       | head 2       | ...          asynchronous, one head ahead
    warps             | head 0: norm, rotate, (wait for the mean), Hadamard, int8 | head 1 ...

Shared memory of a program, for T tokens (128 of k, 8,192 / D of q) of D channels:

    tile      16 bits [T, D], swizzled in pieces of 16 bytes: a head as read
    out       int8 [T, D], swizzled alike: a head as written
    cos, sin  fp32 [T, D / 2] each, with a rotary embedding, for all heads

Together they take at most 113 KiB (D = 128 with a rotary embedding), so that two programs share a
multiprocessor.

There are no explicit barriers. `async_copy.wait_group(0)` waits for a thread's copies. Gluon puts
a barrier of the program between a write to shared memory and another thread's read of it.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.core import PropagateNan

from turbo_rcm_patch.ops import formats
from turbo_rcm_patch.ops.formats import NORM_ACROSS, QMAX, CommonOperands, Prologue
from turbo_rcm_patch.ops.hopper_common import (
    copy_async,
    grid_dependency_wait,
    launch_dependents,
)
from turbo_rcm_patch.ops.launch import AMAX_CHUNKS, LENGTHS, cdiv, launch, strides

_TINY = gl.constexpr(formats.TINY)
_ROUNDER = gl.constexpr(formats.ROUNDER)
_ROUNDER_BITS = gl.constexpr(formats.ROUNDER_BITS)
_E4M3_MAX = gl.constexpr(formats.E4M3_MAX)
_LEAST_V = gl.constexpr(formats.LEAST_V)
_LARGEST_CENTRED = gl.constexpr(formats.LARGEST_CENTRED)
_MEAN_ROWS = gl.constexpr(formats.MEAN_ROWS)
_ERROR_STEPS = gl.constexpr(float(formats.ERROR_STEPS))
_ALL = gl.constexpr(PropagateNan.ALL)
_CHUNKS = gl.constexpr(AMAX_CHUNKS)


class Options(NamedTuple):
    """What a prologue is compiled for.

    Attributes:
        CHANNELS: H*D.
        D: Channels of a head.
        QMAX: Largest magnitude of quantised q and k.
        MEANS: Partial sums of the mean of k.
        Q_NORM: Kind of the norm of q, see `formats.norm_kind`.
        K_NORM: Kind of the norm of k.
        COUNTER_ROWS: Rows of q that share a counter.
    """

    CHANNELS: int
    D: int
    QMAX: int
    MEANS: int
    Q_NORM: int
    K_NORM: int
    COUNTER_ROWS: int


@gluon.jit
def read_rows(ptr, rows, count, stride, D: gl.constexpr, layout: gl.constexpr):
    """Load rows [T] of D channels in `layout`, 0 from row `count` on.

    Rows are counted from ptr, so that offsets fit into 32 bits.
    """
    offs_d = gl.arange(0, D, gl.SliceLayout(0, layout))
    at = rows[:, None] * stride + offs_d[None, :]
    return gl.load(ptr + at, mask=(rows < count)[:, None], other=0.0)


@gluon.jit
def _squares(x, T: gl.constexpr, D: gl.constexpr):
    """Sum the squares of each thread's part of a row: [T, D / 8]."""
    x = x.to(gl.float32)
    return gl.sum((x * x).reshape([T, D // 8, 8]), axis=2)


@gluon.jit
def row_rms(ptr, rows, count, stride, eps, OPTIONS: gl.constexpr, layout: gl.constexpr):
    """Compute 1 / rms of whole rows, [T]. Two heads are loaded at a time."""
    T: gl.constexpr = rows.shape[0]
    D: gl.constexpr = OPTIONS.D
    heads: gl.constexpr = OPTIONS.CHANNELS // D
    total = _squares(read_rows(ptr, rows, count, stride, D, layout), T, D)
    for pair in range(0, (heads - 1) // 2):
        at = ptr + (2 * pair + 1) * D
        first = read_rows(at, rows, count, stride, D, layout)
        second = read_rows(at + D, rows, count, stride, D, layout)
        total += _squares(first, T, D)
        total += _squares(second, T, D)
    if heads % 2 == 0:
        total += _squares(read_rows(ptr + (heads - 1) * D, rows, count, stride, D, layout), T, D)
    return 1.0 / gl.sqrt(gl.sum(total, axis=1) / OPTIONS.CHANNELS + eps)


@gluon.constexpr_function
def row_per_thread_layout(D):
    """Return a layout with 32 neighbouring channels per thread.

    The threads of a row are 8 (or 16) lanes apart. So neighbouring lanes have different rows, and
    access different banks of swizzled shared memory.
    """
    return gl.BlockedLayout([1, 32], [1024 // D, D // 32], [8, 1], [0, 1])


@gluon.constexpr_function
def coalesced_layout(D, bytes_each):
    """Return a layout with 16 bytes per thread, neighbouring threads at neighbouring addresses."""
    each = 16 // bytes_each
    return gl.BlockedLayout([1, each], [32 * each // D, D // each], [8, 1], [1, 0])


@gluon.constexpr_function
def _swizzled(bytes_each):
    """Return a layout of shared memory that permutes pieces of 16 bytes depending on the row."""
    return gl.SwizzledSharedLayout(16 // bytes_each, 1, 8, [1, 0])


@gluon.jit
def copy_rows(tile, ptr, rows, count, stride, D: gl.constexpr):
    """Start to copy rows [T] of D 16-bit channels into shared memory, 0 from row `count` on."""
    offs_d = gl.arange(0, D, gl.SliceLayout(0, coalesced_layout(D, 2)))
    at = rows[:, None] * stride + offs_d[None, :]
    copy_async(tile, ptr + at, mask=(rows < count)[:, None])
    async_copy.commit_group()


@gluon.jit
def keep_tables(rotary, at, count, stride, tables, T: gl.constexpr, D: gl.constexpr):
    """Store cos of even and sin of odd channels of T tokens in shared memory, for all heads.

    rotary: cos, sin [N, D]; at: offset of the first of these tokens.
    """
    layout: gl.constexpr = coalesced_layout(D, 4)
    rows = gl.arange(0, T, gl.SliceLayout(1, layout))
    cos, _ = (
        read_rows(rotary[0] + at, rows, count, stride, D, layout).reshape([T, D // 2, 2]).split()
    )
    tables[0].slice(0, T).store(cos.to(gl.float32))
    _, sin = (
        read_rows(rotary[1] + at, rows, count, stride, D, layout).reshape([T, D // 2, 2]).split()
    )
    tables[1].slice(0, T).store(sin.to(gl.float32))


@gluon.jit
def rotated(x, rms, rows, h, rows_left, tables, eps, NORM: gl.constexpr):
    """Normalise and rotate x [T, D], one head, in fp32.

    rows: `TokenRows`; rms [T] (NORM 1); tables: cos and sin in shared memory, or None. Rows from
    `rows_left` on, 0 in x and in the tables, stay 0. NORM as in `formats.norm_kind`.
    """
    T: gl.constexpr = x.shape[0]
    D: gl.constexpr = x.shape[1]
    layout: gl.constexpr = x.type.layout
    x = x.to(gl.float32)
    if NORM == 3:  # layer norm
        x = x - (gl.sum(x, axis=1) / D)[:, None]
    if NORM >= 2:  # per head
        rms = 1.0 / gl.sqrt(gl.sum(x * x, axis=1) / D + eps)
    if NORM != 0:
        offs_d = gl.arange(0, D, gl.SliceLayout(0, layout))
        first = h * D if NORM == 1 else 0
        w = gl.load(rows.weight_ptr + first + offs_d)
        x = x * rms[:, None] * w.to(gl.float32)[None, :]
        if NORM == 3:
            x = x + gl.load(rows.bias_ptr + offs_d).to(gl.float32)[None, :]
            if tables is None:
                offs_t = gl.arange(0, T, gl.SliceLayout(1, layout))
                x = gl.where((offs_t < rows_left)[:, None], x, 0.0)
    if tables is not None:
        even, odd = x.reshape([T, D // 2, 2]).split()
        cos = tables[0].slice(0, T).load(even.type.layout)
        sin = tables[1].slice(0, T).load(even.type.layout)
        x = gl.join(even * cos - odd * sin, even * sin + odd * cos).reshape([T, D])
        x = gl.convert_layout(x, layout, assert_trivial=True)
    return x


@gluon.jit
def _hadamard(x, T: gl.constexpr, D: gl.constexpr):
    """Compute `prologue_triton.hadamard` in the same stages: five in a thread, one between two."""
    layout: gl.constexpr = x.type.layout
    x = x.reshape([T, D // 32, 2, 2, 2, 2, 2])
    for _ in gl.static_range(5):
        even, odd = x.split()
        x = gl.join(even + odd, even - odd).permute([0, 1, 6, 2, 3, 4, 5])
    if D == 64:
        x = x.reshape([T, 2, 32])
        total = gl.sum(x, axis=1)[:, None, :]
        second = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(2, x.type.layout)))
        x = gl.where(second[None, :, None] == 1, total - 2.0 * x, total + 0.0 * x)
    return gl.convert_layout(x.reshape([T, D]), layout, assert_trivial=True)


@gluon.jit
def _larger(x, y):
    """Return the larger number, or NaN if one is NaN, so that a NaN in x makes the scale NaN."""
    return gl.maximum(x, y, propagate_nan=_ALL)


@gluon.jit
def _mean(mean_ptr, bh, count, OPTIONS: gl.constexpr, layout: gl.constexpr):
    """Compute the mean of a head of k, [D] in `layout`, from MEANS sums over `count` tokens."""
    D: gl.constexpr = OPTIONS.D
    MEANS: gl.constexpr = OPTIONS.MEANS
    at = mean_ptr + bh * (MEANS * D) + gl.arange(0, D, gl.BlockedLayout([1], [32], [8], [0]))
    total = gl.load(at)
    for i in gl.static_range(1, MEANS):
        total += gl.load(at + i * D)
    return gl.convert_layout(total / count, layout)


@gluon.jit
def allocate(dtype: gl.constexpr, T: gl.constexpr, D: gl.constexpr, ROPE: gl.constexpr):
    """Allocate the shared memory of a program: a tile as read, a tile of int8, cos and sin."""
    tile = gl.allocate_shared_memory(dtype, [T, D], _swizzled(2))
    out = gl.allocate_shared_memory(gl.int8, [T, D], _swizzled(1))
    cos, sin = tile, tile
    if ROPE:
        cos = gl.allocate_shared_memory(gl.float32, [T, D // 2], _swizzled(4))
        sin = gl.allocate_shared_memory(gl.float32, [T, D // 2], _swizzled(4))
    return tile, out, cos, sin


@gluon.jit
def token_block(
    place, limit, count, memory, rows, common, factors,
    T: gl.constexpr, OPTIONS: gl.constexpr, NORM: gl.constexpr, KEYS: gl.constexpr,
):  # fmt: skip
    """Compute `prologue_triton.token_block`: T tokens of some heads of k (KEYS) or q.

    place: block of tokens, part of the heads, heads in a part, and batch entry; limit: the number
    of tokens; count: tokens that the mean is over; memory: that of `allocate`.
    """
    block, part, group, b = place
    out = rows.out
    mean_ptr = common.mean_ptr
    D: gl.constexpr = OPTIONS.D
    QMAX: gl.constexpr = OPTIONS.QMAX
    heads: gl.constexpr = OPTIONS.CHANNELS // D
    wide: gl.constexpr = coalesced_layout(D, 2)
    row_layout: gl.constexpr = row_per_thread_layout(D)
    narrow: gl.constexpr = coalesced_layout(D, 1)
    tile = memory[0].slice(0, T)
    int8_tile = memory[1].slice(0, T)
    offs_t = gl.arange(0, T, gl.SliceLayout(1, wide))
    row_offs_t = gl.arange(0, T, gl.SliceLayout(1, row_layout))
    start = block * T
    rows_left = limit - start
    out_offs = gl.arange(0, T, gl.SliceLayout(1, narrow))[:, None] * D
    out_offs += gl.arange(0, D, gl.SliceLayout(0, narrow))[None, :]
    base = rows.ptr + b.to(gl.int64) * rows.strides[0] + start.to(gl.int64) * rows.strides[1]
    first = part * group
    last = gl.minimum(first + group, heads) - 1
    copy_rows(tile, base + first * D, offs_t, rows_left, rows.strides[1], D)
    tables = None
    if common.rotary is not None:
        tables = (memory[2], memory[3])
        keep_tables(common.rotary, start.to(gl.int64) * D, rows_left, D, tables, T, D)
    rms = 0.0
    if NORM == 1:
        rms = row_rms(base, offs_t, rows_left, rows.strides[1], factors.eps, OPTIONS, wide)
        rms = gl.convert_layout(rms, gl.SliceLayout(1, row_layout))
    MEAN: gl.constexpr = (KEYS and mean_ptr is not None) or out.shift is not None
    if MEAN:
        grid_dependency_wait()
    for h in range(first, last + 1):
        async_copy.wait_group(0)
        x = tile.load(row_layout)
        # The next head is copied while this one is computed.
        following = gl.where(h < last, rows_left, 0)
        copy_rows(tile, base + (h + 1) * D, offs_t, following, rows.strides[1], D)
        x = rotated(x, rms, rows, h, rows_left, tables, factors.eps, NORM)
        bh = b.to(gl.int64) * heads + h
        if MEAN:
            mean = _mean(mean_ptr, bh, count, OPTIONS, gl.SliceLayout(0, row_layout))
            if KEYS:
                x = gl.where((row_offs_t < rows_left)[:, None], x - mean[None, :], 0.0)
            else:
                shift = gl.sum(x * mean[None, :], axis=1) * factors.shift
                gl.store(out.shift + bh * out.n_padded + start + row_offs_t, shift)
        x = _hadamard(x, T, D)
        amax = gl.reduce(gl.abs(x), 1, _larger)
        if KEYS:
            amax = gl.reduce(amax, 0, _larger)
        amax = gl.where(amax <= _TINY, 1.0, amax)
        if KEYS:
            gl.store(out.scale + bh * (out.n_padded // T) + block, amax / QMAX)
            x = x * gl.div_rn(gl.to_tensor(QMAX * 1.0), amax)
        else:
            gl.store(out.scale + bh * out.n_padded + start + row_offs_t, amax / QMAX * factors.q)
            x = x * gl.div_rn(gl.full_like(amax, QMAX), amax)[:, None]
        int8_tile.store((x + _ROUNDER).to(gl.int32, bitcast=True).to(gl.int8))
        gl.store(out.int8 + (bh * out.n_padded + start) * D + out_offs, int8_tile.load(narrow))
    async_copy.wait_group(0)


#: Values of q, and of a sample of k, that a program holds: rows times channels of a head.
_TILE = gl.constexpr(8192)
#: Programs that find maxima of v, in tokens times channels: as many as run beside those of the
#: mean.
_AMAX_PROGRAMS = 200 * 128
_SLOTS = 132  # programs of q, and as many of k, that an H100 or H200 runs at a time
_K_ROWS = gl.constexpr(128)  # keys that share a scale


@gluon.jit
def _values(part, h, b, limit, v, sizes, OPTIONS: gl.constexpr):
    """Compute `value_block` for some tiles; sizes: n_padded, chunks, and tiles of a program.

    A thread reads eight channels of tokens that become neighbours, so that its writes to shared
    memory are four or eight bytes wide.
    """
    n_padded, chunks, tiles = sizes
    T: gl.constexpr = 128
    D: gl.constexpr = OPTIONS.D
    layout: gl.constexpr = gl.BlockedLayout([D // 16, 8], [256 // D, D // 8], [8, 1], [1, 0])
    out_layout: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [8, 1], [1, 0])
    partial_layout: gl.constexpr = coalesced_layout(D, 4)
    bh = b.to(gl.int64) * (OPTIONS.CHANNELS // D) + h
    # Position (h, t, f, e) of a group of 32 holds token (h, f, t, e): see `value_block`.
    p = gl.arange(0, T, gl.SliceLayout(1, layout))
    token = (p & ~31) + (p & 16) + ((p >> 1) & 1) * 8 + ((p >> 2) & 3) * 2 + (p & 1)
    start = part * (tiles * T)
    base = v.ptr + b.to(gl.int64) * v.strides[0] + h * D
    base += start.to(gl.int64) * v.strides[1]
    rows_left = limit - start
    following = read_rows(base, token, rows_left, v.strides[1], D, layout)
    grid_dependency_wait()  # for the maxima and the mean
    offs_c = gl.arange(0, _CHUNKS, gl.SliceLayout(1, partial_layout))
    stats = v.stats_ptr + bh * ((1 + chunks) * D)
    partial = read_rows(stats + D, offs_c, chunks, D, D, partial_layout)
    amax = gl.max(partial, axis=0)
    offs_s = gl.arange(0, D, gl.SliceLayout(0, partial_layout))
    mean = gl.where(amax < _LARGEST_CENTRED, gl.load(stats + offs_s), 0.0)
    amax = gl.maximum(amax + gl.abs(mean), _LEAST_V)
    levels = 3 * bh * D
    if part == 0:
        gl.store(v.levels_ptr + levels + offs_s, amax / _E4M3_MAX)
        gl.store(v.levels_ptr + levels + D + offs_s, mean)
    factor = gl.div_rn(gl.full_like(amax, _E4M3_MAX), amax)
    factor = gl.convert_layout(factor, gl.SliceLayout(0, layout))
    mean = gl.convert_layout(mean, gl.SliceLayout(0, layout))
    each: gl.constexpr = D // 16  # tokens a thread has
    errors = gl.zeros([T, D], gl.int32, layout).reshape([T // each, each, D])
    errors = gl.sum(errors, axis=1)
    offs_d = gl.arange(0, D, gl.SliceLayout(1, out_layout))
    offs_p = gl.arange(0, T, gl.SliceLayout(0, out_layout))
    out_ptr = v.out_ptr + (bh * D * n_padded + start)
    out_at = offs_d[:, None] * n_padded + offs_p[None, :]
    for i in range(0, tiles):
        x = (following.to(gl.float32) - mean[None, :]) * factor[None, :]
        x = gl.where((token < rows_left)[:, None], x, 0.0)
        y = x.to(gl.float8e4nv)
        error = (x - y.to(gl.float32)) * _ERROR_STEPS
        error = (error + _ROUNDER).to(gl.int32, bitcast=True) - _ROUNDER_BITS
        errors += gl.sum(error.reshape([T // each, each, D]), axis=1)
        # Load the next tile while this one is written, because earlier there is no room for it.
        token += T
        more = gl.where(i < tiles - 1, rows_left, 0)
        following = read_rows(base, token, more, v.strides[1], D, layout)
        if start + i * T < n_padded:
            gl.store(out_ptr + i * T + out_at, gl.convert_layout(y.permute([1, 0]), out_layout))
    total = gl.sum(errors, axis=0)
    offs_e = gl.arange(0, D, total.type.layout)
    # The errors are integers, so their sum does not depend on the order.
    gl.atomic_add(v.error_ptr + levels + 2 * D + offs_e, total, sem="relaxed")


@gluon.jit
def _zero(counter_ptr, row, n_counters, ROWS: gl.constexpr, COUNTER_ROWS: gl.constexpr):
    """Zero the counters of ROWS rows from `row` on, for the one-launch kernel."""
    counters: gl.constexpr = 1 if ROWS < COUNTER_ROWS else ROWS // COUNTER_ROWS
    at = row // COUNTER_ROWS + gl.arange(0, counters, gl.BlockedLayout([1], [32], [8], [0]))
    gl.store(counter_ptr + at, gl.full_like(at, 0), mask=at < n_counters)


@gluon.jit(do_not_specialize=LENGTHS)
def hopper_prologue_kernel(
    q, k, v, common,
    n_q, n_kv, n_counters, chunks, step, q_programs, k_programs, q_blocks, kv_blocks,
    q_group, k_group, tiles, factors, OPTIONS: gl.constexpr,
):  # fmt: skip
    """Store q and k as int8 and, for fp8, v as transposed e4m3.

    Grid: (blocks of q times groups of q_group heads + the same of k + parts of v times heads,
    batch).
    Arguments as in `prologue_triton.prologue_kernel`.
    """
    launch_dependents()
    lengths_ptr, counter_ptr = common.lengths_ptr, common.counter_ptr
    at = gl.program_id(0)
    b = gl.program_id(1)
    limit = n_kv
    if lengths_ptr is not None:
        limit = gl.maximum(0, gl.minimum(gl.load(lengths_ptr + b), n_kv)).to(gl.int32)
    count = gl.maximum(1, (limit + step - 1) // step)
    memory = allocate(k.ptr.dtype.element_ty, _K_ROWS, OPTIONS.D, common.rotary is not None)
    # Queries come first, because they do not read the results of the kernel before.
    if at < q_programs:
        rows: gl.constexpr = _TILE // OPTIONS.D
        if counter_ptr is not None:  # noqa: SIM102 (a compile-time branch)
            if at < q_blocks:
                _zero(
                    counter_ptr + b * n_counters, at * rows, n_counters, rows, OPTIONS.COUNTER_ROWS
                )
        place = (at % q_blocks, at // q_blocks, q_group, b)
        token_block(
            place, n_q, count, memory, q, common, factors,
            T=rows, OPTIONS=OPTIONS, NORM=OPTIONS.Q_NORM, KEYS=False,
        )  # fmt: skip
    elif at < q_programs + k_programs:
        at = at - q_programs
        place = (at % kv_blocks, at // kv_blocks, k_group, b)
        token_block(
            place, limit, count, memory, k, common, factors,
            T=_K_ROWS, OPTIONS=OPTIONS, NORM=OPTIONS.K_NORM, KEYS=True,
        )  # fmt: skip
    elif v.stats_ptr is not None:
        heads: gl.constexpr = OPTIONS.CHANNELS // OPTIONS.D
        at = at - q_programs - k_programs
        sizes = (k.out.n_padded, chunks, tiles)
        _values(at // heads, at % heads, b, limit, v, sizes, OPTIONS)


@gluon.jit
def _sample_sum(place, limit, step, rows, common, eps, OPTIONS: gl.constexpr):
    """Store the sum of a normalised, rotated head of k over tokens 0, step, ... < limit.

    place: part of the sample, head and batch entry.
    """
    part, h, b = place
    D: gl.constexpr = OPTIONS.D
    T: gl.constexpr = _TILE // D
    row_layout: gl.constexpr = row_per_thread_layout(D)
    tile, _, cos, sin = allocate(rows.ptr.dtype.element_ty, T, D, common.rotary is not None)
    offs_t = gl.arange(0, T, gl.SliceLayout(1, coalesced_layout(D, 2)))
    start = part * T * step
    rows_left = (limit - start + step - 1) // step
    base = rows.ptr + b.to(gl.int64) * rows.strides[0] + start.to(gl.int64) * rows.strides[1]
    stride = gl.to_tensor(step).to(gl.int64) * rows.strides[1]
    copy_rows(tile, base + h * D, offs_t, rows_left, stride, D)
    tables = None
    if common.rotary is not None:
        tables = (cos, sin)
        keep_tables(common.rotary, start.to(gl.int64) * D, rows_left, step * D, tables, T, D)
    rms = 0.0
    if OPTIONS.K_NORM == 1:
        rms = row_rms(base, offs_t, rows_left, stride, eps, OPTIONS, coalesced_layout(D, 2))
        rms = gl.convert_layout(rms, gl.SliceLayout(1, row_layout))
    async_copy.wait_group(0)
    x = tile.load(row_layout)
    x = rotated(x, rms, rows, h, rows_left, tables, eps, OPTIONS.K_NORM)
    bh = b.to(gl.int64) * (OPTIONS.CHANNELS // D) + h
    at = common.mean_ptr + (bh * OPTIONS.MEANS + part) * D
    gl.store(at + gl.arange(0, D, gl.SliceLayout(0, row_layout)), gl.sum(x, axis=0))


@gluon.jit
def _channel_amax(chunk, h, b, limit, v, chunk_tokens, chunks, OPTIONS: gl.constexpr):
    """Compute `channel_amax`."""
    T: gl.constexpr = 128
    D: gl.constexpr = OPTIONS.D
    layout: gl.constexpr = coalesced_layout(D, 2)
    start = chunk * chunk_tokens
    base = v.ptr + b.to(gl.int64) * v.strides[0] + h * D + start.to(gl.int64) * v.strides[1]
    rows_left = gl.minimum(limit - start, chunk_tokens)
    amax = gl.zeros([T, D], gl.float32, layout)
    rows = gl.arange(0, T, gl.SliceLayout(1, layout))
    for _ in range(0, gl.cdiv(chunk_tokens, T)):
        x = read_rows(base, rows, rows_left, v.strides[1], D, layout)
        base += T * v.strides[1]
        rows_left -= T
        amax = gl.maximum(amax, gl.abs(x.to(gl.float32)))
    bh = b.to(gl.int64) * (OPTIONS.CHANNELS // D) + h
    offs_d = gl.arange(0, D, gl.SliceLayout(0, layout))
    row = bh * (1 + chunks) + 1 + chunk
    gl.store(v.stats_ptr + row * D + offs_d, gl.max(amax, axis=0))


@gluon.jit
def _value_mean(h, b, limit, step, samples, v, chunks, OPTIONS: gl.constexpr):
    """Compute `value_mean`, adding in the same order."""
    D: gl.constexpr = OPTIONS.D
    layout: gl.constexpr = coalesced_layout(D, 2)
    base = v.ptr + b.to(gl.int64) * v.strides[0] + h * D
    rows_left = (limit + step - 1) // step
    stride = gl.to_tensor(step).to(gl.int64) * v.strides[1]
    rows = gl.arange(0, _MEAN_ROWS, gl.SliceLayout(1, layout))
    total = gl.zeros([_MEAN_ROWS, D], gl.float32, layout)
    for start in range(0, samples, _MEAN_ROWS):
        x = read_rows(base, start + rows, rows_left, stride, D, layout)
        total += x.to(gl.float32)
    for i in gl.static_range(5):
        total = gl.sum(total.reshape([2, _MEAN_ROWS >> (i + 1), D]), axis=0)
    total = total.reshape([D])
    mean = gl.div_rn(total, gl.full_like(total, 0.0) + gl.maximum(1, rows_left).to(gl.float32))
    bh = b.to(gl.int64) * (OPTIONS.CHANNELS // D) + h
    offs_d = gl.arange(0, D, total.type.layout)
    gl.store(v.stats_ptr + bh * (1 + chunks) * D + offs_d, mean)
    gl.store(v.error_ptr + (3 * bh + 2) * D + offs_d, gl.full_like(offs_d, 0))


@gluon.jit(do_not_specialize=LENGTHS)
def hopper_statistics_kernel(
    k, v, common, n_kv, step, chunk_tokens, chunks, eps, OPTIONS: gl.constexpr
):
    """Store sums of a sample of k, and the mean of a sample and maxima of v.

    Grid: (heads * MEANS if k is averaged + heads * chunks + heads for fp8, batch). Arguments as in
    `prologue_triton.statistics_kernel`.
    """
    launch_dependents()
    mean_ptr, lengths_ptr = common.mean_ptr, common.lengths_ptr
    at = gl.program_id(0)
    b = gl.program_id(1)
    D: gl.constexpr = OPTIONS.D
    heads: gl.constexpr = OPTIONS.CHANNELS // D
    limit = n_kv
    if lengths_ptr is not None:
        limit = gl.maximum(0, gl.minimum(gl.load(lengths_ptr + b), n_kv)).to(gl.int32)
    means: gl.constexpr = heads * OPTIONS.MEANS if mean_ptr is not None else 0
    if at < means:
        if mean_ptr is not None:
            _sample_sum((at // heads, at % heads, b), limit, step, k, common, eps, OPTIONS)
    elif v.stats_ptr is not None:
        chunk = (at - means) // heads
        h = (at - means) % heads
        if chunk < chunks:
            _channel_amax(chunk, h, b, limit, v, chunk_tokens, chunks, OPTIONS)
        else:
            samples = (n_kv + step - 1) // step
            _value_mean(h, b, limit, step, samples, v, chunks, OPTIONS)


@cache
def _heads_a_program(heads: int, blocks: int, start: float) -> int:
    """Return the number of heads per program of a block of tokens with which all end soonest.

    Before its first head a program takes the time of `start` heads. Then it loads one head while
    it computes another.
    """

    def time(group: int) -> float:
        return math.ceil(blocks * math.ceil(heads / group) / _SLOTS) * (group + start)

    return min((math.ceil(heads / groups) for groups in range(1, heads + 1)), key=time)


def run_prologue(job: Prologue) -> None:
    """Compute the operands of a job into its memory."""
    a, queries, keys, values, counters, counter_rows = job
    q, k, v, heads, head_dim = a.q, a.k, a.v, a.spec.heads, a.head_dim
    (batch, n_q, channels), n_kv, device = q.shape, k.shape[1], q.device
    fp8, smooth = values is not None, a.spec.smooth_k
    q_rows = _TILE.value // head_dim

    def empty(count: int) -> torch.Tensor:
        shape = (batch, heads, count, head_dim)
        return torch.empty(shape, dtype=torch.float32, device=device)

    means = cdiv(cdiv(n_kv, job.step), q_rows)
    mean = empty(means) if smooth else None
    most = max(1, min(AMAX_CHUNKS, _AMAX_PROGRAMS // (head_dim * heads * batch)))
    chunk_tokens = cdiv(cdiv(n_kv, most), 128) * 128
    chunks = cdiv(n_kv, chunk_tokens)
    arguments = {
        "k": job.key_rows(strides(k)),
        "v": job.value_rows(strides(v), empty(1 + chunks) if fp8 else None),
        "common": CommonOperands(mean, a.rotary, a.kv_lengths, counters),
        "n_kv": n_kv,
        "step": job.step,
        "chunks": chunks,
        "OPTIONS": Options(
            channels, head_dim, QMAX[a.spec.attention], means, job.q_norm, job.k_norm, counter_rows
        ),
        "num_warps": 8,
    }
    dependent = smooth or fp8
    if dependent:
        launch(
            hopper_statistics_kernel,
            (heads * (means * smooth + (chunks + 1) * fp8), batch),
            device,
            chunk_tokens=chunk_tokens,
            eps=a.norms.eps,
            **arguments,
        )
    q_blocks, kv_blocks = queries.n_padded // q_rows, keys.n_padded // _K_ROWS.value
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
        q=job.query_rows(strides(q)),
        n_q=n_q,
        n_counters=0 if counters is None else counters.shape[1],
        q_programs=q_programs,
        k_programs=k_programs,
        q_blocks=q_blocks,
        kv_blocks=kv_blocks,
        q_group=q_group,
        k_group=k_group,
        tiles=tiles,
        factors=job.factors,
        maxnreg=128,  # two programs per multiprocessor
        launch_pdl=dependent,
        **arguments,
    )
