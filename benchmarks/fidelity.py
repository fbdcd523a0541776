"""`fidelity`: how far one forward is from the same network in fp32, in units of the unpatched one.

Truth is the network with its bf16 weights and inputs upcast to fp32, without TF32, with exact
attention. Wan2.1-1.3B has seeded random weights at four settings: gates as drawn or +0.3, so that
attention reaches the output, and the query norm times 1 or 8, so that attention is peaked. Each of
our ways runs with the residual stream in the model's dtype and in fp32; beside its error stands
the one of exact attention with the same residual, so that a better sum hides no worse attention.
"""

from __future__ import annotations

import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch

from benchmarks import runner
from benchmarks.measure import Call, errors_of, time_call
from benchmarks.networks import (
    compiled,
    network_of,
    patched_with,
    sage_attention,
    setting,
    sizes_of,
)
from benchmarks.runner import Column, Journal, Plan, Record, Variant, Wrong
from turbo_rcm_patch import PatchReport
from turbo_rcm_patch.video.measures import highest_precision, upcast
from turbo_rcm_patch.video.verdict import NETWORK_LIMIT

#: Further than this from the truth is broken, not inexact.
BROKEN: Final = 0.5
#: (timestep, what is added to the seed) of the inputs, in their order.
_INPUTS: Final = (
    *((988.0, 0), (988.0, 1), (988.0, 2), (988.0, 3), (700.0, 0), (300.0, 0)),
    *((time, seed) for time in (700.0, 300.0) for seed in (1, 2, 3)),
)
_UNPATCHED: Final = "unpatched"
_RESIDUALS: Final = ("model", "fp32")
#: In front of the names of what runs with the guard.
_AUTO: Final = "precision "
_COLUMNS: Final = (
    Column("case", 22), Column("method", 40), Column("error", 8, "error", ".5f"),
    Column("of unpatched", 12, "of_unpatched", ".3f"), Column("of exact", 9, "of_exact", ".3f"),
    Column("predicted", 9, "predicted", ".3f"), Column("exact heads", 11, "heads_exact", ".0f"),
    Column("given back", 10, "guard.given_back", ".0f"),
    Column("ms", 8, "milliseconds.median", ".1f"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """A network and how its weights are changed.

    Attributes:
        name: As in the table.
        network: "1.3b", "14b" or "cogvideox-2b".
        live: Whether something is added to the gates.
        sharp: Whether the query norm is multiplied.
    """

    name: str
    network: str = "1.3b"
    live: bool = False
    sharp: bool = False


_SETTINGS: Final = {
    case.name: case
    for case in (
        Case("drawn-x1"),
        Case("drawn-x8", sharp=True),
        Case("live-x1", live=True),
        Case("live-x8", live=True, sharp=True),
    )
}
CASES: Final = {
    **_SETTINGS,
    "14b": Case("14b", "14b"),
    "cogvideox-2b": Case("cogvideox-2b", "cogvideox-2b"),
}


def methods() -> list[Variant]:
    """Every way; the first is what the others are compared with."""
    found = [
        Variant(_UNPATCHED),
        Variant("compiled", compiled),
        Variant("sage", sage_attention),
    ]
    ways: dict[str, dict[str, Any]] = {
        "exact": {"attention": "exact"},
        "int8 with bf16 p and v": {"pv": "bf16"},
        "int8": {},
        "int8 Linears": {"linear": "int8"},
    }
    for residual in _RESIDUALS:
        for name, options in ways.items():
            enter = patched_with(residual=residual, **options)
            found.append(Variant(f"{name} / residual {residual}", enter, ours=True))
    guarded: dict[str, dict[str, Any]] = {
        "fixed": {"fidelity": None},
        "auto without a target": {"fidelity": 1e6},
        "auto 1.00": {},
        "auto 1.00 with int8 Linears": {"linear": "int8"},
        "auto 1.25 with int8 Linears": {"fidelity": 1.25, "linear": "int8"},
    }
    for name, options in guarded.items():
        enter = patched_with(**{"guard": True, "precision": "auto"} | options)
        found.append(Variant(f"{_AUTO}{name}", enter, ours=True))
    return found


def run(plan: Plan) -> int:
    """Measure and write `fidelity.json`; 0 if nothing of ours was broken."""
    about = {
        "truth": "the same network, bf16 weights and inputs upcast to fp32, no TF32, exact "
        "attention",
        "error": "relative L2 of the output to the truth, mean over the inputs",
        "of_unpatched": "error over that of the unpatched network",
        "of_exact": "error over that of exact attention, patched, with the same residual",
        "wrong": f"ours at more than {NETWORK_LIMIT} times the unpatched network's error",
        "live": "0.3 added to both gate rows of every block",
        "x8": "weights of the query norms times 8",
    }
    return runner.run_cases(
        plan,
        "fidelity",
        _COLUMNS,
        about,
        CASES,
        _measure,
        methods=[method.name for method in methods()],
        default=list(_SETTINGS),
    )


@torch.no_grad()
def _measure(case: Case, wanted: list[str], journal: Journal) -> bool:
    plan = journal.plan
    latents = sizes_of(plan).truth_latents if plan.quick else None
    network, make, about = network_of(case.network, plan, journal.device, latents)
    changed = case.live or case.sharp
    with setting(network, live=case.live, sharp=case.sharp) if changed else nullcontext():
        inputs = _INPUTS[: plan.inputs]
        some = [(plan.seed + add, time) for time, add in inputs]
        calls = [make(seed, timestep=time) for seed, time in some]
        with highest_precision(), upcast(network):
            truths = [make(seed, timestep=time, wide=True)() for seed, time in some]
        found: dict[str, Record] = {}
        record: Record = {
            **asdict(case),
            "inputs": list(inputs),
            "methods": found,
            "tokens": about.get("tokens"),
        }

        def measure(method: Variant, one: Record) -> None:
            with method.enter(network, plan.compiler) as report:
                patched = report if isinstance(report, PatchReport) else None
                if patched is not None and patched.config.guard:
                    # The guard compares, compares what it changed, and is done.
                    one["guarded_seconds"] = [_seconds(calls[0], journal) for _ in range(3)]
                errors = one["errors"] = [
                    errors_of(call(), truth)["relative_l2"]
                    for call, truth in zip(calls, truths, strict=True)
                ]
                one["error"] = sum(errors) / len(errors)
                _compare(found, method.name)
                far = one.get("of_unpatched", 0.0) if method.ours else 0.0
                if not (one["error"] < BROKEN and far <= NETWORK_LIMIT):
                    raise Wrong(f"relL2 {one['error']:.3g}, {far:.3g} times the unpatched one's")
                most = plan.effort(0.0, 5, quick=(0.0, 3)).most
                one["milliseconds"] = asdict(time_call(calls[0], journal.device, most, warmup=1))
                if patched is not None and patched.config.guard:
                    one |= _chosen(patched)

        ways = [way for way in methods() if way.name == _UNPATCHED or way.name in wanted]
        return runner.one_by_one(journal, case.name, record, ways, measure, "methods")


def _seconds(call: Call, journal: Journal) -> float:
    """How long one call takes, alone."""
    runner.wait(journal.device)
    begin = time.perf_counter()
    call()
    runner.wait(journal.device)
    return time.perf_counter() - begin


def _chosen(report: PatchReport) -> Record:
    """What the guard saw and chose."""
    guard, records = report.guard, list(report.guard)
    worst = max(records, key=lambda record: record.error)
    back = sum(record.verdict == "given back" for record in records)
    return {
        "predicted": guard.fidelity,
        "exact_heads": report.exact_heads,
        "heads_exact": sum(map(len, report.exact_heads.values())),
        "int8_linears": sum(bool(pair.int8_linears) for pair in report.pairs),
        "verdicts": dict(Counter(record.verdict for record in records)),
        "largest_gain": max(record.gain for record in records),
        "guard": {
            "pairs": len(records),
            "given_back": back,
            "worst_pair": worst.path,
            "worst_error": worst.error,
            "budget": worst.budget,
        },
    }


def _compare(found: dict[str, Record], name: str) -> None:
    """Put a method's error beside the unpatched one's and the exact one's."""
    one, residual = found[name], "fp32" if name.startswith(_AUTO) else name.rpartition(" ")[2]
    others = {"of_unpatched": _UNPATCHED, "of_exact": f"exact / residual {residual}"}
    for key, other in others.items():
        if "error" in found.get(other, {}):
            one[key] = one["error"] / found[other]["error"]
