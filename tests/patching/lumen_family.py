"""The family of `lumen`: one file, in `patching/families/` if it shipped.

Every sum and every modulation is in the model's dtype and rounds at every step; the layer norms
compute in fp32 and round once. Self-attention has one Linear for q, k and v and norms of a head.
Behind cross-attention stands a norm, which is called behind its projection. The feed-forward is no
module: its two Linears are the block's own, and its pair is named after the first.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn

from tests.patching.lumen import LumenBlock, SelfMix, TextMix
from turbo_rcm_patch.config import PatchConfig
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

_ATTENTIONS: Final[dict[str, type[nn.Module]]] = {"mix": SelfMix, "text_mix": TextMix}
_LINEARS: Final = {
    "mix": ("qkv", "back"), "text_mix": ("query", "key", "value", "back"),
    "widen": ("widen", "narrow"),
}  # fmt: skip
_GELU: Final = nn.GELU("tanh")


def check(model: nn.Module) -> None:
    """Raise a typed error if this instance cannot be patched at all."""
    check_parameters(
        {
            LumenBlock.forward: ("self", "tokens", "words", "vec", "rope"),
            SelfMix.forward: ("self", "tokens", "cos", "sin"),
            TextMix.forward: ("self", "tokens", "words"),
        },
        "lumen",
    )
    network: Any = model
    for index, child in distinct(network.stack):
        block = known_inside(child, (LumenBlock,))[1]
        for name, cls in _ATTENTIONS.items():
            attn, path = getattr(block, name, None), f"stack.{index}.{name}"
            if type(attn) is cls:
                check_head_dim(path, attn.back.in_features // attn.heads)
                check_weights(path, {one: getattr(attn, one) for one in _LINEARS[name]})


def plan(model: nn.Module, path: str, config: PatchConfig) -> ModelPlan:
    """The pairs of every block, how each would run, and the block forwards to install."""

    def states(block: Any, path: str, whole: str) -> States:
        pairs, linears, norms = {}, {}, {}
        for branch in LumenBlockForward.branches:
            name, kind = branch.name, branch.kind
            attn, sizes = getattr(block, name), {}
            holder, cls = (attn, _ATTENTIONS[name]) if name in _ATTENTIONS else (block, LumenBlock)
            runs = called_runs(attn, cls) if holder is attn else None
            if runs is None:
                linears[name] = {one: getattr(holder, one) for one in _LINEARS[name]}
                last = linears[name][_LINEARS[name][-1]]
                runs = linear_runs(last, "two-launch" if holder is attn else "in-linear")
            if type(attn) is cls:
                sizes = {"heads": attn.heads, "head_dim": attn.back.in_features // attn.heads}
            if type(attn) is SelfMix:
                norms[name] = attn.norm_query, attn.norm_key
            if name == "text_mix" and runs[0] == "two-launch":
                runs = "after-linear", "ln_text_out is called behind its last Linear"
            gates = [] if kind == "cross" else [Stream("video", "1", "gate", "[B, 1, C]")]
            runs = left_alone(kind, config, whole) or runs
            pairs[name] = block_pair(f"{path}.{name}", kind, runs, *gates, **sizes)
        return states_of(pairs, linears, config, norms, close="back")

    result = ModelPlan(model, path, config, states=[])
    add_blocks(result, "stack", (LumenBlock,), states, LumenBlockForward)
    return result


class LumenBlockForward(BlockForward):
    """Stands in for the forward of one block."""

    __slots__ = ()

    branches = (
        Branch(name="mix", kind="self", norm="ln_mix", at=0, output="back"),
        # No output: the guard reads a projection that meets the residual, and here is a norm.
        Branch(name="text_mix", kind="cross", norm="ln_text", behind="ln_text_out"),
        Branch(name="widen", kind="feed-forward", norm="ln_wide", at=3, last="narrow"),
    )
    int8_rows = True
    modulation_cast = "model"
    apart = ("modulation",)

    def __call__(
        self, tokens: Tensor, words: Tensor, vec: Tensor, rope: tuple[Tensor, Tensor]
    ) -> Tensor:
        """The author's block, with its skip pairs closed by ours where they are live."""
        if not self._serves(tokens):
            written: Tensor = self._as_written(tokens, words, vec, rope)
            return written
        guard = self._begin(tokens=tokens, words=words, vec=vec)
        made = call(self._block.modulation, vec)
        scale1, shift1, gate1, scale2, shift2, gate2 = made[:, None].chunk(6, -1)
        hidden, context = same_batch(tokens, words)
        rows = (shift1, scale1, gate1, shift2, scale2, gate2)
        given = Given(context, rows, rope, forward=self)
        out: Tensor = self._run(hidden, given, guard, (tokens, words, made, rope))
        return out

    # --- the modules -----------------------------------------------------------------------------

    def _mode(self, branch: Branch, hidden: Tensor, given: Given) -> Mode:
        module, cls = getattr(self._block, branch.name), _ATTENTIONS.get(branch.name)
        return "ours" if cls is None or (type(module) is cls and bare(module)) else "called"

    def _attention(self, branch: Branch, like: Tensor, given: Given) -> AttentionModules:
        attn = getattr(self._block, branch.name)
        heads, head_dim = attn.heads, attn.back.in_features // attn.heads
        if branch.kind == "cross":
            return AttentionModules(
                heads=heads, head_dim=head_dim, qkv=(attn.query,), kv=(attn.key, attn.value),
                readable=readable_norms((None, None), like),
                out=(attn.back, self._block.ln_text_out),
            )  # fmt: skip
        norms = attn.norm_query, attn.norm_key
        return AttentionModules(
            heads=heads, head_dim=head_dim, qkv=(attn.qkv,), norms=norms,
            readable=readable_norms(norms, like), out=(attn.back,),
            call_norm=lambda norm, x: call(norm, torch.unflatten(x, -1, (heads, -1))).flatten(2),
        )  # fmt: skip

    def _feed_forward(self, module: Any) -> FeedForwardModules:
        narrow = self._block.narrow
        return FeedForwardModules(first=module, called=(module, _GELU), last=(narrow,))

    def _beside(self, branch: Branch, given: Given) -> tuple[Any, ...]:
        return (given.rotary or ()) if branch.kind == "self" else (given.context,)
