"""This library's own two-pass module: attention, projection, then the skip of a few-step model.

Its skip is c_skip(t) * x + c_out(t) * F(x), computed in fp32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from turbo_rcm_patch import ops
from turbo_rcm_patch.config import PatchConfig
from turbo_rcm_patch.errors import DTypeError, ShapeError
from turbo_rcm_patch.models.rcm_attention import RCMAttention
from turbo_rcm_patch.ops.spec import MAX_HEAD_DIM
from turbo_rcm_patch.patching.author import Notes, observe_attention
from turbo_rcm_patch.patching.blocks import check_parameters, may_run
from turbo_rcm_patch.patching.copies import Copies
from turbo_rcm_patch.patching.guard import Guard, Pair
from turbo_rcm_patch.patching.int8_linear import weight_dtype
from turbo_rcm_patch.patching.linears import Close, Linears, Projection, pair_state
from turbo_rcm_patch.patching.noise import Operands
from turbo_rcm_patch.patching.plain import why_not_plain
from turbo_rcm_patch.patching.record import innermost, record_of
from turbo_rcm_patch.patching.state import Installation, ModelPlan, PairState, specs_of
from turbo_rcm_patch.skip import Coefficient, Residual, SkipPair, Stream

_FLOATS: Final = (torch.bfloat16, torch.float16, torch.float32)


def check(model: nn.Module) -> None:
    """Raise a typed error if this instance cannot be patched at all."""
    check_parameters(
        {
            RCMAttention.forward: ("self", "x", "t"),
            RCMAttention.branch: ("self", "x"),
            RCMAttention.coefficients: ("self", "x", "t"),
        },
        "turbo_rcm_patch",
    )
    module: Any = model
    head_dim = module.dim // module.num_heads
    if head_dim > MAX_HEAD_DIM:
        raise ShapeError(
            "head_dim",
            expected=f"at most {MAX_HEAD_DIM}",
            got=str(head_dim),
            remedy="This module cannot run through the fused attention",
        )
    if why_not_plain(module.qkv) == "" and weight_dtype(module.qkv) not in _FLOATS:
        raise DTypeError(
            "qkv.weight",
            expected="bfloat16, float16 or float32",
            got=str(weight_dtype(module.qkv)),
            remedy="Cast the module first, e.g. module.to(torch.bfloat16)",
        )


def plan(model: nn.Module, path: str, config: PatchConfig) -> ModelPlan:
    """Its one pair."""
    module: Any = model
    runs, reason = _runs(model, config)
    pair = SkipPair(
        path=path or type(model).__name__,
        kind="self",
        heads=module.num_heads,
        head_dim=module.dim // module.num_heads,
        streams=(Stream("x", "c_skip(t)", "c_out(t)"),),
        cast="fp32",
        projection=module.proj is not None,
        runs=runs,
        reason=reason,
    )
    linears = {"qkv": module.qkv} | ({} if module.proj is None else {"proj": module.proj})
    state = pair_state(pair, linears, config)
    result = ModelPlan(model, path, config, states=[state])
    if state.live:
        make = partial(RCMAttentionForward, model, state, config, result.copies)
        result.installations.append(Installation(model, "forward", make))
    return result


def _runs(model: nn.Module, config: PatchConfig) -> tuple[Residual, str]:
    module: Any = model
    if "self" not in config.kinds:
        return "as-written", "PatchConfig.kinds leaves out 'self'"
    if record_of(model) is None and innermost(model) is None:
        return "as-written", "its forward was replaced by somebody else's"
    if module.proj is None:
        return "in-kernel", ""
    why = why_not_plain(module.proj)
    if why:
        return "after-linear", f"proj is called: {why}"
    return ("one-launch" if config.form == "one-launch" else "two-launch"), ""


class RCMAttentionForward:
    """Stands in for the forward of one module, which it holds."""

    __slots__ = ("_form", "_guard", "_linears", "_module", "_warned", "_specs", "_state")

    def __init__(
        self,
        module: Any,
        state: PairState,
        config: PatchConfig,
        copies: Copies,
        guard: Guard | None,
    ) -> None:
        self._module, self._state, self._guard = module, state, guard
        self._form = config.form
        self._warned: set[str] = set()
        self._linears = Linears(copies)
        spec = ops.AttentionSpec(
            heads=module.num_heads,
            attention=config.attention,
            pv=config.pv,
            smooth_k=config.smooth_k,
            impl=config.impl,
        )
        self._specs = specs_of(spec)

    def __call__(self, x: Tensor, t: float | Tensor) -> Tensor:
        """Attention with the skip in its epilogue.

        Args:
            x: [B, N, C], dtype of the parameters.
            t: Time: one number, or a tensor [B].

        Returns:
            [B, N, C], dtype of x.
        """
        module = self._module
        if not self._state.live:
            self._state.note("as written")
            return self._as_written(x, t)
        if not may_run(x, (self._state,), self._warned):
            return self._as_written(x, t)
        if not torch.compiler.is_compiling():
            self._linears.copies.begin()
        c_skip, c_out = module.coefficients(x, t)
        guard = self._guard
        if guard is None or torch.compiler.is_compiling():
            return self._close(x, c_skip, c_out)
        (_, tokens, channels), spec = x.shape, self._specs["as asked for"]
        one = ops.resolved(spec, x.device, tokens, tokens, channels // spec.heads)
        guard.begin((x.dtype, x.device.type, one.attention, one.pv), x=x)
        if not guard.wants((self._state,)):
            return self._close(x, c_skip, c_out)

        def ours() -> Tensor:
            if not self._state.live:
                self._state.note("as written")
                return self._as_written(x, t)
            return self._close(x, c_skip, c_out)

        def author(notes: Notes, x: Any, branch: Callable[..., Any] | None) -> Tensor:
            output, notes.values = "proj" if module.proj is not None else "", (module.qkv,)
            instead = branch or notes.branch(module, output, run=RCMAttention.branch)
            view: Any = notes.over(module, branch=instead)
            out: Tensor = RCMAttention.forward(view, x, t)
            return out

        closed = guard.close(Pair((self._state,), x, ours, author, lambda: self._attention(x)))
        assert isinstance(closed, Tensor)
        return closed

    def _as_written(self, x: Tensor, t: float | Tensor) -> Tensor:
        out: Tensor = RCMAttention.forward(self._module, x, t)
        return out

    def _close(self, x: Tensor, c_skip: Coefficient, c_out: Coefficient) -> Tensor:
        """c_skip * x + c_out * F(x)."""
        proj, int8 = self._module.proj, self._state.int8
        q, k, v, spec = self._heads(x)
        if proj is None:
            return ops.attention_skip(q, k, v, spec, residual=x, c_skip=c_skip, c_out=c_out)
        close = Close(self._linears, "proj", (proj,), q, int8=int8, cast="fp32", impl=spec.impl)
        apart = spec.attention == "exact" or len(spec.exact_heads) > 0
        if close.plain and not close.int8:
            return ops.attention_project_skip(
                q, k, v, *close.weight, spec, residual=x, c_skip=c_skip, c_out=c_out,
                form="two-launch" if apart else self._form,
            )  # fmt: skip
        return close(None, ops.attention_skip(q, k, v, spec), x, c_out, c_skip)

    def _heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, ops.AttentionSpec]:
        project = Projection(
            self._linears, "qkv", (self._module.qkv,), x, x.dtype, int8=self._state.int8
        )
        (qkv,), _ = project(None, x, x)
        q, k, v = qkv.chunk(3, dim=-1)
        spec, heads = self._specs[self._state.precision], self._state.exact_heads
        if heads:
            spec = replace(spec, exact_heads=heads)
        if not torch.compiler.is_compiling():
            observe_attention(Operands(q, k, v, (None,) * 4, None, spec))
        name = ops.attention_name(spec, q, k)
        marked = f", {len(heads)} heads exact" if heads and ops.quantises(name) else ""
        self._state.note(f"fused with {name} attention{marked}")
        return q, k, v, spec

    def _attention(self, x: Tensor) -> Tensor:
        """What the output projection gets, [B, N, C]."""
        q, k, v, spec = self._heads(x)
        return ops.attention_skip(q, k, v, spec)
