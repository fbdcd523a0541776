"""`network` and `length`: one forward of Wan or CogVideoX, and Wan's over the number of tokens.

Short sequences are bound by the CPU: a forward of Wan2.1-1.3B over 780 tokens is ten milliseconds
of kernels. So a row of `length` has the time of forwards queued one after another, the CPU's time
of one with the GPU idle, and the time of the same forward as a CUDA graph, in which no CPU takes
part.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from typing import Final

import torch

from benchmarks import rows, runner, turbo
from benchmarks.attention import REFERENCE_SOURCE
from benchmarks.measure import Call, errors_of, reason_of
from benchmarks.networks import (
    COGVIDEOX,
    WAN,
    compiled,
    compiled_in_graphs,
    in_turn,
    network_of,
    patched_with,
    sage_attention,
    time_variant,
    variants,
)
from benchmarks.runner import PEAK, REL_L2, Column, Enter, Journal, Plan, Record, Variant
from turbo_rcm_patch import PatchReport

#: Relative L2 to the unpatched eager output from which a variant is broken and is not timed.
BROKEN: Final = 0.2

#: compile with sageattention 2.2 on an H200, ms of one forward at 480p and 81 frames (CogVideoX:
#: 49), there with a graph break per attention.
_REFERENCE: Final = {
    "1.3b": 430.0, "14b": 2445.0, "cogvideox-2b": 231.0, "cogvideox-5b": 600.0,
}  # fmt: skip
#: Wanted ratio to it where one is set: with 16-bit linears, and with int8 linears.
_AIMS: Final = {"1.3b": (1.26, 1.48), "14b": (1.14, 1.44)}
_COLUMNS: Final = (
    Column("network", 12), Column("variant", 22), *runner.times(digits=2),
    Column("of eager", 8, runner.over("eager"), ".3f"), PEAK, REL_L2,
)  # fmt: skip


def run(plan: Plan) -> int:
    """Measure and write `network.json` (turbo-1.3b: `network_turbo.json`); 0 if everything of ours
    was right."""
    names = [*WAN, *COGVIDEOX]
    only = runner.chosen("--only", plan.only or ("1.3b",), [*names, turbo.CASE])
    cases = [name for name in only if name != turbo.CASE]
    methods = [variant.name for variant in variants()]
    for own in [turbo.methods()] * (len(cases) < len(only)) + [methods] * bool(cases):
        runner.chosen("--peers", plan.peers, own)  # before one of them is measured for minutes
    code = turbo.run(plan) if len(cases) < len(only) else 0
    if not cases:
        return code
    about = {
        "network": "Wan2.1 with seeded random weights in bf16, batch 1, 480p, 81 frames; "
        "CogVideoX likewise, 480 x 720, 49 frames",
        "error": "to the unpatched eager output, which is exact attention in bf16",
        "groups": "milliseconds in kernels of one forward, grouped by their names",
        "compiled": "every block with fullgraph=True",
        "reference": f"compile + sageattention 2.2, ms on an H200, {REFERENCE_SOURCE}",
    }
    return code | runner.run_cases(
        dataclasses.replace(plan, only=tuple(cases)),
        "network",
        _COLUMNS,
        about,
        {name: name for name in names},
        _network,
        methods=methods,
    )


@torch.no_grad()
def _network(name: str, wanted: list[str], journal: Journal) -> bool:
    plan, device = journal.plan, journal.device
    network, make, about = network_of(name, plan, device)
    calls = [make(plan.seed), make(plan.seed + 1)]
    eager = calls[0]()
    record: Record = {
        "parameters": sum(p.numel() for p in network.parameters()),
        **about,
        "finite": bool(eager.isfinite().all()),
    }
    effort = plan.effort(math.inf, 7, quick=(math.inf, 3), least=1)

    def measure(variant: Variant, one: Record) -> None:
        errors = functools.partial(errors_of, truth=eager)
        time_variant(variant, one, network, calls, errors, journal, effort, wrong=BROKEN)

    some = [variant for variant in variants() if variant.name in wanted]
    good = runner.one_by_one(journal, name, record, some, measure)
    found: dict[str, Record] = record.setdefault("variants", {})
    peak, eager_peak = (runner.number(found, one, "peak_bytes") for one in ("patched", "eager"))
    if peak and eager_peak and peak > eager_peak:
        print(f"{name}: peak memory rose from {eager_peak:.0f} to {peak:.0f} bytes")
        good = False
    record |= _compare(name, found, micro=plan.micro)
    record["equal_afterwards"] = same = torch.equal(calls[0](), eager)
    journal.case(name, record)
    return good and same


def _compare(name: str, found: dict[str, Record], *, micro: bool) -> Record:
    """Our fastest with 16-bit and with int8 linears, against the fastest other and the aims."""
    ours: dict[str, list[float]] = {"16-bit linears": [], "int8 linears": []}
    others: dict[str, float] = {}
    for variant in variants():
        median = runner.number(found, variant.name, "milliseconds", "median")
        if median is None:
            continue
        if not variant.ours:
            others[variant.name] = median
        else:
            ours["int8 linears" if "int8" in variant.name else "16-bit linears"].append(median)
    reference = _REFERENCE[name]
    comparison: Record = {}
    aims: tuple[float | None, ...] = _AIMS.get(name, (None, None))
    for (kind, medians), aim in zip(ours.items(), aims, strict=True):
        if not medians:
            continue
        best = min(medians)
        one: Record = {"milliseconds": best}
        one["over"] = {other: median / best for other, median in others.items()}
        if not micro:
            one["over_reference"] = ratio = reference / best
            text = f"{name}, {kind}: {best:.0f} ms, {ratio:.2f}x compile + sage 2.2"
            text += f" ({REFERENCE_SOURCE})"
            if aim is not None:
                one |= {"aim": aim, "met": ratio >= aim}
                text += f"; aim {aim:.2f}x"
            print(text)
        comparison[kind] = one
    return {"comparison": comparison, "reference_milliseconds": reference}


# --- over the number of tokens -------------------------------------------------------------------

_WAYS: Final[dict[str, Enter]] = {
    "eager": runner.as_written,
    "eager sage": sage_attention,
    "patched": patched_with(),
    "patched exact": patched_with(attention="exact"),
    "patched int8 Linears": patched_with(linear="int8"),
    # These last: they take longest to begin with.
    "compiled": compiled,
    "patched compiled": in_turn(patched_with(), compiled),
    "patched int8 Linears compiled": in_turn(patched_with(linear="int8"), compiled),
    "compiled graphs": compiled_in_graphs,
    "patched compiled graphs": in_turn(patched_with(), compiled_in_graphs),
}
METHODS: Final = {
    name: Variant(name, enter, ours=name.startswith("patched")) for name, enter in _WAYS.items()
}
_LENGTH_COLUMNS: Final = (
    Column("row", 14), Column("method", 30), Column("ms", 9, "milliseconds.median", ".2f"),
    Column("CPU ms", 8, "cpu_milliseconds.median", ".2f"),
    Column("graph ms", 8, "graph_milliseconds.median", ".2f"),
    Column("of eager", 8, runner.over("eager"), ".3f"),
    Column("first s", 8, "first_seconds", ".2f"), Column("in int8", 7, "in_int8", ".2f"), REL_L2,
)  # fmt: skip


def run_length(plan: Plan) -> int:
    """Measure and write `length.json`; 0 if every patched forward was near the eager one."""
    wanted = runner.chosen("--peers", plan.peers, list(METHODS))
    wanted_rows = runner.chosen("--only", plan.only or rows.default(plan), rows.names(plan))
    journal = Journal(
        "length",
        plan,
        _LENGTH_COLUMNS,
        about={
            "network": "bf16, batch 1, no guard, seeded random weights. A number of tokens: "
            "Wan2.1-T2V-1.3B; cogvideox-2b: 480 x 720, 49 frames; WanModel: Wan2.1-T2V-1.3B in "
            "TurboDiffusion's class; tiny, tiny-cogvideox: the shipped models, trained",
            "milliseconds": "of forwards queued one after another, median of several rounds",
            "cpu_milliseconds": "until the call returns, the GPU idle before it; median",
            "graph_milliseconds": "of replays of the forward as one CUDA graph; not of long ones, "
            "whose GPU never waits",
            "first_seconds": "the first forward of this length with this method in this process",
            "in_int8": "share of the self-attentions whose products ran in int8",
            "peak_bytes": "of allocated memory during one forward, weights included",
            "compiled": "every block with fullgraph=True",
            "compiled graphs": 'the whole network with fullgraph=True, mode="reduce-overhead"',
        },
    )
    good = True
    with journal.running(), torch.no_grad():
        known = rows.Rows(plan, journal.device)
        for name in wanted:
            for row in wanted_rows:
                record = journal.cases.get(row, {})
                if "reason" in record:
                    continue  # It was reported.
                try:
                    record |= known.of(row).about
                except Exception as error:  # e.g. no checkout, or a package of its own is missing
                    record |= {"status": "missing", "reason": reason_of(error)}
                    journal.line((row, f"left out: {record['reason']}"))
                    journal.case(row, record)
                    continue
                measure = functools.partial(_measure, known.of(row), journal)
                good &= runner.one_by_one(
                    journal, row, record, [METHODS[name]], measure, "methods"
                )
    return 0 if good else 1


def _measure(row: rows.Row, journal: Journal, variant: Variant, record: Record) -> None:
    """One method in one row."""
    plan, device, call = journal.plan, journal.device, row.call
    eager = row.eager()
    with variant.enter(row.network, plan.compiler) as report:
        begin = time.perf_counter()
        output = call()
        runner.wait(device)
        record["first_seconds"] = time.perf_counter() - begin
        record["error"] = errors_of(output, eager)
        runner.check(record["error"], BROKEN)
        for _ in range(3):  # a graph of ours is captured in the third forward
            call()
        record |= runner.peak_bytes(call, device)
        rounds, queued = _effort(plan, call, device)
        record["milliseconds"] = runner.queued_milliseconds(call, device, rounds, queued)
        record["cpu_milliseconds"] = runner.queued_milliseconds(call, device, max(3, rounds), 0)
        if isinstance(report, PatchReport):
            own = sum(pair.kind == "self" for pair in report.pairs)
            record["last_forward"] = ran = report.last_forward
            record["in_int8"] = ran.get("fused with int8 attention", 0) / own
        if device.type == "cuda" and queued > 1 and not variant.name.endswith("graphs"):
            replay = runner.graph_of([call])
            record["graph_milliseconds"] = runner.queued_milliseconds(
                replay, device, rounds, queued
            )
            del replay


#: Milliseconds that one clock may take, and those of a forward from which on queueing several
#: hides nothing.
_CLOCK: Final = 1000.0
_LONG: Final = 150.0


def _effort(plan: Plan, call: Call, device: torch.device) -> tuple[int, int]:
    """Rounds of a measurement, and forwards queued in each."""
    once = runner.queued_milliseconds(call, device, 1, 1)["median"]
    queued = 1 if once > _LONG else 3
    most = plan.calls or (5 if plan.quick else 9)
    return max(min(3, most), min(most, int(_CLOCK / (queued * once)))), queued
