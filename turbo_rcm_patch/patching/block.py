"""A patched block: each call runs its family's fast path or its author's forward.

A family subclasses `PatchedBlock`. It writes the block out (`fast`), says when the fast path does
not apply to the block's modules or inputs (`why_modules`, `why_inputs`), and lists the block's
skip pairs for the report (`pairs`).
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from turbo_rcm_patch import ops
from turbo_rcm_patch.config import PatchConfig
from turbo_rcm_patch.patching.int8_linears import Int8Forward, holds_plainly
from turbo_rcm_patch.patching.pieces import Attend, Notes
from turbo_rcm_patch.patching.plain import (
    Replacement,
    author_class,
    compiling,
    why_not_inference,
)
from turbo_rcm_patch.skip import SkipPair

if TYPE_CHECKING:
    from turbo_rcm_patch.patching.guard import Guard


class Level(IntEnum):
    """How exactly a block runs. The guard raises the level and never lowers it."""

    AS_ASKED = 0
    EXACT = 1  # exact attention
    WIDE = 2  # exact attention and Linears in 16 bits
    AUTHOR = 3  # the author's forward


#: Level -> how a block at it runs, for the report.
LEVEL_WORDS = {
    Level.EXACT: "exact attention",
    Level.WIDE: "exact attention, Linears in 16 bits",
    Level.AUTHOR: "given back to its author's code",
}


class PatchedBlock(Replacement):
    """The object whose `__call__` replaces the forward of one block.

    It holds the block itself, so that a deep copy of a patched model holds the copied block.

    Args:
        block: The block.
        path: Its name in the model.
        config: How the model is patched.
        attend: How its attentions are computed.

    Attributes:
        level: How exactly the block runs.
        reason: Why the guard raised the level.
        left: Why the block's forward could not be replaced, or "".
        guard: Compares the block with its author's code now and then; None without a guard.
        index: The number of the block among the patched ones, in the order in which they run.
        int8: The int8 forwards of its Linears.
        last: Why the last call outside a compiler ran the author's forward, or the numbers of
            queries and of keys of a fused call.
        backend: The attention backend that was chosen and not used on that call, or "".
    """

    __slots__ = (
        "__weakref__", "_asked", "_exact", "_written", "backend", "block", "config", "guard",
        "index", "int8", "last", "left", "level", "path", "reason",
    )  # fmt: skip

    #: Names of the block's members that take the residual streams between two branches, in order.
    stages: ClassVar[tuple[str, ...]]

    def __init__(self, block: Any, path: str, config: PatchConfig, attend: Attend) -> None:
        self.block, self.path, self.config = block, path, config
        self._asked, self._exact = attend, attend.exactly()
        #: A compiler cannot look up the forward of a class.
        self._written: Any = author_class(block).forward
        self.level, self.reason = Level.AS_ASKED, ""
        self.left = self.backend = ""
        self.guard: Guard | None = None
        self.index = 0
        self.int8: list[Int8Forward] = []
        self.last: str | tuple[int, int] | None = None

    @property
    def attend(self) -> Attend:
        """The options of the block's attentions at its present level."""
        return self._exact if self.level else self._asked

    def run(self, *inputs: Any) -> Any:
        """Run the fast path or the author's forward.

        Args:
            *inputs: The inputs of the author's forward, in its order.
        """
        why = self.why_author(*inputs)
        if compiling():
            return self.author(*inputs) if why else self.fast(None, *inputs)
        self.last = why or self.lengths(*inputs)
        self.backend = "" if why else self.unused_backend()
        guard = self.guard
        if why:
            return self.author(*inputs)
        if guard is None or not guard.wants(self, inputs):
            return self.fast(None, *inputs)
        return guard.compare(self, inputs)

    def author(self, *inputs: Any) -> Any:
        """Run the block as its author wrote it."""
        forward: Any = self._written if compiling() else author_class(self.block).forward
        return forward(self.block, *inputs)

    def raise_level(self, level: Level, reason: str) -> None:
        """Run the block at this level from now on, if it is higher than the present one."""
        if level > self.level:
            self.level, self.reason = level, reason
            for forward in self.int8:
                forward.on = level < Level.WIDE

    def words(self) -> str:
        """Describe how the last call outside a compiler ran; "" before the first."""
        if not isinstance(self.last, tuple):
            return f"as their author wrote them: {self.last}" if self.last else ""
        attend, device = self.attend, next(self.block.parameters()).device
        one = ops.resolved(attend.spec(), device, *self.last)
        linears = ", int8 Linears" if self.int8_linears() else ""
        return f"fused with {one.attention} attention{linears}"

    def int8_linears(self) -> list[str]:
        """Return the names of the Linears that run in int8 now, under hooks and adapters too."""
        on = {id(one.linear) for one in self.int8 if one.on and holds_plainly(one.linear)}
        held = self.linears().items() if on else ()
        return [name for name, one in held if id(getattr(one, "base_layer", one)) in on]

    def group(self) -> Any:
        """Return the process group of the ranks that share the block's sequence, or None."""
        return None

    def unused_backend(self) -> str:
        """Return the attention backend that the user chose and the block does not use, or ""."""
        return ""

    def notes(self) -> list[str]:
        """Return remarks for the report, such as a setting that the patched block ignores."""
        chosen = self.unused_backend() or self.backend
        if not chosen:
            return []
        return [
            f"the attention backend {chosen!r} is chosen and not used, because the model is "
            f"patched with attention={self.config.attention!r}; attention='exact' uses it"
        ]

    def why_author(self, *inputs: Any) -> str:
        """Return why the author's forward runs on these inputs, or ""."""
        return (
            (self.reason if self.level == Level.AUTHOR else "")
            or why_not_inference(self.block, self.streams(inputs)[0], inputs)
            or self.why_modules()
            or self.why_inputs(*inputs)
        )

    def streams(self, values: Any) -> tuple[Tensor, ...]:
        """Return the residual streams [B, N, C] among a stage's inputs, the block's inputs or its
        outputs."""
        return (values[0] if isinstance(values, tuple) else values,)

    def lengths(self, *inputs: Any) -> tuple[int, int]:
        """Return the numbers of queries and of keys of the self-attention."""
        tokens = sum([x.shape[1] for x in self.streams(inputs)])
        return tokens, tokens

    def beside(self) -> list[tuple[Any, Any]]:
        """Return pairs (module of the block, forward to install on it) beside the block's own."""
        return []

    # --- what a family writes --------------------------------------------------------------------

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Take the parameters of the author's forward, and call `run`."""
        raise NotImplementedError

    def fast(self, notes: Notes | None, *inputs: Any) -> Any:
        """Run the written-out block.

        Args:
            notes: Collects what the guard compares, or None.
            *inputs: The inputs of the author's forward.
        """
        raise NotImplementedError

    def why_modules(self) -> str:
        """Return why the fast path does not apply to the block's modules, or ""."""
        return ""

    def why_inputs(self, *inputs: Any) -> str:
        """Return why the fast path does not apply to these inputs, or ""."""
        return ""

    def linears(self) -> dict[str, Any]:
        """Return the Linears of the branches by name."""
        raise NotImplementedError

    def pairs(self) -> list[SkipPair]:
        """Return the block's skip pairs as they would run now."""
        raise NotImplementedError
