"""The command `generate`: what it writes, where, and what it says of what it wrote."""

from __future__ import annotations

import argparse
import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from turbo_rcm_patch.__main__ import main
from turbo_rcm_patch.errors import ConfigError, ContextParallelError, SamplingError
from turbo_rcm_patch.exit_codes import run_command
from turbo_rcm_patch.output import atomic, check_writable
from turbo_rcm_patch.video import commands, generation
from turbo_rcm_patch.video.many import Processes, Ranks
from turbo_rcm_patch.video.source import Source
from turbo_rcm_patch.video.video import read_frames

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


def test_a_file_that_is_no_note_is_not_replaced(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has the name that the note would have."""
    note = tmp_path / "results.json"
    note.write_text('{"mine": 1}')
    given = [*command, "--prompt", "a circle", "--out", str(tmp_path / "results.mp4")]
    assert main([*given, "--resume"]) == 2
    assert note.name in capsys.readouterr().err
    assert main(given) == 0
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


def test_a_failure_in_a_group_that_splits_videos_ends_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Going on, it would exchange the next video's tokens for those of this one."""

    def fails(*args: Any, **more: Any) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(generation, "generate", fails)
    work = [commands._Work(Source(p), 0, tmp_path / f"{p}.mp4", noted=True) for p in ("a", "b")]
    group = SimpleNamespace(split="Ulysses 2", leads=False, from_leader=lambda make: make())
    settings, progress = generation.Settings(steps=1), lambda *_: None
    with pytest.raises(RuntimeError, match="no memory"):
        commands._write_videos(
            None, work, settings, {}, progress, group, resume=False, several=True
        )
    group.split = ""
    with pytest.raises(SamplingError, match="2 of 2 prompts failed"):
        commands._write_videos(
            None, work, settings, {}, progress, group, resume=False, several=True
        )


def test_a_list_of_prompts_is_read_line_by_line(tmp_path: Path) -> None:
    """What Unicode takes for the end of a line may be part of a prompt."""
    listing = tmp_path / "prompts.txt"
    listing.write_bytes("a cat\u2028sits\r\n\n  a dog \tdog.png\n".encode())
    given = argparse.Namespace(prompt=["first"], prompts=listing)
    expected = [("first", None), ("a cat\u2028sits", None), ("a dog", tmp_path / "dog.png")]
    assert commands._lines(given) == expected
    listing.write_text("a cat\n\tcat.png\n")
    with pytest.raises(SamplingError, match=r"line 2.*a prompt before the tab"):
        commands._lines(given)
    for text in ("", "\n \n"):
        listing.write_text(text)
        with pytest.raises(ConfigError, match=r"prompts\.txt; .* got no line with text"):
            commands._lines(argparse.Namespace(prompt=[], prompts=listing))
    with pytest.raises(ConfigError, match="an empty one"):
        commands._lines(argparse.Namespace(prompt=[" "], prompts=None))
    with pytest.raises(ConfigError, match="a text in UTF-8"):
        commands._lines(argparse.Namespace(prompt=["a \udcff"], prompts=None))


@pytest.mark.parametrize(
    ("given", "device"),
    [(None, "cuda:1"), ("cuda", "cuda:1"), ("cuda:0", "cuda:0"), ("cpu", "cpu")],
)
def test_each_process_has_the_gpu_of_its_number(
    given: str | None, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert Ranks(3, 4, 1).device(given) == device
    assert Ranks().device(given) == given
    with pytest.raises(ConfigError, match="at most 2, one for each GPU"):
        Ranks(3, 4, 2).device("cuda")


def test_without_gpus_no_video_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 0)
    processes = Processes(Ranks(0, 2, 0), ulysses=2)
    split = processes.splitting(SimpleNamespace(transformer=None))
    with pytest.raises(ContextParallelError, match="expected GPUs"), split:
        pass


def test_an_end_by_the_system_cleans_up_and_says_what_is_kept(tmp_path: Path, capsys) -> None:
    """As torchrun and batch systems end a process."""
    before = signal.getsignal(signal.SIGTERM)

    def run() -> int:
        with atomic(tmp_path / "v.mp4") as partial:
            partial.write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(30)
        return 0

    with pytest.raises(SystemExit) as stopped:
        run_command(run, interrupted="Videos are kept.")
    assert stopped.value.code == 143 and not any(tmp_path.iterdir())
    assert capsys.readouterr().err == "\nVideos are kept.\n"
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: 1 bytes")]
)
def test_too_little_memory_is_not_unexpected(error: Exception, capsys) -> None:
    def run() -> int:
        raise error

    assert run_command(run, interrupted="") == 2
    assert "--offload" in capsys.readouterr().err


def test_what_is_printed_goes_where_stdout_does() -> None:
    """Beside bars on a terminal, `> FILE` still gets the lines."""
    code = (
        "from turbo_rcm_patch.video.progress import bars\n"
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


@pytest.mark.parametrize(("ulysses", "waits"), [(1, True), (2, False)], ids=["alone", "split"])
def test_who_waits_for_the_others_after_an_error(
    ulysses: int, waits: bool, command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a group that splits videos the others wait for this process, and so for ever."""
    waited = []
    monkeypatch.setattr(
        commands, "_processes", lambda _: Processes(Ranks(1, 2, 1), ulysses=ulysses)
    )
    monkeypatch.setattr(Processes, "wait", lambda self: waited.append(True))
    for name in ("init_process_group", "new_group", "destroy_process_group"):
        monkeypatch.setattr(f"torch.distributed.{name}", lambda *a, **k: None)

    def fails(*args: Any) -> None:
        raise SamplingError("a bad prompt")

    monkeypatch.setattr(commands, "_write_share", fails)
    assert main([*command, "--prompt", "a", "--prompt", "b", "--out", str(tmp_path)]) == 2
    assert bool(waited) == waits


def test_a_handler_of_somebody_else_s_stays() -> None:
    """As that of a program that calls `main`, or of a library in C, which Python calls None."""
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        assert (
            run_command(
                lambda: int(signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN), interrupted=""
            )
            == 0
        )
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)
