"""VACE's control blocks: each runs a Wan block over the control stream, and projects the result to
a hint for a plain block (arXiv 2503.07598). Written against diffusers 0.42.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final

from torch import Tensor

from turbo_rcm_patch.config import PatchConfig
from turbo_rcm_patch.ops.formats import Rotary
from turbo_rcm_patch.patching.block import PatchedBlock
from turbo_rcm_patch.patching.families import wan
from turbo_rcm_patch.patching.families.common import check_parameters
from turbo_rcm_patch.patching.families.wan import WanBlock
from turbo_rcm_patch.patching.find import find_blocks
from turbo_rcm_patch.patching.measure import Notes
from turbo_rcm_patch.patching.plain import original_class
from turbo_rcm_patch.skip import SkipPair

_CONTROL: Final = (
    "self", "hidden_states", "encoder_hidden_states", "control_hidden_states", "temb",
    "rotary_emb",
)  # fmt: skip
#: What a control block returns.
_Hint = tuple[Tensor | None, Tensor]


class VACEBlock(WanBlock):
    """The replacement of the forward of a `WanVACETransformerBlock`."""

    def __call__(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        control_hidden_states: Tensor,
        temb: Tensor,
        rotary_emb: Rotary,
    ) -> _Hint:
        """Run the control block.

        Args:
            hidden_states: [B, N, C], the video, the model's dtype.
            encoder_hidden_states: [B, T, C] text.
            control_hidden_states: [B, N, C], the control stream.
            temb: [B, 6, C].
            rotary_emb: (cos, sin), each [1, N, 1, D] fp32.

        Returns:
            The hint (None without an output projection) and the control stream, [B, N, C] each.
        """
        inputs = hidden_states, encoder_hidden_states, control_hidden_states, temb, rotary_emb
        out: _Hint = self.runs(*inputs)(*inputs)
        return out

    def fast(  # type: ignore[override]
        self,
        video: Tensor,
        text: Tensor,
        control: Tensor,
        *rest: Any,
        notes: Notes | None = None,
    ) -> _Hint:
        block = self.block
        if block.proj_in is not None:
            control = block.proj_in(control) + video
        control = super().fast(control, text, *rest, notes=notes)
        return None if block.proj_out is None else block.proj_out(control), control

    def why_inputs(  # type: ignore[override]
        self, hidden_states: Tensor, context: Tensor, control: Tensor, temb: Tensor, rotary: Rotary
    ) -> str:
        if control.shape != hidden_states.shape or control.dtype != hidden_states.dtype:
            return "the control stream does not fit the video"
        return super().why_inputs(control, context, temb, rotary)

    def rows_of(self, take: Callable[[Tensor], Tensor], *inputs: Any) -> tuple[Any, ...]:
        video, text, control, *rest = inputs
        control, text, *rest = super().rows_of(take, control, text, *rest)
        return take(video), text, control, *rest

    def streams(self, values: Any) -> tuple[Tensor, ...]:
        return (values[1] if isinstance(values, tuple) and len(values) == 2 else values[0],)


def blocks_of(model: Any, path: str, config: PatchConfig) -> list[PatchedBlock | SkipPair]:
    """Find the control blocks of a model, which run first, and its plain blocks.

    Raises:
        FamilyError: A forward takes other parameters than this was written for.
        OpError: The kernels do not take the model's heads or dtype.
    """
    plain = wan.blocks_of(model, path, config)
    control: Any = sys.modules[original_class(model).__module__].WanVACETransformerBlock
    check_parameters({control.forward: _CONTROL}, "diffusers")
    where = f"{path}.vace_blocks"
    return find_blocks(model.vace_blocks, where, control, VACEBlock, config, wan.heads_of) + plain
