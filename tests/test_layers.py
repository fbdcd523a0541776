"""The shape of the package, read from the syntax tree: imports point down."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

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
    {"errors", "text", "extras", "interrupts", "output", "files", "lazy"},
    {"config", "skip", "boundary"},
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
