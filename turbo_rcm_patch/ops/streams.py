"""Several residual streams around one branch: text and video tokens that share an attention and a
feed-forward, and have their own modulation, gates and residuals.

On the way in the streams become one sequence, on the way out its rows go back to them. Both
happen inside the pass that is needed anyway, so that joining and splitting cost no memory traffic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor

from turbo_rcm_patch.config import Impl
from turbo_rcm_patch.errors import DTypeError, ShapeError
from turbo_rcm_patch.ops import batches
from turbo_rcm_patch.ops.checks import (
    broadcasts,
    check_eps,
    check_float,
    check_impl,
    check_out_dtype,
    check_residual,
    check_same_device,
    check_tensor,
    check_weight,
    one_for_form,
)
from turbo_rcm_patch.ops.dispatch import resolve_impl
from turbo_rcm_patch.ops.elementwise import norm_gradients, norm_in_plain_torch
from turbo_rcm_patch.ops.modes import as_documented, transformed
from turbo_rcm_patch.ops.operation import Operation
from turbo_rcm_patch.ops.projection import check_cast, closed, project_gradients
from turbo_rcm_patch.ops.reference import close_skip, project
from turbo_rcm_patch.skip import Cast


def _lengths(streams: Sequence[Tensor]) -> list[int]:
    return [stream.shape[1] for stream in streams]


def _check_streams(name: str, streams: Sequence[Tensor]) -> None:
    _check_sequence(name, streams)
    if not streams:
        raise ShapeError(name, expected="at least one stream", got="none")
    first = streams[0]
    for index, stream in enumerate(streams):
        check_float(f"{name}[{index}]", stream)
        if stream.dim() != 3 or (stream.shape[0], stream.shape[-1]) != (
            first.shape[0],
            first.shape[-1],
        ):
            raise ShapeError(
                f"{name}[{index}]",
                expected="[batch, tokens, channels] with the batch and channels of the others",
                got=str(list(stream.shape)),
            )
        if stream.device != first.device:
            raise ShapeError(
                f"{name}[{index}]", expected=f"on {first.device}", got=f"on {stream.device}"
            )
        if stream.dtype != first.dtype:
            raise DTypeError(
                f"{name}[{index}]", expected=f"that of the others, {first.dtype}",
                got=str(stream.dtype),
            )  # fmt: skip


def _check_sequence(name: str, value: object) -> None:
    if not isinstance(value, Sequence):
        raise DTypeError(name, expected="a list of tensors", got=type(value).__name__)


def _check_coefficients(
    name: str, coefficients: Sequence[Tensor], streams: Sequence[Tensor]
) -> list[Tensor]:
    """Each [B, 1, C] or [B, N, C] of its stream, leading dimensions added."""
    _check_sequence(name, coefficients)
    if len(coefficients) != len(streams):
        raise ShapeError(
            name, expected=f"one per stream, {len(streams)}", got=str(len(coefficients))
        )
    views = []
    for index, (value, stream) in enumerate(zip(coefficients, streams, strict=True)):
        check_tensor(f"{name}[{index}]", value)
        view = value.view((1,) * (3 - value.dim()) + tuple(value.shape))
        if not broadcasts(view.shape, stream.shape):
            raise ShapeError(
                f"{name}[{index}]",
                expected=f"broadcasts to {list(stream.shape)}",
                got=str(list(value.shape)),
            )
        if value.device != stream.device:
            raise ShapeError(
                f"{name}[{index}]", expected=f"on {stream.device}", got=f"on {value.device}"
            )
        if not value.dtype.is_floating_point:
            raise DTypeError(f"{name}[{index}]", expected="a float dtype", got=str(value.dtype))
        views.append(view)
    return views


# --- layer norm and modulation -------------------------------------------------------------------


@as_documented
def _norm_streams(
    streams: list[Tensor],
    factors: list[Tensor],
    offsets: list[Tensor],
    one: float,
    eps: float,
    impl: str,
    out_dtype: torch.dtype,
) -> Tensor:
    first = streams[0]
    if resolve_impl(cast("Impl", impl), first.device) != "triton":
        parts = [
            norm_in_plain_torch(x, factor, offset, one, eps, out_dtype)
            for x, factor, offset in zip(streams, factors, offsets, strict=True)
        ]
        return torch.cat(parts, dim=1)
    if len(streams) == 2:
        (x, y), (f, g), (h, o) = streams, factors, offsets
        return norm_both(x, y, f, g, h, o, None, None, one, eps, impl, out_dtype)
    from turbo_rcm_patch.kernels.portable.norm import norm_modulate as launch

    shape = (first.shape[0], sum(_lengths(streams)), first.shape[-1])
    together = first.new_empty(shape, dtype=out_dtype)
    rows = torch.split(together, _lengths(streams), dim=1)
    for x, factor, offset, out in zip(streams, factors, offsets, rows, strict=True):
        if x.shape[1]:
            launch(x, factor, offset, one=one, eps=eps, out_dtype=out_dtype, out=out)
    return together


norm_streams = Operation("turbo_rcm_patch::norm_modulate_streams", _norm_streams)


@norm_streams.register_fake
def _norm_fake(streams: list[Tensor], *args: Any) -> Tensor:
    first = streams[0]
    shape = (first.shape[0], sum(_lengths(streams)), first.shape[-1])
    return first.new_empty(shape, dtype=args[-1])


def _norm_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    streams, factors, offsets, one, eps, *_ = inputs
    ctx.save_for_backward(*streams, *factors)
    ctx.numbers = one, eps
    ctx.offsets = [(offset.shape, offset.dtype) for offset in offsets]


def _norm_autograd(ctx: Any, d_out: Tensor) -> tuple[Any, ...]:
    count = len(ctx.offsets)
    saved = ctx.saved_tensors  # Once: checkpointing recomputes them when they are asked for.
    streams, factors = saved[:count], saved[count:]
    one, eps = ctx.numbers
    grads = [
        norm_gradients(g, x, factor, offset, one, eps, needs)
        for g, x, factor, offset, *needs in zip(
            torch.split(d_out, _lengths(streams), dim=1),
            streams,
            factors,
            ctx.offsets,
            *ctx.needs_input_grad[:3],
            strict=True,
        )
    ]
    return (*map(list, zip(*grads, strict=True)), None, None, None, None)


norm_streams.register_autograd(_norm_autograd, setup_context=_norm_setup)


def norm_modulate_streams(
    streams: Sequence[Tensor],
    *,
    scale: Sequence[Tensor],
    shift: Sequence[Tensor],
    form: Literal["modulation", "affine"] = "modulation",
    eps: float = 1e-6,
    impl: Impl = "auto",
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute `norm_modulate` of each stream with its own scale and shift, as one sequence.

    Args:
        streams: [B, Ni, C] each, bf16, fp16 or fp32, in the order of the sequence.
        scale: One per stream, broadcasts to [B, Ni, C], any float dtype, read as fp32.
        shift: Likewise.
        form: As in `norm_modulate`.
        eps: Added to the variance.
        impl: "triton", "reference" or "auto".
        out_dtype: dtype of the result; that of the streams by default.

    Returns:
        [B, N1 + N2 + ..., C], contiguous.

    Raises:
        ShapeError: The streams do not share batch and channels, or a scale or shift does not
            broadcast to its stream.
        DTypeError: The streams differ in dtype, or a tensor does not have a float dtype.
    """
    check_impl(impl)
    check_eps(eps)
    check_out_dtype(out_dtype)
    _check_streams("streams", streams)
    factors = _check_coefficients("scale", scale, streams)
    offsets = _check_coefficients("shift", shift, streams)
    one = one_for_form(form)
    batch = streams[0].shape[0]
    if batch > batches.MAX_BATCH:
        each = (list(streams), factors, offsets)

        def run(part: slice) -> Tensor:
            streams, scale, shift = batches.of_batch(each, part, batch)
            return norm_modulate_streams(
                streams, scale=scale, shift=shift, form=form, eps=eps, impl=impl,
                out_dtype=out_dtype,
            )  # fmt: skip

        return batches.in_parts(batch, run)
    dtype = streams[0].dtype if out_dtype is None else out_dtype
    if transformed():
        return _norm_streams(list(streams), factors, offsets, one, eps, "reference", dtype)
    out: Tensor = norm_streams(list(streams), factors, offsets, one, eps, impl, dtype)
    return out


# --- two streams in one pass, for plans (`Step`): nothing is checked -----------------------------


def norm_both(
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
    """(layer_norm(stream) * weight + bias) * (one + scale) + shift of two streams as one sequence,
    in fp32, rounded once.

    Args:
        first: [B, N1, C], bf16, fp16 or fp32.
        second: [B, N2, C], the same dtype.
        first_scale: Broadcasts to its stream, any float dtype, read as fp32.
        second_scale: Likewise.
        first_shift: Likewise.
        second_shift: Likewise.
        weight: Of the layer norm, [C] or None for 1.
        bias: Likewise, None for 0.
        one: 1.0 for a modulation, 0.0 for factors.
        eps: Of the norm.
        impl: "triton", "reference" or "auto".
        out_dtype: Of the result.

    Returns:
        [B, N1 + N2, C].
    """
    streams, scale = (first, second), (first_scale, second_scale)
    shift = first_shift, second_shift
    if resolve_impl(cast("Impl", impl), first.device) == "triton":
        from turbo_rcm_patch.kernels.portable.streams import streams as launch

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
    """The factor and the offset, in fp32, that modulation and weights of the layer norm under it
    come to."""
    factor, offset = one + scale.float(), shift.float()
    if bias is not None:
        offset = torch.addcmul(offset, factor, bias)
    return (factor if weight is None else factor * weight), offset


def skip_both(
    branch: Tensor,
    first: Tensor,
    second: Tensor,
    first_gate: Tensor,
    second_gate: Tensor,
    cast_policy: Cast,
    impl: Impl,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """`skip` of two streams over their rows of a branch [B, N1 + N2, C].

    Args:
        branch: bf16, fp16 or fp32.
        first: [B, N1, C].
        second: [B, N2, C], the same dtype.
        first_gate: Broadcasts to its stream.
        second_gate: Likewise.
        cast_policy: As in `skip`.
        impl: "triton", "reference" or "auto".
        out_dtype: Of the sums.
    """
    if resolve_impl(impl, branch.device) == "triton":
        from turbo_rcm_patch.kernels.portable.streams import streams as launch

        left, right, _ = launch(
            (first, second), branch, (first_gate, second_gate), None, None, None, None,
            cast=cast_policy, one=0.0, eps=0.0, out_dtype=out_dtype, normed_dtype=out_dtype,
        )  # fmt: skip
        assert left is not None and right is not None
        return left, right
    left, right = (
        closed(x, y, 1.0, gate, cast=cast_policy, impl=impl, out_dtype=out_dtype)
        for x, y, gate in zip(
            (first, second),
            torch.split(branch, [first.shape[1], second.shape[1]], dim=1),
            (first_gate, second_gate),
            strict=True,
        )
    )
    return left, right


def skip_norm_both(
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
    cast_policy: Cast,
    impl: Impl,
    out_dtype: torch.dtype,
    normed_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """What `skip_both` and then `norm_both` of its results give, bit for bit; their arguments."""
    if resolve_impl(impl, branch.device) == "triton":
        from turbo_rcm_patch.kernels.portable.streams import streams as launch

        left, right, normed = launch(
            (first, second), branch, (first_gate, second_gate), (first_scale, second_scale),
            (first_shift, second_shift), weight, bias,
            cast=cast_policy, one=one, eps=eps, out_dtype=out_dtype, normed_dtype=normed_dtype,
        )  # fmt: skip
        assert left is not None and right is not None and normed is not None
        return left, right, normed
    left, right = skip_both(
        branch, first, second, first_gate, second_gate, cast_policy, impl, out_dtype
    )
    normed = norm_both(
        left, right, first_scale, second_scale, first_shift, second_shift, weight, bias, one, eps,
        impl, normed_dtype,
    )  # fmt: skip
    return left, right, normed


# --- projection and skip -------------------------------------------------------------------------


@as_documented
def _project_streams(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residuals: list[Tensor],
    c_out: list[Tensor],
    cast_policy: str,
    impl: str,
    out_dtype: torch.dtype,
) -> list[Tensor]:
    policy = cast("Cast", cast_policy)
    if resolve_impl(cast("Impl", impl), x.device) == "triton":
        from turbo_rcm_patch.kernels.portable.project import project_skip_streams as launch

        return launch(x, weight, bias, residuals, c_out, cast=policy, out_dtype=out_dtype)
    branch = torch.split(project(x, weight, bias), _lengths(residuals), dim=1)
    return [
        close_skip(r, part, 1.0, c, cast=policy, out_dtype=out_dtype).contiguous()
        for r, part, c in zip(residuals, branch, c_out, strict=True)
    ]


project_streams = Operation("turbo_rcm_patch::project_skip_streams", _project_streams)


@project_streams.register_fake
def _project_fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, residuals: list[Tensor], *args: Any
) -> list[Tensor]:
    return [torch.empty(r.shape, dtype=args[-1], device=r.device) for r in residuals]


def _project_setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, weight, bias, residuals, c_out, *_ = inputs
    ctx.save_for_backward(x, weight, bias, *residuals, *c_out)


def _project_autograd(ctx: Any, d_outs: list[Tensor]) -> tuple[Any, ...]:
    x, weight, bias, *rest = ctx.saved_tensors
    residuals, c_out = rest[: len(rest) // 2], rest[len(rest) // 2 :]
    needs_x, needs_weight, needs_bias, needs_residual, needs_c_out = ctx.needs_input_grad[:5]
    grads = [
        project_gradients(
            d_out, rows, weight, bias, residual, None, gate, 1.0, 1.0,
            (needs_x, needs_weight, needs_bias, needs_r, False, needs_c),
        )
        for d_out, rows, residual, gate, needs_r, needs_c in zip(
            d_outs, torch.split(x, _lengths(residuals), dim=1), residuals, c_out,
            needs_residual, needs_c_out, strict=True,
        )
    ]  # fmt: skip
    d_x, d_weight, d_bias, d_residual, _, d_c_out = zip(*grads, strict=True)
    return (
        torch.cat(d_x, dim=1) if needs_x else None,
        sum(d_weight) if needs_weight else None,
        sum(d_bias) if needs_bias else None,
        list(d_residual),
        list(d_c_out),
        None,
        None,
        None,
    )


project_streams.register_autograd(_project_autograd, setup_context=_project_setup)


def project_skip_streams(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    residuals: Sequence[Tensor],
    c_out: Sequence[Tensor],
    cast: Cast = "fp32",
    impl: Impl = "auto",
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, ...]:
    """Compute residual + c_out * (rows of x @ weight^T + bias) for each residual stream.

    Args:
        x: [B, N1 + N2 + ..., Cin], bf16, fp16 or fp32; its rows in the order of the residuals.
        weight: [Cout, Cin], dtype of x.
        bias: [Cout] or None.
        residuals: [B, Ni, Cout] each.
        c_out: One per residual, [B, 1, Cout] or [B, Ni, Cout], any float dtype.
        cast: As in `project_skip`.
        impl: "triton", "reference" or "auto".
        out_dtype: dtype of the results; that of the residuals by default.

    Returns:
        One [B, Ni, Cout] per residual, contiguous.

    Raises:
        ShapeError: The residuals' rows do not add up to those of x, or shapes do not fit.
        DTypeError: A tensor does not have a float dtype, or the weight not that of x.
        ConfigError: The cast is unknown.
    """
    check_cast(cast)
    check_impl(impl)
    check_out_dtype(out_dtype)
    check_weight(x, weight, bias)
    _check_streams("residuals", residuals)
    check_same_device(x.device, residuals=residuals[0])
    for index, residual in enumerate(residuals):
        shape = (x.shape[0], residual.shape[1], weight.shape[0])
        check_residual(f"residuals[{index}]", residual, shape)
    if sum(_lengths(residuals)) != x.shape[1]:
        raise ShapeError(
            "residuals",
            expected=f"{x.shape[1]} rows in all, those of x",
            got=" + ".join(map(str, _lengths(residuals))),
        )
    gates = _check_coefficients("c_out", c_out, residuals)
    batch = x.shape[0]
    if batch > batches.MAX_BATCH:
        each = (x, list(residuals), gates)

        def run(part: slice) -> tuple[Tensor, ...]:
            x, residuals, c_out = batches.of_batch(each, part, batch)
            return project_skip_streams(
                x, weight, bias, residuals=residuals, c_out=c_out, cast=cast, impl=impl,
                out_dtype=out_dtype,
            )  # fmt: skip

        return batches.in_parts(batch, run)
    dtype = residuals[0].dtype if out_dtype is None else out_dtype
    given = (x, weight, bias, list(residuals), gates, cast)
    if transformed():
        return tuple(_project_streams(*given, "reference", dtype))
    return tuple(project_streams(*given, impl, dtype))
