"""One block of Wan2.1-1.3B alone: as written, compiled, patched, and both."""

from __future__ import annotations

import copy
import functools
import gc
from typing import Any, Final

import torch

from turbo_rcm_patch.benchmarks.clock import Call
from turbo_rcm_patch.benchmarks.contest import Effort
from turbo_rcm_patch.benchmarks.journal import Journal
from turbo_rcm_patch.benchmarks.network import build_network, setting
from turbo_rcm_patch.benchmarks.setup import MICRO, Sizes, errors_of, generator
from turbo_rcm_patch.benchmarks.variants import time_variant, variants
from turbo_rcm_patch.sampling.measures import highest_precision

__all__ = ["measure_wan_block"]

#: Relative L2 to fp32 of what the block adds to its input, from which an output is wrong.
WRONG: Final = 0.2
_SETS: Final = 2


@torch.no_grad()
def measure_wan_block(journal: Journal, effort: Effort) -> bool:
    """Time blocks[0] of a one-layer network and keep it as the case "wan-block"; whether ours was
    right."""
    plan, device = journal.plan, journal.device
    sizes = MICRO if plan.micro else Sizes()
    network = build_network(sizes.network | {"num_layers": 1}, device, plan.seed)
    block: Any = network.blocks[0]
    # Live gates, so that what self-attention and feed-forward compute shows in the output.
    with setting(network, live=True, sharp=False):
        inputs = [_block_inputs(network, sizes, device, plan.seed + i) for i in range(_SETS)]
        calls: list[Call] = [functools.partial(block, *one) for one in inputs]
        wide = copy.deepcopy(block).float()
        hidden = inputs[0][0].double()
        with highest_precision():
            added = wide(*_upcast(inputs[0])).double() - hidden
        del wide
        record: dict[str, object] = {
            "tokens": int(hidden.shape[1]),
            "truth": "the same block in fp32, of what it adds to its input; gates +0.3",
        }
        found: dict[str, object] = {}
        record["variants"] = found
        good = True
        for variant in variants():
            if "sage" in variant.name or "cuDNN" in variant.name:
                continue
            if journal.late(f"Wan block, {variant.name}"):
                continue
            numbers = time_variant(
                variant,
                network,
                calls,
                lambda y: errors_of(y.double() - hidden, added),
                WRONG,
                journal,
                effort,
            )
            found[variant.name] = numbers
            good &= numbers["status"] == "timed" or not variant.ours
            _show(variant.name, numbers, found, journal)
            journal.case("wan-block", record)
    del network, block, calls, inputs
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return good


def _block_inputs(network: Any, sizes: Sizes, device: torch.device, seed: int) -> tuple[Any, ...]:
    """What the first block gets in a forward of the network."""
    random = generator(device, seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=random, device=device).bfloat16()

    seen: list[tuple[Any, ...]] = []
    hook = network.blocks[0].register_forward_pre_hook(lambda _, args: seen.append(args))
    try:
        network(
            hidden_states=normal(*sizes.latents),
            timestep=torch.tensor([900.0], device=device),
            encoder_hidden_states=normal(
                1, sizes.text_tokens, int(str(sizes.network["text_dim"]))
            ),
            return_dict=False,
        )
    finally:
        hook.remove()
    return seen[0]


def _upcast(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.float()
    return tuple(_upcast(one) for one in value) if isinstance(value, tuple) else value


def _show(name: str, record: dict[str, object], all_: dict[str, object], journal: Journal) -> None:
    timing, error = record.get("milliseconds"), record.get("error")
    if not isinstance(timing, dict) or not isinstance(error, dict):
        journal.show(("wan-block", name, str(record["reason"])))
        return
    eager = all_.get("eager")
    before = eager.get("milliseconds") if isinstance(eager, dict) else None
    ratio = f"{before['median'] / timing['median']:.2f}" if isinstance(before, dict) else ""
    journal.show(
        (
            "wan-block",
            name,
            *(f"{timing[one]:.4f}" for one in ("median", "p20", "p80")),
            ratio,
            f"{error['relative_l2']:.5f}",
        )
    )
