"""Compare two trees: each case in both, in turn, each time in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from benchmarks.runner import Benchmark, Plan, Record, check_new
from turbo_rcm_patch.errors import ConfigError
from turbo_rcm_patch.files import write_json

#: How often each tree measures a case. They take turns, so that a slow drift meets both.
_TURNS: Final = 2


def compare_trees(benchmark: Benchmark, plan: Plan, base: str) -> int:
    """Measure each case in another tree and in this one, in turn, each in a process of its own.

    Prints the first column of both, by the smaller of the medians, and their ratio. The file holds
    every run's own document.

    Returns:
        0 if all runs succeeded, else 1.
    """
    path, runs, failed = plan.out / f"{benchmark.name}_trees.json", list[Record](), False
    check_new(path)
    column = benchmark.columns[0]
    here = Path(__file__).parents[1]
    print(f"| case | method | {column.title} of {base} | here | here / there |")
    print("|---|---|---:|---:|---:|", flush=True)
    with _tree(base, here) as there, tempfile.TemporaryDirectory() as scratch:
        for case, methods in benchmark.chosen(plan).items():
            cells: dict[str, dict[str, list[float]]] = {name: {} for name in methods}
            for turn in range(_TURNS):
                for name, tree in (("there", there), ("here", here)):
                    out = Path(scratch, f"{case}-{turn}-{name}")
                    command = [*_command(benchmark.name, plan), "--out", str(out)]
                    command += ["--only", ",".join([case, *methods])]
                    environment = os.environ | {"PYTHONPATH": str(tree)}
                    done = subprocess.run(
                        command, cwd=tree, env=environment, stdout=subprocess.DEVNULL
                    )
                    failed |= done.returncode != 0
                    file = out / f"{benchmark.name}.json"
                    document = json.loads(file.read_text()) if file.exists() else {"cases": {}}
                    runs.append({"tree": name, "document": document})
                    records = document["cases"].get(case, {"methods": {}})["methods"]
                    for method, record in records.items():
                        if cell := column.cell(record):
                            cells[method].setdefault(name, []).append(float(cell))
            for method, found in cells.items():
                base, ours = (min(found.get(name, [float("nan")])) for name in ("there", "here"))
                row = f"{base:{column.form}} | {ours:{column.form}} | {ours / base:.3f}"
                print(f"| {case} | {method} | {row} |", flush=True)
            write_json(path, {"command": plan.command, "base": base, "runs": runs})
    print(path)
    return int(failed)


def _command(name: str, plan: Plan) -> list[str]:
    command = [sys.executable, "-m", "benchmarks", name, "--device", plan.device]
    command += ["--seed", str(plan.seed), "--limit", str(plan.limit)]
    command += ["--calls", str(plan.calls)] if plan.calls else []
    return command + ["--micro"] * plan.micro


@contextmanager
def _tree(base: str, here: Path) -> Iterator[Path]:
    """Give the folder of another checkout; a commit is checked out for the length of the block."""
    if Path(base).is_dir():
        yield Path(base).resolve()
        return
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "tree")
        git = ["git", "-C", str(here), "worktree"]
        added = subprocess.run(
            [*git, "add", "--detach", str(tree), base], capture_output=True, text=True
        )
        if added.returncode:
            expected = "the folder of another checkout, or a commit"
            raise ConfigError("--base", expected=expected, got=f"{base}: {added.stderr.strip()}")
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=False)
