"""diffusers' Wan transformer: 2.1 T2V and I2V, 2.2 A14B, and 2.2 TI2V with a gate per token.

Written against `WanTransformerBlock.forward` and `WanAttnProcessor.__call__` of diffusers 0.42
(Wan: arXiv 2503.20314). Self-attention and feed-forward sum in fp32 and round once;
cross-attention has no gate and sums in the model's dtype. With an image branch, cross-attention is
two attentions over the same queries whose sum goes through one projection.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch
from diffusers.models.attention import FeedForward
from diffusers.models.transformers.transformer_wan import (
    WanAttention,
    WanAttnProcessor,
    WanTransformerBlock,
)
from torch import Tensor, nn

from turbo_rcm_patch import ops
from turbo_rcm_patch.config import Kind, PatchConfig
from turbo_rcm_patch.errors import ContextParallelError, DTypeError, HeadDimError
from turbo_rcm_patch.ops.spec import MAX_HEAD_DIM
from turbo_rcm_patch.patching.guard import Guard
from turbo_rcm_patch.patching.plain import (
    bare,
    drops,
    hook_names,
    plain_linear,
    plain_norm,
    why_not_plain,
)
from turbo_rcm_patch.patching.record import innermost
from turbo_rcm_patch.patching.signature import check_parameters
from turbo_rcm_patch.patching.state import Installation, ModelPlan, PairState
from turbo_rcm_patch.skip import Cast, Coefficient, Residual, SkipPair, Stream

__all__ = ["WanBlockForward", "check", "plan"]

_FLOATS: Final = (torch.bfloat16, torch.float16, torch.float32)
_BLOCK: Final = ("self", "hidden_states", "encoder_hidden_states", "temb", "rotary_emb")
_ATTENTION: Final = ("hidden_states", "encoder_hidden_states", "attention_mask", "rotary_emb")
#: Text tokens that follow the image tokens; the author's processor has the same constant.
_TEXT_TOKENS: Final = 512
_GATE_SHAPE: Final = "[B, 1 or N, C]"


# --- what there is -------------------------------------------------------------------------------


def check(model: nn.Module) -> None:
    """Raise a typed error if this instance cannot be patched at all."""
    check_parameters(
        {
            WanTransformerBlock.forward: _BLOCK,
            WanAttention.forward: ("self", *_ATTENTION, "kwargs"),
            WanAttnProcessor.__call__: ("self", "attn", *_ATTENTION),
            FeedForward.forward: ("self", "hidden_states", "args", "kwargs"),
        },
        "diffusers",
    )
    network: Any = model
    _refuse_parallel("model", network)
    for index, block in enumerate(network.blocks):
        for name in ("attn1", "attn2"):
            _check_attention(f"blocks.{index}.{name}", getattr(block, name))


def _refuse_parallel(path: str, holder: object) -> None:
    if getattr(holder, "_parallel_config", None) is not None:
        raise ContextParallelError(
            path,
            expected="attention within one device",
            got="context parallelism, which exchanges heads or keys between ranks",
            remedy="Run the patched model without enable_parallelism",
        )


def _check_attention(path: str, attn: Any) -> None:
    _refuse_parallel(path, attn.processor)
    head_dim = attn.inner_dim // attn.heads
    if head_dim > MAX_HEAD_DIM or head_dim % 2:
        raise HeadDimError(
            f"{path}: head_dim",
            expected=f"an even number up to {MAX_HEAD_DIM}",
            got=str(head_dim),
            remedy="This model cannot run through the fused attention",
        )
    # What is called can have any storage dtype; only a plain Linear's weight is the compute dtype.
    for name in ("to_q", "to_k", "to_v"):
        linear = getattr(attn, name)
        if why_not_plain(linear, None) == "" and linear.weight.dtype not in _FLOATS:
            raise DTypeError(
                f"{path}.{name}.weight",
                expected="bfloat16, float16 or float32",
                got=str(linear.weight.dtype),
                remedy="Cast the model first, e.g. model.to(torch.bfloat16)",
            )


def plan(model: nn.Module, path: str, config: PatchConfig) -> ModelPlan:
    """The pairs of every block, how each would run, and the block forwards to install."""
    network: Any = model
    result = ModelPlan(model, path, config, states=[])
    for index, block in enumerate(network.blocks):
        states = _block_states(block, f"{path}.blocks.{index}".lstrip("."), config)
        result.states += states.values()
        if any(state.live for state in states.values()):
            head = not result.installations
            make = partial(WanBlockForward, block, states, config, head)
            result.installations.append(Installation(block, "forward", make))
    return result


def _block_states(block: Any, path: str, config: PatchConfig) -> dict[str, PairState]:
    """The pairs of one block, by the name of their branch."""
    whole = ""
    if type(block) is not WanTransformerBlock:
        whole = f"the block is a {type(block).__qualname__}"
    elif innermost(block) is None:
        whole = "the block's forward was replaced by somebody else's"
    pairs = {
        "attn1": _attention_pair(block.attn1, f"{path}.attn1", "self", config, whole),
        "attn2": _attention_pair(block.attn2, f"{path}.attn2", "cross", config, whole),
    }
    if block.attn2.add_k_proj is not None:
        pairs["attn2"], pairs["image"] = _with_image(pairs["attn2"], block.attn2, config)
    runs, reason = _left("feed-forward", config, whole) or _feed_forward_runs(block.ffn)
    pairs["ffn"] = SkipPair(
        path=f"{path}.ffn",
        kind="feed-forward",
        heads=0,
        head_dim=0,
        streams=(Stream("video", "1", "c_gate_msa", _GATE_SHAPE),),
        cast="fp32",
        projection=True,
        runs=runs,
        reason=reason,
    )
    return {name: PairState(pair) for name, pair in pairs.items()}


def _left(kind: Kind, config: PatchConfig, whole: str) -> tuple[Residual, str] | None:
    """Whether a pair is left alone for reasons outside its branch."""
    if whole:
        return "as-written", whole
    if kind not in config.kinds:
        return "as-written", f"PatchConfig.kinds leaves out {kind!r}"
    return None


def _attention_pair(attn: Any, path: str, kind: Kind, config: PatchConfig, whole: str) -> SkipPair:
    runs, reason = _left(kind, config, whole) or _attention_runs(attn, config)
    gated = kind == "self"
    return SkipPair(
        path=path,
        kind=kind,
        heads=attn.heads,
        head_dim=attn.inner_dim // attn.heads,
        streams=(Stream("video", "1", "gate_msa", _GATE_SHAPE if gated else ""),)
        if gated
        else (Stream("video", "1", "1"),),
        cast="fp32" if gated else "model",
        projection=True,
        runs=runs,
        reason=reason,
    )


def _attention_runs(attn: Any, config: PatchConfig) -> tuple[Residual, str]:
    if type(attn) is not WanAttention:
        return "as-written", f"its attention is a {type(attn).__qualname__}"
    if type(attn.processor) is not WanAttnProcessor:
        return "as-written", f"its processor is a {type(attn.processor).__qualname__}"
    if drops(attn.to_out[1]):
        return "as-written", "dropout is active (training mode)"
    if not bare(attn):
        return "after-linear", f"attention is called as a module: {hook_names(attn)}"
    why = why_not_plain(attn.to_out[0], None)
    if why:
        return "after-linear", f"to_out[0] is called: {why}"
    return ("one-launch" if config.form == "one-launch" else "two-launch"), ""


def _with_image(cross: SkipPair, attn: Any, config: PatchConfig) -> tuple[SkipPair, SkipPair]:
    """Cross-attention and its image branch: they share queries and projection, so also a fate."""
    runs: Residual = "in-kernel"
    left = _left("image", config, "")
    reason = left[1] if left else ""
    if cross.runs == "as-written":
        reason = f"the cross-attention around it is as written: {cross.reason}"
    elif not bare(attn):
        reason = cross.reason
    elif left:
        words = "attention is called as a module, because its image branch is left as written"
        cross = replace(cross, runs="after-linear", reason=words)
    if reason:
        runs = "as-written"
    image = SkipPair(
        path=f"{cross.path}.image",
        kind="image",
        heads=cross.heads,
        head_dim=cross.head_dim,
        streams=(Stream("text attention", "1", "1"),),
        cast="model",
        projection=False,
        runs=runs,
        reason=reason,
    )
    return cross, image


def _feed_forward_runs(ffn: Any) -> tuple[Residual, str]:
    if type(ffn) is not FeedForward or len(ffn.net) != 3:
        return "after-linear", f"feed-forward is called as a module: {type(ffn).__qualname__}"
    if drops(ffn.net[1]):
        return "as-written", "dropout is active (training mode)"
    if not bare(ffn):
        return "after-linear", f"feed-forward is called as a module: {hook_names(ffn)}"
    why = why_not_plain(ffn.net[2], None)
    return ("after-linear", f"net[2] is called: {why}") if why else ("in-linear", "")


# --- how a block runs fused ----------------------------------------------------------------------


class WanBlockForward:
    """Stands in for the forward of one block.

    It holds the block itself, so that a deep copy of a patched model holds the copied block.
    """

    __slots__ = (
        "_attn1",
        "_attn2",
        "_block",
        "_ffn",
        "_form",
        "_guard",
        "_head",
        "_image",
        "_spec",
    )

    def __init__(
        self,
        block: Any,
        states: dict[str, PairState],
        config: PatchConfig,
        head: bool,
        guard: Guard | None,
    ) -> None:
        self._block = block
        self._attn1, self._attn2, self._ffn = states["attn1"], states["attn2"], states["ffn"]
        self._image = states.get("image")
        self._form = config.form
        self._guard = guard
        self._head = head
        self._spec = ops.AttentionSpec(
            heads=block.attn1.heads,
            attention=config.attention,
            pv=config.pv,
            smooth_k=config.smooth_k,
            eps=getattr(block.attn1.norm_q, "eps", None) or 1e-6,
            impl=config.impl,
        )

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
        if torch.is_autocast_enabled(hidden_states.device.type):
            # Autocast picks a dtype per operation of the author's code; ours would not follow it.
            forward: Tensor = WanTransformerBlock.forward(
                block, hidden_states, encoder_hidden_states, temb, rotary_emb
            )
            return forward
        guard = self._begin(hidden_states, encoder_hidden_states, temb)
        shift, scale, gate, c_shift, c_scale, c_gate = _modulation(block.scale_shift_table, temb)

        x = (block.norm1(hidden_states.float()) * (1 + scale) + shift).type_as(hidden_states)
        hidden_states = self._self_attention(x, hidden_states, gate, rotary_emb, guard)
        x = block.norm2(hidden_states.float()).type_as(hidden_states)
        hidden_states = self._cross_attention(x, hidden_states, encoder_hidden_states, guard)
        x = (block.norm3(hidden_states.float()) * (1 + c_scale) + c_shift).type_as(hidden_states)
        return self._feed_forward(x, hidden_states, c_gate, guard)

    def _begin(self, hidden: Tensor, context: Tensor, temb: Tensor) -> Guard | None:
        """The guard, on a forward that is to be checked."""
        guard = self._guard
        if guard is None or torch.compiler.is_compiling():
            return None
        if self._head:
            guard.begin(hidden_states=hidden, encoder_hidden_states=context, temb=temb)
        return guard if guard.active else None

    def _self_attention(
        self,
        x: Tensor,
        hidden: Tensor,
        gate: Tensor,
        rotary: tuple[Tensor, Tensor],
        guard: Guard | None,
    ) -> Tensor:
        attn = self._block.attn1
        if self._attn1.live and _fusible(attn):
            if guard is None or guard.accepts(
                (self._attn1,),
                exact=lambda: attn(x, None, None, rotary),
                fused=lambda: self._close(attn, x, None, rotary, None, 1.0, "fp32"),
            ):
                return self._close(attn, x, None, rotary, hidden, gate, "fp32")
        branch = attn(x, None, None, rotary)
        if self._attn1.live:
            return ops.skip(hidden, branch, 1.0, gate, impl=self._spec.impl)
        return (hidden.float() + branch * gate).type_as(hidden)

    def _cross_attention(
        self, x: Tensor, hidden: Tensor, context: Tensor, guard: Guard | None
    ) -> Tensor:
        attn, image = self._block.attn2, self._image
        ours = image is None or (image.live and context.shape[1] > _TEXT_TOKENS)
        if self._attn2.live and ours and _fusible(attn):
            states = (self._attn2,) if image is None else (self._attn2, image)
            if guard is None or guard.accepts(
                states,
                exact=lambda: attn(x, context, None, None),
                fused=lambda: self._close(attn, x, context, None, None, 1.0, "model"),
            ):
                return self._close(attn, x, context, None, hidden, 1.0, "model")
        branch = attn(x, context, None, None)
        if self._attn2.live and branch.dtype == hidden.dtype:
            return ops.skip(hidden, branch, cast="model", impl=self._spec.impl)
        return hidden + branch

    def _feed_forward(
        self, x: Tensor, hidden: Tensor, gate: Tensor, guard: Guard | None
    ) -> Tensor:
        ffn, impl = self._block.ffn, self._spec.impl
        if not self._ffn.live or drops(ffn.net[1]):
            return (hidden.float() + ffn(x).float() * gate).type_as(hidden)
        if type(ffn) is not FeedForward or len(ffn.net) != 3 or not bare(ffn):
            return ops.skip(hidden, ffn(x), 1.0, gate, impl=impl)
        h = ffn.net[1](ffn.net[0](x))
        last = ffn.net[2]
        if not plain_linear(last, h):
            return ops.skip(hidden, last(h), 1.0, gate, impl=impl)
        del x

        if guard is not None and not guard.accepts(
            (self._ffn,),
            exact=lambda: last(h),
            fused=lambda: ops.project_skip(h, last.weight, last.bias, residual=None, impl=impl),
        ):
            return (hidden.float() + last(h).float() * gate).type_as(hidden)
        return ops.project_skip(h, last.weight, last.bias, residual=hidden, c_out=gate, impl=impl)

    def _close(
        self,
        attn: Any,
        x: Tensor,
        context: Tensor | None,
        rotary: tuple[Tensor, Tensor] | None,
        residual: Tensor | None,
        c_out: Coefficient,
        cast: Cast,
    ) -> Tensor:
        """residual + c_out * attn(x, context); the branch alone without a residual."""
        image = None
        if attn.add_k_proj is not None and context is not None:
            tokens = context.shape[1] - _TEXT_TOKENS
            image, context = context[:, :tokens], context[:, tokens:]
        q, k, v = _project(attn, x, context)
        norm_q, norm_k = attn.norm_q, attn.norm_k
        if plain_norm(norm_q, q) and plain_norm(norm_k, k) and norm_q.eps == norm_k.eps:
            weights = {"norm_q": norm_q.weight, "norm_k": norm_k.weight}
            spec = self._spec
            if norm_q.eps != spec.eps:
                spec = replace(spec, eps=norm_q.eps)
        else:
            q, k, weights, spec = norm_q(q), norm_k(k), {}, self._spec
        linear, dropout = attn.to_out[0], attn.to_out[1]
        plain = plain_linear(linear, q) and type(dropout) is nn.Dropout and bare(dropout)
        if plain and image is None:
            return ops.attention_project_skip(
                q, k, v, linear.weight, linear.bias, spec,
                residual=residual, c_out=c_out, rotary=rotary, form=self._form, cast=cast,
                **weights,
            )  # fmt: skip
        out = ops.attention_skip(q, k, v, spec, rotary=rotary, **weights)
        if image is not None:
            k, v = _project_image(attn, image)
            k = attn.norm_added_k(k)
            if weights:
                q = norm_q(q)
            out = ops.attention_skip(q, k, v, self._spec, residual=out)
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


def _modulation(table: Tensor, temb: Tensor) -> tuple[Tensor, ...]:
    """(shift, scale, gate) of self-attention and of the feed-forward, fp32, [B, 1 or N, C]."""
    if temb.ndim == 4:
        rows = (table.unsqueeze(0) + temb.float()).chunk(6, dim=2)
        return tuple(row.squeeze(2) for row in rows)
    return (table + temb.float()).chunk(6, dim=1)


def _fusible(attn: Any) -> bool:
    """Whether the attention is exactly the author's now, so that ours may run in its place."""
    if type(attn) is not WanAttention or type(attn.processor) is not WanAttnProcessor:
        return False
    _refuse_parallel("attention", attn.processor)
    return bare(attn) and not drops(attn.to_out[1])


def _project(attn: Any, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v; views of one tensor where the projections are fused."""
    source = x if context is None else context
    if not attn.fused_projections:
        return attn.to_q(x), attn.to_k(source), attn.to_v(source)
    if not attn.is_cross_attention:
        q, k, v = attn.to_qkv(x).chunk(3, dim=-1)
        return q, k, v
    k, v = attn.to_kv(source).chunk(2, dim=-1)
    return attn.to_q(x), k, v


def _project_image(attn: Any, image: Tensor) -> tuple[Tensor, Tensor]:
    if attn.fused_projections:
        k, v = attn.to_added_kv(image).chunk(2, dim=-1)
        return k, v
    return attn.add_k_proj(image), attn.add_v_proj(image)
