"""The ways in which `turbo` runs a network: patched, with SLA, with int8 weights, compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

from benchmarks.turbo_exact import block_weights
from benchmarks.variants import Variant
from turbo_rcm_patch.config import PatchConfig

__all__ = ["Enter", "as_written", "in_turn", "inner_blocks", "patched_ways"]

#: Gets the network and the backend of torch.compile; inside, the network runs another way.
Enter = Callable[[Any, str], AbstractContextManager[object]]


def inner_blocks(model: Any) -> list[Any]:
    """Its blocks, out of torch's activation checkpointing."""
    return [getattr(block, "_checkpoint_wrapped_module", block) for block in model.blocks]


def in_turn(*entered: Enter) -> Enter:
    """One context inside the other."""

    @contextmanager
    def enter(model: Any, backend: str) -> Iterator[None]:
        with ExitStack() as stack:
            for one in entered:
                stack.enter_context(one(model, backend))
            yield

    return enter


#: Nothing is changed.
as_written = in_turn()


def patched_ways(sparse: Mapping[str, Enter], **fields: Any) -> list[Variant]:
    """Patched with full attention, and with each sparse layout; compiled ones last.

    Args:
        sparse: Layout -> what makes the network's attention sparse.
        fields: Of PatchConfig, where it is sparse.
    """
    early = [Variant("patched", _patched(), ours=True)]
    late: list[Variant] = []
    for layout, enter in sparse.items():
        name = f"patched {layout}"
        plain = in_turn(enter, _patched(**fields))
        int8 = in_turn(enter, _patched(linear="int8", **fields))
        brought = in_turn(enter, _block_weights, _patched(linear="int8", **fields))
        early += [
            Variant(name, plain, ours=True, profiled=True),
            Variant(f"{name} int8", int8, ours=True, profiled=True),
            Variant(f"{name} checkpoint int8", brought, ours=True, profiled=True),
        ]
        if layout == "SageSLA":  # SLA would compile the same graphs again
            late += [
                Variant(f"{name} compiled", in_turn(plain, _compiled), ours=True),
                Variant(f"{name} int8 compiled", in_turn(int8, _compiled), ours=True),
            ]
    return early + late


def _patched(**fields: Any) -> Enter:
    @contextmanager
    def enter(model: Any, backend: str) -> Iterator[None]:
        from turbo_rcm_patch import patched

        with patched(model, PatchConfig(guard=False, **fields)):
            yield

    return enter


@contextmanager
def _block_weights(model: Any, backend: str) -> Iterator[None]:
    with block_weights(model.blocks):
        yield


@contextmanager
def _compiled(model: Any, backend: str) -> Iterator[None]:
    """Every block, without graph breaks."""
    torch._dynamo.reset()
    blocks = inner_blocks(model)
    for block in blocks:
        block.compile(fullgraph=True, backend=backend)
    try:
        yield
    finally:
        for block in blocks:
            block._compiled_call_impl = None
        torch._dynamo.reset()
