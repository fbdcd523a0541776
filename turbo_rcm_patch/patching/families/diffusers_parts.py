"""The parts of attentions and feed-forward that the families of diffusers' models share."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

import torch.nn.functional as F
from diffusers.models.attention import FeedForward
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from torch import Tensor, nn

from turbo_rcm_patch.ops.formats import NO_NORMS, Rotary
from turbo_rcm_patch.patching.int8_linears import shared_rows
from turbo_rcm_patch.patching.pieces import called, read_rms_norms
from turbo_rcm_patch.patching.plain import (
    compiling,
    drops,
    hook_names,
    own_function,
    plain_linear,
    replaced_by,
    runs_only_its_forward,
    torchs_own,
    wrote,
)
from turbo_rcm_patch.patching.ulysses import Pending, Ulysses

#: Attention class -> the processors that the fast path can replace. Each family adds its own.
ATTENTIONS: Final[dict[type, tuple[type, ...]]] = {}

#: Functions that a processor looks up in its file.
_CALLED: Final = ("dispatch_attention_fn", "_get_qkv_projections", "_get_added_kv_projections")
#: What is projected -> the names of its Linears, singly and fused.
_LINEARS: Final = {
    "qkv": (("to_q", "to_k", "to_v"), ("to_qkv",)),
    "kv": (("to_k", "to_v"), ("to_kv",)),
    "added": (("add_k_proj", "add_v_proj"), ("to_added_kv",)),
}
_NATIVE: Final = "_native_attention"
#: Class of a processor -> the functions of its attention that were found to be their authors'.
_own_functions: Final[dict[type, list[object]]] = {}


# --- what a block calls --------------------------------------------------------------------------


def linears_of(attn: Any, name: str) -> tuple[Any, ...]:
    """Return the Linears of "qkv", "kv" or "added" (k and v of an image) of an attention: one if
    they are fused."""
    singly, fused = _LINEARS[name]
    # Not indexed by the bool: torch 2.11 cannot trace that.
    names = fused if attn.fused_projections else singly
    return tuple([getattr(attn, linear) for linear in names])


def project(linears: tuple[Any, ...], x: Any, count: int) -> tuple[Tensor, ...]:
    """Project x, [B, N, C] or int8 rows of it, by `count` Linears or by one that fuses them:
    [B, N, H*D] each."""
    if len(linears) == 1:
        return tuple(linears[0](x).chunk(count, -1))
    x = shared_rows(linears, x)
    return tuple([linear(x) for linear in linears])


def qkv_sent(
    attn: Any, h: Any, ulysses: Ulysses, tables: Rotary
) -> tuple[Pending, Pending, Pending]:
    """Project and norm q, k and v, and send v and q while the next one is computed."""
    k = None
    if attn.fused_projections:
        q, k, v = project((attn.to_qkv,), h, 3)
        sent_v = ulysses.send(2, v)
    else:
        sent_v, q = ulysses.send(2, attn.to_v(h)), attn.to_q(h)
    norms = read_rms_norms(attn.norm_q, attn.norm_k, q, q)
    if norms is None:
        q = called(attn.norm_q, q)
    sent_q = ulysses.send(0, q, norms or NO_NORMS, tables)
    if k is None:
        k = attn.to_k(h)
    if norms is None:
        k = called(attn.norm_k, k)
    return sent_q, ulysses.send(1, k, norms or NO_NORMS, tables), sent_v


def project_out(attn: Any, out: Tensor) -> Tensor:
    """Call the output projection, and the module after it unless that is a plain Dropout."""
    linear, dropout = attn.to_out
    projected: Tensor = linear(out)
    if type(dropout) is not nn.Dropout or not runs_only_its_forward(dropout):
        projected = dropout(projected)
    return projected


def plain_projection(attn: Any) -> bool:
    """Return True if a kernel may read the parameters of the output projection."""
    linear, dropout = attn.to_out
    return plain_linear(linear, linear.weight) and runs_only_its_forward(dropout)


# --- when the author's forward runs ----------------------------------------------------------


def why_attention(name: str, attn: Any, stand_in: type | None = None) -> str:
    """Return why the fast path cannot run an attention, or "".

    Args:
        name: Name of the attention in its block.
        attn: The module.
        stand_in: Class of a replaced forward that the attention may have.
    """
    processors = ATTENTIONS.get(type(attn))
    if processors is None:
        return f"{name} is a {type(attn).__qualname__}"
    processor = attn.processor
    if type(processor) not in processors or not own_function(type(processor), "__call__"):
        return f"the processor of {name} is {type(processor).__qualname__}, not diffusers' own"
    if not runs_only_its_forward(attn) and (stand_in is None or replaced_by(attn) is not stand_in):
        return f"{name} has {hook_names(attn)}"
    if drops(attn.to_out._modules["1"]):  # the index of a ModuleList is slow
        return "dropout is active (training mode)"
    return ""


def why_feed_forward(name: str, ff: Any) -> str:
    """Return why the fast path cannot run a feed-forward, or ""."""
    if type(ff) is not FeedForward:
        return f"{name} is a {type(ff).__qualname__}"
    if not runs_only_its_forward(ff):
        return f"{name} has {hook_names(ff)}"
    if ff.training and any(map(drops, ff.net)):
        return "dropout is active (training mode)"
    return ""


def chosen_backend(processor: Any) -> str:
    """Return the attention backend that the user chose (`set_attention_backend`,
    `attention_backend`), the function that replaced torch's own, or ""."""
    chosen = getattr(processor, "_attention_backend", None)
    if chosen is None:
        chosen = _AttentionBackendRegistry._active_backend
    name: str = getattr(chosen, "value", chosen)
    if name == AttentionBackendName.NATIVE.value:
        return replaced_attention(processor)
    return name


def chosen_backends(*attentions: Any) -> Collection[str]:
    """Return the backends that the user chose for attentions."""
    processors = [getattr(attn, "processor", None) for attn in attentions]
    return set(filter(None, map(chosen_backend, processors)))


def replaced_attention(processor: Any) -> str:
    """Return the function of a processor's attention that other code replaced, or ""."""
    file: dict[str, Any] = getattr(type(processor).__call__, "__globals__", {})
    native = _AttentionBackendRegistry._backends[AttentionBackendName.NATIVE]
    now = None
    if not compiling():
        now = [F.scaled_dot_product_attention, native, *map(file.get, _CALLED)]
        if now == _own_functions.get(type(processor)):  # every block asks
            return ""
    if not torchs_own(F.scaled_dot_product_attention, "scaled_dot_product_attention"):
        return "torch.nn.functional.scaled_dot_product_attention"
    called: dict[str, Any] = {name: file[name] for name in _CALLED if name in file}
    if called:
        called[_NATIVE] = native
    for name, function in called.items():
        if not wrote("diffusers", name, function):
            return f"{file['__name__']}.{name}"
    if now is not None:
        _own_functions[type(processor)] = now
    return ""


# --- for the report and for int8 Linears ---------------------------------------------------------


def attention_linears(name: str, attn: Any) -> dict[str, Any]:
    """Return the Linears that an attention calls, by their paths in the block."""
    if type(attn) not in ATTENTIONS:
        return {}
    cross, fused = getattr(attn, "is_cross_attention", False), attn.fused_projections
    names = ["to_q", *_LINEARS["kv"][fused]] if cross else [*_LINEARS["qkv"][fused]]
    if getattr(attn, "add_k_proj", None) is not None:
        names += _LINEARS["added"][fused]
    linears = {f"{name}.{linear}": getattr(attn, linear) for linear in names}
    return linears | {f"{name}.to_out.0": attn.to_out[0]}


def feed_forward_linears(name: str, ff: Any) -> dict[str, Any]:
    """Return the Linears of a feed-forward, by their paths in the block."""
    if type(ff) is not FeedForward:
        return {}
    first = getattr(ff.net[0], "proj", None)
    linears = {} if first is None else {f"{name}.net.0.proj": first}
    return linears | {f"{name}.net.2": ff.net[2]}
