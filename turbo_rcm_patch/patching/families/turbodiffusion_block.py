"""How a block of TurboDiffusion's WanModel runs fused.

Every skip rounds each step to the model's dtype, the gate included, as the author's code does; the
norms and their modulation run in fp32 and round once. With SLA or SageSLA the self-attention is
sparse-linear: the sum of its two branches is closed in the attention kernel, the gated skip across
the output projection.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from turbo_rcm_patch import ops
from turbo_rcm_patch.config import PatchConfig
from turbo_rcm_patch.patching.author import Notes, call, nothing, observe, same
from turbo_rcm_patch.patching.blocks import may_run, note_mode
from turbo_rcm_patch.patching.copies import Copies
from turbo_rcm_patch.patching.families.turbodiffusion_structure import (
    is_sparse,
    modulates,
    rms_weight,
    sparsity_of,
    why_attention_called,
    why_feed_forward_called,
)
from turbo_rcm_patch.patching.guard import Guard, Pair
from turbo_rcm_patch.patching.linears import Linears, runs_int8
from turbo_rcm_patch.patching.plain import plain_linear
from turbo_rcm_patch.patching.state import PairState, specs_of
from turbo_rcm_patch.skip import Coefficient

__all__ = ["RotaryTables", "TurboBlockForward"]

#: Text tokens that follow the image tokens; the author's module has the same constant.
_TEXT_TOKENS: Final = 512
#: The norm before each branch of a block, and the output projection of the branch.
_NORMS: Final = {"self_attn": "norm1", "cross_attn": "norm3", "ffn": "norm2"}
_OUTPUTS: Final = {"self_attn": "o", "cross_attn": "o"}


class RotaryTables:
    """cos and sin of a forward's angles, made once for all blocks, which are given one tensor.

    Nothing is kept while a compiler traces. A copy (deepcopy, pickle) starts empty.
    """

    __slots__ = ("_angles", "_made", "_version")

    def __init__(self) -> None:
        self._angles: weakref.ref[Tensor] | None = None
        self._version = 0
        self._made: tuple[Tensor, Tensor] | None = None

    def __reduce__(self) -> tuple[type[RotaryTables], tuple[()]]:
        return RotaryTables, ()

    def of(self, angles: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin), each [N, D] fp32, of angles [N, D / 2] or of that many elements."""
        if torch.compiler.is_compiling():
            return self._tables(angles)
        same = self._angles is not None and self._angles() is angles
        # What was made in inference mode has no version, and is made again.
        if not same or angles.is_inference() or self._version != angles._version:
            self._made = self._tables(angles)
            self._angles = weakref.ref(angles)
            self._version = 0 if angles.is_inference() else angles._version
        assert self._made is not None
        return self._made

    @staticmethod
    def _tables(angles: Tensor) -> tuple[Tensor, Tensor]:
        wide = angles.float().flatten(1).repeat_interleave(2, -1)
        return wide.cos(), wide.sin()


class TurboBlockForward:
    """Stands in for the forward of one block, which it holds."""

    __slots__ = (
        "_block",
        "_form",
        "_guard",
        "_head",
        "_linears",
        "_said",
        "_specs",
        "_states",
        "_tables",
    )

    def __init__(
        self,
        block: Any,
        states: dict[str, PairState],
        config: PatchConfig,
        copies: Copies,
        head: bool,
        tables: RotaryTables,
        guard: Guard | None,
    ) -> None:
        self._block, self._states, self._guard = block, states, guard
        self._form, self._head, self._tables = config.form, head, tables
        self._linears = Linears(copies)
        self._said: set[str] = set()
        self._specs = specs_of(
            ops.AttentionSpec(
                heads=block.self_attn.num_heads,
                attention=config.attention,
                pv=config.pv,
                smooth_k=config.smooth_k,
                eps=block.self_attn.eps,
                impl=config.impl,
            )
        )

    def __call__(
        self,
        x: Tensor,
        e: Tensor,
        seq_lens: Tensor,
        freqs: Tensor,
        context: Tensor,
        context_lens: Tensor | None,
    ) -> Tensor:
        """The author's block, with its skip pairs closed by ours where they are live.

        Args:
            x: [B, N, C], the model's dtype.
            e: [B, 6, C] fp32.
            seq_lens: [B]; neither the author's attention nor ours reads it.
            freqs: Rotary angles, [N, head_dim / 2] fp32.
            context: [B, T, C] text, with the image tokens in front for image-to-video of Wan 2.1.
            context_lens: Not read either.

        Returns:
            [B, N, C], dtype of x.
        """
        block = self._block
        # Blocks share one compiled graph, so none may look at whether it is the first there.
        said = None if torch.compiler.is_compiling() or not self._head else self._said
        if not may_run(x, self._states.values(), said):
            forward: Tensor = type(block).forward(
                block, x, e, seq_lens, freqs, context, context_lens
            )
            return forward
        guard = self._begin(x, context, e)
        rows = (block.modulation + e).chunk(6, dim=1)
        shift, scale, gate, ffn_shift, ffn_scale, ffn_gate = rows
        states = self._states

        def first(x: Tensor) -> Tensor:
            y = self._modulated(block.norm1, x, scale, shift, states["self_attn"])
            return self._self_attention(y, x, gate, seq_lens, freqs)

        def second(x: Tensor) -> Tensor:
            y = self._normed(block.norm3, x, states["cross_attn"])
            return self._cross_attention(y, x, context, context_lens)

        def third(x: Tensor) -> Tensor:
            y = self._modulated(block.norm2, x, ffn_scale, ffn_shift, states["ffn"])
            return self._feed_forward(y, x, ffn_gate)

        def self_heads(x: Tensor) -> Tensor | None:
            y = self._modulated(block.norm1, x, scale, shift, states["self_attn"])
            if not self._fuses_self(y):
                return None
            return self._attention("self_attn", y, None, freqs)

        def cross_heads(x: Tensor) -> Tensor | None:
            if not self._fuses_cross(context):
                return None
            y = self._normed(block.norm3, x, states["cross_attn"])
            return self._attention("cross_attn", y, context, None)

        def author(view: Any, x: Tensor) -> Tensor:
            own: Any = type(block).forward
            out: Tensor = own(view, x, e, seq_lens, freqs, context, context_lens)
            return out

        x = self._pair(guard, "self_attn", "linear", x, first, author, self_heads)
        if guard is not None and is_sparse(block.self_attn):
            state = states["self_attn"]
            if not self._runs_sparse(state) and states["linear"].live:
                states["linear"].give_back(state.pair.reason)
        x = self._pair(guard, "cross_attn", "image", x, second, author, cross_heads)
        return self._pair(guard, "ffn", "", x, third, author)

    def _pair(
        self,
        guard: Guard | None,
        name: str,
        inner: str,
        x: Tensor,
        ours: Callable[[Tensor], Tensor],
        author: Callable[[Any, Tensor], Tensor],
        heads: Callable[[Tensor], Tensor | None] = lambda x: None,
    ) -> Tensor:
        """One pair, with the one inside it, compared with its author's code where the guard wants
        that."""
        states = tuple(self._states[one] for one in (name, inner) if one in self._states)
        if guard is None or not states[0].live or not guard.wants(states):
            return ours(x)

        def written(notes: Notes, x: Any, branch: Callable[..., Any] | None) -> Tensor:
            return author(self._only(name, notes, branch), x)

        closed = guard.close(Pair(states, x, lambda: ours(x), written, lambda: heads(x)))
        assert isinstance(closed, Tensor)
        return closed

    def _only(self, name: str, notes: Notes, branch: Callable[..., Any] | None) -> Any:
        """The block for its author's forward, with one pair in it: the others add nothing."""
        block = self._block
        instead: dict[str, Any] = {}
        for other, norm in _NORMS.items():
            module: Any = getattr(block, other)
            if other != name:
                instead |= {norm: same, other: nothing}
            elif branch is not None:
                instead |= {norm: same, other: branch}
            elif other == "ffn":
                instead[other] = notes.branch(module)
            else:
                # A dense attention may need a package for what torch has too.
                operators = () if is_sparse(module) else ("attn_op", "attn_op_image")
                exact = {part: _exact for part in operators if hasattr(module, part)}
                instead[other] = notes.branch(module, _OUTPUTS[other], **exact)
        return notes.over(block, **instead)

    def _begin(self, x: Tensor, context: Tensor, e: Tensor) -> Guard | None:
        """The guard, on a forward that is to be checked."""
        if torch.compiler.is_compiling():
            return None
        if self._head:
            self._linears.begin()
        guard = self._guard
        if guard is None:
            return None
        if self._head:
            guard.begin(x=x, context=context, e=e)
        return guard

    @property
    def _impl(self) -> Any:
        return self._specs["as asked for"].impl

    def _modulated(
        self, norm: Any, x: Tensor, scale: Tensor, shift: Tensor, state: PairState
    ) -> Tensor:
        """The layer norm before a branch and its modulation, in one pass where it is plain."""
        if state.live and modulates(norm, affine=False):
            return ops.norm_modulate(x, scale=scale, shift=shift, eps=norm.eps, impl=self._impl)
        y: Tensor = call(norm, x)
        return (y.float() * (1 + scale) + shift).type_as(x)

    def _normed(self, norm: Any, x: Tensor, state: PairState) -> Tensor:
        """The layer norm before cross-attention, with weights of its own, or an Identity."""
        if state.live and modulates(norm, affine=True):
            return ops.norm_modulate(
                x, scale=norm.weight, shift=norm.bias, form="affine", eps=norm.eps, impl=self._impl
            )
        y: Tensor = call(norm, x)
        return y

    # --- attention -------------------------------------------------------------------------------

    def _self_attention(
        self,
        y: Tensor,
        x: Tensor,
        gate: Tensor,
        seq_lens: Tensor,
        freqs: Tensor,
    ) -> Tensor:
        attn, state = self._block.self_attn, self._states["self_attn"]
        observe(y)
        if self._fuses_self(y):
            return self._close("self_attn", y, None, freqs, x, gate)
        for name in ("self_attn", "linear"):
            note_mode(self._states.get(name), "called" if state.live else "as-written")
        return self._after(state, x, call(attn, y, seq_lens, freqs), gate)

    def _fuses_self(self, y: Tensor) -> bool:
        attn, state = self._block.self_attn, self._states["self_attn"]
        fuse = state.live and not why_attention_called(attn, "self")
        if is_sparse(attn):
            fuse = fuse and self._runs_sparse(state) and not _wants_gradient(attn, y)
        return fuse

    def _runs_sparse(self, state: PairState) -> bool:
        """Whether a sparse attention is ours: exact ones are left to their author."""
        asked = self._specs[state.precision].attention
        return self._states["linear"].live and ops.quantises(asked)

    def _cross_attention(
        self,
        y: Tensor,
        x: Tensor,
        context: Tensor,
        context_lens: Tensor | None,
    ) -> Tensor:
        attn, state = self._block.cross_attn, self._states["cross_attn"]
        observe(y)
        if self._fuses_cross(context):
            return self._close("cross_attn", y, context, None, x, 1.0)
        for name in ("cross_attn", "image"):
            note_mode(self._states.get(name), "called" if state.live else "as-written")
        return self._after(state, x, call(attn, y, context, context_lens), 1.0)

    def _fuses_cross(self, context: Tensor) -> bool:
        attn, state = self._block.cross_attn, self._states["cross_attn"]
        image = self._states.get("image")
        fuse = state.live and not why_attention_called(attn, "cross")
        if image is not None:
            # Both attentions go through one projection, so ours runs for both or for neither.
            fuse = fuse and image.live and context.shape[1] > _TEXT_TOKENS
        return fuse

    def _after(self, state: PairState, x: Tensor, branch: Tensor, gate: Coefficient) -> Tensor:
        """The skip after a branch that was called."""
        if state.live and branch.dtype == x.dtype:
            return ops.skip(x, branch, 1.0, gate, cast="model", impl=self._impl)
        return x + (branch * gate.type_as(x) if isinstance(gate, Tensor) else branch)

    def _close(
        self,
        name: str,
        y: Tensor,
        context: Tensor | None,
        freqs: Tensor | None,
        residual: Tensor,
        gate: Coefficient,
    ) -> Tensor:
        """residual + gate * attention."""
        attn: Any = getattr(self._block, name)
        state = self._states[name]
        # Another branch is added to the attention before its projection.
        added = is_sparse(attn) if context is None else "image" in self._states
        if added:
            out = self._attention(name, y, context, freqs)
            return self._output(name, attn.o, out, residual, gate)
        q, k, v, norms, spec = self._heads(name, y, context)
        rotary = None if freqs is None else self._tables.of(freqs)
        if plain_linear(attn.o, q) and not (state.int8 and runs_int8(attn.o, q)):
            return ops.attention_project_skip(
                q, k, v, attn.o.weight, attn.o.bias, spec,
                residual=residual, c_out=gate, rotary=rotary, cast="model",
                form="two-launch" if spec.attention == "exact" else self._form, **norms,
            )  # fmt: skip
        out = ops.attention_skip(q, k, v, spec, rotary=rotary, **norms)
        return self._output(name, attn.o, out, residual, gate)

    def _heads(
        self, name: str, y: Tensor, text: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Any], ops.AttentionSpec]:
        """q, k, v, the norms that the attention's prologue does, and how the attention runs."""
        attn: Any = getattr(self._block, name)
        state = self._states[name]
        q, k, v = self._project(name, attn, y, text, state.int8)
        spec = self._specs[state.precision]
        few = text is not None and k.shape[1] < ops.INT8_MIN_KEYS
        if few and spec.attention in ("auto", "int8") and self._form != "one-launch":
            spec = self._specs["exact attention"]
        sparse = text is None and is_sparse(attn)
        how = ops.attention_name(spec, q, k, sparse=sparse)
        state.note(f"fused with {'sparse ' * sparse}{how} attention")
        note_mode(self._states.get("linear" if text is None else "image"), "ours")
        norm_q, norm_k = rms_weight(attn.norm_q, q), rms_weight(attn.norm_k, k)
        if norm_q is None or norm_k is None or attn.norm_q.eps != attn.norm_k.eps:
            return call(attn.norm_q, q), call(attn.norm_k, k), v, {}, spec
        if attn.norm_q.eps != spec.eps:
            spec = replace(spec, eps=attn.norm_q.eps)
        return q, k, v, {"norm_q": norm_q, "norm_k": norm_k}, spec

    def _attention(
        self, name: str, y: Tensor, context: Tensor | None, freqs: Tensor | None
    ) -> Tensor:
        """What the output projection gets, [B, N, H * D]."""
        attn: Any = getattr(self._block, name)
        image, text = None, context
        if context is not None and "image" in self._states:
            tokens = context.shape[1] - _TEXT_TOKENS
            image, text = context[:, :tokens], context[:, tokens:]
        q, k, v, norms, spec = self._heads(name, y, text)
        rotary = None if freqs is None else self._tables.of(freqs)
        if name == "self_attn" and is_sparse(attn):
            proj_l = attn.attn_op.local_attn.proj_l
            return ops.sparse_linear_attention(
                q, k, v, proj_l.weight, proj_l.bias, spec, sparsity_of(attn, q.device),
                rotary=rotary, **norms,
            )  # fmt: skip
        out = ops.attention_skip(q, k, v, spec, rotary=rotary, **norms)
        if image is not None:
            norm_q, int8 = norms.get("norm_q"), self._states[name].int8
            out = self._add_image(attn, image, q, norm_q, out, spec, int8)
        return out

    def _add_image(
        self,
        attn: Any,
        image: Tensor,
        q: Tensor,
        norm_q: Tensor | None,
        out: Tensor,
        spec: ops.AttentionSpec,
        int8: bool,
    ) -> Tensor:
        """out + attention over the image tokens, in one attention's epilogue."""
        pair = (attn.k_img, attn.v_img)
        k, v = self._linears.project("image", image, pair, int8=int8)
        norm_k = rms_weight(attn.norm_k_img, k)
        if norm_q is None or norm_k is None or attn.norm_k_img.eps != spec.eps:
            q = q if norm_q is None else call(attn.norm_q, q)
            k, norm_q, norm_k = call(attn.norm_k_img, k), None, None
        return ops.attention_skip(q, k, v, spec, residual=out, norm_q=norm_q, norm_k=norm_k)

    def _project(
        self, name: str, attn: Any, y: Tensor, context: Tensor | None, int8: bool
    ) -> tuple[Tensor, ...]:
        """q, k, v; views of one tensor where they run in int8."""
        project = self._linears.project
        if context is None:
            return project(f"{name}.qkv", y, (attn.q, attn.k, attn.v), int8=int8)
        # In the author's order, in which dropouts of an adapter draw their masks.
        (q,) = project(f"{name}.q", y, (attn.q,), int8=int8)
        return q, *project(f"{name}.kv", context, (attn.k, attn.v), int8=int8)

    # --- feed-forward ----------------------------------------------------------------------------

    def _feed_forward(self, y: Tensor, x: Tensor, gate: Tensor) -> Tensor:
        ffn, state = self._block.ffn, self._states["ffn"]
        observe(y)
        called = not state.live or bool(why_feed_forward_called(ffn))
        note_mode(state, "ours" if not called else "called" if state.live else "as-written")
        if called:
            return self._after(state, x, call(ffn, y), gate)
        return self._output("ffn", ffn[2], self._expand(y), x, gate)

    def _expand(self, y: Tensor) -> Tensor:
        """The first Linear of the feed-forward and its GELU; one launch where in int8."""
        first, gelu = self._block.ffn[0], self._block.ffn[1]
        int8 = self._states["ffn"].int8
        h = self._linears.close("ffn.0", y, first, int8=int8, activation="gelu-tanh")
        if h is not None:
            return h
        if plain_linear(first, y) and first.bias is not None:
            return ops.linear_gelu(y, first.weight, first.bias)
        wide: Tensor = call(gelu, call(first, y))
        return wide

    # --- both ------------------------------------------------------------------------------------

    def _output(
        self,
        name: str,
        linear: nn.Module,
        h: Tensor,
        residual: Tensor,
        gate: Coefficient,
    ) -> Tensor:
        """residual + gate * the last Linear of a branch."""
        closed = self._linears.close(
            f"{name}.out", h, linear, int8=self._states[name].int8,
            residual=residual, c_out=gate, cast="model",
        )  # fmt: skip
        if closed is not None:
            return closed
        if plain_linear(linear, h):
            own: Any = linear
            return ops.project_skip(
                h, own.weight, own.bias,
                residual=residual, c_out=gate, cast="model", impl=self._impl,
            )  # fmt: skip
        branch: Tensor = call(linear, h)
        return ops.skip(residual, branch, 1.0, gate, cast="model", impl=self._impl)


def _exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The author's dense attention, [B, N, H, D] to [B, N, H * D]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def _wants_gradient(attn: nn.Module, y: Tensor) -> bool:
    """Whether the sparse attention would have to give a gradient, which ours does not."""
    if not torch.is_grad_enabled():
        return False
    return y.requires_grad or any(p.requires_grad for p in attn.parameters())
