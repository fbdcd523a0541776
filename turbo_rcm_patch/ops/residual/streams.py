"""Norms and skips of two residual streams around one branch: text and video tokens share an
attention and a feed-forward, and have their own modulation, gates and residuals.

The norm joins the streams to one sequence, and the skip splits the branch again. Both happen
inside a pass that is needed anyway, so they cost no memory traffic. These operations are for
patched blocks and do not check their arguments.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from turbo_rcm_patch.ops.dispatch import resolve_impl
from turbo_rcm_patch.ops.register import Operation
from turbo_rcm_patch.ops.residual.norm import norm_in_plain_torch
from turbo_rcm_patch.ops.residual.skip import closed


def _norm(
    first: Tensor,
    second: Tensor,
    first_scale: Tensor,
    second_scale: Tensor,
    first_shift: Tensor,
    second_shift: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    one: float,
    eps: float,
    impl: str,
    out_dtype: torch.dtype,
) -> Tensor:
    """Compute the modulated layer norm of two streams as one sequence, in fp32, rounded once.

    It is (layer_norm(stream) * weight + bias) * (one + scale) + shift.

    Args:
        first: [B, N1, C], bf16, fp16 or fp32.
        second: [B, N2, C], the same dtype.
        first_scale: Broadcasts to the first stream, any float dtype, read as fp32.
        second_scale: Broadcasts to the second stream, any float dtype, read as fp32.
        first_shift: Broadcasts to the first stream, any float dtype, read as fp32.
        second_shift: Broadcasts to the second stream, any float dtype, read as fp32.
        weight: Weight of the layer norm, [C], or None for 1.
        bias: Bias of the layer norm, [C], or None for 0.
        one: Added to the scale: 1.0 for a modulation, 0.0 for factors.
        eps: Epsilon of the norm.
        impl: "triton", "reference" or "auto".
        out_dtype: dtype of the result.

    Returns:
        [B, N1 + N2, C].
    """
    streams, scale = (first, second), (first_scale, second_scale)
    shift = first_shift, second_shift
    if resolve_impl(impl, first.device) == "triton":
        from turbo_rcm_patch.ops.residual.streams_triton import streams as launch

        made = launch(
            streams, None, None, scale, shift, weight, bias,
            cast="fp32", one=one, eps=eps, out_dtype=first.dtype, normed_dtype=out_dtype,
        )[2]  # fmt: skip
        assert made is not None
        return made
    parts = [
        norm_in_plain_torch(x, *folded(own, off, weight, bias, one), 0.0, eps, out_dtype)
        for x, own, off in zip(streams, scale, shift, strict=True)
    ]
    return torch.cat(parts, dim=1)


def folded(
    scale: Tensor, shift: Tensor, weight: Tensor | None, bias: Tensor | None, one: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Combine a modulation with weight and bias of its layer norm to one factor and one offset.

    Returns:
        Factor and offset, fp32.
    """
    factor, offset = one + scale.float(), shift.float()
    if bias is not None:
        offset = torch.addcmul(offset, factor, bias)
    return (factor if weight is None else factor * weight), offset


def _skip(
    branch: Tensor,
    first: Tensor,
    second: Tensor,
    first_gate: Tensor,
    second_gate: Tensor,
    cast_policy: str,
    impl: str,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Close the skips of two streams over their rows of one branch.

    Args:
        branch: [B, N1 + N2, C], bf16, fp16 or fp32.
        first: [B, N1, C].
        second: [B, N2, C], the same dtype.
        first_gate: Broadcasts to the first stream.
        second_gate: Broadcasts to the second stream.
        cast_policy: Cast policy of the skips, "fp32" or "model".
        impl: "triton", "reference" or "auto".
        out_dtype: dtype of the sums.

    Returns:
        The sums, [B, N1, C] and [B, N2, C].
    """
    if resolve_impl(impl, branch.device) == "triton":
        from turbo_rcm_patch.ops.residual.streams_triton import streams as launch

        left, right, _ = launch(
            (first, second), branch, (first_gate, second_gate), None, None, None, None,
            cast=cast_policy, one=0.0, eps=0.0, out_dtype=out_dtype, normed_dtype=out_dtype,
        )  # fmt: skip
        assert left is not None and right is not None
        return left, right
    left, right = (
        closed(x, y, 1.0, gate, cast_policy=cast_policy, impl=impl, out_dtype=out_dtype)
        for x, y, gate in zip(
            (first, second),
            torch.split(branch, [first.shape[1], second.shape[1]], dim=1),
            (first_gate, second_gate),
            strict=True,
        )
    )
    return left, right


def _skip_norm(
    branch: Tensor,
    first: Tensor,
    second: Tensor,
    first_gate: Tensor,
    second_gate: Tensor,
    first_scale: Tensor,
    second_scale: Tensor,
    first_shift: Tensor,
    second_shift: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    one: float,
    eps: float,
    cast_policy: str,
    impl: str,
    out_dtype: torch.dtype,
    normed_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `skip_streams` and `norm_modulate_streams` of its results, with the same bits.

    The arguments are those of the two, and the results are the two sums and their norm.
    """
    if resolve_impl(impl, branch.device) == "triton":
        from turbo_rcm_patch.ops.residual.streams_triton import streams as launch

        left, right, normed = launch(
            (first, second), branch, (first_gate, second_gate), (first_scale, second_scale),
            (first_shift, second_shift), weight, bias,
            cast=cast_policy, one=one, eps=eps, out_dtype=out_dtype, normed_dtype=normed_dtype,
        )  # fmt: skip
        assert left is not None and right is not None and normed is not None
        return left, right, normed
    left, right = _skip(
        branch, first, second, first_gate, second_gate, cast_policy, impl, out_dtype
    )
    normed = _norm(
        left, right, first_scale, second_scale, first_shift, second_shift, weight, bias, one, eps,
        impl, normed_dtype,
    )  # fmt: skip
    return left, right, normed


def _norm_fake(first: Tensor, second: Tensor, *args: Any) -> Tensor:
    shape = (first.shape[0], first.shape[1] + second.shape[1], first.shape[2])
    return first.new_empty(shape, dtype=args[-1])


def _skip_fake(branch: Tensor, first: Tensor, second: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    return first.new_empty(first.shape, dtype=args[-1]), first.new_empty(
        second.shape, dtype=args[-1]
    )


def _skip_norm_fake(
    branch: Tensor, first: Tensor, second: Tensor, *args: Any
) -> tuple[Tensor, Tensor, Tensor]:
    sums = _skip_fake(branch, first, second, args[-2])
    return *sums, branch.new_empty(branch.shape, dtype=args[-1])


norm_modulate_streams = Operation("norm_modulate_streams", _norm, _norm_fake)
skip_streams = Operation("skip_streams", _skip, _skip_fake)
skip_norm_streams = Operation("skip_norm_streams", _skip_norm, _skip_norm_fake)
