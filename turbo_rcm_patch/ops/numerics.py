"""Arithmetic that implementations of several operators share: skips, norms, GELU and int8 rows.

An implementation imports no other implementation, so the rounding that two of them have in common
is written here, once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from turbo_rcm_patch.ops import formats
from turbo_rcm_patch.ops.formats import Int8Tensor, padded_channels
from turbo_rcm_patch.ops.launch import LENGTHS, cdiv, dense_rows, launch, target_of
from turbo_rcm_patch.ops.replay import replayed

INT8_MAX = tl.constexpr(float(formats.INT8_MAX))
TINY = tl.constexpr(formats.TINY)
ROUNDER = tl.constexpr(formats.ROUNDER)
ROUNDER_BITS = tl.constexpr(formats.ROUNDER_BITS)

#: Values per program for short rows, and values per thread.
_VALUES = 1024
_VALUES_A_THREAD = 48

_INFINITY = tl.constexpr(0x7F800000)
_NO_SIGN = tl.constexpr(0x7FFFFFFF)
_SQRT_2_OVER_PI = tl.constexpr(0.7978845608028654)
_CUBE = tl.constexpr(0.044715)
_MINUS_2_LOG2_E = tl.constexpr(-2.8853900817779268)


# --- skips and GELU ------------------------------------------------------------------------------


@triton.jit
def gelu_tanh(x):
    """Compute 0.5 x (1 + tanh(u)) in fp32 as x * sigmoid(2u), which has no cancellation."""
    u = x * (1.0 + _CUBE * x * x) * _SQRT_2_OVER_PI
    return x / (1.0 + tl.exp2(u * _MINUS_2_LOG2_E))


@triton.jit
def load_coefficient(of, b, offs, masks, KIND: tl.constexpr):
    """Load a `launch.CoefficientOperand` that broadcasts against a tile [N, C], in fp32.

    offs, masks: those of tokens and channels. KIND: 0 for a number, or a tensor that varies with
    1 batch, 2 batch and channel, 3 batch, token and channel.
    """
    c = of.value
    if KIND != 0:
        offs_n, offs_c = offs
        mask_n, mask_c = masks
        base = of.ptr + b.to(tl.int64) * of.strides[0]
        if KIND == 1:
            c = tl.load(base)
        elif KIND == 2:
            c = tl.load(base + offs_c * of.strides[2], mask=mask_c, other=0.0)[None, :]
        else:
            rows = base + offs_n.to(tl.int64)[:, None] * of.strides[1]
            mask = mask_n[:, None] & mask_c[None, :]
            c = tl.load(rows + offs_c[None, :] * of.strides[2], mask=mask, other=0.0)
        c = c.to(tl.float32)
    return c


@triton.jit
def scaled(x, c):
    """Compute x * c, rounded.

    A plain product would be contracted with the sum after it (in 16 bits too, where the compiler
    narrows the steps), and the result would differ from eager code.
    """
    return tl.fma(x, c, 0.0)


@triton.jit
def close_skip(branch, skip, b, offs, masks, KINDS: tl.constexpr):
    """Compute c_skip * residual + c_out * branch for a tile `branch` [N, C] fp32.

    skip: `launch.SkipOperands`; offs, masks: those of tokens and channels; KINDS: those of c_skip
    and c_out. It equals eager code in fp32 bit for bit.
    """
    y = scaled(branch, load_coefficient(skip.c_out, b, offs, masks, KINDS[1]))
    if skip.residual_ptr is not None:
        c_skip = load_coefficient(skip.c_skip, b, offs, masks, KINDS[0])
        offs_n, offs_c = offs
        mask_n, mask_c = masks
        sample = skip.residual_ptr + b.to(tl.int64) * skip.residual_strides[0]
        rows = sample + offs_n.to(tl.int64)[:, None] * skip.residual_strides[1]
        mask = mask_n[:, None] & mask_c[None, :]
        residual = tl.load(rows + offs_c[None, :], mask=mask, other=0.0)
        y = scaled(residual.to(tl.float32), c_skip) + y
    return y


# --- norms and the rotary embedding of q and k ---------------------------------------------------


@triton.jit
def kv_limit(lengths_ptr, b, n_kv):
    """Return the number of keys that batch entry b sees; lengths [B] or None."""
    limit = n_kv
    if lengths_ptr is not None:
        limit = tl.maximum(0, tl.minimum(tl.load(lengths_ptr + b), n_kv)).to(tl.int32)
    return limit


@triton.jit
def load_rotary(rotary, offs, mask):
    """Load cos of even and sin of odd channels, [T, D / 2] fp32 each.

    rotary: cos, sin [N, D]; offs [T, D]: offsets into these tables.
    """
    T: tl.constexpr = offs.shape[0]
    PAIRS: tl.constexpr = offs.shape[1] // 2
    cos = tl.load(rotary[0] + offs, mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(rotary[1] + offs, mask=mask, other=0.0).to(tl.float32)
    cos_even, _ = tl.split(tl.reshape(cos, [T, PAIRS, 2]))
    _, sin_odd = tl.split(tl.reshape(sin, [T, PAIRS, 2]))
    return cos_even, sin_odd


@triton.jit
def norm_rotate_tile(
    x, inverse_rms, weight, bias, rotary, eps, HEAD_DIM: tl.constexpr, NORM: tl.constexpr
):
    """Apply the norm and the rotary embedding of q or k to x [T, D] fp32, a head per row.

    NORM as in `formats.norm_kind`. inverse_rms: 1 / rms over all heads (NORM 1), broadcasts to
    [T, 1]; weight and bias broadcast to x; rotary: the result of `load_rotary`, or None. Channels
    from HEAD_DIM on are 0 in x and in the bias, and stay 0.
    """
    T: tl.constexpr = x.shape[0]
    D: tl.constexpr = x.shape[1]
    if NORM == 3:  # layer norm
        x -= (tl.sum(x, axis=1) / HEAD_DIM)[:, None]
        if HEAD_DIM != D:
            x = tl.where((tl.arange(0, D) < HEAD_DIM)[None, :], x, 0.0)
    if NORM >= 2:  # per head
        inverse_rms = (1.0 / tl.sqrt(tl.sum(x * x, axis=1) / HEAD_DIM + eps))[:, None]
    if NORM != 0:
        x = x * inverse_rms * weight
    if NORM == 3:
        x += bias
    if rotary is not None:
        cos, sin = rotary
        even, odd = tl.split(tl.reshape(x, [T, D // 2, 2]))
        x = tl.join(even * cos - odd * sin, even * sin + odd * cos)
        x = tl.reshape(x, [T, D])
    return x


# --- int8 rows -----------------------------------------------------------------------------------


@triton.jit
def magnitude(x):
    """Return the bits of |x| for x [T, C] or [C] fp32.

    As integers they are ordered as the numbers, with infinity and then NaN as the largest. So one
    reduction finds the maximum and any value that is not finite, and it is the fast reduction of
    integers.
    """
    return x.to(tl.int32, bitcast=True) & _NO_SIGN


@triton.jit
def amax_and_nan(bits):
    """Convert the maximum of a row's `magnitude` to the arguments of `int8_scale`."""
    return bits.to(tl.float32, bitcast=True), tl.where(bits >= _INFINITY, float("nan"), 0.0)


@triton.jit
def int8_scale(amax, poison):
    """Return a row's scale and its inverse from its largest magnitude [T] fp32.

    poison [T]: NaN where the row has a NaN or an infinity, else 0. A maximum drops NaN, so without
    poison such a row would become finite numbers.
    """
    amax = tl.where(amax > TINY, amax, 1.0)
    return tl.div_rn(amax, INT8_MAX) + poison, tl.div_rn(INT8_MAX, amax)


@triton.jit
def nearest_int8(x, inverse):
    """Round x * inverse half to even to int8, |x * inverse| <= 127; inverse broadcasts to x, fp32.

    The sum with `ROUNDER` has the integer in its low bits in two's complement, so its low byte is
    the result. This avoids the conversion unit, which is several times slower.
    """
    shifted = x * inverse + ROUNDER
    return shifted.to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit(do_not_specialize=LENGTHS)
def quantize_rows_kernel(
    x_ptr, int8_ptr, scale_ptr, x_strides, n_rows, channels, padded,
    BLOCK_T: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Store x as int8 rows with their scales, max |row| / 127, in one pass over memory.

    Grid: (blocks of BLOCK_T rows, batch).
    x [B, N, K] with dense rows; int8 [B, N, padded] dense, 0 from channel K on; scale [B, N] fp32.
    A row has HEAD channels and TAIL more (0 for none). Both are powers of two, which masks fewer
    lanes than a single one. Up to a few thousand channels one warp has a row, so that no data
    passes through shared memory and no warp waits for another; a multiprocessor holds 32 of them.
    """
    b = tl.program_id(1).to(tl.int64)
    offs_t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    mask_t = offs_t < n_rows
    rows = x_ptr + b * x_strides[0] + offs_t.to(tl.int64) * x_strides[1]
    out = int8_ptr + (b * n_rows + offs_t) * padded
    offs_h = tl.arange(0, HEAD)
    mask_h = mask_t[:, None] & (offs_h < channels)[None, :]
    keep_h = mask_t[:, None] & (offs_h < padded)[None, :]
    head = tl.load(rows[:, None] + offs_h[None, :], mask=mask_h, other=0.0).to(tl.float32)
    bits = tl.max(magnitude(head), axis=1)
    if TAIL:
        offs_r = HEAD + tl.arange(0, TAIL)
        mask_r = mask_t[:, None] & (offs_r < channels)[None, :]
        keep_r = mask_t[:, None] & (offs_r < padded)[None, :]
        tail = tl.load(rows[:, None] + offs_r[None, :], mask=mask_r, other=0.0).to(tl.float32)
        bits = tl.maximum(bits, tl.max(magnitude(tail), axis=1))
    amax, poison = amax_and_nan(bits)
    scale, inverse = int8_scale(amax, poison)
    tl.store(scale_ptr + b * n_rows + offs_t, scale, mask=mask_t)
    tl.store(out[:, None] + offs_h[None, :], nearest_int8(head, inverse[:, None]), mask=keep_h)
    if TAIL:
        tl.store(out[:, None] + offs_r[None, :], nearest_int8(tail, inverse[:, None]), mask=keep_r)


def row_parts(channels: int) -> tuple[int, int]:
    """Return HEAD and TAIL of a row: powers of two that together cover its channels."""
    head = triton.next_power_of_2(channels + 1) // 2
    rest = channels - head
    return head, triton.next_power_of_2(rest) if rest else 0


def row_warps(values: int) -> int:
    """Return the number of warps that hold this many values."""
    return min(32, triton.next_power_of_2(cdiv(values, 32 * _VALUES_A_THREAD)))


@replayed
def quantize_rows(x: torch.Tensor) -> Int8Tensor:
    """Quantise x [B, N, K] bf16, fp16 or fp32 to int8 rows."""
    target_of(x.device)
    x = dense_rows(x)
    batch, n_rows, channels = x.shape
    padded = padded_channels(channels)
    rows = Int8Tensor(
        torch.empty(batch, n_rows, padded, dtype=torch.int8, device=x.device),
        torch.empty(batch, n_rows, dtype=torch.float32, device=x.device),
    )
    head, tail = row_parts(padded)
    block_t = max(1, _VALUES // triton.next_power_of_2(head + tail))
    launch(
        quantize_rows_kernel, (cdiv(n_rows, block_t), batch), x.device, x_ptr=x,
        int8_ptr=rows.data, scale_ptr=rows.scale, x_strides=x.stride()[:2], n_rows=n_rows,
        channels=channels, padded=padded, BLOCK_T=block_t, HEAD=head, TAIL=tail,
        num_warps=row_warps(block_t * (head + tail)), num_stages=1,
    )  # fmt: skip
    return rows
