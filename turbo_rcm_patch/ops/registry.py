"""The attention custom operations: schema, fake and autograd. Importing this loads neither triton
nor diffusers.

The public functions in `attention.py` check their arguments and call these with plain tensors and
numbers, which is what an operation schema can hold. Which implementation runs is decided inside,
on the real device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from turbo_rcm_patch.config import Impl, PVDType
from turbo_rcm_patch.errors import GradientError
from turbo_rcm_patch.ops.gradients import attention_gradients, norm_rope_gradients, prepare
from turbo_rcm_patch.ops.modes import as_documented, transformed
from turbo_rcm_patch.ops.operation import Operation
from turbo_rcm_patch.ops.reference import close_skip, exact_attention, sdpa_attention, split_heads
from turbo_rcm_patch.ops.sage import sage_attention
from turbo_rcm_patch.ops.spec import QMAX, resolve_impl, resolve_pv

__all__ = [
    "attention_backward",
    "attention_forward",
    "gradients_of",
    "in_one_pass",
    "rotated",
]

#: q, k, v, residual, c_skip, c_out, norm_q, norm_k and the norms' biases: the first of the schema.
_DIFFERENTIABLE = 10


@as_documented
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    residual: Tensor | None,
    c_skip: Tensor | None,
    c_out: Tensor | None,
    norm_q: Tensor | None,
    norm_k: Tensor | None,
    norm_q_bias: Tensor | None,
    norm_k_bias: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    kv_lengths: Tensor | None,
    c_skip_value: float,
    c_out_value: float,
    heads: int,
    attention: str,
    pv: str,
    smooth_k: bool,
    causal: bool,
    sm_scale: float,
    eps: float,
    impl: str,
    out_dtype: torch.dtype,
    want_lse: bool,
) -> tuple[Tensor, Tensor]:
    implementation = resolve_impl(cast(Impl, impl), q.device)
    skip_factor = c_skip_value if c_skip is None else c_skip
    out_factor = c_out_value if c_out is None else c_out
    no_lse = q.new_empty(0, dtype=torch.float32)
    if attention in QMAX and implementation == "triton":
        from turbo_rcm_patch.kernels.attention import attention as launch

        out, lse = launch(
            q,
            k,
            v,
            heads=heads,
            residual=residual,
            c_skip=skip_factor,
            c_out=out_factor,
            norm_q=norm_q,
            norm_k=norm_k,
            norm_q_bias=norm_q_bias,
            norm_k_bias=norm_k_bias,
            cos=cos,
            sin=sin,
            kv_lengths=kv_lengths,
            pv=resolve_pv(cast(PVDType, pv), q.device, k.shape[1]),
            qmax=QMAX[attention],
            smooth_k=smooth_k,
            causal=causal,
            sm_scale=sm_scale,
            eps=eps,
            out_dtype=out_dtype,
            want_lse=want_lse,
        )
        return out, no_lse if lse is None else lse

    vh = split_heads(v, heads)
    lse = None
    norms = ((q, norm_q, norm_q_bias), (k, norm_k, norm_k_bias))
    one_pass = all(in_one_pass(x, weight, bias, heads) for x, weight, bias in norms)
    if implementation == "triton" and one_pass and not want_lse:
        # q and k in their own dtype are all that exact attention takes, so one pass makes them.
        qh, kh = (
            split_heads(rotated(x, heads, weight, bias, cos, sin, eps), heads)
            for x, weight, bias in norms
        )
    else:
        qh, kh = (prepare(x, heads, weight, bias, cos, sin, eps) for x, weight, bias in norms)
    if attention in QMAX:
        from turbo_rcm_patch.ops.emulation import emulated_attention

        branch, lse = emulated_attention(
            qh,
            kh,
            vh,
            sm_scale=sm_scale,
            pv=resolve_pv(cast(PVDType, pv), q.device, k.shape[1]),
            qmax=QMAX[attention],
            smooth_k=smooth_k,
            causal=causal,
            kv_lengths=kv_lengths,
            want_lse=want_lse,
        )
    elif want_lse:
        exact, lse = exact_attention(
            qh, kh, vh.float(), sm_scale=sm_scale, causal=causal, kv_lengths=kv_lengths
        )
        branch = exact.transpose(1, 2).flatten(2)
    else:
        qh, kh = qh.to(v.dtype), kh.to(v.dtype)
        if attention == "sage":
            branch = sage_attention(
                qh, kh, vh, sm_scale=sm_scale, causal=causal, smooth_k=smooth_k
            )
        else:
            branch = sdpa_attention(
                qh, kh, vh, sm_scale=sm_scale, causal=causal, kv_lengths=kv_lengths
            )
        branch = branch.transpose(1, 2).flatten(2)
    if residual is None and c_out is None and c_out_value == 1.0:
        out = branch.to(out_dtype)
    elif implementation == "triton":
        from turbo_rcm_patch.kernels.skip import skip as launch_skip

        out = launch_skip(
            residual, branch, skip_factor, out_factor, cast="fp32", out_dtype=out_dtype
        )
    else:
        out = close_skip(
            residual, branch, skip_factor, out_factor, cast="fp32", out_dtype=out_dtype
        )
    return out.contiguous(), no_lse if lse is None else lse


def rotated(
    x: Tensor,
    heads: int,
    weight: Tensor | None,
    bias: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    eps: float,
) -> Tensor:
    """q or k [B, N, H*D] after its norm and rotary embedding, in its dtype, by one kernel."""
    if weight is None and cos is None:
        return x
    from turbo_rcm_patch.kernels.norm import norm_rotate

    return norm_rotate(x, heads, weight=weight, bias=bias, cos=cos, sin=sin, eps=eps)


def in_one_pass(x: Tensor, weight: Tensor | None, bias: Tensor | None, heads: int) -> bool:
    """Whether `kernels.norm.norm_rotate` has the norm: over whole rows, or over heads whose
    channels are a power of two."""
    dim = x.shape[-1] // heads
    across = weight is None or (bias is None and weight.numel() == x.shape[-1])
    return across or dim & (dim - 1) == 0


attention_forward = Operation("turbo_rcm_patch::attention_forward", _forward)


@attention_forward.register_fake
def _forward_fake(q: Tensor, *args: object) -> tuple[Tensor, Tensor]:
    # With dynamic=True a compiler makes a symbol even of the number of heads.
    heads, out_dtype, want_lse = cast("int", args[14]), args[22], args[23]
    assert isinstance(out_dtype, torch.dtype)
    lse_shape = (q.shape[0], heads, q.shape[1]) if want_lse else (0,)
    return q.new_empty(q.shape, dtype=out_dtype), q.new_empty(lse_shape, dtype=torch.float32)


def _sum_to(x: Tensor, like: Tensor) -> Tensor:
    return x.sum_to_size(like.shape).to(like.dtype)


@as_documented
def _backward(
    d_out: Tensor,
    d_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    residual: Tensor | None,
    c_skip: Tensor | None,
    c_out: Tensor | None,
    norm_q: Tensor | None,
    norm_k: Tensor | None,
    norm_q_bias: Tensor | None,
    norm_k_bias: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    kv_lengths: Tensor | None,
    c_skip_value: float,
    c_out_value: float,
    heads: int,
    causal: bool,
    sm_scale: float,
    eps: float,
    needs: Sequence[bool],
) -> list[Tensor]:
    grads = [q.new_empty(0) for _ in range(_DIFFERENTIABLE)]
    d_out = d_out.float()
    if residual is not None and needs[3]:
        grads[3] = (d_out * (c_skip_value if c_skip is None else c_skip.float())).to(
            residual.dtype
        )
    if residual is not None and c_skip is not None and needs[4]:
        grads[4] = _sum_to(d_out * residual.float(), c_skip)
    if not any(needs[:3]) and not any(needs[5:]):
        return grads
    qh = prepare(q, heads, norm_q, norm_q_bias, cos, sin, eps)
    kh = prepare(k, heads, norm_k, norm_k_bias, cos, sin, eps)
    vh = split_heads(v, heads).float()
    if c_out is not None and needs[5]:
        out, _ = exact_attention(
            qh, kh, vh, sm_scale=sm_scale, causal=causal, kv_lengths=kv_lengths
        )
        grads[5] = _sum_to(d_out * out.transpose(1, 2).flatten(2), c_out)
    d_branch = split_heads(d_out * (c_out_value if c_out is None else c_out.float()), heads)
    dq, dk, dv = attention_gradients(
        d_branch, d_lse, qh, kh, vh, sm_scale=sm_scale, causal=causal, kv_lengths=kv_lengths
    )
    for i, x, weight, bias, dx in (
        (0, q, norm_q, norm_q_bias, dq),
        (1, k, norm_k, norm_k_bias, dk),
    ):
        if not (needs[i] or needs[6 + i] or needs[8 + i]):
            continue
        d_input, d_weight, d_bias = norm_rope_gradients(
            dx, x, weight=weight, bias=bias, cos=cos, sin=sin, eps=eps
        )
        if needs[i]:
            grads[i] = d_input.to(x.dtype)
        if weight is not None and d_weight is not None and needs[6 + i]:
            grads[6 + i] = d_weight.to(weight.dtype)
        if bias is not None and d_bias is not None and needs[8 + i]:
            grads[8 + i] = d_bias.to(bias.dtype)
    if needs[2]:
        grads[2] = dv.transpose(1, 2).flatten(2).to(v.dtype)
    return [g.contiguous() for g in grads]


attention_backward = Operation("turbo_rcm_patch::attention_backward", _backward)


@attention_backward.register_fake
def _backward_fake(d_out: Tensor, d_lse: Tensor | None, *args: object) -> list[Tensor]:
    inputs, needs = args[:_DIFFERENTIABLE], args[-1]
    assert isinstance(needs, list | tuple) and isinstance(inputs[0], Tensor)
    return [
        torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if need and isinstance(x, Tensor)
        else inputs[0].new_empty(0)
        for x, need in zip(inputs, needs, strict=True)
    ]


def _setup(
    ctx: Any,
    inputs: tuple[object, ...],
    output: tuple[Tensor, Tensor],
) -> None:
    ctx.save_for_backward(*cast("tuple[Tensor | None, ...]", inputs[:13]))
    names = (
        "c_skip_value",
        "c_out_value",
        "heads",
        "attention",
        "pv",
        "smooth_k",
        "causal",
        "sm_scale",
        "eps",
    )
    ctx.numbers = dict(zip(names, inputs[13:22], strict=True))
    ctx.want_lse = inputs[24]


def gradients_of(*arguments: Any) -> list[Tensor]:
    """`attention_backward`, also for several cotangents at once: those come through vmap, which
    has no rule for an operation of ours."""
    run: Callable[..., list[Tensor]] = _backward if transformed() else attention_backward
    return run(*arguments)


def _autograd(ctx: Any, d_out: Tensor, d_lse: Tensor) -> tuple[Tensor | None, ...]:
    needs = list(ctx.needs_input_grad[:_DIFFERENTIABLE])
    numbers = ctx.numbers
    grads = gradients_of(
        d_out,
        d_lse if ctx.want_lse else None,
        *ctx.saved_tensors,
        numbers["c_skip_value"],
        numbers["c_out_value"],
        numbers["heads"],
        numbers["causal"],
        numbers["sm_scale"],
        numbers["eps"],
        needs,
    )
    return tuple(g if need else None for g, need in zip(grads, needs, strict=True)) + (None,) * 15


attention_forward.register_autograd(_autograd, setup_context=_setup)


def _refuse(ctx: object, *grads: object) -> None:
    raise GradientError(
        "attention_backward",
        expected="a first derivative",
        got="a request for a second one",
        remedy="Write the attention in plain torch where you need one",
    )


attention_backward.register_autograd(_refuse)
