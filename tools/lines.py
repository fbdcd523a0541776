"""A plugin of pytest that records which lines of a package each test runs, and for how long.

    python -m pytest -p tools.lines --lines-of PACKAGE --lines-to FILE

Lines that a compiler takes and those of other processes are not seen. Caches of functions are
emptied before each test, so that each runs what it needs.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--lines-of", type=Path)
    parser.addoption("--lines-to", type=Path)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--lines-to"):
        config.pluginmanager.register(
            Lines(config.rootpath, config.getoption("--lines-of"), config.getoption("--lines-to"))
        )


class Lines:
    """Traces the lines of a package while a test runs."""

    def __init__(self, root: Path, package: Path, out: Path) -> None:
        self._root, self._of, self._out = f"{root}/", str(root / package), out
        self._package = package.name

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] == self._package:
                for value in vars(module).values():
                    getattr(value, "cache_clear", lambda: None)()
        seen: defaultdict[str, set[int]] = defaultdict(set)

        def line(frame: FrameType, event: str, arg: Any) -> Any:
            seen[frame.f_code.co_filename].add(frame.f_lineno)
            return line

        def call(frame: FrameType, event: str, arg: Any) -> Any:
            return line if frame.f_code.co_filename.startswith(self._of) else None

        start = time.perf_counter()
        sys.settrace(call)
        threading.settrace(call)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]
            one = {
                "test": item.nodeid,
                "seconds": round(time.perf_counter() - start, 3),
                "lines": {name.removeprefix(self._root): sorted(n) for name, n in seen.items()},
            }
            with self._out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(one) + "\n")
