"""`fidelity`: how far a forward is from the same network in fp32, compared with the unpatched one.

The truth is the network with its bf16 weights and inputs upcast to fp32, without TF32 and with
exact attention. Wan2.1-1.3B has seeded random weights at four settings: gates as drawn or +0.3, so
that attention reaches the output, and query norms times 1 or 8, so that attention is peaked.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any, Final

import torch

from benchmarks import ways
from benchmarks.models import COGVIDEOXS, changed, network_of
from benchmarks.runner import (
    Benchmark,
    Call,
    Column,
    Journal,
    Record,
    Wrong,
    error_to,
    seconds_of,
    time_calls,
)
from benchmarks.ways import Way, patch, record_report
from turbo_rcm_patch import PatchReport
from turbo_rcm_patch.video.measures import highest_precision, upcast

#: An error above this is no inaccuracy.
BROKEN: Final = 0.5
#: A patched network's error over the unpatched one's from which the command fails, as `compare`
#: does.
MOST: Final = 2.0
_UNPATCHED: Final = "unpatched"
_METHODS: Final[dict[str, Way]] = {
    _UNPATCHED: ways.as_written,
    "compile": ways.compiled,
    "sage": ways.sage,
    "patched": patch(guard=True),
    "patched guard off": patch(),
    "patched exact": patch(guard=True, attention="exact"),
    "patched int8 Linears": patch(guard=True, linear="int8"),
    "patched int8 Linears guard off": patch(linear="int8"),
}
#: Case -> (gates are live, attention is peaked).
_SETTINGS: Final = {
    "drawn-x1": (False, False),
    "drawn-x8": (False, True),
    "live-x1": (True, False),
    "live-x8": (True, True),
}
_COLUMNS: Final = (
    Column("of unpatched", "of_unpatched", ".3f"), Column("error", "error", ".5f"),
    Column("predicted", "predicted", ".3f"), Column("in int8", "in_int8", "d"),
    Column("same bits", "same_bits", ""), Column("first s", "first_seconds", ".2f"),
    Column("ms", "ms.median", ".1f"),
)  # fmt: skip
_ABOUT: Final = {
    "error": "relative L2 of the first forward's output to the truth",
    "of_unpatched": "error over that of the unpatched network",
    "predicted": "the same ratio as the guard predicts it",
    "in_int8": "blocks whose self-attention runs in int8 after the guard has decided",
    "same_bits": "the second forward returns the bits of the first, in which the guard decided",
}


@torch.no_grad()
def _measure(case: str, methods: list[str], journal: Journal) -> None:
    name = "1.3b" if case in _SETTINGS else case
    network, make = network_of(name, journal.plan, journal.device)
    live, sharp = _SETTINGS.get(case, (False, False))
    with changed(network, live=live, sharp=sharp) if live or sharp else nullcontext():
        call = make(journal.plan.seed)
        with highest_precision(), upcast(network):
            truth = make(journal.plan.seed, wide=True)()
        for method in dict.fromkeys([_UNPATCHED, *methods]):
            function = partial(_one, method, network, call, truth, journal, case)
            journal.measure(case, method, function)


def _one(
    method: str, network: Any, call: Call, truth: torch.Tensor, journal: Journal, case: str,
    record: Record,
) -> None:  # fmt: skip
    with _METHODS[method](network, journal.plan.compiler) as report:
        outputs: list[torch.Tensor] = []
        record["first_seconds"] = seconds_of(lambda: outputs.append(call()), journal.device)
        record["error"] = error_to(truth, BROKEN)(outputs[0])
        record["same_bits"] = torch.equal(call(), outputs[0])
        record_report(record, report)
        if isinstance(report, PatchReport):
            record["predicted"] = report.guard.prediction
            record["guard"] = str(report.guard)
        record["ms"] = time_calls(call, journal.device, journal.plan.most(5))
    unpatched = record if method == _UNPATCHED else journal.case(case)[_UNPATCHED]
    record["of_unpatched"] = record["error"] / unpatched["error"]
    if record["of_unpatched"] > MOST:
        raise Wrong(f"{record['of_unpatched']:.3g} times the unpatched network's error")


fidelity: Final = Benchmark(
    name="fidelity", about=_ABOUT, columns=_COLUMNS, cases=[*_SETTINGS, "14b", *COGVIDEOXS],
    methods=_METHODS, measure=_measure, default=list(_SETTINGS),
)  # fmt: skip
