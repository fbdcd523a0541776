"""`make docs` writes an API reference in which every public name has a description."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def modules() -> list[str]:
    """The modules that the Makefile names."""
    line = re.search(r"^API := (.*)$", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    assert line
    whole = re.sub(r"\$\(addprefix (\S+?), (.*)\)", r"\1 \2", line[1])
    package, prefix, *names = whole.split()
    return [package, *(prefix + name for name in names)]


@pytest.mark.parametrize("name", modules())
def test_every_public_name_has_a_docstring(name: str) -> None:
    module = import_module(name)
    assert module.__doc__, name
    for public in module.__all__:
        value = getattr(module, public)
        if callable(value) and getattr(value, "__module__", "").startswith("turbo_rcm_patch"):
            assert value.__doc__, f"{name}.{public}"


@pytest.mark.slow
def test_the_reference_builds(tmp_path: Path) -> None:
    pytest.importorskip("pdoc")
    command = [sys.executable, "-m", "pdoc", "-d", "google", "-o", str(tmp_path), *modules()]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    pages = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.html")}
    for name in modules():
        assert f"{name.replace('.', '/')}.html" in pages, name
    page = (tmp_path / "turbo_rcm_patch.html").read_text("utf-8")
    for name in import_module("turbo_rcm_patch").__all__:
        assert f'id="{name}"' in page, name
