"""The import arrows of the design, read from the syntax tree: imports point down only."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from turbo_rcm_patch.patching.find import FAMILIES, STRUCTURES

PACKAGE = Path(__file__).parents[1] / "turbo_rcm_patch"
FILES = sorted(PACKAGE.rglob("*.py"))

WORDS = {"errors", "extras", "config", "lazy", "skip", "boundary", "files", "interrupts"}
BELOW_VIDEO = WORDS | {
    *("ops", "models", "patching", "checkpoints", "diffusers_backend", "diffusers_parallel")
}
#: Which parts of the package a part may import (itself always).
MAY_IMPORT = {
    "errors": set(),
    "lazy": {"extras"},
    "config": {"errors"},
    "skip": {"errors", "config"},
    "boundary": {"errors", "config", "skip"},
    "extras": {"errors"},
    "interrupts": set(),
    "files": {"errors"},
    "ops": WORDS,
    "models": WORDS | {"ops"},
    "diffusers_backend": {"errors", "ops"},
    "patching": WORDS | {"ops", "models"},
    "diffusers_parallel": {"errors", "patching"},
    "checkpoints": WORDS | {"ops", "patching"},
    "engines": WORDS | {"ops"},  # no part imports it but `cli`, for the names of its switches
    "tiny": {"errors"},  # where the shipped weights lie, and their world
    "video": BELOW_VIDEO | {"tiny"},
    "cli": BELOW_VIDEO | {"tiny", "video", "engines"},
}
#: Packages that only some parts may import.
ONLY_IN = {
    "triton": {"ops"},
    "diffusers": {
        *("patching/families", "diffusers_backend.py", "diffusers_parallel.py", "video"),
        "checkpoints/int8_folder.py",
    },
    "transformers": {"video"},
    **dict.fromkeys(("sglang", "vllm_omni", "xfuser", "lightx2v"), {"engines"}),
    # These lie around the package and import it, never the other way.
    "benchmarks": set(),
    "training": set(),
    "integrations": set(),
    "tests": set(),
}


def imported(path: Path) -> Iterator[str]:
    """Full names of everything a file imports, at the top or inside a function."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = path.relative_to(PACKAGE.parent).parts[: -node.level]
                base = ".".join((*package, base)).rstrip(".")
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def part_of(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return relative.parts[0].removesuffix(".py")


def names(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


@pytest.mark.parametrize("path", FILES, ids=names)
def test_imports_point_down(path: Path) -> None:
    part = part_of(path)
    if part not in MAY_IMPORT:
        assert part in {"__init__", "__main__"}, f"{part} is in no layer"
        return
    allowed = MAY_IMPORT[part] | {part}
    for name in imported(path):
        head, *rest = name.split(".")
        ours = head == "turbo_rcm_patch" and rest
        if ours and any((PACKAGE / (rest[0] + end)).exists() for end in ("", ".py")):
            assert rest[0] in allowed, f"{names(path)} imports {name}"


@pytest.mark.parametrize("path", FILES, ids=names)
def test_heavy_packages_stay_in_their_parts(path: Path) -> None:
    for name in imported(path):
        places = ONLY_IN.get(name.split(".")[0])
        if places is not None:
            inside = any(names(path) == p or names(path).startswith(p + "/") for p in places)
            assert inside, f"{names(path)} imports {name}"


def test_families_do_not_import_each_other() -> None:
    families = set(FAMILIES.values()) | set(STRUCTURES.values())
    for family in families:
        path = PACKAGE / "patching" / "families" / f"{family}.py"
        for name in imported(path):
            if name.startswith("turbo_rcm_patch.patching.families."):
                other = name.split(".")[3]
                # A family may build on another: wan_vace on wan.
                assert other not in families or family.startswith(other), f"{family}: {other}"


def at_import(tree: ast.AST) -> Iterator[str]:
    """Modules of the package that a file imports when it is imported itself."""
    for node in ast.iter_child_nodes(tree):
        typing_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or typing_only:
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("turbo_rcm_patch"):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in MODULES else str(node.module)
        yield from at_import(node)


#: "turbo_rcm_patch.ops.residual.skip" -> its file.
MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(
        ".__init__"
    ): path
    for path in FILES
}


def test_no_import_goes_in_a_circle() -> None:
    needs = {
        name: set(at_import(ast.parse(path.read_text(encoding="utf-8")))) & set(MODULES)
        for name, path in MODULES.items()
        if path.name != "__init__.py"
    }
    while needs:  # Take away what needs nothing that is left.
        free = {name for name, others in needs.items() if not others & (set(needs) - {name})}
        assert free, f"imports go in circles among {sorted(needs)}"
        needs = {name: others for name, others in needs.items() if name not in free}
