"""diffusers' Wan transformer: 2.1 T2V and I2V, 2.2 A14B, and 2.2 TI2V with a gate per token.

Written against `WanTransformerBlock.forward` and `WanAttnProcessor.__call__` of diffusers 0.42
(Wan: arXiv 2503.20314). Which pairs there are and how each would run is here; how a block runs
fused is in `wan_block`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch
from diffusers.models.activations import GELU
from diffusers.models.attention import FeedForward
from diffusers.models.transformers.transformer_wan import (
    WanAttention,
    WanAttnProcessor,
    WanTransformerBlock,
)
from torch import nn

from turbo_rcm_patch.config import Kind, PatchConfig
from turbo_rcm_patch.errors import DTypeError, HeadDimError
from turbo_rcm_patch.ops.spec import MAX_HEAD_DIM
from turbo_rcm_patch.patching.families.wan_block import (
    WanBlockForward,
    attention_mode,
    feed_forward_mode,
    refuse_parallel,
)
from turbo_rcm_patch.patching.linears import pair_state
from turbo_rcm_patch.patching.plain import bare, hook_names, why_not_plain
from turbo_rcm_patch.patching.record import innermost, record_of
from turbo_rcm_patch.patching.signature import check_parameters
from turbo_rcm_patch.patching.state import Installation, ModelPlan, PairState
from turbo_rcm_patch.skip import Residual, SkipPair, Stream

__all__ = ["check", "plan"]

_FLOATS: Final = (torch.bfloat16, torch.float16, torch.float32)
_BLOCK: Final = ("self", "hidden_states", "encoder_hidden_states", "temb", "rotary_emb")
_ATTENTION: Final = ("hidden_states", "encoder_hidden_states", "attention_mask", "rotary_emb")
_GATE_SHAPE: Final = "[B, 1 or N, C]"


def check(model: nn.Module) -> None:
    """Raise a typed error if this instance cannot be patched at all."""
    check_parameters(
        {
            WanTransformerBlock.forward: _BLOCK,
            WanAttention.forward: ("self", *_ATTENTION, "kwargs"),
            WanAttnProcessor.__call__: ("self", "attn", *_ATTENTION),
            FeedForward.forward: ("self", "hidden_states", "args", "kwargs"),
        },
        "diffusers",
    )
    network: Any = model
    refuse_parallel("model", network)
    for index, block in enumerate(network.blocks):
        for name in ("attn1", "attn2"):
            _check_attention(f"blocks.{index}.{name}", getattr(block, name))


def _check_attention(path: str, attn: Any) -> None:
    refuse_parallel(path, attn.processor)
    head_dim = attn.inner_dim // attn.heads
    if head_dim > MAX_HEAD_DIM or head_dim % 2:
        raise HeadDimError(
            f"{path}: head_dim",
            expected=f"an even number up to {MAX_HEAD_DIM}",
            got=str(head_dim),
            remedy="This model cannot run through the fused attention",
        )
    # What is called can have any storage dtype; only a plain Linear's weight is the compute dtype.
    for name in ("to_q", "to_k", "to_v"):
        linear = getattr(attn, name)
        if why_not_plain(linear) == "" and linear.weight.dtype not in _FLOATS:
            raise DTypeError(
                f"{path}.{name}.weight",
                expected="bfloat16, float16 or float32",
                got=str(linear.weight.dtype),
                remedy="Cast the model first, e.g. model.to(torch.bfloat16)",
            )


def plan(model: nn.Module, path: str, config: PatchConfig) -> ModelPlan:
    """The pairs of every block, how each would run, and the block forwards to install."""
    network: Any = model
    result = ModelPlan(model, path, config, states=[])
    for index, block in enumerate(network.blocks):
        whole = "" if record_of(model) is not None else _foreign(block)
        states = _block_states(block, f"{path}.blocks.{index}".lstrip("."), config, whole)
        result.states += states.values()
        if any(state.live for state in states.values()):
            head = not result.installations
            make = partial(WanBlockForward, block, states, config, head)
            result.installations.append(Installation(block, "forward", make))
    return result


def _foreign(block: Any) -> str:
    """Why a whole block is left alone, or ""."""
    if type(block) is not WanTransformerBlock:
        return f"the block is a {type(block).__qualname__}"
    return "" if innermost(block) else "the block's forward was replaced by somebody else's"


def _block_states(block: Any, path: str, config: PatchConfig, whole: str) -> dict[str, PairState]:
    """The pairs of one block, by the name of their branch."""
    pairs = {
        "attn1": _attention_pair(block.attn1, f"{path}.attn1", "self", config, whole),
        "attn2": _attention_pair(block.attn2, f"{path}.attn2", "cross", config, whole),
    }
    if block.attn2.add_k_proj is not None:
        pairs["attn2"], pairs["image"] = _with_image(pairs["attn2"], block.attn2, config)
    runs, reason = _left("feed-forward", config, whole) or _feed_forward_runs(block.ffn)
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
    # With its image branch left as written, cross-attention is called whole.
    whole_cross = "image" in pairs and pairs["image"].runs == "as-written"
    return {
        name: pair_state(
            pair,
            {} if name == "attn2" and whole_cross else _linears(name, branches[name]),
            config,
        )
        for name, pair in pairs.items()
    }


def _linears(name: str, branch: Any) -> dict[str, nn.Module]:
    """The Linears that a branch of ours runs itself, by name; none where it is called whole."""
    if name == "ffn" and feed_forward_mode(branch) != "ours":
        return {}
    if name != "ffn" and attention_mode(branch) != "ours":
        return {}
    if name == "ffn":
        first, _, last = branch.net
        gelu = type(first) is GELU and first.approximate == "tanh" and bare(first)
        return ({"net.0.proj": first.proj} if gelu else {}) | {"net.2": last}
    if name == "image":
        names = ["to_added_kv"] if branch.fused_projections else ["add_k_proj", "add_v_proj"]
        return {name: getattr(branch, name) for name in names}
    names = ["to_q", "to_k", "to_v"]
    if branch.fused_projections:
        names = ["to_q", "to_kv"] if branch.is_cross_attention else ["to_qkv"]
    return {name: getattr(branch, name) for name in names} | {"to_out.0": branch.to_out[0]}


def _left(kind: Kind, config: PatchConfig, whole: str) -> tuple[Residual, str] | None:
    """Whether a pair is left alone for reasons outside its branch."""
    if whole:
        return "as-written", whole
    if kind not in config.kinds:
        return "as-written", f"PatchConfig.kinds leaves out {kind!r}"
    return None


def _attention_pair(attn: Any, path: str, kind: Kind, config: PatchConfig, whole: str) -> SkipPair:
    runs, reason = _left(kind, config, whole) or _attention_runs(attn, config)
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


def _attention_runs(attn: Any, config: PatchConfig) -> tuple[Residual, str]:
    mode = attention_mode(attn)
    if mode == "as-written":
        if type(attn) is not WanAttention:
            return mode, f"its attention is a {type(attn).__qualname__}"
        if type(attn.processor) is not WanAttnProcessor:
            return mode, f"its processor is a {type(attn.processor).__qualname__}"
        return mode, "dropout is active (training mode)"
    if mode == "called":
        return "after-linear", f"attention is called as a module: {hook_names(attn)}"
    why = why_not_plain(attn.to_out[0])
    if why:
        return "after-linear", f"to_out[0] is called: {why}"
    return ("one-launch" if config.form == "one-launch" else "two-launch"), ""


def _with_image(cross: SkipPair, attn: Any, config: PatchConfig) -> tuple[SkipPair, SkipPair]:
    """Cross-attention and its image branch: they share queries and projection, so also a fate."""
    runs: Residual = "in-kernel"
    left = _left("image", config, "")
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


def _feed_forward_runs(ffn: Any) -> tuple[Residual, str]:
    mode = feed_forward_mode(ffn)
    if mode == "as-written":
        if type(ffn) is not FeedForward or len(ffn.net) != 3:
            return mode, f"its feed-forward is a {type(ffn).__qualname__} of another form"
        return mode, "dropout is active (training mode)"
    if mode == "called":
        return "after-linear", f"feed-forward is called as a module: {hook_names(ffn)}"
    why = why_not_plain(ffn.net[2])
    return ("after-linear", f"net[2] is called: {why}") if why else ("in-linear", "")
