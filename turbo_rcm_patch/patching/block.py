"""A patched block: each call runs its family's fast path or its original forward.

A family subclasses `PatchedBlock`. It writes the block out (`fast`), says when the fast path does
not apply to the block's modules or inputs (`why_modules`, `why_inputs`), and lists the block's
skip pairs for the report (`pairs`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from dataclasses import replace
from enum import IntEnum
from functools import partial
from typing import Any, ClassVar, Final

from torch import Tensor

from turbo_rcm_patch import ops
from turbo_rcm_patch.config import PatchConfig
from turbo_rcm_patch.ops.dispatch import compile_ahead as compile_kernels
from turbo_rcm_patch.ops.replay import capturing
from turbo_rcm_patch.patching.int8_linears import Int8Copies, Int8Forward, holds_plainly
from turbo_rcm_patch.patching.plain import (
    GRADIENT,
    Replacement,
    compiling,
    original_class,
    original_forward,
    stateful_code,
    why_not_inference,
)
from turbo_rcm_patch.skip import SkipPair


class Level(IntEnum):
    """How exactly a block runs: how its attention does, plus 4 with its Linears in 16 bits.

    Levels are raised and never lowered.
    """

    AS_ASKED = 0
    WIDE_VALUES = 1  # probabilities and values in 16 bits
    EXACT = 2  # exact attention
    LINEARS_16BIT = 4
    WIDE_16BIT = 5
    EXACT_16BIT = 6
    ORIGINAL = 7  # the original forward

    @property
    def attention(self) -> int:
        """How exactly the attention runs, from 0."""
        return self & 3

    @property
    def int8_linears(self) -> bool:
        """True if Linears in int8 stay so."""
        return not self & 4

    def joined(self, other: Level) -> Level:
        """Return the level that is at least as exact as both in each of the two."""
        return Level(max(self.attention, other.attention) + ((self | other) & 4))


#: Level -> how a block at it runs, for the report.
LEVEL_DESCRIPTIONS = {
    Level.WIDE_VALUES: "values in 16 bits",
    Level.EXACT: "exact attention",
    Level.LINEARS_16BIT: "Linears in 16 bits",
    Level.WIDE_16BIT: "values and Linears in 16 bits",
    Level.EXACT_16BIT: "exact attention, Linears in 16 bits",
    Level.ORIGINAL: "runs the original code",
}


class _Thread(threading.local):
    #: The model and the index of the block that ran last.
    last: tuple[Any, int] = (None, 0)


_thread: Final = _Thread()


class Forwards:
    """Counts the forwards of one model, by its blocks, which run in order.

    Attributes:
        count: The number of forwards that began outside a compiler.
    """

    def __init__(self) -> None:
        self.count = 0

    def begins(self, index: int) -> bool:
        """Return True if a block is the first in a forward of this thread."""
        model, before = _thread.last
        _thread.last = self, index
        begins = model is not self or index <= before
        self.count += begins
        return begins


class PatchedBlock(Replacement):
    """The object whose `__call__` replaces the forward of one block.

    It holds the block itself, so that a deep copy of a patched model holds the copied block.

    Args:
        block: The block.
        path: Its name in the model.
        config: How the model is patched.
        heads: Heads of its attentions; 1 if the block is not supported.
        head_dim: Channels of a head; 0 if the block is not supported.

    Attributes:
        level: How exactly the block runs.
        reason: Why the guard raised the level.
        left: Why the block's forward could not be replaced, or "".
        guard: The `Guard` that compares the block with the original; None without one.
        index: The number of the block among the patched ones, in the order in which they run.
        proj_out: The network's last Linear, or None.
        asked: The attention of level AS_ASKED.
        int8: The int8 forwards of its Linears.
        copies: The int8 copies of the model's weights; None without any.
        model_forwards: Counts the forwards of the model.
        forward: The number of the forward in which the block ran last.
        last: Why the last call outside a compiler ran the original forward, or the numbers of
            queries and of keys of a fused call.
        backends: The attention backends that were chosen and not used on that call.
    """

    #: Names of the block's members that take the residual streams between two branches, in order.
    stages: ClassVar[tuple[str, ...]]
    #: Name of the one member that mixes the rows of a stream, the self-attention; "" for several.
    mixes: ClassVar[str] = ""

    def __init__(
        self, block: Any, path: str, config: PatchConfig, heads: int, head_dim: int
    ) -> None:
        self.block, self.path, self.config, self.head_dim = block, path, config, head_dim
        self._cls = original_class(block)
        self.asked = ops.AttentionSpec(
            heads=heads,
            attention=config.attention,
            pv=config.pv,
            smooth_k=config.smooth_k,
            impl=config.impl,
        )
        self._wide = replace(self.asked, pv="bf16")
        self._exact = replace(self.asked, attention="exact")
        self.level, self.reason, self._ahead = Level.AS_ASKED, "", False
        self.left = ""
        self.backends: Collection[str] = ()
        self.guard: Any = None
        self.index = 0
        self.proj_out: Any = None
        self.int8: list[Int8Forward] = []
        self.copies: Int8Copies | None = None
        self.model_forwards = Forwards()
        self.forward = 0
        self.last: str | tuple[int, int] | None = None

    @property
    def spec(self) -> ops.AttentionSpec:
        """The options of the block's attentions at its present level."""
        # No comparison: the compiler of torch 2.11 cannot order the members of an IntEnum.
        return (self.asked, self._wide, self._exact, self._exact)[self.level.attention]

    def spec_over(self, n_kv: int) -> ops.AttentionSpec:
        """Return the options of a cross-attention: exact over the few keys of a prompt, where
        quantising costs more than it saves."""
        quantised = self.asked.attention in ("auto", "int8")
        return self._exact if quantised and n_kv < ops.INT8_MIN_KEYS else self.spec

    def runs(self, *inputs: Any) -> Callable[..., Any]:
        """Decide how a call runs.

        Args:
            *inputs: The inputs of the original forward, in its order.

        Returns:
            What runs on them: `fast`, the original forward, or a comparison of both.
        """
        why = self.why_original(*inputs)
        if compiling():
            return self.original if why else self.fast
        x = self.streams(inputs)[0]
        begins = self.model_forwards.begins(self.index)
        self.forward = self.model_forwards.count
        if why == GRADIENT:
            for forward in self.int8:
                forward.forget()
        elif begins and self.copies is not None and not capturing(x):
            self.copies.follow()  # of weights that may have changed
        if why:
            self.last, self.backends = why, ()
            return self.original
        lengths = self.last = self.lengths(*inputs)  # of several ranks: an exchange
        self.backends = self.unused_backends()
        if not self.index and not self._ahead:
            self.compile_ahead(x, partial(self.fast, *inputs))
        guard = self.guard
        compares = guard is not None and guard.wants(self, inputs, lengths)
        return self.compare if compares else self.fast

    def compile_ahead(self, x: Tensor, fast: Callable[[], object]) -> None:
        """Compile what the fast path launches together, before its first call.

        That runs the modules without the kernels' results, so a module must keep nothing: no int8
        copy, which a kernel writes, and no state.
        """
        if self._ahead or capturing(x):
            return
        self._ahead = True
        if not self.int8 and self.group() is None and not self.stateful_code():
            compile_kernels(self.config.impl, x.device, fast)

    def compare(self, *inputs: Any) -> Any:
        """Run the fast path, and compare it with the original forward."""
        return self.guard.compare(self, inputs)

    def original(self, *inputs: Any) -> Any:
        """Run the block as its author wrote it."""
        return original_forward(self.block)(self.block, *inputs)

    def raise_level(self, level: Level, reason: str) -> bool:
        """Run the block at least as exactly as at a level from now on; return True if that is more
        exact than before."""
        joined = self.level.joined(level)
        if joined == self.level:
            return False
        self.level, self.reason = joined, reason
        for forward in self.int8:
            forward.on = joined.int8_linears
        return True

    def describe_last_run(self) -> str:
        """Describe how the last call outside a compiler ran; "" before the first."""
        if not isinstance(self.last, tuple):
            return f"in the original code: {self.last}" if self.last else ""
        device = next(self.block.parameters()).device
        attention = ops.resolved(self.spec, device, *self.last).attention
        linears = ", int8 Linears" if self.int8_linears() else ""
        wide = self.level.attention == Level.WIDE_VALUES and ops.quantises(attention)
        values = f", {LEVEL_DESCRIPTIONS[Level.WIDE_VALUES]}" if wide else ""
        return f"fused with {attention} attention{values}{linears}"

    def int8_linears(self) -> list[str]:
        """Return the names of the Linears that run in int8 now, under hooks and adapters too."""
        on = {id(f.linear) for f in self.int8 if f.on and holds_plainly(f.linear)}
        linears = self.linears().items() if on else ()
        return [name for name, held in linears if id(getattr(held, "base_layer", held)) in on]

    def form(self) -> str:
        """Return in which form the last call outside a compiler ran, a key of `verdict.FORMS`, or
        "asked"; "" before the first."""
        if not isinstance(self.last, tuple):
            return "author" if self.last or self.left else ""
        by_length = self.config.attention == "auto" and not self.other_forwards()  # not of SLA
        by_length = by_length and "exact" in self.describe_last_run()
        exact = self.level.attention == Level.EXACT or (by_length and not self.level.int8_linears)
        form = "exact" if exact else "length" if by_length else "asked"
        if form == "asked" and self.level.attention:
            form = "wide-values"
        return form + ("" if self.level.int8_linears else "-16bit")

    def stateful_code(self) -> str:
        """Return what keeps the guard from running the original forward a second time, or ""."""
        replaced = self.replaced_attention()
        return stateful_code(self.block) or (replaced and f"{replaced} was replaced")

    def replaced_attention(self) -> str:
        """Return the attention that the author's code would call if other code replaced it, or
        ""."""
        return ""

    def why_replaced(self) -> str:
        """Return why the original forward runs where exact attention has been replaced, or ""."""
        replaced = self.config.attention == "exact" and self.replaced_attention()
        return f"{replaced} was replaced" if replaced else ""

    def group(self) -> Any:
        """Return the process group of the ranks that share the block's sequence, or None."""
        return None

    def unused_backends(self) -> Collection[str]:
        """Return the attention backends that the user chose, or the function in the place of
        torch's, that the block does not use."""
        replaced = self.replaced_attention()
        return {replaced} if replaced and self.config.attention != "exact" else ()

    def notes(self) -> list[str]:
        """Return remarks for the report, such as a setting that the patched block ignores."""
        if self.why_replaced():
            return []
        return [
            f"the attention {'function' if '.' in chosen else 'backend'} {chosen!r} is chosen and "
            f"not used, because the model is patched with attention={self.config.attention!r}; "
            "attention='exact' uses it"
            for chosen in sorted({*self.unused_backends(), *self.backends})
        ]

    def why_block(self) -> str:
        """Return why the fast path does not apply to the block whatever its inputs are, or ""."""
        cls = type(self.block)
        if cls is not self._cls and original_class(self.block) is not self._cls:
            return f"its class was changed to {cls.__qualname__}"
        return self.left or self.why_modules()

    def why_original(self, *inputs: Any) -> str:
        """Return why the original forward runs on these inputs, or ""."""
        return (
            (self.reason if self.level == Level.ORIGINAL else "")
            or why_not_inference(self.block, self.streams(inputs)[0], inputs)
            or self.why_block()
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

    def original_members(self) -> dict[str, Any]:
        """Return members of the block that a comparison with the original code calls instead."""
        return {}

    def plain_attention(self) -> bool:
        """Return True if the self-attention that the original forward calls is its author's, and
        is neither compiled nor computed by a backend that the user chose."""
        compiled = getattr(getattr(self.block, self.mixes), "_compiled_call_impl", None)
        return compiled is None and not self.other_forwards()

    def place(self) -> tuple[Any, str]:
        """Return the module and the name of the function that the block replaces."""
        return self.block, "forward"

    def other_forwards(self) -> list[tuple[Any, Any]]:
        """Return pairs (module inside the block, forward to install on it)."""
        return []

    # --- what a family writes --------------------------------------------------------------------

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Take the parameters of the original forward, and run what `runs` says."""
        raise NotImplementedError

    def fast(self, *inputs: Any, **notes: Any) -> Any:
        """Run the written-out block.

        Args:
            *inputs: The inputs of the original forward.
            **notes: "notes": the `Notes` that collect what the guard compares, or None.
        """
        raise NotImplementedError

    def rows_of(self, take: Callable[[Tensor], Tensor], *inputs: Any) -> tuple[Any, ...]:
        """Return the inputs of the original forward for some rows of its streams, where the block
        names what `mixes` them.

        Args:
            take: Takes those rows of [B, N, ...].
            *inputs: The inputs; what only `mixes` reads may stay as it is.
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
