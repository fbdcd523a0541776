"""Public names of a package that load on first use."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module

from turbo_rcm_patch.extras import missing


def loading_names(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], object], list[str]]:
    """Return the `__getattr__` of a package, which loads a name when it is first used, and its
    `__all__`. A type checker reads the package's imports under TYPE_CHECKING instead.

    Args:
        package: Its name.
        homes: Submodule -> names that it defines, separated by spaces.
    """
    home = {name: module for module, names in homes.items() for name in names.split()}

    def find(name: str) -> object:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            value: object = getattr(import_module(f"{package}.{home[name]}"), name)
        except ModuleNotFoundError as error:
            raise missing(f"{package}.{name}", str(error.name).partition(".")[0]) from error
        setattr(sys.modules[package], name, value)
        return value

    return find, sorted(home)
