"""diffusers' attentions: which may be patched, how one runs, and its pair."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from turbo_rcm_patch.config import Kind
from turbo_rcm_patch.patching.blocks import Mode, check_head_dim, check_weights, refuse_parallel
from turbo_rcm_patch.patching.pairs import Runs, block_pair
from turbo_rcm_patch.patching.parallel import processor_class
from turbo_rcm_patch.patching.plain import class_replaced, drops, hook_names, runs_itself
from turbo_rcm_patch.skip import Cast, SkipPair, Stream


def check_attention(path: str, attn: Any) -> None:
    """Raise a typed error if an attention cannot be patched at all."""
    refuse_parallel(path, attn.processor)
    check_head_dim(path, attn.inner_dim // attn.heads)
    check_weights(path, {name: getattr(attn, name) for name in ("to_q", "to_k", "to_v")})


def attention_mode(attn: Any, cls: object, processors: Collection[type]) -> Mode:
    """What may run now: ours in the place of the attention, the skip after it, or nothing of ours.

    Args:
        attn: The attention.
        cls: The class that is known.
        processors: What may compute it.

    Raises:
        ContextParallelError: The attention is parallel in a way that is not known.
    """
    if type(attn) is not cls or processor_class(attn.processor) not in processors:
        return "as-written"
    refuse_parallel("attention", attn.processor)
    if drops(attn.to_out[1]):
        return "as-written"
    return "ours" if runs_itself(attn) and not class_replaced(attn.processor) else "called"


def attention_left(attn: Any, cls: object, processors: Collection[type]) -> Runs | None:
    """How its pair runs, and why, where ours does not run in its place; arguments as above."""
    mode = attention_mode(attn, cls, processors)
    if mode == "ours":
        return None
    if mode == "called":
        return "after-linear", f"attention is called as a module: {hook_names(attn)}"
    if type(attn) is not cls:
        return mode, f"its attention is a {type(attn).__qualname__}"
    if processor_class(attn.processor) not in processors:
        return mode, f"its processor is a {type(attn.processor).__qualname__}"
    return mode, "dropout is active (training mode)"


def attention_pair(
    attn: Any, path: str, kind: Kind, runs: Runs, *streams: Stream, cast: Cast = "model"
) -> SkipPair:
    """The pair of an attention, or of what somebody put in its place; arguments as those of
    `block_pair`."""
    heads, dim = getattr(attn, "heads", 0), getattr(attn, "inner_dim", 0)
    if not heads or not dim:  # Of another class, of which nothing is known.
        return block_pair(path, kind, runs, *streams, cast=cast)
    return block_pair(path, kind, runs, *streams, cast=cast, heads=heads, head_dim=dim // heads)
