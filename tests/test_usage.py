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
        times: A name or a list.
        shift: A number.
        limit: A number or none.
        out: The folder.
        image: A file.
        guard: On.
        force: Off.
        number: Neither.
        lora: Many.
        kept: No option.
    """

    form: Literal["sde", "ode"] | None = None
    times: Literal["lightning", "fastwan"] | tuple[float, ...] | None = None
    shift: float | None = None
    limit: float | None = 1.0
    out: Path = Path("outputs")
    image: tuple[Path, ...] | None = field(default=None, metadata={"repeated": True})
    guard: bool = True
    force: bool = False
    number: bool | None = None
    lora: tuple[str, ...] = field(
        default=(), metadata={"repeated": True, "metavar": "PATH[:SCALE]"}
    )
    kept: object = field(default=None, metadata={"hidden": True})


def parser(**names: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="p")
    add_fields(made, Options, names)
    return made


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("", {}),
        ("--steps 3 --shift 2", {"steps": 3, "shift": 2.0}),
        ("--form ode --times lightning", {"form": "ode", "times": "lightning"}),
        ("--times 1000,937.5", {"times": (1000.0, 937.5)}),
        ("--limit none", {"limit": None}),
        ("--out a --image b --image c", {"out": Path("a"), "image": (Path("b"), Path("c"))}),
        ("--no-guard --force --no-number", {"guard": False, "force": True, "number": False}),
        ("--lora a:0.5 --lora b,c", {"lora": ("a:0.5", "b,c")}),
    ],
)
def test_an_option_reads_what_its_field_holds(given: str, read: dict[str, Any]) -> None:
    assert given_fields(parser().parse_args(given.split()), Options) == read


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--steps", "many"], "argument --steps: expected N, got 'many'"),
        (["--form", "x"], "argument --form: expected {sde,ode}|none, got 'x'"),
        (["--times", "x,1"], "expected {lightning,fastwan}|X,...|none, got 'x,1'"),
        (["--out", ""], "an empty path; is a variable not set?"),
        (["--kept", "1"], "unrecognized arguments: --kept"),
        (["--no-force"], "unrecognized arguments: --no-force"),
    ],
)
def test_what_a_field_does_not_hold_is_refused(given: list[str], told: str, capsys) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(given)
    assert told in capsys.readouterr().err


def test_help_is_the_docstring_of_the_class() -> None:
    text = " ".join(parser().format_help().split())
    assert "--steps N How many, 50% of them. (default: 4)" in text
    assert "--times {lightning,fastwan}|X,... A name or a list. --" in text
    assert "--limit X|none A number or none. (default: 1.0)" in text
    assert text.endswith("--lora PATH[:SCALE] Many.")


def test_an_option_may_have_another_name_than_its_field_or_none() -> None:
    names = {"form": "pair_form", "lora": ""}
    read = parser(**names).parse_args(["--pair-form", "sde"])
    assert given_fields(read, Options, names) == {"form": "sde"}
    assert "--lora" not in parser(**names).format_help()
