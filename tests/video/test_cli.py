"""The command line: what it writes, its exit codes, and how it puts mistakes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests import processes
from turbo_rcm_patch import __main__ as turbo_main
from turbo_rcm_patch.__main__ import main

SMALL = ["--height", "32", "--width", "32", "--num-frames", "5", "--max-sequence-length", "16"]
QUICK = [*SMALL, "--steps", "2", "--device", "cpu"]


@pytest.mark.parametrize(
    "command", ["", "generate", "compare", "pairs", "convert", "doctor", "demo"]
)
def test_help_has_examples(command: str, capsys) -> None:
    assert main([*filter(None, [command]), "--help"]) == 0
    text = capsys.readouterr().out
    assert "usage: python -m turbo_rcm_patch" in text
    if command != "doctor":
        assert "examples:" in text
    if command == "compare":
        assert "a median over prompts" in " ".join(text.split()), "one prompt is too few"


def test_help_is_quick_and_loads_nothing_heavy() -> None:
    code = (
        "import sys; from turbo_rcm_patch.__main__ import main; main(['compare', '--help']);"
        "heavy = {'torch', 'diffusers', 'transformers', 'triton'} & set(sys.modules);"
        "sys.exit(f'loaded {heavy}' if heavy else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_python_runs_it_as_a_module() -> None:
    """A real start, which hands the exit code on."""
    for given, code in (["compare", "--help"], 0), (["compare", "--steps", "many"], 2):
        command = [sys.executable, "-m", "turbo_rcm_patch", *given]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr
        assert ("usage: python -m turbo_rcm_patch" in done.stdout) == (code == 0)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "compare the videos before and after patching"),
        (["compare", "--steps", "many"], "--steps"),
        (["compare", "--attention", "int2"], "int2"),
        (["generate"], "expected: --prompt TEXT or --prompts FILE"),
        (["compare", "--model", "/no/such", "--prompt", "x"], "no such folder: /no/such"),
        (["compare", "--prompt", "x", "--guard-budget", "-1"], "PatchConfig.guard_budget"),
        (["compare", "--prompt", "x", "--fidelity", "0"], "PatchConfig.fidelity"),
        (["generate", "--prompts", "/no/such"], "No such file"),
        (["pairs", "--model", "/no/such"], "no such folder"),
    ],
    ids=lambda value: "-".join(value[:2]) if isinstance(value, list) else "",
)
def test_mistakes_are_told_without_a_traceback(arguments: list[str], text: str, capsys) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert text in captured.err
    assert "Traceback" not in captured.err


def test_generate_writes_videos(micro_folder: Path, tmp_path: Path, capsys) -> None:
    model = ["--model", str(micro_folder), *QUICK]
    one = tmp_path / "one.mp4"
    assert main(["generate", *model, "--prompt", "a red circle", "--out", str(one)]) == 0
    assert one.stat().st_size > 500
    listing = tmp_path / "prompts.txt"
    listing.write_text("a red circle\n\n  a blue square  \n")
    folder = tmp_path / "many"
    arguments = ["--prompts", str(listing), "--no-patch", "--sampler", "scheduler"]
    assert main(["generate", *model, *arguments, "--out", str(folder)]) == 0
    assert len(list(folder.glob("*.mp4"))) == 2
    assert main(["generate", *model, *arguments, "--out", str(tmp_path / "x.mp4")]) == 2
    assert "a folder, because there are 2 prompts" in capsys.readouterr().err


def test_compare_says_where_the_report_is(micro_folder: Path, tmp_path: Path, capsys) -> None:
    arguments = ["compare", "--model", str(micro_folder), *QUICK, "--prompt", "a red circle"]
    code = main([*arguments, "--out", str(tmp_path / "out")])
    captured = capsys.readouterr()
    verdict = {0: "unchanged", 1: "changed", 4: "similar"}[code]
    assert f"verdict: {verdict}" in captured.out
    report = tmp_path / "out" / "report.html"
    assert str(report) in captured.out
    assert "python -m turbo_rcm_patch compare --model" in report.read_text()
    assert main([*arguments, "--steps", "1", "--out", str(tmp_path / "out")]) == 2
    assert "--fresh" in capsys.readouterr().err


@pytest.mark.parametrize(("ended_by", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_compare_says_how_to_go_on(
    ended_by: int, code: int, micro_folder: Path, tmp_path: Path, capsys, monkeypatch
) -> None:
    from turbo_rcm_patch.video import comparison

    def interrupted(*_: object, **__: object) -> None:
        os.kill(os.getpid(), ended_by)
        time.sleep(30)

    monkeypatch.setattr(comparison, "sample_latents", interrupted)
    arguments = ["--model", str(micro_folder), *QUICK, "--prompt", "a", "--out", str(tmp_path)]
    with pytest.raises(SystemExit) as ended:
        sys.exit(main(["compare", *arguments]))
    assert ended.value.code == code
    assert "the same command goes on" in capsys.readouterr().err


def test_pairs_prints_the_table(micro_folder: Path, capsys) -> None:
    assert main(["pairs", "--model", str(micro_folder)]) == 0
    text = capsys.readouterr().out
    assert "attn1" in text
    assert "attn2" in text


def test_doctor_prints_what_would_be_used(capsys) -> None:
    from turbo_rcm_patch.video.doctor import examine

    code = main(["doctor"])
    text = capsys.readouterr().out
    for topic in ("torch", "triton", "diffusers", "sageattention", "C compiler", "would use"):
        assert topic in text
    assert code == (0 if examine().healthy else 1)


def test_doctor_tells_each_line_when_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    from turbo_rcm_patch.video import doctor

    told: list[str] = []
    before: list[str] = []
    monkeypatch.setattr(doctor, "_model", lambda: iter(before.extend(told) or ()))
    assert str(doctor.examine(told.append)) == "\n".join(told)
    assert before == told[:-1] and len(told) > 10


@pytest.mark.parametrize("command", ["generate", "compare"])
def test_a_missing_prompt_is_told_before_torch_is_imported(command: str) -> None:
    code = (
        "import sys; from turbo_rcm_patch.__main__ import main\n"
        f"print(main([{command!r}]), 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100
    )
    assert done.stdout == "2 False\n" and "got:      neither" in done.stderr


def test_doctor_names_remedies(monkeypatch, capsys) -> None:
    import shutil

    from turbo_rcm_patch.video import doctor

    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.setattr(doctor, "version_of", lambda name: None if name == "diffusers" else "1")
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "pip install diffusers" in text
    assert "apt-get install gcc" in text


def test_doctor_names_a_peft_that_breaks_diffusers(monkeypatch) -> None:
    from turbo_rcm_patch.video import doctor

    for version, states in (("0.17.1", ["missing"]), ("0.18.0", ["ok"]), (None, [])):
        monkeypatch.setattr(doctor, "version_of", {"peft": version}.get)
        assert [one.state for one in doctor._packages() if one.topic == "peft"] == states


def test_doctor_asks_for_triton_only_where_there_is_one(monkeypatch) -> None:
    from turbo_rcm_patch.video import doctor

    monkeypatch.setattr(doctor, "version_of", lambda name: None)
    states = {}
    for system in ("linux", "darwin", "win32"):
        monkeypatch.setattr(doctor.sys, "platform", system)
        (found,) = (one for one in doctor._packages() if one.topic == "triton")
        states[system] = found.state, bool(found.remedy)
    assert states == {
        "linux": ("missing", True), "darwin": ("note", False), "win32": ("note", False)
    }  # fmt: skip


@pytest.mark.parametrize(
    ("capability", "own", "state", "said"),
    [
        ((9, 0), None, "ok", "sm_90: measured on an H200"),
        ((8, 9), None, "note", "sm_89: chosen by counting instructions, measured on no such card"),
        ((8, 7), None, "note", "sm_87: safe defaults, measured on no such card"),
        ((8, 9), '{"sm_89": {}}', "ok", "sm_89: your table ("),
    ],
)
def test_doctor_says_which_tiles_were_measured(
    capability: tuple[int, int],
    own: str | None,
    state: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    from turbo_rcm_patch.kernels.tile_table import user_table

    from turbo_rcm_patch.kernels import launch
    from turbo_rcm_patch.ops import dispatch
    from turbo_rcm_patch.video.doctor import _choices

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TURBO_RCM_PATCH_TILES", raising=False)
    if own is not None:
        (tmp_path / "turbo_rcm_patch").mkdir()
        (tmp_path / "turbo_rcm_patch" / "tiles.json").write_text(own)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(dispatch, "_device_name", lambda index: "Card 1")
    for kept in (launch._target, user_table, dispatch._tables, dispatch._decided):
        kept.cache_clear()
    try:
        (found,) = (one for one in _choices() if one.topic == "tiles")
    finally:
        monkeypatch.undo()
        for kept in (launch._target, user_table, dispatch._tables, dispatch._decided):
            kept.cache_clear()
    assert (found.state, bool(found.remedy)) == (state, state == "note")
    assert found.text.startswith(said)


def test_doctor_is_not_content_with_a_model_that_does_not_load(monkeypatch, capsys) -> None:
    from turbo_rcm_patch.video import load

    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.count(", loads") == 2

    def broken(*_: object, **__: object) -> None:
        raise AttributeError("module transformers has no attribute UMT5EncoderModel")

    monkeypatch.setattr(load, "_from_pretrained", broken)
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "cannot be loaded: AttributeError: module transformers has no" in text
    assert "'transformers>=5.0'" in text and "something is missing" in text


@pytest.mark.parametrize(
    ("name", "version", "state"),
    [
        *(("transformers", "4.57.1", "missing"), ("transformers", "5.0.0", "ok")),
        *(("diffusers", "0.41.9", "missing"), ("diffusers", "0.42.1", "ok")),
        *(("diffusers", "0.43.0.dev0", "note"), ("torch", "2.7.1+cu128", "missing")),
        *(("torch", "2.13.0+cpu", "ok"), ("imageio-ffmpeg", "0.6.0", "missing")),
        *(("triton", "3.10.0", "ok"), ("accelerate", "unknown", "missing")),
    ],
)
def test_doctor_compares_versions(name: str, version: str, state: str) -> None:
    from turbo_rcm_patch.video.doctor import _in_range

    found = _in_range(name, version)
    assert found.state == state and version in found.text
    assert (f"{name}>=" in found.remedy) == (state != "ok")


def test_ctrl_c_keeps_what_is_finished(micro_folder: Path, tmp_path: Path) -> None:
    """A real signal to a real process, in the middle of the work; then the same command again."""
    out = tmp_path / "out"
    prompts = [argument for i in range(6) for argument in ("--prompt", f"a red circle {i}")]
    given = ["compare", "--model", str(micro_folder), *QUICK, *prompts, "--out", str(out)]
    with processes.start(processes.COMMAND, *given) as process:
        deadline = time.monotonic() + 120
        while not list(out.glob("prompts/*/record.json")):
            assert process.code is None, "it finished before it could be stopped"
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGINT)
        done = process.wait(60)
    assert done.code == 130
    assert "the same command goes on" in done.err
    assert "Traceback" not in done.err
    assert not [path for path in out.rglob(".*") if path.is_file()]
    finished = {path: path.stat().st_mtime_ns for path in out.glob("prompts/*/record.json")}
    assert 0 < len(finished) < 6
    # In a process of its own again: results depend on the number of threads, and so do folders.
    assert processes.run(processes.COMMAND, *given).code in (0, 1, 4)
    assert (out / "report.html").is_file()
    assert all(path.stat().st_mtime_ns == before for path, before in finished.items())


@pytest.mark.parametrize("name", ["torch", "diffusers.utils"])
def test_a_missing_package_is_told_in_a_line(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(_: object) -> int:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(turbo_main, "_run", run)
    assert turbo_main.main(["doctor"]) == 2
    error = capsys.readouterr().err
    assert f"{name} is not installed for {sys.executable}" in error and "pip install ." in error


def test_another_missing_module_is_no_matter_of_installation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(_: object) -> int:
        raise ModuleNotFoundError("No module named 'ours'", name="ours")

    monkeypatch.setattr(turbo_main, "_run", run)
    assert turbo_main.main(["doctor"]) == 3
    error = capsys.readouterr().err
    assert "Traceback" in error and "pip install" not in error
