"""How a line of usage becomes an option."""

import argparse
from pathlib import Path

import pytest

from turbo_rcm_patch.usage import add_options


def test_the_word_for_a_value_says_how_it_is_read() -> None:
    parser = argparse.ArgumentParser()
    usages = ("--limit MINUTES", "--steps N", "--out FOLDER", "--only A,B", "--prompt TEXT ...")
    add_options(parser, dict.fromkeys((*usages, "--force", "--form {sde,ode}"), "help"), steps=4)
    given = ["--limit", "0", "--out", "a", "--only", "x,y", "--prompt", "p", "--prompt", "q"]
    read = parser.parse_args([*given, "--form", "ode"])
    assert vars(read) == {
        "limit": 0.0, "steps": 4, "out": Path("a"), "only": "x,y", "prompt": ["p", "q"],
        "force": False, "form": "ode",
    }  # fmt: skip


def test_a_word_that_nothing_reads_is_refused() -> None:
    with pytest.raises(KeyError, match="MINUITS"):
        add_options(argparse.ArgumentParser(), {"--limit MINUITS": "help"})
