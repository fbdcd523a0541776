"""`network` and `length`: one forward of Wan or CogVideoX, and Wan's over the number of tokens.

Short sequences are bound by the CPU: a forward of Wan2.1-1.3B over 780 tokens is ten milliseconds
of kernels. So a row of `length` has the time of forwards queued one after another, the CPU's time
of one with the GPU idle, and the time of the same forward as a CUDA graph, in which no CPU takes
part.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import statistics
import time
from collections.abc import Callable
from typing import Any, Final

import torch

from benchmarks import rows, turbo
from benchmarks.attention import REFERENCE_SOURCE
from benchmarks.networks import (
    COGVIDEOX,
    Enter,
    as_written,
    build_cogvideox,
    build_wan,
    cogvideox_call,
    compiled,
    compiled_in_graphs,
    in_turn,
    patched_with,
    sage_attention,
    sizes_of,
    time_variant,
    variants,
    wan_call,
)
from benchmarks.runner import Journal, Plan, Record, chosen, graph_of, peak_bytes, run_cases
from turbo_rcm_patch import PatchReport
from turbo_rcm_patch.bench import Call, errors_of, reason_of

#: Relative L2 to the unpatched eager output from which a variant is broken and is not timed.
BROKEN: Final = 0.2

#: What differs from Wan2.1-T2V-1.3B, the network of `Sizes`.
_WAN: Final[dict[str, dict[str, Any]]] = {
    "1.3b": {},
    "14b": {"num_attention_heads": 40, "ffn_dim": 13824, "num_layers": 40},
}
#: compile with sageattention 2.2 on an H200, ms of one forward at 480p and 81 frames (CogVideoX:
#: 49), there with a graph break per attention.
_REFERENCE: Final = {
    "1.3b": 430.0, "14b": 2445.0, "cogvideox-2b": 231.0, "cogvideox-5b": 600.0,
}  # fmt: skip
#: Wanted ratio to it where one is set: with 16-bit linears, and with int8 linears.
_AIMS: Final = {"1.3b": (1.26, 1.48), "14b": (1.14, 1.44)}
_COLUMNS: Final = (
    ("network", 12), ("variant", 22), ("ms", 9), ("p20", 9), ("p80", 9), ("of eager", 8),
    ("peak GiB", 8), ("relL2", 9),
)  # fmt: skip


def run(plan: Plan) -> int:
    """Measure and write `network.json` (turbo-1.3b: `network_turbo.json`); 0 if everything of ours
    was right."""
    names = [*_WAN, *COGVIDEOX]
    only = chosen("--only", plan.only or ("1.3b",), [*names, turbo.CASE])
    code = turbo.run(plan) if turbo.CASE in only else 0
    only = [name for name in only if name != turbo.CASE]
    if not only:
        return code
    about = {
        "network": "Wan2.1 with seeded random weights in bf16, batch 1, 480p, 81 frames; "
        "CogVideoX likewise, 480 x 720, 49 frames",
        "error": "to the unpatched eager output, which is exact attention in bf16",
        "groups": "milliseconds in kernels of one forward, grouped by their names",
        "compiled": "every block with fullgraph=True",
        "reference": f"compile + sageattention 2.2, ms on an H200, {REFERENCE_SOURCE}",
    }
    methods = [variant.name for variant in variants()]
    return code | run_cases(
        dataclasses.replace(plan, only=tuple(only)),
        "network",
        _COLUMNS,
        about,
        {name: name for name in names},
        _network,
        methods=methods,
    )


@torch.no_grad()
def _network(name: str, wanted: list[str], journal: Journal) -> bool:
    plan, device, sizes = journal.plan, journal.device, sizes_of(journal.plan)
    seeds = (plan.seed, plan.seed + 1)
    network: Any
    if name in COGVIDEOX:
        network = build_cogvideox(name, device, plan.seed, micro=plan.micro)
        config = {key: value for key, value in network.config.items() if key[0] != "_"}
        calls = [cogvideox_call(network, device, seed) for seed in seeds]
        about: Record = {"config": config}
    else:
        config = sizes.network | ({} if plan.micro else _WAN[name])
        network = build_wan(config, device, plan.seed, narrow=name != "1.3b")
        size = sizes.latents, sizes.text_tokens
        calls = [wan_call(network, *size, device, seed) for seed in seeds]
        about = {"config": config, "latents": list(sizes.latents)}
    eager = calls[0]()
    found: dict[str, Record] = {}
    record: Record = {
        "parameters": sum(p.numel() for p in network.parameters()),
        **about,
        "finite": bool(eager.isfinite().all()),
        "variants": found,
    }
    good = True
    for variant in variants():
        if variant.name not in wanted or journal.late(f"{name}, {variant.name}"):
            continue
        found[variant.name] = one = time_variant(
            variant,
            network,
            calls,
            lambda y: errors_of(y, eager),
            BROKEN,
            journal,
            plan.effort(math.inf, 7, quick=(math.inf, 3), least=1),
        )
        good &= one["status"] == "timed" or not variant.ours
        before, own, peak = _median(found, "eager"), _median(found, variant.name), "peak_bytes"
        more = (
            f"{own / before:.3f}" if before and own else "",
            f"{one[peak] / 2**30:.2f}" if peak in one else "",
        )
        journal.show(name, variant.name, one, more, digits=2)
        journal.case(name, record)
    record |= _compare(name, found, micro=plan.micro)
    record["equal_afterwards"] = same = torch.equal(calls[0](), eager)
    journal.case(name, record)
    return good and same


def _median(found: dict[str, Record], name: str, clock: str = "milliseconds") -> float | None:
    timing = found.get(name, {}).get(clock)
    return None if timing is None else float(timing["median"])


def _compare(name: str, found: dict[str, Record], *, micro: bool) -> Record:
    """Our fastest with 16-bit and with int8 linears, against the fastest other and the aims."""
    ours: dict[str, list[float]] = {"16-bit linears": [], "int8 linears": []}
    others: dict[str, float] = {}
    for variant in variants():
        median = _median(found, variant.name)
        if median is None:
            continue
        if not variant.ours:
            others[variant.name] = median
        else:
            ours["int8 linears" if "int8" in variant.name else "16-bit linears"].append(median)
    reference = _REFERENCE[name]
    comparison: Record = {}
    aims: tuple[float | None, ...] = _AIMS.get(name, (None, None))
    for (kind, times), aim in zip(ours.items(), aims, strict=True):
        if not times:
            continue
        best = min(times)
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

METHODS: Final[dict[str, Enter]] = {
    "eager": as_written,
    "eager sage": sage_attention,
    "patched": patched_with(),
    "patched exact": patched_with(attention="exact"),
    "patched int8 Linears": patched_with(linear="int8"),
    "patched graphs": patched_with(cuda_graphs=True),
    "patched int8 Linears graphs": patched_with(linear="int8", cuda_graphs=True),
    # These last: they take longest to begin with.
    "compiled": compiled,
    "patched compiled": in_turn(patched_with(), compiled),
    "patched int8 Linears compiled": in_turn(patched_with(linear="int8"), compiled),
    "compiled graphs": compiled_in_graphs,
    "patched compiled graphs": in_turn(patched_with(), compiled_in_graphs),
}
_LENGTH_COLUMNS: Final = (
    ("row", 14), ("method", 30), ("ms", 9), ("CPU ms", 8), ("graph ms", 8), ("of eager", 8),
    ("first s", 8), ("in int8", 7), ("relL2", 9),
)  # fmt: skip


def run_length(plan: Plan) -> int:
    """Measure and write `length.json`; 0 if every patched forward was near the eager one."""
    wanted = chosen("--peers", plan.peers, list(METHODS))
    wanted_rows = chosen("--only", plan.only or rows.default(plan), rows.names(plan))
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
            "graphs": "patched with cuda_graphs=True, which captures and replays by itself",
            "peak_bytes": "of allocated memory during one forward, weights included",
            "compiled": "every block with fullgraph=True",
            "compiled graphs": 'the whole network with fullgraph=True, mode="reduce-overhead"',
        },
    )
    good = True
    with journal.running(), torch.no_grad():
        found, eager = rows.Rows(plan, journal.device), {}
        for name in wanted:
            for row in wanted_rows:
                if journal.late(f"{row}, {name}"):
                    continue
                case = journal.cases.get(row, {"methods": {}})
                if "reason" in case:
                    continue  # It was reported.
                try:
                    network, call, about = found.of(row)
                except Exception as error:  # e.g. no checkout, or a package of its own is missing
                    case |= {"status": "missing", "reason": reason_of(error)}
                    journal.line((row, f"left out: {case['reason']}"))
                    journal.case(row, case)
                    continue
                if row not in eager:
                    eager[row] = call()
                record = _measure(network, name, call, eager[row], journal)
                case |= about
                case["methods"][name] = record
                good &= record["status"] == "timed" or not name.startswith("patched")
                _show(row, name, case["methods"], journal)
                journal.case(row, case)
    return 0 if good else 1


def _measure(network: Any, name: str, call: Call, eager: torch.Tensor, journal: Journal) -> Record:
    """One method at one length."""
    plan, device = journal.plan, journal.device
    record: Record = {}
    try:
        with METHODS[name](network, plan.compiler) as report:
            begin = time.perf_counter()
            output = call()
            _wait(device)
            record["first_seconds"] = time.perf_counter() - begin
            record["error"] = errors_of(output, eager)
            if not record["error"]["relative_l2"] < BROKEN:
                return record | {"status": "wrong", "reason": "too far from the eager forward"}
            for _ in range(3):  # a graph of ours is captured in the third forward
                call()
            record |= peak_bytes(call, device)
            rounds, queued = _effort(plan, call, device)
            record["milliseconds"] = _milliseconds(call, device, rounds, queued)
            record["cpu_milliseconds"] = _milliseconds(call, device, max(3, rounds), 0)
            if isinstance(report, PatchReport):
                own = sum(pair.kind == "self" for pair in report.pairs)
                record["last_forward"] = ran = report.last_forward
                record["in_int8"] = ran.get("fused with int8 attention", 0) / own
            if device.type == "cuda" and queued > 1 and not name.endswith("graphs"):
                replay = graph_of([call])
                record["graph_milliseconds"] = _milliseconds(replay, device, rounds, queued)
                del replay
            record["status"] = "timed"
    except Exception as error:  # one that cannot run here says why, and the others go on
        record |= {"status": "missing", "reason": reason_of(error)}
    gc.collect()
    return record


#: Seconds that one clock may take, and milliseconds of a forward from which queueing more than one
#: hides nothing.
_CLOCK_SECONDS: Final = 1.0
_LONG: Final = 150.0


def _effort(plan: Plan, call: Call, device: torch.device) -> tuple[int, int]:
    """Rounds of a measurement, and forwards queued in each."""
    once = _milliseconds(call, device, 1, 1)["median"]
    queued = 1 if once > _LONG else 3
    most = plan.calls or (5 if plan.quick else 9)
    return max(min(3, most), min(most, int(1e3 * _CLOCK_SECONDS / (queued * once)))), queued


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _milliseconds(
    call: Callable[[], object], device: torch.device, rounds: int, queued: int
) -> dict[str, float]:
    """Of one of several queued calls; with 0, until one returns when the GPU has nothing to do."""
    times = []
    for _ in range(rounds):
        _wait(device)
        begin = time.perf_counter()
        for _ in range(max(1, queued)):
            call()
        if queued:
            _wait(device)
        times.append((time.perf_counter() - begin) / max(1, queued) * 1e3)
    _wait(device)
    return {"median": statistics.median(times), "least": min(times), "most": max(times)}


def _show(tokens: str, name: str, methods: dict[str, Record], journal: Journal) -> None:
    record = methods[name]
    if record["status"] != "timed":
        journal.line((tokens, name, record["reason"]))
        return
    own, eager = _median(methods, name), _median(methods, "eager")
    numbers = (
        (own, 2),
        (_median(methods, name, "cpu_milliseconds"), 2),
        (_median(methods, name, "graph_milliseconds"), 2),
        (own / eager if own and eager else None, 3),
        (record["first_seconds"], 2),
        (record.get("in_int8"), 2),
        (record["error"]["relative_l2"], 5),
    )
    cells = ("" if value is None else f"{value:.{digits}f}" for value, digits in numbers)
    journal.line((tokens, name, *cells))
