"""TurboDiffusion's own WanModel, 2.1 and 2.2, with its attention types original, sla and sagesla.

Which pairs there are and how each would run is here; how it is recognised is in
`turbodiffusion_structure`, how a block runs fused in `turbodiffusion_block`.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from torch import nn

from turbo_rcm_patch.config import Kind, PatchConfig
from turbo_rcm_patch.ops.dispatch import quantises
from turbo_rcm_patch.patching.blocks import (
    KeptTables,
    check_head_dim,
    check_parameters,
    check_weights,
    distinct,
)
from turbo_rcm_patch.patching.families.turbodiffusion_block import TurboBlockForward
from turbo_rcm_patch.patching.families.turbodiffusion_structure import (
    FORWARDS,
    RotaryForward,
    has_image,
    is_sparse,
    lacks_rotary,
    unwrapped,
    why_attention_called,
    why_feed_forward_called,
)
from turbo_rcm_patch.patching.pairs import (
    Runs,
    States,
    block_pair,
    foreign,
    install,
    left_alone,
    linear_pair,
    norms_of,
    states_of,
    unknown,
    with_image,
)
from turbo_rcm_patch.patching.plain import why_not_plain
from turbo_rcm_patch.patching.record import innermost
from turbo_rcm_patch.patching.registry import author_class
from turbo_rcm_patch.patching.state import Installation, ModelPlan
from turbo_rcm_patch.skip import SkipPair, Stream

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
        for name in ("self_attn", "cross_attn"):
            attn = getattr(unwrapped(wrapped), name, None)
            if type(attn) in known:
                _check_attention(f"blocks.{index}.{name}", attn)


def _check_attention(path: str, attn: Any) -> None:
    check_head_dim(path, attn.dim // attn.num_heads)
    check_weights(path, {name: getattr(attn, name) for name in ("q", "k", "v")})


def plan(model: nn.Module, path: str, config: PatchConfig) -> ModelPlan:
    """The pairs of every block, how each would run, and the block forwards to install."""
    network: Any = model
    result = ModelPlan(model, path, config, states=[])
    tables = KeptTables()
    for index, block in distinct(map(unwrapped, network.blocks)):
        where = f"{path}.blocks.{index}".lstrip(".")
        if not _has(block, ("self_attn", "cross_attn", "ffn")):
            result.states.append(unknown(where, block))
            continue
        named = author_class(block).__name__ == "WanAttentionBlock"
        whole = foreign(block, result, (author_class(block),) if named else ())
        states = _block_states(block, where, config, whole)
        install(result, block, where, states, TurboBlockForward, tables)
        fused = any(state.live for state in states.values())
        if fused and lacks_rotary(block.self_attn) and innermost(block.self_attn):
            rotary = partial(RotaryForward, block.self_attn)
            result.installations.append(Installation(block.self_attn, "forward", rotary))
    return result


def _block_states(block: Any, path: str, config: PatchConfig, whole: str) -> States:
    """The pairs of one block, by the name of their branch."""
    attn, cross, ffn = block.self_attn, block.cross_attn, block.ffn
    pairs = {
        "self_attn": _attention_pair(attn, f"{path}.self_attn", "self", config, whole),
        "cross_attn": _attention_pair(cross, f"{path}.cross_attn", "cross", config, whole),
    }
    if is_sparse(attn):
        pair, why = pairs["self_attn"], pairs["self_attn"].reason
        where = f"{pair.path}.attn_op.local_attn"
        called = pair.runs == "as-written" or _is_called(pair)
        pairs["linear"] = linear_pair(
            pair, where, "as-written" if called else "in-kernel", why if called else ""
        )
    if has_image(cross):
        called = _is_called(pairs["cross_attn"])
        pairs["cross_attn"], pairs["image"] = with_image(
            pairs["cross_attn"], config, called=called
        )
    runs = left_alone("feed-forward", config, whole) or _feed_forward_runs(ffn)
    pairs["ffn"] = block_pair(
        f"{path}.ffn", "feed-forward", runs, Stream("video", "1", "e[5]", "[B, 1, C]")
    )
    linears: dict[str, dict[str, nn.Module]] = {}
    if not why_attention_called(attn, "self"):
        linears["self_attn"] = {name: getattr(attn, name) for name in "qkvo"}
    if not why_attention_called(cross, "cross"):
        linears["image"] = {
            name: getattr(cross, name) for name in ("k_img", "v_img") if has_image(cross)
        }
        # With its image branch left as written, cross-attention is called whole.
        if "image" not in pairs or pairs["image"].runs != "as-written":
            linears["cross_attn"] = {name: getattr(cross, name) for name in "qkvo"}
    if not why_feed_forward_called(ffn):
        linears["ffn"] = {"0": ffn[0], "2": ffn[2]}
    norms = {"self_attn": norms_of(attn), "cross_attn": norms_of(cross)}
    # Its tokens share the queries of the text.
    norms["image"] = norms["cross_attn"]
    return states_of(pairs, linears, config, norms, close="o")


def _attention_pair(attn: Any, path: str, kind: Kind, config: PatchConfig, whole: str) -> SkipPair:
    gated = [Stream("video", "1", "e[2]", "[B, 1, C]")] if kind == "self" else []
    runs = left_alone(kind, config, whole) or _attention_runs(attn, kind, config)
    heads, dim = getattr(attn, "num_heads", 0), getattr(attn, "dim", 0)
    head_dim = dim // heads if heads else 0
    return block_pair(path, kind, runs, *gated, heads=heads * bool(dim), head_dim=head_dim)


def _attention_runs(attn: Any, kind: str, config: PatchConfig) -> Runs:
    why = why_attention_called(attn, kind)
    sparse = is_sparse(attn)
    if not why and sparse and not quantises(config.attention):
        why = f"attention={config.attention!r} leaves a sparse attention to its author"
    if not why and why_not_plain(attn.o):
        why = f"{_OUTPUT_CALLED}{why_not_plain(attn.o)}"
    if why:
        return "after-linear", why
    one_launch = config.form == "one-launch" and not sparse
    return ("one-launch" if one_launch else "two-launch"), ""


_OUTPUT_CALLED: Final = "o is called: "


def _is_called(pair: SkipPair) -> bool:
    """Whether an attention is called whole, and not its output projection alone."""
    return pair.runs == "after-linear" and not pair.reason.startswith(_OUTPUT_CALLED)


def _feed_forward_runs(ffn: Any) -> Runs:
    why = why_feed_forward_called(ffn)
    if not why and why_not_plain(ffn[2]):
        why = f"its last Linear is called: {why_not_plain(ffn[2])}"
    return ("after-linear", why) if why else ("in-linear", "")
