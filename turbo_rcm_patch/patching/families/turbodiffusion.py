"""TurboDiffusion's own WanModel, 2.1 and 2.2, with its attention types original, sla and sagesla.

Which pairs there are and how each would run is here; how it is recognised is in
`turbodiffusion_structure`, how a block runs fused in `turbodiffusion_block`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from turbo_rcm_patch.config import Kind, PatchConfig
from turbo_rcm_patch.errors import DTypeError, ShapeError
from turbo_rcm_patch.ops.dispatch import quantises
from turbo_rcm_patch.ops.spec import MAX_HEAD_DIM
from turbo_rcm_patch.patching.blocks import KeptTables, distinct
from turbo_rcm_patch.patching.families._sla import linear_pair
from turbo_rcm_patch.patching.families.turbodiffusion_block import TurboBlockForward
from turbo_rcm_patch.patching.families.turbodiffusion_rotary import (
    RotaryForward,
    lacks_rotary,
)
from turbo_rcm_patch.patching.families.turbodiffusion_structure import (
    FORWARDS,
    has_image,
    is_sparse,
    refuse_parallel,
    unwrapped,
    why_attention_called,
    why_feed_forward_called,
)
from turbo_rcm_patch.patching.linears import pair_state
from turbo_rcm_patch.patching.plain import why_not_plain
from turbo_rcm_patch.patching.record import innermost, record_of
from turbo_rcm_patch.patching.registry import author_class
from turbo_rcm_patch.patching.signature import check_parameters
from turbo_rcm_patch.patching.state import Installation, ModelPlan, PairState
from turbo_rcm_patch.skip import Residual, SkipPair, Stream

__all__ = ["check", "plan", "recognises"]

_FLOATS: Final = (torch.bfloat16, torch.float16, torch.float32)
_LAYOUT: Final = ("norm1", "self_attn", "norm3", "cross_attn", "norm2", "ffn", "modulation")
_ATTENTION_LAYOUT: Final = (
    "q", "k", "v", "o", "norm_q", "norm_k", "attn_op", "num_heads", "dim", "eps",
)  # fmt: skip


def recognises(model: nn.Module) -> bool:
    """Whether a class called WanModel is laid out as TurboDiffusion's; others have that name."""
    blocks = getattr(model, "blocks", None)
    if not isinstance(blocks, nn.ModuleList) or len(blocks) == 0:
        return False
    block = unwrapped(blocks[0])
    if author_class(block).__name__ != "WanAttentionBlock" or not _has(block, _LAYOUT):
        return False
    return _has(block.self_attn, _ATTENTION_LAYOUT) and _has(block.cross_attn, _ATTENTION_LAYOUT)


def _has(module: object, names: tuple[str, ...]) -> bool:
    return all(hasattr(module, name) for name in names)


def check(model: nn.Module) -> None:
    """Raise a typed error if this instance cannot be patched at all."""
    network: Any = model
    known = {
        type(module): FORWARDS[type(module).__name__]
        for module in network.blocks.modules()
        if type(module).__name__ in FORWARDS
    }
    check_parameters({cls.forward: names for cls, names in known.items()}, "TurboDiffusion")
    for index, wrapped in enumerate(network.blocks):
        block = unwrapped(wrapped)
        for name in ("self_attn", "cross_attn"):
            _check_attention(f"blocks.{index}.{name}", getattr(block, name))


def _check_attention(path: str, attn: Any) -> None:
    refuse_parallel(path, attn.attn_op)
    head_dim = attn.dim // attn.num_heads
    if head_dim > MAX_HEAD_DIM or head_dim % 2:
        raise ShapeError(
            f"{path}: head_dim",
            expected=f"an even number up to {MAX_HEAD_DIM}",
            got=str(head_dim),
            remedy="This model cannot run through the fused attention",
        )
    for name in ("q", "k", "v"):
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
    tables = KeptTables()
    for index, block in distinct(map(unwrapped, network.blocks)):
        whole = "" if record_of(model) is not None else _foreign(block)
        states = _block_states(block, f"{path}.blocks.{index}".lstrip("."), config, whole)
        result.states += states.values()
        if any(state.live for state in states.values()):
            first = not result.installations
            make = partial(TurboBlockForward, block, tables, states, config, result.copies, first)
            result.installations.append(Installation(block, "forward", make))
            if lacks_rotary(block.self_attn) and innermost(block.self_attn):
                rotary = partial(RotaryForward, block.self_attn)
                result.installations.append(Installation(block.self_attn, "forward", rotary))
    return result


def _foreign(block: Any) -> str:
    """Why a whole block is left alone, or ""."""
    if author_class(block).__name__ != "WanAttentionBlock":
        return f"the block is a {type(block).__qualname__}"
    return "" if innermost(block) else "the block's forward was replaced by somebody else's"


def _block_states(block: Any, path: str, config: PatchConfig, whole: str) -> dict[str, PairState]:
    """The pairs of one block, by the name of their branch."""
    attn, cross, ffn = block.self_attn, block.cross_attn, block.ffn
    pairs = {
        "self_attn": _attention_pair(attn, f"{path}.self_attn", "self", config, whole),
        "cross_attn": _attention_pair(cross, f"{path}.cross_attn", "cross", config, whole),
    }
    if is_sparse(attn):
        pairs["self_attn"], pairs["linear"] = _with_linear(pairs["self_attn"], config)
    if has_image(cross):
        pairs["cross_attn"], pairs["image"] = _with_image(pairs["cross_attn"], config)
    runs, reason = _left("feed-forward", config, whole) or _feed_forward_runs(ffn)
    pairs["ffn"] = SkipPair(
        path=f"{path}.ffn",
        kind="feed-forward",
        heads=0,
        head_dim=0,
        streams=(Stream("video", "1", "e[5]", "[B, 1, C]"),),
        cast="model",
        projection=True,
        runs=runs,
        reason=reason,
    )
    ours = {
        "self_attn": [] if why_attention_called(attn, "self") else ["q", "k", "v", "o"],
        "cross_attn": [] if why_attention_called(cross, "cross") else ["q", "k", "v", "o"],
        "image": [] if why_attention_called(cross, "cross") else ["k_img", "v_img"],
        "ffn": [] if why_feed_forward_called(ffn) else ["0", "2"],
    }
    if "image" in pairs and pairs["image"].runs == "as-written":
        ours["cross_attn"] = []  # It is called whole.
    branches = {"self_attn": attn, "cross_attn": cross, "image": cross, "ffn": ffn}
    return {
        name: pair_state(
            pair, {one: getattr(branches[name], one) for one in ours.get(name, [])}, config
        )
        for name, pair in pairs.items()
    }


def _left(kind: Kind, config: PatchConfig, whole: str) -> tuple[Residual, str] | None:
    """Whether a pair is left alone for reasons outside its branch."""
    if whole:
        return "as-written", whole
    if kind not in config.kinds:
        return "as-written", f"PatchConfig.kinds leaves out {kind!r}"
    return None


def _attention_pair(attn: Any, path: str, kind: Kind, config: PatchConfig, whole: str) -> SkipPair:
    runs, reason = _left(kind, config, whole) or _attention_runs(attn, kind, config)
    gated = Stream("video", "1", "e[2]", "[B, 1, C]")
    return SkipPair(
        path=path,
        kind=kind,
        heads=attn.num_heads,
        head_dim=attn.dim // attn.num_heads,
        streams=(gated if kind == "self" else Stream("video", "1", "1"),),
        cast="model",
        projection=True,
        runs=runs,
        reason=reason,
    )


def _attention_runs(attn: Any, kind: str, config: PatchConfig) -> tuple[Residual, str]:
    why = why_attention_called(attn, kind)
    sparse = is_sparse(attn)
    if not why and sparse and not quantises(config.attention):
        why = f"attention={config.attention!r} leaves a sparse attention to its author"
    if not why and why_not_plain(attn.o):
        why = f"o is called: {why_not_plain(attn.o)}"
    if why:
        return "after-linear", why
    one_launch = config.form == "one-launch" and not sparse
    return ("one-launch" if one_launch else "two-launch"), ""


def _with_linear(pair: SkipPair, config: PatchConfig) -> tuple[SkipPair, SkipPair]:
    """Sparse-linear attention: the sum of its branches is a pair of its own, before o."""
    called = pair.runs == "as-written" or (
        pair.runs == "after-linear" and not pair.reason.startswith("o is called")
    )
    path = f"{pair.path}.attn_op.local_attn"
    if called:
        return pair, linear_pair(pair, path, "as-written", pair.reason)
    return pair, linear_pair(pair, path, "in-kernel", "")


def _with_image(pair: SkipPair, config: PatchConfig) -> tuple[SkipPair, SkipPair]:
    """Cross-attention and its image branch: they share queries and projection, so also a fate."""
    left = _left("image", config, "")
    called = pair.runs == "after-linear" and not pair.reason.startswith("o is called")
    reason = left[1] if left else pair.reason if called else ""
    if pair.runs == "as-written":
        reason = f"the cross-attention around it is as written: {pair.reason}"
    elif left and not called:
        words = "attention is called as a module, because its image branch is left as written"
        pair = replace(pair, runs="after-linear", reason=words)
    image = replace(
        pair,
        path=f"{pair.path}.image",
        kind="image",
        streams=(Stream("text attention", "1", "1"),),
        projection=False,
        runs="as-written" if reason else "in-kernel",
        reason=reason,
    )
    return pair, image


def _feed_forward_runs(ffn: Any) -> tuple[Residual, str]:
    why = why_feed_forward_called(ffn)
    if not why and why_not_plain(ffn[2]):
        why = f"its last Linear is called: {why_not_plain(ffn[2])}"
    return ("after-linear", why) if why else ("in-linear", "")
