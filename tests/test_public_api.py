"""The public API loses no name by accident, and its version is the same everywhere.

`python tests/test_public_api.py` adds new names to docs/public_api.txt; it never removes one.
"""

from __future__ import annotations

import re
import sys
import tomllib
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIST = ROOT / "docs" / "public_api.txt"


def exported() -> set[str]:
    """Every name in `__all__` of the modules that the Makefile calls the API."""
    line = re.search(r"^API := (\S+) \$\(addprefix \S+, (.*)\)$",
                     (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)  # fmt: skip
    assert line is not None
    modules = [line[1], *(f"{line[1]}.{part}" for part in line[2].split())]
    return {f"{one}.{name}" for one in modules for name in import_module(one).__all__}


def listed() -> set[str]:
    return {line for line in LIST.read_text("utf-8").splitlines() if not line.startswith("#")}


def test_no_public_name_is_gone() -> None:
    gone = sorted(listed() - exported())
    assert not gone, f"{gone}: CHANGELOG.md says so under Changed, then {LIST.name} forgets them"
    assert len(listed()) > 50


def test_the_version_is_the_same_everywhere() -> None:
    import turbo_rcm_patch

    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["version"] == turbo_rcm_patch.__version__
    changes = (ROOT / "CHANGELOG.md").read_text("utf-8")
    headings = re.findall(r"^## (.*)$", changes, re.MULTILINE)
    assert headings[0] in ("Unreleased", project["version"])


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    about = "# The public API: see CHANGELOG.md. Written by `python tests/test_public_api.py`.\n"
    names = exported() | (listed() if LIST.exists() else set())
    LIST.write_text(about + "".join(f"{name}\n" for name in sorted(names)), "utf-8")
