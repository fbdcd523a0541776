"""`network`: one forward of Wan, of Wan with SLA, and of CogVideoX: its time and its error.

Short sequences are bound by the CPU, so a row has two times: of forwards that are queued one after
another, and of the CPU until one returns that began on an idle GPU. `first s` is the first forward
with a method in this process, compilation included; the guard decides in it.

`error` is relative L2 to the unpatched eager output, and with SLA to SLA by its definition; in
cases for fidelity it is of the first forward, to the same network in fp32. `of eager's` is that
error over the unpatched network's, `predicted` the same ratio as the guard predicts it. `in int8`
counts the blocks whose self-attention ran in int8 on the last forward.

In cases for fidelity the truth is the network with its bf16 weights and inputs upcast to fp32,
without TF32 and with exact attention. Random gates hardly let attention reach the output and
random queries are hardly peaked, so that some of these cases change both.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import torch

from benchmarks.models import (
    EAGER,
    SIZES,
    SLA,
    WAYS,
    build_network,
    changed,
    make_call,
    record_report,
)
from benchmarks.runner import (
    ERROR,
    MS,
    Benchmark,
    Call,
    Column,
    Journal,
    Record,
    Wrong,
    error_to,
    seconds_of,
    time_forwards,
    time_on_cpu,
)
from turbo_rcm_patch import PatchReport
from turbo_rcm_patch.patching import sla_as_defined
from turbo_rcm_patch.video.measures import highest_precision, upcast


class Case(NamedTuple):
    """A network and its tokens; `fidelity` compares with fp32, of gates or queries that differ."""

    network: str
    tokens: int = 32760
    fidelity: bool = False
    live: bool = False
    sharp: bool = False


_CASES: Final = {
    "1.3b": Case("1.3b"), "14b": Case("14b"), "wan2.2-5b": Case("wan2.2-5b"), SLA: Case(SLA),
    "cogvideox-2b": Case("cogvideox-2b"), "cogvideox-5b": Case("cogvideox-5b"),
    **{f"1.3b-{tokens}": Case("1.3b", tokens) for tokens in SIZES if tokens != 32760},
    **{
        f"1.3b-{'live' if live else 'drawn'}-x{8 if sharp else 1}":
        Case("1.3b", fidelity=True, live=live, sharp=sharp)
        for live in (False, True) for sharp in (False, True)
    },
    "cogvideox-5b-fidelity": Case("cogvideox-5b", fidelity=True),
}  # fmt: skip
#: Relative L2 to the truth from which a forward is broken and is not timed.
BROKEN: Final = 0.2
#: A patched network's error over the unpatched one's from which the command fails, as `compare`
#: does.
MOST: Final = 2.0
#: Over more tokens the GPU never waits, so CUDA graphs change nothing and take minutes to begin.
_MOST_FOR_GRAPHS: Final = 10_000


def _methods(name: str, case: Case) -> Sequence[str]:
    if case.network == SLA:  # Unpatched it is dense attention, another function.
        return "patched", "patched int8 Linears", "patched compile"
    if case.fidelity:
        return [way for way in WAYS if way in (EAGER, "compile", "sage") or "guard" in way] + [
            "patched",
            "patched int8 Linears",
        ]
    long = "-" in name and case.tokens > _MOST_FOR_GRAPHS
    return [way for way in WAYS if "guard" not in way and not (long and "reduce-overhead" in way)]


@torch.no_grad()
def _measure(name: str, methods: Sequence[str], journal: Journal) -> None:
    case, plan, device = _CASES[name], journal.plan, journal.device
    network = build_network(case.network, plan, device)
    with changed(network, live=case.live, sharp=case.sharp):
        call = make_call(network, plan, device, case.tokens)
        if case.fidelity:
            with highest_precision(), upcast(network):
                truth = make_call(network, plan, device, case.tokens, wide=True)()
        elif case.network == SLA:
            with sla_as_defined(network, 0.1):
                truth = call()
        else:
            truth = call()
        if case.fidelity:  # The others are compared with it.
            methods = list(dict.fromkeys([EAGER, *methods]))
        for method in methods:
            journal.measure(
                name, method, partial(_one, method, network, call, truth, journal, name)
            )


def _one(
    method: str, network: Any, call: Call, truth: torch.Tensor, journal: Journal, name: str,
    record: Record,
) -> None:  # fmt: skip
    """Check and time one way to run a network, which is as it was before and after."""
    device, plan = journal.device, journal.plan
    outputs: list[torch.Tensor] = []
    with WAYS[method](network, plan.compiler) as report:
        record["first_seconds"] = seconds_of(lambda: outputs.append(call()), device)
        record["error"] = error_to(truth, BROKEN)(outputs[0])
        first = outputs.pop().clone()  # A CUDA graph writes into the same memory again.
        record["same_bits"] = torch.equal(first, call())
        call()  # CUDA graphs are captured in the second forward.
        record["ms"] = time_forwards(call, device, plan.most(5))
        record["cpu_ms"] = time_on_cpu(call, device, plan.most(5))
        record_report(record, report)
        if isinstance(report, PatchReport) and "guard on" in method:
            record["predicted"] = report.guard.prediction
    eager = record if method == EAGER else journal.records(name).get(EAGER, {})
    if _CASES[name].fidelity and "error" in eager:
        record["error_of_eager"] = record["error"] / eager["error"]
        if record["error_of_eager"] > MOST:
            raise Wrong(f"{record['error_of_eager']:.3g} times the unpatched network's error")


network: Final = Benchmark(
    name="network",
    text="one forward of Wan and CogVideoX: its time, or its distance to fp32",
    columns=(
        MS, Column("CPU ms", "cpu_ms.median", ".2f"), Column("first s", "first_seconds", ".2f"),
        Column("in int8", "in_int8", "d"), ERROR,
        Column("of eager's", "error_of_eager", ".3f"),
        Column("predicted", "predicted", ".3f"), Column("same bits", "same_bits", ""),
    ),
    cases={name: _methods(name, case) for name, case in _CASES.items()},
    measure=_measure,
    default=[name for name, case in _CASES.items() if case.network == "1.3b"],
)  # fmt: skip
