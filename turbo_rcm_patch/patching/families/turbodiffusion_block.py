"""How a block of TurboDiffusion's WanModel runs fused.

Every skip rounds each step to the model's dtype, the gate included, as the author's code does; the
norms and their modulation run in fp32 and round once. With SLA or SageSLA the self-attention is
sparse-linear: the sum of its two branches is closed in the attention kernel, the gated skip across
the output projection.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from turbo_rcm_patch import ops
from turbo_rcm_patch.config import PatchConfig
from turbo_rcm_patch.ops.spec import QMAX
from turbo_rcm_patch.patching.copies import Copies
from turbo_rcm_patch.patching.families.turbodiffusion_structure import (
    is_sparse,
    modulates,
    rms_weight,
    sparsity_of,
    why_attention_called,
    why_feed_forward_called,
)
from turbo_rcm_patch.patching.guard import Guard
from turbo_rcm_patch.patching.linears import Linears, runs_int8
from turbo_rcm_patch.patching.plain import plain_linear, unserved
from turbo_rcm_patch.patching.state import PairState, specs_of
from turbo_rcm_patch.skip import Coefficient

__all__ = ["RotaryTables", "TurboBlockForward"]

#: Text tokens that follow the image tokens; the author's module has the same constant.
_TEXT_TOKENS: Final = 512


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

    __slots__ = ("_block", "_form", "_guard", "_head", "_linears", "_specs", "_states", "_tables")

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
        if unserved(x):
            forward: Tensor = type(block).forward(
                block, x, e, seq_lens, freqs, context, context_lens
            )
            return forward
        guard = self._begin(x, context, e)
        rows = (block.modulation + e).chunk(6, dim=1)
        shift, scale, gate, ffn_shift, ffn_scale, ffn_gate = rows

        y = self._modulated(block.norm1, x, scale, shift, self._states["self_attn"])
        x = self._self_attention(y, x, gate, seq_lens, freqs, guard)
        y = self._normed(block.norm3, x, self._states["cross_attn"])
        x = self._cross_attention(y, x, context, context_lens, guard)
        y = self._modulated(block.norm2, x, ffn_scale, ffn_shift, self._states["ffn"])
        return self._feed_forward(y, x, ffn_gate, guard)

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
        return guard if guard.active else None

    @property
    def _impl(self) -> Any:
        return self._specs["as asked for"].impl

    def _modulated(
        self, norm: Any, x: Tensor, scale: Tensor, shift: Tensor, state: PairState
    ) -> Tensor:
        """The layer norm before a branch and its modulation, in one pass where it is plain."""
        if state.live and modulates(norm, affine=False):
            return ops.norm_modulate(x, scale=scale, shift=shift, eps=norm.eps, impl=self._impl)
        y: Tensor = norm(x)
        return (y.float() * (1 + scale) + shift).type_as(x)

    def _normed(self, norm: Any, x: Tensor, state: PairState) -> Tensor:
        """The layer norm before cross-attention, with weights of its own, or an Identity."""
        if state.live and modulates(norm, affine=True):
            return ops.norm_modulate(
                x, scale=norm.weight, shift=norm.bias, form="affine", eps=norm.eps, impl=self._impl
            )
        y: Tensor = norm(x)
        return y

    # --- attention -------------------------------------------------------------------------------

    def _self_attention(
        self,
        y: Tensor,
        x: Tensor,
        gate: Tensor,
        seq_lens: Tensor,
        freqs: Tensor,
        guard: Guard | None,
    ) -> Tensor:
        attn, state = self._block.self_attn, self._states["self_attn"]
        states = tuple(self._states[n] for n in ("self_attn", "linear") if n in self._states)
        fuse = state.live and not why_attention_called(attn, "self")
        sparse = is_sparse(attn)
        if sparse:
            fuse = fuse and self._runs_sparse(state) and not _wants_gradient(attn, y)

        def called() -> Tensor:
            branch: Tensor = attn(y, seq_lens, freqs)
            return branch

        def fused() -> Tensor:
            if sparse and not self._runs_sparse(state):
                return called()
            return self._close("self_attn", y, None, freqs, None, 1.0)

        if fuse and guard is not None:
            fuse = guard.accepts(states, exact=called, fused=fused)
            if sparse and fuse and not self._runs_sparse(state):
                fuse = False
                self._states["linear"].give_back(state.pair.reason)
        if fuse:
            return self._close("self_attn", y, None, freqs, x, gate)
        return self._after(state, x, called(), gate)

    def _runs_sparse(self, state: PairState) -> bool:
        """Whether a sparse attention is ours: exact ones are left to their author."""
        return self._states["linear"].live and self._specs[state.precision].attention in QMAX

    def _cross_attention(
        self,
        y: Tensor,
        x: Tensor,
        context: Tensor,
        context_lens: Tensor | None,
        guard: Guard | None,
    ) -> Tensor:
        attn, state = self._block.cross_attn, self._states["cross_attn"]
        image = self._states.get("image")
        fuse = state.live and not why_attention_called(attn, "cross")
        if image is not None:
            # Both attentions go through one projection, so ours runs for both or for neither.
            fuse = fuse and image.live and context.shape[1] > _TEXT_TOKENS

        def called() -> Tensor:
            branch: Tensor = attn(y, context, context_lens)
            return branch

        if fuse and guard is not None:
            fuse = guard.accepts(
                (state,) if image is None else (state, image),
                exact=called,
                fused=lambda: self._close("cross_attn", y, context, None, None, 1.0),
            )
        if fuse:
            return self._close("cross_attn", y, context, None, x, 1.0)
        return self._after(state, x, called(), 1.0)

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
        residual: Tensor | None,
        gate: Coefficient,
    ) -> Tensor:
        """residual + gate * attention; the branch alone without a residual."""
        attn: Any = getattr(self._block, name)
        state, image = self._states[name], None
        if context is not None and "image" in self._states:
            tokens = context.shape[1] - _TEXT_TOKENS
            image, context = context[:, :tokens], context[:, tokens:]
        q, k, v = self._project(name, attn, y, context, state.int8)
        spec = self._specs[state.precision]
        few = context is not None and k.shape[1] < ops.INT8_MIN_KEYS
        if few and spec.attention == "int8" and self._form != "one-launch":
            spec = self._specs["exact attention"]
        norm_q, norm_k = rms_weight(attn.norm_q, q), rms_weight(attn.norm_k, k)
        if norm_q is None or norm_k is None or attn.norm_q.eps != attn.norm_k.eps:
            q, k, norm_q, norm_k = attn.norm_q(q), attn.norm_k(k), None, None
        elif attn.norm_q.eps != spec.eps:
            spec = replace(spec, eps=attn.norm_q.eps)
        rotary = None if freqs is None else self._tables.of(freqs)
        if name == "self_attn" and is_sparse(attn):
            proj_l = attn.attn_op.local_attn.proj_l
            out = ops.sparse_linear_attention(
                q, k, v, proj_l.weight, proj_l.bias, spec, sparsity_of(attn, q.device),
                norm_q=norm_q, norm_k=norm_k, rotary=rotary,
            )  # fmt: skip
            return self._output(name, attn.o, out, residual, gate)
        int8 = state.int8 and runs_int8(attn.o, q)
        if plain_linear(attn.o, q) and image is None and not int8:
            return ops.attention_project_skip(
                q, k, v, attn.o.weight, attn.o.bias, spec,
                residual=residual, c_out=gate, norm_q=norm_q, norm_k=norm_k, rotary=rotary,
                cast="model", form="two-launch" if spec.attention == "exact" else self._form,
            )  # fmt: skip
        out = ops.attention_skip(q, k, v, spec, norm_q=norm_q, norm_k=norm_k, rotary=rotary)
        if image is not None:
            out = self._add_image(attn, image, q, norm_q, out, spec, state.int8)
        return self._output(name, attn.o, out, residual, gate)

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
            q = q if norm_q is None else attn.norm_q(q)
            k, norm_q, norm_k = attn.norm_k_img(k), None, None
        return ops.attention_skip(q, k, v, spec, residual=out, norm_q=norm_q, norm_k=norm_k)

    def _project(
        self, name: str, attn: Any, y: Tensor, context: Tensor | None, int8: bool
    ) -> tuple[Tensor, ...]:
        """q, k, v; views of one tensor where they run in int8."""
        project = self._linears.project
        if context is None:
            return project(f"{name}.qkv", y, (attn.q, attn.k, attn.v), int8=int8)
        pair = project(f"{name}.kv", context, (attn.k, attn.v), int8=int8)
        return *project(f"{name}.q", y, (attn.q,), int8=int8), *pair

    # --- feed-forward ----------------------------------------------------------------------------

    def _feed_forward(self, y: Tensor, x: Tensor, gate: Tensor, guard: Guard | None) -> Tensor:
        ffn, state = self._block.ffn, self._states["ffn"]
        fuse = state.live and not why_feed_forward_called(ffn)
        if fuse and guard is not None:
            fuse = guard.accepts(
                (state,),
                exact=lambda: ffn(y),
                fused=lambda: self._output("ffn", ffn[2], self._expand(y), None, 1.0),
            )
        if not fuse:
            return self._after(state, x, ffn(y), gate)
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
        wide: Tensor = gelu(first(y))
        return wide

    # --- both ------------------------------------------------------------------------------------

    def _output(
        self,
        name: str,
        linear: nn.Module,
        h: Tensor,
        residual: Tensor | None,
        gate: Coefficient,
    ) -> Tensor:
        """residual + gate * the last Linear of a branch; the branch alone without a residual."""
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
        branch: Tensor = linear(h)
        if residual is None:
            return branch
        return ops.skip(residual, branch, 1.0, gate, cast="model", impl=self._impl)


def _wants_gradient(attn: nn.Module, y: Tensor) -> bool:
    """Whether the sparse attention would have to give a gradient, which ours does not."""
    if not torch.is_grad_enabled():
        return False
    return y.requires_grad or any(p.requires_grad for p in attn.parameters())
