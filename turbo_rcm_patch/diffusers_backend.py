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
    GradientError,
    MaskError,
    NotPatchedError,
    WrappedError,
)
from turbo_rcm_patch.ops.sageattn import sageattn

#: The name that `set_attention_backend` takes.
BACKEND: Final = "turbo_rcm_int8"
_MEMBER: Final = BACKEND.upper()

#: The name as a member of diffusers' enumeration, and the backend that was active before it.
_registration: tuple[Any, Any] | None = None


def register_backend() -> str:
    """Add `turbo_rcm_int8` to diffusers' attention backends. A second call changes nothing.

        register_backend()
        model.set_attention_backend("turbo_rcm_int8")

    int8 from where `sageattn` takes it (6,144 keys on a GPU, 1,024 on a CPU), exact below; masks
    are computed exactly, with one warning; grouped queries copy heads of k and v. Dropout and
    gradients are refused: train with "native". It works under diffusers' context parallelism:
    Ulysses, ring and both.

    Returns:
        The name of the backend.

    Raises:
        AlreadyPatchedError: Another package's backend has this name.
    """
    global _registration
    if _registration is not None:
        return BACKEND
    if BACKEND in AttentionBackendName._value2member_map_:
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
    """Remove `turbo_rcm_int8` from diffusers' attention backends.

    Call `model.reset_attention_backend()` on each model that uses it. The forward of one that
    still names it raises `NotPatchedError`; for that one entry stays in diffusers' table of
    functions. `set_attention_backend` also makes a backend the default of the process: if this one
    is, the default from before `register_backend` comes back.

    Raises:
        NotPatchedError: It is not registered.
        WrappedError: Other code replaced its function.
    """
    global _registration
    if _registration is None:
        raise NotPatchedError(
            f"the attention backend {BACKEND!r}", expected="a call of register_backend before"
        )
    registry, (member, active_before) = _AttentionBackendRegistry, _registration
    if registry._backends[member] is not _attention:
        raise WrappedError(
            f"the attention backend {BACKEND!r}",
            expected="the function that register_backend registered",
            got=repr(registry._backends[member]),
            remedy="Undo that change first",
        )
    if registry._active_backend == member:
        registry._active_backend = active_before
    registry._backends[member] = _unregistered
    registry._supports_context_parallel.discard(BACKEND)
    names: Any = AttentionBackendName
    type.__delattr__(names, _MEMBER)
    names._member_names_.remove(_MEMBER)
    del names._member_map_[_MEMBER], names._value2member_map_[BACKEND]
    if hasattr(names, "_hashable_values_"):
        names._hashable_values_.remove(BACKEND)
    _registration = None


def _add_member() -> Any:
    """Add a member to the enumeration. Enum refuses them once a class is made, so this fills in
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


def _unregistered(**inputs: object) -> None:
    """Refuse the forward of a model that still names the backend."""
    raise NotPatchedError(
        f"a model with the attention backend {BACKEND!r}",
        expected="that backend to be registered",
        remedy="Call model.reset_attention_backend(), or register_backend()",
    )


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
    """Compute the attention of a call of diffusers' dispatcher: query [B, Nq, H, D], key and value
    [B, Nk, Hk, D].

    The dispatcher passes those arguments that it finds here by name.
    """
    if _parallel_config is None:
        # A mask [B, Nk] says which keys a sample sees, as for "native".
        if attn_mask is not None and tuple(attn_mask.shape) == (query.shape[0], key.shape[1]):
            attn_mask = attn_mask[:, None, None]
        return sageattn(
            query, key, value, "NHD", is_causal, scale, return_lse, attn_mask=attn_mask,
            dropout_p=dropout_p, enable_gqa=enable_gqa,
        )  # fmt: skip
    ring = _parallel_config.context_parallel_config.ring_degree > 1
    if is_causal or (attn_mask is not None and ring):
        raise MaskError(
            f"context parallelism with the backend {BACKEND!r}",
            expected="no causal attention, and no mask in a ring",
            got=f"is_causal={is_causal}, a mask: {attn_mask is not None}",
            remedy="Use ulysses_degree for a mask",
        )
    groups = query.shape[2] // key.shape[2]
    if groups > 1:
        key, value = (x.repeat_interleave(groups, dim=2) for x in (key, value))
    out: Tensor | tuple[Tensor, Tensor] = _templated_context_parallel_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa,
        return_lse=return_lse, forward_op=_forward_op, backward_op=_backward_op,
        _parallel_config=_parallel_config,
    )  # fmt: skip
    return out


def _forward_op(
    ctx: torch.autograd.function.FunctionCtx,
    *inputs: Any,
    _save_ctx: bool = True,
    _parallel_config: Any = None,
    **named: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute the attention over the tokens or heads of a rank, for diffusers' templates. They
    expect the logsumexp as [B, Nq, H]."""
    out = _attention(*inputs, **named)
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
