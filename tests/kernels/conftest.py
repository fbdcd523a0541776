"""Options of the kernel tests."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--aot-python",
        default=None,
        help="compile ahead of time with the Triton of this Python as well (torch is not needed)",
    )
