"""The command `generate`: what it writes, where, and what it says of what it wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from turbo_rcm_patch.__main__ import main
from turbo_rcm_patch.output import check_writable
from turbo_rcm_patch.sampling import commands, generation
from turbo_rcm_patch.sampling.many import Processes, Ranks
from turbo_rcm_patch.sampling.video import read_frames

SMALL = ["--height", "32", "--width", "32", "--num-frames", "5", "--max-sequence-length", "16"]


@pytest.fixture
def command(micro_folder: Path) -> list[str]:
    model = ["--model", str(micro_folder), "--device", "cpu", "--steps", "1", *SMALL]
    return ["generate", *model, "--no-patch"]


def size_of(video: Path) -> tuple[int, int]:
    """Width and height."""
    return read_frames(video)[0].size


def test_the_video_has_the_size_that_was_asked_for(command: list[str], tmp_path: Path) -> None:
    assert main([*command, "--prompt", "a circle", "--out", str(tmp_path / "v.mp4")]) == 0
    assert size_of(tmp_path / "v.mp4") == (32, 32)


def test_a_note_never_stands_beside_another_video(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same file is written for another prompt, without --resume, in between."""
    video, note = tmp_path / "v.mp4", tmp_path / "v.json"
    red, blue = (["--prompt", f"a {one} circle", "--out", str(video)] for one in ("red", "blue"))
    assert main([*command, *red, "--resume"]) == 0
    first = video.read_bytes()
    assert json.loads(note.read_text())["prompt"] == "a red circle"
    assert main([*command, *blue]) == 0
    assert json.loads(note.read_text())["prompt"] == "a blue circle"
    assert video.read_bytes() != first
    capsys.readouterr()
    assert main([*command, *red, "--resume"]) == 0
    assert "was there" not in capsys.readouterr().out
    assert video.read_bytes() == first


def test_a_failure_between_a_video_and_its_note_leaves_no_note(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    video = tmp_path / "v.mp4"
    given = [*command, "--prompt", "a circle", "--out", str(video), "--resume"]
    assert main(given) == 0

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(commands, "note_made", full)
    assert main([*given, "--seed", "1"]) != 0
    assert video.exists() and not video.with_suffix(".json").exists()


@pytest.mark.parametrize("given", [["--resume"], ["--prompt", "a square"]], ids=" ".join)
def test_a_file_that_is_no_note_is_not_replaced(
    given: list[str], command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has the name that a note would have."""
    folder = "--prompt" in given
    out = tmp_path if folder else tmp_path / "results.mp4"
    if folder:
        assert main([*command, "--prompt", "a circle", *given, "--out", str(out)]) == 0
        (note, *_) = sorted(tmp_path.glob("*.json"))
    else:
        note = tmp_path / "results.json"
    note.write_text('{"mine": 1}')
    assert main([*command, "--prompt", "a circle", *given, "--out", str(out)]) == 2
    assert note.name in capsys.readouterr().err
    assert note.read_text() == '{"mine": 1}'


def test_int8_weights_are_part_of_what_a_video_is_made_from(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where nothing is patched."""
    seen = []
    monkeypatch.setattr(commands, "_load", lambda *args: None)
    monkeypatch.setattr(commands, "_settings", lambda *args: generation.Settings())
    monkeypatch.setattr(commands, "_say_dense", lambda pipe: None)
    monkeypatch.setattr(
        commands, "_write_videos", lambda *args, **more: seen.append(json.dumps(args[3]))
    )
    for linear in ("int8-only", "as-is"):
        given = ["--prompt", "a circle", "--out", str(tmp_path), "--linear", linear]
        assert main([*command, *given]) == 0
    assert len(set(seen)) == 2


@pytest.mark.parametrize("where", ["latents", "frames"])
def test_a_video_that_is_not_finite_is_told(
    where: str,
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = {"latents": "_denoise", "frames": "decode_latents"}[where]
    original = getattr(generation, name)
    monkeypatch.setattr(generation, name, lambda *a, **k: original(*a, **k) * torch.nan)
    assert main([*command, "--prompt", "a circle", "--out", str(tmp_path / "v.mp4")]) == 2
    assert f"{where} that are not finite" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def test_one_of_two_processes_goes_on_where_its_only_prompt_fails(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """Each has one prompt. torchrun ends them all where one leaves with an error at once."""
    waited = []
    monkeypatch.setattr(commands, "_processes", lambda _: Processes(Ranks(1, 2, 1)))
    monkeypatch.setattr(Processes, "wait", lambda self: waited.append(True))
    monkeypatch.setattr("torch.distributed.init_process_group", lambda *a, **k: None)
    monkeypatch.setattr("torch.distributed.new_group", lambda *a, **k: None)
    monkeypatch.setattr("torch.distributed.destroy_process_group", lambda *a, **k: None)

    def fails(*args: Any, **more: Any) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(generation, "generate", fails)
    given = ["--prompt", "a circle", "--prompt", "a square", "--out", str(tmp_path)]
    assert main([*command, *given]) == 2
    assert waited, "it left without the others"
    assert "failed: 'a square' (seed 1): no memory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--seed", str(2**64)], "seed"),
        (["--seed", str(2**64 - 1), "--prompt", "a square"], "seed"),
        (["--guidance-scale-2", "3", "--sampler", "scheduler"], "no second expert"),
    ],
    ids=["seed", "the second prompt's seed", "a scale for an expert that is not there"],
)
def test_what_cannot_be_is_told(
    given: list[str], words: str, command: list[str], tmp_path: Path, capsys
) -> None:
    out = str(tmp_path / "out")
    assert main([*command, "--prompt", "a circle", *given, "--out", out]) == 2
    error = capsys.readouterr().err
    assert words in error and "unexpected" not in error


def test_a_folder_may_have_a_dot_in_its_name(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "b.old").mkdir()
    for name in ("v1.2", "b.old"):
        assert main([*command, "--prompt", "a circle", "--out", str(tmp_path / name)]) == 0
        assert len(list((tmp_path / name).glob("*.mp4"))) == 1


def test_an_address_that_is_missing_is_told(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    for name, value in (("WORLD_SIZE", "2"), ("RANK", "0"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    assert main([*command, "--prompt", "a circle", "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "MASTER_ADDR" in error and "torchrun" in error


def test_an_ffmpeg_that_cannot_run_is_told(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(tmp_path))  # a folder
    assert main([*command, "--prompt", "a circle", "--out", str(tmp_path / "v.mp4")]) == 2
    assert "IMAGEIO_FFMPEG_EXE" in capsys.readouterr().err


def test_a_place_that_another_process_tries_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It makes the folder in between, or removes it again."""
    target = tmp_path / "new" / "inner" / "v.mp4"
    make, turns = Path.mkdir, iter(["made", "removed"])

    def meanwhile(path: Path, *args: Any, **more: Any) -> None:
        turn = next(turns, "")
        if turn == "made":
            make(path)
        make(path, *args, **more)
        if turn == "removed":
            path.rmdir()

    monkeypatch.setattr(Path, "mkdir", meanwhile)
    check_writable(target)
    assert next(turns, "none left") == "none left"
