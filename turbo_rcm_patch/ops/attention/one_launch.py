"""Attention, output projection and skip in one kernel launch, or in three."""

from __future__ import annotations

from typing import Any, Final, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from turbo_rcm_patch.config import Form
from turbo_rcm_patch.errors import ConfigError
from turbo_rcm_patch.ops.attention.api import attention, describe
from turbo_rcm_patch.ops.attention.reference import project
from turbo_rcm_patch.ops.attention.spec import AttentionSpec
from turbo_rcm_patch.ops.checks import check_attention, check_weight
from turbo_rcm_patch.ops.dispatch import choose_inputs, quantises
from turbo_rcm_patch.ops.formats import QMAX, AttentionInputs
from turbo_rcm_patch.ops.register import Operation, flattened, refuse_gradient
from turbo_rcm_patch.ops.residual.skip import check_cast, closed
from turbo_rcm_patch.skip import Cast, Coefficient

_FIELDS: Final = AttentionInputs._fields
#: The arguments of the schema: the fields of an attention without the last, then the projection.
_ORDER: Final = (*_FIELDS[:-1], "weight", "bias", "cast_policy", "form")
_TYPES: Final = {"weight": Tensor, "bias": Tensor | None, "cast_policy": str, "form": str}


@flattened(_ORDER, Tensor, AttentionInputs, _TYPES)
def _project(*args: Any) -> Tensor:
    *fields, weight, bias, cast_policy, form = args
    a = AttentionInputs._make([*fields, False])
    if form == "one-launch" and a.attention == "auto":
        a = a._replace(attention="int8")
    a = choose_inputs(a)
    if form == "one-launch" and a.impl == "triton" and a.attention in QMAX:
        from turbo_rcm_patch.ops.attention.one_launch_triton import (
            attention_project_skip as launch,
        )

        return launch(a, weight, bias, cast=cast_policy)
    branch, _ = attention(*a.alone())
    if a.impl == "triton":
        branch = F.linear(branch, weight, bias)
    else:
        branch = project(branch, weight, bias)
    return closed(
        a.residual, branch, a.skip_factor, a.out_factor,
        cast_policy=cast_policy, impl=a.impl, out_dtype=a.out_dtype,
    )  # fmt: skip


def _project_fake(*args: Any) -> Tensor:
    q, weight, out_dtype = args[0], args[-4], args[-5]
    made: Tensor = q.new_empty((*q.shape[:2], weight.shape[0]), dtype=out_dtype)
    return made


attention_project_operation = Operation("attention_project_skip", _project, _project_fake)


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

    Both forms round the attention output to q's dtype before the projection. "two-launch" also
    rounds the product of the projection to it.

    Args:
        q: [B, Nq, H*D]. Of the arguments that `attention_skip` also has, details are there.
        k: [B, Nk, H*D].
        v: [B, Nk, H*D].
        weight: [Cout, H*D], dtype of q.
        bias: [Cout] or None.
        spec: How the attention is computed.
        residual: [B, Nq, Cout] or None.
        c_skip: Float or tensor [B], [B, 1, Cout] or [B, Nq, Cout].
        c_out: Float or tensor, as c_skip.
        norm_q: Weight of the norm of q.
        norm_k: Weight of the norm of k.
        norm_q_bias: Bias of the norm of q, which makes it a layer norm of each head.
        norm_k_bias: Bias of the norm of k, which makes it a layer norm of each head.
        rotary: (cos, sin).
        kv_lengths: int32 [B].
        form: "one-launch" (the attention kernel also projects; int8 and int4 only), or
            "two-launch" and "auto" (attention, cuBLAS's product, and a pass that closes the skip).
        cast: Cast policy of the skip, "fp32" or "model"; see `skip`.
        out_dtype: dtype of the result; q's by default.

    Returns:
        [B, Nq, Cout], contiguous.
    """
    if form not in get_args(Form):
        raise ConfigError("form", expected=f"one of {get_args(Form)}", got=repr(form))
    check_cast(cast)
    check_attention(q, k, v, spec)
    if form == "one-launch" and not quantises(spec.attention):
        raise ConfigError(
            'form="one-launch"',
            expected='attention="int8" or "int4"',
            got=repr(spec.attention),
            remedy='Use form="two-launch"',
        )
    check_weight(q, weight, bias)
    norms = (norm_q, norm_k, norm_q_bias, norm_k_bias)
    inputs = describe(
        q, k, v, spec, (residual, c_skip, c_out), norms, rotary, kv_lengths, out_dtype,
        features=weight.shape[0],
    )  # fmt: skip
    refuse_gradient("attention_project_skip", (weight, bias))
    if not q.shape[0]:
        return q.new_empty((*q.shape[:2], weight.shape[0]), dtype=inputs.out_dtype)
    out: Tensor = attention_project_operation(*inputs[:-1], weight, bias, cast, form)
    return out
