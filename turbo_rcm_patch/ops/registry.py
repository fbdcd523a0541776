"""The attention custom operations: schema, fake and autograd. Importing this loads neither triton
nor diffusers.

A schema holds plain tensors and numbers: the fields of `AttentionInputs`, in their order. The
public functions in `attention.py` check what they are given and flatten it here; below, it goes
on whole. Which implementation runs is decided inside, on the real device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, cast

import torch
from torch import Tensor

from turbo_rcm_patch.errors import GradientError
from turbo_rcm_patch.kernels.operands import QMAX, AttentionInputs
from turbo_rcm_patch.ops.dispatch import choose_inputs
from turbo_rcm_patch.ops.gradients import attention_gradients, norm_rope_gradients, prepare, sum_to
from turbo_rcm_patch.ops.modes import as_documented, transformed
from turbo_rcm_patch.ops.operation import Operation, flattened
from turbo_rcm_patch.ops.projection import closed
from turbo_rcm_patch.ops.reference import (
    aligned,
    close_skip,
    exact_attention,
    sdpa_attention,
    split_heads,
    unseen_keys,
)
from turbo_rcm_patch.ops.sage import sage_attention

#: q, k, v, residual, c_skip, c_out, norm_q, norm_k and the norms' biases: the first of the schema.
_DIFFERENTIABLE: Final = 10
_FIELDS: Final = AttentionInputs._fields
#: The first of them are tensors or None.
_TENSORS: Final = _FIELDS.index("c_skip_value")


@as_documented
@flattened(_FIELDS, tuple[Tensor, Tensor], AttentionInputs)
def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    a = choose_inputs(AttentionInputs(*args))
    no_lse = a.q.new_empty(0, dtype=torch.float32)
    if a.attention in QMAX and a.impl == "triton":
        from turbo_rcm_patch.kernels.portable.attention import attention as launch

        out, lse = launch(a)
        return out, no_lse if lse is None else lse
    branch, lse = _branch(a)
    if not a.closes_skip:
        out = branch.to(a.out_dtype)
    else:
        out = closed(
            a.residual, branch, a.skip_factor, a.out_factor,
            cast="fp32", impl=cast("Any", a.impl), out_dtype=a.out_dtype,
        )  # fmt: skip
    return out.contiguous(), no_lse if lse is None else lse


def _branch(a: AttentionInputs) -> tuple[Tensor, Tensor | None]:
    """The attention alone in torch, [B, Nq, H*D], and its logsumexp where that is wanted."""
    vh = split_heads(a.v, a.heads)
    of_q, of_k = (a.q, a.norm_q, a.norm_q_bias), (a.k, a.norm_k, a.norm_k_bias)
    one_pass = all(in_one_pass(*norm, a.heads) for norm in (of_q, of_k))
    if a.impl == "triton" and one_pass and not a.want_lse:
        # q and k in their own dtype are all that exact attention takes, so one pass makes them.
        qh, kh = rotated_heads(
            a.q, a.k, a.heads, a.norm_q, a.norm_k, a.norm_q_bias, a.norm_k_bias, a.cos, a.sin,
            a.eps,
        )  # fmt: skip
    else:
        qh, kh = prepared(a)
    if a.attention in QMAX:
        from turbo_rcm_patch.ops.emulation import emulated_attention

        return emulated_attention(
            qh, kh, vh, sm_scale=a.sm_scale, pv=cast("Any", a.pv), qmax=QMAX[a.attention],
            smooth_k=a.smooth_k, causal=a.causal, kv_lengths=a.kv_lengths, want_lse=a.want_lse,
        )  # fmt: skip
    lse = None
    qh, kh, vh = aligned(qh), aligned(kh), aligned(vh)
    masks: Any = {"sm_scale": a.sm_scale, "causal": a.causal, "kv_lengths": a.kv_lengths}
    if a.want_lse:
        branch, lse = exact_attention(qh, kh, vh.float(), **masks)
    elif a.attention == "sage":
        branch = sage_attention(
            qh.to(a.v.dtype), kh.to(a.v.dtype), vh,
            sm_scale=a.sm_scale, causal=a.causal, smooth_k=a.smooth_k,
        )  # fmt: skip
    else:
        branch = sdpa_attention(qh.to(a.v.dtype), kh.to(a.v.dtype), vh, **masks)
    return branch.transpose(1, 2).flatten(2), lse


def prepared(a: AttentionInputs) -> tuple[Tensor, Tensor]:
    """q and k [B, H, N, D] fp32, normalised and rotated."""
    return (
        prepare(a.q, a.heads, a.norm_q, a.norm_q_bias, a.cos, a.sin, a.eps),
        prepare(a.k, a.heads, a.norm_k, a.norm_k_bias, a.cos, a.sin, a.eps),
    )


def _without_unseen(a: AttentionInputs) -> AttentionInputs:
    """The inputs with 0 in the keys that no query sees, whatever they hold: a gradient of 0 times
    a NaN would reach the norm's weight."""
    if a.kv_lengths is None:
        return a
    return a._replace(k=a.k.masked_fill(unseen_keys(a.k.shape[1], a.kv_lengths).squeeze(1), 0.0))


@as_documented
def plain_attention(a: AttentionInputs) -> tuple[Tensor, Tensor]:
    """Exact attention in fp32, closed by a skip, and its logsumexp, in plain torch: what int8 and
    int4 approximate, for where a transform looks (see `modes`).

    Its forward derivative takes the memory of a few chunks of logits. A gradient that torch.func
    takes keeps all of them; the registered operation's own, outside torch.func, keeps none.
    """
    a = _without_unseen(a)
    branch, lse = exact_attention(
        *prepared(a), split_heads(a.v, a.heads).float(),
        sm_scale=a.sm_scale, causal=a.causal, kv_lengths=a.kv_lengths,
    )  # fmt: skip
    out = close_skip(
        a.residual, branch.transpose(1, 2).flatten(2), a.skip_factor, a.out_factor,
        cast="fp32", out_dtype=a.out_dtype,
    )  # fmt: skip
    return out.contiguous(), lse


def rotated_heads(
    q: Tensor,
    k: Tensor,
    heads: int,
    norm_q: Tensor | None,
    norm_k: Tensor | None,
    norm_q_bias: Tensor | None,
    norm_k_bias: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """q and k [B, N, H*D] after norm and rotary embedding, as heads [B, H, N, D] of their dtype,
    by one kernel each."""
    rest = heads, cos, sin, eps
    return _rotated(q, norm_q, norm_q_bias, *rest), _rotated(k, norm_k, norm_k_bias, *rest)


def _rotated(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    heads: int,
    cos: Tensor | None,
    sin: Tensor | None,
    eps: float,
    *,
    by_head: bool = True,
) -> Tensor:
    if weight is None and cos is None:
        return split_heads(x, heads) if by_head else x
    from turbo_rcm_patch.kernels.portable.norm import norm_rotate

    return norm_rotate(
        x, heads, weight=weight, bias=bias, cos=cos, sin=sin, eps=eps, by_head=by_head
    )


def in_one_pass(x: Tensor, weight: Tensor | None, bias: Tensor | None, heads: int) -> bool:
    """Whether `kernels.norm.norm_rotate` has the norm: over whole rows, or over heads whose
    channels are a power of two."""
    dim = x.shape[-1] // heads
    across = weight is None or (bias is None and weight.numel() == x.shape[-1])
    return across or dim & (dim - 1) == 0


attention_forward = Operation("turbo_rcm_patch::attention_forward", _forward)


@attention_forward.register_fake
def _forward_fake(*args: Any) -> tuple[Tensor, Tensor]:
    a = AttentionInputs(*args)
    # With dynamic=True a compiler makes a symbol even of the number of heads.
    lse_shape = (a.q.shape[0], a.heads, a.q.shape[1]) if a.want_lse else (0,)
    return (
        a.q.new_empty(a.q.shape, dtype=a.out_dtype),
        a.q.new_empty(lse_shape, dtype=torch.float32),
    )


# --- some heads exactly --------------------------------------------------------------------------


@as_documented
@flattened(
    (*_FIELDS, "exact_heads"), Tensor, AttentionInputs, {"exact_heads": Sequence[int]}
)  # fmt: skip
def _by_head(*args: Any) -> Tensor:
    a = choose_inputs(AttentionInputs(*args[:-1]))
    chosen = set(args[-1])
    if a.attention not in QMAX:
        whole: Tensor = _forward(*a)[0]
        return whole
    of_q, of_k = (a.q, a.norm_q, a.norm_q_bias), (a.k, a.norm_k, a.norm_k_bias)
    if a.impl == "triton" and all(in_one_pass(*norm, a.heads) for norm in (of_q, of_k)):
        q, k = (
            _rotated(*one, a.heads, a.cos, a.sin, a.eps, by_head=False) for one in (of_q, of_k)
        )
    else:  # The reference takes q and k unrounded, a kernel in the dtype of v.
        dtype = torch.float32 if a.impl == "reference" else a.v.dtype
        q, k = (x.transpose(1, 2).flatten(2).to(dtype) for x in prepared(a))
    branch = a.q.new_empty(a.q.shape, dtype=a.v.dtype)
    exact = [head in chosen for head in range(a.heads)]
    for attention, marked in ((a.attention, False), ("exact", True)):
        spans = head_spans([one == marked for one in exact], a.head_dim)
        if not spans:
            continue
        own = AttentionInputs(
            columns_of(q, spans), columns_of(k, spans), columns_of(a.v, spans), None, None, None,
            None, None, None, None, None, None, a.kv_lengths, 1.0, 1.0, exact.count(marked),
            attention, a.pv, a.smooth_k, a.causal, a.sm_scale, a.eps, a.impl, a.v.dtype, False,
        )  # fmt: skip
        write_columns(branch, _forward(*own)[0], spans)
    if not a.closes_skip:
        return branch.to(a.out_dtype)
    return closed(
        a.residual, branch, a.skip_factor, a.out_factor,
        cast="fp32", impl=cast("Any", a.impl), out_dtype=a.out_dtype,
    )  # fmt: skip


def head_spans(chosen: Sequence[bool], dim: int) -> list[tuple[int, int]]:
    """First and last channel of each run of chosen heads."""
    spans: list[tuple[int, int]] = []
    for head in (head for head, one in enumerate(chosen) if one):
        if spans and spans[-1][1] == head * dim:
            spans[-1] = spans[-1][0], (head + 1) * dim
        else:
            spans.append((head * dim, (head + 1) * dim))
    return spans


def columns_of(x: Tensor, spans: Sequence[tuple[int, int]]) -> Tensor:
    """Some channels of x [B, N, C], a view where they lie side by side. No list of indices goes to
    the device, which would wait for it."""
    parts = [x[..., first:last] for first, last in spans]
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def write_columns(x: Tensor, columns: Tensor, spans: Sequence[tuple[int, int]]) -> None:
    """Write what `columns_of` takes back into x."""
    at = 0
    for first, last in spans:
        x[..., first:last] = columns[..., at : at + last - first]
        at += last - first


heads_forward = Operation("turbo_rcm_patch::attention_by_head", _by_head)


@heads_forward.register_fake
def _by_head_fake(*args: Any) -> Tensor:
    a = AttentionInputs(*args[:-1])
    return a.q.new_empty(a.q.shape, dtype=a.out_dtype)


def _by_head_setup(ctx: Any, inputs: tuple[object, ...], output: Tensor) -> None:
    _setup(ctx, inputs[:-1], (output, output))


def _by_head_autograd(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
    return (*_autograd(ctx, d_out, d_out), None)


heads_forward.register_autograd(_by_head_autograd, setup_context=_by_head_setup)


# --- gradients -----------------------------------------------------------------------------------


@as_documented
@flattened(
    ("d_out", "d_lse", *_FIELDS, "needs"), list[Tensor], AttentionInputs,
    {"d_out": Tensor, "d_lse": Tensor | None, "needs": Sequence[bool]},
)  # fmt: skip
def _backward(d_out: Tensor, d_lse: Tensor | None, *args: Any) -> list[Tensor]:
    *fields, needs = args
    a = _without_unseen(AttentionInputs(*fields))
    grads = [a.q.new_empty(0) for _ in range(_DIFFERENTIABLE)]
    d_out = d_out.float()
    if a.residual is not None and needs[3]:
        grads[3] = (d_out * _fp32(a.skip_factor)).to(a.residual.dtype)
    if a.residual is not None and a.c_skip is not None and needs[4]:
        grads[4] = sum_to(d_out * a.residual.float(), a.c_skip)
    if not any(needs[:3]) and not any(needs[5:]):
        return grads
    masks: Any = {"sm_scale": a.sm_scale, "causal": a.causal, "kv_lengths": a.kv_lengths}
    heads = (*prepared(a), split_heads(a.v, a.heads).float())
    if a.c_out is not None and needs[5]:
        out, _ = exact_attention(*heads, **masks)
        grads[5] = sum_to(d_out * out.transpose(1, 2).flatten(2), a.c_out)
    d_branch = split_heads(d_out * _fp32(a.out_factor), a.heads)
    dq, dk, dv = attention_gradients(d_branch, d_lse, *heads, **masks)
    for i, x, weight, bias, dx in (
        (0, a.q, a.norm_q, a.norm_q_bias, dq),
        (1, a.k, a.norm_k, a.norm_k_bias, dk),
    ):
        if not (needs[i] or needs[6 + i] or needs[8 + i]):
            continue
        d_input, d_weight, d_bias = norm_rope_gradients(
            dx, x, weight=weight, bias=bias, cos=a.cos, sin=a.sin, eps=a.eps
        )
        if needs[i]:
            grads[i] = d_input.to(x.dtype)
        if weight is not None and d_weight is not None and needs[6 + i]:
            grads[6 + i] = d_weight.to(weight.dtype)
        if bias is not None and d_bias is not None and needs[8 + i]:
            grads[8 + i] = d_bias.to(bias.dtype)
    if needs[2]:
        grads[2] = dv.transpose(1, 2).flatten(2).to(a.v.dtype)
    return [g.contiguous() for g in grads]


def _fp32(factor: float | Tensor) -> float | Tensor:
    return factor.float() if isinstance(factor, Tensor) else factor


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


def _setup(ctx: Any, inputs: tuple[object, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*cast("tuple[Tensor | None, ...]", inputs[:_TENSORS]))
    ctx.numbers = inputs[_TENSORS:]


def gradients_of(
    d_out: Tensor, d_lse: Tensor | None, inputs: AttentionInputs, needs: Sequence[bool]
) -> list[Tensor | None]:
    """`attention_backward`, None where no gradient is needed; also for several cotangents at once:
    those come through vmap, which has no rule for an operation of ours."""
    run: Callable[..., list[Tensor]] = _backward if transformed() else attention_backward
    grads = run(d_out, d_lse, *inputs, list(needs))
    return [g if need else None for g, need in zip(grads, needs, strict=True)]


def _autograd(ctx: Any, d_out: Tensor, d_lse: Tensor) -> tuple[Tensor | None, ...]:
    a = AttentionInputs(*ctx.saved_tensors, *ctx.numbers)
    needs = ctx.needs_input_grad[:_DIFFERENTIABLE]
    grads = gradients_of(d_out, d_lse if a.want_lse else None, a, needs)
    return (*grads, *[None] * (len(_FIELDS) - _DIFFERENTIABLE))


attention_forward.register_autograd(_autograd, setup_context=_setup)


def _refuse(ctx: object, *grads: object) -> None:
    raise GradientError(
        "attention_backward",
        expected="a first derivative",
        got="a request for a second one",
        remedy="Write the attention in plain torch where you need one",
    )


attention_backward.register_autograd(_refuse)
