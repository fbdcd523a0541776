"""Attention, output projection and skip as one operation, in one kernel launch or in two."""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import Any, Final, Literal, cast, get_args

import torch
from torch import Tensor

from turbo_rcm_patch.config import Form, Impl, PVDType
from turbo_rcm_patch.errors import ConfigError
from turbo_rcm_patch.ops import batches
from turbo_rcm_patch.ops.attention import attention_skip, with_positive_scale
from turbo_rcm_patch.ops.checks import (
    check_attention,
    check_lengths,
    check_norm,
    check_out_dtype,
    check_residual,
    check_same_device,
    check_spec,
    check_weight,
    coefficient_parts,
    rotary_parts,
)
from turbo_rcm_patch.ops.modes import as_documented, transformed
from turbo_rcm_patch.ops.operation import Operation
from turbo_rcm_patch.ops.projection import project_forward, project_gradients, project_skip
from turbo_rcm_patch.ops.registry import attention_forward, gradients_of
from turbo_rcm_patch.ops.spec import QMAX, AttentionSpec, resolve_impl, resolve_pv
from turbo_rcm_patch.skip import Cast, Coefficient

__all__ = ["attention_project_skip", "choose_form"]


#: Measured rows per device name: the form that was faster for a shape. Read at import, because a
#: traced call cannot open files.
_FORMS: Final[dict[str, list[dict[str, int | str]]]] = json.loads(
    resources.files("turbo_rcm_patch.ops").joinpath("forms.json").read_text(encoding="utf-8")
)


@cache
def _device_name(index: int) -> str:
    return torch.cuda.get_device_name(index)


def choose_form(
    batch: int,
    n_q: int,
    n_kv: int,
    heads: int,
    head_dim: int,
    c_out_features: int,
    device: torch.device,
) -> Literal["one-launch", "two-launch"]:
    """Choose the form that was measured to be faster for a shape on this device.

    It is "two-launch" for a shape that was not measured. A row of the table covers shapes with its
    heads, head_dim and features whose query and key lengths lie within its bounds.
    """
    if device.type != "cuda" or not _FORMS:
        return "two-launch"
    rows = _FORMS.get(_device_name(device.index or 0), [])
    for row in rows:
        same = (row["heads"], row["head_dim"], row["features"]) == (
            heads,
            head_dim,
            c_out_features,
        )
        inside = int(row["min_rows"]) <= batch * n_q <= int(row["max_rows"]) and int(
            row["min_keys"]
        ) <= n_kv <= int(row["max_keys"])
        if same and inside:
            return "one-launch" if row["form"] == "one-launch" else "two-launch"
    return "two-launch"


@as_documented
def _one_launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    bias: Tensor | None,
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
    cast_policy: str,
    form: str,
    impl: str,
    out_dtype: torch.dtype,
) -> Tensor:
    if form == "auto":
        form = choose_form(
            q.shape[0], q.shape[1], k.shape[1], heads, q.shape[2] // heads, weight.shape[0],
            q.device,
        )  # fmt: skip
    if form == "one-launch" and resolve_impl(cast("Impl", impl), q.device) == "triton":
        from turbo_rcm_patch.kernels.one_launch import attention_project_skip as launch

        return launch(
            q,
            k,
            v,
            weight,
            bias,
            heads=heads,
            residual=residual,
            c_skip=c_skip_value if c_skip is None else c_skip,
            c_out=c_out_value if c_out is None else c_out,
            norm_q=norm_q,
            norm_k=norm_k,
            norm_q_bias=norm_q_bias,
            norm_k_bias=norm_k_bias,
            cos=cos,
            sin=sin,
            kv_lengths=kv_lengths,
            pv=resolve_pv(cast("PVDType", pv), q.device, k.shape[1]),
            qmax=QMAX[attention],
            smooth_k=smooth_k,
            causal=causal,
            sm_scale=sm_scale,
            eps=eps,
            cast=cast("Cast", cast_policy),
            out_dtype=out_dtype,
        )
    # Two launches; the reference has none to save.
    branch, _ = attention_forward(
        q, k, v, None, None, None, norm_q, norm_k, norm_q_bias, norm_k_bias, cos, sin,
        kv_lengths, 1.0, 1.0, heads, attention, pv, smooth_k, causal, sm_scale, eps, impl,
        q.dtype, False,
    )  # fmt: skip
    out: Tensor = project_forward(
        branch,
        weight,
        bias,
        residual,
        c_skip,
        c_out,
        c_skip_value,
        c_out_value,
        cast_policy,
        impl,
        out_dtype,
    )
    return out


one_launch = Operation("turbo_rcm_patch::attention_project_skip", _one_launch)


@one_launch.register_fake
def _one_launch_fake(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, *args: object) -> Tensor:
    out_dtype = args[-1]
    assert isinstance(out_dtype, torch.dtype)
    return q.new_empty((q.shape[0], q.shape[1], weight.shape[0]), dtype=out_dtype)


def _setup(ctx: Any, inputs: tuple[object, ...], output: Tensor) -> None:
    ctx.save_for_backward(*cast("tuple[Tensor | None, ...]", inputs[:15]))
    ctx.numbers = inputs[15:]


def _autograd(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, weight, bias, residual, c_skip, c_out, *prologue = ctx.saved_tensors
    c_skip_value, c_out_value, heads, _, _, _, causal, sm_scale, eps = ctx.numbers[:9]
    needs = ctx.needs_input_grad
    # The attention output was never kept: the exact one takes its place, as everywhere in our
    # gradients.
    branch = q
    if needs[3] or needs[7]:
        branch, _ = attention_forward(
            q, k, v, None, None, None, *prologue, 1.0, 1.0, heads,
            "exact", "auto", False, causal, sm_scale, eps, "reference", q.dtype, False,
        )  # fmt: skip
    attention_needs = [*needs[:3], *needs[8:12]]
    d_branch, d_weight, d_bias, d_residual, d_c_skip, d_c_out = project_gradients(
        d_out,
        branch,
        weight,
        bias,
        residual,
        c_skip,
        c_out,
        c_skip_value,
        c_out_value,
        [any(attention_needs), *needs[3:8]],
    )
    dq = dk = dv = None
    d_norms: list[Tensor | None] = [None] * 4
    if d_branch is not None:
        flags = [*needs[:3], False, False, False, *needs[8:12]]
        grads = gradients_of(
            d_branch, None, q, k, v, None, None, None, *prologue,
            1.0, 1.0, heads, causal, sm_scale, eps, flags,
        )  # fmt: skip
        dq, dk, dv, _, _, _, *d_norms = (
            g if need else None for g, need in zip(grads, flags, strict=True)
        )
    return (dq, dk, dv, d_weight, d_bias, d_residual, d_c_skip, d_c_out, *d_norms) + (None,) * 16


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
    check_spec(spec)
    quantised = spec.attention in QMAX
    if form == "one-launch" and not quantised:
        raise ConfigError(
            'form="one-launch"',
            expected='attention="int8" or "int4"',
            got=repr(spec.attention),
            remedy='Use form="two-launch"',
        )
    check_attention(q, k, v, spec)
    batch, n_q, channels = q.shape
    head_dim = channels // spec.heads
    if form == "auto" and not (quantised and _FORMS and q.device.type == "cuda"):
        form = "two-launch"  # else the operation reads the table: tracing asks no device
    if transformed() or not 0 < batch <= batches.MAX_BATCH:
        form = "two-launch"  # in plain torch, which has none to save
    if form == "two-launch":
        branch = attention_skip(
            q, k, v, spec, norm_q=norm_q, norm_k=norm_k, norm_q_bias=norm_q_bias,
            norm_k_bias=norm_k_bias, rotary=rotary, kv_lengths=kv_lengths,
        )  # fmt: skip
        return project_skip(
            branch,
            weight,
            bias,
            residual=residual,
            c_skip=c_skip,
            c_out=c_out,
            cast=cast,
            impl=spec.impl,
            out_dtype=out_dtype,
        )
    check_weight(q, weight, bias)
    shape = (batch, n_q, weight.shape[0])
    check_residual("residual", residual, shape)
    check_norm("norm_q", norm_q, norm_q_bias, channels, spec.heads)
    check_norm("norm_k", norm_k, norm_k_bias, channels, spec.heads)
    cos, sin = rotary_parts(rotary, n_q, k.shape[1], head_dim)
    check_lengths(kv_lengths, batch)
    c_skip_value, c_skip_tensor = coefficient_parts("c_skip", c_skip, shape)
    c_out_value, c_out_tensor = coefficient_parts("c_out", c_out, shape)
    check_out_dtype(out_dtype)
    check_same_device(
        q.device,
        residual=residual,
        c_skip=c_skip_tensor,
        c_out=c_out_tensor,
        norm_q=norm_q,
        norm_k=norm_k,
        norm_q_bias=norm_q_bias,
        norm_k_bias=norm_k_bias,
        cos=cos,
        sin=sin,
        kv_lengths=kv_lengths,
    )
    q, norm_q, norm_q_bias, sm_scale = with_positive_scale(
        q, norm_q, norm_q_bias, spec.scale_of(head_dim)
    )
    out: Tensor = one_launch(
        q,
        k,
        v,
        weight,
        bias,
        residual,
        c_skip_tensor if residual is not None else None,
        c_out_tensor,
        norm_q,
        norm_k,
        norm_q_bias,
        norm_k_bias,
        cos,
        sin,
        kv_lengths,
        c_skip_value,
        c_out_value,
        spec.heads,
        spec.attention,
        spec.pv,
        spec.smooth_k,
        spec.causal,
        sm_scale,
        spec.eps,
        cast,
        form,
        spec.impl,
        q.dtype if out_dtype is None else out_dtype,
    )
    return out
