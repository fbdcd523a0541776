"""diffusers' FeedForward: how it runs, and which of its modules ours runs."""

from __future__ import annotations

from typing import Any

from diffusers.models.activations import GELU
from diffusers.models.attention import FeedForward
from torch import nn

from turbo_rcm_patch.patching.blocks import Mode, plain_dropout
from turbo_rcm_patch.patching.branches import FeedForwardModules
from turbo_rcm_patch.patching.plain import bare, drops, hook_names, why_not_plain
from turbo_rcm_patch.skip import Residual

#: Activation, dropout, Linear, and a last dropout in some models.
_LENGTHS = (3, 4)


def feed_forward_mode(ff: Any) -> Mode:
    """What may run now: ours in its place, the skip after it, or nothing of ours."""
    if type(ff) is not FeedForward or len(ff.net) not in _LENGTHS:
        return "as-written"
    if any(drops(ff.net[i]) for i in range(1, len(ff.net), 2)):
        return "as-written"
    return "ours" if bare(ff) else "called"


def feed_forward_runs(ff: Any) -> tuple[Residual, str]:
    """How its pair runs, and why, in words."""
    mode = feed_forward_mode(ff)
    if mode == "as-written":
        if type(ff) is not FeedForward or len(ff.net) not in _LENGTHS:
            return mode, f"its feed-forward is a {type(ff).__qualname__} of another form"
        return mode, "dropout is active (training mode)"
    if mode == "called":
        return "after-linear", f"feed-forward is called as a module: {hook_names(ff)}"
    why = why_not_plain(ff.net[2])
    if why:
        return "after-linear", f"net[2] is called: {why}"
    if not all(map(plain_dropout, ff.net[3:])):
        return "after-linear", "net[2] is called: what follows it is hooked or no Dropout"
    return "in-linear", ""


def feed_forward_linears(ff: Any) -> dict[str, nn.Module]:
    """The Linears that ours runs itself, by name; none where it is called whole."""
    if feed_forward_mode(ff) != "ours":
        return {}
    first = {"net.0.proj": ff.net[0].proj} if _tanh_gelu(ff.net[0]) else {}
    return first | {"net.2": ff.net[2]}


def _tanh_gelu(module: Any) -> bool:
    return type(module) is GELU and module.approximate == "tanh" and bare(module)


def feed_forward_modules(ff: Any) -> FeedForwardModules:
    """Its modules, where its mode is "ours"."""
    first, dropout, *last = ff.net
    return FeedForwardModules(
        first=first.proj if _tanh_gelu(first) else None,
        called=(first,),
        between=() if plain_dropout(dropout) else (dropout,),
        last=last,
    )
