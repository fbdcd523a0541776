"""An attention with the interface of `sageattention.sageattn` (2.x), computed by our kernels."""

from __future__ import annotations

import warnings
from typing import Final, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from turbo_rcm_patch.config import Attention
from turbo_rcm_patch.errors import ConfigError, MaskError, ShapeError
from turbo_rcm_patch.ops.attention import attention_lse, attention_skip
from turbo_rcm_patch.ops.checks import broadcasts, check_choice, check_tensor
from turbo_rcm_patch.ops.dispatch import INT8_MIN_KEYS
from turbo_rcm_patch.ops.reference import aligned, apart, split_heads
from turbo_rcm_patch.ops.spec import AttentionSpec

#: Said when a mask is computed exactly. Python shows a warning once for each place it comes from.
MASK_WARNING: Final = (
    "attn_mask: this attention runs exactly, through torch, because no int8 kernel takes a mask"
)
_KEYWORDS: Final = (
    "q", "k", "v", "tensor_layout", "is_causal", "sm_scale", "return_lse", "attn_mask", "smooth_k",
)  # fmt: skip


def sageattn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensor_layout: Literal["HND", "NHD"] = "HND",
    is_causal: bool = False,
    sm_scale: float | None = None,
    return_lse: bool = False,
    *,
    attn_mask: Tensor | None = None,
    smooth_k: bool = True,
    **unknown: object,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(sm_scale * q k^T) v, in place of `sageattention.sageattn`.

    q and k run in int8 from 4,096 queries and keys on (on a CPU, and with return_lse, from 1,024
    keys on), else exactly. Inputs are never written to. A gradient is refused.

    Args:
        q: "HND": [B, H, Nq, D]; "NHD": [B, Nq, H, D]. bf16, fp16 or fp32, D up to 256.
        k: "HND": [B, Hk, Nk, D]; "NHD": [B, Nk, Hk, D]. dtype of q. H is a multiple of Hk; each
            head of k and v then serves H / Hk neighbouring heads of q and is copied for them.
        v: As k.
        tensor_layout: "HND" or "NHD".
        is_causal: Query i sees keys 0..i. Needs Nq = Nk.
        sm_scale: Factor on the logits, D ** -0.5 by default.
        return_lse: Also return the logsumexp of the logits.
        attn_mask: Broadcasts to [B, H, Nq, Nk]; boolean (true where a query sees a key) or added
            to the logits. Computed exactly by torch, with one warning. Not with is_causal or
            return_lse.
        smooth_k: Subtract the mean over tokens from k before quantising. Softmax is the same.
        **unknown: Refused. sageattention ignores what it does not know, masks among it.

    Returns:
        The attention, shape and dtype of q; with return_lse also the natural logarithm of the sum
        of exponentials, fp32 [B, H, Nq].

    Raises:
        ConfigError: An unknown keyword or layout.
        OpError: What is given does not fit together (`ShapeError`, `DTypeError`, `MaskError`).
    """
    if unknown:
        raise ConfigError(
            f"keyword {next(iter(unknown))!r} of sageattn",
            expected="one of " + ", ".join(_KEYWORDS),
            got=", ".join(unknown),
            remedy="Choose kernels and precision with patch_model or ops.attention_skip",
        )
    check_choice("tensor_layout", tensor_layout, ("HND", "NHD"))
    for name, flag in (("is_causal", is_causal), ("return_lse", return_lse)):
        if not isinstance(flag, bool):
            raise ConfigError(name, expected="True or False", got=repr(flag))
    heads_at, tokens_at = (1, 2) if tensor_layout == "HND" else (2, 1)
    _check(q, k, v, heads_at)
    batch, heads, n_kv = q.shape[0], q.shape[heads_at], k.shape[tokens_at]
    if is_causal and q.shape[tokens_at] != n_kv:
        raise MaskError(
            "is_causal=True",
            expected="as many queries as keys",
            got=f"{q.shape[tokens_at]} and {n_kv}",
            remedy="Pass the mask you mean as attn_mask",
        )
    if attn_mask is not None and (is_causal or return_lse):
        raise MaskError(
            "attn_mask",
            expected="neither is_causal nor return_lse beside a mask",
            got=f"is_causal={is_causal}, return_lse={return_lse}",
        )
    if k.shape[heads_at] != heads:
        groups = heads // k.shape[heads_at]
        k, v = (x.repeat_interleave(groups, dim=heads_at) for x in (k, v))

    # Contiguous heads are read in place as samples of one head. A tensor of another layout is
    # read as [B, N, H*D], which is in place for NHD and for its transposed views.
    alone = (
        tensor_layout == "HND" and attn_mask is None and all(x.is_contiguous() for x in (q, k, v))
    )
    if alone:
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    else:
        q, k, v = (_rows(x, heads_at) for x in (q, k, v))
    attention: Attention = "auto" if n_kv >= INT8_MIN_KEYS else "exact"
    spec = AttentionSpec(
        heads=1 if alone else heads,
        attention=attention,
        smooth_k=smooth_k,
        causal=is_causal,
        sm_scale=sm_scale,
    )
    lse = None
    if attn_mask is not None:
        if not torch.compiler.is_compiling():  # a warning would break the graph
            warnings.warn(MASK_WARNING, stacklevel=2)
        out = _masked(q, k, v, attn_mask, spec)
    elif return_lse:
        out, lse = attention_lse(q, k, v, spec)
    else:
        out = attention_skip(q, k, v, spec)
    if alone:
        out = out.view(batch, heads, *out.shape[1:])
        lse = None if lse is None else lse.view(batch, heads, lse.shape[1] * lse.shape[2])
    else:
        out = out.view(batch, out.shape[1], heads, out.shape[2] // heads)
        out = out.transpose(1, 2) if tensor_layout == "HND" else out
    return out if lse is None else (out, lse)


def _masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, spec: AttentionSpec) -> Tensor:
    """softmax(sm_scale * q k^T + mask) v by torch, over [B, N, H*D]."""
    shape = (q.shape[0], spec.heads, q.shape[1], k.shape[1])
    check_tensor("attn_mask", mask)
    if mask.dtype != torch.bool and not mask.dtype.is_floating_point:
        raise MaskError("attn_mask", expected="a boolean or float dtype", got=str(mask.dtype))
    if not 2 <= mask.dim() <= 4 or not broadcasts(mask.shape, shape[-mask.dim() :]):
        raise MaskError(
            "attn_mask",
            expected=f"a shape that broadcasts to {list(shape)}",
            got=str(list(mask.shape)),
        )
    # Whole rows: torch's backends on a GPU refuse a row of one value, or read past it.
    mask = (mask if mask.dtype == torch.bool else mask.to(q.dtype)).expand(
        *mask.shape[:-1], k.shape[1]
    )
    scale = spec.scale_of(q.shape[2] // spec.heads)
    q, k, v = (aligned(apart(split_heads(x, spec.heads))) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.contiguous(), scale=scale)
    return out.transpose(1, 2).flatten(2)


def _rows(x: Tensor, heads_at: int) -> Tensor:
    """[B, N, H*D], a view where the strides allow it."""
    return (x.transpose(1, 2) if heads_at == 1 else x).flatten(2)


def _check(q: Tensor, k: Tensor, v: Tensor, heads_at: int) -> None:
    """Shapes with heads; what is the same for every layout is checked by the operations."""
    tokens_at = 3 - heads_at
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
        if x.dim() != 4:
            raise ShapeError(name, expected="four dimensions", got=str(list(x.shape)))
        if not x.shape[heads_at] or not x.shape[tokens_at] or not x.shape[3]:
            raise ShapeError(
                name, expected="at least one head, token and channel", got=str(list(x.shape))
            )
    if k.shape != v.shape or k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3]:
        raise ShapeError(
            "k and v",
            expected=f"the same shape, {q.shape[0]} samples and {q.shape[3]} channels, as q",
            got=f"{list(k.shape)} and {list(v.shape)}",
        )
    if q.shape[heads_at] % k.shape[heads_at]:
        raise ShapeError(
            "q",
            expected=f"a multiple of the {k.shape[heads_at]} heads of k",
            got=f"{q.shape[heads_at]} heads",
        )
