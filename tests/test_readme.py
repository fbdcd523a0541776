"""The README's Python blocks run, or at least compile.

A block is executed, unless the line before it is a comment `<!-- not run: reason -->` (a GPU, a
download); such blocks are compiled only. Blocks of the README share one namespace, in order, as a
reader would type them.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
BLOCK = re.compile(
    r"(?:^<!--[ ]*not[ ]run:(?P<reason>[^\n]*?)-->\s*\n)?^```python[^\n]*\n(?P<code>.*?)^```[ ]*$",
    re.MULTILINE | re.DOTALL,
)


def blocks(text: str) -> list[tuple[str, str]]:
    """(code, reason not to run it, or "") of every Python block."""
    return [(m["code"], (m["reason"] or "").strip()) for m in BLOCK.finditer(text)]


def readme_blocks() -> list[tuple[str, str]]:
    return blocks(README.read_text(encoding="utf-8"))


def test_blocks_are_found_with_their_reasons() -> None:
    first = "a\n```python\nx = 1\n```\n"
    second = "<!-- not run: needs a GPU -->\n```python\ny\n```\n```sh\nls\n```\n"
    assert blocks(first + second) == [("x = 1\n", ""), ("y\n", "needs a GPU")]
    text = "<!-- not run: far away -->\n\nwords\n```python\nz\n```\n"
    assert blocks(text) == [("z\n", "")]


@pytest.mark.parametrize("index", range(len(readme_blocks())))
def test_block_compiles(index: int) -> None:
    code, _ = readme_blocks()[index]
    compile(code, f"README.md block {index + 1}", "exec")


@pytest.mark.slow
def test_blocks_run_in_order(tmp_path: Path) -> None:
    runnable = [code for code, reason in readme_blocks() if not reason]
    assert runnable, "the README shows how to use the library"
    script = tmp_path / "readme.py"
    script.write_text("\n\n".join(runnable), encoding="utf-8")
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-4000:]
