"""The residual operator in plain torch: the oracle of the kernels, and the path of a CPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from turbo_rcm_patch.ops.formats import Streams, padded_channels
from turbo_rcm_patch.ops.int8_linear.api import quantized_rows


def close_skip(
    residual: Tensor | None,
    branch: Tensor,
    c_skip: float | Tensor,
    c_out: float | Tensor,
    *,
    out_dtype: torch.dtype,
) -> Tensor:
    """Compute c_skip * residual + c_out * branch; see `api.close_skip`."""
    c_skip, c_out = (c.float() if isinstance(c, Tensor) else c for c in (c_skip, c_out))
    y = branch.float() * c_out
    if residual is not None:
        y = residual.float() * c_skip + y
    return y.to(out_dtype)


def layer_norm(
    x: Tensor, factor: Tensor | None, offset: Tensor | None, one: float, eps: float
) -> Tensor:
    """Compute layer_norm(x) * (one + factor) + offset in fp32."""
    row = (1, 1, x.shape[-1])
    whole = factor is not None and offset is not None and factor.shape == offset.shape == row
    if one == 0.0 and whole:  # weight and bias: the bits of torch's layer norm
        assert factor is not None and offset is not None
        weight, bias = factor.flatten().float(), offset.flatten().float()
        return F.layer_norm(x.float(), row[2:], weight, bias, eps)
    y = F.layer_norm(x.float(), row[2:], eps=eps)
    if factor is not None:
        y = y * (one + factor.float())
    return y if offset is None else y + offset.float()


def skip_norm(
    x: Streams,
    branch: Tensor | None,
    *,
    gate: Streams | None,
    factor: Streams | None,
    offset: Streams | None,
    weight: Tensor | None,
    bias: Tensor | None,
    one: float,
    eps: float,
    dtype: torch.dtype,
    norm_dtype: torch.dtype | None,
) -> tuple[Tensor, ...]:
    """Compute y = x + gate * branch, and (layer_norm(y) * weight + bias) * (one + factor) +
    offset.

    Args:
        x: [B, N, C], or a pair of streams [B, Ni, C].
        branch: [B, N, C], a pair's rows one after the other; None for y = x.
        gate: Broadcasts to x, a tensor for each stream; None for 1.
        factor: Broadcasts to x, a tensor for each stream, or None.
        offset: Broadcasts to x, a tensor for each stream, or None.
        weight: [C], of a pair with factor and offset; None for 1.
        bias: [C], of a pair with factor and offset; None for 0.
        one: Added to the factor.
        eps: Epsilon of the norm.
        dtype: dtype of the sums.
        norm_dtype: dtype of the norm, torch.int8 for int8 rows, None for no norm.

    Returns:
        Those that there are of: the sum of each stream, the norm [B, N, C] or its int8 rows, and
        the scales of these.
    """
    streams = _each(x)
    sums: tuple[Tensor, ...] = ()
    if branch is not None:
        parts = torch.split(branch, [part.shape[1] for part in streams], dim=1)
        gates: tuple[float | Tensor, ...] = _each(gate) or (1.0,) * len(streams)
        streams = sums = tuple(
            close_skip(part, out, 1.0, c, out_dtype=dtype).contiguous()
            for part, out, c in zip(streams, parts, gates, strict=True)
        )
    if norm_dtype is None:
        return sums
    results = []
    for i, stream in enumerate(streams):
        scale, shift, base = factor, offset, one
        if isinstance(factor, tuple) and isinstance(offset, tuple):
            scale, shift = one + factor[i].float(), offset[i].float()
            shift = shift if bias is None else torch.addcmul(shift, scale, bias)
            scale, base = (scale if weight is None else scale * weight), 0.0
        assert not isinstance(scale, tuple) and not isinstance(shift, tuple)
        results.append(layer_norm(stream, scale, shift, base, eps))
    normed = results[0] if len(results) == 1 else torch.cat(results, dim=1)
    if norm_dtype != torch.int8:
        return *sums, normed.to(norm_dtype).contiguous()
    int8, scales = quantized_rows(normed)
    return *sums, F.pad(int8, (0, padded_channels(int8.shape[2]) - int8.shape[2])), scales


def _each(values: Streams | None) -> tuple[Tensor, ...]:
    return () if values is None else values if isinstance(values, tuple) else (values,)
