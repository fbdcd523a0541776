"""`python -m tests.fuzz`: random cases for a time or a number of them; exits with 1 if any
fails."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch

from tests.fuzz.processes import run_in_processes
from tests.fuzz.run import MODELS, Plan, Result, cases_of, run

#: Combinations of what kernels are compiled for, in one run on a GPU.
POOL = 320


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so many")
    parser.add_argument("--cases", type=int, help="stop after so many")
    parser.add_argument("--start", type=int, default=0, help="the first case")
    parser.add_argument("--seed", type=int, help="a random one by default")
    parser.add_argument("--only", type=int, help="one case, with its traceback")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--models", type=float, default=MODELS, help="share of models")
    parser.add_argument(
        "--pool", type=int,
        help="combinations that kernels are compiled for; 0: a new one for each case; "
        f"{POOL} on a GPU, 0 on a CPU",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, help="a file of runs, to which this one is added")
    found = parser.parse_args(given)
    if found.seed is None:
        found.seed = time.time_ns() % 10**6
    if found.pool is None:
        found.pool = POOL if found.device == "cuda" else 0
    if found.only is None and found.cases is None and found.seconds == float("inf"):
        found.cases = 1000
    return found


#: What makes the cases of two runs the same.
SAME = ("seed", "device", "pool", "models")


def runs_in(path: Path, found: argparse.Namespace) -> list[dict[str, Any]]:
    """The runs of a file.

    Raises:
        SystemExit: One of them has cases that are asked for now, which would count twice.
    """
    if not path.exists():
        return []
    runs: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["runs"]
    end = float("inf") if found.cases is None else found.start + found.cases
    for other in runs:
        same = all(other[key] == getattr(found, key) for key in SAME)
        if same and found.start < other["end"] and end > other["start"]:
            told = f"cases {other['start']} to {other['end'] - 1} of this seed"
            raise SystemExit(f"{path} has {told}: give another --seed, or --start {other['end']}")
    return runs


def written(
    path: Path, runs: list[dict[str, Any]], found: argparse.Namespace, result: Result
) -> None:
    """Add a run to a file, and sum the runs up."""
    run = {key: getattr(found, key) for key in SAME} | {
        "start": found.start,
        "end": max(result.end, found.start),
        "machine": machine(found.device),
        "processes": found.workers,
        "versions": versions(),
        "cases": result.cases,
        "findings": result.failures,
        "seconds": round(result.seconds, 1),
        "names": dict(sorted(result.names.items())),
        "kernels_compiled": dict(result.compiled.most_common()),
        "seconds_compiling": round(result.compiling, 1),
    }
    total = {
        "command": "python -m tests.fuzz",
        "cases": sum(one["cases"] for one in [*runs, run]),
        "findings": sum(len(one["findings"]) for one in [*runs, run]),
        "runs": [*runs, run],
    }
    path.write_text(json.dumps(total, indent=1) + "\n", encoding="utf-8")


def machine(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else platform.machine()


def versions() -> dict[str, str]:
    names = ("torch", "triton", "diffusers", "numpy")
    return {"python": platform.python_version()} | {
        name: importlib.metadata.version(name) for name in names
    }


def main(given: list[str] | None = None) -> int:
    found = arguments(given)
    plan = Plan(found.seed, found.device, found.pool, found.models)
    if found.only is not None:
        torch.set_num_threads(1)
        print(plan.run(found.only))
        return 0
    runs = runs_in(found.json, found) if found.json is not None else []
    print(f"seed {plan.seed}", flush=True)
    if found.workers == 1 and plan.device == "cpu":
        torch.set_num_threads(1)
        end = None if found.cases is None else found.start + found.cases
        until = time.monotonic() + found.seconds
        result = run(plan, cases_of(plan, 0, 1, found.start, end), until=until)
    else:
        result = run_in_processes(plan, found.workers, found.start, found.cases, found.seconds)
    print(f"{result.cases} cases in {result.seconds:.1f} s, {len(result.failures)} failed")
    for name, count in sorted(result.names.items()):
        print(f"  {count:6d} {name}")
    if result.compiled:
        total = sum(result.compiled.values())
        print(f"{total} kernels compiled in {result.compiling:.0f} s of all processes")
        for name, count in result.compiled.most_common():
            print(f"  {count:6d} {name}")
    if found.json is not None:
        written(found.json, runs, found, result)
    return 1 if result.failures else 0


if __name__ == "__main__":
    sys.exit(main())
