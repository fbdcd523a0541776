"""Text of others that is safe to show, and options by the names that a reader can type."""

from __future__ import annotations

import re
from typing import Final

#: Control characters, line separators, and characters that change the direction of writing.
_CONTROLS: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
#: An option as Python takes it, between backticks.
_OPTION: Final = re.compile(r"`(\w+)=(\w*|'[^'`]*')`")


def one_line(text: str) -> str:
    """Return a text on one line, of which a terminal shows every character and obeys none.

    File names and prompts may hold escape sequences, and line ends that would begin a line of
    their own in what is printed.
    """
    return _CONTROLS.sub(lambda match: ascii(match[0])[1:-1], text)


def printable(text: str) -> str:
    """Return a text of which a terminal obeys nothing but the ends of lines."""
    return "\n".join(map(one_line, text.split("\n")))


def as_typed(text: str) -> str:
    """Replace options as Python takes them by those of the command line.

    A text names an option as `guard=False` or `out=`, between backticks; the command line takes
    --no-guard and --out.
    """

    def typed(match: re.Match[str]) -> str:
        name, value = match[1].replace("_", "-"), match[2].strip("'")
        if value in ("True", "False"):
            return f"--{name}" if value == "True" else f"--no-{name}"
        return f"--{name} {value}".rstrip()

    return _OPTION.sub(typed, text)
