"""What TurboDiffusion's WanModel is made of, recognised by name, layout and signature.

Its code runs from a checkout (thu-ml/TurboDiffusion, `rcm/networks/wan2pt1.py` and `wan2pt2.py`,
`SLA/core.py`, `ops/core.py`; arXiv 2512.16093), under whatever names its folders have on the path,
so nothing of it is imported here.

Where flash-attn is not installed, whose rotary embedding its self-attention calls, its network
cannot run unpatched. Patched it can, and then the guard, a hooked attention, a pair that was given
back and autocast need the author's attention as well: `RotaryForward`, the same modules called in
the same order and the rotary embedding in plain torch.
"""

from __future__ import annotations

import sys
from typing import Any, Final

import torch
from torch import Tensor, nn

from turbo_rcm_patch import ops
from turbo_rcm_patch.patching.guard import Guard
from turbo_rcm_patch.patching.parallel import ulysses_over
from turbo_rcm_patch.patching.plain import bare, hook_names, runs_itself, why_not_plain
from turbo_rcm_patch.patching.registry import author_class

_CROSS: Final = ("self", "x", "context", "context_lens")
#: Class -> the parameters of its forward that this family was written against.
FORWARDS: Final = {
    "WanAttentionBlock": ("self", "x", "e", "seq_lens", "freqs", "context", "context_lens"),
    "WanSelfAttention": ("self", "x", "seq_lens", "freqs"),
    "WanT2VCrossAttention": _CROSS,
    "WanI2VCrossAttention": _CROSS,
    "WanCrossAttention": _CROSS,
    "MinimalA2AAttnOp": ("self", "query", "key", "value", "args", "kwargs"),
    "SparseLinearAttention": ("self", "q", "k", "v", "return_sparsity"),
    "SageSparseLinearAttention": ("self", "q", "k", "v", "return_sparsity"),
    "WanRMSNorm": ("self", "x"),
    "FastRMSNorm": ("self", "x"),
    "WanLayerNorm": ("self", "x"),
    "FastLayerNorm": ("self", "x"),
}
_ATTENTIONS: Final = {
    "self": ("WanSelfAttention",),
    "cross": ("WanT2VCrossAttention", "WanI2VCrossAttention", "WanCrossAttention"),
}
_LAYER_NORMS: Final = ("WanLayerNorm", "FastLayerNorm")
_SPARSE: Final = ("SparseLinearAttention", "SageSparseLinearAttention")


def unwrapped(block: Any) -> Any:
    """The block inside torch's activation checkpointing, where it is inside."""
    while author_class(block).__name__ == "CheckpointWrapper":
        block = block._checkpoint_wrapped_module
    return block


def has_image(attn: Any) -> bool:
    """Whether a cross-attention has an image branch (image-to-video of Wan 2.1)."""
    return author_class(attn).__name__ == "WanI2VCrossAttention"


def is_sparse(attn: Any) -> bool:
    """Whether an attention is sparse-linear: SLA or SageSLA."""
    operator = getattr(attn, "attn_op", None)
    return type(getattr(operator, "local_attn", None)).__name__ in _SPARSE


def sparsity_of(attn: Any, device: torch.device) -> ops.Sparsity:
    """The sparsity of a sparse attention; SageSLA's blocks are the device's."""
    local = attn.attn_op.local_attn
    topk = min(1.0, local.topk)
    if type(local).__name__ == "SageSparseLinearAttention":
        return ops.Sparsity.sage(topk, device)
    return ops.Sparsity(topk=topk, block_q=local.BLKQ, block_k=local.BLKK)


def why_attention_called(attn: Any, kind: str) -> str:
    """Why an attention is called as a module, or "" if ours runs in its place."""
    if author_class(attn).__name__ not in _ATTENTIONS[kind]:
        return f"it is a {type(attn).__qualname__}"
    if not runs_itself(attn):
        return f"attention is called as a module: {hook_names(attn)}"
    operators = [attn.attn_op] + ([attn.attn_op_image] if has_image(attn) else [])
    for op in operators:
        why = _why_operator_called(op)
        if not why and kind == "cross" and ulysses_over(op.pg) is not None:
            why = "its attn_op exchanges heads with other ranks"
        if why:
            return why
    return ""


def _why_operator_called(op: Any) -> str:
    if type(op).__name__ != "MinimalA2AAttnOp" or not bare(op):
        return f"its attn_op is a {type(op).__qualname__} that is called as a module"
    local = op.local_attn
    if type(local).__name__ in _SPARSE:
        return _why_sparse_called(local)
    if isinstance(local, nn.Module) or getattr(local, "__name__", "") != "attention":
        return f"its local attention is {getattr(local, '__name__', type(local).__qualname__)}"
    return ""


def _why_sparse_called(local: Any) -> str:
    maps = {getattr(local, f"feature_map_{of}", None) for of in "qk"}
    names = {getattr(one, "__name__", type(one).__qualname__) for one in maps}
    if names != {"softmax_feature_map"}:
        return f"its feature map is {', '.join(sorted(names))}"
    if not bare(local):
        return f"its sparse attention is called as a module: {hook_names(local)}"
    why = why_not_plain(local.proj_l)
    if why:
        return f"its proj_l is called: {why}"
    blocks = (getattr(local, "BLKQ", 128), getattr(local, "BLKK", 64))
    if local.topk <= 0 or any(block not in ops.SPARSE_BLOCKS for block in blocks):
        return f"its sparsity is {local.topk} of blocks of {blocks[0]} by {blocks[1]}"
    if local.proj_l.in_features > ops.MAX_SPARSE_HEAD_DIM:
        return f"its heads have {local.proj_l.in_features} channels"
    return ""


def why_feed_forward_called(ffn: Any) -> str:
    """The same question for a feed-forward."""
    kinds = [type(part) for part in ffn] if type(ffn) is nn.Sequential else []
    if len(kinds) != 3 or kinds[1] is not nn.GELU or ffn[1].approximate != "tanh":
        return f"its feed-forward is a {type(ffn).__qualname__} of another form"
    if not bare(ffn) or not bare(ffn[1]):
        return f"feed-forward is called as a module: {hook_names(ffn)}"
    return ""


def modulates(norm: Any, *, affine: bool) -> bool:
    """Whether `norm(x)` stands for a layer norm of the last dimension in fp32.

    That of `FastLayerNorm` is a kernel which adds its padded channels to the variance (1,536
    channels are padded to 2,048); ours is the norm that it was trained with.
    """
    if type(norm).__name__ not in _LAYER_NORMS or not bare(norm):
        return False
    return (norm.weight is not None) == (norm.bias is not None) == affine


def readable_rms(norm: Any, x: Tensor) -> bool:
    """Whether a norm is a plain RMSNorm of all channels of x, its weight readable.

    The trained norm's weight has the dtype of x, which its author multiplies by it; the fast one's
    is a buffer that is read as fp32.
    """
    if type(norm).__name__ not in ("WanRMSNorm", "FastRMSNorm") or not bare(norm):
        return False
    weight: Tensor = norm.weight
    plain = type(weight) in (nn.Parameter, Tensor) and weight.device == x.device
    return plain and (type(norm).__name__ == "FastRMSNorm" or weight.dtype == x.dtype)


# --- without flash-attn --------------------------------------------------------------------------

#: What the author's file sets to None where flash-attn is missing.
_ROTARY = "flash_apply_rotary_emb"


def lacks_rotary(attn: nn.Module) -> bool:
    """Whether an attention's own forward would fail for want of a rotary embedding."""
    file = sys.modules.get(author_class(attn).__module__)
    return file is not None and vars(file).get(_ROTARY, _ROTARY) is None


class RotaryForward:
    """Stands in for the forward of one self-attention, which it holds."""

    __slots__ = ("_attn",)

    def __init__(self, attn: Any, guard: Guard | None) -> None:
        self._attn = attn

    def over(self, attn: Any) -> RotaryForward:
        """The same over what stands for the attention."""
        return RotaryForward(attn, None)

    def __call__(self, x: Tensor, seq_lens: Tensor, freqs: Tensor) -> Tensor:
        """The author's attention.

        Args:
            x: [B, N, C].
            seq_lens: [B]; not read.
            freqs: Rotary angles, [N, head_dim / 2] or of that many elements.

        Returns:
            [B, N, C].
        """
        attn = self._attn
        heads = attn.num_heads
        q, k, v = attn.norm_q(attn.q(x)), attn.norm_k(attn.k(x)), attn.v(x)
        q, k, v = (torch.unflatten(part, 2, (heads, -1)) for part in (q, k, v))
        branch: Tensor = attn.o(attn.attn_op(_turned(q, freqs), _turned(k, freqs), v).flatten(2))
        return branch


def _turned(x: Tensor, freqs: Tensor) -> Tensor:
    """x [B, N, H, D] with channels 2i and 2i + 1 turned by an angle, in fp32, rounded once."""
    angles = freqs.float().reshape(x.shape[1], 1, -1)
    cos, sin = angles.cos(), angles.sin()
    even, odd = torch.unflatten(x.float(), -1, (-1, 2)).unbind(-1)
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1)
    return turned.flatten(-2).to(x.dtype)
