"""The inputs of an attention as a launcher takes them, for tests that call launchers."""

from __future__ import annotations

import torch

from turbo_rcm_patch.ops.formats import AttentionInputs


def attention_inputs(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, heads: int, **options: object
) -> AttentionInputs:
    """A plain int8 attention, but for what `options` say: fields of `AttentionInputs`, c_skip and
    c_out as numbers or tensors."""
    fields = dict.fromkeys(AttentionInputs._fields) | {
        "q": q, "k": k, "v": v, "heads": heads, "c_skip_value": 1.0, "c_out_value": 1.0,
        "attention": "int8", "pv": "fp8", "smooth_k": True, "causal": False, "impl": "triton",
        "sm_scale": (q.shape[2] // heads) ** -0.5, "eps": 1e-6, "out_dtype": q.dtype,
        "want_lse": False,
    }  # fmt: skip
    for name in ("c_skip", "c_out"):
        if isinstance(options.get(name), float):
            options[f"{name}_value"] = options.pop(name)
    return AttentionInputs(**fields | options)
