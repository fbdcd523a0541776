"""The functions of the `sageattention` package (2.x), computed by our kernels.

    from turbo_rcm_patch import sageattn
    F.scaled_dot_product_attention = sageattn        # sageattention's own recipe

`from turbo_rcm_patch.ops import sageattn as sageattention` gives the other names that callers
import: `sageattn_varlen` and `sageattn_qk_int8_pv_*`.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Final, Literal, overload

import torch
from torch import Tensor

# By name: a caller may put `sageattn` in the place of the one in `torch.nn.functional`.
from torch.nn.functional import scaled_dot_product_attention

from turbo_rcm_patch.config import Attention, PVDType, check_choice, is_number
from turbo_rcm_patch.errors import ConfigError, MaskError, ShapeError
from turbo_rcm_patch.ops.attention.api import attend_checked
from turbo_rcm_patch.ops.attention.reference import (
    aligned_to_16_bytes,
    without_overlap,
)
from turbo_rcm_patch.ops.attention.spec import MAX_HEAD_DIM, AttentionSpec
from turbo_rcm_patch.ops.checks import broadcasts, check_tensor
from turbo_rcm_patch.ops.dispatch import INT8_MIN_KEYS
from turbo_rcm_patch.ops.formats import AttentionInputs

__all__ = [
    "sageattn",
    "sageattn_qk_int8_pv_fp8_cuda",
    "sageattn_qk_int8_pv_fp8_cuda_sm90",
    "sageattn_qk_int8_pv_fp16_cuda",
    "sageattn_qk_int8_pv_fp16_triton",
    "sageattn_varlen",
]

Layout = Literal["HND", "NHD"]
Result = Tensor | tuple[Tensor, Tensor]

#: Python shows a warning once for each place it comes from.
TORCH_WARNING: Final = "this attention runs exactly, through torch, because of {}"
#: A reason of `reason_for_torch`.
MASK: Final = "a mask"
#: Keywords that callers of sageattention and of torch's attention pass, and the values that change
#: nothing here: scales are per block of tokens, sums are fp32, and grouped queries always work.
_NEUTRAL: Final[dict[str, tuple[object, ...]]] = {
    "enable_gqa": (False, True),
    "pv_accum_dtype": ("fp32", "fp16", "fp16+fp32", "fp32+fp16", "fp32+fp32"),
    "qk_quant_gran": ("per_thread", "per_warp"),
    "quantization_backend": ("triton", "cuda"),
    "smooth_v": (False,),
}
_KEYWORDS: Final = (
    "tensor_layout, is_causal, sm_scale, return_lse, attn_mask, dropout_p, smooth_k, scale"
)


@overload
def sageattn(
    q: Tensor, k: Tensor, v: Tensor, tensor_layout: Layout | None = ..., is_causal: bool = ...,
    sm_scale: float | None = ..., return_lse: Literal[False] = ..., *,
    attn_mask: Tensor | None = ..., smooth_k: bool = ..., scale: float | None = ...,
    **neutral: object,
) -> Tensor: ...  # fmt: skip
@overload
def sageattn(
    q: Tensor, k: Tensor, v: Tensor, tensor_layout: Layout | None = ..., is_causal: bool = ...,
    sm_scale: float | None = ..., return_lse: bool = ..., *,
    attn_mask: Tensor | None = ..., smooth_k: bool = ..., scale: float | None = ...,
    **neutral: object,
) -> Result: ...  # fmt: skip
def sageattn(
    q: Tensor | None = None,
    k: Tensor | None = None,
    v: Tensor | None = None,
    tensor_layout: Layout | None = "HND",
    is_causal: bool = False,
    sm_scale: float | None = None,
    return_lse: bool = False,
    *,
    attn_mask: Tensor | None = None,
    smooth_k: bool = True,
    scale: float | None = None,
    **neutral: object,
) -> Result:
    """Compute softmax(sm_scale * q k^T) v, in place of `sageattention.sageattn`.

    q and k run in int8 from 6,144 queries and keys on (on a CPU, and with return_lse, from 1,024
    keys on), else exactly. What torch's attention takes and our kernels do not is computed by
    torch, with one warning: masks, dropout, fp64, other numbers of dimensions, wider heads, shapes
    that broadcast. So it can take the place of torch's function, also in torch's order of
    arguments. Inputs are never written to. A gradient of an attention that our kernels compute is
    refused.

    Args:
        q: "HND": [B, H, Nq, D]; "NHD": [B, Nq, H, D]. For our kernels bf16, fp16 or fp32, and D up
            to 256.
        k: "HND": [B, Hk, Nk, D]; "NHD": [B, Nk, Hk, D]. dtype of q. H is a multiple of Hk; each
            head of k and v then serves H / Hk neighbouring heads of q and is copied for them.
        v: As k.
        tensor_layout: "HND" or "NHD"; None is "HND".
        is_causal: Query i sees keys 0..i. 0 and 1 are taken too.
        sm_scale: Factor on the logits, D ** -0.5 by default.
        return_lse: Also return the logsumexp of the logits. The seventh positional argument, as in
            sageattention 2.x; in 1.x that place was `smooth_k`, which is a keyword here.
        attn_mask: Broadcasts to [B, H, Nq, Nk]; boolean (true where a query sees a key) or added
            to the logits. Computed by torch. Not with return_lse.
        smooth_k: Subtract the mean over tokens from k before quantising. Softmax is the same.
        scale: torch's name of sm_scale. q, k and v also go by torch's names query, key and value.
        **neutral: dropout_p is torch's. enable_gqa, pv_accum_dtype, qk_quant_gran,
            quantization_backend and smooth_v=False are taken and change nothing. Other values and
            names are refused.

    Returns:
        The attention, contiguous, shape and dtype of q; with return_lse also the natural logarithm
        of the sum of exponentials, fp32 [B, H, Nq].

    Raises:
        ConfigError: An unknown keyword, or a value that would change the result.
        OpError: The arguments do not fit together (`ShapeError`, `DTypeError`, `MaskError`).
    """
    arguments = in_our_order(
        q=q, k=k, v=v, tensor_layout=tensor_layout, is_causal=is_causal, sm_scale=sm_scale,
        return_lse=return_lse, attn_mask=attn_mask, smooth_k=smooth_k, scale=scale, **neutral,
    )  # fmt: skip
    return _sage("auto", **arguments)


def in_our_order(**arguments: Any) -> dict[str, Any]:
    """Return the arguments of `sageattn` without torch's names and torch's order.

    Torch's order after q, k and v is attn_mask, dropout_p (a float) and is_causal (a bool).
    """
    for name, of_torch in (("q", "query"), ("k", "key"), ("v", "value")):
        if arguments[name] is None:
            arguments[name] = arguments.pop(of_torch, None)
    first, second, third = (arguments[name] for name in ("tensor_layout", "is_causal", "sm_scale"))
    if isinstance(first, Tensor):
        arguments |= {"tensor_layout": None, "attn_mask": first}
    if arguments["tensor_layout"] is None:
        if type(second) is not bool and second != 1:
            arguments |= {"is_causal": False, "dropout_p": second}
        if type(third) is bool:
            arguments |= {"is_causal": third, "sm_scale": None}
    scale = arguments.pop("scale", None)
    if scale is not None:
        if arguments["sm_scale"] is not None:
            raise ConfigError("scale", expected="one of scale and sm_scale", got="both")
        arguments["sm_scale"] = scale
    return arguments


#: Defaults of the arguments of sageattention's functions after q, k and v.
_DEFAULTS: Final[dict[str, object]] = {
    "tensor_layout": "HND", "is_causal": False, "sm_scale": None, "return_lse": False,
    "attn_mask": None, "smooth_k": True, "smooth_v": False, "qk_quant_gran": "per_thread",
    "pv_accum_dtype": "fp32", "quantization_backend": "triton",
}  # fmt: skip
_OF_TRITON: Final = (
    "tensor_layout", "quantization_backend", "is_causal", "attn_mask", "sm_scale", "smooth_k",
    "return_lse",
)  # fmt: skip
_OF_SM90: Final = (
    "tensor_layout", "is_causal", "qk_quant_gran", "sm_scale", "pv_accum_dtype", "smooth_k",
    "return_lse",
)  # fmt: skip
_OF_CUDA: Final = (*_OF_SM90[:-1], "smooth_v", "return_lse")


def _variant(
    name: str, text: str, order: tuple[str, ...], *, pv: PVDType = "auto"
) -> Callable[..., Result]:
    """Make the function of one of sageattention's kernels.

    Args:
        name: Its name.
        text: How it differs from `sageattn`.
        order: Its arguments after q, k and v, in sageattention's order.
        pv: Type of p and v.
    """
    kind, names = inspect.Parameter, ("q", "k", "v", *order)
    parameters = [
        kind(x, kind.POSITIONAL_OR_KEYWORD, default=_DEFAULTS.get(x, kind.empty)) for x in names
    ]
    rest = kind("neutral", kind.VAR_KEYWORD)

    def call(*args: Any, **named: Any) -> Result:
        if len(args) > len(names):
            raise TypeError(f"{name}() takes {len(names)} positional arguments; got {len(args)}")
        positional = dict(zip(names, args, strict=False))
        return _sage(pv, **positional, **named)

    public: Any = call
    public.__name__ = public.__qualname__ = name
    public.__doc__ = f"Compute `sageattn`{text}. The order of arguments is sageattention's."
    public.__signature__ = inspect.Signature([*parameters, rest])
    return call


sageattn_qk_int8_pv_fp16_triton = _variant(
    "sageattn_qk_int8_pv_fp16_triton", " with p and v in fp16", _OF_TRITON, pv="fp16"
)
sageattn_qk_int8_pv_fp16_cuda = _variant(
    "sageattn_qk_int8_pv_fp16_cuda", " with p and v in fp16", _OF_CUDA, pv="fp16"
)
_FP8: Final = (
    ": p and v in fp8 from 4,096 keys on (Hopper: 12,288) where the device has it, else in bf16"
)
sageattn_qk_int8_pv_fp8_cuda = _variant("sageattn_qk_int8_pv_fp8_cuda", _FP8, _OF_CUDA)
sageattn_qk_int8_pv_fp8_cuda_sm90 = _variant("sageattn_qk_int8_pv_fp8_cuda_sm90", _FP8, _OF_SM90)


def sageattn_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    is_causal: bool = False,
    sm_scale: float | None = None,
    smooth_k: bool = True,
    **neutral: object,
) -> Tensor:
    """Compute `sageattn` for each of several sequences that are packed into one tensor.

    Args:
        q: [sum of Nq, H, D].
        k: [sum of Nk, Hk, D].
        v: As k.
        cu_seqlens_q: int32 or int64 [sequences + 1], where each sequence of q begins and the last
            one ends. Its values are read, which waits for the device.
        cu_seqlens_k: The same for k and v.
        max_seqlen_q: Not needed here.
        max_seqlen_k: Not needed here.
        is_causal: See `sageattn`.
        sm_scale: See `sageattn`.
        smooth_k: See `sageattn`.
        **neutral: See `sageattn`.

    Returns:
        [sum of Nq, H, D], dtype of q.

    Raises:
        ConfigError: See `sageattn`.
        OpError: See `sageattn`; `ShapeError` where the lengths do not end with the tokens.
    """
    bounds_q, bounds_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    if len(bounds_q) != len(bounds_k) or (bounds_q[-1], bounds_k[-1]) != (len(q), len(k)):
        raise ShapeError(
            "cu_seqlens_q and cu_seqlens_k",
            expected=f"as many sequences of q as of k, up to {len(q)} and {len(k)} tokens",
            got=f"{bounds_q} and {bounds_k}",
        )
    out = torch.empty_like(q)
    for (q0, q1), (k0, k1) in zip(pairwise(bounds_q), pairwise(bounds_k), strict=True):
        if q1 > q0:
            sequence = (q[None, q0:q1], k[None, k0:k1], v[None, k0:k1])
            options: Any = neutral
            out[q0:q1] = _sage(
                "auto", *sequence, tensor_layout="NHD", is_causal=is_causal, sm_scale=sm_scale,
                smooth_k=smooth_k, **options,
            )[0]  # fmt: skip
    return out


def _sage(
    pv: PVDType,
    /,
    q: Any,
    k: Any,
    v: Any,
    *,
    tensor_layout: Layout | None = "HND",
    is_causal: bool = False,
    sm_scale: float | None = None,
    return_lse: bool = False,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    smooth_k: bool = True,
    **neutral: object,
) -> Result:
    """Check the arguments of a call in sageattention's form, and compute it."""
    _check_options(neutral, is_causal, return_lse)
    layout = "HND" if tensor_layout is None else tensor_layout
    check_choice("tensor_layout", layout, ("HND", "NHD"))
    heads_at, tokens_at = (1, 2) if layout == "HND" else (2, 1)
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
    if attn_mask is not None and return_lse:
        raise MaskError("attn_mask", expected="no mask", got=f"{return_lse=}")
    options: Any = {"mask": attn_mask, "causal": bool(is_causal), "sm_scale": sm_scale}
    options["dropout_p"] = dropout_p
    reason = reason_for_torch(q, k, v, layout, **options)
    if reason is not None and not return_lse:
        options["enable_gqa"] = bool(neutral.get("enable_gqa"))
        out = _through_torch(q, k, v, layout, **options)
        if not torch.compiler.is_compiling():  # A compiled graph would break here.
            warnings.warn(TORCH_WARNING.format(reason), stacklevel=3)
        return out
    _check_shapes(q, k, v, heads_at)
    n_q, n_kv = q.shape[tokens_at], k.shape[tokens_at]
    if is_causal and n_q != n_kv:
        raise MaskError(
            "is_causal=True with return_lse",
            expected="as many queries as keys",
            got=f"{n_q} and {n_kv}",
        )
    attention: Attention = "auto" if n_kv >= INT8_MIN_KEYS else "exact"
    spec = AttentionSpec(
        heads=q.shape[heads_at], attention=attention, pv=pv, smooth_k=smooth_k,
        causal=bool(is_causal), sm_scale=sm_scale,
    )  # fmt: skip
    out, lse = attention_of_heads(q, k, v, layout, spec, want_lse=bool(return_lse))
    return out if lse is None else (out, lse)


def attention_of_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    spec: AttentionSpec,
    *,
    kv_lengths: Tensor | None = None,
    want_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Compute the attention of tensors whose heads have a dimension, without checking them.

    Contiguous heads are read in place, as samples of one head. A tensor of another layout is read
    as [B, N, H*D], which is in place for NHD and for its transposed views.

    Args:
        q: As in `sageattn`.
        k: As in `sageattn`; fewer heads are copied.
        v: As k.
        layout: "HND" or "NHD".
        spec: How the attention is computed, for the heads of q.
        kv_lengths: int32 [B]: how many keys each sample has.
        want_lse: Return the logsumexp.

    Returns:
        The attention, contiguous, and its logsumexp fp32 [B, H, Nq] or None.
    """
    heads_at = 1 if layout == "HND" else 2
    batch, heads = q.shape[0], spec.heads
    if k.shape[heads_at] != heads:
        groups = heads // k.shape[heads_at]
        k, v = (x.repeat_interleave(groups, dim=heads_at) for x in (k, v))
    by_head = layout == "HND" and all(x.is_contiguous() for x in (q, k, v))
    if by_head:
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        spec = replace(spec, heads=1)
        if kv_lengths is not None:
            kv_lengths = kv_lengths.repeat_interleave(heads)
    else:
        q, k, v = ((x.transpose(1, 2) if layout == "HND" else x).flatten(2) for x in (q, k, v))
    out, logsumexp = attend_checked(
        AttentionInputs(q, k, v, spec, q.dtype, kv_lengths=kv_lengths, want_lse=want_lse)
    )
    lse = logsumexp if want_lse else None
    if by_head:
        out = out.view(batch, heads, *out.shape[1:])
        lse = None if lse is None else lse.view(batch, heads, lse.shape[1] * lse.shape[2])
    else:
        out = out.view(batch, out.shape[1], heads, out.shape[2] // heads)
        # sageattention writes HND results contiguous, and callers take views of them.
        out = out.transpose(1, 2).contiguous() if layout == "HND" else out
    return out, lse


def reason_for_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: str,
    *,
    mask: object = None,
    causal: bool = False,
    sm_scale: Any = None,
    dropout_p: float = 0.0,
) -> str | None:
    """Return why torch computes an attention, or None if our kernels do or nothing takes it."""
    if mask is not None:
        return MASK
    if dropout_p:
        return "dropout"
    if is_number(sm_scale) and sm_scale <= 0.0:
        return "a factor on the logits that is not over 0"
    rank = q.dim()
    if rank < 2 or not rank == k.dim() == v.dim():
        return None
    if q.dtype == k.dtype == v.dtype == torch.float64:
        return "fp64"
    if rank != 4:
        return f"tensors of {rank} dimensions" if layout == "HND" else None
    return _reason_of_shapes(*(_heads_first(x, layout).shape for x in (q, k, v)), causal=causal)


def _reason_of_shapes(
    q: Sequence[int], k: Sequence[int], v: Sequence[int], *, causal: bool
) -> str | None:
    """Return `reason_for_torch` of shapes [B, H, N, D]."""
    if q[3] != k[3] or k[2] != v[2]:
        return None
    if 0 in q[1:] or 0 in k[1:]:
        return "an empty tensor" if q[:2] == k[:2] == v[:2] else None
    if q[3] > MAX_HEAD_DIM:
        return f"heads of more than {MAX_HEAD_DIM} channels"
    if q[0] != k[0] or k[:2] != v[:2] or k[3] != v[3]:
        # Batches broadcast. So do heads, or each head of k or v serves several of q.
        batches = all(1 in (q[0], x[0]) or x[0] == q[0] for x in (k, v))
        return "shapes that differ" if batches else None
    return "a causal mask over other lengths" if causal and q[2] != k[2] else None


def _heads_first(x: Tensor, layout: str) -> Tensor:
    """Return a tensor of a layout as HND, or HND as the layout."""
    return x if layout == "HND" else x.transpose(1, 2)


def _through_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    *,
    mask: Tensor | None,
    dropout_p: float,
    causal: bool,
    sm_scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """Compute an attention by torch."""
    if q.dim() == 4:
        q, k, v = (_heads_first(x, layout) for x in (q, k, v))
        # Not every backend of torch takes fewer heads.
        k, v = (
            x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)
            if 1 < x.shape[1] < q.shape[1] and q.shape[1] % x.shape[1] == 0 else x
            for x in (k, v)
        )  # fmt: skip
    if mask is not None:
        mask = _whole_rows(mask, q, k)
    q, k, v = (aligned_to_16_bytes(without_overlap(x)) for x in (q, k, v))
    out = scaled_dot_product_attention(
        q, k, v, mask, dropout_p, causal, scale=sm_scale, enable_gqa=enable_gqa
    )
    return (_heads_first(out, layout) if q.dim() == 4 else out).contiguous()


def _whole_rows(mask: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Check a mask for q [..., Nq, D] and k [..., Nk, D], and return it with rows of Nk values.

    torch's backends on a GPU refuse a row of one value, or read past it.
    """
    shape = (*q.shape[:-1], k.shape[-2])
    check_tensor("attn_mask", mask)
    if mask.dtype != torch.bool and not mask.dtype.is_floating_point:
        raise MaskError("attn_mask", expected="a boolean or float dtype", got=str(mask.dtype))
    if not 2 <= mask.dim() <= q.dim() or not broadcasts(mask.shape, shape[-mask.dim() :]):
        raise MaskError(
            "attn_mask",
            expected=f"a shape that broadcasts to {list(shape)}",
            got=str(list(mask.shape)),
        )
    mask = mask if mask.dtype == torch.bool else mask.to(q.dtype)
    return mask.expand(*mask.shape[:-1], shape[-1]).contiguous()


def _check_options(neutral: dict[str, object], is_causal: object, return_lse: object) -> None:
    """Check the keywords that change nothing, and two flags."""
    for name, value in neutral.items():
        if name not in _NEUTRAL:
            raise ConfigError(
                f"keyword {name!r} of sageattn",
                expected=f"one of {_KEYWORDS}, {', '.join(_NEUTRAL)}",
                got=f"{name}={value!r}",
                remedy="Choose kernels and precision with patch_model or ops.attention_skip",
            )
        if value not in _NEUTRAL[name]:
            raise ConfigError(
                f"{name} of sageattn",
                expected=" or ".join(map(repr, _NEUTRAL[name])),
                got=repr(value),
                remedy="Use torch's scaled_dot_product_attention for this call",
            )
    for name, flag in (("is_causal", is_causal), ("return_lse", return_lse)):
        if not isinstance(flag, (bool, int, float)) or flag not in (0, 1):
            raise ConfigError(name, expected="True or False", got=repr(flag))


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, heads_at: int) -> None:
    """Check shapes with heads; the operations check the rest."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4 or not x.shape[heads_at] or not x.shape[3]:
            raise ShapeError(
                name,
                expected="four dimensions, at least one head and channel",
                got=str(list(x.shape)),
            )
    heads = q.shape[heads_at]
    if k.shape != v.shape or heads % k.shape[heads_at]:
        raise ShapeError(
            "k and v",
            expected=f"the same shape, with heads that divide the {heads} of q",
            got=f"{list(k.shape)} and {list(v.shape)}",
        )
