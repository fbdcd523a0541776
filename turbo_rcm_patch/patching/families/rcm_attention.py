"""This library's own `RCMAttention`: attention, projection and the skip of a few-step model,
c_skip(t) * x + c_out(t) * F(x), computed in fp32 and rounded once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from turbo_rcm_patch import ops
from turbo_rcm_patch.config import PatchConfig
from turbo_rcm_patch.ops.attention import api as attention
from turbo_rcm_patch.ops.formats import NO_NORMS, AttentionInputs, Skip
from turbo_rcm_patch.patching.block import PatchedBlock
from turbo_rcm_patch.patching.families.common import branch_pair, check_attention
from turbo_rcm_patch.patching.measure import Notes
from turbo_rcm_patch.patching.plain import plain_linear
from turbo_rcm_patch.skip import SkipPair, Stream


class RCMBlock(PatchedBlock):
    """The replacement of the forward of an `RCMAttention`."""

    stages = ("qkv",)

    def __call__(self, x: Tensor, t: float | Tensor) -> Tensor:
        """Run attention and skip.

        Args:
            x: [B, N, C], dtype of the parameters.
            t: Time: one number, or a tensor [B].

        Returns:
            [B, N, C], dtype of x.
        """
        out: Tensor = self.runs(x, t)(x, t)
        return out

    def fast(self, x: Tensor, t: float | Tensor, *, notes: Notes | None = None) -> Tensor:
        module, config, spec = self.block, self.config, self.spec
        c_skip, c_out = module.coefficients(x, t)
        q, k, v = module.qkv(x).chunk(3, dim=-1)
        if module.proj is None:
            return ops.attention_skip(q, k, v, spec, residual=x, c_skip=c_skip, c_out=c_out)
        one_launch = config.form == "one-launch" and ops.quantises(spec.attention)
        if one_launch and plain_linear(module.proj, module.proj.weight):
            inputs = AttentionInputs(q, k, v, spec, q.dtype, skip=Skip(x, c_skip, c_out))
            return attention.attend_and_project(
                inputs, module.proj.weight, module.proj.bias, form="one-launch"
            )
        branch = attention.attend(q, k, v, spec=spec)
        if notes is not None:
            notes.saw_attention(q, k, v, NO_NORMS, None, spec, branch)
        return ops.skip(x, module.proj(branch), c_skip, c_out, impl=config.impl)

    def why_inputs(self, x: Tensor, t: Any) -> str:
        return "" if x.dim() == 3 and x.numel() else "the input is not [B, N, C]"

    def linears(self) -> dict[str, Any]:
        return dict(self.block.named_children())

    def pairs(self) -> list[SkipPair]:
        stream = Stream("x", "c_skip(t)", "c_out(t)")
        pair = branch_pair(self, "", "self", self.why_block(), stream)
        if self.block.proj is not None:
            return [pair]
        return [replace(pair, projection=False, runs="in-kernel" if pair.fused else pair.runs)]


def blocks_of(model: Any, path: str, config: PatchConfig) -> list[PatchedBlock | SkipPair]:
    """Return the module as its one block.

    Raises:
        OpError: The kernels do not take its heads or dtype.
    """
    head_dim = model.dim // model.num_heads
    check_attention(path or "module", 2 * (head_dim // 2) or 2, {"qkv": model.qkv})
    return [RCMBlock(model, path, config, model.num_heads, head_dim)]
