"""The pairs of a block of the Wan family, and how each would run.

What every family of it shares: the checks, the pairs of a block, and where a block's forward is
installed. How a block runs fused is in `wan_block`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from diffusers.models.attention import FeedForward
from torch import nn

from turbo_rcm_patch.config import PatchConfig
from turbo_rcm_patch.patching.blocks import check_parameters, refuse_parallel
from turbo_rcm_patch.patching.families._attention import (
    attention_left,
    attention_pair,
    check_attention,
)
from turbo_rcm_patch.patching.families._feed_forward import (
    feed_forward_linears,
    feed_forward_runs,
)
from turbo_rcm_patch.patching.families.wan_block import BlockClasses, WanBlockForward
from turbo_rcm_patch.patching.families.wan_sla import (
    SLAForward,
    check_sla,
    replaceable,
    with_linear,
)
from turbo_rcm_patch.patching.pairs import (
    Runs,
    States,
    add_blocks,
    block_pair,
    left_alone,
    norms_of,
    states_of,
    with_image,
)
from turbo_rcm_patch.patching.parallel import processor_class
from turbo_rcm_patch.patching.plain import bare, why_not_plain
from turbo_rcm_patch.patching.sla import attached_proj_l
from turbo_rcm_patch.patching.state import Installation, ModelPlan
from turbo_rcm_patch.skip import Stream

#: Parameters of the block that most of the family shares.
BLOCK: Final = ("self", "hidden_states", "encoder_hidden_states", "temb", "rotary_emb")
_ATTENTION: Final = ("hidden_states", "encoder_hidden_states", "attention_mask", "rotary_emb")
#: Members without which the pairs of a block cannot be named.
_PARTS: Final = ("attn1", "attn2", "ffn")
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


def check_blocks(model: nn.Module, name: str, classes: BlockClasses) -> None:
    """Raise a typed error if the blocks in `model.<name>` cannot be patched at all."""
    refuse_parallel("model", model)
    for where, block in getattr(model, name).named_modules():
        if all(hasattr(block, part) for part in _PARTS):
            for part in ("attn1", "attn2"):
                path, attn = f"{name}.{where}.{part}", getattr(block, part)
                if type(attn) is classes.attention:
                    check_attention(path, attn)
                    check_sla(path, attn)


def plan_blocks(
    result: ModelPlan,
    name: str,
    classes: BlockClasses,
    make: type[WanBlockForward] = WanBlockForward,
    *,
    masked: bool = False,
    states: Callable[..., States] | None = None,
) -> None:
    """Add the blocks in `model.<name>` to a plan.

    Args:
        result: The plan of the model.
        name: The list of blocks.
        classes: What its blocks are made of.
        make: What stands in for a block's forward.
        masked: Whether self-attention gets a mask.
        states: Gives the pairs of a block, where not `block_states` does.
    """

    def of_block(block: Any, path: str, whole: str) -> States:
        make_states = states or partial(block_states, masked=masked)
        found = make_states(block, path, result.config, classes, whole)
        if "linear" in found:
            sla = partial(SLAForward, block.attn1, classes.processor, result.config)
            forwards.append(Installation(block.attn1, "forward", sla))
        return found

    forwards: list[Installation] = []
    add_blocks(result, name, (classes.block,), of_block, make, classes)
    result.installations += forwards


def block_states(
    block: Any,
    path: str,
    config: PatchConfig,
    classes: BlockClasses,
    whole: str,
    *,
    masked: bool = False,
) -> States:
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
    attn, cross = block.attn1, block.attn2
    runs = left_alone("self", config, whole) or _attention_runs(attn, config, classes, masked)
    gate = Stream("video", "1", "gate_msa", _GATE_SHAPE)
    pairs = {"attn1": attention_pair(attn, f"{path}.attn1", "self", runs, gate, cast="fp32")}
    if hasattr(attn, "processor") and attached_proj_l(attn) is not None:
        dense = _left_dense(attn, config, classes, whole, masked)
        pairs["attn1"], pairs[_LISTED if dense else "linear"] = with_linear(
            pairs["attn1"], attn, config, dense=dense
        )
    runs = left_alone("cross", config, whole) or _attention_runs(cross, config, classes, False)
    pairs["attn2"] = attention_pair(cross, f"{path}.attn2", "cross", runs)
    if getattr(cross, "add_k_proj", None) is not None:
        pairs["attn2"], pairs["image"] = with_image(pairs["attn2"], config, called=not bare(cross))
    runs = left_alone("feed-forward", config, whole) or feed_forward_runs(block.ffn)
    gate = Stream("video", "1", "c_gate_msa", _GATE_SHAPE)
    pairs["ffn"] = block_pair(f"{path}.ffn", "feed-forward", runs, gate, cast="fp32")
    linears = {"attn1": _linears(attn, classes), "ffn": feed_forward_linears(block.ffn)}
    if "linear" in pairs and config.attention == "sage":
        del linears["attn1"]
    # With its image branch left as written, cross-attention is called whole.
    if "image" not in pairs or pairs["image"].runs != "as-written":
        linears["attn2"] = _linears(cross, classes)
    if "image" in pairs and classes.mode(cross) == "ours":
        names = ["to_added_kv"] if cross.fused_projections else ["add_k_proj", "add_v_proj"]
        linears["image"] = {name: getattr(cross, name) for name in names}
    norms = {"attn1": norms_of(attn), "attn2": norms_of(cross)}
    # Its tokens share the queries of the text.
    return states_of(pairs, linears, config, norms | {"image": norms["attn2"]})


def _left_dense(
    attn: Any, config: PatchConfig, classes: BlockClasses, whole: str, masked: bool
) -> bool:
    """Whether SLA may not take the place of an attention that holds a proj_l."""
    processor = processor_class(attn.processor)
    known = type(attn) is classes.attention and processor is classes.processor
    if masked or not known or not replaceable(attn):
        return True
    return left_alone("self", config, whole) is not None


def _linears(attn: Any, classes: BlockClasses) -> dict[str, nn.Module]:
    """The Linears that ours runs itself, by name; none where the attention is called whole."""
    if classes.mode(attn) != "ours":
        return {}
    names = ["to_q", "to_k", "to_v"]
    if attn.fused_projections:
        names = ["to_q", "to_kv"] if attn.is_cross_attention else ["to_qkv"]
    return {name: getattr(attn, name) for name in names} | {"to_out.0": attn.to_out[0]}


def _attention_runs(attn: Any, config: PatchConfig, classes: BlockClasses, masked: bool) -> Runs:
    left = attention_left(attn, classes.attention, (classes.processor,))
    if left is not None:
        return left
    why = why_not_plain(attn.to_out[0])
    if why:
        called = f"to_out[0] is called: {why}"
        return "after-linear", f"{called}; {_MASKED}" if masked else called
    if masked:
        return "two-launch", _MASKED
    return ("one-launch" if config.form == "one-launch" else "two-launch"), ""
