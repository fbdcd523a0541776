"""The demo, its kernel check, and the example script, on an untrained model."""

from __future__ import annotations

import json
import math
import os
import re
import runpy
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import turbo_rcm_patch
import turbo_rcm_patch.video as commands
from tests.video.micro import SMALL, save
from tests.video.micro_cogvideox import micro_cogvideox
from turbo_rcm_patch import demo as demo_module
from turbo_rcm_patch.__main__ import main
from turbo_rcm_patch.errors import SamplingError
from turbo_rcm_patch.exit_codes import SIMILAR, of_verdict
from turbo_rcm_patch.tiny import prompts
from turbo_rcm_patch.video import environment, kernel_check
from turbo_rcm_patch.video import video as video_module
from turbo_rcm_patch.video.environment import python_command
from turbo_rcm_patch.video.kernel_check import (
    LIMIT,
    KernelCheck,
    check_interpreter,
    run_kernel_check,
)

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def quick_model(micro_folder: Path, tmp_path: Path) -> Path:
    folder = Path(shutil.copytree(micro_folder, tmp_path / "model"))
    (folder / "turbo_rcm.json").write_text(json.dumps(SMALL | {"steps": 2}))
    return folder


def check(relative_l2: float) -> KernelCheck:
    return KernelCheck(relative_l2, LIMIT, tokens=264, fused=3, seconds=1.0, interpreted=True)


@pytest.mark.slow
def test_the_kernels_agree_with_the_reference(micro_folder: Path) -> None:
    found = run_kernel_check(micro_folder)
    assert found.interpreted
    assert found.tokens == 264
    assert found.fused == 3, "self-attention, cross-attention and feed-forward"
    assert 0 < found.relative_l2 <= LIMIT
    assert found.passed
    assert "Triton's interpreter" in found.what


@pytest.fixture
def traps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with modules that nobody wants; running one leaves "executed"."""
    for name in ("torch", "json", "turbo_rcm_patch"):
        (tmp_path / f"{name}.py").write_text("open('executed', 'w'); raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("python_path", [None, "", os.pathsep], ids=repr)
def test_a_start_runs_nothing_of_the_working_directory(
    python_path: str | None, traps: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if python_path is not None:
        rest = os.environ.get("PYTHONPATH", "")
        monkeypatch.setenv("PYTHONPATH", python_path + rest)
    command, own = python_command("turbo_rcm_patch", "--help")
    done = subprocess.run(command, env=os.environ | own, capture_output=True, text=True)
    assert done.returncode == 0 and "usage:" in done.stdout, done.stderr
    assert not (traps / "executed").exists()


def test_a_kernel_check_that_breaks_says_how_to_look(
    traps: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder holds no model, which is found out after torch was imported; that of the working
    directory is not."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep + os.environ.get("PYTHONPATH", ""))
    with pytest.raises(SamplingError, match=r"kernel check failed.*kernel_check") as caught:
        run_kernel_check(traps)
    assert re.search(r"ModelFolderError.*model_index\.json", str(caught.value))
    assert not (traps / "executed").exists()


def test_every_python_that_is_started_is_told_to_leave_the_working_directory_alone() -> None:
    package = Path(demo_module.__file__).parent
    found = [path for path in package.rglob("*.py") if "[sys.executable" in path.read_text()]
    assert [path.name for path in found] == ["environment.py"], "python_command is there for it"
    command, own = python_command("turbo_rcm_patch", "pairs")
    assert command[:3] == [sys.executable, "-P", "-m"]
    assert own["PYTHONPATH"].split(os.pathsep)[0] == str(package.parent)


@pytest.mark.parametrize(
    ("triton", "numpy", "works"),
    [
        *(("3.4.0", "2.4.6", False), ("3.5.1", "2.10.0", False), ("3.4.0", "3.0.0", False)),
        *(("3.4.0", "2.3.5", True), ("3.6.0", "2.4.6", True), ("3.10.0", "2.4.6", True)),
    ],
)
def test_an_interpreter_that_cannot_run_is_told_before_the_work(
    triton: str, numpy: str, works: bool, tmp_path: Path, monkeypatch, capsys
) -> None:
    installed = {"triton": triton, "numpy": numpy}
    monkeypatch.setattr(environment.metadata, "version", installed.__getitem__)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def load(*_: object) -> None:
        raise SamplingError("the work has begun")

    monkeypatch.setattr(demo_module, "load_pipeline", load)
    assert main(["demo", "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert ("the work has begun" in said) == works
    assert ("pip install 'numpy<2.4'" in said) == (not works)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    check_interpreter()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_remedy_for_an_old_interpreter_works(
    micro_folder: Path, tmp_path: Path, monkeypatch, pytestconfig: pytest.Config
) -> None:
    """Triton 3.5 beside the installed NumPy breaks, and beside the one of the remedy it runs."""
    if not pytestconfig.getoption("--every-target"):
        pytest.skip("half a gigabyte of an older release: --every-target")
    for folder, wanted in (("triton", "triton==3.5.1"), ("numpy", "numpy<2.4")):
        command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-input", "--quiet"]
        command += ["--only-binary", ":all:", "--target", str(tmp_path / folder), wanted]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        if done.returncode:
            pytest.skip(f"pip cannot fetch {wanted} here: {done.stderr[-200:]}")
    monkeypatch.setattr(kernel_check, "check_interpreter", lambda: None)
    rest = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'triton'}{os.pathsep}{rest}")

    def own_first(module: str, *arguments: str) -> tuple[list[str], dict[str, str]]:
        command, own = python_command(module, *arguments)
        return command, own | {"PYTHONPATH": f"{first}{os.pathsep}{own['PYTHONPATH']}"}

    monkeypatch.setattr(kernel_check, "python_command", own_first)
    first = str(tmp_path / "triton")
    if kernel_check.numbers(kernel_check.version_of("numpy") or "") >= (2, 4):
        with pytest.raises(SamplingError, match="0-dimensional"):
            run_kernel_check(micro_folder)
    first += f"{os.pathsep}{tmp_path / 'numpy'}"
    assert run_kernel_check(micro_folder).passed


@pytest.mark.usefixtures("no_pictures")
def test_the_demo_is_green_only_if_everything_is(
    quick_model: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    """Run again, it takes the videos that are there, and concludes anew."""
    monkeypatch.setattr(demo_module, "MODEL", str(quick_model))
    monkeypatch.setattr(prompts, "DEMO_PROMPTS", ("a red circle", "a blue square"))
    out = tmp_path / "demo"
    for error, code in (1e-5, 0), (1.0, 1), (float("nan"), 1):
        found = check(error)
        monkeypatch.setattr(demo_module, "run_kernel_check", lambda _, found=found: found)
        assert main(["demo", "--out", str(out)]) == code, error
        text = capsys.readouterr().out
        assert "verdict: unchanged" in text
        assert str(out / "report.html") in text
        assert "interpreter" in text
        metrics = json.loads((out / "metrics.json").read_text())
        assert metrics["kernel_check"]["passed"] == (code == 0), error
        assert "The Triton kernels themselves" in (out / "report.html").read_text()
        (out / "metrics.json").unlink()
        (out / "report.html").unlink()


@pytest.mark.usefixtures("no_pictures")
def test_where_there_is_no_triton_the_verdict_decides(
    quick_model: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(demo_module, "find_spec", lambda name: None)
    monkeypatch.setattr(demo_module, "sys", SimpleNamespace(platform="darwin"))
    monkeypatch.setattr(demo_module, "run_kernel_check", pytest.fail)
    monkeypatch.setattr(prompts, "DEMO_PROMPTS", ("a red circle", "a blue square"))
    assert main(["demo", "--model", str(quick_model), "--out", str(tmp_path / "demo")]) == 0
    assert "there is no Triton for darwin" in capsys.readouterr().out


def run_example(name: str, *arguments: str) -> object:
    """Run a script of examples/, and return its exit code."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as stopped:
        patch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return stopped.value.code


def code_of(text: str) -> int:
    """The exit code of the verdict that a text tells."""
    [word] = re.findall(r"^verdict: (\w+)", text, re.MULTILINE)
    return of_verdict(word)


@pytest.mark.parametrize("name", ["wan_t2v.py", "cogvideox_t2v.py"])
def test_an_example_asks_for_prompts_that_the_shipped_models_know(name: str, monkeypatch) -> None:
    asked: list[str] = []

    def compare(_: object, given: list[str], **__: object) -> SimpleNamespace:
        asked.extend(given)
        return SimpleNamespace(verdict="similar")

    video = SimpleNamespace(frames=0, settings=SimpleNamespace(fps=8), seconds=0.0)
    monkeypatch.setattr(commands, "load_pipeline", lambda _: SimpleNamespace(transformer=None))
    monkeypatch.setattr(commands, "generate", lambda *_, **__: video)
    monkeypatch.setattr(commands, "compare", compare)
    for module, called in (
        (turbo_rcm_patch, "patch_model"),
        (turbo_rcm_patch, "unpatch_model"),
        (video_module, "enlarge"),
        (video_module, "write_mp4"),
    ):
        monkeypatch.setattr(module, called, lambda *_, **__: None)
    assert run_example(name) == SIMILAR, "the verdict's exit code, so that a script sees it"
    assert len(asked) >= 3, "the verdict is a median over prompts"
    for prompt in asked:
        prompts.parse(prompt)


def test_the_example_runs(quick_model: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    code = run_example("wan_t2v.py", str(quick_model), "a red circle", "a blue square")
    text = capsys.readouterr().out
    assert code == code_of(text)
    assert (tmp_path / "outputs" / "example" / "video.mp4").is_file()
    lines = (EXAMPLES / "wan_t2v.py").read_text().splitlines()
    assert len(lines) <= 36, "a script to copy is short"


@pytest.mark.parametrize("name", ["wan_t2v.py", "cogvideox_t2v.py"])
def test_the_help_of_an_example_is_no_failure(name: str, capsys) -> None:
    assert run_example(name, "--help") in (None, 0)
    assert "Load, patch, generate, compare." in capsys.readouterr().out


def test_the_cogvideox_example_and_demo_run(tmp_path: Path, monkeypatch, capsys) -> None:
    """The demo on another model than the default one."""
    folder = save(micro_cogvideox(), tmp_path / "cogvideox")
    own = {"sampler": "scheduler", "steps": 2, "guidance_scale": 1.0}
    (folder / "turbo_rcm.json").write_text(json.dumps(SMALL | own))
    monkeypatch.chdir(tmp_path)
    code = run_example("cogvideox_t2v.py", str(folder), "a red circle")
    text = capsys.readouterr().out
    assert "4 of 4 skip pairs run fused" in text and code == code_of(text)
    assert (tmp_path / "outputs" / "cogvideox" / "video.mp4").is_file()
    assert len((EXAMPLES / "cogvideox_t2v.py").read_text().splitlines()) <= 36

    monkeypatch.setattr(demo_module, "run_kernel_check", lambda _: check(1e-5))
    monkeypatch.setattr(prompts, "DEMO_PROMPTS", ("a red circle", "a blue square"))
    assert main(["demo", "--model", str(folder), "--out", str(tmp_path / "demo")]) == 0
    assert "verdict: unchanged" in capsys.readouterr().out


def test_a_kernel_check_that_dies_does_not_hide_the_comparison(
    quick_model: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    """The code is not that of a mistake in the arguments."""

    def dies(_: Path) -> KernelCheck:
        raise SamplingError("the kernel check failed (an illegal access)")

    monkeypatch.setattr(demo_module, "MODEL", str(quick_model))
    monkeypatch.setattr(demo_module, "run_kernel_check", dies)
    monkeypatch.setattr(prompts, "DEMO_PROMPTS", ("a red circle", "a blue square"))
    assert main(["demo", "--out", str(tmp_path / "out")]) == 1
    said = capsys.readouterr()
    assert "verdict: " in said.out and "an illegal access" in said.err


def test_an_interruption_before_anything_was_replaced_says_so(
    quick_model: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    """With --resume the old verdict would come as a new one."""
    monkeypatch.setattr(demo_module, "MODEL", str(quick_model))
    monkeypatch.setattr(demo_module, "run_kernel_check", lambda _: check(1e-6))
    monkeypatch.setattr(prompts, "DEMO_PROMPTS", ("a red circle",))
    assert main(["demo", "--out", str(tmp_path / "out")]) != 130

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo_module, "load_pipeline", interrupted)
    capsys.readouterr()
    assert main(["demo", "--out", str(tmp_path / "out")]) == 130
    assert "Nothing in" in capsys.readouterr().err
    assert main(["demo", "--resume", "--out", str(tmp_path / "out")]) == 130
    assert "--resume` goes on from there" in capsys.readouterr().err


@pytest.mark.parametrize("model", ["me/a-model", "a folder"])
def test_a_model_that_cannot_be_checked_is_told_before_the_work(
    model: str, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(demo_module, "load_pipeline", pytest.fail)
    if model == "a folder":
        model = str(save(micro_cogvideox(source="face"), tmp_path / "consisid"))
    assert main(["demo", "--model", model, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert ("the hub" if model == "me/a-model" else "ConsisIDTransformer3DModel") in error


@pytest.mark.parametrize("at", [0, 1])
def test_a_form_that_gives_nan_fails_the_kernel_check(
    at: int, quick_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = [1e-6, 1e-6]
    errors[at] = math.nan
    numbers = iter(errors)
    monkeypatch.setattr(kernel_check, "relative_l2", lambda *_: next(numbers))
    monkeypatch.setattr(kernel_check, "patched", lambda *_: nullcontext(SimpleNamespace(fused=1)))
    found = kernel_check.check_block(quick_model)
    assert math.isnan(found.relative_l2) and not found.passed
