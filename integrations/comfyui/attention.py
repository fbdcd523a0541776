"""What stands in for ComfyUI's `optimized_attention` in a patched model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from turbo_rcm_patch.ops import INT8_MIN_KEYS, AttentionSpec, attention_skip

__all__ = ["OVERRIDE", "SETTINGS", "Override", "Settings"]

#: Where ComfyUI looks for it, in a model's `transformer_options`.
OVERRIDE = "optimized_attention_override"
#: Where the last of our nodes leaves its `Settings` for the overrides of earlier ones, likewise.
SETTINGS = "turbo_rcm_settings"
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_MAX_HEAD_DIM = 256
#: Keywords of ComfyUI's attention that say nothing about what is computed.
_NEUTRAL = {"transformer_options", "_inside_attn_wrapper"}


@dataclass(frozen=True)
class Settings:
    """How attentions run.

    Attributes:
        attention: "int8" or "exact".
        pv: Element type of the second product: "auto", "fp8", "bf16" or "fp16".
        min_keys: Attentions over fewer keys stay exact, because that is faster.
    """

    attention: str = "int8"
    pv: str = "auto"
    min_keys: int = INT8_MIN_KEYS

    def spec(self, heads: int, n_kv: int, **more: Any) -> AttentionSpec:
        """The attention of so many heads over so many keys."""
        attention: Any = self.attention if n_kv >= self.min_keys else "exact"
        pv: Any = self.pv
        return AttentionSpec(heads=heads, attention=attention, pv=pv, **more)


@dataclass(frozen=True, eq=False)
class Override:
    """A function for `transformer_options["optimized_attention_override"]`.

    Attentions that our kernels do not compute go on to what was there before: those with a mask,
    over few keys, in fp32 by request, of heads wider than 256 channels, and every call with a
    keyword that is not known here.

    It is a class so that another node's function is not taken for ours: `functools.wraps` copies
    the attributes of a function, but not its type.

    Attributes:
        settings: How the others run, in a call whose options hold no `SETTINGS`.
        before: The override of an earlier node, which is called for them.
    """

    settings: Settings
    before: Callable[..., Tensor] | None = None

    def __call__(self, func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        options = kwargs.get("transformer_options") or {}
        out = _ours(options.get(SETTINGS, self.settings), *args, **kwargs)
        if out is not None:
            return out
        return func(*args, **kwargs) if self.before is None else self.before(func, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Override:
        """Itself, as of a function: ComfyUI copies the options with a patcher, and `before` may
        hold another node's tensors."""
        return self


def _ours(
    settings: Settings,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    mask: Tensor | None = None,
    attn_precision: torch.dtype | None = None,
    skip_reshape: bool = False,
    skip_output_reshape: bool = False,
    **kwargs: Any,
) -> Tensor | None:
    """Our attention of a call of ComfyUI's, or None where it is not for us.

    Args:
        settings: How it runs.
        q: [B, Nq, H*D], or [B, H, Nq, D] with skip_reshape.
        k: Likewise.
        v: Likewise.
        heads: H.
        mask: Not for us.
        attn_precision: fp32 asks for an attention in fp32.
        skip_reshape: Whether heads have a dimension of their own.
        skip_output_reshape: Whether they have one in the result, [B, H, Nq, D].
        **kwargs: Those of newer versions of ComfyUI.
    """
    known = {key: value for key, value in kwargs.items() if key not in _NEUTRAL}
    known.pop("low_precision_attention", None)
    if kwargs.get("low_precision_attention", True) is False or known:
        return None
    if mask is not None or attn_precision == torch.float32 or settings.attention == "exact":
        return None
    if q.dtype not in FLOATS or not q.dtype == k.dtype == v.dtype:
        return None
    if k.shape[0] != q.shape[0]:  # torch broadcasts it, where heads have a dimension.
        return None
    if skip_reshape:
        q, k, v = (x.transpose(1, 2).flatten(2) for x in (q, k, v))
    head_dim, rest = divmod(q.shape[2], heads)
    if rest or head_dim > _MAX_HEAD_DIM or k.shape != v.shape or k.shape[2] != q.shape[2]:
        return None
    if k.shape[1] < settings.min_keys:
        return None
    out = attention_skip(q, k, v, settings.spec(heads, k.shape[1]))
    return out.unflatten(2, (heads, -1)).transpose(1, 2) if skip_output_reshape else out
