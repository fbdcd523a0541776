"""`length`: a forward of Wan2.1-1.3B by its number of tokens, on the GPU and on the CPU.

Short sequences are bound by the CPU, so a row has two times: of forwards that are queued one after
another, and of the CPU for one forward that begins on an idle GPU.
"""

from __future__ import annotations

from functools import partial
from typing import Final

import torch

from benchmarks.models import LENGTHS, build_wan, size_of, wan_call
from benchmarks.network import ABOUT, COLUMNS, measure_forward
from benchmarks.runner import Journal, Plan, run_cases
from benchmarks.ways import WAYS, is_patched

#: Over more tokens the GPU never waits, so CUDA graphs change nothing and take minutes to begin.
_MOST_FOR_GRAPHS: Final = 10_000


def run(plan: Plan) -> int:
    """Measure, and write `length.json`.

    Returns:
        0 if every patched forward was near the eager one.
    """
    network = None

    def measure(tokens: str, methods: list[str], journal: Journal) -> None:
        nonlocal network
        if network is None:
            network = build_wan("1.3b", plan, journal.device)
        call = wan_call(network, plan, journal.device, size_of(tokens, plan), plan.seed)
        with torch.no_grad():
            eager = call()
            for method in methods:
                graphs = method.endswith("reduce-overhead") and int(tokens) > _MOST_FOR_GRAPHS
                if graphs and method not in plan.only:
                    continue
                function = partial(measure_forward, method, network, call, eager, journal, tokens)
                journal.measure(tokens, method, function, fused=is_patched(method))

    return run_cases(
        plan, "length", COLUMNS, ABOUT | {"network": "Wan2.1-T2V-1.3B"}, list(LENGTHS),
        list(WAYS), measure,
    )  # fmt: skip
