"""Options of a command line, declared as lines of usage."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from turbo_rcm_patch.usage import read_path

Types = Mapping[str, Callable[[str], object]]
#: What reads a value, by the word that a line of usage has for it.
_TYPES: Final[Types] = (
    dict.fromkeys(("N",), int)
    | dict.fromkeys(("S", "E", "R", "SHARE", "SECONDS", "MINUTES"), float)
    | dict.fromkeys(("FILE", "FOLDER", "PTH", "SOURCE", "OUT"), read_path)
    | dict.fromkeys(("TEXT", "NAME", "DEVICE", "SIZE", "PLACE", "PATH", "DIR"), str)
    | dict.fromkeys(("PATH_OR_ID", "FOLDER_OR_HUB_ID"), str)
)


def add_options(
    to: argparse._ActionsContainer,
    options: Mapping[str, str],
    types: Types = MappingProxyType({}),
    **defaults: object,
) -> None:
    """Add options that are declared as lines of usage.

    Args:
        to: A command, or a group of its options.
        options: Usage -> help. "--force" is a switch, "--steps N" takes a value,
            "--form {sde,ode}" one of several, and "--prompt TEXT ..." may be repeated.
        types: Further words for values, with what reads them.
        defaults: By name.

    Raises:
        KeyError: A word that nothing reads: a misspelt one would make a number a text.
    """
    readers = {**_TYPES, **types}
    for usage, text in options.items():
        flag, value, *repeated = (*usage.split(" "), "")
        name = flag.lstrip("-").replace("-", "_")
        more: dict[str, Any] = {"default": defaults[name]} if name in defaults else {}
        if value.startswith("{"):
            more["choices"] = tuple(value[1:-1].split(","))
        elif value:
            if value.isidentifier() and value not in readers:
                raise KeyError(value)
            more |= {"metavar": value, "type": readers.get(value, str)}
        else:
            more["action"] = "store_true"
        if "..." in repeated:
            more["action"] = "append"
        to.add_argument(flag, help=text, **more)
