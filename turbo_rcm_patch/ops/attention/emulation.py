"""int8 attention in plain torch, computed as the kernels do: the CPU path, and the reference to
which kernels are compared with tight tolerances.

Numeric contract, which the kernels follow too:

1. q and k are normalised and rotated in fp32. From k its mean over at most `MEAN_SAMPLES` evenly
   spaced tokens is subtracted.
2. Channels of q and k are mixed by a Hadamard matrix (`hadamard`), which does not change q k^T and
   spreads the outliers of single channels. q is quantised with one scale per row and k with one
   scale per `scale_block` tokens, symmetric, round half to even.
3. Logits are exact integers times the two scales. The online softmax runs over blocks of
   `scale_block` keys.
4. P is rounded against the *running* maximum of its block, to e4m3 (scaled so that its maximum is
   448), fp16 or bf16, and the row sum adds the rounded P. v is 16-bit, or e4m3: less its mean over
   at most `MEAN_SAMPLES` evenly spaced tokens, with one scale per channel.
5. The weights of a row sum to one. So two terms that e4m3 v lacks are added back to every row:
   the mean of v, and the mean of the rounding errors over all tokens, summed as integers.
"""

from __future__ import annotations

from typing import Final, Literal

import torch

from turbo_rcm_patch.ops.attention.reference import key_mask, unseen_keys
from turbo_rcm_patch.ops.formats import (
    E4M3_MAX,
    ERROR_STEPS,
    LARGEST_CENTRED,
    LEAST_V,
    LN_2,
    LOG2_E,
    MEAN_ROWS,
    MEAN_SAMPLES,
    P_MAX_LOG2,
    PV_DTYPES,
    TINY,
    hadamard_width,
    scale_block,
)

#: Least scale of logits. With it a masked -inf times the scale does not become NaN.
LEAST_SCALE: Final = 2.0**-126

_ROWS: Final = 256  # query rows at a time: their logits stay in cache at short lengths


def sample_mean(k: torch.Tensor, kv_lengths: torch.Tensor | None) -> torch.Tensor:
    """Compute the mean of k [B, H, Nk, D] over evenly spaced visible tokens: fp32 [B, H, 1, D]."""
    step = max(1, -(-k.shape[2] // MEAN_SAMPLES))
    sample = k[:, :, ::step]
    if kv_lengths is None:
        return sample.mean(2, keepdim=True)
    positions = torch.arange(0, k.shape[2], step, device=k.device)
    seen = (positions < kv_lengths.unsqueeze(1)).view(k.shape[0], 1, -1, 1)
    count = seen.sum(2, keepdim=True).clamp_min(1)
    return sample.masked_fill(~seen, 0.0).sum(2, keepdim=True) / count


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """Multiply every `hadamard_width(D)` channels of x [..., D] fp32 by a Hadamard matrix.

    D is padded with zeros to a multiple of that width. The matrix is not normalised: the product
    of two results is `hadamard_width` times the product of their vectors.
    """
    width = hadamard_width(x.shape[-1])
    x = torch.nn.functional.pad(x, (0, -x.shape[-1] % width))
    half = 1
    while half < width:
        first, second = x.view(*x.shape[:-1], -1, 2, half).unbind(-2)
        x = torch.stack((first + second, first - second), -2).flatten(-3)
        half *= 2
    return x


def quantized(x: torch.Tensor, amax: torch.Tensor, qmax: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise values whose largest magnitude is `amax`, which broadcasts to x.

    Returns:
        Integers, held in fp32, and the scale.
    """
    amax = torch.where(amax > TINY, amax, torch.ones_like(amax))
    return (x * (qmax / amax)).round_(), amax / qmax


def quantized_q_and_k(
    q: torch.Tensor, k: torch.Tensor, qmax: int, sm_scale: float
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Mix and quantise q [B, H, Nq, D] and k [B, H, Nk, D], whole blocks of keys.

    Returns:
        q as integers [B, H, Nq, D] and its scale [B, H, Nq, 1], which includes the factor on the
        logits; k as integers and its scale [B, H, blocks].
    """
    factor, block = sm_scale * LOG2_E / hadamard_width(q.shape[-1]), scale_block(q.shape[-1])
    q, k = hadamard(q), hadamard(k)
    q_int, q_scale = quantized(q, q.abs().amax(-1, keepdim=True), qmax)
    blocks = k.view(*k.shape[:2], -1, block, k.shape[3])
    k_int, k_scale = quantized(blocks, blocks.abs().amax((-1, -2), keepdim=True), qmax)
    return (q_int, q_scale * factor), (k_int.flatten(2, 3), k_scale.flatten(2))


def sample_sum_of_v(sample: torch.Tensor) -> torch.Tensor:
    """Sum v [B, H, N, D] fp32 over its tokens: [B, H, D].

    The order is that of every kernel: 32 partial sums over every 32nd token, then these pairwise.
    """
    rows_of_zeros = -sample.shape[2] % MEAN_ROWS or MEAN_ROWS * (not sample.shape[2])
    padded = torch.nn.functional.pad(sample, (0, 0, 0, rows_of_zeros))
    total = torch.zeros_like(padded[:, :, :MEAN_ROWS])
    for rows in padded.reshape(*padded.shape[:2], -1, MEAN_ROWS, padded.shape[3]).unbind(2):
        total = total + rows
    while total.shape[2] > 1:
        first, second = total.chunk(2, 2)
        total = first + second
    return total.squeeze(2)


def value_levels(mean: torch.Tensor, amax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the mean to subtract from v, and bound the magnitudes of the difference.

    Args:
        mean: Mean of a sample of v, [B, H, D] fp32.
        amax: Largest magnitudes of v, [B, H, D] fp32.

    Returns:
        The mean that is subtracted and the bound, [B, H, D] fp32 each.
    """
    mean = torch.where(amax < LARGEST_CENTRED, mean, torch.zeros_like(mean))
    return mean, (amax + mean.abs()).clamp_min(LEAST_V)


def scaled_v(v: torch.Tensor, mean: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """Compute v [B, H, N, D] fp32 in units of its scale, unrounded; see `value_levels`."""
    # torch computes a number over a tensor as a product with the inverse, which rounds twice.
    factor = torch.full_like(amax, E4M3_MAX) / amax
    return (v - mean.unsqueeze(2)) * factor.unsqueeze(2)


def value_errors(exact: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
    """Sum the rounding errors of v in e4m3 over its tokens, as integers in fp32 [B, H, D].

    Args:
        exact: v in units of its scale before the rounding, [B, H, N, D].
        rounded: v after the rounding, [B, H, N, D].
    """
    errors = ((exact - rounded) * ERROR_STEPS).round().nan_to_num(0.0)
    return errors.sum(2, dtype=torch.float64).float()


def rounded_v(
    v: torch.Tensor,
    pv: Literal["fp8", "bf16", "fp16"],
    kv_lengths: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Round v [B, H, Nk, D] as the second product reads it, in fp32, with 0 for masked tokens.

    For e4m3, also return scale and offset [B, H, 1, D], else None: for weights that sum to one the
    output is (weights · rounded v) * scale + offset.
    """
    if kv_lengths is not None:
        unseen = unseen_keys(v.shape[2], kv_lengths)
        v = v.masked_fill(unseen, 0.0)
    if pv != "fp8":
        return v.to(PV_DTYPES[pv]).float(), None, None
    v = v.float()
    step = max(1, -(-v.shape[2] // MEAN_SAMPLES))
    count = torch.tensor(v.shape[2], dtype=torch.float32, device=v.device).expand(v.shape[0])
    if kv_lengths is not None:
        count = kv_lengths.clamp(0, v.shape[2]).float()
    sampled = (count / step).ceil().clamp_min(1).view(-1, 1, 1)
    mean, amax = value_levels(sample_sum_of_v(v[:, :, ::step]) / sampled, v.abs().amax(2))
    exact = scaled_v(v, mean, amax)
    if kv_lengths is not None:
        exact = exact.masked_fill(unseen, 0.0)
    rounded = exact.to(torch.float8_e4m3fn).float()
    scale = amax / E4M3_MAX
    errors = value_errors(exact, rounded)
    offset = mean + errors * (scale / (count.clamp_min(1).view(-1, 1, 1) * ERROR_STEPS))
    return rounded, scale.unsqueeze(2), offset.unsqueeze(2)


def emulated_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    sm_scale: float,
    pv: Literal["fp8", "bf16", "fp16"],
    qmax: int,
    smooth_k: bool,
    causal: bool = False,
    kv_lengths: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute softmax(sm_scale * q k^T) v with quantised q, k, P and v.

    Args:
        q: [B, H, Nq, D] fp32, normalised and rotated.
        k: [B, H, Nk, D] fp32, normalised and rotated.
        v: [B, H, Nk, D], any float dtype.
        sm_scale: Factor on the logits.
        pv: Element type of P and v.
        qmax: 127 for int8, 7 for int4.
        smooth_k: Subtract k's mean first.
        causal: Query i sees keys 0..i.
        kv_lengths: int [B]; keys at or past the length are masked.

    Returns:
        Output [B, Nq, H*D] fp32, and the logsumexp [B, H, Nq] fp32 of the *unsmoothed* logits (of
        the quantised q and k plus q · mean).
    """
    batch, heads, n_q, dim = q.shape
    n_kv = k.shape[2]
    block = scale_block(dim)
    blocks = -(-n_kv // block)
    mean = sample_mean(k, kv_lengths) if smooth_k else None
    if mean is not None:
        k = k - mean
    v, v_scale, v_offset = rounded_v(v, pv, kv_lengths)
    if kv_lengths is not None:
        k = k.masked_fill(unseen_keys(n_kv, kv_lengths), 0.0)
    if blocks * block != n_kv:
        pad = (0, 0, 0, blocks * block - n_kv)
        k, v = torch.nn.functional.pad(k, pad), torch.nn.functional.pad(v, pad)

    (q_int, q_scale), (k_int, k_scale) = quantized_q_and_k(q, k, qmax, sm_scale)

    mask = key_mask(n_q, n_kv, causal=causal, kv_lengths=kv_lengths, device=q.device)
    if mask is None and blocks * block != n_kv:
        mask = torch.ones(n_kv, dtype=torch.bool, device=q.device)[None, None, None]
    if mask is not None:
        mask = ~torch.nn.functional.pad(mask, (0, blocks * block - n_kv))

    out = torch.empty(batch, n_q, heads, dim, dtype=torch.float32, device=q.device)
    lse = torch.empty(batch, heads, n_q, dtype=torch.float32, device=q.device)
    buffer = torch.empty(min(_ROWS, n_q), blocks * block, dtype=torch.float32, device=q.device)
    for b in range(batch):
        for h in range(heads):
            k_t = k_int[b, h].T
            for start in range(0, n_q, _ROWS):
                rows = slice(start, min(start + _ROWS, n_q))
                logits = torch.matmul(q_int[b, h, rows], k_t, out=buffer[: rows.stop - rows.start])
                if mask is not None:
                    seen = mask[b % mask.shape[0], 0]
                    logits.masked_fill_(seen if seen.shape[0] == 1 else seen[rows], float("-inf"))
                out[b, rows, h], lse[b, h, rows] = softmax_pv(
                    logits.view(-1, blocks, block),
                    q_scale[b, h, rows] * k_scale[b, h],
                    v[b, h],
                    pv,
                )
    if v_scale is not None and v_offset is not None:
        out = out * v_scale.transpose(1, 2) + v_offset.transpose(1, 2)
    if mean is not None:
        lse += (q * mean).sum(-1) * sm_scale
    return out.flatten(2), lse


def softmax_pv(
    logits: torch.Tensor, scale: torch.Tensor, v: torch.Tensor, pv: Literal["fp8", "bf16", "fp16"]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute online softmax and second product for some rows of one head.

    Args:
        logits: [R, blocks, block] fp32 integers, -inf where masked; overwritten.
        scale: [R, blocks] fp32, >= 0; converts logits to log2 units.
        v: [blocks * block, D] fp32, rounded.
        pv: Element type of P.

    Returns:
        Output [R, D] and natural-log logsumexp [R].
    """
    shift = P_MAX_LOG2[pv]
    scale = scale.clamp_min(LEAST_SCALE)
    running = (logits.amax(-1) * scale).cummax(1).values
    finite = running.masked_fill(running == float("-inf"), 0.0)
    p = torch.addcmul((shift - finite).unsqueeze(-1), logits, scale.unsqueeze(-1), out=logits)
    p = p.exp2_()
    if pv == "fp8":  # The casts of kernels saturate; that of torch 2.11 makes NaN of more.
        p.clamp_(max=E4M3_MAX)
    p = p.to(PV_DTYPES[pv]).float()
    final = finite[:, -1:]
    p *= torch.exp2(running - final).unsqueeze(-1)
    total = p.sum((1, 2))
    # Rows that see no key have the sum 0. Their output is 0 and their logsumexp -inf.
    out = (p.flatten(1) @ v) / torch.where(total > 0, total, torch.ones_like(total)).unsqueeze(-1)
    return out, (final.squeeze(1) - shift + total.log2()) * LN_2
