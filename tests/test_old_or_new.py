"""Whatever stops a writer, what was in its place is the old or the new, whole; and the next run
goes on. Nothing that somebody else wrote is lost."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests import processes
from tests.checkpoints.wan_model import QUANT, save
from tests.files import everything
from tests.stopped import WAYS, stopped_at
from turbo_rcm_patch.checkpoints.convert import convert_transformer
from turbo_rcm_patch.errors import ModelFolderError, OutputError, OutputExistsError
from turbo_rcm_patch.files import (
    atomic,
    atomic_folder,
    check_outside,
    check_writable,
    write_json,
    write_text,
)
from turbo_rcm_patch.video.store import Store
from turbo_rcm_patch.video.video import write_mp4


def listing(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# Stopped at any write.


def a_file(place: Path, which: str) -> None:
    write_json(place / "target", which)


def a_video(place: Path, which: str) -> None:
    frames = np.full((5, 32, 32, 3), 100 * (which == "new"), dtype=np.uint8)
    write_mp4(frames, place / "target.mp4", fps=8)


def write_folder(target: Path, text: str = "new") -> None:
    with atomic_folder(target, force=True) as folder:
        for name in ("config.json", "weights"):
            (folder / name).write_text(text)


def a_folder(place: Path, which: str) -> None:
    write_folder(place / "target", which)


def a_converted_folder(place: Path, which: str) -> None:
    dtype = torch.float32 if which == "new" else None
    convert_transformer(place.parent / "in.pth", place / "target", dtype=dtype, force=True)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("write", "least"), [(a_file, 2), (a_video, 2), (a_folder, 6), (a_converted_folder, 8)]
)
def test_stopped_at_any_write_the_old_or_the_new_is_there(
    write: Callable[[Path, str], None], least: int, way: str, tmp_path: Path
) -> None:
    """Between two renames the old folder may lie beside its place; the next run puts it back."""
    save(replace(QUANT, layers=1), tmp_path / "in.pth")
    place, start = tmp_path / "place", tmp_path / "start"
    contents = {}
    for which in ("new", "old"):
        place.mkdir(exist_ok=True)
        write(place, which)
        contents[which] = everything(place)
    assert contents["old"] != contents["new"]
    shutil.copytree(place, start)
    for step in itertools.count(1):
        shutil.rmtree(place)
        shutil.copytree(start, place)
        if not stopped_at(step, place, lambda: write(place, "new"), way):
            break
        aside = place / ".target.partial" / "old"
        if aside.exists() and not (place / "target").exists():
            found = {f"target/{name}": text for name, text in everything(aside).items()}
        else:
            found = {k: v for k, v in everything(place).items() if not k.startswith(".")}
        assert found in contents.values(), f"step {step}"
        if step % 5 == 1 or aside.exists():
            write(place, "new")
            found = {k: v for k, v in everything(place).items() if "partial-" not in k}
            assert found == contents["new"]
    assert step > least, "it wrote less often than was thought"
    assert everything(place) == contents["new"]


def test_a_comparison_killed_at_any_write_is_opened_again(tmp_path: Path) -> None:
    out, key = tmp_path / "out", Store.key("a", 0)
    frames, note = torch.ones(2), {"seconds": 1.0}

    def run() -> None:
        store = Store(out, {"model": "m"}, fresh=False)
        store.save_clip(key, "baseline", frames, note)
        store.write_json("runs/baseline.json", {"a": 1})

    for step in itertools.count(1):
        shutil.rmtree(out, ignore_errors=True)
        if not stopped_at(step, tmp_path, run):
            break
        store = Store(out, {"model": "m"}, fresh=False)
        if store.has_clip(key, "baseline"):
            kept, how = store.load_clip(key, "baseline")
            assert torch.equal(kept, frames) and how == note
        assert store.read_json("runs/baseline.json") in (None, {"a": 1})
        assert not list(out.rglob(".*")), "what a killed process left is removed"
    assert step > 5
    for step in itertools.count(1):  # And while it is removed to start again.
        if not stopped_at(step, tmp_path, lambda: Store(out, {"model": "n"}, fresh=True)):
            break
        if json.loads((out / "settings.json").read_text())["model"] == "n":
            assert not (out / "clips").exists(), "it is called new when the old is gone"
        Store(out, {"model": "m"}, fresh=True).save_clip(key, "baseline", frames, note)
    assert step > 3 and not (out / "clips").exists()


# Errors.


@contextmanager
def folder_writer(target: Path) -> Iterator[Path]:
    with atomic_folder(target, force=True) as made:
        yield made / "config.json"


QUOTED = [
    OSError(errno.ENOSPC, "No space left on device"),
    shutil.Error([("a", "b", "[Errno 28] No space left on device: 'b'")]),
    Exception("Error while serializing: I/O error: No space left on device (os error 28)"),
]
OTHERS = [KeyboardInterrupt(), ModelFolderError("the base"), KeyError("x")]


@pytest.mark.parametrize("error", QUOTED + OTHERS, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("writer", [atomic, folder_writer])
def test_a_full_disk_is_told_and_other_errors_are_passed_on(
    writer: Callable[[Path], AbstractContextManager[Path]], error: BaseException, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    with writer(target) as path:
        path.write_text("before")
    before = everything(tmp_path)
    with pytest.raises((OutputError, type(error))) as caught, writer(target) as path:
        path.write_text("half")
        raise error
    if error in OTHERS:
        assert caught.value is error
        # An error of reading is not one of the folder; a file is all that its block writes.
        unread = PermissionError(errno.EACCES, "Permission denied", "base")
        kind = PermissionError if writer is folder_writer else OutputError
        with pytest.raises(kind), writer(target):
            raise unread
    else:
        told = ("target cannot be written", "No space", "GiB free", "another disk")
        assert all(text in str(caught.value) for text in told)
    assert everything(tmp_path) == before and listing(tmp_path) == ["target"]


def test_a_full_disk_may_show_only_when_a_file_is_flushed(tmp_path: Path, monkeypatch) -> None:
    write_text(tmp_path / "a.json", "old")

    def flush(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", flush)
    with pytest.raises(OutputError, match=r"a\.json cannot be written.*No space"):
        write_text(tmp_path / "a.json", "new")
    with pytest.raises(OutputError, match="Free some space"):
        check_writable(tmp_path / "new" / "v.mp4")
    assert everything(tmp_path) == {"a.json": b"old"}


#: Processes whose files may have so many bytes: writing fails as on a full disk.
LIMITED = """
import resource, sys
from turbo_rcm_patch.__main__ import main
resource.setrlimit(resource.RLIMIT_FSIZE, (2**16,) * 2)
sys.exit(main(sys.argv[1:]))
"""


def test_a_real_write_that_fails(tmp_path: Path) -> None:
    save(QUANT, tmp_path / "in.pth")
    out = tmp_path / "out"
    done = processes.run(LIMITED, "convert", str(tmp_path / "in.pth"), str(out))
    assert done.code == 2 and f"{out} cannot be written" in done.err, done.err
    assert "Traceback" not in done.err
    assert listing(tmp_path) == ["in.pth"]


# Files of others, and other processes.


def test_a_link_stays_a_device_is_not_replaced_and_a_mode_is_kept(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    real, link = tmp_path / "there" / "a.txt", tmp_path / "a.txt"
    real.write_text("old")
    real.chmod(0o640)
    link.symlink_to(real)
    write_text(link, "new")
    assert link.is_symlink() and real.read_text() == "new"
    assert real.stat().st_mode & 0o777 == 0o640
    fifo = tmp_path / "fifo.mp4"
    os.mkfifo(fifo)
    for path in (fifo, tmp_path / "there"):
        with pytest.raises(OutputError, match="cannot be written"), atomic(path):
            pytest.fail("nothing may be written for it")
        with pytest.raises(OutputError):
            check_writable(path)
    assert fifo.is_fifo()


def test_two_writers_of_one_process_do_not_meet(tmp_path: Path) -> None:
    with atomic(tmp_path / "a.txt") as one, atomic(tmp_path / "a.txt") as other:
        assert one != other
        one.write_text("one")
        other.write_text("other")
    assert everything(tmp_path) == {"a.txt": b"one"}


def test_a_folder_replaces_no_folder_of_others(tmp_path: Path, monkeypatch: Any) -> None:
    """Not without `force`, none that appeared meanwhile, and with it only one of a model."""
    target = tmp_path / "target"
    with (
        pytest.raises(OutputExistsError, match="already exists"),
        atomic_folder(target, force=False) as made,
    ):
        (made / "config.json").write_text("ours")
        target.write_text("theirs")
    assert target.read_text() == "theirs" and listing(tmp_path) == ["target"]
    photos = tmp_path / "photos"
    photos.mkdir()
    (photos / "cat.png").write_text("a cat")
    for place in (target, photos):
        with pytest.raises(OutputExistsError, match="is not replaced"):
            write_folder(place)
    with pytest.raises(OutputExistsError, match="which is read"):
        check_outside(photos, photos / "cat.png")
    (photos / "config.json").write_text("a model")
    monkeypatch.chdir(photos)
    write_folder(Path("."))
    assert listing(photos) == ["config.json", "weights"]
    assert listing(tmp_path) == ["photos", "target"]


def test_a_folder_needs_room_and_a_place(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    with (
        pytest.raises(OutputExistsError, match="too little space for out"),
        atomic_folder(tmp_path / "out", force=False, needed=2 * free),
    ):
        pytest.fail("it is refused before hours of work")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OutputError, match="cannot be written"):
        write_folder(tmp_path / "file" / "out")
    assert everything(tmp_path) == {"file": b"mine"}


WAITS = """
import sys, time; from pathlib import Path
from turbo_rcm_patch.files import atomic_folder
with atomic_folder(Path(sys.argv[1]), force=True) as made:
    (made / "config.json").write_text("half")
    print("writes", flush=True); time.sleep(600)
"""


def test_a_live_process_keeps_its_target_and_a_killed_ones_parts_go(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for end in (signal.SIGINT, signal.SIGKILL):
        with processes.start(WAITS, str(out)) as process:
            process.until(lambda: "writes" in process.out)
            with pytest.raises(OutputExistsError, match="being written by another process"):
                write_folder(out)
            os.kill(process.pid, end)
            process.wait(60)
        assert listing(tmp_path) == ([] if end == signal.SIGINT else [".out.partial"])
    write_folder(out)
    assert listing(tmp_path) == ["out"] and listing(out) == ["config.json", "weights"]
