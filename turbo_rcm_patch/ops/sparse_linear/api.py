"""Sparse-linear attention: a softmax over few blocks of keys, plus a projected linear attention
over all of them.

    softmax over chosen blocks(q k^T) v + proj_l(phi(q) (phi(k)^T v) / (phi(q) · sum phi(k)))

The sum is a skip before the output projection, closed in the attention kernel. This is the
inference of SLA (arXiv 2509.24006) and of SageSLA in thu-ml/TurboDiffusion (arXiv 2512.16093).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import Tensor

from turbo_rcm_patch.config import is_number
from turbo_rcm_patch.errors import ConfigError, ShapeError
from turbo_rcm_patch.ops.attention.api import prepared
from turbo_rcm_patch.ops.attention.reference import split_heads
from turbo_rcm_patch.ops.attention.spec import AttentionSpec
from turbo_rcm_patch.ops.checks import (
    check_attention,
    check_float,
    check_norm,
    check_out_dtype,
    check_same_device,
    rotary_parts,
)
from turbo_rcm_patch.ops.dispatch import choose_inputs
from turbo_rcm_patch.ops.formats import QMAX, AttentionInputs
from turbo_rcm_patch.ops.register import Operation, flattened, refuse_gradient

#: Largest head_dim: the linear branch holds a [head_dim, head_dim] matrix in registers.
MAX_SPARSE_HEAD_DIM: Final = 128

#: Sizes that a block of queries or keys may have, in tokens.
SPARSE_BLOCKS: Final = (32, 64, 128)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sparsity:
    """The choice of key blocks for the softmax: their share and their size.

    Attributes:
        topk: Share of the key blocks, in (0, 1]; at least one block is seen.
        block_q: Number of queries that see the same blocks: 32, 64 or 128.
        block_k: Number of keys in a block: 32, 64 or 128.
    """

    topk: float
    block_q: int = 128
    block_k: int = 64

    def __post_init__(self) -> None:
        if not is_number(self.topk) or not 0.0 < self.topk <= 1.0:
            raise ConfigError("Sparsity.topk", expected="a share in (0, 1]", got=repr(self.topk))
        for field in ("block_q", "block_k"):
            if getattr(self, field) not in SPARSE_BLOCKS:
                raise ConfigError(
                    f"Sparsity.{field}",
                    expected=f"one of {SPARSE_BLOCKS}",
                    got=repr(getattr(self, field)),
                )

    @classmethod
    def sage(cls, topk: float, device: torch.device) -> Sparsity:
        """Return SageSLA's sparsity on a device, with its blocks for NVIDIA's GPUs.

        They are 64 queries and 128 keys on Hopper (sm_90), and 128 and 64 elsewhere. SageSLA's
        other blocks on ROCm are not known here.
        """
        hopper = (
            device.type == "cuda"
            and torch.version.hip is None
            and torch.cuda.get_device_capability(device) == (9, 0)
        )
        return cls(topk=topk, block_q=64 if hopper else 128, block_k=128 if hopper else 64)

    def count(self, n_kv: int) -> int:
        """Return the number of blocks that a query sees of n_kv keys: rounded down, at least 1."""
        return max(1, int(self.topk * -(-n_kv // self.block_k)))


#: The arguments of the schema: fields of an attention, the projection, and the choice of keys.
_ORDER: Final = (
    "q", "k", "v", "weight", "bias", "norm_q", "norm_k", "cos", "sin", "heads", "attention", "pv",
    "smooth_k", "sm_scale", "eps", "count", "block_q", "block_k", "impl", "out_dtype",
)  # fmt: skip
_GEOMETRY: Final = {"count": int, "block_q": int, "block_k": int}
#: The other fields of an attention: no skip, no mask.
_PLAIN: Final = dict.fromkeys(AttentionInputs._fields) | {
    "c_skip_value": 1.0, "c_out_value": 1.0, "causal": False, "want_lse": False,
}  # fmt: skip


@flattened(_ORDER, Tensor, AttentionInputs, {"weight": Tensor, "bias": Tensor | None}, _GEOMETRY)
def _forward(*args: Any) -> Tensor:
    given = dict(zip(_ORDER, args, strict=True))
    weight, bias = given.pop("weight"), given.pop("bias")
    geometry = {name: given.pop(name) for name in _GEOMETRY}
    if given["attention"] == "auto":  # there is no exact sparse kernel
        given["attention"] = "int8"
    fields: Any = _PLAIN | given
    a = choose_inputs(AttentionInputs(**fields))
    if a.attention in QMAX and a.impl == "triton":
        from turbo_rcm_patch.ops.sparse_linear.triton import (
            sparse_linear_attention as launch,
        )

        return launch(a, weight, bias, **geometry)
    from turbo_rcm_patch.ops.sparse_linear import reference

    dtype = a.q.dtype
    qh, kh = (x.to(dtype) for x in prepared(a))
    vh = split_heads(a.v, a.heads)
    out = torch.empty(qh.shape, dtype=a.out_dtype, device=a.q.device)
    count = geometry.pop("count")
    for head in range(a.heads):  # One at a time, because all of a video's in fp32 take gigabytes.
        one = slice(head, head + 1)
        qf, kf, vf = (x[:, one].float() for x in (qh, kh, vh))
        blocks = reference.block_map(qf, kf, count=count, dtype=dtype, **geometry)
        if a.attention == "exact":
            sparse = reference.exact_sparse_attention(
                qf, kf, vf, blocks, sm_scale=a.sm_scale, **geometry
            )
        else:
            sparse = reference.emulated_sparse_attention(
                qf, kf, vf, blocks, sm_scale=a.sm_scale, pv=cast("Any", a.pv),
                qmax=QMAX[a.attention], smooth_k=a.smooth_k, **geometry,
            )  # fmt: skip
        out[:, one] = sparse + reference.linear_branch(qf, kf, vf, weight, bias, dtype=dtype)
    return out.transpose(1, 2).flatten(2)


def _fake(q: Tensor, *args: Any) -> Tensor:
    return q.new_empty(q.shape, dtype=args[-1])


sparse_linear_operation = Operation("sparse_linear_attention", _forward, _fake)


def sparse_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    spec: AttentionSpec,
    sparsity: Sparsity,
    *,
    norm_q: Tensor | None = None,
    norm_k: Tensor | None = None,
    rotary: tuple[Tensor, Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Add softmax attention over chosen key blocks and proj_l(linear attention over all keys).

    A block of queries sees the `sparsity.count(Nk)` key blocks whose means have the largest
    products with its own mean. The feature map phi of the linear branch is the softmax over the
    channels of a head. proj_l is one Linear over the channels of a head, shared by all heads. q
    and k are normalised and rotated in fp32 and rounded to their dtype once. Between the quantised
    or 16-bit matrix products everything is fp32, and the sum is rounded once.

    Args:
        q: [B, Nq, H*D], bf16, fp16 or fp32, D up to 128.
        k: [B, Nk, H*D], dtype of q.
        v: [B, Nk, H*D], dtype of q.
        weight: [D, D] of proj_l, any of these dtypes.
        bias: [D] or None.
        spec: How the sparse part is computed: attention="int8" or "int4"; "exact" is plain torch
            on every device, for comparison. causal=True is not supported.
        sparsity: The choice of key blocks for the softmax.
        norm_q: RMSNorm weight of q: [H*D] normalises across all heads, [D] per head.
        norm_k: RMSNorm weight of k, as norm_q.
        rotary: (cos, sin) as in `attention_skip`.
        out_dtype: dtype of the result; q's by default.

    Returns:
        [B, Nq, H*D], contiguous.

    Raises:
        ConfigError: The sparse kernels do not support what `spec` asks for.
        GradientError: A gradient is wanted.
        ShapeError: D is over 128, or shapes do not fit together.
    """
    check_attention(q, k, v, spec)
    if spec.attention == "sage" or spec.causal or (spec.sm_scale or 0.0) < 0.0:
        raise ConfigError(
            "spec of sparse_linear_attention",
            expected='attention="int8", "int4" or "exact", causal=False, sm_scale of at least 0 '
            "(the best blocks of keys are those with the largest products)",
            got=f"attention={spec.attention!r}, causal={spec.causal}, sm_scale={spec.sm_scale}",
        )
    batch, n_q, channels = q.shape
    dim = channels // spec.heads
    if dim > MAX_SPARSE_HEAD_DIM:
        raise ShapeError("head_dim", expected=f"at most {MAX_SPARSE_HEAD_DIM}", got=str(dim))
    _check_proj_l(q, weight, bias, dim)
    check_norm("norm_q", norm_q, None, channels, spec.heads)
    check_norm("norm_k", norm_k, None, channels, spec.heads)
    cos, sin = rotary_parts(rotary, n_q, k.shape[1], dim)
    check_out_dtype(out_dtype)
    check_same_device(q.device, norm_q=norm_q, norm_k=norm_k, cos=cos, sin=sin)
    refuse_gradient("sparse_linear_attention", (q, k, v, weight, bias, norm_q, norm_k, cos, sin))
    if not batch:
        return q.new_empty(q.shape, dtype=q.dtype if out_dtype is None else out_dtype)
    out: Tensor = sparse_linear_operation(
        q, k, v, weight, bias, norm_q, norm_k, cos, sin, spec.heads, spec.attention, spec.pv,
        spec.smooth_k, spec.scale_of(dim), spec.eps, sparsity.count(k.shape[1]), sparsity.block_q,
        sparsity.block_k, spec.impl, q.dtype if out_dtype is None else out_dtype,
    )  # fmt: skip
    return out


def _check_proj_l(q: Tensor, weight: Tensor, bias: Tensor | None, dim: int) -> None:
    for name, x, shape in (("weight", weight, (dim, dim)), ("bias", bias, (dim,))):
        if x is None:
            continue
        check_float(name, x)
        if tuple(x.shape) != shape or x.device != q.device:
            raise ShapeError(
                f"{name} of proj_l",
                expected=f"{list(shape)} on {q.device}",
                got=f"{list(x.shape)} on {x.device}",
            )
