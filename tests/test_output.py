"""A file is written whole or not at all, and what was in its place outlives every failure."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.files import everything
from turbo_rcm_patch.errors import OutputError, SamplingError
from turbo_rcm_patch.output import atomic, check_writable, merged


@pytest.mark.parametrize(
    "failure",
    [KeyboardInterrupt(), RuntimeError("no"), OSError(errno.ENOSPC, "No space left on device")],
    ids=["ctrl-c", "error", "full"],
)
def test_a_failure_leaves_what_was_there(tmp_path: Path, failure: BaseException) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")
    expected = OutputError if isinstance(failure, OSError) else type(failure)
    with pytest.raises(expected), atomic(path) as partial:
        partial.write_text("half")
        raise failure
    assert everything(tmp_path) == {"a.json": b"old"}


def test_a_disk_that_is_full_only_when_it_is_flushed(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    told = r"a\.json cannot be written.*No space.*another disk"
    with pytest.raises(OutputError, match=told), atomic(path) as partial:
        partial.write_text("new")
    assert everything(tmp_path) == {"a.json": b"old"}


def test_a_file_is_flushed_through_a_descriptor_that_may_write(tmp_path, monkeypatch) -> None:
    """Windows refuses any other, and has none for folders."""
    fcntl = pytest.importorskip("fcntl")

    def windows(descriptor: int) -> None:
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        if flags & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    monkeypatch.setattr(os, "fsync", windows)
    with atomic(tmp_path / "a.json") as partial:
        partial.write_text("new")
    with merged(tmp_path / "folder") as folder:
        (folder / "b").write_text("new")
    check_writable(tmp_path / "c")
    assert everything(tmp_path) == {"a.json": b"new", "folder/b": b"new"}


def test_a_typed_error_is_passed_on(tmp_path: Path) -> None:
    with pytest.raises(SamplingError, match="mine"), atomic(tmp_path / "a"):
        raise SamplingError("mine")


def test_a_link_stays_and_a_device_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    real, link = tmp_path / "there" / "a.txt", tmp_path / "a.txt"
    link.symlink_to(real)
    with atomic(link) as partial:
        partial.write_text("new")
    assert link.is_symlink() and real.read_text() == "new"
    fifo = tmp_path / "fifo.mp4"
    os.mkfifo(fifo)
    for path in (fifo, tmp_path / "there"):
        with pytest.raises(OutputError, match="cannot be written"), atomic(path):
            pytest.fail("nothing may be written for it")
        with pytest.raises(OutputError):
            check_writable(path)
    assert fifo.is_fifo()


def test_the_mode_of_a_replaced_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    path.chmod(0o640)
    with atomic(path) as partial:
        partial.write_text("new")
    assert path.stat().st_mode & 0o777 == 0o640


def test_two_writers_of_one_process_do_not_meet(tmp_path: Path) -> None:
    with atomic(tmp_path / "a.txt") as one, atomic(tmp_path / "a.txt") as other:
        assert one != other
        one.write_text("one")
        other.write_text("other")
    assert everything(tmp_path) == {"a.txt": b"one"}


@pytest.mark.parametrize("stopped", [False, True], ids=["whole", "ctrl-c"])
def test_a_folder_is_merged_whole_or_not_at_all(tmp_path: Path, stopped: bool) -> None:
    target = tmp_path / "model"
    (target / "vae").mkdir(parents=True)
    (target / "card.md").write_text("mine")
    (target / "vae" / "w").write_text("old")
    before = everything(tmp_path)

    def write() -> None:
        with merged(target) as made:
            (made / "vae").mkdir()
            (made / "vae" / "w").write_text("new")
            if stopped:
                raise KeyboardInterrupt
            (made / "index").write_text("new")

    if stopped:
        with pytest.raises(KeyboardInterrupt):
            write()
        assert everything(tmp_path) == before
    else:
        write()
        assert everything(target) == {"card.md": b"mine", "vae/w": b"new", "index": b"new"}
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_trial_leaves_no_trace(tmp_path: Path) -> None:
    check_writable(tmp_path / "x" / "y" / "z.mp4")
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"z\.mp4 cannot be written"):
        check_writable(tmp_path / "file" / "z.mp4")
    assert everything(tmp_path) == {"file": b""}


def test_a_file_system_without_room_is_told_before_the_work(tmp_path: Path) -> None:
    """A real refusal by the system: no file of this process may have more than 100 bytes."""
    code = (
        "import sys; from pathlib import Path; from turbo_rcm_patch.output import *\n"
        "from turbo_rcm_patch.errors import OutputError\n"
        "try: check_writable(Path(sys.argv[1]))\n"
        "except OutputError as error: print(error); sys.exit(7)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "new" / "v.mp4")],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100)),
    )
    assert (done.returncode, done.stderr) == (7, "")
    assert "v.mp4 cannot be written" in done.stdout and "Free some space" in done.stdout
    assert not list(tmp_path.iterdir())
