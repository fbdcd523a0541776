"""How a block of the Wan family runs fused.

Self-attention and feed-forward sum in fp32 and round once; cross-attention has no gate and sums in
the model's dtype. With an image branch, cross-attention is two attentions over the same queries
whose sum goes through one projection. A block with another signature or another layout of its
modulation is a subclass, in the file of its family.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor, nn

from turbo_rcm_patch import ops
from turbo_rcm_patch.config import PatchConfig
from turbo_rcm_patch.ops.batches import MAX_BATCH
from turbo_rcm_patch.patching.author import Notes, call, nothing, observe, same
from turbo_rcm_patch.patching.blocks import Mode, may_run, note_mode, same_batch, warn_once
from turbo_rcm_patch.patching.copies import Copies
from turbo_rcm_patch.patching.families._feed_forward import (
    expand,
    feed_forward_mode,
    plan_feed_forward,
)
from turbo_rcm_patch.patching.families.wan_modes import (
    BlockClasses,
    attention_mode,
    chosen_backend,
    gated,
    modulation,
    plain_layer_norm,
    plan_attention,
)
from turbo_rcm_patch.patching.families.wan_sla import settle, sparse_attention
from turbo_rcm_patch.patching.guard import Guard, Pair
from turbo_rcm_patch.patching.linears import Linears, runs_int8
from turbo_rcm_patch.patching.normed import Normed, tensor_of
from turbo_rcm_patch.patching.plain import (
    bare,
    plain_linear,
    plain_norm,
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
_BACKEND: Final = (
    "the attention backend {!r} is chosen and not used: the model is patched with "
    "attention={!r}; with attention='exact' the backend computes the attention"
)
#: The norm before each branch of a block, and the output projection of the branch.
_NORMS: Final = {"attn1": "norm1", "attn2": "norm2", "ffn": "norm3"}
_OUTPUTS: Final = {"attn1": "to_out", "attn2": "to_out"}

#: The author's forward of a block, given what stands for the block and the stream.
Author = Callable[[Any, Tensor], Tensor]


#: Where self-attention and cross-attention sum: see the module's text.
_CASTS: Final[tuple[Cast, Cast]] = ("fp32", "model")


class _Given(NamedTuple):
    """What a block gets beside the video: text [B, T, C], the rows of `modulation`, and the rotary
    tables (cos, sin), each [1, N, 1, head_dim]."""

    context: Tensor
    rows: tuple[Tensor, ...]
    rotary: tuple[Tensor, Tensor]


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
        self._norm1, self._norm2, self._norm3 = (
            NormPlan(norm, impl) for norm in (block.norm1, block.norm2, block.norm3)
        )

    @property
    def read(self) -> list[Tensor]:
        """The tensors that kernels read."""
        parts = (self._norm1, self._attn1, self._norm2, self._attn2, self._norm3, self._ffn)
        return [x for part in parts for x in part.read]

    def serves(self, hidden: Tensor, given: _Given) -> bool:
        """Whether the inputs fit each other as the operations want them: nothing broadcasts."""
        context, rows, rotary = given
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

    def __call__(self, hidden: Tensor, given: _Given) -> Tensor:
        """As `WanBlockForward._run`."""
        token, cos, sin = self._token(hidden, given)
        hidden = self._first(token, hidden, given.rows, cos, sin)
        hidden = self._second(token, hidden, given.context)
        return self._third(token, hidden, given.rows)

    def _token(self, hidden: Tensor, given: _Given) -> tuple[Any, Tensor, Tensor]:
        """The signature of the inputs, and the rotary tables [N, D]."""
        cos, sin = (table.reshape(-1, self._head_dim) for table in given.rotary)
        return signature(hidden, given.context, given.rows[0], cos, sin), cos, sin

    def _first(
        self, token: Any, hidden: Tensor, rows: tuple[Tensor, ...], cos: Tensor, sin: Tensor
    ) -> Tensor:
        norm, attn = self._norm1, self._attn1
        modulate = norm.modulated_rows if attn.int8 else norm.modulated
        x: Tensor | ops.Rows = modulate(token, hidden, rows[1], rows[0])
        observe(x)
        closed: Tensor = attn(token, x, None, hidden, rows[2], cos, sin)
        return closed

    def _second(self, token: Any, hidden: Tensor, context: Tensor) -> Tensor:
        norm, attn = self._norm2, self._attn2
        x = norm.affine_rows(token, hidden) if attn.int8 else norm.affine(token, hidden)
        observe(x)
        closed: Tensor = attn(token, x, context, hidden, None, None, None)
        return closed

    def _third(self, token: Any, hidden: Tensor, rows: tuple[Tensor, ...]) -> Tensor:
        norm, ffn = self._norm3, self._ffn
        modulate = norm.modulated_rows if ffn.int8 else norm.modulated
        x: Tensor | ops.Rows = modulate(token, hidden, rows[4], rows[3])
        observe(x)
        return ffn(token, x, hidden, rows[5])

    # --- one pair, for the guard -----------------------------------------------------------------

    def self_attention(self, hidden: Tensor, given: _Given) -> Tensor:
        """The first pair alone."""
        token, cos, sin = self._token(hidden, given)
        return self._first(token, hidden, given.rows, cos, sin)

    def cross_attention(self, hidden: Tensor, given: _Given) -> Tensor:
        """The second pair alone."""
        return self._second(self._token(hidden, given)[0], hidden, given.context)

    def feed_forward(self, hidden: Tensor, given: _Given) -> Tensor:
        """The third pair alone."""
        return self._third(self._token(hidden, given)[0], hidden, given.rows)

    def attentions(self, hidden: Tensor, context: Tensor) -> tuple[str, str]:
        """What computes self-attention and cross-attention, for the report."""
        return self._attn1.attention(hidden, None), self._attn2.attention(hidden, context)


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
        "_said",
        "_spec",
        "_specs",
        "_states",
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
        self._block, self._classes, self._states = block, classes, tuple(states.values())
        self._said: set[str] = set()
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
        if not self._serves(hidden_states):
            written: Tensor = self._as_written(
                hidden_states, encoder_hidden_states, temb, rotary_emb
            )
            return written
        guard = self._begin(
            hidden_states=hidden_states, encoder_hidden_states=encoder_hidden_states, temb=temb
        )
        rows = modulation(block.scale_shift_table, temb)

        def author(view: Any, hidden: Tensor) -> Tensor:
            own: Any = type(block).forward
            out: Tensor = own(view, hidden, encoder_hidden_states, temb, rotary_emb)
            return out

        return self._run(
            hidden_states, encoder_hidden_states, rows, rotary_emb, None, guard, author
        )

    def _serves(self, hidden: Tensor) -> bool:
        """Whether ours may run; the first block says what it will not follow."""
        # Blocks share one compiled graph, so none may look at whether it is the first there.
        said = None if torch.compiler.is_compiling() or not self._head else self._said
        if not may_run(hidden, self._states, said):
            return False
        if said is not None and self._spec.attention != "exact":
            backend = chosen_backend(self._block.attn1)
            if backend:
                warn_once(said, _BACKEND.format(backend, self._spec.attention))
        return True

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
        return guard

    def _run(
        self,
        hidden: Tensor,
        context: Tensor,
        rows: tuple[Tensor, ...],
        rotary: tuple[Tensor, Tensor],
        mask: Tensor | None,
        guard: Guard | None,
        author: Author,
    ) -> Tensor:
        """The three branches of a block and the skips around them.

        Args:
            hidden: [B, N, C].
            context: [B, T, C].
            rows: As `modulation` gives them.
            rotary: (cos, sin), each [1, N, 1, head_dim] fp32.
            mask: What self-attention may see, or None for everything; see `ops.masked_attention`.
            guard: Compares pairs on some forwards, or None.
            author: The author's forward.

        Returns:
            [B, N, C], dtype of hidden.
        """
        given = _Given(context, rows, rotary)
        plan = None if mask is not None else self._planned(hidden, given)
        if plan is not None and (guard is None or not guard.wants(self._states)):
            self._note_plan(plan, hidden, context)
            return plan(hidden, given)
        block = self._block
        hidden, context = same_batch(hidden, context)
        shift, scale, gate, c_shift, c_scale, c_gate = rows

        # A guarded forward compares what the others run. Asked for each pair, because a step of
        # the guard makes another plan; int8 rows are compared as the careful way makes them.
        def plan_for(state: PairState) -> _WanPlan | None:
            now = None if mask is not None or state.int8 else self._planned(hidden, given)
            if now is None:
                return None
            self._note_plan(now, hidden, context)
            return now

        def first(hidden: Tensor) -> Tensor:
            if (plan := plan_for(self._attn1)) is not None:
                return plan.self_attention(hidden, given)
            x = self._modulated(block.norm1, hidden, scale, shift, self._attn1)
            return self._self_attention(x, hidden, gate, rotary, mask)

        def second(hidden: Tensor) -> Tensor:
            if (plan := plan_for(self._attn2)) is not None:
                return plan.cross_attention(hidden, given)
            x = self._normed(block.norm2, hidden, self._attn2)
            return self._cross_attention(x, hidden, context)

        def third(hidden: Tensor) -> Tensor:
            if (plan := plan_for(self._ffn)) is not None:
                return plan.feed_forward(hidden, given)
            x = self._modulated(block.norm3, hidden, c_scale, c_shift, self._ffn)
            return self._feed_forward(x, hidden, c_gate)

        def self_heads(hidden: Tensor) -> Tensor | None:
            if self._self_mode(self._linear_now()) != "ours":
                return None
            x = self._modulated(block.norm1, hidden, scale, shift, self._attn1)
            return self._attention(self._attn1, block.attn1, x, None, rotary=rotary, mask=mask)

        def cross_heads(hidden: Tensor) -> Tensor | None:
            if self._cross_mode(context) != "ours":
                return None
            x = self._normed(block.norm2, hidden, self._attn2)
            return self._attention(self._attn2, block.attn2, x, context)

        linear, image = self._linear_now(), self._image
        of_self: tuple[PairState, ...] = (self._attn1,)
        if linear is not None and linear.live and mask is None:
            of_self = (self._attn1, linear)
        closes = guard is not None and self._attn1.live and guard.wants(of_self)
        hidden = self._pair(guard, "attn1", of_self, hidden, first, author, self_heads)
        if closes:
            exact = self._specs[self._attn1.precision].attention == "exact"
            settle(self._attn1, linear, fused=self._attn1.live, exact=exact)
        of_cross = (self._attn2,) if image is None else (self._attn2, image)
        hidden = self._pair(guard, "attn2", of_cross, hidden, second, author, cross_heads)
        return self._pair(guard, "ffn", (self._ffn,), hidden, third, author)

    def _pair(
        self,
        guard: Guard | None,
        name: str,
        states: tuple[PairState, ...],
        hidden: Tensor,
        ours: Callable[[Tensor], Tensor],
        author: Author,
        heads: Callable[[Tensor], Tensor | None] = lambda hidden: None,
    ) -> Tensor:
        """One pair, compared with its author's code where the guard wants that."""
        if guard is None or not states[0].live or not guard.wants(states):
            return ours(hidden)

        def written(notes: Notes, x: Any, branch: Callable[..., Any] | None) -> Tensor:
            return author(self._only(name, notes, branch), x)

        closed = guard.close(
            Pair(states, hidden, lambda: ours(hidden), written, lambda: heads(hidden))
        )
        assert isinstance(closed, Tensor)
        return closed

    def _only(
        self, name: str, notes: Notes, branch: Callable[..., Any] | None, **instead: Any
    ) -> Any:
        """The block for its author's forward, with one pair in it: the others add nothing."""
        block = self._block
        for other, norm in _NORMS.items():
            if other != name:
                instead |= {norm: same, other: nothing}
            elif branch is not None:
                instead |= {norm: same, other: branch}
            else:
                instead[other] = notes.branch(getattr(block, other), _OUTPUTS.get(other, ""))
        return notes.over(block, **instead)

    def _linear_now(self) -> PairState | None:
        """The sum of SLA's branches, unless its proj_l was taken away: then attention is dense."""
        held = self._linear is not None and attached_proj_l(self._block.attn1) is not None
        return self._linear if held else None

    def _planned(self, hidden: Tensor, given: _Given) -> _WanPlan | None:
        """The plan of the block, if it serves this forward."""
        if not plain_inference(hidden, given.context, given.rows[0]):
            return None
        plan = self._slot.get(self._plan, self._watch)
        if plan is None or not plan.serves(hidden, given):
            return None
        if self._spec.attention == "exact" and any(
            map(chosen_backend, (self._block.attn1, self._block.attn2))
        ):
            return None  # Somebody chose what computes the attention.
        return plan

    def _note_plan(self, plan: _WanPlan, hidden: Tensor, context: Tensor) -> None:
        """Say how the pairs run by the plan, as the careful way says it."""
        own, cross = plan.attentions(hidden, context)
        self._attn1.ran = f"fused with {own} attention"
        self._attn2.ran = f"fused with {cross} attention"
        self._ffn.ran = "fused"

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
        x: Tensor = call(norm, hidden.float())
        return (x * (1 + scale) + shift).type_as(hidden)

    def _normed(self, norm: Any, hidden: Tensor, state: PairState) -> Tensor | Normed:
        """The layer norm before cross-attention, with weights of its own."""
        if state.live and plain_layer_norm(norm):
            return self._fused_norm(norm, hidden, norm.weight, norm.bias, "affine", state)
        x: Tensor = call(norm, hidden.float())
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
    ) -> Tensor:
        attn, mode = self._block.attn1, self._self_mode(self._linear_now())
        observe(x)
        note_mode(self._attn1, mode)
        note_mode(self._linear, mode)
        if mode == "ours":
            return self._close(
                self._attn1, attn, x, None, hidden, gate, "fp32", rotary=rotary, mask=mask
            )
        branch: Tensor = call(attn, tensor_of(x), None, mask, rotary)
        if mode == "called":
            return ops.skip(hidden, branch, 1.0, gate, impl=self._spec.impl)
        return gated(hidden, branch, gate)

    def _self_mode(self, linear: PairState | None) -> Mode:
        mode = attention_mode(self._block.attn1, self._classes)
        if not self._attn1.live:
            return "as-written"
        if mode == "ours" and linear is not None and self._spec.attention == "sage":
            return "called"
        return self._with_backend(mode, self._block.attn1)

    def _with_backend(self, mode: Mode, attn: Any) -> Mode:
        """An exact attention is called where somebody chose what computes it."""
        chosen = mode == "ours" and self._spec.attention == "exact" and chosen_backend(attn)
        return "called" if chosen else mode

    def _cross_mode(self, context: Tensor) -> Mode:
        mode, image = attention_mode(self._block.attn2, self._classes), self._image
        if not self._attn2.live:
            return "as-written"
        if mode == "ours" and image is not None:
            # Both attentions go through one projection, so ours runs for both or for neither.
            mode = "ours" if image.live and context.shape[1] > _TEXT_TOKENS else "called"
        return self._with_backend(mode, self._block.attn2)

    def _cross_attention(self, x: Tensor | Normed, hidden: Tensor, context: Tensor) -> Tensor:
        attn, mode = self._block.attn2, self._cross_mode(context)
        observe(x)
        note_mode(self._attn2, mode)
        note_mode(self._image, mode)
        if mode == "ours":
            return self._close(self._attn2, attn, x, context, hidden, 1.0, "model")
        branch: Tensor = call(attn, tensor_of(x), context, None, None)
        if mode == "called" and branch.dtype == hidden.dtype:
            return ops.skip(hidden, branch, cast="model", impl=self._spec.impl)
        return hidden + branch

    def _feed_forward(self, x: Tensor | Normed, hidden: Tensor, gate: Tensor) -> Tensor:
        ffn, impl = self._block.ffn, self._spec.impl
        mode = feed_forward_mode(ffn) if self._ffn.live else "as-written"
        observe(x)
        note_mode(self._ffn, mode)
        if mode == "as-written":
            return gated(hidden, call(ffn, tensor_of(x)).float(), gate)
        if mode == "called":
            return ops.skip(hidden, call(ffn, tensor_of(x)), 1.0, gate, impl=impl)
        return self._contract(self._expand(x), hidden, gate)

    def _expand(self, x: Tensor | Normed) -> Tensor:
        return expand(self._block.ffn, x, self._linears, "ffn.0", int8=self._ffn.int8)

    def _contract(self, h: Tensor, residual: Tensor, gate: Coefficient) -> Tensor:
        """residual + gate * its last Linear."""
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
        branch: Tensor = call(last, h)
        return ops.skip(residual, branch, 1.0, gate, impl=impl)

    def _close(
        self,
        state: PairState,
        attn: Any,
        x: Tensor | Normed,
        context: Tensor | None,
        residual: Tensor,
        c_out: Coefficient,
        cast: Cast,
        *,
        rotary: tuple[Tensor, Tensor] | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """residual + c_out * attn(x, context)."""
        image, context = self._split(attn, context)
        q, k, v, weights, spec = self._heads(state, attn, x, context, mask)
        name = "attn1" if state is self._attn1 else "attn2"
        linear, dropout = attn.to_out[0], attn.to_out[1]
        plain = plain_linear(linear, q) and type(dropout) is nn.Dropout and bare(dropout)
        int8 = plain and state.int8 and runs_int8(linear, q)
        if not state.int8:
            self._linears.forget(f"{name}.out")
        if plain and image is None and mask is None and not int8 and not self._sparse(state, mask):
            return ops.attention_project_skip(
                q, k, v, linear.weight, linear.bias, spec,
                residual=residual, c_out=c_out, rotary=rotary, cast=cast,
                form="two-launch" if spec.attention == "exact" else self._form,
                **weights,
            )  # fmt: skip
        out = self._attend(state, attn, (q, k, v), weights, spec, image, rotary, mask)
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
        branch: Tensor = call(dropout, call(linear, out))
        return ops.skip(residual, branch, 1.0, c_out, cast=cast, impl=spec.impl)

    def _attention(
        self,
        state: PairState,
        attn: Any,
        x: Tensor | Normed,
        context: Tensor | None,
        *,
        rotary: tuple[Tensor, Tensor] | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """What the output projection gets, [B, N, H * D]."""
        image, context = self._split(attn, context)
        q, k, v, weights, spec = self._heads(state, attn, x, context, mask)
        return self._attend(state, attn, (q, k, v), weights, spec, image, rotary, mask)

    def _split(self, attn: Any, context: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """The image tokens and the text, where attention has both."""
        if attn.add_k_proj is None or context is None:
            return None, context
        tokens = context.shape[1] - _TEXT_TOKENS
        return context[:, :tokens], context[:, tokens:]

    def _sparse(self, state: PairState, mask: Tensor | None) -> bool:
        """Whether it is SLA. A mask that came after patching leaves it dense, as the attention's
        own forward does."""
        return state is self._attn1 and mask is None and self._linear_now() is not None

    def _heads(
        self,
        state: PairState,
        attn: Any,
        x: Tensor | Normed,
        context: Tensor | None,
        mask: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Any], ops.AttentionSpec]:
        """q, k, v, the norms that the attention's prologue does, and how the attention runs."""
        name = "attn1" if state is self._attn1 else "attn2"
        q, k, v = self._project(name, attn, x, context, state.int8)
        spec = self._specs[state.precision]
        few = context is not None and k.shape[1] < ops.INT8_MIN_KEYS
        if few and spec.attention in ("auto", "int8") and self._form != "one-launch":
            spec = self._specs["exact attention"]
        sparse = self._sparse(state, mask)
        how = "exact" if mask is not None else ops.attention_name(spec, q, k, sparse=sparse)
        state.note(f"fused with {'sparse ' * sparse}{how} attention")
        norm_q, norm_k = attn.norm_q, attn.norm_k
        plain_norms = plain_norm(norm_q, q) and plain_norm(norm_k, k)
        if mask is None and plain_norms and norm_q.eps == norm_k.eps:
            if norm_q.eps != spec.eps:
                spec = replace(spec, eps=norm_q.eps)
            return q, k, v, {"norm_q": norm_q.weight, "norm_k": norm_k.weight}, spec
        return call(norm_q, q), call(norm_k, k), v, {}, spec

    def _attend(
        self,
        state: PairState,
        attn: Any,
        heads: tuple[Tensor, Tensor, Tensor],
        weights: dict[str, Any],
        spec: ops.AttentionSpec,
        image: Tensor | None,
        rotary: tuple[Tensor, Tensor] | None,
        mask: Tensor | None,
    ) -> Tensor:
        q, k, v = heads
        if self._sparse(state, mask):
            out = sparse_attention(attn, q, k, v, spec, self._topk, rotary=rotary, **weights)
        elif mask is None:
            out = ops.attention_skip(q, k, v, spec, rotary=rotary, **weights)
        else:
            out = ops.masked_attention(q, k, v, mask, spec, rotary=rotary)
        if image is not None:
            k, v = self._project_image(attn, image, state.int8)
            norm_q, norm = attn.norm_q, attn.norm_added_k
            if weights and plain_norm(norm, k) and norm.eps == spec.eps:
                weights = {"norm_q": norm_q.weight, "norm_k": norm.weight}
            else:
                q, k, weights = call(norm_q, q) if weights else q, call(norm, k), {}
            out = ops.attention_skip(q, k, v, spec, residual=out, **weights)
        return out

    def _project(
        self, name: str, attn: Any, x: Tensor | Normed, context: Tensor | None, int8: bool
    ) -> tuple[Tensor, ...]:
        """q, k, v; views of one tensor where the projections are fused, or int8."""
        project = self._linears.project
        if attn.fused_projections and not attn.is_cross_attention:
            (fused,) = project(f"{name}.qkv", x, (attn.to_qkv,), int8=int8)
            return fused.chunk(3, dim=-1)
        if not attn.fused_projections and context is None:
            three = (attn.to_q, attn.to_k, attn.to_v)
            return project(f"{name}.qkv", x, three, int8=int8)
        # In the author's order, in which dropouts of an adapter draw their masks.
        (q,) = project(f"{name}.q", x, (attn.to_q,), int8=int8)
        source = x if context is None else context
        if not attn.fused_projections:
            return q, *project(f"{name}.kv", source, (attn.to_k, attn.to_v), int8=int8)
        (fused,) = project(f"{name}.kv", source, (attn.to_kv,), int8=int8)
        return q, *fused.chunk(2, dim=-1)

    def _project_image(self, attn: Any, image: Tensor, int8: bool) -> tuple[Tensor, ...]:
        if attn.fused_projections:
            (fused,) = self._linears.project("image", image, (attn.to_added_kv,), int8=int8)
            return fused.chunk(2, dim=-1)
        pair = (attn.add_k_proj, attn.add_v_proj)
        return self._linears.project("image", image, pair, int8=int8)
