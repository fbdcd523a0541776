"""Sparse-linear attention: int8 attention over chosen blocks of keys, with the linear branch added
in the epilogue.

The step over a block of keys, and so the numeric contract, is that of the dense kernel. The loop
reads a table of blocks. The linear branch is the product of a row block's features with the head's
projected matrix, and is added to the accumulator of the softmax part.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from turbo_rcm_patch.ops import formats
from turbo_rcm_patch.ops.attention.online_softmax import (
    attention_arguments,
    begin,
    over_block,
    over_keys,
    register_limit,
    row_sums,
    tile_of,
    times_v_scale,
    v_correction,
)
from turbo_rcm_patch.ops.formats import AttentionInputs, QuantizedOperands, TokenRows, norm_kind
from turbo_rcm_patch.ops.launch import (
    LENGTHS,
    cdiv,
    dense_rows,
    launch,
    pad_head,
    target_of,
)
from turbo_rcm_patch.ops.numerics import load_rotary, norm_rotate_tile
from turbo_rcm_patch.ops.replay import replayed
from turbo_rcm_patch.ops.sparse_linear.key_sums import KeySums, key_pass

#: Number of tokens of k that a program sums.
_K_TOKENS = tl.constexpr(32)
#: Most tokens that are loaded or computed at a time, and the most shared memory for them.
_STAGES = 6
_SHARED = 48 * 1024
_WARPS = 4


class TokensForm(NamedTuple):
    """The numbers of `prepare_tokens_kernel` that are known when it is compiled.

    Attributes:
        HEADS: H.
        HEADS_PAD: H up to a power of two.
        HEAD_DIM: D.
        HEAD_PAD: D up to a power of two, at least 32.
        Q_TOKENS: Tokens of q that a program averages.
        Q_NORM: Kind of the norm of q, see `formats.norm_kind`.
        K_NORM: Kind of the norm of k.
        STAGES: Tokens that are loaded or computed at a time.
    """

    HEADS: int
    HEADS_PAD: int
    HEAD_DIM: int
    HEAD_PAD: int
    Q_TOKENS: int
    Q_NORM: int
    K_NORM: int
    STAGES: int


@triton.jit
def _sum_of_tokens(
    rows, b, rotary, start, n_tokens, eps,
    FORM: tl.constexpr, TOKENS: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Normalise and rotate TOKENS tokens, and sum the rounded results: [HEADS_PAD, HEAD_PAD]."""
    CHANNELS: tl.constexpr = FORM.HEADS * FORM.HEAD_DIM
    STAGES: tl.constexpr = FORM.STAGES
    offs_h = tl.arange(0, FORM.HEADS_PAD)[:, None]
    offs_d = tl.arange(0, FORM.HEAD_PAD)[None, :]
    offs_c = offs_h * FORM.HEAD_DIM + offs_d
    mask_d = offs_d < FORM.HEAD_DIM
    mask = (offs_h < FORM.HEADS) & mask_d
    x_ptr = rows.ptr + b * rows.strides[0]
    out_ptr = rows.out + b * n_tokens * CHANNELS
    weight = 1.0
    if NORM == 1:  # across all heads
        weight = tl.load(rows.weight_ptr + offs_c, mask=mask, other=0.0).to(tl.float32)
    elif NORM == 2:  # per head
        weight = tl.load(rows.weight_ptr + offs_d, mask=mask_d, other=0.0).to(tl.float32)
    total = tl.full([FORM.HEADS_PAD, FORM.HEAD_PAD], 0.0, tl.float32)
    # The loop is pipelined, so that tokens are loaded while others are computed.
    for i in tl.range(0, tl.minimum(TOKENS, n_tokens - start), num_stages=STAGES):
        n = (start + i).to(tl.int64)
        x = tl.load(x_ptr + n * rows.strides[1] + offs_c, mask=mask, other=0.0).to(tl.float32)
        inverse_rms, tables = 1.0, None
        if NORM == 1:
            squares = tl.sum(tl.sum(x * x, axis=1), axis=0)
            inverse_rms = 1.0 / tl.sqrt(squares / CHANNELS + eps)
        if rotary is not None:
            tables = load_rotary(rotary, n * FORM.HEAD_DIM + offs_d, mask_d)
        x = norm_rotate_tile(x, inverse_rms, weight, 0.0, tables, eps, FORM.HEAD_DIM, NORM)
        y = x.to(rows.ptr.dtype.element_ty)
        if NORM > 0 or rotary is not None:
            tl.store(out_ptr + n * CHANNELS + offs_c, y, mask=mask)
        total += y.to(tl.float32)
    return total


@triton.jit(do_not_specialize=LENGTHS)
def prepare_tokens_kernel(
    q, k, q_pooled_ptr, k_sums_ptr, rotary, n_q, n_kv, q_blocks, k_parts, eps, FORM: tl.constexpr
):
    """Normalise q and k, rotate them, average blocks of q and sum parts of k.

    Grid: (blocks of q, then parts of k; batch). q, k: `TokenRows` whose result is dense; rotary:
    cos, sin [N, D], or None; q_pooled [B, H, q_blocks, HEAD_PAD]; k_sums
    [B, k_parts, H, HEAD_PAD] fp32. Without a norm and without a rotary embedding q or k is not
    written.
    """
    program, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    offs_h = tl.arange(0, FORM.HEADS_PAD)[:, None]
    offs_d = tl.arange(0, FORM.HEAD_PAD)[None, :]
    mask = (offs_h < FORM.HEADS) & (offs_d < FORM.HEAD_PAD)
    if program < q_blocks:
        start = program * FORM.Q_TOKENS
        total = _sum_of_tokens(
            q, b, rotary, start, n_q, eps, FORM, FORM.Q_TOKENS, NORM=FORM.Q_NORM
        )
        mean = (total / tl.minimum(FORM.Q_TOKENS, n_q - start)).to(q.ptr.dtype.element_ty)
        row = (b * FORM.HEADS + offs_h) * q_blocks + program
        tl.store(q_pooled_ptr + row * FORM.HEAD_PAD + offs_d, mean, mask=mask)
    else:
        part = program - q_blocks
        total = _sum_of_tokens(
            k, b, rotary, part * _K_TOKENS, n_kv, eps, FORM, _K_TOKENS, NORM=FORM.K_NORM
        )
        row = (b * k_parts + part) * FORM.HEADS + offs_h
        tl.store(k_sums_ptr + row * FORM.HEAD_PAD + offs_d, total, mask=mask)


@replayed
def prepare_tokens(
    a: AttentionInputs, block_q: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Normalise and rotate q and k, and compute what their means need; norms are RMSNorms or None.

    Returns:
        In the model's dtype q [B, Nq, H*D], k [B, Nk, H*D] and means of blocks of q
        [B, H, q_blocks, HEAD_PAD]; and sums of parts of k, fp32 [B, parts, H, HEAD_PAD].
    """
    target_of(a.q.device)
    q, k, heads, head_dim = dense_rows(a.q), dense_rows(a.k), a.spec.heads, a.head_dim
    (batch, n_q, channels), n_kv = q.shape, k.shape[1]
    weights = [None if weight is None else weight.contiguous() for weight in a.norms[:2]]
    q_norm, k_norm = (norm_kind(weight, None, channels) for weight in weights)
    head_pad, heads_pad = pad_head(head_dim), triton.next_power_of_2(heads)
    token_bytes = heads_pad * head_pad * q.element_size()
    q_blocks, k_parts = cdiv(n_q, block_q), cdiv(n_kv, _K_TOKENS.value)
    rotary = None if a.rotary is None else tuple(table.contiguous() for table in a.rotary)
    q_pooled = torch.empty(batch, heads, q_blocks, head_pad, dtype=q.dtype, device=q.device)
    k_sums = torch.empty(batch, k_parts, heads, head_pad, dtype=torch.float32, device=q.device)
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if q_norm or rotary else q
    k_out = torch.empty(k.shape, dtype=k.dtype, device=k.device) if k_norm or rotary else k
    form = TokensForm(
        HEADS=heads,
        HEADS_PAD=heads_pad,
        HEAD_DIM=head_dim,
        HEAD_PAD=head_pad,
        Q_TOKENS=block_q,
        Q_NORM=q_norm,
        K_NORM=k_norm,
        STAGES=min(_STAGES, 1 + _SHARED // token_bytes),
    )
    launch(
        prepare_tokens_kernel,
        (q_blocks + k_parts, batch),
        q.device,
        q=TokenRows(q, q.stride()[:2], weights[0], None, q_out),
        k=TokenRows(k, k.stride()[:2], weights[1], None, k_out),
        q_pooled_ptr=q_pooled,
        k_sums_ptr=k_sums,
        rotary=rotary,
        n_q=n_q,
        n_kv=n_kv,
        q_blocks=q_blocks,
        k_parts=k_parts,
        eps=a.norms.eps,
        FORM=form,
        num_warps=_WARPS,
        num_stages=1,
    )
    return q_out, k_out, q_pooled, k_sums


#: Programs of `key_value_kernel`: twice the multiprocessors of a large GPU.
_PROGRAMS = 264
#: Keys that a program reads at a time, and rows of its partial sums.
_STEP = 64
_ROWS = tl.constexpr(16)
#: Added to the denominator by the author's code (thu-ml/TurboDiffusion, SLA/core.py).
_EPS = 1e-5

_LOG2_E = tl.constexpr(formats.LOG2_E)


class LinearBranch(NamedTuple):
    """The terms of the projected linear branch, phi(q) @ matrix / (phi(q) · total + eps) + bias.

    matrix [B, H, HEAD_PAD, HEAD_PAD] in the dtype of k; total [B, H, HEAD_PAD] fp32;
    bias [HEAD_PAD] fp32 or None; eps.
    """

    matrix: torch.Tensor
    total: torch.Tensor
    bias: torch.Tensor | None
    eps: float


@triton.jit
def _softmax_features(x, offs_d, HEAD_DIM: tl.constexpr):
    """Compute phi(x), the softmax of x [T, HEAD_PAD] fp32 over channels, 0 in padded channels."""
    x = tl.where((offs_d < HEAD_DIM)[None, :], x, float("-inf"))
    e = tl.exp2((x - tl.max(x, axis=1)[:, None]) * _LOG2_E)
    return e / tl.sum(e, axis=1)[:, None]


@triton.jit
def _by_rows(x):
    """Sum every _ROWS-th row of x [STEP, HEAD_PAD]: [_ROWS, HEAD_PAD].

    A thread holds all rows of such a sum, so threads exchange no data.
    """
    return tl.sum(tl.reshape(x, [x.shape[0] // _ROWS, _ROWS, x.shape[1]]), axis=0)


class KeyForm(NamedTuple):
    """The numbers of `key_value_kernel` that are known when it is compiled.

    Attributes:
        HEAD_DIM: D.
        HEAD_PAD: D up to a power of two, at least 32.
        BLOCK_K: Keys of a block.
        STEP: Keys that are read at a time.
        PRECISION: That of the product.
    """

    HEAD_DIM: int
    HEAD_PAD: int
    BLOCK_K: int
    STEP: int
    PRECISION: str


@triton.jit(do_not_specialize=LENGTHS)
def key_value_kernel(
    sums, keys, n_kv, k_blocks, blocks_a_chunk, chunks, heads, FORM: tl.constexpr
):
    """Compute phi(k)^T v and the sum of phi(k) over a chunk of keys, and the means of k's blocks.

    Grid: (chunks, heads, batch). sums: `KeySums`; keys: `KeyOperands`. k less its mean is rounded
    to its dtype again.
    """
    HEAD_DIM: tl.constexpr = FORM.HEAD_DIM
    HEAD_PAD: tl.constexpr = FORM.HEAD_PAD
    BLOCK_K: tl.constexpr = FORM.BLOCK_K
    STEP: tl.constexpr = FORM.STEP
    chunk, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    bh = b.to(tl.int64) * heads + h
    offs_d = tl.arange(0, HEAD_PAD)
    offs_c = (h * HEAD_DIM + offs_d)[None, :]
    k_rows = keys.k_ptr + b.to(tl.int64) * keys.k_strides[0] + offs_c
    v_rows = keys.v_ptr + b.to(tl.int64) * keys.v_strides[0] + offs_c
    mean = tl.load(keys.k_mean_ptr + bh * HEAD_PAD + offs_d).to(tl.float32)[None, :]
    matrix = tl.zeros([HEAD_PAD, HEAD_PAD], tl.float32)
    total = tl.zeros([_ROWS, HEAD_PAD], tl.float32)
    first = chunk * blocks_a_chunk
    for block in tl.range(first, tl.minimum(first + blocks_a_chunk, k_blocks)):
        pooled = tl.zeros([_ROWS, HEAD_PAD], tl.float32)
        for step in tl.static_range(BLOCK_K // STEP):
            offs_t = block * BLOCK_K + step * STEP + tl.arange(0, STEP)
            mask_t = (offs_t < n_kv)[:, None]
            mask = mask_t & (offs_d < HEAD_DIM)[None, :]
            tokens = offs_t.to(tl.int64)[:, None]
            k = tl.load(k_rows + tokens * keys.k_strides[1], mask=mask, other=0.0)
            v = tl.load(v_rows + tokens * keys.v_strides[1], mask=mask, other=0.0)
            smooth = (k.to(tl.float32) - mean).to(k.dtype).to(tl.float32)
            pooled += _by_rows(tl.where(mask_t, smooth, 0.0))
            phi = _softmax_features(k.to(tl.float32), offs_d, HEAD_DIM)
            phi = tl.where(mask_t, phi, 0.0).to(v.dtype)
            matrix = tl.dot(tl.trans(phi), v, matrix, input_precision=FORM.PRECISION)
            total += _by_rows(phi.to(tl.float32))
        count = tl.minimum(BLOCK_K, n_kv - block * BLOCK_K)
        out = sums.k_pooled + (bh * k_blocks + block) * HEAD_PAD + offs_d
        tl.store(out, (tl.sum(pooled, axis=0) / count).to(keys.k_ptr.dtype.element_ty))
    place = bh * chunks + chunk
    tl.store(sums.total + place * HEAD_PAD + offs_d, tl.sum(total, axis=0))
    tl.store(
        sums.matrix + place * HEAD_PAD * HEAD_PAD + offs_d[:, None] * HEAD_PAD + offs_d[None, :],
        matrix,
    )


def launch_key_sums(
    k: torch.Tensor, v: torch.Tensor, k_mean: torch.Tensor, *, heads: int, block_k: int
) -> KeySums:
    """Run one pass over k and v [B, N, H*D] with contiguous channels."""
    head_dim = k.shape[2] // heads
    head_pad = pad_head(head_dim)
    sums, grid, arguments = key_pass(
        k, v, k_mean, heads=heads, head_pad=head_pad, block_k=block_k, programs=_PROGRAMS
    )
    # With a [D, D] sum, 4-byte tiles leave room for half the keys and no pipeline.
    wide = k.element_size() > 2 and head_pad > 64
    launch(
        key_value_kernel,
        grid,
        k.device,
        **arguments,
        FORM=KeyForm(
            HEAD_DIM=head_dim,
            HEAD_PAD=head_pad,
            BLOCK_K=block_k,
            STEP=min(_STEP // 2 if wide else _STEP, block_k),
            # fp32 in three parts spills little on Hopper; elsewhere it spills more than plain
            # fp32.
            PRECISION="tf32x3" if target_of(k.device) == ("cuda", 90) else "ieee",
        ),
        num_warps=8 if head_pad > 64 else 4,
        num_stages=1 if wide else 2,
    )
    return sums


def linear_branch(
    sums: KeySums,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    n_kv: int,
    dtype: torch.dtype,
) -> LinearBranch:
    """Compute the terms of the linear branch that depend on the keys.

    Args:
        sums: The results of the pass over the keys.
        weight: [D, D] of the projection.
        bias: [D] or None.
        n_kv: Number of keys.
        dtype: dtype of v.
    """
    matrix, total, _ = sums
    head_dim, head_pad = weight.shape[0], matrix.shape[-1]
    # D / N keeps the sums over tokens near 1, where fp16 is precise. The projection is linear, so
    # it is multiplied into the matrix: the branch is one product in the attention's epilogue.
    factor = head_dim / n_kv
    scaled = _padded(weight.float(), head_pad) * factor
    projected = torch.matmul(matrix.sum(2), scaled.T).to(dtype)
    if bias is not None:
        bias = _padded(bias.float(), head_pad).contiguous()
    return LinearBranch(projected, total.sum(2) * factor, bias, _EPS * factor)


def _padded(x: torch.Tensor, head_pad: int) -> torch.Tensor:
    """Pad x [D] or [D, D] with zeros to HEAD_PAD."""
    missing = head_pad - x.shape[-1]
    return torch.nn.functional.pad(x, (0, missing) * x.dim()) if missing else x


#: Scores that a program of `select_kernel` holds.
_SCORES = 4096

_LOWEST = tl.constexpr(-2147483648)
_NO_SIGN = tl.constexpr(0x7FFFFFFF)


@triton.jit(do_not_specialize=LENGTHS)
def select_kernel(
    lut_ptr, scores_ptr, rows, columns, count,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Select the columns of the `count` largest scores of each row, ascending.

    Of equal scores the first is taken. A NaN counts as the largest, so that it reaches the output.

    Grid: (blocks of ROWS rows). scores [rows, columns]; lut [rows, count] int32. The count-th
    largest score is found bit by bit, on integers with the order of the scores. So there is no
    sorting, and every run gives the same result.
    """
    offs_r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    offs_c = tl.arange(0, COLUMNS)
    inside = (offs_r < rows)[:, None] & (offs_c < columns)[None, :]
    row = offs_r.to(tl.int64)[:, None]
    # -0 + 0 is 0, which makes both zeros equal.
    scores = tl.load(scores_ptr + row * columns + offs_c[None, :], mask=inside, other=0.0)
    scores = scores.to(tl.float32) + 0.0
    bits = scores.to(tl.int32, bitcast=True)
    rank = tl.where(bits < 0, bits ^ _NO_SIGN, bits)
    rank = tl.where(scores == scores, rank, _NO_SIGN)
    rank = tl.where(inside, rank, _LOWEST)
    # The largest integer that at least `count` of a row reach, counted from the lowest.
    least = tl.zeros([ROWS], tl.int32)
    for i in range(32):
        trial = least | (tl.full([ROWS], 1, tl.int32) << (31 - i))
        reached = tl.sum((rank >= (trial ^ _LOWEST)[:, None]).to(tl.int32), axis=1)
        least = tl.where(reached >= count, trial, least)
    least = (least ^ _LOWEST)[:, None]
    above = rank > least
    room = count - tl.sum(above.to(tl.int32), axis=1)[:, None]
    equal = rank == least
    first = equal & (tl.cumsum(equal.to(tl.int32), axis=1) <= room)
    chosen = (above | first) & inside
    place = tl.cumsum(chosen.to(tl.int32), axis=1) - 1
    columns_of = tl.zeros([ROWS, COLUMNS], tl.int32) + offs_c[None, :]
    tl.store(lut_ptr + row * count + place, columns_of, mask=chosen)


@replayed
def largest_scores(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Choose the `count` blocks of keys that each block of queries sees.

    Args:
        scores: [B, H, q_blocks, k_blocks].
        count: Number of blocks.

    Returns:
        int32 [B, H, q_blocks, count], ascending.
    """
    batch, heads, q_blocks, k_blocks = scores.shape
    lut = torch.empty(batch, heads, q_blocks, count, dtype=torch.int32, device=scores.device)
    columns = max(16, triton.next_power_of_2(k_blocks))
    per_program = max(1, _SCORES // columns)
    rows = batch * heads * q_blocks
    launch(
        select_kernel,
        (cdiv(rows, per_program),),
        scores.device,
        lut_ptr=lut,
        scores_ptr=scores,
        rows=rows,
        columns=k_blocks,
        count=count,
        ROWS=per_program,
        COLUMNS=columns,
        num_warps=4,
        num_stages=1,
    )
    return lut


_FP16_MAX = tl.constexpr(65504.0)


@triton.jit
def _block_of(lut, i, count, STEPS: tl.constexpr):
    """Load the block of step i from lut [count], STEPS per block; the last block past the end."""
    return tl.load(lut + tl.maximum(0, tl.minimum(i // STEPS, count - 1)))


@triton.jit
def _over_blocks(
    acc, l_i, m_i, head, limit, lut, count, FORM: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Compute the online softmax over the first `count` blocks of keys in lut, unmasked."""
    # The table is read two steps ahead, because copies of the next step's keys begin in this one
    # and would wait for an address that was just loaded. The value has to change between steps.
    # Otherwise the compiler sees a dependence over two steps and does not overlap them.
    steps: tl.constexpr = BLOCK_K // FORM.BLOCK_N
    start_n = tl.load(lut) * BLOCK_K
    following = _block_of(lut, 1, count, steps)
    for i in tl.range(0, count * steps):
        later = _block_of(lut, i + 2, count, steps)
        acc, l_i, m_i = over_block(acc, l_i, m_i, head, limit, start_n, FORM, MASKED=False)
        start_n = following * BLOCK_K + (i + 1) % steps * FORM.BLOCK_N
        following = later
    return acc, l_i, m_i


@triton.jit
def _features(rows, start, mask_m, HEAD_DIM: tl.constexpr, STEP: tl.constexpr):
    """Load STEP channels of the argument of phi in log2 units, -inf past the head."""
    offs_d = start + tl.arange(0, STEP)
    mask_d = (offs_d < HEAD_DIM)[None, :]
    x = tl.load(rows + offs_d[None, :], mask=mask_m[:, None] & mask_d, other=0.0)
    return tl.where(mask_d, x.to(tl.float32) * _LOG2_E, float("-inf"))


@triton.jit
def _add_linear(acc, rows, matrix, total, mask_m, eps, HEAD_DIM: tl.constexpr):
    """Return acc + phi(x) matrix / (phi(x) · total + eps) for the rows x at `rows` [BLOCK_M, 1].

    Two loops read a few channels at a time, instead of one tile with all channels. Beside the
    accumulator there is no room for such a tile if three programs share a multiprocessor.
    """
    STEP: tl.constexpr = 32
    BLOCK_M: tl.constexpr = acc.shape[0]
    HEAD_PAD: tl.constexpr = acc.shape[1]
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK_M], tl.float32)
    along = tl.zeros([BLOCK_M], tl.float32)  # phi · total, unnormalised
    for start in tl.range(0, HEAD_PAD, STEP, num_stages=1):
        x = _features(rows, start, mask_m, HEAD_DIM, STEP)
        higher = tl.maximum(peak, tl.max(x, axis=1))
        e = tl.exp2(x - higher[:, None])
        fade = tl.exp2(peak - higher)
        t = tl.load(total + start + tl.arange(0, STEP))
        mass = mass * fade + tl.sum(e, axis=1)
        along = along * fade + tl.sum(e * t[None, :], axis=1)
        peak = higher
    # phi = e / mass, and it is divided by along / mass + eps.
    factor = 1.0 / (along + eps * mass)
    columns = tl.arange(0, HEAD_PAD)[None, :]
    for start in tl.range(0, HEAD_PAD, STEP, num_stages=2):
        x = _features(rows, start, mask_m, HEAD_DIM, STEP)
        phi = tl.exp2(x - peak[:, None]) * factor[:, None]
        if matrix.dtype.element_ty == tl.float16:
            # If a row's features hardly overlap with those of keys, phi leaves fp16's range.
            phi = tl.minimum(phi, _FP16_MAX, propagate_nan=tl.PropagateNan.ALL)
        m = tl.load(matrix + (start + tl.arange(0, STEP))[:, None] * HEAD_PAD + columns)
        acc = tl.dot(phi.to(m.dtype), m, acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=LENGTHS)
def sparse_attention_kernel(
    y_ptr, lut_ptr, features_ptr, features_strides, branch, q_src, k_src, v_src, operands,
    n_q, n_kv, q_blocks, count,
    FORM: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Compute softmax(q k^T) v over chosen keys + phi(q) matrix / (phi(q) · total + eps) + bias.

    Grid: (blocks of BLOCK_M rows, heads, batch).
    y [B, Nq, H*D] dense; lut [B, H, q_blocks, count] int32, ascending, the blocks of keys that a
    block of queries sees; BLOCKS: queries and keys in a block; features [B, Nq, H*D] with
    contiguous channels, the argument of phi; branch: `LinearBranch`; the rest as in
    `online_softmax.attend`.
    """
    BLOCK_K: tl.constexpr = BLOCKS[1]
    start_m = tl.program_id(0) * FORM.BLOCK_M
    h, b = tl.program_id(1), tl.program_id(2)
    head, acc, l_i, m_i = begin(q_src, k_src, v_src, operands, b, h, start_m, FORM)
    bh, offs_m = head.bh, head.offs_m
    offs_d = tl.arange(0, FORM.HEAD_PAD)

    # Blocks ascend, so only the last chosen one may end past the last key.
    lut = lut_ptr + (bh * q_blocks + start_m // BLOCKS[0]) * count
    partial = tl.load(lut + count - 1) * BLOCK_K
    whole = count
    if partial + BLOCK_K > n_kv:
        whole = count - 1
    else:
        partial = n_kv
    acc, l_i, m_i = _over_blocks(acc, l_i, m_i, head, n_kv, lut, whole, FORM, BLOCK_K=BLOCK_K)
    acc, l_i, m_i = over_keys(acc, l_i, m_i, head, n_kv, partial, n_kv, FORM, MASKED=True)
    total = row_sums(l_i, FORM.FP8)
    if FORM.FP8:
        acc = times_v_scale(acc, total, 0.0, operands.v_levels_ptr, bh, FORM.HEAD_PAD)
    else:
        acc = acc / total[:, None]

    mask_m, mask_d = offs_m < n_q, offs_d < FORM.HEAD_DIM
    mask = mask_m[:, None] & mask_d[None, :]
    offs_c = (h * FORM.HEAD_DIM + offs_d)[None, :]
    rows = offs_m.to(tl.int64)[:, None]
    features = features_ptr + b.to(tl.int64) * features_strides[0]
    features = features + rows * features_strides[1]
    acc = _add_linear(
        acc, features + h * FORM.HEAD_DIM, branch.matrix + bh * FORM.HEAD_PAD * FORM.HEAD_PAD,
        branch.total + bh * FORM.HEAD_PAD, mask_m, branch.eps, FORM.HEAD_DIM,
    )  # fmt: skip
    if FORM.FP8:
        acc += v_correction(operands.v_levels_ptr, bh, n_kv, FORM.HEAD_PAD)[None, :]
    if branch.bias is not None:
        acc += tl.load(branch.bias + offs_d)[None, :]
    out = y_ptr + (b.to(tl.int64) * n_q + rows) * (operands.heads * FORM.HEAD_DIM) + offs_c
    tl.store(out, acc.to(y_ptr.dtype.element_ty), mask=mask)


def launch_kernel(
    a: AttentionInputs,
    operands: QuantizedOperands,
    lut: torch.Tensor,
    branch: LinearBranch,
    *,
    block_q: int,
    block_k: int,
) -> torch.Tensor:
    """Compute both branches [B, Nq, H*D].

    Args:
        a: The attention, with q and k normalised and rotated already.
        operands: The results of its prologue.
        lut: Chosen blocks of keys, int32 [B, H, q_blocks, count].
        branch: The linear branch.
        block_q: Queries in a block.
        block_k: Keys in a block.
    """
    batch, n_q, channels = a.q.shape
    tile = tile_of(a)
    # The rows of a program share their blocks of keys, and a step stays within one block.
    tile = tile._replace(block_m=min(tile.block_m, block_q), block_n=min(tile.block_n, block_k))
    arguments = attention_arguments(a, operands, tile)
    assert operands.lengths is None
    y = torch.empty(batch, n_q, channels, dtype=a.out_dtype, device=a.q.device)
    launch(
        sparse_attention_kernel,
        (cdiv(n_q, tile.block_m), a.spec.heads, batch),
        a.q.device,
        y_ptr=y,
        lut_ptr=lut,
        features_ptr=a.q,
        features_strides=a.q.stride()[:2],
        branch=branch,
        q_blocks=lut.shape[2],
        count=lut.shape[3],
        BLOCKS=(block_q, block_k),
        **register_limit(a, tile),
        **arguments,
    )
    return y
