"""`python -m tests.fuzz`: random cases for a time or a number of them; exits with 1 if any
fails."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from pathlib import Path

import torch

from tests.fuzz.run import MODELS, Plan, Result, worker

#: Combinations of what kernels are compiled for, in one run on a GPU.
POOL = 320


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so many")
    parser.add_argument("--cases", type=int, help="stop after so many")
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
    parser.add_argument("--json", type=Path, help="where to write the counts")
    found = parser.parse_args(given)
    if found.seed is None:
        found.seed = time.time_ns() % 10**6
    if found.pool is None:
        found.pool = POOL if found.device == "cuda" else 0
    if found.only is None and found.cases is None and found.seconds == float("inf"):
        found.cases = 1000
    return found


def main(given: list[str] | None = None) -> int:
    found = arguments(given)
    plan = Plan(found.seed, found.device, found.pool, found.models)
    if found.only is not None:
        torch.set_num_threads(1)
        print(plan.run(found.only))
        return 0
    print(f"seed {plan.seed}", flush=True)
    jobs = [
        (plan, index, found.workers, found.cases, found.seconds) for index in range(found.workers)
    ]
    result = Result()
    if found.workers == 1:
        result.add(worker(*jobs[0]))
    else:
        with multiprocessing.get_context("spawn").Pool(found.workers) as pool:
            for one in pool.starmap(worker, jobs, chunksize=1):
                result.add(one)
    print(f"{result.cases} cases in {result.seconds:.1f} s, {len(result.failures)} failed")
    for name, count in sorted(result.names.items()):
        print(f"  {count:6d} {name}")
    if result.compiled:
        total = sum(result.compiled.values())
        print(f"{total} kernels compiled in {result.compiling:.0f} s of all processes")
        for name, count in result.compiled.most_common():
            print(f"  {count:6d} {name}")
    if found.json is not None:
        counts = {
            "command": " ".join(["python -m tests.fuzz", *(given or sys.argv[1:])]),
            "seed": plan.seed,
            "cases": result.cases,
            "seconds": round(result.seconds, 1),
            "failures": result.failures,
            "names": dict(sorted(result.names.items())),
            "kernels_compiled": dict(result.compiled.most_common()),
            "seconds_compiling": round(result.compiling, 1),
        }
        found.json.write_text(json.dumps(counts, indent=2) + "\n", encoding="utf-8")
    return 1 if result.failures else 0


if __name__ == "__main__":
    sys.exit(main())
