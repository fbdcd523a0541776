"""How a block of the Wan family runs fused.

Self-attention and feed-forward sum in fp32 and round once; cross-attention has no gate and sums in
the model's dtype. With an image branch, cross-attention is two attentions over the same queries
whose sum goes through one projection. A block with another signature or another layout of its
modulation is a subclass, in the file of its family.
"""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from turbo_rcm_patch import ops
from turbo_rcm_patch.config import PatchConfig
from turbo_rcm_patch.ops.batches import MAX_BATCH
from turbo_rcm_patch.patching.blocks import same_batch
from turbo_rcm_patch.patching.copies import Copies
from turbo_rcm_patch.patching.families._feed_forward import (
    expand,
    feed_forward_mode,
    plan_feed_forward,
)
from turbo_rcm_patch.patching.families.wan_modes import (
    BlockClasses,
    attention_mode,
    gated,
    modulation,
    plain_layer_norm,
    plan_attention,
)
from turbo_rcm_patch.patching.families.wan_sla import settle, sparse_attention
from turbo_rcm_patch.patching.guard import Guard
from turbo_rcm_patch.patching.linears import Linears, runs_int8
from turbo_rcm_patch.patching.normed import Normed, tensor_of
from turbo_rcm_patch.patching.plain import (
    bare,
    plain_linear,
    plain_norm,
    unserved,
)
from turbo_rcm_patch.patching.plan import (
    FeedForwardPlan,
    NormPlan,
    PlanSlot,
    Watch,
    plain_inference,
    signature,
)
from turbo_rcm_patch.patching.sla import attached_proj_l
from turbo_rcm_patch.patching.state import PairState, specs_of
from turbo_rcm_patch.skip import Cast, Coefficient

__all__ = ["WanBlockForward"]

#: Text tokens that follow the image tokens; the author's processor has the same constant.
_TEXT_TOKENS: Final = 512


#: Where self-attention and cross-attention sum: see the module's text.
_CASTS: Final[tuple[Cast, Cast]] = ("fp32", "model")


class _WanPlan:
    """A block of which every module is plain: its three branches, each with its skip."""

    __slots__ = ("_affine", "_attn1", "_attn2", "_channels", "_dtype", "_device", "_ffn",
                 "_head_dim", "_norm1", "_norm2", "_norm3")  # fmt: skip

    def __init__(self, block: Any, attention: list[Any], ffn: FeedForwardPlan, impl: str) -> None:
        weight = block.attn1.to_q.weight
        self._dtype, self._device = weight.dtype, weight.device
        self._channels = weight.shape[1]
        self._head_dim = weight.shape[0] // block.attn1.heads
        (self._attn1, self._attn2), self._ffn = attention, ffn
        self._norm1 = NormPlan(block.norm1.eps, impl)
        self._norm2 = NormPlan(block.norm2.eps, impl, block.norm2.weight, block.norm2.bias)
        self._norm3 = NormPlan(block.norm3.eps, impl)

    @property
    def read(self) -> list[Tensor]:
        """The tensors that kernels read."""
        parts = (self._norm1, self._attn1, self._norm2, self._attn2, self._norm3, self._ffn)
        return [x for part in parts for x in part.read]

    def serves(
        self,
        hidden: Tensor,
        context: Tensor,
        rows: tuple[Tensor, ...],
        rotary: tuple[Tensor, Tensor],
    ) -> bool:
        """Whether the inputs fit each other as the operations want them: nothing broadcasts."""
        batch, tokens, channels = hidden.shape
        table = tokens * self._head_dim
        return (
            hidden.dtype is self._dtype is context.dtype
            and hidden.device == self._device == context.device
            and channels == self._channels
            and batch <= MAX_BATCH
            and context.shape[0] == batch
            and context.dim() == 3
            and rows[0].shape[-1] == channels
            and rows[0].shape[0] in (1, batch)
            and rows[0].shape[1] in (1, tokens)
            and rotary[0].numel() == table == rotary[1].numel()
        )

    def __call__(
        self,
        hidden: Tensor,
        context: Tensor,
        rows: tuple[Tensor, ...],
        rotary: tuple[Tensor, Tensor],
    ) -> Tensor:
        """As `WanBlockForward._run`."""
        shift, scale, gate, c_shift, c_scale, c_gate = rows
        cos, sin = (table.reshape(-1, self._head_dim) for table in rotary)
        token = signature(hidden, context, shift, cos, sin)
        norm1, norm2, norm3 = self._norm1, self._norm2, self._norm3
        modulate = norm1.modulated_rows if self._attn1.int8 else norm1.modulated
        x: Tensor | ops.Rows = modulate(token, hidden, scale, shift)
        hidden = self._attn1(token, x, None, hidden, gate, cos, sin)
        x = norm2.affine_rows(token, hidden) if self._attn2.int8 else norm2.affine(token, hidden)
        hidden = self._attn2(token, x, context, hidden, None, None, None)
        modulate = norm3.modulated_rows if self._ffn.int8 else norm3.modulated
        x = modulate(token, hidden, c_scale, c_shift)
        return self._ffn(token, x, hidden, c_gate)


class WanBlockForward:
    """Stands in for the forward of one block.

    It holds the block itself, so that a deep copy of a patched model holds the copied block.
    """

    __slots__ = (
        "_attn1",
        "_attn2",
        "_block",
        "_classes",
        "_ffn",
        "_form",
        "_guard",
        "_head",
        "_image",
        "_linear",
        "_linears",
        "_slot",
        "_spec",
        "_specs",
        "_topk",
    )

    def __init__(
        self,
        block: Any,
        classes: BlockClasses,
        states: dict[str, PairState],
        config: PatchConfig,
        copies: Copies,
        head: bool,
        guard: Guard | None,
    ) -> None:
        self._block, self._classes = block, classes
        self._attn1, self._attn2, self._ffn = states["attn1"], states["attn2"], states["ffn"]
        self._image, self._linear = states.get("image"), states.get("linear")
        self._form, self._topk = config.form, config.sla_topk
        self._guard = guard
        self._head = head
        self._linears = Linears(copies)
        self._spec = ops.AttentionSpec(
            heads=block.attn1.heads,
            attention=config.attention,
            pv=config.pv,
            smooth_k=config.smooth_k,
            eps=getattr(block.attn1.norm_q, "eps", None) or 1e-6,
            impl=config.impl,
        )
        self._specs = specs_of(self._spec)
        self._slot: PlanSlot[_WanPlan] = PlanSlot()

    def __call__(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        temb: Tensor,
        rotary_emb: tuple[Tensor, Tensor],
    ) -> Tensor:
        """The author's block, with its skip pairs closed by ours where they are live.

        Args:
            hidden_states: [B, N, C], the model's dtype.
            encoder_hidden_states: [B, T, C] text, with the image tokens in front for I2V.
            temb: [B, 6, C], or [B, N, 6, C] with a timestep per token.
            rotary_emb: (cos, sin), each [1, N, 1, head_dim] fp32.

        Returns:
            [B, N, C], dtype of hidden_states.
        """
        block = self._block
        if unserved(hidden_states):
            written: Tensor = self._as_written(
                hidden_states, encoder_hidden_states, temb, rotary_emb
            )
            return written
        guard = self._begin(
            hidden_states=hidden_states, encoder_hidden_states=encoder_hidden_states, temb=temb
        )
        rows = modulation(block.scale_shift_table, temb)
        return self._run(hidden_states, encoder_hidden_states, rows, rotary_emb, None, guard)

    def _as_written(self, *inputs: Any) -> Any:
        """The author's forward of this block."""
        author: Any = type(self._block).forward
        return author(self._block, *inputs)

    def _begin(self, **inputs: Tensor) -> Guard | None:
        """The guard, on a forward that is to be checked."""
        if torch.compiler.is_compiling():
            return None
        if self._head:
            self._linears.begin()
        guard = self._guard
        if guard is None:
            return None
        if self._head:
            guard.begin(**inputs)
        return guard if guard.active else None

    def _run(
        self,
        hidden: Tensor,
        context: Tensor,
        rows: tuple[Tensor, ...],
        rotary: tuple[Tensor, Tensor],
        mask: Tensor | None,
        guard: Guard | None,
    ) -> Tensor:
        """The three branches of a block and the skips around them.

        Args:
            hidden: [B, N, C].
            context: [B, T, C].
            rows: As `modulation` gives them.
            rotary: (cos, sin), each [1, N, 1, head_dim] fp32.
            mask: What self-attention may see, or None for everything; see `ops.masked_attention`.
            guard: On a forward that is to be checked.

        Returns:
            [B, N, C], dtype of hidden.
        """
        if guard is None and mask is None and plain_inference(hidden, context, rows[0]):
            plan = self._slot.get(self._plan, self._watch)
            if plan is not None and plan.serves(hidden, context, rows, rotary):
                return plan(hidden, context, rows, rotary)
        block = self._block
        hidden, context = same_batch(hidden, context)
        shift, scale, gate, c_shift, c_scale, c_gate = rows
        x = self._modulated(block.norm1, hidden, scale, shift, self._attn1)
        hidden = self._self_attention(x, hidden, gate, rotary, mask, guard)
        x = self._normed(block.norm2, hidden, self._attn2)
        hidden = self._cross_attention(x, hidden, context, guard)
        x = self._modulated(block.norm3, hidden, c_scale, c_shift, self._ffn)
        return self._feed_forward(x, hidden, c_gate, guard)

    def _watch(self, plan: _WanPlan | None) -> Watch:
        states = (self._attn1, self._attn2, self._ffn)
        read = None if plan is None else plan.read
        return Watch(self._block, states, attrgetter("live", "int8", "precision"), read)

    def _plan(self) -> _WanPlan | None:
        """The plan of the block, if everything in it is plain and ours."""
        block = self._block
        states = (self._attn1, self._attn2, self._ffn)
        if (
            self._image is not None
            or self._linear is not None
            or self._form == "one-launch"
            or self._spec.attention == "sage"
            or not all(state.live for state in states)
            or feed_forward_mode(block.ffn) != "ours"
        ):
            return None
        norms = (block.norm1, block.norm2, block.norm3)
        affine = [norm.weight is not None for norm in norms if plain_layer_norm(norm)]
        if affine != [False, True, False] or any(n.bias is not None for n in norms[::2]):
            return None
        attention = [
            plan_attention(name, attn, self._classes, self._specs, state, self._linears, cast=cast)
            for name, attn, state, cast in (
                ("attn1", block.attn1, self._attn1, _CASTS[0]),
                ("attn2", block.attn2, self._attn2, _CASTS[1]),
            )
        ]
        feed_forward = plan_feed_forward(
            block.ffn, self._linears, self._spec.impl, int8=self._ffn.int8
        )
        if None in attention or feed_forward is None:
            return None
        return _WanPlan(block, attention, feed_forward, self._spec.impl)

    def _modulated(
        self, norm: Any, hidden: Tensor, scale: Tensor, shift: Tensor, state: PairState
    ) -> Tensor | Normed:
        """The layer norm before a branch and its modulation, in one pass where it is plain."""
        if state.live and plain_layer_norm(norm) and norm.weight is None and norm.bias is None:
            return self._fused_norm(norm, hidden, scale, shift, "modulation", state)
        x: Tensor = norm(hidden.float())
        return (x * (1 + scale) + shift).type_as(hidden)

    def _normed(self, norm: Any, hidden: Tensor, state: PairState) -> Tensor | Normed:
        """The layer norm before cross-attention, with weights of its own."""
        if state.live and plain_layer_norm(norm):
            return self._fused_norm(norm, hidden, norm.weight, norm.bias, "affine", state)
        x: Tensor = norm(hidden.float())
        return x.type_as(hidden)

    def _fused_norm(
        self,
        norm: Any,
        hidden: Tensor,
        scale: Tensor | None,
        shift: Tensor | None,
        form: Literal["modulation", "affine"],
        state: PairState,
    ) -> Tensor | Normed:
        impl = self._spec.impl
        normed = Normed(hidden, scale, shift, form=form, eps=norm.eps, impl=impl)
        # int8 Linears take it as rows.
        return normed if state.int8 else normed.tensor()

    def _self_attention(
        self,
        x: Tensor | Normed,
        hidden: Tensor,
        gate: Tensor,
        rotary: tuple[Tensor, Tensor],
        mask: Tensor | None,
        guard: Guard | None,
    ) -> Tensor:
        attn, linear = self._block.attn1, self._linear
        if linear is not None and attached_proj_l(attn) is None:
            linear = None  # It was taken away after patching: attention is dense.
        mode = attention_mode(attn, self._classes) if self._attn1.live else "as-written"
        if linear is not None and mode == "ours" and self._spec.attention == "sage":
            mode = "called"

        def ours(residual: Tensor | None, c_out: Coefficient) -> Tensor:
            return self._close(
                self._attn1, attn, x, None, residual, c_out, "fp32", rotary=rotary, mask=mask
            )

        fuse = mode == "ours"
        if fuse and guard is not None:
            sparse = linear is not None and linear.live and mask is None
            fuse = guard.accepts(
                (self._attn1, linear) if sparse and linear else (self._attn1,),
                exact=lambda: attn(tensor_of(x), None, mask, rotary),
                fused=lambda: ours(None, 1.0),
            )
            exact = self._specs[self._attn1.precision].attention == "exact"
            settle(self._attn1, linear, fused=fuse, exact=exact)
        if fuse:
            return ours(hidden, gate)
        branch: Tensor = attn(tensor_of(x), None, mask, rotary)
        if mode == "called":
            return ops.skip(hidden, branch, 1.0, gate, impl=self._spec.impl)
        return gated(hidden, branch, gate)

    def _cross_attention(
        self, x: Tensor | Normed, hidden: Tensor, context: Tensor, guard: Guard | None
    ) -> Tensor:
        attn, image = self._block.attn2, self._image
        mode = attention_mode(attn, self._classes) if self._attn2.live else "as-written"
        if mode == "ours" and image is not None:
            # Both attentions go through one projection, so ours runs for both or for neither.
            mode = "ours" if image.live and context.shape[1] > _TEXT_TOKENS else "called"
        fuse = mode == "ours"
        if fuse and guard is not None:
            fuse = guard.accepts(
                (self._attn2,) if image is None else (self._attn2, image),
                exact=lambda: attn(tensor_of(x), context, None, None),
                fused=lambda: self._close(self._attn2, attn, x, context, None, 1.0, "model"),
            )
        if fuse:
            return self._close(self._attn2, attn, x, context, hidden, 1.0, "model")
        branch: Tensor = attn(tensor_of(x), context, None, None)
        if mode == "called" and branch.dtype == hidden.dtype:
            return ops.skip(hidden, branch, cast="model", impl=self._spec.impl)
        return hidden + branch

    def _feed_forward(
        self, x: Tensor | Normed, hidden: Tensor, gate: Tensor, guard: Guard | None
    ) -> Tensor:
        ffn, impl = self._block.ffn, self._spec.impl
        mode = feed_forward_mode(ffn) if self._ffn.live else "as-written"
        if mode == "as-written":
            return gated(hidden, ffn(tensor_of(x)).float(), gate)
        if mode == "called":
            return ops.skip(hidden, ffn(tensor_of(x)), 1.0, gate, impl=impl)
        if guard is not None and not guard.accepts(
            (self._ffn,),
            exact=lambda: ffn(tensor_of(x)),
            fused=lambda: self._contract(self._expand(x), None, 1.0),
        ):
            return gated(hidden, ffn(tensor_of(x)).float(), gate)
        return self._contract(self._expand(x), hidden, gate)

    def _expand(self, x: Tensor | Normed) -> Tensor:
        return expand(self._block.ffn, x, self._linears, "ffn.0", int8=self._ffn.int8)

    def _contract(self, h: Tensor, residual: Tensor | None, gate: Coefficient) -> Tensor:
        """residual + gate * its last Linear; the branch alone without a residual."""
        last, impl = self._block.ffn.net[2], self._spec.impl
        closed = self._linears.close(
            "ffn.2", h, last, int8=self._ffn.int8, residual=residual, c_out=gate
        )
        if closed is not None:
            return closed
        if plain_linear(last, h):
            return ops.project_skip(
                h, last.weight, last.bias, residual=residual, c_out=gate, impl=impl
            )
        branch: Tensor = last(h)
        return branch if residual is None else ops.skip(residual, branch, 1.0, gate, impl=impl)

    def _close(
        self,
        state: PairState,
        attn: Any,
        x: Tensor | Normed,
        context: Tensor | None,
        residual: Tensor | None,
        c_out: Coefficient,
        cast: Cast,
        *,
        rotary: tuple[Tensor, Tensor] | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """residual + c_out * attn(x, context); the branch alone without a residual."""
        image = None
        if attn.add_k_proj is not None and context is not None:
            tokens = context.shape[1] - _TEXT_TOKENS
            image, context = context[:, :tokens], context[:, tokens:]
        name = "attn1" if state is self._attn1 else "attn2"
        q, k, v = self._project(name, attn, x, context, state.int8)
        asked = self._specs[state.precision]
        few = context is not None and k.shape[1] < ops.INT8_MIN_KEYS
        if few and asked.attention == "int8" and self._form != "one-launch":
            asked = self._specs["exact attention"]
        norm_q, norm_k = attn.norm_q, attn.norm_k
        plain_norms = plain_norm(norm_q, q) and plain_norm(norm_k, k)
        if mask is None and plain_norms and norm_q.eps == norm_k.eps:
            weights = {"norm_q": norm_q.weight, "norm_k": norm_k.weight}
            spec = asked
            if norm_q.eps != spec.eps:
                spec = replace(spec, eps=norm_q.eps)
        else:
            q, k, weights, spec = norm_q(q), norm_k(k), {}, asked
        linear, dropout = attn.to_out[0], attn.to_out[1]
        plain = plain_linear(linear, q) and type(dropout) is nn.Dropout and bare(dropout)
        int8 = plain and state.int8 and runs_int8(linear, q)
        if not state.int8:
            self._linears.forget(f"{name}.out")
        # A mask that came after patching leaves it dense, as the attention's own forward does.
        own = self._linear is not None and state is self._attn1 and mask is None
        sparse = own and attached_proj_l(attn) is not None
        if plain and image is None and mask is None and not int8 and not sparse:
            return ops.attention_project_skip(
                q, k, v, linear.weight, linear.bias, spec,
                residual=residual, c_out=c_out, rotary=rotary, cast=cast,
                form="two-launch" if spec.attention == "exact" else self._form,
                **weights,
            )  # fmt: skip
        if sparse:
            out = sparse_attention(attn, q, k, v, spec, self._topk, rotary=rotary, **weights)
        elif mask is None:
            out = ops.attention_skip(q, k, v, spec, rotary=rotary, **weights)
        else:
            out = ops.masked_attention(q, k, v, mask, spec, rotary=rotary)
        if image is not None:
            k, v = self._project_image(attn, image, state.int8)
            norm = attn.norm_added_k
            if weights and plain_norm(norm, k) and norm.eps == spec.eps:
                weights = {"norm_q": norm_q.weight, "norm_k": norm.weight}
            else:
                q, k, weights = norm_q(q) if weights else q, norm(k), {}
            out = ops.attention_skip(q, k, v, spec, residual=out, **weights)
        if int8:
            closed = self._linears.close(
                f"{name}.out", out, linear, int8=True, residual=residual, c_out=c_out, cast=cast
            )
            assert closed is not None
            return closed
        if plain:
            return ops.project_skip(
                out, linear.weight, linear.bias,
                residual=residual, c_out=c_out, cast=cast, impl=spec.impl,
            )  # fmt: skip
        branch: Tensor = dropout(linear(out))
        return (
            branch
            if residual is None
            else ops.skip(residual, branch, 1.0, c_out, cast=cast, impl=spec.impl)
        )

    def _project(
        self, name: str, attn: Any, x: Tensor | Normed, context: Tensor | None, int8: bool
    ) -> tuple[Tensor, ...]:
        """q, k, v; views of one tensor where the projections are fused, or int8."""
        project = self._linears.project
        if not attn.fused_projections:
            if context is None:
                three = (attn.to_q, attn.to_k, attn.to_v)
                return project(f"{name}.qkv", x, three, int8=int8)
            pair = project(f"{name}.kv", context, (attn.to_k, attn.to_v), int8=int8)
        elif not attn.is_cross_attention:
            (fused,) = project(f"{name}.qkv", x, (attn.to_qkv,), int8=int8)
            return fused.chunk(3, dim=-1)
        else:
            source = x if context is None else context
            (fused,) = project(f"{name}.kv", source, (attn.to_kv,), int8=int8)
            pair = fused.chunk(2, dim=-1)
        return *project(f"{name}.q", x, (attn.to_q,), int8=int8), *pair

    def _project_image(self, attn: Any, image: Tensor, int8: bool) -> tuple[Tensor, ...]:
        if attn.fused_projections:
            (fused,) = self._linears.project("image", image, (attn.to_added_kv,), int8=int8)
            return fused.chunk(2, dim=-1)
        pair = (attn.add_k_proj, attn.add_v_proj)
        return self._linears.project("image", image, pair, int8=int8)
