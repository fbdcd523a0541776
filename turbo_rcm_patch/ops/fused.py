"""Attention, output projection and skip as one operation, in one kernel launch or in two."""

from __future__ import annotations

from typing import Any, Final, cast, get_args

import torch
from torch import Tensor

from turbo_rcm_patch.config import Form
from turbo_rcm_patch.errors import ConfigError
from turbo_rcm_patch.kernels.operands import QMAX, AttentionInputs
from turbo_rcm_patch.ops import batches
from turbo_rcm_patch.ops.attention import attention_skip, describe
from turbo_rcm_patch.ops.checks import check_attention, check_weight, refuse_exact_heads
from turbo_rcm_patch.ops.dispatch import choose_form, choose_inputs, forms_measured, quantises
from turbo_rcm_patch.ops.modes import as_documented, transformed
from turbo_rcm_patch.ops.operation import Operation, flattened
from turbo_rcm_patch.ops.projection import project_forward, project_gradients, project_skip
from turbo_rcm_patch.ops.registry import attention_forward, gradients_of
from turbo_rcm_patch.ops.spec import AttentionSpec
from turbo_rcm_patch.skip import Cast, Coefficient

_FIELDS: Final = AttentionInputs._fields
#: The schema: the fields of an attention, the projection after q, k and v, how both are closed
#: before the result's dtype.
_ORDER: Final = (
    *_FIELDS[:3], "weight", "bias", *_FIELDS[3:22], "cast_policy", "form", *_FIELDS[22:24]
)  # fmt: skip
#: The first of them are tensors or None.
_TENSORS: Final = _ORDER.index("c_skip_value")


def _flat(a: AttentionInputs, weight: Tensor, bias: Tensor | None, cast: str, form: str) -> Any:
    plain = (*a,)  # torch 2.8's compiler cannot slice a named tuple
    return (*plain[:3], weight, bias, *plain[3:22], cast, form, *plain[22:24])


def _whole(args: tuple[Any, ...]) -> tuple[AttentionInputs, Tensor, Tensor | None, str, str]:
    fields: Any = (*args[:3], *args[5:24], *args[26:28], False)
    return AttentionInputs(*fields), args[3], args[4], args[24], args[25]


@as_documented
@flattened(
    _ORDER, Tensor, AttentionInputs,
    {"weight": Tensor, "bias": Tensor | None, "cast_policy": str, "form": str},
)  # fmt: skip
def _one_launch(*args: Any) -> Tensor:
    a, weight, bias, cast_policy, form = _whole(args)
    if form == "one-launch" and a.attention == "auto":
        a = a._replace(attention="int8")
    a = choose_inputs(a)
    if form == "auto":
        batch, n_q, _ = a.q.shape
        form = choose_form(
            batch, n_q, a.k.shape[1], a.heads, a.head_dim, weight.shape[0], a.q.device
        )
    if form == "one-launch" and a.impl == "triton" and a.attention in QMAX:
        from turbo_rcm_patch.kernels.portable.one_launch import attention_project_skip as launch

        return launch(a, weight, bias, cast=cast_policy)
    # Two launches; the reference has none to save.
    branch, _ = attention_forward(*a.alone())
    out: Tensor = project_forward(
        branch, weight, bias, a.residual, a.c_skip, a.c_out, a.c_skip_value, a.c_out_value,
        cast_policy, a.impl, a.out_dtype,
    )  # fmt: skip
    return out


one_launch = Operation("turbo_rcm_patch::attention_project_skip", _one_launch)


@one_launch.register_fake
def _one_launch_fake(*args: Any) -> Tensor:
    a, weight, *_ = _whole(args)
    return a.q.new_empty((*a.q.shape[:2], weight.shape[0]), dtype=a.out_dtype)


def _setup(ctx: Any, inputs: tuple[object, ...], output: Tensor) -> None:
    ctx.save_for_backward(*cast("tuple[Tensor | None, ...]", inputs[:_TENSORS]))
    ctx.numbers = inputs[_TENSORS:]


def _autograd(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
    a, weight, bias, _, _ = _whole((*ctx.saved_tensors, *ctx.numbers))
    needs = ctx.needs_input_grad
    # The attention output was never kept: the exact one takes its place, as everywhere in our
    # gradients.
    alone = a.alone(attention="exact", pv="auto", smooth_k=False, impl="reference")
    branch = a.q
    if needs[3] or needs[7]:
        branch, _ = attention_forward(*alone)
    of_norms = needs[8:12]
    d_branch, *d_projection = project_gradients(
        d_out, branch, weight, bias, a.residual, a.c_skip, a.c_out, a.c_skip_value, a.c_out_value,
        [any((*needs[:3], *of_norms)), *needs[3:8]],
    )  # fmt: skip
    d_qkv: list[Tensor | None] = [None] * 3
    d_norms: list[Tensor | None] = [None] * 4
    if d_branch is not None:
        flags = [*needs[:3], False, False, False, *of_norms]
        grads = gradients_of(d_branch, None, alone, flags)
        d_qkv, d_norms = grads[:3], grads[6:]
    return (*d_qkv, *d_projection, *d_norms, *[None] * (len(_ORDER) - 12))


one_launch.register_autograd(_autograd, setup_context=_setup)


def attention_project_skip(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    spec: AttentionSpec,
    *,
    residual: Tensor | None,
    c_skip: Coefficient = 1.0,
    c_out: Coefficient = 1.0,
    norm_q: Tensor | None = None,
    norm_k: Tensor | None = None,
    norm_q_bias: Tensor | None = None,
    norm_k_bias: Tensor | None = None,
    rotary: tuple[Tensor, Tensor] | None = None,
    kv_lengths: Tensor | None = None,
    form: Form = "auto",
    cast: Cast = "fp32",
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute c_skip * residual + c_out * (softmax(sm_scale * q k^T) v @ weight^T + bias).

    Both forms round the attention output to q's dtype before the projection and compute the rest
    in fp32.

    Args:
        q: [B, Nq, H*D]. For this and for k, v, the norms, rotary and kv_lengths see
            `attention_skip`.
        k: [B, Nk, H*D].
        v: [B, Nk, H*D].
        weight: [Cout, H*D], dtype of q.
        bias: [Cout] or None.
        spec: How the attention is computed.
        residual: [B, Nq, Cout] or None.
        c_skip: Float or tensor [B], [B, 1, Cout] or [B, Nq, Cout].
        c_out: Likewise.
        norm_q: Weight of the norm of q.
        norm_k: Weight of the norm of k.
        norm_q_bias: Bias of the norm of q, which makes it a layer norm.
        norm_k_bias: Bias of the norm of k, likewise.
        rotary: (cos, sin).
        kv_lengths: int32 [B].
        form: "two-launch" (attention, then projection with skip), "one-launch" (the attention
            kernel also projects; int8 and int4 only), or "auto", which reads a measured table.
        cast: As in `project_skip`.
        out_dtype: dtype of the result; q's by default.

    Returns:
        [B, Nq, Cout], contiguous.
    """
    if form not in get_args(Form):
        raise ConfigError("form", expected=f"one of {get_args(Form)}", got=repr(form))
    check_attention(q, k, v, spec)
    if form == "one-launch" and not quantises(spec.attention):
        raise ConfigError(
            'form="one-launch"',
            expected='attention="int8" or "int4"',
            got=repr(spec.attention),
            remedy='Use form="two-launch"',
        )
    if form == "one-launch":
        refuse_exact_heads(spec, 'form="one-launch"')
    skip, norms = (residual, c_skip, c_out), (norm_q, norm_k, norm_q_bias, norm_k_bias)
    # On a GPU the operation reads the tables: tracing asks no device and opens no file.
    looks = q.device.type == "cuda" and quantises(spec.attention)
    looks = looks and (torch.compiler.is_compiling() or forms_measured())
    two = bool(spec.exact_heads) or (form == "auto" and not looks)
    if two or form == "two-launch" or transformed() or not 0 < q.shape[0] <= batches.MAX_BATCH:
        branch = attention_skip(
            q, k, v, spec, norm_q=norm_q, norm_k=norm_k, norm_q_bias=norm_q_bias,
            norm_k_bias=norm_k_bias, rotary=rotary, kv_lengths=kv_lengths,
        )  # fmt: skip
        return project_skip(
            branch, weight, bias, residual=residual, c_skip=c_skip, c_out=c_out, cast=cast,
            impl=spec.impl, out_dtype=out_dtype,
        )  # fmt: skip
    check_weight(q, weight, bias)
    features = weight.shape[0]
    a = describe(q, k, v, spec, skip, norms, rotary, kv_lengths, out_dtype, features=features)
    out: Tensor = one_launch(*_flat(a, weight, bias, cast, form))
    return out
