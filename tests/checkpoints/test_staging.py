"""A target is complete or absent: full disks, Ctrl-C, killed processes, and wrong bases."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests import processes
from tests.checkpoints.test_convert_command import base_folder, listing
from tests.files import everything
from turbo_rcm_patch.__main__ import main
from turbo_rcm_patch.checkpoints import EXTRA_FILE, write_checkpoint
from turbo_rcm_patch.checkpoints.convert import convert_pipeline, convert_transformer
from turbo_rcm_patch.checkpoints.staging import staged
from turbo_rcm_patch.errors import (
    ModelFolderError,
    OutputError,
    OutputExistsError,
    TurboRCMError,
)

#: A process whose files may have so many bytes: writing fails as on a full disk.
LIMITED = """
import resource, sys
from turbo_rcm_patch.__main__ import main
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)
sys.exit(main(sys.argv[2:]))
"""
WAITS = """
import sys, time; from pathlib import Path
from turbo_rcm_patch.checkpoints.staging import staged
with staged(Path(sys.argv[1]), force=True, folder=True) as made:
    (made / "config.json").write_text("half")
    print("writes", flush=True); time.sleep(600)
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base_folder(tmp_path_factory.mktemp("base") / "base")


def test_a_real_write_that_fails(pth: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = processes.run(LIMITED, str(2**16), "convert", str(pth), str(out))
    assert done.code == 2, done.err
    assert f"{out} cannot be written" in done.err and "Traceback" not in done.err
    assert listing(tmp_path) == ["in.pth"]


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("[enforce fail at inline_container.cc:672] . PytorchStreamWriter failed "
                     "writing file data/3: file write failed"),
        shutil.Error([("a", "b", "[Errno 28] No space left on device: 'b'")]),
        Exception("Error while serializing: I/O error: No space left on device (os error 28)"),
        KeyboardInterrupt(),
        ModelFolderError("the base"),
        KeyError("x"),
    ],
    ids=["python", "torch", "shutil", "safetensors", "interrupt", "typed", "other"],
)  # fmt: skip
@pytest.mark.parametrize("folder", [True, False])
def test_a_failure_leaves_what_was_there(error: BaseException, folder: bool, tmp_path) -> None:
    target = tmp_path / "target"
    if folder:
        target.mkdir()
    (target / "config.json" if folder else target).write_text("before")
    with (
        pytest.raises((OutputError, type(error))) as caught,
        staged(target, force=True, folder=folder) as made,
    ):
        (made / "config.json" if folder else made).write_text("half")
        raise error
    if isinstance(error, KeyboardInterrupt | ModelFolderError | KeyError):
        assert caught.value is error
    else:
        assert "target cannot be written" in str(caught.value)
        assert "GiB free" in str(caught.value)
    assert (target / "config.json" if folder else target).read_text() == "before"
    assert listing(tmp_path) == ["target"]


@pytest.mark.parametrize("folder", [True, False])
def test_what_came_meanwhile_is_not_replaced(folder: bool, tmp_path: Path) -> None:
    target = tmp_path / "target"
    with (
        pytest.raises(OutputExistsError, match="already exists"),
        staged(target, force=False, folder=folder) as made,
    ):
        (made / "config.json" if folder else made).write_text("ours")
        target.write_text("theirs")
    assert target.read_text() == "theirs"
    assert listing(tmp_path) == ["target"]


def test_no_room_and_no_place(pth: Path, tmp_path: Path, whole: Path, monkeypatch: Any) -> None:
    """Copies of the base need room too, and links none."""
    base = Path(shutil.copytree(whole, tmp_path / "base"))
    (base / "vae" / "large.dat").touch()
    os.truncate(base / "vae" / "large.dat", 2**40)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=2**36))
    with pytest.raises(OutputExistsError, match="too little space for out"):
        convert_pipeline(pth, tmp_path / "out", base=base, copy=True)
    convert_pipeline(pth, tmp_path / "out", base=base)
    with pytest.raises(OutputError, match="cannot be written"):
        convert_transformer(pth, pth / "out")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=2**10))
    with pytest.raises(OutputExistsError, match="too little space"):
        write_checkpoint(tmp_path / "out", tmp_path / "back.pth")
    assert listing(tmp_path) == ["base", "in.pth", "out"]


def test_ctrl_c_and_kill(tmp_path: Path) -> None:
    """A live process keeps its target to itself; what a killed one left goes with the next."""
    out = tmp_path / "out"
    for end in (signal.SIGINT, signal.SIGKILL):
        with processes.start(WAITS, str(out)) as process:
            process.until(lambda: "writes" in process.out)
            with (
                pytest.raises(OutputExistsError, match="being written by another process"),
                staged(out, force=True, folder=True),
            ):
                raise AssertionError("two at once")
            os.kill(process.pid, end)
            process.wait(60)
        assert listing(tmp_path) == ([] if end == signal.SIGINT else [".out.partial"])
    with staged(out, force=False, folder=True) as made:
        assert not list(made.iterdir())
        (made / "config.json").write_text("{}")
    assert listing(tmp_path) == ["out"]


def test_a_model_that_was_on_its_way_out_is_put_back(tmp_path: Path) -> None:
    """Killed between two renames, a process leaves the only copy there is of what was replaced."""
    old, out = tmp_path / ".out.partial" / "old", tmp_path / "out"
    for there in ("first", "second"):
        old.mkdir(parents=True)
        (old / "config.json").write_text(there)
        with (
            pytest.raises(OutputExistsError, match="already exists"),
            staged(out, force=False, folder=True),
        ):
            raise AssertionError("it is refused before hours of work")
        assert listing(tmp_path) == ["out"], "the second is of no use any more"
        assert (out / "config.json").read_text() == "first"


def test_the_working_folder_can_be_written(pth: Path, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    convert_transformer(pth, ".", force=True)
    assert (tmp_path / "here" / "config.json").is_file()
    assert listing(tmp_path) == ["here", "in.pth"]


def test_a_disk_without_links_asks_for_copies(pth, whole, tmp_path, monkeypatch) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise OSError(errno.EINVAL, "a required privilege is not held by the client")

    monkeypatch.setattr(Path, "symlink_to", refused)
    with pytest.raises(OutputExistsError, match="--copy"):
        convert_pipeline(pth, tmp_path / "out", base=whole)
    assert listing(tmp_path) == ["in.pth"]


def test_what_is_read_is_never_replaced(pth: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    convert_transformer(pth, folder)
    before = everything(folder)
    for name in ("diffusion_pytorch_model.safetensors", EXTRA_FILE, "config.json"):
        with pytest.raises(OutputExistsError, match="which is read"):
            write_checkpoint(folder, folder / name, force=True)
    assert everything(folder) == before
    # A checkpoint beside a config.json, which makes its folder look like a model.
    shutil.move(pth, folder / "in.pth")
    assert main(["convert", str(folder / "in.pth"), str(folder), "--force"]) == 2
    assert (folder / "in.pth").is_file()


@pytest.mark.parametrize("links", ["folders", "files"])
def test_a_base_that_links_into_the_target_is_refused(links, whole, pth, tmp_path) -> None:
    main_folder, other = tmp_path / "main", tmp_path / "other"
    convert_pipeline(pth, main_folder, base=whole, copy=True)
    weights = main_folder / "vae" / "diffusion_pytorch_model.safetensors"
    if links == "folders":
        convert_pipeline(pth, other, base=main_folder)
    else:
        shutil.copytree(whole, other)
        (other / "vae" / weights.name).unlink()
        (other / "vae" / weights.name).symlink_to(weights)
    for copy in (False, True):
        with pytest.raises(OutputExistsError, match="which is read"):
            convert_pipeline(pth, main_folder, base=other, copy=copy, force=True)
    assert load_file(weights) and not (main_folder / "vae").is_symlink()


# Bases that are wrong.


def gone(path: Path) -> None:
    path.unlink()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def words(path: Path) -> None:
    path.write_text(json.dumps(dict.fromkeys(json.loads(path.read_text()), "x")))


def leads_out(path: Path) -> None:
    index = json.loads(path.read_text())
    path.write_text(json.dumps(index | {"../secret": ["diffusers", "AutoencoderKLWan"]}))


WRONG: list[tuple[str, Callable[[Path], None]]] = [
    ("model_index.json", gone), ("model_index.json", cut), ("model_index.json", words),
    ("model_index.json", leads_out),
    ("transformer/config.json", cut), ("transformer/config.json", words),
    ("vae/config.json", gone), ("vae/config.json", cut),
    ("vae/diffusion_pytorch_model.safetensors", gone),
    ("vae/diffusion_pytorch_model.safetensors", cut),
    ("text_encoder/config.json", gone), ("text_encoder/model.safetensors", cut),
    ("tokenizer/tokenizer_config.json", cut),
]  # fmt: skip


def test_a_wrong_base_is_named(whole: Path, pth: Path, tmp_path: Path) -> None:
    base, out = Path(shutil.copytree(whole, tmp_path / "base")), tmp_path / "out"
    for file, damage in WRONG:
        before = (base / file).read_bytes()
        damage(base / file)
        with pytest.raises(TurboRCMError) as caught:
            convert_pipeline(pth, out, base=base)
        assert str(base) in str(caught.value) and file.split("/")[0] in str(caught.value), file
        assert not out.exists()
        (base / file).write_bytes(before)
    convert_pipeline(pth, out, base=base)


def test_a_base_of_another_family(pth: Path, whole: Path, tmp_path: Path) -> None:
    from turbo_rcm_patch.tiny import TINY_COGVIDEOX

    with pytest.raises(ModelFolderError, match=r"_class_name.*the same Wan model.*CogVideoX"):
        convert_pipeline(pth, tmp_path / "out", base=TINY_COGVIDEOX)
    with pytest.raises(ModelFolderError, match="has no model_index.json"):
        convert_pipeline(pth, tmp_path / "out", base=whole / "transformer")
