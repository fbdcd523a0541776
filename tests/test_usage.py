"""How options are made from the fields of a dataclass."""

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from turbo_rcm_patch.cli.usage import add_fields, given_fields


@dataclass
class Base:
    """A base.

    Attributes:
        steps: How many, 50% of
            them.
    """

    steps: int = 4


@dataclass
class Options(Base):
    """Options of every kind.

    Attributes:
        form: The form.
        limit: A number or none.
        out: The folder.
        guard: On.
        force: Off.
        number: Neither.
        lora: Many.
        kept: No option.
    """

    form: Literal["sde", "ode"] | None = None
    limit: float | None = 1.0
    out: Path = Path("outputs")
    guard: bool = True
    force: bool = False
    number: bool | None = None
    lora: tuple[str, ...] = field(default=(), metadata={"metavar": "PATH[:SCALE]"})
    kept: object = field(default=None, metadata={"hidden": True})


#: `form` has another option than its name, and `steps` may have none.
NAMES = {"form": "pair_form"}


def parser(**names: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="p")
    for cls in (Base, Options):
        add_fields(made, cls, NAMES | names)
    return made


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ([], {}),
        (["--steps", "3", "--limit", "2"], {"steps": 3, "limit": 2.0}),
        (["--pair-form", "ode", "--limit", "none"], {"form": "ode", "limit": None}),
        (["--no-guard", "--force", "--no-number"],
         {"guard": False, "force": True, "number": False}),
        (["--out", "a", "--lora", "a:0.5", "--lora", "b,c"],
         {"out": Path("a"), "lora": ("a:0.5", "b,c")}),
        (["--steps", "many"], "argument --steps: expected N, got 'many'"),
        (["--pair-form", "x"], "argument --pair-form: expected {sde,ode}|none, got 'x'"),
        (["--out", ""], "an empty path; is a variable not set?"),
        (["--kept", "1"], "unrecognized arguments: --kept"),
        (["--no-force"], "unrecognized arguments: --no-force"),
    ],
)  # fmt: skip
def test_an_option_takes_what_its_field_holds(given: list[str], read: Any, capsys) -> None:
    if isinstance(read, dict):
        assert given_fields(parser().parse_args(given), Options, NAMES) == read
    else:
        with pytest.raises(SystemExit):
            parser().parse_args(given)
        assert read in capsys.readouterr().err


def test_help_is_the_docstring_of_the_class() -> None:
    text = " ".join(parser().format_help().split())
    assert "--steps N How many, 50% of them. (default: 4)" in text
    assert "--pair-form {sde,ode} The form. --" in text
    assert "--limit X|none A number or none. (default: 1.0)" in text
    assert text.endswith("--lora PATH[:SCALE] Many.")
    assert "--steps" not in parser(steps="").format_help()
