"""Self-attention of ComfyUI's Wan with its norms and rotary embedding in our kernels, dense or
sparse (SLA)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from turbo_rcm_patch.errors import CheckpointError, OpError
from turbo_rcm_patch.ops import AttentionSpec, Sparsity, attention_skip, sparse_linear_attention
from turbo_rcm_patch.ops.checks import FLOATS

from .attention import OVERRIDE, SETTINGS, Override, Settings


@dataclass(frozen=True)
class SparseLinear:
    """The projection and the sparsity of a self-attention with SLA.

    Attributes:
        weight: [D, D] of proj_l.
        bias: [D].
        topk: Share of the blocks of keys that the softmax sees.
    """

    weight: Tensor
    bias: Tensor | None
    topk: float
    _copies: dict[torch.device, tuple[Tensor, Tensor | None]] = field(default_factory=dict)

    def on(self, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias on a device. They stay there, 64 KiB a block, because a copy in
        each forward would wait for all that is queued."""
        if device not in self._copies:
            bias = None if self.bias is None else self.bias.to(device)
            self._copies[device] = self.weight.to(device), bias
        return self._copies[device]


class _RotaryTables:
    """(cos, sin) of the rotary table that all blocks of a forward get. They live as long as it."""

    def __init__(self) -> None:
        self._of: weakref.ref[Tensor] | None = None
        self._tables: tuple[Tensor, Tensor] | None = None

    def get(self, freqs: Tensor, tokens: int, head_dim: int) -> tuple[Tensor, Tensor] | None:
        """Return [N, D] each, fp32, as `attention_skip` takes them; None for a table of another
        form."""
        if freqs.shape != (1, tokens, 1, head_dim // 2, 2, 2):
            return None
        if self._of is None or self._of() is not freqs:
            cos, sin = freqs[0, :, 0, :, 0, 0].float(), freqs[0, :, 0, :, 1, 0].float()
            self._tables = (cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1))
            self._of = weakref.ref(freqs, self._forget)
        return self._tables

    def _forget(self, gone: weakref.ref[Tensor]) -> None:
        if gone is self._of:
            self._of = self._tables = None


@dataclass(eq=False)
class WanSelfAttention:
    """Replaces the forward of one `WanSelfAttention` while its model is patched.

    Linears are called, so LoRA, fp8 weights and offloaded weights work as before.
    """

    module: Any
    original: Callable[..., Tensor]
    settings: Settings
    tables: _RotaryTables
    sparse: SparseLinear | None = None

    def __call__(
        self,
        x: Tensor,
        freqs: Tensor,
        transformer_options: dict[str, Any] | None = None,
        **more: Any,
    ) -> Tensor:
        """Run as the author's forward: x [B, N, C], freqs [1, N, 1, D / 2, 2, 2]. A call with an
        argument of a newer ComfyUI goes to that forward."""
        options = {} if transformer_options is None else transformer_options
        attn = self.module
        settings: Settings = options.get(SETTINGS, self.settings)
        rotary = self.tables.get(freqs, x.shape[1], attn.head_dim)
        fits = rotary is not None and not more and x.dtype in FLOATS
        fits = fits and "attn1_patch" not in options.get("patches", {})
        if self.sparse is None and not (fits and settings.fuse_wan and self._alone(options)):
            if not isinstance(options.get(OVERRIDE), Override):
                settings.count("left to another override", "of a node after this one")
            return self.original(x, freqs, transformer_options=options, **more)
        if not fits:
            raise OpError(
                "SLA in ComfyUI",
                expected="Wan's own rotary embedding, 16- or 32-bit activations, and no "
                "attn1_patch of another node",
                got=f"x {x.dtype}, a rotary table {list(freqs.shape)}, {sorted(more)}",
            )
        q, k, v = attn.q(x), attn.k(x), attn.v(x)
        weights = _norm_weights(attn, q)
        if weights is None:
            q, k, weights = attn.norm_q(q), attn.norm_k(k), (None, None)
        eps = 1e-6 if weights[0] is None else attn.norm_q.eps
        norms = {"norm_q": weights[0], "norm_k": weights[1]}
        if self.sparse is None:
            spec = settings.spec(attn.num_heads, k.shape[1], k.device, eps=eps)
            return attn.o(attention_skip(q, k, v, spec, rotary=rotary, **norms))
        settings.count("in SLA")
        spec = AttentionSpec(heads=attn.num_heads, pv=self.settings.pv, eps=eps)
        projection = self.sparse.on(q.device)
        sparsity = Sparsity.sage(self.sparse.topk, q.device)
        out = sparse_linear_attention(q, k, v, *projection, spec, sparsity, rotary=rotary, **norms)
        return attn.o(out)

    def _alone(self, options: Mapping[str, Any]) -> bool:
        """Return True if no other node's override would see this attention."""
        override = options.get(OVERRIDE)
        return override is None or (isinstance(override, Override) and override.before is None)


def _norm_weights(attn: Any, q: Tensor) -> tuple[Tensor | None, Tensor | None] | None:
    """Return the weights of both norms where they can be read as they are; None where the modules
    have to be called."""
    if all(type(norm) is nn.Identity for norm in (attn.norm_q, attn.norm_k)):
        return None, None
    weights = []
    for norm in (attn.norm_q, attn.norm_k):
        weight = getattr(norm, "weight", None)
        kernel_can_read = (
            type(norm).__name__ == "RMSNorm"
            and isinstance(weight, Tensor)
            and weight.dtype in FLOATS
            and weight.device == q.device
            and tuple(weight.shape) == (q.shape[-1],)
            and not getattr(norm, "weight_function", None)
            and not (norm._forward_hooks or norm._forward_pre_hooks)
            and norm.eps is not None
        )
        if not kernel_can_read:
            return None
        weights.append(weight)
    return tuple(weights) if attn.norm_q.eps == attn.norm_k.eps else None


def patch_wan(
    model: Any,
    settings: Settings,
    *,
    proj_l: Mapping[int, tuple[Tensor, Tensor | None]] | None = None,
    topk: float = 0.1,
) -> int:
    """Put `WanSelfAttention` in the self-attentions of a ComfyUI model (a ModelPatcher).

    Only object patches of this patcher are added; the network itself is not touched. Blocks that
    another node has patched, and blocks of another kind, are left alone.

    Args:
        model: The ModelPatcher, a clone.
        settings: How dense attention runs.
        proj_l: Weight and bias of SLA's projection for each block; every block has to get it.
        topk: Of SLA.

    Returns:
        Number of blocks.

    Raises:
        CheckpointError: Weights of SLA are there for some blocks alone.
    """
    blocks = getattr(model.get_model_object("diffusion_model"), "blocks", None)
    tables = _RotaryTables()
    patches: dict[str, WanSelfAttention] = {}
    for index, block in enumerate(blocks if isinstance(blocks, nn.ModuleList) else ()):
        attn = getattr(block, "self_attn", None)
        name = f"diffusion_model.blocks.{index}.self_attn.forward"
        earlier = model.object_patches.get(name)
        if isinstance(earlier, WanSelfAttention):  # of an earlier node of this kind
            original, sparse = earlier.original, earlier.sparse
        elif earlier is None and type(attn).__name__ == "WanSelfAttention":
            original, sparse = model.get_model_object(name), None
        else:
            continue
        if proj_l is not None:
            sparse = SparseLinear(*proj_l[index], topk) if index in proj_l else None
        patches[name] = WanSelfAttention(attn, original, settings, tables, sparse)
    if proj_l is not None:
        fit = sum(patch.sparse is not None for patch in patches.values())
        if not fit == len(patches) == len(proj_l):
            raise CheckpointError(
                f"SLA weights of {len(proj_l)} blocks",
                expected="one for each block of the model",
                got=f"a model of {len(patches)} blocks, {fit} of them with weights",
            )
    for name, patch in patches.items():
        model.add_object_patch(name, patch)
    return len(patches)
