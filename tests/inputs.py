"""The inputs of an attention as a launcher takes them, for tests that call launchers."""

from __future__ import annotations

from typing import Any

import torch

from turbo_rcm_patch.ops.attention.api import attend_and_project, attend_checked
from turbo_rcm_patch.ops.attention.spec import AttentionSpec
from turbo_rcm_patch.ops.formats import AttentionInputs, Norms, Skip


def attention_inputs(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, heads: int, **options: Any
) -> AttentionInputs:
    """A plain int8 attention, but for what `options` say: fields of `AttentionSpec` and
    `AttentionInputs`, norm_q and the other norms, cos and sin, residual, c_skip and c_out."""
    spec = {"attention": "int8", "pv": "fp8", "impl": "triton", "heads": heads}
    spec |= {name: options.pop(name) for name in AttentionSpec.__slots__ if name in options}
    weights = {name: options.pop(f"norm_{name}", None) for name in Norms._fields[:4]}
    eps = spec.get("eps", 1e-6)
    cos, sin = options.pop("cos", None), options.pop("sin", None)
    skip = {name: options.pop(name) for name in Skip._fields if options.get(name) is not None}
    return AttentionInputs(
        q, k, v, AttentionSpec(**spec), options.pop("out_dtype", q.dtype),
        norms=Norms(**weights, eps=eps), rotary=None if cos is None else (cos, sin),
        skip=Skip(**{"residual": None} | skip) if skip else None,
        **{name: value for name, value in options.items() if name not in Skip._fields},
    )  # fmt: skip


def attention_lse(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec, *,
    want_lse: bool = True, **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """`attention_skip` without a skip, with any norm, and the logsumexp."""
    norms = [options.pop(f"norm_{name}", None) for name in Norms._fields[:4]]
    dtype = options.pop("out_dtype", None) or getattr(q, "dtype", None)
    eps = getattr(spec, "eps", 0.0)
    return attend_checked(
        AttentionInputs(q, k, v, spec, dtype, Norms(*norms, eps), want_lse=want_lse, **options)
    )


def attention_project_skip(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, weight: torch.Tensor,
    bias: torch.Tensor | None, spec: AttentionSpec, *, residual: torch.Tensor | None,
    c_skip: Any = 1.0, c_out: Any = 1.0, form: Any = "auto", **options: Any,
) -> torch.Tensor:  # fmt: skip
    """`attend_and_project` with its record by keywords."""
    dtype = options.pop("out_dtype", None) or getattr(q, "dtype", None)
    skip = Skip(residual, c_skip, c_out)
    a = AttentionInputs(q, k, v, spec, dtype, skip=skip, **options)
    return attend_and_project(a, weight, bias, form=form)
