"""The online softmax over int8 logits, which several kernels share, and its arguments.

Logits are int8 products in int32. The second product is e4m3 or 16-bit with fp32 sums; in e4m3 the
product of each block starts from a new accumulator and is added to the running sum, and keys are
permuted within v so that p never moves between registers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from turbo_rcm_patch.ops import formats
from turbo_rcm_patch.ops.formats import P_MAX_LOG2, AttentionInputs, QuantizedOperands, scale_block
from turbo_rcm_patch.ops.launch import Tile, descriptor, pad_head, target_of, tile_for
from turbo_rcm_patch.ops.numerics import kv_limit
from turbo_rcm_patch.ops.replay import keep_for_replay

#: Registers a thread may have if three programs of four warps share 65,536.
_THREE_PROGRAMS = 168

LN_2 = tl.constexpr(formats.LN_2)
_ERROR_STEPS = tl.constexpr(float(formats.ERROR_STEPS))


class AttendOperands(NamedTuple):
    """Operands of `attend` beside q, k and v, and the sizes of its memory.

    Attributes:
        q_scale_ptr: fp32 [B, H, n_q_padded].
        k_scale_ptr: fp32 [B, H, n_kv_padded / SCALE_BLOCK].
        v_levels_ptr: As in `formats.Values`; None for 16-bit v.
        ones_ptr: e4m3 [BLOCK_N, 16]; None for 16-bit v.
        v_strides: Strides of batch and tokens of 16-bit v.
        lengths_ptr: Numbers of keys that are seen, int32 [B], or None.
        n_q_padded: Padded number of queries.
        n_kv_padded: Padded number of keys.
        heads: H.
    """

    q_scale_ptr: torch.Tensor
    k_scale_ptr: torch.Tensor
    v_levels_ptr: torch.Tensor | None
    ones_ptr: torch.Tensor | None
    v_strides: tuple[int, int]
    lengths_ptr: torch.Tensor | None
    n_q_padded: int
    n_kv_padded: int
    heads: int


class Head(NamedTuple):
    """One head as the online softmax reads it, with a block of its queries.

    Attributes:
        q: int8 [BLOCK_M, HEAD_PAD].
        q_scale: fp32 [BLOCK_M].
        offs_m: The queries, [BLOCK_M].
        k_src: As in `attend`.
        k_scale_ptr: Scales of this head's keys.
        v_src: As in `attend`; 16-bit v points to this head.
        v_strides: Strides of batch and tokens of 16-bit v.
        ones: The right operand of a product that sums rows.
        bh: Index of batch entry and head.
        n_kv_padded: Padded number of keys.
    """

    q: tl.tensor
    q_scale: tl.tensor
    offs_m: tl.tensor
    k_src: tl.tensor
    k_scale_ptr: tl.tensor
    v_src: tl.tensor
    v_strides: tl.tuple
    ones: tl.tensor
    bh: tl.tensor
    n_kv_padded: tl.tensor


class AttendForm(NamedTuple):
    """The numbers of `attend` that are known when it is compiled."""

    P_MAX_LOG2: float
    HEAD_DIM: int
    HEAD_PAD: int
    BLOCK_M: int
    BLOCK_N: int
    SCALE_BLOCK: int
    FP8: bool
    DESCRIPTORS: bool
    CAUSAL: bool


@triton.jit
def _permute_keys(p, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Reorder the keys of p within groups of 32 to the order of v in `value_block`."""
    p = tl.reshape(p, [BLOCK_M, BLOCK_N // 32, 2, 2, 4, 2])
    p = tl.permute(p, [0, 1, 2, 4, 3, 5])
    return tl.reshape(p, [BLOCK_M, BLOCK_N])


@triton.jit
def over_block(acc, l_i, m_i, head, limit, start_n, FORM: tl.constexpr, MASKED: tl.constexpr):
    """Compute one step of the online softmax over BLOCK_N keys from start_n on.

    head: `Head`; FORM: `AttendForm`. With FP8 l_i is [BLOCK_M, 16] with equal columns.
    """
    BLOCK_N: tl.constexpr = FORM.BLOCK_N
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, FORM.HEAD_PAD)
    start_n = tl.multiple_of(start_n, BLOCK_N)
    if FORM.DESCRIPTORS:
        k = head.k_src.load([(head.bh * head.n_kv_padded + start_n).to(tl.int32), 0])
    else:
        k_rows = head.k_src + (head.bh * head.n_kv_padded + start_n) * FORM.HEAD_PAD
        k = tl.load(k_rows + offs_n[:, None] * FORM.HEAD_PAD + offs_d[None, :])
    qk = tl.dot(head.q, tl.trans(k), out_dtype=tl.int32)  # [BLOCK_M, BLOCK_N]
    scale = head.q_scale * tl.load(head.k_scale_ptr + start_n // FORM.SCALE_BLOCK)  # [BLOCK_M]
    if MASKED:
        seen = (start_n + offs_n < limit)[None, :]
        if FORM.CAUSAL:
            seen = seen & (head.offs_m[:, None] >= start_n + offs_n[None, :])
        logits = tl.where(seen, qk.to(tl.float32) * scale[:, None], float("-inf"))
        m_new = tl.maximum(m_i, tl.max(logits, axis=1))
        # A row without keys so far has the maximum -inf; 0 instead gives p = 0, not NaN.
        m_use = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(logits - (m_use - FORM.P_MAX_LOG2)[:, None])
    else:
        # The maximum of raw integers is cheaper, and correct because scales are positive.
        m_new = tl.maximum(m_i, tl.max(qk, axis=1).to(tl.float32) * scale)
        m_use = m_new
        p = tl.exp2(qk.to(tl.float32) * scale[:, None] - (m_use - FORM.P_MAX_LOG2)[:, None])
    alpha = tl.exp2(m_i - m_use)  # [BLOCK_M]
    m_i = m_new
    if FORM.FP8:
        # Permute in fp32 and cast last, because permuting bytes costs shuffles.
        p8 = _permute_keys(p, FORM.BLOCK_M, BLOCK_N).to(tl.float8e4nv)  # [BLOCK_M, BLOCK_N]
        if FORM.DESCRIPTORS:
            v = head.v_src.load([(head.bh * FORM.HEAD_PAD).to(tl.int32), start_n])
        else:
            v_rows = head.v_src + head.bh * FORM.HEAD_PAD * head.n_kv_padded + start_n
            v = tl.load(v_rows + offs_d[:, None].to(tl.int64) * head.n_kv_padded + offs_n[None, :])
        # Sum the rounded P, because it is what multiplies v.
        l_i = l_i * alpha[:, None] + tl.dot(p8, head.ones)
        acc = acc * alpha[:, None] + tl.dot(p8, tl.trans(v))
    else:
        v_rows = head.v_src + start_n.to(tl.int64) * head.v_strides[1]
        offs_v = offs_n[:, None].to(tl.int64) * head.v_strides[1] + offs_d[None, :]
        if MASKED:
            mask_v = (start_n + offs_n < limit)[:, None] & (offs_d < FORM.HEAD_DIM)[None, :]
            v = tl.load(v_rows + offs_v, mask=mask_v, other=0.0)
        elif FORM.HEAD_DIM == FORM.HEAD_PAD:
            v = tl.load(v_rows + offs_v)
        else:
            v = tl.load(v_rows + offs_v, mask=(offs_d < FORM.HEAD_DIM)[None, :], other=0.0)
        p16 = p.to(v.dtype)  # [BLOCK_M, BLOCK_N]
        l_i = l_i * alpha + tl.sum(p16.to(tl.float32), axis=1)
        acc = tl.dot(p16, v, acc * alpha[:, None])
    return acc, l_i, m_i


@triton.jit
def over_keys(acc, l_i, m_i, head, limit, lo, hi, FORM: tl.constexpr, MASKED: tl.constexpr):
    """Compute the online softmax over keys lo to hi."""
    # The masked loop runs once or twice. Unpipelined, it leaves registers for a third program.
    for start_n in tl.range(lo, hi, FORM.BLOCK_N, num_stages=1 if MASKED else None):
        acc, l_i, m_i = over_block(acc, l_i, m_i, head, limit, start_n, FORM, MASKED)
    return acc, l_i, m_i


@triton.jit
def row_sums(l_i, FP8: tl.constexpr):
    """Return the row sums of a finished online softmax; NaN stays NaN.

    Rows without keys get 1, so that their output is 0.
    """
    total = tl.max(l_i, axis=1) if FP8 else l_i
    return tl.where(total == 0.0, 1.0, total)


@triton.jit
def v_correction(v_levels_ptr, bh, limit, HEAD_PAD: tl.constexpr):
    """Return the term that e4m3 v lacks, [HEAD_PAD], to be added to every output row.

    It is the mean that was subtracted plus the mean of the rounding errors over `limit` > 0 keys.
    It is added without a factor because the weights of a row sum to 1.
    """
    levels = v_levels_ptr + 3 * bh * HEAD_PAD + tl.arange(0, HEAD_PAD)
    errors = tl.load(levels + 2 * HEAD_PAD).to(tl.int32, bitcast=True).to(tl.float32)
    step = tl.load(levels) / (limit.to(tl.float32) * _ERROR_STEPS)
    return tl.fma(errors, step, tl.load(levels + HEAD_PAD))


@triton.jit
def times_v_scale(acc, total, lost, v_levels_ptr, bh, HEAD_PAD: tl.constexpr):
    """Return acc / total * (scale of v) + lost.

    The multiply-add is explicit, so that all variants and Hopper's kernel round alike. The
    assembler would contract the quotient and the sum in some variants only.
    """
    scale = tl.load(v_levels_ptr + 3 * bh * HEAD_PAD + tl.arange(0, HEAD_PAD))
    return tl.fma(acc * (1.0 / total)[:, None], scale[None, :], lost)


@triton.jit
def begin(q_src, k_src, v_src, operands, b, h, start_m, FORM: tl.constexpr):
    """Return the `Head` of rows start_m.., and an empty softmax: acc, l_i and m_i.

    The arguments are those of `attend`.
    """
    bh = b.to(tl.int64) * operands.heads + h
    offs_m = start_m + tl.arange(0, FORM.BLOCK_M)
    offs_d = tl.arange(0, FORM.HEAD_PAD)
    if FORM.DESCRIPTORS:
        q = q_src.load([(bh * operands.n_q_padded + start_m).to(tl.int32), 0])
    else:
        q_rows = q_src + (bh * operands.n_q_padded + start_m) * FORM.HEAD_PAD
        q = tl.load(q_rows + tl.arange(0, FORM.BLOCK_M)[:, None] * FORM.HEAD_PAD + offs_d[None, :])
    q_scale = tl.load(operands.q_scale_ptr + bh * operands.n_q_padded + offs_m)
    k_scales = operands.k_scale_ptr + bh * (operands.n_kv_padded // FORM.SCALE_BLOCK)
    m_i = tl.full([FORM.BLOCK_M], float("-inf"), tl.float32)
    acc = tl.full([FORM.BLOCK_M, FORM.HEAD_PAD], 0.0, tl.float32)
    ones = m_i  # not used without FP8, and None cannot be returned
    if FORM.FP8:
        l_i = tl.full([FORM.BLOCK_M, 16], 0.0, tl.float32)
        # Where products read shared memory, one load puts the ones there. Elsewhere they are a
        # constant in registers, because a load would be repeated in every block.
        if FORM.DESCRIPTORS:
            offs_n = tl.arange(0, FORM.BLOCK_N)
            ones = tl.load(operands.ones_ptr + offs_n[:, None] * 16 + tl.arange(0, 16)[None, :])
        else:
            ones = tl.full([FORM.BLOCK_N, 16], 0x38, tl.int8).to(tl.float8e4nv, bitcast=True)
        v_head = v_src
    else:
        l_i = tl.full([FORM.BLOCK_M], 0.0, tl.float32)
        v_head = v_src + b.to(tl.int64) * operands.v_strides[0] + h * FORM.HEAD_DIM
    head = Head(
        q=q, q_scale=q_scale, offs_m=offs_m, k_src=k_src, k_scale_ptr=k_scales, v_src=v_head,
        v_strides=operands.v_strides, ones=ones, bh=bh, n_kv_padded=operands.n_kv_padded,
    )  # fmt: skip
    return head, acc, l_i, m_i


@triton.jit
def attend(q_src, k_src, v_src, operands, n_kv, b, h, start_m, FORM: tl.constexpr):
    """Compute rows start_m.. of one head: [BLOCK_M, HEAD_PAD] fp32 and log2-sum-exp2 [BLOCK_M].

    q int8 [B, H, n_q_padded, HEAD_PAD], k int8 [B, H, n_kv_padded, HEAD_PAD], v e4m3
    [B, H, HEAD_PAD, n_kv_padded] (FP8) or 16-bit [B, N, H*D]: pointers, or 2-D descriptors over
    the same memory (DESCRIPTORS; v only with FP8). operands: `AttendOperands`; FORM: `AttendForm`.
    """
    limit = kv_limit(operands.lengths_ptr, b, n_kv)
    head, acc, l_i, m_i = begin(q_src, k_src, v_src, operands, b, h, start_m, FORM)

    # First the blocks that every row sees whole, then those that need a mask.
    hi = limit
    full = limit // FORM.BLOCK_N * FORM.BLOCK_N
    if FORM.CAUSAL:
        hi = tl.minimum(limit, start_m + FORM.BLOCK_M)
        full = tl.minimum(full, (start_m + 1) // FORM.BLOCK_N * FORM.BLOCK_N)
    acc, l_i, m_i = over_keys(acc, l_i, m_i, head, limit, 0, full, FORM, MASKED=False)
    acc, l_i, m_i = over_keys(acc, l_i, m_i, head, limit, full, hi, FORM, MASKED=True)

    total = row_sums(l_i, FORM.FP8)
    out = acc
    if FORM.FP8:
        # Without keys acc is 0. The branch also separates this code from the loads of the skip;
        # scheduled together, both would not fit into registers.
        if limit > 0:
            lost = v_correction(operands.v_levels_ptr, head.bh, limit, FORM.HEAD_PAD)[None, :]
            out = times_v_scale(acc, total, lost, operands.v_levels_ptr, head.bh, FORM.HEAD_PAD)
    else:
        out = acc / total[:, None]
    lse = tl.where(m_i == float("-inf"), m_i, m_i - FORM.P_MAX_LOG2 + tl.log2(total))
    return out, lse


#: Device -> result of `ones_for`. It is never freed, because any stream may read it.
_ones: dict[torch.device, torch.Tensor] = {}


def ones_for(device: torch.device) -> torch.Tensor:
    """Return [256, 16] e4m3 ones, the right operand of a product that sums rows.

    The ones are kept per device, after they are written, because another stream may read them
    next. A CUDA graph that is being captured gets its own, because memory and writes during a
    capture belong to the graph.
    """
    kept = _ones.get(device)
    if kept is None:
        kept = torch.ones(256, 16, dtype=torch.float32, device=device).to(torch.float8_e4m3fn)
        if device.type == "cuda":
            if torch.cuda.is_current_stream_capturing():
                return kept
            torch.cuda.current_stream(device).synchronize()
        _ones[device] = keep_for_replay(kept)
    return kept


def tile_of(a: AttentionInputs) -> Tile:
    """Return the tile of an attention from the table."""
    variant = f"{'fp8' if a.spec.pv == 'fp8' else '16bit'}_{pad_head(a.head_dim)}"
    return tile_for("attention", variant, target_of(a.q.device))


def register_limit(a: AttentionInputs, tile: Tile) -> dict[str, int]:
    """Return the option that lets three programs share a multiprocessor of Hopper.

    Without it the compiler takes a few registers more, so that only two fit.
    """
    hopper = target_of(a.q.device) == ("cuda", 90)
    few = hopper and tile.warps == 4 and a.q.element_size() == 2
    return {"maxnreg": _THREE_PROGRAMS} if few else {}


def attention_arguments(
    a: AttentionInputs, operands: QuantizedOperands, tile: Tile
) -> dict[str, object]:
    """Return the arguments of `attend` by name."""
    queries, keys, values, v = operands[:4]
    keys_a_scale = scale_block(a.head_dim)
    block_n = min(tile.block_n, keys_a_scale)
    # Only in the e4m3 path does the prologue lay out every operand.
    q_src, k_src = queries.int8, keys.int8
    n_q_padded, n_kv_padded, head_pad = queries.n_padded, keys.n_padded, q_src.shape[3]
    descriptors = values is not None and target_of(q_src.device).descriptors
    v_src = values.e4m3 if values is not None else v
    assert v_src is not None
    if descriptors:
        q_src = descriptor(q_src.view(-1, head_pad), [tile.block_m, head_pad])
        k_src = descriptor(k_src.view(-1, head_pad), [block_n, head_pad])
        v_src = descriptor(v_src.view(-1, n_kv_padded), [head_pad, block_n])
    levels = None if values is None else values.levels
    ones = None if values is None else ones_for(queries.scale.device)
    strides = (0, 0) if v is None else v.stride()[:2]
    return {
        "q_src": q_src,
        "k_src": k_src,
        "v_src": v_src,
        "operands": AttendOperands(
            queries.scale,
            keys.scale,
            v_levels_ptr=levels,
            ones_ptr=ones,
            v_strides=strides,
            lengths_ptr=operands.lengths,
            n_q_padded=n_q_padded,
            n_kv_padded=n_kv_padded,
            heads=a.spec.heads,
        ),
        "n_q": operands.n_q,
        "n_kv": operands.n_kv,
        "FORM": AttendForm(
            P_MAX_LOG2[a.spec.pv], a.head_dim, head_pad, tile.block_m, block_n, keys_a_scale,
            FP8=values is not None, DESCRIPTORS=descriptors, CAUSAL=a.spec.causal,
        ),
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }  # fmt: skip
