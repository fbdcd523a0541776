"""The forward of a patched network, which runs again where it decided how its blocks run.

A network's first forward runs as it was asked for and is measured. At its end the guard chooses
how exactly each block runs. If that differs from how the forward ran, it runs again, so that the
first video has the bits of all later ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from types import MethodType
from typing import Any, Final

from torch import nn

from turbo_rcm_patch.patching.block import PatchedBlock
from turbo_rcm_patch.patching.guard import Guard
from turbo_rcm_patch.patching.plain import (
    Replacement,
    compiling,
    original_class,
    original_forward,
    own_function,
    stateful_code,
)

#: diffusers' hook that notes the order in which modules run for the first time.
_TRACKS_ORDER: Final = "layer_execution_tracker"


class DecidingForward(Replacement):
    """The function that replaces a network's forward.

    Args:
        network: The network.
        blocks: Its patched blocks.
        guard: Their guard.
    """

    def __init__(self, network: nn.Module, blocks: Sequence[PatchedBlock], guard: Guard) -> None:
        self.network, self.blocks = network, blocks
        self.guard: Guard | None = guard

    def method(self) -> MethodType:
        """Return what is installed. Pipelines read the names of a forward's parameters."""

        def __call__(deciding: DecidingForward, *args: Any, **named: Any) -> Any:  # noqa: N807
            return deciding(*args, **named)

        function: Any = __call__
        function.__signature__ = signature(original_forward(self.network))
        return MethodType(function, self)

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Run the author's forward, and again if the guard decided that blocks run otherwise."""
        forward, guard = original_forward(self.network), self.guard
        if compiling() or guard is None:
            return forward(self.network, *args, **named)
        try:
            out = forward(self.network, *args, **named)
            while guard.decide() and self._can_run_again():
                del out  # The next run needs the memory.
                out = forward(self.network, *args, **named)
        except BaseException:
            guard.forget()
            raise
        return out

    def retire(self) -> None:
        """Only run the author's forward from now on: the model is unpatched, and other code may
        hold this object."""
        self.blocks, self.guard = (), None

    def _can_run_again(self) -> bool:
        """Return False if something keeps a state from forward to forward, or if other ranks,
        which may not decide the same, have to run along. The decision counts from the next forward
        on then."""
        network = self.network
        return (
            own_function(original_class(network), "forward")
            and not stateful_code(network)
            and not any(block.replaced_attention() for block in self.blocks)
            and all(
                original_class(module) is type(module)  # else it is sharded
                and _TRACKS_ORDER not in getattr(vars(module).get("_diffusers_hook"), "hooks", ())
                for module in network.modules()
            )
        )
