"""How a block of TurboDiffusion's WanModel runs fused.

Every skip rounds each step to the model's dtype, the gate included, as the author's code does; the
norms and their modulation run in fp32 and round once. With SLA or SageSLA the self-attention is
sparse-linear: the sum of its two branches is closed in the attention kernel, the gated skip across
the output projection.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from turbo_rcm_patch import ops
from turbo_rcm_patch.ops.dispatch import quantises
from turbo_rcm_patch.ops.exchange import ContextParallel
from turbo_rcm_patch.ops.parallel import parallel_attention
from turbo_rcm_patch.patching.author import Notes
from turbo_rcm_patch.patching.block import BlockForward, Branch
from turbo_rcm_patch.patching.blocks import KeptTables, Mode
from turbo_rcm_patch.patching.branches import (
    TEXT_TOKENS,
    AttentionModules,
    FeedForwardModules,
    Given,
    readable_norms,
)
from turbo_rcm_patch.patching.families.turbodiffusion_structure import (
    is_sparse,
    modulates,
    readable_rms,
    sparsity_of,
    why_attention_called,
    why_feed_forward_called,
)
from turbo_rcm_patch.patching.linears import holder
from turbo_rcm_patch.patching.parallel import ulysses_over
from turbo_rcm_patch.patching.state import PairState


class TurboBlockForward(BlockForward):
    """Stands in for the forward of one block."""

    __slots__ = ()

    branches = (
        Branch(name="self_attn", kind="self", norm="norm1", at=0, inner="linear", output="o"),
        Branch(name="cross_attn", kind="cross", norm="norm3", inner="image", output="o"),
        Branch(name="ffn", kind="feed-forward", norm="norm2", at=3),
    )
    traceable = False

    def __call__(
        self,
        x: Tensor,
        e: Tensor,
        seq_lens: Tensor,
        freqs: Tensor,
        context: Tensor,
        context_lens: Tensor | None,
    ) -> Tensor:
        """The author's block, with its skip pairs closed by ours where they are live.

        Args:
            x: [B, N, C], the model's dtype.
            e: [B, 6, C] fp32.
            seq_lens: [B]; neither the author's attention nor ours reads it.
            freqs: Rotary angles, [N, head_dim / 2] fp32.
            context: [B, T, C] text, with the image tokens in front for image-to-video of Wan 2.1.
            context_lens: Not read either.

        Returns:
            [B, N, C], dtype of x.
        """
        inputs = (x, e, seq_lens, freqs, context, context_lens)
        if not self._serves(x):
            written: Tensor = self._as_written(*inputs)
            return written
        guard = self._begin(x=x, context=context, e=e)
        tables: KeptTables = self._shared
        rows = (self._block.modulation + e).chunk(6, dim=1)
        rotary = tables.of((freqs,), lambda: _tables(freqs))
        given = Given(context, rows, rotary, more=(seq_lens, freqs, context_lens), forward=self)
        out: Tensor = self._run(x, given, guard, inputs)
        return out

    # --- the modules -----------------------------------------------------------------------------

    def _mode(self, branch: Branch, hidden: Tensor, given: Given) -> Mode:
        module = getattr(self._block, branch.name)
        if branch.kind == "feed-forward":
            return "called" if why_feed_forward_called(module) else "ours"
        if why_attention_called(module, branch.kind):
            return "called"
        image, context = self._states.get("image"), given.context
        if branch.kind == "cross" and image is not None:
            assert context is not None
            # Both attentions go through one projection, so ours runs for both or for neither.
            return "ours" if image.live and context.shape[1] > TEXT_TOKENS else "called"
        if branch.kind == "self" and is_sparse(module):
            state = self._states[branch.name]
            gradient = _wants_gradient(module, (hidden, given.rows[0]))
            return "ours" if self._runs_sparse(state) and not gradient else "called"
        return "ours"

    def _runs_sparse(self, state: PairState) -> bool:
        """Whether a sparse attention is ours: exact ones are left to their author."""
        asked = self._specs[state.precision].attention
        return self._states["linear"].live and quantises(asked)

    def _attention(self, branch: Branch, like: Tensor, given: Given) -> AttentionModules:
        attn = getattr(self._block, branch.name)
        cross = branch.kind == "cross"
        norms = (attn.norm_q, attn.norm_k)
        readable = readable_norms(norms, like, readable_rms)
        modules = AttentionModules(
            heads=attn.num_heads, head_dim=attn.dim // attn.num_heads, norms=norms,
            qkv=(attn.q,) if cross else (attn.q, attn.k, attn.v),
            kv=(attn.k, attn.v) if cross else (), readable=readable, out=(attn.o,),
        )  # fmt: skip
        if cross and "image" in self._states:
            modules.image, norm = (attn.k_img, attn.v_img), attn.norm_k_img
            modules.image_norm = norm
            if readable_rms(norm, like) and readable is not None and norm.eps == readable[2]:
                modules.image_readable = holder(norm)
        if not cross and is_sparse(attn):
            proj_l = attn.attn_op.local_attn.proj_l
            modules.sparse = lambda device: (proj_l.weight, proj_l.bias)
            modules.sparsity = sparsity_of(attn, like.device)
        return modules

    def _groups(self) -> ContextParallel | None:
        operator = getattr(self._block.self_attn, "attn_op", None)
        return ulysses_over(getattr(operator, "pg", None))

    def calls_attention(self) -> bool:
        return bool(why_attention_called(self._block.self_attn, "self"))

    def _feed_forward(self, module: Any) -> FeedForwardModules:
        first, gelu, last = module
        return FeedForwardModules(first=first, called=(first, gelu), last=(last,))

    def _fused_norm(self, branch: Branch, like: Tensor) -> bool:
        return modulates(getattr(self._block, branch.norm), affine=branch.at is None)

    def _beside(self, branch: Branch, given: Given) -> tuple[Any, ...]:
        seq_lens, freqs, context_lens = given.more
        return (seq_lens, freqs) if branch.kind == "self" else (given.context, context_lens)

    def _after_comparing(self, branch: Branch) -> None:
        if branch.kind == "self" and is_sparse(self._block.self_attn):
            state, linear = self._states["self_attn"], self._states["linear"]
            if linear.live and not self._runs_sparse(state):
                linear.give_back(state.pair.reason)

    def _watched(self, branch: Branch, notes: Notes) -> Callable[..., Any]:
        module = getattr(self._block, branch.name)
        # A dense attention may need a package for what torch has too.
        names = () if branch.kind == "feed-forward" or is_sparse(module) else _OPERATORS
        groups = self._groups() if branch.kind == "self" else None
        operator = _exact if groups is None else partial(_exact_over, groups, self.ranks.lengths)
        exact = {name: operator for name in names if hasattr(module, name)}
        return notes.branch(module, branch.output, **exact)


_OPERATORS = ("attn_op", "attn_op_image")


def _exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The author's dense attention, [B, N, H, D] to [B, N, H * D]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def _exact_over(
    groups: ContextParallel, lengths: list[int], q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    """The same over the tokens of all ranks."""
    spec = ops.AttentionSpec(heads=q.shape[2], attention="exact")
    q, k, v = (x.flatten(2) for x in (q, k, v))
    return parallel_attention(q, k, v, spec, groups, lengths=lengths)


def _tables(angles: Tensor) -> tuple[Tensor, Tensor]:
    """(cos, sin), each [N, D] fp32, of angles [N, D / 2] or of that many elements."""
    wide = angles.float().flatten(1).repeat_interleave(2, -1)
    return wide.cos(), wide.sin()


def _wants_gradient(attn: nn.Module, parts: tuple[Tensor, ...]) -> bool:
    """Whether the sparse attention would have to give a gradient, which ours does not."""
    if not torch.is_grad_enabled():
        return False
    return any([x.requires_grad for x in (*parts, *attn.parameters())])
