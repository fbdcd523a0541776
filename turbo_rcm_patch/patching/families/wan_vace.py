"""diffusers' Wan VACE: the plain Wan blocks, and control blocks that make hints for some of them.

A control block (`WanVACETransformerBlock`) is a Wan block over a stream of its own. The first one
projects its input and adds the video; each projects its output, the hint, which the model's
forward adds to the video after a block (VACE: arXiv 2503.07598). Control blocks run before all
others. Written against diffusers 0.42.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from diffusers.models.transformers import transformer_wan_vace as author
from torch import Tensor, nn

from turbo_rcm_patch.config import PatchConfig
from turbo_rcm_patch.patching.author import Notes
from turbo_rcm_patch.patching.block import Branch
from turbo_rcm_patch.patching.blocks import same_batch
from turbo_rcm_patch.patching.branches import Given, LinearRun, Run
from turbo_rcm_patch.patching.families.wan_block import (
    BlockClasses,
    WanBlockForward,
    modulation,
)
from turbo_rcm_patch.patching.families.wan_plan import (
    block_states,
    check_blocks,
    check_signatures,
    plan_blocks,
)
from turbo_rcm_patch.patching.linears import Close, pair_state
from turbo_rcm_patch.patching.pairs import Runs, States, block_pair, left_alone
from turbo_rcm_patch.patching.plain import why_not_plain
from turbo_rcm_patch.patching.plan import Token
from turbo_rcm_patch.patching.state import ModelPlan, PairState
from turbo_rcm_patch.skip import Stream

_PROJ_IN: Final = Branch(name="proj_in", kind="control", norm="")
_HINT: Final[Runs] = (
    "as-written",
    "the model's own forward adds the hint, to a video that its blocks have yet to make",
)
_CONTROL_BLOCK: Final = (
    *("self", "hidden_states", "encoder_hidden_states", "control_hidden_states"),
    *("temb", "rotary_emb"),
)


def check(model: nn.Module) -> None:
    """Raise a typed error if this instance cannot be patched at all."""
    plain, control = _classes()
    check_signatures(plain)
    check_signatures(control, _CONTROL_BLOCK)
    check_blocks(model, "vace_blocks", control)
    check_blocks(model, "blocks", plain)


def plan(model: nn.Module, path: str, config: PatchConfig) -> ModelPlan:
    """The pairs of every block, how each would run, and the block forwards to install."""
    result = ModelPlan(model, path, config, states=[])
    plain, control = _classes()
    plan_blocks(result, "vace_blocks", control, VACEBlockForward, states=_control_states)
    plan_blocks(result, "blocks", plain)
    return result


def _classes() -> tuple[BlockClasses, BlockClasses]:
    """Of the plain blocks, and of the control blocks."""
    plain = BlockClasses(author.WanTransformerBlock, author.WanAttention, author.WanAttnProcessor)
    return plain, BlockClasses(
        author.WanVACETransformerBlock, author.WanAttention, author.WanAttnProcessor
    )


def _control_states(
    block: Any, path: str, config: PatchConfig, classes: BlockClasses, whole: str
) -> States:
    """The pairs of one control block, by the name of their branch."""
    states: States = {}
    if block.proj_in is not None:
        why = why_not_plain(block.proj_in)
        runs: Runs = ("after-linear", f"proj_in is called: {why}") if why else ("in-linear", "")
        runs = left_alone("control", config, whole) or runs
        pair = block_pair(f"{path}.proj_in", "control", runs)
        states["proj_in"] = pair_state(pair, {"proj_in": block.proj_in}, config)
    states |= block_states(block, path, config, classes, whole)
    if block.proj_out is not None:
        scale = Stream("video", "1", "control_hidden_states_scale")
        states["proj_out"] = PairState(block_pair(f"{path}.proj_out", "control", _HINT, scale))
    return states


class VACEBlockForward(WanBlockForward):
    """Stands in for the forward of one control block."""

    __slots__ = ()

    def __call__(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        control_hidden_states: Tensor,
        temb: Tensor,
        rotary_emb: tuple[Tensor, Tensor],
    ) -> tuple[Tensor | None, Tensor]:
        """The author's control block, with its skip pairs closed by ours where they are live.

        Args:
            hidden_states: [B, N, C], the video, the model's dtype.
            encoder_hidden_states: [B, T, C] text, with the image tokens in front for I2V.
            control_hidden_states: [B, N, C], the control stream.
            temb: [B, 6, C].
            rotary_emb: (cos, sin), each [1, N, 1, head_dim] fp32.

        Returns:
            The hint [B, N, C], or None without an output projection, and the control stream.
        """
        inputs = (hidden_states, encoder_hidden_states, control_hidden_states, temb, rotary_emb)
        if not self._serves(hidden_states):
            written: tuple[Tensor | None, Tensor] = self._as_written(*inputs)
            return written
        guard = self._begin(
            hidden_states=hidden_states,
            encoder_hidden_states=encoder_hidden_states,
            control_hidden_states=control_hidden_states,
            temb=temb,
        )
        block = self._block
        rows = modulation(block.scale_shift_table.to(temb.device), temb)
        stream = control_hidden_states if block.proj_in is None else hidden_states
        stream, context = same_batch(stream, encoder_hidden_states)
        given = Given(context, rows, rotary_emb, more=(control_hidden_states,), forward=self)
        control: Tensor = self._run(stream, given, guard, inputs)
        return None if block.proj_out is None else block.proj_out(control), control

    def _by_author(self, name: str, view: Any, hidden: Tensor, inputs: tuple[Any, ...]) -> Tensor:
        _, context, control, *rest = inputs
        own: Any = type(self._block).forward
        stream = control if name == "proj_in" else hidden
        made: Tensor = own(view, hidden, context, stream, *rest)[1]
        return made

    def _branches(self) -> tuple[Branch, ...]:
        return self.branches if self._block.proj_in is None else (_PROJ_IN, *self.branches)

    def _run_of(self, branch: Branch, hidden: Tensor, given: Given) -> Run:
        if branch is not _PROJ_IN:
            return super()._run_of(branch, hidden, given)
        state, proj_in = self._states[branch.name], self._block.proj_in
        close = Close(
            self._linears, branch.name, (proj_in,), given.more[0],
            int8=state.int8, cast="model", impl=self._config.impl,
            rounding=self._rounding(branch, hidden.dtype),
        )  # fmt: skip
        return LinearRun(state, proj_in, close, lambda given: given.more[0])

    def _token(self, hidden: Tensor, given: Given) -> Token:
        token, control = super()._token(hidden, given), given.more[0]
        same = control.shape == hidden.shape and control.dtype is hidden.dtype
        if token is None or not same or control.device != hidden.device:
            return None
        return (token, control.stride())

    def _only(self, name: str, notes: Notes, instead: Callable[..., Any] | None) -> Any:
        view = super()._only(name, notes, instead)
        members = view._instead | {"proj_out": None}
        if name != "proj_in":
            members["proj_in"] = None
        return notes.over(self._block, **members)
