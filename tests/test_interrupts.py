"""An interruption ends a command as an interruption, whatever it hits, and leaves nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests import processes
from tests.files import stub_ffmpeg
from turbo_rcm_patch.checkpoints import read_checkpoint
from turbo_rcm_patch.cli.exit_codes import run_command
from turbo_rcm_patch.errors import ModelFolderError
from turbo_rcm_patch.files import atomic
from turbo_rcm_patch.video import video
from turbo_rcm_patch.video.loading import loading

FRAMES = np.zeros((9, 64, 64, 3), np.uint8)


def pressed_and_lost() -> None:
    """Do what torch does in native code: another error replaces the KeyboardInterrupt."""
    try:
        signal.raise_signal(signal.SIGINT)
        time.sleep(5)
    except KeyboardInterrupt:
        pass
    raise ValueError("could not determine the shape of object type 'UntypedStorage'")


def test_an_interruption_is_no_broken_model(tmp_path: Path, monkeypatch: Any) -> None:
    """From Python as well."""
    with pytest.raises(KeyboardInterrupt), loading(ModelFolderError, "it failed", expected="it"):
        pressed_and_lost()
    with pytest.raises(ModelFolderError), loading(ModelFolderError, "it failed", expected="it"):
        raise ValueError("a broken file")
    torch.save({"a": torch.zeros(1)}, tmp_path / "a.pth")
    monkeypatch.setattr(torch, "load", lambda *_, **__: pressed_and_lost())
    with pytest.raises(KeyboardInterrupt):
        read_checkpoint(tmp_path / "a.pth")


@pytest.mark.parametrize(
    ("stop", "code"),
    [
        (lambda: signal.raise_signal(signal.SIGINT), 130),
        (pressed_and_lost, 130),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), 143),
    ],
    ids=["ctrl-c", "lost", "sigterm"],
)
def test_a_command_that_is_stopped_cleans_up_and_says_what_is_kept(
    stop: Callable[[], None], code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGTERM)

    def run() -> int:
        with atomic(tmp_path / "v.mp4") as partial:
            partial.write_bytes(b"half")
            stop()
            time.sleep(30)
        return 0

    assert run_command(run, interrupted="Videos are kept.") == code
    assert not any(tmp_path.iterdir())
    assert capsys.readouterr().err == "\nVideos are kept.\n"
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_handler_of_the_caller_stays() -> None:
    """As that of a program that calls `main`."""
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        assert run_command(
            lambda: int(signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN), interrupted=""
        ) == 0  # fmt: skip
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def is_running(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes of Linux")
def test_a_ctrl_c_while_ffmpeg_is_being_started_leaves_no_process_and_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal comes when the child runs and its handle does not exist yet."""
    out, started = tmp_path / "out", tmp_path / "pid"
    stub_ffmpeg(tmp_path, monkeypatch, f'echo $$ >{started}; sleep 1; echo late >"$OUT"; sleep 60')

    class Pressed(subprocess.Popen[bytes]):
        def __init__(self, *given: Any, **more: Any) -> None:
            super().__init__(*given, **more)
            while not started.exists() or not started.read_text().strip():
                time.sleep(0.01)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(video, "Popen", Pressed)
    with pytest.raises(KeyboardInterrupt):
        video.write_mp4(FRAMES, out / "v.mp4", fps=16)
    assert not is_running(int(started.read_text()))
    time.sleep(1.2)
    assert not any(out.iterdir())


def test_a_ctrl_c_while_ffmpeg_runs_keeps_the_old_video(tmp_path, monkeypatch) -> None:
    out = tmp_path / "out" / "v.mp4"
    out.parent.mkdir()
    out.write_text("old")
    stub_ffmpeg(tmp_path, monkeypatch, f'echo half >"$OUT"; touch {tmp_path}/began; sleep 60')
    code = (
        "import os, sys, numpy; from pathlib import Path\n"
        "from turbo_rcm_patch.cli.exit_codes import run_command\n"
        "from turbo_rcm_patch.video.video import write_mp4\n"
        "os.setsid()\n"
        "frames = numpy.zeros((9, 64, 64, 3), numpy.uint8)\n"
        "sys.exit(run_command(lambda: write_mp4(frames, Path(sys.argv[1]), 16), interrupted='.'))"
    )
    with processes.start(code, str(out)) as process:
        process.until((tmp_path / "began").exists)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(30).code == 130
    assert [path.name for path in out.parent.iterdir()] == ["v.mp4"] and out.read_text() == "old"


def test_a_stream_that_is_closed_is_no_obstacle(tmp_path: Path) -> None:
    """`>&-` and `2>&-`: a file that is opened later does not become stdout."""
    code = (
        "import sys; from pathlib import Path\n"
        "from turbo_rcm_patch.cli.exit_codes import run_command\n"
        "def run():\n"
        "    print('said')\n"
        "    with Path(sys.argv[1]).open('w') as file: file.write('written')\n"
        "    print('said', file=sys.stderr)\n"
        "    return 0\n"
        "sys.exit(run_command(run, interrupted=''))"
    )
    command = f"'{sys.executable}' -c \"$CODE\" {tmp_path / 'file'} >&- 2>&-"
    done = subprocess.run(["sh", "-c", command], env=os.environ | {"CODE": code}, check=False)
    assert done.returncode == 0 and (tmp_path / "file").read_text() == "written"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (MemoryError(), "--offload"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 1 bytes"), "--offload"),
        (OSError(36, "File name too long"), "The system refused"),
        (ModuleNotFoundError("No module named 'torch'", name="torch"), "pip install torch"),
        (ZeroDivisionError("division by zero"), "Internal error (ZeroDivisionError)"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_every_failure_has_a_sentence_and_is_not_called_changed(error, told, capsys) -> None:
    """An uncaught error would be exit code 1, which says "changed"."""

    def run() -> int:
        raise error

    assert run_command(run, interrupted="") == 2
    said = capsys.readouterr().err
    assert told in said and ("Traceback" in said) == isinstance(error, ZeroDivisionError)
