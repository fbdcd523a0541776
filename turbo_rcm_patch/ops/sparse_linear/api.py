"""Sparse-linear attention: a softmax over few blocks of keys, plus a projected linear attention
over all of them.

    softmax over chosen blocks(q k^T) v + proj_l(phi(q) (phi(k)^T v) / (phi(q) · sum phi(k)))

The sum is a skip before the output projection, closed in the attention kernel. This is the
inference of SLA (arXiv 2509.24006) and of SageSLA in thu-ml/TurboDiffusion (arXiv 2512.16093).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import torch
from torch import Tensor

from turbo_rcm_patch.config import check_fields, is_number
from turbo_rcm_patch.errors import ConfigError, ShapeError
from turbo_rcm_patch.ops.attention.api import checked, prepared, quantize, tensors_of
from turbo_rcm_patch.ops.attention.reference import split_heads
from turbo_rcm_patch.ops.attention.spec import AttentionSpec
from turbo_rcm_patch.ops.checks import check_same_device, check_shape
from turbo_rcm_patch.ops.dispatch import Implementation, always, capability_of, choose, resolved
from turbo_rcm_patch.ops.formats import NO_NORMS, QMAX, AttentionInputs, Norms, Rotary
from turbo_rcm_patch.ops.register import needs_registered, refuse_gradient, register
from turbo_rcm_patch.ops.replay import replayed
from turbo_rcm_patch.ops.sparse_linear import reference

if TYPE_CHECKING:
    from turbo_rcm_patch.ops.launch import Target
    from turbo_rcm_patch.ops.sparse_linear.key_sums import KeySums
    from turbo_rcm_patch.ops.sparse_linear.triton import LinearBranch

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
        check_fields(self, dict.fromkeys(("block_q", "block_k"), SPARSE_BLOCKS))

    @classmethod
    def sage(cls, topk: float, device: torch.device) -> Sparsity:
        """Return SageSLA's sparsity on a device, with its blocks for NVIDIA's GPUs.

        They are 64 queries and 128 keys on Hopper (sm_90), and 128 and 64 elsewhere. SageSLA's
        other blocks on ROCm are not known here.
        """
        hopper = capability_of(device) == (9, 0)
        return cls(topk=topk, block_q=64 if hopper else 128, block_k=128 if hopper else 64)

    def count(self, n_kv: int) -> int:
        """Return the number of blocks that a query sees of n_kv keys: rounded down, at least 1."""
        return max(1, int(self.topk * -(-n_kv // self.block_k)))


class ProjL(NamedTuple):
    """The projection of the linear branch: weight [D, D] and bias [D] or None."""

    weight: Tensor
    bias: Tensor | None


# --- what blocks call ----------------------------------------------------------------------------


def attend_sparse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    spec: AttentionSpec,
    proj_l: tuple[Tensor, Tensor | None],
    sparsity: Sparsity,
    norms: Norms = NO_NORMS,
    rotary: Rotary | None = None,
) -> Tensor:
    """Compute `sparse_linear_attention` without its checks.

    Args:
        q: [B, Nq, H*D].
        k: [B, Nk, H*D].
        v: [B, Nk, H*D].
        spec: How the sparse part is computed; its eps is not read.
        proj_l: Weight [D, D] and bias [D].
        sparsity: The choice of key blocks.
        norms: RMSNorms of q and k.
        rotary: Rotary tables of q and k, or None.

    Returns:
        [B, Nq, H*D], dtype of q.
    """
    a = AttentionInputs(q, k, v, spec, q.dtype, norms, rotary)
    return (_registered if needs_registered(q) else _run)(a, ProjL(*proj_l), sparsity)


def _run(a: AttentionInputs, proj_l: ProjL, sparsity: Sparsity) -> Tensor:
    spec = a.spec
    if spec.attention == "auto":  # there is no exact sparse kernel
        spec = replace(spec, attention="int8")
    spec = resolved(spec, a.q.device, a.q.shape[1], a.k.shape[1])
    a = a._replace(spec=spec)
    if spec.attention in QMAX and spec.impl == "triton":
        return launch_sparse(a, proj_l, sparsity)
    return _in_torch(a, proj_l, sparsity)


def _empty(a: AttentionInputs, proj_l: ProjL, sparsity: Sparsity) -> Tensor:
    return a.q.new_empty(a.q.shape, dtype=a.out_dtype)


_registered = register(
    "sparse_linear_attention", _run, _empty, AttentionInputs, AttentionSpec, Norms, ProjL, Sparsity
)


def _in_torch(a: AttentionInputs, proj_l: ProjL, sparsity: Sparsity) -> Tensor:
    spec, dtype = a.spec, a.q.dtype
    count, block_q, block_k = sparsity.count(a.k.shape[1]), sparsity.block_q, sparsity.block_k
    qh, kh = (x.to(dtype) for x in prepared(a))
    vh = split_heads(a.v, spec.heads)
    out = torch.empty(qh.shape, dtype=a.out_dtype, device=a.q.device)
    of_keys: Any = {"sm_scale": a.sm_scale, "block_q": block_q, "block_k": block_k}
    for head in range(spec.heads):  # One at a time: all of a video's in fp32 take gigabytes.
        this_head = slice(head, head + 1)
        qf, kf, vf = (x[:, this_head].float() for x in (qh, kh, vh))
        chosen = reference.block_map(
            qf, kf, count=count, block_q=block_q, block_k=block_k, dtype=dtype
        )
        if spec.attention == "exact":
            sparse = reference.exact_sparse_attention(qf, kf, vf, chosen, **of_keys)
        else:
            sparse = reference.emulated_sparse_attention(
                qf, kf, vf, chosen, pv=cast("Any", spec.pv), qmax=QMAX[spec.attention],
                smooth_k=spec.smooth_k, **of_keys,
            )  # fmt: skip
        out[:, this_head] = sparse + reference.linear_branch(qf, kf, vf, *proj_l, dtype=dtype)
    return out.transpose(1, 2).flatten(2)


# --- which implementation runs -------------------------------------------------------------------


def _hopper() -> Callable[..., KeySums]:
    from turbo_rcm_patch.ops.sparse_linear.hopper import launch_key_sums

    return launch_key_sums


def _triton() -> Callable[..., KeySums]:
    from turbo_rcm_patch.ops.sparse_linear.triton import launch_key_sums

    return launch_key_sums


def _copied_on_hopper(target: Target, call: tuple[Tensor, Tensor, int, int]) -> bool:
    from turbo_rcm_patch.ops.launch import in_whole_copies

    k, v, heads, block_k = call  # k and v [B, N, H*D], with contiguous channels
    has_kernel = target == ("cuda", 90) and k.shape[2] // heads in (64, 128) and block_k >= 64
    # Within a chunk offsets have 32 bits.
    near = all(in_whole_copies(x) and x.stride(1) * x.shape[1] < 2**31 for x in (k, v))
    return has_kernel and near and k.dtype == v.dtype


#: The pass over the keys.
KERNELS: Final = (
    Implementation(
        "hopper", _copied_on_hopper,
        "sm_90, heads of 64 or 128, 16 bits in rows of whole copies of 16 bytes, blocks of 64 "
        "keys or more", _hopper, "linear branch",
    ),
    Implementation("triton", always, "everything else", _triton, "linear branch"),
)  # fmt: skip


@replayed
def launch_key_sums(k: Tensor, v: Tensor, k_mean: Tensor, *, heads: int, block_k: int) -> KeySums:
    """Run one pass over k and v [B, N, H*D]; k_mean [B, H, HEAD_PAD] in the dtype of k."""
    kernel = choose(KERNELS, k.device, (k, v, heads, block_k))
    return kernel(k, v, k_mean, heads=heads, block_k=block_k)


def launch_sparse(a: AttentionInputs, proj_l: ProjL, sparsity: Sparsity) -> Tensor:
    """Launch all kernels of a sparse-linear attention.

    Args:
        a: The attention, with "int8" or "int4", a pv other than "auto", RMSNorms or no norms, and
            no skip.
        proj_l: The projection of the linear branch.
        sparsity: The choice of key blocks.
    """
    from turbo_rcm_patch.ops.launch import dense_rows
    from turbo_rcm_patch.ops.sparse_linear import triton as kernels

    block_q, block_k = sparsity.block_q, sparsity.block_k
    # q and k are normalised and rotated once for all kernels that read them.
    q, k, q_pooled, k_sums = kernels.prepare_tokens(a, block_q)
    k_mean = (k_sums.sum(1) / k.shape[1]).to(k.dtype)
    a = a._replace(q=q, k=k, v=dense_rows(a.v), norms=NO_NORMS._replace(eps=0.0), rotary=None)
    sums = launch_key_sums(k, a.v, k_mean, heads=a.spec.heads, block_k=block_k)
    branch = kernels.linear_branch(sums, *proj_l, n_kv=k.shape[1], dtype=a.v.dtype)
    # Round at every step as the author's code does (thu-ml/TurboDiffusion, SLA/utils.py), because
    # the rounding decides among blocks whose scores are nearly equal.
    scores = torch.matmul(q_pooled, sums.k_pooled.transpose(-1, -2))
    lut = kernels.largest_scores(scores, sparsity.count(k.shape[1]))
    return _launch_attended(a, lut, branch, block_q=block_q, block_k=block_k)


@replayed
def _launch_attended(
    a: AttentionInputs, lut: Tensor, branch: LinearBranch, *, block_q: int, block_k: int
) -> Tensor:
    from turbo_rcm_patch.ops.sparse_linear import triton as kernels

    return kernels.launch_kernel(a, quantize(a), lut, branch, block_q=block_q, block_k=block_k)


# --- public function -----------------------------------------------------------------------------


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
    dtype = cast("Any", getattr(q, "dtype", None) if out_dtype is None else out_dtype)
    norms = Norms(norm_q, norm_k, eps=spec.eps)
    a = checked(AttentionInputs(q, k, v, spec, dtype, norms, rotary), "sparse_linear_attention")
    if spec.attention == "sage" or spec.causal:
        raise ConfigError(
            "spec of sparse_linear_attention",
            expected='attention="int8", "int4" or "exact", causal=False',
            got=f"attention={spec.attention!r}, causal={spec.causal}",
        )
    dim = a.head_dim
    if dim > MAX_SPARSE_HEAD_DIM:
        raise ShapeError("head_dim", expected=f"at most {MAX_SPARSE_HEAD_DIM}", got=str(dim))
    check_shape("weight of proj_l", weight, (dim, dim))
    if bias is not None:
        check_shape("bias of proj_l", bias, (dim,))
    check_same_device(q.device, weight=weight, bias=bias)
    refuse_gradient("sparse_linear_attention", (weight, bias))
    proj_l = ProjL(weight, bias)
    if not q.shape[0]:
        return _empty(a, proj_l, sparsity)
    registered = needs_registered(q, k, v, *proj_l, *tensors_of(a).values())
    return (_registered if registered else _run)(a, proj_l, sparsity)
