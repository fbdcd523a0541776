"""`python -m tests.mutants`: break the library in one place after the other and see whether a test
fails; exits with 1 under 95 % or when a sign of the support matrix does not fail.

What was found is kept in the result after each mutant, and a second run goes on from there.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

from tests.mutants.automatic import ROOT, mutated, sample
from tests.mutants.coverage import kernel_tests_of, tests_of
from tests.mutants.own import OWN, SIGNS, Own
from tests.mutants.run import Job, cells_that_fail, preload, run_job

#: Share of mutants that tests have to notice.
ENOUGH = 0.95


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="of the sample")
    parser.add_argument("--sample", type=int, default=80, help="how many automatic mutants")
    parser.add_argument("--signs", action="store_true", help="only the signs of the matrix")
    parser.add_argument("--only", help="mutants whose name contains this, run again")
    parser.add_argument(
        "--survivors", action="store_true", help="those that survived in the result, run again"
    )
    parser.add_argument("--list", action="store_true", help="names, and run nothing")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--limit", type=float, default=180.0, help="CPU seconds a mutant")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="stop after; what runs is not counted"
    )
    parser.add_argument("--again", action="store_true", help="forget what is in the result")
    parser.add_argument(
        "--json", type=Path, default=ROOT / "results" / "mutants.json", help="the result"
    )
    return parser.parse_args(given)


Entry = dict[str, Any]


def entries(found: argparse.Namespace) -> list[Entry]:
    """What is to run: {"kind": "sign" | "own" | "sample", "name", ...}, JSON throughout."""
    made: list[Entry] = [
        {"kind": "sign", "name": one.name, "file": one.file, "capability": one.capability}
        for one in SIGNS
    ]
    if not found.signs:
        made += [{"kind": "own", "name": one.name, "file": one.file} for one in OWN]
        made += [
            {"kind": "sample", "name": one.name, "file": one.file, "line": one.line,
             "index": one.index, "before": one.before, "after": one.after,
             "key": sha256(one.key.encode()).hexdigest()[:16]}
            for one in sample(found.seed, found.sample)
        ]  # fmt: skip
    return made


def known_by(entry: Entry) -> str:
    """What an entry is found by in the result of an earlier run."""
    return str(entry.get("key", entry["name"]))


def run_entry(entry: Entry, limit: float, until: float) -> Entry | None:
    """The entry with what killed it ("" for nothing) and the seconds it took; None if there was
    not enough time."""
    start = time.monotonic()
    if entry["kind"] == "sign":
        own = _own(entry["name"], SIGNS)
        runs = [
            cells_that_fail(own.file, tree, list(own.tests), own.capability, until)
            for tree in (own.tree(), None)
        ]
        failed, always = runs
        if failed is None or always is None:
            return None
        missed = sorted(set(own.classes) - (failed - always))
        killed = "" if missed else f"signs of {len(own.classes)} classes fail"
        seconds = round(time.monotonic() - start, 1)
        return entry | {"killed_by": killed, "missed": missed, "seconds": seconds}
    if entry["kind"] == "own":
        own = _own(entry["name"], OWN)
        tests = list(own.tests) or tests_of(own.file)
        job = Job(own.name, own.file, own.tree(), tests, fuzz=own.fuzz,
                  interpreted=own.interpreted)  # fmt: skip
    else:
        tree, mutant = mutated(entry["file"], entry["index"])
        job = Job(mutant.name, mutant.file, tree, tests_of(mutant.file),
                  kernels=kernel_tests_of(mutant.file))  # fmt: skip
    killed_by, took = run_job(job, limit, until)
    return (
        None if killed_by is None else entry | {"killed_by": killed_by, "seconds": round(took, 1)}
    )


def _own(name: str, among: list[Own]) -> Own:
    return next(one for one in among if one.name == name)


def worker(todo: list[Entry], done: Any, next_one: Any, limit: float, until: float) -> None:
    while time.monotonic() < until:
        with next_one.get_lock():
            index = next_one.value
            next_one.value += 1
        if index >= len(todo):
            return
        try:
            entry = run_entry(todo[index], limit, until)
        except Exception as error:  # The mutant does not fit the code any more, or no memory.
            reason = f"{type(error).__name__}: {error}"
            entry = todo[index] | {"killed_by": "", "seconds": 0.0, "missed": [reason]}
        if entry is not None:
            done.put(entry)


def summary(seed: int, ran: list[Entry]) -> dict[str, Any]:
    kinds = {}
    for kind in ("sign", "own", "sample"):
        these = [one for one in ran if one["kind"] == kind]
        killed = sum(bool(one["killed_by"]) for one in these)
        kinds[kind] = {"mutants": len(these), "killed": killed}
    drawn = kinds["sample"]
    return {
        "command": "python -m tests.mutants",
        "seed": seed,
        "score": round(drawn["killed"] / max(1, drawn["mutants"]), 4),
        **kinds,
        "survivors": [one["name"] for one in ran if not one["killed_by"]],
        "mutants": sorted(ran, key=lambda one: (one["kind"], one["name"])),
    }


def _kept(found: argparse.Namespace) -> dict[str, Entry]:
    """What the result of an earlier run says of mutants that are still drawn, by name."""
    if found.again or not found.json.exists():
        return {}
    held = json.loads(found.json.read_text(encoding="utf-8"))
    wanted = {known_by(one): one for one in entries(found)}
    return {
        wanted[known_by(one)]["name"]: one | wanted[known_by(one)]
        for one in held["mutants"]
        if known_by(one) in wanted
    }


def main(given: list[str] | None = None) -> int:
    found = arguments(given)
    todo = entries(found)
    if found.only:
        todo = [one for one in todo if found.only in one["name"]]
    kept = _kept(found)
    if found.survivors:
        todo = [one for one in todo if kept.get(one["name"], {}).get("killed_by") == ""]
    if found.list:
        print("\n".join(f"{one['kind']:6s} {one['name']}" for one in todo))
        return 0
    if not found.only and not found.survivors:
        todo = [one for one in todo if one["name"] not in kept]
    preload()
    context = multiprocessing.get_context("fork")
    done, next_one = context.Queue(), context.Value("i", 0)
    until = time.monotonic() + found.seconds
    workers = [
        context.Process(target=worker, args=(todo, done, next_one, found.limit, until))
        for _ in range(found.workers)
    ]
    for one in workers:
        one.start()
    while True:
        alive = any(one.is_alive() for one in workers)
        while not done.empty():
            entry = done.get()
            kept[entry["name"]] = entry
            said = entry["killed_by"] or "SURVIVED " + " ".join(entry.get("missed", []))
            print(f"{entry['seconds']:6.1f} s  {entry['name']}  {said[:110]}", flush=True)
            _write(found.json, summary(found.seed, list(kept.values())))
        if not alive:
            break
        time.sleep(0.2)
    total = summary(found.seed, list(kept.values()))
    for kind in ("sign", "own", "sample"):
        print(f"{kind}: {total[kind]['killed']} of {total[kind]['mutants']} killed")
    for name in total["survivors"]:
        print(f"survived: {name}")
    whole = all(total[kind]["killed"] == total[kind]["mutants"] for kind in ("sign", "own"))
    lost = [one["name"] for one in todo if one["name"] not in kept]
    if lost:
        print(f"not run: {', '.join(lost)}")
        whole = whole and time.monotonic() >= until  # Or a worker died.
    return 0 if whole and total["score"] >= ENOUGH else 1


def _write(path: Path, value: dict[str, Any]) -> None:
    aside = path.with_suffix(".part")
    aside.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    os.replace(aside, path)


if __name__ == "__main__":
    sys.exit(main())
