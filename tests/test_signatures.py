"""Values have names: no signature and no call is so long that a reader counts commas."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import turbo_rcm_patch

#: Most named parameters of a Python function, entries of a jit function (a tuple counts as one),
#: and values that a call hands over by position, kernels aside.
_PARAMETERS, _ENTRIES, _POSITIONAL = 15, 20, 8
_SOURCE = Path(turbo_rcm_patch.__file__).parent
_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def _entries(function: _Function) -> int:
    given = function.args
    return len(given.posonlyargs) + len(given.args) + len(given.kwonlyargs)


def _is_jit(node: ast.AST) -> bool:
    decorators = getattr(node, "decorator_list", [])
    return any("jit" in ast.unparse(one).partition("(")[0].split(".") for one in decorators)


def _too_long(source: str) -> Iterator[tuple[str, int]]:
    """Find what is too long, as a description and a line; kernels may hand over more."""
    kernels: list[tuple[int, int]] = []
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, _Function):
            name, jit = getattr(node, "name", "lambda"), _is_jit(node)
            most = _ENTRIES if jit else _PARAMETERS
            if _entries(node) > most:
                yield f"{name} takes {_entries(node)}", node.lineno
            if jit:
                kernels.append((node.lineno, node.end_lineno or node.lineno))
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or len(node.args) <= _POSITIONAL:
            continue
        if not any(first <= node.lineno <= last for first, last in kernels):
            yield f"{ast.unparse(node.func)} gets {len(node.args)} by position", node.lineno


def test_no_signature_and_no_call_is_too_long() -> None:
    found = [
        f"{path.relative_to(_SOURCE)}:{line}: {what}"
        for path in sorted(_SOURCE.rglob("*.py"))
        for what, line in _too_long(path.read_text())
    ]
    assert not found, "\n".join(found)


def test_what_is_too_long_is_found() -> None:
    names = ", ".join(f"x{i}" for i in range(16))
    more = names + ", *rest, a, b, c, d, e"
    assert not list(_too_long(f"@triton.jit(f=1)\ndef kernel({names}):\n    g({names})"))
    found = list(_too_long(
        f"def f({names}): ...\n@gluon.jit\ndef kernel({more}): ...\ng({names})\nlambda {names}: 0"
    ))  # fmt: skip
    assert [line for _, line in found] == [1, 3, 5, 4]
