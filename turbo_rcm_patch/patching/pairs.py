"""The pairs of a model's blocks and the forwards to install, as every family of blocks lists them.

A family says which module is which and why one of them is called; what follows from that is here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from torch import nn

from turbo_rcm_patch.config import Kind, PatchConfig
from turbo_rcm_patch.patching import plain
from turbo_rcm_patch.patching.block import BlockForward
from turbo_rcm_patch.patching.blocks import distinct, known_inside, left_by_config
from turbo_rcm_patch.patching.linears import pair_state
from turbo_rcm_patch.patching.parallel import Ranks
from turbo_rcm_patch.patching.plain import bare, hook_names, why_not_plain
from turbo_rcm_patch.patching.record import innermost, record_of
from turbo_rcm_patch.patching.registry import author_class
from turbo_rcm_patch.patching.state import Installation, ModelPlan, PairState
from turbo_rcm_patch.skip import Cast, Residual, SkipPair, Stream

#: How a pair runs, and why, in words.
Runs = tuple[Residual, str]
#: The pairs of a block, by the names of their branches.
States = dict[str, PairState]

_REPLACED: Final = "the block's forward was replaced by somebody else's"


def add_blocks(
    result: ModelPlan,
    name: str,
    classes: tuple[type[nn.Module], ...],
    states_of_block: Callable[[Any, str, str], States],
    make: type[BlockForward],
    shared: Any = None,
) -> None:
    """Add the blocks in `model.<name>` to a plan.

    Args:
        result: The plan of the model. Blocks have to be added in the order in which they run,
            because the guard looks at the inputs of the first one.
        name: The list of blocks.
        classes: What its blocks may be.
        states_of_block: Gives the pairs of a block from the block, its path, and why all of it is
            left alone or "".
        make: What stands in for a block's forward. Without the modules of its branches the pairs
            of a block cannot be named; a wrapper may be anything.
        shared: What all blocks of the model are given.

    Raises:
        FamilyError: A branch names what is not there.
    """
    parts = [name for branch in make.branches for name in (branch.name, branch.last) if name]
    for index, child in distinct(getattr(result.model, name)):
        inner, block = known_inside(child, classes)
        path = f"{result.path}.{name}.{index}.{inner}".strip(".")
        if author_class(block) in classes:
            make.check_branches(path, block)
        elif not all(hasattr(block, part) for part in parts):
            result.states.append(unknown(path, block))
            continue
        states = states_of_block(block, path, foreign(block, result, classes))
        install(result, block, path, states, make, shared)


def install(
    result: ModelPlan,
    block: nn.Module,
    path: str,
    states: States,
    make: type[BlockForward],
    shared: Any = None,
) -> None:
    """Add the pairs of one block to a plan, and its forward if any of them is fused.

    Args:
        result: The plan of the model.
        block: The block.
        path: Where it sits.
        states: Its pairs.
        make: What stands in for its forward.
        shared: What all blocks of the model are given.

    Raises:
        FamilyError: A branch names what is not there.
    """
    result.states += states.values()
    if any(state.live for state in states.values()):
        make.check_branches(path, block, states)
        first = not result.installations
        if result.ranks is None:
            result.ranks = Ranks(result.states, result.model)
        forward = partial(
            _sharing, result.ranks, make, shared, block, states, result.config, result.copies,
            first,
        )  # fmt: skip
        result.installations.append(Installation(block, "forward", forward))


def _sharing(ranks: Ranks, make: Callable[..., Any], *args: Any) -> Any:
    """What stands in for a block's forward, with what all blocks of its model share."""
    made = make(*args)
    made.ranks = ranks
    ranks.append(made)
    return made


def foreign(block: nn.Module, result: ModelPlan, classes: tuple[type[nn.Module], ...]) -> str:
    """Why a whole block is left alone, or ""."""
    if type(block) in plain.replaced:
        return f"somebody replaced {type(block).__qualname__}.forward"
    if record_of(result.model) is not None:
        return ""
    if author_class(block) not in classes:
        return f"the block is a {type(block).__qualname__}"
    return "" if innermost(block) else _REPLACED


def unknown(path: str, module: nn.Module) -> PairState:
    """Stands in the report for a block of which nothing is known; it runs as it is."""
    pair = SkipPair(
        path=path,
        kind="self",
        heads=0,
        head_dim=0,
        streams=(),
        cast="model",
        projection=False,
        runs="as-written",
        reason=f"it is a {type(module).__qualname__}, of which nothing is known",
    )
    return PairState(pair)


def linear_runs(last: nn.Module, plain: Residual) -> Runs:
    """How a pair runs that a Linear ends, and why.

    Args:
        last: The Linear.
        plain: How it runs where the Linear's weight can be read.
    """
    why = why_not_plain(last)
    return ("after-linear", f"its last Linear is called: {why}") if why else (plain, "")


def called_runs(module: nn.Module, cls: type[nn.Module]) -> Runs | None:
    """How a pair runs whose module is called whole, and why; None where ours runs in its place.

    Args:
        module: Of the branch.
        cls: Of which ours knows what it computes. A subclass is another class.
    """
    if type(module) is not cls:
        return "after-linear", f"called as a module: it is a {type(module).__qualname__}"
    if bare(module):
        return None
    return "after-linear", f"called as a module: {hook_names(module)}"


def norms_of(attn: Any) -> tuple[Any, ...]:
    """The norms of q and k; none of what somebody put in an attention's place."""
    norms = [getattr(attn, name, None) for name in ("norm_q", "norm_k")]
    return tuple(norms) if hasattr(attn, "norm_q") else ()


def left_alone(kind: Kind, config: PatchConfig, whole: str) -> Runs | None:
    """Whether a pair is left alone for reasons outside its branch."""
    return ("as-written", whole) if whole else left_by_config(kind, config)


def block_pair(
    path: str,
    kind: Kind,
    runs: Runs,
    *streams: Stream,
    cast: Cast = "model",
    heads: int = 0,
    head_dim: int = 0,
) -> SkipPair:
    """A pair that is closed across an output projection.

    Args:
        path: Where its branch sits.
        kind: Of the branch.
        runs: How it runs, and why.
        *streams: Its residual streams; a sum with nothing in front of it where none is given.
        cast: Where it is summed.
        heads: Of an attention.
        head_dim: Likewise.
    """
    return SkipPair(
        path=path,
        kind=kind,
        heads=heads,
        head_dim=head_dim,
        streams=streams or (Stream("video", "1", "1"),),
        cast=cast,
        projection=True,
        runs=runs[0],
        reason=runs[1],
    )


def linear_pair(pair: SkipPair, path: str, runs: Residual, reason: str) -> SkipPair:
    """The sum of a sparse and of a projected linear attention (SLA), a pair of its own before W_o.

    Args:
        pair: The self-attention around it.
        path: Where the linear branch sits.
        runs: How the sum is closed.
        reason: Why.
    """
    return _inside(pair, path, "proj_l of the linear attention", runs, reason)


def with_image(cross: SkipPair, config: PatchConfig, *, called: bool) -> tuple[SkipPair, SkipPair]:
    """Cross-attention and its image branch: they share queries and projection, so also a fate.

    Args:
        cross: The cross-attention.
        config: How the model is patched.
        called: Whether it is called whole.
    """
    left = left_by_config("image", config)
    reason = left[1] if left else ""
    if cross.runs == "as-written":
        reason = f"the cross-attention around it is as written: {cross.reason}"
    elif called:
        reason = cross.reason
    elif left:
        words = "attention is called as a module, because its image branch is left as written"
        cross = replace(cross, runs="after-linear", reason=words)
    runs: Residual = "as-written" if reason else "in-kernel"
    image = _inside(cross, f"{cross.path}.image", "text attention", runs, reason)
    return cross, replace(image, kind="image")


def _inside(pair: SkipPair, path: str, stream: str, runs: Residual, reason: str) -> SkipPair:
    """The sum of two attentions before their projection."""
    streams = (Stream(stream, "1", "1"),)
    return replace(pair, path=path, streams=streams, projection=False, runs=runs, reason=reason)


def states_of(
    pairs: Mapping[str, SkipPair],
    linears: Mapping[str, Mapping[str, nn.Module]],
    config: PatchConfig,
    norms: Mapping[str, Sequence[Any]] | None = None,
    close: str = "to_out.0",
) -> States:
    """The states of a block's pairs.

    Args:
        pairs: By the names of their branches.
        linears: The Linears that ours runs itself, by name, where a branch has any.
        config: How the model is patched.
        norms: Those of q and k, where a branch has them.
        close: The name of an attention's output projection.
    """
    return {
        name: pair_state(
            pair, linears.get(name, {}), config, norms=(norms or {}).get(name, ()), close=close
        )
        for name, pair in pairs.items()
    }
