"""The command line of training: the curves of a log, and the answers to a user's mistakes."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from training.__main__ import main
from turbo_rcm_patch.tiny import TINY_WAN

STEP = {"stage": "teacher", "loss": 0.5}


def _steps(numbers: Iterable[int]) -> list[dict[str, object]]:
    return [{**STEP, "step": step} for step in numbers]


def _write(log: Path, records: Iterable[dict[str, object]]) -> Path:
    log.write_text("".join(json.dumps(record) + "\n" for record in records))
    return log


def test_curves_are_drawn(tmp_path: Path) -> None:
    """Of a log with a line that a kill cut short, too."""
    log = _write(tmp_path / "log.jsonl", _steps((20, 40, 60)))
    log.write_text(log.read_text() + '{"stage": "tea')
    assert main(["curves", str(log), str(tmp_path / "curves.png")]) == 0
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("evaluate --model {}/nowhere", "no such folder"),
        ("evaluate --model {}", "Train it first"),
        ("curves {}/none.jsonl {}/x.png", "No such file"),
        ("curves {}/other.jsonl {}/x.png", "has no step"),
        ("train --out {}/run --start {}", "Train it first"),
        ("train --stage install --out {}/nowhere", "Train it first"),
    ],
)
def test_a_mistake_is_answered_in_a_few_lines(
    command: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other.jsonl").write_text("no log\n[]\n")
    assert main(command.replace("{}", str(tmp_path)).split()) == 2
    error = capsys.readouterr().err
    assert said in " ".join(error.split()) and len(error.splitlines()) < 8


def _refused(given: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit):
        main(["train", *given.split()])
    return capsys.readouterr().err.splitlines()[-1]


def test_a_run_resumes_with_the_family_size_and_seed_of_its_state(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "state").mkdir()
    given = {"family": "wan", "micro": "True", "seed": "3", "stage": "all", "out": str(tmp_path)}
    (tmp_path / "config.json").write_text(json.dumps(given))
    for other, named in (
        ("--family cogvideox --micro --seed 3", "family wan"),
        ("--micro", "seed 3"),
        ("--seed 3", "micro True"),
    ):
        for resume in ("", "--resume"):
            said = _refused(f"--out {tmp_path} {other} {resume}", capsys)
            assert f"with {named}: pass the same, or another --out" in said
    assert "pass --resume" in _refused(f"--out {tmp_path} --micro --seed 3", capsys)


@pytest.mark.parametrize("given", ["--refresh 0", "--clips -1", "--steps-vae 0", "--batch-vae 0"])
def test_counts_are_from_1_on(
    given: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "from 1 on" in _refused(f"--out {tmp_path / 'run'} {given}", capsys)
    assert not (tmp_path / "run").exists()


def test_a_folder_of_the_other_family_is_no_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = _refused(f"--out {tmp_path} --family cogvideox --start {TINY_WAN}", capsys)
    assert "is of --family wan" in said


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("train", ["--lr-teacher R peak learning rate (default: 0.001)", "--minutes-decoder"]),
        ("train --family cogvideox", ["--batch-vae N whole pictures in a step (default: 8)"]),
        ("evaluate", ["--count N held-out prompts (default: 400)"]),
        ("curves", ["OUT.png picture to write"]),
    ],
)
def test_help_explains_every_option_with_its_default(
    command: str, shown: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert all(line in text for line in shown)
    assert ("decoder MINUTES" in text) == (command == "train")
    assert "None" not in text and "MINUTES_" not in text and "BATCH_" not in text
