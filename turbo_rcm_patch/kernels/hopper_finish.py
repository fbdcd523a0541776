"""What follows the product of the int8 linears for Hopper, on a product in registers."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from turbo_rcm_patch.kernels.epilogue import gelu_tanh, load_coefficient, scaled, skipped

__all__ = ["fetch", "finish"]


@gluon.jit
def _pieces(acc, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """acc [ROWS, COLUMNS] in pieces of 64 x 32, row by row; no data moves."""
    if ROWS > 64:
        upper, lower = gl.split(acc.reshape([2, ROWS // 2, COLUMNS]).permute([1, 2, 0]))
        return _pieces(upper, ROWS // 2, COLUMNS) + _pieces(lower, ROWS // 2, COLUMNS)
    elif COLUMNS > 32:
        left, right = gl.split(acc.reshape([ROWS, 2, COLUMNS // 2]).permute([0, 2, 1]))
        return _pieces(left, ROWS, COLUMNS // 2) + _pieces(right, ROWS, COLUMNS // 2)
    else:
        return (acc,)


@gluon.jit
def _in_place(part, EIGHTS: gl.constexpr):
    """A piece [64, 32] with its columns where they belong: undoes the order of
    `hopper_linear.describe_weight`."""
    if EIGHTS:
        part = part.reshape([64, 4, 4, 2]).permute([0, 2, 1, 3]).reshape([64, 32])
        # The same values in the same threads, eight neighbours in successive registers.
        words: gl.constexpr = gl.DistributedLinearLayout(
            [[0, 1], [0, 2], [0, 4], [8, 0]],
            [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
            [[16, 0], [32, 0]],
            [],
            [64, 32],
        )
        part = gl.convert_layout(part, words, assert_trivial=True)
    return part


@gluon.jit
def fetch(
    memory, b, start_m, start_c, n_tokens, c_out,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    """Ask for a tile of the residual to be in L2 when it is read, a product later."""
    residual_ptr, stride_b, stride_n = memory[4:]
    LINE: gl.constexpr = 1024 // residual_ptr.dtype.element_ty.primitive_bitwidth
    LINES: gl.constexpr = 256 // LINE
    layout: gl.constexpr = gl.BlockedLayout([1, LINES], [32, 1], [4, 1], [1, 0])
    rows = start_m + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    rows = gl.minimum(rows, n_tokens - 1).to(gl.int64) * stride_n
    columns = gl.arange(0, LINES, gl.SliceLayout(0, layout)) * LINE
    columns = gl.minimum(start_c + gl.minimum(columns, COLUMNS - 1), c_out - 1)
    lines = residual_ptr + b.to(gl.int64) * stride_b + rows[:, None] + columns[None, :]
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [lines], gl.int32, False, 1
    )


@gluon.jit
def _residual(base, stride_n, offs_m, offs_c, n_tokens, c_out):
    """A piece of the residual."""
    return gl.load(
        base + (offs_m.to(gl.int64) * stride_n)[:, None] + offs_c[None, :],
        mask=(offs_m < n_tokens)[:, None] & (offs_c < c_out)[None, :],
        other=0.0,
    )


@gluon.jit
def finish(
    acc, memory, skip, out, skip_stride_c, out_stride_c, b, start_m, start_c, n_tokens, c_out,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, EIGHTS: gl.constexpr,
    HAS_BIAS: gl.constexpr, GELU: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr, SKIP_FORM: gl.constexpr, OUT_FORM: gl.constexpr,
    ROUND_TO: gl.constexpr, SCALED: gl.constexpr,
):  # fmt: skip
    """Scale a product [ROWS, COLUMNS], add the bias, activate, close the skip, store.

    The product is of integers, or in fp32 with the weight's scales in it (SCALED).
    """
    y_ptr, x_scale_ptr, w_scale_ptr, bias_ptr, residual_ptr = memory[:5]
    residual_stride_b, residual_stride_n = memory[5:]
    ACROSS: gl.constexpr = COLUMNS // 32
    PIECES: gl.constexpr = ROWS // 64 * ACROSS
    pieces = _pieces(acc, ROWS, COLUMNS)
    like = _in_place(pieces[0], EIGHTS)
    layout: gl.constexpr = like.type.layout
    first = b.to(gl.int64) * n_tokens
    skip_base = residual_ptr
    if HAS_RESIDUAL:
        skip_base = residual_ptr + b.to(gl.int64) * residual_stride_b
    lanes_m = start_m + gl.arange(0, 64, gl.SliceLayout(1, layout))
    lanes_c = start_c + gl.arange(0, 32, gl.SliceLayout(0, layout))
    for i in gl.static_range(PIECES):
        offs_m, offs_c = lanes_m + i // ACROSS * 64, lanes_c + i % ACROSS * 32
        mask_m, mask_c = offs_m < n_tokens, offs_c < c_out
        if i % ACROSS == 0:
            x_scale = gl.load(x_scale_ptr + first + offs_m, mask=mask_m, other=0.0)
        if not SCALED:
            w_scale = gl.load(w_scale_ptr + offs_c, mask=mask_c, other=0.0)
        if HAS_BIAS:
            bias = gl.load(bias_ptr + offs_c, mask=mask_c, other=0.0).to(gl.float32)
        if HAS_RESIDUAL:
            if i == 0:
                residual = _residual(skip_base, residual_stride_n, offs_m, offs_c, n_tokens, c_out)
            now = residual
            if i + 1 < PIECES:  # before the store, which a load may not pass
                residual = _residual(
                    skip_base, residual_stride_n,
                    lanes_m + (i + 1) // ACROSS * 64, lanes_c + (i + 1) % ACROSS * 32,
                    n_tokens, c_out,
                )  # fmt: skip
        branch = _in_place(pieces[i], EIGHTS).to(gl.float32)
        branch = branch * x_scale[:, None]
        if not SCALED:
            branch = branch * w_scale[None, :]
        if HAS_BIAS:
            branch += bias[None, :]
        if GELU:
            branch = gelu_tanh(branch)
        factor = load_coefficient(
            out[0], out[1], out[2], out[3], out_stride_c, b, offs_m, offs_c, mask_m, mask_c,
            OUT_FORM, ROUND_TO,
        )  # fmt: skip
        y = scaled(branch, factor, ROUND_TO)
        if HAS_RESIDUAL:
            keep = load_coefficient(
                skip[0], skip[1], skip[2], skip[3], skip_stride_c, b, offs_m, offs_c,
                mask_m, mask_c, SKIP_FORM, ROUND_TO,
            )  # fmt: skip
            y = skipped(y, now, keep, ROUND_TO)
        gl.store(
            y_ptr + ((first + offs_m) * c_out)[:, None] + offs_c[None, :],
            y.to(y_ptr.dtype.element_ty),
            mask=mask_m[:, None] & mask_c[None, :],
        )
