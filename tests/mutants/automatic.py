"""Mutants made from the syntax tree: flipped comparisons, changed constants, dropped statements,
swapped operands."""

from __future__ import annotations

import ast
import copy
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

__all__ = ["ROOT", "Mutant", "mutated", "sample", "sources"]

ROOT = Path(__file__).parents[2]
#: What is mutated, with its share of a sample.
PARTS = {
    "turbo_rcm_patch/patching": 0.52,
    "turbo_rcm_patch/ops": 0.35,
    "turbo_rcm_patch/video/verdict.py": 0.08,
    "turbo_rcm_patch/video/many.py": 0.05,
}
_COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_OTHER: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Mult: ast.Add, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
_SWAPPED = (ast.Sub, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.MatMult)


@dataclass(frozen=True)
class Mutant:
    """One change of one file.

    Attributes:
        file: From the root of the repository.
        line: Where the change is.
        index: Number among the changes of this file.
        before: The statement or expression as it is.
        after: As it becomes.
        key: What it is known by in a later version of the file; "" where nobody asks.
    """

    file: str
    line: int
    index: int
    before: str
    after: str
    key: str = field(default="", compare=False)

    @property
    def name(self) -> str:
        return f"{self.file}:{self.line}#{self.index}"


#: Changes a node in place.
Change = Callable[[], None]


def _changes(tree: ast.Module) -> Iterator[tuple[ast.AST, Change]]:
    """Every node that may change, and what changes it."""
    for node in _of_interest(tree):
        if isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARED:
            yield node, _setter(node, "ops", [_COMPARED[type(node.ops[0])](), *node.ops[1:]])
        elif isinstance(node, ast.BoolOp):
            yield (
                node,
                _setter(node, "op", ast.Or() if isinstance(node.op, ast.And) else ast.And()),
            )
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield node, _setter(node, "operand", ast.UnaryOp(ast.Not(), node.operand))
        elif isinstance(node, ast.BinOp) and isinstance(node.op, _SWAPPED):
            yield node, _swapper(node)
        elif isinstance(node, ast.BinOp) and type(node.op) in _OTHER:
            yield node, _setter(node, "op", _OTHER[type(node.op)]())
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield node, _setter(node, "value", not node.value)
        elif isinstance(node, ast.Constant) and isinstance(node.value, int):
            yield node, _setter(node, "value", node.value + 1)
        elif isinstance(node, ast.Constant) and isinstance(node.value, float):
            yield node, _setter(node, "value", node.value * 1.5 + 0.5 * (node.value == 0.0))
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield node, _setter(node, "value", ast.Constant(None))
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
            yield node, _dropper(node)
        elif isinstance(node, ast.AugAssign):
            yield (
                node,
                _setter(node, "op", ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()),
            )


def _of_interest(tree: ast.Module) -> Iterator[ast.AST]:
    """Nodes that do something: no types, no messages of errors, no documentation."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop(0)
        yield node
        skipped: set[int] = set()
        for name in ("annotation", "returns", "decorator_list", "type_comment"):
            held = getattr(node, name, None)
            skipped |= {id(one) for one in (held if isinstance(held, list) else [held])}
        if isinstance(node, ast.Raise | ast.Import | ast.ImportFrom | ast.Assert):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.ClassDef):
            skipped |= {id(base) for base in node.bases}
        waiting += [child for child in ast.iter_child_nodes(node) if id(child) not in skipped]


def _setter(node: ast.AST, name: str, value: object) -> Change:
    return lambda: setattr(node, name, value)


def _swapper(node: ast.BinOp) -> Change:
    def swap() -> None:
        node.left, node.right = node.right, node.left

    return swap


def _dropper(node: ast.Assign) -> Change:
    """`a.b = c` becomes `c`, which keeps what c does."""

    def drop() -> None:
        node.targets = [ast.Name("_dropped", ast.Store())]

    return drop


def mutated(file: str, index: int, key: str = "") -> tuple[ast.Module, Mutant]:
    """The tree of a file after one change."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    node, change = list(_changes(tree))[index]
    before, line = ast.unparse(copy.deepcopy(node)), getattr(node, "lineno", 0)
    change()
    after = ast.unparse(node)
    return ast.fix_missing_locations(tree), Mutant(
        file, line, index, before[:160], after[:160], key
    )


def sources(part: str) -> list[str]:
    """Files of a part."""
    path = ROOT / part
    files = [path] if path.is_file() else sorted(path.rglob("*.py"))
    return [str(file.relative_to(ROOT)) for file in files if file.name != "__init__.py"]


@functools.cache
def _keys(file: str) -> list[str]:
    """What each change of a file is known by, whatever is written above it: what it changes, and
    which of several such ones it is; "" for one that is not drawn."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    asserted = {
        id(node.value) for node in ast.walk(tree)
        if isinstance(node, ast.keyword) and node.arg == "strict"
    }  # fmt: skip
    seen: Counter[str] = Counter()
    keys = []
    for node, _ in _changes(tree):
        text = f"{file} {type(node).__name__} {ast.unparse(node)}"
        keys.append("" if id(node) in asserted else f"{text} {seen[text]}")
        seen[text] += 1
    return keys


def sample(seed: int, size: int) -> list[Mutant]:
    """Mutants drawn from all there are, by the shares of `PARTS`.

    There are none of zip's `strict=`, which like an assertion says what always holds.

    Each has a number that follows from its seed and its key, and the lowest ones are drawn. So a
    larger sample holds a smaller one, and a change of a file changes the sample by as much.
    """
    chosen: list[Mutant] = []
    for part, share in PARTS.items():
        places = [
            (sha256(f"{seed} {key}".encode()).digest(), key, file, index)
            for file in sources(part)
            for index, key in enumerate(_keys(file))
            if key
        ]
        drawn = sorted(places)[: round(size * share)]
        chosen += [mutated(file, index, key)[1] for _, key, file, index in drawn]
    return chosen
