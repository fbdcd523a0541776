"""A family as CONTRIBUTING.md says to write one: one file, in `patching/families/` if it shipped.

The block is Wan's with other names, and with a norm of the text. Self-attention and feed-forward
sum in fp32 and round once; cross-attention sums in the model's dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from tests.patching.variant import Attention, Block, Norm
from turbo_rcm_patch.config import Kind, PatchConfig
from turbo_rcm_patch.patching.author import Notes, call, same
from turbo_rcm_patch.patching.block import BlockForward, Branch
from turbo_rcm_patch.patching.blocks import (
    Mode,
    check_head_dim,
    check_parameters,
    check_weights,
    same_batch,
)
from turbo_rcm_patch.patching.branches import AttentionModules, FeedForwardModules, Given
from turbo_rcm_patch.patching.linears import holder
from turbo_rcm_patch.patching.pairs import (
    Runs,
    States,
    add_blocks,
    block_pair,
    left_alone,
    states_of,
)
from turbo_rcm_patch.patching.plain import bare, hook_names, plain_norm, why_not_plain
from turbo_rcm_patch.patching.state import ModelPlan
from turbo_rcm_patch.skip import Stream

__all__ = ["check", "plan"]

_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
_BRANCHES: dict[str, Kind] = {
    "self_attention": "self", "cross_attention": "cross", "mlp": "feed-forward"
}  # fmt: skip


def check(model: nn.Module) -> None:
    """Raise a typed error if this instance cannot be patched at all."""
    check_parameters(
        {
            Block.forward: ("self", "x", "text", "time", "rotary"),
            Attention.forward: ("self", "x", "context", "rotary"),
        },
        "the variant",
    )
    network: Any = model
    for index, block in enumerate(network.layers):
        for name in list(_BRANCHES)[:2]:
            attn, path = getattr(block, name), f"layers.{index}.{name}"
            check_head_dim(path, attn.q_proj.out_features // attn.heads)
            check_weights(path, {one: getattr(attn, one) for one in _PROJECTIONS})


def plan(model: nn.Module, path: str, config: PatchConfig) -> ModelPlan:
    """The pairs of every block, how each would run, and the block forwards to install."""

    def states(block: Any, path: str, whole: str) -> States:
        pairs, linears = {}, {}
        for name, kind in _BRANCHES.items():
            module = getattr(block, name)
            feeds, gated = kind == "feed-forward", kind != "cross"
            gate = [Stream("video", "1", "gate", "[B, 1, C]")] if gated else []
            heads = 0 if feeds else module.heads
            pairs[name] = block_pair(
                f"{path}.{name}", kind, left_alone(kind, config, whole) or _runs(module, feeds),
                *gate, cast="fp32" if gated else "model",
                heads=heads, head_dim=0 if feeds else module.q_proj.out_features // heads,
            )  # fmt: skip
            if bare(module):
                names = ("0", "2") if feeds else _PROJECTIONS
                linears[name] = {one: module.get_submodule(one) for one in names}
        return states_of(pairs, linears, config)

    result = ModelPlan(model, path, config, states=[])
    add_blocks(
        result, "layers", (Block,), tuple(_BRANCHES), states, partial(VariantBlockForward, None)
    )
    return result


def _runs(module: Any, feeds: bool) -> Runs:
    """How the pair of an attention or a feed-forward runs, and why."""
    if not bare(module):
        return "after-linear", f"called as a module: {hook_names(module)}"
    why = why_not_plain(module[2] if feeds else module.o_proj)
    if why:
        return "after-linear", f"its last Linear is called: {why}"
    return ("in-linear" if feeds else "two-launch"), ""


class VariantBlockForward(BlockForward):
    """Stands in for the forward of one block."""

    __slots__ = ()

    branches = (
        Branch(name="self_attention", kind="self", norm="pre_norm", at=0, cast="fp32",
               output="o_proj"),
        Branch(name="cross_attention", kind="cross", norm="cross_norm", output="o_proj"),
        Branch(name="mlp", kind="feed-forward", norm="mlp_norm", at=3, cast="fp32"),
    )  # fmt: skip

    def __call__(
        self, x: Tensor, text: Tensor, time: Tensor, rotary: tuple[Tensor, Tensor]
    ) -> Tensor:
        """The author's block, with its skip pairs closed by ours where they are live."""
        if not self._serves(x):
            written: Tensor = self._as_written(x, text, time, rotary)
            return written
        guard, block = self._begin(x=x, text=text, time=time), self._block
        normed = call(block.text_norm, text).type_as(text)
        rows = (block.table + time.float()).chunk(6, 1)
        hidden, context = same_batch(x, normed)
        given = Given(context, rows, rotary, forward=self)
        out: Tensor = self._run(hidden, given, guard, (x, normed, time, rotary))
        return out

    def _sizes(self) -> tuple[int, int, float]:
        attn = self._block.self_attention
        return attn.heads, attn.q_proj.out_features, attn.q_norm.eps

    # --- the modules -----------------------------------------------------------------------------

    def _mode(self, branch: Branch, hidden: Tensor, given: Given) -> Mode:
        return "ours" if bare(getattr(self._block, branch.name)) else "called"

    def _attention(self, branch: Branch, like: Tensor, given: Given) -> AttentionModules:
        attn = getattr(self._block, branch.name)
        q, k, v, out = (getattr(attn, name) for name in _PROJECTIONS)
        norms, cross = (attn.q_norm, attn.k_norm), branch.kind == "cross"
        readable = None
        if all([plain_norm(norm, like) for norm in norms]) and norms[0].eps == norms[1].eps:
            readable = (*map(holder, norms), norms[0].eps)
        return AttentionModules(
            heads=attn.heads, head_dim=q.out_features // attn.heads, norms=norms,
            qkv=(q,) if cross else (q, k, v), kv=(k, v) if cross else (),
            readable=readable, out=(out,),
        )  # fmt: skip

    def _feed_forward(self, module: Any) -> FeedForwardModules:
        first, gelu, last = module
        return FeedForwardModules(
            first=first if bare(gelu) else None, called=(first, gelu), last=(last,)
        )

    def _fused_norm(self, branch: Branch, like: Tensor) -> bool:
        norm = getattr(self._block, branch.norm)
        return (
            type(norm) is Norm and bare(norm) and (norm.weight is None) == (branch.at is not None)
        )

    def _beside(self, branch: Branch, given: Given) -> tuple[Any, ...]:
        return (None, given.rotary) if branch.kind == "self" else (given.context,)

    def _only(self, name: str, notes: Notes, instead: Callable[..., Any] | None) -> Any:
        view = super()._only(name, notes, instead)  # The text that its author gets is normed.
        return notes.over(self._block, **view._instead, text_norm=same)
