"""Break the package in many places, one at a time, and see if a test notices.

    python -m tools.mutants --size 40 --only turbo_rcm_patch/patching
    python -m tools.mutants --list

Each mutant changes one node of one file in a copy of the repository, where the tests of that file
run. A mutant that no test notices shows a promise without a test. Exit code 1 if any is left.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["Mutant", "changes", "count", "main", "mutant", "run_mutant", "tests_of"]

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "turbo_rcm_patch"
#: The start of a file's path -> the tests that should notice; the first entry that fits is used.
TESTS = {
    "turbo_rcm_patch/patching/guard.py": ("tests/patching/test_guard.py",),
    "turbo_rcm_patch/patching/measure.py": ("tests/patching/test_guard.py",),
    "turbo_rcm_patch/patching/int8": ("tests/patching/test_int8.py",),
    "turbo_rcm_patch/patching/ulysses.py": ("tests/patching/test_ulysses.py",),
    "turbo_rcm_patch/patching/vae.py": ("tests/patching/test_vae.py",),
    "turbo_rcm_patch/patching/families/vae": ("tests/patching/test_vae.py",),
    "turbo_rcm_patch/patching/families": tuple(
        f"tests/patching/test_{name}.py"
        for name in ("calls", "families", "foreign", "relatives", "changes")
    ),
    **dict.fromkeys(
        ("turbo_rcm_patch/patching/block.py", "turbo_rcm_patch/patching/p"),
        tuple(
            f"tests/patching/test_{name}.py"
            for name in ("calls", "families", "foreign", "undo", "refusals", "changes", "guard")
        ),
    ),
    "turbo_rcm_patch/patching/record.py": ("tests/patching/test_undo.py",),
    "turbo_rcm_patch/patching/report.py": (
        "tests/patching/test_reports.py", "tests/patching/test_guard.py",
    ),
    "turbo_rcm_patch/patching": ("tests/patching",),
    "turbo_rcm_patch/ops": ("tests/ops",),
    "turbo_rcm_patch/models": ("tests/models",),
    "turbo_rcm_patch/checkpoints": ("tests/checkpoints",),
    "turbo_rcm_patch/video/verdict.py": ("tests/video/test_verdict.py",),
    "turbo_rcm_patch/video": ("tests/video",),
    "turbo_rcm_patch/config.py": ("tests/test_config.py", "tests/patching/test_refusals.py"),
}  # fmt: skip
_COPIED = ("turbo_rcm_patch", "tests", "examples", "pyproject.toml", "README.md")
_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult,
}  # fmt: skip
_DTYPES = {"float32": "bfloat16", "bfloat16": "float32", "float64": "float32", "int32": "int16"}

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
                yield node, _setter(node, "values", _without(node.values, index))
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


def _without(values: list[ast.expr], index: int) -> list[ast.expr]:
    return values[:index] + values[index + 1 :]


def _setter(node: ast.AST, name: str, value: object) -> Change:
    return lambda: setattr(node, name, value)


def mutated(source: str, index: int) -> tuple[str, int, str, str]:
    """The source after one change, the line, and the node before and after."""
    tree = ast.parse(source)
    node, change = list(changes(tree))[index]
    before = ast.unparse(copy.deepcopy(node))
    change()
    after = ast.unparse(node)
    return ast.unparse(ast.fix_missing_locations(tree)), getattr(node, "lineno", 0), before, after


def mutant(file: str, index: int, root: Path = ROOT) -> Mutant:
    """One mutant of a file."""
    source = (root / file).read_text(encoding="utf-8")
    _, line, before, after = mutated(source, index)
    return Mutant(file, index, line, before[:120], after[:120])


def count(file: str, root: Path = ROOT) -> int:
    """The number of mutants of a file."""
    return len(list(changes(ast.parse((root / file).read_text(encoding="utf-8")))))


def tests_of(file: str) -> tuple[str, ...]:
    """Tests that should notice a change of a file; empty if there are none."""
    for start, tests in TESTS.items():
        if file.startswith(start):
            return tests
    return ()


def run_mutant(mutant: Mutant, folder: Path, tests: Sequence[str], limit: float) -> str:
    """Run the tests of a mutant in a copy of the repository.

    Returns:
        "noticed", "unnoticed" or "too slow".
    """
    file = folder / mutant.file
    source = file.read_text(encoding="utf-8")
    try:
        file.write_text(mutated(source, mutant.index)[0], encoding="utf-8")
        return _run_tests(folder, tests, limit)
    finally:
        file.write_text(source, encoding="utf-8")


def _run_tests(folder: Path, tests: Sequence[str], limit: float) -> str:
    command = [
        sys.executable, "-B", "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider",
        "-m", "not gpu and not interpreter", *tests,
    ]  # fmt: skip
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return "too slow"
    return "unnoticed" if done.returncode == 0 else "noticed"


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
    parser.add_argument("--limit", type=float, default=600.0, help="seconds a mutant gets")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--list", action="store_true", help="list the mutants and run none")
    given = parser.parse_args(argv)
    paths = sorted((ROOT / PACKAGE).rglob("*.py"))
    files = [path.relative_to(ROOT).as_posix() for path in paths]
    files = [file for file in files if file.startswith(given.only) and tests_of(file)]
    places = [(file, index) for file in files for index in range(count(file))]
    if not places:
        parser.error(f"--only: no file that has tests starts with {given.only!r}")
    random.Random(given.seed).shuffle(places)
    drawn = [mutant(*place) for place in places[: given.size]]
    results = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if not given.list:
            _copy_repository(folder)
            for tests in sorted({tests_of(one.file) for one in drawn}):
                if _run_tests(folder, tests, given.limit) != "unnoticed":
                    parser.error(f"{' '.join(tests)}: fails or is over --limit without a mutant")
        for one in drawn:
            start, verdict = time.monotonic(), "listed"
            if not given.list:
                verdict = run_mutant(one, folder, tests_of(one.file), given.limit)
            print(f"{verdict:10} {one.file}:{one.line} {one.before} -> {one.after}")
            seconds = round(time.monotonic() - start, 1)
            results.append(asdict(one) | {"verdict": verdict, "seconds": seconds})
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps({"seed": given.seed, "mutants": results}, indent=1))
    return int(any(result["verdict"] == "unnoticed" for result in results))


if __name__ == "__main__":
    sys.exit(main())
