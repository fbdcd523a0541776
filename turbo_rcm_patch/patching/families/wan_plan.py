"""The pairs of a block of the Wan family, and how each would run.

What every family of it shares: the checks, the pairs of a block, and where a block's forward is
installed. How a block runs fused is in `wan_block`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any, Final

from diffusers.models.attention import FeedForward
from torch import nn

from turbo_rcm_patch.config import Kind, PatchConfig
from turbo_rcm_patch.patching.blocks import (
    check_head_dim,
    check_weights,
    distinct,
    known_inside,
    left_by_config,
    refuse_parallel,
    unknown_pair,
)
from turbo_rcm_patch.patching.families._feed_forward import (
    feed_forward_linears,
    feed_forward_runs,
)
from turbo_rcm_patch.patching.families.wan_block import WanBlockForward
from turbo_rcm_patch.patching.families.wan_modes import BlockClasses, attention_mode
from turbo_rcm_patch.patching.families.wan_sla import (
    SLAForward,
    check_sla,
    replaceable,
    with_linear,
)
from turbo_rcm_patch.patching.linears import pair_state
from turbo_rcm_patch.patching.plain import bare, hook_names, why_not_plain
from turbo_rcm_patch.patching.record import innermost, record_of
from turbo_rcm_patch.patching.registry import author_class
from turbo_rcm_patch.patching.signature import check_parameters
from turbo_rcm_patch.patching.sla import attached_proj_l
from turbo_rcm_patch.patching.state import Installation, ModelPlan, PairState
from turbo_rcm_patch.skip import Residual, SkipPair, Stream

__all__ = [
    "BLOCK",
    "block_states",
    "check_blocks",
    "check_signatures",
    "foreign",
    "install_block",
    "left_alone",
    "plan_blocks",
]

#: Parameters of the block that most of the family shares.
BLOCK: Final = ("self", "hidden_states", "encoder_hidden_states", "temb", "rotary_emb")
_ATTENTION: Final = ("hidden_states", "encoder_hidden_states", "attention_mask", "rotary_emb")
_GATE_SHAPE: Final = "[B, 1 or N, C]"
#: The sum of SLA's branches where self-attention holds a proj_l and is left dense: for the report.
_LISTED: Final = "linear left"
_MASKED: Final = (
    "a block-causal mask hides later frames, so its attention is exact (torch's "
    "scaled_dot_product_attention with the mask); projection and skip are fused after it"
)


def check_signatures(classes: BlockClasses, parameters: tuple[str, ...] = BLOCK) -> None:
    """Compare the forwards of a block and its parts with what they were when this was written.

    Raises:
        FamilyError: One takes other parameters.
    """
    attention: Any = classes.attention
    processor: Any = classes.processor
    check_parameters(
        {
            classes.block.forward: parameters,
            attention.forward: ("self", *_ATTENTION, "kwargs"),
            processor.__call__: ("self", "attn", *_ATTENTION),
            FeedForward.forward: ("self", "hidden_states", "args", "kwargs"),
        },
        "diffusers",
    )


def check_blocks(model: nn.Module, name: str) -> None:
    """Raise a typed error if the blocks in `model.<name>` cannot be patched at all."""
    refuse_parallel("model", model)
    for where, block in getattr(model, name).named_modules():
        if _laid_out(block):
            for part in ("attn1", "attn2"):
                _check_attention(f"{name}.{where}.{part}", getattr(block, part))


def _laid_out(block: nn.Module) -> bool:
    """Whether the parts of a block can be named; a wrapper may be anything."""
    return all(hasattr(block, part) for part in ("attn1", "attn2", "ffn"))


def _check_attention(path: str, attn: Any) -> None:
    refuse_parallel(path, attn.processor)
    check_head_dim(path, attn.inner_dim // attn.heads)
    check_sla(path, attn)
    check_weights(path, {name: getattr(attn, name) for name in ("to_q", "to_k", "to_v")})


def plan_blocks(
    result: ModelPlan,
    name: str,
    classes: BlockClasses,
    make: type[WanBlockForward] = WanBlockForward,
    *,
    masked: bool = False,
) -> None:
    """Add the blocks in `model.<name>` to a plan.

    Args:
        result: The plan of the model. Blocks have to be added in the order in which they run,
            because the guard looks at the inputs of the first one.
        name: The list of blocks.
        classes: What its blocks are made of.
        make: What stands in for a block's forward.
        masked: Whether self-attention gets a mask.
    """
    blocks: Iterable[nn.Module] = getattr(result.model, name)
    for index, child in distinct(blocks):
        inner, block = known_inside(child, (classes.block,))
        path = f"{result.path}.{name}.{index}.{inner}".strip(".")
        if not _laid_out(block):
            result.states.append(PairState(unknown_pair(path, block)))
            continue
        whole = foreign(block, result, classes)
        states = block_states(block, path, result.config, classes, whole, masked=masked)
        install_block(result, block, states, classes, make)


def install_block(
    result: ModelPlan,
    block: nn.Module,
    states: dict[str, PairState],
    classes: BlockClasses,
    make: type[WanBlockForward],
) -> None:
    """Add the pairs of one block to a plan, and its forward if any of them is fused."""
    result.states += states.values()
    if any(state.live for state in states.values()):
        head = not result.installations
        forward = partial(make, block, classes, states, result.config, result.copies, head)
        result.installations.append(Installation(block, "forward", forward))
    attn: Any = block.attn1
    if "linear" in states:
        sla = partial(SLAForward, attn, classes.processor, result.config)
        result.installations.append(Installation(attn, "forward", sla))


def foreign(block: nn.Module, result: ModelPlan, classes: BlockClasses) -> str:
    """Why a whole block is left alone, or ""."""
    if record_of(result.model) is not None:
        return ""
    if author_class(block) is not classes.block:
        return f"the block is a {type(block).__qualname__}"
    return "" if innermost(block) else "the block's forward was replaced by somebody else's"


def block_states(
    block: Any,
    path: str,
    config: PatchConfig,
    classes: BlockClasses,
    whole: str,
    *,
    masked: bool = False,
) -> dict[str, PairState]:
    """The pairs of one block, by the name of their branch.

    Args:
        block: The block.
        path: Where it sits.
        config: How the model is patched.
        classes: What the block is made of.
        whole: Why all of it is left alone, or "".
        masked: Whether its self-attention gets a mask.

    Returns:
        With "linear" for the sum of SLA's two branches, where self-attention runs SLA.
    """
    pair = partial(_attention_pair, config=config, classes=classes, whole=whole)
    pairs = {
        "attn1": pair(block.attn1, f"{path}.attn1", "self", masked=masked),
    }
    if attached_proj_l(block.attn1) is not None:
        dense = _left_dense(block.attn1, config, classes, whole, masked)
        pairs["attn1"], pairs[_LISTED if dense else "linear"] = with_linear(
            pairs["attn1"], block.attn1, config, dense=dense
        )
    pairs["attn2"] = pair(block.attn2, f"{path}.attn2", "cross")
    if block.attn2.add_k_proj is not None:
        pairs["attn2"], pairs["image"] = _with_image(pairs["attn2"], block.attn2, config)
    runs, reason = left_alone("feed-forward", config, whole) or feed_forward_runs(block.ffn)
    pairs["ffn"] = SkipPair(
        path=f"{path}.ffn",
        kind="feed-forward",
        heads=0,
        head_dim=0,
        streams=(Stream("video", "1", "c_gate_msa", _GATE_SHAPE),),
        cast="fp32",
        projection=True,
        runs=runs,
        reason=reason,
    )
    branches = {"attn1": block.attn1, "attn2": block.attn2, "image": block.attn2, "ffn": block.ffn}
    called = {"linear", _LISTED}  # It has no Linear of its own that could run in int8.
    # With its image branch left as written, cross-attention is called whole.
    if "image" in pairs and pairs["image"].runs == "as-written":
        called.add("attn2")
    if "linear" in pairs and config.attention == "sage":
        called.add("attn1")
    return {
        name: pair_state(
            pair, {} if name in called else _linears(name, branches[name], classes), config
        )
        for name, pair in pairs.items()
    }


def _left_dense(
    attn: Any, config: PatchConfig, classes: BlockClasses, whole: str, masked: bool
) -> bool:
    """Whether SLA may not take the place of an attention that holds a proj_l."""
    known = type(attn) is classes.attention and type(attn.processor) is classes.processor
    if masked or not known or not replaceable(attn):
        return True
    return left_alone("self", config, whole) is not None


def _linears(name: str, branch: Any, classes: BlockClasses) -> dict[str, nn.Module]:
    """The Linears that a branch of ours runs itself, by name; none where it is called whole."""
    if name == "ffn":
        return feed_forward_linears(branch)
    if attention_mode(branch, classes) != "ours":
        return {}
    if name == "image":
        names = ["to_added_kv"] if branch.fused_projections else ["add_k_proj", "add_v_proj"]
        return {name: getattr(branch, name) for name in names}
    names = ["to_q", "to_k", "to_v"]
    if branch.fused_projections:
        names = ["to_q", "to_kv"] if branch.is_cross_attention else ["to_qkv"]
    return {name: getattr(branch, name) for name in names} | {"to_out.0": branch.to_out[0]}


def left_alone(kind: Kind, config: PatchConfig, whole: str) -> tuple[Residual, str] | None:
    """Whether a pair is left alone for reasons outside its branch."""
    return ("as-written", whole) if whole else left_by_config(kind, config)


def _attention_pair(
    attn: Any,
    path: str,
    kind: Kind,
    *,
    config: PatchConfig,
    classes: BlockClasses,
    whole: str,
    masked: bool = False,
) -> SkipPair:
    left = left_alone(kind, config, whole)
    runs, reason = left or _attention_runs(attn, config, classes, masked)
    gated = kind == "self"
    return SkipPair(
        path=path,
        kind=kind,
        heads=attn.heads,
        head_dim=attn.inner_dim // attn.heads,
        streams=(Stream("video", "1", "gate_msa", _GATE_SHAPE if gated else ""),)
        if gated
        else (Stream("video", "1", "1"),),
        cast="fp32" if gated else "model",
        projection=True,
        runs=runs,
        reason=reason,
    )


def _attention_runs(
    attn: Any, config: PatchConfig, classes: BlockClasses, masked: bool
) -> tuple[Residual, str]:
    mode = attention_mode(attn, classes)
    if mode == "as-written":
        if type(attn) is not classes.attention:
            return mode, f"its attention is a {type(attn).__qualname__}"
        if type(attn.processor) is not classes.processor:
            return mode, f"its processor is a {type(attn.processor).__qualname__}"
        return mode, "dropout is active (training mode)"
    if mode == "called":
        return "after-linear", f"attention is called as a module: {hook_names(attn)}"
    why = why_not_plain(attn.to_out[0])
    if why:
        called = f"to_out[0] is called: {why}"
        return "after-linear", f"{called}; {_MASKED}" if masked else called
    if masked:
        return "two-launch", _MASKED
    return ("one-launch" if config.form == "one-launch" else "two-launch"), ""


def _with_image(cross: SkipPair, attn: Any, config: PatchConfig) -> tuple[SkipPair, SkipPair]:
    """Cross-attention and its image branch: they share queries and projection, so also a fate."""
    runs: Residual = "in-kernel"
    left = left_alone("image", config, "")
    reason = left[1] if left else ""
    if cross.runs == "as-written":
        reason = f"the cross-attention around it is as written: {cross.reason}"
    elif not bare(attn):
        reason = cross.reason
    elif left:
        words = "attention is called as a module, because its image branch is left as written"
        cross = replace(cross, runs="after-linear", reason=words)
    if reason:
        runs = "as-written"
    image = SkipPair(
        path=f"{cross.path}.image",
        kind="image",
        heads=cross.heads,
        head_dim=cross.head_dim,
        streams=(Stream("text attention", "1", "1"),),
        cast="model",
        projection=False,
        runs=runs,
        reason=reason,
    )
    return cross, image
