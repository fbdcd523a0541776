"""The demo and the example scripts, on an untrained model."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.video.micro import SMALL, save
from tests.video.micro_cogvideox import micro_cogvideox
from turbo_rcm_patch import __main__ as program
from turbo_rcm_patch.__main__ import main
from turbo_rcm_patch.cli import demo as demo_module
from turbo_rcm_patch.cli.exit_codes import of_verdict
from turbo_rcm_patch.cli.options import Compare
from turbo_rcm_patch.errors import SamplingError
from turbo_rcm_patch.patching.plan import Plan
from turbo_rcm_patch.tiny import prompts
from turbo_rcm_patch.video.environment import KernelCheck, python_command

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def quick_model(micro_folder: Path, tmp_path: Path) -> Path:
    folder = Path(shutil.copytree(micro_folder, tmp_path / "model"))
    (folder / "turbo_rcm.json").write_text(json.dumps(SMALL | {"sampler": "rcm", "steps": 2}))
    return folder


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Two prompts, and the results of the kernel check, one for each demo."""
    results: list[Any] = []

    def run() -> KernelCheck:
        if isinstance(error := results.pop(0), Exception):
            raise error
        return KernelCheck(error, tokens=200, interpreted=True)

    monkeypatch.setattr(demo_module, "check_kernels", run)
    monkeypatch.setattr(prompts, "DEMO_PROMPTS", ("a red circle", "a blue square"))
    return results


@pytest.mark.usefixtures("no_pictures")
def test_the_demo_is_green_only_if_everything_is(quick_model, checked, tmp_path, capsys) -> None:
    """Continued, it takes the videos that are there, and concludes anew."""
    command = ["demo", "--model", str(quick_model), "--out", str(tmp_path / "demo")]
    for error, code in (1e-5, 0), (1.0, 1), (float("nan"), 1), (SamplingError("it died"), 1):
        checked.append(error)
        assert main(command) == code, error
        said = capsys.readouterr()
        assert "verdict: unchanged" in said.out
        assert str(tmp_path / "demo" / "report.html") in said.out
        assert ("it died" in said.err) == isinstance(error, SamplingError)
        command = [*command[:5], "--resume"]


@pytest.mark.usefixtures("no_pictures")
def test_where_there_is_no_triton_the_verdict_decides(
    quick_model: Path, checked: list[Any], tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setattr(demo_module, "find_spec", lambda name: None)
    monkeypatch.setattr(demo_module, "sys", SimpleNamespace(platform="darwin"))
    assert main(["demo", "--model", str(quick_model), "--out", str(tmp_path / "demo")]) == 0
    assert "there is no Triton for darwin" in capsys.readouterr().out


@pytest.mark.usefixtures("no_pictures")
def test_the_demo_takes_a_plan_as_compare_does(quick_model, checked, tmp_path, capsys) -> None:
    """One that does not fit, or other options beside it, are refused before a video is made."""
    file, out, model = tmp_path / "plan.json", tmp_path / "demo", ["--model", str(quick_model)]
    given = ["--prompt", "a red circle", "--linear", "int8"]
    assert main(["plan", *model, *given, "--out", str(file)]) == 0
    plan, command = Plan.load(file), ["demo", *model, "--out", str(out), "--plan"]
    network = replace(plan.networks["transformer"], heads=3)
    wrong = replace(plan, networks={"transformer": network}).save(tmp_path / "wrong.json")
    for options, says in ([wrong], "heads 3"), ([file, "--no-vae"], "vae=False"), (["x"], "x"):
        assert main([*command, *map(str, options)]) == 2
        said = capsys.readouterr().err
        assert "PlanError" in said and says in said
        assert "unpatched: 0 of" not in said and not (out / "settings.json").exists()
    checked.append(1e-5)
    assert main([*command, str(file)]) != 2
    identity = json.loads((out / "metrics.json").read_text())["identity"]
    assert identity["plan"] == str(plan) and identity["config"] == asdict(plan.config)


def test_an_interrupted_demo_says_how_to_go_on(quick_model, tmp_path, monkeypatch, capsys) -> None:
    def interrupted(comparison: Compare) -> None:
        started.append((comparison.fresh, comparison.config.vae))
        raise KeyboardInterrupt

    started: list[tuple[bool, bool]] = []
    monkeypatch.setattr(demo_module, "run_comparison", interrupted)
    command = ["demo", "--model", str(quick_model), "--out", str(tmp_path / "out")]
    for more in ([], ["--resume"], ["--no-vae"]):
        assert main([*command, *more]) == 130
        assert "the same command with --resume goes on from there" in capsys.readouterr().err
    assert started == [(True, True), (False, True), (True, False)]


@pytest.mark.parametrize(
    ("typed", "called"),
    [
        (".venv/bin/python -m turbo_rcm_patch", ".venv/bin/python -m turbo_rcm_patch"),
        ("/usr/bin/python3 -m turbo_rcm_patch", "python -m turbo_rcm_patch"),
        (".venv/bin/turbo-rcm-patch", "turbo-rcm-patch"),
    ],
)
def test_the_command_to_go_on_is_one_that_runs(typed: str, called: str, monkeypatch) -> None:
    """The environment of `make demo` is not activated, so `python` is another one."""
    words = typed.split()
    monkeypatch.setattr(sys, "orig_argv", [*words, "demo"])
    monkeypatch.setattr(sys, "argv", [words[0] if len(words) == 1 else "__main__.py", "demo"])
    assert program._called() == called


@pytest.mark.parametrize("python_path", [None, "", os.pathsep], ids=repr)
def test_a_start_runs_nothing_of_the_working_directory(python_path, tmp_path, monkeypatch) -> None:
    for name in ("torch", "json", "turbo_rcm_patch"):
        (tmp_path / f"{name}.py").write_text("open('executed', 'w'); raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    if python_path is not None:
        rest = os.environ.get("PYTHONPATH", "")
        monkeypatch.setenv("PYTHONPATH", python_path + rest)
    command, own = python_command("turbo_rcm_patch", "--help")
    done = subprocess.run(command, env=os.environ | own, capture_output=True, text=True)
    assert done.returncode == 0 and "usage:" in done.stdout, done.stderr
    assert not (tmp_path / "executed").exists()


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("name", ["wan", "cogvideox"])
def test_the_examples_and_the_demo_run_on_another_model(
    name: str, quick_model: Path, checked: list[Any], tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    folder = quick_model
    if name == "cogvideox":
        folder = save(micro_cogvideox(), tmp_path / "cogvideox")
        own = {"sampler": "scheduler", "steps": 2, "guidance_scale": 1.0}
        (folder / "turbo_rcm.json").write_text(json.dumps(SMALL | own))
    monkeypatch.chdir(tmp_path)
    script = EXAMPLES / f"{name}_t2v.py"
    monkeypatch.setattr(sys, "argv", [script.name, str(folder), "a red circle"])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(script), run_name="__main__")
    [word] = re.findall(r"^verdict: (\w+)", capsys.readouterr().out, re.MULTILINE)
    assert stopped.value.code == of_verdict(word)
    [video] = tmp_path.glob("outputs/*/video.mp4")
    assert video.stat().st_size > 500
    if name == "cogvideox":
        checked.append(1e-5)
        assert main(["demo", "--model", str(folder), "--out", str(tmp_path / "demo")]) == 0
