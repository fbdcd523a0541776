"""The README in a release. `make dist` checks the rest of it: .ci/check_dist.py."""

from __future__ import annotations

import importlib.util
import re
import sys
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def module(path: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


CHECK = module(ROOT / ".ci" / "check_dist.py")


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """hatch_build.py, whose hatchling is there only while something is built."""
    name = ""
    for part in ("hatchling", "metadata", "plugin", "interface"):
        name = f"{name}.{part}".strip(".")
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules[name].MetadataHookInterface = object  # type: ignore[attr-defined]
    return module(ROOT / "hatch_build.py")


@pytest.mark.parametrize("repository", ["", "https://example.org/us/turbo_rcm_patch/"])
def test_no_link_of_the_readme_breaks_on_a_package_index(hook, repository: str) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    text = hook.portable(readme, repository, "1.2.3")
    places = re.findall(r"\]\(([^)\s]+)\)", text)
    assert all(place.startswith("https://") for place in places)
    before = len(re.findall(r"\]\(([^)\s]+)\)", readme))
    assert len(places) == (before if repository else before - len(CHECK.LINK.findall(readme)))
    if repository:
        root = "https://example.org/us/turbo_rcm_patch"
        assert f"[architecture]({root}/blob/v1.2.3/docs/ARCHITECTURE.md)" in text
        assert f"]({root}/raw/v1.2.3/docs/demo_sheet.png)" in text
    else:
        assert "architecture (`docs/ARCHITECTURE.md`)" in text
        assert "](docs" not in text and "![" not in text
    assert hook.portable("[a](https://b.c)", repository, "1") == "[a](https://b.c)"
