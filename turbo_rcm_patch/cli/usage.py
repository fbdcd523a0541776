"""Options of a command line, made from the fields of a dataclass."""

from __future__ import annotations

import argparse
import difflib
import inspect
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, Field, fields
from functools import partial
from pathlib import Path
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

Names = Mapping[str, str]
_SAME: Final[Names] = MappingProxyType({})

#: The word for a value in `--help`, by its type.
_WORDS: Final = {int: "N", float: "X", str: "TEXT", Path: "PATH", NoneType: "none"}


def add_fields(to: argparse._ActionsContainer, cls: type, names: Names = _SAME) -> None:
    """Add an option for each field of a dataclass, without those of its bases.

    Type, choices and default are the field's; the help is its entry under `Attributes:` in the
    docstring. A field without a default is a positional argument. A switch that is on by default
    has `--name` and `--no-name`, and the option of a tuple is given once for each entry. An option
    that is not given is absent from the result of the parser.

    Metadata of a field: "metavar", the word for its value; "hidden", it has no option.

    Args:
        to: A command, or a group of its options.
        cls: The dataclass.
        names: Field -> name of its option where they differ, "" for none.
    """
    hints, texts = get_type_hints(cls), _field_texts(cls)
    for field in fields(cls):
        name = names.get(field.name, field.name)
        of_base = field.name not in inspect.get_annotations(cls)
        if not name or of_base or field.metadata.get("hidden"):
            continue
        more = _argument(hints[field.name], field) | {"help": _help(texts[field.name], field)}
        if field.default is MISSING and field.default_factory is MISSING:
            to.add_argument(name, **more)
        else:
            flag = f"--{name.replace('_', '-')}"
            to.add_argument(flag, dest=name, default=argparse.SUPPRESS, **more)


def given_fields(arguments: argparse.Namespace, cls: type, names: Names = _SAME) -> dict[str, Any]:
    """Return the fields of a dataclass for which the parser has found an option."""
    options = {field.name: names.get(field.name, field.name) for field in fields(cls)}
    values = {
        name: vars(arguments)[option] for name, option in options.items() if option in arguments
    }
    return {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}


class Parser(argparse.ArgumentParser):
    """A parser that suggests the nearest option for one that does not exist."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse, and refuse what is not known: the commands are parsed by this method too."""
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            name = unknown[0].partition("=")[0]
            near = difflib.get_close_matches(name, self._option_string_actions, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return parsed, unknown


def _field_texts(cls: type) -> dict[str, str]:
    """Return the entries under `Attributes:` of a dataclass, each as one line."""
    _, _, section = inspect.cleandoc(cls.__doc__ or "").partition("\nAttributes:\n")
    entries = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", section, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}


def _help(text: str, field: Field[Any]) -> str:
    default = "on" if field.default is True else field.default
    shown = isinstance(default, str | int | float | Path) and default is not False
    return (text + f" (default: {default})" * (shown and default != "")).replace("%", "%%")


def _argument(hint: Any, field: Field[Any]) -> dict[str, Any]:
    """Return the part of an argument that the type decides."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if bool in kinds:
        switch = field.default is False
        return {"action": "store_true" if switch else argparse.BooleanOptionalAction}
    argument: dict[str, Any] = {}
    if get_origin(hint) is tuple:
        kinds, argument = get_args(hint)[:1], {"action": "append"}
    shown = [kind for kind in kinds if kind is not NoneType or field.default is not None]
    word = field.metadata.get("metavar") or "|".join(map(_word, shown))
    return argument | {"type": partial(_read, kinds), "metavar": word}


def _word(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "{" + ",".join(map(str, get_args(kind))) + "}"
    return _WORDS[kind]


def _read(kinds: Sequence[Any], text: str) -> object:
    """Read a value as the first of these types that takes it."""
    for kind in kinds:
        with suppress(ValueError):
            if kind is Path and not text:
                raise argparse.ArgumentTypeError("an empty path; is a variable not set?")
            if kind in (int, float, str, Path):
                return kind(text)
            if kind is NoneType and text == "none":
                return None
            if text in get_args(kind):
                return text
    words = "|".join(map(_word, kinds))
    raise argparse.ArgumentTypeError(f"expected {words}, got {text!r}")
