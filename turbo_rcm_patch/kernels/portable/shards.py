"""Quantised pieces of a sequence on a GPU: what context-parallel attention computes before and
after its exchanges.

The same functions as `ops.shards`, by the kernels of `portable.prologue` and
`portable.attention`: each launch takes one of q, k and v, because what is quantised first travels
while the next one is quantised. The means of k and v and the largest magnitudes of v are given,
because they belong to the whole sequence.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import triton

from turbo_rcm_patch.kernels.gluon import ran_on_hopper
from turbo_rcm_patch.kernels.launch import (
    cdiv,
    dense_rows,
    launch,
    pad_head,
    scale_block,
    skip_arguments,
    strides,
    target_of,
    tile_for,
)
from turbo_rcm_patch.kernels.operands import (
    AttentionInputs,
    Keys,
    Operands,
    Queries,
    Values,
    norm_kind,
)
from turbo_rcm_patch.kernels.portable.attention import (
    P_SHIFT,
    attention_arguments,
    attention_kernel,
    register_limit,
    variant_of,
)
from turbo_rcm_patch.kernels.portable.norm import norm_rotate
from turbo_rcm_patch.kernels.portable.prologue import (
    AMAX_CHUNKS,
    LARGEST_CENTRED,
    LEAST_V,
    LOG2_E,
    PADDED_TO,
    _heads_a_program,
    _rows,
    hadamard_width,
    prologue_kernel,
    statistics_kernel,
)
from turbo_rcm_patch.kernels.replay import replayed

_E4M3_MAX = 448.0
#: What else the attention has: no skip, no mask.
_PLAIN = dict.fromkeys(AttentionInputs._fields) | {
    "c_skip_value": 1.0, "c_out_value": 1.0, "causal": False,
}  # fmt: skip


def width(head_dim: int) -> int:
    """Channels of a head in int8 and e4m3."""
    return pad_head(head_dim)


def _padded(tokens: int) -> int:
    return cdiv(tokens, PADDED_TO) * PADDED_TO


def _dense(tokens: Any) -> Any:
    """`ops.shards.Tokens` that kernels can read."""
    small = ("weight", "bias", "cos", "sin")
    given = {name: getattr(tokens, name) for name in small}
    return tokens._replace(
        x=dense_rows(tokens.x),
        **{name: None if x is None else x.contiguous() for name, x in given.items()},
    )


def prepared(tokens: Any, dtype: torch.dtype) -> torch.Tensor | None:
    """q or k after its norm and rotary embedding, for exact attention: [B, N, H*D], in its dtype;
    None where no kernel has the norm."""
    x, heads, weight, bias, cos, sin, eps = tokens
    if weight is None and cos is None:
        return x
    head_dim = x.shape[-1] // heads
    across = weight is None or (bias is None and weight.numel() == x.shape[-1])
    if x.dtype != dtype or not (across or head_dim & (head_dim - 1) == 0):
        return None
    return norm_rotate(x, heads, weight=weight, bias=bias, cos=cos, sin=sin, eps=eps)


def statistics(
    k: Any, v: torch.Tensor, *, first: int, step: int, smooth_k: bool, fp8: bool
) -> torch.Tensor:
    """Sums of k, normalised and rotated, and of v over tokens first, first + step, ..., and the
    largest magnitudes of the channels of v.

    Returns:
        [3, B, H, HEAD_PAD] fp32; zeros where they are not wanted.
    """
    count = max(0, cdiv(v.shape[1] - first, step))
    mean, stats, sample = _partial_statistics(k, v, first if count else -1, step, smooth_k, fp8)
    zeros = torch.zeros_like(mean)
    return torch.stack(
        [
            mean * count if count and smooth_k else zeros,
            sample[:, :, 0] * count if count and fp8 else zeros,
            stats[:, :, 1:].amax(2) if fp8 else zeros,
        ]
    )


@replayed
def _partial_statistics(
    k: Any, v: torch.Tensor, first: int, step: int, smooth_k: bool, fp8: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The mean of such tokens of k (none with first < 0), and, of v, an unused row and the maxima
    by chunks of tokens, and the mean of such tokens [B, H, 1, HEAD_PAD]."""
    k, v = _dense(k), dense_rows(v)
    batch, n, channels = v.shape
    heads, head_pad = k.heads, pad_head(channels // k.heads)
    rows = scale_block(channels // heads)
    chunk_tokens = cdiv(cdiv(n, AMAX_CHUNKS), rows) * rows
    chunks = cdiv(n, chunk_tokens) if fp8 else 0

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(batch, heads, *shape, head_pad, dtype=torch.float32, device=v.device)

    mean, stats, sample = empty(), empty(1 + chunks), empty(1)
    if first >= 0 and (smooth_k or fp8):
        rows = slice(first, None)
        _statistics(
            k.rows(rows), v[:, rows], mean if smooth_k else None, sample if fp8 else None, step
        )
    if fp8:
        _statistics(k, v, None, stats, 1, chunk_tokens, chunks)
    return mean, stats, sample


def _statistics(
    k: Any,
    v: torch.Tensor,
    mean: torch.Tensor | None,
    stats: torch.Tensor | None,
    step: int,
    chunk_tokens: int = 0,
    chunks: int = 0,
) -> None:
    """The mean of k into `mean`; the maxima of v into `stats`, or, without chunks, its mean."""
    x, heads = k.x, k.heads
    (batch, n, channels), head_dim = x.shape, x.shape[2] // heads
    head_pad, rows = pad_head(head_dim), scale_block(head_dim)
    tile = tile_for("prologue", str(head_pad), target_of(x.device))
    warps = min(tile.warps, max(1, rows * head_pad // 1024))
    words = _rows(x, k.weight, k.bias, head_dim)
    block_t = max(16, rows // 2)
    errors = None
    if stats is not None and not chunks:
        errors = torch.empty(batch, heads, 3, head_pad, dtype=torch.int32, device=x.device)
    launch(
        statistics_kernel,
        (heads * ((mean is not None) + (stats is not None) * (chunks or 1)), batch),
        x.device,
        k_ptr=x,
        k_words_ptr=words.words,
        mean_ptr=mean,
        weight_ptr=k.weight,
        weight_words_ptr=words.weight_words,
        bias_ptr=k.bias,
        bias_words_ptr=words.bias_words,
        cos_ptr=k.cos,
        sin_ptr=k.sin,
        v_ptr=v,
        v_stats_ptr=stats,
        v_error_ptr=stats if errors is None else errors,  # not reached with chunks
        lengths_ptr=None,
        **strides(k=x, v=v),
        n_kv=n,
        step=step,
        chunk_tokens=chunk_tokens,
        chunks=chunks,
        heads=heads,
        eps=k.eps,
        CHANNELS=channels,
        HEAD_DIM=head_dim,
        HEAD_PAD=head_pad,
        BLOCK_T=block_t,
        BLOCK_C=min(tile.block_n, 2048 * warps // rows, triton.next_power_of_2(channels)),
        NORM=norm_kind(k.weight, k.bias, channels),
        ROPE=k.cos is not None,
        WORDS=words.words is not None,
        HAS_LENGTHS=False,
        SMOOTH=mean is not None,
        FP8=stats is not None,
        num_warps=max(4, warps // 2),
        num_stages=tile.stages,
    )


@replayed
def queries(q: Any, *, sm_scale: float, qmax: int) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 q [B, H, padded(N), HEAD_PAD] and its scales [B, H, padded(N)] into log2 units."""
    q = _dense(q)
    (batch, n, channels), heads = q.x.shape, q.heads
    head_pad, n_padded = pad_head(channels // heads), _padded(n)
    int8 = torch.empty(batch, heads, n_padded, head_pad, dtype=torch.int8, device=q.x.device)
    scale = torch.empty(batch, heads, n_padded, dtype=torch.float32, device=q.x.device)
    _prologue(
        q, "q", int8=int8, scale=scale, qmax=qmax,
        factor=sm_scale * LOG2_E / hadamard_width(head_pad),
    )  # fmt: skip
    return int8, scale


def keys(k: Any, mean: torch.Tensor | None, *, qmax: int) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 k [B, H, padded(N), HEAD_PAD] less `mean` [B, H, HEAD_PAD], 0 in the padding, and its
    scales [B, H, padded(N) / scale_block(D)]."""
    batch, n, channels = k.x.shape
    if not n:
        empty = k.x.new_empty(batch, k.heads, 0, width(channels // k.heads), dtype=torch.float32)
        return empty.to(torch.int8), empty[..., 0]
    return _keys(k, mean, qmax)


@replayed
def _keys(k: Any, mean: torch.Tensor | None, qmax: int) -> tuple[torch.Tensor, torch.Tensor]:
    k = _dense(k)
    (batch, n, channels), heads = k.x.shape, k.heads
    head_dim, n_padded = channels // heads, _padded(n)
    shape, device = (batch, heads, n_padded), k.x.device
    int8 = torch.empty(*shape, pad_head(head_dim), dtype=torch.int8, device=device)
    blocks = n_padded // scale_block(head_dim)
    scale = torch.empty(*shape[:2], blocks, dtype=torch.float32, device=device)
    mean = None if mean is None else mean.contiguous()
    _prologue(k, "k", int8=int8, scale=scale, qmax=qmax, mean=mean)
    return int8, scale


def value_levels(mean: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """Scale and subtracted mean of e4m3 v, [B, H, 2, HEAD_PAD], from the mean of a sample and the
    largest magnitudes [B, H, HEAD_PAD]."""
    mean = torch.where(amax < LARGEST_CENTRED.value, mean, 0.0)
    scale = (amax + mean.abs()).clamp_min(LEAST_V.value) / _E4M3_MAX
    return torch.stack([scale, mean], 2)


def values(
    v: torch.Tensor, mean: torch.Tensor, amax: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """v [B, N, H*D] in e4m3, from the same: [B, H, HEAD_PAD, padded(N)], 0 in the padding,
    permuted for the second product; and the sums of its rounding errors [B, H, HEAD_PAD] int32."""
    levels = torch.zeros(*amax.shape[:2], 3, amax.shape[2], dtype=torch.int32, device=v.device)
    if not v.shape[1]:
        out = torch.empty(*amax.shape, 0, dtype=torch.float8_e4m3fn, device=v.device)
    else:
        out = _values(v, torch.stack([mean, amax], 2), levels)
    return out, levels[:, :, 2]


@replayed
def _values(v: torch.Tensor, stats: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    v = dense_rows(v)
    (batch, n, _), (_, heads, _, head_pad) = v.shape, stats.shape
    out = torch.empty(
        batch, heads, head_pad, _padded(n), dtype=torch.float8_e4m3fn, device=v.device
    )
    _prologue(_Values(v, heads), "v", v_out=out, v_stats=stats, v_errors=levels)
    return out


class _Values:
    """v in the place of `Tokens`."""

    weight = bias = cos = sin = None
    eps = 1e-6

    def __init__(self, x: torch.Tensor, heads: int) -> None:
        self.x, self.heads = x, heads


def _prologue(
    tokens: Any,
    which: str,
    *,
    int8: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    qmax: int = 127,
    factor: float = 1.0,
    mean: torch.Tensor | None = None,
    v_out: torch.Tensor | None = None,
    v_stats: torch.Tensor | None = None,
    v_errors: torch.Tensor | None = None,
) -> None:
    """`prologue_kernel` for q, k or v alone."""
    v_levels = None if v_errors is None else v_errors.view(torch.float32)
    x, heads = tokens.x, tokens.heads
    (batch, n, channels), head_dim = x.shape, x.shape[2] // heads
    head_pad, rows = pad_head(head_dim), scale_block(head_dim)
    target = target_of(x.device)

    def on_hopper(own: ModuleType) -> bool:
        return own.run_hopper_part(
            tokens, which, int8=int8, scale=scale, qmax=qmax, factor=factor, mean=mean,
            v_out=v_out, v_levels=v_levels, v_errors=v_errors, v_stats=v_stats,
        )  # fmt: skip

    if target == ("cuda", 90) and ran_on_hopper("shards", "prologue", on_hopper):
        return
    tile = tile_for("prologue", str(head_pad), target)
    warps = min(tile.warps, max(1, rows * head_pad // 1024))
    words = _rows(x, tokens.weight, tokens.bias, head_dim)
    n_padded = _padded(n)
    blocks = n_padded // rows
    group = _heads_a_program(heads, blocks * batch)
    norm = norm_kind(tokens.weight, tokens.bias, channels)
    # What the launch does not take is compiled too, and never reached: any pointer will do.
    as_words = (v_out if int8 is None else int8).view(torch.int64)
    scale = v_levels if scale is None else scale

    def of(part: str, value: Any) -> Any:
        return value if which == part else None

    launch(
        prologue_kernel,
        (blocks, cdiv(heads, group), batch),
        x.device,
        q_ptr=x,
        q_words_ptr=of("q", words.words),
        q_int8_ptr=as_words,
        q_scale_ptr=scale,
        q_weight_ptr=of("q", tokens.weight),
        q_weight_words_ptr=of("q", words.weight_words),
        q_bias_ptr=of("q", tokens.bias),
        q_bias_words_ptr=of("q", words.bias_words),
        shift_ptr=None,
        counter_ptr=None,
        k_ptr=x,
        k_words_ptr=of("k", words.words),
        k_int8_ptr=as_words,
        k_scale_ptr=scale,
        k_weight_ptr=of("k", tokens.weight),
        k_weight_words_ptr=of("k", words.weight_words),
        k_bias_ptr=of("k", tokens.bias),
        k_bias_words_ptr=of("k", words.bias_words),
        mean_ptr=None if mean is None else mean.view(torch.int64),
        v_ptr=x,
        v_stats_ptr=v_stats,
        v_out_ptr=v_out,
        v_levels_ptr=v_levels,
        v_error_ptr=v_errors,
        cos_ptr=tokens.cos,
        sin_ptr=tokens.sin,
        lengths_ptr=None,
        **strides(q=x, k=x, v=x),
        n_q=n,
        n_kv=n,
        n_q_padded=n_padded,
        n_kv_padded=n_padded,
        heads=heads,
        n_counters=0,
        chunks=1,
        q_blocks=blocks if which == "q" else 0,
        kv_blocks=blocks if which == "k" else 0,
        eps=tokens.eps,
        factor=factor,
        shift_factor=1.0,
        CHANNELS=channels,
        HEAD_DIM=head_dim,
        HEAD_PAD=head_pad,
        ROWS=rows,
        BLOCK_C=min(tile.block_n, 2048 * warps // rows, triton.next_power_of_2(channels)),
        GROUP=group,
        QMAX=qmax,
        COUNTER_ROWS=1,
        CHUNKS=AMAX_CHUNKS,
        Q_NORM=norm if which == "q" else 0,
        K_NORM=norm if which == "k" else 0,
        ROPE=tokens.cos is not None,
        Q_WORDS=which == "q" and words.words is not None,
        K_WORDS=which == "k" and words.words is not None,
        HAS_LENGTHS=False,
        SUBTRACT=mean is not None,
        SHIFT=False,
        COUNTERS=False,
        FP8=which == "v",
        num_warps=warps,
        num_stages=tile.stages,
    )


@replayed
def attend(
    q: tuple[torch.Tensor, torch.Tensor],
    k: tuple[torch.Tensor, torch.Tensor],
    v: torch.Tensor,
    v_levels: torch.Tensor | None,
    *,
    n_q: int,
    n_kv: int,
    head_dim: int,
    pv: str,
    out_dtype: torch.dtype,
    want_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """softmax(q k^T) v of quantised operands; see `ops.shards.attend`."""
    batch, heads = q[0].shape[:2]
    operands = Operands(
        Queries(*q, None),
        Keys(*k),
        None if v_levels is None else Values(v, v_levels.contiguous()),
        v if v_levels is None else None,
        n_q,
        n_kv,
        None,
    )
    device = v.device
    y = torch.empty(batch, n_q, heads * head_dim, dtype=out_dtype, device=device)
    lse = None
    if want_lse:
        lse = torch.empty(batch, heads, n_q, dtype=torch.float32, device=device)
    target = target_of(device)
    # Operands came from other ranks: of the inputs only the form is read, which is that of y.
    fields: Any = _PLAIN | {
        "q": y, "k": y, "v": y, "heads": heads, "pv": pv, "want_lse": want_lse,
    }  # fmt: skip
    a = AttentionInputs(**fields)

    def on_hopper(own: ModuleType) -> bool:
        if not own.serves(a):
            return False
        own.hopper_attention(y, lse, operands, P_SHIFT[pv])
        return True

    if target == ("cuda", 90) and ran_on_hopper("attention", "attention", on_hopper):
        return y, lse
    tile = tile_for("attention", variant_of(a), target)
    launch(
        attention_kernel,
        (cdiv(n_q, tile.block_m), heads, batch),
        device,
        y_ptr=y,
        lse_ptr=lse,
        shift_ptr=None,
        WANT_LSE=want_lse,
        HAS_SHIFT=False,
        **skip_arguments(None, 1.0, 1.0, y.shape),
        **attention_arguments(a, operands, tile),
        **(register_limit(a, tile) if pv == "fp8" else {}),
    )
    return y, lse


def exact_with_lse(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sm_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Exact attention of [B, H, N, D] by torch's own kernels, and its logsumexp fp32 [B, H, N]."""
    aten = torch.ops.aten
    wide = q.dtype == torch.float32
    if not wide and q.shape[-1] % 8 == 0 and torch.version.hip is None:
        if torch.cuda.get_device_capability(q.device) >= (9, 0) and q.shape[-1] <= 128:
            q, k, v = (x.contiguous() for x in (q, k, v))  # others are computed wrong
            out, lse = aten._scaled_dot_product_cudnn_attention(
                q, k, v, None, True, 0.0, False, False, scale=sm_scale
            )[:2]
            return out, lse.view(*q.shape[:3])
        out, lse = aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, False, False, scale=sm_scale
        )[:2]
        return out, lse
    out, lse = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, scale=sm_scale)[
        :2
    ]
    return out, lse[..., : q.shape[2]]
