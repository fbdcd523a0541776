"""int8 attention for Hopper, in Gluon: one warp loads, three groups of four warps compute.

    y = softmax(q k^T) v

It serves attention without a skip in the epilogue. With e4m3 probabilities the arithmetic is that
of `triton.attention_kernel`, bit for bit. With 16 bits its sums are rounded in another order, and
a row keeps a maximum that is exceeded by little. Each group takes 64 rows, and all three share
every block of k and v. So the L2 is read a third as often, and no group waits for a load. The sum
and the product of a group's probabilities are in flight together. On an H200 this kernel reaches
972 TOPS and the portable one 828 (12 heads of 128, 32,760 tokens).

Warps, over time (k0: the first block of 128 keys; a slot has a block of k and the block of v
before it, because both are needed at the same time):

    producer   q | k0 | k1 v0 | k2 v1 | k3 v2 | ...                          STAGES slots ahead
    group g    wait q, slot 0 | q k0 | softmax 0 | wait slot 1 | p0 ones, p0 v0 | q k1 | ...
                                     release 0                                  release 1

The three groups run independently; the exponentials of one overlap the products of the others.
With e4m3 a group waits for slot 1 before softmax 0.

Shared memory, for heads of D channels:

    q      int8 [3, 64, D]          192 * D bytes
    k      int8 [STAGES, 128, D]    512 * D, swizzled by min(D, 128) bytes
    v      e4m3 [STAGES, D, 128]    512 * D, transposed, swizzled by 128 bytes;
           or 16 bits [STAGES, 128, D], 1,024 * D
    ones   as v [8, 128]            the product with it sums rows of p
    q_ready [1], ready [STAGES], empty [STAGES]: barriers of 8 bytes

Together they take 153 KiB for D = 128, with v in 16 bits 218, and half as much for 64. The
registers of one program fill a multiprocessor.

Barriers:

    name         arrivals   who arrives         who waits   phase of the n-th wait
    q_ready      1 + bytes  producer, copies    groups      0, once
    ready[slot]  1 + bytes  producer, copies    groups      n % 2
    empty[slot]  3          groups, one each    producer    (n % 2) ^ 1: the first passes

n counts the uses of that slot. A group releases slot j after q k_j. The product p v_(j-1), which
reads the same slot, is complete before that.

Variants that were measured and are not faster: an order among the groups (FlashAttention-3's
ping-pong, arXiv 2407.08608), a second block of logits in flight, persistent programs, for 128
channels polynomials instead of a share of the exponentials, and in 16 bits softmax and products of
half a block in turn, q k beside the last p v, and sums without a product. For 64 channels
polynomials for an eighth of the exponentials are faster. They are used if the output has 16 bits,
and then the result differs from the portable kernel's by roundings.
"""

from __future__ import annotations

import struct
from functools import cache
from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from turbo_rcm_patch.ops import formats
from turbo_rcm_patch.ops.formats import (
    P_MAX_LOG2,
    AttentionInputs,
    AttentionOutput,
    QuantizedOperands,
)
from turbo_rcm_patch.ops.hopper_common import cta_barrier, grid_dependency_wait, tma_load
from turbo_rcm_patch.ops.launch import LENGTHS, cdiv, in_whole_copies, launch

_LN_2 = gl.constexpr(formats.LN_2)
_ERROR_STEPS = gl.constexpr(float(formats.ERROR_STEPS))
_GROUPS = gl.constexpr(3)  # groups of four warps that compute
_BLOCK_M = gl.constexpr(64)  # rows of a group
_BLOCK_N = gl.constexpr(128)  # keys of a block, which share a scale
_ONES = gl.constexpr(8)  # columns of the product that sums rows: the fewest possible
_STAGES = gl.constexpr(4)  # slots of shared memory
#: How far (log2) a row's maximum may be exceeded before sums in 16 bits are rescaled to a new one:
#: most steps then rescale nothing (the idea is from FlashAttention-4). p in fp16 stays finite; it
#: is 2**8 at the most where no maximum is exceeded.
_BEHIND = gl.constexpr(7.0)
#: Registers per thread. Three groups with 160 and the loading warp with 24 fill a multiprocessor
#: that runs 16 warps. The compiler gives the first group the rest, 168.
_REGISTERS = gl.constexpr(160)
_PRODUCER_REGISTERS = gl.constexpr(24)


def _float(value: float) -> str:
    """Format a number as PTX writes it."""
    return "0f" + struct.pack(">f", value).hex()


def _exp2_partly_polynomial() -> str:
    """Return PTX for 2**x of eight numbers, seven by the exponential unit and one by FMA units.

    Adding and subtracting 1.5 * 2**23 splits x into n + f with an integer n and |f| <= 1/2. A
    cubic polynomial gives 2**f (minimax, relative error 7.5e-5), and n is added to its exponent.
    x is clamped at -16, because e4m3 rounds 2**-16 to 0. The idea is from FlashAttention-4.
    """
    magic = _float(formats.ROUNDER)
    zero, one, two, three = map(_float, (0.99992813, 0.69326098, 0.24261027, 0.05517121))
    lines = [
        "{ .reg .f32 x, n, f, p; .reg .b32 a, b;",
        f"max.ftz.f32 x, $8, {_float(-16.0)};",
        f"add.rn.ftz.f32 n, x, {magic};",
        f"sub.rn.ftz.f32 f, n, {magic};",
        "sub.rn.ftz.f32 f, x, f;",
        f"fma.rn.ftz.f32 p, f, {three}, {two};",
        f"fma.rn.ftz.f32 p, p, f, {one};",
        f"fma.rn.ftz.f32 p, p, f, {zero};",
        "mov.b32 a, n; mov.b32 b, p; shl.b32 a, a, 23; add.s32 b, a, b; mov.b32 $0, b; }",
    ]
    lines += [f"ex2.approx.ftz.f32 ${i}, ${8 + i};" for i in range(1, 8)]
    return "\n".join(lines)


def _multiplied_if_needed(count: int) -> tuple[str, str]:
    """Return PTX, and its constraints, that multiplies numbers of a thread by its rows' factors.

    A warp jumps over it if all its factors are 1. A thread has two rows, and two numbers of the
    first, two of the second and so on; `count` numbers come first, then each one's factor.
    """
    first, second = 2 * count, 2 * count + 2
    lines = [
        "{ .reg .pred p;",
        f"setp.neu.f32 p, ${first}, {_float(1.0)};",
        f"setp.neu.or.f32 p, ${second}, {_float(1.0)}, p;",
        "vote.sync.any.pred p, p, 0xffffffff;",
        "@!p bra DONE;",
        *(f"mul.f32 ${i}, ${i}, ${2 * count + i};" for i in range(count)),
        "DONE: }",
    ]
    constraints = ["=f"] * count + [str(i) for i in range(count)] + ["f"] * count
    return "\n".join(lines), ",".join(constraints)


_RESCALE_64, _RESCALE_128 = (gl.constexpr(_multiplied_if_needed(d // 2)) for d in (64, 128))
_EXP2_ASM = gl.constexpr(_exp2_partly_polynomial())
_EXP2_CONSTRAINTS = gl.constexpr(",".join(["=f"] * 8 + ["f"] * 8))

#: The layout of logits.
_LAYOUT_S = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _BLOCK_N.value, 32]))
#: Rows of a program.
ROWS = _GROUPS.value * _BLOCK_M.value
_WIDE = {torch.bfloat16: "bfloat16", torch.float16: "float16"}


class Operands(NamedTuple):
    """Operands of the kernel beside q, k and v, and the sizes of its memory.

    Attributes:
        q_scale_ptr: fp32 [B, H, n_q_padded].
        k_scale_ptr: fp32 [B, H, n_kv_padded / 128].
        v_levels_ptr: As in `formats.Values`; None for 16-bit v.
        lengths_ptr: Numbers of keys that are seen, int32 [B], or None.
        n_q_padded: Padded number of queries.
        n_kv_padded: Padded number of keys.
        heads: H.
    """

    q_scale_ptr: torch.Tensor
    k_scale_ptr: torch.Tensor
    v_levels_ptr: torch.Tensor | None
    lengths_ptr: torch.Tensor | None
    n_q_padded: int
    n_kv_padded: int
    heads: int


class Form(NamedTuple):
    """The numbers of the kernel that are known when it is compiled.

    Attributes:
        P_MAX_LOG2: log2 of the largest p.
        HEAD_DIM: D.
        FP8: True if p and v are e4m3.
    """

    P_MAX_LOG2: float
    HEAD_DIM: int
    FP8: bool


class Shared(NamedTuple):
    """Shared memory and barriers, see the top of this file."""

    q: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    ones: gl.shared_memory_descriptor
    q_ready: gl.shared_memory_descriptor
    ready: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


class Place(NamedTuple):
    """The rows of a program: batch entry, head, first row, and the number of keys seen."""

    b: gl.tensor
    h: gl.tensor
    start_m: gl.tensor
    limit: gl.tensor


@gluon.jit
def _producer(q_desc, k_desc, v_desc, shared, place, operands, FORM: gl.constexpr):
    """Fill the slots in turn: slot j has block j of k and block j - 1 of v.

    Both are needed at the same time, so they share a barrier. The v of the first slot and the k of
    the last are not used.
    """
    HEAD_DIM: gl.constexpr = FORM.HEAD_DIM
    bh = place.b * operands.heads + place.h
    blocks = (place.limit + _BLOCK_N - 1) // _BLOCK_N
    mbarrier.expect(shared.q_ready, _GROUPS * _BLOCK_M * HEAD_DIM)
    for group in gl.static_range(_GROUPS):
        row = bh * operands.n_q_padded + place.start_m + group * _BLOCK_M
        tma_load(q_desc, [row, 0], shared.q_ready, shared.q.index(group))
    for j in range(0, blocks + 1):
        slot = j % _STAGES
        ready = shared.ready.index(slot)
        # The phase before the first counts as complete, so the first round does not wait.
        mbarrier.wait(shared.empty.index(slot), ((j // _STAGES) % 2) ^ 1)
        mbarrier.expect(ready, (2 if FORM.FP8 else 3) * _BLOCK_N * HEAD_DIM)
        k_row = bh * operands.n_kv_padded + gl.minimum(j, blocks - 1) * _BLOCK_N
        tma_load(k_desc, [k_row, 0], ready, shared.k.index(slot))
        v_row = gl.maximum(j - 1, 0) * _BLOCK_N
        if FORM.FP8:
            tma_load(v_desc, [bh * HEAD_DIM, v_row], ready, shared.v.index(slot))
        else:  # [1, 128, HEAD_DIM]; rows after the last are zeros
            at = [bh // operands.heads, v_row, (bh % operands.heads) * HEAD_DIM]
            tma_load(v_desc, at, ready, shared.v.index(slot))


@gluon.jit
def _softmax(qk, scale, m_i, seen, FORM: gl.constexpr, SHARE: gl.constexpr):
    """Compute one step of the online softmax over qk int32 [BLOCK_M, BLOCK_N].

    seen: [1, BLOCK_N], or None without a mask. Return p fp32, the factor on the sums so far, and
    the new maximum, in 16 bits the old one if it is near. For e4m3 the keys of p are reordered
    within groups of 32 to the order of v, so that the registers of the first product are those of
    the second product's operand.
    """
    if seen is not None:
        logits = gl.where(seen, qk.to(gl.float32) * scale[:, None], float("-inf"))
        m_new = gl.maximum(m_i, gl.max(logits, axis=1))
    else:
        # The maximum of raw integers is cheaper, and correct because scales are positive.
        m_new = gl.maximum(m_i, gl.max(qk, axis=1).to(gl.float32) * scale)
    if not FORM.FP8:
        m_new = gl.where(m_new > m_i + _BEHIND, m_new, m_i)
    shift = (m_new - FORM.P_MAX_LOG2)[:, None]
    if seen is not None:
        p = gl.exp2(logits - shift)
    else:
        p = qk.to(gl.float32) * scale[:, None] - shift
        if SHARE:
            p = gl.inline_asm_elementwise(
                _EXP2_ASM, _EXP2_CONSTRAINTS, [p], dtype=gl.float32, is_pure=True, pack=8
            )
        else:
            p = gl.exp2(p)
    if FORM.FP8:
        p = p.reshape([_BLOCK_M, _BLOCK_N // 32, 2, 2, 4, 2])
        p = p.permute([0, 1, 2, 4, 3, 5]).reshape([_BLOCK_M, _BLOCK_N])
    return p, gl.exp2(m_i - m_new), m_new  # [64, 128], [64], [64]


@gluon.jit
def _rescaled(acc, alpha):
    """Return acc [64, HEAD_DIM] * alpha [64, 1], which takes next to no time where alpha is 1."""
    PACK: gl.constexpr = acc.shape[1] // 2  # numbers of a thread
    RESCALE: gl.constexpr = _RESCALE_64 if PACK == 32 else _RESCALE_128
    acc, alpha = gl.broadcast(acc, alpha)
    return gl.inline_asm_elementwise(
        RESCALE[0], RESCALE[1], [acc, alpha], dtype=gl.float32, is_pure=True, pack=PACK
    )


@gluon.jit
def _accumulate(acc, l_i, p, alpha, v_tile, ones, FP8: gl.constexpr):
    """Add a block of keys to acc [BLOCK_M, HEAD_DIM] and l_i [BLOCK_M, 8], both fp32.

    Products of e4m3 start from zero, because the tensor cores sum them with few digits. Those of
    16 bits are added in place: their p takes the registers of a second accumulator.
    """
    rows_l: gl.constexpr = gl.SliceLayout(1, l_i.type.layout)
    rows_o: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    alpha_l = gl.convert_layout(alpha, rows_l, assert_trivial=True)[:, None]
    alpha_o = gl.convert_layout(alpha, rows_o, assert_trivial=True)[:, None]
    # l_i sums the rounded p, because it is what multiplies v. Depth 0, because the slot of v is
    # released after the next q k without a further wait.
    if FP8:
        operand: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 4)
        p8 = gl.convert_layout(p, operand, assert_trivial=True).to(gl.float8e4nv)  # [64, 128]
        none_l, none_o = gl.zeros_like(l_i), gl.zeros_like(acc)
        row = warpgroup_mma(p8, ones.permute((1, 0)), none_l, use_acc=False, is_async=True)
        pv = warpgroup_mma(p8, v_tile.permute((1, 0)), none_o, use_acc=False, is_async=True)
        row, pv = warpgroup_mma_wait(0, deps=(row, pv))  # [64, 8] and [64, HEAD_DIM] fp32
        l_i = l_i * alpha_l + row
        acc = acc * alpha_o + pv
    else:
        operand: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
        p16 = gl.convert_layout(p, operand, assert_trivial=True).to(ones.dtype)  # [64, 128]
        v_rows = v_tile.reshape([_BLOCK_N, acc.shape[1]])
        l_i = warpgroup_mma(p16, ones.permute((1, 0)), l_i * alpha_l, is_async=True)
        acc = warpgroup_mma(p16, v_rows, _rescaled(acc, alpha_o), is_async=True)
        l_i, acc = warpgroup_mma_wait(0, deps=(l_i, acc))
    return acc, l_i


@gluon.jit
def _over_block(
    acc, l_i, m_i, i, q_tile, rows, shared, seen, FORM: gl.constexpr, SHARE: gl.constexpr
):
    """Compute one step of the online softmax over block i of the keys; seen as in `_softmax`.

    rows: scales of q [64], and the pointer to the scales of this head's keys.
    """
    q_scale, k_scales = rows
    slot = i % _STAGES
    k_tile = shared.k.index(slot).permute((1, 0))  # [HEAD_DIM, 128] int8
    no_logits = gl.zeros([_BLOCK_M, _BLOCK_N], gl.int32, _LAYOUT_S)
    qk = warpgroup_mma(q_tile, k_tile, no_logits, use_acc=False, is_async=True)
    scale = q_scale * gl.load(k_scales + i)  # [64]
    qk = warpgroup_mma_wait(0, deps=(qk,))  # [64, 128] int32
    # Slot i also holds v_(i-1). Nothing reads that any more: the wait with depth 0 in
    # `_accumulate`, one step earlier, has drained p_(i-1) v_(i-1). So the producer may overwrite
    # both.
    mbarrier.arrive(shared.empty.index(slot), count=1)
    slot = (i + 1) % _STAGES
    ready, phase = shared.ready.index(slot), ((i + 1) // _STAGES) % 2
    # The compiler puts a barrier of the group before that release and before this wait. One after
    # the other they cost least, but in 16 bits an early wait was slower.
    if FORM.FP8:
        mbarrier.wait(ready, phase)
    p, alpha, m_i = _softmax(qk, scale, m_i, seen, FORM, SHARE)
    if not FORM.FP8:
        mbarrier.wait(ready, phase)
    acc, l_i = _accumulate(acc, l_i, p, alpha, shared.v.index(slot), shared.ones, FORM.FP8)
    return acc, l_i, m_i


@gluon.jit
def _consumer(out, shared, place, operands, n_q, n_rank, GROUP: gl.constexpr, FORM: gl.constexpr):
    """Compute 64 rows of one head."""
    HEAD_DIM: gl.constexpr = FORM.HEAD_DIM
    RANKS: gl.constexpr = len(out.y_ptrs)
    keys: gl.constexpr = 32 if FORM.FP8 else 16  # of one instruction
    layout_o: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, keys])
    layout_l: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _ONES, keys])
    rows_s: gl.constexpr = gl.SliceLayout(1, _LAYOUT_S)
    # With few channels the exponential unit is the bottleneck. fp32 outputs keep the exact bits.
    narrow: gl.constexpr = out.y_ptrs[0].dtype.element_ty != gl.float32
    SHARE: gl.constexpr = FORM.FP8 and HEAD_DIM == 64 and narrow
    b, h, start_m, limit = place
    bh = b * operands.heads + h
    start_m = start_m + GROUP * _BLOCK_M
    offs_m = start_m + gl.arange(0, _BLOCK_M, rows_s)
    q_scale = gl.load(  # [64]
        operands.q_scale_ptr + bh.to(gl.int64) * operands.n_q_padded + offs_m,
        mask=offs_m < operands.n_q_padded,
        other=0.0,
    )
    rows = (q_scale, operands.k_scale_ptr + bh * (operands.n_kv_padded // _BLOCK_N))
    m_i = gl.full([_BLOCK_M], float("-inf"), gl.float32, rows_s)  # maxima in log2 units
    l_i = gl.zeros([_BLOCK_M, _ONES], gl.float32, layout_l)
    acc = gl.zeros([_BLOCK_M, HEAD_DIM], gl.float32, layout_o)
    q_tile = shared.q.index(GROUP)  # [64, HEAD_DIM] int8

    # First the blocks that every row sees whole, then the one that needs a mask.
    blocks = (limit + _BLOCK_N - 1) // _BLOCK_N
    full = limit // _BLOCK_N
    mbarrier.wait(shared.q_ready, 0)
    mbarrier.wait(shared.ready.index(0), 0)
    for i in range(0, full):
        acc, l_i, m_i = _over_block(
            acc, l_i, m_i, i, q_tile, rows, shared, None, FORM=FORM, SHARE=SHARE
        )
    if full < blocks:
        offs_n = full * _BLOCK_N + gl.arange(0, _BLOCK_N, gl.SliceLayout(0, _LAYOUT_S))
        seen = (offs_n < limit)[None, :]
        acc, l_i, m_i = _over_block(
            acc, l_i, m_i, full, q_tile, rows, shared, seen, FORM=FORM, SHARE=SHARE
        )

    # A row without keys has the total 0, so output 0 and logsumexp -inf. NaN stays NaN.
    total = gl.max(l_i, axis=1)
    total = gl.where(total == 0.0, 1.0, total)
    if out.lse_ptr is not None:
        total_s = gl.convert_layout(total, rows_s, assert_trivial=True)
        lse = m_i - FORM.P_MAX_LOG2 + gl.log2(total_s)
        lse = gl.where(m_i == float("-inf"), m_i, lse) * _LN_2
        if out.shift_ptr is not None:
            shifts = out.shift_ptr + bh.to(gl.int64) * operands.n_q_padded
            lse += gl.load(shifts + offs_m, mask=offs_m < n_q, other=0.0)
        gl.store(out.lse_ptr + bh.to(gl.int64) * n_q + offs_m, lse, mask=offs_m < n_q)
    rows_o: gl.constexpr = gl.SliceLayout(1, layout_o)
    offs_d = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, layout_o))
    factor = gl.convert_layout(1.0 / total, rows_o, assert_trivial=True)
    y = acc * factor[:, None]  # [64, HEAD_DIM]
    if FORM.FP8:
        levels = operands.v_levels_ptr + 3 * bh * HEAD_DIM + offs_d
        # As in `online_softmax.v_correction` and `times_v_scale`.
        scale = gl.load(levels)
        errors = gl.load(levels + 2 * HEAD_DIM).to(gl.int32, bitcast=True).to(gl.float32)
        step = scale / (gl.maximum(limit, 1).to(gl.float32) * _ERROR_STEPS)
        correction = gl.fma(errors, step, gl.load(levels + HEAD_DIM))  # [HEAD_DIM]
        y = gl.fma(y, scale[None, :], correction[None, :])
    offs_y = start_m + gl.arange(0, _BLOCK_M, rows_o)
    y = y.to(out.y_ptrs[0].dtype.element_ty)
    for rank in gl.static_range(RANKS):  # A group of rows may belong to two of them.
        offs_rank = offs_y - rank * n_rank
        row = b.to(gl.int64) * n_rank + offs_rank.to(gl.int64)
        y_rows = row * (RANKS * operands.heads * HEAD_DIM)
        gl.store(
            out.y_ptrs[rank] + y_rows[:, None] + (h * HEAD_DIM + offs_d)[None, :],
            y,
            mask=((offs_rank >= 0) & (offs_rank < n_rank))[:, None],
        )


@gluon.jit(do_not_specialize=LENGTHS)
def hopper_kernel(out, q_desc, k_desc, v_desc, operands, n_q, n_rank, n_kv, FORM: gl.constexpr):
    """Compute y = softmax(q k^T) v.

    Grid: (blocks of ROWS rows, heads, batch). out: `AttentionOutput`; operands: `Operands`;
    descriptors have blocks [64, D] of q, [128, D] of k and [D, 128] of v (16 bits: [1, 128, D]).
    """
    HEAD_DIM: gl.constexpr = FORM.HEAD_DIM
    FP8: gl.constexpr = FORM.FP8
    h = gl.program_id(1)
    b = gl.program_id(2)
    start_m = gl.program_id(0) * (_GROUPS * _BLOCK_M)
    limit = n_kv
    if operands.lengths_ptr is not None:
        limit = gl.maximum(0, gl.minimum(gl.load(operands.lengths_ptr + b), n_kv)).to(gl.int32)
    q_smem = gl.allocate_shared_memory(gl.int8, [_GROUPS, _BLOCK_M, HEAD_DIM], q_desc.layout)
    k_smem = gl.allocate_shared_memory(gl.int8, [_STAGES, _BLOCK_N, HEAD_DIM], k_desc.layout)
    registers: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    slots: gl.constexpr = (
        [_STAGES, HEAD_DIM, _BLOCK_N] if FP8 else [_STAGES, 1, _BLOCK_N, HEAD_DIM]
    )
    v_smem = gl.allocate_shared_memory(v_desc.dtype, slots, v_desc.layout)
    if FP8:
        # The bits of 1.0, because ptxas of CUDA 13.0 converts a constant to e4m3 wrongly.
        ones = gl.full([_ONES, _BLOCK_N], 0x38, gl.int8, registers).to(gl.float8e4nv, bitcast=True)
    else:
        ones = gl.full([_ONES, _BLOCK_N], 1.0, v_desc.dtype, registers)
    ones = gl.allocate_shared_memory(
        v_desc.dtype,
        [_ONES, _BLOCK_N],
        gl.NVMMASharedLayout(128, v_desc.dtype.primitive_bitwidth, rank=2),
        ones,
    )
    q_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_ready, count=1)
    for slot in gl.static_range(_STAGES):
        mbarrier.init(ready.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=_GROUPS)
    fence_async_shared()
    cta_barrier()
    grid_dependency_wait()
    shared = Shared(q_smem, k_smem, v_smem, ones, q_ready, ready, empty)
    place = Place(b, h, start_m, limit)
    gl.warp_specialize(
        [
            (_consumer, (out, shared, place, operands, n_q, n_rank, 0, FORM)),
            (_consumer, (out, shared, place, operands, n_q, n_rank, 1, FORM)),
            (_consumer, (out, shared, place, operands, n_q, n_rank, 2, FORM)),
            (_producer, (q_desc, k_desc, v_desc, shared, place, operands, FORM)),
        ],
        [4, 4, 1],
        [_REGISTERS, _REGISTERS, _PRODUCER_REGISTERS],
    )


@cache
def _layout(block: tuple[int, ...], kind: str) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(block, getattr(gl, kind))


def _descriptor(x: torch.Tensor, block: tuple[int, ...], kind: str) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(x, list(block), _layout(block, kind))


def launch_kernel(
    a: AttentionInputs,
    operands: QuantizedOperands,
    ys: tuple[torch.Tensor, ...],
    lse: torch.Tensor | None,
) -> None:
    """Write softmax(q k^T) v into ys, as `triton.launch_kernel` does, and the logsumexp into lse
    [B, H, Nq] fp32."""
    (q, q_scale, shift, n_q_padded), (k, k_scale, _, n_kv_padded), values, wide = operands[:4]
    n_q = operands.n_q
    rows, keys = _BLOCK_M.value, _BLOCK_N.value
    batch, heads, _, head_dim = q.shape
    if values is not None:
        v_desc = _descriptor(values.e4m3.view(-1, n_kv_padded), (head_dim, keys), "float8e4nv")
    else:
        assert wide is not None
        if not in_whole_copies(wide):
            wide = wide.clone(memory_format=torch.contiguous_format)
        v_desc = _descriptor(wide, (1, keys, head_dim), _WIDE[wide.dtype])
    launch(
        hopper_kernel,
        (cdiv(n_q, ROWS), heads, batch),
        q.device,
        out=AttentionOutput(ys, lse, shift),
        q_desc=_descriptor(q.view(-1, head_dim), (rows, head_dim), "int8"),
        k_desc=_descriptor(k.view(-1, head_dim), (keys, head_dim), "int8"),
        v_desc=v_desc,
        operands=Operands(
            q_scale_ptr=q_scale,
            k_scale_ptr=k_scale,
            v_levels_ptr=None if values is None else values.levels,
            lengths_ptr=operands.lengths,
            n_q_padded=n_q_padded,
            n_kv_padded=n_kv_padded,
            heads=heads,
        ),
        n_q=n_q,
        n_rank=n_q // len(ys),
        n_kv=operands.n_kv,
        FORM=Form(P_MAX_LOG2[a.spec.pv], head_dim, FP8=values is not None),
        num_warps=4,
        launch_pdl=True,  # after the prologue
    )
