"""A family as CONTRIBUTING.md says to write one: one file, in `patching/families/` if it shipped.

The block is Wan's with other names, and with a norm of the text. Self-attention and feed-forward
sum in fp32 and round once; cross-attention sums in the model's dtype.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from tests.patching.variant import Attention, Block, Norm
from turbo_rcm_patch.config import Kind, PatchConfig
from turbo_rcm_patch.patching.author import call
from turbo_rcm_patch.patching.block import BlockForward, Branch
from turbo_rcm_patch.patching.blocks import (
    Mode,
    check_head_dim,
    check_parameters,
    check_weights,
    distinct,
    known_inside,
    same_batch,
)
from turbo_rcm_patch.patching.branches import (
    AttentionModules,
    FeedForwardModules,
    Given,
    readable_norms,
)
from turbo_rcm_patch.patching.pairs import (
    Runs,
    States,
    add_blocks,
    block_pair,
    called_runs,
    left_alone,
    linear_runs,
    states_of,
)
from turbo_rcm_patch.patching.plain import bare
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
    for index, child in distinct(network.layers):
        for name in list(_BRANCHES)[:2]:
            attn = getattr(known_inside(child, (Block,))[1], name, None)
            if type(attn) is Attention:
                path = f"layers.{index}.{name}"
                check_head_dim(path, attn.q_proj.out_features // attn.heads)
                check_weights(path, {one: getattr(attn, one) for one in _PROJECTIONS})


def plan(model: nn.Module, path: str, config: PatchConfig) -> ModelPlan:
    """The pairs of every block, how each would run, and the block forwards to install."""

    def states(block: Any, path: str, whole: str) -> States:
        pairs, linears, norms = {}, {}, {}
        for name, kind in _BRANCHES.items():
            module, feeds, gated = getattr(block, name), kind == "feed-forward", kind != "cross"
            gate = [Stream("video", "1", "gate", "[B, 1, C]")] if gated else []
            runs, sizes = _called(module, feeds), {}
            if type(module) is Attention:
                dim = module.q_proj.out_features // module.heads
                sizes = {"heads": module.heads, "head_dim": dim}
                norms[name] = module.q_norm, module.k_norm
            if runs is None:
                names = ("0", "2") if feeds else _PROJECTIONS
                linears[name] = {one: module.get_submodule(one) for one in names}
                last = linears[name][names[-1]]
                runs = linear_runs(last, "in-linear" if feeds else "two-launch")
            pairs[name] = block_pair(
                f"{path}.{name}", kind, left_alone(kind, config, whole) or runs, *gate,
                cast="fp32" if gated else "model", **sizes,
            )  # fmt: skip
        return states_of(pairs, linears, config, norms, close="o_proj")

    result = ModelPlan(model, path, config, states=[])
    add_blocks(result, "layers", (Block,), states, VariantBlockForward)
    return result


def _called(module: Any, feeds: bool) -> Runs | None:
    """How the pair of a branch runs that is called whole, and why; None where ours runs."""
    return called_runs(module, nn.Sequential if feeds else Attention)


class VariantBlockForward(BlockForward):
    """Stands in for the forward of one block."""

    __slots__ = ()

    branches = (
        Branch(name="self_attention", kind="self", norm="pre_norm", at=0, cast="fp32",
               output="o_proj"),
        Branch(name="cross_attention", kind="cross", norm="cross_norm", output="o_proj"),
        Branch(name="mlp", kind="feed-forward", norm="mlp_norm", at=3, cast="fp32"),
    )  # fmt: skip
    layer_norm = Norm
    apart = ("text_norm",)

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

    # --- the modules -----------------------------------------------------------------------------

    def _mode(self, branch: Branch, hidden: Tensor, given: Given) -> Mode:
        module = getattr(self._block, branch.name)
        return "ours" if _called(module, branch.kind == "feed-forward") is None else "called"

    def _attention(self, branch: Branch, like: Tensor, given: Given) -> AttentionModules:
        attn = getattr(self._block, branch.name)
        q, k, v, out = (getattr(attn, name) for name in _PROJECTIONS)
        norms, cross = (attn.q_norm, attn.k_norm), branch.kind == "cross"
        return AttentionModules(
            heads=attn.heads, head_dim=q.out_features // attn.heads, norms=norms,
            qkv=(q,) if cross else (q, k, v), kv=(k, v) if cross else (),
            readable=readable_norms(norms, like), out=(out,),
        )  # fmt: skip

    def _feed_forward(self, module: Any) -> FeedForwardModules:
        first, gelu, last = module
        return FeedForwardModules(
            first=first if bare(gelu) else None, called=(first, gelu), last=(last,)
        )

    def _beside(self, branch: Branch, given: Given) -> tuple[Any, ...]:
        return (None, given.rotary) if branch.kind == "self" else (given.context,)
