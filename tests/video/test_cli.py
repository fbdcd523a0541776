"""The command line: its help, its exit codes, and how it puts mistakes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import turbo_rcm_patch
from tests import processes
from tests.video.micro import QUICK
from turbo_rcm_patch import PatchConfig
from turbo_rcm_patch.__main__ import main
from turbo_rcm_patch.cli import commands, inputs
from turbo_rcm_patch.cli.options import COMMANDS
from turbo_rcm_patch.video.settings import Settings


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_has_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*filter(None, [command]), "--help"]) == 0
    text = capsys.readouterr().out
    assert f"usage: python -m turbo_rcm_patch {command}".strip() in text
    assert f"examples:\n  python -m turbo_rcm_patch {command or 'demo'}" in text
    if command == "compare":
        assert "a median over prompts" in " ".join(text.split()), "one prompt is too few"
        assert re.search(r"--guard, --no-guard [^-]*\(default:\s+on\)", text)
    if command == "":
        assert re.findall(r"^  (\d+) ", text, re.MULTILINE) == ["0", "1", "2", "3", "130"]


def test_every_field_of_the_configuration_and_of_the_settings_has_an_option(capsys) -> None:
    assert main(["generate", "--help"]) == 0
    text = capsys.readouterr().out
    own_schedule = {"sigma_max"}  # which turbo_rcm.json holds
    names = {"pair_form" if field.name == "form" else field.name for field in fields(PatchConfig)}
    names |= {field.name for field in fields(Settings)} - own_schedule
    for name in (name.replace("_", "-") for name in names):
        assert f"\n  --{name} " in text or f"\n  --{name}, " in text, name


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"turbo_rcm_patch {turbo_rcm_patch.__version__}\n"


def test_python_runs_it_as_a_module() -> None:
    """A real start, which hands the exit code on."""
    command = [sys.executable, "-m", "turbo_rcm_patch", "compare", "--steps", "many"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "--steps: expected N, got 'many'" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "Compare the videos before and after patching"),
        (["compare", "--attention", "int2"], "int2"),
        (["compare", "--model", "/no/such", "--prompt", "x"], "no such folder: /no/such"),
        (["compare", "--prompt", "x", "--fidelity", "0"], "PatchConfig.fidelity"),
        (["generate", "--prompt", "x", "--out", ""], "is a variable not set?"),
        (["pairs", "--model", "/no/such"], "no such folder"),
        (["generate", "--stepz", "3"], "unrecognized arguments: --stepz 3; did you mean --steps?"),
        (["generate", "--prompt", "x", "--num-frames", "400"], "remedy: Choose --num-frames "),
        (["generate", "--prompt", "x", "--image", "good.png"], "No such file"),
    ],
    ids=lambda value: "-".join(value)[:40] if isinstance(value, list) else "",
)
def test_a_mistake_is_a_sentence(arguments, text, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    said = " ".join(capsys.readouterr().err.replace("\n  expected: ", "; expected ").split())
    assert text in said and "Traceback" not in said
    assert not any(tmp_path.iterdir())


def test_what_is_given_reaches_the_model_and_the_comparison(tmp_path, monkeypatch) -> None:
    """What is not given is not passed, so that defaults are decided in one place."""
    seen: dict[str, Any] = {}

    def load(model: str, **given: Any) -> Any:
        seen.update(given, model=model)
        return SimpleNamespace()

    def compare(_: Any, prompts: Any, **given: Any) -> Any:
        seen.update(given, prompts=prompts)
        return SimpleNamespace(verdict="similar")

    monkeypatch.setattr(inputs, "load_pipeline", load)
    monkeypatch.setattr(commands.comparison, "compare", compare)
    monkeypatch.setattr(commands.generation, "settings_for", lambda _, **given: given)
    given = ["compare", "--prompt", "a", "--prompt", "b", "--out", str(tmp_path)]
    assert main(given) == 1, "similar is not unchanged"
    assert seen["settings"] == {} and seen["config"] == PatchConfig()
    assert seen["lora"] == () and seen["prompts"] == ["a", "b"]
    more = ["--lora", "x.safetensors:0.5", "--lora", "me/y", "--attention-backend", "flash"]
    more += ["--steps", "3", "--pair-form", "two-launch", "--fidelity", "none"]
    assert main([*given, *more, "--no-guard", "--seed", "7", "--linear", "int8-only"]) == 1
    assert seen["lora"] == ("x.safetensors:0.5", "me/y") and seen["attention_backend"] == "flash"
    assert seen["settings"] == {"steps": 3} and seen["seed"] == 7
    assert seen["int8"] == "only" and seen["config"] == PatchConfig(
        form="two-launch", fidelity=None, guard=False, linear="int8-only"
    )


@pytest.mark.usefixtures("no_pictures")
def test_compare_says_where_the_report_is(micro_folder: Path, tmp_path: Path, capsys) -> None:
    arguments = ["compare", "--model", str(micro_folder), *QUICK, "--prompt", "a red circle"]
    code = main([*arguments, "--out", str(tmp_path / "out")])
    captured = capsys.readouterr()
    [word] = re.findall(r"^verdict: (\w+)", captured.out, re.MULTILINE)
    assert code == (0 if word == "unchanged" else 1)
    assert re.search(r"^A step took .* \d:\d\d:\d\d at this pace", captured.out, re.M)
    assert re.search(r"s a video unpatched, .* On a CPU the patch is no faster", captured.out)
    assert re.search(r"^unpatched: 2 of 2 after", captured.err, re.M), "no terminal, so lines"
    assert "network against fp32: 0 of" in captured.err
    report = tmp_path / "out" / "report.html"
    assert str(report) in captured.out
    assert "python -m turbo_rcm_patch compare --model" in report.read_text()
    assert main([*arguments, "--steps", "1", "--out", str(tmp_path / "out")]) == 2
    assert "--fresh" in capsys.readouterr().err


def test_pairs_prints_the_table(micro_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pairs", "--model", str(micro_folder)]) == 0
    text = capsys.readouterr().out
    assert "attn1" in text and "attn2" in text


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="only Linux has such a file")
def test_a_full_disk_under_what_is_printed() -> None:
    done = processes.run(processes.COMMAND, "pairs", "--model", "tiny", out=Path("/dev/full"))
    assert done.code == 2 and "No space left" in done.err and "Traceback" not in done.err
