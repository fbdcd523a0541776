"""`block`: attention + projection + rCM skip as the write-ups have it, and one Wan block."""

from __future__ import annotations

import math
from typing import Final

import torch

from benchmarks.cases import block_tokens
from benchmarks.clock import input_sets
from benchmarks.contest import Effort, Entrant, admit, time_entrants
from benchmarks.journal import Journal, Plan, chosen
from benchmarks.pairs import (
    FORMS,
    OURS,
    SIGMA_DATA,
    inputs_of,
    pair_methods,
    truth_of,
)
from benchmarks.setup import Shape, errors_of
from benchmarks.wan_block import measure_wan_block

__all__ = ["run"]

#: Relative L2 to fp64 of c_skip * x + c_out * branch from which an output is wrong.
WRONG: Final = 0.1
ROWS: Final = 64
#: (name on the command line, in words, whether the linear of q, k, v is part of it)
SERIES: Final = (
    ("given", "q, k, v given", False),
    ("linear", "with the linear of q, k, v", True),
)
_COLUMNS: Final = (
    ("case", 18), ("method", 20), ("ms", 9), ("p20", 9), ("p80", 9), ("speed-up", 8),
    ("relL2", 9),
)  # fmt: skip
#: What is compared: torch's forms and ours.
_METHODS: Final = tuple(dict.fromkeys((*FORMS, *OURS)))


def run(plan: Plan) -> int:
    """Measure and write `block.json`; 0 if everything of ours was right."""
    only = chosen("--only", plan.only, [*(name for name, _, _ in SERIES), "wan"])
    forms = chosen("--peers", plan.peers, _METHODS)
    (batch, channels, heads), tokens = block_tokens(micro=plan.micro)
    journal = Journal(
        "block",
        plan,
        _COLUMNS,
        about={
            "operation": "c_skip(t) x + c_out(t) (softmax(q k^T / sqrt(D)) v W^T + b)",
            "coefficients": f"EDM with sigma_data {SIGMA_DATA}, t a sample; bf16 in and out",
            "milliseconds": "inside a CUDA graph over several input sets (on a CPU: one by one)",
            "baseline": "two-pass torch with the exact backend that is fastest at this size",
            "speedup": "baseline / method; inf, nan: not measured",
            "truth": f"fp64, {ROWS} rows a sample",
            "wan": "blocks[0] of a one-layer Wan2.1-1.3B at 480p and 81 frames; calls one by one",
        },
    )
    if plan.quick and not plan.micro:
        tokens = tokens[::2]
    good = True
    with journal.running():
        for series, words, linear in SERIES:
            if series not in only:
                continue
            for n in tokens:
                shape = Shape(batch, n, n, heads, channels // heads)
                if not journal.late(f"{words}, {n} tokens"):
                    good &= _case(shape, series, linear, forms, journal)
            _geometric_mean(series, words, journal)
        if "wan" in only and not journal.late("Wan block"):
            good &= measure_wan_block(journal, _effort(plan))
    return 0 if good else 1


def _effort(plan: Plan) -> Effort:
    if plan.micro:
        return Effort(budget=5.0, least=2, most=plan.calls or 2)
    most = plan.calls or (20 if plan.quick else 60)
    return Effort(budget=100.0 if plan.quick else 400.0, least=min(5, most), most=most)


def _case(shape: Shape, series: str, linear: bool, forms: list[str], journal: Journal) -> bool:
    plan, device = journal.plan, journal.device
    bytes_a_set = 4 * 2 * shape.batch * shape.q_tokens * shape.channels
    sets = [
        inputs_of(shape, device, plan.seed + i, linear=linear)
        for i in range(min(6, input_sets(bytes_a_set)))
    ]
    rows = torch.linspace(0, shape.q_tokens - 1, min(ROWS, shape.q_tokens), device=device).long()
    truth = truth_of(sets[0], shape, rows, linear=linear)
    compiler = "eager" if plan.micro else "inductor"
    torch._dynamo.reset()  # one compilation a size: dynamic shapes would be another kernel
    with torch.no_grad():
        entrants = [
            admit(method, sets, lambda y: errors_of(y[:, rows], truth), WRONG)
            for method in pair_methods(shape.heads, linear=linear, compiler=compiler, forms=forms)
        ]
        time_entrants(entrants, journal, _effort(plan), str(shape), eager=False, graph=True)
    name = f"{series}-N{shape.q_tokens}"
    record: dict[str, object] = {
        "series": series,
        "shape": {"B": shape.batch, "H": shape.heads, "N": shape.q_tokens, "D": shape.head_dim},
        "tokens": shape.q_tokens,
        "methods": {entrant.method.name: entrant.record for entrant in entrants},
    }
    two_pass = {
        entrant.method.name: median
        for entrant in entrants
        if entrant.method.name.startswith("two-pass") and (median := _median(entrant))
    }
    baseline = min(two_pass.values(), default=math.nan)
    if two_pass:
        record["baseline"] = min(two_pass, key=lambda one: two_pass[one])
        record["speedup"] = {
            entrant.method.name: baseline / median
            for entrant in entrants
            if entrant.method.name not in two_pass and (median := _median(entrant))
        }
    for entrant in entrants:
        _show(name, entrant, baseline, journal)
    journal.case(name, record)
    return all(entrant.ready for entrant in entrants if entrant.method.name in OURS)


def _median(entrant: Entrant) -> float | None:
    return entrant.median("graph_milliseconds")


def _show(case: str, entrant: Entrant, baseline: float, journal: Journal) -> None:
    timing, error = entrant.record.get("graph_milliseconds"), entrant.record.get("error")
    if not isinstance(timing, dict) or not isinstance(error, dict):
        reason = entrant.record.get("graph_milliseconds_reason", "not timed")
        journal.show((case, entrant.method.name, str(entrant.record.get("reason", reason))))
        return
    journal.show(
        (
            case,
            entrant.method.name,
            *(f"{timing[name]:.4f}" for name in ("median", "p20", "p80")),
            f"{baseline / timing['median']:.2f}",
            f"{error['relative_l2']:.5f}",
        )
    )


def _geometric_mean(series: str, words: str, journal: Journal) -> None:
    """Over the sizes that were measured: each of ours, and the better one of each size."""
    found: dict[str, list[float]] = {}
    for record in journal.cases.values():
        speedup = record.get("speedup")
        if record.get("series") != series or not isinstance(speedup, dict):
            continue
        for name, value in speedup.items():
            found.setdefault(name, []).append(value)
        ours = [value for name, value in speedup.items() if name in OURS]
        if ours:
            found.setdefault("better of ours", []).append(max(ours))
    summary = {
        name: {
            "geometric_mean": math.exp(sum(map(math.log, values)) / len(values)),
            "least": min(values),
            "sizes": len(values),
        }
        for name, values in found.items()
    }
    journal.summary[series] = summary
    for name, one in summary.items():
        print(
            f"{words}: {name} is {one['geometric_mean']:.2f}x the two-pass baseline in the "
            f"geometric mean of {one['sizes']} sizes, {one['least']:.2f}x at least"
        )
