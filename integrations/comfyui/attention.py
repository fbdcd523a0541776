"""The function that takes the place of ComfyUI's `optimized_attention` in a patched model."""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from turbo_rcm_patch.ops import INT8_MIN_KEYS, AttentionSpec
from turbo_rcm_patch.ops.attention.spec import MAX_HEAD_DIM
from turbo_rcm_patch.ops.checks import FLOATS
from turbo_rcm_patch.ops.dispatch import INT8_AUTO_TOKENS
from turbo_rcm_patch.ops.sageattn import attention_of_heads

__all__ = ["OVERRIDE", "SETTINGS", "Override", "Settings", "add_settings"]

_log = logging.getLogger(__name__)

#: Where ComfyUI looks for an override, in a model's `transformer_options`.
OVERRIDE = "optimized_attention_override"
#: Where the last of these nodes leaves its `Settings` for the functions of earlier ones.
SETTINGS = "turbo_rcm_settings"
#: Keywords of ComfyUI's attention that say nothing about what is computed.
_NEUTRAL = {"transformer_options", "_inside_attn_wrapper", "low_precision_attention", "enable_gqa"}


@dataclass(eq=False)
class Settings:
    """How the attentions of a model run, and how they did run.

    Attributes:
        attention: "int8", "exact", or "auto": int8 on a CPU, and from 6,144 keys on on a GPU, as
            `patch_model` does.
        pv: Element type of the second product: "auto", "fp8", "bf16" or "fp16".
        min_keys: Attentions over fewer keys stay exact, because that is faster.
        fuse_wan: Run the norms and the rotary embedding of Wan in the attention's kernels.
        ran: How many attentions ran in which way, and why, since the last report.
    """

    attention: str = "auto"
    pv: str = "auto"
    min_keys: int = INT8_MIN_KEYS
    fuse_wan: bool = True
    ran: Counter[tuple[str, str]] = field(default_factory=Counter)

    def spec(self, heads: int, n_kv: int, device: torch.device, **more: Any) -> AttentionSpec:
        """Return the options of an attention over `n_kv` keys, and count it."""
        pv: Any = self.pv
        why = self.why_exact(n_kv, device)
        self.count("exact" if why else "in int8", why)
        return AttentionSpec(heads=heads, attention="exact" if why else "int8", pv=pv, **more)

    def why_exact(self, n_kv: int, device: torch.device) -> str:
        """Return why an attention over `n_kv` keys is exact, or ""."""
        if self.attention == "exact":
            return "as chosen"
        auto = self.attention == "auto" and device.type == "cuda"
        least = max(self.min_keys, INT8_AUTO_TOKENS) if auto else self.min_keys
        return f"fewer than {least} keys" if n_kv < least else ""

    def count(self, how: str, why: str = "") -> None:
        """Count one attention. A compiled graph would be compiled again for each count."""
        if not torch.compiler.is_compiling():
            self.ran[how, why] += 1

    def run(self, func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Compute an attention of ComfyUI's in int8, or by `func` where int8 does not serve."""
        out = _int8(self, *args, **kwargs)
        if isinstance(out, Tensor):
            self.count("in int8")
            return out
        self.count("exact", out)
        return func(*args, **kwargs)

    def report(self, executor: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Sample, and log how the attentions ran: a wrapper of ComfyUI's `outer_sample`."""
        self.ran.clear()
        try:
            return executor(*args, **kwargs)
        finally:
            _log.info("TurboRCM: %s", self)

    def __str__(self) -> str:
        ways: dict[str, Counter[str]] = {}
        for (how, why), count in sorted(self.ran.items(), key=lambda one: -one[1]):
            ways.setdefault(how, Counter())[why] += count
        parts = []
        for how, reasons in ways.items():
            whys = ", ".join(f"{why}: {count}" for why, count in reasons.items() if why)
            parts.append(f"{reasons.total()} {how}" + (f" ({whys})" if whys else ""))
        return "attentions: " + "; ".join(parts) if parts else (
            "no attention came to this node: the model is compiled, another node replaced the "
            "override after it, or the model does not call optimized_attention"
        )  # fmt: skip

    def __deepcopy__(self, memo: dict[int, Any]) -> Settings:
        """Return itself: ComfyUI copies a model's options for each run, and counts are read
        after it."""
        return self


def add_settings(patcher: Any, settings: Settings) -> dict[str, Any]:
    """Put settings into a ModelPatcher, which reports after each run, and return its options."""
    options: dict[str, Any] = dict(patcher.model_options.get("transformer_options", {}))
    patcher.model_options["transformer_options"] = options
    options[SETTINGS] = settings
    patcher.remove_wrappers_with_key("outer_sample", SETTINGS)  # of an earlier node
    patcher.add_wrapper_with_key("outer_sample", SETTINGS, settings.report)
    return options


@dataclass(frozen=True, eq=False)
class Override:
    """A function for `transformer_options["optimized_attention_override"]`.

    It is a class so that another node's function is not taken for it: `functools.wraps` copies the
    attributes of a function, but not its type.

    Attributes:
        settings: How attentions run, in a call whose options hold no `SETTINGS`.
        before: The override of an earlier node. It is called as it was before, with the int8
            attention in the place of ComfyUI's, so what it does to inputs and results stays.
    """

    settings: Settings
    before: Callable[..., Tensor] | None = None

    def __call__(self, func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        options = kwargs.get("transformer_options") or {}
        settings: Settings = options.get(SETTINGS, self.settings)
        if self.before is None:
            return settings.run(func, *args, **kwargs)
        called = False

        @functools.wraps(func)
        def int8(*args: Any, **kwargs: Any) -> Tensor:
            nonlocal called
            called = True
            return settings.run(func, *args, **kwargs)

        out = self.before(int8, *args, **kwargs)
        if not called:
            settings.count("left to another override", "it computes the attention itself")
        return out

    def __deepcopy__(self, memo: dict[int, Any]) -> Override:
        """Return itself: ComfyUI copies the options with a patcher, and `before` may hold another
        node's tensors."""
        return self


def _int8(
    settings: Settings,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    mask: Tensor | None = None,
    attn_precision: torch.dtype | None = None,
    skip_reshape: bool = False,
    skip_output_reshape: bool = False,
    scale: float | None = None,
    **kwargs: Any,
) -> Tensor | str:
    """Compute a call of ComfyUI's attention in int8, or return why it has to be exact.

    Args:
        settings: How it runs.
        q: [B, Nq, H*D], or [B, H, Nq, D] with skip_reshape.
        k: As q, with a divisor of H as its number of heads.
        v: As k, or [B, Nk, H, D] (SD3.5).
        heads: H.
        mask: [Nq, Nk], [B, Nq, Nk] or [B, H, Nq, Nk], boolean or added. One that only hides keys,
            from all queries alike, is served.
        attn_precision: fp32 asks for an attention in fp32.
        skip_reshape: Heads have a dimension of their own.
        skip_output_reshape: They have one in the result, [B, H, Nq, D].
        scale: Factor on the logits.
        **kwargs: Those of newer versions of ComfyUI.
    """
    why = settings.why_exact(k.shape[-2], k.device)
    if why:
        return why
    unknown = [name for name, value in kwargs.items() if name not in _NEUTRAL and value]
    if unknown:
        return f"the keyword {unknown[0]}"
    if attn_precision == torch.float32 or kwargs.get("low_precision_attention", True) is False:
        return "full precision was asked for"
    if q.dtype not in FLOATS or not q.dtype == k.dtype == v.dtype:
        return f"dtypes {q.dtype} and {k.dtype}"
    if scale is not None and scale <= 0.0:
        return "a scale that is not over 0"
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        return "a gradient is wanted"
    if not skip_reshape:
        head_dim = q.shape[-1] // heads
        v = v.flatten(2)
        if q.dim() != 3 or any(x.shape[-1] % head_dim for x in (q, k, v)):
            return "shapes"
        q, k, v = (x.unflatten(2, (-1, head_dim)) for x in (q, k, v))
    heads_at, tokens_at = (1, 2) if skip_reshape else (2, 1)
    if q.dim() != 4 or k.shape[0] != q.shape[0] or k.shape[:-1] != v.shape[:-1]:
        return "shapes"
    if q.shape[heads_at] % k.shape[heads_at] or q.shape[-1] > MAX_HEAD_DIM:
        return f"the number of heads, or heads of more than {MAX_HEAD_DIM} channels"
    if not q.shape[-1] == k.shape[-1] == v.shape[-1]:
        return "values of another number of channels"
    lengths = None
    if mask is not None:
        visible = None if torch.compiler.is_compiling() else _visible_keys(mask, k, tokens_at)
        if visible is None:
            return "a mask of more than keys"
        order, lengths = visible
        if few := settings.why_exact(order.shape[1], k.device):
            return few
        where = order[:, None, :, None] if skip_reshape else order[:, :, None, None]
        k, v = (torch.take_along_dim(x, where, dim=tokens_at) for x in (k, v))
    pv: Any = settings.pv
    layout = "HND" if skip_reshape else "NHD"
    spec = AttentionSpec(heads=q.shape[heads_at], attention="int8", pv=pv, sm_scale=scale)
    out, _ = attention_of_heads(q, k, v, layout, spec, kv_lengths=lengths)
    if skip_output_reshape:
        return out if skip_reshape else out.transpose(1, 2)
    return (out.transpose(1, 2) if skip_reshape else out).flatten(2)


def _visible_keys(mask: Tensor, k: Tensor, tokens_at: int) -> tuple[Tensor, Tensor | None] | None:
    """Return the indices [B, keys] of the keys that a mask shows, and how many each sample has:
    int32 [B], or None where all have as many. None for a mask that differs from query to query or
    from head to head, that weights keys, or that hides all of them. It waits for the device."""
    mask = mask[(None,) * (3 - mask.dim())]
    mask = mask[:, None] if mask.dim() == 3 else mask
    batch, n_kv = k.shape[0], k.shape[tokens_at]
    if mask.dim() != 4 or mask.shape[1:] != (1, 1, n_kv) or mask.shape[0] not in (1, batch):
        return None
    seen = mask = mask[:, 0, 0]
    if mask.dtype != torch.bool:
        seen = mask == 0
        if not bool((seen | (mask <= torch.finfo(mask.dtype).min / 2)).all()):
            return None
    seen = seen.expand(batch, n_kv)
    lengths = seen.sum(1, dtype=torch.int32)
    least, most = torch.stack(lengths.aminmax()).tolist()
    if not least:
        return None
    order = seen.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :most]
    return order, None if least == most else lengths
