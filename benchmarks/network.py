"""`network`: one forward of Wan, of Wan with SLA, and of CogVideoX, at their published sizes.
`length`: a forward of Wan2.1-1.3B by its number of tokens.

Short sequences are bound by the CPU, so a row has two times: of forwards that are queued one after
another, and of the CPU for one forward that begins on an idle GPU.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any, Final

import torch

from benchmarks.models import (
    COGVIDEOXS,
    LENGTHS,
    SLA,
    WANS,
    build_wan,
    network_of,
    size_of,
    wan_call,
)
from benchmarks.runner import (
    ERROR,
    TIMES,
    Benchmark,
    Call,
    Column,
    Journal,
    Plan,
    Record,
    error_to,
    peak_gib,
    seconds_of,
    time_forwards,
)
from benchmarks.ways import EAGER, WAYS, record_report
from turbo_rcm_patch.patching import sla_as_defined

#: Relative L2 to the truth from which a forward is broken and is not timed.
BROKEN: Final = 0.2
_COLUMNS: Final = (
    *TIMES, Column("CPU ms", "cpu_ms.median", ".2f"), Column("of eager", "of_eager", ".3f"),
    Column("first s", "first_seconds", ".2f"), Column("in int8", "in_int8", "d"),
    Column("GiB", "peak_gib", ".1f"), ERROR,
)  # fmt: skip
_ABOUT: Final = {
    "weights": "seeded random, bf16; batch 1, guard off",
    "ms": "of forwards queued one after another, by the wall clock",
    "cpu_ms": "until a forward returns that began on an idle GPU",
    "first_seconds": "the first forward with this method in this process, compilation included",
    "in_int8": "blocks whose self-attention ran in int8 on the last forward",
    "peak_gib": "allocated memory at the peak of a forward, weights included",
    "error": "relative L2 to the unpatched eager output; with SLA to SLA by its definition",
    "compile": "every block with fullgraph=True, as compile_repeated_blocks does",
}
#: Over more tokens the GPU never waits, so CUDA graphs change nothing and take minutes to begin.
_MOST_FOR_GRAPHS: Final = 10_000
#: With SLA the author's forward is dense attention, another function.
_SLA_METHODS: Final = ("patched", "patched int8 Linears", "patched compile")


@torch.no_grad()
def _measure(case: str, methods: list[str], journal: Journal) -> None:
    network, make = network_of(case, journal.plan, journal.device)
    call = make(journal.plan.seed)
    if case == SLA:
        methods = [name for name in methods if name in _SLA_METHODS]
        with sla_as_defined(network, 0.1):
            truth = call()
    else:
        truth = call()
    count = sum(p.numel() for p in network.parameters())
    journal.case(case, parameters=count, finite=bool(truth.isfinite().all()))
    _measure_forwards(methods, network, call, truth, journal, case)


@cache
def _built(plan: Plan, device: torch.device) -> Any:
    return build_wan("1.3b", plan, device)


@torch.no_grad()
def _measure_length(tokens: str, methods: list[str], journal: Journal) -> None:
    plan, device = journal.plan, journal.device
    network = _built(plan, device)
    call = wan_call(network, plan, device, size_of(tokens, plan), plan.seed)
    if int(tokens) > _MOST_FOR_GRAPHS:
        methods = [m for m in methods if not m.endswith("reduce-overhead") or m in plan.only]
    _measure_forwards(methods, network, call, call(), journal, tokens)


def _measure_forwards(
    methods: list[str], network: Any, call: Call, truth: torch.Tensor, journal: Journal, case: str
) -> None:
    for method in methods:
        function = partial(measure_forward, method, network, call, truth, journal, case)
        journal.measure(case, method, function)


def measure_forward(
    method: str, network: Any, call: Call, truth: torch.Tensor, journal: Journal, case: str,
    record: Record,
) -> None:  # fmt: skip
    """Check and time one way to run a network.

    Args:
        method: A key of `WAYS`.
        network: Unpatched and uncompiled before and after.
        call: A forward.
        truth: Its right output.
        journal: Of the benchmark.
        case: Name of the case, for the ratio to eager.
        record: Gets the numbers.
    """
    device, plan = journal.device, journal.plan
    output: list[torch.Tensor] = []
    with WAYS[method](network, plan.compiler) as report:
        record["first_seconds"] = seconds_of(lambda: output.append(call()), device)
        record["error"] = error_to(truth, BROKEN)(output.pop())
        for _ in range(2):  # CUDA graphs are captured in the second forward.
            call()
        record["peak_gib"] = peak_gib(call, device)
        record["ms"], record["cpu_ms"] = time_forwards(call, device, plan.most(5))
        record_report(record, report)
    eager = journal.case(case).get(EAGER, {})
    if "ms" in eager:
        record["of_eager"] = record["ms"]["median"] / eager["ms"]["median"]


network: Final = Benchmark(
    name="network", about=_ABOUT, columns=_COLUMNS, cases=[*WANS, *COGVIDEOXS],
    methods=WAYS, measure=_measure, default=["1.3b"],
)  # fmt: skip
length: Final = Benchmark(
    name="length", about=_ABOUT | {"network": "Wan2.1-T2V-1.3B"}, columns=_COLUMNS, cases=LENGTHS,
    methods=WAYS, measure=_measure_length,
)  # fmt: skip
