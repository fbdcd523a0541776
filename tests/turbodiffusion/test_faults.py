"""A disk that takes no more, and bases that are not what they should be: errors that name the
file, and nothing half written."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanPipeline

from tests import processes
from tests.turbodiffusion.test_convert_command import TINY, base_folder
from tests.turbodiffusion.wan_model import Options, save
from turbo_rcm_patch.errors import ModelFolderError, OutputExistsError, TurboRCMError
from turbo_rcm_patch.turbodiffusion import staging, write_checkpoint
from turbo_rcm_patch.turbodiffusion.convert import convert_pipeline, convert_transformer
from turbowan.models import load

#: A process whose files may have so many bytes: writing fails as on a full disk.
LIMITED = """
import resource, sys
from turbo_rcm_patch.__main__ import main
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)
sys.exit(main(sys.argv[2:]))
"""


def limited(size: int, *command: str) -> processes.Done:
    return processes.run(LIMITED, str(size), *command)


@pytest.fixture
def pth(tmp_path: Path) -> Path:
    save(TINY, tmp_path / "in.pth")
    return tmp_path / "in.pth"


def test_a_real_write_that_fails_is_told(pth: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = limited(2**16, "convert", str(pth), str(out))
    assert done.code == 2, done.err
    assert f"{out} could not be written" in done.err and "Traceback" not in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["in.pth"]
    convert_transformer(pth, out)
    done = limited(2**16, "convert", "--back", str(out), str(tmp_path / "back.pth"))
    assert done.code == 2 and "back.pth could not be written" in done.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.pth", "out"]


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("[enforce fail at inline_container.cc:672] . PytorchStreamWriter failed "
                     "writing file data/3: file write failed"),
        shutil.Error([("a", "b", "[Errno 28] No space left on device: 'b'")]),
        Exception("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
    ids=["python", "torch", "shutil", "safetensors"],
)  # fmt: skip
@pytest.mark.parametrize("folder", [True, False])
def test_a_full_disk_leaves_what_was_there(error: Exception, folder: bool, tmp_path: Path) -> None:
    target = tmp_path / "target"
    if folder:
        target.mkdir()
    (target / "config.json" if folder else target).write_text("before")
    with (
        pytest.raises(OutputExistsError, match=r"target could not be written.*GiB free"),
        staging.staged(target, force=True, folder=folder),
    ):
        raise error
    assert (target / "config.json" if folder else target).read_text() == "before"
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_other_errors_are_passed_on(tmp_path: Path) -> None:
    for error in (ModelFolderError("the base"), FileNotFoundError(2, "no"), KeyError("x")):
        with (
            pytest.raises(type(error)) as caught,
            staging.staged(tmp_path / "out", force=False, folder=True),
        ):
            raise error
        assert caught.value is error


def gone(path: Path) -> None:
    path.unlink()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def words(path: Path) -> None:
    path.write_text(json.dumps(dict.fromkeys(json.loads(path.read_text()), "x")))


WRONG: list[tuple[str, Callable[[Path], None]]] = [
    ("model_index.json", gone), ("model_index.json", cut), ("model_index.json", words),
    ("transformer/config.json", cut), ("transformer/config.json", words),
    ("vae/config.json", gone), ("vae/config.json", cut),
    ("vae/diffusion_pytorch_model.safetensors", gone),
    ("vae/diffusion_pytorch_model.safetensors", cut),
    ("text_encoder/config.json", gone), ("text_encoder/model.safetensors", cut),
    ("tokenizer/tokenizer_config.json", cut),
]  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base_folder(tmp_path_factory.mktemp("base") / "base")


@pytest.mark.parametrize(("file", "damage"), WRONG, ids=lambda x: getattr(x, "__name__", x))
def test_a_wrong_base_is_named(
    file: str, damage: Callable[[Path], None], whole: Path, pth: Path, tmp_path: Path
) -> None:
    base, out = Path(shutil.copytree(whole, tmp_path / "base")), tmp_path / "out"
    damage(base / file)
    with pytest.raises(TurboRCMError) as caught:
        convert_pipeline(pth, out, base=base)
    part = file.split("/")[0]
    assert str(base) in str(caught.value) and part in str(caught.value)
    assert not out.exists()


@pytest.mark.parametrize(
    ("file", "damage"),
    [*(one for one in WRONG if not one[0].startswith("transformer")),
     ("text_encoder/config.json", words), ("vae/config.json", words)],
    ids=lambda x: getattr(x, "__name__", x),
)  # fmt: skip
def test_the_scripts_name_it_too(
    file: str, damage: Callable[[Path], None], whole: Path, tmp_path: Path
) -> None:
    save(Options(text=32), tmp_path / "t.pth")
    convert_transformer(tmp_path / "t.pth", tmp_path / "t")
    base = Path(shutil.copytree(whole, tmp_path / "base"))
    damage(base / file)
    more: Any = dict(sla=False, device="cpu", dtype=torch.bfloat16)
    with pytest.raises(TurboRCMError) as caught:
        load(WanPipeline, [tmp_path / "t"], base, **more)
    assert str(base) in str(caught.value)
    assert torch.get_default_dtype() == torch.float32  # diffusers leaves another when it fails.


def test_a_base_of_another_family(pth: Path, whole: Path, tmp_path: Path) -> None:
    from turbo_rcm_patch.tiny import TINY_COGVIDEOX

    with pytest.raises(ModelFolderError, match=r"_class_name.*a pipeline of Wan.*CogVideoX"):
        convert_pipeline(pth, tmp_path / "out", base=TINY_COGVIDEOX)
    with pytest.raises(ModelFolderError, match="has no model_index.json"):
        convert_pipeline(pth, tmp_path / "out", base=whole / "transformer")


def test_a_checkpoint_that_cannot_be_written_back_leaves_no_trace(
    pth: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert_transformer(pth, tmp_path / "out")

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OutputExistsError, match=r"back\.pth could not be written"):
        write_checkpoint(tmp_path / "out", tmp_path / "back.pth")
    assert not list(tmp_path.glob("*back*"))
