"""The import arrows of the design, read from the syntax tree: imports point down only."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "turbo_rcm_patch"
FILES = sorted(PACKAGE.rglob("*.py"))

WORDS = {"errors", "extras", "config", "lazy", "skip", "boundary", "exit_codes", "output"}
BELOW_SAMPLING = WORDS | {"ops", "models", "patching", "turbodiffusion"}
#: Which parts of the package a part may import (itself always).
MAY_IMPORT = {
    "errors": set(),
    "lazy": set(),
    "config": {"errors"},
    "skip": {"errors", "config"},
    "boundary": {"errors", "config", "skip"},
    "extras": {"errors"},
    "exit_codes": {"errors"},
    "output": {"errors"},
    "usage": set(),
    "kernels": {"errors"},
    "ops": WORDS | {"kernels"},
    "models": WORDS | {"ops"},
    "patching": WORDS | {"ops", "models"},
    "turbodiffusion": WORDS | {"ops", "patching"},
    "tiny": {"errors"},  # where the shipped weights lie, and their world
    "video": BELOW_SAMPLING | {"tiny"},
    "bench": BELOW_SAMPLING | {"video"},
    "tune": BELOW_SAMPLING | {"video", "bench", "kernels"},
}
#: Packages that only some parts may import.
ONLY_IN = {
    "turbowan": set(),  # of the examples
    "triton": {"kernels"},
    "diffusers": {"patching/families", "patching/backend.py", "video"},
    "transformers": {"video"},
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
        assert part in {"__init__", "__main__", "demo"}, f"{part} is in no layer"
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
    families = PACKAGE / "patching" / "families"
    modules = {p.stem for p in families.glob("*.py") if not p.stem.startswith("_")}
    for path in families.glob("*.py"):
        if path.stem.startswith("_"):
            continue
        for name in imported(path):
            if name.startswith("turbo_rcm_patch.patching.families."):
                other = name.split(".")[3]
                # A family may be split: wan.py and wan_block.py are one.
                same = path.stem.split("_")[0] == other.split("_")[0]
                assert same or other not in modules, f"{path.stem} imports {other}"
