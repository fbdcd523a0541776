"""Compare two trees: each case in both, in turn, each time in a process of its own."""

from __future__ import annotations

import json
import math
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
    column, here = benchmark.columns[0], Path(__file__).parents[1]
    print(f"| case | method | {column.title} of {base} | here | here / there |")
    print("|---|---|---:|---:|---:|", flush=True)
    with _tree(base, here) as there:
        for case, methods in benchmark.chosen(plan).items():
            best = {name: {"there": math.inf, "here": math.inf} for name in methods}
            for name, tree in (("there", there), ("here", here)) * _TURNS:
                code, document = _run(benchmark.name, plan, ",".join([case, *methods]), tree)
                failed |= code != 0
                runs.append({"tree": name, "document": document})
                write_json(path, {"command": plan.command, "base": base, "runs": runs})
                cases = document.get("cases", {})
                for method, record in cases.get(case, {"methods": {}})["methods"].items():
                    if cell := column.cell(record):
                        best[method][name] = min(best[method][name], float(cell))
            for method, times in best.items():
                cells = [f"{times[name]:{column.form}}" for name in ("there", "here")]
                ratio = times["here"] / times["there"]
                print(f"| {case} | {method} | {' | '.join(cells)} | {ratio:.3f} |", flush=True)
    print(path)
    return int(failed)


def _run(name: str, plan: Plan, only: str, tree: Path) -> tuple[int, Record]:
    """Measure in a tree; return the exit code and the document, empty if there is none."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "benchmarks", name, "--device", plan.device]
        command += ["--out", out, "--only", only, *["--micro"] * plan.micro]
        paths = [str(tree), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        done = subprocess.run(command, cwd=tree, env=environment, stdout=subprocess.DEVNULL)
        file = Path(out, f"{name}.json")
        document: Record = json.loads(file.read_text()) if file.exists() else {}
    return done.returncode, document


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
