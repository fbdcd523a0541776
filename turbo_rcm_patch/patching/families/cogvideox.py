"""diffusers' CogVideoX transformer: 2B, 5B and 1.5, text to video and image to video; and
ConsisID, whose block is the same.

Written against `CogVideoXBlock.forward`, `ConsisIDBlock.forward` and the two attention processors
of diffusers 0.42 (CogVideoX: arXiv 2408.06072). Which pairs there are and how each would run is
here; how a block runs fused is in `cogvideox_block`.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from diffusers.models.attention import FeedForward
from diffusers.models.attention_processor import Attention
from diffusers.models.normalization import CogVideoXLayerNormZero
from diffusers.models.transformers.cogvideox_transformer_3d import CogVideoXBlock
from diffusers.models.transformers.consisid_transformer_3d import ConsisIDBlock
from torch import nn

from turbo_rcm_patch.config import PatchConfig
from turbo_rcm_patch.patching.blocks import (
    KeptTables,
    check_parameters,
    plain_dropout,
    refuse_parallel,
)
from turbo_rcm_patch.patching.families._attention import (
    attention_left,
    attention_pair,
    check_attention,
)
from turbo_rcm_patch.patching.families._feed_forward import (
    feed_forward_linears,
    feed_forward_runs,
)
from turbo_rcm_patch.patching.families.cogvideox_block import (
    PROCESSORS,
    CogVideoXBlockForward,
    mode_of,
    norms_of_heads,
    qkv_names,
)
from turbo_rcm_patch.patching.pairs import (
    Runs,
    States,
    add_blocks,
    block_pair,
    left_alone,
    norms_of,
    states_of,
)
from turbo_rcm_patch.patching.plain import why_not_plain
from turbo_rcm_patch.patching.state import ModelPlan, PairState
from turbo_rcm_patch.skip import SkipPair, Stream

_BLOCKS: Final = (CogVideoXBlock, ConsisIDBlock)
_BLOCK: Final = ("self", "hidden_states", "encoder_hidden_states", "temb", "image_rotary_emb")
_ATTENTION: Final = ("hidden_states", "encoder_hidden_states", "attention_mask")


def check(model: nn.Module) -> None:
    """Raise a typed error if this instance cannot be patched at all."""
    check_parameters(
        {
            CogVideoXBlock.forward: (*_BLOCK, "attention_kwargs"),
            ConsisIDBlock.forward: _BLOCK,
            CogVideoXLayerNormZero.forward: _BLOCK[:4],
            Attention.forward: ("self", *_ATTENTION, "cross_attention_kwargs"),
            FeedForward.forward: ("self", "hidden_states", "args", "kwargs"),
        }
        | {
            processor.__call__: ("self", "attn", *_ATTENTION, "image_rotary_emb")
            for processor in PROCESSORS
        },
        "diffusers",
    )
    network: Any = model
    refuse_parallel("model", network)
    for index, block in enumerate(network.transformer_blocks):
        attn: Any = getattr(block, "attn1", None)
        if type(attn) is not Attention:
            continue
        check_attention(f"transformer_blocks.{index}.attn1", attn)


def plan(model: nn.Module, path: str, config: PatchConfig) -> ModelPlan:
    """The pairs of every block, how each would run, and the block forwards to install."""
    result = ModelPlan(model, path, config, states=[])
    states = partial(_block_states, config=config)
    add_blocks(result, "transformer_blocks", _BLOCKS, states, CogVideoXBlockForward, KeptTables())
    result.states += [PairState(pair) for pair in _face_pairs(model, path)]
    return result


def _face_pairs(network: Any, path: str) -> list[SkipPair]:
    """ConsisID's cross-attentions to the face, whose skips stand between the blocks."""
    runs: Runs = "as-written", "the network's own forward closes it, between two blocks"
    face = Stream("video", "1", "local_face_scale")
    return [
        block_pair(
            f"{path}.perceiver_cross_attention.{index}".lstrip("."), "cross", runs, face,
            heads=attn.heads, head_dim=attn.dim_head,
        )
        for index, attn in enumerate(getattr(network, "perceiver_cross_attention", ()))
    ]  # fmt: skip


def _block_states(block: Any, path: str, whole: str, config: PatchConfig) -> States:
    """The two pairs of one block, by the name of their branch."""
    attn, ff = block.attn1, block.ff
    runs = left_alone("self", config, whole) or _attention_runs(attn, config)
    attention = attention_pair(attn, f"{path}.attn1", "self", runs, *_streams("msa"))
    runs = left_alone("feed-forward", config, whole) or feed_forward_runs(ff)
    pairs = {
        "attn1": attention,
        "ff": block_pair(f"{path}.ff", "feed-forward", runs, *_streams("ff")),
    }
    linears = {"attn1": _attention_linears(attn), "ff": feed_forward_linears(ff)}
    return states_of(pairs, linears, config, {"attn1": norms_of(attn)})


def _streams(branch: str) -> tuple[Stream, Stream]:
    return (
        Stream("text", "1", f"enc_gate_{branch}", "[B, 1, C]"),
        Stream("video", "1", f"gate_{branch}", "[B, 1, C]"),
    )


def _attention_linears(attn: Any) -> dict[str, nn.Module]:
    """The Linears that ours runs itself, by name; none where the attention is called whole."""
    if mode_of(attn) != "ours":
        return {}
    return {name: getattr(attn, name) for name in qkv_names(attn)} | {"to_out.0": attn.to_out[0]}


def _attention_runs(attn: Any, config: PatchConfig) -> Runs:
    if type(attn) is Attention and attn.is_cross_attention:
        return "as-written", "it is a cross-attention"
    left = attention_left(attn, Attention, PROCESSORS)
    if left is not None:
        return left
    notes = []
    if not (attn.norm_q is None and attn.norm_k is None) and not norms_of_heads(attn):
        notes.append("norm_q and norm_k are called: they are no plain layer norms of a head")
    why = why_not_plain(attn.to_out[0])
    if not why and not plain_dropout(attn.to_out[1]):
        why = "what follows it is hooked or no Dropout"
    if why:
        return "after-linear", "; ".join([f"to_out[0] is called: {why}", *notes])
    if config.form == "one-launch":
        notes.append("one launch closes one residual stream, and here are two")
    return "two-launch", "; ".join(notes)
