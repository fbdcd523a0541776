"""The operands of the attention kernels: q, k and v quantised."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from turbo_rcm_patch.kernels.heads import spread_width
from turbo_rcm_patch.kernels.launch import (
    Tile,
    dense_rows,
    launch,
    pad_head,
    scale_block,
    target_of,
    tile_for,
)
from turbo_rcm_patch.kernels.prologue import prologue_kernel, statistics_kernel

__all__ = ["Keys", "Operands", "Queries", "Values", "quantize"]

PADDED_TO = 128  # tokens are padded to a multiple of this
MEAN_SAMPLES = 256
AMAX_CHUNKS = 32  # at most so many partial maxima of a channel of v
NO_NORM, NORM_ACROSS, NORM_PER_HEAD = 0, 1, 2
LOG2_E = 1.4426950408889634


class Queries(NamedTuple):
    """int8 [B, H, n_padded, HEAD_PAD], scale [B, H, n_padded], shift [B, H, n_padded] or None."""

    int8: torch.Tensor
    scale: torch.Tensor
    shift: torch.Tensor | None


class Keys(NamedTuple):
    """int8 [B, H, n_padded, HEAD_PAD] and scale [B, H, n_padded / scale_block(D)]."""

    int8: torch.Tensor
    scale: torch.Tensor


class Values(NamedTuple):
    """e4m3 [B, H, HEAD_PAD, n_padded] and scale [B, H, HEAD_PAD]."""

    e4m3: torch.Tensor
    scale: torch.Tensor


class Operands(NamedTuple):
    """What the prologue made of q, k and v: `values` for fp8, else 16-bit `v` [B, Nk, H*D].

    Queries have sm_scale * log2(e) in their scales, and what spreading q and k has multiplied
    logits by divided out; their shift is sm_scale * q · mean(k). Keys that are not seen are 0.
    """

    queries: Queries
    keys: Keys
    values: Values | None
    v: torch.Tensor | None
    n_q: int
    n_kv: int
    lengths: torch.Tensor | None


def _as_words(x: torch.Tensor | None) -> torch.Tensor | None:
    """x as int64, four of its 16-bit elements to each, where its layout allows it."""
    if x is None:
        return None
    strides = (*x.stride()[:-1], x.storage_offset(), x.shape[-1])
    if x.element_size() != 2 or any(stride % 4 for stride in strides):
        return None
    # Memory that another library allocated may begin anywhere.
    if x.device.type != "meta" and x.data_ptr() % 8:
        return None
    return x.view(torch.int64)


class _Rows(NamedTuple):
    """How a kernel reads the rows of q or k: tensors, their words, the norm's form."""

    x: torch.Tensor
    words: torch.Tensor | None
    weight: torch.Tensor | None
    weight_words: torch.Tensor | None
    norm: int


def _rows(x: torch.Tensor, weight: torch.Tensor | None, head_dim: int) -> _Rows:
    """x [B, N, H*D], dense rows; weight [H*D] or [D] or None."""
    norm = NO_NORM
    if weight is not None:
        norm = NORM_ACROSS if weight.numel() == x.shape[2] else NORM_PER_HEAD
        weight = weight.contiguous()
    words, weight_words = _as_words(x), _as_words(weight)
    whole = head_dim % 4 == 0 and words is not None
    if not whole or (weight is not None and weight_words is None):
        words = weight_words = None
    return _Rows(x, words, weight, weight_words, norm)


def _heads_a_program(heads: int, programs: int) -> int:
    """Heads a program takes: all, unless that leaves a large GPU idle."""
    return max(1, min(heads, heads * programs // 512))


def quantize(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    heads: int,
    norm_q: torch.Tensor | None,
    norm_k: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    kv_lengths: torch.Tensor | None,
    pv: str,
    qmax: int,
    smooth_k: bool,
    sm_scale: float,
    eps: float,
    want_lse: bool = False,
    counters: torch.Tensor | None = None,
    counter_rows: int = 1,
    tile: Tile | None = None,
) -> Operands:
    """Run the prologue on q [B, Nq, H*D], k and v [B, Nk, H*D]; `tile` overrides the table."""
    q, k, v = dense_rows(q), dense_rows(k), dense_rows(v)
    (batch, n_q, channels), n_kv, device = q.shape, k.shape[1], q.device
    head_dim, fp8 = channels // heads, pv == "fp8"
    head_pad, rows = pad_head(head_dim), scale_block(head_dim)
    if tile is None:
        tile = tile_for("prologue", str(head_pad), target_of(device))
    # A thread takes 32 channels of a token: a block of few tokens wants no more warps than that.
    warps = min(tile.warps, max(1, rows * head_pad // 1024))
    lengths = None if kv_lengths is None else kv_lengths.contiguous()
    q_rows, k_rows = _rows(q, norm_q, head_dim), _rows(k, norm_k, head_dim)
    n_q_padded, n_kv_padded = (-(-n // PADDED_TO) * PADDED_TO for n in (n_q, n_kv))

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(batch, heads, *shape, dtype=dtype, device=device)

    common = {
        "cos_ptr": None if cos is None else cos.contiguous(),
        "sin_ptr": None if sin is None else sin.contiguous(),
        "lengths_ptr": lengths,
        "k_stride_b": k.stride(0),
        "k_stride_n": k.stride(1),
        "v_stride_b": v.stride(0),
        "v_stride_n": v.stride(1),
        "n_kv": n_kv,
        "heads": heads,
        "eps": eps,
        "CHANNELS": channels,
        "HEAD_DIM": head_dim,
        "HEAD_PAD": head_pad,
        "BLOCK_C": min(tile.block_n, 2048 * warps // rows, triton.next_power_of_2(channels)),
        "ROPE": cos is not None,
        "HAS_LENGTHS": lengths is not None,
        "FP8": fp8,
        "num_stages": tile.stages,
    }
    mean = empty(head_pad) if smooth_k else None
    chunk_tokens = triton.cdiv(triton.cdiv(n_kv, AMAX_CHUNKS), rows) * rows
    chunks = triton.cdiv(n_kv, chunk_tokens)
    amax = empty(chunks, head_pad) if fp8 else None
    step = triton.cdiv(n_kv, MEAN_SAMPLES)
    # Half the tokens of a prologue's program and half its warps: twice the registers a thread.
    block_t = max(16, rows // 2)
    if smooth_k or fp8:
        launch(
            statistics_kernel,
            (heads * (smooth_k + chunks * fp8), batch),
            device,
            k_ptr=k,
            k_words_ptr=k_rows.words,
            mean_ptr=mean,
            weight_ptr=k_rows.weight,
            weight_words_ptr=k_rows.weight_words,
            v_ptr=v,
            amax_ptr=amax,
            step=step,
            chunk_tokens=chunk_tokens,
            chunks=chunks,
            BLOCK_T=block_t,
            SAMPLES=triton.cdiv(triton.cdiv(n_kv, step), block_t) * block_t,
            NORM=k_rows.norm,
            WORDS=k_rows.words is not None,
            SMOOTH=smooth_k,
            num_warps=max(4, warps // 2),
            **common,
        )
    queries = Queries(
        empty(n_q_padded, head_pad, dtype=torch.int8),
        empty(n_q_padded),
        empty(n_q_padded) if want_lse and smooth_k else None,
    )
    q_blocks, kv_blocks = n_q_padded // rows, n_kv_padded // rows
    keys = Keys(empty(n_kv_padded, head_pad, dtype=torch.int8), empty(kv_blocks))
    values = None
    if fp8:
        values = Values(empty(head_pad, n_kv_padded, dtype=torch.float8_e4m3fn), empty(head_pad))
    blocks = q_blocks + kv_blocks * (1 + fp8)
    group = _heads_a_program(heads, blocks * batch)
    launch(
        prologue_kernel,
        (blocks, triton.cdiv(heads, group), batch),
        device,
        q_ptr=q,
        q_words_ptr=q_rows.words,
        q_int8_ptr=queries.int8.view(torch.int64),
        q_scale_ptr=queries.scale,
        q_weight_ptr=q_rows.weight,
        q_weight_words_ptr=q_rows.weight_words,
        shift_ptr=queries.shift,
        counter_ptr=counters,
        k_ptr=k,
        k_words_ptr=k_rows.words,
        k_int8_ptr=keys.int8.view(torch.int64),
        k_scale_ptr=keys.scale,
        k_weight_ptr=k_rows.weight,
        k_weight_words_ptr=k_rows.weight_words,
        mean_ptr=None if mean is None else mean.view(torch.int64),
        v_ptr=v,
        amax_ptr=amax,
        v_out_ptr=None if values is None else values.e4m3,
        v_scale_ptr=None if values is None else values.scale,
        q_stride_b=q.stride(0),
        q_stride_n=q.stride(1),
        n_q=n_q,
        n_q_padded=n_q_padded,
        n_kv_padded=n_kv_padded,
        n_counters=0 if counters is None else counters.shape[1],
        chunks=chunks,
        q_blocks=q_blocks,
        kv_blocks=kv_blocks,
        factor=sm_scale * LOG2_E / spread_width(head_pad),
        shift_factor=sm_scale,
        ROWS=rows,
        GROUP=group,
        QMAX=qmax,
        COUNTER_ROWS=counter_rows,
        CHUNKS=AMAX_CHUNKS,
        Q_NORM=q_rows.norm,
        K_NORM=k_rows.norm,
        Q_WORDS=q_rows.words is not None,
        K_WORDS=k_rows.words is not None,
        SUBTRACT=smooth_k,
        SHIFT=queries.shift is not None,
        COUNTERS=counters is not None,
        num_warps=warps,
        **common,
    )
    wide = None if fp8 else v.to(torch.bfloat16 if pv == "bf16" else torch.float16)
    return Operands(queries, keys, values, wide, n_q, n_kv, lengths)
