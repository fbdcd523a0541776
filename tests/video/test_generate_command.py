"""The command `generate`: what it writes, where, and what it says of what it wrote."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.files import everything
from tests.video.cases import picture
from tests.video.micro import QUICK, micro_image_pipe, micro_pipe, micro_video_pipe, save
from turbo_rcm_patch.__main__ import main
from turbo_rcm_patch.cli import inputs
from turbo_rcm_patch.cli.inputs import read_prompts
from turbo_rcm_patch.cli.options import Generate
from turbo_rcm_patch.cli.progress import bars
from turbo_rcm_patch.errors import OutputError
from turbo_rcm_patch.files import atomic, lock_folder
from turbo_rcm_patch.tiny.prompts import DEMO_PROMPTS
from turbo_rcm_patch.video import generation, store
from turbo_rcm_patch.video.source import digest_of
from turbo_rcm_patch.video.video import read_frames


@pytest.fixture
def command(micro_folder: Path) -> list[str]:
    return ["generate", "--model", str(micro_folder), *QUICK, "--steps", "1", "--no-patch"]


def test_one_prompt_makes_a_file_and_many_a_folder(command, tmp_path, capsys, monkeypatch):
    """The number of frames and the time of each are printed. A folder may have a dot in its
    name."""
    really = generation.generate
    monkeypatch.setattr(
        generation,
        "generate",
        lambda *a, **k: replace(really(*a, **k), seconds=3.0, decode_seconds=1.0),
    )
    video, many = tmp_path / "one.mp4", tmp_path / "v1.2"
    given = [*command, "--prompt", "a red circle", "--num-frames", "8", "--out"]
    assert main([*given, str(video)]) == 0
    assert read_frames(video)[0].shape == (32, 32, 3), "the size that was asked for"
    note = json.loads(video.with_suffix(".json").read_text())
    assert (note["prompt"], note["seed"], note["patch"]) == ("a red circle", 0, None)
    assert note["frames"] == 5, "as many as the VAE makes"
    out = capsys.readouterr().out
    assert "one.mp4  5 frames, 3.00 s, and 1.00 s to decode\n" in out
    last = out.splitlines()[-1]
    expected = "4 s a video (3 s encoding and denoising, 1 s decoding; a first video) on "
    assert last.startswith(expected), last
    assert main([*given, str(video), "--resume"]) == 0 and "was there" in capsys.readouterr().out
    listing = tmp_path / "prompts.txt"
    listing.write_text("a red circle\n\n  a blue square  \n")
    assert main([*command, "--prompts", str(listing), "--out", str(many)]) == 0
    assert "decoding; median of 1 after the first) on " in capsys.readouterr().out
    (tmp_path / "b.old").mkdir()
    assert main([*given, str(tmp_path / "b.old")]) == 0
    for folder, count in ((many, 2), (tmp_path / "b.old", 1)):
        assert len(list(folder.glob("*.mp4"))) == len(list(folder.glob("*.json"))) == count


def test_resume_keeps_a_video_that_was_made_from_the_same(command, tmp_path, capsys) -> None:
    """It is finished when the file and its note are there. One that was made otherwise stays."""
    video = tmp_path / "v.mp4"
    given = [*command, "--out", str(video), "--resume", "--prompt"]

    def was_there(*more: str) -> bool:
        assert main([*given, *more]) == 0
        return "was there" in capsys.readouterr().out

    assert not was_there("a circle") and was_there("a circle")
    before = video.read_bytes()
    for more, name in (
        (["--seed", "1"], "seed=0, now 1"),
        (["--num-frames", "9"], "settings.num_frames=5, now 9"),
        (["--linear", "int8-only"], 'weights="as stored", now "int8"'),
    ):
        assert main([*given, "a circle", *more]) == 2
        assert name in capsys.readouterr().err.replace("\n            ", " ")
    assert video.read_bytes() == before
    video.with_suffix(".json").write_text("{")
    assert main([*given, "a circle"]) == 2, "another file has the name of the note"
    video.with_suffix(".json").unlink()
    assert not was_there("a circle")
    video.unlink()
    assert not was_there("a circle")


def test_a_failure_between_a_video_and_its_note_leaves_no_note(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    video = tmp_path / "v.mp4"
    given = [*command, "--prompt", "a circle", "--out", str(video)]
    assert main(given) == 0

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "note_made", full)
    assert main([*given, "--seed", "1"]) == 2
    assert video.exists() and not video.with_suffix(".json").exists()


def test_a_full_disk_ends_the_run(command, tmp_path, monkeypatch, capsys) -> None:
    """The next video would not be written either, and would take minutes."""
    made, really = [], generation.generate

    def counted(*given: Any, **more: Any) -> Any:
        made.append(given)
        return really(*given, **more)

    def full(*_: Any, **__: Any) -> None:
        raise OutputError(f"{tmp_path}/a.mp4 cannot be written", got="No space left on device")

    monkeypatch.setattr(generation, "generate", counted)
    monkeypatch.setattr(generation, "write_mp4", full)
    prompts = ["--prompt", "a circle", "--prompt", "a square"]
    assert main([*command, *prompts, "--out", str(tmp_path)]) == 2
    assert len(made) == 1 and "a.mp4 cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize("resume", [[], ["--resume"]], ids=["again", "resume"])
def test_videos_in_a_folder_that_were_made_otherwise_stay(
    resume, command, tmp_path, capsys
) -> None:
    given = [*command, "--prompt", "a circle", "--out", str(tmp_path)]
    assert main(given) == 0
    before = everything(tmp_path)
    assert main([*given, "--steps", "2", *resume]) == 2
    said = capsys.readouterr().err
    assert "settings.steps=1, now 2" in said and "Choose another --out" in said
    assert everything(tmp_path) == before
    assert main([*given, *resume]) == 0, "the same may be made again"


def test_a_shipped_model_is_said_to_be_a_toy(command, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(generation, "settings_for", lambda *_, **__: 1 / 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("turbo_rcm_patch.cli.generate.load", lambda *_: micro_pipe())
        main(["generate", "--prompt", "a cat", "--out", str(tmp_path / "a.mp4")])
    said = capsys.readouterr().out
    assert "'tiny' is a toy" in said and DEMO_PROMPTS[0] in said and "--model" in said


def test_a_file_that_is_no_note_is_not_replaced(command: list[str], tmp_path, capsys) -> None:
    """It has the name that the note would have."""
    note = tmp_path / "results.json"
    note.write_text('{"mine": 1}')
    given = [*command, "--prompt", "a circle", "--out", str(tmp_path / "results.mp4")]
    assert main(given) == 2
    assert "results.json, which would say" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [note.name]
    assert note.read_text() == '{"mine": 1}'


@pytest.mark.parametrize("where", ["latents", "frames"])
def test_a_video_that_is_not_finite_is_told(where, tmp_path, capsys) -> None:
    pipe = micro_pipe()
    with torch.no_grad():
        layer = pipe.transformer.proj_out if where == "latents" else pipe.vae.post_quant_conv
        layer.bias.fill_(torch.nan)
    model, out = save(pipe, tmp_path / "model"), tmp_path / "out"
    out.mkdir()
    given = ["--model", str(model), *QUICK, "--prompt", "a circle", "--out", str(out / "v.mp4")]
    assert main(["generate", *given, "--no-patch"]) == 2
    assert f"{where} that are not finite" in capsys.readouterr().err
    assert not any(out.iterdir())


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("models")
    return {
        "text": save(micro_pipe(), place / "text"),
        "image": save(micro_image_pipe(experts=False), place / "image"),
        "video": save(micro_video_pipe(), place / "video"),
    }


#: Files that the commands below name.
FILES = {
    "text.png": b"not an image",
    "empty.txt": b"\n \n",
    "latin.txt": "un café".encode("latin-1"),
}
#: A model, what is given beside a prompt, and what is said.
MISTAKES = [
    ("text", ["--seed", str(2**64)], "seed"),
    ("text", ["--seed", str(2**64 - 1), "--prompt", "a square"], "seed"),
    ("text", ["--out", "circle.avi"], "a file that ends in one of"),
    ("text", ["--out", "one.mp4", "--prompt", "a square"], "a folder, because there are 2"),
    ("text", ["--prompts", "none.txt"], "No such file"),
    ("text", ["--prompts", "empty.txt"], "no line with text"),
    ("text", ["--prompts", "latin.txt"], "byte 0xe9 at position 6 remedy: Convert it"),
    ("text", ["--prompt", " "], "an empty one"),
    ("image", [], "--image FILE"),
    ("image", ["--image", "none.png"], "No such file"),
    ("image", ["--image", "text.png"], "cannot be read"),
    ("image", ["--image", "cut.png"], "cannot be read"),
    ("text", ["--image", "good.png"], "WanImageToVideoPipeline"),
    ("video", [], "compare takes any with make="),
    ("none", [], "no such folder: none"),
]


@pytest.mark.parametrize(
    ("command", "model", "given", "told"),
    [*(("generate", *row) for row in MISTAKES),
     *(("compare", *row) for row in MISTAKES if "--out" not in row[1])],
)  # fmt: skip
def test_mistakes_are_told_before_a_model_is_loaded(
    command, model, given, told, folders, tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(inputs, "load_pipeline", lambda *_, **__: pytest.fail("it was loaded"))
    for name, content in FILES.items():
        Path(name).write_bytes(content)
    picture().save("good.png")
    Path("cut.png").write_bytes(Path("good.png").read_bytes()[:60])
    before = sorted(tmp_path.iterdir())
    line = [command, "--model", str(folders.get(model, model)), *QUICK, "--prompt", "a circle"]
    assert main([*line, "--out", "out", *given]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert told in said and "Traceback" not in said
    assert sorted(tmp_path.iterdir()) == before


def test_an_image_is_the_first_frame_and_part_of_what_a_video_is_made_from(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture().save(tmp_path / "one.png")
    out = tmp_path / "out"
    given = ["generate", "--model", str(folders["image"]), *QUICK, "--resume", "--out", str(out)]
    given += ["--prompt", "a circle", "--prompt", "a square", "--image", str(tmp_path / "one.png")]
    assert main(given) == 0
    videos = sorted(out.glob("*.mp4"))
    notes = [json.loads(path.with_suffix(".json").read_text()) for path in videos]
    assert [note["prompt"] for note in notes] == ["a circle", "a square"]
    assert {note["inputs"] for note in notes} == {digest_of(picture())}
    before = {path: path.stat().st_mtime_ns for path in out.glob("*.mp4")}
    capsys.readouterr()
    picture(6).save(tmp_path / "one.png")
    assert main(given) == 2
    assert "inputs" in capsys.readouterr().err, "the other image is another video"
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())


def test_an_ffmpeg_that_cannot_run_is_told(command, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(tmp_path))  # a folder
    assert main([*command, "--prompt", "a circle", "--out", str(tmp_path / "v.mp4")]) == 2
    assert "IMAGEIO_FFMPEG_EXE" in capsys.readouterr().err


def test_a_list_of_prompts_is_read_line_by_line(tmp_path: Path) -> None:
    """What Unicode takes for the end of a line may be part of a prompt, and a byte order mark is
    none."""
    listing = tmp_path / "prompts.txt"
    listing.write_text("a cat\u2028sits\r\n\n  a dog \n", "utf-8-sig", newline="")
    prompts = read_prompts(Generate(prompt=("first",), prompts=listing))
    assert prompts == ["first", "a cat\u2028sits", "a dog"]


def test_what_is_printed_goes_where_stdout_does() -> None:
    """Beside bars on a terminal, `> FILE` still gets the lines."""
    code = (
        "from turbo_rcm_patch.cli.progress import bars\n"
        "with bars() as progress:\n"
        "    progress('generate', 1, 2)\n"
        "    print('made.mp4')\n"
    )
    terminal, end = pty.openpty()
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=end, timeout=100
        )
    finally:
        os.close(end)
        os.close(terminal)
    assert done.stdout == b"made.mp4\n"


def test_a_line_of_progress_says_what_is_left_by_the_time_since_its_stage_began(
    monkeypatch, capsys
) -> None:
    """A stage may begin with some of it done: a first step, or an earlier command's videos."""
    monkeypatch.setattr("turbo_rcm_patch.cli.progress._EVERY", 0.0)
    with bars() as progress:
        progress("generate", 100, 1000)
        time.sleep(0.1)
        progress("generate", 101, 1000)
    first, second = capsys.readouterr().err.splitlines()
    assert first == "generate: 100 of 1000"
    assert re.fullmatch(r"generate: 101 of 1000, 0:0[1-9]:\d\d left", second), second


def test_a_run_removes_what_a_killed_process_left_and_nothing_else(command, tmp_path) -> None:
    """A process that is at work holds a lock on its unfinished file."""
    (tmp_path / ".mine").write_text("mine")
    with atomic(tmp_path / "v.mp4") as at_work:
        left = at_work.with_name(".turbo_rcm_patch-partial-0.mp4")
        left.write_bytes(b"half")
        assert main([*command, "--prompt", "a", "--out", str(tmp_path / "v.mp4")]) == 0
        names = {path.name for path in tmp_path.iterdir()}
        assert names == {".mine", at_work.name, "v.mp4", "v.json"}
        at_work.write_bytes(b"whole")


def test_two_runs_do_not_write_into_one_folder(command: list[str], tmp_path: Path, capsys) -> None:
    given = [*command, "--prompt", "a circle", "--out", str(tmp_path)]
    with lock_folder(tmp_path):
        assert main(given) == 2
    assert "in use by another run" in capsys.readouterr().err and not list(tmp_path.glob("*"))
    assert main(given) == 0


def test_a_reader_that_has_gone_is_no_failed_video(command, tmp_path, capsys, monkeypatch) -> None:
    """As with `| head -1`."""

    def closed(*_: object, **__: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(generation, "generate", closed)
    given = [*command, "--prompt", "a circle", "--prompt", "a square", "--out", str(tmp_path)]
    monkeypatch.setattr("turbo_rcm_patch.cli.exit_codes._discard_stdout", lambda: None)
    assert main(given) == 141
    assert "failed" not in capsys.readouterr().err
