"""Fingerprints of the forwards that a family was written against."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from turbo_rcm_patch.errors import FamilyError

__all__ = ["check_parameters"]


def check_parameters(expected: Mapping[Callable[..., Any], tuple[str, ...]], package: str) -> None:
    """Compare parameter names, in order.

    Args:
        expected: Function -> the names of its parameters.
        package: The package they come from, for the message.

    Raises:
        FamilyError: A function takes other parameters than the family knows.
    """
    for function, names in expected.items():
        found = tuple(inspect.signature(function).parameters)
        if found != names:
            raise FamilyError(
                getattr(function, "__qualname__", repr(function)),
                expected=f"({', '.join(names)})",
                got=f"({', '.join(found)})",
                remedy=f"Install a version of {package} that this release supports",
            )
