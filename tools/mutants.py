"""Break the package in many places, one at a time, and see if a test notices.

    python -m tools.mutants --size 40 --only turbo_rcm_patch/patching

Each mutant changes one node of one file in a copy of the repository. The tests that run the
changed lines are run there until one fails, short ones first and one of each function before the
others of it, as far as their times fit into `--budget`. A mutant that none of them notices shows a
promise without a test. Exit code 1 if any is left.

Which lines a test runs is recorded once (`tools/lines.py`), and again if package or tests change.
"""

from __future__ import annotations

import argparse
import ast
import copy
import hashlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "turbo_rcm_patch"
#: The start of a file's path -> the tests among which those are that should notice.
TESTS = {
    "turbo_rcm_patch/patching": ("tests/patching",),
    "turbo_rcm_patch/ops": ("tests/ops",),
    "turbo_rcm_patch/models": ("tests/models",),
    "turbo_rcm_patch/checkpoints": ("tests/checkpoints",),
    "turbo_rcm_patch/video": ("tests/video",),
    "turbo_rcm_patch/config.py": ("tests/test_config.py", "tests/patching"),
}
#: Where the lines of each test are kept.
LINES = ROOT / "outputs" / "lines.json"
#: Test -> its seconds, and the lines of each file that it runs.
Record = dict[str, dict[str, Any]]
_COPIED = ("turbo_rcm_patch", "tests", "tools", "examples", "pyproject.toml", "README.md")
_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult,
}  # fmt: skip
_DTYPES = {"float32": "bfloat16", "bfloat16": "float32", "float64": "float32", "int32": "int16"}

#: Without tests that compile or export, which are slow, and trace lines instead of running them.
_PYTEST = ("-q", "-p", "no:cacheprovider", "-m", "not gpu and not interpreter",
           "-k", "not compile and not export")  # fmt: skip
#: A process that has loaded what tests import apart from the package, and forks for each mutant.
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload([
    "pytest", "torch._dynamo", "hypothesis", "accelerate", "peft",
    "diffusers.models.autoencoders.autoencoder_kl_wan", "diffusers.hooks",
    "diffusers.models.transformers.transformer_wan",
    "diffusers.pipelines.wan.pipeline_wan",
])  # fmt: skip

Change = Callable[[], None]


@dataclass(frozen=True)
class Mutant:
    """One change of one file.

    Attributes:
        file: Path from the root of the repository.
        index: Number of the change among those of the file.
        line: Line of the changed node.
        before: Source of the node.
        after: Source of the changed node.
    """

    file: str
    index: int
    line: int
    before: str
    after: str
    end: int = 0  # its last line


def changes(tree: ast.Module) -> Iterator[tuple[ast.AST, Change]]:
    """Yield every node that can be changed, with the function that changes it in place."""
    for node in _executed(tree):
        if isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARISONS:
            other = _COMPARISONS[type(node.ops[0])]()
            yield node, _setter(node, "ops", [other, *node.ops[1:]])
        elif isinstance(node, ast.BoolOp):
            other_op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield node, _setter(node, "op", other_op)
            for index in range(len(node.values)):  # a condition dropped
                kept = node.values[:index] + node.values[index + 1 :]
                yield node, _setter(node, "values", kept)
        elif isinstance(node, ast.Call) and len(node.args) > 1:
            yield node, _setter(node, "args", [node.args[1], node.args[0], *node.args[2:]])
        elif isinstance(node, ast.Tuple) and len(node.elts) > 1 and isinstance(node.ctx, ast.Load):
            yield node, _setter(node, "elts", node.elts[:-1])
        elif isinstance(node, ast.Attribute) and node.attr in _DTYPES:
            yield node, _setter(node, "attr", _DTYPES[node.attr])
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield node, _setter(node, "operand", ast.UnaryOp(ast.Not(), node.operand))
        elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            yield node, _setter(node, "op", _OPERATORS[type(node.op)]())
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield node, _setter(node, "value", not node.value)
        elif isinstance(node, ast.Constant) and isinstance(node.value, int):
            yield node, _setter(node, "value", node.value + 1)
        elif isinstance(node, ast.Constant) and isinstance(node.value, float):
            yield node, _setter(node, "value", node.value * 1.5 + 0.5)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield node, _setter(node, "value", ast.Constant(None))


def _executed(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield nodes that compute: no types, imports, assertions or messages of errors."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop(0)
        yield node
        if isinstance(node, ast.Raise | ast.Import | ast.ImportFrom | ast.Assert):
            continue
        types = {id(getattr(node, name, None)) for name in ("annotation", "returns")}
        types |= {id(one) for one in getattr(node, "decorator_list", ())}
        waiting += [child for child in ast.iter_child_nodes(node) if id(child) not in types]


def _setter(node: ast.AST, name: str, value: object) -> Change:
    return lambda: setattr(node, name, value)


def mutated(source: str, index: int) -> tuple[str, ast.AST, str, str]:
    """The source after one change, the node, and its source before and after."""
    tree = ast.parse(source)
    node, change = list(changes(tree))[index]
    before = ast.unparse(copy.deepcopy(node))
    change()
    after = ast.unparse(node)
    return ast.unparse(ast.fix_missing_locations(tree)), node, before, after


def mutant(file: str, index: int) -> Mutant:
    """One mutant of a file."""
    source = (ROOT / file).read_text(encoding="utf-8")
    _, node, before, after = mutated(source, index)
    first, last = getattr(node, "lineno", 0), getattr(node, "end_lineno", 0)
    return Mutant(file, index, first, before[:120], after[:120], last)


def tests_of(file: str) -> tuple[str, ...]:
    """Tests that should notice a change of a file; empty if there are none."""
    return next((tests for start, tests in TESTS.items() if file.startswith(start)), ())


def tests_for(mutant: Mutant, record: Record, budget: float) -> list[str]:
    """Return the tests that run the changed lines, in the order in which they are to run.

    What runs while a file is imported (a constant, a default) or in other processes is noticed by
    the tests of the file's name, or of the file.
    """
    file_of_tests = f"test_{Path(mutant.file).stem}.py::"

    def runs(lines: dict[str, set[int]]) -> list[str]:
        return [name for name, test in record.items() if _runs(test["lines"], lines)]

    found = (
        runs({mutant.file: set(range(mutant.line, mutant.end + 1))})
        or [name for name in record if file_of_tests in name]
        or runs({mutant.file: set(range(1, 10**5))})
    )
    seconds = {name: record[name]["seconds"] for name in found}
    order, turns = [], Counter[str]()
    for name in sorted(found, key=lambda name: seconds[name]):
        function = name.partition("[")[0]
        order.append((turns[function], seconds[name], name))
        turns[function] += 1
    chosen = []
    for _, needed, name in sorted(order):
        if needed <= budget:
            chosen.append(name)
            budget -= needed
    return chosen


def _runs(lines: dict[str, list[int]], wanted: dict[str, set[int]]) -> bool:
    return any(not some.isdisjoint(lines.get(file, ())) for file, some in wanted.items())


def recorded(folder: Path, tests: Sequence[str]) -> Record:
    """Return which lines the tests run, kept in a file until package or tests change."""
    digest = hashlib.sha256(repr(sorted(tests)).encode())
    for path in sorted([*(folder / PACKAGE).rglob("*.py"), *(folder / "tests").rglob("*.py")]):
        digest.update(path.read_bytes())
    if LINES.exists():
        kept = json.loads(LINES.read_text())
        if kept["digest"] == digest.hexdigest():
            found: Record = kept["tests"]
            return found
    out = folder / "lines.json"
    options = ("-p", "tools.lines", "--lines-of", PACKAGE, "--lines-to", str(out), *tests)
    print("recording which lines each test runs", flush=True)
    python = (sys.executable, "-B", "-m", "pytest", *_PYTEST)
    subprocess.run([*python, *options], cwd=folder, check=True)
    lines = map(json.loads, out.read_text(encoding="utf-8").splitlines())
    found = {test.pop("test"): test for test in lines}
    LINES.parent.mkdir(parents=True, exist_ok=True)
    LINES.write_text(json.dumps({"digest": digest.hexdigest(), "tests": found}))
    return found


def run_mutant(mutant: Mutant, folder: Path, tests: Sequence[str], limit: float) -> str:
    """Run tests of a mutant in a copy of the repository.

    Returns:
        "noticed", "unnoticed" or "too slow".
    """
    file = folder / mutant.file
    source = file.read_text(encoding="utf-8")
    (folder / "chosen.txt").write_text("\n".join(tests), encoding="utf-8")
    process = _FORKS.Process(target=_run_pytest, args=(folder, [*_PYTEST, "-x", "@chosen.txt"]))
    try:
        file.write_text(mutated(source, mutant.index)[0], encoding="utf-8")
        process.start()
        process.join(limit)
        if process.is_alive():
            os.killpg(process.pid or 0, signal.SIGKILL)
            return "too slow"
    finally:
        file.write_text(source, encoding="utf-8")
    return "unnoticed" if process.exitcode == 0 else "noticed"


def _run_pytest(folder: Path, options: list[str]) -> None:
    """Run tests in this process, which ends."""
    os.setsid()
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    sys.dont_write_bytecode = True
    with open(folder / "said.txt", "w") as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
        sys.exit(int(pytest.main(options)))


def _copy_repository(folder: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__", ".venv")
    for name in _COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=ignored)
        elif source.exists():
            shutil.copy(source, folder / name)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.mutants", description=__doc__)
    parser.add_argument("--only", default=PACKAGE, help="start of the files' paths")
    parser.add_argument("--size", type=int, default=20, help="mutants drawn (default: 20)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw")
    parser.add_argument("--budget", type=float, default=60.0,
                        help="seconds of tests that a mutant gets (default: 60)")  # fmt: skip
    options = parser.parse_args(argv)
    files = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / PACKAGE).rglob("*.py"))]
    files = [file for file in files if file.startswith(options.only) and tests_of(file)]
    trees = {file: ast.parse((ROOT / file).read_text(encoding="utf-8")) for file in files}
    places = [(file, index) for file in files for index, _ in enumerate(changes(trees[file]))]
    if not places:
        parser.error(f"--only: no file that has tests starts with {options.only!r}")
    random.Random(options.seed).shuffle(places)
    drawn = [mutant(*place) for place in places[: options.size]]
    unnoticed = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _copy_repository(folder)
        record = recorded(folder, sorted({x for change in drawn for x in tests_of(change.file)}))
        for change in drawn:
            tests = tests_for(change, record, options.budget)
            # Importing torch and diffusers, and a machine that is busier than it was.
            limit = 120 + 4 * options.budget
            verdict = run_mutant(change, folder, tests, limit) if tests else "unnoticed"
            where = f"{change.file}:{change.line} {change.before} -> {change.after}"
            print(f"{verdict:10} {where}", flush=True)
            unnoticed += verdict == "unnoticed"
    return int(unnoticed > 0)


if __name__ == "__main__":
    sys.exit(main())
