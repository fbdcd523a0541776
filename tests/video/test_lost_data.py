"""Nobody's files are lost: not by starting again, not by a full disk, not by a failure."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import imageio_ffmpeg
import numpy as np
import pytest

from tests import processes
from turbo_rcm_patch import demo as demo_module
from turbo_rcm_patch import exit_codes
from turbo_rcm_patch.__main__ import main
from turbo_rcm_patch.errors import (
    MissingPackageError,
    OutputError,
    OutputExistsError,
    SamplingError,
)
from turbo_rcm_patch.video import commands, video
from turbo_rcm_patch.video.comparison import compare
from turbo_rcm_patch.video.store import MARKER, Store
from turbo_rcm_patch.video.video import write_mp4

QUICK = ["--height", "32", "--width", "32", "--num-frames", "5", "--max-sequence-length", "16"]
QUICK += ["--steps", "1", "--device", "cpu"]
FRAMES = np.random.default_rng(0).integers(0, 256, (9, 64, 64, 3), dtype=np.uint8)


def everything(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def thesis(tmp_path: Path) -> Path:
    """Somebody's folder, whose files have names that a comparison would use."""
    folder = tmp_path / "thesis"
    for name in (
        *("prompts/my_prompts.txt", "plots/thesis.png"),
        *("settings.json", "metrics.json", "report.html"),
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("mine")
    return folder


@pytest.fixture
def nothing_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object, **__: object) -> None:
        raise AssertionError("this was to be refused before a model is loaded")

    monkeypatch.setattr(demo_module, "load_pipeline", load)
    monkeypatch.setattr(commands, "_load", load)


@pytest.mark.parametrize(
    "command",
    [["demo"], ["demo", "--resume"], ["compare", "--prompt", "a"],
     ["compare", "--prompt", "a", "--fresh"]],
    ids=" ".join,
)  # fmt: skip
def test_somebodys_folder_is_refused_and_untouched(
    command: list[str], thesis: Path, nothing_loads: None, capsys
) -> None:
    before = everything(thesis)
    assert main([*command, "--out", str(thesis)]) == 2
    assert everything(thesis) == before
    said = capsys.readouterr().err
    assert "OutputExistsError" in said and "Choose another --out" in said
    assert "--fresh" not in said, "advice that loses files"


@pytest.mark.parametrize("name", ["metrics.json", "report.html", "plots/frames.png"])
def test_a_single_file_is_not_written_over(name: str, pipe, settings, tmp_path: Path) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    with pytest.raises(OutputExistsError, match=name):
        compare(pipe, "a red circle", out=tmp_path, settings=settings)
    assert everything(tmp_path) == {name: b"mine"}


def test_an_older_sample_is_neither_used_nor_replaced(tmp_path: Path) -> None:
    """Its settings are gone, so nobody knows what it is."""
    (tmp_path / "latents").mkdir()
    name = f"{Store.key('a', 0)}.baseline.safetensors"
    (tmp_path / "latents" / name).write_text("old")
    store = Store(tmp_path, {"model": "m"}, fresh=False)
    assert not store.has_sample(Store.key("a", 0), "baseline")
    with pytest.raises(OutputExistsError, match="no comparison wrote"):
        store.claim(f"latents/{name}")
    assert (tmp_path / "latents" / name).read_text() == "old"


@pytest.mark.parametrize(
    "entry", ["../victim", "prompts/../../victim", "/etc/victim", "prompts/x/../../victim", "a"]
)
def test_a_list_from_elsewhere_removes_nothing(entry: str, tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("mine")
    out = tmp_path / "out"
    out.mkdir()
    (out / MARKER).write_text(json.dumps({"files": [entry]}))
    (out / "a").write_text("mine")
    before = everything(tmp_path)
    with pytest.raises(OutputExistsError, match=f"{MARKER} cannot be read"):
        Store(out, {}, fresh=True)
    assert everything(tmp_path) == before


def test_a_linked_folder_is_not_emptied(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "frames.png").write_text("mine")
    out = tmp_path / "out"
    Store(out, {}, fresh=False).claim("plots/frames.png")
    (out / "plots").symlink_to(tmp_path / "pictures")
    before = everything(tmp_path)
    with pytest.raises(OutputExistsError, match="is a link"):
        Store(out, {}, fresh=True)
    assert everything(tmp_path) == before


def test_a_fresh_start_removes_what_was_written_and_what_a_killed_process_left(
    tmp_path: Path,
) -> None:
    store = Store(tmp_path, {"a": 1}, fresh=False)
    store.write_json("runs/baseline.json", {})
    store.write_json(f"prompts/{Store.key('a', 0)}/record.json", {})
    (tmp_path / "runs" / ".turbo_rcm_patch-partial-1-0.json").write_text("half")
    (tmp_path / "mine.txt").write_text("mine")
    again = Store(tmp_path, {"a": 2}, fresh=True)
    assert not list(tmp_path.rglob(".*")), "what a killed process left"
    assert again.read_json("runs/baseline.json") is None, "it is there, and not this run's"
    again.write_json("runs/patched.json", {})
    assert (tmp_path / "runs" / "baseline.json").is_file()
    again.finish()
    left = ["mine.txt", "runs/patched.json", "settings.json", MARKER]
    assert sorted(everything(tmp_path)) == left and not (tmp_path / "prompts").exists()
    assert json.loads((tmp_path / MARKER).read_text()).keys() == {"about", "format", "files"}


def test_an_interrupted_fresh_start_can_be_repeated(tmp_path: Path, monkeypatch) -> None:
    store = Store(tmp_path, {"a": 1}, fresh=False)
    store.write_json("runs/baseline.json", {})
    store.write_json("runs/patched.json", {})
    again = Store(tmp_path, {"a": 2}, fresh=True)
    unlink = Path.unlink

    def once(path: Path, **how: bool) -> None:
        if path.name == "patched.json":
            raise KeyboardInterrupt
        unlink(path, **how)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "unlink", once)
        again.finish()
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["patched.json"]
    with pytest.raises(SamplingError, match="other settings"):
        Store(tmp_path, {"a": 1}, fresh=False)
    goes_on = Store(tmp_path, {"a": 2}, fresh=False)
    assert goes_on.read_json("runs/patched.json") is None
    goes_on.finish()
    assert sorted(everything(tmp_path)) == ["settings.json", MARKER]


def test_two_comparisons_in_one_folder_know_each_others_files(tmp_path: Path) -> None:
    one, other = (Store(tmp_path, {"a": 1}, fresh=False) for _ in range(2))
    one.write_json("runs/baseline.json", {})
    other.write_json("runs/patched.json", {})
    listed = json.loads((tmp_path / MARKER).read_text())["files"]
    assert listed == ["runs/baseline.json", "runs/patched.json", "settings.json"]


@pytest.mark.parametrize(
    ("name", "text"),
    [("settings.json", "{"), ("settings.json", "[1]"), (MARKER, "{"), (MARKER, "[]")],
)
def test_malformed_files_of_ours_are_told(
    name: str, text: str, micro_folder: Path, tmp_path: Path, capsys
) -> None:
    Store(tmp_path, {}, fresh=False)
    (tmp_path / name).write_text(text)
    arguments = ["compare", "--model", str(micro_folder), *QUICK, "--prompt", "a"]
    assert main([*arguments, "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert name in said and "Traceback" not in said
    assert (tmp_path / name).read_text() == text


def test_damaged_results_are_told(pipe, settings, tmp_path: Path) -> None:
    compare(pipe, "a red circle", out=tmp_path, settings=settings, network_number=False)
    record = next(tmp_path.glob("prompts/*/record.json"))
    text = record.read_text()
    for broken in (text[:100], "{}", '{"prompt": "a", "seed": null}'):
        record.write_text(broken)
        with pytest.raises(SamplingError, match=r"record\.json was changed since it was written"):
            compare(pipe, "a red circle", out=tmp_path, settings=settings, network_number=False)
    record.write_text(text)
    record.with_name("side_by_side.mp4").unlink()
    again = compare(pipe, "a red circle", out=tmp_path, settings=settings, network_number=False)
    assert record.with_name("side_by_side.mp4").is_file() and again.report.is_file()
    sample = next(tmp_path.glob("latents/*.patched.safetensors"))
    sample.write_bytes(sample.read_bytes()[:100])
    with pytest.raises(SamplingError, match="was changed since it was written"):
        compare(pipe, "a red circle", out=tmp_path, settings=settings, network_number=False)


# --- ffmpeg --------------------------------------------------------------------------------------


def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """An ffmpeg that does what `script` says; $FFMPEG is the real one, $OUT the file."""
    path = tmp_path / "bin" / "ffmpeg"
    path.parent.mkdir()
    real = imageio_ffmpeg.get_ffmpeg_exe()
    out = 'for last; do :; done; OUT="${last#file:}"'
    path.write_text(f"#!/bin/sh\nFFMPEG={real}\n{out}\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(path))


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ('"$FFMPEG" "$@"; echo "No space left on device" >&2; exit 228',
         "exit 228, No space left"),
        ("cat >/dev/null; exit 0", "expected 9 frames; got 0"),
        ('"$FFMPEG" "$@" && head -c 2000 "$OUT" >"$OUT.x" && mv "$OUT.x" "$OUT"', "ffmpeg failed"),
        ('head -c 1000 >/dev/null; kill -9 $$', "signal 9"),
    ],
    ids=["full", "nothing", "truncated", "killed"],
)  # fmt: skip
def test_a_good_video_is_not_replaced_by_a_broken_one(
    script: str, words: str, tmp_path: Path, monkeypatch
) -> None:
    path = tmp_path / "out" / "v.mp4"
    write_mp4(FRAMES, path, fps=16)
    good = path.read_bytes()
    stub(tmp_path, monkeypatch, script)
    with pytest.raises(OutputError, match=words) as caught:
        write_mp4(FRAMES, path, fps=16)
    assert str(path) in str(caught.value)
    assert everything(path.parent) == {"v.mp4": good}


def test_a_video_that_lost_frames_is_not_kept(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "v.mp4"
    some = (
        'case "$*" in *rawvideo*) head -c 49152 | "$FFMPEG" "$@"; cat >/dev/null; exit 0 ;; esac'
    )
    stub(tmp_path, monkeypatch, f'{some}; exec "$FFMPEG" "$@"')
    with pytest.raises(OutputError, match="expected 9 frames; got 4"):
        write_mp4(FRAMES, path, fps=16)
    assert not path.exists()


@pytest.mark.parametrize("name", ["v.mp4", "v.mov", "v.mkv", "v.m4v"])
def test_frames_are_counted_in_every_kind_of_file(name: str, tmp_path: Path) -> None:
    write_mp4(FRAMES, tmp_path / name, fps=16)
    assert video._count_frames(tmp_path / name, tmp_path / name) == len(FRAMES)


@pytest.mark.parametrize("name", ["-y.mp4", "concat:a.mp4", "%d.mp4", "a b'c.mp4"])
def test_a_name_is_a_name_to_ffmpeg(name: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_mp4(FRAMES, Path(name), fps=16)
    assert list(everything(tmp_path)) == [name]


def test_an_interrupted_encoder_leaves_the_old_video(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "v.mp4"
    path.write_text("old")
    run = subprocess.run

    def interrupted(*arguments: object, **how: object) -> None:
        run(*arguments, **how)  # type: ignore[call-overload]
        raise KeyboardInterrupt

    monkeypatch.setattr(video.subprocess, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_mp4(FRAMES, path, fps=16)
    assert everything(tmp_path) == {"v.mp4": b"old"}


def test_a_real_ctrl_c_while_ffmpeg_runs(tmp_path: Path, monkeypatch) -> None:
    """The signal goes to ffmpeg too, which then writes what it has and ends."""
    out = tmp_path / "out" / "v.mp4"
    out.parent.mkdir()
    out.write_text("old")
    stub(tmp_path, monkeypatch, f'echo half >"$OUT"; touch {tmp_path}/began; sleep 60')
    code = (
        "import os, sys, numpy; from pathlib import Path\n"
        "from turbo_rcm_patch.exit_codes import run_command\n"
        "from turbo_rcm_patch.video.video import write_mp4\n"
        "os.setsid()\n"
        "frames = numpy.zeros((9, 64, 64, 3), numpy.uint8)\n"
        "sys.exit(run_command(lambda: write_mp4(frames, Path(sys.argv[1]), 16), interrupted='.'))"
    )
    with processes.start(code, str(out)) as process:
        deadline = time.monotonic() + 120
        while not (tmp_path / "began").exists():
            assert process.code is None and time.monotonic() < deadline
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(30).code == 130
    assert everything(out.parent) == {"v.mp4": b"old"}


def test_no_ffmpeg_is_told_before_a_model_is_loaded(
    tmp_path: Path, monkeypatch, nothing_loads: None, capsys
) -> None:
    def none() -> str:
        raise RuntimeError("No ffmpeg exe could be found.")

    monkeypatch.setattr(imageio_ffmpeg, "get_ffmpeg_exe", none)
    for command in (["generate", "--prompt", "a"], ["compare", "--prompt", "a"], ["demo"]):
        assert main([*command, "--out", str(tmp_path / "out")]) == 2
        assert "no ffmpeg to write mp4 with" in capsys.readouterr().err
    monkeypatch.setattr(imageio_ffmpeg, "get_ffmpeg_exe", lambda: "/no/such/ffmpeg")
    with pytest.raises(MissingPackageError, match="IMAGEIO_FFMPEG_EXE"):
        write_mp4(FRAMES, tmp_path / "v.mp4", fps=16)


# --- exit codes ----------------------------------------------------------------------------------


def test_generate_on_a_full_disk_fails_and_keeps_the_old_video(
    micro_folder: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    path = tmp_path / "out" / "v.mp4"
    path.parent.mkdir()
    path.write_text("old")
    stub(tmp_path, monkeypatch, 'cat >/dev/null; echo "No space left on device" >&2; exit 228')
    arguments = ["generate", "--model", str(micro_folder), *QUICK, "--prompt", "a"]
    assert main([*arguments, "--out", str(path)]) == 2
    captured = capsys.readouterr()
    assert "No space left on device" in captured.err and str(path) in captured.err
    assert str(path) not in captured.out
    assert everything(path.parent) == {"v.mp4": b"old"}


@pytest.mark.parametrize(
    ("command", "name"),
    [("generate", "v.mp4"), ("generate", "folder"), ("compare", "folder"), ("demo", "folder")],
)
def test_an_output_that_cannot_be_written_is_told_before_a_model_is_loaded(
    command: str, name: str, tmp_path: Path, nothing_loads: None, capsys
) -> None:
    (tmp_path / "file").write_text("mine")
    prompt = [] if command == "demo" else ["--prompt", "a"]
    assert main([command, *prompt, "--out", str(tmp_path / "file" / name)]) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert everything(tmp_path) == {"file": b"mine"}


def test_a_trial_of_the_output_leaves_no_folder_behind(tmp_path: Path) -> None:
    out = str(tmp_path / "new" / "out")
    assert main(["generate", "--model", "/no/such", "--prompt", "a", "--out", out]) == 2
    assert main(["compare", "--model", "/no/such", "--prompt", "a", "--out", out]) == 2
    assert not list(tmp_path.iterdir())


def test_prompts_in_another_encoding_are_told(tmp_path: Path, capsys) -> None:
    listing = tmp_path / "prompts.txt"
    listing.write_bytes("un café".encode("latin-1"))
    for command in ("generate", "compare"):
        assert main([command, "--prompts", str(listing)]) == 2
        said = capsys.readouterr().err
        assert "a text in UTF-8" in said and "0xe9" in said and "iconv" in said


def test_a_byte_order_mark_is_no_part_of_a_prompt(tmp_path: Path) -> None:
    listing = tmp_path / "prompts.txt"
    listing.write_text("a cat\n", encoding="utf-8-sig")
    arguments = type("Arguments", (), {"prompt": [], "prompts": listing})
    assert commands._lines(arguments) == [("a cat", None)]  # type: ignore[arg-type]


def test_an_unexpected_error_does_not_exit_as_changed(monkeypatch, tmp_path: Path, capsys) -> None:
    """An uncaught error would be exit code 1, which says "changed"."""

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(commands, "_load", broken)
    assert main(["compare", "--prompt", "a", "--out", str(tmp_path)]) == 3
    said = capsys.readouterr().err
    assert "Traceback" in said and "an unexpected error" in said


def test_help_tells_the_exit_codes(capsys) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    table = text.split("exit codes:", 1)[1]
    codes = [value for value in vars(exit_codes).values() if isinstance(value, int)]
    assert len(codes) == 8 and all(f"\n  {code:<4} " in table for code in codes)
    page = (Path(__file__).parents[2] / "docs" / "comparing.md").read_text(encoding="utf-8")
    assert all(f"\n| {code} | " in page for code in codes)
    for command in ("doctor", "bench", "tune"):
        assert f"for {command}:" in " ".join(table.split()) and f"for `{command}`:" in page
    for command in ("compare", "demo"):
        assert main([command, "--help"]) == 0
        assert "3" in capsys.readouterr().out.split("Exit code", 1)[1].split("unexpected")[0]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="only Linux has such a file")
def test_a_full_disk_under_what_is_printed() -> None:
    done = processes.run(processes.COMMAND, "pairs", "--model", "tiny", out=Path("/dev/full"))
    assert done.code == 3 and "No space left" in done.err
