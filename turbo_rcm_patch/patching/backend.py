"""An attention backend for diffusers: `model.set_attention_backend("turbo_rcm_int8")`.

For models without a family here: attention alone is replaced, and norms, rotary embedding and
residuals stay the model's own. `patch_model` does more where it knows the model.

diffusers has no public way to add a backend. Its registry is an enumeration of names and dicts
keyed by them, all of them of the process, so this is the one thing here that changes a global: on
request, and undone by `unregister_backend`.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from diffusers.models.attention_dispatch import (
    AttentionBackendName,
    _AttentionBackendRegistry,
    _templated_context_parallel_attention,
)
from torch import Tensor

from turbo_rcm_patch.errors import (
    AlreadyPatchedError,
    ConfigError,
    GradientError,
    MaskError,
    NotPatchedError,
    ShapeError,
    WrappedError,
)
from turbo_rcm_patch.ops.sageattn import sageattn

#: What `set_attention_backend` takes.
BACKEND: Final = "turbo_rcm_int8"
_MEMBER: Final = BACKEND.upper()


#: Our name in diffusers' enumeration, and the backend that was active before it.
_registration: tuple[Any, Any] | None = None


def register_backend() -> str:
    """Add `turbo_rcm_int8` to diffusers' attention backends. A second call changes nothing.

        register_backend()
        model.set_attention_backend("turbo_rcm_int8")

    int8 from where `sageattn` takes it (4,096 keys on a GPU, 1,024 on a CPU), exact below; masks
    are computed exactly, with one warning; grouped queries copy heads of k and v. Dropout and
    gradients are refused: train with "native". It works under diffusers' context parallelism:
    Ulysses, ring and both.

    Returns:
        The name of the backend.

    Raises:
        AlreadyPatchedError: Somebody else's backend has this name.
    """
    global _registration
    if _registration is not None:
        return BACKEND
    if BACKEND in AttentionBackendName._value2member_map_ or hasattr(
        AttentionBackendName, _MEMBER
    ):
        raise AlreadyPatchedError(
            f"diffusers has an attention backend {BACKEND!r}",
            expected="that name to be free",
            remedy="Remove the other one first",
        )
    member = _add_member()
    _registration = member, _AttentionBackendRegistry._active_backend
    _AttentionBackendRegistry.register(member, supports_context_parallel=True)(_attention)
    return BACKEND


def unregister_backend() -> None:
    """Remove `turbo_rcm_int8`; diffusers' registry is as it was before `register_backend`.

    Call `model.reset_attention_backend()` on each model that uses it first: a model that still
    names it fails on its next forward. `set_attention_backend` also makes a backend the default of
    the process. If ours is, the default from before `register_backend` comes back.

    Raises:
        NotPatchedError: It is not registered.
        WrappedError: Somebody replaced its function.
    """
    global _registration
    if _registration is None:
        raise NotPatchedError(
            f"the attention backend {BACKEND!r}", expected="a call of register_backend before"
        )
    registry, (member, active_before) = _AttentionBackendRegistry, _registration
    if registry._backends.get(member) is not _attention:
        raise WrappedError(
            f"the attention backend {BACKEND!r}",
            expected="the function that register_backend registered",
            got=repr(registry._backends.get(member)),
            remedy="Undo that change first",
        )
    if registry._active_backend == member:
        registry._active_backend = active_before
    for table in (registry._backends, registry._constraints, registry._supported_arg_names):
        del table[member]
    registry._supports_context_parallel.discard(BACKEND)
    _remove_member(member)
    _registration = None


def _add_member() -> Any:
    """A new member of the enumeration. Enum refuses them once a class is made, so this fills in
    what its metaclass keeps."""
    names: Any = AttentionBackendName
    member = str.__new__(names, BACKEND)
    member._name_, member._value_ = _MEMBER, BACKEND
    member.__objclass__, member._sort_order_ = names, len(names._member_names_)
    names._member_names_.append(_MEMBER)
    names._member_map_[_MEMBER] = member
    names._value2member_map_[BACKEND] = member
    if hasattr(names, "_hashable_values_"):  # Python 3.12.3 and newer
        names._hashable_values_.append(BACKEND)
    type.__setattr__(names, _MEMBER, member)  # Enum's own refuses the name of a member
    return member


def _remove_member(member: Any) -> None:
    names: Any = AttentionBackendName
    type.__delattr__(names, member._name_)
    names._member_names_.remove(member._name_)
    del names._member_map_[member._name_], names._value2member_map_[BACKEND]
    if hasattr(names, "_hashable_values_"):
        names._hashable_values_.remove(BACKEND)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """What diffusers' dispatcher calls: query [B, Nq, H, D], key and value [B, Nk, Hk, D].

    Its names of arguments are part of the interface: the dispatcher passes those it finds here.
    """
    if dropout_p:
        raise ConfigError(
            f"dropout_p with the backend {BACKEND!r}",
            expected="0.0",
            got=repr(dropout_p),
            remedy="Call model.eval(), or train with another backend",
        )
    if key.shape[2] != query.shape[2] and not enable_gqa:
        raise ShapeError(
            "key",
            expected=f"the {query.shape[2]} heads of query",
            got=f"{key.shape[2]} heads without enable_gqa",
        )
    if _parallel_config is None:
        return _local(query, key, value, attn_mask, is_causal, scale, return_lse)
    ring = _parallel_config.context_parallel_config.ring_degree > 1
    if is_causal or (attn_mask is not None and ring):
        raise MaskError(
            f"context parallelism with the backend {BACKEND!r}",
            expected="no causal attention, and no mask in a ring",
            got=f"is_causal={is_causal}, a mask: {attn_mask is not None}",
            remedy="Use ulysses_degree for a mask",
        )
    if key.shape[2] != query.shape[2]:
        groups = query.shape[2] // key.shape[2]
        key, value = (x.repeat_interleave(groups, dim=2) for x in (key, value))
    out: Tensor | tuple[Tensor, Tensor] = _templated_context_parallel_attention(
        query,
        key,
        value,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        False,
        return_lse,
        forward_op=_forward_op,
        backward_op=_backward_op,
        _parallel_config=_parallel_config,
    )
    return out


def _local(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """The attention of one rank. A mask [B, Nk] says which keys a sample sees, as for "native"."""
    if mask is not None and tuple(mask.shape) == (query.shape[0], key.shape[1]):
        mask = mask[:, None, None]
    return sageattn(query, key, value, "NHD", is_causal, scale, return_lse, attn_mask=mask)


def _forward_op(
    ctx: torch.autograd.function.FunctionCtx,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _save_ctx: bool = True,
    _parallel_config: Any = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """What diffusers' templates call on the part of the tokens or heads that a rank has. They
    expect the logsumexp as [B, Nq, H]."""
    out = _local(query, key, value, attn_mask, is_causal, scale, return_lse)
    if isinstance(out, tuple):
        out, lse = out
        return out, lse.transpose(1, 2).contiguous()
    return out


def _backward_op(*args: object, **kwargs: object) -> None:
    raise GradientError(
        f"context parallelism with the backend {BACKEND!r}",
        expected="no gradient",
        got="a request for one",
        remedy='Train with set_attention_backend("native")',
    )
