"""Attention for programs that serve videos: one file for each engine.

An engine's file imports the engine, so the engine imports it, or its user does. Nothing else in
the package imports any of this, except the command `as-sageattention`.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Final

from turbo_rcm_patch.errors import ConfigError, MissingPackageError

#: "1": plug-ins serve the engine in which they are installed.
SWITCH: Final = "TURBO_RCM_PATCH"
#: "1": a long attention that our kernels do not compute is an error.
REQUIRE: Final = "TURBO_RCM_PATCH_REQUIRE"
#: "1": an installed sageattention is hidden.
REPLACE: Final = "TURBO_RCM_PATCH_REPLACE"
#: Holds a package `sageattention` and its metadata, to be put on the path of Python.
STAND_IN: Final = Path(__file__).parent / "stand_in"


def switched_on(name: str = SWITCH) -> bool:
    """Return True if the environment sets one of the switches."""
    return os.environ.get(name) == "1"


def say(text: str) -> None:
    """Write a line to the log, with the process.

    Engines configure their own loggers alone, so this one has a handler of its own.
    """
    log = logging.getLogger(__name__)
    if not log.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("turbo_rcm_patch [%(process)d] %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False
    log.info(text)


@contextmanager
def imports_of(engine: str, release: str) -> Iterator[None]:
    """Name the engine, and the release that its file was written against, if an import fails.

    Raises:
        MissingPackageError: It fails.
    """
    try:
        yield
    except ImportError as error:
        raise MissingPackageError(
            f"turbo_rcm_patch's attention for {engine}", expected=f"{engine} to be installed",
            got=str(error), remedy=f"Import it where {engine} runs; it was tried with {release}",
        ) from error  # fmt: skip


def refuse_installed(stand_in: str) -> None:
    """Refuse to hide a sageattention that lies elsewhere on the path.

    Raises:
        ConfigError: There is one.
    """
    elsewhere = [path for path in sys.path if path != stand_in]
    spec = PathFinder.find_spec("sageattention", elsewhere)
    if spec is not None:
        raise ConfigError(
            "the package sageattention", expected="none to be installed", got=str(spec.origin),
            remedy="Hide it with as-sageattention --replace -- COMMAND, or run COMMAND alone",
        )  # fmt: skip
