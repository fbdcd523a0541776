"""The shape of the package, read from the syntax tree: imports point down, calls name values."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from turbo_rcm_patch.patching.find import FAMILIES, STRUCTURES

PACKAGE = Path(__file__).parents[1] / "turbo_rcm_patch"
MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(
        ".__init__"
    ): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}

#: A row may import itself and the rows above it, and "engines" only what its row says.
LAYERS = [
    {
        "errors",
        "extras",
        "interrupts",
        "output",
        "files",
        "lazy",
        "config",
        "skip",
        "boundary",
        "text",
    },
    {"ops"},
    {"models", "diffusers_backend", "tiny"},
    {"patching"},
    {"checkpoints", "diffusers_parallel", "engines"},
    {"video"},
    {"cli"},
]
LAYER_OF = {part: i for i, layer in enumerate(LAYERS) for part in layer}
#: Packages that only some parts may import. The last ones lie around the package.
ONLY_IN = {
    "triton": {"ops"},
    "diffusers": {
        *("patching.families", "diffusers_backend", "diffusers_parallel", "video"),
        "checkpoints.int8_folder",
    },
    "transformers": {"video"},
    **dict.fromkeys(("sglang", "vllm_omni", "xfuser", "lightx2v"), {"engines"}),
    **dict.fromkeys(("benchmarks", "training", "integrations", "tests"), set()),
}


def imports(name: str, *, at_import: bool = False) -> Iterator[str]:
    """Full names of what a module imports; with `at_import` only when it is imported itself."""
    waiting: list[ast.AST] = [TREES[name]]
    while waiting:
        node = waiting.pop()
        lazy = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        typing_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if at_import and (lazy or typing_only):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name} imports by a relative name"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        waiting += ast.iter_child_nodes(node)


def test_imports_point_down() -> None:
    for name in MODULES:
        part = name.partition(".")[2].partition(".")[0]
        if part in ("", "__main__"):
            continue
        assert part in LAYER_OF, f"{part} is in no layer"
        for other in imports(name):
            head, _, rest = other.partition(".")
            target = rest.partition(".")[0]
            if head == "turbo_rcm_patch" and target in LAYER_OF:
                assert LAYER_OF[target] <= LAYER_OF[part], f"{name} imports {other}"
            places = ONLY_IN.get(head)
            inside = any(f"{name}.".startswith(f"turbo_rcm_patch.{p}.") for p in places or ())
            assert places is None or inside, f"{name} imports {other}"


def test_a_family_builds_on_no_other_unless_its_name_says_so() -> None:
    families = set(FAMILIES.values()) | set(STRUCTURES.values())
    start = "turbo_rcm_patch.patching.families."
    for family in families:
        for name in imports(start + family):
            other = name.removeprefix(start).partition(".")[0]
            known = name.startswith(start) and other in families
            assert not known or family.startswith(other), f"{family}: {other}"


def test_no_import_goes_in_a_circle() -> None:
    needs = {}
    for name, path in MODULES.items():
        if path.name != "__init__.py":
            wanted = set(imports(name, at_import=True))
            wanted |= {other.rpartition(".")[0] for other in wanted if other not in MODULES}
            needs[name] = wanted & set(MODULES)
    while needs:  # Take away what needs nothing that is left.
        free = {name for name, others in needs.items() if not others & (set(needs) - {name})}
        assert free, f"imports go in circles among {sorted(needs)}"
        needs = {name: others for name, others in needs.items() if name not in free}


#: Most parameters of a Python function and of a jit function (a tuple counts as one), and values
#: that a call hands over by position, kernels aside.
PARAMETERS, ENTRIES, POSITIONAL = 15, 20, 8


@pytest.mark.parametrize("name", MODULES)
def test_no_signature_and_no_call_is_too_long(name: str) -> None:
    kernels: list[ast.AST] = []
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            decorators = [ast.unparse(one) for one in getattr(node, "decorator_list", [])]
            jit = any("jit" in one.partition("(")[0].split(".") for one in decorators)
            kernels += [node] * jit
            given = node.args
            count = len(given.posonlyargs) + len(given.args) + len(given.kwonlyargs)
            assert count <= (ENTRIES if jit else PARAMETERS), f"{name}:{node.lineno}: {count}"
    inside = {id(node) for kernel in kernels for node in ast.walk(kernel)}
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Call) and id(node) not in inside:
            assert len(node.args) <= POSITIONAL, f"{name}:{node.lineno}: {len(node.args)}"
