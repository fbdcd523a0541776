"""A block of tokens of q or k as int8, for Hopper, in Gluon.

Memory wants neighbouring threads at neighbouring addresses; norm, rotary pairs and the Hadamard
matrix want 32 neighbouring channels in one thread. What Triton cannot say and Gluon can is who
holds what when: a tile is copied to shared memory as memory wants it, while the head before it is
computed, read from there as the arithmetic wants it, and goes back the same way as int8. `keys`
and `queries`, which do the same in Triton, read with a thread's share in mind, at a stride of 64
bytes, and pay for it with four times the transactions.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.core import PropagateNan

from turbo_rcm_patch.kernels.dependent import wait_for_previous

__all__ = [
    "allocate",
    "copy_async",
    "copy_rows",
    "keep_tables",
    "own_layout",
    "read_rows",
    "rotated",
    "row_rms",
    "token_block",
    "wide_layout",
]

# Renamed in Triton 3.9.
copy_async = (
    async_copy.async_load
    if hasattr(async_copy, "async_load")
    else async_copy.async_copy_global_to_shared
)

_TINY = gl.constexpr(2.0**-100)  # as `heads.TINY`
_MAGIC = gl.constexpr(12582912.0)  # 1.5 * 2**23: adding it rounds to an integer, half to even
_ALL = gl.constexpr(PropagateNan.ALL)


@gluon.jit
def read_rows(ptr, rows, count, stride, D: gl.constexpr, layout: gl.constexpr):
    """Rows [T] of D channels, 0 from row `count` on, in `layout`.

    Rows are counted from ptr, so that 32 bits hold what is added to it.
    """
    offs_d = gl.arange(0, D, gl.SliceLayout(0, layout))
    at = rows[:, None] * stride + offs_d[None, :]
    return gl.load(ptr + at, mask=(rows < count)[:, None], other=0.0)


@gluon.jit
def _squares(x, T: gl.constexpr, D: gl.constexpr):
    """Sums of squares [T, D / 8]: of what a thread has of a row."""
    x = x.to(gl.float32)
    return gl.sum((x * x).reshape([T, D // 8, 8]), axis=2)


@gluon.jit
def row_rms(
    ptr, rows, count, stride, eps,
    CHANNELS: gl.constexpr, T: gl.constexpr, D: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """1 / rms of whole rows, [T]. Two heads are under way at a time."""
    heads: gl.constexpr = CHANNELS // D
    total = _squares(read_rows(ptr, rows, count, stride, D, layout), T, D)
    for pair in range(0, (heads - 1) // 2):
        at = ptr + (2 * pair + 1) * D
        one = read_rows(at, rows, count, stride, D, layout)
        other = read_rows(at + D, rows, count, stride, D, layout)
        total += _squares(one, T, D)
        total += _squares(other, T, D)
    if heads % 2 == 0:
        total += _squares(read_rows(ptr + (heads - 1) * D, rows, count, stride, D, layout), T, D)
    return 1.0 / gl.sqrt(gl.sum(total, axis=1) / CHANNELS + eps)


@gluon.constexpr_function
def own_layout(D):
    """32 neighbouring channels a thread; the threads of a row are 8 (or 16) lanes apart, so that
    neighbouring lanes, in different rows, meet different banks of swizzled shared memory."""
    return gl.BlockedLayout([1, 32], [1024 // D, D // 32], [8, 1], [0, 1])


@gluon.constexpr_function
def wide_layout(D, bytes_each):
    """16 bytes a thread, neighbours at neighbouring addresses."""
    each = 16 // bytes_each
    return gl.BlockedLayout([1, each], [32 * each // D, D // each], [8, 1], [1, 0])


@gluon.constexpr_function
def _swizzled(bytes_each):
    """Shared memory in which pieces of 16 bytes change places with the row."""
    return gl.SwizzledSharedLayout(16 // bytes_each, 1, 8, [1, 0])


@gluon.jit
def copy_rows(tile, ptr, rows, count, stride, D: gl.constexpr):
    """Start to copy rows [T] of D 16-bit channels, 0 from row `count` on, into shared memory."""
    offs_d = gl.arange(0, D, gl.SliceLayout(0, wide_layout(D, 2)))
    at = rows[:, None] * stride + offs_d[None, :]
    copy_async(tile, ptr + at, mask=(rows < count)[:, None])
    async_copy.commit_group()


@gluon.jit
def keep_tables(cos_ptr, sin_ptr, count, stride, tables, T: gl.constexpr, D: gl.constexpr):
    """cos of even and sin of odd channels of T tokens into shared memory, for every head."""
    layout: gl.constexpr = wide_layout(D, 4)
    rows = gl.arange(0, T, gl.SliceLayout(1, layout))
    cos, _ = read_rows(cos_ptr, rows, count, stride, D, layout).reshape([T, D // 2, 2]).split()
    tables[0].slice(0, T).store(cos.to(gl.float32))
    _, sin = read_rows(sin_ptr, rows, count, stride, D, layout).reshape([T, D // 2, 2]).split()
    tables[1].slice(0, T).store(sin.to(gl.float32))


@gluon.jit
def rotated(
    x, rms, weight_ptr, bias_ptr, h, left, tables, eps,
    T: gl.constexpr, D: gl.constexpr, NORM: gl.constexpr, ROPE: gl.constexpr,
):  # fmt: skip
    """x [T, D] in fp32, one head, normalised and rotated; rms [T] (NORM 1).

    Rows from `left` on, 0 in x and in the tables, stay 0. NORM as in `operands`.
    """
    own: gl.constexpr = x.type.layout
    x = x.to(gl.float32)
    if NORM == 3:  # layer norm
        x = x - (gl.sum(x, axis=1) / D)[:, None]
    if NORM >= 2:  # per head
        rms = 1.0 / gl.sqrt(gl.sum(x * x, axis=1) / D + eps)
    if NORM != 0:
        offs_d = gl.arange(0, D, gl.SliceLayout(0, own))
        first = h * D if NORM == 1 else 0
        w = gl.load(weight_ptr + first + offs_d)
        x = x * rms[:, None] * w.to(gl.float32)[None, :]
        if NORM == 3:
            x = x + gl.load(bias_ptr + offs_d).to(gl.float32)[None, :]
            if not ROPE:
                rows = gl.arange(0, T, gl.SliceLayout(1, own))
                x = gl.where((rows < left)[:, None], x, 0.0)
    if ROPE:
        even, odd = x.reshape([T, D // 2, 2]).split()
        cos = tables[0].slice(0, T).load(even.type.layout)
        sin = tables[1].slice(0, T).load(even.type.layout)
        x = gl.join(even * cos - odd * sin, even * sin + odd * cos).reshape([T, D])
        x = gl.convert_layout(x, own, assert_trivial=True)
    return x


@gluon.jit
def _spread(x, T: gl.constexpr, D: gl.constexpr):
    """`heads.spread`, stage for stage."""
    own: gl.constexpr = x.type.layout
    x = x.reshape([T, D // 32, 2, 2, 2, 2, 2])
    for _ in gl.static_range(5):
        one, other = x.split()
        x = gl.join(one + other, one - other).permute([0, 1, 6, 2, 3, 4, 5])
    if D == 64:
        x = x.reshape([T, 2, 32])
        total = gl.sum(x, axis=1)[:, None, :]
        second = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(2, x.type.layout)))
        x = gl.where(second[None, :, None] == 1, total - 2.0 * x, total + 0.0 * x)
    return gl.convert_layout(x.reshape([T, D]), own, assert_trivial=True)


@gluon.jit
def _larger(x, y):
    """The larger, or NaN: a NaN in x becomes a NaN scale, not a zero."""
    return gl.maximum(x, y, propagate_nan=_ALL)


@gluon.jit
def _mean(mean_ptr, bh, count, D: gl.constexpr, MEANS: gl.constexpr, layout: gl.constexpr):
    """The mean of a head of k, [D] in `layout`, from MEANS partial sums over `count` tokens."""
    at = mean_ptr + bh * (MEANS * D) + gl.arange(0, D, gl.BlockedLayout([1], [32], [8], [0]))
    total = gl.load(at)
    for i in gl.static_range(1, MEANS):
        total += gl.load(at + i * D)
    return gl.convert_layout(total / count, layout)


@gluon.jit
def allocate(dtype: gl.constexpr, T: gl.constexpr, D: gl.constexpr, ROPE: gl.constexpr):
    """Shared memory of a program: a tile as read, a tile of int8, cos and sin."""
    tile = gl.allocate_shared_memory(dtype, [T, D], _swizzled(2))
    out = gl.allocate_shared_memory(gl.int8, [T, D], _swizzled(1))
    cos, sin = tile, tile
    if ROPE:
        cos = gl.allocate_shared_memory(gl.float32, [T, D // 2], _swizzled(4))
        sin = gl.allocate_shared_memory(gl.float32, [T, D // 2], _swizzled(4))
    return tile, out, cos, sin


@gluon.jit
def token_block(
    block, part, group, b, limit, count, shared,
    x_ptr, int8_ptr, scale_ptr, weight_ptr, bias_ptr, cos_ptr, sin_ptr, mean_ptr, shift_ptr,
    stride_b, stride_n, n_padded, eps, factor, shift_factor,
    T: gl.constexpr, CHANNELS: gl.constexpr, D: gl.constexpr, QMAX: gl.constexpr,
    MEANS: gl.constexpr, NORM: gl.constexpr, ROPE: gl.constexpr,
    KEYS: gl.constexpr, SUBTRACT: gl.constexpr, SHIFT: gl.constexpr,
):  # fmt: skip
    """T tokens of `group` heads as int8: `keys.key_block` (KEYS) or `queries.query_block`."""
    heads: gl.constexpr = CHANNELS // D
    wide: gl.constexpr = wide_layout(D, 2)
    own: gl.constexpr = own_layout(D)
    narrow: gl.constexpr = wide_layout(D, 1)
    tile = shared[0].slice(0, T)
    out = shared[1].slice(0, T)
    tables = (shared[2], shared[3])
    rows = gl.arange(0, T, gl.SliceLayout(1, wide))
    own_rows = gl.arange(0, T, gl.SliceLayout(1, own))
    start = block * T
    left = limit - start
    out_rows = gl.arange(0, T, gl.SliceLayout(1, narrow))[:, None] * D
    out_rows += gl.arange(0, D, gl.SliceLayout(0, narrow))[None, :]
    base = x_ptr + b.to(gl.int64) * stride_b + start.to(gl.int64) * stride_n
    first = part * group
    last = gl.minimum(first + group, heads) - 1
    copy_rows(tile, base + first * D, rows, left, stride_n, D)
    if ROPE:
        at = start.to(gl.int64) * D
        keep_tables(cos_ptr + at, sin_ptr + at, left, D, tables, T, D)
    rms = 0.0
    if NORM == 1:
        rms = row_rms(base, rows, left, stride_n, eps, CHANNELS, T, D, wide)
        rms = gl.convert_layout(rms, gl.SliceLayout(1, own))
    if SUBTRACT or SHIFT:
        wait_for_previous()  # the mean
    for h in range(first, last + 1):
        async_copy.wait_group(0)
        x = tile.load(own)
        # The next head is copied while this one is computed.
        following = gl.where(h < last, left, 0)
        copy_rows(tile, base + (h + 1) * D, rows, following, stride_n, D)
        x = rotated(x, rms, weight_ptr, bias_ptr, h, left, tables, eps, T, D, NORM, ROPE)
        bh = b.to(gl.int64) * heads + h
        if SUBTRACT:
            mean = _mean(mean_ptr, bh, count, D, MEANS, gl.SliceLayout(0, own))
            x = gl.where((own_rows < left)[:, None], x - mean[None, :], 0.0)
        if SHIFT:
            mean = _mean(mean_ptr, bh, count, D, MEANS, gl.SliceLayout(0, own))
            shift = gl.sum(x * mean[None, :], axis=1) * shift_factor
            gl.store(shift_ptr + bh * n_padded + start + own_rows, shift)
        x = _spread(x, T, D)
        amax = gl.reduce(gl.abs(x), 1, _larger)
        if KEYS:
            amax = gl.reduce(amax, 0, _larger)
            amax = gl.where(amax <= _TINY, 1.0, amax)
            gl.store(scale_ptr + bh * (n_padded // T) + block, amax / QMAX)
            x = x * gl.div_rn(gl.to_tensor(QMAX * 1.0), amax)
        else:
            amax = gl.where(amax <= _TINY, 1.0, amax)
            gl.store(scale_ptr + bh * n_padded + start + own_rows, amax / QMAX * factor)
            x = x * gl.div_rn(gl.full_like(amax, QMAX), amax)[:, None]
        out.store((x + _MAGIC).to(gl.int32, bitcast=True).to(gl.int8))
        gl.store(int8_ptr + (bh * n_padded + start) * D + out_rows, out.load(narrow))
    async_copy.wait_group(0)
