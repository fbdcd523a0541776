"""How a block of the Wan family runs fused.

Self-attention and feed-forward sum in fp32 and round once; cross-attention has no gate and sums in
the model's dtype. With an image branch, cross-attention is two attentions over the same queries
whose sum goes through one projection. A block with another signature or another layout of its
modulation is a subclass, in the file of its family.

diffusers copies the Wan block and its attention from file to file, so each model has classes of
its own with the same members; `BlockClasses` names those of one file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Final, cast

import torch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from diffusers.models.normalization import FP32LayerNorm
from torch import Tensor, nn

from turbo_rcm_patch import ops
from turbo_rcm_patch.ops.exchange import ContextParallel
from turbo_rcm_patch.patching.block import BlockForward, Branch
from turbo_rcm_patch.patching.blocks import Mode, same_batch, warn_once
from turbo_rcm_patch.patching.branches import (
    TEXT_TOKENS,
    AttentionModules,
    FeedForwardModules,
    Given,
    readable_norms,
)
from turbo_rcm_patch.patching.families._attention import attention_mode
from turbo_rcm_patch.patching.families._feed_forward import (
    feed_forward_mode,
    feed_forward_modules,
)
from turbo_rcm_patch.patching.families.wan_sla import attached, give_back_linear
from turbo_rcm_patch.patching.linears import holder
from turbo_rcm_patch.patching.parallel import groups_of
from turbo_rcm_patch.patching.plain import plain_norm
from turbo_rcm_patch.patching.sla import attached_proj_l
from turbo_rcm_patch.patching.state import PairState

_BACKEND: Final = (
    "the attention backend {!r} is chosen and not used: the model is patched with "
    "attention={!r}; with attention='exact' the backend computes the attention"
)


@dataclass(frozen=True, slots=True)
class BlockClasses:
    """The classes of one kind of block.

    Attributes:
        block: The block.
        attention: Its attention, self and cross.
        processor: What computes that attention.
    """

    block: type[nn.Module]
    attention: type[nn.Module]
    processor: type

    def mode(self, attn: Any) -> Mode:
        """What may run now in the place of an attention, see `attention_mode`."""
        return attention_mode(attn, self.attention, (self.processor,))


class WanBlockForward(BlockForward):
    """Stands in for the forward of one block."""

    __slots__ = ()

    branches = (
        Branch(name="attn1", kind="self", norm="norm1", at=0, cast="fp32", inner="linear",
               output="to_out"),
        Branch(name="attn2", kind="cross", norm="norm2", inner="image", output="to_out"),
        Branch(name="ffn", kind="feed-forward", norm="norm3", at=3, cast="fp32"),
    )  # fmt: skip
    int8_rows = True
    layer_norm = FP32LayerNorm
    #: Whether its author's forward takes a mask.
    takes_mask: ClassVar[bool] = False
    #: Whether temb with a timestep per frame is [B, 6, N, C].
    frames_inside: ClassVar[bool] = False

    def __call__(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        temb: Tensor,
        rotary_emb: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """The author's block, with its skip pairs closed by ours where they are live.

        Args:
            hidden_states: [B, N, C], the model's dtype.
            encoder_hidden_states: [B, T, C] text, with the image tokens in front for I2V.
            temb: [B, 6, C], or [B, N, 6, C] with a timestep per token.
            rotary_emb: (cos, sin), each [1, N, 1, head_dim] fp32.
            attention_mask: bool [1, 1, N, N], true where a query sees a key, or None.

        Returns:
            [B, N, C], dtype of hidden_states.
        """
        inputs: tuple[Any, ...] = (hidden_states, encoder_hidden_states, temb, rotary_emb)
        if self.takes_mask:
            inputs += (attention_mask,)
        if not self._serves(hidden_states):
            written: Tensor = self._as_written(*inputs)
            return written
        guard = self._begin(
            hidden_states=hidden_states, encoder_hidden_states=encoder_hidden_states, temb=temb
        )
        if self.frames_inside and temb.ndim == 4:
            temb = temb.transpose(1, 2)
        rows = modulation(self._block.scale_shift_table, temb)
        hidden, context = same_batch(hidden_states, encoder_hidden_states)
        given = Given(context, rows, rotary_emb, attention_mask, forward=self)
        out: Tensor = self._run(hidden, given, guard, inputs)
        return out

    def _warn(self, warned: set[str]) -> None:
        attention = self._config.attention
        backend = "" if attention == "exact" else _chosen_backend(self._block.attn1)
        if backend:
            warn_once(warned, _BACKEND.format(backend, attention))

    def _facts(self, hidden: Tensor, given: Given) -> tuple[Any, ...]:
        context: Any = given.context
        backends: Any = None
        if self._config.attention == "exact":  # Somebody may choose one by a context manager.
            backends = _AttentionBackendRegistry._active_backend
        # Not by `super`: every block asks on every forward.
        text_alone = "image" in self._states and context.shape[1] <= TEXT_TOKENS
        return (
            hidden.dtype, hidden.get_device(), context.dtype, context.get_device(), text_alone,
            given.mask is None, backends,
        )  # fmt: skip

    # --- the modules -----------------------------------------------------------------------------

    def _mode(self, branch: Branch, hidden: Tensor, given: Given) -> Mode:
        module, classes = getattr(self._block, branch.name), cast(BlockClasses, self._shared)
        if branch.kind == "feed-forward":
            return feed_forward_mode(module)
        mode = classes.mode(module)
        if mode != "ours":
            return mode
        exact, image = self._config.attention == "exact", self._states.get("image")
        context: Any = given.context
        if (
            # An exact attention is called where somebody chose what computes it.
            (exact and _chosen_backend(module))
            # A mask over several ranks is its author's.
            or (branch.kind == "self" and given.mask is not None and self._groups() is not None)
            # No sparse kernel of that package.
            or (branch.kind == "self" and self._config.attention == "sage" and self._linear_now())
            # Both attentions go through one projection, so ours runs for both or for neither.
            or (branch.kind == "cross" and image and not (
                image.live and context.shape[1] > TEXT_TOKENS
            ))
        ):  # fmt: skip
            return "called"
        return mode

    def _attention(self, branch: Branch, like: Tensor, given: Given) -> AttentionModules:
        attn = getattr(self._block, branch.name)
        cross, fused = branch.kind == "cross", attn.fused_projections
        kv: tuple[Any, ...] = ()
        if cross:
            qkv: tuple[Any, ...] = (attn.to_q,)
            kv = (attn.to_kv,) if fused else (attn.to_k, attn.to_v)
        else:
            qkv = (attn.to_qkv,) if fused else (attn.to_q, attn.to_k, attn.to_v)
        norms = (attn.norm_q, attn.norm_k)
        readable = readable_norms(norms, like)
        modules = AttentionModules(
            heads=attn.heads, head_dim=self._head_dim, qkv=qkv, kv=kv, norms=norms,
            readable=readable, out=attn.to_out,
        )  # fmt: skip
        if cross and attn.add_k_proj is not None:
            modules.image = (attn.to_added_kv,) if fused else (attn.add_k_proj, attn.add_v_proj)
            modules.image_norm = norm = attn.norm_added_k
            if plain_norm(norm, like) and readable is not None and norm.eps == readable[2]:
                modules.image_readable = holder(norm)
        # A mask that came after patching leaves SLA dense, as the attention's own forward does.
        if not cross and given.mask is None and self._linear_now():
            modules.sparse = lambda device: attached(attn, device)
            modules.sparsity = ops.Sparsity.sage(self._config.sla_topk, like.device)
        return modules

    def _groups(self) -> ContextParallel | None:
        return groups_of(getattr(self._block.attn1, "processor", None))

    def _feed_forward(self, module: Any) -> FeedForwardModules:
        return feed_forward_modules(module)

    def called_norm(self, norm: Any, hidden: Tensor) -> Tensor:
        return super().called_norm(norm, hidden.float())

    def _beside(self, branch: Branch, given: Given) -> tuple[Any, ...]:
        if branch.kind == "self":
            return None, given.mask, given.rotary
        return given.context, None, None

    # --- SLA -------------------------------------------------------------------------------------

    def _linear_now(self) -> bool:
        """Whether self-attention is SLA: it is dense once its proj_l was taken away."""
        return "linear" in self._states and attached_proj_l(self._block.attn1) is not None

    def _closed_together(self, branch: Branch, given: Given) -> tuple[PairState, ...]:
        states = super()._closed_together(branch, given)
        if branch.kind != "self" or (
            self._linear_now() and self._states["linear"].live and given.mask is None
        ):
            return states
        return states[:1]

    def _after_comparing(self, branch: Branch) -> None:
        if branch.kind == "self" and self._linear_now():
            state = self._states["attn1"]
            exact = self._specs[state.precision].attention == "exact"
            give_back_linear(state, self._states["linear"], exact=exact)


def _chosen_backend(attn: Any) -> str:
    """The attention backend that somebody chose (`set_attention_backend`, `attention_backend`), or
    "" for torch's own."""
    try:
        chosen = attn.processor._attention_backend
    except AttributeError:  # A processor or an attention of one's own, which is called.
        return ""
    if chosen is None:
        chosen = _AttentionBackendRegistry._active_backend
    name: str = getattr(chosen, "value", chosen)
    return "" if name == AttentionBackendName.NATIVE.value else name


def modulation(table: Tensor, temb: Tensor) -> tuple[Tensor, ...]:
    """(shift, scale, gate) of self-attention and of the feed-forward, fp32, [B, 1 or N, C].

    Args:
        table: [1, 6, C].
        temb: [B, 6, C], or [B, N, 6, C] with a timestep per token.
    """
    if table.dtype != torch.float32:  # Else torch widens temb in the pass that adds it.
        temb = temb.float()
    if temb.ndim == 4:
        rows = (table.unsqueeze(0) + temb).chunk(6, dim=2)
        return tuple(row.squeeze(2) for row in rows)
    return (table + temb).chunk(6, dim=1)
