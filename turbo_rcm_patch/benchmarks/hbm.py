"""`hbm`: memory traffic of attention + projection + skip by hardware counters, beside the count on
paper."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Final

import torch

from turbo_rcm_patch import ops
from turbo_rcm_patch.benchmarks.cases import name_of, traffic_cases
from turbo_rcm_patch.benchmarks.clock import Call, input_sets
from turbo_rcm_patch.benchmarks.contest import Entrant, admit
from turbo_rcm_patch.benchmarks.counters import METRICS, MODES, find_ncu, profile
from turbo_rcm_patch.benchmarks.journal import Journal, Plan, chosen
from turbo_rcm_patch.benchmarks.pairs import FORMS, inputs_of, pair_methods, truth_of
from turbo_rcm_patch.benchmarks.setup import Shape, errors_of
from turbo_rcm_patch.benchmarks.traffic import paper_bytes, tensor_bytes, write_ups_share
from turbo_rcm_patch.errors import ConfigError, MissingPackageError

__all__ = ["inside", "run"]

WRONG: Final = 0.1
ROWS: Final = 32
#: The exact backend of the two-pass form here; any of them moves the same tensors.
_BASELINE: Final = "two-pass, flash"
_COLUMNS: Final = (
    ("case", 18), ("form", 12), ("paper MB", 10), ("measured MB", 11), ("read MB", 10),
    ("write MB", 10), ("of two-pass", 11),
)  # fmt: skip


def run(plan: Plan) -> int:
    """Count and write `hbm.json`; 0 if the counters could be read for everything asked for."""
    shapes = {name_of(shape): shape for shape in traffic_cases(micro=plan.micro)}
    only = chosen("--only", plan.only, list(shapes))
    if plan.quick and not plan.only:
        only = only[::2]
    forms = chosen("--peers", plan.peers, FORMS)
    journal = Journal(
        "hbm",
        plan,
        _COLUMNS,
        about={
            "operation": "c_skip(t) x + c_out(t) (softmax(q k^T / sqrt(D)) v W^T + b), q, k, v "
            "given, bf16",
            "measured": f"{' + '.join(METRICS)} of Nsight Compute over several input sets in "
            "turn, divided by their number; clocks and caches left alone",
            "mode": "range: all kernels of all sets are one workload; kernel: a sum of kernels",
            "paper": "every operand and result of every kernel once, prologue included",
            "the write-ups' count": write_ups_share(),
        },
    )
    good = True
    with journal.running():
        ncu = _missing(journal)
        modes = list(MODES)
        for name in only:
            record: dict[str, object] = {"tensor_bytes": tensor_bytes(shapes[name])}
            found: dict[str, dict[str, object]] = {}
            record["forms"] = found
            for form in forms:
                found[form] = _paper(shapes[name], form, journal.device)
                if ncu:
                    found[form]["not_measured"] = ncu
                elif not journal.late(f"{name}, {form}"):
                    found[form] |= _measured(name, form, modes, journal)
                good &= "measured" in found[form]
                _show(name, form, found, journal)
                journal.case(name, record)
    return 0 if good or journal.plan.micro else 1


def _missing(journal: Journal) -> str:
    """Why nothing can be measured here, or ""."""
    if journal.device.type != "cuda":
        return "there are no memory counters for this device"
    try:
        find_ncu()
    except MissingPackageError as error:
        print(f"not measured: {error}")
        return str(error)
    return ""


def _paper(shape: Shape, form: str, device: torch.device) -> dict[str, object]:
    pv = ops.resolve_pv("auto", device, shape.kv_tokens)
    parts = paper_bytes(shape, form, pv)
    return {"paper_bytes": sum(parts.values()), "paper": parts, "pv": pv}


def _measured(name: str, form: str, modes: list[str], journal: Journal) -> dict[str, object]:
    """What the first mode that works counts, and why others did not; those are not tried
    again."""
    plan = journal.plan
    # The child is this module again, so that nothing else happens between start and stop.
    command = [
        *(sys.executable, "-m", "turbo_rcm_patch.benchmarks", "hbm"),
        *("--inside", name, form, "--device", plan.device, "--seed", str(plan.seed)),
        *(("--micro",) if plan.micro else ()),
    ]
    failed: dict[str, str] = {}
    for mode in tuple(modes):
        try:
            counted = profile(command, mode)
        except ConfigError as error:
            failed[mode] = str(error)
            continue
        shape = next(s for s in traffic_cases(micro=plan.micro) if name_of(s) == name)
        sets = _sets(shape)
        read, write = (counted[metric] / sets for metric in METRICS)
        measured: dict[str, object] = {
            "bytes": read + write,
            "read_bytes": read,
            "write_bytes": write,
            "mode": mode,
            "workloads": int(counted["workloads"]),
            "sets": sets,
        }
        modes[:] = modes[modes.index(mode) :]
        return {"measured": measured} | ({"modes_that_failed": failed} if failed else {})
    return {"not_measured": "no mode of ncu worked", "modes_that_failed": failed}


def _show(name: str, form: str, found: dict[str, dict[str, object]], journal: Journal) -> None:
    def megabytes(record: object, key: str) -> str:
        value = record.get(key) if isinstance(record, dict) else None
        return f"{value / 1e6:.1f}" if isinstance(value, (int, float)) else "?"

    measured = found[form].get("measured")
    paper, before = (found.get(one, {}) for one in (form, "two-pass"))
    share = ""
    total = before.get("measured")
    if isinstance(measured, dict) and isinstance(total, dict):
        share = f"{measured['bytes'] / total['bytes']:.3f}"
    elif "paper_bytes" in before:
        ratio = float(str(paper["paper_bytes"])) / float(str(before["paper_bytes"]))
        share = f"{ratio:.3f} on paper"
    journal.show(
        (
            name,
            form,
            megabytes(paper, "paper_bytes"),
            *(megabytes(measured, key) for key in ("bytes", "read_bytes", "write_bytes")),
            share,
        )
    )


# --- the process under the profiler --------------------------------------------------------------


def inside(plan: Plan, case: str, form: str) -> int:
    """Run one form over all its input sets between cudaProfilerStart and Stop.

    The output is checked first. Every set is used once and together they are larger than L2, so
    that what one leaves in L2 does not serve the next; before the start L2 is filled by reading
    something else, which leaves nothing to be written back.
    """
    shapes = {name_of(shape): shape for shape in traffic_cases(micro=plan.micro)}
    chosen("CASE", (case,), list(shapes))
    chosen("FORM", (form,), FORMS)
    shape, device = shapes[case], plan.torch_device()
    with torch.no_grad():
        entrant = _entrant(shape, form, plan, device)
        if not entrant.ready:
            raise ConfigError(f"{form} at {case}", got=str(entrant.record["reason"]))
        with entrant.method.context():
            _inside_range(entrant.calls, device)
    print(f"{case} {form}: {len(entrant.calls)} sets")
    return 0


def _sets(shape: Shape) -> int:
    return input_sets(4 * tensor_bytes(shape))


def _entrant(shape: Shape, form: str, plan: Plan, device: torch.device) -> Entrant:
    sets = [inputs_of(shape, device, plan.seed + i) for i in range(_sets(shape))]
    rows = torch.linspace(0, shape.q_tokens - 1, min(ROWS, shape.q_tokens), device=device).long()
    truth = truth_of(sets[0], shape, rows, linear=False)
    compiler = "eager" if plan.micro else "inductor"
    methods = pair_methods(shape.heads, linear=False, compiler=compiler, forms=(form,))
    wanted = _BASELINE if form == "two-pass" else form
    method = next(one for one in methods if one.name == wanted)
    return admit(method, sets, lambda y: errors_of(y[:, rows], truth), WRONG)


def _inside_range(calls: list[Call], device: torch.device) -> None:
    start, stop = _switches(device)
    for call in calls:
        call()
    if device.type == "cuda":
        other = torch.zeros(2**28, dtype=torch.int8, device=device)
        other.view(torch.int32).amax()
        torch.cuda.synchronize(device)
    start()
    for call in calls:
        call()
    stop()


def _switches(device: torch.device) -> tuple[Callable[[], None], Callable[[], None]]:
    if device.type != "cuda":
        return (lambda: None), (lambda: None)
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]

    def start() -> None:
        runtime.cudaProfilerStart()

    def stop() -> None:
        torch.cuda.synchronize(device)
        runtime.cudaProfilerStop()

    return start, stop
