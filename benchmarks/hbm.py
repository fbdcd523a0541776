"""`hbm`: memory traffic of attention + projection + skip by hardware counters, beside the count on
paper."""

from __future__ import annotations

from typing import Final

import torch

from benchmarks.cases import name_of, traffic_cases
from benchmarks.clock import graph_of, input_sets
from benchmarks.contest import Entrant, admit
from benchmarks.counters import METRICS, find_ncu, profile
from benchmarks.journal import Journal, Plan, chosen
from benchmarks.pairs import FORMS, inputs_of, pair_methods, truth_of
from benchmarks.setup import Shape, errors_of
from benchmarks.traffic import paper_bytes, tensor_bytes, write_ups_share
from turbo_rcm_patch import ops
from turbo_rcm_patch.errors import ConfigError, MissingPackageError
from turbo_rcm_patch.sampling.environment import python_command

__all__ = ["inside", "run"]

WRONG: Final = 0.1
ROWS: Final = 32
#: The exact backend of the two-pass form here; any of them moves the same tensors.
_BASELINE: Final = "two-pass, flash"
#: What the measured process says of a form, and what follows.
_COUNTED: Final = "counted:"
_LEFT_OUT: Final = "left-out:"
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
            "measured": f"{' + '.join(METRICS)} of Nsight Compute over a CUDA graph of several "
            "input sets in turn, divided by their number; clocks and caches left alone",
            "paper": "every operand and result of every kernel once, prologue included",
            "the write-ups' count": write_ups_share(),
        },
    )
    good = True
    with journal.running():
        ncu = _missing(journal)
        for name in only:
            found = {form: _paper(shapes[name], form, journal.device) for form in forms}
            if ncu:
                measured: dict[str, dict[str, object]] = {}
                missing = dict.fromkeys(forms, ncu)
            elif journal.late(name):
                continue
            else:
                measured, missing = _measured(name, forms, journal)
            for form in forms:
                if form in measured:
                    found[form]["measured"] = measured[form]
                else:
                    found[form]["not_measured"] = missing.get(form, "its graph was not counted")
                    good = False
                _show(name, form, found, journal)
            journal.case(name, {"tensor_bytes": tensor_bytes(shapes[name]), "forms": found})
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


def _measured(
    name: str, forms: list[str], journal: Journal
) -> tuple[dict[str, dict[str, object]], dict[str, str]]:
    """What was counted of each form, and why of others nothing was."""
    plan = journal.plan
    # The child is this module again, so that nothing else happens between start and stop.
    command, environment = python_command(
        *("benchmarks", "hbm"),
        *("--inside", name, ",".join(forms), "--device", plan.device, "--seed", str(plan.seed)),
        *(("--micro",) if plan.micro else ()),
    )
    try:
        workloads, said = profile(command, environment)
    except ConfigError as error:
        return {}, dict.fromkeys(forms, str(error))
    words = [line.split(" ", 3) for line in said.splitlines()]
    counted = [(form, int(sets)) for _, form, sets in (w[1:] for w in words if w[0] == _COUNTED)]
    missing = {form: why for _, form, why in (w[1:] for w in words if w[0] == _LEFT_OUT)}
    if len(counted) != len(workloads):
        why = f"{len(workloads)} workloads for {len(counted)} graphs"
        return {}, dict.fromkeys(forms, why)
    found: dict[str, dict[str, object]] = {}
    for (form, sets), workload in zip(counted, workloads, strict=True):
        read, write = (workload[metric] / sets for metric in METRICS)
        found[form] = {
            "bytes": read + write,
            "read_bytes": read,
            "write_bytes": write,
            "sets": sets,
        }
    return found, missing


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


def inside(plan: Plan, case: str, forms: str) -> int:
    """Run each form over all its input sets, as one CUDA graph, between cudaProfilerStart and
    Stop.

    The output is checked first. Every set is used once and together they are larger than L2, so
    that what one leaves in L2 does not serve the next; before the start L2 is filled by reading
    something else, which leaves nothing to be written back.
    """
    shapes = {name_of(shape): shape for shape in traffic_cases(micro=plan.micro)}
    chosen("CASE", (case,), list(shapes))
    names = chosen("FORM", forms.split(","), FORMS)
    shape, device = shapes[case], plan.torch_device()
    with torch.no_grad():
        for form in names:
            entrant = _entrant(shape, form, plan, device)
            if not entrant.ready:
                print(_LEFT_OUT, case, form, str(entrant.record["reason"]).replace("\n", " "))
                continue
            with entrant.method.context():
                _count(entrant, device)
            print(_COUNTED, case, form, len(entrant.calls), flush=True)
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


def _count(entrant: Entrant, device: torch.device) -> None:
    if device.type != "cuda":
        for call in entrant.calls:
            call()
        return
    replay = graph_of(entrant.calls)
    replay()
    other = torch.zeros(2**28, dtype=torch.int8, device=device)
    other.view(torch.int32).amax()
    torch.cuda.synchronize(device)
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    runtime.cudaProfilerStart()
    replay()
    torch.cuda.synchronize(device)
    runtime.cudaProfilerStop()
