"""diffusers' FeedForward: its first Linear with the activation, which of its Linears ours runs,
and when it must be called.

Its last Linear, over which a skip is closed, is the family's.
"""

from __future__ import annotations

from typing import Any

from diffusers.models.activations import GELU
from diffusers.models.attention import FeedForward
from torch import Tensor, nn

from turbo_rcm_patch import ops
from turbo_rcm_patch.patching.author import call
from turbo_rcm_patch.patching.blocks import Mode, plain_dropout
from turbo_rcm_patch.patching.linears import Linears
from turbo_rcm_patch.patching.normed import Normed, tensor_of
from turbo_rcm_patch.patching.plain import bare, drops, hook_names, plain_linear, why_not_plain
from turbo_rcm_patch.patching.plan import FeedForwardPlan
from turbo_rcm_patch.skip import Residual

__all__ = [
    "expand",
    "feed_forward_linears",
    "feed_forward_mode",
    "feed_forward_runs",
    "plan_feed_forward",
]

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


def expand(ff: Any, x: Tensor | Normed, linears: Linears, key: str, *, int8: bool) -> Tensor:
    """What the last Linear gets: the first Linear, its activation and the dropout after it.

    Args:
        ff: A feed-forward whose mode is "ours".
        x: [B, N, C], or what will be.
        linears: Runs the first Linear where it is in int8, in one launch with the activation.
        key: A name for the first Linear within the block.
        int8: Whether int8 is wanted.

    Returns:
        [B, N, inner].
    """
    first, dropout = ff.net[0], ff.net[1]
    h: Tensor | None = None
    if _tanh_gelu(first):
        proj = first.proj
        h = linears.close(key, x, proj, int8=int8, activation="gelu-tanh")
        if h is None and proj.bias is not None and plain_linear(proj, tensor_of(x)):
            h = ops.linear_gelu(tensor_of(x), proj.weight, proj.bias)
    dropped: Tensor = call(dropout, call(first, tensor_of(x)) if h is None else h)
    return dropped


def plan_feed_forward(
    ff: Any, linears: Linears, impl: str, *, int8: bool
) -> FeedForwardPlan | None:
    """Its plan, where both Linears and the dropouts are plain and both have a bias.

    Args:
        ff: A feed-forward whose mode is "ours".
        linears: Knows which Linears run in int8.
        impl: "triton", "reference" or "auto".
        int8: Whether int8 is wanted.
    """
    first, dropout, *rest = ff.net
    last, *dropouts = rest
    if not all(map(plain_dropout, (dropout, *dropouts))):
        return None
    if not _tanh_gelu(first) or first.proj.bias is None:
        return None
    like = first.proj.weight
    expanding = linears.product("ffn.0", (first.proj,), like, int8=int8)
    contracting = linears.product("ffn.2", (last,), like, int8=int8)
    if expanding is None or contracting is None or not expanding.int8 == contracting.int8 == int8:
        return None
    pair = (expanding, contracting) if int8 else None
    return FeedForwardPlan(first.proj, last, pair, impl, "fp32")
