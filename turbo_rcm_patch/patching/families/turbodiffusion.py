"""TurboDiffusion's own WanModel, 2.1 and 2.2, with its attention types original, sla and sagesla.

Its code runs from a checkout (thu-ml/TurboDiffusion, `rcm/networks/wan2pt1.py` and `wan2pt2.py`,
`SLA/core.py`, `ops/core.py`; arXiv 2512.16093), whose modules have no fixed names. So this file
imports none of it, and recognises it by names, layout and signatures.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from turbo_rcm_patch import ops
from turbo_rcm_patch.config import PatchConfig
from turbo_rcm_patch.ops.attention import api as attention
from turbo_rcm_patch.ops.attention.reference import norm_rope
from turbo_rcm_patch.ops.formats import Rotary
from turbo_rcm_patch.ops.sparse_linear import api as sparse_linear
from turbo_rcm_patch.patching.block import PatchedBlock
from turbo_rcm_patch.patching.families.common import (
    block_pairs,
    check_attention,
    check_parameters,
)
from turbo_rcm_patch.patching.find import find_blocks
from turbo_rcm_patch.patching.int8_linears import takes_rows
from turbo_rcm_patch.patching.measure import Notes
from turbo_rcm_patch.patching.pieces import (
    LAYER_NORMS,
    RMS_NORMS,
    KeptTables,
    feed_forward,
    norm,
    rms_norms,
    skip,
    skip_norm,
)
from turbo_rcm_patch.patching.plain import (
    Replacement,
    hook_names,
    original_class,
    replaced_by,
    runs_only_its_forward,
    torchs_own,
)
from turbo_rcm_patch.skip import SkipPair, Stream

#: Text tokens that follow the image tokens.
TEXT_TOKENS: Final = 512
_CROSS_ATTENTIONS: Final = ("WanT2VCrossAttention", "WanI2VCrossAttention", "WanCrossAttention")
_SPARSE: Final = ("SparseLinearAttention", "SageSparseLinearAttention")
_BLOCK: Final = "WanAttentionBlock"
_LAYER_NORMS: Final = ("WanLayerNorm", "FastLayerNorm")
_RMS_NORMS: Final = ("WanRMSNorm", "FastRMSNorm")
#: Class -> the parameters of its forward that this family was written against.
_FORWARDS: Final = {
    _BLOCK: ("self", "x", "e", "seq_lens", "freqs", "context", "context_lens"),
    "WanSelfAttention": ("self", "x", "seq_lens", "freqs"),
    "MinimalA2AAttnOp": ("self", "query", "key", "value", "args", "kwargs"),
    **dict.fromkeys(_CROSS_ATTENTIONS, ("self", "x", "context", "context_lens")),
    **dict.fromkeys(_SPARSE, ("self", "q", "k", "v", "return_sparsity")),
    **dict.fromkeys((*_LAYER_NORMS, *_RMS_NORMS), ("self", "x")),
}
_GATES: Final = (
    Stream("video", "1", "e[2]", "[B, 1, C]"),
    Stream("video", "1", "e[5]", "[B, 1, C]"),
)
#: Name of the function that the author's file sets to None if flash-attn is missing.
_ROTARY: Final = "flash_apply_rotary_emb"


class TurboBlock(PatchedBlock):
    """The replacement of the forward of a `WanAttentionBlock`."""

    tables: KeptTables

    stages = ("norm1", "norm3", "norm2")
    mixes = "self_attn"

    def __call__(
        self,
        x: Tensor,
        e: Tensor,
        seq_lens: Tensor,
        freqs: Tensor,
        context: Tensor,
        context_lens: Tensor | None,
    ) -> Tensor:
        """Run the block.

        Args:
            x: [B, N, C], the model's dtype.
            e: [B, 6, C] fp32.
            seq_lens: [B]; no attention reads it.
            freqs: Rotary angles, [N, D / 2] fp32.
            context: [B, T, C] text, with the image tokens in front for image-to-video of Wan 2.1.
            context_lens: [B]; no attention reads it.

        Returns:
            [B, N, C], dtype of x.
        """
        inputs = x, e, seq_lens, freqs, context, context_lens
        out: Tensor = self.runs(*inputs)(*inputs)
        return out

    def fast(self, *inputs: Any, notes: Notes | None = None) -> Tensor:
        x, e, seq_lens, freqs, context, _ = inputs
        block, impl, dtype = self.block, self.config.impl, x.dtype
        attn, cross, ffn = block.self_attn, block.cross_attn, block.ffn
        shift1, scale1, gate1, shift2, scale2, gate2 = (block.modulation + e).chunk(6, dim=1)

        # Ranks exchange heads in the author's code, which also computes SLA without quantising.
        exact_sla = is_sparse(attn) and not ops.quantises(self.spec.attention)
        called = _exchanges(attn.attn_op) or exact_sla
        rows = not called and takes_rows((attn.q, attn.k, attn.v))
        h = norm(block.norm1, x, scale1, shift1, dtype, impl, rows=rows)
        y = attn(h, seq_lens, freqs) if called else self.self_attention(notes, attn, h, freqs)
        rows = takes_rows((cross.q,))
        x, h = skip_norm(x, y, gate1, block.norm3, None, None, dtype, impl, rows=rows)
        if notes is not None:
            notes.saw_streams(x)

        y = self.cross_attention(cross, h, context)
        rows = takes_rows((ffn[0],))
        x, h = skip_norm(x, y, None, block.norm2, scale2, shift2, dtype, impl, rows=rows)
        if notes is not None:
            notes.saw_streams(x)

        return skip(x, feed_forward(ffn, h), gate2, dtype, impl)

    def self_attention(self, notes: Notes | None, attn: Any, h: Any, freqs: Tensor) -> Tensor:
        """Run self-attention, dense or sparse-linear, and its projection: [B, N, C]."""
        spec = self.spec
        q, k, v = attn.q(h), attn.k(h), attn.v(h)
        q, k, norms = rms_norms(attn.norm_q, attn.norm_k, q, k)
        tables = self.tables.of((freqs,), None, lambda: _tables(freqs))
        if not is_sparse(attn):
            out = attention.attend(q, k, v, spec=spec, norms=norms, rotary=tables)
            if notes is not None:
                notes.saw_attention(q, k, v, norms, tables, spec, out)
        else:
            proj_l, sparsity = attn.attn_op.local_attn.proj_l, sparsity_of(attn, q.device)
            out = sparse_linear.attend_sparse(
                q, k, v, spec=spec, proj_l=(proj_l.weight, proj_l.bias), sparsity=sparsity,
                norms=norms, rotary=tables,
            )  # fmt: skip
        branch: Tensor = attn.o(out)
        return branch

    def cross_attention(self, attn: Any, h: Any, context: Tensor) -> Tensor:
        """Run cross-attention to text, and to an image if there is one: [B, N, C]."""
        image = None
        if has_image(attn):
            tokens = context.shape[1] - TEXT_TOKENS
            image, context = context[:, :tokens], context[:, tokens:]
        own_q, k, v = attn.q(h), attn.k(context), attn.v(context)
        spec = self.spec_over(k.shape[1])
        q, k, norms = rms_norms(attn.norm_q, attn.norm_k, own_q, k)
        out = attention.attend(q, k, v, spec=spec, norms=norms)
        if image is not None:
            k, v = attn.k_img(image), attn.v_img(image)
            q, k, norms = rms_norms(attn.norm_q, attn.norm_k_img, own_q, k)
            out = attention.attend(q, k, v, spec=spec, norms=norms, residual=out)
        branch: Tensor = attn.o(out)
        return branch

    # --- when the author's forward runs ----------------------------------------------------------

    def why_modules(self) -> str:
        block = self.block
        return (
            _why_attention("self_attn", block.self_attn, ("WanSelfAttention",))
            or _why_attention("cross_attn", block.cross_attn, _CROSS_ATTENTIONS)
            or _why_feed_forward(block.ffn)
            or self.why_replaced()
        )

    def why_inputs(
        self, x: Tensor, e: Tensor, seq_lens: Any, freqs: Tensor, context: Tensor, *rest: Any
    ) -> str:
        batch, tokens, channels = x.shape
        fits = (
            context.dim() == 3
            and context.dtype == x.dtype
            and context.device == x.device
            and context.shape[0] == batch
            and e.shape[0] == batch
            and channels == self.spec.heads * self.head_dim
            and freqs.numel() == tokens * self.head_dim // 2
            and freqs.dtype == torch.float32
            and (not has_image(self.block.cross_attn) or context.shape[1] > TEXT_TOKENS)
            and 0 < batch < 65536
        )
        return "" if fits else "text, modulation or rotary angles do not fit the video"

    def replaced_attention(self) -> str:
        name = "scaled_dot_product_attention"
        return "" if torchs_own(F.scaled_dot_product_attention, name) else f"F.{name}"

    def group(self) -> Any:
        return getattr(getattr(self.block.self_attn, "attn_op", None), "pg", None)

    def rows_of(self, take: Callable[[Tensor], Tensor], *inputs: Any) -> tuple[Any, ...]:
        return take(inputs[0]), *inputs[1:]

    def other_forwards(self) -> list[tuple[Any, Any]]:
        """Return a self-attention forward that runs without flash-attn, if that is missing.

        The author's forward calls flash-attn's rotary embedding, and the guard calls the author's
        forward.
        """
        attn = self.block.self_attn
        file = sys.modules.get(original_class(attn).__module__)
        lacks = file is not None and vars(file).get(_ROTARY, _ROTARY) is None
        return [(attn, RotaryForward(attn))] if lacks else []

    # --- for the report --------------------------------------------------------------------------

    def linears(self) -> dict[str, Any]:
        block = self.block
        linears: dict[str, Any] = {}
        for name in ("self_attn", "cross_attn"):
            attn = getattr(block, name)
            names = [linear for linear in (*"qkvo", "k_img", "v_img") if hasattr(attn, linear)]
            linears |= {f"{name}.{linear}": getattr(attn, linear) for linear in names}
        if type(block.ffn) is nn.Sequential:
            linears |= {f"ffn.{index}": block.ffn[index] for index in (0, 2)}
        return linears

    def pairs(self) -> list[SkipPair]:
        block = self.block
        proj_l = "attn_op.local_attn" if is_sparse(block.self_attn) else ""
        names, image = ("self_attn", "cross_attn", "ffn"), has_image(block.cross_attn)
        return block_pairs(self, names, _GATES, "model", proj_l=proj_l, image=image)


def _tables(angles: Tensor) -> Rotary:
    """Compute (cos, sin), [N, D] fp32 each, of angles [N, D / 2] or of that many elements."""
    wide = angles.float().flatten(1).repeat_interleave(2, -1)
    return wide.cos(), wide.sin()


def has_image(attn: Any) -> bool:
    """Return True if a cross-attention has an image branch (image-to-video of Wan 2.1)."""
    return original_class(attn).__name__ == "WanI2VCrossAttention"


def is_sparse(attn: Any) -> bool:
    """Return True if an attention is sparse-linear: SLA or SageSLA."""
    local = getattr(getattr(attn, "attn_op", None), "local_attn", None)
    return type(local).__name__ in _SPARSE


def sparsity_of(attn: Any, device: torch.device) -> ops.Sparsity:
    """Return the sparsity of a sparse attention. The blocks of SageSLA depend on the device."""
    local = attn.attn_op.local_attn
    topk = min(1.0, local.topk)
    if type(local).__name__ == "SageSparseLinearAttention":
        return ops.Sparsity.sage(topk, device)
    return ops.Sparsity(topk=topk, block_q=local.BLKQ, block_k=local.BLKK)


def _exchanges(op: Any) -> bool:
    """Return True if an attention operator exchanges heads with other ranks."""
    return getattr(op, "pg", None) is not None and op.pg.size() > 1


def _why_attention(name: str, attn: Any, classes: tuple[str, ...]) -> str:
    """Return why the fast path cannot run an attention, or ""."""
    if original_class(attn).__name__ not in classes:
        return f"{name} is a {type(attn).__qualname__}"
    if not runs_only_its_forward(attn) and replaced_by(attn) is not RotaryForward:
        return f"{name} has {hook_names(attn)}"
    operators = [attn.attn_op] + ([attn.attn_op_image] if has_image(attn) else [])
    for op in operators:
        local = getattr(op, "local_attn", None)
        if type(op).__name__ != "MinimalA2AAttnOp" or not runs_only_its_forward(op):
            kind = type(op).__qualname__
            return f"the attn_op of {name} is {kind}, or has a hook or a replaced forward"
        if name == "cross_attn" and _exchanges(op):
            return "the attn_op of cross_attn exchanges heads with other ranks"
        if type(local).__name__ in _SPARSE:
            why = _why_sparse(local)
            if why:
                return why
        elif isinstance(local, nn.Module) or getattr(local, "__name__", "") != "attention":
            return f"its local attention is {getattr(local, '__name__', type(local).__qualname__)}"
    return ""


def _why_sparse(local: Any) -> str:
    maps = {getattr(getattr(local, f"feature_map_{of}", None), "__name__", "") for of in "qk"}
    if maps != {"softmax_feature_map"}:
        return "its feature map is not the softmax"
    if (
        not runs_only_its_forward(local)
        or type(local.proj_l) is not nn.Linear
        or not runs_only_its_forward(local.proj_l)
    ):
        return "its sparse attention or proj_l has a hook or a replaced forward"
    blocks = (getattr(local, "BLKQ", 128), getattr(local, "BLKK", 64))
    if local.topk <= 0 or any(block not in ops.SPARSE_BLOCKS for block in blocks):
        return f"its sparsity is {local.topk} of blocks of {blocks[0]} by {blocks[1]}"
    if local.proj_l.in_features > ops.MAX_SPARSE_HEAD_DIM:
        return f"its heads have {local.proj_l.in_features} channels"
    return ""


def _why_feed_forward(ffn: Any) -> str:
    kinds = [type(part) for part in ffn] if type(ffn) is nn.Sequential else []
    if len(kinds) != 3 or kinds[1] is not nn.GELU or ffn[1].approximate != "tanh":
        return f"ffn is a {type(ffn).__qualname__} of another form"
    return "" if runs_only_its_forward(ffn) else f"ffn has {hook_names(ffn)}"


# --- what is patched in a model ------------------------------------------------------------------


def recognises(model: nn.Module) -> bool:
    """Return True if a WanModel has TurboDiffusion's layout; other projects use the same name."""
    blocks = (module for module in model.modules() if original_class(module).__name__ == _BLOCK)
    block: Any = next(blocks, None)
    attentions = [getattr(block, name, None) for name in ("self_attn", "cross_attn")]
    return hasattr(model, "blocks") and all(hasattr(attn, "attn_op") for attn in attentions)


def blocks_of(model: Any, path: str, config: PatchConfig) -> list[PatchedBlock | SkipPair]:
    """Find the blocks of a model, in the order in which they run.

    Raises:
        FamilyError: A forward takes other parameters than this was written for.
        OpError: The kernels do not take the model's heads or dtype.
    """
    known: dict[str, Any] = {
        original_class(m).__name__: original_class(m) for m in model.modules()
    }
    found_forwards = {known[n].forward: _FORWARDS[n] for n in known if n in _FORWARDS}
    check_parameters(found_forwards, "TurboDiffusion")
    # The fast layer norm adds padded channels to the variance (1,536 are padded to 2,048). Our
    # kernel computes the norm with which the model was trained.
    LAYER_NORMS.update(known[n] for n in _LAYER_NORMS if n in known)
    RMS_NORMS.update(known[n] for n in _RMS_NORMS if n in known)
    return find_blocks(
        model.blocks, f"{path}.blocks", known[_BLOCK], TurboBlock, config, _heads_of,
        tables=KeptTables(),
    )  # fmt: skip


def _heads_of(block: Any, path: str) -> tuple[int, int]:
    """Check a block's attentions, and return their heads and the channels of a head."""
    attn: Any = getattr(block, "self_attn", None)
    if original_class(attn).__name__ != "WanSelfAttention":
        return 1, 0
    for name in ("self_attn", "cross_attn"):
        attention = getattr(block, name)
        linears = {of: getattr(attention, of, None) for of in "qkv"}
        check_attention(f"{path}.{name}", attn.dim // attn.num_heads, linears)
    return attn.num_heads, attn.dim // attn.num_heads


# --- without flash-attn --------------------------------------------------------------------------


class RotaryForward(Replacement):
    """The replacement of the forward of one self-attention, without flash-attn.

    It calls the same modules in the same order, and computes the rotary embedding in plain torch.
    """

    def __init__(self, attn: Any) -> None:
        self._attn = attn

    def __call__(self, x: Tensor, seq_lens: Tensor, freqs: Tensor) -> Tensor:
        """Run the attention.

        Args:
            x: [B, N, C].
            seq_lens: [B]; it is not read.
            freqs: Rotary angles, [N, D / 2] or of that many elements.

        Returns:
            [B, N, C].
        """
        attn, heads, (cos, sin) = self._attn, self._attn.num_heads, _tables(freqs)

        def turned(part: Tensor) -> Tensor:
            wide = norm_rope(part, heads, weight=None, cos=cos, sin=sin, eps=0.0)
            return wide.transpose(1, 2).to(part.dtype)

        q, k = turned(attn.norm_q(attn.q(x))), turned(attn.norm_k(attn.k(x)))
        v = torch.unflatten(attn.v(x), 2, (heads, -1))
        branch: Tensor = attn.o(attn.attn_op(q, k, v).flatten(2))
        return branch
