"""`attention`: every attention a user could pick, against ours, checked and timed in one run."""

from __future__ import annotations

import time
from typing import Final

import torch

from benchmarks.accuracy import attention_fp64, random_normal
from benchmarks.cases import (
    AIMS,
    REFERENCE,
    REFERENCE_SOURCE,
    AttentionCase,
    attention_cases,
)
from benchmarks.clock import Call, input_sets
from benchmarks.contest import Effort, Entrant, admit, time_entrants
from benchmarks.journal import Journal, Plan, chosen
from benchmarks.machine import ceilings, exponential_ceiling, measured_ceilings
from benchmarks.peers import OURS, attention_methods
from benchmarks.setup import errors_of, time_call
from turbo_rcm_patch.errors import Fp8UnsupportedError

__all__ = ["run"]

#: Relative L2 to fp64 from which an output is wrong and not inaccurate: int8 with fp8 PV has 0.05.
WRONG: Final = 0.1
#: Rows of the output that are compared with fp64.
ROWS: Final = 256
_COLUMNS: Final = (
    ("case", 16), ("method", 16), ("ms", 9), ("p20", 9), ("p80", 9), ("TOPS", 7), ("kernel", 7),
    ("graph", 7), ("relL1", 8), ("relL2", 8), ("cosine", 9),
)  # fmt: skip


def run(plan: Plan) -> int:
    """Measure and write `attention.json`; 0 if everything of ours was right."""
    cases = attention_cases(micro=plan.micro)
    if plan.only:
        wanted = chosen("--only", plan.only, [case.name for case in cases])
    else:
        wanted = [case.name for case in cases if case.quick or not plan.quick]
    names = [method.name for method in attention_methods(1)]
    peers = chosen("--peers", plan.peers, names)
    journal = Journal(
        "attention",
        plan,
        _COLUMNS,
        about={
            "inputs": "q, k, v [B, N, H*D], standard normal, bf16; several sets in turn",
            "output": "bf16 [B, N, H*D]",
            "TOPS": "4 N^2 D H B / median time",
            "milliseconds": "calls one by one, everything that the method does included",
            "graph_milliseconds": "the same inside a CUDA graph",
            "kernel_milliseconds": "the attention kernel alone, by torch.profiler",
            "share_of_data_sheet": "of the peak of its two products; the kernel alone if known",
            "truth": f"softmax(q k^T / sqrt(D)) v in fp64, {ROWS} rows",
            "wrong": f"relative L2 of {WRONG} or more, or not finite",
            "reference": f"sageattention 2.2, {REFERENCE_SOURCE}",
        },
    )
    good = True
    with journal.running():
        if journal.device.type == "cuda":
            journal.header(ceilings=_ceilings(journal.device))
        for case in cases:
            if case.name in wanted and not journal.late(case.name):
                good &= _case(case, peers, journal)
                if journal.device.type == "cuda":
                    torch.cuda.empty_cache()
    return 0 if good else 1


def _ceilings(device: torch.device) -> dict[str, object]:
    def milliseconds(call: Call) -> float:
        return time_call(call, device, 10).median

    measured = measured_ceilings(device, milliseconds)
    torch.cuda.empty_cache()
    return {"data sheet": ceilings(device), "plain calls on this card": measured}


def _effort(plan: Plan) -> Effort:
    if plan.micro:
        return Effort(budget=5.0, least=2, most=plan.calls or 2)
    least, most = (4, 30) if plan.quick else (4, 100)
    most = plan.calls or most
    return Effort(budget=100.0 if plan.quick else 250.0, least=min(least, most), most=most)


def _case(case: AttentionCase, peers: list[str], journal: Journal) -> bool:
    """One case; whether ours were right."""
    plan, device, shape = journal.plan, journal.device, case.shape
    bytes_a_set = 3 * 2 * shape.batch * shape.q_tokens * shape.channels
    sets = [random_normal(shape, device, plan.seed + i) for i in range(input_sets(bytes_a_set))]
    rows = torch.linspace(0, shape.q_tokens - 1, min(ROWS, shape.q_tokens), device=device).long()
    q, k, v = sets[0]
    truth = attention_fp64(q[:, rows], k, v, shape.heads)

    def errors(output: torch.Tensor) -> dict[str, float]:
        return errors_of(output[:, rows], truth)

    begin = time.monotonic()
    entrants = [
        admit(method, sets, errors, WRONG)
        for method in attention_methods(shape.heads)
        if method.name in peers and (case.peers or method.name in (*OURS, "torch cuDNN"))
    ]
    time_entrants(
        entrants,
        journal,
        _effort(plan),
        case.name,
        graph=case.graph,
        kernels=case.peers and not plan.quick,
    )
    record: dict[str, object] = {
        "shape": {"B": shape.batch, "H": shape.heads, "N": shape.q_tokens, "D": shape.head_dim},
        "operations": case.operations,
        "intensity": case.intensity,
        "input_sets": len(sets),
        "methods": {entrant.method.name: entrant.record for entrant in entrants},
    }
    for entrant in entrants:
        for clock, name in (
            ("milliseconds", "tops"),
            ("graph_milliseconds", "graph_tops"),
        ):
            median = entrant.median(clock)
            if median:
                entrant.record[name] = case.operations / median / 1e9
        alone = entrant.record.get("kernel_milliseconds")
        if isinstance(alone, float) and alone > 0:
            entrant.record["kernel_tops"] = case.operations / alone / 1e9
        tops = entrant.record.get("kernel_tops", entrant.record.get("tops"))
        limit = _limit(entrant.method.name, device)
        if limit is not None and isinstance(tops, float):
            entrant.record["share_of_data_sheet"] = tops / limit
        _show(case, entrant, journal)
    record["observed"] = observed = journal.watch.since(begin)
    clock_mhz = observed["sm_clock_mhz"]
    if isinstance(clock_mhz, dict):
        record["exponential_ceiling_tops"] = exponential_ceiling(
            device, shape.head_dim, clock_mhz["median"]
        )
    record |= _compare(case, entrants)
    journal.case(case.name, record)
    # A card without fp8 units is no failure of ours.
    excused = Fp8UnsupportedError.__name__
    return all(
        entrant.ready or str(entrant.record["reason"]).startswith(excused)
        for entrant in entrants
        if entrant.method.name in OURS
    )


def _limit(method: str, device: torch.device) -> float | None:
    """1e12 operations a second of a card that does nothing but this method's two products, by its
    data sheet."""
    sheet = ceilings(device)
    if not sheet:
        return None
    eight, sixteen = sheet["int8 and fp8"], sheet["bf16"]
    if method in ("ours fp8", "sageattention 2"):
        return eight
    if method in ("ours bf16", "sageattention 1"):
        return 2 / (1 / eight + 1 / sixteen)
    return sixteen


def _number(record: dict[str, object], name: str, digits: int) -> str:
    value = record.get(name)
    return f"{value:.{digits}f}" if isinstance(value, float) else ""


def _show(case: AttentionCase, entrant: Entrant, journal: Journal) -> None:
    record, timing, error = entrant.record, entrant.record.get("milliseconds"), None
    if not isinstance(timing, dict):
        journal.show((case.name, entrant.method.name, str(record.get("reason", "not timed"))))
        return
    error = record["error"]
    assert isinstance(error, dict), "what was timed was checked"
    journal.show(
        (
            case.name,
            entrant.method.name,
            *(f"{timing[name]:.4f}" for name in ("median", "p20", "p80")),
            _number(record, "tops", 1),
            _number(record, "kernel_tops", 1),
            _number(record, "graph_tops", 1),
            f"{error['relative_l1']:.5f}",
            f"{error['relative_l2']:.5f}",
            f"{error['cosine']:.6f}",
        )
    )


def _compare(case: AttentionCase, entrants: list[Entrant]) -> dict[str, object]:
    """Our best against each peer, the published figure and the aim. One clock for both sides: the
    better of one by one and graph for everybody."""

    def best(entrant: Entrant) -> float | None:
        found = [entrant.median(clock) for clock in ("milliseconds", "graph_milliseconds")]
        return min((one for one in found if one), default=None)

    times = {entrant.method.name: best(entrant) for entrant in entrants}
    ours = min((t for name, t in times.items() if name in OURS and t), default=None)
    if ours is None:
        return {}
    tops = case.operations / ours / 1e9
    ratios = {name: t / ours for name, t in times.items() if t and name not in OURS}
    found: dict[str, object] = {"best_tops": tops, "best_over_peer": ratios}
    reference = REFERENCE.get(case.name)
    if reference is not None:
        found["reference"] = {"sageattention 2.2": reference, "source": REFERENCE_SOURCE}
        found["best_over_reference"] = tops / reference["all_in"]
    if case.name in AIMS:
        peer, ratio = AIMS[case.name]
        reached = ratios.get(peer)
        source = "this run"
        if reached is None and peer == "sageattention 2" and reference is not None:
            reached, source = tops / reference["all_in"], REFERENCE_SOURCE
        if reached is not None:
            found["aim"] = {
                "peer": peer,
                "ratio": ratio,
                "reached": reached,
                "met": reached >= ratio,
                "peer_from": source,
            }
            print(
                f"{case.name}: best of ours {tops:.0f} TOPS, {reached:.2f}x {peer} ({source}); "
                f"aim {ratio:.2f}x"
            )
    return found
