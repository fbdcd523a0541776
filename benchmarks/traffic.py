"""`hbm`: memory traffic of attention + projection + skip by hardware counters, beside the count on
paper.

T is one tensor of B*N*C elements in 16 bits. On paper every operand and result of every kernel
counts once. What stays in L2 between kernels is not known on paper, which is why there is a
measurement beside it; keys and values that attention reads again for each block of rows come from
L2 and are not counted.
"""

from __future__ import annotations

import csv
import io
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import torch

from benchmarks import runner
from benchmarks.pairs import FORMS, WRONG, inputs_of, pair_methods, truth_of, write_ups_shapes
from benchmarks.runner import Column, Entrant, Journal, Plan, Record, Shape
from turbo_rcm_patch import ops
from turbo_rcm_patch.bench import some_rows
from turbo_rcm_patch.errors import ConfigError, MissingPackageError
from turbo_rcm_patch.video.environment import python_command

_ROWS: Final = 32
#: The exact backend of the two-pass form here; any of them moves the same tensors.
_BASELINE: Final = "two-pass, flash"
#: What the measured process says of a form, and what follows.
_COUNTED: Final = "counted:"
_LEFT_OUT: Final = "left-out:"
_COLUMNS: Final = (
    Column("case", 18), Column("form", 12), Column("paper MB", 10), Column("measured MB", 11),
    Column("read MB", 10), Column("write MB", 10), Column("of two-pass", 11),
)  # fmt: skip


def _shapes(*, micro: bool) -> dict[str, Shape]:
    """The write-ups' table and a self-attention of Wan2.1-1.3B at 480p and 81 frames."""
    shapes = write_ups_shapes(micro=micro) + ([] if micro else [Shape.square(12, 32760, 128)])
    return {shape.name: shape for shape in shapes}


def run(plan: Plan) -> int:
    """Count and write `hbm.json`; 0 if the counters could be read for everything asked for."""
    shapes = _shapes(micro=plan.micro)
    only = runner.chosen("--only", plan.only, list(shapes))
    if plan.quick and not plan.only:
        only = only[::2]
    forms = runner.chosen("--peers", plan.peers, FORMS)
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
            pv = ops.resolve_pv("auto", journal.device, shapes[name].kv_tokens)
            paper = {form: paper_bytes(shapes[name], form, pv) for form in forms}
            found: dict[str, Record] = {
                form: {"paper_bytes": sum(parts.values()), "paper": parts, "pv": pv}
                for form, parts in paper.items()
            }
            if ncu:
                measured: dict[str, Record] = {}
                missing = dict.fromkeys(forms, ncu)
            elif journal.late(name):
                continue
            else:
                measured, missing = _measured(name, forms, plan)
            for form in forms:
                if form in measured:
                    found[form]["measured"] = measured[form]
                else:
                    found[form]["not_measured"] = missing.get(form, "its graph was not counted")
                    good = False
                _show(name, form, found, journal)
            journal.case(name, {"tensor_bytes": tensor_bytes(shapes[name]), "forms": found})
    return 0 if good or plan.micro else 1


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


def _measured(
    name: str, forms: Sequence[str], plan: Plan
) -> tuple[dict[str, Record], dict[str, str]]:
    """What was counted of each form, and why of others nothing was."""
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
    found: dict[str, Record] = {}
    for (form, sets), workload in zip(counted, workloads, strict=True):
        read, write = (workload[metric] / sets for metric in METRICS)
        found[form] = {
            "bytes": read + write,
            "read_bytes": read,
            "write_bytes": write,
            "sets": sets,
        }
    return found, missing


def _show(name: str, form: str, found: dict[str, Record], journal: Journal) -> None:
    def megabytes(record: Record, key: str) -> str:
        return f"{record[key] / 1e6:.1f}" if key in record else "?"

    paper, before = found[form], found.get("two-pass", {})
    measured, total = paper.get("measured", {}), before.get("measured", {})
    share = ""
    if measured and total:
        share = f"{measured['bytes'] / total['bytes']:.3f}"
    elif before:
        share = f"{paper['paper_bytes'] / before['paper_bytes']:.3f} on paper"
    counted = (megabytes(measured, key) for key in ("bytes", "read_bytes", "write_bytes"))
    journal.line((name, form, megabytes(paper, "paper_bytes"), *counted, share))


# --- on paper ------------------------------------------------------------------------------------


def tensor_bytes(shape: Shape) -> int:
    """T."""
    return 2 * shape.batch * shape.q_tokens * shape.channels


def paper_bytes(shape: Shape, form: str, pv: str) -> dict[str, float]:
    """Bytes by what moves them.

    Args:
        shape: Of the attention; the projection is square.
        form: "two-pass", "one-pass", "two-launch" or "one-launch".
        pv: "fp8" or a 16-bit type: what the second product of ours takes.
    """
    t = float(tensor_bytes(shape))
    found = {"weight of the projection": 2.0 * shape.channels**2}
    if form in ("two-launch", "one-launch"):
        # q and k are read in 16 bits, written in 8 and read in 8; with fp8 PV so is v, which is
        # read once more for its channels' maxima.
        scales = 4.0 * shape.batch * shape.heads * shape.q_tokens
        found["prologue: read"] = 2 * t + (2 * t if pv == "fp8" else 0)
        found["prologue: write"] = t + (0.5 * t if pv == "fp8" else 0) + scales
        found["attention: read q, k, v"] = t + scales + (0.5 * t if pv == "fp8" else t)
        found["attention: write"] = t
        if form == "two-launch":
            found["projection: read attention"] = t
        found["projection: read x, write y"] = 2 * t
        return found
    found["attention: read q, k, v"] = 3 * t
    found["attention: write"] = t
    found["projection: read attention, write"] = 2 * t
    if form == "two-pass":  # c_skip * x, c_out * y, and their sum
        found["skip: three elementwise kernels"] = 7 * t
    else:
        found["skip: one elementwise kernel"] = 3 * t
    return found


def write_ups_share() -> dict[str, float]:
    """The write-ups' own count, without projection and prologue, in tensors of B*N*C: attention
    reads q, k, v and writes; the skip reads that and x and writes. Fused, it reads x and writes.
    """
    two_pass, fused = 7.0, 5.0
    return {"two-pass": two_pass, "fused": fused, "saved": 1.0 - fused / two_pass}


# --- the process under the profiler --------------------------------------------------------------


def inside(plan: Plan, case: str, forms: str) -> int:
    """Run each form over all its input sets, as one CUDA graph, between cudaProfilerStart and
    Stop.

    The output is checked first. Every set is used once and together they are larger than L2, so
    that what one leaves in L2 does not serve the next; before the start L2 is filled by reading
    something else, which leaves nothing to be written back.
    """
    shapes = _shapes(micro=plan.micro)
    runner.chosen("CASE", (case,), list(shapes))
    names = runner.chosen("FORM", forms.split(","), FORMS)
    shape, device = shapes[case], plan.torch_device()
    with torch.no_grad():
        for form in names:
            entrant = _entrant(shape, form, plan, device)
            if not entrant.calls:
                print(_LEFT_OUT, case, form, str(entrant.record["reason"]).replace("\n", " "))
                continue
            with entrant.method.context():
                _count(entrant, device)
            print(_COUNTED, case, form, len(entrant.calls), flush=True)
    return 0


def _sets(shape: Shape) -> int:
    return runner.input_sets(4 * tensor_bytes(shape))


def _entrant(shape: Shape, form: str, plan: Plan, device: torch.device) -> Entrant:
    sets = [inputs_of(shape, device, plan.seed + i) for i in range(_sets(shape))]
    rows = some_rows(shape.q_tokens, _ROWS, device)
    truth = truth_of(sets[0], shape, rows, linear=False)
    methods = pair_methods(shape.heads, linear=False, compiler=plan.compiler, forms=(form,))
    wanted = _BASELINE if form == "two-pass" else form
    method = next(one for one in methods if one.name == wanted)
    return runner.admit(method, sets, runner.errors_to(truth, rows), WRONG)


def _count(entrant: Entrant, device: torch.device) -> None:
    if device.type != "cuda":
        for call in entrant.calls:
            call()
        return
    replay = runner.graph_of(entrant.calls)
    replay()
    other = torch.zeros(2**28, dtype=torch.int8, device=device)
    other.view(torch.int32).amax()
    torch.cuda.synchronize(device)
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    runtime.cudaProfilerStart()
    replay()
    torch.cuda.synchronize(device)
    runtime.cudaProfilerStop()


# --- Nsight Compute ------------------------------------------------------------------------------

METRICS: Final = ("dram__bytes_read.sum", "dram__bytes_write.sum")
_UNITS: Final = {
    "byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "Tbyte": 1e12,
    "B": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12,
}  # fmt: skip
#: Bytes by metric.
Workload = dict[str, float]
_USUAL: Final = ("/usr/local/cuda/bin/ncu", "/opt/nvidia/nsight-compute/ncu")


def find_ncu() -> str:
    """Path of the profiler.

    Raises:
        MissingPackageError: There is none.
    """
    found = shutil.which("ncu") or next((p for p in _USUAL if Path(p).is_file()), None)
    if found is None:
        others = sorted(Path("/opt/nvidia/nsight-compute").glob("*/ncu"))
        found = str(others[-1]) if others else None
    if found is None:
        raise MissingPackageError(
            "ncu",
            expected="Nsight Compute in PATH",
            got="no such program",
            remedy="Install the CUDA toolkit's nsight-compute package and let this user read "
            "performance counters (NVreg_RestrictProfilingToAdminUsers=0, or run as root)",
        )
    return found


def profile(
    command: Sequence[str], environment: Mapping[str, str], timeout: float = 240.0
) -> tuple[list[Workload], str]:
    """Run a command that launches CUDA graphs between cudaProfilerStart and Stop under the
    profiler.

    A graph is one workload: what one of its kernels leaves in L2 the next one finds there. The two
    counters fit into one pass, so nothing is replayed.

    Args:
        command: What to run.
        environment: Variables to add to this process's.
        timeout: Seconds.

    Returns:
        Bytes by metric of every graph, in the order of their launches, and what was printed.

    Raises:
        ConfigError: The profiler failed or counted nothing; the message quotes it.
    """
    full = [
        find_ncu(),
        *("--clock-control", "none", "--cache-control", "none"),
        *("--graph-profiling", "graph", "--profile-from-start", "off"),
        *("--metrics", ",".join(METRICS)),
        *("--csv", "--print-units", "base"),
        *command,
    ]
    try:
        done = subprocess.run(
            full, env=os.environ | environment, capture_output=True, text=True, timeout=timeout
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError("ncu", got=f"no end in {timeout:.0f} s") from error
    except OSError as error:
        raise ConfigError("ncu", got=str(error)) from error
    try:
        found = parse(done.stdout)
    except ConfigError as error:
        said = [line for line in (done.stdout + done.stderr).splitlines() if "==ERROR==" in line]
        tail = said or (done.stderr or done.stdout).strip().splitlines()[-3:]
        raise ConfigError(
            "ncu", expected="counters", got=f"exit {done.returncode}: {' '.join(tail)[:500]}"
        ) from error
    if done.returncode:
        raise ConfigError("ncu", got=f"exit {done.returncode}")
    return found, done.stdout


def parse(text: str) -> list[Workload]:
    """Bytes by metric of every workload of `ncu --csv`, in order.

    Args:
        text: What it printed: lines of its own ("==PROF== ..."), then CSV with a header line.

    Raises:
        ConfigError: No such table, or a metric is not in it.
    """
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise ConfigError("output of ncu", expected='a CSV table that begins with "ID"')
    table = [line for line in lines[start:] if line.startswith('"')]
    found: dict[int, Workload] = {}
    for row in csv.DictReader(io.StringIO("\n".join(table))):
        name = row.get("Metric Name", "")
        if name not in METRICS:
            continue
        unit, value = row["Metric Unit"], row["Metric Value"].replace(",", "")
        try:
            found.setdefault(int(row["ID"]), {})[name] = float(value) * _UNITS[unit]
        except (KeyError, ValueError) as error:
            raise ConfigError(
                f"output of ncu, {name}", expected="a number of bytes", got=f"{value} {unit}"
            ) from error
    missing = [name for name in METRICS if any(name not in one for one in found.values())]
    if missing or not found:
        raise ConfigError("output of ncu", expected=f"the metrics {', '.join(missing or METRICS)}")
    return [found[number] for number in sorted(found)]
